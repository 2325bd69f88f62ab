"""Rules of extra config for deepspeed.json: keys that DeepSpeed or the Trainer refuses, or that break the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from backend.config import merge
from backend.engines.deepspeed_keys import TOP_BLOCKS
from backend.rules.base import Case, Example, Fix, Violation, error, names, reasons
from backend.rules.distributed.extra_config import (
    EXTRA_CONFIG,
    HARMLESS,
    ZERO2,
    extra_config,
    number,
    value_at,
    without_keys,
    zero3_example,
)
from backend.rules.examples import TWO_H100
from backend.runs import DEEPSPEED

# deepspeed 0.19 runtime/config.py raises DeepSpeedConfigError for each of these.
REMOVED_KEYS = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
    "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
    "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zeropp_loco_param",
)  # fmt: skip
GATHER_ON_SAVE = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
AUTOTP_SIZE = "tensor_parallel.autotp_size"
ZERO, BF16 = "zero_optimization", "bf16.bf16_"
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _zero2_example(extra: Mapping[str, Any]) -> Example:
    return Example({**ZERO2, EXTRA_CONFIG: json.dumps(extra)}, TWO_H100)


@error(
    "STR032",
    fields=(EXTRA_CONFIG,),
    title="The DeepSpeed config and the options set different values",
    source="transformers 5.23 integrations/deepspeed.py: values that mismatch TrainingArguments raise ValueError",
    fails_on=zero3_example({"gradient_clipping": 0.5}),
    passes_on=zero3_example({"gradient_clipping": 1.0}),
    proof="launch",
)
def deepspeed_config_mismatch(case: Case) -> Violation | None:
    """deepspeed.json contains auto for each value that an option sets, and the Trainer fills it in. A number in the
    extra config must be equal to the option; otherwise, the Trainer raises ValueError."""
    extra = extra_config(case, DEEPSPEED)
    if not extra:
        return None
    expected = _trainer_values(case)
    wrong = [path for path, value in expected.items() if value_at(extra, path) not in (merge.AUTO, value)]
    if not wrong:
        return None
    values = [f"{path} is {value_at(extra, path)} (options: {expected[path]})" for path in wrong]
    return Violation(
        f"In the extra config, {names(values)}. The Trainer would raise ValueError.",
        (Fix("Use the options", without_keys(extra, wrong), safe=False),),
    )


def _trainer_values(case: Case) -> dict[str, Any]:
    """Dotted keys of deepspeed.json with the values that the Trainer fills in."""
    train, dtype = case.spec.train, case.run.compute_dtype
    batch_size = train.per_device_train_batch_size * train.gradient_accumulation_steps
    values = {
        "train_micro_batch_size_per_gpu": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train_batch_size": batch_size * case.run.world_size,
        "gradient_clipping": train.max_grad_norm,
        "fp16.enabled": dtype == "fp16",
        "optimizer.params.lr": train.learning_rate,
        "optimizer.params.betas": [train.adam_beta1, train.adam_beta2],
        "optimizer.params.eps": train.adam_epsilon,
        "optimizer.params.weight_decay": train.weight_decay,
        "scheduler.params.warmup_max_lr": train.learning_rate,
    }
    return {**values, "bf16.enabled": dtype == "bf16"} if case.run.fp32_master_weights else values


@error(
    "STR033",
    fields=(EXTRA_CONFIG, "train.optim", "train.lr_scheduler_type"),
    title="DeepSpeed would replace the optimizer or the learning rate schedule",
    source="transformers 5.23 integrations/deepspeed.py deepspeed_optim_sched: if the config has these sections, the "
    "Trainer creates neither",
    fails_on=zero3_example({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}),
    passes_on=HARMLESS,
)
def deepspeed_optimizer_or_scheduler(case: Case) -> Violation | None:
    """An optimizer or scheduler block in deepspeed.json silently replaces the Trainer's: train.optim, LoRA+ learning
    rates, weight decay exclusions, warmup and schedule have no effect, and DeepSpeed compiles its Adam on first use."""
    extra = extra_config(case, DEEPSPEED)
    blocks: list[str] = [name for name in ("optimizer", "scheduler") if name in extra]
    if not blocks:
        return None
    types = [str(value_at(extra, f"{name}.type")) for name in blocks]
    fix = Fix("Use the options", without_keys(extra, blocks), safe=types == ["AdamW"])
    found = names([f"{name} {kind}" for name, kind in zip(blocks, types, strict=True)])
    replaced = [{"optimizer": "train.optim", "scheduler": "train.lr_scheduler_type"}[name] for name in blocks]
    return Violation(f"The extra config defines {found}, so {names(replaced)} would have no effect.", (fix,))


@error(
    "STR034",
    fields=(EXTRA_CONFIG,),
    title="The extra config has keys that DeepSpeed removed",
    source="deepspeed 0.19 runtime/config.py: DeepSpeedConfigError",
    fails_on=zero3_example({"elasticity": {"enabled": False}}),
    passes_on=HARMLESS,
    proof="launch",
)
def removed_deepspeed_keys(case: Case) -> Violation | None:
    """DeepSpeed 0.19 raises DeepSpeedConfigError for these keys from older config files, even if the feature is
    disabled."""
    extra = extra_config(case, DEEPSPEED)
    found = [path for path in REMOVED_KEYS if value_at(extra, path) != merge.AUTO] if extra else []
    if not found:
        return None
    message = f"DeepSpeed no longer supports {names(found)} and would raise an error at start."
    return Violation(message, (Fix("Remove these keys", without_keys(extra, found)),))


@error(
    "STR035",
    fields=(EXTRA_CONFIG, "save.final_model"),
    title="The final ZeRO-3 model could not be saved",
    source="accelerate 1.15 accelerator.py get_state_dict: Cannot get 16bit model weights because ... is False",
    fails_on=zero3_example({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}),
    passes_on=zero3_example({"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}),
    proof="launch",
)
def zero3_save_without_gathering(case: Case) -> Violation | None:
    """ZeRO-3 shards all weights and must gather them to save the model. With gathering disabled, the run trains to the
    end and then fails."""
    extra = extra_config(case, DEEPSPEED)
    if case.run.zero_stage != 3 or not case.spec.save.final_model or value_at(extra, GATHER_ON_SAVE) is not False:
        return None
    fixes = (
        Fix("Gather the weights on save", without_keys(extra, [GATHER_ON_SAVE])),
        Fix(
            "Save checkpoints only",
            {"save.final_model": False},
            cost="convert the last checkpoint with zero_to_fp32.py",
        ),
    )
    return Violation(f"save.final_model is set, but the extra config sets {GATHER_ON_SAVE} to false.", fixes)


@error(
    "STR041",
    fields=(EXTRA_CONFIG, "parallel.strategy"),
    title="DeepSpeed's AutoTP would save only a shard of the model",
    source="deepspeed 0.19 module_inject/auto_tp.py, verified with two processes: the saved model is rank 0's shard",
    fails_on=_zero2_example({"tensor_parallel": {"autotp_size": 2}}),
    passes_on=HARMLESS,
)
def deepspeed_autotp(case: Case) -> Violation | None:
    """With AutoTP, DeepSpeed divides the linear layers among ranks when it starts. Footplate does not support this: it
    computes batch size and memory for complete layers on each rank, and saves only the shard of rank 0."""
    extra = extra_config(case, DEEPSPEED)
    size = value_at(extra, AUTOTP_SIZE)
    if size == merge.AUTO or number(size) <= 1:
        return None
    fix = Fix("Disable AutoTP", without_keys(extra, ["tensor_parallel"]), safe=False)
    return Violation(
        f"The extra config sets {AUTOTP_SIZE} to {size}: the saved model would be the shard of rank 0.", (fix,)
    )


Lookup = Callable[[str], Any]  # the value of a dotted key of the extra config
Applies = Callable[[Case, Lookup], bool]
Conflict = tuple[str, Applies, str]  # key, when DeepSpeed refuses it, and why


def _offloads_optimizer(case: Case) -> bool:
    return case.run.zero_stage > 0 and case.run.optimizer_offload != "none"


def _refuses_bf16_masters(case: Case, at: Lookup) -> bool:
    """bf16 master weights need an offloaded optimizer with fp32 state, or an optimizer state in bf16 on the device."""
    bf16_state = at(f"{BF16}optimizer_states") is True
    return not case.run.zero_stage or bf16_state == _offloads_optimizer(case)


def _accumulates_in_fp32(case: Case, at: Lookup) -> bool:
    """Whether ZeRO-1 accumulates bf16 gradients in fp32, for which DeepSpeed uses a different optimizer class."""
    dtype = DTYPES.get(str(at("data_types.grad_accum_dtype")))
    return case.run.zero_stage == 1 and case.run.compute_dtype == "bf16" and dtype == "fp32"


def _reduce_scatters(case: Case, at: Lookup) -> bool:
    """Whether gradients are averaged with reduce-scatter, which leaves each device its shard only."""
    averages = str(at("gradient_allreduce_op")).lower() != "sum"
    return averages and case.run.zero_stage in (2, 3) and at(f"{ZERO}.reduce_scatter") is not False


def _other_dtype(case: Case, value: Any) -> bool:
    return DTYPES.get(str(value), case.run.compute_dtype) != case.run.compute_dtype


def _is_odd(value: Any) -> bool:
    return isinstance(value, int | float) and value % 2 != 0


def _on_cpu(path: str, stage: int = 0) -> Conflict:
    """A key that has an effect from this ZeRO stage on, for which DeepSpeed has no code for a CPU."""

    def applies(case: Case, at: Lookup) -> bool:
        is_on = at(path) is True or number(at(path)) > 1
        return is_on and case.run.device == "cpu" and case.run.zero_stage >= stage

    return path, applies, "DeepSpeed supports it on GPUs only"


def _needs_package(path: str, package: str) -> Conflict:
    """A switch of DeepSpeed's monitor, which imports a package."""

    def applies(case: Case, at: Lookup) -> bool:
        return at(path) is True and bool(case.versions) and package not in case.versions

    return path, applies, f"the package {package} is not installed"


def _unknown_dtype(path: str) -> Conflict:
    known = {*DTYPES, *(f"torch.{name}" for name in DTYPES), "half", "float"}
    return path, lambda case, at: at(path) is not None and str(at(path)) not in known, "must be fp32, fp16 or bf16"


def _clips_scaled_gradients(case: Case, at: Lookup) -> bool:
    """Whether DeepSpeed scales the loss for PyTorch's autocast; with ZeRO it clips before it undoes the scale."""
    is_half = str(at("torch_autocast.dtype")) in ("fp16", "float16", "torch.float16", "half")
    return is_half and at("torch_autocast.enabled") is True and case.run.zero_stage > 0


def _unknown_modules(case: Case, at: Lookup) -> bool:
    given = at("torch_autocast.lower_precision_safe_modules")
    is_list = isinstance(given, list) and all("." in str(name) for name in given)
    return given is not None and at("torch_autocast.enabled") is True and not is_list


def _leaf_that_fails(key: str, fails: Callable[[Case, str], bool]) -> Conflict:
    """Leaf modules of ZeRO-3 whose input DeepSpeed does not see, since it is no positional float tensor, or that the
    loss does not call. It suits MLPs, experts and whole layers."""
    path = f"{ZERO}.leaf_module.{key}"

    def applies(case: Case, at: Lookup) -> bool:
        given = at(path) if isinstance(at(path), list) else []
        last = [str(name).rpartition(".")[2] for name in given]
        return case.run.zero_stage == 3 and any(fails(case, name) for name in last)

    why = "ZeRO-3 fails if embeddings, output layers, whole models, or attention with keyword inputs are leaf modules"
    return path, applies, why


LEAF_CLASSES = ("Attention", "Model", "ForCausalLM", "ForSequenceClassification", "Embedding", "Linear")
LEAF_NAMES = (
    "", "model", "transformer", "layers", "h", "self_attn", "attn", "attention", "embed_tokens", "wte", "lm_head",
)  # fmt: skip
# Model type -> class and name of its attention, whose blocks pass it the hidden states by position: verified with two
# processes, which had the losses of a run without leaf modules. Those of Llama, OPT, GPT-J and CodeGen failed.
POSITIONAL_ATTENTION = {
    "gpt2": ("GPT2Attention", "attn"),
    "gpt_neo": ("GPTNeoAttention", "attn"),
    "mpt": ("MptAttention", "attn"),
    "gpt_neox": ("GPTNeoXAttention", "attention"),
    "bloom": ("BloomAttention", "self_attention"),
    "falcon": ("FalconAttention", "self_attention"),
}


def _is_failing_class(case: Case, name: str) -> bool:
    return name.endswith(LEAF_CLASSES) and name not in {known for known, _ in POSITIONAL_ATTENTION.values()}


def _is_failing_name(case: Case, name: str) -> bool:
    return name in LEAF_NAMES and name not in {POSITIONAL_ATTENTION.get(kind, ("", ""))[1] for kind in case.model_types}


# Verified with two processes, or read in deepspeed 0.19 zero/config.py, runtime/config.py, runtime/base_optimizer.py
# and runtime/engine.py.
CONFLICTS: tuple[Conflict, ...] = (
    *(
        _on_cpu(f"{ZERO}.{name}", stage=3)
        for name in (
            "zero_quantized_weights",
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
            "stage3_module_granularity_threshold",
        )
    ),
    _on_cpu("hybrid_engine.enabled"),
    *(_needs_package(f"{name}.enabled", package) for name, package in MONITORS.items()),
    (
        f"{ZERO}.offload_optimizer.super_offload",
        lambda case, at: at(f"{ZERO}.offload_optimizer.super_offload") is True and case.run.device != "cuda",
        "SuperOffload supports NVIDIA GPUs only",
    ),
    (
        f"{ZERO}.zenflow",
        lambda case, at: at(f"{ZERO}.zenflow") is not None and case.run.zero_stage > 0,
        "ZenFlow requires that DeepSpeed creates the optimizer, and fails on embeddings with ZeRO-3",
    ),
    (
        f"{ZERO}.legacy_stage1",
        lambda case, at: at(f"{ZERO}.legacy_stage1") is True,
        "DeepSpeed has removed the first version of ZeRO-1",
    ),
    (
        f"{ZERO}.allgather_bucket_size",
        lambda case, at: case.run.zero_stage in (1, 2) and _is_odd(at(f"{ZERO}.allgather_bucket_size")),
        "must be even",
    ),
    (
        "checkpoint.writer",
        lambda case, at: at("checkpoint.writer") is not None and case.spec.launch.launcher != "deepspeed",
        "it reads variables that only the deepspeed launcher sets",
    ),
    (
        "sequence_parallel_size",
        lambda case, at: at("sequence_parallel_size") != case.run.sequence_parallel_size,
        "parallel.sequence_parallel_size sets it",
    ),
    _leaf_that_fails("classes", _is_failing_class),
    _leaf_that_fails("names", _is_failing_name),
    _leaf_that_fails("name_suffixes", _is_failing_name),
    _unknown_dtype("torch_autocast.dtype"),
    _unknown_dtype("data_types.grad_accum_dtype"),
    (
        "torch_autocast.dtype",
        _clips_scaled_gradients,
        "with ZeRO, DeepSpeed clips and logs the gradients before it undoes the loss scale of fp16, so updates are "
        "thousands of times too small",
    ),
    (
        "torch_autocast.lower_precision_safe_modules",
        _unknown_modules,
        "must be a list of class names with their modules, such as torch.nn.Linear",
    ),
    (
        "datastates_ckpt",
        lambda case, at: at("datastates_ckpt") is not None,
        "DeepSpeed requires the package datastates, which PyPI does not have",
    ),
    (
        "managed_gradient_accumulation",
        lambda case, at: at("managed_gradient_accumulation") in (False, 0),
        "accelerate requires true",
    ),
    (
        f"{ZERO}.offload_optimizer.ratio",
        lambda case, at: number(at(f"{ZERO}.offload_optimizer.ratio")) < 1 and case.run.zero_stage != 3,
        "only ZeRO-3 supports partial optimizer offload",
    ),
    (
        "gradient_allreduce_op",
        lambda case, at: str(at("gradient_allreduce_op")).lower() == "sum" and case.run.zero_stage == 3,
        "ZeRO-3 supports mean only",
    ),
    (
        f"{ZERO}.compute_grad_norm",
        lambda case, at: (
            at(f"{ZERO}.compute_grad_norm") is False
            and (
                case.run.zero_stage not in (1, 2)
                or bool(case.spec.train.max_grad_norm)
                or _offloads_optimizer(case)
                or _accumulates_in_fp32(case, at)
            )
        ),
        "false requires ZeRO-1 or ZeRO-2 without gradient clipping, optimizer offload, or ZeRO-1 gradient accumulation "
        "in fp32",
    ),
    (
        f"{BF16}master_weights_and_grads",
        lambda case, at: at(f"{BF16}master_weights_and_grads") is True and _refuses_bf16_masters(case, at),
        "requires ZeRO-1, 2 or 3, with the optimizer state offloaded to CPU, or else with bf16_optimizer_states",
    ),
    (
        "fp16.fp16_master_weights_and_grads",
        lambda case, at: at("fp16.fp16_master_weights_and_grads") is True and not _offloads_optimizer(case),
        "requires the optimizer state offloaded to CPU",
    ),
    (
        f"{BF16}optimizer_states",
        lambda case, at: at(f"{BF16}optimizer_states") is True and at(f"{BF16}master_weights_and_grads") is not True,
        "requires bf16_master_weights_and_grads",
    ),
    (
        "data_types.param_dtype",
        lambda case, at: _other_dtype(case, at("data_types.param_dtype")),
        "must be the compute dtype of the run",
    ),
    (
        "data_types.grad_accum_dtype",
        lambda case, at: not case.run.zero_stage and _other_dtype(case, at("data_types.grad_accum_dtype")),
        "ZeRO-0 accumulates gradients in the compute dtype",
    ),
    (
        "gradient_predivide_factor",
        lambda case, at: number(at("gradient_predivide_factor")) == 0,
        "must not be 0",
    ),
    (
        "gradient_predivide_factor",
        lambda case, at: number(at("gradient_predivide_factor")) != 1 and _reduce_scatters(case, at),
        "requires zero_optimization.reduce_scatter to be false",
    ),
    (
        "prescale_gradients",
        lambda case, at: at("prescale_gradients") is True and _reduce_scatters(case, at),
        "requires zero_optimization.reduce_scatter to be false",
    ),
)


@error(
    "STR040",
    fields=(EXTRA_CONFIG,),
    title="DeepSpeed refuses this combination of keys",
    source="deepspeed 0.19 runtime/zero/config.py, runtime/config.py, runtime/engine.py, runtime/base_optimizer.py, "
    "runtime/zero/stage_1_and_2.py: assertions and ValueError, verified with two processes",
    fails_on=_zero2_example({"prescale_gradients": True}),
    passes_on=_zero2_example({"prescale_gradients": True, ZERO: {"reduce_scatter": False}}),
    proof="launch",
)
def conflicting_deepspeed_keys(case: Case) -> Violation | None:
    """Some keys require a certain ZeRO stage or other keys. DeepSpeed checks them only after the model is loaded, and
    raises an error."""
    extra = extra_config(case, DEEPSPEED)
    if not extra:
        return None
    found = [
        (path, why)
        for path, applies, why in CONFLICTS
        if value_at(extra, path) != merge.AUTO and applies(case, lambda path: value_at(extra, path))
    ]
    found += [(name, "must be a JSON object") for name in TOP_BLOCKS if not isinstance(extra.get(name, {}), Mapping)]
    if not found:
        return None
    fix = Fix("Remove these keys", without_keys(extra, [path for path, _ in found]), safe=False)
    return Violation(f"DeepSpeed would refuse the extra config. {reasons(found)}", (fix,))
