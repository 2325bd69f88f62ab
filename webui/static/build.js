// The build page: check after every edit, drafts, presets, import and export, start. And which view is shown.
"use strict";
(() => {
  const { $, el } = FP;
  const WAIT = 40; // ms after the last key: quick, and one call a word
  let seq = 0;
  let drawn = 0;
  let timer = 0;
  let draft = "";
  let key = newKey(); // one start a key: a double click or a retry makes one run
  let last = null;

  function newKey() { return Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join(""); }

  // fresh: what is drawn is what the form holds.
  const fresh = (yes) => ($("#fp-verdict").dataset.fresh = yes ? "yes" : "no");
  function later() { fresh(false); clearTimeout(timer); timer = setTimeout(check, WAIT); }

  async function check() {
    const mine = ++seq;
    if (!draft) remember(newKey());
    try {
      const answer = await FP.post("api/check", { values: FP.form.values(), draft, machine: place(), seq: mine });
      if (mine < drawn) return; // a later one is drawn already
      drawn = mine;
      last = answer;
      FP.verdict.draw(answer);
      fresh(mine === seq);
      const name = document.querySelector("#logging-run_name input, #logging-run_name textarea");
      if (name) name.placeholder = answer.title || "Run name";
    } catch (error) {
      if (mine === seq) FP.verdict.offline(`${error.message} Your edits stay here; trying again.`);
      if (error.offline && mine === seq) timer = setTimeout(check, 2000);
    }
  }

  function remember(id) {
    draft = id;
    localStorage.setItem("fp-draft", id);
    FP.query.set({ draft: id }, { replace: true });
  }

  async function begin() {
    const names = await presets();
    const id = FP.query.get("draft") || localStorage.getItem("fp-draft");
    const saved = id ? await FP.get(`api/drafts/${encodeURIComponent(id)}`).catch(() => null) : null;
    if (saved) {
      remember(id);
      FP.form.fill(saved.values);
    } else if (names.length) {
      await preset(names[0].name, false);
    } else {
      FP.form.fill({});
    }
  }

  // Which machine it is for: this one, or one that it is planned for; a run can only be started on this one.
  const place = () => FP.query.get("machine") || "";
  async function machines() {
    const menu = $("#fp-machine");
    const found = await FP.get("api/machines");
    menu.replaceChildren(...found.map((m) => el("option", { value: m.name }, m.name ? m.label : `this machine: ${m.label}`)));
    if (!found.some((m) => m.name === place())) FP.query.set({ machine: "" }, { replace: true });
    menu.addEventListener("change", () => planFor(menu.value));
    planFor(place());
  }
  function planFor(name) {
    FP.query.set({ machine: name }, { replace: true });
    $("#fp-machine").value = name;
    $("#fp-start").hidden = Boolean(name);
    $("#fp-take").hidden = !name;
    document.body.classList.toggle("fp-planned", Boolean(name));
    about();
    if (draft) check();
  }

  let known = [];
  async function presets() {
    known = await FP.get("api/presets");
    const menu = $("#fp-presets");
    menu.replaceChildren(el("option", { value: "" }, "Choose a preset"), ...known.map((p) => el("option", { value: p.name }, p.title)), el("option", { value: " " }, "Plain defaults"));
    menu.addEventListener("change", () => preset(menu.value, true));
    return known;
  }
  async function preset(name, undo) {
    if (!name) return;
    const found = known.find((p) => p.name === name);
    const values = found ? (await FP.get(`api/presets/${encodeURIComponent(name)}`)).values : FP.form.defaults();
    $("#fp-presets").value = name;
    about();
    FP.form.fill(values, { undo: undo ? `${found ? found.title : "Defaults"} loaded.` : "" });
  }

  function about() { // of the preset, with a way to the machine that it is for
    const found = known.find((p) => p.name === $("#fp-presets").value);
    const other = found && found.machine && found.machine !== place();
    const go = other && el("button.fp-link", { type: "button", onclick: () => planFor(found.machine) }, "Plan for its machine");
    $("#fp-preset-about").replaceChildren(el("span", { title: found ? found.about : "" }, found ? found.about : ""), ...(go ? [go] : []));
  }

  async function start() {
    const button = $("#fp-start");
    button.disabled = true;
    button.textContent = "Starting";
    try {
      if ($("#fp-verdict").dataset.fresh === "no") { clearTimeout(timer); await check(); } // what runs is what is shown
      const { id } = await FP.post("api/runs", { values: FP.form.values(), key });
      key = newKey();
      view("run", id);
    } catch (error) {
      FP.toast(error.message, "error");
      if (error.status === 422) check();
    } finally {
      button.textContent = "Start";
      button.disabled = Boolean(last) && FP.verdict.halts(last.verdict);
    }
  }

  async function fixAll() { // one change, and one Undo
    const found = await FP.post("api/fix", { values: FP.form.values(), machine: place() });
    const count = `${found.count} ${found.count === 1 ? "fix" : "fixes"} applied.`;
    const left = found.left.length ? ` Left: ${found.left.join("; ")}.` : "";
    FP.form.fill(found.patch, { undo: count + left, more: FP.verdict.diffs(found.diff) });
  }

  async function clone(id) {
    const { values } = await FP.get(`api/runs/${encodeURIComponent(id)}/values`);
    view("build");
    FP.form.fill(values, { undo: "Copied into the form." });
  }

  async function importFile(event) {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      const { values, kept } = await FP.post("api/import", { yaml: await file.text(), values: FP.form.values() });
      const rest = kept.length ? ` Kept as further keys: ${kept.join(", ")}.` : "";
      FP.form.fill(values, { undo: `${file.name} loaded.${rest}` });
    } catch (error) {
      FP.toast(`${file.name}: ${error.message}`, "error");
    }
  }
  async function exportFile() {
    try {
      const { yaml } = await FP.post("api/export", { values: FP.form.values() });
      FP.download(`${(last && last.title) || "run"}.yaml`.replace(/[^\w.-]+/g, "-"), yaml);
    } catch (error) {
      FP.toast(error.message, "error");
    }
  }

  function view(tab, run) {
    FP.query.set(run ? { tab, run } : { tab });
    show();
  }
  function show() {
    const run = FP.query.get("run");
    const tab = FP.query.get("tab") || (run ? "run" : "build");
    document.body.dataset.tab = ["build", "run", "runs"].includes(tab) ? tab : "build";
    for (const link of document.querySelectorAll(".fp-top nav a[data-tab]")) {
      link.toggleAttribute("aria-current", link.dataset.tab === tab);
      if (link.dataset.tab === "run") { link.hidden = !run; link.href = `?tab=run&run=${encodeURIComponent(run || "")}`; }
    }
    FP.emit("tab", tab);
    if (tab === "run" && run) FP.emit("run", run);
  }

  function follow(event) { // links of the page itself, without loading it again
    const link = event.target.closest("a[href^='?tab=']");
    if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
    event.preventDefault();
    const found = new URLSearchParams(link.getAttribute("href").slice(1));
    view(found.get("tab"), found.get("run") || undefined);
    window.scrollTo(0, 0);
  }

  function theme() {
    const wanted = localStorage.getItem("fp-theme");
    if (wanted) document.body.classList.toggle("dark", wanted === "dark");
    $("#fp-theme").addEventListener("click", () => {
      const dark = document.body.classList.toggle("dark");
      localStorage.setItem("fp-theme", dark ? "dark" : "light");
      FP.emit("theme");
    });
  }

  FP.view = view;
  FP.ready = async (described) => {
    FP.form.start(described);
    theme();
    FP.on("edited", later);
    FP.on("clone", (id) => clone(id).catch((error) => FP.toast(error.message, "error")));
    $("#fp-fix-all").addEventListener("click", () => fixAll().catch((error) => FP.toast(error.message, "error")));
    $("#fp-start").addEventListener("click", start);
    $("#fp-import").addEventListener("click", () => $("#fp-import-file").click());
    $("#fp-import-file").addEventListener("change", importFile);
    for (const button of ["#fp-export", "#fp-take"]) $(button).addEventListener("click", exportFile);
    $("#fp-copy-script").addEventListener("click", () => FP.copy(FP.verdict.script(), "Script"));
    document.addEventListener("click", follow);
    window.addEventListener("popstate", show);
    FPRun.mount();
    FPRuns.mount();
    show();
    await machines().catch(() => {});
    await begin().catch((error) => FP.verdict.offline(error.message));
    document.body.dataset.ready = "yes";
  };
})();
