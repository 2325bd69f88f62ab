"""Rules about training stages: data formats, preference losses, the reference model."""

from __future__ import annotations

import math
from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, advice, error, set_to, warning
from backend.rules.columns import guessed_columns
from backend.rules.common_fixes import unusual_rate
from backend.rules.data import NO_EVAL_LOSS
from backend.rules.examples import DEMO, H100, LLAMA_8B, TWO_H100, USER_DATA, USER_DATA_FACTS
from backend.wording import data_size

DPO = {"train.stage": "dpo", "data.builtin": "train-pairs"}
KTO = {"train.stage": "kto", "data.builtin": "train-pairs"}
TENSOR_PARALLEL = {
    **DPO,
    "parallel.strategy": "tensor",
    "method.kind": "freeze",
    "train.learning_rate": 1e-6,
    "save.only_model": True,
}
PAIRS_FACTS = replace(USER_DATA_FACTS, format="pairs", columns=("prompt", "chosen", "rejected"))
LABELS_FACTS = replace(USER_DATA_FACTS, format="labels", columns=("prompt", "completion", "label"))
USER_KTO = {**USER_DATA, "train.stage": "kto"}
FEWER = "fewer training examples"

FORMAT_CONTENT = {  # what the examples of a data format are
    "messages": "conversations",
    "sharegpt": "conversations",
    "alpaca": "prompts with completions",
    "prompt_completion": "prompts with completions",
    "text": "plain text",
    "pairs": "pairs of a chosen and a rejected completion",
    "labels": "completions with a desirable or undesirable label",
}


def _stage(case: Case) -> registry.Stage:
    return registry.STAGES[case.spec.train.stage]


def _accepted(stage: registry.Stage) -> str:
    """The examples that a stage accepts: 'conversations, prompts with completions or plain text'."""
    *others, last = dict.fromkeys(FORMAT_CONTENT[name] for name in stage.formats)
    return f"{', '.join(others)} or {last}" if others else last


@error(
    "STG001",
    fields=("data.builtin", "train.stage"),
    title="The built-in dataset does not fit the training stage",
    source="the dataset's examples",
    fails_on=Example({"train.stage": "dpo"}),
    passes_on=Example(DPO),
    proof="launch",
)
def builtin_dataset_for_other_stage(case: Case) -> Violation | None:
    """Preference stages need two completions for each prompt, or a label for each completion. Supervised fine-tuning
    and pretraining need one completion or a text."""
    data, stage = case.spec.data, _stage(case)
    format = registry.DATASETS[data.builtin].format
    if data.source != "builtin" or format in stage.formats:
        return None
    fitting = [name for name, row in registry.DATASETS.items() if row.format in stage.formats]
    fixes = tuple(Fix(f"Use the dataset {name}", {"data.builtin": name}, False) for name in fitting)
    message = (
        f"{stage.label} needs {_accepted(stage)}; the examples of the built-in dataset {data.builtin} are "
        f"{FORMAT_CONTENT[format]}."
    )
    return Violation(message, fixes)


@error(
    "STG002",
    fields=("data.format", "train.stage"),
    title="The data format does not fit the training stage",
    source="the examples: their columns",
    fails_on=Example({**USER_DATA, "train.stage": "dpo"}, facts=USER_DATA_FACTS),
    passes_on=Example({**USER_DATA, "train.stage": "dpo"}, facts=PAIRS_FACTS),
    proof="launch",
)
def data_format_for_other_stage(case: Case) -> Violation | None:
    """Preference stages need two completions for each prompt, or a label for each completion. Supervised fine-tuning
    and pretraining need one completion or a text."""
    data, stage = case.spec.data, _stage(case)
    format = data.format if data.format != "auto" else case.facts.format
    if data.source == "builtin" or not format or format in stage.formats:
        return None
    fitting = next(name for name, row in registry.STAGES.items() if format in row.formats)
    fixes = [
        Fix(f"Use the stage {registry.STAGES[fitting].label}", {"train.stage": fitting}, False, "another objective")
    ]
    if data.format != "auto":
        is_unknown = data.source == "files" and not case.facts.detected_format
        detect = Fix("Detect the format automatically", {"data.format": "auto"}, False)
        fixes = [*((guessed_columns(case) if is_unknown else []) or [detect]), *fixes]
    elif format == "labels":  # the label may have no meaning here
        fixes = [*guessed_columns(case)[:1], *fixes]
    message = (
        f"{stage.label} needs {_accepted(stage)}; the examples have the format {format} ({FORMAT_CONTENT[format]})."
    )
    return Violation(message, tuple(fixes))


@error(
    "STG003",
    fields=("train.per_device_train_batch_size",),
    title="KTO needs a batch size above 1",
    source="trl 1.16 kto_trainer.py: the actual batch size must be above 1",
    fixes=(
        Fix(
            "Use the APO zero loss, which has no KL term",
            {"preference.kto_loss_type": "apo_zero_unpaired"},
            safe=False,
            cost="another loss",
        ),
    ),
    fails_on=Example({**KTO, "train.per_device_train_batch_size": 1}),
    passes_on=Example({**KTO, "train.per_device_train_batch_size": 2}),
    proof="launch",
)
def kto_batch_size_one(case: Case) -> Violation | None:
    """KTO estimates its KL term from mismatched pairs: each prompt with the completion of another example of the same
    batch. A batch of one example has no other example."""
    train = case.spec.train
    if train.stage != "kto" or case.spec.preference.kto_loss_type != "kto" or train.per_device_train_batch_size > 1:
        return None
    patch = {
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": max(1, train.gradient_accumulation_steps // 2),
    }
    same_global_batch = train.gradient_accumulation_steps % 2 == 0
    return Violation(
        "preference.kto_loss_type is kto and train.per_device_train_batch_size is 1.",
        (Fix("Set the per-device batch size to 2", patch, same_global_batch),),
    )


@warning(
    "STG010",
    fields=("eval.strategy", "data.validation", "data.validation_split"),  # not about each of several datasets alone
    title="KTO compares the only validation example with itself",
    source="trl 1.16 kto_trainer.py: the KL term is estimated with the completion of another example of the same batch",
    manual_fix="Add validation examples.",
    fails_on=Example({**USER_KTO, "data.validation_split": 0.01}, facts=replace(LABELS_FACTS, num_examples=40)),
    passes_on=Example({**USER_KTO, "data.validation_split": 0.05}, facts=replace(LABELS_FACTS, num_examples=40)),
)
def kto_with_one_validation_example(case: Case) -> Violation | None:
    """KTO's loss compares the reward of a completion with the KL divergence from the reference model, which it
    estimates with the completions of other examples. Estimated with the example itself, the divergence is never below
    the reward."""
    spec, facts = case.spec, case.facts
    if spec.train.stage != "kto" or spec.preference.kto_loss_type != "kto" or spec.eval.strategy == "no":
        return None
    usable = facts.usable_examples(spec.data, spec.train.seed)
    count = case.run.num_eval_examples if usable is None else usable[1]
    if count != 1 or not facts.counts_are_exact:
        return None
    fixes = [NO_EVAL_LOSS]
    if spec.data.splits and not spec.data.sources and facts.num_examples and facts.num_examples >= 4:
        share = math.ceil(200 / facts.num_examples) / 100
        fixes.append(Fix(f"Validate on {share:.0%} of the examples", {"data.validation_split": share}, False, FEWER))
    message = (
        "The validation set has 1 example with a trained token, so the eval loss of a desirable completion cannot fall "
        f"below {spec.preference.desirable_weight / 2:g}, however likely the model makes it."
    )
    return Violation(message, tuple(fixes))


@error(
    "STG009",
    fields=("train.stage", "model.path", "model.hub_id"),
    title="The architecture has no reward model",
    source="transformers 5.23 models/auto/modeling_auto.py: the model types of AutoModelForSequenceClassification",
    fixes=(Fix("Use DPO, which needs no reward model", {"train.stage": "dpo"}, False, "another objective"),),
    fails_on=Example(
        {"train.stage": "reward", "data.builtin": "train-pairs"}, facts=replace(DEMO, has_sequence_classification=False)
    ),
    passes_on=Example({"train.stage": "reward", "data.builtin": "train-pairs"}),
)
def no_sequence_classification_head(case: Case) -> str | None:
    """A reward model is AutoModelForSequenceClassification with one label. transformers has that class for many
    architectures, but not for all."""
    is_reward_model = registry.STAGES[case.spec.train.stage].is_reward_model
    if not is_reward_model or case.facts.has_sequence_classification is not False:
        return None
    name = case.shape.model_type if case.shape else "this architecture"
    return f"transformers has no sequence classification model for {name}."


@error(
    "STG004",
    fields=("preference.label_smoothing", "preference.dpo_loss_type"),
    title="EXO loss needs label smoothing",
    source="trl 1.16 dpo_trainer.py: label smoothing must be above 0 with exo_pair",
    fixes=(
        Fix("Set label smoothing to 0.001", {"preference.label_smoothing": 1e-3}, safe=False),
        Fix("Use the sigmoid loss", {"preference.dpo_loss_type": "sigmoid"}, safe=False, cost="a different loss"),
    ),
    fails_on=Example({**DPO, "preference.dpo_loss_type": "exo_pair"}),
    passes_on=Example({**DPO, "preference.dpo_loss_type": "exo_pair", "preference.label_smoothing": 0.01}),
    proof="launch",
)
def exo_without_label_smoothing(case: Case) -> str | None:
    """EXO takes the logarithm of the label smoothing, the assumed share of swapped labels, so it must be above 0."""
    preference = case.spec.preference
    if case.spec.train.stage != "dpo" or preference.dpo_loss_type != "exo_pair" or preference.label_smoothing:
        return None
    return "The EXO loss (exo_pair) needs preference.label_smoothing > 0; it is 0."


@warning(
    "STG011",
    fields=("train.per_device_train_batch_size", "preference.dpo_loss_type"),
    title="AOT has nothing to sort in a batch of one pair",
    source="trl 1.16 dpo_trainer.py: torch.sort of the log-ratios of a batch on one device",
    fixes=(Fix("Use the sigmoid loss", {"preference.dpo_loss_type": "sigmoid"}, safe=False, cost="a different loss"),),
    fails_on=Example({**DPO, "preference.dpo_loss_type": "aot", "train.per_device_train_batch_size": 1}),
    passes_on=Example({**DPO, "preference.dpo_loss_type": "aot"}),
)
def aot_batch_size_one(case: Case) -> Violation | None:
    """AOT compares the sorted log-ratios of a batch instead of those of each pair. With one pair on each device, both
    kinds of AOT are the sigmoid loss; gradient accumulation does not change that."""
    train, loss = case.spec.train, case.spec.preference.dpo_loss_type
    if train.stage != "dpo" or loss not in ("aot", "aot_unpaired") or train.per_device_train_batch_size > 1:
        return None
    steps = max(1, train.gradient_accumulation_steps // 2)
    patch = {"train.per_device_train_batch_size": 2, "train.gradient_accumulation_steps": steps}
    message = f"preference.dpo_loss_type is {loss} and train.per_device_train_batch_size is 1."
    return Violation(message, (Fix("Set the per-device batch size to 2", patch, False, "more activation memory"),))


@error(
    "STG005",
    fields=("preference.precompute_ref_log_probs", "parallel.strategy"),
    title="Reference log-probabilities cannot be precomputed with tensor parallelism",
    source="trl 1.16 trainer/utils.py: hash_module reads every weight as a plain tensor",
    fixes=(
        Fix(
            "Keep the reference model in memory",
            {"preference.precompute_ref_log_probs": False},
            cost="memory for a second model",
        ),
    ),
    fails_on=Example(
        {**TENSOR_PARALLEL, "preference.precompute_ref_log_probs": True}, TWO_H100, replace(DEMO, shape=LLAMA_8B)
    ),
    passes_on=Example(TENSOR_PARALLEL, TWO_H100, replace(DEMO, shape=LLAMA_8B)),
    proof="launch",
)
def precomputed_reference_with_tensor_parallel(case: Case) -> str | None:
    """TRL caches precomputed log-probabilities under a hash of all model weights. With tensor parallelism the weights
    are DTensors, which have no numpy array to hash, and TRL raises an error."""
    precomputes = _stage(case).uses_reference_model and case.spec.preference.precompute_ref_log_probs
    if not precomputes or case.run.tensor_parallel_size == 1:
        return None
    return f"preference.precompute_ref_log_probs is on, and the strategy is {case.strategy.label}."


@advice(
    "STG006",
    fields=("preference.precompute_ref_log_probs",),
    title="The reference model takes the memory of a second model",
    source="trl 1.16 dpo_trainer.py, kto_trainer.py: precompute_ref_log_probs",
    fixes=(
        Fix(
            "Precompute the reference log-probabilities",
            {"preference.precompute_ref_log_probs": True},
            cost="one forward pass over the dataset at startup",
        ),
    ),
    fails_on=Example({**DPO, "method.kind": "full", "train.learning_rate": 1e-6}),
    passes_on=Example(DPO),
)
def reference_model_in_memory(case: Case) -> str | None:
    """Without LoRA the initial model stays in memory as the reference model and runs at every step. Its
    log-probabilities do not change, so they can be computed once, before training."""
    if case.run.tensor_parallel_size > 1:  # which cannot precompute them
        return None
    size = next((row.bytes for row in case.estimate.rows if row.name == "Reference model"), 0)
    return f"The reference model of {_stage(case).label} takes {data_size(size)} on each device." if size else None


MIN_KTO_RATIO, MAX_KTO_RATIO = 0.99, 1.34  # 1 to 4/3, with a tolerance for rounding


@warning(
    "STG007",
    fields=("preference.desirable_weight", "preference.undesirable_weight"),
    title="KTO's desirable and undesirable examples are not balanced",
    source="Ethayarajh et al. 2024, KTO, equation 8: (desirable weight x count) / (undesirable weight x count) between "
    "1 and 4/3",
    fails_on=Example(USER_KTO, facts=replace(LABELS_FACTS, label_counts=(300, 100))),
    passes_on=Example(
        {**USER_KTO, "preference.undesirable_weight": 2.5}, facts=replace(LABELS_FACTS, label_counts=(300, 100))
    ),
)
def unbalanced_kto_labels(case: Case) -> Violation | None:
    """Each desirable and each undesirable example contributes to the loss with its weight. Without a higher weight for
    the rarer kind, the more frequent kind dominates the gradient."""
    preference, counts = case.spec.preference, case.facts.label_counts
    if case.spec.train.stage != "kto" or case.facts.format != "labels" or counts is None or not sum(counts):
        return None
    good, bad = counts
    if not good or not bad:
        if case.facts.examples_pending:  # sorted data: the others may follow
            return None
        label, missing = ("desirable", "undesirable") if good else ("undesirable", "desirable")
        return Violation(f"All {good + bad:,} training completions are {label}; add {missing} ones.")
    good_weight, bad_weight = preference.desirable_weight, preference.undesirable_weight
    ratio = good_weight * good / (bad_weight * bad) if bad_weight else 0
    if MIN_KTO_RATIO <= ratio <= MAX_KTO_RATIO:
        return None
    later = ["the validation split"] * case.spec.data.splits + ["data.max_samples"] * bool(case.spec.data.max_samples)
    before = f" before {' and '.join(later)}" if later else ""
    where = "An epoch has about" if case.facts.datasets else f"The training data{before} has"
    name, weight = ("undesirable", good / bad / 1.15) if good > bad else ("desirable", 1.15 * bad / good)
    other = "desirable" if name == "undesirable" else "undesirable"
    weight = round(weight, 2)
    patch = {f"preference.{name}_weight": weight, f"preference.{other}_weight": 1.0}
    message = (
        f"{where} {good:,} desirable completions with weight {good_weight:g} and {bad:,} undesirable ones with weight "
        f"{bad_weight:g}. Count x weight of the desirable ones should be 1 to 1.33 times that of the others."
    )
    return Violation(message, (Fix(set_to(f"preference.{name}_weight", f"{weight:g}"), patch, False),))


SMALL_MODEL = 500_000_000  # parameters; smaller models need higher rates than the range below
SMALL_FACTOR = 10  # times the rates of others


@warning(
    "STG008",
    fields=("train.learning_rate", "train.stage"),
    title="Unusual learning rate for preference training",
    source="Rafailov et al. 2023, Ethayarajh et al. 2024, Hong et al. 2024; trl's and LLaMA-Factory's examples",
    fails_on=Example({**DPO, "train.learning_rate": 1e-3}, H100, replace(DEMO, shape=LLAMA_8B)),
    passes_on=Example({**DPO, "train.learning_rate": 5e-6}, H100, replace(DEMO, shape=LLAMA_8B)),
)
def unusual_preference_learning_rate(case: Case) -> Violation | None:
    """Preference losses need much lower learning rates than supervised fine-tuning. At the learning rates of supervised
    fine-tuning, the probabilities of the chosen and the rejected completion both collapse, and the model degenerates.
    Models below 500M parameters need higher rates: for them, rates up to 10 times as high are usual."""
    train, shape = case.spec.train, case.shape
    rates = registry.PREFERENCE_RATES[case.spec.method.kind]
    if shape is not None and shape.parameters < SMALL_MODEL:
        rates = rates.raised(SMALL_FACTOR)
    if train.stage not in registry.LOW_RATE_STAGES or rates.lowest <= train.learning_rate <= rates.highest:
        return None
    if not case.optimizer.is_adaptive:
        return None
    return unusual_rate(train.learning_rate, rates, _stage(case).label)
