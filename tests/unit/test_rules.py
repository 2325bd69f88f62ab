"""The catalogue proves itself: every rule's examples, fixes, fields and words; and no spec makes `check` fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.cli.docs import rules_markdown
from backend.config import RunSpec
from backend.config.options import Option, SpecError, by_name, edit, effective, options
from backend.config.presets import presets
from backend.inspect import InputFacts, inspect_inputs
from backend.machine import Machine
from backend.memory import estimate
from backend.paths import HOME
from backend.rules import FAMILIES, OUTDATED, RULES, Case, Example, Finding, Rule, check
from backend.rules.autofix import MOST, AutofixResult, autofix
from backend.rules.examples import (
    DEMO,
    EQUIPPED,
    EQUIPPED_TWO,
    FILES,
    FULL_DISK,
    GPT2,
    H100,
    LAPTOP,
    LLAMA_8B,
    NPU,
    SMALL,
    T4,
    TWO_H100,
    gpus,
    trouble,
)
from backend.rules.memory import NO_WAY

COUNT = 226


def judged(example: Example, patch: dict[str, Any] | None = None) -> tuple[Finding, ...]:
    spec = edit(RunSpec(), {**example.patch, **(patch or {})})
    return check(spec, example.machine or LAPTOP, example.facts or DEMO)


def codes(findings: tuple[Finding, ...], level: str = "") -> set[str]:
    return {f.code for f in findings if not level or f.level == level}


def test_catalogue() -> None:
    assert len(RULES) == COUNT
    assert len({r.code for r in RULES}) == COUNT
    assert len({r.title for r in RULES}) == COUNT
    assert {r.code.rstrip("0123456789") for r in RULES} == set(FAMILIES)
    text = rules_markdown()
    assert text.isascii()
    assert all(f"### {r.code} {r.title}" in text for r in RULES)


def test_what_is_no_longer_so_is_proven_where_it_says_so() -> None:
    assert 8 <= len(OUTDATED) <= 14 and len({old.pair for old in OUTDATED}) == len(OUTDATED)
    text = rules_markdown()
    for old in OUTDATED:
        assert old.belief.endswith(".") and old.now.endswith(".") and old.seen and f"### {old.pair}" in text
        if old.test:
            file, _, name = old.test.partition("::")
            assert f"def {name}(" in (HOME / "tests/process" / file).read_text(), old.test
    assert sum(bool(old.test) for old in OUTDATED) >= 8


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_rule(rule: Rule) -> None:
    assert rule.reason and rule.reason[0].isupper() and rule.reason.endswith(".")
    assert rule.source and rule.title and not rule.title.endswith(".")
    assert rule.fields and all(name in by_name() for name in rule.fields)
    found = judged(rule.fails_on)
    assert rule.code in codes(found), f"bad raises {codes(found)}"
    assert codes(found, "error") <= {rule.code}, "the bad example is wrong in another way too"
    good = judged(rule.passes_on)
    assert rule.code not in codes(good)
    assert not codes(good, "error")


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_fixes(rule: Rule) -> None:
    found = next(f for f in judged(rule.fails_on) if f.code == rule.code)
    assert all(name in by_name() for name in found.fields)
    assert found.message.endswith((".", "!")) and found.message[0] not in " ,"
    if rule.level == "error":
        assert found.fixes or rule.manual_fix, "an error needs a way out"
    before = codes(judged(rule.fails_on), "error")
    for fix in found.fixes:
        after = judged(rule.fails_on, dict(fix.patch))
        assert fix.label
        # Files do not change by a click: what they showed stays in a made-up glance.
        stays = rule.code in codes(after) and rule.code in {"DAT002", "DAT003"}
        assert rule.code not in codes(after) or stays, fix
        assert codes(after, "error") <= before, fix


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_of_several_fixes_the_best_stands_first_and_others_say_what_they_cost(rule: Rule) -> None:
    found = next(f for f in judged(rule.fails_on) if f.code == rule.code)
    safe = [fix.safe for fix in found.fixes if fix.cost != "does not fit"]
    assert safe == sorted(safe, reverse=True), "what is learned stays the same, if it can"
    assert len(found.fixes) < 2 or sum(not fix.cost for fix in found.fixes) <= 1, found.fixes
    assert all(len(fix.cost) < 80 and not fix.cost.endswith(".") for fix in found.fixes)


def test_a_fix_that_does_not_fit_comes_last() -> None:
    """Unsloth under ZeRO-3: without it the weights stay spread, under DDP each device holds all of them."""
    patch = {
        "method.kind": "full",
        "train.use_unsloth": True,
        "parallel.strategy": "zero3",
        "train.per_device_train_batch_size": 1,
    }
    eight_b = replace(DEMO, shape=LLAMA_8B)
    small, large = (check(edit(RunSpec(), patch), gpus(2, "GPU", gib, (9, 0)), eight_b) for gib in (110, 320))
    costs = [[(x.label, x.cost) for f in found if f.code == "UNS003" for x in f.fixes] for found in (small, large)]
    assert costs[0][-1] == ("DDP", "does not fit")
    assert costs[1][-1] == ("DDP", "a full copy on each device")


def test_default_and_presets_run_anywhere(tmp_path: Path) -> None:
    first = next(p.spec for p in presets() if p.name == "first-run")
    for machine in (LAPTOP, H100, T4, TWO_H100):
        for spec in (RunSpec(), first):
            assert codes(check(spec, machine, inspect_inputs(spec, tmp_path)), "error") == set()


@pytest.mark.parametrize(
    ("processes", "least", "more", "refused"),
    [
        (1, 1, {"parallel.strategy": "ddp"}, False),
        (2, 1, {}, False),
        (1, 1, {}, True),
        (1, 2, {}, False),
        (4, 1, {"parallel.replicate_size": 2}, False),
        (2, 1, {"parallel.replicate_size": 2}, True),
        (8, 3, {"parallel.strategy": "zero3"}, False),
        (8, 3, {"parallel.strategy": "zero3", "train.optim": "lion"}, True),
        (8, 3, {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme"}, True),
        (8, 3, {"parallel.strategy": "zero2", "parallel.sequence_parallel_size": 2}, True),
        (8, 3, {"parallel.strategy": "zero0"}, True),
    ],
)
def test_which_engines_go_on_with_fewer_nodes(processes: int, least: int, more: dict[str, Any], refused: bool) -> None:
    patch = {**SPREAD, "launch.rendezvous": "elastic", "launch.nnodes": 4, "parallel.strategy": "fsdp2", **more}
    found = judged(Example({**patch, "launch.nproc_per_node": processes, "launch.min_nnodes": least}))
    assert ("NOD006" in codes(found)) == refused


def test_a_table_of_deepspeed_is_no_word() -> None:
    keys = {"parallel.strategy": "zero2", "parallel.extra_config": '{"activation_checkpointing": true}'}
    found = next(f for f in judged(Example(keys, TWO_H100)) if f.code == "STR040")
    assert "a table belongs there" in found.message
    assert not codes(judged(Example({**keys, **found.fixes[0].patch}, TWO_H100)), "error")


def test_a_switch_of_fsdp_is_no_table() -> None:
    given = '{"activation_checkpointing": {"partition_activations": false}}'
    found = judged(Example({"parallel.strategy": "fsdp2", "parallel.extra_config": given}, TWO_H100))
    assert "neither true nor false" in next(f.message for f in found if f.code == "STR042")


def test_order_is_fixed() -> None:
    spec = edit(RunSpec(), {"launch.device": "cuda", "train.gradient_accumulation_steps": 999, "save.only_model": True})
    found = check(spec, LAPTOP, DEMO)
    assert [f.level for f in found] == sorted((f.level for f in found), key=["error", "warning", "advice"].index)
    assert found == check(spec, LAPTOP, DEMO)


OLD = replace(EQUIPPED, versions=dict.fromkeys(EQUIPPED.versions, "0.1"))
MACHINES = (
    OLD,
    replace(TWO_H100, triton=False, shm_bytes=2**26),
    replace(TWO_H100, gpus=tuple(replace(gpu, users=("python (1)",), links=()) for gpu in TWO_H100.gpus)),
    LAPTOP,
    SMALL,
    H100,
    TWO_H100,
    EQUIPPED,
    EQUIPPED_TWO,
    T4,
    NPU,
    FULL_DISK,
    Machine(),
)
GLANCES = (
    DEMO,
    replace(DEMO, min_prompt_tokens=900, lengths=(1000,)),
    InputFacts(),
    InputFacts(shape=GPT2, unknown="", rows=0, held=0, lengths=(0,)),
    InputFacts(shape=LLAMA_8B, unknown="", rows=1, columns=("x",), exact=False, lengths=(9000,)),
    replace(FILES, format="labels", labels=(300, 100)),
    replace(FILES, format="pairs"),
    trouble("data.files", "no such file"),
    trouble("data.validation_files", "column text holds a number", 7),
    replace(DEMO, packed="gptq"),
    replace(DEMO, packed="hqq"),
    replace(DEMO, packed="bitsandbytes"),
    replace(DEMO, packed="quark"),
)
WORDS = ("q_proj", "lm_head", "embed_tokens", "nothing", "", "mlp", "model.layers.3.mlp.up_proj", "RANK")

NODES: dict[str, tuple[Any, ...]] = {
    "launch.hostfile": (
        (),
        ("worker-1 slots=2", "worker-2 slots=2"),
        ("worker-1 slots=2", "worker-2"),
        ("a slots=1",) * 2,
    ),
    "launch.include": ("", "worker-1", "worker-3", "worker-1:0@worker-2:1", "worker-1:9", ":"),
    "launch.master_addr": ("", "localhost", "10.0.0.1", "::1", "node-0", "a b"),
    "launch.extra_accelerate_config": (
        "",
        '{"ipex_config": {}, "mixed_precision": "bf16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}',
        '{"fsdp_config": {"backward_prefetch": "x"}, "fp8_config": {"backend": "TE"}}',
    ),
    "parallel.extra_config": (
        "",
        '{"gradient_clipping": 0.5, "optimizer": {"type": "AdamW"}, "elasticity": {}}',
        '{"zero_optimization": {"stage": 1, "stage3_gather_16bit_weights_on_model_save": false}}',
        '{"activation_checkpointing": true, "auto_wrap_policy": "NO_WRAP", "nobody": 1, "xla": true}',
        '{"prescale_gradients": true, "tensor_parallel": {"autotp_size": 2}}',
    ),
}
SPREAD = {"parallel.strategy": "ddp", "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
BASES: tuple[dict[str, Any], ...] = ({}, {}, SPREAD, {**SPREAD, "launch.launcher": "deepspeed"})


def value(option: Option, dice: random.Random) -> Any:
    """A value that `option` may take, often at its limits."""
    if option.name in NODES:
        return dice.choice(NODES[option.name])
    if option.kind == "bool":
        return dice.random() < 0.5
    if option.kind == "choice":
        return dice.choice([v for v, _ in option.choices])
    if option.kind in ("int", "float"):
        low = option.minimum if option.minimum is not None else 0
        high = min(option.maximum if option.maximum is not None else 1e6, 1e6)
        drawn = dice.choice((low, high, low + 1, dice.uniform(low, high), option.default))
        return int(drawn) if option.kind == "int" else float(drawn)
    if option.kind == "list":
        number = option.name == "launch.devices"
        return tuple(dice.randrange(4) if number else dice.choice(WORDS[:4]) for _ in range(dice.randrange(4)))
    if option.kind == "table":
        return dict.fromkeys(dice.sample(("RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "X"), 2), "1")
    return dice.choice(WORDS)


def drawn(dice: random.Random) -> RunSpec:
    patch = dice.choice(BASES) | {o.name: value(o, dice) for o in dice.sample(options(), dice.randrange(1, 30))}
    while True:
        try:
            return edit(RunSpec(), patch)
        except SpecError as error:
            for problem in error.problems:
                patch.pop(problem.field)


def cases(count: int) -> Iterator[tuple[RunSpec, Machine, InputFacts]]:
    dice = random.Random(2026)
    for _ in range(count):
        yield drawn(dice), dice.choice(MACHINES), dice.choice(GLANCES)


def test_no_spec_makes_check_fail() -> None:
    seen = set()
    for spec, machine, facts in cases(1400):
        found = check(spec, machine, facts)
        seen |= codes(found)
        assert not [f for f in found if f.code == "MEM001" and not f.fixes and NO_WAY not in f.message]
    assert len(seen) > 0.7 * COUNT, {r.code for r in RULES} - seen


def cased(machine: Machine, facts: InputFacts) -> Callable[[RunSpec], Case]:
    return lambda spec: Case(effective(spec), machine, facts)


def test_applying_fixes_comes_to_an_end() -> None:
    """At one where safe fixes lead: each new, never with more errors than before; and what is left has no such fix
    that leads on."""
    mended = 0
    for spec, machine, facts in cases(80):
        before = [f for f in check(spec, machine, facts) if f.level == "error"]
        after = autofix(spec, cased(machine, facts))
        assert len(after.applied) < MOST
        assert list(after.left) == [f for f in check(after.spec, machine, facts) if f.level == "error"]
        assert len(after.left) < len(before) if after.applied else after.spec == spec
        mended += bool(before) and not after.left
    assert mended >= 5


def test_a_spec_that_runs_is_left_alone() -> None:
    assert autofix(RunSpec(), cased(LAPTOP, DEMO)) == AutofixResult(RunSpec(), (), ())


def test_offloading_beside_gpus_needs_a_compiler_too() -> None:
    bare = replace(TWO_H100, compiler=False)
    spec = edit(RunSpec(), {"parallel.strategy": "zero2"})
    codes = [
        {f.code for f in check(edit(spec, {"parallel.offload_optimizer": to}), bare, DEMO)} for to in ("none", "cpu")
    ]
    assert ["STR007" in found for found in codes] == [False, True]


def test_windows_of_attention_are_not_cut_into_pieces() -> None:
    spec = edit(RunSpec(), {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2})
    for slides in (False, True):
        seen = replace(DEMO, shape=replace(LLAMA_8B, sliding=slides))
        assert ("STR037" in codes(check(spec, TWO_H100, seen))) == slides


@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_gpt2_has_nothing_to_project(targets: str) -> None:
    patch = {"method.kind": "full", "train.optim": "galore", "train.optim_targets": targets}
    assert "OPT023" in codes(check(edit(RunSpec(), patch), EQUIPPED, replace(DEMO, shape=GPT2)))
    assert "OPT023" not in codes(check(edit(RunSpec(), patch), EQUIPPED, DEMO))


def test_apple_gpus_do_not_meet() -> None:
    apple = replace(LAPTOP, device="mps")
    spec = edit(RunSpec(), {**SPREAD, "launch.nproc_per_node": 1})
    assert "STR002" in codes(check(spec, apple, DEMO))
    assert "STR002" not in codes(check(spec, LAPTOP, DEMO))


@pytest.mark.parametrize(
    ("patch", "raised"),
    [
        ({}, False),
        ({"method.freeze_extra_modules": ("norm",)}, True),
        (
            {"method.freeze_extra_modules": ("embed_tokens", "norm", "lm_head")},
            False,
        ),  # all that lies beside the layers
        ({"method.freeze_extra_modules": ("self_attn",)}, True),
        ({"method.freeze_extra_modules": ("layers",)}, False),
        ({"train.stage": "reward", "data.builtin": "train-pairs"}, True),
        ({"method.freeze_extra_modules": ("norm",), "precision.compute": "fp32"}, False),
        ({"method.freeze_extra_modules": ("norm",), "precision.compute": "pure_bf16"}, False),
        ({"method.freeze_extra_modules": ("norm",), "parallel.strategy": "fsdp2"}, False),
    ],
)
def test_a_unit_of_the_first_fsdp_has_one_type(patch: dict[str, Any], raised: bool) -> None:
    base = {"parallel.strategy": "fsdp1", "method.kind": "freeze", "train.learning_rate": 1e-6}
    shape = LLAMA_8B.scoring if patch.get("train.stage") == "reward" else LLAMA_8B
    found = check(edit(RunSpec(), {**base, **patch}), TWO_H100, replace(DEMO, shape=shape))
    assert ("STR046" in codes(found)) == raised


@pytest.mark.parametrize(
    ("patch", "package", "version", "raised"),
    [
        ({"train.optim": "schedule_free_radam"}, "schedulefree", "1.3", True),
        ({"train.optim": "schedule_free_adamw"}, "schedulefree", "1.3", False),
        ({"train.optim": "adamw_8bit_torchao"}, "torchao", "0.9.0+cpu", True),
        ({"train.optim": "adamw"}, "torchao", "0.9.0", False),
        ({"method.quantization": "int8"}, "bitsandbytes", "0.46.1", False),
    ],
)
def test_packages_that_are_too_old(patch: dict[str, Any], package: str, version: str, raised: bool) -> None:
    machine = replace(EQUIPPED, versions={**EQUIPPED.versions, package: version})
    assert ("HW007" in codes(check(edit(RunSpec(), patch), machine, DEMO))) == raised


def test_hidden_options_raise_nothing() -> None:
    spec = edit(RunSpec(), {"method.freeze_trainable_layers": 999, "lora.target_modules": ("nothing",)})
    assert check(spec, LAPTOP, DEMO) == check(RunSpec(), LAPTOP, DEMO)


SCORED = replace(DEMO, shape=LLAMA_8B.scoring)


@pytest.mark.parametrize("kind", ["full", "freeze"])
def test_no_rank_is_low_enough_for_a_rewards_head(kind: str) -> None:
    """Which is one row, and projected with the other linear layers."""
    patch = {"method.kind": kind, "train.stage": "reward", "data.builtin": "train-pairs", "train.optim": "galore"}
    spec = edit(RunSpec(), {**patch, "train.galore_proj_type": "reverse_std", "train.projection_rank": 1})
    found = next(f for f in check(spec, EQUIPPED, SCORED) if f.code == "OPT024")
    assert [fix.label for fix in found.fixes] == ["The shorter side"]


@pytest.mark.parametrize(
    ("optimizer", "patch", "found"),
    [
        ("galore", {"lora.r": 1, "train.optim_targets": "attention"}, True),
        ("galore", {"lora.r": 2, "train.optim_targets": "attention"}, False),
        ("galore", {"method.kind": "full"}, True),  # the head is one row
        ("galore", {"method.kind": "full", "train.optim_targets": "attention"}, False),
        ("muon", {"lora.r": 1}, False),  # single rows are AdamW's
        ("muon", {"method.kind": "full"}, False),
        ("adamw", {"lora.r": 1}, False),
    ],
)
def test_a_row_of_each_matrix_on_every_device(optimizer: str, patch: dict[str, Any], found: bool) -> None:
    two = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": 2, "train.optim": optimizer}
    pairs = {"train.stage": "reward", "data.builtin": "train-pairs"}
    codes = {f.code for f in check(edit(RunSpec(), {**two, **pairs, **patch}), EQUIPPED, SCORED)}
    assert ("OPT025" in codes) is found


@pytest.mark.parametrize(("share", "words"), [(1.0, "It may come to"), (0.95, "Most likely it does not")])
def test_a_doubtful_fit_says_which_way_it_leans(share: float, words: str) -> None:
    need = estimate(RunSpec(), LAPTOP, DEMO.shape, longest=DEMO.longest).device_bytes
    found = check(RunSpec(), replace(LAPTOP, ram_free_bytes=round(need * share)), DEMO)
    assert next(f for f in found if f.code == "MEM002").message.startswith(words)
