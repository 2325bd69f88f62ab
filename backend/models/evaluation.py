"""Evaluating a trained model against its base model on the same examples: settings, the job, and what it found.

The process is `backend/inference/evaluation.py`. An evaluation that was stopped continues where it ended if it is
started with the same settings, for the same model and data.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec, Source
from backend.data import DataFileError, expand, file_patterns
from backend.models import kept_prompts, system_prompt, trained
from backend.models.chat_files import MAX_NEW_TOKENS
from backend.models.spec import read_spec
from backend.runs import files, jobs, json_values
from backend.runs.folder import ALIVE, Run, RunError, StopTimeouts
from backend.runs.throughput import duration
from backend.scoring.judge import Judge
from backend.scoring.scorer import Regex, ScoreError, ScoreFile, sha256_of
from backend.wording import counted

OUTPUTS = "outputs.jsonl"  # outputs and losses of both models for each example, in the order of the work
EXAMPLES = "examples.json"  # once the evaluation has ended: a row for each example, see `rows`
SCORES_FILE = "scores.json"  # the same without texts, see `numbers`
MAX_EXAMPLES = 10_000
MAX_SAMPLES = 64  # for a prompt
MAX_TEMPERATURE = 10
TIMEOUTS = StopTimeouts(save=30.0, discard=15.0, sigterm=10.0)  # it ends within a token; outputs are already written
VERDICTS_FILE = "verdicts.jsonl"  # a line for each answer of a judge
JUDGE = "judge"  # the name of the judge's score
LOSS = "loss"  # the score for which lower is better
CHANGES = ("better", "worse", "unchanged")
WITHOUT_BASE = (
    "Reward models cannot be evaluated here: their base model has no trained score head to compare with. The run's "
    "charts show the accuracy on validation pairs."
)


@dataclass(frozen=True)
class Settings:
    """The model of the checkpoint `step` (None: the final model) on `examples` validation examples at most, or on those
    of the file `data`; `max_new_tokens` of an output; `general`: also on texts that are unrelated to training.
    `samples_per_prompt` outputs are drawn with `temperature` (0: greedy) and `top_p`; pass@k of scores that are right
    or wrong is computed for 1, all of them, and `pass_at_k` (0: no other). `regex`: a custom score, whether an output
    matches; with `regex_group`, whether its first group equals the reference's. `score_file`: Python code of another
    custom score, which is run only if its SHA-256 is the `score_file_sha256` that the user has agreed to. `judge_url`:
    the base URL of an LLM judge, which compares the outputs; the other `judge_` settings are those of `Judge`, and
    `judge_agreed` is its agreement once the user has agreed."""

    step: int | None = None
    data: str = ""
    examples: int = 100
    max_new_tokens: int = 256
    general: bool = True
    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    pass_at_k: int = 0
    regex: str = ""
    regex_group: bool = False
    score_file: str = ""
    score_file_sha256: str = ""
    judge_url: str = ""
    judge_model: str = ""
    judge_key: str = ""
    judge_instruction: str = ""
    judge_agreed: str = ""

    @property
    def ks(self) -> list[int]:
        """The k of pass@k, in ascending order, without 1, which is the mean of a score."""
        return sorted({self.pass_at_k, self.samples_per_prompt} - {0, 1})

    @property
    def regex_rule(self) -> Regex | None:
        """The regular expression, if there is one."""
        return Regex(self.regex, self.regex_group) if self.regex else None

    @property
    def file_rule(self) -> ScoreFile | None:
        """The score file, if there is one."""
        return ScoreFile(self.score_file, self.score_file_sha256) if self.score_file else None

    @property
    def judge(self) -> Judge | None:
        """The judge, if there is one."""
        if not self.judge_url:
            return None
        return Judge(self.judge_url, self.judge_model, self.judge_key, self.judge_instruction)

    def problem(self) -> str:
        """Why this cannot be evaluated, as a sentence; '' if it can."""
        if not 0 <= self.examples <= MAX_EXAMPLES:
            return f"The number of examples must be from 0 to {MAX_EXAMPLES:,}."
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            return f"The maximum number of new tokens must be from 1 to {MAX_NEW_TOKENS:,}."
        if not self.examples and not self.general:
            return "There is nothing to evaluate: set a number of examples, or include the general texts."
        if self.data and not self.examples:
            return "A data file has no effect without examples: set the number of examples, or leave out the file."
        if self.data and not Path(self.data).is_file():
            what = "is not a file" if Path(self.data).exists() else "does not exist on the server"
            return f"The data file {self.data} {what}."
        return self._sampling_problem() or self._score_problem()

    def _sampling_problem(self) -> str:
        count, k = self.samples_per_prompt, self.pass_at_k
        if not 1 <= count <= MAX_SAMPLES:
            return f"The number of samples per prompt must be from 1 to {MAX_SAMPLES}."
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= MAX_TEMPERATURE):
            return f"The temperature must be from 0 (greedy decoding) to {MAX_TEMPERATURE}."
        if not (math.isfinite(self.top_p) and 0 < self.top_p <= 1):
            return "top_p must be above 0 and at most 1."
        if count > 1 and not self.temperature:
            return (
                f"With temperature 0 (greedy decoding), all {count} samples of a prompt would be the same. Set a "
                "temperature above 0, such as 0.8, or 1 sample per prompt."
            )
        if self.top_p < 1 and not self.temperature:
            return "top_p has no effect with temperature 0 (greedy decoding). Set a temperature above 0, or top_p to 1."
        if k and not 1 < k < count:
            usual = "pass@1 and pass@N, for all N samples, are always computed."
            return f"k of pass@k is {k}: set it above 1 and below the samples per prompt ({count}), or to 0. {usual}"
        if self.temperature and not self.examples:
            return "Samples and a temperature have no effect without examples: set the number of examples."
        return ""

    def _score_problem(self) -> str:
        if not self.regex and self.regex_group:
            return "Comparing the first group has no effect without a regular expression: set one."
        if self.regex_rule and (problem := self.regex_rule.problem()):
            return problem
        if (self.regex or self.score_file or self.judge_url) and not self.examples:
            scores = "A regular expression, a score file or a judge"
            return f"{scores} has no effect without examples: set the number of examples."
        if not self.judge_url and (self.judge_model or self.judge_key or self.judge_instruction):
            return "Model, API key and instruction of a judge have no effect without its base URL: set it."
        if self.judge and (problem := self.judge.problem()):
            return problem
        if not self.score_file:
            return ""
        try:
            found = sha256_of(self.score_file)
        except ScoreError as error:
            return f"The score file {self.score_file} {error}."
        return "" if found == self.score_file_sha256 else needs_consent(self.score_file, found)


SCORE_SETTINGS = (  # they change no output and no loss: samples keep their seeds, however many a prompt has
    "samples_per_prompt", "pass_at_k", "regex", "regex_group", "score_file", "score_file_sha256",
    "judge_url", "judge_model", "judge_key", "judge_instruction", "judge_agreed",
)  # fmt: skip


def with_consent(settings: Settings) -> Settings:
    """`settings` that run the score file as it is now, unless it cannot be read, and that ask the judge."""
    if settings.judge:
        settings = replace(settings, judge_agreed=settings.judge.agreement)
    with suppress(ScoreError):
        if settings.score_file:
            return replace(settings, score_file_sha256=sha256_of(settings.score_file))
    return settings


def needs_consent(path: str, sha256: str) -> str:
    """Why a score file is not run without the user's agreement, as sentences."""
    return (
        f"The score file {path} is Python code that runs with your permissions, so it needs your consent. Its SHA-256 "
        f"is {sha256}."
    )


@dataclass(frozen=True)
class Offer:
    """What can be evaluated: the steps of the models (None: the final model); whether they generate; whether the run
    has validation examples; the run's limit of new tokens. `problem`: why nothing can be evaluated. `kept_file` has
    `kept` prompts of chats. `output_seconds`: the mean time of an output of the newest evaluation that generated any,
    None without one; `output_limit`: the most new tokens of its outputs; `validation_examples`: None if not known."""

    steps: tuple[int | None, ...]
    generates: bool
    has_validation: bool
    max_new_tokens: int
    problem: str
    kept_file: str
    kept: int
    output_seconds: float | None = None
    output_limit: int = 0
    validation_examples: int | None = None

    def most_examples(self, settings: Settings) -> int:
        """How many examples there are at most."""
        kept = self.kept if settings.data == self.kept_file else None
        known = kept if settings.data else self.validation_examples
        return settings.examples if known is None else min(settings.examples, known)

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self)


def offer(run: Run) -> Offer:
    """Raises RunError if the options of the run cannot be read."""
    spec = read_spec(run)
    steps = tuple(model.step for model in trained.models(run))
    problem = "" if steps else trained.NONE_LOADABLE
    if registry.STAGES[spec.train.stage].is_reward_model:
        problem = WITHOUT_BASE
    kept = kept_prompts.count(run) if generates(spec) else 0
    file, limit = str(kept_prompts.path_of(run)), spec.eval.max_new_tokens
    known = run.resolved().get("num_eval_examples")
    examples = known if isinstance(known, int) and known > 0 else None
    own = has_validation(spec)
    return Offer(steps, generates(spec), own, limit, problem, file, kept, *_output_seconds(run), examples)


def generates(spec: RunSpec, data: str = "") -> bool:
    """Whether examples have a prompt, those of the run or of the file `data`; else only the loss is computed."""
    is_text = spec.data.format == "text" if data else system_prompt.is_text(spec)
    return spec.train.stage != "pretraining" and not is_text


def has_validation(spec: RunSpec) -> bool:
    """Whether a dataset of the run has validation examples that are known."""
    return any(each.source == "builtin" or each.validation != "none" for each in known_validation(spec))


def known_validation(spec: RunSpec) -> list[Source]:
    """The datasets whose validation examples are known: LLaMA-Factory splits them off with random numbers of its own,
    so it may have trained on those of the same split here."""
    is_own = spec.launch.trainer == "footplate"
    return [each for each in spec.data.datasets if is_own or not each.splits]


def data_files(spec: RunSpec) -> list[Path]:
    """The data files of a run that exist."""
    found: list[Path] = []
    for patterns in chain.from_iterable(map(file_patterns, spec.data.datasets)):
        with suppress(DataFileError):
            found += expand(patterns)
    return found


def start(run: Run, settings: Settings) -> Run:
    """Start an evaluation, or return the job that already does it. Raises RunError."""
    if why := problem(run, settings):
        raise RunError(why)
    with jobs.alone(run):
        wanted, stopped = _versions(run, settings), list[Run]()
        source: Run | None = None  # an evaluation with the same outputs and losses
        is_done = False  # whether a later evaluation with these settings is complete
        for job in find_all(run):
            is_same = _request(job) == wanted
            if job.state in ALIVE:
                if is_same:
                    return job
                raise RunError(f"This run is being evaluated ({job.id}). Wait until that has finished, or stop it.")
            if is_same and not job.result():
                stopped.append(job)
            elif source is None and _is_source(job, wanted) and not (is_same and is_done):
                source = job
            is_done = is_done or (is_same and bool(job.result()))
        source = stopped[0] if stopped else source
        kept = {name: text for name in (OUTPUTS, VERDICTS_FILE) if source and (text := _outputs(source, name))}
        env, devices = jobs.place(run, is_light=False)
        job = jobs.create(run, jobs.EVALUATION, wanted, env, devices, kept)
        for earlier in stopped:  # only after the outputs were reused: they can be hours of work
            if earlier.path != job.path:
                earlier.delete()
        job.start(timeouts=TIMEOUTS)
        return job


def _is_source(job: Run, wanted: dict[str, Any]) -> bool:
    """Whether the outputs and losses of a job can be used for `wanted`: the same settings start from scratch, unless
    the judge gave no verdict on some comparisons, which are then requested again."""
    found = _request(job)
    lacks_verdicts = bool((job.result().get(JUDGE) or {}).get("without_verdict"))
    return _without_scores(found) == _without_scores(wanted) and (found != wanted or lacks_verdicts)


def predict(offered: Offer, settings: Settings) -> str:
    """How many outputs an evaluation generates, and how long that takes at most, as a sentence; '' without outputs."""
    if not settings.examples or not offered.generates:
        return ""
    count = 2 * offered.most_examples(settings) * settings.samples_per_prompt
    text = f"Generating at most {counted(count, 'output')} of both models"
    if offered.output_seconds is None:
        return f"{text}; how long that takes is known after the first evaluation of this run."
    # A lower limit can only shorten outputs; a higher one can lengthen those that reached it.
    seconds = count * offered.output_seconds * max(1, settings.max_new_tokens / offered.output_limit)
    return f"{text} takes at most about {duration(seconds)}, at the pace of the newest evaluation of this run."


def _output_seconds(run: Run) -> tuple[float | None, int]:
    """The mean time of an output of the newest evaluation that generated any, and the limit of its new tokens."""
    for job in find_all(run):
        found = job.result()
        if (outputs := found.get("generated_outputs")) and (seconds := found.get("generation_seconds")):
            return float(seconds / outputs), _request(job)["max_new_tokens"]
    return None, 0


def find_all(run: Run) -> list[Run]:
    """The evaluations of a run, the newest first."""
    return jobs.find_all(run, jobs.EVALUATION)


def read_settings(folder: Path) -> Settings:
    """The settings of the job in `folder`. Raises RunError."""
    found = jobs.required_request(folder, jobs.EVALUATION)
    return Settings(**{field.name: found[field.name] for field in fields(Settings) if field.name in found})


def as_json(job: Run) -> dict[str, Any]:
    """For page and command line: the job with its settings and result."""
    return {**jobs.as_json(job), "settings": _request(job)}


def rows(job: Run) -> list[dict[str, Any]]:
    """The examples of an evaluation that has ended: prompt, reference, and of both sides the output and scores. With
    several samples per prompt, the output is the first one, scores are means, and `samples` has the texts and scores of
    all of them. Raises RunError."""
    try:
        found: list[dict[str, Any]] = json_values.read(job.path / EXAMPLES)
    except (OSError, ValueError):
        raise RunError("This evaluation has no examples: it has not ended, or its files were deleted.") from None
    return found


def numbers(job: Run) -> dict[str, dict[str, Any]]:
    """Of each example and general text, by the hash of its content: its `scores` as (base, trained), how many `tokens`
    have a loss, and the hash of its `labels`; empty if an evaluation has not ended, or is too old to have them."""
    try:
        return dict(json_values.read(job.path / SCORES_FILE))
    except (OSError, ValueError, TypeError):
        return {}


def finished(run: Run, settings: Settings) -> Run | None:
    """The newest complete evaluation with these settings, of this model and data. Raises RunError."""
    wanted = _versions(run, settings)
    return next((job for job in find_all(run) if job.result() and _request(job) == wanted and numbers(job)), None)


def is_comparable(run: Run, job: Run) -> bool:
    """Whether an evaluation has `numbers`, and its model has not changed since. A deleted model counts as unchanged."""
    request = jobs.request(job.path, jobs.EVALUATION)
    if not request or not (job.path / SCORES_FILE).is_file():
        return False
    model = trained.at_step(run, request.get("step"))
    return model is None or _changed(model.folder) in request.get("changed", ())[:1]


def change_of(row: dict[str, Any], score: str) -> str:
    """Whether the `score` of an example is better, worse or unchanged with the trained model; '' without this score."""
    base, after = row["scores"].get(score) or (None, None)
    if base is None or after is None:
        return ""
    return "unchanged" if base == after else "better" if (after > base) == (score != LOSS) else "worse"


def problem(run: Run, settings: Settings) -> str:
    """Why `settings` of a run cannot be evaluated, as sentences; '' if they can."""
    offered = offer(run)
    if offered.problem or settings.problem():
        return offered.problem or settings.problem()
    if settings.step not in offered.steps:
        return trained.not_loadable(settings.step, offered.steps)
    if settings.examples and not settings.data and not offered.has_validation:
        why = "This run has no validation examples."
        if len(known_validation(spec := read_spec(run))) < len(spec.data.datasets):
            why = "LLaMA-Factory has split the validation examples of this run off, and which they are is not known."
        return f"{why} Choose a data file, or set the number of examples to 0."
    has_outputs = offered.generates or generates(read_spec(run), settings.data)
    if (settings.regex or settings.score_file or settings.judge_url) and not has_outputs:
        return (
            "The examples of this run are texts, so there are no outputs for a regular expression, a score file or a "
            "judge."
        )
    if settings.temperature and not has_outputs:
        return "The examples of this run are texts, so nothing is generated, and a temperature has no effect."
    if (judge := settings.judge) and settings.judge_agreed != judge.agreement:
        return judge.needs_consent(offered.most_examples(settings) * settings.samples_per_prompt)
    return ""


def _versions(run: Run, settings: Settings) -> dict[str, Any]:
    """The settings, and when model and data were changed: an evaluation of other weights is not continued."""
    model = trained.at_step(run, settings.step)
    own = data_files(read_spec(run)) if settings.examples else []
    data = [Path(settings.data)] if settings.data else own
    paths = [*([model.folder] if model else []), *data]
    return {**asdict(settings), "changed": [_changed(path) for path in paths]}


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _request(job: Run) -> dict[str, Any]:
    """The settings of an evaluation, and the versions of model and data; settings that are newer than the evaluation
    have their defaults."""
    return {**asdict(Settings()), **jobs.request(job.path, jobs.EVALUATION)}


def _without_scores(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in SCORE_SETTINGS}


def _outputs(job: Run, name: str = OUTPUTS) -> str:
    try:
        return files.read_text(job.path / name)
    except (OSError, ValueError):
        return ""
