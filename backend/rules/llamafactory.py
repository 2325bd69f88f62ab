"""Rules about training with LLaMA-Factory."""

from __future__ import annotations

from dataclasses import replace

from backend.launch.llamafactory import Export, export
from backend.rules.base import Case, Example, Fix, Violation, rule
from backend.rules.examples import DEMO, TWO_H100

WITH = {"launch.trainer": "llamafactory"}
OURS = Fix("Use Footplate's own trainer", {"launch.trainer": "footplate"}, cost="the losses differ slightly")
READABLE = replace(DEMO, format="messages")


def _export(case: Case) -> Export | None:
    """What LLaMA-Factory would get; None if Footplate's own trainer is used."""
    if case.spec.launch.trainer != "llamafactory":
        return None
    return export(case.spec, case.run, case.facts.format, converts=False)


@rule(
    "LLF001",
    "error",
    fields=("llamafactory.environment", "launch.trainer"),
    title="LLaMA-Factory cannot be started",
    source="llamafactory 0.9.5: src/llamafactory/extras/misc.py, check_dependencies",
    fixes=(OURS,),
    manual_fix="Create an environment with `footplate env create llamafactory`, which prints its folder.",
    fails_on=Example(WITH, facts=replace(READABLE, trainer_problem="The environment /opt/env has no llamafactory.")),
    passes_on=Example(WITH, facts=READABLE),
    at_start=True,
)
def llamafactory_missing(case: Case) -> Violation | str | None:
    """LLaMA-Factory pins older versions of transformers, TRL and gradio than Footplate uses, so it needs its own Python
    environment."""
    facts = case.facts
    if case.spec.launch.trainer != "llamafactory" or not facts.trainer_problem:
        return None
    if not facts.trainer_environment or facts.trainer_environment == case.spec.llamafactory.environment:
        return facts.trainer_problem
    created = Fix(
        "Use the environment of footplate env create", {"llamafactory.environment": facts.trainer_environment}
    )
    return Violation(facts.trainer_problem, (created, OURS))


@rule(
    "LLF002",
    "error",
    fields=("launch.trainer", "train.optim", "lora.init", "parallel.strategy"),
    title="LLaMA-Factory refuses this combination",
    source="llamafactory 0.9.5: hparams/parser.py, get_train_args; hparams/finetuning_args.py, __post_init__",
    fixes=(OURS,),
    fails_on=Example({**WITH, "lora.init": "pissa_fast", "parallel.strategy": "zero3"}, TWO_H100, READABLE),
    passes_on=Example({**WITH, "lora.init": "pissa_fast"}, TWO_H100, READABLE),
)
def llamafactory_refuses(case: Case) -> str | None:
    """LLaMA-Factory's parser raises an error for these combinations after it has started, on each rank."""
    made = _export(case)
    return " ".join(made.refused) or None if made else None


@rule(
    "LLF003",
    "error",
    fields=("launch.trainer", "parallel.strategy"),
    title="LLaMA-Factory would train with a different strategy",
    source="llamafactory 0.9.5: launcher.py starts torchrun, and the YAML has no key for FSDP or tensor parallelism",
    fixes=(Fix("Use DeepSpeed ZeRO-3", {"parallel.strategy": "zero3"}), OURS),
    fails_on=Example({**WITH, "parallel.strategy": "fsdp2"}, TWO_H100, READABLE),
    passes_on=Example({**WITH, "parallel.strategy": "zero3"}, TWO_H100, READABLE),
)
def llamafactory_strategy(case: Case) -> str | None:
    """Without a DeepSpeed configuration, LLaMA-Factory wraps the model in DDP, whatever the launcher has started: each
    device would hold the whole model."""
    made = _export(case)
    found = [line for line in made.missing if line.startswith("parallel.strategy:")] if made else []
    return f"{found[0].partition(': ')[2]}." if found else None


@rule(
    "LLF004",
    "error",
    fields=("launch.trainer", "data.format"),
    title="LLaMA-Factory cannot read this data",
    source="llamafactory 0.9.5: data/converter.py, SharegptDatasetConverter",
    fixes=(OURS,),
    manual_fix="Convert the data with `footplate export`, and train with the files that it writes.",
    fails_on=Example(
        {**WITH, "train.stage": "dpo", "data.builtin": "train-pairs"}, TWO_H100, replace(DEMO, format="pairs")
    ),
    passes_on=Example(WITH, TWO_H100, READABLE),
)
def llamafactory_data(case: Case) -> str | None:
    """LLaMA-Factory reads conversations, instructions and plain text as they are. Of preferences, it reads one chosen
    and one rejected turn after a conversation."""
    made = _export(case)
    if not made or not case.facts.format or not any(line.startswith("data.format:") for line in made.missing):
        return None
    return f"The data format is {case.facts.format}."


@rule(
    "LLF005",
    "warning",
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
    names = [line.partition(":")[0] for line in made.missing] if made else []
    names = [name for name in names if name not in ("parallel.strategy", "data.format")]
    return f"LLaMA-Factory has no counterpart of {', '.join(names)}." if names else None
