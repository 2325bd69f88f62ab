"""Answers of a cluster, kept for a minute: a check on the page must not ask the cluster at each key press."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from backend import registry
from backend.config import RunSpec
from backend.config.processes import nproc_per_node
from backend.machine import GIB, Gpu, Machine, known_gpu
from backend.runs.follower import ClusterError

KEPT_SECONDS = 60
UNKNOWN_GPU = "unknown GPU"

_answers: dict[Any, tuple[float, Any]] = {}
_lock = threading.Lock()


def kept(key: Any, ask: Callable[[], Any]) -> Any:
    """The answer to `ask`, or the ClusterError that it raised, at most KEPT_SECONDS old."""
    with _lock:
        when, answer = _answers.get(key, (0.0, None))
        if time.monotonic() - when > KEPT_SECONDS or not when:
            try:
                answer = ask()
            except ClusterError as error:
                answer = error
            _answers[key] = time.monotonic(), answer
            for old in [known for known, (since, _) in _answers.items() if time.monotonic() - since > KEPT_SECONDS]:
                del _answers[old]
    if isinstance(answer, ClusterError):
        raise answer
    return answer


def forget() -> None:
    """Ask again at the next check."""
    with _lock:
        _answers.clear()


def as_machine(here: Machine, name: str, devices: tuple[Gpu, ...], nodes: int, cores: int, ram_bytes: int) -> Machine:
    """The nodes of a cluster, with the packages of this machine; `ram_bytes`: the RAM of one node, 0 if unknown."""
    ram = ram_bytes or here.ram_bytes
    known = replace(here, name=name, device="cuda" if devices else "cpu", gpus=devices, nodes=nodes, cores=cores)
    return replace(known, ram_bytes=ram, ram_free_bytes=ram, shm_free_bytes=None, driver_version="")


def ram_of_job(ram_bytes: int, memory_gib: int) -> int:
    """The RAM that a job has on a node with this much (0: unknown): what it requests is also its limit."""
    return min(ram_bytes or memory_gib * GIB, memory_gib * GIB) if memory_gib else ram_bytes


def gpus(count: int, name: str) -> tuple[Gpu, ...]:
    """The GPUs of a node, of the model that the user or the cluster names."""
    label, gib, capability = known_gpu(name) or (UNKNOWN_GPU, 80, (0, 0))
    words = re.sub("[_-]", " ", name.upper())
    if label in words and registry.gpu_model(words) != registry.gpu_model(label):
        label = words  # H100 PCIe has another data sheet than H100
    return tuple(Gpu(number, label, gib * GIB, gib * GIB, capability) for number in range(count))


class Kind(Protocol):
    """Nodes of a cluster that are alike."""

    @property
    def cores(self) -> int:
        """CPU cores of a node."""

    @property
    def gpus(self) -> int:
        """GPUs of a node."""

    @property
    def gpu_type(self) -> str:
        """Their type, as the cluster names it."""


K = TypeVar("K", bound=Kind)


def relied_on(spec: RunSpec, found: Sequence[K], cpus: int) -> tuple[K, int]:
    """The node of which a run can rely on having one as good, and how many can take it; `cpus`: CPUs that it requests
    on each node, 0 for a share like that of its GPUs. The cluster chooses the nodes. So it is one with the smallest
    GPUs of those that have these CPUs, or the most that there are, and a GPU for each process, and the largest of such
    nodes; or the largest of all if none has enough GPUs, the run needs none, or the user says which GPUs are meant."""
    ordered = sorted(found, key=lambda node: (node.gpus, node.cores), reverse=True)
    processes, is_open = nproc_per_node(spec), spec.launch.device != "cpu" and not spec.launch.gpu_model
    fitting = [node for node in ordered if node.gpus >= processes] or ordered
    cpus = min(cpus, max(node.cores for node in fitting))
    fitting = [node for node in fitting if node.cores >= cpus]
    has_enough = fitting[0].gpus >= processes
    node = min(fitting, key=_gpu_bytes) if is_open and has_enough else fitting[0]  # the first one of several
    least = cpus or int(node.cores * min(1, processes / (node.gpus or processes)))
    return node, sum(other.cores >= least for other in fitting)


def _gpu_bytes(node: Kind) -> int:
    """The memory of a GPU."""
    return min((gpu.total_bytes for gpu in gpus(node.gpus, node.gpu_type)), default=0)
