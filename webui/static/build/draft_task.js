// @ts-check
// A server task that a card shows for a draft, such as a rehearsal: its id, its progress, and whether the form has
// changed since the task was started.
import { get, post } from "../api.js";
import { createPoller } from "../poll.js";
import { draftId } from "./drafts.js";

/**
 * FNV-1a: detects whether the form has changed without storing its values, which may contain secrets. The run's name
 * does not count.
 */
function checksumOf({ "logging.run_name": _, ...values }, machine) {
  let sum = 0x811c9dc5;
  for (const char of JSON.stringify([machine, Object.entries(values).sort()])) {
    sum = Math.imul(sum ^ (char.codePointAt(0) || 0), 0x01000193) >>> 0;
  }
  return String(sum);
}

/**
 * The last task `name` of each draft, so that two tabs do not show each other's tasks. `api` has the addresses of these
 * tasks; `draw` shows a status; `dismiss` is called if a later task has replaced this one.
 * @param {string} name
 * @param {{ api: string, draw: (status: any) => void, dismiss: () => void }} options
 */
export function createDraftTask(name, { api, draw, dismiss }) {
  const key = (draft) => `fp-${name}-${draft}`;
  const stored = () => (localStorage.getItem(key(draftId())) || "").split(" "); // the id, and a checksum of the values
  const id = () => stored()[0];
  const path = () => `${api}/${encodeURIComponent(id())}`;
  const poller = createPoller(poll, { isVisible: () => document.body.dataset.tab === "build", interval: 1000 });
  let checksum = ""; // checksum of the form's current values

  /** @param {() => boolean} isCurrent */
  async function poll(isCurrent) {
    try {
      const status = await get(path());
      if (!isCurrent()) return "end";
      draw(status);
      return status.state === "running" ? undefined : "end";
    } catch (error) {
      if (error.status !== 404) throw error;
      if (isCurrent()) dismiss();
      return "end";
    }
  }

  /** The form has these values now. */
  function compare(values, machine) {
    if (id()) checksum = checksumOf(values, machine);
  }

  /** Follow a task that was started for these values. */
  function keep(started, values, machine) {
    localStorage.setItem(key(draftId()), `${started} ${checksumOf(values, machine)}`);
    compare(values, machine);
    poller.start();
  }

  /** Show the last task of this draft, or of the draft `from` that this one was copied from. */
  function resume(from) {
    if (!draftId()) return;
    const earlier = localStorage.getItem(key(from));
    if (!id() && earlier) localStorage.setItem(key(draftId()), earlier);
    if (id()) poller.start();
  }

  return {
    compare,
    keep,
    resume,
    id,
    isActive: () => poller.isActive(),
    isOutdated: () => Boolean(id() && checksum && stored()[1]) && stored()[1] !== checksum,
    stop: () => post(`${path()}/stop`),
    forget: () => localStorage.removeItem(key(draftId())),
  };
}
