// @ts-check
// The charts of a run: series that the server has downsampled; a zoom requests its range in full detail.
import { get } from "../api.js";
import { createChartBar, loadSettings } from "../chart_bar.js";
import { CHARTS } from "../charts.js";
import { el } from "../dom.js";
import { integer } from "../format.js";
import { onThemeChange } from "../gradio.js";
import { createPoller } from "../poll.js";
import { markKey, marksOf } from "./chart_marks.js";
import { createRunChart } from "./run_chart.js";

const POINTS = 1000;
const ZOOM_HINT = "Drag across a chart to zoom";

/**
 * All charts of the open run. `base()` is the run's API path, `hasEnded()` whether the run had ended,
 * `happened()` its events and checkpoints, `onDraw` gets the newest value of each series.
 */
export function createCharts({ base, hasEnded, isVisible, onTrouble, happened, onDraw = (_) => {} }) {
  const state = {
    ...loadSettings(),
    base,
    marks: /** @type {import("./live.js").RunEvent[]} */ ([]),
    range: /** @type {[number, number] | null} */ (null), // steps that all charts show
    response: null,
    newest: {}, // key -> { step, value }
    setZoom,
    zoomTo,
    pointAt: (step, source) => panel.cards.forEach((card) => card.pointAt(step, card === source)),
  };
  let tag = "";
  let view = 0; // a late response for another zoom is discarded
  const panel = createPanel(state, happened);
  const poller = createPoller(pull, { isVisible, interval: 600, onTrouble });

  async function pull(isCurrent) {
    const last = hasEnded();
    const mine = view;
    const range = state.zoom ? `&x0=${state.zoom[0]}&x1=${state.zoom[1]}` : "";
    const found = await get(`${base()}/series?n=${POINTS}${range}&have=${encodeURIComponent(tag)}`);
    if (!isCurrent() || mine !== view) return undefined;
    if (!found) return last ? "end" : undefined;
    tag = found.etag;
    state.response = found;
    state.newest = newestOf(found);
    panel.draw();
    onDraw(state.newest);
    panel.drawResponse(found);
    return found.read < 1 ? "more" : undefined;
  }

  function requestAgain() {
    tag = "";
    view += 1;
    poller.start();
  }

  function setZoom(zoom) {
    state.zoom = zoom;
    panel.applyZoom();
    requestAgain();
  }

  function zoomTo(from, to) {
    const [first, last] = [Math.max(0, Math.floor(from)), Math.ceil(to)];
    if (last - first >= 2) setZoom([first, last]);
  }

  function open() {
    Object.assign(state, { response: null, newest: {}, zoom: null });
    panel.clear();
    requestAgain();
  }

  return { node: panel.node, open, close: poller.stop, resume: poller.start, redraw: panel.draw };
}

/** The charts and what is above them. @param {any} state of createCharts */
function createPanel(state, happened) {
  const cards = CHARTS.map((chart) => createRunChart(chart, state));
  const hint = el("span.fp-dim.fp-hint", {}, ZOOM_HINT);
  const bar = createChartBar("Charts", [hint], state, { draw, rebuild, resetZoom: () => state.setZoom(null) });
  const missing = el("p.fp-chart-text", { role: "status" });
  const key = el("div.fp-marks");
  const grid = el(
    "div.fp-charts-grid",
    {},
    cards.map((card) => card.node),
  );
  const node = el("section.fp-charts", { hidden: true, "aria-label": "Charts" }, bar.node, missing, key, grid);
  bar.reset.disabled = true;
  onThemeChange(rebuild);

  function draw() {
    // Before its first values, a run has a log and no charts.
    const { series = {} } = state.response || {};
    node.hidden = !CHARTS.some((chart) => series[chart.key] || (chart.second && series[chart.second]));
    state.marks = marksOf(happened(), state.response);
    state.range = wholeRange(series, state.marks);
    key.replaceChildren(...markKey(state.marks));
    for (const card of cards) card.draw();
  }
  function rebuild() {
    for (const card of cards) card.rebuild();
  }
  function drawResponse({ read, gaps }) {
    hint.textContent = read < 1 ? `Reading the metrics: ${Math.floor(read * 100)}%` : ZOOM_HINT;
    missing.textContent = gapText(gaps);
  }
  function applyZoom() {
    bar.reset.disabled = !state.zoom;
    for (const card of cards) card.applyZoom();
  }
  function clear() {
    bar.reset.disabled = true;
    for (const card of cards) card.clear();
    missing.textContent = "";
    draw();
  }
  return { node, cards, draw, drawResponse, applyZoom, clear };
}

/** The newest step and value of each series, also while a part of it is shown. */
const newestOf = ({ newest }) =>
  Object.fromEntries(Object.entries(newest).map(([key, [step, value]]) => [key, { step, value }]));

/**
 * From the first to the last step of all series, so that the charts are aligned; extended to an earlier resume and to a
 * later checkpoint.
 * @returns {[number, number] | null}
 */
function wholeRange(series, marks) {
  const all = Object.values(series).filter(({ x }) => x.length);
  if (!all.length) return null;
  const stepsOf = (kind) => marks.filter((mark) => mark.kind === kind).map((mark) => mark.step);
  const first = Math.min(...all.map(({ x }) => x[0]), ...stepsOf("resumed"));
  const last = Math.max(...all.map(({ x }) => x[x.length - 1]), ...stepsOf("saved"));
  return [first, last];
}

/** Where points are missing, as a sentence. @param {[number, number][]} gaps */
export function gapText(gaps) {
  if (!gaps.length) return "";
  const steps = gaps.map(([after, until]) => `${integer(after + 1)} to ${integer(until)}`).join(", ");
  return `metrics.jsonl has no points for steps ${steps}.`;
}
