"""The log view folds known messages of libraries; the search and the download still have them."""

import pytest
from planted_runs import ended, plant_run
from playwright.sync_api import expect
from same_page import show_run

from backend.runs import LOCK, LOG, STATE

LINES = """\
---- started 2026-11-24 16:00:00 ----
[default0]:Failed to load /x/site-packages/torchao/_C_mxfp8.so: Could not load this library: /x/torchao/_C_mxfp8.so
[default1]:W1124 16:00:01.000 7 torch/utils/_pytree.py:630] <enum 'KernelPreference'> is an Enum subclass
[default0]:/x/site-packages/peft/config.py:7: FutureWarning: old is deprecated
[default0]:  warnings.warn(
[default0]:16:00:02 Preparing data.
[default0]:  an indented line of the run
[default0]:/x/site-packages/torch/optim/lr_scheduler.py:9: UserWarning: lr_scheduler.step() before optimizer.step()
[default0]:/x/site-packages/torchao/a.py:9: FutureWarning: ImportError: an error stays in view
"""
FOLDED = ("torchao/_C_mxfp8.so", "KernelPreference", "old is deprecated", "warnings.warn(")
SHOWN = ("Preparing data.", "an indented line of the run", "lr_scheduler.step()", "an error stays in view")
TRACEBACK = """\
{0}Traceback (most recent call last):
{0}  File "/x/site-packages/transformers/utils/generic.py", line 9, in <module>
{1}/x/site-packages/peft/config.py:7: FutureWarning: folded
{1}  folded, too
{0}    _torch_pytree._register_pytree_node(
{0}    File "/x/site-packages/torch/utils/_pytree.py:630", in frame
{0}  File "/home/me/train.py", line 3, in main
{0}    /x/site-packages/peft/config.py:7: FutureWarning: a quoted warning
{0}
{0}ValueError: the reason
{0}/x/site-packages/a.py:7: FutureWarning: after the traceback
{0}  of the warning
{0}def mine: torch/utils/_pytree.py:630 and _register_pytree_node are named by the user
"""
IN_TRACEBACK = ("    _torch_pytree._register", '_pytree.py:630", in frame', "/home/me/train.py", "a quoted warning")
AFTER = ("the reason", "are named by the user")


# torchrun's own process, which a user stops while the ranks load their libraries.
STOPPED = """\
W1126 19:25:16.219000 7 lib/torch/distributed/launcher/api.py:249] config has no run_id, generated a random run_id: 8
W1126 19:25:28.364000 7 venv/lib/torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting \
down workers
W1126 19:25:28.365000 7 venv/lib/torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 8 closing \
signal SIGTERM
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^
torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15
Traceback (most recent call last):
ValueError: of the user
"""


def make(server, lines=LINES):
    return plant_run(server.runs, "library messages", {LOCK: "supervisor", STATE: ended(), LOG: lines})


def test_an_ended_run_without_a_log_does_not_promise_one(shared, page):
    run = make(shared, "")
    show_run(page, run)
    expect(page.locator(".fp-log-empty")).to_have_text("This log is empty: the run ended before it wrote a line.")
    expect(page.locator(".fp-details > :visible").first).to_have_css("border-top-width", "0px")
    (run.path / LOG).write_text("a line\n")
    page.evaluate("() => footplate.showView('runs')")
    show_run(page, make(shared))
    expect(page.locator(".fp-log")).to_contain_text("Preparing data.")
    show_run(page, run)
    expect(page.locator(".fp-log")).to_contain_text("a line")
    expect(page.locator(".fp-log-empty")).to_be_hidden()


def test_library_messages_are_folded(shared, page):
    run = make(shared)
    show_run(page, run)
    log, group = page.locator(".fp-log"), page.get_by_role("button", name="Library messages")
    expect(group).to_have_text("Library messages (3)")
    expect(group).to_have_attribute("aria-expanded", "false")
    for text in FOLDED:
        expect(log.get_by_text(text)).to_be_hidden()
    for text in SHOWN:
        expect(log.get_by_text(text)).to_be_visible()
    group.click()
    expect(group).to_have_attribute("aria-expanded", "true")
    for text in (*FOLDED, *SHOWN):
        expect(log.get_by_text(text)).to_be_visible()
    group.click()
    expect(log.get_by_text("old is deprecated")).to_be_hidden()
    page.get_by_role("searchbox", name="Search the log").fill("old is")
    expect(log.get_by_text("old is deprecated")).to_be_visible()
    downloaded = page.request.get(f"{shared.url}/api/runs/{run.id}/log.txt").text()
    assert downloaded == LINES


@pytest.mark.parametrize(
    "prefixes",
    [
        pytest.param(("[default0]:", "[default1]:"), marks=pytest.mark.soak),
        pytest.param(("[rank0]: ", "[rank1]: "), marks=pytest.mark.soak),
        ("[default0]:[rank0]: ", "[default1]:"),
    ],
)
def test_a_traceback_is_never_folded(shared, page, prefixes):
    run = make(shared, TRACEBACK.format(*prefixes))
    show_run(page, run)
    log = page.locator(".fp-log")
    expect(page.get_by_role("button", name="Library messages")).to_have_text("Library messages (2)")
    for text in (*IN_TRACEBACK, *AFTER):
        expect(log.get_by_text(text)).to_be_visible()
    for text in ("FutureWarning: folded", "folded, too", "after the traceback", "of the warning"):
        expect(log.get_by_text(text)).to_be_hidden()


def test_messages_of_torch_with_a_rank_are_folded(shared, page):
    lines = "[default0]:[rank0]:W1124 16:00:01.000 7 torch/utils/_pytree.py:630] <enum 'A'> is an Enum subclass\n"
    lines += (
        "[default0]:[W1124 16:00:01.00 socket.cpp:7] [c10d] The hostname of the client socket cannot be retrieved.\n"
    )
    lines += "W1124 16:00:01.000 7 torch/distributed/run.py:874] \n"
    lines += "W1124 16:00:01.000 7 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment variable\n"
    run = make(shared, lines + STOPPED + "the end\n")
    show_run(page, run)
    expect(page.get_by_role("button", name="Library messages")).to_have_text("Library messages (7)")
    traceback = ["Traceback (most recent call last):", "ValueError: of the user"]
    expect(page.locator(".fp-log-line:visible")).to_have_text([*traceback, "the end"])
    expect(page.locator(".fp-log-line[data-level=error]")).to_have_text(traceback)


def test_the_search_skips_lines_that_the_level_hides(shared, page):
    run = make(shared, "step 1\nstep 2: UserWarning: slow\nstep 3: ValueError: no\nstep 4\n")
    show_run(page, run)
    page.locator(".fp-log").get_by_text("step 4").wait_for()
    page.get_by_role("searchbox", name="Search the log").fill("step")
    count = page.locator("#fp-run-page .fp-log-count")
    expect(count).to_have_text("4 lines")
    for level, text in (("error", "1 line"), ("warning", "2 lines"), ("", "4 lines")):
        page.locator("#fp-run-page").get_by_label("Level").select_option(level)
        expect(count).to_have_text(text)


CREATE_LOG = """async (id) => {
  const { createLog } = await import('/footplate/run/log.js');
  const base = () => `api/runs/${id}`;
  const log = createLog({ base, hasEnded: () => false, isVisible: () => true, onTrouble: () => {} });
  log.node.id = 'growing';
  document.body.append(log.node);
  log.open();
}"""


def test_new_matching_lines_are_counted_and_not_read_out(shared, new_page):
    """The count is announced after the search was changed, not with every line of a running run."""
    page, run = new_page, make(shared)
    page.goto(f"{shared.url}/help/getting-started")
    page.evaluate(CREATE_LOG, run.id)
    count, status = page.locator("#growing .fp-log-count"), page.locator("#growing [role=status]")
    page.locator("#growing").get_by_text("Preparing data.").wait_for()
    page.locator("#growing input[type=search]").fill("Preparing")
    expect(status).to_have_text("1 line")
    with (run.path / LOG).open("a") as log:
        log.write("[default0]:16:00:03 Preparing data.\n")
    expect(count).to_have_text("2 lines")
    expect(status).to_have_text("1 line")
    expect(page.locator("#growing .fp-log-found [role=status]")).to_have_count(1)
    page.locator("#growing input[type=search]").fill("Preparing data")
    expect(status).to_have_text("2 lines")


def test_no_line_freezes_the_page(same_page):
    """A line of 128 KiB took up to 7 seconds, and a number with as many digits in the search 55."""
    seconds = same_page.page.evaluate(
        """async () => {
          const { createLibraryFilter } = await import("/footplate/run/log_library.js");
          const { parseSearch, SearchError } = await import("/footplate/runs/runs_search.js");
          const long = (text) => text.repeat(131072 / text.length);
          const begin = performance.now();
          const filter = createLibraryFilter();
          for (const line of ["Failed to load " + long("torchao"), "a" + long("site-packages/x.py")])
            filter(line, "", "");
          const columns = [{ key: "loss", names: [], kind: "number", label: "Loss" }];
          try {
            parseSearch("loss>" + long("1") + "x", columns);
          } catch (error) {
            if (!(error instanceof SearchError)) throw error;
          }
          return (performance.now() - begin) / 1000;
        }"""
    )
    assert seconds < 2
