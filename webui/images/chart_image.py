"""An image of one chart of a run as the page shows it: with its zoom, smoothing and log scale, as PNG or SVG."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from backend.runs.events import RESUMED, SAVED
from webui.images.run_image import (
    DIM,
    EVAL,
    INK,
    MANY_COLORS,
    TRAIN,
    drawable,
    encode,
    format_values,
    mark_best,
    style_axes,
)

INCHES, DPI = (8.0, 4.0), 150
PALE = "#abc1f2"
ALERT = "#92500a"
EVALUATION_PREFIX = "eval_"


@dataclass(frozen=True)
class Chart:
    """One chart of CHARTS in static/charts.js: its title, the names of its two series, and the key of the second."""

    title: str
    name: str
    second: str = ""
    second_name: str = ""
    smooth: bool = False
    log: bool = False
    best: str = ""  # min or max: the evaluation to mark
    numbered: bool = False  # the key ends with 1; there may be series with other numbers


def _train_and_eval(key: str, title: str, log: bool = False, best: str = "") -> Chart:
    return Chart(title, "train", EVALUATION_PREFIX + key, "validation", smooth=True, log=log, best=best)


CHARTS: Mapping[str, Chart] = {
    "loss": _train_and_eval("loss", "Loss", log=True, best="min"),
    "eval_loss_1": Chart("Validation loss of each dataset", "dataset 1", numbered=True),
    "eval_exact_match": Chart("Exact match of generations", "exact match"),
    "eval_rouge_l": Chart("ROUGE-L of generations", "ROUGE-L"),
    "reward_margin": _train_and_eval("reward_margin", "Reward margin"),
    "reward_accuracy": _train_and_eval("reward_accuracy", "Reward accuracy", best="max"),
    "reward_chosen": Chart("Rewards", "chosen", "reward_rejected", "rejected"),
    "kl": _train_and_eval("kl", "KL divergence from the reference"),
    "reward_mean": _train_and_eval("reward_mean", "Mean reward"),
    "learning_rate": Chart("Learning rate", "learning rate", log=True),
    "grad_norm": Chart("Gradient norm", "norm", smooth=True, log=True),
    "gpu_utilization": Chart("GPU utilization (%)", "utilization"),
    "tokens_per_second": Chart("Tokens per second", "tokens/s", smooth=True),
}


@dataclass(frozen=True)
class View:
    """How the page shows its charts."""

    weight: float = 0.0  # the weight of the smoothing, 0 to 0.99
    log: bool = False
    low: float | None = None  # the first and the last step of a zoom
    high: float | None = None


def draw(
    name: str, key: str, found: Mapping[str, Any], events: Sequence[Mapping[str, Any]], view: View, kind: str
) -> bytes:
    """The chart `key` of the run `name`. `found`: what Curves.series returns for the range; `events`: what all_events
    returns; `kind`: png or svg."""
    chart, steps = CHARTS[key], drawable(step_range(found, events, view))
    found = {**found, "series": _drawable(found["series"]), "means": _drawable(found["means"])}
    events = [{**event, "step": drawable([event["step"]])[0]} for event in events]
    figure = Figure(figsize=INCHES, dpi=DPI, facecolor="white", layout="constrained")
    axes = figure.subplots()
    # parse_math off: dollar signs in a name are not TeX.
    figure.suptitle(f"{chart.title}: {name}", color=INK, weight="bold", fontsize=11, parse_math=False)
    _curves(axes, key, found, view.weight)
    if (point := best_of(chart, found)) and steps[0] <= point[0] <= steps[1]:
        mark_best(axes, point, key)
    if chart.log and view.log:
        axes.set_yscale("log", nonpositive="mask")
    if not axes.has_data():
        axes.text(0.5, 0.5, "No values were logged", transform=axes.transAxes, ha="center", color=DIM)
    else:
        _scale(axes, *steps)
        _marks(axes, [event for event in events if steps[0] <= event["step"] <= steps[1]])
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    format_values(axes, key)
    axes.set_xlabel("step", color=DIM)
    style_axes(axes)
    return encode(figure, kind)


def _drawable(lines: Mapping[str, Any]) -> dict[str, Any]:
    return {key: {"x": drawable(line["x"]), "y": drawable(line["y"])} for key, line in lines.items()}


def step_range(found: Mapping[str, Any], events: Sequence[Mapping[str, Any]], view: View) -> tuple[float, float]:
    """The first and the last step of the x axis, like `wholeRange` in run_charts.js and `stepRange` in run_chart.js:
    the zoom, or else the range of all series, extended to an earlier resume and a later checkpoint."""
    if view.low is not None and view.high is not None:
        return view.low, view.high
    lines = [line["x"] for line in found["series"].values() if line["x"]]
    if not lines:
        return 0, 1
    first = min([x[0] for x in lines] + [event["step"] for event in events if event["kind"] == RESUMED])
    last = max([x[-1] for x in lines] + [event["step"] for event in events if event["kind"] == SAVED])
    return (max(0, first - 1), last + 1) if first == last else (first, last)


def best_of(chart: Chart, found: Mapping[str, Any]) -> tuple[float, float] | None:
    """Step and value of the best evaluation, like `bestOf` in chart_marks.js; None if all are equal, or there is only
    one."""
    key = chart.second
    if not chart.best or key not in found["series"] or found["min"][key] == found["max"][key]:
        return None
    return found[f"{chart.best}_step"][key], found[chart.best][key]


def all_events(
    events: Sequence[Mapping[str, Any]], checkpoints: Sequence[int], found: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Kind and step of the page's marks: events, checkpoints and resumes without an event, and evaluations."""
    marks = [(event["kind"], event["step"]) for event in events]
    marks += [(SAVED, step) for step in checkpoints]
    marks += [(RESUMED, step) for step in found["resumed"]]
    for key, line in found["series"].items():
        marks += [("evaluation", step) for step in line["x"] if key.startswith(EVALUATION_PREFIX)]
    return [{"kind": kind, "step": step} for kind, step in dict.fromkeys(marks)]


def smoothed(x: Sequence[float], y: Sequence[float], weight: float) -> tuple[list[float], list[float]]:
    """Same as `smoothed` in charts.js: a bias-corrected exponential moving average."""
    values = []
    mean = total = 0.0
    for value in y:
        mean = mean * weight + value * (1 - weight)
        total = total * weight + (1 - weight)
        values.append(mean / total)
    return list(x), values


def with_gaps(
    x: Sequence[float], y: Sequence[float], gaps: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Same as `withGaps` in plot.js: an empty point in each gap, so that no line is drawn over it."""
    steps, values = list(x), list(y)
    for after, _ in gaps:
        if 0 < (i := bisect_right(steps, after)) < len(steps):
            steps.insert(i, (steps[i - 1] + steps[i]) / 2)
            values.insert(i, math.nan)
    return steps, values


def _curves(axes: Axes, key: str, found: Mapping[str, Any], weight: float) -> None:
    chart, series, gaps = CHARTS[key], found["series"], found["gaps"]
    if chart.numbered:
        prefix = key.removesuffix("1")
        for number in sorted(int(name.removeprefix(prefix)) for name in series if name.startswith(prefix)):
            line, color = series[f"{prefix}{number}"], MANY_COLORS[(number - 1) % len(MANY_COLORS)]
            axes.plot(
                *with_gaps(line["x"], line["y"], gaps), color=color, marker="o", markersize=3, label=f"dataset {number}"
            )
    elif key in series:
        x, y = series[key]["x"], series[key]["y"]
        if chart.smooth and weight > 0 and len(x) > 2:
            axes.plot(*with_gaps(x, y, gaps), color=PALE, linewidth=0.8, label=chart.name)
            means = found["means"].get(key, series[key])
            steps, values = smoothed(means["x"], means["y"], weight)
            first, last = bisect_left(steps, x[0]), bisect_right(steps, x[-1])  # the points in the zoom
            smooth, name = with_gaps(steps[first:last], values[first:last], gaps), f"{chart.name}, smoothed"
            axes.plot(*smooth, color=TRAIN, linewidth=1.8, label=name)
        else:
            marker = "o" if len(x) == 1 else None
            axes.plot(*with_gaps(x, y, gaps), color=TRAIN, linewidth=1.6, marker=marker, label=chart.name)
    if chart.second in series:
        line = with_gaps(series[chart.second]["x"], series[chart.second]["y"], gaps)
        axes.plot(*line, color=EVAL, linewidth=1.6, marker="o", markersize=3, label=chart.second_name)


def _scale(axes: Axes, first: float, last: float) -> None:
    """Set the steps of the x axis, and scale the y axis to the points within them: in a zoom, each curve also has a
    point on either side."""
    axes.set_xlim(first, last)
    points = np.concatenate([np.asarray(line.get_xydata(), float) for line in axes.lines])
    inside = points[(points[:, 0] >= first) & (points[:, 0] <= last)]
    if len(inside):
        axes.ignore_existing_data_limits = True
        axes.update_datalim(inside)
        axes.autoscale_view(scalex=False)


def _marks(axes: Axes, events: Sequence[Mapping[str, Any]]) -> None:
    """Checkpoints and evaluations in two rows at the x axis, as both often have the same step; lines for all other
    events."""

    def steps(kind: str) -> list[float]:
        return [event["step"] for event in events if event["kind"] == kind]

    rows = ((SAVED, "^", DIM, "checkpoint", 0.03), ("evaluation", "o", EVAL, "evaluation", 0.0))
    for kind, marker, color, name, height in rows:
        if at := steps(kind):
            style: dict[str, Any] = {
                "linestyle": "none",
                "marker": marker,
                "markersize": 4,
                "clip_on": False,
                "zorder": 3,
            }
            axes.plot(at, [height] * len(at), color=color, transform=axes.get_xaxis_transform(), label=name, **style)
    alerts = [event["step"] for event in events if event["kind"] not in (SAVED, RESUMED, "evaluation")]
    for at, color, line, name in ((steps(RESUMED), DIM, "--", "resumed"), (alerts, ALERT, "-", "alert")):
        for number, step in enumerate(at):
            axes.axvline(step, color=color, linewidth=0.8, linestyle=line, label=None if number else name)
