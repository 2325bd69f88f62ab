"""Tells a chat or another service how a run is doing: a POST of JSON to the URL in FOOTPLATE_WEBHOOK when it has ended,
for each of its alerts, and when it makes no progress.

The URL often contains a secret, so it comes from the environment of the server or shell that starts a run, and neither
the run's folder nor its processes get it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from backend.runs import LOG, events, files, health, marks
from backend.runs.folder import Run

WEBHOOK = "FOOTPLATE_WEBHOOK"  # environment variable
SECONDS = 10.0
LOOK_SECONDS = 2.0  # between two checks for alerts


def watch(folder: Path, offset: int, ended: threading.Event) -> None:
    """Post the alerts after `offset` of the run in `folder`, and once that it makes no progress, until it `ended`."""
    if not os.environ.get(WEBHOOK):
        return
    stalled = False
    while not ended.wait(LOOK_SECONDS):
        found, offset = events.since(folder, offset)
        for event in found:
            if event["kind"] in health.KINDS:
                notify(folder, f"Step {event['step']}: {event['text']}")
        was, stalled = stalled, bool(Run(folder).summary().get("stalled"))
        if stalled and not was:
            notify(folder)


def problem() -> str:
    """What is wrong with the URL, as a sentence without the URL, which is a secret; '' if nothing is or none is set."""
    url = os.environ.get(WEBHOOK, "")
    fix = f"{WEBHOOK} is not a URL that notifications can be posted to"
    if not url:
        return ""
    if any(not "!" <= character <= "~" for character in url):
        return f"{fix}: it contains a space, a control character or a letter outside of ASCII."
    if not url.startswith(("http://", "https://")):
        return f"{fix}: it must begin with http:// or https://."
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port or 0) >= 0
    except ValueError:
        has_host = False
    return "" if has_host else f"{fix}: its host or port is malformed."


def notify(folder: Path, alert: str = "") -> None:
    """Post how the run in `folder` is doing, or an alert, if there is a URL. An error becomes a line in its log."""
    url = os.environ.get(WEBHOOK, "")
    if not url:
        return
    run = Run(folder)
    if run.about().get("kind"):  # a job of a run (jobs.py): its user follows it
        return
    summary = run.summary()
    found = marks.mark(run, summary["state"])
    text = f"Footplate: {summary['name']}. {alert or ' '.join(filter(None, (summary['sentence'], found.sentence)))}"
    # Slack and Mattermost show `text`, Discord shows `content`.
    content = {"text": text, "content": text, **{key: summary[key] for key in ("id", "name", "state", "step", "loss")}}
    content["mark"] = found.name
    if not (reason := problem()):
        headers = {"Content-Type": "application/json", "User-Agent": "footplate"}
        try:
            request = urllib.request.Request(url, json.dumps(content).encode(), headers)
            urllib.request.urlopen(request, timeout=SECONDS).close()
            return
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = _without_url(error)
    with contextlib.suppress(OSError), files.open_to_append(folder / LOG) as log:
        log.write(f"{WEBHOOK}: the notification was not sent: {reason.rstrip('.')}.\n".encode())


def _without_url(error: Exception) -> str:
    """What went wrong. Messages of malformed URLs and redirects quote the URL or a part of it."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code} {http.client.responses.get(error.code, '')}".rstrip()
    if isinstance(error, OSError):
        cause = getattr(error, "reason", error)
        return cause.strerror or type(cause).__name__ if isinstance(cause, OSError) else "the host cannot be reached"
    return f"the URL is malformed ({type(error).__name__})"
