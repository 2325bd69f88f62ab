// @ts-check
// Part of the card "Your model": exporting full weights as a GGUF file, and whether llama.cpp runs the same model.
import { post, remove, url } from "../api.js";
import { confirmDialog, copy, el } from "../dom.js";
import { bytes, num, percent } from "../format.js";
import { actions, ask, button, isAtWork, named, runningParts } from "./run_merge.js";
import { fold } from "./run_results.js";

const FORMATS = {
  q8_0: "q8_0: 8 bits, half the size of 16 bits",
  f16: "f16: 16 bits, closest to the trained model",
  bf16: "bf16: 16 bits, for weights beyond the range of fp16",
};
const WHY =
  "A GGUF file runs in llama.cpp, Ollama and LM Studio. Footplate compares its outputs with the trained model's.";
let chosen = "q8_0";

/**
 * @param {any[]} jobs the newest export of each format
 * @param {{ base: string, step: number | null, refresh: () => void }} run base is its API path, step that of the model
 * @returns {Node[]}
 */
export function ggufParts(jobs, run) {
  const running = jobs.find(isAtWork);
  const done = jobs.filter((job) => job.gguf);
  const failed = jobs.find((job) => !job.gguf && !isAtWork(job) && job.state !== "stopped");
  const left = Object.keys(FORMATS).filter((format) => !done.some((job) => job.format === format));
  return [
    el("h4", {}, "GGUF"),
    el("p.fp-dim", {}, WHY),
    ...done.map((job) => filePart(job, run)),
    failed ? el("p.fp-merge-failure", {}, failureText(failed)) : null,
    ...(running ? runningParts(running, "Stop exporting", `${run.base}/gguf`, run) : []),
    !running && left.length ? startPart(left, run) : null,
  ].filter(Boolean);
}

const failureText = (job) =>
  `${job.format}: ${[job.failure?.sentence || job.sentence, job.failure?.help].filter(Boolean).join(" ")}`;

function startPart(formats, run) {
  if (!formats.includes(chosen)) [chosen] = formats;
  const option = (format) => el("option", { value: format, selected: format === chosen }, FORMATS[format]);
  const onchange = (event) => {
    chosen = event.target.value;
  };
  const select = el("select.fp-select", { "aria-label": "GGUF format", onchange }, ...formats.map(option));
  const start = () => ask(post(`${run.base}/gguf`, { step: run.step, format: chosen }), run);
  return actions(select, button("Export as GGUF", start));
}

function filePart(job, run) {
  const { certificate } = job.result;
  const jobPath = `${run.base}/gguf/${job.id}`;
  const [file, ...others] = job.gguf.files;
  const link = (name, label) => {
    const href = url(`${jobPath}/files/${encodeURIComponent(name)}`);
    return el("a.fp-button", { href, download: "", ...named(label, job.format) }, label);
  };
  const removeIt = async () => {
    if (await confirmDialog(`Delete the GGUF file in ${job.format}?`, "Delete", true)) ask(remove(jobPath), run);
  };
  return el(
    "div.fp-gguf",
    {},
    el("p.fp-dim.fp-figures", {}, `${job.format}, ${bytes(job.gguf.bytes)}`),
    el("p", {}, el("code.fp-path", {}, job.gguf.file)),
    verdict(certificate),
    ...certificate.limits.map((limit) => el("p.fp-dim", {}, `Limitation: ${limit}`)),
    fold(`Outputs of the trained model and of llama.cpp (${job.format})`, outputs(certificate)),
    actions(
      link(file, "Download GGUF"),
      ...others.map((name) =>
        link(name, name === "Modelfile" ? "Modelfile for Ollama (untested)" : "Certificate (report of the comparison)"),
      ),
      button("Copy path", () => copy(job.gguf.file, "Path"), named("Copy path", job.format)),
      button("Delete", removeIt, named("Delete", job.format)),
    ),
  );
}

function verdict(certificate) {
  const { status, trained_to_file: found, max_kl_mean: limit } = certificate;
  const stops = certificate.stop_tokens.join(", ");
  const [kl, share, count] = [num(found.kl_mean, 2), percent(found.same_argmax), num(found.positions)];
  return el(
    "p.fp-merge-verdict",
    {},
    el("b", {}, `${status[0].toUpperCase()}${status.slice(1)}`),
    `. Compared in llama.cpp with the trained model: KL divergence ${kl} nats per token ` +
      `(at most ${num(limit, 2)} is accepted), same most likely next token at ${share} of ${count} positions, ` +
      `llama.cpp stops at ${stops}.`,
  );
}

function outputs(certificate) {
  const side = (label, { text, stopped }) =>
    `${label} (${stopped ? "ended with a stop token" : "reached the limit of new tokens"}):\n${text}`;
  const texts = certificate.outputs.map((output) =>
    [`Prompt:\n${output.prompt}`, side("Trained model", output.trained), side("llama.cpp", output.llama_cpp)].join(
      "\n\n",
    ),
  );
  return el("pre.fp-code", { tabindex: 0 }, texts.join("\n\n---\n\n"));
}
