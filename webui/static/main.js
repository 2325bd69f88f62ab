// @ts-check
// The entry point: starts the views and switches between them. Gradio's event handlers call `window.footplate`.
import { get } from "./api.js";
import {
  addBuildEvents,
  checkSoon,
  cloneRun,
  loadInitialValues,
  loadMachines,
  selectPredecessor,
} from "./build/build.js";
import { drawDatasets } from "./build/datasets.js";
import { currentValues, edited, startForm, valuesToWrite } from "./build/form.js";
import { mountHubToken } from "./build/hub_token.js";
import { completePaths } from "./build/paths.js";
import { drawCheckFailed, script } from "./build/report.js";
import { startSearch } from "./build/search.js";
import { prepareUploads } from "./build/uploads.js";
import { startWelcome } from "./build/welcome.js";
import { mountCompareRuns } from "./compare/compare_runs.js";
import {
  $,
  address,
  closeDialogs,
  copy,
  dismissNotifications,
  emit,
  isFocusLost,
  notify,
  notifyError,
  on,
  setText,
} from "./dom.js";
import { stopLoadingTimer } from "./gradio.js";
import { showLogout } from "./logout.js";
import "./page_theme.js";
import { mountRun } from "./run/run.js";
import { mountRuns } from "./runs/runs.js";

const VIEWS = { build: "Build a run", run: "Run", runs: "Runs", compare: "Compare runs" };

/**
 * Show a view, and put it into the address. `compared` are the parameters of the Compare view.
 * @param {string} tab @param {string} [run]
 */
function showView(tab, run, compared = {}) {
  if (tab !== document.body.dataset.tab) dismissNotifications(); // their Undo buttons belong to the other view
  address.set({ tab, ...(run ? { run } : {}), runs: null, x: null, ...compared });
  drawView();
  if (isFocusLost()) focusTarget($("#fp-skip")); // the element with the focus belongs to the other view
  window.scrollTo(0, 0); // a new view begins at its top; going back restores the browser's position
}

/** Show the view in the address. */
function drawView() {
  const run = address.get("run");
  const tab = address.get("tab") || (run ? "run" : "build");
  const view = tab in VIEWS ? tab : "build";
  closeDialogs(); // an open question is about the earlier view
  document.body.dataset.tab = view;
  setText($("#fp-title"), VIEWS[view]);
  $("#fp-skip").setAttribute("href", `#fp-${view}`);
  for (const link of document.querySelectorAll(".fp-top nav a[data-tab]")) {
    const name = link.getAttribute("data-tab");
    const isCurrent = name === (tab === "compare" ? "runs" : tab);
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (name === "run") {
      link.toggleAttribute("hidden", !run);
      link.setAttribute("href", `?tab=run&run=${encodeURIComponent(run || "")}`);
    }
  }
  emit("view", tab);
  if (tab === "run" && run) emit("run", run);
}

/** Move the focus to where a skip link leads, without a change of the address. @param {any} event */
function skip(event) {
  event.preventDefault();
  focusTarget(event.currentTarget);
}

/** @param {HTMLElement} link */
function focusTarget(link) {
  const target = $(link.getAttribute("href"));
  target.tabIndex = -1;
  target.focus();
}

/** Follow the page's own links without loading the page again. */
function linkClicked(event) {
  const link = event.target.closest("a[href^='?tab=']");
  if (!link || event.metaKey || event.ctrlKey || event.shiftKey || event.button) return;
  event.preventDefault();
  const parameters = new URLSearchParams(link.getAttribute("href").slice(1));
  const compared = { runs: parameters.get("runs"), x: parameters.get("x") };
  showView(parameters.get("tab"), parameters.get("run") || undefined, compared);
  window.scrollTo(0, 0);
}

/** Called by Gradio when the page is rendered. @param {any} description of the form: pages.py */
async function start(description) {
  startForm(description);
  drawDatasets();
  startSearch(description.search);
  dispatchEvent(new Event("footplate-rendered")); // page_theme.js
  startWelcome();
  void showLogout();
  on("edited", checkSoon);
  on("edited", drawDatasets);
  on("clone", (wanted) => cloneRun(wanted, showView).catch(notifyError));
  on("after", (id) => {
    selectPredecessor(id);
    showView("build");
  });
  addBuildEvents(showView);
  mountHubToken();
  completePaths();
  prepareUploads();
  for (const link of document.querySelectorAll(".fp-skip")) link.addEventListener("click", skip);
  $("#fp-copy-script").addEventListener("click", () => copy(script(), "Script"));
  document.addEventListener("click", linkClicked);
  window.addEventListener("popstate", () => {
    address.keepForm();
    drawView();
  });
  mountRun(showView);
  mountRuns();
  mountCompareRuns();
  drawView();
  await loadMachines().catch(() => {});
  const failed = await loadInitialValues().catch((error) => error);
  stopLoadingTimer();
  // Without the draft's values, the form stays hidden: an edit of the default values would begin a new draft.
  if (failed) drawCheckFailed("Loading failed", `${failed.message} Reload the page to try again.`);
  else document.body.dataset.ready = "yes";
}

// For Gradio's handlers (pages.py), and for tests/browser.
Object.assign(window, {
  footplate: { start, edited, valuesToWrite, values: currentValues, script, showView, notify, get },
});
