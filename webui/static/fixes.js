// @ts-check
// Fixes of findings: their note, their diff, and applying one.
import { setValues } from "./build/form.js";
import { el } from "./dom.js";
import { valueText } from "./format.js";

export const applyFix = (fix) => setValues(fix.patch, { undo: `Applied: ${fix.label}.` });

/** What a fix costs, and whether it changes the training result. */
export function fixNote({ cost, effect }) {
  return el("span.fp-dim", {}, [cost, effect].filter(Boolean).join("; "));
}

/** The values that a fix changes: "Launcher: python -> torchrun". */
export function diffList(diff) {
  const item = ({ name, label, from, to }) =>
    el("span.fp-diff", {}, `${label}: `, el("s", {}, display(name, from)), " \u2192 ", el("b", {}, display(name, to)));
  return el("span.fp-diffs", {}, ...diff.map(item));
}

function display(name, value) {
  if (value === "" || value === null) return "empty";
  if (typeof value === "boolean") return value ? "on" : "off";
  return typeof value === "number" ? valueText(name, value) : String(value);
}

/** The same, folded into one line, for a notification: it must not cover what comes next. */
export const foldedDiff = (diff) =>
  el("details", {}, el("summary", {}, diff.length === 1 ? "1 option" : `${diff.length} options`), diffList(diff));
