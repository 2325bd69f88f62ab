// @ts-check
// The pages without Gradio: the button of the header that logs out, and the list of documents of the help.
import { showLogout } from "./logout.js";

// In a narrow window the list would push the document out of sight.
if (matchMedia("(max-width: 900px)").matches) document.querySelector("aside details")?.removeAttribute("open");
void showLogout();
