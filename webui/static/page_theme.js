// @ts-check
// Loaded before the page is painted, so that it does not flash in the wrong theme and its button works at once.
const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
const theme = localStorage.getItem("fp-theme") || (prefersDark ? "dark" : "light");
document.body.classList.toggle("dark", theme === "dark");

document.addEventListener("click", (event) => {
  if (!(event.target instanceof Element && event.target.closest("#fp-theme"))) return;
  const isDark = document.body.classList.toggle("dark");
  localStorage.setItem("fp-theme", isDark ? "dark" : "light");
});
