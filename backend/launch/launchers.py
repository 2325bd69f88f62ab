"""Launchers: the command that starts the processes of one node.

Each function returns the arguments between Python and the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from backend import registry
from backend.config import RunSpec
from backend.config.processes import DEFAULT_PORT
from backend.launch import hostfile
from backend.machine import Machine
from backend.resolve import ResolvedRun
from backend.runs import ACCELERATE, HOSTFILE, JOIN, LLAMAFACTORY_RUN, RANK_LOGS

TRAINER = ("backend.train", ".")
# On one node, torchrun's rendezvous is a file in the run's folder: as a TCPStore it would be open to everyone, and
# torch 2.13 unpickles what is in it (elastic/rendezvous/dynamic_rendezvous.py, sync). An empty run ID makes torchrun
# generate one for each start. The node is alone: no other node waits for its heartbeats, and each would enlarge the
# file.
RENDEZVOUS_FILE = f"{RANK_LOGS}/rendezvous"
RENDEZVOUS_CONF = "store_type=file,keep_alive_interval=86400"
FILE_RENDEZVOUS = (
    "--rdzv-backend=c10d", f"--rdzv-conf={RENDEZVOUS_CONF}", f"--rdzv-endpoint={RENDEZVOUS_FILE}", "--rdzv-id=",
    "--local-addr=127.0.0.1",
)  # fmt: skip
# The same for accelerate 1.15: it passes two of these arguments on to torchrun, but only from its command line, not
# from its configuration file (commands/launch.py, _validate_launch_command). torchrun reads the others from environment
# variables.
ACCELERATE_FILE_RENDEZVOUS = ("--rdzv_backend=c10d", f"--rdzv_conf={RENDEZVOUS_CONF}")
FILE_RENDEZVOUS_ENV = {"PET_RDZV_ENDPOINT": RENDEZVOUS_FILE, "PET_RDZV_ID": "", "PET_LOCAL_ADDR": "127.0.0.1"}


def has_rendezvous_file(spec: RunSpec, run: ResolvedRun) -> bool:
    """Whether torchrun, or accelerate with its code, starts the processes of one node."""
    launcher = spec.launch.launcher
    return run.nnodes == 1 and (launcher == "torchrun" or (launcher == "accelerate" and run.world_size > 1))


def command(spec: RunSpec, run: ResolvedRun, machine: Machine, node_rank: int) -> tuple[str, ...]:
    """The command of the node with rank `node_rank`."""
    if machine.uses_hip and run.nnodes == 1:  # the deepspeed launcher counts the devices of HIP_VISIBLE_DEVICES from 0
        run = replace(run, device_ids=tuple(range(len(run.device_ids))))
    launcher = LAUNCHERS[spec.launch.launcher](spec, run, node_rank)
    if spec.launch.trainer == "llamafactory":
        scratch = ("--from-scratch",) if spec.save.resume_from == "scratch" else ()
        return (f"{spec.llamafactory.environment}/bin/python", *launcher, LLAMAFACTORY_RUN, *scratch)
    flag = "--module" if spec.launch.launcher == "deepspeed" else "-m"
    return (machine.python, *launcher, flag, *TRAINER)


def other_commands(spec: RunSpec, run: ResolvedRun, machine: Machine) -> dict[str, tuple[str, ...]]:
    """Name of the script -> command, for the other nodes: one each, or one for all nodes of an elastic run, which have
    no fixed ranks."""
    if run.nnodes == 1:
        return {}
    if spec.launch.rendezvous == "elastic":
        return {JOIN: command(spec, run, machine, 1)}
    ranks = (rank for rank in range(run.nnodes) if rank != spec.launch.node_rank)
    return {f"{JOIN}-{rank}": command(spec, run, machine, rank) for rank in ranks}


def _python(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    return ()


def _torchrun(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    each = (f"--nproc-per-node={run.nproc_per_node}", f"--log-dir={RANK_LOGS}", "--tee=3")
    return ("-m", "torch.distributed.run", *_rendezvous(spec, run, node_rank), *each)


def _rendezvous(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    """torchrun's arguments about nodes and rendezvous."""
    launch, port = spec.launch, spec.launch.master_port or DEFAULT_PORT
    if run.nnodes == 1:
        restarts = (f"--max-restarts={launch.max_restarts}",) if launch.rendezvous == "elastic" else ()
        return (*restarts, *FILE_RENDEZVOUS)
    if launch.place != "local":
        return ()  # torchrun reads them from the environment, which the job sets
    if launch.rendezvous == "static":
        nodes = (f"--nnodes={launch.nnodes}", f"--node-rank={node_rank}")
        return (*nodes, f"--master-addr={launch.master_addr}", f"--master-port={port}")
    nodes = (f"--nnodes={launch.min_nnodes}:{launch.nnodes}", f"--max-restarts={launch.max_restarts}")
    # Without is_host, torchrun compares master_addr with its host's addresses: in Debian's /etc/hosts, 127.0.1.1.
    store = ("--rdzv-backend=c10d", f"--rdzv-conf=is_host={int(node_rank == 0)}")
    return (*nodes, *store, f"--rdzv-endpoint={launch.master_addr}:{port}")  # the ID is in the environment


def _accelerate(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    rendezvous = ACCELERATE_FILE_RENDEZVOUS if has_rendezvous_file(spec, run) else ()
    rank = (f"--machine_rank={node_rank}",) if run.nnodes > 1 else rendezvous
    each = (f"--log_dir={RANK_LOGS}", "--tee=3")
    return ("-m", "accelerate.commands.launch", f"--config_file={ACCELERATE}", *rank, *each)


def _deepspeed(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    launch = spec.launch
    if run.nnodes > 1:
        # Each node starts its own processes. Over ssh, DeepSpeed stops a run with `pkill -f backend.train` on every
        # host, and with it every other run there.
        include = hostfile.include_argument(spec)
        nodes = (f"--hostfile={HOSTFILE}", *((f"--include={include}",) if include else ()))
        nodes = (*nodes, "--no_ssh", f"--node_rank={node_rank}", f"--master_addr={launch.master_addr}")
        nodes = (*nodes, f"--master_port={launch.master_port or DEFAULT_PORT}")
    else:
        has_ids = registry.DEVICES[run.device].visible_devices_env
        local = hostfile.same_slots(("localhost",), run.device_ids) if has_ids else ""
        # Without --hostfile, DeepSpeed reads /job/hostfile if it exists and starts the run on those hosts over ssh.
        nodes = ("--hostfile=/dev/null", f"--include={local}" if local else f"--num_gpus={run.nproc_per_node}")
    flags = ("--no_local_rank", "--log_level=error")  # the trainer reads LOCAL_RANK from the environment
    return ("-m", "deepspeed.launcher.runner", *nodes, *flags)


LAUNCHERS: Mapping[str, Callable[[RunSpec, ResolvedRun, int], tuple[str, ...]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "python": _python,
}
