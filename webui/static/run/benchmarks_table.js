// @ts-check
// The result of a benchmark: each metric of each task for base model and trained model, and the change.
import { el, table } from "../dom.js";
import { integer, num } from "../format.js";

const VERDICTS = {
  better: "Better",
  worse: "Worse",
  unclear: "No clear change",
  few: "Too few samples",
  "": "Not compared",
};
const HEADS = ["Task and metric", "Base model", "Trained model", "Change (95% interval)", "Samples"];

/** @param {any[]} rows as benchmark_results.rows has them */
export function resultTable(rows) {
  return table("table.fp-scores", HEADS, rows.map(resultRow));
}

function resultRow(row) {
  const cell = (name, ...value) => el("td.fp-figures", { "data-name": name }, ...value);
  const hasBase = row.base !== null;
  const change = el(
    "span.fp-score-change",
    {},
    el("b", {}, hasBase ? VERDICTS[row.verdict] : "\u2013"),
    ["better", "worse", "unclear"].includes(row.verdict) ? ` ${interval(row)}` : "",
  );
  return el(
    "tr",
    { "data-verdict": row.verdict || "few", title: row.sentence },
    el("th", { scope: "row" }, row.label),
    cell("Base model", valueText(row, "base")),
    cell("Trained model", valueText(row, "trained")),
    cell("Change", change),
    cell("Samples", integer(row.count)),
  );
}

/** A value and lm-eval's standard error; a dash for what is not a number. */
function valueText(row, side) {
  const { [side]: value, stderr, is_share: isShare } = row;
  if (value === null) return "\u2013";
  const shown = (number) => (isShare ? (100 * number).toFixed(1) : num(number, 4));
  const error = stderr[side] === null ? "" : `\u00a0\u00b1\u00a0${shown(stderr[side])}`;
  return `${shown(value)}${isShare ? "%" : ""}${error}`;
}

/** +8.3 to +58.3 percentage points */
function interval({ low, high }) {
  const signed = (value) => `${value < 0 ? "\u2212" : "+"}${Math.abs(100 * value).toFixed(1)}`;
  return `${signed(low)} to ${signed(high)} percentage points`;
}
