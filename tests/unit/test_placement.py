"""The data of the placement picture: every byte of a device has a kind, and the phases contain the peak."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend.config.options import edit, effective
from backend.machine import Machine, machines
from backend.memory.kinds import KIND_OF, KINDS
from backend.preflight import preflight
from backend.presets import presets
from backend.registry import STRATEGIES

SPECS = {preset.name: preset.spec for preset in presets()}


# `make test` has each strategy with one preset on each machine, and each preset.
GRID = [
    pytest.param(preset, strategy, machine, marks=() if (i + j) % 10 == 5 * k else pytest.mark.soak)
    for i, preset in enumerate(SPECS)
    for j, strategy in enumerate(STRATEGIES)
    for k, machine in enumerate(("1x24gb", "2x8x80gb"))
]


@pytest.mark.parametrize(("preset", "strategy", "machine"), GRID)
def test_kinds_and_phases_add_up(preset: str, strategy: str, machine: str) -> None:
    spec = effective(edit(SPECS[preset], {"parallel.strategy": strategy}))
    report = preflight(spec, machines()[machine], Path("/nowhere"))
    kinds = {part["kind"]: part["bytes"] for part in report.placement["kinds"]}
    assert sum(kinds.values()) == report.estimate.device_bytes
    assert list(kinds) == [kind for kind in KINDS if kind in kinds]
    assert max(moment.bytes for moment in report.estimate.moments) == report.estimate.device_bytes
    assert [moment.phase for moment in report.estimate.phases] == sorted(
        {moment.phase for moment in report.estimate.moments}, key=list(PHASES).index
    )


PHASES = ("Loading", "Forward", "Backward", "Optimizer step", "Evaluation", "Generation")


def test_70b_qlora_peaks_while_loading_with_zero3_only() -> None:
    """ZeRO-3 reads the whole quantized model on every device; FSDP2 sends each its shard."""
    machine = machines()["8x80gb"]
    for strategy, phase in (("zero3", "Loading"), ("fsdp2", "Forward")):
        patch = {"parallel.strategy": strategy, "train.per_device_train_batch_size": 1, "data.max_length": 512}
        found = preflight(effective(edit(SPECS["qlora-70b-fsdp2"], patch)), machine, Path("/nowhere")).estimate
        peak = max(found.moments, key=lambda moment: moment.bytes)
        assert peak.phase == phase, strategy


def test_all_rows_of_the_estimate_have_a_kind() -> None:
    """Row names in the code, so that a new row needs a kind even if no preset has it."""
    folder = Path(__file__).parents[2] / "backend" / "memory"
    text = "\n".join(
        path.read_text()
        for path in folder.glob("*.py")
        if path.name not in ("host.py", "disk.py", "inference.py", "kinds.py")
    )
    names = set(re.findall(r'Row\(\s*"([^"]+)"', text))
    assert len(names) > 20
    assert names - set(KIND_OF) == {"Experts"}  # in host memory


def placement(machine: Machine, preset: str = "two-nodes", **changes: object) -> dict[str, Any]:
    patch = {name.replace("__", "."): value for name, value in changes.items()}
    return preflight(effective(edit(SPECS[preset], patch)), machine, Path("/nowhere")).placement


def test_texts_say_what_a_device_does_with_its_group() -> None:
    """They complete "With ranks 0 to 7 it ..." and "In groups of 8, each GPU ..."."""
    machine = machines()["2x8x80gb"]
    texts: dict[str, str] = {}
    for options in (
        {"parallel__strategy": "tensor", "parallel__tensor_parallel_size": 8},
        {"parallel__strategy": "fsdp2", "parallel__context_parallel_size": 2},
        {"parallel__strategy": "zero3", "parallel__sequence_parallel_size": 2},
    ):
        texts |= {group["name"]: group["text"] for group in placement(machine, **options)["groups"]}
    assert texts == {
        "tensor": "holds a shard of every weight matrix (tensor parallelism)",
        "context": "splits the tokens of each sequence (context parallelism)",
        "sequence": "splits the tokens of each sequence (sequence parallelism)",
        "shard": "shards weights, gradients and optimizer state",
        "replicate": "averages gradients",
    }


def test_bytes_exchanged_with_host_ram_are_those_of_offload() -> None:
    machine = machines()["2x8x80gb"]
    zero2 = {"parallel__strategy": "zero2"}
    assert placement(machine, **zero2)["host_bytes"] == 0
    assert placement(machine, **zero2, parallel__offload_optimizer="cpu")["host_bytes"] > 0


@pytest.mark.parametrize(
    ("device", "noun", "plural"),
    [("cuda", "GPU", "GPUs"), ("npu", "NPU", "NPUs"), ("xpu", "XPU", "XPUs"), ("cpu", "process", "processes")],
)
def test_noun_is_that_of_the_device_type(device: str, noun: str, plural: str) -> None:
    machine = replace(machines()["8x80gb"], device=device)
    found = placement(machine, "first-run")
    assert (found["noun"], found["plural"]) == (noun, plural)
    labels = {part["kind"]: part["label"] for part in found["kinds"]}
    assert labels["overhead"] == ("Python and libraries" if device == "cpu" else "Device context and libraries")
