"""SkyPilot tasks: several nodes need a volume, in whose folder they all start."""

import os
import re
import subprocess
from dataclasses import replace

import pytest
import yaml

from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect.facts import InputFacts
from backend.launch.clusters import skypilot
from backend.machine import GIB, Gpu, machines
from backend.resolve import resolve

MACHINE = machines()["2x8x80gb"]
ON_NODES = {"launch.place": "kubernetes", "parallel.strategy": "fsdp2", "launch.nproc_per_node": 8}


@pytest.mark.parametrize(
    ("nodes", "volumes", "refused"),
    [
        (1, (), ""),
        (2, (), "launch.nnodes: 2 nodes need a shared folder"),
        (2, ("runs=/runs",), ""),
        (2, ("/mnt=/runs",), "kubernetes.volumes: SkyPilot mounts volumes by name"),
    ],
)
def test_several_nodes_of_skypilot_need_a_volume(nodes, volumes, refused):
    spec = edit(RunSpec(), {**ON_NODES, "launch.nnodes": nodes, "kubernetes.volumes": volumes})
    found = skypilot.refusals(spec, resolve(spec, MACHINE))
    assert len(found) == bool(refused) and "".join(found).startswith(refused)


def test_all_nodes_of_skypilot_start_in_the_folder_of_the_volume(tmp_path):
    volume = tmp_path / "a volume"
    spec = edit(RunSpec(), {**ON_NODES, "launch.nnodes": 2, "kubernetes.volumes": (f"runs={volume}",)})
    task = yaml.safe_load(skypilot.files(spec, MACHINE, InputFacts())["task.yaml"])
    (tmp_path / "python").write_text("#!/bin/sh\nls spec.yaml; pwd; echo $PET_NODE_RANK of $PET_NNODES\n")
    (tmp_path / "python").chmod(0o700)
    printed = []
    for rank in (0, 1):
        disk = tmp_path / f"node-{rank}"
        disk.mkdir()
        (disk / "spec.yaml").touch()
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "2"}
        env |= {"SKYPILOT_TASK_ID": "sky-7", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        done = subprocess.run(
            ["bash", "-c", task["run"]], cwd=disk, env=env, capture_output=True, text=True, check=True
        )
        printed.append(done.stdout)
    assert printed == [f"spec.yaml\n{volume}/sky-7\n{rank} of 2\n" for rank in (0, 1)]


def test_skypilot_copies_the_files_of_all_datasets(tmp_path):
    names = ("a.jsonl", "b.jsonl", "v.jsonl", "other.jsonl")
    paths = [str(tmp_path / name) for name in names]
    for path in paths:
        (tmp_path / path).touch()
    hub = {"source": "hub", "hub_id": "x/y", "files": paths[3:], "validation": "files", "validation_files": paths[2:3]}
    sources = [{"source": "files", "files": paths[:1]}, {"source": "files", "files": paths[:2]}, hub]
    spec = edit(RunSpec(), {**ON_NODES, "data.sources": sources})
    task = yaml.safe_load(skypilot.files(spec, MACHINE, InputFacts())["task.yaml"])
    assert [path for path in task["file_mounts"] if path in paths] == paths[:3], "hidden options name no files"


def test_skypilot_copies_what_patterns_and_links_lead_to(tmp_path):
    """The run looks for its files under the paths of the options, and SkyPilot copies links as links."""
    real, cache = tmp_path / "disk", tmp_path / "snapshot"
    for folder in (real, cache):
        folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.txt", "blob"):
        (real / name).touch()
    (tmp_path / "data").symlink_to(real)
    (tmp_path / "link.jsonl").symlink_to(real / "a.jsonl")
    (cache / "config.json").symlink_to(real / "blob")  # as in the cache of the Hub
    (cache / "removed.bin").symlink_to(real / "removed")  # leads to nothing
    files = [f"{tmp_path}/data/*.jsonl", f"{tmp_path}/link.jsonl", f"{tmp_path}/none/*.jsonl"]
    chosen = {"data.source": "files", "data.files": files, "model.source": "path", "model.path": str(cache)}
    task = skypilot.files(edit(RunSpec(), {**ON_NODES, **chosen}), MACHINE, InputFacts())["task.yaml"]
    mounts = {path: source for path, source in yaml.safe_load(task)["file_mounts"].items() if str(tmp_path) in source}
    linked = {"data/a.jsonl": "a.jsonl", "data/b.jsonl": "b.jsonl", "link.jsonl": "a.jsonl"}
    linked |= {"snapshot/config.json": "blob"}
    assert mounts == {f"{tmp_path}/{path}": str(real / source) for path, source in linked.items()}


def test_skypilot_has_no_environment_of_another_trainer():
    chosen = {"launch.trainer": "llamafactory", "llamafactory.environment": "/env", "launch.nnodes": 1}
    spec = edit(RunSpec(), {**ON_NODES, **chosen})
    task = yaml.safe_load(skypilot.files(spec, MACHINE, InputFacts())["task.yaml"])
    assert "/env/bin/python" in task["run"] and "llamafactory" not in task["setup"]
    found, *_ = skypilot.refusals(spec, resolve(spec, MACHINE))
    assert found.startswith("launch.trainer: the task installs Footplate")


@pytest.mark.parametrize("name", ["a - b", "--a--", "Lr = 1e-4", "\u6a21\u578b"])
def test_skypilot_accepts_the_name_of_the_task(name):
    """Source: skypilot sky/task.py, _VALID_NAME_REGEX."""
    spec = edit(RunSpec(), {**ON_NODES, "logging.run_name": name})
    task = yaml.safe_load(skypilot.files(spec, MACHINE, InputFacts())["task.yaml"])
    assert re.fullmatch("[a-z0-9]+(?:[._-]{1,2}[a-z0-9]+)*", task["name"])


@pytest.mark.parametrize(
    ("option", "chosen", "is_copied"),
    [
        ("lora.adapter_path", {}, True),
        ("lora.adapter_path", {"method.kind": "full"}, False),
        ("data.chat_template_file", {"data.chat_template": "file"}, True),
        ("save.resume_path", {"save.resume_from": "path"}, True),
        ("model.path", {"model.source": "path"}, True),
        ("parallel.nvme_path", {"parallel.strategy": "zero3", "parallel.offload_param": "nvme"}, False),
    ],
)
def test_skypilot_copies_what_the_run_reads(tmp_path, option, chosen, is_copied):
    """The machines of the cloud have nothing else of this one. An NVMe folder is on the node's own disk."""
    spec = edit(RunSpec(), {**ON_NODES, option: str(tmp_path), **chosen})
    mounts = yaml.safe_load(skypilot.files(spec, MACHINE, InputFacts())["task.yaml"]).get("file_mounts", {})
    assert (str(tmp_path) in mounts) == is_copied


@pytest.mark.parametrize(
    ("gpu", "gib", "name"),
    [
        ("A100", 80, "A100-80GB"),  # as presets/machines/4x80gb.yaml
        ("A100-SXM4-80GB", 80, "A100-80GB"),
        ("A100-SXM4-40GB", 40, "A100"),
        ("Tesla V100-SXM2-32GB", 32, "V100-32GB"),
        ("Tesla V100-SXM2-16GB", 16, "V100"),
        ("Tesla T4", 15, "T4"),
        ("H100 80GB HBM3", 80, "H100"),
        ("GeForce RTX 4090", 24, "RTX4090"),
        ("RTX A6000", 48, "RTXA6000"),
        ("RTX 6000 Ada Generation", 48, "RTX6000-Ada"),
        ("RTX PRO 6000 Blackwell Server Edition", 96, "RTXPRO6000"),
        ("AMD Instinct MI300X OAM", 192, "MI300X"),
    ],
)
def test_skypilot_rents_the_gpus_that_were_checked(gpu, gib, name):
    """SkyPilot's A100 has 40 GB, and its V100 16 GB."""
    machine = replace(MACHINE, gpus=tuple(Gpu(number, gpu, gib * GIB, gib * GIB) for number in range(8)))
    task = yaml.safe_load(skypilot.files(edit(RunSpec(), ON_NODES), machine, InputFacts())["task.yaml"])
    assert task["resources"] == {"accelerators": f"{name}:8"}


def test_skypilot_gets_no_gpus_of_a_machine_without_them():
    """The check reports it as an error."""
    spec = edit(RunSpec(), {**ON_NODES, "launch.device": "cuda"})
    task = yaml.safe_load(skypilot.files(spec, machines()["laptop"], InputFacts())["task.yaml"])
    assert task["resources"] == {"cpus": "8+"}
