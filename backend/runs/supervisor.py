"""The supervisor of a run: a detached process that waits in the queue, starts the launcher, and stops it.

`python -m backend.runs.supervisor FOLDER [--from-scratch]` returns as soon as it holds the run's lock (exit code 0), or
prints why it does not (1, or 75 if the run is running already); the process that remains has no terminal. It alone
writes state.json.

Stopping escalates: stop file, on which the trainer ends its step on all ranks, saves and exits -> SIGTERM to the
launcher -> after more than torchrun's own 30 s, SIGKILL. After any end, leftover processes of the run are terminated.
SIGTERM to the supervisor, as at shutdown, requests a stop, except for a job in a cluster, which does not need this
machine: the job continues, even with an unfinished stop.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    SERVE_TOKEN,
    STACKS,
    STATE,
    STOP,
    STOP_SPARE,
    SUPERVISOR,
    clusters,
    deletion,
    events,
    files,
    follower,
    json_values,
    oom,
    processes,
    queue,
    replace_text,
    request_stop,
    start_env,
    stop_requests,
    webhook,
)
from backend.runs.folder import RunError, StopTimeouts
from backend.runs.freshness import file_versions, is_fresh
from backend.runs.output import Output
from backend.runs.queue import Entry, Turn

POLL_SECONDS = 0.1
QUEUE_SECONDS, IN_USE_SECONDS = 0.5, 3.0  # between two checks of the queue; the second if a program uses a GPU
TOUCH_SECONDS = 3600.0  # programs that clean /tmp delete files that were not written for days
FOLLOW_UP_SECONDS = 900.0  # checking all examples of a large dataset takes minutes
WRITER_SECONDS = 10.0  # for the last lines of the log
HERE = Path()  # the run's folder, as the working directory
BUSY = 75  # exit code: another process holds the run's lock (EX_TEMPFAIL)
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, see prctl(2)
# Phases of backend.train without a training step to finish, and with nothing to save.
PHASES_BEFORE_TRAINING = (
    "", "building kernels", "preparing model", "preparing data", "loading model", "preparing engine",
    "generating before",
)  # fmt: skip


class Supervisor:
    """One start of a run, in the process that holds the lock."""

    def __init__(
        self, folder: Path, from_scratch: bool, timeouts: StopTimeouts, lock: int, after: str = "",
        after_ok: bool = True, start: str = "",
    ) -> None:  # fmt: skip
        self.folder, self.timeouts = folder, timeouts
        plan = json.loads(files.read_text(folder / PLAN))
        self.argv = [*plan["argv"], *(["--from-scratch"] if from_scratch else [])]
        self.then, self.partial = plan.get("then", []), plan.get("partial", [])
        secret = (webhook.WEBHOOK, SERVE_TOKEN)
        inherited = {name: value for name, value in os.environ.items() if name not in secret}
        inherited = {**inherited, ERROR_FILE: f"./{ERROR}"}
        self.place = str(folder.resolve())  # at the start; files are reached through the working directory
        self.env = {**start_env(inherited, plan.get("defaults", {}), plan["env"]), RUN_MARKER: self.place}
        self.entry = Entry(self.place, plan.get("devices", {}), after=after, after_ok=after_ok)
        self.turn = Turn(())
        self.state: dict[str, Any] = {"from_scratch": from_scratch}
        self.state_before: Any = None  # the state of an earlier start
        self.state_unwritten = self.sigterm_received = False
        self.oom_kills = oom.kills()
        self.locks = [lock]
        self.start = start
        self.output = Output(folder)

    def announce(self) -> None:
        """Clean up after an earlier start; record this one, or that it waits. Raises OSError, as for a full disk."""
        processes.terminate(self.folder)
        shutil.rmtree(self.folder / STACKS, ignore_errors=True)
        (self.folder / STOP_SPARE).touch()
        with contextlib.suppress(OSError, ValueError):
            self.state_before = json_values.read(self.folder / STATE)
        if self.entry.devices or self.entry.after:
            self.turn = queue.join(self.entry)
        if self.turn.leases is None:
            self.state |= {"queued": time.time()}
            self._record_wait()
        else:
            self._record_start()

    def _record_start(self) -> None:
        """Begin a new part of the log and of the state. The files that are there belong to an earlier start."""
        if "queued" in self.state:
            os.utime(self.folder / LOCK)
        self.state |= {"started": time.time(), "files_before": file_versions(self.folder)}
        if earlier := self._earlier_seconds():
            self.state |= {"earlier_seconds": earlier}
        with files.open_to_append(self.folder / LOG) as log:
            gap = "\n" if log.tell() else ""
            log.write(f"{gap}{SEPARATOR}{time.strftime('%F %T')} ----\n".encode())
            for note in filter(None, (self.turn.reason, webhook.problem())):
                log.write(f"{note}\n".encode())
        replace_text(self.folder / STATE, json.dumps(self.state))

    def _earlier_seconds(self) -> float:
        """How long the starts took that this one continues. A killed start lasted until its last log line."""
        before = self.state_before if isinstance(self.state_before, dict) else {}
        if self.state["from_scratch"] or not json_values.is_number(began := before.get("started")):
            return 0.0
        ended, earlier = before.get("ended"), before.get("earlier_seconds", 0.0)
        with contextlib.suppress(OSError):
            ended = ended if json_values.is_number(ended) else (self.folder / LOG).stat().st_mtime
        last = max(0.0, ended - began) if json_values.is_number(ended) else 0.0
        if job := follower.read(self.folder):  # without the time in the queue of its cluster
            job_began, ran = follower.running_times(job)
            last = min(last, ran + began + last - job_began if job_began else ran)
        return last + (earlier if json_values.is_number(earlier) else 0.0)

    def wait_for_turn(self) -> bool:
        """Wait in the queue; False if the run was stopped there, or cannot start any more."""
        self.state |= {"pid": os.getpid()}
        if self.turn.leases is None:
            self._write()
            self.entry = replace(self.entry, pid=os.getpid(), started=processes.started(os.getpid()))
            with contextlib.suppress(OSError, RunError):  # a full disk: the lock shows that the run waits
                queue.change(Path(self.place), pid=self.entry.pid, started=self.entry.started)
        while self.turn.leases is None:
            if self.turn.is_final or self._stop_request():
                self._end_in_queue()
                return False
            time.sleep(IN_USE_SECONDS if self.turn.in_use else QUEUE_SECONDS)
            self._keep_lock()
            if not self._follow_folder():
                return False
            with contextlib.suppress(OSError):  # a full disk: try again
                self.turn = queue.turn(self.entry)
                if self.turn.leases is not None:
                    self._record_start()
                elif self.turn.reason != self.state["waiting"]:
                    self._record_wait()
        return True

    def _record_wait(self) -> None:
        self.state |= {"waiting": self.turn.reason, "in_use": self.turn.in_use}
        replace_text(self.folder / STATE, json.dumps(self.state))

    def _end_in_queue(self) -> None:
        with contextlib.suppress(OSError):
            queue.leave(Path(self.place))
        before = self.state_before if isinstance(self.state_before, dict) else {}
        is_known = "started" in before and ("end" in before or "started" not in self.state)  # without an end: lost
        if is_known and not self.turn.is_final and not self.sigterm_received:  # removed: as before
            (self.folder / STOP).unlink(missing_ok=True)
            self.state = before
        elif self.turn.is_final or not self.sigterm_received:  # else the machine shuts down, and the run is lost
            cause = {"cause": self.turn.reason} if self.turn.is_final else {}
            self.state |= {"end": "stopped", "ended": time.time(), "exit_code": None, **cause}
        self._write()

    def run(self) -> None:
        """Run the launcher, and clean up after it. The launcher keeps the leases if this process is killed. A run that
        was stopped while it waited is not launched, except to cancel the cluster job of a killed follower."""
        if self._stop_request() and not follower.unended(self.folder):
            self._end_in_queue()
            return
        _, known_events = events.since(self.folder, 0)
        try:
            launcher = subprocess.Popen(
                self.argv, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=self.output.open(),
                stderr=subprocess.STDOUT, start_new_session=True, pass_fds=self.turn.leases or (),
            )  # fmt: skip
        except OSError as error:
            self.output.close()
            self.state |= {"exit_code": None, "cause": f"{self.argv[0]} cannot be started: {error.strerror}."}
        else:
            self.output.close()
            self.state |= {"launcher": launcher.pid}
            self._write()
            ended = threading.Event()
            threading.Thread(target=webhook.watch, args=(self.folder, known_events, ended), daemon=True).start()
            self.state |= {"exit_code": self._wait(launcher)}
            ended.set()
        self._end()

    def release(self) -> None:
        """Let go of the run and its devices before the process ends."""
        for lock in (*self.locks, *(self.turn.leases or ())):
            processes.release(lock)

    def _keep_lock(self) -> None:
        """Lock a new file if someone has deleted the lock file: without one, the run looks as if it had ended."""
        if (self.folder / LOCK).exists():
            return
        with contextlib.suppress(OSError):  # a full disk, or the folder was deleted
            if (lock := processes.acquire_lock(self.folder, seconds=0)) is not None:
                self.locks.append(lock)
                mark_lock(lock, self.start, self.place)
                os.utime(self.folder / LOCK, (self.state.get("started", time.time()),) * 2)

    def _follow_folder(self) -> bool:
        """Take note of a new name of the run's folder. Returns whether the folder still exists: nobody can see or stop
        a run without one."""
        try:
            place = os.getcwd() if self.folder == HERE else self.place
        except OSError:  # also on a file system that was unmounted lazily, where files can still be written
            return not is_deleted()
        if place != self.place:
            with contextlib.suppress(OSError):
                queue.rename(self.place, place)
            self.place, self.entry = place, replace(self.entry, run=place)
            with contextlib.suppress(OSError), files.open_to_append(self.folder / LOG) as log:
                log.write(f"The run's folder is now {place}.\n".encode())
        return True

    def follow_up(self) -> None:
        """Run the plan's command for runs that have failed or stopped; its output goes to the log."""
        if not self.then or self.state["end"] == "done":
            return
        try:
            with files.open_to_append(self.folder / LOG) as log:
                subprocess.run(
                    self.then, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    timeout=FOLLOW_UP_SECONDS, check=False,
                )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            with contextlib.suppress(OSError), files.open_to_append(self.folder / LOG) as log_text:
                log_text.write(f"{' '.join(self.then)}: {error}.\n".encode())

    def _wait(self, launcher: subprocess.Popen[bytes]) -> int:
        requested = sigterm_sent = touched = 0.0
        while (code := _reap(launcher)) is None:
            time.sleep(POLL_SECONDS)
            self.output.keep()
            self._keep_lock()
            if not self._follow_folder():
                _signal(os.killpg, launcher.pid, signal.SIGKILL)
            if time.monotonic() - touched > TOUCH_SECONDS:
                touched = time.monotonic()
                queue.touch(self.turn.leases or ())
            if self.state_unwritten:
                self._write()
            if self.sigterm_received and "forced" not in self.state and follower.unended(self.folder):
                self._leave_job(launcher)
            request, now = self._stop_request(), time.monotonic()
            # The cluster itself ends a job that takes too long to stop; once the job is queued again, its request is
            # withdrawn.
            if not request or clusters.is_interrupted(self.folder):
                requested = sigterm_sent = 0.0
                continue
            requested = requested or now
            self._record_deadline(requested + self._grace(request) - now)
            if not sigterm_sent and now - requested >= self._grace(request):
                sigterm_sent = now
                self.state |= {"forced": "SIGTERM"}
                self._write()  # a follower cancels its job when it reads this
                if not follower.unended(self.folder):
                    _signal(os.kill, launcher.pid, signal.SIGTERM)
            elif sigterm_sent and now - sigterm_sent >= self.timeouts.sigterm:
                self.state |= {"forced": "SIGKILL"}
                _signal(os.killpg, launcher.pid, signal.SIGKILL)
        return code

    def _leave_job(self, follower_process: subprocess.Popen[bytes]) -> None:
        """End this process and the follower: the machine shuts down, and the job in the cluster continues. The run is
        lost, and the next start follows the job again."""
        _signal(os.killpg, follower_process.pid, signal.SIGKILL)
        os._exit(0)

    def _record_deadline(self, seconds: float) -> None:
        """Record when ranks are ended that do not end by themselves, if this time has changed."""
        deadline = time.time() + seconds
        if abs(deadline - self.state.get("stop_deadline", 0.0)) > 1:
            self.state |= {"stop_deadline": deadline}
            self._write()

    def _stop_request(self) -> str:
        """The content of the stop file, save or discard; '' without one. SIGTERM requests save."""
        stop = self.folder / STOP
        if self.sigterm_received and not stop.exists():
            with contextlib.suppress(OSError):
                request_stop(self.folder, "save")
            return "save"
        try:
            return "discard" if "discard" in files.read_text(stop, errors="replace") else "save"
        except OSError:
            return ""

    def _stop_reason(self) -> str:
        """Why the run asked itself to stop: the text after the first line of the stop file."""
        try:
            return files.read_text(self.folder / STOP, errors="replace").partition("\n")[2].strip()
        except OSError:
            return ""

    def _grace(self, request: str) -> float:
        if _phase(self.folder, self.state) in PHASES_BEFORE_TRAINING:
            return self.timeouts.before_training
        return self.timeouts.discard if request == "discard" else self.timeouts.save

    def _end(self) -> None:
        """Terminate leftover processes (the ranks of a killed launcher keep their devices) and record the end."""
        code = self.state["exit_code"]
        has_result = is_fresh(self.folder, RESULT, self.state)  # a stop may come too late
        requested = self._stop_request()
        finished = code == 0 and (has_result or not requested)
        self._end_job()
        left = self._terminate()
        if not finished:
            deletion.delete_names(self.folder, self.partial)  # those of a process that was killed
        self.state |= {
            "left": left,
            "oom_kills": oom.kills() - self.oom_kills,
            "end": "done" if finished else "stopped" if requested else "failed",
            "ended": time.time(),
        }
        if requested and (reason := self._stop_reason()):
            self.state |= {"cause": reason}
        self._write()
        if self.state_unwritten:  # a full disk takes no new file, but the old one can be overwritten
            with contextlib.suppress(OSError), (self.folder / STATE).open("r+", encoding="utf-8") as file:
                file.write(json.dumps(self.state))
                file.truncate()

    def _terminate(self) -> tuple[int, ...]:
        """End the processes that the launcher has left, then wait until their output is in the log."""
        left = processes.terminate(self.folder, tree=os.getpid(), spare=self.output.pid)
        self.output.wait(WRITER_SECONDS)
        return left

    def _end_job(self) -> None:
        """Cancel the job of a run whose follower was killed."""
        try:
            clusters.end(self.folder)
        except (follower.ClusterError, OSError) as error:
            with contextlib.suppress(OSError), files.open_to_append(self.folder / LOG) as log:
                log.write(f"{error}\n".encode())

    def _write(self) -> None:
        """Write state.json. If that fails, it is tried again later: a full disk must not end the training."""
        try:
            replace_text(self.folder / STATE, json.dumps(self.state))
            self.state_unwritten = False
        except OSError:
            self.state_unwritten = True


def _reap(launcher: subprocess.Popen[bytes]) -> int | None:
    """The launcher's exit code (negative: a signal), None while it runs. Reaps adopted orphans too."""
    while launcher.returncode is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        if pid == launcher.pid:
            launcher.returncode = os.waitstatus_to_exitcode(status)
    return launcher.returncode


def _phase(folder: Path, state: dict[str, Any]) -> str:
    """The phase of the trainer in this start; '' before it has reported one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if is_fresh(folder, PROGRESS, state):
            return str(json.loads(files.read_text(folder / PROGRESS)).get("phase", ""))
    return ""


def _signal(send: Callable[[int, int], None], target: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        send(target, number)


def mark_lock(lock: int, start: str, place: str) -> None:
    """Write who holds the lock, the id of this start, and where the folder is, which marks the processes of the run."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{SUPERVISOR}\n{start}\n{place}\n".encode(), 0)


def is_deleted() -> bool:
    """Whether the working directory was deleted."""
    try:
        return os.readlink("/proc/self/cwd").endswith(" (deleted)")
    except OSError:
        return not os.stat(HERE).st_nlink


def detach(folder: Path) -> None:
    """Detach from the terminal and the parent process; errors of this process go to the log in `folder`."""
    os.setsid()
    with contextlib.suppress(OSError, AttributeError):  # Linux: orphans of the run become children of this process
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    errors = files.open_regular(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)


def main(arguments: Sequence[str]) -> int:
    """Acquire the lock, record the start and fork: the parent returns, the child supervises the run."""
    parser = argparse.ArgumentParser(prog="supervisor")
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument(
        "--timeouts", type=lambda text: StopTimeouts(*map(float, text.split(","))), default=StopTimeouts()
    )
    parser.add_argument("--after", default="", metavar="FOLDER")
    parser.add_argument("--after-any", action="store_true")
    given = parser.parse_args(arguments)
    try:
        os.chdir(given.folder)  # stays valid when the folder is renamed or its mount is moved
        earlier = stop_requests.version(HERE)
        lock = processes.acquire_lock(HERE)
        if lock is None:
            sys.stderr.write("This run is already running.")
            return BUSY
        if deletion.is_begun(HERE):
            sys.stderr.write("This run is being deleted, so it cannot be started.")
            return 1
        stop_requests.withdraw(HERE, earlier)  # the run is alive now: a newer request is about this start
        start = secrets.token_hex(8)
        mark_lock(lock, start, str(given.folder))
        supervisor = Supervisor(HERE, given.from_scratch, given.timeouts, lock, given.after, not given.after_any, start)
        supervisor.announce()
    except queue.LockedError as error:
        sys.stderr.write(str(error))
        return 1
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"The run folder cannot be used: {error}.")
        return 1
    # Handlers instead of SIG_IGN, which child processes would inherit.
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: setattr(supervisor, "sigterm_received", True))
    if os.fork():
        return 0
    detach(HERE)
    if supervisor.wait_for_turn():
        supervisor.run()
        supervisor.release()
        supervisor.follow_up()
        webhook.notify(HERE)
    elif supervisor.turn.is_final:  # nobody has removed it from the queue
        supervisor.release()
        webhook.notify(HERE)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
