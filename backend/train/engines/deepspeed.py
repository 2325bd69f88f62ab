"""DeepSpeed: ZeRO, offload, Ulysses sequence parallelism."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch import distributed as dist

from backend.runs import DEEPSPEED
from backend.train import deepspeed_ops, device, kernels
from backend.train.engines.base import TrainEngine
from backend.train.patches import (
    deepspeed_first_step,
    peft_reference_adapter,
    ulysses_epochs,
    ulysses_gradients,
    ulysses_heads,
    ulysses_padding,
    ulysses_skip_batches,
)
from backend.train.run_log import RunLog, TrainError


class TrainDeepSpeed(TrainEngine):
    """DeepSpeed's engine at any ZeRO stage."""

    preparation: ClassVar[str] = "Preparing DeepSpeed."

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        """The arguments for deepspeed.json, and with sequence parallelism for the mesh."""
        found = super().trainer_arguments(folder)
        found |= {"deepspeed": str(folder / DEEPSPEED), "ddp_timeout": self.spec.parallel.ddp_timeout}
        return found | (self._ulysses() if self.run.sequence_parallel_size > 1 else {})

    def _ulysses(self) -> dict[str, Any]:
        """Sequences are padded to a length that can be divided; gloo gathers equal lengths only."""
        size, on_cpu = self.run.sequence_parallel_size, self.run.device == "cpu"
        handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=kernels.attn_implementation(self.spec))
        config = ParallelismConfig(
            dp_replicate_size=self.world_size // size, sp_size=size, sp_backend="deepspeed", sp_handler=handler
        )
        longest = -(-self.spec.data.max_length // size) * size
        return {"parallelism_config": config, "pad_to_multiple_of": longest if on_cpu else size}

    def build_kernels(self, run_log: RunLog) -> None:
        """Operators that DeepSpeed compiles."""
        deepspeed_ops.build(self.run, run_log)

    def start(self, config: Any) -> None:
        """Start DeepSpeed's communication before the model is made."""
        device.start_deepspeed(self.run.device)
        if self.run.zero_stage == 0:
            deepspeed_first_step.apply()
        if self.run.zero_stage == 3:
            peft_reference_adapter.apply()
        if self.run.sequence_parallel_size > 1:
            ulysses_epochs.apply()
            ulysses_skip_batches.apply()
            ulysses_padding.apply()
            if self.run.zero_stage < 3:
                ulysses_gradients.apply(self.run.sequence_parallel_size)

    def prepare_config(self, config: Any) -> None:
        """Ulysses reads the sizes of attention heads from the config."""
        if self.run.sequence_parallel_size > 1:
            ulysses_heads.apply(config)

    def full_state_dict(self, trainer: Any) -> dict[str, Any] | None:
        """At ZeRO stage 3, DeepSpeed gathers the weights."""
        if self.run.zero_stage != 3 or not dist.is_initialized():
            return None
        return dict(trainer.accelerator.get_state_dict(trainer.model_wrapped) or {})

    @contextmanager
    def scratch_folder(self) -> Iterator[None]:
        """Hold the run's NVMe folder, and delete the gigabytes that DeepSpeed leaves in it. Its files have fixed names,
        so two runs in one folder would overwrite each other's state. Raises TrainError."""
        parallel = self.spec.parallel
        used = self.run.zero_stage == 3 and "nvme" in (parallel.offload_optimizer, parallel.offload_param)
        if not used or os.environ.get("LOCAL_RANK", "0") != "0":
            yield
            return
        folder = Path(parallel.nvme_path).expanduser()
        if not parallel.nvme_path or not folder.is_dir():
            raise TrainError(f"parallel.nvme_path: there is no folder {parallel.nvme_path or '(empty)'}.")
        with (folder / "footplate.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise TrainError(f"parallel.nvme_path: another run uses {folder}. Set another folder.") from None
            try:
                yield
            finally:
                shutil.rmtree(folder / "zero_stage_3", ignore_errors=True)
