"""A spec as files of LLaMA-Factory 0.9: train.yaml, dataset_info.json, and the DeepSpeed configuration.

The counterpart of importers/llamafactory.py. Every option that is visible is written, or is in the list of what
LLaMA-Factory does not have, so nothing is lost silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.config import RunSpec, merge
from backend.config.options import for_dataset, get, shown
from backend.launch.llamafactory import data, model, training
from backend.launch.llamafactory.exported import OPTIONS, Export, environment
from backend.modelspec import ModelShape
from backend.registry.llamafactory_names import OPTION_NAMES
from backend.resolve import ResolvedRun
from backend.runs import CHECKPOINTS, LLAMAFACTORY, LLAMAFACTORY_RUN, RENDEZVOUS

__all__ = ["OF_RUNS", "Export", "environment", "export", "run_files"]

OF_RUNS = {"do_train": True, "output_dir": CHECKPOINTS}  # keys that llamafactory.extra_args cannot override
TRAINER = Path(__file__).parents[2] / "train" / "llamafactory_run.py"
KEYS = {option: key for key, option in OPTION_NAMES.items()}
# Options that LLaMA-Factory takes from elsewhere, and those that do not change the training.
ELSEWHERE = {
    "model.source", "model.builtin", "model.path", "model.hub_id", "data.source", "data.builtin", "data.files",
    "data.hub_id", "data.hub_config", "data.hub_split", "data.format", "data.messages_column", "data.prompt_column",
    "data.completion_column", "data.chosen_column", "data.rejected_column", "data.label_column", "data.text_column",
    "data.system_column",
    "data.validation", "data.validation_files", "train.duration", "save.stop_timeout", "logging.level",
    "launch.place", "launch.launcher", "launch.device", "launch.devices", "launch.nproc_per_node", "launch.rendezvous",
    "launch.nnodes", "launch.min_nnodes", "launch.node_rank", "launch.master_addr", "launch.master_port",
    "launch.max_restarts", "launch.rdzv_id", "launch.gpu_model", "launch.omp_num_threads", "launch.cuda_env_defaults",
    "launch.env", "launch.trainer", "launch.extra_accelerate_config",
}  # fmt: skip
SECTIONS_ELSEWHERE = ("slurm", "ray", "kubernetes", "llamafactory")
# Options whose value 0 means that there is none; LLaMA-Factory leaves the key out.
ZERO_IS_NONE = {
    "data.max_samples", "data.streaming", "save.total_limit", "eval.early_stopping_patience",
    "train.neftune_noise_alpha", "preference.sft_loss_weight",
}  # fmt: skip


def export(
    spec: RunSpec, run: ResolvedRun, format: str, converts: bool = True, shape: ModelShape | None = None
) -> Export:
    """The files of a spec, in which paths are absolute; `format`: that of all training data; `shape`: that of the
    model. Without `converts`, no data file is converted, and one that LLaMA-Factory cannot read is in the list of what
    is missing. Raises SpecError."""
    # Datasets of different formats have none in common, and that of a dataset on the Hub is only known if it is set.
    made = Export(spec, run, format or data.format_of(for_dataset(spec, 0).data, spec.train.stage), converts, shape)
    for part in (model, data, training):
        part.write(made)
    for option, key in KEYS.items():
        if option not in made.written and (value := made.value(option)) not in (None, ""):
            made.table |= {} if value == 0 and option in ZERO_IS_NONE else {key: value}
    _name_missing(made)
    if template := made.value("llamafactory.template"):  # of a spec that LLaMA-Factory trains
        made.table["template"] = template
    made.table |= merge.parse(made.value("llamafactory.extra_args") or "")
    made.refused = _refusals(made.table, made.run.world_size > 1, made.spec.parallel.strategy == "zero3")
    return made


def run_files(spec: RunSpec, run: ResolvedRun, format: str, shape: ModelShape | None = None) -> dict[str, str]:
    """The files of a run that LLaMA-Factory trains."""
    made = export(spec, run, format, converts=False, shape=shape)
    made.table |= OF_RUNS
    copies = {LLAMAFACTORY_RUN: TRAINER, RENDEZVOUS: TRAINER.with_name(RENDEZVOUS)}
    return {**made.files, **{name: path.read_text(encoding="utf-8") for name, path in copies.items()}}


def _name_missing(made: Export) -> None:
    spec = made.spec
    for name, option in OPTIONS.items():
        if name in made.written or name in ELSEWHERE or name.split(".")[0] in SECTIONS_ELSEWHERE:
            continue
        value = get(spec, name)
        if shown(spec, option) and value != option.default:
            made.lacks(name, f"{value} has no counterpart in LLaMA-Factory")


def _refusals(table: Mapping[str, Any], several: bool, zero3: bool) -> list[str]:
    """What LLaMA-Factory's parser rejects in a table, on `several` processes. Source: llamafactory 0.9.5,
    hparams/parser.py, get_train_args, and hparams/finetuning_args.py and data_args.py, __post_init__."""
    lora, pissa = table["finetuning_type"] == "lora", bool(table.get("pissa_init"))
    low_rank = bool(table.get("use_galore") or table.get("use_apollo"))
    layerwise = bool(table.get("galore_layerwise") or table.get("apollo_layerwise"))
    streams = bool(table.get("streaming"))
    badam, quantized = bool(table.get("use_badam")), bool(table.get("quantization_bit"))
    with_reference = table["stage"] == "kto" or (table["stage"] == "dpo" and table.get("pref_loss") != "orpo")
    found = {
        "GaLore, APOLLO and BAdam cannot be combined with LoRA.": lora and (low_rank or badam),
        "GaLore and APOLLO cannot be combined with DeepSpeed.": low_rank and bool(table.get("deepspeed")),
        "Layer-wise GaLore and APOLLO need a single process.": layerwise and several,
        "BAdam on several processes needs ZeRO-3.": badam and several and not zero3,
        "Pure bf16 cannot be combined with ZeRO-3.": zero3 and bool(table.get("pure_bf16")),
        "Pure bf16 needs a GPU.": bool(table.get("use_cpu") and table.get("pure_bf16")),
        "Streaming needs a number of steps (train.duration).": streams and "max_steps" not in table,
        "Streaming cannot split a validation set off the data.": streams and bool(table.get("val_size")),
        "Streaming cannot be combined with max_samples.": streams and bool(table.get("max_samples")),
        "PiSSA cannot be combined with ZeRO-3.": zero3 and pissa,
        "PiSSA cannot be combined with a quantized model.": quantized and pissa,
        "PiSSA cannot be combined with DPO and KTO.": with_reference and pissa,
        "Unsloth cannot be combined with ZeRO-3.": zero3 and bool(table.get("use_unsloth")),
        "The embeddings of a quantized model cannot be resized for added tokens.": quantized
        and bool(table.get("resize_vocab")),
        "fp8 cannot be combined with a quantized model.": quantized and bool(table.get("fp8")),
        "The stage rm does not support load_best_model_at_end.": table["stage"] == "rm"
        and bool(table.get("load_best_model_at_end")),
    }
    return [text for text, holds in found.items() if holds]
