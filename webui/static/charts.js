// @ts-check
// The charts that runs have, and the values of their curves.

/**
 * A chart: the series `key`, and a second series over it, whose best point is marked if `marksBest`. A `numbered` chart
 * also has the series whose keys end with other numbers. images/chart_image.py has the same titles and names.
 * @typedef {{ key: string, title: string, name: string, second?: string, secondName?: string, numbered?: boolean,
 *   smooth?: boolean, log?: boolean, best: "lowest" | "highest", marksBest?: boolean }} Chart
 */
/** @type {Chart[]} */
export const CHARTS = [
  { ...trainAndEval("loss", "Loss"), log: true, best: "lowest", marksBest: true },
  { key: "eval_loss_1", title: "Validation loss of each dataset", name: "dataset 1", numbered: true, best: "lowest" },
  { key: "eval_exact_match", title: "Exact match of generations", name: "exact match", best: "highest" },
  { key: "eval_rouge_l", title: "ROUGE-L of generations", name: "ROUGE-L", best: "highest" },
  trainAndEval("reward_margin", "Reward margin"),
  { ...trainAndEval("reward_accuracy", "Reward accuracy"), marksBest: true },
  {
    key: "reward_chosen",
    title: "Rewards",
    name: "chosen",
    second: "reward_rejected",
    secondName: "rejected",
    best: "highest",
  },
  trainAndEval("kl", "KL divergence from the reference"),
  trainAndEval("reward_mean", "Mean reward"),
  { key: "learning_rate", title: "Learning rate", name: "learning rate", log: true, best: "highest" },
  { key: "grad_norm", title: "Gradient norm", name: "norm", smooth: true, log: true, best: "highest" },
  { key: "gpu_utilization", title: "GPU utilization (%)", name: "utilization", best: "highest" },
  { key: "tokens_per_second", title: "Tokens per second", name: "tokens/s", smooth: true, best: "highest" },
];

/** @returns {Chart} */
function trainAndEval(key, title) {
  return { key, title, name: "train", second: `eval_${key}`, secondName: "validation", smooth: true, best: "highest" };
}

/** The series of a numbered chart: their numbers and keys. @param {Chart} chart @param {Record<string, any>} series */
export function numberedKeys(chart, series) {
  const start = chart.key.slice(0, -1);
  const numbers = Object.keys(series).flatMap((key) =>
    key.startsWith(start) ? [Number(key.slice(start.length))] : [],
  );
  return numbers.sort((a, b) => a - b).map((number) => ({ number, key: start + number }));
}

/** A bias-corrected exponential moving average. `weight` is 0 to 0.99. */
export function smoothed({ x, y }, weight) {
  let mean = 0;
  let total = 0;
  const means = y.map((value) => {
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
  return { x, y: means };
}

/** The value nearest to an index: validation points are few, and the pointer is rarely exactly on one. */
export function nearest(values, index) {
  for (let distance = 0; distance < values.length; distance += 1) {
    for (const i of [index - distance, index + distance]) {
      if (values[i] !== null && values[i] !== undefined) return values[i];
    }
  }
  return null;
}
