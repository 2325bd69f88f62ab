"""TimeContext: what all parts of the time of a step need, each computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from backend import registry
from backend.inspect import CpuSpeed
from backend.memory import MemoryContext
from backend.memory.activations import layers_with_gradients
from backend.modelspec import TokenWeights, lora_modules, token_weights, trained_modules
from backend.registry.gpus import GpuModel
from backend.timing.batch import Batch
from backend.timing.rates import GLOO_SHARE, Calibration, DeviceRates, LinkRates, cpu_rates, device_rates, link_rates

STOCK, FUSED, UNSLOTH, COMPILED = "transformers", "liger", "unsloth", "compile"  # sets of kernels


@dataclass(frozen=True)
class TimeContext:
    """The run of a memory estimate, its average batch, and what its GPUs can do, or its CPU. `labeled_share`: share of
    the tokens without padding that have a loss."""

    memory: MemoryContext
    batch: Batch
    models: tuple[GpuModel, ...]
    calibration: Calibration
    cpu: CpuSpeed | None = None
    labeled_share: float = 1.0

    @cached_property
    def kernels(self) -> str:
        """Which kernels compute norms, rotary embeddings and MLPs."""
        train = self.memory.spec.train
        if train.use_unsloth:
            return UNSLOTH
        return COMPILED if train.torch_compile else FUSED if train.use_liger_kernel else STOCK

    @cached_property
    def rates(self) -> DeviceRates:
        """What the devices reach."""
        if self.cpu:
            return cpu_rates(self.cpu)
        own = self.memory.spec.model.attn_implementation == "flash_attention_3"
        return device_rates(list(self.models), self.memory.run.compute_dtype, own, self.calibration)

    @cached_property
    def links(self) -> LinkRates:
        """What the links and the network reach."""
        if self.cpu:
            return LinkRates(GLOO_SHARE * self.cpu.memory, GLOO_SHARE * self.cpu.memory)
        return link_rates(self.memory.run, self.memory.machine, list(self.models), self.calibration)

    @cached_property
    def weights(self) -> TokenWeights:
        """The matrices that one token is multiplied with."""
        return token_weights(self.memory.spec, self.memory.shape)

    @cached_property
    def recomputed(self) -> int:
        """1 if the forward pass of the layers is computed again in the backward pass, else 0."""
        return int(self.memory.spec.train.activation_checkpointing)

    @cached_property
    def reached(self) -> float:
        """Share of the layers that the backward pass reaches: with the method freeze, it ends at the first layer that
        is trained."""
        return layers_with_gradients(self.memory) / self.memory.shape.layers

    @cached_property
    def passes(self) -> float:
        """Passes over the activations of the layers: one forward, two backward, and one that recomputes them."""
        return 1 + 2 * self.reached + self.recomputed

    @cached_property
    def tokens(self) -> float:
        """Tokens that one device computes in a batch."""
        return self.batch.tokens / self.memory.run.token_shards

    @cached_property
    def head_tokens(self) -> float:
        """Tokens whose logits one device computes in a batch: TRL's chunked loss skips those without a label."""
        is_chunked = self.memory.spec.launch.trainer == "footplate" and self.kernels in (STOCK, COMPILED)
        if self.labeled_share == 1 or not is_chunked:
            return self.tokens
        return self.batch.sequences * self.batch.trained * self.labeled_share / self.memory.run.token_shards

    @cached_property
    def element_scale(self) -> float:
        """What an operation on an element moves, as a multiple of the 16 bits that bytes are counted for. CPUs convert
        16 bits to fp32 and back, which takes about as long as moving 32."""
        return 2.0 if self.cpu else self.memory.compute_bytes / 2

    @cached_property
    def model_shards(self) -> int:
        """Devices that share each matrix multiplication."""
        return self.memory.run.tensor_parallel_size

    @cached_property
    def trained_tensors(self) -> int:
        """Tensors that the optimizer updates, one after another on a CPU."""
        shape = self.memory.shape
        if self.memory.is_lora:
            return 2 * sum(leaf.count for leaf in lora_modules(self.memory.spec.lora, shape))
        return sum(leaf.count for leaf in trained_modules(self.memory.spec, shape))

    @cached_property
    def adapters_per_layer(self) -> float:
        """Modules with an adapter in each layer."""
        if not self.memory.is_lora:
            return 0
        adapted = lora_modules(self.memory.spec.lora, self.memory.shape)
        return sum(leaf.count for leaf in adapted) / self.memory.shape.layers

    @cached_property
    def quantized_per_layer(self) -> float:
        """Quantized modules in each layer."""
        return sum(self.memory.quantized_matrices.values()) / self.memory.shape.layers

    @cached_property
    def attention_pairs(self) -> float:
        """Share of the pairs of tokens that attention computes: kernels without a mask skip future tokens."""
        name = self.memory.spec.model.attn_implementation
        takes_no_mask = name in (*registry.FLASH_ATTENTIONS, "flex_attention")
        is_padded = self.batch.sequences > 1 and self.batch.trained < self.batch.length
        takes_no_mask = takes_no_mask or self.memory.run.token_shards > 1  # see memory.activations
        has_mask = (is_padded or self.memory.spec.data.packing) and not takes_no_mask
        return 1.0 if self.writes_scores or has_mask else 0.5

    @cached_property
    def writes_scores(self) -> bool:
        """Whether attention writes the scores of all pairs of tokens to memory."""
        name = self.memory.spec.model.attn_implementation
        return name == "eager" or (name == "auto" and not self.memory.shape.supports_sdpa)
