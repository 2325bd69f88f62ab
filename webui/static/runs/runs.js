// @ts-check
// The Runs view: every run, newest first. A name is a real link, so that a middle click opens a tab.
import { get } from "../api.js";
import { $, attempt, dropdown, el, on, setText } from "../dom.js";
import { num } from "../format.js";
import { createPoller } from "../poll.js";
import { createQueue } from "./queue.js";
import { annotate, createRowMenu, createSelectionBar } from "./runs_actions.js";
import { createColumnMenu, loadView, shownColumns, storeView } from "./runs_columns.js";
import { SearchError, parseSearch, sortRuns } from "./runs_search.js";
import { rowsOf } from "./runs_sweeps.js";
import { createTable } from "./runs_table.js";

/** @typedef {import("./runs_search.js").Column} Column */
/** @typedef {import("./runs_search.js").Run} Run */

const GROUPS = [
  ["", "All"],
  ["queued", "Queued"],
  ["running", "Running"],
  ["done", "Done"],
  ["stopped", "Stopped"],
  ["failed", "Failed"],
];
const MAX_FOLDED = 200; // sweeps that this browser remembers
const EXAMPLES = [
  ["qwen paper", "runs with both words, in the name, model, dataset, tags, notes or failure reason"],
  ["state:failed", "a column that contains a text"],
  ["lr>1e-4", "a number above or below (<) a limit"],
  ["tag:paper", "the whole tag"],
  ["starred:yes", "starred runs"],
  ["archived:yes", "archived runs, which are hidden otherwise"],
  ['notes:"with warmup"', "text with spaces"],
];

let tag = ""; // tag of the newest list
const byId = /** @type {Map<string, Run>} */ (new Map());
let runs = /** @type {Run[] | null} */ (null); // newest first
let found = /** @type {Run[]} */ ([]); // the matching runs, in the order of the table
let columns = /** @type {Column[]} */ ([]);
let matches = (/** @type {Run} */ run) => !run.archived;
let view = loadView();
let group = "";
const selected = /** @type {Set<string>} */ (new Set());
const page = /** @type {Record<string, any>} */ ({});

const OTHER_GROUPS = { new: "queued", starting: "running", stopping: "running" };
const groupOf = ({ state }) =>
  ["lost", "damaged", "deleting"].includes(state) ? "failed" : OTHER_GROUPS[state] || state;
const isVisible = () => document.body.dataset.tab === "runs";

export function mountRuns() {
  const changed = () => page.poller.start();
  page.search = el("input.fp-input", {
    type: "search",
    placeholder: "Search, or state:failed lr>1e-4",
    "aria-label": "Search runs",
    "aria-describedby": "fp-runs-problem",
    oninput: search,
  });
  page.problem = el("p.fp-runs-problem", { id: "fp-runs-problem", hidden: true });
  page.away = el("span.fp-away", { hidden: true }, "Reconnecting");
  page.chips = GROUPS.map(([key, name]) =>
    el(
      "button.fp-chip",
      { type: "button", "aria-pressed": String(key === group), "data-group": key, onclick: () => selectGroup(key) },
      name,
      el("b"),
    ),
  );
  page.columns = createColumnMenu(selectColumns);
  page.head = el(
    "header.fp-runs-head",
    { hidden: true },
    el("h2", {}, "Runs"),
    page.away,
    el("span.fp-gap"),
    el("div.fp-runs-search", {}, page.search, searchHelp()),
    el("div.fp-chips", { role: "group", "aria-label": "State" }, page.chips),
    page.columns.node,
  );
  page.table = createTable(selected, {
    star,
    sort: sortBy,
    select,
    selectAll,
    fold,
    menu: (run, at) => page.menu.open(run, at),
  });
  page.scroller = el("div.fp-runs-scroll", { hidden: true }, page.table.node);
  page.menu = createRowMenu(changed);
  const clear = () => selectAll(false);
  page.bar = createSelectionBar(selected, { changed, clear, find: (id) => byId.get(id), shown: () => found });
  page.queue = createQueue(changed);
  const build = el("p", {}, el("a.fp-button.fp-primary", { href: "?tab=build" }, "Build a run"));
  page.empty = el("div.fp-empty", { hidden: true }, el("h2"), el("p"), build);
  const parts = [page.queue.node, page.head, page.problem, page.scroller, page.empty, page.bar.node, page.menu.node];
  $("#fp-runs-page").replaceChildren(el("div.fp-runs", { onpointerleave: () => page.queue.fit() }, parts));
  const onTrouble = (failures) => (page.away.hidden = failures < 2);
  page.poller = createPoller(pull, { isVisible, interval: 1000, onTrouble });
  page.poller.start();
  addEventListener("resize", () => {
    page.queue.fit();
    draw();
  });
  on("view", () => {
    page.queue.fit();
    page.table.drawSoon();
  });
}

function searchHelp() {
  const line = ([example, meaning]) => [el("dt", {}, el("code", {}, example)), el("dd", {}, meaning)];
  page.names = el("p.fp-dim");
  const node = dropdown("?", el("dl", {}, EXAMPLES.flatMap(line)), page.names);
  node.classList.add("fp-search-help");
  node.firstChild.setAttribute("aria-label", "How to search");
  return node;
}

// -- the list ---------------------------------------------------------------------------------------------------------

async function pull(isCurrent) {
  const response = await get(`api/runs?have=${encodeURIComponent(tag)}`);
  if (!isCurrent()) return;
  if (response) merge(response);
  else page.table.drawSoon(); // updates the durations of running runs
}

/** Take over what has changed since the last list. */
function merge(response) {
  tag = response.etag || "";
  if (response.complete) byId.clear();
  if (response.columns) {
    columns = response.columns;
    const name = ({ key, names }) => [key, ...names].join(", ");
    setText(
      page.names,
      `Columns: ${columns
        .filter(({ kind }) => kind !== "time")
        .map(name)
        .join(", ")}`,
    );
  }
  const isNew = response.runs.some((run) => !byId.has(run.id));
  for (const run of response.runs) byId.set(run.id, run);
  for (const id of response.removed) byId.delete(id);
  if (!runs || isNew || response.removed.length) {
    runs = [...byId.values()].sort((a, b) => (a.id < b.id ? 1 : -1));
    for (const id of selected) if (!byId.has(id)) selected.delete(id);
  } else runs = runs.map((run) => byId.get(run.id) || run);
  page.queue.draw(response.queue);
  search();
}

/** Read the search; while it cannot be read, the list stays as it is. */
function search() {
  try {
    matches = parseSearch(page.search.value, columns);
    page.problem.hidden = true;
  } catch (error) {
    if (!(error instanceof SearchError)) throw error;
    page.problem.hidden = false;
    setText(page.problem, `${error.message} The list has not changed.`);
  }
  draw();
}

function selectGroup(key) {
  group = key;
  for (const chip of page.chips) chip.setAttribute("aria-pressed", String(chip.dataset.group === key));
  draw();
}

/** @param {Partial<import("./runs_columns.js").View>} changes */
function changeView(changes) {
  view = { ...view, ...changes };
  storeView(view);
  draw();
}

/** @param {string[] | null} keys null for the default */
function selectColumns(keys) {
  const isSorted = !keys || view.sort === "name" || keys.includes(view.sort);
  changeView(isSorted ? { columns: keys } : { columns: keys, sort: "", descending: false });
}

/** Hide or show the runs of a sweep. @param {string} sweep */
function fold(sweep) {
  const others = view.folded.filter((id) => id !== sweep);
  changeView({ folded: others.length < view.folded.length ? others : [sweep, ...others].slice(0, MAX_FOLDED) });
}

/** The first click on a column sorts in its usual direction, the second in the other; the third ends the sorting. */
function sortBy(key) {
  const column = columns.find((column) => column.key === key);
  const first = column?.kind === "time" || ["step", "duration", "tokens_per_second", "peak_memory"].includes(key);
  if (view.sort !== key) changeView({ sort: key, descending: first });
  else if (view.descending === first) changeView({ descending: !first });
  else changeView({ sort: "", descending: false });
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function draw() {
  if (!runs) return;
  const matching = runs.filter(matches);
  const inGroup = group ? matching.filter((run) => groupOf(run) === group) : matching;
  const isKnown = columns.some(({ key }) => key === view.sort);
  found = isKnown ? sortRuns(inGroup, view.sort, view.descending) : inGroup;
  page.head.hidden = !runs.length;
  page.scroller.hidden = !found.length;
  // Sorting by a column orders all runs, so only an unsorted list groups the runs of a sweep.
  const rows = isKnown ? found : rowsOf(found, new Set(view.folded));
  page.table.draw(found, rows, shownColumns(columns, view), view);
  page.columns.draw(columns, view);
  page.bar.draw();
  drawEmpty();
  for (const chip of page.chips) {
    const key = chip.dataset.group;
    setText(chip.lastChild, num(matching.filter((run) => !key || groupOf(run) === key).length));
  }
}

function drawEmpty() {
  page.empty.hidden = Boolean(found.length);
  const hidden = (runs || []).filter((run) => run.archived).length;
  const [title, text] = !runs?.length
    ? ["No runs yet", "A run appears here as soon as it starts."]
    : page.search.value || group
      ? ["No run matches", "Change the search, or show all states."]
      : [
          "All runs are archived",
          `The search archived:yes shows ${num(hidden)} archived ${hidden === 1 ? "run" : "runs"}.`,
        ];
  setText($("h2", page.empty), title);
  setText($("p", page.empty), text);
  page.empty.lastChild.hidden = Boolean(runs?.length);
}

// -- actions ----------------------------------------------------------------------------------------------------------

/** @param {Run} run @param {boolean} isSelected */
function select(run, isSelected) {
  if (isSelected) selected.add(run.id);
  else selected.delete(run.id);
  drawSelection();
}

/** Select all runs that are shown, or none. @param {boolean} isSelected */
function selectAll(isSelected) {
  selected.clear();
  if (isSelected) for (const { id } of found) selected.add(id);
  drawSelection();
}

function drawSelection() {
  page.table.drawSelection();
  page.bar.draw();
}

/** @param {Run} run */
async function star(run) {
  await attempt(() => annotate([run.id], { starred: !run.starred }));
  page.poller.start();
}
