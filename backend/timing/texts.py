"""The time estimate in words, and as JSON with these words: what the command line prints and the page shows.

`time_json` has the fields of `TimeEstimate` as numbers in seconds, tokens, and the currency of the machine's price:

    unknown            why no time is predicted, the end of a sentence; '' if it is. Then items and texts are empty
    step_seconds, tokens_per_second, tokens_per_second_per_gpu, padded (share of the computed tokens), factor
    items              of a step: label, seconds, share (of the step), formula
    busy               null, unless other programs use this CPU: used and cores, in cores
    run                null if the number of steps is unknown; else steps, seconds, low_seconds, high_seconds,
                       items (as above), not_included (nouns), start_seconds (from the start to the first step, without
                       loading the weights)
    price              null without a price per GPU hour; else price, low, high, per_gpu_hour
    facts              the figures as rows of texts: label, value, range ('' without one)
    texts              sentences and figures to show: summary, step, tokens, dominating, range, run, price, padding,
                       not_included, busy, note; '' for what does not apply
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from backend.runs.throughput import duration
from backend.timing.computing import Part
from backend.timing.estimate import TimeEstimate
from backend.timing.whole_run import REST
from backend.wording import counted, figure

MUCH_PADDING = 0.05
LONG_STEP = 120  # seconds from which minutes are easier to read
MUCH_REST = 0.1  # share of the run that was not compared with measurements


def summary_text(estimate: TimeEstimate) -> str:
    """The result in one line; the reason if no time is predicted."""
    if estimate.unknown:
        return f"The time is not predicted: {estimate.unknown}."
    parts = [run_text(estimate), tokens_text(estimate)]
    return "; ".join(filter(None, [*parts, price_text(estimate)]))


def step_text(estimate: TimeEstimate) -> str:
    """Seconds of a step with their range: "1.23 s per optimizer step (0.946 s to 1.6 s)"."""
    seconds, between = _step(estimate)
    return f"{seconds} per optimizer step ({between})"


def tokens_text(estimate: TimeEstimate) -> str:
    """Tokens per second, and those of a GPU where there are several."""
    return ", ".join(filter(None, _tokens(estimate)))


def run_text(estimate: TimeEstimate) -> str:
    """The time of the whole run with its range: "3 h 10 min (2 h 26 min to 4 h 7 min)"; '' if it is not known."""
    if estimate.run_seconds is None:
        return ""
    return "{} ({})".format(*_between(map(duration, estimate.run_seconds)))


def price_text(estimate: TimeEstimate) -> str:
    """The price of the whole run with its range; '' without a price per GPU hour."""
    if estimate.price is None:
        return ""
    price, between = _between(f"{price:,.2f}" for price in estimate.price)
    return f"estimated price {price} ({between}) at {estimate.price_per_gpu_hour:g} per GPU hour"


def dominating_text(estimate: TimeEstimate) -> str:
    """What takes the most of a step: "Largest part of a step: waiting for the network, 71%"."""
    part = estimate.dominating
    if part is None:
        return ""
    label = part.label if part.label.startswith("LoRA") else part.label[0].lower() + part.label[1:]
    return f"Largest part of a step: {label}, {part.seconds / estimate.step_seconds:.0%}"


def range_text(estimate: TimeEstimate) -> str:
    """The range and the reason for its width."""
    text = f"The time per step may be up to {figure(estimate.factor)} times shorter or longer: {estimate.factor_reason}"
    if estimate.run and estimate.run.assumed_seconds > MUCH_REST * estimate.run.seconds:
        text += (
            ". Loading, evaluations and checkpoints were never compared with measurements and may take up to "
            f"{REST:g} times less or more"
        )
    return text


def padding_text(estimate: TimeEstimate) -> str:
    """How much of the computing is wasted on padding, '' if that is little; or which lengths are assumed."""
    if estimate.assumed_length:
        return (
            f"The example lengths are not known. Each example is assumed to have {estimate.assumed_length:,} tokens "
            "(data.max_length); with shorter examples, steps take less time"
        )
    return f"{estimate.padded:.0%} of the computed tokens are padding" if estimate.padded > MUCH_PADDING else ""


def not_included_text(estimate: TimeEstimate) -> str:
    """What the time of the run does not include; '' if that is nothing."""
    missing = estimate.run.not_included if estimate.run else ()
    return f"Not included: {', '.join(missing)}" if missing else ""


def busy_text(estimate: TimeEstimate) -> str:
    """That other programs use this CPU, a sentence; '' if they do not."""
    cpu = estimate.cpu
    if cpu is None or not cpu.is_busy:
        return ""
    cores = counted(cpu.cores, "CPU core")
    return (
        f"Other programs use about {cpu.busy:.1f} of the {cores}; while they do, the run takes longer than predicted."
    )


def run_steps_text(estimate: TimeEstimate) -> str:
    """Why the time of the run is known or not."""
    if estimate.run is None:
        return (
            "The time of the whole run is not predicted, because the number of steps is not known before the data is "
            "read. Set train.duration to steps to have it predicted."
        )
    return f"{counted(estimate.run.steps, 'step')} and everything else in the run"


def time_json(estimate: TimeEstimate) -> dict[str, Any]:
    """The estimate as JSON; the first lines of this module describe it."""
    if estimate.unknown:
        return {"unknown": estimate.unknown, "items": [], "run": None, "price": None, "facts": [],
                "texts": {"summary": summary_text(estimate)}}  # fmt: skip
    return {
        "unknown": "",
        "step_seconds": estimate.step_seconds,
        "tokens_per_second": estimate.tokens_per_second,
        "tokens_per_second_per_gpu": estimate.tokens_per_second / estimate.gpus,
        "padded": estimate.padded,
        "factor": estimate.factor,
        "items": _items(estimate.items),
        "busy": {"used": cpu.busy, "cores": cpu.cores} if (cpu := estimate.cpu) and cpu.is_busy else None,
        "run": _run_json(estimate),
        "price": _price_json(estimate),
        "facts": list(_facts(estimate)),
        "texts": {
            "summary": summary_text(estimate),
            "step": step_text(estimate),
            "tokens": tokens_text(estimate),
            "dominating": dominating_text(estimate),
            "range": range_text(estimate),
            "run": run_text(estimate) or run_steps_text(estimate),
            "price": price_text(estimate),
            "padding": padding_text(estimate),
            "not_included": not_included_text(estimate),
            "busy": busy_text(estimate),
            "note": estimate.cpu.note if estimate.cpu else "",
        },
    }


def _facts(estimate: TimeEstimate) -> Iterator[dict[str, str]]:
    def fact(label: str, value: str, between: str) -> dict[str, str]:
        return {"label": label, "value": value, "range": between}

    if estimate.run_seconds is not None:
        yield fact("Whole run", *_between(map(duration, estimate.run_seconds)))
    yield fact("Optimizer step", *_step(estimate))
    yield fact("Speed", *_tokens(estimate))
    if estimate.price is not None:
        price, between = _between(f"{price:,.2f}" for price in estimate.price)
        yield fact("Price", price, f"{between}, at {estimate.price_per_gpu_hour:g} per GPU hour")


def _between(texts: Iterable[str]) -> tuple[str, str]:
    """A figure and its range, from the lowest, the predicted and the highest one."""
    low, middle, high = texts
    return middle, f"{low} to {high}"


def _step(estimate: TimeEstimate) -> tuple[str, str]:
    """Seconds of a step, and their range."""
    seconds, factor = estimate.step_seconds, estimate.factor
    text = duration if seconds >= LONG_STEP else lambda each: f"{figure(each)} s"
    return _between(map(text, (seconds / factor, seconds, seconds * factor)))


def _tokens(estimate: TimeEstimate) -> tuple[str, str]:
    """Tokens per second, and those of a GPU or process where there are several."""
    each = _rounded(estimate.tokens_per_second / estimate.gpus)
    part = f"{each} per {'process' if estimate.cpu else 'GPU'}" if estimate.gpus > 1 else ""
    return f"{_rounded(estimate.tokens_per_second)} tokens/s", part


def _run_json(estimate: TimeEstimate) -> dict[str, Any] | None:
    if estimate.run is None or estimate.run_seconds is None:
        return None
    low, middle, high = estimate.run_seconds
    return {
        "steps": estimate.run.steps,
        "seconds": middle,
        "low_seconds": low,
        "high_seconds": high,
        "items": _items(estimate.run.items),
        "not_included": list(estimate.run.not_included),
        "start_seconds": estimate.run.start_seconds,
    }


def _price_json(estimate: TimeEstimate) -> dict[str, Any] | None:
    if estimate.price is None:
        return None
    low, middle, high = estimate.price
    return {"price": middle, "low": low, "high": high, "per_gpu_hour": estimate.price_per_gpu_hour}


def _items(items: Sequence[Part]) -> list[dict[str, Any]]:
    total = sum(item.seconds for item in items)
    return [{**item._asdict(), "share": item.seconds / total} for item in items]


def _rounded(value: float) -> str:
    """Three significant digits: more would pretend a precision that the prediction does not have."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else figure(value)
