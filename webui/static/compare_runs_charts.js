// @ts-check
// The curves of several runs in one chart per metric, over steps, epochs, tokens or wall time.
import { get, runPath } from "./api.js";
import { CHARTS, HEIGHT, nearest, smoothed, tickText, yAxis, yScale } from "./charts.js";
import { el } from "./dom.js";
import { integer, num, valueText } from "./format.js";
import { onThemeChange } from "./gradio.js";

const MOST_POINTS = 12000; // of all runs together, per curve
const FADED = 0.15;
const SECONDS_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
/** 4:05, 2:04:05 */
function clock(seconds) {
  const [s, two] = [Math.round(seconds), (value) => String(value).padStart(2, "0")];
  const minutes = `${s < 3600 ? Math.floor(s / 60) : two(Math.floor((s % 3600) / 60))}:${two(s % 60)}`;
  return s < 3600 ? minutes : `${Math.floor(s / 3600)}:${minutes}`;
}
/** @type {Record<string, { name: string, text: (value: number) => string }>} */
export const AXES = {
  step: { name: "Step", text: integer },
  epoch: { name: "Epoch", text: (value) => num(value, 3) },
  tokens: { name: "Tokens", text: (value) => tickText(value) },
  seconds: { name: "Wall time", text: clock },
};

const css = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
export const runColor = (number) => css(`--fp-run-${1 + number}`);

/**
 * @typedef {{ id: string, name: string, state: string }} Compared
 * @typedef {{ run: number, name: string, stroke: string, x: number[], y: number[], validation: boolean }} Curve
 */

/** The charts, and the requests for their curves. `onMissing` gets the names of runs without this axis. */
export function createCompareCharts({ onMissing }) {
  const state = {
    runs: /** @type {Compared[]} */ ([]),
    found: /** @type {Map<string, any>} */ (new Map()), // id -> response
    axis: "step",
    zoom: /** @type {[number, number] | null} */ (null),
    weight: Number(localStorage.getItem("fp-smooth") ?? "0.6"),
    logScale: localStorage.getItem("fp-log") === "yes",
    highlighted: -1, // the number of a run
    setZoom,
  };
  let generation = 0;
  const cards = CHARTS.map((chart) => createCard(chart, state));
  const node = el(
    "div.fp-charts-grid",
    {},
    cards.map((card) => card.node),
  );
  const draw = () => cards.forEach((card) => card.draw());
  onThemeChange(() => cards.forEach((card) => card.rebuild()));

  /** Request the curves of each run and draw them as they arrive, two requests at a time; of long runs, in parts. */
  async function load(fresh = false) {
    const mine = ++generation;
    if (fresh) state.found.forEach((response) => (response.etag = ""));
    const points = Math.max(200, Math.min(1000, Math.floor(MOST_POINTS / state.runs.length)));
    const range = state.zoom ? `&x0=${state.zoom[0]}&x1=${state.zoom[1]}` : "";
    const waiting = [...state.runs];
    const next = async () => {
      for (let run = waiting.shift(); run && mine === generation; run = waiting.shift()) {
        const have = (state.found.get(run.id) || {}).etag || "";
        const path = `${runPath(run.id)}/series?n=${points}&x=${state.axis}${range}&have=${encodeURIComponent(have)}`;
        const response = await get(path).catch(() => null);
        if (mine !== generation) return;
        if (response) state.found.set(run.id, response);
        if (response && response.read < 1) waiting.push(run);
        if (response && (waiting.length % 4 === 0 || state.found.size === 1)) draw();
      }
    };
    await Promise.all([1, 2].map(next));
    if (mine !== generation) return;
    draw();
    const missing = state.runs.filter(({ id }) => !Object.keys((state.found.get(id) || { series: {} }).series).length);
    onMissing(missing.map(({ name }) => name));
  }

  function setZoom(zoom) {
    state.zoom = zoom;
    cards.forEach((card) => card.applyZoom());
    void load(true);
  }

  /** @param {Compared[]} runs @param {string} axis */
  function open(runs, axis) {
    const same = axis === state.axis && runs.map(({ id }) => id).join() === state.runs.map(({ id }) => id).join();
    if (!same) Object.assign(state, { found: new Map(), zoom: null });
    Object.assign(state, { runs, axis });
    if (!same) cards.forEach((card) => card.rebuild());
    return load(!same);
  }

  const change = (changes) => {
    Object.assign(state, changes);
    cards.forEach((card) => card.rebuild());
  };
  function highlight(number) {
    if (number === state.highlighted) return;
    state.highlighted = number;
    cards.forEach((card) => card.highlight());
  }
  const close = () => (generation += 1);
  return { node, open, close, change, highlight, resetZoom: () => setZoom(null), state };
}

/** One chart: the training curve of each run, and its validation curve dashed. */
function createCard(chart, state) {
  let plot = null;
  /** @type {Curve[]} */
  let curves = [];
  const legend = el("div.fp-legend", { "aria-hidden": "true" }, el("span.fp-legend-step"), el("span"));
  const place = el("div.fp-plot", { role: "img", "aria-label": chart.title });
  const node = el(
    "figure.fp-chart",
    { hidden: true },
    el("div.fp-chart-head", {}, el("h4", {}, chart.title), el("span.fp-gap"), legend),
    place,
  );
  new ResizeObserver(() => {
    if (plot) plot.setSize({ width: place.clientWidth, height: HEIGHT });
    else draw();
  }).observe(place);

  const usesLog = () => state.logScale && chart.log;
  const visible = (y) => (usesLog() ? y.map((v) => (v > 0 ? v : null)) : y);

  function draw() {
    const next = curvesOf(chart, state);
    node.hidden = !next.length;
    if (!next.length || !place.clientWidth) return;
    const tables = next.map((curve) => [curve.x, visible(curve.y)]);
    const data = tables.length > 1 ? window.uPlot.join(tables) : tables[0];
    const layout = (list) => list.map((curve) => `${curve.run}${curve.validation}`).join();
    const unchanged = plot && layout(next) === layout(curves);
    curves = next;
    if (unchanged) plot.setData(data, !state.zoom);
    else {
      if (plot) plot.destroy();
      place.replaceChildren();
      plot = new window.uPlot(
        plotOptions(place.clientWidth, chart.key, usesLog(), curves, state, pointed),
        data,
        place,
      );
      highlight();
    }
    applyZoom();
    const names = new Set(next.map((curve) => state.runs[curve.run].name));
    place.setAttribute("aria-label", `${chart.title} of ${[...names].join(", ")}`);
  }

  function pointed(u) {
    const i = u.cursor.idx;
    const outside = i === null || i === undefined || u.cursor.left < 0;
    const found = outside ? null : nearestCurve(u, i, curves, state.highlighted);
    legend.firstChild.textContent = outside ? "" : `${AXES[state.axis].name} ${AXES[state.axis].text(u.data[0][i])}`;
    const key = el("i");
    if (found) key.style.background = found.curve.stroke;
    const name = found && found.curve.name;
    legend.lastChild.replaceChildren(...(found ? [key, name, el("b", {}, valueText(chart.key, found.value))] : []));
  }

  function highlight() {
    if (!plot) return;
    curves.forEach((curve, i) => {
      const faded = state.highlighted >= 0 && curve.run !== state.highlighted;
      plot.series[i + 1].alpha = faded ? FADED : 1;
      plot.series[i + 1].width = curve.run === state.highlighted ? 2.6 : widthOf(curve);
    });
    plot.redraw(false);
  }

  function rebuild() {
    if (plot) plot.destroy();
    plot = null;
    draw();
  }
  function applyZoom() {
    if (plot && state.zoom) plot.setScale("x", { min: state.zoom[0], max: state.zoom[1] });
  }
  return { node, draw, rebuild, highlight, applyZoom };
}

const widthOf = (curve) => (curve.validation ? 1.2 : 1.6);

/** The curve nearest to the pointer, of the highlighted run if there is one. */
function nearestCurve(u, i, curves, highlighted) {
  let [best, distance] = [null, Infinity];
  curves.forEach((curve, n) => {
    if (highlighted >= 0 && curve.run !== highlighted) return;
    const value = nearest(u.data[n + 1], i);
    if (value === null) return;
    const far = Math.abs(u.valToPos(value, "y") - u.cursor.top);
    if (far < distance) [best, distance] = [{ curve, value }, far];
  });
  return best;
}

/** @returns {Curve[]} */
function curvesOf(chart, { runs, found, weight }) {
  const curves = [];
  runs.forEach(({ id, name }, run) => {
    const { series, means } = found.get(id) || { series: {}, means: {} };
    const [first, second] = [series[chart.key], chart.second && series[chart.second]];
    const stroke = runColor(run);
    if (first && first.x.length) {
      const line =
        chart.smooth && weight > 0 && first.x.length > 2 ? smoothed(means[chart.key] || first, weight) : first;
      curves.push({ run, name, stroke, x: line.x, y: line.y, validation: false });
    }
    if (second && second.x.length) {
      const label = `${name}, ${chart.secondName}`;
      curves.push({ run, name: label, stroke, x: second.x, y: second.y, validation: true });
    }
  });
  return curves;
}

function plotOptions(width, key, logScale, curves, state, pointed) {
  const font = "11px system-ui, sans-serif";
  const grid = { stroke: css("--fp-grid"), width: 1 };
  const axis = { stroke: css("--fp-dim"), font, grid, ticks: { show: false }, gap: 6 };
  const whole = [1, 2, 5].flatMap((m) => [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map((e) => m * 10 ** e));
  const incrs = { step: whole.sort((a, b) => a - b), seconds: SECONDS_STEPS }[state.axis];
  const text = AXES[state.axis].text;
  const series = (curve) => {
    const show = curve.x.length === 1 || (curve.validation && curve.x.length <= 40);
    const points = { show, size: 5, fill: curve.stroke, stroke: curve.stroke };
    const dash = curve.validation ? [4, 3] : undefined;
    return { stroke: curve.stroke, width: widthOf(curve), dash, spanGaps: true, points };
  };
  return {
    width,
    height: HEIGHT,
    padding: [10, 26, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: (_, from, to) => state.zoom || (from === to ? [from - 1, to + 1] : [from, to]) },
      y: yScale(logScale),
    },
    axes: [
      { ...axis, size: 26, space: 70, ...(incrs ? { incrs } : {}), values: (_, all) => all.map(text) },
      { ...axis, ...yAxis(key, logScale) },
    ],
    series: [{}, ...curves.map(series)],
    cursor: {
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => state.setZoom(null) },
    },
    hooks: { setSelect: [(u) => selected(u, state)], setCursor: [pointed] },
  };
}

function selected(u, state) {
  if (u.select.width < 6) return;
  const [x0, x1] = [u.select.left, u.select.left + u.select.width].map((left) => u.posToVal(left, "x"));
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  state.setZoom([x0, x1]);
}
