"""Endpoints for the Hugging Face token: which one runs use, a test, and storing one.

The token is a password: no response and no message repeats it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import Field

from backend.inspect import check_token, store_token, token_state
from webui.api.requests import ApiError, RequestBody


class TokenRequest(RequestBody):
    """A token, '' for the one that runs use; and the Hub ID of the model that it is needed for, or ''."""

    token: str = Field("", max_length=1000, repr=False)
    model: str = Field("", max_length=200)


def state() -> dict[str, str]:
    """The source of the token that runs use."""
    return token_state()


def test(body: TokenRequest) -> dict[str, Any]:
    """Ask the Hub about a token. Every answer counts as a result, even if the Hub rejects the token."""
    return asdict(check_token(body.token, body.model.strip()))


def store(body: TokenRequest) -> dict[str, Any]:
    """Store a token that the Hub accepts."""
    answer = store_token(body.token, body.model.strip())
    if not answer.stored:
        raise ApiError(422, f"Not stored: {answer.message}", outcome=answer.outcome)
    return asdict(answer)
