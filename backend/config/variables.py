"""Names of environment variables in launch.env that need care: they hold a secret, or decide which code runs.

Imports nothing. Options are stored in the run folder, drafts and exported files, so a secret does not belong there: a
run inherits the environment of the server or shell that starts it.
"""

from __future__ import annotations

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
    """`text` with MASK in place of the values of the secrets in `env`."""
    for name in secrets(env):
        text = text.replace(shlex.quote(env[name]), MASK).replace(env[name], MASK)
    return text
