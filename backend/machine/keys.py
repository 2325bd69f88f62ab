"""The keys of a machine description: what each sets in Machine or Gpu, its label, unit and limits.

The reader of descriptions, `footplate machine` and the form of the page all follow these tables: a key that is added
here needs nothing else.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from backend import registry
from backend.config.options import Problem
from backend.machine.types import GIB

GIGA = 10**9
MAX_TEXT = 200
MAX_GPUS = 64  # of one node
MIN_GIB, MAX_GPU_GIB = 0.001, 10_000
YES_OR_NO = (("true", "Yes"), ("false", "No"))


@dataclass(frozen=True)
class Key:
    """One key. `kind` is text, integer, gib, rate, price, bool, choice, capability, version, versions or gpus; limits
    are inclusive.

    `field` is what it sets in Machine or Gpu, '' if the reader derives that. `absent` says what holds without the key,
    and `default` is its value then.
    """

    name: str
    kind: str
    label: str
    absent: str
    field: str = ""
    default: Any = None
    help: str = ""
    minimum: float = 0
    maximum: float = 0
    choices: tuple[tuple[str, str], ...] = ()
    hardware: bool = True

    @property
    def unit(self) -> str:
        """The unit of a number."""
        return {"gib": "GiB", "rate": "GB/s"}.get(self.kind, "")


GPU_KEYS = (
    Key("name", "text", "GPU model", "Unknown", "name", "GPU", "Product name, such as H200 or RTX 4090."),
    Key("count", "integer", "Number of GPUs per node", "Default: 1", default=1, minimum=1, maximum=MAX_GPUS),
    Key("memory_gib", "gib", "Memory per GPU", "From the GPU model", "total_bytes",
        minimum=MIN_GIB, maximum=MAX_GPU_GIB),
    Key("free_gib", "gib", "Free memory per GPU", "All of it", "free_bytes", maximum=MAX_GPU_GIB,
        help="Less than the memory if the driver or other programs use some."),
    Key("capability", "capability", "CUDA compute capability", "From the GPU model", "capability",
        help="NVIDIA only: 8.0 for A100, 9.0 for H100. It determines whether bf16, fp8 and some kernels work."),
)  # fmt: skip
KEYS = (
    Key("name", "text", "Name", "Shown in the list of machines", "name", "described machine"),
    Key("nodes", "integer", "Nodes", "Default: 1", "nodes", 1, "All nodes are alike.", minimum=1, maximum=128),
    Key("gpus", "gpus", "GPUs of each node", "None", "gpus", ()),
    Key("nvlink", "bool", "NVLink connects all GPUs", "Unknown", choices=YES_OR_NO),
    Key("device", "choice", "Device type", "Default: CUDA with GPUs, else CPU", "device",
        choices=tuple((name, row.label) for name, row in registry.DEVICES.items())),
    Key("ram_gib", "gib", "Host RAM per node", "Default: 64", "ram_bytes", 64, minimum=MIN_GIB, maximum=1e6,
        help="The checks assume 64 GiB if it is empty."),
    Key("cores", "integer", "CPU cores per node", "Default: 16", "cores", 16, minimum=1, maximum=10_000),
    Key("disk_gib", "gib", "Free disk space", "Default: 1024", "disk_free_bytes", 1024, maximum=1e9,
        help="On the file system that stores the runs."),
    Key("shm_gib", "gib", "Free shared memory", "Unknown", "shm_free_bytes", maximum=1e6,
        help="/dev/shm; containers often have 64 MiB, which is 0.0625."),
    Key("cpu_bf16", "bool", "CPU multiplies bf16 in hardware", "Default: no", "cpu_bf16", False, "AMX or AVX512-BF16.",
        choices=YES_OR_NO),
    Key("gpu_link_gb_per_s", "rate", "Bandwidth between GPUs of a node", "From the GPU model", "gpu_link_rate",
        help="Measured bandwidth from one GPU to the others of its node: the busbw that all_gather_perf of "
             "nccl-tests reports."),
    Key("network_gb_per_s", "rate", "Network bandwidth per node", "From the GPU model", "network_rate",
        help="Measured bandwidth from one node to another, all network adapters together: usually about 60% of their "
             "nominal bandwidth. In gigabytes: 400 Gbit/s are 50 GB/s."),
    Key("disk_gb_per_s", "rate", "Disk bandwidth", "Unknown: 1 GB/s is assumed", "disk_rate",
        help="Read and write bandwidth of the file system that stores models and runs."),
    Key("price_per_gpu_hour", "price", "Price per GPU hour", "Unknown: no price is predicted", "price_per_gpu_hour",
        help="In any currency; prices of runs are in the same one."),
    Key("python", "text", "Python interpreter", "Default: python", "python", "python", hardware=False,
        help="The path of the interpreter in commands and scripts."),
    Key("driver_version", "version", "NVIDIA driver version", "Unknown", "driver_version", "", hardware=False),
    Key("has_cpp_compiler", "bool", "C++ compiler is installed", "Default: yes", "has_cpp_compiler", True,
        "With Python's headers, for extensions that are compiled on first use.", choices=YES_OR_NO, hardware=False),
    Key("triton_can_compile", "bool", "Triton can compile kernels", "Default: yes", "triton_can_compile", True,
        "It needs a C compiler.", choices=YES_OR_NO, hardware=False),
    Key("has_libaio", "bool", "libaio is installed", "Default: yes", "has_libaio", True, hardware=False,
        help="With its headers, for DeepSpeed's offload to NVMe.", choices=YES_OR_NO),
    Key("unsloth_unmet_requirements", "text", "Unmet requirements of Unsloth", "None", "unsloth_unmet_requirements", "",
        "As pip check names them, such as transformers <=5.17.0.", hardware=False),
    Key("versions", "versions", "Installed packages", "Unknown: versions are not checked", "versions", {},
        "One per line, as pip freeze prints them: torch==2.13.0.", hardware=False),
)  # fmt: skip


class InvalidValue(ValueError):
    """A value that a key cannot have; the message completes "KEY: "."""


def read_keys(values: Any, keys: Sequence[Key], place: str = "") -> tuple[dict[str, Any], list[Problem]]:
    """The value of each key, in the unit of descriptions, and every problem. `place` is the prefix of the keys' names.

    Text is accepted for every kind, because a form has nothing else; an empty text is an absent key.
    """
    names = [key.name for key in keys]
    if not isinstance(values, Mapping):
        message = f"expected a mapping with the keys {', '.join(names)}, but found {values!r:.80}"
        return {}, [Problem(place.rstrip("."), message)]
    problems = [Problem(f"{place}{name}", _unknown(str(name), names)) for name in values if name not in names]
    found = {}
    for key in keys:
        given = values.get(key.name)
        found[key.name] = key.default
        if given is None or given == "":
            continue
        try:
            found[key.name] = given if key.kind == "gpus" else READERS[key.kind](key, given)
        except InvalidValue as error:
            problems.append(Problem(f"{place}{key.name}", str(error)))
    return found, problems


def as_text(key: Key, value: Any) -> str:
    """A value in the unit of descriptions as the form shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if key.kind == "versions":
        return "\n".join(f"{name}=={version}" for name, version in value.items())
    return str(value)


def _unknown(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known keys are {', '.join(names)}."
    return f"unknown key; {hint} If a newer version of Footplate wrote it, remove it or update Footplate here"


def _text(key: Key, value: Any) -> str:
    text = str(value).strip()
    if isinstance(value, list | dict) or len(text) > MAX_TEXT or not text.isprintable():
        raise InvalidValue(f"must be one line of at most {MAX_TEXT} printable characters, but is {text!r:.80}")
    return text


def _number(value: Any) -> Any:
    """The number that a text has; other values as they are."""
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value


def _integer(key: Key, value: Any) -> int:
    number = _number(value)
    if isinstance(number, bool) or not isinstance(number, int) or not key.minimum <= number <= key.maximum:
        raise InvalidValue(f"must be an integer from {key.minimum:g} to {key.maximum:,.0f}, but is {value!r:.80}")
    return number


def _gib(key: Key, value: Any) -> float:
    number = _number(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool) and not math.isnan(number)
    if not is_number or not key.minimum <= number <= key.maximum:
        above = "greater than 0" if key.minimum else "of at least 0"
        raise InvalidValue(f"must be a number of GiB {above} and at most {key.maximum:,.0f}, but is {value!r:.80}")
    return _short(number)


def _rate(key: Key, value: Any) -> float:
    return _positive(value, "a number of GB/s", 100_000)


def _price(key: Key, value: Any) -> float:
    return _positive(value, "a price", 1_000_000)


def _positive(value: Any, what: str, maximum: int) -> float:
    number = _number(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 < number <= maximum:
        raise InvalidValue(f"must be {what} greater than 0 and at most {maximum:,}, but is {value!r:.80}")
    return _short(number)


def _short(number: float) -> float:
    return int(number) if number == int(number) else number


def _bool(key: Key, value: Any) -> bool:
    found = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise InvalidValue(f"must be true or false, but is {value!r:.80}")
    return found


def _choice(key: Key, value: Any) -> str:
    names = [name for name, _ in key.choices]
    if value not in names:
        raise InvalidValue(f"must be one of {', '.join(names)}, but is {value!r:.80}")
    return str(value)


def _capability(key: Key, value: Any) -> str:
    if not re.fullmatch(r"\d{1,2}\.\d", str(value)):
        raise InvalidValue(f"must be a version such as 9.0 or 8.6, but is {value!r:.80}")
    return str(value)


def _versions(key: Key, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        lines = [line.strip() for line in value.splitlines() if line.strip()]
        invalid = next((line for line in lines if not re.fullmatch(r"[\w.-]+ *== *\S+", line)), None)
        if invalid is not None:
            raise InvalidValue(f"each line must be like torch==2.13.0, but one is {invalid!r:.80}")
        value = {name.strip(): version.strip() for name, _, version in (line.partition("==") for line in lines)}
    if not isinstance(value, dict):
        raise InvalidValue("must be a mapping of package names to versions")
    return {str(name): _version(key, version, f"the version of {name!s:.80} ") for name, version in value.items()}


def _version(key: Key, value: Any, what: str = "") -> str:
    try:
        Version(str(value))
    except InvalidVersion:
        raise InvalidValue(f"{what}must be like 2.13.0, but is {value!r:.80}") from None
    return str(value)


READERS = {
    "text": _text,
    "integer": _integer,
    "gib": _gib,
    "rate": _rate,
    "price": _price,
    "bool": _bool,
    "choice": _choice,
    "capability": _capability,
    "version": _version,
    "versions": _versions,
}


def to_field(key: Key, value: Any) -> Any:
    """The value of a key in the form that its field in Machine or Gpu has."""
    if value is None:
        return None
    if key.kind == "gib":
        return int(value * GIB)
    if key.kind == "rate":
        return max(1, round(value * GIGA))
    if key.kind == "capability":
        major, _, minor = value.partition(".")
        return int(major), int(minor)
    return value


def from_field(key: Key, value: Any) -> Any:
    """The inverse of `to_field`. Bytes are rounded down to 0.0001 GiB."""
    if value is None:
        return None
    if key.kind == "gib":
        return _short(math.floor(value / GIB * 10_000) / 10_000)
    if key.kind == "rate":
        return _short(value / GIGA)
    if key.kind == "capability":
        return f"{value[0]}.{value[1]}" if value != (0, 0) else None
    return dict(value) if key.kind == "versions" else value
