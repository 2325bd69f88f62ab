"""Outputs that the model generates for eval examples before and after training, compared with the references."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList, TrainerCallback

from backend import registry
from backend.config import RunSpec
from backend.runs.files import write_json
from backend.train import end_tokens, text_metrics
from backend.train.completion_start import last_completion
from backend.train.context import TrainContext
from backend.train.device import ProcessGroup
from backend.train.examples import ConvertedExample
from backend.train.run_log import TrainError
from backend.train.templates import ChatTokenizer, UnsupportedConversation
from backend.train.unsharded import unsharded_model
from backend.wording import counted

BEFORE = "before.json"  # in the run's folder: the outputs before training


@dataclass(frozen=True)
class EvalPrompt:
    """`text` is what the model completes, `prompt` the last message of it for display, `reference` the completion that
    it is trained on, decoded like an output."""

    text: str
    prompt: str
    reference: str


def eval_prompts(chat: ChatTokenizer, examples: Sequence[ConvertedExample]) -> list[EvalPrompt]:
    """One prompt per example: everything before its last completion. Raises TrainError."""
    prompts = []
    for example in examples:
        before, completion = last_completion(example.value)
        try:
            text = chat.render_prompt(before, example.value)
            target = chat.tokenize_completions(before, [completion], example.value)[1][0]
        except UnsupportedConversation as error:
            raise TrainError(f"{example.location}: {error}.") from error
        shown = [message["content"] for message in before if message["role"] != "system"]
        reference = chat.tokenizer.decode(target, skip_special_tokens=True).strip()
        prompts.append(EvalPrompt(text, shown[-1] if shown else "", reference))
    return prompts


@dataclass(frozen=True)
class Generated:
    """An output; `ended`: whether a stop token ended it, not the limit."""

    text: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Generator:
    """Generates greedily, `batch_size` prompts at a time, at most `max_new_tokens` each. `tensor_parallel_size` ranks
    in a row hold one model and generate together. `ends`: the stop tokens; None: those of model and tokenizer."""

    tokenizer: Any
    group: ProcessGroup
    batch_size: int
    max_new_tokens: int
    dtype: torch.dtype
    tensor_parallel_size: int = 1
    ends: frozenset[int] | None = None

    @classmethod
    def create(
        cls, spec: RunSpec, tokenizer: Any, group: ProcessGroup, dtype: torch.dtype, tensor_parallel_size: int = 1
    ) -> Generator:
        """With the options of `spec`."""
        batch_size, longest = spec.eval.per_device_eval_batch_size, spec.eval.max_new_tokens
        return cls(tokenizer, group, batch_size, longest, dtype, tensor_parallel_size)

    def generate(self, model: Any, prompts: Sequence[EvalPrompt], tick: Callable[[int, int], bool]) -> list[Generated]:
        """The outputs in the order of `prompts`; the ranks share the work. If `tick` returns False, the remaining
        outputs are empty. `tick` counts tokens: an output that ends early counts as one of max_new_tokens."""
        size, world = self.tensor_parallel_size, self.group.world
        mine = list(range(self.group.rank // size, len(prompts), world // size))
        mine.sort(key=lambda number: len(prompts[number].text))  # similar lengths in a batch: less padding
        most = -(-len(prompts) * size // world)  # ranks that agree on each batch have as many
        training = model.training
        outputs: dict[int, Generated] = {}
        model.eval()
        total = len(mine) * self.max_new_tokens
        tick(0, total)
        together = 1 if model.config.model_type in registry.NO_PADDING else self.batch_size
        for start in range(0, most, together):
            if numbers := mine[start : start + together]:
                before = len(outputs) * self.max_new_tokens
                count = partial(self._count, tick, before, len(numbers), total)
                texts = [prompts[number].text for number in numbers]
                outputs.update(zip(numbers, self._batch(model, texts, count), strict=True))
            stop = not tick(len(outputs) * self.max_new_tokens, total)
            if self.group.agree(stop) if size > 1 else stop:
                break
        model.train(training)
        gathered = {number: output for part in self.group.gather(outputs) for number, output in part.items()}
        return [gathered.get(number, Generated()) for number in range(len(prompts))]

    def _count(self, tick: Callable[[int, int], bool], before: int, outputs: int, total: int, new: int) -> bool:
        """Count the `new` tokens of each output of a batch. Returns whether to continue; ranks that generate together
        agree on that only after each batch."""
        return tick(before + new * outputs, total) or self.tensor_parallel_size > 1

    def _batch(self, model: Any, texts: list[str], count: Callable[[int], bool]) -> list[Generated]:
        batch = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        ).to(model.device)
        low = self.dtype != torch.float32
        cast = torch.autocast(model.device.type, dtype=self.dtype) if low else contextlib.nullcontext()
        ends = self._ends(model)
        with torch.no_grad(), cast:  # not inference_mode, which fp8 layers do not support
            generated = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=self._config(ends),
                stopping_criteria=StoppingCriteriaList([_EachToken(batch["input_ids"].shape[1], count)]),
                synced_gpus=False,  # each rank has whole weights, so no rank waits for another's outputs
                **without_router_loss(model),
            )
        new = generated[:, batch["input_ids"].shape[1] :]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        ended = [not ends.isdisjoint(ids) for ids in new.tolist()]
        return [Generated(text.strip(), has_ended) for text, has_ended in zip(texts, ended, strict=True)]

    def _ends(self, model: Any) -> frozenset[int]:
        if self.ends is not None:
            return self.ends
        return frozenset(end_tokens.stop_tokens(model.generation_config, self.tokenizer))

    def _config(self, ends: frozenset[int]) -> GenerationConfig:
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=self.tokenizer.pad_token_id,
            use_cache=True,
        )


class _EachToken(StoppingCriteria):
    """Calls `count` with the number of tokens that each output has after the prompt, and ends the batch if it returns
    False."""

    def __init__(self, prompt_tokens: int, count: Callable[[int], bool]) -> None:
        self.prompt_tokens, self.count = prompt_tokens, count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ends = not self.count(input_ids.shape[1] - self.prompt_tokens)
        return torch.full((input_ids.shape[0],), ends, dtype=torch.bool, device=input_ids.device)


def without_router_loss(model: Any) -> dict[str, bool]:
    """Arguments of `generate`: the router loss of a mixture of experts is computed over whole sequences, but generation
    is token by token."""
    known = hasattr(model.config.get_text_config(), "output_router_logits")
    return {"output_router_logits": False} if known else {}


def save_before(folder: Path, prompts: Sequence[EvalPrompt], outputs: Sequence[str]) -> None:
    """Save the outputs from before training at once: a resumed run needs them."""
    write_json(folder / BEFORE, [[p.text, output] for p, output in zip(prompts, outputs, strict=True)])


def load_before(folder: Path, prompts: Sequence[EvalPrompt]) -> list[str] | None:
    """The outputs from before training, if they were saved for these prompts."""
    try:
        saved = dict(json.loads((folder / BEFORE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return [saved[p.text] for p in prompts] if all(p.text in saved for p in prompts) else None


class GenerationEvalCallback(TrainerCallback):
    """Generates outputs for the eval prompts before and after training. Without prompts it does nothing."""

    trainer: Any  # set afterwards: the trainer is constructed with its callbacks

    def __init__(self, context: TrainContext, generator: Generator, prompts: Sequence[EvalPrompt]) -> None:
        self.context, self.generator, self.prompts = context, generator, prompts
        self.before: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Generate before the first step, once the engine has started; a resumed run loads what was saved."""
        if not self.prompts:
            return
        context = self.context
        save, own = context.spec.save, load_before(context.folder, self.prompts)
        known = own
        if own is None and save.resume_from == "path":  # of the run that this one continues
            known = load_before(Path(save.resume_path).resolve().parent.parent, self.prompts)
        before: list[str] | None = context.group.share(known)
        self.before = self._generate("before") if before is None else before
        if context.group.rank == 0 and own is None:
            save_before(context.folder, self.prompts, self.before)

    def evaluate_after(self) -> dict[str, Any]:
        """Generate again. Returns the outputs side by side, and each score before and after."""
        if not self.prompts:
            return {"exact_match_before": None, "exact_match_after": None, "samples": []}
        outputs = self._generate("after")
        references = [prompt.reference for prompt in self.prompts]
        samples = [
            {"prompt": p.prompt, "reference": p.reference, "before": before, "after": after}
            for p, before, after in zip(self.prompts, self.before, outputs, strict=True)
        ]
        sides = {
            "before": text_metrics.scores(references, self.before),
            "after": text_metrics.scores(references, outputs),
        }
        scores = {f"{name}_{side}": value for side, found in sides.items() for name, value in found.items()}
        return {**scores, "samples": samples}

    def _generate(self, when: str) -> list[str]:
        """`when`: before or after training."""
        context, phase, examples = self.context, f"generating {when}", counted(len(self.prompts), "eval example")
        context.run_log.info(f"Generating outputs for {examples} {when} training.")
        tick = context.tick(phase, f"Generating outputs {when} training", _unit(context.group.world))
        tick(0, len(self.prompts) * self.generator.max_new_tokens if context.group.world == 1 else 0)
        with unsharded_model(context.spec, self.trainer) as model:
            outputs = [output.text for output in self.generator.generate(model, self.prompts, tick)]
        context.check_stop()
        share = text_metrics.exact_match([prompt.reference for prompt in self.prompts], outputs)
        context.run_log.info(f"Exact match: {share:.0%} of {examples}.")
        return outputs


def _unit(world: int) -> str:
    """What progress counts: the tokens of rank 0, which are all of them only if it is the only rank."""
    return "token" if world == 1 else "token of rank 0"
