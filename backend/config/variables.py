"""Names of environment variables in launch.env that need care: they hold a secret, or decide which code runs.

Imports nothing. Options are stored in the run folder, drafts and exported files, so a secret does not belong there: a
run inherits the environment of the server or shell that starts it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping

MASK = "********"
SECRET_WORDS = {
    "TOKEN", "KEY", "APIKEY", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "CREDENTIAL",
    "CREDENTIALS", "AUTH", "COOKIE",
}  # fmt: skip
# The variable names a file or a setting about secrets, such as HF_TOKEN_PATH or SSH_KEY_FILE.
HARMLESS_ENDS = ("PATH", "FILE", "DIR", "HOME", "ID", "TYPE", "NAME", "SIZE", "LENGTH")
# Read by the dynamic linker, Python, shells, compilers, CUDA, NCCL, torch and huggingface_hub when they load code.
CODE_VARIABLES = {
    "PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONBREAKPOINT", "PYTHONINSPECT",
    "BASH_ENV", "ENV", "PROMPT_COMMAND", "GCONV_PATH", "CC", "CXX", "NVCC", "CUDA_HOME", "CUDA_INJECTION64_PATH",
    "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR", "HF_MODULES_CACHE", "HF_ENDPOINT",
}  # fmt: skip
CODE_PREFIXES = ("LD_", "DYLD_", "BASH_FUNC")
# Tokens of Hugging Face, GitHub, OpenAI and others with the same prefix, AWS and Slack; JSON web tokens; HTTP headers.
ACCESS_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bsk-[\w-]{16,}|\bA[KS]IA[0-9A-Z]{16}\b"
    r"|\bxox[a-z]-[\w-]{10,}|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w+/=]{8,}"
)
PASSWORDS_IN_ADDRESSES = re.compile(r"(?P<before>\b[a-z][\w+.-]*://[^\s:/@]*:)[^\s/@]+@")
ASSIGNMENTS = re.compile(
    r"(?P<before>(?P<name>\b[A-Z][A-Z0-9_]*|\b(?i:api_?key|password|passwd|secret|(?:access|auth|hf)_token)|(?<=[?&])token)"
    r"[\"']?\s?[=:]\s?[\"']?)(?P<value>[^\s\"',;&]+)"
)


def secrets(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that seem to hold a secret."""
    return [name for name, value in env.items() if _is_secret(name, value)]


def _is_secret(name: str, value: str) -> bool:
    words = re.split(r"[_\W]+", name.upper())
    is_setting = re.fullmatch(r"(?i)\d*|true|false|yes|no|on|off|none", value) or value == MASK
    return not is_setting and words[-1] not in HARMLESS_ENDS and bool(SECRET_WORDS & set(words))


def choosing_code(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that decide which libraries, modules or programs are loaded."""
    return [name for name in env if name in CODE_VARIABLES or name.startswith(CODE_PREFIXES)]


def without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the variables that seem to hold a secret, to store or export it."""
    hidden = secrets(env)
    return {name: value for name, value in env.items() if name not in hidden}


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with MASK for the values of secrets, to show it."""
    hidden = secrets(env)
    return {name: MASK if name in hidden else value for name, value in env.items()}


def hide_secrets(text: str, env: Mapping[str, str]) -> str:
    """`text` with MASK in place of the values of the secrets in `env`, also as they appear in shell and JSON."""
    for name in secrets(env):
        for form in (shlex.quote(env[name]), json.dumps(env[name])[1:-1], env[name]):
            text = text.replace(form, MASK)
    return text


def hide_tokens(text: str) -> str:
    """`text` with MASK in place of what looks like a secret: access tokens, passwords in addresses, and assignments to
    variables that seem to hold a secret."""
    text = ACCESS_TOKENS.sub(MASK, text)
    text = PASSWORDS_IN_ADDRESSES.sub(rf"\g<before>{MASK}@", text)
    return ASSIGNMENTS.sub(_masked_assignment, text)


def _masked_assignment(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    secret = _is_secret(name, value) if name.isupper() else not value.isdigit()
    return match["before"] + MASK if secret else match[0]
