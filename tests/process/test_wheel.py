"""The wheel that `pip install .` builds, installed into its own environment: it contains every file, the `footplate`
command works outside the checkout, the page serves its files, and a run succeeds."""

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

CODE, DATA = ("backend", "webui"), ("assets", "docs", "presets")


@dataclass(frozen=True)
class Installed:
    """The wheel and an environment with it; the libraries are those of the test environment."""

    wheel: Path
    bin: Path
    work_folder: Path

    def footplate(self, *arguments: str, code: int = 0) -> str:
        completed = subprocess.run(
            [self.bin / "footplate", *arguments],
            cwd=self.work_folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert completed.returncode == code, f"{completed.stdout}\n{completed.stderr}"
        return completed.stdout

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": "", "FOOTPLATE_CACHE": str(self.work_folder / "cache")}


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
        path.relative_to(HOME).as_posix() for name in CODE for path in (HOME / name).rglob("*") if is_source_file(path)
    }
    for suffix, name in ((".jsonl", "assets"), (".png", "assets"), (".md", "docs"), (".yaml", "presets")):
        found = (HOME / name).rglob(f"*{suffix}")
        expected |= {f"footplate_data/{path.relative_to(HOME).as_posix()}" for path in found}
    assert names == expected
    assert {name.split("/")[0] for name in names} == {"backend", "webui", "footplate_data"}


def is_source_file(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def test_command_works_outside_the_checkout(installed: Installed) -> None:
    code = "import backend, webui; print(backend.__file__, webui.__file__)"
    command = [installed.bin / "python", "-c", code]
    files = subprocess.run(
        command, cwd=installed.work_folder, env=installed.env, check=True, capture_output=True, text=True
    )
    assert all(str(installed.bin.parent) in file for file in files.stdout.split())
    presets = json.loads(installed.footplate("presets", "--json"))
    assert {preset["name"] for preset in presets} == {path.stem for path in (HOME / "presets").glob("*.yaml")}
    assert "backend.train" in installed.footplate("plan", "first-run")
    assert json.loads(installed.footplate("check", "first-run", "--json"))["can_run"]
    assert installed.footplate("estimate", "lora-80gb", "--machine", "1x80gb")


def test_page_serves_its_files(installed: Installed) -> None:
    static = [path for path in (HOME / "webui/static").rglob("*") if path.is_file()]
    with running_page(installed) as port:
        assert b"gradio" in get(port, "/")
        for path in static:
            assert get(port, f"/footplate/{path.relative_to(HOME / 'webui/static')}") == path.read_bytes()
        assert b"<h1" in get(port, "/help/guide")
        assert get(port, "/help/pictures/build.png") == (HOME / "assets/build.png").read_bytes()


@contextmanager
def running_page(installed: Installed) -> Iterator[int]:
    """Start the page and yield its port; the process is killed afterwards."""
    command = [installed.bin / "footplate", "ui", "--port", "0", "--no-login"]
    process = subprocess.Popen(command, cwd=installed.work_folder, env=installed.env, text=True, stdout=subprocess.PIPE)
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
    response = connection.getresponse()
    body = response.read()
    connection.close()
    assert response.status == 200, (path, body)
    return body


@pytest.mark.soak
def test_run_succeeds(installed: Installed) -> None:
    """Supervisor, torchrun and both ranks import the installed package."""
    changes = {
        "model.builtin": "tiny-llama",
        "train.max_steps": 2,
        "eval.num_generations": 0,
        "parallel.strategy": "ddp",
        "launch.nproc_per_node": 2,
        "launch.device": "cpu",
    }
    arguments = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    installed.footplate("run", "first-run", *arguments, "--follow")
    (run,) = runs(installed.work_folder / "runs")
    assert run.state == "done"
    assert not processes.run_processes(run.path)
