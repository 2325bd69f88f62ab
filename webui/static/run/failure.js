// @ts-check
// Why a run failed, and the changes with which it can be started again: each opens Build with a copy of the run.
import { get } from "../api.js";
import { goTo, label, option } from "../build/form.js";
import { copy, el } from "../dom.js";
import { diffList, fixNote } from "../fixes.js";
import { bytes } from "../format.js";
import { fold } from "./run_results.js";

const OPTION_KEY = /\b[a-z]+\.[a-z]\w+/g;

/**
 * The cause, what to do, and the traceback. Options are links by their label. @returns {Node[]}
 * @param {any} failure @param {number} rankCount @param {(name: string) => void} openField
 */
export function failureParts(failure, rankCount, openField = goTo) {
  const onRank = Number.isFinite(failure.rank) && rankCount > 1;
  const trace = el("pre.fp-code.fp-trace", { tabindex: 0 }, failure.traceback || "");
  return [
    el("h3", {}, onRank ? `Error, first on rank ${failure.rank}` : "Error"),
    el("p.fp-failure-text", {}, withLinks(failure.sentence, openField)),
    failure.help ? el("p", {}, withLinks(failure.help, openField)) : null,
    failure.traceback ? fold("Traceback", trace, () => copy(failure.traceback, "Traceback")) : null,
  ].filter(Boolean);
}

/** A text with links in place of option keys. */
function withLinks(text, openField) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(OPTION_KEY)) {
    const [name] = match;
    if (!option(name)) continue;
    const link = el("button.fp-link", { type: "button", title: name, onclick: () => openField(name) }, label(name));
    parts.push(text.slice(end, match.index), link);
    end = match.index + name.length;
  }
  return [...parts, text.slice(end)];
}

/**
 * The remedies of a failed run: a list that is filled when they have been checked.
 * @param {string} base the run's API path @param {(fix: any) => void} cloneWith
 */
export function remedies(base, cloneWith) {
  const node = el(
    "div.fp-remedies",
    { role: "group", "aria-label": "Changes" },
    el("p.fp-dim", {}, "Checking suggested changes"),
  );
  get(`${base}/remedies`).then(
    (found) => drawRemedies(node, found, cloneWith),
    () => node.remove(),
  );
  return node;
}

function drawRemedies(node, { fixes, where, note }, cloneWith) {
  if (!fixes.length) {
    node.remove();
    return;
  }
  const row = (fix) =>
    el(
      "li",
      {},
      el(
        "div.fp-remedy-head",
        {},
        el("b", {}, fix.label),
        fix.peak ? el("span.fp-figures", {}, `${bytes(fix.peak)} ${where}`) : null,
        fixNote(fix),
      ),
      diffList(fix.diff),
      el("button.fp-button", { type: "button", onclick: () => cloneWith(fix) }, "Copy into form with this change"),
    );
  node.replaceChildren(
    el("h4", {}, fixes.length > 1 ? "Suggested changes for a new run" : "Suggested change for a new run"),
    note ? el("p.fp-dim", {}, note) : "",
    el("ul", {}, ...fixes.map(row)),
  );
}
