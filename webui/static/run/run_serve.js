// @ts-check
// Part of the card "Your model": serving a GGUF file, or weights with vLLM, with an OpenAI-compatible API.
import { get, post } from "../api.js";
import { attempt, copy, el } from "../dom.js";
import { num } from "../format.js";
import { actions, ask, button, failurePart, failureText, isAlive } from "./run_jobs.js";
import { fold } from "./run_results.js";

const WHY =
  "Serves the model to programs on this machine with an OpenAI-compatible API on 127.0.0.1: a GGUF file with " +
  "llama.cpp on the CPU, or the weights with vLLM on an NVIDIA GPU. Requests need the API token.";

/** `server` is the newest server of the run. */
export const SERVER = {
  work: "Serving",
  stop: "Stop serving",
  shown: ({ gguf, server, vllm }) => (server || vllm || gguf.some((job) => job.gguf) ? { gguf, server, vllm } : null),
  jobs: ({ server }) => (server ? [server] : []),
  parts: serverParts,
};

function serverParts({ gguf, server, vllm }, run, progress) {
  const runs = isAlive(server);
  const files = gguf.filter((job) => job.gguf);
  return [
    el("h4", {}, "Serve"),
    el("p.fp-dim", {}, WHY),
    failureText(server) && failurePart(failureText(server)),
    runs && server.address && addressPart(server, run),
    runs ? progress : files.length > 0 && startPart(files, run),
    !runs && vllm && vllmPart(vllm, run),
  ];
}

/** The files are named by their paths: an export of another checkpoint may be newer, in the same format. */
function startPart(files, run) {
  const option = ({ format, gguf }) => el("option", { value: gguf.file }, format);
  const file = el("select.fp-select", { "aria-label": "File to serve" }, ...files.map(option));
  const body = () => ({ engine: "llama.cpp", file: file.value });
  const start = () => ask(post(`${run.base}/servers`, body()), run.refresh);
  return actions(file, button("Serve this model", start));
}

/** `vllm`: why it cannot serve the model ('' if it can), what to know about it, and which model it serves. */
function vllmPart({ reason, note, step, merged }, run) {
  const start = () => ask(post(`${run.base}/servers`, { engine: "vllm", step, merged }), run.refresh);
  const label = merged ? "Serve merged model with vLLM" : "Serve with vLLM";
  return el("div.fp-gguf", {}, el("p.fp-dim", {}, reason || note), reason ? null : actions(button(label, start)));
}

function addressPart(server, run) {
  const path = `${run.base}/servers/${server.id}`;
  const token = el("code.fp-path", { hidden: true });
  const show = () =>
    attempt(async () => {
      token.textContent = (await get(`${path}/token`)).token;
      token.hidden = false;
    });
  const parallel =
    { 0: "", 1: ", one request at a time" }[server.parallel] ?? `, ${server.parallel} requests at a time`;
  const notes = [
    server.note,
    `Model ${server.name}, ${server.format}, context of ${num(server.context)} tokens${parallel}.`,
    !server.is_chat && "This is not a chat model: use /v1/completions.",
    server.is_chat && server.without_tools,
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
