"""TrainEngine: what the Trainer is told about a strategy, how its engine starts, and how weights are gathered.

The base class is one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from backend.config import RunSpec
from backend.resolve import ResolvedRun
from backend.train import device
from backend.train.run_log import RunLog


@dataclass(frozen=True)
class TrainEngine:
    """The engine of one run. `world_size`: the processes that there are now."""

    spec: RunSpec
    run: ResolvedRun
    world_size: int
    preparation: ClassVar[str] = ""  # logged before the engine wraps the model, where that can take long

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        """The arguments of TrainingArguments that belong to the strategy; `folder` is the run's."""
        return {"dataloader_pin_memory": self.run.device == "cuda"}

    def build_kernels(self, run_log: RunLog) -> None:
        """Compile what the engine would compile on its first use on a machine. Before the process group starts."""

    def start(self, config: Any) -> None:
        """Start the engine, between the TrainingArguments `config` (which start the process group) and the model."""

    def load_arguments(self) -> dict[str, Any]:
        """Further arguments of `from_pretrained`."""
        return {}

    def prepare_config(self, config: Any) -> None:
        """Complete the model's configuration with what the engine reads from it."""

    def check_model(self, model: torch.nn.Module) -> None:
        """Raise TrainError for what only the loaded model can show."""

    def full_state_dict(self, trainer: Any) -> dict[str, Any] | None:
        """The weights gathered from all ranks, on rank 0; None where each rank has all of them. A collective call."""
        if not self.run.engine.strategy.shards_weights or not dist.is_initialized():
            return None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(trainer.model, options=options))

    @contextmanager
    def scratch_folder(self) -> Iterator[None]:
        """Hold what the engine keeps on disk while the run lives, and delete it at the end."""
        yield

    def _process_group(self) -> dict[str, Any]:
        """The arguments of every engine with a process group that torch starts."""
        if self.world_size == 1:
            return {}
        backend = device.collective_backend(self.run.device)
        return {"ddp_backend": backend, "ddp_timeout": self.spec.parallel.ddp_timeout}
