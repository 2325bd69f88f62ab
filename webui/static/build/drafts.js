// @ts-check
// Stores the form's values: each edit at once in this browser, and with the next check on the server.
import { get, randomId, url } from "../api.js";
import { address } from "../dom.js";

const LAST = "fp-draft";
const LOCK_TRIES = 3;
const LOCK_PAUSE = 100; // ms
const MAY_HAVE_SECRETS = "launch.env"; // neither the server nor this browser stores these

const page = randomId(); // id of this load of the page: requests may arrive in a different order than they were sent
let draft = "";
let edits = 0;
/** @type {Record<string, any> | null} what the server may not have yet */
let unsaved = null;

export const draftId = () => draft;

// -- one draft per tab ------------------------------------------------------------------------------------------------

const draftIn = (storage) => (!address.get("preset") && storage.getItem(LAST)) || ""; // none for a link to a preset
/** The draft that this tab edits, also if it shows the rules or the help meanwhile; '' without one. */
export const ownDraft = () => address.get("draft") || draftIn(sessionStorage);
/** The draft that was last edited in any tab, for a new one; '' without one. */
export const lastDraft = () => draftIn(localStorage);

/** Edit the draft with this id, or a copy of it if another tab edits it already. */
export async function useDraft(id) {
  draft = (await isFree(id)) ? id : randomId();
  if (draft !== id) await isFree(draft);
  sessionStorage.setItem(LAST, draft);
  localStorage.setItem(LAST, draft);
  address.set({ draft }, { replace: true });
}

/** Whether no other tab edits this draft; if none does, this tab holds the draft's lock until the tab is closed. Locks
 * need https or localhost; without them, the result is always true. */
async function isFree(id) {
  if (!navigator.locks) return true;
  for (let tries = 0; tries < LOCK_TRIES; tries++) {
    if (tries) await new Promise((done) => setTimeout(done, LOCK_PAUSE)); // after a reload, this tab may still have it
    const mine = await new Promise((resolve) => {
      const hold = (lock) => {
        resolve(Boolean(lock));
        return lock && new Promise(() => {});
      };
      navigator.locks.request(`fp-draft-${id}`, { ifAvailable: true }, hold).catch(() => resolve(true));
    });
    if (mine) return true;
  }
  return false;
}

// -- edits ------------------------------------------------------------------------------------------------------------

const keyOf = (id) => `fp-unsaved-${id}`;

/** Keep the form's values in this browser until the server has them. @returns what a request adds to them */
export function keepEdit(values) {
  unsaved = { values, page, edit: ++edits };
  if (draft) {
    const kept = { ...values };
    delete kept[MAY_HAVE_SECRETS];
    try {
      localStorage.setItem(keyOf(draft), JSON.stringify(kept));
    } catch {
      // No room or no permission: the server saves the values with the next check.
    }
  }
  return { draft, page, edit: edits };
}

/** The server has saved the values up to this edit. @param {number} edit */
export function editSaved(edit) {
  if (edit !== edits) return;
  unsaved = null;
  localStorage.removeItem(keyOf(draft));
}

/** Send what the server may not have yet, in a request that continues after the page is closed. */
function sendUnsaved() {
  if (!unsaved || !draft) return;
  const headers = { "content-type": "application/json" };
  const body = JSON.stringify(unsaved);
  fetch(url(`api/drafts/${draft}`), { method: "POST", keepalive: true, headers, body }).catch(() => {});
}

export function saveWhenLeaving() {
  window.addEventListener("pagehide", sendUnsaved);
  document.addEventListener("visibilitychange", () => document.hidden && sendUnsaved()); // phones may send none later
}

/** A draft's values: the server's, updated with those that only this browser has; null if neither has any. `left_out`:
 * variables of launch.env that were not stored.
 * @param {string} id @returns {Promise<{ values: Record<string, any>, left_out: string[] } | null>} */
export async function loadDraft(id) {
  const saved = await get(`api/drafts/${encodeURIComponent(id)}`).catch((error) => {
    if (error.status !== 404) throw error;
  });
  const here = JSON.parse(localStorage.getItem(keyOf(id)) || "null");
  if (!saved && !here) return null;
  return { values: { ...(saved ? saved.values : {}), ...here }, left_out: saved ? saved.left_out : [] };
}

/** A sentence about variables that a draft, a run's options or an export lack; "" for none. @param {string[]} names */
export const leftOut = (names) =>
  names.length ? ` Left out of ${MAY_HAVE_SECRETS}, because secrets are not stored: ${names.join(", ")}.` : "";

/** Stored values with the variables that were not stored, as far as the form has them now, and the names of the others.
 * Lines that are all those of the form have their order, too.
 * @param {Record<string, any>} stored @param {string[]} names @param {Record<string, any>} now */
export function withSecretsOf(stored, names, now) {
  const nameOf = (line) => line.split("=")[0].trim();
  const current = String(now[MAY_HAVE_SECRETS] || "");
  const kept = current.split("\n").filter((line) => names.includes(nameOf(line)));
  const all = [stored[MAY_HAVE_SECRETS], ...kept].filter(Boolean).join("\n");
  const sorted = (text) => text.split("\n").sort().join("\n");
  const text = sorted(all) === sorted(current) ? current : all;
  const values = kept.length ? { ...stored, [MAY_HAVE_SECRETS]: text } : stored;
  return { values, missing: names.filter((name) => !kept.some((line) => nameOf(line) === name)) };
}
