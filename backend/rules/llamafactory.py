"""Rules about training with LLaMA-Factory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from backend import registry
from backend.config import merge
from backend.config.options import get
from backend.config.sources import SOURCES
from backend.data.llamafactory import unread_file
from backend.launch.llamafactory import OF_RUNS, Export, export
from backend.machine import install_command
from backend.rules.base import Case, Example, Fix, Violation, error, names, warning
from backend.rules.examples import DEMO, TWO_H100
from backend.rules.requirements import (
    flash_attention,
    fp8_backend,
    is_older,
    liger,
    packages_of,
    prequantized,
    quantization,
)
from backend.wording import counted

WITH = {"launch.trainer": "llamafactory"}
OURS = Fix("Use Footplate's own trainer", {"launch.trainer": "footplate"}, cost="the losses differ slightly")
READABLE = replace(DEMO, format="messages")
WITHOUT_SHAPE = replace(READABLE, shape=None)
ACCELERATED = Fix(
    "Use FSDP2 with accelerate",
    {"parallel.strategy": "fsdp2", "launch.launcher": "accelerate"},
    cost="another launcher",
)


def _export(case: Case) -> Export | None:
    """What LLaMA-Factory would get; None if Footplate's own trainer is used."""
    if case.spec.launch.trainer != "llamafactory":
        return None
    return export(case.spec, case.run, case.facts.format, converts=False, shape=case.shape)


@error(
    "LLF001",
    fields=("llamafactory.environment", "launch.trainer"),
    title="LLaMA-Factory cannot be started",
    source="llamafactory 0.9.5: src/llamafactory/extras/misc.py, check_dependencies",
    fixes=(OURS,),
    fails_on=Example(WITH, facts=replace(READABLE, trainer_problem="The environment /opt/env has no llamafactory.")),
    passes_on=Example(WITH, facts=READABLE),
    at_start=True,
)
def llamafactory_missing(case: Case) -> Violation | str | None:
    """LLaMA-Factory pins older versions of transformers, TRL and gradio than Footplate uses, so it needs its own Python
    environment."""
    created = case.facts.trainer_environment
    if case.spec.launch.trainer != "llamafactory":
        return None
    problem = case.facts.trainer_problem or _missing_packages(case)
    if not problem or not created or created == case.facts.trainer_folder:
        return problem or None
    return Violation(
        problem, (Fix("Use the environment of footplate env create", {"llamafactory.environment": created}),)
    )


def _missing_packages(case: Case) -> str:
    """Which packages the run needs and the environment lacks, as sentences; '' for none. Source: llamafactory 0.9.5
    hparams/parser.py, _check_extra_dependencies, and model/model_utils/quantization.py; the Trainer."""
    spec, installed = case.spec, dict(case.facts.trainer_packages)
    rows: list[registry.Choice | None] = [
        case.optimizer,
        case.strategy if spec.llamafactory.backend != "megatron" else None,
        registry.REPORTERS[spec.logging.report_to],
        registry.DEVICES[case.run.device],
        quantization(case),
        prequantized(case),
        flash_attention(case),
        liger(case),
        fp8_backend(case),
    ]
    needed = [name for row in rows for name in packages_of(row)]
    if case.facts.quant_method == "awq":  # transformers requires gptqmodel from 5.0 on
        needs_gptqmodel = not is_older(installed.get("transformers", ""), "5")
        needed = [name for name in [*needed, "autoawq"] if needs_gptqmodel or name != "gptqmodel"]
    needed += ["unsloth"] if spec.train.use_unsloth else []
    missing = [name for name in dict.fromkeys(needed) if canonicalize_name(name) not in installed]
    if not missing or not installed:
        return ""
    folder = case.facts.trainer_folder
    what = f"The environment {folder} lacks {names(missing)}, which this run needs"
    return f"{what}. Install with: {install_command(missing, folder)}."


@error(
    "LLF002",
    fields=("launch.trainer", "train.optim", "lora.init", "parallel.strategy", "data.chat_template"),
    title="LLaMA-Factory refuses this combination",
    source="llamafactory 0.9.5: hparams/parser.py, get_train_args; hparams/finetuning_args.py and data_args.py, "
    "__post_init__; data/template.py, fix_special_tokens",
    fixes=(OURS,),
    fails_on=Example({**WITH, "lora.init": "pissa_fast", "parallel.strategy": "zero3"}, TWO_H100, READABLE),
    passes_on=Example({**WITH, "lora.init": "pissa_fast"}, TWO_H100, READABLE),
)
def llamafactory_refuses(case: Case) -> Violation | None:
    """LLaMA-Factory's parser raises an error for these combinations after it has started, on each rank. It adds the
    markers of ChatML to a tokenizer that lacks them, and the model must have embeddings for them, or the options add
    these tokens."""
    made, data = _export(case), case.spec.data
    if not made:
        return None
    found, fixes = list(made.refused), list[Fix]()
    markers = [marker for marker in case.facts.split_markers if marker not in data.added_tokens]
    spare = case.shape.vocabulary - case.facts.tokenizer_size if case.shape and case.facts.tokenizer_size else 0
    if len(markers) > spare and made.table.get("template") == "chatml":
        found.append(f"The model has no embeddings for {names(markers)}, which LLaMA-Factory adds to the tokenizer.")
        options = {"data.add_special_tokens": (*data.add_special_tokens, *markers)}
        fixes.append(Fix(f"Add {names(markers)} to the vocabulary", options, False, "LoRA also trains embeddings"))
    return Violation(" ".join(found), tuple(fixes)) if found else None


@error(
    "LLF003",
    fields=("launch.trainer", "parallel.strategy"),
    title="LLaMA-Factory would train with a different strategy",
    source="llamafactory 0.9.5: launcher.py starts torchrun, and the YAML has no key for FSDP or tensor parallelism",
    fixes=(
        Fix("Use DeepSpeed ZeRO-3", {"parallel.strategy": "zero3"}),
        ACCELERATED,
        OURS,
    ),
    fails_on=Example({**WITH, "parallel.strategy": "fsdp2"}, TWO_H100, READABLE),
    passes_on=Example({**WITH, "parallel.strategy": "zero3"}, TWO_H100, READABLE),
)
def llamafactory_strategy(case: Case) -> str | None:
    """Without a DeepSpeed configuration, LLaMA-Factory wraps the model in DDP, whatever the launcher has started: each
    device would hold the whole model."""
    made = None if case.spec.other_backend else _export(case)
    found = [line for line in made.missing if line.startswith("parallel.strategy:")] if made else []
    return f"{found[0].partition(': ')[2]}." if found else None


@error(
    "LLF004",
    fields=("launch.trainer", "data.format"),
    title="LLaMA-Factory cannot read this data",
    source="llamafactory 0.9.5: data/converter.py, SharegptDatasetConverter; data/processor/pretrain.py",
    fixes=(OURS,),
    manual_fix="Convert the data with `footplate export --to llamafactory`, and use the files that it writes as data "
    "files.",
    fails_on=Example(
        {**WITH, "train.stage": "kto", "data.builtin": "train-pairs"}, TWO_H100, replace(DEMO, format="pairs")
    ),
    passes_on=Example(WITH, TWO_H100, READABLE),
)
def llamafactory_data(case: Case) -> str | None:
    """LLaMA-Factory reads conversations, instructions and plain text as they are. Preferences must be texts, or one
    chosen and one rejected turn after a conversation; KTO needs labels that are true or false. In pretraining, it
    reads plain text only. It leaves out conversations in which turns of user and assistant do not alternate, and
    ignores tool calls and reasoning in keys of their own. It reads no compressed files, and only CSV files with commas,
    whose cells it may not read as text, such as NA or 12."""
    made = _export(case)
    if not made:
        return None
    files = (Path(entry["file_name"]) for entry in made.datasets.values() if "file_name" in entry)
    if unread := next((f"{kind} {path}" for path in files if (kind := unread_file(path))), ""):
        return f"LLaMA-Factory does not read {unread}."
    options = [option for option, _, _ in (line.partition(":") for line in made.missing) if _is_format(option)]
    if case.facts.format and "data.format" in options:
        return f"The data format is {case.facts.format}."
    if options and not case.facts.data_issues:
        format = get(case.spec, options[0])
        if format == "auto":
            return f"{options[0]} is auto, and the format cannot be detected before the run. Set the option."
        return f"{options[0]} is {format}, which LLaMA-Factory cannot read directly."
    found = [f"In {counted(count, 'example')}, {words}." for words, count in case.facts.unlike_llamafactory]
    return " ".join([*found, "LLaMA-Factory would leave out this part or the example."]) if found else None


def _is_format(option: str) -> bool:
    """Whether this option is the format of a dataset."""
    return option.startswith("data.") and option.endswith(".format")


@warning(
    "LLF005",
    fields=("launch.trainer",),
    title="LLaMA-Factory ignores some of the options",
    source="llamafactory 0.9.5: hparams/*.py has no argument for them",
    fixes=(OURS,),
    fails_on=Example({**WITH, "train.stop_on_spike": True}, TWO_H100, READABLE),
    passes_on=Example(WITH, TWO_H100, READABLE),
)
def llamafactory_ignores(case: Case) -> str | None:
    """These options are part of Footplate's own trainer, or of a library that LLaMA-Factory does not use."""
    made = _export(case)
    lost = [line.partition(":")[0] for line in made.missing] if made else []
    elsewhere = ("parallel.strategy", SOURCES, "train.half_lr_retries")  # other rules, and Footplate's supervisor
    found = []
    if made and case.spec.train.stage == "reward" and (count := case.facts.num_with_margin):
        checked = counted(case.facts.num_checked, "checked pair")
        found.append(f"LLaMA-Factory ignores the column margin, which {count:,} of {checked} have.")
    lost = [name for name in lost if name not in elsewhere and not _is_format(name)]
    found += [f"LLaMA-Factory has no counterpart of {', '.join(lost)}."] if lost else []
    if own := sorted(merge.parse(case.spec.llamafactory.extra_args).keys() & OF_RUNS) if made else []:
        found.append(f"The run sets {' and '.join(own)} itself, not as llamafactory.extra_args says.")
    if made and case.spec.method.kind == "lora" and case.spec.lora.init == "pissa_fast":
        found.append(
            "Its random numbers for lora.init pissa_fast are not known, so Chat and exports cannot compute the base "
            "weights again that the saved adapter fits. Use lora.init pissa."
        )
    return " ".join(found) or None


def _degrees(case: Case) -> dict[str, int]:
    """Parallel option -> the number of GPUs that it divides a replica over."""
    chosen = case.spec.llamafactory
    names = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return {f"llamafactory.{name}": getattr(chosen, name) for name in names}


MEGATRON_SPEC = {
    **WITH, "llamafactory.backend": "megatron", "method.kind": "full", "parallel.strategy": "ddp",
    "model.source": "hub", "model.hub_id": "Qwen/Qwen3-8B",
}  # fmt: skip
# llamafactory 0.9.5 extras/constants.py, MCA_SUPPORTED_MODELS, only the text models.
MEGATRON_MODELS = {
    "deepseek_v3", "glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5",
    "qwen3_5_moe",
}  # fmt: skip
TRANSFORMERS = Fix(
    "Train with transformers and ZeRO-3",
    {"llamafactory.backend": "transformers", "parallel.strategy": "zero3"},
    safe=False,
    cost="another strategy",
)


@error(
    "LLF006",
    fields=("llamafactory.backend", "method.kind", "train.stage", "launch.device", "parallel.strategy"),
    title="Megatron-Core cannot train this",
    source="llamafactory 0.9.5: train/mca/workflow.py and train/tuner.py; examples/megatron: only full is supported",
    fixes=(TRANSFORMERS,),
    manual_fix="Use full fine-tuning with DDP on GPUs, for pretraining, SFT or DPO.",
    fails_on=Example({**MEGATRON_SPEC, "method.kind": "lora"}, TWO_H100, READABLE),
    passes_on=Example(MEGATRON_SPEC, TWO_H100, READABLE),
)
def megatron_unsupported(case: Case) -> str | None:
    """mcore_adapter has its own models and trainer: it ignores adapters, has no other stages, and replaces DeepSpeed
    and FSDP."""
    if case.spec.other_backend != "megatron":
        return None
    model_type, kind = case.shape.model_type if case.shape else "", case.spec.method.kind
    stage = case.spec.train.stage
    found = {
        f"Megatron-Core trains all parameters, and ignores the method {kind}.": kind != "full",
        f"Megatron-Core has no stage {stage}.": stage not in ("pretraining", "sft", "dpo"),
        "Megatron-Core needs NVIDIA GPUs.": case.run.device != "cuda",
        "Megatron-Core replaces the strategy, which must be DDP.": case.run.strategy not in ("ddp", "single"),
        "Megatron-Core does not quantize the model.": case.spec.method.quantization != "none",
        f"Megatron-Core has no model of the type {model_type}.": bool(model_type) and model_type not in MEGATRON_MODELS,
    }
    return " ".join(text for text, holds in found.items() if holds) or None


@error(
    "LLF007",
    fields=(
        "llamafactory.tensor_parallel_size", "llamafactory.pipeline_parallel_size", "launch.nproc_per_node",
        "llamafactory.context_parallel_size", "llamafactory.expert_parallel_size",
        "llamafactory.virtual_pipeline_size", "llamafactory.sequence_parallel",
    ),
    title="The parallel sizes of Megatron-Core do not divide the GPUs or the model",
    source="megatron-core 0.15: parallel_state.py, initialize_model_parallel; transformer/transformer_config.py",
    fixes=(TRANSFORMERS,),
    manual_fix="Choose parallel sizes whose product divides the number of GPUs, and that divide the model's layers, "
    "attention heads and experts.",
    fails_on=Example({**MEGATRON_SPEC, "llamafactory.tensor_parallel_size": 3}, TWO_H100, WITHOUT_SHAPE),
    passes_on=Example({**MEGATRON_SPEC, "llamafactory.tensor_parallel_size": 2}, TWO_H100, WITHOUT_SHAPE),
)  # fmt: skip
def megatron_sizes(case: Case) -> str | None:
    """Each GPU has the same share of the weights, of the layers and of the tokens."""
    if case.spec.other_backend != "megatron":
        return None
    chosen, world, degrees = case.spec.llamafactory, case.run.world_size, _degrees(case)
    product, (tensor, stages, _) = math.prod(degrees.values()), degrees.values()
    found = {
        f"{' x '.join(map(str, degrees.values()))} = {product} does not divide {world} GPUs.": world % product != 0
    }
    replicas = world // (tensor * stages) if world % (tensor * stages) == 0 else 0
    experts = chosen.expert_parallel_size
    found[f"{experts} expert parallel GPUs do not divide {replicas} replicas."] = bool(replicas and replicas % experts)
    found["Sequence parallelism needs a tensor parallel size above 1."] = chosen.sequence_parallel and tensor == 1
    needed = experts > 1 and tensor > 1 and not chosen.sequence_parallel
    found["With experts and tensor parallelism, sequence parallelism must be on."] = needed
    parts = stages * chosen.virtual_pipeline_size
    found["A virtual pipeline needs a pipeline parallel size above 1."] = (
        stages == 1 and chosen.virtual_pipeline_size > 1
    )
    if shape := case.shape:
        found[f"{parts} pipeline parts do not divide {shape.layers} layers."] = shape.layers % parts != 0
        found[f"{tensor} tensor parallel GPUs do not divide {shape.heads} attention heads."] = shape.heads % tensor != 0
        found["The model has no experts."] = experts > 1 and not shape.most_experts
        found[f"{experts} expert parallel GPUs do not divide {shape.most_experts} experts."] = bool(
            shape.most_experts % experts
        )
    return " ".join(text for text, holds in found.items() if holds) or None


KT_SPEC = {
    **WITH, "llamafactory.backend": "ktransformers", "method.kind": "lora", "parallel.strategy": "fsdp2",
    "launch.launcher": "accelerate",
}  # fmt: skip


@error(
    "LLF008",
    fields=("llamafactory.backend", "method.kind", "train.stage", "launch.launcher", "parallel.strategy"),
    title="KTransformers cannot train this",
    source="llamafactory 0.9.5: model/adapter.py and hparams/parser.py; examples/ktransformers",
    fixes=(TRANSFORMERS,),
    manual_fix="Use LoRA for SFT or DPO of a mixture-of-experts model, with FSDP2 and accelerate on GPUs.",
    fails_on=Example({**KT_SPEC, "launch.launcher": "torchrun"}, TWO_H100, WITHOUT_SHAPE),
    passes_on=Example(KT_SPEC, TWO_H100, WITHOUT_SHAPE),
)
def ktransformers_unsupported(case: Case) -> Violation | None:
    """KTransformers trains adapters of mixture-of-experts models: GPUs compute attention, the CPU computes the experts.
    Its settings reach the trainer through accelerate's configuration."""
    if case.spec.other_backend != "ktransformers":
        return None
    is_launched = case.run.strategy == "fsdp2" and case.spec.launch.launcher == "accelerate"
    found = {
        "KTransformers trains adapters only (LoRA).": case.spec.method.kind != "lora",
        f"KTransformers has no stage {case.spec.train.stage}.": case.spec.train.stage not in ("sft", "dpo"),
        "KTransformers needs NVIDIA GPUs.": case.run.device != "cuda",
        "KTransformers needs the strategy FSDP2 and the launcher accelerate.": not is_launched,
        "KTransformers does not quantize the model.": case.spec.method.quantization != "none",
        "The model has no experts.": case.shape is not None and not case.shape.most_experts,
    }
    texts = [text for text, holds in found.items() if holds]
    fixes = (ACCELERATED,) if len(texts) == 1 and not is_launched else ()
    return Violation(" ".join(texts), fixes) if texts else None


TWO_DATASETS: tuple[dict[str, Any], ...] = (
    {},
    {"source": "files", "files": ("data.jsonl",), "format": "messages", "validation": "none"},
)


@error(
    "LLF009",
    fields=("data.sources", "launch.trainer"),
    title="LLaMA-Factory cannot mix these datasets",
    source="llamafactory 0.9.5: data/data_utils.py, merge_dataset and split_dataset; hparams/data_args.py",
    fixes=(OURS,),
    manual_fix="Concatenate the datasets with weight 1, and with the same system_prompt, max_samples and "
    "validation_split for all of them.",
    fails_on=Example({**WITH, "data.sources": TWO_DATASETS, "data.weight": 2}, TWO_H100, READABLE),
    passes_on=Example({**WITH, "data.sources": TWO_DATASETS}, TWO_H100, READABLE),
)
def llamafactory_mixture(case: Case) -> str | None:
    """LLaMA-Factory concatenates or interleaves files, and applies one val_size, one max_samples and one default_system
    to all of them."""
    made = _export(case)
    start = f"{SOURCES}: "
    found = [line.removeprefix(start) for line in made.missing if line.startswith(start)] if made else []
    return " ".join(f"{text}." for text in found) or None
