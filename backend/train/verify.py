"""What a run was planned for, compared with where it really runs.

The trainer runs the same rules as the page, on the machine that it is on, and compares resolved.json with what it finds
on each rank.
"""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backend.config import RunSpec
from backend.config.options import SpecError, effective
from backend.inspect import inspect_inputs
from backend.inspect.worker import SETTING as WORKER_SETTING
from backend.inspect.worker import installed_versions
from backend.machine import probe
from backend.presets import read
from backend.resolve import ResolvedRun
from backend.rules import Case, examine
from backend.rules.data import POSITION_TABLES
from backend.rules.loss_weights import conflicts
from backend.runs import RESOLVED, SKIP_CHECKS, SPEC, resume_point
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


def check_rules(spec: RunSpec, folder: Path) -> None:
    """Raise TrainError for the first error that the preflight rules find on this node, which need not be the machine
    that planned the run. One process per node checks; rules about the moment before launch are left out."""
    if os.environ.get(SKIP_CHECKS) or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    # No worker process to read an unknown architecture: this process is about to load the model itself.
    facts = inspect_inputs(spec, folder, {**os.environ, WORKER_SETTING: "off"})
    # Nor of lengths estimated from characters: this process is about to count the tokens.
    facts = replace(facts, token_lengths=(), min_prompt_tokens=0)
    if facts.adapter_problem and resume_point.find(folder).checkpoint:
        facts = replace(facts, adapter_problem="")  # the adapter is loaded at step 0 only, which checks it again
    found = examine(Case(spec, probe(folder), facts), at_start=False)
    later = () if spec.data.streaming else ("DAT010",)  # check_positions, with the lengths in tokens
    errors = [finding for finding in found if finding.level == "error" and finding.code not in later]
    if errors:
        first = errors[0]
        safe = [fix for fix in first.fixes if fix.safe]  # the page offers the others, with what they cost
        fix = f" Fix: {safe[0].label}." if safe else ""
        more = f" ({len(errors) - 1} more: {', '.join(e.title for e in errors[1:])}.)" if len(errors) > 1 else ""
        raise TrainError(f"{', '.join(first.fields)}: {first.title}. {first.message}{fix}{more} [{first.code}]")


def check_positions(spec: RunSpec, config: Any, longest: int) -> None:
    """Raise TrainError if an example of `longest` tokens needs more positions than the table of the model has. TRL
    truncates to data.max_length what KTO makes of a prompt and the completion of its neighbor."""
    longest = min(longest, spec.data.max_length)
    most = getattr(config, "max_position_embeddings", 0) or getattr(config, "max_seq_len", 0)
    if config.model_type in POSITION_TABLES and longest > most > 0:
        raise TrainError(
            f"data.max_length: the longest example has {longest:,} tokens, and the model has {most:,} position "
            f"embeddings. Set data.max_length to at most {most}. [DAT010]"
        )


def check_loss_weights(spec: RunSpec, with_weights: bool) -> None:
    """Raise TrainError if turns have weights other than 0 and 1 in a run whose loss has none."""
    for option, why, fix in conflicts(spec) if with_weights else ():
        raise TrainError(
            f"{option}: turns of the data have weights other than 0 and 1, but {why}. {fix.label}, or remove the "
            "weights. [DAT037]"
        )


def check_device(run: ResolvedRun) -> None:
    """Raise TrainError if this rank's device is not the one that the run was planned for."""
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
    if run.device == "cuda" and run.compute_dtype == "bf16":
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
