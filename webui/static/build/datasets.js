// @ts-check
// The datasets after the first one: a card for each. They replace the field data.sources, whose value is their JSON.
import { $, chip, el, emit } from "../dom.js";
import { currentValues, edited, option, optionNames, setValues } from "./form.js";

const SOURCES = "data.sources";
const MOST = 32; // datasets: backend/config/data.py
const MORE = ["hub_config", "system_column", "system_prompt", "max_samples"];

/** @typedef {Record<string, any>} Dataset the options that differ from their defaults, without the section */
let drawn = ""; // the value that the cards show
/** @type {[string, string][]} */
let shares = []; // the title of each dataset, and what it contributes to an epoch

const box = () => $("#fp-datasets");
const own = (name) => option(`data.${name}`);
/** The options of a dataset, without the section, in the order of the form. */
const ownNames = () => optionNames().flatMap((name) => (option(name).of_dataset ? [name.replace("data.", "")] : []));
const idOf = (index, name) => `data-sources-${index}-${name}`;

/** @returns {Dataset[]} all datasets; the first one is empty: the form's own fields have its options */
function datasets(text = currentValues()[SOURCES]) {
  try {
    const found = JSON.parse(text || "[]");
    return Array.isArray(found) ? found.map((each) => ({ ...each })) : [];
  } catch {
    return []; // the check names what is wrong
  }
}

/** The entry of a dataset as text; for the first one, its values in the form. */
export function entryText(index, names) {
  if (index) return JSON.stringify(datasets()[index]);
  return JSON.stringify(names.map((name) => currentValues()[`data.${name}`]));
}
/** The number of the dataset that has this entry: `index` if it still does, else another one; -1 if none has it. */
export function datasetWith(text, index, names) {
  if (entryText(index, names) === text) return index;
  return index ? datasets().findIndex((dataset, n) => n > 0 && JSON.stringify(dataset) === text) : -1;
}
const textOf = (all) => (all.length > 1 ? JSON.stringify(all) : "");

/** Draw the cards, unless they show this already. @param {Record<string, any>} [values] of the form */
export function drawDatasets(values = currentValues()) {
  const text = values[SOURCES] || "";
  if (text !== drawn || !box().childElementCount) {
    drawn = text;
    const open = [...box().querySelectorAll("details")].map((node) => node.open);
    const focused = box().contains(document.activeElement) ? document.activeElement.id : "";
    const all = datasets(text);
    const cards = all.slice(1).map((dataset, n) => card(dataset, n + 1, open[n]));
    const more = all.length < MOST ? [chip("Add a dataset", add)] : [];
    box().replaceChildren(el("p.fp-dim.fp-dataset-share"), ...cards, ...more);
    if (focused) document.getElementById(focused)?.focus();
  }
  datasets(text).slice(1).forEach(showFields);
  drawShares(shares);
}

/** @param {[string, string][]} found of the check report */
export function drawShares(found) {
  shares = found;
  [...box().querySelectorAll(".fp-dataset-share")].forEach((node, index) => {
    const [, share] = shares[index] || [];
    node.textContent = share ? `${index ? "" : "Dataset 1: "}${share}` : "";
  });
}

function card(dataset, index, open = false) {
  const fields = (names) => names.map((name) => field(dataset, index, name));
  return el(
    "section.fp-dataset",
    { "aria-label": `Dataset ${index + 1}` },
    el(
      "div.fp-dataset-head",
      {},
      el("h4", {}, `Dataset ${index + 1}`),
      el("span.fp-dim.fp-dataset-share"),
      chip("Upload files", () => emit("upload", { dataset: index, validation: false })),
      chip("Remove", () => remove(index), { "aria-label": `Remove dataset ${index + 1}` }),
    ),
    el("div.fp-grid", {}, fields(ownNames().filter((name) => !MORE.includes(name)))),
    el("details", { open }, el("summary", {}, "More options"), el("div.fp-grid", {}, fields(MORE))),
  );
}

function field(dataset, index, name) {
  const { label, unit, help } = own(name);
  const id = idOf(index, name);
  const attributes = { id: `${id}-input`, "aria-describedby": `${id}-help` };
  const input = /** @type {HTMLInputElement} */ (control(name, attributes));
  const value = dataset[name] ?? own(name).default;
  input.value = Array.isArray(value) ? value.join("\n") : String(value ?? "");
  input.addEventListener("input", () => change(index, name, input));
  return el(
    "label.fp-dataset-field",
    { id },
    el("span", {}, unit ? `${label} (${unit})` : label),
    input,
    el("span.fp-dataset-help", { id: `${id}-help` }, help),
  );
}

function control(name, attributes) {
  const { kind, field: type, choices } = own(name);
  if (kind === "choice") {
    const options = Object.entries(choices).map(([value, label]) => el("option", { value }, label));
    return el("select", attributes, options);
  }
  if (kind === "int" || kind === "float") return el("input", { type: "number", step: "any", ...attributes });
  return type === "lines" ? el("textarea", { rows: 2, ...attributes }) : el("input", { type: "text", ...attributes });
}

function change(index, name, input) {
  const all = datasets();
  const { kind, default: usual } = own(name);
  let value = input.value;
  if (kind === "list") value = value.split("\n").filter((line) => line.trim());
  else if (kind === "int" || kind === "float") value = value === "" ? "" : Number(value);
  if (String(value) === String(usual) && name !== "source") delete all[index][name];
  else all[index][name] = value;
  drawn = textOf(all); // the card shows this value already
  edited(SOURCES, drawn);
}

function add() {
  const all = datasets();
  const source = currentValues()["data.source"];
  if (!all.length) all.push({});
  all.push({ source });
  setValues({ [SOURCES]: textOf(all) });
  $(`#${idOf(all.length - 1, "source")} select`).focus();
}

function remove(index) {
  const all = datasets();
  all.splice(index, 1);
  setValues({ [SOURCES]: textOf(all) }, { undo: `Dataset ${index + 1} removed.` });
  /** @type {HTMLElement} */ (box().querySelector(":scope > .fp-chip"))?.focus();
}

/** Show the fields that have an effect: the first dataset's conditions, applied to this dataset's values. */
function showFields(dataset, n) {
  const valueOf = (key) => {
    const name = key.replace("data.", "");
    if (option(key).of_dataset) return String(dataset[name] ?? own(name).default);
    return key === SOURCES ? "several" : String(currentValues()[key]);
  };
  const holds = (condition) => Object.entries(condition).every(([key, allowed]) => allowed.includes(valueOf(key)));
  for (const name of ownNames()) {
    const node = document.getElementById(idOf(n + 1, name));
    if (node) node.hidden = !own(name).when.some(holds);
  }
}
