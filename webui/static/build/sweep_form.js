// @ts-check
// The card that starts a sweep: runs of the form's values that differ in a few options.
import { createKeys, post } from "../api.js";
import { $, el, notifyError, setText } from "../dom.js";
import * as form from "./form.js";

const DEBOUNCE = 250; // ms after the last key
const RETRY = 1000; // ms, while the server does not respond
const STORED = "fp-sweep"; // key of this tab's entries in its own storage, and of the last ones in the browser's
const MAX_LABELS = 6;
const [MAX_OPTIONS, MAX_COUNT] = [8, 50]; // as in webui/api/sweeps.py and backend/tasks/start_sweep.py
const FIRST = "train.learning_rate";
const HALVING = { 0: "off", 2: "best half continues", 3: "best third continues", 4: "best quarter continues" };

/** @type {{ vary: { name: string, values: string }[], samples: number, seeds: number, halving: number }} */
let entered = { vary: [{ name: FIRST, values: "" }], samples: 0, seeds: 1, halving: 0 };
let timer = 0;
let seq = 0;
let showRun = (/** @type {string} */ _id) => {};
const keys = createKeys();

const box = () => $("#fp-sweep-form");

/** @param {(id: string) => void} show opens the page of a run */
export function prepareSweep(show) {
  showRun = show;
  try {
    const stored = sessionStorage.getItem(STORED) || localStorage.getItem(STORED) || "{}";
    entered = { ...entered, ...JSON.parse(stored) };
  } catch {
    for (const storage of [sessionStorage, localStorage]) storage.removeItem(STORED);
  }
  entered.vary = entered.vary.filter(({ name }) => form.option(name));
  $("#fp-sweep").addEventListener("click", () => (box().hidden ? open() : close()));
}

function open() {
  if (!entered.vary.length) entered.vary.push({ name: FIRST, values: "" });
  const title = el("h3", {}, "Sweep");
  const closing = el("button.fp-link", { type: "button", onclick: close }, "Close");
  const add = el("button.fp-link.fp-sweep-add", { type: "button", onclick: addRow }, "Add an option");
  const hint =
    "A list of values: 1e-5, 1e-4. A range of three values: 1e-5..1e-3/3, or log:1e-5..1e-3/3 with equal ratios.";
  box().replaceChildren(
    el("div.fp-card-head", {}, title, el("span.fp-gap"), closing),
    el("div.fp-sweep-rows"),
    el("p.fp-dim", {}, hint),
    add,
    el("div.fp-sweep-more", {}, count("seeds", "Seeds", 1), count("samples", "Random samples", 0), halving()),
    el("p.fp-sweep-outcome", { role: "status" }),
    el("button.fp-start.fp-sweep-start", { type: "button", disabled: true, onclick: start }, "Start runs"),
  );
  drawRows();
  box().hidden = false;
  $("#fp-sweep").setAttribute("aria-expanded", "true");
  $("input", box()).focus();
  checkSweep();
}

function close() {
  box().hidden = true;
  $("#fp-sweep").setAttribute("aria-expanded", "false");
  $("#fp-sweep").focus();
}

// -- fields -----------------------------------------------------------------------------------------------------------

function drawRows() {
  $(".fp-sweep-rows", box()).replaceChildren(...entered.vary.map(row));
  $(".fp-sweep-add", box()).hidden = entered.vary.length >= MAX_OPTIONS;
}

function row(vary, index) {
  const menu = el("select", { "aria-label": `Option ${index + 1}` }, ...optionGroups(vary.name));
  menu.value = vary.name;
  const values = el("input", { type: "text", "aria-label": `Values of ${form.label(vary.name)}`, spellcheck: false });
  values.value = vary.values;
  values.placeholder = example(vary.name);
  menu.addEventListener("change", () => {
    Object.assign(vary, { name: menu.value, values: "" });
    drawRows();
    changed();
  });
  values.addEventListener("input", () => {
    vary.values = values.value;
    changed();
  });
  const remove = () => {
    entered.vary.splice(index, 1);
    drawRows();
    changed();
  };
  const label = `Remove ${form.label(vary.name)}`;
  const removing = el(
    "button.fp-icon",
    { type: "button", "aria-label": label, title: label, onclick: remove },
    "\u00d7",
  );
  return el("div.fp-sweep-row", {}, menu, values, entered.vary.length > 1 ? removing : null);
}

function addRow() {
  const used = new Set(entered.vary.map(({ name }) => name));
  const name = [FIRST, "lora.r", "train.num_train_epochs", ...names()].find(
    (each) => isOffered(each) && !used.has(each),
  );
  entered.vary.push({ name: name || FIRST, values: "" });
  drawRows();
  changed();
  $(".fp-sweep-row:last-child input", box()).focus();
}

const names = () => Object.keys(form.defaults());
const isOffered = (name) => {
  const option = form.option(name);
  return Boolean(option) && option.kind !== "datasets" && form.isVisible(name);
};

/** The options that have an effect now, and the selected one, by section. */
function optionGroups(selected) {
  const groups = new Map();
  for (const name of names().filter((each) => each === selected || isOffered(each))) {
    const title = form.sectionTitle(name);
    if (!groups.has(title)) groups.set(title, el("optgroup", { label: title }));
    groups.get(title).append(el("option", { value: name }, form.label(name)));
  }
  return [...groups.values()];
}

/** What could be entered, shown while the field is empty. */
function example(name) {
  const { kind, choices } = form.option(name);
  if (kind === "bool") return "true, false";
  const keys = Object.keys(choices);
  const value = form.currentValues()[name] ?? "";
  return keys.length ? keys.slice(0, 3).join(", ") : `now ${value === "" ? "empty" : value}`; // it may be 0
}

function count(field, label, least) {
  const input = el("input", { type: "number", min: least, max: MAX_COUNT, value: entered[field] });
  input.addEventListener("input", () => {
    entered[field] = Math.min(MAX_COUNT, Math.max(least, Math.round(Number(input.value)) || least));
    changed();
  });
  input.addEventListener("change", () => (input.value = entered[field])); // show the value that is used
  return el("label", {}, label, input);
}

function halving() {
  const menu = el(
    "select",
    { title: "Runs with a higher validation loss than the others at the same step stop early" },
    ...Object.entries(HALVING).map(([value, text]) => el("option", { value }, text)),
  );
  menu.value = String(entered.halving);
  menu.addEventListener("change", () => {
    entered.halving = Number(menu.value);
    changed();
  });
  return el("label", {}, "Early stopping", menu);
}

// -- check and start --------------------------------------------------------------------------------------------------

function changed() {
  for (const storage of [sessionStorage, localStorage]) storage.setItem(STORED, JSON.stringify(entered));
  checkSweep();
}

/** Check the sweep again: after an edit of the card or of the form. */
export function checkSweep() {
  if (box().hidden) return;
  ready(0);
  seq++; // responses to earlier requests are about other runs
  clearTimeout(timer);
  timer = setTimeout(check, DEBOUNCE);
}

const request = () => ({ values: form.currentValues(), ...entered });

async function check() {
  const mine = ++seq;
  const empty = entered.vary.find(({ values }) => !values.trim());
  if (empty) {
    say(`Enter the values of ${form.label(empty.name)}.`, "missing"); // not an error: the field is still empty
    return;
  }
  try {
    const { runs, note, time } = await post("api/sweeps/check", request());
    if (mine === seq) drawOutcome(runs, note, time);
  } catch (error) {
    if (mine !== seq) return;
    say(error.message, error.offline ? "checking" : "error");
    if (error.offline) timer = setTimeout(check, RETRY);
  }
}

function drawOutcome(runs, note, time) {
  const failing = runs.find(({ errors }) => errors.length);
  if (failing) {
    say(`${failing.label}: ${failing.errors.join("; ")}.`, "error");
    return;
  }
  const shown = runs.slice(0, MAX_LABELS).map(({ label }) => label);
  const more = runs.length > MAX_LABELS ? `, and ${runs.length - MAX_LABELS} more` : "";
  say([`${shown.join(", ")}${more}.`, note, time].filter(Boolean).join(" "), "ok");
  ready(runs.length);
}

function say(text, level) {
  const outcome = $(".fp-sweep-outcome", box());
  outcome.dataset.level = level;
  setText(outcome, text);
}

function ready(runs) {
  const button = $(".fp-sweep-start", box());
  button.disabled = !runs;
  setText(button, runs ? `Start ${runs} ${runs === 1 ? "run" : "runs"}` : "Start runs");
}

async function start() {
  const button = $(".fp-sweep-start", box());
  button.disabled = true;
  try {
    const body = request();
    const { runs } = await post("api/sweeps", { ...body, key: keys.keyOf(body) });
    keys.forget();
    close();
    showRun(runs[0]);
  } catch (error) {
    notifyError(error);
    checkSweep();
  }
}
