"""The process of a benchmark: lm-eval measures the trained model, and its base model on the same samples.

The models are loaded as for chats and evaluations, so that quantized base models and adapters are those of training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from backend import registry
from backend.environments import ENVIRONMENTS, PACKAGES
from backend.inference import benchmark_results, generation
from backend.inference.evaluation import NICENESS
from backend.inference.example_scores import NAMES
from backend.inference.loading import Loaded, Models
from backend.models import benchmark, chat, system_prompt
from backend.models.benchmark import ENVIRONMENT, SAMPLES, Settings
from backend.models.chat_files import SIDES, TUNED
from backend.runs import LOCK, RESULT, SPEC, jobs
from backend.runs.files import write_json
from backend.runs.folder import Run, RunError
from backend.train.run_log import RunLog, Stopped, TrainError


def harness(environment: Path) -> Any:
    """The module lm_eval_harness, which imports lm-eval from an environment. The environment's other packages come last
    on the path, so that Footplate's own are used where both exist. Raises TrainError."""
    if (packages := str(environment / PACKAGES)) not in sys.path:
        sys.path.append(packages)
    _import_from("lm_eval", packages)
    from backend.inference import lm_eval_harness  # noqa: PLC0415 - it needs this path

    return lm_eval_harness


def _import_from(name: str, folder: str) -> None:
    """Import a package from `folder`, even if an earlier folder on the path has it too. Raises TrainError."""
    if name in sys.modules:
        return
    spec = PathFinder.find_spec(name, [folder])
    if spec is None or spec.loader is None:
        raise TrainError(f"{folder} does not contain {name}. Run `footplate env create {ENVIRONMENT}` again.")
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


class Benchmark:
    """The benchmark in `folder`, which is that of a job of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, RunLog(folder)
        job = Run(folder)
        self.settings: Settings = benchmark.read_settings(folder)
        self.environment = Path(jobs.required_request(folder, jobs.BENCHMARK)["environment"])
        self.started = (folder / LOCK).stat().st_mtime
        self.run = Run(job.path.parent.parent)
        self.models = Models(self.run, lambda text: self._phase("loading model", text), one_at_a_time=True)
        if "cpu" in job.plan().devices:
            os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        self.done = self.total = 0  # requests

    def run_all(self) -> None:
        """Measure, and write samples and result. Raises TrainError, Stopped."""
        settings = self.settings
        self._phase("loading tasks", "Loading the tasks and their data with lm-eval.")
        if not settings.allow_code:
            self._refuse_code()
        lm_eval = harness(self.environment)
        messages = lm_eval.Messages(self.log.info)
        tasks = lm_eval.load(settings.tasks, settings.shots, settings.allow_code)  # errors come before models load
        sides = SIDES if settings.base else (TUNED,)
        self.total = len(sides) * lm_eval.count_requests(tasks, settings.limit)
        template, results = self._uses_template(), dict[str, Any]()
        loaded = self.models.load(settings.step, TUNED)
        ends = sorted(generation.stop_tokens(loaded))  # for both models, as in evaluations
        for side in sides:
            loaded = self.models.load(settings.step, side)
            results[side] = self._measure(lm_eval, side, loaded, tasks, ends, template)
            del loaded  # full weights of both models are never in memory together
        self._write_samples(results, lm_eval.lm_eval.utils.handle_non_serializable)
        rows = benchmark_results.rows(results)
        limits = benchmark_results.limits(results, rows, settings.limit, settings.shots, messages.truncated)
        result = {
            "rows": rows,
            "limits": [*limits, *self._limits(template)],
            "chat_template": template,
            "versions": ENVIRONMENTS[ENVIRONMENT].versions(self.environment),
            "seconds": round(time.time() - self.started, 1),
        }
        write_json(self.folder / RESULT, result)
        for row in rows:
            self.log.info(row["sentence"])
        self.log.start_phase("done", "The benchmark is complete.", fraction=1.0)

    def _refuse_code(self) -> None:
        try:
            benchmark.refuse_code(self.settings.tasks)  # checked again: a file may have changed while the job waited
        except RunError as error:
            raise TrainError(str(error)) from error

    def _phase(self, name: str, text: str) -> None:
        self._check_stop()
        self.log.start_phase(name, text)

    def _check_stop(self, *_: Any) -> None:
        """Raises Stopped."""
        if self.log.stop_requested():
            raise Stopped

    def _uses_template(self) -> bool:
        """Whether prompts are conversations: as the user has set it, else as in training."""
        if self.settings.chat_template is not None:
            return self.settings.chat_template
        return self.models.mode(self.settings.step) == chat.CHAT

    def _measure(self, lm_eval: Any, side: str, loaded: Loaded, tasks: Any, ends: list[int], template: bool) -> Any:
        """lm-eval's result of one model. Raises Stopped, TrainError."""
        spec, text = self.models.spec, f"Measuring the {NAMES[side]}"
        self._phase("measuring", f"{text}.")
        with loaded.active() as model:
            is_padded = model.config.model_type not in registry.NO_PADDING
            lm = lm_eval.LoadedModel(
                model,
                loaded.tokenizer,
                ends,
                lambda: self._tick(text),
                batch_size=spec.eval.per_device_eval_batch_size if is_padded else 1,
                mixed_precision_dtype=loaded.dtype if loaded.dtype != lm_eval.torch.float32 else None,
                softmax_dtype=lm_eval.torch.float32,
                chat_template_args=dict(spec.data.template_kwargs),
            )
            # Every forward pass calls this layer, also with peft, which calls the model's `forward` directly.
            hook = model.get_input_embeddings().register_forward_pre_hook(self._check_stop)
            try:
                return lm_eval.evaluate(lm, tasks, self.settings.limit, template, self.settings.allow_code)
            finally:
                hook.remove()

    def _tick(self, text: str) -> None:
        self.done += 1
        self.total = max(self.total, self.done)
        text = f"{text} ({self.done:,} of about {self.total:,} requests)."
        self.log.progress("measuring", text, fraction=self.done / self.total)

    def _write_samples(self, results: dict[str, Any], default: Any) -> None:
        """A line for each sample and side, with the prompt, what the model made of it, and its metrics."""
        with (self.folder / SAMPLES).open("w", encoding="utf-8") as file:
            for side, result in results.items():
                for task, samples in result["samples"].items():
                    for sample in samples:
                        line = {"model": NAMES[side], "task": task, **sample}
                        file.write(json.dumps(line, ensure_ascii=False, default=default) + "\n")

    def _limits(self, template: bool) -> list[str]:
        """What a reader must know about the prompts."""
        if not template:
            return []
        found = ["Both models got the prompts with the chat template of the trained model."]
        if system_prompt.of_run(self.run.path / SPEC):
            found.append("The prompts had no system prompt; the training examples have one.")
        return found


def measure(folder: Path) -> None:
    """The benchmark in `folder`, until it is complete or stopped."""
    made = Benchmark(folder)
    try:
        made.run_all()
    except Stopped:
        made.log.info("Stopped.")
