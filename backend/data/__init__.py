"""The data formats: how a row is read, recognised, checked, and turned into a conversation, a text or a preference.

Floor 1. Imports spec. Used by the training and by the glance before it: both say the same about a row. reading (files),
turns (what every format is made of), formats (rows with one answer), preferences (rows that compare answers).
"""

from __future__ import annotations

from backend.data.chat import Row, Unfit
from backend.data.formats import DEFAULTS, columns, convert, plain, problem, recognise
from backend.data.preferences import PREFERENCES, unpaired
from backend.data.reading import SUFFIXES, RowError, expand, read_rows

__all__ = [
    "DEFAULTS", "PREFERENCES", "SUFFIXES", "Row", "RowError", "Unfit",
    "columns", "convert", "expand", "plain", "problem", "read_rows", "recognise", "unpaired",
]  # fmt: skip
