// @ts-check
// The Build view: a check after every edit, drafts, presets, machines, import, export and start.
import { createKeys, get, post, randomId, runPath } from "../api.js";
import { $, address, dismissErrors, download, el, notify, notifyError, on } from "../dom.js";
import { diffList, foldedDiff } from "../fixes.js";
import { setPlaceholder } from "../gradio.js";
import {
  draftId,
  editSaved,
  keepEdit,
  lastDraft,
  leftOut,
  loadDraft,
  ownDraft,
  saveWhenLeaving,
  useDraft,
} from "./drafts.js";
import { prepareExamples, refreshExamples } from "./examples.js";
import * as form from "./form.js";
import { forgetChanges } from "./history.js";
import { editMachine } from "./machine_form.js";
import { compareRehearsal, resumeRehearsal, startRehearsal } from "./rehearsal.js";
import { drawCheckFailed, drawReport, drawStart, keepFocus } from "./report.js";
import { checkSweep, prepareSweep } from "./sweep_form.js";
import { compareTuning, prepareTuning, resumeTuning } from "./tuning.js";
import { drawUndo, startHistory } from "./versions.js";

const RETRY = 2000; // ms to the next check while the server does not respond or examples are being checked
const SLOW = 1000; // ms after an edit until the report on the page says that it is about earlier values
const BUSY_RETRY = 10_000; // ms, while a run trains, so that the speed of the CPU cannot be measured
const START_RETRY = 400; // ms, while Start waits for the examples
const DEFAULTS = " "; // the value of the menu's entry for the defaults; no preset has this name

let seq = 0; // number of the newest check
let drawnSeq = 0;
let isAsked = false; // a check is sent as soon as the running script is done
let timer = 0;
let slow = 0;
const startKeys = createKeys();
let lastReport = null;
let starting = false;
let presets = [];
let chosen = Promise.resolve(); // resolves when the form has the values of the preset that was chosen in the menu
let setLoaded = () => {};
const loaded = new Promise((resolve) => (setLoaded = () => resolve(undefined))); // when the form has its first values

// -- check ------------------------------------------------------------------------------------------------------------

/** Whether the report on the page belongs to the form's current values; tests wait for it. */
function setFresh(fresh) {
  $("#fp-status").dataset.fresh = fresh ? "yes" : "no";
  if (fresh) setCurrent();
  else if (lastReport) slow ||= setTimeout(() => ($("#fp-status .fp-status-slow").hidden = false), SLOW);
}

function setCurrent() {
  clearTimeout(slow);
  slow = 0;
  $("#fp-status .fp-status-slow").hidden = true;
}

/** The form is about to change: a report that is still on its way is about the earlier values. */
function outdateReport() {
  setFresh(false);
  seq++;
  clearTimeout(timer);
}

export function checkSoon() {
  outdateReport();
  keepEdit(form.currentValues());
  restorePreset();
  drawUndo();
  compareRehearsal(form.currentValues(), machine());
  compareTuning(form.currentValues());
  if (!isAsked) queueMicrotask(() => check()); // one check for all changes of this script
  isAsked = true;
  checkSweep();
}

/** @param {boolean} keeps whether the draft is saved */
async function check(keeps = true) {
  isAsked = false;
  const mine = ++seq;
  clearTimeout(timer);
  if (!draftId()) await useDraft(randomId());
  try {
    const values = form.currentValues();
    const kept = keeps ? keepEdit(values) : null;
    const report = await post("api/check", { values, ...kept, machine: machine(), preset: preset(), seq: mine });
    if (kept) editSaved(kept.edit);
    if (mine < drawnSeq) return; // a later response is drawn already
    drawnSeq = mine;
    const unknown = lastReport?.time?.unknown;
    lastReport = report;
    if (unknown !== undefined && unknown !== report.time?.unknown) checkSweep(); // its time may be known now, too
    const focused = document.activeElement;
    drawOffer(report.recommended);
    drawReport(report, { starting, edited: $("#fp-status").dataset.fresh !== "yes" });
    offerMachine(report);
    keepFocus(focused);
    setFresh(mine === seq);
    refreshExamples(values, report.datasets);
    setPlaceholder("logging-run_name", report.title || "Run name");
    if (mine === seq && report.pending) timer = setTimeout(check, starting ? START_RETRY : RETRY);
    else if (mine === seq && report.time?.is_measurable) timer = setTimeout(checkAgain, BUSY_RETRY);
  } catch (error) {
    if (mine !== seq) return;
    if (error.offline) timer = setTimeout(check, RETRY);
    const next = error.offline
      ? " Your edits are kept in this tab; the check is retried until the server responds."
      : "";
    setCurrent();
    drawCheckFailed(error.offline ? "No connection" : "Check failed", `${error.message}${next}`);
  }
}

/** Repeat a check that found errors or could not predict the time: the cause, such as a missing file, may be gone. */
function checkAgain() {
  const isShown = document.body.dataset.tab === "build" && !document.hidden;
  const hasError = lastReport?.findings.some(({ level }) => level === "error");
  if (isShown && (hasError || lastReport?.time?.unknown)) check(false);
}

// -- drafts -----------------------------------------------------------------------------------------------------------

async function rehearse() {
  if (!draftId()) await useDraft(randomId());
  startRehearsal(form.currentValues(), machine());
}

/** Fill the form: from a draft, else from the preset in the address, else from the first one. */
export const loadInitialValues = () =>
  loadDraftOrPreset().finally(() => {
    forgetChanges();
    presetOf.clear();
    drawUndo();
    setLoaded();
  });

async function loadDraftOrPreset() {
  drawPredecessor();
  await loadPresets();
  const own = ownDraft();
  const id = own || lastDraft();
  const saved = id ? await loadDraft(id) : null;
  const asked = presets.find(({ name }) => name === preset());
  if (preset() && !asked && !saved) notify(`There is no preset ${preset()}.`);
  const named = asked || presets[0];
  if (saved) {
    const from = address.get("draft") ? preset() : (own ? sessionStorage : localStorage).getItem("fp-preset") || "";
    await useDraft(own || randomId()); // a new tab starts with the values of another tab
    selectPreset(from);
    form.setValues(saved.values);
    if (saved.left_out.length) notify(`The form was restored.${leftOut(saved.left_out)}`);
  } else if (named) {
    await loadPreset(named.name);
  } else {
    form.setValues({});
  }
  if (!saved && address.get("draft")) await useDraft(address.get("draft"));
  resumeRehearsal(id || "");
  resumeTuning(id || "");
}

// -- machines ---------------------------------------------------------------------------------------------------------

/** The machine to check for: '' is this one. A run can be started on this one only, and planned for the others. */
const machine = () => address.get("machine") || "";

/** A new tab continues with the values and the machine of another tab. */
const isNewTab = !address.get("draft") && !address.get("preset");
const lastMachine = () => (isNewTab && localStorage.getItem("fp-machine")) || "";

let machines = [];

export async function loadMachines() {
  const menu = $("#fp-machine");
  menu.addEventListener("change", () => selectMachine(menu.value));
  $("#fp-machine-add").addEventListener("click", () => editMachine(null, drawMachines).catch(notifyError));
  $("#fp-machine-edit").addEventListener("click", () =>
    editMachine(selectedMachine(), drawMachines).catch(notifyError),
  );
  await drawMachines(machine() || lastMachine());
}

const selectedMachine = () => machines.find((m) => m.name === machine());

/** Draw the menu of machines, and select one. @param {string} name */
async function drawMachines(name) {
  machines = await get("api/machines");
  const text = (m) => (m.name ? m.label : `This machine: ${m.label}`);
  $("#fp-machine").replaceChildren(...machines.map((m) => el("option", { value: m.name }, text(m))));
  const exists = machines.some((m) => m.name === name);
  const instead = "The options are now checked for the machine that Footplate runs on.";
  if (!exists) notify(`The machine ${name} no longer exists. ${instead}`);
  selectMachine(exists ? name : "");
}

function selectMachine(name) {
  address.set({ machine: name }, { replace: true });
  localStorage.setItem("fp-machine", name);
  $("#fp-machine").value = name;
  $("#fp-machine-edit").hidden = !selectedMachine()?.values;
  $("#fp-start").hidden = Boolean(name);
  $("#fp-export-plan").hidden = !name;
  document.body.classList.toggle("fp-planned", Boolean(name));
  describePreset();
  if (draftId()) checkSoon();
}

/** The preset that the form was filled from. */
const preset = () => address.get("preset") || "";

// -- presets ----------------------------------------------------------------------------------------------------------

async function loadPresets() {
  presets = await get("api/presets");
  const menu = $("#fp-presets");
  menu.replaceChildren(
    el("option", { value: "" }, "Choose a preset"),
    ...presets.map((p) => el("option", { value: p.name }, p.title)),
    el("option", { value: DEFAULTS }, "Default values"),
  );
  menu.addEventListener("change", () => {
    chosen = loadPreset(menu.value, true).catch(notifyError);
  });
}

/** Remember which preset the form was filled from; '' if none. @param {string} name */
function selectPreset(name) {
  $("#fp-presets").value = name;
  address.set({ preset: presets.some((p) => p.name === name) ? name : null }, { replace: true });
  for (const storage of [sessionStorage, localStorage]) storage.setItem("fp-preset", preset());
  describePreset();
}

/** Which preset the form was filled from when it had some values (as JSON), for an undo and a redo.
 * @type {Map<string, string>} */
const presetOf = new Map();

/** Fill the form from a preset, or from something else if the name is ''. @param {any} values @param {any} options */
function fillFrom(name, values, options) {
  const note = () => presetOf.set(JSON.stringify(form.currentValues()), preset());
  note();
  selectPreset(name);
  form.setValues(values, options);
  note();
}

/** The form has the values of another preset again. */
function restorePreset() {
  const name = presetOf.get(JSON.stringify(form.currentValues())) ?? preset();
  if (name !== preset()) selectPreset(name);
}

/** Offer the usual values for what the form still has from a demo preset. @param {any} offer a fix, or null */
function drawOffer(offer) {
  const box = $("#fp-preset-offer");
  box.hidden = !offer;
  if (!offer || box.dataset.patch === JSON.stringify(offer.patch)) return;
  box.dataset.patch = JSON.stringify(offer.patch);
  const use = () => form.setValues(offer.patch, { undo: "Recommended values are set." });
  const count = offer.diff.length;
  const [values, were] = count === 1 ? ["One value is still", "was"] : [`${count} values are still`, "were"];
  const text = `${values} from the preset ${offer.label} and ${were} chosen for its model and data.`;
  box.replaceChildren(
    el("p", {}, text),
    diffList(offer.diff),
    el("button.fp-button.fp-offered", { type: "button", onclick: use }, "Use recommended values"),
  );
}

async function loadPreset(name, withUndo = false) {
  if (!name) return;
  const found = presets.find((p) => p.name === name);
  outdateReport();
  const values = found ? await presetValues(name) : form.defaults();
  fillFrom(name, values, { undo: withUndo ? `Loaded: ${found ? found.title : "default values"}.` : "" });
}

async function presetValues(name) {
  try {
    return (await get(`api/presets/${encodeURIComponent(name)}`)).values;
  } catch (error) {
    selectPreset(preset()); // the form keeps its values
    checkSoon();
    throw error;
  }
}

/** The preset's description, with a button that selects the machine it needs. */
function describePreset() {
  const found = presets.find((p) => p.name === $("#fp-presets").value);
  const about = found ? found.about : "";
  const needed = otherMachine(found);
  const select = () => selectMachine(needed);
  $("#fp-preset-about").replaceChildren(
    el("span", { title: about }, about),
    ...(needed ? [el("button.fp-link", { type: "button", onclick: select }, "Plan for its machine")] : []),
  );
}

/** The machine that a preset needs, if another one is selected. */
const otherMachine = (found) => (found?.machine && found.machine !== machine() ? found.machine : "");

/** Above the errors, if a preset needs another machine: a button that plans the run for that machine. */
function offerMachine({ status }) {
  const found = presets.find((p) => p.name === preset());
  const needed = machines.find((m) => m.name && m.name === otherMachine(found));
  $("#fp-findings .fp-preset-machine")?.remove();
  if (!needed || status.level !== "error") return;
  const select = () => selectMachine(needed.name);
  $("#fp-findings").prepend(
    el(
      "article.fp-finding.fp-preset-machine",
      { "data-level": "advice" },
      el("p", {}, `The preset ${found.title} is made for ${needed.label}.`),
      el("button.fp-button", { type: "button", onclick: select }, `Plan for ${needed.label.split(":")[0]}`),
    ),
  );
}

// -- start, fix, import, export ---------------------------------------------------------------------------------------

/** @param {(tab: string, run?: string) => void} showView */
async function start(showView) {
  starting = true;
  dismissErrors();
  drawStart(lastReport, true);
  try {
    await chosen;
    const drawn = check(); // the check repeats while examples are being checked
    if ($("#fp-status").dataset.fresh === "no") await drawn; // the run must start with what the report shows
    const after = { after: address.get("after") || "", after_ok: address.get("after_any") !== "1" };
    const body = { values: form.currentValues(), ...after };
    const { id } = await post("api/runs", { ...body, key: startKeys.keyOf(body) });
    startKeys.forget();
    selectPredecessor("");
    showView("run", id);
    if (lastReport.examples.pending) notify(lastReport.examples.note);
  } catch (error) {
    notifyError(error);
    if (error.status === 422) check();
  } finally {
    starting = false;
    drawStart(lastReport, false);
  }
}

/** Start the next run after the run with this id; '' starts it as soon as its devices are free. @param {string} id */
export function selectPredecessor(id) {
  address.set({ after: id, after_any: null }, { replace: true });
  drawPredecessor();
}

/** Which run the next run starts after, and whether the earlier run must succeed. */
function drawPredecessor() {
  const id = address.get("after");
  const old = $("#fp-after");
  if (old) old.remove();
  if (!id) return;
  const menu = el("select", { "aria-label": "Condition" });
  menu.append(el("option", { value: "" }, "has succeeded"), el("option", { value: "1" }, "has ended, in any state"));
  menu.value = address.get("after_any") || "";
  menu.addEventListener("change", () => address.set({ after_any: menu.value }, { replace: true }));
  const link = el("a", { href: `?tab=run&run=${encodeURIComponent(id)}` }, "the run before it");
  get(runPath(id))
    .then(({ summary }) => (link.textContent = summary.name))
    .catch(() => (link.textContent = id));
  const clear = el("button.fp-link", { type: "button", onclick: () => selectPredecessor("") }, "Do not wait");
  const text = el("span", {}, "Start waits until ", link, " ", menu, ".");
  const train = el("button.fp-link", { type: "button", onclick: () => trainModelOf(id) }, "Train its model");
  $("#fp-status").before(el("p.fp-after", { id: "fp-after" }, text, train, clear));
}

/** Train the model that another run saves. @param {string} id */
async function trainModelOf(id) {
  try {
    const [{ folder, summary }, { values }] = await Promise.all([get(runPath(id)), get(`${runPath(id)}/values`)]);
    if (values["save.final_model"] === false) {
      const advice = "Copy that run, turn on Save final model there, and start this one after the copy.";
      notify(`${summary.name} saves no model at its end, which a run that waits for it needs. ${advice}`);
      return;
    }
    if (values["method.kind"] === "lora" && !values["save.merge_adapter"]) {
      const advice = "Copy that run, turn on Merge adapter there, and start this one after the copy.";
      notify(`${summary.name} saves only an adapter, and a run that waits for its model needs full weights. ${advice}`);
      return;
    }
    const patch = { "model.source": "path", "model.path": `${folder}/model` };
    form.setValues(patch, { undo: `Model set to the one that ${summary.name} saves.` });
  } catch (error) {
    notifyError(error);
  }
}

/** Apply all safe fixes as one change with one Undo. */
async function fixAll() {
  const found = await post("api/fix", { values: form.currentValues(), machine: machine() });
  const applied = `${found.count} ${found.count === 1 ? "fix" : "fixes"} applied.`;
  const titles = found.remaining.map((title) => title.replace(/\.$/, "")).join("; ");
  const remaining = titles ? ` Remaining errors: ${titles}.` : "";
  if (!found.count) {
    const why = "No fix was applied: the safe fixes would lead to as many errors.";
    notify(`${why} Apply one by hand to see them.${remaining}`, { level: "error" });
    return;
  }
  form.setValues(found.patch, { undo: applied + remaining, details: foldedDiff(found.diff) });
}

/**
 * Copy a run's options into the form: with the change of a fix, or to edit one field.
 * @param {{ id: string, fix?: any, field?: string }} wanted @param {(tab: string) => void} showView
 */
export async function cloneRun({ id, fix = null, field = "" }, showView) {
  const [{ values, checkpoint, left_out: names }] = await Promise.all([get(`${runPath(id)}/values`), loaded]);
  showView("build");
  const copied = "The run's options were copied into the form";
  const plain = { undo: `${copied}.${leftOut(names)}`, details: checkpoint ? resumeOffer(checkpoint) : null };
  const changed = fix && {
    undo: `${copied}, with one change: ${fix.label}.${leftOut(names)}`,
    details: foldedDiff(fix.diff),
  };
  fillFrom("", { ...values, ...(fix ? fix.patch : {}) }, changed || plain);
  window.scrollTo(0, 0);
  if (field) form.goTo(field);
}

/** "Latest checkpoint" is one of the new run, which has none yet. @param {string} checkpoint of the copied run */
function resumeOffer(checkpoint) {
  const name = checkpoint.replace(/.*\//, "");
  const patch = { "save.resume_from": "path", "save.resume_path": checkpoint };
  const resume = () => form.setValues(patch, { undo: `The new run will resume from ${name} of the copied run.` });
  const button = el("button.fp-link", { type: "button", onclick: resume }, `Resume from ${name}`);
  return el("div", {}, "The new run would start at step 0. ", button);
}

async function importFile(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const { values, kept, different, missing, runs_code, consent } = await post("api/import", {
      yaml: await file.text(),
      values: form.currentValues(),
    });
    const extra = kept.length ? ` Keys without an option were added to the extra config: ${kept.join(", ")}.` : "";
    const code = runs_code.length
      ? " Settings that may run code or decide where data is sent were left out: apply them only if you trust the file."
      : "";
    const details = [
      ...listed("May run code, or decide where data is sent", runs_code.map(withLabel)),
      ...(Object.keys(consent).length ? [el("div", {}, consentButton(file.name, consent))] : []),
      ...listed("Different here", different),
      ...listed("Not imported", missing),
    ];
    const shown = details.length ? { details: el("div", {}, details) } : {};
    fillFrom("", values, { undo: `${file.name} loaded.${extra}${code}`, ...shown });
  } catch (error) {
    notify(`${file.name}: ${error.message}`, { level: "error" });
  }
}

/** A button that applies what needs consent in an imported file. @param {string} file @param {any} consent */
function consentButton(file, consent) {
  const names = Object.keys(consent);
  const apply = () => {
    const hidden = names.filter((name) => !form.isVisible(name));
    const without = hidden.map((name) => ` ${form.label(name)} has no effect now. ${form.visibilityText(name)}.`);
    form.setValues(consent, { undo: `${file}: ${names.map(form.label).join(", ")} applied.${without.join("")}` });
  };
  return el("button.fp-link", { type: "button", onclick: apply }, "Apply these settings");
}

/** "Trust remote code (the file ...)" for "model.trust_remote_code (the file ...)". @param {string} text */
const withLabel = (text) => text.replace(/^[\w.[\]]+/, form.label);

/** A title and a list of sentences, or nothing. @returns {Node[]} */
function listed(title, texts) {
  if (!texts.length) return [];
  return [
    el("strong", {}, title),
    el(
      "ul",
      {},
      texts.map((text) => el("li", {}, text)),
    ),
  ];
}

async function exportFile() {
  const values = form.currentValues();
  const { yaml, has_paths: hasPaths, folders, left_out: names } = await post("api/export", { values });
  const title = ((lastReport && lastReport.title) || "run").replace(/[^\p{L}\p{N}_.-]+/gu, "-");
  const name = `${title.replace(/^[-.]+|[-.]+$/g, "") || "run"}.yaml`; // a command reads a - before it as an option
  download(name, yaml);
  const place = machine() ? "on the target machine" : "in a shell";
  const advice = " Copy the files and folders that it names there first, and correct their paths.";
  const correct = folders.length ? ` Set these folders for that machine: ${folders.map(form.label).join(", ")}.` : "";
  const copy = machine() ? (hasPaths ? advice : "") + correct : "";
  const how = `To start the run, use footplate run ${name} ${place}, or Import on Footplate's page.`;
  notify(`${name} was downloaded. ${how}${copy}${leftOut(names)}`);
}

/** @param {(tab: string, run?: string) => void} showView */
export function addBuildEvents(showView) {
  saveWhenLeaving();
  on("view", checkAgain);
  window.addEventListener("focus", checkAgain);
  startHistory();
  $("#fp-fix-all").addEventListener("click", () => fixAll().catch(notifyError));
  $("#fp-start").addEventListener("click", () => start(showView));
  $("#fp-try").addEventListener("click", rehearse);
  prepareTuning(machine);
  prepareExamples();
  prepareSweep((id) => showView("run", id));
  $("#fp-import").addEventListener("click", () => $("#fp-import-file").click());
  $("#fp-import-file").addEventListener("change", importFile);
  for (const id of ["#fp-export", "#fp-export-plan"]) {
    $(id).addEventListener("click", () => exportFile().catch(notifyError));
  }
}
