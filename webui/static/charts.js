// @ts-check
// The charts of a run: uPlot on series that the server has downsampled; a zoom requests its range in full detail.
import { get, url } from "./api.js";
import { el } from "./dom.js";
import { integer, num } from "./format.js";
import { isAlert, markText } from "./live.js";
import { onThemeChange } from "./gradio.js";
import { createPoller } from "./poll.js";

export const HEIGHT = 196;
const POINTS = 1000;
const ZOOM_HINT = "Drag across a chart to zoom";
const MARK = 8; // px: the height of a checkpoint's mark, and the width in which the pointer finds one
/**
 * A chart: the series `key`, and a second one over it. `optional`: shown only if the run logs the series.
 * @typedef {{ key: string, title: string, name: string, second?: string, secondName?: string, smooth?: boolean,
 *   log?: boolean, best: "lowest" | "highest", optional?: boolean }} Chart
 */
/** @type {Chart[]} */
export const CHARTS = [
  { ...trainAndEval("loss", "Loss"), log: true, best: "lowest" },
  { ...trainAndEval("reward_margin", "Reward margin"), optional: true },
  { ...trainAndEval("reward_accuracy", "Reward accuracy"), optional: true },
  {
    key: "reward_chosen",
    title: "Rewards",
    name: "chosen",
    second: "reward_rejected",
    secondName: "rejected",
    best: "highest",
    optional: true,
  },
  { ...trainAndEval("kl", "KL divergence from the reference"), optional: true },
  { ...trainAndEval("reward_mean", "Mean reward"), optional: true },
  { key: "learning_rate", title: "Learning rate", name: "learning rate", log: true, best: "highest" },
  { key: "grad_norm", title: "Gradient norm", name: "norm", smooth: true, log: true, best: "highest" },
  { key: "gpu_utilization", title: "GPU utilization (%)", name: "utilization", best: "highest", optional: true },
  { key: "tokens_per_second", title: "Tokens per second", name: "tokens/s", smooth: true, best: "highest" },
];

/** @returns {Chart} */
function trainAndEval(key, title) {
  return { key, title, name: "train", second: `eval_${key}`, secondName: "validation", smooth: true, best: "highest" };
}

const stored = (name, fallback) => localStorage.getItem(name) ?? fallback;
const color = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

/**
 * Bias-corrected exponential moving average, over means of 2^k points: a long series alternates between the minimum and
 * maximum of each bucket, and a line through them would be a band. `weight` is 0 to 0.99.
 */
export function smoothed({ x, y }, weight) {
  const window = 2 ** Math.max(0, Math.ceil(Math.log2(x.length / 400)));
  const result = { x: [], y: [] };
  let mean = 0;
  let total = 0;
  for (let i = 0; i < x.length; i += window) {
    const part = y.slice(i, i + window).filter(Number.isFinite);
    if (!part.length) continue;
    mean = mean * weight + (part.reduce((a, b) => a + b) / part.length) * (1 - weight);
    total = total * weight + (1 - weight);
    result.x.push(x[Math.min(x.length - 1, i + window - 1)]);
    result.y.push(mean / total);
  }
  return result;
}

export function tickText(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${num(value / 1e6, 3)}M`;
  if (size >= 1e4) return `${num(value / 1e3, 4)}K`;
  return num(value, 4);
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

/** "Latest 0.31 at step 120, lowest 0.29; validation 0.33 at step 100." */
function describe(chart, response, newest) {
  const last = newest[chart.key];
  if (!last) return "";
  const best = chart.best === "lowest" ? response.min[chart.key] : response.max[chart.key];
  const parts = [`Latest ${num(last.value)} at step ${integer(last.step)}, ${chart.best} ${num(best)}`];
  const second = chart.second && newest[chart.second];
  if (second) parts.push(`${chart.secondName} ${num(second.value)} at step ${integer(second.step)}`);
  return `${parts.join("; ")}.`;
}

/**
 * All charts of the open run. `base()` is the run's API path, `hasEnded()` whether the run had ended, `marks()` its
 * events, `onDraw` gets the newest value of each series.
 */
export function createCharts({ base, hasEnded, isVisible, onTrouble, marks, onDraw = (_) => {} }) {
  const state = {
    base,
    hasEnded,
    marks,
    response: null,
    newest: {}, // key -> { step, value }
    zoom: null, // { x0, x1 } in steps, for all charts
    weight: Number(stored("fp-smooth", "0.6")),
    logScale: stored("fp-log", "no") === "yes",
    setZoom,
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
  const cards = CHARTS.map((chart) => createCard(chart, state));
  const node = el(
    "section.fp-charts",
    { "aria-label": "Charts" },
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
    return found.read < 1 ? "more" : undefined;
  }

  function rememberNewest() {
    const { series, last } = state.response;
    for (const [key, { x, y }] of Object.entries(series)) {
      const value = last[key];
      if (!state.zoom) state.newest[key] = { step: x[x.length - 1], value: y[y.length - 1] };
      else if (Number.isFinite(value) && state.newest[key] && state.newest[key].value !== value) {
        state.newest[key] = { step: last.step, value };
      }
    }
  }

  function draw() {
    // A run that ended before its first step has no charts: its log tells why.
    node.hidden = hasEnded() && Boolean(state.response) && !Object.keys(state.response.series).length;
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
    cards.forEach((card) => {
      card.clear();
      card.draw();
    });
    poller.start();
  }

  return { node, open, close: poller.stop, resume: poller.start, redraw: draw };
}

/** One chart with its legend, sentence and CSV link. @param {Chart} chart @param {any} state of createCharts */
function createCard(chart, state) {
  let plot = null;
  let curves = []; // what is drawn

  const legend = el("div.fp-legend", { "aria-hidden": "true" });
  const place = el("div.fp-plot", { role: "img", "aria-label": chart.title }, el("p.fp-plot-empty", {}, ""));
  const sentence = el("p.fp-chart-text");
  const csv = el("a.fp-quiet-link", { download: "", "aria-label": `${chart.title} as CSV` }, "CSV");
  const node = el(
    "figure.fp-chart",
    {},
    el("div.fp-chart-head", {}, el("h4", {}, chart.title), el("span.fp-gap"), legend),
    place,
    el("figcaption", {}, sentence, csv),
  );
  node.hidden = Boolean(chart.optional);
  new ResizeObserver(() => {
    if (plot) plot.setSize({ width: place.clientWidth, height: HEIGHT });
    else if (state.response) draw();
  }).observe(place);

  const usesLog = () => state.logScale && chart.log;
  const positive = (y) => (usesLog() ? y.map((v) => (v > 0 ? v : null)) : y);

  function draw() {
    csv.href = url(`${state.base()}/metrics.csv`);
    const next = curvesOf(chart, state);
    if (chart.optional) node.hidden = !next.length;
    const text = describe(chart, state.response, state.newest);
    sentence.textContent = text;
    place.setAttribute("aria-label", `${chart.title}. ${text}`);
    if (!next.length) return clear();
    if (!place.clientWidth) return undefined; // the view is hidden; the ResizeObserver draws later
    const tables = next.map((c) => [c.x, positive(c.y)]);
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
    place.replaceChildren();
    drawLegend(legend, curves);
    plot = new window.uPlot(plotOptions(place.clientWidth, usesLog(), curves, state, pointed), data, place);
  }

  function pointed(u) {
    const i = u.cursor.idx;
    const outside = i === null || i === undefined || u.cursor.left < 0;
    const mark = outside ? null : markAt(u, state.marks());
    const step = outside ? "" : `step ${integer(u.data[0][i])}`;
    legend.firstChild.textContent = mark ? `step ${integer(mark.step)}: ${markText(mark)}` : step;
    curves.forEach((_, n) => {
      legend.children[n + 1].lastChild.textContent = outside ? "" : num(nearest(u.data[n + 1], i));
    });
  }

  function clear() {
    if (plot) plot.destroy();
    plot = null;
    curves = [];
    legend.replaceChildren();
    const text = state.hasEnded() ? "This run logged no values." : "Values appear after the first logging step.";
    place.replaceChildren(el("p.fp-plot-empty", {}, text));
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

  return { node, draw, clear, rebuild, applyZoom };
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
    if (smooth) curves.push({ name: "smoothed", stroke: accent, ...smoothed(first, weight), width: 1.8 });
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
  legend.replaceChildren(el("span.fp-legend-step"), ...curves.map(entry));
}

function plotOptions(width, logScale, curves, state, pointed) {
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
    width,
    height: HEIGHT,
    padding: [10, 26, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: (u, from, to) => stepRange(state.zoom, from, to) },
      y: { distr: logScale ? 3 : 1 },
    },
    axes: [
      { ...axis, size: 26, space: 70, incrs: steps, values: (u, all) => all.map(integer) },
      { ...axis, size: 54, space: 34, values: (u, all) => all.map((v) => (v === null ? "" : tickText(v))) },
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
      drawClear: [(u) => drawMarks(u, state.marks())],
    },
  };
}

/** Alerts and resumes are lines over the chart's height, checkpoints short ones at its bottom. */
function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  const ratio = window.devicePixelRatio;
  ctx.save();
  ctx.lineWidth = ratio;
  for (const mark of marks) {
    const x = Math.round(u.valToPos(mark.step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const bottom = bbox.top + bbox.height;
    ctx.strokeStyle = color(isAlert(mark) ? "--fp-warn" : "--fp-dim");
    ctx.setLineDash(mark.kind === "resumed" ? [4 * ratio, 4 * ratio] : []);
    ctx.beginPath();
    ctx.moveTo(x, mark.kind === "saved" ? bottom - MARK * ratio : bbox.top);
    ctx.lineTo(x, bottom);
    ctx.stroke();
  }
  ctx.restore();
}

/** The mark under the pointer; alerts before the others. */
function markAt(u, marks) {
  const near = marks.filter((mark) => Math.abs(u.valToPos(mark.step, "x") - u.cursor.left) <= MARK / 2);
  return near.find(isAlert) || near.at(-1);
}

function stepRange(zoom, from, to) {
  if (zoom) return [zoom.x0, zoom.x1];
  if (from === null) return [0, 1];
  return from === to ? [Math.max(0, from - 1), to + 1] : [from, to];
}

function selected(u, state) {
  if (u.select.width < 6) return;
  const x0 = Math.max(0, Math.floor(u.posToVal(u.select.left, "x")));
  const x1 = Math.ceil(u.posToVal(u.select.left + u.select.width, "x"));
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  if (x1 - x0 >= 2) state.setZoom({ x0, x1 });
}
