// @ts-check
// The table of the list of runs. Only the rows in sight are in the document, so that thousands of runs scroll.
import { el, setText } from "./dom.js";
import { isDim, textOf, widthsOf } from "./runs_columns.js";
import { tagList } from "./runs_actions.js";
import { drawBadge, hasEnded, progressOf } from "./run_state.js";
import { baseName, createHeading, isHeading } from "./runs_sweeps.js";

/** @typedef {import("./runs_search.js").Column} Column */
/** @typedef {import("./runs_search.js").Run} Run */
/** @typedef {import("./runs_sweeps.js").Heading} Heading */

const AROUND = 15; // rows that are drawn above and below those in sight
const [STAR, STARRED] = ["\u2606", "\u2605"];
const NAME = /** @type {Column} */ ({ key: "name", label: "Name", kind: "text" });

/**
 * `selected` has the ids of the selected runs. The handlers get a run: `star`, `menu` (and the button), `select`
 * (and whether); `selectAll` gets whether, `sort` the key of a column, `fold` the id of a sweep.
 * @param {Set<string>} selected
 * @param {Record<string, (...values: any[]) => void>} handlers
 */
export function createTable(selected, handlers) {
  const [widths, header, body] = [el("colgroup"), el("tr"), el("tbody")];
  const node = el("table.fp-runs-table", {}, widths, el("thead", {}, header), body);
  const [above, below] = [createSpace(), createSpace()];
  const all = el("input.fp-runs-select", { type: "checkbox", "aria-label": "Select all runs" });
  all.addEventListener("change", () => handlers.selectAll(all.checked));
  const rows = new Map(); // id -> row in the document; it stays the same node, so that it keeps the focus
  let runs = /** @type {Run[]} */ ([]); // that can be selected; those of a folded sweep have no row
  let items = /** @type {(Run | Heading)[]} */ ([]);
  let grouped = /** @type {Set<string>} */ (new Set()); // ids of the runs that have a heading
  let columns = /** @type {Column[]} */ ([]);
  let drawnHead = "";
  let rowHeight = 45; // px; all rows have the same height
  let outdated = false; // the rows have other columns
  let frame = 0;

  /**
   * @param {Run[]} found @param {(Run | Heading)[]} rowsShown @param {Column[]} shown
   * @param {{ sort: string, descending: boolean }} order
   */
  function draw(found, rowsShown, shown, order) {
    runs = found;
    items = rowsShown;
    grouped = new Set(items.flatMap((item) => (isHeading(item) ? item.runs.map(({ id }) => id) : [])));
    const head = JSON.stringify([shown.map(({ key }) => key), order.sort, order.descending, widthsOf(shown)]);
    if (head !== drawnHead) {
      drawnHead = head;
      columns = shown;
      drawHead(order);
      outdated = true;
    }
    node.setAttribute("aria-rowcount", String(items.length + 1));
    drawRows();
    drawSelection();
  }

  function drawHead({ sort, descending }) {
    const { each, least } = widthsOf(columns);
    node.style.minWidth = `${least}px`;
    widths.replaceChildren(...each.map((width) => el("col", width ? { style: `width: ${width}px` } : {})));
    const heading = (column) => {
      const isSorted = column.key === sort;
      const direction = isSorted ? (descending ? "descending" : "ascending") : undefined;
      const kind = column.kind === "number" ? "number" : undefined;
      const title = `Sort by ${column.label.toLowerCase()}`;
      const button = el("button", { type: "button", title });
      button.append(
        column.label,
        el("span", { "aria-hidden": "true" }, isSorted ? (descending ? "\u2193" : "\u2191") : ""),
      );
      // The whole cell can be clicked, but for the check box that selects all runs.
      const onclick = ({ target }) => target !== all && handlers.sort(column.key);
      const properties = {
        scope: "col",
        "aria-sort": direction,
        "data-column": column.key,
        "data-kind": kind,
        onclick,
      };
      return el("th", properties, button);
    };
    const name = heading(NAME);
    name.append(el("div.fp-runs-name", {}, all, el("span.fp-runs-star"), name.firstChild));
    header.replaceChildren(name, ...columns.map(heading), el("th", {}, el("span.fp-sr", {}, "Actions")));
  }

  /** Draw the rows in sight. */
  function drawRows() {
    cancelAnimationFrame(frame);
    const top = body.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(-top / rowHeight) - AROUND);
    const end = Math.min(items.length, Math.ceil((innerHeight - top) / rowHeight) + AROUND);
    const inSight = items.slice(Math.min(first, end), end);
    const ids = new Set(inSight.map(({ id }) => id));
    // Nothing may ask for a size until all is in place: the document would be shorter meanwhile, and scroll.
    for (const [id, row] of rows) {
      if (ids.has(id) && !outdated) continue;
      row.node.remove();
      rows.delete(id);
    }
    outdated = false;
    let previous = above;
    if (above.parentNode !== body) body.append(above, below);
    inSight.forEach((item, index) => {
      if (!rows.has(item.id)) rows.set(item.id, create(item));
      const row = rows.get(item.id);
      row.draw(item, rowHeight);
      row.node.toggleAttribute("data-grouped", grouped.has(item.id));
      row.node.setAttribute("aria-rowindex", String(first + index + 2));
      if (row.node.previousSibling !== previous) previous.after(row.node);
      previous = row.node;
    });
    setHeight(above, Math.min(first, end) * rowHeight);
    setHeight(below, (items.length - end) * rowHeight);
    const measured = inSight.find((item) => !isHeading(item));
    const height = measured && rows.get(measured.id).node.offsetHeight;
    if (height && height !== rowHeight) {
      rowHeight = height;
      drawSoon(); // the first guess was wrong, or the window is narrow now
    }
  }

  const create = (item) =>
    isHeading(item)
      ? createHeading(columns.length + 2, handlers.fold)
      : createRow(item.id, columns, selected, handlers);

  function drawSelection() {
    const count = runs.filter(({ id }) => selected.has(id)).length;
    all.checked = count > 0 && count === runs.length;
    all.indeterminate = count > 0 && count < runs.length;
    for (const row of rows.values()) row.drawSelection();
  }

  function drawSoon() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(drawRows);
  }
  addEventListener("scroll", drawSoon, { passive: true });
  return { node, draw, drawSelection, drawSoon };
}

function createSpace() {
  return el("tr.fp-runs-space", { "aria-hidden": "true" });
}

function setHeight(space, height) {
  space.hidden = !height;
  space.style.height = `${height}px`;
}

/** @param {Column[]} columns @param {Set<string>} selected */
function createRow(id, columns, selected, handlers) {
  let shown = /** @type {Run} */ ({ id, state: "" });
  const [varied, base] = [el("span"), el("span.fp-runs-base")];
  const link = el("a.fp-runs-link", { href: `?tab=run&run=${encodeURIComponent(id)}` }, varied, base);
  const box = el("input.fp-runs-select", { type: "checkbox", onchange: () => handlers.select(shown, box.checked) });
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
    if (run === shown && hasEnded(run.state)) return;
    shown = run;
    // What differs comes first: names of a sweep begin with the same words, and are cut at their end.
    setText(varied, run.varied || run.name || id);
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
