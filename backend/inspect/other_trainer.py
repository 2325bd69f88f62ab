"""Whether LLaMA-Factory can be started: its environment, and a model that exists.

Imports config, paths. The environment is inspected by its file names: starting its Python would take seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.paths import environment_folder, model_folder

SUPPORTED = "0.9"  # llamafactory


def inspect_trainer(spec: RunSpec, base: Path) -> dict[str, Any]:
    """The facts `trainer_problem` and `trainer_environment`."""
    created = environment_folder(spec.launch.trainer)
    has_one = spec.launch.trainer != "footplate" and (created / "bin" / "python").exists()
    return {"trainer_problem": _problem(spec, base), "trainer_environment": str(created) if has_one else ""}


def _problem(spec: RunSpec, base: Path) -> str:
    """Why LLaMA-Factory cannot be started, a sentence; '' if it can, or is not used."""
    if spec.launch.trainer != "llamafactory":
        return ""
    if not spec.llamafactory.environment:
        return "No environment is set: llamafactory.environment names the Python environment that has llamafactory."
    folder = base / Path(spec.llamafactory.environment).expanduser()
    if not (folder / "bin" / "python").exists():
        return f"The folder {folder} is no Python environment: it has no bin/python."
    found = [path.name for path in folder.glob("lib/python3*/site-packages/llamafactory-*.dist-info")]
    version = re.match(r"llamafactory-(.+)\.dist-info", found[0]) if found else None
    if not version:
        return f"The environment {folder} has no llamafactory."
    if not version[1].startswith(f"{SUPPORTED}."):
        return f"The environment {folder} has llamafactory {version[1]}; {SUPPORTED} is supported."
    if spec.model.source == "builtin" and not model_folder(spec.model.builtin).is_dir():
        return (
            f"The built-in model {spec.model.builtin} does not exist yet: only Footplate's own trainer makes it. Train "
            "a few steps with that first, or choose another model."
        )
    return ""
