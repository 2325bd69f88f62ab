// @ts-check
// The card "Evaluation" of the Run view: base model and trained model on the same examples. It is computed by a job, so
// that it goes on without the page.
import { get, post, remove, url } from "../api.js";
import { confirmDialog, el, isFocusLost, notifyError, redraw, setText } from "../dom.js";
import { dateTime } from "../format.js";
import { createPoller } from "../poll.js";
import { hasEnded } from "../run_state.js";
import { createExamples } from "./evaluation_examples.js";
import { createFields, settingsText } from "./evaluation_fields.js";
import { scoresTable } from "./evaluation_scores.js";

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
    this.hadFocus = false; // when something was clicked whose button may be gone after the next response
    this.poller = createPoller((isCurrent) => this.#pull(isCurrent), { isVisible });
    this.fields = createFields(() => this.#act(() => post(this.path, this.fields.values())));
    this.parts = createParts();
    const { head, about, earlier, work, failure, result, actions } = this.parts;
    this.node = el("section.fp-panel.fp-evaluation", { hidden: true, "aria-label": "Evaluation" });
    this.node.append(head, about, failure, work, earlier.node, result, actions, this.fields.node);
    earlier.select.addEventListener("change", () => {
      this.chosen = earlier.select.value;
      this.#draw();
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
      this.#draw();
    }
    return this.found.jobs.some(({ state }) => !hasEnded(state)) ? undefined : "rest"; // another tab may start one
  }

  #draw() {
    const { offer, jobs } = this.found;
    const parts = this.parts;
    this.node.hidden = Boolean(offer.problem) && !jobs.length;
    const newest = jobs[0];
    const running = newest && !hasEnded(newest.state) ? newest : null;
    const failed = newest && !running && newest.state !== "done" ? newest : null;
    const done = jobs.filter(({ state }) => state === "done");
    const shown = done.find(({ id }) => id === this.chosen) || done[0];
    parts.about.hidden = Boolean(shown) && !offer.problem;
    setText(parts.about, offer.problem || ABOUT);
    parts.drawWork(running, () => this.#act(() => post(`${this.path}/${running.id}/stop`)));
    parts.drawFailure(failed);
    parts.earlier.draw(done, shown);
    this.fields.draw(offer, Boolean(running), newest || null);
    this.fields.remove.hidden = !failed;
    this.fields.remove.onclick = () => this.#act(() => remove(`${this.path}/${newest.id}`));
    const key = JSON.stringify(shown ?? null);
    if (key !== this.drawn) this.#drawResult(shown);
    this.drawn = key;
    if (this.hadFocus && isFocusLost()) parts.heading.focus({ preventScroll: true });
    this.hadFocus = false;
  }

  #drawResult(job) {
    const { result, actions } = this.parts;
    result.hidden = actions.hidden = !job;
    if (!job) return;
    const path = `${this.path}/${job.id}`;
    const { comparisons, limits, examples } = job.result;
    const parts = [
      scoresTable(comparisons),
      comparisons.some(({ name }) => name === "general_loss") ? el("p.fp-dim", {}, GENERAL) : null,
      ...limits.map((limit) => el("p.fp-dim", {}, `Limitation: ${limit}`)),
      examples ? createExamples(path, comparisons) : null,
    ];
    redraw(result, ...parts);
    const removeIt = async () => {
      if (await confirmDialog("Delete this evaluation?", "Delete", true)) this.#act(() => remove(path));
    };
    redraw(
      actions,
      examples ? el("a.fp-button", { href: url(`${path}/examples.json`), download: "" }, "Download examples") : null,
      el("button.fp-button", { type: "button", onclick: removeIt }, "Delete evaluation"),
    );
  }

  async #act(work) {
    this.hadFocus = this.node.contains(document.activeElement);
    try {
      await work();
    } catch (error) {
      notifyError(error);
    }
    this.tag = "";
    if (this.path) this.poller.start();
  }
}

const STATES = { queued: "Waiting", starting: "Starting", stopping: "Stopping" };

function createParts() {
  const heading = el("h3", { tabindex: -1 }, "Evaluation");
  const status = el("span.fp-dim", { role: "status" }); // screen readers need not hear each number of the progress
  const bar = el("span");
  const progress = el("div.fp-progress", { role: "progressbar", "aria-label": "Progress of the evaluation" }, bar);
  const text = el("p.fp-dim");
  const stop = el("button.fp-button", { type: "button" }, "Stop evaluation");
  const work = el("div.fp-evaluation-work", { hidden: true }, text, progress, stop);
  const failure = el("p.fp-chat-failure", { hidden: true, role: "alert" });
  return {
    head: el("div.fp-chat-head", {}, heading, status),
    heading,
    about: el("p.fp-dim", {}, ABOUT),
    earlier: createEarlier(),
    result: el("div.fp-evaluation-result", { hidden: true }),
    actions: el("div.fp-run-actions", { hidden: true }),
    ...{ work, failure, drawWork, drawFailure },
  };
  function drawWork(job, onStop) {
    work.hidden = !job;
    setText(status, job ? STATES[job.state] || "Evaluating" : "");
    if (!job) return;
    progress.setAttribute("aria-valuenow", String(Math.round(100 * (job.fraction || 0))));
    const isStopping = job.state === "stopping";
    setText(text, isStopping ? "Stopping. What is computed is kept." : job.text || job.sentence);
    bar.style.width = `${100 * (job.fraction || 0)}%`;
    stop.disabled = isStopping;
    stop.onclick = onStop;
  }
  function drawFailure(job) {
    const sentence = job && job.state !== "stopped" ? job.failure?.sentence || job.sentence : "";
    failure.hidden = !sentence;
    setText(failure, sentence);
  }
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
