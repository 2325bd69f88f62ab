"""docs/gpu.md, written by test_gpu.py: losses, measured memory and its estimate, throughput."""

from __future__ import annotations

import contextlib
from pathlib import Path

import documents
import pynvml
import torch
from devices import CASES, GIB, Trained
from trainings import losses, result

from backend.machine import describe

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


def introduction(trained: Trained) -> str:
    place, driver = trained.place, ""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        driver = f", driver {pynvml.nvmlSystemGetDriverVersion()}"
        pynvml.nvmlShutdown()
    built = f" with CUDA {torch.version.cuda}" if torch.version.cuda else ""
    parameters = result(trained.run("plain")[0])["parameters"]
    return HEAD.format(
        machine=describe(trained.machine),
        versions=f"torch {torch.__version__}{built}{driver}",
        parameters=f"{parameters:,}",
        length=place.length,
    )


def table(trained: Trained, names: list[str]) -> str:
    """One row per case, or the reason why the case could not be run."""
    rows: list[list[object]] = []
    for name in names:
        if why := trained.missing(name):
            rows.append([name, why, *[""] * (len(COLUMNS) - 2)])
            continue
        told = losses(trained.run(name)[0])
        cells = [name, CASES[name].ranks, f"{told[1]:.3f} to {told[10]:.3f}", f"{trained.off(name):.2%}"]
        cells += [f"{size / GIB:.2f}" for size in (trained.peak(name), trained.estimated(name))]
        rows.append([*cells, f"{trained.error(name):+.0%}"])
    return documents.table(COLUMNS, rows)


def write_section(document: Path, introduction: str, title: str, body: str) -> None:
    """Write one section of the document. Sections measured on another machine are removed."""
    if document.exists() and document.read_text(encoding="utf-8").partition("\n## ")[0].strip() != introduction.strip():
        document.unlink()
    documents.write_section(document, lambda _: introduction, TITLES, title, body)
