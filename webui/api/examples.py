"""Endpoint of the examples as the model sees them, one at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from backend.inspect import show_examples
from webui.api.checking import parse_form
from webui.api.requests import FormRequest


class ExampleRequest(FormRequest):
    """`position`: of the example, 0 for the first."""

    position: Annotated[int, Field(ge=0, le=10**9)] = 0


def show(body: ExampleRequest) -> dict[str, Any]:
    """The example, or None after the last one; "problem" says why it cannot be shown. "pending" while the worker
    renders it: the page asks again."""
    spec, _ = parse_form(body.values)
    found = show_examples(spec, Path.cwd(), os.environ, body.position, 1, 0)
    if found is None or isinstance(found, str):
        return {"example": None, "problem": found or "", "pending": found is None}
    return {"example": next(iter(found["examples"]), None), "problem": found["problem"], "pending": False}
