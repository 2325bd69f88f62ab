"""One start of a run: what its phases share, and how they wait for one another.

Beside the floors. Imports spec, device, journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.resolve import ResolvedRun
from backend.train import device
from backend.train.engines import TrainEngine
from backend.train.run_log import RunLog, Stopped, TrainError


@dataclass
class TrainContext:
    """One start of a run."""

    spec: RunSpec
    folder: Path
    from_scratch: bool
    group: device.ProcessGroup
    run_log: RunLog
    run: ResolvedRun
    engine: TrainEngine
    loaded_bytes: int = 0
    """Bytes of weights that this rank had in memory when the model was loaded."""

    @property
    def family(self) -> str:
        """The device type."""
        return self.run.device

    @property
    def precision(self) -> str:
        """bf16, fp16 or fp32."""
        return self.run.compute_dtype

    def check_stop(self) -> None:
        """Raise Stopped on all ranks if one was asked to stop."""
        if self.group.agree(self.run_log.stop_requested()):
            raise Stopped

    def first(self, work: Any) -> Any:
        """Do `work` on rank 0 while the others wait; a TrainError of it is raised on all ranks."""
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
        """A function of (text, share) that shows progress; what is new in the text is also a line of the log."""
        said: set[str] = set()

        def tell(text: str, share: float | None) -> None:
            head = text.partition(":")[0]  # behind a colon stand numbers that move
            if head not in said:
                self.run_log.info(text)
                said.add(head)
            self.run_log.progress(phase, text, share)

        return tell

    def tick(self, phase: str, text: str) -> Any:
        """A function of (done, all) that shows progress, and is false once a stop is asked for."""

        def tick(done: int, of: int) -> bool:
            self.run_log.progress(phase, text, done / of if of else None)
            return not self.run_log.stop_requested()

        return tick
