// @ts-check
// Part of the card "Your model": merging an adapter into its base model, how the merged model compares with
// the two, and training further with a model.
import { post } from "../api.js";
import { copy, el } from "../dom.js";
import { bytes, num, percent } from "../format.js";
import {
  ALL_FIGURES,
  actions,
  ask,
  button,
  deleteButton,
  downloadLink,
  failurePart,
  failureText,
  isAlive,
  limitations,
  removeJob,
  verdictPart,
} from "./run_jobs.js";

const WHY =
  "Merge the adapter into the base model's weights for programs that cannot load adapters, or for export as GGUF.";

/** `merge` is the newest merge of this adapter, null without one. */
export const MERGE = {
  work: "Merging",
  stop: "Stop merging",
  shown: ({ base, step, merge }) => (base ? { step, merge } : null),
  jobs: ({ merge }) => [merge],
  parts: mergeParts,
};

function mergeParts({ step, merge }, run, progress) {
  if (isAlive(merge)) return [progress];
  if (merge?.state === "done" && merge.model) return mergedParts(merge, run);
  const failure = failureText(merge);
  const start = () => ask(post(`${run.base}/merges`, { step }), run.refresh);
  return [
    failure ? failurePart(failure) : el("p.fp-dim", {}, WHY),
    actions(
      button(failure ? "Merge again" : "Merge into base model", start),
      failure ? button("Delete", () => removeJob(merge.id, run), { "aria-label": "Delete failed merge" }) : null,
    ),
  ];
}

function mergedParts({ id, model, result: { certificate } }, run) {
  const saved = certificate.adapter_to_saved;
  const [share, count, kl] = [percent(saved.same_argmax), num(saved.positions), num(saved.kl_mean, 2)];
  const same = `same most likely next token at ${share} of ${count} positions, KL divergence ${kl} nats per token`;
  const scores = `the scores of ${count} texts differ from the unmerged model's by at most ${num(saved.kl_max, 2)}`;
  const compared = certificate.is_reward_model ? scores : same;
  const question = "Delete the merged model? The adapter stays.";
  return [
    el("h4", {}, "Merged model"),
    el("p.fp-dim.fp-figures", {}, `Full weights in ${certificate.dtype}, ${bytes(model.bytes)}`),
    el("p", {}, el("code.fp-path", {}, model.folder)),
    verdictPart(
      certificate.status,
      `Loaded from its files. Compared with the base model and the adapter: ${compared}. ${ALL_FIGURES}`,
    ),
    ...limitations(certificate.limits),
    actions(
      downloadLink("Download merged model", `${run.base}/merges/${id}/model.zip`),
      button("Copy folder", () => copy(model.folder, "Folder")),
      furtherButton(model, run, "Train merged model further"),
      deleteButton("Delete merged model", question, id, run),
    ),
  ];
}

/** Opens Build with the run's options and this model. */
export function furtherButton({ folder, base, further }, { from, train }, text = "Train further") {
  if (!further) return null;
  const change = base ? { label: "Adapter folder", from: "", to: folder } : { label: "Model folder", from, to: folder };
  const fix = { label: base ? "the trained adapter" : "the trained model", patch: further, diff: [change] };
  return button(text, () => train(fix));
}
