"""A run folder that an earlier version wrote: it is shown, resumed, started by its script, and deleted."""

from __future__ import annotations

import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from fork_server import ForkServer
from small import client
from training_runs import environment, log_text, losses

from backend.machine import Machine
from backend.paths import HOME
from backend.runs import processes
from backend.runs.folder import Run, runs

# A run of 60 steps on CPU that was stopped at step 16, with its checkpoint. The paths of Python, the installation and
# the runs folder are replaced by names in @.
ARCHIVE = Path(__file__).with_name("earlier_run.tar.xz")
STEPS, STOPPED = 60, 16


@pytest.fixture
def earlier(fork_server: ForkServer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The run in a runs folder, with the times of its files."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    names = {"@PYTHON@": fork_server.python, "@HOME@": HOME, "@RUNS@": tmp_path}
    for path in (path for path in tmp_path.rglob("*") if path.suffix in (".txt", ".sh", ".json")):
        text, changed = path.read_text(), path.stat()
        for name, value in names.items():
            text = text.replace(name, str(value))
        path.write_text(text)
        os.utime(path, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    (run,) = runs(tmp_path)
    for name, value in environment(run.path, cache).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FOOTPLATE_RUN")
    return run


def check_finished(run: Run) -> None:
    """Every step is there once, the model is saved, and no process is left."""
    deadline = time.monotonic() + 240
    while processes.is_locked(run.path) or processes.run_processes(run.path):
        assert time.monotonic() < deadline, log_text(run.path)[-3000:]
        time.sleep(0.05)
    assert run.state == "done", log_text(run.path)[-3000:]
    assert sorted(losses(run.path)) == list(range(1, STEPS + 1))
    assert f"Resuming from checkpoint-{STOPPED}." in log_text(run.path)
    assert (run.path / "model/adapter_model.safetensors").exists()


def test_it_is_shown_and_resumed_and_deleted(earlier: Run) -> None:
    with client(earlier.path.parent, detect_machine=lambda _: Machine()) as api:
        (row,) = api.get("/api/runs").json()["runs"]
        assert (row["state"], row["step"], row["name"]) == ("stopped", STOPPED, "first run")
        assert "Resume continues from checkpoint 16" in row["sentence"]
        for part in ("", "/log", "/series", "/metrics", "/report.png", "/spec"):
            assert api.get(f"/api/runs/{earlier.id}{part}").status_code in (200, 404), part
        assert len(api.get(f"/api/runs/{earlier.id}/metrics").json()["points"]) >= STOPPED
        assert api.post(f"/api/runs/{earlier.id}/resume", json={}).status_code == 200
    check_finished(earlier)
    earlier.delete()
    assert not earlier.path.exists()


@pytest.mark.soak
def test_its_script_resumes_it(earlier: Run) -> None:
    assert subprocess.run(["bash", str(earlier.path / "run.sh")], check=False).returncode == 0
    check_finished(earlier)
