"""A model that another run will save: `model.path` is the folder `model` of a run that has not ended.

Such a run is checked with the model that the other run trains, which has the same architecture and tokenizer, and
starts only after the other run has succeeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend import presets, registry
from backend.config import RunSpec
from backend.config.options import SpecError, edit, effective
from backend.runs import MODEL, SPEC
from backend.runs.folder import ALIVE, Run, RunError

LONGEST_CHAIN = 20  # runs that wait for each other's model


@dataclass(frozen=True)
class Awaited:
    """`run` will save the model of a spec. `spec` is that spec with the model that exists already; `problem`: why the
    run will not save a model, a sentence, or ''; `adds_template`: the run saves a chat template with it."""

    run: Run
    spec: RunSpec
    problem: str = ""
    adds_template: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """The InputFacts that differ from those of the model in `spec`."""
        found: dict[str, Any] = {"model_problem": self.problem} if self.problem else {}
        return found | ({"has_chat_template": True} if self.adds_template else {})


def awaited_model(spec: RunSpec, base: Path) -> Awaited | None:
    """The run that will save the model of `spec`; None if the model does not depend on a run that has not ended."""
    first: Awaited | None = None
    for _ in range(LONGEST_CHAIN):
        run = _unfinished_run(spec, base)
        if run is None:
            return first and Awaited(first.run, spec, first.problem, first.adds_template)
        try:
            made = effective(presets.read(run.path / SPEC))
        except SpecError as error:
            return Awaited(run, spec, f"The options of {run.id}, which is to save the model, cannot be read: {error}.")
        first = first or Awaited(run, spec, _problem(run, made), made.data.chat_template in ("chatml", "file"))
        model = made.model
        spec = edit(
            spec,
            {
                "model.source": model.source, "model.builtin": model.builtin, "model.path": model.path,
                "model.hub_id": model.hub_id, "model.revision": model.revision,
            },
        )  # fmt: skip
        base = run.path
    return first


def predecessor(spec: RunSpec, base: Path, after: Run | None, after_ok: bool = True) -> Run | None:
    """The run that a run of `spec` starts after: `after`, or the one that saves its model. Raises RunError if the run
    cannot start after both."""
    awaited = awaited_model(spec, base)
    if awaited is None:
        return after
    if after and after.path.resolve() != awaited.run.path.resolve():
        raise RunError(
            f"Not started: {awaited.run.id} saves the model, so the run cannot start after {after.id} instead."
        )
    if not after_ok:
        raise RunError(f"Not started: {awaited.run.id} saves the model, so the run can start only if it succeeds.")
    return awaited.run


def _unfinished_run(spec: RunSpec, base: Path) -> Run | None:
    if spec.model.source != "path" or not spec.model.path:
        return None
    folder = base / Path(spec.model.path).expanduser()
    if folder.name != MODEL or not (folder.parent / SPEC).is_file():
        return None
    run = Run(folder.parent)
    return run if run.state in ALIVE else None


def _problem(run: Run, spec: RunSpec) -> str:
    if not spec.save.final_model:
        return f"{run.id} does not save its model: save.final_model is off."
    if spec.method.kind == "lora" and not spec.save.merge_adapter:
        return f"{run.id} saves only a LoRA adapter: turn save.merge_adapter on in that run."
    if registry.STAGES[spec.train.stage].is_reward_model:
        return f"{run.id} trains a reward model, which generates no text."
    return ""
