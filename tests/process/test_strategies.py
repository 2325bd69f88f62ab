"""Every strategy learns what one process learns, and really does what it says: each rank's part is looked at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Launch, a_folder, losses, result, text, together
from transformers import AutoModelForCausalLM

from backend import catalog
from backend.paths import HOME
from backend.train import builtin

FULL = {"method.kind": "full", "train.max_steps": 3, "train.batch_size": 2}
KEPT = {"checkpoint.when": "steps", "checkpoint.steps": 2, "checkpoint.keep": 0, "checkpoint.save_model": True}
STAGES = {name: row.stage for name, row in catalog.STRATEGIES.items() if row.stage}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def cache(root: Path) -> Iterator[Path]:
    for lock in (HOME / ".cache/torch_extensions").rglob("lock"):
        lock.unlink()  # of a build that was killed
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_CACHE", str(root / "cache"))
        builtin.prepare("tiny-llama", lambda text, share: None)
        yield root / "cache"


@pytest.fixture(scope="module")
def alone(root: Path, cache: Path) -> Path:
    folder = a_folder(root, "alone", {**FULL, **KEPT, "train.batch_size": 4})
    together(cache, folder)
    return folder


@pytest.fixture(scope="module")
def spread(root: Path, cache: Path) -> dict[str, Path]:
    """Each engine on two ranks, with the same effective batch as alone."""
    found = {}
    for name, stage in STAGES.items():
        more = {"evaluation.when": "steps", "evaluation.steps": 1} if stage == 3 else {"evaluation.samples": 3}
        found[name] = a_folder(root, name, {**FULL, **KEPT, **more, "parallel.strategy": name})
        Launch(found[name], cache, 2).done()
    return found


@pytest.mark.parametrize("name", STAGES)
def test_the_losses_are_those_of_one_process(alone: Path, spread: dict[str, Path], name: str) -> None:
    one = losses(alone)
    assert len({round(loss, 6) for loss in one.values()}) == 3, "rows that are all alike would prove nothing"
    assert losses(spread[name]) == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("name", STAGES)
def test_each_rank_holds_its_part(alone: Path, spread: dict[str, Path], name: str) -> None:
    whole = result(alone)["parameters"]
    assert result(alone)["held"] == [{"stage": 0, "parameters": whole, "optimizer": 2 * whole}]
    assert result(spread[name])["trainable_parameters"] == result(spread[name])["parameters"] == whole
    held = result(spread[name])["held"]
    assert len(held) == 2
    for rank in held:
        assert rank["stage"] == STAGES[name]
        assert rank["optimizer"] == pytest.approx(whole, rel=0.01), "two moments of half of the weights"
        assert rank["parameters"] == pytest.approx(whole / (2 if STAGES[name] == 3 else 1), rel=0.01)


def logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 20)[None]).logits
    return found


@pytest.mark.parametrize("name", STAGES)
def test_the_trained_model_loads_as_a_whole(alone: Path, spread: dict[str, Path], cache: Path, name: str) -> None:
    learned = logits(alone / "model")
    assert not torch.allclose(learned, logits(cache / "models/tiny-llama"), atol=1e-2), "nothing was learned"
    assert torch.allclose(logits(spread[name] / "model"), learned, atol=5e-3)


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_an_engine_with_one_process(root: Path, cache: Path, alone: Path, launcher: str) -> None:
    more = {"parallel.strategy": "zero2", "launch.processes": 1, "launch.launcher": launcher, "train.batch_size": 4}
    folder = a_folder(root, f"lone-{launcher}", {**FULL, **more})
    if launcher == "torchrun":
        Launch(folder, cache, 1).done()
    else:
        together(cache, folder)
    assert losses(folder) == pytest.approx(losses(alone), abs=1e-4)


@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_it_goes_on_from_its_checkpoint(spread: dict[str, Path], cache: Path, name: str) -> None:
    folder = spread[name]
    before = losses(folder)
    shutil.rmtree(folder / "checkpoints/checkpoint-3")
    Launch(folder, cache, 2).done()
    assert "Going on from checkpoint-2." in text(folder)
    again = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in again if "loss" in point] == [1, 2, 3, 3]
    assert losses(folder) == pytest.approx(before, abs=1e-5)


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage < 3])
def test_whole_weights_answer(spread: dict[str, Path], name: str) -> None:
    found = result(spread[name])["samples"]
    assert len(found) == 3
    assert all(sample["before"] and sample["after"] for sample in found)
