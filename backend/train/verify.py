"""What a run was planned for, compared with where it really runs: resolved.json and what each rank finds."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

import torch

from backend import registry
from backend.config import RunSpec
from backend.config.options import SpecError, effective
from backend.inspect.worker import installed_versions
from backend.presets import read
from backend.resolve import ResolvedRun
from backend.runs import RESOLVED, SPEC
from backend.train import device
from backend.train.run_log import TrainError

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets", "footplate")


def read_plan(folder: Path) -> tuple[RunSpec, ResolvedRun]:
    """spec.yaml and resolved.json of the run's folder. Raises TrainError."""
    try:
        spec = effective(read(folder / SPEC))
    except SpecError as error:
        raise TrainError(f"{error}.") from error
    try:
        return spec, ResolvedRun.from_json((folder / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise TrainError(
            f"{folder / RESOLVED} cannot be used ({error}). Create the run again with `footplate run {SPEC}`."
        ) from error


def position_limit(config: Any) -> int:
    """The positions in the table of a model that has one: it cannot compute longer texts. 0 for other models."""
    if config.model_type not in registry.POSITION_TABLES:
        return 0
    return int(getattr(config, "max_position_embeddings", 0) or getattr(config, "max_seq_len", 0))


def check_positions(spec: RunSpec, config: Any, longest: int) -> None:
    """Raise TrainError if a sequence of `longest` tokens needs more positions than the table of the model has. TRL
    truncates to data.max_length what KTO makes of a prompt and the completion of its neighbor."""
    longest, most = min(longest, spec.data.max_length), position_limit(config)
    if longest > most > 0:
        raise TrainError(
            f"data.max_length: the longest sequence has {longest:,} tokens, and the model has {most:,} position "
            f"embeddings. Set data.max_length to at most {most}. [DAT010]"
        )


def check_loss_weights(spec: RunSpec, with_weights: bool) -> None:
    """Raise TrainError if turns have weights other than 0 and 1, but the loss of the run has no weights."""
    if not with_weights:
        return
    from backend.rules.loss_weights import conflicts  # noqa: PLC0415 - all rules, which few ranks need

    for option, why, fix in conflicts(spec):
        raise TrainError(
            f"{option}: turns of the data have weights other than 0 and 1, but {why}. {fix.label}, or remove the "
            "weights. [DAT037]"
        )


def check_device(spec: RunSpec, run: ResolvedRun) -> None:
    """Raise TrainError if this rank's device is not the one that the run was planned for. bf16 that was chosen, not
    planned for the device, is allowed on any: PRC002 warns that it is slow."""
    count = device.device_count(run.device)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not count:
        raise TrainError(
            f"launch.device: the run was planned for {run.device}, which torch {torch.__version__} cannot use here. "
            "Install torch for that device, or plan the run on this machine."
        )
    if run.device != "cpu" and local > count:
        raise TrainError(
            f"launch.nproc_per_node: {local} processes need {local} devices, but torch sees {count}. Lower it, or "
            "check launch.devices."
        )
    if run.device == "cuda" and run.compute_dtype == "bf16" and spec.precision.compute == "auto":
        index = int(os.environ.get("LOCAL_RANK", "0")) % count
        capability = torch.cuda.get_device_capability(index)
        if torch.version.cuda and capability < (8, 0):  # torch's own check passes: it emulates bf16, slowly
            name = torch.cuda.get_device_name(index)
            raise TrainError(
                f"precision.compute: the run was planned for bf16, but rank {os.environ.get('RANK', '0')} is on {name} "
                f"(compute capability {capability[0]}.{capability[1]}), which has no bf16 units. Set it to fp16 or "
                "fp32, or select other GPUs with launch.devices."
            )


def check_ranks(spec: RunSpec, run: ResolvedRun, world_size: int) -> None:
    """Raise TrainError unless as many processes were started as the run was planned for."""
    least = run.nproc_per_node * spec.launch.min_nnodes if spec.launch.rendezvous == "elastic" else run.world_size
    if world_size not in range(least, run.world_size + 1, run.nproc_per_node):
        planned = f"{least} to {run.world_size}" if least < run.world_size else f"{run.world_size}"
        raise TrainError(
            f"parallel.strategy: the run was planned for {planned} processes, but {world_size} were started. Start it "
            "with its run.sh, set launch.launcher to torchrun, and set no distributed variables in launch.env."
        )


def check_versions(group: device.ProcessGroup) -> None:
    """Raise TrainError if the nodes have different versions of Python or of a library that trains. A collective
    call."""
    found = group.gather((socket.gethostname(), versions()))
    first_host, first = found[0]
    for host, others in found[1:]:
        for name, version in others.items():
            if version != first[name]:
                raise TrainError(
                    f"launch.nnodes: {host} has {name} {version or 'not installed'}, and {first_host} has "
                    f"{first[name] or 'not installed'}: all nodes need the same Python environment."
                )


def versions() -> dict[str, str]:
    """Name -> version of Python and of the libraries that train; '' for one that is not installed."""
    libraries = zip(LIBRARIES, installed_versions(*LIBRARIES), strict=True)
    return {"Python": platform.python_version(), **dict(libraries)}


def check_backend(run: ResolvedRun) -> None:
    """Raise TrainError if the process group does not use the planned backend."""
    if not run.backend or not torch.distributed.is_initialized():
        return
    found = torch.distributed.get_backend()
    planned = device.collective_backend(run.device)
    if found != planned:
        raise TrainError(f"The process group uses the {found} backend, but the run was planned for {planned}.")
