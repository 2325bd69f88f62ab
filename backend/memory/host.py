"""Host RAM next to the devices: libraries, offloaded tensors, and parameters or state while they are loaded or saved.

On a CPU run the processes themselves are the devices: nothing is counted here.
"""

from __future__ import annotations

from backend import registry
from backend.memory import quantized
from backend.memory.context import MIB, MemoryContext, Row
from backend.memory.sharding import reference_rows

LIBRARY_BYTES = 560 * MIB  # of one process: Python, torch, transformers
FILE_BYTES = 5 * 10**9  # the usual size of a safetensors file on the Hub


def host_rows(ctx: MemoryContext) -> list[Row]:
    """RAM of one node. What loading needs is freed before the optimizer creates its state and before a checkpoint, so
    the largest counts."""
    if ctx.on_cpu:
        return []
    count = ctx.run.nproc_per_node
    libraries = (
        f"{count} process{'es' if count > 1 else ''} x {LIBRARY_BYTES // MIB} MiB: Python and libraries, approximate"
    )
    rows = [Row("Libraries", count * LIBRARY_BYTES, libraries, "host"), *_offloaded_rows(ctx)]
    largest = max(
        _loading_row(ctx, sum(row.bytes for row in rows[1:])), _checkpoint_row(ctx), key=lambda row: row.bytes
    )
    return [*rows, largest] if largest.bytes > 0 else rows


def _loading_row(ctx: MemoryContext, offloaded: int) -> Row:
    """Parameters in RAM until they are on the devices, as far as they exceed what is offloaded later."""
    run, is_quantized = ctx.run, bool(ctx.quantized_matrices)
    keeps_base = ctx.is_lora and not registry.LORA_INITS[ctx.spec.lora.init].changes_base_weights
    each = ctx.compute_bytes if keeps_base else ctx.trainable_bytes
    count = ctx.unquantized_count if ctx.is_lora else ctx.shape.parameters
    model = count * each + ctx.quantized_bytes
    if is_quantized and ctx.engine.shards_from_host:
        model += quantized.scale_bytes(ctx.spec, ctx.shape, ctx.quantized_matrices)
    elif is_quantized and run.zero_stage != 3:  # each weight is moved to the device when it is read
        model = min(model, FILE_BYTES)
    readers = _readers(ctx)
    reference = sum(row.bytes for row in reference_rows(ctx))
    if ctx.engine.loads_reference_on_host and ctx.spec.needs_reference_model:  # TRL shards it after every rank read it
        reference = count * ctx.compute_bytes + ctx.quantized_bytes
    model //= run.tensor_parallel_size  # each rank reads its slice of every sharded tensor
    formula = f"{readers} x {model:,} bytes"
    formula += f" + {run.nproc_per_node} x {reference:,} bytes of the reference model" if reference else ""
    formula += f" - {offloaded:,} bytes that are offloaded later" if offloaded else ""
    total = readers * model + run.nproc_per_node * reference - offloaded
    return Row("Model loading", total, formula, "host")


def _readers(ctx: MemoryContext) -> int:
    """Processes of the node of rank 0 that hold the values of the weights. Under ZeRO-3, only rank 0 copies them to the
    shards; on the other ranks they are on the meta device (transformers 5.23). LLaMA-Factory 0.9 requires transformers
    <=5.6: there the other ranks map the files without reading them, but every rank makes stacked copies of experts."""
    run, is_zero3 = ctx.run, ctx.run.zero_stage == 3
    stacks = ctx.spec.launch.trainer == "llamafactory" and ctx.shape.most_experts > 0
    if not run.loads_on_rank0 or (is_zero3 and (ctx.quantized_matrices or stacks)):
        return run.nproc_per_node
    return 1


def _checkpoint_row(ctx: MemoryContext) -> Row:
    """What FSDP copies to RAM before it is written: first the weights, then the optimizer state (torch 2.13
    distributed/checkpoint/state_dict.py, _maybe_full_or_cpu_state_dict). A full state dict has frozen weights too."""
    save, optimizer = ctx.spec.save, ctx.optimizer
    share = ctx.engine.checkpoint_share(ctx.spec, ctx.run.nproc_per_node, ctx.run.world_size)
    is_full = ctx.spec.parallel.state_dict_type == "full"
    frozen = (ctx.unquantized_count * ctx.compute_bytes + ctx.quantized_bytes) if is_full else 0
    weights, state = ctx.trainable_count * ctx.trainable_bytes + frozen, 0 if save.only_model else optimizer.bytes
    formula = optimizer.formula() if state > weights else f"{weights:,} bytes of parameters"
    part = f" x {share:g} on the node of rank 0" if share != 1 else ""
    size = round((save.strategy != "no") * share * max(weights, state))
    formula += f"{part}, copied to RAM before FSDP writes the checkpoint"
    return Row("Checkpoint saving", size, formula, "host")


def _offloaded_rows(ctx: MemoryContext) -> list[Row]:
    """What all processes of a node keep in RAM instead of on their devices."""
    rows, trainable, nproc = [], ctx.trainable_count, ctx.run.nproc_per_node
    shards = nproc / ctx.run.optimizer_shards  # share of the state that is on one node
    part = f" x {nproc} / {ctx.run.optimizer_shards} processes" if nproc != ctx.run.optimizer_shards else ""
    if ctx.optimizer_is_on_host:
        formula = f"{nproc} x {ctx.optimizer.formula()}"
        rows.append(Row("Optimizer state", nproc * ctx.optimizer.bytes, formula, "host"))
    if ctx.optimizer_offload == "cpu":
        # Parameters and gradients are there too: deepspeed 0.19 stage_1_and_2.py, in fp32; torch's CPUOffloadPolicy, in
        # the dtype of the parameters.
        each = ctx.optimizer.row.state_bytes + 8
        size, formula = trainable * each, f"{trainable:,} parameters x {each:g} bytes: state, fp32 parameters"
        if not ctx.engine.separate_master_weights:
            each = 2 * ctx.trainable_bytes
            size = ctx.optimizer.bytes + trainable * each
            formula = f"{ctx.optimizer.formula()}, and {trainable:,} parameters x {each} bytes: parameters"
        rows.append(Row("Offloaded optimizer state", round(shards * size), f"{formula} and gradients{part}", "host"))
    if ctx.param_offload == "cpu":
        each = ctx.compute_bytes
        count = ctx.unquantized_count + ctx.quantized_bytes // each
        count += trainable if ctx.engine.separate_master_weights else 0
        if ctx.spec.needs_reference_model and not ctx.spec.preference.precompute_ref_log_probs:
            count += ctx.shape.parameters
        formula = f"{count:,} parameters x {each} bytes{part}"
        rows.append(Row("Offloaded parameters", round(shards * count * each), formula, "host"))
    return rows
