"""The processes of a run in one pod of a Kubernetes job: the pod's first process.

Kubernetes replaces pods one by one, but a training starts and fails as a whole: so the pods agree on attempts through
files in the run's folder, which all of them share. The first pod that knows that an attempt has ended creates a file,
and the others then end theirs. The replaced pods meet in the next attempt, on another port.

SIGTERM, from an eviction or a drained node, becomes a stop request: all ranks save a checkpoint and end, and all pods
come back. On a shared file system, lines that several machines append can overwrite each other, so only the first node
appends to the log, and copies what the others have written into files of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from backend.runs import (
    ERROR,
    ERROR_FILE,
    KUBERNETES_NODES,
    LOG,
    RUN_MARKER,
    SPEC,
    STOP,
    files,
    processes,
    replace_text,
)
from backend.runs.follower import withdraw_interruption
from backend.runs.kubernetes import ATTEMPTS, INTERRUPTED, JOB, is_interrupted
from backend.runs.log_writer import Log

POLL_SECONDS = 0.5
NAME_SECONDS = 600  # until the host name of the first node is known, after its image was pulled
LOG_SECONDS = 20  # for the last lines of the other nodes
COMES_BACK = 75  # EX_TEMPFAIL: the exit status of a pod that Kubernetes replaces
COMPLETED, EVICTED, BROKEN = "completed", "interrupted", "failed"


class Node:
    """This pod of the run in the current folder."""

    def __init__(self, job: str, rank: int) -> None:
        self.rank = rank
        self.folder = Path(KUBERNETES_NODES, job).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.marker = self.folder / f"node-{rank}"
        self.evicted = False
        self.log = Log(files.open_regular(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
        self.copied: dict[Path, int] = {}  # bytes of the other nodes' output that are in the log
        signal.signal(signal.SIGTERM, self._request_stop)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        """Ask all ranks to save and end, unless a user has already asked: then the pod must not come back."""
        if not Path(STOP).exists():
            # At once with its text: a request without it would be that of a user, which cancels a job that waits. If
            # the disk is full, the run goes on until the pod is killed.
            request = self.folder / f"stop-{self.rank}"  # pods that end at the same time may have the same PID
            with contextlib.suppress(OSError):
                replace_text(request, f"save\n{INTERRUPTED}\n")
                request.replace(STOP)

    # -- attempts ------------------------------------------------------------------------------------------------------

    def next_attempt(self) -> int:
        """The attempt that this pod takes part in, from 0."""
        ended = [int(file.name.rpartition("-")[2]) for file in self.folder.glob("ended-*")]
        attempt = max([-1, *ended]) + 1
        if self.marker.exists():  # written by an earlier pod of this node
            before = int(files.read_text(self.marker))
            if before >= attempt:  # that pod was killed before it recorded the end
                self.end_attempt(before, BROKEN)
            attempt = max(attempt, before + 1)
        replace_text(self.marker, str(attempt))
        return attempt

    def end_attempt(self, attempt: int, how: str) -> str:
        """Record for all pods how the attempt ended. Returns the first record, which may be from another pod."""
        file = self.folder / f"ended-{attempt}"
        try:
            with file.open("x", encoding="utf-8") as new:
                new.write(how)
        except FileExistsError:
            return files.read_text(file) or how
        return how

    def has_ended(self, attempt: int) -> str:
        """How the attempt ended, as recorded by the first pod that saw its end; '' before."""
        try:
            return files.read_text(self.folder / f"ended-{attempt}")
        except OSError:
            return ""

    def failures(self) -> int:
        """How many attempts have failed."""
        return sum(files.read_text(file) == BROKEN for file in self.folder.glob("ended-*"))

    # -- processes -----------------------------------------------------------------------------------------------------

    def run(self, command: Sequence[str], arguments: Sequence[str]) -> int:
        """Run the launcher once; the exit status of the pod."""
        attempt = self.next_attempt()
        if self.rank == 0 and is_interrupted(Path()):
            withdraw_interruption(Path(), INTERRUPTED)
        env = {**os.environ, ERROR_FILE: str(Path(ERROR).resolve()), RUN_MARKER: str(self.marker)}
        env["PET_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"  # not SIGTERM, after which the ranks could not save
        env["PET_MASTER_PORT"] = str(int(env["PET_MASTER_PORT"]) + attempt % 100)  # no stale store of another attempt
        if not _wait_for_name(env["PET_MASTER_ADDR"]):
            _say(f"The host name {env['PET_MASTER_ADDR']} of the first node is not known.")
            return self._exit_status(self.end_attempt(attempt, BROKEN))
        launcher = subprocess.Popen(
            [*command, *(arguments if attempt == 0 else ())],
            env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert launcher.stdout
        reader = threading.Thread(target=self._write_output, args=(launcher.stdout, attempt), daemon=True)
        reader.start()
        how = self._wait(launcher, attempt)
        reader.join(LOG_SECONDS)
        if self.rank == 0:
            self._copy_last_output(attempt)
        else:
            self._output_file(attempt).with_suffix(".end").touch()
        return self._exit_status(how)

    def _wait(self, launcher: subprocess.Popen[bytes], attempt: int) -> str:
        """Wait for the launcher, or end it if another pod has failed."""
        while (status := launcher.poll()) is None:
            self.evicted = self.evicted or is_interrupted(Path())
            if self.has_ended(attempt) == BROKEN or (Path(STOP).exists() and self._has_no_ranks(launcher.pid)):
                launcher.kill()
            if self.rank == 0:
                self._copy_output(attempt)
            time.sleep(POLL_SECONDS)
        self.evicted = self.evicted or is_interrupted(Path())
        processes.terminate(self.marker, sigterm_seconds=0)
        if status == -signal.SIGKILL and Path(STOP).exists() and not self.has_ended(attempt):
            status = 0  # nothing to save
        if status == 0 and not self.evicted:
            return COMPLETED
        return self.end_attempt(attempt, EVICTED if status == 0 else BROKEN)

    def _has_no_ranks(self, launcher: int) -> bool:
        """Whether the launcher still waits for the other nodes, so that nobody reads the stop request."""
        return all(process.pid == launcher for process in processes.run_processes(self.marker))

    def _exit_status(self, how: str) -> int:
        if how == COMPLETED:
            return 0
        if how == BROKEN and self.failures() > int(os.environ[ATTEMPTS]):
            return 1
        _say("The pods of the run are replaced for the next attempt.")
        return COMES_BACK

    # -- output --------------------------------------------------------------------------------------------------------

    def _output_file(self, attempt: int, rank: int | None = None) -> Path:
        return self.folder / f"output-{self.rank if rank is None else rank}-{attempt}"

    def _write_output(self, output: IO[bytes], attempt: int) -> None:
        """Copy the launcher's output to kubectl logs, and to the run's log or this node's file."""
        with files.open_to_append(self._output_file(attempt)) if self.rank else contextlib.nullcontext() as file:
            log = Log(file.fileno()) if file else self.log
            for line in output:
                log.add(line)
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            log.flush()

    def _copy_output(self, attempt: int) -> None:
        """Append the full lines that the other nodes have written since the last time to the log."""
        for file in sorted(self.folder.glob(f"output-*-{attempt}")):
            at = self.copied.get(file, 0)
            with files.open_to_read(file) as source:
                source.seek(at)
                new = source.read()
            new = new[: new.rfind(b"\n") + 1]
            self.log.add(new)
            self.copied[file] = at + len(new)

    def _copy_last_output(self, attempt: int) -> None:
        """Append what the other nodes write while they end."""
        until = time.monotonic() + LOG_SECONDS
        others = [self._output_file(attempt, rank) for rank in range(1, int(os.environ["PET_NNODES"]))]
        while any(file.exists() and not file.with_suffix(".end").exists() for file in others):
            if time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
        self._copy_output(attempt)


def _say(text: str) -> None:
    """Print a line for kubectl logs only, since the run's log is about the training."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _wait_for_name(host: str) -> bool:
    """Whether the host name of the first node becomes known in time: once its pod was scheduled."""
    until = time.monotonic() + NAME_SECONDS
    while time.monotonic() < until:
        try:
            socket.getaddrinfo(host, None)
            return True
        except OSError:
            time.sleep(2)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Arguments: those of the first attempt, --, the command of the launcher."""
    parser = argparse.ArgumentParser(prog="python -m backend.runs.kubernetes_node", description=__doc__)
    parser.add_argument("--folder", default=".", help="the run's folder; default: the current one")
    parser.add_argument("--from-scratch", action="store_true", help="start at step 0 in the first attempt")
    parser.add_argument("command", nargs="+", help="the launcher and its arguments, after --")
    given = parser.parse_args(arguments)
    if not Path(given.folder, SPEC).is_file() or not os.access(given.folder, os.W_OK):
        where = Path(given.folder).resolve()
        _say(
            f"The pod lacks read or write access to the run's folder {where}. This folder must belong to the "
            "pod's user and be in one of kubernetes.volumes, with the same path as on the machine that started the run."
        )
        return 1
    os.chdir(given.folder)
    node = Node(os.environ[JOB], int(os.environ["PET_NODE_RANK"]))
    return node.run(given.command, ["--from-scratch"] if given.from_scratch else [])


if __name__ == "__main__":
    sys.exit(main())
