"""Checkpoint inspection: whether a run can resume from the checkpoint folder in save.resume_path.

Reads file names, adapter_config.json and the names and shapes in safetensors files, never a tensor.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.config.options import SpecError, edit, effective, get, plain
from backend.config.processes import world_size
from backend.engines import engine_of
from backend.inspect.checkpoint_adapter import adapter_facts, has_other_name, saved_spec
from backend.inspect.weights import WeightsError, weights_mismatch
from backend.modelspec import ModelShape
from backend.runs import CHECKPOINTS, COMPLETE, RESOLVED, checkpoint_files, files, resume_point

# Format -> the files of its optimizer state, and who writes it. transformers 5.23 trainer.py, accelerate 1.15
# utils/fsdp_utils.py, DeepSpeed 0.19 runtime/engine.py.
OPTIMIZER_FILES = {
    "deepspeed": ("global_step*/*_states.pt", "DeepSpeed"),
    "fsdp": ("optimizer.bin", "FSDP with a full state dict"),
    "sharded": ("optimizer_0", "FSDP with a sharded state dict"),
    "ddp": ("optimizer.pt", "DDP or a single process"),
}
SHARDS = "global_step*/*zero_pp_rank_*_optim_states.pt"  # one for each rank; ZeRO-0 saves all of it with the weights
ZERO3_FILES = "global_step*/*zero_pp_rank_*_model_states.pt"  # ZeRO-3: one shard of the weights for each rank
ZERO_STAGES = {0: "ZeRO-0", 1: "ZeRO-1 or ZeRO-2", 2: "ZeRO-1 or ZeRO-2", 3: "ZeRO-3"}
METHOD, PRECISION, OFFLOAD = "method.kind", "precision.compute", "parallel.offload_optimizer"
# The projections in an optimizer state keep their rank; a change of the others fails with it.
LOW_RANK = ("train.projection_rank", "train.galore_proj_type", "train.optim_targets", "train.optim_target_modules")
FREEZE = ("method.freeze_trainable_layers", "method.freeze_extra_modules")
NVME_FILES = "global_step*/offloaded_tensors"  # state that was offloaded to NVMe
STRATEGY, RATIO = "parallel.strategy", "lora.loraplus_lr_ratio"
# Base model of an adapter, by source; for a folder, the trainer decides.
NAMES = {"builtin": "model.builtin", "hub": "model.hub_id"}
# What decides whether an optimizer state fits; a fix sets those that differ to what they were.
DECIDING = (
    STRATEGY, "parallel.state_dict_type", "parallel.tensor_parallel_size", OFFLOAD, "launch.nproc_per_node", METHOD,
    *FREEZE, "train.optim", *LOW_RANK, PRECISION, RATIO, *NAMES.values(),
)  # fmt: skip


def inspect_checkpoint(spec: RunSpec, base: Path, shape: ModelShape | None) -> dict[str, Any]:
    """The InputFacts about save.resume_path: why the run, with a model of this shape, cannot resume from it, and the
    options of the checkpoint with which it could, if they are known. Empty if nothing is wrong, or the run does not
    resume from a path."""
    spec, folder = effective(spec), base / Path(spec.save.resume_path).expanduser()
    if problem := checkpoint_problem(spec, base):
        saved = saved_spec(folder)
        options = _earlier_options(spec, folder, saved) if problem == _options_problem(spec, folder, saved) else {}
        return {"checkpoint_problem": problem, "checkpoint_options": tuple(options.items())}
    if spec.save.resume_from != "path":
        return {}
    position = {"checkpoint_epoch": resume_point.position(folder)[1], "checkpoint_dtype": _deepspeed_dtype(folder)}
    if spec.method.kind == "lora":
        return position | adapter_facts(spec, saved_spec(folder), folder, shape)
    with suppress(WeightsError, OSError):  # the trainer reads them again, and reports the error
        if shape and (problem := weights_mismatch(folder, shape)):
            return {"checkpoint_problem": f"{folder} does not fit the model of this run. {problem}"}
    return position


def _deepspeed_dtype(folder: Path) -> str:
    """The compute dtype of the run that saved a DeepSpeed checkpoint: the names of its files and what is in them depend
    on it. '' for the checkpoint of another engine, or if it is not known."""
    if not any(folder.glob(OPTIMIZER_FILES["deepspeed"][0])):
        return ""
    if any(folder.glob("global_step*/bf16_*")):
        return "bf16"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(files.read_text(folder.parent.parent / RESOLVED))["compute_dtype"])
    return ""


def checkpoint_problem(spec: RunSpec, base: Path) -> str:
    """What is wrong with save.resume_path whatever the adapter and the model are, a sentence; '' if nothing is."""
    if spec.save.resume_from != "path":
        return ""
    if not spec.save.resume_path:
        return "save.resume_path is empty: set the path of a checkpoint-N folder."
    folder = base / Path(spec.save.resume_path).expanduser()
    if not (folder / "trainer_state.json").is_file():
        inside = resume_point.complete(folder.parent if folder.name == CHECKPOINTS else folder)
        path = f"the path of its last checkpoint, {inside[-1]}" if inside else "the path of a checkpoint-N folder"
        return f"{folder} is not a checkpoint (it has no trainer_state.json): set {path}."
    if folder.parent.name == CHECKPOINTS and not (folder / COMPLETE).is_file():
        return (
            f"{folder} is incomplete, because its run ended before it was saved completely: use an earlier checkpoint."
        )
    return checkpoint_files.problem(folder) or _options_problem(spec, folder, saved_spec(folder))


def _earlier_options(spec: RunSpec, folder: Path, saved: RunSpec | None) -> dict[str, Any]:
    """The values that options had in the run that saved the checkpoint, and with which this one could resume: those of
    as few options as are needed. Empty if that run is not known, or if they do not help."""
    if saved is None:
        return {}
    patch = {name: get(saved, name) for name in DECIDING if get(saved, name) != get(spec, name)}
    if not _fits(spec, patch, folder, saved):
        return {}
    for name in tuple(patch):
        without = {other: value for other, value in patch.items() if other != name}
        patch = without if _fits(spec, without, folder, saved) else patch
    return patch


def _fits(spec: RunSpec, patch: dict[str, Any], folder: Path, saved: RunSpec) -> bool:
    """Whether a run with these options could resume from the checkpoint."""
    with suppress(SpecError):
        return not _options_problem(effective(edit(spec, patch)), folder, saved)
    return False


def _options_problem(spec: RunSpec, folder: Path, saved: RunSpec | None) -> str:
    """Why this run cannot resume from a checkpoint that is complete, a sentence; '' if it can. `saved`: the spec of the
    run that saved it, if that is known."""
    if problem := _optimizer_problem(spec, folder, saved) or _other_base_model(spec, folder, saved):
        return problem
    sharded = (folder / OPTIMIZER_FILES["sharded"][0]).exists()  # whose file names do not tell adapters apart
    if not sharded and (folder / "adapter_config.json").is_file() != (spec.method.kind == "lora"):
        content = "full model weights" if spec.method.kind == "lora" else "a LoRA adapter"
        return f"{folder} contains {content}, but method.kind is {spec.method.kind}."
    return ""


def _optimizer_problem(spec: RunSpec, folder: Path, saved: RunSpec | None) -> str:
    """What is wrong with the checkpoint's optimizer state: each engine reads only its own format."""
    found = {name: list(folder.glob(pattern)) for name, (pattern, _) in OPTIMIZER_FILES.items()}
    written = next((name for name, files in found.items() if files), "")
    if not written:
        return f"{folder} contains model weights but no optimizer state, so training cannot resume from it."
    expected = engine_of(spec.parallel.strategy).checkpoint_format(spec)
    if expected != written:
        label = registry.STRATEGIES[spec.parallel.strategy].label
        if expected == "fsdp" and written == "sharded":
            label += " with a full state dict"
        return f"{folder} was saved by {OPTIMIZER_FILES[written][1]}, and {label} cannot resume from that format."
    if problem := _other_optimizer(spec, folder, saved) or _other_weights(spec, folder, saved, expected):
        return problem
    return _deepspeed_problem(spec, folder) if expected == "deepspeed" else ""


def _other_base_model(spec: RunSpec, folder: Path, saved: RunSpec | None) -> str:
    """That the checkpoint has an adapter of another base model, a sentence; '' if not, or if it is not known."""
    source = spec.model.source
    is_adapter = spec.method.kind == "lora" and saved is not None and saved.method.kind == "lora"
    if saved is None or not is_adapter or not has_other_name(saved.model, spec.model):
        return ""
    before, now = get(saved, NAMES[source]), get(spec, NAMES[source])
    return f"{folder} has an adapter of the base model {before}, and {NAMES[source]} is {now}. Use the same base model."


def _other_optimizer(spec: RunSpec, folder: Path, saved: RunSpec | None) -> str:
    """That the checkpoint has the state of another optimizer, with which the first step would fail, a sentence; '' if
    not, or if the run that saved it is not known."""
    if saved is None:
        return ""
    own, theirs = registry.OPTIMIZERS[spec.train.optim], registry.OPTIMIZERS[saved.train.optim]
    same_kind = saved.train.optim == spec.train.optim or (own.has_adamw_state and theirs.has_adamw_state)
    if not same_kind:
        return (
            f"{folder} has the optimizer state of {theirs.label} ({saved.train.optim}), and train.optim is "
            f"{spec.train.optim}, which cannot continue with this state."
        )
    ratios = get(saved, RATIO), get(spec, RATIO)
    if spec.method.kind == saved.method.kind == "lora" and (ratios[0] == 1) != (ratios[1] == 1):
        return (
            f"{folder} was saved with {RATIO} {ratios[0]:g}, and this run sets {ratios[1]:g}: the "
            "optimizer has different parameter groups with and without LoRA+."
        )
    return ""


def _other_weights(spec: RunSpec, folder: Path, saved: RunSpec | None, written: str) -> str:
    """That the optimizer state is of other weights than those that the run trains, in another dtype, or of another
    class, a sentence; '' if not, or if the run that saved it is not known."""
    if saved is None:
        return ""
    kinds: set[str] = {spec.method.kind, saved.method.kind}
    compared: tuple[str, ...] = ()
    if spec.fp32_master_weights != saved.fp32_master_weights:  # torch's Adam fails in the first step
        compared = (PRECISION,)
    elif "lora" not in kinds and written not in ("fsdp", "sharded"):  # FSDP finds states by names, not places
        compared = (METHOD,) if len(kinds) > 1 else FREEZE if kinds == {"freeze"} else ()
    elif len(kinds) > 1 and "lora" in kinds and written == "sharded":  # other parameters, under other names
        compared = (METHOD,)
    if registry.OPTIMIZERS[spec.train.optim].state_layout == "low_rank":
        compared += LOW_RANK
    if changed := [name for name in compared if get(saved, name) != get(spec, name)]:
        texts = [f"{name} was {plain(get(saved, name))} and is now {plain(get(spec, name))}" for name in changed]
        earlier = "Use the earlier value." if len(changed) == 1 else "Use the earlier values."
        return f"{folder} has an optimizer state that does not fit this run: {'; '.join(texts)}. {earlier}"
    offload = get(saved, OFFLOAD), get(spec, OFFLOAD)
    if written == "deepspeed" and offload[0] == "none" != offload[1]:
        return (
            f"{folder} was saved with {OFFLOAD} none, and this run sets {offload[1]}: DeepSpeed's CPU Adam cannot "
            "continue with the state of another optimizer class."
        )
    return ""


def _deepspeed_problem(spec: RunSpec, folder: Path) -> str:
    """What is wrong with a DeepSpeed checkpoint: its files depend on the ZeRO stage, and on the number of processes
    unless the trainer can convert them (AdamW's state, not on NVMe), or each process has the complete state
    (ZeRO-0)."""
    strategy = registry.STRATEGIES[spec.parallel.strategy]
    saved_processes, processes = len(list(folder.glob(SHARDS))), world_size(spec)
    stage = 3 if any(folder.glob(ZERO3_FILES)) else 2 if saved_processes else 0
    if ZERO_STAGES[stage] != ZERO_STAGES[strategy.zero_stage]:
        return f"{folder} was saved by {ZERO_STAGES[stage]}, and {strategy.label} cannot resume from that format."
    if not stage or saved_processes == processes:
        return ""
    on_nvme = any(folder.glob(NVME_FILES))
    obstacle = "state offloaded to NVMe" if on_nvme else engine_of(spec.parallel.strategy).resize_obstacle(spec)
    if not obstacle:
        return ""
    return (
        f"{folder} was saved by {saved_processes} processes and this run has {processes}: with {obstacle}, DeepSpeed "
        "resumes only with the same number."
    )
