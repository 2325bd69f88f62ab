"""One start of a run: what its phases share, and how they wait for one another.

Beside the floors. Imports spec, device, journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.train import device
from backend.train.run_log import RunLog, Stopped, TrainError


@dataclass
class TrainContext:
    """One start of a run."""

    spec: RunSpec
    folder: Path
    from_scratch: bool
    team: device.ProcessGroup
    journal: RunLog
    family: str = "cpu"
    precision: str = "fp32"
    loaded: int = 0
    """Bytes of weights that this rank had in memory when the model was loaded."""

    def check_stop(self) -> None:
        """Raise Stopped on all ranks if one was asked to stop."""
        if self.team.agree(self.journal.stop_asked()):
            raise Stopped

    def first(self, work: Any) -> Any:
        """Do `work` on rank 0 while the others wait; a TrainError of it is raised on all ranks."""
        result, error = None, ""
        if self.team.rank == 0:
            try:
                result = work()
            except TrainError as caught:
                if self.team.world == 1:
                    raise
                error = str(caught)
        error = self.team.share(error)
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
                self.journal.say(text)
                said.add(head)
            self.journal.phase(phase, text, share)

        return tell

    def tick(self, phase: str, text: str) -> Any:
        """A function of (done, all) that shows progress, and is false once a stop is asked for."""

        def tick(done: int, of: int) -> bool:
            self.journal.phase(phase, text, done / of if of else None)
            return not self.journal.stop_asked()

        return tick
