"""Weights of tokens in the loss of SFT: sum(weight x loss) / sum(weight) over the trained tokens.

A dataset has the column WEIGHTS only if a turn has a weight other than 0 and 1. TRL's chunked loss gives the
log-probability of each token, so the weights cost no memory of the size of the logits. In training the sums are those
of an optimizer step: of all its micro-batches on all ranks, as the number of tokens is without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from torch import Tensor
from trl import pack_dataset

from backend.train.templates import IGNORE_INDEX

WEIGHTS = "loss_weights"  # a column, and a tensor of batches: a weight for each token; null in examples without weights
ARROW_TYPE = pyarrow.list_(pyarrow.float32())


def without_empty(dataset: Dataset) -> Dataset:
    """The dataset, without the column if no example has weights."""
    is_empty = WEIGHTS in dataset.column_names and dataset.data.column(WEIGHTS).null_count == len(dataset)
    return dataset.remove_columns(WEIGHTS) if is_empty else dataset


def has_weights(*datasets: Dataset | None) -> bool:
    """Whether examples have weights."""
    return any(dataset is not None and WEIGHTS in dataset.column_names for dataset in datasets)


def pack(dataset: Dataset, length: int, strategy: str) -> Dataset:
    """Packed sequences of at most `length` tokens, with their weights if examples have weights."""
    return pack_dataset(dataset.map(_with_weights) if has_weights(dataset) else dataset, length, strategy)


def _with_weights(example: Mapping[str, Any]) -> dict[str, Any]:
    return {WEIGHTS: example[WEIGHTS] or [1.0] * len(example["input_ids"])}


@dataclass(frozen=True)
class Collator:
    """The batches of `collate`, with the weights."""

    collate: Callable[[Sequence[Any]], dict[str, Any]]

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch; WEIGHTS has the shape of its labels. Packed examples are one sequence."""
        batch = self.collate(examples)
        rows = [example.get(WEIGHTS) or [1.0] * len(example["input_ids"]) for example in examples]
        if len(batch["labels"]) != len(rows):
            rows = [list(chain.from_iterable(rows))]
        weights = torch.zeros(batch["labels"].shape)
        for row, values in zip(weights, rows, strict=True):
            row[: len(values)] = torch.tensor(values)
        return {**batch, WEIGHTS: weights}


def with_padding(collate: Any) -> Any:
    """`collate` for examples that are not packed."""
    if isinstance(collate, Collator):
        return Collator(with_padding(collate.collate))
    return replace(collate, padding_free=False) if getattr(collate, "padding_free", False) else collate


def sums(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The number of trained tokens of a batch, and the sum of their weights, 1 each without weights; in fp32."""
    is_trained = batch["labels"][:, 1:] != IGNORE_INDEX  # nothing predicts the first token
    count = is_trained.sum().float()
    return count, batch[WEIGHTS][:, 1:][is_trained].sum() if WEIGHTS in batch else count


class LossWeightsMixin:
    """Mixin for trainers of next-token stages: it weights the loss."""

    _scale: Tensor | float = 1.0  # of the weights in an optimizer step: TRL divides by the number of tokens

    def _set_signature_columns_if_needed(self: Any) -> None:
        super()._set_signature_columns_if_needed()  # type: ignore[misc]
        if WEIGHTS not in self._signature_columns:
            self._signature_columns.append(WEIGHTS)

    def _prepare_dataset(
        self: Any, dataset: Dataset, processing_class: Any, args: Any, packing: bool, *more: Any, **named: Any
    ) -> Any:
        """TRL 1.16 packs ids and labels only."""
        if packing and has_weights(dataset):
            return pack(dataset, args.max_length, args.packing_strategy)
        return super()._prepare_dataset(dataset, processing_class, args, packing, *more, **named)  # type: ignore[misc]

    def _get_num_items_in_batch(self: Any, batches: list[Any], *args: Any) -> Any:
        """The number of trained tokens of a step; takes note of the mean of their weights."""
        if batches and WEIGHTS in batches[0]:
            local = torch.stack([torch.stack(sums(batch)) for batch in batches]).sum(0)
            count, total = self.accelerator.gather(local[None].to(self.args.device)).sum(0)
            self._scale = count / total.clamp(min=torch.finfo().tiny)  # both are 0 in a step without trained tokens
        return super()._get_num_items_in_batch(batches, *args)  # type: ignore[misc]

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
        """TRL's loss, with the weights if the batch has any: it sums the log-probabilities of the tokens and divides by
        the number of trained tokens, which in evaluation are those of the batch."""
        if WEIGHTS in inputs:
            weights = inputs.pop(WEIGHTS)[:, 1:] * (self._scale if self.model.training else 1.0)
            model = partial(_weighted, model, weights)
        return super().compute_loss(model, inputs, *args, **named)  # type: ignore[misc]


def _weighted(model: Any, weights: Tensor, **inputs: Any) -> Any:
    """The outputs of TRL's forward pass, with weighted log-probabilities."""
    outputs = model(**inputs)
    outputs.log_probs = outputs.log_probs * weights
    return outputs
