// @ts-check
// The settings of the next evaluation of a run.
import { el, setText } from "../dom.js";
import { duration, integer, num } from "../format.js";
import { createJudgeFields, judgeText } from "./evaluation_judge.js";
import { actions, button, createCheckbox, createModelMenu, createNumberField, labeled, modelName } from "./run_jobs.js";

const ABOUT_SCORES =
  "An output scores 1 if the regular expression matches anywhere in it, else 0. A score file defines " +
  "score(prompt, reference, output), which returns a number from 0 to 1, True, False, or None if it does not apply. " +
  "The code in the file runs on the server, with the permissions of the server's user, after you have agreed.";
const ABOUT_SAMPLES =
  "With several samples per prompt, a score is the mean over them. Binary scores, such as exact match, also have " +
  "pass@k, the probability that at least one of k samples is right. Samples need a temperature above 0, such " +
  "as 0.8. The same settings draw the same samples.";
const STOPPED = "This evaluation was stopped; with the same settings, Continue computes what is missing:";

const SHOWN_HASH = 12; // characters

/** What the figures were computed with: Final model, 100 validation examples, at most 48 new tokens */
export function settingsText({ settings, result }) {
  const { step, data, max_new_tokens: limit, regex, score_file: file, score_file_sha256: hash } = settings;
  const count = result ? result.examples : settings.examples;
  const from = data ? `of ${data}` : "of the validation set";
  const examples = count ? `${integer(count)} ${count === 1 ? "example" : "examples"} ${from}` : "";
  const tokens = result?.generated ? `at most ${integer(limit)} new tokens` : "";
  const sampled = result?.generated ? samplingText(settings) : "";
  const general = settings.general ? "general texts" : "";
  const pattern = regex && `${settings.regex_group ? "first group of " : ""}the regular expression ${regex}`;
  const code = file && `score file ${file} (SHA-256 ${hash.slice(0, SHOWN_HASH)}\u2026)`;
  return [modelName(step), examples, tokens, sampled, general, pattern, code, judgeText(settings)]
    .filter(Boolean)
    .join(", ");
}

/** 8 samples per prompt at temperature 0.8; nothing for greedy decoding. */
function samplingText({ samples_per_prompt: count, temperature, top_p: topP }) {
  if (!temperature) return "";
  const samples = count === 1 ? "1 sample per prompt" : `means over ${integer(count)} samples per prompt`;
  return `${samples} at temperature ${num(temperature)}${topP < 1 ? ` and top-p ${num(topP)}` : ""}`;
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
  let offered = /** @type {any} */ ({});
  parts.node.addEventListener("input", () => drawNext());
  function drawNext() {
    drawButton(parts, last);
    setText(parts.prediction, predictionText(valuesOf(parts), offered));
  }
  /** @param {any} newest the newest evaluation, null without one */
  function draw(offer, isRunning, newest) {
    parts.node.hidden = isRunning || Boolean(offer.problem);
    const isFirst = !drawn;
    if (drawn !== JSON.stringify(offer)) drawOffer(parts, offer, isFirst);
    drawn = JSON.stringify(offer);
    const isOther = newest && newest.id !== last?.id;
    last = newest;
    if (isOther) fill(parts, newest.settings);
    offered = offer;
    drawNext();
  }
  const reset = () => {
    drawn = parts.data.value = parts.regex.value = parts.file.value = "";
    last = null;
    parts.group.checked = false;
    parts.judge.fill(null);
    parts.model.draw([]); // another run may have a checkpoint of the same step
    parts.general.checked = true;
    fillSampling(parts, GREEDY);
  };
  return { node: parts.node, values: () => valuesOf(parts), draw, reset, remove: parts.remove };
}

const GREEDY = { samples_per_prompt: 1, temperature: 0, top_p: 1, pass_at_k: 0 };

const valuesOf = ({
  model,
  data,
  examples,
  tokens,
  samples,
  temperature,
  topP,
  k,
  general,
  regex,
  group,
  file,
  judge,
}) => ({
  step: model.step(),
  data: data.value.trim(),
  examples: examples.input.valueAsNumber,
  max_new_tokens: tokens.input.valueAsNumber,
  samples_per_prompt: samples.input.valueAsNumber,
  temperature: temperature.input.valueAsNumber,
  top_p: topP.input.valueAsNumber,
  pass_at_k: k.input.value === "" ? 0 : k.input.valueAsNumber,
  general: general.checked,
  regex: regex.value,
  regex_group: group.checked,
  score_file: file.value.trim(),
  ...judge.values(),
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

/** The prediction, in the words of `footplate evaluate`. */
function predictionText({ examples, data, max_new_tokens: limit, samples_per_prompt: samples }, offer) {
  const kept = data === offer.kept_file ? offer.kept : null;
  const known = data ? kept : offer.validation_examples;
  const count = 2 * Math.min(examples, known ?? examples) * samples;
  if (!(count > 0) || !offer.generates) return "";
  const text = `Generating at most ${integer(count)} outputs of both models`;
  const each = offer.output_seconds;
  if (!each) return `${text}; how long that takes is known after the first evaluation of this run.`;
  const time = duration(count * each * Math.max(1, limit / offer.output_limit));
  return `${text} takes at most about ${time}, at the pace of the newest evaluation of this run.`;
}

function drawOffer({ model, examples, tokens, data, kept, sampling, scores }, offer, isFirst) {
  kept.hidden = !offer.kept;
  setText(kept, `Use the ${offer.kept === 1 ? "prompt" : `${integer(offer.kept)} prompts`} kept from chats`);
  kept.onclick = () => {
    data.value = offer.kept_file;
    if (examples.input.value === "0") examples.input.value = String(offer.kept);
    data.dispatchEvent(new Event("input", { bubbles: true }));
  };
  model.draw(offer.steps);
  tokens.node.hidden = sampling.hidden = scores.hidden = !offer.generates;
  data.placeholder = offer.has_validation ? "Validation set" : "No validation set";
  if (!isFirst) return;
  tokens.input.value = String(offer.max_new_tokens);
  examples.input.value = offer.has_validation ? "100" : "0";
}

function fillSampling({ samples, temperature, topP, k }, settings) {
  samples.input.value = settings.samples_per_prompt;
  temperature.input.value = settings.temperature;
  topP.input.value = settings.top_p;
  k.input.value = settings.pass_at_k || "";
}

function fill(parts, settings) {
  const { model, data, examples, tokens, general, regex, group, file, judge } = parts;
  fillSampling(parts, settings);
  model.choose(settings.step);
  data.value = settings.data;
  examples.input.value = settings.examples;
  tokens.input.value = settings.max_new_tokens;
  general.checked = settings.general;
  regex.value = settings.regex;
  group.checked = settings.regex_group;
  file.value = settings.score_file;
  judge.fill(settings);
  for (const part of parts.node.querySelectorAll("details details")) part.open ||= hasValue(part);
}

/** Whether a field in a folded part is set. */
const hasValue = (part) =>
  [...part.querySelectorAll("input, textarea")].some((field) =>
    field.type === "checkbox" ? field.checked : field.value !== field.defaultValue,
  );

function createParts() {
  const model = createModelMenu();
  const examples = createNumberField("Examples (0: none)", { step: 1, min: 0, max: 10000, value: 100 });
  const tokens = createNumberField("Maximum new tokens", { step: 1, min: 1, max: 32768, value: 256 });
  const data = el("input.fp-input", { type: "text", placeholder: "Validation set" });
  const general = createCheckbox({ checked: true });
  const dataField = labeled("Data file on the server", data);
  const kept = el("button.fp-link", { type: "button", hidden: true });
  const numbers = el("div.fp-job-fields", {}, labeled("Model", model.node), examples.node, tokens.node, dataField);
  const check = el("label.fp-job-check", {}, general, "Include general texts");
  const custom = createCustomScores();
  const drawn = createSampling();
  const body = el("div.fp-job-settings", {}, numbers, kept, check, drawn.sampling, custom.scores);
  const settings = fold("Settings", body);
  const stopped = el("p.fp-dim", { hidden: true });
  const prediction = el("p.fp-dim.fp-figures");
  const start = button("Evaluate", null, { type: "submit" });
  const remove = button("Delete this evaluation", null, { hidden: true });
  // The server reports errors: the browser's own validation cannot show them while the settings are closed.
  const node = el("form.fp-job-form", { novalidate: true }, settings, stopped, prediction, actions(start, remove));
  const fields = { model, examples, tokens, data, kept, general, ...drawn, ...custom };
  return { node, ...fields, button: start, stopped, prediction, remove };
}

const fold = (title, body) => el("details.fp-fold", {}, el("summary", {}, title), body);

/** The fields for sampling outputs. */
function createSampling() {
  const samples = createNumberField("Samples per prompt", { step: 1, min: 1, max: 64, value: 1 });
  const temperature = createNumberField("Temperature (0: greedy)", { step: "any", min: 0, max: 10, value: 0 });
  const topP = createNumberField("Top-p", { step: "any", min: 0, max: 1, value: 1 });
  const k = createNumberField("Additional k for pass@k", { step: 1, min: 2, max: 63, placeholder: "None" });
  const fields = el("div.fp-job-fields", {}, samples.node, temperature.node, topP.node, k.node);
  const body = el("div.fp-job-settings", {}, fields, el("p.fp-dim", {}, ABOUT_SAMPLES));
  const sampling = fold("Several samples per prompt", body);
  return { sampling, samples, temperature, topP, k };
}

/** The fields of the scores that users define. */
function createCustomScores() {
  const regex = el("input.fp-input", { type: "text", placeholder: "None", spellcheck: "false" });
  const file = el("input.fp-input", { type: "text", placeholder: "None" });
  const group = createCheckbox();
  const fields = el("div.fp-job-fields.fp-custom-scores", {});
  fields.append(labeled("Regular expression for outputs", regex), labeled("Score file (Python) on the server", file));
  const check = el("label.fp-job-check", {}, group, "Compare the expression's first group with the reference's");
  const about = el("p.fp-dim", {}, ABOUT_SCORES);
  const judge = createJudgeFields();
  const own = fold("Your own scores", el("div.fp-job-settings", {}, fields, check, about));
  const scores = el("div.fp-job-settings", {}, own, fold("LLM judge", judge.node));
  return { scores, regex, file, group, judge };
}
