// @ts-check
// The pages without Gradio: the buttons of the header, and the list of documents of the help.
import { $ } from "./dom.js";
import { showLogout } from "./logout.js";

$("#fp-theme").addEventListener("click", () => {
  const isDark = document.body.classList.toggle("dark");
  localStorage.setItem("fp-theme", isDark ? "dark" : "light");
});
// In a narrow window the list would push the document out of sight.
if (matchMedia("(max-width: 900px)").matches) document.querySelector("aside details")?.removeAttribute("open");
void showLogout();
