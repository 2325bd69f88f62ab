"""Runs that resume from the checkpoint of another run with one option changed, over all options (random_specs.py). The
check refuses the change, or the run continues: its first loss is that of the uninterrupted run, unless the option
changes the examples or the forward pass, and the next one too, unless it changes the steps."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, forked_inspection
from random_specs import EXCLUDED, VALUES, write_inputs
from test_random_specs import launch
from training_runs import losses, make_spec, same_losses

from backend.config import RunSpec
from backend.config.options import SpecError, by_name, edit, effective
from backend.machine import Machine, probe
from backend.preflight import preflight

CHANGES = int(os.environ.get("FOOTPLATE_FUZZ_CHANGES", 40))  # for each base
TWO, FOUR = {"launch.nproc_per_node": 2}, {"launch.nproc_per_node": 4}
FULL, PAIRS = {"method.kind": "full"}, {"data.builtin": "train-pairs"}
COMMON = {
    "train.max_steps": 4, "train.learning_rate": 5e-3, "train.warmup_steps": 0.0, "train.lr_scheduler_type": "cosine",
    "save.strategy": "steps", "save.steps": 2, "save.total_limit": 0, "parallel.nvme_path": "disk",
    "data.chat_template_file": "custom.jinja", "eval.num_generations": 0,
}  # fmt: skip
BASES: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "freeze": {"method.kind": "freeze", "method.freeze_trainable_layers": 1},
    "evaluated": {"eval.strategy": "steps", "eval.steps": 2, "data.validation_split": 0.2,
                  "save.load_best_model_at_end": True},
    "dpo": {"train.stage": "dpo", **PAIRS},
    "reward": {"train.stage": "reward", **PAIRS},
    "bf16": {"precision.compute": "bf16", **FULL},
    "galore": {"train.optim": "galore_adamw", **FULL},
    "muon": {"train.optim": "muon", **FULL},
    "tokens": {"data.add_special_tokens": ("<|end|>",)},
    "dora": {"lora.use_dora": True},
    "ddp": {"parallel.strategy": "ddp", **TWO},
    "zero1": {"parallel.strategy": "zero1", **TWO, **FULL},
    "zero2-offload": {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu", **TWO, **FULL},
    "zero3": {"parallel.strategy": "zero3", **TWO, **FULL},
    "zero3-lora": {"parallel.strategy": "zero3", **TWO},
    "fsdp2": {"parallel.strategy": "fsdp2", **TWO, **FULL},
    "fsdp2-sharded": {"parallel.strategy": "fsdp2", "parallel.state_dict_type": "sharded", **TWO},
    "hsdp": {"parallel.strategy": "fsdp2", "parallel.replicate_size": 2, **FOUR, **FULL},
}  # fmt: skip
# What is trained on next, or how a loss is computed.
CHANGES_THE_LOSS = {
    "data.add_special_tokens", "data.add_tokens", "data.chat_template", "data.loss_on", "data.max_length",
    "data.max_samples", "data.messages_column", "data.packing", "data.sources", "data.streaming", "data.system_prompt",
    "data.validation", "data.validation_split", "launch.nproc_per_node", "lora.dropout", "method.quantization",
    "model.attn_implementation", "parallel.context_parallel_size", "parallel.sequence_parallel_size",
    "parallel.strategy", "parallel.tensor_parallel_size", "precision.compute", "train.gradient_accumulation_steps",
    "train.neftune_noise_alpha", "train.per_device_train_batch_size", "train.seed", "train.stage",
    "train.train_sampling_strategy", "train.use_liger_kernel", "preference.beta", "preference.loss_type",
    "preference.label_smoothing", "preference.sft_loss_weight", "preference.center_rewards_coefficient",
}  # fmt: skip
CHANGES_THE_STEPS = CHANGES_THE_LOSS | {
    "train.adam_beta1", "train.adam_beta2", "train.adam_epsilon", "train.duration", "train.galore_scale",
    "train.learning_rate", "train.lr_scheduler_type", "train.max_grad_norm", "train.max_steps", "train.momentum",
    "train.update_proj_gap", "train.warmup_steps", "train.weight_decay", "lora.loraplus_lr_ratio",
    "parallel.reduce_dtype", "parallel.extra_config",
}  # fmt: skip
NOT_CHANGED = {
    "train.torch_compile": "compiling takes minutes on a CPU",
    "launch.extra_accelerate_config": "of another launcher",
    "launch.launcher": "the fork server stands in for torchrun",
}


def every_change(rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Each value of each option, in random order."""
    found = []
    for name, option in by_name().items():
        if name not in EXCLUDED and name not in NOT_CHANGED:
            choices = (False, True) if option.kind == "bool" else [value for value, _ in option.choices]
            found += [(name, value) for value in VALUES.get(name, choices)]
    rng.shuffle(found)
    yield from found


@pytest.fixture(scope="module")
def inputs(root: Path, tiny: Path, fork_server: ForkServer) -> Iterator[Path]:
    """The folder that paths of the specs are relative to; the checks there wait for the inspection."""
    for name in ("inputs", "inspected"):
        (root / name).mkdir()
    write_inputs(root / "inputs", tiny)
    with forked_inspection(fork_server, root / "inspected"):
        yield root / "inputs"


def changed(spec: RunSpec, rng: random.Random, resumed: Mapping[str, Any]) -> Iterator[tuple[str, Any, RunSpec]]:
    """Specs that resume, with a change that has an effect; the first has none."""
    same = edit(spec, resumed)
    yield "save.resume_path", "", same
    for name, value in every_change(rng):
        try:
            found = edit(same, {name: value})
        except SpecError:
            continue
        if effective(found) != effective(same):
            yield name, value, found


def outcome(spec: RunSpec, machine: Machine, inputs: Path, server: ForkServer) -> tuple[bool, str, dict[int, float]]:
    """Whether the checks accept the spec; then how the run failed, or its losses by step."""
    report = preflight(spec, machine, inputs, 60)
    if not report.can_run:
        return False, "", {}
    folder = inputs / "resumed"
    try:
        return True, launch(report, folder, server), losses(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.soak
@pytest.mark.parametrize("base", BASES)
def test_a_changed_option_is_refused_or_continued_with(base: str, inputs: Path, fork_server: ForkServer) -> None:
    machine, spec = probe(inputs), make_spec({**COMMON, **BASES[base]})
    first = inputs / f"first-{base}"
    assert not launch(preflight(spec, machine, inputs, 60), first, fork_server)
    expected, rng, launched, wrong = losses(first), random.Random(base), 0, []
    resumed = {"save.resume_from": "path", "save.resume_path": str(first / "checkpoints/checkpoint-2")}
    for name, value, found in changed(spec, rng, resumed):
        accepted, failure, seen = outcome(found, machine, inputs, fork_server)
        launched += accepted
        label = f"{base}, {name} = {json.dumps(value)}: "
        if failure:
            wrong.append(label + failure)
        elif accepted and name not in CHANGES_THE_LOSS and seen.get(3, expected[3]) != same_losses(expected[3]):
            wrong.append(f"{label}step 3 has the loss {seen[3]} instead of {expected[3]}")
        elif accepted and name not in CHANGES_THE_STEPS | {"logging.steps"} and seen[4] != same_losses(expected[4]):
            wrong.append(f"{label}step 4 has the loss {seen[4]} instead of {expected[4]}")
        if launched > CHANGES:
            break
    assert launched and not wrong, "\n\n".join(wrong)
