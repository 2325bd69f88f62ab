// @ts-check
// Parts of the Run view that show what is known of a run: result cards, failure, details.
import { serverTime, url } from "../api.js";
import { copy, el, table, tableRow } from "../dom.js";
import { bytes, capitalized, count, duration, integer, num, percent, toSeconds, valueText } from "../format.js";
import { placementPicture } from "../placement.js";
import { hasEnded } from "../run_state.js";
import { liveCards } from "./live.js";

const FILES = [
  ["Report", "report.png"],
  ["Report as SVG", "report.svg"],
  ["Metrics", "metrics.csv"],
  ["Log", "log.txt"],
  ["Configuration", "spec.yaml"],
  ["Debug bundle", "bundle.zip"],
];

export const fold = (title, body, onCopy = null) =>
  el(
    "details.fp-fold",
    {},
    el("summary", {}, title),
    onCopy ? el("button.fp-chip.fp-copy", { type: "button", onclick: onCopy }, "Copy") : null,
    body,
  );

const codeBlock = (text) => el("pre.fp-code", { tabindex: 0 }, text);
const copyable = (title, text, name = title) => (text ? fold(title, codeBlock(text), () => copy(text, name)) : null);

const MEASUREMENT = ["Measurement report", "measurement.json"];

/** The files to download. @param {string} base the run's API path @param {boolean} measured there is a measurement */
export const downloadLinks = (base, measured) =>
  (measured ? [...FILES, MEASUREMENT] : FILES).map(([name, file]) =>
    el("a", { href: url(`${base}/${file}`), download: "" }, name, el("span.fp-dim", {}, file)),
  );

/** Whether a run that has ended has measured its memory or the time of a step. */
export function isMeasured({ result, progress, monitor }) {
  const peaks = result?.peak_bytes || (monitor?.ranks || []).map((rank) => rank.peak);
  return [progress?.step_seconds, ...peaks].some(Boolean);
}

// -- result cards -----------------------------------------------------------------------------------------------------

/**
 * What is known so far; the final values replace the latest ones in place.
 * @returns {{ title: string, value?: any, note?: string, large?: boolean, time?: boolean }[]}
 */
export function resultCards({ summary, result: found, validation, estimate, monitor }, latest) {
  const result = found || {};
  const now = (key) => (latest && latest[key] ? latest[key].value : undefined);
  return [
    ...generationCards(result),
    ...lossCards(result, validation, now),
    ...speedCards(result, summary, estimate || {}, now),
    ...liveCards(monitor || {}),
    ...sizeCards(result, estimate || {}),
  ];
}

const SMALL = 0.05; // change of a score: with a hundred generations, a smaller one may be chance
const FEW = 20; // generations: with fewer, a difference of one or two can be chance
const VERY_FEW = 8; // generations: with fewer, an evaluation has no interval either

/** Whether the scores are of so few generations that their change says little. */
const isFew = ({ samples }) => Boolean(samples) && samples.length > 0 && samples.length < FEW;

const tooFew = ({ samples }) => {
  const [count, examples] = [samples.length, samples.length === 1 ? "1 example" : `${samples.length} examples`];
  if (count >= VERY_FEW) return `With ${examples}, a change of one or two can be chance`;
  return `${examples} ${count === 1 ? "is" : "are"} too few to tell what training changed`;
};

const METRICS = [
  {
    key: "exact_match",
    name: "exact match on validation examples",
    title: "Exact match on validation examples",
  },
  { key: "rouge_l", name: "ROUGE-L", title: "ROUGE-L" },
  { key: "bleu", name: "BLEU", title: "BLEU" },
];

/** The metrics of the generations, with their values before and after training. */
const generationMetrics = (result) =>
  METRICS.map((metric) => ({
    ...metric,
    before: result[`${metric.key}_before`],
    after: result[`${metric.key}_after`],
  })).filter(({ after }) => Number.isFinite(after));

/**
 * What training changed, in a sentence about the first metric that changed; null without values from before.
 * @returns {{ text: string, change: "better" | "worse" | "same" } | null}
 */
export function gainOf(result) {
  const metrics = generationMetrics(result || {}).filter(({ before }) => Number.isFinite(before));
  if (!metrics.length) return null;
  const changed = metrics.find(({ before, after }) => before !== after);
  if (!changed) {
    const { name, after } = metrics[0];
    const finding = isFew(result) ? tooFew(result) : "No improvement";
    return { text: `${finding}: ${name} is ${percent(after)} before and after training.`, change: "same" };
  }
  const { name, before, after } = changed;
  const verb = after > before ? "raised" : "lowered";
  const sentence = `Training ${verb} ${name} from ${percent(before)} to ${percent(after)}.`;
  const first = metrics[0] === changed ? "" : ` ${capitalized(metrics[0].name)} is still ${percent(metrics[0].after)}.`;
  const values = `${name} was ${percent(before)} before and ${percent(after)} after training.${first}`;
  if (isFew(result)) return { text: `${tooFew(result)}: ${values}`, change: "same" };
  if (Math.abs(after - before) < SMALL)
    return { text: `No clear change: ${values} So small a change may be chance: see Evaluation.`, change: "same" };
  return { text: sentence + first, change: after > before ? "better" : "worse" };
}

function generationCards(result) {
  return generationMetrics(result).map(({ key, title, before, after }) => {
    const known = Number.isFinite(before);
    const was = known
      ? [
          el("span.fp-was", {}, percent(before)),
          el("span.fp-arrow", { role: "img", "aria-label": "after training" }, "\u2192"),
        ]
      : [];
    const isGain = !known || (after > before && !isFew(result));
    const value = [...was, el(isGain ? "strong" : "b", {}, percent(after))]; // green is for a gain
    return { title, value, note: known ? "before and after training" : "after training", large: key === "exact_match" };
  });
}

function lossCards(result, validation, now) {
  const cards = [];
  const add = (title, value, text = num, note = "") => {
    if (Number.isFinite(value)) cards.push({ title, value: text(value), note });
  };
  const latest = (key) => result[`eval_${key}`] ?? now(`eval_${key}`) ?? now(key);
  add("Validation loss", result.eval_loss ?? now("eval_loss"), num, validation);
  add("Reward accuracy", latest("reward_accuracy"), percent, "of the preference pairs");
  add("Reward margin", latest("reward_margin"));
  add(Number.isFinite(result.train_loss) ? "Mean training loss" : "Training loss", result.train_loss ?? now("loss"));
  add(
    "Skipped optimizer steps",
    result.skipped_steps ?? now("skipped_steps"),
    integer,
    "gradients were NaN or infinite",
  );
  return cards;
}

function speedCards(
  result,
  { state, started, ended, earlier_seconds: earlier },
  { flops_per_token: flops, peak_flops: peak },
  now,
) {
  const cards = [];
  const { seconds } = result;
  const speed = result.tokens_per_second ?? now("tokens_per_second");
  if (Number.isFinite(speed)) {
    const note = flops && peak ? `${percent((speed * flops) / peak)} model FLOPs utilization` : "";
    cards.push({ title: "Tokens per second", value: integer(speed), note });
  }
  const elapsed = (end) => duration(end - toSeconds(started) + (earlier || 0)); // total time of all starts
  if (Number.isFinite(seconds)) cards.push({ title: "Training time", value: duration(seconds) });
  else if (started && !hasEnded(state)) cards.push({ title: "Elapsed", value: elapsed(serverTime()), time: true });
  else if (started && ended) cards.push({ title: "Duration", value: elapsed(toSeconds(ended)), time: true });
  return cards;
}

function sizeCards(
  { trainable_parameters: trainable, parameters, peak_bytes: measured },
  { measured_bytes: estimated },
) {
  const cards = [];
  if (trainable) {
    const note = parameters ? `${percent(trainable / parameters)} of ${count(parameters)}` : "";
    cards.push({ title: "Trainable parameters", value: count(trainable), note });
  }
  const peaks = (measured || []).filter(Number.isFinite);
  if (peaks.length) {
    const note = estimated ? `estimated ${bytes(estimated)}` : peaks.length > 1 ? "highest of all ranks" : "";
    cards.push({ title: "Peak memory", value: bytes(Math.max(...peaks)), note });
  }
  return cards;
}

export const cardNode = ({ title, value, note, large }) =>
  el(
    `div.fp-result${large ? ".fp-large" : ""}`,
    {},
    el("dt", {}, title),
    el("dd", {}, value),
    note ? el("dd.fp-dim", {}, note) : null,
  );

// -- memory ----------------------------------------------------------------------------------------------------------

const ROUND = 2 ** 24; // bytes: smaller changes do not draw the picture again

/** What the placement picture shows: the estimate, and the measured bytes of each rank; null without an estimate. */
export function placementOf({ estimate, result, monitor }) {
  if (!estimate?.placement) return null;
  const peaks = (result && result.peak_bytes) || ((monitor && monitor.ranks) || []).map((rank) => rank.peak);
  const unseen = estimate.device_bytes - estimate.measured_bytes; // memory outside of torch's allocator
  const measured = peaks.map((peak) => (Number.isFinite(peak) ? ROUND * Math.round((peak + unseen) / ROUND) : null));
  return { estimate, measured };
}

/** The estimate of each device as a picture, with its measured peak. @returns {Node[]} */
export function placementParts({ estimate, measured }) {
  const title = measured.some(Boolean) ? "Memory: estimated and measured" : "Estimated memory";
  return [el("h3", {}, title), placementPicture(estimate, { measured })];
}

// -- time ------------------------------------------------------------------------------------------------------------

/** The predicted time next to the measured one. @returns {Node[]} */
export function timeParts({ rows, sentence }) {
  const line = ([what, ...times]) =>
    el("tr", {}, el("th", { scope: "row" }, what), ...times.map((time) => el("td.fp-n", {}, time)));
  const heads = [el("span.fp-sr", {}, "Figure"), "Predicted", "Measured"];
  return [
    el("h3", {}, "Time: predicted and measured"),
    table("table.fp-rows", heads, rows.map(line), "th.fp-n"),
    el("p.fp-dim", {}, sentence),
  ];
}

// -- details ----------------------------------------------------------------------------------------------------------

/** @returns {Node[]} */
export function detailParts({ spec, command, joining, yaml, script, result, estimate }) {
  const options = Object.entries(spec || {});
  const row = ([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, display(name, value)));
  const values = el("table.fp-pairs", {}, el("tbody", {}, options.map(row)));
  return [
    fold("Configuration", options.length ? values : el("p.fp-dim", {}, "All options have their default values.")),
    (result || {}).peak_bytes || (estimate || {}).rows
      ? fold("Memory", memoryTables(result || {}, estimate || {}))
      : null,
    copyable("Command", command),
    copyable("Commands for the other nodes", joining, "Commands"),
    copyable("spec.yaml", yaml),
    copyable("run.sh", script),
  ].filter(Boolean);
}

function display(name, value) {
  if (Array.isArray(value)) return value.join(", ");
  if (value === null || value === "") return "\u2013";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "object") return JSON.stringify(value);
  return typeof value === "number" && !Number.isInteger(value) ? valueText(name, value) : String(value);
}

/** The measured peak of each rank next to the estimate. torch does not see the memory that the driver reserves. */
function memoryTables({ peak_bytes: peaks = [], reserved_bytes: reserved = [] }, { rows = [], device_bytes: total }) {
  const figures = (heads, rows) =>
    table(
      "table.fp-rows",
      heads,
      rows.map((row) => tableRow(row, "td.fp-n")),
      "th.fp-n",
    );
  const hasReserved = reserved.some(Number.isFinite);
  const rank = (peak, i) => [`Rank ${i}`, bytes(peak), ...(hasReserved ? [bytes(reserved[i])] : [])];
  const parts = rows.filter((row) => row.where === "device" && row.bytes > 0);
  return el(
    "div.fp-memory-tables",
    {},
    peaks.length ? figures(["Measured", "Peak", ...(hasReserved ? ["Reserved"] : [])], peaks.map(rank)) : null,
    parts.length
      ? figures(
          ["Estimate per device", bytes(total)],
          parts.map((row) => [row.name, bytes(row.bytes)]),
        )
      : null,
  );
}
