"""Runs that train the model of a run that has not ended: which model is inspected, and what such a run waits for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from backend import presets
from backend.config import RunSpec
from backend.config.options import parse
from backend.inspect import inspect_inputs, predecessor
from backend.inspect.chain import awaited_model
from backend.runs import SPEC, STATE, Plan, processes
from backend.runs.folder import Run, RunError

SAVES = {"save.final_model": True, "method.kind": "full", "model.builtin": "tiny-llama"}
OFF = {**os.environ, "FOOTPLATE_INSPECTION_WORKER": "off"}


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Any]:
    """A function that creates a run in the queue; it counts as alive while its lock is held."""
    locks = []

    def create(name: str, options: dict[str, Any], alive: bool = True) -> Run:
        plan = Plan(("true",), files={SPEC: presets.dump(parse(options))})
        run = Run.create(tmp_path / "runs", name, plan, datetime.now())
        if alive:
            locks.append(processes.acquire_lock(run.path))
            (run.path / STATE).write_text(json.dumps({"queued": 1.0}))
        return run

    yield create
    for lock in locks:
        os.close(lock)


def trains(run: Run, **more: Any) -> RunSpec:
    return parse({"model.source": "path", "model.path": str(run.path / "model"), **more})


def test_the_model_of_the_first_run_is_inspected(waiting: Any, tmp_path: Path) -> None:
    """A chain of three: the model has the architecture of the built-in one, and a chat template."""
    first = waiting("pretraining", {**SAVES, "train.stage": "pretraining"})
    second = waiting("sft", {**SAVES, "model.source": "path", "model.path": str(first.path / "model")})
    spec = trains(second)
    found = awaited_model(spec, tmp_path)
    assert found
    assert (found.run.id, found.spec.model.source, found.spec.model.builtin) == (second.id, "builtin", "tiny-llama")
    facts = inspect_inputs(spec, tmp_path, OFF)
    assert facts == inspect_inputs(parse({"model.builtin": "tiny-llama"}), tmp_path, OFF)
    assert facts.shape and not facts.model_problem
    assert predecessor(spec, tmp_path, None).id == second.id  # type: ignore[union-attr]


def test_a_relative_path_is_relative_to_the_base(waiting: Any, tmp_path: Path) -> None:
    run = waiting("first", SAVES)
    spec = parse({"model.source": "path", "model.path": f"runs/{run.id}/model/"})
    assert awaited_model(spec, tmp_path)
    assert not awaited_model(spec, tmp_path / "runs")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({**SAVES, "save.final_model": False}, "does not save its model: save.final_model is off."),
        ({**SAVES, "method.kind": "lora"}, "saves only a LoRA adapter: turn save.merge_adapter on in that run."),
        ({**SAVES, "method.kind": "lora", "save.merge_adapter": True}, ""),
        ({**SAVES, "train.stage": "reward", "data.builtin": "train-pairs"}, "trains a reward model"),
    ],
)
def test_a_run_that_saves_no_model(waiting: Any, tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    run = waiting("first", options)
    found = inspect_inputs(trains(run), tmp_path, OFF).model_problem
    assert found.startswith(run.id) if problem else not found
    assert problem in found


def test_a_run_that_has_ended_is_not_waited_for(waiting: Any, tmp_path: Path) -> None:
    run = waiting("first", SAVES, alive=False)
    assert awaited_model(trains(run), tmp_path) is None
    assert inspect_inputs(trains(run), tmp_path, OFF).model_problem == f"{run.path}/model does not exist."


def test_an_unreadable_run_and_a_run_that_waits_for_itself(waiting: Any, tmp_path: Path) -> None:
    broken, circular = waiting("broken", SAVES), waiting("circular", SAVES)
    (broken.path / SPEC).write_text("model: [")
    assert "cannot be read" in inspect_inputs(trains(broken), tmp_path, OFF).model_problem
    (circular.path / SPEC).write_text(presets.dump(trains(circular, **{"method.kind": "full"})))
    assert awaited_model(trains(circular), tmp_path)


def test_the_run_can_only_start_after_the_one_that_saves_its_model(waiting: Any, tmp_path: Path) -> None:
    run, other = waiting("first", SAVES), waiting("other", SAVES)
    assert predecessor(trains(run), tmp_path, run).id == run.id  # type: ignore[union-attr]
    with pytest.raises(RunError, match=f"{run.id} saves the model, so the run cannot start after {other.id}"):
        predecessor(trains(run), tmp_path, other)
    with pytest.raises(RunError, match="only if it succeeds"):
        predecessor(trains(run), tmp_path, run, after_ok=False)
    plain = parse({"model.builtin": "tiny-llama"})
    assert predecessor(plain, tmp_path, other, after_ok=False) is other
    assert predecessor(plain, tmp_path, None) is None


def test_name_of_the_model_of_a_run(waiting: Any) -> None:
    assert trains(waiting("tiny-llama full", SAVES)).model.name == "tiny-llama-full"
    assert parse({"model.source": "path", "model.path": "/models/model"}).model.name == "model"
