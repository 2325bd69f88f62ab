"""Suggestions for unknown names: the option, section or value that most likely was meant.

Names of TrainingArguments, peft, trl, DeepSpeed, accelerate, torchrun and LLaMA-Factory are looked up first; then the
closest spelling is searched with difflib.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from backend.config.aliases import ALIASES, GUESSES, VALUE_ALIASES

MIN_SIMILARITY = 0.75  # difflib ratio: one wrong letter in four


def suggest_option(name: str, options: Collection[str], exact: bool = False) -> str:
    """The option key that `name` most likely means; '' if none is close. `options` are all option keys; `exact`:
    without similar spellings."""
    normalized = _normalize(name)
    section, _, key = normalized.rpartition(".")
    known, by_key = {**ALIASES, **GUESSES}, _by_key(options)
    if found := known.get(normalized) or known.get(key):
        return found
    if key in by_key:
        return _closest_section(section, by_key[key])
    if exact:
        return ""
    spellings = {**known, **{short: _closest_section(section, names) for short, names in by_key.items()}}
    spellings |= {option: option for option in options}
    if match := closest(normalized, spellings) or closest(key, spellings):
        return spellings[match]
    return _containing(key, [option for option in options if option.partition(".")[0] == section])


def _containing(key: str, options: Iterable[str]) -> str:
    """The shortest of `options` whose second half contains `key`, or is contained in it."""
    parts = {option: option.partition(".")[2] for option in options}
    found = [option for option, short in parts.items() if len(key) > 3 < len(short) and (key in short or short in key)]
    return min(found, key=len, default="")


def suggest_section(name: str, sections: Collection[str]) -> str:
    """The section that `name` most likely means; '' if none is close."""
    normalized = _normalize(name)
    guesses = {guess.partition(".")[0]: option.partition(".")[0] for guess, option in GUESSES.items()}
    if normalized in guesses:
        return guesses[normalized]
    return closest(normalized, sections) or next(
        (s for s in sections if normalized.startswith(s) or s.startswith(normalized)), ""
    )


def suggest_value(option: str, value: str, choices: Sequence[str]) -> str:
    """The value of `option` that `value` most likely means; '' if none is close."""
    normalized = value.strip().lower()
    if normalized in choices:
        return normalized
    if known := VALUE_ALIASES.get(option, {}).get(normalized):
        return known
    return closest(normalized.replace("-", "_"), choices) or closest(normalized, choices)


def _normalize(name: str) -> str:
    """Without the dashes of command-line flags: --nproc-per-node -> nproc_per_node."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def _by_key(options: Iterable[str]) -> dict[str, list[str]]:
    """Second half of an option key -> the options of that name: steps -> eval.steps, save.steps, logging.steps."""
    found: dict[str, list[str]] = {}
    for option in options:
        found.setdefault(option.partition(".")[2], []).append(option)
    return found


def _closest_section(section: str, options: Sequence[str]) -> str:
    """The one of several options with the same second half whose section is most like `section`."""
    return max(options, key=lambda option: difflib.SequenceMatcher(None, section, option.partition(".")[0]).ratio())


def closest(name: str, names: Iterable[str], similarity: float = MIN_SIMILARITY) -> str:
    """The most similar of `names`; '' if none is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=similarity)), "")
