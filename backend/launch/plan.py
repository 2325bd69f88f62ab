"""RunSpec + Machine -> Plan: command, environment and files, to the letter.

Floor 4. Imports: below. Pure: no clock, no free-port search, no environment, so equal input gives equal text;
preview and launch are the same Plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from backend import registry
from backend.config import RunSpec
from backend.config.options import effective
from backend.config.presets import dump
from backend.engines import deepspeed, fsdp
from backend.launch import accelerate_config, hostfile
from backend.machine import Machine
from backend.resolve import PORT, backend, device, ids, include, nodes, processes, world
from backend.runs import ACCELERATE, ALIASES, DEEPSPEED, FSDP, HOSTFILE, JOIN, RANK_LOGS, SPEC, Plan

TRAINER = ("backend.train", ".")
# torch 2.13 still takes the first under this name, and does the second by itself, as it has since 2.8.
MEMORY = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
# The lines of a rank begin with its number among all nodes' ranks, instead of its number on the node.
PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[default${rank}]:"}

# A node that joins later asks for the address where the ranks meet, which torch 2.13 otherwise tells in the first round
# alone (elastic/rendezvous/dynamic_rendezvous.py, next_rendezvous): all nodes would wait a minute, and end.
TELL_AGAIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


# What people wonder about before each file.
ABOUT: Mapping[str, str] = {
    SPEC: "What differs from the defaults; footplate run spec.yaml starts the same run.",
    DEEPSPEED: 'The Trainer fills in "auto" from spec.yaml, so that each number stands in one place. '
    "Bucket sizes count numbers of two bytes.",
    FSDP: "Precision and mesh are the Trainer's own arguments. Layers to wrap are found in the model, unless named. "
    "cpu_ram_efficient_loading: one process reads the weights, and sends the others their parts.",
    ACCELERATE: "What accelerate launch reads. It says what the Trainer is told too, so neither overrules the other.",
    HOSTFILE: "A line a node: its name, and how many processes it may start.",
}


def plan(spec: RunSpec, machine: Machine) -> Plan:
    """What runs `spec` on `machine`. Never raises: what cannot work is the rules' business."""
    spec = effective(spec)
    return Plan(
        argv=_argv(spec, machine, spec.launch.node_rank),
        env=_env(spec, machine),
        files=_files(spec, machine),
        notes=_notes(spec, machine),
        defaults=_defaults(spec, machine),
        others=_others(spec, machine),
    )


def _files(spec: RunSpec, machine: Machine) -> dict[str, str]:
    files = {SPEC: dump(spec)}
    if spec.parallel.strategy in registry.DEEPSPEED:
        files[DEEPSPEED] = deepspeed.text(spec)
    if spec.parallel.strategy in registry.FSDP:
        files[FSDP] = fsdp.text(spec)
    if spec.launch.launcher == "accelerate":
        files[ACCELERATE] = accelerate_config.text(spec, machine)
    if spec.launch.hostfile:
        files[HOSTFILE] = "\n".join(spec.launch.hostfile) + "\n"
    return files


def _argv(spec: RunSpec, machine: Machine, node: int) -> tuple[str, ...]:
    return (machine.python, "-m", *LAUNCHERS[spec.launch.launcher](spec, machine, node))


def _python(spec: RunSpec, machine: Machine, node: int) -> tuple[str, ...]:
    return TRAINER


def _torchrun(spec: RunSpec, machine: Machine, node: int) -> tuple[str, ...]:
    each = (f"--nproc-per-node={processes(spec)}", f"--log-dir={RANK_LOGS}", "--tee=3")
    return ("torch.distributed.run", *_meeting(spec, node), *each, "-m", *TRAINER)


def _meeting(spec: RunSpec, node: int) -> tuple[str, ...]:
    """Where the nodes meet, and as which of them this one comes."""
    launch, port = spec.launch, spec.launch.master_port or PORT
    if launch.rendezvous == "static":
        numbers = (f"--nnodes={launch.nnodes}", f"--node-rank={node}")
        return (*numbers, f"--master-addr={launch.master_addr}", f"--master-port={port}")
    if launch.rendezvous == "elastic":
        where = f"{launch.master_addr}:{port}" if launch.nnodes > 1 else f"localhost:{launch.master_port}"
        numbers = (f"--nnodes={launch.min_nnodes}:{launch.nnodes}", f"--max-restarts={launch.max_restarts}")
        return (*numbers, f"--rdzv-id={launch.rdzv_id}", "--rdzv-backend=c10d", f"--rdzv-endpoint={where}")
    return (
        (f"--master-port={launch.master_port}",) if launch.master_port else ("--standalone",)
    )  # which finds a free one


def _accelerate(spec: RunSpec, machine: Machine, node: int) -> tuple[str, ...]:
    rank = (f"--machine_rank={node}",) if nodes(spec) > 1 else ()
    each = (f"--log_dir={RANK_LOGS}", "--tee=3")
    return ("accelerate.commands.launch", f"--config_file={ACCELERATE}", *rank, *each, "-m", *TRAINER)


def _deepspeed(spec: RunSpec, machine: Machine, node: int) -> tuple[str, ...]:
    launch, port = spec.launch, (f"--master_port={spec.launch.master_port or PORT}",)
    if nodes(spec) > 1:
        # Each node starts its own part. By ssh it would end a run by `pkill -f backend.train` on every host, and with
        # it every other run there.
        chosen = (f"--hostfile={HOSTFILE}", *((f"--include={include(spec)}",) if include(spec) else ()))
        where = (*chosen, "--no_ssh", f"--node_rank={node}", f"--master_addr={launch.master_addr}")
    else:
        visible = registry.DEVICES[device(spec, machine)].visible
        local = hostfile.included(("localhost",), ids(spec, machine)) if visible else ""
        # It would read /job/hostfile, if that is there, and start the run on those hosts by ssh.
        where = ("--hostfile=/dev/null", f"--include={local}" if local else f"--num_gpus={processes(spec)}")
    calm = ("--no_local_rank", "--log_level=error")
    return ("deepspeed.launcher.runner", *where, *port, *calm, "--module", *TRAINER)


LAUNCHERS: Mapping[str, Callable[[RunSpec, Machine, int], tuple[str, ...]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "python": _python,
}


def _others(spec: RunSpec, machine: Machine) -> dict[str, tuple[str, ...]]:
    """What the other nodes start: one command each, or, where the nodes have no numbers, one for all."""
    if nodes(spec) == 1:
        return {}
    if spec.launch.rendezvous == "elastic":
        return {JOIN: _argv(spec, machine, 0)}
    ranks = (rank for rank in range(nodes(spec)) if rank != spec.launch.node_rank)
    return {f"{JOIN}-{rank}": _argv(spec, machine, rank) for rank in ranks}


def _env(spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Additions to the environment; what the user gave wins."""
    family, launcher = registry.DEVICES[device(spec, machine)], spec.launch.launcher
    env = {"OMP_NUM_THREADS": str(spec.launch.omp_num_threads or max(1, machine.cores // processes(spec)))}
    env["PYTHONUNBUFFERED"] = "1"  # the log is live
    env["TOKENIZERS_PARALLELISM"] = "false"  # loader processes fork after the tokenizer was used
    if device(spec, machine) == "cpu" and (spec.parallel.strategy in registry.DEEPSPEED or launcher == "deepspeed"):
        env["DS_ACCELERATOR"] = "cpu"  # otherwise it takes an accelerator that is there
    if family.visible and launcher != "deepspeed":  # which sets it itself, by --include
        env[family.visible] = ",".join(map(str, ids(spec, machine)))
    if device(spec, machine) == "cuda" and len({gpu.name for gpu in machine.gpus}) > 1:
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the driver counts them; CUDA puts the fastest first
    if nodes(spec) > 1 and launcher in ("torchrun", "accelerate"):
        env |= PREFIX
    if nodes(spec) > 1 and spec.launch.rendezvous == "elastic":
        env |= TELL_AGAIN
    return {**env, **spec.launch.env}


def _defaults(spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Additions that give way to what is set already, under whatever name."""
    if device(spec, machine) != "cuda":
        return {}
    found = {**(MEMORY if spec.launch.cuda_env_defaults else {}), **(NO_PEERS if _peerless(machine) else {})}
    own = spec.launch.env.keys()
    return {name: value for name, value in found.items() if not {name, *ALIASES.get(name, ())} & own}


def _peerless(machine: Machine) -> bool:
    """Whether GPUs are such as do not reach each other's memory: accelerate 1.15 state.py refuses to start on them,
    unless NCCL is told."""
    old = [int(part) for part in re.findall(r"\d+", machine.driver)] < [550, 40, 7]
    return bool(machine.driver) and old and any("RTX 40" in gpu.name for gpu in machine.gpus)


def _notes(spec: RunSpec, machine: Machine) -> tuple[str, ...]:
    family, count = registry.DEVICES[device(spec, machine)], nodes(spec)
    where = f"{processes(spec)} x {family.label}" if processes(spec) > 1 else family.label
    where = f"{count} nodes, each {where}" if count > 1 else where
    talk = f", {backend(device(spec, machine))} backend" if world(spec) > 1 else ""
    notes = [f"Trains on {where}{talk}."]
    if count > 1:
        script = f"{JOIN}.sh" if spec.launch.rendezvous == "elastic" else f"{JOIN}-N.sh"
        notes.append(
            f"Every node needs the same Python, and this run's folder under the same path: start {script} there."
        )
    return tuple(notes)
