// @ts-check
// One sentence that says what Footplate is, on the first visit of this browser; reloads of that tab keep it.
import { $ } from "../dom.js";

const KEY = "fp-welcome";

export function startWelcome() {
  const box = $("#fp-welcome");
  if (!localStorage.getItem(KEY)) sessionStorage.setItem(KEY, "shown");
  localStorage.setItem(KEY, "seen");
  box.hidden = !sessionStorage.getItem(KEY);
  $("button", box).addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    box.hidden = true;
    $("#fp-presets").focus();
  });
}
