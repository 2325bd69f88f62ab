// @ts-check
// Requests to the server: JSON in, JSON out. Errors carry the server's sentence.
import { rootPath } from "./gradio.js";

const GET_TIMEOUT = 30000; // ms; without a timeout, a lost request would stop a poller forever
const PUT_TIMEOUT = 120000; // ms for a part of a file, also over a slow line
const SKEW = 10000; // ms: a smaller difference of two clocks may be the time that a response takes

let ahead = 0; // ms that the server's clock is ahead of this browser's
/** Now, in Unix seconds by the server's clock, as the times of runs are. */
export const serverTime = () => (Date.now() + ahead) / 1000;

/** The URL of a path below the page's root, which a proxy may have moved. @param {string} path */
export const url = (path) => `${rootPath()}/${path.replace(/^\//, "")}`;

/**
 * An error response, or no response at all.
 * `status` and `data` come from the response; `offline` is true if there was none.
 */
export class RequestError extends Error {
  constructor(message, { status = 0, data = null, offline = false } = {}) {
    super(message);
    this.status = status;
    this.data = data;
    this.offline = offline;
  }
}

/** @param {RequestInit} [options] @returns {Promise<any>} the response's JSON; null for 204 */
async function request(method, path, options = {}) {
  let [response, text] = [/** @type {any} */ (null), ""];
  try {
    response = await fetch(url(path), { method, cache: "no-store", ...options });
    readClock(response.headers.get("date"));
    text = await response.text(); // the connection may be lost before the whole response has arrived
  } catch {
    throw new RequestError("The server does not respond.", { offline: true });
  }
  const { status } = response;
  if (status === 204) return null;
  const isJson = (response.headers.get("content-type") || "").includes("json");
  const data = isJson ? JSON.parse(text) : { error: `The server responded with status ${status}.` };
  if (!response.ok)
    throw new RequestError(data.error || `The server responded with status ${status}.`, { status, data });
  return data;
}

/** @param {string | null} date of a response */
function readClock(date) {
  const difference = Date.parse(date || "") - Date.now();
  ahead = Math.abs(difference) > SKEW ? difference : 0;
}

export const get = (path) => request("GET", path, { signal: AbortSignal.timeout(GET_TIMEOUT) });
export const post = (path, body = {}) =>
  request("POST", path, { headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
/** @param {string} path @param {ArrayBuffer} body @param {AbortSignal} signal */
export const put = (path, body, signal) =>
  request("PUT", path, { body, signal: AbortSignal.any([signal, AbortSignal.timeout(PUT_TIMEOUT)]) });
export const remove = (path) => request("DELETE", path);
/** @returns {string} */
export const randomId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * The keys of requests that start something. A repeated request has the same key, so a double click, or a retry after a
 * lost response, starts only once. After an edit, or after `forget()`, there is a new key.
 */
export function createKeys() {
  let [sent, key] = ["", ""];
  return {
    keyOf(body) {
      const text = JSON.stringify(body);
      if (text !== sent) [sent, key] = [text, randomId()];
      return key;
    },
    forget: () => (sent = ""),
  };
}

/** @param {string} id */
export const runPath = (id) => `api/runs/${encodeURIComponent(id)}`;
