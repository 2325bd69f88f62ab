// @ts-check
// Part of the card "Your model": exporting full weights as a quantized checkpoint of transformers, and whether it is
// still the same model.
import { post } from "../api.js";
import { copy, el } from "../dom.js";
import { bytes, num, percent } from "../format.js";
import {
  actions,
  ask,
  button,
  deleteButton,
  failurePart,
  failureText,
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
let chosen = "bnb-nf4";

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

function startPart(formats, step, run) {
  if (!formats.includes(chosen)) [chosen] = formats;
  const option = (format) => el("option", { value: format, selected: format === chosen }, FORMATS[format]);
  const onchange = (event) => {
    chosen = event.target.value;
  };
  const select = el(
    "select.fp-select",
    { "aria-label": "Format of the quantized checkpoint", onchange },
    ...formats.map(option),
  );
  const start = () => ask(post(`${run.base}/quantized`, { step, format: chosen }), run.refresh);
  return actions(select, button("Export quantized checkpoint", start));
}

function checkpointPart({ id, label, model, result: { certificate } }, run) {
  const { trained_to_checkpoint: found, max_kl_mean: limit } = certificate;
  const [kl, share, count] = [num(found.kl_mean, 2), percent(found.same_argmax), num(found.positions)];
  return el(
    "div.fp-gguf",
    {},
    el("p.fp-dim.fp-figures", {}, `${label}, ${bytes(model.bytes)}`),
    el("p", {}, el("code.fp-path", {}, model.folder)),
    verdictPart(
      certificate.status,
      `Loaded in a new process and compared with the trained model: KL divergence ${kl} nats per token (at most ` +
        `${num(limit, 2)} is accepted), same most likely next token at ${share} of ${count} positions.`,
    ),
    ...limitations(certificate.limits),
    actions(
      button("Copy folder", () => copy(model.folder, "Folder"), named("Copy folder", label)),
      deleteButton("Delete", `Delete the ${label} checkpoint?`, id, run, named("Delete", label)),
    ),
  );
}
