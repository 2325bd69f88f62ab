// @ts-check
// Links to the sections of a run's page, which is several screens long.
import { el } from "../dom.js";

const UNLISTED = ["Error", "Alerts", "No progress"]; // these sections are at the top

/**
 * A row of links to the sections of `node`, its children with a label, that are shown.
 * @param {() => HTMLElement} node
 */
export function createSectionLinks(node) {
  const nav = el("nav.fp-run-sections", { "aria-label": "Sections of this run" });
  let drawn = "";

  function draw() {
    const sections = [...node().querySelectorAll(":scope > section[aria-label]:not([hidden])")].filter(
      (section) => !UNLISTED.includes(section.getAttribute("aria-label")),
    );
    const labels = sections.map((section) => section.getAttribute("aria-label"));
    if (labels.join() === drawn) return;
    drawn = labels.join();
    nav.replaceChildren(...sections.map((section, n) => link(section, labels[n])));
  }

  /** Follow which sections are shown. */
  function follow() {
    const observer = new MutationObserver((changes) => {
      if (changes.some(({ target }) => target.parentNode === node())) draw();
    });
    observer.observe(node(), { subtree: true, attributeFilter: ["hidden"] });
    draw();
  }
  return { nav, follow };
}

function link(section, label) {
  const onclick = () => {
    section.tabIndex = -1;
    section.focus({ preventScroll: true }); // Tab continues from there
    section.scrollIntoView({ block: "start" });
  };
  return el("button.fp-link", { type: "button", onclick }, label);
}
