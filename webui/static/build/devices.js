// @ts-check
// The devices of a machine as chips: a row for each node, a click selects a device or a node.
import { $, el } from "../dom.js";
import { bytes, capitalized, countedMore } from "../format.js";
import { currentValues, setValues } from "./form.js";

const MAX_NODES = 4; // rows; the field for the number of nodes allows more

/** A click changes the selection at once, since the next click may come before the next report.
 * @param {any} devices of the check report */
export function drawDevices(devices) {
  const box = $("#fp-devices");
  const { nodes, gpus } = devices;
  box.hidden = !gpus.length;
  $("#launch-devices").classList.toggle("fp-needed", box.hidden && Boolean(currentValues()["launch.devices"]));
  const focused = box.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  const rows = Array.from({ length: Math.min(nodes, MAX_NODES) }, (_, node) => nodeRow(devices, node));
  const hidden = nodes - MAX_NODES;
  const more = hidden > 0 ? `and ${countedMore(hidden, "node", "nodes")} like these` : "";
  const note = [more, topology(gpus)].filter(Boolean).join("; ");
  box.replaceChildren(
    el("p.fp-devices-title", { id: "fp-devices-title" }, title(devices)),
    ...rows,
    ...[note && `${capitalized(note)}.`, ...gpus.map((gpu) => usersText(gpu, devices.noun))]
      .filter(Boolean)
      .map((text) => el("p.fp-dim", {}, text)),
  );
  if (focused) [...box.querySelectorAll("button")].find((b) => b.getAttribute("aria-label") === focused)?.focus();
}

function title({ gpus, noun, plural }) {
  const names = [...new Set(gpus.map((gpu) => gpu.name))];
  const nouns = gpus.length === 1 ? noun : plural;
  return names.length === 1 ? `${nouns}: ${names[0]}` : nouns;
}

function nodeRow(devices, node) {
  const { nodes, gpus, selected_nodes: used } = devices;
  const chips = gpus.map((gpu) => chip(devices, gpu, node));
  const isUsed = node < used;
  const choose = () => setValues(nodesPatch(devices, node < devices.selected_nodes ? Math.max(1, node) : node + 1));
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
    { role: "group", "aria-label": nodes > 1 ? label : devices.plural },
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

/** Which processes use a device: python (4711). */
const usersText = ({ id, processes }, noun) =>
  processes.length ? `${noun} ${id} is used by ${processes.join(", ")}.` : "";

function chip(devices, gpu, node) {
  const { selected, selected_nodes: used, nodes, gpus, noun } = devices;
  const isUsed = node < used && selected.includes(gpu.id);
  const busy = gpu.processes.length > 0;
  const inUse = gpu.total_bytes - gpu.free_bytes;
  const memory =
    busy || inUse > 0.1 * gpu.total_bytes
      ? `${bytes(gpu.free_bytes)} free, ${bytes(inUse)} used`
      : bytes(gpu.total_bytes);
  const name = new Set(gpus.map((one) => one.name)).size > 1 ? ` ${gpu.name}` : "";
  const users = busy ? `, used by ${gpu.processes.join(", ")}` : "";
  const where = nodes > 1 ? ` of node ${node}` : "";
  const free = `${bytes(gpu.free_bytes)} of ${bytes(gpu.total_bytes)} free`;
  const label = `${noun} ${gpu.id}${where}: ${gpu.name}, ${free}${users}`;
  const toggle = () => setValues(devicesPatch(devices, gpu.id, node));
  return el(
    "button.fp-gpu",
    { ...chipState(isUsed, label, toggle), title: label, "data-busy": busy },
    el("b", {}, `${noun} ${gpu.id}${name}`),
    el("span", {}, memory),
  );
}

/** The options after a click on a device: the first devices have no ids, and several need a strategy. */
function devicesPatch(devices, id, node) {
  const { gpus, selected, selected_nodes: used, place } = devices;
  if (node >= used) return nodesPatch(devices, node + 1);
  const ids = gpus.map((gpu) => gpu.id);
  const wanted = ids.filter((one) => selected.includes(one) !== (one === id));
  if (!wanted.length) return {};
  devices.selected = wanted;
  const areFirst = wanted.every((one, i) => one === ids[i]);
  return {
    "launch.devices": areFirst || place !== "local" ? "" : wanted.join(", "),
    "launch.nproc_per_node": wanted.length,
    ...strategyFor(wanted.length * used),
  };
}

function nodesPatch(devices, count) {
  const each = Math.max(1, devices.selected.length);
  const patch = { "launch.nnodes": count, "launch.nproc_per_node": each, ...strategyFor(each * count) };
  const replicas = Number(currentValues()["parallel.replicate_size"]);
  if (replicas > 1 && replicas === devices.selected_nodes) patch["parallel.replicate_size"] = count;
  devices.selected_nodes = count;
  if (devices.place !== "local") return patch;
  const isStandalone = currentValues()["launch.rendezvous"] === "standalone"; // an elastic run stays elastic
  if (count === 1) return { ...patch, "launch.rendezvous": "standalone" };
  return isStandalone ? { ...patch, "launch.rendezvous": "static" } : patch;
}

/** One device needs no strategy; several do. */
function strategyFor(count) {
  if (count === 1) return { "parallel.strategy": "single" };
  return currentValues()["parallel.strategy"] === "single" ? { "parallel.strategy": "ddp" } : {};
}

/** How NVLink connects the devices of a node; '' if that is not known. */
function topology(gpus) {
  if (gpus.length < 2 || gpus.some((gpu) => gpu.nvlink_peers === null)) return "";
  if (gpus.every((gpu) => gpu.nvlink_peers.length >= gpus.length - 1)) return "NVLink connects all GPUs of a node";
  const pairs = gpus.flatMap((gpu) => gpu.nvlink_peers.filter((id) => id > gpu.id).map((id) => `${gpu.id}\u2013${id}`));
  return pairs.length ? `NVLink connects GPUs ${pairs.join(", ")}` : "no NVLink between the GPUs";
}
