"""Exporting the model of a run as a GGUF file, or its adapter as GGUF LoRA with a GGUF file of the base model: the
formats, the names of files, and the job, whose process is `backend.export`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend import environments, presets, registry
from backend.environments import ADAPTER_SCRIPT, CONVERTER
from backend.inspect.weights import WeightsError
from backend.models import gguf_adapter, merge, trained
from backend.models.exports import Exports
from backend.paths import environment_folder
from backend.runs import CERTIFICATE, SPEC, jobs
from backend.runs.folder import ALIVE, Run, RunError

FOLDER = "gguf"  # in the folder of an export
MODELFILE, PRESET = "Modelfile", "lm-studio.preset.json"  # in FOLDER: for Ollama, and for LM Studio
SYSTEM_PROMPT = "settings_have_system_prompt"  # in a certificate: whether both have that of the training examples
ENVIRONMENT = "gguf"  # `footplate env create gguf`


@dataclass(frozen=True)
class Format:
    """`bytes`: the most bytes of an element; `max_kl`: the largest mean KL divergence from the trained model, in nats
    per token. `larger`: for a k-quant, which is made from a file with 16 bits, the format to choose if the file
    differs. `base`: for an adapter in a file of its own, the format of the base model's file."""

    bytes: float
    max_kl: float
    larger: str = ""
    base: str = ""


# Measured with SmolLM2 135M after *First run*, llama.cpp against base model and adapter in fp32: means of 6.8e-3
# (q8_0), 1.0e-4 (f16), 2.7e-4 (bf16), 1.4e-2 (q6_k) and 8.0e-2 (q4_k_m). q5_k_m has 0.16, since its weights are mostly
# Q5_1 there. A merged model may be 1e-3 away before it is converted (export/merge.py).
ADAPTER = "lora-"  # prefix of the formats for adapters
OF_MODEL: Mapping[str, Format] = {
    "q8_0": Format(34 / 32, 0.03),  # 32 elements of 8 bits, and a scale of 16 bits
    "q6_k": Format(34 / 32, 0.03, larger="q8_0"),  # as q8_0 where rows are not multiples of 256 elements
    "q5_k_m": Format(0.9, 0.05, larger="q6_k"),
    "q4_k_m": Format(0.85, 0.15, larger="q6_k"),
    "f16": Format(2, 2e-3),
    "bf16": Format(2, 5e-3),
}
FORMATS: Mapping[str, Format] = {
    **OF_MODEL,
    "lora-q8_0": replace(OF_MODEL["q8_0"], base="q8_0"),
    "lora-q4_k_m": replace(OF_MODEL["q4_k_m"], base="q4_k_m", larger="lora-q8_0"),
    "lora-f16": replace(OF_MODEL["f16"], base="f16"),
    "lora-bf16": replace(OF_MODEL["bf16"], base="bf16"),
}
DEFAULT = "q8_0"
MAX_STEM = 80  # characters of a run's name in a file's name
ADAPTER_FILE, BASE_FILE = "{run}-adapter.gguf", "{run}-base-{format}.gguf"  # in FOLDER, of an adapter


def file_stem(run: Run) -> str:
    """The run's name in the names of its files, which are published; its ID if no letter or digit of it is ASCII."""
    plain = unicodedata.normalize("NFKD", run.name).encode("ascii", "ignore").decode()  # ü becomes u
    return re.sub(r"[^\w.-]+", "-", plain, flags=re.ASCII).strip("-._")[:MAX_STEM].rstrip("-._") or run.id


def start(run: Run, step: int | None, format: str) -> Run:
    """The job that exports, or has exported, the model of a checkpoint or the final one (None) in this format; started
    if there is none. Raises RunError."""
    if format not in FORMATS:
        raise RunError(f"The GGUF format {format} is not supported. Choose one of {', '.join(FORMATS)}.")
    model = merge.find_model(run, step)
    if registry.STAGES[presets.read(run.path / SPEC).train.stage].is_reward_model:
        raise RunError(
            "Reward models cannot be exported as GGUF: llama.cpp would drop the layer that computes the score."
        )
    if FORMATS[format].base:
        _require_plain_lora(model)
    merged = merge.find_merged(run, step).id if model.base and not FORMATS[format].base else ""
    request = {"step": step, "format": format, "merge": merged, "environment": str(environment_folder(ENVIRONMENT))}

    def require() -> None:
        require_environment("export again")
        if FORMATS[format].base and not (environment_folder(ENVIRONMENT) / CONVERTER / ADAPTER_SCRIPT).is_file():
            raise RunError(
                "The environment gguf was created by an earlier version of Footplate, without llama.cpp's converter of "
                f"LoRA adapters. {environments.how_to_create(ENVIRONMENT)}, then export again."
            )

    return EXPORTS.start(run, request, model, "Another GGUF file of this run is being exported", require)


def _require_plain_lora(model: trained.TrainedModel) -> None:
    """Raise RunError if llama.cpp cannot load the adapter of this model."""
    try:
        problem = gguf_adapter.problem(model)
    except (WeightsError, OSError, ValueError) as error:
        raise RunError(f"The adapter cannot be read: {error}") from error
    if problem:
        other = "Merge the adapter, then export the merged model" if model.base else "Export it"
        raise RunError(f"{problem} {other} in one of the formats {', '.join(OF_MODEL)}.")


def missing() -> str:
    """That llama.cpp is not installed, and how to install it, without the last period; '' if it is installed."""
    return environments.missing(ENVIRONMENT, "The converter and runtime of llama.cpp are")


def require_environment(then: str) -> None:
    """Raise RunError if llama.cpp is not installed; `then` is what to do once it is."""
    if problem := missing():
        raise RunError(f"{problem}, then {then}.")


def exported(run: Run) -> list[Run]:
    """The jobs with a GGUF file, the newest first, without those of models that were replaced since."""
    found = []
    for job in jobs.find_all(run, jobs.GGUF):
        model = trained.at_step(run, EXPORTS.request(job)[0])
        if job.state not in ALIVE and file_of(job) and (model is None or EXPORTS.is_current(job, model)):
            found.append(job)
    return found


def file_of(job: Run) -> Path | None:
    """The GGUF file of a job; None if it has none, or only that of the base model, without its adapter."""
    name = str(job.result().get("model") or "")
    if not name or not (job.path / name).is_file():
        return None
    is_whole = not EXPORTS.request(job)[1].startswith(ADAPTER) or adapter_of(job.path / name)
    return job.path / name if is_whole else None


def adapter_of(file: Path) -> Path | None:
    """The file of the adapter that belongs to the GGUF file of a base model; None if the model is in one file."""
    return next(file.parent.glob(ADAPTER_FILE.format(run="*")), None)


def names(file: Path) -> list[str]:
    """The GGUF file and those next to it that belong to it."""
    adapter = adapter_of(file)
    others = (name for name in (CERTIFICATE, MODELFILE, PRESET) if (file.parent / name).is_file())
    return [file.name, *([adapter.name] if adapter else []), *others]


EXPORTS = Exports(jobs.GGUF, file_of, tuple(FORMATS), FOLDER)
find_all = EXPORTS.find_all


def as_json(job: Run) -> dict[str, Any]:
    """For page and command line: the job, its format, and the file once there is one."""
    file = file_of(job)
    shown = {"file": str(file), "bytes": file.stat().st_size, "files": names(file)} if file else None
    if file and shown and (adapter := adapter_of(file)):
        shown |= {"adapter": str(adapter), "adapter_bytes": adapter.stat().st_size}
    return {**jobs.as_json(job), "format": EXPORTS.request(job)[1], "gguf": shown}
