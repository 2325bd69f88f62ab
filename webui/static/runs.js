// @ts-check
// The Runs view: every run, newest first. A name is a real link, so that a middle click opens a tab.
import { get } from "./api.js";
import { LEAST, MOST, compareLink } from "./compare_runs.js";
import { $, el, emit, notify, notifyError, setText } from "./dom.js";
import { dateTime, duration, num, toSeconds } from "./format.js";
import { createPoller } from "./poll.js";
import { createQueue } from "./queue.js";
import { confirmDelete, deleteRun, drawBadge, hasEnded, progressOf, resumeRun } from "./run_state.js";

const GROUPS = [
  ["", "All"],
  ["alive", "Running"],
  ["done", "Done"],
  ["stopped", "Stopped"],
  ["failed", "Failed"],
];
const COLUMNS = ["Name", "State", "Model", "Method", "Progress", "Loss", "Started", "Duration", ""];
const NONE = "\u2013";
const RESUMABLE = ["new", "stopped", "failed", "lost"];

let tag = ""; // of the newest list
let runs = null;
let group = "";
const selected = new Set(); // ids of the runs to compare
const rows = new Map(); // id -> row; a row stays the same node, so that it keeps the focus
const page = /** @type {Record<string, any>} */ ({});

const groupOf = (state) => (state === "lost" ? "failed" : hasEnded(state) ? state : "alive");
const isVisible = () => document.body.dataset.tab === "runs";

export function mountRuns() {
  page.filter = el("input.fp-input", {
    type: "search",
    placeholder: "Filter by name, model or method",
    "aria-label": "Filter runs",
    oninput: draw,
  });
  page.away = el("span.fp-away", { hidden: true }, "Reconnecting");
  page.chips = GROUPS.map(([key, name]) =>
    el(
      "button.fp-chip",
      { type: "button", "aria-pressed": String(key === group), "data-group": key, onclick: () => selectGroup(key) },
      name,
      el("b"),
    ),
  );
  page.compare = el("a.fp-chip.fp-runs-compare", { role: "link" });
  drawSelection();
  page.head = el(
    "header.fp-runs-head",
    { hidden: true },
    el("h2", {}, "Runs"),
    page.away,
    el("span.fp-gap"),
    page.filter,
    el("div.fp-chips", { role: "group", "aria-label": "State" }, page.chips),
    page.compare,
  );
  page.body = el("tbody");
  const heading = (name) => el("th", { scope: "col" }, name || el("span.fp-sr", {}, "Actions"));
  const head = el("thead", {}, el("tr", {}, COLUMNS.map(heading)));
  page.table = el("table.fp-runs-table", { hidden: true }, head, page.body);
  page.queue = createQueue(() => page.poller.start());
  const build = el("p", {}, el("a.fp-button.fp-primary", { href: "?tab=build" }, "Build a run"));
  page.empty = el("div.fp-empty", { hidden: true }, el("h2"), el("p"), build);
  $("#fp-runs-page").replaceChildren(el("div.fp-runs", {}, page.queue.node, page.head, page.table, page.empty));
  const onTrouble = (failures) => (page.away.hidden = failures < 2);
  page.poller = createPoller(pull, { isVisible, interval: 1000, onTrouble });
  page.poller.start();
}

async function pull(isCurrent) {
  const response = await get(`api/runs?have=${encodeURIComponent(tag)}`);
  if (!isCurrent()) return;
  if (!response) {
    updateDurations();
    return;
  }
  tag = response.etag || "";
  runs = response.runs;
  page.queue.draw(response.queue);
  draw();
}

function selectGroup(key) {
  group = key;
  for (const chip of page.chips) chip.setAttribute("aria-pressed", String(chip.dataset.group === key));
  draw();
}

function select(id, isSelected) {
  if (isSelected) selected.add(id);
  else selected.delete(id);
  drawSelection();
}

/** The link to the comparison; without an address, and so disabled, until there is something to compare. */
function drawSelection() {
  const count = selected.size;
  const possible = count >= LEAST && count <= MOST;
  setText(page.compare, count ? `Compare ${count}` : "Compare");
  page.compare.title = possible ? "Compare the selected runs" : `Select ${LEAST} to ${MOST} runs`;
  page.compare.setAttribute("aria-disabled", String(!possible));
  if (possible) page.compare.setAttribute("href", compareLink([...selected]));
  else page.compare.removeAttribute("href");
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function draw() {
  if (!runs) return;
  const word = page.filter.value.trim().toLowerCase();
  const hasWord = (run) =>
    [run.name, run.id, run.model, run.method].some((text) =>
      String(text || "")
        .toLowerCase()
        .includes(word),
    );
  const matches = (run) => (!group || groupOf(run.state) === group) && hasWord(run);
  drawRows(matches);
  const shown = runs.filter(matches).length;
  page.head.hidden = !runs.length;
  page.table.hidden = !shown;
  page.empty.hidden = Boolean(shown);
  const [title, text] = runs.length
    ? ["No run matches the filter", "Change the filter, or show all states."]
    : ["No runs yet", "A run appears here as soon as it starts."];
  setText($("h2", page.empty), title);
  setText($("p", page.empty), text);
  page.empty.lastChild.hidden = Boolean(runs.length);
  for (const chip of page.chips) {
    const key = chip.dataset.group;
    setText(chip.lastChild, num(runs.filter((run) => !key || groupOf(run.state) === key).length));
  }
}

function drawRows(matches) {
  const ids = new Set(runs.map((run) => run.id));
  for (const [id, row] of rows) {
    if (ids.has(id)) continue;
    row.node.remove();
    rows.delete(id);
    select(id, false);
  }
  let previous = null;
  for (const run of runs) {
    if (!rows.has(run.id)) rows.set(run.id, createRow(run.id));
    const row = rows.get(run.id);
    row.draw(run);
    row.node.hidden = !matches(run);
    if (row.node.previousSibling !== previous || !row.node.parentNode) {
      if (previous) previous.after(row.node);
      else page.body.prepend(row.node);
    }
    previous = row.node;
  }
}

function updateDurations() {
  for (const run of runs || []) if (!hasEnded(run.state)) rows.get(run.id)?.draw(run);
}

function createRow(id) {
  const link = el("a.fp-runs-link", { href: `?tab=run&run=${encodeURIComponent(id)}` });
  const box = el("input.fp-runs-select", { type: "checkbox", onchange: () => select(id, box.checked) });
  const badge = el("span.fp-badge");
  const bar = el("span");
  const steps = el("span.fp-number");
  const cell = (name, ...children) => el("td", { "data-name": name }, ...children);
  const cells = {};
  for (const name of COLUMNS.slice(2, -1)) cells[name] = cell(name);
  cells.Progress.append(el("div.fp-mini", { "aria-hidden": "true" }, bar), steps);
  for (const name of ["Loss", "Started", "Duration"]) cells[name].classList.add("fp-number");
  const actions = createActions(id, () => link.textContent);
  const node = el(
    "tr",
    {},
    cell("Name", el("div.fp-runs-name", {}, box, link)),
    cell("State", badge),
    ...Object.values(cells),
    el("td.fp-row-actions", {}, Object.values(actions)),
  );

  function drawRow(run) {
    setText(link, run.name || id);
    box.setAttribute("aria-label", `Select ${run.name || id} to compare`);
    link.title = run.sentence || "";
    if (badge.dataset.state !== run.state) drawBadge(badge, run.state);
    node.dataset.state = run.state;
    setText(cells.Model, run.model || NONE);
    setText(cells.Method, run.method || NONE);
    setText(cells.Loss, num(run.loss));
    bar.style.width = `${100 * (progressOf(run) || 0)}%`;
    setText(steps, run.max_steps ? `${num(run.step || 0)} / ${num(run.max_steps)}` : "");
    drawTimes(cells, run);
    actions.resume.hidden = !RESUMABLE.includes(run.state);
    setText(actions.resume, run.state === "new" ? "Start" : "Resume");
    actions.clone.hidden = false;
    actions.remove.hidden = !hasEnded(run.state) && run.state !== "new";
  }
  return { node, draw: drawRow };
}

function drawTimes(cells, run) {
  const started = toSeconds(run.started || run.created);
  setText(cells.Started, dateTime(started));
  cells.Started.title = Number.isFinite(started) ? new Date(1000 * started).toLocaleString() : "";
  const end = run.ended ? toSeconds(run.ended) : hasEnded(run.state) ? NaN : Date.now() / 1000;
  setText(cells.Duration, run.started ? duration(end - toSeconds(run.started)) : NONE);
}

// -- actions ----------------------------------------------------------------------------------------------------------

/** @param {string} id @param {() => string} name */
function createActions(id, name) {
  const button = (text, onclick, destructive = false) => {
    const kind = destructive ? ".fp-quiet-destructive" : "";
    return el(`button.fp-chip${kind}`, { type: "button", hidden: true, onclick }, text);
  };
  const remove = async () => {
    if (await confirmDelete(name())) await act(actions.remove, () => deleteRun(id), "Run deleted.");
  };
  const actions = {
    resume: button("Resume", () => act(actions.resume, () => resumeRun(id))),
    clone: button("Copy into form", () => emit("clone", { id })),
    remove: button("Delete", remove, true),
  };
  return actions;
}

async function act(button, work, message = "") {
  button.disabled = true;
  try {
    await work();
    if (message) notify(message);
  } catch (error) {
    notifyError(error);
  }
  button.disabled = false;
  page.poller.start();
}
