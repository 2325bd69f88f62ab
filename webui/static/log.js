// @ts-check
// The log: requested by byte offset, shown as text nodes in chunks, so that selection and scroll position are kept.
import { get, url } from "./api.js";
import { el, notifyError, setText } from "./dom.js";
import { num } from "./format.js";
import { createLibraryFilter } from "./log_library.js";
import { createPoller } from "./poll.js";

const MAX_LINES_FOLLOWING = 5000;
const MAX_LINES_READING = 20000; // while someone reads further up
const LINES_PER_CHUNK = 200;
const LINE_HEIGHT = 18; // px, as in charts.css
const END_DISTANCE = 40; // px from the end that still count as the end
const MAX_HIGHLIGHTS = 1000;
const ERROR = /\b(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|\b[A-Z]\w*(Error|Exception)\b(:|$)/;
const WARNING = /\bWARN(ING)?\b|\b[A-Z]\w*Warning\b/;
const ANSI_CODES = /\u001b\[[0-9;?]*[A-Za-z]/g;
const RANK_PREFIX = /^\[default(\d+)\]:/; // torchrun's
// Of a progress bar that overwrote itself. Only the first of them begins a match, so the time is linear.
const LEFTOVER_PREFIXES = /(?<!\[default\d{1,9}\]:)(\[default\d+\]:)+$/;
const NO_LINES_YET = "The first line appears when the run starts.";
const NO_LINES = "The run ended without a line in this log.";

const levelOf = (line) => (ERROR.test(line) ? "error" : WARNING.test(line) ? "warning" : "");
const setPressed = (button, pressed) => button.setAttribute("aria-pressed", String(pressed));
const isPressed = (button) => button.getAttribute("aria-pressed") === "true";

function linesOf(text, libraryPart) {
  const lines = text.replace(ANSI_CODES, "").split("\n");
  if (lines[lines.length - 1] === "") lines.pop();
  return lines.map((line) => createLine(line, libraryPart));
}

/** torchrun's rank prefix becomes an attribute, which is shown only if there are several ranks. */
function createLine(raw, libraryPart) {
  const rank = RANK_PREFIX.exec(raw);
  const text = (rank ? raw.slice(rank[0].length) : raw).replace(LEFTOVER_PREFIXES, "");
  const level = levelOf(text);
  const library = libraryPart(text, rank ? rank[1] : "", level);
  const data = {
    "data-level": (library && level === "error" ? "warning" : level) || null,
    "data-rank": rank && rank[1],
    "data-folded": library || null,
  };
  return el("div.fp-log-line", data, text);
}

/**
 * The log panel of the open run. `base()` is the run's API path, `hasEnded()` whether the run had ended before the
 * request.
 */
export function createLog({ base, hasEnded, isVisible, onTrouble }) {
  let rank = "";
  let offset = -1; // where the next request starts; -1: the last part
  let top = 0; // the byte at which the first loaded line starts
  let chunks = []; // { node, start: byte, count: lines, messages: of libraries }
  let libraryPart = createLibraryFilter();
  let isLineOpen = false; // the last line has no line break yet
  let following = true;

  const box = el("div.fp-log", { role: "log", "aria-label": "Run log", "aria-live": "off", tabindex: 0 });
  const empty = el("p.fp-log-empty");
  const library = el("button.fp-log-library", { type: "button", hidden: true, "aria-expanded": "false" });
  library.addEventListener("click", toggleLibrary);
  const frame = el("div.fp-log-frame", { "data-level": "" }, library, empty, box);
  const view = { box, frame, settle, setFollowing, lineNodes: () => chunks.map((chunk) => chunk.node.children) };
  const search = createSearch(view);
  const controls = createControls({ follow: () => scrollToEnd(true), wrap, selectRank, selectLevel, loadEarlier });
  const node = el(
    "section.fp-panel",
    { "aria-label": "Log" },
    el(
      "div.fp-log-bar",
      {},
      el("h3", {}, "Log"),
      controls.ranks,
      controls.level,
      search.input,
      search.node,
      el("span.fp-gap"),
      controls.earlier,
      controls.wrap,
      controls.follow,
      controls.save,
    ),
    frame,
  );
  followUserScroll();
  const poller = createPoller(pull, { isVisible, interval: 250, onTrouble });

  // -- requests ---------------------------------------------------------------------------------------------------

  const rankParameter = () => (rank === "" ? "" : `&rank=${rank}`);
  const startOf = (response, fallback) => (Number.isFinite(response.s) ? response.s : fallback);

  async function pull(isCurrent) {
    const last = hasEnded(); // read before the request, so that no line written meanwhile is lost
    const requested = offset;
    const latest = following ? "&latest=true" : "";
    const response = await get(`${base()}/log?off=${requested}${rankParameter()}${latest}`);
    if (!isCurrent()) return undefined;
    if (!response) {
      setText(empty, last ? NO_LINES : NO_LINES_YET);
      return last ? "end" : undefined;
    }
    const start = startOf(response, requested < 0 ? response.o : requested);
    if (start < requested) {
      reset();
      return "more"; // the file was replaced
    }
    if (start > requested) skipTo(start);
    offset = response.o;
    append(response.t, start);
    controls.earlier.disabled = top <= 0;
    return response.more ? "more" : undefined;
  }

  async function loadEarlier() {
    const first = chunks[0];
    controls.earlier.disabled = true;
    try {
      // A part may contain no line of the selected rank.
      for (let text = ""; !text && top > 0;) {
        const response = await get(`${base()}/log?before=${top}${rankParameter()}`);
        if (chunks[0] !== first) return; // another run, or trimmed meanwhile
        text = response ? response.t : "";
        top = response ? startOf(response, 0) : 0;
        if (text) prepend(text);
      }
    } catch (error) {
      notifyError(error);
    } finally {
      controls.earlier.disabled = top <= 0;
    }
  }

  // -- lines ------------------------------------------------------------------------------------------------------

  /** More lines than anyone can read were written at once: show the last ones. "Load earlier" loads those before. */
  function skipTo(start) {
    top = start;
    chunks = [];
    isLineOpen = false;
    libraryPart = createLibraryFilter();
    box.replaceChildren();
    drawLibrary();
  }

  const createChunk = (start) => ({ node: el("div.fp-log-chunk"), start, count: 0, messages: 0 });
  function addLines(chunk, lines) {
    chunk.node.append(...lines);
    chunk.count += lines.length;
    chunk.messages += lines.filter((line) => line.dataset.folded === "message").length;
    chunk.node.style.containIntrinsicHeight = `auto ${chunk.count * LINE_HEIGHT}px`;
  }

  function append(text, start) {
    if (!text) return;
    empty.hidden = true;
    let chunk = chunks[chunks.length - 1];
    if (!chunk || (chunk.count >= LINES_PER_CHUNK && !isLineOpen)) {
      chunk = createChunk(start);
      chunks.push(chunk);
      box.append(chunk.node);
    }
    const lines = linesOf(text, libraryPart);
    if (isLineOpen && chunk.node.lastChild) chunk.node.lastChild.append(lines.shift().textContent);
    addLines(chunk, lines);
    isLineOpen = !text.endsWith("\n");
    search.match(lines);
    trim();
    search.drawHits();
    if (following) scrollToEnd();
  }

  function prepend(text) {
    setFollowing(false);
    empty.hidden = true;
    const chunk = createChunk(top);
    const below = box.scrollHeight - box.scrollTop;
    addLines(chunk, linesOf(text, createLibraryFilter()));
    chunks.unshift(chunk);
    box.prepend(chunk.node);
    drawLibrary();
    box.scrollTop = box.scrollHeight - below; // the lines in view stay where they are
    search.start();
  }

  function trim() {
    let total = chunks.reduce((sum, chunk) => sum + chunk.count, 0);
    const limit = following ? MAX_LINES_FOLLOWING : MAX_LINES_READING;
    while (chunks.length > 1 && total - chunks[0].count >= limit) {
      total -= chunks[0].count;
      chunks.shift().node.remove();
      top = chunks[0].start;
    }
    search.dropRemoved();
    drawLibrary();
  }

  /** Messages of libraries are hidden until they are requested, or found by the search. */
  function drawLibrary() {
    const count = chunks.reduce((sum, chunk) => sum + chunk.messages, 0);
    library.hidden = !count;
    setText(library, `Library messages (${num(count)})`);
  }
  function toggleLibrary() {
    const shown = frame.classList.toggle("fp-library-shown");
    library.setAttribute("aria-expanded", String(shown));
    settle();
  }

  // -- scrolling --------------------------------------------------------------------------------------------------

  /** Only the user leaves the end: a scroll event that comes with another height comes from the layout. */
  function followUserScroll() {
    let previous = { top: 0, inner: 0, outer: 0 };
    box.addEventListener("scroll", () => {
      const now = { top: box.scrollTop, inner: box.scrollHeight, outer: box.clientHeight };
      const sameHeight = now.inner === previous.inner && now.outer === previous.outer;
      if (now.inner - now.top - now.outer <= END_DISTANCE) setFollowing(true);
      else if (sameHeight && now.top < previous.top) setFollowing(false);
      else settle();
      previous = now;
    });
    new ResizeObserver(() => following && scrollToEnd()).observe(box);
  }

  function setFollowing(value) {
    following = value;
    setPressed(controls.follow, value);
  }
  function scrollToEnd(byUser = false) {
    if (byUser) {
      setFollowing(true);
      trim();
    }
    box.scrollTop = box.scrollHeight;
  }
  function settle() {
    if (following) scrollToEnd();
  }

  // -- controls ---------------------------------------------------------------------------------------------------

  function wrap() {
    const pressed = !isPressed(controls.wrap);
    setPressed(controls.wrap, pressed);
    frame.classList.toggle("fp-wrapped", pressed);
    settle();
  }
  function selectRank() {
    rank = controls.ranks.value;
    frame.classList.toggle("fp-ranked", !rank);
    restart();
  }
  function selectLevel() {
    frame.dataset.level = controls.level.value;
    search.start();
    settle();
  }

  let offeredRanks = "";
  function offerRanks(list) {
    if (String(list) === offeredRanks) return;
    offeredRanks = String(list);
    const choice = (r) => el("option", { value: r }, `Rank ${r}`);
    controls.ranks.replaceChildren(el("option", { value: "" }, "All ranks"), ...list.map(choice));
    controls.ranks.value = list.map(String).includes(rank) ? rank : "";
    controls.ranks.hidden = list.length < 2;
    frame.classList.toggle("fp-ranked", list.length > 1 && !rank);
  }

  function reset() {
    offset = -1;
    skipTo(0);
    empty.hidden = false;
    setText(empty, NO_LINES_YET);
    controls.earlier.disabled = true;
    setFollowing(true);
    search.reset();
  }
  function restart() {
    reset();
    controls.save.href = url(`${base()}/log.txt${rank === "" ? "" : `?rank=${rank}`}`);
    poller.start();
  }
  function open() {
    rank = offeredRanks = search.input.value = "";
    restart();
  }

  return { node, open, close: poller.stop, resume: poller.start, offerRanks };
}

function createControls({ follow, wrap, selectRank, selectLevel, loadEarlier }) {
  const button = (text, onclick, attributes = {}) =>
    el("button.fp-chip", { type: "button", onclick, ...attributes }, text);
  return {
    follow: button("Follow", follow, { "aria-pressed": "true" }),
    wrap: button("Wrap", wrap, { "aria-pressed": "false" }),
    earlier: button("Load earlier", loadEarlier, { disabled: true }),
    save: el("a.fp-chip", { download: "" }, "Download"),
    ranks: el("select.fp-select", { "aria-label": "Rank", hidden: true, onchange: selectRank }),
    level: el(
      "select.fp-select",
      { "aria-label": "Level", onchange: selectLevel },
      el("option", { value: "" }, "All lines"),
      el("option", { value: "warning" }, "Warnings and errors"),
      el("option", { value: "error" }, "Errors"),
    ),
  };
}

/** Search in the loaded lines. Matching lines get a class, the words a CSS highlight: the user's selection is kept. */
function createSearch({ box, frame, settle, setFollowing, lineNodes }) {
  let hits = []; // matching lines
  let current = -1;
  let timer = 0;

  const button = (text, name, onclick) => el("button.fp-chip", { type: "button", "aria-label": name, onclick }, text);
  const input = el("input.fp-input", {
    type: "search",
    placeholder: "Search the log",
    "aria-label": "Search the log",
    oninput: startSoon,
    onkeydown: keyPressed,
  });
  const count = el("span.fp-log-count");
  const spoken = el("span.fp-sr", { role: "status" }); // the count after the user's own search, not after each new line
  const previous = button("\u2191", "Previous match", () => go(-1));
  const next = button("\u2193", "Next match", () => go(1));
  const only = button("Only matches", "Show matching lines only", toggleOnly);
  setPressed(only, false);
  const node = el("span.fp-log-found", {}, count, spoken, previous, next, only);

  const word = () => input.value.toLowerCase();

  function startSoon() {
    clearTimeout(timer);
    timer = setTimeout(start, 120);
  }
  function start() {
    clearTimeout(timer);
    timer = 0;
    for (const hit of hits) hit.classList.remove("fp-hit", "fp-now");
    hits = [];
    current = -1;
    frame.classList.toggle("fp-searching", Boolean(word()));
    for (const lines of lineNodes()) match(lines);
    drawHits();
    announce();
  }
  const announce = () => setText(spoken, word() ? count.textContent : "");
  function match(lines) {
    const text = word();
    if (!text) return;
    const { level } = frame.dataset;
    for (const line of lines) {
      if (level && line.dataset.level !== level && line.dataset.level !== "error") continue; // the menu hides it
      if (!line.textContent.toLowerCase().includes(text)) continue;
      line.classList.add("fp-hit");
      hits.push(line);
    }
  }

  function drawHits() {
    const text = word();
    node.hidden = !text;
    const position = current >= 0 ? `${num(current + 1)} of ` : "";
    count.textContent = hits.length
      ? `${position}${num(hits.length)} ${hits.length === 1 ? "line" : "lines"}`
      : "No match";
    previous.disabled = next.disabled = !hits.length;
    if (!window.CSS || !CSS.highlights) return;
    CSS.highlights.set("fp-find", new Highlight(...(text ? hits.slice(-MAX_HIGHLIGHTS) : []).flatMap(rangeOf)));
  }
  function rangeOf(line) {
    const text = line.firstChild;
    const from = text.data.toLowerCase().indexOf(word());
    if (from < 0 || from + word().length > text.length) return [];
    const range = new Range();
    range.setStart(text, from);
    range.setEnd(text, from + word().length);
    return [range];
  }

  function go(step) {
    if (!hits.length) return;
    if (hits[current]) hits[current].classList.remove("fp-now");
    const first = step > 0 ? 0 : hits.length - 1;
    current = current < 0 ? first : (current + step + hits.length) % hits.length;
    setFollowing(false);
    hits[current].classList.add("fp-now");
    hits[current].scrollIntoView({ block: "nearest" });
    drawHits();
    announce();
  }
  function keyPressed(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      if (timer) start();
      go(event.shiftKey ? -1 : 1);
    }
    if (event.key === "Escape" && input.value) {
      input.value = "";
      start();
    }
  }
  function toggleOnly() {
    const line = hits[current];
    const pressed = !isPressed(only);
    setPressed(only, pressed);
    frame.classList.toggle("fp-only", pressed);
    settle();
    if (!line) return;
    setFollowing(false);
    line.scrollIntoView({ block: "nearest" });
  }

  function dropRemoved() {
    if (!hits.length || box.contains(hits[0])) return;
    const kept = hits.filter((hit) => box.contains(hit));
    current = Math.max(-1, current - (hits.length - kept.length));
    hits = kept;
  }
  function reset() {
    hits = [];
    current = -1;
    frame.classList.toggle("fp-searching", Boolean(word()));
    drawHits();
    setText(spoken, "");
  }
  return { input, node, start, match, drawHits, dropRemoved, reset };
}
