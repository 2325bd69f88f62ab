// @ts-check
// Every parallel strategy for the current values: requested when the table is opened, sorted and applied by a click.
import { post } from "./api.js";
import { address, el } from "./dom.js";
import { currentValues, setValues } from "./form.js";
import { bytes } from "./format.js";

const traffic = (s) => s.sent_bytes + s.host_traffic_bytes;
/** @type {{ key: string, title: string, sort: (s: any) => any, text: (s: any) => string }[]} */
const COLUMNS = [
  { key: "name", title: "Strategy", sort: (s) => s.name, text: (s) => s.name },
  { key: "device", title: "Device memory", sort: (s) => s.device_bytes, text: (s) => bytes(s.device_bytes) },
  { key: "host", title: "Host memory", sort: (s) => s.host_bytes, text: (s) => bytes(s.host_bytes) },
  { key: "traffic", title: "Traffic per step", sort: traffic, text: (s) => bytes(traffic(s)) },
];

let sortedBy = "";
let response = null;
let generation = 0;

// One element for good, so that it stays open while the card around it is drawn again.
const content = el("div");
const box = el(
  "details.fp-compare",
  { ontoggle: () => box.open && update() },
  el("summary", {}, "Compare strategies"),
  content,
);

/** The table's element. Every new check updates it while it is open. */
export function comparison() {
  if (box.open) update();
  return box;
}

async function update() {
  const mine = ++generation;
  try {
    const body = { values: currentValues(), machine: address.get("machine") || "" };
    const found = await post("api/compare", body);
    if (mine !== generation) return;
    response = found;
    draw();
  } catch (error) {
    if (mine === generation) content.replaceChildren(el("p.fp-dim", {}, error.message));
  }
}

function draw() {
  const column = COLUMNS.find(({ key }) => key === sortedBy);
  const rows = [...response.strategies];
  if (column) rows.sort((a, b) => (column.sort(a) > column.sort(b) ? 1 : -1));
  const none = el("p.fp-dim", {}, "No strategy can run these options on this machine. The findings say why.");
  content.replaceChildren(
    response.best ? recommendation(response.best) : none,
    el(
      "table.fp-rows",
      {},
      el("thead", {}, el("tr", {}, COLUMNS.map(heading))),
      el("tbody", {}, ...rows.map(strategyRow)),
    ),
  );
}

function heading({ key, title }, i) {
  const sort = () => {
    sortedBy = key;
    draw();
  };
  const attributes = { class: i ? "fp-n" : null, "aria-sort": sortedBy === key ? "ascending" : null };
  return el("th", attributes, el("button.fp-link", { type: "button", onclick: sort }, title));
}

const apply = (s) => setValues(s.patch, { undo: `Applied: ${s.name}.` });

function recommendation(s) {
  const use = s.is_current ? null : el("button.fp-link", { type: "button", onclick: () => apply(s) }, "Use it");
  return el(
    "p.fp-best",
    {},
    "Recommended: ",
    el("b", {}, s.name),
    s.is_current ? " (current)" : "",
    ". ",
    s.reason,
    " ",
    use,
  );
}

function strategyRow(s) {
  const problem = s.error || (s.fits ? "" : "Does not fit into memory");
  const name = s.is_current
    ? el("b", {}, s.name)
    : el("button.fp-link", { type: "button", onclick: () => apply(s) }, s.name);
  return el(
    "tr",
    { "data-runs": String(s.runs) },
    el("td", {}, name, problem && el("div.fp-dim", {}, problem)),
    ...COLUMNS.slice(1).map(({ text }) => el("td.fp-n", {}, text(s))),
  );
}
