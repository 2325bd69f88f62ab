// @ts-check
// The theme that this browser has chosen, and the button that switches it. A page without Gradio loads this script
// before it is painted, so that the page does not flash in the wrong theme and the button works at once. For the page
// with Gradio, main.js imports the script; that page shows the theme of the system until it is rendered.
function showChosenTheme() {
  const chosen = localStorage.getItem("fp-theme");
  if (chosen) document.body.classList.toggle("dark", chosen === "dark");
}

const system = matchMedia("(prefers-color-scheme: dark)");
const showSystemTheme = () => document.body.classList.toggle("dark", system.matches);

if (document.body.classList.contains("fp-page")) {
  showSystemTheme();
  showChosenTheme();
}
system.addEventListener("change", () => localStorage.getItem("fp-theme") || showSystemTheme());
addEventListener("footplate-rendered", showChosenTheme);

document.addEventListener("click", (event) => {
  if (!(event.target instanceof Element && event.target.closest("#fp-theme"))) return;
  const isDark = document.body.classList.toggle("dark");
  localStorage.setItem("fp-theme", isDark ? "dark" : "light");
});
