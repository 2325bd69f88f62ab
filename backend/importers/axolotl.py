"""axolotl's YAML as a spec (axolotl 0.19: utils/schemas/*.py, utils/config, core/builders/base.py).

What a file leaves out has axolotl's default, not ours, so that the same training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from backend import registry
from backend.importers.foreign import TENSOR_WITH_FSDP, Import, Table, entries, local_files, with_current_names, words

# Same meaning under another or the same name.
SAME: Mapping[str, str] = {
    "revision_of_model": "model.revision", "trust_remote_code": "model.trust_remote_code",
    "sequence_len": "data.max_length", "sample_packing": "data.packing", "default_system_message": "data.system_prompt",
    "dataset_num_proc": "data.dataset_num_proc", "dataset_processes": "data.dataset_num_proc",
    "lora_r": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "lora_modules_to_save": "lora.modules_to_save", "peft_use_dora": "lora.use_dora",
    "peft_use_rslora": "lora.use_rslora", "loraplus_lr_ratio": "lora.loraplus_lr_ratio",
    "num_epochs": "train.num_train_epochs", "micro_batch_size": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps", "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay", "adam_beta1": "train.adam_beta1", "adam_beta2": "train.adam_beta2",
    "adam_epsilon": "train.adam_epsilon", "max_grad_norm": "train.max_grad_norm", "seed": "train.seed",
    "neftune_noise_alpha": "train.neftune_noise_alpha", "dataloader_num_workers": "train.dataloader_num_workers",
    "rl_beta": "preference.beta", "dpo_label_smoothing": "preference.label_smoothing",
    "kto_desirable_weight": "preference.desirable_weight", "kto_undesirable_weight": "preference.undesirable_weight",
    "precompute_ref_log_probs": "preference.precompute_ref_log_probs",
    "center_rewards_coefficient": "preference.center_rewards_coefficient",
    "ddp_timeout": "parallel.ddp_timeout", "ddp_bucket_cap_mb": "parallel.bucket_cap_mb",
    "ddp_find_unused_parameters": "parallel.ddp_find_unused_parameters",
    "dp_replicate_size": "parallel.replicate_size", "context_parallel_size": "parallel.context_parallel_size",
    "early_stopping_patience": "eval.early_stopping_patience", "save_total_limit": "save.total_limit",
    "save_only_model": "save.only_model", "load_best_model_at_end": "save.load_best_model_at_end",
    "logging_steps": "logging.steps", "wandb_name": "logging.run_name",
}  # fmt: skip
# axolotl's and the Trainer's defaults that differ from ours, or may.
DEFAULTS: Table = {
    "sequence_len": 512, "num_epochs": 1.0, "micro_batch_size": 1, "gradient_accumulation_steps": 1,
    "optimizer": "adamw_torch_fused", "lr_scheduler": "cosine", "weight_decay": 0.0, "max_grad_norm": 1.0, "seed": 42,
    "val_set_size": 0, "save_total_limit": 4, "lora_dropout": 0.0,
}  # fmt: skip
# No effect on the training: a run has its own folder, log and plots, and the launcher its own arguments.
IGNORED = {
    "output_dir", "model_type", "tokenizer_type", "dataset_prepared_path", "pad_to_sequence_len", "strict", "debug",
    "eval_sample_packing", "save_safetensors", "low_cpu_mem_usage", "gradient_checkpointing_kwargs",
    "dataset_keep_in_memory", "is_llama_derived_model",
    "is_mistral_derived_model", "is_falcon_derived_model", "is_qwen_derived_model", "tokenizer_use_fast", "xformers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "auto_resume_from_checkpoints", "tf32", "bf16", "fp16",
    "load_in_4bit", "load_in_8bit", "liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu",
    "liger_layer_norm", "liger_fused_linear_cross_entropy", "eval_max_new_tokens", "eval_table_size", "group_by_length",
    "fsdp", "fsdp_config", "fsdp_version", "lora_target_linear", "test_datasets", "use_wandb", "use_mlflow",
    "use_tensorboard", "eval_strategy", "eval_steps", "evals_per_epoch", "warmup_ratio", "merge_lora",
    "include_tokens_per_second", "include_tkps",
}  # fmt: skip
# Of earlier versions; transformers before 4.46 has the first name too.
FORMER = {"evaluation_strategy": "eval_strategy"}
STAGES = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo"}
ATTENTION_FLAGS = {
    "flash_attention": "flash_attention_2", "flex_attention": "flex_attention", "sdp_attention": "sdpa",
    "eager_attention": "eager",
}  # fmt: skip
OPTIMIZER_NAMES = {
    "adamw_8bit": "adamw_bnb_8bit", "paged_adamw": "paged_adamw_32bit", "lion": "lion_32bit",
    "ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit", "adamw_torch_xla": "adamw_torch",
}  # fmt: skip
FORMATS = {"alpaca": "alpaca", "completion": "text", "pretrain": "text", "chat_template": "auto"}
COLUMNS = {
    "field_messages": "data.messages_column", "field_chosen": "data.chosen_column",
    "field_rejected": "data.rejected_column", "field": "data.text_column", "text_column": "data.text_column",
}  # fmt: skip
# Of a type with a format of its own: UserDefinedPrompterType, UserDefinedDPOType and UserDefinedKTOType.
TYPE_COLUMNS = {
    "field_prompt": "data.prompt_column", "field_instruction": "data.prompt_column",
    "field_completion": "data.completion_column", "field_output": "data.completion_column",
    "field_chosen": "data.chosen_column", "field_rejected": "data.rejected_column", "field_label": "data.label_column",
}  # fmt: skip
TYPE_FORMATS = {"dpo": "pairs", "orpo": "pairs", "reward": "pairs", "kto": "labels"}
# What Footplate does anyway: it wraps each layer, and saves the final model unsharded.
FSDP_DEFAULTS = {
    "auto_wrap_policy", "sync_module_states", "use_orig_params", "limit_all_gathers", "final_state_dict_type",
    "cpu_ram_efficient_loading", "backward_prefetch",
}  # fmt: skip
LIGER = "axolotl.integrations.liger.LigerPlugin"


def is_axolotl(found: Table) -> bool:
    """Whether a YAML table is a training configuration of axolotl."""
    return "base_model" in found and bool(
        {"datasets", "pretraining_dataset", "micro_batch_size", "sequence_len"} & found.keys()
    )


def read(table: Table, base: Path) -> Import:
    """The options that the file sets. Relative paths in it are relative to `base`. Raises SpecError for a training that
    has no counterpart at all."""
    found = Import(with_current_names(table, FORMER), base, "axolotl", DEFAULTS)
    found.take_over(SAME)
    for work in PARTS:
        work(found)
    found.name_missing(IGNORED)
    return found


# -- model and method -----------------------------------------------------------------------------------------------


def _model(found: Import) -> None:
    found.model("base_model")
    flags = [kernel for flag, kernel in ATTENTION_FLAGS.items() if found.get(flag)]
    kernel = str(found.get("attn_implementation", flags[0] if flags else "auto"))
    if kernel in registry.ATTENTIONS:
        found.patch["model.attn_implementation"] = kernel
    else:
        found.missing.append(f"attn_implementation: {kernel} (selected automatically)")
    for plugin in words(found.get("plugins")):
        if plugin == LIGER:
            found.patch["train.use_liger_kernel"] = True
        else:
            found.missing.append(f"plugins: {plugin}")


def _method(found: Import) -> None:
    adapter = found.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise found.fail("adapter", adapter, "known are lora and qlora")
    found.patch["method.kind"] = "lora" if adapter else "full"
    if found.get("unfrozen_parameters"):
        found.missing.append("unfrozen_parameters (all parameters are trained; method.kind freeze trains some layers)")
    bits = 4 if adapter == "qlora" or found.table.get("load_in_4bit") else 8 if found.table.get("load_in_8bit") else 0
    if adapter and bits:
        found.patch["method.quantization"] = "nf4" if bits == 4 else "int8"
    if adapter:
        _targets(found)


def _targets(found: Import) -> None:
    if found.table.get("lora_target_linear"):
        found.patch["lora.targets"] = "all-linear"
    else:
        found.targets("lora_target_modules")
    init = str(found.get("peft_init_lora_weights", True)).lower()
    init = "pissa_fast" if init.startswith("pissa_niter") else "default" if init == "true" else init
    if init in registry.LORA_INITS:
        found.patch["lora.init"] = init
    else:
        found.missing.append(f"peft_init_lora_weights: {init}")


def _stage(found: Import) -> None:
    kind = found.get("rl")
    if kind and kind not in STAGES:
        raise found.fail("rl", kind, f"known are {', '.join(STAGES)}")
    if found.get("process_reward_model"):
        raise found.fail("process_reward_model", True, "reward models of whole completions are known")
    found.patch["train.stage"] = STAGES[kind] if kind else "reward" if found.get("reward_model") else "sft"
    losses = words(found.get("dpo_loss_type", [])) or ["ipo" if kind == "ipo" else "sigmoid"]
    if kind in ("dpo", "ipo"):
        found.patch["preference.dpo_loss_type"] = losses[0]
    found.missing += [f"dpo_loss_type: {name} (one loss at a time)" for name in losses[1:]]
    if kind == "orpo":
        found.patch["preference.beta"] = found.number("orpo_alpha", 0.1)
    if found.get("train_on_inputs"):
        found.patch["data.loss_on"] = "all_tokens"


# -- data -----------------------------------------------------------------------------------------------------------


def _data(found: Import) -> None:
    datasets = entries(found.get("datasets"))
    if pretraining := entries(found.get("pretraining_dataset")):
        datasets = [{"type": "pretrain", **entry} for entry in pretraining]
    if not datasets:
        raise found.fail("datasets", found.get("datasets"), "each entry needs a path")
    kinds = {str(entry.get("type")).split(".")[0] for entry in datasets}
    if kinds <= {"completion", "pretrain"} and found.patch["train.stage"] == "sft":
        found.patch["train.stage"] = "pretraining"
    found.source(datasets)
    _format(found, datasets)
    _template(found)
    if found.get("group_by_length"):
        found.set("group_by_length", "train.train_sampling_strategy", "group_by_length")
    if found.get("excess_length_strategy", "drop") == "drop":
        found.different.append("excess_length_strategy: longer examples are dropped there, cut off here")
    validation = [path for entry in entries(found.get("test_datasets")) for path in local_files(found.base, entry)]
    share = found.number("val_set_size")
    if validation:
        found.patch |= {"data.validation": "files", "data.validation_files": validation}
    elif 0 < share < 1:
        found.patch |= {"data.validation": "split", "data.validation_split": share}
    else:
        found.patch["data.validation"] = "none"
        if share or found.get("test_datasets"):
            found.missing.append(f"val_set_size: {share}, test_datasets (a fraction or local files are known)")


def _format(found: Import, datasets: Sequence[Table]) -> None:
    """The format of the first dataset. Columns are detected unless they are named."""
    first, is_pair = datasets[0], found.patch["train.stage"] in TYPE_FORMATS
    kind = first.get("type")
    name = str(kind).split(".")[0]
    if isinstance(kind, Mapping):
        _columns_of_type(found, kind)
    elif name in FORMATS and not is_pair:
        found.patch["data.format"] = FORMATS[name]
    elif kind and (name != "chat_template" or not is_pair):
        found.different.append(f"datasets: type {kind}: the format is detected, and the model's chat template is used")
    found.patch |= {option: str(first[key]) for key, option in COLUMNS.items() if first.get(key)}
    found.different += [
        f"datasets: type {entry.get('type')} of {entry['path']}: all files are read in the format of the first"
        for entry in datasets[1:]
        if entry.get("type") != kind and found.patch["data.source"] == "files"
    ]
    known = {"path", "type", "data_files", "name", "split", "ds_type", "trust_remote_code", *COLUMNS}
    for entry in datasets:
        found.missing += [f"datasets: {key} of {entry['path']}" for key in entry if key not in known]


def _columns_of_type(found: Import, kind: Table) -> None:
    """The columns that a type of the file's own names; its texts around them have no counterpart."""
    stage = found.patch["train.stage"]
    patch = {option: str(kind[key]) for key, option in TYPE_COLUMNS.items() if kind.get(key)}
    patch |= {"data.text_column": str(kind["field"])} if kind.get("field") and not patch else {}
    if patch:
        usual = "text" if "data.text_column" in patch else "prompt_completion"
        found.patch |= {"data.format": TYPE_FORMATS.get(stage, usual), **patch}
    used = {key for key in (*TYPE_COLUMNS, "field") if kind.get(key)}
    found.missing += [f"datasets: type.{key}: {kind[key]}" for key in kind if key not in used and kind[key]]


def _template(found: Import) -> None:
    name = str(found.get("chat_template", "tokenizer_default"))
    if name == "chatml":
        found.patch["data.chat_template"] = "chatml"
    elif name == "jinja" or found.get("chat_template_jinja"):
        found.missing.append("chat_template_jinja (save it as a file, and select it in data.chat_template_file)")
    elif name != "tokenizer_default":
        found.different.append(
            f"chat_template: {name}: the model's own chat template is used (data.chat_template: model)"
        )


# -- training -------------------------------------------------------------------------------------------------------


def _schedule(found: Import) -> None:
    found.choose("lr_scheduler", "train.lr_scheduler_type", registry.SCHEDULERS)
    if share := found.number("cosine_min_lr_ratio"):
        found.patch["train.lr_scheduler_type"] = "cosine_with_min_lr"
        if share != 0.1:
            found.different.append(f"cosine_min_lr_ratio: the minimum is 0.1 of the peak here, {share} there")
    steps = found.table.get("warmup_steps")
    share = found.number("warmup_ratio", 0.03)
    found.patch["train.warmup_steps"] = share if steps is None else found.number("warmup_steps")
    found.duration("max_steps")
    checkpointing = found.get("gradient_checkpointing")
    found.patch["train.activation_checkpointing"] = bool(checkpointing)
    if isinstance(checkpointing, str):
        found.missing.append(f"gradient_checkpointing: {checkpointing} (activations are recomputed, not offloaded)")
    found.set("torch_compile", "train.torch_compile", found.get("torch_compile") in (True, "auto"))
    name = str(found.get("optimizer"))
    if (name := OPTIMIZER_NAMES.get(name, name)) in registry.OPTIMIZERS:
        found.patch["train.optim"] = name
    else:
        found.missing.append(f"optimizer: {name} (train.optim keeps its default)")


def _precision(found: Import) -> None:
    """axolotl loads the weights in the dtype of compute, and DeepSpeed keeps a copy in fp32."""
    is_fp16 = found.table.get("fp16")
    is_bf16 = found.table.get("bf16", "auto")  # null turns it off
    if is_fp16 and is_bf16 == "auto":
        is_bf16 = False
    if found.get("fp8"):
        chosen = "fp8"
    elif found.get("bfloat16") or (is_bf16 and found.patch["method.kind"] == "full" and not found.get("deepspeed")):
        chosen = "pure_bf16"
    elif is_bf16:
        chosen = "auto" if is_bf16 == "auto" else "bf16"
    else:
        chosen = "fp16" if is_fp16 or found.get("float16") else "tf32" if found.table.get("tf32") else "fp32"
    found.patch["precision.compute"] = chosen


def _saving(found: Import) -> None:
    for what, option in (("save", "save"), ("eval", "eval")):
        steps, times = found.get(f"{what}_steps"), found.get(f"{what}s_per_epoch")
        strategy = str(found.get(f"{what}_strategy", "epoch"))
        if isinstance(steps, int | float) and steps >= 1:
            found.patch |= {f"{option}.strategy": "steps", f"{option}.steps": int(steps)}
            continue
        found.patch[f"{option}.strategy"] = strategy if strategy in ("no", "epoch") else "epoch"
        if steps or (times or 1) != 1 or strategy not in ("no", "epoch", "steps"):
            given = f"{what}_steps: {steps}" if steps else f"{what}s_per_epoch: {times}" if times else strategy
            found.different.append(f"{given}: once per epoch here; set {option}.steps for another interval")
    if found.patch["data.validation"] == "none":
        found.patch["eval.strategy"] = "no"
    found.patch["eval.per_device_eval_batch_size"] = found.get("eval_batch_size", found.get("micro_batch_size"))
    if path := found.get("resume_from_checkpoint"):
        found.patch |= {"save.resume_from": "path", "save.resume_path": str(path)}
    uses = (
        ("wandb", found.table.get("use_wandb") or found.table.get("wandb_project")),
        *((name, found.table.get(f"use_{name}")) for name in ("mlflow", "tensorboard")),
    )
    keys = [key for key in found.table if str(key).startswith("wandb_") and key not in SAME and found.get(key)]
    if keys:  # axolotl makes environment variables of them
        found.patch["launch.env"] = {key.upper(): str(found.table[key]) for key in keys}
    trackers = [name for name, is_used in uses if is_used]
    found.patch["logging.report_to"] = trackers[0] if trackers else "none"
    found.missing += [f"use_{name} (one tracker at a time)" for name in trackers[1:]]


def _devices(found: Import) -> None:
    found.deepspeed("deepspeed")
    found.fsdp(default_version=1, ignored=FSDP_DEFAULTS)
    if (size := found.number("dp_shard_size", 1)) > 1:
        found.different.append(f"dp_shard_size: {size}: follows from the number of processes here")
    if (size := found.number("tensor_parallel_size", 1)) > 1:
        found.different += [TENSOR_WITH_FSDP] if found.table.get("fsdp_config") else []
        found.patch |= {"parallel.strategy": "tensor", "parallel.tensor_parallel_size": size}


PARTS: tuple[Callable[[Import], None], ...] = (
    _model, _method, _stage, _data, _schedule, _precision, _saving, _devices,
)  # fmt: skip
