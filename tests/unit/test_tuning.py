"""The search for the fastest settings with planted speeds and a fake clock, its candidates, and its detached process
with a program in place of the trainer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from backend.rules import Fix
from backend.tasks.tuning.search import BASE, Axis, Search
from backend.tasks.tuning.trial import (
    STEPS,
    WARM_UP,
    Step,
    Trial,
    compare,
    is_clearly_slower,
    is_enough,
    loss_difference,
    read_steps,
)

TOKENS = (80, 120, 100, 90, 110, 100, 60, 140, 100, 95, 105, 100, 100)  # of the steps: batches differ in length
START = 8.0  # seconds of a trial before its first step


def make_trial(rate: float, warm_up: float = 0.0, noise: float = 0.0, loss: float = 5.0, count: int = STEPS) -> Trial:
    """A trial with this many tokens per second; every other step is slower by `noise`."""
    steps = [Step(n / rate * (1 + noise * (i % 2)), n, loss - i / 100) for i, n in enumerate(TOKENS[:count])]
    first = steps[0]
    steps[0] = Step(first.seconds + warm_up, first.tokens, first.loss)
    return Trial(tuple(steps), wall_seconds=START + sum(step.seconds for step in steps))


@dataclass
class FakeBench:
    """A bench on which each value of an option multiplies the speed. `fixes`: the candidates of each axis."""

    fixes: Mapping[str, Sequence[Fix]]
    speeds: Mapping[tuple[str, Any], float]
    seconds: float = 600.0
    stop_after: int = 1000  # trials
    total_steps: int | None = 1000
    warm_up: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    shifts: Mapping[str, float] = field(default_factory=dict)  # of the losses, on top of other settings
    failing: tuple[str, ...] = ()
    cold: float = 0.0  # seconds that the first trial starts slower
    refused: tuple[str, ...] = ()
    drift: float = 1.0  # speed of the last trial
    measured: list[Mapping[str, Any]] = field(default_factory=list)

    def propose(self, axis: Axis, patch: Mapping[str, Any]) -> Sequence[Fix]:
        return self.fixes[axis.name]

    def changes(self, patch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in patch.items() if value}

    def tolerance(self, patch: Mapping[str, Any]) -> float:
        return 0.02 if "bf16" in patch else 1e-4

    def refusal(self, patch: Mapping[str, Any]) -> str:
        return next((f"Not tried: {name}." for name in patch if name in self.refused), "")

    def measure(self, label: str, patch: Mapping[str, Any], other: Trial | None, reserve: float) -> Trial:
        if self.is_stopped():
            return Trial((), "stopped")
        rate = 100.0 * (self.drift if label != BASE and not patch else 1)
        for item in patch.items():
            rate *= self.speeds.get(item, 1)
        warm_up = sum(self.warm_up.get(name, 0) for name in patch)
        warm_up += self.cold if label == BASE else 0
        loss = self.losses.get(next(iter(patch), ""), 5.0) + sum(self.shifts.get(name, 0) for name in patch)
        trial = make_trial(rate, warm_up, 0.01, loss)
        self.measured.append(dict(patch))
        if any(name in self.failing for name in patch):
            return Trial((), "failed", "Out of memory.", wall_seconds=START)
        for count in range(STEPS):
            if other and is_clearly_slower(trial.steps[:count], other):
                trial = Trial(trial.steps[:count], "slow", wall_seconds=START + count)
                break
        if trial.wall_seconds > self.left() - reserve:
            self.seconds = reserve
            return Trial((), "late")
        self.seconds -= trial.wall_seconds
        return trial

    def left(self) -> float:
        return max(0.0, self.seconds)

    def is_stopped(self) -> bool:
        return len(self.measured) >= self.stop_after

    def show(self) -> None:
        pass


def switch(name: str) -> Fix:
    return Fix(name, {name: True})


def run(*names: str, unsafe: Sequence[str] = (), **more: Any) -> tuple[Search, FakeBench]:
    """The search over switches, each an axis of its own."""
    speeds = {(name, True): speed for name, speed in more.pop("speeds", {}).items()}
    bench = FakeBench({name: [switch(name)] for name in (*names, *unsafe)}, speeds, **more)
    search = Search(bench, [*(Axis(name) for name in names), *(Axis(name, safe=False) for name in unsafe)])
    search.run()
    return search, bench


def states(search: Search) -> dict[str, str]:
    return {row.label: row.state for row in search.rows}


def test_what_is_faster_is_kept_and_the_rest_is_tried_on_top_of_it() -> None:
    search, bench = run("a", "b", "c", "d", speeds={"a": 1.2, "b": 0.95, "c": 1.3, "d": 1.001})
    assert states(search) == {
        BASE: "base", "a": "faster", "a + b": "slower", "a + c": "faster", "a + c + d": "same",
        "Current settings, measured again": "repeated",
    }  # fmt: skip
    assert bench.measured == [{}, {"a": 1}, {"a": 1, "b": 1}, {"a": 1, "c": 1}, {"a": 1, "c": 1, "d": 1}, {}]
    assert search.fastest and search.fastest.patch == {"a": True, "c": True}
    assert search.fastest.gain == pytest.approx(1.56)
    assert not search.notes


def test_values_of_one_axis_replace_each_other() -> None:
    fixes = [Fix(str(size), {"size": size}) for size in (2, 4, 8)]
    bench = FakeBench({"batch": fixes}, {("size", 2): 1.2, ("size", 4): 1.5, ("size", 8): 1.4})
    search = Search(bench, [Axis("batch")])
    search.run()
    assert [row.label for row in search.rows[1:4]] == ["2", "4", "8"]
    assert search.fastest and search.fastest.patch == {"size": 4}


def test_candidates_of_one_axis_are_tried_with_the_settings_before_it() -> None:
    """Those of the second are not mixed with those of the first, which was kept."""
    fixes = [Fix("ddp", {"strategy": "ddp", "batch": 2}), Fix("fsdp", {"strategy": "fsdp"})]
    speeds = {("liger", True): 1.1, ("strategy", "ddp"): 1.5, ("strategy", "fsdp"): 2.0}
    search = Search(
        FakeBench({"liger": [switch("liger")], "strategy": fixes}, speeds), [Axis("liger"), Axis("strategy")]
    )
    search.run()
    assert search.fastest and search.fastest.patch == {"liger": True, "strategy": "fsdp"}
    assert search.fastest.label == "liger + fsdp"


def test_the_cold_start_of_the_first_trial_is_not_a_gain_of_the_others() -> None:
    search, _ = run("workers", "real", speeds={"real": 1.3}, cold=4.0, total_steps=45)
    assert [row.state for row in search.rows[1:3]] == ["same", "faster"]
    assert search.fastest and search.fastest.gain == pytest.approx(1.3, rel=0.01)
    search, _ = run("torch.compile", speeds={"torch.compile": 1.3}, cold=4.0, total_steps=45)
    assert search.rows[1].gain == pytest.approx(1.3, rel=0.01), "after the repeated trial"


def test_a_clearly_slower_trial_stops_early() -> None:
    search, _ = run("slow", "late", speeds={"slow": 0.5, "late": 0.9})
    slow, late = search.rows[1:3]
    assert "Stopped early" in slow.reason and not late.reason
    assert slow.state == late.state == "slower"
    assert len(slow.losses) == WARM_UP + 3 and len(late.losses) == STEPS


def test_a_long_warm_up_counts_against_the_length_of_the_run() -> None:
    """60 s of compiling are worth it over 1000 steps of a second, not over 100."""
    for steps, state in ((1000, "faster"), (100, "slower"), (None, "faster")):
        search, _ = run("compile", speeds={"compile": 1.3}, warm_up={"compile": 60.0}, total_steps=steps)
        assert search.rows[1].state == state, steps
        assert search.rows[1].warm_up_seconds == pytest.approx(60, rel=0.02)


def test_rows_that_are_refused_failed_or_skipped_are_never_kept() -> None:
    speeds = dict.fromkeys(("wrong", "fails", "large"), 2.0)
    more = {"losses": {"wrong": 5.1}, "failing": ("fails",), "refused": ("large",)}
    search, bench = run("wrong", "fails", "large", speeds=speeds, **more)
    assert [(row.state, row.reason) for row in search.rows[1:4]] == [
        ("refused", "The loss differs: 5.1 instead of 5 in step 1."),
        ("failed", "Out of memory."),
        ("skipped", "Not tried: large."),
    ]
    assert search.fastest is None and {"large": True} not in bench.measured


def test_only_settings_that_do_not_change_the_result_must_have_the_same_losses() -> None:
    """After one that does, the losses are those of the settings that were kept."""
    losses = {"packing": 4.0, "fused": 4.1}
    search, _ = run("fused", unsafe=["packing", "compile"], speeds={"packing": 2, "compile": 1.5}, losses=losses)
    assert states(search)["fused"] == "refused"
    search, _ = run("compile", unsafe=["packing"], speeds={"packing": 2}, losses=losses)
    assert [row.safe for row in search.rows] == [True, True, False, True]
    bench = FakeBench({n: [switch(n)] for n in ("packing", "compile")}, {("packing", True): 2}, losses=losses)
    search = Search(bench, [Axis("packing", safe=False), Axis("compile")])
    search.run()
    assert search.rows[2].state == "same" and not search.rows[2].safe
    bench = FakeBench(bench.fixes, {("packing", True): 0.9, ("compile", True): 1.5}, losses=losses)
    search = Search(bench, [Axis("packing", safe=False), Axis("compile")])
    search.run()
    assert [(row.state, row.safe) for row in search.rows[1:3]] == [("slower", False), ("faster", True)]


def test_losses_have_the_tolerance_of_the_precision_that_was_kept() -> None:
    losses = {"bf16": 5.001, "compile": 5.001}
    bench = FakeBench({n: [switch(n)] for n in ("bf16", "compile")}, {("bf16", True): 2}, losses=losses)
    bench.shifts = {"compile": 0.005}
    search = Search(bench, [Axis("bf16", safe=False), Axis("compile")])
    search.run()
    assert [row.state for row in search.rows[1:3]] == ["faster", "same"]


def test_time_is_kept_for_the_repeated_trial_and_what_was_not_tried_is_said() -> None:
    names = [f"s{number}" for number in range(20)]
    for seconds in (15.0, 30.0, 60.0, 95.0, 200.0):
        search, bench = run(*names, seconds=seconds)
        if any(row.is_usable for row in search.rows):
            assert search.rows[-1].state == "repeated", seconds
        skipped = [
            row for row in search.rows if row.reason == "Not tried: the time limit was reached. Allow more minutes."
        ]
        assert len(search.rows) == 1 or len(skipped) + len(bench.measured) >= len(names)
    search, _ = run("a", seconds=5.0)
    assert search.rows[0].state == "failed" and "Allow more minutes" in search.rows[0].reason


@pytest.mark.parametrize("trials", range(5))
def test_a_stop_ends_the_search_at_once(trials: int) -> None:
    search, bench = run("a", "b", "c", stop_after=trials, speeds={"a": 1.5})
    assert len(bench.measured) == trials
    assert (search.fastest is not None) == (trials >= 2)


def test_a_machine_that_changed_meanwhile_is_named() -> None:
    search, _ = run("a", speeds={"a": 1.1}, drift=1.3)
    assert "30% faster at the end" in search.notes[0]
    assert "not faster than the current settings at the end" in search.notes[1]
    assert search.fastest is None
    search, _ = run("a", speeds={"a": 1.5}, drift=0.8)
    assert "20% slower at the end" in search.notes[0] and search.fastest


def test_noise_is_not_taken_for_a_gain() -> None:
    """Every other step of the second trial takes twice as long."""
    quiet, noisy = make_trial(100), make_trial(160, noise=1.0)
    assert compare(make_trial(103), quiet).is_faster
    assert not compare(make_trial(101), quiet).is_faster
    assert compare(noisy, quiet).ratio > 1.1 and not compare(noisy, quiet).is_faster
    assert quiet.spread == pytest.approx(0) and quiet.tokens_per_second == pytest.approx(100)


@pytest.mark.parametrize(("count", "most"), [(STEPS, 0.04), (WARM_UP + 6, 0.06)])
def test_settings_without_effect_are_seldom_called_faster(count: int, most: float) -> None:
    """In independent noise of 10%, with the usual number of steps, and with the fewest."""
    rng = random.Random(1)

    def noisy() -> Trial:
        return Trial(tuple(Step(max(0.2, rng.gauss(1, 0.1)), 100, 5.0) for _ in range(count)))

    assert sum(compare(noisy(), noisy()).is_faster for _ in range(1000)) < 1000 * most


def test_how_many_steps_are_measured() -> None:
    assert not is_enough(make_trial(1, count=WARM_UP + 5).steps)  # 100 s each
    assert is_enough(make_trial(1, count=WARM_UP + 6).steps)
    assert not is_enough(make_trial(100).steps)
    slow, quick = make_trial(50), make_trial(100)
    assert not is_clearly_slower(slow.steps[: WARM_UP + 2], quick)
    assert is_clearly_slower(slow.steps[: WARM_UP + 3], quick)


def test_losses_are_compared_step_by_step() -> None:
    base = make_trial(100)
    assert loss_difference(make_trial(100, loss=5.00005), base, 1e-4) == ""
    assert loss_difference(make_trial(100, loss=5.001), base, 1e-4) == "5.001 instead of 5 in step 1"
    diverged = Trial((*base.steps[:1], Step(1, 1, None), *base.steps[2:]))
    assert loss_difference(diverged, base, 1.0) == "a loss that is not finite instead of 4.99 in step 2"


def test_steps_are_read_from_metrics() -> None:
    points = [
        {"event": "resumed", "step": 0, "time": 90.0},
        {"step": 1, "time": 100.0, "loss": 5.0, "tokens": 50, "tokens_per_second": 10.0},
        {"step": 1, "time": 101.0, "eval_loss": 5.0},
        {"step": 2, "time": 103.0, "loss": None, "tokens": 110, "tokens_per_second": 20.0},
    ]
    assert read_steps(points) == [Step(5.0, 50, 5.0), Step(3.0, 60, None)]
    assert read_steps([{"step": 1, "time": 1.0, "loss": 2.0, "tokens": None}])[0].rate > 0
