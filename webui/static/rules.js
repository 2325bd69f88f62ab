// @ts-check
// The Rules page: filters the cards by words, level and topic.
export {};

const input = /** @type {HTMLInputElement} */ (document.querySelector(".search input"));
const family = /** @type {HTMLSelectElement} */ (document.querySelector(".search select"));
const status = /** @type {HTMLElement} */ (document.querySelector(".search [role=status]"));
const outdated = /** @type {HTMLElement} */ (document.querySelector("section"));
const none = /** @type {HTMLElement} */ (document.querySelector("#none"));
const chips = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("[data-chip]")]);
const cards = [...document.querySelectorAll("article")];
// "zero3" finds ZeRO-3, and "lora_alpha" finds lora.lora_alpha.
const plain = (text) => text.toLowerCase().replace(/[-_./]/g, "");
const texts = cards.map((card) => plain(card.textContent));
const total = cards.filter((card) => card.id).length;

function filter() {
  const words = plain(input.value).split(/\s+/).filter(Boolean);
  const levels = chips.filter((chip) => chip.ariaPressed === "true").map((chip) => chip.dataset.chip);
  cards.forEach((card, i) => {
    const { level = "", family: topic = "" } = card.dataset;
    const matches = (!levels.length || levels.includes(level)) && (!family.value || family.value === topic);
    card.hidden = !matches || !words.every((word) => texts[i].includes(word));
  });
  const visible = cards.filter((card) => !card.hidden);
  const rules = visible.filter((card) => card.id).length;
  status.textContent = rules < total ? `${rules} of ${total}` : `${total} rules`;
  outdated.hidden = visible.length === rules;
  none.hidden = visible.length > 0;
}

function reset() {
  input.value = family.value = "";
  chips.forEach((chip) => (chip.ariaPressed = "false"));
  filter();
}

chips.forEach((chip) => {
  chip.addEventListener("click", () => {
    chip.ariaPressed = String(chip.ariaPressed !== "true");
    filter();
  });
});
input.addEventListener("input", filter);
family.addEventListener("change", filter);
// The linked section may be filtered out.
document.querySelector("main > header p a")?.addEventListener("click", reset);
if (input.value || family.value) filter(); // entered before this module was loaded
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
