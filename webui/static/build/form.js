// @ts-check
// The form's values: read from Gradio, written back, with undo; sections, visibility, outlines of wrong fields.
import { $, emit, notify, setAttribute, setText } from "../dom.js";
import { valueText } from "../format.js";
import {
  closeLeftMenu,
  describeField,
  editedField,
  focusField,
  keepMenuChoice,
  keepMenuFocus,
  typeDecimalPoint,
  reopenMenu,
  restoreMenuChoice,
  selectMenuText,
  writeFormValues,
} from "../gradio.js";
import { remember } from "./history.js";

const OPEN_AT_FIRST = ["model", "launch", "data", "method", "train"];
const MAX_SUMMARY_PARTS = 4;
const SHOWN_LABELS = 2; // labels that the button "More options" lists, of the hidden options that are set
const MAX_VALUES_IN_TEXT = 4; // how many values of a condition are listed

/** @type {{ names: string[], options: Record<string, any> }} */
let description = { names: [], options: {} };
/** @type {Map<string, string>} option name by element id */
let namesById = new Map();
let values = {};
let toWrite = null; // values on their way into the components

// Elements that show and change an option in place of its own field, which form.css hides.
const REPLACED = {
  "launch.devices": "fp-devices",
  "parallel.strategy": "fp-strategies",
  "data.sources": "fp-datasets",
};

const NODES = "launch.nnodes";
const OF_DATASET = /^data\.sources\[(\d+)\]\.(\w+)$/;

/** data-files of data.files, and data-sources-1-files of data.sources[1].files. */
const elementId = (name) => name.replace(/[.[\]]+/g, "-");
/** The element that shows an option: the replacement of its field, unless there is none or it is hidden. */
export function fieldOf(name) {
  const replacement = REPLACED[name] && document.getElementById(REPLACED[name]);
  return replacement && !replacement.hidden ? replacement : document.getElementById(elementId(name));
}
/** The option whose field, also in the card of a dataset, contains an element; '' if there is none.
 * @param {Element} node */
export function optionAt(node) {
  const id = node.closest?.(".fp-field, .fp-dataset-field")?.id || "";
  return namesById.get(id.replace(/^data-sources-\d+-/, "data-")) || "";
}
const equal = (a, b) => String(a ?? "") === String(b ?? "");

export function startForm(described) {
  description = described;
  namesById = new Map(described.names.map((name) => [elementId(name), name]));
  values = defaults();
  document.querySelectorAll(".fp-section").forEach(prepareSection);
  document.querySelectorAll(".fp-more").forEach((button) => {
    button.addEventListener("click", () => showAdvanced(button));
  });
  document.addEventListener("input", fieldEdited, true);
  document.addEventListener("focusout", closeLeftMenu);
  document.addEventListener("focusin", selectMenuText);
  document.addEventListener("click", reopenMenu);
  document.addEventListener("keydown", keepMenuFocus);
  document.addEventListener("beforeinput", keepMenuChoice);
  document.addEventListener("beforeinput", (event) => typeDecimalPoint(event, isDecimal));
  for (const type of ["keydown", "pointerdown", "focusout"]) document.addEventListener(type, restoreMenuChoice);
  document.querySelectorAll(".fp-field").forEach(describeField);
}

/** Whether a field is for decimal numbers: of an option, also in the card of a dataset, or of a job.
 * @param {HTMLInputElement} input */
const isDecimal = (input) =>
  option(optionAt(input)) ? option(optionAt(input)).kind === "float" : input.step === "any";
export const currentValues = () => ({ ...values });
export const defaults = () => Object.fromEntries(description.names.map((n) => [n, description.options[n].default]));
export const option = (name) => description.options[name];
export const optionNames = () => description.names;
/** @param {string} name of an option, which may be that of one of several datasets: data.sources[1].weight */
export function label(name) {
  const [, index, key] = name.match(OF_DATASET) || [];
  if (!key) return option(name)?.label || name;
  return `${option(`data.${key}`)?.label || key} of dataset ${Number(index) + 1}`;
}

// -- sections ---------------------------------------------------------------------------------------------------------

function prepareSection(section) {
  $(".fp-head", section).addEventListener("click", () => openSection(section, section.classList.contains("fp-closed")));
  const key = section.id.replace("fp-section-", "");
  const stored = localStorage.getItem(`fp-open-${key}`);
  openSection(section, stored ? stored === "yes" : OPEN_AT_FIRST.includes(key));
}

function openSection(section, open) {
  section.classList.toggle("fp-closed", !open);
  $(".fp-head", section).setAttribute("aria-expanded", String(open));
  localStorage.setItem(`fp-open-${section.id.replace("fp-section-", "")}`, open ? "yes" : "no");
}

function showAdvanced(button, show = button.getAttribute("aria-expanded") !== "true") {
  button.setAttribute("aria-expanded", String(show));
  button.closest(".fp-body").classList.toggle("fp-all", show);
  labelMore(button);
}

/** "More options" names the hidden options that are set, such as an adapter to continue: nothing else shows them. */
function labelMore(button) {
  const fields = button.closest(".fp-body").querySelectorAll(".fp-advanced .fp-field.fp-set:not(.fp-unused)");
  const labels = [...fields].map(({ id }) => option(namesById.get(id) || "")?.label).filter(Boolean);
  const more = labels.length > SHOWN_LABELS ? `, ${labels.length - SHOWN_LABELS} more` : "";
  const set = labels.length ? ` (set: ${labels.slice(0, SHOWN_LABELS).join(", ")}${more})` : "";
  setText(button, button.getAttribute("aria-expanded") === "true" ? "Fewer options" : `More options${set}`);
}

export const sectionTitle = (name) => {
  const title = $(".fp-head-title", fieldOf(name)?.closest(".fp-section") || document.createElement("div"));
  return title ? title.textContent : "";
};

/** A closed section's summary: its first value, and what differs from the defaults. */
function summarize(section) {
  const parts = [];
  for (const field of section.querySelectorAll(".fp-field")) {
    const name = namesById.get(field.id);
    if (!name || !isVisible(name) || parts.length >= MAX_SUMMARY_PARTS) continue;
    const value = values[name];
    if (parts.length && equal(value, option(name).default)) continue;
    const part = summaryPart(name, value);
    if (part) parts.push(part);
  }
  setText($(".fp-head-summary", section), parts.join(" \u00b7 "));
}

/** 1 token, 1 batch; symbols such as s and GiB stay. */
export const singular = (unit) =>
  unit
    .replace(/^(\w+)ies$/, "$1y")
    .replace(/(s|x|z|ch|sh)es$/, "$1")
    .replace(/^(\w{2,}[^s])s$/, "$1");

function summaryPart(name, value) {
  const { kind, label, unit: units, choices } = option(name);
  if (kind === "datasets") return "Several datasets";
  if (kind === "bool") return value ? label : "";
  if (value === "" || value === null || / n /.test(choices[value])) return ""; // "Every n steps": n follows
  if (choices[value]) return choices[value];
  const unit = Number(value) === 1 ? singular(units || "") : units;
  const text = kind === "float" ? valueText(name, Number(value)) : String(value).split("\n")[0].slice(0, 40);
  return `${label} ${text}${unit ? ` ${unit}` : ""}`;
}

// -- edits ------------------------------------------------------------------------------------------------------------

/** @param {string} name @param {any} value */
export function edited(name, value) {
  if (values[name] === value) return;
  const changes = onOneNode({ [name]: value });
  if (Object.keys(changes).length > 1) return void setValues(changes);
  remember({ [name]: values[name] }, { [name]: value }, true);
  values[name] = value;
  changed([name]);
}

function fieldEdited(event) {
  const edit = editedField(event);
  const name = edit && namesById.get(edit.id);
  if (name) edited(name, edit.value);
}

/** @param {string[]} names of the changed options */
function changed(names) {
  refresh(names);
  emit("edited", values);
}

/** @param {string[]} names */
function refresh(names) {
  for (const name of description.names) {
    document.getElementById(elementId(name))?.classList.toggle("fp-unused", !isVisible(name));
  }
  for (const node of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-with]"))) {
    node.hidden = !isVisible(node.dataset.with);
  }
  document.querySelectorAll(".fp-section").forEach(summarize);
  for (const name of names) {
    const field = fieldOf(name);
    if (!field) continue;
    field.classList.toggle("fp-set", !equal(values[name], option(name).default));
  }
  document.querySelectorAll(".fp-more").forEach(labelMore);
}

const pick = (from, names) => Object.fromEntries(names.map((name) => [name, from[name]]));

/** The changes, with options of single datasets, such as data.sources[1].weight, merged into data.sources: that of the
 * changes, for example of a copied run, else that of the form. */
function gathered(changes) {
  const parts = Object.entries(changes).map(([name, value]) => ({ of: name.match(OF_DATASET), value }));
  if (!parts.some((part) => part.of)) return changes;
  const all = JSON.parse({ ...values, ...changes }["data.sources"] || "[]");
  for (const { of, value } of parts) if (of) all[of[1]] = { ...all[of[1]], [of[2]]: value };
  const others = Object.entries(changes).filter(([name]) => !OF_DATASET.test(name));
  return { ...Object.fromEntries(others), "data.sources": JSON.stringify(all) };
}

/**
 * The changes. The default number of nodes is for runs that set a rendezvous; a run on one node stays there when a
 * cluster shows the number. On a cluster, a hidden number is 1 too, since the lines of the strategies show what each
 * strategy does with it. @param {Record<string, any>} changes
 */
function onOneNode(changes) {
  const before = values;
  const wasHidden = !isVisible(NODES);
  values = { ...values, ...changes };
  const isOnCluster = values["launch.place"] !== "local";
  const isOnOne = isVisible(NODES) ? wasHidden && !(NODES in changes) : !equal(values[NODES], 1);
  values = before;
  return isOnCluster && isOnOne ? { ...changes, [NODES]: 1 } : changes;
}

/** The options that have other values in `changes` than in the form. @param {Record<string, any>} changes */
export const differing = (changes) => Object.keys(changes).filter((name) => !equal(values[name], changes[name]));

/**
 * Set some values. `undo`: a text to show with an Undo button. `remembered` is false for an undo or a redo, `isBack` is
 * true if the form had these values before: then they are set without changes.
 * @param {Record<string, any>} wanted
 * @param {{ undo?: string, details?: Element | null, remembered?: boolean, isBack?: boolean }} options
 */
export function setValues(wanted, { undo = "", details = null, remembered = true, isBack = !remembered } = {}) {
  const changes = isBack ? gathered(wanted) : onOneNode(gathered(wanted));
  const edited = differing(changes);
  const before = pick(values, edited);
  if (remembered) remember(before, pick(changes, edited));
  values = { ...values, ...changes };
  toWrite = description.names.map((name) => values[name]);
  writeFormValues();
  changed(Object.keys(changes));
  if (undo) notify(undo, { action: { label: "Undo", run: () => setValues(before, { isBack: true }) }, details });
}
export const valuesToWrite = () => toWrite;

// -- visibility -------------------------------------------------------------------------------------------------------

/** The value of an option as conditions name it. */
const word = (name) => (option(name).kind === "datasets" ? values[name] && "several" : String(values[name])) || "";
const unmet = (condition) => Object.entries(condition).filter(([name, allowed]) => !allowed.includes(word(name)));
export const isVisible = (name) => option(name).when.some((condition) => !unmet(condition).length);

/** Why an option is hidden: "Shown when Strategy is ZeRO-2 or ZeRO-3 and Method is LoRA". */
export function visibilityText(name) {
  const conditions = option(name).when.map((condition) => Object.entries(condition).map(conditionText).join(" and "));
  return `Shown when ${[...new Set(conditions)].join(", or when ")}`;
}

function conditionText([name, allowed]) {
  if (option(name).kind === "datasets") return "there are several datasets";
  if (allowed.join() === "") return `${label(name)} is empty`;
  if (option(name).kind === "bool") return `${label(name)} is ${allowed.includes("true") ? "on" : "off"}`;
  const others = Object.keys(option(name).choices).filter((value) => !allowed.includes(value));
  if (others.length === 1 && allowed.length > 2) return `${label(name)} is not ${choiceLabel(name, others[0])}`;
  const words = allowed.map((value) => choiceLabel(name, value));
  if (words.length > MAX_VALUES_IN_TEXT) {
    return `${label(name)} is one of ${words.length} values, such as ${words[0]}`;
  }
  const last = words.pop();
  return `${label(name)} is ${words.length ? `${words.join(", ")} or ${last}` : last}`;
}

/** Whether a condition allows at most half of the values of its option. */
export const isSpecific = ([name, allowed]) => 2 * allowed.length <= Object.keys(option(name).choices).length;

export const choiceLabel = (name, value) => option(name).choices[value] || value;

/** The visible option that has to change first before a hidden one is shown. @returns {string} */
export function controllingOption(name) {
  const [[controlling]] = unmet(option(name).when[0]);
  return isVisible(controlling) ? controlling : controllingOption(controlling);
}

/** The changes that would each show a hidden option by setting one other option: [{ name, value }]. */
export function waysToShow(name) {
  const ways = [];
  for (const condition of option(name).when) {
    const missing = unmet(condition);
    if (missing.length !== 1) continue;
    const [[controlling, allowed]] = missing;
    if (!isVisible(controlling) || option(controlling).kind === "datasets") continue;
    for (const value of allowed) {
      ways.push({ name: controlling, value: option(controlling).kind === "bool" ? value === "true" : value });
    }
  }
  return ways;
}

// -- fields -----------------------------------------------------------------------------------------------------------

/** Outline fields, and the sections they are in. @param {Record<string, string>} levels level by option name */
export function outline(levels) {
  /** @type {Map<Element, string>} */
  const outlined = new Map();
  for (const [name, level] of Object.entries(levels)) {
    const field = fieldOf(name);
    if (!field) continue;
    outlined.set(field, level);
    const section = field.closest(".fp-section");
    if (section && outlined.get(section) !== "error") outlined.set(section, level);
  }
  for (const node of document.querySelectorAll(
    ":is(.fp-field, .fp-dataset-field, .fp-section, #fp-devices, #fp-strategies, #fp-datasets)[data-level]",
  )) {
    if (!outlined.has(node)) node.removeAttribute("data-level");
  }
  outlined.forEach((level, node) => setAttribute(node, "data-level", level));
}

/** Scroll to an option and focus it; opens its section first. A hidden option leads to the first one that has to change
 * before it is shown, with a note. */
export function goTo(name) {
  if (option(name) && !isVisible(name)) {
    notify(`${label(name)} is hidden. ${visibilityText(name)}.`);
    name = controllingOption(name);
  }
  const field = fieldOf(name);
  if (!field) return;
  const section = field.closest(".fp-section");
  if (section) openSection(section, true);
  const advanced = field.closest(".fp-advanced");
  field.closest("details")?.setAttribute("open", "");
  if (advanced) showAdvanced($(".fp-more", advanced.closest(".fp-body")), true);
  field.scrollIntoView({ block: "center", behavior: "smooth" });
  focusField(field);
  field.classList.add("fp-flash");
  setTimeout(() => field.classList.remove("fp-flash"), 1200);
}
