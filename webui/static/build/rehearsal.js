// @ts-check
// The rehearsal of the form's values: its phases, each with its time and the peak memory so far.
import { post } from "../api.js";
import { $, el, notifyError, setText } from "../dom.js";
import { bytes, duration } from "../format.js";
import { failureParts } from "../run/failure.js";
import { createDraftTask } from "./draft_task.js";

const TITLES = { running: "Rehearsal", done: "Rehearsal passed", stopped: "Rehearsal stopped" };
const task = createDraftTask("rehearsal", { api: "api/rehearsals", draw, dismiss });
let drawn = "";

/** The form has these values now: mark a rehearsal of other values. @param {Record<string, any>} values
 * @param {string} machine */
export function compareRehearsal(values, machine) {
  task.compare(values, machine);
  if (task.id()) drawOutdated();
}

function drawOutdated() {
  const box = $("#fp-rehearsal");
  const isOutdated = task.isOutdated();
  const title = $("#fp-rehearsal h3");
  if (title) setText(title, isOutdated ? `${box.dataset.title} with earlier values of the form` : box.dataset.title);
  box.classList.toggle("fp-outdated", isOutdated);
}

/** Start a rehearsal. @param {Record<string, any>} values of the form @param {string} machine that they are for */
export async function startRehearsal(values, machine) {
  const button = $("#fp-try");
  button.disabled = true;
  try {
    const { id } = await post("api/rehearsals", { values, machine });
    task.keep(id, values, machine);
    drawOutdated();
  } catch (error) {
    notifyError(error);
    button.disabled = false;
  }
}

export const resumeRehearsal = task.resume;
export const isRehearsing = task.isActive;

function dismiss() {
  task.forget();
  drawn = "";
  $("#fp-rehearsal").hidden = true;
}

function draw(status) {
  const running = status.state === "running";
  if (!running) $("#fp-try").disabled = $("#fp-start").disabled;
  else $("#fp-try").disabled = true;
  const text = JSON.stringify({ ...status, seconds: 0 });
  if (text === drawn) return; // an open traceback stays open
  drawn = text;
  const action = running
    ? el("button.fp-link", { type: "button", onclick: () => task.stop().catch(notifyError) }, "Stop")
    : el("button.fp-link", { type: "button", onclick: dismiss }, "Dismiss");
  const box = $("#fp-rehearsal");
  box.hidden = false;
  box.dataset.state = status.state;
  const title = TITLES[status.state] || "Rehearsal failed";
  box.dataset.title = title;
  box.replaceChildren(
    el("div.fp-card-head", {}, el("h3", {}, title), el("span.fp-gap"), action),
    el("table.fp-phases", {}, el("tbody", {}, status.phases.map(phaseRow), running ? currentRow(status) : null)),
    ...(running ? [] : outcomeParts(status)),
  );
  drawOutdated();
}

const phaseRow = ({ label, seconds, peak_bytes: peak }) =>
  el("tr", {}, el("th", { scope: "row" }, label), el("td", {}, `${seconds.toFixed(1)} s`), el("td", {}, bytes(peak)));

function currentRow({ now, text }) {
  const waiting = text.startsWith("Waiting in the queue");
  return el("tr.fp-phase-now", {}, el("th", { scope: "row", colspan: 3 }, waiting ? text : `${now}\u2026`));
}

function outcomeParts({ state, seconds, peak_bytes: peak, estimated_bytes: estimated, notes, failure }) {
  const memory = peak ? `Peak memory of a rank: ${bytes(peak)}` : "";
  const compared = memory && estimated ? `${memory}, estimated ${bytes(estimated)}.` : memory && `${memory}.`;
  const lost = state === "lost" ? "The rehearsal's process was killed, or the machine shut down." : "";
  const error = failure && el("section.fp-failure", {}, ...failureParts(failure, 2));
  if (error) $("h3", error).textContent = failure.phase;
  return [
    error,
    el("p.fp-dim", {}, [lost, `${duration(seconds)}.`, compared].filter(Boolean).join(" ")),
    ...notes.map((note) => el("p.fp-dim", {}, note)),
  ].filter(Boolean);
}
