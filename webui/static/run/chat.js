// @ts-check
// The card "Chat" of the Run view: prompts for the trained model and its base model. The conversation is in the files
// of a job, so that it is there again after a reload.
import { get, post } from "../api.js";
import { confirmDialog, dismissErrors, el, notifyError, setText } from "../dom.js";
import { bytes, duration } from "../format.js";
import { createPoller } from "../poll.js";
import { createFields } from "./chat_fields.js";
import { createTurn } from "./chat_turn.js";
import { button, failurePart, failureText } from "./run_jobs.js";

const ABOUT =
  "Chat with the trained model and, for comparison, with its base model. A separate process keeps the models loaded " +
  "until five minutes after the last use, or until a run needs its device.";

/** The card, and what it shows of the run that is open. */
export class Chat {
  /** @param {() => string} base the run's API path @param {() => boolean} isVisible */
  constructor(base, isVisible) {
    this.base = base;
    this.path = "";
    this.shown = /** @type {any} */ (null); // the newest response
    this.turns = new Map(); // id -> its node
    this.busy = false;
    this.poller = createPoller((isCurrent) => this.#pull(isCurrent), { isVisible, interval: 300 });
    this.fields = createFields(() => this.#send());
    this.parts = createParts();
    const { head, about, memory, warning, failure, turns, start, end, stop, again, clear } = this.parts;
    this.node = el("section.fp-panel.fp-job-card.fp-chat", { hidden: true, "aria-label": "Chat" });
    this.node.append(head, about, failure, turns, memory, warning, start, this.fields.node);
    this.fields.actions.append(stop, again, clear);
    start.addEventListener("click", () => this.#act(() => post(this.path)));
    end.addEventListener("click", () => this.#act(() => post(`${this.path}/end`)));
    stop.addEventListener("click", () => this.#act(() => this.#stop()));
    again.addEventListener("click", () => this.#regenerate());
    clear.addEventListener("click", () => this.#clear());
  }

  /** Show the chat of the run that is open, unless it has no model. @param {boolean} hasModel
   * @param {{ prompt: string }[]} samples of the validation set */
  open(hasModel, samples) {
    this.fields.offerSamples(samples);
    if (hasModel && this.path === `${this.base()}/chat`) return;
    this.close();
    if (!hasModel) return;
    this.path = `${this.base()}/chat`;
    this.poller.start();
  }
  close() {
    this.poller.stop();
    this.path = "";
    this.shown = null;
    this.turns.clear();
    this.parts.turns.replaceChildren();
    this.fields.reset();
    this.node.hidden = true;
  }

  async #pull(isCurrent) {
    let found;
    try {
      found = await get(`${this.path}?have=${this.shown?.tag || ""}`);
    } catch (error) {
      if (error.status !== 409) throw error;
      if (isCurrent()) this.node.hidden = true; // the model is gone
      return "end";
    }
    if (!isCurrent()) return "end";
    if (found) this.#draw({ ...this.shown, ...found }); // a response without turns means that they have not changed
    if (!this.shown.alive) return "rest"; // another tab may start it
    return this.#running() || this.shown.job.state !== "running" ? undefined : "rest";
  }

  #draw(found) {
    this.shown = found;
    const isGenerating = found.alive && Boolean(this.#running());
    this.fields.draw(found.offer, found.turns[found.turns.length - 1], isGenerating, found.loaded);
    this.#drawTurns(found);
    this.parts.draw(found, { busy: this.busy, generating: Boolean(this.#running()) });
    this.fields.node.hidden = !found.alive && !found.turns.length;
    this.node.hidden = false;
  }

  #drawTurns({ turns, alive, job, offer }) {
    const list = this.parts.turns;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    const known = new Set(turns.map(({ id }) => id));
    for (const [id, turn] of this.turns) {
      if (known.has(id)) continue;
      turn.node.remove();
      this.turns.delete(id);
    }
    for (const turn of turns) {
      if (!this.turns.has(turn.id)) {
        this.turns.set(turn.id, createTurn(this.path, turn, offer.mode));
        list.append(this.turns.get(turn.id).node);
      }
      this.turns.get(turn.id).draw(turn, alive ? statusOf(job, alive) || "Waiting" : "Not generated");
    }
    list.hidden = !turns.length;
    if (atEnd) list.scrollTop = list.scrollHeight;
  }

  /** The turn that is being generated. */
  #running() {
    return (this.shown?.turns || []).find((turn) => !turn.done);
  }
  #request(body) {
    return post(`${this.path}/requests`, body);
  }
  async #act(work) {
    if (this.busy) return false;
    this.busy = true;
    dismissErrors();
    try {
      await work();
      return true;
    } catch (error) {
      notifyError(error);
      return false;
    } finally {
      this.busy = false;
      if (this.shown) this.parts.draw(this.shown, { busy: false, generating: Boolean(this.#running()) });
      if (this.path) this.poller.start();
    }
  }
  async #send() {
    const body = this.fields.request();
    if (!body.prompt.trim() || this.#running()) return;
    if (await this.#act(() => this.#request(body))) this.fields.sent();
    this.parts.turns.scrollTop = this.parts.turns.scrollHeight;
  }
  async #stop() {
    const running = this.#running();
    if (running) await this.#request({ kind: "stop", target: running.id });
  }
  #regenerate() {
    const { id, prompt, role, answers } = this.shown.turns[this.shown.turns.length - 1];
    this.#act(() => this.#request({ ...this.fields.request(), prompt, role, answers, replaces: id }));
  }
  async #clear() {
    if (!(await confirmDialog("Clear this conversation? It cannot be restored.", "Clear"))) return;
    await this.#act(async () => {
      await this.#stop();
      await this.#request({ kind: "clear" });
    });
  }
}

/** The parts around the fields. */
function createParts() {
  const status = el("span.fp-dim", { role: "status" });
  const end = el("button.fp-link", { type: "button", hidden: true }, "End chat");
  const parts = {
    head: el("div.fp-job-head", {}, el("h3", {}, "Chat"), status, el("span.fp-gap"), end),
    about: el("p.fp-dim", {}, ABOUT),
    memory: el("p.fp-dim.fp-figures"),
    warning: el("p.fp-job-warning", { role: "status" }),
    failure: failurePart(""),
    turns: el("ol.fp-chat-turns", { hidden: true, tabindex: 0, "aria-label": "Conversation" }),
    start: button("Chat with this model"),
    end,
    stop: button("Stop"),
    again: button("Regenerate"),
    clear: button("Clear"),
    draw,
  };
  function draw({ job, alive, turns, memory, loaded }, { busy, generating }) {
    parts.memory.hidden = !memory;
    setText(parts.memory, memory ? `${memory.text} ${lastStart(loaded)}`.trim() : "");
    parts.warning.hidden = !memory?.warning;
    setText(parts.warning, memory?.warning || "");
    const failure = failureText(job);
    parts.failure.hidden = !failure;
    setText(parts.failure, failure);
    setText(status, generating && job.state === "running" ? "" : statusOf(job, alive));
    parts.about.hidden = alive || turns.length > 0;
    parts.start.hidden = alive;
    setText(parts.start, turns.length || failure ? "Start again" : "Chat with this model");
    end.hidden = !alive || job.state === "stopping";
    parts.stop.hidden = !generating || !alive;
    parts.again.hidden = !turns.length || (generating && alive);
    parts.clear.hidden = !turns.length;
    for (const each of [parts.start, parts.stop, parts.again, parts.clear, end]) each.disabled = busy;
  }
  return parts;
}

/** How long the last start took, and how much memory it used. */
const lastStart = ({ seconds, bytes: size }) =>
  seconds ? `The last start took ${duration(seconds)} and used ${bytes(size)} of memory.` : "";

/** What the chat does now, or why it has ended. */
function statusOf(job, alive) {
  if (!job) return "";
  if (!alive) return job.result?.text || "";
  if (job.state === "queued") return job.sentence;
  if (job.state === "stopping") return "Ending the chat";
  if (job.state === "starting") return "Loading the libraries";
  return (job.text || "").replace(/\.$/, "");
}
