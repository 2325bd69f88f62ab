"""One page for many tests: loading it takes seconds, and resetting it a tenth of a second.

What a test changes is undone in the page, also after the test has reloaded it. Then what the Build view shows is
compared with what a page that was just loaded has shown; if it differs, the page is loaded again, without what the
browser has stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, BrowserContext, Page
from playwright.sync_api import TimeoutError as PlaywrightTimeout
from served import TIMEOUT, new_context

from backend.runs.folder import Run

SIZE = {"width": 1440, "height": 1000}
READY = "body[data-ready]"
FIRST_VISIT = "", "first-run"  # target machine ('' is this one) and preset
# The form's values; then what the Build view and the header show, without the digits: figures of this machine change.
FORM = r"""() => {
  const lines = (selector) => document.querySelector(selector).innerText.replace(/[\d.]+/g, "0").split("\n");
  const fields = [...document.querySelectorAll("#fp-build :is(input, textarea, select), #fp-machine")];
  const ofField = ({ id, value, checked, disabled }) => `${id} ${value} ${checked} ${disabled}`;
  const stored = Object.keys(localStorage).filter((key) => !key.startsWith("fp-unsaved-")).sort();
  return [JSON.stringify(footplate.values()), document.body.className, ...lines(".fp-top"),
    ...lines("#fp-build"), ...fields.map(ofField), ...stored,
    `${document.querySelectorAll("head style").length} styles`, `${document.body.children.length} elements`];
}"""
REMEMBER = """() => ({
  isDark: document.body.classList.contains("dark"),
  stored: Object.keys(localStorage),
  unfolded: [...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent),
  expanded: [...document.querySelectorAll("#fp-build :is(.fp-head, .fp-more)")].map((b) => b.ariaExpanded),
})"""
UNDO = """(first) => {
  document.querySelectorAll("dialog").forEach((dialog) => dialog.remove());
  const parameters = new URLSearchParams(location.search);
  for (const name of [...parameters.keys()])
    if (!["draft", "machine", "preset"].includes(name)) parameters.delete(name);
  history.replaceState(null, "", `?${parameters}`);
  footplate.showView("build");
  document.querySelectorAll(".fp-view[tabindex]").forEach((view) => view.removeAttribute("tabindex"));
  if (document.body.classList.contains("dark") !== first.isDark) document.querySelector("#fp-theme").click();
  const search = document.querySelector("#fp-search");
  if (search.value) {
    search.value = "";
    search.dispatchEvent(new Event("input", { bubbles: true }));
  }
  for (const details of document.querySelectorAll("details"))
    details.open = first.unfolded.includes(details.querySelector("summary")?.textContent);
  document.querySelectorAll("#fp-build :is(.fp-head, .fp-more)").forEach((button, position) => {
    if (button.ariaExpanded !== first.expanded[position]) button.click();
  });
  for (const key of Object.keys(localStorage))
    if (!first.stored.includes(key) && !key.startsWith("fp-unsaved-")) localStorage.removeItem(key);
  document.querySelector("#fp-preview [role=tab][aria-selected=false]:first-child")?.click();
  document.querySelector("#fp-toasts")?.remove();
  const start = document.createElement("button"); // Tab goes on from here
  document.body.prepend(start);
  start.focus();
  start.remove();
  for (const node of document.querySelectorAll("#fp-build *")) if (node.scrollTop) node.scrollTop = 0; // the report
  window.scrollTo(0, 0);
}"""
FORGET_NOTES = "() => document.querySelector('#fp-toasts')?.remove()"


class SamePage:
    """A page of the server at `url` that many tests use, one after the other."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context, self.url = context, url
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.first: dict[str, object] | None = None  # of the page, when it was loaded; None if it must be loaded again
        self.is_fresh = False  # loaded for this test, which calls `show_build` before it changes anything
        self.first_states: dict[tuple[str, str], list[str]] = {}  # of a machine and a preset: values, what is shown

    def begin(self) -> Page:
        """The page for the next test, without routes, other pages, window size and notifications of the last one."""
        self.errors.clear()
        self.context.clear_cookies()
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.set_default_timeout(TIMEOUT)
        self.page.set_viewport_size(SIZE)
        for other in self.context.pages:
            if other != self.page:
                other.close()
        self.page.mouse.move(0, 0)
        if not self.first or not self.page.url.startswith(f"{self.url}/?") or not self.page.query_selector(READY):
            self._load()
        else:
            self.is_fresh = False
        self.page.evaluate(UNDO, self.first)
        return self.page

    def show_build(self, machine: str = FIRST_VISIT[0], preset: str = FIRST_VISIT[1]) -> None:
        """The Build view as after the first load, with a target machine and the values of a preset."""
        wanted, self.is_fresh = (machine, preset), self.is_fresh and not self.first_states
        if wanted in self.first_states:
            self.page.evaluate(UNDO, self.first)
            self._select(*wanted)
            if self._is_in_first_state(wanted):
                return
        if wanted == FIRST_VISIT:
            if not self.is_fresh:
                self._load()
        else:
            self.show_build()
        self._select(*wanted)
        self.first_states[wanted] = self.page.evaluate(FORM)

    def leave(self) -> None:
        """Load the page again for the next test, since the list of runs and other views keep their state."""
        self.first = None

    def _load(self) -> None:
        if not self.page.url.startswith(f"{self.url}/"):
            self.page.goto(f"{self.url}/static/icon.svg")
        self.page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
        self.page.goto(self.url)
        self.page.wait_for_selector(READY)  # a wait_for_function would get Gradio's slow timer
        settled(self.page)
        self.first = self.page.evaluate(REMEMBER)
        self.is_fresh = True

    def _select(self, machine: str, preset: str) -> None:
        """Select the machine and the preset in their menus, unless the form has them and their values."""
        machines, presets = self.page.locator("#fp-machine"), self.page.locator("#fp-presets")
        if machines.input_value() != machine:
            machines.select_option(machine)
        first, has_first_values = self.first_states.get((machine, preset)), True
        if first:
            has_first_values = self.page.evaluate(FORM)[0] == first[0]
        if presets.input_value() != preset or not has_first_values:
            presets.select_option("")  # another choice of the same preset would be no change
            presets.select_option(preset)
            self.page.locator(".fp-toast").wait_for()
        settled(self.page)
        self.page.evaluate(FORGET_NOTES)

    def _is_in_first_state(self, wanted: tuple[str, str]) -> bool:
        first = self.first_states[wanted]
        try:  # Gradio writes its fields a moment after the check
            self.page.wait_for_function(f"(first) => String(({FORM})()) === String(first)", arg=first, timeout=2000)
        except PlaywrightTimeout:
            changed = zip(first, self.page.evaluate(FORM), strict=False)
            differences = [pair for pair in changed if pair[0] != pair[1]]
            print("The page is loaded again, since it is not in its first state:", differences[:3])
            return False
        return True


@contextmanager
def same_page_of(browser: Browser, url: str) -> Iterator[SamePage]:
    """A page of the server at `url`, for the tests of a file."""
    context = new_context(browser)
    yield SamePage(context, url)
    context.close()


def show_run(page: Page, run: Run) -> None:
    """The Run view of a run, as after a click on its link."""
    page.evaluate("id => footplate.showView('run', id)", run.id)


def settled(page: Page) -> None:
    """Wait until the checks of the values that the form has are shown."""
    page.wait_for_function("() => document.querySelector('#fp-status')?.dataset.fresh === 'yes'")
