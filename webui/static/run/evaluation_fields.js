// @ts-check
// The settings of the next evaluation of a run.
import { el, redraw, setText } from "../dom.js";
import { modelName } from "./chat_turn.js";

const STOPPED = "The evaluation was stopped. With the same settings, Continue computes only what is missing.";

/** @param {() => void} start */
export function createFields(start) {
  const { node, model, examples, tokens, data, general, button, stopped } = createParts();
  node.addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  let drawn = "";
  const values = () => ({
    step: model.value === "" ? null : Number(model.value),
    data: data.value.trim(),
    examples: examples.input.valueAsNumber,
    max_new_tokens: tokens.input.valueAsNumber,
    general: general.checked,
  });
  function draw(offer, isRunning, hasResult, failed) {
    node.hidden = isRunning || Boolean(offer.problem);
    const name = failed?.state === "stopped" ? "Continue" : hasResult || failed ? "Evaluate again" : "Evaluate";
    setText(button, name);
    stopped.hidden = name !== "Continue";
    if (drawn === JSON.stringify(offer)) return;
    const isFirst = !drawn;
    drawn = JSON.stringify(offer);
    const chosen = model.value;
    redraw(model, ...offer.steps.map((step) => el("option", { value: step ?? "" }, modelName(step))));
    if (offer.steps.some((step) => String(step ?? "") === chosen)) model.value = chosen;
    tokens.node.hidden = !offer.generates;
    data.placeholder = offer.has_validation ? "Validation examples of the run" : "None: this run has no validation set";
    if (!isFirst) return;
    tokens.input.value = String(offer.max_new_tokens);
    examples.input.value = offer.has_validation ? "100" : "0";
    if (failed) fill(failed.settings);
  }
  function fill(settings) {
    model.value = settings.step ?? "";
    data.value = settings.data;
    examples.input.value = settings.examples;
    tokens.input.value = settings.max_new_tokens;
    general.checked = settings.general;
  }
  const reset = () => {
    drawn = data.value = "";
    general.checked = true;
  };
  return { node, values, draw, reset };
}

function createParts() {
  const number = (label, attributes) => {
    const input = el("input.fp-input", { type: "number", step: 1, ...attributes });
    return { input, node: el("label.fp-chat-field", {}, label, input) };
  };
  const model = el("select.fp-select");
  const examples = number("Examples (0: none)", { min: 0, max: 10000, value: 100 });
  const tokens = number("Maximum new tokens", { min: 1, max: 32768, value: 256 });
  const data = el("input.fp-input", { type: "text", placeholder: "Validation examples of the run" });
  const general = el("input.fp-checkbox", { type: "checkbox", checked: true });
  const numbers = el(
    "div.fp-chat-numbers",
    {},
    el("label.fp-chat-field", {}, "Model", model),
    examples.node,
    tokens.node,
    el("label.fp-chat-field", {}, "Data file on the server", data),
  );
  const button = el("button.fp-button", { type: "submit" }, "Evaluate");
  const check = el("label.fp-chat-check", {}, general, "Include general texts");
  const body = el("div.fp-chat-settings", {}, numbers, check);
  const settings = el("details.fp-fold", {}, el("summary", {}, "Settings"), body);
  const stopped = el("p.fp-dim", { hidden: true }, STOPPED);
  // Without the browser's own checks, which cannot show what is wrong in closed settings; the server says it.
  const node = el("form.fp-chat-form", { novalidate: true }, settings, stopped, el("div.fp-chat-actions", {}, button));
  return { node, model, examples, tokens, data, general, button, stopped };
}
