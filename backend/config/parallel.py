"""Distributed strategy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend import registry
from backend.config.fields import (
    BUCKETS,
    DDP,
    FSDP,
    FSDP1,
    FSDP2,
    MULTI_PROCESS,
    NVME,
    NVME_WEIGHTS,
    OFFLOADED,
    OFFLOADING,
    TENSOR,
    WITH_ENGINE_CONFIG,
    ZERO,
    ZERO3,
    JsonText,
    Names,
    Section,
    Ui,
    one_of,
)


class Parallel(Section):
    """How many processes work together, and how."""

    strategy: Annotated[str, *one_of(registry.STRATEGIES), Ui("Strategy")] = "single"
    """How a model and its batches are spread over devices."""
    ddp_find_unused_parameters: Annotated[bool, Ui("Find unused parameters", when=DDP)] = False
    """For models whose parts are skipped in some steps. Costs time."""
    bucket_cap_mb: Annotated[int, Field(ge=1, le=4096), Ui("Gradient bucket", when=BUCKETS, unit="MB")] = 25
    """Gradients are sent in parcels of this size."""
    ddp_timeout: Annotated[int, Field(ge=1), Ui("Time-out", when=MULTI_PROCESS, unit="s")] = 1800
    """A rank that waits longer for the others ends the run."""
    offload_optimizer: Annotated[str, *one_of(registry.OFFLOADS), Ui("Optimizer state in", when=OFFLOADING)] = "none"
    """Away from the device it leaves room, and the step is made by the CPU."""
    offload_param: Annotated[str, *one_of(registry.OFFLOADS), Ui("Weights in", when=ZERO3)] = "none"
    """Away from the device, each layer's weights travel when they are needed."""
    pin_memory: Annotated[bool, Ui("Pinned memory", when=OFFLOADED)] = True
    """Quicker on its way to the device, and never paged out: RAM that nobody else can use."""
    nvme_path: Annotated[str, Ui("NVMe folder", when=NVME)] = ""
    """On a local NVMe disk; holds the state while the run lives."""
    nvme_buffer_count: Annotated[int, Field(ge=4, le=1024), Ui("Buffers", when=NVME)] = 5
    """Pieces on their way at once; each takes RAM."""
    nvme_buffer_size_mb: Annotated[int, Field(ge=1, le=65536), Ui("Buffer size", when=NVME_WEIGHTS, unit="MB")] = 200
    """Holds the largest layer's weights at least."""
    aio_block_size_kb: Annotated[int, Field(ge=4, le=1048576), Ui("Block size", when=NVME, unit="KB")] = 1024
    """Bytes of one request to the disk."""
    aio_queue_depth: Annotated[int, Field(ge=1, le=4096), Ui("Queue depth", when=NVME)] = 8
    """Requests on their way at once."""
    aio_intra_op_parallelism: Annotated[int, Field(ge=1, le=256), Ui("Threads a request", when=NVME)] = 1
    """Threads that share one request."""
    sharding_strategy: Annotated[str, *one_of(registry.SHARDINGS), Ui("Sharding", when=FSDP1)] = "full_shard"
    """What is spread over the devices."""
    reshard_after_forward: Annotated[bool, Ui("Reshard after forward", when=FSDP2)] = True
    """Let go of a layer's weights until its backward pass. Off: more memory, fewer messages."""
    cpu_offload: Annotated[bool, Ui("Offload to CPU memory", when=FSDP)] = False
    """Weights, gradients and optimizer state live in RAM, and the CPU makes the step."""
    transformer_layer_cls_to_wrap: Annotated[Names, Ui("Wrapped layers", when=FSDP, widget="list")] = ()
    """Class names of the layers that are gathered one by one. Empty: the model's own, such as LlamaDecoderLayer."""
    reduce_dtype: Annotated[
        Literal["fp32", "compute"],
        Ui("Reduce gradients in", when=FSDP, choices={"fp32": "fp32", "compute": "as computed"}),
    ] = "fp32"
    """In which numbers gradients are added up between devices."""
    state_dict_type: Annotated[str, *one_of(registry.STATE_DICTS), Ui("Checkpoint as", when=FSDP)] = "full"
    """How weights and optimizer state lie in a checkpoint. The trained model is one file either way."""
    replicate_size: Annotated[int, Field(ge=1, le=65536), Ui("Replicas", when=FSDP2)] = 1
    """HSDP: so many copies, each spread over its part of the devices. Usually the number of nodes."""
    tensor_parallel_size: Annotated[int, Field(ge=2, le=1024), Ui("Slices of a layer", when=TENSOR)] = 2
    """So many devices share every layer and work on the same rows. More processes than that are FSDP2 shards."""
    context_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Context parallel", when=FSDP2)] = 1
    """So many devices share a row's tokens, for long rows. Not proven without GPUs."""
    sequence_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Sequence parallel", when=ZERO)] = 1
    """So many devices share a row's tokens (Ulysses): activations of long rows are divided."""
    extra_config: Annotated[JsonText, Ui("Further keys", when=WITH_ENGINE_CONFIG, widget="text")] = ""
    """JSON, laid over the engine's own file: for what has no field here."""

    @property
    def slices(self) -> int:
        """Devices that share every layer: tensor parallel."""
        return self.tensor_parallel_size if registry.STRATEGIES[self.strategy].engine == "tensor" else 1

    @property
    def pieces(self) -> int:
        """Devices that share the tokens of a row: context or sequence parallel."""
        row = registry.STRATEGIES[self.strategy]
        return (
            self.context_parallel_size
            if row.fsdp_version == 2
            else self.sequence_parallel_size
            if row.engine == "deepspeed"
            else 1
        )
