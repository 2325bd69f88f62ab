// @ts-check
// What the Run view and the list of runs share: states, progress, actions.
import { post, remove, runPath } from "./api.js";
import { confirmDialog, setText } from "./dom.js";

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

/** @param {string} name @returns {Promise<boolean>} */
export function confirmDelete(name) {
  const text = `Delete ${name}? Its log, metrics, checkpoints and model are deleted from the disk. There is no undo.`;
  return confirmDialog(text, "Delete", true);
}
