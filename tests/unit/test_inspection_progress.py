"""Progress of the inspection of examples: the client with a fake worker, what the command line shows, the texts."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from backend.cli.status_line import StatusLine
from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import DataIssue, inspect_inputs, worker
from backend.inspect import examples as inspection
from backend.inspect.examples import FORMAT, ExampleReports
from backend.machine import Machine
from backend.preflight import Report, preflight
from backend.rules import check
from backend.train.tokenize_examples import inspect

# Counts to "total" in steps of ten, one per "pause" seconds. Like the real worker, it ends a request when another one
# comes.
FAKE_WORKER = """
import json, os, queue, sys, threading, time
lines = queue.SimpleQueue()
threading.Thread(target=lambda: [lines.put(line) for line in sys.stdin] and os._exit(0), daemon=True).start()
send = lambda value: print(json.dumps(value), flush=True)
send({"ready": os.getpid()})
while True:
    request = json.loads(lines.get())
    print(request["name"], file=sys.stderr, flush=True)
    for done in range(10, request["total"], 10):
        time.sleep(request["pause"])
        if not lines.empty():
            send({"id": request["id"], "error": "another request came"})
            break
        send({"id": request["id"], "progress": {"done": done}})
        if request.get("hangs_at") == done:
            time.sleep(60)
    else:
        send({"id": request["id"], "result": {"format": FORMAT, "name": request["name"]}})
"""
MakeReports = Callable[..., ExampleReports]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeReports]:
    made: list[ExampleReports] = []

    def reports(**more: Any) -> ExampleReports:
        command = (sys.executable, "-c", FAKE_WORKER.replace("FORMAT", str(FORMAT)))
        made.append(ExampleReports(tmp_path, command=command, **more))
        return made[-1]

    yield reports
    pids = [one.pid for one in made]
    for one in made:
        one.close()
    assert not [pid for pid in pids if pid and Path(f"/proc/{pid}").exists()]


def request(name: str, total: int = 100, pause: float = 0.05, **more: Any) -> dict[str, Any]:
    return {"name": name, "total": total, "pause": pause, **more}


def result(name: str) -> dict[str, Any]:
    return {"format": FORMAT, "name": name}


def test_progress_is_shown_while_waiting(make: MakeReports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SHOW_SECONDS", 0.02)
    reports, shown = make(), []
    assert reports.wait_for("a", request("a"), 20, shown.append) == result("a")
    assert shown[0] == {} and len(shown) > 3
    counts = [progress["done"] for progress in shown if progress]
    assert counts == sorted(counts) and set(counts) <= set(range(10, 100, 10))
    assert reports.progress("a") == {}, "there is a result"
    shown.clear()
    assert reports.wait_for("a", request("a"), 20, shown.append) == result("a") and not shown


def test_time_limit_is_per_progress_report(make: MakeReports) -> None:
    reports = make(seconds=2)
    assert reports.wait_for("long", request("long", pause=0.3), 60, print) == result("long"), "2.7 s in total"
    hanging = reports.wait_for("hangs", request("hangs", hangs_at=20), 60, print)
    assert hanging == "tokenizing the examples made no progress for 2 seconds"


def test_abandoned_request_is_superseded(make: MakeReports, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of the form sends another request; no client waits for the old one, so it does not delay the new
    one. The same process continues."""
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 0.3)
    reports = make()
    assert reports.find("old", request("old", total=10**6)) is None
    wait_for(lambda: reports.progress("old"))
    pid = reports.pid
    assert reports.wait_for("new", request("new"), 10, print) == result("new")
    assert reports.pid == pid
    assert reports.find("old", request("old"), start=False) is None and not reports.progress("old")


def test_request_that_somebody_waits_for_is_not_superseded(make: MakeReports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 0.5)
    reports, found = make(), []
    first = threading.Thread(target=lambda: found.append(reports.wait_for("a", request("a", 300), 20, print)))
    first.start()
    wait_for(lambda: reports.progress("a"))
    assert reports.wait_for("b", request("b"), 20, print) == result("b")
    first.join()
    assert found == [result("a")]


def test_the_only_request_is_completed_in_the_background(make: MakeReports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 0.1)
    reports = make()
    assert reports.find("a", request("a")) is None
    wait_for(lambda: reports.find("a", {}, start=False))
    assert reports.find("a", {}, start=False) == result("a")


def test_outdated_requests_are_dropped(make: MakeReports, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key stroke requests another spec; the worker takes the last one, and none of the others afterwards."""
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 0.5)
    reports = make()
    for name in ("1", "10", "102"):
        assert reports.find(name, request(name, total=10**6)) is None
        wait_for(lambda: reports.progress("1"))
    for _ in range(8):
        time.sleep(0.1)
        assert reports.find("1", request("1")) is None, "in progress, and asked for"
    assert reports.wait_for("1024", request("1024"), 10, print) == result("1024")
    time.sleep(0.3)
    assert not reports._pending and reports._worker.errors
    assert os.pread(reports._worker.errors.fileno(), 100, 0).split() == [b"1", b"1024"]


def test_close_ends_a_worker_that_is_starting(make: MakeReports) -> None:
    reports = make()
    reports.find("a", request("a", total=10**6))
    reports.close()
    assert reports.pid is None and not (reports._thread and reports._thread.is_alive())


# --- Facts, with the worker's function in this process ---

TALK = {"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At noon."}]}
INVALID = {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "x"}]}


class DirectReports:
    """Same as ExampleReports, but the worker's function runs in this process. With `until`, it has not ended yet."""

    def __init__(self, until: int = 0) -> None:
        self.until = until

    def find(self, key: str, request: dict[str, Any], start: bool = True) -> Any:
        return None if self.until else json.loads(json.dumps(inspect(**request["examples"])))

    def progress(self, key: str) -> Any:
        return PROGRESS


PROGRESS = {
    **inspect(json.loads(RunSpec().model_dump_json(include={"model", "data", "train"})), "", ""),
    "num_train": 1_240,
    "num_validation": 0,
    "complete": False,
}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """4,000 examples, of which data_files reads 50; the model is not downloaded."""
    monkeypatch.setattr("backend.inspect.data_files.MAX_SECONDS", 0.0)
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(worker.SETTING, "on")
    monkeypatch.setattr(inspection, "_reports", lambda folder: DirectReports())
    lines = [json.dumps(TALK)] * 4_000
    lines[10] = lines[2_999] = json.dumps(INVALID)
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    files = {"data.source": "files", "data.files": (str(tmp_path / "a.jsonl"),), "data.validation": "none"}
    return edit(RunSpec(), files)


def test_invalid_examples_behind_the_first_are_found_once(spec: RunSpec, tmp_path: Path) -> None:
    facts = inspect_inputs(spec, tmp_path)
    assert [issue.location.partition(", ")[2] for issue in facts.data_issues] == ["line 11", "line 3000"]
    assert (facts.num_checked, facts.all_checked, facts.num_examples) == (4_000, True, 4_000)
    assert facts.counts_are_exact and facts.num_usable is None, "without a tokenizer"
    assert "DAT003" in {finding.code for finding in check(spec, Machine(), facts)}


def test_lines_that_are_not_json_behind_the_first_are_found(spec: RunSpec, tmp_path: Path) -> None:
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    lines[10], lines[2_999] = "{", "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    facts = inspect_inputs(spec, tmp_path)
    assert [issue.location.partition(", ")[2] for issue in facts.data_issues] == ["line 11", "line 3000"]
    assert (facts.num_checked, facts.all_checked, facts.num_invalid) == (4_000, True, 2)
    assert report(spec, tmp_path).checked == "all 4,000 examples read"


@pytest.mark.parametrize(("drops", "count"), [(True, 1), (False, 3)])
def test_copies_that_are_dropped_have_no_margins_or_weights(
    spec: RunSpec, tmp_path: Path, drops: bool, count: int
) -> None:
    """Findings say which part of the checked examples has them, and dropped copies are not checked."""
    pair = {"prompt": "?", "chosen": "a", "rejected": "b", "margin": 1.0}
    turns = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", "weight": 0.5}]}
    for row, stage in ((pair, "reward"), (turns, "sft")):
        (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
        changed = edit(spec, {"train.stage": stage, "data.drop_duplicates": drops})
        sections = json.loads(changed.model_dump_json(include={"model", "data", "train"}))
        facts = inspection.facts_from(inspect(sections, str(tmp_path), ""), changed)
        found = facts["num_with_margin"], facts["num_with_weights"], facts["num_weighted"]
        assert (facts["num_checked"], *found) == (count, *((count, 0, 0) if row is pair else (0, count, count)))


def report(spec: RunSpec, base: Path) -> Report:
    return preflight(spec, Machine(), base)


def test_report_says_how_many_examples_were_checked(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(spec, tmp_path)
    assert (found.checked, found.unchecked_note) == ("all 4,000 examples read", "")
    skips = replace(found, facts=replace(found.facts, num_checked=8, num_skipped=3, num_skipped_texts=1))
    assert skips.checked == "all 10 examples read, 3 skipped", "8 of them reached the chat template"
    monkeypatch.setattr(inspection, "_reports", lambda folder: DirectReports(until=1_240))
    found = report(spec, tmp_path)
    assert found.checked == "first 1,240 of 4,000 examples read"
    assert found.unchecked_note == (
        "The first 1,240 of 4,000 examples were checked; a run checks the rest while it prepares its data."
    )
    tokenized = replace(found, facts=replace(found.facts, tokenizer_size=9))
    assert tokenized.checked == "first 1,240 of 4,000 examples checked"
    none = replace(found, facts=replace(found.facts, num_checked=0))
    assert none.checked == "no examples checked yet" and "not checked in time" in none.unchecked_note
    issue = (DataIssue("data.files", "a.jsonl", "is empty"),)  # an error shows what was found: nothing is awaited
    assert replace(none, facts=replace(none.facts, data_issues=issue)).checked == ""
    failed = replace(found, facts=replace(found.facts, examples_pending=False, examples_problem="it took too long"))
    assert failed.checked == "examples not checked: it took too long"
    assert failed.unchecked_note == "The examples were not checked: it took too long."
    more = replace(found, facts=replace(found.facts, num_examples=1_000))
    assert more.checked == "first 1,240 examples read", "the estimate was too low"


def test_short_files_without_a_tokenizer_need_no_worker(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_reports", lambda folder: pytest.fail("a worker is not needed"))
    (tmp_path / "a.jsonl").write_text(json.dumps(TALK) + "\n")
    assert report(spec, tmp_path).checked == "all 1 example read"


# --- The status line ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(text: str) -> list[str]:
    """What a terminal shows after each character of `text`: carriage returns go back to the first column."""
    line, column, seen = [" "] * 200, 0, []
    for character in text:
        if character == "\r":
            column = 0
        else:
            line[column] = character
            column += 1
        seen.append("".join(line).rstrip())
    return seen


def test_terminal_line_is_rewritten_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with StatusLine() as line:
        for text in ("Loading the tokenizer", "Checked 12,400 of 50,000 examples", "Checked 5 examples"):
            line.show(text)
            assert screen(terminal.getvalue())[-1] == f"{text}..."
        line.show("long " * 100)
        assert len(screen(terminal.getvalue())[-1]) < 80
    assert screen(terminal.getvalue())[-1] == "" and "\n" not in terminal.getvalue()


def test_interrupted_line_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(KeyboardInterrupt), StatusLine() as line:
        line.show("Loading the tokenizer")
        raise KeyboardInterrupt
    assert screen(terminal.getvalue())[-1] == ""


def test_without_a_terminal_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with StatusLine() as line:
        line.show("Loading the tokenizer")
        line.show("Tokenizing the examples")
    assert not log.getvalue()


def test_rendering_examples_shows_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Busy:
        def find(self, key: str, request: Any) -> None:
            return None

        def wait_for(self, key: str, request: Any, timeout: float, show: Callable[[Any], None]) -> str:
            show({})
            return "too slow"

    monkeypatch.setattr(inspection, "_shown", lambda folder: Busy())
    monkeypatch.setattr(inspection, "_inputs", lambda *arguments: {"folder": "model"})
    monkeypatch.setattr(inspection, "_body", lambda *arguments, **more: {})
    monkeypatch.setattr(inspection, "may_start", lambda environment: True)
    shown: list[str] = []
    found = inspection.show_examples(RunSpec(), tmp_path, {}, 0, 1, 1.0, shown.append)
    assert (found, shown) == ("The example cannot be shown: too slow.", ["Rendering the examples"])
