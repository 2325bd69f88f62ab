"""DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.train.engines.base import TrainEngine


class TrainDDP(TrainEngine):
    """A full replica on each device."""

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        """The arguments for process group, buckets and unused parameters."""
        found = super().trainer_arguments(folder)
        if self.world_size == 1:
            return found
        parallel = self.spec.parallel
        buckets = {
            "ddp_find_unused_parameters": parallel.ddp_find_unused_parameters,
            "ddp_bucket_cap_mb": parallel.bucket_cap_mb,
        }
        return found | self._process_group() | buckets
