"""Endpoints for drafts: the form's values as they were typed, saved, loaded, and listed with their earlier versions.

A check of the form saves its draft, too (checking.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from backend.config import variables
from backend.config.options import by_name
from webui.api.fixes import ENV
from webui.api.requests import ApiError, RequestBody, State


class DraftRequest(RequestBody):
    """The form's values after the edit number `edit` of `page`, a load of the page."""

    values: dict[str, Any]
    page: str = ""
    edit: int = 0


LEFT_OUT = "left_out"  # in a draft: what was not stored


def save_draft(state: State, id: str, body: DraftRequest) -> None:
    """Save a draft without a check: the edits that were made right before the page was left."""
    state.drafts.save(id, stored(body.values), body.page, body.edit)


def load_draft(state: State, id: str) -> dict[str, Any]:
    """A draft's values as they were typed, and the names of the variables that were not stored. Options added to
    Footplate since then keep their default."""
    values = state.drafts.load(id)
    if values is None:
        raise ApiError(404, f"The draft {id} does not exist; it may have been deleted.")
    return _restored(values)


def list_versions(state: State) -> list[dict[str, Any]]:
    """The values that the form had in the last hour, in any tab, as `load_draft` returns them: `edited` is the Unix
    time of their last edit."""
    return [{"edited": edited, **_restored(values)} for edited, values in state.drafts.versions()]


def stored(values: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values as a draft keeps them."""
    names = secret_names(values)
    return {**without_secrets(values), **({LEFT_OUT: names} if names else {})}


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values without secrets, which are neither stored nor exported: lines of launch.env with secrets are
    left out, and secrets in other texts are masked."""
    lines = values.get(ENV)
    values = {name: variables.hide_values(v) if isinstance(v, str) else v for name, v in values.items()}
    if not isinstance(lines, str):
        return values
    return {**values, ENV: "\n".join(line for line in lines.splitlines() if not _names_of_secrets(line))}


def secret_names(values: Mapping[str, Any]) -> list[str]:
    """The variables in the form's launch.env that seem to hold secrets. What may be a part of one in place of
    a name, such as in a line with nothing but a token, is masked."""
    lines = values.get(ENV)
    found = [name for line in str(lines or "").splitlines() for name in _names_of_secrets(line)]
    return [variables.hide_values(name) if re.fullmatch(r"[\w .-]+", name) else variables.MASK for name in found]


def _names_of_secrets(line: str) -> list[str]:
    name, _, value = line.partition("=")
    return variables.secrets({name.strip(): value.strip()})


def _restored(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"values": _known(values), LEFT_OUT: values.get(LEFT_OUT, [])}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in by_name()}
