"""The one detached process of a run: starts the launcher, waits for it, stops it, and leaves nobody behind.

Floor 0. Standard library only; imports backend.runs. `python -m backend.runs.supervisor FOLDER [--from-scratch]` returns
as soon as the run's lock is held (exit 0), or says why not (exit 1, or 75 where the run is going already); what stays
belongs to no terminal and to no page. It alone writes state.json.

Stopping is a ladder: the stop file -> grace, in which the trainer ends its step on all ranks, saves and leaves ->
SIGTERM to the launcher -> longer than torchrun's own 30 s -> SIGKILL. However a run ends, a sweep follows.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from backend.runs import (
    ERROR,
    ERROR_FILE,
    LOCK,
    LOG,
    PLAN,
    PROGRESS,
    RESULT,
    RUN_MARKER,
    SEPARATOR,
    STATE,
    STOP,
    SUPERVISOR,
    processes,
    replace_text,
    start_env,
)

TICK = 0.1  # seconds between looks
BUSY = 75  # exit code: another keeper holds the run (EX_TEMPFAIL)
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, see prctl(2)
NOTHING_TO_SAVE = ("", "preparing model", "preparing data", "loading model", "preparing engine", "generating before")


@dataclass(frozen=True)
class Patience:
    """Seconds on each rung of the ladder; `early` is the first one's before there is anything to save."""

    save: float = 600.0
    discard: float = 15.0
    term: float = 45.0
    early: float = 2.0

    def text(self) -> str:
        """As an argument."""
        return ",".join(map(str, astuple(self)))


class Supervisor:
    """Made by the process that holds the lock."""

    def __init__(self, folder: Path, from_scratch: bool, patience: Patience) -> None:
        self.folder, self.patience = folder, patience
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        self.argv = [*plan["argv"], *(["--from-scratch"] if from_scratch else [])]
        inherited = {**os.environ, ERROR_FILE: str(folder / ERROR)}
        self.env = {**start_env(inherited, plan.get("defaults", {}), plan["env"]), RUN_MARKER: str(folder)}
        self.state: dict[str, Any] = {"started": time.time(), "from_scratch": from_scratch}
        self.unsaved = self.told_to_end = False
        self.oom_kills = _oom_kills()

    def announce(self) -> None:
        """Clear away an earlier start and write down this one. Raises OSError where the disk does not take it."""
        processes.sweep(self.folder)
        (self.folder / STOP).unlink(missing_ok=True)
        with (self.folder / LOG).open("ab") as log:
            gap = "\n" if log.tell() else ""
            log.write(f"{gap}{SEPARATOR}{time.strftime('%F %T')} ----\n".encode())
        replace_text(self.folder / STATE, json.dumps(self.state))

    def run(self) -> None:
        """From the launcher's start to the last process's end."""
        self.state |= {"pid": os.getpid()}
        try:
            with (self.folder / LOG).open("ab") as log:
                launcher = subprocess.Popen(
                    self.argv, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self.state |= {"exit_code": None, "cause": f"{self.argv[0]} cannot be started: {error.strerror}."}
        else:
            self.state |= {"launcher": launcher.pid}
            self._write()
            self.state |= {"exit_code": self._wait(launcher)}
        self._end()

    def _wait(self, launcher: subprocess.Popen[bytes]) -> int:
        asked = signalled = 0.0
        while (code := _reap(launcher)) is None:
            time.sleep(TICK)
            if self.unsaved:
                self._write()
            wish, now = self._wish(), time.monotonic()
            if not wish:
                continue
            asked = asked or now
            if not signalled and now - asked >= self._grace(wish):
                signalled = now
                self.state |= {"forced": "SIGTERM"}
                _signal(os.kill, launcher.pid, signal.SIGTERM)
            elif signalled and now - signalled >= self.patience.term:
                self.state |= {"forced": "SIGKILL"}
                _signal(os.killpg, launcher.pid, signal.SIGKILL)
        return code

    def _wish(self) -> str:
        """What the stop file says; empty without one. SIGTERM (the machine goes down) asks to save."""
        stop = self.folder / STOP
        if self.told_to_end and not stop.exists():
            with contextlib.suppress(OSError):
                replace_text(stop, "save")
            return "save"
        try:
            return "discard" if "discard" in stop.read_text(encoding="utf-8", errors="replace") else "save"
        except OSError:
            return ""

    def _grace(self, wish: str) -> float:
        if _phase(self.folder) in NOTHING_TO_SAVE:
            return self.patience.early
        return self.patience.discard if wish == "discard" else self.patience.save

    def _end(self) -> None:
        """Sweep, whatever the end was (a launcher that is killed leaves its ranks holding devices), and say how."""
        code = self.state["exit_code"]
        finished = code == 0 and (_fresh(self.folder, RESULT) or not self._wish())  # a stop may come too late
        self.state |= {
            "left": processes.sweep(self.folder, tree=os.getpid()),
            "oom_kills": _oom_kills() - self.oom_kills,
            "end": "done" if finished else "stopped" if self._wish() else "failed",
            "ended": time.time(),
        }
        self._write()
        if self.unsaved:  # a full disk takes no new file, but the old one can be written over
            with contextlib.suppress(OSError), (self.folder / STATE).open("r+", encoding="utf-8") as file:
                file.write(json.dumps(self.state))
                file.truncate()

    def _write(self) -> None:
        """A disk that is full must not end a training: it is tried again."""
        try:
            replace_text(self.folder / STATE, json.dumps(self.state))
            self.unsaved = False
        except OSError:
            self.unsaved = True


def _reap(launcher: subprocess.Popen[bytes]) -> int | None:
    """The launcher's exit code (negative: the signal that ended it). Collects adopted orphans on the way."""
    while launcher.returncode is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        if pid == launcher.pid:
            launcher.returncode = os.waitstatus_to_exitcode(status)
    return launcher.returncode


def _phase(folder: Path) -> str:
    """What the trainer of this start is doing; empty before it has said so."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if _fresh(folder, PROGRESS):
            return str(json.loads((folder / PROGRESS).read_text(encoding="utf-8")).get("phase", ""))
    return ""


def _fresh(folder: Path, name: str) -> bool:
    """Whether the file was written since this start."""
    with contextlib.suppress(OSError):
        return (folder / name).stat().st_mtime_ns >= (folder / LOCK).stat().st_mtime_ns
    return False


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # gone by itself
        send(target, number)


def _oom_kills() -> int:
    """How many processes this machine's kernel has ended for want of memory since its start."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _detach(folder: Path) -> None:
    """Leave terminal and starter; what goes wrong in here is written to the run's log."""
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):  # Linux: orphans of the run become children of this process
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(folder / LOG, os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)


def main(arguments: Sequence[str]) -> int:
    """Take the lock, announce the run, and stay behind. Returns in the starter's child; the other half never does."""
    parser = argparse.ArgumentParser(prog="supervisor")
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--patience", type=lambda text: Patience(*map(float, text.split(","))), default=Patience())
    given = parser.parse_args(arguments)
    try:
        lock = processes.take(given.folder)
        if lock is None:
            sys.stderr.write("This run is going already.")
            return BUSY
        os.ftruncate(lock, 0)
        os.write(lock, f"{SUPERVISOR}\n".encode())
        supervisor = Supervisor(given.folder, given.from_scratch, given.patience)
        supervisor.announce()
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"The run's folder cannot be used: {error}.")
        return 1
    # Handlers, not SIG_IGN: what is ignored stays ignored in every child.
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: setattr(supervisor, "told_to_end", True))
    if os.fork():
        return 0
    _detach(given.folder)
    supervisor.run()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
