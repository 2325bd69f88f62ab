"""SkyPilot: a spec as a task that SkyPilot runs on machines of a cloud.

Export only: SkyPilot rents the machines, copies the folder to them and starts the task. torchrun reads nodes, node rank
and master address from PET_* variables, which the task sets. With a volume, the task copies the folder there: SkyPilot
copies it to a disk of each node.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import yaml

from backend.config import RunSpec
from backend.config.options import MACHINE_FOLDERS, changes, effective, get, options
from backend.config.processes import DEFAULT_PORT
from backend.data.reading import DataFileError, expand
from backend.inspect.facts import InputFacts
from backend.launch.clusters.share import as_job_spec, with_python
from backend.launch.plan import one_node
from backend.machine import GIB, Gpu, Machine, known_gpu
from backend.paths import HOME
from backend.resolve import ResolvedRun, resolve

TASK = "task.yaml"
SOURCE = "~/footplate"  # where Footplate is copied on the machines of the cloud
PACKAGE = ("pyproject.toml", "README.md", "LICENSE", "backend", "webui", "presets", "assets")  # what pip install needs
COMMAND = f"sky launch {TASK}"
OTHER_NAMES = {"RTX 6000 Ada": "RTX6000-Ada", "RTX PRO 6000": "RTXPRO6000", "H20-3e": "H20"}  # product -> SkyPilot's
# A GPU's name alone is that of the smaller one: name -> GiB from which it is the larger one, and the larger one's name.
LARGER_GPUS = {"A100": (60, "A100-80GB"), "V100": (24, "V100-32GB")}


def files(spec: RunSpec, machine: Machine, facts: InputFacts) -> dict[str, str]:
    """Name -> text of the files of the task's folder."""
    job = effective(as_job_spec(spec, machine))
    run = resolve(job, machine, facts)
    made = one_node(job, machine, run, facts)
    trainer = replace(made, argv=with_python(made.argv, machine, "python"))
    has_gpus = run.device != "cpu" and machine.gpus
    gpus = f"{_cloud_name(machine.gpus[0])}:{run.nproc_per_node}" if has_gpus else ""
    is_checkout = (HOME / "pyproject.toml").is_file()
    source = {f"{SOURCE}/{name}": str(HOME / name) for name in PACKAGE} if is_checkout else {}
    mounts = {**source, **_inputs(job)}
    volumes = {path: name for name, path in (line.split("=") for line in job.kubernetes.volumes)}
    enter = "".join(ENTER.format(path=shlex.quote(path)) for path in [*volumes][:1])
    task: dict[str, Any] = {
        "name": re.sub(r"[^a-z0-9]+", "-", spec.logging.run_name.lower()).strip("-") or "footplate",
        "num_nodes": run.nnodes,
        "resources": {"accelerators": gpus} if gpus else {"cpus": f"{max(1, machine.cores)}+"},
        "workdir": ".",
        **({"file_mounts": mounts} if mounts else {}),
        **({"volumes": volumes} if volumes else {}),
        "setup": f"pip install {SOURCE if is_checkout else 'footplate'}\n",
        "run": enter + RUN.format(command=trainer.command(), port=DEFAULT_PORT),
    }
    return {**made.files, TASK: _Dumper.text(task)}


def refusals(spec: RunSpec, run: ResolvedRun) -> list[str]:
    """What SkyPilot cannot run, as sentences that begin with the option."""
    found = [
        f"kubernetes.volumes: SkyPilot mounts volumes by name, but {line} is a folder of the node. "
        "Use NAME=/path, with the name of a SkyPilot volume."
        for line in spec.kubernetes.volumes
        if line.startswith("/")
    ]
    if spec.launch.trainer == "llamafactory":
        found.append(
            "launch.trainer: the task installs Footplate on the machines, and not LLaMA-Factory. Use Footplate's own "
            "trainer, or export the spec for LLaMA-Factory."
        )
    if run.nnodes > 1 and not spec.kubernetes.volumes:
        found.append(
            f"launch.nnodes: {run.nnodes} nodes need a shared folder for the run, but SkyPilot copies the task's "
            "folder to a local disk on each node. Set kubernetes.volumes to NAME=/path of a SkyPilot volume that all "
            "nodes can write (ReadWriteMany), or use one node."
        )
    return found


def unused(job: RunSpec) -> list[str]:
    """What the job of `as_job_spec` sets for Kubernetes only, as sentences that begin with the option."""
    return [
        f"{name}: only Kubernetes reads it, SkyPilot does not"
        for name in changes(job)
        if name.startswith("kubernetes.") and name != "kubernetes.volumes"
    ]


def _inputs(spec: RunSpec) -> dict[str, str]:
    """Path in the options -> the file or folder of this machine that the trainer reads there. `spec` has no values of
    hidden options."""
    read = (option for option in options() if option.path and option.name not in MACHINE_FOLDERS)
    named = [get(spec, option.name) for option in read if option.kind == "str"]
    for dataset in spec.data.datasets:
        for pattern in (*dataset.files, *dataset.validation_files):
            with contextlib.suppress(DataFileError):  # a rule reports it
                named += [pattern] if os.path.isdir(pattern) else map(str, expand([pattern]))
    return dict(pair for name in named if name and os.path.exists(name) for pair in _copies(os.path.abspath(name)))


def _copies(path: str) -> Iterator[tuple[str, str]]:
    """Where a file or folder is in the cloud, and what is copied there. SkyPilot copies symbolic links as links, so the
    files of a folder with links, such as a model in the cache of the Hub, are named one by one. It refuses sources that
    do not exist."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    files = list(filter(os.path.exists, found))
    for each in files if any(map(os.path.islink, files)) else [path]:
        yield each, os.path.realpath(each)


def _cloud_name(gpu: Gpu) -> str:
    """SkyPilot's name of a GPU."""
    known = known_gpu(gpu.name)
    if known and known[0] in OTHER_NAMES:
        return OTHER_NAMES[known[0]]
    words = (known[0] if known else gpu.name.upper()).split()
    words = [word for word in words if word not in ("NVIDIA", "TESLA", "GEFORCE")] or [gpu.name]
    name = "".join(words[:2]) if words[0] == "RTX" else words[0]
    least, larger = LARGER_GPUS.get(name, (0, name))
    return larger if gpu.total_bytes >= least * GIB else name


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks of lines."""

    @classmethod
    def text(cls, tree: dict[str, Any]) -> str:
        return yaml.dump(tree, Dumper=cls, sort_keys=False, width=120)


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)

# torchrun starts no rank before all nodes have joined, so every rank starts after node 0 has copied the folder. A
# managed job keeps its task ID after a recovery, and continues from its checkpoints.
ENTER = """\
folder={path}/$SKYPILOT_TASK_ID
mkdir -p "$folder" || exit 1
[ "$SKYPILOT_NODE_RANK" != 0 ] || cp -r . "$folder" || exit 1
cd "$folder"
"""
RUN = """\
export PET_NNODES=$SKYPILOT_NUM_NODES PET_NODE_RANK=$SKYPILOT_NODE_RANK
export PET_MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) PET_MASTER_PORT={port}
{command}
"""
