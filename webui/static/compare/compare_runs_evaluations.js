// @ts-check
// The table "Evaluations" of the Compare view: each score of each run on the same examples.
import { el, redraw } from "../dom.js";
import { integer } from "../format.js";
import { GENERAL_LOSS, VERDICTS, changeText, scoreText } from "../run/evaluation_scores.js";
import { modelName } from "../run/run_jobs.js";

/** @param {(run: any, number: number) => Node} runName */
export function createEvaluations(runName) {
  const node = el("section.fp-panel.fp-compare-table.fp-compare-evaluations", { "aria-label": "Evaluations" });
  node.hidden = true;
  /** @param {any[]} runs those of the view @param {any} found of the endpoint */
  function draw(runs, found) {
    const known = found.runs.map(({ id, step }) => {
      const number = runs.findIndex((run) => run.id === id);
      return { number, step, ...runs[number] };
    });
    node.hidden = !known.length || known.some(({ number }) => number < 0); // none of the runs was ever evaluated
    if (node.hidden) return;
    const heading = (run) => el("span", {}, runName(run, run.number), run.step === null ? "" : step(run));
    redraw(
      node,
      el("div.fp-panel-head", {}, el("h3", {}, "Evaluations"), el("span.fp-dim", {}, about(known, found.rows))),
      found.rows.length ? table(["Score", "Base model", ...known.map(heading)], found.rows) : "",
      notes(runs, found),
    );
  }
  return { node, draw, hide: () => (node.hidden = true) };
}

const step = (run) => el("span.fp-dim", {}, ` ${modelName(run.step)}`);

function about([first], rows) {
  if (!rows.length) return "Nothing to compare: at least two runs must be evaluated on the same examples";
  const others = `95% intervals: ${first.name} against its base model, the other runs against ${first.name}`;
  return `${others}. "Base model" is the base model of ${first.name}`;
}

function table(heads, rows) {
  const head = el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name)));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, rows.map(scoreRow)));
}

function scoreRow(row) {
  const texts = row.name === GENERAL_LOSS || row.count !== 1 ? "texts" : "text";
  const name = el("th", { scope: "row" }, row.label, el("span.fp-dim", {}, ` ${integer(row.count)} ${texts}`));
  const cell = ({ value, verdict, low, high }) => {
    const change = verdict === "few" ? "" : ` ${changeText({ low, high, is_share: row.is_share })}`;
    return el(
      "td",
      { "data-verdict": verdict },
      el("span.fp-figures", {}, scoreText(value, row.is_share)),
      el("span.fp-score-change", {}, el("b", {}, VERDICTS[verdict]), change),
    );
  };
  return el("tr", {}, name, el("td.fp-figures", {}, scoreText(row.base, row.is_share)), row.cells.map(cell));
}

/** What the table leaves out. */
function notes(runs, { problems, notes: sentences }) {
  const nameOf = (id) => runs.find((run) => run.id === id)?.name || id;
  const named = problems.map(({ id, sentence }) => el("p.fp-dim", {}, el("b", {}, nameOf(id)), `: ${sentence}`));
  const limits = sentences.map((sentence) => el("p.fp-dim", {}, `Limitation: ${sentence}`));
  return named.length + limits.length ? el("div.fp-compare-notes", {}, named, limits) : "";
}
