"""The comparison of machines: processes are adapted to fewer devices, with the same global batch size."""

from __future__ import annotations

from pathlib import Path

from backend.config.options import edit
from backend.machine import machines
from backend.preflight import preflight
from backend.presets import read
from backend.tasks.compare_machines import lines


def compared(patch, *names):
    """The line of each machine for the preset of a full fine-tuning on eight GPUs, by name."""
    spec = edit(read("full-8b-zero3"), patch)
    known = machines()
    reports = []

    def check(variant, name):
        reports.append(preflight(variant, known[name], Path.cwd()))
        return reports[-1]

    found = {line["name"]: line for line in lines(spec, names, check)}
    return found, {report.run.global_batch_size for report in reports}


def test_fewer_devices_get_fewer_processes_and_the_same_global_batch():
    found, batches = compared({}, "8x80gb", "4x80gb", "1x24gb")
    assert found["8x80gb"]["change"] == "" and found["8x80gb"]["gpus"] == 8
    four = found["4x80gb"]
    assert four["can_run"] and four["gpus"] == 4 and four["change"].startswith("With 4 processes and 8 gradient")
    assert found["8x80gb"]["tokens_per_second"] > four["tokens_per_second"] > 0
    one = found["1x24gb"]
    assert one["change"].startswith("With 1 process and 32 gradient") and "does not fit" in one["result"]
    assert len(batches) == 1


def test_processes_that_do_not_divide_the_batch_stay_an_error():
    """Six processes with one gradient accumulation step cannot become four with the same global batch size."""
    patch = {"launch.nproc_per_node": 6, "train.gradient_accumulation_steps": 1}
    found, _ = compared(patch, "8x80gb", "4x80gb")
    assert found["8x80gb"]["can_run"] and found["4x80gb"]["change"] == ""
    assert "More processes than devices" in found["4x80gb"]["result"]
