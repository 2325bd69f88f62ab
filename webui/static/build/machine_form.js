// @ts-check
// The form for a custom machine. The server defines its fields and checks their values.
import { get, post, remove } from "../api.js";
import { confirmDialog, el, formDialog, notifyError, setText } from "../dom.js";

/** @typedef {{ name: string, label: string, values?: any }} Machine
 * @typedef {{ name: string, label: string, help: string, absent: string, choices: [string, string][], lines: boolean,
 *   hardware: boolean, fields: Field[] | null, suggestions: string[] }} Field
 * @typedef {{ field: Field, node: any, read: () => any, find: (path: string[]) => any }} Part */

/**
 * Edit a custom machine; null adds one. `changed` gets the name of the machine to select.
 * @param {Machine | null} machine @param {(name: string) => Promise<void>} changed
 */
export async function editMachine(machine, changed) {
  const { command, fields } = await get("api/machines/form");
  const box = el("div");
  let form = group(fields, machine ? machine.values : { gpus: [{}] });
  const draw = () => box.replaceChildren(...layOut(form.parts));
  draw();
  const paste = pasteBox(command, (values) => {
    form = group(fields, values);
    draw();
  });
  const save = async () => {
    await paste.requireValid();
    for (const invalid of box.querySelectorAll("[aria-invalid]")) invalid.removeAttribute("aria-invalid");
    try {
      const { name } = await post("api/machines", { values: form.read(), replaced: machine ? machine.name : "" });
      await changed(name);
    } catch (error) {
      markInvalid((error.data?.fields || []).map((field) => form.find(field.split("."))));
      throw error;
    }
  };
  const removeIt = async () => {
    if (!(await confirmDialog(`Remove the machine ${machine.label}?`, "Remove", true))) return;
    await remove(`api/machines/${encodeURIComponent(machine.name)}`);
    close();
    await changed("");
  };
  const onclick = () => removeIt().catch(notifyError);
  const button = machine && el("button.fp-button.fp-destructive", { type: "button", onclick }, "Remove");
  const title = machine ? `Edit ${machine.label}` : "Add a machine to plan for";
  const close = formDialog(title, [paste.node, box], save, { actions: [button], wide: true });
}

/** Where the output of the command is pasted. @param {string} command @param {(values: any) => void} fill */
function pasteBox(command, fill) {
  const input = el("textarea.fp-input", { rows: 2, spellcheck: "false", autocomplete: "off" });
  const note = el("p.fp-machine-note", { role: "status" });
  let problem = null;
  let seq = 0;
  const readText = async () => {
    const mine = ++seq;
    let [found, failed] = [null, null];
    if (input.value) {
      try {
        found = await post("api/machines/read", { text: input.value });
      } catch (error) {
        failed = error;
      }
      if (mine !== seq) return;
    }
    problem = failed;
    note.classList.toggle("fp-dialog-problem", Boolean(problem));
    const kept = "The fields below were not changed.";
    setText(note, problem ? `${problem.message} ${kept}` : found ? "The fields below now have the pasted values." : "");
    if (found) fill(found.values);
  };
  let reading = Promise.resolve();
  input.addEventListener("input", () => (reading = readText()));
  const label = el(
    "label",
    {},
    el("span", {}, "Paste the output of ", el("code", {}, command), ", run on that machine, or fill in the fields"),
    input,
  );
  const requireValid = async () => {
    await reading;
    if (problem) throw new Error("The pasted text could not be used: correct it, or delete it to use the fields.");
  };
  return { node: el("div", {}, label, note), requireValid };
}

/** @param {Field[]} fields @param {any} values */
function group(fields, values) {
  const parts = fields.map((field) => (field.fields ? repeated : single)(field, values[field.name]));
  return {
    parts,
    read: () => Object.fromEntries(parts.map((part) => [part.field.name, part.read()])),
    find: ([name, ...rest]) => parts.find((part) => part.field.name === name)?.find(rest),
  };
}

/** @param {Field} field @returns {Part} */
function single(field, value = "") {
  const options = [["", field.absent], ...field.choices].map(([name, text]) => el("option", { value: name }, text));
  const list = field.suggestions.length ? `fp-suggested-${field.name}` : null;
  const attributes = { placeholder: field.absent, name: field.name, autocomplete: "off", list };
  const input = field.choices.length
    ? el("select.fp-input", { name: field.name }, options)
    : el(field.lines ? "textarea.fp-input" : "input.fp-input", { ...attributes, rows: field.lines ? 4 : null });
  input.value = value;
  const suggestions = field.suggestions.map((name) => el("option", { value: name }));
  const node = el(
    "label",
    {},
    field.label,
    input,
    list && el("datalist", { id: list }, suggestions),
    field.help && el("small", {}, field.help),
  );
  return { field, node, read: () => input.value, find: () => input };
}

/** Groups of fields that can be added and removed. @param {Field} field @returns {Part} */
function repeated(field, values = []) {
  let entries = [];
  const list = el("div");
  const add = (value) => {
    const entry = group(field.fields || [], value);
    const drop = () => {
      entries = entries.filter((other) => other !== entry);
      node.remove();
      button.focus();
    };
    const action = el("button.fp-link", { type: "button", onclick: drop }, "Remove these GPUs");
    const node = el("div.fp-machine-entry", {}, ...layOut(entry.parts), action);
    entries.push(entry);
    list.append(node);
  };
  values.forEach(add);
  const button = el("button.fp-link", { type: "button", onclick: () => add({}) }, "Add a GPU model");
  const node = el("fieldset", {}, el("legend", {}, field.label), list, button);
  return {
    field,
    node,
    read: () => entries.map((entry) => entry.read()),
    find: ([number, ...rest]) => (number === undefined ? button : entries[Number(number)]?.find(rest)),
  };
}

/** The fields in two columns, those of the software folded. @param {Part[]} parts */
function layOut(parts) {
  const nodes = (hardware) => parts.filter(({ field }) => field.hardware === hardware).map(({ node }) => node);
  const software = nodes(false);
  const folded =
    software.length && el("details", {}, el("summary", {}, "Software"), el("div.fp-machine-grid", {}, software));
  return [el("div.fp-machine-grid", {}, nodes(true)), ...(folded ? [folded] : [])];
}

/** Mark what is invalid, and focus the first. @param {any[]} inputs */
function markInvalid(inputs) {
  const found = inputs.filter(Boolean);
  for (const input of found) {
    input.setAttribute("aria-invalid", "true");
    if (input.closest("details")) input.closest("details").open = true;
  }
  found[0]?.focus();
}
