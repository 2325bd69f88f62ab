"""SkyPilot's own parser accepts the exported tasks. It has a separate environment, since it needs older packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect.facts import InputFacts
from backend.launch.clusters import skypilot
from backend.machine import machines

pytestmark = pytest.mark.soak
VERSION = "0.14.0"
PARSE = "import sys, sky; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"  # validate() needs a download
SPECS = {
    "one node": ("8x80gb", {"parallel.strategy": "zero3", "launch.nproc_per_node": 8}),
    "two nodes": (
        "2x8x80gb",
        {
            "parallel.strategy": "fsdp2",
            "launch.nproc_per_node": 8,
            "launch.place": "slurm",
            "launch.nnodes": 2,
            "kubernetes.volumes": ("runs=/runs",),
        },
    ),
    "a desktop": ("2x24gb", {"parallel.strategy": "ddp", "launch.nproc_per_node": 2}),
    "a laptop": ("laptop", {"parallel.strategy": "single"}),
}


@pytest.fixture(scope="module")
def python() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "footplate-tests" / f"skypilot-{VERSION}"
    if not (folder / "bin" / "sky").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", f"skypilot=={VERSION}"], check=True)
    return folder / "bin" / "python"


@pytest.mark.parametrize("name", SPECS)
def test_sky_pilot_accepts_the_task(python: Path, name: str, tmp_path: Path) -> None:
    machine, changes = SPECS[name]
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    spec = edit(RunSpec(), {**changes, "data.source": "files", "data.files": (str(data),)})
    made = skypilot.files(spec, machines()[machine], InputFacts())
    for file, text in made.items():
        (tmp_path / file).write_text(text)
    done = parse(python, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(changes.get("launch.nnodes", 1))
    task = tmp_path / skypilot.TASK
    task.write_text(task.read_text().replace("num_nodes", "number_of_nodes"))
    assert "number_of_nodes" in parse(python, tmp_path).stderr, "the parser knows its keys"


def parse(python: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [str(python), "-c", PARSE, skypilot.TASK]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
