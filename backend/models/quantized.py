"""Saving the model of a run as a quantized checkpoint that transformers loads: the formats, and the job, whose process
is `backend.export`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from backend import presets, registry
from backend.models import merge, trained
from backend.models.exports import Exports
from backend.runs import MODEL, SPEC, jobs, json_values
from backend.runs.folder import Run, RunError

BNB_MIN_VERSION = registry.QUANTIZATIONS["nf4"].package_min_version
TORCHAO_MIN_VERSION = "0.15.0"  # transformers 5.23 utils/import_utils.py


@dataclass(frozen=True)
class Format:
    """`label` and `about`: for users; `package` quantizes and loads, from `min_version`; `bytes`: of a quantized
    element, at most; `max_kl`: the largest mean KL divergence from the trained model, in nats per token; `larger`: the
    format to choose if it differs, '' for none."""

    label: str
    about: str
    package: str
    min_version: str
    bytes: float
    max_kl: float
    larger: str = ""


# The limits of 8 bits are near that of q8_0 (gguf.py), except for LLM.int8, which quantizes the inputs of layers, too;
# that of 4 bits is above that of q4_k_m, since NF4 has no larger types for sensitive layers. docs/exports.md says what
# was measured.
FORMATS: Mapping[str, Format] = {  # in the order of the menu, whose first one is selected
    "torchao-int8": Format(
        "torchao int8", "8 bits, weights only, closest to the trained model", "torchao", TORCHAO_MIN_VERSION, 1.01, 0.03
    ),
    "bnb-int8": Format(
        "bitsandbytes LLM.int8", "8 bits, also rounds the inputs of layers", "bitsandbytes", BNB_MIN_VERSION, 1.01, 0.06
    ),
    "torchao-fp8": Format(
        "torchao fp8", "8 bits, weights only, coarser than int8", "torchao", TORCHAO_MIN_VERSION, 1.01, 0.05,
        larger="torchao-int8",
    ),
    "bnb-nf4": Format(
        "bitsandbytes NF4", "4 bits, smallest, too coarse for small models such as SmolLM2 135M", "bitsandbytes",
        BNB_MIN_VERSION, 0.6, 0.2, larger="torchao-int8",
    ),
}  # fmt: skip


def start(run: Run, step: int | None, format: str) -> Run:
    """The job that quantizes, or has quantized, the model of a checkpoint or the final one (None) in this format;
    started if there is none. Raises RunError."""
    model = merge.find_model(run, step)
    if registry.STAGES[presets.read(run.path / SPEC).train.stage].is_reward_model:
        raise RunError(
            "Reward models cannot be exported as quantized checkpoints: Footplate cannot compare their scores. Use the "
            "model itself, or pass a quantization_config to from_pretrained."
        )
    merged = merge.find_merged(run, step) if model.base else None  # quantization needs full weights
    _require_quantizable(merged.path / MODEL if merged else model.folder, format)
    request = {"step": step, "format": format, "merge": merged.id if merged else ""}
    return CHECKPOINTS.start(run, request, model, "Another quantized checkpoint of this run is being written")


def _require_quantizable(folder: Path, format: str) -> None:
    """Raise RunError if the package is missing, or the architecture of the model in `folder` cannot be quantized."""
    if problem := _package_problem(FORMATS[format]):
        raise RunError(f"{format} needs {problem}. Install it with pip.")
    try:
        config = json_values.read(folder / trained.CONFIG)
        types = {str(part.get("model_type")) for part in (config, config.get("text_config") or {})}
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / trained.CONFIG} cannot be read: {error}") from error
    for name in sorted(types & registry.UNQUANTIZABLE.keys()):
        raise RunError(
            f"The architecture {name} {registry.UNQUANTIZABLE[name]}, which does not work with quantized weights. Use "
            "the model itself, or export it as GGUF."
        )
    if config.get("quantization_config"):
        raise RunError("The weights of this model are already quantized. Use the model itself.")


def _package_problem(kind: Format) -> str:
    """What the package of a format lacks, after "needs"; '' for nothing."""
    try:
        version = metadata.version(kind.package)
    except metadata.PackageNotFoundError:
        return f"{kind.package} {kind.min_version} or later; {kind.package} is not installed"
    if Version(version) >= Version(kind.min_version):
        return ""
    return f"{kind.package} {kind.min_version} or later; {kind.package} {version} is installed"


def menu() -> list[dict[str, str]]:
    """The formats for the page, with those first that this machine can write."""
    able = [(name, kind, _package_problem(kind)) for name, kind in FORMATS.items()]
    able.sort(key=lambda each: bool(each[2]))
    texts = [(name, f"{kind.label}: {kind.about}", lacks) for name, kind, lacks in able]
    return [{"format": name, "text": f"{text} (needs {lacks})" if lacks else text} for name, text, lacks in texts]


CHECKPOINTS = Exports(jobs.QUANTIZE, formats=tuple(FORMATS))
find_all = CHECKPOINTS.find_all


def as_json(job: Run) -> dict[str, Any]:
    """For page and command line: the job, its format, and the checkpoint once there is one."""
    model = trained.find(job) if job.result().get("model") else None
    format = CHECKPOINTS.request(job)[1]
    label = FORMATS[format].label if format in FORMATS else format
    return {**jobs.as_json(job), "format": format, "label": label, "model": model.as_json() if model else None}
