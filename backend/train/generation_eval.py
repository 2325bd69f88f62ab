"""Outputs that the model generates for eval examples before and after training, compared with the references."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
)

from backend import registry
from backend.config import RunSpec
from backend.runs import GENERATIONS, generations
from backend.runs.files import write_json
from backend.train import end_tokens, text_metrics, verify
from backend.train.completion_start import last_completion
from backend.train.context import TrainContext
from backend.train.device import ProcessGroup
from backend.train.examples import ConvertedExample
from backend.train.run_log import TrainError
from backend.train.seeded_sampling import Sampling, SeededSampling
from backend.train.templates import ChatTokenizer, UnsupportedConversation
from backend.train.unsharded import unsharded_model
from backend.wording import counted

BEFORE = "before.json"  # in the run's folder: the outputs before training


@dataclass(frozen=True)
class EvalPrompt:
    """`text` is what the model completes, `prompt` its last message for display, `reference` the completion that
    it is trained on, decoded like an output; `plain` is all before it without the chat template, for a judge, whose own
    template may have the same special tokens; '' without a judge."""

    text: str
    prompt: str
    reference: str
    plain: str


def eval_prompts(
    chat: ChatTokenizer, examples: Sequence[ConvertedExample], for_judge: bool = False
) -> list[EvalPrompt]:
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
        plain = plain_text(before, example.value) if for_judge else ""
        prompts.append(EvalPrompt(text, shown[-1] if shown else "", reference, plain))
    return prompts


def plain_text(turns: Sequence[Mapping[str, Any]], example: Mapping[str, Any]) -> str:
    """The turns as text: the content of a single one, otherwise each with its role and tool calls, after the tools
    and documents."""
    given = {name: example[name] for name in ("tools", "documents") if example.get(name)}
    if len(turns) == 1 and not given:
        return str(turns[0]["content"])
    parts = [f"{name}: {json.dumps(value, ensure_ascii=False, default=str)}" for name, value in given.items()]
    for turn in turns:
        calls = json.dumps(turn["tool_calls"], ensure_ascii=False, default=str) if turn.get("tool_calls") else ""
        said = f"{turn['content']} {calls}".strip()
        parts.append(f"{turn['role']}: {said}")
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Generated:
    """An output; `ended`: whether a stop token ended it, not the limit."""

    text: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Generator:
    """Generates greedily, `batch_size` prompts at a time, at most `max_new_tokens` each. `tensor_parallel_size` ranks
    in a row hold one model and generate together. `ends`: the stop tokens; None: those of model and tokenizer.
    `sampling`: sample instead; then each prompt needs a seed."""

    tokenizer: Any
    group: ProcessGroup
    batch_size: int
    max_new_tokens: int
    dtype: torch.dtype
    tensor_parallel_size: int = 1
    ends: frozenset[int] | None = None
    sampling: Sampling | None = None

    @classmethod
    def create(
        cls, spec: RunSpec, tokenizer: Any, group: ProcessGroup, dtype: torch.dtype, tensor_parallel_size: int = 1
    ) -> Generator:
        """A generator with the options of `spec`."""
        batch_size, longest = spec.eval.per_device_eval_batch_size, spec.eval.max_new_tokens
        return cls(tokenizer, group, batch_size, longest, dtype, tensor_parallel_size)

    def generate(
        self, model: Any, prompts: Sequence[EvalPrompt], tick: Callable[[int, int], bool], seeds: Sequence[int] = ()
    ) -> list[Generated]:
        """The outputs in the order of `prompts`, sampled with their `seeds`; the ranks share the work. If `tick`
        returns False, the remaining outputs are empty. `tick` counts tokens: an output that ends early counts as one of
        max_new_tokens."""
        size, world = self.tensor_parallel_size, self.group.world
        mine = list(range(self.group.rank // size, len(prompts), world // size))
        mine.sort(key=lambda number: len(prompts[number].text))  # similar lengths in a batch: less padding
        most = -(-len(prompts) * size // world)  # equal on all ranks, which agree after each batch
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
                texts, drawn = [prompts[n].text for n in numbers], [seeds[n] for n in numbers if self.sampling]
                outputs.update(zip(numbers, self._batch(model, texts, count, drawn), strict=True))
            stop = not tick(len(outputs) * self.max_new_tokens, total)
            if self.group.agree(stop) if size > 1 else stop:
                break
        model.train(training)
        gathered = {number: output for part in self.group.gather(outputs) for number, output in part.items()}
        return [gathered.get(number, Generated()) for number in range(len(prompts))]

    def shortened(self, model: Any, prompts: Sequence[EvalPrompt]) -> str:
        """Which outputs may be shorter than max_new_tokens, a sentence; '' if none."""
        most = verify.position_limit(model.config.get_text_config())
        texts = [prompt.text for prompt in prompts] if most else []
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        if not (count := sum(len(each) + self.max_new_tokens > most for each in ids)):
            return ""
        return (
            f"The model has {most:,} position embeddings. {count:,} of {counted(len(prompts), 'prompt')} would need "
            "more with the longest output, so their outputs end at the last position."
        )

    def _count(self, tick: Callable[[int, int], bool], before: int, outputs: int, total: int, new: int) -> bool:
        """Count the `new` tokens of each output of a batch. Returns whether to continue; ranks that generate together
        agree on that only after each batch."""
        return tick(before + new * outputs, total) or self.tensor_parallel_size > 1

    def _batch(
        self, model: Any, texts: list[str], count: Callable[[int], bool], seeds: Sequence[int]
    ) -> list[Generated]:
        batch = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        ).to(model.device)
        ends, prompt_tokens, limit = self._ends(model), batch["input_ids"].shape[1], self.max_new_tokens
        if most := verify.position_limit(model.config.get_text_config()):
            if len(texts) > 1 and prompt_tokens + limit > most:  # padding must not shorten the outputs of others
                each = [self._batch(model, [text], count, seeds[n : n + 1]) for n, text in enumerate(texts)]
                return [output for outputs in each for output in outputs]
            limit = min(limit, most - prompt_tokens)
        if limit < 1:
            return [Generated()]
        low = self.dtype != torch.float32
        cast = torch.autocast(model.device.type, dtype=self.dtype) if low else contextlib.nullcontext()
        with torch.no_grad(), cast:  # not inference_mode, which fp8 layers do not support
            generated = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=self._config(ends, limit),
                logits_processor=self._processors(seeds, prompt_tokens),
                stopping_criteria=StoppingCriteriaList([_EachToken(prompt_tokens, count)]),
                synced_gpus=False,  # each rank has whole weights, so no rank waits for another's outputs
                **without_router_loss(model),
            )
        new = generated[:, prompt_tokens:]
        texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        ended = [not ends.isdisjoint(ids) for ids in new.tolist()]
        return [Generated(text.strip(), has_ended) for text, has_ended in zip(texts, ended, strict=True)]

    def _processors(self, seeds: Sequence[int], prompt_tokens: int) -> LogitsProcessorList:
        if self.sampling is None:
            return LogitsProcessorList()
        return LogitsProcessorList([SeededSampling(self.sampling, seeds, prompt_tokens, self.max_new_tokens)])

    def _ends(self, model: Any) -> frozenset[int]:
        if self.ends is not None:
            return self.ends
        return frozenset(end_tokens.stop_tokens(model.generation_config, self.tokenizer))

    def _config(self, ends: frozenset[int], limit: int) -> OwnSettings:
        return OwnSettings(
            do_sample=False,
            max_new_tokens=limit,
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


class OwnSettings(GenerationConfig):
    """Settings of `generate` that the model's own generation config does not complete: many models have a repetition
    penalty there, which also counts the padding of a batch, so that an output would depend on the other prompts."""

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **values: Any) -> dict[str, Any]:
        """Same as in the library, except for the update with the model's own config, the only one with custom
        entries."""
        if defaults_only and allow_custom_entries:
            return {}
        left: dict[str, Any] = super().update(defaults_only, allow_custom_entries, **values)
        return left


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
    """Generates outputs for the eval prompts before and after training, and at each evaluation during training if
    eval.generate_during_eval is on. Without prompts it does nothing."""

    trainer: Any  # set afterwards: the trainer is constructed with its callbacks

    def __init__(self, context: TrainContext, generator: Generator, prompts: Sequence[EvalPrompt]) -> None:
        self.context, self.generator, self.prompts = context, generator, prompts
        self.references = [prompt.reference for prompt in prompts]
        self.before: list[str] = []
        self.is_training, self.last_step = False, 0  # the last step whose scores are in the metrics

    @property
    def is_timeline(self) -> bool:
        """Whether the outputs during training are saved."""
        return bool(self.prompts) and self.context.spec.eval.generate_during_eval

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Generate before the first step, once the engine has started; a resumed run loads what was saved."""
        if not self.prompts:
            return
        context = self.context
        save, own = context.spec.save, load_before(context.folder, self.prompts)
        known = own
        if own is None and save.resume_from == "path":  # the outputs of the run that this one continues
            known = load_before(Path(save.resume_path).resolve().parent.parent, self.prompts)
        before: list[str] | None = context.group.share(known)
        first = (
            0 if before is not None else state.global_step
        )  # not 0 if the prompts have changed since the first start
        when = f"after step {first}, since those before training are not known" if first else "before training"
        self.before = self._generate("before", when) if before is None else before
        if context.group.rank == 0 and own is None:
            save_before(context.folder, self.prompts, self.before)
        if self.is_timeline and context.group.rank == 0:
            shown = [{"prompt": prompt.prompt, "reference": prompt.reference} for prompt in self.prompts]
            if first not in self._saving(lambda: generations.begin(context.folder, shown, state.global_step), [first]):
                self._save(first, self.before)
        self.is_training, self.last_step = True, state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the outputs during training: later evaluations are those of `evaluate_after`."""
        self.is_training = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Generate during training, but not after the last step, where `evaluate_after` does. Outputs that a stop cuts
        off are not saved: the run ends after its next step."""
        if not self.is_timeline or not self.is_training or state.global_step >= state.max_steps:
            return
        outputs = self._generate("during", f"after step {state.global_step}")
        if not self.context.group.agree(self.context.run_log.stop_requested()) and self.context.group.rank == 0:
            self._save(state.global_step, outputs)

    def evaluate_after(self) -> dict[str, Any]:
        """Generate again. Returns the outputs side by side, and each score before and after."""
        if not self.prompts:
            return {"exact_match_before": None, "exact_match_after": None, "samples": []}
        outputs, state = self._generate("after", "after training"), self.trainer.state
        samples = [
            {"prompt": p.prompt, "reference": p.reference, "before": before, "after": after}
            for p, before, after in zip(self.prompts, self.before, outputs, strict=True)
        ]
        sides = {
            "before": text_metrics.scores(self.references, self.before),
            "after": text_metrics.scores(self.references, outputs),
        }
        if self.is_timeline and self.context.group.rank == 0:
            self._append(None, outputs, sides["after"])
            # The best model may be that of an earlier step.
            if self.last_step < state.global_step and not self.context.spec.save.load_best_model_at_end:
                self._write_metrics(state.global_step, sides["after"])
        scores = {f"{name}_{side}": value for side, found in sides.items() for name, value in found.items()}
        return {**scores, "samples": samples}

    def _generate(self, name: str, when: str) -> list[str]:
        """The outputs. `name` is that of the phase: before, during or after. Raises Stopped, except during training,
        where the outputs are then incomplete."""
        context, phase, examples = self.context, f"generating {name}", counted(len(self.prompts), "eval example")
        context.run_log.info(f"Generating outputs for {examples} {when}.")
        tick = context.tick(phase, f"Generating outputs {when}", _unit(context.group.world))
        tick(0, len(self.prompts) * self.generator.max_new_tokens if context.group.world == 1 else 0)
        with unsharded_model(context.spec, self.trainer) as model:
            if note := self.generator.shortened(model, self.prompts):
                context.run_log.info(note)
            outputs = [output.text for output in self.generator.generate(model, self.prompts, tick)]
        if name == "during" and context.run_log.stop_requested():
            return outputs
        if name != "during":
            context.check_stop()
        share = text_metrics.exact_match(self.references, outputs)
        context.run_log.info(f"Exact match: {share:.0%} of {examples}.")
        return outputs

    def _save(self, step: int, outputs: Sequence[str]) -> None:
        """Add the outputs of a step to the timeline, and their scores to the metrics. Only rank 0 does."""
        scores = text_metrics.scores(self.references, outputs)
        self._append(step, outputs, scores)
        self._write_metrics(step, scores)

    def _append(self, step: int | None, outputs: Sequence[str], scores: Mapping[str, float]) -> None:
        correct = [text_metrics.is_exact_match(*pair) for pair in zip(self.references, outputs, strict=True)]
        each = {"outputs": outputs, "correct": correct, "rouge_l": text_metrics.each_rouge_l(self.references, outputs)}
        line = {"step": step, **each, "scores": scores}
        self._saving(lambda: generations.append(self.context.folder, line), None)

    def _write_metrics(self, step: int, scores: Mapping[str, float]) -> None:
        found = {f"eval_{name}": value for name, value in scores.items()}
        self.context.run_log.metrics({"step": step, "time": time.time(), **found})
        self.last_step = step

    def _saving(self, write: Callable[[], Any], otherwise: Any) -> Any:
        """What `write` returns. A full disk must not end training: the outputs are left out, and the log says so."""
        try:
            return write()
        except OSError as error:
            self.context.run_log.info(f"{GENERATIONS} cannot be written ({error.strerror}). Training continues.")
            return otherwise


def _unit(world: int) -> str:
    """What progress counts: the tokens of rank 0, which are all of them only if it is the only rank."""
    return "token" if world == 1 else "token of rank 0"
