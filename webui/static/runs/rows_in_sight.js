// @ts-check
// The body of the list of runs. Only the rows in sight are in the document, so that thousands of runs scroll.
import { el } from "../dom.js";
import { isHeading } from "./runs_sweeps.js";

/** @typedef {import("./runs_search.js").Run | import("./runs_sweeps.js").Heading} Item */

const AROUND = 15; // rows that are drawn above and below those in sight

export class RowsInSight {
  node = el("tbody");
  above = createSpace();
  below = createSpace();
  rows = new Map(); // id -> row in the document; it stays the same node, so that it keeps the focus
  items = /** @type {Item[]} */ ([]);
  grouped = /** @type {Set<string>} */ (new Set()); // ids of the runs that have a heading
  isOutdated = false; // whether the rows still have other columns
  rowHeight = 45; // px; all rows have the same height
  frame = 0;

  /** @param {(item: Item) => any} create makes a row */
  constructor(create) {
    this.create = create;
    addEventListener("scroll", () => this.drawSoon(), { passive: true });
  }

  /** @param {Item[]} items @param {boolean} hasOtherColumns than before */
  show(items, hasOtherColumns) {
    this.items = items;
    this.grouped = new Set(items.flatMap((item) => (isHeading(item) ? item.runs.map(({ id }) => id) : [])));
    this.isOutdated ||= hasOtherColumns;
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    const { items, rowHeight } = this;
    const top = this.node.getBoundingClientRect().top;
    const end = Math.min(items.length, Math.ceil((innerHeight - top) / rowHeight) + AROUND);
    const first = Math.min(end, Math.max(0, Math.floor(-top / rowHeight) - AROUND));
    const inSight = items.slice(first, end);
    // Read no size until all rows are in place: before that, the document is shorter, so the browser would scroll.
    this.#removeOthers(inSight);
    if (this.above.parentNode !== this.node) this.node.append(this.above, this.below);
    let previous = this.above;
    inSight.forEach((item, index) => (previous = this.#drawRow(item, first + index, previous)));
    setHeight(this.above, first * rowHeight);
    setHeight(this.below, (items.length - end) * rowHeight);
    this.#measure(inSight);
  }

  /** @param {Item[]} inSight */
  #removeOthers(inSight) {
    const kept = new Set(inSight.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (kept.has(id) && !this.isOutdated) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    this.isOutdated = false;
  }

  /** @param {Item} item @param {number} index @param {any} previous node @returns {any} the node of the item's row */
  #drawRow(item, index, previous) {
    if (!this.rows.has(item.id)) this.rows.set(item.id, this.create(item));
    const row = this.rows.get(item.id);
    row.draw(item, this.rowHeight);
    row.node.toggleAttribute("data-grouped", this.grouped.has(item.id));
    row.node.setAttribute("aria-rowindex", String(index + 2));
    if (row.node.previousSibling !== previous) previous.after(row.node);
    return row.node;
  }

  /** The first guess of the height may be wrong, and a narrow window has higher rows. @param {Item[]} inSight */
  #measure(inSight) {
    const run = inSight.find((item) => !isHeading(item));
    const height = run && this.rows.get(run.id).node.offsetHeight;
    if (!height || height === this.rowHeight) return;
    this.rowHeight = height;
    this.drawSoon();
  }

  drawSoon() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  drawSelection() {
    for (const row of this.rows.values()) row.drawSelection();
  }
}

const createSpace = () => el("tr.fp-runs-space", { "aria-hidden": "true" });

function setHeight(space, height) {
  space.hidden = !height;
  space.style.height = `${height}px`;
}
