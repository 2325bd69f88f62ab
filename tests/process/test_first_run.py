"""The preset "First run", as a newcomer starts it from the shell: real model and demo examples, from start to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backend.runs import processes
from backend.runs.folder import runs


@pytest.mark.soak
def test_first_run_teaches_the_model_its_task(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "backend", "run", "first-run", "--runs", str(tmp_path), "--follow"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.returncode == 0, ended.stdout
    (run,) = runs(tmp_path)
    result = json.loads((run.path / "result.json").read_text())
    assert result["exact_match_before"] <= 0.1
    assert result["exact_match_after"] >= 0.5
    assert len(result["samples"]) == 24
    assert not processes.run_processes(run.path)
