"""Tells a chat or another service that a run has ended: a POST of JSON to the URL in FOOTPLATE_WEBHOOK.

Imports runs, folder. The URL often contains a secret, so it comes from the environment of the server or shell that
starts a run, and neither the run's folder nor its processes get it.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

from backend.runs import LOG
from backend.runs.folder import Run

WEBHOOK = "FOOTPLATE_WEBHOOK"  # environment variable
SECONDS = 10.0


def notify(folder: Path) -> None:
    """Post how the run in `folder` ended, if there is a URL. An error becomes a line in the run's log."""
    url = os.environ.get(WEBHOOK, "")
    if not url:
        return
    summary = Run(folder).summary()
    text = f"Footplate: {summary['name']}. {summary['sentence']}"
    # Slack and Mattermost show `text`, Discord shows `content`.
    content = {"text": text, "content": text, **{key: summary[key] for key in ("id", "name", "state", "step", "loss")}}
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("the URL must begin with http:// or https://")
        headers = {"Content-Type": "application/json", "User-Agent": "footplate"}
        request = urllib.request.Request(url, json.dumps(content).encode(), headers)
        urllib.request.urlopen(request, timeout=SECONDS).close()
    except (OSError, ValueError) as error:
        reason = str(error).replace(url, "the URL")
        try:
            with (folder / LOG).open("a", encoding="utf-8") as log:
                log.write(f"{WEBHOOK}: the notification was not sent: {reason}.\n")
        except OSError:
            return
