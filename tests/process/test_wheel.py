"""The wheel that `pip install .` builds, installed into an environment of its own: every file is in it, the `footplate`
command works away from the checkout, the page serves its files, and a run ends well."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from backend.paths import HOME
from backend.runs import processes
from backend.runs.folder import runs

pytestmark = pytest.mark.alone

CODE, DATA = ("backend", "webui"), ("assets", "presets")


@dataclass(frozen=True)
class Installed:
    """The wheel, and an environment that has it; the libraries are those of the tests' own environment."""

    wheel: Path
    bin: Path
    place: Path

    def footplate(self, *words: str, code: int = 0) -> str:
        ended = subprocess.run(
            [self.bin / "footplate", *words], cwd=self.place, env=self.env, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == code, f"{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": "", "FOOTPLATE_CACHE": str(self.place / "cache")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("wheel")
    source, environment, place = root / "source", root / "environment", root / "place"
    place.mkdir()
    for name in (*CODE, *DATA):  # setuptools leaves its build folder next to pyproject.toml
        shutil.copytree(HOME / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HOME / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(root), str(source)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = root.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=300)
    python = environment / "bin/python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True, timeout=300)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, environment / "bin", place)


def test_every_file_is_in_the_wheel(installed: Installed) -> None:
    names = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(HOME).as_posix() for name in CODE for path in (HOME / name).rglob("*") if is_ours(path)
    }
    for suffix, name in ((".jsonl", "assets"), (".yaml", "presets")):
        found = (HOME / name).rglob(f"*{suffix}")
        expected |= {f"footplate_data/{path.relative_to(HOME).as_posix()}" for path in found}
    assert names == expected
    assert {name.split("/")[0] for name in names} == {"backend", "webui", "footplate_data"}


def is_ours(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def test_the_command_works_away_from_the_checkout(installed: Installed) -> None:
    code = "import backend, webui; print(backend.__file__, webui.__file__)"
    ask = [installed.bin / "python", "-c", code]
    files = subprocess.run(ask, cwd=installed.place, env=installed.env, check=True, capture_output=True, text=True)
    assert all(str(installed.bin.parent) in file for file in files.stdout.split())
    presets = json.loads(installed.footplate("presets", "--json"))
    assert {preset["name"] for preset in presets} == {path.stem for path in (HOME / "presets").glob("*.yaml")}
    assert "backend.train" in installed.footplate("plan", "first-run")
    assert json.loads(installed.footplate("check", "first-run", "--json"))["can_run"]
    assert installed.footplate("estimate", "lora-80gb", "--machine", "1x80gb")


def test_the_page_serves_its_files(installed: Installed) -> None:
    static = [path for path in (HOME / "webui/static").rglob("*") if path.is_file()]
    with served(installed) as port:
        assert b"gradio" in get(port, "/")
        for path in static:
            assert get(port, f"/footplate/{path.relative_to(HOME / 'webui/static')}") == path.read_bytes()


@contextmanager
def served(installed: Installed) -> Iterator[int]:
    """The port of a page; its process is ended afterwards."""
    command = [installed.bin / "footplate", "ui", "--port", "0"]
    process = subprocess.Popen(command, cwd=installed.place, env=installed.env, text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        yield int(first.strip().rpartition(":")[2])
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, (path, body)
    return body


@pytest.mark.soak
def test_a_run_ends_well(installed: Installed) -> None:
    """The supervisor, torchrun and its two ranks all import the installed package."""
    changes = {
        "model.builtin": "tiny-llama",
        "train.max_steps": 2,
        "eval.num_generations": 0,
        "parallel.strategy": "ddp",
        "launch.nproc_per_node": 2,
        "launch.device": "cpu",
    }
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    installed.footplate("run", "first-run", *words, "--follow")
    (run,) = runs(installed.place / "runs")
    assert run.state == "done"
    assert not processes.run_processes(run.path)
