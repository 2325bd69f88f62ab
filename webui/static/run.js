// The run page: head, failure, result, charts, log, details of the run in the address.
"use strict";
window.FPRun = (() => {
  const { $, el } = FP;
  const LIVE = ["new", "starting", "running", "stopping"];
  const WORDS = { new: "New", starting: "Starting", running: "Running", stopping: "Stopping", done: "Done", stopped: "Stopped", failed: "Failed", lost: "Lost" };
  const ended = (state) => !LIVE.includes(state);
  const badge = (node, state) => { node.textContent = WORDS[state] || state; node.dataset.state = state; };
  // Steps only: the fraction of a phase (a download, an evaluation) would make the bar jump back and forth.
  const share = (run) => (run.state === "done" ? 1 : run.max_steps ? Math.min(1, (run.step || 0) / run.max_steps) : null);
  const percent = (value) => `${FP.num(100 * value, 3)} %`;
  const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };

  let id = "";
  let detail = null;
  let asked = false; // an action is on its way
  const page = {};

  const base = () => `api/runs/${encodeURIComponent(id)}`;
  const over = () => Boolean(detail) && ended(detail.summary.state);
  const seen = () => document.body.dataset.tab === "run";

  // Several pollers share the one quiet sign.
  const troubles = { page: 0, log: 0, charts: 0 };
  const trouble = (name) => (n, error) => {
    if (error && error.status === 404 && name === "page") gone(error);
    troubles[name] = error && error.status ? 0 : n;
    page.away.hidden = !Object.values(troubles).some((count) => count > 1);
  };

  function mount(place = $("#fp-run-page")) {
    if (!place || page.node) return;
    build(place);
    FP.on("run", open);
    FP.on("tab", (tab) => { if (tab === "run") return FP.query.get("run") ? undefined : none(); document.title = "Footplate"; });
    document.addEventListener("visibilitychange", () => !document.hidden && seen() && again());
  }

  function build(place) {
    const button = (name, text, run) => (page[name] = el(`button.fp-button${name === "remove" || name === "discard" ? ".fp-quiet-final" : ""}`, { type: "button", hidden: true, onclick: run }, text));
    page.poll = FPPoll(pull, { seen, pace: 1000, trouble: trouble("page") });
    page.charts = FPCharts.make({ base, over, seen, trouble: trouble("charts"), drawn: (newest) => { page.latest = newest; cards(); } });
    page.log = FPLog.make({ base, over, seen, trouble: trouble("log") });
    page.downloads = el("details.fp-downloads", { hidden: true }, el("summary.fp-button", {}, "Downloads"), el("div.fp-downloads-list"));
    page.node = el("div.fp-run", { hidden: true },
      el("header.fp-run-head", {},
        el("div.fp-run-title", {}, (page.name = el("h2")), el("p", {}, (page.badge = el("span.fp-badge")), (page.sentence = el("span.fp-run-said", { role: "status" })),
          (page.away = el("span.fp-away", { hidden: true }, "Reconnecting")))),
        el("div.fp-run-actions", {}, button("save", "Stop and save", () => stop(true)), button("discard", "Stop without saving", () => stop(false)),
          button("resume", "Resume", () => resume(false)), button("anew", "Begin anew", anew), button("sweep", "End what is left", sweep), button("clone", "Clone into form", () => FP.emit("clone", id)), page.downloads, button("remove", "Delete", remove))),
      el("div.fp-run-way", {}, (page.progress = el("div.fp-progress", { role: "progressbar", "aria-label": "Progress", "aria-valuemin": 0, "aria-valuemax": 100 }, (page.done = el("span")))), (page.share = el("span.fp-number"))),
      (page.failure = el("section.fp-failure", { hidden: true, "aria-label": "What went wrong" })),
      (page.cards = el("dl.fp-results", { hidden: true, "aria-label": "Result" })),
      (page.samples = el("section.fp-panel.fp-samples", { hidden: true, "aria-label": "Answers before and after" })),
      page.charts.node, page.log.node, (page.details = el("section.fp-details", { "aria-label": "Details" })));
    page.empty = el("div.fp-empty", {}, el("h2"), el("p"), el("p", {}, el("a.fp-button.fp-primary", { href: "?tab=build" }, "Build a run"), el("a.fp-button", { href: "?tab=runs" }, "All runs")));
    place.replaceChildren(page.node, page.empty);
    document.addEventListener("click", (event) => { if (!page.downloads.contains(event.target) || event.target.closest("a")) page.downloads.open = false; });
    page.downloads.addEventListener("keydown", (event) => { if (event.key === "Escape") { page.downloads.open = false; page.downloads.firstChild.focus(); } });
  }

  function blank(title, text) {
    page.node.hidden = true;
    page.empty.hidden = false;
    put($("h2", page.empty), title);
    put($("p", page.empty), text);
  }
  function none() {
    close();
    id = "";
    blank("No run chosen", "Start one from the form, or open one from the list.");
  }
  function gone(error) {
    close();
    blank("This run is not there", error.message);
    id = "";
  }
  function close() { page.poll.stop(); page.charts.close(); page.log.close(); }

  function open(wanted) {
    if (wanted === id) { titled(); return again(); }
    close();
    id = wanted;
    detail = null;
    page.drawn = {};
    page.latest = null;
    page.empty.hidden = true;
    page.node.hidden = false;
    page.node.dataset.state = "";
    put(page.name, wanted);
    for (const part of ["sentence", "share"]) put(page[part], "");
    put(page.badge, "");
    for (const part of ["failure", "cards", "samples", "save", "discard", "resume", "anew", "sweep", "clone", "remove", "downloads"]) page[part].hidden = true;
    page.details.replaceChildren();
    page.done.style.width = "0";
    page.charts.open();
    page.log.open();
    page.poll.start();
  }
  // Polling ends with the run. Someone may have resumed it from a shell meanwhile: coming back asks once more.
  function again() { if (id && !page.poll.running()) page.poll.start(); }

  async function pull(current) {
    const was = over();
    const found = await FP.get(base());
    if (!current()) return undefined;
    detail = found;
    draw();
    if (was && !over()) { page.charts.resume(); page.log.resume(); }
    return over() ? "end" : undefined;
  }

  function draw() {
    const { summary, can } = detail;
    page.node.dataset.state = summary.state;
    put(page.name, summary.name || id);
    badge(page.badge, summary.state);
    put(page.sentence, plain(summary));
    advance(summary);
    titled();
    page.save.hidden = !can.stop || summary.state === "stopping";
    page.discard.hidden = !can.stop;
    page.resume.hidden = !can.resume;
    page.anew.hidden = can.stop || summary.state === "new" || !(detail.checkpoints || []).length;
    page.remove.hidden = !can.delete;
    page.sweep.hidden = !can.sweep;
    page.clone.hidden = page.downloads.hidden = false;
    const steps = detail.checkpoints || [];
    put(page.resume, summary.state === "new" ? "Start" : steps.length ? `Resume from step ${FP.num(Math.max(...steps))}` : "Start again");
    for (const part of ["save", "discard", "resume", "anew", "sweep", "remove"]) page[part].disabled = asked;
    page.log.ranks(detail.ranks || []);
    once("failure", detail.failure, failure);
    once("samples", detail.result && detail.result.samples, samples);
    once("details", [detail.spec, detail.command, detail.joining, detail.yaml, detail.script, steps, detail.result, detail.estimate], details);
    once("downloads", id, downloads);
    if (over()) once("over", summary.state, page.charts.redraw);
    cards();
  }
  function once(name, value, make) {
    const text = JSON.stringify(value === undefined ? null : value);
    if (page.drawn[name] === text) return;
    page.drawn[name] = text;
    make(value);
  }

  // The badge says the state and the box below says the failure: not twice.
  function plain({ state, sentence }) {
    let text = (sentence || "").replace(`${WORDS[state]}: `, "");
    if (detail.failure) text = text.replace(detail.failure.sentence, "");
    text = text.trim();
    if (text === `${WORDS[state]}.`) return "";
    return text.replace(/^./, (first) => first.toUpperCase());
  }
  function advance(summary) {
    const known = share(summary) !== null;
    const part = share(summary) || 0;
    page.done.style.width = `${100 * part}%`;
    page.progress.classList.toggle("fp-unknown", !known && !over());
    if (known) page.progress.setAttribute("aria-valuenow", Math.round(100 * part));
    else page.progress.removeAttribute("aria-valuenow");
    put(page.share, known ? `${Math.floor(100 * part)} %` : "");
  }
  function titled() {
    if (!detail || !seen()) return;
    const { summary } = detail;
    const part = over() || share(summary) === null ? "" : `${Math.floor(100 * share(summary))} % \u00b7 `;
    document.title = `${part}${summary.name || id} \u00b7 Footplate`;
  }

  function failure(found) {
    page.failure.hidden = !found;
    if (!found) return;
    page.failure.replaceChildren(...[el("h3", {}, Number.isFinite(found.rank) && (detail.ranks || []).length > 1 ? `What went wrong, first on rank ${found.rank}` : "What went wrong"),
      el("p.fp-failure-said", {}, found.sentence), found.help ? el("p", {}, found.help) : null,
      found.traceback ? fold("Traceback", el("pre.fp-code.fp-trace", { tabindex: 0 }, found.traceback), () => FP.copy(found.traceback, "Traceback")) : null].filter(Boolean));
  }

  // What is known so far; the final figures replace the running ones at the same places.
  function cards() {
    if (!detail) return;
    const result = detail.result || {};
    const last = page.latest || {};
    const now = (key) => (last[key] ? last[key].value : undefined);
    const seconds = result.seconds;
    const speed = result.tokens && seconds ? result.tokens / seconds : now("tokens_per_second");
    const { started, ended: end } = detail.summary;
    const made = [];
    if (Number.isFinite(result.exact_match_after)) made.push(hero(result));
    const both = (side) => [result[`rouge_l_${side}`], result[`bleu_${side}`]];
    const scored = (pair) => pair.map((value) => FP.num(100 * value, 3)).join(" \u00b7 ");
    if (both("after").every(Number.isFinite)) made.push(["ROUGE-L \u00b7 BLEU", scored(both("after")), both("before").every(Number.isFinite) ? `${scored(both("before"))} before training` : ""]);
    const loss = result.train_loss ?? now("loss");
    const evaluation = result.eval_loss ?? now("eval_loss");
    if (Number.isFinite(evaluation)) made.push(["Evaluation loss", FP.num(evaluation)]);
    const better = result.eval_reward_accuracy ?? now("eval_reward_accuracy") ?? now("reward_accuracy");
    const margin = result.eval_reward_margin ?? now("eval_reward_margin") ?? now("reward_margin");
    if (Number.isFinite(better)) made.push(["Better answer ahead", percent(better), "of the pairs"]);
    if (Number.isFinite(margin)) made.push(["Reward margin", FP.num(margin)]);
    if (Number.isFinite(loss)) made.push([Number.isFinite(result.train_loss) ? "Mean training loss" : "Training loss", FP.num(loss)]);
    if (Number.isFinite(speed)) made.push(["Tokens per second", FP.num(Math.round(speed))]);
    if (Number.isFinite(seconds)) made.push(["Training time", FP.duration(seconds)]);
    else if (started && !over()) made.push(["Time so far", FP.duration(Date.now() / 1000 - stamp(started))]);
    else if (started && end) made.push(["Time", FP.duration(stamp(end) - stamp(started))]);
    if (result.trainable_parameters) made.push(["Trained parameters", short(result.trainable_parameters), result.parameters ? `${percent(result.trainable_parameters / result.parameters)} of ${short(result.parameters)}` : ""]);
    const peaks = (result.peak_bytes || []).filter(Number.isFinite);
    const said = (detail.estimate || {}).measured_bytes;
    if (peaks.length) made.push(["Peak memory", FP.bytes(Math.max(...peaks)), said ? `estimated ${FP.bytes(said)}` : peaks.length > 1 ? "of the fullest rank" : ""]);
    page.cards.hidden = !made.some((card) => card[0] !== "Time so far" && card[0] !== "Time");
    once("cards", made.map((card) => (Array.isArray(card) ? card : card.textContent)), () =>
      page.cards.replaceChildren(...made.map((card) => (Array.isArray(card) ? el("div.fp-result", {}, el("dt", {}, card[0]), el("dd", {}, card[1]), card[2] ? el("dd.fp-dim", {}, card[2]) : null) : card))));
  }
  function hero({ exact_match_before: before, exact_match_after: after }) {
    const known = Number.isFinite(before);
    return el("div.fp-result.fp-hero", {}, el("dt", {}, "Exact match on held-out rows"),
      el("dd", {}, known ? [el("span.fp-was", {}, percent(before)), el("span.fp-arrow", { role: "img", "aria-label": "then" }, "\u2192")] : null, el("strong", {}, percent(after))),
      el("dd.fp-dim", {}, known ? "before training, and after" : "after training"));
  }
  function short(count) {
    for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (count >= size) return `${FP.num(count / size, 3)} ${unit}`;
    return FP.num(count);
  }
  const stamp = (time) => (typeof time === "number" ? time : Date.parse(time) / 1000);

  // The same object in another order of spaces or keys is the same answer, as the exact match in Python has it.
  function same(one, other) {
    const plain = (text) => { try { const value = JSON.parse(text); return typeof value === "object" ? JSON.stringify(sorted(value)) : text.trim(); } catch { return String(text ?? "").trim(); } };
    return plain(one) === plain(other);
  }
  function sorted(value) {
    if (Array.isArray(value)) return value.map(sorted);
    if (value && typeof value === "object") return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
    return value;
  }
  function samples(list) {
    page.samples.hidden = !list || !list.length;
    if (page.samples.hidden) return;
    const shown = 6;
    const answer = (row, name) => (row[name] === null || row[name] === undefined ? el("td.fp-dim", { "data-name": name === "before" ? "Before" : "After" }, "\u2013")
      : el("td", { "data-name": name === "before" ? "Before" : "After" }, el("div.fp-answer", { "data-right": String(same(row[name], row.wanted)) }, el("span.fp-mark", { role: "img", "aria-label": same(row[name], row.wanted) ? "right" : "wrong" }, same(row[name], row.wanted) ? "\u2713" : "\u2717"), el("pre", {}, row[name] || "(nothing)"))));
    const rows = list.map((row, n) => el("tr", { hidden: n >= shown }, el("td", { "data-name": "Prompt" }, el("div.fp-prompt", {}, row.prompt)), el("td", { "data-name": "Wanted" }, el("pre", {}, row.wanted)), answer(row, "before"), answer(row, "after")));
    const right = (name) => list.filter((row) => same(row[name], row.wanted)).length;
    const more = el("button.fp-chip", { type: "button", hidden: list.length <= shown, "aria-expanded": "false", onclick: () => {
      const all = more.getAttribute("aria-expanded") !== "true";
      more.setAttribute("aria-expanded", String(all));
      more.textContent = all ? "Show fewer" : `Show all ${list.length}`;
      rows.forEach((row, n) => (row.hidden = !all && n >= shown));
    } }, `Show all ${list.length}`);
    page.samples.replaceChildren(el("div.fp-panel-head", {}, el("h3", {}, "Answers on held-out rows"),
      el("span.fp-dim.fp-number", {}, `of these ${list.length}, ${right("before")} right before, ${right("after")} after`), el("span.fp-gap"), more),
      el("table", {}, el("thead", {}, el("tr", {}, ["Prompt", "Wanted", "Before", "After"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)));
  }

  function fold(title, body, copy) {
    return el("details.fp-fold", {}, el("summary", {}, title), copy ? el("button.fp-chip.fp-copy", { type: "button", onclick: copy }, "Copy") : null, body);
  }
  const said = (value) => (Array.isArray(value) ? value.join(", ") : value === null || value === "" ? "\u2013" : typeof value === "boolean" ? (value ? "yes" : "no") : typeof value === "number" && !Number.isInteger(value) ? FP.num(value) : String(value));
  function flat(tree, before = "") {
    return Object.entries(tree || {}).flatMap(([name, value]) => (value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${before}${name}.`) : [[before + name, value]]));
  }
  function details([spec, command, joining, yaml, script, steps, result, estimate]) {
    const rows = flat(spec);
    const text = (body) => el("pre.fp-code", { tabindex: 0 }, body);
    page.details.replaceChildren(...[
      fold("Configuration", rows.length ? el("table.fp-pairs", {}, el("tbody", {}, rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, said(value)))))) : el("p.fp-dim", {}, "All options have their defaults.")),
      (result || {}).peak_bytes || (estimate || {}).rows ? fold("Memory", memory(result || {}, estimate || {})) : null,
      command && fold("Command", text(command), () => FP.copy(command, "Command")),
      joining && fold("Other nodes", text(joining), () => FP.copy(joining, "Commands")),
      yaml && fold("spec.yaml", text(yaml), () => FP.copy(yaml, "spec.yaml")),
      script && fold("run.sh", text(script), () => FP.copy(script, "run.sh")),
      steps.length ? fold(steps.length === 1 ? "1 checkpoint" : `${steps.length} checkpoints`, el("p", {}, `At step ${[...steps].sort((a, b) => a - b).map((n) => FP.num(n)).join(", ")}.`)) : null,
    ].filter(Boolean));
  }
  // What was said of each device before, and what each rank held. torch does not see what the driver takes.
  function memory({ peak_bytes: peaks = [], reserved_bytes: reserved = [] }, { rows = [], device_bytes: whole }) {
    const line = (cells, tag = "td") => el("tr", {}, cells.map((cell, i) => el(i ? `${tag}.fp-n` : tag, {}, cell)));
    const more = reserved.some(Number.isFinite);
    const parts = rows.filter((row) => row.where === "device" && row.bytes > 0);
    return el("div.fp-memory-tables", {},
      peaks.length ? el("table.fp-rows", {}, el("thead", {}, line(["Measured", "Peak", ...(more ? ["Reserved"] : [])], "th")), el("tbody", {}, peaks.map((peak, rank) => line([`Rank ${rank}`, FP.bytes(peak), ...(more ? [FP.bytes(reserved[rank])] : [])])))) : null,
      parts.length ? el("table.fp-rows", {}, el("thead", {}, line(["Estimated, each device", FP.bytes(whole)], "th")), el("tbody", {}, parts.map((row) => line([row.name, FP.bytes(row.bytes)])))) : null);
  }
  function downloads() {
    const files = [["Report", "report.png"], ["Metrics", "metrics.csv"], ["Log", "log.txt"], ["Configuration", "spec.yaml"]];
    page.downloads.lastChild.replaceChildren(...files.map(([name, file]) => el("a", { href: FP.url(`${base()}/${file}`), download: "" }, name, el("span.fp-dim", {}, file))));
  }

  // What a person can do. The runs page uses resume and remove too.
  async function act(work) {
    if (asked) return;
    asked = true;
    if (detail) draw();
    try {
      await work();
    } catch (error) {
      FP.toast(error.message, "error");
    } finally {
      asked = false;
      if (detail) draw();
      if (id) page.poll.start();
    }
  }
  const route = (run) => `api/runs/${encodeURIComponent(run)}`;
  async function stop(save) {
    const question = save ? "Stop this run? It ends its step, saves a checkpoint, and can be resumed from there." : "Stop this run without saving? Everything since the last checkpoint is lost.";
    if (await FP.confirm(question, save ? "Stop and save" : "Stop without saving", !save)) await act(() => FP.post(`${base()}/stop`, { save }));
  }
  const resume = (anew) => act(async () => {
    await FP.post(`${base()}/resume`, { anew });
    detail = await FP.get(base());
    page.charts.resume();
    page.log.resume();
  });
  async function anew() {
    if (await FP.confirm("Begin this run again at step 0? Its checkpoints are removed.", "Begin anew", true)) await resume(true);
  }
  const sweep = () => act(async () => {
    const { count } = await FP.post(`${base()}/sweep`);
    FP.toast(count === 1 ? "One process was ended." : `${count} processes were ended.`);
  });
  async function remove() {
    const run = id;
    if (!(await askRemove(page.name.textContent))) return;
    await act(async () => {
      await FP.remove(route(run));
      id = "";
      detail = null;
      close();
      FP.query.set({ run: null }, { replace: true });
      FP.view("runs");
      FP.toast("Run deleted.");
    });
  }
  const askRemove = (name) => FP.confirm(`Delete ${name}? Its log, metrics, checkpoints and model are removed from the disk for good.`, "Delete", true);

  return { mount, badge, ended, share, put, route, askRemove, stamp, WORDS };
})();
