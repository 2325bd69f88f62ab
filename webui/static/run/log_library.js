// @ts-check
// Which lines of a log are known messages of libraries that say nothing about the run. The view folds them; the file,
// the search and the download include them.

/** Patterns that match from the beginning of a line. An error is never folded, even if a pattern matches it. */
const MESSAGES = [
  /^Failed to load \S*torchao\S*\.so|^Skipping import of cpp extensions/, // torchao 0.18: kernels of other GPUs
  /^W\d{4} .*torch\/utils\/_pytree\.py:\d+\]/, // torch 2.13: classes that torchao registers as pytree nodes
  /^[^\s:][^:]*\.py:\d+: \w*Warning: .*_register_pytree_node/, // transformers with torch 2.2 or later
  /^W\d{4} .*torch\/distributed\/run\.py:\d+\]\s*(\**$|Setting OMP_NUM_THREADS)/, // torch: torchrun's default
  /^W\d{4} .*torch\/distributed\/launcher\/api\.py:\d+\] config has no run_id/, // torch: without --rdzv-id
  /^\[W\S* .*\[c10d\] The hostname of the client socket cannot be retrieved/, // torch: no reverse DNS
  /^\[Gloo\] Rank \d+ is connected to \d+ peer ranks/, // torch: gloo's start
  /^huggingface\/tokenizers: The current process just got forked/, // tokenizers, with the two lines that follow it
  /^Disabling parallelism to avoid deadlocks|^To disable this warning, you can either:/, // tokenizers
  /^[^\s:][^:]*(site|dist)-packages\/[^:]+\.py:\d+: (Future|Deprecation|PendingDeprecation)Warning: /, // for developers
];
const MAX_CHARACTERS = 1000; // of a line that are tested; some patterns take quadratic time
const CONTINUES = /^\s+\S/; // a line of source code under a warning
const TRACEBACK = /Traceback \(most recent call last\):/;
// When torchrun 2.13 is stopped, it logs a traceback of its own process, which ends with this exception.
const STOPPED = /^W\d{4} .*torch\/distributed\/elastic\/.*\] (Received \d+ death signal|Sending process \d+ closing)/;
const STOPPED_BY_SIGNAL = /^torch\.distributed\.elastic\.\S*SignalException: /;
const PREFIX = /^\[rank(\d+)\]: ?/; // torch's prefix of warnings and of each line of a traceback

const isOfStop = (/** @type {string} */ text) =>
  TRACEBACK.test(text) || CONTINUES.test(text) || STOPPED_BY_SIGNAL.test(text);

/**
 * A function that tells of each line of a text, in order, whether it is a library's message ("message"), continues one
 * ("more"), or neither (""). A traceback lasts until its first line that is not indented. Tracebacks are never folded,
 * except torchrun's own after a signal, which only says that the run was stopped.
 */
export function createLibraryFilter() {
  const last = /** @type {Record<string, "" | "folded" | "traceback" | "stopped">} */ ({}); // by rank: its last line
  return (/** @type {string} */ line, /** @type {string} */ launcherRank, /** @type {string} */ level) => {
    const prefix = PREFIX.exec(line);
    const text = line.slice(prefix ? prefix[0].length : 0).slice(0, MAX_CHARACTERS);
    const rank = launcherRank || (prefix ? prefix[1] : "");
    if (!rank && (STOPPED.test(text) || (last[rank] === "stopped" && isOfStop(text)))) {
      last[rank] = STOPPED_BY_SIGNAL.test(text) ? "" : "stopped";
      return STOPPED.test(text) ? "message" : "more";
    }
    if (TRACEBACK.test(text) || (last[rank] === "traceback" && !/^\S/.test(text))) {
      last[rank] = "traceback";
      return "";
    }
    const isMessage = level !== "error" && MESSAGES.some((pattern) => pattern.test(text));
    const continues = !isMessage && level !== "error" && last[rank] === "folded" && CONTINUES.test(text);
    last[rank] = isMessage || continues ? "folded" : "";
    return isMessage ? "message" : continues ? "more" : "";
  };
}
