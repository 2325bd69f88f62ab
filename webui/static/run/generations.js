// @ts-check
// The card "Generations" of the Run view: the outputs for validation prompts before and after training and, with
// eval.generate_during_eval, at each evaluation in between, with a slider over the steps.
import { get } from "../api.js";
import { el, notifyError, setText } from "../dom.js";
import { integer, percent } from "../format.js";

/**
 * The outputs at one time: before training (step 0), at a step, or after training (step null).
 * @typedef {{ label: string, step: number | null, correct: boolean[], scores: Record<string, number>,
 *   rougeL: number[] }} Moment
 */
const SHOWN_SAMPLES = 3;
const CHANGES = { "": "All", better: "Better", worse: "Worse", same: "Same" };
const ABOUT_MARKS =
  "Each mark below a prompt stands for the output at one step: green for an exact match, otherwise a bar as high as " +
  "the output's ROUGE-L.";
const BEFORE = "Before training";
const AFTER = "After training";

/** Whether two texts match as exact match in Python does: JSON objects may differ in spaces and the order of keys. */
function isSame(one, other) {
  return canonical(one) === canonical(other);
}
function canonical(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" ? JSON.stringify(sortKeys(value)) : text.trim();
  } catch {
    return String(text ?? "").trim();
  }
}
function sortKeys(value) {
  if (Array.isArray(value)) return value.map(sortKeys);
  if (!value || typeof value !== "object") return value;
  return Object.fromEntries(
    Object.keys(value)
      .sort()
      .map((key) => [key, sortKeys(value[key])]),
  );
}

export class Generations {
  /** @param {() => string} base the run's API path */
  constructor(base) {
    this.base = base;
    this.parts = createParts();
    this.node = this.parts.node;
    this.parts.slider.addEventListener("input", () => this.#select(Number(this.parts.slider.value)));
    this.parts.more.addEventListener("click", () => {
      this.state.isExpanded = !this.state.isExpanded;
      this.#filter();
    });
    this.reset();
  }

  /** Forget the run that was shown. */
  reset() {
    this.state = {
      size: 0,
      samples: /** @type {any[] | null} */ (null), // samples of a run that has ended
      timeline: /** @type {any} */ (null),
      loading: new Set(), // requests that are under way
      hasFailed: false, // whether the latest request has failed
      outputs: /** @type {Map<number, string[]>} */ (new Map()), // step -> outputs
      at: /** @type {number | null} */ (null), // the moment that the user has selected; null is the latest
      change: "",
      isExpanded: false,
      drawn: "",
    };
    this.node.hidden = true;
  }

  /** Show what a response about the run has. @param {any} run */
  draw(run) {
    const state = this.state;
    state.samples = run.result?.samples?.length ? run.result.samples : null;
    if (run.generations && run.generations !== state.size) {
      state.size = run.generations;
      state.outputs.clear(); // a run that is resumed generates the outputs of some steps again
      this.#load();
    }
    this.#draw();
  }

  /** @param {string} query the step whose outputs are requested */
  async #load(query = "") {
    const { state } = this;
    const { size } = state;
    const request = `${size}${query}`;
    if (state.loading.has(request)) return;
    state.loading.add(request);
    try {
      const found = await get(`${this.base()}/generations${query}`);
      if (state !== this.state || size !== state.size) return; // another run is open, or this one has new generations
      state.hasFailed = false;
      state.timeline = found;
      if (found.outputs) state.outputs.set(found.step, found.outputs);
      this.#draw();
    } catch (error) {
      if (!state.hasFailed) notifyError(error);
      state.hasFailed = true;
      if (size === state.size) state.size = 0; // the next response about the run repeats the request
    } finally {
      state.loading.delete(request);
    }
  }

  /** @param {number} position of the moment */
  #select(position) {
    this.state.at = position === this.#moments().length - 1 ? null : position;
    this.#draw();
  }

  /** @returns {Moment[]} in their order */
  #moments() {
    const { samples, timeline } = this.state;
    const steps = timeline?.steps || [];
    const known = steps.map(({ step, correct, scores, rouge_l: rougeL }) => {
      const label = step ? `Step ${integer(step)}` : step === null ? AFTER : BEFORE;
      return { label, step, correct, scores, rougeL };
    });
    const isAfter = known.length > 0 && known[known.length - 1].step === null;
    const moments = isAfter ? known.slice(0, -1) : known;
    if (!samples) return moments; // the outputs after training come with the result
    const of = (label, step, side) => {
      const correct = samples.map((sample) => isSame(sample[side], sample.reference));
      return { label, step, correct, scores: {}, rougeL: [] };
    };
    const after = isAfter ? known[known.length - 1] : of(AFTER, null, "after");
    return [...(moments.length ? moments : [of(BEFORE, 0, "before")]), after];
  }

  /** The outputs at a moment; null while they are loaded. @param {Moment} moment @returns {string[] | null} */
  #outputs({ step }) {
    const { samples, outputs } = this.state;
    if (samples && !step) return samples.map((sample) => (step === null ? sample.after : sample.before));
    if (!outputs.has(/** @type {number} */ (step))) this.#load(`?step=${step}`);
    return outputs.get(/** @type {number} */ (step)) || null;
  }

  #draw() {
    const { state, parts } = this;
    const prompts = state.samples || state.timeline?.prompts || [];
    const moments = this.#moments();
    this.node.hidden = !prompts.length || !moments.length;
    if (this.node.hidden) return;
    const at = Math.min(state.at ?? moments.length - 1, moments.length - 1);
    const key = JSON.stringify([state.samples, state.size, moments.length, at, [...state.outputs.keys()]]);
    if (key === state.drawn) return;
    const [before, now] = [moments[0], moments[at]];
    const [first, shown] = [this.#outputs(before), this.#outputs(now)];
    if (!first || !shown) return; // these outputs are still being loaded
    state.drawn = key;
    const hasSteps = moments.length > 2 || (moments.length === 2 && !state.samples);
    drawSlider(parts, moments, at, hasSteps);
    setText(parts.text, summaryOf(before, now, prompts.length));
    const isLater = moments.length > 1 && now !== before;
    const names = isLater ? ["Prompt", "Reference", BEFORE, now.label] : ["Prompt", "Reference", BEFORE];
    parts.heads.replaceChildren(...names.map((name) => el("th", { scope: "col" }, name)));
    const rows = prompts.map(({ prompt, reference }, n) =>
      el(
        "tr",
        { "data-change": isLater ? changeOf(first[n], shown[n], before.correct[n], now.correct[n]) : "" },
        el("td", { "data-name": "Prompt" }, el("div.fp-prompt", {}, prompt), hasSteps && stepMarks(moments, n, at)),
        el("td", { "data-name": "Reference" }, el("pre", {}, reference)),
        generationCell(BEFORE, first[n], before.correct[n]),
        isLater && generationCell(now.label, shown[n], now.correct[n]),
      ),
    );
    parts.body.replaceChildren(...rows);
    this.#filter();
  }

  /** Show the rows with the selected change, and how many each has. */
  #filter() {
    const { state, parts } = this;
    const rows = [...parts.body.children];
    const of = (change) => rows.filter((row) => !change || row.dataset.change === change);
    const names = Object.keys(CHANGES).filter((change) => of(change).length);
    if (!names.includes(state.change)) state.change = "";
    const isUseful = names.length > 2 || (names.length === 2 && of(names[1]).length < rows.length);
    parts.filters.hidden = !isUseful;
    for (const button of parts.filters.children) {
      const { change } = button.dataset;
      button.hidden = !names.includes(change);
      setText(button, `${CHANGES[change]} ${of(change).length}`);
      button.setAttribute("aria-pressed", String(change === state.change));
      button.onclick = () => {
        state.change = change;
        this.#filter();
      };
    }
    const shown = of(state.change);
    const visible = shown.slice(0, state.isExpanded ? undefined : SHOWN_SAMPLES);
    for (const row of rows) row.hidden = !visible.includes(row);
    parts.more.hidden = shown.length <= SHOWN_SAMPLES;
    parts.more.setAttribute("aria-expanded", String(state.isExpanded));
    setText(parts.more, state.isExpanded ? "Show fewer" : `Show all ${shown.length}`);
  }
}

function createParts() {
  const text = el("span.fp-dim.fp-figures");
  const filters = el(
    "div.fp-sample-filters",
    { role: "group", "aria-label": "Generations to show" },
    Object.keys(CHANGES).map((change) => el("button.fp-chip", { type: "button", "data-change": change })),
  );
  const more = el("button.fp-chip", { type: "button" });
  const title = el("h3", {}, "Generations on validation examples");
  const head = el("div.fp-panel-head", {}, title, text, el("span.fp-gap"), filters, more);
  const slider = el("input.fp-step-slider", { type: "range", min: 0, step: 1, "aria-label": "Step" });
  const [first, last, shown] = [el("span.fp-dim"), el("span.fp-dim"), el("b.fp-figures")];
  const about = el("p.fp-dim", {}, ABOUT_MARKS);
  const steps = el("div.fp-steps", { hidden: true }, shown, first, slider, last, about);
  const [heads, body] = [el("tr"), el("tbody")];
  const table = el("table", {}, el("thead", {}, heads), body);
  const node = el("section.fp-panel.fp-samples", { hidden: true, "aria-label": "Generations" }, head, steps, table);
  return { node, text, filters, more, slider, first, last, shown, steps, heads, body };
}

/** @param {any} parts @param {Moment[]} moments @param {number} at @param {boolean} hasSteps */
function drawSlider({ steps, slider, first, last, shown }, moments, at, hasSteps) {
  steps.hidden = !hasSteps;
  slider.max = String(moments.length - 1);
  slider.value = String(at);
  slider.setAttribute("aria-valuetext", moments[at].label);
  setText(shown, moments[at].label);
  setText(first, moments[0].label);
  setText(last, moments[moments.length - 1].label);
}

/** 3 of 24 correct before training, 17 at step 20 (ROUGE-L 34.1 → 91.2) @param {Moment} before @param {Moment} now */
function summaryOf(before, now, count) {
  const correct = (moment) => moment.correct.filter(Boolean).length;
  const start = `${correct(before)} of ${count} correct before training`;
  if (before === now) return start;
  const rouge = (moment) => percent(moment.scores.rouge_l);
  const hasRouge = Number.isFinite(before.scores.rouge_l) && Number.isFinite(now.scores.rouge_l);
  const change = hasRouge ? `; ROUGE-L ${rouge(before)} \u2192 ${rouge(now)}` : "";
  const when = now.step === null ? "after" : `at step ${integer(now.step)}`;
  return `${start}, ${correct(now)} ${when}${change}`;
}

/**
 * One mark for each moment: filled where the output is correct, else as high as its ROUGE-L.
 * @param {Moment[]} moments @param {number} n the example @param {number} at the moment that is shown
 */
function stepMarks(moments, n, at) {
  const correct = moments.filter((moment) => moment.correct[n]).map(({ label }) => label.toLowerCase());
  const label = correct.length ? `Correct: ${correct.join(", ")}` : "Correct at no step";
  const marks = moments.map((moment, position) => {
    const isCorrect = moment.correct[n];
    const rouge = moment.rougeL[n];
    const height = isCorrect ? 1 : Number.isFinite(rouge) ? rouge : 0;
    const score = Number.isFinite(rouge) ? `, ROUGE-L ${percent(rouge)}` : "";
    const title = `${moment.label}: ${isCorrect ? "correct" : "wrong"}${score}`;
    const attributes = { title, "data-correct": String(isCorrect), style: `--height: ${height}` };
    return el("span", position === at ? { ...attributes, "data-shown": true } : attributes);
  });
  return el("div.fp-step-marks", { role: "img", "aria-label": label }, marks);
}

function generationCell(title, text, correct) {
  if (text === null || text === undefined) return el("td.fp-dim", { "data-name": title }, "\u2013");
  return el("td", { "data-name": title }, marked(text, correct));
}

/** A generated output, and whether it is the reference. */
export const markedGeneration = (text, reference) => marked(text, isSame(text, reference));

function marked(text, correct) {
  const words = { role: "img", "aria-label": correct ? "correct" : "wrong" };
  const mark = el("span.fp-mark", words, correct ? "\u2713" : "\u2717");
  return el("div.fp-generation", { "data-correct": String(correct) }, mark, el("pre", {}, text || "(empty)"));
}

/** Whether a generation is better than before training, worse, or neither; '' without one from before. */
function changeOf(before, now, wasCorrect, isCorrect) {
  if (before === null || before === undefined || now === null || now === undefined) return "";
  return wasCorrect === isCorrect ? "same" : isCorrect ? "better" : "worse";
}
