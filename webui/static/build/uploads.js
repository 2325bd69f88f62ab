// @ts-check
// Data files of the user's own computer: chosen or dropped, sent in parts, listed, removed.
import { get, put, remove } from "../api.js";
import { $, chip, confirmDialog, el, notify, notifyError, on } from "../dom.js";
import { bytes, countedMore, dateTime, duration, percent } from "../format.js";
import { numberOfDatasets } from "./datasets.js";
import { currentValues, setValues } from "./form.js";

const PART = 4 * 2 ** 20; // bytes; auth.py accepts no larger body
const RETRY = 2000; // ms, while the server does not respond
const MAX_RUNS = 3; // named in the list

/** What a file becomes: the data files of a dataset, from 0, or its validation files.
 * @typedef {{ dataset: number, validation: boolean }} Target */
/** @type {{ stop: AbortController, name: string, size: number, arrived: number, began: number, from: number,
 *   offline: boolean } | null} */
let sending = null;
let queue = Promise.resolve(); // files that were chosen while others are sent

const box = () => $("#fp-uploads");

export function prepareUploads() {
  draw();
  on("upload", chooseFiles);
  document.addEventListener("dragover", (event) => dragged(event, true));
  document.addEventListener("dragleave", (event) => dragged(event, false));
  document.addEventListener("drop", dropped);
  window.addEventListener("beforeunload", (event) => sending && event.preventDefault());
}

/** Let the user choose files. @param {Target} target */
function chooseFiles(target) {
  const input = el("input", { type: "file", multiple: true });
  input.addEventListener("change", () => upload([...input.files], target));
  input.click();
}

// -- dropping ---------------------------------------------------------------------------------------------------------

const hasFiles = (event) => document.body.dataset.tab === "build" && event.dataTransfer?.types.includes("Files");

/** @param {DragEvent} event @param {boolean} over */
function dragged(event, over) {
  if (!hasFiles(event)) return;
  event.preventDefault();
  $("#fp-section-data").classList.toggle("fp-drop", over);
}

/** @param {DragEvent} event */
function dropped(event) {
  if (!hasFiles(event)) return;
  dragged(event, false);
  const place = /** @type {Element} */ (event.target);
  const card = place.closest(".fp-dataset");
  const dataset = card ? [...document.querySelectorAll(".fp-dataset")].indexOf(card) + 1 : 0;
  const validation = Boolean(place.closest("[id$='validation_files']"));
  upload([...(event.dataTransfer?.files || [])], { dataset, validation });
}

// -- sending ----------------------------------------------------------------------------------------------------------

/** @param {File[]} files @param {Target} target */
function upload(files, target) {
  if (files.length) queue = queue.then(() => sendAll(files, target));
}

/** @param {File[]} files @param {Target} target */
async function sendAll(files, target) {
  const stop = new AbortController();
  try {
    const paths = [];
    for (const file of files) paths.push(await send(file, stop));
    use(paths, target, `${named(files)} uploaded`);
  } catch (error) {
    if (!stop.signal.aborted) notifyError(error);
  }
  sending = null;
  draw();
}

const named = (files) =>
  files[0].name + (files.length > 1 ? ` and ${countedMore(files.length - 1, "file", "files")}` : "");

/** Send a file, and go on with it where an earlier attempt ended. @param {File} file @param {AbortController} stop
 * @returns {Promise<string>} its path on the server */
async function send(file, stop) {
  const about = new URLSearchParams({
    name: file.name,
    size: String(file.size),
    modified: String(Math.max(0, file.lastModified)),
  });
  const now = { stop, name: file.name, size: file.size, arrived: 0, began: 0, from: 0, offline: false };
  sending = now;
  let part = new ArrayBuffer(0); // asks how much has arrived
  for (;;) {
    draw();
    const answer = await sendPart(`api/uploads?${about}&offset=${now.arrived}`, part, now);
    if (answer.path) return answer.path;
    now.arrived = answer.arrived;
    if (!now.began) [now.began, now.from] = [Date.now(), now.arrived];
    part = await file.slice(now.arrived, now.arrived + PART).arrayBuffer();
  }
}

async function sendPart(path, part, now) {
  for (;;) {
    try {
      const answer = await put(path, part, now.stop.signal);
      now.offline = false;
      return answer;
    } catch (error) {
      if (!error.offline || now.stop.signal.aborted) throw error;
      now.offline = true;
      draw();
      await new Promise((done) => setTimeout(done, RETRY));
    }
  }
}

/** Let the form use the files. @param {string[]} paths @param {Target} target @param {string} what happened */
function use(paths, { dataset, validation }, what) {
  if (dataset >= numberOfDatasets()) return notify(`${what}. Its dataset was removed: find it under Uploaded files.`);
  const prefix = dataset ? `data.sources[${dataset}].` : "data.";
  const [switched, name] = validation ? ["validation", "validation_files"] : ["source", "files"];
  const isText = !dataset; // the form's own field has lines
  setValues(
    { [prefix + switched]: "files", [prefix + name]: isText ? paths.join("\n") : paths },
    { undo: `${what}: used as the ${validation ? "validation files" : "data files"}.` },
  );
}

// -- the row below the data -------------------------------------------------------------------------------------------

function draw() {
  if (!sending) {
    const target = { dataset: 0, validation: false };
    box().replaceChildren(
      chip("Upload files", () => chooseFiles(target), { title: "Choose data files, or drop them on the page" }),
      chip("Uploaded files", () => showList().catch(notifyError)),
    );
    return;
  }
  const { name, size, arrived, offline } = sending;
  if (!box().querySelector("progress")) {
    const cancel = chip("Cancel", () => {
      sending?.stop.abort();
      notify("The upload was canceled. Upload the same file again to continue it.");
    });
    box().replaceChildren(
      el("progress", { max: 1, "aria-label": "Upload" }),
      el("span.fp-dim", { role: "status" }),
      cancel,
    );
  }
  box().querySelector("progress").value = arrived / size;
  const state = offline
    ? "no connection, trying again"
    : `${percent(Math.floor((100 * arrived) / size) / 100)} of ${bytes(size)}`;
  box().querySelector("span").textContent = `${name}: ${state}${timeLeft()}`;
}

function timeLeft() {
  if (!sending || sending.offline || !sending.began) return "";
  const { size, arrived, began, from } = sending;
  const seconds = (Date.now() - began) / 1000;
  if (seconds < 3 || arrived === from) return "";
  return `, ${duration(((size - arrived) * seconds) / (arrived - from))} left`;
}

// -- the list ---------------------------------------------------------------------------------------------------------

async function showList() {
  const { folder, files } = await get("api/uploads");
  const close = () => dialog.close();
  const list = el("ul", {}, files.map(item));
  const none = el("p.fp-dim", {}, "No files were uploaded yet.");
  const dialog = el(
    "dialog.fp-dialog.fp-versions",
    { onclose: () => dialog.remove(), "aria-label": "Uploaded files" },
    el("p", {}, "Uploaded files"),
    files.length ? el("p.fp-dim.fp-uploads-folder", {}, `In ${folder} on the server`) : none,
    list,
    el("div.fp-dialog-row", {}, el("button.fp-button", { type: "button", onclick: close }, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();

  function item(file) {
    const choose = () => {
      close();
      use([file.path], { dataset: 0, validation: false }, file.name);
    };
    const drop = async () => {
      if (!(await confirmDialog(question(file), "Delete", true))) return;
      await remove(`api/uploads/${encodeURIComponent(file.name)}`);
      node.remove();
    };
    const used = file.path === currentValues()["data.files"];
    const node = el(
      "li",
      {},
      el("div.fp-version", {}, el("b", {}, file.name), about(file)),
      el(
        "span.fp-uploads-actions",
        {},
        el("button.fp-button", { type: "button", onclick: choose, disabled: used }, "Use"),
        el("button.fp-button", { type: "button", onclick: () => drop().catch(notifyError) }, "Delete"),
      ),
    );
    return node;
  }
}

function about({ bytes: size, uploaded, runs }) {
  const names = runs.slice(0, MAX_RUNS).map(({ name }) => name);
  const more = runs.length > MAX_RUNS ? ` and ${countedMore(runs.length - MAX_RUNS, "run", "runs")}` : "";
  const used = runs.length ? `used by ${names.join(", ")}${more}` : "not used by a run";
  return el("span.fp-dim", {}, `${bytes(size)}, ${dateTime(uploaded)}, ${used}`);
}

function question({ name, bytes: size, runs }) {
  const which = runs.length === 1 ? "The run that uses it" : `The ${runs.length} runs that use it`;
  return `Delete ${name} (${bytes(size)}) from the server?${runs.length ? ` ${which} can then not be resumed.` : ""}`;
}
