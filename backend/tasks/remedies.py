"""Remedies of a failed run: changes of its options, each a fix that passes the checks, with the peak that it leads to.
A run whose loss rose until its end, or that stopped after a spike, has the remedies of a run that diverged. A run that
ran out of memory has those of the memory rules, with peaks that are corrected by what this run needed. Other failures
have the fixes of errors that the checks find now and that are about the same options.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from backend import presets, wording
from backend.config import RunSpec
from backend.config.options import SpecError, edit
from backend.config.processes import DEFAULT_PORT
from backend.config.sources import key_of
from backend.inspect.ports import inspect_port
from backend.machine import Gpu, Machine
from backend.memory import OVERHEAD, Estimate
from backend.preflight import build_case
from backend.rules import Case, Finding, Fix, examine
from backend.rules.common_fixes import BF16
from backend.rules.memory import HOST_FIXES
from backend.rules.memory_remedies import POSSIBLE_EXCESS, find_remedies, single_changes
from backend.runs import SPEC, failure, files
from backend.runs.folder import Run, RunError
from backend.tasks import retry
from backend.tasks.measured import least_needed
from backend.wording import counted, data_size

MAX_REMEDIES = 5
MIN_SAVING = 0.95  # times the needed memory: a change that saves less is within the error of the estimate
RULE_CODE = re.compile(r"\[[A-Z]{3}\d{3}\]$")
OPTION_KEY = re.compile(r"\b[a-z]+\.[a-z]\w+(?:\[\d+\]\.\w+)?")
AMPERE = (8, 0)  # CUDA compute capability with bf16, of devices that are known by their size only


@dataclass(frozen=True)
class Remedies:
    """Fixes of a failed run, the best first. Their `peak` is predicted for `where`: "per device" or "host RAM"; `note`
    says how."""

    fixes: tuple[Fix, ...] = ()
    where: str = ""
    note: str = ""


@dataclass(frozen=True)
class Failed:
    """A failed run: its folder, why it failed (empty if only its loss rose), and its spec as it would be checked
    now."""

    run: Run
    failure: Mapping[str, Any]
    case: Case
    base: Path

    @property
    def spec(self) -> RunSpec:
        """The options of the run."""
        return self.case.spec

    def changed(self, patch: Mapping[str, Any]) -> Case:
        """The case after a change, with its own inspected files."""
        return build_case(edit(self.spec, patch), self.case.machine, self.base)


def find(run: Run, machine: Machine, base: Path) -> Remedies:
    """The remedies of a run on this machine; none if it needs none, or its spec cannot be read."""
    why = run.failure() or {}
    kind = why["kind"] if why else failure.DIVERGED if retry.applies(run) else ""
    try:
        spec = presets.load(files.read_text(run.path / SPEC)) if kind else None
    except (OSError, SpecError):
        return Remedies()
    if not spec:
        return Remedies()
    failed = Failed(run, why, build_case(spec, machine, base), base)
    if kind == failure.DEVICE_MEMORY or (kind == failure.HOST_MEMORY and failed.case.run.device == "cpu"):
        found = _less_device_memory(failed)
    elif kind == failure.HOST_MEMORY:
        found = _less_host_memory(failed)
    else:
        found = Remedies(tuple(BY_KIND[kind](failed)) if kind in BY_KIND else _fixes_of_errors(failed))
    return replace(found, fixes=tuple(islice(_passing(failed, found.fixes), MAX_REMEDIES)))


def _passing(failed: Failed, fixes: Iterable[Fix]) -> Iterator[Fix]:
    """The fixes that change the run and lead to no new error."""
    known = _error_codes(failed.case)
    for fix in (fix for fix in fixes if failed.case.takes(fix.patch)):
        after = failed.changed(fix.patch)
        if after.spec != failed.spec and not _error_codes(after) - known:
            yield fix


def _errors(case: Case) -> list[Finding]:
    return [finding for finding in examine(case) if finding.level == "error"]


def _error_codes(case: Case) -> set[str]:
    return {finding.code for finding in _errors(case)}


def _fixes_of_errors(failed: Failed) -> tuple[Fix, ...]:
    """The fixes of errors that the checks find now and that the run failed with, without fixes that leave the error.
    Other errors, such as those of a machine that is not the one the run was planned for, are left out."""
    fixes = []
    for finding in filter(lambda finding: _is_about(failed, finding), _errors(failed.case)):
        useful = (f for f in finding.fixes if finding.code not in _error_codes(failed.changed(f.patch)))
        fixes += list(islice(useful, 2))
    return tuple(fixes)


def _is_about(failed: Failed, finding: Finding) -> bool:
    """Whether the run failed with this finding, or with an error about the same options. An error of the checks
    (backend/train/verify.py) names code and title. The fields of errors about memory are the options that reduce it."""
    why = failed.failure
    sentence = why["sentence"]
    if f"[{finding.code}]" in sentence or finding.title in sentence:
        return True
    if RULE_CODE.search(sentence):
        return False
    options = {*why["fields"], *OPTION_KEY.findall(sentence)}
    if why["kind"] == failure.COLUMNS:
        options |= {key_of(index, "files") for index in range(len(failed.spec.data.datasets))}
    return not finding.code.startswith("MEM") and not options.isdisjoint(finding.fields)


# -- memory ------------------------------------------------------------------------------------------------------------


def _less_device_memory(failed: Failed) -> Remedies:
    """The remedies of the memory rules after which the corrected estimate fits. Where none is known to fit, for example
    since this machine has no such device, those that save most."""
    case, kept = failed.case, failed.run.estimate()
    least, estimated = least_needed(failed.failure["traceback"], kept), int(kept.get("measured_bytes") or 0)
    ratio = max(1.0, least / estimated) if estimated else 1.0
    overhead = int(kept.get("device_bytes") or estimated) - estimated
    needed = round(estimated * ratio) + overhead if estimated else 0
    where = "per process" if case.run.device == "cpu" else "per device"
    evaluation = _smaller_evaluation(failed)
    if case.estimate.unknown or failed.run.resolved().get("device", case.run.device) != case.run.device:
        return Remedies(
            (*evaluation, *_less_on_devices_of_run(failed, ratio, needed)),
            note="Peak memory cannot be estimated on this machine, which has no such device or model file.",
        )
    free, limit = case.estimate.capacity_bytes, case.estimate.ratios[1] / ratio
    found = find_remedies(case, min(limit, 1.0)) or find_remedies(case, min(limit, POSSIBLE_EXCESS)) if free else []
    fixes = [(fix, _corrected(failed.changed(fix.patch).estimate, ratio)) for fix in found]
    needed = needed or _corrected(case.estimate, ratio)
    enough = MIN_SAVING * needed
    fixes = [(fix, peak) for fix, peak in fixes if peak <= min(free, enough)]
    note = _note(case.estimate, ratio, least, estimated)
    if not fixes:
        changes = ((fix, _corrected(failed.changed(fix.patch).estimate, ratio)) for fix in single_changes(case))
        fixes = sorted(((fix, peak) for fix, peak in changes if peak <= enough), key=lambda item: item[1])
        note += " No single change is estimated to fit; combine several." if fixes and free else ""
    return Remedies((*evaluation, *(replace(fix, peak=peak) for fix, peak in fixes)), where, note)


def _less_on_devices_of_run(failed: Failed, ratio: float, needed: int) -> list[Fix]:
    """Single changes that keep the training result and reduce the peak on devices like those of the run, which this
    machine does not have. If the peak cannot be estimated, changes of the strategy are left out, because another one
    may shard less."""
    resolved, free = failed.run.resolved(), int(failed.run.estimate().get("capacity_bytes") or 0)
    device, ids = str(resolved.get("device", "")), resolved.get("device_ids")
    if device not in ("", "cpu") and ids and free and needed:
        gpus = tuple(Gpu(number, device, free, free, AMPERE) for number in ids)
        case = build_case(failed.spec, replace(failed.case.machine, device=device, gpus=gpus), failed.base)
        if not case.estimate.unknown:
            safe = (fix for fix in single_changes(case) if fix.safe)
            peaks = ((fix, _corrected(case.estimated(case.with_patch(fix.patch)), ratio)) for fix in safe)
            return [fix for fix, peak in peaks if peak <= MIN_SAVING * needed]
    return [fix for fix in single_changes(failed.case) if fix.safe and "parallel.strategy" not in fix.patch]


def _corrected(estimate: Estimate, ratio: float) -> int:
    """The estimated peak on a device, times `ratio` except for the memory that torch's allocator does not see."""
    overhead = sum(row.bytes for row in estimate.rows if row.name == OVERHEAD)
    return round((estimate.device_bytes - overhead) * ratio) + overhead


def _note(estimate: Estimate, ratio: float, least: int, estimated: int) -> str:
    free = f"{data_size(estimate.capacity_bytes)} is free now. " if estimate.capacity_bytes else ""
    if ratio <= 1:
        return (
            f"{free}The failed run was estimated at {data_size(estimate.device_bytes)}. Its real peak is not known, so "
            "the peaks below are estimates too."
        )
    return (
        f"{free}The failed run needed at least {data_size(least)}, {ratio:.2f} times the estimate of "
        f"{data_size(estimated)}. The peaks below are estimates times {ratio:.2f}, and may still be too low."
    )


def _smaller_evaluation(failed: Failed) -> list[Fix]:
    """A smaller batch in evaluation, if the run failed there."""
    size = failed.spec.eval.per_device_eval_batch_size
    if failed.run.progress().get("phase") != "evaluating" or size == 1:
        return []
    patch = {"eval.per_device_eval_batch_size": max(1, size // 4)}
    return [Fix(f"Eval batch size {max(1, size // 4)}", patch, cost="slower evaluation")]


def _less_host_memory(failed: Failed) -> Remedies:
    """Changes that reduce the RAM of a node. What worker processes of the data loader need is not estimated."""
    now = failed.case.estimate
    fixes = list(_no_loader_workers(failed))
    for fix in filter(lambda fix: failed.case.takes(fix.patch), (*_fewer_processes(failed), *HOST_FIXES)):
        after = failed.changed(fix.patch).estimate
        if after.host_bytes <= MIN_SAVING * now.host_bytes and after.fits is not False:
            fixes.append(replace(fix, peak=after.host_bytes))
    note = "" if now.unknown else f"The failed run was estimated at {data_size(now.host_bytes)} of host RAM per node."
    return Remedies(tuple(fixes), "host RAM", note)


def _fewer_processes(failed: Failed) -> Iterator[Fix]:
    processes, accumulation = failed.case.run.nproc_per_node, failed.spec.train.gradient_accumulation_steps
    if processes % 2 == 0:
        patch = {"launch.nproc_per_node": processes // 2, "train.gradient_accumulation_steps": 2 * accumulation}
        label = f"{counted(processes // 2, 'process')} with more gradient accumulation"
        yield Fix(label, patch, cost="slower: uses half as many devices")


# -- other kinds -------------------------------------------------------------------------------------------------------


def _no_loader_workers(failed: Failed) -> Iterator[Fix]:
    if failed.spec.train.dataloader_num_workers:
        yield Fix("Load data without worker processes", {"train.dataloader_num_workers": 0}, cost="slower data loading")


def _less_disk(failed: Failed) -> Iterator[Fix]:
    last = {"save.total_limit": 1} | ({"save.keep_best": 0} if failed.spec.save.keep_best else {})
    yield Fix("Keep one checkpoint", last, cost="the new run deletes its older checkpoints")
    yield Fix("Save checkpoints without optimizer state", {"save.only_model": True}, cost="the run cannot be resumed")
    yield Fix("Save no checkpoints", {"save.strategy": "no"}, cost="the run cannot be resumed")


def _other_port(failed: Failed) -> Iterator[Fix]:
    port = failed.spec.launch.master_port or DEFAULT_PORT
    if port != DEFAULT_PORT:
        yield Fix(f"The default master port, {DEFAULT_PORT}", {"launch.master_port": 0})
    if free := inspect_port(port).get("free_port"):
        yield Fix(f"Master port {free}", {"launch.master_port": free})


def _longer_timeout(failed: Failed) -> Iterator[Fix]:
    seconds = 4 * failed.spec.parallel.ddp_timeout
    patch = {"parallel.ddp_timeout": seconds}
    yield Fix(f"Distributed timeout of {seconds:,} s", patch, cost="a rank that hangs is noticed later")


def _available_device(failed: Failed) -> Iterator[Fix]:
    yield Fix("Detect the devices automatically", {"launch.device": "auto", "launch.devices": ()})


def _detected_format(failed: Failed) -> Iterator[Fix]:
    yield from _fixes_of_errors(failed)
    others = enumerate(failed.spec.data.sources[1:], 1)
    patch = {key_of(index, "format"): "auto" for index, dataset in others if dataset.format != "auto"}
    yield Fix("Detect the data format", {"data.format": "auto", **patch})


def _stable_training(failed: Failed) -> Iterator[Fix]:
    train = failed.spec.train
    is_unusual = retry.lower_rate(failed.spec, 1) < train.learning_rate  # then all checkpoints are damaged
    with contextlib.suppress(RunError):  # no checkpoint
        patch = retry.changes(failed.run, failed.spec)
        start, lower = Path(patch["save.resume_path"]).name, patch["train.learning_rate"]
        if not is_unusual:
            yield Fix(f"Continue from {start} with learning rate {wording.learning_rate(lower)}", patch, safe=False)
    rate = retry.lower_rate(failed.spec, 1 / 5)
    if failed.case.run.compute_dtype == "fp16":
        yield replace(BF16, cost="fp16 overflows above 65,504")
    label = f"Learning rate {wording.learning_rate(rate)}"
    yield Fix(label, {"train.learning_rate": rate}, safe=False, cost="slower convergence")
    if is_unusual:
        return  # neither of the following changes would help
    is_constant = train.lr_scheduler_type == "constant"  # a schedule without warmup
    if train.warmup_steps < 0.1 or is_constant:
        schedule = {"train.lr_scheduler_type": "constant_with_warmup"} if is_constant else {}
        yield Fix("Warm up for 10% of the steps", {"train.warmup_steps": 0.1, **schedule}, safe=False)
    if not 0 < train.max_grad_norm <= 1:
        yield Fix("Clip gradients to norm 1", {"train.max_grad_norm": 1.0}, safe=False)


def _torchrun(failed: Failed) -> Iterator[Fix]:
    yield Fix("Use torchrun", {"launch.launcher": "torchrun"})


BY_KIND: Mapping[str, Callable[[Failed], Iterable[Fix]]] = {
    failure.SHARED_MEMORY: _no_loader_workers,
    failure.DISK: _less_disk,
    failure.PORT: _other_port,
    failure.TIMEOUT: _longer_timeout,
    failure.DEVICE: _available_device,
    failure.COLUMNS: _detected_format,
    failure.DIVERGED: _stable_training,
    failure.LAUNCHER: _torchrun,
}
