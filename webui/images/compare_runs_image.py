"""An image of the curves of several runs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from webui.images.run_image import (
    DIM,
    INK,
    MANY_COLORS,
    MIN_POINTS_TO_SMOOTH,
    drawable,
    format_values,
    smoothed,
    style_axes,
)

INCHES, DPI = (10.0, 7.5), 150
PANELS = (  # metric, its validation metric, label
    ("loss", "eval_loss", "loss"),
    ("reward_margin", "eval_reward_margin", "reward margin"),
    ("reward_accuracy", "eval_reward_accuracy", "reward accuracy"),
    ("learning_rate", "", "learning rate"),
    ("tokens_per_second", "", "tokens per second"),
)
X_MISSING = {"epoch": " with an epoch", "tokens": " with a number of tokens", "seconds": " with a time"}
X_LABELS = {"step": "step", "epoch": "epoch", "tokens": "tokens", "seconds": "wall time in minutes"}
MAX_NAME_LENGTH = 48

Series = Mapping[str, Mapping[str, Sequence[float]]]


def draw(runs: Sequence[tuple[str, Series]], axis: str) -> bytes:
    """The PNG of the curves of (name, series) of each run over `axis`."""
    figure = Figure(figsize=INCHES, dpi=DPI, facecolor="white", layout="constrained")
    panels = [p for p in PANELS if p[0] == "loss" or any(p[0] in series for _, series in runs)]
    found = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=(3, *[1] * (len(panels) - 1)))
    scale = 1 / 60 if axis == "seconds" else 1.0
    handles: dict[str, Any] = {}
    for axes, (metric, validation, label) in zip(found[:, 0], panels, strict=True):
        for number, (name, series) in enumerate(runs):
            color = MANY_COLORS[number % len(MANY_COLORS)]
            for key, style in ((metric, "-"), (validation, "--")):
                if key not in series:
                    continue
                x, y = [scale * value for value in drawable(series[key]["x"])], drawable(series[key]["y"])
                many = key == metric != "learning_rate" and len(y) >= MIN_POINTS_TO_SMOOTH
                line = axes.plot(x, smoothed(y) if many else y, style, color=color, linewidth=1.3, markersize=3)[0]
                handles.setdefault(f"{number} {name}", line)
        axes.set_ylabel(label, color=DIM, fontsize=9)
        format_values(axes, metric)
        style_axes(axes)
    found[-1, 0].set_xlabel(X_LABELS[axis], color=DIM)
    if handles:
        names = [_short(name.partition(" ")[2]) for name in handles]
        legend = figure.legend(
            handles.values(), names, loc="outside lower center", ncols=min(4, 1 + len(names) // 5), frameon=False,
            labelcolor=INK, fontsize=8,
        )  # fmt: skip
        for text in legend.get_texts():
            text.set_parse_math(False)  # dollar signs in a name are not TeX
        found[0, 0].set_title("Training loss smoothed; validation loss dashed", color=DIM, fontsize=9, loc="left")
    else:
        nothing = f"No metrics{X_MISSING.get(axis, '')} were logged"
        found[0, 0].text(0.5, 0.5, nothing, transform=found[0, 0].transAxes, ha="center", color=DIM)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 3]}..."
