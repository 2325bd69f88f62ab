"""A run: a directory, and a state that is computed from its files.

Floor 0. Standard library only; imports backend.runs. Nothing is remembered here, so any number of pages and shells
see the same. Alive means that the lock is held, and the lock's change time is when the run was last started: what is
older than that belongs to an earlier start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.runs import (  # fmt: skip
    CHECKPOINTS,
    COMPLETE,
    ESTIMATE,
    LOCK,
    LOG,
    METRICS,
    PLAN,
    PROGRESS,
    RANK_LOGS,
    RESULT,
    SCRIPT,
    SHELL,
    STATE,
    STOP,
    Plan,
    processes,
    replace_text,
    throughput,
)
from backend.runs.failure import Failure, diagnose
from backend.runs.metrics import last_points
from backend.runs.supervisor import Patience

PACKAGES = Path(__file__).resolve().parent.parent.parent  # the supervisor is imported from here
ALIVE = ("starting", "running", "stopping")


class RunError(Exception):
    """A sentence for a person."""


class Run:
    """One run's folder; see backend/runs/__init__.py for its files."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.id = self.path.name

    @classmethod
    def create(
        cls, root: Path, name: str, plan: Plan, now: datetime,
        about: Mapping[str, str] | None = None, estimate: Mapping[str, Any] | None = None,
    ) -> Run:  # fmt: skip
        """Write `root/YYYY-MM-DD_HHMMSS_name`, whole or not at all. `about` (method, model) is for lists of runs,
        `estimate` for whoever compares it with what was measured."""
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48].strip("-") or "run"
        kept = {"name": name, "created": now.timestamp(), "about": dict(about or {})}
        kept |= {"argv": plan.argv, "env": dict(plan.env), "files": list(plan.files), "notes": plan.notes}
        kept |= {"defaults": dict(plan.defaults), "others": dict(plan.others)}
        scripts = {SCRIPT: plan.runner(), **{f"{node}.sh": plan.joiner(node) for node in plan.others}}
        own = {PLAN: json.dumps(kept, indent=1), **({ESTIMATE: json.dumps(estimate)} if estimate else {})}
        half = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            half = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
            half.chmod(0o777 & ~_umask())
            for file, text in {**plan.files, **own, **scripts}.items():
                (half / file).parent.mkdir(parents=True, exist_ok=True)
                (half / file).write_text(text, encoding="utf-8")
                if file in scripts:
                    (half / file).chmod(0o777 & ~_umask())
            return cls(_settle(half, root / f"{now:%Y-%m-%d_%H%M%S}_{slug}"))
        except OSError as error:
            if half:
                shutil.rmtree(half, ignore_errors=True)
            raise RunError(f"No run could be made in {root}: {error.strerror}. Nothing was started.") from error

    # -- acts ------------------------------------------------------------------------------------------------------

    def start(self, from_scratch: bool = False, patience: Patience | None = None) -> None:
        """Start, or resume from the last complete checkpoint; `from_scratch` starts at step 0. Returns once the lock is
        held."""
        command = [sys.executable, "-m", "backend.runs.supervisor", str(self.path)]
        command += ["--patience", (patience or Patience()).text(), *(["--from-scratch"] if from_scratch else [])]
        try:
            done = subprocess.run(
                command, cwd=PACKAGES, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                start_new_session=True, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"The run's supervisor did not start: {error}.") from error
        if done.returncode:
            raise RunError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "It did not start.")

    def resume(self, from_scratch: bool = False, patience: Patience | None = None) -> None:
        """Start again a run that ended. Raises RunError where it is alive, or done and from_scratch is not set."""
        state = self.state
        if state in ALIVE:
            raise RunError("This run is going. Stop it first, then resume it.")
        if state == "done" and not from_scratch:
            raise RunError("This run has finished. Clone it to train further, or start it from scratch.")
        self.start(from_scratch, patience)

    def stop(self, save: bool = True) -> None:
        """Ask for the end. Asked again with `save=False`, a stop that waits for its checkpoint is cut short."""
        if self.state not in ALIVE:
            raise RunError("This run is not going, so there is nothing to stop.")
        try:
            replace_text(self.path / STOP, "save" if save else "discard")
        except OSError as error:
            raise RunError(f"The stop request could not be written: {error.strerror}.") from error

    def sweep(self) -> int:
        """End processes that a lost supervisor, or a killed shell, left behind. Returns how many there were."""
        if processes.held(self.path):
            raise RunError("This run is going. Stop it instead.")
        count = len(processes.carriers(self.path))
        if left := processes.sweep(self.path):
            raise RunError(f"These processes do not end: {', '.join(map(str, left))}. The kernel still waits for them.")
        return count

    def delete(self) -> None:
        """Remove the folder with checkpoints and model, after a sweep. Raises RunError where the run is alive."""
        lock = None
        try:
            lock = processes.take(self.path)
            if lock is None:
                raise RunError("This run is going. Stop it first, then delete it.")
            processes.sweep(self.path)
            gone = self.path.with_name(f".deleted-{self.id}")  # from here on it is in no list, even if cut short
            self.path.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            raise RunError(f"The run could not be deleted: {error.strerror}.") from error
        finally:
            if lock is not None:
                os.close(lock)

    # -- what the files say ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of new, starting, running, stopping, done, stopped, failed, lost."""
        if processes.held(self.path):
            return self._living()
        keeper = self._text(LOCK).strip()
        if keeper == SHELL:
            return "done" if self._fresh(RESULT) else "stopped" if (self.path / STOP).exists() else "failed"
        if not keeper:
            return "new"
        # The end is written before the lock is let go: without one the supervisor is gone, or a new one came just now.
        end = self._json(STATE).get("end")
        return str(end) if end else self._living() if processes.held(self.path) else "lost"

    def can(self) -> dict[str, bool]:
        """Which acts make sense now."""
        state = self.state
        return {
            "stop": state in ALIVE,
            "resume": state in ("new", "stopped", "failed", "lost"),
            "delete": state not in ALIVE,
            "sweep": state not in ALIVE and bool(processes.carriers(self.path)),
        }

    def plan(self) -> Plan:
        """What is started, read back."""
        kept = self._json(PLAN)
        files = {name: self._text(name) for name in kept.get("files", ())}
        others = {name: tuple(argv) for name, argv in kept.get("others", {}).items()}
        notes, defaults = tuple(kept.get("notes", ())), kept.get("defaults", {})
        return Plan(tuple(kept.get("argv", ())), kept.get("env", {}), files, notes, defaults, others)

    def joining(self) -> dict[str, str]:
        """What the other nodes are to start, once the run is started here: name -> command."""
        return {node: f"bash {shlex.quote(str(self.path / node))}.sh" for node in self._json(PLAN).get("others", {})}

    def progress(self) -> dict[str, Any]:
        """What rank 0 of the last start is doing; empty before it has said so."""
        return self._json(PROGRESS) if self._fresh(PROGRESS) else {}

    def result(self) -> dict[str, Any]:
        """What came out of the last start; empty before its end."""
        return self._json(RESULT) if self._fresh(RESULT) else {}

    def estimate(self) -> dict[str, Any]:
        """The memory that it was judged to take; empty for a run that was made without one."""
        return self._json(ESTIMATE)

    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that are complete, in order."""
        found = (self.path / CHECKPOINTS).glob(f"checkpoint-*/{COMPLETE}")
        return sorted(int(n) for path in found if (n := path.parent.name.rpartition("-")[2]).isdigit())

    def rank_logs(self) -> dict[int, tuple[Path, ...]]:
        """What each rank of the newest attempt wrote: stdout.log and stderr.log. Empty without torchrun.

        The log itself holds all of it in order: reading's `rank` picks one rank's lines there.
        """
        attempts = [(path.stat().st_mtime_ns, path) for path in (self.path / RANK_LOGS).glob("*/attempt_*")]
        if not attempts:
            return {}
        ranks = sorted(int(path.name) for path in max(attempts)[1].iterdir() if path.name.isdigit())
        newest = max(attempts)[1]
        return {rank: tuple(sorted((newest / str(rank)).glob("std*.log"), reverse=True)) for rank in ranks}

    def failure(self) -> dict[str, Any] | None:
        """Why it failed: sentence, help, traceback, rank (None: the launcher), fields. None if it did not."""
        state, kept = self.state, self._json(STATE)
        broke_off = state == "stopped" and kept.get("exit_code") and not kept.get("forced")
        if state != "failed" and not broke_off:
            return None
        found = self._failure()
        return {
            "sentence": found.sentence, "help": found.help, "traceback": found.traceback, "rank": found.rank,
            "fields": list(found.fields),
        }  # fmt: skip

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """A line of the list of runs. Times are unix seconds, `now` too (default: now); unknown is None."""
        now = time.time() if now is None else now
        plan, state, kept, progress = self._json(PLAN), self.state, self._json(STATE), self.progress()
        points = last_points(self.path / METRICS)
        about, shell = plan.get("about", {}), self._text(LOCK).strip() == SHELL
        alive = state in ALIVE
        step = progress.get("step") or next((p["step"] for p in reversed(points) if "step" in p), None)
        most = progress.get("max_steps") or (self._json(PROGRESS) or {}).get("max_steps")
        usual = throughput.seconds_a_step(progress, points) if state == "running" else None
        fraction = progress.get("fraction")
        if fraction is None and step is not None and most:
            fraction = min(1.0, step / most)
        summary = {
            "id": self.id,
            "name": plan.get("name", self.id),
            "state": state,
            "started": self._stamp(LOCK) if shell or alive else kept.get("started"),
            "ended": None if alive or state == "new" else (not shell and kept.get("ended")) or self._last_sign(),
            "step": step,
            "max_steps": most,
            "loss": next((p["loss"] for p in reversed(points) if "loss" in p), None),
            "fraction": 1.0 if state == "done" else fraction,
            "eta_seconds": throughput.eta(progress, usual, now),
            "method": about.get("method", ""),
            "model": about.get("model", ""),
            "created": plan.get("created"),
        }
        return summary | {"sentence": self._sentence(summary, progress, usual, now)}

    # -- parts -----------------------------------------------------------------------------------------------------

    def _living(self) -> str:
        if (self.path / STOP).exists():
            return "stopping"
        return "running" if self._fresh(PROGRESS) or self._fresh(METRICS) else "starting"

    def _sentence(self, summary: dict[str, Any], progress: dict[str, Any], usual: float | None, now: float) -> str:
        """Calm and plain, with the next step where the run waits for a person."""
        state, step = summary["state"], summary["step"]
        if state == "new":
            return "Ready to start."
        if state == "starting":
            names = [f"{node}.sh" for node in self.joining()]
            others = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"
            wait = f" It begins once {others} in the run's folder is started on the other nodes." if others else ""
            return f"Starting: the processes load their libraries.{wait}"
        if state == "running":
            return throughput.running(summary, progress, usual, now)
        if state == "stopping":
            wish = self._text(STOP)
            return "Stopping without saving." if wish == "discard" else "Stopping: the step ends, then it is saved."
        if state == "done":
            steps = f"{step} steps in " if step else "in "
            taken = throughput.duration(max(0.0, summary["ended"] - (summary["started"] or summary["ended"])))
            return f"Done: {steps}{taken}."
        at = f" at step {step}" if step else ""
        saved = self.checkpoints()
        again = "No checkpoint was saved, so it would begin at step 0."
        if saved:
            again = f"Resume continues from checkpoint {saved[-1]}."
        if state == "stopped":
            failure = self.failure()
            return f"Stopped{at}. {failure['sentence'] if failure else again}"
        if state == "failed":
            return f"Failed{at}. {self._failure().sentence}"
        return f"Lost{at}: its supervisor was killed, or the machine went down. {again}"

    def _failure(self) -> Failure:
        with contextlib.suppress(OSError):
            log, since = (self.path / LOG).stat(), (self.path / LOCK).stat().st_mtime_ns
            kept = {} if self._text(LOCK).strip() == SHELL else self._json(STATE)
            return _diagnosed(self.path, since, log.st_size, log.st_mtime_ns, json.dumps(kept))
        return diagnose(self.path, 0, self._json(STATE))

    def _fresh(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return (self.path / name).stat().st_mtime_ns >= (self.path / LOCK).stat().st_mtime_ns
        return False

    def _stamp(self, name: str) -> float | None:
        with contextlib.suppress(OSError):
            return (self.path / name).stat().st_mtime
        return None

    def _last_sign(self) -> float | None:
        """When the run last wrote anything: all that is known of an end that nobody wrote down."""
        return max((s for name in (LOG, METRICS, PROGRESS, RESULT) if (s := self._stamp(name))), default=None)

    def _text(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self._text(name) or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def runs(root: Path) -> list[Run]:
    """All runs under `root`, newest first; folders that are half made or half deleted are not among them."""
    try:
        names = sorted((entry.name for entry in os.scandir(root) if entry.name[0] != "."), reverse=True)
    except OSError:
        return []
    return [Run(root / name) for name in names if (root / name / PLAN).is_file()]


def find(root: Path, name: str) -> Run:
    """The run with this id. Raises RunError; a name that leads out of `root` is unknown too."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) and (root / name / PLAN).is_file():
        return Run(root / name)
    raise RunError(f"There is no run {name!r}.")


def _settle(half: Path, target: Path) -> Path:
    """Move `half` to `target`, or to the first free name beside it. A folder with files in it is never replaced."""
    for number in range(1, 1000):
        place = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            half.rename(place)
            return place
        except OSError:
            if not place.exists():
                raise
    raise OSError(17, "a thousand runs of this name were made in one second")


def _umask() -> int:
    """What new files may not grant. There is no way to read it without setting it, but Linux tells."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o022


@lru_cache(maxsize=512)
def _diagnosed(path: Path, since_ns: int, size: int, changed_ns: int, state: str) -> Failure:
    """As `diagnose`, once for each end of a run: lists of runs ask again and again."""
    del size, changed_ns  # what makes the answer another one
    return diagnose(path, since_ns, json.loads(state))
