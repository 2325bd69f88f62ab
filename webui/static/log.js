// The log: pulled by byte offset, shown as text nodes in chunks, so that selection and scroll position stay.
"use strict";
window.FPLog = (() => {
  const { el } = FP;
  const KEEP = 5000; // lines, while it follows the end
  const KEEP_READING = 20000; // lines, while someone reads further up
  const NEAR = 40; // px from the end that still count as the end
  const BAD = /\b(ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|\b[A-Z]\w*(Error|Exception)\b(:|$)/;
  const DOUBT = /\bWARN(ING)?\b|\b[A-Z]\w*Warning\b/;
  const COLOURS = /\u001b\[[0-9;?]*[A-Za-z]/g;
  const RANK = /^\[default(\d+)\]:/;
  const TORN = /(\[default\d+\]:)+$/; // what is left of a progress bar that wrote over itself
  const levelOf = (line) => (BAD.test(line) ? "error" : DOUBT.test(line) ? "warning" : "");

  // over(): the run had ended before the question was asked; base(): the run's route.
  function make({ base, over, seen, trouble }) {
    let rank = "";
    let offset = -1; // where the next question begins; -1: the last part
    let top = 0; // where the first line held begins
    let chunks = []; // {node, start: byte, count: lines}
    let open = false; // the last line has no end yet
    let following = true;
    let hits = [];
    let at = -1;

    const box = el("div.fp-log", { role: "log", "aria-label": "Run log", "aria-live": "off", tabindex: 0 });
    const nothing = el("p.fp-log-nothing", {}, "The first line comes when the run starts.");
    const follow = el("button.fp-chip", { type: "button", "aria-pressed": "true", onclick: () => toEnd(true) }, "Follow");
    const wrap = el("button.fp-chip", { type: "button", "aria-pressed": "false", onclick: toggleWrap }, "Wrap");
    const ranks = el("select.fp-select", { "aria-label": "Whose lines", hidden: true, onchange: () => { rank = ranks.value; frame.classList.toggle("fp-ranked", !rank); begin(); } });
    const level = el("select.fp-select", { "aria-label": "Which lines", onchange: () => { frame.dataset.level = level.value; settle(); } },
      el("option", { value: "" }, "All lines"), el("option", { value: "warning" }, "Warnings and errors"), el("option", { value: "error" }, "Errors"));
    const find = el("input.fp-input", { type: "search", placeholder: "Find in the log", "aria-label": "Find in the log", oninput: searchSoon, onkeydown: keys });
    const count = el("span.fp-log-count", { role: "status" });
    const back = el("button.fp-chip", { type: "button", "aria-label": "Previous hit", onclick: () => go(-1) }, "\u2191");
    const next = el("button.fp-chip", { type: "button", "aria-label": "Next hit", onclick: () => go(1) }, "\u2193");
    const only = el("button.fp-chip", { type: "button", "aria-pressed": "false", title: "Only the lines that are found", onclick: toggleOnly }, "Only hits");
    const found = el("span.fp-log-found", {}, count, back, next, only);
    const earlier = el("button.fp-chip", { type: "button", onclick: loadEarlier, disabled: true }, "Load earlier");
    const save = el("a.fp-chip", { download: "" }, "Download");
    const frame = el("div.fp-log-frame", { "data-level": "" }, nothing, box);
    const node = el("section.fp-panel", { "aria-label": "Log" },
      el("div.fp-log-bar", {}, el("h3", {}, "Log"), ranks, level, find, found, el("span.fp-gap"), earlier, wrap, follow, save), frame);

    // Only a person leaves the end: a scroll that comes with another height comes from the layout.
    let seenAt = { top: 0, inner: 0, outer: 0 };
    box.addEventListener("scroll", () => {
      const now = { top: box.scrollTop, inner: box.scrollHeight, outer: box.clientHeight };
      const same = now.inner === seenAt.inner && now.outer === seenAt.outer;
      if (now.inner - now.top - now.outer <= NEAR) setFollowing(true);
      else if (same && now.top < seenAt.top) setFollowing(false);
      else settle();
      seenAt = now;
    });
    new ResizeObserver(() => following && toEnd()).observe(box);

    const poll = FPPoll(pull, { seen, pace: 500, trouble });

    const ofRank = () => (rank === "" ? "" : `&rank=${rank}`);
    async function pull(current) {
      const last = over(); // asked before the answer: a line written in between is not lost
      const asked = offset;
      const answer = await FP.get(`${base()}/log?off=${asked}${ofRank()}`);
      if (!current()) return;
      if (!answer) return last ? "end" : undefined;
      const start = asked < 0 ? startOf(answer, answer.o) : asked;
      if (asked >= 0 && startOf(answer, asked) !== asked) { reset(); return "more"; } // it is another file now
      if (asked < 0) top = start;
      offset = answer.o;
      append(answer.t, start);
      earlier.disabled = top <= 0;
      return answer.more ? "more" : undefined;
    }
    const startOf = (answer, otherwise) => (Number.isFinite(answer.s) ? answer.s : otherwise);

    function linesOf(text) {
      const lines = text.replace(COLOURS, "").split("\n");
      if (lines[lines.length - 1] === "") lines.pop();
      return lines.map(line);
    }
    // torchrun's mark of a rank becomes a mark beside the line, shown only where there are several ranks.
    function line(raw) {
      const rank = RANK.exec(raw);
      const text = (rank ? raw.slice(rank[0].length) : raw).replace(TORN, "");
      return el("div.fp-log-line", { "data-level": levelOf(text) || null, "data-rank": rank && rank[1] }, text);
    }
    function chunk(start) { return { node: el("div.fp-log-chunk"), start, count: 0 }; }
    function fill(part, lines) {
      part.node.append(...lines);
      part.count += lines.length;
      part.node.style.containIntrinsicHeight = `auto ${part.count * 18}px`;
    }

    function append(text, start) {
      if (!text) return;
      nothing.hidden = true;
      let part = chunks[chunks.length - 1];
      if (!part || (part.count >= 200 && !open)) {
        chunks.push((part = chunk(start)));
        box.append(part.node);
      }
      const lines = linesOf(text);
      if (open && part.node.lastChild) part.node.lastChild.append(lines.shift().textContent);
      fill(part, lines);
      open = !text.endsWith("\n");
      match(lines);
      trim();
      marks();
      if (following) toEnd();
    }

    function trim() {
      let total = chunks.reduce((sum, part) => sum + part.count, 0);
      const limit = following ? KEEP : KEEP_READING;
      while (chunks.length > 1 && total - chunks[0].count >= limit) {
        total -= chunks[0].count;
        chunks.shift().node.remove();
        top = chunks[0].start;
      }
      if (hits.length && !hits[0].isConnected) {
        const kept = hits.filter((hit) => hit.isConnected);
        at = Math.max(-1, at - (hits.length - kept.length));
        hits = kept;
      }
    }

    async function loadEarlier() {
      const mine = chunks[0];
      earlier.disabled = true;
      try {
        for (let text = ""; !text && top > 0;) { // a part may hold no line of the rank that is shown
          const answer = await FP.get(`${base()}/log?before=${top}${ofRank()}`);
          if (chunks[0] !== mine) return; // another run, or trimmed meanwhile
          text = answer ? answer.t : "";
          top = answer ? startOf(answer, 0) : 0;
          if (text) prepend(text);
        }
      } catch (error) {
        FP.toast(error.message, "error");
      } finally {
        earlier.disabled = top <= 0;
      }
    }
    function prepend(text) {
      setFollowing(false);
      nothing.hidden = true;
      const part = chunk(top);
      const below = box.scrollHeight - box.scrollTop;
      fill(part, linesOf(text));
      chunks.unshift(part);
      box.prepend(part.node);
      box.scrollTop = box.scrollHeight - below; // what was read stays where it was
      search();
    }

    function setFollowing(yes) {
      following = yes;
      follow.setAttribute("aria-pressed", String(yes));
    }
    function toEnd(asked) {
      if (asked) { setFollowing(true); trim(); }
      box.scrollTop = box.scrollHeight;
    }
    function settle() { if (following) toEnd(); }
    function toggle(button, name) {
      const yes = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(yes));
      frame.classList.toggle(name, yes);
      settle();
    }
    function toggleWrap() { toggle(wrap, "fp-wrapped"); }
    function toggleOnly() {
      const held = hits[at];
      toggle(only, "fp-only");
      if (!held) return;
      setFollowing(false);
      held.scrollIntoView({ block: "nearest" });
    }

    // Finding. Lines are marked by class, the words by the highlight registry: neither touches a selection.
    let wait = 0;
    function searchSoon() { clearTimeout(wait); wait = setTimeout(search, 120); }
    const wanted = () => find.value.toLowerCase();
    function search() {
      clearTimeout(wait);
      wait = 0;
      for (const hit of hits) hit.classList.remove("fp-hit", "fp-now");
      hits = [];
      at = -1;
      frame.classList.toggle("fp-finding-lines", Boolean(wanted()));
      for (const part of chunks) match(part.node.children);
      marks();
    }
    function match(lines) {
      const word = wanted();
      if (!word) return;
      for (const line of lines) {
        if (!line.textContent.toLowerCase().includes(word)) continue;
        line.classList.add("fp-hit");
        hits.push(line);
      }
    }
    function marks() {
      const word = wanted();
      found.hidden = !word;
      count.textContent = hits.length ? `${at >= 0 ? `${FP.num(at + 1)} of ` : ""}${FP.num(hits.length)} ${hits.length === 1 ? "line" : "lines"}` : "Not found";
      back.disabled = next.disabled = !hits.length;
      if (!window.CSS || !CSS.highlights) return;
      const ranges = [];
      for (const hit of word ? hits.slice(-1000) : []) {
        const text = hit.firstChild;
        const from = text.data.toLowerCase().indexOf(word);
        if (from < 0 || from + word.length > text.length) continue;
        const range = new Range();
        range.setStart(text, from);
        range.setEnd(text, from + word.length);
        ranges.push(range);
      }
      CSS.highlights.set("fp-find", new Highlight(...ranges));
    }
    function go(by) {
      if (!hits.length) return;
      if (hits[at]) hits[at].classList.remove("fp-now");
      at = at < 0 ? (by > 0 ? 0 : hits.length - 1) : (at + by + hits.length) % hits.length;
      setFollowing(false);
      hits[at].classList.add("fp-now");
      hits[at].scrollIntoView({ block: "nearest" });
      marks();
    }
    function keys(event) {
      if (event.key === "Enter") { event.preventDefault(); if (wait) search(); go(event.shiftKey ? -1 : 1); }
      if (event.key === "Escape" && find.value) { find.value = ""; search(); }
    }

    function reset() {
      offset = -1;
      top = 0;
      chunks = [];
      open = false;
      hits = [];
      at = -1;
      box.replaceChildren();
      nothing.hidden = false;
      earlier.disabled = true;
      setFollowing(true);
      frame.classList.toggle("fp-finding-lines", Boolean(wanted()));
      marks();
    }
    function begin() {
      reset();
      save.href = FP.url(`${base()}/log.txt${rank === "" ? "" : `?rank=${rank}`}`);
      poll.start();
    }
    let offered = "";
    function offer(list) {
      if (String(list) === offered) return;
      offered = String(list);
      ranks.replaceChildren(el("option", { value: "" }, "All ranks"), ...list.map((r) => el("option", { value: r }, `Rank ${r}`)));
      ranks.value = list.map(String).includes(rank) ? rank : "";
      ranks.hidden = list.length < 2;
      frame.classList.toggle("fp-ranked", list.length > 1 && !rank);
    }
    return { node, open: () => { rank = offered = find.value = ""; begin(); }, close: poll.stop, resume: poll.start, ranks: offer, done: () => !poll.running() };
  }
  return { make };
})();
