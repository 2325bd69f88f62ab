"""The rows of a benchmark's result: each metric of each task for both models, with lm-eval's standard errors, and the
paired interval of the change where the metric is a mean of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from backend.models import intervals
from backend.models.chat_files import BASE, TUNED
from backend.wording import counted

NOT_COMPARED = ""  # the verdict of a metric without an interval
CLOSE = 1e-6  # largest difference between a mean and lm-eval's value
NO_FILTER = "none"


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`results`: lm-eval's result of each side. A row for each task or group, metric and filter."""
    tuned = results[TUNED]
    return [
        _row(results, name, metric, filter)
        for name in (*tuned["results"], *(group for group in tuned.get("groups", {}) if group not in tuned["results"]))
        for metric, filter in _metrics(_values(tuned, name))
    ]


def _values(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What lm-eval says about a task or group."""
    found: Mapping[str, Any] = {**result.get("groups", {}).get(name, {}), **result["results"].get(name, {})}
    return found


def _metrics(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Metric and filter, from keys such as `acc,none` and `acc_stderr,none`."""
    for key, value in values.items():
        metric, comma, filter = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            yield metric, filter


def _row(results: Mapping[str, Any], name: str, metric: str, filter: str) -> dict[str, Any]:
    label = f"{name}: {metric}" + (f" ({filter})" if filter != NO_FILTER else "")
    found = {side: _values(result, name) for side, result in results.items()}
    means = {side: _number(values.get(f"{metric},{filter}")) for side, values in found.items()}
    errors = {side: _number(values.get(f"{metric}_stderr,{filter}")) for side, values in found.items()}
    samples = {side: _of_samples(result, name, metric, filter) for side, result in results.items()}
    row = {
        "name": f"{name},{metric},{filter}",
        "label": label,
        "task": name,
        "metric": metric,
        "filter": filter,
        "shots": results[TUNED].get("n-shot", {}).get(name),
        "count": len(samples[TUNED]),
        "trained": means[TUNED],
        "base": means.get(BASE),
        "stderr": {"trained": errors[TUNED], "base": errors.get(BASE)},
        "is_share": False,
        "verdict": NOT_COMPARED,
    }
    is_share = all(_is_mean_share(samples[side], mean) for side, mean in means.items())
    is_share = is_share and results[TUNED].get("higher_is_better", {}).get(name, {}).get(metric) is True
    if not is_share or BASE not in results or samples[BASE].keys() != samples[TUNED].keys():
        return {**row, "is_share": is_share, "sentence": _sentence(label, means, is_share)}
    keys = list(samples[TUNED])
    pairs = ([samples[side][key] for key in keys] for side in (BASE, TUNED))
    return {**row, **intervals.compare(row["name"], label, *pairs).as_json()}


def _number(value: Any) -> float | None:
    """None for what JSON cannot express, such as the infinite perplexity of a diverged model, and for lm-eval's N/A."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _of_samples(result: Mapping[str, Any], name: str, metric: str, filter: str) -> dict[tuple[str, int], Any]:
    """(task, number) of each sample -> its value of the metric; of a group, those of all its tasks."""
    if name not in result["samples"]:
        found = dict[tuple[str, int], Any]()
        for child in result.get("group_subtasks", {}).get(name, ()):
            found |= _of_samples(result, child, metric, filter)
        return found
    return {
        (name, sample["doc_id"]): sample[metric]
        for sample in result["samples"][name]
        if sample["filter"] == filter and metric in sample
    }


def _is_mean_share(samples: Mapping[Any, Any], mean: float | None) -> bool:
    """Whether a metric is the mean of its samples, which are from 0 to 1."""
    values = list(samples.values())
    if mean is None or not values or not all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values):
        return False
    return abs(fmean(map(float, values)) - mean) < CLOSE


def _sentence(label: str, means: Mapping[str, float | None], is_share: bool) -> str:
    """The values of a metric without an interval."""

    def shown(value: float | None) -> str:
        return "not a number" if value is None else f"{100 * value:.1f}%" if is_share else f"{value:.4g}"

    if BASE not in means:
        return f"{label}: trained model {shown(means[TUNED])}."
    values = f"{label}: base model {shown(means[BASE])}, trained model {shown(means[TUNED])}"
    if None in means.values():
        return f"{values}, so they are not compared."
    return f"{values}; not compared: no paired interval is available for this metric."


def limits(
    results: Mapping[str, Any], found: Sequence[Mapping[str, Any]], limit: int, shots: int | None, truncated: bool
) -> list[str]:
    """What a reader must know about the rows, as sentences."""
    sentences, sizes = [], results[TUNED]["n-samples"]
    cut = {name: size for name, size in sizes.items() if size["effective"] < size["original"]}
    if cut:
        name, size = next(iter(cut.items()))
        others = f", and similarly {counted(len(cut) - 1, 'other task')}" if len(cut) > 1 else ""
        sentences.append(
            f"{name} used only the first {size['effective']:,} of its {size['original']:,} samples{others}: do not "
            f"compare the values with published ones. A limit of 0 uses all samples."
        )
    fixed = [name for name, own in results[TUNED]["n-shot"].items() if shots is not None and own != shots]
    if fixed:
        verb = "has" if len(fixed) == 1 else "have"
        sentences.append(f"{', '.join(fixed)} {verb} a fixed number of few-shot examples, not {shots}.")
    if truncated:
        sentences.append("At least one prompt exceeded the context length and was left-truncated.")
    few = sorted({row["task"] for row in found if 0 < row["count"] < intervals.MIN_EXAMPLES})
    if few:
        verb = "has" if len(few) == 1 else "have"
        sentences.append(f"{', '.join(few)} {verb} too few samples to tell a change from chance.")
    return sentences
