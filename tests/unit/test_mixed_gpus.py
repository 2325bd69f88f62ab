"""Machines with GPUs of different generations: the rules check the GPUs that a run uses, not all GPUs of the machine.

Selecting the capable GPU by `launch.devices` raises nothing, selecting the old one does, and so does the default
selection, which is the first ones. Every rule is compared with a machine that has only the selected GPUs.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.launch.plan import plan
from backend.machine import GIB, Gpu, Machine
from backend.memory import Estimate, free_bytes
from backend.paths import HOME
from backend.resolve import ResolvedRun, resolve
from backend.rules import RULES, Case, Finding, Rule, check
from backend.rules.examples import DEMO, EXTRAS, H100, INSTALLED, LLAMA_8B, LOCAL_MODEL, TINY

PACKAGES = {**INSTALLED, **EXTRAS, "flash_attn": "2.8.3", "flash_attn_3": "3.0.0", "gptqmodel": "5.6.0"}


def gpu(index: int, name: str, gib: int, capability: tuple[int, int]) -> Gpu:
    return Gpu(index, name, gib * GIB, gib * GIB, capability)


def machine(*gpus: Gpu) -> Machine:
    return replace(H100, gpus=gpus, versions=PACKAGES, name=" and ".join(gpu.name for gpu in gpus))


T4_H100 = machine(gpu(0, "T4", 16, (7, 5)), gpu(1, "H100", 80, (9, 0)))
V100_A100_H100 = machine(gpu(0, "V100", 32, (7, 0)), gpu(1, "A100", 80, (8, 0)), gpu(2, "H100", 80, (9, 0)))
T4_TWO_H100 = machine(gpu(0, "T4", 16, (7, 5)), gpu(1, "H100", 80, (9, 0)), gpu(2, "H100", 80, (9, 0)))
DDP = {"parallel.strategy": "ddp", "launch.nproc_per_node": 2}


def findings(patch: Mapping[str, Any], on: Machine, facts: Any = DEMO) -> tuple[Finding, ...]:
    return check(edit(RunSpec(), patch), on, facts)


def estimate(spec: RunSpec, on: Machine, facts: Any) -> Estimate:
    return Case(spec, on, facts).estimate


def codes(patch: Mapping[str, Any], on: Machine, facts: Any = DEMO) -> set[str]:
    return {finding.code for finding in findings(patch, on, facts)}


# --- Rules about GPU generations ---

# Code -> options, facts, machine, and the single GPUs on which the rule is raised.
GENERATIONS: dict[str, tuple[dict[str, Any], Any, Machine, set[int]]] = {
    "PRC002": ({"precision.compute": "bf16"}, DEMO, T4_H100, {0}),
    "PRC004": ({"precision.compute": "fp32"}, DEMO, T4_H100, {1}),
    "PRC005": ({"precision.compute": "tf32"}, DEMO, T4_H100, {0}),
    "PRC006": ({"precision.compute": "fp8"}, DEMO, V100_A100_H100, {0, 1}),
    "PRC013": ({"precision.compute": "fp32", "train.torch_compile": True}, DEMO, T4_H100, {1}),
    "KRN003": ({"model.attn_implementation": "flash_attention_2"}, DEMO, V100_A100_H100, {0}),
    "KRN003 for version 3": ({"model.attn_implementation": "flash_attention_3"}, DEMO, V100_A100_H100, {0}),
    "KRN004": ({"model.attn_implementation": "flash_attention_2"}, DEMO, T4_H100, {0}),
    "QNT008": ({"method.quantization": "int8"}, DEMO, V100_A100_H100, {0}),
    "QNT017": (LOCAL_MODEL, replace(DEMO, quant_method="awq"), T4_H100, {1}),
    "MEM001": ({"train.per_device_train_batch_size": 1}, replace(DEMO, shape=LLAMA_8B), T4_H100, {0}),
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_only_the_selected_gpu_counts(name: str) -> None:
    patch, facts, on, raised = GENERATIONS[name]
    code = name.partition(" ")[0]
    for index in range(len(on.gpus)):
        found = codes({**patch, "launch.devices": (index,)}, on, facts)
        assert (code in found) is (index in raised), index
    assert (code in codes(patch, on, facts)) is (0 in raised), "the default is the first GPU"


@pytest.mark.parametrize("name", GENERATIONS)
def test_each_of_several_selected_gpus_counts(name: str) -> None:
    """Requirements hold for every GPU of the run. Advice to use what newer GPUs have is for runs where all have it."""
    patch, facts, on, raised = GENERATIONS[name]
    code = name.partition(" ")[0]
    if code == "MEM001":
        patch = {**patch, "parallel.strategy": "ddp"}
    expected = {"PRC004": False, "QNT017": False}.get(code, True)
    assert (code in codes({**DDP, **patch}, on, facts)) is expected
    assert (code in codes({**DDP, **patch, "launch.devices": (0, 1)}, on, facts)) is expected
    assert raised


def test_remedies_use_the_gpus_that_are_listed() -> None:
    """A strategy over more processes than device ids would be refused, so that no remedy would be left."""
    patch = {"train.per_device_train_batch_size": 1, "method.kind": "full", "train.learning_rate": 1e-5}
    facts = replace(DEMO, shape=LLAMA_8B)
    for devices, gpus in (((0,), T4_H100.gpus[:1]), ((1,), T4_H100.gpus[1:])):
        given = {**patch, "launch.devices": devices}
        mixed, alone = (
            next(f for f in findings(given, on, facts) if f.code == "MEM001")
            for on in (T4_H100, replace(T4_H100, gpus=gpus))
        )
        assert mixed.fixes == alone.fixes


def test_the_message_names_the_selected_gpu() -> None:
    patch = {"method.quantization": "int8", "launch.devices": (0,)}
    found = next(f for f in findings(patch, V100_A100_H100) if f.code == "QNT008")
    assert "GPU 0 (V100) has 7.0" in found.message
    assert "A100" not in found.message


# --- Rules about other properties of GPUs ---


@pytest.mark.parametrize(("devices", "raised"), [((), True), ((0,), True), ((1,), False)])
def test_busy_gpus(devices: tuple[int, ...], raised: bool) -> None:
    first, second = T4_H100.gpus
    on = replace(T4_H100, gpus=(replace(first, processes=("python (4711)",)), second))
    assert ("HW008" in codes({"launch.devices": devices}, on)) is raised


@pytest.mark.parametrize(("devices", "raised"), [((), True), ((0, 1), True), ((1, 2), False)])
def test_nvlink(devices: tuple[int, ...], raised: bool) -> None:
    links = ((), (2,), (1,))
    on = replace(T4_TWO_H100, gpus=tuple(replace(g, nvlink_peers=links[g.id]) for g in T4_TWO_H100.gpus))
    patch = {"parallel.strategy": "tensor", "method.kind": "full", "launch.nproc_per_node": 2, "save.strategy": "no"}
    assert ("HW010" in codes({**patch, "launch.devices": devices}, on, replace(DEMO, shape=TINY))) is raised


@pytest.mark.parametrize(("devices", "raised"), [((), True), ((0,), True), ((1,), False)])
def test_torch_build_of_another_vendor(devices: tuple[int, ...], raised: bool) -> None:
    """A ROCm build of torch on a machine with an NVIDIA GPU (0) and an AMD GPU (1)."""
    amd = gpu(1, "MI300X", 192, (0, 0))
    on = replace(T4_H100, gpus=(T4_H100.gpus[0], amd), versions={**PACKAGES, "torch": "2.13.0+rocm7.1"})
    assert ("HW006" in codes({"launch.devices": devices}, on)) is raised


@pytest.mark.parametrize(("patch", "gib"), [({}, 16), ({"launch.devices": (0,)}, 16), ({"launch.devices": (1,)}, 80)])
def test_memory_capacity(patch: dict[str, Any], gib: int) -> None:
    assert free_bytes(resolve(edit(RunSpec(), patch), T4_H100), T4_H100) == gib * GIB
    both = resolve(edit(RunSpec(), {**DDP, "launch.devices": (0, 1)}), T4_H100)
    assert free_bytes(both, T4_H100) == 16 * GIB


# --- The launch plan ---


@pytest.mark.parametrize(("devices", "disabled"), [((), True), ((0,), True), ((1,), False)])
def test_peer_access_of_rtx_40(devices: tuple[int, ...], disabled: bool) -> None:
    on = replace(
        machine(gpu(0, "NVIDIA GeForce RTX 4090", 24, (8, 9)), gpu(1, "H100", 80, (9, 0))), driver_version="535.54"
    )
    made = plan(edit(RunSpec(), {"launch.devices": devices}), on)
    assert ("NCCL_P2P_DISABLE" in made.defaults) is disabled


@pytest.mark.parametrize("devices", [(), (0,), (1,), (0, 1)])
def test_device_ids_are_the_drivers(devices: tuple[int, ...]) -> None:
    """By default CUDA numbers the fastest GPU 0, whichever GPUs are selected afterwards: this is about all of them."""
    patch = {**DDP, "launch.devices": devices} if len(devices) == 2 else {"launch.devices": devices}
    env = plan(edit(RunSpec(), patch), T4_H100).env
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["CUDA_VISIBLE_DEVICES"] == (",".join(map(str, devices)) or "0")
    same = replace(T4_H100, gpus=tuple(replace(g, name="H100") for g in T4_H100.gpus))
    assert "CUDA_DEVICE_ORDER" not in plan(edit(RunSpec(), patch), same).env


@pytest.mark.parametrize(
    ("patch", "dtype"),
    [
        ({}, "fp32"),
        ({"launch.devices": (0,)}, "fp32"),
        ({"launch.devices": (1,)}, "bf16"),
        ({**DDP, "launch.devices": (0, 1)}, "fp32"),
        (DDP, "fp32"),
    ],
)
def test_precision_auto_is_the_same_everywhere(patch: dict[str, Any], dtype: str) -> None:
    spec = effective(edit(RunSpec(), {**patch, "launch.launcher": "accelerate"}))
    assert resolve(spec, T4_H100, DEMO).compute_dtype == dtype
    files = plan(spec, T4_H100, DEMO).files
    assert yaml.safe_load(files["accelerate.yaml"])["mixed_precision"] == {"bf16": "bf16", "fp32": "no"}[dtype]
    assert json.loads(files["resolved.json"])["compute_dtype"] == dtype
    assert ResolvedRun.from_json(files["resolved.json"]).compute_dtype == dtype
    explicit = edit(spec, {"precision.compute": dtype})
    estimates = [estimate(each, T4_H100, DEMO) for each in (spec, explicit)]
    assert estimates[0] == estimates[1]
    flash = {**patch, "model.attn_implementation": "flash_attention_2"}
    assert ("KRN004" in codes(flash, T4_H100)) is (dtype == "fp32")


@pytest.mark.parametrize("model", [DEMO.shape, LLAMA_8B])
def test_the_estimate_is_that_of_the_selected_gpu(model: Any) -> None:
    """Attention kernels differ with the generation, and so does the memory for activations."""
    spec = edit(RunSpec(), {"precision.compute": "bf16", "launch.devices": (1,)})
    alone = replace(T4_H100, gpus=T4_H100.gpus[1:])
    facts = replace(DEMO, shape=model)
    assert estimate(spec, T4_H100, facts) == estimate(spec, alone, facts)


# --- All rules ---

# Rules about device ids and process counts look at what the machine has. CLU008 and CLU009 predict the time of a Slurm
# job, for which launch.devices has no effect.
ABOUT_DEVICE_IDS = {"LCH002", "LCH003", "LCH004", "LCH005", "LCH006", "NOD012", "CLU008", "CLU009"}


def finding_texts(found: tuple[Finding, ...]) -> list[tuple[str, ...]]:
    """The texts of findings without the fixes, which may use GPUs that are not selected."""
    return [(f.code, f.level, f.title, f.message, f.reason) for f in found if f.code not in ABOUT_DEVICE_IDS]


# Families of rules about what GPUs can do and hold.
ABOUT_GPUS = {"HW", "KRN", "MEM", "PRC", "QNT"}


@pytest.mark.parametrize(
    "rule",
    [pytest.param(r, marks=() if r.family in ABOUT_GPUS else pytest.mark.soak, id=r.code) for r in RULES],
)
def test_findings_are_those_of_a_machine_with_the_selected_gpus(rule: Rule) -> None:
    """Selected are those in the middle: a rule that used the first GPUs, the last ones or all would see an old one."""
    example = rule.fails_on
    for devices in ((1,), (1, 2)):
        gpus = (*T4_TWO_H100.gpus[: 1 + len(devices)], gpu(1 + len(devices), "T4", 16, (7, 5)))
        on = replace(example.machine or H100, device="cuda", gpus=gpus)
        alone = replace(on, gpus=tuple(g for g in gpus if g.id in devices))
        count = len(devices)
        patch = {**example.patch, "launch.device": "auto", "launch.devices": devices, "launch.nproc_per_node": count}
        facts = example.facts or DEMO
        assert finding_texts(findings(patch, on, facts)) == finding_texts(findings(patch, alone, facts))


# Functions that need all GPUs of the machine: device ids, and fixes that propose other GPUs.
MAY_READ_ALL_GPUS = {
    "backend/rules/launch.py": {
        "more_processes_than_devices", "unknown_device_id", "fewer_device_ids_than_processes",
    },
    "backend/rules/machine.py": {"gpu_in_use"},
    "backend/rules/memory_remedies.py": {"available_gpus"},
}  # fmt: skip


def test_rules_read_the_selected_gpus() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted((HOME / "backend/rules").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and _reads_machine_gpus(function):
                found.setdefault(Path(path).relative_to(HOME).as_posix(), set()).add(function.name)
    assert found == MAY_READ_ALL_GPUS


def _reads_machine_gpus(function: ast.FunctionDef) -> bool:
    """Whether the function has an expression `....machine.gpus`."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "gpus"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "machine"
        for node in ast.walk(function)
    )
