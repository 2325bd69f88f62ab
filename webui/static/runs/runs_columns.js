// @ts-check
// The columns of the list of runs: their widths and texts, which ones are shown, and the menu that selects them.
import { dropdown, el } from "../dom.js";
import { bytes, dateTime, duration, num, valueText } from "../format.js";
import { valueOf } from "./runs_search.js";

/** @typedef {import("./runs_search.js").Column} Column */
/**
 * What the browser remembers; `folded` has the ids of sweeps.
 * @typedef {{ columns: string[] | null, sort: string, descending: boolean, folded: string[] }} View
 */

const STORED = "fp-runs";
const NONE = "\u2013";
const WIDTH = 104; // px: width of a number
const WIDTHS = { state: 116, model: 168, method: 104, strategy: 104, dataset: 150, step: 176, eval_loss: 128 };
Object.assign(WIDTHS, { stage: 126, learning_rate: 118, peak_memory: 116, reward_accuracy: 130, reward_margin: 120 });
Object.assign(WIDTHS, {
  started: 138,
  created: 138,
  duration: 118,
  exact_match: 116,
  tags: 180,
  notes: 240,
  failure: 320,
});
const NAME_WIDTH = 220; // px, at least
const WITHOUT_BAR = 112; // px: width of the progress without its bar
const ACTIONS_WIDTH = 56; // px
/** The default columns, and the least width of the window (px) for each. */
const DEFAULT = { state: 0, model: 1000, method: 1240, stage: 1400, step: 0, loss: 0, started: 0, duration: 1240 };
const TEXTS = {
  step: (value, run) => (run.max_steps ? `${num(value || 0)} / ${num(run.max_steps)}` : value ? num(value) : ""),
  tokens_per_second: (value) => num(value, 3),
  peak_memory: bytes,
  duration,
  started: dateTime,
  created: dateTime,
  tags: (value) => value.join(" "),
};

/** What a cell shows. */
export function textOf(run, /** @type {Column} */ { key, kind }) {
  const value = valueOf(run, key);
  if (key === "step") return TEXTS.step(value, run);
  if (value === undefined || value === null || value === "") return NONE;
  return TEXTS[key] ? TEXTS[key](value, run) : kind === "number" ? valueText(key, value) : String(value);
}

export const isDim = ({ key, kind }) => kind === "time" || (kind === "text" && key !== "failure") || key === "duration";

/** The columns that can be shown next to the name. @param {Column[]} columns */
const selectable = (columns) => columns.filter(({ key, kind }) => key !== "name" && kind !== "yes_no");

/** @returns {View} */
export function loadView() {
  try {
    const { columns, sort, descending, folded } = JSON.parse(localStorage.getItem(STORED) || "{}");
    return {
      columns: Array.isArray(columns) ? columns : null,
      sort: String(sort || ""),
      descending: Boolean(descending),
      folded: Array.isArray(folded) ? folded.map(String) : [],
    };
  } catch {
    return { columns: null, sort: "", descending: false, folded: [] };
  }
}

/** @param {View} view */
export const storeView = (view) => localStorage.setItem(STORED, JSON.stringify(view));

/** The columns to show, in their order. @param {Column[]} columns @param {View} view */
export function shownColumns(columns, view) {
  const isShown = ({ key }) => (view.columns ? view.columns.includes(key) : innerWidth >= (DEFAULT[key] ?? Infinity));
  return selectable(columns).filter(isShown);
}

/** The widths of the table's columns in px; 0 is the rest of the table. @param {Column[]} shown */
export function widthsOf(shown) {
  const hasBar = innerWidth > 1240; // responsive.css
  const fixed = shown.map(({ key }) => (key === "step" && !hasBar ? WITHOUT_BAR : WIDTHS[key] || WIDTH));
  const least = NAME_WIDTH + ACTIONS_WIDTH + fixed.reduce((sum, width) => sum + width, 0);
  return { each: [0, ...fixed, ACTIONS_WIDTH], least };
}

/**
 * The menu with a check box for each column. `changed` gets the keys, null for the default.
 * @param {(keys: string[] | null) => void} changed
 */
export function createColumnMenu(changed) {
  const boxes = el("div.fp-columns-menu");
  const reset = el("button.fp-link", { type: "button", onclick: () => changed(null) }, "Default columns");
  const node = dropdown("Columns", boxes, reset);

  /** @param {Column[]} columns @param {View} view */
  function draw(columns, view) {
    const shown = new Set(shownColumns(columns, view).map(({ key }) => key));
    reset.hidden = !view.columns;
    if (!boxes.childElementCount) {
      const toggled = () => changed([...boxes.querySelectorAll("input:checked")].map((box) => box.value));
      const box = ({ key, label }) =>
        el("label", {}, el("input", { type: "checkbox", value: key, onchange: toggled }), label);
      boxes.append(...selectable(columns).map(box));
    }
    for (const box of boxes.querySelectorAll("input")) box.checked = shown.has(box.value);
  }
  return { node, draw };
}
