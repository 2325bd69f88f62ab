// @ts-check
// The card with the fastest settings: how long to measure, the progress, and a table whose rows can be adopted.
import { post } from "../api.js";
import { $, attempt, el, notifyError, redraw, setText, table, tableRow } from "../dom.js";
import { bytes, capitalized, dateTime, duration, integer, num, percent } from "../format.js";
import { createDraftTask } from "./draft_task.js";
import * as form from "./form.js";

const MINUTES = 10;
const TITLES = { running: "Measuring the fastest settings", stopped: "Fastest settings: stopped" };
const RESULTS = {
  same: "within the spread",
  slower: "slower",
  refused: "refused",
  failed: "failed",
  stopped: "not measured",
};
const SPEEDUP =
  "The speedup is for the whole run, including warm-up, and is measured on pairs of the same steps. It can therefore " +
  "differ from the ratio of Tokens/s.";
const box = () => $("#fp-tuning");
const task = createDraftTask("tuning", { api: "api/tunings", draw, dismiss });

let machine = () => "";
let drawn = "";
let title = "";
const minutes = el("input", { type: "number", min: 1, max: 1440, value: MINUTES });
const changes = el("input.fp-checkbox", { type: "checkbox" });

/** @param {() => string} machineOf the machine that the form is checked for */
export function prepareTuning(machineOf) {
  machine = machineOf;
  $("#fp-tune").addEventListener("click", open);
}

/** The form has these values now: mark a result of other values. @param {Record<string, any>} values */
export function compareTuning(values) {
  task.compare(values, machine());
  if (task.id()) drawTitle();
}

function drawTitle() {
  const head = $("#fp-tuning h3");
  if (head) setText(head, task.isOutdated() ? `${title}, with earlier values of the form` : title);
}

const body = () => ({
  values: form.currentValues(),
  machine: machine(),
  minutes: Number(minutes.value),
  changes_result: changes.checked,
});

function keep(id, values) {
  drawn = "";
  task.keep(id, values, machine());
  drawTitle();
}

/** Show what can be measured, or the earlier result for these values. */
async function open() {
  const request = body();
  if (task.isActive()) return box().scrollIntoView({ block: "nearest" });
  task.forget();
  drawn = "";
  drawEmpty();
  minutes.focus();
  await attempt(async () => {
    const { id } = await post("api/tunings/earlier", request);
    if (id && !task.id() && !box().hidden) keep(id, request.values);
  });
}

async function start(event) {
  const button = event.target;
  const request = body();
  button.disabled = $("#fp-tune").disabled = true; // a second measurement would disturb this one
  try {
    keep((await post("api/tunings", request)).id, request.values);
  } catch (error) {
    notifyError(error);
    button.disabled = false;
  } finally {
    $("#fp-tune").disabled = false;
  }
}

export const resumeTuning = task.resume;

function dismiss() {
  task.forget();
  drawn = "";
  box().hidden = true;
}

const isUsable = ({ state }) => ["faster", "same", "slower"].includes(state);

// -- drawing ----------------------------------------------------------------------------------------------------------

const link = (text, onclick) => el("button.fp-link", { type: "button", onclick }, text);
const note = (text) => el("p.fp-dim", {}, text);

function head(text, ...actions) {
  title = text;
  return el("div.fp-card-head", {}, el("h3", {}, text), el("span.fp-gap"), ...actions);
}

function drawEmpty() {
  const about =
    "Trains a few steps with other settings (kernels, batch size, optimizer, DataLoader workers and more), one after " +
    "the other, and compares their speed. No checkpoint is saved, and the form changes only if you adopt a row.";
  redraw(box(), head("Fastest settings", link("Close", dismiss)), note(about), controls("Measure"));
  box().hidden = false;
  box().dataset.state = "empty";
}

const controls = (label) =>
  el(
    "div.fp-tuning-controls",
    {},
    el("label", {}, "At most ", minutes, " minutes"),
    el("label", {}, changes, "Also try settings that change the result slightly: strategy, precision, packing"),
    el("button.fp-button", { type: "button", onclick: start }, label),
  );

function draw(status) {
  const running = status.state === "running";
  const text = JSON.stringify({ ...status, seconds: 0, left: 0 });
  const card = box();
  const left = running && status.left && !status.text ? `At most ${duration(status.left)} left.` : "";
  if (!drawn) {
    minutes.value = String(status.minutes || MINUTES);
    changes.checked = Boolean(status.changes_result);
  }
  if (text === drawn) {
    if (running) setText($(".fp-tuning-left", card), left);
    return;
  }
  drawn = text;
  const unfolded = $("details", card)?.open;
  const stop = () => task.stop().catch(notifyError);
  const titles = { ...TITLES, done: "Fastest settings" };
  const isUnmeasured = status.rows.length === 1 && status.rows[0].step_seconds === null; // the status says why
  const tried = isUnmeasured ? [] : status.rows.filter((row) => row.state !== "skipped");
  const parts = [
    head(titles[status.state] || "Fastest settings: failed", running ? link("Stop", stop) : link("Dismiss", dismiss)),
    el("p", { role: "status" }, running ? progress(status) : outcome(status)),
    running ? el("p.fp-dim.fp-tuning-left", {}, left) : null,
    tried.length ? settingsTable(tried, status) : null,
    !running && tried.some(isUsable) ? el("p.fp-dim", {}, SPEEDUP) : null,
    ...status.notes.map(note),
    skipped(status.rows, unfolded),
    running ? null : controls("Measure again"),
  ];
  redraw(card, ...parts.filter(Boolean));
  card.hidden = false;
  card.dataset.state = status.state;
  drawTitle();
}

function progress({ now, text, trial, planned }) {
  if (text) return text;
  if (!now) return "Checking the settings\u2026";
  return `Trial ${trial} of about ${planned}: ${now}.`;
}

function outcome({ state, failure, fastest, rows, seconds, created, changes_result: changing }) {
  const when = `Measured in ${duration(seconds)} (${dateTime(created)}).`;
  if (state === "failed") return `The settings could not be measured. ${failure || ""}`;
  if (state === "lost") return "The measuring process was killed, or the machine shut down.";
  if (fastest === null) {
    if (!rows.some(isUsable)) return `No other settings were measured. ${when}`;
    const none = changing ? "No other settings" : "No other settings that keep the result";
    return state === "done" ? `${none} were faster by more than the spread of the step times. ${when}` : when;
  }
  const { label, gain, safe } = rows[fastest];
  const effect = safe ? "with the same result" : "with a slightly different result";
  return `${label}: ${gain.toFixed(2)}\u00d7 as fast as the current settings, ${effect}. ${when}`;
}

function settingsTable(rows, { fastest, rows: all }) {
  const heads = ["Settings", "Tokens/s", "Speedup", el("span.fp-sr", {}, "Use")];
  const lines = rows.flatMap((row) => pair(row, row === all[fastest] ? "fastest" : row.state));
  return table("table.fp-rows.fp-tuning-rows", heads, lines, "th.fp-n");
}

/** The settings with their speed, and below them the figures of their steps, or why there are none. */
function pair(row, state) {
  const { label, step_seconds: step, tokens_per_second: speed, gain } = row;
  const use =
    isUsable(row) && row.state !== "slower"
      ? el("button.fp-link", { type: "button", onclick: () => adopt(row) }, "Use these")
      : "";
  const times = row.state === "base" || step === null ? "" : `${gain.toFixed(2)}\u00d7`;
  const attributes = { "data-state": state };
  const figures = [label, speed ? integer(speed) : "", times, use];
  return [
    step === null ? el("tr", attributes, el("td", { colspan: 4 }, label)) : tableRow(figures, "td.fp-n", attributes),
    el("tr.fp-tuning-detail", attributes, el("td.fp-dim", { colspan: 4 }, detail(row))),
  ];
}

function detail(row) {
  const { state, reason, step_seconds: step, spread, peak_bytes: peak, warm_up_seconds: warmUp, safe } = row;
  const figures =
    step === null
      ? []
      : [
          row.tokens_per_second ? "" : `${num(step, 3)} s per step`,
          `spread ${percent(spread)}`,
          peak ? bytes(peak) : "",
          warmUp > Math.max(5, 5 * step) ? `${duration(warmUp)} of warm-up` : "",
        ];
  const effect = safe ? "" : "changes the result slightly";
  const words = [RESULTS[state], ...figures, effect].filter(Boolean).join(", ");
  return [words && `${capitalized(words)}.`, reason].filter(Boolean).join(" ");
}

function skipped(rows, isOpen) {
  const left = rows.filter((row) => row.state === "skipped");
  if (!left.length) return null;
  const items = left.map(({ label, reason }) => el("li", {}, `${label}. ${reason}`));
  return el(
    "details.fp-tuning-skipped",
    { open: isOpen },
    el("summary", {}, `Not tried (${left.length})`),
    el("ul", {}, ...items),
  );
}

function adopt({ patch, label }) {
  form.setValues(patch, { undo: `Settings: ${label}.` });
}
