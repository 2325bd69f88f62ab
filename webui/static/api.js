// @ts-check
// Requests to the server: JSON in, JSON out. Errors carry the server's sentence.
import { rootPath } from "./gradio.js";

const GET_TIMEOUT = 30000; // ms; a lost request must not stop a poller forever

/** The URL of a path below the page's root, which a proxy may have moved. @param {string} path */
export const url = (path) => `${rootPath()}/${path.replace(/^\//, "")}`;

/**
 * An error response, or no response at all.
 * `status` and `data` are the response's, `offline` is true without one.
 */
export class RequestError extends Error {
  constructor(message, { status = 0, data = null, offline = false } = {}) {
    super(message);
    this.status = status;
    this.data = data;
    this.offline = offline;
  }
}

/** @returns {Promise<any>} the response's JSON; null for 204 */
async function request(method, path, body = undefined) {
  let response;
  try {
    response = await fetch(url(path), {
      method,
      headers: body === undefined ? {} : { "content-type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      signal: method === "GET" ? AbortSignal.timeout(GET_TIMEOUT) : undefined,
    });
  } catch {
    throw new RequestError("The server does not respond.", { offline: true });
  }
  const { status } = response;
  if (status === 204) return null;
  const isJson = (response.headers.get("content-type") || "").includes("json");
  const data = isJson ? await response.json() : { error: `The server responded with status ${status}.` };
  if (!response.ok)
    throw new RequestError(data.error || `The server responded with status ${status}.`, { status, data });
  return data;
}

export const get = (path) => request("GET", path);
export const post = (path, body = {}) => request("POST", path, body);
export const remove = (path) => request("DELETE", path);
/** @param {string} id */
export const runPath = (id) => `api/runs/${encodeURIComponent(id)}`;
