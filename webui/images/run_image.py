"""An image of a run: loss, learning rate, preference metrics and results, as PNG or SVG.

No pyplot, which would keep figures open.
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from webui.images.placement_image import draw_placement

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: the file is smaller and can be edited
matplotlib.rcParams["svg.hashsalt"] = "footplate"  # the same ids for the same image; the default is a random salt

INCHES, DPI = (9.0, 5.6), 150
MEMORY_INCHES = 2.0  # the height of the placement picture
INK, DIM, GRID = "#0f172a", "#526075", "#dde3ea"
TRAIN, EVAL, RATE = "#1d4ed8", "#c2410c", "#15703a"
# Metrics of preference training.
PREFERENCE = (("reward_margin", "reward margin"), ("reward_accuracy", "reward accuracy"))
SHARES = ("exact_match", "rouge_l", "reward_accuracy")  # from 0 to 1, in percent as on the page: format.js
MAX_POINTS = 5000
MAX_LINE_LENGTH = 130
# Same as --fp-run-1 to --fp-run-20 in compare_runs.css.
MANY_COLORS = (
    "#1d4ed8", "#c2410c", "#15803d", "#a21caf", "#0e7490", "#b91c1c", "#6d28d9", "#a16207", "#475569", "#be185d",
    "#6b9bff", "#f79a5b", "#5cc184", "#db8be8", "#45b8cf", "#f08080", "#a98bf0", "#d3ac3a", "#94a3b8", "#f07fb4",
)  # fmt: skip
MIN_POINTS_TO_SMOOTH = 20
LIMIT = 1e300  # larger values are drawn at this one, so that sums and the width of an axis stay finite


def draw(
    summary: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    kind: str = "png",
    estimate: Mapping[str, Any] = {},
) -> bytes:
    """The image of a run from its summary, its metrics, its result ({} before the end) and its memory estimate ({}
    without one). `kind`: png or svg."""
    figure = Figure(figsize=INCHES, dpi=DPI, facecolor="white", layout="constrained")
    charts: Any = figure
    if "placement" in estimate:
        figure.set_size_inches(INCHES[0], INCHES[1] + MEMORY_INCHES)
        halves: Any = figure.subfigures(2, 1, height_ratios=(INCHES[1], MEMORY_INCHES))
        charts, memory = halves[0], halves[1].subplots()
        draw_placement(memory, estimate, result, INK, DIM)
        style_axes(memory)
    extra = [(key, name) for key, name in PREFERENCE if column(points, key)[0]]
    loss, *others = charts.subplots(2 + len(extra), 1, sharex=True, height_ratios=(3, *[1] * (1 + len(extra))))
    rate = others[-1]
    # parse_math off: dollar signs in a name are not TeX.
    figure.suptitle(str(summary.get("name") or summary.get("id")), color=INK, weight="bold", parse_math=False)
    loss.set_title(outcome(summary, result), color=DIM, fontsize=9, loc="left", parse_math=False)
    _loss(loss, points)
    _line(rate, *column(points, "learning_rate"), color=RATE, width=1.4)
    loss.set_ylabel("loss", color=DIM)
    rate.set_ylabel("learning rate", color=DIM)
    rate.set_xlabel("step", color=DIM)
    for axes, (key, name) in zip(others, extra, strict=False):
        _line(axes, *column(points, key), color=TRAIN, width=1.4)
        _line(axes, *column(points, f"eval_{key}"), color=EVAL, width=1.6, marker="o")
        axes.set_ylabel(name, color=DIM)
        format_values(axes, key)
    for axes in (loss, *others):
        style_axes(axes)
    return encode(figure, kind)


def encode(figure: Figure, kind: str) -> bytes:
    """The figure as png or svg."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def outcome(summary: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """One line: method and model, how the run ended, and the metrics before and after."""
    parts = [" ".join(str(summary[key]) for key in ("method", "model") if summary.get(key))]
    parts.append(str(summary.get("sentence", "")).rstrip("."))
    before, after = result.get("exact_match_before"), result.get("exact_match_after")
    if before is not None and after is not None:
        parts.append(f"exact match {percent(before)} before training, {percent(after)} after")
    if (accuracy := result.get("eval_reward_accuracy")) is not None:
        parts.append(f"reward accuracy {percent(accuracy)}")
    if result.get("eval_loss") is not None:
        parts.append(f"validation loss {result['eval_loss']:.4g}")
    return textwrap.shorten(" | ".join(part for part in parts if part), MAX_LINE_LENGTH, placeholder=" ...")


def percent(share: float) -> str:
    """A share with three digits, as on the page: 99.6% is not all."""
    return f"{100 * share:.3g}%"


def column(points: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of `key`, subsampled to MAX_POINTS, without null values."""
    pairs = [(point["step"], point[key]) for point in points if isinstance(point.get(key), int | float)]
    every = -(-len(pairs) // MAX_POINTS) or 1
    kept = pairs[::every] + ([pairs[-1]] if pairs and (len(pairs) - 1) % every else [])
    return drawable(step for step, _ in kept), drawable(value for _, value in kept)


def drawable(values: Iterable[float]) -> list[float]:
    """Steps or values, from -LIMIT to LIMIT, as floats: numpy cannot compute with integers of more than 64 bits."""
    return [float(max(-LIMIT, min(LIMIT, value))) for value in values]


def smoothed(values: Sequence[float]) -> list[float]:
    """A centered moving average over a twentieth of the values, without lag."""
    sums = list(itertools.accumulate(values, initial=0.0))
    reach = max(1, len(values) // 40)
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)  # symmetric, so that the ends are not biased
        means.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return means


def _loss(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    steps, values = column(points, "loss")
    many = len(values) >= MIN_POINTS_TO_SMOOTH
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
    if len(set(values)) > 1:
        mark_best(axes, min(zip(steps, values, strict=True), key=lambda point: point[1]))
    if axes.has_data():
        axes.legend(frameon=False, labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "No loss was logged", transform=axes.transAxes, ha="center", color=DIM)


def _line(axes: Axes, steps: Sequence[float], values: Sequence[float], width: float, **style: Any) -> None:
    if steps:
        axes.plot(steps, values, linewidth=width, markersize=3, **style)


def format_values(axes: Axes, key: str) -> None:
    """Label the y axis of the metric `key` in percent, if it is a share."""
    if key.endswith(SHARES):
        axes.yaxis.set_major_formatter(PercentFormatter(1))


def mark_best(axes: Axes, point: tuple[float, float], key: str = "loss") -> None:
    """A ring around the best evaluation of the metric `key`, at (step, value)."""
    step, value = drawable(point)
    text = percent(value) if key.endswith(SHARES) else f"{value:.4g}"
    ring: dict[str, Any] = {
        "linestyle": "none",
        "marker": "o",
        "markersize": 9,
        "markerfacecolor": "none",
        "markeredgewidth": 1.6,
    }
    axes.plot([step], [value], color=EVAL, label=f"best validation, {text} at step {step:,.0f}", **ring)


def style_axes(axes: Axes) -> None:
    """Grid, ticks and one spine, without a box."""
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=DIM, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
