"""What exports in all formats share: finding the model of the run, its full weights, and loading the trained model."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from backend.config import RunSpec
from backend.export import loading
from backend.export.comparison import log_probabilities
from backend.models import trained
from backend.runs import JOBS
from backend.runs.folder import Run
from backend.train import base_weights
from backend.train.run_log import RunLog, TrainError

POLL_SECONDS = 0.2  # between two checks for a stop
Tensors = list[torch.Tensor]


@dataclass
class Export:
    """One export of the model of `run`, as the job in `folder` says."""

    run: Run
    folder: Path
    run_log: RunLog

    def _phase(self, name: str, text: str, fraction: float) -> None:
        loading.start_phase(self.run_log, name, text, fraction)

    def _progress(self, name: str, text: str, fraction: float) -> None:
        """Report how far a phase is. Raises Stopped."""
        loading.check_stop(self.run_log)
        self.run_log.progress(name, text, fraction)

    def _model(self, step: int | None) -> trained.TrainedModel:
        found = trained.at_step(self.run, step)
        if found is None:
            raise TrainError("The run has no model that can be loaded at this step.")
        return found

    def _weights(self, found: trained.TrainedModel, merge: str) -> Path:
        """The folder with full weights."""
        if not found.base:
            return found.folder
        job = Run(self.run.path / JOBS / merge)
        merged = trained.find(job) if merge and job.path.is_dir() else None
        if not merged:
            raise TrainError("The merged model of this adapter was deleted. Merge the adapter again, then export.")
        return merged.folder

    def _trained_model(
        self, spec: RunSpec, found: trained.TrainedModel, tokenizer: Any, probes: Any
    ) -> tuple[Any, Tensors, Tensors | None, str]:
        """The trained model in fp32; the token ids that `probes` gives for it; the base model's log-probabilities for
        these ids, None for full weights; and how the base model was identified."""
        if not found.base:
            whole, of_base, base_check = self._full_weights(spec, found.folder), None, ""
            batches = probes(whole)
        else:
            source = loading.locate(spec, self.run_log)
            base_check = base_weights.check(self.run.path, source)
            base = loading.load_base(self.run, spec, source, tokenizer)
            batches = probes(base)
            of_base = log_probabilities(base, batches, "base model")
            whole = loading.load_adapter(base, found.folder)
        if (found.folder / trained.GENERATION).is_file():
            whole.generation_config = GenerationConfig.from_pretrained(found.folder)
        return whole, batches, of_base, base_check

    def _full_weights(self, spec: RunSpec, folder: Path) -> Any:
        loading.check_memory(folder)
        options = {"local_files_only": True, "trust_remote_code": spec.model.trust_remote_code}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)

    def _run_program(
        self, command: list[str], report: Callable[[str], None], env: Mapping[str, str] | None = None
    ) -> tuple[int, list[str]]:
        """The exit code of a program and its lines of output; `report` gets each line. A stop ends a silent program,
        too. Raises Stopped."""
        lines: list[str] = []
        written: SimpleQueue[str] = SimpleQueue()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        ) as process:
            assert process.stdout
            reader = Thread(target=_copy_lines, args=(process.stdout, written), daemon=True)
            reader.start()
            try:
                while reader.is_alive() or not written.empty():
                    loading.check_stop(self.run_log)
                    with suppress(Empty):
                        lines.append(written.get(timeout=POLL_SECONDS))
                        report(lines[-1])
            except BaseException:
                process.kill()
                reader.join()
                raise
        return process.returncode, lines


def _copy_lines(source: Iterable[str], target: SimpleQueue[str]) -> None:
    for line in source:
        target.put(line)
