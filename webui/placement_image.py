"""The placement picture in the image of a run: what each device holds by the estimate, and its measured peak.

Imports matplotlib's Axes. Colors as in static/strategies.css.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

COLORS: Mapping[str, str] = {
    "overhead": "#94a3b8",
    "quantized": "#0e7490",
    "weights": "#1d4ed8",
    "optimizer": "#6d28d9",
    "gradients": "#b45309",
    "gathered": "#7aa7f7",
    "activations": "#3f8f5f",
}
MAX_RANKS = 32
GIB = 2**30


def draw_placement(axes: Axes, estimate: Mapping[str, Any], result: Mapping[str, Any], ink: str, dim: str) -> None:
    """Stacked bars of GiB by rank, the first MAX_RANKS, with a line at each measured peak."""
    placement = estimate["placement"]
    count = placement["nodes"] * placement["per_node"]
    ranks = range(min(MAX_RANKS, count))
    top = 0.0
    for part in placement["kinds"]:
        size, color = part["bytes"] / GIB, COLORS[part["kind"]]
        axes.bar(ranks, [size] * len(ranks), bottom=top, width=0.7, color=color, label=part["label"])
        top += size
    unseen = estimate["device_bytes"] - estimate["measured_bytes"]  # what torch's allocator does not see
    peaks = [(rank, (peak + unseen) / GIB) for rank, peak in enumerate(result.get("peak_bytes") or ()) if peak]
    shown = [(rank, peak) for rank, peak in peaks if rank in ranks]
    if shown:
        places, heights = [rank for rank, _ in shown], [peak for _, peak in shown]
        starts, ends = [rank - 0.42 for rank in places], [rank + 0.42 for rank in places]
        axes.hlines(heights, starts, ends, colors=ink, linewidth=1.8, label="measured peak")
    axes.set_ylabel("GiB", color=dim)
    axes.set_xlabel("rank" if count <= MAX_RANKS else f"rank (first {MAX_RANKS} of {count:,} ranks)", color=dim)
    axes.set_xticks(ranks)
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    axes.legend(frameon=False, labelcolor=ink, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
