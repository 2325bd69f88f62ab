"""JSON text, with errors that name the line and column of the mistake. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_DIGITS = 400  # Python refuses to convert more than 4300, and takes quadratic time
BYTE_ORDER_MARK = "\ufeff"
COMMENTS = ("//", "/*", "#")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass
class JsonError(ValueError):
    """What is wrong with a JSON text, and where: `line` and `column` begin with 1; 0 if the mistake is not in the
    syntax."""

    reason: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if not self.line:
            return self.reason
        return f"line {self.line}, column {self.column}: {self.reason}"


class _Refused(ValueError):
    """JSON that the parser reads, but that must not be used."""


def load_json(text: str) -> Any:
    """Same as json.loads, but accepts a byte order mark. Raises JsonError, also for a duplicate key."""
    text = text.removeprefix(BYTE_ORDER_MARK)
    try:
        return json.loads(text, object_pairs_hook=_table, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise _explain(text, error) from None
    except _Refused as error:
        raise JsonError(str(error)) from None
    except RecursionError:
        raise JsonError("nested too deep") from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f'the key "{twice}" occurs twice in one object')
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused(f"a number with more than {MAX_DIGITS} digits")
    return int(digits)


def _explain(text: str, error: json.JSONDecodeError) -> JsonError:
    """The error at the place of the mistake: the parser reports where it gave up, which is often a line later."""
    at, reason, rest = error.pos, error.msg, text[error.pos :]
    before = text[:at].rstrip()
    word = next((word for word in PYTHON_WORDS if rest.startswith(word)), "")
    if rest.startswith(COMMENTS):
        reason = "JSON has no comments"
    elif not rest.strip() and reason != "Expecting value":
        reason = "the text ends before its last object or string is closed"
    elif rest[:1] in ("}", "]") and before.endswith(","):
        at, reason = len(before) - 1, f"there must be no comma before {rest[0]}"
    elif reason.startswith("Illegal trailing comma"):  # from Python 3.13 on, with the place of the comma
        reason = f"there must be no comma before {rest[1:].lstrip()[:1]}"
    elif word:
        reason = f"{word} is written {PYTHON_WORDS[word]} in JSON"
    elif rest.startswith("'"):
        reason = "text needs double quotes in JSON"
    elif reason == "Expecting ',' delimiter":
        at, reason = len(before), "a comma is missing"
    elif reason == "Expecting ':' delimiter":
        at, reason = len(before), "a colon is missing"
    elif reason == "Invalid control character at":
        reason = (
            "text must end on the line where it begins"
            if rest[0] in "\r\n"
            else "a tab or control character within text"
        )
    else:
        reason = reason[0].lower() + reason[1:]
    line_start = text.rfind("\n", 0, at) + 1
    return JsonError(reason, text.count("\n", 0, at) + 1, at - line_start + 1)
