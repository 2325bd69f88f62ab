// @ts-check
// What the Run view and the list of runs share: states, progress, actions.
import { post, remove, runPath } from "./api.js";
import { confirmDialog, setText } from "./dom.js";
import { num } from "./format.js";

const MOST_NAMES = 10; // in a question
const ALIVE = ["new", "queued", "starting", "running", "stopping"];
export const STATES = {
  new: "New",
  queued: "Queued",
  starting: "Starting",
  running: "Running",
  stopping: "Stopping",
  done: "Done",
  stopped: "Stopped",
  failed: "Failed",
  lost: "Lost",
  damaged: "Damaged",
  deleting: "Deleting",
};

export const hasEnded = (state) => !ALIVE.includes(state);

export function drawBadge(node, state) {
  setText(node, STATES[state] || state);
  node.dataset.state = state;
}

/**
 * The completed fraction, or null if it is unknown. From steps only: the fraction of a phase (a download, an
 * evaluation) would make the bar jump back and forth.
 */
export function progressOf({ state, step, max_steps: total }) {
  if (state === "done") return 1;
  return total ? Math.min(1, (step || 0) / total) : null;
}

/** The text of the button that starts a run. @param {string} resume its text if the run has a checkpoint, else '' */
export const startLabel = (state, resume) => (state === "new" ? "Start" : resume || "Start again");
export const resumeRun = (id, fromScratch = false) => post(`${runPath(id)}/resume`, { from_scratch: fromScratch });
export const deleteRun = (id) => remove(runPath(id));

/** @param {string} id @param {string} name @returns {Promise<boolean>} */
export async function confirmDelete(id, name) {
  const text = `Delete ${name}? Its log, metrics, checkpoints and model are deleted from the disk. There is no undo.`;
  return confirmDialog(text + (await neededBy([id])), "Delete", true);
}

/** A sentence about the other runs that need the files of these runs; '' if there are none. @param {string[]} ids */
export async function neededBy(ids) {
  const { names } = await post("api/runs/dependents", { ids });
  if (!names.length) return "";
  const [use, those] = names.length === 1 ? ["uses", "that run"] : ["use", "those runs"];
  const then = `a restart, merge or export of ${those} may fail afterwards`;
  return ` ${listed(names)} ${use} a model or checkpoint from there: ${then}.`;
}

/** The names of runs, but not of all if there are many. @param {string[]} names */
export function listed(names) {
  const rest = names.length - MOST_NAMES;
  return rest > 1 ? `${names.slice(0, MOST_NAMES).join(", ")} and ${num(rest)} more` : names.join(", ");
}
