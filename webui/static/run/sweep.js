// @ts-check
// The sweep of a run: its runs as a table, best first, and as lines over parallel axes.
import { get } from "../api.js";
import { compareLink } from "../compare/compare_runs.js";
import { el, setText, svg } from "../dom.js";
import { num, valueText } from "../format.js";
import { createPoller } from "../poll.js";
import { drawBadge, hasEnded } from "../run_state.js";

/**
 * @typedef {{ id: string, state: string, step: number | null, loss: number | null, eval_loss: number | null,
 *   sentence: string, varied: Record<string, any> }} Member
 */

const [WIDTH, HEIGHT, TOP, BOTTOM, SIDE] = [900, 220, 26, 22, 70];
const LOSS = "Best validation loss";
const LOG_FROM = 20; // an axis is logarithmic if the largest value is this many times the smallest

const text = (key, value) =>
  Array.isArray(value) ? value.join(", ") : typeof value === "number" ? valueText(key, value) : String(value);
const link = (id) => `?tab=run&run=${encodeURIComponent(id)}`;

/** Position (0 to 1, from the bottom) and labels of an axis. @param {string} key @param {any[]} values */
function axis(key, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.every((value) => typeof value === "number")) {
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const scale = low > 0 && high / low >= LOG_FROM ? Math.log : (value) => value;
    const width = scale(high) - scale(low);
    const place = (value) => (width ? (scale(value) - scale(low)) / width : 0.5);
    return {
      place,
      ends:
        low === high
          ? [[0.5, text(key, low)]]
          : [
              [0, text(key, low)],
              [1, text(key, high)],
            ],
    };
  }
  const names = [...new Set(known.map((value) => text(key, value)))].sort();
  const place = (value) => (names.length > 1 ? names.indexOf(text(key, value)) / (names.length - 1) : 0.5);
  return { place, ends: names.map((name) => [place(name), name]) };
}

/** One vertical axis per varied option and one for the loss; one line per run. */
function parallelAxes(/** @type {Member[]} */ runs, columns, labels, current) {
  const names = [...columns, LOSS];
  const valueOf = (run, name) => (name === LOSS ? run.eval_loss : run.varied[name]);
  const axes = names.map((name) =>
    axis(
      name,
      runs.map((run) => valueOf(run, name)),
    ),
  );
  const x = (index) => SIDE + (index * (WIDTH - 2 * SIDE)) / (names.length - 1);
  const y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "fp-axes", role: "img" });
  chart.setAttribute("aria-label", `The options of ${runs.length} runs and their best validation loss`);
  const ranked = runs.filter((run) => run.eval_loss !== null);
  ranked.forEach((run, rank) => {
    const points = names.map((name, index) => `${x(index)},${y(axes[index].place(valueOf(run, name)))}`);
    const line = svg("polyline", { points: points.join(" "), class: "fp-axes-run" });
    line.style.opacity = String(1 - (0.75 * rank) / Math.max(1, ranked.length - 1));
    if (run.id === current) line.classList.add("fp-axes-current");
    const name = columns.map((key) => `${labels[key] || key} ${text(key, run.varied[key])}`).join(", ");
    const title = svg("title", {}, `${name}: ${num(run.eval_loss)}`);
    chart.prepend(svg("a", { href: link(run.id) }, title, line));
  });
  axes.forEach(({ ends }, index) => {
    const anchor = index === 0 ? "start" : index === names.length - 1 ? "end" : "middle";
    const side = index === names.length - 1 ? 6 : -6;
    chart.append(svg("line", { x1: x(index), x2: x(index), y1: y(0), y2: y(1), class: "fp-axes-axis" }));
    const head = { x: index === 0 ? 0 : index === names.length - 1 ? WIDTH : x(index), y: 12, "text-anchor": anchor };
    chart.append(svg("text", head, names[index] === LOSS ? LOSS : labels[names[index]] || names[index]));
    for (const [share, label] of ends) {
      const place = { x: x(index) + side, y: y(share) + 4, "text-anchor": side > 0 ? "start" : "end" };
      chart.append(svg("text", { ...place, class: "fp-axes-end" }, label));
    }
  });
  return chart;
}

function table(/** @type {Member[]} */ runs, columns, labels, current) {
  const headings = [...columns.map((key) => labels[key] || key), "State", "Step", "Loss", LOSS];
  const head = el(
    "tr",
    {},
    headings.map((name) => el("th", { scope: "col" }, name)),
  );
  const rows = runs.map((run) => {
    const badge = el("span.fp-badge");
    drawBadge(badge, run.state);
    const [first, ...others] = columns.map((key) => text(key, run.varied[key]));
    const name = el("a", { href: link(run.id), title: run.sentence }, first);
    const cells = [name, ...others, badge, num(run.step), num(run.loss), num(run.eval_loss)];
    const attributes = run.id === current ? { "aria-current": "true" } : {};
    return el(
      "tr",
      attributes,
      cells.map((cell) => el("td", {}, cell)),
    );
  });
  return el("table", {}, el("thead", {}, head), el("tbody", {}, rows));
}

/** The panel of the Run view. @param {() => boolean} isVisible */
export function createSweep(isVisible) {
  const heading = el("h3", {}, "Sweep");
  const best = el("p.fp-dim");
  const compare = el("a.fp-sweep-compare", {}, "Compare curves and generations");
  const body = el("div");
  const node = el("section.fp-panel.fp-sweep", { hidden: true, "aria-label": "Sweep" }, heading, best, compare, body);
  let [sweep, current, drawn] = ["", "", ""];
  const poller = createPoller(pull, { isVisible, interval: 3000, onTrouble: () => {} });

  async function pull(isCurrent) {
    const found = await get(`api/sweeps/${encodeURIComponent(sweep)}`);
    if (!isCurrent()) return undefined;
    draw(found.runs, found.labels, found.ends);
    return found.runs.every((run) => hasEnded(run.state)) ? "rest" : undefined; // one may be resumed
  }

  /** @param {Member[]} runs @param {Record<string, string>} labels @param {string} ends when the last run ends */
  function draw(runs, labels, ends) {
    compare.href = compareLink(runs.map((run) => run.id)); // of many, the best
    const state = JSON.stringify([runs, current, ends]);
    if (state === drawn) return;
    drawn = state;
    const columns = Object.keys(runs[0].varied);
    const measured = runs.filter((run) => run.eval_loss !== null).length;
    const place = runs.findIndex((run) => run.id === current);
    const hasLoss = place >= 0 && runs[place].eval_loss !== null;
    const rank = hasLoss ? `This run is number ${place + 1} of ${measured} by validation loss.` : "";
    setText(best, [rank, ends].filter(Boolean).join(" "));
    const parts = [table(runs, columns, labels, current)];
    if (measured > 1) parts.unshift(/** @type {any} */ (parallelAxes(runs, columns, labels, current)));
    body.replaceChildren(...parts);
    node.hidden = false;
  }

  /** Show the sweep of a run; '' hides the panel. */
  function open(name, run) {
    if (name === sweep && run === current) return;
    [sweep, current, drawn] = [name, run, ""];
    node.hidden = true;
    poller.stop();
    if (name) poller.start();
  }

  return { node, open, close: () => open("", "") };
}
