"""Start a sweep: the runs of its combinations of values. All of them are checked before the first one is queued."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import Problem, SpecError, edit, effective
from backend.inspect import predecessor
from backend.preflight import Report
from backend.runs import SWEEP, schedule, sweeps
from backend.runs.folder import Run, RunError
from backend.tasks import sweep
from backend.tasks.comparable import decisive, not_comparable
from backend.wording import counted

OTHER_EXAMPLES = (
    "Each seed has different validation examples (data.validation: split), so validation losses differ for that "
    "reason, too. Use validation files instead."
)
OTHER_BATCHES = (
    "Early stopping compares the runs at the same step. With a larger batch size, a run has trained on more examples "
    "by then."
)
LIMIT = 50  # runs of a sweep, unless the user raises it


@dataclass(frozen=True)
class SweepPlan:
    """What each run of a sweep changes in `spec`. `halving` is the factor of successive halving, 0 without it."""

    spec: RunSpec
    patches: tuple[dict[str, Any], ...]
    halving: int = 0

    def specs(self) -> list[RunSpec]:
        """The spec of each run."""
        return [edit(self.spec, patch) for patch in self.patches]

    @property
    def compares_other_examples(self) -> bool:
        """Whether the validation losses of the runs are those of different examples: the seed decides the split."""
        seeds = {patch.get(sweep.SEED, self.spec.train.seed) for patch in self.patches}
        return len(seeds) > 1 and any(each.splits for each in self.spec.data.datasets)

    @property
    def _compares_other_batches(self) -> bool:
        """Whether some runs train on more examples per step than others."""
        runs = [each.train for each in self.specs()]
        return len({each.per_device_train_batch_size * each.gradient_accumulation_steps for each in runs}) > 1

    @property
    def decisive(self) -> list[str]:
        """The varied options that decide what the validation loss is."""
        return decisive(self.spec, self.patches)

    @property
    def note(self) -> str:
        """What is not certain about a comparison of the runs, as sentences."""
        found = [OTHER_EXAMPLES] if self.compares_other_examples else []
        found += [OTHER_BATCHES] if self.halving and self._compares_other_batches else []
        return " ".join([*found, *([not_comparable(self.decisive)] if self.decisive else [])])

    def labels(self) -> list[str]:
        """What each run changes, as a short name."""
        return [sweeps.label(patch) for patch in self.patches]


def plan(
    spec: RunSpec, varied: Sequence[sweep.Values], samples: int = 0, seeds: int = 1, limit: int = LIMIT,
    halving: int = 0,
) -> SweepPlan:  # fmt: skip
    """The runs of a sweep: a grid, or that many random `samples`, times `seeds`. Raises SpecError."""
    if halving and halving < 2:
        message = "successive halving needs a factor of at least 2: with a factor of 2, every second run continues"
        raise SpecError([Problem("", message)])
    if halving and spec.eval.strategy != "steps":
        message = (
            "must be steps for early stopping (successive halving), which compares validation losses at the same step"
        )
        raise SpecError([Problem("eval.strategy", message)])
    if halving and spec.launch.trainer != "footplate":
        message = "must be footplate for early stopping (successive halving): LLaMA-Factory's runs do not stop for it"
        raise SpecError([Problem("launch.trainer", message)])
    planned = SweepPlan(spec, _distinct(spec, sweep.patches(spec, varied, samples, seeds, limit)), halving)
    if halving and planned.compares_other_examples:
        message = "must be files for early stopping (successive halving) with several seeds, which split differently"
        raise SpecError([Problem("data.validation", message)])
    if halving and planned.decisive:
        message = "decides what the validation loss is, which early stopping (successive halving) compares"
        raise SpecError([Problem(planned.decisive[0], message)])
    return planned


def _distinct(spec: RunSpec, patches: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The patches without those that only repeat an effect, such as another momentum for AdamW. Raises SpecError
    for an option that never has an effect."""
    found: dict[str, dict[str, Any]] = {}
    for patch in patches:
        found.setdefault(_effect(spec, patch), patch)
    for name in patches[0]:  # all patches have the same names
        without = [{other: value for other, value in patch.items() if other != name} for patch in patches]
        same = (_effect(spec, one) == _effect(spec, other) for one, other in zip(patches, without, strict=True))
        if len({str(patch[name]) for patch in patches}) > 1 and all(same):
            raise SpecError([Problem(name, "has no effect with the other options")])
    return tuple(found.values())


def _effect(spec: RunSpec, patch: dict[str, Any]) -> str:
    return effective(edit(spec, patch)).model_dump_json()


def start(root: Path, planned: SweepPlan, reports: Sequence[Report], base: Path) -> tuple[str, list[Run]]:
    """Queue the runs, in the runs folder `root`, of reports that can all run. Returns the id of the sweep, and its
    runs. Raises RunError: what has not been queued then is deleted."""
    identity = f"{datetime.now():%Y-%m-%d_%H%M%S}"
    first_rung = planned.spec.eval.steps if planned.halving else 0  # the first evaluation
    created: list[Run] = []
    started = 0
    try:
        for patch, report in zip(planned.patches, reports, strict=True):
            part = sweeps.Member(identity, patch, first_rung, planned.halving or sweeps.Member.factor)
            created.append(_create(root, report, part))  # all, before one starts: a full disk starts nothing
        for run, report in zip(created, reports, strict=True):
            run.start(after=predecessor(report.spec, base, None))
            started += 1
    except RunError as error:
        for run in created[started:]:
            with suppress(RunError):
                run.delete()
        if not started:
            raise
        raise RunError(
            f"{error} {counted(started, 'run')} of the sweep {identity} had been queued before this error, and the "
            "others were deleted."
        ) from error
    return identity, created


def time_text(planned: SweepPlan, reports: Sequence[Report]) -> str:
    """How long all runs take on their devices, as predicted, without the runs that are in the queue already."""
    spans = []
    for label, report in zip(planned.labels(), reports, strict=True):
        low, _, high = report.time.run_seconds or (0.0, 0.0, 0.0)
        why = report.time.unknown or f"the number of steps of {label} is not known"
        span = schedule.Span(low, high, "" if report.time.run_seconds else why)
        spans.append(span.within(report.max_seconds))
    text = schedule.all_runs_text([report.plan.devices for report in reports], spans)
    return f"{text} Early stopping ends some of them sooner." if planned.halving and not spans[0].unknown else text


def _create(root: Path, report: Report, part: sweeps.Member) -> Run:
    files = {**report.plan.files, SWEEP: part.to_json()}
    title = f"{report.title} {sweeps.label(part.varied)}".strip()
    return Run.create(root, title, replace(report.plan, files=files), datetime.now(), report.about, report.expected)
