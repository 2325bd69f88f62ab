// @ts-check
// A chart of a run: its curves with what happened, the best evaluation, a legend with the values at the pointer, a
// sentence, and links.
import { url } from "../api.js";
import { nearest, numberedKeys, smoothed } from "../charts.js";
import { el } from "../dom.js";
import { integer, valueText } from "../format.js";
import { DISTANCES, color, createPlot, curveColor, plotOptions } from "../plot.js";
import { bestOf, createBestMark, createTooltip, drawMarks, marksAt, textsOf } from "./chart_marks.js";

/** @typedef {import("../charts.js").Chart} Chart */

const MARKS_HEIGHT = 14; // px: height of the marks between a chart and the numbers of its x axis

/** @param {Chart} chart @param {any} state of createCharts */
export function createRunChart(chart, state) {
  const legend = createLegend(chart);
  const tooltip = createTooltip();
  const best = createBestMark();
  const sentence = el("p.fp-chart-text");
  const links = createLinks(chart, state);
  const caption = el("figcaption", {}, sentence, links.node);
  const plot = createPlot(chart, state, { legend: legend.node, caption, redraw: draw, optionsOf, onBuild });
  const { place, drawn } = plot;
  place.addEventListener("mouseleave", () => state.pointAt(null, null));

  function draw() {
    links.update();
    const text = describe(chart, state.response, state.newest);
    sentence.textContent = text;
    place.setAttribute("aria-label", `${chart.title}. ${text}`);
    plot.draw(curvesOf(chart, state), state.response?.gaps);
  }

  function optionsOf(curves) {
    const range = (_, from, to) => stepRange(state, from, to);
    return plotOptions(chart, state, curves, {
      x: { range, text: integer, distances: DISTANCES, above: MARKS_HEIGHT },
      cursor: {
        points: { size: 7 },
        sync: { key: "footplate", filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
      },
      hooks: {
        setCursor: [pointed],
        drawClear: [(u) => drawMarks(u, state.marks, color)],
        draw: [(u) => best.place(u, bestOf(chart, state.response))],
      },
    });
  }

  function onBuild() {
    legend.draw(drawn.curves);
    drawn.plot.over.append(best.node);
    place.append(tooltip.node);
  }

  /** The pointer has moved over a chart; if it is another chart, that one handles the move. */
  function pointed(u) {
    if (u.cursor.left >= 0 && u.cursor.idx !== null && place.matches(":hover")) {
      state.pointAt(u.data[0][u.cursor.idx], card);
    }
  }

  /** Show the values at a step, which is the same one in all charts; `own`: the pointer is in this one. */
  function pointAt(step, own) {
    const u = drawn.plot;
    if (!u) return;
    legend.show(u, step);
    tooltip.show(u, own && step !== null ? textsOf(marksAt(u, state.marks), chart, state.response) : []);
  }

  const card = { ...plot, draw, pointAt };
  return card;
}

/** The curves of a chart in drawing order. @returns {import("../plot.js").Curve[]} */
function curvesOf(chart, { response, weight }) {
  const all = (response && response.series) || {};
  const first = all[chart.key];
  const second = chart.second && all[chart.second];
  const accent = color("--fp-accent");
  const common = { hasDots: false, dotSize: 6, spanGaps: false };
  if (chart.numbered) {
    return numberedKeys(chart, all).map(({ number, key }) => {
      const line = { ...common, stroke: curveColor(number - 1), width: 1.5, hasDots: true };
      return { ...line, name: `dataset ${number}`, x: all[key].x, y: all[key].y };
    });
  }
  const curves = [];
  if (first && first.x.length) {
    const smooth = chart.smooth && weight > 0 && first.x.length > 2;
    const line = smooth ? { stroke: color("--fp-pale"), width: 1 } : { stroke: accent, width: 1.6 };
    curves.push({ ...common, ...line, name: chart.name, isRaw: smooth, x: first.x, y: first.y });
    const mean = { ...common, stroke: accent, width: 1.8, name: "smoothed" };
    if (smooth) curves.push({ ...mean, ...smoothed(response.means[chart.key] || first, weight) });
  }
  if (second && second.x.length) {
    const line = { stroke: color("--fp-second"), width: 1.5, hasDots: true };
    curves.push({ ...common, ...line, name: chart.secondName, x: second.x, y: second.y });
  }
  return curves;
}

/** The names of the curves, and their values at the pointer. */
function createLegend({ key }) {
  const node = el("div.fp-legend", { "aria-hidden": "true" });

  function draw(curves) {
    const entry = ({ name, stroke, isRaw }) => {
      const swatch = el("i");
      swatch.style.background = stroke;
      return el(isRaw ? "span.fp-raw" : "span", {}, curves.length > 1 ? [swatch, name] : [], el("b"));
    };
    node.classList.toggle("fp-single", curves.length === 1);
    node.replaceChildren(el("span.fp-legend-step"), ...curves.map(entry));
  }

  /** @param {any} u the plot @param {number | null} step null: the pointer is in no chart */
  function show(u, step) {
    const [at, ...entries] = node.children;
    const i = step === null ? 0 : u.valToIdx(step);
    at.textContent = step === null ? "" : `step ${integer(step)}`;
    entries.forEach((entry, n) => {
      entry.lastChild.textContent = step === null ? "" : valueText(key, nearest(u.data[n + 1], i));
    });
  }
  return { node, draw, show };
}

/** The range of the x axis. */
function stepRange({ zoom, range }, from, to) {
  if (zoom) return zoom;
  const [first, last] = range || [from, to];
  if (first === null) return [0, 1];
  return first === last ? [Math.max(0, first - 1), last + 1] : [first, last];
}

/** "Latest 0.31 at step 120, lowest 0.29; validation 0.33 at step 100, best 0.32 at step 80." */
function describe(chart, response, newest) {
  const last = newest[chart.key];
  if (!last) return "";
  if (chart.numbered) {
    const values = numberedKeys(chart, response.series).filter(({ key }) => newest[key]);
    const texts = values.map(({ number, key }) => `dataset ${number} ${valueText(key, newest[key].value)}`);
    return `At step ${integer(last.step)}: ${texts.join(", ")}.`;
  }
  const extreme = chart.best === "lowest" ? response.min[chart.key] : response.max[chart.key];
  const text = (value) => valueText(chart.key, value);
  const parts = [`Latest ${text(last.value)} at step ${integer(last.step)}, ${chart.best} ${text(extreme)}`];
  const second = chart.second && newest[chart.second];
  if (second) {
    const point = bestOf(chart, response);
    const when = second.step === last.step ? "" : ` at step ${integer(second.step)}`;
    const best = point ? `, best ${text(point.value)} at step ${integer(point.step)}` : "";
    parts.push(`${chart.secondName} ${text(second.value)}${when}${best}`);
  }
  return `${parts.join("; ")}.`;
}

/** Links to the values of a run, and to images of a chart as it is shown. */
function createLinks(chart, state) {
  const link = (kind) => el("a.fp-quiet-link", { download: "", "aria-label": `${chart.title} as ${kind}` }, kind);
  const [csv, png, svg] = ["CSV", "PNG", "SVG"].map(link);
  function update() {
    const shown = new URLSearchParams();
    if (chart.smooth && state.weight > 0) shown.set("smoothing", String(state.weight));
    if (chart.log && state.logScale) shown.set("log", "true");
    if (state.zoom) state.zoom.forEach((step, i) => shown.set(`x${i}`, String(step)));
    csv.href = url(`${state.base()}/metrics.csv`);
    png.href = url(`${state.base()}/charts/${chart.key}.png?${shown}`);
    svg.href = url(`${state.base()}/charts/${chart.key}.svg?${shown}`);
  }
  return { node: el("span.fp-chart-links", {}, csv, png, svg), update };
}
