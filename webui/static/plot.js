// @ts-check
// A figure with a uPlot chart: its axes, scales and zoom, and when the plot has to be built from scratch.
import { el } from "./dom.js";
import { isRate, isShare, num, valueText } from "./format.js";

const AXIS_HEIGHT = 26; // px: height of the numbers of the x axis
const GAP = 6; // px: between an axis and its numbers
const LEAST_ZOOM = 6; // px
const FEW_POINTS = 40; // a curve with fewer points has dots
/** 1, 2, 5, 10, 20, 50 and so on: the distances between numbers of an axis */
export const DISTANCES = [1, 2, 5]
  .flatMap((m) => Array.from({ length: 11 }, (_, e) => m * 10 ** e))
  .sort((a, b) => a - b);

/**
 * What all charts of a view share; `zoomTo` gets a selected part of the x axis.
 * @typedef {{ logScale: boolean, zoom: [number, number] | null, setZoom: (zoom: [number, number] | null) => void,
 *   zoomTo: (from: number, to: number) => void }} View
 * @typedef {{ name: string, stroke: string, width: number, x: number[], y: (number | null)[], hasDots: boolean,
 *   dotSize: number, dash?: number[], spanGaps: boolean }} Curve
 * @typedef {import("./charts.js").Chart} Chart
 */

/** The value of a CSS variable. @param {string} name */
export const color = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
/** The color of one of many curves, by its number from 0. @param {number} number */
export const curveColor = (number) => color(`--fp-run-${1 + (number % 20)}`);

/**
 * `redraw` is called when the figure gets a size, `optionsOf` with the curves of a new plot, and `onBuild` after the
 * plot was built.
 * @param {Chart} chart @param {View} view
 * @param {{ legend: Node, caption?: Node, redraw: () => void, optionsOf: (curves: any[]) => any,
 *   onBuild: () => void }} parts
 */
export function createPlot(chart, view, { legend, caption, redraw, optionsOf, onBuild }) {
  const place = el("div.fp-plot", { role: "img", "aria-label": chart.title });
  const head = el("div.fp-chart-head", {}, el("h4", { title: chart.title }, chart.title), el("span.fp-gap"), legend);
  const node = el("figure.fp-chart", { hidden: true }, head, place, caption);
  const drawn = { plot: /** @type {any} */ (null), curves: /** @type {any[]} */ ([]) };
  const size = () => ({ width: place.clientWidth, height: place.clientHeight });
  new ResizeObserver(() => {
    if (drawn.plot) drawn.plot.setSize(size());
    else redraw();
  }).observe(place);

  /**
   * Draw curves, unless the view is hidden: then the observer draws them later.
   * @param {any[]} curves @param {[number, number][]} gaps in which points are missing
   */
  function draw(curves, gaps = []) {
    if (!curves.length) return clear();
    node.hidden = false;
    if (!place.clientWidth) return;
    const positive = (y) => (isLog(chart, view) ? y.map((value) => (value > 0 ? value : null)) : y);
    const tables = curves.map(({ x, y }) => withGaps(x, positive(y), gaps));
    const data = tables.length > 1 ? window.uPlot.join(tables) : tables[0];
    if (drawn.plot && layoutOf(curves) === layoutOf(drawn.curves)) {
      drawn.curves = curves;
      drawn.plot.setData(data, !view.zoom);
    } else build(curves, data);
    applyZoom();
  }

  function build(curves, data) {
    destroy();
    place.replaceChildren();
    drawn.curves = curves;
    drawn.plot = new window.uPlot({ ...size(), ...optionsOf(curves) }, data, place);
    onBuild();
  }

  function destroy() {
    drawn.plot?.destroy();
    Object.assign(drawn, { plot: null, curves: [] });
  }
  function clear() {
    destroy();
    node.hidden = true;
  }
  function rebuild() {
    destroy();
    redraw();
  }
  function applyZoom() {
    if (drawn.plot && view.zoom) drawn.plot.setScale("x", { min: view.zoom[0], max: view.zoom[1] });
  }
  return { node, place, drawn, draw, clear, rebuild, applyZoom };
}

const isLog = (chart, view) => view.logScale && Boolean(chart.log);
/** Whether the points of a curve are marked. @param {Curve} curve */
const showsDots = ({ x, hasDots }) => x.length === 1 || (hasDots && x.length <= FEW_POINTS);
/** What a plot has from the time when it was built. @param {Curve[]} curves */
const layoutOf = (curves) =>
  JSON.stringify(curves.map((each) => [each.name, each.stroke, each.width, showsDots(each)]));

/**
 * uPlot's options. `x` has the range and the axis: the distances between its numbers, their texts, and the height of
 * the marks above them. `cursor` and `hooks` are those of this chart.
 * @param {Chart} chart @param {View} view @param {Curve[]} curves @param {{ x: any, cursor: any, hooks: any }} own
 */
export function plotOptions(chart, view, curves, { x, cursor, hooks }) {
  const font = "11px system-ui, sans-serif";
  const grid = { stroke: color("--fp-grid"), width: 1 };
  const axis = { stroke: color("--fp-dim"), font, grid, ticks: { show: false }, gap: GAP };
  const { range, text, distances, above = 0 } = x;
  const xAxis = { size: AXIS_HEIGHT + above, gap: GAP + above, space: 70, values: (_, all) => all.map(text) };
  return {
    padding: [10, 26, 0, 0],
    legend: { show: false },
    scales: { x: { time: false, range }, y: yScale(isLog(chart, view)) },
    axes: [
      { ...axis, ...xAxis, ...(distances ? { incrs: distances } : {}) },
      { ...axis, ...yAxis(chart.key, isLog(chart, view)) },
    ],
    series: [{}, ...curves.map(seriesOf)],
    cursor: {
      y: false,
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => view.setZoom(null) },
      ...cursor,
    },
    hooks: { setSelect: [(u) => zoomToSelection(u, view)], ...hooks },
  };
}

/** @param {Curve} curve */
function seriesOf(curve) {
  const { stroke, width, dash, spanGaps, dotSize } = curve;
  return { stroke, width, dash, spanGaps, points: { show: showsDots(curve), size: dotSize, fill: stroke, stroke } };
}

function zoomToSelection(u, view) {
  const { left, width } = u.select;
  if (width < LEAST_ZOOM) return;
  const [from, to] = [left, left + width].map((at) => u.posToVal(at, "x"));
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  view.zoomTo(from, to);
}

/** A number at an axis. `distance`: to the next number, whose text must differ; 0 if distances vary. */
export function tickText(value, distance = 0) {
  const size = Math.abs(value);
  const needed = distance && size ? Math.min(12, Math.ceil(Math.log10(size / distance)) + 3) : 0;
  if (size >= 1e6) return `${num(value / 1e6, Math.max(3, needed))}M`;
  if (size >= 1e4) return `${num(value / 1e3, Math.max(4, needed))}K`;
  return num(value, Math.max(4, needed));
}

/** The y axis and scale of all charts. @param {string} key of the series */
export function yAxis(key, logScale) {
  const text = (value, distance) => {
    if (isShare(key)) return `${tickText(100 * value, 100 * distance)}%`;
    return isRate(key) ? valueText(key, value) : tickText(value, distance);
  };
  const values = (_, all, axis, space, distance) =>
    all.map((v) => (v === null ? "" : text(v, logScale ? 0 : distance)));
  return { size: 54, space: 34, values };
}
export const yScale = (logScale) => (logScale ? { distr: 3 } : { distr: 1, range: yRange });

/** Same as uPlot's range, but if all values are 0 it ends at 1 instead of 100. */
function yRange(_, from, to) {
  if (from === null) return [null, null];
  return from === 0 && to === 0 ? [0, 1] : window.uPlot.rangeNum(from, to, 0.1, true);
}

/**
 * A curve with an empty point in each gap, so that no line is drawn over steps whose points are missing.
 * @param {number[]} x @param {(number | null)[]} y @param {[number, number][]} gaps
 */
function withGaps(x, y, gaps) {
  const [steps, values] = [[...x], [...y]];
  for (const [after] of gaps) {
    const i = steps.findIndex((step) => step > after);
    if (i < 1) continue;
    steps.splice(i, 0, (steps[i - 1] + steps[i]) / 2);
    values.splice(i, 0, null);
  }
  return [steps, values];
}
