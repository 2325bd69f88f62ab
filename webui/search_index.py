"""The index of the option search: the texts by which each option can be found.

The page matches and ranks on every keystroke (static/build/search.js), so the index is sent once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backend.config.aliases import ALIASES
from backend.config.options import by_name


def search_index(names: Iterable[str]) -> list[dict[str, Any]]:
    """For each option its key, help, and the names that other libraries use for it, in the order of `names`."""
    aliases: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        aliases.setdefault(name, []).append(alias)
    return [{"name": name, "help": by_name()[name].help, "aliases": aliases.get(name, [])} for name in names]
