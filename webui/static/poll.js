// Asks again and again while its part of the page is seen; waits longer while the server is away; stops at the end.
"use strict";
// work(current) does one round. It says "more" (ask again at once), "end" (nothing more will come), or nothing;
// after every await it must drop its answer unless current(). `trouble(n)` hears the failures in a row (0: well again).
window.FPPoll = (work, { seen, pace = 700, hidden = 5000, trouble = () => {} }) => {
  let turn = 0; // a late answer of an earlier turn changes nothing
  let timer = 0;
  let busy = false;
  let live = false;
  let failures = 0;

  function later(wait) { clearTimeout(timer); timer = setTimeout(round, wait); }

  async function round() {
    if (!live || busy || !seen()) return; // `wake` continues
    const mine = turn;
    const current = () => mine === turn;
    busy = true;
    let wait = 0;
    try {
      const said = await work(current);
      if (!current()) return;
      if (failures) trouble((failures = 0));
      if (said === "end") live = false;
      wait = said === "more" ? 0 : document.hidden ? hidden : pace;
    } catch (error) {
      if (!current()) return;
      trouble(++failures, error);
      wait = Math.min(10000, 500 * 2 ** failures);
    }
    busy = false;
    if (live) later(wait);
  }

  function start() { turn += 1; busy = false; live = true; later(0); }
  function stop() { turn += 1; busy = false; live = false; clearTimeout(timer); if (failures) trouble((failures = 0)); }
  function wake() { if (live && !busy && !document.hidden) later(0); }

  document.addEventListener("visibilitychange", wake);
  FP.on("tab", wake);
  return { start, stop, wake, running: () => live };
};
