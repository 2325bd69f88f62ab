// @ts-check
// The card "Benchmarks" of the Run view: the trained model and its base model on tasks of lm-eval. They are measured by
// a job, so that it goes on without the page.
import { get, post } from "../api.js";
import { copy, el, redraw, setText } from "../dom.js";
import { dateTime } from "../format.js";
import { createPoller } from "../poll.js";
import { createFields, settingsText } from "./benchmarks_fields.js";
import { resultTable } from "./benchmarks_table.js";
import {
  actions,
  ask,
  button,
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
  "Measure the trained model and its base model on tasks of lm-eval, EleutherAI's lm-evaluation-harness: its own " +
  "benchmarks, whose data comes from the Hugging Face Hub, or YAML files with your tasks and local data.";

/** The card, and what it shows of the run that is open. */
export class Benchmarks {
  /** @param {() => string} base the run's API path @param {() => boolean} isVisible */
  constructor(base, isVisible) {
    this.base = base;
    this.path = "";
    this.tag = "";
    this.found = /** @type {any} */ (null); // the newest response
    this.chosen = ""; // the id of an earlier benchmark
    this.drawn = "";
    this.poller = createPoller((isCurrent) => this.#pull(isCurrent), { isVisible });
    this.fields = createFields(() => ask(post(this.path, this.fields.values()), this.#run().refresh));
    this.parts = createParts();
    const { head, about, missing, which, progress, failure, result, buttons } = this.parts;
    this.node = el("section.fp-panel.fp-job-card.fp-benchmarks", { hidden: true, "aria-label": "Benchmarks" });
    this.node.append(head, about, missing.node, failure, progress.node, which.node, result, buttons, this.fields.node);
    which.select.addEventListener("change", () => {
      this.chosen = which.select.value;
      this.#drawParts();
    });
  }

  /** Show the benchmarks of the run that is open, unless it has no model. @param {boolean} hasModel */
  open(hasModel) {
    if (hasModel && this.path === `${this.base()}/benchmarks`) return;
    this.close();
    if (!hasModel) return;
    this.path = `${this.base()}/benchmarks`;
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
    const done = jobs.filter(({ state }) => state === "done");
    const shown = done.find(({ id }) => id === this.chosen) || done[0];
    parts.about.hidden = Boolean(shown) && !offer.problem;
    setText(parts.about, offer.problem || ABOUT);
    parts.missing.draw(offer.problem ? "" : offer.missing);
    parts.progress.draw(running, () => stopJob(running.id, this.#run()));
    parts.failure.hidden = !failureText(newest);
    setText(parts.failure, failureText(newest));
    parts.which.draw(done, shown);
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
    const { rows, limits, chat_template: template, versions } = job.result;
    const prompts = `Prompts ${template ? "with the" : "without a"} chat template.`;
    const about = `${prompts} Measured with lm-eval ${versions.lm_eval}; \u00b1 is its standard error.`;
    redraw(result, resultTable(rows), el("p.fp-dim", {}, about), ...limitations(limits));
    redraw(
      buttons,
      downloadLink("Download samples", `${this.path}/${job.id}/samples.jsonl`),
      deleteButton("Delete benchmark", "Delete this benchmark and its samples?", job.id, this.#run()),
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

function createParts() {
  const heading = el("h3", { tabindex: -1 }, "Benchmarks");
  const progress = createProgress({ work: "Measuring", stop: "Stop benchmark" });
  return {
    head: el("div.fp-job-head", {}, heading, progress.status),
    heading,
    about: el("p.fp-dim", {}, ABOUT),
    missing: createMissing(),
    which: createWhich(),
    result: el("div.fp-job-section", { hidden: true }),
    buttons: actions(),
    ...{ progress, failure: failurePart("") },
  };
}

/** How to create the environment, where it is missing. */
function createMissing() {
  const text = el("p");
  let command = "";
  const node = el("div.fp-job-section", { hidden: true }, text, actions(button("Copy command", () => copyCommand())));
  const copyCommand = () => copy(command, "Command");
  /** @param {string} missing a sentence with the command, '' if nothing is missing */
  function draw(missing) {
    node.hidden = !missing;
    if (!missing) return;
    const [before, code, after] = missing.split("`");
    command = code;
    redraw(text, `lm-eval is not installed. ${before}`, el("code", {}, code), `${after} It needs no restart.`);
  }
  return { node, draw };
}

/** Which benchmark is shown. */
function createWhich() {
  const select = el("select.fp-select", { "aria-label": "Benchmark to show" });
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
    setText(text, settingsText(shown.settings));
  }
  return { node, select, draw };
}
