"""The YAML of TRL's command line as a spec (`trl sft --config FILE`; TRL 1.x: trl/scripts, the Config classes).

What a file leaves out has TRL's default, not Footplate's, so that the same training starts. A file does not say which
command reads it; some keys belong to one command only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path

from backend import registry
from backend.importers import datasets
from backend.importers.datasets import Dataset
from backend.importers.foreign import OPTIMIZER_NAMES, Import, Table, with_current_names, words

# Same meaning under another or the same name.
SAME: Mapping[str, str] = {
    "model_revision": "model.revision", "trust_remote_code": "model.trust_remote_code",
    "max_length": "data.max_length", "packing": "data.packing", "dataset_num_proc": "data.dataset_num_proc",
    "dataset_streaming": "data.streaming",
    "lora_r": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "lora_modules_to_save": "lora.modules_to_save", "use_dora": "lora.use_dora", "use_rslora": "lora.use_rslora",
    "use_bnb_nested_quant": "method.bnb_4bit_use_double_quant",
    "num_train_epochs": "train.num_train_epochs",
    "per_device_train_batch_size": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps", "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay", "adam_beta1": "train.adam_beta1", "adam_beta2": "train.adam_beta2",
    "adam_epsilon": "train.adam_epsilon", "max_grad_norm": "train.max_grad_norm", "seed": "train.seed",
    "neftune_noise_alpha": "train.neftune_noise_alpha", "torch_compile": "train.torch_compile",
    "use_liger_kernel": "train.use_liger_kernel", "dataloader_num_workers": "train.dataloader_num_workers",
    "gradient_checkpointing": "train.activation_checkpointing",
    "activation_checkpointing": "train.activation_checkpointing",  # the current name, which counts if both are set
    "beta": "preference.beta", "rpo_alpha": "preference.sft_loss_weight",  # in TRL before 0.29
    "label_smoothing": "preference.label_smoothing",
    "desirable_weight": "preference.desirable_weight", "undesirable_weight": "preference.undesirable_weight",
    "precompute_ref_log_probs": "preference.precompute_ref_log_probs",
    "center_rewards_coefficient": "preference.center_rewards_coefficient",
    "ddp_timeout": "parallel.ddp_timeout", "ddp_bucket_cap_mb": "parallel.bucket_cap_mb",
    "ddp_find_unused_parameters": "parallel.ddp_find_unused_parameters",
    "per_device_eval_batch_size": "eval.per_device_eval_batch_size", "eval_steps": "eval.steps",
    "save_steps": "save.steps", "save_total_limit": "save.total_limit", "save_only_model": "save.only_model",
    "load_best_model_at_end": "save.load_best_model_at_end",
    "run_name": "logging.run_name", "logging_steps": "logging.steps",
}  # fmt: skip
# Defaults of TRL and the Trainer that differ, or may differ, from Footplate's; learning rates are in LEARNING_RATES.
DEFAULTS: Table = {
    "max_length": 1024, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "use_bnb_nested_quant": False,
    "num_train_epochs": 3.0, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0,
    "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "seed": 42, "gradient_checkpointing": True, "dtype": "float32",
    "save_strategy": "steps", "save_steps": 500, "save_total_limit": 0, "eval_strategy": "no", "logging_steps": 10,
    "dataset_train_split": "train", "dataset_test_split": "test",
}  # fmt: skip
# Old names: in transformers before 4.46, in TRL before 0.20, and in the alignment handbook. Last line: open-instruct.
FORMER = {
    "evaluation_strategy": "eval_strategy", "max_seq_length": "max_length",
    "preprocessing_num_workers": "dataset_num_proc",
    "dpo_beta": "beta", "use_lora": "use_peft", "lora_rank": "lora_r",
}  # fmt: skip
LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "orpo": 1e-6, "reward": 1e-4}
# No effect on the training: a run has its own folder, log and plots.
IGNORED = {
    "output_dir", "overwrite_output_dir", "logging_strategy", "logging_dir",
    "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs",
    "lora_task_type", "log_level", "remove_unused_columns", "logging_first_step",
    "hub_strategy", "do_train", "do_eval", "bf16", "fp16", "dtype", "torch_dtype", "bnb_4bit_quant_type",
    "dataset_test_split", "dataset_name", "warmup_ratio", "pad_to_multiple_of", "save_safetensors",
    "completion_only_loss", "save_strategy",
}  # fmt: skip
DATASETS = {"dataset_name", "datasets", "dataset_mixture", "dataset_mixer"}  # the last two: alignment handbook
FLASH_ATTENTION = ("use_flash_attention_2", "use_flash_attn")  # of the alignment handbook and open-instruct
OPEN_INSTRUCT = {"with_tracking", "use_slow_tokenizer", "checkpointing_steps"}  # keys of its training scripts
OTHER_LOSSES = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm"}  # open-instruct's names
STRATEGIES = {
    "single_gpu": "single", "multi_gpu": "ddp", "fsdp1": "fsdp1", "fsdp2": "fsdp2", "zero1": "zero1", "zero2": "zero2",
    "zero3": "zero3",
}  # fmt: skip
FORMATS = {
    frozenset({"messages"}): "messages", frozenset({"text"}): "text",
    frozenset({"prompt", "completion"}): "prompt_completion", frozenset({"chosen", "rejected"}): "pairs",
    frozenset({"prompt", "chosen", "rejected"}): "pairs", frozenset({"prompt", "completion", "label"}): "labels",
}  # fmt: skip


# The longest examples, where TRL has no limit.
ANY_LENGTH = "set data.max_length to the length of the longest example, since Footplate shortens or drops longer ones"


def is_trl(found: Table) -> bool:
    """Whether a YAML table is a configuration for TRL's command line."""
    return "model_name_or_path" in found and bool(DATASETS & found.keys())


def read(table: Table, base: Path) -> Import:
    """The options that the file sets. Relative paths in it are relative to `base`. Raises SpecError for a training that
    has no counterpart at all."""
    found = Import(with_current_names(table, FORMER), base, "TRL", DEFAULTS)
    found.take_over(SAME)
    for work in PARTS:
        work(found)
    found.name_missing(IGNORED)
    return found


def _stage(found: Import) -> None:
    keys, losses = found.table.keys(), words(found.get("loss_type"))
    if {"reward_funcs", "num_generations", "vllm_mode"} & keys:
        raise found.fail("command", "grpo or rloo", "supported commands are sft, dpo, kto, orpo and reward")
    losses = [OTHER_LOSSES.get(name, name) for name in losses]
    if {"desirable_weight", "undesirable_weight"} & keys or {*losses} & {*registry.KTO_LOSSES}:
        stage = "kto"
    elif {"center_rewards_coefficient"} & keys:
        stage = "reward"
    elif {"beta", "precompute_ref_log_probs", "sync_ref_model"} & keys or {*losses} & {*registry.DPO_LOSSES}:
        stage = "dpo"
    else:
        stage = "sft"
    found.patch |= {"train.stage": stage}
    found.patch.setdefault("train.learning_rate", LEARNING_RATES[stage])
    found.different.append(
        f"The file does not name its command: trl {stage} is assumed. For another command, change train.stage, and "
        "also the learning rate if the file has none"
    )
    if stage == "dpo" and losses:
        losses = found.dpo_losses(losses, "loss_weights")
        if losses[0] not in registry.DPO_LOSSES:
            raise found.fail("loss_type", losses[0], f"supported values are {', '.join(registry.DPO_LOSSES)}")
        found.patch["preference.dpo_loss_type"] = losses[0]
        found.missing += [f"loss_type: {name} (one loss at a time)" for name in losses[1:]]
    elif stage == "kto" and losses and losses[0] in registry.KTO_LOSSES:
        found.patch["preference.kto_loss_type"] = losses[0]
    elif losses and (stage != "sft" or losses[0] not in ("nll", "chunked_nll")):
        found.missing.append(f"loss_type: {losses[0]}")


def _model(found: Import) -> None:
    found.model("model_name_or_path")
    is_flash = True in [found.get(key) for key in FLASH_ATTENTION]
    kernel = str(found.get("attn_implementation", "flash_attention_2" if is_flash else "auto"))
    if kernel in registry.ATTENTIONS:
        found.patch["model.attn_implementation"] = kernel
    else:
        found.missing.append(f"attn_implementation: {kernel} (selected automatically)")
    found.patch["method.kind"] = "lora" if found.get("use_peft") else "full"
    if found.get("use_peft"):
        found.targets("lora_target_modules")
        if found.get("load_in_4bit"):
            found.patch["method.quantization"] = found.get("bnb_4bit_quant_type", "nf4")
        elif found.get("load_in_8bit"):
            found.patch["method.quantization"] = "int8"


def _data(found: Import) -> None:
    mixture = found.get("dataset_mixture", {})  # of the alignment handbook
    mixture = mixture if isinstance(mixture, Mapping) else {}
    given = datasets.listed(found, "datasets") or _of_mixture(found, mixture) or _of_mixer(found)
    if not given and (name := found.get("dataset_name")):
        table = {"path": name, "name": found.get("dataset_config"), "split": found.get("dataset_train_split")}
        given = [Dataset("dataset_name", table)]
    if not given:
        raise found.fail("datasets", found.get("datasets"), "each entry needs a path")
    column = str(found.get("dataset_text_field", "text"))
    for dataset in given:
        datasets.locate(found, dataset)
        _take_columns(found, dataset)
        if column != "text" and found.patch["train.stage"] == "sft" and "format" not in dataset.options:
            dataset.options |= {"format": "text", "text_column": column}
            dataset.keys["text_column"] = "dataset_text_field"
        if (weight := dataset.table.get("weight")) not in (None, 1):
            datasets.set_share(found, dataset, f"{dataset.place}.weight", weight, weight, len(given) == 1)
        datasets.name_unread(found, dataset, {"path", "name", "split", "data_files", "columns", "weight"})
    share = found.number("test_split_size", mixture.get("test_split_size") or 0)
    is_split = 0 < share < 1
    datasets.set_validation(found, given, [], share)
    if share and not is_split:
        found.missing.append(f"test_split_size: {share} (a number of examples; data.validation_split is a fraction)")
    datasets.put(found, given)
    strategy = found.strategy("eval")
    if strategy != "no" and not is_split:
        name = found.get("dataset_test_split")
        found.missing.append(f"eval_strategy: {strategy} on the split {name} (select data.validation)")
    found.intervals(is_split)
    _loss_tokens(found)


def _loss_tokens(found: Import) -> None:
    """Which tokens of an example SFT trains on."""
    if found.patch["train.stage"] == "sft" and not found.get("assistant_only_loss"):
        if found.table.get("completion_only_loss") is False:
            found.patch["data.loss_on"] = "all_tokens"
        elif not OPEN_INSTRUCT & found.table.keys():  # which trains on the assistant's messages, too
            found.different.append(
                "assistant_only_loss: without it, TRL trains on all tokens of a conversation; Footplate trains on the "
                "assistant's messages only. data.loss_on all_tokens does the same as TRL"
            )


def _of_mixture(found: Import, mixture: Table) -> list[Dataset]:
    """The datasets of a mixture of the alignment handbook, with TRL's names of their keys."""
    names, parts = {"id": "path", "config": "name"}, mixture.get("datasets")
    parts = parts if isinstance(parts, list) else []
    tables = [{names.get(key, key): part[key] for key in part} if isinstance(part, Mapping) else part for part in parts]
    return datasets.read_list(found, "dataset_mixture.datasets", tables)


def _of_mixer(found: Import) -> list[Dataset]:
    """The datasets of the handbook before 2025: names with their shares, and names of splits."""
    mixer, splits = found.get("dataset_mixer"), words(found.get("dataset_splits"))
    train = next((name for name in splits if "train" in name), "train")
    shares = mixer if isinstance(mixer, Mapping) else {}
    configs = words(found.get("dataset_configs"))[: len(shares)]
    given = [
        Dataset(f"dataset_mixer.{name}", {"path": str(name), "name": config, "split": train, "weight": share})
        for (name, share), config in zip_longest(shares.items(), configs)
    ]
    for each in given:
        if isinstance(number := each.table["weight"], int | float) and number > 1:  # in open-instruct
            each.table = {**each.table, "weight": None}
            each.options["max_samples"], each.keys["max_samples"] = number, each.place
            found.different.append(f"{each.place}: {number} examples, which Footplate draws at random")
    found.missing += [f"{each.place}: 0 (none of it is used)" for each in given if each.table["weight"] == 0]
    return [each for each in given if each.table["weight"] != 0]


def _take_columns(found: Import, dataset: Dataset) -> None:
    """Set the data format from the columns that the file keeps of a dataset, if they are those of a format of TRL."""
    columns = dataset.table.get("columns")
    names = {*columns} if isinstance(columns, list) and all(isinstance(each, str) for each in columns) else set()
    if name := FORMATS.get(frozenset(names)):
        dataset.set("columns", "format", name)
    elif columns:
        found.missing.append(f"{dataset.place}.columns: {columns}")


def _training(found: Import) -> None:
    found.schedule("lr_scheduler_type")
    found.choose("optim", "train.optim", registry.OPTIMIZERS, OPTIMIZER_NAMES)
    found.patch["train.warmup_steps"] = found.number("warmup_steps") or found.number("warmup_ratio")
    found.duration("max_steps")
    if "max_length" in found.table and found.table["max_length"] is None:
        found.different.append(f"max_length: null: TRL uses examples of any length; {ANY_LENGTH}")
    found.trainer_arguments()
    if isinstance(path := found.get("resume_from_checkpoint"), str):  # true: the latest one, as in Footplate
        found.patch |= {"save.resume_from": "path", "save.resume_path": path}
    found.reporter("report_to")
    env = found.get("env")
    if isinstance(env, Mapping):
        found.patch["launch.env"] = {str(name): str(value) for name, value in env.items()}
    elif env:
        found.missing.append(f"env: {env} (must be a mapping of names to values)")


def _precision(found: Import) -> None:
    """The Trainer keeps weights in fp32 where DeepSpeed shards them, or FSDP with mixed precision (accelerate 1.15
    accelerator.py and utils/fsdp_utils.py); otherwise the weights have the dtype in which they are loaded."""
    dtype, is_fp16 = str(found.table.get("torch_dtype") or found.get("dtype")), bool(found.table.get("fp16"))
    is_fp32 = found.table.get("bf16") is False and not is_fp16  # without mixed precision
    with_fp32 = ("zero",) if is_fp32 else ("zero", "fsdp")
    is_upcast = found.get("deepspeed") or str(found.patch.get("parallel.strategy")).startswith(with_fp32)
    keeps_dtype = found.patch["method.kind"] == "full" and not is_upcast
    if dtype == "bfloat16" and keeps_dtype:
        chosen = "pure_bf16"
    elif is_fp32:
        chosen = "tf32" if found.get("tf32") else "fp32"
    else:
        chosen = "fp16" if is_fp16 else "bf16"
    found.patch["precision.compute"] = chosen
    if dtype == "auto" and keeps_dtype:
        text = "TRL trains weights in the dtype of their files; in Footplate, only precision.compute pure_bf16 does so"
        found.different.append(f"dtype: auto: {text}")


def _generations(found: Import) -> None:
    if found.get("generate_during_eval"):
        found.missing.append("generate_during_eval (set eval.num_generations, then eval.generate_during_eval)")


def _devices(found: Import) -> None:
    if name := found.get("accelerate_config"):
        if str(name) in STRATEGIES:
            found.patch["parallel.strategy"] = STRATEGIES[str(name)]
        else:
            found.missing.append(f"accelerate_config: {name} (import that file too)")
    found.deepspeed("deepspeed")
    found.fsdp(default_version=2, ignored={"auto_wrap_policy"})
    if (processes := found.number("num_processes")) > 0:
        found.set("num_processes", "launch.nproc_per_node", processes)
    if processes > 1:
        found.patch.setdefault("parallel.strategy", "ddp")


PARTS: tuple[Callable[[Import], None], ...] = (
    _stage, _model, _data, _training, _generations, _devices, _precision,
)  # fmt: skip
