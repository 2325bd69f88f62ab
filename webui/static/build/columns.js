// @ts-check
// The columns of the data files, each with its first values and a menu for its use.
import { post } from "../api.js";
import { $, el, emit, notifyError, redraw } from "../dom.js";
import { applyFix } from "../fixes.js";
import { currentValues } from "./form.js";

const decides = (name) => /^data\.(sources?|files|format|\w+_column)$|^train\.stage$/.test(name);

/** @type {Record<string, any>} */
let values = {}; // the form's values
let dataset = 0; // number of the shown dataset
let drawn = ""; // the values that determine what is shown or requested
let wanted = false; // a finding's link leads here, but nothing is drawn yet
let changes = Promise.resolve(); // of the uses, one after the other

const box = () => $("#fp-columns");

/** Draw the columns of a dataset, unless they are drawn already. @param {Record<string, any>} now the form's values */
export async function loadColumns(now, number = dataset) {
  [values, dataset] = [now, number];
  const requested = JSON.stringify([dataset, Object.entries(values).filter(([name]) => decides(name))]);
  if (requested === drawn) return;
  drawn = requested;
  try {
    const found = await post("api/columns", { values, dataset });
    if (requested === drawn) draw(found);
  } catch {
    if (requested === drawn) drawn = ""; // requested again after the next check
  }
}

/** The data files may have other columns now. */
export const forgetColumns = () => (drawn = "");

function draw({ columns, more, uses }) {
  box().hidden = !columns.length;
  if (columns.every(({ use }) => !use)) box().open = true;
  const rows = columns.map((column) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, el("span", { title: column.name }, column.name || "(no name)"), menu(column, uses)),
      el("td", {}, ...column.values.map((text) => el("p", { title: text }, text))),
    ),
  );
  redraw($("#fp-columns tbody"), ...rows);
  const rest = more === 1 ? "1 more column is" : `${more.toLocaleString("en")} more columns are`;
  $("#fp-columns > p").textContent = more ? `${rest} not shown.` : "";
  if (wanted) show();
}

/** Scroll to the menus and focus them, now or once they are drawn. */
function show() {
  wanted = box().hidden;
  if (wanted) return;
  box().open = true;
  $("summary", box()).focus({ preventScroll: true });
  box().scrollIntoView({ block: "center", behavior: "smooth" });
}

function menu({ name, use, fixed, required }, uses) {
  const select = el("select", { "aria-label": `Use of column ${name}`, disabled: fixed || !name });
  if (fixed) select.append(el("option", { value: "" }, "Recognized by name"));
  else if (!required) select.append(el("option", { value: "" }, "Not used"));
  select.append(...Object.entries(uses).map(([value, label]) => el("option", { value }, label)));
  select.value = use;
  select.addEventListener("change", () => {
    const [number, chosen] = [dataset, select.value];
    changes = changes.then(() => change(number, name, chosen)); // each depends on what the one before has changed
  });
  return select;
}

async function change(number, column, use) {
  try {
    applyFix(await post("api/columns/use", { values: currentValues(), dataset: number, column, use }));
  } catch (error) {
    drawn = ""; // draw the menus again, with the actual uses
    loadColumns(values);
    notifyError(error);
  }
}

/** A button that leads to the menus, for findings about columns; null for other findings. */
export function columnsLink({ code, fields }) {
  const isUnknown = code === "DAT002" && fields.some((name) => /^data\.(.+\.)?format$/.test(name)); // unknown format
  if (!isUnknown && !fields.some((name) => name.endsWith("_column"))) return null;
  const [, number = "0"] = fields.join(" ").match(/data\.sources\[(\d+)\]/) || [];
  const open = () => {
    emit("dataset", Number(number));
    $("#fp-examples").open = true;
    show();
  };
  return el("div.fp-fix", {}, el("button.fp-button", { type: "button", onclick: open }, "Choose columns"));
}
