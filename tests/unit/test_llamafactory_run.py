"""What the callback in LLaMA-Factory's processes writes about evaluations whose number of batches is unknown."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):  # type: ignore[misc]
    """A dataset without a length, as with LLaMA-Factory's `streaming: true`."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.fixture
def llamafactory_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; LLaMA-Factory itself is not installed."""
    tuner = ModuleType("llamafactory.train.tuner")
    tuner.run_exp = print  # type: ignore[attr-defined]
    for name in ("llamafactory", "llamafactory.train"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "llamafactory.train.tuner", tuner)
    monkeypatch.delitem(sys.modules, "backend.train.llamafactory_run", raising=False)
    return importlib.import_module("backend.train.llamafactory_run")


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(Stream(), batch_size=2), {"text": "Evaluating after step 5", "fraction": 0.5}),
        (DataLoader(range(8), batch_size=2), {"done": 1, "total": 4, "unit": "batch", "fraction": 0.25}),
        (None, {"fraction": 0.5}),
    ],
)
def test_an_evaluation_without_a_known_number_of_batches(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, llamafactory_run: Any, loader: Any, expected: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    state = SimpleNamespace(global_step=5, max_steps=10)
    llamafactory_run.Report().on_prediction_step(None, state, None, eval_dataloader=loader)
    written = json.loads((tmp_path / llamafactory_run.PROGRESS).read_text())
    assert {**written, **expected} == written and ("total" in written) == ("total" in expected)
