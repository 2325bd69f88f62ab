// @ts-check
// Part of the card "Your model": publishing the model on the Hugging Face Hub or in a folder. A first dialog asks
// where, a second one shows what leaves the machine.
import { post } from "../api.js";
import { chip, el, formDialog } from "../dom.js";
import { bytes, dateTime } from "../format.js";
import { actions, button, failurePart, failureText, isAlive, modelName, named, removeJob } from "./run_jobs.js";
import { fold } from "./run_results.js";

const HUB = "hub";
const FOLDER = "folder";

/** `publications` has the newest one for each destination. */
export const PUBLICATIONS = {
  work: "Publishing",
  stop: "Stop publishing",
  shown: ({ base, step, merge, publications, gguf, quantized }) => ({
    base,
    step,
    merge,
    publications,
    exports: verifiedExports(gguf, quantized),
  }),
  jobs: ({ publications }) => publications,
  parts: publicationsParts,
};

function publicationsParts(model, run, progress) {
  const jobs = model.publications;
  const open = (request) => askWhere(model, run, request);
  return [
    el("h4", {}, "Publish"),
    !jobs.length &&
      el("p.fp-dim", {}, "Uploads the model or an export to the Hugging Face Hub, or copies it to a folder."),
    ...jobs.map((job) => el("div.fp-publication", {}, publicationParts(job, run, open, progress))),
    !jobs.some(isAlive) && actions(button("Publish", () => open({}))),
  ];
}

function publicationParts(job, run, open, progress) {
  const { repository, folder } = job.request;
  const name = repository || folder || "Unknown destination";
  const title = el("p", {}, el("b", {}, name));
  if (isAlive(job)) return [title, progress];
  const forget = chip("Remove from list", () => removeJob(job.id, run), named("Remove from list", name));
  if (job.state === "done") return [publishedPart(job, forget)];
  return [
    title,
    job.state === "stopped" ? el("p.fp-dim", {}, "Stopped.") : failurePart(failureText(job)),
    actions(
      button("Publish again", () => open(job.request), named("Publish again", name)),
      forget,
    ),
  ];
}

function publishedPart({ request, result, created }, forget) {
  const at = el("span.fp-dim.fp-figures", {}, `${result.files} files, ${bytes(result.bytes)}, ${dateTime(created)}`);
  if (result.folder) return el("p", {}, el("code.fp-path", {}, result.folder), " ", at, " ", forget);
  const visibility = request.public ? "public" : "private";
  const commit = `${result.is_unchanged ? "nothing new since commit" : "commit"} ${result.commit.slice(0, 8)}`;
  const links = [link(result.url, result.repository), ` (${visibility}), `, link(result.commit_url, commit), " "];
  return el("p", {}, links, at, " ", forget);
}

const link = (href, text) => el("a", { href, target: "_blank", rel: "noopener noreferrer" }, text);

const select = (options, value) => {
  const node = el(
    "select.fp-select",
    {},
    Object.entries(options).map(([key, text]) => el("option", { value: key }, text)),
  );
  node.value = value;
  return node;
};
const input = (value, placeholder) =>
  el("input.fp-input", { type: "text", value: value || "", placeholder, spellcheck: "false", autocomplete: "off" });
const label = (text, field) => el("label", {}, text, field);

/** The exports that have finished and were verified: id -> label. All GGUF files of whole models fit into one
 * repository: that choice has their ids, joined by commas. */
function verifiedExports(gguf, quantized) {
  const isVerified = ({ state, result }) => state === "done" && /^verified/.test(result.certificate?.status);
  const files = gguf.filter((job) => job.gguf && isVerified(job));
  const whole = files.filter((job) => !job.format.startsWith("lora-"));
  const choices = Object.fromEntries(files.map(({ id, format }) => [id, `GGUF ${format}`]));
  const all = `GGUF, all in one repository: ${whole.map(({ format }) => format).join(", ")}`;
  if (whole.length > 1) choices[whole.map(({ id }) => id).join(",")] = all;
  for (const { id, label } of quantized.filter((job) => job.model && isVerified(job)))
    choices[id] = `Quantized checkpoint, ${label}`;
  return choices;
}

/** What can be published of a step, except exports: the label by the id of the merge, '' for the model itself. */
function modelChoices(model, step, earlier) {
  const { merge } = model;
  const current = step === model.step && merge?.state === "done" && merge.model ? merge.id : "";
  const choices = { "": model.base ? "Adapter" : "Full weights" };
  if (earlier)
    choices[earlier] = current && current !== earlier ? "Merged model from the earlier request" : "Merged model";
  if (current && current !== earlier) choices[current] = "Merged model";
  return choices;
}

/** The first dialog. @param {any} request the values of an earlier one, or {} */
function askWhere(model, run, request) {
  const step = "step" in request ? request.step : model.step;
  const earlier = request.exports?.join(",") || "";
  const exports = step === model.step ? { ...model.exports } : {};
  if (earlier) exports[earlier] ||= "Exports from the earlier request";
  const models = { ...modelChoices(model, step, request.merge), ...exports };
  const what = select(models, earlier || request.merge || "");
  const where = select({ [HUB]: "Hugging Face Hub", [FOLDER]: "Folder on this server" }, request.folder ? FOLDER : HUB);
  const repository = input(request.repository, "account/name, or name");
  const visibility = select({ private: "Private", public: "Public" }, request.public ? "public" : "private");
  const folder = input(request.folder, "/home/ada/my-model");
  const license = input(request.license, "apache-2.0");
  const base = input(request.base_model, "organization/name");
  const ofHub = [label("Repository", repository), label("Visibility", visibility)];
  const ofFolder = label("Empty or new folder, as an absolute path", folder);
  const show = () => {
    for (const field of ofHub) field.hidden = where.value !== HUB;
    ofFolder.hidden = where.value === HUB;
  };
  where.addEventListener("change", show);
  show();
  const fields = [
    step !== null && el("p.fp-dim", {}, modelName(step)),
    Object.keys(models).length > 1 && label("Model", what),
    label("Destination", where),
    ...ofHub,
    ofFolder,
    label("License in the model card (optional)", license),
    label("Hub ID of the base model (if the run used a local folder)", base),
  ];
  const next = async (isOpen) => {
    const isHub = where.value === HUB;
    const isExport = what.value in exports;
    const body = {
      step,
      merge: isExport ? "" : what.value,
      exports: isExport ? what.value.split(",") : [],
      repository: isHub ? repository.value : "",
      folder: isHub ? "" : folder.value,
      public: isHub && visibility.value === "public",
      license: license.value,
      base_model: base.value,
    };
    const summary = await post(`${run.base}/publications/summary`, body);
    if (!isOpen()) return;
    close(); // first: after the second dialog, the focus returns to the button that opened this one
    confirmSummary(summary, model, run);
  };
  const close = formDialog("Publish this model", fields.filter(Boolean), next, { label: "Review files" });
}

/** The second dialog: nothing is sent before it is confirmed. */
function confirmSummary(summary, model, run) {
  const { request, files } = summary;
  const shown = Object.fromEntries(files.map((file) => [file.name, file.version]));
  const row = ({ name, bytes: size }) => el("tr", {}, el("td", {}, name), el("td.fp-figures", {}, bytes(size)));
  const total = el("p.fp-dim", {}, `${files.length} files, ${bytes(summary.bytes)}`);
  const leftOut = `Not published: ${summary.left_out.join(", ")}`;
  const back = button("Back", () => {
    close();
    askWhere(model, run, request);
  });
  const parts = [
    el("p", {}, summary.effect),
    request.step !== null && el("p.fp-dim", {}, modelName(request.step)),
    el("table.fp-publish-files", {}, files.map(row)),
    total,
    summary.left_out.length ? el("p.fp-dim", {}, leftOut) : null,
    fold("README.md, the model card", el("pre.fp-code", { tabindex: 0 }, summary.card), null),
  ];
  const send = async () => {
    await post(`${run.base}/publications`, { ...request, shown });
    run.refresh();
  };
  const options = { actions: [back], wide: true, label: "Publish" };
  const close = formDialog("Files to publish", parts.filter(Boolean), send, options);
}
