"""One verdict: headline, memory card, findings and strategies agree, and the recommended strategy is not criticized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from parameters import soak_except

from backend import presets
from backend.config.options import edit, effective
from backend.inspect import inspect_inputs
from backend.machine import Machine, machines
from backend.memory import Fit
from backend.preflight import report_on
from backend.rules import Case
from backend.tasks.compare import recommend, variants

PRESETS = {preset.name: preset for preset in presets.presets()}
IN_MAKE_TEST = ("qlora-24gb", "full-8b-fsdp2")
NAMES = soak_except(PRESETS, IN_MAKE_TEST)
CHANGES = (
    {"model.source": "hub", "model.hub_id": "Qwen/Qwen3-30B-A3B"},
    {"model.source": "hub", "model.hub_id": "Qwen/Qwen3-8B"},
    {"train.per_device_train_batch_size": 16},
    {"method.kind": "full", "train.learning_rate": 2e-5},
    {"lora.r": 256, "data.max_length": 2048},
)
PATIENT = {"HF_HOME": "/nowhere"}
MEMORY_RULES = {"MEM001", "MEM002", "MEM003", "MEM004"}


def cases(name: str, tmp_path) -> Iterator[tuple[str, Case]]:
    """On each machine the preset itself, and with one of the changes in turn."""
    for i, machine in enumerate(machines().values()):
        for patch in ({}, CHANGES[(i + list(PRESETS).index(name)) % len(CHANGES)]):
            spec = effective(edit(PRESETS[name].spec, patch))
            yield f"{machine.name} {patch}", Case(spec, machine, inspect_inputs(spec, tmp_path, PATIENT))


@pytest.mark.parametrize("name", NAMES)
def test_headline_memory_and_strategies_agree(name: str, tmp_path) -> None:
    for label, case in cases(name, tmp_path):
        report = report_on(case)
        codes = {f.code for f in report.findings} & MEMORY_RULES
        doubtful = report.fit in (Fit.UNCERTAIN, Fit.UNLIKELY)
        assert (report.level == "ok") <= (report.fit in (Fit.YES, Fit.UNKNOWN)), label
        assert (report.fit == Fit.NO) == bool(codes & {"MEM001", "MEM003"}), label
        assert not doubtful or codes & {"MEM002", "MEM004"}, label
        if report.can_run:
            assert report.verdict.startswith(report.fit.text if doubtful else "Can run"), label
        current = [v for v in variants(case) if v.is_current]
        if current and not current[0].error:
            assert current[0].verdict.startswith(report.fit.text), label


@pytest.mark.parametrize("name", NAMES)
def test_choosing_the_recommended_strategy_adds_no_finding(name: str, tmp_path) -> None:
    for label, case in cases(name, tmp_path):
        best = recommend(case)
        if best is None:
            continue
        before, after = report_on(case), report_on(best[0].case)
        known = {f.code for f in before.findings} | MEMORY_RULES
        added = {f.code: f.message for f in after.findings if f.code not in known}
        assert not added, f"{label}: {best[0].name}"
        order = list(Fit)
        assert after.fit == Fit.YES or order.index(after.fit) <= order.index(before.fit) or not before.can_run, label


def test_a_model_without_configuration_is_not_checked(tmp_path) -> None:
    machine: Machine = machines()["8x80gb"]
    for hub_id, text in (("llama", "Not checked: the configuration of llama"), ("Qwen/Qwen3-8B", "Can run")):
        spec = effective(edit(PRESETS["lora-80gb"].spec, {"model.source": "hub", "model.hub_id": hub_id}))
        report = report_on(Case(spec, machine, inspect_inputs(spec, tmp_path, PATIENT)))
        assert report.verdict.startswith(text), report.verdict
        assert (report.level == "warning") == (hub_id == "llama")
    failed = inspect_inputs(spec, tmp_path, PATIENT)
    spec, failed = edit(spec, {"model.hub_id": "llama"}), replace(failed, shape=None, model_type="")
    verdict = report_on(Case(spec, machine, replace(failed, download_problem="the Hub cannot be reached"))).verdict
    assert verdict == "Not checked: config.json of llama could not be downloaded: the Hub cannot be reached"
