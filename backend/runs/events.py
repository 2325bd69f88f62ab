"""events.jsonl: what happened to a run while it trained, one JSON object per line, appended by rank 0.

An event has `kind`, `step`, `time` (Unix seconds) and `text`. Kinds are SAVED, RESUMED and those of health.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from backend.runs import EVENTS, files, health, json_values

SAVED, RESUMED = "saved", "resumed"
MAX_BYTES = 1_000_000  # of the end of the file that is read


def read(folder: Path) -> list[dict[str, Any]]:
    """The events of a run, without those of steps that a resumed run repeats."""
    found: list[dict[str, Any]] = []
    for event in since(folder, 0)[0]:
        if event["kind"] == RESUMED:
            found = [earlier for earlier in found if earlier["kind"] == RESUMED or earlier["step"] <= event["step"]]
        found.append(event)
    return found


def newest(folder: Path, count: int) -> list[dict[str, Any]]:
    """The last `count` alerts and the last `count` other events, in their order: saves do not displace an alert."""
    kept: list[dict[str, Any]] = []
    found = Counter[bool]()
    for event in reversed(read(folder)):
        is_alert = event["kind"] in health.KINDS
        found[is_alert] += 1
        if found[is_alert] <= count:
            kept.append(event)
    return kept[::-1]


def alerts(folder: Path) -> list[dict[str, Any]]:
    """The events of a run that need a user's attention."""
    return [event for event in read(folder) if event["kind"] in health.KINDS]


def since(folder: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The events in complete lines after `offset`, in bytes, and the next offset."""
    try:
        with files.open_to_read(folder / EVENTS) as file:
            size = file.seek(0, 2)
            file.seek(max(offset if offset <= size else 0, size - MAX_BYTES))
            data = file.read(MAX_BYTES)
            end = file.tell()
    except OSError:
        return [], offset
    complete = data.rfind(b"\n") + 1
    return [event for line in data[:complete].splitlines() if (event := _event(line))], end - len(data) + complete


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        found = json_values.parse(line.decode("utf-8", "replace"))
        return {"kind": str(found["kind"]), "step": int(found["step"]), "text": str(found.get("text", ""))} | {
            "time": float(found.get("time", 0))
        }
    except (ValueError, KeyError, TypeError, OverflowError):  # cut off by a crash, or written by someone else
        return None
