"""Endpoints for publishing a run's model: what would leave the machine, start and stop."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from starlette.responses import Response

from backend.publish import publication
from backend.publish.contents import Request
from webui.api.requests import RequestBody, json
from webui.api.runs import PathRun


class PublishRequest(RequestBody):
    """See backend.publish.contents.Request. `shown`: name -> version of the files that the user has confirmed."""

    step: int | None = None
    merge: str = Field("", max_length=200)
    exports: list[str] = Field(default_factory=list, max_length=20)
    repository: str = Field("", max_length=200)
    folder: str = Field("", max_length=4000)
    public: bool = False
    license: str = Field("", max_length=100)
    base_model: str = Field("", max_length=200)
    shown: dict[str, str] = Field(default_factory=dict)

    def request(self) -> Request:
        """The request, without spaces around pasted texts."""
        values: dict[str, Any] = self.model_dump(exclude={"shown"})
        values |= {name: value.strip() for name, value in values.items() if isinstance(value, str)}
        return Request(**values)


def summarize(run: PathRun, body: PublishRequest) -> dict[str, Any]:
    """What would be published, and what the destination contains. Queries the Hub, which takes a second."""
    return publication.summary(run, body.request()).as_json()


def start(run: PathRun, body: PublishRequest) -> Response:
    """Start publishing what was shown."""
    return json(publication.as_json(publication.start(run, body.request(), body.shown)), 201)
