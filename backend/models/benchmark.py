"""Benchmarks of a trained model with lm-eval, EleutherAI's lm-evaluation-harness: settings, the job, and its result.

The process is `backend/inference/benchmark.py`. lm-eval is in an environment of its own (`footplate env create
lm-eval`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from backend import environments, registry
from backend.models import benchmark_tasks, chat, trained
from backend.models.spec import read_spec
from backend.paths import environment_folder
from backend.runs import jobs
from backend.runs.folder import ALIVE, Run, RunError, StopTimeouts

ENVIRONMENT = "lm-eval"  # `footplate env create lm-eval`
SAMPLES = "samples.jsonl"  # once a benchmark has ended: what each model made of each sample
LIMIT = 100  # samples of each task, unless the user sets another number
MAX_LIMIT, MAX_SHOTS, MAX_TASKS = 1_000_000, 64, 50
TIMEOUTS = StopTimeouts(save=30.0, discard=15.0, sigterm=10.0)  # a benchmark ends within a token and saves nothing
REWARD_MODEL = "Reward models cannot be benchmarked: lm-eval needs a language model, which predicts tokens."


@dataclass(frozen=True)
class Settings:
    """`tasks`: names of lm-eval's tasks, or paths of YAML files; `step`: of the checkpoint, None for the final model;
    `limit`: samples of each task, 0 for all; `shots`: examples in the prompt, None for the number that the task sets;
    `base`: whether the base model is measured too; `chat_template`: whether prompts are conversations, None for the
    same as in training; `allow_code`: whether tasks may run code."""

    tasks: tuple[str, ...]
    step: int | None = None
    limit: int = LIMIT
    shots: int | None = None
    base: bool = True
    chat_template: bool | None = None
    allow_code: bool = False

    def problem(self) -> str:
        """Why this cannot be measured, as a sentence; '' if it can."""
        if not self.tasks:
            return "No task is set. Enter tasks of lm-eval, such as arc_easy, or YAML files with tasks."
        if len(self.tasks) > MAX_TASKS:
            return f"A benchmark can have at most {MAX_TASKS} tasks, not {len(self.tasks)}."
        if not 0 <= self.limit <= MAX_LIMIT:
            return f"The limit of samples must be from 1 to {MAX_LIMIT:,}, or 0 for all; it is {self.limit:,}."
        if self.shots is not None and not 0 <= self.shots <= MAX_SHOTS:
            return f"The number of few-shot examples must be from 0 to {MAX_SHOTS}; it is {self.shots}."
        return ""


@dataclass(frozen=True)
class Offer:
    """What can be measured: the steps of the models (None: the final model), and whether the run was trained on
    conversations. `problem`: why nothing can be measured; `missing`: see environments.missing."""

    steps: tuple[int | None, ...]
    is_chat: bool
    problem: str
    missing: str

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


def offer(run: Run) -> Offer:
    """Raises RunError if the options of the run cannot be read."""
    spec, models = read_spec(run), trained.models(run)
    problem = "" if models else trained.NONE_LOADABLE
    if registry.STAGES[spec.train.stage].is_reward_model:
        problem = REWARD_MODEL
    is_chat = bool(models) and chat.mode_of(spec, models[0].folder) == chat.CHAT
    missing = environments.missing(ENVIRONMENT, "lm-eval is")
    return Offer(tuple(model.step for model in models), is_chat, problem, missing)


def parse_tasks(text: str) -> tuple[str, ...]:
    """The names and paths in a text, which are separated by commas; each once."""
    return tuple(dict.fromkeys(task for part in text.split(",") if (task := part.strip())))


def start(run: Run, settings: Settings) -> Run:
    """Start a benchmark, or return the job that already measures the same. Raises RunError."""
    if problem := _problem(run, settings):
        raise RunError(problem)
    with jobs.alone(run):
        for job in find_all(run):
            if job.state in ALIVE:
                if read_settings(job.path) == settings:
                    return job
                raise RunError(f"A benchmark of this run is in progress ({job.id}). Wait for its end, or stop it.")
        env, devices = jobs.place(run, is_light=False)
        request = {**asdict(settings), "environment": str(environment_folder(ENVIRONMENT))}
        job = jobs.create(run, jobs.BENCHMARK, request, {**env, **QUIET}, devices)
        job.start(timeouts=TIMEOUTS)
        return job


QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # the job reports its own progress


def find_all(run: Run) -> list[Run]:
    """The benchmarks of a run, the newest first."""
    return jobs.find_all(run, jobs.BENCHMARK)


def read_settings(folder: Path) -> Settings:
    """The settings of the job in `folder`. Raises RunError."""
    found = jobs.required_request(folder, jobs.BENCHMARK)
    values = {field.name: found[field.name] for field in fields(Settings)}
    return Settings(**{**values, "tasks": tuple(values["tasks"])})


def as_json(job: Run) -> dict[str, Any]:
    """For page and command line: the job with its settings and result."""
    return {**jobs.as_json(job), "settings": jobs.request(job.path, jobs.BENCHMARK)}


def refuse_code(tasks: Sequence[str]) -> None:
    """Raise RunError if a task file names code, or cannot be read."""
    for task in filter(benchmark_tasks.is_file, tasks):
        if found := benchmark_tasks.code_in(Path(task)):
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise RunError(
                f"The task file {task} runs code ({'; '.join(found[:3])}{more}). Read that code, then allow it: "
                f"{benchmark_tasks.ALLOW}."
            )


def _problem(run: Run, settings: Settings) -> str:
    offered = offer(run)
    if offered.problem or settings.problem():
        return offered.problem or settings.problem()
    if offered.missing:
        return f"{offered.missing}, then start the benchmark again."
    if settings.step not in offered.steps:
        return trained.not_loadable(settings.step, offered.steps)
    model = trained.at_step(run, settings.step)
    if settings.chat_template and not (model and trained.has_template(model.folder)):
        return "The tokenizer of this model has no chat template. Turn off the chat template."
    names = [benchmark_tasks.name_of(Path(task)) if benchmark_tasks.is_file(task) else task for task in settings.tasks]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        return f"Two of the tasks are called {twice}. Give one of them another name, or leave it out."
    if not settings.allow_code:
        refuse_code(settings.tasks)
    return ""
