// @ts-check
// Data files of the user's own computer: chosen or dropped, sent in parts, listed, removed.
import { get, put, remove } from "../api.js";
import { $, chip, confirmDialog, el, emit, notify, notifyError, on } from "../dom.js";
import { bytes, countedMore, dateTime, duration, percent } from "../format.js";
import { datasetWith, entryText } from "./datasets.js";
import { currentValues, setValues } from "./form.js";

const PART = 4 * 2 ** 20; // bytes; auth.py accepts no larger body
const RETRY = 2000; // ms, while the server does not respond
const MAX_RUNS = 3; // named in the list

/** What files are used for: as data files of a dataset, or as its validation files. `dataset`: its number, from 0;
 * `entry`: the dataset as it was in the form.
 * @typedef {{ dataset: number, validation: boolean, entry?: string }} Target */
/** @type {{ stop: AbortController, name: string, size: number, arrived: number, began: number, from: number,
 *   offline: boolean } | null} */
let sending = null;
let queue = Promise.resolve(); // files that are chosen while others are being sent

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
  const entries = [...(event.dataTransfer?.items || [])].map((item) => item.webkitGetAsEntry?.());
  const folder = entries.find((entry) => entry?.isDirectory);
  if (folder) notify(`${folder.name} is a folder. Drop its files instead.`, { level: "error" });
  else upload([...(event.dataTransfer?.files || [])], { dataset, validation });
}

// -- sending ----------------------------------------------------------------------------------------------------------

const named = (files) =>
  files[0].name + (files.length > 1 ? ` and ${countedMore(files.length - 1, "file", "files")}` : "");
const namesOf = ({ validation }) => (validation ? ["validation", "validation_files"] : ["source", "files"]);

/** @param {File[]} files @param {Target} target */
function upload(files, target) {
  const of = target.dataset ? { ...target, entry: entryText(target.dataset, namesOf(target)) } : target;
  if (files.length) queue = queue.then(() => sendAll(files, of));
}

/** @param {File[]} files @param {Target} target */
async function sendAll(files, target) {
  const stop = new AbortController();
  const of = { ...target, entry: target.entry ?? entryText(target.dataset, namesOf(target)) };
  const [paths, sent, problems] = [[], [], []];
  for (const file of files) {
    try {
      paths.push(await send(file, stop));
      sent.push(file);
    } catch (error) {
      if (stop.signal.aborted) break;
      problems.push(error.message);
    }
  }
  sending = null;
  const hadFocus = box().contains(document.activeElement);
  draw();
  if (hadFocus) box().querySelector("button").focus();
  if (stop.signal.aborted) return;
  if (paths.length) use(paths, of, `${named(sent)} uploaded`, problems);
  else notify(problems.join(" "), { level: "error" });
}

/** Send a file; continue where an earlier attempt ended. @param {File} file @param {AbortController} stop
 * @returns {Promise<string>} its path on the server */
async function send(file, stop) {
  const about = new URLSearchParams({
    name: file.name,
    size: String(file.size),
    modified: String(Math.max(0, file.lastModified)),
  });
  const now = { stop, name: file.name, size: file.size, arrived: 0, began: 0, from: 0, offline: false };
  sending = now;
  let part = new ArrayBuffer(0); // an empty part asks how many bytes have arrived
  for (;;) {
    draw();
    const answer = await sendPart(`api/uploads?${about}&offset=${now.arrived}`, part, now);
    if (answer.path) return answer.path;
    now.arrived = answer.arrived;
    if (!now.began) [now.began, now.from] = [Date.now(), now.arrived];
    part = await file
      .slice(now.arrived, now.arrived + PART)
      .arrayBuffer()
      .catch(() => {
        throw new Error(`${file.name} changed or was deleted during the upload. Upload it again.`);
      });
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

/** Let the form use the files. @param {string[]} paths @param {Target} target @param {string} what happened
 * @param {string[]} problems with other files */
function use(paths, target, what, problems = []) {
  const [switched, name] = namesOf(target);
  const dataset = datasetWith(target.entry, target.dataset, [switched, name]);
  const more = problems.map((problem) => ` ${problem}`).join("");
  if (dataset < 0) {
    notify(`${what}, but its dataset changed meanwhile: choose it in Uploaded files.${more}`);
    return;
  }
  const prefix = dataset ? `data.sources[${dataset}].` : "data.";
  const where = dataset ? ` of dataset ${dataset + 1}` : "";
  setValues(
    { [prefix + switched]: "files", [prefix + name]: dataset ? paths : paths.join("\n") },
    { undo: `${what} and set as the ${target.validation ? "validation files" : "data files"}${where}.${more}` },
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
      notify("Upload canceled. Upload the same file again within 7 days to continue it.");
    });
    box().replaceChildren(
      el("progress", { max: 1, "aria-label": "Upload" }),
      el("span.fp-dim", { role: "status" }),
      cancel,
    );
  }
  box().querySelector("progress").value = size ? arrived / size : 0;
  const state = offline
    ? "the server does not respond, retrying"
    : `${percent(Math.floor((100 * arrived) / (size || 1)) / 100)} of ${bytes(size)}`;
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
  const none = el("p.fp-dim", {}, "No files have been uploaded yet.");
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
      setValues({ "data.source": "files", "data.files": file.path }, { undo: `Data files set to ${file.name}.` });
    };
    const drop = async () => {
      if (!(await confirmDialog(question(file), "Delete", true))) return;
      await remove(`api/uploads/${encodeURIComponent(file.name)}`);
      node.remove();
      $(".fp-dialog-row button", dialog).focus();
      emit("edited"); // what was checked may have used the file
    };
    /** @type {Record<string, any>} */
    const values = currentValues();
    const isUsed = values["data.source"] === "files" && values["data.files"] === file.path;
    const button = (text, onclick, more = {}) =>
      el("button.fp-button", { type: "button", onclick, "aria-label": `${text} ${file.name}`, ...more }, text);
    const node = el(
      "li",
      {},
      el("div.fp-version", {}, el("b", {}, file.name), about(file)),
      el(
        "span.fp-uploads-actions",
        {},
        button("Use", choose, { disabled: isUsed }),
        button("Delete", () => drop().catch(notifyError)),
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

function question({ name, path, bytes: size, runs }) {
  /** @type {Record<string, any>} */
  const values = currentValues();
  const texts = [values["data.files"], values["data.validation_files"], values["data.sources"]];
  const inForm = texts.some((text) => String(text || "").includes(path)) ? " The form uses it." : "";
  const which = runs.length === 1 ? `Run ${runs[0].name} uses it and` : `${runs.length} runs use it and`;
  const lost = runs.length ? ` ${which} could no longer be resumed or restarted.` : "";
  return `Delete ${name} (${bytes(size)}) from the server?${inForm}${lost}`;
}
