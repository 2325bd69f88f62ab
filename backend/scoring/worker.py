"""The process of a custom score: a regular expression, or the function `score` of a Python file.

It runs as a file and imports nothing of Footplate. stdin has lines of JSON: the definition, then texts to score; each
is answered by a line on stdout. What the function prints goes to stderr. Ends when stdin is closed, or with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import inspect
import json
import math
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MODULE, FUNCTION = "score_file", "score"
CHANGED = "was changed after you agreed to run it"
NAMES = ("prompt", "reference", "output")
ARGUMENTS = f"must define a function {FUNCTION}({', '.join(NAMES)}), with its arguments in this order"


class Refused(Exception):
    """What is wrong with a score file, as a phrase that follows its name."""


def regex_score(pattern: str, compares_group: bool) -> Callable[[str, str, str], bool | None]:
    """Whether an output matches; with `compares_group`, whether its first group is that of the reference, None for a
    reference without it."""
    compiled = re.compile(pattern)

    def score(prompt: str, reference: str, output: str) -> bool | None:
        match = compiled.search(output)
        if not compares_group:
            return match is not None
        expected = compiled.search(reference)
        if expected is None or expected[1] is None:
            return None
        return match is not None and match[1] == expected[1]

    return score


def file_score(path: str, sha256: str) -> Any:
    """The function of a file with this hash, which is executed. Raises Refused, and what the file raises."""
    code = Path(path).read_bytes()
    if hashlib.sha256(code).hexdigest() != sha256:
        raise Refused(CHANGED)
    module = sys.modules[MODULE] = types.ModuleType(MODULE)
    module.__file__ = path
    exec(compile(code, path, "exec"), module.__dict__)
    function: Any = getattr(module, FUNCTION, None)
    if not callable(function):
        raise Refused(ARGUMENTS)
    try:
        signature = inspect.signature(function)
        signature.bind(*NAMES)
    except TypeError:
        raise Refused(ARGUMENTS) from None
    except ValueError:  # a function of C has no signature
        return function
    if any(name in NAMES and name != expected for name, expected in zip(signature.parameters, NAMES, strict=False)):
        raise Refused(ARGUMENTS)
    return function


def as_number(value: Any) -> float | None:
    """The returned `value` as a number; None stays. Raises Refused."""
    found = value.item() if hasattr(value, "item") else value  # a scalar of numpy or torch
    if found is None:
        return None
    if isinstance(found, bool | int | float) and math.isfinite(found):
        return float(found)
    raise Refused(f"returned {repr(value)[:60]}, which is not a finite number, True, False or None")


def attempt(path: str, work: Callable[..., Any], *given: Any) -> tuple[Any, str]:
    """What `work` returns, and what went wrong with the file, as a phrase that follows its name; '' if nothing did."""
    try:
        return work(*given), ""
    except Refused as error:
        return None, str(error)
    except BaseException as error:  # the file may raise anything, SystemExit too
        where = f" in line {line}" if (line := _line(error, path)) else ""
        text = " ".join(str(error).split())[:300]
        return None, f"raised {type(error).__name__}{where}{': ' if text else ''}{text}"


def _line(error: BaseException, path: str) -> int | None:
    """The line of the file that raised an error, or called what raised it."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None


def main() -> None:
    """Answer each line until stdin is closed."""
    with contextlib.suppress(OSError, AttributeError):  # Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with open(os.devnull, encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), 0)
    definition = json.loads(requests.readline())
    path = definition.get("path", "")
    score, problem = attempt(path, lambda: file_score(**definition) if path else regex_score(**definition))
    print(json.dumps({"problem": problem}), file=answers, flush=True)
    for line in requests if score else ():
        value, problem = attempt(path, lambda texts: as_number(score(*texts)), json.loads(line))
        print(json.dumps({"value": value, "problem": problem}), file=answers, flush=True)


if __name__ == "__main__":
    main()
