"""Remedies: changes of a spec that make it fit into memory, each a fix with the peak that it leads to.

The memory rules and the page show the same list. Single changes are tried first, then combinations of two and three.
Changes that do not affect the training result come before those that do; among equals, the fastest comes first. A
smaller model comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from operator import ge
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.config.options import effective
from backend.engines import engine_of
from backend.machine import Gpu
from backend.memory import Estimate
from backend.memory.estimate import EVALUATION, GENERATION
from backend.modelspec import from_config
from backend.registry.hub_models import siblings
from backend.rules.base import Case, Fix
from backend.rules.common_fixes import ATTENTION_ONLY
from backend.wording import counted, data_size

MAX_REMEDIES = 6
ENOUGH = 3  # remedies; with fewer, larger effects on training, such as a smaller max_length, are tried too
MAX_TRIES = 12  # combinations of one size that are estimated, the best ranked first
# (least effect, largest effect, wanted): combinations are tried until this many of the band are found.
EFFECT_BANDS = ((0, 0, 1), (1, 39, ENOUGH), (40, 1000, 1))
POSSIBLE_EXCESS = 1.25  # the upper bound of an estimate that fits, but not for certain, as a multiple of free memory
NO_OFFLOAD = {"parallel.offload_optimizer": "none", "parallel.offload_param": "none", "parallel.cpu_offload": False}
MIN_MAX_LENGTH = 128
LARGE_RANK = 64  # a larger LoRA rank is reduced to 16


@dataclass(frozen=True)
class Change:
    """One change of a spec; a combination has at most one change of each kind. `effect` ranks the effect on the
    training result (0: none), `slowdown` the effect on the time of a step in percent."""

    kind: str
    fix: Fix
    effect: int = 0
    slowdown: int = 0


def find_remedies(case: Case, limit: float) -> list[Fix]:
    """The best changes after which the upper bound of the estimate is at most `limit` x the free memory, without a new
    error. If that requires offloading or is not possible, changes after which only the estimate itself fits are offered
    too. A smaller model is offered only if nothing else fits."""
    if not case.estimate.moments:
        return []
    search = _Search(replace(case, spec=effective(case.spec)))
    found = list(islice(_combinations(search, limit), MAX_REMEDIES))
    if not case.estimate.fits:
        found = _with_likely(search, found)
    return found or list(islice(_smaller_models(search, limit), MAX_REMEDIES))


def single_changes(case: Case) -> list[Fix]:
    """Every single change that may save memory, by increasing effect on the training result and on speed, whether the
    run fits with it or not."""
    return [change.fix for change in sorted(_changes(case), key=lambda change: _rank([change]))]


def may_fit(case: Case, limit: float = 1) -> bool:
    """Whether a case would fit into `limit` x the free memory with less memory for activations, and into host RAM."""
    estimate = case.estimate
    fits = estimate.least_bytes <= limit * estimate.capacity_bytes
    return fits and estimate.host_bytes <= case.machine.ram_free_bytes


def patched_case(case: Case, patch: Mapping[str, Any]) -> Case:
    """The case with a patch applied, and the facts of a different model that the patch names."""
    spec, facts = effective(case.with_patch(patch)), case.facts
    if spec.model != case.spec.model:
        config = registry.HUB_CONFIGS.get(spec.model.hub_id.lower()) if spec.model.source == "hub" else None
        shape = from_config(config or registry.BUILTIN_MODELS[spec.model.builtin].config)
        is_reward_model = registry.STAGES[spec.train.stage].is_reward_model
        shape = shape.with_score_head if is_reward_model else shape
        facts = replace(facts, shape=shape, quant_method="", model_problem="")
    return Case(spec, case.machine, facts)


class _Applied:
    """A case after changes, with the texts of a fix that makes them."""

    def __init__(self, case: Case, fixes: Sequence[Fix] = ()) -> None:
        self.case, self.fixes = case, tuple(fixes)
        self._changes: dict[str, list[Change]] = {}

    def changes(self, kind: str) -> list[Change]:
        """All single changes of a kind that are possible in this case, computed once."""
        if kind not in self._changes:
            self._changes[kind] = _changes(self.case, kind)
        return self._changes[kind]

    @cached_property
    def errors(self) -> set[str]:
        """The codes of all errors but those about memory."""
        return {rule.code for rule in self.case.other_errors}

    def as_fix(self) -> Fix:
        """All changes as one fix."""
        estimate, patch = self.case.estimate, {key: value for fix in self.fixes for key, value in fix.patch.items()}
        costs = [*dict.fromkeys(fix.cost for fix in self.fixes if fix.cost)]
        if _load(estimate) > 1:
            costs.append(f"may need up to {data_size(estimate.high_bytes)}")
        label, safe = " + ".join(fix.label for fix in self.fixes), all(fix.safe for fix in self.fixes)
        return Fix(label, patch, safe, "; ".join(costs), estimate.device_bytes)


class _Search:
    """The changes of one case. What was computed for a combination is kept, because longer ones begin with it."""

    def __init__(self, case: Case) -> None:
        self.case, self.start = case, _Applied(case)
        self.applied: dict[tuple[str, ...], _Applied | None] = {(): self.start}

    def as_fix(self, changes: Sequence[Change], limit: float) -> Fix | None:
        """These changes as one fix, if they fit and cause no new error. If the upper bound may be above the free
        memory, the estimate itself must fit."""
        applied = self._after(changes)
        if applied is None:
            return None
        estimate, ram = applied.case.estimate, self.case.machine.ram_free_bytes
        fits = _load(estimate) <= min(limit, 1) or (_load(estimate) <= limit and estimate.fits)
        if not fits or estimate.host_bytes > ram or self._new_errors(applied):
            return None
        return applied.as_fix()

    def is_promising(self, changes: Sequence[Change], limit: float) -> bool:
        """Whether these changes may fit with some batch size and length. Changes that do not fit even without
        activations, have an error, or do not fit with the smallest batch and length are not tried with all batch sizes
        and lengths."""
        others = self._after([change for change in changes if change.kind not in ACTIVATION_KINDS])
        if others is None or not may_fit(others.case, limit):
            return False
        smallest = self._after([self.start.changes(c.kind)[-1] if c.kind in GRADUAL_KINDS else c for c in changes])
        if smallest and _load(smallest.case.estimate) > limit:
            return False
        return not self._new_errors(others)

    def _new_errors(self, applied: _Applied) -> set[str]:
        return applied.errors - self.start.errors

    def _after(self, changes: Sequence[Change]) -> _Applied | None:
        """Each change is computed again after the ones before it: a strategy may change the number of gradient
        accumulation steps. None if one of them is no longer possible."""
        labels = tuple(change.fix.label for change in changes)
        if labels not in self.applied:
            before = self._after(changes[:-1])
            self.applied[labels] = _apply(before, changes[-1]) if before else None
        return self.applied[labels]

    @cached_property
    def savings(self) -> list[tuple[Change, dict[str, int]]]:
        """Changes that save memory, and the bytes that each saves at each moment of the run."""
        before = _sizes(self.start.case.estimate)
        found = []
        for change in (change for kind in KINDS for change in self.start.changes(kind)):
            if applied := self._after([change]):
                after = _sizes(applied.case.estimate)
                found.append((change, {at: size - after.get(at, 0) for at, size in before.items()}))
        return [(change, saved) for change, saved in found if max(saved.values()) > 0]

    def is_enough(self, change: Change, limit: float) -> bool:
        """Whether the run fits after this change alone."""
        applied = self._after([change])
        return applied is not None and _load(applied.case.estimate) <= limit


def _apply(before: _Applied, change: Change) -> _Applied | None:
    found = [change] if change.kind not in KINDS else before.changes(change.kind)
    fix = next((c.fix for c in found if c.fix.label == change.fix.label), None)
    return _Applied(patched_case(before.case, fix.patch), (*before.fixes, fix)) if fix else None


def _with_likely(search: _Search, found: list[Fix]) -> list[Fix]:
    """`found` and remedies that likely fit. If `found` is empty, these are all combinations. If no remedy in `found`
    keeps the training result, or every remedy that keeps it offloads to the CPU, one strategy is added that keeps it
    and, in the second case, does not offload."""
    if not found:
        return list(islice(_combinations(search, POSSIBLE_EXCESS), MAX_REMEDIES))
    safe = [fix for fix in found if fix.safe]
    if not all(offloads(fix.patch) for fix in safe):
        return found
    strategies = (change for change in search.start.changes("strategy") if change.fix.safe)
    better = sorted((change for change in strategies if not safe or not offloads(change.fix.patch)), key=_slowdown)
    likely = (search.as_fix([change], POSSIBLE_EXCESS) for change in better)
    return [*safe, *islice(filter(None, likely), 1), *(fix for fix in found if not fix.safe)]


def _slowdown(change: Change) -> int:
    return change.slowdown


def offloads(patch: Mapping[str, Any]) -> bool:
    """Whether a patch turns on offloading."""
    return any(patch.get(option, value) != value for option, value in NO_OFFLOAD.items())


def _combinations(search: _Search, limit: float) -> Iterator[Fix]:
    """Remedies by increasing effect on training. Combinations whose savings together are too small at some moment are
    not estimated."""
    estimate = search.case.estimate
    allowed = limit * estimate.capacity_bytes / estimate.ratios[1]
    too_much = {at: size - allowed for at, size in _sizes(estimate).items() if size > allowed}
    savings = [(change, [saved[at] for at in too_much]) for change, saved in search.savings]
    single = [[change] for change, _ in savings if search.is_enough(change, limit)]
    # A change that saves enough but is refused, such as FSDP2 with an 8-bit base model, may work together with another
    # change.
    refused = [changes for changes in single if changes[0].kind == "strategy" and not search.as_fix(changes, limit)]
    rest = [(change, saved) for change, saved in savings if [change] not in single or [change] in refused]
    several = [
        [change for change, _ in changes]
        for size in (2, 3)
        for changes in combinations(rest, size)
        if _may_add_up(changes, too_much.values())
    ]
    accepted: list[list[Change]] = []
    for least, largest, wanted in EFFECT_BANDS:
        if len(accepted) < ENOUGH:
            candidates = [changes for changes in single + several if least <= _rank(changes)[0] <= largest]
            yield from _smallest_that_fit(search, candidates, wanted, accepted, limit)


def _may_add_up(changes: Sequence[tuple[Change, list[int]]], needed: Iterable[float]) -> bool:
    """Whether changes with these savings may together save the bytes that are needed at each moment. There is at most
    one of each kind. A smaller optimizer saves nothing more with LoRA, because the optimizer state of adapters is
    small, or with offloading, because the state is not on the device."""
    kinds = {change.kind for change, _ in changes}
    if len(kinds) < len(changes) or {"method", "optimizer"} <= kinds:
        return False
    if "optimizer" in kinds and any(offloads(change.fix.patch) for change, _ in changes):
        return False
    saved = map(sum, zip(*(sizes for _, sizes in changes), strict=True))  # at each moment
    return all(map(ge, saved, needed))


def _smallest_that_fit(
    search: _Search, candidates: list[list[Change]], wanted: int, accepted: list[list[Change]], limit: float
) -> Iterator[Fix]:
    """The smallest combinations that fit, the best ranked first: few of the same kinds, and none that includes an
    accepted one. Larger ones are tried until `wanted` of them do not offload."""
    before = len(accepted)

    def is_worth_trying(changes: list[Change]) -> bool:
        kinds = _kinds(changes)
        similar = sum(_kinds(other) == kinds for other in accepted[before:])
        is_new = similar < (1 if kinds[-1] in GRADUAL_KINDS else 2)
        does_more = any(_covers(changes, other) for other in accepted)
        return is_new and not does_more and search.is_promising(changes, limit)

    for size in (1, 2) if accepted else (1, 2, 3):
        ranked = sorted((changes for changes in candidates if len(changes) == size), key=_rank)
        for changes in islice(filter(is_worth_trying, ranked), MAX_TRIES):
            if fix := search.as_fix(changes, limit):
                accepted.append(changes)
                yield fix
        if sum(not any(offloads(change.fix.patch) for change in changes) for changes in accepted[before:]) >= wanted:
            return


def _kinds(changes: Sequence[Change]) -> tuple[str, ...]:
    return tuple(change.kind for change in changes)


def _covers(changes: Sequence[Change], others: Sequence[Change]) -> bool:
    """Whether `changes` has all of `others`, or in their place even smaller batches and lengths."""
    return all(
        any(change.kind == other.kind and (change == other or _is_smaller(change, other)) for change in changes)
        for other in others
    )


def _is_smaller(change: Change, other: Change) -> bool:
    return change.kind in GRADUAL_KINDS and _rank([change]) > _rank([other])


def _rank(changes: Sequence[Change]) -> tuple[int, int]:
    return sum(change.effect for change in changes), sum(change.slowdown for change in changes)


def _load(estimate: Estimate) -> float:
    """The upper bound of the estimate as a share of the free memory."""
    return estimate.high_bytes / max(1, estimate.capacity_bytes)


def _sizes(estimate: Estimate) -> dict[str, int]:
    """The bytes on a device at each moment of the run; of moments with the same name, the most."""
    sizes: dict[str, int] = {}
    for moment in estimate.moments:
        sizes[moment.at] = max(moment.bytes, sizes.get(moment.at, 0))
    return sizes


def _smaller_models(search: _Search, limit: float) -> Iterator[Fix]:
    """Smaller models, the largest first: each as it would be trained now, or with as few other changes as needed."""
    model = search.case.spec.model
    hub_ids = siblings(model.hub_id) if model.source == "hub" else []
    patches = [(hub_id.partition("/")[2], {"model.hub_id": hub_id}) for hub_id in hub_ids]
    if model.source != "builtin":
        patches.append(("Built-in small model", {"model.source": "builtin"}))
    for label, patch in patches:
        first = Change("model", Fix(label, patch, safe=False, cost="a smaller model"))
        less = [*search.start.changes("checkpointing"), *search.start.changes("batch")[-1:]]
        others = ([], less, *([method, *more] for method in search.start.changes("method") for more in ([], less)))
        fixes = (search.as_fix([first, *rest], limit) for rest in others)
        yield from islice(filter(None, fixes), 1)


def _changes(case: Case, kind: str = "") -> list[Change]:
    """All single changes that the spec takes, or those of one kind, in the order in which several are applied."""
    found = (change for name, changes in KINDS.items() if kind in ("", name) for change in changes(case))
    return [change for change in found if case.takes(change.fix.patch)]


def _strategies(case: Case) -> Iterator[Change]:
    for strategy, label, settings in recommended_strategies(case):
        engine = engine_of(strategy)
        if case.run.device == "cpu":
            helps = strategy not in registry.MULTI_PROCESS  # all processes share the same RAM
        else:
            helps = offloads(settings) or (len(available_gpus(case)) > 1 and engine.shards_optimizer)
        if not helps:
            continue
        patch = strategy_patch(case, strategy, settings)
        if engine.needs_several_processes and case.resolved(case.with_patch(patch)).world_size == 1:
            continue
        yield _strategy(case, strategy, label, patch)
        if _loads_whole_base(case, strategy):
            bf16 = {**patch, "method.quantization": "none"}
            change = _strategy(case, strategy, f"{label}, without quantization", bf16)
            cost = "; ".join(filter(None, (change.fix.cost, f"base model in {case.run.compute_dtype}")))
            yield replace(change, fix=replace(change.fix, safe=False, cost=cost), effect=change.effect + 2)


def _loads_whole_base(case: Case, strategy: str) -> bool:
    """Whether the strategy shards or offloads weights, but not those of this quantized base model while it loads."""
    engine, method = engine_of(strategy), case.spec.method
    is_quantized = method.kind == "lora" and method.quantization != "none" and engine.supports_lora
    is_sent_in_shards = engine.shards_from_host and method.quantization in registry.FOUR_BIT
    return is_quantized and engine.strategy.shards_weights and not is_sent_in_shards


def _strategy(case: Case, strategy: str, label: str, patch: Mapping[str, Any]) -> Change:
    engine = engine_of(strategy)
    same_batch = case.resolved(case.with_patch(patch)).global_batch_size == case.run.global_batch_size
    slowdown = engine.offload_slowdown if offloads(patch) else engine.step_slowdown
    communicates = "slower: more communication" if slowdown >= 25 else ""
    cost = "much slower: waits for CPU and PCIe" if offloads(patch) else communicates
    return Change("strategy", Fix(label, patch, same_batch, cost), effect=0 if same_batch else 8, slowdown=slowdown)


def _methods(case: Case) -> Iterator[Change]:
    """LoRA instead of full fine-tuning, and a 4-bit base model. With ZeRO-3, offloading does not help QLoRA: every
    device loads the whole base model."""
    method = case.spec.method
    lora: dict[str, Any] = {"method.kind": "lora"}
    if case.spec.train.stage in registry.NEXT_TOKEN_STAGES:
        lora["train.learning_rate"] = 2e-4
    is_lora = method.kind == "lora"
    if not is_lora:
        yield Change("method", Fix("LoRA", lora, False, "trains adapters only"), effect=20)
    is_int8 = is_lora and method.quantization == "int8"
    if (is_int8 or method.quantization == "none") and (
        case.run.param_offload == "none" or case.run.engine.shards_from_host
    ):
        nf4 = {"method.quantization": "nf4", "method.bnb_4bit_use_double_quant": True}
        cost = "4-bit base model" if is_lora else "trains adapters only, 4-bit base model"
        label = "4-bit quantization (NF4)" if is_int8 else "QLoRA"
        fix = Fix(label, nf4 if is_lora else {**nf4, **lora}, False, cost)
        yield Change("method", fix, effect=1 if is_int8 else 10 if is_lora else 25, slowdown=0 if is_int8 else 30)


def _ranks(case: Case) -> Iterator[Change]:
    if case.spec.lora.r > LARGE_RANK:
        fix = Fix("LoRA rank 16", {"lora.r": 16, "lora.alpha": 32.0}, False, "fewer trainable parameters")
        yield Change("rank", fix, effect=6)


def _targets(case: Case) -> Iterator[Change]:
    if case.spec.adapts_experts(case.facts.stacked_modules):
        yield Change("targets", ATTENTION_ONLY, effect=7)


def _optimizers(case: Case) -> Iterator[Change]:
    if case.spec.train.optim in ("adamw_torch", "adamw_torch_fused"):
        eight_bit = Fix("8-bit AdamW", {"train.optim": "adamw_bnb_8bit"}, False, "quantized optimizer state")
        yield Change("optimizer", eight_bit, effect=5)
        if case.run.engine.flattens_parameters:  # without the rows and columns of a matrix, Adafactor saves little
            return
        adafactor = Fix("Adafactor", {"train.optim": "adafactor"}, False, "a different optimizer")
        yield Change("optimizer", adafactor, effect=15, slowdown=5)


def _references(case: Case) -> Iterator[Change]:
    if not registry.STAGES[case.spec.train.stage].uses_reference_model:
        return
    fix = Fix(
        "Precomputed reference log-probabilities",
        {"preference.precompute_ref_log_probs": True},
        cost="one pass over the data before training",
    )
    yield Change("reference", fix, slowdown=5)


def _checkpointing(case: Case) -> Iterator[Change]:
    fix = Fix("Activation checkpointing", {"train.activation_checkpointing": True}, cost="about a third slower")
    yield Change("checkpointing", fix, slowdown=30)


def _batches(case: Case) -> Iterator[Change]:
    for halvings, patch in enumerate(smaller_batches(case), start=1):
        # The label must not name the accumulation steps: `_as_fix` finds the change again by its label.
        label = f"Batch size {patch['train.per_device_train_batch_size']} with more gradient accumulation"
        compares = case.spec.compares_examples
        cost = "the loss compares fewer examples" if compares else "a little slower"
        yield Change("batch", Fix(label, patch, not compares, cost), slowdown=4 * halvings)


def _lengths(case: Case) -> Iterator[Change]:
    length, halvings = case.spec.data.max_length // 2, 1
    while length >= MIN_MAX_LENGTH:
        label = f"Max length of {counted(length, 'token')}"
        fix = Fix(label, {"data.max_length": length}, False, "truncates longer examples")
        yield Change("length", fix, effect=40 + 5 * halvings)
        length, halvings = length // 2, halvings + 1


def _generations(case: Case) -> Iterator[Change]:
    if case.estimate.is_limited_by(GENERATION):
        fix = Fix("No generations", {"eval.num_generations": 0}, False, "no generated outputs to evaluate")
        yield Change("generations", fix, effect=1)


def _eval_batches(case: Case) -> Iterator[Change]:
    size, halvings = case.spec.eval.per_device_eval_batch_size // 2, 1
    while size and (case.estimate.is_limited_by(EVALUATION) or case.estimate.is_limited_by(GENERATION)):
        fix = Fix(f"Eval batch size {size}", {"eval.per_device_eval_batch_size": size}, cost="slower evaluation")
        yield Change("eval batch", fix, slowdown=halvings)
        size, halvings = size // 2, halvings + 1


KINDS = {
    "strategy": _strategies,
    "method": _methods,
    "rank": _ranks,
    "targets": _targets,
    "optimizer": _optimizers,
    "reference": _references,
    "generations": _generations,
    "eval batch": _eval_batches,
    "checkpointing": _checkpointing,
    "batch": _batches,
    "length": _lengths,
}
# Kinds of changes that reduce the memory of activations only.
ACTIVATION_KINDS = ("eval batch", "checkpointing", "batch", "length")
# Kinds with several sizes. Only the smallest sufficient one is offered; other kinds have up to two changes each.
GRADUAL_KINDS = ("eval batch", "batch", "length")


def smaller_batches(case: Case) -> Iterator[dict[str, Any]]:
    """Half the batch size with twice the gradient accumulation, repeatedly: the global batch size stays the same."""
    size, accumulation = case.spec.train.per_device_train_batch_size, case.spec.train.gradient_accumulation_steps
    if case.optimizer.steps_in_backward:
        return  # these optimizers step in every backward pass, so they cannot accumulate gradients
    least = least_batch_size(case.spec)
    while size > least and size % 2 == 0:
        size, accumulation = size // 2, accumulation * 2
        yield {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": accumulation}


def least_batch_size(spec: RunSpec) -> int:
    """The smallest per-device batch size."""
    return 2 if spec.compares_examples else 1


def available_gpus(case: Case) -> tuple[Gpu, ...]:
    """The GPUs that any strategy of this run may use: those of launch.devices, or all."""
    listed = case.spec.launch.devices
    return tuple(gpu for gpu in case.machine.gpus if not listed or gpu.id in listed)


def recommended_strategies(case: Case) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Each recommended strategy, without offload and, on accelerators, with it: key, label, and the settings of
    offload."""
    for strategy, row in registry.STRATEGIES.items():
        engine = engine_of(strategy)
        if not engine.is_recommended:
            continue
        yield strategy, row.label, NO_OFFLOAD
        if engine.offload_patch and case.run.device != "cpu":
            yield strategy, f"{row.label} with CPU offload", {**NO_OFFLOAD, **engine.offload_patch}


def processes_patch(case: Case, strategy: str) -> dict[str, Any]:
    """The patch that starts a process of this strategy on each device."""
    if strategy not in registry.MULTI_PROCESS:
        return {}
    launch, devices = case.spec.launch, len(available_gpus(case)) if case.run.on_gpu else 0
    is_distributed = case.spec.parallel.strategy in registry.MULTI_PROCESS
    processes = launch.nproc_per_node if is_distributed else devices or 2
    return {
        "launch.nproc_per_node": min(processes, devices or processes),
        # Hidden with a single process: the form may have other values than this spec.
        "launch.nnodes": launch.nnodes,
        "launch.rendezvous": launch.rendezvous,
    }


def strategy_patch(case: Case, strategy: str, settings: Mapping[str, Any] = NO_OFFLOAD) -> dict[str, Any]:
    """The patch that selects a strategy with these settings on all devices, with the same global batch size: by another
    number of gradient accumulation steps, else by smaller per-device batches, where the numbers are divisible."""
    spec = case.spec
    patch = {**settings, "parallel.strategy": strategy, **processes_patch(case, strategy)}
    replicas, size = case.resolved(case.with_patch(patch)).data_parallel_size, spec.train.per_device_train_batch_size
    each, rest = divmod(case.run.global_batch_size, replicas)
    if rest or each < least_batch_size(spec):
        return patch
    if each % size == 0:
        same_batch = {**patch, "train.gradient_accumulation_steps": each // size}
    elif each < size:
        same_batch = {**patch, "train.per_device_train_batch_size": each, "train.gradient_accumulation_steps": 1}
    else:
        return patch
    return same_batch if case.takes(same_batch) else patch
