"""Method x strategy x precision x optimizer: what the rules let through on this machine is launched for three steps,
and the outcome becomes docs/strategies.md. No cell may pass the checks and fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from host import Host, a_host, write
from trainings import a_spec, losses, text

from backend import catalog
from backend.derived import processes
from backend.judge import judge
from backend.machine import Machine, probe
from backend.paths import HOME
from backend.train import builtin

pytestmark = pytest.mark.soak

METHODS: Mapping[str, Mapping[str, Any]] = {name: {"method.kind": name} for name in catalog.METHODS}
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"parallel.strategy": name} for name in catalog.STRATEGIES},
    "zero2 + offload": {"parallel.strategy": "zero2", "parallel.offload_optimizer": "cpu"},
    "zero3 + offload": {
        "parallel.strategy": "zero3",
        "parallel.offload_optimizer": "cpu",
        "parallel.offload_parameters": "cpu",
    },
    "fsdp2 + offload": {"parallel.strategy": "fsdp2", "parallel.cpu_offload": True},
}
PRECISIONS = [name for name in catalog.PRECISIONS if name != "auto"]
RUNS = "runs"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    cache = tmp_path_factory.mktemp("matrix") / "cache"
    cache.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_CACHE", str(cache))
        builtin.prepare("tiny-llama", lambda text, share: None)
        with a_host(cache) as found:
            yield found


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[str, str, str, str], str]]:
    """Cell by cell; written down once all are known."""
    found: dict[tuple[str, str, str, str], str] = {}
    yield found
    if len(found) == len(METHODS) * len(STRATEGIES) * len(PRECISIONS) * len(catalog.OPTIMIZERS):
        (HOME / "docs/strategies.md").write_text(document(found), encoding="utf-8")


def cell(changes: Mapping[str, Any], machine: Machine, folder: Path, host: Host) -> str:
    """'runs', the codes of the rules that refuse it, or what went wrong."""
    spec = a_spec({**changes, "train.batch_size": 2})
    found = judge(spec, machine, folder.parent)
    refused = sorted(f.code for f in found.findings if f.level == "error")
    if refused:
        return " ".join(refused)
    write(folder, found.spec)
    ranks = processes(spec) if spec.parallel.strategy in catalog.MANY else 0
    code = host.run(folder, ranks, env=found.plan.env)
    ended = RUNS if code == 0 and len(losses(folder)) == 3 else f"FAILS {text(folder)[-600:]}"
    shutil.rmtree(folder)
    return ended


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", METHODS)
def test_what_passes_the_checks_runs(
    method: str, strategy: str, host: Host, tmp_path: Path, outcomes: dict[tuple[str, str, str, str], str]
) -> None:
    machine, seen = probe(tmp_path), {}
    for precision in PRECISIONS:
        for optimizer in catalog.OPTIMIZERS:
            changes = {**METHODS[method], **STRATEGIES[strategy]}
            changes |= {"precision.compute": precision, "train.optimizer": optimizer}
            key = (method, strategy, precision, optimizer)
            seen[key] = outcomes[key] = cell(changes, machine, tmp_path / f"{precision}-{optimizer}", host)
    assert not {key: what for key, what in seen.items() if what.startswith("FAILS")}


def document(found: Mapping[tuple[str, str, str, str], str]) -> str:
    """A table for each method: strategies down, optimizers across, the precisions in a cell."""
    lines = [
        "# Strategies, by launch",
        "",
        "Written by `make soak` on a CPU: every cell that the rules let through was",
    ]
    lines[-1] += (
        " launched for three steps, with two processes where the strategy has several. Otherwise the cell names"
    )
    lines += ["the rules that refuse it ([rules.md](rules.md)); HW and PRC rules mean that it needs another device."]
    for method in METHODS:
        lines += [
            "",
            f"## {catalog.METHODS[method].label}",
            "",
            f"| strategy | precision | {' | '.join(catalog.OPTIMIZERS)} |",
        ]
        lines.append("|---" * (2 + len(catalog.OPTIMIZERS)) + "|")
        for strategy in STRATEGIES:
            for precision in PRECISIONS:
                cells = [found[method, strategy, precision, optimizer] for optimizer in catalog.OPTIMIZERS]
                lines.append(f"| {strategy} | {precision} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
