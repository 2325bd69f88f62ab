"""The texts of the rules: unique slugs, sentences that stand alone, and the terms of the libraries.

Findings of the failing examples are checked too, so messages and fixes that are made for a case are covered.
"""

from __future__ import annotations

import re
from collections import Counter

from backend.rules import FAMILIES, OUTDATED, RULES, Finding, Rule, example_findings

# Private terms for what the libraries have a name for. Only `source` may quote others.
BANNED = (
    r"without a word|in silence|nobody|anew|of one's own|ways? out|no longer so|asked for|is (not )?here|to be had",
    r"is no more|another than|come(s)? to|goes on|going on|mend\w*|glance\w*|judg\w*|wish(es)?|ladder|cookie|keeper",
    r"desk|exam|seen (with|by)|looks? at|looked at|beside|held|held[- ]back|kept back|keep back|cut[- ]off|cut away",
    r"learners?|taught|learned|learns?|answers?|answered|questions?|directions?|lengths of|pieces?|parcels?|slic\w+",
    r"spread\w*|packed (weights?|base|models?|layers?)|are unpacked|packs|helpers?|further keys|tables? of|plain ones?",
)
ALLOWED = re.compile(r"LoRA Learns Less|GPT-2 learns|learned (embeddings?|positions?)", re.IGNORECASE)
BANNED_WORDS = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
# Rows are those of a matrix or a table, which rules about these parts of a run write about; a dataset has examples.
ROWS = re.compile(r"\brows?\b", re.IGNORECASE)
MATRIX_FAMILIES = ("ADP", "KRN", "OPT", "PRC", "QNT", "STR")
# A sentence may begin with the name of a library or of an option.
LIBRARIES = (
    "accelerate", "apollo-torch", "badam", "bf16", "bitsandbytes", "fp16", "fp32", "fp8", "galore-torch", "gloo", "hqq",
    "peft", "tf32", "torch", "torchao", "torchrun", "transformers", "trl",
)  # fmt: skip


def is_sentence(text: str) -> bool:
    """Whether it begins with a capital letter, a number, or the name of a library, file or option, and ends as one."""
    first = text.split()[0].rstrip(",:").removesuffix("'s")
    is_name = first in LIBRARIES or bool(re.search(r"[-._/\d]", first))
    return (text[0].isupper() or text[0].isdigit() or is_name) and text.endswith((".", "!"))


def banned(text: str, *, rows: bool = False) -> list[str]:
    """The banned words in a text; `rows`: whether it is about something that has rows."""
    rest = ALLOWED.sub(" ", text)
    return [match[0] for pattern in (BANNED_WORDS, *(() if rows else (ROWS,))) for match in pattern.finditer(rest)]


def texts(rule: Rule, found: Finding) -> dict[str, str]:
    """What a person reads of a rule, by the part that it is."""
    fixes = (*rule.fixes, *found.fixes)
    return {
        "title": rule.title,
        "message": found.message,
        "reason": rule.reason,
        "manual fix": rule.manual_fix,
        "fixes": "; ".join(fix.label for fix in fixes),
        "costs": "; ".join(fix.cost for fix in fixes),
    }


def test_slugs_and_titles_are_unique() -> None:
    for names in ([rule.slug for rule in RULES], [rule.title for rule in RULES]):
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_slugs_are_descriptive() -> None:
    """Two words at least, so that a slug can be understood without its family."""
    for rule in RULES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.slug), rule.slug
        assert len(rule.slug) <= 60, rule.slug


def test_parts_have_their_form() -> None:
    for rule in RULES:
        found = example_findings()[rule.code]
        assert not rule.title.endswith(".") and rule.title not in found.message, rule.code
        sentences = (rule.reason, found.message, *([rule.manual_fix] if rule.manual_fix else []))
        assert [text for text in sentences if not is_sentence(text)] == [], rule.code
        for fix in (*rule.fixes, *found.fixes):
            assert fix.label and not fix.label.endswith("."), (rule.code, fix)
            assert not fix.cost.endswith("."), (rule.code, fix)


def test_terms_are_those_of_the_libraries() -> None:
    for rule in RULES:
        rows = rule.code.startswith(MATRIX_FAMILIES)
        used = {part: banned(text, rows=rows) for part, text in texts(rule, example_findings()[rule.code]).items()}
        assert not {part: words for part, words in used.items() if words}, rule.code


def test_family_names_and_outdated_advice_use_the_same_terms() -> None:
    for title in FAMILIES.values():
        assert not banned(title), title
    for old in OUTDATED:
        assert not banned(f"{old.topic}. {old.before} {old.now}"), old
