// @ts-check
// Completion of paths: below a field, the entries of the folder that was typed so far.
import { get } from "../api.js";
import { el } from "../dom.js";
import { option, optionAt } from "./form.js";

const DELAY = 80; // ms after a key press

/** @typedef {HTMLInputElement | HTMLTextAreaElement} Input */
/** @type {{ input: Input, entries: string[], items: HTMLElement[], node: HTMLElement } | null} */
let list = null;
let active = -1; // the number of the marked entry
let asked = 0;
let timer = 0;

export function completePaths() {
  document.addEventListener("input", typed);
  document.addEventListener("keydown", pressed, true);
  document.addEventListener("focusout", close);
}

/** @param {Event} event */
function typed({ target }) {
  const input = /** @type {Input} */ (target);
  if (!pathKind(input)) return;
  narrow(input);
  clearTimeout(timer);
  timer = setTimeout(() => suggest(input), DELAY);
}

/** Until the answer for what was typed arrives, only names that begin with it are shown. @param {Input} input */
function narrow(input) {
  if (!list) return;
  const { start, end } = line(input);
  const text = input.value.slice(start, end).toLowerCase();
  const kept = list.entries.filter((entry) => entry.toLowerCase().startsWith(text));
  if (kept.length) draw(input, kept, 0);
  else close();
}

/** @param {any} input */
const pathKind = (input) => option(optionAt(input))?.path || "";

/** Where the line with the caret begins and ends: a field may have one path per line. @param {Input} input */
function line(input) {
  const caret = input.selectionStart ?? input.value.length;
  const end = input.value.indexOf("\n", caret);
  return { start: caret && input.value.lastIndexOf("\n", caret - 1) + 1, end: end < 0 ? input.value.length : end };
}

/** @param {Input} input */
async function suggest(input) {
  const mine = ++asked;
  const { start, end } = line(input);
  const text = input.value.slice(start, end);
  const query = new URLSearchParams({ text, kind: pathKind(input) });
  const { entries, more } = await get(`api/paths?${query}`).catch(() => ({ entries: [], more: 0 }));
  if (mine !== asked || document.activeElement !== input) return;
  if (!entries.length || (entries.length === 1 && entries[0] === text)) return close();
  draw(input, entries, more);
}

/** @param {Input} input @param {string[]} entries @param {number} more */
function draw(input, entries, more) {
  close();
  const items = entries.map((entry, number) => {
    const name = entry.replace(/^.*\/(?=.)/, "");
    return el("li", { role: "option", id: `fp-path-${number}`, onclick: () => accept(entry) }, name);
  });
  const rest = more
    ? el("li.fp-dim", { role: "presentation" }, `${more.toLocaleString("en")} more; keep typing to narrow the list`)
    : null;
  const keepFocus = (event) => event.preventDefault(); // the focus stays in the field, even while the list is scrolled
  const node = el(
    "ul",
    { id: "fp-paths", role: "listbox", "aria-label": "Paths", onmousedown: keepFocus },
    items,
    rest,
  );
  const field = /** @type {any} */ (input.closest(".fp-field, .fp-dataset-field"));
  field.append(node);
  node.classList.toggle("fp-above", node.getBoundingClientRect().bottom > document.documentElement.clientHeight);
  for (const [name, value] of [
    ["aria-autocomplete", "list"],
    ["aria-controls", "fp-paths"],
  ])
    input.setAttribute(name, value);
  list = { input, entries, items, node };
}

function close() {
  asked++; // discards a response that is on its way
  if (!list) return;
  list.node.remove();
  for (const name of ["aria-autocomplete", "aria-controls", "aria-activedescendant"]) list.input.removeAttribute(name);
  [list, active] = [null, -1];
}

/** @param {KeyboardEvent} event */
function pressed(event) {
  const input = /** @type {Input} */ (event.target);
  if (!list || input !== list.input) {
    if (event.key === "ArrowDown" && pathKind(input) && !input.value) suggest(input);
    return;
  }
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) mark((active + step + list.items.length + (active < 0 && step < 0 ? 1 : 0)) % list.items.length);
  else if (event.key === "Escape") close();
  else if ((event.key === "Enter" || event.key === "Tab") && !event.shiftKey && active >= 0)
    accept(list.entries[active]);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

/** @param {number} number */
function mark(number) {
  if (!list) return;
  active = number;
  list.items.forEach((item, at) => item.setAttribute("aria-selected", String(at === active)));
  list.items[active].scrollIntoView({ block: "nearest" });
  list.input.setAttribute("aria-activedescendant", list.items[active].id);
}

/** Put an entry into the field; for a folder, its entries are suggested next. @param {string} entry */
function accept(entry) {
  if (!list) return;
  const { input } = list;
  const { start, end } = line(input);
  close();
  input.setRangeText(entry, start, end, "end");
  input.dispatchEvent(new Event("input", { bubbles: true }));
}
