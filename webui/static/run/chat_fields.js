// @ts-check
// The fields of the chat: the prompt, which models generate, the system prompt and the sampling settings.
import { el, setText } from "../dom.js";
import { createCheckbox, createModelMenu, createNumberField, labeled } from "./run_jobs.js";

const KEYS = "Enter sends, Shift+Enter begins a new line";
const TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]';
const PLACEHOLDERS = { chat: "Prompt", text: "A text that the model continues", score: "Prompt" };

/** @param {() => void} send */
export function createFields(send) {
  const parts = createParts();
  const { node, prompt } = parts;
  let drawn = "";
  node.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  function draw(offer, last, isGenerating, loaded) {
    drawSend(parts.send, isGenerating);
    drawTemplate(parts, loaded, last);
    parts.historyRow.hidden = !last || offer.mode !== "chat";
    if (drawn === JSON.stringify(offer)) return;
    const isFirst = !drawn;
    drawn = JSON.stringify(offer);
    drawOffer(parts, offer);
    if (!isFirst) return;
    parts.system.value = last?.system ?? offer.system;
    parts.compare.checked = Boolean(last?.sides.includes("base"));
    parts.history.checked = offer.history;
    parts.tools.value = last?.tools ?? "";
    if (last) {
      parts.model.choose(last.step);
      parts.settings.fill(last);
    }
  }
  const request = () => requestOf(parts);
  const sent = () => {
    prompt.value = "";
    parts.role.value = "user";
  };
  let samples = [];
  let next = 0; // position of the example that the button fills in next
  parts.example.addEventListener("click", () => {
    prompt.value = samples[next].prompt;
    parts.history.checked = false; // the example does not continue this conversation
    next = (next + 1) % samples.length;
    prompt.focus();
  });
  /** @param {{ prompt: string }[]} given examples of the validation set */
  function offerSamples(given) {
    samples = given;
    parts.example.hidden = !given.length;
  }
  /** Reset the fields, for a run that was not shown before. */
  function reset() {
    [next, drawn] = [0, ""];
    parts.model.draw([]); // another run may have a checkpoint of the same step
    sent();
    for (const field of [parts.tools, ...parts.answers]) field.value = "";
    parts.thinking.name = "";
    parts.compare.checked = false;
  }
  return { node, actions: parts.actions, draw, request, sent, offerSamples, reset };
}

/** What the fields ask for. */
const requestOf = (parts) => ({
  kind: "generate",
  prompt: parts.prompt.value,
  role: parts.roleRow.hidden ? "user" : parts.role.value,
  answers: parts.answersRow.hidden ? [] : parts.answers.map(({ value }) => value),
  sides: parts.compare.checked && !parts.compareRow.hidden ? ["trained", "base"] : ["trained"],
  step: parts.model.step(),
  history: parts.history.checked,
  system: parts.systemRow.hidden ? "" : parts.system.value,
  tools: parts.toolsRow.hidden ? "" : parts.tools.value,
  template_kwargs:
    parts.thinkingRow.hidden || !parts.thinking.value ? {} : { [parts.thinking.name]: parts.thinking.value === "true" },
  ...parts.settings.values(),
});

/** What the chat template reads besides the turns. It is known once a model is loaded. */
function drawTemplate(parts, loaded, last) {
  parts.toolsRow.hidden = !loaded.tools;
  parts.roleRow.hidden = !loaded.tools || !last;
  parts.thinkingRow.hidden = !loaded.thinking;
  const name = loaded.thinking || "";
  if (name !== parts.thinking.name) parts.thinking.value = String(last?.template_kwargs[name] ?? "");
  parts.thinking.name = name;
}

function drawSend(button, isGenerating) {
  button.disabled = isGenerating;
  button.title = isGenerating ? "An output is being generated. Stop it, or wait." : "";
}

function createParts() {
  const area = (label, rows, attributes = {}) => el("textarea.fp-input", { "aria-label": label, rows, ...attributes });
  const prompt = area("Prompt", 3, { enterkeyhint: "send" });
  const answers = [1, 2].map((number) => area(`Completion ${number}`, 2, { placeholder: `Completion ${number}` }));
  const model = createModelMenu();
  const [compare, history] = [createCheckbox(), createCheckbox()];
  const system = area("System prompt", 3);
  const settings = createSettings();
  const send = el("button.fp-button.fp-primary", { type: "submit" }, "Send");
  const actions = el("div.fp-chat-actions", {}, send);
  const answersRow = el("div.fp-chat-answer-fields", {}, answers);
  const compareRow = el("label.fp-job-check", {}, compare, "Compare with the base model");
  const historyRow = el("label.fp-job-check", {}, history, "Include earlier turns");
  const systemRow = labeled("System prompt, as in training unless you change it", system);
  const tools = area("Tools", 3, { placeholder: TOOLS, spellcheck: "false" });
  const toolsRow = labeled("Tools: a JSON list of definitions in OpenAI's format; empty for none", tools);
  const thinking = createMenu("Reasoning", { "": "As in training", true: "On", false: "Off" });
  const thinkingRow = el("label.fp-job-check", {}, "Reasoning", thinking);
  const role = createMenu("Send as", { user: "User", tool: "Tool result" });
  const roleRow = el("label.fp-job-check", {}, "Send as", role);
  const variables = el("p.fp-dim");
  const body = el("div.fp-job-settings", {}, systemRow, toolsRow, thinkingRow, variables, settings.node);
  const fold = el("details.fp-fold", {}, el("summary", {}, "System prompt and settings"), body);
  const models = el("label.fp-job-check", {}, "Model", model.node);
  const example = el("button.fp-link", { type: "button", hidden: true }, "Validation example");
  example.title = "Fill in the prompt of a validation example";
  const bar = el("div.fp-chat-bar", {}, actions, example, el("span.fp-gap"), roleRow, models, compareRow, historyRow);
  const node = el("form.fp-job-form", { hidden: true }, prompt, answersRow, bar, fold);
  return {
    ...{ node, prompt, answers, answersRow, model, compare, compareRow, system, systemRow, variables },
    ...{ settings, actions, send, example, history, historyRow },
    ...{ tools, toolsRow, thinking, thinkingRow, role, roleRow },
  };
}

/** @param {string} label @param {Record<string, string>} options value -> label */
const createMenu = (label, options) =>
  el(
    "select.fp-select",
    { "aria-label": label },
    Object.entries(options).map(([value, label]) => el("option", { value }, label)),
  );

/** What can be asked of the run's models. */
function drawOffer({ model, prompt, answersRow, systemRow, compareRow, variables, settings }, offer) {
  model.draw(offer.steps);
  prompt.placeholder = `${PLACEHOLDERS[offer.mode]}. ${KEYS}.`;
  answersRow.hidden = offer.mode !== "score";
  systemRow.hidden = offer.mode === "text";
  compareRow.hidden = Boolean(offer.without_base);
  settings.node.hidden = offer.mode === "score";
  const given = Object.entries(offer.template_kwargs).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  variables.hidden = !given.length;
  setText(variables, `Variables of the chat template, as in training: ${given.join(", ")}`);
}

/** The sampling settings. */
function createSettings() {
  const field = (label, name, attributes) => createNumberField(label, { name, ...attributes });
  const temperature = field("Temperature (0: greedy)", "temperature", { min: 0, max: 10, step: "any", value: 0 });
  const topP = field("top_p", "top_p", { min: 0, max: 1, step: "any", value: 1 });
  const tokens = field("Maximum new tokens", "max_new_tokens", { min: 1, max: 32768, step: 1, value: 256 });
  const seed = field("Seed (empty: random)", "seed", { min: 0, step: 1 });
  const all = [temperature, topP, tokens, seed];
  const node = el(
    "div.fp-job-fields",
    {},
    all.map((each) => each.node),
  );
  const values = () => ({
    temperature: Number(temperature.input.value),
    top_p: Number(topP.input.value || 1),
    max_new_tokens: Number(tokens.input.value || 256),
    seed: seed.input.value === "" ? null : Number(seed.input.value),
  });
  const fill = ({ temperature: heat, top_p: share, max_new_tokens: most, seed: given }) => {
    [heat, share, most, given].forEach((value, n) => (all[n].input.value = value ?? ""));
  };
  return { node, values, fill };
}
