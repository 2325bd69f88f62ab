"""The keys of schedule, precision, optimizer, checkpoints, devices and backend."""

from __future__ import annotations

from typing import Any

from backend import registry
from backend.config.options import get
from backend.launch.llamafactory.exported import OPTIONS, Export
from backend.launch.llamafactory.model import attention_layers
from backend.registry.llamafactory_names import MEGATRON
from backend.runs import DEEPSPEED

OUTPUT = "output"


def write(made: Export) -> None:
    """Add the keys to the table."""
    for part in (_schedule, _precision, _optimizer, _saving, _devices, _backend):
        part(made)


def _schedule(made: Export) -> None:
    train = made.spec.train
    made.written |= {"train.max_steps", "train.num_train_epochs", "train.lr_scheduler_type", "train.warmup_steps"}
    if train.duration == "steps":
        made.table["max_steps"] = train.max_steps
    else:
        made.table["num_train_epochs"] = train.num_train_epochs
    made.table["lr_scheduler_type"] = made.value("train.lr_scheduler_type") or "constant"
    warmup = made.value("train.warmup_steps") or 0
    _add_schedule_arguments(made, float(warmup))
    made.table |= {"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}
    made.table["disable_gradient_checkpointing"] = not made.value("train.activation_checkpointing")
    if made.value("train.train_sampling_strategy") == "group_by_length":
        made.table["train_sampling_strategy"] = "group_by_length"
    if made.value("data.streaming"):
        _streaming(made)


def _add_schedule_arguments(made: Export, warmup: float) -> None:
    schedule, steps = made.table["lr_scheduler_type"], made.run.total_steps
    if schedule == "warmup_stable_decay" and steps is None:
        made.table["lr_scheduler_type"] = "constant_with_warmup"
        made.different.append(
            "train.lr_scheduler_type: constant_with_warmup is written, since LLaMA-Factory needs to know in how many "
            "steps the learning rate decays, and the number of steps of this run is not known"
        )
        return
    all_steps = steps or 0  # only that schedule depends on them
    if found := registry.scheduler_arguments(schedule, all_steps, registry.warmup_steps(warmup, all_steps)):
        made.table["lr_scheduler_kwargs"] = found


def _streaming(made: Export) -> None:
    """LLaMA-Factory divides local files among the DataLoader workers, and reads nothing without any."""
    made.table["streaming"] = True
    if not made.spec.train.dataloader_num_workers:
        made.written.add("train.dataloader_num_workers")
        made.table["dataloader_num_workers"] = 1
        made.different.append("train.dataloader_num_workers: 1 is written; without it, LLaMA-Factory streams no files")


def _precision(made: Export) -> None:
    compute, run = made.value("precision.compute"), made.run
    chosen = run.compute_dtype if compute == "auto" else compute
    if chosen in ("bf16", "fp16", "pure_bf16", "fp8", "tf32"):
        made.table[chosen] = True
    if chosen == "fp8" and (backend := made.value("precision.fp8_backend")):
        made.table["fp8_backend"] = backend
    if text := _other_dtype(made, chosen):
        made.different.append(f"precision.compute: {text}")


def _other_dtype(made: Export, chosen: str) -> str:
    """What LLaMA-Factory keeps, or computes, in another dtype, a sentence without its end; '' for nothing. It loads
    weights in the dtype of the model's files. DeepSpeed casts them in both."""
    spec, compute, files = made.spec, made.run.compute_dtype, made.shape.dtype if made.shape is not None else ""
    is_fp32 = chosen in ("fp32", "tf32")
    if spec.method.quantization != "none":
        text = "LLaMA-Factory computes with quantized weights in bf16 or fp16, Footplate in fp32"
        return text if is_fp32 else ""
    if spec.train.optim == "badam" and chosen != "pure_bf16" and files != "float32":
        return "with BAdam, LLaMA-Factory trains weights in the dtype of the model's files, Footplate in fp32"
    if spec.method.kind != "full" and is_fp32 and files != "float32":
        return "LLaMA-Factory keeps frozen weights in the dtype of the model's files, Footplate in fp32"
    is_known = files == "float32" and not is_fp32 and not spec.parallel.strategy.startswith("zero")
    if spec.method.kind == "lora" and is_known and not registry.LORA_INITS[spec.lora.init].changes_base_weights:
        return f"LLaMA-Factory keeps frozen weights in fp32, the dtype of the model's files, Footplate in {compute}"
    return ""


def _optimizer(made: Export) -> None:
    name = made.value("train.optim")
    family, _, inner = name.partition("_")
    if family in ("galore", "apollo"):
        _projected(made, family, inner)
    elif name == "badam":
        made.table["use_badam"] = True
        made.table["badam_switch_mode"] = made.value("train.badam_switch_mode")
        made.table["badam_switch_interval"] = made.value("train.badam_switch_block_every")
    elif name in ("adam_mini", "muon"):
        made.table[f"use_{name}"] = True
    else:
        row = registry.OPTIMIZERS[name]
        values: dict[str, Any] = dict(row.arguments) | (
            {"momentum": made.value("train.momentum")} if "momentum" in row.reads else {}
        )
        made.table["optim"] = row.trainer_optim or "adamw_torch"
        made.table |= {"optim_args": ",".join(f"{key}={value}" for key, value in values.items())} if values else {}
        if not row.trainer_optim:
            made.lacks("train.optim", f"LLaMA-Factory has no {row.label}; adamw_torch is written")


def _projected(made: Export, family: str, inner: str) -> None:
    """GaLore or APOLLO around another optimizer."""
    base = inner.removesuffix("_layerwise")
    made.table[f"use_{family}"] = True
    made.table["optim"] = {"adamw_8bit": "adamw_8bit", "adafactor": "adafactor"}.get(base, "adamw_torch")
    made.table[f"{family}_layerwise"] = inner.endswith("_layerwise")
    made.table[f"{family}_rank"] = made.value("train.projection_rank")
    made.table[f"{family}_update_interval"] = made.value("train.update_proj_gap")
    made.table[f"{family}_scale"] = made.value(f"train.{family}_scale")
    targets, custom = made.value("train.optim_targets"), made.value("train.optim_target_modules")
    attention = attention_layers(made, "train.optim_targets") if targets == "attention" else ("all",)
    made.table[f"{family}_target"] = ",".join(custom if targets == "custom" else attention)
    if family == "galore":
        made.table["galore_proj_type"] = made.value("train.galore_proj_type")
    else:
        made.table["apollo_proj"] = made.value("train.apollo_proj")
        made.table["apollo_scale_type"] = made.value("train.apollo_scale_type")


def _saving(made: Export) -> None:
    spec = made.spec
    made.written |= {
        "save.strategy",
        "save.steps",
        "eval.strategy",
        "eval.steps",
        "logging.report_to",
        "logging.run_name",
    }
    made.table["logging_nan_inf_filter"] = False  # else a loss that is NaN is logged as the mean of earlier ones
    made.table |= {"output_dir": OUTPUT, "save_strategy": spec.save.strategy, "report_to": spec.logging.report_to}
    if spec.save.strategy == "steps":
        made.table["save_steps"] = int(spec.save.steps)
    if spec.logging.run_name:
        made.table["run_name"] = spec.logging.run_name
    if made.table.get("eval_dataset") or made.table.get("val_size"):
        made.table["eval_strategy"] = spec.eval.strategy
        if spec.eval.strategy == "steps":
            made.table["eval_steps"] = int(spec.eval.steps)
        if spec.eval.strategy != "no" and spec.eval.early_stopping_patience:  # which requires it
            made.table["metric_for_best_model"] = "eval_loss"
    if spec.save.resume_from == "path":
        made.table["resume_from_checkpoint"] = made.value("save.resume_path")
    elif spec.save.resume_from == "scratch":
        made.table["overwrite_output_dir"] = True
    made.written |= {"save.resume_from", "save.final_model"}
    if not spec.save.final_model:
        made.lacks("save.final_model", "LLaMA-Factory always saves the model")


def _devices(made: Export) -> None:
    spec, run = made.spec, made.run
    made.written |= {"parallel.strategy", "parallel.ddp_timeout", "parallel.extra_config"}
    made.table |= {"use_cpu": True} if run.device == "cpu" else {}
    made.table["ddp_timeout"] = spec.parallel.ddp_timeout
    made.table |= {"deepspeed": DEEPSPEED} if made.deepspeed else {}
    if made.deepspeed or made.is_accelerated:  # they are in a separate file
        made.written |= {name for name in OPTIONS if name.startswith("parallel.")}
    elif run.world_size > 1 and spec.parallel.strategy != "ddp":
        label = registry.STRATEGIES[spec.parallel.strategy].label
        made.lacks("parallel.strategy", f"{label} cannot be set in LLaMA-Factory's YAML; the training would use DDP")


def _backend(made: Export) -> None:
    """The keys of a backend other than transformers. Source: mcore_adapter 0.10 training_args.py; llamafactory 0.9.5
    hparams/model_args.py, KTransformersArguments."""
    chosen = made.spec.llamafactory
    if chosen.backend == "megatron":
        degrees = {key: get(made.spec, option) for key, option in MEGATRON.items()}
        made.table |= {key: value for key, value in degrees.items() if isinstance(value, bool) or value > 1}
        made.table["use_distributed_optimizer"] = True
        if chosen.expert_parallel_size > 1:
            made.table["moe_token_dispatcher_type"] = "alltoall"  # allgather does not support lengths that differ
        if made.table.pop("disable_gradient_checkpointing", True) is False:
            made.table["recompute_granularity"] = "full"
    elif chosen.backend == "ktransformers":
        made.table["use_kt"] = True
        made.table |= {"kt_weight_path": chosen.kt_weight_path} if chosen.kt_weight_path else {}
