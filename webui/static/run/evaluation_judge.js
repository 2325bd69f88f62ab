// @ts-check
// The LLM judge of an evaluation: its fields, and the consent that it needs.
import { post } from "../api.js";
import { confirmDialog, el } from "../dom.js";
import { labeled } from "./run_jobs.js";

const ABOUT =
  "An LLM judge, at any OpenAI-compatible API, reads each prompt with its reference and both outputs, and says " +
  "which output is better; it is asked in both orders. Before the start, the page shows how many requests go where, " +
  "and asks for your consent. The API key is read from an environment variable of the server, whose name ends with " +
  "_API_KEY.";
const INSTRUCTION = "Default: which output follows the prompt better, and is more correct, complete and clear";
const FIELDS = ["judge_url", "judge_model", "judge_key", "judge_instruction"];

/** The fields of a judge, by the names of their settings. */
export function createJudgeFields() {
  const input = (placeholder) => el("input.fp-input", { type: "text", placeholder, spellcheck: "false" });
  const parts = {
    judge_url: input("None, or https://api.openai.com/v1"),
    judge_model: input("Name of a model at this URL"),
    judge_key: input("None, or JUDGE_API_KEY"),
    judge_instruction: el("textarea.fp-input", { rows: 2, placeholder: INSTRUCTION }),
  };
  const fields = el(
    "div.fp-job-fields.fp-custom-scores",
    {},
    labeled("Base URL of the judge", parts.judge_url),
    labeled("Model of the judge", parts.judge_model),
    labeled("Environment variable with the judge's API key", parts.judge_key),
  );
  const instruction = labeled("Instruction of the judge", parts.judge_instruction);
  return {
    node: el("div.fp-job-settings", {}, fields, instruction, el("p.fp-dim", {}, ABOUT)),
    values: () => Object.fromEntries(FIELDS.map((name) => [name, parts[name].value.trim()])),
    fill: (settings) => FIELDS.forEach((name) => (parts[name].value = settings?.[name] || "")),
  };
}

/** the judge gpt-4.1 at https://api.openai.com/v1; "" without one */
export const judgeText = ({ judge_url: address, judge_model: model }) =>
  address ? `the judge ${model} at ${address}` : "";

/**
 * Start an evaluation. A score file runs only if the user has agreed to its content, which the hash identifies, and
 * outputs are sent to a judge only if the user has agreed to its base URL.
 */
export async function startEvaluation(path, values) {
  for (;;) {
    try {
      await post(path, values);
      return;
    } catch (error) {
      const consent = error.data?.consent;
      if (!consent) throw error;
      const agreed = await askConsent(consent);
      if (!agreed) return;
      values = { ...values, ...agreed };
    }
  }
}

/** What to add to the values; null if the user does not agree. */
async function askConsent({ path, sha256, question, judge_agreed: judge }) {
  if (judge) return (await confirmDialog(question, "Send to the judge")) ? { judge_agreed: judge } : null;
  const code =
    `Run the Python code in ${path} (SHA-256 ${sha256})? It can do everything that the user of the ` +
    "server can do. Read the file before you agree.";
  return (await confirmDialog(code, "Run this file")) ? { score_file_sha256: sha256 } : null;
}
