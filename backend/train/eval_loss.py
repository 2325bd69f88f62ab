"""The validation loss, and that of each of several datasets.

In SFT and pretraining, the loss is the mean over the trained tokens of all validation examples, with their weights, so
it does not depend on the batch size, the number of processes or the strategy. transformers' Trainer computes the mean
of the means of batches, in which a token of a short example counts more than one of a long example, and accelerate
completes the last batches of the processes with the first examples, which then count twice. Preference stages keep the
loss of TRL. Its metrics are means of batches: here a batch counts by its number of examples, because the last one may
be much smaller. In KTO, it counts for the metrics of chosen and of rejected completions by the number of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset, concatenate_datasets

from backend.train import loss_weights
from backend.train.templates import IGNORE_INDEX


class EvalPartsMixin:
    """Mixin for all trainers: several datasets are evaluated one after another."""

    eval_parts: Sequence[Dataset] = ()  # with several datasets, the validation examples of each
    _sizes: dict[str, list[float]]  # of each of TRL's metrics: the examples of the batches that are evaluated

    def evaluation_loop(self: Any, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **more: Any) -> Any:
        """The Trainer's evaluation loop. With several datasets, the metrics also have the mean loss of each."""
        parts = {n: self.get_eval_dataloader(part) for n, part in enumerate(self.eval_parts, 1) if len(part)}
        more["metric_key_prefix"], self._sizes = metric_key_prefix, {}
        found = {n: self._evaluated(loader, *args, **more) for n, loader in (parts or {0: dataloader}).items()}
        outputs, total = [output for output, _, _ in found.values()], sum(count for _, _, count in found.values())
        metrics = {name: value for output in outputs for name, value in output.metrics.items()}
        if parts:
            metrics |= {f"{metric_key_prefix}_loss_{n}": loss for n, (_, loss, count) in found.items() if count}
        metrics[f"{metric_key_prefix}_loss"] = sum(loss * (count / total) for _, loss, count in found.values())
        return outputs[-1]._replace(metrics=metrics, num_samples=sum(output.num_samples for output in outputs))

    def prediction_step(self: Any, model: Any, inputs: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        """Take note of the number of examples of a batch."""
        size, of_metrics = _size(self.accelerator), self._sizes_of_metrics(inputs)
        before = {name: len(values) for name, values in metrics_of(self, "eval").items()}
        outputs = super().prediction_step(model, inputs, *args, **more)  # type: ignore[misc]
        for name, values in metrics_of(self, "eval").items():
            if len(values) > before.get(name, 0):
                self._sizes.setdefault(name, []).append(of_metrics.get(name, size))
        return outputs

    def _sizes_of_metrics(self, inputs: Mapping[str, Any]) -> Mapping[str, float]:
        """The metrics that are means of only some of the examples of a batch -> of how many."""
        return {}

    def log(self: Any, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Let TRL log the means of its metrics over all examples of an evaluation."""
        if "eval_loss" in logs:
            self._average(metrics_of(self, "eval"))
        super().log(logs, *more, **named)  # type: ignore[misc]

    def _average(self, metrics: dict[str, list[float]]) -> None:
        """Replace the values of batches by their mean over the examples."""
        for name, values in metrics.items():
            sizes = self._sizes.get(name, [])
            if len(sizes) == len(values) > 1:
                values[:] = [sum(size * float(value) for size, value in zip(sizes, values, strict=True)) / sum(sizes)]

    def _evaluated(self: Any, loader: Any, *args: Any, **more: Any) -> tuple[Any, float, float]:
        """The Trainer's output for one dataset, its mean loss, and the number of examples in it. A router's
        auxiliary loss, which is computed for whole batches, is left out."""
        with_router_loss, self.aux_loss_enabled = getattr(self, "aux_loss_enabled", False), False
        try:
            output = super().evaluation_loop(loader, *args, **more)  # type: ignore[misc]
        finally:
            self.aux_loss_enabled = with_router_loss
        return output, output.metrics[f"{more['metric_key_prefix']}_loss"], output.num_samples


class KtoEvalMixin(EvalPartsMixin):
    """Mixin for KTO's trainer, whose batches have chosen and rejected completions in any proportion."""

    def _sizes_of_metrics(self: Any, inputs: Mapping[str, Any]) -> Mapping[str, float]:
        """The numbers of the completions of each kind, on all processes."""
        labels, gather = inputs["label"].to(self.accelerator.device), self.accelerator.gather_for_metrics
        chosen, total = int(gather(labels.sum()).sum()), int(gather(torch.ones_like(labels).sum()).sum())
        size = _size(self.accelerator)
        sizes = {"chosen": size * chosen / total, "rejected": size * (total - chosen) / total}
        return {f"{metric}/{kind}": count for kind, count in sizes.items() for metric in ("rewards", "logps")}

    def _average(self, metrics: dict[str, list[float]]) -> None:
        """Same. The margin is that of the means: TRL has none of batches with completions of only one kind."""
        super()._average(metrics)
        chosen, rejected = (metrics.get(f"rewards/{kind}") for kind in ("chosen", "rejected"))
        if chosen and rejected:
            metrics["rewards/margins"] = [chosen[0] - rejected[0]]


class EvalLossMixin(EvalPartsMixin):
    """Mixin for trainers of next-token stages, whose loss is a mean over the trained tokens of a batch."""

    _sums: list[float]  # of the weighted losses of this process's tokens, and of the weights

    def get_eval_dataloader(self: Any, *args: Any) -> Any:
        """The batches, with padding. With packing, TRL's collator would concatenate the examples of a batch, which are
        not packed here, and attention without FlashAttention would be computed for every pair of their tokens."""
        collate = self.data_collator
        self.data_collator = loss_weights.with_padding(collate)
        try:
            return super().get_eval_dataloader(*args)  # type: ignore[misc]
        finally:
            self.data_collator = collate

    def _evaluated(self: Any, loader: Any, *args: Any, **more: Any) -> tuple[Any, float, float]:
        """Same, but with the mean over all tokens, and the sum of their weights instead of the number of examples."""
        self._sums = [0.0, 0.0]
        output, _, _ = super()._evaluated(loader, *args, **more)
        loss, count = (sum(values) for values in zip(*gather_object([self._sums]), strict=True))
        return output, loss / count if count else 0.0, count

    def prediction_step(self: Any, model: Any, inputs: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        """Add the losses of the tokens of a batch."""
        count, weights = map(float, loss_weights.sums(inputs))
        outputs = super().prediction_step(model, inputs, *args, **more)
        if count:
            self._sums[0] += float(outputs[0]) * count
            self._sums[1] += weights
        return outputs


def metrics_of(trainer: Any, mode: str) -> dict[str, list[float]]:
    """TRL's metrics of each batch since the last log of training ("train") or evaluation ("eval"), such as the reward
    margin; ORPO's have another name, and the Trainer of transformers has none."""
    # ORPO's are an empty mapping before the first batch, which makes what is looked up.
    metrics = getattr(trainer, "_metrics", getattr(trainer, "_stored_metrics", None))
    found: dict[str, list[float]] = {} if metrics is None else metrics[mode]
    return found


def _size(accelerator: Any) -> int:
    """The examples of the batch that is evaluated, on all processes, without those that complete the last batches."""
    loader = accelerator.gradient_state.active_dataloader
    if loader is None:
        return 1
    is_incomplete = loader.end_of_dataloader and loader.remainder > 0
    return int(loader.remainder if is_incomplete else loader.total_batch_size)


def completed(examples: Dataset, multiple: int) -> Dataset:
    """Tokenized `examples`, followed by copies of the first one without labels up to a multiple of the examples that
    all processes evaluate at once. What completes the last batches then has no loss."""
    missing = -len(examples) % multiple
    if not missing or not len(examples):
        return examples
    row = examples[0]
    unlabeled = {**row, "labels": [IGNORE_INDEX] * len(row["labels"])}
    return concatenate_datasets([examples, Dataset.from_list([unlabeled] * missing, features=examples.features)])


def parts(examples: Dataset, sizes: Sequence[int], multiple: int = 1) -> list[Dataset]:
    """The validation examples of each dataset, which follow each other in `examples`, each as `completed`."""
    bounds = pairwise(accumulate((0, *sizes)))
    rows = [range(start, end) if end > start else [] for start, end in bounds]  # datasets refuses a range after the end
    return [completed(examples.select(each), multiple) for each in rows]
