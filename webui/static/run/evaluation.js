// @ts-check
// The card "Evaluation" of the Run view: base model and trained model on the same examples.
import { el } from "../dom.js";
import { createExamples } from "./evaluation_examples.js";
import { createFields, settingsText } from "./evaluation_fields.js";
import { startEvaluation } from "./evaluation_judge.js";
import { GENERAL_LOSS, scoresTable } from "./evaluation_scores.js";
import { ResultsCard } from "./results_card.js";
import { deleteButton, downloadLink, limitations } from "./run_jobs.js";

const KIND = {
  name: "evaluation",
  jobs: "evaluations",
  title: "Evaluation",
  about:
    "Compare the trained model with its base model on the same examples: scores of their outputs, with 95% intervals " +
    "of the change, and the loss on general texts, which shows what the model has forgotten.",
  choice: "Evaluation to show",
  progress: { work: "Evaluating", stop: "Stop evaluation", stopping: "Stopping. What was computed so far is kept." },
  createFields,
  settings: settingsText,
  start: startEvaluation,
};
const GENERAL =
  "The general texts are 216 short texts written for Footplate: general knowledge, everyday life, stories, " +
  "correspondence, code, mathematics and six European languages. A higher loss on them suggests that the model has " +
  "forgotten some of what it knew; a small increase is common.";

export class Evaluation extends ResultsCard {
  /** @param {() => string} base the run's API path @param {() => boolean} isVisible */
  constructor(base, isVisible) {
    super(base, isVisible, KIND);
  }

  partsOf(job) {
    const path = `${this.path}/${job.id}`;
    const { comparisons, limits, examples, judge } = job.result;
    return {
      result: [
        scoresTable(comparisons),
        judge && el("p.fp-dim", {}, judge.sentence),
        comparisons.some(({ name }) => name === GENERAL_LOSS) && el("p.fp-dim", {}, GENERAL),
        ...limitations(limits),
        examples && createExamples(path, comparisons),
      ],
      buttons: [
        examples && downloadLink("Download examples", `${path}/examples.json`),
        deleteButton("Delete evaluation", "Delete this evaluation?", job.id, this.run()),
      ],
    };
  }
}
