"""Python environments for trainers that need other versions of the libraries than Footplate.

`footplate env create` makes one from pinned versions, with pip and its configured package index.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from backend.paths import environment_folder

COMPLETE = "footplate-complete"  # written last, so an incomplete environment does not have it


@dataclass(frozen=True)
class Environment:
    """What an environment contains: `packages` with their dependencies; then `alone`, without theirs; and `stand_ins`,
    empty packages for what is imported but not used. `shown`: the packages whose versions matter to users."""

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    stand_ins: Mapping[str, str] | None = None  # name -> version
    shown: tuple[str, ...] = ()


ENVIRONMENTS: Mapping[str, Environment] = {
    # llamafactory 0.9.5 requires packages for images, audio and video, which training on text does not need, and old
    # versions of others; so it is installed without its dependencies.
    "llamafactory": Environment(
        packages=(
            "torch==2.13.0", "transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0",
            "datasets==4.0.0", "gradio==5.50.0", "deepspeed", "av<17", "tyro<0.9", "einops", "fire", "omegaconf",
            "sse-starlette", "tiktoken", "sentencepiece", "modelscope", "hf-transfer", "librosa", "matplotlib", "scipy",
        ),
        alone=("llamafactory==0.9.5",),
        stand_ins={"torchaudio": "2.13.0"},
        shown=("llamafactory", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed"),
    ),
}  # fmt: skip


class CreationError(Exception):
    """An environment could not be created; the message is a sentence."""


def created() -> Iterator[str]:
    """The names of the environments that exist."""
    return (name for name in ENVIRONMENTS if (environment_folder(name) / COMPLETE).exists())


def create(name: str, show: Callable[[str], None] = print) -> Path:
    """Create an environment, from scratch if it exists; its folder. `show` gets a line per step. Raises
    CreationError."""
    wanted, folder = ENVIRONMENTS[name], environment_folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    show(f"Creating {folder}.")
    _run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet")
    show(f"Installing {len(wanted.packages)} packages and their dependencies.")
    _run(*pip, *wanted.packages)
    with tempfile.TemporaryDirectory() as sources:
        local = [str(_stand_in(Path(sources), *item)) for item in (wanted.stand_ins or {}).items()]
        show(f"Installing {', '.join(wanted.alone)}.")
        _run(*pip, "--no-deps", *local, *wanted.alone)
    (folder / COMPLETE).touch()
    return folder


def versions(name: str) -> dict[str, str]:
    """Package -> version, of the packages that matter, in an environment that exists."""
    places = [str(path) for path in environment_folder(name).glob("lib/python3*/site-packages")]
    found = {item.name: item.version for item in metadata.distributions(path=places)}
    return {package: found[package] for package in ENVIRONMENTS[name].shown if package in found}


def size(name: str) -> int:
    """Bytes of an environment that exists."""
    return sum(path.lstat().st_size for path in environment_folder(name).rglob("*") if not path.is_dir())


def _stand_in(sources: Path, package: str, version: str) -> Path:
    """The source of an empty package."""
    folder = sources / package
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").touch()
    text = f'[project]\nname = "{package}"\nversion = "{version}"\n[tool.setuptools]\npackages = ["{package}"]\n'
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise CreationError(f"{' '.join(command[1:4])} failed: {lines[-1] if lines else done.returncode}")
