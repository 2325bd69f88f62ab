"""The date that chat templates write, as those of Llama 3.2 and gpt-oss do: the day on which the run was created.

With the date of today, a run that is resumed on another day would train on other texts, and would not know the outputs
from before training, which it keeps by their prompts.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

from transformers.utils import chat_template_utils

from backend.runs import PLAN


def fix(folder: Path) -> None:
    """Let templates have the date of the run in `folder`, if it is known, in this process and in those that it
    forks."""
    with suppress(OSError, ValueError, AttributeError, TypeError, OverflowError):
        created = datetime.fromtimestamp(json.loads((folder / PLAN).read_text(encoding="utf-8")).get("created"))
        chat_template_utils.datetime = SimpleNamespace(now=lambda: created)


def today() -> str:
    """The date that templates write now."""
    return f"{chat_template_utils.datetime.now():%Y-%m-%d}"
