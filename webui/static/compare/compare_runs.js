// @ts-check
// The Compare view: 2 to 20 runs in the address (?tab=compare&runs=A,B&x=tokens): curves, results, options that differ,
// and generations for the same prompts.
import { get, url } from "../api.js";
import { createChartBar } from "../chart_bar.js";
import { $, address, chip, el, on, redraw, setText, table } from "../dom.js";
import { bytes, duration, integer, num, valueText } from "../format.js";
import { onThemeChange } from "../gradio.js";
import { createPoller } from "../poll.js";
import { markedGeneration } from "../run/generations.js";
import { drawBadge, hasEnded } from "../run_state.js";
import { curveColor } from "../plot.js";
import { AXES, createCompareCharts } from "./compare_runs_charts.js";
import { createEvaluations } from "./compare_runs_evaluations.js";

export const [LEAST, MOST] = [2, 20];
const NONE = "\u2013";
const SHOWN_PROMPTS = 3;

/** The address of a comparison. @param {string[]} ids */
export const compareLink = (ids) => `?tab=compare&runs=${ids.slice(0, MOST).map(encodeURIComponent).join(",")}`;

const page = /** @type {Record<string, any>} */ ({});
let response = null;
let drawn = ""; // the content of the tables, as JSON
let pinned = -1; // the number of the run that a click highlighted
let allPrompts = false;

const isVisible = () => document.body.dataset.tab === "compare";
const ids = () => (address.get("runs") || "").split(",").filter(Boolean);
const axis = () => (Object.hasOwn(AXES, address.get("x") || "") ? String(address.get("x")) : "step");

export function mountCompareRuns() {
  page.charts = createCompareCharts({ onMissing: drawMissing });
  page.title = el("h2");
  page.away = el("span.fp-away", { hidden: true }, "Reconnecting");
  page.csv = el("a.fp-button", { download: "" }, "CSV");
  page.png = el("a.fp-button", { download: "" }, "PNG");
  page.problems = el("ul.fp-compare-problems", { hidden: true });
  const problems = el("div", { role: "status" }, page.problems);
  page.legend = el("div.fp-compare-legend", { role: "group", "aria-label": "Runs: highlight one" });
  page.missing = el("p.fp-dim", { hidden: true });
  page.summary = el("section.fp-panel.fp-compare-table.fp-compare-results", { "aria-label": "Results" });
  page.evaluations = createEvaluations(runName);
  page.options = el("section.fp-panel.fp-compare-table.fp-compare-options", { "aria-label": "Options that differ" });
  page.samples = el("section.fp-panel.fp-compare-table.fp-compare-samples", { "aria-label": "Generations" });
  const head = el(
    "header.fp-runs-head",
    {},
    page.title,
    page.away,
    el("span.fp-gap"),
    page.csv,
    page.png,
    el("a.fp-button", { href: "?tab=runs" }, "All runs"),
  );
  const charts = el("section.fp-charts", { "aria-label": "Charts" }, chartsBar(), page.legend, page.missing);
  charts.append(page.charts.node);
  page.body = el("div.fp-run", {}, charts, page.summary, page.evaluations.node, page.options, page.samples);
  page.node = el("div.fp-compare-runs", {}, head, problems, page.body);
  $("#fp-compare-page").replaceChildren(page.node);
  page.poller = createPoller(pull, { isVisible, interval: 10000, onTrouble });
  on("view", (tab) => (tab === "compare" ? open() : close()));
  onThemeChange(() => response && drawTables());
}

function chartsBar() {
  page.axes = Object.entries(AXES).map(([key, { name }]) => chip(name, () => selectAxis(key), { "data-axis": key }));
  const middle = [
    el("div.fp-chips", { role: "group", "aria-label": "X axis" }, page.axes),
    el("span.fp-dim.fp-hint", {}, "Drag across a chart to zoom"),
  ];
  return createChartBar("Curves", middle, page.charts.state, page.charts).node;
}

// -- which runs -------------------------------------------------------------------------------------------------------

function open() {
  document.title = "Compare runs - Footplate";
  drawAxis();
  page.poller.start();
}

function close() {
  page.poller.stop();
  page.charts.close();
}

async function pull(isCurrent) {
  const asked = address.get("runs");
  let found;
  try {
    found = await get(`api/comparison?ids=${encodeURIComponent(asked || "")}`);
  } catch (error) {
    if (!error.status) throw error;
    found = { runs: [], options: [], samples: [], problems: [{ id: "", sentence: error.message }] };
  }
  if (!isCurrent() || asked !== address.get("runs")) return undefined;
  response = found;
  draw();
  await Promise.all([page.charts.open(found.runs, axis()), pullEvaluations(asked, found.runs)]);
  return found.runs.every((run) => hasEnded(run.state)) ? "end" : undefined;
}

/** In a separate request: the first one computes intervals, which may take a while. */
async function pullEvaluations(asked, runs) {
  if (!runs.length) return;
  try {
    const found = await get(`api/comparison/evaluations?ids=${encodeURIComponent(asked || "")}`);
    if (asked === address.get("runs")) page.evaluations.draw(runs, found);
  } catch (error) {
    if (!error.status) throw error;
    page.evaluations.hide(); // the other sections are shown even if evaluations cannot be read
  }
}

const onTrouble = (failures) => (page.away.hidden = failures < 2);

function selectAxis(key) {
  address.set({ x: key === "step" ? null : key });
  drawAxis();
  if (response) void page.charts.open(response.runs, key);
}

/** Compare the other runs. @param {string} id */
function leaveOut(id) {
  address.set({
    runs: ids()
      .filter((other) => other !== id)
      .join(","),
  });
  page.poller.start();
}

// -- drawing ----------------------------------------------------------------------------------------------------------

function drawAxis() {
  for (const chip of page.axes) chip.setAttribute("aria-pressed", String(chip.dataset.axis === axis()));
  const query = `ids=${encodeURIComponent(address.get("runs") || "")}`;
  page.csv.href = url(`api/comparison/curves.csv?${query}`);
  page.png.href = url(`api/comparison/curves.png?${query}&x=${axis()}`);
}

function draw() {
  const { runs, problems } = response;
  setText(page.title, runs.length ? `Compare ${runs.length} ${runs.length === 1 ? "run" : "runs"}` : "Compare runs");
  drawAxis();
  const state = JSON.stringify(response);
  if (state === drawn) return;
  drawn = state;
  const shown = runs.map((run) => run.id).join();
  if (shown !== page.node.dataset.runs) {
    pinned = -1; // the number now belongs to another run
    page.evaluations.hide();
  }
  page.node.dataset.runs = shown;
  page.charts.highlight(pinned);
  page.body.hidden = !runs.length;
  page.csv.hidden = page.png.hidden = !runs.length;
  page.problems.hidden = !problems.length;
  page.problems.replaceChildren(
    ...problems.map(({ id, sentence }) => el("li", {}, id && !sentence.includes(id) ? el("b", {}, id) : "", sentence)),
  );
  drawTables();
}

function drawTables() {
  const { runs, options, samples } = response;
  redraw(page.legend, ...runs.map(legendEntry));
  redraw(page.summary, ...summaryParts(runs, options));
  redraw(page.options, ...optionParts(runs, options));
  page.samples.hidden = !samples.length;
  redraw(page.samples, ...sampleParts(runs, samples));
}

const swatch = (number) => {
  const key = el("i.fp-swatch");
  key.style.background = curveColor(number);
  return key;
};

function legendEntry(run, number) {
  const pin = () => {
    pinned = pinned === number ? -1 : number;
    page.charts.highlight(pinned);
    [...page.legend.children].forEach((chip, n) => chip.setAttribute("aria-pressed", String(n === pinned)));
  };
  const highlight = () => page.charts.highlight(number);
  const restore = () => page.charts.highlight(pinned);
  const events = { onclick: pin, onmouseenter: highlight, onmouseleave: restore, onfocus: highlight, onblur: restore };
  return el(
    "button.fp-chip",
    { type: "button", "aria-pressed": String(number === pinned), title: run.id, ...events },
    swatch(number),
    el("span", {}, run.name),
  );
}

function drawMissing(names, failed, why) {
  const what = axis() === "step" ? "No metrics" : `No values of the axis ${AXES[axis()].name.toLowerCase()}`;
  const texts = [
    names.length && `${what} logged by: ${names.join(", ")}.`,
    failed.length && `The metrics of ${failed.join(", ")} could not be loaded and are requested again. ${why}`,
  ].filter(Boolean);
  page.missing.hidden = !texts.length;
  setText(page.missing, texts.join(" "));
}

const row = ([name, ...cells]) =>
  el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell)));

const panelHead = (title, ...more) => el("div.fp-panel-head", {}, el("h3", {}, title), ...more);

const runName = (run, number) =>
  el("span.fp-compare-name", {}, swatch(number), el("a", { href: `?tab=run&run=${run.id}`, title: run.id }, run.name));

function summaryParts(runs, options) {
  const different = options.filter((option) => option.decides_eval_loss);
  const labels = different.map(({ label }) => label).join(", ");
  const note = labels && `The validation losses cannot be compared, because these options differ: ${labels}`;
  const best = labels ? NaN : Math.min(...runs.map((run) => run.best_eval_loss ?? Infinity));
  const line = (run, number) => {
    const badge = el("span.fp-badge", { title: run.sentence });
    drawBadge(badge, run.state);
    const loss = run.best_eval_loss === null ? NONE : num(run.best_eval_loss);
    const at = run.best_eval_step === null ? "" : ` at ${integer(run.best_eval_step)}`;
    const remove = { type: "button", "aria-label": `Leave out ${run.name}`, title: "Leave out" };
    return row([
      runName(run, number),
      badge,
      run.max_steps ? `${integer(run.step || 0)} / ${integer(run.max_steps)}` : num(run.step),
      num(run.loss),
      el("span", {}, run.best_eval_loss === best ? el("b", {}, loss) : loss, el("span.fp-dim", {}, at)),
      run.seconds === null ? NONE : duration(run.seconds),
      run.tokens_per_second === null ? NONE : num(run.tokens_per_second),
      run.peak_bytes === null ? NONE : bytes(run.peak_bytes),
      run.estimated_bytes ? bytes(run.estimated_bytes) : NONE,
      runs.length > LEAST
        ? el("button.fp-icon", { ...remove, onclick: () => leaveOut(run.id) }, "\u00d7")
        : el("span.fp-sr", {}, ""),
    ]);
  };
  const head = ["Run", "State", "Step", "Final loss", "Best validation loss", "Training time", "Tokens/s"];
  head.push("Peak memory", "Estimated peak", el("span.fp-sr", {}, "Actions"));
  return [panelHead("Results", el("span.fp-dim", {}, note)), table("table", head, runs.map(line))];
}

function optionText(key, value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (Array.isArray(value)) return value.join(", ") || NONE;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "object") return JSON.stringify(value);
  return typeof value === "number" ? valueText(key, value) : String(value);
}

function optionParts(runs, options) {
  if (!options.length) return [panelHead("Options"), el("p.fp-compare-none", {}, "All options are the same.")];
  const line = ({ key, label, values }) => {
    const name = el("span", {}, label, el("code", {}, key));
    return row([name, ...runs.map(({ id }) => optionText(key, values[id]))]);
  };
  const head = ["Option", ...runs.map(runName)];
  const note = el("span.fp-dim", {}, `${NONE} means that the option is empty, or has no effect in this run`);
  return [panelHead("Options that differ", note), table("table", head, options.map(line))];
}

function sampleParts(runs, samples) {
  const known = runs.filter(({ id }) => samples.some(({ outputs }) => id in outputs));
  const output = (text, reference) =>
    text === undefined ? el("span.fp-dim", {}, NONE) : markedGeneration(text, reference);
  const line = ({ prompt, reference, outputs }) =>
    row([
      el("div.fp-prompt", {}, prompt),
      el("pre", {}, reference),
      ...known.map(({ id }) => output(outputs[id], reference)),
    ]);
  const rows = (allPrompts ? samples : samples.slice(0, SHOWN_PROMPTS)).map(line);
  const more = el("button.fp-chip", { type: "button", hidden: samples.length <= SHOWN_PROMPTS, onclick: toggle });
  more.append(allPrompts ? "Show fewer" : `Show all ${samples.length}`);
  function toggle() {
    allPrompts = !allPrompts;
    page.samples.replaceChildren(...sampleParts(runs, samples));
  }
  const note = el("span.fp-dim", {}, "after training, for prompts that at least two runs share");
  const head = ["Prompt", "Reference", ...known.map((run) => runName(run, runs.indexOf(run)))];
  return [panelHead("Generations", note, el("span.fp-gap"), more), table("table", head, rows)];
}
