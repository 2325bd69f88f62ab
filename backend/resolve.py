"""ResolvedRun: everything that follows from a spec, a machine and the inspected inputs, derived once.

Pure and torch-free. Rules, memory estimate, plan, page and trainer read it and derive nothing themselves. It is written
into the run's folder (resolved.json), where the trainer compares it with what it finds on each rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from backend import registry
from backend.config import RunSpec
from backend.config.processes import nnodes, nproc_per_node, rendezvous_port, world_size
from backend.engines import Engine, engine_of
from backend.inspect.facts import InputFacts
from backend.machine import Gpu, Machine


@dataclass(frozen=True)
class ResolvedRun:
    """What a run does on a machine. Sizes are process counts, `*_shards` the processes that a tensor is sharded over
    (1: every process holds all of it); None means not known before the run."""

    strategy: str  # a key of registry.STRATEGIES
    device: str  # the device type: a key of registry.DEVICES
    device_ids: tuple[int, ...]  # on each node; empty for device types without ids (cpu, mps)
    nproc_per_node: int
    nnodes: int  # the maximum for an elastic run
    world_size: int
    data_parallel_size: int  # process groups that train on different examples
    tensor_parallel_size: int
    context_parallel_size: int
    sequence_parallel_size: int
    backend: str  # of torch.distributed; '' for a single process
    master_port: int  # must be free on this node; 0 if a free port is picked, or another node listens
    compute_dtype: str  # bf16, fp16 or fp32
    fp32_master_weights: bool  # trainable weights, gradients and optimizer state are kept in fp32
    parameter_shards: int
    gradient_shards: int
    optimizer_shards: int
    optimizer_offload: str  # none, cpu or nvme
    param_offload: str
    loads_on_rank0: bool  # rank 0 reads the weights and sends the others their shards
    needs_reference_model: bool
    checkpoint_format: str  # ddp, deepspeed, fsdp or sharded
    global_batch_size: int  # examples of one optimizer step, over all processes
    num_train_examples: int | None = None
    num_eval_examples: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None

    @property
    def engine(self) -> Engine:
        """The engine of the strategy."""
        return engine_of(self.strategy)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 without DeepSpeed and for its stage 0."""
        return self.engine.zero_stage

    @property
    def fsdp_version(self) -> int:
        """1 or 2; 0 without FSDP."""
        return self.engine.fsdp_version

    @property
    def on_gpu(self) -> bool:
        """Whether the devices have ids: CUDA, Ascend and Intel."""
        return self.device in ("cuda", "npu", "xpu")

    @property
    def token_shards(self) -> int:
        """Devices that share the tokens of one sequence, by context or sequence parallelism."""
        return self.context_parallel_size * self.sequence_parallel_size

    def to_json(self) -> str:
        """The text of resolved.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ResolvedRun:
        """Read back what `to_json` wrote. Raises ValueError for anything else."""
        found = json.loads(text)
        names = {field.name for field in fields(cls)}
        if not isinstance(found, Mapping) or names != found.keys():
            raise ValueError("resolved.json was written by another version of Footplate")
        return cls(**{**found, "device_ids": tuple(found["device_ids"])})


def resolve(spec: RunSpec, machine: Machine, facts: InputFacts | None = None) -> ResolvedRun:
    """What `spec` does on `machine`. Never raises: combinations that cannot work are reported by the rules."""
    facts = facts or InputFacts()
    engine, world = engine_of(spec.parallel.strategy), world_size(spec)
    tensor, context = engine.tensor_parallel_size(spec), engine.context_parallel_size(spec)
    sequence = engine.sequence_parallel_size(spec)
    parameter_shards, optimizer_shards = engine.parameter_shards(spec, world), engine.optimizer_shards(spec, world)
    gradient_shards = engine.gradient_shards(spec, world)
    model_parallel = tensor  # devices that share one copy of the model
    if spec.other_backend == "megatron":  # Megatron divides model and sequences itself
        tensor, context = spec.llamafactory.tensor_parallel_size, spec.llamafactory.context_parallel_size
        model_parallel = tensor * spec.llamafactory.pipeline_parallel_size
        parameter_shards = gradient_shards = model_parallel
        optimizer_shards = max(world, parameter_shards)  # the distributed optimizer
    data_parallel = max(1, world // (model_parallel * context * sequence))
    device = device_type(spec, machine)
    examples = facts.num_in_epoch(spec)
    return ResolvedRun(
        strategy=spec.parallel.strategy,
        device=device,
        device_ids=_device_ids(spec, machine) if registry.DEVICES[device].visible_devices_env else (),
        nproc_per_node=nproc_per_node(spec),
        nnodes=nnodes(spec),
        world_size=world,
        data_parallel_size=data_parallel,
        tensor_parallel_size=tensor,
        context_parallel_size=context,
        sequence_parallel_size=sequence,
        backend=registry.DEVICES[device].backends[0] if world > 1 else "",
        master_port=rendezvous_port(spec),
        compute_dtype=_compute_dtype(spec, machine, device),
        fp32_master_weights=spec.fp32_master_weights,
        parameter_shards=parameter_shards,
        gradient_shards=gradient_shards,
        optimizer_shards=optimizer_shards,
        optimizer_offload=engine.optimizer_offload(spec),
        param_offload=engine.param_offload(spec),
        loads_on_rank0=engine.loads_on_rank0(spec),
        needs_reference_model=spec.needs_reference_model,
        checkpoint_format=engine.checkpoint_format(spec),
        global_batch_size=global_batch_size(spec, data_parallel),
        num_train_examples=examples,
        num_eval_examples=facts.num_eval_examples(spec.data),
        steps_per_epoch=_steps_per_epoch(spec, examples, data_parallel),
        total_steps=total_steps(spec, examples, data_parallel),
    )


def threads_per_process(spec: RunSpec, nproc_per_node: int, cores: int) -> int:
    """OMP_NUM_THREADS of each process: what is set, else the cores divided by the processes of a node."""
    return spec.launch.omp_num_threads or max(1, cores // nproc_per_node)


def device_type(spec: RunSpec, machine: Machine) -> str:
    """The requested device type, or the accelerator that the machine has, else cpu."""
    return machine.device if spec.launch.device == "auto" else spec.launch.device


def _device_ids(spec: RunSpec, machine: Machine) -> tuple[int, ...]:
    """The device ids that the run uses on each node: those that are set, or the first ones."""
    return spec.launch.devices or tuple(gpu.id for gpu in machine.gpus[: nproc_per_node(spec)])


def selected_gpus(run: ResolvedRun, machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs of `machine` that the run uses. Rules about GPUs look at these, not at all of the machine's."""
    return tuple(gpu for gpu in machine.gpus if gpu.id in run.device_ids)


def device_names(run: ResolvedRun, machine: Machine) -> list[str]:
    """What selects each device of the run in a variable such as CUDA_VISIBLE_DEVICES."""
    names = {gpu.id: gpu.visible_as for gpu in machine.gpus}
    return [names.get(number, str(number)) for number in run.device_ids]


def estimated_gpus(run: ResolvedRun, machine: Machine) -> tuple[Gpu, ...]:
    """The GPUs that the estimate is about: the selected ones, else the first of the machine, one for each process."""
    return selected_gpus(run, machine) or machine.gpus[: run.nproc_per_node]


def _compute_dtype(spec: RunSpec, machine: Machine, device: str) -> str:
    """The dtype of the chosen precision; for auto, bf16 if every selected device has bf16 units, else fp32."""
    if chosen := registry.PRECISIONS[spec.precision.compute].compute_dtype:
        return chosen
    if device == "cuda":
        ids = _device_ids(spec, machine)
        return "fp32" if any(before_ampere(gpu.capability) for gpu in machine.gpus if gpu.id in ids) else "bf16"
    return "bf16" if device in ("npu", "xpu") else "fp32"


def before_ampere(capability: tuple[int, int]) -> bool:
    """Whether an NVIDIA GPU has no bf16 units. (0, 0) is a GPU of another vendor."""
    return (0, 0) < capability < (8, 0)


def global_batch_size(spec: RunSpec, data_parallel_size: int) -> int:
    """Examples that one optimizer step trains on, over all processes."""
    return spec.train.per_device_train_batch_size * spec.train.gradient_accumulation_steps * data_parallel_size


def total_steps(spec: RunSpec, examples: int | None, data_parallel_size: int) -> int | None:
    """Optimizer steps of the whole run; None if the number of examples is not known, or packing reduces it."""
    if spec.train.duration == "steps":
        return spec.train.max_steps
    each = _steps_per_epoch(spec, examples, data_parallel_size)
    return None if each is None else max(1, math.ceil(spec.train.num_train_epochs * each))


def _steps_per_epoch(spec: RunSpec, examples: int | None, data_parallel_size: int) -> int | None:
    """Optimizer steps of one epoch, including the last, smaller batch."""
    if examples is None or spec.data.packing:
        return None
    batches = math.ceil(math.ceil(examples / spec.train.per_device_train_batch_size) / data_parallel_size)
    # Each rank of a sequence parallel group reads a batch, and the group trains on one after the other: deepspeed 0.19
    # runtime/sequence_parallel/ulysses_sp.py, UlyssesSPDataLoaderAdapter.
    group = engine_of(spec.parallel.strategy).sequence_parallel_size(spec)
    batches = math.ceil(batches / group) * group
    return max(1, math.ceil(batches / spec.train.gradient_accumulation_steps))
