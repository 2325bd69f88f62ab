"""Sampling whose outputs depend only on their seeds, whatever else is in the batch.

`generate` of transformers draws all outputs of a batch from one random state. Here each output has its own: its n-th
token is chosen by the n-th random number of its seed, so an evaluation that continues draws the same outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    """`temperature` is above 0; each next token is one of the most probable ones, which together have the probability
    `top_p`."""

    temperature: float
    top_p: float = 1.0


class SeededSampling(LogitsProcessor):
    """Leaves each output only the token that is drawn for it, so that greedy decoding chooses it. `seeds`: one for each
    output of the batch; `prompt_tokens`: their prompts with padding; `max_new_tokens`: the longest output."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int], prompt_tokens: int, max_new_tokens: int) -> None:
        self.warpers = [TemperatureLogitsWarper(sampling.temperature)]
        if sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        self.prompt_tokens = prompt_tokens
        generators = (torch.Generator().manual_seed(seed) for seed in seeds)
        drawn = [torch.rand(max_new_tokens, generator=each, dtype=torch.float64) for each in generators]
        self.drawn = torch.stack(drawn)  # outputs x tokens, from 0 to 1

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """The logits of the next tokens, outputs x vocabulary: 0 for the drawn ones, else minus infinity."""
        scores = scores.float()
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        ordered, tokens = scores.sort(dim=-1, descending=True)  # similar models draw similar tokens
        cumulative = ordered.softmax(dim=-1).double().cumsum(dim=-1)
        wanted = self.drawn[:, input_ids.shape[1] - self.prompt_tokens, None].to(scores.device) * cumulative[:, -1:]
        place = torch.searchsorted(cumulative, wanted, right=True).clamp_max(scores.shape[1] - 1)
        chosen = tokens.gather(-1, place)
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)
