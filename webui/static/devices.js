// @ts-check
// The devices of a machine as chips: a row for each node, a click selects a device or a node.
import { $, el } from "./dom.js";
import { setValues } from "./form.js";
import { bytes } from "./format.js";

const MAX_NODES = 4; // rows; the field for the number of nodes selects more

/** @param {any} devices of the check report @param {string} strategy */
export function drawDevices(devices, strategy) {
  const box = $("#fp-devices");
  const { nodes, gpus } = devices;
  box.hidden = !gpus.length;
  const focused = box.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  const rows = Array.from({ length: Math.min(nodes, MAX_NODES) }, (_, node) => nodeRow(devices, node, strategy));
  const hidden = nodes - MAX_NODES;
  const more = hidden > 0 ? `and ${hidden} more ${hidden === 1 ? "node" : "nodes"} like these` : "";
  const note = [more, topology(gpus)].filter(Boolean).join("; ");
  box.replaceChildren(
    el("p.fp-devices-title", { id: "fp-devices-title" }, title(devices)),
    ...rows,
    note ? el("p.fp-dim", {}, capitalized(note)) : "",
  );
  if (focused) [...box.querySelectorAll("button")].find((b) => b.getAttribute("aria-label") === focused)?.focus();
}

const capitalized = (text) => `${text.slice(0, 1).toUpperCase()}${text.slice(1)}.`;

function title({ gpus, noun, plural }) {
  const names = [...new Set(gpus.map((gpu) => gpu.name))];
  const nouns = gpus.length === 1 ? noun : plural;
  return names.length === 1 ? `${nouns}: ${names[0]}` : nouns;
}

function nodeRow(devices, node, strategy) {
  const { nodes, gpus, selected_nodes: used } = devices;
  const chips = gpus.map((gpu) => chip(devices, gpu, node, strategy));
  const isUsed = node < used;
  const choose = () => setValues(nodesPatch(isUsed ? Math.max(1, node) : node + 1, devices.place));
  const label = `Node ${node}`;
  const button =
    nodes > 1 &&
    el(
      "button.fp-gpu.fp-node",
      chipState(isUsed, label, choose),
      el("b", {}, label),
      el("span", {}, isUsed ? "in use" : "not used"),
    );
  return el(
    "div.fp-node-row",
    { role: "group", "aria-label": nodes > 1 ? label : "GPUs" },
    button,
    el("div.fp-gpus", {}, chips),
  );
}

const chipState = (pressed, label, onclick) => ({
  type: "button",
  "aria-pressed": String(pressed),
  "aria-label": label,
  onclick,
});

function chip(devices, gpu, node, strategy) {
  const { selected, selected_nodes: used, nodes, gpus } = devices;
  const isUsed = node < used && selected.includes(gpu.id);
  const busy = gpu.processes.length > 0;
  const memory =
    busy || gpu.free_bytes < 0.9 * gpu.total_bytes ? `${bytes(gpu.free_bytes)} free` : bytes(gpu.total_bytes);
  const name = new Set(gpus.map((one) => one.name)).size > 1 ? ` ${gpu.name}` : "";
  const users = busy ? `, used by ${gpu.processes.join(", ")}` : "";
  const where = nodes > 1 ? ` of node ${node}` : "";
  const free = `${bytes(gpu.free_bytes)} of ${bytes(gpu.total_bytes)} free`;
  const label = `GPU ${gpu.id}${where}: ${gpu.name}, ${free}${users}`;
  const toggle = () => setValues(devicesPatch(devices, gpu.id, node, strategy));
  return el(
    "button.fp-gpu",
    { ...chipState(isUsed, label, toggle), title: label, "data-busy": busy },
    el("b", {}, `GPU ${gpu.id}${name}`),
    el("span", {}, busy ? `${memory}, ${gpu.processes.length} running` : memory),
  );
}

/** The options after a click on a device: the first devices have no ids, and several need a strategy. */
function devicesPatch({ gpus, selected, selected_nodes: used, place }, id, node, strategy) {
  if (node >= used) return nodesPatch(node + 1, place);
  const ids = gpus.map((gpu) => gpu.id);
  const wanted = ids.filter((one) => selected.includes(one) !== (one === id));
  if (!wanted.length) return {};
  const areFirst = wanted.every((one, i) => one === ids[i]);
  /** @type {Record<string, any>} */
  const patch = { "launch.devices": areFirst || place !== "local" ? "" : wanted.join(", ") };
  patch["launch.nproc_per_node"] = wanted.length;
  if (wanted.length > 1 && strategy === "single") patch["parallel.strategy"] = "ddp";
  if (wanted.length === 1 && used === 1) patch["parallel.strategy"] = "single";
  return patch;
}

function nodesPatch(count, place) {
  /** @type {Record<string, any>} */
  const patch = { "launch.nnodes": count };
  if (place === "local") patch["launch.rendezvous"] = count > 1 ? "static" : "standalone";
  return patch;
}

/** How NVLink connects the devices of a node; '' if that is not known. */
function topology(gpus) {
  if (gpus.length < 2 || gpus.some((gpu) => gpu.nvlink_peers === null)) return "";
  if (gpus.every((gpu) => gpu.nvlink_peers.length >= gpus.length - 1)) return "NVLink connects all GPUs of a node";
  const pairs = gpus.flatMap((gpu) => gpu.nvlink_peers.filter((id) => id > gpu.id).map((id) => `${gpu.id}\u2013${id}`));
  return pairs.length ? `NVLink connects GPUs ${pairs.join(", ")}` : "no NVLink between the GPUs";
}
