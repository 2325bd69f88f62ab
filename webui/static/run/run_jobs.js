// @ts-check
// Code shared by the cards of a run's jobs: chat, evaluation, merge, exports and publication.
import { post, remove, url } from "../api.js";
import { attempt, confirmDialog, copy, el, isFocusLost, redraw, setText } from "../dom.js";
import { capitalized, num, percent } from "../format.js";
import { hasEnded } from "../run_state.js";

const STATES = { queued: "Waiting", starting: "Starting", stopping: "Stopping" };

/** Whether a job waits or runs, so that the page asks for its progress. */
export const isAlive = (job) => Boolean(job) && !hasEnded(job.state);

/** Why a job failed and what helps; '' if it has not. */
export function failureText(job) {
  const hasFailed = job && hasEnded(job.state) && !["done", "stopped"].includes(job.state);
  return hasFailed ? `${job.failure?.sentence || job.sentence} ${job.failure?.help || ""}`.trim() : "";
}

/** The name of a model in menus and texts. @param {number | null} step */
export const modelName = (step) => (step === null ? "Final model" : `Checkpoint at step ${num(step)}`);

/** Show the error of a request, and the new state either way. @param {() => void} refresh */
export async function ask(request, refresh) {
  await attempt(() => request);
  refresh();
}

/** @param {string} id @param {{ base: string, refresh: () => void }} run base is its API path */
export const stopJob = (id, { base, refresh }) => ask(post(`${base}/jobs/${id}/stop`), refresh);
export const removeJob = (id, { base, refresh }) => ask(remove(`${base}/jobs/${id}`), refresh);

/** Draw parts of a card. If what had the focus is gone, the card's heading gets it. */
export function keepFocus(card, heading, draw) {
  const hadFocus = card.contains(document.activeElement);
  draw();
  if (hadFocus && isFocusLost()) heading.focus({ preventScroll: true });
}

// -- parts ------------------------------------------------------------------------------------------------------------

export const actions = (...children) => el("div.fp-run-actions", {}, ...children);
export const button = (label, onclick = null, attributes = {}) =>
  el("button.fp-button", { type: "button", onclick, ...attributes }, label);
/** The name of a button that several parts of a card have. */
export const named = (label, of) => ({ "aria-label": `${label}: ${of}` });
export const downloadLink = (label, path, attributes = {}) =>
  el("a.fp-button", { href: url(path), download: "", ...attributes }, label);

/**
 * Deletes a job. @param {string} id @param {{ base: string, refresh: () => void }} run base is its API path
 */
export function deleteButton(label, question, id, run, attributes = {}) {
  const removeIt = async () => {
    if (await confirmDialog(question, "Delete", true)) removeJob(id, run);
  };
  return button(label, removeIt, attributes);
}

export const failurePart = (text) => el("p.fp-job-failure", { hidden: !text, role: "alert" }, text);
/** Why an export failed, and a button that deletes what is left of it. @param {string} format */
export const failedPart = (job, format, run) =>
  el(
    "div.fp-failed-export",
    {},
    failurePart(`${format}: ${failureText(job)}`),
    actions(button("Delete", () => removeJob(job.id, run), named("Delete failed export", format))),
  );
/**
 * That an environment is not installed, and its command.
 * @param {string} missing sentences with the command in backticks, without the last period
 */
export function missingPart(missing) {
  const [before, command, after] = missing.split("`");
  return el(
    "div.fp-job-section",
    {},
    el("p", {}, before, el("code", {}, command), `${after}. Footplate needs no restart.`),
    actions(button("Copy command", () => copy(command, "Command"))),
  );
}
export const limitations = (limits) => limits.map((limit) => el("p.fp-dim", {}, `Limitation: ${limit}`));
export const ALL_FIGURES = "The file certificate.json in this folder has all figures.";
/** The status of a certificate, and what was compared. */
export const verdictPart = (status, text) => el("p.fp-job-verdict", {}, el("b", {}, capitalized(status)), `. ${text}`);

/**
 * What a certificate says about the outputs.
 * @param {{ kl_mean: number, same_argmax: number, positions: number }} found
 */
export const figures = ({ kl_mean: mean, same_argmax: same, positions }, limit) =>
  `KL divergence ${num(mean, 2)} nats per token (at most ${num(limit, 2)} is accepted), same most likely next token ` +
  `at ${percent(same)} of ${num(positions)} positions`;

/**
 * A function that draws a menu of formats, and a button that starts an export in the selected format: the first one,
 * until someone chooses.
 * @param {{ path: string, menu: string, text: string }} texts the end of the API's path, the name of the menu, the
 * button
 */
export function createFormatMenu({ path, menu, text }) {
  let chosen = "";
  /** @param {Record<string, string>} labels what the menu says of each format */
  return (labels, step, run) => {
    const selected = chosen in labels ? chosen : Object.keys(labels)[0];
    const options = Object.entries(labels).map(([format, label]) =>
      el("option", { value: format, selected: format === selected }, label),
    );
    const select = el("select.fp-select", { "aria-label": menu, onchange: () => (chosen = select.value) }, ...options);
    const start = () => ask(post(`${run.base}/${path}`, { step, format: select.value }), run.refresh);
    return actions(select, button(text, start));
  };
}

/**
 * The work and progress of a job, drawn in place, and a button that stops it.
 * @param {{ work: string, stop: string, stopping?: string }} texts the work, such as Merging; the button; what a stop
 * means
 */
export function createProgress({ work, stop, stopping = "Stopping." }) {
  const status = el("span.fp-dim", { role: "status" }); // read out by screen readers, without the numbers of `text`
  const text = el("p.fp-dim");
  const bar = el("span");
  const progress = el("div.fp-progress", { role: "progressbar", "aria-label": `${work}: progress` }, bar);
  const stopButton = button(stop);
  const node = el("div.fp-job-work", { hidden: true }, text, progress, actions(stopButton));
  /** @param {any} job none if nothing is done @param {() => void} onStop */
  function draw(job, onStop) {
    node.hidden = !job;
    setText(status, job ? STATES[job.state] || work : "");
    if (!job) return;
    progress.hidden = Boolean(job.address); // a server does not end by itself
    const share = 100 * (job.fraction || 0);
    const isStopping = job.state === "stopping";
    progress.setAttribute("aria-valuenow", String(Math.round(share)));
    setText(text, isStopping ? stopping : job.text || job.sentence);
    bar.style.width = `${share}%`;
    stopButton.disabled = isStopping;
    stopButton.onclick = onStop;
  }
  return { node, status, draw };
}

/** What is shown, without the progress of jobs. */
const withoutProgress = (shown) =>
  JSON.stringify(shown, (_, value) =>
    value?.state && isAlive(value) ? { ...value, state: "", text: "", sentence: "", fraction: 0 } : value,
  );

/**
 * A part of a card that is redrawn after a change. The progress of its job is drawn in place, so that an open menu
 * stays open.
 * @param {{ shown: (model: any) => any, parts: (shown: any, run: any, progress: Node) => any[], jobs?: (shown: any) =>
 * any[], work?: string, stop?: string }} section what it shows of a model, null for nothing; its jobs
 */
export function createSection({ shown: shownOf, parts, jobs = () => [], work = "", stop = "" }) {
  const node = el("div.fp-job-section");
  const progress = createProgress({ work, stop });
  let drawn = "";
  function draw(model, run) {
    const shown = shownOf(model);
    node.hidden = !shown;
    const key = withoutProgress([shown, run.base]);
    if (key !== drawn) redraw(node, ...(shown ? parts(shown, run, progress.node) : []));
    drawn = key;
    const job = shown && jobs(shown).find(isAlive);
    progress.draw(job, () => stopJob(job.id, run));
  }
  return { node, status: progress.status, draw };
}

// -- fields -----------------------------------------------------------------------------------------------------------

export const labeled = (label, field) => el("label.fp-job-field", {}, label, field);
/** @param {string} label @param {any} attributes limits, step and value */
export function createNumberField(label, attributes) {
  const input = el("input.fp-input", { type: "number", ...attributes });
  return { input, node: labeled(label, input) };
}
/** @param {any} attributes @returns {any} */
export const createCheckbox = (attributes = {}) => el("input.fp-checkbox", { type: "checkbox", ...attributes });

/** A menu of the models of a run, whose values are steps; null is the final model. Until someone chooses, it
 * selects the first one, which is the newest, even when a newer model is saved. */
export function createModelMenu() {
  const node = el("select.fp-select", { onchange: () => (isChosen = true) });
  let isChosen = false;
  const step = () => (node.value === "" ? null : Number(node.value));
  /** @param {number | null} wanted */
  function choose(wanted) {
    const value = String(wanted ?? "");
    isChosen = [...node.options].some((option) => option.value === value);
    if (isChosen) node.value = value;
  }
  /** @param {(number | null)[]} steps */
  function draw(steps) {
    const chosen = step();
    redraw(node, ...steps.map((each) => el("option", { value: each ?? "" }, modelName(each))));
    if (isChosen) choose(chosen);
  }
  return { node, step, choose, draw };
}
