"""Download of a model's config.json from the Hugging Face Hub into its cache, when the user requests it or waits.

It runs huggingface_hub in a child process, which is stopped after a minute. The reason of a failure is kept, so that
every later check of the model says it; some minutes later, it is tried again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

TIMEOUT_SECONDS = 60
CODE = """
import sys
from huggingface_hub import hf_hub_download
hf_hub_download(sys.argv[1], "config.json", revision=sys.argv[2])
"""
# Exceptions and messages of huggingface_hub.errors -> reason. The first one that the traceback names is used.
REASONS = {
    "GatedRepoError": "the model is gated: request access on its page, then set a Hugging Face token of that account",
    "RepositoryNotFoundError": "the Hub has no model with this ID, or it is private: set a Hugging Face token of an "
    "account that can read it",
    "401 Unauthorized": "the Hub does not accept the Hugging Face token: it has expired or was revoked",
    "403 Forbidden": "the Hugging Face token has no permission to read this model",
    "RevisionNotFoundError": "the model has no such revision (branch, tag or commit)",
    "RemoteEntryNotFoundError": "the repository has no config.json, so it is not a transformers model",
    "HFValidationError": "the ID is not valid: it must be organization/name or name",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, so nothing is downloaded",
    "429 Too Many Requests": "the Hub refuses further requests for now (429 Too Many Requests)",
}
MAX_FAILURES = 64
RETRY_SECONDS = 300
REFUSALS = ("GatedRepoError", "RepositoryNotFoundError", "401 Unauthorized", "403 Forbidden")
_failures: dict[tuple[str, str], tuple[str, float]] = {}  # reason, time.monotonic()


def download_config(hub_id: str, revision: str) -> str:
    """Download config.json; returns '' or the reason for a failure, as the end of a sentence. Takes up to a minute."""
    reason = _download(hub_id, revision)
    _failures.pop((hub_id, revision), None)
    if reason:
        _failures[hub_id, revision] = reason, time.monotonic()
        for oldest in list(_failures)[:-MAX_FAILURES]:
            _failures.pop(oldest, None)
    return reason


def download_problem(hub_id: str, revision: str) -> str:
    """Why this process could not download it the last time, as the end of a sentence; '' for no failure."""
    return _failures.get((hub_id, revision), ("", 0.0))[0]


def has_just_failed(hub_id: str, revision: str) -> bool:
    """Whether this process has tried in vain in the last minutes."""
    reason, when = _failures.get((hub_id, revision), ("", 0.0))
    return bool(reason) and time.monotonic() - when < RETRY_SECONDS


def _download(hub_id: str, revision: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", CODE, hub_id, revision],
            capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the Hub did not answer within {TIMEOUT_SECONDS} seconds"
    if not done.returncode:
        return ""
    return next(
        (reason for name, reason in REASONS.items() if re.search(rf"\b{name}\b", done.stderr)),
        "the Hub cannot be reached",
    )


def is_refused(reason: str) -> bool:
    """Whether another Hugging Face token could help."""
    return reason in {REASONS[name] for name in REFUSALS}
