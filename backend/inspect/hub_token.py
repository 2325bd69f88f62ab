"""The Hugging Face token of this user: which one is used, a test of it, and storing it as `hf auth login` does.

A token is passed on to a child process, and is in no result and no message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_SECONDS = 60
PROCESS = Path(__file__).with_name("hub_token_process.py")
SUBJECTS = {"given": "This token", "variable": "The token in {variable}", "file": "The stored token"}
MESSAGES: Mapping[str, str] = {
    "ok": "{subject} is valid: it belongs to the account {account}.",
    "ok_model": "{subject} is valid: it belongs to the account {account}, which has access to {model}.",
    "bad_token": "{subject} is not accepted by the Hub: it is mistyped, has expired or was revoked. Create a token "
    "with read access at {endpoint}/settings/tokens.",
    "no_access": "{subject} is valid, but its account {account} has no access to {model}. Request access on the "
    "model's page, {endpoint}/{model}. A fine-grained token must also be allowed to read public gated repositories.",
    "not_found": "{subject} is valid, but the Hub has no model {model}, or it is private and the account {account} "
    "cannot read it.",
    "no_network": "{endpoint} cannot be reached, so it is not known whether the token is valid: {reason}.",
    "timeout": "The Hub did not answer within {seconds} seconds, so it is not known whether the token is valid.",
    "offline": "The Hub cannot be asked, because HF_HUB_OFFLINE is set in the environment of Footplate.",
    "status": "{endpoint} answered with status {reason}, so it is not known whether the token is valid. "
    "Try again later.",
    "not_the_hub": "{endpoint} did not answer as the Hugging Face Hub does ({reason}). Check HF_ENDPOINT and the "
    "proxy.",
    "invalid_id": "{subject} is valid: it belongs to the account {account}. The model ID {model} is not valid: it must "
    "be organization/name or name.",
    "organization": "This is an organization token. Create a user token at {endpoint}/settings/tokens.",
    "no_token": "There is no token. Create one with read access at {endpoint}/settings/tokens, and enter it.",
    "not_written": "The token cannot be written: {reason}.",
    "malformed": "A token consists of letters, digits and symbols, without spaces. Check what you pasted.",
    "failed": "huggingface_hub failed with {reason}. Run hf auth login in a terminal instead.",
}


@dataclass(frozen=True)
class TokenAnswer:
    """The outcome, a key of MESSAGES, with its message; and whether the token was stored."""

    outcome: str
    message: str
    account: str = ""
    stored: bool = False


def token_state() -> dict[str, str]:
    """Where the token comes from that runs use: `source` is environment, file or ''; `variable` and `path` name it.
    `problem` is a sentence if that is unknown."""
    known = {"outcome": "", "reason": "", "variable": "", "path": "", "token_file": ""} | _ask("state", "", "")
    source = "environment" if known["variable"] else "file" if known["token_file"] else ""
    problem = MESSAGES[known["outcome"]].format(**known, seconds=TIMEOUT_SECONDS) if known["outcome"] else ""
    return {"source": source, "variable": known["variable"], "path": known["path"], "problem": problem}


def check_token(token: str, model: str) -> TokenAnswer:
    """Ask the Hub whether it accepts `token` ('': the one that runs use), and whether its account has access to
    `model`, unless that is ''. Takes up to a minute."""
    return _answer("test", token, model)


def store_token(token: str, model: str) -> TokenAnswer:
    """Store a token that the Hub accepts, in the files of `hf auth login`, and check it. Takes up to a minute."""
    if not token:
        return TokenAnswer("no_token", "There is no token to store: enter one.")
    return _answer("store", token, model)


def _answer(action: str, token: str, model: str) -> TokenAnswer:
    token = token.strip()
    if not (token.isascii() and token.isprintable() and " " not in token):
        return TokenAnswer("malformed", MESSAGES["malformed"])
    known = _ask(action, token, model)
    outcome = known["outcome"]
    subject = SUBJECTS["given" if token else "variable" if known.get("variable") else "file"].format_map(known)
    text = MESSAGES["ok_model" if outcome == "ok" and model else outcome]
    values = {"account": "", "endpoint": "", "reason": "", **known, "subject": subject, "model": model}
    message = text.format(**values, seconds=TIMEOUT_SECONDS)
    return TokenAnswer(outcome, message, known.get("account", ""), bool(known.get("stored")))


def _ask(action: str, token: str, model: str) -> dict[str, str]:
    """The child's answer. -P: the folder of its file is not searched for the modules that it imports."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(PROCESS), action, model],
            input=token, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"outcome": "timeout"}
    if done.returncode:
        # The last line names the exception; its text could quote a header with the token.
        name = (done.stderr.strip().splitlines() or ["no message"])[-1].partition(":")[0]
        return {"outcome": "failed", "reason": name}
    answer: dict[str, str] = json.loads(done.stdout)
    return answer
