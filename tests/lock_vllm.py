"""Writes backend/environments/vllm.lock, the packages of the environment vllm: `make lock`.

uv, in a temporary environment, selects the versions for each Python version. The hashes are those of the wheels that
pip would choose on Linux with x86-64, and the first lines have the bytes to download and those of the unpacked files,
from the wheels' tables of contents. No wheel is downloaded as a whole.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

LOCK = Path(__file__).parents[1] / "backend/environments/vllm.lock"
VLLM, GLIBC = "vllm==0.33.0", 31  # llguidance, which vLLM requires, has no wheel for glibc below 2.31
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
INDEX = "https://pypi.org/simple"
HEADER = """\
# Written by `make lock` (tests/lock_vllm.py). {vllm} for Linux (x86-64, glibc 2.{glibc}), Python {first} to {last}.
# Bytes to download: {download}. Bytes installed: {installed}.
"""


class RemoteFile(io.RawIOBase):
    """A file on a server, of which only what is read is downloaded."""

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.position = url, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        last = min(self.position + len(buffer), self.size) - 1
        if last < self.position:
            return 0
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.position}-{last}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 206, "this index does not serve parts of files"
            data = response.read()
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def resolved(folder: Path, python: str) -> list[str]:
    """The versions for a version of Python, as name==version."""
    output = folder / f"{python}.txt"
    (folder / "vllm.in").write_text(f"{VLLM}\n")
    subprocess.run(
        [folder / "uv/bin/uv", "pip", "compile", folder / "vllm.in", "--output-file", output, "--quiet",
         "--no-annotate", "--no-header", "--only-binary", ":all:", "--default-index", INDEX,
         "--python-version", python, "--python-platform", f"x86_64-manylinux_2_{GLIBC}"],
        check=True,
    )  # fmt: skip
    return [line.strip() for line in output.read_text().splitlines() if "==" in line]


def tags(python: str) -> list[Any]:
    """What pip's wheels may be tagged with, the best first."""
    version = tuple(map(int, python.split(".")))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    ]


def wheels(requirement: str) -> dict[str, dict[str, Any]]:
    """Python version -> the wheel that pip chooses, as its index describes it."""
    name, _, version = requirement.partition("==")
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(f"{INDEX}/{name}/", headers=accept), timeout=60) as response:
        files = [file for file in json.load(response)["files"] if file["filename"].endswith(".whl")]
    found = {}
    for python in PYTHONS:
        ranks = {tag: rank for rank, tag in reversed(list(enumerate(tags(python))))}
        fitting = []
        for file in files:
            try:
                _, its_version, build, its_tags = parse_wheel_filename(file["filename"])
            except InvalidWheelFilename:  # of old releases
                continue
            if str(its_version) == version and (fit := [ranks[tag] for tag in its_tags if tag in ranks]):
                fitting.append((min(fit), [-part for part in build[:1]], file))
        if fitting:
            found[python] = min(fitting, key=lambda each: each[:2])[2]
    return found


def unpacked_bytes(wheel: dict[str, Any]) -> int:
    """The bytes of a wheel's files."""
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(wheel["url"], wheel["size"]), 2**18)) as archive:
        return sum(item.file_size for item in archive.infolist())


def lock(folder: Path) -> str:
    """The text of the lock file."""
    venv.create(folder / "uv", with_pip=True)
    subprocess.run([folder / "uv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    pythons: dict[str, list[str]] = {}
    for python in PYTHONS:
        for requirement in resolved(folder, python):
            pythons.setdefault(requirement, []).append(python)
    with ThreadPoolExecutor(8) as pool:
        chosen = dict(zip(pythons, pool.map(wheels, pythons), strict=True))
        files = {wheel["filename"]: wheel for each in chosen.values() for wheel in each.values()}
        unpacked = dict(zip(files, pool.map(unpacked_bytes, files.values()), strict=True))
    lines = []
    download, installed = dict.fromkeys(PYTHONS, 0), dict.fromkeys(PYTHONS, 0)
    for requirement, versions in sorted(pythons.items()):
        missing = set(versions) - set(chosen[requirement])
        assert not missing, f"{requirement} has no wheel for Python {', '.join(missing)}"
        for python in versions:
            wheel = chosen[requirement][python]
            download[python] += wheel["size"]
            installed[python] += unpacked[wheel["filename"]]
        lines.append(requirement + marker(versions))
        hashes = sorted({chosen[requirement][python]["hashes"]["sha256"] for python in versions})
        lines[-1] += "".join(f" --hash=sha256:{digest}" for digest in hashes)
    header = HEADER.format(
        vllm=VLLM, glibc=GLIBC, first=PYTHONS[0], last=PYTHONS[-1], download=max(download.values()),
        installed=max(installed.values()),
    )  # fmt: skip
    return header + "\n".join(lines) + "\n"


def marker(versions: list[str]) -> str:
    """The environment marker of a requirement for these versions of Python only; '' for all."""
    if len(versions) == len(PYTHONS):
        return ""
    text = " or ".join(f'python_version == "{version}"' for version in versions)
    assert Marker(text) and Requirement(f"x; {text}")
    return f"; {text}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text = lock(Path(folder))
    LOCK.write_text(text, encoding="utf-8")
    count = len(re.findall("(?m)^[^#]", text))
    print(f"{LOCK}: {count} packages", file=sys.stderr)


if __name__ == "__main__":
    main()
