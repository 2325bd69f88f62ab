"""The document that the proofs on GPUs write (test_gpu.py): losses, memory against its estimate, throughput."""

from __future__ import annotations

import contextlib
from pathlib import Path

import documents
import pynvml
import torch
from devices import CASES, GIB, Trained
from trainings import losses, result

from backend.machine import describe

HEAD = """# GPUs, by measurement

Written by `make gpu` on {machine}: {versions}.

A random Llama of {parameters} weights, {length} tokens a row, four rows a step in all, ten steps in bf16. Losses are
held against those of one process; the peak is torch's `max_memory_allocated` on the fullest device, and the estimate
is what the page says before launch, without what the driver takes beside it. Proofs: `tests/process/test_gpu.py`.
"""
TITLES = ("One device", "Several devices", "Throughput")
COLUMNS = ("case", "devices", "loss", "off by", "peak, GiB", "estimate, GiB", "error")


def head(trained: Trained) -> str:
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
    """A row for each case; why for those that could not be tried."""
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


def keep(document: Path, top: str, title: str, body: str) -> None:
    """Put one section into the document. Another machine's sections go."""
    if document.exists() and document.read_text(encoding="utf-8").partition("\n## ")[0].strip() != top.strip():
        document.unlink()
    documents.keep(document, lambda _: top, TITLES, title, body)
