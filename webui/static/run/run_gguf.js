// @ts-check
// Part of the card "Your model": exporting full weights or an adapter as a GGUF file, and whether llama.cpp runs the
// same model.
import { copy, el } from "../dom.js";
import { bytes } from "../format.js";
import {
  actions,
  button,
  createFormatMenu,
  deleteButton,
  downloadLink,
  failedPart,
  failureText,
  figures,
  isAlive,
  limitations,
  missingPart,
  named,
  verdictPart,
} from "./run_jobs.js";
import { fold } from "./run_results.js";

const FORMATS = {
  q8_0: "q8_0: 8 bits, half the size of 16 bits",
  q6_k: "q6_k: about 6.6 bits",
  q5_k_m: "q5_k_m: about 5.7 bits",
  q4_k_m: "q4_k_m: about 4.9 bits, the usual choice for large models",
  f16: "f16: 16 bits, closest to the trained model",
  bf16: "bf16: 16 bits, for weights beyond the range of fp16",
  "lora-q8_0": "lora-q8_0: adapter as GGUF LoRA, base model in q8_0",
  "lora-q4_k_m": "lora-q4_k_m: adapter as GGUF LoRA, base model in q4_k_m",
  "lora-f16": "lora-f16: adapter as GGUF LoRA, base model in f16",
  "lora-bf16": "lora-bf16: adapter as GGUF LoRA, base model in bf16",
};
const FILES = {
  Modelfile: "Modelfile for Ollama (untested)",
  "lm-studio.preset.json": "Preset for LM Studio (untested)",
  "certificate.json": "Certificate (report of the comparison)",
};
const WHY =
  "A GGUF file runs in llama.cpp, Ollama and LM Studio, and Footplate can serve it with an API. Footplate compares " +
  "the file's outputs with those of the trained model.";
const isLora = (format) => format.startsWith("lora-");
const startPart = createFormatMenu({ path: "gguf", menu: "GGUF format", text: "Export as GGUF" });

/** `gguf` has the newest export of each format. */
export const GGUF = {
  work: "Exporting",
  stop: "Stop exporting",
  shown: ({ base, step, merge, gguf, gguf_missing: missing, is_reward_model: isRewardModel }) =>
    isRewardModel ? null : { step, gguf, missing, isFull: !base || Boolean(merge?.model), isAdapter: Boolean(base) },
  jobs: ({ gguf }) => gguf,
  parts: ggufParts,
};

function ggufParts({ step, gguf, missing, isFull, isAdapter }, run, progress) {
  const done = gguf.filter((job) => job.gguf);
  const failed = gguf.filter((job) => !job.gguf && failureText(job));
  const isLeft = (format) => (isLora(format) ? isAdapter : isFull) && !done.some((job) => job.format === format);
  const left = Object.fromEntries(Object.entries(FORMATS).filter(([format]) => isLeft(format)));
  return [
    el("h4", {}, "GGUF"),
    el("p.fp-dim", {}, isFull ? WHY : `${WHY} Without a merge, the adapter is exported as GGUF LoRA.`),
    ...done.map((job) => filePart(job, run)),
    ...failed.map((job) => failedPart(job, job.format, run)),
    missing && missingPart(missing),
    gguf.some(isAlive) ? progress : Object.keys(left).length > 0 && startPart(left, step, run),
  ];
}

function filePart(job, run) {
  const { certificate } = job.result;
  const [file, ...others] = job.gguf.files;
  const adapter = job.gguf.adapter;
  const size = adapter
    ? `adapter ${bytes(job.gguf.adapter_bytes)}, base model ${bytes(job.gguf.bytes)}`
    : bytes(job.gguf.bytes);
  const label = (name) => FILES[name] || (adapter?.endsWith(name) ? "Download GGUF LoRA" : name);
  const link = (name, label) =>
    downloadLink(label, `${run.base}/gguf/${job.id}/files/${encodeURIComponent(name)}`, named(label, job.format));
  const question = `Delete the GGUF file in ${job.format}?`;
  return el(
    "div.fp-gguf",
    {},
    el("p.fp-dim.fp-figures", {}, `${job.format}, ${size}`),
    adapter && el("p", {}, el("code.fp-path", {}, adapter)),
    el("p", {}, el("code.fp-path", {}, job.gguf.file)),
    verdict(certificate),
    certificate.replaced && el("p.fp-dim", {}, certificate.replaced),
    ...limitations(certificate.limits),
    fold(`Outputs of the trained model and of llama.cpp (${job.format})`, outputs(certificate)),
    actions(
      link(file, adapter ? "Download GGUF of the base model" : "Download GGUF"),
      ...others.map((name) => link(name, label(name))),
      button("Copy path", () => copy(job.gguf.file, "Path"), named("Copy path", job.format)),
      deleteButton("Delete", question, job.id, run, named("Delete", job.format)),
    ),
  );
}

function verdict(certificate) {
  const { status, trained_to_file: found, max_kl_mean: limit, stop_tokens: stops } = certificate;
  const compared = `Compared in llama.cpp with the trained model: ${figures(found, limit)}`;
  return verdictPart(status, `${compared}, llama.cpp stops at ${stops.join(", ")}.`);
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
