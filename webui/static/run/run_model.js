// @ts-check
// The card "Your model" of the Run view: what a run has trained, where it is, and how to use it.
import { copy, el } from "../dom.js";
import { bytes, num } from "../format.js";
import { GGUF } from "./run_gguf.js";
import { actions, button, createSection, downloadLink, keepFocus } from "./run_jobs.js";
import { MERGE, furtherButton } from "./run_merge.js";
import { PUBLICATIONS } from "./run_publish.js";
import { QUANTIZED } from "./run_quantized.js";
import { fold } from "./run_results.js";
import { SERVER } from "./run_serve.js";

const ABOUT = {
  shown: ({ merge, gguf, gguf_missing, quantized, quantized_formats, server, vllm, publications, ...about }) => about,
  parts: aboutParts,
};

/** The card, a section for each thing to do with the model. */
export function createModelCard() {
  const heading = el("h3", { tabindex: -1 }, "Your model");
  const sections = [ABOUT, MERGE, GGUF, QUANTIZED, SERVER, PUBLICATIONS].map(createSection);
  const status = el(
    "div.fp-sr",
    {},
    sections.map((section) => section.status),
  );
  const node = el("section.fp-panel.fp-job-card.fp-model", { hidden: true, "aria-label": "Your model" }, heading);
  node.append(...sections.map((section) => section.node), status);
  /**
   * @param {{ folder: string, step: number | null, base: string, bytes: number, code: string, merge: any, gguf: any[],
   * gguf_missing: string, quantized: any[], quantized_formats: any[], server: any, vllm: any, publications: any[],
   * further: any, is_reward_model: boolean } | null} model
   * @param {{ base: string, from: string, train: (fix: any) => void, refresh: () => void, showGenerations: (() => void)
   * | null }} run base is its API path, from the model that it started with, train opens Build with a change
   */
  function draw(model, run) {
    node.hidden = !model;
    if (model) keepFocus(node, heading, () => sections.forEach((section) => section.draw(model, run)));
  }
  const close = () => (node.hidden = true);
  return { node, draw, close };
}

function aboutParts(model, run) {
  const kind = model.base ? `Adapter for ${model.base}` : "Full weights";
  const step = model.step === null ? "" : ` at step ${num(model.step)}`;
  return [
    el("p.fp-dim.fp-figures", {}, `${kind}${step}, ${bytes(model.bytes)}`),
    el("p", {}, el("code.fp-path", {}, model.folder)),
    fold("Python code that uses the model", el("pre.fp-code", { tabindex: 0 }, model.code), () =>
      copy(model.code, "Code"),
    ),
    actions(
      downloadLink("Download", `${run.base}/model.zip`),
      button("Copy folder", () => copy(model.folder, "Folder")),
      furtherButton(model, run),
      run.showGenerations && button("Generations before and after", run.showGenerations),
    ),
  ];
}
