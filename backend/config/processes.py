"""Process counts and the rendezvous port of a RunSpec, which follow from the spec alone.

Everything that depends on the machine too is in `backend/resolve.py`.
"""

from __future__ import annotations

from backend import registry
from backend.config import RunSpec

DEFAULT_PORT = 29500  # torch's and DeepSpeed's default master port


def nproc_per_node(spec: RunSpec) -> int:
    """Processes on each node."""
    return spec.launch.nproc_per_node if spec.parallel.strategy in registry.MULTI_PROCESS else 1


def nnodes(spec: RunSpec) -> int:
    """Nodes that train together; the maximum for an elastic run."""
    launch = spec.launch
    single = launch.place == "local" and (launch.rendezvous == "standalone" or launch.launcher == "python")
    return 1 if single or spec.parallel.strategy not in registry.MULTI_PROCESS else launch.nnodes


def world_size(spec: RunSpec) -> int:
    """Processes on all nodes."""
    return nproc_per_node(spec) * nnodes(spec)


def rendezvous_port(spec: RunSpec) -> int:
    """The port of this node that the ranks rendezvous on and that must be free; 0 if another node listens, a cluster
    picks a port, or there are no other nodes."""
    launch = spec.launch
    if launch.place != "local" or launch.rendezvous == "elastic" or nnodes(spec) == 1 or launch.node_rank:
        return 0
    return launch.master_port or DEFAULT_PORT
