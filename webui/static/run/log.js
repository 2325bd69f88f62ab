// @ts-check
// The log of a run, requested by byte offset.
import { get, url } from "../api.js";
import { chip, el, notifyError } from "../dom.js";
import { createPoller } from "../poll.js";
import { LogView } from "./log_view.js";

/** The byte at which the text of a response starts. */
const startOf = (response, fallback) => (Number.isFinite(response.s) ? response.s : fallback);

/**
 * The log panel of the open run. `base()` is the run's API path, `hasEnded()` whether the run had ended before the
 * request.
 */
export function createLog({ base, hasEnded, isVisible, onTrouble }) {
  let offset = -1; // where the next request starts; -1: the last part
  const view = new LogView();
  const ranks = createRankMenu(view.frame, restart);
  const request = (query) => get(`${base()}/log?${query}${ranks.value() === "" ? "" : `&rank=${ranks.value()}`}`);
  const earlier = createEarlierButton(view, request);
  const save = el("a.fp-chip", { download: "" }, "Download");
  const { search } = view;
  const controls = [ranks.node, view.level, search.input, search.results.node, el("span.fp-gap")];
  controls.push(earlier.node, view.wrap, view.follow.button, save);
  const bar = el("div.fp-log-bar", {}, el("h3", {}, "Log"), controls);
  const node = el("section.fp-panel", { "aria-label": "Log" }, bar, view.frame);
  const poller = createPoller(pull, { isVisible, interval: 250, onTrouble });

  async function pull(isCurrent) {
    const last = hasEnded(); // read before the request, so that no line written meanwhile is lost
    const requested = offset;
    const response = await request(`off=${requested}${view.follow.isFollowing() ? "&latest=true" : ""}`);
    if (!isCurrent()) return undefined;
    if (!response) {
      view.showEmpty(last);
      return last ? "end" : undefined;
    }
    const start = startOf(response, requested < 0 ? response.o : requested);
    if (start < requested) {
      reset();
      return "more"; // the log file was replaced
    }
    if (start > requested) view.skipTo(start);
    offset = response.o;
    view.append(response.t, start);
    earlier.draw();
    return response.more ? "more" : undefined;
  }

  function reset() {
    offset = -1;
    view.reset();
    earlier.draw();
  }
  function restart() {
    reset();
    save.href = url(`${base()}/log.txt${ranks.value() === "" ? "" : `?rank=${ranks.value()}`}`);
    poller.start();
  }
  function open() {
    ranks.forget();
    search.input.value = "";
    restart();
  }
  return { node, open, close: poller.stop, resume: poller.start, offerRanks: ranks.offer };
}

/** A button that loads the part before the first line. @param {LogView} view */
function createEarlierButton(view, request) {
  const { lines } = view;
  const node = chip("Load earlier", load, { disabled: true });
  const draw = () => (node.disabled = lines.top <= 0);

  async function load() {
    const [first] = lines.chunks;
    node.disabled = true;
    try {
      // A part may contain no line of the selected rank.
      for (let text = ""; !text && lines.top > 0;) {
        const response = await request(`before=${lines.top}`);
        if (lines.chunks[0] !== first) return; // another run is shown, or the lines were trimmed meanwhile
        text = response ? response.t : "";
        view.prepend(text, response ? startOf(response, 0) : 0);
      }
    } catch (error) {
      notifyError(error);
    } finally {
      draw();
    }
  }
  return { node, draw };
}

/** The menu of ranks. `changed` is called after a choice. Lines show their rank while there are several. */
function createRankMenu(frame, changed) {
  let rank = "";
  let offered = "";
  const node = el("select.fp-select", { "aria-label": "Rank", hidden: true, onchange: select });

  function select() {
    rank = node.value;
    frame.classList.toggle("fp-ranked", !rank);
    changed();
  }
  /** @param {number[]} list */
  function offer(list) {
    if (String(list) === offered) return;
    offered = String(list);
    const choice = (r) => el("option", { value: r }, `Rank ${r}`);
    node.replaceChildren(el("option", { value: "" }, "All ranks"), ...list.map(choice));
    node.value = list.map(String).includes(rank) ? rank : "";
    node.hidden = list.length < 2;
    frame.classList.toggle("fp-ranked", list.length > 1 && !rank);
  }
  /** Another run has other ranks. */
  function forget() {
    rank = offered = "";
  }
  return { node, offer, forget, value: () => rank };
}
