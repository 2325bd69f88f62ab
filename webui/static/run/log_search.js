// @ts-check
// The search in the loaded lines of a log. Matching lines get a class, and the words a CSS highlight, which keeps the
// user's selection.
import { chip, el, setText, toggleChip } from "../dom.js";
import { num } from "../format.js";

const MAX_HIGHLIGHTS = 1000;
const TYPING_PAUSE = 120; // ms

/** The matching lines, and the one that the user has gone to. */
class Hits {
  lines = /** @type {any[]} */ ([]);
  current = -1;

  clear() {
    for (const line of this.lines) line.classList.remove("fp-hit", "fp-now");
    this.lines = [];
    this.current = -1;
  }

  add(line) {
    line.classList.add("fp-hit");
    this.lines.push(line);
  }

  /** Go to the next line, or with -1 to the previous one. @param {number} step @returns {any} the line */
  go(step) {
    const { lines, current } = this;
    lines[current]?.classList.remove("fp-now");
    const first = step > 0 ? 0 : lines.length - 1;
    this.current = current < 0 ? first : (current + step + lines.length) % lines.length;
    lines[this.current].classList.add("fp-now");
    return lines[this.current];
  }

  /** Forget the lines that are no longer in `box`; the first ones are removed first. @param {HTMLElement} box */
  dropRemoved(box) {
    if (!this.lines.length || box.contains(this.lines[0])) return;
    const kept = this.lines.filter((line) => box.contains(line));
    this.current = Math.max(-1, this.current - (this.lines.length - kept.length));
    this.lines = kept;
  }

  get text() {
    const count = this.lines.length;
    const position = this.current >= 0 ? `${num(this.current + 1)} of ` : "";
    return count ? `${position}${num(count)} ${count === 1 ? "line" : "lines"}` : "No match";
  }
}

/** The search field, and what it has found. */
export class LogSearch {
  hits = new Hits();
  timer = 0;
  input = el("input.fp-input", {
    type: "search",
    placeholder: "Search the log",
    "aria-label": "Search the log",
    oninput: () => this.startSoon(),
    onkeydown: (event) => this.keyPressed(event),
  });
  results = createResults({ go: (step) => this.go(step), showOnly: (pressed) => this.showOnly(pressed) });

  /** @param {import("./log_view.js").LogView} view its frame has the level of the lines that are shown */
  constructor({ frame, lines, follow }) {
    this.frame = frame;
    this.lines = lines;
    this.follow = follow;
  }

  get word() {
    return this.input.value.toLowerCase();
  }

  startSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.start(), TYPING_PAUSE);
  }

  /** Search in all lines. */
  start() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.clear();
    for (const chunk of this.lines.chunks) this.match(chunk.node.children);
    this.draw();
    this.results.announce(this.word);
  }

  /** Forget what was found: there are other lines, or another word. */
  clear() {
    this.hits.clear();
    this.frame.classList.toggle("fp-searching", Boolean(this.word));
  }

  /** Search in some lines. @param {Iterable<any>} lines */
  match(lines) {
    const { word } = this;
    if (!word) return;
    const { level } = this.frame.dataset;
    for (const line of lines) if (isShown(line, level) && containsWord(line, word)) this.hits.add(line);
  }

  dropRemoved() {
    this.hits.dropRemoved(this.lines.box);
  }

  draw() {
    this.results.draw(this.hits, this.word);
    highlight(this.hits.lines, this.word);
  }

  /** Go to the next hit, or with -1 to the previous one. @param {number} step */
  go(step) {
    if (!this.hits.lines.length) return;
    this.follow.set(false);
    this.hits.go(step).scrollIntoView({ block: "nearest" });
    this.draw();
    this.results.announce(this.word);
  }

  /** @param {KeyboardEvent} event */
  keyPressed(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      if (this.timer) this.start();
      this.go(event.shiftKey ? -1 : 1);
    }
    if (event.key === "Escape" && this.input.value) {
      this.input.value = "";
      this.start();
    }
  }

  /** @param {boolean} pressed */
  showOnly(pressed) {
    this.frame.classList.toggle("fp-only", pressed);
    this.follow.settle();
    const line = this.hits.lines[this.hits.current];
    if (!line) return;
    this.follow.set(false);
    line.scrollIntoView({ block: "nearest" });
  }

  /** The log is empty; the word stays in the field. */
  reset() {
    this.clear();
    this.draw();
    this.results.announce("");
  }
}

/** Whether the menu of levels shows a line. @param {string} [level] warnings include errors */
const isShown = (line, level) => !level || line.dataset.level === level || line.dataset.level === "error";
const containsWord = (line, word) => line.textContent.toLowerCase().includes(word);

/** Mark a word in lines. @param {any[]} lines */
function highlight(lines, word) {
  if (!window.CSS || !CSS.highlights) return;
  const ranges = (word ? lines.slice(-MAX_HIGHLIGHTS) : []).flatMap((line) => rangeOf(line, word));
  CSS.highlights.set("fp-find", new Highlight(...ranges));
}

/** The first place of a word in a line. @returns {Range[]} */
function rangeOf(line, word) {
  const text = line.firstChild;
  const from = text.data.toLowerCase().indexOf(word);
  if (from < 0 || from + word.length > text.length) return [];
  const range = new Range();
  range.setStart(text, from);
  range.setEnd(text, from + word.length);
  return [range];
}

/** The count and the buttons, which are shown while there is a word. */
function createResults({ go, showOnly }) {
  const count = el("span.fp-log-count");
  const spoken = el("span.fp-sr", { role: "status" }); // announces the count after a search, not after each new line
  const previous = chip("\u2191", () => go(-1), { "aria-label": "Previous match" });
  const next = chip("\u2193", () => go(1), { "aria-label": "Next match" });
  const only = toggleChip("Only matches", false, showOnly, { "aria-label": "Show matching lines only" });
  const node = el("span.fp-log-found", {}, count, spoken, previous, next, only);

  /** @param {Hits} hits @param {string} word */
  function draw(hits, word) {
    node.hidden = !word;
    count.textContent = hits.text;
    previous.disabled = next.disabled = !hits.lines.length;
  }
  const announce = (word) => setText(spoken, word ? count.textContent : "");
  return { node, draw, announce };
}
