// @ts-check
// The search in the list of runs. backend/runs/search.py describes it and does the same for the command line;
// tests/unit/search_cases.json has test cases for both.
import { serverTime } from "../api.js";

/**
 * @typedef {{ key: string, label: string, kind: "text" | "number" | "time" | "tags" | "yes_no", names: string[],
 *   scale: number, unit: string }} Column
 * @typedef {{ id: string, state: string } & Record<string, any>} Run
 */

// And the tags.
const WORDS = ["name", "id", "model", "method", "stage", "strategy", "dataset", "notes", "failure", "mark"];
const TOKEN = /(?:[^\s"]|"[^"]*"?)+/g;
const TERM = /^([A-Za-z][A-Za-z0-9_]*)([:<>])(.*)$/s;
const NUMBER = /^[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?$/;

/** A search that cannot be read; the message is for users. */
export class SearchError extends Error {}

/** A run's value in a column, undefined if it has none. @param {Run} run @param {string} key */
export function valueOf(run, key) {
  if (key === "duration") {
    const isRunning = ["starting", "running", "stopping"].includes(run.state);
    const end = run.ended || (isRunning ? serverTime() : undefined);
    // The sum over all starts, without the time between them.
    return end && run.started ? Math.max(0, end - run.started) + (run.earlier_seconds || 0) : undefined;
  }
  return run[key];
}

/**
 * Read a search. Throws SearchError.
 * @param {string} text @param {Column[]} columns
 * @returns {(run: Run) => boolean}
 */
export function parseSearch(text, columns) {
  const terms = (text.match(TOKEN) || []).map((token) => parseTerm(token, columns));
  const showsArchived = terms.some((term) => term.key === "archived");
  return (run) => (showsArchived || !run.archived) && terms.every((term) => term.matches(run));
}

/** @returns {{ key: string, matches: (run: Run) => boolean }} */
function parseTerm(token, columns) {
  const found = TERM.exec(token);
  if (!found) {
    const word = token.replaceAll('"', "").toLowerCase();
    return { key: "", matches: (run) => hasWord(run, word) };
  }
  const [, name, sign, value] = found;
  const column = columnNamed(name, columns);
  const { key } = column;
  const text = value.replaceAll('"', "").toLowerCase();
  checkTerm(column, `${name}${sign}`, text);
  if (column.kind === "number") return { key, matches: compare(column, sign, Number(text)) };
  if (column.kind === "tags") return { key, matches: (run) => (run.tags || []).some((t) => t.toLowerCase() === text) };
  if (column.kind === "yes_no") return { key, matches: (run) => Boolean(run[key]) === (text === "yes") };
  return { key, matches: (run) => includes(run[key], text) };
}

/** @returns {Column} */
function columnNamed(name, columns) {
  const wanted = name.toLowerCase();
  const found = columns.find(({ key, names }) => key === wanted || names.includes(wanted));
  if (found) return found;
  const hint = 'Put text with : < or > in "double quotes".';
  throw new SearchError(`There is no column ${name}. ${hint} Columns: ${columns.map(({ key }) => key).join(", ")}.`);
}

/** @param {Column} column @param {string} start the term without its value */
function checkTerm({ key, label, kind }, start, text) {
  const fail = (message) => {
    throw new SearchError(message);
  };
  if (kind === "time") fail(`${label} is a time: search for the beginning of the run's ID, such as 2026-11-22.`);
  if (!text) fail(`${start} needs a value.`);
  if (kind === "number" && !NUMBER.test(text)) fail(`${label} is a number, and ${text} is not.`);
  if (kind === "yes_no" && !["yes", "no"].includes(text)) fail(`${label} is yes or no: ${key}:yes`);
  if (kind !== "number" && !start.endsWith(":")) fail(`${label} is not a number: use ${key}:value`);
}

const includes = (value, text) =>
  String(value || "")
    .toLowerCase()
    .includes(text);
const hasWord = (run, word) =>
  WORDS.some((key) => includes(run[key], word)) || (run.tags || []).some((tag) => includes(tag, word));

/** A value as a search compares it. Rounded, since 0.29 / 0.01 is less than 29. */
const scaled = (value, scale) => Number((value / scale).toPrecision(12));

/** @param {Column} column */
function compare({ key, scale }, sign, limit) {
  const test = {
    ":": (value) => Math.abs(value - limit) <= 1e-9 * Math.max(Math.abs(value), Math.abs(limit)),
    "<": (value) => value < limit,
    ">": (value) => value > limit,
  }[sign];
  return (run) => {
    const value = valueOf(run, key);
    return typeof value === "number" && /** @type {any} */ (test)(scaled(value, scale));
  };
}

/** The runs by a column; those without a value come last. @param {Run[]} runs @param {string} key */
export function sortRuns(runs, key, descending) {
  // A waiting run starts after the others.
  const own = (run) => valueOf(run, key) ?? (key === "started" ? run.created : undefined);
  const keyed = runs.map((run) => ({ run, value: sortKey(own(run)) }));
  const sign = descending ? -1 : 1;
  const known = keyed.filter(({ value }) => value !== undefined);
  known.sort((a, b) => (a.value < b.value ? -sign : a.value > b.value ? sign : 0));
  return [...known, ...keyed.filter(({ value }) => value === undefined)].map(({ run }) => run);
}

function sortKey(value) {
  const text = Array.isArray(value) ? value.join(" ") : value;
  return typeof text === "string" ? text.toLowerCase() || undefined : (text ?? undefined);
}
