"""Endpoints for the menus that say what the columns of data files are used for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backend.config.options import for_dataset
from backend.config.sources import key_of
from backend.inspect.columns import describe_columns, use_column, uses_of
from backend.rules import Fix
from webui.api.checking import parse_form
from webui.api.fixes import fix_json
from webui.api.requests import ApiError, DatasetRequest


class UseRequest(DatasetRequest):
    """`use` of the column, '' for none: see `backend.inspect.columns`."""

    column: str
    use: str


def show(body: DatasetRequest) -> dict[str, Any]:
    """The columns of the form's data files: see `describe_columns`."""
    spec, _ = parse_form(body.values)
    return describe_columns(for_dataset(spec, body.dataset_of(spec)), Path.cwd())


def use(body: UseRequest) -> dict[str, Any]:
    """The changes to the form that give the column this use."""
    spec, _ = parse_form(body.values)
    index = body.dataset_of(spec)
    found = use_column(for_dataset(spec, index), Path.cwd(), body.column, body.use)
    patch = {key_of(index, name.removeprefix("data.")): value for name, value in found.items()}
    if not patch:
        raise ApiError(
            422, f"The column {body.column} cannot be used: the data files have changed. Open Columns again."
        )
    return fix_json(Fix(f"Column {body.column}: {uses_of(spec).get(body.use, 'Not used')}", patch, safe=False), spec)
