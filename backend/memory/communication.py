"""What a device sends to others, and to the host's RAM, at each optimizer step. Floor 2. Imports derived, spread.

Rings: to gather or to scatter B bytes over n devices each sends B (n - 1) / n, to add them up on all twice that. So
plain data parallel sends two gradients, and one that spreads the weights three times their size at each batch
(arXiv 1910.02054, 7.2).
"""

from __future__ import annotations

from backend.memory.sharding import Spread


def sent(it: Spread, tokens: int) -> int:
    """Bytes over the network, of batches of `tokens` each."""
    spec, row, devices = it.spec, it.strategy, it.run.world_size
    batches, gradient = spec.train.gradient_accumulation_steps, it.trained * _gradient_width(it)
    if not row.engine or devices == 1:
        return 0
    if row.engine == "tensor":
        slices = it.run.tensor_parallel_size
        each = 4 * it.shape.layers * tokens * it.shape.hidden * it.width  # two sums forward, two backward
        apart = _spread(it, devices // slices, gradient, batches) // slices
        return batches * 2 * _ring(each, slices) + apart
    if it.holders == 1:
        return 2 * _ring(gradient, devices)
    copies = devices // it.holders
    return _spread(it, it.holders, gradient, batches) + 2 * _ring(gradient // it.holders, copies)


def _spread(it: Spread, holders: int, gradient: int, batches: int) -> int:
    parallel, row = it.spec.parallel, it.strategy
    stays = (
        parallel.sharding_strategy == "shard_grad_op" if row.fsdp_version == 1 else not parallel.reshard_after_forward
    )
    times = 1 if row.engine == "fsdp" and stays else 2  # before the forward pass, and again before the backward pass
    weights = (it.plain + it.trained) * it.width + it.packed_bytes
    return batches * _ring(times * weights + gradient, holders)


def hosted(it: Spread) -> int:
    """Bytes between a device and the host, for what is kept away from the device."""
    moved = 2 * it.trained * it.width // it.sharers if it.optimizer_away else 0
    weights = ((it.plain + it.trained) * it.width + it.packed_bytes) // it.holders
    return moved + (it.spec.train.gradient_accumulation_steps * 2 * weights if it.weights_away else 0)


def _gradient_width(it: Spread) -> int:
    """Bytes of a gradient on its way."""
    if it.zero or not it.run.fp32_master_weights:
        return it.width
    return it.width if it.strategy.engine == "fsdp" and it.spec.parallel.reduce_dtype == "compute" else 4


def _ring(count: int, devices: int) -> int:
    return count * (devices - 1) // max(1, devices)
