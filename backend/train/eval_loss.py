"""The validation loss of SFT and pretraining: the mean over the trained tokens of all validation examples.

So it does not depend on the batch size, the number of processes and the strategy. transformers' Trainer computes the
mean of the means of batches, in which a token of a short example counts more than one of a long example, and accelerate
completes the last batches of the processes with the first examples, which then count twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset, concatenate_datasets

from backend.train.templates import IGNORE_INDEX


class EvalLossMixin:
    """For trainers of next-token stages, whose loss is a mean over the trained tokens of a batch."""

    eval_parts: Sequence[Dataset] = ()  # of several datasets, the validation examples of each
    _sums: list[float]  # of the losses of this process's tokens, and their number

    def evaluation_loop(self: Any, *args: Any, metric_key_prefix: str = "eval", **more: Any) -> Any:
        """The Trainer's evaluation loop with the mean loss over all tokens and, of several datasets, over the tokens of
        each. A router's auxiliary loss, which is computed for whole batches, is left out."""
        loaders = [self.get_eval_dataloader(part) if len(part) else None for part in self.eval_parts] or [args[0]]
        with_router_loss, self.aux_loss_enabled = getattr(self, "aux_loss_enabled", False), False
        outputs, sums = [], []
        try:
            for loader in loaders:
                self._sums = [0.0, 0.0]
                if loader is not None:
                    outputs.append(
                        super().evaluation_loop(loader, *args[1:], metric_key_prefix=metric_key_prefix, **more)  # type: ignore[misc]
                    )
                sums.append([sum(values) for values in zip(*gather_object([self._sums]), strict=True)])
        finally:
            self.aux_loss_enabled = with_router_loss
        metrics = {name: value for output in outputs for name, value in output.metrics.items()}
        loss, count = (sum(values) for values in zip(*sums, strict=True))
        metrics[f"{metric_key_prefix}_loss"] = loss / count
        for number, (own, tokens) in enumerate(sums if self.eval_parts else (), 1):
            if tokens:
                metrics[f"{metric_key_prefix}_loss_{number}"] = own / tokens
        return outputs[-1]._replace(metrics=metrics, num_samples=sum(output.num_samples for output in outputs))

    def prediction_step(self: Any, model: Any, inputs: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        """Add the losses of the tokens of a batch."""
        count = int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum())  # nothing predicts the first token
        outputs = super().prediction_step(model, inputs, *args, **more)  # type: ignore[misc]
        if count:
            self._sums[0] += float(outputs[0]) * count
            self._sums[1] += count
        return outputs


def completed(examples: Dataset, multiple: int) -> Dataset:
    """Tokenized `examples`, followed by copies of the first one without labels up to a multiple of the examples that
    all processes evaluate at once. What completes the last batches then has no loss."""
    missing = -len(examples) % multiple
    if not missing or not len(examples):
        return examples
    row = examples[0]
    unlabeled = {**row, "labels": [IGNORE_INDEX] * len(row["labels"])}
    return concatenate_datasets([examples, Dataset.from_list([unlabeled] * missing, features=examples.features)])


def parts(examples: Dataset, sizes: Sequence[int], multiple: int) -> list[Dataset]:
    """The validation examples of each dataset, which follow each other in `examples`, each as `completed`."""
    bounds = pairwise(accumulate((0, *sizes)))
    rows = [range(start, end) if end > start else [] for start, end in bounds]  # datasets refuses a range after the end
    return [completed(examples.select(each), multiple) for each in rows]
