// @ts-check
// What can be done with runs of the list: the menu of a row, the bar for the selected runs, and their dialogs.
import { post } from "../api.js";
import { LEAST, MOST, compareLink } from "../compare/compare_runs.js";
import { attempt, confirmDialog, el, emit, formDialog, notify, setText } from "../dom.js";
import { num } from "../format.js";
import { confirmDelete, deleteRun, hasEnded, listed, neededBy, resumeRun, startLabel } from "../run_state.js";

/** @typedef {import("./runs_search.js").Run} Run */

const RESUMABLE = ["new", "stopped", "failed", "lost"];
const isDeletable = ({ state }) => hasEnded(state) || state === "new";
const counted = (count) => (count === 1 ? "1 run" : `${num(count)} runs`);
/** @param {string[]} ids */
export const annotate = (ids, changes) => post("api/runs/annotations", { ids, ...changes });

/** Archive or restore runs; the notification can undo it. @param {string[]} ids @param {() => void} changed */
async function archive(ids, archived, changed) {
  const { done, problems } = await annotate(ids, { archived });
  changed();
  const undo = () => attempt(() => annotate(done, { archived: !archived }).then(changed));
  const text = archived
    ? `${counted(done.length)} archived. The search archived:yes shows archived runs.`
    : `${counted(done.length)} restored.`;
  const level = problems.length ? "error" : "info";
  notify(text + refused(problems), { level, action: { label: "Undo", run: undo } });
}

/** For how many runs something was not possible, and why not for the first one. */
const refused = (problems, what = "unchanged") =>
  problems.length ? ` ${counted(problems.length)} ${what}: ${problems[0].sentence}` : "";

/** The tags in the text of a field: those to add, and those after a minus, to remove. @param {string} text */
function tagChanges(text) {
  const tags = text.split(/[\s,]+/).filter(Boolean);
  return {
    add_tags: tags.filter((tag) => !tag.startsWith("-")),
    remove_tags: tags.filter((tag) => tag.startsWith("-")).map((tag) => tag.slice(1)),
  };
}

/** @param {string[]} tags */
export const tagList = (tags) =>
  el("span.fp-runs-tags", {}, tags.flatMap((tag) => [" ", el("span", {}, tag)]).slice(1));

/**
 * Edit the name, tags and notes of a run. An empty name restores the original one.
 * @param {Run} run @param {() => void} changed
 */
export function editNotes(run, changed) {
  const value = (run.tags || []).join(" ");
  const tags = el("input.fp-input", { type: "text", value, placeholder: "such as: paper baseline" });
  const name = el("input.fp-input", { type: "text", value: run.name || "", maxlength: 80 });
  const notes = el("textarea.fp-input", { rows: 6, maxlength: 4000 });
  notes.value = run.notes || "";
  formDialog(
    `Name, tags and notes of ${run.name || run.id}`,
    [
      el("label", {}, "Name (the folder of the run is not renamed)", name),
      el("label", {}, "Tags, separated by spaces", tags),
      el("label", {}, "Notes", notes),
    ],
    async () => {
      const kept = tags.value.split(/[\s,]+/).filter(Boolean);
      const removed = (run.tags || []).filter((tag) => !kept.includes(tag));
      const changes = { add_tags: kept, remove_tags: removed, notes: notes.value.trim() };
      const renamed = name.value.trim() === (run.name || "") ? {} : { name: name.value.trim() };
      await annotate([run.id], { ...changes, ...renamed });
      changed();
    },
  );
}

/** Add and remove tags of several runs. @param {string[]} ids @param {() => void} changed */
function editTags(ids, changed) {
  const tags = el("input.fp-input", { type: "text", placeholder: "such as: paper -draft" });
  formDialog(`Tag ${counted(ids.length)}`, [el("label", {}, "Tags to add, or -tag to remove one", tags)], async () => {
    const { done, problems } = await annotate(ids, tagChanges(tags.value));
    changed();
    if (problems.length) notify(`${counted(done.length)} tagged.${refused(problems)}`, { level: "error" });
  });
}

const names = (runs) => listed(runs.map(({ name, id }) => name || id));

/** Which of the selected runs have not ended, and stay. @param {Run[]} runs */
const staying = (runs) =>
  runs.length
    ? `${names(runs)} ${runs.length === 1 ? "has not ended and is" : "have not ended and are"} not deleted.`
    : "";

/** What a deletion concerns. The search can hide selected runs. @param {Run[]} runs @param {Run[]} hidden */
function deletionOf(runs, hidden) {
  const one = runs.length === 1;
  const files = one ? "Its log, metrics, checkpoints and model" : "Their logs, metrics, checkpoints and models";
  const what = `${files} are deleted from the disk. There is no undo.`;
  const unseen = hidden.length ? ` The list does not show ${names(hidden)} now.` : "";
  return `Delete ${one ? `${names(runs)}?` : `${counted(runs.length)}? ${names(runs)}.`}${unseen} ${what}`;
}

/** Delete several runs, after a question. @param {Run[]} runs @param {Run[]} hidden those not in the list now */
async function deleteRuns(runs, hidden) {
  const active = runs.filter((run) => run.state && !isDeletable(run));
  const ended = runs.filter((run) => !active.includes(run));
  if (!ended.length) return notify(staying(active), { level: "error" });
  const ids = ended.map(({ id }) => id);
  const unseen = hidden.filter((run) => ended.includes(run));
  const question = [deletionOf(ended, unseen) + (await neededBy(ids)), staying(active)].filter(Boolean).join(" ");
  if (!(await confirmDialog(question, "Delete", true))) return;
  const { done, problems } = await post("api/runs/delete", { ids });
  const rest = refused(problems, "not deleted");
  notify(`${counted(done.length)} deleted.${rest}`, { level: problems.length ? "error" : "info" });
}

// -- the bar for the selected runs ------------------------------------------------------------------------------------

/**
 * At the lower edge of the window, so that nothing moves when it appears.
 * @param {Set<string>} selected
 * @param {{ changed(): void, clear(): void, find(id: string): Run | undefined, shown(): Run[] }} page
 */
export function createSelectionBar(selected, { changed, clear, find, shown }) {
  const number = el("span.fp-figures");
  const count = el("b", {}, number, el("span", {}, " selected"));
  const compare = el("a.fp-chip.fp-runs-compare", { role: "link" }, "Compare");
  const ids = () => [...selected];
  const button = (text, work, destructive = false) => {
    const kind = destructive ? ".fp-quiet-destructive" : "";
    const made = el(`button.fp-chip${kind}`, { type: "button" }, text);
    made.addEventListener("click", () => run(made, work));
    return made;
  };
  async function run(pressed, work) {
    await attempt(work, pressed);
    changed();
  }
  const areArchived = () => selected.size > 0 && ids().every((id) => find(id)?.archived);
  const archiving = button("Archive", async () => {
    const archived = areArchived(); // some of the others may be archived, and stay so when this is undone
    await archive(archived ? ids() : ids().filter((id) => !find(id)?.archived), !archived, changed);
    clear();
  });
  const deleting = button("Delete", () => deleteSelected(), true);
  function deleteSelected() {
    const runs = ids().map((id) => find(id) || { id, state: "" });
    const seen = new Set(shown().map(({ id }) => id));
    return deleteRuns(
      runs,
      runs.filter(({ id }) => !seen.has(id)),
    );
  }
  const node = el(
    "div.fp-selection",
    { hidden: true, role: "region", "aria-label": "Selected runs" },
    count,
    compare,
    button("Tag", () => editTags(ids(), changed)),
    archiving,
    deleting,
    el("button.fp-icon", { type: "button", "aria-label": "Clear the selection", onclick: clear }, "\u00d7"),
  );

  function draw() {
    node.hidden = !selected.size;
    setText(number, num(selected.size));
    setText(archiving, areArchived() ? "Restore" : "Archive");
    const possible = selected.size >= LEAST && selected.size <= MOST;
    compare.title = possible ? "Compare the selected runs" : `Select ${LEAST} to ${MOST} runs`;
    compare.setAttribute("aria-disabled", String(!possible));
    if (possible) compare.setAttribute("href", compareLink(ids()));
    else compare.removeAttribute("href");
  }
  return { node, draw };
}

// -- the menu of a row ------------------------------------------------------------------------------------------------

/** One menu for all rows. @param {() => void} changed */
export function createRowMenu(changed) {
  const node = el("div.fp-row-menu", { role: "menu", hidden: true, onkeydown: keyPressed });
  let opener = /** @type {HTMLElement | null} */ (null);

  function close(focuses = false) {
    if (focuses) opener?.focus();
    node.hidden = true;
    opener?.removeAttribute("aria-expanded");
    opener = null;
  }

  async function act(work) {
    close(true);
    await attempt(work);
    changed();
  }

  /** @param {Run} run @param {HTMLElement} button */
  function open(run, button) {
    const isOpen = opener === button;
    close();
    if (isOpen) return;
    opener = button;
    button.setAttribute("aria-expanded", "true");
    const item = ({ text, work, kind }) =>
      el(`button${kind}`, { type: "button", role: "menuitem", tabindex: -1, onclick: () => act(work) }, text);
    node.replaceChildren(...actionsOf(run, changed).map(item));
    node.setAttribute("aria-label", `Actions for ${run.name || run.id}`);
    node.hidden = false;
    placeAt(node, button);
    node.firstChild.focus();
  }

  function keyPressed(event) {
    if (event.key === "Escape" || event.key === "Tab") close(true);
    else if (!moveFocus(node, event.key)) return;
    event.preventDefault();
  }
  document.addEventListener("click", (event) => {
    const target = /** @type {Node} */ (event.target);
    if (opener && !node.contains(target) && !opener.contains(target)) close();
  });
  addEventListener("scroll", () => close(), { passive: true });
  return { node, open };
}

/** What can be done with a run. @param {Run} run @param {() => void} changed */
function actionsOf(run, changed) {
  const action = (text, work, kind = "") => ({ text, work, kind });
  const remove = async () => {
    if (!(await confirmDelete(run.id, run.name || run.id))) return;
    await deleteRun(run.id);
    notify("Run deleted.");
  };
  return [
    RESUMABLE.includes(run.state) &&
      action(startLabel(run.state, run.checkpoint ? "Resume" : ""), () => resumeRun(run.id)),
    action("Copy into form", async () => emit("clone", { id: run.id })),
    action("Name, tags and notes", async () => editNotes(run, changed)),
    action(run.archived ? "Restore" : "Archive", () => archive([run.id], !run.archived, changed)),
    isDeletable(run) && action("Delete", remove, ".fp-row-menu-destructive"),
  ].filter(Boolean);
}

/** Place a menu below its button, or above it where the window ends. @param {any} menu @param {HTMLElement} button */
function placeAt(menu, button) {
  const { bottom, top, right } = button.getBoundingClientRect();
  const fits = bottom + menu.offsetHeight + 8 < innerHeight;
  menu.style.top = `${fits ? bottom + 4 : top - menu.offsetHeight - 4}px`;
  menu.style.left = `${Math.max(8, right - menu.offsetWidth)}px`;
}

/** Move the focus in a menu by arrow keys, Home and End. @param {any} menu @returns whether it was such a key */
function moveFocus(menu, key) {
  const items = [...menu.children];
  const index = items.indexOf(document.activeElement);
  const next = { ArrowDown: index + 1, ArrowUp: index - 1, Home: 0, End: -1 }[key];
  if (next !== undefined) items.at(next % items.length).focus();
  return next !== undefined;
}
