// @ts-check
// Draws the response of a check: status, Start, findings with fixes, launch preview.
import { url } from "../api.js";
import { $, canFocus, copy, el } from "../dom.js";
import { diffList, fixNote, applyFix } from "../fixes.js";
import { capitalized } from "../format.js";
import { columnsLink } from "./columns.js";
import { drawShares } from "./datasets.js";
import { drawDevices } from "./devices.js";
import * as form from "./form.js";
import { offerModuleNames } from "./module_names.js";
import { drawMemory } from "./memory.js";
import { isRehearsing } from "./rehearsal.js";
import { drawStrategies } from "./strategies.js";
import { drawTime } from "./time.js";

const MAX_FIXES = 3; // on a card; the memory card lists all fixes of the memory rules
const MEMORY_RULES = ["MEM001", "MEM002"];
const LEVELS = { error: "Error", warning: "Warning", advice: "Advice" };

let scriptText = "";
let previewTab = "command";
let drawn = ""; // the report without the progress of the examples

export const script = () => scriptText;
const preventsStart = (status) => ["error", "invalid"].includes(status.level);

/** @param {any} report @param {{ starting: boolean, edited: boolean }} since whether a run is being started, and
 * whether the form was edited since the last report */
export function drawReport(report, { starting, edited }) {
  drawStart(report, starting);
  $("#fp-status .fp-status-examples").textContent = capitalized(report.examples.text);
  const { seq: _seq, examples: _examples, ...rest } = report;
  const text = JSON.stringify(rest);
  if (!edited && text === drawn) return; // so that open details stay open while examples are counted
  drawn = text;
  drawContent(report);
}

/** Start: what it waits for, or whether the run can be started. */
export function drawStart(report, starting) {
  const { pending, checked, total } = report.examples;
  const share = total ? ` ${Math.min(99, Math.floor((100 * checked) / total))}%` : "";
  $("#fp-start").textContent = !starting ? "Start" : pending ? `Checking${share}` : "Starting";
  disableStart(starting || preventsStart(report.status));
}

function drawContent(report) {
  const { status, findings, invalid } = report;
  const box = $("#fp-status");
  box.dataset.level = status.level;
  $(".fp-status-text", box).textContent = status.text;
  const more = [report.place && `On ${report.place}`, report.summary].filter(Boolean).join(": ");
  $(".fp-status-more", box).textContent = more;
  $("#fp-try").hidden = $("#fp-tune").hidden = preventsStart(status); // the button with fixes takes their place
  drawFixAll(findings.filter((f) => f.level === "error"));
  offerModuleNames(report.modules || {});
  $("#fp-findings").replaceChildren(...invalid.map(invalidCard), ...findings.map(findingCard));
  drawMemory(
    report.memory,
    findings.find((f) => MEMORY_RULES.includes(f.code)),
    report.examples.pending,
  );
  drawTime(report.time, report.time.is_measurable || report.memory?.placement.noun === "GPU");
  drawDevices(report.devices);
  drawShares(report.datasets);
  drawStrategies(report.strategies, report.memory.placement.noun);
  outlineFields(findings, invalid); // after drawing, when it is known which fields are shown
  drawPreview(report.preview);
}

/**
 * After a fix, its button is gone, hidden or disabled, so the focus moves: to the next fix, else to Start or Export,
 * else to the first error; after the offer of recommended values, to the field below the offer.
 * @param {any} focused what had the focus before the report was drawn
 */
export function keepFocus(focused) {
  if (!focused || canFocus(focused)) return;
  const fix = ".fp-finding[data-level=error] .fp-fix button";
  const candidates = focused.closest(".fp-offered")
    ? ["#fp-search"]
    : focused.closest(".fp-fix, .fp-status")
      ? [fix, ".fp-start:not([hidden]):not(:disabled)", ".fp-finding[data-level=error] :is(button, summary)"]
      : [];
  const next = candidates.map((selector) => $(selector)).find(Boolean);
  if (next) next.focus({ preventScroll: true });
}

/** The check failed: no response, or an error. @param {string} title @param {string} text */
export function drawCheckFailed(title, text) {
  const box = $("#fp-status");
  box.dataset.level = "checking";
  $(".fp-status-text", box).textContent = title;
  $(".fp-status-more", box).textContent = text;
  $(".fp-status-examples", box).textContent = "";
  drawn = "";
  disableStart(true);
}

/** Start, or Export in its place when the run is planned for another machine. The Export link above stays enabled. */
function disableStart(disabled) {
  for (const id of ["#fp-start", "#fp-export-plan"]) $(id).disabled = disabled;
  $("#fp-try").disabled = disabled || isRehearsing();
}

function drawFixAll(errors) {
  const fixable = errors.filter((f) => f.fixes.some((fix) => fix.safe));
  $("#fp-fix-all").hidden = !fixable.length;
  $("#fp-fix-all").textContent = fixable.length === errors.length ? "Fix all errors" : "Apply safe fixes";
}

function outlineFields(findings, invalid) {
  const order = { warning: 1, error: 2 };
  /** @type {Record<string, string>} */
  const levels = {};
  for (const { level, fields } of findings) {
    for (const name of fields) if (order[level] > (order[levels[name]] || 0)) levels[name] = level;
  }
  for (const { field } of invalid) if (field) levels[field] = "error";
  form.outline(levels);
}

// -- findings ---------------------------------------------------------------------------------------------------------

function invalidCard({ field, message }) {
  return el(
    "article.fp-finding",
    { "data-level": "error" },
    cardHeader("error", field ? `Invalid value: ${form.label(field)}` : "Invalid configuration"),
    el("p", {}, field ? `${form.label(field)} ${message}.` : `The configuration ${message}.`),
    fieldLinks(field ? [field] : []),
  );
}

function findingCard(finding) {
  const { code, level, title, message, reason, fields, fixes } = finding;
  return el(
    "article.fp-finding",
    { "data-level": level, "data-code": code },
    cardHeader(level, title),
    el("p", {}, message),
    reason ? el("p.fp-reason", {}, reason) : null,
    fieldLinks(fields),
    columnsLink(finding),
    ...fixes.slice(0, MAX_FIXES).map(fixRow),
    findingDetails(finding),
  );
}

const cardHeader = (level, title) => el("header", {}, el("span.fp-level", {}, LEVELS[level]), el("h3", {}, title));

function fieldLinks(fields) {
  if (!fields.length) return null;
  const link = (name) =>
    el("button.fp-field-link", { type: "button", onclick: () => form.goTo(name) }, form.label(name));
  return el("p.fp-links", {}, ...fields.map(link));
}

function findingDetails({ code, slug, source }) {
  const rule = el("a", { href: url(`rules#${code}`), target: "_blank", rel: "noopener" }, `${code} ${slug}`);
  return el(
    "details.fp-finding-details",
    {},
    el("summary", {}, "Details"),
    el("p", {}, "Rule: ", rule),
    source ? el("p", {}, `Source: ${source}`) : null,
  );
}

function fixRow(fix) {
  const button = el("button.fp-button", { type: "button", onclick: () => applyFix(fix) }, fix.label);
  return el("div.fp-fix", {}, button, fixNote(fix), diffList(fix.diff));
}

/** The number of the tab that an arrow key, Home or End leads to from tab `at` of `count`; null for other keys. */
function neighbor(key, at, count) {
  const steps = { ArrowLeft: at - 1 + count, ArrowRight: at + 1, Home: 0, End: count - 1 };
  return key in steps ? steps[key] % count : null;
}

// -- launch preview ---------------------------------------------------------------------------------------------------

function drawPreview(preview) {
  const box = $("#fp-preview");
  box.hidden = !preview;
  if (!preview) return;
  scriptText = preview.script;
  const parts = [...preview.others, ...preview.files];
  const texts = { command: preview.command, ...Object.fromEntries(parts.map((part) => [part.name, part.text])) };
  if (!(previewTab in texts)) previewTab = "command";
  const title = (name) => (name === "command" ? "Command" : name);
  const names = Object.keys(texts);
  const select = (name) => {
    previewTab = name;
    drawPreview(preview);
  };
  const tab = (name) => {
    const selected = name === previewTab;
    const state = { "aria-selected": String(selected), tabindex: selected ? 0 : -1 };
    return el("button", { type: "button", role: "tab", ...state, onclick: () => select(name) }, title(name));
  };
  const tabs = $("#fp-preview-tabs");
  const hadFocus = tabs.contains(document.activeElement);
  tabs.replaceChildren(...names.map(tab));
  if (hadFocus) $("[aria-selected=true]", tabs).focus();
  tabs.onkeydown = (event) => {
    const to = neighbor(event.key, names.indexOf(previewTab), names.length);
    if (to === null) return;
    event.preventDefault();
    select(names[to]);
  };
  $("#fp-copy-tab").onclick = () => copy(texts[previewTab], title(previewTab));
  const pre = $("#fp-preview-text");
  if (pre.textContent !== texts[previewTab]) pre.textContent = texts[previewTab];
  const file = preview.files.find((f) => f.name === previewTab);
  $("#fp-preview-notes").textContent = file ? file.about : preview.notes.join(" ");
}
