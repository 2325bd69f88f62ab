// @ts-check
// Part of the card "Your model": exporting full weights as a quantized checkpoint of transformers, and whether the
// checkpoint is still the same model.
import { copy, el } from "../dom.js";
import { bytes } from "../format.js";
import {
  ALL_FIGURES,
  actions,
  button,
  createFormatMenu,
  deleteButton,
  failedPart,
  failureText,
  figures,
  isAlive,
  limitations,
  named,
  verdictPart,
} from "./run_jobs.js";

const WHY =
  "A quantized checkpoint needs less memory in transformers. Footplate compares the checkpoint's outputs with those " +
  "of the trained model.";
const startPart = createFormatMenu({
  path: "quantized",
  menu: "Format of the quantized checkpoint",
  text: "Export quantized checkpoint",
});

/** `quantized` has the newest checkpoint of each format, `quantized_formats` those that are offered. */
export const QUANTIZED = {
  work: "Quantizing",
  stop: "Stop quantizing",
  shown: ({ base, step, merge, quantized, quantized_formats: formats, is_reward_model: isRewardModel }) =>
    !isRewardModel && (!base || merge?.model) ? { step, quantized, formats } : null,
  jobs: ({ quantized }) => quantized,
  parts: quantizedParts,
};

function quantizedParts({ step, quantized, formats }, run, progress) {
  const done = quantized.filter((job) => job.model);
  const failed = quantized.filter((job) => !job.model && failureText(job));
  const isLeft = ({ format }) => !done.some((job) => job.format === format);
  const left = Object.fromEntries(formats.filter(isLeft).map(({ format, text }) => [format, text]));
  return [
    el("h4", {}, "Quantized checkpoint"),
    el("p.fp-dim", {}, WHY),
    ...done.map((job) => checkpointPart(job, run)),
    ...failed.map((job) => failedPart(job, job.label, run)),
    quantized.some(isAlive) ? progress : Object.keys(left).length > 0 && startPart(left, step, run),
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
      `Loaded in a new process and compared with the trained model: ${figures(found, limit)}. ${ALL_FIGURES}`,
    ),
    ...limitations(certificate.limits),
    actions(
      button("Copy folder", () => copy(model.folder, "Folder"), named("Copy folder", label)),
      deleteButton("Delete", `Delete the ${label} checkpoint?`, id, run, named("Delete", label)),
    ),
  );
}
