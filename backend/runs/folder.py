"""Run: a run folder, and its state, which is computed from the files.

Nothing is kept in memory, so any number of pages and shells see the same state. A run is alive while its lock is held.
Which files belong to the last start is in `freshness.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.runs import (  # fmt: skip
    ANNOTATIONS,
    DELETING,
    ESTIMATE,
    EVENTS,
    JOB,
    JOBS,
    LOCK,
    LOG,
    METRICS,
    MONITOR,
    PLAN,
    PROGRESS,
    RANK_LOGS,
    RESOLVED,
    RESULT,
    SCRIPT,
    SHELL,
    SPEC,
    STATE,
    STOP,
    SWEEP,
    WAITS_FOR_DISK,
    Plan,
    clusters,
    deletion,
    files,
    follower,
    json_values,
    lock_file,
    notebook,
    ownership,
    processes,
    replace_text,
    request_stop,
    resume_point,
    throughput,
)
from backend.runs.failure import Failure, diagnose
from backend.runs.follower import ClusterError
from backend.runs.freshness import is_fresh, start_state
from backend.runs.metrics import last_points
from backend.wording import counted

PACKAGES = Path(__file__).resolve().parent.parent.parent  # the supervisor is imported from here
KILLED = "the run's supervisor process was killed, or the machine shut down."
# What reading raises for a file that another program has changed, or that has an unexpected type.
UNREADABLE = (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
JOB_SECONDS = 30.0  # how long a deletion waits for a job that uses the model
MIN_FREE_BYTES = 2**16  # progress and metrics take a few blocks
ENDS = ("done", "stopped", "failed")
# Files that a list reads. One that is a named pipe, for example, is damage and not a missing file.
READ = (
    ANNOTATIONS, DELETING, ESTIMATE, EVENTS, JOB, LOCK, LOG, METRICS, MONITOR, PLAN, PROGRESS, RESOLVED, RESULT, SPEC,
    STATE, STOP, SWEEP,
)  # fmt: skip
ALIVE = ("queued", "starting", "running", "stopping")


class RunError(Exception):
    """An operation on a run that is not possible; the message is for users."""


@dataclass(frozen=True)
class StopTimeouts:
    """Seconds to wait in each stage of a stop: for the checkpoint (`save`), for the end of the step (`discard`), or for
    the trainer before training starts (`before_training`); after SIGTERM (`sigterm`)."""

    save: float = Plan.stop_timeout
    discard: float = 15.0
    sigterm: float = 45.0
    before_training: float = 2.0

    def text(self) -> str:
        """The timeouts as a command-line argument."""
        return ",".join(map(str, astuple(self)))


class Run:
    """A run folder; backend/runs/__init__.py lists its files."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.id = self.path.name

    @classmethod
    def create(
        cls, root: Path, name: str, plan: Plan, now: datetime,
        about: Mapping[str, Any] | None = None, estimate: Mapping[str, Any] | None = None,
    ) -> Run:  # fmt: skip
        """Create `root/YYYY-MM-DD_HHMMSS_name` atomically. `about` (model, method) is shown in lists of runs,
        `estimate` is compared with the measured memory."""
        plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()  # ü becomes u
        slug = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:48].strip("-") or "run"
        plan = plan.with_random_id()
        kept = {"name": name, "created": now.timestamp(), "about": dict(about or {})}
        kept |= {"argv": plan.argv, "env": dict(plan.env), "files": list(plan.files), "notes": plan.notes}
        kept |= {"defaults": dict(plan.defaults), "others": dict(plan.other_nodes), "devices": dict(plan.devices)}
        kept |= {"stop_timeout": plan.stop_timeout, **({"then": plan.then} if plan.then else {})}
        kept |= {"partial": plan.partial} if plan.partial else {}
        scripts = {SCRIPT: plan.run_script(), **{f"{node}.sh": plan.node_script(node) for node in plan.other_nodes}}
        records = {PLAN: json.dumps(kept, indent=1), **({ESTIMATE: json.dumps(estimate)} if estimate else {})}
        staging = None
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if problem := ownership.folder_problem(root):
                raise RunError(f"{problem} Nothing was started.")
            staging = Path(tempfile.mkdtemp(prefix=".new-", dir=root))  # mode 0700
            for file, text in {**plan.files, **records, **scripts}.items():
                (staging / file).parent.mkdir(parents=True, exist_ok=True)
                replace_text(staging / file, text, mode=0o700 if file in scripts else 0o600)
            return cls(_move_to_free_name(staging, root / f"{now:%Y-%m-%d_%H%M%S}_{slug}"))
        except OSError as error:
            if staging:
                shutil.rmtree(staging, ignore_errors=True)
            raise RunError(
                f"The run folder could not be created in {root}: {error.strerror}. Nothing was started."
            ) from error

    # -- operations ----------------------------------------------------------------------------------------------------

    def start(
        self, from_scratch: bool = False, timeouts: StopTimeouts | None = None,
        after: Run | None = None, after_ok: bool = True,
    ) -> None:  # fmt: skip
        """Start, or resume from the last complete checkpoint; `from_scratch` starts at step 0. Returns once the lock is
        held: the run waits in the queue until its devices are free, and until the run `after` has ended and, with
        `after_ok`, succeeded."""
        if problem := ownership.folder_problem(self.path.parent):
            raise RunError(problem)
        timeouts = timeouts or StopTimeouts(save=self._json(PLAN).get("stop_timeout", Plan.stop_timeout))
        command = [sys.executable, "-m", "backend.runs.supervisor", str(self.path)]
        command += ["--timeouts", timeouts.text(), *(["--from-scratch"] if from_scratch else [])]
        if after:
            command += ["--after", str(after.path), *([] if after_ok else ["--after-any"])]
        try:
            done = subprocess.run(
                command, cwd=PACKAGES, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                start_new_session=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RunError(
                f"The run's supervisor process did not respond within {error.timeout:g} seconds. The machine, or the "
                "file system of the run's folder, may be overloaded; try again."
            ) from error
        except OSError as error:
            raise RunError(f"The run's supervisor process did not start: {error}.") from error
        if done.returncode:
            raise RunError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "The run did not start.")

    def resume(self, from_scratch: bool = False, timeouts: StopTimeouts | None = None) -> None:
        """Restart a run that has ended. Raises RunError if it is alive, or finished without `from_scratch`."""
        state = self.state
        if state in ALIVE:
            raise RunError("This run is still running or waiting. Stop it before you resume it.")
        if state == "deleting":
            raise RunError("This run is being deleted, so it cannot be resumed.")
        if state == "done" and not from_scratch:
            raise RunError("This run has finished. Start a new run with its options, or restart it from scratch.")
        if not from_scratch and state != "new" and (problem := self.resume_point().problem):
            raise RunError(f"Not resumed: {problem}")
        self.start(from_scratch, timeouts)

    def stop(self, save: bool = True) -> None:
        """Request a stop. With `save=False`, also during a stop that saves, the run ends without a checkpoint."""
        if self.state not in ALIVE:
            raise RunError("This run is not running, so it cannot be stopped.")
        if (pid := self._stopped_supervisor()) is not None:
            os.kill(pid, signal.SIGCONT)
        try:
            request_stop(self.path, "save" if save else "discard")
        except OSError as error:
            if save:
                raise RunError(
                    f"The stop request could not be written: {error.strerror}. Stop without a checkpoint still works."
                ) from error
        if not save and self._text(STOP) != "discard":
            self._end_launcher()

    def _end_launcher(self) -> None:
        """End the launcher, because a stop without a checkpoint could not be written. A follower ignores SIGTERM; the
        supervisor cancels the job of one that was killed."""
        launcher = self._json(STATE).get("launcher")
        number = signal.SIGKILL if follower.unended(self.path) else signal.SIGTERM
        for process in processes.run_processes(self.path):
            if process.pid == launcher:
                processes.send(process, number)

    def clean_up(self) -> int:
        """Terminate processes that a killed supervisor or shell left behind. Returns their number."""
        if processes.is_locked(self.path):
            raise RunError("This run is still running or waiting. Stop it before you clean up its processes.")
        self._end_job()
        count = len(processes.run_processes(self.path))
        if left := processes.terminate(self.path):
            raise RunError(
                f"The processes with PID {', '.join(map(str, left))} could not be killed, because they are blocked in "
                "the kernel. Reboot the machine if they do not end."
            )
        return count

    def delete(self) -> None:
        """Delete the folder with checkpoints and model, after stopping what uses it. Raises RunError if the run is
        alive."""
        lock = None
        try:
            deletion.remove_irregular(self.path / LOCK)
            lock = processes.acquire_lock(self.path)
            if lock is None:
                raise RunError("This run is still running or waiting. Stop it before you delete it.")
            self._end_jobs()
            self._end_job()
            processes.terminate(self.path)
            deletion.delete(self.path)
        except OSError as error:
            what = f" {error.filename}:" if error.filename and deletion.is_begun(self.path) else ""
            raise RunError(f"The run could not be deleted:{what} {error.strerror}.") from error
        finally:
            if lock is not None:
                processes.release(lock)

    def _end_jobs(self) -> None:
        """Stop what uses the model of this run, such as a merge or a chat. Raises RunError."""
        alive = [Run(path) for path in (self.path / JOBS).glob("*") if processes.is_locked(path)]
        for job in alive:
            with contextlib.suppress(RunError):  # the job has just ended
                job.stop(save=False)
        deadline = time.monotonic() + JOB_SECONDS
        while alive := [job for job in alive if processes.is_locked(job.path)]:
            if time.monotonic() > deadline:
                raise RunError(f"{alive[0].name} of this run did not stop. Stop it before you delete the run.")
            time.sleep(processes.POLL_SECONDS)

    def _end_job(self) -> None:
        """Cancel the job of a run whose follower was killed. Raises RunError."""
        try:
            clusters.end(self.path)
        except (ClusterError, OSError) as error:
            raise RunError(str(error)) from error

    # -- state, from the files -----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of new, queued, starting, running, stopping, done, stopped, failed, lost, deleting."""
        if deletion.is_begun(self.path):
            return "deleting"
        if processes.is_locked(self.path):
            return self._alive_state()
        started_by = self._lock().starter
        if started_by == SHELL:
            return "done" if self._fresh(RESULT) else "stopped" if (self.path / STOP).exists() else "failed"
        if not started_by and not self._json(STATE):  # without a lock file, state.json tells whether it was started
            return "new"
        # The supervisor records the end before it releases the lock. No end means that it was killed, or just
        # restarted.
        end = self._json(STATE).get("end")
        end = end if isinstance(end, str) and end in ENDS else None  # another program has written the file
        if end or not processes.is_locked(self.path):
            return str(end or ("done" if self._fresh(RESULT) else "lost"))  # ranks may finish without their supervisor
        return self._alive_state()

    def can(self) -> dict[str, bool]:
        """Which operations are possible now."""
        state = self.state
        return {
            "stop": state in ALIVE,
            "resume": state in ("new", "stopped", "failed", "lost"),
            "delete": state not in ALIVE,
            "clean_up": state not in ALIVE and bool(processes.run_processes(self.path) or follower.unended(self.path)),
        }

    def plan(self) -> Plan:
        """The plan, read from the folder."""
        kept = self._json(PLAN)
        files = {name: self._text(name) for name in kept.get("files", ())}
        others = {name: tuple(argv) for name, argv in kept.get("others", {}).items()}
        notes, defaults = tuple(kept.get("notes", ())), kept.get("defaults", {})
        known = (notes, defaults, others, kept.get("devices", {}), kept.get("stop_timeout", Plan.stop_timeout))
        after = (tuple(kept.get(key, ())) for key in ("then", "partial"))
        return Plan(tuple(kept.get("argv", ())), kept.get("env", {}), files, *known, *after)

    def node_commands(self) -> dict[str, str]:
        """Commands for the other nodes of a multi-node run: script name -> command."""
        return {node: f"bash {shlex.quote(str(self.path / node))}.sh" for node in self._json(PLAN).get("others", {})}

    @property
    def name(self) -> str:
        """The name that the user gave it."""
        return notebook.read(self.path).name or str(self._json(PLAN).get("name", self.id))

    def about(self) -> dict[str, Any]:
        """What lists show of the options: model, method, dataset, training stage, strategy, learning rate."""
        found = self._json(PLAN).get("about")
        return found if isinstance(found, dict) else {}

    def job(self) -> dict[str, Any]:
        """The run's job in a cluster, as its follower has seen it last (`follower.py`); empty for other runs."""
        return follower.read(self.path)

    def waiting(self) -> dict[str, Any]:
        """Why a queued run waits (`reason`), and whether another program uses its devices (`in_use`)."""
        kept, job = self._kept(), self.job()
        if job and ("started" in kept or self._lock().starter == SHELL):
            return {"reason": str(job.get("text", "")), "in_use": False}
        return {"reason": str(kept.get("waiting", "")), "in_use": bool(kept.get("in_use"))}

    def progress(self) -> dict[str, Any]:
        """The progress of the last start; empty before rank 0 has reported it."""
        return self._json(PROGRESS) if self._fresh(PROGRESS) else {}

    def stop_reason(self) -> str:
        """Why the run asked itself to stop, or could not start; '' if it did neither."""
        if self._lock().starter == SHELL:  # a supervisor would copy it to state.json
            return self._text(STOP).partition("\n")[2].strip()
        return str(self._json(STATE).get("cause", ""))

    def result(self) -> dict[str, Any]:
        """The result of the last start; empty before its end."""
        return self._json(RESULT) if self._fresh(RESULT) else {}

    def monitor(self) -> dict[str, Any]:
        """The last measurement of all ranks in this start; empty before the first one."""
        found = self._json(MONITOR) if self._fresh(MONITOR) else {}
        ranks = found.get("ranks")
        return found if isinstance(ranks, list) and all(isinstance(rank, dict) for rank in ranks) else {}

    def last_points(self) -> list[dict[str, Any]]:
        """The metrics of the last logging steps."""
        return last_points(self.path / METRICS)

    def estimate(self) -> dict[str, Any]:
        """The memory estimate; empty for a run that was created without one."""
        return self._json(ESTIMATE)

    def resolved(self) -> dict[str, Any]:
        """What follows from the options and the machine (ResolvedRun); empty if it was not recorded."""
        return self._json(RESOLVED)

    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return [resume_point.step_of(folder) for folder in resume_point.complete(self.path)]

    def resume_point(self) -> resume_point.ResumePoint:
        """The checkpoint from which Resume continues, and why not from a newer one. The trainer also compares the
        contents of files, which takes too long here."""
        if "--from-scratch" in self._json(PLAN).get("argv", ()):  # save.resume_from
            return resume_point.ResumePoint()
        return resume_point.find(self.path)

    def rank_logs(self) -> dict[int, tuple[Path, ...]]:
        """stdout.log and stderr.log of each rank in the last attempt. Empty without torchrun.

        The log of the run has all of it in order; `rank` of `metrics.since` selects the lines of one rank.
        """
        # The attempts of one start are numbered; which of the earlier starts was the last, only their times tell.
        attempts = [
            (self._fresh(f"{RANK_LOGS}/{path.parent.name}"), path.parent.stat().st_mtime_ns, _attempt(path), path)
            for path in (self.path / RANK_LOGS).glob("*/attempt_*")
        ]
        if not attempts:
            return {}
        newest = max(attempts)[3]
        ranks = sorted(int(path.name) for path in newest.iterdir() if path.name.isdigit())
        return {rank: tuple(sorted((newest / str(rank)).glob("std*.log"), reverse=True)) for rank in ranks}

    def failure(self) -> dict[str, Any] | None:
        """Why the run failed: sentence, help, traceback, rank (None: launcher), fields, kind. None if it did not."""
        state, kept = self.state, self._kept()
        broke_off = state == "stopped" and kept.get("exit_code") and not kept.get("forced")
        if state != "failed" and not broke_off:
            return None
        found = self._failure()
        return {
            "sentence": found.sentence, "help": found.help, "traceback": found.traceback, "rank": found.rank,
            "fields": list(found.fields), "kind": found.kind,
        }  # fmt: skip

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """One row of the list of runs. Times are Unix seconds, as is `now` (default: the current time), or None. A run
        with files that cannot be read has the state damaged, and does not hide the others."""
        try:
            return self._summary(time.time() if now is None else now)
        except UNREADABLE as error:
            times, steps = ("started", "ended", "created", "earlier_seconds", "eta_seconds"), ("step", "max_steps")
            unknown = dict.fromkeys((*times, *steps, "loss", "fraction"))
            known = {"id": self.id, "name": self.id, "state": "damaged", "stalled": False, "method": "", "model": ""}
            return unknown | known | {"sentence": damage(error)}

    def _summary(self, now: float) -> dict[str, Any]:
        files.check_names(self.path, READ)
        plan, state, kept, progress = self._json(PLAN), self.state, self._kept(), self.progress()
        points = self.last_points()
        about, alive = plan.get("about", {}), state in ALIVE
        started = self._stamp(LOCK) if alive or self._lock().starter == SHELL else kept.get("started")
        started, earlier = follower.without_queue(self.job(), started, kept.get("earlier_seconds"))
        step = progress.get("step") or next((p["step"] for p in reversed(points) if "step" in p), None)
        if state == "stopped":  # the last step is saved, but not always logged
            step = max((step or 0, *self.checkpoints())) or step
        most = progress.get("max_steps") or (self._json(PROGRESS) or {}).get("max_steps")
        step_seconds = throughput.seconds_per_step(progress, points) if state == "running" else None
        fraction = progress.get("fraction")
        if fraction is None and step is not None and most:
            fraction = min(1.0, step / most)
        summary = {
            "id": self.id,
            "name": self.name,
            "state": state,
            "started": None if state == "queued" else started,
            "ended": None if alive or state == "new" else kept.get("ended") or self._last_sign(),
            "step": step,
            "max_steps": most,
            "loss": next((p["loss"] for p in reversed(points) if "loss" in p), None),
            "fraction": 1.0 if state == "done" else fraction,
            "eta_seconds": throughput.eta(progress, step_seconds, now),
            "stalled": state in ("running", "stopping") and throughput.is_stalled(progress, step_seconds, now),
            "method": about.get("method", ""),
            "model": about.get("model", ""),
            "created": plan.get("created"),
            "earlier_seconds": earlier,
        }
        return summary | {"sentence": self._sentence(summary, progress, step_seconds, now)}

    def waits_for(self) -> str:
        """What a run in a queue, or one that is being stopped, waits for, as the sentence of its summary; '' for other
        runs. It reads no metrics, so it may be asked several times a second."""
        return self._waits_for(self.state, self.progress(), time.time())

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _alive_state(self) -> str:
        if (self.path / STOP).exists():
            return "stopping"
        kept = self._kept()
        if ("queued" in kept and "started" not in kept) or self.job().get("waits"):
            return "queued"
        return "running" if self._fresh(PROGRESS) or self._fresh(METRICS) else "starting"

    def _sentence(
        self, summary: dict[str, Any], progress: dict[str, Any], step_seconds: float | None, now: float
    ) -> str:
        """The state of the run as a sentence, with what the user can do next."""
        state, step = summary["state"], summary["step"]
        if waits := self._waits_for(state, progress, now):
            return waits
        if state == "new":
            return "Ready to start."
        if state == "deleting":
            return self._sentence_of_deletion()
        if state == "starting":
            names = [f"{node}.sh" for node in self.node_commands()]
            others = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
            wait = f" Training begins when {others} in the run folder is started on the other nodes." if others else ""
            return f"Starting: the processes are loading their libraries.{wait}"
        if state == "running":
            return self._disk_problem() or throughput.running_sentence(summary, progress, step_seconds, now)
        if state == "done":
            last_start = summary["ended"] - (summary["started"] or summary["ended"])
            last_start += summary["earlier_seconds"] or 0
            training = self.result().get("seconds")  # the sum over all starts
            taken = throughput.duration(max(0.0, last_start, training if isinstance(training, int | float) else 0.0))
            return f"Done: {counted(step, 'step')} in {taken}." if step else f"Done in {taken}."
        return self._sentence_of_end(state, step)

    def _waits_for(self, state: str, progress: dict[str, Any], now: float) -> str:
        if state not in ALIVE:
            return ""
        if (pid := self._stopped_supervisor()) is not None:
            return (
                f"The run's supervisor process (PID {pid}) is stopped by a signal, so it cannot stop the run or "
                f"record its end. Stop resumes this process, and so does kill -CONT {pid}."
            )
        if (waits := self._sentence_of_wait(state)) or state != "stopping":
            return waits
        shown = progress.get("phase") in (WAITS_FOR_DISK, *throughput.TIMED_PHASES)
        text = throughput.phase_sentence(progress, now) if shown else ""
        return f"{text} {self._sentence_of_stop()}".strip()

    def _sentence_of_deletion(self) -> str:
        if problem := deletion.problem(self.path):
            return f"The run is only partly deleted: {problem} Fix this problem, then delete the run again."
        if processes.is_locked(self.path):
            return "Being deleted."
        return "Deleting was interrupted. Delete the run again; the page also does so when its server starts."

    def _sentence_of_wait(self, state: str) -> str:
        """What a run in a queue waits for, or since when its job's state is unknown; '' for other runs."""
        job = self.job()
        if job.get("silent_since"):
            since = datetime.fromtimestamp(job["silent_since"]).strftime("%H:%M")
            text = f"The state of {job['cluster']} job {job['id']} has been unknown since {since}"
            return f"{text}; the job is not affected. {job.get('problem', '')}".strip()
        if state != "queued":
            return ""
        where = f"{job['cluster']}'s queue (job {job['id']})" if job.get("waits") else "the queue"
        return f"Waiting in {where}. {self.waiting()['reason']}".strip()

    def _sentence_of_stop(self) -> str:
        """What a stop waits for and until when."""
        if clusters.is_interrupted(self.path):
            cause = self._text(STOP).partition("\n")[2].strip()
            return f"{cause} The run saves a checkpoint if training has begun, and continues when the job restarts."
        deadline = self._kept().get("stop_deadline")
        until = ""
        if deadline:
            day = "" if deadline - time.time() < 12 * 3600 else "%B %d, "
            until = f" until {datetime.fromtimestamp(deadline).strftime(day + '%H:%M:%S')}"
        if (is_job := bool(self.about().get("kind"))) or self._text(STOP) == "discard":
            what = "Stopping" if is_job else "Stopping without a checkpoint"  # jobs (jobs.py) have none
            return f"{what}. The processes can run{until}." if until else f"{what}."
        if not until:
            return "Stopping after this step, with a checkpoint."
        return (
            f"Stopping after this step, with a checkpoint. The processes can run{until}; then they are ended without "
            "a checkpoint. To end them sooner, stop without saving."
        )

    def _sentence_of_end(self, state: str, step: int | None) -> str:
        """How a run ended that is not done, and what Resume does."""
        kept = self._kept()
        if "queued" in kept and "started" not in kept:
            if state == "stopped":
                return f"Not started. {kept.get('cause') or 'It was removed from the queue.'}"
            return f"Lost: it was waiting in the queue when {KILLED} Resume puts it back into the queue."
        at = f" after step {step}" if step else ""
        resume = "" if self.about().get("kind") else self.resume_point().sentence  # jobs (jobs.py) have no checkpoints
        if state == "stopped":
            failure = self.failure()
            return f"Stopped{at}. {failure['sentence'] if failure else self.stop_reason() or resume}".rstrip()
        if state == "failed":
            return f"Failed{at}. {self._failure().sentence}"
        if job := follower.unended(self.path):
            return f"Lost{at}: {KILLED} Its job {job} may continue; Resume follows that job, or starts another one."
        return f"Lost{at}: {KILLED} {resume}".rstrip()

    def _disk_problem(self) -> str:
        """What a live run waits for if it can write nothing, not even its progress; '' if it can."""
        disk = os.statvfs(self.path)
        if disk.f_flag & os.ST_RDONLY:
            what = "is read-only"
        elif disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES:
            what = "is full"
        elif disk.f_files and not disk.f_favail:  # some file systems do not count inodes
            what = "has no free inodes, so no file can be created; delete some files"
        else:
            return ""
        return f"Running, but the disk of the run's folder {what}. The next checkpoint waits until it can be saved."

    def _stopped_supervisor(self) -> int | None:
        """The PID of the run's supervisor if it was stopped by a signal: it does not respond until it is continued."""
        pid = self._json(STATE).get("pid")
        if not isinstance(pid, int) or processes.condition(pid) != "T" or not processes.works_in(pid, self.path):
            return None
        return pid

    def _failure(self) -> Failure:
        with contextlib.suppress(OSError):
            log, since = (self.path / LOG).stat(), (self.path / LOCK).stat().st_mtime_ns
            return _diagnosed(self.path, since, log.st_size, log.st_mtime_ns, json.dumps(self._start_state()))
        return diagnose(self.path, 0, self._json(STATE))

    def _fresh(self, name: str) -> bool:
        return is_fresh(self.path, name, self._start_state())

    def _kept(self) -> dict[str, Any]:
        """What the supervisor has recorded of the last start; nothing if run.sh made it: state.json is older then."""
        return {} if self._lock().starter == SHELL else self._json(STATE)

    def _start_state(self) -> dict[str, Any]:
        return start_state(self._json(STATE), self._lock())

    def _lock(self) -> lock_file.LockFile:
        return lock_file.parse(self._text(LOCK))

    def _stamp(self, name: str) -> float | None:
        with contextlib.suppress(OSError):
            return (self.path / name).stat().st_mtime
        return None

    def _last_sign(self) -> float | None:
        """When the run last wrote a file: the best guess of when the run ended, if that was not recorded."""
        return max((s for name in (LOG, METRICS, PROGRESS, RESULT) if (s := self._stamp(name))), default=None)

    def _text(self, name: str) -> str:
        try:
            return files.read_text(self.path / name, errors="replace")
        except OSError:
            return ""

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json_values.parse(self._text(name) or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def runs(root: Path) -> list[Run]:
    """All runs under `root`, newest first; folders that are half created or half deleted are not among them."""
    try:
        names = sorted((n for n in os.listdir(root) if n[0] != "."), reverse=True)
    except OSError:
        return []
    return [Run(root / name) for name in names if _is_run(root / name)]


def _attempt(path: Path) -> int:
    """The number of torchrun's folder attempt_N."""
    number = path.name.rpartition("_")[2]
    return int(number) if number.isdecimal() else -1


def finish_deletions(root: Path) -> None:
    """Continue what an earlier process has begun to delete; what still cannot be deleted stays in the list."""
    for path in deletion.unfinished(root):
        if not ownership.problem(path) or not (path / PLAN).exists():
            with contextlib.suppress(RunError):
                Run(path).delete()


def _is_run(path: Path) -> bool:
    try:
        return (path / PLAN).is_file() and not ownership.problem(path)
    except PermissionError:
        return True  # shown as damaged


def has_plan(path: Path) -> bool:
    """Whether a folder is that of a run, or may be one that this user cannot read."""
    try:
        return (path / PLAN).is_file()
    except PermissionError:
        return True  # `ownership.problem` says so


def damage(error: Exception) -> str:
    """What is wrong with a run whose files cannot be read, as a sentence."""
    if isinstance(error, OSError):
        name = Path(str(error.filename or "a file")).name
        return f"Damaged: {name} in the run's folder cannot be read ({error.strerror or error})."
    kind = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "has unexpected content"
    return f"Damaged: a file in the run's folder {kind} ({PLAN}, {PROGRESS}, {METRICS}, {STATE} or {RESULT})."


def find(root: Path, name: str) -> Run:
    """The run with this id. Raises RunError, also for a name that leads out of `root`, and for a run that is not this
    user's."""
    is_plain = name.isprintable() and "/" not in name and not name.startswith(".")
    if name and is_plain and has_plan(root / name):
        if why := ownership.problem(root / name):
            raise RunError(why)
        return Run(root / name)
    raise RunError(f"There is no run named {name!r}.")


def _move_to_free_name(staging: Path, target: Path) -> Path:
    """Move `staging` to `target`, or to the first free name with a number. A folder with files is never replaced."""
    for number in range(1, 1000):
        place = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            staging.rename(place)
            return place
        except OSError:
            if not place.exists():
                raise
    raise OSError(17, "too many runs with this name were created in the same second")


@lru_cache(maxsize=512)
def _diagnosed(path: Path, since_ns: int, size: int, changed_ns: int, state: str) -> Failure:
    """Same as `diagnose`, but cached for each end of a run, since lists of runs are polled."""
    del size, changed_ns  # keys of the cache
    return diagnose(path, since_ns, json.loads(state))
