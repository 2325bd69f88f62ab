"""LLaMA-Factory's training YAML as a spec (llamafactory 0.9: hparams/*.py).

What a file leaves out has LLaMA-Factory's default, not Footplate's, so that the same training starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from backend import registry, wording
from backend.config.other_trainer import TEMPLATE
from backend.importers.datasets import has_validation
from backend.importers.foreign import OPTIMIZER_NAMES, Import, Table, with_current_names, words
from backend.importers.llamafactory_data import take_datasets
from backend.registry.llamafactory_names import ATTENTIONS, MEGATRON, OPTION_NAMES, STAGES

# Defaults of LLaMA-Factory and the Trainer that differ, or may differ, from Footplate's.
DEFAULTS: Table = {
    "cutoff_len": 2048, "lora_rank": 8, "num_train_epochs": 3.0, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0,
    "weight_decay": 0.0, "max_grad_norm": 1.0, "seed": 42, "save_strategy": "steps", "save_steps": 500,
    "save_total_limit": 0, "stage": "sft", "finetuning_type": "lora", "lora_target": "all", "optim": "adamw_torch",
    "flash_attn": "auto", "template": None, "dataset": None, "val_size": 0, "disable_gradient_checkpointing": False,
    "freeze_trainable_layers": 2,
}  # fmt: skip
# No effect on the training: a run has its own folder, log and plots, and the launcher its own arguments.
IGNORED = {
    "do_train", "do_eval", "output_dir", "overwrite_output_dir", "plot_loss", "overwrite_cache", "use_fast_tokenizer",
    "preprocessing_batch_size", "low_cpu_mem_usage", "print_param_status", "include_num_input_tokens_seen",
    "include_effective_tokens_per_second", "media_dir", "badam_verbose",
    "use_reentrant_gc", "freeze_vision_tower", "freeze_multi_modal_projector", "image_max_pixels", "video_max_pixels",
    "video_fps", "video_maxlen", "log_level", "data_shared_file_system", "pissa_convert",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "bf16", "fp16", "pissa_iter", "quantization_method",
    "quantization_type", "eval_strategy",
}  # fmt: skip
# Keys of earlier versions: transformers before 4.46, LLaMA-Factory before 0.8.
FORMER = {
    "evaluation_strategy": "eval_strategy",
    "dpo_beta": "pref_beta",
    "dpo_ftx": "pref_ftx",
    "dpo_loss": "pref_loss",
}


def is_llamafactory(found: Table) -> bool:
    """Whether a YAML table is a training configuration of LLaMA-Factory."""
    return "model_name_or_path" in found and bool({"finetuning_type", "stage", "cutoff_len", "template"} & found.keys())


def read(table: Table, base: Path) -> Import:
    """The options that the file sets. Relative paths in it are relative to `base`. Raises SpecError for a training that
    has no counterpart at all."""
    found = Import(with_current_names(table, FORMER), base, "LLaMA-Factory", DEFAULTS)
    found.take_over(OPTION_NAMES)
    for work in PARTS:
        work(found)
    if left := found.name_missing(IGNORED):  # used if LLaMA-Factory is the trainer
        found.patch["llamafactory.extra_args"] = json.dumps(left, default=str)
        if found.patch.get("launch.trainer") == "llamafactory":  # it gets them, so nothing is missing
            found.missing = [line for line in found.missing if line.partition(":")[0] not in left]
        else:
            kept = f"{wording.names([*left])}, used only if LLaMA-Factory trains (launch.trainer: llamafactory)"
            found.different.append(f"llamafactory.extra_args keeps {kept}")
    return found


# -- model and method -----------------------------------------------------------------------------------------------


def _model(found: Import) -> None:
    found.model("model_name_or_path")
    kernel = str(found.get("flash_attn"))
    found.patch["model.attn_implementation"] = ATTENTIONS.get(kernel, "auto")
    if kernel not in ATTENTIONS:
        found.missing.append(f"flash_attn: {kernel}")
    _added_tokens(found)


def _added_tokens(found: Import) -> None:
    """The tokens that the vocabulary gets. resize_vocab follows from them."""
    for name in ("add_tokens", "add_special_tokens"):
        if tokens := words(found.get(name)):
            found.set(name, f"data.{name}", tokens)
    resizes = found.get("resize_vocab")
    if not any(found.patch.get(f"data.{name}") for name in ("add_tokens", "add_special_tokens")):
        found.missing += ["resize_vocab (the embeddings get rows for data.add_tokens only)"] if resizes else []
    elif found.get("finetuning_type") == "lora":
        found.different.append("add_tokens: Footplate trains only their embeddings, LLaMA-Factory all embeddings")


def _method(found: Import) -> None:
    kind = str(found.get("finetuning_type"))
    if kind not in registry.METHODS:
        raise found.fail("finetuning_type", kind, f"supported values are {', '.join(registry.METHODS)}")
    found.patch["method.kind"] = kind
    found.patch.setdefault("lora.alpha", 2 * found.number("lora_rank"))
    targets = words(found.get("lora_target"))
    custom = targets != ["all"]
    found.patch |= {"lora.targets": "custom" if custom else "all-linear"}
    found.patch |= {"lora.target_modules": targets} if custom else {}
    found.patch["lora.modules_to_save"] = words(found.get("additional_target"))
    found.patch["method.freeze_extra_modules"] = words(found.get("freeze_extra_modules"))
    if kind == "freeze" and words(found.get("freeze_trainable_modules", "all")) != ["all"]:
        found.missing.append(
            f"freeze_trainable_modules: {found.table['freeze_trainable_modules']} (all modules of a layer are trained)"
        )
    _adapter(found)
    if found.get("pissa_init"):
        found.patch["lora.init"] = "pissa" if found.get("pissa_iter", 16) == -1 else "pissa_fast"
    _quantization(found)


def _adapter(found: Import) -> None:
    """The adapter that the run continues, unless the file does something else with it."""
    paths, makes_new = words(found.get("adapter_name_or_path")), bool(found.get("create_new_adapter"))
    if len(paths) == 1 and not makes_new:
        found.set("adapter_name_or_path", "lora.adapter_path", paths[0])
    elif paths:
        what = "is merged, and a new adapter is trained" if makes_new else "several adapters are merged"
        found.missing.append(f"adapter_name_or_path: {', '.join(paths)} ({what}; merge first, and set model.path)")


def _quantization(found: Import) -> None:
    bits, library = found.get("quantization_bit"), str(found.get("quantization_method", "bnb"))
    if not bits:
        return
    names = {8: "int8", 4: str(found.get("quantization_type", "nf4"))}
    name = names.get(bits) if isinstance(bits, int) else None
    if library not in ("bnb", "bitsandbytes") or name not in registry.QUANTIZATIONS:
        raise found.fail("quantization_bit", f"{bits} with {library}", "use bitsandbytes with 4 or 8 bits")
    found.patch["method.quantization"] = name


# -- stage and data -------------------------------------------------------------------------------------------------


def _stage(found: Import) -> None:
    stage, loss = str(found.get("stage")), str(found.get("pref_loss", "sigmoid"))
    if stage not in STAGES:
        raise found.fail("stage", stage, f"supported values are {', '.join(STAGES)}")
    found.patch["train.stage"] = STAGES[stage]
    if stage == "dpo" and loss == "orpo":
        found.patch["train.stage"] = "orpo"
    elif stage == "dpo":
        if loss not in ("sigmoid", "hinge", "ipo"):
            raise found.fail("pref_loss", loss, "supported values are sigmoid, hinge, ipo and orpo")
        found.patch["preference.dpo_loss_type"] = loss
    if found.get("train_on_prompt"):
        found.patch["data.loss_on"] = "all_tokens"
    packing = found.get("packing")
    found.patch["data.packing"] = bool(found.get("neat_packing") or (stage == "pt" if packing is None else packing))
    if packing and stage == "sft" and not found.get("neat_packing"):
        found.different.append(
            "packing: packed examples do not attend to each other in Footplate, as with neat_packing"
        )


def _data(found: Import) -> None:
    template = found.get("template")
    if isinstance(template, str) and re.fullmatch(TEMPLATE, template):
        found.patch["llamafactory.template"] = template
    if template is not None and found.patch["train.stage"] != "pretraining":
        found.different.append(
            f"template: {template}: the tokenizer's own chat template is used (data.chat_template: model)"
        )
    if found.patch["train.stage"] == "reward":
        found.different.append("cutoff_len: LLaMA-Factory truncates longer pairs, Footplate drops them")
    if found.get("enable_thinking") is False:
        found.patch["data.chat_template_kwargs"] = '{"enable_thinking": false}'
    take_datasets(found)


# -- training -------------------------------------------------------------------------------------------------------


def _schedule(found: Import) -> None:
    found.schedule("lr_scheduler_type")
    found.patch["train.warmup_steps"] = found.number("warmup_steps") or found.number("warmup_ratio")
    found.duration("max_steps")
    found.patch["train.activation_checkpointing"] = not found.get("disable_gradient_checkpointing")
    found.trainer_arguments()


def _precision(found: Import) -> None:
    """Source: model/loader.py and adapter.py: weights are loaded in the dtype of the model's files, and those that are
    trained become fp32, except with pure_bf16 and BAdam."""
    chosen = [key for key in ("pure_bf16", "fp8", "bf16", "fp16", "tf32") if found.get(key)]
    has_frozen, trains_half = found.patch["method.kind"] == "lora", found.get("use_badam") and "fp16" not in chosen
    usual = "auto" if has_frozen else "fp32"
    found.patch["precision.compute"] = "pure_bf16" if trains_half else chosen[0] if chosen else usual
    if has_frozen and not chosen:
        text = "LLaMA-Factory computes in the dtype of the model's files without them, Footplate in bf16 if it can"
        found.different.append(f"bf16 and fp16: {text}")
    if "fp8" in chosen and found.get("fp8_backend") in registry.FP8_BACKENDS:
        found.patch["precision.fp8_backend"] = found.get("fp8_backend")


def _optimizer(found: Import) -> None:
    name = str(found.get("optim"))
    name = OPTIMIZER_NAMES.get(name, name)
    for kind in ("galore", "apollo"):
        if not found.get(f"use_{kind}"):
            continue
        inner = {"adamw_bnb_8bit": "adamw_8bit", "adafactor": "adafactor"}.get(name, "adamw")
        name = f"{kind}_{inner}" + ("_layerwise" if found.get(f"{kind}_layerwise") else "")
        found.patch |= {
            "train.projection_rank": found.get(f"{kind}_rank", 16),
            "train.update_proj_gap": found.get(f"{kind}_update_interval", 200),
            f"train.{kind}_scale": found.get(f"{kind}_scale", 2.0 if kind == "galore" else 32.0),
        }
        targets = words(found.get(f"{kind}_target", "all"))
        if targets != ["all"]:
            found.patch |= {"train.optim_targets": "custom", "train.optim_target_modules": targets}
        if kind == "galore":
            found.patch["train.galore_proj_type"] = found.get("galore_proj_type", "std")
        else:
            found.patch["train.apollo_proj"] = found.get("apollo_proj", "random")
            found.patch["train.apollo_scale_type"] = found.get("apollo_scale_type", "channel")
    if found.get("use_badam"):
        if (mode := found.get("badam_mode", "layer")) != "layer":
            raise found.fail("badam_mode", mode, "layer is known")
        name = "badam"
        found.patch["train.badam_switch_mode"] = found.get("badam_switch_mode", "ascending")
        found.patch["train.badam_switch_block_every"] = found.get("badam_switch_interval", 50)
    name = "adam_mini" if found.get("use_adam_mini") else "muon" if found.get("use_muon") else name
    if name not in registry.OPTIMIZERS:
        raise found.fail("optim", name, "see train.optim for the optimizers of Footplate")
    found.patch["train.optim"] = name


def _saving(found: Import) -> None:
    found.patch["save.steps"] = found.get("save_steps")
    found.intervals(has_validation(found))
    if isinstance(path := found.get("resume_from_checkpoint"), str):
        found.patch |= {"save.resume_from": "path", "save.resume_path": path}
    found.reporter("report_to")


def _devices(found: Import) -> None:
    found.deepspeed("deepspeed")
    found.fsdp(default_version=2, ignored={"auto_wrap_policy"})
    timeout = found.number("ddp_timeout", 1800)
    if timeout <= MAX_TIMEOUT:
        found.patch["parallel.ddp_timeout"] = timeout
    else:
        found.different.append(f"ddp_timeout: {timeout}: in Footplate, a rank that hangs ends the run after 30 minutes")


def _backend(found: Import) -> None:
    """Megatron-Core and KTransformers, which only LLaMA-Factory has."""
    is_sharded = found.get("deepspeed") or found.get("fsdp")  # the keys may mean something else then
    if given := {} if is_sharded else {key: size for key in MEGATRON if (size := found.get(key))}:
        chosen = {MEGATRON[key]: size for key, size in given.items()}
        found.patch |= {"llamafactory.backend": "megatron", "parallel.strategy": "ddp", **chosen}
        found.patch["train.activation_checkpointing"] = found.get("recompute_granularity") == "full"
        for key in ("use_distributed_optimizer", "moe_token_dispatcher_type"):
            found.get(key)  # marks it as read: Footplate writes it, too
    elif found.get("use_kt"):
        launch = {"parallel.strategy": "fsdp2", "launch.launcher": "accelerate"}
        found.patch |= {"llamafactory.backend": "ktransformers", **launch}
        if path := found.get("kt_weight_path"):
            found.patch["llamafactory.kt_weight_path"] = path
    else:
        return
    found.patch["launch.trainer"] = "llamafactory"
    # LLaMA-Factory uses its own template.
    found.different[:] = [line for line in found.different if not line.startswith("template:")]


MAX_TIMEOUT = 86_400
PARTS: tuple[Callable[[Import], None], ...] = (
    _model, _method, _stage, _data, _schedule, _precision, _optimizer, _saving, _devices, _backend,
)  # fmt: skip
