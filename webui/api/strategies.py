"""The data of the section "Devices and strategy": devices to choose from, and a line for each strategy.

Both are parts of the check report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import by_name, get, shown, text
from backend.inspect import resolve_paths
from backend.machine import Machine
from backend.preflight import Report
from backend.registry import DEVICES
from backend.rules import Case, Fix
from backend.tasks.compare import Variant, other_strategies, recommend, variants
from backend.wording import plural
from webui.api.fixes import fix_json

BATCH = ("train.gradient_accumulation_steps", "train.per_device_train_batch_size")


def strategies_json(report: Report, spec: RunSpec) -> dict[str, Any] | None:
    """Every parallel strategy for the options of `report`, with the patch that selects it, and the recommended one;
    None if the strategy has no effect. `others` are the strategies that another strategy replaces. `spec` is the form's
    spec, with the options that the current strategy hides."""
    if not shown(report.spec, by_name()["parallel.strategy"]):
        return None
    case = Case(resolve_paths(spec, Path.cwd()), report.machine, report.facts)
    found = variants(case)
    best, reason = recommend(case, found) or (None, "")
    return {
        "lines": [_line(variant, case.spec, best) for variant in found],
        "others": [_line(variant, case.spec, best) for variant in other_strategies(case, found)],
        "best": {**_line(best, case.spec, best), "reason": reason} if best else None,
    }


def _line(variant: Variant, spec: RunSpec, best: Variant | None) -> dict[str, Any]:
    # The whole patch, not only its changes to `spec`: another line may have been chosen in the meantime.
    kept = {name: get(spec, name) for name in BATCH}
    patch = {name: text(by_name()[name], value) for name, value in {**kept, **variant.patch}.items()}
    diff = fix_json(Fix(variant.name, variant.patch), spec)["diff"]
    return {
        "name": variant.name,
        "patch": patch,
        "diff": [change for change in diff if not change["name"].startswith("parallel.")],
        "is_current": variant.is_current,
        "examples_per_step": variant.case.run.global_batch_size,
        "is_best": best is not None and variant.case.spec == best.case.spec,
        "error": variant.error,
        "fit": variant.fit,
        "verdict": variant.verdict,
        "device_bytes": variant.device_bytes,
        "capacity_bytes": variant.capacity_bytes,
        "host_bytes": variant.host_bytes,
        "sent_bytes": variant.sent_bytes,
        "host_traffic_bytes": variant.host_traffic_bytes,
        "tokens_per_second": variant.tokens_per_second,
    }


def devices_json(report: Report) -> dict[str, Any]:
    """The devices of each node, and how NVLink connects them: for each device the ids of its peers, None if they are
    not known. All nodes of a machine are alike."""
    machine, run = report.machine, report.run
    device = DEVICES[run.device]
    on_gpus = run.device == machine.device and bool(device.visible_devices_env)
    return {
        "noun": device.noun,
        "plural": plural(device.noun),
        "nodes": machine.nodes if on_gpus else 1,
        "gpus": [_gpu(machine, i) for i in range(len(machine.gpus))] if on_gpus else [],
        "selected": list(run.device_ids),
        "selected_nodes": run.nnodes,
        "place": report.spec.launch.place,
    }


def _gpu(machine: Machine, i: int) -> dict[str, Any]:
    gpu = machine.gpus[i]
    return {
        "id": gpu.id,
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "free_bytes": gpu.free_bytes,
        "processes": list(gpu.processes),
        "nvlink_peers": None if gpu.nvlink_peers is None else list(gpu.nvlink_peers),
    }
