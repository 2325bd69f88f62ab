"""A DeepSpeed checkpoint for another number of ranks than wrote it: converted, loaded by all, and deleted.

Beside the floors. Imports catalog, checkpoints, inside, run_log, work. DeepSpeed saves a part a rank, and reads
back only its own number of parts. Its universal checkpoints hold each weight as a whole, with its moments.
"""

from __future__ import annotations

import argparse
import importlib
import io
import shutil
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerCallback

from backend import registry
from backend.config import RunSpec
from backend.train import optimizer_utils
from backend.train.checkpoints import UNIVERSAL
from backend.train.context import TrainContext
from backend.train.run_log import TrainError

STATE, MODEL = "global_step*/*zero_pp_rank_*_optim_states.pt", "global_step*/*mp_rank_*_model_states.pt"
MOMENTS = {"exp_avg", "exp_avg_sq"}  # what DeepSpeed 0.19 takes out of a state, whatever else is in it
PHASE = "preparing engine"


class _StopAsked(Exception):
    pass


def fit(work: TrainContext, trainer: Any, checkpoint: Path | None) -> Path | None:
    """What to go on from: the checkpoint itself, or its universal form, which the trainer is told to load once. All
    ranks must call it. Raises TrainError, Stopped."""
    made = None if checkpoint is None else _fitted(work, checkpoint)
    if made is None:
        return checkpoint
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
    trainer.add_callback(_Loaded(work, trainer, made))
    return made


@contextmanager
def best(work: TrainContext, trainer: Any) -> Iterator[None]:
    """For loading the best checkpoint at the end, which may be older than the number of ranks."""
    state = trainer.state
    own = state.best_model_checkpoint
    made = _fitted(work, Path(own)) if own else None
    if made is None:
        yield
        return
    state.best_model_checkpoint, trainer.model_wrapped._config.load_universal_checkpoint = str(made), True
    yield
    state.best_model_checkpoint, trainer.model_wrapped._config.load_universal_checkpoint = own, False
    _leave(work, made)


class _Loaded(TrainerCallback):
    def __init__(self, work: TrainContext, trainer: Any, made: Path) -> None:
        self.work, self.trainer, self.made = work, trainer, made

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All is loaded: put right what DeepSpeed mixes up, and let checkpoints be ordinary ones again."""
        if registry.STRATEGIES[self.work.spec.parallel.strategy].zero_stage == 3:
            _mend(self.trainer.optimizer, self.made)
        self.trainer.model_wrapped._config.load_universal_checkpoint = False
        _leave(self.work, self.made)


def _mend(optimizer: Any, made: Path) -> None:
    """ZeRO-3 of DeepSpeed 0.19 gives all groups the weight decay of the first one, and all parts one and the same
    count of steps, which each of them then raises."""
    inner = optimizer_utils.innermost(optimizer)
    (path,) = made.glob("global_step*/zero/optimizer_state.pt")
    kept = torch.load(path, map_location="cpu", weights_only=False)["optimizer_state_dict"]["param_groups"]
    for group, own in zip(inner.param_groups, kept, strict=True):
        group.update({key: value for key, value in own.items() if key != "params"})
    for state in inner.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _leave(work: TrainContext, made: Path) -> None:
    work.group.agree()
    if work.group.rank == 0:
        shutil.rmtree(made.parent, ignore_errors=True)


def _fitted(work: TrainContext, checkpoint: Path) -> Path | None:
    """The universal form of a checkpoint that has another number of parts than there are ranks."""
    row, parts = registry.STRATEGIES[work.spec.parallel.strategy], sorted(checkpoint.glob(STATE))
    if not row.zero_stage or not parts:
        return None
    spread = any("zero_pp_rank" in path.name for path in checkpoint.glob(MODEL))
    if spread != (row.zero_stage == 3):
        other = "ZeRO-3" if spread else "ZeRO-1 or ZeRO-2"
        raise TrainError(f"parallel.strategy: {checkpoint} was written by {other}, and {row.label} cannot read it.")
    if len(parts) == work.group.world:
        return None

    def convert() -> Path | None:
        _check(work, checkpoint, parts)
        try:
            return _convert(work, checkpoint)
        except _StopAsked:  # which the others hear of, too
            return None

    made: Path | None = work.group.share(work.first(convert))
    return made


def _check(work: TrainContext, checkpoint: Path, parts: list[Path]) -> None:
    """Raise TrainError for what cannot be converted."""
    written = f"launch.nproc_per_node: {checkpoint} was written by {len(parts)} processes"
    if "nvme" in _offloaded(work.spec) or any(checkpoint.glob("global_step*/offloaded_tensors")):
        raise TrainError(f"{written}, and with its state on a disk only as many can go on from it.")
    if work.run.token_shards > 1:
        raise TrainError(f"{written}, and with sequence parallel only as many can go on from it.")
    saved = _read(parts[0])["optimizer_state_dict"]
    states = saved.get("base_optimizer_state", saved.get("optimizer_state_dict"))["state"].values()
    kinds = {key for state in states for key in state}
    if not MOMENTS <= kinds <= MOMENTS | {"step"}:
        raise TrainError(f"{written}, and DeepSpeed converts the state of AdamW alone: start {len(parts)}.")
    # Fragments of all states, then the same once more as wholes; frozen weights are written in fp32.
    need = 2 * sum(_sizes(parts)) + 3 * sum(_sizes(checkpoint.glob(MODEL)))
    free = shutil.disk_usage(work.folder).free
    if need > free:
        raise TrainError(
            f"{written}; to convert it for {work.group.world} takes {need / 2**30:,.2f} GiB of disk for a while, and "
            f"{free / 2**30:,.2f} are free in {work.folder}: make room, or start {len(parts)}."
        )
    work.run_log.start_phase(
        PHASE,
        f"Converting {checkpoint.name} of {len(parts)} processes for {work.group.world}; it takes up to "
        f"{need / 2**30:,.2f} GiB of disk for a while.",
    )


def _offloaded(spec: RunSpec) -> tuple[str, ...]:
    stage = registry.STRATEGIES[spec.parallel.strategy].zero_stage
    return (spec.parallel.offload_optimizer, spec.parallel.offload_param) if stage == 3 else ()


def _convert(work: TrainContext, checkpoint: Path) -> Path:
    """By DeepSpeed's own tool, in this process: what is forked from one with threads may hang."""
    target = work.folder / UNIVERSAL / checkpoint.name
    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    (source,) = {path.parent for path in checkpoint.glob(STATE)}
    for name in ("trainer_state.json", "scheduler.pt"):  # the random numbers were those of other ranks
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, target / name)
    tool: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    bars, tool.tqdm = tool.tqdm, SimpleNamespace(tqdm=lambda items: _watched(work, items))
    # It makes patterns of its paths: a plus or a bracket in a folder's name would end it. From here they are plain.
    (target.parent / "source").symlink_to(source.resolve())
    try:
        with chdir(target.parent), redirect_stdout(io.StringIO()):
            tool.main(
                argparse.Namespace(
                    input_folder="source",
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
    _slim(target / source.name / "zero/optimizer_state.pt")
    _tell_rows(work, checkpoint)
    return target


def _watched(work: TrainContext, items: Iterable[Any]) -> Iterator[Any]:
    listed, tick = list(items), work.tick(PHASE, "Converting the checkpoint.")
    for number, item in enumerate(listed):
        if not tick(number, len(listed)):
            raise _StopAsked
        yield item


def _slim(path: Path) -> None:
    """ZeRO-3's holds all parts of rank 0, of which only the count of steps is read, by every rank."""
    saved = _read(path)
    if "fp32_flat_groups" in saved:
        del saved["fp32_flat_groups"]
        steps = {"step": saved["optimizer_state_dict"]["state"][0]["step"]}
        saved["optimizer_state_dict"]["state"] = {0: steps}
        slim = path.with_suffix(".slim")
        torch.save(saved, slim)
        slim.replace(path)


def _tell_rows(work: TrainContext, checkpoint: Path) -> None:
    """Say what changes where steps learn from other rows than before."""
    before = _read(min(checkpoint.glob(MODEL)))["ds_config"]
    train = work.spec.train
    each = train.per_device_train_batch_size * train.gradient_accumulation_steps
    then, now = before.get("train_batch_size"), each * work.group.world
    if then != now:
        work.run_log.info(
            f"A step learns from {now} rows instead of {then}. Those already seen are reckoned in steps of {now}, so "
            "rows of this pass may come twice or not at all."
        )
    elif train.train_sampling_strategy == "group_by_length":
        work.run_log.info("Rows are grouped by length anew, so some of this pass may come twice or not at all.")


def _read(path: Path) -> Any:
    """A file of DeepSpeed's, without reading its tensors."""
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def _sizes(paths: Iterable[Path]) -> list[int]:
    return [path.stat().st_size for path in paths]
