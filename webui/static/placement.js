// @ts-check
// The placement picture: a column for each device of each node, filled with what the device holds; pointing at a column
// shows what the device shares, and with which others.
import { el, setText, svg } from "./dom.js";
import { bytes, capitalized, countedMore } from "./format.js";

const WIDTH = 440;
const NODE_WIDTH = 52; // the label before the columns
const GAP = 6;
const CHARACTER = 7; // width of a character, with room between two names
const MAX_COLUMN = 64;
const MAX_NODES = 4;
const MAX_DEVICES = 16; // devices of a node that are drawn
const HEIGHTS = [104, 72, 52, 44]; // px: height of the columns with one to four nodes

/**
 * @param {any} memory the estimate, with its placement
 * @param {{ measured?: (number | null)[] }} options measured: bytes by rank
 */
export function placementPicture(memory, { measured = [] } = {}) {
  const { placement } = memory;
  const caption = el("p.fp-placement-caption", { "aria-live": "off" });
  const columns = [];
  const frame = { memory, placement, measured, columns };
  const picture = drawColumns(frame);
  const highlight = (rank) => {
    for (const column of columns) {
      column.node.dataset.group = rank === null ? "" : roleOf(placement, rank, column.rank);
    }
    setLines(caption, rank === null ? overview(frame) : describe(frame, rank));
  };
  addPointing(picture, columns, highlight);
  highlight(null);
  return el("figure.fp-placement", {}, picture, legend(placement.kinds, measured), caption);
}

function setLines(node, texts) {
  node.replaceChildren(...texts.map((text) => el("span", {}, text)));
}

function addPointing(picture, columns, highlight) {
  for (const { node, rank } of columns) {
    node.addEventListener("pointerenter", () => highlight(rank));
    node.addEventListener("focus", () => highlight(rank));
  }
  picture.addEventListener("pointerleave", () => highlight(null));
  picture.addEventListener("focusout", () => highlight(null));
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = columns.findIndex(({ node }) => node === document.activeElement);
    columns[(at + step + columns.length) % columns.length].node.focus();
  });
}

// -- columns ----------------------------------------------------------------------------------------------------------

function drawColumns(frame) {
  const { placement, memory } = frame;
  const nodes = Math.min(placement.nodes, MAX_NODES);
  const perNode = Math.min(placement.per_node, MAX_DEVICES);
  const left = placement.nodes > 1 ? NODE_WIDTH : 0;
  const width = Math.min(MAX_COLUMN, (WIDTH - left) / perNode - GAP);
  const height = HEIGHTS[nodes - 1];
  const rowHeight = height + 20;
  const hidden = placement.nodes > nodes || placement.per_node > perNode;
  const total = nodes * rowHeight + (hidden ? 18 : 0);
  const all = left + perNode * (width + GAP);
  const role = { role: "group", "aria-label": summary(memory, placement) };
  const picture = svg("svg", { viewBox: `0 0 ${all} ${total}`, width: all, height: total, ...role });
  for (let node = 0; node < nodes; node++) {
    const top = node * rowHeight + 2;
    if (left) picture.append(svg("text", { x: 0, y: top + height / 2 + 4 }, `Node ${node}`));
    for (let i = 0; i < perNode; i++) {
      const box = { x: left + i * (width + GAP) + 1, y: top, width, height };
      picture.append(drawColumn(frame, node * placement.per_node + i, placement.ids[i] ?? i, box));
    }
  }
  if (hidden) picture.append(svg("text", { x: left, y: total - 4 }, hiddenText(placement, nodes, perNode)));
  return picture;
}

/** What does not fit in the picture: nodes, devices of each node, or both. */
function hiddenText(placement, nodes, perNode) {
  const { nodes: all, per_node: each } = placement;
  const moreNodes = all > nodes ? `${countedMore(all - nodes, "node", "nodes")} like these` : "";
  const devices = each > perNode ? countedMore(each - perNode, placement.noun, placement.plural) : "";
  const moreDevices = devices && (all > 1 ? `${devices} on each node` : devices);
  return `and ${[moreDevices, moreNodes].filter(Boolean).join(", and ")}`;
}

const scaleOf = ({ capacity_bytes: capacity, high_bytes: high, device_bytes: peak }, measured) =>
  Math.max(capacity || 0, capacity ? peak : high, ...measured.map((m) => m || 0)) || 1;

function drawColumn(frame, rank, id, { x, y, width, height }) {
  const { memory, placement, measured, columns } = frame;
  const scale = scaleOf(memory, measured);
  const size = (amount) => (height * amount) / scale;
  const isOver = memory.capacity_bytes && memory.device_bytes > memory.capacity_bytes;
  const first = columns.length === 0;
  const longName = `${capitalized(placement.noun)} ${id}`;
  const name = longName.length * CHARACTER <= width + GAP ? longName : String(id);
  const label = `${deviceName(placement, rank)}: ${used(memory)}`;
  const node = svg("g", { class: "fp-column", tabindex: first ? 0 : -1, role: "img", "aria-label": label });
  node.append(svg("rect", { class: "fp-column-box", x, y, width, height, rx: 3 }));
  let top = y + height;
  for (const { kind, bytes: amount } of placement.kinds) {
    top -= size(amount);
    node.append(svg("rect", { "data-kind": kind, x, y: top, width, height: size(amount) }));
  }
  if (isOver) node.append(line("fp-column-limit", x, y + height - size(memory.capacity_bytes), width));
  if (measured[rank]) node.append(line("fp-column-measured", x, y + height - size(measured[rank]), width));
  node.append(svg("rect", { class: "fp-column-frame", x, y, width, height, rx: 3 }));
  node.append(svg("text", { x: x + width / 2, y: y + height + 14, "text-anchor": "middle" }, name));
  columns.push({ node, rank });
  return node;
}

const line = (name, x, y, width) => svg("line", { class: name, x1: x - 2, x2: x + width + 2, y1: y, y2: y });

/** What the colors mean, with the bytes of each kind. */
function legend(kinds, measured) {
  const item = ({ kind, label, bytes: amount }) =>
    el("li", {}, el("i", { "data-kind": kind }), el("span", {}, label), el("b", {}, bytes(amount)));
  const peaks = measured.filter(Boolean);
  const name = peaks.length > 1 ? "Highest measured peak" : "Measured peak";
  const highest = el("b", {}, bytes(Math.max(...peaks)));
  const mark = peaks.length > 0 && el("li", {}, el("i.fp-kinds-measured"), el("span", {}, name), highest);
  return el("ul.fp-kinds", {}, [...kinds].reverse().map(item), mark);
}

// -- groups -----------------------------------------------------------------------------------------------------------

/** The ranks of the group that `rank` is in. */
export function groupOf({ size, stride }, rank) {
  const first = Math.floor(rank / (size * stride)) * size * stride + (rank % stride);
  return Array.from({ length: size }, (_, i) => first + i * stride);
}

/** What `other` is to `rank`: itself, or the name of the innermost group that both are in. */
function roleOf({ groups }, rank, other) {
  if (rank === other) return "self";
  return groups.find((group) => groupOf(group, rank).includes(other))?.name || "none";
}

function deviceName(placement, rank) {
  const i = rank % placement.per_node;
  const name = `${capitalized(placement.noun)} ${placement.ids[i] ?? i}`;
  return placement.nodes > 1 ? `${name} of node ${Math.floor(rank / placement.per_node)}` : name;
}

const sentText = (amount) => (amount === null ? "" : `, and sends ${bytes(amount)} per step`);

/** 0 to 7, or 3 and 11. */
function rankList(ranks) {
  const consecutive = ranks.every((rank, i) => rank === ranks[0] + i);
  if (ranks.length > 2 && consecutive) return `${ranks[0]} to ${ranks[ranks.length - 1]}`;
  if (ranks.length > 6) return `${ranks.slice(0, 3).join(", ")} \u2026 ${ranks[ranks.length - 1]}`;
  return `${ranks.slice(0, -1).join(", ")} and ${ranks[ranks.length - 1]}`;
}

function describe({ placement, measured }, rank) {
  const seen = measured[rank] ? `, measured ${bytes(measured[rank])}` : "";
  const title = `${deviceName(placement, rank)} is rank ${rank}${seen}.`;
  const shared = placement.groups.map(
    (group) => `With ranks ${rankList(groupOf(group, rank))} it ${group.text}${sentText(group.bytes)}.`,
  );
  return [title, ...shared, ...hostLines(placement)];
}

/** What offload costs: the same line for one device and for all, so that nothing moves. */
function hostLines({ host_bytes: amount, noun }) {
  return amount ? [`Each ${noun} exchanges ${bytes(amount)} with host RAM per step.`] : [];
}

/** The groups of all devices, while the pointer is at none: as many lines as for one, so that nothing moves. */
function overview({ placement }) {
  const { groups, noun } = placement;
  if (!groups.length) {
    const alone = placement.nodes * placement.per_node === 1;
    return [alone ? `One ${noun}; nothing is sent to others.` : "", ...hostLines(placement)];
  }
  const each = (group) => `In groups of ${group.size}, each ${noun} ${group.text}${sentText(group.bytes)}.`;
  return ["Point at a column to see its groups.", ...groups.map(each), ...hostLines(placement)];
}

function summary(memory, { nodes, per_node: perNode, noun, plural }) {
  const count = nodes * perNode;
  return count === 1 ? `Memory of one ${noun}: ${used(memory)}` : `Memory of ${count} ${plural}: ${used(memory)} each`;
}

/** The peak; with the capacity, if that is known. */
export function used({ device_bytes: peak, capacity_bytes: capacity }) {
  return capacity ? `${bytes(peak)} of ${bytes(capacity)}` : bytes(peak);
}

// -- peak over time ---------------------------------------------------------------------------------------------------

/** The memory of each phase of a run as bars, and when the peak is. */
export function phases({ moments, placement }) {
  if (!moments || moments.length < 2) return null;
  const most = Math.max(...moments.map((moment) => moment.bytes));
  const peak = moments.find((moment) => moment.bytes === most);
  const bar = (moment) => {
    const fill = el("i");
    fill.style.height = `${Math.max(4, (100 * moment.bytes) / most)}%`;
    return el(
      "li",
      { "data-peak": moment === peak },
      el("span.fp-phase-bar", { "aria-hidden": "true" }, fill),
      el("span", {}, moment.phase),
      el("b", {}, bytes(moment.bytes)),
    );
  };
  const why =
    peak.phase === "Loading"
      ? ` Every ${placement.noun} reads the whole quantized base model before it is sharded or offloaded.`
      : "";
  const text = el("p.fp-dim");
  setText(text, `Memory is highest ${peak.at}.${why}`);
  return el("div.fp-phases", {}, el("ol", {}, moments.map(bar)), text);
}
