"""Plans: pure, equal text for equal input, golden for every preset; run.sh and the script run in a clean shell."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from backend.machine import GIB, Gpu, Machine
from backend.options import edit
from backend.plan import plan
from backend.presets import presets
from backend.run import Plan
from backend.spec import RunSpec

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LAPTOP = Machine(cores=8, python="/usr/bin/python3")
GPUS = tuple(Gpu(i, "H100", 80 * GIB, 80 * GIB, (9, 0)) for i in range(4))
NODE = Machine(device="cuda", gpus=GPUS, cores=64, python="/usr/bin/python3")


def text(made: Plan) -> str:
    files = "".join(f"\n# {name}\n{body}" for name, body in made.files.items())
    return f"{made.command()}\n{files}\n# {' '.join(made.notes)}\n"


@pytest.mark.parametrize("preset", presets(), ids=lambda p: p.name)
def test_golden(preset):
    """UPDATE_GOLDEN=1 writes them anew; the difference is then reviewed."""
    path = GOLDEN / f"{preset.name}.txt"
    made = text(plan(preset.spec, LAPTOP))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(made)
    assert path.read_text() == made


@pytest.mark.parametrize(
    ("patch", "machine", "says"),
    [
        ({}, LAPTOP, ["--standalone", "--nproc-per-node=1", "OMP_NUM_THREADS=8"]),
        ({"parallel.strategy": "ddp", "launch.processes": 2}, LAPTOP, ["--nproc-per-node=2", "OMP_NUM_THREADS=4"]),
        ({"launch.launcher": "python"}, LAPTOP, ["python3 -m backend.train"]),
        ({}, NODE, ["CUDA_VISIBLE_DEVICES=0 "]),
        ({"parallel.strategy": "ddp", "launch.devices": (1, 3)}, NODE, ["CUDA_VISIBLE_DEVICES=1,3"]),
        ({"parallel.strategy": "ddp", "launch.processes": 4}, NODE, ["CUDA_VISIBLE_DEVICES=0,1,2,3", "=16"]),
        ({"launch.threads": 3}, LAPTOP, ["OMP_NUM_THREADS=3"]),
        ({"launch.environment": {"OMP_NUM_THREADS": "7", "A": "b c"}}, LAPTOP, ["OMP_NUM_THREADS=7", "A='b c'"]),
        ({"launch.device": "cpu"}, NODE, ["--nproc-per-node=1"]),
    ],
)
def test_command(patch, machine, says):
    command = plan(edit(RunSpec(), patch), machine).command()
    for part in says:
        assert part in command
    assert ("CUDA_VISIBLE_DEVICES" in command) == (machine is NODE and patch.get("launch.device") != "cpu")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_has_its_file(stage):
    made = plan(edit(RunSpec(), {"parallel.strategy": f"zero{stage}", "parallel.bucket_mb": 50}), LAPTOP)
    found = json.loads(made.files["deepspeed.json"])
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (stage, 25 * 1024**2)
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is (stage == 3)
    assert {found[name] for name in found if name.startswith(("train_", "gradient_"))} == {"auto"}
    assert made.env["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in plan(edit(RunSpec(), {"parallel.strategy": f"zero{stage}"}), NODE).env


def test_other_strategies_have_no_engine_file():
    assert set(plan(edit(RunSpec(), {"parallel.strategy": "ddp"}), LAPTOP).files) == {"spec.yaml"}


def test_script_writes_files_and_runs_to_the_letter(tmp_path):
    """Text that a shell would change arrives as it is."""
    nasty = "a: '$HOME `id` \"x\"'\nb: \\\\n\n"
    made = Plan(
        argv=("python3", "-c", "import os; print(os.environ['X'], os.getcwd())"),
        env={"X": "1 $2"},
        files={"spec.yaml": nasty},
    )
    script = tmp_path / "go.sh"
    script.write_text(made.script(str(tmp_path / "a b")))
    out = subprocess.run(
        ["env", "-i", "PATH=/usr/bin:/bin", "bash", script], capture_output=True, text=True, check=True
    )
    assert out.stdout.split("\n")[0] == f"1 $2 {tmp_path / 'a b'}"
    assert (tmp_path / "a b" / "spec.yaml").read_text() == nasty
