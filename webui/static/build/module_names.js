// @ts-check
// The names of the model's modules, shown below the fields that take module names.
import { $, el, on, setAttribute } from "../dom.js";
import { currentValues, fieldOf, setValues } from "./form.js";

/** @type {string[]} */
let offered = []; // the options that take module names
on("edited", () => offered.forEach((name) => markChosenNames(fieldOf(name), name)));

const chosenNames = (name) =>
  String(currentValues()[name] || "")
    .split(/[\s,]+/)
    .filter(Boolean);

/** Offer the model's module names below the fields that take some: a click adds or removes one. */
export function offerModuleNames(modules) {
  offered = Object.keys(modules);
  for (const [name, names] of Object.entries(modules)) {
    const field = fieldOf(name);
    if (!field) continue;
    let box = $(".fp-names", field);
    if (!box) {
      box = el("div.fp-names", { role: "group", "aria-label": "Modules of this model" });
      field.append(box);
    }
    if (box.textContent !== names.join("")) {
      const button = (one) => el("button.fp-name", { type: "button", onclick: () => toggleName(name, one) }, one);
      box.replaceChildren(...names.map(button));
    }
    markChosenNames(field, name);
  }
}

function toggleName(name, one) {
  const chosen = chosenNames(name); // read at each click, so that two quick clicks add two names
  const changed = chosen.includes(one) ? chosen.filter((n) => n !== one) : [...chosen, one];
  setValues({ [name]: changed.join(", ") });
}

function markChosenNames(field, name) {
  for (const button of field.querySelectorAll(".fp-name")) {
    setAttribute(button, "aria-pressed", String(chosenNames(name).includes(button.textContent)));
  }
}
