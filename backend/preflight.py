"""Preflight: inspects the input files of a spec, checks it on a machine, and returns findings, estimate and plan.

Page, Start and command line call it. Only the inspection reads files; everything after it is computed.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import RunSpec, variables
from backend.config.options import edit, effective
from backend.inspect import InputFacts, Show, inspect_cpu, inspect_inputs, no_show, resolve_paths, wait_for_worker
from backend.launch import clusters
from backend.launch.plan import plan
from backend.machine import Machine, cpu_name, describe
from backend.memory import OVERHEAD, Estimate, Fit, MemoryContext
from backend.memory.placement import placement
from backend.modelspec import all_parameters, flops_per_token, trainable_parameters
from backend.resolve import ResolvedRun, selected_gpus, threads_per_process
from backend.rules import Case, Finding, examine
from backend.runs import Plan
from backend.timing import TimeEstimate, time_json
from backend.wording import counted, data_size, figure, plural

FP32_BYTES = 4
MACHINE_FIGURES = (
    "device", "nodes", "cores", "ram_bytes", "ram_free_bytes", "cpu_bf16", "driver_version", "gpu_link_rate",
    "network_rate", "disk_rate",
)  # fmt: skip
SHAPE_FIGURES = (
    "model_type", "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary", "max_positions",
    "tied", "gated_mlp", "dtype", "activation", "experts", "experts_per_token", "weight_bits", "sliding_window",
)  # fmt: skip
MAX_KEPT_BYTES = 2**26  # activations kept when the CPU is measured: more than malloc reuses


@dataclass(frozen=True)
class Report:
    """Findings, estimates of memory and time, and launch plan of a spec on a machine."""

    spec: RunSpec
    machine: Machine
    facts: InputFacts
    run: ResolvedRun
    estimate: Estimate
    time: TimeEstimate
    findings: tuple[Finding, ...]
    plan: Plan

    @property
    def can_run(self) -> bool:
        """Whether no finding is an error."""
        return all(f.level != "error" for f in self.findings)

    @property
    def preview(self) -> Plan:
        """The plan to show: as `plan`, with secrets in launch.env masked."""
        env = self.spec.launch.env
        if not variables.secrets(env):
            return self.plan
        return plan(edit(self.spec, {"launch.env": variables.masked(env)}), self.machine, self.facts, self.run)

    @property
    def fit(self) -> Fit:
        """Whether the run fits into the memory of its devices and into host RAM."""
        return self.estimate.fit_on_node(self.machine.ram_free_bytes)

    @property
    def is_unchecked(self) -> bool:
        """Whether nothing is known about the model, so that most rules cannot be checked."""
        model = self.spec.model
        return model.source == "hub" and not self.facts.model_type and self.facts.shape is None

    @property
    def level(self) -> str:
        """error, warning or ok: the color of the verdict."""
        if not self.can_run:
            return "error"
        doubtful = self.is_unchecked or self.fit in (Fit.UNCERTAIN, Fit.UNLIKELY)
        return "warning" if doubtful or any(f.level == "warning" for f in self.findings) else "ok"

    @property
    def verdict(self) -> str:
        """The result in one line, such as "Can run", "Can run with 1 warning", "Most likely does not fit: 1 warning",
        "Can run, memory use unknown" or "Cannot run: 2 errors, 1 warning"."""
        counts = []
        for level in ("error", "warning"):
            if count := sum(f.level == level for f in self.findings):
                counts.append(counted(count, level))
        if not self.can_run:
            return f"Cannot run: {', '.join(counts)}"
        if self.is_unchecked and self.facts.download_problem:
            reason = self.facts.download_problem
            return f"Not checked: config.json of {self.spec.model.hub_id} could not be downloaded: {reason}"
        if self.is_unchecked:
            return f"Not checked: the configuration of {self.spec.model.hub_id} is not available on this machine"
        if self.fit in (Fit.UNCERTAIN, Fit.UNLIKELY):
            return f"{self.fit.text}: {', '.join(counts)}"
        warnings = f" with {counts[0]}" if counts else ""
        memory = ", memory use unknown" if self.estimate.unknown else ""
        if self.estimate.lower_bound:
            memory = f", needs at least {data_size(self.estimate.device_bytes)} per device"
        return f"Can run{warnings}{memory}"

    def on_nodes(self, machine: str) -> str:
        """The words for the machine, or for several such machines if the run has more nodes."""
        return f"{self.run.nnodes} nodes like {machine}" if self.run.nnodes > self.machine.nodes else machine

    @property
    def assumed(self) -> str:
        """What the figures for memory and time assume that the machine does not have, as a sentence, or ''."""
        needed, present = self.run.nproc_per_node, len(self.machine.gpus)
        if self.run.device == "cpu" or not 0 < present < needed:
            return ""
        return f"The figures are for {needed} GPUs, and the machine has {counted(present, 'GPU')}."

    @property
    def title(self) -> str:
        """logging.run_name, or model and method."""
        is_quantized = self.spec.method.kind == "lora" and self.spec.method.quantization != "none"
        method = "QLoRA" if is_quantized else self.about["method"]
        return self.spec.logging.run_name or f"{self.about['model']} {method}".strip()

    @property
    def about(self) -> Mapping[str, Any]:
        """Options that the list of runs shows."""
        return {
            "model": self.spec.model.name,
            "method": registry.METHODS[self.spec.method.kind].label,
            "dataset": self.spec.data.name,
            "stage": self.spec.train.stage,
            "strategy": self.spec.parallel.strategy,
            "learning_rate": self.spec.train.learning_rate,
        }

    @property
    def expected(self) -> Mapping[str, Any] | None:
        """The estimate that is saved with the run, and `measured_bytes`, the part of it that the run's own measurement
        includes; None without an estimate."""
        if self.estimate.unknown:
            return None
        peak = self.estimate.device_bytes
        overhead = sum(row.bytes for row in self.estimate.rows if row.name == OVERHEAD)
        on_cpu = self.run.device == "cpu"  # a CPU run measures its resident memory, others torch's allocator
        measured = peak if on_cpu else peak - overhead
        compared = {"measured_bytes": measured, "compared": list(self.compared), **self._flops}
        compared["compared_time"], compared["compared_start"] = list(self.compared_time), list(self.compared_start)
        compared |= {"placement": self.placement, "time": time_json(self.time)}
        compared["time_limit"] = self.max_seconds
        return {
            **estimate_json(self.estimate),
            **compared,
            "conditions": conditions(self.run, self.machine, self.facts),
        }

    @property
    def max_seconds(self) -> float:
        """The time limit of the run in seconds; 0: no limit, as with all other trainers."""
        return 3600 * self.spec.train.max_hours if self.spec.launch.trainer == "footplate" else 0.0

    @property
    def placement(self) -> dict[str, Any]:
        """What each device holds and shares."""
        shape, longest = self.facts.shape, self.facts.longest_used
        ctx = MemoryContext(self.spec, self.run, self.machine, shape, longest) if shape else None
        return placement(self.spec, self.run, self.estimate, ctx)

    @property
    def _flops(self) -> dict[str, int]:
        """FLOPs per token, and the peak FLOP/s of all devices, from which the page computes the MFU; empty where one of
        them is not known."""
        if self.facts.shape is None or self.spec.train.stage not in registry.NEXT_TOKEN_STAGES:
            return {}
        names = {gpu.name for gpu in selected_gpus(self.run, self.machine)}
        peaks = [registry.peak_flops(name, self.run.compute_dtype) for name in names]
        needed = flops_per_token(self.spec, self.facts.shape)
        if self.spec.precision.compute == "fp8" or needed is None or not peaks or not min(peaks):
            return {}
        return {"flops_per_token": needed, "peak_flops": min(peaks) * self.run.world_size}

    @property
    def compared(self) -> tuple[str, ...]:
        """What two runs must have in common so that the measured peak of one says something about the estimate of the
        other: model, method, quantization, strategy and device type."""
        spec, quantization = self.spec, self.spec.method.quantization
        return spec.model.name, spec.method.kind, quantization, spec.parallel.strategy, self.run.device

    @property
    def compared_time(self) -> tuple[str, ...]:
        """Same as `compared`, for the time of a step, which also depends on the machine, the dtype and the batch
        sizes."""
        spec, train, run = self.spec, self.spec.train, self.run
        kernels = train.use_liger_kernel, train.torch_compile, train.use_unsloth, spec.model.attn_implementation
        sizes = train.per_device_train_batch_size, train.gradient_accumulation_steps, spec.data.max_length
        others = train.stage, train.optim, train.activation_checkpointing, spec.data.packing, spec.launch.trainer
        lora = (spec.lora.r, spec.lora.use_dora) if spec.method.kind == "lora" else ()
        assumed = bool(self.time.assumed_length)  # a prediction from known lengths differs from one without them
        known = describe(self.machine), run.compute_dtype, run.world_size, *kernels, *sizes, *others, *lora, assumed
        return *map(str, self.compared), *map(str, known)

    @property
    def compared_start(self) -> tuple[str, ...]:
        """Same as `compared`, for the time from the start to the first step: tokenizing and compiling, without loading
        the weights."""
        launch, train, run = self.spec.launch, self.spec.train, self.run
        programs = launch.trainer, launch.place, train.use_unsloth, train.torch_compile, self.spec.parallel.strategy
        data = [(each.source, each.name, *each.files, each.max_samples) for each in self.spec.data.datasets]
        return *map(str, programs), describe(self.machine), run.device, str(run.world_size), str(data)

    @property
    def summary(self) -> str:
        """Duration, global batch size and trainable parameters, such as "3 epochs (45 steps), 32 examples per step;
        1.2 M of 136 M parameters are trainable (adapters included)"."""
        train, shape = self.spec.train, self.facts.shape
        epochs = f"{train.num_train_epochs:g} {'epoch' if train.num_train_epochs == 1 else plural('epoch')}"
        if train.duration == "epochs" and self.run.total_steps:
            epochs += f" ({counted(self.run.total_steps, 'step')})"
        duration = counted(train.max_steps, "step") if train.duration == "steps" else epochs
        parts = [f"{duration}, {counted(self.run.global_batch_size, 'example')} per step"]
        if shape:
            count = trainable_parameters(self.spec, shape)
            total, adapters = all_parameters(self.spec, shape), self.spec.method.kind == "lora"
            which = " (adapters included)" if adapters else ""
            parts.append(f"{_short(count)} of {_short(total)} parameters are trainable{which}")
        return "; ".join(parts)

    @property
    def checked(self) -> str:
        """How many examples were checked, such as "first 12,400 of 50,000 examples checked"; '' if none can be. Those
        that are skipped were checked, too."""
        facts = self.facts
        done = "checked" if facts.tokenizer_size else "read"
        if facts.examples_problem:
            return f"examples not checked: {facts.examples_problem}"
        if not facts.num_checked:
            is_readable = all(issue.is_example for issue in facts.data_issues)
            return "no examples checked yet" if facts.examples_pending and is_readable else ""
        if facts.all_checked:
            unread = (facts.num_skipped - facts.num_skipped_texts) * facts.completions_per_example
            skipped = f", {facts.num_skipped:,} skipped" if facts.num_skipped else ""
            return f"all {counted(facts.num_checked + unread, 'example')} {done}{skipped}"
        return f"{self._first_examples} {done}"

    @property
    def unchecked_note(self) -> str:
        """A sentence about examples that were not checked in time; '' if there are none."""
        facts = self.facts
        if facts.examples_problem:
            return f"The examples were not checked: {facts.examples_problem}."
        if not facts.examples_pending:
            return ""
        if not facts.num_checked:
            return "The examples were not checked in time; a run checks them while it prepares its data."
        return f"The {self._first_examples} were checked; a run checks the rest while it prepares its data."

    @property
    def _first_examples(self) -> str:
        count, total = self.facts.num_checked, self.facts.num_in_files
        if total > count:
            return f"first {count:,} of {total:,} examples"
        return "first example" if count == 1 else f"first {count:,} examples"


def preflight(
    spec: RunSpec, machine: Machine, base: Path, wait_seconds: float = 0, show: Show = no_show, cpu_seconds: float = 0
) -> Report:
    """Inspect, check, estimate and plan. Relative paths in `spec` are relative to `base`. Never raises for the values
    of a spec. Waits up to `wait_seconds` for the worker process, which reads an architecture without a closed formula
    and all examples; `show` gets its progress as a text. Waits up to `cpu_seconds` for a measurement of this CPU, if
    the run uses it. A caller that waits only for the worker process does not start this measurement."""
    if wait_seconds:
        wait_for_worker(resolve_paths(effective(spec), base), base, wait_seconds, show)
    report = report_on(_with_cpu(build_case(spec, machine, base), cpu_seconds > 0 or not wait_seconds, cpu_seconds))
    found = (replace(finding, fixes=tuple(fix.for_spec(spec) for fix in finding.fixes)) for finding in report.findings)
    return replace(report, findings=tuple(found))


def _with_cpu(case: Case, start: bool, seconds: float) -> Case:
    """The case with the speed of this machine's CPU, if the run uses it. `start`: measure it if no fresh measurement is
    kept, and wait for that up to `seconds`."""
    spec, run, shape = case.spec, case.run, case.facts.shape
    if run.device != "cpu" or case.machine.name or spec.launch.place != "local" or run.nnodes > 1 or shape is None:
        return case
    if not (shape.hidden and shape.intermediate and shape.heads and shape.head_dim):
        return case
    tokens = spec.train.per_device_train_batch_size * spec.data.max_length // run.token_shards
    layers = 1 if spec.train.activation_checkpointing else shape.layers
    kept = tokens * layers * (10 * shape.hidden + 4 * shape.intermediate) * FP32_BYTES
    request = {
        "threads": threads_per_process(spec, run.nproc_per_node, case.machine.cores),
        "processes": run.nproc_per_node, "dtype": run.compute_dtype, "hidden": shape.hidden,
        "intermediate": shape.intermediate, "vocabulary": shape.vocabulary, "heads": shape.heads,
        "head_dim": shape.head_dim, "tokens": _power_of_two(tokens), "length": _power_of_two(spec.data.max_length),
        "rank": spec.lora.r, "kept_bytes": min(_power_of_two(kept), MAX_KEPT_BYTES),
    }  # fmt: skip
    return replace(case, facts=replace(case.facts, **inspect_cpu(request, start, seconds)))


def _power_of_two(value: int) -> int:
    """The nearest power of two that is not larger, so that similar sizes are measured once."""
    return 1 << max(0, value.bit_length() - 1)


def report_on(case: Case) -> Report:
    """The preflight report of a spec whose files have been inspected."""
    launch_plan = plan(case.spec, case.machine, case.facts, case.run)
    return Report(case.spec, case.machine, case.facts, case.run, case.estimate, case.time, examine(case), launch_plan)


def build_case(spec: RunSpec, machine: Machine, base: Path) -> Case:
    """The input of the rules: the options of `spec` that have an effect, and its inspected files."""
    spec = resolve_paths(effective(spec), base)
    return Case(spec, *clusters.ask(spec, machine, inspect_inputs(spec, base)))


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON: its rows, and the totals of device, host and disk."""
    return {
        **vars(estimate),
        "rows": [row._asdict() for row in estimate.rows],
        "moments": [asdict(moment) for moment in estimate.phases],
        "device_bytes": estimate.device_bytes,
        "low_bytes": estimate.low_bytes,
        "high_bytes": estimate.high_bytes,
        "host_bytes": estimate.host_bytes,
        "disk_bytes": estimate.disk_bytes,
        "fit": estimate.fit,
    }


def conditions(run: ResolvedRun, machine: Machine, facts: InputFacts) -> dict[str, Any]:
    """Machine, model and data that an estimate is for, and what a measurement report has of them."""
    lengths, is_here = sorted(facts.used_lengths), not machine.name
    return {
        "machine": {
            **{name: getattr(machine, name) for name in MACHINE_FIGURES},
            "detected": is_here, "cpu": cpu_name() if is_here else "", "versions": dict(machine.versions),
            "python": platform.python_version() if is_here else "",
            "gpus": [asdict(gpu) for gpu in selected_gpus(run, machine)],
            "cpu_rates": asdict(facts.cpu) if facts.cpu else None,
        },
        "model": facts.shape and {
            **{name: getattr(facts.shape, name) for name in SHAPE_FIGURES},
            "parameters": facts.shape.parameters, "layer_parameters": facts.shape.layer_parameters,
        },
        "data": {
            "examples_in_files": facts.num_in_files, "examples_read": len(lengths),
            "labeled_share": facts.labeled_share,
            "token_lengths": [lengths[round(share * (len(lengths) - 1) / 100)] for share in range(101) if lengths],
        },
    }  # fmt: skip


def _short(count: int) -> str:
    """A count with a decimal prefix: 134 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{figure(count / size)} {unit}"
    return str(count)
