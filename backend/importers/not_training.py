"""Configuration files of LLaMA-Factory, axolotl and TRL that do not describe a training: what they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backend.config.options import Problem, SpecError

Table = Mapping[str, Any]
# Arguments of LLaMA-Factory; every training has at least one of these.
LLAMA_FACTORY_TRAINING = {
    "stage", "do_train", "dataset", "tokenized_path", "learning_rate", "num_train_epochs", "max_steps", "cutoff_len",
    "per_device_train_batch_size", "gradient_accumulation_steps", "output_dir", "lora_rank", "lora_target",
}  # fmt: skip
# Only LLaMA-Factory has these.
LLAMA_FACTORY = {"template", "finetuning_type", "stage", "infer_backend", "export_dir", "n_shot", "cutoff_len"}
LLAMA_FACTORY_V1 = {
    "kernel_config", "dist_config", "sample_backend", "peft_config", "quant_config", "model_class", "train_dataset",
}  # fmt: skip
BOARD = ("top.", "train.", "eval.", "infer.", "export.")
VLLM_SERVE = {"gpu_memory_utilization", "tensor_parallel_size", "max_model_len", "vllm_model_impl", "kv_cache_dtype"}
AXOLOTL_DATA = {"datasets", "pretraining_dataset"}
AXOLOTL_TRAINING = {"micro_batch_size", "num_epochs", "max_steps", "learning_rate", "rl"}
IMPORT_TRAINING = "Import the YAML of the training instead"


def is_no_training(found: Table) -> bool:
    """Whether a table is one of these files."""
    return any(applies(found) for applies, _ in KINDS)


def refuse(found: Table) -> SpecError:
    """The error that says what the file is for."""
    about = next(about for applies, about in KINDS if applies(found))
    return SpecError([Problem("", about)])


def _trains(found: Table) -> bool:
    """Whether a file of LLaMA-Factory says that it trains."""
    return found.get("do_train") is True


def _is_llama_factory(found: Table) -> bool:
    return "model_name_or_path" in found and bool(LLAMA_FACTORY & found.keys())


def _exports(found: Table) -> bool:
    return _is_llama_factory(found) and bool(found.get("export_dir")) and not _trains(found)


def _generates(found: Table) -> bool:
    return _is_llama_factory(found) and "infer_backend" in found and not _trains(found)


def _evaluates(found: Table) -> bool:
    return _is_llama_factory(found) and not _trains(found) and {"task", "n_shot"} <= found.keys()


def _predicts(found: Table) -> bool:
    asked = any(found.get(key) is True for key in ("do_predict", "do_eval", "predict_with_generate"))
    return _is_llama_factory(found) and not _trains(found) and (asked or found.get("do_train") is False)


def _has_only_a_template(found: Table) -> bool:
    return _is_llama_factory(found) and "template" in found and not LLAMA_FACTORY_TRAINING & found.keys()


def _is_board(found: Table) -> bool:
    settings = [key for key in found if isinstance(key, str) and key.startswith(BOARD)]
    return len(settings) > 1 or {"last_model", "path_dict"} <= found.keys()


def _is_v1(found: Table) -> bool:
    return isinstance(found.get("model"), str) and bool(LLAMA_FACTORY_V1 & found.keys())


def _is_cloud(found: Table) -> bool:
    return {"provider", "gpu"} <= found.keys() or {"dockerfile_commands", "gpu"} <= found.keys()


def _has_no_data(found: Table) -> bool:
    return "base_model" in found and not (AXOLOTL_DATA | AXOLOTL_TRAINING) & found.keys()


def _serves(found: Table) -> bool:
    return isinstance(found.get("model"), str) and bool(VLLM_SERVE & found.keys())


KINDS: tuple[tuple[Callable[[Table], bool], str], ...] = (
    (
        _exports,
        "the file has export_dir and no do_train: it is for llamafactory-cli export, which merges an adapter or "
        f"quantizes a model, and trains nothing. {IMPORT_TRAINING}",
    ),
    (
        _generates,
        "the file has infer_backend and no do_train: it is for llamafactory-cli chat, webchat or api, which generate "
        f"text with a trained model. {IMPORT_TRAINING}",
    ),
    (
        _evaluates,
        "the file has task and n_shot and no do_train: it is for llamafactory-cli eval, which runs a benchmark. "
        f"{IMPORT_TRAINING}",
    ),
    (
        _predicts,
        "the file evaluates a trained model of LLaMA-Factory or generates its predictions (do_eval, do_predict or "
        f"predict_with_generate without do_train: true), and trains nothing. {IMPORT_TRAINING}",
    ),
    (
        _has_only_a_template,
        "the file names a model and a template of LLaMA-Factory, but no data and no training arguments: it is for "
        f"llamafactory-cli chat, webchat or api. {IMPORT_TRAINING}",
    ),
    (
        _is_board,
        "the file has settings of LLaMA Board, the web page of LLaMA-Factory. Import the training_args.yaml that LLaMA "
        "Board writes into the output folder of a training instead",
    ),
    (
        _is_v1,
        "the file is for the trainer v1 of LLaMA-Factory (model, dist_config, train_dataset), whose keys differ. Only "
        "files with model_name_or_path and finetuning_type can be imported",
    ),
    (
        _is_cloud,
        "the file says where axolotl runs in a cloud (axolotl --cloud), not what it trains. Import the YAML with "
        "base_model and datasets instead",
    ),
    (
        _has_no_data,
        "the file has base_model, but no datasets and no training arguments: axolotl can use it for inference, "
        f"merge-lora or quantize, but not to train. {IMPORT_TRAINING}",
    ),
    (
        _serves,
        "the file is for a vLLM server, such as that of trl vllm-serve, and trains nothing. Import the YAML of trl "
        "sft, dpo, kto, orpo or reward instead",
    ),
)
