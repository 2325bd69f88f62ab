// @ts-check
// The scores of an evaluation: base model, trained model, and the interval of the change as a picture and in numbers.
import { el, svg } from "../dom.js";
import { integer, num } from "../format.js";

export const GENERAL_LOSS = "general_loss"; // the name of the score of general texts
const WIDTH = 160;
const HEIGHT = 18;
export const VERDICTS = { better: "Better", worse: "Worse", unclear: "No clear change", few: "Too few examples" };

/** @param {any[]} comparisons as intervals.Comparison has them */
export function scoresTable(comparisons) {
  const columns = [
    "Score",
    "Base model",
    "Trained model",
    "Worse \u2190 95% interval \u2192 Better",
    "Change",
    "Texts",
  ];
  const heads = columns.map((name) => el("th", { scope: "col" }, name));
  const longest = Math.max(...comparisons.filter((row) => !row.is_share).map(reach), 1e-9);
  const rows = comparisons.map((row) => scoreRow(row, row.is_share ? 1 : longest));
  return el("table.fp-scores", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
}

const reach = ({ low, high }) => Math.max(Math.abs(low), Math.abs(high));

/** @param {number} scale the change at the end of the picture */
function scoreRow(row, scale) {
  const shown = (value) => scoreText(value, row.is_share);
  const cell = (name, value, kind = "") => el(`td${kind}`, { "data-name": name }, value);
  return el(
    "tr",
    { "data-verdict": row.verdict, title: row.sentence },
    el("th", { scope: "row" }, row.label),
    cell("Base model", shown(row.base), ".fp-figures"),
    cell("Trained model", shown(row.trained), ".fp-figures"),
    cell("95% interval", row.verdict === "few" ? "\u2013" : picture(row, scale)),
    cell(
      "Change",
      el(
        "span.fp-score-change.fp-figures",
        {},
        el("b", {}, VERDICTS[row.verdict]),
        row.verdict === "few" ? "" : ` ${changeText(row)}`,
      ),
    ),
    cell("Texts", integer(row.count), ".fp-figures"),
  );
}

/** A share in percent, a loss as it is. @param {number | null} value @param {boolean} isShare */
export function scoreText(value, isShare) {
  if (value === null || value === undefined) return num(value);
  return isShare ? `${(100 * value).toFixed(1)}%` : value.toFixed(3);
}

/** +42.1 to +91.7 points */
export function changeText({ low, high, is_share: isShare }) {
  const signed = (value) => {
    const text = isShare ? Math.abs(100 * value).toFixed(1) : num(Math.abs(value), 3);
    return `${value < 0 ? "\u2212" : "+"}${text}`;
  };
  return `${signed(low)} to ${signed(high)}${isShare ? " points" : ""}`;
}

/** The interval on an axis whose middle is no change. */
function picture(row, scale) {
  const sign = row.is_share ? 1 : -1; // for a loss, lower is better
  const place = (value) => WIDTH / 2 + ((sign * value) / scale) * (WIDTH / 2 - 6);
  const [one, other] = [place(row.low), place(row.high)].sort((a, b) => a - b);
  const middle = HEIGHT / 2;
  const attributes = { width: WIDTH, height: HEIGHT, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" };
  const range = { x: one, y: middle - 4, width: Math.max(2, other - one), height: 8, rx: 4 };
  return svg(
    "svg",
    { class: "fp-interval", ...attributes },
    svg("line", { x1: 0, x2: WIDTH, y1: middle, y2: middle }),
    svg("line", { class: "fp-interval-zero", x1: WIDTH / 2, x2: WIDTH / 2, y1: 1, y2: HEIGHT - 1 }),
    svg("rect", { class: "fp-interval-range", ...range }),
    svg("circle", { class: "fp-interval-mean", cx: place(row.trained - row.base), cy: middle, r: 3 }),
  );
}
