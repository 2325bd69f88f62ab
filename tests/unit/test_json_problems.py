"""A line or a file that is not JSON is described with what is wrong, where, and how to fix it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.data import DataFileError, read_examples

LINES = [
    ('{"a": "b\nc"}', "the line ends within a text (near column 9); write a line break in a text as \\n"),
    ('{"a": "b', "the line ends within a text (near column 7)"),
    ('{"a": "b",', "the line ends before its object does (column 11)"),
    ('{"a": tru', "the line ends before its object does (column 7)"),
    ('{\n  "a": "b"\n}', "the line ends before its object does (column 2); write one object per line"),
    ("{'a': 'b'}", "there is a single quote in column 2; JSON needs double quotes"),
    ("{\"a\": 'b'}", "there is a single quote in column 7"),
    ("{\u201ca\u201d: 1}", "there is a typographic quote in column 2"),
    ("{a: 1}", "the name that begins in column 2 has no quotes"),
    ("{,}", "a name in double quotes is expected in column 2, and there is ',}'"),
    ('{"a": None}', "None in column 7 is not JSON; write null"),
    ('{"a": +1}', "a value is expected in column 7, and there is '+1}'"),
    ('{"a": "b",}', "there is a comma before the closing bracket (near column 11); remove it"),
    ('{"a": ["b",]}', "there is a comma before the closing bracket (near column 12); remove it"),
    ('{"a": 1} {"a": 2}', "a second object begins in column 10"),
    ('{"a": 1},', "there is a comma after the object in column 9; remove it"),
    ('"a": 1', "there is text after the first value, ': 1' in column 4"),
    ('{"a" 1}', "a colon is missing before column 6"),
    ('{"a": "so "b" c"}', 'missing before column 12; write a " within a text as \\"'),
    ('{"a": "C:\\Users"}', "the backslash in column 10 begins no escape of JSON"),
    ('{"a": "C:\\users"}', "the backslash in column 10 begins no escape of JSON"),
    ('{"a": "b\\u00', "the line ends within a text (near column 9)"),
    ('{"a": "b\tc"}', "there is a tab within a text in column 9; write it as \\t"),
    ('{"a": "b\x01c"}', "there is a control character within a text in column 9; write it as \\u0001"),
    ("# a comment", "a comment begins in column 1, and JSON has none"),
    ("Hello", "an object is expected, and the line begins with 'Hello'"),
]
FILES = [
    ('[{"a": "b\nc"}]', 1, "there is a line break within a text in column 10; write it as \\n"),
    ('[{"a": 1},\n{"a": "b', 2, "the file ends within a text (near column 7)"),
    ('[{"a": 1},\n{"a": ', 2, "the file ends before its last object does (column 6)"),
    ('[{"a": 1}\n{"a": 2}]', 2, "a comma or ] is missing in column 1"),
    ('[{"a": 1}\n', 1, "a comma or ] is missing in column 10; complete the file if it was cut off"),
    ('[{"a": 1,\n}]', 2, "there is a comma before the closing bracket (near column 1); remove it"),
]


@pytest.mark.parametrize(("text", "line", "words"), [*((text, 1, words) for text, words in LINES), *FILES])
def test_broken_json(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = tmp_path / ("rows.json" if text.startswith("[") else "rows.jsonl")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataFileError) as error:
        list(read_examples(path))
    assert words in error.value.message and error.value.message.startswith("is not valid JSON: ")
    assert error.value.line == line
