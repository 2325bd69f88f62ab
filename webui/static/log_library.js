// @ts-check
// Which lines of a log are known messages of libraries that say nothing about the run. The view folds them; the file,
// the search and the download have all of them.

/** One row per library. An error is never folded, whatever it matches. */
const MESSAGES = [
  /Failed to load \S*torchao\S*\.so|Skipping import of cpp extensions/, // torchao 0.18: kernels of other GPUs
  /torch\/utils\/_pytree\.py:\d+|_register_pytree_node/, // torch 2.13: classes that torchao registers as pytree nodes
  /torch\/distributed\/run\.py:\d+\]\s*(\**$|Setting OMP_NUM_THREADS)/, // torch: torchrun's default for OMP_NUM_THREADS
  /\[c10d\] The hostname of the client socket cannot be retrieved/, // torch: no reverse DNS
  /\[Gloo\] Rank \d+ is connected to \d+ peer ranks/, // torch: gloo's start
  /huggingface\/tokenizers: The current process just got forked/, // tokenizers, with the two lines that follow it
  /^Disabling parallelism to avoid deadlocks|^To disable this warning, you can either:/, // tokenizers
  /(site|dist)-packages\/\S+\.py:\d+: (Future|Deprecation|PendingDeprecation)Warning: /, // any: for its developers
];
const CONTINUES = /^\s+\S/; // a line of source code under a warning

/**
 * A function that tells of each line of a text, in order, whether it is a library's message ("message"), continues one
 * ("more"), or neither ("").
 */
export function createLibraryFilter() {
  const last = /** @type {Record<string, boolean>} */ ({}); // rank -> whether its last line was folded
  return (/** @type {string} */ text, /** @type {string} */ rank, /** @type {string} */ level) => {
    const isMessage = level !== "error" && MESSAGES.some((pattern) => pattern.test(text));
    const continues = !isMessage && level !== "error" && Boolean(last[rank]) && CONTINUES.test(text);
    last[rank] = isMessage || continues;
    return isMessage ? "message" : continues ? "more" : "";
  };
}
