"""One training step on fake tensors (shapes without memory), tracked by torch's own memory tracker.

The model, PEFT, FSDP2 as accelerate sets it up, DDP, autocast, activation checkpointing, TRL's loss and AdamW are the
real ones, as rank 0 of any world size. The fake tensors are on a CPU, because a CPU build of torch cannot train fake
CUDA tensors; `gpu_behavior` patches what differs on a GPU. Memory that a kernel allocates internally is not tracked.
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


class NoModuleTracker:
    """Replaces the module tracker, which cannot hook frozen weights. The parts of a step are tracked instead."""

    is_bw = False

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def register_user_hooks(self, *_: object) -> None: ...
    def clear_user_hooks(self) -> None: ...


class Tracker(MemTracker):
    """torch's MemTracker with a peak per part of a step: forward, loss, backward of upper and lower layers,
    optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = NoModuleTracker()
        self.part = ""
        self.peaks: dict[str, int] = {}
        self.kinds: dict[str, dict[str, int]] = {}

    def _update_peak_stats(self, peak_state: Any) -> None:
        for snapshot in self._curr_mem_snap.values():
            if snapshot["Total"] > self.peaks.get(self.part, 0):
                self.peaks[self.part] = snapshot["Total"]
                self.kinds[self.part] = {str(kind).rpartition(".")[2]: size for kind, size in snapshot.items()}

    def gradient(self, weight: torch.Tensor) -> None:
        self._update_and_maybe_create_winfos(weight.grad, _MemRefType.GRAD)

    def begin(self, part: str) -> None:
        self.part = part


def h100_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention with the kernel that torch 2.13 selects on an H100 (sdp_utils.cpp): FlashAttention
    in 16 bits without a mask, otherwise the memory-efficient kernel; with grouped-query attention, the math kernel.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    same_head_dim = query.shape[-1] == value.shape[-1]  # FlashAttention needs equal key and value widths
    if query.dtype != torch.float32 and attn_mask is None and same_head_dim:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if key.shape[1] == query.shape[1]:
        bias = None
        if attn_mask is not None:  # torch converts a boolean mask to a float mask in each layer
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).expand(-1, query.shape[1], -1, -1)
        kernel = aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    math_kernel = aten._scaled_dot_product_attention_math
    return math_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def gpu_softmax(scores: torch.Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax as on a GPU, where one kernel reads 16 bits and writes fp32."""
    if scores.element_size() == 2 and dtype is torch.float32:
        return aten._softmax(scores, dim, True)
    return torch.softmax(scores, dim, dtype=dtype)


class FakeGroupedMM(torch.autograd.Function):
    """torch's grouped matrix product of tokens and experts (torch 2.13 derivatives.yaml, _grouped_mm), which supports
    fake tensors in bf16 only. rows: (tokens x experts per token, inputs), weight: (experts, inputs, outputs)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight if rows.requires_grad else None)
        ctx.weight_layout = weight.shape, weight.stride()  # a gradient has the strides of its weight
        return rows.new_empty(len(rows), weight.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        back = grad.new_empty(len(grad), ctx.weight_layout[0][1]) if weight is not None else None
        return back, grad.new_empty_strided(*ctx.weight_layout) if rows is not None else None


class FakeTritonKernel:
    """A Triton kernel that allocates nothing: it writes to its arguments."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_, **__: None


class AllTokensLogProb:
    """TRL's loss, which copies the hidden states of tokens with a label. Fake labels have no values, so it copies
    all."""

    @staticmethod
    def apply(hidden: torch.Tensor, *more: Any) -> Any:
        return chunked.ChunkedLogProbFunction.apply(hidden.index_select(0, torch.arange(len(hidden))), *more)


@contextlib.contextmanager
def gpu_behavior() -> Iterator[None]:
    """Patch what differs on a GPU: attention, TRL's Triton kernels and its fp32 accumulation of 16-bit products.
    Branches that depend on tensor values assume sequences of different lengths. DDP neither verifies shapes nor
    broadcasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", h100_attention)
        patch.setattr(torch.nn.functional, "softmax", gpu_softmax)
        patch.setattr(masks, "is_tracing", lambda tensor: False)
        patch.setattr(masks, "fast_all", lambda mask: mask.shape[0] == 1)
        patch.setattr(chunked, "_use_triton", lambda device: True)
        patch.setattr(chunked, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)), raising=False)
        patch.setattr(chunked, "_forward_kernel", FakeTritonKernel())
        patch.setattr(chunked, "_backward_kernel", FakeTritonKernel())
        patch.setattr(chunked, "_addmm_fp32", lambda total, a, b: None)
        patch.setattr(fused, "_use_triton", lambda device: False)  # AllTokensLogProb is used instead
        patch.setattr(fused, "_ChunkedLogProbFunction", AllTokensLogProb)
        patch.setattr(moe, "_grouped_mm", lambda rows, weight, offs: FakeGroupedMM.apply(rows.to(weight.dtype), weight))
        patch.setattr(ddp, "_verify_param_shape_across_processes", lambda *_, **__: None)
        patch.setattr(ddp, "_sync_module_states", lambda *_, **__: None)
        yield


@dataclass
class Step:
    """One training step of `spec` on a model with this config."""

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
            with gpu_behavior(), FakeTensorMode(), self.tracker:
                self.make(mesh)
        finally:
            if count > 1:
                dist.destroy_process_group()
            gc.collect()
        return {part: size for part, size in self.tracker.peaks.items() if part}

    def make(self, mesh: Any) -> None:
        model = self.model()
        layers = next(module for name, module in model.named_modules() if name.endswith("layers"))
        wrapped = self.wrap(model, mesh)
        trainable = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trainable, foreach=True)  # the default on a GPU
        self.warm_up(optimizer, trainable)
        self.tracker.track_external(wrapped, optimizer)
        for weight in trainable:
            weight.register_post_accumulate_grad_hook(self.tracker.gradient)
        layers[-1].register_forward_hook(lambda _, __, out: self.begin_at_backward_of(out, "upper"))
        layers[len(layers) // 2].register_forward_pre_hook(
            lambda _, given: self.begin_at_backward_of(given[0], "lower")
        )
        for left in reversed(range(self.spec.train.gradient_accumulation_steps)):
            self.tracker.begin("forward")
            with self.no_sync(wrapped) if left else contextlib.nullcontext():
                self.loss(wrapped).backward()
        self.tracker.begin("step")
        nn.utils.clip_grad_norm_(trainable, 1.0, foreach=True)
        optimizer.step()

    @property
    def batch_size(self) -> int:
        return self.spec.train.per_device_train_batch_size

    def no_sync(self, wrapped: Any) -> Any:
        """accelerate's no_sync, used with DDP only: FSDP reduces the gradients of each micro-batch."""
        return wrapped.no_sync() if self.strategy.engine == "ddp" else contextlib.nullcontext()

    def begin_at_backward_of(self, hidden: torch.Tensor, part: str) -> None:
        """Begin `part` when the backward pass reaches `hidden`."""
        if self.tracker.part == "forward" and hidden.requires_grad:
            hidden.register_hook(lambda _: self.tracker.begin(part))

    def model(self) -> nn.Module:
        """The model as backend.train creates it, first on the meta device, where the dtype can be set."""
        lora = self.spec.method.kind == "lora"
        dtype = DTYPES[self.precision] if lora or not self.fp32_master_weights else torch.float32
        with torch.device("meta"):
            config = AutoConfig.for_model(**self.config)
            attention = {"auto": "sdpa"}.get(name := self.spec.model.attn_implementation, name)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
            model = adapters.apply_method(self.spec, model, self.precision)
        created: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, meta in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                new = nn.Parameter(torch.empty_like(meta, device="cpu"), meta.requires_grad)
                setattr(module, name, created.setdefault(id(meta), new))  # keep tied parameters tied
            for name, meta in list(module.named_buffers(recurse=False)):
                module._buffers[name] = torch.empty_like(meta, device="cpu")
        if self.spec.train.activation_checkpointing:
            model.activation_checkpointing_enable()
            if lora:
                model.enable_input_require_grads()
        base = model.get_base_model() if lora else model
        fused.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        return model.train()

    def wrap(self, model: nn.Module, mesh: Any) -> nn.Module:
        parallel = self.spec.parallel
        if self.strategy.engine == "ddp":
            wrapped = ddp.DistributedDataParallel(model, bucket_cap_mb=parallel.bucket_cap_mb)
            wrapped.register_comm_hook(None, fake_all_reduce)
            return wrapped
        if self.strategy.engine != "fsdp":
            return model
        compute_dtype = DTYPES[self.precision]
        reduce = torch.float32 if parallel.reduce_dtype == "fp32" else compute_dtype
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=parallel.reshard_after_forward,
            mixed_precision_policy=MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce),
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

    def warm_up(self, optimizer: torch.optim.Optimizer, trainable: list[nn.Parameter]) -> None:
        """Run one step, so that optimizer state exists and DTensor has cached the operators' sharding."""
        for weight in trainable:
            weight.grad = torch.empty_like(weight)
        nn.utils.clip_grad_norm_(trainable, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    def loss(self, model: nn.Module) -> torch.Tensor:
        """The loss as TRL's trainer computes it. accelerate uses autocast except with FSDP2, whose mixed-precision
        policy casts."""
        ids = torch.zeros(self.batch_size, self.spec.data.max_length, dtype=torch.int64)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "use_cache": False}
        router = {"output_router_logits": True} if "num_experts_per_tok" in self.config else {}
        autocast = self.precision != "fp32" and self.fp32_master_weights and self.strategy.engine != "fsdp"
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(**batch, **router, fused_lm_head=True)
        self.tracker.begin("loss")
        loss = -output.log_probs.sum() / ids.numel()
        return loss + output.aux_loss if router else loss


class EvaluationStep(Step):
    """The loss of an evaluation batch."""

    @property
    def batch_size(self) -> int:
        return self.spec.eval.per_device_eval_batch_size

    def make(self, mesh: Any) -> None:
        model = self.model().eval()
        self.tracker.track_external(model)
        self.tracker.begin("evaluation")
        with torch.no_grad():
            self.loss(model)


def fake_all_reduce(_, bucket):  # DDP rejects annotations that are strings
    """A communication hook that returns the bucket at once: the fake process group has no asynchronous all-reduce."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def peaks(spec: RunSpec, config: Config, layers: int) -> dict[str, int]:
    """The peak bytes of each part of a training step, for the model with `layers` layers."""
    return Step(spec, {**config, "num_hidden_layers": layers}).peaks()
