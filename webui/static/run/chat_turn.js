// @ts-check
// A turn of the chat: the prompt, the outputs of each side, and the tokens of an output.
import { get } from "../api.js";
import { el, notifyError, setAttribute, setText } from "../dom.js";
import { integer, num, percent } from "../format.js";
import { modelName } from "./run_jobs.js";

export const SIDES = { trained: "Trained model", base: "Base model" };

/**
 * The node of a turn, and how to draw it again when more was generated.
 * @param {string} path of the chat's API @param {any} first the turn as it is now
 */
export function createTurn(path, first) {
  const outputs = first.sides.map((side) => createOutput(path, first, side));
  const node = el(
    "li.fp-chat-turn",
    {},
    el("div.fp-chat-prompt", {}, el("span.fp-sr", {}, "Prompt: "), first.prompt),
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

function createOutput(path, turn, side) {
  const text = el("div.fp-chat-text");
  const about = el("p.fp-chat-about.fp-dim.fp-figures");
  const details = el("div.fp-chat-details", { hidden: true });
  const button = el("button.fp-link", { type: "button", "aria-expanded": "false", hidden: true }, "Show tokens");
  button.addEventListener("click", () => toggleTokens(path, { turn: turn.id, side }, details, button));
  const name = side === "trained" && turn.step !== null ? modelName(turn.step) : SIDES[side];
  const node = el(
    "div.fp-chat-output",
    { "data-side": side, role: "group", "aria-label": name },
    el("h4", {}, name),
    text,
    el("div.fp-chat-foot", {}, about, button),
    details,
  );
  function draw(output, waiting) {
    const state = !output ? "waiting" : output.end === "error" ? "error" : output.end ? "done" : "generating";
    setAttribute(node, "data-state", state);
    setText(text, output?.error || scoreText(turn, output) || (output?.text || "").trimStart());
    setText(about, output?.end ? ending(output) : waiting);
    button.hidden = !output?.tokens;
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
    limit: `ended by the limit of ${integer(limit || 0)} tokens`,
    context: "ended at the model's context length",
    stopped: "stopped",
    error: "",
    scored: "",
  };
  if (!tokens) return end === "stopped" ? "Stopped" : "";
  return `${integer(tokens)} ${tokens === 1 ? "token" : "tokens"} in ${seconds.toFixed(1)} s, ${ends[end] || end}`;
}

async function toggleTokens(path, query, details, button) {
  const show = details.hidden;
  if (show && !details.childNodes.length) {
    button.disabled = true;
    try {
      details.replaceChildren(...tokenParts(await get(`${path}/tokens?${new URLSearchParams(query)}`)));
    } catch (error) {
      notifyError(error);
      return;
    } finally {
      button.disabled = false;
    }
  }
  details.hidden = !show;
  button.setAttribute("aria-expanded", String(show));
  setText(button, show ? "Hide tokens" : "Show tokens");
}

const LEAST = 0.001; // less probable tokens have the same color

/** The rendered prompt and the tokens of an output, colored by their probability. @returns {Node[]} */
function tokenParts({ prompt_tokens: before, tokens }) {
  const prompt = before.map(([id, text]) => el("span", { title: `Token ${id}` }, text));
  const output = tokens.map(([id, text, probability]) => {
    const node = el("span", { title: `Token ${id}, probability ${percent(probability)}` }, text);
    node.style.setProperty("--fp-doubt", String(Math.log(Math.max(LEAST, probability)) / Math.log(LEAST)));
    return node;
  });
  const least = tokens.length ? Math.min(...tokens.map(([, , probability]) => probability)) : 1;
  const about = `Stronger color: less probable token (lowest: ${percent(least)}), before temperature and top_p.`;
  return [
    el("h5", {}, `Prompt as the model sees it, ${integer(before.length)} tokens`),
    el("pre.fp-code.fp-chat-tokens", { tabindex: 0 }, prompt),
    el("h5", {}, `Output, ${integer(tokens.length)} tokens`),
    el("pre.fp-code.fp-chat-tokens", { tabindex: 0 }, output),
    el("p.fp-dim", {}, about),
  ];
}
