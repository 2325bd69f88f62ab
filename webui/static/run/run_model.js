// @ts-check
// The card "Your model" of the Run view: what a run has trained, where it is, and how to use it.
import { url } from "../api.js";
import { copy, el } from "../dom.js";
import { bytes, num } from "../format.js";
import { ggufParts } from "./run_gguf.js";
import { furtherButton, mergeParts } from "./run_merge.js";
import { publishParts } from "./run_publish.js";
import { fold } from "./run_results.js";

/**
 * @param {{ folder: string, step: number | null, base: string, bytes: number, code: string, merge: any,
 * gguf: any[], publications: any[], further: any, is_reward_model: boolean }} model
 * @param {{ base: string, from: string, train: (fix: any) => void, refresh: () => void, showGenerations: (() => void) |
 * null }} run base is its API path, from the model that it started with, train opens Build with a change
 * @returns {Node[]}
 */
export function modelParts(model, { base, from, train, refresh, showGenerations }) {
  const kind = model.base ? `Adapter for ${model.base}` : "Full weights";
  const step = model.step === null ? "" : ` at step ${num(model.step)}`;
  const hasGguf = !model.is_reward_model && (!model.base || model.merge?.model);
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
      furtherButton(model, from, train),
      showGenerations &&
        el("button.fp-button", { type: "button", onclick: showGenerations }, "Generations before and after"),
    ),
    ...(model.base ? mergeParts(model.merge, { base, step: model.step, from, train, refresh }) : []),
    ...(hasGguf ? ggufParts(model.gguf, { base, step: model.step, refresh }) : []),
    ...publishParts(model, { base, refresh }),
  ].filter(Boolean);
}
