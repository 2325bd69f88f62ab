// @ts-check
// The card with examples of the form's data, token by token: what is trained on, and where they are cut.
import { post } from "../api.js";
import { $, chip, el, on, redraw } from "../dom.js";
import { forgetColumns, loadColumns } from "./columns.js";

const MOST = 50; // positions that the server reports for each kind of problem
const AGAIN = 400; // ms between requests while the worker renders the example
const TRAIN = ["stage", "per_device_train_batch_size", "train_sampling_strategy"].map((name) => `train.${name}`);
const decides = (name) => /^(model|data)\./.test(name) || name === "launch.trainer" || TRAIN.includes(name);

/** @type {Record<string, any>} */
let values = {}; // the form's values
let drawn = ""; // the values and the position that determine what is shown or requested
let shown = ""; // the example that is shown
let timer = 0;
/** @type {[string, string][]} */
let datasets = []; // if there are several: the title of each, and its share of an epoch
let dataset = 0; // number of the dataset that is shown

const card = () => $("#fp-examples");
const field = () => $("#fp-example-number");
const position = () => Math.max(0, (Math.floor(Number(field().value)) || 1) - 1);

function go(to) {
  field().value = String(Math.max(1, to));
  load();
}

export function prepareExamples() {
  card().addEventListener("toggle", load);
  window.addEventListener("focus", loadAgain);
  on("dataset", choose);
  field().addEventListener("change", () => go(position() + 1));
  $("#fp-example-previous").addEventListener("click", () => go(position()));
  $("#fp-example-next").addEventListener("click", () => go(position() + 2));
}

/** The form has these values now. @param {Record<string, any>} now */
export function refreshExamples(now, found = []) {
  datasets = found;
  drawDatasets();
  values = now;
  load();
}

function load() {
  if (!card().open) return;
  loadColumns(values, dataset);
  const wanted = JSON.stringify([dataset, position(), Object.entries(values).filter(([name]) => decides(name))]);
  if (wanted === drawn) return;
  drawn = wanted;
  clearTimeout(timer);
  request(wanted);
}

/** Another program may have changed the data files. */
function loadAgain() {
  drawn = "";
  forgetColumns();
  load();
}

/** @param {string} wanted what `drawn` is as long as nothing else is requested */
async function request(wanted) {
  try {
    const found = await post("api/examples", { values, position: position(), dataset });
    if (wanted !== drawn) return;
    if (found.pending) {
      if (!$("#fp-example").childElementCount) drawProblem("Loading the tokenizer");
      timer = setTimeout(() => request(wanted), AGAIN);
    } else {
      draw(found);
      if (!found.complete && !found.problem) timer = setTimeout(() => request(wanted), AGAIN);
    }
  } catch (error) {
    if (wanted !== drawn) return;
    drawn = ""; // requested again after the next check
    drawProblem(error.message);
  }
}

function drawProblem(text) {
  shown = "";
  $("#fp-example").removeAttribute("aria-busy");
  $("#fp-example").replaceChildren(el("p.fp-dim", {}, text));
}

function draw({ example, problem, lengths, kinds }) {
  drawSummary(lengths, kinds);
  $("#fp-example").removeAttribute("aria-busy");
  const now = JSON.stringify([example, problem]);
  if (now === shown && $("#fp-example").childElementCount) return;
  shown = now;
  $("#fp-example-previous").disabled = position() === 0;
  $("#fp-example-next").disabled = !example;
  if (!example) return drawProblem(problem || "The data files have fewer examples than that.");
  const unfolded = $("#fp-example details")?.open;
  const differs = firstDifference(example.sequences);
  $("#fp-example").replaceChildren(
    el("p.fp-example-place.fp-dim", {}, example.location),
    ...[example.problem, ...example.notes].filter(Boolean).map((text) => el("p.fp-example-problem", {}, text)),
    ...example.sequences.flatMap((each) => sequenceParts(each, differs)),
    example.row &&
      el(
        "details",
        { open: Boolean(unfolded) },
        el("summary", {}, "In the data file"),
        el("pre.fp-code", { tabindex: 0 }, example.row),
      ),
  );
}

/** For several datasets: a chip for each, and what the selected one contributes. */
function drawDatasets() {
  dataset = Math.min(dataset, Math.max(0, datasets.length - 1));
  const chips = datasets.map(([title], n) => {
    const pressed = { "aria-pressed": String(n === dataset) };
    return chip(title, () => choose(n), pressed);
  });
  const parts = chips.length ? [el("p.fp-example-kinds", {}, chips), el("p.fp-dim", {}, datasets[dataset][1])] : [];
  redraw($("#fp-example-datasets"), ...parts);
}

function choose(number) {
  if (number !== dataset) $("#fp-example").setAttribute("aria-busy", "true"); // until its example is shown
  dataset = number;
  drawDatasets();
  field().value = "1";
  load();
}

/** The lengths as a picture, and a way through the examples that have a problem. */
function drawSummary(lengths, kinds) {
  const problems = (kinds ?? []).map(([words, positions]) => {
    const next = positions.find((each) => each > position()) ?? positions[0];
    const count = positions.length >= MOST ? `${MOST}+` : `${positions.length}`;
    const title = `Show the next one, example ${(next + 1).toLocaleString("en")}`;
    return chip(`${count} ${words}`, () => go(next + 1), { title });
  });
  const chips = [...(lengths ? places(lengths) : []), ...problems];
  const parts = [lengths && histogram(lengths), chips.length && el("p.fp-example-kinds", {}, chips)];
  redraw($("#fp-example-summary"), ...parts.filter(Boolean));
}

const places = ({ longest, rows }) => [
  chip("Random", () => go(Math.floor(Math.random() * rows) + 1), { title: "Show an example drawn at random" }),
  chip("Longest", () => go(longest + 1), { title: "Show the example with the most tokens" }),
];

function histogram({ bars, end, limit, text }) {
  const most = Math.max(...bars);
  const drawn = bars.map((count, n) => {
    const isCut = ((n + 0.5) * end) / bars.length > limit;
    return el("i", { style: `height: ${count && Math.max(4, (100 * count) / most)}%`, class: isCut ? "fp-cut" : null });
  });
  const line = limit < end && el("b", { style: `left: ${(100 * limit) / end}%`, title: `max_length ${limit}` });
  return el("figure.fp-lengths", {}, el("div", { "aria-hidden": "true" }, drawn, line), el("figcaption", {}, text));
}

/** The first piece that differs between the two sequences of a pair; -1 if there is none. */
function firstDifference(sequences) {
  if (sequences.length !== 2) return -1;
  const [one, other] = sequences.map(({ pieces }) => pieces.map(([text]) => text));
  return one.findIndex((text, n) => text !== other[n]);
}

function sequenceParts({ name, tokens, kept, trained, use, end, pieces }, differs) {
  const parts = [`${tokens.toLocaleString("en")} tokens`, `${trained.toLocaleString("en")} ${use}`];
  if (end) parts.push(`ends with ${end}`);
  if (kept < tokens) parts.push(`${(tokens - kept).toLocaleString("en")} after max_length`);
  const nodes = [];
  let shown = 0;
  let isCut = false;
  let last = 1; // the weight of the previous piece
  for (const [n, [text, ids, weight]] of pieces.entries()) {
    if (n === differs) nodes.push(el("span.fp-difference", {}, "differs from here"));
    if (!isCut && shown >= kept) nodes.push(cutMark(kept));
    isCut = shown >= kept;
    if (!isCut && weight !== last && weight > 0 && weight !== 1) nodes.push(weightMark(weight));
    last = weight;
    nodes.push(piece(text, ids, isCut ? "fp-cut" : weight > 0 ? "fp-trained" : "", weight));
    shown += ids.length;
  }
  const more = shown < tokens && el("p.fp-dim", {}, `${(tokens - shown).toLocaleString("en")} more tokens`);
  const title = name ? `${name[0].toUpperCase()}${name.slice(1)}: ` : "";
  return [
    el("p.fp-example-summary", {}, title + parts.join(", ")),
    el("pre.fp-code.fp-tokens", { tabindex: 0 }, nodes),
    more,
  ].filter(Boolean);
}

const cutMark = (kept) => el("span.fp-cut-mark", {}, `max_length ${kept.toLocaleString("en")}`);

const weightMark = (weight) => el("span.fp-weight-mark", {}, `weight ${weight}`);

/** The background of a token whose weight in the loss is not 1: a share of the color of trained tokens. */
function strength(weight) {
  const percent = Math.min(28, Math.max(5, 12 + 6 * Math.log2(weight)));
  return `background: color-mix(in srgb, var(--fp-ok) ${percent.toFixed()}%, transparent)`;
}

/** Line feeds are shown, because they can be trained on. */
function piece(text, ids, kind, weight) {
  const isWeighted = kind === "fp-trained" && weight !== 1;
  const classes = isWeighted ? "fp-trained fp-weighted" : kind;
  const tokens = ids.length > 1 ? `Tokens ${ids.join(", ")}` : `Token ${ids[0]}`;
  const title = isWeighted ? `${tokens}, weight ${weight}` : tokens;
  const style = isWeighted ? strength(weight) : null;
  return el("span", { title, class: classes || null, style }, text.replaceAll("\n", "\u21b5\n"));
}
