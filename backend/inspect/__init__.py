"""Glance: what a quick look at the files of a spec shows, before anything is loaded.

Floor 2. Imports: options, spec, and the rooms below. Rules read a Glance and never a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import Data, RunSpec
from backend.config.options import edit
from backend.config.processes import rendezvous_port, world_size
from backend.engines import engine_of
from backend.inspect.data_files import look_at_data
from backend.inspect.disk import look_at_disk
from backend.inspect.facts import DataIssue, InputFacts
from backend.inspect.hub_download import fetch
from backend.inspect.model_folder import look_at_model, wait_for_architecture
from backend.inspect.ports import look_at_port

__all__ = ["DataIssue", "InputFacts", "fetch", "inspect_inputs", "resolve_paths", "wait_for_architecture"]


def resolve_paths(spec: RunSpec, base: Path) -> RunSpec:
    """`spec` with every path made absolute, starting at `base`: a run works in its own folder."""

    def absolute(text: str) -> str:
        return os.path.normpath(base / Path(text).expanduser()) if text else text

    patch: dict[str, Any] = {
        name: absolute(value)
        for name, value in (
            ("model.path", spec.model.path),
            ("data.chat_template_file", spec.data.chat_template_file),
            ("save.resume_path", spec.save.resume_path),
            ("parallel.nvme_path", spec.parallel.nvme_path),
        )
        if value and absolute(value) != value
    }
    for name, files in (("data.files", spec.data.files), ("data.validation_files", spec.data.validation_files)):
        settled = tuple(absolute(file) for file in files)
        if settled != files:
            patch[name] = settled
    return edit(spec, patch) if patch else spec


def inspect_inputs(spec: RunSpec, base: Path, environment: Mapping[str, str] = os.environ) -> InputFacts:
    """Look at every file that `spec` names; relative paths start at `base`. Never raises."""
    return InputFacts(
        **look_at_model(spec, base, environment),
        **look_at_data(spec, base),
        template=_template(spec.data, base),
        checkpoint=_checkpoint(spec, base),
        **look_at_disk(spec, base),
        **look_at_port(rendezvous_port(spec)),
    )


def _template(data: Data, base: Path) -> str:
    if data.chat_template != "file":
        return ""
    if not data.chat_template_file:
        return "No template file is named."
    path = base / Path(data.chat_template_file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    except UnicodeDecodeError:
        return f"{path} is no text."
    return "" if "messages" in text else f"{path} never names messages, so it is no chat template."


def _checkpoint(spec: RunSpec, base: Path) -> str:
    """What is wrong with the named checkpoint, in a sentence."""
    if spec.save.resume_from != "path":
        return ""
    if not spec.save.resume_path:
        return "No checkpoint folder is named."
    folder = base / Path(spec.save.resume_path).expanduser()
    if not (folder / "trainer_state.json").is_file():
        return f"{folder} is no checkpoint: name a checkpoint-N folder of a run."
    if folder.parent.name == "checkpoints" and not (folder / "complete").is_file():
        return f"{folder} was cut off while it was written: take an earlier one."
    if wrong := _engine(spec, folder):
        return wrong
    sharded = (folder / WRITERS["sharded"][0]).exists()  # says nothing of adapters
    if not sharded and (folder / "adapter_config.json").is_file() != (spec.method.kind == "lora"):
        other = "whole weights" if spec.method.kind == "lora" else "an adapter"
        return f"{folder} holds {other}, which {registry.METHODS[spec.method.kind].label} cannot go on from."
    return _adapter(spec, folder) if spec.method.kind == "lora" else ""


def _adapter(spec: RunSpec, folder: Path) -> str:
    """How the adapter in a checkpoint was made otherwise: its weights would then mean something else."""
    asked = {
        "r": spec.lora.r,
        "lora_alpha": spec.lora.alpha,
        "use_dora": spec.lora.use_dora,
        "use_rslora": spec.lora.use_rslora,
        "init_lora_weights": registry.LORA_INITS[spec.lora.init].name,
    }
    with suppress(OSError, ValueError):
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        for key, value in asked.items():
            if found.get(key, value) != value:
                return f"{folder} holds an adapter with {key} {found[key]}, and {value} is asked for."
    return ""


# What each engine writes of the optimizer's state, and who can go on from it.
WRITERS = {
    "deepspeed": ("global_step*/*zero_pp_rank_*_optim_states.pt", "DeepSpeed"),
    "fsdp": ("optimizer.bin", "FSDP"),
    "sharded": ("optimizer_0", "FSDP, sharded"),
    "ddp": ("optimizer.pt", "DDP or one process"),
}
SPREAD = "global_step*/*zero_pp_rank_*_model_states.pt"  # ZeRO-3: weights, a part a rank
SWAPPED = "global_step*/offloaded_tensors"  # state that lay on a disk


def _engine(spec: RunSpec, folder: Path) -> str:
    """What is wrong with the optimizer's state in a checkpoint: each engine has files of its own."""
    row = registry.STRATEGIES[spec.parallel.strategy]
    found = {kind: list(folder.glob(pattern)) for kind, (pattern, _) in WRITERS.items()}
    writer = next((kind for kind, files in found.items() if files), "")
    if not writer:
        return f"{folder} holds weights only, so training cannot go on from it."
    own = engine_of(spec.parallel.strategy).checkpoint_format(spec)
    if own != writer:
        label = row.label if own != "fsdp" or writer != "sharded" else "a checkpoint in one file"
        return f"{folder} was written by {WRITERS[writer][1]}, which {label} cannot read."
    return _parts(spec, folder, len(found["deepspeed"])) if own == "deepspeed" else ""


def _parts(spec: RunSpec, folder: Path, parts: int) -> str:
    """What is wrong with the parts of a DeepSpeed checkpoint: each stage has its own kind of them. Of another number
    than there are processes, the trainer can convert what holds AdamW's moments."""
    row = registry.STRATEGIES[spec.parallel.strategy]
    if (row.zero_stage == 3) != any(folder.glob(SPREAD)):
        other = "ZeRO-1 or ZeRO-2" if row.zero_stage == 3 else "ZeRO-3"
        return f"{folder} was written by {other}, which {row.label} cannot read."
    on_disk = any(folder.glob(SWAPPED))
    wrong = (
        ""
        if parts == world_size(spec)
        else "its state on a disk"
        if on_disk
        else engine_of(spec.parallel.strategy).resize_obstacle(spec)
    )
    return wrong and f"{folder} was written by {parts} processes: with {wrong} DeepSpeed goes on with as many."
