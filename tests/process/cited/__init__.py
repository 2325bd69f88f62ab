"""The proof of each rule: it is launched, verified on a GPU, tested here against the installed library, or exempt.

A test of the library's behavior is marked `@cites("STR032")`. `test_every_rule.py` requires exactly one proof for each
rule, and that the versions in the sources are the installed ones; a new rule without a proof fails it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

# Code -> the tests of the library's behavior.
CITED: dict[str, list[str]] = {}

# Rules that do not depend on an installed package, by kind.
EXEMPT: Mapping[str, str] = {
    "arithmetic": "DAT008 DAT012 DAT015 DAT023 LCH006 LCH007 LCH008 LCH009 NOD007 NOD013 OPT018 OUT001 OUT002 "
    "PRC009 STR006 TRN004 TRN009 TRN012 TRN013",
    "paper": "ADP004 ADP005 HW010 MTH009 MTH010 OPT008 OPT012 STG007 STG008",
    "hardware": "HW008 HW011 PRC003 PRC004 QNT008 STR016",
    # About Footplate's own files, estimate or plan, or not proven yet.
    "own": "DAT009 DAT011 DAT014 DAT016 DAT019 DAT024 DAT025 DAT026 DAT027 DAT028 DAT029 DAT030 DAT031 DAT032 DAT033 "
    "DAT034 DAT035 DAT038 HW002 HW005 LCH011 LCH016 LCH017 MEM001 MEM002 MEM003 MEM004 CLU001 CLU002 CLU003 "
    "CLU004 CLU005 CLU006 CLU007 CLU008 CLU009 LLF001 LLF002 LLF003 LLF004 LLF005 LLF006 LLF007 LLF008 LLF009 LLF010 "
    "STR023 STR025 STR036 TRN010 TRN011 DAT036 DAT039 DAT040 DAT041 DAT042 DAT043 DAT044 DAT045",
    "absent-package": "KRN003 KRN005 KRN008 UNS001 UNS004 UNS007 UNS008 UNS009",
}
# Where one of these is installed, its rules need a test.
ABSENT = ("flash_attn", "liger_kernel", "unsloth")


def cites(*codes: str) -> Callable[[Test], Test]:
    """Mark a test as the proof of these rules; its failure names them."""

    def mark(test: Test) -> Test:
        for code in codes:
            CITED.setdefault(code, []).append(test.__name__)

        @wraps(test)
        def annotated(*args: object, **kwargs: object) -> object:
            __tracebackhide__ = True
            try:
                return test(*args, **kwargs)
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"The library no longer behaves as these rules say: {', '.join(codes)}.")
                raise

        return annotated  # type: ignore[return-value]

    return mark
