// @ts-check
// Marks in the charts of a run: what happened, below the x axis or as lines, with a tooltip; and the best evaluation.
import { el } from "../dom.js";
import { integer, valueText } from "../format.js";
import { isAlert, markText } from "./live.js";

const NEAR = 5; // px: how far the pointer may be from the marks in its tooltip
const SIZE = 6; // px: of a mark
const KEYS = { saved: "Checkpoint", evaluation: "Evaluation", resumed: "Resumed or restarted", alert: "Alert" };

/** @typedef {import("./live.js").RunEvent} RunEvent */

/**
 * The marks of the charts by step: the events, checkpoints and resumes without an event (LLaMA-Factory writes none),
 * and evaluations.
 * @param {{ events: RunEvent[], checkpoints: number[] }} happened @param {any} response the series
 * @returns {RunEvent[]}
 */
export function marksOf({ events, checkpoints }, response) {
  const marks = new Map(events.map((event) => [`${event.kind} ${event.step}`, event]));
  const add = (kind, step) => {
    const name = `${kind} ${step}`;
    if (!marks.has(name)) marks.set(name, { kind, step, text: "" });
  };
  for (const step of checkpoints) add("saved", step);
  if (response) {
    for (const step of response.resumed) add("resumed", step);
    for (const [key, { x }] of Object.entries(response.series)) {
      if (key.startsWith("eval_")) for (const step of x) add("evaluation", step);
    }
  }
  return [...marks.values()].sort((a, b) => a.step - b.step);
}

const kindOf = (mark) => (isAlert(mark) ? "alert" : mark.kind);

/** The meaning of the marks that the charts have. @param {RunEvent[]} marks @returns {Node[]} */
export function markKey(marks) {
  const found = new Set(marks.map(kindOf));
  return Object.entries(KEYS)
    .filter(([kind]) => found.has(kind))
    .map(([kind, name]) => el("span", {}, el("i", { "data-kind": kind }), name));
}

/**
 * Alerts and resumes are lines over the chart's height; below the axis are triangles for checkpoints and dots for
 * evaluations, in two rows, since both often have the same step. If several marks are in the same place, only the first
 * one is drawn.
 * @param {any} u @param {RunEvent[]} marks @param {(name: string) => string} color
 */
export function drawMarks(u, marks, color) {
  const { ctx, bbox } = u;
  const ratio = window.devicePixelRatio;
  const bottom = bbox.top + bbox.height;
  const drawn = /** @type {Record<string, number>} */ ({});
  ctx.save();
  ctx.lineWidth = ratio;
  for (const mark of marks) {
    const kind = kindOf(mark);
    const x = Math.round(u.valToPos(mark.step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width || x - drawn[kind] < SIZE * ratio) continue;
    drawn[kind] = x;
    ctx.strokeStyle = ctx.fillStyle = color({ alert: "--fp-warn", evaluation: "--fp-second" }[kind] || "--fp-dim");
    ctx.setLineDash(kind === "resumed" ? [4 * ratio, 4 * ratio] : []);
    ctx.beginPath();
    if (kind === "saved") drawTriangle(ctx, x, bottom + 3 * ratio, (SIZE / 2) * ratio);
    else if (kind === "evaluation") ctx.arc(x, bottom + 12.5 * ratio, 2.5 * ratio, 0, 2 * Math.PI);
    else {
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
    ctx.fill();
  }
  ctx.restore();
}

function drawTriangle(ctx, x, top, half) {
  ctx.moveTo(x, top);
  ctx.lineTo(x - half, top + 2 * half);
  ctx.lineTo(x + half, top + 2 * half);
  ctx.closePath();
}

/** The marks next to the pointer, those of the step nearest to it. @param {any} u @param {RunEvent[]} marks */
export function marksAt(u, marks) {
  const away = (mark) => Math.abs(u.valToPos(mark.step, "x") - u.cursor.left);
  const least = Math.min(...marks.map(away));
  return least <= NEAR ? marks.filter((mark) => away(mark) === least) : [];
}

/** The lines of the tooltip: the step, and what happened there. @returns {string[]} */
export function textsOf(marks, chart, response) {
  if (!marks.length) return [];
  const capital = (text) => text.replace(/^./, (first) => first.toUpperCase());
  const line = chart.second && response.series[chart.second];
  const value = line ? line.y[line.x.indexOf(marks[0].step)] : undefined;
  const text = (mark) => {
    if (isAlert(mark)) return `${capital(mark.kind)}: ${mark.text}`;
    const measured = mark.kind === "evaluation" && Number.isFinite(value);
    return capital(markText(mark)) + (measured ? `: ${chart.secondName} ${valueText(chart.key, value)}` : "");
  };
  return [`Step ${integer(marks[0].step)}`, ...marks.map(text)];
}

/** A tooltip above the x axis; without texts it is hidden. */
export function createTooltip() {
  const node = el("div.fp-tooltip", { hidden: true, "aria-hidden": "true" });
  /** @param {any} u @param {string[]} texts */
  function show(u, texts) {
    node.hidden = !texts.length;
    if (!texts.length) return;
    node.replaceChildren(...texts.map((text, i) => el(i ? "span" : "b", {}, text)));
    const middle = u.over.offsetLeft + u.cursor.left - node.offsetWidth / 2;
    node.style.left = `${Math.max(0, Math.min(middle, u.width - node.offsetWidth))}px`;
  }
  return { node, show };
}

/**
 * The best of several evaluations, or null. @param {import("../charts.js").Chart} chart @param {any} response
 * @returns {{ step: number, value: number } | null}
 */
export function bestOf(chart, response) {
  const key = chart.second;
  if (!chart.marksBest || !key || !response || !response.series[key]) return null;
  if (response.min[key] === response.max[key]) return null;
  const side = chart.best === "lowest" ? "min" : "max";
  return { step: response[`${side}_step`][key], value: response[side][key] };
}

/** A ring around the best evaluation, labeled "best". */
export function createBestMark() {
  const node = el("span.fp-best-point", { hidden: true, "aria-hidden": "true" }, el("b", {}, "best"));
  /** @param {any} u @param {{ step: number, value: number } | null} point */
  function place(u, point) {
    const x = point && u.valToPos(point.step, "x");
    node.hidden = x === null || x < 0 || x > u.over.clientWidth;
    if (!point || node.hidden) return;
    node.style.left = `${x}px`;
    node.style.top = `${u.valToPos(point.value, "y")}px`;
    node.classList.toggle("fp-below", u.valToPos(point.value, "y") < 24);
    node.classList.toggle("fp-left", x > u.over.clientWidth - 24);
  }
  return { node, place };
}
