// The runs page: every run, newest first; a row is a real link, so that a middle click opens a tab.
"use strict";
window.FPRuns = (() => {
  const { $, el } = FP;
  const { put, route, stamp } = FPRun;
  const GROUPS = [["", "All"], ["live", "Running"], ["done", "Done"], ["stopped", "Stopped"], ["bad", "Failed"]];
  const groupOf = (state) => ({ done: "done", stopped: "stopped", failed: "bad", lost: "bad" })[state] || "live";
  const seen = () => document.body.dataset.tab === "runs";

  let have = "";
  let runs = null;
  let group = "";
  const rows = new Map(); // id -> row; a row stays the same node, so that focus stays in it
  const page = {};

  function mount(place = $("#fp-runs-page")) {
    if (!place || page.node) return;
    const chips = GROUPS.map(([key, name]) => el("button.fp-chip", { type: "button", "aria-pressed": String(key === group), "data-group": key, onclick: () => choose(key) }, name, el("b")));
    page.filter = el("input.fp-input", { type: "search", placeholder: "Filter by name, model or method", "aria-label": "Filter the runs", oninput: draw });
    page.away = el("span.fp-away", { hidden: true }, "Reconnecting");
    page.body = el("tbody");
    page.table = el("table.fp-runs-table", {}, el("thead", {}, el("tr", {}, ["Name", "State", "Model", "Method", "Progress", "Loss", "Started", "Took", ""].map((name) => el("th", { scope: "col" }, name || el("span.fp-sr", {}, "Actions"))))), page.body);
    page.empty = el("div.fp-empty", { hidden: true }, el("h2"), el("p"), el("p", {}, el("a.fp-button.fp-primary", { href: "?tab=build" }, "Build a run")));
    page.chips = chips;
    page.node = el("div.fp-runs", {},
      (page.head = el("header.fp-runs-head", {}, el("h2", {}, "Runs"), page.away, el("span.fp-gap"), page.filter, el("div.fp-chips", { role: "group", "aria-label": "State" }, chips))),
      page.table, page.empty);
    page.head.hidden = page.table.hidden = true;
    place.replaceChildren(page.node);
    page.poll = FPPoll(pull, { seen, pace: 1000, trouble: (n) => (page.away.hidden = n < 2) });
    page.poll.start();
  }

  async function pull(current) {
    const answer = await FP.get(`api/runs?have=${encodeURIComponent(have)}`);
    if (!current() || !answer) { if (current()) clock(); return; }
    have = answer.etag || "";
    runs = answer.runs;
    draw();
  }
  function choose(key) {
    group = key;
    for (const chip of page.chips) chip.setAttribute("aria-pressed", String(chip.dataset.group === key));
    draw();
  }

  function draw() {
    if (!runs) return;
    const word = page.filter.value.trim().toLowerCase();
    const fits = (run) => (!group || groupOf(run.state) === group) && [run.name, run.id, run.model, run.method].some((text) => String(text || "").toLowerCase().includes(word));
    const ids = new Set(runs.map((run) => run.id));
    for (const [id, row] of rows) if (!ids.has(id)) { row.node.remove(); rows.delete(id); }
    let before = null;
    for (const run of runs) {
      if (!rows.has(run.id)) rows.set(run.id, rowOf(run.id));
      const row = rows.get(run.id);
      row.fill(run);
      row.node.hidden = !fits(run);
      if (row.node.previousSibling !== before || !row.node.parentNode) before ? before.after(row.node) : page.body.prepend(row.node);
      before = row.node;
    }
    const shown = runs.filter(fits).length;
    page.head.hidden = !runs.length;
    page.table.hidden = !shown;
    page.empty.hidden = Boolean(shown);
    put($("h2", page.empty), runs.length ? "No run fits the filter" : "No runs yet");
    put($("p", page.empty), runs.length ? "Change the words, or show all states." : "Build one, and it appears here as soon as it starts.");
    page.empty.lastChild.hidden = Boolean(runs.length);
    for (const chip of page.chips) {
      const key = chip.dataset.group;
      put(chip.lastChild, FP.num(runs.filter((run) => !key || groupOf(run.state) === key).length));
    }
  }
  function clock() { if (runs) for (const run of runs) if (!FPRun.ended(run.state)) rows.get(run.id)?.fill(run); }

  function rowOf(id) {
    const link = el("a.fp-runs-link", { href: `?tab=run&run=${encodeURIComponent(id)}` });
    const state = el("span.fp-badge");
    const bar = el("span");
    const steps = el("span.fp-number");
    const cell = (name, ...children) => el("td", { "data-name": name }, ...children);
    const button = (text, run, final) => el(`button.fp-chip${final ? ".fp-quiet-final" : ""}`, { type: "button", hidden: true, onclick: run }, text);
    const [model, method, loss, started, took] = ["Model", "Method", "Loss", "Started", "Took"].map((name) => cell(name));
    const actions = { resume: button("Resume", () => act(resume, () => FP.post(`${route(id)}/resume`, { anew: false }), "")), clone: button("Clone", () => FP.emit("clone", id)), remove: button("Delete", remove, true) };
    const { resume } = actions;
    const node = el("tr", {}, el("td", { "data-name": "Name" }, link), cell("State", state), model, method,
      cell("Progress", el("div.fp-mini", { "aria-hidden": "true" }, bar), steps), loss, started, took, el("td.fp-row-actions", {}, Object.values(actions)));
    for (const number of [loss, started, took]) number.classList.add("fp-number");

    async function remove() {
      if (await FPRun.askRemove(link.textContent)) act(actions.remove, () => FP.remove(route(id)), "Run deleted.");
    }
    function fill(run) {
      put(link, run.name || id);
      link.title = run.sentence || "";
      if (state.dataset.state !== run.state) FPRun.badge(state, run.state);
      node.dataset.state = run.state;
      put(model, run.model || "\u2013");
      put(method, run.method || "\u2013");
      put(loss, FP.num(run.loss));
      bar.style.width = `${100 * FPRun.share(run)}%`;
      put(steps, run.max_steps ? `${FP.num(run.step || 0)} / ${FP.num(run.max_steps)}` : "");
      const begin = stamp(run.started || run.created);
      put(started, when(begin));
      started.title = Number.isFinite(begin) ? new Date(1000 * begin).toLocaleString() : "";
      const end = run.ended ? stamp(run.ended) : FPRun.ended(run.state) ? NaN : Date.now() / 1000;
      put(took, run.started ? FP.duration(end - stamp(run.started)) : "\u2013");
      const over = FPRun.ended(run.state);
      actions.resume.hidden = !["new", "stopped", "failed", "lost"].includes(run.state);
      put(actions.resume, run.state === "new" ? "Start" : "Resume");
      actions.clone.hidden = false;
      actions.remove.hidden = !over && run.state !== "new";
    }
    return { node, fill };
  }
  async function act(button, work, said) {
    button.disabled = true;
    try {
      await work();
      if (said) FP.toast(said);
    } catch (error) {
      FP.toast(error.message, "error");
    }
    button.disabled = false;
    page.poll.start();
  }
  function when(seconds) {
    if (!Number.isFinite(seconds)) return "\u2013";
    const date = new Date(1000 * seconds);
    const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
    const days = Math.round((new Date().setHours(0, 0, 0, 0) - new Date(date).setHours(0, 0, 0, 0)) / 864e5);
    if (days <= 0) return `Today ${time}`;
    if (days === 1) return `Yesterday ${time}`;
    const year = date.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" };
    return `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short", ...year })} ${time}`;
  }
  return { mount };
})();
