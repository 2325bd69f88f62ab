// Draws what the check answered: verdict, findings with fixes, memory, preview. Everything by textContent.
"use strict";
FP.verdict = (() => {
  const { el, $ } = FP;
  let script = "";
  let tab = "command";
  const MOST = 3; // fixes on a card; the card of the memory has all that are about it

  function draw(answer) {
    const { verdict, findings, invalid } = answer;
    const box = $("#fp-verdict");
    box.dataset.level = verdict.level;
    $(".fp-verdict-text", box).textContent = verdict.text;
    $(".fp-verdict-more", box).textContent = [answer.place && `On ${answer.place}`, answer.summary].filter(Boolean).join(": ");
    stopped(halts(verdict));
    mendable(findings.filter((f) => f.level === "error"));
    marks(findings, invalid);
    FP.form.offer(answer.names || {});
    cards(findings, invalid);
    memory(answer.memory, findings.find((f) => ["MEM001", "MEM002"].includes(f.code)));
    preview(answer.preview);
  }

  function mendable(errors) {
    const safe = errors.filter((f) => f.fixes.some((x) => x.safe));
    $("#fp-fix-all").hidden = !safe.length;
    $("#fp-fix-all").textContent = safe.length === errors.length ? "Fix everything" : "Fix what is safe";
  }

  function offline(text) {
    const box = $("#fp-verdict");
    box.dataset.level = "checking";
    $(".fp-verdict-text", box).textContent = "No answer";
    $(".fp-verdict-more", box).textContent = text;
    stopped(true);
  }

  const halts = (verdict) => ["error", "invalid"].includes(verdict.level);

  // Start, or what takes its place for another machine; Export above stays, so that nothing is lost.
  function stopped(yes) {
    for (const name of ["#fp-start", "#fp-take"]) $(name).disabled = yes;
  }

  function marks(findings, invalid) {
    const found = {};
    const rank = { advice: 1, warning: 2, error: 3 };
    for (const f of findings) for (const name of f.fields) if (rank[f.level] > (rank[found[name]] || 0)) found[name] = f.level;
    for (const p of invalid) found[p.field] = "error";
    delete found[""];
    for (const name of Object.keys(found)) if (found[name] === "advice") delete found[name];
    FP.form.outline(found);
  }

  function cards(findings, invalid) {
    const list = invalid.map((p) => card({ level: "error", title: p.field ? FP.form.label(p.field) : "This is no run", message: `${p.field ? "This value " : ""}${p.message}.`, fields: p.field ? [p.field] : [], fixes: [] }));
    list.push(...findings.map(card));
    $("#fp-findings").replaceChildren(...list);
  }

  function card(f) {
    const links = f.fields.map((name) => el("button.fp-field-link", { type: "button", onclick: () => FP.form.go(name) }, FP.form.label(name)));
    return el("article.fp-finding", { "data-level": f.level, "data-code": f.code },
      el("header", {}, el("span.fp-level", {}, { error: "Error", warning: "Warning", advice: "Advice" }[f.level]), el("h4", {}, f.title), el("span.fp-gap"), f.code && el("a.fp-code-link", { href: FP.url(`rules#${f.code}`), target: "_blank", rel: "noopener" }, f.code)),
      el("p", {}, f.message),
      links.length ? el("p.fp-links", {}, ...links) : null,
      ...f.fixes.slice(0, MOST).map(fix),
      f.source && el("p.fp-source", {}, `Source: ${f.source}`));
  }

  const take = (x) => FP.form.fill(x.patch, { undo: `${x.label}: done.` });
  function fix(x) {
    return el("div.fp-fix", {}, el("button.fp-button", { type: "button", onclick: () => take(x) }, x.label), price(x), diffs(x.diff));
  }
  const price = (x) => el("span.fp-dim", {}, [x.cost, x.safe ? "" : "changes what is learned"].filter(Boolean).join("; "));
  const diffs = (list) => el("span.fp-diffs", {}, ...list.map((d) => el("span.fp-diff", {}, `${d.label}: `, el("s", {}, say(d.from)), " \u2192 ", el("b", {}, say(d.to)))));
  const say = (value) => (value === "" || value === null ? "empty" : value === true ? "on" : value === false ? "off" : typeof value === "number" ? FP.num(value) : String(value));

  function memory(m, full) {
    const box = $("#fp-memory");
    box.hidden = !m;
    if (!m) return;
    const open = $("details:not(.fp-whatif)", box)?.open;
    const level = m.fits === false ? "error" : m.capacity_bytes && m.high_bytes > m.capacity_bytes ? "warning" : "ok";
    const rows = m.rows.filter((r) => r.where === "device" && r.bytes > 0).sort((a, b) => b.bytes - a.bytes);
    const scale = Math.max(m.capacity_bytes || 0, m.high_bytes) || 1;
    const text = m.unknown ? `Unknown, because ${m.unknown}` : `${FP.bytes(m.device_bytes)} of ${FP.bytes(m.capacity_bytes)}`;
    box.replaceChildren(
      el("div.fp-card-head", {}, el("h3", {}, m.device_label ? `Memory, ${m.device_label}` : "Memory"), el("span.fp-gap"), el("span.fp-figure", { "data-level": level }, text)),
      m.fetch ? el("button.fp-link", { type: "button", onclick: (event) => fetchConfig(event.target, m.fetch) }, "Read its config.json from the hub") : "",
      m.unknown ? "" : el("div.fp-bar", { role: "img", "aria-label": text, "data-level": level }, ...rows.map((r, i) => part(r, i, scale))),
      m.unknown ? "" : doubt(m, scale),
      full && full.fixes.length ? fitting(full) : "",
      m.unknown ? "" : el("details", { open }, el("summary", {}, "Where it goes"), table(m.rows)),
      m.unknown ? "" : FP.whatif.place());
  }
  function fitting(full) {
    const row = (x) => el("tr", {}, el("td", {}, el("button.fp-link", { type: "button", onclick: () => take(x) }, x.label), el("div.fp-dim", {}, price(x))), el("td.fp-n", {}, FP.bytes(x.peak)));
    return el("table.fp-rows.fp-fitting", {}, el("caption", {}, full.level === "error" ? "What would make it fit" : "What would leave more room"), el("tbody", {}, ...full.fixes.map(row)));
  }
  async function fetchConfig(button, model) {
    button.disabled = true;
    button.textContent = "Reading its config.json";
    try {
      await FP.post("api/config", model);
    } catch (error) {
      FP.toast(error.message, "error");
    }
    FP.emit("edited");
  }
  function doubt(m, scale) {
    const said = `As sure as it is: ${FP.bytes(m.low_bytes)} to ${FP.bytes(m.high_bytes)}`;
    const line = el("span", { title: said });
    line.style.left = `${(100 * m.low_bytes) / scale}%`;
    line.style.width = `${(100 * (m.high_bytes - m.low_bytes)) / scale}%`;
    const end = el("i", { title: `${FP.bytes(m.capacity_bytes)} free` });
    end.style.left = `${(100 * m.capacity_bytes) / scale}%`;
    return el("div.fp-doubt", { role: "img", "aria-label": said }, line, scale > m.capacity_bytes && m.capacity_bytes ? end : "");
  }
  function part(r, i, scale) {
    const node = el("span", { title: `${r.name}: ${FP.bytes(r.bytes)}`, "data-part": i % 6 });
    node.style.width = `${(100 * r.bytes) / scale}%`;
    return node;
  }
  function table(rows) {
    const part = (where, title) => {
      const some = rows.filter((r) => r.where === where && r.bytes > 0);
      return some.length ? [el("tr", {}, el("th", { colspan: 3 }, title)), ...some.map((r) => el("tr", {}, el("td", {}, r.name), el("td.fp-n", {}, FP.bytes(r.bytes)), el("td.fp-dim", {}, r.formula)))] : [];
    };
    return el("table.fp-rows", {}, el("tbody", {}, ...part("device", "Each device"), ...part("host", "Host memory"), ...part("disk", "Disk")));
  }

  function preview(p) {
    const box = $("#fp-preview");
    box.hidden = !p;
    if (!p) return;
    script = p.script;
    const texts = { command: p.command, ...Object.fromEntries([...p.others, ...p.files].map((f) => [f.name, f.text])) };
    if (!(tab in texts)) tab = "command";
    $("#fp-preview-tabs").replaceChildren(...Object.keys(texts).map((name) => el("button", { type: "button", role: "tab", "aria-selected": String(name === tab), onclick: () => { tab = name; preview(p); } }, name === "command" ? "Command" : name)),
      el("span.fp-gap"), el("button.fp-link", { type: "button", onclick: () => FP.copy(texts[tab], tab === "command" ? "Command" : tab) }, "Copy"));
    const pre = $("#fp-preview-text");
    if (pre.textContent !== texts[tab]) pre.textContent = texts[tab];
    const file = p.files.find((f) => f.name === tab);
    $("#fp-preview-notes").textContent = file ? file.about : p.notes.join(" ");
  }

  return { draw, offline, diffs, halts, script: () => script };
})();
