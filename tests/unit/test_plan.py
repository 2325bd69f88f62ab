"""Launch plans: golden files for every preset and launcher; the command and the script run in a clean shell."""

import json
import os
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.launch.plan import plan
from backend.machine import GIB, Gpu, Machine
from backend.presets import presets
from backend.runs import LLAMAFACTORY_RUN, RAY_DRIVER, Plan, start_env
from backend.runs.folder import Run

NOW = datetime(2026, 11, 21, 9, 5, 12)
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
LAPTOP = Machine(cores=8, python="/usr/bin/python3")
GPUS = tuple(Gpu(i, "H100", 80 * GIB, 80 * GIB, (9, 0)) for i in range(4))
NODE = Machine(device="cuda", gpus=GPUS, cores=64, python="/usr/bin/python3")


def text(made: Plan) -> str:
    files = "".join(
        f"\n# {name}\n{body}" for name, body in made.files.items() if name not in (RAY_DRIVER, LLAMAFACTORY_RUN)
    )
    others = "".join(f"\n# {node}\n{made.command(node)}\n" for node in made.other_nodes)
    return f"{made.command()}\n{others}{files}\n# {' '.join(made.notes)}\n"


TWO = {"launch.rendezvous": "static", "launch.master_addr": "10.0.0.1", "launch.nproc_per_node": 4}
HOSTS = {"launch.hostfile": ("worker-1 slots=4", "worker-2 slots=4")}
# One of each launcher, alone and over two nodes of four GPUs.
LAUNCHED = {
    f"{launcher}-{where}": {"parallel.strategy": strategy, "launch.launcher": launcher, **more}
    for launcher, strategy in (("torchrun", "ddp"), ("accelerate", "zero3"), ("deepspeed", "zero2"))
    for where, more in (("one-node", {"launch.nproc_per_node": 4}), ("two-nodes", TWO))
}
LAUNCHED["deepspeed-two-nodes"] |= HOSTS
LAUNCHED["torchrun-elastic"] = {"parallel.strategy": "ddp", **TWO, "launch.rendezvous": "elastic"}
LAUNCHED["ray"] = {
    "launch.place": "ray",
    "parallel.strategy": "fsdp2",
    "launch.nnodes": 2,
    "ray.resources": ("accelerator_type:H100=0.001",),
}
LAUNCHED["kubernetes"] = {
    "launch.place": "kubernetes",
    "parallel.strategy": "fsdp2",
    "launch.nnodes": 2,
    "kubernetes.image": "registry/footplate:1",
    "kubernetes.volumes": ("runs=/runs",),
    "kubernetes.queue": "research",
    "kubernetes.tolerations": ("dedicated=training:NoSchedule",),
}
LAUNCHED["kubeflow"] = {**LAUNCHED["kubernetes"], "kubernetes.kubeflow_runtime": "torch-distributed"}
LAUNCHED["llamafactory"] = {
    "launch.trainer": "llamafactory",
    "llamafactory.environment": "/opt/llamafactory",
    "llamafactory.template": "qwen3",
    "model.source": "hub",
    "model.hub_id": "Qwen/Qwen3-8B",
    "data.source": "files",
    "data.files": ("/data/train.jsonl",),
    "parallel.strategy": "zero2",
}
LAUNCHED["megatron"] = {
    **LAUNCHED["llamafactory"],
    "llamafactory.backend": "megatron",
    "llamafactory.tensor_parallel_size": 2,
    "llamafactory.pipeline_parallel_size": 2,
    "method.kind": "full",
    "parallel.strategy": "ddp",
}
LAUNCHED["ktransformers"] = {
    **LAUNCHED["llamafactory"],
    "llamafactory.backend": "ktransformers",
    "launch.launcher": "accelerate",
    "model.hub_id": "Qwen/Qwen3-30B-A3B",
    "parallel.strategy": "fsdp2",
}
LAUNCHED["slurm"] = {
    "launch.place": "slurm",
    "parallel.strategy": "fsdp2",
    "launch.nproc_per_node": 4,
    "slurm.partition": "gpu",
    "slurm.time_limit": "1-00:00:00",
    "slurm.setup": ("module load cuda",),
    "slurm.extra": ("--reservation=team",),
}
LAUNCHED["python"] = {"launch.launcher": "python"}


def golden(name, made):
    """UPDATE_GOLDEN=1 rewrites the golden files; review the difference."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(made)
    assert path.read_text() == made


@pytest.mark.parametrize("preset", presets(), ids=lambda p: p.name)
def test_golden(preset):
    golden(preset.name, text(plan(preset.spec, preset.machine)))


@pytest.mark.parametrize("name", LAUNCHED)
def test_golden_launchers(name):
    golden(f"launch-{name}", text(plan(edit(RunSpec(), LAUNCHED[name]), NODE)))


@pytest.mark.parametrize(
    ("patch", "machine", "says"),
    [
        ({}, LAPTOP, ["store_type=file", "--nproc-per-node=1", "OMP_NUM_THREADS=8"]),
        ({"parallel.strategy": "ddp", "launch.nproc_per_node": 2}, LAPTOP, ["--nproc-per-node=2", "OMP_NUM_THREADS=4"]),
        ({"launch.launcher": "python"}, LAPTOP, ["python3 -m backend.train"]),
        ({}, NODE, ["CUDA_VISIBLE_DEVICES=0 "]),
        ({"parallel.strategy": "ddp", "launch.devices": (1, 3)}, NODE, ["CUDA_VISIBLE_DEVICES=1,3"]),
        ({"parallel.strategy": "ddp", "launch.nproc_per_node": 4}, NODE, ["CUDA_VISIBLE_DEVICES=0,1,2,3", "=16"]),
        ({"launch.omp_num_threads": 3}, LAPTOP, ["OMP_NUM_THREADS=3"]),
        ({"launch.env": {"OMP_NUM_THREADS": "7", "A": "b c"}}, LAPTOP, ["OMP_NUM_THREADS=7", "A='b c'"]),
        ({"launch.device": "cpu"}, NODE, ["--nproc-per-node=1"]),
    ],
)
def test_command(patch, machine, says):
    command = plan(edit(RunSpec(), patch), machine).command()
    for part in says:
        assert part in command
    assert ("CUDA_VISIBLE_DEVICES" in command) == (machine is NODE and patch.get("launch.device") != "cpu")


def test_a_part_of_a_gpu_is_selected_by_its_name():
    """A number means the first part of the GPU, which another run may use."""
    part = replace(NODE, gpus=(replace(NODE.gpus[0], uuid="MIG-7", only_by_uuid=True),))
    made = plan(RunSpec(), part)
    assert (made.env["CUDA_VISIBLE_DEVICES"], made.devices) == ("MIG-7", {"MIG-7": "GPU 0"})
    whole = replace(NODE, gpus=(replace(NODE.gpus[0], uuid="GPU-7"),))
    assert plan(RunSpec(), whole).env["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [("torchrun", {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}), ("deepspeed", {"HIP_VISIBLE_DEVICES"})],
)
def test_amd_gpus_are_selected_with_the_variable_that_hip_prefers(launcher, variables):
    """One that the shell sets would override CUDA_VISIBLE_DEVICES. The deepspeed launcher (0.19, launcher/runner.py)
    asks torch, which sees two devices then: `--include=localhost:1,3` failed with "No slot '3'"."""
    amd = replace(NODE, gpus=tuple(replace(gpu, capability=(0, 0)) for gpu in NODE.gpus))
    spec = edit(RunSpec(), {"parallel.strategy": "ddp", "launch.devices": (1, 3), "launch.launcher": launcher})
    found = {name: value for name, value in plan(spec, amd).env.items() if name.endswith("VISIBLE_DEVICES")}
    assert found == dict.fromkeys(variables, "1,3")
    assert "HIP_VISIBLE_DEVICES" not in plan(spec, NODE).env
    for machine, include in ((amd, "--include=localhost:0,1"), (NODE, "--include=localhost:1,3")):
        assert (include in plan(spec, machine).argv) == (launcher == "deepspeed")


def test_a_run_waits_for_devices_by_their_noun():
    assert plan(RunSpec(), NODE).devices == {"cuda-0": "GPU 0"}
    assert plan(RunSpec(), replace(NODE, device="npu")).devices == {"npu-0": "NPU 0"}
    assert plan(RunSpec(), LAPTOP).devices == {"cpu": "the CPU"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_config_file(stage):
    made = plan(edit(RunSpec(), {"parallel.strategy": f"zero{stage}", "parallel.bucket_cap_mb": 50}), LAPTOP)
    found = json.loads(made.files["deepspeed.json"])
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (stage, 25 * 1024**2)
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is (stage == 3)
    assert {found[name] for name in found if name.startswith(("train_", "gradient_"))} == {"auto"}
    assert made.env["DS_ACCELERATOR"] == "cpu"
    assert "DS_ACCELERATOR" not in plan(edit(RunSpec(), {"parallel.strategy": f"zero{stage}"}), NODE).env


def test_ddp_has_no_config_file():
    assert set(plan(edit(RunSpec(), {"parallel.strategy": "ddp"}), LAPTOP).files) == {"spec.yaml", "resolved.json"}


@pytest.mark.parametrize(
    ("own", "given", "allocator", "streams"),
    [
        ({}, {}, "expandable_segments:True", "1"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {}, "backend:native", "1"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {}, "backend:native", "1"),
        ({"PYTORCH_HIP_ALLOC_CONF": "backend:native"}, {}, "backend:native", "1"),
        ({"TORCH_NCCL_AVOID_RECORD_STREAMS": "0"}, {}, "expandable_segments:True", "0"),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "backend:native", "1"),
        ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, None, "1"),  # torch reads that name too
    ],
)
def test_default_variables_do_not_override_the_environment(own, given, allocator, streams):
    """In the shell command and in the supervisor."""
    made = plan(edit(RunSpec(), {"launch.env": given}), NODE)
    names = ("PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS")
    shown = replace(made, argv=("printenv", *names) if allocator else ("printenv", names[1]))
    shell = {"PATH": os.defpath, **own}
    out = subprocess.run(["bash", "-c", shown.command()], env=shell, capture_output=True, text=True, check=True).stdout
    assert out.split() == [value for value in (allocator, streams) if value]
    started = start_env(own, made.defaults, made.env)
    assert [started.get(name) for name in names] == [allocator, streams]


def test_cuda_env_defaults_are_for_cuda_and_can_be_disabled():
    assert plan(RunSpec(), NODE).defaults
    assert not plan(RunSpec(), LAPTOP).defaults.keys() & plan(RunSpec(), NODE).defaults.keys()
    on_cpu = plan(edit(RunSpec(), {"launch.device": "cpu"}), NODE)
    assert not on_cpu.defaults.keys() & plan(RunSpec(), NODE).defaults.keys()
    assert not plan(edit(RunSpec(), {"launch.cuda_env_defaults": False}), NODE).defaults


def test_scripts_of_the_other_nodes(tmp_path):
    """One command per node, which differ in the node rank only; an elastic run has one for all, without a
    rank, and only the node that it is started on hosts the rendezvous."""
    made = plan(edit(RunSpec(), {**LAUNCHED["torchrun-two-nodes"], "launch.nnodes": 3, "launch.node_rank": 1}), NODE)
    assert list(made.other_nodes) == ["node-0", "node-2"]
    assert made.command("node-2").replace("--node-rank=2", "--node-rank=1") == made.command()
    run = Run.create(tmp_path, "three", made, NOW)
    assert run.plan() == made
    for node in made.other_nodes:
        script = run.path / f"{node}.sh"
        assert os.access(script, os.X_OK)
        assert made.command(node) in script.read_text()
        assert run.node_commands()[node] == f"bash {script}"
    elastic = plan(edit(RunSpec(), LAUNCHED["torchrun-elastic"]), NODE)
    assert list(elastic.other_nodes) == ["node"]
    assert elastic.command("node").replace("is_host=0", "is_host=1") == elastic.command()
    assert "rank=" not in elastic.command()


def test_plan_command_prints_every_node(capsys):
    more = [f"--set={name}={value}" for name, value in LAUNCHED["torchrun-two-nodes"].items()]
    assert main(["plan", "first-run", *more]) == 0
    said = capsys.readouterr().out
    assert "# node-1: run on another node" in said
    assert "--node-rank=0" in said
    assert "--node-rank=1" in said
    assert main(["plan", "first-run", "--json", *more]) == 0
    assert "--node-rank=1" in json.loads(capsys.readouterr().out)["others"]["node-1"]


def test_script_quotes_files_and_arguments(tmp_path):
    """Characters that are special in a shell arrive unchanged."""
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


def test_different_gpus_are_numbered_in_pci_bus_order() -> None:
    """GPU 1 of the page and the rules is GPU 1 of the run."""
    other = replace(NODE, gpus=(*NODE.gpus[:1], replace(NODE.gpus[1], name="A10")))
    assert plan(RunSpec(), other).env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in plan(RunSpec(), NODE).env


def test_nccl_variables_of_gpus_without_peer_access() -> None:
    """accelerate refuses to start on such GPUs otherwise; its own launcher sets the same variables."""
    gpus = tuple(Gpu(i, "GeForce RTX 4090", GIB, GIB, (8, 9)) for i in range(2))
    spec = edit(RunSpec(), {"parallel.strategy": "ddp", "launch.cuda_env_defaults": False})
    old = Machine("cuda", gpus, driver_version="550.40.06")
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert plan(spec, old).defaults == {**loopback, "NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    own = edit(spec, {"launch.env": {"NCCL_P2P_DISABLE": "0"}})
    assert "NCCL_P2P_DISABLE" not in plan(own, old).defaults
    for machine in (replace(old, driver_version="550.40.07"), replace(old, driver_version="")):
        assert plan(spec, machine).defaults == loopback


def test_threads_on_a_cpu_wait_without_spinning() -> None:
    """Unless the user decides, in the environment or in launch.env."""
    assert plan(RunSpec(), LAPTOP).defaults["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 'OMP_WAIT_POLICY="${OMP_WAIT_POLICY-PASSIVE}"' in plan(RunSpec(), LAPTOP).command()
    assert "OMP_WAIT_POLICY" not in plan(RunSpec(), NODE).defaults, "a GPU computes"
    mine = edit(RunSpec(), {"launch.env": {"OMP_WAIT_POLICY": "ACTIVE"}})
    assert "OMP_WAIT_POLICY" not in plan(mine, LAPTOP).defaults


def test_no_rendezvous_of_one_node_is_open() -> None:
    """torchrun has no TCPStore, and gloo and NCCL listen on the loopback interface; several nodes need both."""
    for launcher in ("torchrun", "accelerate", "deepspeed"):
        one = edit(RunSpec(), {"parallel.strategy": "zero2", "launch.launcher": launcher})
        made = plan(one, NODE)
        assert (made.defaults["GLOO_SOCKET_IFNAME"], made.defaults["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
        assert ("store_type=file" in made.command()) == (launcher != "deepspeed"), "its ranks alone meet"
        assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in made.env) == (launcher != "deepspeed")
        two = plan(edit(one, {**TWO, "launch.hostfile": ("a slots=4", "b slots=4")}), NODE)
        assert "GLOO_SOCKET_IFNAME" not in two.defaults and "store_type=file" not in two.command()
    for place, file in (("slurm", "slurm-node.sh"), ("ray", "ray.json"), ("kubernetes", "kubernetes.yaml")):
        job = {"parallel.strategy": "ddp", "launch.place": place, "launch.nnodes": 1}
        assert "store_type=file" in plan(edit(RunSpec(), job), NODE).files[file]
    mine = edit(RunSpec(), {"parallel.strategy": "ddp", "launch.env": {"GLOO_SOCKET_IFNAME": "eth0"}})
    assert "GLOO_SOCKET_IFNAME" not in plan(mine, LAPTOP).defaults


def test_each_elastic_run_has_its_own_rendezvous_id() -> None:
    """It is in the environment of all nodes, because every user can read the arguments of a process."""
    elastic = edit(RunSpec(), LAUNCHED["torchrun-elastic"])
    first, second = (plan(elastic, NODE).with_random_id() for _ in range(2))
    drawn = first.env["PET_RDZV_ID"]
    assert len(drawn) == 32 and drawn != second.env["PET_RDZV_ID"]
    assert f"PET_RDZV_ID={drawn} " in first.run_script() and f"PET_RDZV_ID={drawn} " in first.node_script("node")
    mine = plan(edit(elastic, {"launch.rdzv_id": "mine"}), NODE).with_random_id()
    assert mine.env["PET_RDZV_ID"] == "mine"
