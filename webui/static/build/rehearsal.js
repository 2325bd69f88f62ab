// @ts-check
// The rehearsal of the form's values: its phases, each with its time and the peak memory so far.
import { get, post } from "../api.js";
import { $, el, notifyError, setText } from "../dom.js";
import { bytes, duration } from "../format.js";
import { createPoller } from "../poll.js";
import { failureParts } from "../run/failure.js";
import { draftId } from "./drafts.js";

// Of each draft, so that two tabs do not show each other's: the id of its last rehearsal, a space, and a checksum of
// what was rehearsed.
const key = (draft) => `fp-rehearsal-${draft}`;
const stored = () => (localStorage.getItem(key(draftId())) || "").split(" ");
const idOf = () => stored()[0];
const TITLES = { running: "Rehearsal", done: "Rehearsal passed", stopped: "Rehearsal stopped" };

const path = () => `api/rehearsals/${encodeURIComponent(idOf())}`;
const poller = createPoller(poll, { isVisible: () => document.body.dataset.tab === "build", interval: 1000 });
let drawn = "";
let checksum = 0; // of the form's values now

/** FNV-1a: whether the form has changed, without a copy of its values, which may contain secrets. */
export function checksumOf(values, machine) {
  let sum = 0x811c9dc5;
  for (const char of JSON.stringify([machine, Object.entries(values).sort()])) {
    sum = Math.imul(sum ^ (char.codePointAt(0) || 0), 0x01000193) >>> 0;
  }
  return sum;
}

/** The form has these values now: mark a rehearsal of other values. @param {Record<string, any>} values
 * @param {string} machine */
export function compareRehearsal(values, machine) {
  if (!idOf()) return;
  checksum = checksumOf(values, machine);
  drawOutdated();
}

function drawOutdated() {
  const box = $("#fp-rehearsal");
  const rehearsed = stored()[1];
  const isOutdated = Boolean(checksum && rehearsed) && rehearsed !== String(checksum);
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
    localStorage.setItem(key(draftId()), `${id} ${checksumOf(values, machine)}`);
    compareRehearsal(values, machine);
    poller.start();
  } catch (error) {
    notifyError(error);
    button.disabled = false;
  }
}

/** Show the last rehearsal of this draft, or of the draft `from` that it is a copy of. @param {string} from */
export function resumeRehearsal(from) {
  if (!draftId()) return;
  const earlier = localStorage.getItem(key(from));
  if (!idOf() && earlier) localStorage.setItem(key(draftId()), earlier);
  if (idOf()) poller.start();
}

/** @param {() => boolean} isCurrent */
async function poll(isCurrent) {
  try {
    const status = await get(path());
    if (!isCurrent()) return "end";
    draw(status);
    return status.state === "running" ? undefined : "end";
  } catch (error) {
    if (error.status !== 404) throw error;
    if (isCurrent()) dismiss(); // a later one has replaced it
    return "end";
  }
}

export const isRehearsing = () => poller.isActive();

function dismiss() {
  localStorage.removeItem(key(draftId()));
  drawn = "";
  $("#fp-rehearsal").hidden = true;
}

function draw(status) {
  const running = status.state === "running";
  if (!running) $("#fp-try").disabled = $("#fp-start").disabled;
  else $("#fp-try").disabled = true;
  const text = JSON.stringify({ ...status, seconds: 0 });
  if (text === drawn) return; // a traceback stays open
  drawn = text;
  const action = running
    ? el("button.fp-link", { type: "button", onclick: () => post(`${path()}/stop`).catch(notifyError) }, "Stop")
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
  const lost = state === "lost" ? "Its process was killed, or the machine shut down." : "";
  const error = failure && el("section.fp-failure", {}, ...failureParts(failure, 2));
  if (error) $("h3", error).textContent = failure.phase;
  return [
    error,
    el("p.fp-dim", {}, [lost, `${duration(seconds)}.`, compared].filter(Boolean).join(" ")),
    ...notes.map((note) => el("p.fp-dim", {}, note)),
  ].filter(Boolean);
}
