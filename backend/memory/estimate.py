"""estimate(): the rows of a device's largest peak, of host RAM and of disk."""

from __future__ import annotations

from dataclasses import dataclass

from backend.config import RunSpec
from backend.inspect.facts import InputFacts
from backend.machine import GIB, Machine
from backend.memory import loss, quantized
from backend.memory.activations import layer_activations
from backend.memory.backends import UNKNOWN, backend_rows
from backend.memory.context import MemoryContext, Row
from backend.memory.disk import disk_rows
from backend.memory.fit import Fit, fit_of, worst
from backend.memory.host import LIBRARY_BYTES, host_rows
from backend.memory.peaks import Peak, evaluation, generation, optimizer_step, step_moments
from backend.memory.sharding import bucket_rows, parameter_rows, persistent_gathered_rows, reference_rows
from backend.memory.uncertainty import peak_ratios
from backend.resolve import ResolvedRun, estimated_gpus

CONTEXT_BYTES = 1 * GIB  # of a process on a GPU: context, kernels, cuBLAS workspaces
COLLECTIVES_BYTES = GIB // 2  # NCCL's buffers
OVERHEAD = "Device context and libraries"  # the row that torch's allocator does not see
LOADING, OPTIMIZER_STEP, EVALUATION, GENERATION = "Loading", "Optimizer step", "Evaluation", "Generation"  # phases
WITHOUT_ACTIVATIONS = (LOADING, OPTIMIZER_STEP)  # phases that depend neither on the batch nor on checkpointing


@dataclass(frozen=True)
class Moment:
    """A moment of a run: its phase, when in the phase it is, and what a device holds then."""

    phase: str
    at: str
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """Bytes on each device, in host RAM and on disk. `unknown` is why memory is not known, completely or in part; with
    `lower_bound`, the rows are what is known of it. `moments` are in order; one of them is the peak."""

    rows: tuple[Row, ...] = ()
    capacity_bytes: int = 0
    unknown: str = ""
    lower_bound: bool = False
    ratios: tuple[float, float] = (1.0, 1.0)  # lowest and highest ratio of the real peak on a device to the estimate
    moments: tuple[Moment, ...] = ()
    certain_bytes: int = 0  # of the peak on a device: exact arithmetic, so the real peak is not below it

    def is_limited_by(self, phase: str) -> bool:
        """Whether memory peaks in this phase, or the upper bound of the phase exceeds the free memory."""
        least = min(self.device_bytes, self.capacity_bytes / self.ratios[1])
        return any(moment.phase == phase and moment.bytes >= least for moment in self.moments)

    @property
    def phases(self) -> tuple[Moment, ...]:
        """The largest moment of each phase, in order."""
        largest: dict[str, Moment] = {}
        for moment in self.moments:
            if moment.phase not in largest or moment.bytes > largest[moment.phase].bytes:
                largest[moment.phase] = moment
        return tuple(largest.values())

    def total(self, where: str) -> int:
        """Bytes of all rows of one place: device, host or disk."""
        return sum(row.bytes for row in self.rows if row.where == where)

    @property
    def device_bytes(self) -> int:
        """The peak on each device."""
        return self.total("device")

    @property
    def least_bytes(self) -> int:
        """What a device needs even with the smallest batches; 0 if the memory of activations is not known."""
        return max((moment.bytes for moment in self.moments if moment.phase in WITHOUT_ACTIVATIONS), default=0)

    @property
    def low_bytes(self) -> int:
        """The lower end of the estimated range of the peak on each device."""
        return self.certain_bytes + round(self.ratios[0] * (self.device_bytes - self.certain_bytes))

    @property
    def high_bytes(self) -> int:
        """The upper end of the estimated range of the peak on each device."""
        return round(self.ratios[1] * self.device_bytes)

    @property
    def host_bytes(self) -> int:
        """The peak in RAM of all processes of a node, without what counts as device memory."""
        return self.total("host")

    @property
    def disk_bytes(self) -> int:
        """What the run leaves on disk at most."""
        return self.total("disk")

    @property
    def fit(self) -> Fit:
        """Whether the peak is within the free memory of each device."""
        if not self.capacity_bytes or (self.unknown and not self.lower_bound):
            return Fit.UNKNOWN
        found = fit_of(self.device_bytes, self.high_bytes, self.capacity_bytes, is_exact=self.lower_bound)
        return found if found == Fit.NO or not self.lower_bound else Fit.UNKNOWN

    def host_fit(self, ram_free_bytes: int) -> Fit:
        """Whether the peak in host RAM is within `ram_free_bytes`, the free RAM of a node."""
        if not self.capacity_bytes:
            return Fit.UNKNOWN
        return fit_of(self.host_bytes, self.host_bytes, ram_free_bytes)

    def fit_on_node(self, ram_free_bytes: int) -> Fit:
        """Whether the run fits into the memory of its devices and into `ram_free_bytes`, the free RAM of a node."""
        return worst(self.fit, self.host_fit(ram_free_bytes))

    @property
    def fits(self) -> bool | None:
        """Whether the estimated peak itself is within the free memory of each device; None if that is not known."""
        return None if self.fit == Fit.UNKNOWN else self.fit in (Fit.YES, Fit.UNCERTAIN)


def estimate(spec: RunSpec, run: ResolvedRun, machine: Machine, facts: InputFacts) -> Estimate:
    """The memory of `spec`, which resolves to `run` on `machine`, for the model and the data that were inspected."""
    capacity = free_bytes(run, machine)
    if facts.shape is None:
        return Estimate((), capacity, facts.shape_unknown_reason)
    ctx = MemoryContext(spec, run, machine, facts.shape, facts.longest_used, facts.used_lengths)
    if backend := spec.other_backend:
        return Estimate((*backend_rows(ctx), *disk_rows(ctx)), capacity, UNKNOWN[backend], lower_bound=True)
    elsewhere = (*host_rows(ctx), *disk_rows(ctx))
    if reason := facts.shape.activations_unknown:
        return Estimate((*known_device_rows(ctx), *elsewhere), capacity, reason, lower_bound=True)
    rows, moments = device_peak(ctx)
    certain = loss.certain_bytes(ctx, rows)
    return Estimate((*rows, *elsewhere), capacity, ratios=peak_ratios(ctx), moments=moments, certain_bytes=certain)


def free_bytes(run: ResolvedRun, machine: Machine) -> int:
    """Free memory of the fullest GPU that the run uses; for a CPU run, the RAM for each process; 0 without such a
    device."""
    if run.device == "cpu":
        return machine.ram_free_bytes // run.nproc_per_node
    if run.device != machine.device:
        return 0
    return min((gpu.usable_bytes for gpu in estimated_gpus(run, machine)), default=0)


def device_peak(ctx: MemoryContext) -> tuple[list[Row], tuple[Moment, ...]]:
    """(what a device holds all the time and the rows of the largest peak, what it holds at each moment)."""
    layer, persistent = layer_activations(ctx), persistent_rows(ctx)
    moments = [
        Peak(LOADING, "while the base model is loaded", quantized_loading(ctx, persistent)),
        *step_moments(ctx, layer),
        Peak(OPTIMIZER_STEP, "in the optimizer step", optimizer_step(ctx)),
        Peak(EVALUATION, "in an evaluation batch", evaluation(ctx, layer)),
        Peak(GENERATION, "while text is generated for the evaluation", generation(ctx)),
    ]
    always = sum(row.bytes for row in persistent)
    # A moment without rows does not happen.
    happening = tuple(Moment(peak.phase, peak.at, always + peak.bytes) for peak in moments if peak.rows)
    return _with_largest(persistent, moments), happening


def known_device_rows(ctx: MemoryContext) -> list[Row]:
    """The rows of `device_peak` without the moments that need a model of the activations: a lower bound."""
    persistent = persistent_rows(ctx)
    loading = Peak(LOADING, "", quantized_loading(ctx, persistent))
    return _with_largest(persistent, [loading, Peak(OPTIMIZER_STEP, "", optimizer_step(ctx))])


def _with_largest(persistent: list[Row], moments: list[Peak]) -> list[Row]:
    peak = max(moments, key=lambda moment: moment.bytes)
    return [row for row in (*persistent, *peak.rows) if row.bytes]


def persistent_rows(ctx: MemoryContext) -> list[Row]:
    """What a device holds all the time; what is not a tensor comes last."""
    rows = [*parameter_rows(ctx), *_optimizer_rows(ctx), *reference_rows(ctx)]
    return [*rows, *persistent_gathered_rows(ctx), *bucket_rows(ctx), _overhead_row(ctx)]


def _optimizer_rows(ctx: MemoryContext) -> list[Row]:
    shards, on_device = ctx.run.optimizer_shards, not ctx.optimizer_offload
    size = on_device * (not ctx.optimizer_is_on_host) * ctx.optimizer.bytes // shards
    rows = [Row("Optimizer state", size, f"{ctx.optimizer.formula()}{ctx.divided_by(shards)}")]
    if ctx.engine.separate_master_weights:
        count = ctx.trainable_count
        formula = f"{count:,} parameters x 4 bytes{ctx.divided_by(shards)}"
        rows.append(Row("fp32 master weights", on_device * count * 4 // shards, formula))
    return rows


def _overhead_row(ctx: MemoryContext) -> Row:
    if ctx.on_cpu:
        return Row("Python and libraries", LIBRARY_BYTES, "measured, approximate")
    collectives = ctx.run.world_size > 1
    size = CONTEXT_BYTES + (COLLECTIVES_BYTES if collectives else 0)
    buffers = " and communication buffers" if collectives else ""
    return Row(OVERHEAD, size, f"device context, kernels, workspaces{buffers}, approximate")


def quantized_loading(ctx: MemoryContext, persistent: list[Row]) -> list[Row]:
    """A quantized base model before ZeRO-3 shards or offloads it: every device loads all of it (transformers 5.23
    modeling_utils.py loads quantized models unsharded). FSDP moves it to the devices layer by layer, which takes less
    than a step."""
    stays = ctx.run.parameter_shards == 1 and not ctx.param_offload
    if not ctx.quantized_matrices or stays or ctx.engine.shards_from_host:
        return []
    scales = quantized.scale_bytes(ctx.spec, ctx.shape, ctx.quantized_matrices)
    whole = ctx.quantized_bytes + scales + ctx.unquantized_count * ctx.compute_bytes
    more = whole - sum(row.bytes for row in persistent[:-1])  # without the overhead, which is allocated before
    formula = f"{whole:,} bytes of the whole base model, minus the bytes in the rows above"
    return [Row("Loading the quantized base model", max(0, more), formula)]
