// @ts-check
// Undo and redo for the whole form: what each change replaced. Typing into one field is one change.

const PAUSE = 1000; // ms; after such a pause, typing into the same field is a new change
const MAX_CHANGES = 200;

/** @typedef {{ before: Record<string, any>, after: Record<string, any>, at: number, typed: boolean }} Change */
/** @type {Change[]} */
const past = [];
/** @type {Change[]} */
let future = [];

/**
 * Remember a change, from the values `before` to the values `after`.
 * @param {Record<string, any>} before @param {Record<string, any>} after @param {boolean} typed
 */
export function remember(before, after, typed = false) {
  const [name, ...more] = Object.keys(after);
  if (!name) return;
  future = [];
  const last = past.at(-1);
  const at = Date.now();
  if (typed && !more.length && last && last.typed && name in last.after && at - last.at < PAUSE) {
    Object.assign(last, { after, at });
    return;
  }
  past.push({ before, after, at, typed });
  if (past.length > MAX_CHANGES) past.shift();
}

/** @returns {Record<string, any> | null} the values to set; null if nothing can be undone */
export function undo() {
  const change = past.pop();
  if (!change) return null;
  future.push(change);
  return change.before;
}

/** @returns {Record<string, any> | null} the values to set; null if nothing can be redone */
export function redo() {
  const change = future.pop();
  if (!change) return null;
  past.push({ ...change, typed: false });
  return change.after;
}

export const canUndo = () => past.length > 0;

/** Forget all changes: the form has its first values. */
export function forgetChanges() {
  past.length = 0;
  future = [];
}
