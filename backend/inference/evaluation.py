"""The process of an evaluation: the loss of both models on each example, their outputs, and the intervals of the
difference. Each result is written at once, so that a stopped evaluation can continue.

Outputs are generated as training generates them for validation examples, so both have the same scores.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from backend import registry
from backend.inference import custom_scores, examples, generation, judged
from backend.inference.custom_scores import Custom
from backend.inference.example_scores import NAMES, ExampleScores
from backend.inference.examples import Item
from backend.inference.loading import Loaded, Models
from backend.models import evaluation, intervals
from backend.models.chat_files import BASE, SIDES, TUNED, Lines, append
from backend.models.evaluation import EXAMPLES, OUTPUTS, SCORES_FILE, Settings
from backend.runs import EVALUATED, FORGETTING, GENERAL_LOSS, LOCK, MODEL, RESULT, throughput
from backend.runs.files import write_json
from backend.runs.folder import Run
from backend.train.device import ProcessGroup
from backend.train.generation_eval import Generated, Generator
from backend.train.run_log import RunLog, Stopped, TrainError
from backend.train.seeded_sampling import Sampling
from backend.train.templates import IGNORE_INDEX
from backend.wording import counted

NICENESS = 5  # on a CPU, which other programs need at the same time
MAX_BATCH_TOKENS = 4096  # tokens with logits in memory at a time, unless a single example has more
LEFT_AFTER, LEFT_PART = 10.0, 0.02  # the remaining time is shown after so many seconds and this part of the work
LOSS_WORK = 8  # the loss of an example is about as much work as this many tokens of an output
JUDGE_WORK = 256  # likewise for the two requests to a judge about a pair of outputs


class Evaluation:
    """The evaluation in `folder`, which is that of a job of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, RunLog(folder)
        job = Run(folder)
        self.settings: Settings = evaluation.read_settings(folder)
        self.started = (folder / LOCK).stat().st_mtime
        self.run = Run(job.path.parent.parent)
        self.models = Models(self.run, lambda text: self._phase("loading model", text), one_at_a_time=True)
        if "cpu" in job.plan().devices:
            os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        self.found: dict[tuple[str, str], dict[str, Any]] = {}  # (side, content) -> loss, tokens
        self.outputs: dict[tuple[str, str], dict[int, Generated]] = {}  # (side, content) -> each sample
        self.generated, self.generation_seconds = 0, 0.0  # outputs and seconds of this start
        self.custom: Sequence[Custom] = ()
        self.scores = ExampleScores(self.settings, self.custom)
        self.model_changed = 0  # when the final model was saved
        self.done = self.models_work = self.total = 0  # work, in tokens of outputs; that of both models, and all
        self.began: tuple[float, int] | None = None  # when the models or the judge began, and the work done by then

    def run_all(self) -> None:
        """Evaluate, and write the result. Raises TrainError, Stopped."""
        # First, so that an error in a score file is reported at once.
        with custom_scores.running(self.settings, self._check_stop, self.folder) as self.custom:
            self.scores = ExampleScores(self.settings, self.custom)
            self._run_all()

    def _run_all(self) -> None:
        self._phase("reading data", "Reading the examples.")
        tokenizer = self.models.tokenizer(self.settings.step)  # errors in the data come before the models are loaded
        items = examples.read(self.models.spec, self.settings, tokenizer, self.log.info)
        trained = self.models.load(self.settings.step, TUNED)
        for line in Lines(self.folder / OUTPUTS).read():
            self._keep(line)
        own = sum(not item.is_general for item in items)
        self.models_work = len(SIDES) * sum(self._work(item) for item in items)
        self.total = self.models_work + self._judge_work() * own
        self.done = sum(self._kept_work(side, item) for side in SIDES for item in items)
        self.model_changed = (self.run.path / MODEL).stat().st_mtime_ns if self.settings.step is None else 0
        ends = frozenset(generation.stop_tokens(trained))  # for both models, as in training before its first step
        del trained
        for side in SIDES:
            self._use(side, items, ends)
        rows = self._rows([item for item in items if not item.is_general])
        write_json(self.folder / EXAMPLES, rows)
        write_json(self.folder / SCORES_FILE, self._numbers(items, rows))
        result = self._result(items, rows)
        write_json(self.folder / RESULT, {**result, "seconds": round(time.time() - self.started, 1)})
        self._tell_list(result["comparisons"])
        for each in result["comparisons"]:
            self.log.info(each["sentence"])
        self.log.start_phase("done", "The evaluation is complete.", fraction=1.0)

    def _tell_list(self, comparisons: Sequence[dict[str, Any]]) -> None:
        """Write what the list of runs shows of the final model."""
        job = Run(self.folder)  # found again, since its run may have been renamed
        for each in comparisons if self.settings.step is None else ():
            if each["name"] == GENERAL_LOSS:
                found = {GENERAL_LOSS: each["trained"], FORGETTING: each["trained"] - each["base"]}
                write_json(job.path.parent.parent / EVALUATED, {"job": job.id, "model": self.model_changed, **found})

    def _phase(self, name: str, text: str) -> None:
        self._check_stop()
        self.log.start_phase(name, text)

    def _check_stop(self) -> None:
        if self.log.stop_requested():
            raise Stopped

    def _work(self, item: Item) -> int:
        return LOSS_WORK + (self.settings.max_new_tokens * self.settings.samples_per_prompt if item.prompt else 0)

    def _kept_work(self, side: str, item: Item) -> int:
        """The work that an earlier start has done. It counts before this start begins, whose speed it says nothing
        about."""
        kept = self.outputs.get((side, item.content), ()) if item.prompt else ()
        samples = sum(sample < self.settings.samples_per_prompt for sample in kept)
        return LOSS_WORK * self._has_loss(side, item) + self.settings.max_new_tokens * samples

    def _has_loss(self, side: str, item: Item) -> bool:
        return "loss" in self.found.get((side, item.content), ())

    def _judge_work(self) -> int:
        """Of an example."""
        return JUDGE_WORK * self.settings.samples_per_prompt if self.settings.judge else 0

    def _use(self, side: str, items: Sequence[Item], ends: frozenset[int]) -> None:
        """Compute the results of one model, which can be freed afterwards."""
        loaded = self.models.load(self.settings.step, side)
        self._measure(side, loaded, items)
        self._generate(side, loaded, [item for item in items if item.prompt], ends)

    # -- both models ---------------------------------------------------------------------------------------------------

    def _measure(self, side: str, loaded: Loaded, items: Sequence[Item]) -> None:
        """The loss of a model on each item. Raises TrainError, Stopped."""
        waiting = [item for item in items if not self._has_loss(side, item)]
        waiting.sort(key=lambda item: len(item.ids))  # similar lengths in a batch: less padding
        size, done = self.models.spec.eval.per_device_eval_batch_size, len(items) - len(waiting)
        with loaded.active() as model:
            while waiting:
                batch = _batch(waiting, 1 if model.config.model_type in registry.NO_PADDING else size)
                del waiting[: len(batch)]
                for item, (loss, tokens) in zip(batch, _losses(model, loaded.tokenizer, batch), strict=True):
                    self._write({"side": side, "content": item.content, "loss": loss, "tokens": tokens})
                done += len(batch)
                title = f"Computing the loss of the {NAMES[side]} ({done} of {counted(len(items), 'text')})"
                self.done += LOSS_WORK * len(batch)
                self._tick(title, 0)

    def _generate(self, side: str, loaded: Loaded, items: Sequence[Item], ends: frozenset[int]) -> None:
        """The outputs of a model, a batch at a time. Raises Stopped."""
        size, limit = self.models.spec.eval.per_device_eval_batch_size, self.settings.max_new_tokens
        sampling = Sampling(self.settings.temperature, self.settings.top_p) if self.settings.temperature else None
        group, dtype = ProcessGroup(), loaded.dtype
        generator = Generator(loaded.tokenizer, group, size, limit, dtype, ends=ends, sampling=sampling)
        every = [(item, n) for item in items for n in range(self.settings.samples_per_prompt)]
        waiting = [(item, n) for item, n in every if n not in self.outputs.get((side, item.content), ())]
        waiting.sort(key=lambda one: len(one[0].ids))  # similar lengths in a batch: less padding
        started = time.monotonic()
        with loaded.active() as model:
            if note := generator.shortened(model, [item.prompt for item, _ in waiting if item.prompt]):
                self.log.info(note)
            for start in range(0, len(waiting), size):
                batch = waiting[start : start + size]
                ready = len(every) - len(waiting) + start
                title = f"Generating outputs of the {NAMES[side]} ({ready} of {len(every)})"

                def tick(done: int, total: int, title: str = title) -> bool:
                    self._tick(title, done)
                    return True

                prompts = [item.prompt for item, _ in batch if item.prompt]
                outputs = generator.generate(model, prompts, tick, [_seed(item, n) for item, n in batch])
                for (item, n), output in zip(batch, outputs, strict=True):
                    line = {"side": side, "content": item.content, "text": output.text, "ended": output.ended}
                    self._write({**line, "sample": n} if n else line)
                self.done += limit * len(batch)
        self.generated += len(waiting)
        self.generation_seconds += time.monotonic() - started

    def _tick(self, text: str, more: int) -> None:
        """Report the completed work, plus `more` of the work in progress. Raises Stopped."""
        self._check_stop()
        done = self.done + more
        self.log.progress("evaluating", f"{text}{self._left(done)}.", fraction=done / max(1, self.total))

    def _left(self, done: int) -> str:
        """The remaining time as the end of a sentence, once the first part of the work has shown its speed. The speed
        of the models says nothing about that of a judge, which answers afterwards."""
        now, judging = time.monotonic(), done > self.models_work
        start, end = (self.models_work, self.total) if judging else (0, self.models_work)
        if not self.began or (judging and self.began[1] <= self.models_work):
            self.began = now, done
        began, before = self.began
        if now - began <= LEFT_AFTER or done - before <= LEFT_PART * (end - start) or done >= end:
            return ""
        left = throughput.time_left(now - began, (done - start) / (end - start), (before - start) / (end - start))
        return f", {left} before the judge starts" if end < self.total else f", {left}"

    def _write(self, line: dict[str, Any]) -> None:
        append(self.folder / OUTPUTS, line)
        self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        key = str(line.get("side")), str(line.get("content"))
        if "text" in line:
            output = Generated(line["text"], bool(line.get("ended")))
            self.outputs.setdefault(key, {})[line.get("sample", 0)] = output
        else:
            self.found.setdefault(key, {}).update(line)

    # -- what they are compared to -------------------------------------------------------------------------------------

    def _rows(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        rows = []
        for number, item in enumerate(items, 1):
            rows.append(self._row(number, item))
            self._tick(f"Computing scores ({number} of {counted(len(items), 'example')})", self._judge_work() * number)
        self.scores.add_pass_at_k(rows)
        return rows

    def _numbers(self, items: Sequence[Item], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The scores of each item without its texts, as `evaluation.numbers` describes them."""
        scores = iter(row["scores"] for row in rows)
        found = {}
        for item in items:
            base, after = (self.found[side, item.content] for side in (BASE, TUNED))
            general = {GENERAL_LOSS: [_mean(base), _mean(after)]}
            labels = hashlib.sha256(json.dumps([item.ids, item.labels]).encode()).hexdigest()[:16]
            own = general if item.is_general else next(scores)
            found[item.content] = {"scores": own, "tokens": base["tokens"], "labels": labels}
        return found

    def _row(self, number: int, item: Item) -> dict[str, Any]:
        """An example with the outputs and scores of both sides. Raises TrainError, Stopped."""
        base, after = (self.found[side, item.content] for side in (BASE, TUNED))
        loss = {evaluation.LOSS: [_mean(base), _mean(after)]}
        if not item.prompt:
            return {"scores": loss, "prompt": "", "reference": "", "base": "", "trained": ""}
        samples = range(self.settings.samples_per_prompt)
        outputs = {side: [self.outputs[side, item.content][n] for n in samples] for side in (BASE, TUNED)}
        found = self.scores.row(number, item.prompt, outputs)
        return {**found, "scores": {**loss, **found["scores"]}}

    def _result(self, items: Sequence[Item], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        limits = self._limits([item for item in items if not item.is_general])
        comparisons = self.scores.compare(rows)
        counts = {each.name: each.count for each in comparisons}
        for custom in self.custom:
            limits += custom.limits(counts.get(custom.name, 0))
        own, others = ([item for item in items if item.is_general == general] for general in (False, True))
        comparisons += self._compared(evaluation.LOSS, "Loss per token", own)
        comparisons += self._compared(GENERAL_LOSS, "Loss per token on general texts", others)
        return {
            "examples": len(own),
            "generated": sum(bool(item.prompt) for item in own),
            "generated_outputs": self.generated,
            "generation_seconds": round(self.generation_seconds, 1),
            "comparisons": [each.as_json() for each in comparisons],
            "limits": limits,
            **judged.summary(self.custom),
        }

    def _compared(self, name: str, label: str, items: Sequence[Item]) -> list[intervals.Comparison]:
        with_loss = [item for item in items if self.found[BASE, item.content]["tokens"]]
        if not with_loss:
            return []
        base, after = ([_mean(self.found[side, item.content]) or 0.0 for item in with_loss] for side in (BASE, TUNED))
        weights = [float(self.found[BASE, item.content]["tokens"]) for item in with_loss]
        return [intervals.compare(name, label, base, after, weights)]

    def _limits(self, own: Sequence[Item]) -> list[str]:
        """What a reader must know about the figures of the examples, as sentences."""
        found, count = [], len(own)
        if cut := sum(not self.found[BASE, item.content]["tokens"] for item in own):
            found.append(
                f"{counted(cut, 'example')} of {count} {'has' if cut == 1 else 'have'} no completion within the first "
                f"{self.models.spec.data.max_length} tokens (data.max_length). The loss is computed on the others."
            )
        if self.models.spec.method.kind == "lora" and self.models.spec.lora.adapter_path:
            found.append(
                "The base model has no adapter. This run continued the adapter in "
                f"{self.models.spec.lora.adapter_path}, so what that adapter had learned is part of the change."
            )
        changed = None if self.settings.data else examples.changed_file(self.models.spec, self.run)
        if count and changed:
            found.append(
                f"{changed} was changed after the run was created, so the validation set may contain examples that the "
                "model was trained on."
            )
        if 0 < count < intervals.MIN_EXAMPLES:
            verb = "is" if count == 1 else "are"
            few = f"{counted(count, 'example')} {verb} too few"
            found.append(f"{few} to tell a change from chance. Use at least 100 if you can.")
        elif 0 < count < 30:
            found.append(f"With only {count} examples, the intervals are rough. Use at least 100 if you can.")
        return found


def _batch(items: Sequence[Item], size: int) -> list[Item]:
    """The first items: at most `size`, and only as many as the memory for their logits allows. Items are sorted by
    length."""
    count = 1
    while count < min(size, len(items)) and (count + 1) * len(items[count].ids) <= MAX_BATCH_TOKENS:
        count += 1
    return list(items[:count])


def _losses(model: Any, tokenizer: Any, items: Sequence[Item]) -> list[tuple[float, int]]:
    """For each item the sum of the losses, and the number of tokens with a loss. Raises TrainError."""
    longest = max(2, *(len(item.ids) for item in items))
    ids = torch.full((len(items), longest), tokenizer.pad_token_id or 0)
    labels, mask = torch.full_like(ids, IGNORE_INDEX), torch.zeros_like(ids)
    for row, item in enumerate(items):
        size = len(item.ids)
        ids[row, :size], labels[row, :size], mask[row, :size] = torch.tensor([item.ids, item.labels, [1] * size])
    mask[:, 0] = 1  # an item without tokens
    logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
    found = []
    for row in range(len(items)):
        wanted = labels[row, 1:].to(logits.device)
        trained = wanted != IGNORE_INDEX
        chosen = logits[row, :-1][trained].float()
        loss = float(torch.nn.functional.cross_entropy(chosen, wanted[trained], reduction="sum"))
        if not math.isfinite(loss):
            raise TrainError("The loss of an example is NaN or infinite, so the model cannot be evaluated.")
        found.append((loss, int(trained.sum())))
    return found


def _seed(item: Item, sample: int) -> int:
    """The seed of a sample. All models draw with the same random numbers, so less of the change is chance."""
    return int.from_bytes(hashlib.sha256(f"{item.content} {sample}".encode()).digest()[:8]) >> 1


def _mean(found: dict[str, Any]) -> float | None:
    return found["loss"] / found["tokens"] if found.get("tokens") else None


def evaluate(folder: Path) -> None:
    """The evaluation in `folder`, until it is complete or stopped."""
    made = Evaluation(folder)
    try:
        made.run_all()
    except Stopped:
        made.log.info("Stopped.")
