"""Every rule: its examples, fixes, fields and texts; `check` on random specs; autofix; and single rules in detail."""

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
from backend.inspect import DataIssue, InputFacts, inspect_inputs
from backend.machine import Machine
from backend.memory.kinds import KINDS, bytes_by_kind
from backend.modelspec import ModelShape, ModuleSpec
from backend.paths import HOME
from backend.presets import presets
from backend.rules import FAMILIES, OUTDATED, RULES, Case, Example, Finding, Rule, check, example_findings
from backend.rules.examples import (
    DEMO,
    EQUIPPED,
    EQUIPPED_TWO,
    FULL_DISK,
    GPT2,
    H100,
    LAPTOP,
    LLAMA_8B,
    MOE,
    NPU,
    SMALL_LAPTOP,
    SMOL,
    T4,
    TWO_H100,
    USER_DATA_FACTS,
    full_spec,
    gpus,
    with_data_issue,
)
from backend.rules.launch import MIG
from backend.rules.memory import LLAMA_8B_FACTS, NO_REMEDY
from backend.tasks.autofix import MAX_FIXES, AutofixResult, autofix
from backend.wording import data_size

COUNT = 334


def findings(example: Example, patch: dict[str, Any] | None = None) -> tuple[Finding, ...]:
    spec = edit(RunSpec(), {**example.patch, **(patch or {})})
    return check(spec, example.machine or LAPTOP, example.facts or DEMO)


def codes(found: tuple[Finding, ...], level: str = "") -> set[str]:
    return {f.code for f in found if not level or f.level == level}


def test_codes_titles_and_families_are_complete() -> None:
    assert len(RULES) == COUNT
    assert len({r.code for r in RULES}) == COUNT
    assert len({r.title for r in RULES}) == COUNT
    assert {r.family for r in RULES} == set(FAMILIES)
    text = rules_markdown()
    assert text.isascii()
    assert all(f"### {r.code} {r.title}" in text for r in RULES)


def test_outdated_advice_names_an_existing_test() -> None:
    assert 8 <= len(OUTDATED) <= 14 and len({old.topic for old in OUTDATED}) == len(OUTDATED)
    text = rules_markdown()
    for old in OUTDATED:
        assert old.before.endswith(".") and old.now.endswith(".") and old.verified_with and f"### {old.topic}" in text
        if old.test:
            file, _, name = old.test.partition("::")
            assert f"def {name}(" in (HOME / "tests/process" / file).read_text(), old.test
    assert sum(bool(old.test) for old in OUTDATED) >= 8


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.code)
def test_examples_fields_and_fixes(rule: Rule) -> None:
    assert rule.source
    assert rule.fields and all(name in by_name() for name in rule.fields)
    bad, good = findings(rule.fails_on), findings(rule.passes_on)
    assert rule.code in codes(bad), f"fails_on raises {codes(bad)}"
    assert codes(bad, "error") <= {rule.code}, "fails_on raises errors of other rules too"
    assert rule.code not in codes(good)
    assert not codes(good, "error")
    found = next(f for f in bad if f.code == rule.code)
    assert all(name in by_name() for name in found.fields)
    assert found.message.endswith((".", "!")) and found.message[0] not in " ,"
    if rule.level == "error":
        assert found.fixes or rule.manual_fix, "an error needs a fix"
    for fix in found.fixes:
        after = findings(rule.fails_on, dict(fix.patch))
        assert fix.label
        # The facts of an example are fixed, so a fix that selects other files or another format does not change them.
        assert rule.code not in codes(after) or rule.code in {"DAT002", "DAT003", "DAT018", "DAT038"}, fix
        assert codes(after, "error") <= codes(bad, "error"), fix
    safe = [fix.safe for fix in found.fixes if fix.cost != "does not fit"]
    assert safe == sorted(safe, reverse=True), "safe fixes come first"
    assert len({fix.label for fix in found.fixes}) == len(found.fixes), "the same fix twice"
    assert len(found.fixes) < 2 or sum(not fix.cost for fix in found.fixes) <= 1, found.fixes
    assert all(len(fix.cost) < 80 and not fix.cost.endswith(".") for fix in found.fixes)


def global_batch_size(spec: RunSpec, machine: Machine, facts: InputFacts) -> int:
    return Case(effective(spec), machine, facts).run.global_batch_size


def test_safe_fixes_keep_the_global_batch_size() -> None:
    """With fewer accumulation steps or a smaller batch per device, where a fix adds data-parallel ranks."""
    fixes = [
        (fix, edit(RunSpec(), rule.fails_on.patch), rule.fails_on.machine or LAPTOP, rule.fails_on.facts or DEMO)
        for rule in RULES
        for fix in example_findings()[rule.code].fixes
    ]
    changed = [
        (fix.label, fix.safe)
        for fix, spec, *where in fixes
        if global_batch_size(spec, *where) != global_batch_size(edit(spec, fix.patch), *where)
    ]
    assert changed and not [label for label, safe in changed if safe]
    assert "Use FSDP2, with a batch size of 2 per device" in {fix.label for fix, *_ in fixes}


LEADS_ON = "leads to another error: "
NO_ATTENTION = replace(MOE, layer=(ModuleSpec("mixer.in_proj", 64, 8, 8), ModuleSpec("mixer.out_proj", 64, 8, 8)))
BEST_WEIGHTS = {
    "parallel.strategy": "fsdp2", "save.strategy": "steps", "eval.strategy": "steps",
    "save.load_best_model_at_end": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "patch", "machine", "shape", "other"),
    [
        ("ADP011", {"lora.targets": "attention"}, LAPTOP, NO_ATTENTION, ""),
        ("OPT031", full_spec("adamw_torch_8bit") | BEST_WEIGHTS, EQUIPPED_TWO, SMOL, "STR003"),
        ("OPT007", {"train.optim": "adam_mini"}, EQUIPPED, MOE, "OPT029"),
    ],
)
def test_first_fix_leads_to_no_other_error(
    code: str, patch: dict[str, Any], machine: Machine, shape: ModelShape, other: str
) -> None:
    example = Example(patch, machine, replace(DEMO, shape=shape, lora_refused=("out_proj",) if not other else ()))
    (found,) = (finding for finding in findings(example) if finding.code == code)
    assert not [code for code in codes(findings(example, dict(found.fixes[0].patch)), "error") if code[:3] != "MEM"]
    (title,) = {rule.title for rule in RULES if rule.code == other} or {""}
    assert found.fixes[-1].cost == LEADS_ON + title or not other


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.soak)])
def test_fixes_that_lead_to_another_error_come_last_and_say_so(count: int) -> None:
    led_on = 0
    for spec, machine, facts in random_cases(count):
        found = check(spec, machine, facts)
        before = codes(found, "error")
        for finding in found:
            says = [fix.cost.startswith(LEADS_ON) for fix in finding.fixes]
            fixed = [edit(spec, fix.for_spec(spec).patch) for fix in finding.fixes]
            after = [codes(check(each, machine, facts), "error") for each in fixed]
            assert says == [any(code[:3] != "MEM" for code in each - before) for each in after], finding
            after_them = [fix.cost for fix, last in zip(finding.fixes[1:], says, strict=False) if last]
            assert all(cost == "does not fit" or cost.startswith(LEADS_ON) for cost in after_them)
            led_on += sum(says)
    assert led_on


def test_fix_that_does_not_fit_comes_last() -> None:
    """Unsloth under ZeRO-3: without Unsloth the weights stay sharded; with DDP they are replicated."""
    patch = {
        "method.kind": "full",
        "train.use_unsloth": True,
        "parallel.strategy": "zero3",
        "train.per_device_train_batch_size": 1,
    }
    eight_b = replace(DEMO, shape=LLAMA_8B)
    small, large = (check(edit(RunSpec(), patch), gpus(2, "GPU", gib, (9, 0)), eight_b) for gib in (110, 320))
    costs = [[(x.label, x.cost) for f in found if f.code == "UNS003" for x in f.fixes] for found in (small, large)]
    assert costs[0][-1] == ("Use DDP", "does not fit")
    assert costs[1][-1] == ("Use DDP", "a full replica of the model on each device")


def test_default_and_presets_run_anywhere(tmp_path: Path) -> None:
    first = next(p.spec for p in presets() if p.name == "first-run")
    for machine in (LAPTOP, H100, T4, TWO_H100):
        for spec in (RunSpec(), first):
            assert codes(check(spec, machine, inspect_inputs(spec, tmp_path)), "error") == set()


@pytest.mark.parametrize(
    ("nproc", "min_nnodes", "more", "refused"),
    [
        (1, 1, {"parallel.strategy": "ddp"}, False),
        (2, 1, {}, False),
        (1, 1, {}, True),
        (1, 2, {}, False),
        (4, 1, {"parallel.replicate_size": 2}, False),
        (2, 1, {"parallel.replicate_size": 2}, True),
        (8, 3, {"parallel.strategy": "zero3"}, False),
        (8, 3, {"parallel.strategy": "zero3", "train.optim": "lion_32bit"}, True),
        (8, 3, {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme"}, True),
        (8, 3, {"parallel.strategy": "zero2", "parallel.sequence_parallel_size": 2}, True),
        (8, 3, {"parallel.strategy": "zero0"}, True),
    ],
)
def test_engines_that_resume_with_fewer_nodes(nproc: int, min_nnodes: int, more: dict[str, Any], refused: bool) -> None:
    patch = {**TWO_NODES, "launch.rendezvous": "elastic", "launch.nnodes": 4, "parallel.strategy": "fsdp2", **more}
    found = findings(Example({**patch, "launch.nproc_per_node": nproc, "launch.min_nnodes": min_nnodes}))
    assert ("NOD006" in codes(found)) == refused


def test_deepspeed_object_given_as_boolean() -> None:
    keys = {"parallel.strategy": "zero2", "parallel.extra_config": '{"activation_checkpointing": true}'}
    found = next(f for f in findings(Example(keys, TWO_H100)) if f.code == "STR040")
    assert "must be a JSON object" in found.message
    assert not codes(findings(Example({**keys, **found.fixes[0].patch}, TWO_H100)), "error")


def test_fsdp_boolean_given_as_object() -> None:
    given = '{"activation_checkpointing": {"partition_activations": false}}'
    found = findings(Example({"parallel.strategy": "fsdp2", "parallel.extra_config": given}, TWO_H100))
    assert "must be true or false" in next(f.message for f in found if f.code == "STR042")


def test_findings_are_in_a_fixed_order() -> None:
    spec = edit(RunSpec(), {"launch.device": "cuda", "train.gradient_accumulation_steps": 999, "save.only_model": True})
    found = check(spec, LAPTOP, DEMO)
    assert [f.level for f in found] == sorted((f.level for f in found), key=["error", "warning", "advice"].index)
    assert found == check(spec, LAPTOP, DEMO)


OUTDATED_PACKAGES = replace(EQUIPPED, versions=dict.fromkeys(EQUIPPED.versions, "0.1"))
MACHINES = (
    OUTDATED_PACKAGES,
    replace(TWO_H100, triton_can_compile=False, shm_free_bytes=2**26),
    replace(TWO_H100, gpus=tuple(replace(gpu, processes=("python (1)",), nvlink_peers=()) for gpu in TWO_H100.gpus)),
    LAPTOP,
    SMALL_LAPTOP,
    replace(MIG, lost_gpus={1: "GPU is lost"}),
    TWO_H100,
    EQUIPPED,
    EQUIPPED_TWO,
    T4,
    NPU,
    FULL_DISK,
    Machine(),
)
FACTS = (
    DEMO,
    replace(DEMO, min_prompt_tokens=900, token_lengths=(1000,)),
    *(replace(DEMO, model_type=kind) for kind in ("reformer", "blt", "gemma3n_text", "rwkv")),
    replace(
        DEMO,
        model_type="mamba",
        lora_refused=("q_proj",),
        has_shared_layers=True,
        has_shared_head=True,
        has_sequence_classification=False,
        tokenizer_problem="It is broken.",
        known_size=200_000,
        weights_problem="They differ.",
        architecture_problem="It is an encoder.",
        unrenderable_examples=(DataIssue("data.files", "a", "b", True),),
        num_checked=9,
        num_usable=0,
        num_identical_pairs=9,
    ),
    replace(
        DEMO,
        num_checked=9,
        num_endless=9,
        num_weightless=9,
        num_copies=9,
        num_contradictions=9,
        unread_keys=(("name", 9),),
        special_tokens=(("</s>", 9),),
        num_starts=9,
        num_different_starts=9,
        start_difference=("a", "b", "text"),
    ),
    InputFacts(),
    InputFacts(shape=GPT2, shape_unknown_reason="", num_examples=0, num_validation_examples=0, token_lengths=(0,)),
    InputFacts(
        shape=LLAMA_8B,
        shape_unknown_reason="",
        num_examples=1,
        columns=("x",),
        counts_are_exact=False,
        token_lengths=(9000,),
    ),
    replace(USER_DATA_FACTS, format="labels", label_counts=(300, 100)),
    replace(USER_DATA_FACTS, format="pairs"),
    with_data_issue("data.files", "no such file"),
    with_data_issue("data.validation_files", "column text holds a number", 7),
    replace(DEMO, quant_method="gptq"),
    replace(DEMO, quant_method="hqq"),
    replace(DEMO, quant_method="bitsandbytes"),
    replace(DEMO, quant_method="quark"),
)
NAMES = ("q_proj", "lm_head", "embed_tokens", "nothing", "", "mlp", "model.layers.3.mlp.up_proj", "RANK")

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
TWO_NODES = {"parallel.strategy": "ddp", "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
SHARDED: dict[str, Any] = {
    "method.kind": "full", "train.optim": "galore_adamw", "parallel.strategy": "fsdp2", "save.strategy": "steps",
    "launch.nproc_per_node": 2,
}  # fmt: skip
BASES: tuple[dict[str, Any], ...] = ({}, {}, TWO_NODES, {**TWO_NODES, "launch.launcher": "deepspeed"}, SHARDED)


def random_value(option: Option, rng: random.Random) -> Any:
    """A valid value of `option`, often at its limits."""
    if option.name in NODES:
        return rng.choice(NODES[option.name])
    if option.kind == "bool":
        return rng.random() < 0.5
    if option.kind == "choice":
        return rng.choice([v for v, _ in option.choices])
    if option.kind in ("int", "float"):
        low = option.minimum if option.minimum is not None else 0
        high = min(option.maximum if option.maximum is not None else 1e6, 1e6)
        drawn = rng.choice((low, high, low + 1, rng.uniform(low, high), option.default))
        return int(drawn) if option.kind == "int" else float(drawn)
    if option.kind == "list":
        number = option.name == "launch.devices"
        return tuple(rng.randrange(4) if number else rng.choice(NAMES[:4]) for _ in range(rng.randrange(4)))
    if option.kind == "table":
        return dict.fromkeys(rng.sample(("RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "X"), 2), "1")
    return rng.choice(NAMES)


def random_spec(rng: random.Random) -> RunSpec:
    patch = rng.choice(BASES) | {o.name: random_value(o, rng) for o in rng.sample(options(), rng.randrange(1, 30))}
    while True:
        try:
            return edit(RunSpec(), patch)
        except SpecError as error:
            for problem in error.problems:
                patch.pop(problem.field)


def random_cases(count: int) -> Iterator[tuple[RunSpec, Machine, InputFacts]]:
    rng = random.Random(2026)
    for _ in range(count):
        yield random_spec(rng), rng.choice(MACHINES), rng.choice(FACTS)


@pytest.mark.parametrize(("count", "share"), [(100, 0.3), pytest.param(2200, 0.63, marks=pytest.mark.soak)])
def test_check_never_raises_on_random_specs(count: int, share: float) -> None:
    """They violate at least this share of the rules."""
    seen = set()
    for spec, machine, facts in random_cases(count):
        found = check(spec, machine, facts)
        seen |= codes(found)
        assert not [f for f in found if f.code == "MEM001" and not f.fixes and NO_REMEDY not in f.message]
    assert len(seen) > share * COUNT, {r.code for r in RULES} - seen


def case_factory(machine: Machine, facts: InputFacts) -> Callable[[RunSpec], Case]:
    return lambda spec: Case(effective(spec), machine, facts)


@pytest.mark.parametrize(("count", "least"), [(20, 1), pytest.param(50, 3, marks=pytest.mark.soak)])
def test_autofix_terminates_and_never_adds_errors(count: int, least: int) -> None:
    """It ends with fewer errors or the same spec, and reports exactly the errors that are left."""
    fixed = 0
    for spec, machine, facts in random_cases(count):
        before = [f for f in check(spec, machine, facts) if f.level == "error"]
        after = autofix(spec, case_factory(machine, facts))
        assert global_batch_size(after.spec, machine, facts) == global_batch_size(spec, machine, facts), after.applied
        assert len(after.applied) < MAX_FIXES
        assert list(after.remaining) == [f for f in check(after.spec, machine, facts) if f.level == "error"]
        assert len(after.remaining) < len(before) if after.applied else after.spec == spec
        fixed += bool(before) and not after.remaining
    assert fixed >= least  # which cases are drawn depends on the number of options


def test_autofix_brings_no_hidden_value_back() -> None:
    """Sequence parallelism was set, then DDP was chosen, which does not fit."""
    patch = {"method.kind": "full", "train.learning_rate": 1e-5, "parallel.strategy": "ddp"}
    patch |= {"parallel.sequence_parallel_size": 2, "parallel.context_parallel_size": 2, "launch.nproc_per_node": 8}
    eight_b, machine = replace(DEMO, shape=LLAMA_8B), gpus(8, "H100", 80, (9, 0))
    spec = edit(RunSpec(), {**patch, "train.gradient_accumulation_steps": 8})
    after = autofix(spec, case_factory(machine, eight_b))
    assert after.applied and not after.remaining and after.spec.parallel.strategy != "ddp"
    assert global_batch_size(after.spec, machine, eight_b) == global_batch_size(spec, machine, eight_b)
    assert (effective(after.spec).parallel.sequence_parallel_size, after.spec.train.gradient_accumulation_steps) == (
        1,
        8,
    )


def test_autofix_leaves_a_valid_spec_unchanged() -> None:
    assert autofix(RunSpec(), case_factory(LAPTOP, DEMO)) == AutofixResult(RunSpec(), (), ())


def test_optimizer_offload_on_gpus_needs_a_compiler() -> None:
    bare = replace(TWO_H100, has_cpp_compiler=False)
    spec = edit(RunSpec(), {"parallel.strategy": "zero2"})
    codes = [
        {f.code for f in check(edit(spec, {"parallel.offload_optimizer": to}), bare, DEMO)} for to in ("none", "cpu")
    ]
    assert ["STR007" in found for found in codes] == [False, True]


def test_context_parallel_rejects_sliding_window_attention() -> None:
    spec = edit(RunSpec(), {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2})
    for slides in (False, True):
        facts = replace(DEMO, shape=replace(LLAMA_8B, has_sliding_window=slides))
        assert ("STR037" in codes(check(spec, TWO_H100, facts))) == slides


@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_gpt2_has_no_layers_to_project(targets: str) -> None:
    patch = {"method.kind": "full", "train.optim": "galore_adamw", "train.optim_targets": targets}
    assert "OPT023" in codes(check(edit(RunSpec(), patch), EQUIPPED, replace(DEMO, shape=GPT2)))
    assert "OPT023" not in codes(check(edit(RunSpec(), patch), EQUIPPED, DEMO))


def test_apple_gpus_cannot_train_on_several_nodes() -> None:
    apple = replace(LAPTOP, device="mps")
    spec = edit(RunSpec(), {**TWO_NODES, "launch.nproc_per_node": 1})
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
        ),  # everything outside the layers
        ({"method.freeze_extra_modules": ("self_attn",)}, True),
        ({"method.freeze_extra_modules": ("layers",)}, False),
        ({"train.stage": "reward", "data.builtin": "train-pairs"}, True),
        ({"method.freeze_extra_modules": ("norm",), "precision.compute": "fp32"}, False),
        ({"method.freeze_extra_modules": ("norm",), "precision.compute": "pure_bf16"}, False),
        ({"method.freeze_extra_modules": ("norm",), "parallel.strategy": "fsdp2"}, False),
    ],
)
def test_fsdp1_units_need_one_dtype(patch: dict[str, Any], raised: bool) -> None:
    base = {"parallel.strategy": "fsdp1", "method.kind": "freeze", "train.learning_rate": 1e-6}
    shape = LLAMA_8B.with_score_head if patch.get("train.stage") == "reward" else LLAMA_8B
    found = check(edit(RunSpec(), {**base, **patch}), TWO_H100, replace(DEMO, shape=shape))
    assert ("STR046" in codes(found)) == raised


@pytest.mark.parametrize(
    ("patch", "package", "version", "raised"),
    [
        ({"train.optim": "schedule_free_radam"}, "schedulefree", "1.3", True),
        ({"train.optim": "schedule_free_adamw"}, "schedulefree", "1.3", False),
        ({"train.optim": "adamw_torch_8bit"}, "torchao", "0.9.0+cpu", True),
        ({"train.optim": "adamw_torch"}, "torchao", "0.9.0", False),
        ({"method.quantization": "int8"}, "bitsandbytes", "0.46.1", False),
    ],
)
def test_outdated_packages(patch: dict[str, Any], package: str, version: str, raised: bool) -> None:
    machine = replace(EQUIPPED, versions={**EQUIPPED.versions, package: version})
    assert ("HW007" in codes(check(edit(RunSpec(), patch), machine, DEMO))) == raised


def test_hidden_options_raise_no_finding() -> None:
    spec = edit(RunSpec(), {"method.freeze_trainable_layers": 999, "lora.target_modules": ("nothing",)})
    assert check(spec, LAPTOP, DEMO) == check(RunSpec(), LAPTOP, DEMO)


SCORED = replace(DEMO, shape=LLAMA_8B.with_score_head)


@pytest.mark.parametrize("kind", ["full", "freeze"])
def test_no_projection_rank_fits_the_score_head(kind: str) -> None:
    """The score head of a reward model has one output feature and is projected with the other linear layers."""
    patch = {"method.kind": kind, "train.stage": "reward", "data.builtin": "train-pairs", "train.optim": "galore_adamw"}
    spec = edit(RunSpec(), {**patch, "train.galore_proj_type": "reverse_std", "train.projection_rank": 1})
    found = next(f for f in check(spec, EQUIPPED, SCORED) if f.code == "OPT024")
    assert [fix.label for fix in found.fixes] == ["Use projection type std"]


@pytest.mark.parametrize(
    ("optimizer", "patch", "found"),
    [
        ("galore_adamw", {"lora.r": 1, "train.optim_targets": "attention"}, True),
        ("galore_adamw", {"lora.r": 2, "train.optim_targets": "attention"}, False),
        ("galore_adamw", {"method.kind": "full"}, True),  # the score head has one row
        ("galore_adamw", {"method.kind": "full", "train.optim_targets": "attention"}, False),
        ("muon", {"lora.r": 1}, False),  # AdamW updates matrices of one row
        ("muon", {"method.kind": "full"}, False),
        ("adamw_torch", {"lora.r": 1}, False),
    ],
)
def test_matrix_optimizers_need_a_row_on_each_device(optimizer: str, patch: dict[str, Any], found: bool) -> None:
    two = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": 2, "train.optim": optimizer}
    pairs = {"train.stage": "reward", "data.builtin": "train-pairs"}
    codes = {f.code for f in check(edit(RunSpec(), {**two, **pairs, **patch}), EQUIPPED, SCORED)}
    assert ("OPT025" in codes) is found


def test_the_largest_part_is_the_sum_that_the_memory_card_shows() -> None:
    """Optimizer state and the tensors of the optimizer step are one kind of memory there."""
    case = Case(edit(RunSpec(), {"method.kind": "full", "train.learning_rate": 2e-5}), H100, LLAMA_8B_FACTS)
    sizes = bytes_by_kind(case.estimate.rows)
    kind = max(sizes, key=sizes.__getitem__)
    (finding,) = (found for found in check(case.spec, case.machine, case.facts) if found.code == "MEM001")
    assert f"The largest part is {KINDS[kind].lower()}: {data_size(sizes[kind])}." in finding.message
    assert sizes[kind] > max(row.bytes for row in case.estimate.rows if row.where == "device")


@pytest.mark.parametrize(
    ("share", "words"), [(1.0, "Peak memory may reach"), (0.95, "The run most likely does not fit")]
)
def test_uncertain_memory_fit_says_what_is_likely(share: float, words: str) -> None:
    need = Case(RunSpec(), LAPTOP, DEMO).estimate.device_bytes
    found = check(RunSpec(), replace(LAPTOP, ram_free_bytes=round(need * share)), DEMO)
    assert next(f for f in found if f.code == "MEM002").message.startswith(words)


@pytest.mark.parametrize(("count", "note"), [(1, ""), (2, "one node instead of 2, so a smaller global batch size")])
def test_the_way_back_to_this_machine_says_what_it_changes(count: int, note: str) -> None:
    """On one node, a run on this machine has the same result as a job."""
    [found] = [
        finding
        for finding in check(
            edit(RunSpec(), {"parallel.strategy": "ddp", "launch.place": "kubernetes", "launch.nnodes": count}),
            TWO_H100,
            DEMO,
        )
        if finding.code == "CLU004"
    ]
    assert [(fix.cost, fix.effect, fix.safe) for fix in found.fixes] == [(note, "changes where the run starts", False)]
