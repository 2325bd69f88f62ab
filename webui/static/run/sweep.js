// @ts-check
// The sweep of a run: its runs as a table, best first, and as lines over parallel axes.
import { get } from "../api.js";
import { compareLink } from "../compare/compare_runs.js";
import { el, redraw, setText, svg, table, tableRow } from "../dom.js";
import { num, valueText } from "../format.js";
import { createPoller } from "../poll.js";
import { drawBadge, hasEnded } from "../run_state.js";
import { changeText, scoreText, VERDICTS } from "./evaluation_scores.js";

/**
 * A run of the sweep. For the key of each ranking, it has a value or null; with an evaluation, also the interval of the
 * change.
 * @typedef {{ id: string, state: string, step: number | null, loss: number | null, eval_loss: number | null,
 *   sentence: string, varied: Record<string, any>, interval: any, [key: string]: any }} Member
 * @typedef {{ key: string, label: string, is_share: boolean }} Ranking
 */

const [WIDTH, HEIGHT, TOP, BOTTOM, SIDE] = [900, 220, 26, 22, 70];
const [LOSS, LOSS_KEY] = ["Best validation loss", "eval_loss"];
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

const valueIn = (run, /** @type {Ranking} */ by) => (by.is_share ? scoreText(run[by.key], true) : num(run[by.key]));

/** One vertical axis per varied option and one for the value that ranks the runs; one line per run. */
function parallelAxes(/** @type {Member[]} */ runs, columns, labels, current, /** @type {Ranking} */ by) {
  const names = [...columns, by.label];
  const valueOf = (run, name) => (name === by.label ? run[by.key] : run.varied[name]);
  const axes = names.map((name) =>
    axis(
      name,
      runs.map((run) => valueOf(run, name)),
    ),
  );
  const x = (index) => SIDE + (index * (WIDTH - 2 * SIDE)) / (names.length - 1);
  const y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "fp-axes", role: "group" });
  const what = by.key === LOSS_KEY ? "best validation loss" : by.label;
  chart.setAttribute("aria-label", `The options of ${runs.length} runs and their ${what}`);
  const ranked = runs.filter((run) => run[by.key] !== null);
  ranked.forEach((run, rank) => {
    const points = names.map((name, index) => `${x(index)},${y(axes[index].place(valueOf(run, name)))}`);
    const line = svg("polyline", { points: points.join(" "), class: "fp-axes-run" });
    line.style.opacity = String(1 - (0.75 * rank) / Math.max(1, ranked.length - 1));
    if (run.id === current) line.classList.add("fp-axes-current");
    const name = columns.map((key) => `${labels[key] || key} ${text(key, run.varied[key])}`).join(", ");
    const title = svg("title", {}, `${name}: ${valueIn(run, by)}`);
    chart.prepend(svg("a", { href: link(run.id) }, title, line));
  });
  axes.forEach(({ ends }, index) => {
    const anchor = index === 0 ? "start" : index === names.length - 1 ? "end" : "middle";
    const side = index === names.length - 1 ? 6 : -6;
    chart.append(svg("line", { x1: x(index), x2: x(index), y1: y(0), y2: y(1), class: "fp-axes-axis" }));
    const head = { x: index === 0 ? 0 : index === names.length - 1 ? WIDTH : x(index), y: 12, "text-anchor": anchor };
    chart.append(svg("text", head, labels[names[index]] || names[index]));
    for (const [share, label] of ends) {
      const place = { x: x(index) + side, y: y(share) + 4, "text-anchor": side > 0 ? "start" : "end" };
      chart.append(svg("text", { ...place, class: "fp-axes-end" }, label));
    }
  });
  return chart;
}

function runsTable(/** @type {Member[]} */ runs, columns, labels, current, /** @type {Ranking} */ by) {
  const isEvaluation = runs.some((run) => run.interval);
  const more = by.key === LOSS_KEY ? [] : isEvaluation ? ["Base model", by.label, "Change (95%)"] : [by.label];
  const headings = [...columns.map((key) => labels[key] || key), "State", "Step", "Loss", LOSS, ...more];
  const rows = runs.map((run) => {
    const badge = el("span.fp-badge");
    drawBadge(badge, run.state);
    const [first, ...others] = columns.map((key) => text(key, run.varied[key]));
    const name = el("a", { href: link(run.id), title: run.sentence }, first);
    const own = more.length > 1 ? evaluationCells(run, by) : more.length ? [valueIn(run, by)] : [];
    const cells = [name, ...others, badge, num(run.step), num(run.loss), num(run.eval_loss), ...own];
    return tableRow(cells, "td", run.id === current ? { "aria-current": "true" } : {});
  });
  return table("table", headings, rows);
}

/** Base model, trained model, and the change with its interval. */
function evaluationCells(/** @type {Member} */ { interval }, /** @type {Ranking} */ { is_share: isShare }) {
  if (!interval) return [num(null), num(null), num(null)];
  const range = interval.verdict === "few" ? "" : ` ${changeText(interval)}`;
  const change = el("span.fp-score-change.fp-figures", {}, el("b", {}, VERDICTS[interval.verdict]), range);
  const cell = el("span", { "data-verdict": interval.verdict }, change);
  return [scoreText(interval.base, isShare), scoreText(interval.value, isShare), cell];
}

/** A menu of what the runs can be ranked by. @param {(key: string) => void} choose */
function createRankings(choose) {
  const select = el("select.fp-select", { onchange: () => choose(select.value) });
  const node = el("label.fp-job-check", {}, "Rank by", select);
  let offered = "";
  /** @param {Ranking[]} rankings @param {string} key the one that was requested */
  function draw(rankings, key) {
    node.hidden = rankings.length < 2;
    const offer = JSON.stringify(rankings);
    if (offer !== offered) redraw(select, ...rankings.map((each) => el("option", { value: each.key }, each.label)));
    offered = offer; // an open menu stays as it is
    select.value = key;
  }
  return { node, draw };
}

/** What is said about the ranking: the place of a run, and which one is the best. @returns {string} */
function rankText(/** @type {Member[]} */ runs, current, /** @type {Ranking} */ { key, label }, sentence) {
  const place = runs.findIndex((run) => run.id === current);
  const measured = runs.filter((run) => run[key] !== null).length;
  const name = key === LOSS_KEY ? "validation loss" : label;
  const hasValue = place >= 0 && runs[place][key] !== null;
  const own = hasValue ? `This run ranks number ${place + 1} of ${measured} by ${name}.` : "";
  return [own, key !== LOSS_KEY && sentence].filter(Boolean).join(" ");
}

/** The lines over the axes, if there is something to compare, and the table. @returns {Node[]} */
function sweepParts(/** @type {Member[]} */ runs, labels, current, /** @type {Ranking} */ ranked, comparable) {
  const columns = Object.keys(runs[0].varied);
  const parts = [runsTable(runs, columns, labels, current, ranked)];
  const measured = runs.filter((run) => run[ranked.key] !== null).length;
  return measured > 1 && comparable ? [parallelAxes(runs, columns, labels, current, ranked), ...parts] : parts;
}

/** The runs by a score, or by the validation loss if no run has that score any more: evaluations can be deleted. */
async function getRanked(sweep, by) {
  const path = `api/sweeps/${encodeURIComponent(sweep)}?by=`;
  try {
    return await get(`${path}${encodeURIComponent(by)}`);
  } catch (error) {
    if (by === LOSS_KEY || error.status !== 409) throw error;
    return get(`${path}${LOSS_KEY}`);
  }
}

/** The panel of the Run view. @param {() => boolean} isVisible */
export function createSweep(isVisible) {
  const heading = el("h3", {}, "Sweep");
  const best = el("p.fp-dim");
  const ranking = createRankings(choose);
  const compare = el("a.fp-sweep-compare", {}, "Compare curves and generations");
  const body = el("div");
  const node = el("section.fp-panel.fp-sweep", { hidden: true, "aria-label": "Sweep" }, heading, best);
  node.append(el("div.fp-sweep-bar", {}, ranking.node, compare), body);
  let [sweep, current, drawn, by] = ["", "", "", LOSS_KEY];
  const poller = createPoller(pull, { isVisible, interval: 3000, onTrouble: () => {} });

  async function pull(isCurrent) {
    const found = await getRanked(sweep, by);
    if (!isCurrent()) return undefined;
    by = found.by;
    draw(found);
    return found.runs.every((run) => hasEnded(run.state)) ? "rest" : undefined; // a run may be resumed
  }

  function choose(wanted) {
    by = wanted;
    poller.start();
  }

  /**
   * @param {{ runs: Member[], labels: Record<string, string>, ends: string, rankings: Ranking[], by: string,
   *   best: string, comparable: boolean }} found `ends`: when the last run ends
   */
  function draw({ runs, labels, ends, rankings, by: key, best: sentence, comparable }) {
    compare.href = compareLink(runs.map((run) => run.id)); // the best ones, if there are too many
    ranking.draw(rankings, key);
    const state = JSON.stringify([runs, current, ends, rankings, key, sentence]);
    if (state === drawn) return;
    drawn = state;
    const ranked = /** @type {Ranking} */ (rankings.find((each) => each.key === key));
    const text = comparable ? rankText(runs, current, ranked, sentence) : sentence;
    setText(best, [text, ends].filter(Boolean).join(" "));
    body.replaceChildren(...sweepParts(runs, labels, current, ranked, comparable));
    node.hidden = false;
  }

  /** Show the sweep of a run; '' hides the panel. */
  function open(name, run) {
    if (name === sweep && run === current) return;
    if (name !== sweep) by = LOSS_KEY;
    [sweep, current, drawn] = [name, run, ""];
    node.hidden = true;
    poller.stop();
    if (name) poller.start();
  }

  return { node, open, close: () => open("", "") };
}
