// @ts-check
// The card "Benchmarks" of the Run view: the trained model and its base model on tasks of lm-eval.
import { post } from "../api.js";
import { el, redraw } from "../dom.js";
import { createFields, settingsText } from "./benchmarks_fields.js";
import { resultTable } from "./benchmarks_table.js";
import { ResultsCard } from "./results_card.js";
import { deleteButton, downloadLink, limitations, missingPart } from "./run_jobs.js";

const KIND = {
  name: "benchmarks",
  jobs: "benchmarks",
  title: "Benchmarks",
  about:
    "Measure the trained model and its base model on tasks of lm-eval, EleutherAI's lm-evaluation-harness: its own " +
    "benchmarks, whose data comes from the Hugging Face Hub, or YAML files with your tasks and local data.",
  choice: "Benchmark to show",
  progress: { work: "Measuring", stop: "Stop benchmark" },
  createFields,
  settings: (job) => settingsText(job.settings),
  start: post,
};

export class Benchmarks extends ResultsCard {
  /** @param {() => string} base the run's API path @param {() => boolean} isVisible */
  constructor(base, isVisible) {
    super(base, isVisible, KIND);
    this.missing = createMissing();
    this.parts.about.after(this.missing.node);
  }

  drawOffer(offer) {
    this.missing.draw(offer.problem ? "" : offer.missing);
  }

  partsOf(job) {
    const { rows, limits, chat_template: template, versions } = job.result;
    const prompts = `Prompts ${template ? "with the" : "without a"} chat template.`;
    const about = `${prompts} Measured with lm-eval ${versions.lm_eval}; \u00b1 is the standard error.`;
    return {
      result: [resultTable(rows), el("p.fp-dim", {}, about), ...limitations(limits)],
      buttons: [
        downloadLink("Download samples", `${this.path}/${job.id}/samples.jsonl`),
        deleteButton("Delete benchmark", "Delete this benchmark and its samples?", job.id, this.run()),
      ],
    };
  }
}

/** How to create the environment, if it is missing. */
function createMissing() {
  const node = el("div.fp-job-section", { hidden: true });
  let drawn = "";
  /** @param {string} missing sentences with the command, '' if nothing is missing */
  function draw(missing) {
    if (missing === drawn) return;
    drawn = missing;
    node.hidden = !missing;
    redraw(node, missing && missingPart(missing));
  }
  return { node, draw };
}
