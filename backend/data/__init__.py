"""Data formats: reading files, detecting the format of an example, validating it, converting it.

Imports config, paths. Training and inspection use the same code, so both report the same problems. reading: files;
chat: conversations; formats: one completion per example; preferences: chosen and rejected, or labeled completions.
"""

from __future__ import annotations

from backend.data.chat import Example, InvalidExample, printable
from backend.data.formats import (
    DEFAULTS,
    convert,
    detect_format,
    detection_problem,
    example_problem,
    required_columns,
    to_text,
)
from backend.data.preferences import PREFERENCES, label_problem, unpair
from backend.data.reading import SUFFIXES, DataFileError, expand, file_patterns, read_examples

__all__ = [
    "DEFAULTS",
    "PREFERENCES",
    "SUFFIXES",
    "DataFileError",
    "Example",
    "InvalidExample",
    "convert",
    "detect_format",
    "detection_problem",
    "example_problem",
    "expand",
    "file_patterns",
    "label_problem",
    "printable",
    "read_examples",
    "required_columns",
    "to_text",
    "unpair",
]  # fmt: skip
