"""Writes docs/gpu.md for test_gpu.py: losses, measured and estimated memory, throughput; and a measurement report of
each run, which tests/measured_runs.py reads."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pynvml
import report_files
import torch
from gpu_cases import CASES, GIB, TrainedCases
from training_runs import losses, result

from backend.machine import describe
from backend.runs import ESTIMATE
from backend.runs.folder import Run
from backend.tasks import measurement_report

HEAD = """# Measurements on GPUs

Written by `make gpu` on {machine}: {versions}.

A randomly initialized Llama with {parameters} parameters, sequences of {length} tokens, a global batch size of four,
ten steps in bf16. Losses are compared with those of one process. The peak is torch's `max_memory_allocated` on the
device where it is largest; the estimate is the one that the page shows before launch, without the overhead that
torch's allocator does not see (CUDA context, NCCL). Tests: `tests/process/test_gpu.py`."""
TITLES = ("One device", "Several devices", "Throughput")
COLUMNS = (
    "case",
    "devices",
    "loss",
    "difference to one process",
    "peak, GiB",
    "estimate, GiB",
    "error of the estimate",
)


def introduction(trained: TrainedCases) -> str:
    platform, driver = trained.platform, ""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        driver = f", driver {pynvml.nvmlSystemGetDriverVersion()}"
        pynvml.nvmlShutdown()
    build = f" with CUDA {torch.version.cuda}" if torch.version.cuda else ""
    parameters = result(trained.run("plain")[0])["parameters"]
    return HEAD.format(
        machine=describe(trained.machine),
        versions=f"torch {torch.__version__}{build}{driver}",
        parameters=f"{parameters:,}",
        length=platform.length,
    )


def table(trained: TrainedCases, names: list[str]) -> str:
    """One row per case, or the reason why the case could not be run."""
    rows: list[list[object]] = []
    for name in names:
        if reason := trained.skip_reason(name):
            rows.append([name, reason, *[""] * (len(COLUMNS) - 2)])
            continue
        losses_by_step = losses(trained.run(name)[0])
        cells = [
            name,
            CASES[name].ranks,
            f"{losses_by_step[1]:.3f} to {losses_by_step[10]:.3f}",
            f"{trained.loss_error(name):.2%}",
        ]
        cells += [f"{size / GIB:.2f}" for size in (trained.peak(name), trained.estimated(name))]
        rows.append([*cells, f"{trained.error(name):+.0%}"])
    return report_files.table(COLUMNS, rows)


def write_reports(trained: TrainedCases, names: list[str], folder: Path) -> list[Path]:
    """Write the report of each case that is a complete run, with supervisor and launcher. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    done = [name for name in names if not trained.skip_reason(name) and (trained.run(name)[0] / ESTIMATE).exists()]
    for name in done:
        report = measurement_report.build(Run(trained.run(name)[0]))
        (folder / f"gpu-{name}.json").write_text(measurement_report.as_text(report), encoding="utf-8")
    return [folder / f"gpu-{name}.json" for name in done]


def write_section(document: Path, introduction: str, title: str, body: str) -> None:
    """Write one section of the document. Sections measured on another machine are removed."""
    if document.exists() and document.read_text(encoding="utf-8").partition("\n## ")[0].strip() != introduction.strip():
        document.unlink()
    report_files.write_section(document, lambda _: introduction, TITLES, title, body)
