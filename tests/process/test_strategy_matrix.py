"""Method x strategy x precision x optimizer: every combination that the rules allow on this machine is launched for
three steps, and the outcome is written to docs/strategies.md, one section per method and strategy. No combination may
pass the checks and then fail."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, rank_count, write_run
from report_files import Sections, table, write_section
from training_runs import log_text, losses, make_spec

from backend import registry
from backend.machine import Machine, probe
from backend.paths import HOME
from backend.preflight import preflight
from backend.rules.examples import EQUIPPED_TWO

pytestmark = pytest.mark.soak

Changes = Mapping[str, Any]
METHODS: Mapping[str, Changes] = {
    **{row.label: {"method.kind": name} for name, row in registry.METHODS.items()},
    "QLoRA (NF4)": {"method.kind": "lora", "method.quantization": "nf4"},
}
STRATEGIES: Mapping[str, Changes] = {
    **{row.label: {"parallel.strategy": name} for name, row in registry.STRATEGIES.items()},
    "ZeRO-2, offload": {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu"},
    "ZeRO-3, offload": {
        "parallel.strategy": "zero3",
        "parallel.offload_optimizer": "cpu",
        "parallel.offload_param": "cpu",
    },
    "FSDP2, offload": {"parallel.strategy": "fsdp2", "parallel.cpu_offload": True},
}
PRECISIONS = [name for name in registry.PRECISIONS if name != "auto"]
SHORT_RUN: Changes = {
    "train.per_device_train_batch_size": 2,
    "data.max_samples": 16,
    "data.max_length": 96,
}  # thousands of runs are launched
RUNS, GPU = "runs", "GPU"
DOCUMENT = HOME / "docs/strategies.md"
HEAD = """# Strategies

This document lists which combinations of method, strategy, precision and optimizer work. It is written by `make soak`
on a machine without a GPU. In the tables below the summary, each cell is one of these:

- **runs**: the rules allow the combination on a CPU. It was launched for three steps and succeeded, with two processes
  except for *Single process*.
- **GPU**: the rules refuse it on a CPU and allow it on two H100 GPUs with every optional package installed. It was not
  launched.
- Otherwise: the codes of the rules that refuse it on both machines ([rules.md](rules.md)).

The summary counts these three outcomes for each method and strategy. A section is written when its test has passed; a
combination without a section has an empty cell in the summary.

All these runs trained on one machine with Footplate's own trainer. Runs on Slurm, Ray and Kubernetes, and runs with
LLaMA-Factory as the trainer, start the same processes, and were tested with DDP (LLaMA-Factory also with ZeRO-2); the
[README](../README.md#supported) lists what was run there.

"""


def cell(changes: Changes, machine: Machine, folder: Path, fork_server: ForkServer) -> str:
    """`RUNS`, `GPU`, the codes of the rules that refuse the combination everywhere, or how the run failed."""
    spec = make_spec({**SHORT_RUN, **changes})
    report = preflight(spec, machine, folder.parent)
    if any(f.level == "error" for f in report.findings):
        gpu_findings = preflight(make_spec({**changes, "launch.device": "cuda"}), EQUIPPED_TWO, folder.parent).findings
        return ", ".join(sorted({f.code for f in gpu_findings if f.level == "error"})) or GPU
    write_run(folder, report.spec)
    code = fork_server.run(folder, rank_count(spec), env=report.plan.env)
    outcome = RUNS if code == 0 and len(losses(folder)) == 3 else f"FAILS {log_text(folder)[-1500:]}"
    shutil.rmtree(folder)
    return outcome


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", METHODS)
def test_combinations_that_pass_the_checks_run(
    method: str, strategy: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    machine = probe(tmp_path)
    outcomes = {}
    for precision in PRECISIONS:
        for optimizer in registry.OPTIMIZERS:
            changes = {**METHODS[method], **STRATEGIES[strategy]}
            changes |= {"precision.compute": precision, "train.optim": optimizer}
            outcomes[precision, optimizer] = cell(changes, machine, tmp_path / f"{precision}-{optimizer}", fork_server)
    failed = {key: outcome for key, outcome in outcomes.items() if outcome.startswith("FAILS")}
    assert not failed, "\n\n".join(f"{key}: {outcome}" for key, outcome in failed.items())
    order = [f"{method}: {strategy}" for method in METHODS for strategy in STRATEGIES]
    write_section(DOCUMENT, introduction, order, f"{method}: {strategy}", section(outcomes))


def section(outcomes: Mapping[tuple[str, str], str]) -> str:
    """The counts, and a table: one row per group of optimizers with the same outcomes, one column per precision."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for optimizer in registry.OPTIMIZERS:
        rows.setdefault(tuple(outcomes[precision, optimizer] for precision in PRECISIONS), []).append(optimizer)
    cells = list(outcomes.values())
    runs, gpu = cells.count(RUNS), cells.count(GPU)
    counts = f"{runs} run, {gpu} need a GPU, {len(cells) - runs - gpu} are refused."
    return (
        f"{counts}\n\n{table(['optimizers', *PRECISIONS], [(', '.join(names), *row) for row, names in rows.items()])}"
    )


def introduction(sections: Sections) -> str:
    """The introduction of the document, and a summary of all sections."""
    rows = []
    for strategy in STRATEGIES:
        bodies = [sections.get(f"{method}: {strategy}", "") for method in METHODS]
        rows.append([strategy, *(" / ".join(re.findall(r"\d+", body.partition("\n")[0])) for body in bodies)])
    return HEAD + table(["runs / needs a GPU / refused", *METHODS], rows)
