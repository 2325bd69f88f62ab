// @ts-check
// The charts of a run: uPlot on series that the server has downsampled; a zoom requests its range in full detail.
import { get, url } from "./api.js";
import { bestOf, createBestMark, createTooltip, drawMarks, markKey, marksAt, marksOf, textsOf } from "./chart_marks.js";
import { el } from "./dom.js";
import { integer, num, valueText } from "./format.js";
import { onThemeChange } from "./gradio.js";
import { createPoller } from "./poll.js";

export const HEIGHT = 196;
const POINTS = 1000;
const ZOOM_HINT = "Drag across a chart to zoom";
const MARKS_HEIGHT = 14; // px: of the marks between a chart and the numbers of its x axis
/**
 * A chart: the series `key`, and a second one over it, of which the best point is marked if `marksBest`. The titles and
 * names are also those of the images: chart_image.py.
 * @typedef {{ key: string, title: string, name: string, second?: string, secondName?: string, smooth?: boolean,
 *   log?: boolean, best: "lowest" | "highest", marksBest?: boolean }} Chart
 */
/** @type {Chart[]} */
export const CHARTS = [
  { ...trainAndEval("loss", "Loss"), log: true, best: "lowest", marksBest: true },
  trainAndEval("reward_margin", "Reward margin"),
  { ...trainAndEval("reward_accuracy", "Reward accuracy"), marksBest: true },
  {
    key: "reward_chosen",
    title: "Rewards",
    name: "chosen",
    second: "reward_rejected",
    secondName: "rejected",
    best: "highest",
  },
  trainAndEval("kl", "KL divergence from the reference"),
  trainAndEval("reward_mean", "Mean reward"),
  { key: "learning_rate", title: "Learning rate", name: "learning rate", log: true, best: "highest" },
  { key: "grad_norm", title: "Gradient norm", name: "norm", smooth: true, log: true, best: "highest" },
  { key: "gpu_utilization", title: "GPU utilization (%)", name: "utilization", best: "highest" },
  { key: "tokens_per_second", title: "Tokens per second", name: "tokens/s", smooth: true, best: "highest" },
];

/** @returns {Chart} */
function trainAndEval(key, title) {
  return { key, title, name: "train", second: `eval_${key}`, secondName: "validation", smooth: true, best: "highest" };
}

const stored = (name, fallback) => localStorage.getItem(name) ?? fallback;
const color = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

/** A bias-corrected exponential moving average. `weight` is 0 to 0.99. */
export function smoothed({ x, y }, weight) {
  let mean = 0;
  let total = 0;
  const means = y.map((value) => {
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
  return { x, y: means };
}

/** A number at an axis. `distance` is that of two numbers, 0 if it varies: both must have different texts. */
export function tickText(value, distance = 0) {
  const size = Math.abs(value);
  const needed = distance && size ? Math.min(12, Math.ceil(Math.log10(size / distance)) + 3) : 0;
  if (size >= 1e6) return `${num(value / 1e6, Math.max(3, needed))}M`;
  if (size >= 1e4) return `${num(value / 1e3, Math.max(4, needed))}K`;
  return num(value, Math.max(4, needed));
}

/** The y axis and scale of all charts. @param {string} key of the series */
export function yAxis(key, logScale) {
  const text = (value, distance) => (key === "learning_rate" ? valueText(key, value) : tickText(value, distance));
  const values = (_, all, axis, space, distance) =>
    all.map((v) => (v === null ? "" : text(v, logScale ? 0 : distance)));
  return { size: 54, space: 34, values };
}
export const yScale = (logScale) => (logScale ? { distr: 3 } : { distr: 1, range: yRange });

/** As uPlot's own range, but that of zeros ends at 1 instead of 100. */
function yRange(_, from, to) {
  if (from === null) return [null, null];
  return from === 0 && to === 0 ? [0, 1] : window.uPlot.rangeNum(from, to, 0.1, true);
}

/**
 * A curve with an empty point in each gap, so that no line is drawn over steps whose points are missing.
 * @param {number[]} x @param {(number | null)[]} y @param {[number, number][]} gaps
 */
export function withGaps(x, y, gaps) {
  const [steps, values] = [[...x], [...y]];
  for (const [after] of gaps) {
    const i = steps.findIndex((step) => step > after);
    if (i < 1) continue;
    steps.splice(i, 0, (steps[i - 1] + steps[i]) / 2);
    values.splice(i, 0, null);
  }
  return [steps, values];
}

/** Where points are missing, as a sentence. @param {[number, number][]} gaps */
export function gapText(gaps) {
  if (!gaps.length) return "";
  const steps = gaps.map(([after, until]) => `${integer(after + 1)} to ${integer(until)}`).join(", ");
  return `metrics.jsonl has no points of steps ${steps}.`;
}

/** The value nearest to an index: validation points are few, and the pointer is rarely exactly on one. */
export function nearest(values, index) {
  for (let distance = 0; distance < values.length; distance += 1) {
    for (const i of [index - distance, index + distance]) {
      if (values[i] !== null && values[i] !== undefined) return values[i];
    }
  }
  return null;
}

/** "Latest 0.31 at step 120, lowest 0.29; validation 0.33 at step 100, best 0.32 at step 80." */
function describe(chart, response, newest) {
  const last = newest[chart.key];
  if (!last) return "";
  const extreme = chart.best === "lowest" ? response.min[chart.key] : response.max[chart.key];
  const text = (value) => valueText(chart.key, value);
  const parts = [`Latest ${text(last.value)} at step ${integer(last.step)}, ${chart.best} ${text(extreme)}`];
  const second = chart.second && newest[chart.second];
  if (second) {
    const point = bestOf(chart, response);
    const when = second.step === last.step ? "" : ` at step ${integer(second.step)}`;
    const best = point ? `, best ${num(point.value)} at step ${integer(point.step)}` : "";
    parts.push(`${chart.secondName} ${num(second.value)}${when}${best}`);
  }
  return `${parts.join("; ")}.`;
}

/**
 * All charts of the open run. `base()` is the run's API path, `hasEnded()` whether the run had ended,
 * `happened()` its events and checkpoints, `onDraw` gets the newest value of each series.
 */
export function createCharts({ base, hasEnded, isVisible, onTrouble, happened, onDraw = (_) => {} }) {
  const state = {
    base,
    marks: /** @type {import("./live.js").RunEvent[]} */ ([]),
    range: /** @type {[number, number] | null} */ (null), // of steps, for all charts
    response: null,
    newest: {}, // key -> { step, value }
    zoom: null, // { x0, x1 } in steps, for all charts
    weight: Number(stored("fp-smooth", "0.6")),
    logScale: stored("fp-log", "no") === "yes",
    setZoom,
    pointAt: (step, source) => cards.forEach((card) => card.pointAt(step, card === source)),
  };
  let tag = "";
  let view = 0; // a late response for another zoom is discarded

  const slider = el("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: state.weight,
    "aria-label": "Smoothing",
    oninput: setSmoothing,
  });
  const smoothing = el("output.fp-figures", {}, state.weight.toFixed(2));
  const log = el(
    "button.fp-chip",
    { type: "button", "aria-pressed": String(state.logScale), onclick: toggleLogScale },
    "Log scale",
  );
  const hint = el("span.fp-dim.fp-hint", {}, ZOOM_HINT);
  const reset = el("button.fp-chip", { type: "button", disabled: true, onclick: () => setZoom(null) }, "Reset zoom");
  const key = el("div.fp-marks");
  const missing = el("p.fp-chart-text", { role: "status" });
  const cards = CHARTS.map((chart) => createCard(chart, state));
  const node = el(
    "section.fp-charts",
    { hidden: true, "aria-label": "Charts" },
    el(
      "div.fp-charts-bar",
      {},
      el("h3", {}, "Charts"),
      hint,
      el("span.fp-gap"),
      el("label", {}, "Smoothing", slider, smoothing),
      log,
      reset,
    ),
    missing,
    key,
    el(
      "div.fp-charts-grid",
      {},
      cards.map((card) => card.node),
    ),
  );
  const poller = createPoller(pull, { isVisible, interval: 600, onTrouble });
  onThemeChange(() => cards.forEach((card) => card.rebuild()));

  async function pull(isCurrent) {
    const last = hasEnded();
    const mine = view;
    const range = state.zoom ? `&x0=${state.zoom.x0}&x1=${state.zoom.x1}` : "";
    const found = await get(`${base()}/series?n=${POINTS}${range}&have=${encodeURIComponent(tag)}`);
    if (!isCurrent() || mine !== view) return undefined;
    if (!found) return last ? "end" : undefined;
    tag = found.etag;
    state.response = found;
    rememberNewest();
    draw();
    onDraw(state.newest);
    hint.textContent = found.read < 1 ? `Reading the metrics: ${Math.floor(found.read * 100)}%` : ZOOM_HINT;
    missing.textContent = gapText(found.gaps);
    return found.read < 1 ? "more" : undefined;
  }

  function rememberNewest() {
    const { series, last } = state.response;
    if (!state.zoom) state.newest = {}; // a run that was restarted has not evaluated yet
    for (const [key, { x, y }] of Object.entries(series)) {
      const value = last[key];
      if (!state.zoom) state.newest[key] = { step: x[x.length - 1], value: y[y.length - 1] };
      else if (Number.isFinite(value) && state.newest[key] && state.newest[key].value !== value) {
        state.newest[key] = { step: last.step, value };
      }
    }
  }

  function draw() {
    // Before its first values, a run has a log and no charts.
    const { series = {} } = state.response || {};
    node.hidden = !CHARTS.some((chart) => series[chart.key] || (chart.second && series[chart.second]));
    state.marks = marksOf(happened(), state.response);
    state.range = wholeRange(series, state.marks);
    key.replaceChildren(...markKey(state.marks));
    for (const card of cards) card.draw();
  }

  function setSmoothing() {
    state.weight = Number(slider.value);
    smoothing.textContent = state.weight.toFixed(2);
    localStorage.setItem("fp-smooth", String(state.weight));
    draw();
  }

  function toggleLogScale() {
    state.logScale = !state.logScale;
    log.setAttribute("aria-pressed", String(state.logScale));
    localStorage.setItem("fp-log", state.logScale ? "yes" : "no");
    cards.forEach((card) => card.rebuild());
  }

  function setZoom(zoom) {
    state.zoom = zoom;
    reset.disabled = !zoom;
    tag = "";
    view += 1;
    cards.forEach((card) => card.applyZoom());
    poller.start();
  }

  function open() {
    Object.assign(state, { response: null, newest: {}, zoom: null });
    tag = "";
    reset.disabled = true;
    view += 1;
    cards.forEach((card) => card.clear());
    missing.textContent = "";
    draw();
    poller.start();
  }

  return { node, open, close: poller.stop, resume: poller.start, redraw: draw };
}

/** One chart with its legend, sentence and links. @param {Chart} chart @param {any} state of createCharts */
function createCard(chart, state) {
  let plot = null;
  let curves = []; // what is drawn

  const legend = el("div.fp-legend", { "aria-hidden": "true" });
  const place = el("div.fp-plot", { role: "img", "aria-label": chart.title });
  const tooltip = createTooltip();
  const best = createBestMark();
  const sentence = el("p.fp-chart-text");
  const links = createLinks(chart, state);
  const node = el(
    "figure.fp-chart",
    { hidden: true },
    el("div.fp-chart-head", {}, el("h4", {}, chart.title), el("span.fp-gap"), legend),
    place,
    el("figcaption", {}, sentence, links.node),
  );
  new ResizeObserver(() => {
    if (plot) plot.setSize({ width: place.clientWidth, height: place.clientHeight });
    else if (state.response) draw();
  }).observe(place);
  place.addEventListener("mouseleave", () => state.pointAt(null, null));

  const usesLog = () => state.logScale && chart.log;
  const positive = (y) => (usesLog() ? y.map((v) => (v > 0 ? v : null)) : y);

  function draw() {
    links.update();
    const next = curvesOf(chart, state);
    node.hidden = !next.length;
    const text = describe(chart, state.response, state.newest);
    sentence.textContent = text;
    place.setAttribute("aria-label", `${chart.title}. ${text}`);
    if (!next.length) return clear();
    if (!place.clientWidth) return undefined; // the view is hidden; the ResizeObserver draws later
    const tables = next.map((c) => withGaps(c.x, positive(c.y), state.response.gaps));
    const data = tables.length > 1 ? window.uPlot.join(tables) : tables[0];
    const layout = (list) => list.map((c) => c.name + c.width).join();
    const unchanged = plot && layout(curves) === layout(next);
    curves = next;
    if (unchanged) plot.setData(data, !state.zoom);
    else build(data);
    applyZoom();
    return undefined;
  }

  function build(data) {
    if (plot) plot.destroy();
    drawLegend(legend, curves);
    const onDraw = (u) => best.place(u, bestOf(chart, state.response));
    const options = plotOptions(place, usesLog(), curves, state, { key: chart.key, pointed, onDraw });
    place.replaceChildren();
    plot = new window.uPlot(options, data, place);
    plot.over.append(best.node);
    place.append(tooltip.node);
  }

  /** The pointer has moved over this chart, or over another one, which says so itself. */
  function pointed(u) {
    if (u.cursor.left >= 0 && u.cursor.idx !== null && place.matches(":hover")) {
      state.pointAt(u.data[0][u.cursor.idx], card);
    }
  }

  /** Show the values at a step, which is the same one in all charts; `own`: the pointer is in this one. */
  function pointAt(step, own) {
    if (!plot) return;
    const outside = step === null;
    const i = outside ? 0 : plot.valToIdx(step);
    legend.firstChild.textContent = outside ? "" : `step ${integer(step)}`;
    curves.forEach((_, n) => {
      legend.children[n + 1].lastChild.textContent = outside ? "" : valueText(chart.key, nearest(plot.data[n + 1], i));
    });
    tooltip.show(plot, own && !outside ? textsOf(marksAt(plot, state.marks), chart, state.response) : []);
  }

  function clear() {
    if (plot) plot.destroy();
    plot = null;
    curves = [];
    node.hidden = true;
    legend.replaceChildren();
    place.replaceChildren();
  }

  function rebuild() {
    if (plot) plot.destroy();
    plot = null;
    curves = [];
    draw();
  }

  function applyZoom() {
    if (plot && state.zoom) plot.setScale("x", { min: state.zoom.x0, max: state.zoom.x1 });
  }

  const card = { node, draw, clear, rebuild, applyZoom, pointAt };
  return card;
}

/** Links to the values of a run, and to images of a chart as it is shown. */
function createLinks(chart, state) {
  const link = (kind) => el("a.fp-quiet-link", { download: "", "aria-label": `${chart.title} as ${kind}` }, kind);
  const [csv, png, svg] = ["CSV", "PNG", "SVG"].map(link);
  function update() {
    const shown = new URLSearchParams();
    if (chart.smooth && state.weight > 0) shown.set("smoothing", String(state.weight));
    if (chart.log && state.logScale) shown.set("log", "true");
    if (state.zoom) for (const [name, step] of Object.entries(state.zoom)) shown.set(name, String(step));
    csv.href = url(`${state.base()}/metrics.csv`);
    png.href = url(`${state.base()}/charts/${chart.key}.png?${shown}`);
    svg.href = url(`${state.base()}/charts/${chart.key}.svg?${shown}`);
  }
  return { node: el("span.fp-chart-links", {}, csv, png, svg), update };
}

/**
 * From the first to the last step of all series, so that the charts are in line; with a restart before that, and with a
 * checkpoint after that.
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

/** The curves of a chart in drawing order: [{ name, stroke, x, y, width, points }]. */
function curvesOf(chart, { response, weight }) {
  const all = (response && response.series) || {};
  const first = all[chart.key];
  const second = chart.second && all[chart.second];
  const accent = color("--fp-accent");
  const curves = [];
  if (first && first.x.length) {
    const smooth = chart.smooth && weight > 0 && first.x.length > 2;
    const stroke = smooth ? color("--fp-pale") : accent;
    curves.push({ name: chart.name, stroke, x: first.x, y: first.y, width: smooth ? 1 : 1.6 });
    if (smooth)
      curves.push({
        name: "smoothed",
        stroke: accent,
        ...smoothed(response.means[chart.key] || first, weight),
        width: 1.8,
      });
  }
  if (second && second.x.length) {
    const { x, y } = second;
    curves.push({ name: chart.secondName, stroke: color("--fp-second"), x, y, width: 1.5, points: true });
  }
  return curves;
}

function drawLegend(legend, curves) {
  const entry = (curve) => {
    const key = el("i");
    key.style.background = curve.stroke;
    return el("span", {}, curves.length > 1 ? key : null, curves.length > 1 ? curve.name : null, el("b"));
  };
  legend.classList.toggle("fp-single", curves.length === 1);
  legend.replaceChildren(el("span.fp-legend-step"), ...curves.map(entry));
}

function plotOptions(place, logScale, curves, state, { key, pointed, onDraw }) {
  const grid = { stroke: color("--fp-grid"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const axis = { stroke: color("--fp-dim"), font, grid, ticks: { show: false }, gap: 6 };
  const steps = [1, 2, 5].flatMap((m) => [0, 1, 2, 3, 4, 5, 6].map((e) => m * 10 ** e)).sort((a, b) => a - b);
  const series = (c) => {
    const show = (c.points && c.x.length <= 40) || c.x.length === 1;
    const points = { show, size: 6, fill: c.stroke, stroke: c.stroke };
    return { stroke: c.stroke, width: c.width, spanGaps: false, points };
  };
  return {
    width: place.clientWidth,
    height: place.clientHeight,
    padding: [10, 26, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: (u, from, to) => stepRange(state, from, to) },
      y: yScale(logScale),
    },
    axes: [
      {
        ...axis,
        size: 26 + MARKS_HEIGHT,
        gap: 6 + MARKS_HEIGHT,
        space: 70,
        incrs: steps,
        values: (u, all) => all.map(integer),
      },
      { ...axis, ...yAxis(key, logScale) },
    ],
    series: [{}, ...curves.map(series)],
    cursor: {
      y: false,
      points: { size: 7 },
      drag: { x: true, y: false, setScale: false },
      sync: { key: "footplate", filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
      bind: { dblclick: () => () => state.setZoom(null) },
    },
    hooks: {
      setSelect: [(u) => selected(u, state)],
      setCursor: [pointed],
      drawClear: [(u) => drawMarks(u, state.marks, color)],
      draw: [onDraw],
    },
  };
}

function stepRange({ zoom, range }, from, to) {
  if (zoom) return [zoom.x0, zoom.x1];
  const [first, last] = range || [from, to];
  if (first === null) return [0, 1];
  return first === last ? [Math.max(0, first - 1), last + 1] : [first, last];
}

function selected(u, state) {
  if (u.select.width < 6) return;
  const x0 = Math.max(0, Math.floor(u.posToVal(u.select.left, "x")));
  const x1 = Math.ceil(u.posToVal(u.select.left + u.select.width, "x"));
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (x1 - x0 >= 2) state.setZoom({ x0, x1 });
}
