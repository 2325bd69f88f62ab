// @ts-check
// Everything in JavaScript that depends on how Gradio works inside (tested version: webui/gradio_internals.py). Its
// selectors in CSS are in gradio.css. Ids like #fp-write and classes like .fp-field are ours: pages.py and form.py pass
// them to Gradio as elem_id and elem_classes.

/** The path that the page is served at; a proxy may add a prefix. */
export function rootPath() {
  const config = /** @type {any} */ (window).gradio_config;
  return ((config && config.root) || "").replace(/\/$/, "");
}

/** Run the click handler of the hidden button, which writes the values of footplate.valuesToWrite() into the form. */
export function writeFormValues() {
  document.getElementById("fp-write")?.click();
}

/**
 * The field and text of an input event in a text field, or null. Gradio's .input event reports key strokes only, not
 * what is pasted, dropped, undone or completed by the browser.
 * @param {Event} event
 */
export function editedTextField(event) {
  const input = /** @type {HTMLInputElement} */ (event.target);
  if (input.dataset?.testid !== "textbox") return null;
  const field = input.closest(".fp-field");
  return field && { id: field.id, value: input.value };
}

/** @param {string} fieldId @param {string} text */
export function setPlaceholder(fieldId, text) {
  const input = /** @type {any} */ (document.querySelector(`#${fieldId} :is(input, textarea)`));
  if (input) input.placeholder = text;
}

/** Focus a field's input: the selected one of a radio group. @param {Element} field */
export function focusField(field) {
  const input = /** @type {HTMLElement | null} */ (
    field.querySelector("input:not([type=radio]), textarea, input:checked")
  );
  if (input) input.focus({ preventScroll: true });
}

/** Gradio's theme follows the class `dark` of the body. */
export const isDark = () => document.body.classList.contains("dark");
/** @param {boolean} dark */
export const setDark = (dark) => document.body.classList.toggle("dark", dark);
/** Call `listener` after every switch between light and dark. @param {() => void} listener */
export function onThemeChange(listener) {
  new MutationObserver(listener).observe(document.body, { attributes: true, attributeFilter: ["class"] });
}
