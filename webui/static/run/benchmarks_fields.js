// @ts-check
// The settings of the next benchmark of a run.
import { el, setText } from "../dom.js";
import { integer } from "../format.js";
import { actions, button, createCheckbox, createModelMenu, createNumberField, labeled, modelName } from "./run_jobs.js";

/** What the figures were measured with: Final model, arc_easy, my_task.yaml, at most 100 samples of each task */
export function settingsText({ step, tasks, limit, shots }) {
  const samples = limit ? `at most ${integer(limit)} samples of each task` : "all samples";
  const prompts = shots === null ? "" : `${shots} few-shot ${shots === 1 ? "example" : "examples"}`;
  const names = tasks.map((task) => task.split("/").pop());
  return [modelName(step), names.join(", "), samples, prompts].filter(Boolean).join(", ");
}

/** @param {() => void} start */
export function createFields(start) {
  const parts = createParts();
  let isChat = /** @type {boolean | null} */ (null); // follows from the run's data; null before the first response
  let last = /** @type {any} */ (null); // the newest benchmark, whose settings the fields have at first
  parts.node.addEventListener("submit", (event) => {
    event.preventDefault();
    start();
  });
  /** @param {any} newest the newest benchmark, null without one */
  function draw(offer, isRunning, newest) {
    parts.node.hidden = isRunning || Boolean(offer.problem || offer.missing);
    parts.model.draw(offer.steps);
    if (isChat === null) parts.template.checked = offer.is_chat;
    isChat = offer.is_chat;
    const isOther = newest && newest.id !== last?.id;
    last = newest;
    if (isOther) fill(parts, newest.settings, offer.is_chat);
    setText(parts.button, last ? "Start another benchmark" : "Start benchmark");
  }
  function reset() {
    isChat = last = null;
    parts.tasks.value = parts.shots.input.value = "";
    parts.limit.input.value = "100";
    parts.base.checked = true;
    parts.code.checked = false;
    parts.model.draw([]); // another run may have a checkpoint of the same step
  }
  return { node: parts.node, values: () => valuesOf(parts, isChat), draw, reset, remove: parts.remove };
}

const valuesOf = ({ tasks, model, limit, shots, base, template, code }, isChat) => ({
  tasks: tasks.value,
  step: model.step(),
  limit: limit.input.valueAsNumber,
  shots: shots.input.value === "" ? null : shots.input.valueAsNumber,
  base: base.checked,
  chat_template: template.checked === isChat ? null : template.checked,
  allow_code: code.checked,
});

/** The consent to run code is given for each benchmark. */
function fill({ tasks, model, limit, shots, base, template, code }, settings, isChat) {
  tasks.value = settings.tasks.join(", ");
  model.choose(settings.step);
  limit.input.value = settings.limit;
  shots.input.value = settings.shots ?? "";
  base.checked = settings.base;
  template.checked = settings.chat_template ?? isChat;
  code.checked = false;
}

function createParts() {
  const tasks = el("input.fp-input", {
    type: "text",
    placeholder: "arc_easy, hellaswag, /home/ada/my_task.yaml",
    spellcheck: "false",
    autocomplete: "off",
  });
  const model = createModelMenu();
  const limit = createNumberField("Samples per task (0: all)", { step: 1, min: 0, max: 1000000, value: 100 });
  const shots = createNumberField("Few-shot examples", { step: 1, min: 0, max: 64, placeholder: "As the task sets" });
  const [base, template, code] = [createCheckbox({ checked: true }), createCheckbox(), createCheckbox()];
  const check = (box, text) => el("label.fp-job-check", {}, box, text);
  const numbers = el("div.fp-job-fields", {}, labeled("Model", model.node), limit.node, shots.node);
  const checks = el(
    "div.fp-benchmark-checks",
    {},
    check(base, "Measure the base model too"),
    check(template, "Prompts with the chat template"),
    check(code, "Allow tasks to run code: Python in the tasks, and programs that models write"),
  );
  const body = el("div.fp-job-settings", {}, numbers, checks);
  const settings = el("details.fp-fold", {}, el("summary", {}, "Settings"), body);
  const start = button("Start benchmark", null, { type: "submit" });
  const remove = button("Delete this benchmark", null, { hidden: true });
  const field = labeled("Tasks: lm-eval names, or YAML files on the server, separated by commas", tasks);
  // The server reports errors: the browser's own validation cannot show them while the settings are closed.
  const node = el("form.fp-job-form", { novalidate: true }, field, settings, actions(start, remove));
  return { node, tasks, model, limit, shots, base, template, code, button: start, remove };
}
