// @ts-check
// The curves of several runs in one chart per metric, over steps, epochs, tokens or wall time.
import { get, runPath } from "../api.js";
import { loadSettings } from "../chart_bar.js";
import { CHARTS, nearest, numberedKeys, smoothed } from "../charts.js";
import { el } from "../dom.js";
import { integer, num, valueText } from "../format.js";
import { onThemeChange } from "../gradio.js";
import { DISTANCES, createPlot, curveColor, plotOptions, tickText } from "../plot.js";

const MOST_POINTS = 12000; // per metric, for all runs together
const FADED = 0.15; // opacity
const HIGHLIGHTED = 2.6; // px: the width of a curve
const RETRY = 5000; // ms, until curves that could not be loaded are requested again
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
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

/**
 * @typedef {{ id: string, name: string, state: string }} Compared
 * @typedef {import("../plot.js").Curve & { run: number }} Curve `run` is the number of the run
 */

/** The charts. `onMissing` gets the names of runs without the selected axis, of runs whose curves could not be loaded,
 * and why not. */
export function createCompareCharts({ onMissing }) {
  const state = {
    ...loadSettings(),
    runs: /** @type {Compared[]} */ ([]),
    found: /** @type {Map<string, any>} */ (new Map()), // id -> response
    axis: "step",
    highlighted: -1, // the number of a run
    setZoom,
    zoomTo: (from, to) => setZoom([from, to]),
  };
  const cards = CHARTS.map((chart) => createCompareChart(chart, state));
  const node = el(
    "div.fp-charts-grid",
    {},
    cards.map((card) => card.node),
  );
  const draw = () => cards.forEach((card) => card.draw());
  const rebuild = () => cards.forEach((card) => card.rebuild());
  const curves = createRequests(state, draw, onMissing);
  onThemeChange(rebuild);

  function setZoom(zoom) {
    state.zoom = zoom;
    cards.forEach((card) => card.applyZoom());
    void curves.load(true);
  }

  /** @param {Compared[]} runs @param {string} axis */
  function open(runs, axis) {
    const same = axis === state.axis && runs.map(({ id }) => id).join() === state.runs.map(({ id }) => id).join();
    if (!same) Object.assign(state, { found: new Map(), zoom: null });
    Object.assign(state, { runs, axis });
    if (!same) rebuild();
    return curves.load(!same);
  }

  function highlight(number) {
    if (number === state.highlighted) return;
    state.highlighted = number;
    cards.forEach((card) => card.highlight());
  }
  return { node, state, draw, rebuild, open, close: curves.cancel, highlight, resetZoom: () => setZoom(null) };
}

/** The requests for curves. @param {any} state of createCompareCharts @param {() => void} draw */
function createRequests(state, draw, onMissing) {
  let generation = 0; // a late response to a request of an earlier generation is discarded

  /** Request the curves of each run and draw them as they arrive, two requests at a time; of long runs, in parts. */
  async function load(fresh = false) {
    const mine = ++generation;
    if (fresh) state.found.forEach((response) => (response.etag = ""));
    const waiting = [...state.runs];
    const failed = /** @type {Map<string, string>} */ (new Map()); // id -> why
    const next = async () => {
      for (let run = waiting.shift(); run && mine === generation; run = waiting.shift()) {
        const { id } = run;
        const response = await get(pathOf(run, state)).catch((error) => void failed.set(id, error.message));
        if (mine !== generation) return;
        if (response) state.found.set(run.id, response);
        if (response && response.read < 1) waiting.push(run);
        if (response && (waiting.length % 4 === 0 || state.found.size === 1)) draw();
      }
    };
    await Promise.all([1, 2].map(next));
    if (mine !== generation) return;
    draw();
    const isEmpty = ({ id }) => !failed.has(id) && !Object.keys((state.found.get(id) || { series: {} }).series).length;
    const names = (chosen) => state.runs.filter(chosen).map(({ name }) => name);
    onMissing(
      names(isEmpty),
      names(({ id }) => failed.has(id)),
      [...failed.values()][0],
    );
    if (failed.size) setTimeout(() => mine === generation && load(), RETRY);
  }
  const cancel = () => (generation += 1);
  return { load, cancel };
}

/** @param {Compared} run */
function pathOf({ id }, { runs, found, axis, zoom }) {
  const points = Math.max(200, Math.min(1000, Math.floor(MOST_POINTS / runs.length)));
  const range = zoom ? `&x0=${zoom[0]}&x1=${zoom[1]}` : "";
  const have = (found.get(id) || {}).etag || "";
  return `${runPath(id)}/series?n=${points}&x=${axis}${range}&have=${encodeURIComponent(have)}`;
}

/** One chart: the curve of each run, and its second one (validation, rejected completions) dashed. */
function createCompareChart(chart, state) {
  const legend = el("div.fp-legend", { "aria-hidden": "true" }, el("span.fp-legend-step"), el("span"));
  const plot = createPlot(chart, state, { legend, redraw: draw, optionsOf, onBuild: highlight });
  const { place, drawn } = plot;

  function draw() {
    const curves = curvesOf(chart, state);
    plot.draw(curves);
    const names = new Set(curves.map((curve) => state.runs[curve.run].name));
    place.setAttribute("aria-label", `${chart.title} of ${[...names].join(", ")}`);
    if (drawn.plot) pointed(drawn.plot);
  }

  /** While the pointer is elsewhere, the legend says what dashed lines are. */
  function explain() {
    const name = chart.numbered ? "Solid: dataset 1" : `Dashed: ${chart.secondName}`;
    const text = drawn.curves.some(({ dash }) => dash) ? name : "";
    legend.firstChild.textContent = "";
    legend.lastChild.replaceChildren(text);
  }

  function optionsOf(curves) {
    const range = (_, from, to) => state.zoom || (from === to ? [from - 1, to + 1] : [from, to]);
    const distances = { step: DISTANCES, seconds: SECONDS }[state.axis];
    return plotOptions(chart, state, curves, {
      x: { range, distances, text: AXES[state.axis].text },
      cursor: { points: { show: false } },
      hooks: { setCursor: [pointed] },
    });
  }

  function pointed(u) {
    const i = u.cursor.idx;
    if (i === null || i === undefined || u.cursor.left < 0) return explain();
    const found = nearestCurve(u, i, drawn.curves, state.highlighted);
    legend.firstChild.textContent = `${AXES[state.axis].name} ${AXES[state.axis].text(u.data[0][i])}`;
    const key = el("i");
    if (found) key.style.background = found.curve.stroke;
    const name = found && found.curve.name;
    legend.lastChild.replaceChildren(...(found ? [key, name, el("b", {}, valueText(chart.key, found.value))] : []));
  }

  function highlight() {
    if (!drawn.plot) return;
    drawn.curves.forEach(({ run, width }, i) => {
      const faded = state.highlighted >= 0 && run !== state.highlighted;
      drawn.plot.series[i + 1].alpha = faded ? FADED : 1;
      drawn.plot.series[i + 1].width = run === state.highlighted ? HIGHLIGHTED : width;
    });
    drawn.plot.redraw(false);
  }
  return { ...plot, draw, highlight };
}

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
    const common = { run, stroke: curveColor(run), dotSize: 5, spanGaps: true };
    if (chart.numbered) {
      numberedKeys(chart, series).forEach(({ number, key }) => {
        const dash = number > 1 ? [2 * number, 3] : undefined;
        const line = { ...common, ...series[key], width: 1.4, dash, hasDots: true };
        curves.push({ ...line, name: `${name}, dataset ${number}` });
      });
      return;
    }
    if (first && first.x.length) {
      const smooth = chart.smooth && weight > 0 && first.x.length > 2;
      const { x, y } = smooth ? smoothed(means[chart.key] || first, weight) : first;
      curves.push({ ...common, name, x, y, width: 1.6, hasDots: false });
    }
    if (second && second.x.length) {
      const { x, y } = second;
      curves.push({ ...common, name: `${name}, ${chart.secondName}`, x, y, width: 1.2, dash: [4, 3], hasDots: true });
    }
  });
  return curves;
}
