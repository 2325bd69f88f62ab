// @ts-check
// Numbers, sizes and times as text.

const NONE = "\u2013";

/** A number with `digits` significant digits and thousands separators. */
export function num(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e9)) return exponential(value, Math.max(2, digits - 2));
  const needed = size >= 1000 ? Math.max(digits, Math.ceil(Math.log10(size + 1))) : digits;
  return value.toLocaleString("en", { maximumSignificantDigits: needed });
}

const exponential = (value, decimals) =>
  value
    .toExponential(decimals)
    .replace("e+", "e")
    .replace(/\.?0+e/, "e");

export const isRate = (key) => /(^|\.)learning_rate$/.test(key);
export const isShare = (key) => /(^|_)(exact_match|rouge_[12l]|bleu|reward_accuracy)$/.test(key);

/** The value of an option or a series by its key: scores from 0 to 1 in percent, and learning rates below 0.1 always as
 * 1e-4 or 2.5e-3, because 0.001 and 1e-4 in one table are hard to compare. */
export function valueText(key, value) {
  if (isShare(key) && Number.isFinite(value)) return percent(value);
  return value && Math.abs(value) < 0.1 && isRate(key) ? exponential(value, 3) : num(value);
}

export const capitalized = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

/** 1 more node, 2 more nodes */
export const countedMore = (count, noun, plural) => `${count} more ${count === 1 ? noun : plural}`;

export const integer = (value) => Math.round(value).toLocaleString("en");
export const percent = (fraction) => `${num(100 * fraction, 3)}%`;

/** 135 M, 7.62 B */
export function count(value) {
  for (const [size, unit] of /** @type {[number, string][]} */ ([
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "K"],
  ])) {
    if (value >= 0.9995 * size) return `${num(value / size, 3)} ${unit}`;
  }
  return num(value);
}

export function bytes(value) {
  if (!Number.isFinite(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let step = 0;
  while (Math.abs(value) >= 1023.5 && step < units.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${value.toFixed(value < 10 && step > 2 ? 1 : 0)} ${units[step]}`;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** Unix seconds from seconds or a date as text. */
export const toSeconds = (time) => (typeof time === "number" ? time : Date.parse(time) / 1000);

/** A time relative to today: Today 14:05, Yesterday 09:30, 3 May 18:00. @param {number} seconds Unix seconds */
export function dateTime(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const date = new Date(1000 * seconds);
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  const days = Math.round((new Date().setHours(0, 0, 0, 0) - new Date(date).setHours(0, 0, 0, 0)) / 864e5);
  if (days <= 0) return `Today ${time}`;
  if (days === 1) return `Yesterday ${time}`;
  /** @type {Intl.DateTimeFormatOptions} */
  const format = { day: "numeric", month: "short" };
  if (date.getFullYear() !== new Date().getFullYear()) format.year = "numeric";
  return `${date.toLocaleDateString("en-US", format)}, ${time}`;
}
