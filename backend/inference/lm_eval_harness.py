"""The parts of lm-eval that Footplate uses: its tasks, and its evaluator with a model that is loaded already. This
module can be imported once `use` has put the environment lm-eval on the path of the process.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lm_eval.utils
import numpy
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from backend.models import benchmark_tasks
from backend.train.generation_eval import without_router_loss
from backend.train.run_log import TrainError

RANDOM_SEED, OTHER_SEEDS = 0, 1234  # the defaults of lm-eval's command line
BOOTSTRAP = 1000  # resamples for metrics that are not means; lm-eval's default of 100,000 takes minutes
MAX_BATCH_TOKENS = 4096  # tokens with logits in memory at a time, unless a single request has more
PATHS = ("data_files", "data_dir")  # keys of dataset_kwargs that are paths

# lm-eval itself renders templates of tasks without a sandbox, so any YAML file could run code.
_plain = lm_eval.utils.env
lm_eval.utils.env = ImmutableSandboxedEnvironment(undefined=_plain.undefined, keep_trailing_newline=True)
lm_eval.utils.env.filters["regex_replace"] = lm_eval.utils.regex_replace


# -- tasks -------------------------------------------------------------------------------------------------------------


def load(tasks: Sequence[str], shots: int | None, allow_code: bool) -> dict[str, Any]:
    """lm-eval's tasks and groups with their data, from their names and files. Raises TrainError."""
    if not allow_code:  # lm-eval loads unknown metrics with this package, from a Python file or the Hub
        sys.modules["evaluate"] = None  # type: ignore[assignment]
    manager = TaskManager(include_defaults=not all(map(_is_single_task, tasks)))  # reading all takes seconds
    loaded = [each for task in tasks for each in _load(manager, task, allow_code)]
    try:
        found: dict[str, Any] = manager.load(loaded)
    except ValueError as error:  # a task belongs to two of the groups
        raise TrainError(f"{error}. Leave out one of them.") from error
    for task in found["tasks"].values():
        _check(task, allow_code)
        _set_shots(task, shots)
    return found


def _is_single_task(task: str) -> bool:
    return benchmark_tasks.is_file(task) and "group" not in load_yaml(task, resolve_func=False)


def _load(manager: Any, task: str, allow_code: bool) -> list[Any]:
    """A task, a group, or the tasks of a tag. Raises TrainError."""
    if not benchmark_tasks.is_file(task) and task not in manager.task_index:
        close = get_close_matches(task, manager.all_tasks, n=3)
        hint = f"Did you mean {', '.join(close)}? " if close else ""
        raise TrainError(f"lm-eval has no task {task}. {hint}A YAML file with a task needs its path, ending in .yaml.")
    try:
        found = manager._load_spec(_values(Path(task), allow_code) if benchmark_tasks.is_file(task) else task)
        return found if isinstance(found, list) else [found]
    except Exception as error:  # any error: the network, a file, a column, code of the task
        raise TrainError(_why(task, error)) from error


def _values(path: Path, allow_code: bool) -> dict[str, Any]:
    """The values of a file, with paths of data files relative to its folder. Without consent, no function that the file
    names is imported."""
    found: dict[str, Any] = load_yaml(path, resolve_func=allow_code)
    arguments = found.get("dataset_kwargs") or {}
    for name in PATHS:
        if name in arguments:
            arguments[name] = _absolute(arguments[name], path.parent)
    return found


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _absolute(each, folder) for name, each in value.items()}
    if isinstance(value, list):
        return [_absolute(each, folder) for each in value]
    return value if "://" in str(value) else str(folder / Path(str(value)).expanduser())


def _why(task: str, error: BaseException) -> str:
    """Why a task cannot be loaded, and what to do."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    chain = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    if kinds & {"ConnectionError", "ConnectError", "OfflineModeIsEnabled", "ConnectTimeout", "gaierror"}:
        return (
            f"The dataset of the task {task} cannot be downloaded from the Hugging Face Hub (huggingface.co), which "
            f"this machine cannot reach: {first}. Connect it to the internet, copy the cache of a machine that has the "
            "dataset (HF_HOME), or use a YAML task with a data file of this machine."
        )
    if isinstance(error, ModuleNotFoundError) and error.name == "evaluate":
        return (
            f"The task {task} needs the Python package evaluate, whose metrics are code from the Hugging Face Hub. "
            f"Install the package next to Footplate (pip install evaluate), and allow code: {benchmark_tasks.ALLOW}."
        )
    if isinstance(error, ModuleNotFoundError):
        return (
            f"The task {task} needs the Python package {error.name}, which is not in the environment lm-eval. Leave "
            "out the task."
        )
    return f"lm-eval cannot load the task {task}: {first} ({type(error).__name__})."


def _check(task: Any, allow_code: bool) -> None:
    """Raises TrainError if a task runs code without consent, or needs what a language model does not have."""
    if getattr(task, "UNSAFE_CODE", False) and not allow_code:
        raise TrainError(
            f"The task {task.task_name} runs code that the model writes. Allow it only where that can do no harm, such "
            f"as in a container: {benchmark_tasks.ALLOW}."
        )
    if getattr(task, "MULTIMODAL", False):
        raise TrainError(f"The task {task.task_name} has images or audio, which this model cannot read.")
    unknown = [name for name, function in getattr(task, "_metric_fn_list", {}).items() if function is None]
    if unknown and task.config.process_results is None:
        raise TrainError(f"lm-eval has no metric {unknown[0]}, which the task {task.task_name} names in metric_list.")


def _set_shots(task: Any, shots: int | None) -> None:
    """Set the number of few-shot examples as lm-eval's command line does: a task that sets 0 itself keeps it."""
    own = task.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=OTHER_SEEDS)


# -- the model ---------------------------------------------------------------------------------------------------------


class LoadedModel(HFLM):
    """A loaded model for lm-eval. `ends`: the tokens that end an output; `report` is called for each request that is
    done; `check` before each forward pass."""

    def __init__(
        self, model: Any, tokenizer: Any, ends: Sequence[int], report: Callable[[], None], **options: Any
    ) -> None:
        with _without_tying(model):
            super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", **options)
        self.ends = list(ends)
        self.set_cache_hook(_EachRequest(report))

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """The log-likelihood of each continuation."""
        return super().loglikelihood(requests, True)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
        size, longest = self.batch_size, max((len(before) + len(after) for _, before, after in requests), default=1)
        self.batch_size_per_gpu = max(1, min(size, MAX_BATCH_TOKENS // min(longest, self.max_length)))
        try:
            return super()._loglikelihood_tokens(requests, True, override_bs)
        finally:
            self.batch_size_per_gpu = size

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """The outputs. Raises TrainError."""
        for request in requests:
            most = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
            if most >= self.max_length:
                raise TrainError(
                    f"The task {request.task_name} generates up to {most:,} tokens (max_gen_toks), and the model's "
                    f"context has {self.max_length:,}. Use a YAML task with a lower generation_kwargs.max_gen_toks."
                )
        return super().generate_until(requests, True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """The log-likelihood of whole texts."""
        return super().loglikelihood_rolling(requests, True)

    def _model_generate(self, context: Any, max_length: int, stop: Any, **options: Any) -> Any:
        own = {"eos_token_id": self.ends} if self.ends else {}
        return super()._model_generate(context, max_length, stop, **options, **own, **without_router_loss(self.model))


class _EachRequest:
    """lm-eval's hook for a cache of answers."""

    def __init__(self, report: Callable[[], None]) -> None:
        self.report = report

    def add_partial(self, *_: Any) -> None:
        """Called with each answer."""
        self.report()


@contextlib.contextmanager
def _without_tying(model: Any) -> Iterator[None]:
    """Keep HFLM from tying the output layer to the embeddings again, since it may have been trained separately."""
    model.tie_weights = lambda *_, **__: None
    try:
        yield
    finally:
        del model.tie_weights


# -- evaluation --------------------------------------------------------------------------------------------------------


class Messages(logging.Handler):
    """Passes each warning of lm-eval on once, and notes whether it has truncated a prompt."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.show, self.shown, self.truncated = show, set[str](), False
        logger = logging.getLogger("lm_eval")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        if "runcat" in str(record.msg):
            self.truncated = True  # a prompt can have several of these warnings
        elif not record.name.startswith("lm_eval.models") and (text := record.getMessage()) not in self.shown:
            self.shown.add(text)
            self.show(text)


def evaluate(lm: LoadedModel, tasks: dict[str, Any], limit: int, chat_template: bool, allow_code: bool) -> Any:
    """lm-eval's result, with its samples."""
    random.seed(RANDOM_SEED)
    numpy.random.seed(OTHER_SEEDS)
    torch.manual_seed(OTHER_SEEDS)
    return evaluator.evaluate(
        lm=lm,
        task_dict=tasks,
        limit=limit or None,
        bootstrap_iters=BOOTSTRAP,
        apply_chat_template=chat_template,
        fewshot_as_multiturn=chat_template,
        confirm_run_unsafe_code=allow_code,
    )


def count_requests(tasks: dict[str, Any], limit: int) -> int:
    """An estimate of the number of requests to a model; for multiple choice, one for each choice of the first
    sample."""
    total = 0
    for task in tasks["tasks"].values():
        size = len(task.eval_docs)
        choices = task.doc_to_choice(task.eval_docs[0]) if task.OUTPUT_TYPE == "multiple_choice" else [None]
        total += min(limit or size, size) * len(choices) * task.config.repeats
    return total
