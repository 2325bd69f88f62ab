"""Launcher, devices and nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend.config.fields import (
    ELASTIC,
    IN_CLUSTER,
    KUBERNETES,
    LOCAL,
    MULTI_NODE,
    MULTI_PROCESS,
    RAY,
    STATIC,
    WITH_HOSTFILE,
    WITH_LAUNCHER,
    Ids,
    JsonText,
    Lines,
    Pairs,
    Section,
    Ui,
    matches,
    word_like,
)

RENDEZVOUS = {"standalone": "Single node", "static": "Multi-node, static", "elastic": "Multi-node, elastic"}


TRAINERS = {"footplate": "Footplate", "llamafactory": "LLaMA-Factory"}
PLACES = {"local": "This machine", "slurm": "Slurm", "ray": "Ray", "kubernetes": "Kubernetes"}


class Launch(Section):
    """Place, launcher, devices, nodes and environment."""

    place: Annotated[Literal["local", "slurm", "ray", "kubernetes"], Ui("Run on", choices=PLACES)] = "local"
    """Where the processes run: on this machine (with several nodes, you run the command on each), or as a job of a
    Slurm, Ray or Kubernetes cluster. The options are checked for the hardware that is selected under Machine, in the
    header of the page."""
    trainer: Annotated[Literal["footplate", "llamafactory"], Ui("Trainer", choices=TRAINERS)] = "footplate"
    """Program that trains: Footplate's own, on transformers and TRL, or LLaMA-Factory in a separate Python
    environment."""
    launcher: Annotated[Literal["torchrun", "accelerate", "deepspeed", "python"], Ui("Launcher", when=LOCAL)] = (
        "torchrun"
    )
    """Program that starts the processes; torchrun is usual. python starts a single process without a launcher."""
    device: Annotated[Literal["auto", "cuda", "npu", "xpu", "mps", "cpu"], Ui("Device type")] = "auto"
    """Type of device to train on; Automatic uses an accelerator if there is one, else the CPU."""
    devices: Annotated[
        Ids, Ui("Device IDs", when={**LOCAL, "launch.device": ("auto", "cuda", "npu", "xpu")}, widget="list")
    ] = ()
    """IDs of the devices to use, such as 0, 1; empty uses the first ones, one per process."""
    nproc_per_node: Annotated[int, Field(ge=1, le=1024), Ui("Processes per node", when=MULTI_PROCESS)] = 2
    """Processes that the launcher starts on each node, one per device; usually the number of GPUs of a node."""
    rendezvous: Annotated[
        Literal["standalone", "static", "elastic"],
        Ui("Rendezvous", when=WITH_LAUNCHER, choices=RENDEZVOUS),
    ] = "standalone"
    """How the nodes of a run find each other; with elastic, nodes may join and leave, and the run restarts after a
    failure."""
    nnodes: Annotated[int, Field(ge=1, le=128), Ui("Nodes", when=(MULTI_NODE, {**MULTI_PROCESS, **IN_CLUSTER}))] = 2
    """Number of nodes that train together; for an elastic run, the maximum."""
    min_nnodes: Annotated[int, Field(ge=1, le=128), Ui("Minimum nodes", when=ELASTIC, unit="nodes")] = 1
    """Minimum number of nodes to start or continue an elastic run."""
    node_rank: Annotated[int, Field(ge=0, le=127), Ui("Node rank", when=STATIC)] = 0
    """Rank of this node, from 0 to nodes - 1."""
    master_addr: Annotated[str, Ui("Master address", when=MULTI_NODE)] = ""
    """Host name or IP address of node 0, as the other nodes reach it."""
    master_port: Annotated[int, Field(ge=0, le=65535), Ui("Master port", when=MULTI_NODE)] = 0
    """Port on node 0 for the rendezvous of several nodes; 0 uses 29500."""
    max_restarts: Annotated[int, Field(ge=0, le=1000), Ui("Max restarts", when=(ELASTIC, RAY, KUBERNETES))] = 3
    """How often the processes restart from the latest checkpoint after a failure; 3 is usual."""
    rdzv_id: Annotated[str, *word_like(or_empty=True), Ui("Rendezvous ID", when=ELASTIC)] = ""
    """Name of the run in the rendezvous, the same on all its nodes; empty generates a random one for each run."""
    gpu_model: Annotated[
        str, matches(r"[\w .-]+", "must be the name of a GPU, such as H100"), Ui("GPU model", when=IN_CLUSTER)
    ] = ""
    """Model of the cluster's GPUs, such as H100 or A100 40GB, for checks and memory estimate; empty uses the type that
    the cluster reports."""
    hostfile: Annotated[Lines, Ui("Hostfile", when=WITH_HOSTFILE, widget="lines")] = ()
    """One node per line, node 0 first, as the deepspeed launcher expects: worker-1 slots=4."""
    include: Annotated[str, Ui("Include", when=WITH_HOSTFILE)] = ""
    """Hosts and slots of the hostfile to use, such as worker-1@worker-2:0,1; empty uses all."""
    omp_num_threads: Annotated[int, Field(ge=0, le=1024), Ui("CPU threads per process")] = 0
    """OMP_NUM_THREADS of each process; 0 divides the CPU cores by the processes per node."""
    cuda_env_defaults: Annotated[bool, Ui("CUDA memory defaults", when={"launch.device": ("auto", "cuda")})] = True
    """Sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True and TORCH_NCCL_AVOID_RECORD_STREAMS=1, unless you set
    them."""
    extra_accelerate_config: Annotated[
        JsonText,
        Ui("Extra accelerate config (JSON)", when={**LOCAL, "launch.launcher": ("accelerate",)}, widget="text"),
    ] = ""
    """Keys that are merged into the generated accelerate.yaml and override it, for settings without an option; usually
    empty."""
    env: Annotated[Pairs, Ui("Environment variables", widget="lines")] = Field(default_factory=dict)
    """Variables added to the environment of the run, one NAME=value per line."""
