// @ts-check
// The loaded lines of a log: text nodes in chunks, so that selection and scroll position are kept.
import { el } from "../dom.js";
import { createLibraryFilter } from "./log_library.js";

const LINES_PER_CHUNK = 200;
const LINE_HEIGHT = 18; // px, as in log.css
const ERROR = /\b(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|\b[A-Z]\w*(Error|Exception)\b(:|$)/;
const WARNING = /\bWARN(ING)?\b|\b[A-Z]\w*Warning\b/;
const ANSI_CODES = /\u001b\[[0-9;?]*[A-Za-z]/g;
const RANK_PREFIX = /^\[default(\d+)\]:/; // torchrun's
// Left over from a progress bar that overwrote itself. A match begins only at the first prefix: the time is linear.
const LEFTOVER_PREFIXES = /(?<!\[default\d{1,9}\]:)(\[default\d+\]:)+$/;

/** `start` is the byte of the first line, `messages` the number of messages of libraries.
 * @typedef {{ node: any, start: number, count: number, messages: number }} Chunk */

/** The lines in `box`. */
export class LogLines {
  top = 0; // the byte at which the first line starts
  chunks = /** @type {Chunk[]} */ ([]);
  isLineOpen = false; // the last line has no line break yet
  filter = createLibraryFilter();

  /** @param {HTMLElement} box */
  constructor(box) {
    this.box = box;
  }

  /** Forget all lines. The next one starts at the byte `top`. @param {number} top */
  clear(top) {
    this.top = top;
    this.chunks = [];
    this.isLineOpen = false;
    this.filter = createLibraryFilter();
    this.box.replaceChildren();
  }

  /** Add a text that starts at a byte. @param {string} text @param {number} start @returns {any[]} its lines */
  append(text, start) {
    let chunk = this.chunks.at(-1);
    if (!chunk || (chunk.count >= LINES_PER_CHUNK && !this.isLineOpen)) {
      chunk = createChunk(start);
      this.chunks.push(chunk);
      this.box.append(chunk.node);
    }
    const lines = linesOf(text, this.filter);
    if (this.isLineOpen && chunk.node.lastChild) chunk.node.lastChild.append(lines.shift().textContent);
    fill(chunk, lines);
    this.isLineOpen = !text.endsWith("\n");
    return lines;
  }

  /** Add what comes before the first line; an empty text means that the selected rank has no line there.
   * @param {string} text @param {number} start */
  prepend(text, start) {
    this.top = start;
    if (!text) return;
    const chunk = createChunk(start);
    fill(chunk, linesOf(text, createLibraryFilter()));
    this.chunks.unshift(chunk);
    this.box.prepend(chunk.node);
  }

  /** Remove the first chunks while at least `limit` lines are left. @param {number} limit */
  trim(limit) {
    let total = this.#sum("count");
    while (this.chunks.length > 1 && total - this.chunks[0].count >= limit) {
      total -= this.chunks[0].count;
      this.chunks.shift()?.node.remove();
      this.top = this.chunks[0].start;
    }
  }

  /** The number of messages of libraries. */
  get messages() {
    return this.#sum("messages");
  }

  /** @param {"count" | "messages"} key */
  #sum(key) {
    return this.chunks.reduce((sum, chunk) => sum + chunk[key], 0);
  }
}

/** @param {number} start @returns {Chunk} */
const createChunk = (start) => ({ node: el("div.fp-log-chunk"), start, count: 0, messages: 0 });

/** @param {Chunk} chunk @param {any[]} lines */
function fill(chunk, lines) {
  chunk.node.append(...lines);
  chunk.count += lines.length;
  chunk.messages += lines.filter((line) => line.dataset.folded === "message").length;
  chunk.node.style.containIntrinsicHeight = `auto ${chunk.count * LINE_HEIGHT}px`;
}

function linesOf(text, libraryFilter) {
  const lines = text.replace(ANSI_CODES, "").split("\n");
  if (lines[lines.length - 1] === "") lines.pop();
  return lines.map((line) => createLine(line, libraryFilter));
}

/** torchrun's rank prefix becomes an attribute, which is shown only if there are several ranks. */
function createLine(raw, libraryFilter) {
  const rank = RANK_PREFIX.exec(raw);
  const text = (rank ? raw.slice(rank[0].length) : raw).replace(LEFTOVER_PREFIXES, "");
  const level = levelOf(text);
  const library = libraryFilter(text, rank ? rank[1] : "", level);
  const data = {
    "data-level": (library && level === "error" ? "warning" : level) || null,
    "data-rank": rank && rank[1],
    "data-folded": library || null,
  };
  return el("div.fp-log-line", data, text);
}

const levelOf = (line) => (ERROR.test(line) ? "error" : WARNING.test(line) ? "warning" : "");
