"""The strategy: what the Trainer is told of it, how its engine starts, and what each rank really holds.

Beside the floors. Imports spec, catalog, run, device, inside, kernels.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DeepSpeedSequenceParallelConfig, DistributedType
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from backend import registry
from backend.config import RunSpec
from backend.runs import DEEPSPEED, FSDP
from backend.train import device, kernels, optimizer_utils
from backend.train.model import DTYPES
from backend.train.run_log import TrainError

ONCE = "cpu_ram_efficient_loading"
ADAMW = ("adamw_torch", "adamw_torch_fused")


def check(spec: RunSpec) -> None:
    """Raise TrainError for what the strategy cannot do, and would end in words of the library's own."""
    row = registry.STRATEGIES[spec.parallel.strategy]
    if row.shards_weights and spec.save.merge_adapter:
        raise TrainError(f"save.merge_adapter: {row.label} spreads the weights, so adapters cannot be merged.")
    shared = spec.parallel.pieces > 1
    if row.engine == "deepspeed" and shared:
        _check_sequence(spec)
    if (row.fsdp_version == 1 or shared) and spec.eval.num_generations and registry.STAGES[spec.train.stage].answers:
        raise TrainError(f"eval.num_generations: {row.label} as chosen cannot generate answers: set it to 0.")
    if row.engine == "tensor" and spec.method.kind == "lora":
        raise TrainError("method.kind: adapters do not fit slices of layers: take full or freeze, or FSDP2.")
    if row.engine == "tensor" and spec.save.strategy != "no" and not spec.save.only_model:
        raise TrainError("save.only_model: a run of slices cannot be resumed: switch it on, or save none.")
    if (
        row.engine == "fsdp"
        and spec.save.strategy != "no"
        and spec.save.only_model
        and spec.parallel.state_dict_type != "full"
    ):
        raise TrainError("save.only_model: weights alone cannot be sharded: set parallel.state_dict_type to full.")
    stepped = registry.OPTIMIZERS[spec.train.optim].name
    if row.zero_stage and spec.parallel.offload_optimizer != "none" and stepped not in ADAMW:
        raise TrainError("train.optim: the CPU's step is AdamW's, whatever was asked for: choose adamw.")


def _check_sequence(spec: RunSpec) -> None:
    """Raise TrainError for what cannot share a row's tokens over devices."""
    if spec.train.stage not in registry.PLAIN:
        label = registry.STAGES[spec.train.stage].label
        raise TrainError(f"parallel.sequence_parallel_size: {label} looks at whole rows: set it to 1.")
    if spec.data.packing:
        raise TrainError("data.packing: packed rows are cut at each document, not evenly: switch it off.")
    if spec.model.attn_implementation not in registry.SHAREABLE:
        raise TrainError(
            f"model.attn_implementation: {spec.model.attn_implementation} cannot be shared: take sdpa or FlashAttention."
        )


def arguments(spec: RunSpec, run: Path, family: str, world: int) -> dict[str, Any]:
    """The Trainer's arguments that belong to the strategy. Raises TrainError."""
    parallel, row = spec.parallel, registry.STRATEGIES[spec.parallel.strategy]
    found: dict[str, Any] = {"dataloader_pin_memory": family == "cuda"}
    if row.engine in ("fsdp", "tensor") and world == 1:
        raise TrainError(f"launch.nproc_per_node: {row.label} spreads a model over processes, and there is one.")
    if row.fsdp_version == 1 and family == "cpu":
        raise TrainError("parallel.strategy: FSDP1 does not run on a CPU: take FSDP2.")
    if row.fsdp_version == 2 and parallel.context_parallel_size > 1 and family == "cpu":
        raise TrainError("parallel.context_parallel_size: context parallel needs GPUs: set it to 1.")
    if row.engine == "deepspeed":
        found |= {"deepspeed": str(run / DEEPSPEED), "ddp_timeout": parallel.ddp_timeout}
        return found | (_ulysses(spec, family, world) if parallel.sequence_parallel_size > 1 else {})
    if world == 1:
        return found
    backend = device.backend(family)
    if backend == "ccl":  # accelerate 1.15 state.py: each process would train alone, without a word
        raise TrainError("launch.device: several Intel GPUs need a torch with XCCL: install that, or take one process.")
    found |= {"ddp_backend": backend, "ddp_timeout": parallel.ddp_timeout}
    if row.engine == "ddp":
        found["ddp_find_unused_parameters"] = parallel.ddp_find_unused_parameters
        found["ddp_bucket_cap_mb"] = parallel.bucket_cap_mb
    if row.engine in ("fsdp", "tensor"):
        # Or FSDP2 keeps whole gradients on every rank until the last batch; and torch 2.13 fails there on an output
        # layer in a unit of its own, whose weights TRL's loss takes without calling it (_fsdp_param.py).
        found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return found | (_fsdp(spec, run, family, world) if row.engine == "fsdp" else {})


def _fsdp(spec: RunSpec, run: Path, family: str, world: int) -> dict[str, Any]:
    parallel = spec.parallel
    if parallel.cpu_offload and family != "cpu" and not dist.is_initialized():
        # Gradients in RAM are added up there, to be clipped; accelerate would start the device's backend alone.
        both = f"{family}:{device.backend(family)},cpu:gloo"
        dist.init_process_group(both, timeout=timedelta(seconds=parallel.ddp_timeout))
    found: dict[str, Any] = {"fsdp": True, "fsdp_config": str(run / FSDP)}
    if max(parallel.replicate_size, parallel.context_parallel_size) > 1:
        found["parallelism_config"] = mesh(spec, world)
    if parallel.context_parallel_size > 1:
        found["pad_to_multiple_of"] = (
            2 * parallel.context_parallel_size
        )  # each device takes a piece from both ends of a row
    return found


class Skipping:
    """What accelerate 1.15's skip_first_batches lacks: it does not know DeepSpeed's way to cut rows. Skipped batches
    are read, and thrown away."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, loader: Any, number: int = 0) -> Any:
        """`loader`, behind its first batches."""
        if type(loader).__name__ != "UlyssesSPDataLoaderAdapter":
            return self.original(loader, number)
        for _ in range(number):
            next(loader)
        return loader


def _ulysses(spec: RunSpec, family: str, world: int) -> dict[str, Any]:
    """DeepSpeed's sequence parallel. Rows are filled up to what can be divided; gloo gathers equal lengths alone."""
    size = spec.parallel.sequence_parallel_size
    if world % size or (family == "cpu" and world != size):
        groups = "all processes share a row on a CPU" if family == "cpu" else "it must divide the processes"
        raise TrainError(f"parallel.sequence_parallel_size: {size} of {world} processes: {groups}.")
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation=kernels.attention(spec))
    config = ParallelismConfig(
        dp_replicate_size=world // size, sp_size=size, sp_backend="deepspeed", sp_handler=handler
    )
    longest = -(-spec.data.max_length // size) * size
    return {"parallelism_config": config, "pad_to_multiple_of": longest if family == "cpu" else size}


def name_key_heads(config: Any) -> None:
    """DeepSpeed's sequence parallel asks each configuration how many heads keys have. Older architectures do not say:
    as many as there are."""
    text = config.get_text_config()
    if not hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = text.num_attention_heads


def mesh(spec: RunSpec, world: int) -> ParallelismConfig:
    """How the ranks are arranged: replicas x shards x context."""
    parallel = spec.parallel
    return ParallelismConfig(
        dp_replicate_size=parallel.replicate_size,
        dp_shard_size=world // (parallel.replicate_size * parallel.context_parallel_size),
        cp_size=parallel.context_parallel_size,
    )


def start(spec: RunSpec, config: Any, family: str, precision: str) -> None:
    """Start the engine, between the Trainer's arguments (which start the process group) and the model."""
    row = registry.STRATEGIES[spec.parallel.strategy]
    if row.engine == "deepspeed":
        device.start_deepspeed(family)
    if row.engine == "deepspeed" and spec.parallel.sequence_parallel_size > 1:
        transformers.trainer.skip_first_batches = Skipping(transformers.trainer.skip_first_batches)
    if row.engine == "fsdp" and config.fsdp:
        _plugin(spec, config, family, precision)
    if row.engine in ("fsdp", "tensor") and family == "cpu":
        # accelerate 1.15 turns FSDP and meshes on for accelerators alone, and trains on a CPU as DDP without a word.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def _plugin(spec: RunSpec, config: Any, family: str, precision: str) -> None:
    """What accelerate's FSDP plugin is told beyond fsdp.json: gradients are added up as asked (by itself it would add
    them in half), and memory is pinned only where there is a device to pin it for."""
    parallel, dtype = spec.parallel, DTYPES[precision]
    second = registry.STRATEGIES[parallel.strategy].fsdp_version == 2
    reduce = torch.float32 if parallel.reduce_dtype == "fp32" else dtype
    policy: Any = MixedPrecisionPolicy if second else MixedPrecision
    config.fsdp_plugin_args["mixed_precision_policy"] = policy(param_dtype=dtype, reduce_dtype=reduce)
    # Told by the environment, transformers would leave buffers of all ranks but the first at zero, and read the file.
    os.environ[f"FSDP_{ONCE.upper()}"] = "false"
    if not second:  # accelerate would take its own default before what the trainer hands on
        os.environ["FSDP_SHARDING_STRATEGY"] = config.fsdp_plugin_args["reshard_after_forward"].upper()
    if parallel.transformer_layer_cls_to_wrap and not second:  # peft wraps an adapted model, and asks nobody else
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(parallel.transformer_layer_cls_to_wrap)
    if parallel.cpu_offload and second:
        pin = parallel.pin_memory and family != "cpu"
        config.fsdp_plugin_args["cpu_offload"] = CPUOffloadPolicy(pin_memory=pin)


def once(config: Any) -> bool:
    """Whether rank 0 alone is to read the weights, as fsdp.json says."""
    told = getattr(config, "fsdp_plugin_args", None) or {}
    return bool(told.get("fsdp_version") == 2 and told.get(ONCE))


def everywhere(config: Any) -> None:
    """All ranks have read the weights."""
    config.fsdp_plugin_args[ONCE] = False


def slices(spec: RunSpec, world: int, precision: str) -> dict[str, Any]:
    """How a model is loaded if every rank takes a slice of each layer."""
    if registry.STRATEGIES[spec.parallel.strategy].engine != "tensor":
        return {}
    size = spec.parallel.tensor_parallel_size
    shards = world // size
    return {
        "distributed_config": DistributedConfig(
            tp_size=size, fsdp_size=shards, fsdp_mixed_precision=shards > 1 and precision == "bf16"
        )
    }


def whole(spec: RunSpec, trainer: Any) -> dict[str, Any] | None:
    """The weights gathered from all ranks, on rank 0; None where each rank holds them whole. All ranks must call it."""
    row = registry.STRATEGIES[spec.parallel.strategy]
    if not row.shards_weights or not dist.is_initialized():
        return None
    if row.engine == "deepspeed":
        return dict(trainer.accelerator.get_state_dict(trainer.model_wrapped) or {})
    found = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(found)


def check_layers(spec: RunSpec, weights: torch.nn.Module) -> None:
    """Raise TrainError for layers that are not there to be gathered, and for a trained copy of a tied weight."""
    if registry.STRATEGIES[spec.parallel.strategy].engine != "fsdp":
        return
    known = {type(module).__name__ for module in weights.modules()}
    if missing := [name for name in spec.parallel.transformer_layer_cls_to_wrap if name not in known]:
        layers = sorted(name for name in known if name.endswith(("Layer", "Block")))
        raise TrainError(
            f"parallel.transformer_layer_cls_to_wrap: the model has no {', '.join(missing)}; it has {', '.join(layers)}."
        )
    every = list(weights.named_parameters(remove_duplicate=False))
    uses = Counter(id(weight) for _, weight in every)
    shared = [path for path, weight in every if uses[id(weight)] > 1]
    copied = [name for name in spec.lora.modules_to_save if any(f".{name}." in f".{path}." for path in shared)]
    if spec.method.kind == "lora" and copied:
        raise TrainError(f"lora.modules_to_save: {', '.join(copied)} shares its weights, and FSDP takes no copy.")


@contextmanager
def disk(spec: RunSpec) -> Iterator[None]:
    """Hold the run's NVMe folder while it lives, and delete what DeepSpeed leaves in it, gigabytes. Its files have
    fixed names, so two runs in one folder would overwrite each other's state. Raises TrainError."""
    parallel, stage = spec.parallel, registry.STRATEGIES[spec.parallel.strategy].zero_stage
    used = stage == 3 and "nvme" in (parallel.offload_optimizer, parallel.offload_param)
    if not used or os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    folder = Path(parallel.nvme_path).expanduser()
    if not parallel.nvme_path or not folder.is_dir():
        raise TrainError(f"parallel.nvme_path: there is no folder {parallel.nvme_path or '(empty)'}.")
    with (folder / "footplate.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrainError(f"parallel.nvme_path: another run works in {folder}: name another folder.") from None
        try:
            yield
        finally:
            shutil.rmtree(folder / "zero_stage_3", ignore_errors=True)


def loaded(weights: torch.nn.Module) -> int:
    """The bytes of weights that this rank has in memory."""
    own = (_local(p) for p in weights.parameters())
    return sum(p.nbytes for p in own if not p.is_meta)


def held(trainer: Any) -> dict[str, Any]:
    """What drives the model, what its ranks talk by, and the numbers that this rank holds of parameters and of the
    optimizer's state."""
    optimizer: Any = optimizer_utils.innermost(trainer.optimizer)
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    engine = trainer.model_wrapped
    return {
        "engine": str(trainer.accelerator.distributed_type.value),
        "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else 0,
        "backend": dist.get_backend() if dist.is_initialized() else "",
        "optimizer_class": type(optimizer).__name__,
        "parameters": sum(_local(p).numel() for p in trainer.model.parameters()),
        "optimizer": sum(_local(t).numel() for t in tensors if t.dim()),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor)
