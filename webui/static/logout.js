// @ts-check
// The button that logs out.
import { $ } from "./dom.js";

/** Without a login, there is nothing to log out of: the server answers 204 only to a session. */
export async function showLogout() {
  const form = /** @type {HTMLFormElement} */ ($("#fp-logout"));
  const response = await fetch(form.action.replace(/logout$/, "login"), { method: "HEAD" }).catch(() => null);
  form.toggleAttribute("hidden", !response || response.status !== 204);
}
