// @ts-check
// A run's row in the list of runs.
import { el, setText } from "../dom.js";
import { drawBadge, hasEnded, progressOf } from "../run_state.js";
import { tagList } from "./runs_actions.js";
import { isDim, textOf } from "./runs_columns.js";
import { baseName } from "./runs_sweeps.js";

/** @typedef {import("./runs_search.js").Column} Column */
/** @typedef {import("./runs_search.js").Run} Run */

const [STAR, STARRED] = ["\u2606", "\u2605"];

/** A check box that selects a run, or all of them. @param {Record<string, any>} attributes */
export const selectBox = (attributes) => el("input.fp-checkbox.fp-runs-select", { type: "checkbox", ...attributes });

/** @param {Column[]} columns @param {Set<string>} selected */
export function createRow(id, columns, selected, handlers) {
  let shown = /** @type {Run} */ ({ id, state: "" });
  let day = ""; // on which the row was drawn: times are relative to it
  const [varied, base] = [el("span"), el("span.fp-runs-base")];
  const link = el("a.fp-runs-link", { href: `?tab=run&run=${encodeURIComponent(id)}` }, varied, base);
  const box = selectBox({ onchange: () => handlers.select(shown, box.checked) });
  const star = el("button.fp-runs-star", { type: "button", onclick: () => handlers.star(shown) });
  const menu = el("button.fp-icon", { type: "button", "aria-haspopup": "menu" }, "\u22ef");
  menu.addEventListener("click", () => handlers.menu(shown, menu));
  const warning = el("span.fp-runs-warning", { hidden: true });
  let tags = tagList([]);
  const name = el("td", { "data-column": "name" }, el("div.fp-runs-name", {}, box, star, link, warning, tags));
  const cells = columns.map((column) => createCell(column));
  const actions = el("td.fp-row-actions", {}, menu);
  const node = el(
    "tr",
    {},
    name,
    cells.map((cell) => cell.node),
    actions,
  );
  node.addEventListener("click", (event) => {
    if (event.target.closest("a, button, input") || String(getSelection())) return;
    link.dispatchEvent(new MouseEvent("click", event));
  });
  const showsTags = !columns.some(({ key }) => key === "tags");

  /** @param {Run} run */
  function draw(run) {
    const today = new Date().toDateString();
    if (run === shown && hasEnded(run.state) && day === today) return;
    [shown, day] = [run, today];
    // The differing part comes first, since the names in a sweep begin with the same words and are cut at the end.
    setText(varied, withShortKeys(run.varied) || run.name || id);
    setText(base, run.varied ? ` \u00b7 ${baseName(run)}` : "");
    link.title = [run.varied ? run.name : "", run.sentence].filter(Boolean).join("\n");
    warning.hidden = !run.mark;
    setText(warning, run.mark || "");
    warning.title = run.warning || "";
    box.setAttribute("aria-label", `Select ${run.name || id}`);
    menu.setAttribute("aria-label", `Actions for ${run.name || id}`);
    node.dataset.state = run.state;
    setText(star, run.starred ? STARRED : STAR);
    star.setAttribute("aria-pressed", String(Boolean(run.starred)));
    star.setAttribute("aria-label", `Star ${run.name || id}`);
    const shownTags = tagList((showsTags && run.tags) || []);
    if (tags.textContent !== shownTags.textContent) {
      tags.replaceWith(shownTags);
      tags = shownTags;
    }
    for (const cell of cells) cell.draw(run);
  }

  function drawSelection() {
    box.checked = selected.has(id);
    node.toggleAttribute("data-selected", box.checked);
  }
  drawSelection();
  return { node, draw, drawSelection };
}

/** @param {Column} column */
/** Keys of options keep their first letters, so that each value stays in sight; the tooltip has the whole name. */
const withShortKeys = (varied = "") => varied.replace(/(\w{12})\w{3,}=/g, "$1\u2026=");

function createCell(column) {
  const kind = column.kind === "number" ? "number" : undefined;
  const node = el("td", { "data-column": column.key, "data-kind": kind, "data-name": column.label });
  if (isDim(column)) node.classList.add("fp-dim");
  if (column.key === "state") {
    const badge = el("span.fp-badge");
    node.append(badge);
    return { node, draw: (run) => badge.dataset.state !== run.state && drawBadge(badge, run.state) };
  }
  const text = el("span");
  const bar = el("span");
  if (column.key === "step") node.append(el("div.fp-mini", { "aria-hidden": "true" }, bar));
  node.append(text);
  const draw = (run) => {
    setText(text, textOf(run, column));
    if (column.key === "step") bar.style.width = `${100 * (progressOf(run) || 0)}%`;
    if (["notes", "failure", "model", "dataset", "tags"].includes(column.key)) node.title = text.textContent;
    if (column.kind === "time") node.title = time(run[column.key] || run.created);
  };
  return { node, draw };
}

const time = (seconds) => (Number.isFinite(seconds) ? new Date(1000 * seconds).toLocaleString() : "");
