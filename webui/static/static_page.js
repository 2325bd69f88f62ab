// @ts-check
// The pages without Gradio: the button of the header that logs out, and the list of documents of the help.
import { showLogout } from "./logout.js";

// In a narrow window, an open list would push the document out of sight.
if (matchMedia("(max-width: 900px)").matches) document.querySelector("aside details")?.removeAttribute("open");
void showLogout();

const TYPING_PAUSE = 300; // ms
const search = /** @type {HTMLInputElement | null} */ (document.querySelector("aside input[name=q]"));
const main = document.querySelector("main");
const documentShown = main ? [...main.childNodes] : [];
let latest = 0;

/** Show what is found while the words are typed; without words, the document. */
async function showFound(/** @type {HTMLInputElement} */ input, /** @type {Element} */ place) {
  const mine = ++latest;
  if (!input.value.trim()) {
    place.replaceChildren(...documentShown);
    return;
  }
  const answer = await fetch(`search?q=${encodeURIComponent(input.value)}`).catch(() => null);
  if (mine !== latest || !answer?.ok) return; // Enter still loads the page of results, or an error
  const found = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
  if (mine === latest && found) place.replaceChildren(...found.childNodes);
}

if (search && main) {
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => showFound(search, main), TYPING_PAUSE);
  });
  if (search.value !== search.defaultValue) void showFound(search, main); // typed before this module was loaded
  document.querySelector("aside nav")?.addEventListener("click", (event) => {
    if (!(/** @type {Element} */ (event.target).closest("a[href^='#']"))) return;
    latest++;
    main.replaceChildren(...documentShown); // this node has the heading
  });
}
