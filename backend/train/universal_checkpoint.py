"""Resuming a DeepSpeed checkpoint with a different number of processes: converted, loaded by all ranks, and deleted.

DeepSpeed saves one file per rank, and loads only checkpoints of the same number of ranks. Its universal checkpoints
have each weight in full, with its moments.
"""

from __future__ import annotations

import argparse
import importlib
import io
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback

from backend import registry
from backend.config import RunSpec
from backend.inspect.checkpoint import SHARDS, ZERO3_FILES, ZERO_STAGES
from backend.train import optimizers
from backend.train.checkpoints import UNIVERSAL
from backend.train.context import TrainContext
from backend.train.patches import deepspeed_universal_paths, deepspeed_zero3_universal
from backend.train.run_log import TrainError
from backend.wording import counted, data_size

MODEL = "global_step*/*mp_rank_*_model_states.pt"
MOMENTS = {"exp_avg", "exp_avg_sq"}  # what DeepSpeed 0.19 converts; other parts of an optimizer state are dropped
PHASE = "preparing engine"


class _StopRequested(Exception):
    pass


def convert_if_resized(context: TrainContext, trainer: Any, checkpoint: Path | None) -> Path | None:
    """What to resume from: the checkpoint itself, or its universal form, which DeepSpeed then loads once. A collective
    call. Raises TrainError, Stopped."""
    converted = None if checkpoint is None else _converted(context, checkpoint)
    if converted is None:
        return checkpoint
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
    trainer.add_callback(_AfterLoading(context, trainer, converted))
    return converted


@contextmanager
def best_model(context: TrainContext, trainer: Any) -> Iterator[None]:
    """A context for loading the best checkpoint, which may be from a start with another number of ranks."""
    state = trainer.state
    own = state.best_model_checkpoint
    converted = _converted(context, Path(own)) if own else None
    if converted is None:
        yield
        return
    state.best_model_checkpoint, trainer.model_wrapped._config.load_universal_checkpoint = str(converted), True
    yield
    state.best_model_checkpoint, trainer.model_wrapped._config.load_universal_checkpoint = own, False
    _delete(context, converted)


class _AfterLoading(TrainerCallback):
    def __init__(self, context: TrainContext, trainer: Any, converted: Path) -> None:
        self.context, self.trainer, self.converted = context, trainer, converted

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Repair the loaded optimizer, and let DeepSpeed save ordinary checkpoints again."""
        if self.context.run.zero_stage == 3:
            deepspeed_zero3_universal.apply(optimizers.unwrap(self.trainer.optimizer), self.converted)
        self.trainer.model_wrapped._config.load_universal_checkpoint = False
        _delete(self.context, self.converted)


def _delete(context: TrainContext, converted: Path) -> None:
    context.group.agree()
    if context.group.rank == 0:
        shutil.rmtree(converted.parent, ignore_errors=True)


def _converted(context: TrainContext, checkpoint: Path) -> Path | None:
    """The universal form of a checkpoint that has a different number of files than there are ranks."""
    run, files = context.run, sorted(checkpoint.glob(SHARDS))
    if not run.zero_stage or not files:
        return None
    stage = 3 if any(checkpoint.glob(ZERO3_FILES)) else 2
    if ZERO_STAGES[stage] != ZERO_STAGES[run.zero_stage]:
        raise TrainError(
            f"parallel.strategy: {checkpoint} was written by {ZERO_STAGES[stage]}, and {run.engine.strategy.label} "
            "cannot read it. Use the strategy that wrote it."
        )
    if len(files) == context.group.world:
        return None

    def convert() -> Path | None:
        _check(context, checkpoint, files)
        try:
            return _convert(context, checkpoint)
        except _StopRequested:  # all ranks see the stop request
            return None

    converted: Path | None = context.group.share(context.first(convert))
    return converted


def _check(context: TrainContext, checkpoint: Path, files: list[Path]) -> None:
    """Raise TrainError for a checkpoint that cannot be converted."""
    count, world = counted(len(files), "process"), counted(context.group.world, "process")
    written = f"launch.nproc_per_node: {checkpoint} was written by {count}"
    if "nvme" in _offloaded(context.spec) or any(checkpoint.glob("global_step*/offloaded_tensors")):
        raise TrainError(f"{written}. With state offloaded to NVMe, it can be resumed with {count} only.")
    if context.run.token_shards > 1:
        raise TrainError(f"{written}. With sequence parallelism, it can be resumed with {count} only.")
    saved = _read(files[0])["optimizer_state_dict"]
    states = saved.get("base_optimizer_state", saved.get("optimizer_state_dict"))["state"].values()
    kinds = {key for state in states for key in state}
    if not MOMENTS <= kinds <= MOMENTS | {"step"}:
        raise TrainError(f"{written}. DeepSpeed converts the state of AdamW only; use {count}.")
    # Fragments of all states, then the merged states; frozen weights are written in fp32.
    need = 2 * sum(_sizes(files)) + 3 * sum(_sizes(checkpoint.glob(MODEL)))
    free = shutil.disk_usage(context.folder).free
    if need > free:
        raise TrainError(
            f"{written}. Converting it for {world} needs {data_size(need)} of disk "
            f"space, but {context.folder.resolve()} has {data_size(free)} free. Free some, or use {count}."
        )
    context.run_log.start_phase(
        PHASE,
        f"Converting {checkpoint.name} from {len(files)} to {world}. This temporarily needs up to "
        f"{data_size(need)} of disk space.",
    )


def _offloaded(spec: RunSpec) -> tuple[str, ...]:
    stage = registry.STRATEGIES[spec.parallel.strategy].zero_stage
    return (spec.parallel.offload_optimizer, spec.parallel.offload_param) if stage == 3 else ()


def _convert(context: TrainContext, checkpoint: Path) -> Path:
    """Run DeepSpeed's converter in this process: a fork of a process with threads may hang."""
    target = context.folder / UNIVERSAL / checkpoint.name
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    (source,) = {path.parent for path in checkpoint.glob(SHARDS)}
    for name in ("trainer_state.json", "scheduler.pt"):  # not the random states: they belong to other ranks
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, target / name)
    tool: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    # Its progress bar is the one place where a stop request can end it.
    bars, tool.tqdm = tool.tqdm, SimpleNamespace(tqdm=lambda items: _with_progress(context, items))
    try:
        with (
            deepspeed_universal_paths.relative_source(target.parent, source) as folder,
            redirect_stdout(io.StringIO()),
        ):
            tool.main(
                argparse.Namespace(
                    input_folder=folder,
                    output_folder=f"{target.name}/{source.name}",
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
    except BaseException:
        shutil.rmtree(target.parent, ignore_errors=True)
        raise
    finally:
        tool.tqdm = bars
    _drop_shards(target / source.name / "zero/optimizer_state.pt")
    _report_batch_size(context, checkpoint)
    return target


def _with_progress(context: TrainContext, items: Iterable[Any]) -> Iterator[Any]:
    listed, tick = list(items), context.tick(PHASE, "Converting the checkpoint.")
    for number, item in enumerate(listed):
        if not tick(number, len(listed)):
            raise _StopRequested
        yield item


def _drop_shards(path: Path) -> None:
    """ZeRO-3's file has all shards of rank 0, but every rank reads only the step count from it."""
    saved = _read(path)
    if "fp32_flat_groups" in saved:
        del saved["fp32_flat_groups"]
        steps = {"step": saved["optimizer_state_dict"]["state"][0]["step"]}
        saved["optimizer_state_dict"]["state"] = {0: steps}
        small = path.with_suffix(".small")
        torch.save(saved, small)
        small.replace(path)


def _report_batch_size(context: TrainContext, checkpoint: Path) -> None:
    """Log what changes if the global batch size is different from the checkpoint's."""
    before = _read(min(checkpoint.glob(MODEL)))["ds_config"]
    train = context.spec.train
    each = train.per_device_train_batch_size * train.gradient_accumulation_steps
    then, now = before.get("train_batch_size"), each * context.group.world
    if then != now:
        context.run_log.info(f"The global batch size is {now} instead of {then}.")
    if train.train_sampling_strategy == "group_by_length":
        context.run_log.info(
            "Examples are grouped by length for the new number of processes, so some examples of the current epoch may "
            "be repeated or skipped."
        )


def _read(path: Path) -> Any:
    """A file of a DeepSpeed checkpoint; its tensors are mapped, not read."""
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def _sizes(paths: Iterable[Path]) -> list[int]:
    return [path.stat().st_size for path in paths]
