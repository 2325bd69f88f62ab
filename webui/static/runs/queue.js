// @ts-check
// The waiting runs: their order, and what can be changed. Part of the Runs view; the Run view also holds and releases.
import { post, runPath } from "../api.js";
import { attempt, confirmDialog, el } from "../dom.js";

/** @typedef {{ id: string, place: string, name: string, held: boolean, elsewhere: string, reason: string,
 *   in_use: boolean, starts: string }} Waiting */

/** Hold, release, share or move a waiting run. */
export const changeQueue = (id, changes) => post(`${runPath(id)}/queue`, changes);

/** Remove a run from the queue, after a question. */
export async function removeFromQueue(id, name) {
  const question = `Remove ${name} from the queue? It will not start now; you can start it again later.`;
  if (!(await confirmDialog(question, "Remove from queue", true))) return;
  await post(`${runPath(id)}/stop`, { save: false, queued: true }); // it may have started since the question
}

/** The panel above the list of runs. `changed` is called after every change. @param {() => void} changed */
export function createQueue(changed) {
  const list = el("ol");
  const head = el("h3", { id: "fp-queue-title" }, "Queue");
  const none = el("p.fp-dim", { hidden: true }, "No run is waiting.");
  const node = el("section.fp-panel.fp-queue", { hidden: true, "aria-labelledby": "fp-queue-title" }, head, list, none);
  let drawn = "";
  let rest = 0; // pixels of space below
  const height = () => node.getBoundingClientRect().height;

  async function act(button, work) {
    await attempt(work, button);
    changed();
  }

  /** @param {Waiting[]} queue */
  function draw(queue) {
    const text = JSON.stringify(queue);
    if (text === drawn) return;
    drawn = text;
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    const row = focused?.closest("li[data-run]")?.getAttribute("data-run");
    const action = focused?.dataset.action;
    const [before, isUsed] = [height() + rest, node.parentElement?.matches(":hover, :focus-within")];
    node.hidden &&= !queue.length;
    none.hidden = queue.length > 0;
    list.replaceChildren(...queue.map((run, index) => lineOf(run, queue, index, act)));
    if (row && action) list.querySelector(`li[data-run="${CSS.escape(row)}"] [data-action="${action}"]`)?.focus();
    keepFree(Math.max(0, before - height()));
    if (!isUsed) fit();
  }

  /** Leave space below the panel, so that the list stays under the pointer when a run leaves the queue. */
  function keepFree(pixels) {
    rest = pixels;
    node.style.setProperty("--fp-queue-rest", `${pixels}px`);
  }

  /** Take no more space than needed. */
  function fit() {
    keepFree(0);
    node.hidden = !list.childElementCount;
  }
  return { node, draw, fit };
}

/**
 * A waiting run with its buttons, which `act` on a click.
 * @param {Waiting} run @param {Waiting[]} queue @param {number} index
 * @param {(button: any, work: () => Promise<any>) => void} act
 */
function lineOf(run, queue, index, act) {
  const button = (text, label, work, disabled = false) => {
    const made = el("button.fp-chip", { type: "button", disabled, "aria-label": `${label}: ${run.name}` }, text);
    made.title = label;
    made.addEventListener("click", () => act(made, work));
    made.dataset.action = label;
    return made;
  };
  const [previous, afterNext] = [queue[index - 1], queue[index + 2]];
  const change = (changes) => () => changeQueue(run.id, changes);
  const actions = [
    run.in_use && button("Start anyway", "Start even though another program uses the GPU", change({ shares: true })),
    button("\u2191", "Move up", change({ before: previous?.place }), !previous),
    button("\u2193", "Move down", change({ before: afterNext?.place || "" }), index + 1 === queue.length),
    run.held ? button("Release", "Release", change({ held: false })) : button("Hold", "Hold", change({ held: true })),
    button("Remove", "Remove from queue", () => removeFromQueue(run.id, run.name)),
  ];
  const name = !run.elsewhere ? el("a", { href: `?tab=run&run=${encodeURIComponent(run.id)}` }, run.name) : run.name;
  return el(
    "li",
    { "data-run": run.id },
    el("span.fp-queue-name", {}, name),
    el("span.fp-dim.fp-queue-reason", {}, [run.reason, run.starts].filter(Boolean).join(" ")),
    el("span.fp-queue-actions", {}, run.elsewhere || actions.filter(Boolean)),
  );
}
