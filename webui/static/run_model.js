// @ts-check
// The card "Your model" of the Run view: what a run has trained, where it is, and how to use it.
import { url } from "./api.js";
import { copy, el } from "./dom.js";
import { bytes, num } from "./format.js";
import { fold } from "./run_results.js";

/**
 * @param {{ folder: string, step: number | null, base: string, bytes: number, code: string }} model
 * @param {string} base the run's API path @param {(fix: any) => void} cloneWith
 * @returns {Node[]}
 */
export function modelParts(model, base, cloneWith) {
  const kind = model.base ? `Adapter for ${model.base}` : "Full weights";
  const from = model.step === null ? "" : ` at step ${num(model.step)}`;
  return [
    el("h3", {}, "Your model"),
    el("p.fp-dim.fp-figures", {}, `${kind}${from}, ${bytes(model.bytes)}`),
    el("p", {}, el("code.fp-path", {}, model.folder)),
    fold("Python code that uses it", el("pre.fp-code", { tabindex: 0 }, model.code), () => copy(model.code, "Code")),
    el(
      "div.fp-run-actions",
      {},
      el("a.fp-button", { href: url(`${base}/model.zip`), download: "" }, "Download"),
      el("button.fp-button", { type: "button", onclick: () => copy(model.folder, "Folder") }, "Copy folder"),
      model.base ? null : furtherButton(model, cloneWith),
    ),
  ];
}

/** Opens Build with the run's options and this model. */
function furtherButton({ folder }, cloneWith) {
  const patch = { "model.source": "path", "model.path": folder };
  const fix = { label: "the trained model", patch, diff: [{ label: "Model folder", from: "", to: folder }] };
  return el("button.fp-button", { type: "button", onclick: () => cloneWith(fix) }, "Train further");
}
