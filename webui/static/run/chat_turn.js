// @ts-check
// A turn of the chat: the prompt, the outputs of each side, the tokens of an output, and what can be done with it.
import { get, post } from "../api.js";
import { copy, el, formDialog, notify, notifyError, setAttribute, setText } from "../dom.js";
import { integer, num, percent } from "../format.js";
import { modelName } from "./run_jobs.js";
import { fold } from "./run_results.js";

export const SIDES = { trained: "Trained model", base: "Base model" };

/**
 * The node of a turn, and how to draw it again when more was generated.
 * @param {string} path of the chat's API @param {any} first the turn as it is now @param {string} mode of the model
 */
export function createTurn(path, first, mode) {
  const outputs = first.sides.map((side) => createOutput(path, first, side, mode));
  const isTool = first.role === "tool";
  const node = el(
    "li.fp-chat-turn",
    {},
    el(
      "div.fp-chat-prompt",
      {},
      isTool ? el("span.fp-chat-role", {}, "Tool result") : el("span.fp-sr", {}, "Prompt: "),
      first.prompt,
    ),
    first.answers.length
      ? el(
          "ol.fp-chat-answers",
          {},
          first.answers.map((text) => el("li", {}, text)),
        )
      : null,
    el(
      "div.fp-chat-outputs",
      { "data-count": outputs.length },
      outputs.map((output) => output.node),
    ),
  );
  function draw(turn, waiting) {
    const hasBegun = Object.keys(turn.outputs).length > 0;
    first.sides.forEach((side, n) => {
      const output = turn.outputs[side];
      outputs[n].draw(output, output ? "Generating" : hasBegun ? "Waiting for the other model" : waiting);
    });
  }
  return { node, draw };
}

function createOutput(path, turn, side, mode) {
  const text = el("div.fp-chat-text");
  const reasoning = createReasoning(text);
  const about = el("p.fp-chat-about.fp-dim.fp-figures");
  const details = el("div.fp-chat-details", { hidden: true });
  const code = el("div.fp-chat-details", { hidden: true });
  const query = new URLSearchParams({ turn: turn.id, side });
  const links = el("span.fp-chat-links", { hidden: true });
  links.append(toggle("tokens", details, async () => tokenParts(await get(`${path}/tokens?${query}`))));
  if (side === "trained") {
    links.append(toggle("code", code, async () => codeParts(await get(`${path}/code?turn=${turn.id}`))));
    if (mode === "chat") links.append(keepLink(path, turn.id, () => shown));
  }
  let shown = /** @type {any} */ (null); // the output as it was drawn
  const name = side === "trained" && turn.step !== null ? modelName(turn.step) : SIDES[side];
  const node = el(
    "div.fp-chat-output",
    { "data-side": side, role: "group", "aria-label": name },
    el("h4", {}, name),
    text,
    el("div.fp-chat-foot", {}, about, links),
    details,
    code,
  );
  function draw(output, waiting) {
    const state = !output ? "waiting" : output.end === "error" ? "error" : output.end ? "done" : "generating";
    setAttribute(node, "data-state", state);
    shown = output;
    reasoning(output);
    const whole = output?.answer ?? output?.written ?? output?.text ?? "";
    setText(text, output?.error || scoreText(turn, output) || whole.trimStart());
    setText(about, output?.end ? ending(output) : waiting);
    links.hidden = !output?.tokens;
  }
  return { node, draw };
}

/** The scores of a reward model's two answers. */
function scoreText(turn, output) {
  if (!output?.scores) return "";
  const [first, second] = output.scores;
  const verdict =
    first === second ? "Both completions have the same score." : `Completion ${first > second ? 1 : 2} is preferred.`;
  return `${verdict}\nCompletion 1: ${num(first)}\nCompletion 2: ${num(second)}`;
}

/** How long an output took and how it ended. */
export function ending({ end, tokens, seconds, stop, limit }) {
  const ends = {
    "stop token": `ended with ${stop}`,
    limit: `ended at the limit of ${integer(limit || 0)} tokens`,
    context: "ended at the model's context length",
    stopped: "stopped",
    error: "",
    scored: "",
  };
  if (!tokens) return end === "stopped" ? "Stopped" : "";
  return `${integer(tokens)} ${tokens === 1 ? "token" : "tokens"} in ${seconds.toFixed(1)} s, ${ends[end] || end}`;
}

/**
 * Draws the reasoning of an output before its `text`, if it has one. The reasoning is open at first if the answer has
 * not begun.
 * @param {HTMLElement} text
 */
function createReasoning(text) {
  const content = el("div.fp-chat-text");
  const node = el("details.fp-fold.fp-chat-reasoning", {}, el("summary", {}, "Reasoning"), content);
  return (output) => {
    if (output?.reasoning === undefined) return node.remove();
    if (!node.isConnected) {
      node.open = !output.answer;
      text.before(node);
    }
    setText(content, output.reasoning.trim());
  };
}

/**
 * A button that shows and hides a part of an output. @param {string} what @param {any} part
 * @param {() => Promise<any[]>} load the content of the part, once
 */
function toggle(what, part, load) {
  const button = el("button.fp-link", { type: "button", "aria-expanded": "false" }, `Show ${what}`);
  button.addEventListener("click", async () => {
    const show = part.hidden;
    if (show && (what === "code" || !part.childNodes.length)) {
      button.disabled = true;
      try {
        part.replaceChildren(...(await load()));
      } catch (error) {
        notifyError(error);
        return;
      } finally {
        button.disabled = false;
      }
    }
    part.hidden = !show;
    button.setAttribute("aria-expanded", String(show));
    setText(button, `${show ? "Hide" : "Show"} ${what}`);
  });
  return button;
}

const CODE = {
  python: "Python code (transformers, peft)",
  openai: "Python code for the model that is being served (openai)",
  curl: "Request to the model that is being served (curl)",
};

/** Code that generates an output again. @returns {Node[]} */
function codeParts(found) {
  const blocks = Object.entries(CODE).filter(([name]) => found[name]);
  const parts = blocks.map(([name, title], n) => {
    const part = fold(title, el("pre.fp-code", { tabindex: 0 }, found[name]), () => copy(found[name], "Code"));
    part.open = n === 0;
    return part;
  });
  const others = "Requests with curl and the openai package are also shown while a model of this run is being served.";
  return [...parts, el("p.fp-dim", {}, found.served || others)];
}

const KEEP =
  "Evaluations generate outputs for the prompt of this conversation and compare them with the reference, the output " +
  "that you want. The model's output is filled in as the reference; edit it if it is wrong.";

/** A button that keeps the conversation for evaluations. @param {() => any} output the output as it is now */
function keepLink(path, turn, output) {
  const button = el("button.fp-link", { type: "button" }, "Keep for evaluation");
  button.addEventListener("click", () => {
    const { answer, text } = output();
    const reference = el("textarea.fp-input.fp-chat-reference", { rows: 6 });
    reference.value = (answer ?? text).trim();
    const fields = [el("p.fp-dim", {}, KEEP), el("label.fp-job-field", {}, "Reference", reference)];
    const keep = async () => {
      const { path: file, count } = await post(`${path}/kept`, { turn, reference: reference.value });
      const has = count === 1 ? "has 1 prompt" : `has ${integer(count)} prompts`;
      notify(`Kept in ${file}, which ${has} now. Evaluations of all runs offer this file in their settings.`);
    };
    formDialog("Keep for evaluation", fields, keep, { wide: true, label: "Keep" });
  });
  return button;
}

const LEAST = 0.001; // all tokens less probable than this have the same color

/** The rendered prompt and the tokens of an output, colored by their probability. @returns {Node[]} */
function tokenParts({ prompt_tokens: before, tokens }) {
  const prompt = before.map(([id, text]) => el("span", { title: `Token ${id}` }, text));
  const output = tokens.map(([id, text, probability]) => {
    const node = el("span", { title: `Token ${id}, probability ${percent(probability)}` }, text);
    node.style.setProperty("--fp-doubt", String(Math.log(Math.max(LEAST, probability)) / Math.log(LEAST)));
    return node;
  });
  const least = tokens.length ? Math.min(...tokens.map(([, , probability]) => probability)) : 1;
  const lowest = `(lowest: ${percent(least)}), before temperature and top_p.`;
  const about = `The stronger the color, the less probable the token ${lowest}`;
  return [
    el("h5", {}, `Prompt as the model sees it, ${integer(before.length)} tokens`),
    el("pre.fp-code.fp-chat-tokens", { tabindex: 0 }, prompt),
    el("h5", {}, `Output, ${integer(tokens.length)} tokens`),
    el("pre.fp-code.fp-chat-tokens", { tabindex: 0 }, output),
    el("p.fp-dim", {}, about),
  ];
}
