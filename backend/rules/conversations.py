"""Rules about conversations: which parts of them are trained on, and whether their completions have an end."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace

from backend.config import Source
from backend.data import chat
from backend.data.chat import COLUMN, PROMPT_COLUMN, SYSTEM_TEXT
from backend.data.preferences import PROMPTS
from backend.rules.base import Case, Example, Fix, Violation, advice, names, warning
from backend.rules.common_fixes import OTHER_TEMPLATE
from backend.rules.examples import USER_DATA, USER_DATA_FACTS
from backend.wording import counted, different_start

NEW_TOKEN = "LoRA also trains its embedding"
CHATML = {**USER_DATA, "data.chat_template": "chatml"}
ALL_TOKENS = {**USER_DATA, "data.loss_on": "all_tokens"}
OWN_TEMPLATE = {**USER_DATA, "data.chat_template": "file", "data.chat_template_file": "template.jinja"}


@warning(
    "DAT024",
    fields=("data.chat_template",),
    title="Parts of the examples are not used",
    source="the examples, the keys that the chat template reads, and the text that it makes",
    manual_fix="Use a chat template that includes them, or remove them from the data.",
    fails_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, num_checked=20, unread_keys=(("reasoning", 20),))),
    passes_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, num_checked=20)),
)
def turns_without_some_parts(case: Case) -> str | None:
    """A chat template decides which parts of a turn become text, and the model never sees the parts that it leaves out,
    such as tool calls. Many templates leave out the reasoning of earlier turns on purpose. Only assistant turns have a
    weight; a weight of a whole example has no effect."""
    found = case.facts.unread_keys
    if not found:
        return None
    where = f"in {max(count for _, count in found):,} of {counted(case.facts.num_checked, 'checked example')}"
    by = "Pretraining, which uses the text of turns," if case.spec.train.stage == "pretraining" else "The chat template"
    weights = [part for part, _ in found if part.startswith(COLUMN)]
    prompts = [part for part, _ in found if part.startswith(PROMPT_COLUMN)]
    systems = [part for part, _ in found if part.startswith(SYSTEM_TEXT)]
    parts = [part for part, _ in found if part not in (*weights, *prompts, *systems)]
    sentences = (
        (parts, f"{by} leaves out {names(parts)}"),
        (weights, f"Weights must be in the assistant turns: the loss does not use {names(weights)}"),
        (prompts, f"The prompt is what both conversations begin with, so {names(prompts)} is not used"),
        (systems, f"The conversations have their own system prompts, so {names(systems)} is not used"),
    )
    return f"{'. '.join(text for given, text in sentences if given)}, {where}."


@warning(
    "DAT025",
    fields=("data.chat_template",),
    title="No token that ends a completion has a loss",
    source="the rendered examples: their last trained token is not a special token",
    manual_fix="End the assistant turns of the chat template with a special token, such as {{ eos_token }}, inside "
    "its {% generation %} block if it has one.",
    fails_on=Example(
        OWN_TEMPLATE,
        facts=replace(USER_DATA_FACTS, num_checked=20, num_endless=20, unknown_ends=(("<|im_end|>", 20),)),
    ),
    passes_on=Example(OWN_TEMPLATE, facts=replace(USER_DATA_FACTS, num_checked=20)),
)
def completions_without_an_end(case: Case) -> Violation | None:
    """Generation ends when the model outputs a special token such as <|im_end|> or </s>. If the loss covers no such
    token, the model is not trained to output it, and each generation continues until the token limit."""
    endless = case.facts.num_endless
    if not endless or case.spec.data.chat_template == "chatml":  # it ends completions
        return None
    where = f"{endless:,} of {counted(case.facts.num_checked, 'checked example')}"
    message = f"In {where}, the last token with a loss is not special, so the model is not trained to end completions."
    ends = [text for text, count in case.facts.unknown_ends if text and count == endless]
    if not ends:
        return Violation(message, (OTHER_TEMPLATE,))
    if {*ends} <= {*case.spec.data.added_tokens}:
        return None
    known = case.spec.data.add_special_tokens
    add = Fix(f"Add {ends[0]} to the vocabulary", {"data.add_special_tokens": (*known, *ends)}, False, NEW_TOKEN)
    message += f" These examples end with {ends[0]}, which the tokenizer splits into several tokens."
    return Violation(message, (add, OTHER_TEMPLATE))


@warning(
    "DAT043",
    fields=("data.loss_on",),
    title="No assistant turn of an example has a loss",
    source="the weights of the assistant turns",
    manual_fix="Give an assistant turn of each example another weight, or set data.loss_on to completions, which drops "
    "these examples.",
    fails_on=Example(ALL_TOKENS, facts=replace(USER_DATA_FACTS, num_checked=20, num_weightless=3)),
    passes_on=Example(ALL_TOKENS, facts=replace(USER_DATA_FACTS, num_checked=20)),
)
def turns_without_a_loss(case: Case) -> str | None:
    """A turn with the weight 0 has no loss, also not on the token that ends it. With a loss on all tokens, an example
    whose assistant turns all have this weight trains the model on prompts only."""
    weightless = case.facts.num_weightless
    if not weightless:
        return None
    where = f"{weightless:,} of {counted(case.facts.num_checked, 'checked example')}"
    return f"In {where}, each assistant turn has the weight 0, so the loss covers the other turns only."


@warning(
    "DAT041",
    fields=("data.chat_template", "data.add_special_tokens"),
    title="The markers of ChatML are not tokens",
    source="the tokenizer, and what ChatML writes for it",
    manual_fix="Add them to the vocabulary, or use a chat template whose markers are tokens of this tokenizer.",
    fails_on=Example(CHATML, facts=replace(USER_DATA_FACTS, split_markers=("<|im_start|>", "<|im_end|>"))),
    passes_on=Example(CHATML, facts=USER_DATA_FACTS),
)
def chatml_without_its_tokens(case: Case) -> Violation | None:
    """A tokenizer without these tokens splits the markers into several ordinary ones. ChatML then ends completions with
    the EOS token too, so generation ends, but programs show the text <|im_end|> at the end of each output."""
    data = case.spec.data
    split = [marker for marker in case.facts.split_markers if marker not in data.added_tokens]
    if data.chat_template != "chatml" or not split:
        return None
    shown = f" Each output would end with the text {split[-1]}." if "<|im_end|>" in split else ""
    options = {"data.add_special_tokens": (*data.add_special_tokens, *split)}
    add = Fix(f"Add {names(split)} to the vocabulary", options, False, "LoRA also trains their embeddings")
    return Violation(f"The tokenizer splits {names(split)} into several tokens.{shown}", (add,))


THINKS = ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think></think>At nine.", "text")
JOINED = "Use a chat template whose generation prompt ends where a token ends, such as before a space."
WITHOUT_THINKING = '{"enable_thinking": false}'


@warning(
    "DAT026",
    fields=("data.chat_template", "data.chat_template_kwargs"),
    title="The generation prompt does not match the training text",
    source="the rendered examples, and the generation prompts that the chat template makes for them",
    manual_fix="Add the missing part, such as reasoning, to the data. Or use a chat template whose generation prompt "
    "matches the start of its rendered assistant turns.",
    fails_on=Example(
        USER_DATA,
        facts=replace(
            USER_DATA_FACTS,
            num_starts=20,
            num_different_starts=20,
            start_difference=THINKS,
            start_kwargs=WITHOUT_THINKING,
        ),
    ),
    passes_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, num_starts=20)),
)
def completions_with_another_start(case: Case) -> Violation | None:
    """The trained model continues the generation prompt of the chat template. If assistant turns start differently in
    training, such as without the <think> that ends the generation prompts of many reasoning models, the model generates
    from a prefix that it never saw in training. Many templates have a variable for this."""
    facts = case.facts
    switch, kwargs = json.loads(facts.start_kwargs or "{}"), case.spec.data.template_kwargs
    if not facts.num_different_starts or (switch and switch.items() <= kwargs.items()):
        return None
    where = f"{facts.num_different_starts:,} of {counted(facts.num_starts, 'checked example')}"
    message = f"In {where}, {different_start(*facts.start_difference)}"
    option = {"data.chat_template_kwargs": json.dumps({**kwargs, **switch})}
    cost = "becomes a default of the saved chat template"
    fixes = [Fix(f"Set {name} to {json.dumps(value)}", option, False, cost) for name, value in switch.items()]
    return Violation(message, tuple(fixes), manual_fix=JOINED if "tokens" in facts.start_difference[2:] else "")


@warning(
    "DAT027",
    fields=("data.files", "data.hub_id"),
    title="Special tokens in message contents",
    source="the contents of the turns, and the special tokens of the tokenizer",
    manual_fix="Remove or rewrite these tokens in the data; the chat template adds its own special tokens.",
    fails_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, num_checked=20, special_tokens=(("<|im_end|>", 2),))),
    passes_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, num_checked=20)),
)
def special_tokens_in_contents(case: Case) -> str | None:
    """The tokenizer encodes these strings as special tokens, which can end a turn or start a new one in the middle of a
    text. Usual causes are data that another chat template has rendered already, and texts about chat templates."""
    found = case.facts.special_tokens
    if not found:
        return None
    where = f"{max(count for _, count in found):,} of {counted(case.facts.num_checked, 'checked example')}"
    tokens = names([token for token, _ in found])
    return f"In {where}, the content of a turn has {tokens}, which the tokenizer encodes as special tokens."


# Columns of published datasets that say something about an example, but are not part of it.
ABOUT = {
    *chat.WITHOUT_MEANING, "category", "categories", "class", "conversation_id", "difficulty", "domain", "file",
    "filename", "keywords", "label", "license", "prompt_id", "question_id", "row_id", "split", "subject", "tag", "tags",
    "task", "task_type", "title", "topic", "type", "user", "username",
}  # fmt: skip
USED = {
    *chat.READ, *chat.VARIABLES, *chat.REASONING, *chat.EXAMPLE_WEIGHTS, "prompt", "completion", "chosen", "rejected",
    "instruction", "input", "output", "history", "system", "loss_mask",
}  # fmt: skip
KNOWN = ABOUT | USED
FLAT = ("alpaca", "prompt_completion", "pairs", "labels")  # formats whose parts are columns
WITH_CONTEXT = replace(USER_DATA_FACTS, format="prompt_completion", text_columns=("prompt", "completion", "context"))


def _has_other_prompt(columns: Collection[str]) -> bool:
    """Whether preference data has its prompt in a column that comes before `input`, a part of an instruction only."""
    return "instruction" not in columns and any(name in columns for name in PROMPTS if name != "input")


@advice(
    "DAT034",
    fields=("data.files", "data.format", "data.system_column"),
    title="Columns with text are not used",
    source="the first example",
    manual_fix="If the model should see their text, add it to the prompt. If a column has the system prompt, set "
    "data.system_column. If a column has the reasoning before each completion, rename it to reasoning_content.",
    fails_on=Example(USER_DATA, facts=WITH_CONTEXT),
    passes_on=Example(USER_DATA, facts=replace(WITH_CONTEXT, text_columns=("prompt", "completion", "source"))),
)
def text_in_other_columns(case: Case) -> str | None:
    """Only the columns of the data format reach the model. Datasets often have the context of a prompt, or the
    reasoning before a completion, in a separate column."""
    data, facts = case.spec.data, case.facts
    if data.source != "files" or facts.format not in FLAT:
        return None
    chosen = {getattr(data, name) for name in Source.model_fields if name.endswith("_column")}
    known = KNOWN - {"input"} if facts.format in ("pairs", "labels") and _has_other_prompt(facts.columns) else KNOWN
    unused = [name for name in facts.text_columns if name not in chosen and name.lower() not in known]
    return f"The model does not see the text in {names([f'column {name}' for name in unused])}." if unused else None
