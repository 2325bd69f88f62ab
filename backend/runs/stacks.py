"""What each rank of a run is doing: its Python stack, and the collectives that torch's Flight Recorder has recorded.

The trainer (`train/stacks.py`) lets faulthandler write the stacks of all threads when SIGUSR2 arrives, which also works
while the main thread waits in native code, and needs no permission to trace processes. Its heartbeat thread writes the
recorded collectives.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.runs import LLAMAFACTORY, PLAN, STACKS, files, json_values, processes, replace_text

SECONDS = 8.0  # to wait for the ranks' files; a heartbeat thread checks for requests at least every five seconds
REQUEST = "request"  # in STACKS: its modification time is that of the last request
BEHIND_SECONDS = 1.0  # after which a rank that has not entered a collective is named
POLL_SECONDS = 0.05
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
NOT_LOADED = "The ranks have not loaded their libraries yet."
ENDED = "This run is not running. Its processes have ended."
HEADER = re.compile(r"PID (\d+), started at (\d+), on (\S+)\n")


@dataclass(frozen=True)
class Collective:
    """`number` counts the collectives of a process group; `entered` in Unix seconds."""

    number: int
    name: str
    entered: float


@dataclass(frozen=True)
class RankStack:
    """What one rank does. `condition`: "running", "stopped" (by a signal), "silent" (no answer), "ended" or
    "elsewhere" (on another host). `frames` of the main thread, innermost first: (file, line, function). `collectives`:
    process group -> the last one that the rank had entered at `time` (Unix seconds; 0: not known)."""

    rank: int
    pid: int
    host: str
    condition: str
    text: str = ""
    frames: tuple[tuple[str, int, str], ...] = ()
    collectives: Mapping[str, Collective] = field(default_factory=dict)
    time: float = 0.0


def collect(folder: Path, seconds: float = SECONDS) -> list[RankStack]:
    """Ask every rank on this host for its stacks, and wait for them. Ranks that have not started yet are absent."""
    place = folder / STACKS
    headers = {int(path.stem): path for path in place.glob("*.txt") if path.stem.isdigit()}
    if not headers:
        return []
    alive = processes.run_processes(folder)
    asked = {rank: _ask(path, alive) for rank, path in sorted(headers.items())}
    request = secrets.token_hex(8)  # in each answer: a time would not do if the clock was set back
    with contextlib.suppress(OSError):  # a full disk: the signal has requested the stacks all the same
        replace_text(place / REQUEST, request)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(
        condition != "running" or _answered(path, request)
        for path, condition in ((headers[rank], condition) for rank, condition in asked.items())
    ):
        time.sleep(POLL_SECONDS)
    return [_read(rank, headers[rank], condition) for rank, condition in asked.items()]


def why_none(folder: Path) -> str:
    """Why no rank of a run that is alive has reported anything, as a sentence."""
    about = json_values.read_object(folder / PLAN).get("about")
    is_job = isinstance(about, dict) and about.get("kind")
    if is_job or (folder / LLAMAFACTORY).exists():
        return "Only the ranks of Footplate's own trainer report what they are doing. See the end of the log."
    return NOT_LOADED


def explain(stacks: Iterable[RankStack], now: float | None = None, none: str = NOT_LOADED) -> str:
    """Which ranks wait, and for which; `none` without any. `now`: Unix seconds (default: the current time)."""
    found = list(stacks)
    if not found:
        return none
    behind = _behind(found, time.time() if now is None else now)
    sentences = [behind] if behind else []
    doing: dict[str, list[int]] = {}
    for stack in found:
        doing.setdefault(_doing(stack), []).append(stack.rank)
    for what, ranks in sorted(doing.items(), key=lambda item: item[1]):
        sentences.append(f"{_names(ranks)}: {what}.")
    return " ".join(sentences)


def _ask(path: Path, alive: set[processes.Process]) -> str:
    """Send the signal; the condition of the rank. Without the trainer's handler, the signal would end a process, so it
    is sent only to the process that wrote `path` and belongs to this run."""
    header = HEADER.match(_text(path))
    if not header:
        return "ended"
    pid, started, host = int(header[1]), int(header[2]), header[3]
    if host != socket.gethostname():
        return "elsewhere"
    if processes.Process(pid, started) not in alive:
        return "ended"
    if processes.condition(pid) in ("T", "t"):
        return "stopped"
    with contextlib.suppress(OSError):
        os.truncate(path, header.end())
        os.kill(pid, signal.SIGUSR2)
    return "running"


def _answered(path: Path, request: str) -> bool:
    """Whether the stacks are complete and, if the rank has a heartbeat, the collectives were written for `request`."""
    if "most recent call first" not in (text := _text(path)) or not text.endswith("\n"):
        return False
    answer = path.with_suffix(".json")
    return not answer.exists() or f'"request": "{request}"' in _text(answer)


def _read(rank: int, path: Path, condition: str) -> RankStack:
    text = _text(path)
    header = HEADER.match(text)
    if not header:
        return RankStack(rank, 0, "", condition)
    text = text[header.end() :]
    if condition == "running" and not text:
        condition = "silent"
    if condition in ("stopped", "ended"):
        return RankStack(rank, int(header[1]), header[3], condition)
    main = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
    frames = tuple((file, int(line), function) for file, line, function in FRAME.findall(main))
    when, collectives = _collectives(path.with_suffix(".json"))
    return RankStack(rank, int(header[1]), header[3], condition, text, frames, collectives, when)


def _collectives(path: Path) -> tuple[float, dict[str, Collective]]:
    """When the rank wrote its collectives, and process group -> the collective that the rank entered last."""
    try:
        kept = json_values.parse(_text(path))
        return float(kept["time"]), {group: Collective(*values) for group, values in kept["last"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0.0, {}


def _behind(stacks: Sequence[RankStack], now: float) -> str:
    """Which ranks have not entered a collective that others of the same process group wait in."""
    for group in sorted({group for stack in stacks for group in stack.collectives}):
        found = {s.rank: s.collectives[group] for s in stacks if group in s.collectives}
        most = max(found.values(), key=lambda collective: collective.number)
        ahead = [rank for rank, collective in found.items() if collective.number == most.number]
        entered = max(found[rank].entered for rank in ahead)
        # The ranks are not asked at the same instant, and a step is not equally long on each.
        behind = [s for s in stacks if s.rank not in ahead and (s.rank in found or not s.collectives)]
        behind = [s for s in behind if (s.time or now) - entered > BEHIND_SECONDS]
        if behind:
            seconds = round(max(s.time or now for s in behind) - entered)
            return (
                f"{_names(ahead)} entered {most.name} (collective {most.number} of the process group) {seconds} s ago; "
                f"{_names([s.rank for s in behind]).lower()} did not."
            )
    return ""


def _names(ranks: list[int]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _doing(stack: RankStack) -> str:
    """What the process does, without its rank."""
    conditions = {
        "stopped": f"stopped by a signal; kill -CONT {stack.pid} continues it",
        "ended": "no process",
        "elsewhere": f"on host {stack.host}; run footplate stacks there",
        "silent": "no answer within the time limit, perhaps waiting for a disk or a device driver",
    }
    if stack.condition in conditions:
        return conditions[stack.condition]
    if not stack.frames:
        return "running no Python code"
    innermost, where = stack.frames[0][2], f"{_short(stack.frames[0][0])}, line {stack.frames[0][1]}"
    if innermost in ("synchronize", "item", "tolist", "cpu"):
        return f"waiting for the device in {innermost} ({where})"
    return _waits(stack.frames) or f"in {innermost} ({where})"


def _waits(frames: Sequence[tuple[str, int, str]]) -> str:
    """What the rank waits for: other ranks or data; '' if neither."""
    for place, (file, _, function) in enumerate(frames[:15]):
        if file.endswith("distributed_c10d.py") and function != "wrapper":
            callers = [f for f in frames[place + 1 :] if "c10d" not in f[0] and f[2] not in ("wrapper", "inner")]
            called = f", called by {callers[0][2]} ({_short(callers[0][0])}, line {callers[0][1]})" if callers else ""
            return f"waiting in {function}{called}"
        if function == "_engine_run_backward":
            return "in the backward pass, where gradients are also exchanged"
        if file.endswith("utils/data/dataloader.py"):
            return "waiting for the data loader"
    return ""


def _short(path: str) -> str:
    """The path from the package on."""
    return path.rpartition("site-packages/")[2] if "site-packages/" in path else "/".join(Path(path).parts[-3:])


def as_json(stacks: Iterable[RankStack], none: str = NOT_LOADED) -> dict[str, Any]:
    """The explanation, `none` without a rank, and for each rank its condition and stacks."""
    found = list(stacks)
    ranks = [{"rank": s.rank, "pid": s.pid, "host": s.host, "condition": s.condition, "text": s.text} for s in found]
    return {"explanation": explain(found, none=none), "ranks": ranks}


def _text(path: Path) -> str:
    try:
        return files.read_text(path, errors="replace")
    except OSError:
        return ""
