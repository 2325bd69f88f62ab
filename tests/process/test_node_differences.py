"""Nodes of one run that differ: another version of a library, a run's folder that they do not share."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import make_spec

from backend.launch.plan import plan
from backend.machine import Machine
from backend.resolve import resolve
from backend.rules.examples import H100
from backend.runs import LOG, NODE_JOB, SPEC
from backend.runs.failure import diagnose
from backend.train import verify
from backend.train.run_log import TrainError


class Nodes:
    """A process group of this node and another one, which has other versions."""

    def __init__(self, **others: str) -> None:
        self.others = others

    def gather(self, value: tuple[str, dict[str, str]]) -> list[Any]:
        return [value, ("worker-2", {**value[1], **self.others})]


def test_different_versions_are_named() -> None:
    assert verify.versions()["torch"] and set(verify.versions()) >= {"Python", "transformers", "deepspeed"}
    verify.check_versions(Nodes())  # type: ignore[arg-type]
    with pytest.raises(TrainError, match=r"worker-2 has transformers 4\.1, and .* has 5\."):
        verify.check_versions(Nodes(transformers="4.1"))  # type: ignore[arg-type]
    with pytest.raises(TrainError, match=r"worker-2 has Python 3\.8\.1"):
        verify.check_versions(Nodes(Python="3.8.1"))  # type: ignore[arg-type]
    with pytest.raises(TrainError, match="worker-2 has deepspeed not installed"):
        verify.check_versions(Nodes(deepspeed=""))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["auto", "bf16"])
def test_a_gpu_without_bf16_units_is_refused_only_if_bf16_was_not_chosen(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """A run that was planned for an H100 is on a T4. PRC002 only warns of a chosen bf16."""
    spec = make_spec({"launch.device": "cuda", "precision.compute": precision})
    run = resolve(spec, H100)
    assert run.compute_dtype == "bf16"
    monkeypatch.setattr(verify.device, "device_count", lambda family: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "T4")
    if precision == "auto":
        with pytest.raises(TrainError, match="planned for bf16, but rank 0 is on T4"):
            verify.check_device(spec, run)
    else:
        verify.check_device(spec, run)


@pytest.mark.parametrize("kind", ["missing", "another folder of the same name"])
def test_a_slurm_node_that_does_not_see_the_folder_says_so(tmp_path: Path, kind: str) -> None:
    script = plan(make_spec({"launch.place": "slurm", "parallel.strategy": "ddp"}), Machine()).files[NODE_JOB]
    (tmp_path / NODE_JOB).write_text(script)
    folder = tmp_path / "run"
    if kind != "missing":
        folder.mkdir()
        assert not (folder / SPEC).exists()
    done = subprocess.run(
        ["bash", NODE_JOB], cwd=tmp_path, env={"SLURM_SUBMIT_DIR": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"does not see the run's folder {folder}" in done.stdout
    (tmp_path / LOG).write_text(done.stdout)
    assert "does not see the run's folder" in diagnose(tmp_path, 0, {"code": 1}).sentence
