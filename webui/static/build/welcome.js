// @ts-check
// A note that says what Footplate is, shown on this browser's first visit: only in that tab, until the user closes it.
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
