// @ts-check
// Part of the card "Your model": exporting full weights as a quantized checkpoint of transformers, and whether it is
// still the same model.
import { copy, el } from "../dom.js";
import { bytes } from "../format.js";
import {
  actions,
  button,
  createFormatMenu,
  deleteButton,
  failurePart,
  failureText,
  figures,
  isAlive,
  limitations,
  named,
  verdictPart,
} from "./run_jobs.js";

const FORMATS = {
  "bnb-nf4": "bitsandbytes NF4: 4 bits",
  "bnb-int8": "bitsandbytes LLM.int8: 8 bits",
  "torchao-int8": "torchao int8: 8 bits, weights only",
  "torchao-fp8": "torchao fp8: 8 bits, weights only",
};
const WHY =
  "A quantized checkpoint needs less memory in transformers. Footplate compares its outputs with those of the " +
  "trained model.";
const startPart = createFormatMenu({
  path: "quantized",
  menu: "Format of the quantized checkpoint",
  text: "Export quantized checkpoint",
  labels: FORMATS,
});

/** `quantized` has the newest checkpoint of each format. */
export const QUANTIZED = {
  work: "Quantizing",
  stop: "Stop quantizing",
  shown: ({ base, step, merge, quantized, is_reward_model: isRewardModel }) =>
    !isRewardModel && (!base || merge?.model) ? { step, quantized } : null,
  jobs: ({ quantized }) => quantized,
  parts: quantizedParts,
};

function quantizedParts({ step, quantized }, run, progress) {
  const done = quantized.filter((job) => job.model);
  const failed = quantized.find((job) => !job.model && failureText(job));
  const left = Object.keys(FORMATS).filter((format) => !done.some((job) => job.format === format));
  return [
    el("h4", {}, "Quantized checkpoint"),
    el("p.fp-dim", {}, WHY),
    ...done.map((job) => checkpointPart(job, run)),
    failed && failurePart(`${failed.label}: ${failureText(failed)} ${failed.failure?.help || ""}`.trim()),
    quantized.some(isAlive) ? progress : left.length > 0 && startPart(left, step, run),
  ];
}

function checkpointPart({ id, label, model, result: { certificate } }, run) {
  const { trained_to_checkpoint: found, max_kl_mean: limit } = certificate;
  return el(
    "div.fp-gguf",
    {},
    el("p.fp-dim.fp-figures", {}, `${label}, ${bytes(model.bytes)}`),
    el("p", {}, el("code.fp-path", {}, model.folder)),
    verdictPart(
      certificate.status,
      `Loaded in a new process and compared with the trained model: ${figures(found, limit)}.`,
    ),
    ...limitations(certificate.limits),
    actions(
      button("Copy folder", () => copy(model.folder, "Folder"), named("Copy folder", label)),
      deleteButton("Delete", `Delete the ${label} checkpoint?`, id, run, named("Delete", label)),
    ),
  );
}
