"""Rules about conversations: what of them is trained on, and whether their completions have an end."""

from __future__ import annotations

from dataclasses import replace

from backend.data.chat import COLUMN
from backend.rules.base import Case, Example, Violation, names, warning
from backend.rules.common_fixes import OTHER_TEMPLATE
from backend.rules.examples import USER_DATA, USER_DATA_FACTS
from backend.wording import counted

OWN_TEMPLATE = {**USER_DATA, "data.chat_template": "file", "data.chat_template_file": "template.jinja"}


@warning(
    "DAT024",
    fields=("data.chat_template",),
    title="Parts of the examples are not used",
    source="the examples, the keys that the chat template reads, and the text that it makes",
    manual_fix="Use a chat template that includes them, or remove them from the data. To weight an example, repeat it.",
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
    parts = [part for part, _ in found if not part.startswith(COLUMN)]
    columns = [part for part, _ in found if part.startswith(COLUMN)]
    left_out = f"{by} leaves out {names(parts)}, {where}." if parts else ""
    unused = f"The loss does not use {names(columns)}{'' if parts else f', {where}'}." if columns else ""
    return f"{left_out} {unused}".strip()


@warning(
    "DAT025",
    fields=("data.chat_template",),
    title="No token that ends a completion has a loss",
    source="the rendered examples: their last trained token is not a special token",
    manual_fix="End the assistant turns of the chat template with a special token, such as {{ eos_token }}, inside of "
    "its {% generation %} block if it has one.",
    fails_on=Example(OWN_TEMPLATE, facts=replace(USER_DATA_FACTS, num_checked=20, num_endless=20)),
    passes_on=Example(OWN_TEMPLATE, facts=replace(USER_DATA_FACTS, num_checked=20)),
)
def completions_without_an_end(case: Case) -> Violation | None:
    """Generation ends when the model outputs a special token such as <|im_end|> or </s>. If the loss covers no such
    token, the model is not trained to output it, and each generation continues until the token limit."""
    endless = case.facts.num_endless
    if not endless or case.spec.data.chat_template == "chatml":  # which ends completions
        return None
    where = f"{endless:,} of {counted(case.facts.num_checked, 'checked example')}"
    message = f"In {where}, the last token with a loss is not special, so the model is not trained to end completions."
    return Violation(message, (OTHER_TEMPLATE,))
