"""Rehearsal: a spec with two steps and everything that a run does, to find in a minute what would fail in hours.

A rehearsal is nothing but runs in a scratch folder: of `rehearsal_spec`, with a crash after the checkpoint of the first
step, and of a command that loads the saved model (backend/runs/rehearsals.py). A run that is planned for another
machine is rehearsed on CPU, with a small model.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec
from backend.config.options import Option, edit, effective, get, options, shown, text
from backend.inspect import predecessor
from backend.machine import Machine
from backend.preflight import Report, build_case, preflight, report_on
from backend.presets import dump
from backend.resolve import selected_gpus
from backend.rules import Case
from backend.runs import REHEARSAL, SPEC, Plan
from backend.runs.folder import RunError
from backend.runs.rehearsals import Rehearsal, new_folder
from backend.runs.scratch import SCRATCH
from backend.tasks.autofix import autofix
from backend.tasks.device_test import planned_test

MAX_GENERATIONS, MAX_NEW_TOKENS = 2, 16
MAX_ACCUMULATION = 2  # gradients of an earlier batch take memory too; more batches take only time
# Of a run that is planned for another machine:
MAX_RANKS, MAX_BATCH = 8, 2
SOURCE = ("model.source", "model.builtin", "model.path", "model.hub_id", "model.revision", "model.trust_remote_code")
BYTES_PER_PARAMETER = 32  # weights, gradients, optimizer state in fp32, a gathered copy


def rehearsal_spec(spec: RunSpec) -> RunSpec:
    """`spec` as it is rehearsed, on this node: two steps, with an evaluation and a checkpoint after each if the spec
    has them. What decides memory and code paths stays as it is."""
    spec = effective(spec)
    patch: dict[str, Any] = {
        "train.duration": "steps",
        "train.max_steps": 2,
        "train.gradient_accumulation_steps": min(spec.train.gradient_accumulation_steps, MAX_ACCUMULATION),
        "train.max_nonfinite_steps": 1,
        "train.half_lr_retries": 0,
        "train.max_hours": 0.0,
        "save.resume_from": "latest",
        "logging.steps": 1,
        "logging.report_to": "none",
        "eval.num_generations": min(spec.eval.num_generations, MAX_GENERATIONS),
        "eval.max_new_tokens": min(spec.eval.max_new_tokens, MAX_NEW_TOKENS),
    }
    if spec.save.strategy != "no":
        patch |= {"save.strategy": "steps", "save.steps": 1}
    if spec.eval.strategy != "no":
        patch |= {"eval.strategy": "steps", "eval.steps": 1}
    if spec.train.warmup_steps >= 1:
        patch["train.warmup_steps"] = 0.0
    if spec.launch.rendezvous != "standalone":
        patch["launch.rendezvous"] = "standalone"
    if spec.launch.place != "local":
        patch["launch.place"] = "local"
    return effective(edit(spec, patch))


def differences(spec: RunSpec) -> list[str]:
    """What a rehearsal of `spec` leaves out, as sentences."""
    notes = []
    if spec.launch.rendezvous != "standalone":
        notes.append(
            "Only the processes of this node were started, without the rendezvous of several nodes. The command "
            "`footplate test-devices` tests all nodes and the links between them."
        )
    if not spec.save.can_resume:
        notes.append("The spec saves no checkpoint to resume from, so the crash and the resume were left out.")
    if not spec.save.final_model:
        notes.append("The spec saves no final model, so none was loaded.")
    if spec.save.resume_from == "path":
        notes.append("The rehearsal started at step 0 instead of save.resume_path.")
    return notes


def rehearse(root: Path, report: Report, base: Path, here: Machine) -> tuple[Report, Rehearsal | None]:
    """Start a rehearsal of a checked spec on the machine `here`, in the scratch folder of the runs folder `root`. If it
    was checked for another machine, CPU processes rehearse it with a small model. Returns the report of the spec that
    is rehearsed, and None if that has errors. Raises RunError."""
    if earlier := predecessor(report.spec, base, None):
        raise RunError(f"Not rehearsed: this spec uses the model of {earlier.id}, a run that has not ended.")
    if report.spec.launch.trainer != "footplate":
        raise RunError(
            "Only Footplate's own trainer can rehearse a run. Set launch.trainer to footplate to rehearse the other "
            "options."
        )
    folder, planned = new_folder(root), bool(report.machine.name)
    small = on_cpu(report, here, base, folder) if planned else preflight(rehearsal_spec(report.spec), here, base)
    if not small.can_run:
        return small, None
    plans = run_plans(report, small, folder)
    notes = differences(report.spec) if not planned else [*replacements(report, small), *differences(report.spec)]
    # A forked process cannot use CUDA if its parent has already queried CUDA, as libraries do on import.
    warm = small.run.device == "cpu" and hasattr(os, "pidfd_open")
    expected = None if planned else small.expected
    rehearsal = Rehearsal.create(folder, report.title, plans, small.about, expected, notes, warm)
    rehearsal.start()
    return small, rehearsal


def run_plans(report: Report, small: Report, folder: Path) -> dict[str, Plan]:
    """The plans of the runs that rehearse a checked spec as `small`, by their names in runs.rehearsals.RUNS."""
    plans = {"train": replace(small.plan, env={**small.plan.env, REHEARSAL: "1"})}
    if report.machine.name:
        plans["shrink"] = _shrink_plan(report, small, folder)
    elif small.run.world_size > 1 and small.run.device != "cpu":  # CPU processes share the cores
        plans["devices"] = planned_test(small.plan)
    if small.spec.save.final_model:
        load = (small.machine.python, "-m", "backend.train.load_model")
        plans["load"] = replace(small.plan, argv=load, files={}, then=())
    return plans


# --- Of a run that is planned for another machine ---


def on_cpu(report: Report, here: Machine, base: Path, folder: Path) -> Report:
    """The report of the spec that rehearses a planned run with CPU processes of this machine, and with a small model
    that will be in `folder`. What the CPU cannot do is replaced by fixes of the rules, also by those that change the
    result."""
    planned, run = rehearsal_spec(report.spec), report.run
    nvme = "nvme" in (planned.parallel.offload_optimizer, planned.parallel.offload_param)  # with large buffers per rank
    ranks = min(run.world_size, max(2, run.sequence_parallel_size) if nvme else MAX_RANKS)
    patch: dict[str, Any] = {
        "launch.device": "cpu", "launch.nproc_per_node": ranks, "launch.omp_num_threads": 1,
        "launch.hostfile": (), "launch.include": "", "launch.master_port": 0,
        "data.max_length": min(planned.data.max_length, _longest(report, here, ranks)),
        "data.dataset_num_proc": min(planned.data.dataset_num_proc, here.cores),
        "train.per_device_train_batch_size": min(planned.train.per_device_train_batch_size, MAX_BATCH),
        "eval.per_device_eval_batch_size": min(planned.eval.per_device_eval_batch_size, MAX_BATCH),
        "train.dataloader_num_workers": min(planned.train.dataloader_num_workers, 1),
    }  # fmt: skip
    if nvme:
        patch["parallel.nvme_path"] = str(folder / SCRATCH)

    def case_of(spec: RunSpec) -> Case:
        """The case without sizes of the model, since those of the small model are not known yet."""
        case = build_case(spec, here, base)
        return replace(case, facts=replace(case.facts, shape=None, nvme_problem="", nvme_slow_reason=""))

    fixed = autofix(edit(planned, patch), case_of, only_safe=False)
    if fixed.remaining:
        return report_on(case_of(fixed.spec))
    model = {"model.source": "path", "model.path": str(folder / SCRATCH / "model"), "model.trust_remote_code": False}
    model["lora.adapter_path"] = ""  # an adapter has the sizes of the planned model
    facts = case_of(fixed.spec).facts
    return report_on(Case(effective(edit(fixed.spec, model)), here, facts))


def _longest(report: Report, here: Machine, ranks: int) -> int:
    """Tokens of the longest sequence whose logits leave half of the memory free, counting a whole batch of pairs, and
    copies of the logits for the loss and its gradient."""
    vocabulary = report.facts.tokenizer_size or 2**17
    copies = 4 * 2 * MAX_BATCH
    return max(64, int(0.5 * here.ram_free_bytes / ranks / (4 * copies * vocabulary)))


def _shrink_plan(report: Report, small: Report, folder: Path) -> Plan:
    """The command that writes the small model of the checked spec's model."""
    run = small.run
    multiple = math.lcm(run.tensor_parallel_size, run.sequence_parallel_size)
    parameters = int(0.5 * small.machine.ram_free_bytes / run.world_size / BYTES_PER_PARAMETER)
    layers = max(2, abs(report.spec.method.freeze_trainable_layers)) if report.spec.method.kind == "freeze" else 2
    limits = (f"--parameters={parameters}", f"--multiple={multiple}", f"--layers={layers}")
    argv = (small.machine.python, "-m", "backend.train.shrink_model", str(folder / SCRATCH / "model"), *limits)
    return replace(small.plan, argv=argv, files={SPEC: dump(report.spec)}, then=())


def replacements(report: Report, small: Report) -> list[str]:
    """How the rehearsal of a planned run differs from it, as sentences."""
    ranks, planned, gpus = small.run.world_size, report.run.world_size, selected_gpus(report.run, report.machine)
    device = gpus[0].name if gpus else registry.DEVICES[report.run.device].label
    here = f"{ranks} CPU processes" if ranks > 1 else "one CPU process"
    instead = f"Rehearsed with {here} of this machine instead of {planned} x {device}"
    notes = [f"{instead}: times and memory are not those of the run."]
    before, after = rehearsal_spec(report.spec), small.spec
    changed = [
        f"{o.name} is {_text(o, after)} instead of {_text(o, before)}"
        for o in options()
        if shown(before, o)
        and get(before, o.name) != get(after, o.name)
        and not o.name.startswith("launch.")
        and o.name not in SOURCE
    ]
    return [*notes, f"Changed for the CPU: {', '.join(changed)}."] if changed else notes


def _text(option: Option, spec: RunSpec) -> str:
    found = text(option, get(spec, option.name))
    return (str(found).lower() if isinstance(found, bool) else str(found)) or "empty"
