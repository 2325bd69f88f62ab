// @ts-check
// The Run view: state, actions, error, results, charts, log and details of the run in the address.
import { get, post, runPath } from "../api.js";
import {
  $,
  address,
  confirmDialog,
  dropdown,
  el,
  emit,
  isFocusLost,
  notify,
  notifyError,
  on,
  redraw,
  setText,
} from "../dom.js";
import { num } from "../format.js";
import { createPoller } from "../poll.js";
import {
  STATES,
  confirmDelete,
  deleteRun,
  drawBadge,
  hasEnded,
  progressOf,
  resumeRun,
  startLabel,
} from "../run_state.js";
import { changeQueue, removeFromQueue } from "../runs/queue.js";
import { editNotes, tagList } from "../runs/runs_actions.js";
import { Benchmarks } from "./benchmarks.js";
import { Chat } from "./chat.js";
import { Evaluation } from "./evaluation.js";
import { Generations } from "./generations.js";
import { failureParts, remedies } from "./failure.js";
import { alertParts, isAlert, rankTable } from "./live.js";
import { createLog } from "./log.js";
import { createCharts } from "./run_charts.js";
import { isAlive } from "./run_jobs.js";
import { createModelCard } from "./run_model.js";
import {
  cardNode,
  detailParts,
  downloadLinks,
  isMeasured,
  fold,
  gainOf,
  placementOf,
  placementParts,
  timeParts,
  resultCards,
} from "./run_results.js";
import { createSectionLinks } from "./run_sections.js";
import { createStacks } from "./stacks.js";
import { createSweep } from "./sweep.js";

const QUEUE_ACTIONS = ["hold", "release", "share", "unqueue"];
const ACTIONS = ["next", ...QUEUE_ACTIONS, "save", "discard", "resume", "restart", "cleanup", "remove"];

let id = "";
let run = null; // the newest response
let busy = false; // an action is in progress
let showView = (..._) => {};
const drawn = {}; // part -> what it shows, as JSON
const page = /** @type {Record<string, any>} */ ({});
const parts = /** @type {any[]} */ ([]); // hidden until a response shows them

/** A part of the page that is hidden at first. */
function part(name, node) {
  node.hidden = true;
  parts.push(node);
  return (page[name] = node);
}

const base = () => runPath(id);
const ended = () => Boolean(run) && hasEnded(run.summary.state);
const isVisible = () => document.body.dataset.tab === "run";

// The pollers share one "Reconnecting" sign.
const troubles = { page: 0, log: 0, charts: 0 };
const troubleOf = (name) => (failures, error) => {
  if (error && error.status === 404 && name === "page") notFound(error);
  else if (error && error.status && name === "page") showText("warning", error.message); // such as a damaged file
  troubles[name] = error && error.status ? 0 : failures;
  page.away.hidden = !Object.values(troubles).some((count) => count > 1);
};

/** @param {(tab: string, run?: string) => void} show */
export function mountRun(show) {
  showView = show;
  buildPage($("#fp-run-page"));
  on("run", open);
  on("view", (tab) => {
    if (tab !== "run") document.title = "Footplate";
    else if (!address.get("run")) noneSelected();
  });
  document.addEventListener("visibilitychange", () => !document.hidden && isVisible() && restartPolling());
}

// -- the page's elements ----------------------------------------------------------------------------------------------

function buildPage(place) {
  createRequestingParts();
  createDrawnParts();
  page.node = el(
    "div.fp-run",
    { hidden: true },
    el("header.fp-run-head", {}, titlePart(), actionsPart()),
    progressPart(),
    page.sections.nav,
    page.stacks.node,
    page.failure,
    page.alerts,
    page.gain,
    page.cards,
    page.routerNote,
    page.model.node,
    page.chat.node,
    page.evaluation.node,
    page.benchmarks.node,
    page.sweep.node,
    page.generations.node,
    page.charts.node,
    page.log.node,
    page["run-placement"],
    page["run-time"],
    page.details,
  );
  page.empty = emptyPart();
  place.replaceChildren(page.node, page.empty);
  page.sections.follow();
}

/** The parts with requests of their own. */
function createRequestingParts() {
  page.poller = createPoller(pull, { isVisible, interval: 1000, onTrouble: troubleOf("page") });
  page.charts = createCharts({
    base,
    hasEnded: ended,
    isVisible,
    onTrouble: troubleOf("charts"),
    happened: () => ({ events: run?.events || [], checkpoints: run?.checkpoints || [] }),
    onDraw: (newest) => {
      page.latest = newest;
      drawCards();
    },
  });
  page.sweep = createSweep(isVisible);
  page.generations = new Generations(base);
  page.stacks = createStacks(base);
  page.chat = new Chat(base, isVisible);
  page.evaluation = new Evaluation(base, isVisible);
  page.benchmarks = new Benchmarks(base, isVisible);
  page.log = createLog({ base, hasEnded: ended, isVisible, onTrouble: troubleOf("log") });
}

/** The parts that show the newest response. */
function createDrawnParts() {
  const panel = (name, label) => part(name, el(`section.fp-panel.fp-${name}`, { "aria-label": label }));
  part("failure", el("section.fp-failure", { "aria-label": "Error" }));
  panel("alerts", "Alerts");
  part("gain", el("p.fp-gain"));
  part("cards", el("dl.fp-results", { "aria-label": "Results" }));
  part("routerNote", el("p.fp-router-note"));
  page.model = createModelCard();
  panel("run-placement", "Memory of each device");
  panel("run-time", "Predicted and measured time");
  page.ranks = el("div.fp-ranks");
  part("ranksFold", fold("Ranks", page.ranks));
  page.details = el("section.fp-details", { "aria-label": "Details" });
  page.sections = createSectionLinks(() => page.node);
  page.checkpoints = el("p");
  part("checkpointsFold", fold("Checkpoints", page.checkpoints));
}

function emptyPart() {
  const links = [
    el("a.fp-button.fp-primary", { href: "?tab=build" }, "Build a run"),
    el("a.fp-button", { href: "?tab=runs" }, "All runs"),
  ];
  return el("div.fp-empty", {}, el("h2"), el("p"), el("p", {}, links));
}

function titlePart() {
  page.name = el("h2", { tabindex: -1 });
  page.badge = el("span.fp-badge", { role: "status" }); // only the badge: the sentence changes too often to be read out
  page.sentence = el("span.fp-run-sentence");
  page.away = el("span.fp-away", { hidden: true }, "Reconnecting");
  const annotate = () => editNotes({ ...run.summary, ...run.annotations }, () => page.poller.start());
  part("annotate", el("button.fp-link", { type: "button", onclick: annotate }, "Name, tags and notes"));
  part("notes", el("div.fp-run-notes"));
  part("warning", el("p.fp-run-warning"));
  const state = el("p", {}, page.badge, page.sentence, page.annotate, page.away);
  return el("div.fp-run-title", {}, page.name, state, page.warning, page.notes);
}

function actionsPart() {
  const button = (name, text, onclick, destructive = false) => {
    const kind = destructive ? ".fp-quiet-destructive" : "";
    return part(name, el(`button.fp-button${kind}`, { type: "button", onclick }, text));
  };
  part("downloads", dropdown("Downloads"));
  return el(
    "div.fp-run-actions",
    {},
    button("hold", "Hold", () => act(() => changeQueue(id, { held: true }))),
    button("release", "Release", () => act(() => changeQueue(id, { held: false }))),
    button("share", "Start anyway", () => act(() => changeQueue(id, { shares: true }))),
    button("unqueue", "Remove from queue", () => act(() => removeFromQueue(id, page.name.textContent)), true),
    button("save", "Stop and save", () => stop(true)),
    button("discard", "Stop without saving", () => stop(false), true),
    button("resume", "Resume", () => resume()),
    button("restart", "Restart from scratch", restartFromScratch),
    button("cleanup", "Clean up leftover processes", cleanUp),
    button("next", "Start another after this", () => emit("after", id)),
    button("clone", "Copy into form", () => emit("clone", { id })),
    page.downloads,
    button("remove", "Delete", remove, true),
  );
}

function progressPart() {
  page.done = el("span");
  page.share = el("span.fp-figures");
  const attributes = { role: "progressbar", "aria-label": "Progress", "aria-valuemin": 0, "aria-valuemax": 100 };
  page.progress = el("div.fp-progress", attributes, page.done);
  return el("div.fp-run-progress", {}, page.progress, page.share);
}

// -- which run --------------------------------------------------------------------------------------------------------

function showEmpty(title, text) {
  page.node.hidden = true;
  page.empty.hidden = false;
  setText($("h2", page.empty), title);
  setText($("p", page.empty), text);
}
function noneSelected() {
  close();
  id = "";
  showEmpty("No run is selected", "Start a run from the Build view, or open one from the list of runs.");
}
function notFound(error) {
  close();
  showEmpty("This run does not exist", error.message);
  id = "";
}
function close() {
  page.poller.stop();
  page.charts.close();
  page.sweep.close();
  page.model.close();
  page.chat.close();
  page.evaluation.close();
  page.benchmarks.close();
  page.log.close();
}

function open(selected) {
  if (selected === id) {
    drawTitle();
    restartPolling();
    return;
  }
  close();
  id = selected;
  run = null;
  for (const name of Object.keys(drawn)) delete drawn[name];
  page.latest = null;
  page.empty.hidden = true;
  page.node.hidden = false;
  page.node.dataset.state = "";
  setText(page.name, selected);
  for (const name of ["sentence", "share", "badge"]) setText(page[name], "");
  for (const node of parts) node.hidden = true;
  page.generations.reset();
  page.details.replaceChildren();
  page.done.style.width = "0";
  page.charts.open();
  page.log.open();
  page.poller.start();
}

function restartPolling() {
  if (id && !page.poller.isActive()) page.poller.start();
}

async function pull(isCurrent) {
  const before = run && run.summary;
  const found = await get(base());
  if (!isCurrent()) return undefined;
  run = found;
  draw();
  if (before && hasEnded(before.state) && isRestarted(before, run.summary)) resumePanels();
  const hasJobs = [run.merge, run.server, ...run.gguf, ...run.quantized, ...run.publications].some(isAlive);
  return ended() && !hasJobs ? "rest" : undefined; // another window or a shell may restart it
}

/** Whether a run that had ended was restarted; it may have ended again since the last request. */
const isRestarted = (before, now) => !hasEnded(now.state) || now.started !== before.started;

function resumePanels() {
  page.charts.resume();
  page.log.resume();
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function draw() {
  const { summary } = run;
  page.node.dataset.state = summary.state;
  setText(page.name, summary.name || id);
  drawBadge(page.badge, summary.state);
  setText(page.sentence, sentenceWithoutState(summary));
  showText("warning", run.warning);
  showText("routerNote", run.router_note);
  drawProgress(summary);
  drawTitle();
  drawActions();
  page.sweep.open(run.sweep, id);
  page.chat.open(Boolean(run.model), run.result?.samples || []);
  page.evaluation.open(Boolean(run.model));
  page.benchmarks.open(Boolean(run.model));
  page.stacks.draw(Boolean(summary.stalled));
  page.log.offerRanks(run.ranks || []);
  drawIfChanged("annotations", run.annotations, drawNotes);
  drawPart("failure", run.failure, failureShown);
  const hasChanges = run.retry_applies && !run.failure;
  drawIfChanged("events", { events: run.events, hasChanges }, drawEvents);
  drawIfChanged("checkpoints", run.checkpoints, drawCheckpoints);
  drawIfChanged("monitor", run.monitor, drawRanks);
  drawModel();
  drawPart("run-placement", placementOf(run), placementParts);
  drawPart("run-time", run.timed, timeParts);
  page.generations.draw(run);
  const { spec, command, joining, yaml, script, result, estimate } = run;
  const details = { spec, command, joining, yaml, script, result, estimate };
  drawIfChanged("details", details, drawDetails);
  drawIfChanged("downloads", { id, measured: ended() && isMeasured(run) }, drawDownloads);
  if (ended()) drawIfChanged("ended", summary.state, page.charts.redraw);
  drawCards();
}

function drawDownloads({ measured }) {
  page.downloads.lastChild.replaceChildren(...downloadLinks(base(), measured));
}

function drawIfChanged(name, value, draw) {
  const text = JSON.stringify(value === undefined ? null : value);
  if (drawn[name] === text) return;
  drawn[name] = text;
  draw(value);
}

/** A part that is hidden without a value. @param {(value: any) => (Node | string)[]} content */
function drawPart(name, value, content) {
  drawIfChanged(name, value, () => {
    page[name].hidden = !value;
    redraw(page[name], ...(value ? content(value) : []));
  });
}

function showText(name, text) {
  page[name].hidden = !text;
  setText(page[name], text || "");
}

function drawActions() {
  const { can, checkpoints, summary } = run;
  const steps = checkpoints || [];
  const queue = run.queue;
  page.hold.hidden = !queue?.can_hold || queue.held;
  page.release.hidden = !queue || !queue.held;
  page.share.hidden = !queue || !queue.in_use;
  page.unqueue.hidden = !queue;
  page.save.hidden = !can.stop || Boolean(queue) || summary.state === "stopping";
  page.discard.hidden = !can.stop || Boolean(queue);
  page.next.hidden = !can.stop;
  page.resume.hidden = !can.resume;
  page.restart.hidden = can.stop || summary.state === "new" || !steps.length;
  page.remove.hidden = !can.delete;
  page.cleanup.hidden = !can.clean_up;
  page.clone.hidden = page.downloads.hidden = false;
  const resumeText = steps.length ? `Resume from step ${num(Math.max(...steps))}` : "";
  setText(page.resume, startLabel(summary.state, resumeText));
  for (const name of ACTIONS) page[name].disabled = busy;
}

/** The badge shows the state, and the box below shows the failure: neither is repeated in the sentence. */
function sentenceWithoutState({ state, sentence }) {
  let text = (sentence || "").replace(`${STATES[state]}: `, "");
  if (run.failure) text = text.replace(run.failure.sentence, "");
  text = text.trim();
  if (text === `${STATES[state]}.`) return "";
  if (state === "queued") text = [text, run.queue?.starts].filter(Boolean).join(" ");
  return text.replace(/^./, (first) => first.toUpperCase());
}

function drawProgress(summary) {
  const progress = progressOf(summary);
  const known = progress !== null;
  page.done.style.width = `${100 * (progress || 0)}%`;
  page.progress.classList.toggle("fp-unknown", !known && !ended() && summary.state !== "queued");
  if (known) page.progress.setAttribute("aria-valuenow", Math.round(100 * progress));
  else page.progress.removeAttribute("aria-valuenow");
  setText(page.share, known ? `${Math.floor(100 * progress)}%` : "");
}

/** The title of the browser's tab. */
function drawTitle() {
  if (!run || !isVisible()) return;
  const progress = ended() ? null : progressOf(run.summary);
  const part = progress === null ? "" : `${Math.floor(100 * progress)}% \u00b7 `;
  document.title = `${part}${run.summary.name || id} \u00b7 Footplate`;
}

function failureShown(failure) {
  const failed = id;
  const openField = (field) => emit("clone", { id: failed, field });
  return [...failureParts(failure, (run.ranks || []).length, openField), suggestedChanges()];
}

function suggestedChanges() {
  const changed = id;
  return remedies(base(), (fix) => emit("clone", { id: changed, fix }));
}

function drawNotes({ tags, notes }) {
  page.annotate.hidden = false;
  page.notes.hidden = !tags.length && !notes;
  page.notes.replaceChildren(tagList(tags), notes);
}

function drawEvents({ events, hasChanges }) {
  page.alerts.hidden = !events.some(isAlert);
  page.alerts.replaceChildren(...alertParts(events), hasChanges ? suggestedChanges() : "");
  page.charts.redraw();
}

function drawRanks(monitor) {
  page.ranksFold.hidden = !monitor.ranks;
  if (monitor.ranks) page.ranks.replaceChildren(rankTable(monitor));
}

function drawDetails(details) {
  redraw(page.details, page.ranksFold, ...detailParts(details), page.checkpointsFold);
}

function drawCheckpoints(checkpoints) {
  const steps = [...(checkpoints || [])].sort((a, b) => a - b).map((step) => num(step));
  page.checkpointsFold.hidden = !steps.length;
  setText(page.checkpoints, `Saved at ${steps.length === 1 ? "step" : "steps"} ${steps.join(", ")}.`);
  page.charts.redraw();
}

function drawModel() {
  const trained = id;
  const name = { "logging.run_name": `${run.summary.name || "run"} further`.slice(0, 80) };
  const train = (fix) => emit("clone", { id: trained, fix: { ...fix, patch: { ...fix.patch, ...name } } });
  const from = run.spec?.["model.path"] || run.spec?.["model.hub_id"] || "";
  const generations = run.result?.samples?.length;
  const showGenerations = generations ? () => page.generations.node.scrollIntoView({ behavior: "smooth" }) : null;
  const { model, merge, gguf, gguf_missing, quantized, quantized_formats, server, vllm, publications } = run;
  const jobs = { merge, gguf, gguf_missing, quantized, quantized_formats, server, vllm, publications };
  const shown = model && { ...model, ...jobs, generations };
  page.model.draw(shown, { base: base(), from, train, refresh: page.poller.wake, showGenerations });
}

function drawCards() {
  if (!run) return;
  const gain = gainOf(run.result);
  page.gain.dataset.change = gain ? gain.change : "";
  showText("gain", gain?.text);
  const cards = resultCards(run, page.latest);
  const nodes = cards.map(cardNode);
  page.cards.hidden = cards.every((card) => card.time);
  drawIfChanged(
    "cards",
    nodes.map((node) => node.textContent),
    () => page.cards.replaceChildren(...nodes),
  );
}

// -- actions ----------------------------------------------------------------------------------------------------------

async function act(work) {
  if (busy) return;
  busy = true;
  if (run) draw();
  try {
    await work();
  } catch (error) {
    notifyError(error);
  } finally {
    busy = false;
    if (run) draw();
    if (isVisible() && isFocusLost()) page.name.focus({ preventScroll: true });
    if (id) page.poller.start();
  }
}

const SAVES = "The run finishes its current step and saves a checkpoint, from which it can be resumed.";
const SAVES_LATER =
  "If training has begun, the run finishes its current step and saves a checkpoint. Before that, there is nothing to " +
  "save.";

async function stop(save) {
  const question = save
    ? `Stop this run? ${run.summary.step ? SAVES : SAVES_LATER}`
    : "Stop this run without saving? All steps since the last checkpoint are lost.";
  const label = save ? "Stop and save" : "Stop without saving";
  const asked = base();
  if (await confirmDialog(question, label, !save)) await act(() => post(`${asked}/stop`, { save }));
}

const resume = (fromScratch = false) =>
  act(async () => {
    const asked = id;
    await resumeRun(asked, fromScratch);
    const found = await get(runPath(asked));
    if (asked !== id) return; // another run was opened meanwhile
    run = found;
    resumePanels();
  });

async function restartFromScratch() {
  const what =
    "Its checkpoints are deleted, this page shows the new attempt only, and the model is replaced at its end.";
  const question = `Restart this run at step 0? ${what}`;
  if (await confirmDialog(question, "Restart from scratch", true)) await resume(true);
}

const cleanUp = () =>
  act(async () => {
    const { count } = await post(`${base()}/cleanup`);
    notify(count === 1 ? "1 leftover process was terminated." : `${count} leftover processes were terminated.`);
  });

async function remove() {
  const deleted = id;
  if (!(await confirmDelete(id, page.name.textContent))) return;
  page.poller.stop(); // it would find no run; if the run is not deleted, act() restarts the poller
  await act(async () => {
    await deleteRun(deleted);
    id = "";
    run = null;
    close();
    address.set({ run: null }, { replace: true });
    showView("runs");
    notify("Run deleted.");
  });
}
