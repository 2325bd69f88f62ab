// What every part of the page needs: requests, elements, the address, notices, numbers. No data ever becomes HTML.
"use strict";
window.FP = (() => {
  const listeners = {};
  const root = () => ((window.gradio_config && window.gradio_config.root) || "").replace(/\/$/, "");
  const url = (path) => `${root()}/${path.replace(/^\//, "")}`;

  const PATIENCE = 30000; // ms; a request that got lost on its way must not stop the asking for ever
  async function request(method, path, body) {
    let answer;
    try {
      answer = await fetch(url(path), {
        method,
        headers: body === undefined ? {} : { "content-type": "application/json" },
        body: body === undefined ? undefined : JSON.stringify(body),
        cache: "no-store",
        signal: method === "GET" ? AbortSignal.timeout(PATIENCE) : undefined,
      });
    } catch {
      throw Object.assign(new Error("The server does not answer."), { offline: true });
    }
    if (answer.status === 204) return null;
    const type = answer.headers.get("content-type") || "";
    const data = type.includes("json") ? await answer.json() : { error: `The server answered ${answer.status}.` };
    if (!answer.ok) throw Object.assign(new Error(data.error || `The server answered ${answer.status}.`), { status: answer.status, data });
    return data;
  }

  // el("button.fp-link", {onclick: f, "aria-label": "x"}, "text", child)
  function el(tag, attributes = {}, ...children) {
    const [name, ...classes] = tag.split(".");
    const node = document.createElement(name);
    if (classes.length) node.className = classes.join(" ");
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }
  const $ = (selector, inside = document) => inside.querySelector(selector);

  const on = (event, listener) => (listeners[event] = listeners[event] || []).push(listener);
  const emit = (event, detail) => (listeners[event] || []).forEach((listener) => listener(detail));

  const query = {
    get: (name) => new URLSearchParams(location.search).get(name),
    set(changes, { replace = false } = {}) {
      const found = new URLSearchParams(location.search);
      for (const [name, value] of Object.entries(changes)) value ? found.set(name, value) : found.delete(name);
      const text = found.toString();
      if (text === location.search.slice(1)) return;
      history[replace ? "replaceState" : "pushState"](null, "", text ? `?${text}` : location.pathname);
    },
  };

  function toast(text, level = "info", action, more) { // more: what is read slowly; it stays until it is dismissed
    let area = $("#fp-toasts");
    if (!area) document.body.append((area = el("div", { id: "fp-toasts", role: "status", "aria-live": "polite" })));
    const close = () => note.remove();
    const note = el("div.fp-toast", { "data-level": level }, el("div", {}, text, more),
      action && el("button.fp-link", { type: "button", onclick: () => { close(); action.run(); } }, action.label),
      el("button.fp-icon", { type: "button", "aria-label": "Dismiss", onclick: close }, "\u00d7"));
    area.replaceChildren(note);
    if (!more) setTimeout(close, level === "error" ? 12000 : 7000);
  }

  function confirm(text, label = "OK", final = false) {
    return new Promise((done) => {
      const close = (answer) => { dialog.close(); dialog.remove(); done(answer); };
      const dialog = el("dialog.fp-dialog", { oncancel: () => close(false) }, el("p", {}, text),
        el("div.fp-dialog-row", {},
          el("button.fp-button", { type: "button", onclick: () => close(false) }, "Cancel"),
          el(`button.fp-button.${final ? "fp-final" : "fp-primary"}`, { type: "button", onclick: () => close(true) }, label)));
      document.body.append(dialog);
      dialog.showModal();
    });
  }

  async function copy(text, what) {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // no clipboard outside https and localhost
      const area = el("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    toast(`${what} copied.`);
  }

  function download(name, text) {
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  function num(value, digits = 4) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1000 ? Math.max(digits, Math.ceil(Math.log10(size + 1))) : digits });
  }
  function bytes(value) {
    if (!Number.isFinite(value)) return "\u2013";
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let step = 0;
    while (Math.abs(value) >= 1024 && step < units.length - 1) { value /= 1024; step += 1; }
    return `${value.toFixed(value < 10 && step > 2 ? 1 : 0)} ${units[step]}`;
  }
  function duration(seconds) {
    if (!Number.isFinite(seconds)) return "\u2013";
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  }

  return {
    url, el, $, on, emit, query, toast, confirm, copy, download, num, bytes, duration,
    get: (path) => request("GET", path), post: (path, body = {}) => request("POST", path, body),
    remove: (path) => request("DELETE", path),
  };
})();
