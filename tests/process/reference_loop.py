"""A training loop in plain PyTorch that the trainer is compared with.

It imports only torch and transformers, nothing from Footplate, TRL, accelerate or peft; the losses are written from
their papers. A loss is a sum of means: `weights` of an objective counts what each mean is over (trained tokens,
examples), `sums` has the sums. Ranks, shards and packing do not occur: W ranks train on W times as many examples, and
packed examples are separate sequences.

SFT and pretraining take the means over all trained tokens of the optimizer step. The stages of preferences take them
over each batch of a rank and average those, as TRL does: where the batches of a step differ in size or in their number
of tokens, this is not the mean over the step.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """A sequence, and which of its tokens are trained: predicted from the tokens before them, with a loss. `weights`:
    of each token in the mean of SFT; () if all are equal."""

    ids: list[int]
    trained: list[bool]
    weights: Sequence[float] = ()

    @property
    def trained_count(self) -> int:
        """Number of trained tokens. Nothing predicts the first token, so it is never one of them."""
        return sum(self.trained[1:])

    @property
    def trained_weights(self) -> Tensor:
        """The weights of the trained tokens."""
        weights = torch.tensor(self.weights or [1.0] * len(self.ids))
        return weights[1:][torch.tensor(self.trained[1:])]

    def truncated(self, length: int) -> Tokens:
        """The first `length` tokens."""
        return Tokens(self.ids[:length], self.trained[:length], self.weights[:length])


@dataclass(frozen=True)
class LoRA:
    """An adapter: initial A matrices by name of the linear layer (B starts at 0), and its scale."""

    initial_a: Mapping[str, Tensor]
    alpha: float
    rslora: bool = False
    lr_ratio: float = 1.0  # learning rate of B relative to A (LoRA+)


@dataclass(frozen=True)
class Settings:
    """What is trained, on which examples, and how."""

    model: Path
    rows: Sequence[Row]
    stage: str = "sft"
    loss_on: str = "completions"
    max_length: int = 256
    batch_size: int = 2  # of one rank
    accumulation: int = 1
    data_parallel: int = 1  # ranks with different examples
    steps: int = 3
    seed: int = 42
    shuffled: bool = True
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    warmup_steps: float = 0.0  # a value below 1 is a fraction of all steps
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    trainable: str = ""  # regular expression for the names of the parameters that are not frozen
    lora: LoRA | None = None
    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    sft_loss_weight: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center_rewards_coefficient: float = 0.0
    eval_rows: Sequence[Row] = ()
    eval_batch_size: int = 3


@dataclass
class Trained:
    """What each step reported, and the trained model."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of all steps so far; empty in preference stages
    eval_loss: float = math.nan


# Tokenization


def conversation(tokenizer: Any, messages: Sequence[Any], all_tokens: bool) -> Tokens:
    """A rendered conversation. Trained are all tokens, or each assistant turn from behind the generation prompt to the
    newline behind its end-of-turn token, as in LLaMA-Factory and in TRL's templates. Its weight is that of the turn;
    with 0, it is not trained."""
    render = tokenizer.apply_chat_template
    text, spans = render(messages, tokenize=False), []
    for position, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(messages[:position], tokenize=False, add_generation_prompt=True))
            end = tokenizer.eos_token + "\n"
            spans.append((start, text.index(end, start) + len(end), message.get("weight", 1.0)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = encoded["offset_mapping"]
    weights = [next((w for a, b, w in spans if a <= x and y <= b), float(all_tokens)) for x, y in places]
    return Tokens(list(encoded["input_ids"]), [weight > 0 for weight in weights], weights)


def prompt_and_completion(tokenizer: Any, prompt: Sequence[Any], completion: Sequence[Any]) -> Tokens:
    """Trained is everything that the template renders behind the prompt."""
    text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
    start = len(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return Tokens(list(encoded["input_ids"]), [x >= start for x, _ in encoded["offset_mapping"]])


def text_pieces(tokenizer: Any, text: str, length: int) -> Iterator[Tokens]:
    """A text with an end-of-text token, split into sequences of at most `length` tokens that are trained separately."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    for start in range(0, len(ids), length):
        piece = ids[start : start + length]
        yield Tokens(piece, [True] * len(piece))


# Models


class LoRALinear(nn.Module):
    """y = W x + scale * B A x, where W is frozen (Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, initial_a: Tensor, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.lora_a = nn.Parameter(initial_a.clone())
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, len(initial_a)))

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer plus the scaled adapter."""
        output: Tensor = self.linear(x) + self.scale * functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        return output


def load(settings: Settings) -> nn.Module:
    """The model with its trainable parameters."""
    auto_class: Any = AutoModelForCausalLM
    more: dict[str, Any] = {"dtype": torch.float32}
    if settings.stage == "reward":
        auto_class, more["num_labels"] = AutoModelForSequenceClassification, 1
    torch.manual_seed(settings.seed)  # a score head that the checkpoint lacks is initialized at random
    model: nn.Module = auto_class.from_pretrained(settings.model, **more)
    model.train()
    for name, parameter in model.named_parameters():
        is_head = settings.stage == "reward" and name.startswith("score")
        parameter.requires_grad = is_head or (not settings.lora and bool(re.search(settings.trainable, name)))
    for name, initial_a in (settings.lora.initial_a if settings.lora else {}).items():
        assert settings.lora
        root = math.sqrt(len(initial_a)) if settings.lora.rslora else len(initial_a)
        parent, _, child = name.rpartition(".")
        linear: Any = model.get_submodule(name)
        setattr(model.get_submodule(parent), child, LoRALinear(linear, initial_a, settings.lora.alpha / root))
    return model


def pad(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """Token IDs and attention mask, padded on the right."""
    width = max(len(tokens.ids) for tokens in batch)
    ids = torch.tensor([tokens.ids + [0] * (width - len(tokens.ids)) for tokens in batch])
    mask = torch.tensor([[1] * len(tokens.ids) + [0] * (width - len(tokens.ids)) for tokens in batch])
    return ids, mask


def token_log_probs(model: nn.Module, batch: Sequence[Tokens]) -> list[Tensor]:
    """For each sequence, the log-probabilities of its trained tokens."""
    ids, mask = pad(batch)
    log_probs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    of_tokens = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    kept = [torch.tensor(tokens.trained[1:]) for tokens in batch]
    return [row[: len(keep)][keep] for row, keep in zip(of_tokens, kept, strict=True)]


def last_token_scores(model: Any, batch: Sequence[Tokens]) -> Tensor:
    """The score head's output at the last token of each sequence."""
    ids, mask = pad(batch)
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    scores: Tensor = model.score(hidden[torch.arange(len(ids)), mask.sum(1) - 1])[:, 0]
    return scores


# Losses


class NextToken:
    """SFT and pretraining: the weighted mean of the negative log-likelihoods of the trained tokens.

    `averages_batches`: a step averages the means of its batches. `of_one_rank`: each of them is of one rank.
    """

    averages_batches = False
    of_one_rank = False

    def __init__(self, settings: Settings, tokenizer: Any, reference: nn.Module | None) -> None:
        self.settings, self.tokenizer, self.reference = settings, tokenizer, reference

    def examples(self, rows: Sequence[Row]) -> list[Any]:
        """What is trained on; examples without a trained token are dropped."""
        length, tokenizer = self.settings.max_length, self.tokenizer
        if self.settings.stage == "pretraining":
            return [piece for row in rows for piece in text_pieces(tokenizer, row["text"], length)]
        everything = self.settings.loss_on == "all_tokens"
        all_ = [conversation(tokenizer, row["messages"], everything).truncated(length) for row in rows]
        return [tokens for tokens in all_ if tokens.trained_count]

    def weights(self, batch: Sequence[Any]) -> tuple[float, ...]:
        """What each mean is over."""
        return (sum(tokens.trained_weights.sum().item() for tokens in batch),)

    def sums(self, model: nn.Module, batch: Sequence[Any]) -> tuple[Tensor, ...]:
        """The sum of each mean, differentiable."""
        weights = torch.cat([tokens.trained_weights for tokens in batch])
        return (-(weights * torch.cat(token_log_probs(model, batch))).sum(),)


class Pairs(NextToken):
    """Base of the stages that compare a chosen with a rejected completion: a mean over the pairs."""

    averages_batches = True
    of_one_rank = True

    def examples(self, rows: Sequence[Row]) -> list[Any]:
        pairs = []
        for row in rows:
            both = [prompt_and_completion(self.tokenizer, row["prompt"], row[side]) for side in ("chosen", "rejected")]
            pairs.append(tuple(tokens.truncated(self.settings.max_length) for tokens in both))
        return pairs

    def weights(self, batch: Sequence[Any]) -> tuple[float, ...]:
        return (len(batch),)

    def log_probs(self, model: nn.Module, batch: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probabilities of the tokens of the chosen and of the rejected completions."""
        both = token_log_probs(model, [pair[0] for pair in batch] + [pair[1] for pair in batch])
        return both[: len(batch)], both[len(batch) :]


class DPO(Pairs):
    """DPO (Rafailov et al. 2023) and its other loss functions: `w` and `l` are the log ratios of policy and reference
    of the chosen (winning) and rejected (losing) completions."""

    def weights(self, batch: Sequence[Any]) -> tuple[float, ...]:
        return (len(batch), sum(chosen.trained_count for chosen, _ in batch))

    def sums(self, model: nn.Module, batch: Sequence[Any]) -> tuple[Tensor, ...]:
        assert self.reference
        policy = self.log_probs(model, batch)
        with torch.no_grad():
            reference = self.log_probs(self.reference, batch)
        # The authors of IPO average over the tokens of a completion, since its target margin 1/(2 tau) is fixed.
        reduce = torch.mean if self.settings.loss_type in ("ipo", "sigmoid_norm") else torch.sum
        p_w, p_l = (torch.stack([reduce(one) for one in side]) for side in policy)
        r_w, r_l = (torch.stack([reduce(one) for one in side]) for side in reference)
        loss = self.pair_losses(p_w, p_l, r_w, r_l).sum()
        return loss, -self.settings.sft_loss_weight * torch.cat(policy[0]).sum()

    def pair_losses(self, p_w: Tensor, p_l: Tensor, r_w: Tensor, r_l: Tensor) -> Tensor:
        """The loss of each pair from the log-probabilities of policy (p) and reference (r)."""
        beta, smoothing, kind = self.settings.beta, self.settings.label_smoothing, self.settings.loss_type
        w, l = p_w - r_w, p_l - r_l  # noqa: E741 the letters of the papers
        margin = beta * (w - l)
        up, down = functional.logsigmoid(margin), functional.logsigmoid(-margin)
        if kind in ("aot", "aot_unpaired"):  # Melnyk et al. 2024: sorted quantities are compared, not single pairs
            first, second = (p_w - p_l, r_w - r_l) if kind == "aot" else (w, l)
            gap = beta * (first.sort().values - second.sort().values)
            return -(1 - smoothing) * functional.logsigmoid(gap) - smoothing * functional.logsigmoid(-gap)
        if kind == "exo_pair":  # Ji et al. 2024, equation 16: reverse KL divergence to the smoothed labels
            return up.exp() * (up - math.log(1 - smoothing)) + down.exp() * (down - math.log(smoothing))
        if kind == "discopop":  # Lu et al. 2024: log-ratio modulated loss with temperature 0.05
            share = torch.sigmoid(margin / 0.05)
            return (1 - share) * -up + share * torch.exp(-margin)
        simple = {
            "sigmoid": lambda: -up,
            "sigmoid_norm": lambda: -up,
            "ipo": lambda: (w - l - 1 / (2 * beta)) ** 2,  # Azar et al. 2023, equation 17
            "hinge": lambda: torch.relu(1 - margin),  # Zhao et al. 2023 (SLiC)
            "robust": lambda: (-(1 - smoothing) * up + smoothing * down) / (1 - 2 * smoothing),  # Chowdhury et al. 2024
            "nca_pair": lambda: (
                -functional.logsigmoid(beta * w)
                - (functional.logsigmoid(-beta * w) + functional.logsigmoid(-beta * l)) / 2
            ),  # Chen et al. 2024
            # Jung et al. 2024, without the reward shift delta (a running mean of the rewards), which TRL's DPO trainer
            # no longer has.
            "bco_pair": lambda: -functional.logsigmoid(beta * w) - functional.logsigmoid(-beta * l),
            "sppo_hard": lambda: (w - 1 / (2 * beta)) ** 2 + (l + 1 / (2 * beta)) ** 2,  # Wu et al. 2024
            "apo_zero": lambda: 1 - torch.sigmoid(beta * w) + torch.sigmoid(beta * l),  # D'Oosterlinck et al. 2024
            "apo_down": lambda: torch.sigmoid(beta * w) + 1 - torch.sigmoid(margin),
        }
        return simple[kind]()


class KTO(NextToken):
    """KTO (Ethayarajh et al. 2024): an example is (completion, label, unrelated completion).

    The reference point z0 estimates the KL divergence from unrelated completions, on all ranks: that of the example
    before it in its batch, in an order that is drawn once with Python's random. An example that is alone in the last
    batch belongs to the batch before.
    """

    averages_batches = True

    def examples(self, rows: Sequence[Row]) -> list[Any]:
        """All examples in the order of the training."""
        ordered, size = list(rows), self.settings.batch_size
        if self.settings.shuffled:
            random.Random(self.settings.seed).shuffle(ordered)
        examples = []
        starts = [start for start in range(0, len(ordered), size) if start == 0 or start < len(ordered) - 1]
        for start, end in zip(starts, [*starts[1:], len(ordered)], strict=True):
            batch = ordered[start:end]
            for row, other in zip(batch, [batch[-1], *batch], strict=False):
                texts = (prompt_and_completion(self.tokenizer, row["prompt"], r["completion"]) for r in (row, other))
                examples.append((next(texts), bool(row["label"]), next(texts)))
        return examples

    def weights(self, batch: Sequence[Any]) -> tuple[float, ...]:
        return (len(batch),)

    def log_ratios(self, model: nn.Module, sequences: Sequence[Tokens]) -> Tensor:
        """Summed log-probabilities of policy minus reference."""
        assert self.reference
        policy = torch.stack([one.sum() for one in token_log_probs(model, sequences)])
        with torch.no_grad():
            reference = torch.stack([one.sum() for one in token_log_probs(self.reference, sequences)])
        return policy - reference

    def sums(self, model: nn.Module, batch: Sequence[Any]) -> tuple[Tensor, ...]:
        settings, ratios = self.settings, self.log_ratios(model, [example[0] for example in batch])
        labels = torch.tensor([example[1] for example in batch])
        with torch.no_grad():
            point = self.log_ratios(model, [example[2] for example in batch]).mean().clamp(min=0)
        if settings.loss_type == "apo_zero_unpaired":
            point = torch.tensor(0.0)
        desirable = settings.desirable_weight * (1 - torch.sigmoid(settings.beta * (ratios - point)))
        undesirable = settings.undesirable_weight * (1 - torch.sigmoid(settings.beta * (point - ratios)))
        if settings.loss_type == "apo_zero_unpaired":  # the loss of undesirable examples is sigma(r), the same as above
            assert torch.allclose(undesirable, settings.undesirable_weight * torch.sigmoid(settings.beta * ratios))
        return (torch.where(labels, desirable, undesirable).sum(),)


class ORPO(Pairs):
    """ORPO (Hong et al. 2024): the SFT loss of the chosen sequence plus beta times the odds ratio loss. The SFT loss
    covers the prompt too, as in the code of the authors."""

    def weights(self, batch: Sequence[Any]) -> tuple[float, ...]:
        return (sum(len(chosen.ids) - 1 for chosen, _ in batch), len(batch))

    def sums(self, model: nn.Module, batch: Sequence[Any]) -> tuple[Tensor, ...]:
        sequences = [pair[0] for pair in batch] + [pair[1] for pair in batch]
        everything = token_log_probs(model, [replace(one, trained=[True] * len(one.ids)) for one in sequences])
        completions = [each[torch.tensor(one.trained[1:])] for one, each in zip(sequences, everything, strict=True)]
        means = torch.stack([one.mean() for one in completions])
        w, l = means[: len(batch)], means[len(batch) :]  # noqa: E741
        log_odds = (w - l) - (torch.log1p(-w.exp()) - torch.log1p(-l.exp()))
        nll = -torch.cat(everything[: len(batch)]).sum()
        return nll, -self.settings.beta * functional.logsigmoid(log_odds).sum()


class Reward(Pairs):
    """Reward model (Ouyang et al. 2022; centering: Eisenstein et al. 2023); the score is that of the last token."""

    def sums(self, model: nn.Module, batch: Sequence[Any]) -> tuple[Tensor, ...]:
        scores = last_token_scores(model, [pair[0] for pair in batch] + [pair[1] for pair in batch])
        chosen, rejected = scores[: len(batch)], scores[len(batch) :]
        centered = self.settings.center_rewards_coefficient * (chosen + rejected) ** 2
        return ((centered - functional.logsigmoid(chosen - rejected)).sum(),)


OBJECTIVES = {"sft": NextToken, "pretraining": NextToken, "dpo": DPO, "kto": KTO, "orpo": ORPO, "reward": Reward}


# The loop


def learning_rate_factor(settings: Settings, step: int) -> float:
    """The learning rate of a step (from 0) relative to the peak."""
    warmup = settings.warmup_steps
    warmup = math.ceil(settings.steps * warmup) if warmup < 1 else int(warmup)
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    return {
        "constant_with_warmup": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[settings.schedule]


def epoch_order(settings: Settings, count: int, epoch: int) -> list[int]:
    """The order of the examples: a permutation seeded with seed + epoch (torch's RandomSampler); KTO's is fixed.

    Several ranks take turns batch by batch. So that all have the same number of full batches, the order continues from
    its start (accelerate's `even_batches`); one process has a smaller last batch instead.
    """
    generator = torch.Generator().manual_seed(settings.seed + epoch)
    order = torch.randperm(count, generator=generator).tolist()
    if settings.stage == "kto" or not settings.shuffled:
        order = list(range(count))
    if settings.data_parallel > 1:
        missing = -count % (settings.batch_size * settings.data_parallel)
        order += (order * missing)[:missing]
    return order


def steps(settings: Settings, examples: Sequence[Any], of_one_rank: bool) -> Iterator[list[list[Any]]]:
    """The batches of each optimizer step: those of each rank, or each with the examples of all ranks."""
    done, epoch, ranks = 0, 0, settings.data_parallel
    size, per_step = settings.batch_size, settings.accumulation
    size, per_step = (size, per_step * ranks) if of_one_rank else (size * ranks, per_step)
    while True:
        order = [examples[index] for index in epoch_order(settings, len(examples), epoch)]
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        for start in range(0, len(batches), per_step):
            yield batches[start : start + per_step]
            done += 1
            if done == settings.steps:
                return
        epoch += 1


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: not to biases and the weights of norms, which are vectors."""
    return parameter.ndim > 1


def optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with weight decay and the learning rates of LoRA+."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ratio = settings.lora.lr_ratio if settings.lora and name.endswith("lora_b") else 1.0
            decay = settings.weight_decay if decays(parameter) else 0.0
            groups.setdefault((ratio, decay), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "lr": ratio * settings.learning_rate}
            for (ratio, decay), parameters in groups.items()
        ],
        betas=settings.betas,
        eps=settings.epsilon,
    )


def total_weights(objective: NextToken, batches: Sequence[Any]) -> list[float]:
    """What each mean of an objective is over, for all micro-batches of a step."""
    return [sum(each) for each in zip(*(objective.weights(batch) for batch in batches), strict=True)]


def evaluate(settings: Settings, objective: NextToken, model: nn.Module, examples: Sequence[Any]) -> float:
    """The eval loss: of SFT and pretraining, the mean over the trained tokens of all examples. For preferences, a mean
    over the examples as transformers defines it: each counts with the loss of its batch; with several ranks, the last
    batches are completed with the first examples, and only the original examples count.
    """
    if not isinstance(objective, Pairs):
        with torch.no_grad():
            ((loss,), (count,)) = objective.sums(model, examples), objective.weights(examples)
        return loss.item() / count
    size, ranks = settings.eval_batch_size, settings.data_parallel
    padded, found = [*examples, *examples[: -len(examples) % (size * ranks) if ranks > 1 else 0]], list[float]()
    for start in range(0, len(padded), size):
        batch = padded[start : start + size]
        with torch.no_grad():
            parts = zip(objective.sums(model, batch), objective.weights(batch), strict=True)
            found += [sum((part / weight).item() for part, weight in parts)] * len(batch)
    return sum(found[: len(examples)]) / len(examples)


def train(settings: Settings) -> Trained:
    """Train as `settings` say."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    model = load(settings)
    reference = load(replace(settings, lora=None)) if settings.stage in ("dpo", "kto") else None
    objective = OBJECTIVES[settings.stage](settings, tokenizer, reference)
    adamw, trained = optimizer(settings, model), Trained(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    peaks = [group["lr"] for group in adamw.param_groups]
    for step, batches in enumerate(steps(settings, objective.examples(settings.rows), objective.of_one_rank)):
        loss, weights = 0.0, total_weights(objective, batches)
        for batch in batches:
            if objective.averages_batches:
                weights = [len(batches) * weight for weight in objective.weights(batch)]
            of_batch = sum(part / weight for part, weight in zip(objective.sums(model, batch), weights, strict=True))
            assert isinstance(of_batch, Tensor)
            of_batch.backward()
            loss += of_batch.item()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
        for parameter in parameters:
            if parameter.grad is not None and norm > settings.max_grad_norm > 0:
                parameter.grad *= settings.max_grad_norm / norm
        for group, peak in zip(adamw.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate_factor(settings, step)
        trained.losses.append(loss)
        if settings.stage in ("sft", "pretraining"):
            count = sum(len(each.ids) for batch in batches for each in batch)
            trained.tokens.append(count + sum(trained.tokens[-1:]))
        trained.grad_norms.append(norm)
        trained.learning_rates.append(adamw.param_groups[0]["lr"])
        adamw.step()
        adamw.zero_grad()
    if settings.eval_rows:
        trained.eval_loss = evaluate(settings, objective, model, objective.examples(settings.eval_rows))
    return trained
