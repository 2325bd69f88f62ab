// @ts-check
// Everything in JavaScript that depends on how Gradio works inside (tested version: webui/gradio_internals.py). The
// CSS for Gradio's elements is in gradio.css. Ids like #fp-write and classes like .fp-field are ours: pages.py and
// form.py pass them to Gradio as elem_id and elem_classes.

const MARGIN = 8; // px between the help of a field and the edge of the window

/** The path that the page is served at; a proxy may add a prefix. */
export function rootPath() {
  const config = /** @type {any} */ (window).gradio_config;
  return ((config && config.root) || "").replace(/\/$/, "");
}

/** Tell the script in the page's head (gradio_internals.py) that the timer of Gradio's loading screen may stop. */
export function stopLoadingTimer() {
  window.dispatchEvent(new Event("footplate-ready"));
}

/** Run the click handler of the hidden button, which writes the values of footplate.valuesToWrite() into the form. */
export function writeFormValues() {
  document.getElementById("fp-write")?.click();
}

/**
 * The field and value of an input event, or null if it is in a menu, which Gradio's own event reports (pages.py). For
 * other fields, Gradio's events come later, and not at all for text that is pasted, dropped, undone or autocompleted.
 * @param {Event} event
 */
export function editedField(event) {
  const input = /** @type {HTMLInputElement} */ (event.target);
  const field = input.closest?.(".fp-field");
  if (!field || field.classList.contains("fp-menu")) return null;
  if (input.type === "checkbox") return { id: field.id, value: input.checked };
  if (input.type === "number") return { id: field.id, value: input.value === "" ? null : Number(input.value) };
  return { id: field.id, value: input.value };
}

/** Whether an element belongs to a menu, whose text field only filters its list. @param {Element} element */
export const isMenu = (element) => Boolean(element.closest(".fp-field.fp-menu"));

/** Make a field's help its description, and a field with several radio buttons one group, in which arrow keys select.
 * @param {Element} field */
export function describeField(field) {
  const help = field.querySelector(".info-text");
  const inputs = field.querySelectorAll("input, textarea");
  if (help) {
    help.id = `${field.id}-help`;
    for (const event of ["pointerenter", "focusin"]) field.addEventListener(event, () => keepInside(help));
  }
  for (const input of inputs) if (help) input.setAttribute("aria-describedby", help.id);
  const label = field.matches("fieldset") && field.querySelector("[data-testid='block-info']");
  if (!label) return;
  groupRadios(field);
  label.id = `${field.id}-label`;
  field.setAttribute("aria-labelledby", label.id);
  if (help) field.setAttribute("aria-describedby", help.id);
}

/** Move the help of a field to the left, or above the field, if it would end outside the window. @param {any} help */
function keepInside(help) {
  help.style.left = "0px";
  help.classList.remove("fp-above");
  const { left, right, bottom } = help.getBoundingClientRect();
  const { clientWidth, clientHeight } = document.documentElement;
  help.style.left = `${Math.max(MARGIN - left, Math.min(0, clientWidth - MARGIN - right))}px`;
  help.classList.toggle("fp-above", bottom > clientHeight);
}

/** Gradio gives each radio button its own name, and a new name after each change. @param {Element} field */
function groupRadios(field) {
  const group = () => {
    for (const input of field.querySelectorAll("input")) if (input.name !== field.id) input.name = field.id;
  };
  new MutationObserver(group).observe(field, { subtree: true, childList: true, attributeFilter: ["name"] });
  group();
}

/** Gradio opens a menu's list when the menu gets the focus, and closes it after a click elsewhere, but not when the
 * focus moves on with Tab, which browsers move to a long list first. @param {FocusEvent} event */
export function closeLeftMenu(event) {
  const target = /** @type {Element} */ (event.target);
  const menu = target.closest(".fp-field.fp-menu");
  if (!menu || menu.contains(/** @type {Node | null} */ (event.relatedTarget))) return;
  menu.querySelector("input")?.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
}

/** Select the text of a menu that gets the focus: Gradio would add what is typed to the text of the selected choice,
 * and search its list for both. @param {FocusEvent} event */
export function selectMenuText(event) {
  const input = /** @type {HTMLInputElement} */ (event.target);
  if (!isMenu(input) || input.readOnly || !input.select) return;
  setTimeout(() => {
    if (document.activeElement !== input) return;
    input.select(); // after this event, since a click first places the caret
    for (const list of input.closest(".fp-field")?.querySelectorAll("ul") ?? []) list.tabIndex = -1;
  });
}

/** Gradio opens a menu's list when the menu gets the focus: a click into a menu that has the focus, but was closed with
 * Escape, would do nothing. @param {MouseEvent} event */
export function reopenMenu(event) {
  const input = /** @type {HTMLElement} */ (event.target);
  if (!isMenu(input) || input !== document.activeElement || input.getAttribute("aria-expanded") !== "false") return;
  input.blur();
  setTimeout(() => input.focus()); // within this event, Gradio would close the list again
}

/** Gradio takes the focus from a menu when Enter selects an entry, so that the next Tab would begin at the top of the
 * page. The menu gets it back, with its list closed. @param {KeyboardEvent} event */
export function keepMenuFocus(event) {
  const input = /** @type {HTMLElement} */ (event.target);
  if (event.key !== "Enter" || !isMenu(input) || input.getAttribute("aria-expanded") !== "true") return;
  setTimeout(() => {
    if (document.activeElement !== document.body) return;
    input.focus({ preventScroll: true });
    input.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  });
}

/**
 * Chromium drops a comma in a number field, so 0,001 would become 0001. After a 0 in a field for decimal numbers, the
 * comma becomes a decimal point; elsewhere it may separate thousands.
 * @param {InputEvent} event @param {(input: HTMLInputElement) => boolean} isDecimal whether a field has such numbers
 */
export function typeDecimalPoint(event, isDecimal) {
  const input = /** @type {HTMLInputElement} */ (event.target);
  const text = `${event.inputType === "insertText" ? input.value : ""}${event.data || ""}`;
  if (input.type !== "number" || !/^-?0?,\d*$/.test(text) || !isDecimal(input)) return;
  event.preventDefault();
  document.execCommand("insertText", false, (event.data || "").replace(",", "."));
}

/** The text of each menu before the user typed into the menu to filter its list. @type {Map<Element, string>} */
const choices = new Map();

/** @param {InputEvent} event */
export function keepMenuChoice(event) {
  const input = /** @type {HTMLInputElement} */ (event.target);
  if (isMenu(input) && !choices.has(input)) choices.set(input, input.value);
}

/** Escape closes a menu's list, but Gradio leaves what was typed as if that was the choice. After an entry was
 * selected, or the focus has moved on, Gradio has written the choice itself. @param {Event} event */
export function restoreMenuChoice(event) {
  const { key, target, isTrusted } = /** @type {any} */ (event);
  const text = choices.get(target);
  if (event.type !== "keydown" || key === "Enter") choices.clear();
  if (key !== "Escape" || !isTrusted || text === undefined) return;
  choices.clear();
  setTimeout(() => {
    target.value = text;
    target.dispatchEvent(new Event("input", { bubbles: true }));
  });
}

/** @param {string} fieldId @param {string} text */
export function setPlaceholder(fieldId, text) {
  const input = /** @type {any} */ (document.querySelector(`#${fieldId} :is(input, textarea)`));
  if (input) input.placeholder = text;
}

/** Focus a field's input: the selected one of a radio group, or its first button. A value is selected, as by Tab, so
 * that typing replaces it. @param {Element} field */
export function focusField(field) {
  const input = /** @type {HTMLElement | null} */ (
    field.querySelector("input:not([type=radio]), textarea, input:checked") || field.querySelector("button")
  );
  if (input) input.focus({ preventScroll: true });
  if (input instanceof HTMLInputElement) input.select();
}

/** Call `listener` after every switch between light and dark: Gradio's theme follows the class `dark` of the body.
 * @param {() => void} listener */
export function onThemeChange(listener) {
  new MutationObserver(listener).observe(document.body, { attributes: true, attributeFilter: ["class"] });
}
