"""The search in the list of runs; tests/browser/test_runs_page.py checks the same cases in the page."""

import json
from pathlib import Path

import pytest

from backend.runs import search

CASES = json.loads(Path(__file__).with_name("search_cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES["cases"], ids=[case["search"] for case in CASES["cases"]])
def test_search(case):
    if "error" in case:
        with pytest.raises(search.SearchError) as raised:
            search.parse(case["search"])
        assert case["error"] in str(raised.value)
        return
    wanted = search.parse(case["search"])
    assert [i for i, run in enumerate(CASES["runs"]) if wanted.matches(run, now=5000.0)] == case["ids"]


@pytest.mark.parametrize("case", CASES["sorted"], ids=[f"{c['by']} {c['descending']}" for c in CASES["sorted"]])
def test_sort(case):
    found = search.sort(CASES["runs"], case["by"], 5000.0, case["descending"])
    assert [CASES["runs"].index(run) for run in found] == case["ids"]


def test_the_duration_of_a_running_run_grows():
    run = {"id": "a", "state": "running", "started": 1000.0}
    assert search.value(run, "duration", 1090.0) == 90
    assert search.parse("duration>1").matches(run, 1090.0) and not search.parse("duration>1").matches(run, 1050.0)
    assert search.value({**run, "earlier_seconds": 10.0}, "duration", 1090.0) == 100, "of all starts"
    waiting = {**run, "state": "queued", "started": None, "created": 1050.0}
    assert search.value(waiting, "duration", 1090.0) is None and search.value(waiting, "started", 1090.0) is None
    assert search.sort([run, waiting], "started", 1090.0, descending=True) == [waiting, run]


def test_names_of_columns_are_unique():
    names = [name for column in search.COLUMNS for name in (column.key, *column.names)]
    assert len(names) == len(set(names)) and all(name == name.lower() for name in names)
