"""axolotl's YAML as a spec (axolotl 0.19: utils/schemas/*.py, utils/config, core/builders/base.py).

What a file leaves out has axolotl's default, not Footplate's, so that the same training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from backend import registry
from backend.data.chat import KEYS, ROLES
from backend.importers import datasets, foreign
from backend.importers.datasets import Dataset
from backend.importers.foreign import NO_EFFECT, TENSOR_WITH_FSDP, Import, Table, with_current_names, words

# Same meaning under another or the same name.
SAME: Mapping[str, str] = {
    "revision_of_model": "model.revision", "trust_remote_code": "model.trust_remote_code",
    "sequence_len": "data.max_length", "sample_packing": "data.packing", "default_system_message": "data.system_prompt",
    "streaming": "data.streaming", "tokens": "data.add_tokens",
    "dataset_exact_deduplication": "data.drop_duplicates", "exact_deduplication": "data.drop_duplicates",
    "dataset_num_proc": "data.dataset_num_proc", "dataset_processes": "data.dataset_num_proc",
    "lora_r": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout",
    "lora_modules_to_save": "lora.modules_to_save", "peft_use_dora": "lora.use_dora",
    "peft_use_rslora": "lora.use_rslora", "loraplus_lr_ratio": "lora.loraplus_lr_ratio",
    "num_epochs": "train.num_train_epochs", "micro_batch_size": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps", "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay", "adam_beta1": "train.adam_beta1", "adam_beta2": "train.adam_beta2",
    "adam_epsilon": "train.adam_epsilon", "max_grad_norm": "train.max_grad_norm", "seed": "train.seed",
    "neftune_noise_alpha": "train.neftune_noise_alpha", "dataloader_num_workers": "train.dataloader_num_workers",
    "rl_beta": "preference.beta", "rpo_alpha": "preference.sft_loss_weight",
    "dpo_label_smoothing": "preference.label_smoothing",
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
# Defaults of axolotl and the Trainer that differ, or may differ, from Footplate's.
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
# Keys of earlier versions; transformers before 4.46 has the first one, too.
FORMER = {
    "evaluation_strategy": "eval_strategy", "noisy_embedding_alpha": "neftune_noise_alpha",
    "sequence_parallel_degree": "context_parallel_size",
}  # fmt: skip
STAGES = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo"}
ATTENTION_FLAGS = {
    "flash_attention": "flash_attention_2", "flex_attention": "flex_attention", "sdp_attention": "sdpa",
    "eager_attention": "eager",
}  # fmt: skip
OPTIMIZER_NAMES = {
    **foreign.OPTIMIZER_NAMES,
    "ao_adamw_8bit": "adamw_torch_8bit", "ao_adamw_4bit": "adamw_torch_4bit", "adamw_torch_xla": "adamw_torch",
}  # fmt: skip
FORMATS = {"alpaca": "alpaca", "completion": "text", "pretrain": "text", "chat_template": "auto"}
TEXT_COLUMNS = {"field": "text_column", "text_column": "text_column"}
PAIR_COLUMNS = {
    "field_messages": "prompt_column", "field_chosen": "chosen_column", "field_rejected": "rejected_column",
}  # fmt: skip
# Keys of a type with a custom format: UserDefinedPrompterType, UserDefinedDPOType and UserDefinedKTOType.
TYPE_COLUMNS = {
    "field_prompt": "prompt_column", "field_instruction": "prompt_column", "field_completion": "completion_column",
    "field_output": "completion_column", "field_chosen": "chosen_column", "field_rejected": "rejected_column",
    "field_label": "label_column",
}  # fmt: skip
TYPE_FORMATS = {"dpo": "pairs", "orpo": "pairs", "reward": "pairs", "kto": "labels"}
MESSAGE_KEYS = ("message_property_mappings", "message_field_role", "message_field_content")
# What an entry of a list may have, with ds_type and preprocess_shards, which do not change the examples.
ENTRY_KEYS = {
    "path", "type", "data_files", "name", "split", "train_on_split", "ds_type", "trust_remote_code", "shards",
    "shards_idx", "preprocess_shards", "chat_template", "chat_template_jinja", "roles", "roles_to_train",
    "train_on_eos",
}  # fmt: skip
OWN_PROMPT = "axolotl puts its own text around prompts, Footplate uses the chat template"
OWN_TEMPLATE = "tokenizer_default"  # the chat template of the tokenizer
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
    _special_tokens(found)
    for plugin in words(found.get("plugins")):
        if plugin == LIGER:
            found.patch["train.use_liger_kernel"] = True
        else:
            found.missing.append(f"plugins: {plugin}")


def _special_tokens(found: Import) -> None:
    """Additional special tokens; tokens with a role, such as eos_token, are those of the model's tokenizer."""
    given = found.get("special_tokens")
    for role, token in given.items() if isinstance(given, Mapping) else ():
        if role == "additional_special_tokens":
            found.set("special_tokens", "data.add_special_tokens", words(token))
        elif token:
            found.missing.append(
                f"special_tokens.{role}: {token} (the tokenizer's own is used; set this token in the tokenizer's files)"
            )


def _method(found: Import) -> None:
    adapter = found.get("adapter")
    if adapter not in (None, "lora", "qlora"):
        raise found.fail("adapter", adapter, "supported values are lora and qlora")
    found.patch["method.kind"] = "lora" if adapter else "full"
    if found.get("unfrozen_parameters"):
        found.missing.append("unfrozen_parameters (all parameters are trained; method.kind freeze trains some layers)")
    bits = 4 if adapter == "qlora" or found.table.get("load_in_4bit") else 8 if found.table.get("load_in_8bit") else 0
    if adapter and bits:
        found.patch["method.quantization"] = "nf4" if bits == 4 else "int8"
        _bitsandbytes(found)
    if adapter:
        _targets(found)


def _bitsandbytes(found: Import) -> None:
    """Arguments for bitsandbytes: without them, axolotl quantizes to nf4, with double quantization."""
    given = found.get("bnb_config_kwargs")
    given = {**given} if isinstance(given, Mapping) else {}
    if isinstance(nested := given.pop("bnb_4bit_use_double_quant", None), bool):
        found.set("bnb_config_kwargs", "method.bnb_4bit_use_double_quant", nested)
    if found.patch["method.quantization"] == "nf4" and given.get("bnb_4bit_quant_type") in ("nf4", "fp4"):
        found.set("bnb_config_kwargs", "method.quantization", given.pop("bnb_4bit_quant_type"))
    found.missing += [f"bnb_config_kwargs.{key}: {value}" for key, value in given.items() if value not in NO_EFFECT]


def _targets(found: Import) -> None:
    if found.table.get("lora_target_linear"):
        found.patch["lora.targets"] = "all-linear"
    else:
        found.targets("lora_target_modules")
    if path := found.get("lora_model_dir"):
        found.patch["lora.adapter_path"] = str(path)
    init = str(found.get("peft_init_lora_weights", True)).lower()
    init = "pissa_fast" if init.startswith("pissa_niter") else "default" if init == "true" else init
    if init in registry.LORA_INITS:
        found.patch["lora.init"] = init
    else:
        found.missing.append(f"peft_init_lora_weights: {init}")


def _stage(found: Import) -> None:
    kind = found.get("rl")
    if kind and str(kind) not in STAGES:
        raise found.fail("rl", kind, f"supported values are {', '.join(STAGES)}")
    if found.get("process_reward_model"):
        raise found.fail("process_reward_model", True, "reward models of whole completions are supported")
    found.patch["train.stage"] = STAGES[kind] if kind else "reward" if found.get("reward_model") else "sft"
    if found.patch["train.stage"] == "reward" and found.table.get("num_labels") == 1:
        found.get("num_labels")  # marks it as read: reward models have one label here, too
    losses = words(found.get("dpo_loss_type", [])) or ["ipo" if kind == "ipo" else "sigmoid"]
    if kind in ("dpo", "ipo"):
        losses = found.dpo_losses(losses, "dpo_loss_weights")
        found.patch["preference.dpo_loss_type"] = losses[0]
    found.missing += [f"dpo_loss_type: {name} (one loss at a time)" for name in losses[1:]]
    if kind == "orpo":
        found.patch["preference.beta"] = found.number("orpo_alpha", 0.1)
    if found.get("train_on_inputs"):
        found.patch["data.loss_on"] = "all_tokens"


# -- data -----------------------------------------------------------------------------------------------------------


def _data(found: Import) -> None:
    given = datasets.listed(found, "datasets")
    if pretraining := datasets.listed(found, "pretraining_dataset"):
        given = [replace(each, table={"type": "pretrain", **each.table}) for each in pretraining]
    if not given:
        raise found.fail("datasets", found.get("datasets"), "each entry needs a path")
    given = [one for each in given for one in _configs(each)]
    if found.patch["train.stage"] == "sft" and {_kind(each) for each in given} <= {"completion", "pretrain"}:
        found.patch["train.stage"] = "pretraining"
    for each in given:
        _read(found, each)
        _take_share(found, each, len(given) == 1)
    _template(found, given)
    if found.get("group_by_length"):
        found.set("group_by_length", "train.train_sampling_strategy", "group_by_length")
    _length(found)
    _validation(found, given)
    datasets.put(found, given)


def _length(found: Import) -> None:
    """What becomes of examples that are too long. Both split the texts of pretraining."""
    action, stage = found.get("excess_length_strategy", "drop"), found.patch["train.stage"]
    if action == "drop" and stage not in ("pretraining", "reward"):
        found.different.append("excess_length_strategy: axolotl drops longer examples, Footplate truncates them")
    elif action == "truncate" and stage == "reward":
        found.different.append("excess_length_strategy: axolotl truncates longer pairs, Footplate drops them")


def _validation(found: Import, given: Sequence[Dataset]) -> None:
    tests = [one for each in datasets.listed(found, "test_datasets") for one in _configs(each)]
    for test in tests:
        _read(found, test)
        test.fits_all = not test.table.get("type")
        if shards := test.table.get("shards"):
            found.missing.append(f"{test.place}.shards: {shards} (all of its examples are used)")
    share = found.number("val_set_size")
    datasets.set_validation(found, given, tests, share)
    if share >= 1:
        found.missing.append(f"val_set_size: {share} (a number of examples; data.validation_split is a fraction)")
    elif tests and share:
        found.missing.append(f"val_set_size: {share} (test_datasets are the validation set)")


def _configs(dataset: Dataset) -> list[Dataset]:
    """A dataset for each configuration of the one on the Hub, which may be a list, with its split under one name."""
    table = {**dataset.table, "split": dataset.table.get("split") or dataset.table.get("train_on_split")}
    names = table.get("name")
    return [
        replace(dataset, table={**table, "name": name}, options={}, keys={})
        for name in (names if isinstance(names, list) and names else [names])
    ]


def _kind(dataset: Dataset) -> str:
    """The first part of a type such as chat_template.default."""
    return str(dataset.table.get("type")).split(".")[0]


def _read(found: Import, dataset: Dataset) -> None:
    """Where a dataset is, and its format. Columns are detected unless they are named."""
    datasets.locate(found, dataset)
    stage, name, kind = found.patch["train.stage"], _kind(dataset), dataset.table.get("type")
    used = {*ENTRY_KEYS}
    if isinstance(kind, Mapping):
        _take_type(found, dataset, kind)
    elif name == "chat_template" and stage in TYPE_FORMATS:
        dataset.take_columns(PAIR_COLUMNS)
        used |= {*PAIR_COLUMNS, *MESSAGE_KEYS}
        _turn_format(found, dataset)  # it is detected
        if dataset.options.keys() & PAIR_COLUMNS.values():
            dataset.options["format"] = TYPE_FORMATS[stage]
    elif name in FORMATS and stage not in TYPE_FORMATS:
        dataset.options["format"] = FORMATS[name]
        if name == "alpaca":
            found.different.append(f"{dataset.place}.type: {kind}: {OWN_PROMPT}")
        elif name == "chat_template":
            used |= {"field_messages", *MESSAGE_KEYS}
            _take_messages(found, dataset)
        elif FORMATS[name] == "text":
            used |= TEXT_COLUMNS.keys()
            dataset.take_columns(TEXT_COLUMNS)
    elif kind:
        text = "the format is detected, and the model's chat template is used"
        found.different.append(f"{dataset.place}.type: {kind}: {text}")
    elif dataset.table.get("field_messages"):
        used |= {"field_messages", *MESSAGE_KEYS}
        _take_messages(found, dataset)
    _name_turns(found, dataset)
    datasets.name_unread(found, dataset, used)


def _take_messages(found: Import, dataset: Dataset) -> None:
    """The column of the conversations, and the names of the parts of a turn; both are detected unless they are
    given."""
    table = dataset.table
    format, column = _turn_format(found, dataset), str(table.get("field_messages") or "messages")
    if column != "messages" or any(table.get(key) for key in MESSAGE_KEYS):
        dataset.options["format"] = format or "auto"
        dataset.set("field_messages", "messages_column", column)


def _turn_format(found: Import, dataset: Dataset) -> str:
    """The format whose turns have the names that the file gives; '' if there is none."""
    table, given = dataset.table, dataset.table.get("message_property_mappings")
    names = {"role": table.get("message_field_role"), "content": table.get("message_field_content")}
    names = {key: name for key, name in names.items() if name}
    names |= {**given} if isinstance(given, Mapping) else {}
    keys = (names.get("role", "role"), names.get("content", "content"))
    format = next((format for format, known in KEYS.items() if known == keys), "")
    others = {key: name for key, name in names.items() if key not in ("role", "content") and key != name}
    if left := others if format else names:
        found.missing.append(f"{dataset.place}.message_property_mappings: {left}")
    return format


def _take_type(found: Import, dataset: Dataset, kind: Table) -> None:
    """The columns that a custom type names; the texts that it puts around them have no counterpart."""
    stage = found.patch["train.stage"]
    columns = {option: str(kind[key]) for key, option in TYPE_COLUMNS.items() if kind.get(key)}
    columns |= {"text_column": str(kind["field"])} if kind.get("field") and not columns else {}
    if columns:
        usual = "text" if "text_column" in columns else "prompt_completion"
        dataset.options |= {"format": TYPE_FORMATS.get(stage, usual), **columns}
        if dataset.options["format"] == "prompt_completion":
            found.different.append(f"{dataset.place}.type: {OWN_PROMPT}")
    used = {key for key in (*TYPE_COLUMNS, "field") if kind.get(key)}
    found.missing += [f"{dataset.place}.type.{key}: {kind[key]}" for key in kind if key not in used and kind[key]]


def _name_turns(found: Import, dataset: Dataset) -> None:
    """Note names of roles and turns with a loss that differ from the defaults of axolotl and Footplate."""
    table, known = dataset.table, {**ROLES["messages"], **ROLES["sharegpt"]}
    roles = table.get("roles")
    for target, names in roles.items() if isinstance(roles, Mapping) else ():
        if any(known.get(name) != target for name in words(names)):
            found.missing.append(f"{dataset.place}.roles.{target}: {names}")
    if not {*words(table.get("roles_to_train"))} <= {"assistant", "gpt"}:
        found.missing.append(f"{dataset.place}.roles_to_train: {table['roles_to_train']}")
    if table.get("train_on_eos") not in (None, "turn"):
        found.missing.append(f"{dataset.place}.train_on_eos: {table['train_on_eos']}")


def _take_share(found: Import, dataset: Dataset, is_alone: bool) -> None:
    """One of `shards` parts of a dataset that axolotl has shuffled."""
    shards = dataset.table.get("shards")
    if not shards:
        return
    if not isinstance(shards, int) or shards < 1:
        raise found.fail(f"{dataset.place}.shards", shards, "must be a whole number")
    if shards > 1:
        datasets.set_share(found, dataset, f"{dataset.place}.shards", shards, 1 / shards, is_alone)


def _template(found: Import, given: Sequence[Dataset]) -> None:
    """The chat template, which is the same for all datasets."""
    usual = str(found.get("chat_template", OWN_TEMPLATE))
    own = [str(each.table.get("chat_template") or usual) for each in given]
    name = own[0] if len({*own}) == 1 else usual
    for dataset, other in zip(given, own, strict=True):
        if other != name:
            found.missing.append(f"{dataset.place}.chat_template: {other} (one template for all datasets)")
    with_text = [each for each in given if each.table.get("chat_template_jinja")]
    if name == "chatml":
        found.patch["data.chat_template"] = "chatml"
    elif name == "jinja" or found.get("chat_template_jinja") or with_text:
        found.missing.append("chat_template_jinja (save it as a file, and select it in data.chat_template_file)")
    elif name != OWN_TEMPLATE:
        found.different.append(
            f"chat_template: {name}: the model's own chat template is used (data.chat_template: model)"
        )


# -- training -------------------------------------------------------------------------------------------------------


def _schedule(found: Import) -> None:
    found.schedule("lr_scheduler")
    share = found.number("cosine_min_lr_ratio")
    if share and str(found.get("lr_scheduler")) == "cosine":  # else axolotl ignores it
        found.patch["train.lr_scheduler_type"] = "cosine_with_min_lr"
        if share != 0.1:
            found.different.append(
                f"cosine_min_lr_ratio: the minimum is 0.1 of the peak in Footplate, {share} in axolotl"
            )
    steps = found.table.get("warmup_steps")
    share = found.number("warmup_ratio", 0.03)
    found.patch["train.warmup_steps"] = share if steps is None else found.number("warmup_steps")
    if steps is None and found.table.get("warmup_ratio") is None:
        found.different.append("warmup_steps: axolotl's default is 3% of the steps, but not more than 100 steps")
    found.duration("max_steps")
    checkpointing = found.get("gradient_checkpointing")
    found.patch["train.activation_checkpointing"] = bool(checkpointing)
    if isinstance(checkpointing, str):
        found.different.append(f"gradient_checkpointing: {checkpointing}: activations are recomputed, not offloaded")
    found.set("torch_compile", "train.torch_compile", found.get("torch_compile") in (True, "auto"))
    found.choose("optimizer", "train.optim", registry.OPTIMIZERS, OPTIMIZER_NAMES)


def _precision(found: Import) -> None:
    """axolotl loads the weights in the dtype of compute. DeepSpeed keeps a copy in fp32, and accelerate gives FSDP1
    weights in fp32 with mixed precision, which `bf16: full` turns off; for FSDP2, axolotl replaces the function that
    does. `bfloat16` has the same effect as `bf16`."""
    is_fp16 = found.table.get("fp16")
    is_bf16 = found.table.get("bf16", "auto")  # null turns it off
    if is_fp16 and is_bf16 == "auto":
        is_bf16 = False
    if found.get("bfloat16") and is_bf16 != "full":
        is_bf16 = True
    is_fsdp1 = found.patch.get("parallel.strategy") == "fsdp1"
    has_fp32 = found.get("deepspeed") or (is_fsdp1 and is_bf16 != "full")
    if found.get("fp8"):
        chosen = "fp8"
    elif is_bf16 and found.patch["method.kind"] == "full" and not has_fp32:
        chosen = "pure_bf16"
    elif is_bf16:
        chosen = "auto" if is_bf16 == "auto" else "bf16"
    else:
        chosen = "fp16" if is_fp16 or found.get("float16") else "tf32" if found.table.get("tf32") else "fp32"
    found.patch["precision.compute"] = chosen


def _batch_size(found: Import) -> None:
    """The number of examples before an optimizer step on each device, of which axolotl makes gradient accumulation only
    if that is null or 0: without the key, it is 1. Source: utils/schemas/training.py and utils/config."""
    size, each = found.number("batch_size"), found.number("micro_batch_size")
    steps = found.table.get("gradient_accumulation_steps", 1)
    if size and each > 0 and not steps:
        found.set("batch_size", "train.gradient_accumulation_steps", max(1, size // each))
    elif size:
        found.missing.append(f"batch_size: {size} (axolotl uses gradient_accumulation_steps, which is {steps})")


def _saving(found: Import) -> None:
    found.patch["eval.strategy"] = "no"
    for what in ("save", "eval") if datasets.has_validation(found) else ("save",):
        _set_interval(found, what)
    _best_model(found)
    found.patch["eval.per_device_eval_batch_size"] = found.get("eval_batch_size") or found.get("micro_batch_size")
    if found.table.get("save_total_limit") == 0:
        kept = found.patch["save.total_limit"] = DEFAULTS["save_total_limit"]
        found.different.append(f"save_total_limit: 0: axolotl keeps {kept} checkpoints; save.total_limit 0 keeps all")
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


def _set_interval(found: Import, what: str) -> None:
    """When the run saves or evaluates."""
    steps, times, given = found.get(f"{what}_steps"), found.get(f"{what}s_per_epoch"), found.get(f"{what}_strategy")
    strategy = "no" if given is False else str(given or "epoch")  # YAML reads an unquoted no as false
    if strategy == "steps" and not steps and not times:  # the Trainer's defaults
        steps = 500 if what == "save" else found.get("logging_steps")
    if isinstance(steps, int | float) and steps >= 1:
        found.patch |= {f"{what}.strategy": "steps", f"{what}.steps": int(steps)}
        return
    found.patch[f"{what}.strategy"] = strategy if strategy in ("no", "epoch") else "epoch"
    if steps or (times or 1) != 1 or strategy not in ("no", "epoch", *(["steps"] if times else [])):
        named = f"_steps: {steps}" if steps else f"s_per_epoch: {times}" if times else f"_strategy: {strategy}"
        does = "saves a checkpoint" if what == "save" else "evaluates"
        text = f"Footplate {does} once per epoch; for another interval, set {what}.strategy to steps, and {what}.steps"
        found.different.append(f"{what}{named}: {text}")


def _best_model(found: Import) -> None:
    """axolotl loads the best checkpoint if the file says so, or if training may stop early, where each checkpoint has
    an evaluation. Source: core/builders/causal.py, build, and utils/config, normalize_config."""
    asked = bool(found.get("load_best_model_at_end"))
    if not asked and not found.get("early_stopping_patience"):
        return
    save, evaluation = _interval(found, "save"), _interval(found, "eval")
    has_both = bool(save and evaluation and save % evaluation == 0)
    loads = has_both and bool(found.get("test_datasets")) != (found.number("val_set_size") > 0)
    found.patch["save.load_best_model_at_end"] = loads
    if asked and not loads:
        text = "axolotl ignores it unless there is a validation set and save_steps is a multiple of eval_steps"
        found.different.append(f"load_best_model_at_end: {text}")


def _interval(found: Import, what: str) -> float:
    """Steps between two checkpoints or evaluations, or their share of all steps; 0 for none."""
    per_run = found.number(f"{what}s_per_epoch") * found.number("num_epochs")
    return 1 / per_run if per_run > 1 else found.number(f"{what}_steps")


def _devices(found: Import) -> None:
    found.deepspeed("deepspeed")
    found.fsdp(default_version=1, ignored=FSDP_DEFAULTS)
    if (size := found.number("dp_shard_size", 1)) > 1:
        found.different.append(f"dp_shard_size: {size}: in Footplate, it follows from the number of processes")
    if (size := found.number("tensor_parallel_size", 1)) > 1:
        found.different += [TENSOR_WITH_FSDP] if found.table.get("fsdp_config") else []
        found.patch |= {"parallel.strategy": "tensor", "parallel.tensor_parallel_size": size}


PARTS: tuple[Callable[[Import], None], ...] = (
    _model, _method, _stage, _data, _schedule, _batch_size, _saving, _devices, _precision,
)  # fmt: skip
