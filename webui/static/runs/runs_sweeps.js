// @ts-check
// The runs of a sweep in the list of runs: one heading for all of them, which hides and shows them.
import { el, setText } from "../dom.js";

/** @typedef {import("./runs_search.js").Run} Run */
/** @typedef {{ id: string, heading: string, folded: boolean, runs: Run[] }} Heading `heading` is the id of the sweep */

/** @param {Run | Heading} item */
export const isHeading = (item) => "heading" in item;

/** The name of a sweep's run without what it varies. @param {Run} run */
export const baseName = ({ name = "", varied }) =>
  name.endsWith(` ${varied}`) ? name.slice(0, -varied.length - 1) : name;

/**
 * The rows of the table: the runs; those of a sweep are together under a heading, in the place of the first one. A run
 * that is the only one of its sweep in the list has no heading.
 * @param {Run[]} found @param {Set<string>} folded ids of sweeps @returns {(Run | Heading)[]}
 */
export function rowsOf(found, folded) {
  /** @type {Map<string, Run[]>} */
  const sweeps = new Map();
  for (const run of found) {
    if (!run.sweep) continue;
    if (!sweeps.has(run.sweep)) sweeps.set(run.sweep, []);
    sweeps.get(run.sweep)?.push(run);
  }
  return found.flatMap((run) => {
    const runs = sweeps.get(run.sweep) || [];
    if (runs.length < 2) return [run];
    if (runs[0] !== run) return [];
    const isFolded = folded.has(run.sweep);
    const heading = { id: `sweep ${run.sweep}`, heading: run.sweep, folded: isFolded, runs };
    return isFolded ? [heading] : [heading, ...runs];
  });
}

/** The heading's row. @param {number} span of columns @param {(sweep: string) => void} fold */
export function createHeading(span, fold) {
  const [name, about] = [el("span.fp-runs-sweep-name"), el("span.fp-dim")];
  let sweep = "";
  const button = el("button.fp-runs-fold", { type: "button", onclick: () => fold(sweep) }, name, about);
  const node = el("tr.fp-runs-sweep", {}, el("td", { colspan: span }, button));

  /** @param {Heading} heading @param {number} height of a row, px */
  function draw({ heading, folded, runs }, height) {
    sweep = heading;
    node.style.height = `${height}px`;
    setText(name, baseName(runs[0]));
    setText(about, `Sweep: ${countsOf(runs)}`);
    button.title = name.textContent;
    button.setAttribute("aria-expanded", String(!folded));
  }
  return { node, draw, drawSelection: () => {} };
}

/** "6 runs, 2 running, 4 done" @param {Run[]} runs */
function countsOf(runs) {
  const counts = new Map();
  for (const { state } of runs) counts.set(state, (counts.get(state) || 0) + 1);
  return [`${runs.length} runs`, ...[...counts].map(([state, count]) => `${count} ${state}`)].join(", ");
}
