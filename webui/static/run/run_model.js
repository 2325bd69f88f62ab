// @ts-check
// The card "Your model" of the Run view: what a run has trained, where it is, and how to use it.
import { url } from "../api.js";
import { copy, el } from "../dom.js";
import { bytes, num } from "../format.js";
import { fold } from "./run_results.js";

/**
 * @param {{ folder: string, step: number | null, base: string, bytes: number, code: string }} model
 * @param {{ base: string, from: string, train: (fix: any) => void, showGenerations: (() => void) | null }} run base is
 * its API path, from the model that it started with, train opens Build with a change
 * @returns {Node[]}
 */
export function modelParts(model, { base, from, train, showGenerations }) {
  const kind = model.base ? `Adapter for ${model.base}` : "Full weights";
  const step = model.step === null ? "" : ` at step ${num(model.step)}`;
  return [
    el("h3", {}, "Your model"),
    el("p.fp-dim.fp-figures", {}, `${kind}${step}, ${bytes(model.bytes)}`),
    el("p", {}, el("code.fp-path", {}, model.folder)),
    fold("Python code that uses it", el("pre.fp-code", { tabindex: 0 }, model.code), () => copy(model.code, "Code")),
    el(
      "div.fp-run-actions",
      {},
      el("a.fp-button", { href: url(`${base}/model.zip`), download: "" }, "Download"),
      el("button.fp-button", { type: "button", onclick: () => copy(model.folder, "Folder") }, "Copy folder"),
      model.base ? null : furtherButton(model, from, train),
      showGenerations &&
        el("button.fp-button", { type: "button", onclick: showGenerations }, "Generations before and after"),
    ),
    model.base ? mergeHint(train) : null,
  ].filter(Boolean);
}

/** An adapter can be trained further when it is merged into its base model. */
function mergeHint(train) {
  const diff = [{ label: "Merge adapter", from: false, to: true }];
  const fix = { label: "Merge adapter", patch: { "save.merge_adapter": true }, diff };
  const button = el(
    "button.fp-link",
    { type: "button", onclick: () => train(fix) },
    "Copy into form with Merge adapter",
  );
  return el(
    "p.fp-dim",
    {},
    "Training further needs full weights, which a run saves with the option Merge adapter. ",
    button,
  );
}

/** Opens Build with the run's options and this model. */
function furtherButton({ folder }, from, train) {
  const patch = { "model.source": "path", "model.path": folder };
  const fix = { label: "the trained model", patch, diff: [{ label: "Model folder", from, to: folder }] };
  return el("button.fp-button", { type: "button", onclick: () => train(fix) }, "Train further");
}
