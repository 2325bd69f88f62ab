"""Launchers: the command that starts the processes of one node.

Imports registry, config, resolve, machine, runs. Each function returns the arguments between Python and the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backend import registry
from backend.config import RunSpec
from backend.launch import hostfile
from backend.machine import Machine
from backend.resolve import DEFAULT_PORT, ResolvedRun
from backend.runs import ACCELERATE, HOSTFILE, JOIN, LLAMAFACTORY_RUN, RANK_LOGS

TRAINER = ("backend.train", ".")


def command(spec: RunSpec, run: ResolvedRun, machine: Machine, node_rank: int) -> tuple[str, ...]:
    """The command of the node with rank `node_rank`."""
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
        return {JOIN: command(spec, run, machine, 0)}
    ranks = (rank for rank in range(run.nnodes) if rank != spec.launch.node_rank)
    return {f"{JOIN}-{rank}": command(spec, run, machine, rank) for rank in ranks}


def _python(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    return ()


def _torchrun(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    each = (f"--nproc-per-node={run.nproc_per_node}", f"--log-dir={RANK_LOGS}", "--tee=3")
    return ("-m", "torch.distributed.run", *_rendezvous(spec, node_rank), *each)


def _rendezvous(spec: RunSpec, node_rank: int) -> tuple[str, ...]:
    """torchrun's arguments about nodes and rendezvous."""
    launch, port = spec.launch, spec.launch.master_port or DEFAULT_PORT
    if launch.place != "local":
        return ()  # from the environment, which the job sets
    if launch.rendezvous == "static":
        nodes = (f"--nnodes={launch.nnodes}", f"--node-rank={node_rank}")
        return (*nodes, f"--master-addr={launch.master_addr}", f"--master-port={port}")
    if launch.rendezvous == "elastic":
        endpoint = f"{launch.master_addr}:{port}" if launch.nnodes > 1 else f"localhost:{launch.master_port}"
        nodes = (f"--nnodes={launch.min_nnodes}:{launch.nnodes}", f"--max-restarts={launch.max_restarts}")
        return (*nodes, f"--rdzv-id={launch.rdzv_id}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    return (f"--master-port={launch.master_port}",) if launch.master_port else ("--standalone",)  # any free port


def _accelerate(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    rank = (f"--machine_rank={node_rank}",) if run.nnodes > 1 else ()
    each = (f"--log_dir={RANK_LOGS}", "--tee=3")
    return ("-m", "accelerate.commands.launch", f"--config_file={ACCELERATE}", *rank, *each)


def _deepspeed(spec: RunSpec, run: ResolvedRun, node_rank: int) -> tuple[str, ...]:
    launch, port = spec.launch, (f"--master_port={spec.launch.master_port or DEFAULT_PORT}",)
    if run.nnodes > 1:
        # Each node starts its own processes. Over ssh, DeepSpeed stops a run with `pkill -f backend.train` on every
        # host, and with it every other run there.
        include = hostfile.include_argument(spec)
        nodes = (f"--hostfile={HOSTFILE}", *((f"--include={include}",) if include else ()))
        nodes = (*nodes, "--no_ssh", f"--node_rank={node_rank}", f"--master_addr={launch.master_addr}")
    else:
        has_ids = registry.DEVICES[run.device].visible_devices_env
        local = hostfile.same_slots(("localhost",), run.device_ids) if has_ids else ""
        # Without --hostfile, DeepSpeed reads /job/hostfile if it exists and starts the run on those hosts over ssh.
        nodes = ("--hostfile=/dev/null", f"--include={local}" if local else f"--num_gpus={run.nproc_per_node}")
    flags = ("--no_local_rank", "--log_level=error")  # the trainer reads LOCAL_RANK from the environment
    return ("-m", "deepspeed.launcher.runner", *nodes, *port, *flags)


LAUNCHERS: Mapping[str, Callable[[RunSpec, ResolvedRun, int], tuple[str, ...]]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "python": _python,
}
