"""The amber mark of a run whose result needs attention although it did not fail: a short name, and the reason."""

from __future__ import annotations

from typing import NamedTuple

from backend.runs import events, health, lost_weights
from backend.runs.folder import Run


class Mark(NamedTuple):
    """`name` for the list of runs, `sentence` for the run's page; both are '' without a mark."""

    name: str = ""
    sentence: str = ""


def mark(run: Run, state: str = "") -> Mark:
    """The mark of a run; `state` is its state, if the caller knows it."""
    if lost := lost_weights.warning(run):
        return Mark("Weights lost?", lost)
    if (state or run.state) == "done":
        for event in reversed(events.alerts(run.path)):
            if event["kind"] == health.RISE:
                return Mark("Loss rose", f"{event['text']} The model is probably worse than before training.")
    return Mark()
