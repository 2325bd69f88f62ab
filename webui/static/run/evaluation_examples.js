// @ts-check
// The examples of an evaluation with both outputs: those whose score is better, worse or unchanged.
import { get } from "../api.js";
import { el, notifyError, redraw, setText } from "../dom.js";
import { GENERAL_LOSS, scoreText } from "./evaluation_scores.js";

const CHANGES = { "": "All", better: "Better", worse: "Worse", unchanged: "Unchanged" };

/** @param {string} path of the evaluation's API @param {any[]} comparisons */
export function createExamples(path, comparisons) {
  const scores = comparisons.filter(({ name }) => name !== GENERAL_LOSS);
  const select = el(
    "select.fp-select",
    { "aria-label": "Score" },
    scores.map(({ name, label }) => el("option", { value: name }, label)),
  );
  const chips = Object.keys(CHANGES).map((change) =>
    el("button.fp-chip", { type: "button", "data-change": change, onclick: () => choose(change) }),
  );
  const body = el("tbody");
  const more = el("button.fp-chip", { type: "button", hidden: true, onclick: () => load(body.children.length) });
  const heads = ["Prompt", "Reference", "Base model", "Trained model"].map((name) => el("th", { scope: "col" }, name));
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), body);
  const group = el("div.fp-sample-filters", { role: "group", "aria-label": "Examples to show" }, chips);
  const bar = el("div.fp-results-which", {}, el("label.fp-job-check", {}, "Score", select), group);
  const node = el("details.fp-fold.fp-evaluation-examples", {}, el("summary", {}, "Examples"), bar, table, more);
  let change = "";
  let request = 0;
  const choose = (wanted) => {
    change = wanted;
    load(0);
  };
  select.addEventListener("change", () => choose(""));
  node.addEventListener("toggle", () => node.open && !body.children.length && load(0));

  async function load(first) {
    const mine = ++request;
    more.disabled = true;
    let found;
    try {
      found = await get(
        `${path}/examples?${new URLSearchParams({ score: select.value, change, first: String(first) })}`,
      );
    } catch (error) {
      notifyError(error);
      more.disabled = false;
      return;
    }
    if (mine !== request) return; // another selection was made meanwhile
    more.disabled = false;
    const shown = scores.find(({ name }) => name === select.value);
    const rows = found.rows.map((row) => exampleRow(row, shown));
    if (first) body.append(...rows);
    else redraw(body, ...rows);
    for (const chip of chips) {
      setText(chip, `${CHANGES[chip.dataset.change]} ${found.counts[chip.dataset.change]}`);
      chip.setAttribute("aria-pressed", String(chip.dataset.change === change));
    }
    const left = found.counts[change] - body.children.length;
    more.hidden = left <= 0;
    setText(more, `Show more (${left} left)`);
  }
  return node;
}

const SHOWN_SAMPLES = 2; // samples per example, until the user shows all
const PASS = /_pass_at_\d+$/; // pass@k belongs to all samples of a prompt; each sample is right or wrong

/** The samples of a prompt, each with its score; those after the first ones are folded. */
function sampleList(samples, shown) {
  const name = shown.name.replace(PASS, "");
  const items = samples.map(({ text, scores }, n) =>
    el(
      "div.fp-evaluation-sample",
      {},
      el("p.fp-dim.fp-figures", {}, `Sample ${n + 1}`, name in scores && `: ${scoreText(scores[name], true)}`),
      el("pre", {}, text || "(empty)"),
    ),
  );
  const rest = items.slice(SHOWN_SAMPLES);
  const title = `${rest.length} more ${rest.length === 1 ? "sample" : "samples"}`;
  return [...items.slice(0, SHOWN_SAMPLES), rest.length > 0 && el("details", {}, el("summary", {}, title), rest)];
}

function exampleRow({ prompt, reference, base, trained, samples, scores }, shown) {
  const [before, after] = scores[shown.name] || [null, null];
  const cell = (name, ...content) => el("td", { "data-name": name }, content);
  const output = (name, text, value, drawn) =>
    cell(
      name,
      el("p.fp-dim.fp-figures", {}, `${shown.label} ${scoreText(value, shown.is_share)}`),
      ...(drawn ? sampleList(drawn, shown) : [el("pre", {}, text || "(empty)")]),
    );
  return el(
    "tr",
    {},
    cell("Prompt", el("div.fp-prompt", {}, prompt)),
    cell("Reference", el("pre", {}, reference)),
    output("Base model", base, before, samples?.base),
    output("Trained model", trained, after, samples?.trained),
  );
}
