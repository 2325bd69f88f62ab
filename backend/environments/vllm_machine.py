"""What the packages of the environment vllm need from a machine."""

from __future__ import annotations

import platform
import sys

from packaging.version import InvalidVersion, Version

from backend.machine import Gpu, Machine

GLIBC = "2.31"  # required by llguidance's wheels
DRIVER = "580"  # for CUDA 13, which the wheels of torch 2.14 and vllm 0.33 contain
CAPABILITY = (7, 5)  # vllm 0.33 docs/getting_started/installation/gpu.cuda.inc.md


def unmet(machine: Machine) -> str:
    """What this machine lacks and how to fix it, as a sentence; '' for nothing."""
    system, cpu = platform.system(), platform.machine()
    if (system, cpu) != ("Linux", "x86_64"):
        return f"vLLM's packages are locked for Linux on x86-64; this machine has {system} on {cpu}."
    if not (3, 11) <= sys.version_info < (3, 15):
        return f"vLLM's packages are locked for Python 3.11 to 3.14; this is Python {platform.python_version()}."
    name, version = platform.libc_ver()
    if name != "glibc" or is_older(version, GLIBC):
        library = f"{name} {version}" if name else "another C library"
        return f"vLLM's packages need glibc {GLIBC} or later; this system has {library}."
    return unmet_by_gpus(machine)


def unmet_by_gpus(machine: Machine) -> str:
    """Why vLLM cannot run on the GPUs of this machine: a sentence; '' if it can."""
    if not machine.driver_version:
        return (
            "vLLM needs an NVIDIA GPU and its driver, and this machine lacks one of them. Use another machine, or "
            "export the model as GGUF, which llama.cpp serves on the CPU."
        )
    if is_older(machine.driver_version, DRIVER):
        return f"vLLM needs NVIDIA driver {DRIVER} or later; {machine.driver_version} is installed. Update the driver."
    if not usable_gpus(machine):
        names = ", ".join(gpu.name for gpu in machine.gpus) or "none that CUDA_VISIBLE_DEVICES selects"
        return f"vLLM needs a GPU of compute capability 7.5 or later; this machine has {names}."
    return ""


def usable_gpus(machine: Machine) -> list[Gpu]:
    """The GPUs of a machine that vLLM supports."""
    return [gpu for gpu in machine.gpus if gpu.capability >= CAPABILITY]


def is_older(version: str, least: str) -> bool:
    """Whether a version is below the minimum, or is unknown."""
    try:
        return Version(version) < Version(least)
    except InvalidVersion:
        return True
