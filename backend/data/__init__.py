"""Data formats: reading files, detecting the format of an example, validating it, converting it.

Training and inspection use the same code, so both report the same problems. reading: files; compression: compressed
files; chat: conversations; formats: one completion per example; preferences: chosen and rejected, or labeled
completions; columns: what each column is used for; selection: the validation split, data.max_samples and the mixture of
datasets; copies: equal examples and contradictions; prepared: the cache of tokenized datasets.
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
from backend.data.reading import (
    SUFFIXES,
    DataFileError,
    documents_left_out,
    expand,
    file_of,
    file_patterns,
    is_document,
    place,
    read_examples,
    without_padding,
)
from backend.data.selection import (
    FIRST_VALIDATION,
    is_absurd,
    is_held_out,
    mixed,
    mixed_counts,
    sample,
    split,
    validation_size,
)
