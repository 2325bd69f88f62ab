// @ts-check
// Elements, events between modules, the address, notifications, dialogs. Data never becomes HTML.

/**
 * el("button.fp-link", { onclick: f, "aria-label": "x" }, "text", child)
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Same as `el`, for SVG. @returns {any} */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

/** A row of a table. `cell`: the tag of all its cells but the first. */
export const tableRow = (cells, cell = "td", attributes = {}) =>
  el("tr", attributes, ...cells.map((content, n) => el(n ? cell : "td", {}, content)));

/** A table with the headings of its columns. `cell`: the tag of all headings but the first. */
export function table(tag, headings, rows, cell = "th") {
  const cells = headings.map((heading, n) => el(n ? cell : "th", { scope: "col" }, heading));
  return el(tag, {}, el("thead", {}, el("tr", {}, cells)), el("tbody", {}, rows));
}

/** @returns {any} */
export const $ = (selector, parent = /** @type {ParentNode} */ (document)) => parent.querySelector(selector);

/**
 * Replace a node's children. The focus moves to the focusable child with the same index. Unfolded details stay
 * unfolded.
 */
export function redraw(node, ...children) {
  const focusable = () => [...node.querySelectorAll("a, button, select, summary, [tabindex]")];
  const at = focusable().indexOf(document.activeElement);
  const unfolded = [...node.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  for (const summary of node.querySelectorAll("details > summary"))
    summary.parentNode.open ||= unfolded.includes(summary.textContent);
  if (at >= 0) focusable()[at]?.focus({ preventScroll: true });
}

/** Whether a node is shown and can have the focus. @param {any} node */
export const canFocus = (node) => node.isConnected && node.checkVisibility() && !node.disabled;

/** Whether what had the focus is gone, hidden or disabled. */
export const isFocusLost = () => document.activeElement === document.body || !canFocus(document.activeElement);

/** Set a node's text without touching the DOM if it is unchanged. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A small button. */
export const chip = (text, onclick, attributes = {}) =>
  el("button.fp-chip", { type: "button", onclick, ...attributes }, text);

/** A small button that is pressed or not. `toggled` gets the new state. @param {(pressed: boolean) => void} toggled */
export function toggleChip(text, pressed, toggled, attributes = {}) {
  const button = chip(text, toggle, { ...attributes, "aria-pressed": String(pressed) });
  function toggle() {
    const now = button.getAttribute("aria-pressed") !== "true";
    setPressed(button, now);
    toggled(now);
  }
  return button;
}
export const setPressed = (button, pressed) => button.setAttribute("aria-pressed", String(pressed));

/** Set an attribute without touching the DOM if it is unchanged: styles depend on it. */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** @type {Record<string, Function[]>} */
const listeners = {};
/** Events between modules: edited, view, run, clone, after, dataset, upload. */
export const on = (event, listener) => (listeners[event] = listeners[event] || []).push(listener);
export const emit = (event, detail = undefined) => (listeners[event] || []).forEach((listener) => listener(detail));

// The parameters that belong to the form, not to a view, with their current values.
const ofForm = Object.fromEntries(
  ["draft", "preset", "machine", "after", "after_any"].map((name) => [
    name,
    new URLSearchParams(location.search).get(name),
  ]),
);

/** The parameters of the page's address. */
export const address = {
  get: (name) => new URLSearchParams(location.search).get(name),
  set(changes, { replace = false } = {}) {
    const parameters = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(changes)) {
      if (name in ofForm) ofForm[name] = value;
      if (value) parameters.set(name, value);
      else parameters.delete(name);
    }
    const text = parameters.toString();
    if (text === location.search.slice(1)) return;
    history[replace ? "replaceState" : "pushState"](null, "", text ? `?${text}` : location.pathname);
  },
  /** After Back or Forward: the address has another view, and the form is as before, with its machine and the run that
   * the next one waits for. */
  keepForm() {
    address.set(ofForm, { replace: true });
  },
};

const NOTE_SECONDS = 8;
const LONG_NOTE_SECONDS = 15; // for notifications with an error or an action

/**
 * Show a notification. With `details` that are not folded, the notification stays until it is dismissed; otherwise its
 * time begins when neither the pointer nor the focus is on it.
 * @param {string} text
 * @param {{ level?: string, action?: { label: string, run: () => void } | null, details?: Element | null }} options
 */
export function notify(text, { level = "info", action = null, details = null } = {}) {
  let area = $("#fp-toasts");
  if (!area) {
    area = el("div", { id: "fp-toasts", role: "status", "aria-live": "polite" });
    document.body.append(area);
  }
  let before = null; // the element that had the focus before the notification
  let timer = 0;
  const close = () => {
    clearTimeout(timer);
    const hadFocus = note.contains(document.activeElement);
    note.remove();
    if (hadFocus) focusAgain(before);
  };
  const act = () => {
    close();
    action.run();
  };
  const closeLater = () => {
    clearTimeout(timer);
    if (details && !details.matches("details:not([open])")) return;
    if (note.matches(":hover, :focus-within")) return;
    timer = setTimeout(close, 1000 * (action || level === "error" ? LONG_NOTE_SECONDS : NOTE_SECONDS));
  };
  const entered = ({ relatedTarget: from }) => {
    clearTimeout(timer);
    if (!note.contains(from)) before = from;
  };
  const note = el(
    "div.fp-toast",
    {
      "data-level": level,
      onfocusin: entered,
      onfocusout: () => setTimeout(closeLater),
      onpointerenter: () => clearTimeout(timer),
      onpointerleave: closeLater,
    },
    el("div", {}, text, details),
    action && el("button.fp-link", { type: "button", onclick: act }, action.label),
    el("button.fp-icon", { type: "button", "aria-label": "Dismiss", onclick: close }, "\u00d7"),
  );
  area.replaceChildren(note);
  closeLater();
}

/** Remove the error of an earlier attempt. */
export const dismissErrors = () => $('#fp-toasts > [data-level="error"]')?.remove();

export const dismissNotifications = () => $("#fp-toasts")?.replaceChildren();

/** Focus a node, else the first field of the form, else the first control of the view. @param {any} node */
function focusAgain(node) {
  const first = (selector) => [...document.querySelectorAll(selector)].find(canFocus);
  const next =
    node && canFocus(node) ? node : first(".fp-field :is(input, textarea)") || first(".fp-view :is(a, button)");
  if (next) next.focus({ preventScroll: true });
}

export const notifyError = (error) => notify(error.message, { level: "error" });

/** Do work and show its error. Meanwhile, the button that has started it is disabled. @param {any} button */
export async function attempt(work, button = null) {
  if (button) button.disabled = true;
  try {
    await work();
  } catch (error) {
    notifyError(error);
  }
  if (button) button.disabled = false;
}

/**
 * Ask for confirmation. `destructive` colors the button.
 * @returns {Promise<boolean>}
 */
export function confirmDialog(text, label = "OK", destructive = false) {
  return new Promise((resolve) => {
    const close = (confirmed) => {
      dialog.close();
      dialog.remove();
      resolve(confirmed);
    };
    const kind = destructive ? "fp-destructive" : "fp-primary";
    const dialog = el(
      "dialog.fp-dialog",
      { oncancel: () => close(false) },
      el("p", {}, text),
      el(
        "div.fp-dialog-row",
        {},
        el("button.fp-button", { type: "button", onclick: () => close(false) }, "Cancel"),
        el(`button.fp-button.${kind}`, { type: "button", onclick: () => close(true) }, label),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Close all dialogs; a question counts as canceled. */
export const closeDialogs = () =>
  document.querySelectorAll("dialog.fp-dialog").forEach((/** @type {any} */ dialog) => {
    dialog.dispatchEvent(new Event("cancel"));
    dialog.close(); // for dialogs without a question
  });

const enteredValues = (form) =>
  [...form.querySelectorAll("input, textarea, select")].map(({ value, checked }) => [value, checked]).join("\n");

/**
 * A dialog with fields. `save` runs when the dialog is confirmed; if it fails, the dialog stays open and shows the
 * error. Escape closes the dialog if nothing was entered; otherwise, a text warns that the entries would be lost, and
 * the next Escape closes the dialog. `save` gets `isOpen`, which says whether the dialog is still open.
 * `actions` are further buttons, `label` is the text of the button that confirms. Returns a function that closes the
 * dialog.
 * @param {string} title @param {any[]} fields @param {(isOpen: () => boolean) => Promise<void>} save
 * @param {{ actions?: any[], wide?: boolean, label?: string }} options
 */
export function formDialog(title, fields, save, { actions = [], wide = false, label = "Save" } = {}) {
  const problem = el("p.fp-dialog-problem", { hidden: true, role: "alert" });
  const close = () => {
    dialog.close();
    dialog.remove();
  };
  let unsaved = ""; // the entered values when Escape was pressed
  const escape = (event) => {
    const values = enteredValues(form);
    if (!event.cancelable || [initial, unsaved].includes(values)) return close();
    event.preventDefault();
    unsaved = values;
    problem.hidden = false;
    setText(problem, "What you entered is not saved. Press Escape again to discard it.");
  };
  const submit = async (event) => {
    event.preventDefault();
    if (form.ariaBusy === "true") return;
    form.ariaBusy = "true"; // a second click must not save twice
    problem.hidden = true;
    setText(problem, "");
    unsaved = "";
    try {
      await save(() => dialog.open);
      close();
    } catch (error) {
      problem.hidden = false;
      setText(problem, error.message);
    }
    form.ariaBusy = "false";
  };
  const buttons = [
    ...actions,
    el("button.fp-button", { type: "button", onclick: close }, "Cancel"),
    el("button.fp-button.fp-primary", { type: "submit" }, label),
  ];
  const form = el(
    "form",
    { onsubmit: submit },
    fields,
    el("div.fp-dialog-end", {}, problem, el("div.fp-dialog-row", {}, buttons)),
  );
  const dialog = el(
    `dialog.fp-dialog.fp-dialog-form${wide ? ".fp-dialog-wide" : ""}`,
    // The browser closes the dialog without asking if Escape is pressed twice in a row.
    { oncancel: escape, onclose: () => dialog.remove(), "aria-label": title },
    el("p", {}, title),
    form,
  );
  document.body.append(dialog);
  dialog.showModal();
  const initial = enteredValues(form);
  $("input, textarea", form)?.focus();
  return close;
}

/** A button that opens a panel with `content`. @param {string} label */
export function dropdown(label, ...content) {
  const node = el(
    "details.fp-downloads",
    {},
    el("summary.fp-button", {}, label),
    el("div.fp-downloads-list", {}, content),
  );
  document.addEventListener("click", (event) => {
    const target = /** @type {Element} */ (event.target);
    if (!node.contains(target) || target.closest("a")) node.open = false;
  });
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    node.open = false;
    node.firstChild.focus();
  });
  return node;
}

export async function copy(text, name) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API needs https or localhost.
    const area = el("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  notify(`${name} copied to the clipboard.`);
}

export function download(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}
