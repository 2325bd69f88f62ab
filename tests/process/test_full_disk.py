"""Runs in a folder whose file system is full or read-only: they wait until they can save, and lose no point.

The file system is a small tmpfs, which only root may mount; elsewhere these tests are skipped.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from failing_writes import failing_writes
from fork_server import ForkServer
from small_disk import fill
from training_runs import REORDERING_TOLERANCE, environment, log_text, losses, make_spec, read_metrics, same_losses

from backend.launch.plan import plan
from backend.machine import Machine
from backend.paths import HOME
from backend.runs import METRICS, PROGRESS, STOP, processes, sweeps
from backend.runs.folder import Run
from backend.train import disk_space, heartbeat
from backend.train.run_log import RunLog, Stopped, TrainError

STEPS = 12
CHANGES = {"train.max_steps": STEPS, "save.strategy": "steps", "save.steps": 2, "save.total_limit": 2}
CHANGES |= {"save.final_model": True}
ROOM_NEEDED = "MB are needed): waiting until there is room"
DDP = {"parallel.strategy": "ddp", "launch.nproc_per_node": 2}


READ_ONLY = """
import errno, io, os
from pathlib import Path
opened, marker = io.open, Path({marker!r})

def checked(file, mode="r", *more, **options):
    if set(mode) & set("wax+") and marker.exists() and not isinstance(file, int):
        if os.path.realpath(file).startswith({folder!r}):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
    return opened(file, mode, *more, **options)

io.open = checked
"""


@contextmanager
def read_only(folder: Path, marker: Path) -> Iterator[None]:
    """`folder` can only be read; files that are open already are still written. A mount does not affect processes that
    work in the folder, and a file system with open files cannot be made read-only: READ_ONLY does so in the ranks."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    marker.touch()
    yield
    marker.unlink()
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def started(disk: Path, cache: Path, changes: Mapping[str, object], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    plan_ = plan(make_spec({**CHANGES, **changes}), Machine(cores=2, python=sys.executable))
    run = Run.create(disk / "runs", "try", plan_, datetime.now())
    for name, value in environment(run.path, cache).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FOOTPLATE_RUN")
    try:
        run.start()
        yield run
    finally:
        processes.terminate(run.path, sigterm_seconds=0)
        wait_for(lambda: not processes.is_locked(run.path), run)


def wait_for(condition: Callable[[], object], run: Run, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{run.summary()['sentence']}\n{log_text(run.path)[-3000:]}"
        time.sleep(0.02)


def complete_points(run: Run, reference: Mapping[int, float]) -> None:
    """Every step is in the metrics exactly once, with the loss of an undisturbed run."""
    points = [point["step"] for point in read_metrics(run.path) if "loss" in point]
    assert points == list(range(1, STEPS + 1))
    assert losses(run.path) == same_losses(reference, REORDERING_TOLERANCE)


def sentence(run: Run) -> str:
    return str(run.summary()["sentence"])


def finish(run: Run) -> None:
    wait_for(lambda: not processes.is_locked(run.path), run)
    assert run.state == "done", log_text(run.path)[-3000:]
    assert all((folder / "complete").is_file() for folder in (run.path / "checkpoints").iterdir())
    assert (run.path / "model/adapter_model.safetensors").is_file()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("changes", "leave", "said"),
    [
        ({"launch.launcher": "python"}, 0, "the disk of the run's folder is full. The next checkpoint waits"),
        ({}, 0, "the disk of the run's folder is full. The next checkpoint waits"),
        *(({**DDP, "parallel.strategy": name}, 200_000, ROOM_NEEDED) for name in ("ddp", "zero3", "fsdp2")),
    ],
)
def test_a_run_waits_until_there_is_room(
    small_disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer, root: Path,
    changes: Mapping[str, object], leave: int, said: str,
) -> None:  # fmt: skip
    """Even after writing a checkpoint has failed; that checkpoint is deleted."""
    ranks = int(str(changes.get("launch.nproc_per_node", 0)))
    reference = losses(
        fork_server.train(
            root / "-".join(map(str, ["whole", *changes.values()])), make_spec({**CHANGES, **changes}), ranks
        )
    )
    with started(small_disk, cache, changes, monkeypatch) as run:
        wait_for(run.checkpoints, run)
        filler = fill(small_disk, leave)
        wait_for(lambda: said in sentence(run), run)
        time.sleep(3)  # it tries again
        assert run.state == "running"
        saved = run.checkpoints()
        assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == [f"checkpoint-{n}" for n in saved]
        filler.unlink()
        finish(run)
        text = log_text(run.path)
        assert text.count("cannot be saved (") <= 1
        assert [text.count(f"step {step:>2}/{STEPS} ") for step in range(1, STEPS + 1)] == [1] * STEPS
        complete_points(run, reference)


@pytest.mark.soak
@pytest.mark.parametrize(("changes", "leave", "said"), [({}, 0, "is full"), (DDP, 200_000, ROOM_NEEDED)])
def test_a_run_that_waits_for_room_is_stopped_and_resumed(
    small_disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer, root: Path,
    changes: Mapping[str, object], leave: int, said: str,
) -> None:  # fmt: skip
    reference = losses(
        fork_server.train(root / f"alone-{leave}", make_spec({**CHANGES, **changes}), 2 if changes else 0)
    )
    with started(small_disk, cache, changes, monkeypatch) as run:
        wait_for(run.checkpoints, run)
        filler = fill(small_disk, leave)
        wait_for(lambda: said in sentence(run), run)
        time.sleep(2)
        run.stop(save=False)
        wait_for(lambda: not processes.is_locked(run.path), run)
        assert run.state == "stopped" and run.checkpoints()
        filler.unlink()
        run.resume()
        finish(run)
        assert losses(run.path) == same_losses(reference, REORDERING_TOLERANCE)


@pytest.mark.soak
def test_several_ranks_without_room_for_the_first_checkpoint_fail_and_resume(
    small_disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the first checkpoint is unknown, and several ranks cannot try again together."""
    with started(small_disk, cache, {**DDP, "save.steps": 4}, monkeypatch) as run:
        wait_for(lambda: losses(run.path), run)
        filler = fill(small_disk, 500_000)
        wait_for(lambda: not processes.is_locked(run.path), run)
        assert run.state == "failed"
        assert "The disk is full" in sentence(run)
        assert not list((run.path / "checkpoints").iterdir())
        filler.unlink()
        run.resume()
        finish(run)
        assert sorted(losses(run.path)) == list(range(1, STEPS + 1))


@pytest.mark.soak
def test_a_run_in_a_read_only_folder_waits(
    small_disk: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer, root: Path
) -> None:
    reference = losses(fork_server.train(root / "writable", make_spec(CHANGES)))
    marker, shim = root / "read-only", root / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text(READ_ONLY.format(marker=str(marker), folder=str(small_disk / "runs")))
    with started(small_disk, cache, {"launch.env": f"PYTHONPATH={shim}:{HOME}"}, monkeypatch) as run:
        wait_for(run.checkpoints, run)
        with read_only(run.path, marker):
            wait_for(lambda: "the disk of the run's folder is read-only" in sentence(run), run)
            wait_for(lambda: "cannot be saved (Read-only file system)" in log_text(run.path), run)
            time.sleep(2)
            assert run.state == "running"
        finish(run)
        complete_points(run, reference)


@pytest.mark.soak
def test_an_error_of_the_disk_is_named_and_tried_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer, root: Path
) -> None:
    """Not taken for a full disk, although PyTorch's own error names no cause."""
    reference = losses(fork_server.train(root / "without-errors", make_spec(CHANGES)))
    with failing_writes(tmp_path, monkeypatch) as shim, started(tmp_path, cache, {}, monkeypatch) as run:
        wait_for(run.checkpoints, run)
        shim.fail("/checkpoint-")
        wait_for(lambda: "cannot be saved (Input/output error): trying again" in log_text(run.path), run)
        assert "MB are needed" not in log_text(run.path) and "room" not in sentence(run)
        assert run.state == "running"
        shim.work()
        finish(run)
        complete_points(run, reference)


@pytest.mark.soak
def test_an_error_of_the_disk_ends_several_ranks_with_its_cause(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_writes(tmp_path, monkeypatch) as shim, started(tmp_path, cache, DDP, monkeypatch) as run:
        wait_for(run.checkpoints, run)
        shim.fail("/checkpoint-")
        wait_for(lambda: not processes.is_locked(run.path), run)
        assert run.state == "failed"
        assert "could not be saved and was deleted: Input/output error. The disk or the network" in sentence(run)
        shim.work()
        run.resume()
        finish(run)
        assert sorted(losses(run.path)) == list(range(1, STEPS + 1))


def test_heartbeats_need_no_room_and_follow_a_renamed_folder(small_disk: Path) -> None:
    """torch's FileStore would wait forever after a record that the disk cut off."""
    folder = small_disk / "store"
    folder.mkdir()
    one, two = heartbeat.Files(folder), heartbeat.Files(folder)
    assert two.multi_get(["heartbeat/0", "heartbeat/1"]) == [b"", b""] and not two.check(["heartbeat/0"])
    one.set("heartbeat/0", "0 12 host")
    fill(small_disk)
    for count in range(2000):
        one.set("heartbeat/0", f"{count} 12 host")
        assert two.multi_get(["heartbeat/0"]) == [f"{count} 12 host".encode()]
    folder = folder.rename(small_disk / "renamed")
    one.set("heartbeat/0", heartbeat.LEFT)
    assert two.multi_get(["heartbeat/0"]) == [b"left"] and two.check(["heartbeat/0"])


def test_metrics_wait_for_room(small_disk: Path) -> None:
    """No line is lost, cut off or written twice, and a part of a line does not stay."""
    run_log = RunLog(small_disk)
    filler = fill(small_disk, 5000)
    for step in range(1000):
        run_log.metrics({"step": step})
        run_log.progress(f"phase {step}")
    written = (small_disk / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == list(range(len(written)))
    assert 0 < len(written) < 1000
    with pytest.raises(OSError, match="No space"):
        run_log.flush()
    filler.unlink()
    run_log.metrics({"step": 1000})
    run_log.progress("training")
    assert [point["step"] for point in read_metrics(small_disk)] == list(range(1001))
    assert json.loads((small_disk / PROGRESS).read_text())["phase"] == "training"
    assert sorted(path.name for path in small_disk.iterdir()) == [METRICS, PROGRESS]


def test_a_stop_that_a_sweep_cannot_request_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr(sweeps, "stop_if_behind", full)
    RunLog(tmp_path).compare_with_sweep(3)


def test_writing_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Only for errors of the disk; a stop without saving ends the wait."""
    monkeypatch.setattr(disk_space, "POLL_SECONDS", 0)
    monkeypatch.setattr(disk_space, "RETRY_SECONDS", 0)
    run_log = RunLog(tmp_path)
    outcomes: list[Exception | None] = [
        OSError(errno.ENOSPC, "x"), RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0"),
        OSError(errno.EROFS, "x"), None,
    ]  # fmt: skip

    def write() -> None:
        if error := outcomes.pop(0):
            raise error

    disk_space.retry(run_log, "checkpoint-2", write)
    assert not outcomes
    said = capsys.readouterr().out
    assert said.count("checkpoint-2 cannot be saved (No space left on device)") == 1
    assert said.count("checkpoint-2 cannot be saved (PyTorch says: unexpected pos 1 vs 0)") == 1
    outcomes[:] = [PermissionError(errno.EACCES, "x")]
    with pytest.raises(PermissionError):
        disk_space.retry(run_log, "checkpoint-2", write)
    outcomes[:] = [OSError(errno.EIO, "x"), RuntimeError("I/O error: Input/output error (os error 5)"), None]
    disk_space.retry(run_log, "The model", write)
    said = capsys.readouterr().out
    assert said.count("The model cannot be saved (Input/output error): trying again for 5 minutes") == 1
    assert "room" not in said and "MB" not in said
    monkeypatch.setattr(disk_space, "IO_SECONDS", -1)
    outcomes[:] = [OSError(errno.EIO, "x")]
    with pytest.raises(TrainError, match=r"could not be saved: Input/output error\. The disk or the network"):
        disk_space.retry(run_log, "The model", write)
    (tmp_path / STOP).write_text("discard")
    outcomes[:] = [OSError(errno.ENOSPC, "x")]
    with pytest.raises(Stopped):
        disk_space.retry(run_log, "checkpoint-2", write)
    monkeypatch.setattr(disk_space, "RETRY_SECONDS", 1)
    with pytest.raises(TrainError, match="checkpoint-2 cannot be saved: the run's folder was deleted"):
        disk_space.retry(RunLog(tmp_path / "deleted"), "checkpoint-2", write)
