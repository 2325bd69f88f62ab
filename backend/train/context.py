"""TrainContext: what the phases of a training share, and how its ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend.config import RunSpec
from backend.resolve import ResolvedRun
from backend.train import device
from backend.train.engines import TrainEngine
from backend.train.run_log import RunLog, Stopped, TrainError


@dataclass
class TrainContext:
    """One start of a run: spec, resolved run, engine, ranks and log."""

    spec: RunSpec
    folder: Path
    from_scratch: bool
    group: device.ProcessGroup
    run_log: RunLog
    run: ResolvedRun
    engine: TrainEngine
    stream: Any = None
    """A streaming.Stream of training examples, with data.streaming."""
    loaded_bytes: int = 0
    """Bytes of weights that this rank had in memory when the model was loaded."""
    saved_dtype: torch.dtype = torch.float32
    """The dtype of the saved model; found before training, because the Hub may not respond at its end."""
    use_cache: bool | None = None
    """`use_cache` in the base model's config.json, which saved models keep; None if config.json does not have it."""

    def check_stop(self) -> None:
        """Raise Stopped on all ranks if a stop was requested on one. A collective call."""
        if self.group.agree(self.run_log.stop_requested()):
            raise Stopped

    def first(self, work: Any) -> Any:
        """Call `work` on rank 0 while the others wait; a TrainError of it is raised on all ranks."""
        result, error = None, ""
        if self.group.rank == 0:
            try:
                result = work()
            except TrainError as caught:
                if self.group.world == 1:
                    raise
                error = str(caught)
        error = self.group.share(error)
        if error:
            raise TrainError(error)
        self.check_stop()
        return result

    def telling(self, phase: str) -> Any:
        """A function of (text, fraction) that shows progress; each new text is also logged, without its numbers."""
        logged: set[str] = set()

        def tell(text: str, fraction: float | None) -> None:
            head = text.partition(":")[0]  # numbers that change come after a colon
            if head not in logged:
                self.run_log.info(text)
                logged.add(head)
            self.run_log.progress(phase, text, fraction)

        return tell

    def tick(self, phase: str, text: str, unit: str = "") -> Any:
        """A function of (done, total) that shows progress and returns False once a stop is requested. With `unit`, the
        name of what is counted in the singular, the numbers are shown too."""

        def tick(done: int, total: int) -> bool:
            numbers = {"done": done, "total": total, "unit": unit} if unit else {}
            self.run_log.progress(phase, text, done / total if total else None, **numbers)
            return not self.run_log.stop_requested()

        return tick
