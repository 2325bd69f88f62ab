"""Secrets in environment variables, other options and texts: recognized by name and by value, masked and left out.

Options are stored in the run folder, drafts and exported files, so a secret does not belong there: a run inherits the
environment of the server or shell that starts it. Patterns are linear in the length of the text: log lines have any
length.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

MASK = "********"
SECRET_WORDS = {
    "TOKEN", "TOKENS", "KEY", "KEYS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS", "PWD", "PAT",
    "CREDENTIAL", "CREDENTIALS", "AUTH", "BEARER", "COOKIE", "WEBHOOK", "WEBHOOKS", "DSN", "JWT",
}  # fmt: skip
SECRET_ENDS = ("TOKEN", "SECRET", "PASSWORD", "APIKEY", "ACCESSKEY", "PRIVATEKEY")  # ends of words such as HFTOKEN
# Such a variable has the path of a file, or a setting about secrets, such as HF_TOKEN_PATH or SSH_KEY_FILE.
HARMLESS_ENDS = ("PATH", "FILE", "DIR", "HOME", "ID", "TYPE", "NAME", "SIZE", "LENGTH")
# Tokens of Hugging Face, GitHub, GitLab, OpenAI and others with the same prefix, AWS, Slack, Google, NVIDIA, Groq,
# Replicate, PyPI and npm; JSON web tokens; HTTP headers; private keys.
ACCESS_TOKENS = re.compile(
    r"\b(?:hf|gh[pousr]|npm|gsk|r8)_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bgl(?:pat|oas|dt|rt|cbt|ptt|ft|soat|imt|agent)-[\w-]{16,}"
    r"|\bsk-(?=[\w-]{0,64}?(?=[A-Za-z]{0,15}\d)[A-Za-z0-9]{16})[\w-]{16,}"  # not sk-en-2024.jsonl, a Slovak file
    r"|\bA[KS]IA[0-9A-Z]{16}\b|\bxox[a-z]-[\w-]{10,}|\bxapp-[\w-]{10,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{16,}"
    r"|\b(?:nvapi-|pypi-AgE)[\w-]{16,}|\bwandb_v\d_\w{16,}|(?<![\w-])eyJ[\w-]{8,4096}\.[\w-]{8,4096}\.[\w-]*"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w+/=]{8,}"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]{0,10000}(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
)
# What follows `before`, such as the password in postgres://user:password@host.
CREDENTIALS = re.compile(
    r"(?P<before>://[^\s:/@]{0,256}:)[^\s/@]{1,1024}(?=@)"  # in an address
    r"|(?P<user>://)(?=[^\s:/@]{0,256}\d)[^\s:/@]{20,256}(?=@)"  # a token in place of a user name
    r"|(?P<parameter>[?&](?i:[\w-]{0,40}(?:token|key|secret|password|credential|signature)|sig|auth)=)[^\s&#\"']{8,}"
    r"|(?P<host>\bhttps://(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
    r"|hooks\.zapier\.com/hooks|[\w-]{1,63}\.webhook\.office\.com|chat\.googleapis\.com/v1/spaces"
    r"|api\.telegram\.org|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot|oapi\.dingtalk\.com/robot"
    r"|qyapi\.weixin\.qq\.com/cgi-bin/webhook|maker\.ifttt\.com/trigger)/)[^\s\"']+"
    r"|(?P<tracker>(?i:wandb)[^\n]{0,40}?)\b[0-9a-f]{40}\b"  # W&B's keys have no special prefix
)
REFERENCE = re.compile(r"\$(\{\w+\}|\(.*|[A-Za-z_]\w*)")  # a reference of a shell to a value from elsewhere
ASSIGNMENTS = re.compile(
    r"(?P<before>(?P<name>\b[A-Z][A-Z0-9_]*|\b(?i:api_?key|password|passwd|secret|(?:access|auth|hf|hub|api)_token)|(?<=[?&])token)"
    r"[\"']?\s?[=:]\s?[\"']?)(?P<value>[^\s\"',;&]+)"
)


def secrets(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that seem to hold a secret."""
    return [name for name, value in env.items() if _is_secret(name, value)]


def _is_secret(name: str, value: str) -> bool:
    if value == MASK or REFERENCE.fullmatch(value):
        return False
    words = re.split(r"[_\W]+", name.upper())
    is_setting = re.fullmatch(r"(?i)\d*|true|false|yes|no|on|off|none", value)
    named = bool(SECRET_WORDS & set(words)) or any(word.endswith(SECRET_ENDS) for word in words)
    return (named and not is_setting and words[-1] not in HARMLESS_ENDS) or contains_secret(f"{name}={value}")


def contains_secret(text: str) -> bool:
    """Whether an access token, or credentials in an address, are in `text`."""
    return hide_values(text) != text


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables that seem to hold a secret, to store or export it."""
    hidden = secrets(env)
    return {name: value for name, value in env.items() if name not in hidden}


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with MASK for the values of secrets, to show it."""
    hidden = secrets(env)
    return {name: MASK if name in hidden else value for name, value in env.items()}


def hide_secrets(text: str, env: Mapping[str, str]) -> str:
    """`text` with MASK in place of the values of the secrets in `env`, also as they appear in shell and JSON, and of
    other access tokens and credentials in addresses."""
    return hide_values(hide_named(text, {name: env[name] for name in secrets(env)}))


def hide_named(text: str, env: Mapping[str, str]) -> str:
    """`text` with MASK in place of all values of `env`, all of which are secrets, also as they appear in shell and
    JSON."""
    for value in env.values():
        for form in (shlex.quote(value), json.dumps(value)[1:-1], value):
            text = text.replace(form, MASK)
    return text


def hide_values(text: str) -> str:
    """`text` with MASK in place of access tokens, and of credentials in addresses."""
    return CREDENTIALS.sub(_masked_credential, ACCESS_TOKENS.sub(MASK, text))


def hide_tokens(text: str) -> str:
    """Same as `hide_values`, but also masks the values in assignments to variables that seem to hold a secret, such as
    in a log or a shell command."""
    return ASSIGNMENTS.sub(_masked_assignment, hide_values(text))


def _masked_credential(match: re.Match[str]) -> str:
    return (match[match.lastgroup] if match.lastgroup else "") + MASK


def _masked_assignment(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    secret = _is_secret(name, value) if name.isupper() else not (value.isdigit() or REFERENCE.fullmatch(value))
    return match["before"] + MASK if secret else match[0]
