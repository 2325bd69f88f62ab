"""Ways to need less memory: each a fix, with the peak that it leads to. One list for the rules and for what if.

Floor 3. Imports: below. Those that keep what is learned come before others. Single changes are tried first, then two,
then three; of as many the quickest comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from backend import registry
from backend.config.options import effective
from backend.memory import Estimate
from backend.modelspec import from_config
from backend.registry.hub_models import siblings
from backend.rules.base import RULES, Case, Finding, Fix, counted
from backend.rules.common_fixes import ATTENTION_ONLY

MOST = 6  # ways that are worth reading
FEW = 3  # below it, rows are cut, too
TRIES = 12  # combinations of one size that are worth the time
LOSSES = ((0, 0, 1), (1, 39, FEW), (40, 1000, 1))  # from, to; further changes are added until so many are found
CLEARLY = 1.2  # of what is free: it does not start, as far as the estimate may be wrong
ON_DEVICE = {"parallel.offload_optimizer": "none", "parallel.offload_param": "none", "parallel.cpu_offload": False}
AWAY: Mapping[str, Mapping[str, Any]] = {
    "zero2": {"parallel.offload_optimizer": "cpu"},
    "zero3": {"parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"},
    "fsdp2": {"parallel.cpu_offload": True},
}
LEFT_OUT = ("zero0", "fsdp1")  # as DDP, and as FSDP2
# How much longer a step takes, in percent, about: for the order alone.
SLOW = {"zero1": 4, "zero2": 6, "fsdp2": 25, "zero3": 30, "tensor": 40}
SLOW_AWAY = {"zero2": 80, "fsdp2": 150, "zero3": 200}


@dataclass(frozen=True)
class Change:
    """One thing to do otherwise; of a kind only one is done. `loss` ranks what it does to what is learned (0: the same
    is learned), `slow` to the time of a step."""

    kind: str
    fix: Fix
    loss: int = 0
    slow: int = 0


def ways(case: Case, share: float) -> list[Fix]:
    """The best changes, at most six, after which the most that it may come to is within `share` of what is free, with
    no new error. Another model is the last resort."""
    if case.shape is None or case.shape.activations_unknown:
        return []
    case = replace(case, spec=effective(case.spec))
    known = {found.code for found in obstacles(case)}
    found = list(islice(_combined(case, share, known), MOST))
    return found or list(islice(_smaller_models(case, share, known), MOST))


def after(case: Case, patch: Mapping[str, Any]) -> Case:
    """The case with a patch applied, and what is known of another model that it names."""
    spec, facts = effective(case.with_patch(patch)), case.facts
    if spec.model != case.spec.model:
        config = registry.HUB_CONFIGS.get(spec.model.hub_id.lower()) if spec.model.source == "hub" else None
        shape = from_config(config or registry.BUILTIN_MODELS[spec.model.builtin].config)
        scores = registry.STAGES[spec.train.stage].is_reward_model
        facts = replace(facts, shape=shape.scoring if scores else shape, quant_method="", model_problem="")
    return Case(spec, case.machine, facts)


def _combined(case: Case, share: float, known: set[str]) -> Iterator[Fix]:
    """Ways that fit: those that keep what is learned, then what learns a little otherwise, then what cuts rows, if
    there are few others. What saves too little even if all savings added up is not looked at twice."""
    if _load(_least(case).estimate) > share:
        return
    load, useful = _load(case.estimate), _useful(case)
    alone = [[change] for change, saved in useful if load - saved <= share]
    rest = [(change, saved) for change, saved in useful if [change] not in alone]
    enough = [
        [change for change, _ in some]
        for size in (2, 3)
        for some in combinations(rest, size)
        if load - sum(saved for _, saved in some) <= share and len({change.kind for change, _ in some}) == size
    ]
    taken: list[list[Change]] = []
    for least, most, wanted in LOSSES:
        if len(taken) < FEW:
            sets = [some for some in alone + enough if least <= _price(some)[0] <= most]
            yield from _fewest(sets, wanted, taken, case, share, known)


def _least(case: Case) -> Case:
    """The case with the last change of every kind: as little memory as options can do with, nearly."""
    for kind in KINDS:
        others = [after(case, change.fix.patch) for change in _changes(case, kind)[-2:]]
        case = min([case, *others], key=lambda now: _load(now.estimate))
    return case


def _useful(case: Case) -> list[tuple[Change, float]]:
    """Changes that save, and how much at most, as a share of what is free. A peak is where most is held at once: what
    a change saves may show only after the largest saving."""

    def saving(now: Case) -> dict[str, float]:
        load = _load(now.estimate)
        return {c.fix.label: load - _load(after(now, c.fix.patch).estimate) for c in _changes(now)}

    first = saving(case)
    changes = _changes(case)
    largest = max(changes, key=lambda change: first[change.fix.label], default=None)
    then = saving(after(case, largest.fix.patch)) if largest else {}
    most = [(change, max(first[change.fix.label], then.get(change.fix.label, 0))) for change in changes]
    return [(change, saved) for change, saved in most if saved > 0]


def _fewest(
    sets: list[list[Change]], wanted: int, taken: list[list[Change]], case: Case, share: float, known: set[str]
) -> Iterator[Fix]:
    """Of these sets the smallest that fit, the cheapest first: few of the same kinds, and none with more in it than
    one that is taken."""
    before = len(taken)
    for size in (1, 2) if taken else (1, 2, 3):
        kinds: list[tuple[str, ...]] = []
        for some in islice(sorted((s for s in sets if len(s) == size), key=_price), TRIES):
            own = tuple(change.kind for change in some)
            more = any(all(change in some for change in less) for less in taken)
            few = kinds.count(own) < (1 if own[-1] in LADDERS else 2)
            if few and not more and (fix := _fitting(case, some, share, known)):
                kinds.append(own)
                taken.append(some)
                yield fix
        if len(taken) - before >= wanted:
            return


def _price(some: Sequence[Change]) -> tuple[int, int]:
    return sum(change.loss for change in some), sum(change.slow for change in some)


def _fitting(case: Case, some: Sequence[Change], share: float, known: set[str]) -> Fix | None:
    """These changes as one fix, if they fit. Each is asked for again after the ones before it: a strategy
    deals rows out anew."""
    labels, costs, safe, now, patch = [], [], True, case, dict[str, Any]()
    for change in some:
        found = [change] if change.kind not in KINDS else _changes(now, change.kind)
        again = next((c for c in found if c.fix.label == change.fix.label), None)
        if again is None:
            return None
        labels.append(again.fix.label)
        costs += [again.fix.cost] if again.fix.cost not in costs else []
        safe, now, patch = safe and again.fix.safe, after(now, again.fix.patch), {**patch, **again.fix.patch}
    taken = now.estimate
    if _load(taken) > share or taken.host_bytes > CLEARLY * case.machine.ram_free_bytes:
        return None
    if {found.code for found in obstacles(now)} - known:
        return None
    return Fix(" + ".join(labels), patch, safe, "; ".join(filter(None, costs)), taken.device_bytes)


def _load(found: Estimate) -> float:
    return found.high_bytes / max(1, found.capacity_bytes)


def obstacles(case: Case) -> list[Finding]:
    """The errors that are not about memory, in the order of codes."""
    others = (rule for rule in sorted(RULES, key=lambda rule: rule.code) if not rule.code.startswith("MEM"))
    return [found for rule in others if rule.level == "error" and (found := rule.finding(case))]


def _smaller_models(case: Case, share: float, known: set[str]) -> Iterator[Fix]:
    """Other models, the largest first: each as it would be trained now, or with as little else as it takes."""
    model = case.spec.model
    names = siblings(model.hub_id) if model.source == "hub" else []
    patches = [(name.partition("/")[2], {"model.hub_id": name}) for name in names]
    if model.source != "builtin":
        patches.append(("The built-in small model", {"model.source": "builtin"}))
    for label, patch in patches:
        first = Change("model", Fix(label, patch, safe=False, cost="a smaller model"))
        less = [*_changes(case, "checkpointing"), *_changes(case, "batch")[-1:]]
        others = ([], less, *([method, *more] for method in _changes(case, "method") for more in ([], less)))
        fixes = (_fitting(case, [first, *rest], share, known) for rest in others)
        yield from islice(filter(None, fixes), 1)


def _changes(case: Case, kind: str = "") -> list[Change]:
    """Every single change that a spec takes, or those of a kind, in the order in which several are done."""
    found = (change for name, list_ in KINDS.items() if kind in ("", name) for change in list_(case))
    return [change for change in found if case.takes(change.fix.patch)]


def _strategies(case: Case) -> Iterator[Change]:
    for name, label, patch in strategies(case):
        away = any(patch[option] != kept for option, kept in ON_DEVICE.items())
        if case.run.device == "cpu":
            helps = name == "single"  # every process has a share of the same RAM
        else:
            helps = away or (len(case.machine.gpus) > 1 and name not in ("single", "ddp"))
        if helps:
            yield _strategy(case, name, label, patch, away)


def _strategy(case: Case, name: str, label: str, patch: Mapping[str, Any], away: bool) -> Change:
    other = case.with_patch(patch)
    same = case.resolved(other).global_batch_size == case.run.global_batch_size
    slow = SLOW_AWAY[name] if away else SLOW.get(name, 0)
    cost = "much slower: waits for the host" if away else "slower: more is sent" if slow >= 25 else ""
    return Change("strategy", Fix(label, patch, same, cost), loss=0 if same else 8, slow=slow)


def _methods(case: Case) -> Iterator[Change]:
    """Adapters instead of whole weights, and a packed base: not where weights go to and fro, which nobody has seen."""
    method, parallel = case.spec.method, case.spec.parallel
    lora: dict[str, Any] = {"method.kind": "lora"}
    if case.spec.train.stage in registry.NEXT_TOKEN_STAGES:
        lora["train.learning_rate"] = 2e-4
    if method.kind != "lora":
        yield Change("method", Fix("LoRA", lora, False, "only adapters learn"), loss=20)
    if method.quantization == "none" and not parallel.cpu_offload and parallel.offload_param == "none":
        whole = method.kind != "lora"
        packed = {"method.quantization": "nf4", "method.bnb_4bit_use_double_quant": True, **(lora if whole else {})}
        cost = "only adapters learn, on 4 bits" if whole else "the base has 4 bits"
        yield Change("method", Fix("QLoRA", packed, False, cost), loss=25 if whole else 10, slow=30)


def _ranks(case: Case) -> Iterator[Change]:
    if case.spec.lora.r > 64:
        narrow = {"lora.r": 16, "lora.alpha": 32.0}
        yield Change("rank", Fix("Rank 16", narrow, False, "narrower adapters"), loss=6)


def _targets(case: Case) -> Iterator[Change]:
    if case.spec.adapts_experts(case.facts.stacked_modules):
        yield Change("targets", ATTENTION_ONLY, loss=7)


def _optimizers(case: Case) -> Iterator[Change]:
    if case.spec.train.optim in ("adamw_torch", "adamw_torch_fused"):
        rounded = Fix("8-bit AdamW", {"train.optim": "adamw_bnb_8bit"}, False, "its state is rounded")
        yield Change("optimizer", rounded, loss=5)
        other = Fix("Adafactor", {"train.optim": "adafactor"}, False, "learns another way")
        yield Change("optimizer", other, loss=15, slow=5)


def _references(case: Case) -> Iterator[Change]:
    if not registry.STAGES[case.spec.train.stage].uses_reference_model:
        return
    fix = Fix(
        "Reference computed beforehand",
        {"preference.precompute_ref_log_probs": True},
        cost="one pass over the rows before",
    )
    yield Change("reference", fix, slow=5)


def _checkpointing(case: Case) -> Iterator[Change]:
    fix = Fix("Activation checkpointing", {"train.activation_checkpointing": True}, cost="a third slower")
    yield Change("checkpointing", fix, slow=30)


def _batches(case: Case) -> Iterator[Change]:
    for step, patch in enumerate(smaller(case), start=1):
        fix = Fix(
            f"Batch size {patch['train.per_device_train_batch_size']}, accumulated", patch, cost="a little slower"
        )
        yield Change("batch", fix, slow=4 * step)


def _lengths(case: Case) -> Iterator[Change]:
    length, step = case.spec.data.max_length // 2, 1
    while length >= 128:
        cut = Fix(f"Cut off at {counted(length, 'token')}", {"data.max_length": length}, False, "longer rows lose more")
        yield Change("length", cut, loss=40 + 5 * step)
        length, step = length // 2, step + 1


KINDS = {
    "strategy": _strategies,
    "method": _methods,
    "rank": _ranks,
    "targets": _targets,
    "optimizer": _optimizers,
    "reference": _references,
    "checkpointing": _checkpointing,
    "batch": _batches,
    "length": _lengths,
}
LADDERS = ("batch", "length")  # the first step that is enough will do; of other kinds two


def smaller(case: Case) -> Iterator[dict[str, Any]]:
    """Half the batch with twice the accumulation, again and again: a step learns from the same rows."""
    size, accumulation = case.spec.train.per_device_train_batch_size, case.spec.train.gradient_accumulation_steps
    if registry.OPTIMIZERS[case.spec.train.optim].steps_in_backward:
        return  # it steps with every batch: nothing adds up
    neighbours = case.spec.train.stage == "kto" and case.spec.preference.kto_loss_type == "kto"  # a row needs another
    while size > 1 + neighbours and size % 2 == 0:
        size, accumulation = size // 2, accumulation * 2
        yield {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": accumulation}


def strategies(case: Case) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every strategy: its name, its label, and the change to it."""
    for name, row in registry.STRATEGIES.items():
        if name in LEFT_OUT:
            continue
        yield name, row.label, _to_strategy(case, name, ON_DEVICE)
        if name in AWAY and case.run.device != "cpu":
            yield name, f"{row.label}, offloaded", _to_strategy(case, name, {**ON_DEVICE, **AWAY[name]})


def _to_strategy(case: Case, strategy: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """The change to a strategy, with all devices, and the same rows a step where they can be dealt out."""
    spec = case.spec
    patch = {"parallel.strategy": strategy, **more}
    if strategy in registry.MULTI_PROCESS:
        there = len(case.machine.gpus) if case.run.on_gpu else 0
        asked = spec.launch.nproc_per_node if spec.parallel.strategy in registry.MULTI_PROCESS else there or 2
        patch["launch.nproc_per_node"] = min(asked, there or asked)
    rows = case.run.global_batch_size
    each = spec.train.per_device_train_batch_size * case.resolved(case.with_patch(patch)).data_parallel_size
    dealt = {**patch, "train.gradient_accumulation_steps": rows // each}
    if rows % each == 0 and case.takes(dealt):
        return dealt
    return patch
