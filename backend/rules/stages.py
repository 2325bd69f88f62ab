"""Rules of the stages: rows that a stage cannot learn from, and what comparing answers needs.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, amount, counted, rule
from backend.rules.examples import DEMO, FILES, H100, LLAMA_8B, OWN, TWO_H100

PAIRS = {"data.builtin": "train-pairs"}
DPO = {"train.stage": "dpo", **PAIRS}
KTO = {"train.stage": "kto", **PAIRS}
SLICED = {**DPO, "parallel.strategy": "tensor", "method.kind": "freeze", "train.learning_rate": 1e-6,
          "save.only_model": True}  # fmt: skip
PAIRED = replace(FILES, format="pairs", columns=("prompt", "chosen", "rejected"))
MARKED = replace(FILES, format="labels", columns=("prompt", "completion", "label"))


def _stage(case: Case) -> registry.Stage:
    return registry.STAGES[case.spec.train.stage]


def _wanted(stage: registry.Stage) -> str:
    if stage.formats is registry.ANSWERED:
        return "conversations, prompts with completions, or plain text"
    return " or ".join(registry.FORMATS[name].label.lower() for name in stage.formats)


@rule(
    "STG001",
    "error",
    fields=("data.builtin", "train.stage"),
    title="The stage cannot learn from this dataset",
    source="the dataset's own rows",
    fails_on=Example({"train.stage": "dpo"}),
    passes_on=Example(DPO),
    proof="launch",
)
def other_dataset(case: Case) -> Violation | None:
    """Stages that compare answers need two of them, or a label; the others need one answer or a text."""
    data, stage = case.spec.data, _stage(case)
    if data.source != "builtin" or registry.DATASETS[data.builtin].format in stage.formats:
        return None
    fitting = [name for name, row in registry.DATASETS.items() if row.format in stage.formats]
    fixes = tuple(Fix(registry.DATASETS[name].label, {"data.builtin": name}, False) for name in fitting)
    has = registry.FORMATS[registry.DATASETS[data.builtin].format].label.lower()
    return Violation(f"{stage.label} learns from {_wanted(stage)}; its rows have {has}.", fixes)


@rule(
    "STG002",
    "error",
    fields=("data.format", "train.stage"),
    title="The stage cannot learn from such rows",
    source="the rows: their columns",
    fails_on=Example({**OWN, "train.stage": "dpo"}, facts=FILES),
    passes_on=Example({**OWN, "train.stage": "dpo"}, facts=PAIRED),
    proof="launch",
)
def other_rows(case: Case) -> Violation | None:
    """Stages that compare answers need two of them, or a label; the others need one answer or a text."""
    data, stage = case.spec.data, _stage(case)
    format = data.format if data.format != "auto" else case.facts.format
    if data.source == "builtin" or not format or format in stage.formats:
        return None
    fitting = next(name for name, row in registry.STAGES.items() if format in row.formats)
    fixes = [Fix(registry.STAGES[fitting].label, {"train.stage": fitting}, False)]
    if data.format != "auto":
        fixes.insert(0, Fix("Recognise the format", {"data.format": "auto"}, False))
    has = registry.FORMATS[format].label.lower()
    return Violation(f"{stage.label} learns from {_wanted(stage)}; these rows have {has}.", tuple(fixes))


@rule(
    "STG003",
    "error",
    fields=("train.per_device_train_batch_size",),
    title="KTO compares the rows of a batch",
    source="trl 1.16 kto_trainer.py: the actual batch size must be above 1",
    fixes=(
        Fix(
            "APO zero, which compares nothing",
            {"preference.kto_loss_type": "apo_zero_unpaired"},
            safe=False,
            cost="another loss",
        ),
    ),
    fails_on=Example({**KTO, "train.per_device_train_batch_size": 1}),
    passes_on=Example({**KTO, "train.per_device_train_batch_size": 2}),
    proof="launch",
)
def lonely_row(case: Case) -> Violation | None:
    """What the model would say anyway is estimated from each question with its neighbour's answer; a single row has no
    neighbour."""
    train = case.spec.train
    if train.stage != "kto" or case.spec.preference.kto_loss_type != "kto" or train.per_device_train_batch_size > 1:
        return None
    patch = {
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": max(1, train.gradient_accumulation_steps // 2),
    }
    return Violation(
        "A device works on 1 row at once.", (Fix("2 rows at once", patch, train.gradient_accumulation_steps % 2 == 0),)
    )


@rule(
    "STG004",
    "error",
    fields=("preference.label_smoothing", "preference.dpo_loss_type"),
    title="EXO without label smoothing",
    source="trl 1.16 dpo_trainer.py: label smoothing must be above 0 with exo_pair",
    fixes=(
        Fix("0.001", {"preference.label_smoothing": 1e-3}),
        Fix("The usual loss", {"preference.dpo_loss_type": "sigmoid"}, safe=False, cost="another loss than EXO"),
    ),
    fails_on=Example({**DPO, "preference.dpo_loss_type": "exo_pair"}),
    passes_on=Example({**DPO, "preference.dpo_loss_type": "exo_pair", "preference.label_smoothing": 0.01}),
    proof="launch",
)
def certain_exo(case: Case) -> str | None:
    """This loss takes the logarithm of the share of wrong labels, which must not be 0."""
    asked = case.spec.preference
    exo = case.spec.train.stage == "dpo" and asked.dpo_loss_type == "exo_pair"
    return "It is 0." if exo and not asked.label_smoothing else None


@rule(
    "STG005",
    "error",
    fields=("preference.precompute_ref_log_probs", "parallel.strategy"),
    title="The reference cannot be computed beforehand on sliced layers",
    source="trl 1.16 trainer/utils.py: hash_module reads every weight as a plain tensor",
    fixes=(Fix("Beside the training", {"preference.precompute_ref_log_probs": False}, cost="more memory"),),
    fails_on=Example({**SLICED, "preference.precompute_ref_log_probs": True}, TWO_H100, replace(DEMO, shape=LLAMA_8B)),
    passes_on=Example(SLICED, TWO_H100, replace(DEMO, shape=LLAMA_8B)),
    proof="launch",
)
def sliced_reference(case: Case) -> str | None:
    """What is computed is kept under a sum over all weights, which cannot be taken of slices."""
    asked = _stage(case).reference and case.spec.preference.precompute_ref_log_probs
    sliced = registry.STRATEGIES[case.spec.parallel.strategy].engine == "tensor"
    return "Every device holds a slice of each layer." if asked and sliced else None


@rule(
    "STG006",
    "advice",
    fields=("preference.precompute_ref_log_probs",),
    title="A second model in memory",
    source="trl 1.16 dpo_trainer.py, kto_trainer.py: precompute_ref_log_probs",
    fixes=(
        Fix("Computed beforehand", {"preference.precompute_ref_log_probs": True}, cost="one pass over the rows before"),
    ),
    fails_on=Example({**DPO, "method.kind": "full", "train.learning_rate": 1e-6}),
    passes_on=Example(DPO),
)
def second_model(case: Case) -> str | None:
    """Where whole weights are trained, the untouched model stays beside them, to be asked at every step. It can be
    asked about all rows once, before training."""
    shape, spec = case.shape, case.spec
    if (
        not _stage(case).reference
        or spec.method.kind == "lora"
        or spec.preference.precompute_ref_log_probs
        or shape is None
    ):
        return None
    if registry.STRATEGIES[spec.parallel.strategy].engine == "tensor":
        return None
    held = next((row.bytes for row in case.estimate.rows if row.name == "Reference model"), 0)
    return f"It takes {amount(held)}." if held else None


@rule(
    "STG007",
    "warning",
    fields=("preference.desirable_weight", "preference.undesirable_weight"),
    title="Good and bad answers do not balance",
    source="Ethayarajh et al. 2024, KTO, equation 8: weight x number of the good ones 1 to 4/3 of that of the bad ones",
    fails_on=Example({**OWN, "train.stage": "kto"}, facts=replace(MARKED, labels=(300, 100))),
    passes_on=Example(
        {**OWN, "train.stage": "kto", "preference.undesirable_weight": 2.5}, facts=replace(MARKED, labels=(300, 100))
    ),
)
def unbalanced(case: Case) -> Violation | None:
    """The kind of which there are more drowns the other, unless the rarer one weighs more."""
    asked, labels = case.spec.preference, case.facts.labels
    if case.spec.train.stage != "kto" or case.facts.format != "labels" or labels is None:
        return None
    good, bad = labels
    if not good + bad:
        return None
    if not good or not bad:
        return Violation(
            f"All answers that were seen are {'good' if good else 'bad'} ones; add some of the other kind."
        )
    share = asked.desirable_weight * good / (asked.undesirable_weight * bad) if asked.undesirable_weight else 0
    if 0.99 <= share <= 1.34:
        return None
    name, weight = ("undesirable", good / bad / 1.15) if good > bad else ("desirable", 1.15 * bad / good)
    other = "desirable" if name == "undesirable" else "undesirable"
    patch = {f"preference.{name}_weight": round(weight, 2), f"preference.{other}_weight": 1.0}
    said = f"{counted(good, 'good answer')} and {counted(bad, 'bad one')}"
    return Violation(f"{said}, weighed {asked.desirable_weight:g} to {asked.undesirable_weight:g}.",
               (Fix(f"{name.capitalize()} weight {weight:.2g}", patch, False),))  # fmt: skip


SMALL = 5e8  # parameters
RATES = {"lora": (1e-7, 1e-4, 5e-6), "freeze": (1e-8, 2e-5, 1e-6), "full": (1e-9, 1e-5, 5e-7)}


@rule(
    "STG008",
    "warning",
    fields=("train.learning_rate", "train.stage"),
    title="An unusual learning rate for preferences",
    source="Rafailov et al. 2023, Ethayarajh et al. 2024, Hong et al. 2024; trl's and LLaMA-Factory's examples",
    fails_on=Example({**DPO, "train.learning_rate": 1e-3}, H100, replace(DEMO, shape=LLAMA_8B)),
    passes_on=Example({**DPO, "train.learning_rate": 5e-6}, H100, replace(DEMO, shape=LLAMA_8B)),
)
def unusual_rate(case: Case) -> Violation | None:
    """Preferences are learned slowly: at the rate of fine-tuning both answers soon become unlikely, and the model
    forgets how to speak."""
    train, shape = case.spec.train, case.shape
    low, high, usual = RATES[case.spec.method.kind]
    small = shape is not None and shape.parameters < SMALL  # they want more, and forget less than they have to learn
    if train.stage not in ("dpo", "kto", "orpo") or small or low <= train.learning_rate <= high:
        return None
    word = "high" if train.learning_rate > high else "low"
    fix = Fix(f"{usual:g}", {"train.learning_rate": usual}, False)
    return Violation(f"{train.learning_rate:g} is {word}; {low:g} to {high:g} is usual.", (fix,))
