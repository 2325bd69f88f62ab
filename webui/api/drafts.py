"""Endpoints for drafts: the form's values as they were typed, saved, loaded, and listed with their earlier versions.

A check of the form saves its draft, too (checking.py).
"""

from __future__ import annotations

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


def save_draft(state: State, id: str, body: DraftRequest) -> None:
    """Save a draft without a check: the edits that were made right before the page was left."""
    state.drafts.save(id, without_secrets(body.values), body.page, body.edit)


def load_draft(state: State, id: str) -> dict[str, Any]:
    """A draft's values as they were typed. Options added to Footplate since then keep their default."""
    values = state.drafts.load(id)
    if values is None:
        raise ApiError(404, f"The draft {id} does not exist; it may have been deleted.")
    return {"values": _known(values)}


def list_versions(state: State) -> list[dict[str, Any]]:
    """The values that the form had in the last hour, in any tab: `edited` is the Unix time of their last edit."""
    return [{"edited": edited, "values": _known(values)} for edited, values in state.drafts.versions()]


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The form's values without secrets, which are neither stored nor exported: lines of launch.env with secrets are
    left out, and secrets in other texts are masked."""
    lines = values.get(ENV)
    values = {name: variables.hide_values(v) if isinstance(v, str) else v for name, v in values.items()}
    if not isinstance(lines, str):
        return values
    named = [(line, *line.partition("=")) for line in lines.splitlines()]
    kept = [line for line, name, _, value in named if not variables.secrets({name.strip(): value.strip()})]
    return {**values, ENV: "\n".join(kept)}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in by_name()}
