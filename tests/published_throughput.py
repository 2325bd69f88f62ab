"""Published training throughputs, the prediction of each, and the fit of the rates: for tests and for docs/time.md.

tests/data/published_throughput.jsonl has one row for each published figure of a benchmark with a stated source: what
was trained on which GPUs, as options of a spec, and the tokens per second and GPU. Rows that options cannot express
have the reason instead (`left_out`). `python -m tests.published_throughput` prints what docs/time.md has of them, and
with `--fit` how much a fit of the rates to other families helps, which takes minutes.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from backend.config.options import effective, parse
from backend.inspect import InputFacts
from backend.machine.descriptions import machine_from_mapping
from backend.modelspec import ModelShape, from_config
from backend.resolve import resolve
from backend.timing import CALIBRATION, Calibration, TimeEstimate, time_of
from backend.wording import counted

HOME = Path(__file__).resolve().parent.parent
DATA, DOCUMENT = HOME / "tests/data/published_throughput.jsonl", HOME / "docs/time.md"
# Families that were set aside before a fit of the rates was tried: about two fifths of the rows.
HELD_OUT = ("lf", "qwen", "peft", "yafsdp", "swift2", "tune", "footplate")
FURTHER = "mosaic2"  # figures of llm-foundry that were added when rates and counts were final
LONG = 8192  # tokens
FAMILIES = {
    "fms": "Transformers and TRL (fms-acceleration)",
    "mosaic": "llm-foundry",
    "answer": "fsdp_qlora",
    "automodel": "NeMo AutoModel",
    "lf": "LLaMA-Factory",
    "qwen": "Qwen's scripts",
    "peft": "PEFT's method comparison",
    "yafsdp": "FSDP (YaFSDP's comparison)",
    "swift2": "ms-swift",
    "tune": "torchtune",
    "footplate": "Footplate",
}


def gated_model(
    kind: str, layers: int, hidden: int, inner: int, heads: int, kv: int, words: int, **more: Any
) -> ModelShape:
    """A model with gated MLPs; its output layer is not tied to the embeddings, unless `more` of config.json says so."""
    return from_config(
        {
            "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
            "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": words,
            "tie_word_embeddings": False, "dtype": "bfloat16", **more,
        }
    )  # fmt: skip


def _mpt(layers: int, hidden: int, heads: int) -> ModelShape:
    """The matrices of an MPT model are those of a GPT-2 of the same size."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50_368, "n_positions": 2048}
    return from_config({"model_type": "gpt2", "dtype": "bfloat16", **sizes})


SHAPES: Mapping[str, ModelShape] = {
    "llama-2-7b": gated_model("llama", 32, 4096, 11_008, 32, 32, 32_000),
    "llama-2-13b": gated_model("llama", 40, 5120, 13_824, 40, 40, 32_000),
    "llama-2-70b": gated_model("llama", 80, 8192, 28_672, 64, 8, 32_000),
    "llama-3-8b": gated_model("llama", 32, 4096, 14_336, 32, 8, 128_256),
    "llama-3.2-3b": gated_model("llama", 28, 3072, 8192, 24, 8, 128_256, tie_word_embeddings=True),
    "llama-3.2-1b": gated_model("llama", 16, 2048, 8192, 32, 8, 128_256, tie_word_embeddings=True),
    "mistral-7b": gated_model("mistral", 32, 4096, 14_336, 32, 8, 32_000),
    "mixtral-8x7b": gated_model("mixtral", 32, 4096, 14_336, 32, 8, 32_000, num_local_experts=8, num_experts_per_tok=2),
    "powerlm-3b": gated_model("granite", 40, 2304, 9216, 36, 36, 49_152),
    "yi-34b": gated_model("llama", 60, 7168, 20_480, 56, 8, 64_000),
    "qwen-1.8b": gated_model("qwen2", 24, 2048, 5504, 16, 16, 151_936),
    "qwen-7b": gated_model("qwen2", 32, 4096, 11_008, 32, 32, 151_936),
    "qwen-14b": gated_model("qwen2", 40, 5120, 13_696, 40, 40, 152_064),
    "qwen-72b": gated_model("qwen2", 80, 8192, 24_576, 64, 64, 152_064),
    "qwen2.5-7b": gated_model("qwen2", 28, 3584, 18_944, 28, 4, 152_064),
    "qwen2.5-14b": gated_model("qwen2", 48, 5120, 13_824, 40, 8, 152_064),
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
}


@dataclass(frozen=True)
class Row:
    """One published figure; `options` is empty where `left_out` says why no spec can express it."""

    family: str
    gpu: str
    gpus: int
    model: str
    tokens_per_second_per_gpu: float
    trust: str
    source: str
    shape: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    lengths: tuple[int, ...] = ()
    nvlink: bool | None = None
    left_out: str = ""

    def estimate(self, calibration: Calibration = CALIBRATION) -> TimeEstimate:
        """The prediction for it."""
        return time_of(*_inputs(self), calibration)

    def ratio(self, calibration: Calibration = CALIBRATION) -> float:
        """Predicted over published tokens per second."""
        estimate = self.estimate(calibration)
        assert not estimate.unknown, (self, estimate.unknown)
        return estimate.tokens_per_second / self.gpus / self.tokens_per_second_per_gpu

    @property
    def text(self) -> str:
        """What was trained, in a few words."""
        options = dict(self.options)
        quantized = "QLoRA" if "method.quantization" in options else "LoRA"
        method = quantized if options.get("method.kind") == "lora" else "full"
        size = f"{options['train.per_device_train_batch_size']} x {options['data.max_length']:,} tokens"
        where = f"{self.gpus} x {self.gpu}" if self.gpus > 1 else self.gpu
        return f"{self.model}, {method}, {size}, {options['parallel.strategy']}, {where}"


@cache
def _inputs(row: Row) -> tuple[Any, ...]:
    per_node = min(8, row.gpus)
    described: dict[str, Any] = {"nodes": row.gpus // per_node, "gpus": [{"name": row.gpu, "count": per_node}]}
    if row.nvlink is not None:
        described["nvlink"] = row.nvlink
    if not any(row.gpu.startswith(name) for name in ("A100", "H100", "H200", "L40S", "RTX 3090", "RTX 4090")):
        described["gpus"][0]["memory_gib"] = 80
    machine = machine_from_mapping(described)
    options = {**dict(row.options), "launch.nproc_per_node": per_node}
    if row.gpus > per_node:
        options |= {"launch.nnodes": row.gpus // per_node, "launch.rendezvous": "static"}
        options["launch.master_addr"] = "10.0.0.1"
    spec = effective(parse({name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}))
    facts = InputFacts(shape=SHAPES[row.shape], token_lengths=row.lengths)
    return spec, resolve(spec, machine, facts), machine, facts


@dataclass(frozen=True)
class Shares:
    """How well some rows are predicted: shares within 25% (ratio 0.8 to 1.25) and within the shown range, the median
    width of that range and the median error, both as factors."""

    count: int
    within: float
    in_range: float
    factor: float
    error: float


def shares_of(found: Sequence[Row], calibration: Calibration = CALIBRATION) -> Shares:
    """How well these rows are predicted."""
    ratios = [row.ratio(calibration) for row in found]
    factors = [row.estimate(calibration).factor for row in found]
    return Shares(
        len(found),
        sum(0.8 <= ratio <= 1.25 for ratio in ratios) / len(found),
        sum(1 / factor <= ratio <= factor for ratio, factor in zip(ratios, factors, strict=True)) / len(found),
        median(factors),
        math.exp(median(abs(math.log(ratio)) for ratio in ratios)),
    )


@cache
def rows() -> tuple[Row, ...]:
    """Every row of the data file."""
    return tuple(_row(json.loads(line)) for line in DATA.read_text(encoding="utf-8").splitlines())


def _row(values: dict[str, Any]) -> Row:
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in values.pop("options", {}).items()}
    return Row(**{**values, "options": tuple(options.items()), "lengths": tuple(values.get("lengths", ()))})


def predicted(held_out: bool | None = None) -> tuple[Row, ...]:
    """The rows that are predicted; only those of held out families, or only the others, if that is set. Without the
    further ones."""
    found = (row for row in rows() if not row.left_out and row.family != FURTHER)
    return tuple(row for row in found if held_out is None or (row.family in HELD_OUT) == held_out)


def further(long: bool) -> tuple[Row, ...]:
    """The further rows with sequences of at least LONG tokens, or the others."""
    found = (row for row in rows() if row.family == FURTHER)
    return tuple(row for row in found if (dict(row.options)["data.max_length"] >= LONG) == long)


# -- the fit ---------------------------------------------------------------------------------------------------------

FITTED = ("peak", "memory", "attention", "attention_hopper", "link", "network", "overlap", "dequantization")
FITTED_GENERATIONS = ("A100", "Hopper")
LIMITS = {"peak": 1.0, "overlap": 1.0, "memory": 0.9}  # copies within a GPU reach nine tenths of its memory's rate
LARGE = 0.3  # a residual beyond this one counts in proportion instead of its square: it has a reason of its own
LOYALTY = 0.1  # how much a change of a rate by a factor of e costs, so that rates without evidence stay


def loss(found: Iterable[Row], calibration: Calibration) -> float:
    """How far the predictions are from what was published."""
    total = 0.0
    for row in found:
        residual = abs(math.log(row.ratio(calibration)))
        total += residual**2 if residual < LARGE else LARGE * (2 * residual - LARGE)
    return total


def fit(found: Sequence[Row], start: Calibration) -> Calibration:
    """The rates that predict these rows best, by coordinate descent from `start`."""
    names = [*FITTED, *FITTED_GENERATIONS]
    factors = dict.fromkeys(names, 1.0)

    def cost(values: Mapping[str, float]) -> float:
        penalty = LOYALTY * sum(math.log(value) ** 2 for value in values.values())
        return loss(found, scaled(start, values)) + penalty

    best, step = cost(factors), 0.16
    while step > 0.01:
        improved = False
        for name in names:
            for change in (1 + step, 1 / (1 + step)):
                tried = {**factors, name: factors[name] * change}
                if name in LIMITS and getattr(start, name) * tried[name] > LIMITS[name]:
                    continue
                if (value := cost(tried)) < best - 1e-6:
                    best, factors, improved = value, tried, True
        step = step if improved else step / 2
    return scaled(start, factors)


def scaled(start: Calibration, factors: Mapping[str, float]) -> Calibration:
    """`start` with some of its numbers multiplied."""
    values = {name: getattr(start, name) * factors[name] for name in FITTED}
    watts = {name: value * factors.get(name, 1) for name, value in start.flops_per_watt.items()}
    return replace(start, flops_per_watt=watts, **values)


def cross_validation() -> Iterator[str]:
    """Lines of a table: each fitted family predicted with rates that were fitted to the other fitted families."""
    fitted = predicted(False)
    yield "| family left out of the fit | rows | within 25%, no fit | within 25%, fitted to the others |"
    yield "| --- | --- | --- | --- |"
    for family in dict.fromkeys(row.family for row in fitted):
        out = [row for row in fitted if row.family == family]
        others = fit([row for row in fitted if row.family != family], CALIBRATION)
        before, after = shares_of(out), shares_of(out, others)
        yield f"| {FAMILIES[family]} | {len(out)} | {before.within:.0%} | {after.within:.0%} |"
    before, after = shares_of(predicted(True)), shares_of(predicted(True), fit(fitted, CALIBRATION))
    yield f"| all families that were set aside | {before.count} | {before.within:.0%} | {after.within:.0%} |"


# -- docs/time.md ----------------------------------------------------------------------------------------------------

# Why the largest errors are that large, in the order of `worst`.
REASONS = (
    "the network is not stated; the estimate assumes that of the vendor's servers",
    "attention takes most of the step, and reaches less on this GPU than the estimate assumes",
    "doubtful: the source has more tokens/s here than for 4,096 tokens on the same GPU",
    "the network is not stated; the estimate assumes that of the vendor's servers",
    "a small batch: the model's own code starts more operations than the estimate counts",
)


def worst(count: int = len(REASONS)) -> list[Row]:
    """The rows with the largest errors."""
    return sorted(predicted(), key=lambda row: -abs(math.log(row.ratio())))[:count]


def section() -> str:
    """The tables of docs/time.md that are computed from the published figures."""
    return "\n".join([*_shares_table(), "", *_family_table(), "", *_worst_table(), "", *_left_out_table()])


def _shares_table() -> Iterator[str]:
    found = predicted()
    one, several = [row for row in found if row.gpus == 1], [row for row in found if row.gpus > 1]
    yield "| published runs | rows | within 25% | goal | within the shown range | goal | median width |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    groups: Sequence[tuple[str, Sequence[Row], int, int]] = (
        ("one GPU", one, 90, 0),
        ("several GPUs", several, 0, 0),
        ("all", found, 85, 95),
        (f"further runs of llm-foundry, up to {LONG // 2:,} tokens", further(long=False), 0, 0),
        (f"further runs of llm-foundry, from {LONG:,} tokens", further(long=True), 0, 0),
    )
    for name, group, goal, range_goal in groups:
        shares = shares_of(group)
        within, inside = _share(shares.within, shares.count, goal), _share(shares.in_range, shares.count, range_goal)
        yield f"| {name} | {shares.count} | {within} | {inside} | x or / {shares.factor:g} |"


def _share(share: float, count: int, goal: int) -> str:
    """Two cells: how many rows, and the goal with whether it is met."""
    hits = round(share * count)
    missing = math.ceil(goal * count / 100) - hits
    verdict = "met" if missing <= 0 else f"missed by {counted(missing, 'row')}"
    return f"{hits} ({share:.0%}) | " + (f"{goal}%: {verdict}" if goal else "")


def _family_table() -> Iterator[str]:
    yield "| program | rows | within 25% | within the shown range | median error | lowest | highest |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for family, name in FAMILIES.items():
        group = [row for row in predicted() if row.family == family]
        shares, ratios = shares_of(group), [row.ratio() for row in group]
        aside = ", set aside" if family in HELD_OUT else ""
        yield (
            f"| {name}{aside} | {shares.count} | {shares.within:.0%} | {shares.in_range:.0%} | "
            f"{shares.error - 1:.0%} | {min(ratios):.2f} | {max(ratios):.2f} |"
        )


def _worst_table() -> Iterator[str]:
    yield "| run | predicted / published | reason |"
    yield "| --- | --- | --- |"
    for row, reason in zip(worst(), REASONS, strict=True):
        yield f"| {row.text} | {row.ratio():.2f} | {reason} |"


def _left_out_table() -> Iterator[str]:
    yield "| published, but not compared | rows |"
    yield "| --- | --- |"
    for reason, count in Counter(row.left_out for row in rows() if row.left_out).most_common():
        yield f"| {reason} | {count} |"


if __name__ == "__main__":
    print("\n".join(cross_validation()) if "--fit" in sys.argv else section())
