"""What shows that a rule is true: each rule is launched, seen on a GPU, checked here by asking the library, or exempt.

A test that asks the library is marked `@cites("STR032")`. `test_every_rule.py` insists that each rule is in exactly one
place, and that the versions that sources name are the installed ones. A rule that is added without either turns it red.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

# Code -> the tests that ask the library.
CITED: dict[str, list[str]] = {}

# What no package that is installed could make untrue, by kind.
EXEMPT: Mapping[str, str] = {
    "arithmetic": "DAT008 DAT012 DAT015 LCH006 LCH007 LCH008 LCH009 NOD007 NOD013 OPT018 OUT001 OUT002 PRC009 STR006 "
    "TRN004 TRN009",
    "paper": "ADP004 ADP005 HW010 MTH009 MTH010 OPT008 OPT012 STG007 STG008",
    "hardware": "HW008 PRC003 PRC004 QNT008 STR016",
    # Footplate's own files, estimate, plan, or what it has not proven.
    "own": "DAT009 DAT011 DAT014 DAT016 HW002 HW005 LCH011 MEM001 MEM002 MEM003 STR023 STR025 STR036",
    "absent-package": "KRN003 KRN005 KRN008 UNS001 UNS004 UNS007 UNS008",
}
# The absent packages. Where one is installed its rules can be checked, and must be.
ABSENT = ("flash_attn", "liger_kernel", "unsloth")


def cites(*codes: str) -> Callable[[Test], Test]:
    """Mark a test as the one that shows that these rules are true. Where it fails it says of which."""

    def mark(test: Test) -> Test:
        for code in codes:
            CITED.setdefault(code, []).append(test.__name__)

        @wraps(test)
        def noted(*given: object, **more: object) -> object:
            __tracebackhide__ = True
            try:
                return test(*given, **more)
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"Not as its source says any more: {', '.join(codes)}.")
                raise

        return noted  # type: ignore[return-value]

    return mark
