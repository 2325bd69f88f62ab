"""The steps of the Containerfile, executed in an empty folder and a new environment instead of an image."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backend.paths import HOME

pytestmark = pytest.mark.soak
PACKAGES = "/opt/footplate"


def steps() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Containerfile."""
    text = (HOME / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_steps_of_the_containerfile(tmp_path: Path) -> None:
    """torch comes from the package index of this machine, with the pinned version; Debian's packages are only looked
    up."""
    target, environment = tmp_path / "opt", tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    env = {"PATH": f"{environment}/bin:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = []
    for instruction, arguments in steps():
        if instruction == "COPY":
            *sources, place = arguments.split()
            for source in sources:
                to = target / Path(place).relative_to("/opt") / (source if place.endswith("/") else "")
                to.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (HOME / source).is_dir() else shutil.copy
                copy(HOME / source, to)
        elif instruction == "RUN":
            command = arguments.replace(PACKAGES, str(target / "footplate")).replace(
                "apt-get install", "apt-get install -s"
            )
            command = re.sub(r"rm -rf \S+", "true", command)
            command = re.sub(r"install --no-cache-dir torch --index-url \S+", "install torch", command)
            command = command.replace("pip install", f"pip install --quiet --constraint {HOME / 'constraints.txt'}")
            subprocess.run(["bash", "-ec", command], check=True, env=env, cwd=tmp_path)
        done.append(instruction)
    assert done.count("RUN") == 3 and done.count("COPY") >= 5 and done[-1] == "CMD"
    python = str(environment / "bin" / "python")
    # What the pods and the page start, far from the checkout.
    for words in (
        ["-m", "backend.runs.kubernetes_node", "--help"],
        ["-m", "webui", "--help"],
        ["-c", "import kubernetes"],
    ):
        subprocess.run([python, *words], check=True, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    place = subprocess.run(
        [python, "-c", "import backend; print(backend.__file__)"],
        check=True,
        env=env,
        cwd=tmp_path,
        capture_output=True,
    ).stdout.decode()
    assert place.startswith(str(environment))
