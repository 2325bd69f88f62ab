// @ts-check
// A sentence about what Footplate is, on the first visit of this browser; it stays after reloads of that tab.
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
