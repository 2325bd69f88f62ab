"""One step of a training on fake tensors, which have shapes and no bytes, followed by torch's own memory tracker.

The model, peft, FSDP2 as accelerate sets it up, DDP, autocast, checkpointing, TRL's loss and AdamW are the real ones,
as rank 0 of however many. Fake tensors are a CPU's here, since a torch for CPUs makes no others that can be trained;
what a GPU does otherwise is put in place by `of_a_gpu`. What a kernel allocates for itself is not seen.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.integrations.moe as moe
import transformers.masking_utils as masks
import trl.kernels.chunked_logprob as chunked
import trl.trainer.utils as fused
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from backend import registry
from backend.config import RunSpec
from backend.config.processes import world_size
from backend.train import adapters
from backend.train.device import DTYPES

aten = torch.ops.aten
Config = Mapping[str, Any]


class Unwatched:
    """In the place of what follows modules: it cannot hook frozen weights, and parts of a step are followed instead."""

    is_bw = False

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def register_user_hooks(self, *_: object) -> None: ...
    def clear_user_hooks(self) -> None: ...


class Tracker(MemTracker):
    """torch's tracker. It keeps the peak of each part: forward, loss, upper and lower layers backward, step."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = Unwatched()
        self.part = ""
        self.peaks: dict[str, int] = {}
        self.kinds: dict[str, dict[str, int]] = {}

    def _update_peak_stats(self, peak_state: Any) -> None:
        for found in self._curr_mem_snap.values():
            if found["Total"] > self.peaks.get(self.part, 0):
                self.peaks[self.part] = found["Total"]
                self.kinds[self.part] = {str(kind).rpartition(".")[2]: size for kind, size in found.items()}

    def gradient(self, weight: torch.Tensor) -> None:
        self._update_and_maybe_create_winfos(weight.grad, _MemRefType.GRAD)

    def begin(self, part: str) -> None:
        self.part = part


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention by the kernel that torch 2.13 chooses on an H100 (sdp_utils.cpp): FlashAttention in
    16 bits without a mask, else the memory-efficient one, which takes no keys that heads share: those are written out.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    alike = query.shape[-1] == value.shape[-1]  # FlashAttention takes no values of another width (multi-head latent)
    if query.dtype != torch.float32 and attn_mask is None and alike:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if key.shape[1] == query.shape[1]:
        bias = None
        if attn_mask is not None:  # torch turns it into numbers, for every layer anew
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).expand(-1, query.shape[1], -1, -1)
        kernel = aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    written = aten._scaled_dot_product_attention_math
    return written(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


class Grouped(torch.autograd.Function):
    """torch's product of rows and their experts (torch 2.13 derivatives.yaml, _grouped_mm), which has fake ones in bf16
    alone. rows: (tokens x chosen, inputs), weight: (experts, inputs, outputs)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight if rows.requires_grad else None)
        ctx.like = weight.shape, weight.stride()  # a gradient lies as its weight does
        return rows.new_empty(len(rows), weight.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        back = grad.new_empty(len(grad), ctx.like[0][1]) if weight is not None else None
        return back, grad.new_empty_strided(*ctx.like) if rows is not None else None


class Kernel:
    """A Triton kernel: it works in the tensors that it is given."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


class Chosen:
    """TRL's loss of the learned tokens, which are copied out. How many is not known of fake ones: here, all."""

    @staticmethod
    def apply(hidden: torch.Tensor, *more: Any) -> Any:
        return chunked.ChunkedLogProbFunction.apply(hidden.index_select(0, torch.arange(len(hidden))), *more)


@contextlib.contextmanager
def of_a_gpu() -> Iterator[None]:
    """What a GPU does otherwise: attention, TRL's Triton kernels and its product of 16 bits into 32. Values that decide
    are given: rows of a batch are of different lengths. DDP compares no shapes and sends no weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        patch.setattr(masks, "is_tracing", lambda tensor: False)
        patch.setattr(masks, "fast_all", lambda mask: mask.shape[0] == 1)
        patch.setattr(chunked, "_use_triton", lambda device: True)
        patch.setattr(chunked, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)), raising=False)
        patch.setattr(chunked, "_forward_kernel", Kernel())
        patch.setattr(chunked, "_backward_kernel", Kernel())
        patch.setattr(chunked, "_addmm_fp32", lambda total, a, b: None)
        patch.setattr(fused, "_use_triton", lambda device: False)  # `Chosen` chooses; a training before may have set it
        patch.setattr(fused, "_ChunkedLogProbFunction", Chosen)
        patch.setattr(moe, "_grouped_mm", lambda rows, weight, offs: Grouped.apply(rows.to(weight.dtype), weight))
        patch.setattr(ddp, "_verify_param_shape_across_processes", lambda *_, **__: None)
        patch.setattr(ddp, "_sync_module_states", lambda *_, **__: None)
        yield


@dataclass
class Step:
    """A training of `spec`, of a model with this config, that makes one step."""

    spec: RunSpec
    config: Config
    tracker: Tracker = field(default_factory=Tracker)

    def __post_init__(self) -> None:
        self.strategy = registry.STRATEGIES[self.spec.parallel.strategy]
        self.fp32_master_weights = registry.PRECISIONS[self.spec.precision.compute].fp32_master_weights
        self.precision = registry.PRECISIONS[self.spec.precision.compute].compute_dtype

    def peaks(self) -> dict[str, int]:
        """The most bytes on rank 0 in each part of the step."""
        count, mesh = world_size(self.spec), None
        try:
            if count > 1:
                dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
                mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("shard",))
            with of_a_gpu(), FakeTensorMode(), self.tracker:
                self.make(mesh)
        finally:
            if count > 1:
                dist.destroy_process_group()
            gc.collect()
        return {part: size for part, size in self.tracker.peaks.items() if part}

    def make(self, mesh: Any) -> None:
        model = self.model()
        layers = next(module for name, module in model.named_modules() if name.endswith("layers"))
        whole = self.spread(model, mesh)
        taught = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(taught, foreach=True)  # as by itself on a GPU
        self.warm(optimizer, taught)
        self.tracker.track_external(whole, optimizer)
        for weight in taught:
            weight.register_post_accumulate_grad_hook(self.tracker.gradient)
        layers[-1].register_forward_hook(lambda _, __, out: self.then(out, "upper"))
        layers[len(layers) // 2].register_forward_pre_hook(lambda _, given: self.then(given[0], "lower"))
        for left in reversed(range(self.spec.train.gradient_accumulation_steps)):
            self.tracker.begin("forward")
            with self.unsent(whole) if left else contextlib.nullcontext():
                self.loss(whole).backward()
        self.tracker.begin("step")
        nn.utils.clip_grad_norm_(taught, 1.0, foreach=True)
        optimizer.step()

    def unsent(self, whole: Any) -> Any:
        """As accelerate's no_sync, which only DDP is given: FSDP sends the gradients of each batch (engine.py)."""
        return whole.no_sync() if self.strategy.engine == "ddp" else contextlib.nullcontext()

    def then(self, stream: torch.Tensor, part: str) -> None:
        """When the backward pass reaches `stream`, this part begins."""
        if self.tracker.part == "forward" and stream.requires_grad:
            stream.register_hook(lambda _: self.tracker.begin(part))

    def model(self) -> nn.Module:
        """As backend.train makes it; on the meta device first, where weights can be given another type."""
        lora = self.spec.method.kind == "lora"
        dtype = DTYPES[self.precision] if lora or not self.fp32_master_weights else torch.float32
        with torch.device("meta"):
            config = AutoConfig.for_model(**self.config)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
            model = adapters.apply_method(self.spec, model, self.precision)
        known: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                new = nn.Parameter(torch.empty_like(old, device="cpu"), old.requires_grad)
                setattr(module, name, known.setdefault(id(old), new))  # tied ones stay one
            for name, old in list(module.named_buffers(recurse=False)):
                module._buffers[name] = torch.empty_like(old, device="cpu")
        if self.spec.train.activation_checkpointing:
            model.activation_checkpointing_enable()
            if lora:
                model.enable_input_require_grads()
        base = model.get_base_model() if lora else model
        fused.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        return model.train()

    def spread(self, model: nn.Module, mesh: Any) -> nn.Module:
        parallel = self.spec.parallel
        if self.strategy.engine == "ddp":
            whole = ddp.DistributedDataParallel(model, bucket_cap_mb=parallel.bucket_cap_mb)
            whole.register_comm_hook(None, arrived)
            return whole
        if self.strategy.engine != "fsdp":
            return model
        computes = DTYPES[self.precision]
        reduce = torch.float32 if parallel.reduce_dtype == "fp32" else computes
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=parallel.reshard_after_forward,
            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=reduce),
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision=self.precision if self.fp32_master_weights and self.precision != "fp32" else "no",
            is_main_process=False,
            device=torch.device("cpu"),
            torch_device_mesh=mesh,
            parallelism_config=SimpleNamespace(fsdp_dim_names=["shard"]),
        )
        return fsdp2_prepare_model(accelerator, model)

    def warm(self, optimizer: torch.optim.Optimizer, taught: list[nn.Parameter]) -> None:
        """A step before, so that there is state, and DTensor knows the operators: it asks for their shapes once."""
        for weight in taught:
            weight.grad = torch.empty_like(weight)
        nn.utils.clip_grad_norm_(taught, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    def loss(self, model: nn.Module) -> torch.Tensor:
        """As TRL's trainer computes it. accelerate casts by autocast, but under FSDP2, whose policy casts."""
        train = self.spec.train
        ids = torch.zeros(train.per_device_train_batch_size, self.spec.data.max_length, dtype=torch.int64)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "use_cache": False}
        balanced = {"output_router_logits": True} if "num_experts_per_tok" in self.config else {}
        casts = self.precision != "fp32" and self.fp32_master_weights and self.strategy.engine != "fsdp"
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            out = model(**given, **balanced, fused_lm_head=True)
        self.tracker.begin("loss")
        loss = -out.log_probs.sum() / ids.numel()
        return loss + out.aux_loss if balanced else loss


def arrived(_, bucket):  # DDP refuses types that are written as strings
    """All ranks' gradients, at once: DDP's own way asks a work that the fake group does not make."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def peaks(spec: RunSpec, config: Config, layers: int) -> dict[str, int]:
    """The peak of each part of a step of the model, cut to so many layers."""
    return Step(spec, {**config, "num_hidden_layers": layers}).peaks()
