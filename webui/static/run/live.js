// @ts-check
// The panel that shows what a run reports about itself: alerts, and the last measurement of each rank.
import { el, table, tableRow } from "../dom.js";
import { bytes, integer, num, percent } from "../format.js";

const SHOWN_ALERTS = 4;
const MARKS = { saved: "checkpoint saved", resumed: "resumed", evaluation: "evaluation" };

/** @typedef {{ kind: string, step: number, text: string }} RunEvent */

export const isAlert = (/** @type {RunEvent} */ { kind }) => !(kind in MARKS);
/** What a mark on a chart says. @param {RunEvent} event */
export const markText = ({ kind, step }) =>
  kind === "resumed" && step <= 0 ? "restarted at step 0" : MARKS[kind] || kind;

/** @param {RunEvent[]} events @returns {Node[]} the newest alerts first */
export function alertParts(events) {
  const found = events.filter(isAlert).reverse();
  const row = ({ step, text }) => el("li", {}, el("span.fp-figures.fp-dim", {}, `Step ${integer(step)}`), text);
  const older = found.length - SHOWN_ALERTS;
  return [
    el("h3", {}, found.length === 1 ? "1 alert" : `${found.length} alerts`),
    el("ul", {}, found.slice(0, SHOWN_ALERTS).map(row)),
    older > 0 ? el("p.fp-dim", {}, `${older} older ${older === 1 ? "alert is" : "alerts are"} in the log.`) : null,
  ].filter(Boolean);
}

/** @type {[string, string, (value: number) => string][]} */
const COLUMNS = [
  ["Memory", "memory", bytes],
  ["GPU utilization", "utilization", (value) => `${integer(value)}%`],
  ["Power", "power", (value) => `${integer(value)} W`],
  ["CPU cores in use", "cores", (value) => num(value, 2)],
  ["Waiting for batches", "data", percent],
];

/** One row per rank of a measurement. */
export function rankTable({ ranks, step }) {
  const columns = COLUMNS.filter(([, key]) => ranks.some((rank) => Number.isFinite(rank[key])));
  const name = (rank, i) => `Rank ${i}: ${rank.device} on ${rank.host}`;
  const cell = (rank, key, text) => (Number.isFinite(rank[key]) ? text(rank[key]) : "\u2013");
  const rows = ranks.map((rank, i) =>
    tableRow([name(rank, i), ...columns.map(([, key, text]) => cell(rank, key, text))], "td.fp-n"),
  );
  const heads = [`Measured at step ${integer(step)}`, ...columns.map(([title]) => title)];
  return table("table.fp-rows", heads, rows, "th.fp-n");
}

/** Cards with the time of a step in the whole run until now, and the use of the GPUs at the last measurement. */
export function liveCards({ step_seconds: seconds, ranks = [] }) {
  const cards = [];
  const time = (s) => (s < 1 ? `${num(1000 * s, 3)} ms` : `${num(s, 3)} s`);
  if (seconds)
    cards.push({ title: "Median step time", value: time(seconds.p50), note: `95% below ${time(seconds.p95)}` });
  const mean = (key) => {
    const values = ranks.map((rank) => rank[key]).filter(Number.isFinite);
    return values.length ? values.reduce((a, b) => a + b) / values.length : null;
  };
  if (mean("utilization") !== null) {
    const note = mean("power") === null ? "" : `${integer(mean("power"))} W per GPU`;
    cards.push({ title: "GPU utilization", value: `${integer(mean("utilization"))}%`, note });
  }
  return cards;
}
