"""Plan: the exact command, environment and files of a run.

It reads no clock, no environment and no ports, so that equal input gives equal text. Preview and launch use the same
Plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import InvalidVersion, Version

from backend import registry
from backend.config import RunSpec
from backend.config.options import effective
from backend.inspect.facts import InputFacts
from backend.launch import accelerate_config, clusters, launchers, llamafactory
from backend.machine import Machine
from backend.presets import dump
from backend.resolve import ResolvedRun, device_names, resolve, selected_gpus, threads_per_process
from backend.runs import (
    ACCELERATE,
    DATASET_INFO,
    DEEPSPEED,
    ENV_SYNONYMS,
    FSDP,
    HOSTFILE,
    JOB_SCRIPT,
    JOIN,
    KUBERNETES_JOB,
    LLAMAFACTORY,
    LLAMAFACTORY_RUN,
    NODE_JOB,
    RANDOM_ID,
    RAY_DRIVER,
    RAY_JOB,
    RENDEZVOUS,
    RESOLVED,
    SPEC,
    Plan,
)

# torch 2.13 still reads the first variable; the second has been the default behavior since torch 2.8.
CUDA_DEFAULTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
# On a CPU, the threads of a process wait for each other many times in each step. libgomp, which torch's wheels contain,
# lets them spin until then, and on a busy CPU they take each other's cores (docs/bench.md).
CPU_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}
NO_PEER_ACCESS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
# Log lines start with the global rank instead of the local rank.
GLOBAL_RANK_PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[default${rank}]:"}
# For one node, where gloo and NCCL otherwise listen on an interface of the network.
GLOO_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
LOOPBACK = {**GLOO_LOOPBACK, "NCCL_SOCKET_IFNAME": "lo"}
# torchrun opens no TCPStore for the ranks. The ranks of one node meet in a file (backend/train/rendezvous.py). A node
# that joins an elastic run needs the address of the store, which torch 2.13 otherwise shares only in the first round
# (elastic/rendezvous/dynamic_rendezvous.py, next_rendezvous): all nodes would wait for a minute, then fail.
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Shown above each file in the preview.
ABOUT: Mapping[str, str] = {
    SPEC: "The options that differ from the defaults. `footplate run spec.yaml` starts the same run.",
    RESOLVED: "Values derived from the options and the machine. The trainer compares them with what each rank finds.",
    DEEPSPEED: 'The Trainer fills in "auto" from its own arguments, so that each value is set in one place. '
    "Bucket sizes are in elements; parallel.bucket_cap_mb is converted at two bytes per element.",
    FSDP: "Precision and mesh are arguments of the Trainer. Layers to wrap are found in the model unless they are set. "
    "cpu_ram_efficient_loading: rank 0 reads the weights and sends the others their shards.",
    ACCELERATE: "Read by accelerate launch. The Trainer gets the same values, so neither overrides the other.",
    JOB_SCRIPT: "Submitted with sbatch. It starts slurm-node.sh on each node, and puts the job back into the queue "
    "after an interruption.",
    NODE_JOB: "Started by Slurm on each node of the job.",
    RAY_JOB: "What the Ray job reserves on each node, and the command that it starts there.",
    RAY_DRIVER: "Started by Ray on the head node: it reserves the nodes, starts the command of ray.json on each, and "
    "starts it again after a failure.",
    KUBERNETES_JOB: "The objects that are created in the cluster. {JOB_NAME} and {RUN_FOLDER} are filled in at the "
    "start.",
    LLAMAFACTORY: "LLaMA-Factory's configuration of the same training.",
    DATASET_INFO: "LLaMA-Factory's description of the data files.",
    LLAMAFACTORY_RUN: "Started by the launcher: it trains with LLaMA-Factory, and reports to the run's folder.",
    RENDEZVOUS: "Used by llamafactory-run.py: the ranks of one node meet in a file that only you can open, and all "
    "ranks sign the objects that they send.",
    HOSTFILE: "One node per line: its host name and its number of slots (processes).",
}


def plan(spec: RunSpec, machine: Machine, facts: InputFacts | None = None, run: ResolvedRun | None = None) -> Plan:
    """The launch plan of `spec` on `machine`. Never raises: rules report combinations that cannot work."""
    spec = effective(spec)
    run = run or resolve(spec, machine, facts)
    made = one_node(spec, machine, run, facts)
    cluster = clusters.job_of(spec)
    return cluster.as_job(made, spec, run, machine) if cluster else made


def one_node(spec: RunSpec, machine: Machine, run: ResolvedRun, facts: InputFacts | None = None) -> Plan:
    """What runs on one node, on a cluster too."""
    return Plan(
        argv=launchers.command(spec, run, machine, spec.launch.node_rank),
        env=_env(spec, run, machine),
        files=_files(spec, run, facts),
        notes=_notes(spec, run),
        defaults=_defaults(spec, run, machine),
        other_nodes=launchers.other_commands(spec, run, machine),
        devices=_devices(run, machine),
        stop_timeout=spec.save.stop_timeout,
        then=(machine.python, "-m", "backend", "retry", ".", "--automatic") if spec.train.half_lr_retries else (),
    )


def _devices(run: ResolvedRun, machine: Machine) -> dict[str, str]:
    """What the run waits for on this machine: its GPUs, or other devices, by UUID if they have one, or the CPU."""
    device = registry.DEVICES[run.device]
    if not run.device_ids:
        return {run.device: f"the {device.label}"}
    uuids = {gpu.id: gpu.uuid for gpu in machine.gpus}
    return {uuids.get(number) or f"{run.device}-{number}": f"{device.noun} {number}" for number in run.device_ids}


def _files(spec: RunSpec, run: ResolvedRun, facts: InputFacts | None) -> dict[str, str]:
    files = {SPEC: dump(spec), RESOLVED: run.to_json()}
    if run.engine.config_file:
        files[run.engine.config_file] = run.engine.config_text(spec)
    if spec.launch.launcher == "accelerate":
        files[ACCELERATE] = accelerate_config.text(spec, run)
    if spec.launch.trainer == "llamafactory":
        files |= llamafactory.run_files(spec, run, facts.format if facts else "", facts.shape if facts else None)
    if spec.launch.hostfile:
        files[HOSTFILE] = "\n".join(spec.launch.hostfile) + "\n"
    return files


def _env(spec: RunSpec, run: ResolvedRun, machine: Machine) -> dict[str, str]:
    """Environment variables to set. The variables of launch.env override the others."""
    device, launcher = registry.DEVICES[run.device], spec.launch.launcher
    cluster = clusters.job_of(spec)
    cores = clusters.cores(spec, run, machine)
    env = {"OMP_NUM_THREADS": str(threads_per_process(spec, run.nproc_per_node, cores))}
    env["PYTHONUNBUFFERED"] = "1"  # so that log lines appear immediately
    env["TOKENIZERS_PARALLELISM"] = "false"  # dataloader workers fork after the tokenizer was used
    env |= run.engine.environment(run.device) | llamafactory.environment(spec)
    if run.device == "cpu" and launcher == "deepspeed":
        env["DS_ACCELERATOR"] = "cpu"  # DeepSpeed's launcher uses an accelerator otherwise, with any engine
    if device.visible_devices_env and not cluster:  # a cluster sets it itself
        visible = _visible_devices(spec, run, machine)
        env |= dict.fromkeys(visible, ",".join(device_names(run, machine)))
    if run.device == "cuda" and len({gpu.name for gpu in machine.gpus}) > 1:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # device ids as in nvidia-smi; by default the fastest GPU is 0
    if run.nnodes > 1 and launcher in ("torchrun", "accelerate"):
        env |= GLOBAL_RANK_PREFIX
    if launchers.has_rendezvous_file(spec, run) or (run.nnodes > 1 and spec.launch.rendezvous == "elastic"):
        env |= NO_SHARED_STORE
    if run.nnodes > 1 and spec.launch.rendezvous == "elastic":  # every user can read the arguments of a process
        env["PET_RDZV_ID"] = spec.launch.rdzv_id or RANDOM_ID
    if launchers.has_rendezvous_file(spec, run) and launcher == "accelerate":
        env |= launchers.FILE_RENDEZVOUS_ENV
    return {**env, **spec.launch.env}


def _visible_devices(spec: RunSpec, run: ResolvedRun, machine: Machine) -> list[str]:
    """The variables that select the devices. The deepspeed launcher sets CUDA_VISIBLE_DEVICES itself, which HIP ignores
    if the other one is set, and counts the devices that this one leaves (see `launchers.command`)."""
    starts_deepspeed = spec.launch.launcher == "deepspeed"
    found = [] if starts_deepspeed else [registry.DEVICES[run.device].visible_devices_env]
    if run.device == "cuda" and machine.uses_hip and not (starts_deepspeed and run.nnodes > 1):
        found.append(registry.HIP_VISIBLE_DEVICES)
    return found


def _defaults(spec: RunSpec, run: ResolvedRun, machine: Machine) -> dict[str, str]:
    """Environment variables to set unless the variable, under any of its names, is set already."""
    found: dict[str, str] = {}
    if run.nnodes == 1 and (run.world_size > 1 or run.engine.needs_collectives):
        found |= LOOPBACK if run.device == "cuda" else GLOO_LOOPBACK
    found |= CPU_DEFAULTS if run.device == "cpu" else {}
    if run.device == "cuda" and spec.launch.cuda_env_defaults:
        found |= CUDA_DEFAULTS
    found |= NO_PEER_ACCESS if run.device == "cuda" and _lacks_peer_access(run, machine) else {}
    user_set = spec.launch.env.keys()
    return {name: value for name, value in found.items() if not {name, *ENV_SYNONYMS.get(name, ())} & user_set}


def _lacks_peer_access(run: ResolvedRun, machine: Machine) -> bool:
    """Whether the selected GPUs have no peer-to-peer access: RTX 40 with a driver before 550.40.7. accelerate 1.15
    state.py refuses to start on them unless NO_PEER_ACCESS is set."""
    try:
        old = Version(machine.driver_version) < Version("550.40.7")
    except InvalidVersion:
        return False
    gpus = selected_gpus(run, machine) or machine.gpus
    return old and any("RTX 40" in gpu.name for gpu in gpus)


def _notes(spec: RunSpec, run: ResolvedRun) -> tuple[str, ...]:
    label = registry.DEVICES[run.device].label
    devices = f"{run.nproc_per_node} x {label}" if run.nproc_per_node > 1 else label
    devices = f"{run.nnodes} nodes, each with {devices}" if run.nnodes > 1 else devices
    backend = f" ({run.backend} backend)" if run.backend else ""
    notes = [f"Trains on {devices}{backend}."]
    if clusters.job_of(spec):
        notes.append("Every node of the job needs the same Python environment and the run folder under the same path.")
    elif run.nnodes > 1:
        script = f"{JOIN}.sh" if spec.launch.rendezvous == "elastic" else f"{JOIN}-N.sh"
        notes.append(
            "Every node needs the same Python environment, and the run folder under the same path. "
            f"Start {script} on each of the other nodes."
        )
    return tuple(notes)
