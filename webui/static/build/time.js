// @ts-check
// The time card: how long the run takes and what it costs, where the time of a step goes, and the reason for the range.
import { post } from "../api.js";
import { $, el, notifyError, redraw, table, tableRow } from "../dom.js";
import { capitalized } from "../format.js";
import { currentValues } from "./form.js";

const SHOWN = 5; // parts of a step in the picture; the others are combined into one
const LEAST = 0.02; // smallest share of a step that is a part of its own
const SHADES = [100, 76, 58, 43, 31, 18]; // percent of the accent color, the largest part first

const machines = el("details.fp-time-machines", { ontoggle: compare }, el("summary", {}, "Other machines"));
let compared = ""; // the values and the selected machine of the table of machines

/** @param {any} time the estimate @param {boolean} isPredicted whether a time can be expected for such a device */
export function drawTime(time, isPredicted) {
  const box = $("#fp-time");
  box.hidden = !time || (Boolean(time.unknown) && !isPredicted);
  if (box.hidden) return;
  const figure = time.facts[time.run ? 0 : time.facts.length - 1]?.value;
  const children = [
    el("div.fp-card-head", {}, el("h3", {}, "Time"), el("span.fp-gap"), el("span.fp-figure", {}, figure || "Unknown")),
    ...(figure ? estimate(time, $(".fp-time-parts", box)?.open) : [el("p.fp-dim", {}, time.texts.summary)]),
    machines,
  ];
  redraw(box, ...children.filter(Boolean));
  void compare();
}

/** The picture, the figures, what the reader must know about them, and the details. */
function estimate(time, isOpen) {
  const { texts } = time;
  const paragraph = (text) => el("p.fp-dim", {}, sentence(text));
  const notes = [time.assumed, texts.padding, time.run ? "" : texts.run, texts.busy].filter(Boolean);
  const reasons = [texts.range, texts.note, texts.not_included].filter(Boolean).map(sentence);
  return [
    picture(time.items),
    el("dl.fp-time-facts", {}, ...time.facts.flatMap(fact)),
    time.measured ? el("p.fp-dim", {}, ...withLink(time.measured)) : null,
    ...notes.map(paragraph),
    el(
      "details.fp-time-parts",
      { open: isOpen },
      el("summary", {}, "Breakdown"),
      breakdown(time),
      el("p.fp-dim.fp-range", {}, reasons.join(" ")),
    ),
  ];
}

const fact = ({ label, value, range }) => [
  el("dt", {}, label),
  el("dd", {}, el("b", {}, value), " ", el("span.fp-dim", {}, range)),
];

/** The time and the price on the other machines, once that part is opened. */
async function compare() {
  const values = currentValues();
  const key = JSON.stringify([values, $("#fp-machine").value]);
  if (!machines.open || key === compared) return;
  compared = key;
  try {
    const lines = await post("api/machines/comparison", { values });
    if (key === compared) redraw(machines, $("summary", machines), comparison(lines));
  } catch (error) {
    compared = "";
    notifyError(error);
  }
}

function comparison(lines) {
  const columns = [
    { head: "GPUs", text: ({ texts }) => texts.gpus },
    { head: "Tokens/s", text: ({ texts }) => texts.tokens },
    { head: "Time", text: ({ texts }) => texts.time.replace(/ \(.*/, "") },
    { head: "Price", text: ({ texts }) => texts.price },
  ].filter(({ text }) => lines.some((line) => text(line) !== "-"));
  const same = lines.every(({ result }) => result === lines[0].result); // shown once, above the table
  const rows = (line) => {
    const about = [same ? "" : line.result, line.can_run ? line.change : ""].filter(Boolean).map(sentence).join(" ");
    const figures = columns.map(({ text }) => (line.can_run ? text(line) : ""));
    const isPlain = line.can_run && about === "Can run."; // the figures show that it can run
    return [
      tableRow([machineLink(line), ...figures], "td.fp-n"),
      about && !isPlain ? el("tr", {}, el("td.fp-dim", { colspan: 1 + columns.length }, about)) : null,
    ].filter(Boolean);
  };
  const heads = ["Machine", ...columns.map(({ head }) => head)];
  const shown = table("table.fp-rows", heads, lines.flatMap(rows), "th.fp-n");
  return el("div", {}, same ? el("p.fp-dim", {}, lines[0].result) : null, shown);
}

/** The name of a machine, which selects it in the menu above the form. */
function machineLink({ name, machine }) {
  const menu = $("#fp-machine");
  const text = capitalized(machine);
  if (name === menu.value) return text;
  const select = () => {
    menu.value = name;
    menu.dispatchEvent(new Event("change"));
  };
  return el("button.fp-link", { type: "button", onclick: select }, text);
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
const percent = (share) => `${Math.round(100 * share)}%`;

/** The sentence about an earlier run, with a link to that run. */
function withLink({ run, name, sentence: text }) {
  const start = text.indexOf(name);
  const link = el("a", { href: `?tab=run&run=${encodeURIComponent(run)}` }, name);
  return [text.slice(0, start), link, text.slice(start + name.length)];
}

/** The parts of a step as a bar with its legend, the largest first. */
function picture(items) {
  const sorted = [...items].sort((one, other) => other.share - one.share);
  const parts = sorted.filter(({ share }, n) => n < SHOWN && share >= LEAST);
  const rest = 1 - parts.reduce((sum, { share }) => sum + share, 0);
  if (rest >= LEAST) parts.push({ label: "Other", share: rest });
  const color = (n) => {
    const node = el("i");
    node.style.setProperty("--shade", `${SHADES[n]}%`);
    return node;
  };
  const piece = ({ share }, n) => {
    const node = color(n);
    node.style.flexGrow = String(100 * share); // flex-grow values with a sum below 1 would not fill the bar
    return node;
  };
  const entry = ({ label, share }, n) => el("li", {}, color(n), el("span", {}, label), el("b", {}, percent(share)));
  return el(
    "figure.fp-time-picture",
    {},
    el("figcaption.fp-dim", {}, "An optimizer step"),
    el("div.fp-time-bar", { "aria-hidden": "true" }, ...parts.map(piece)),
    el("ul", {}, ...parts.map(entry)),
  );
}

function breakdown({ items, run }) {
  const row = ({ label, seconds, formula }) =>
    el("tr", {}, el("td", {}, label), el("td.fp-n", {}, inSeconds(seconds)), el("td.fp-dim", {}, formula));
  const group = (title, rows) => [el("tr", {}, el("th", { colspan: 3 }, title)), ...rows.map(row)];
  const ofRun = run ? group("The run", run.items) : [];
  return el("table.fp-rows", {}, el("tbody", {}, ...group("An optimizer step", items), ...ofRun));
}

const inSeconds = (seconds) =>
  seconds < 1 ? `${(1000 * seconds).toPrecision(3)} ms` : `${Number(seconds.toPrecision(3)).toLocaleString("en")} s`;
