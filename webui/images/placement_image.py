"""The placement picture in the image of a run: what each device holds according to the estimate, and its measured peak.

Imports matplotlib's Axes. Colors as in static/build/strategies.css.
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
    """Stacked bars in GiB for the first MAX_RANKS ranks, with the free memory and a line at each measured peak."""
    placement = estimate["placement"]
    count = placement["nodes"] * placement["per_node"]
    ranks = range(min(MAX_RANKS, count))
    top = 0.0
    for part in placement["kinds"]:
        size, color = part["bytes"] / GIB, COLORS[part["kind"]]
        axes.bar(ranks, [size] * len(ranks), bottom=top, width=0.7, color=color, label=part["label"])
        top += size
    _draw_capacity(axes, ranks, top, estimate["capacity_bytes"] / GIB, dim)
    _draw_nodes(axes, placement["nodes"], placement["per_node"], len(ranks), dim)
    unseen = estimate["device_bytes"] - estimate["measured_bytes"]  # memory outside of torch's allocator
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


def _draw_capacity(axes: Axes, ranks: range, top: float, capacity: float, dim: str) -> None:
    """The free memory above the bars, in GiB; a line at the capacity if a bar exceeds it."""
    if capacity > top:
        free = [capacity - top] * len(ranks)
        axes.bar(ranks, free, bottom=top, width=0.7, facecolor="none", edgecolor=dim, linewidth=0.6, label="Free")
    elif capacity:
        axes.axhline(capacity, color=dim, linestyle="--", linewidth=1, label="Capacity")


def _draw_nodes(axes: Axes, nodes: int, per_node: int, shown: int, dim: str) -> None:
    """A line between nodes, and the number of each above its bars."""
    for node in range(nodes if nodes > 1 else 0):
        first, last = node * per_node, min((node + 1) * per_node, shown)
        if first >= shown:
            return
        if node:
            axes.axvline(first - 0.5, color=dim, linestyle=":", linewidth=0.8)
        middle = (first + last - 1) / 2
        axes.text(
            middle, 1.02, f"Node {node}", transform=axes.get_xaxis_transform(), ha="center", color=dim, fontsize=7
        )
