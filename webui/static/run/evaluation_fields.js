// @ts-check
// The settings of the next evaluation of a run.
import { el, redraw, setText } from "../dom.js";
import { integer } from "../format.js";
import { modelName } from "./chat_turn.js";

const STOPPED = "This evaluation was stopped; with the same settings, Continue computes what is missing:";

/** What the figures were computed with: Final model, 100 validation examples, at most 48 new tokens */
export function settingsText({ settings, result }) {
  const { step, data, max_new_tokens: limit } = settings;
  const count = result ? result.examples : settings.examples;
  const from = data ? `of ${data}` : "of the validation set";
  const examples = count ? `${integer(count)} ${count === 1 ? "example" : "examples"} ${from}` : "";
  const tokens = result?.generated ? `at most ${integer(limit)} new tokens` : "";
  const general = settings.general ? "general texts" : "";
  return [modelName(step), examples, tokens, general].filter(Boolean).join(", ");
}

/** @param {() => void} start */
export function createFields(start) {
  const parts = createParts();
  let drawn = "";
  let last = /** @type {any} */ (null); // the newest evaluation, whose settings the fields have at first
  parts.node.addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  parts.node.addEventListener("input", () => drawButton(parts, last));
  /** @param {any} newest the newest evaluation, null without one */
  function draw(offer, isRunning, newest) {
    parts.node.hidden = isRunning || Boolean(offer.problem);
    const isFirst = !drawn;
    if (drawn !== JSON.stringify(offer)) drawOffer(parts, offer, isFirst);
    drawn = JSON.stringify(offer);
    const isOther = newest && newest.id !== last?.id;
    last = newest;
    if (isOther) fill(parts, newest.settings, offer.steps);
    drawButton(parts, last);
  }
  const reset = () => {
    drawn = parts.data.value = "";
    last = null;
    parts.model.replaceChildren(); // a step of this run may be one of the next run, too
    parts.general.checked = true;
  };
  return { node: parts.node, values: () => valuesOf(parts), draw, reset, remove: parts.remove };
}

const valuesOf = ({ model, data, examples, tokens, general }) => ({
  step: model.value === "" ? null : Number(model.value),
  data: data.value.trim(),
  examples: examples.input.valueAsNumber,
  max_new_tokens: tokens.input.valueAsNumber,
  general: general.checked,
});

/** What the button does with the values that the fields have now. */
function drawButton(parts, last) {
  const own = valuesOf(parts);
  const isSame = Boolean(last) && Object.keys(own).every((key) => own[key] === last.settings[key]);
  const isStopped = last?.state === "stopped";
  setText(parts.button, isStopped && isSame ? "Continue" : last ? "Evaluate again" : "Evaluate");
  parts.stopped.hidden = !isStopped;
  if (isStopped) setText(parts.stopped, `${STOPPED} ${settingsText(last)}.`);
}

function drawOffer({ model, examples, tokens, data }, offer, isFirst) {
  const chosen = model.value;
  redraw(model, ...offer.steps.map((step) => el("option", { value: step ?? "" }, modelName(step))));
  if (offer.steps.some((step) => String(step ?? "") === chosen)) model.value = chosen;
  tokens.node.hidden = !offer.generates;
  data.placeholder = offer.has_validation ? "Validation examples of the run" : "None: this run has no validation set";
  if (!isFirst) return;
  tokens.input.value = String(offer.max_new_tokens);
  examples.input.value = offer.has_validation ? "100" : "0";
}

function fill({ model, data, examples, tokens, general }, settings, steps) {
  if (steps.includes(settings.step)) model.value = settings.step ?? "";
  data.value = settings.data;
  examples.input.value = settings.examples;
  tokens.input.value = settings.max_new_tokens;
  general.checked = settings.general;
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
  const stopped = el("p.fp-dim", { hidden: true });
  // Without the browser's own checks, which cannot show what is wrong in closed settings; the server says it.
  const remove = el("button.fp-button", { type: "button", hidden: true }, "Delete this evaluation");
  const buttons = el("div.fp-chat-actions", {}, button, remove);
  const node = el("form.fp-chat-form", { novalidate: true }, settings, stopped, buttons);
  return { node, model, examples, tokens, data, general, button, stopped, remove };
}
