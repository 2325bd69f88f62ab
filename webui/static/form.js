// The form's values: read them from Gradio, write them back, show and hide, sections, outlines.
"use strict";
FP.form = (() => {
  const { el, $ } = FP;
  let about = null; // {names, deciding, options}
  let values = {};
  let pending = null; // values on their way into the widgets
  const past = []; // snapshots for undo

  const id = (name) => name.replace(".", "-");
  const attribute = (name) => `data-${name.replace(/[._]/g, "-")}`;

  function start(described) {
    about = described;
    values = Object.fromEntries(about.names.map((name) => [name, about.options[name].default]));
    document.querySelectorAll(".fp-section").forEach(prepare);
    document.querySelectorAll(".fp-more").forEach((button) => button.addEventListener("click", () => more(button)));
    document.addEventListener("input", typed, true);
  }

  function prepare(section) {
    const head = $(".fp-head", section);
    head.addEventListener("click", () => open(section, section.classList.contains("fp-closed")));
    const key = section.id.replace("fp-section-", "");
    open(section, localStorage.getItem(`fp-open-${key}`) !== "no" && (localStorage.getItem(`fp-open-${key}`) || ["model", "data", "method", "train"].includes(key)));
  }

  function open(section, yes) {
    section.classList.toggle("fp-closed", !yes);
    $(".fp-head", section).setAttribute("aria-expanded", yes ? "true" : "false");
    localStorage.setItem(`fp-open-${section.id.replace("fp-section-", "")}`, yes ? "yes" : "no");
  }

  function more(button, yes = button.getAttribute("aria-expanded") !== "true") {
    button.setAttribute("aria-expanded", yes ? "true" : "false");
    button.textContent = yes ? "Fewer options" : "More options";
    button.closest(".fp-body").classList.toggle("fp-all", yes);
  }

  // Gradio's handler for every edit.
  function edited(list) {
    about.names.forEach((name, i) => (values[name] = list[i]));
    changed();
  }

  // Gradio tells of keys alone: not of what is pasted, dragged, undone or filled in by the browser.
  function typed(event) {
    const field = event.target.dataset?.testid === "textbox" && event.target.closest(".fp-field");
    const name = field && about.names.find((one) => id(one) === field.id);
    if (!name || values[name] === event.target.value) return;
    values[name] = event.target.value;
    changed();
  }

  function changed() {
    show();
    FP.emit("edited", values);
  }

  const word = (value) => String(value);
  function show() {
    for (const name of about.deciding) document.body.setAttribute(attribute(name), word(values[name]));
    document.querySelectorAll(".fp-section").forEach(said);
    for (const name of about.names) {
      const field = document.getElementById(id(name));
      if (!field) continue;
      field.classList.toggle("fp-set", !same(values[name], about.options[name].default));
      press(field, name);
    }
  }
  const same = (a, b) => String(a ?? "") === String(b ?? "");
  const holds = (condition) => Object.entries(condition).every(([other, allowed]) => allowed.includes(word(values[other])));
  const shown = (name) => about.options[name].when.some(holds);

  // What a closed section says: its first value, and what differs from the defaults.
  function said(section) {
    const parts = [];
    for (const field of section.querySelectorAll(".fp-field")) {
      const name = about.names.find((n) => id(n) === field.id);
      if (!name || !shown(name) || parts.length >= 4) continue;
      const option = about.options[name];
      const value = values[name];
      if (parts.length && same(value, option.default)) continue;
      if (option.kind === "bool") { if (value) parts.push(option.label.toLowerCase()); continue; }
      if (value === "" || value === null || / n /.test(option.choices[value])) continue; // "Every n steps": the number follows
      const unit = option.unit && Number(value) === 1 ? option.unit.replace(/s$/, "") : option.unit;
      parts.push(option.choices[value] || `${option.label.toLowerCase()} ${String(value).split("\n")[0].slice(0, 40)}${unit ? " " + unit : ""}`);
    }
    $(".fp-head-said", section).textContent = parts.join(" \u00b7 ");
  }

  function fill(changes, { undo = "", more = null, quiet = false } = {}) {
    if (undo) past.push({ ...values });
    values = { ...values, ...changes };
    pending = about.names.map((name) => values[name]);
    document.getElementById("fp-fill").click();
    if (quiet) show(); else changed();
    if (undo) FP.toast(undo, "info", { label: "Undo", run: back }, more);
  }
  function filling() { return pending; }
  function back() { if (past.length) fill(past.pop()); }

  // Names found in the model, below the fields that want some: a click adds one, or takes it away.
  const chosen = (name) => String(values[name] || "").split(/[\s,]+/).filter(Boolean);
  function offer(found) {
    for (const [name, names] of Object.entries(found)) {
      const field = document.getElementById(id(name));
      if (!field) continue;
      const box = $(".fp-names", field) || field.appendChild(el("div.fp-names", { role: "group", "aria-label": "Names in this model" }));
      if (box.textContent !== names.join("")) box.replaceChildren(...names.map((one) => el("button.fp-name", { type: "button", onclick: () => toggle(name, one) }, one)));
      press(field, name);
    }
  }
  function toggle(name, one) { // from what is chosen now: two quick clicks choose two
    const now = chosen(name);
    fill({ [name]: (now.includes(one) ? now.filter((n) => n !== one) : [...now, one]).join(", ") });
  }
  function press(field, name) {
    for (const button of field.querySelectorAll(".fp-name")) button.setAttribute("aria-pressed", String(chosen(name).includes(button.textContent)));
  }

  function outline(marks) { // {name: level}
    document.querySelectorAll(".fp-field[data-level]").forEach((f) => f.removeAttribute("data-level"));
    document.querySelectorAll(".fp-section[data-level]").forEach((s) => s.removeAttribute("data-level"));
    for (const [name, level] of Object.entries(marks)) {
      const field = document.getElementById(id(name));
      if (!field) continue;
      field.setAttribute("data-level", level);
      const section = field.closest(".fp-section");
      if (section && section.getAttribute("data-level") !== "error") section.setAttribute("data-level", level);
    }
  }

  function go(name) {
    const field = document.getElementById(id(name));
    if (!field) return;
    const section = field.closest(".fp-section");
    if (section) open(section, true);
    const rare = field.closest(".fp-rare");
    if (rare) more($(".fp-more", rare.closest(".fp-body")), true);
    field.scrollIntoView({ block: "center", behavior: "smooth" });
    const input = field.querySelector("input:not([type=radio]), textarea, input:checked");
    if (input) input.focus({ preventScroll: true });
    field.classList.add("fp-flash");
    setTimeout(() => field.classList.remove("fp-flash"), 1200);
  }

  const label = (name) => about.options[name]?.label || name;
  return { start, edited, fill, filling, back, outline, offer, go, label, values: () => ({ ...values }), defaults: () => Object.fromEntries(about.names.map((n) => [n, about.options[n].default])) };
})();
