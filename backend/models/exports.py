"""What merges and exports of a run's model share: finding or starting the job for a checkpoint and a format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend import registry
from backend.models.spec import environment_of
from backend.models.trained import TrainedModel
from backend.runs import MODEL, jobs
from backend.runs.folder import ALIVE, Run, StopTimeouts

UNCHECKED = "unchecked"  # the folder that is renamed once its model is verified
SOURCE, DEQUANTIZED, PLAIN = "source", "base", "adapter"  # folders: what llama.cpp's converters read (export/gguf*.py)
BATCHES, OUTPUTS, TOKENS = "batches.safetensors", "outputs.safetensors", "tokens.json"  # of export/load_checkpoint.py
TEMPORARY = (UNCHECKED, SOURCE, DEQUANTIZED, PLAIN, BATCHES, OUTPUTS, TOKENS)
# An export has nothing to save, and may be silent in a library for minutes.
TIMEOUTS = StopTimeouts(save=0.5, discard=0.5, sigterm=1.0, before_training=0.5)
ON_CPU = {**registry.NO_GPUS, "OMP_NUM_THREADS": "1"}  # memory is the limit, and trainings need the GPUs


def model_folder(job: Run) -> Path | None:
    """The folder with the model that a job has written; None if there is none."""
    return job.path / MODEL if (job.path / MODEL).is_dir() else None


@dataclass(frozen=True)
class Exports:
    """Jobs of one `kind`. `written`: the file or folder that a job has written, None if there is none; `formats`: in
    the order in which they are shown, '' for jobs without a format; `output`: the folder that has all of a job that is
    done."""

    kind: str
    written: Callable[[Run], Path | None] = model_folder
    formats: tuple[str, ...] = ("",)
    output: str = MODEL

    def start(
        self,
        run: Run,
        request: Mapping[str, Any],
        model: TrainedModel,
        busy: str,
        require: Callable[[], None] = lambda: None,
    ) -> Run:
        """The job that exports, or has exported, this model in the format of the request; started if there is none.
        `busy` begins the error if another one is alive; `require` raises RunError if a new one cannot run. Raises
        RunError."""
        step, format = request["step"], request.get("format", "")
        with jobs.alone(run):
            if (job := self.find(run, model, format)) and (job.state in ALIVE or job.result().get("model")):
                return job
            require()
            jobs.require_ended(run, self.kind, busy)
            for earlier in jobs.find_all(run, self.kind):
                if self.request(earlier) == (step, format):  # it failed, or its model was replaced
                    earlier.delete()
            env = {**environment_of(run), **ON_CPU}
            job = jobs.create(run, self.kind, request, env, {}, partial=(*TEMPORARY, self.output))
            job.start(timeouts=TIMEOUTS)
            return job

    def find(self, run: Run, model: TrainedModel, format: str = "") -> Run | None:
        """The newest job for this model and format, unless the model of this step has been replaced since, or its
        output was deleted."""
        return self._newest(jobs.find_all(run, self.kind), model, format)

    def find_all(self, run: Run, model: TrainedModel) -> list[Run]:
        """The newest job of each format, in the order of the formats."""
        every = jobs.find_all(run, self.kind)
        return [job for format in self.formats if (job := self._newest(every, model, format))]

    def is_current(self, job: Run, model: TrainedModel) -> bool:
        """Whether a job that has ended exported this model, and its output still exists."""
        is_newer = jobs.is_newer(job, self.kind, model.folder)
        return is_newer and (not job.result().get("model") or self.written(job) is not None)

    def request(self, job: Run) -> tuple[Any, str]:
        """Step and format of a job; -1 for a step that is unknown."""
        found = jobs.request(job.path, self.kind)
        return found.get("step", -1), found.get("format", "")

    def _newest(self, every: Iterable[Run], model: TrainedModel, format: str) -> Run | None:
        for job in every:
            if self.request(job) == (model.step, format) and (job.state in ALIVE or self.is_current(job, model)):
                return job
        return None
