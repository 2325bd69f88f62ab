// @ts-check
// Repeats a request while its view is visible, less often while the server is away, until there is nothing left to do.
import { on } from "./dom.js";

const REST = 3000; // ms

/**
 * `work(isCurrent)` does one round. It returns "more" (call it again at once), "rest" (call it again after a longer
 * pause, since little is expected to change), "end" (stop polling) or nothing. After every await, `work` must discard
 * its response unless isCurrent(). `onTrouble(count, error)` gets the number of failures in a row; 0 after a recovery.
 */
export function createPoller(work, { isVisible, interval = 700, hiddenInterval = 5000, onTrouble = (..._) => {} }) {
  let generation = 0; // a late response to a request of an earlier generation is discarded
  let timer = 0;
  let busy = false;
  let active = false;
  let failures = 0;

  function schedule(wait) {
    clearTimeout(timer);
    timer = setTimeout(round, wait);
  }

  async function round() {
    if (!active || busy || !isVisible()) return; // `wake` continues
    const mine = generation;
    const isCurrent = () => mine === generation;
    busy = true;
    let wait = 0;
    try {
      const next = await work(isCurrent);
      if (!isCurrent()) return;
      if (failures) onTrouble((failures = 0));
      if (next === "end") active = false;
      wait = next === "more" ? 0 : document.hidden ? hiddenInterval : next === "rest" ? REST : interval;
    } catch (error) {
      if (!isCurrent()) return;
      onTrouble(++failures, error);
      wait = Math.min(10000, 500 * 2 ** failures);
    }
    busy = false;
    if (active) schedule(wait);
  }

  function start() {
    generation += 1;
    busy = false;
    active = true;
    schedule(0);
  }
  function stop() {
    generation += 1;
    busy = false;
    active = false;
    clearTimeout(timer);
    if (failures) onTrouble((failures = 0));
  }
  function wake() {
    if (active && !busy && !document.hidden) schedule(0);
  }

  document.addEventListener("visibilitychange", wake);
  on("view", wake);
  return { start, stop, wake, isActive: () => active };
}
