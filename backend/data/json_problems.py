"""What is wrong with JSON, where, and how to fix it. The json module's own words name what its parser expected next."""

from __future__ import annotations

import json
import re
import sys

ONE_PER_LINE = "write one object per line, for example with jq -c ."
QUOTES = "JSON needs double quotes, as Python's json.dumps writes them"
CUT_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{0,3}")
WORD = re.compile(r"[A-Za-z_]\w*")
SHOWN = 20  # characters of the text that are quoted
CONSTANTS = {
    "None": "null", "True": "true", "False": "false", "nan": "null", "undefined": "null", "TRUE": "true",
    "FALSE": "false", "NULL": "null",
}  # fmt: skip
TYPOGRAPHIC = "\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u00ab\u00bb"
QUOTE_NAMES = dict.fromkeys(TYPOGRAPHIC, "typographic quote") | {"'": "single quote"}
LITERALS = ("true", "false", "null")
COMMENTS = ("//", "/*", "#")


def describe(error: Exception, text: str, is_line: bool) -> str:
    """Why the json module cannot read a text, as the end of a sentence; the location has the line. `is_line`: the text
    is a line of a .jsonl file, otherwise the whole file."""
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"contains a number with more than {sys.get_int_max_str_digits()} digits"
    at = error.pos - error.msg.startswith("Invalid \\u")  # that is the position after the backslash
    column, text = f"column {locate(text, at)[1]}", text.rstrip()
    rest = text[error.pos : error.pos + SHOWN]
    if rest.startswith("\ufeff"):
        return f"is not valid JSON: there is a byte order mark in {column}, where a file was appended; remove it"
    if "\0" in text[error.pos : error.pos + 1]:
        return f"is not valid JSON: there is a NUL byte in {column}; the file is damaged"
    is_cut_off = not rest if error.msg.startswith("Invalid control") else CUT_ESCAPE.fullmatch(text[at:])
    if error.msg.startswith("Unterminated") or is_cut_off:
        problem = _open_text(column, is_line)
    elif any(literal.startswith(rest) for literal in LITERALS):
        problem = _open_object(column, is_line)
    else:
        problem = _unexpected(error, rest, column, text[: error.pos])
    return f"is not valid JSON: {problem}"


def describe_list(text: str, at: int) -> str:
    """Why a list does not continue at a position, as the end of a sentence."""
    complete = "" if text[at:].strip() else "; complete the file if it was cut off"
    return f"is not valid JSON: a comma or ] is missing in column {locate(text, at)[1]}{complete}"


def locate(text: str, at: int) -> tuple[int, int]:
    """Line and column of a position, from 1. If the text ends too early, they are those after its last character; the
    json module names the next line."""
    at = min(at, len(text.rstrip()))
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def _open_text(column: str, is_line: bool) -> str:
    if is_line:
        return (
            f"the line ends within a text (near {column}); write a line break in a text as \\n, or complete the line "
            "if it was cut off"
        )
    return f"the file ends within a text (near {column}); complete it"


def _open_object(column: str, is_line: bool) -> str:
    if is_line:
        return (
            f"the line ends before its object does ({column}); {ONE_PER_LINE}, or complete the line if it was cut off"
        )
    return f"the file ends before its last object does ({column}); complete it"


def _unexpected(error: json.JSONDecodeError, rest: str, column: str, before: str) -> str:
    """What is wrong with the character that `rest` begins with."""
    first, message = rest[0], error.msg
    if message.startswith("Invalid control"):
        known = {"\t": ("tab", "\\t"), "\n": ("line break", "\\n"), "\r": ("line break", "\\r")}
        name, escape = known.get(first, ("control character", f"\\u{ord(first):04x}"))
        return f"there is a {name} within a text in {column}; write it as {escape}"
    if message.startswith("Invalid \\"):
        return f"the backslash in {column} begins no escape of JSON; write a backslash in a text as \\\\"
    if message.startswith("Extra data"):
        return _after_object(first, rest, column)
    if message.startswith("Illegal trailing comma") or (first in "}]" and before.rstrip().endswith(",")):
        return f"there is a comma before the closing bracket (near {column}); remove it"
    if message.startswith("Expecting ':'"):
        return f"a colon is missing before {column}"
    if rest.startswith(COMMENTS):
        return f"a comment begins in {column}, and JSON has none; remove it"
    if first in QUOTE_NAMES:
        return f"there is a {QUOTE_NAMES[first]} in {column}; {QUOTES}"
    if message.startswith("Expecting property") and WORD.match(rest):
        return f"the name that begins in {column} has no quotes; {QUOTES}"
    if message.startswith("Expecting ','"):
        return f'a comma or a closing bracket is missing before {column}; write a " within a text as \\"'
    return _no_value(rest, column, "name in double quotes" if message.startswith("Expecting property") else "value")


def _after_object(first: str, rest: str, column: str) -> str:
    if first == "{":
        return f"a second object begins in {column}; write one object per line"
    if first == ",":
        return f"there is a comma after the object in {column}; remove it: objects are separated by line breaks only"
    return f"there is text after the first value, {_shown(rest)} in {column}; {ONE_PER_LINE}"


def _no_value(rest: str, column: str, expected: str) -> str:
    word = WORD.match(rest)
    if word and word[0] in CONSTANTS:
        return f"{word[0]} in {column} is not JSON; write {CONSTANTS[word[0]]}"
    if column == "column 1":
        return f"an object is expected, and the line begins with {_shown(rest)}"
    return f"a {expected} is expected in {column}, and there is {_shown(rest)}"


def _shown(rest: str) -> str:
    return repr(rest.partition("\n")[0].rstrip())
