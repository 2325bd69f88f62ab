"""Rules about data.max_length: what it truncates and drops, and how many positions the model has for it."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names, set_to, warning
from backend.rules.common_fixes import NO_EVALUATION
from backend.rules.data_issues import rendered_issues, without_system_prompt
from backend.rules.examples import DEMO, GPT2, USER_DATA, USER_DATA_FACTS
from backend.wording import counted

MAX_TRUNCATED_SHARE = 0.1
LIMIT = ("data.max_length",)
PAIRS = replace(USER_DATA_FACTS, format="pairs", num_examples=20, num_checked=20)


@warning(
    "DAT009",
    fields=("data.max_length",),
    title="Many examples exceed max_length",
    source="the examples: tokens are counted with the model's tokenizer, or estimated from characters if it is not "
    "available",
    fails_on=Example({"data.max_length": 64}),
    passes_on=Example({"data.max_length": 512}),
)
def many_truncated_examples(case: Case) -> Violation | None:
    """Tokens after max_length are dropped, and they are mostly tokens of the completion. An example that loses its
    whole completion is dropped, and so is every longer pair of a reward model."""
    share, limit = _truncated_share(case), case.spec.data.max_length
    if share < MAX_TRUNCATED_SHARE:
        return None
    fitting = _fitting_max_length(case)
    fixes = (_max_length_fix(fitting),) if fitting > limit else ()
    which = "All checked" if share == 1 else f"About {share:.0%} of the"
    message = (
        f"{which} examples are longer than data.max_length ({limit:,} tokens); the longest has about "
        f"{case.facts.longest_example:,} tokens."
    )
    return Violation(message, fixes)


def _truncated_share(case: Case) -> float:
    """The share of the examples that are longer than max_length; pretraining splits them instead."""
    lengths, limit = case.facts.token_lengths, case.spec.data.max_length
    splits = case.spec.train.stage == "pretraining"
    return 0.0 if splits else sum(length > limit for length in lengths) / max(1, len(lengths))


@advice(
    "DAT045",
    fields=("data.files", "data.max_length"),
    title="Some examples are not trained on",
    source="the examples: tokens as in DAT009",
    fails_on=Example({"data.max_length": 512}, facts=replace(USER_DATA_FACTS, num_checked=20, num_dropped=1)),
    passes_on=Example({"data.max_length": 512}, facts=replace(USER_DATA_FACTS, num_checked=20)),
)
def dropped_examples(case: Case) -> Violation | None:
    """The run drops examples without a trained token: those whose prompt alone fills max_length, and those in which the
    turns that would be trained have the weight 0. It also drops pairs of equal completions, and the pairs of a reward
    model that are longer than max_length, since the reward may depend on the end of a completion."""
    facts, limit, stage = case.facts, case.spec.data.max_length, case.spec.train.stage
    parts = {
        f"without a trained token within data.max_length ({limit:,} tokens)": facts.num_dropped,
        f"longer than data.max_length ({limit:,} tokens)": facts.num_long_pairs,
        "with the same chosen and rejected completion": facts.num_identical_pairs,
    }
    count = sum(parts.values())
    trains_all = stage == "pretraining" or case.spec.launch.trainer == "llamafactory"
    if trains_all or not 0 < count < facts.num_checked or _truncated_share(case) >= MAX_TRUNCATED_SHARE:
        return None
    which = names([f"{number:,} {what}" for what, number in parts.items() if number])
    fixes = longer_fixes(case) if facts.longest_example <= _fitting_max_length(case) else ()  # else some stay dropped
    return Violation(f"The run drops {count:,} of {facts.num_checked:,} checked examples: {which}.", fixes)


def _max_length_fix(tokens: int) -> Fix:
    return Fix(set_to("data.max_length", tokens), {"data.max_length": tokens}, False)


@error(
    "DAT017",
    fields=("data.files", "data.max_length"),
    title="max_length leaves no completion in any training example",
    source="the examples: tokens as in DAT009; examples without a trainable token are dropped",
    fails_on=Example({"data.max_length": 16}, facts=replace(DEMO, min_prompt_tokens=40)),
    passes_on=Example({"data.max_length": 64}, facts=replace(DEMO, min_prompt_tokens=40)),
    proof="launch",
)
def no_completion_within_max_length(case: Case) -> Violation | None:
    """The loss starts at the first completion token of an example. If max_length truncates every example before that
    token, the training set is empty. A reward model's pairs are not truncated: longer pairs are dropped."""
    facts, stage, limit = case.facts, case.spec.train.stage, case.spec.data.max_length
    if facts.num_usable is not None:  # all examples were tokenized
        if not _training_set_is_empty(case) or mostly_identical(case) or not facts.token_lengths:
            return None
        return _only_elsewhere(case, "has a trained token") if facts.num_usable else _none_usable(case)
    trains_completions = stage in registry.PREFERENCE_STAGES or (
        stage == "sft" and case.spec.data.loss_on == "completions"
    )
    shortest = (
        min(facts.token_lengths, default=0) if stage == "reward" else facts.min_prompt_tokens * trains_completions
    )
    if not facts.counts_are_exact or limit >= 0.8 * shortest:  # token counts are estimates: allow 20 percent
        return None
    what = "shortest pair" if stage == "reward" else "shortest prompt"
    message = f"The {what} has about {shortest:,} tokens, and data.max_length is {limit:,}."
    return Violation(message, (_max_length_fix(_fitting_max_length(case)),), LIMIT)


def _training_set_is_empty(case: Case) -> bool:
    """Whether all examples were tokenized, and no example of the training set has a trained token."""
    facts, usable = case.facts, case.facts.usable_examples(case.spec.data, case.spec.train.seed)
    if rendered_issues(case):
        return False
    return facts.num_usable == 0 or (usable is not None and not usable[0])


def mostly_identical(case: Case) -> bool:
    """Whether most examples that are dropped are pairs of identical completions."""
    facts = case.facts
    return 2 * facts.num_identical_pairs > (facts.num_examples or 0) - (facts.num_usable or 0)


def _none_usable(case: Case) -> Violation:
    facts, limit = case.facts, case.spec.data.max_length
    if facts.skipped and facts.num_skipped_texts == facts.num_checked:
        which = f"All {facts.num_skipped:,} examples are" if facts.num_skipped > 1 else "The only example is"
        message = f"{which} skipped (data.on_bad_example is skip). The first: {facts.skipped[0]}."
        fixes, fields = without_system_prompt(case, facts.skipped), ("data.files", "data.on_bad_example")
        return Violation(message, tuple(fixes), fields, "All examples are skipped")
    which, longest = f"None of the {facts.num_checked:,} examples has a", "the longest example"
    if facts.num_checked == 1:
        which, longest = "The only example has no", "it"
    length, longer = counted(facts.longest_example, "token"), longer_fixes(case)
    if case.spec.train.stage == "reward" and min(facts.token_lengths) > limit:  # its pairs are never truncated
        pairs = "The only pair is" if facts.num_checked == 1 else f"All {facts.num_checked:,} pairs are"
        too_long = f"{pairs} longer than data.max_length ({limit:,} tokens); {longest} has {length}."
        return Violation(too_long, longer, LIMIT)
    message = f"{which} trained token within data.max_length ({limit:,} tokens); {longest} has {length}."
    unweighted = "The first token of an example has no loss, and neither has a turn with a weight of 0."
    return Violation(message if longer else f"{message} {unweighted}", longer, LIMIT)


def longer_fixes(case: Case) -> tuple[Fix, ...]:
    """A larger max_length, if some examples are longer than it."""
    fits = case.facts.longest_example <= case.spec.data.max_length
    return () if fits else (_max_length_fix(_fitting_max_length(case)),)


ALL_SAMPLES = {"data.max_samples": 0}


def _only_elsewhere(case: Case, what: str) -> Violation:
    """A violation: examples could be trained on, but the validation split and data.max_samples select none of them."""
    facts, data, seed = case.facts, case.spec.data, case.spec.train.seed
    usable, count = facts.num_usable or 0, facts.num_train_examples(data) or 0
    settings: dict[str, float] = {"data.max_samples": data.max_samples} if data.max_samples else {}
    if data.splits:
        settings |= {"data.validation_split": data.validation_split}
    message = (
        f"The training set has {counted(count, 'example')} "
        f"({', '.join(f'{name} {value}' for name, value in settings.items())}), none of which {what} within "
        f"data.max_length ({data.max_length:,} tokens). Of all {facts.num_examples:,} examples, {usable:,} "
        f"{'does' if usable == 1 else 'do'}."
    )
    fixes = (
        Fix("Train on all examples", ALL_SAMPLES, False, "more training examples"),
        Fix("Train without a validation set", NO_EVALUATION, False, "no eval loss"),
        Fix("Train on all examples, without a validation set", ALL_SAMPLES | NO_EVALUATION, False, "no eval loss"),
    )
    works = [fix for fix in fixes if (facts.usable_examples(case.with_patch(fix.patch).data, seed) or (0, 0))[0]]
    longer = () if mostly_identical(case) else longer_fixes(case)
    return Violation(message, (*longer, *works[:1]), (*settings, "data.max_length"))


def _fitting_max_length(case: Case) -> int:
    """A max_length for the longest example that was read, with a quarter to spare, within the model's positions."""
    enough = 64 * -(-case.facts.longest_example * 5 // (4 * 64))
    most = case.shape.max_positions if case.shape else 0
    return min(enough, most) if most else enough


@error(
    "DAT019",
    fields=("data.files", "data.rejected_column"),
    title="The chosen and rejected completions are identical in every training pair",
    source="the examples: a pair of identical completions expresses no preference and is dropped",
    manual_fix="Set data.chosen_column and data.rejected_column to two columns with different completions.",
    fails_on=Example(
        {**USER_DATA, "train.stage": "dpo"},
        facts=replace(PAIRS, num_usable=0, num_identical_pairs=20),
    ),
    passes_on=Example(
        {**USER_DATA, "train.stage": "dpo"},
        facts=replace(PAIRS, num_usable=1, num_identical_pairs=19),
    ),
)
def identical_pairs(case: Case) -> str | Violation | None:
    """A preference loss compares the chosen with the rejected completion. Pairs whose completions are identical after
    truncation to data.max_length are dropped, so no training example is left."""
    facts, data = case.facts, case.spec.data
    chosen, rejected = data.chosen_column or "chosen", data.rejected_column or "rejected"
    if chosen == rejected and case.spec.train.stage in registry.PREFERENCE_STAGES:
        return f"data.chosen_column and data.rejected_column both name the column {chosen!r}."
    if not facts.num_identical_pairs or not _training_set_is_empty(case) or not mostly_identical(case):
        return None
    if facts.num_usable:
        return _only_elsewhere(case, "has two different completions")
    count, limit = facts.num_identical_pairs, case.spec.data.max_length
    which = "The only pair has" if facts.num_checked == 1 else f"{count:,} of {facts.num_checked:,} pairs have"
    return f"{which} identical completions within {limit:,} tokens."


@error(
    "DAT010",
    fields=("data.max_length",),
    title="max_length exceeds the model's position embeddings",
    source="transformers 5.23 modeling_gpt2.py: wpe is an embedding with n_positions rows; modeling_opt.py and others",
    fails_on=Example({"data.max_length": 2048}, facts=replace(DEMO, shape=GPT2)),
    passes_on=Example({"data.max_length": 1024}, facts=replace(DEMO, shape=GPT2)),
)
def max_length_exceeds_position_embeddings(case: Case) -> Violation | None:
    """GPT-2, OPT and others have a table with an embedding per position. A position beyond its end raises an IndexError
    on a CPU and a device-side assert on a GPU. To estimate the KL divergence, KTO joins prompts with completions of
    other examples, up to data.max_length."""
    if case.shape is None or case.shape.model_type not in registry.POSITION_TABLES:
        return None
    return _too_many_positions(case.shape.max_positions, case, "position embeddings")


def _too_many_positions(most: int, case: Case, what: str) -> Violation | None:
    limit = case.spec.data.max_length
    if not most or limit <= most:
        return None
    spec = case.spec
    pairs_neighbors = spec.train.stage == "kto" and spec.preference.kto_loss_type == "kto"  # prompt, other completion
    all_counted = case.facts.num_usable is not None and not spec.data.streaming and not pairs_neighbors
    if all_counted and case.facts.longest_example <= most:
        return None  # all examples were tokenized, and no position beyond the last one is used
    return Violation(f"data.max_length is {limit:,}, and the model has {most:,} {what}.", (_max_length_fix(most),))


@warning(
    "DAT011",
    fields=("data.max_length",),
    title="max_length exceeds the model's context length",
    source="config.json: max_position_embeddings",
    fails_on=Example({"data.max_length": 16_384}),
    passes_on=Example({"data.max_length": 8192}),
)
def max_length_exceeds_context(case: Case) -> Violation | None:
    """Rotary position embeddings can be computed for any position, so the run works, but attention at positions that
    the model has never seen is poor and the loss is high."""
    if case.shape is None or case.shape.model_type in registry.POSITION_TABLES:
        return None
    return _too_many_positions(case.shape.max_positions, case, "positions (max_position_embeddings)")
