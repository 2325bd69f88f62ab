"""How a run is spread, watched, kept and started.

Floor 1. Imports: catalog, kinds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend import registry
from backend.config.fields import (
    ANSWERS,
    BUCKETS,
    DDP,
    ELASTIC,
    ENGINE,
    EVALUATED,
    FSDP,
    FSDP1,
    FSDP2,
    HOSTS,
    LORA,
    MANY,
    NODES,
    NVME,
    NVME_WEIGHTS,
    OFFLOADED,
    OFFLOADING,
    SAVED,
    STARTED,
    STATIC,
    TENSOR,
    ZERO,
    ZERO3,
    Ids,
    JsonText,
    Lines,
    Names,
    Pairs,
    Section,
    Ui,
    one_of,
    word_like,
)


class Parallel(Section):
    """How many processes work together, and how."""

    strategy: Annotated[str, *one_of(registry.STRATEGIES), Ui("Strategy")] = "single"
    """How a model and its batches are spread over devices."""
    find_unused_parameters: Annotated[bool, Ui("Find unused parameters", when=DDP)] = False
    """For models whose parts are skipped in some steps. Costs time."""
    bucket_mb: Annotated[int, Field(ge=1, le=4096), Ui("Gradient bucket", when=BUCKETS, unit="MB")] = 25
    """Gradients are sent in parcels of this size."""
    timeout: Annotated[int, Field(ge=1), Ui("Time-out", when=MANY, unit="s")] = 1800
    """A rank that waits longer for the others ends the run."""

    offload_optimizer: Annotated[str, *one_of(registry.OFFLOADS), Ui("Optimizer state in", when=OFFLOADING)] = "none"
    """Away from the device it leaves room, and the step is made by the CPU."""
    offload_parameters: Annotated[str, *one_of(registry.OFFLOADS), Ui("Weights in", when=ZERO3)] = "none"
    """Away from the device, each layer's weights travel when they are needed."""
    pin_memory: Annotated[bool, Ui("Pinned memory", when=OFFLOADED)] = True
    """Quicker on its way to the device, and never paged out: RAM that nobody else can use."""
    nvme_path: Annotated[str, Ui("NVMe folder", when=NVME)] = ""
    """On a local NVMe disk; holds the state while the run lives."""
    nvme_buffers: Annotated[int, Field(ge=4, le=1024), Ui("Buffers", when=NVME)] = 5
    """Pieces on their way at once; each takes RAM."""
    nvme_buffer_mb: Annotated[int, Field(ge=1, le=65536), Ui("Buffer size", when=NVME_WEIGHTS, unit="MB")] = 200
    """Holds the largest layer's weights at least."""
    aio_block_kb: Annotated[int, Field(ge=4, le=1048576), Ui("Block size", when=NVME, unit="KB")] = 1024
    """Bytes of one request to the disk."""
    aio_queue_depth: Annotated[int, Field(ge=1, le=4096), Ui("Queue depth", when=NVME)] = 8
    """Requests on their way at once."""
    aio_threads: Annotated[int, Field(ge=1, le=256), Ui("Threads a request", when=NVME)] = 1
    """Threads that share one request."""

    sharding: Annotated[str, *one_of(registry.SHARDINGS), Ui("Sharding", when=FSDP1)] = "full_shard"
    """What is spread over the devices."""
    reshard_after_forward: Annotated[bool, Ui("Reshard after forward", when=FSDP2)] = True
    """Let go of a layer's weights until its backward pass. Off: more memory, fewer messages."""
    cpu_offload: Annotated[bool, Ui("Offload to CPU memory", when=FSDP)] = False
    """Weights, gradients and optimizer state live in RAM, and the CPU makes the step."""
    wrap_layers: Annotated[Names, Ui("Wrapped layers", when=FSDP, widget="list")] = ()
    """Class names of the layers that are gathered one by one. Empty: the model's own, such as LlamaDecoderLayer."""
    reduce_precision: Annotated[
        Literal["fp32", "compute"],
        Ui("Reduce gradients in", when=FSDP, choices={"fp32": "fp32", "compute": "as computed"}),
    ] = "fp32"
    """In which numbers gradients are added up between devices."""
    state_dict: Annotated[str, *one_of(registry.STATE_DICTS), Ui("Checkpoint as", when=FSDP)] = "full"
    """How weights and optimizer state lie in a checkpoint. The trained model is one file either way."""
    replicas: Annotated[int, Field(ge=1, le=65536), Ui("Replicas", when=FSDP2)] = 1
    """HSDP: so many copies, each spread over its part of the devices. Usually the number of nodes."""
    tensor: Annotated[int, Field(ge=2, le=1024), Ui("Slices of a layer", when=TENSOR)] = 2
    """So many devices share every layer and work on the same rows. More processes than that are FSDP2 shards."""
    context: Annotated[int, Field(ge=1, le=1024), Ui("Context parallel", when=FSDP2)] = 1
    """So many devices share a row's tokens, for long rows. Not proven without GPUs."""
    sequence: Annotated[int, Field(ge=1, le=1024), Ui("Sequence parallel", when=ZERO)] = 1
    """So many devices share a row's tokens (Ulysses): activations of long rows are divided."""
    engine_keys: Annotated[JsonText, Ui("Further keys", when=ENGINE, widget="text")] = ""
    """JSON, laid over the engine's own file: for what has no field here."""

    @property
    def slices(self) -> int:
        """Devices that share every layer: tensor parallel."""
        return self.tensor if registry.STRATEGIES[self.strategy].engine == "tensor" else 1

    @property
    def pieces(self) -> int:
        """Devices that share the tokens of a row: context or sequence parallel."""
        row = registry.STRATEGIES[self.strategy]
        return self.context if row.version == 2 else self.sequence if row.engine == "deepspeed" else 1


class Evaluation(Section):
    """What is looked at beside the loss."""

    when: Annotated[Literal["no", "steps", "epoch"], Ui("Evaluate")] = "epoch"
    """The loss on validation rows, drawn beside the training loss."""
    steps: Annotated[int, Field(ge=1), Ui("Every", when={"evaluation.when": ("steps",)}, unit="steps")] = 50
    """Steps between evaluations."""
    batch_size: Annotated[int, Field(ge=1, le=65536), Ui("Batch size", when=EVALUATED)] = 8
    """Rows a device evaluates at once."""
    samples: Annotated[int, Field(ge=0, le=10_000), Ui("Answers before and after", when=ANSWERS)] = 0
    """Validation rows answered by the model before and after training and compared with what was wanted; 0 is off."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32_768), Ui("Longest answer", when=ANSWERS, unit="tokens")] = 128
    """Where an answer is cut."""


class Checkpoint(Section):
    """What is kept on the way, and at the end."""

    when: Annotated[Literal["no", "steps", "epoch"], Ui("Save checkpoints")] = "epoch"
    """A stopped or failed run goes on from the last complete one."""
    steps: Annotated[int, Field(ge=1), Ui("Every", when={"checkpoint.when": ("steps",)}, unit="steps")] = 100
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=0), Ui("Keep", when=SAVED)] = 2
    """Older checkpoints are deleted; 0 keeps all."""
    weights_only: Annotated[bool, Ui("Weights only", when=SAVED)] = False
    """Smaller, but such a checkpoint cannot be resumed from."""
    best: Annotated[bool, Ui("End with the best", when={**SAVED, **EVALUATED})] = False
    """Load the checkpoint with the lowest validation loss at the end."""
    start: Annotated[Literal["continue", "anew", "path"], Ui("Start from")] = "continue"
    """Started again, a run continues from its last complete checkpoint, begins anew, or takes one that you name."""
    path: Annotated[str, Ui("Checkpoint folder", when={"checkpoint.start": ("path",)})] = ""
    """A checkpoint-N folder of a run with the same model and method; the number of processes may be another."""
    save_model: Annotated[bool, Ui("Save the trained model")] = True
    """In the run's folder under model/, as `from_pretrained` loads it."""
    merge: Annotated[bool, Ui("Merge the adapter", when={**LORA, "checkpoint.save_model": ("true",)})] = False
    """Save whole weights with the adapter added in, instead of the adapter alone."""


class Logging(Section):
    """What is written down while it runs."""

    name: Annotated[str, Field(max_length=80), Ui("Run name")] = ""
    """Part of the folder's name; empty takes model and method."""
    steps: Annotated[int, Field(ge=1), Ui("Log every", unit="steps")] = 1
    """Steps between points of the curves."""
    level: Annotated[Literal["info", "warning", "error"], Ui("Log level")] = "warning"
    """How much the libraries say in the log."""
    report_to: Annotated[str, *one_of(registry.REPORTERS), Ui("Also report to")] = "none"
    """A tracker that you use already."""


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
    processes: Annotated[int, Field(ge=1, le=1024), Ui("Processes", when=MANY)] = 2
    """On each node, one for each device."""
    rendezvous: Annotated[
        Literal["standalone", "static", "elastic"],
        Ui("Nodes", when=STARTED, choices={"standalone": "One", "static": "Several", "elastic": "Elastic"}),
    ] = "standalone"
    """Several wait for one another; elastic nodes may come and go, and a rank that dies comes back."""
    nodes: Annotated[int, Field(ge=1, le=128), Ui("Number of nodes", when=NODES)] = 2
    """Machines that train together; of an elastic run, the most."""
    min_nodes: Annotated[int, Field(ge=1, le=128), Ui("At least", when=ELASTIC, unit="nodes")] = 1
    """It begins, and goes on, with as few."""
    node_rank: Annotated[int, Field(ge=0, le=127), Ui("This node's rank", when=STATIC)] = 0
    """Which of the nodes the run is started on, from 0."""
    address: Annotated[str, Ui("Address of node 0", when=NODES)] = ""
    """The name or IP by which the other nodes reach it; the ranks meet there."""
    port: Annotated[int, Field(ge=0, le=65535), Ui("Port", when=STARTED)] = 0
    """Where the ranks meet. 0 takes a free one on one node; 29500 for several, and for deepspeed."""
    max_restarts: Annotated[int, Field(ge=0, le=1000), Ui("Restarts", when=ELASTIC)] = 3
    """How often the ranks start again, from the last checkpoint, when one of them dies."""
    rendezvous_id: Annotated[str, *word_like(), Ui("Rendezvous id", when=ELASTIC)] = "footplate"
    """The same on all nodes; another one for each run that meets at the same address and port."""
    hosts: Annotated[Lines, Ui("Hostfile", when=HOSTS, widget="lines")] = ()
    """A node a line, node 0 first: worker-1 slots=4."""
    include: Annotated[str, Ui("Include", when=HOSTS)] = ""
    """Only these hosts and slots: worker-1@worker-2:0,1. Empty takes all of the hostfile."""
    threads: Annotated[int, Field(ge=0, le=1024), Ui("CPU threads a process")] = 0
    """0 shares the cores among the processes."""
    memory_settings: Annotated[bool, Ui("Memory settings", when={"launch.device": ("auto", "cuda")})] = True
    """On CUDA: expandable_segments for the allocator, no recorded streams for NCCL. What you have set stays."""
    accelerate_keys: Annotated[
        JsonText, Ui("Further keys of accelerate", when={"launch.launcher": ("accelerate",)}, widget="text")
    ] = ""
    """JSON, laid over accelerate.yaml: for what has no field here."""
    environment: Annotated[Pairs, Ui("Environment", widget="lines")] = Field(default_factory=dict)
    """Added for the run, one NAME=value a line."""
