// @ts-check
// The panel of a run without progress: what each rank is doing.
import { post } from "../api.js";
import { attempt, copy, el } from "../dom.js";
import { fold } from "./run_results.js";

/** @param {() => string} base the run's API path */
export function createStacks(base) {
  let shownFor = "";
  const button = /** @type {HTMLButtonElement} */ (
    el("button.fp-button", { type: "button", onclick: () => ask() }, "Show what each rank is doing")
  );
  const answer = el("div.fp-stacks-answer", { "aria-live": "polite" });
  const node = el("section.fp-panel.fp-stacks", { hidden: true, "aria-label": "No progress" }, button, answer);

  const ask = () =>
    attempt(async () => {
      const asked = base();
      const found = await post(`${asked}/stacks`);
      if (asked === base()) answer.replaceChildren(...answerParts(found));
    }, button);

  /** @param {boolean} stalled */
  function draw(stalled) {
    if (shownFor !== base() || !stalled) answer.replaceChildren();
    shownFor = base();
    node.hidden = !stalled;
  }

  return { node, draw };
}

function answerParts({ explanation, ranks }) {
  const withStacks = ranks.filter((rank) => rank.text);
  const text = withStacks.map((rank) => `Rank ${rank.rank}, PID ${rank.pid}\n${rank.text}`).join("\n");
  return [
    el("p.fp-stacks-text", {}, explanation),
    withStacks.length ? fold("Stacks", el("pre.fp-code", { tabindex: 0 }, text), () => copy(text, "Stacks")) : null,
  ].filter(Boolean);
}
