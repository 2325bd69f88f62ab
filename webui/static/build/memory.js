// @ts-check
// The memory card: the estimate as a picture, its range, its phases and parts, and the changes that reduce it.
import { post } from "../api.js";
import { $, el, emit, notifyError, redraw } from "../dom.js";
import { applyFix, fixNote } from "../fixes.js";
import { bytes } from "../format.js";
import { phases, placementPicture, used } from "../placement.js";

// What the figures for a GPU mean.
const ALLOCATED =
  "The estimate is what PyTorch's allocator allocates, plus the device context; nvidia-smi also shows memory that " +
  "the allocator reserves, and typically reports more.";
const PLACES = { device: "Per device", host: "Host memory", disk: "Disk" };

/** @param {any} memory the estimate @param {any} finding the finding of a memory rule, if there is one
 * @param {boolean} isProvisional the examples are still being read, so their lengths are not known yet */
export function drawMemory(memory, finding, isProvisional) {
  const box = $("#fp-memory");
  box.hidden = !memory;
  if (!memory) return;
  const lowerBound = memory.lower_bound;
  const unknown = lowerBound ? "" : memory.unknown;
  const detailsOpen = $("details", box)?.open;
  const level = levelOf(memory);
  const atLeast = lowerBound ? "At least " : "";
  const text = unknown ? "Unknown" : `${atLeast}${used(memory)}`;
  const children = [
    el(
      "div.fp-card-head",
      {},
      el("h3", {}, memory.device_label ? `Memory, ${memory.device_label}` : "Memory"),
      el("span.fp-gap"),
      el("span.fp-figure", { "data-level": level }, text),
    ),
    memory.assumed ? el("p.fp-dim", {}, memory.assumed) : null,
    unknown ? el("p.fp-dim", {}, `Memory use cannot be estimated: ${unknown}`) : null,
    lowerBound ? el("p.fp-dim", {}, `This is a lower bound: ${memory.unknown}`) : null,
    memory.download ? downloadButton(memory.download) : null,
  ];
  if (!unknown) {
    children.push(
      placementPicture(memory),
      lowerBound ? null : range(memory, isProvisional),
      phases(memory),
      memory.measured ? earlierRun(memory.measured) : null,
      finding && finding.fixes.length ? reductions(finding) : null,
      el("details", { open: detailsOpen }, el("summary", {}, "Breakdown"), breakdown(memory.rows)),
    );
  }
  redraw(box, ...children.filter(Boolean));
}

const levelOf = ({ fit }) => ({ no: "error", unlikely: "warning", uncertain: "warning" })[fit] || "ok";

function range({ low_bytes: low, high_bytes: high, placement }, isProvisional) {
  const notes = [isProvisional ? " The range may change: the examples are still being read." : ""];
  if (placement.noun === "GPU") notes.push(` ${ALLOCATED}`);
  return el("p.fp-dim.fp-range", {}, `Estimated range: ${bytes(low)} to ${bytes(high)}.${notes.join("")}`);
}

/** What the newest comparable run measured, and the peak if this estimate is off by the same factor. */
function earlierRun({ run, ratio, at_least: atLeast, corrected_bytes: corrected }) {
  const title = `${run}: the last run with this model, method, quantization and strategy`;
  const link = el("a", { href: `?tab=run&run=${encodeURIComponent(run)}`, title }, "last similar run");
  const factor = `${atLeast ? "needed at least" : "used"} ${ratio.toFixed(2)} times the estimated memory`;
  const text = ` ${factor}. Scaled by ${ratio.toFixed(2)}, this run's estimate is ${bytes(corrected)}.`;
  return el("p.fp-dim", {}, "The ", link, text);
}

/** Every fix of a memory finding, with the peak that it leads to. */
function reductions({ level, fixes }) {
  const row = (fix) => {
    const button = el("button.fp-link", { type: "button", onclick: () => applyFix(fix) }, fix.label);
    return el("tr", {}, el("td", {}, button, el("div", {}, fixNote(fix))), el("td.fp-n", {}, bytes(fix.peak)));
  };
  const title =
    level === "error" ? "Changes that make the run fit, with the new estimate" : "Changes that leave more free memory";
  return el("table.fp-rows.fp-reductions", {}, el("caption", {}, title), el("tbody", {}, ...fixes.map(row)));
}

function breakdown(rows) {
  const group = ([place, title]) => {
    const some = rows.filter((r) => r.where === place && r.bytes > 0);
    const row = (r) =>
      el("tr", {}, el("td", {}, r.name), el("td.fp-n", {}, bytes(r.bytes)), el("td.fp-dim", {}, r.formula));
    return some.length ? [el("tr", {}, el("th", { colspan: 3 }, title)), ...some.map(row)] : [];
  };
  return el("table.fp-rows", {}, el("tbody", {}, ...Object.entries(PLACES).flatMap(group)));
}

function downloadButton(model) {
  const button = el(
    "button.fp-link",
    { type: "button", onclick: start },
    "Download the model's config.json from the Hub",
  );
  async function start() {
    button.disabled = true;
    button.textContent = "Downloading config.json";
    await post("api/config", model).catch((error) => {
      notifyError(error);
      if (error.data?.refused) emit("hub-refused");
    });
    emit("edited");
  }
  return button;
}
