"""The config.json of a model on the Hugging Face Hub, fetched into the library's cache when a person asks for it.

Floor 2. Imports nothing of ours. The library runs in a process of its own: it takes a second to import, and a minute
to give up.
"""

from __future__ import annotations

import re
import subprocess
import sys

SECONDS = 60
CODE = """
import sys
from huggingface_hub import hf_hub_download
hf_hub_download(sys.argv[1], "config.json", revision=sys.argv[2])
"""
# What the library's exceptions mean, in their order.
SENTENCES = {
    "GatedRepoError": "it is open only to those who were let in: ask for access on its page, then run hf auth login",
    "RepositoryNotFoundError": "the hub has no such model, or it is private: then run hf auth login",
    "RevisionNotFoundError": "the model has no such revision",
    "EntryNotFoundError": "it has no config.json: it is no model of transformers",
    "HFValidationError": "an id is organisation/name",
}


def fetch(hub_id: str, revision: str) -> str:
    """Fetch the config.json; '' or, as the end of a sentence, why it could not be had. Takes up to a minute."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", CODE, hub_id, revision], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "the hub does not answer"
    if not ended.returncode:
        return ""
    return next(
        (said for name, said in SENTENCES.items() if re.search(rf"\b{name}\b", ended.stderr)),
        "the hub cannot be reached",
    )
