// @ts-check
// Part of the card "Your model": serving an exported GGUF file with an OpenAI-compatible API.
import { get, post } from "../api.js";
import { attempt, copy, el } from "../dom.js";
import { num } from "../format.js";
import { actions, ask, button, failurePart, failureText, isAlive } from "./run_jobs.js";
import { fold } from "./run_results.js";

const WHY =
  "Serves a GGUF file to programs on this machine with an OpenAI-compatible API on 127.0.0.1, by llama.cpp on the " +
  "CPU. Requests need the API token.";

/** `server` is the newest server of the run. */
export const SERVER = {
  work: "Serving",
  stop: "Stop serving",
  shown: ({ gguf, server }) => (server || gguf.some((job) => job.gguf) ? { gguf, server } : null),
  jobs: ({ server }) => (server ? [server] : []),
  parts: serverParts,
};

function serverParts({ gguf, server }, run, progress) {
  const runs = isAlive(server);
  const formats = gguf.filter((job) => job.gguf).map((job) => job.format);
  return [
    el("h4", {}, "Serve"),
    el("p.fp-dim", {}, WHY),
    failureText(server) && failurePart(`${failureText(server)} ${server.failure?.help || ""}`.trim()),
    runs && server.address && addressPart(server, run),
    runs ? progress : formats.length > 0 && startPart(formats, run),
  ];
}

function startPart(formats, run) {
  const option = (format) => el("option", { value: format }, format);
  const format = el("select.fp-select", { "aria-label": "File to serve" }, ...formats.map(option));
  const start = () => ask(post(`${run.base}/servers`, { format: format.value }), run.refresh);
  return actions(format, button("Serve this model", start));
}

function addressPart(server, run) {
  const path = `${run.base}/servers/${server.id}`;
  const token = el("code.fp-path", { hidden: true });
  const show = () =>
    attempt(async () => {
      token.textContent = (await get(`${path}/token`)).token;
      token.hidden = false;
    });
  const parallel = server.parallel === 1 ? "one request at a time" : `${server.parallel} requests at a time`;
  const notes = [
    `Model ${server.name}, ${server.format}, context of ${num(server.context)} tokens, ${parallel}.`,
    !server.is_chat && "This is not a chat model: use /v1/completions.",
    server.is_chat &&
      !server.has_tools &&
      "The chat template does not support tools: llama.cpp ignores those of a request.",
  ];
  return el(
    "div.fp-gguf",
    {},
    el("p", {}, el("code.fp-path", {}, server.address)),
    el("p.fp-dim", {}, notes.filter(Boolean).join(" ")),
    el("p", {}, token),
    fold("Request with curl", el("pre.fp-code", { tabindex: 0 }, server.curl), () => copy(server.curl, "Command")),
    fold("Python code", el("pre.fp-code", { tabindex: 0 }, server.python), () => copy(server.python, "Code")),
    actions(
      button("Copy address", () => copy(server.address, "Address")),
      button("Show API token", show),
    ),
  );
}
