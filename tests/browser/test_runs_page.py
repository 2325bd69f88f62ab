"""The list of runs as a notebook: search, star, tag, archive, sort, columns, and thousands of rows."""

import json
from datetime import datetime, timedelta
from pathlib import Path

from planted_runs import plant_run
from playwright.sync_api import expect

from backend.runs import LOCK, METRICS, RESULT, STATE, notebook
from backend.runs.folder import runs as all_runs

CASES = json.loads((Path(__file__).parent.parent / "unit" / "search_cases.json").read_text(encoding="utf-8"))
# Each case as the page computes it; the server's columns are those of search.py.
SEARCHES = """async ({ runs, cases, sorted }) => {
  const { parseSearch, sortRuns } = await import("./footplate/runs/runs_search.js");
  const { columns } = await (await fetch("api/runs")).json();
  const numbers = (found) => found.map((run) => runs.indexOf(run));
  const search = (text) => {
    try {
      return { ids: numbers(runs.filter(parseSearch(text, columns))) };
    } catch (error) {
      return { error: error.message };
    }
  };
  const keyOf = (name) => columns.find(({ key, names }) => key === name || names.includes(name)).key;
  return {
    cases: cases.map((one) => search(one.search)),
    sorted: sorted.map(({ by, descending }) => numbers(sortRuns(runs, keyOf(by), descending))),
  };
}"""

# The day in the row of a run that has ended, before and after midnight.
AFTER_MIDNIGHT = """async () => {
  const { createRow } = await import("./footplate/runs/runs_row.js");
  const { columns } = await (await fetch("api/runs")).json();
  const run = { id: "a", state: "done", started: Date.now() / 1000 };
  const row = createRow(run.id, columns.filter(({ key }) => key === "started"), new Set(), {});
  const day = () => {
    row.draw(run);
    return row.node.querySelector("[data-column=started]").textContent.split(" ")[0];
  };
  const [before, Today] = [day(), Date];
  globalThis.Date = class extends Today {
    constructor(...given) {
      super(...(given.length ? given : [Today.now() + 864e5]));
    }
  };
  const after = day();
  globalThis.Date = Today;
  return [before, after];
}"""


def make(root, number, end="done"):
    """A run as it looks after training."""
    created = datetime(2026, 11, 22) + timedelta(seconds=number)
    about = {"model": "tiny-llama", "method": "LoRA", "strategy": "ddp", "learning_rate": 10.0 ** -(number % 7)}
    contents = {
        LOCK: "supervisor",
        STATE: {"started": 1.0, "ended": 61.0 + number, "end": end},
        METRICS: [{"step": number, "loss": 1 + number % 11}],
        RESULT: {"eval_loss": number / 8},
    }
    return plant_run(root, f"run {number}", contents, created=created, about=about)


def names(page):
    return page.locator(".fp-runs-link").all_inner_texts()


def act(page, name, action):
    page.get_by_label(f"Actions for {name}", exact=True).click()
    page.get_by_role("menuitem", name=action).click()


def test_search_star_tag_archive_sort_columns(without_runs, same_page):
    server, page = without_runs, same_page.page
    runs = [make(server.runs, i, "failed" if i == 2 else "done") for i in range(5)]
    page.evaluate("() => footplate.showView('runs')")
    expect(page.locator(".fp-runs-link")).to_have_count(5)
    page.set_viewport_size({"width": 1024, "height": 1000})
    row = [page.get_by_label("Search runs"), page.locator("#fp-runs-page summary", has_text="Columns")]
    assert len({round(node.bounding_box()["y"]) for node in row}) == 1
    page.set_viewport_size({"width": 1440, "height": 1000})
    search(page)
    assert page.evaluate(AFTER_MIDNIGHT) == ["Today", "Yesterday"]
    annotate_one(page, runs[3])
    change_several(page, runs)
    choose_columns(page)
    scroll_through_many(page, server)
    page.evaluate("id => footplate.showView('run', id)", runs[3].id)
    expect(page.locator(".fp-run-notes")).to_have_text("paperthe good one")
    same_page.leave()
    for run in all_runs(server.runs):
        run.delete()


def search(page):
    """The cases of search_cases.json, and the field."""
    found = page.evaluate(SEARCHES, CASES)
    for case, on_page in zip(CASES["cases"], found["cases"], strict=True):
        assert on_page.get("ids") == case.get("ids"), case
        assert case.get("error", "") in on_page.get("error", ""), case
    assert found["sorted"] == [case["ids"] for case in CASES["sorted"]]

    field = page.get_by_label("Search runs")
    field.press_sequentially("state:failed")
    expect(page.locator(".fp-runs-link")).to_have_text(["run 2"])
    field.fill("state:failed lr>fast")
    expect(page.locator(".fp-runs-problem")).to_contain_text("Learning rate is a number, and fast is not.")
    expect(page.locator(".fp-runs-link")).to_have_text(["run 2"])  # the list stays as it is
    field.fill("")
    expect(page.locator(".fp-runs-link")).to_have_count(5)


def annotate_one(page, run):
    """Star, tags and notes, with a tag that is refused."""
    page.get_by_label("Star run 3").click(force=True)
    expect(page.get_by_label("Star run 3")).to_have_attribute("aria-pressed", "true")
    act(page, "run 3", "Name, tags and notes")
    page.locator("dialog").get_by_label("Name").fill("run 3, the best")
    page.get_by_label("Tags, separated by spaces").fill("paper a:b")
    page.locator("dialog").get_by_label("Notes").fill("the good one")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("'a:b' is not a tag")
    page.get_by_label("Tags, separated by spaces").fill("paper")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".fp-runs-tags", has_text="paper")).to_be_visible()
    assert notebook.read(run.path) == notebook.Annotations(("paper",), "the good one", True, name="run 3, the best")
    expect(page.locator(".fp-runs-link", has_text="run 3, the best")).to_be_visible()
    notebook.change(run.path, name="")


def change_several(page, runs):
    """Tag, archive and delete selected runs."""
    field = page.get_by_label("Search runs")
    page.get_by_label("Select run 0").check()
    page.get_by_label("Select run 1").check()
    bar = page.get_by_role("region", name="Selected runs")
    bar.get_by_role("button", name="Tag").click()
    page.get_by_label("Tags to add").fill("old")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".fp-runs-tags", has_text="old")).to_have_count(2)
    bar.get_by_role("button", name="Archive").click()
    expect(page.locator(".fp-runs-link")).to_have_count(3)
    expect(bar).to_be_hidden()
    field.fill("archived:yes")
    expect(page.locator(".fp-runs-link")).to_have_text(["run 1", "run 0"])
    page.get_by_label("Select run 1").check()
    field.fill("")
    page.get_by_label("Select run 2").check()
    bar.get_by_role("button", name="Archive").click()
    expect(page.locator(".fp-toast").last).to_contain_text("1 run archived.")
    page.locator(".fp-toast").last.get_by_role("button", name="Undo").click()
    expect(page.locator(".fp-runs-link")).to_have_count(3)
    field.fill("archived:yes")
    expect(page.locator(".fp-runs-link")).to_have_text(["run 1", "run 0"])  # as before
    page.get_by_label("Select all runs").check()
    bar.get_by_role("button", name="Delete").click()
    expect(page.locator("dialog")).to_contain_text("Delete 2 runs? run 1, run 0. Their logs")
    page.locator("dialog").get_by_role("button", name="Cancel").click()
    field.fill('archived:yes "run 0"')
    bar.get_by_role("button", name="Delete").click()
    expect(page.locator("dialog")).to_contain_text("run 1, run 0. The list does not show run 1 now.")
    page.locator("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="No run matches")).to_be_visible()
    assert not runs[0].path.exists() and runs[2].path.exists()
    field.fill("")


def choose_columns(page):
    """Another column, which sorts; the browser remembers both."""
    page.locator("#fp-runs-page").get_by_text("Columns", exact=True).click()
    menu = page.locator(".fp-columns-menu")
    menu.get_by_label("Learning rate").check()
    menu.get_by_label("Loss", exact=True).uncheck()
    page.locator('th[data-column="learning_rate"] button').click()
    expect(page.locator(".fp-runs-link")).to_have_text(["run 4", "run 3", "run 2"])  # 1e-4, 1e-3, 1e-2
    page.locator('th[data-column="learning_rate"]').click(position={"x": 5, "y": 5})  # next to the text
    expect(page.locator(".fp-runs-link")).to_have_text(["run 2", "run 3", "run 4"])
    page.reload()
    expect(page.locator(".fp-runs-link")).to_have_text(["run 2", "run 3", "run 4"])
    columns = page.locator("th[data-column]").evaluate_all("heads => heads.map((head) => head.dataset.column)")
    assert columns == ["name", "state", "model", "method", "stage", "step", "learning_rate", "started", "duration"]


def scroll_through_many(page, server):
    """Only the rows in sight are in the page; on a narrow one, the actions stay in sight."""
    for i in range(5, 120):
        make(server.runs, i)
    page.get_by_label("Search runs").fill("run")
    expect(page.locator(".fp-chip[data-group='']")).to_have_text("All118")
    assert len(names(page)) < 60
    page.locator("th", has_text="Name").get_by_role("button").click()
    page.set_viewport_size({"width": 800, "height": 900})
    expect(page.get_by_label("Actions for run 10", exact=True)).to_be_in_viewport(ratio=1)
    page.set_viewport_size({"width": 390, "height": 700})
    for part in (0.5, 1):  # the middle has more rows around it than the end
        page.evaluate("part => window.scrollTo(0, part * document.documentElement.scrollHeight)", part)
        page.wait_for_timeout(200)
    expect(page.get_by_role("link", name="run 99", exact=True)).to_be_in_viewport()
    assert "run 10" not in names(page)
