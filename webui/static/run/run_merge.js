// @ts-check
// Parts of the card "Your model": merging an adapter into its base model, what the comparison of both says, and
// training further with full weights.
import { post, remove, url } from "../api.js";
import { confirmDialog, copy, el, notify } from "../dom.js";
import { bytes, num, percent } from "../format.js";
import { hasEnded } from "../run_state.js";

const WHY =
  "Merge the adapter into the base model's weights for programs that cannot load adapters, or for export as GGUF.";

/** Whether a merge or an export runs, so that the page asks for its progress. */
export const isAtWork = (job) => Boolean(job) && !hasEnded(job.state);

/**
 * @param {any} job the newest merge of this adapter, null without one
 * @param {{ base: string, step: number | null, from: string, train: (fix: any) => void, refresh: () => void }} run base
 * is its API path, step that of the adapter
 * @returns {Node[]}
 */
export function mergeParts(job, run) {
  if (isAtWork(job)) return runningParts(job, "Stop merging", `${run.base}/merges`, run);
  if (job?.state === "done" && job.model) return mergedParts(job, run);
  const failed = job && job.state !== "stopped";
  const why = failed ? job.failure?.sentence || job.sentence : WHY;
  return [
    el(failed ? "p.fp-merge-failure" : "p.fp-dim", {}, why),
    actions(button(failed ? "Merge again" : "Merge into base model", () => start(run))),
  ];
}

/** What a job does, how far it is, and a button. @returns {Node[]} */
export function progressParts(job, stopButton) {
  const share = el("span");
  share.style.width = `${100 * (job.fraction || 0)}%`;
  return [
    el("p.fp-dim", { role: "status" }, job.text || job.sentence),
    el("div.fp-progress", {}, share),
    actions(stopButton),
  ];
}

/** Progress of a job below the API path `jobs`, and a button that stops it. */
export const runningParts = (job, label, jobs, run) =>
  progressParts(
    job,
    button(label, () => ask(post(`${jobs}/${job.id}/stop`), run)),
  );

function mergedParts(job, run) {
  const { certificate } = job.result;
  const saved = certificate.adapter_to_saved;
  const [share, count, kl] = [percent(saved.same_argmax), num(saved.positions), num(saved.kl_mean, 2)];
  const same = `same most likely next token at ${share} of ${count} positions, KL divergence ${kl} nats per token`;
  const scores = `the scores of ${count} texts differ by at most ${num(saved.kl_max, 2)}`;
  const compared = certificate.is_reward_model ? scores : same;
  const { status } = certificate;
  const removeIt = async () => {
    if (await confirmDialog("Delete the merged model? The adapter stays.", "Delete", true))
      ask(remove(`${run.base}/merges/${job.id}`), run);
  };
  return [
    el("h4", {}, "Merged model"),
    el("p.fp-dim.fp-figures", {}, `Full weights in ${certificate.dtype}, ${bytes(job.model.bytes)}`),
    el("p", {}, el("code.fp-path", {}, job.model.folder)),
    el(
      "p.fp-merge-verdict",
      {},
      el("b", {}, `${status[0].toUpperCase()}${status.slice(1)}`),
      `. Loaded from its files and compared with base model and adapter: ${compared}.`,
    ),
    ...certificate.limits.map((limit) => el("p.fp-dim", {}, `Limitation: ${limit}`)),
    actions(
      el("a.fp-button", { href: url(`${run.base}/merges/${job.id}/model.zip`), download: "" }, "Download merged model"),
      button("Copy folder", () => copy(job.model.folder, "Folder")),
      furtherButton(job.model, run.from, run.train, "Train merged model further"),
      button("Delete merged model", removeIt),
    ),
  ];
}

export const actions = (...children) => el("div.fp-run-actions", {}, ...children);
export const button = (label, onclick, attributes = {}) =>
  el("button.fp-button", { type: "button", onclick, ...attributes }, label);
/** The name of a button that several parts of the card have. */
export const named = (label, of) => ({ "aria-label": `${label}: ${of}` });
const start = (run) => ask(post(`${run.base}/merges`, { step: run.step }), run);

/** Show the error of a request, and the new state either way. */
export async function ask(request, run) {
  try {
    await request;
  } catch (error) {
    notify(error.message, { level: "error" });
  }
  run.refresh();
}

/** Opens Build with the run's options and this model. */
export function furtherButton({ folder, base, further }, from, train, text = "Train further") {
  if (!further) return null;
  const change = base ? { label: "Adapter folder", from: "", to: folder } : { label: "Model folder", from, to: folder };
  const fix = { label: base ? "the trained adapter" : "the trained model", patch: further, diff: [change] };
  return el("button.fp-button", { type: "button", onclick: () => train(fix) }, text);
}
