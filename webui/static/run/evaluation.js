// @ts-check
// The card "Evaluation" of the Run view: base model and trained model on the same examples. It is computed by a job, so
// that it goes on without the page.
import { get, post } from "../api.js";
import { confirmDialog, el, redraw, setText } from "../dom.js";
import { dateTime } from "../format.js";
import { createPoller } from "../poll.js";
import { createExamples } from "./evaluation_examples.js";
import { createFields, settingsText } from "./evaluation_fields.js";
import { GENERAL_LOSS, scoresTable } from "./evaluation_scores.js";
import {
  actions,
  ask,
  createProgress,
  deleteButton,
  downloadLink,
  failurePart,
  failureText,
  isAlive,
  keepFocus,
  limitations,
  removeJob,
  stopJob,
} from "./run_jobs.js";

const ABOUT =
  "Compare the trained model with its base model on the same examples: scores of their outputs, with 95% intervals " +
  "of the change, and the loss on general texts, which shows what the model has forgotten.";
const GENERAL =
  "The general texts are 216 short texts written for Footplate: general knowledge, everyday life, stories, " +
  "correspondence, code, mathematics and six European languages. A higher loss on them suggests that the model has " +
  "forgotten some of what it knew; a small increase is common.";

/** The card, and what it shows of the run that is open. */
export class Evaluation {
  /** @param {() => string} base the run's API path @param {() => boolean} isVisible */
  constructor(base, isVisible) {
    this.base = base;
    this.path = "";
    this.tag = "";
    this.found = /** @type {any} */ (null); // the newest response
    this.chosen = ""; // the id of an earlier evaluation
    this.drawn = "";
    this.poller = createPoller((isCurrent) => this.#pull(isCurrent), { isVisible });
    this.fields = createFields(() => ask(startEvaluation(this.path, this.fields.values()), this.#run().refresh));
    this.parts = createParts();
    const { head, about, earlier, progress, failure, result, buttons } = this.parts;
    this.node = el("section.fp-panel.fp-job-card.fp-evaluation", { hidden: true, "aria-label": "Evaluation" });
    this.node.append(head, about, failure, progress.node, earlier.node, result, buttons, this.fields.node);
    earlier.select.addEventListener("change", () => {
      this.chosen = earlier.select.value;
      this.#drawParts();
    });
  }

  /** Show the evaluations of the run that is open, unless it has no model. @param {boolean} hasModel */
  open(hasModel) {
    if (hasModel && this.path === `${this.base()}/evaluations`) return;
    this.close();
    if (!hasModel) return;
    this.path = `${this.base()}/evaluations`;
    this.poller.start();
  }
  close() {
    this.poller.stop();
    this.path = this.tag = this.chosen = this.drawn = "";
    this.found = null;
    this.fields.reset();
    this.node.hidden = true;
  }

  async #pull(isCurrent) {
    const found = await get(`${this.path}?have=${this.tag}`);
    if (!isCurrent()) return "end";
    if (found) {
      this.found = found;
      this.tag = found.tag;
      keepFocus(this.node, this.parts.heading, () => this.#drawParts());
    }
    return this.found.jobs.some(isAlive) ? undefined : "rest"; // another tab may start one
  }

  #drawParts() {
    const { offer, jobs } = this.found;
    const parts = this.parts;
    this.node.hidden = Boolean(offer.problem) && !jobs.length;
    const newest = jobs[0];
    const running = isAlive(newest) ? newest : null;
    const failure = failureText(newest);
    const done = jobs.filter(({ state }) => state === "done");
    const shown = done.find(({ id }) => id === this.chosen) || done[0];
    parts.about.hidden = Boolean(shown) && !offer.problem;
    setText(parts.about, offer.problem || ABOUT);
    parts.progress.draw(running, () => stopJob(running.id, this.#run()));
    parts.failure.hidden = !failure;
    setText(parts.failure, failure);
    parts.earlier.draw(done, shown);
    this.fields.draw(offer, Boolean(running), newest || null);
    this.fields.remove.hidden = !newest || isAlive(newest) || newest.state === "done";
    this.fields.remove.onclick = () => removeJob(newest.id, this.#run());
    const key = JSON.stringify(shown ?? null);
    if (key !== this.drawn) this.#drawResult(shown);
    this.drawn = key;
  }

  #drawResult(job) {
    const { result, buttons } = this.parts;
    result.hidden = buttons.hidden = !job;
    if (!job) return;
    const path = `${this.path}/${job.id}`;
    const { comparisons, limits, examples } = job.result;
    redraw(
      result,
      scoresTable(comparisons),
      comparisons.some(({ name }) => name === GENERAL_LOSS) && el("p.fp-dim", {}, GENERAL),
      ...limitations(limits),
      examples && createExamples(path, comparisons),
    );
    redraw(
      buttons,
      examples && downloadLink("Download examples", `${path}/examples.json`),
      deleteButton("Delete evaluation", "Delete this evaluation?", job.id, this.#run()),
    );
  }

  /** The run, for requests. */
  #run() {
    const refresh = () => {
      this.tag = "";
      if (this.path) this.poller.start();
    };
    return { base: this.base(), refresh };
  }
}

/** Start to evaluate. A score file is run only if the user agrees to its content, which the hash names. */
async function startEvaluation(path, values) {
  try {
    await post(path, values);
  } catch (error) {
    const consent = error.data?.consent;
    if (!consent) throw error;
    const question =
      `Run the Python code in ${consent.path} (SHA-256 ${consent.sha256})? It can do everything that the user of the ` +
      "server can do. Read the file before you agree.";
    if (!(await confirmDialog(question, "Run this file"))) return;
    await post(path, { ...values, score_file_sha256: consent.sha256 });
  }
}

function createParts() {
  const heading = el("h3", { tabindex: -1 }, "Evaluation");
  const texts = { work: "Evaluating", stop: "Stop evaluation", stopping: "Stopping. What is computed is kept." };
  const progress = createProgress(texts);
  return {
    head: el("div.fp-job-head", {}, heading, progress.status),
    heading,
    about: el("p.fp-dim", {}, ABOUT),
    earlier: createEarlier(),
    result: el("div.fp-job-section", { hidden: true }),
    buttons: actions(),
    ...{ progress, failure: failurePart("") },
  };
}

/** Which evaluation is shown. */
function createEarlier() {
  const select = el("select.fp-select", { "aria-label": "Evaluation to show" });
  const text = el("span.fp-dim.fp-figures");
  const node = el("div.fp-evaluation-which", {}, select, text);
  let drawn = ""; // an open menu stays as it is
  function draw(done, shown) {
    node.hidden = !shown;
    select.hidden = done.length < 2;
    if (!shown) return;
    const ids = done.map(({ id }) => id).join();
    if (ids !== drawn) redraw(select, ...done.map((job) => el("option", { value: job.id }, dateTime(job.created))));
    drawn = ids;
    select.value = shown.id;
    setText(text, settingsText(shown));
  }
  return { node, select, draw };
}
