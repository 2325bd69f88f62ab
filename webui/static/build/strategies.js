// @ts-check
// The strategy picker: a line for each parallel strategy with its memory, communication and verdict; a click selects
// it.
import { $, el, setText } from "../dom.js";
import { foldedDiff } from "../fixes.js";
import { bytes, num } from "../format.js";
import { setValues } from "./form.js";

/** @type {Map<string, any>} lines by name; they stay in the page, so that the focus stays too */
const lines = new Map();
const HELP = {
  host: "Estimated peak RAM of a node, for all its processes together",
  sent: "Data that each device sends to other devices and exchanges with host RAM in an optimizer step",
  speed:
    "Predicted training speed of all devices together; unknown where none is predicted, for example with offloading",
};
let showsOthers = false;
let latest = null;

/**
 * @param {any} strategies of the check report; null if the strategy has no effect
 * @param {string} device what holds a rank: "GPU", "NPU", "XPU" or "process"
 */
export function drawStrategies(strategies, device) {
  const box = $("#fp-strategies");
  box.hidden = !strategies;
  if (!strategies) return;
  latest = { strategies, device };
  const shown = [...strategies.lines, ...(showsOthers ? strategies.others : [])];
  const hasSpeed = shown.some((line) => line.tokens_per_second); // without speeds, the sent bytes tell which is faster
  const nodes = shown.map((line) => drawLine(line, device, hasSpeed));
  const list = $(".fp-strategy-list", box) || firstDraw(box);
  const capacities = shown.map((line) => line.capacity_bytes);
  const [least, most] = [Math.min(...capacities), Math.max(...capacities)]; // processes on a CPU share its RAM
  const range = rangeText(least, most);
  const memory = $(".fp-strategy-memory", box);
  memory.title = memoryHelp(device, most && range, least < most);
  setText(memory, most ? `Memory per ${device} (${range} available)` : `Memory per ${device}`);
  const last = $(".fp-strategy-speed", box);
  last.title = hasSpeed ? HELP.speed : HELP.sent;
  setText(last, hasSpeed ? "Tokens/s" : "Sent per step");
  if (nodes.length !== list.children.length || nodes.some((node, i) => list.children[i] !== node)) {
    const focused = /** @type {HTMLElement} */ (document.activeElement);
    list.replaceChildren(...nodes);
    if (list.contains(focused)) focused.focus({ preventScroll: true });
  }
  $(".fp-strategy-best", box).replaceChildren(...recommendation(strategies));
  const others = $(".fp-strategy-others", box);
  others.hidden = !strategies.others.length;
  setText(
    others,
    showsOthers ? "Fewer strategies" : `Show ${strategies.others.map((line) => line.name).join(" and ")}`,
  );
  others.setAttribute("aria-expanded", String(showsOthers));
}

/** 1.5 to 3.4 GiB; one size if they are equal, or the lower one is not known.
 * @param {number} least @param {number} most */
export function rangeText(least, most) {
  const [[few, unit], [, unitOfMost]] = [bytes(least).split(" "), bytes(most).split(" ")];
  const from = unit === unitOfMost ? Number(few) : bytes(least);
  return least && least < most ? `${from} to ${bytes(most)}` : bytes(most);
}

/** @param {string} device @param {string | 0} range of the memory that is available @param {boolean} isShared */
function memoryHelp(device, range, isShared) {
  const why = isShared ? ", because a strategy that starts more processes on this machine leaves less for each" : "";
  return `Estimated peak memory of one ${device}.${range ? ` Each has ${range} available${why}.` : ""}`;
}

function firstDraw(box) {
  const toggle = () => {
    showsOthers = !showsOthers;
    drawStrategies(latest.strategies, latest.device);
  };
  const list = el("div.fp-strategy-list");
  box.replaceChildren(
    el(
      "div.fp-strategy-head",
      { "aria-hidden": "true" },
      el("span", {}, "Strategy"),
      el("span.fp-strategy-memory"),
      el("span.fp-n", { title: HELP.host }, "Host RAM"),
      el("span.fp-n.fp-strategy-speed"),
    ),
    list,
    el("p.fp-strategy-best"),
    el("button.fp-strategy-others", { type: "button", onclick: toggle }),
  );
  return list;
}

function newLine(name) {
  const input = el("input", { type: "radio", name: "fp-strategy", onchange: () => choose(name) });
  const bar = el("span.fp-strategy-fill");
  const parts = {
    input,
    bar,
    name: el("span.fp-strategy-name"),
    badge: el("span.fp-strategy-badge", { hidden: true }, "recommended"),
    memory: el("span.fp-n"),
    host: el("span.fp-n"),
    speed: el("span.fp-n"),
    verdict: el("span.fp-strategy-verdict"),
  };
  const node = el(
    "label.fp-strategy",
    {},
    el("span.fp-strategy-title", {}, input, parts.name, parts.badge, parts.verdict),
    el("span.fp-strategy-bar", { "aria-hidden": "true" }, bar),
    parts.memory,
    parts.host,
    parts.speed,
  );
  return { node, ...parts };
}

function drawLine(line, device, hasSpeed) {
  const name = line.name;
  if (!lines.has(name)) lines.set(name, newLine(name));
  const parts = lines.get(name);
  parts.line = line;
  const { verdict: text, fit } = line;
  const known = line.device_bytes !== null && !line.error; // a strategy that cannot run needs no figures
  parts.node.dataset.state = line.error ? "error" : fit;
  parts.input.checked = line.is_current;
  parts.badge.hidden = !line.is_best;
  setText(parts.name, name);
  setText(parts.verdict, text);
  setText(parts.memory, known ? bytes(line.device_bytes) : "");
  setText(parts.host, known ? (line.host_bytes ? bytes(line.host_bytes) : "none") : "");
  const sent = line.sent_bytes + line.host_traffic_bytes;
  const speed = line.tokens_per_second ? num(Number(line.tokens_per_second.toPrecision(3))) : "unknown";
  setText(parts.speed, !known ? "" : hasSpeed ? speed : sent ? bytes(sent) : "none");
  parts.speed.title = hasSpeed && known ? `${bytes(sent)} sent per step` : "";
  const share = known && line.capacity_bytes ? line.device_bytes / line.capacity_bytes : 0;
  parts.bar.style.width = `${Math.min(100, 100 * share)}%`;
  const figures = known
    ? `${bytes(line.device_bytes)} per ${device}, ${bytes(line.host_bytes)} of host RAM, ${bytes(sent)} sent per step` +
      (hasSpeed ? `, ${speed} tokens per second` : "")
    : "";
  parts.input.setAttribute(
    "aria-label",
    [name, text, figures, line.is_best ? "recommended" : ""].filter(Boolean).join(", "),
  );
  return parts.node;
}

function choose(name) {
  apply(lines.get(name).line);
}

function apply(line) {
  const { lines: shown, others } = latest.strategies;
  const before = [...shown, ...others].find((other) => other.is_current)?.examples_per_step;
  const after = line.examples_per_step;
  const batch = before && before !== after ? `trains on ${num(after)} instead of ${num(before)} examples per step` : "";
  const changes = [batch, line.diff.length ? "changes other options too" : ""].filter(Boolean).join(" and ");
  const notice = {
    undo: `Strategy: ${line.name}. It ${changes}.`,
    details: line.diff.length ? foldedDiff(line.diff) : null,
  };
  setValues(line.patch, changes ? notice : {});
}

/** Why a strategy is recommended, with a button if no line has it, because it changes more options. */
function recommendation({ lines: shown, best }) {
  if (!best) return [];
  const isLine = shown.some((line) => line.is_best);
  const use = el("button.fp-link", { type: "button", onclick: () => apply(best) }, "Use it");
  return [el("span", {}, "Recommended: ", el("b", {}, best.name), `. ${best.reason} `), isLine ? "" : use];
}
