// @ts-check
// The Hugging Face token for gated and private models: which one runs use, a test of it, and a field to store one.
import { get, post } from "../api.js";
import { $, el, on, setText } from "../dom.js";
import { currentValues } from "./form.js";

/** The token is in the field and in one request only: nothing keeps it, and the field is emptied when it is stored. */
export function mountHubToken() {
  const box = $("#fp-hub-token");
  const input = el("input.fp-input", {
    type: "password",
    "aria-label": "Hugging Face token",
    placeholder: "hf_\u2026",
    autocomplete: "off",
    spellcheck: "false",
    maxlength: 1000,
  });
  const source = el("p");
  const answer = el("p", { role: "status" });
  const request = () => ({ token: input.value.trim(), model: String(currentValues()["model.hub_id"] || "").trim() });
  const test = el("button.fp-button", { type: "button", onclick: () => ask("Testing", testToken) }, "Test");
  const save = el("button.fp-button", { type: "submit" }, "Save");
  const form = el("form", { autocomplete: "off" }, el("div.fp-hub-token-row", {}, input, test, save), answer);

  const show = (text, level = "") => {
    setText(answer, text);
    answer.dataset.level = level;
  };
  async function ask(progress, send) {
    test.disabled = save.disabled = true;
    show(`${progress}; this can take up to a minute.`);
    try {
      const { outcome, message } = await send();
      show(message, outcome === "ok" ? "ok" : "error");
    } catch (error) {
      show(error.message, "error");
    } finally {
      test.disabled = save.disabled = false;
    }
  }
  const testToken = () => post("api/hub-token/test", request());
  async function saveToken() {
    const stored = await post("api/hub-token", request());
    input.value = "";
    await showSource();
    return { ...stored, message: `Stored. ${stored.message}` };
  }
  async function showSource() {
    try {
      setText(source, sourceText(await get("api/hub-token")));
    } catch (error) {
      setText(source, error.message);
    }
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask("Asking the Hub, then saving", saveToken);
  });
  box.append(source, form);
  box.addEventListener("toggle", () => box.open && showSource());
  on("hub-refused", () => {
    box.open = true;
    box.scrollIntoView({ block: "center" });
    input.focus();
  });
}

const TESTED = "While the field is empty, Test checks that token.";

function sourceText({ source, variable, path, problem }) {
  if (problem) return problem;
  const stored = `Save stores your token in ${path}, as hf auth login does.`;
  if (source === "environment") {
    return (
      `Runs use the token in ${variable}, which is set in the environment of Footplate and takes precedence over a ` +
      `stored one. ${TESTED} ${stored}`
    );
  }
  const replaced = "Save replaces the stored token.";
  if (source === "file") return `Runs use the token that is stored in ${path}. ${TESTED} ${replaced}`;
  return `Gated and private models need a token; none is stored. ${stored}`;
}
