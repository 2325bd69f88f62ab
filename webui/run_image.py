"""A picture of a run to keep: loss, learning rate, and what came out.

Floor 6. Imports matplotlib, so it is loaded when the first picture is asked for. No pyplot: nothing is kept open.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INCHES, DPI = (9.0, 5.6), 150
INK, DIM, GRID = "#0f172a", "#526075", "#dde3ea"
TRAIN, EVAL, RATE = "#1d4ed8", "#c2410c", "#15703a"
# Series of stages that compare answers.
COMPARED = (("reward_margin", "margin"), ("reward_accuracy", "better ahead"))
MOST_DRAWN = 5000
LONGEST_LINE = 130
SMOOTHED_FROM = 20  # points; fewer are clear without


def picture(summary: Mapping[str, Any], points: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> bytes:
    """The PNG of a run: its summary, its points (see `reading`), its result ({} before the end)."""
    figure = Figure(figsize=INCHES, dpi=DPI, facecolor="white", layout="constrained")
    more = [(key, name) for key, name in COMPARED if column(points, key)[0]]
    loss, *others = figure.subplots(2 + len(more), 1, sharex=True, height_ratios=(3, *[1] * (1 + len(more))))
    rate = others[-1]
    # parse_math off: a name with dollar signs is a name.
    figure.suptitle(str(summary.get("name") or summary.get("id")), color=INK, weight="bold", parse_math=False)
    loss.set_title(outcome(summary, result), color=DIM, fontsize=9, loc="left", parse_math=False)
    _loss(loss, points)
    _line(rate, *column(points, "learning_rate"), color=RATE, width=1.4)
    loss.set_ylabel("loss", color=DIM)
    rate.set_ylabel("learning rate", color=DIM)
    rate.set_xlabel("step", color=DIM)
    for axes, (key, name) in zip(others, more, strict=False):
        _line(axes, *column(points, key), color=TRAIN, width=1.4)
        _line(axes, *column(points, f"eval_{key}"), color=EVAL, width=1.6, marker="o")
        axes.set_ylabel(name, color=DIM)
    for axes in (loss, *others):
        _calm(axes)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def outcome(summary: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """One line: method and model, how it ended, and the figures before and after."""
    parts = [" ".join(str(summary[key]) for key in ("method", "model") if summary.get(key))]
    parts.append(str(summary.get("sentence", "")).rstrip("."))
    before, after = result.get("exact_match_before"), result.get("exact_match_after")
    if before is not None and after is not None:
        parts.append(f"exact match {before:.0%} before, {after:.0%} after")
    if result.get("eval_reward_accuracy") is not None:
        parts.append(f"better answer ahead in {result['eval_reward_accuracy']:.0%}")
    if result.get("eval_loss") is not None:
        parts.append(f"validation loss {result['eval_loss']:.4g}")
    return textwrap.shorten(" | ".join(part for part in parts if part), LONGEST_LINE, placeholder=" ...")


def column(points: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of `key`, thinned to what a picture can show; null values are left out."""
    found = [(point["step"], point[key]) for point in points if isinstance(point.get(key), int | float)]
    every = -(-len(found) // MOST_DRAWN) or 1
    kept = found[::every] + ([found[-1]] if found and (len(found) - 1) % every else [])
    return [step for step, _ in kept], [value for _, value in kept]


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and its neighbours, a twentieth of all; no later and no earlier than the values."""
    sums = list(itertools.accumulate(values, initial=0.0))
    reach = max(1, len(values) // 40)
    found = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)  # as many on each side, so that an end does not lean
        found.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return found


def _loss(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    steps, values = column(points, "loss")
    many = len(values) >= SMOOTHED_FROM
    _line(
        axes,
        steps,
        values,
        color=TRAIN,
        width=0.8 if many else 1.6,
        alpha=0.3 if many else 1.0,
        label=None if many else "train",
    )
    if many:
        _line(axes, steps, smoothed(values), color=TRAIN, width=1.8, label="train, smoothed")
    steps, values = column(points, "eval_loss")
    _line(axes, steps, values, color=EVAL, width=1.6, label="validation", marker="o")
    if axes.has_data():
        axes.legend(frameon=False, labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "no loss has been logged", transform=axes.transAxes, ha="center", color=DIM)


def _line(axes: Axes, steps: Sequence[float], values: Sequence[float], width: float, **look: Any) -> None:
    if steps:
        axes.plot(steps, values, linewidth=width, markersize=3, **look)


def _calm(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=DIM, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
