// @ts-check
// Loaded before the page is painted, so that it does not flash in the wrong theme.
const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
const theme = localStorage.getItem("fp-theme") || (prefersDark ? "dark" : "light");
document.body.classList.toggle("dark", theme === "dark");
