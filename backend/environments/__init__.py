"""Environments for programs that Footplate starts and does not depend on: trainers that need other versions of the
libraries, the converter and runtime of GGUF files, lm-eval, and vLLM.

`footplate env create` makes one from pinned versions, with pip and its configured package index. Nothing is installed
into Footplate's own environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from backend.environments import locked, vllm
from backend.environments.lm_eval_packages import LM_EVAL_PACKAGES
from backend.environments.vllm_machine import unmet
from backend.machine import Machine, probe
from backend.paths import HOME, environment_folder

COMPLETE = "footplate-complete"  # written last, so an incomplete environment does not have it
PACKAGES, CONVERTER = "packages", "llama.cpp"  # folders of the environment gguf
ADAPTER_SCRIPT = "convert_lora_to_gguf.py"  # in CONVERTER
AT_ONCE = 10  # packages that one call of pip downloads
Show = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with a Python of its own: `packages` with their dependencies; then the packages `alone`,
    without their dependencies; and `stand_ins`, empty packages for what is imported but not used. `shown`: the packages
    whose versions matter to users; `cost`: what creating it costs, as a verb and its objects."""

    packages: tuple[str, ...]
    cost: str
    alone: tuple[str, ...] = ()
    stand_ins: Mapping[str, str] | None = None  # name -> version
    shown: tuple[str, ...] = ()

    def build(self, folder: Path, show: Show) -> None:
        """Create it in a folder that does not exist. Raises CreationError."""
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (*_pip(folder), "install", "--quiet")
        show(f"Installing {len(self.packages)} packages and their dependencies.")
        _run(*pip, *self.packages)
        with tempfile.TemporaryDirectory() as sources:
            local = [str(_stand_in(Path(sources), *item)) for item in (self.stand_ins or {}).items()]
            show(f"Installing {', '.join(self.alone)}.")
            _run(*pip, "--no-deps", *local, *self.alone)

    def versions(self, folder: Path) -> dict[str, str]:
        """Package -> version, of the packages that matter."""
        return _versions(folder.glob("lib/python3*/site-packages"), self.shown)


@dataclass(frozen=True)
class PackageFolder:
    """Packages, without their dependencies, that a process of Footplate's own Python has on its path; and, optionally,
    the files of a source package, which is not built. Each package is a line of a requirements file with hashes.
    `helpers` are what pip needs to read the version of the source package. `probe`: programs that have to succeed."""

    packages: tuple[str, ...]
    cost: str
    probe: tuple[tuple[str, ...], ...]  # arguments of Python, in the folder
    source: str = ""
    source_files: tuple[str, ...] = ()  # the beginnings of their paths, after the source's first folder
    helpers: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()

    def build(self, folder: Path, show: Show) -> None:
        """Create it in a folder that does not exist. Raises CreationError."""
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            work = Path(name)
            _run(sys.executable, "-m", "venv", str(work / "venv"))
            pip = _pip(work / "venv")
            if self.source:
                self._add_source(folder, work, pip, show)
            show(f"Installing {', '.join(line.split()[0] for line in self.packages)}.")
            options = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(folder / PACKAGES))
            _run(*pip, "install", "--quiet", *options, *_file(work / "packages", self.packages))
        show("Testing the installed packages.")
        path = os.pathsep.join((str(folder / PACKAGES), str(HOME)))
        for arguments in self.probe:
            _run(sys.executable, *arguments, cwd=folder, env={**os.environ, "PYTHONPATH": path})

    def _add_source(self, folder: Path, work: Path, pip: tuple[str, ...], show: Show) -> None:
        """Unpack the files of the source package. Raises CreationError."""
        _run(*pip, "install", "--quiet", "--no-deps", "--require-hashes", *_file(work / "helpers", self.helpers))
        show(f"Downloading the source of {self.source.split()[0]}; it is not built.")
        only = ("--no-binary", ":all:", "--no-build-isolation", "--no-deps", "--require-hashes")
        _run(*pip, "download", "--quiet", *only, "--dest", str(work), *_file(work / "source", (self.source,)))
        _unpack(next(work.glob("*.tar.gz")), folder / CONVERTER, self.source_files)

    def versions(self, folder: Path) -> dict[str, str]:
        """Package -> version, of the packages that matter."""
        found = _versions([folder / PACKAGES], self.shown)
        if not self.source:
            return found
        name, _, version = self.source.split()[0].partition("==")
        return {name: version, **found}


@dataclass(frozen=True)
class LockedEnvironment:
    """A virtual environment with a Python of its own, from a lock file: a requirements file with the hash of each
    wheel, whose first lines say how many bytes are downloaded and installed. `unmet`: what this machine lacks, as a
    sentence; '' for nothing. `probe`: programs that have to succeed in the environment. Wheels are kept until the
    environment is complete, so that an interrupted creation does not download them again."""

    lock: Path
    unmet: Callable[[Machine], str]
    probe: tuple[tuple[str, ...], ...]  # arguments of Python
    shown: tuple[str, ...] = ()

    @property
    def cost(self) -> str:
        """What creating it costs, as a verb and its objects."""
        download, installed = (number / 1e9 for number in self._bytes())
        minutes = round(download * 8e3 / 100 / 60)
        return (
            f"downloads {download:.1f} GB ({minutes} minutes at 100 Mbit/s), needs {download + installed:.0f} GB of "
            f"disk space during the installation, and {installed:.0f} GB afterwards"
        )

    def check(self, folder: Path) -> None:
        """Raise CreationError if it cannot be created on this machine."""
        machine = probe(folder)
        if reason := self.unmet(machine):
            raise CreationError(reason)
        wheels = _wheels(folder)
        needed = sum(self._bytes()) - sum(path.stat().st_size for path in wheels.glob("*.whl"))
        if machine.disk_free_bytes < needed:
            raise CreationError(
                f"{folder.parent} has {machine.disk_free_bytes / 1e9:.1f} GB of free disk space; creating the "
                f"environment {folder.name} needs {needed / 1e9:.1f} GB. Free some, or set FOOTPLATE_CACHE to a folder "
                "on another disk."
            )

    def build(self, folder: Path, show: Show) -> None:
        """Create it in a folder that does not exist. Raises CreationError."""
        wheels = _wheels(folder)
        wheels.mkdir(parents=True, exist_ok=True)
        _run(sys.executable, "-m", "venv", str(folder))
        pip, only = (
            _pip(folder),
            ("--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"),
        )
        env = {**os.environ, "TMPDIR": str(wheels)}  # /tmp may be too small for gigabytes
        lines = [line for line in self.lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "packages"
            for start in range(0, len(lines), AT_ONCE):  # pip moves files to their folder once it has all
                show(f"Downloading packages {start + 1} to {min(start + AT_ONCE, len(lines))} of {len(lines)}.")
                part = _file(file, tuple(lines[start : start + AT_ONCE]))
                _run(*pip, "download", *only, "--dest", str(wheels), *part, env=env)
            show(f"Installing {len(lines)} packages.")
            offline = ("--no-index", "--find-links", str(wheels))
            _run(*pip, "install", *only, *offline, *_file(file, tuple(lines)), env=env)
        show("Testing the installed packages.")
        for arguments in self.probe:
            _run(str(folder / "bin" / "python"), *arguments, cwd=folder)
        shutil.rmtree(wheels)

    def versions(self, folder: Path) -> dict[str, str]:
        """Package -> version, of the packages that matter."""
        return _versions(folder.glob("lib/python3*/site-packages"), self.shown)

    def _bytes(self) -> tuple[int, int]:
        """Bytes to download and bytes when installed, as the lock file says."""
        with self.lock.open(encoding="utf-8") as file:
            found = re.findall(r"Bytes [a-z ]+: (\d+)", file.readline() + file.readline())
        return int(found[0]), int(found[1])


ENVIRONMENTS: Mapping[str, Environment | PackageFolder | LockedEnvironment] = {
    # llamafactory 0.9.5 requires packages for images, audio and video, which training on text does not need, and old
    # versions of others; so llamafactory is installed without its dependencies.
    "llamafactory": Environment(
        packages=(
            "torch==2.13.0", "transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0",
            "datasets==4.0.0", "gradio==5.50.0", "deepspeed", "av<17", "tyro<0.9", "einops", "fire", "omegaconf",
            "sse-starlette", "tiktoken", "sentencepiece", "modelscope", "hf-transfer", "librosa", "matplotlib", "scipy",
        ),
        alone=("llamafactory==0.9.5",),
        stand_ins={"torchaudio": "2.13.0"},
        shown=("llamafactory", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed"),
        cost="takes a few minutes and about 2 GiB of disk space, more with a CUDA build of torch",
    ),
    # No wheel contains the converter. It imports Footplate's torch and transformers, so no second torch is installed.
    # sentencepiece reads tokenizer.model; xllamacpp has llama.cpp's server in it.
    "gguf": PackageFolder(
        packages=(locked.SENTENCEPIECE, locked.XLLAMACPP),
        source=locked.LLAMA_CPP_PYTHON,
        source_files=tuple(
            f"vendor/llama.cpp/{name}"
            for name in (
                "convert_hf_to_gguf.py", ADAPTER_SCRIPT, "conversion/", "gguf-py/gguf/", "LICENSE",
            )
        ),
        helpers=(locked.SCIKIT_BUILD_CORE, locked.PACKAGING, locked.PATHSPEC),
        probe=(
            ("-c", "import xllamacpp; xllamacpp.Server"),
            (f"{CONVERTER}/convert_hf_to_gguf.py", "--print-supported-models"),
        ),
        shown=("xllamacpp", "sentencepiece"),
        cost="downloads 110 MB",
    ),
    # lm-eval imports Footplate's torch, transformers and datasets, so that models are loaded as in training.
    "lm-eval": PackageFolder(
        packages=LM_EVAL_PACKAGES,
        probe=(("-m", "backend.inference.benchmark_probe", "."),),
        shown=("lm_eval", "scikit-learn", "scipy"),
        cost="downloads 56 MB, uses 280 MB of disk space, and takes up to three minutes",
    ),
    # vLLM requires another transformers, and CUDA libraries of its own.
    "vllm": LockedEnvironment(
        lock=Path(__file__).parent / "vllm.lock",
        unmet=unmet,
        probe=(
            ("-c", "import sys, torch; torch.cuda.is_available() or sys.exit('torch finds no NVIDIA GPU.')"),
            (str(Path(__file__).parent / "vllm_probe.py"), *vllm.names()),
        ),
        shown=("vllm", "torch", "transformers"),
    ),
}  # fmt: skip


# pip says the same if a version does not exist, has no wheel for this machine, or if the index cannot be reached.
NO_INDEX = (
    ". Either the package index cannot be reached or it has no such wheel for this machine: set PIP_INDEX_URL to an "
    "index, or PIP_NO_INDEX=1 and PIP_FIND_LINKS to a folder with the wheels."
)


class CreationError(Exception):
    """An environment could not be created; the message is a sentence."""


def created() -> Iterator[str]:
    """The names of the environments that exist."""
    return (name for name in ENVIRONMENTS if is_complete(name))


def is_complete(name: str) -> bool:
    """Whether the creation of the environment was completed."""
    return (environment_folder(name) / COMPLETE).exists()


def create(name: str, show: Show = print) -> Path:
    """Create an environment, from scratch if it exists, and return its folder. `show` gets a line per step. Raises
    CreationError."""
    folder = environment_folder(name)
    if isinstance(environment := ENVIRONMENTS[name], LockedEnvironment):
        environment.check(folder)
    (folder / COMPLETE).unlink(missing_ok=True)  # first: a deletion may be interrupted
    shutil.rmtree(folder, ignore_errors=True)
    show(f"Creating {folder}. This {environment.cost}.")
    environment.build(folder, show)
    (folder / COMPLETE).touch()
    return folder


def remove(name: str) -> None:
    """Delete an environment. Raises CreationError if there is none."""
    folder = environment_folder(name)
    parts = [path for path in (folder, _wheels(folder)) if path.exists()]
    if not parts:
        raise CreationError(f"The environment {name} does not exist: there is no folder {folder}.")
    (folder / COMPLETE).unlink(missing_ok=True)  # first: a deletion may be interrupted
    for part in parts:
        shutil.rmtree(part)


def how_to_create(name: str) -> str:
    """The command that creates an environment, and its cost: a sentence without its period."""
    return f"Run `footplate env create {name}`, which {ENVIRONMENTS[name].cost}"


def missing(name: str, what: str) -> str:
    """That `what`, a subject with its verb, is not installed, and how to create the environment `name`, which has it:
    sentences without the last period. '' if the environment exists."""
    return "" if is_complete(name) else f"{what} not installed. {how_to_create(name)}"


def versions(name: str) -> dict[str, str]:
    """Package -> version, of the packages that matter, in an environment that exists."""
    return ENVIRONMENTS[name].versions(environment_folder(name))


def size(name: str) -> int:
    """Bytes of an environment that exists."""
    return sum(path.lstat().st_size for path in environment_folder(name).rglob("*") if not path.is_dir())


def _wheels(folder: Path) -> Path:
    """Where the wheels of an environment are until it is complete."""
    return folder.parent / f"{folder.name}.wheels"


def _stand_in(sources: Path, package: str, version: str) -> Path:
    """The source folder of an empty package."""
    folder = sources / package
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").touch()
    text = f'[project]\nname = "{package}"\nversion = "{version}"\n[tool.setuptools]\npackages = ["{package}"]\n'
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def _file(path: Path, requirements: tuple[str, ...]) -> tuple[str, str]:
    """pip's arguments for these lines of a requirements file: it takes hashes from files only."""
    path.write_text("\n".join(requirements) + "\n", encoding="utf-8")
    return "--requirement", str(path)


def _unpack(archive: Path, folder: Path, starts: tuple[str, ...]) -> None:
    """Unpack the files whose paths begin with one of `starts`, below `folder` without the two folders around them."""
    with tarfile.open(archive) as source:
        for member in source:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if member.isfile() and str(path).startswith(starts):
                member.name = str(PurePosixPath(*path.parts[2:]))
                source.extract(member, folder, filter="data")


def _versions(folders: Iterable[Path], shown: tuple[str, ...]) -> dict[str, str]:
    found = {item.name: item.version for item in metadata.distributions(path=[str(folder) for folder in folders])}
    return {package: found[package] for package in shown if package in found}


def _pip(environment: Path) -> tuple[str, ...]:
    return (str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")


def _run(*command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=cwd, env=env
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines
        # On stdout, Debian's venv says which package is missing.
        error = errors[-1] if errors else " ".join(done.stdout.split())[:300] or f"exit code {done.returncode}"
        what = "pip" if command[1:3] == ("-m", "pip") else " ".join(command[1:4])
        raise CreationError(f"{what} failed: {error}{NO_INDEX if 'No matching distribution' in error else ''}")
