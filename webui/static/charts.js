// The charts: uPlot on series that the server has thinned; zoom asks for the part in full detail.
"use strict";
window.FPCharts = (() => {
  const { el } = FP;
  const HEIGHT = 196;
  const POINTS = 1000;
  const CHARTS = [
    { key: "loss", title: "Loss", name: "train", second: "eval_loss", secondName: "evaluation", smooth: true, log: true, best: "lowest" },
    // Of stages that compare answers alone: such a card is there only where its series is.
    { key: "reward_margin", title: "Reward margin", name: "train", second: "eval_reward_margin", secondName: "evaluation", smooth: true, best: "highest", some: true },
    { key: "reward_accuracy", title: "Better answer ahead", name: "train", second: "eval_reward_accuracy", secondName: "evaluation", smooth: true, best: "highest", some: true },
    { key: "reward_chosen", title: "Rewards", name: "chosen", second: "reward_rejected", secondName: "rejected", best: "highest", some: true },
    { key: "kl", title: "KL to the reference", name: "train", second: "eval_kl", secondName: "evaluation", smooth: true, best: "highest", some: true },
    { key: "reward_mean", title: "Mean reward", name: "train", second: "eval_reward_mean", secondName: "evaluation", smooth: true, best: "highest", some: true },
    { key: "learning_rate", title: "Learning rate", name: "rate", log: true, best: "highest" },
    { key: "grad_norm", title: "Gradient norm", name: "norm", smooth: true, log: true, best: "highest" },
    { key: "tokens_per_second", title: "Tokens per second", name: "tokens/s", smooth: true, best: "highest" },
  ];
  const remembered = (name, otherwise) => { const found = localStorage.getItem(name); return found === null ? otherwise : found; };
  const whole = (value) => Math.round(value).toLocaleString("en");
  const colour = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

  // Exponential mean that starts unbiased, of windows of 2^k points: least and greatest of a bucket alternate in a
  // long series, and a line through them would be a band. share: 0 to 0.99.
  function smoothed({ x, y }, share) {
    const window = 2 ** Math.max(0, Math.ceil(Math.log2(x.length / 400)));
    const found = { x: [], y: [] };
    let mean = 0;
    let weight = 0;
    for (let i = 0; i < x.length; i += window) {
      const part = y.slice(i, i + window).filter(Number.isFinite);
      if (!part.length) continue;
      mean = mean * share + (part.reduce((a, b) => a + b) / part.length) * (1 - share);
      weight = weight * share + (1 - share);
      found.x.push(x[Math.min(x.length - 1, i + window - 1)]);
      found.y.push(mean / weight);
    }
    return found;
  }
  function tick(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${FP.num(value / 1e6, 3)}M`;
    if (size >= 1e4) return `${FP.num(value / 1e3, 4)}k`;
    return FP.num(value, 4);
  }
  // The nearest value at or around an index: eval points are few, and the pointer is seldom right on one.
  function near(values, index) {
    for (let far = 0; far < values.length; far += 1) {
      for (const i of [index - far, index + far]) if (values[i] !== null && values[i] !== undefined) return values[i];
    }
    return null;
  }

  function make({ base, over, seen, trouble, drawn = () => {} }) {
    let have = "";
    let zoom = null; // {x0, x1} in steps, of all charts
    let answer = null;
    let newest = {}; // key -> {step, value}
    let share = Number(remembered("fp-smooth", "0.6"));
    let logarithmic = remembered("fp-log", "no") === "yes";
    let view = 0; // a late answer of another zoom is dropped

    const slider = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: share, "aria-label": "Smoothing", oninput: smooth });
    const said = el("output.fp-number", {}, share.toFixed(2));
    const log = el("button.fp-chip", { type: "button", "aria-pressed": String(logarithmic), onclick: toggleLog }, "Log scale");
    const reset = el("button.fp-chip", { type: "button", disabled: true, onclick: () => setZoom(null) }, "Reset zoom");
    const cards = CHARTS.map(card);
    const node = el("section.fp-charts", { "aria-label": "Charts" },
      el("div.fp-charts-bar", {}, el("h3", {}, "Charts"), el("span.fp-dim.fp-hint", {}, "Drag across a chart to zoom"), el("span.fp-gap"),
        el("label", {}, "Smoothing", slider, said), log, reset),
      el("div.fp-charts-grid", {}, cards.map((c) => c.node)));
    const poll = FPPoll(pull, { seen, pace: 600, trouble });
    new MutationObserver(() => cards.forEach((c) => c.rebuild())).observe(document.body, { attributes: true, attributeFilter: ["class"] });

    async function pull(current) {
      const last = over();
      const mine = view;
      const part = zoom ? `&x0=${zoom.x0}&x1=${zoom.x1}` : "";
      const found = await FP.get(`${base()}/series?n=${POINTS}${part}&have=${encodeURIComponent(have)}`);
      if (!current() || mine !== view) return;
      if (!found) return last ? "end" : undefined;
      have = found.etag;
      answer = found;
      remember();
      draw();
      drawn(newest);
    }
    function remember() {
      for (const [key, { x, y }] of Object.entries(answer.series)) {
        const value = answer.last[key];
        if (!zoom) newest[key] = { step: x[x.length - 1], value: y[y.length - 1] };
        else if (Number.isFinite(value) && newest[key] && newest[key].value !== value) newest[key] = { step: answer.last.step, value };
      }
    }
    function draw() {
      node.hidden = over() && Boolean(answer) && !Object.keys(answer.series).length; // it ended before its first step: the log tells why
      for (const c of cards) c.draw();
    }
    function smooth() {
      share = Number(slider.value);
      said.textContent = share.toFixed(2);
      localStorage.setItem("fp-smooth", share);
      draw();
    }
    function toggleLog() {
      logarithmic = !logarithmic;
      log.setAttribute("aria-pressed", String(logarithmic));
      localStorage.setItem("fp-log", logarithmic ? "yes" : "no");
      cards.forEach((c) => c.rebuild());
    }
    function setZoom(to) {
      zoom = to;
      reset.disabled = !to;
      have = "";
      view += 1;
      cards.forEach((c) => c.zoomed());
      poll.start();
    }

    function card(about) {
      let plot = null;
      let lines = []; // what the legend names
      const legend = el("div.fp-legend", { "aria-hidden": "true" });
      const place = el("div.fp-plot", { role: "img", "aria-label": about.title }, el("p.fp-plot-empty", {}, ""));
      const sentence = el("p.fp-chart-said");
      const csv = el("a.fp-quiet-link", { download: "", "aria-label": `${about.title} as CSV` }, "CSV");
      const card = el("figure.fp-chart", {}, el("div.fp-chart-head", {}, el("h4", {}, about.title), el("span.fp-gap"), legend),
        place, el("figcaption", {}, sentence, csv));
      card.hidden = Boolean(about.some);
      const useLog = () => logarithmic && about.log;
      const positive = (y) => (useLog() ? y.map((v) => (v > 0 ? v : null)) : y);
      new ResizeObserver(() => {
        if (plot) plot.setSize({ width: place.clientWidth, height: HEIGHT });
        else if (answer) draw();
      }).observe(place);

      // [{label, colour, x, y, width, points}] in drawing order.
      function curves() {
        const all = (answer && answer.series) || {};
        const own = all[about.key];
        const second = about.second && all[about.second];
        const accent = colour("--fp-accent");
        const made = [];
        if (own && own.x.length) {
          const fine = about.smooth && share > 0 && own.x.length > 2;
          made.push({ name: about.name, stroke: fine ? colour("--fp-pale") : accent, x: own.x, y: own.y, width: fine ? 1 : 1.6 });
          if (fine) made.push({ name: "smoothed", stroke: accent, ...smoothed(own, share), width: 1.8 });
        }
        if (second && second.x.length) made.push({ name: about.secondName, stroke: colour("--fp-second"), x: second.x, y: second.y, width: 1.5, points: true });
        return made;
      }

      function draw() {
        csv.href = FP.url(`${base()}/metrics.csv`);
        const made = curves();
        if (about.some) card.hidden = !made.length;
        tell();
        if (!made.length) { clear(); return; }
        if (!place.clientWidth) return; // its view is not shown; the ResizeObserver comes back
        const tables = made.map((c) => [c.x, positive(c.y)]);
        const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
        const same = plot && lines.map((c) => c.name + c.width).join() === made.map((c) => c.name + c.width).join();
        lines = made;
        if (same) plot.setData(data, !zoom);
        else build(data);
        if (zoom) plot.setScale("x", { min: zoom.x0, max: zoom.x1 });
      }

      function build(data) {
        if (plot) plot.destroy();
        place.replaceChildren();
        named();
        const dim = colour("--fp-dim");
        const rule = { stroke: colour("--fp-grid"), width: 1 };
        const axis = { stroke: dim, font: "11px system-ui, sans-serif", grid: rule, ticks: { show: false }, gap: 6 };
        plot = new uPlot({
          width: place.clientWidth, height: HEIGHT, padding: [10, 26, 0, 0], legend: { show: false },
          scales: { x: { time: false, range: steps }, y: { distr: useLog() ? 3 : 1 } },
          axes: [
            { ...axis, size: 26, space: 70, incrs: [1, 2, 5].flatMap((m) => [0, 1, 2, 3, 4, 5, 6].map((e) => m * 10 ** e)).sort((a, b) => a - b), values: (u, all) => all.map(whole) },
            { ...axis, size: 54, space: 34, values: (u, all) => all.map((v) => (v === null ? "" : tick(v))) },
          ],
          series: [{}, ...lines.map((c) => ({ stroke: c.stroke, width: c.width, spanGaps: false,
            points: { show: (c.points && c.x.length <= 40) || c.x.length === 1, size: 6, fill: c.stroke, stroke: c.stroke } }))],
          cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false, setScale: false }, sync: { key: "footplate", filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } }, bind: { dblclick: () => () => setZoom(null) } },
          hooks: { setSelect: [selected], setCursor: [pointed] },
        }, data, place);
      }
      function steps(u, from, to) {
        if (zoom) return [zoom.x0, zoom.x1];
        if (from === null) return [0, 1];
        return from === to ? [Math.max(0, from - 1), to + 1] : [from, to];
      }
      function selected(u) {
        if (u.select.width < 6) return;
        const x0 = Math.max(0, Math.floor(u.posToVal(u.select.left, "x")));
        const x1 = Math.ceil(u.posToVal(u.select.left + u.select.width, "x"));
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (x1 - x0 >= 2) setZoom({ x0, x1 });
      }

      function named() {
        legend.replaceChildren(el("span.fp-legend-step"), ...lines.map((c) => {
          const key = el("i");
          key.style.background = c.stroke;
          return el("span", {}, lines.length > 1 ? key : null, lines.length > 1 ? c.name : null, el("b"));
        }));
      }
      function pointed(u) {
        const i = u.cursor.idx;
        const away = i === null || i === undefined || u.cursor.left < 0;
        legend.firstChild.textContent = away ? "" : `step ${whole(u.data[0][i])}`;
        lines.forEach((c, n) => {
          const value = away ? null : near(u.data[n + 1], i);
          legend.children[n + 1].lastChild.textContent = away ? "" : FP.num(value);
        });
      }

      function tell() {
        const said = sentenceOf(about, answer, newest);
        sentence.textContent = said;
        place.setAttribute("aria-label", `${about.title}. ${said}`);
      }
      function clear() {
        if (plot) plot.destroy();
        plot = null;
        lines = [];
        legend.replaceChildren();
        place.replaceChildren(el("p.fp-plot-empty", {}, over() ? "Nothing was recorded." : "The first point comes with the first step."));
      }
      return {
        node: card, draw, clear,
        rebuild() { if (plot) { plot.destroy(); plot = null; lines = []; } draw(); },
        zoomed() { if (plot && zoom) plot.setScale("x", { min: zoom.x0, max: zoom.x1 }); },
      };
    }

    function open() {
      have = "";
      answer = null;
      newest = {};
      zoom = null;
      reset.disabled = true;
      view += 1;
      cards.forEach((c) => { c.clear(); c.draw(); });
      poll.start();
    }
    return { node, open, close: poll.stop, resume: poll.start, done: () => !poll.running(), redraw: draw };
  }

  function sentenceOf(about, answer, newest) {
    const last = newest[about.key];
    if (!last) return "";
    const best = about.best === "lowest" ? answer.min[about.key] : answer.max[about.key];
    const parts = [`Latest ${FP.num(last.value)} at step ${whole(last.step)}, ${about.best} ${FP.num(best)}`];
    const second = about.second && newest[about.second];
    if (second) parts.push(`${about.secondName} ${FP.num(second.value)} at step ${whole(second.step)}`);
    return `${parts.join("; ")}.`;
  }
  return { make };
})();
