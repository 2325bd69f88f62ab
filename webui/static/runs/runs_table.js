// @ts-check
// The table of the list of runs: its columns, which sort it, and a check box that selects all runs.
import { el } from "../dom.js";
import { RowsInSight } from "./rows_in_sight.js";
import { widthsOf } from "./runs_columns.js";
import { createRow, selectBox } from "./runs_row.js";
import { createHeading, isHeading } from "./runs_sweeps.js";

/** @typedef {import("./runs_search.js").Column} Column */
/** @typedef {import("./runs_search.js").Run} Run */
/** @typedef {import("./rows_in_sight.js").Item} Item */
/** @typedef {{ sort: string, descending: boolean }} Order `sort` is the key of a column */

const NAME = /** @type {Column} */ ({ key: "name", label: "Name", kind: "text" });

/**
 * `selected` has the ids of the selected runs. The handlers `star`, `menu` and `select` get a run; `menu` also gets the
 * button, `select` whether it is selected. `selectAll` gets whether all are selected, `sort` the key of a column, and
 * `fold` the id of a sweep.
 * @param {Set<string>} selected
 * @param {Record<string, (...values: any[]) => void>} handlers
 */
export function createTable(selected, handlers) {
  const head = createHead(handlers);
  const rows = new RowsInSight((item) =>
    isHeading(item)
      ? createHeading(columns.length + 2, handlers.fold)
      : createRow(item.id, columns, selected, handlers),
  );
  const node = el("table.fp-runs-table", {}, head.widths, el("thead", {}, head.node), rows.node);
  let runs = /** @type {Run[]} */ ([]); // all runs that can be selected, also in folded sweeps
  let columns = /** @type {Column[]} */ ([]);
  let drawnHead = "";

  /** @param {Run[]} found @param {Item[]} items @param {Column[]} shown @param {Order} order */
  function draw(found, items, shown, order) {
    runs = found;
    const wanted = JSON.stringify([shown.map(({ key }) => key), order.sort, order.descending, widthsOf(shown)]);
    const isOther = wanted !== drawnHead;
    if (isOther) {
      drawnHead = wanted;
      columns = shown;
      node.style.minWidth = `${widthsOf(shown).least}px`;
      head.draw(shown, order);
    }
    node.setAttribute("aria-rowcount", String(items.length + 1));
    rows.show(items, isOther);
    drawSelection();
  }

  function drawSelection() {
    const count = runs.filter(({ id }) => selected.has(id)).length;
    head.all.checked = count > 0 && count === runs.length;
    head.all.indeterminate = count > 0 && count < runs.length;
    rows.drawSelection();
  }
  return { node, draw, drawSelection, drawSoon: () => rows.drawSoon() };
}

/**
 * The headings of the columns, which sort; the first one has the check box that selects all runs.
 * @param {Record<string, (...values: any[]) => void>} handlers of the table
 */
function createHead(handlers) {
  const [widths, node] = [el("colgroup"), el("tr")];
  const all = selectBox({ "aria-label": "Select all runs" });
  all.addEventListener("change", () => handlers.selectAll(all.checked));

  /** @param {Column[]} columns @param {Order} order */
  function draw(columns, order) {
    const column = (width) => el("col", width ? { style: `width: ${width}px` } : {});
    widths.replaceChildren(...widthsOf(columns).each.map(column));
    // The whole cell except the check box can be clicked.
    const heading = ({ key, label, kind }) =>
      el(
        "th",
        {
          scope: "col",
          "aria-sort": directionOf(key, order),
          "data-column": key,
          "data-kind": kind === "number" ? kind : undefined,
          onclick: ({ target }) => target !== all && handlers.sort(key),
        },
        sortButton(label, directionOf(key, order)),
      );
    const name = heading(NAME);
    name.append(el("div.fp-runs-name", {}, all, el("span.fp-runs-star"), name.firstChild));
    node.replaceChildren(name, ...columns.map(heading), el("th", {}, el("span.fp-sr", {}, "Actions")));
  }
  return { widths, node, all, draw };
}

/** The direction in which a column sorts the table, if it does. @param {string} key @param {Order} order */
const directionOf = (key, { sort, descending }) =>
  key === sort ? (descending ? "descending" : "ascending") : undefined;

/** @param {string} label of the column @param {string} [direction] */
function sortButton(label, direction) {
  const arrow = { descending: "\u2193", ascending: "\u2191" }[direction || ""] || "";
  const title = `Sort by ${label.toLowerCase()}`;
  return el("button", { type: "button", title }, label, el("span", { "aria-hidden": "true" }, arrow));
}
