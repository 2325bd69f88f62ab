"""Estimates of today for the run of a measurement report, for tests: was a change of the formulas for the better?

`make gpu` writes reports to tests/data/measurements, and reports that users attach to issues can be added there.
`python -m tests.measured_runs FILE...` prints measured / predicted of each, as it was and as it would be now.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.config.options import parse
from backend.inspect import CpuSpeed, InputFacts
from backend.machine import Gpu, Machine
from backend.modelspec import from_config
from backend.preflight import Report, report_on
from backend.rules import Case
from backend.tasks import measurement_report

FOLDER = Path(__file__).parent / "data/measurements"
CONFIG = {  # of a model -> its key in config.json
    "model_type": "model_type", "layers": "num_hidden_layers", "hidden": "hidden_size",
    "intermediate": "intermediate_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim", "vocabulary": "vocab_size", "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings", "dtype": "dtype",
}  # fmt: skip
HARMLESS = {
    "model.builtin", "model.path", "model.hub_id", "model.revision", "data.builtin", "data.files", "data.hub_id",
    "data.hub_config", "data.hub_split", "data.system_prompt", "logging.run_name", "launch.devices",
}  # fmt: skip


def predicted_now(report: Mapping[str, Any]) -> Report:
    """What the preflight would report today. Raises ValueError if the report has too little for it."""
    if not {"hardware", "model"} <= report.keys() or "layers" not in report["model"]:
        raise ValueError("The report has no machine or no sizes of the model: an earlier version created its run.")
    left_out = {name for name in report.get("texts_left_out", ()) if not name.endswith("_column")}
    if unknown := left_out - HARMLESS:
        raise ValueError(f"The report does not have the values of {', '.join(sorted(unknown))}.")
    hardware, model, data = report["hardware"], report["model"], report["data"]
    gpus = [
        Gpu(i, each["name"], each["total_bytes"], each["free_bytes"], tuple(each["capability"]))
        for i, each in enumerate(hardware["gpus"])
    ]
    names = "device", "nodes", "cores", "ram_bytes", "ram_free_bytes", "gpu_link_rate", "network_rate", "disk_rate"
    machine = Machine(gpus=tuple(gpus), **{name: hardware[name] for name in names if name in hardware})
    facts = InputFacts(
        shape=from_config({key: model[name] for name, key in CONFIG.items()}),
        token_lengths=tuple(data["token_lengths"]),
        labeled_share=data["labeled_share"],
        cpu=CpuSpeed(**hardware["cpu_rates"]) if hardware.get("cpu_rates") else None,
    )
    return report_on(Case(parse(report["options"]), machine, facts))


def ratios_now(report: Mapping[str, Any]) -> dict[str, float]:
    """Measured over predicted memory and time of a step, with the predictions of today."""
    found = predicted_now(report)
    memory = {"comparable_bytes": (found.expected or {}).get("measured_bytes")}
    time = {"step_seconds": found.time.step_seconds if not found.time.unknown else None}
    return measurement_report.ratios({**report, "predicted": {"memory": memory, "time": time}})


def main(paths: list[str]) -> None:
    """Print a line for each report."""
    for path in map(Path, paths or sorted(FOLDER.glob("*.json"))):
        report = measurement_report.read(path)
        print(path.name, measurement_report.ratios(report), "now", ratios_now(report))


if __name__ == "__main__":
    main(sys.argv[1:])
