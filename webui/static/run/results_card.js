// @ts-check
// What the cards "Evaluation" and "Benchmarks" share: jobs that measure the model of a run, and the results that they
// keep. A job continues if the page is closed.
import { get } from "../api.js";
import { el, redraw, setText } from "../dom.js";
import { dateTime } from "../format.js";
import { createPoller } from "../poll.js";
import {
  actions,
  ask,
  createProgress,
  failurePart,
  failureText,
  isAlive,
  keepFocus,
  removeJob,
  stopJob,
} from "./run_jobs.js";

/**
 * One kind of these cards. `name`: the card's name in style sheets; `jobs`: the jobs' name in addresses; `progress`:
 * the texts of createProgress; `settings`: the settings of a finished job, as text; `start`: requests a job.
 * @typedef {{ name: string, jobs: string, title: string, about: string, choice: string,
 *   progress: { work: string, stop: string, stopping?: string }, createFields: (start: () => void) => any,
 *   settings: (job: any) => string, start: (path: string, values: any) => Promise<any> }} Kind
 */

/** The card, and what it shows of the run that is open. */
export class ResultsCard {
  /** @param {() => string} base the run's API path @param {() => boolean} isVisible @param {Kind} kind */
  constructor(base, isVisible, kind) {
    this.base = base;
    this.kind = kind;
    this.path = "";
    this.tag = "";
    this.found = /** @type {any} */ (null); // the newest response
    this.chosen = ""; // the id of an earlier job
    this.drawn = "";
    this.poller = createPoller((isCurrent) => this.#pull(isCurrent), { isVisible });
    this.fields = kind.createFields(() => ask(kind.start(this.path, this.fields.values()), this.run().refresh));
    this.parts = createParts(kind);
    const { head, about, which, progress, failure, result, buttons } = this.parts;
    this.node = el(`section.fp-panel.fp-job-card.fp-${kind.name}`, { hidden: true, "aria-label": kind.title });
    this.node.append(head, about, failure, progress.node, which.node, result, buttons, this.fields.node);
    which.select.addEventListener("change", () => {
      this.chosen = which.select.value;
      this.#drawParts();
    });
  }

  /** Show the jobs of the run that is open, unless it has no model. @param {boolean} hasModel */
  open(hasModel) {
    const path = `${this.base()}/${this.kind.jobs}`;
    if (hasModel && this.path === path) return;
    this.close();
    if (!hasModel) return;
    this.path = path;
    this.poller.start();
  }
  close() {
    this.poller.stop();
    this.path = this.tag = this.chosen = this.drawn = "";
    this.found = null;
    this.fields.reset();
    this.node.hidden = true;
  }

  /** Draw what only one kind of card shows of the offer. @param {any} _offer */
  drawOffer(_offer) {}
  /** The result of a job and its buttons. @param {any} _job @returns {{ result: any[], buttons: any[] }} */
  partsOf(_job) {
    return { result: [], buttons: [] };
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
    setText(parts.about, offer.problem || this.kind.about);
    this.drawOffer(offer);
    parts.progress.draw(running, () => stopJob(running.id, this.run()));
    parts.failure.hidden = !failure;
    setText(parts.failure, failure);
    parts.which.draw(done, shown);
    this.fields.draw(offer, Boolean(running), newest || null);
    this.fields.remove.hidden = !newest || isAlive(newest) || newest.state === "done";
    this.fields.remove.onclick = () => removeJob(newest.id, this.run());
    const key = JSON.stringify(shown ?? null);
    if (key !== this.drawn) this.#drawResult(shown);
    this.drawn = key;
  }

  #drawResult(job) {
    const { result, buttons } = this.parts;
    result.hidden = buttons.hidden = !job;
    if (!job) return;
    const parts = this.partsOf(job);
    redraw(result, ...parts.result);
    redraw(buttons, ...parts.buttons);
  }

  /** The run, for requests. */
  run() {
    const refresh = () => {
      this.tag = "";
      if (this.path) this.poller.start();
    };
    return { base: this.base(), refresh };
  }
}

/** @param {Kind} kind */
function createParts({ title, about, progress: texts, choice, settings }) {
  const heading = el("h3", { tabindex: -1 }, title);
  const progress = createProgress(texts);
  return {
    head: el("div.fp-job-head", {}, heading, progress.status),
    heading,
    about: el("p.fp-dim", {}, about),
    which: createWhich(choice, settings),
    result: el("div.fp-job-section", { hidden: true }),
    buttons: actions(),
    ...{ progress, failure: failurePart("") },
  };
}

/** Which job is shown, and its settings. @param {string} label @param {(job: any) => string} settings */
function createWhich(label, settings) {
  const select = el("select.fp-select", { "aria-label": label });
  const text = el("span.fp-dim.fp-figures");
  const node = el("div.fp-results-which", {}, select, text);
  let drawn = ""; // so that an open menu stays as it is
  function draw(done, shown) {
    node.hidden = !shown;
    select.hidden = done.length < 2;
    if (!shown) return;
    const ids = done.map(({ id }) => id).join();
    if (ids !== drawn) redraw(select, ...done.map((job) => el("option", { value: job.id }, dateTime(job.created))));
    drawn = ids;
    select.value = shown.id;
    setText(text, settings(shown));
  }
  return { node, select, draw };
}
