"""The speed of this CPU in training: matrix products, attention, memory and operations, in about a second.

Each measurement repeats a short piece of work and takes the fastest time, so that other programs disturb it little. If
they use much of the CPU, several threads mostly wait for each other: then a single thread is measured in CPU time, and
several are assumed to be as fast together.

`backend.inspect.cpu_speed` requests it; `backend.timing` turns it into the time of a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM  # takes a second, which must not be measured

from backend.inspect.cpu_speed import CALM_CORES, FORMAT
from backend.runs import JOB, RUN_MARKER
from backend.runs.folder import Run

SECONDS = 0.05  # of each measurement
SAMPLE_SECONDS = 0.3  # in which the CPU use of other programs is measured
TRIES = 20  # to find the machine calm: Footplate's own inspection of the examples takes seconds
MAX_TOKENS = 512  # of the measurements of attention and small products
MAX_PRODUCT = 3e8  # multiplications of a product: longer ones are interrupted by other programs
BLOCK = 2**24  # elements of an array that no cache holds
SHORT, LAYERS = 8, (1, 4)  # tokens and layers of the models by which the time of small operations is measured

LEAST_SECONDS = 1e-6  # of a layer: the difference of two measurements may be negative

Clock = Callable[[], float]  # seconds


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """The rates that `CpuSpeed` describes, and what else uses the CPU. `training`: the folder of a run that trains on
    this machine, so nothing is measured; '' if none does."""
    for _ in range(TRIES):
        busy, training = busy_cores(), training_run()
        if training or busy <= CALM_CORES:
            break
    rates = None
    if not training and busy <= CALM_CORES:
        rates = _with_threads(time.perf_counter, **request)
        busy, training = max(busy, busy_cores()), training_run()  # also what started during the measurement
    found = {"format": FORMAT, "time": time.time(), "busy": busy, "training": training}
    if training:
        return found
    if rates and busy <= CALM_CORES:
        return {**found, "rates": rates}
    threads = request["threads"]
    rates = _with_threads(time.thread_time, **{**request, "threads": 1, "processes": 1})
    scale = {"memory": 1 / request["processes"], "logit": 1 / threads, "layer": 1.0}
    return {**found, "rates": {name: rate * scale.get(name, threads) for name, rate in rates.items()}}


def busy_cores(seconds: float = SAMPLE_SECONDS) -> float:
    """How many of the cores that this process may use are used by others. Sleeps for `seconds`."""
    each = psutil.cpu_percent(seconds, percpu=True)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(each))
    return sum(each[core] for core in allowed if core < len(each)) / 100


def training_run() -> str:
    """The folder of a run of Footplate that trains on this machine, as far as this user can see; '' if none does. A job
    that uses a trained model, such as a chat, and what follows a job in a cluster are mostly idle; if not, `busy_cores`
    counts them."""
    for process in psutil.process_iter():
        try:
            place = process.environ().get(RUN_MARKER) if process.pid != os.getpid() else None
            if place and not Run(Path(place)).about().get("kind") and not (Path(place) / JOB).exists():
                return place
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
    return ""


def _with_threads(clock: Clock, threads: int, processes: int, **sizes: Any) -> dict[str, float]:
    """The rates of one process with this number of intra-op threads, next to others that share the memory."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads * processes)
        memory = _memory(clock) / processes
        torch.set_num_threads(threads)
        return {"memory": memory, **_rates(clock, **sizes)}
    finally:
        torch.set_num_threads(before)


def _rates(
    clock: Clock, dtype: str, hidden: int, intermediate: int, vocabulary: int, heads: int, head_dim: int, tokens: int,
    length: int, rank: int, kept_bytes: int,
) -> dict[str, float]:  # fmt: skip
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    rows = max(32, min(tokens, int(MAX_PRODUCT / (hidden * intermediate))))
    few = max(1, min(tokens, MAX_TOKENS))
    return {
        "matmul": _product(clock, rows, hidden, intermediate, kind),
        "small": _product(clock, few, hidden, rank, kind),
        "activations": _activations(clock, kept_bytes),
        "logit": _logit(clock, vocabulary),
        "attention": _attention(clock, max(1, few // length), heads, min(length, few), head_dim, kind),
        "layer": _layer(clock),
    }


def fastest(clock: Clock, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    work()
    times: list[float] = []
    until = time.monotonic() + SECONDS
    while len(times) < 3 or time.monotonic() < until:
        begin = clock()
        work()
        times.append(clock() - begin)
    return min(times)


def _product(clock: Clock, rows: int, inputs: int, outputs: int, kind: torch.dtype) -> float:
    """FLOP/s of a linear layer and of the gradient of its input."""
    x, y = torch.randn(rows, inputs).to(kind), torch.randn(rows, outputs).to(kind)
    weight = torch.randn(outputs, inputs).to(kind)
    seconds = fastest(clock, lambda: functional.linear(x, weight)) + fastest(clock, lambda: y @ weight)
    return float(4 * rows * inputs * outputs / seconds)


def _activations(clock: Clock, kept_bytes: int) -> float:
    """Bytes/s that an operation on each element reads and writes, for a forward pass that keeps so many bytes. malloc
    reuses little memory; more is returned to the kernel, and cleared when it is used again, which takes longer than the
    operation."""
    x = torch.randn(max(1, kept_bytes // 4))
    return float(3 * x.nbytes / fastest(clock, lambda: x * x))


def _memory(clock: Clock) -> float:
    """Bytes/s that all threads read and write together."""
    x, y = torch.zeros(BLOCK), torch.zeros(BLOCK)
    return float(3 * x.nbytes) / fastest(clock, lambda: x.add_(y))


def _logit(clock: Clock, vocabulary: int) -> float:
    """Seconds of the cross entropy for one logit, forward and backward."""
    rows = max(1, min(64, 2**20 // vocabulary))
    labels = torch.zeros(rows, dtype=torch.long)
    logits = torch.randn(rows, vocabulary, requires_grad=True)

    def work() -> None:
        functional.cross_entropy(logits, labels).backward()

    return fastest(clock, work) / rows / vocabulary


def _attention(clock: Clock, sequences: int, heads: int, length: int, head_dim: int, kind: torch.dtype) -> float:
    """FLOP/s of attention with a mask, forward and backward."""
    q, k, v = (torch.randn(sequences, heads, length, head_dim, dtype=kind, requires_grad=True) for _ in range(3))
    mask = torch.ones(sequences, 1, length, length, dtype=torch.bool)

    def work() -> None:
        functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()

    return 4 * 3.5 * sequences * length * length * heads * head_dim / fastest(clock, work)


def _layer(clock: Clock) -> float:
    """Seconds of the operations of a decoder layer whose tensors are so small that computing takes no time, forward and
    backward."""
    tokens, mask, seconds = torch.zeros(2, SHORT, dtype=torch.long), torch.ones(2, SHORT, dtype=torch.long), []
    mask[0, 0] = 0
    for layers in LAYERS:
        size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, pad_token_id=0, **size))
        seconds.append(fastest(clock, lambda model=model: model(tokens, mask, labels=tokens).loss.backward()))  # type: ignore[misc]
    return max(LEAST_SECONDS, (seconds[1] - seconds[0]) / (LAYERS[1] - LAYERS[0]))
