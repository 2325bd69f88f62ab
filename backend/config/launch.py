"""Launcher, devices and nodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend.config.fields import (
    ELASTIC,
    MULTI_NODE,
    MULTI_PROCESS,
    STATIC,
    WITH_HOSTFILE,
    WITH_LAUNCHER,
    Ids,
    JsonText,
    Lines,
    Pairs,
    Section,
    Ui,
    word_like,
)


class Launch(Section):
    """Where it runs, and what starts it."""

    launcher: Annotated[Literal["torchrun", "accelerate", "deepspeed", "python"], Ui("Launcher")] = "torchrun"
    """What starts the processes of a node; python starts one process alone, a little sooner."""
    device: Annotated[Literal["auto", "cuda", "npu", "xpu", "mps", "cpu"], Ui("Device")] = "auto"
    """Automatic takes the accelerator that is there, otherwise the CPU."""
    devices: Annotated[
        Ids, Ui("Device ids", when={"launch.device": ("auto", "cuda", "npu", "xpu")}, widget="list")
    ] = ()
    """Which GPUs, by id: 0, 1. Empty takes the first ones."""
    nproc_per_node: Annotated[int, Field(ge=1, le=1024), Ui("Processes", when=MULTI_PROCESS)] = 2
    """On each node, one for each device."""
    rendezvous: Annotated[
        Literal["standalone", "static", "elastic"],
        Ui("Nodes", when=WITH_LAUNCHER, choices={"standalone": "One", "static": "Several", "elastic": "Elastic"}),
    ] = "standalone"
    """Several wait for one another; elastic nodes may come and go, and a rank that dies comes back."""
    nnodes: Annotated[int, Field(ge=1, le=128), Ui("Number of nodes", when=MULTI_NODE)] = 2
    """Machines that train together; of an elastic run, the most."""
    min_nnodes: Annotated[int, Field(ge=1, le=128), Ui("At least", when=ELASTIC, unit="nodes")] = 1
    """It begins, and goes on, with as few."""
    node_rank: Annotated[int, Field(ge=0, le=127), Ui("This node's rank", when=STATIC)] = 0
    """Which of the nodes the run is started on, from 0."""
    master_addr: Annotated[str, Ui("Address of node 0", when=MULTI_NODE)] = ""
    """The name or IP by which the other nodes reach it; the ranks meet there."""
    master_port: Annotated[int, Field(ge=0, le=65535), Ui("Port", when=WITH_LAUNCHER)] = 0
    """Where the ranks meet. 0 takes a free one on one node; 29500 for several, and for deepspeed."""
    max_restarts: Annotated[int, Field(ge=0, le=1000), Ui("Restarts", when=ELASTIC)] = 3
    """How often the ranks start again, from the last checkpoint, when one of them dies."""
    rdzv_id: Annotated[str, *word_like(), Ui("Rendezvous id", when=ELASTIC)] = "footplate"
    """The same on all nodes; another one for each run that meets at the same address and port."""
    hostfile: Annotated[Lines, Ui("Hostfile", when=WITH_HOSTFILE, widget="lines")] = ()
    """A node a line, node 0 first: worker-1 slots=4."""
    include: Annotated[str, Ui("Include", when=WITH_HOSTFILE)] = ""
    """Only these hosts and slots: worker-1@worker-2:0,1. Empty takes all of the hostfile."""
    omp_num_threads: Annotated[int, Field(ge=0, le=1024), Ui("CPU threads a process")] = 0
    """0 shares the cores among the processes."""
    cuda_env_defaults: Annotated[bool, Ui("Memory settings", when={"launch.device": ("auto", "cuda")})] = True
    """On CUDA: expandable_segments for the allocator, no recorded streams for NCCL. What you have set stays."""
    extra_accelerate_config: Annotated[
        JsonText, Ui("Further keys of accelerate", when={"launch.launcher": ("accelerate",)}, widget="text")
    ] = ""
    """JSON, laid over accelerate.yaml: for what has no field here."""
    env: Annotated[Pairs, Ui("Environment", widget="lines")] = Field(default_factory=dict)
    """Added for the run, one NAME=value a line."""
