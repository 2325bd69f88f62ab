// @ts-check
// The option search: label, key, help, choices, and the names that other libraries use.
import { $, el, setText } from "../dom.js";
import * as form from "./form.js";

const MAX_RESULTS = 12;
const MAX_CHOICES = 5;
const EXACT = 300; // the score of a name that is the same as the query
const MAX_WAYS = 4; // buttons that show a hidden option

/**
 * `labels` are the label, the key in two forms, and aliases; `conditions` what makes the option visible.
 * @type {{ name: string, labels: string[], choices: Text[], conditions: string[], help: string }[]}
 * @typedef {{ value: string, text: string }} Text
 */
let index = [];
/** @type {{ name: string, choices: string[], alias: string, score: number, isVisible: boolean }[]} */
let results = [];
let active = -1;

const normalize = (text) =>
  text
    .toLowerCase()
    .replace(/[^a-z0-9+]+/g, " ")
    .trim();
const input = () => $("#fp-search");
const list = () => $("#fp-search-results");
const grid = () => $("#fp-search-rows"); // not a listbox: its options cannot contain buttons

export function startSearch(described) {
  index = described.map(({ name, help, aliases }) => {
    const option = form.option(name);
    const choices = Object.entries(option.choices).map(([value, text]) => ({
      value,
      text: normalize(`${text} ${value}`),
    }));
    const labels = [option.label, name, name.split(".")[1], ...aliases];
    const allowed = option.when.flatMap((condition) => Object.entries(condition).filter(form.isSpecific));
    const conditions = allowed.flatMap(([other, values]) => values.map((v) => normalize(form.choiceLabel(other, v))));
    return { name, help: normalize(help), labels, choices, conditions };
  });
  input().addEventListener("input", () => show(input().value));
  input().addEventListener("focus", () => show(input().value));
  input().addEventListener("keydown", keyPressed);
  document.addEventListener("keydown", focusBySlash);
  // Pressing the mouse button would move the focus to the view around the list, if it is focusable, and close the list.
  list().addEventListener("mousedown", (event) => event.preventDefault());
  const whole = input().closest(".fp-search");
  whole.addEventListener("focusout", ({ relatedTarget: to }) => to && !whole.contains(to) && close());
  document.addEventListener("pointerdown", (event) => {
    if (!(/** @type {Element} */ (event.target).closest(".fp-search"))) close();
  });
}

// -- matching ---------------------------------------------------------------------------------------------------------

/** How well words match a text: 3 the same, 2 its start, 1 the start of words in it, 0 not at all. */
function matchLevel(query, text) {
  if (text === query) return 3;
  if (text.startsWith(query)) return 2;
  const words = text.split(" ");
  return query.split(" ").every((part) => words.some((word) => word.startsWith(part))) ? 1 : 0;
}

export function search(text) {
  const query = normalize(text);
  if (!query) return [];
  return index
    .map((entry) => score(entry, query))
    .filter((result) => result.score > 0)
    .sort((a, b) => rank(b) - rank(a) || b.score - a.score)
    .slice(0, MAX_RESULTS);
}

/** What has exactly this name comes first, then what is visible. */
const rank = ({ score, isVisible }) => (score >= EXACT ? 2 : 0) + (isVisible ? 1 : 0);

/** Names count most, then choices, then help. */
function score(entry, query) {
  const result = { name: entry.name, choices: [], alias: "", score: 0, isVisible: form.isVisible(entry.name) };
  const offer = (points, alias = "") => {
    if (points > result.score) Object.assign(result, { alias, score: points });
  };
  entry.labels.forEach((label, i) => offer(100 * matchLevel(query, normalize(label)), i < 3 ? "" : label));
  const label = normalize(entry.labels[0]);
  for (const choice of entry.choices) {
    // "strategy zero 3" and "zero 3" both find the choice; "strategy" finds only the option.
    const withLabel = matchLevel(query, label) ? 0 : matchLevel(query, `${label} ${choice.text}`);
    const level = matchLevel(query, choice.text) || withLabel;
    if (level) result.choices.push(choice.value);
    offer(60 * level);
  }
  if (entry.conditions.some((text) => matchLevel(query, text))) offer(50);
  if (query.length > 2 && entry.labels.some((label) => normalize(label).includes(query))) offer(50);
  if (matchLevel(query, entry.help)) offer(15);
  return result;
}

// -- results ----------------------------------------------------------------------------------------------------------

function show(text) {
  results = search(text);
  active = results.length ? 0 : -1;
  draw(text);
}

function draw(text = input().value) {
  const open = Boolean(text.trim());
  list().hidden = !open;
  input().setAttribute("aria-expanded", String(open));
  if (!open) return;
  grid().replaceChildren(...results.map(row));
  grid().hidden = !results.length;
  setText($("#fp-search-none"), results.length ? "" : `No option matches \u201c${text.trim()}\u201d.`);
  markActive();
}

function row(result, i) {
  const { name, choices, alias } = result;
  const visible = form.isVisible(name);
  const found = choices.length ? choices.slice(0, MAX_CHOICES).map((v) => form.choiceLabel(name, v)) : [alias];
  return el(
    "div.fp-search-row",
    {
      id: `fp-search-${i}`,
      role: "row",
      "data-name": name,
      "data-hidden": visible ? null : "yes",
      onclick: () => choose(i),
    },
    el(
      "div",
      { role: "gridcell" },
      el(
        "div.fp-search-title",
        {},
        el("span.fp-search-label", {}, form.label(name)),
        found.filter(Boolean).map((one) => el("span.fp-search-found", {}, one)),
        el("span.fp-gap"),
        el("span.fp-dim", {}, form.sectionTitle(name)),
      ),
      el("div.fp-search-more", {}, el("code", {}, name), visible ? valueText(name) : hiddenText(name)),
    ),
    visible ? null : waysToShow(name),
  );
}

function valueText(name) {
  const value = form.currentValues()[name];
  const text = typeof value === "boolean" ? (value ? "on" : "off") : String(form.choiceLabel(name, value) ?? "");
  return el("span.fp-search-value", {}, `= ${text.split("\n")[0].slice(0, 40) || "empty"}`);
}

const hiddenText = (name) => el("span", {}, `Hidden. ${form.visibilityText(name)}.`);

/** Buttons that show a hidden option by changing one value; none if more than one has to change. */
function waysToShow(name) {
  const ways = form.waysToShow(name);
  if (!ways.length || ways.length > MAX_WAYS) return null;
  const button = (way) => {
    const value = typeof way.value === "boolean" ? (way.value ? "on" : "off") : form.choiceLabel(way.name, way.value);
    const apply = (event) => {
      event.stopPropagation();
      form.setValues({ [way.name]: way.value }, { undo: `${form.label(way.name)} set to ${value}.` });
      close();
      form.goTo(name);
    };
    const label = form.label(way.name).replace(/ to$/, ""); // "Offload optimizer to"
    return el("button.fp-chip", { type: "button", onclick: apply }, `Set ${label} to ${value}`);
  };
  return el("div.fp-search-ways", { role: "gridcell" }, ways.map(button));
}

function markActive() {
  [...list().querySelectorAll(".fp-search-row")].forEach((node, i) => {
    node.setAttribute("aria-selected", String(i === active));
    if (i === active) node.scrollIntoView({ block: "nearest" });
  });
  if (active >= 0) input().setAttribute("aria-activedescendant", `fp-search-${active}`);
  else input().removeAttribute("aria-activedescendant");
}

/** Go to the option of a result. A hidden one stays in the list if its buttons can show it. */
function choose(i) {
  const result = results[i];
  if (!result) return;
  if (!form.isVisible(result.name)) {
    active = i;
    markActive();
    const button = $(`#fp-search-${i} button`);
    if (button) return button.focus();
  }
  close();
  form.goTo(result.name);
}

function close() {
  list().hidden = true;
  input().setAttribute("aria-expanded", "false");
}

// -- keyboard ---------------------------------------------------------------------------------------------------------

function keyPressed(event) {
  if (event.key === "Escape") {
    if (list().hidden) input().blur();
    else close();
    event.preventDefault(); // otherwise the browser clears the text
  } else if (event.key === "Enter") {
    event.preventDefault();
    if (list().hidden) show(input().value);
    else choose(active);
  } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    event.preventDefault();
    if (!results.length) return;
    if (list().hidden) return draw();
    active = (active + (event.key === "ArrowDown" ? 1 : -1) + results.length) % results.length;
    markActive();
  }
}

const TAKES_TEXT = "textarea, input:not([type=checkbox], [type=radio], [type=number])";

/** Focus the search after a slash, except in a field in which a slash can be typed. */
function focusBySlash(event) {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.body.dataset.tab !== "build" || /** @type {Element} */ (event.target).closest(TAKES_TEXT)) return;
  event.preventDefault();
  input().focus();
  input().select();
}
