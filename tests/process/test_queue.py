"""The queue, with real supervisors. `make_run` asserts after each test that no process is left."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from privileges import needs_root
from waiting import wait_for

from backend.runs import LOG, PLAN, STATE, processes, queue, webhook
from backend.runs.folder import Run, RunError

MakeRun = Callable[..., Run]
MARK = "import json, os, time\nopen('progress.json', 'w').write(json.dumps({'phase': 'training', 'step': 1}))\n"
WAITS = MARK + "while not os.path.exists('go'): time.sleep(0.02)\n"
FAILS = WAITS + "raise SystemExit(7)\n"
SECONDS = 30.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A queue of its own."""
    monkeypatch.setenv(queue.FOLDER, str(tmp_path / "queue"))
    monkeypatch.delenv(queue.CPU_SLOTS)  # one run at a time
    return tmp_path / "queue"


@pytest.fixture
def make(make_run: MakeRun) -> MakeRun:
    """Makes runs that need devices."""

    def made(name: str, code: str = WAITS, devices: tuple[str, ...] = ("cpu",)) -> Run:
        run = make_run(code, name=name)
        plan = json.loads((run.path / PLAN).read_text())
        labels = {device: "the CPU" if device == "cpu" else f"GPU {device[-1]}" for device in devices}
        (run.path / PLAN).write_text(json.dumps({**plan, "devices": labels}))
        return run

    return made


def wait_for_state(run: Run, state: str) -> None:
    wait_for(lambda: run.state == state)


def finish(run: Run) -> None:
    """Let the program of the run end."""
    (run.path / "go").touch()


def order() -> list[str]:
    return [entry.id.split("_")[-1] for entry in queue.entries()]


def waiting(run: Run) -> str:
    return str(run.summary()["sentence"])


def test_runs_on_one_device_take_turns(make: MakeRun) -> None:
    first, second, third = (make(name) for name in ("first", "second", "third"))
    for run in (first, second, third):
        run.start()
    wait_for_state(first, "running")
    assert (second.state, third.state) == ("queued", "queued")
    assert waiting(second) == f"Waiting in the queue. {first.id} uses the CPU."
    wait_for(lambda: waiting(third) == f"Waiting in the queue. {second.id} is ahead of this run.")
    assert second.summary()["started"] is None
    assert order() == ["second", "third"]
    finish(first)
    wait_for_state(second, "running")
    assert third.state == "queued"
    assert second.summary()["started"] >= first.summary()["ended"], "the time in the queue is not part of the run"
    finish(second)
    wait_for_state(third, "running")
    finish(third)
    wait_for_state(third, "done")
    assert order() == []


def test_runs_on_other_devices_do_not_wait(make: MakeRun) -> None:
    both, second, third = make("both", devices=("x-0", "x-1")), make("second", devices=("x-1",)), make("c", devices=())
    other = make("other", devices=("x-2",))
    for run in (both, second, third, other):
        run.start()
    for run in (both, third, other):
        wait_for_state(run, "running")
    assert waiting(second) == f"Waiting in the queue. {both.id} uses GPU 1."
    for run in (both, second, third, other):
        finish(run)
    wait_for_state(second, "done")


def test_a_large_run_is_not_overtaken(make: MakeRun) -> None:
    """A run of two devices waits for one of them; a later run must not take the other one again and again."""
    small, large, later = (
        make("small", devices=("x-0",)),
        make("l", devices=("x-0", "x-1")),
        make("z", devices=("x-1",)),
    )
    for run in (small, large, later):  # in this order
        run.start()
    assert (large.state, later.state) == ("queued", "queued")
    queue.change(large.path, held=True)  # a run on hold lets others pass
    wait_for_state(later, "running")
    for run in (small, later):
        finish(run)
        wait_for_state(run, "done")
    assert waiting(large) == "Waiting in the queue. This run is on hold."
    queue.change(large.path, held=False)
    wait_for_state(large, "running")
    finish(large)
    wait_for_state(large, "done")


def test_the_order_can_be_changed(make: MakeRun) -> None:
    runs = [make(name) for name in ("a", "b", "c", "d")]
    for run in runs:
        run.start()
    a, b, c, d = runs
    assert order() == ["b", "c", "d"]
    queue.move(d.path, before=b.path)
    assert order() == ["d", "b", "c"]
    queue.move(d.path)
    assert order() == ["b", "c", "d"]
    queue.move(c.path, before=b.path)
    with pytest.raises(RunError, match="is not waiting in the queue"):
        queue.move(a.path)
    with pytest.raises(RunError, match="is not waiting in the queue"):
        queue.move(b.path, before=a.path)
    with pytest.raises(RunError, match="cannot be moved before itself"):
        queue.move(b.path, before=b.path)
    assert order() == ["c", "b", "d"]
    finish(a)
    wait_for_state(c, "running")
    d.stop()
    wait_for_state(d, "stopped")
    assert waiting(d) == "Not started. It was removed from the queue."
    assert d.can()["resume"]
    a.start(from_scratch=True)
    a.stop()
    wait_for_state(a, "done")  # as before
    for run in (c, b):
        wait_for_state(run, "running")
        finish(run)
        wait_for_state(run, "done")


@pytest.mark.parametrize(
    ("code", "after_ok", "state", "sentence"),
    [
        (WAITS, True, "done", ""),
        (FAILS, True, "stopped", r"Not started. .* only after \S+_first succeeded, but that run failed."),
        pytest.param(FAILS, False, "done", "", marks=pytest.mark.soak),
    ],
)
def test_a_run_after_another_one(
    make: MakeRun, monkeypatch: pytest.MonkeyPatch, code: str, after_ok: bool, state: str, sentence: str
) -> None:
    first, second = make("first", code, ("x-0",)), make("second", MARK, ("x-1",))
    first.start()
    monkeypatch.setenv(webhook.WEBHOOK, "nowhere")
    second.start(after=first, after_ok=after_ok)
    assert waiting(second) == f"Waiting in the queue. {first.id} must {'succeed' if after_ok else 'end'} first."
    finish(first)
    wait_for_state(second, state)
    assert re.match(sentence, waiting(second))
    wait_for(
        lambda: (second.path / LOG).exists() and "the notification was not sent" in (second.path / LOG).read_text()
    )


@pytest.mark.soak
def test_a_run_that_waits_for_another_one_blocks_nobody(make: MakeRun) -> None:
    first, dependent, other = make("first", devices=("x-0",)), make("dependent"), make("other")
    first.start()
    dependent.start(after=first)
    other.start()
    wait_for_state(other, "running")
    finish(first)
    wait_for(lambda: waiting(dependent) == f"Waiting in the queue. {other.id} uses the CPU.")
    finish(other)
    wait_for_state(dependent, "running")
    finish(dependent)
    wait_for_state(dependent, "done")


def test_killed_processes_free_their_place_and_devices(make: MakeRun) -> None:
    first, second, third = (make(name) for name in ("first", "second", "third"))
    for run in (first, second, third):
        run.start()
    supervisors = {run.id: supervisor_of(run) for run in (first, second)}
    os.kill(supervisors[second.id], signal.SIGKILL)  # the next one moves up
    wait_for_state(second, "lost")
    assert waiting(second).startswith("Lost: it was waiting in the queue when the run's supervisor process was killed")
    assert order() == ["third"]
    second.resume()
    assert order() == ["third", "second"]

    os.kill(supervisors[first.id], signal.SIGKILL)
    wait_for_state(first, "lost")
    time.sleep(3 * 0.5)
    assert third.state == "queued", "the launcher of the lost run still uses the device"
    first.clean_up()
    wait_for_state(third, "running")
    finish(third)
    wait_for_state(second, "running")
    finish(second)
    wait_for_state(second, "done")


def supervisor_of(run: Run) -> int:
    """The process that holds the run's lock and is not its launcher."""
    wait_for(lambda: "started" in json.loads((run.path / STATE).read_text()) or run.state == "queued")
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"backend.runs.supervisor\0{run.path}\0" in _text(path)
    ]
    assert len(found) == 1
    return found[0]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_cpu_slots(make: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(queue.CPU_SLOTS, "2")
    runs = [make(name) for name in ("a", "b", "c")]
    for run in runs:
        run.start()
    wait_for(lambda: [run.state for run in runs] == ["running", "running", "queued"])
    finish(runs[1])
    wait_for_state(runs[2], "running")
    for run in runs:
        finish(run)
        wait_for_state(run, "done")


def test_a_gpu_that_another_program_uses(make: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is replaced by a script that lists a process as long as a file exists."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/nvidia-smi"
    process = "[ $1 = --id=GPU-1 ] && echo 'GPU-1, 4711, /usr/bin/python3'"
    script.write_text(f"#!/bin/sh\ntest -e {tmp_path}/busy && {process}\nexit 0\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "busy").touch()
    first, second, free = make("a", devices=("GPU-1",)), make("b", devices=("GPU-1",)), make("c", devices=("GPU-2",))
    for run in (first, second, free):
        run.start()
    wait_for_state(free, "running")
    assert waiting(first) == "Waiting in the queue. python3 (PID 4711) uses GPU 1."
    queue.change(first.path, shares=True)
    wait_for_state(first, "running")
    finish(first)
    wait_for(lambda: waiting(second) == "Waiting in the queue. python3 (PID 4711) uses GPU 1.")
    (tmp_path / "busy").unlink()
    wait_for_state(second, "running")
    for run in (second, free):
        finish(run)
        wait_for_state(run, "done")


def test_leases_are_touched_so_that_cleaners_of_tmp_keep_them(make: MakeRun, folder: Path) -> None:
    run, lease = make("first"), folder / queue.DEVICES / "cpu"
    lease.parent.mkdir(parents=True)
    lease.touch()
    os.utime(lease, (0, 0))
    run.start()
    wait_for(lambda: lease.stat().st_mtime > 0)
    held = os.open(lease, os.O_RDONLY)
    os.utime(lease, (0, 0))
    queue.touch([held])
    assert lease.stat().st_mtime > 0
    os.close(held)
    finish(run)
    wait_for_state(run, "done")


@pytest.mark.parametrize("name", ["replace_text", "os.pwrite", "_open"])
def test_a_full_disk_leaves_no_lease_behind(make: MakeRun, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Otherwise a run would wait for itself: the order, the holder of the second lease or its file is not written."""
    run = make("full", devices=("GPU-1", "GPU-2"))
    entry = queue.Entry(str(run.path), {"GPU-1": "GPU 1", "GPU-2": "GPU 2"})
    lock = processes.acquire_lock(run.path)
    assert lock is not None
    owner, _, attribute = name.rpartition(".")
    module = os if owner else queue
    works, calls = getattr(module, attribute), []

    def full(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == (1 if name == "replace_text" else 2):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return works(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, attribute, full)
        with pytest.raises(OSError, match="No space"):
            queue.join(entry)
    turn = queue.join(entry)
    assert turn.reason == "" and turn.leases is not None and len(turn.leases) == 2
    for descriptor in (lock, *turn.leases):
        os.close(descriptor)


@pytest.mark.soak
def test_a_damaged_order_loses_no_run(make: MakeRun, folder: Path) -> None:
    first, second = make("first"), make("second")
    first.start()
    second.start()
    (folder / queue.ORDER).write_text("{")
    finish(first)
    wait_for_state(second, "running")
    finish(second)
    wait_for_state(second, "done")


def test_the_folder_of_another_user_is_refused(make: MakeRun, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="belongs to another user; set FOOTPLATE_QUEUE"):
        make("first").start()


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The queue of a user without FOOTPLATE_QUEUE, in this process; the leases of all users are in a new folder."""
    monkeypatch.delenv(queue.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(queue, "SHARED_LEASES", tmp_path / "devices")
    return tmp_path / "devices"


def entry_of(make: MakeRun) -> tuple[queue.Entry, int]:
    """An entry of a run that is alive, and its lock."""
    run = make("one")
    lock = processes.acquire_lock(run.path)
    assert lock is not None
    return queue.Entry(str(run.path), {"cpu": "the CPU"}), lock


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "closed", "instead"])
def test_leases_that_another_user_prepared(make: MakeRun, shared: Path, tmp_path: Path, kind: str) -> None:
    """Before, a run waited for a pipe, and a folder of another user kept all runs from starting."""
    if kind == "instead":
        shared.touch()
    else:
        shared.mkdir(mode=0o755)
    if kind == "pipe":
        os.mkfifo(shared / "cpu")
    elif kind == "link":
        (shared / "cpu").symlink_to(tmp_path / "target")
    elif kind == "folder":
        (shared / "cpu").mkdir()
    elif kind == "closed":
        if os.geteuid() == 0:
            (shared / "cpu").mkdir()  # root may open every file
        else:
            shared.chmod(0)
    entry, lock = entry_of(make)
    turn = queue.join(entry)
    assert turn.leases is not None and len(turn.leases) == 1
    assert turn.reason.startswith("This run does not wait for runs of other users on the CPU: ")
    assert not (tmp_path / "target").exists()
    for descriptor in (lock, *turn.leases):
        os.close(descriptor)


@needs_root
def test_a_lease_that_another_user_holds(make: MakeRun, shared: Path, tmp_path: Path) -> None:
    """It is waited for, its holder is named, and what is written in it is not shown."""
    shared.mkdir(mode=0o1777)
    (shared / "cpu").write_text("\x1b]0;title\x07\x1b[2J")
    held = os.open(shared / "cpu", os.O_RDONLY)
    code = "import fcntl, sys; fcntl.flock(int(sys.argv[1]), 2); print(flush=True); input()"
    os.chown(shared / "cpu", 65534, 65534)
    holder = subprocess.Popen(
        ["/usr/bin/python3", "-c", code, str(held)], pass_fds=[held], user=65534, group=65534, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    os.close(held)
    entry, lock = entry_of(make)
    turn = queue.join(entry)
    assert turn.leases is None and "\x1b" not in turn.reason
    assert turn.reason.startswith(f"The process {holder.pid} of the user nobody (UID 65534) (to start without")
    assert turn.reason.endswith(" uses the CPU.")
    holder.communicate("\n", timeout=20)
    turn = queue.turn(entry)
    assert turn.leases is not None and len(turn.leases) == 2 and turn.reason == ""
    for descriptor in (lock, *turn.leases):
        os.close(descriptor)


def test_a_run_of_another_runs_folder_is_named_with_its_folder(make: MakeRun, tmp_path: Path) -> None:
    """Its id alone would name a run that is not in the list of this page."""
    entry, lock = entry_of(make)
    started = queue.join(entry)
    assert started.leases is not None
    neighbor = replace(entry, run=str(Path(entry.run).with_name("two")))
    assert queue.join(neighbor).reason == f"{entry.id} uses the CPU."
    elsewhere = replace(entry, run=str(tmp_path / "others" / "two"))
    assert queue.join(elsewhere).reason == f"{entry.id} in the runs folder {Path(entry.run).parent} uses the CPU."
    for descriptor in (lock, *started.leases):
        os.close(descriptor)


def test_the_order_is_in_a_folder_of_the_user(shared: Path, tmp_path: Path) -> None:
    own = queue.folder()
    assert own.is_relative_to(tmp_path / "cache/footplate") and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(PermissionError, match="can be changed by all users"):
        queue.folder()


def test_many_processes_change_the_order_at_once(make: MakeRun) -> None:
    """Every supervisor joins, and nobody's entry is lost."""
    first, others = make("first"), [make(f"n{number}") for number in range(4)]
    first.start()
    for run in others:
        run.start()
    assert sorted(order()) == sorted(run.id.split("_")[-1] for run in others)
    entry = queue.entries()[0]
    assert replace(entry, held=True).held and not entry.held
    for run in others:
        run.stop()
    for run in others:
        wait_for_state(run, "stopped")
    finish(first)
    wait_for_state(first, "done")
    assert not processes.run_processes(first.path)


GARBAGE = [
    {"run": 5},
    {"run": "/nowhere", "devices": [1]},
    {"run": "/nowhere", "devices": {"cpu": 3}},
    {"run": ""},
    7,
    "x",
]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(GARBAGE),
        pytest.param('{"run": "/x"}', marks=pytest.mark.soak),
        "[" * 5000,
        pytest.param('[{"run": "a\\u0000b"}]', marks=pytest.mark.soak),
    ],
)
def test_a_queue_file_with_other_content_starts_runs(make: MakeRun, folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / queue.ORDER).write_text(content)
    assert queue.entries() == []
    run = make("one")
    run.start()
    wait_for_state(run, "running")
    (run.path / "go").touch()
    wait_for_state(run, "done")


def test_a_suspended_process_that_holds_the_mutex_is_named(
    make: MakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it for ever."""
    monkeypatch.setattr(queue, "MUTEX_SECONDS", 0.2)
    run = make("one")
    folder.mkdir()
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)"
    argv = [sys.executable, "-c", f"{code}; time.sleep(600)", str(folder / queue.MUTEX)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout and holder.stdout.readline()
            holder.send_signal(signal.SIGSTOP)
            wait_for(lambda: processes.condition(holder.pid) == "T")
            with pytest.raises(
                RunError, match=rf"PID {holder.pid}\. It is stopped by a signal; kill -CONT {holder.pid}"
            ):
                queue.move(run.path)
        finally:
            holder.kill()


def test_a_waiting_run_that_is_renamed_keeps_its_place(make: MakeRun) -> None:
    first, second, third = (make(name) for name in ("first", "second", "third"))
    for run in (first, second, third):
        run.start()
    wait_for(lambda: all(entry.pid for entry in queue.entries()))
    renamed = Run(second.path.rename(second.path.with_name("renamed")))
    wait_for(lambda: order() == ["renamed", "third"])
    assert renamed.state == "queued"
    finish(first)
    wait_for_state(renamed, "running")
    assert third.state == "queued"
    finish(renamed)
    wait_for_state(third, "running")
    finish(third)
    for run in (renamed, third):
        wait_for_state(run, "done")
    assert not second.path.exists()
