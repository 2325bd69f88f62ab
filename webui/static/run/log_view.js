// @ts-check
// What the log panel shows: lines, folded messages of libraries, and how lines are shown.
import { el, setText, toggleChip } from "../dom.js";
import { num } from "../format.js";
import { createFollow } from "./log_follow.js";
import { LogLines } from "./log_lines.js";
import { LogSearch } from "./log_search.js";

const MAX_LINES_FOLLOWING = 5000;
const MAX_LINES_READING = 20000; // while the user reads earlier lines
const NO_LINES_YET = "The first line appears when the run starts.";
const NO_LINES = "This log is empty: the run ended before it wrote a line.";

/** The log without its requests. */
export class LogView {
  box = el("div.fp-log", { role: "log", "aria-label": "Run log", "aria-live": "off", tabindex: 0 });
  empty = el("p.fp-log-empty");
  frame = el("div.fp-log-frame", { "data-level": "" });
  lines = new LogLines(this.box);
  follow = createFollow(this.box, () => this.trim());
  search = new LogSearch(this);
  foldedMessages = createLibraryButton(this.frame, this.follow.settle);
  level = createLevelMenu((level) => this.showLevel(level));
  wrap = toggleChip("Wrap", false, (pressed) => this.wrapLines(pressed));

  constructor() {
    this.frame.append(this.foldedMessages.node, this.empty, this.box);
  }

  /** Add a text that starts at a byte. @param {string} text @param {number} start */
  append(text, start) {
    if (!text) return;
    this.empty.hidden = true;
    this.search.match(this.lines.append(text, start));
    this.trim();
    this.search.draw();
    this.follow.settle();
  }

  /** Add what comes before the first line. The lines in view stay where they are. */
  prepend(text, start) {
    const below = this.box.scrollHeight - this.box.scrollTop;
    this.lines.prepend(text, start);
    if (!text) return;
    this.follow.set(false);
    this.empty.hidden = true;
    this.foldedMessages.draw(this.lines.messages);
    this.box.scrollTop = this.box.scrollHeight - below;
    this.search.start();
  }

  /** Remove the first lines if there are too many. */
  trim() {
    this.lines.trim(this.follow.isFollowing() ? MAX_LINES_FOLLOWING : MAX_LINES_READING);
    this.search.dropRemoved();
    this.foldedMessages.draw(this.lines.messages);
  }

  /** Show only lines from a byte on, if too many arrive at once to be read. "Load earlier" loads the others. */
  skipTo(start) {
    this.lines.clear(start);
    this.foldedMessages.draw(0);
  }

  /** @param {boolean} hasEnded whether no line will come */
  showEmpty(hasEnded) {
    setText(this.empty, hasEnded ? NO_LINES : NO_LINES_YET);
  }

  /** Show the log of another run, rank or file from its end. */
  reset() {
    this.skipTo(0);
    this.empty.hidden = false;
    setText(this.empty, ""); // until the first response
    this.follow.set(true);
    this.search.reset();
  }

  showLevel(level) {
    this.frame.dataset.level = level;
    this.search.start();
    this.follow.settle();
  }

  wrapLines(pressed) {
    this.frame.classList.toggle("fp-wrapped", pressed);
    this.follow.settle();
  }
}

/** Messages of libraries are hidden until they are requested, or found by the search. */
function createLibraryButton(frame, settle) {
  const node = el("button.fp-log-library", { type: "button", hidden: true, "aria-expanded": "false", onclick: toggle });
  function toggle() {
    const shown = frame.classList.toggle("fp-library-shown");
    node.setAttribute("aria-expanded", String(shown));
    settle();
  }
  /** @param {number} count */
  function draw(count) {
    node.hidden = !count;
    setText(node, `Library messages (${num(count)})`);
  }
  return { node, draw };
}

/** The menu that hides lines of lower levels. `selected` gets the level. @param {(level: string) => void} selected */
function createLevelMenu(selected) {
  const menu = el(
    "select.fp-select",
    { "aria-label": "Level", onchange: () => selected(menu.value) },
    el("option", { value: "" }, "All lines"),
    el("option", { value: "warning" }, "Warnings and errors"),
    el("option", { value: "error" }, "Errors"),
  );
  return menu;
}
