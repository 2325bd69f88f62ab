"""Whether LLaMA-Factory can be started: its environment, and a model that exists.

The environment is inspected by its file names: starting its Python would take seconds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from backend.config import RunSpec, merge
from backend.machine import install_command
from backend.paths import environment_folder, model_folder

SUPPORTED = "0.9"  # llamafactory
# PyPI has an unrelated package of the same name, without this file.
MCORE_ADAPTER = "mcore_adapter/trainer/dpo_config.py"
MCORE_PACKAGE = "git+https://github.com/alibaba/ROLL.git#subdirectory=mcore_adapter"
ARGUMENT = re.compile(r"(?m)^    (\w+): ")  # a field of a dataclass
CREATE = "`footplate env create llamafactory` makes one that has it, and prints its folder."
CPU_INFO = Path("/proc/cpuinfo")
KT_PACKAGES = ("kt_kernel", "transformers_kt", "accelerate_kt")  # which llamafactory 0.9.5 hparams/parser.py requires
CPU_FLAGS = ("amx_tile", "avx512f")  # KTransformers 0.7 requires one of these


def inspect_trainer(spec: RunSpec, base: Path) -> dict[str, Any]:
    """The facts `trainer_problem`, `trainer_environment`, `trainer_folder` and `trainer_packages`."""
    if spec.launch.trainer != "llamafactory":
        return {"trainer_problem": "", "trainer_environment": "", "trainer_folder": "", "trainer_packages": ()}
    created = environment_folder(spec.launch.trainer)
    folder = Path(os.path.abspath(base / Path(spec.llamafactory.environment).expanduser()))
    offered = str(created) if (created / "bin" / "python").exists() else ""
    if problem := _environment_problem(spec, folder):
        problem += "" if offered else f" {CREATE}"
    else:
        problem = _backend_problem(spec, folder) or _unknown_arguments(spec, folder) or _model_problem(spec)
    found = {"trainer_folder": str(folder), "trainer_packages": _packages(folder)}
    return {"trainer_problem": problem, "trainer_environment": offered, **found}


def _environment_problem(spec: RunSpec, folder: Path) -> str:
    """Why this is not an environment with a supported LLaMA-Factory, a sentence; '' if it is."""
    if not spec.llamafactory.environment:
        return (
            "No environment is set: set llamafactory.environment to the folder of a Python environment that has "
            "llamafactory."
        )
    if not (folder / "bin" / "python").exists():
        return f"The folder {folder} is not a Python environment: it has no bin/python."
    found = [path.name for path in folder.glob("lib/python3*/site-packages/llamafactory-*.dist-info")]
    version = re.match(r"llamafactory-(.+)\.dist-info", found[0]) if found else None
    if not version:
        return f"The environment {folder} has no llamafactory."
    if not version[1].startswith(f"{SUPPORTED}."):
        return f"The environment {folder} has llamafactory {version[1]}; {SUPPORTED} is supported."
    return ""


def _packages(folder: Path) -> tuple[tuple[str, str], ...]:
    """The normalized names of the packages in an environment, and their versions."""
    found = (path.stem.partition("-") for path in folder.glob("lib/python3*/site-packages/*.dist-info"))
    return tuple(sorted((canonicalize_name(name), version) for name, _, version in found))


def _model_problem(spec: RunSpec) -> str:
    """Why LLaMA-Factory has no model, a sentence; '' if it has one."""
    if spec.model.source == "builtin" and not model_folder(spec.model.builtin).is_dir():
        return (
            f"The built-in model {spec.model.builtin} does not exist yet: only Footplate's own trainer makes it. "
            "Train a few steps with that trainer first, or choose another model."
        )
    return ""


def _backend_problem(spec: RunSpec, folder: Path) -> str:
    """Why Megatron-Core or KTransformers cannot be used, a sentence; '' if they can, or are not used."""
    backend, packages = spec.llamafactory.backend, list(folder.glob("lib/python3*/site-packages"))
    if backend == "megatron" and not any((place / MCORE_ADAPTER).exists() for place in packages):
        install = install_command([MCORE_PACKAGE], str(folder))
        return f"The environment {folder} has no mcore_adapter. Install it with: {install}."
    if backend != "ktransformers":
        return ""
    missing = [name for name in KT_PACKAGES if not any(list(place.glob(f"{name}-*.dist-info")) for place in packages)]
    if missing:
        names = ", ".join(name.replace("_", "-") for name in missing)
        install = install_command(["ktransformers[sft]"], str(folder))
        return f"The environment {folder} lacks {names}. Install them with: {install}."
    if spec.launch.place == "local" and not _cpu_flags().intersection(CPU_FLAGS):
        return "KTransformers requires a CPU with AMX or AVX-512, and this CPU has neither."
    return ""


def _unknown_arguments(spec: RunSpec, folder: Path) -> str:
    """Which keys of llamafactory.extra_args the environment's LLaMA-Factory does not have, a sentence; '' for none, or
    if another backend has arguments of its own."""
    given = merge.parse(spec.llamafactory.extra_args)
    if not given or spec.llamafactory.backend != "transformers" or "ALLOW_EXTRA_ARGS" in spec.launch.env:
        return ""
    known = set[str]()
    for place in folder.glob("lib/python3*/site-packages"):
        for file in (*place.glob("llamafactory/hparams/*.py"), *place.glob("transformers/training_args*.py")):
            known |= set(ARGUMENT.findall(file.read_text(encoding="utf-8", errors="replace")))
    unknown = [name for name in given if name not in known]
    if not known or not unknown:
        return ""
    what = f"llamafactory.extra_args has {', '.join(unknown)}"
    return f"{what}, which the LLaMA-Factory in {folder} does not have. Remove it."


def _cpu_flags() -> set[str]:
    """The instruction sets of this machine's CPU; empty where the kernel does not list them."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
