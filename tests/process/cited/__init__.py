"""What shows that a rule is true: each rule is launched, seen on a GPU, checked here by asking the library, or exempt.

A test that asks the library is marked `@cites("STR032")`. `test_every_rule.py` insists that each rule is in exactly one
place, and that the versions that sources name are the installed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])

# Code -> the tests that ask the library.
CITED: dict[str, list[str]] = {}

# Rules that no package could make untrue, by kind; and those whose package is not among the tests' own.
EXEMPT: Mapping[str, frozenset[str]] = {
    "arithmetic": frozenset(),
    "paper": frozenset(),
    "hardware": frozenset(),
    "own": frozenset(),
    "absent-package": frozenset(),
}
# Those packages, as they are imported. Where one is installed, its rules can be checked, and must be.
ABSENT = ("flash_attn", "liger_kernel", "unsloth")


def cites(*codes: str) -> Callable[[Test], Test]:
    """Mark a test as the one that shows that these rules are true."""

    def mark(test: Test) -> Test:
        for code in codes:
            CITED.setdefault(code, []).append(test.__name__)
        return test

    return mark
