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
    """Distributed strategy and its settings."""

    strategy: Annotated[str, *one_of(registry.STRATEGIES), Ui("Distributed strategy")] = "single"
    """How weights, gradients and optimizer state are distributed: DDP if they fit on one device, else usually FSDP2 or
    ZeRO-3."""
    ddp_find_unused_parameters: Annotated[bool, Ui("Find unused parameters", when=DDP)] = False
    """Lets DDP continue if some parameters get no gradient in a step; it slows down every step, so it is usually
    off."""
    bucket_cap_mb: Annotated[int, Field(ge=1, le=4096), Ui("Bucket size", when=BUCKETS, unit="MB")] = 25
    """Gradients are communicated in buckets of this size; 25 is usual for DDP, 200 for ZeRO. Larger buckets need more
    memory."""
    ddp_timeout: Annotated[int, Field(ge=1), Ui("Distributed timeout", when=MULTI_PROCESS, unit="s")] = 1800
    """Ends the run if a rank waits longer than this in a collective, or if a rank no longer responds; 1800 is usual."""
    offload_optimizer: Annotated[str, *one_of(registry.OFFLOADS), Ui("Offload optimizer to", when=OFFLOADING)] = "none"
    """Keeps the optimizer state in CPU memory or on NVMe and steps on the CPU: less GPU memory, slower steps."""
    offload_param: Annotated[str, *one_of(registry.OFFLOADS), Ui("Offload parameters to", when=ZERO3)] = "none"
    """Keeps ZeRO-3 weights in CPU memory or on NVMe and copies each layer to the GPU when it is used: much slower."""
    pin_memory: Annotated[bool, Ui("Pin memory", when=OFFLOADED)] = True
    """Uses page-locked CPU memory for offloaded tensors: faster copies, but that memory cannot be swapped. Usually
    on."""
    nvme_path: Annotated[str, Ui("NVMe folder", when=NVME, path="folder")] = ""
    """Folder on a local NVMe disk that holds offloaded tensors during the run."""
    nvme_buffer_count: Annotated[int, Field(ge=4, le=1024), Ui("NVMe buffer count", when=NVME)] = 5
    """Pinned CPU buffers for transfers to and from NVMe (buffer_count); 5 is usual."""
    nvme_buffer_size_mb: Annotated[int, Field(ge=1, le=65536), Ui("NVMe buffer size", when=NVME_WEIGHTS, unit="MB")] = (
        200
    )
    """Size of a parameter buffer (buffer_size); it must hold the largest parameter of the model, often the
    embeddings."""
    aio_block_size_kb: Annotated[int, Field(ge=4, le=1048576), Ui("AIO block size", when=NVME, unit="KB")] = 1024
    """Size of one I/O request to the NVMe disk (aio.block_size); 1024 is usual."""
    aio_queue_depth: Annotated[int, Field(ge=1, le=4096), Ui("AIO queue depth", when=NVME)] = 8
    """I/O requests in flight (aio.queue_depth); 8 to 32 is usual."""
    aio_intra_op_parallelism: Annotated[int, Field(ge=1, le=256), Ui("AIO threads per request", when=NVME)] = 1
    """Threads that share one I/O request (aio.intra_op_parallelism); 1 is usual."""
    sharding_strategy: Annotated[str, *one_of(registry.SHARDINGS), Ui("Sharding strategy", when=FSDP1)] = "full_shard"
    """What FSDP1 shards over the devices; FULL_SHARD is usual and needs the least memory."""
    reshard_after_forward: Annotated[bool, Ui("Reshard after forward", when=FSDP2)] = True
    """Frees the gathered weights of a layer until its backward pass; usually on. Off needs more memory but less
    communication."""
    cpu_offload: Annotated[bool, Ui("CPU offload", when=FSDP)] = False
    """Keeps weights, gradients and optimizer state in CPU memory and steps on the CPU: least GPU memory, much
    slower."""
    transformer_layer_cls_to_wrap: Annotated[
        Names, Ui("Transformer layer classes to wrap", when=FSDP, widget="list")
    ] = ()
    """Class names of the layers that FSDP shards as units, such as LlamaDecoderLayer; leave it empty to use the classes
    that the model names."""
    reduce_dtype: Annotated[
        Literal["fp32", "compute"],
        Ui("Gradient reduction dtype", when=FSDP, choices={"fp32": "fp32", "compute": "Compute dtype"}),
    ] = "fp32"
    """Dtype in which gradients are summed over the devices; fp32 is usual, the compute dtype halves the
    communication."""
    state_dict_type: Annotated[str, *one_of(registry.STATE_DICTS), Ui("Checkpoint format", when=FSDP)] = "full"
    """State dict type of FSDP checkpoints; sharded is faster for large models. The final model is always saved
    unsharded."""
    replicate_size: Annotated[int, Field(ge=1, le=65536), Ui("Replicate size (HSDP)", when=FSDP2)] = 1
    """Number of replicas of the sharded model, usually the number of nodes; 1 shards over all devices."""
    tensor_parallel_size: Annotated[int, Field(ge=2, le=1024), Ui("Tensor parallel size", when=TENSOR)] = 2
    """Devices that split each layer and get the same examples; FSDP2 shards over these groups. 2 to 8 devices of one
    node are usual."""
    context_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Context parallel size", when=FSDP2)] = 1
    """Devices that share the tokens of one sequence, for long sequences; 1 is usual. Not verified on GPUs."""
    sequence_parallel_size: Annotated[int, Field(ge=1, le=1024), Ui("Sequence parallel size", when=ZERO)] = 1
    """Devices that share the tokens of one sequence (DeepSpeed Ulysses), for long sequences; 1 is usual."""
    extra_config: Annotated[JsonText, Ui("Extra config (JSON)", when=WITH_ENGINE_CONFIG, widget="text")] = ""
    """Keys that are merged into the generated DeepSpeed or FSDP config and override it, for settings without an option;
    usually empty."""
