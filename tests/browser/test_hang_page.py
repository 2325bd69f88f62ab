"""A run without progress in the browser: which rank is stopped, and the stacks of the other."""

import os
import re
import signal
import sys
import time
from datetime import datetime

import pytest
from playwright.sync_api import expect
from same_page import show_run

from backend.runs import SPEC, STACKS, Plan, processes
from backend.runs.folder import Run

LAUNCHER = """
import json, os, subprocess, sys, time
progress = {"phase": "training", "step": 7, "max_steps": 50, "time": time.time() - 180}
open("progress.json", "w").write(json.dumps(progress))
ranks = [subprocess.Popen([sys.executable, "rank.py", str(rank)]) for rank in range(2)]
[rank.wait() for rank in ranks]
"""
RANK = """
import sys, time
from pathlib import Path
from backend.train.stacks import Stacks

def read_slow_disk():
    time.sleep(120)

Stacks(Path("."), int(sys.argv[1])).write_on_request()
read_slow_disk()
"""


@pytest.mark.soak
def test_the_page_says_what_each_rank_is_doing(shared, same_page):
    page = same_page.page
    packages = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    files = {SPEC: "", "child.py": LAUNCHER, "rank.py": RANK}
    run = Run.create(shared.runs, "hung", Plan((sys.executable, "child.py"), packages, files), datetime.now())
    run.start()
    try:
        headers = [run.path / STACKS / f"{rank}.txt" for rank in range(2)]
        deadline = time.monotonic() + 60
        while not all(header.exists() for header in headers) and time.monotonic() < deadline:
            time.sleep(0.05)
        stopped = int(re.match(r"PID (\d+)", headers[1].read_text())[1])
        os.kill(stopped, signal.SIGSTOP)
        show_run(page, run)
        expect(page.locator(".fp-run-sentence")).to_contain_text("no step for 3 min")
        page.get_by_role("button", name="Show what each rank is doing").click()
        answer = page.locator(".fp-stacks-answer")
        expect(answer).to_contain_text(f"Rank 1: stopped by a signal; kill -CONT {stopped} continues it.")
        expect(answer).to_contain_text("Rank 0: in read_slow_disk (")
        answer.get_by_text("Stacks").click()
        expect(answer.locator("pre")).to_contain_text("rank.py")
    finally:
        run.stop(save=False)
        deadline = time.monotonic() + 30
        while processes.run_processes(run.path) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not processes.run_processes(run.path)
