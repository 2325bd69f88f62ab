"""Devices, collective backends, and how the ranks of a run communicate outside of training.

Separate gloo groups carry what is not training. Ranks agree on a stop within parallel.ddp_timeout, but wait for each
other's preparation and checkpoints as long as these take, while the heartbeats show that all ranks run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import resource
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backend import registry
from backend.runs import ERROR_FILE, RANK
from backend.train import rendezvous
from backend.train.heartbeat import Heartbeat
from backend.train.run_log import TrainError
from backend.train.stacks import Stacks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PREPARATION_TIMEOUT = timedelta(days=2)


def device_count(family: str) -> int:
    """Devices of this type that torch can use."""
    if family == "cpu":
        return 1
    if family == "mps":
        return int(torch.backends.mps.is_available())
    if family == "npu":
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_npu")  # makes torch.npu
    module = getattr(torch, family, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def collective_backend(family: str) -> str:
    """The collective backend of a device type. Raises TrainError where torch has none for several processes."""
    if family == "xpu" and not getattr(dist, "is_xccl_available", lambda: False)():
        # accelerate 1.15 state.py: each process would silently train alone.
        raise TrainError(
            "launch.device: several Intel GPUs need a build of torch with XCCL. Install one, or use one process."
        )
    return registry.DEVICES[family].backends[0]


def fp8_recipe(backend: str) -> Any:
    """accelerate's recipe for one of the packages."""
    utils: Any = importlib.import_module("accelerate.utils")
    if backend == "te":
        return utils.TERecipeKwargs()
    # If FSDP gathered weights in float8, they could not be saved.
    return utils.AORecipeKwargs(enable_fsdp_float8_all_gather=False)


def to_fp8(model: Any, backend: str) -> None:
    """Replace the linear layers of a reference model by fp8 layers. accelerate replaces those of the model that trains:
    both would compute other log-probabilities, although they have the same weights."""
    if backend == "torchao":
        utils: Any = importlib.import_module("accelerate.utils.ao")
        utils.convert_model_to_fp8_ao(model, config=fp8_recipe(backend).config)


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def settle(needs_collectives: bool) -> None:
    """Make a single process look like one to the libraries: no process group, no DDP around the model. DeepSpeed
    needs a group even then, and the python launcher sets up none."""
    if "LOCAL_SIZE" in os.environ:
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])  # DeepSpeed's launcher sets LOCAL_SIZE
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    if not needs_collectives:
        for name in (*ALONE, *ADDRESS):
            os.environ.pop(name, None)
    elif "RANK" not in os.environ:
        os.environ.update(ALONE)


def start_deepspeed(family: str) -> None:
    """Start DeepSpeed's communication before the model is created: transformers enters zero.Init earlier and would
    see a world size of 1."""
    deepspeed: Any = importlib.import_module("deepspeed")  # seconds: only where it is used
    deepspeed.init_distributed(dist_backend=collective_backend(family), auto_mpi_discovery=False)


class ProcessGroup:
    """The ranks of a run, and how they agree. With one process all methods return at once."""

    def __init__(self) -> None:
        rendezvous.apply()
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._group: Any = None
        self._step_group: Any = None
        self._heartbeat: Heartbeat | None = None

    def sign(self) -> None:
        """Write the global rank next to this rank's error file: torchrun's folders are named by the local rank."""
        path = os.environ.get(ERROR_FILE, "")
        if path and "TORCHELASTIC_RUN_ID" in os.environ:
            with contextlib.suppress(OSError):
                Path(path).with_name(RANK).write_text(str(self.rank), encoding="utf-8")

    def meet(self, folder: Path, timeout: float) -> None:
        """Create the gloo groups and start the heartbeat; with several ranks torch's process group must exist.
        `timeout`: parallel.ddp_timeout."""
        if self.world == 1:
            return
        self._heartbeat = Heartbeat(self.rank, self.world, timeout, Stacks(folder, self.rank))
        self._group = dist.new_group(backend="gloo", timeout=PREPARATION_TIMEOUT)
        self._step_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._heartbeat.start()

    def agree(self, number: int = 0) -> int:
        """The largest `number` of all ranks. A collective call."""
        return _largest(number, self._group)

    def agree_on_step(self, number: int) -> int:
        """Same as `agree`, right after a training step: a rank that does not join within parallel.ddp_timeout is an
        error."""
        return _largest(number, self._step_group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order. A collective call."""
        return self._gathered(value, self._group)

    def gather_on_step(self, value: Any) -> list[Any]:
        """Same as `gather`, right after a training step and within parallel.ddp_timeout."""
        return self._gathered(value, self._step_group)

    def _gathered(self, value: Any, group: Any) -> list[Any]:
        if group is None:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value, group=group)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's value. A collective call."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def limit_collectives(self) -> None:
        """Set parallel.ddp_timeout for every process group of the training: transformers 5.23 sets it for the default
        group only, and on a CPU not even there; DeviceMesh and DeepSpeed create groups with torch's default."""
        if self._heartbeat is None:
            return
        timeout = timedelta(seconds=self._heartbeat.timeout)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported")  # not for XCCL and HCCL
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not self._group:
                    dist.distributed_c10d._set_pg_timeout(timeout, group)

    def check_timeout(self, error: RuntimeError) -> None:
        """Raise TrainError that names the ranks that others waited for, if `error` is a time-out of a collective."""
        if self._heartbeat is not None:
            self._heartbeat.check_timeout(error)

    def leave(self) -> None:
        """Destroy the process groups: without this a rank can abort when its peers end first."""
        if self._heartbeat is not None:
            self._heartbeat.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def _largest(number: int, group: Any) -> int:
    if group is None:
        return number
    value = torch.tensor(number, dtype=torch.int64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return int(value)


def peak_bytes(family: str) -> int:
    """Peak memory of this process: allocated on its device, or resident in RAM for the CPU."""
    if family in ("cuda", "xpu", "npu"):
        return int(getattr(torch, family).max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def memory_bytes(family: str) -> int:
    """Memory of this process now: reserved by torch on its device, or resident in RAM for the CPU."""
    if family in ("cuda", "xpu", "npu"):
        return int(getattr(torch, family).memory_reserved())
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:  # macOS
        return peak_bytes(family)


def reserved_bytes(family: str) -> int | None:
    """Peak memory that torch reserved on the device, used or not; None for the CPU."""
    return int(getattr(torch, family).max_memory_reserved()) if family in ("cuda", "xpu", "npu") else None


def used_bytes(family: str) -> int | None:
    """Memory of the device that all processes use now, as its driver counts it; None for the CPU."""
    if family not in ("cuda", "xpu", "npu"):
        return None
    free, total = getattr(torch, family).mem_get_info()
    return int(total - free)


def synchronize(family: str) -> None:
    """Wait until the device has finished its work, so that measured times are right."""
    if family != "cpu":
        getattr(torch, family).synchronize()
