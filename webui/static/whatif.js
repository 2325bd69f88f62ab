// Every strategy for what the form holds: asked when it is opened, sorted by a click, applied by another.
"use strict";
FP.whatif = (() => {
  const { el } = FP;
  let column = "";
  let said = null; // the last answer
  let latest = 0;

  const COLUMNS = [
    ["name", "Strategy", (r) => r.name],
    ["device_bytes", "Device", (r) => FP.bytes(r.device_bytes)],
    ["host_bytes", "Host", (r) => FP.bytes(r.host_bytes)],
    ["cost", "Sent a step", (r) => FP.bytes(r.sent_bytes + r.hosted_bytes)],
  ];

  // One box for good, so that it stays open while the card around it is drawn anew; then it asks again.
  const rows = el("div");
  const box = el("details.fp-whatif", { ontoggle: () => box.open && fill() }, el("summary", {}, "What if"), rows);
  function place() {
    if (box.open) fill();
    return box;
  }

  async function fill() {
    const mine = ++latest;
    try {
      const answer = await FP.post("api/whatif", { values: FP.form.values(), machine: FP.query.get("machine") || "" });
      if (mine !== latest) return;
      said = answer;
      draw();
    } catch (error) {
      rows.replaceChildren(el("p.fp-dim", {}, error.message));
    }
  }

  function draw() {
    const key = (r) => (column === "cost" ? r.sent_bytes + r.hosted_bytes : r[column]);
    const list = column ? [...said.rows].sort((a, b) => (key(a) > key(b) ? 1 : -1)) : said.rows;
    const head = COLUMNS.map(([name, title], i) => el("th", { class: i ? "fp-n" : undefined, "aria-sort": column === name ? "ascending" : undefined }, el("button.fp-link", { type: "button", onclick: () => { column = name; draw(); } }, title)));
    rows.replaceChildren(said.best ? best(said.best) : el("p.fp-dim", {}, "Nothing runs here as it is: see the findings."), el("table.fp-rows", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...list.map(row))));
  }

  const apply = (r) => FP.form.fill(r.patch, { undo: `${r.name}: done.` });
  function best(r) {
    return el("p.fp-best", {}, el("b", {}, r.now ? `${r.name}, as it is` : r.name), ": ", r.why, r.now ? "" : el("button.fp-link", { type: "button", onclick: () => apply(r) }, "Use it"));
  }
  function row(r) {
    const why = r.obstacle || (r.fits ? "" : "does not fit");
    const name = r.now ? el("b", {}, r.name) : el("button.fp-link", { type: "button", onclick: () => apply(r) }, r.name);
    return el("tr", { "data-runs": String(r.runs) }, el("td", {}, name, why && el("div.fp-dim", {}, why)), ...COLUMNS.slice(1).map(([, , say]) => el("td.fp-n", {}, say(r))));
  }

  return { place };
})();
