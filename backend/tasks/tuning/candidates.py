"""Candidates: settings that may make the steps of a run faster, by axis.

Those of safe axes do not change the result, which the losses of their trials confirm; the others change it slightly.
Most are proposed whether they can run or not: the preflight check then says why one cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from backend import registry
from backend.config.options import by_name, effective, get, shown
from backend.rules import Case, Fix, examine
from backend.rules.memory_remedies import (
    least_batch_size,
    offloads,
    recommended_strategies,
    smaller_batches,
    strategy_patch,
)
from backend.tasks.tuning.search import COMPILE, Axis
from backend.wording import counted

MAX_DOUBLINGS = 3
LARGER_BUCKETS = 4  # times
WORKERS = (0, 2, 4)
FUSED = {"adamw_torch": "adamw_torch_fused", "adamw_torch_fused": "adamw_torch"}


def axes(case: Case, changes_result: bool) -> list[Axis]:
    """The axes of a spec, the most promising first: by the predicted time of their candidates if there is a prediction;
    axes that advice speaks against come last. With `changes_result`, the axes that change the result follow the others.
    torch.compile comes last, because all later trials would compile too."""
    order = [name for name, axis in AXES.items() if axis.is_safe(case) or changes_result]
    gains = {name: _gain(case, AXES[name].propose(case)) for name in order}

    def rank(name: str) -> tuple[bool, bool, bool, float]:
        is_doubtful, gain = gains[name]
        return name == COMPILE, not AXES[name].is_safe(case), is_doubtful, -gain

    return [Axis(name, AXES[name].is_safe(case)) for name in sorted(order, key=rank)]


def propose(axis: Axis, case: Case) -> list[Fix]:
    """The candidates of an axis for the settings of `case`, the most promising first."""
    fixes = [fix for fix in AXES[axis.name].propose(case) if case.takes(fix.patch)]
    return sorted(fixes, key=lambda fix: _rank(case, fix))


def _gain(case: Case, fixes: Iterator[Fix]) -> tuple[bool, float]:
    """Whether advice speaks against all of these candidates, and the largest predicted gain."""
    ranks = [_rank(case, fix) for fix in fixes if case.takes(fix.patch)]
    is_doubtful, loss = min(ranks, default=(True, 0.0))
    return is_doubtful, -loss


def _rank(case: Case, fix: Fix) -> tuple[bool, float]:
    """Whether new advice or a new warning speaks against a candidate, and its predicted gain, negated; 0 if no time is
    predicted."""
    changed = Case(effective(case.with_patch(fix.patch)), case.machine, case.facts)
    is_doubtful = bool(_doubts(changed) - _doubts(case))
    before, after = case.time.tokens_per_second, changed.time.tokens_per_second
    return is_doubtful, 1 - after / before if before and after else 0.0


def _doubts(case: Case) -> set[str]:
    """The codes of warnings and advice, except about memory."""
    return {f.code for f in examine(case, at_start=False) if f.level != "error" and not f.code.startswith("MEM")}


# --- Axes ---


def _liger(case: Case) -> Iterator[Fix]:
    yield from _switch(case, "train.use_liger_kernel", "Liger kernels", "No Liger kernels")


def _attention(case: Case) -> Iterator[Fix]:
    current = case.spec.model.attn_implementation
    for name, row in registry.ATTENTIONS.items():
        if name not in ("auto", current) and {name, current} != {"sdpa", "auto"}:  # auto is SDPA for nearly all models
            label = row.label if "Attention" in row.label else f"{row.label} attention"
            yield Fix(label, {"model.attn_implementation": name})


def _checkpointing(case: Case) -> Iterator[Fix]:
    """Activation checkpointing if it is off; else none, also with smaller batches if a batch may be split."""
    name = "train.activation_checkpointing"
    if not case.spec.train.activation_checkpointing:
        yield Fix("Activation checkpointing", {name: True})
        return
    yield Fix("No activation checkpointing", {name: False})
    for patch in smaller_batches(case) if splits_exactly(case) else ():
        size = patch["train.per_device_train_batch_size"]
        yield Fix(f"No activation checkpointing, batch size {size}", {name: False, **patch})


def _optimizer(case: Case) -> Iterator[Fix]:
    if other := FUSED.get(case.spec.train.optim):
        yield Fix(registry.OPTIMIZERS[other].label, {"train.optim": other})


def _workers(case: Case) -> Iterator[Fix]:
    most = max(1, case.machine.cores // case.run.nproc_per_node)
    for count in sorted({min(count, most) for count in WORKERS}):
        label = counted(count, "DataLoader worker") if count else "No DataLoader worker"
        yield Fix(label, {"train.dataloader_num_workers": count})


def _threads(case: Case) -> Iterator[Fix]:
    if case.run.device != "cpu":  # the threads of a process that waits for its GPU do not matter
        return
    most = max(1, case.machine.cores // case.run.nproc_per_node)
    current = case.spec.launch.omp_num_threads or most
    for count in sorted({most, max(1, most // 2)} - {current}):
        yield Fix(counted(count, "CPU thread") + " per process", {"launch.omp_num_threads": count})


def _buckets(case: Case) -> Iterator[Fix]:
    if case.run.world_size > 1 and _is_shown(case, "parallel.bucket_cap_mb"):
        size = min(case.spec.parallel.bucket_cap_mb * LARGER_BUCKETS, 4096)
        yield Fix(f"Buckets of {size} MB", {"parallel.bucket_cap_mb": size})


def _reshard(case: Case) -> Iterator[Fix]:
    if case.run.world_size > 1:
        name = "parallel.reshard_after_forward"
        yield from _switch(case, name, "Reshard after forward", "No reshard after forward")


def _unused_parameters(case: Case) -> Iterator[Fix]:
    name = "parallel.ddp_find_unused_parameters"
    if case.run.world_size > 1 and _is_shown(case, name) and get(case.spec, name):
        yield Fix("find_unused_parameters off", {name: False})


def _batch(case: Case) -> Iterator[Fix]:
    """Other batch sizes with the same global batch size: larger ones, and the next smaller one."""
    size, accumulation = case.spec.train.per_device_train_batch_size, case.spec.train.gradient_accumulation_steps
    for _ in range(MAX_DOUBLINGS):
        if accumulation % 2:
            break
        size, accumulation = 2 * size, accumulation // 2
        patch = {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": accumulation}
        yield Fix(f"Batch size {size}", patch)
    for patch in list(smaller_batches(case))[:1]:
        if patch["train.per_device_train_batch_size"] >= least_batch_size(case.spec):
            yield Fix(f"Batch size {patch['train.per_device_train_batch_size']}", patch)


def _compile(case: Case) -> Iterator[Fix]:
    yield from _switch(case, "train.torch_compile", "torch.compile", "No torch.compile")


def _strategy(case: Case) -> Iterator[Fix]:
    """Strategies without offloading, which saves memory and is slower, on all devices."""
    for strategy, label, settings in recommended_strategies(case):
        patch = strategy_patch(case, strategy, settings)
        is_alone = case.run.world_size == 1 == case.resolved(case.with_patch(patch)).world_size
        if not offloads(patch) and not is_alone:
            yield Fix(label, patch, safe=False)


def _precision(case: Case) -> Iterator[Fix]:
    current = case.spec.precision.compute
    names = ("bf16", "tf32") if case.run.compute_dtype == "fp32" else ("bf16",) if current == "fp16" else ()
    for name in (*names, "fp8"):
        yield Fix(f"{registry.PRECISIONS[name].label} precision", {"precision.compute": name}, safe=False)


def _packing(case: Case) -> Iterator[Fix]:
    if _is_shown(case, "data.packing"):
        yield from _switch(case, "data.packing", "Packing", "No packing")


def splits_exactly(case: Case) -> bool:
    """Whether a batch that is split into accumulated ones gives the same gradients: the loss of SFT and pretraining is
    a mean over all tokens of a step. Dropout and NEFTune draw other random numbers, and the router loss of a mixture
    of experts is a mean over batches."""
    spec = case.spec
    is_random = (spec.method.kind == "lora" and spec.lora.dropout) or spec.train.neftune_noise_alpha
    has_router = case.shape is not None and case.shape.most_experts > 0
    return spec.train.stage in registry.NEXT_TOKEN_STAGES and not is_random and not has_router


def _always(case: Case) -> bool:
    return True


def _never(case: Case) -> bool:
    return False


def _switch(case: Case, name: str, on: str, off: str) -> Iterator[Fix]:
    if _is_shown(case, name):
        value = get(case.spec, name)
        yield Fix(off if value else on, {name: not value})


def _is_shown(case: Case, name: str) -> bool:
    return shown(case.spec, by_name()[name])


@dataclass(frozen=True)
class _AxisRow:
    """How the candidates of an axis are proposed, and whether they leave the result of a case as it is."""

    propose: Callable[[Case], Iterator[Fix]]
    is_safe: Callable[[Case], bool] = _always


AXES: Mapping[str, _AxisRow] = {
    "Liger": _AxisRow(_liger),
    "attention": _AxisRow(_attention),
    "batch": _AxisRow(_batch, splits_exactly),
    "optimizer": _AxisRow(_optimizer),
    "activation checkpointing": _AxisRow(_checkpointing),
    "buckets": _AxisRow(_buckets),
    "reshard": _AxisRow(_reshard),
    "unused parameters": _AxisRow(_unused_parameters),
    "threads": _AxisRow(_threads),
    "workers": _AxisRow(_workers),
    COMPILE: _AxisRow(_compile),
    "precision": _AxisRow(_precision, _never),
    "packing": _AxisRow(_packing, _never),
    "strategy": _AxisRow(_strategy, _never),
}
