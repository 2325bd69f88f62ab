// @ts-check
// Undo and redo on the Build page, and the values that the form had in the last hour, to go back to.
import { get } from "../api.js";
import { $, el, notify, notifyError } from "../dom.js";
import { diffList } from "../fixes.js";
import { dateTime } from "../format.js";
import { isMenu } from "../gradio.js";
import { leftOut, withSecretsOf } from "./drafts.js";
import * as form from "./form.js";
import { canUndo, redo, undo } from "./history.js";

const MAX_NAMES = 3;
const MAX_DIFFS = 4;

export function startHistory() {
  $("#fp-undo").addEventListener("click", () => go(undo(), "Undone"));
  $("#fp-versions").addEventListener("click", () => showVersions().catch(notifyError));
  document.addEventListener("keydown", keyPressed);
  drawUndo();
}

export const drawUndo = () => $("#fp-undo").toggleAttribute("disabled", !canUndo());

/** Ctrl+Z and Ctrl+Shift+Z or Ctrl+Y; in a text field, the browser's own undo. @param {KeyboardEvent} event */
function keyPressed(event) {
  const target = /** @type {HTMLInputElement} */ (event.target);
  const isText = target.matches?.("textarea, input:not([type=checkbox], [type=radio])") && !isMenu(target);
  if (!(event.ctrlKey || event.metaKey) || event.altKey || isText) return;
  if (document.body.dataset.tab !== "build" || $("dialog[open]")) return;
  const key = event.key.toLowerCase();
  if (key !== "z" && key !== "y") return;
  event.preventDefault();
  if (key === "z" && !event.shiftKey) go(undo(), "Undone");
  else go(redo(), "Redone");
}

/** @param {Record<string, any> | null} values @param {string} text */
function go(values, text) {
  if (!values) return;
  const labels = form.differing(values).map(form.label);
  form.setValues(values, { remembered: false });
  drawUndo();
  const more = labels.length > MAX_NAMES ? ` and ${labels.length - MAX_NAMES} more` : "";
  notify(`${text}: ${labels.slice(0, MAX_NAMES).join(", ")}${more}.`);
}

async function showVersions() {
  const found = await get("api/drafts");
  const versions = found.map(({ edited, values: stored, left_out: names }) => {
    const { values, missing } = withSecretsOf(stored, names, form.currentValues());
    return { edited, values, names: form.differing(values), note: leftOut(missing) };
  });
  const others = versions.filter(({ names }) => names.length);
  const close = () => dialog.close();
  const use = ({ edited, values, note }) => {
    close();
    form.setValues(values, { undo: `Values from ${dateTime(edited)} restored.${note}` });
  };
  const item = (version) =>
    el(
      "li",
      {},
      el("div.fp-version", {}, el("b", {}, dateTime(version.edited)), differences(version), version.note),
      el("button.fp-button", { type: "button", onclick: () => use(version) }, "Go back to this"),
    );
  const none = el("p.fp-dim", {}, "The form had no other values in the last hour.");
  const dialog = el(
    "dialog.fp-dialog.fp-versions",
    { onclose: () => dialog.remove(), "aria-label": "Earlier values" },
    el("p", {}, "Values that the form had in the last hour, in any tab, and what going back to them would change"),
    others.length ? el("ul", {}, others.map(item)) : none,
    el("div.fp-dialog-row", {}, el("button.fp-button", { type: "button", onclick: close }, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();
}

function differences({ values, names }) {
  const now = form.currentValues();
  const shown = names.slice(0, MAX_DIFFS);
  const list = diffList(
    shown.map((name) => ({
      label: form.label(name),
      from: form.choiceLabel(name, now[name]),
      to: form.choiceLabel(name, values[name]),
    })),
  );
  if (names.length > shown.length) list.append(el("span.fp-dim", {}, `and ${names.length - shown.length} more`));
  return list;
}
