"""Rules of tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, error
from backend.rules.common_fixes import DDP, FSDP2, NO_CHECKPOINTS, WEIGHTS_ONLY
from backend.rules.distributed.examples import FOUR_PROCESSES, FULL, TINY_FACTS, with_cores
from backend.rules.examples import DEMO, GPT2, LAPTOP, TWO_H100

TENSOR = {**FULL, "parallel.strategy": "tensor", "save.strategy": "no"}


@error(
    "STR019",
    fields=("parallel.strategy", "method.kind"),
    title="LoRA does not work with tensor parallelism",
    source="verified with peft 0.21 and transformers 5.23: the adapter has the shapes of the whole layer",
    fixes=(FSDP2, Fix("Fine-tune all parameters", FULL, safe=False, cost="much more memory")),
    fails_on=Example({"parallel.strategy": "tensor", "save.strategy": "no"}, TWO_H100, TINY_FACTS),
    passes_on=Example(TENSOR, TWO_H100, TINY_FACTS),
    proof="launch",
)
def lora_with_tensor_parallelism(case: Case) -> str | None:
    """Tensor parallelism loads a shard of every linear layer, but peft creates adapters for the whole layer, so their
    outputs have different shapes."""
    if case.run.engine.supports_lora or case.spec.method.kind != "lora":
        return None
    return (
        f"method.kind is lora, but each of the {case.run.tensor_parallel_size} tensor parallel ranks holds only a "
        "shard of every layer that an adapter would be added to."
    )


@error(
    "STR020",
    fields=("parallel.strategy", "save.strategy", "save.only_model"),
    title="The Trainer cannot resume a tensor parallel run",
    source="transformers 5.23 trainer.py: resuming is not supported for models sharded at load time",
    fixes=(WEIGHTS_ONLY, NO_CHECKPOINTS, FSDP2),
    fails_on=Example({**TENSOR, "save.strategy": "epoch"}, TWO_H100, TINY_FACTS),
    passes_on=Example(TENSOR, TWO_H100, TINY_FACTS),
    proof="launch",
)
def tensor_parallel_resume(case: Case) -> str | None:
    """The Trainer cannot save and load the optimizer state of a model that was sharded while loading."""
    save = case.spec.save
    if case.run.engine.can_resume or not save.can_resume:
        return None
    return (
        f"save.strategy is {save.strategy} with optimizer state, but the Trainer cannot resume a tensor parallel model."
    )


@error(
    "STR021",
    fields=("parallel.tensor_parallel_size",),
    title="The KV heads are not divisible by the tensor parallel size",
    source="transformers 5.23 distributed/tensor_parallel.py: a projection is divided evenly, and attention needs "
    "whole heads",
    fixes=(FSDP2,),
    fails_on=Example({**TENSOR, **FOUR_PROCESSES, "parallel.tensor_parallel_size": 4}, with_cores(LAPTOP, 4)),
    passes_on=Example(
        {**TENSOR, "parallel.tensor_parallel_size": 3, "launch.nproc_per_node": 3}, with_cores(LAPTOP, 3)
    ),
    proof="launch",
)
def tensor_parallel_head_count(case: Case) -> str | None:
    """Tensor parallelism divides the attention projections by head, so that each rank computes whole heads."""
    shape, size = case.shape, case.run.tensor_parallel_size
    if shape is None or shape.kv_heads % size == 0:
        return None
    return f"{shape.kv_heads} KV heads cannot be divided evenly among {size} tensor parallel ranks."


@error(
    "STR038",
    fields=("parallel.strategy", "model.builtin", "model.path", "model.hub_id"),
    title="The architecture has no tensor parallel plan for its layers",
    source="transformers 5.23 distributed/mixin.py, _resolve_parallel_plans: a model without tp_plan is refused",
    fixes=(FSDP2, DDP),
    fails_on=Example(TENSOR, TWO_H100, replace(DEMO, shape=GPT2)),
    passes_on=Example(TENSOR, TWO_H100, TINY_FACTS),
    proof="launch",
)
def missing_tensor_parallel_plan(case: Case) -> str | None:
    """transformers divides layers by column or by row as the architecture's base_model_tp_plan says, and refuses a
    model without a plan, such as GPT-2, OPT, Falcon or BLOOM. The plan of a few others, such as gpt-oss, covers only
    the output layer, so that each device would hold all layers."""
    shape = case.shape
    if case.run.tensor_parallel_size == 1 or shape is None or shape.tensor_parallel_plan == "layers":
        return None
    if shape.tensor_parallel_plan:
        return f"transformers' tensor parallel plan for {shape.architecture} covers only the output layer."
    return f"transformers has no tensor parallel plan (base_model_tp_plan) for {shape.architecture}."


@error(
    "STR057",
    fields=("parallel.strategy", "model.builtin", "model.path", "model.hub_id"),
    title="This architecture cannot be trained with tensor parallelism",
    source="transformers 5.23 models/llama4/modeling_llama4.py: Llama4TextMoe.forward adds to the output of its shared "
    "expert in place; models/doge/modeling_doge.py: prepare_dynamic_mask; core_model_loading.py divides some weights "
    "that it converts into other parts than one process has (HRM, Inkling 2; with FSDP2 Kimi Linear and others)",
    fixes=(FSDP2,),
    fails_on=Example(TENSOR, TWO_H100, replace(TINY_FACTS, model_type="llama4_text")),
    passes_on=Example(TENSOR, TWO_H100, TINY_FACTS),
)
def architecture_without_tensor_parallelism(case: Case) -> str | None:
    """With tensor parallelism each device has some of the heads and columns of a layer. transformers has a plan that
    divides the layers of these architectures, but their code, or the loading of their weights, does not allow for it:
    the first step fails, or another model is trained or saved. Some can be divided among one group of devices, but not
    with FSDP2 over several groups."""
    run, refused = case.run, dict(registry.NO_TENSOR_PARALLELISM)
    with_fsdp2 = run.world_size > run.tensor_parallel_size
    refused |= registry.NO_TENSOR_FSDP2 if with_fsdp2 else {}
    kinds = sorted(case.model_types & refused.keys())
    if run.tensor_parallel_size == 1 or not kinds:
        return None
    groups = f" with {run.world_size // run.tensor_parallel_size} groups" if with_fsdp2 else ""
    return f"The strategy is {case.strategy.label}{groups}, and the model type is {kinds[0]}: {refused[kinds[0]]}."
