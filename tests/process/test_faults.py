"""Random faults during training: no point is lost or counted twice, the state is right, and no process is left.

FOOTPLATE_FAULTS (default 60) is the number of faults, FOOTPLATE_FAULT_SEED the seed, FOOTPLATE_FAULT_REPORT a file for
the counts, FOOTPLATE_FAULT_KINDS the functions of the faults below to choose from. docs/reliability.md has the results.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from failing_writes import FailingWrites, failing_writes
from fork_server import ForkServer
from small import client
from small_disk import fill, mounted, use_inodes
from training_runs import REORDERING_TOLERANCE, environment, log_text, losses, make_spec, same_losses
from waiting import wait_for

from backend.launch.plan import plan
from backend.machine import Machine
from backend.runs import EVENTS, LOCK, LOG, METRICS, MONITOR, PROGRESS, RESULT, STATE, processes
from backend.runs.folder import Run, RunError
from backend.runs.listing import RunList

STRATEGIES = ("single", "ddp", "zero2", "zero3", "fsdp2")
STEPS, SAVED_EVERY = 40, 5
COUNT = int(os.environ.get("FOOTPLATE_FAULTS", "60"))
SEED = int(os.environ.get("FOOTPLATE_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
ONLY = os.environ.get("FOOTPLATE_FAULT_KINDS", "").split()
KILLED = {"lost", "done"}  # done: the fault came after the result


@dataclass
class Trial:
    """A run under faults."""

    run: Run
    strategy: str
    choice: random.Random
    disk: Path
    shim: FailingWrites

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.run.path / STATE).read_text()))

    def launcher(self) -> int:
        return int(self.state["launcher"])

    def ranks(self) -> list[int]:
        """The processes of the run other than supervisor and launcher; those without a launcher are the run itself."""
        launcher = self.launcher()
        others = [p.pid for p in processes.run_processes(self.run.path) if p.pid != launcher]
        return sorted(others) or [launcher]

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 240) -> None:
        wait_for(condition, seconds, lambda: f"waited for {what}:\n{log_text(self.run.path)[-3000:]}")

    def ended(self) -> None:
        self.wait_for(lambda: not processes.is_locked(self.run.path), "the end")

    def everyone(self) -> list[int]:
        return [int(self.state["pid"]), *(p.pid for p in processes.run_processes(self.run.path))]


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_rank(trial: Trial) -> set[str]:
    send([trial.choice.choice(trial.ranks())], signal.SIGKILL)
    trial.ended()
    return {"failed", "done"}


def kill_launcher(trial: Trial) -> set[str]:
    send([trial.launcher()], signal.SIGKILL)
    trial.ended()
    return {"failed"}


def kill_supervisor(trial: Trial) -> set[str]:
    """The ranks train on. They may end before the next start, or are ended by it."""
    send([int(trial.state["pid"])], signal.SIGKILL)
    time.sleep(trial.choice.random())
    return KILLED


def kill_all(trial: Trial) -> set[str]:
    send(trial.everyone(), signal.SIGKILL)
    trial.ended()
    return KILLED


def pause_all(trial: Trial) -> set[str]:
    """A suspended job: it continues where it was."""
    everyone = trial.everyone()
    send(everyone, signal.SIGSTOP)
    time.sleep(1)
    assert trial.run.state in {"running", "starting", "done"}
    send(everyone, signal.SIGCONT)
    return {"running", "done"}


def pause_rank(trial: Trial) -> set[str]:
    """For less than parallel.ddp_timeout."""
    rank = [trial.choice.choice(trial.ranks())]
    send(rank, signal.SIGSTOP)
    time.sleep(1)
    send(rank, signal.SIGCONT)
    return {"running", "done"}


def stop_and_save(trial: Trial) -> set[str]:
    with suppress(Exception):  # it ended meanwhile
        trial.run.stop()
    trial.ended()
    return {"stopped", "done"}


def clock_back(trial: Trial) -> set[str]:
    """All files of this start are older than its lock, as after the clock was set back. Stop must still save."""
    later, before = time.time() + 3600, trial.run.state
    os.utime(trial.run.path / LOCK, (later, later))
    if processes.is_locked(trial.run.path):
        assert trial.run.state in {before, "running", "done"}
    saved, training = trial.run.checkpoints(), trial.run.progress().get("phase") == "training"
    expected = stop_and_save(trial)
    assert "forced" not in trial.state or not training, "Stop discarded work"
    assert trial.run.state == "done" or trial.run.checkpoints() >= saved
    return expected


def garbage_files(trial: Trial) -> set[str]:
    """A power failure: a line of the metrics is cut off, and a replaced file has other content."""
    kill_all(trial)
    with (trial.run.path / METRICS).open("ab") as file:
        file.write(b'{"step": 7, "lo')
    if not (trial.run.path / RESULT).exists():
        (trial.run.path / PROGRESS).write_bytes(trial.choice.randbytes(50))
    return KILLED


def damaged_checkpoint(trial: Trial) -> set[str]:
    kill_all(trial)
    if len(saved := trial.run.checkpoints()) > 1:
        files = (trial.run.path / f"checkpoints/checkpoint-{saved[-1]}").rglob("*")
        path = trial.choice.choice([f for f in files if f.is_file() and f.name != "complete" and f.stat().st_size > 9])
        os.truncate(path, path.stat().st_size // 2)
    return KILLED


def kill_page(trial: Trial) -> set[str]:
    """The run does not notice."""
    argv = [sys.executable, "-m", "webui", "--port", "0", "--no-login", "--runs", str(trial.run.path.parent)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout
        assert "Footplate is at" in page.stdout.readline()
        page.kill()
    return {"running", "done"}


def settle(trial: Trial) -> set[str]:
    """The disk works again. Wait until training has logged two points, or the checkpoint that failed has ended it."""
    lines = len(read_bytes(trial).splitlines())
    ended = ("done", "failed", "stopped", "lost")
    trial.wait_for(lambda: len(read_bytes(trial).splitlines()) > lines + 1 or trial.run.state in ended, "more points")
    return {"running", "done", "failed" if trial.strategy != "single" else "running"}


def disk_errors(trial: Trial) -> set[str]:
    """EIO for everything that is written into checkpoints."""
    trial.shim.fail("/checkpoints/")
    time.sleep(trial.choice.random() * 5)
    trial.shim.work()
    return settle(trial)


def disk_full(trial: Trial) -> set[str]:
    filler = fill(trial.disk)
    time.sleep(trial.choice.random() * 5)
    filler.unlink()
    return settle(trial)


def no_inodes(trial: Trial) -> set[str]:
    files = use_inodes(trial.disk, leave=trial.choice.choice((0, 3)))
    time.sleep(trial.choice.random() * 5)
    shutil.rmtree(files)
    return settle(trial)


def folder_renamed(trial: Trial) -> set[str]:
    """For a while: the run must continue, and nothing may appear under the earlier name."""
    other = trial.run.path.with_name("renamed")
    trial.run.path.rename(other)
    time.sleep(1 + trial.choice.random() * 3)
    assert not trial.run.path.exists(), "the folder was made again"
    other.rename(trial.run.path)
    return settle(trial) | {"running", "done"}


def checkpoints_moved(trial: Trial) -> set[str]:
    """They are not there when the run is resumed, which must not start at step 0."""
    kill_all(trial)
    if not trial.run.checkpoints() or trial.run.state == "done":
        return KILLED
    away = trial.run.path.with_name("moved-checkpoints")
    (trial.run.path / "checkpoints").rename(away)
    points = read_bytes(trial)
    with suppress(RunError):
        trial.run.resume()
        trial.ended()
    assert read_bytes(trial) == points, "the run was resumed without its checkpoints"
    shutil.rmtree(trial.run.path / "checkpoints", ignore_errors=True)
    away.rename(trial.run.path / "checkpoints")
    return {"lost", "failed"}


def folder_unreadable(trial: Trial) -> set[str]:
    """Without permissions, for a client without root's rights: the run stays in the list, is not
    started, and continues if it is alive."""
    if trial.choice.random() < 0.5:
        kill_all(trial)
    alive, points = processes.is_locked(trial.run.path), read_bytes(trial)
    trial.run.path.chmod(0)
    try:
        listed = restricted("list", trial)
        assert listed.returncode == 0 and trial.run.id in listed.stdout and "damaged" in listed.stdout, listed
        assert restricted("resume", trial, trial.run.id).returncode != 0
    finally:
        trial.run.path.chmod(0o700)
    if alive:
        return settle(trial)
    assert read_bytes(trial) == points and not processes.is_locked(trial.run.path), "the run was started"
    return KILLED


def restricted(command: str, trial: Trial, *words: str) -> subprocess.CompletedProcess[str]:
    """A command without root's right to read everything."""
    argv = [sys.executable, "-m", "backend", command, *words, "--runs", str(trial.run.path.parent)]
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    return subprocess.run([*drop, *argv], capture_output=True, text=True, check=False)


def named_pipe(trial: Trial) -> set[str]:
    """In the place of a file: neither the list nor a request waits for it, and the run is shown as damaged."""
    kill_all(trial)
    state = trial.run.state
    names = [
        name for name in (PROGRESS, METRICS, MONITOR, EVENTS, LOG, STATE, LOCK) if (trial.run.path / name).exists()
    ]
    path = trial.run.path / trial.choice.choice(names)
    path.rename(path.with_name("aside"))
    os.mkfifo(path)
    try:
        assert [row["state"] for row in RunList(trial.run.path.parent).all()] == ["damaged"], path.name
        with client(trial.run.path.parent, detect_machine=lambda _: Machine()) as api:
            for part in ("", "/log", "/series", "/metrics", "/report.png"):
                assert api.get(f"/api/runs/{trial.run.id}{part}").status_code in (200, 204, 404, 409), (path.name, part)
    finally:
        path.unlink()
        path.with_name("aside").rename(path)
    assert trial.run.state == state
    return KILLED


def two_servers(trial: Trial) -> set[str]:
    """Two servers of one runs folder resume the run at the same time: it is started once, and both show the same."""
    kill_all(trial)
    if trial.run.state == "done":
        return KILLED
    root, path = trial.run.path.parent, f"/api/runs/{trial.run.id}/resume"
    with (
        client(root, detect_machine=lambda _: Machine()) as one,
        client(root, detect_machine=lambda _: Machine()) as two,
    ):
        for server in (one, two):  # a route's first request sets warning filters, which threads share
            assert server.post("/api/runs/unknown/resume", json={}).status_code == 404
        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(lambda server: server.post(path, json={}), (one, two)))
        assert sorted(answer.status_code for answer in answers) == [200, 409], [answer.text for answer in answers]
        for server in (one, two):
            row = server.get("/api/runs").json()["runs"][0]
            assert row["id"] == trial.run.id and row["state"] in ("starting", "running", "done"), row
    return {"starting", "running", "done"}


def two_clients(trial: Trial) -> set[str]:
    """Both resume the run at the same time: it is started once."""
    kill_all(trial)
    if trial.run.state == "done":
        return KILLED
    words = [sys.executable, "-m", "backend", "resume", trial.run.id, "--runs", str(trial.run.path.parent)]
    clients = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(client.wait(240) != 0 for client in clients) == [False, True], "one is refused"
    return {"starting", "running", "done"}


FAULTS = (
    kill_rank, kill_launcher, kill_supervisor, kill_all, pause_all, pause_rank, stop_and_save, clock_back,
    garbage_files, damaged_checkpoint, kill_page, disk_errors, disk_full, no_inodes, folder_renamed, checkpoints_moved,
    folder_unreadable, named_pipe, two_servers, two_clients,
)  # fmt: skip


def check_points(trial: Trial, reference: dict[int, float]) -> None:
    """Each attempt's points follow each other, and all that count have the losses of an undisturbed run."""
    step = 0
    for line in (trial.run.path / METRICS).read_text().splitlines():
        try:
            point = json.loads(line)
        except ValueError:
            continue  # the line that was cut off
        if point.get("event") == "resumed":
            assert point["step"] <= step, "points are missing"
            step = point["step"]
        elif "loss" in point:
            assert point["step"] == step + 1, "a point is missing or counted twice"
            step = point["step"]
    found = readable_losses(trial)
    assert found == same_losses({k: reference[k] for k in found}, REORDERING_TOLERANCE)


def readable_losses(trial: Trial) -> dict[int, float]:
    lines = (trial.run.path / METRICS).read_text().splitlines()
    kept = []
    for line in lines:
        with suppress(ValueError):
            kept.append(json.loads(line))
    found: dict[int, float] = {}
    for point in kept:
        if point.get("event") == "resumed":
            found = {step: loss for step, loss in found.items() if step <= point["step"]}
        elif "loss" in point:
            found[point["step"]] = point["loss"]
    return found


@contextmanager
def new_trial(root: Path, cache: Path, strategy: str, number: int, choice: random.Random) -> Iterator[Trial]:
    changes = {"train.max_steps": STEPS, "save.strategy": "steps", "save.steps": SAVED_EVERY, "save.total_limit": 3}
    changes |= {"parallel.strategy": strategy, "parallel.ddp_timeout": 60}
    changes |= {} if strategy == "single" else {"launch.nproc_per_node": 2}
    plan_ = plan(make_spec(changes), Machine(cores=2, python=sys.executable))
    place = root / f"trial-{number}"
    with (
        mounted(place, "size=300m,nr_inodes=2000") as disk,
        pytest.MonkeyPatch.context() as patch,
        failing_writes(root, patch) as shim,
    ):
        run = Run.create(disk / "runs", f"{strategy} {number}", plan_, datetime.now())
        for name, value in environment(run.path, cache).items():
            patch.setenv(name, value)
        patch.delenv("FOOTPLATE_RUN")
        try:
            yield Trial(run, strategy, choice, disk, shim)
        finally:
            with suppress(OSError, ValueError, KeyError):
                send([int(json.loads((run.path / STATE).read_text())["pid"])], signal.SIGKILL)
            processes.terminate(run.path, sigterm_seconds=0)
        assert not processes.run_processes(run.path)


def inject(trial: Trial, fault: Callable[[Trial], set[str]]) -> None:
    """At a random moment: before training starts, or some steps after the last point."""
    target = trial.choice.randrange(-1, 9)
    last = max(readable_losses(trial), default=0) if (trial.run.path / METRICS).exists() else 0
    lines = len(read_bytes(trial).splitlines())
    trial.wait_for(lambda: "launcher" in trial.state, "the launcher")
    if target < 0 and fault in (kill_rank, kill_launcher, kill_supervisor, kill_all, kill_page):
        time.sleep(trial.choice.random() * 6)
    else:
        wanted = min(target + 1, STEPS - last)
        trial.wait_for(lambda: len(read_bytes(trial).splitlines()) >= lines + wanted or trial.run.state == "done", "it")
    if trial.run.state == "done":
        return
    expected = fault(trial)
    state = trial.run.state
    early = min(target + 1, STEPS - last) < 2  # the first line after a resume is written before the first step
    if early and state == "failed" and fault is no_inodes:  # torchrun cannot create its files
        assert "The disk is full" in trial.run.summary()["sentence"]
        return
    assert state in expected | ({"starting"} if early else set()), (fault.__name__, state)


def read_bytes(trial: Trial) -> bytes:
    return (trial.run.path / METRICS).read_bytes() if (trial.run.path / METRICS).exists() else b""


@pytest.mark.soak
def test_random_faults(fork_server: ForkServer, root: Path, cache: Path) -> None:
    print(f"FOOTPLATE_FAULT_SEED={SEED}")
    choice, counts, references = random.Random(SEED), Counter[tuple[str, str]](), {}
    kinds = [fault for fault in FAULTS if not ONLY or fault.__name__ in ONLY]
    order = [fault for _ in range(COUNT // len(kinds) + 1) for fault in choice.sample(kinds, len(kinds))][:COUNT]
    number = 0
    while order:
        strategy = STRATEGIES[number % len(STRATEGIES)]
        number += 1
        if strategy not in references:
            references[strategy] = reference(fork_server, root, strategy)
        with new_trial(root, cache, strategy, number, choice) as trial:
            for fault in [order.pop() for _ in range(min(4, len(order)))]:
                if trial.run.state == "done":
                    order.append(fault)
                    continue
                if trial.run.state not in ("running", "starting"):
                    trial.run.start() if trial.run.state == "new" else trial.run.resume()
                inject(trial, fault)
                counts[fault.__name__, strategy] += 1
                report(counts)
                if (trial.run.path / METRICS).exists():
                    check_points(trial, references[strategy])
            finish(trial, references[strategy])


def finish(trial: Trial, expected: dict[int, float]) -> None:
    """Resume without a further fault: every step is there exactly once, and no process is left."""
    if trial.run.state in ("lost", "failed", "stopped"):
        trial.run.resume()
    trial.ended()
    assert trial.run.state == "done", log_text(trial.run.path)[-3000:]
    check_points(trial, expected)
    assert sorted(readable_losses(trial)) == list(range(1, STEPS + 1))
    # After a killed supervisor, the run is done when its result is there, and its launcher ends a moment later.
    trial.wait_for(lambda: not processes.run_processes(trial.run.path), "the end of all processes", 30)


def reference(fork_server: ForkServer, root: Path, strategy: str) -> dict[int, float]:
    spec = make_spec({"parallel.strategy": strategy, "train.max_steps": STEPS, "launch.nproc_per_node": 2})
    return losses(fork_server.train(root / f"alone-{strategy}", spec, 0 if strategy == "single" else 2))


def report(counts: Counter[tuple[str, str]]) -> None:
    if path := os.environ.get("FOOTPLATE_FAULT_REPORT"):
        rows = [f"{fault} {strategy} {count}" for (fault, strategy), count in sorted(counts.items())]
        Path(path).write_text(f"seed {SEED}\n" + "\n".join(rows) + "\n")
