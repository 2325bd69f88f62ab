"""The cases of test_gpu.py, and how they are run on a GPU or, for a rehearsal, on a CPU.

A platform is a device type with a model of suitable size. The tests are for `cuda`; on `cpu` the same code runs with a
tiny model, so that the tests keep working on machines without a GPU.

On a GPU each training is a complete run in its own processes: plan, supervisor and torchrun. The fork server of the
other tests (fork_server.py) cannot be used: its ranks are forked from a process that has imported everything, and CUDA
fails in a forked child if any of those imports has counted the devices.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer, start_fork_server, write_run
from training_runs import log_text, losses, make_spec, result
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from backend.machine import Machine, probe
from backend.memory import OVERHEAD
from backend.paths import ASSETS, HOME
from backend.preflight import Report, preflight
from backend.runs import processes, start_env
from backend.runs.folder import ALIVE, Run
from backend.train import builtin_models

GIB = 1024**3
# bf16 has 8 significant bits, so each rounding is off by up to 0.4 %. A loss is a mean over thousands of tokens, where
# most of that cancels, but engines round at different points and sum in a different order, and ten steps amplify it.
BF16_TOLERANCE = 0.02
# For fp8, 8-bit optimizer state, 4-bit weights and training without fp32 master weights.
COARSE_TOLERANCE = 0.05
BASE = {
    "method.kind": "full",
    "data.source": "files",
    "data.format": "messages",
    "data.loss_on": "all_tokens",
    "data.max_samples": 0,
    "data.validation": "none",
    "train.per_device_train_batch_size": 4,
    "train.warmup_steps": 0.0,
    "precision.compute": "bf16",
    "parallel.ddp_timeout": 300,
}
LORA = {"method.kind": "lora", "train.learning_rate": 1e-3}
TINY = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 352}
# The sizes of TinyLlama, 1.1 billion parameters. GPUs with less than LARGE_MEMORY free get 8 of its layers, half a
# billion parameters.
LARGE = {"num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000} | {
    "num_attention_heads": 32, "num_key_value_heads": 4,
}  # fmt: skip
LARGE_MEMORY = 40 * GIB


@dataclass(frozen=True)
class Platform:
    """A device type, and the size and tolerances of its tests.

    `untracked_rows`: rows of the estimate that the measured peak does not include. `error_bounds`: allowed relative
    error of the estimate. `exact_peaks`: False on a CPU, where the memory of a forked rank includes the libraries of
    the fork server, so peaks are only reported.
    """

    device_type: str
    shape: Mapping[str, int]
    length: int
    rate: float
    engine_names: Mapping[str, str]  # accelerate's DistributedType for each engine
    backend: str
    exact_peaks: bool
    untracked_rows: tuple[str, ...]
    error_bounds: tuple[float, float]
    steps: int
    pairs: int
    min_speed_ratio: float  # lowest accepted ratio to the steps per second of TRL's trainer alone

    @property
    def base(self) -> dict[str, Any]:
        return {**BASE, "data.max_length": self.length, "train.max_steps": 10, "train.learning_rate": self.rate} | {
            "launch.device": self.device_type
        }


PLATFORMS = {
    "cuda": Platform(
        "cuda", LARGE, 512, 3e-4, {"ddp": "MULTI_GPU", "tensor": "MULTI_GPU"}, "nccl", True,
        # The CUDA context and NCCL's buffers are allocated by the driver; the measured peak is that of torch's
        # allocator.
        (OVERHEAD,), (-0.20, 0.50), 30, 3, 0.97,
    ),
    "cpu": Platform(
        "cpu", TINY, 64, 1e-3, {"ddp": "MULTI_CPU", "tensor": "MULTI_XPU"}, "gloo", False, (), (-0.95, 9.0), 8, 1, 0.1
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Options, the number of ranks, and the expected outcome.

    The losses are within `loss_tolerance` of those of the case `reference`. `saved_bytes`: bytes per parameter by which
    the peak is lower than that of the reference. `operators`: patterns of operators or kernels that must run;
    `forbidden_operators` must not run. `shards`: over how many devices weights and optimizer state are sharded.
    `package`: a required package; `min_capability`: a required compute capability.
    """

    changes: Mapping[str, Any]
    ranks: int = 1
    reference: str = "plain"
    loss_tolerance: float = BF16_TOLERANCE
    engine: str = "NO"
    stage: int = 0
    optimizer_class: str = "AdamW"
    shards: tuple[int, int] = (1, 1)
    saved_bytes: float | None = None
    operators: tuple[str, ...] = ()
    forbidden_operators: tuple[str, ...] = ()
    package: str = ""
    min_capability: tuple[int, int] = (0, 0)
    platforms: tuple[str, ...] = ("cuda", "cpu")


def zero(stage: int, ranks: int = 1, **more: Any) -> Case:
    changes = {"parallel.strategy": f"zero{stage}", **{f"parallel.{k}": v for k, v in more.items()}}
    optimizer = "DeepSpeedCPUAdam" if "offload_optimizer" in more else "AdamW"
    shards = (ranks if stage == 3 else 1, ranks)
    saved_bytes = 4 if ranks > 1 else 6 if "offload_param" in more else None
    reference = "ddp" if ranks > 1 else "plain"
    return Case(changes, ranks, reference, BF16_TOLERANCE, "DEEPSPEED", stage, optimizer, shards, saved_bytes)


def sharded(strategy: str, ranks: int = 2, shards: int = 2, **more: Any) -> Case:
    changes = {"parallel.strategy": strategy, **{f"parallel.{k}": v for k, v in more.items()}}
    engine = "FSDP" if strategy == "fsdp2" else strategy
    return Case(changes, ranks, "ddp", engine=engine, shards=(shards, shards), saved_bytes=4)


FUSED_SDPA, MATH_SDPA = r"_scaled_dot_product_(flash|efficient|cudnn|fused)", r"_scaled_dot_product_attention_math"
LIGER = r"Liger\w+Function|_swiglu_forward_kernel|_rms_norm_forward_kernel"
ONE_DEVICE = {
    "plain": Case({}, operators=(FUSED_SDPA,), forbidden_operators=(MATH_SDPA,)),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3-offload": zero(3, offload_optimizer="cpu", offload_param="cpu"),
    "lora": Case(LORA, reference="lora"),
    "qlora": Case(
        {**LORA, "method.quantization": "nf4"},
        reference="lora",
        loss_tolerance=COARSE_TOLERANCE,
        saved_bytes=1,
        package="bitsandbytes",
        operators=("bitsandbytes::dequantize_4bit",),
    ),
    "fp8": Case(
        {"precision.compute": "fp8"},
        loss_tolerance=COARSE_TOLERANCE,
        package="torchao",
        min_capability=(8, 9),
        operators=("aten::_scaled_mm",),
    ),
    "pure-bf16": Case({"precision.compute": "pure_bf16"}, loss_tolerance=COARSE_TOLERANCE, saved_bytes=6),
    "flash-2": Case(
        {"model.attn_implementation": "flash_attention_2"},
        package="flash_attn",
        min_capability=(8, 0),
        platforms=("cuda",),
        # torch contains the same kernels under names with pytorch_flash; those belong to SDPA.
        operators=(r"^flash_attn|FlashAttn\w*Func|(?<!pytorch_)flash::\w*flash_fwd",),
        forbidden_operators=("scaled_dot_product",),
    ),
    "eager": Case(
        {"model.attn_implementation": "eager"},
        operators=("aten::_?softmax",),
        forbidden_operators=("scaled_dot_product",),
    ),
    "liger": Case(
        {"train.use_liger_kernel": True}, package="liger_kernel", platforms=("cuda",), saved_bytes=0, operators=(LIGER,)
    ),
    "compiled": Case({"train.torch_compile": True}, operators=(r"Torch-Compiled Region|^triton_|CompiledFunction",)),
    "adamw-8bit": Case(
        {"train.optim": "adamw_bnb_8bit"},
        loss_tolerance=COARSE_TOLERANCE,
        saved_bytes=4,
        package="bitsandbytes",
        operators=("bitsandbytes::optimizer_update_8bit_blockwise",),
    ),
    "adamw-paged": Case({"train.optim": "paged_adamw_32bit"}, saved_bytes=6, package="bitsandbytes"),
}
SEVERAL_DEVICES = {
    "ddp": Case({"parallel.strategy": "ddp"}, 2, engine="ddp"),
    "zero2-2": zero(2, 2),
    "zero3-2": zero(3, 2),
    "fsdp2": sharded("fsdp2"),
    "hsdp": sharded("fsdp2", 4, replicate_size=2),
    "qlora-fsdp2": Case(
        {**LORA, "method.quantization": "nf4", "parallel.strategy": "fsdp2"},
        2,
        reference="qlora",
        loss_tolerance=COARSE_TOLERANCE,
        engine="FSDP",
        saved_bytes=0,
        package="bitsandbytes",
    ),
    "tensor": sharded("tensor"),
}
CASES = {**ONE_DEVICE, **SEVERAL_DEVICES}
TRACED = [name for name, case in CASES.items() if case.operators]


@dataclass
class TrainedCases:
    """The cases that were run, each once, on first use. A case that failed fails again without a new run."""

    platform: Platform
    machine: Machine
    root: Path
    fork_server: ForkServer | None
    model: Path
    data: Path
    outcomes: dict[str, tuple[Path, Report] | str] = field(default_factory=dict)

    def skip_reason(self, name: str) -> str:
        """Why a case cannot be run on this machine; '' if it can."""
        case, gpus = CASES[name], self.machine.gpus
        if self.platform.device_type not in case.platforms:
            return f"a {self.platform.device_type} does not support this case"
        if case.package and importlib.util.find_spec(case.package) is None:
            return f"the package {case.package} is not installed"
        if self.platform.device_type == "cpu":
            return ""
        if len(gpus) < case.ranks:
            return f"{case.ranks} GPUs are required; this machine has {len(gpus)}"
        if (0, 0) < gpus[0].capability < case.min_capability:
            return f"{gpus[0].name} has compute capability {gpus[0].capability}; {case.min_capability} is required"
        if case.optimizer_class == "DeepSpeedCPUAdam" and not cuda_toolkit_found():
            return "DeepSpeed compiles CPU Adam with nvcc, which was not found; set CUDA_HOME"
        report = self.report(name)
        if report.estimate.fits is False or report.estimate.host_bytes > self.machine.ram_free_bytes:
            return f"{report.estimate.device_bytes / GIB:.1f} GiB do not fit in the free memory"
        return ""

    def report(self, name: str, **more: Any) -> Report:
        case = CASES[name]
        inputs = {"model.source": "path", "model.path": str(self.model), "data.files": str(self.data)}
        size = {"train.per_device_train_batch_size": 4 if case.engine == "tensor" else 4 // case.ranks}
        count = {"launch.nproc_per_node": case.ranks}
        spec = make_spec({**self.platform.base, **inputs, **size, **count, **case.changes, **more})
        return preflight(spec, self.machine, self.root)

    def run(self, name: str) -> tuple[Path, Report]:
        """The run folder of a case and its preflight report; skips cases that cannot be run on this machine."""
        if reason := self.skip_reason(name):
            pytest.skip(f"{name}: {reason}")
        if name not in self.outcomes:
            report = self.report(name)
            errors = [f"{f.code}: {f.message}" for f in report.findings if f.level == "error"]
            self.outcomes[name] = "\n".join(errors) or "this case failed before"
            assert not errors, "the preflight rules reject this case"
            self.outcomes[name] = (self.start(name, report), report)
        outcome = self.outcomes[name]
        assert not isinstance(outcome, str), outcome
        return outcome

    def start(self, name: str, report: Report) -> Path:
        # On a CPU, the case `plain` is also a complete run with supervisor and launcher.
        if self.fork_server is None or name == "plain":
            return run_to_completion(self.root / "runs", name, report)
        write_run(self.root / name, report.spec)
        ranks = CASES[name].ranks if report.spec.parallel.strategy != "single" else 0
        assert self.fork_server.run(self.root / name, ranks, env=report.plan.env) == 0, log_text(self.root / name)
        return self.root / name

    def peak(self, name: str) -> int:
        """Peak bytes on the device with the highest peak, plus paged state, which torch's allocator does not track."""
        run_result = result(self.run(name)[0])
        paged = name == "adamw-paged" and self.platform.exact_peaks
        return int(max(run_result["peak_bytes"])) + paged * int(run_result["optimizer"][0]["bytes"])

    def estimated(self, name: str) -> int:
        """The estimate of the same bytes."""
        rows = self.run(name)[1].estimate.rows
        return sum(row.bytes for row in rows if row.where == "device" and row.name not in self.platform.untracked_rows)

    def error(self, name: str) -> float:
        return self.estimated(name) / self.peak(name) - 1

    def loss_error(self, name: str) -> float:
        """The largest relative difference to the losses of the reference, over all steps."""
        expected, actual = losses(self.run(CASES[name].reference)[0]), losses(self.run(name)[0])
        assert expected.keys() == actual.keys() == set(range(1, 11))
        return max(abs(actual[step] / expected[step] - 1) for step in expected)

    def traced_operators(self, name: str) -> list[str]:
        """Names of the operators and kernels of two steps, from a separate profiled run."""
        if reason := self.skip_reason(name):
            pytest.skip(f"{name}: {reason}")
        folder, report = self.root / f"{name}-traced", self.report(name, **{"train.max_steps": 2})
        write_run(folder, report.spec)
        if self.fork_server is None:
            self.run_script(folder, report, "operator_trace.py")
        else:
            script = str(Path(__file__).with_name("operator_trace.py"))
            assert self.fork_server.run(folder, env=report.plan.env, script=script) == 0, log_text(folder)
        return list(json.loads((folder / "operators.json").read_text()))

    def run_script(self, folder: Path, report: Report, script: str, *arguments: str) -> None:
        """Run a script of tests/process in `folder`, with the environment of the plan."""
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        with (folder / "log.txt").open("wb") as log:
            env = start_env(os.environ, report.plan.defaults, report.plan.env)
            code = subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log, timeout=900, check=False)
        assert code.returncode == 0, log_text(folder)


def run_to_completion(root: Path, name: str, report: Report, seconds: float = 1800) -> Path:
    """Start a run as the page does, wait until it is done, and return its folder."""
    run = Run.create(root, name, report.plan, datetime.now(), report.about, report.expected)
    run.start()
    deadline = time.monotonic() + seconds
    try:
        while run.state in ALIVE:
            assert time.monotonic() < deadline, f"timed out:\n{log_text(run.path)}"
            time.sleep(0.1)
    finally:
        if run.state in ALIVE:
            processes.terminate(run.path, sigterm_seconds=0)
    assert run.state == "done", f"{run.failure()}\n{log_text(run.path)}"
    assert not processes.run_processes(run.path)
    return run.path


def cuda_toolkit_found() -> bool:
    """Whether nvcc is where torch looks for it."""
    return bool(os.environ.get("CUDA_HOME") or shutil.which("nvcc") or Path("/usr/local/cuda").exists())


def missing_device(device_type: str) -> str:
    """Why this machine has no such device; '' if it has one. Uses the driver, so that the test process creates no CUDA
    context."""
    if device_type == "cpu":
        return ""
    if probe(HOME).device != device_type:
        return "no GPU of torch's device type cuda was found"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return ""


@contextlib.contextmanager
def prepared_cases(platform: Platform, root: Path) -> Iterator[TrainedCases]:
    """The model, the dataset and, on a CPU, a fork server, in the new folder `root`."""
    machine = probe(root) if platform.exact_peaks else replace(probe(root), device="cpu", gpus=())
    if platform.exact_peaks and min(gpu.free_bytes for gpu in machine.gpus) < LARGE_MEMORY:
        platform = replace(platform, shape={**platform.shape, "num_hidden_layers": 8})
    cache = root / "cache"
    cache.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for key, value in {"FOOTPLATE_CACHE": str(cache), "PYTHONPATH": str(HOME), "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(key, value)
        tiny = builtin_models.prepare("tiny-llama", lambda text, share: None)
        fork_server = None if platform.exact_peaks else stack.enter_context(start_fork_server(cache))
        yield TrainedCases(
            platform, machine, root, fork_server, write_model(tiny, root, platform), write_examples(root, platform)
        )


def write_model(tiny: Path, root: Path, platform: Platform) -> Path:
    """Save a randomly initialized bf16 Llama of the platform's size with the tokenizer of the tiny model."""
    folder = root / "model"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tiny, **platform.shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tiny).save_pretrained(folder)
    return folder


def write_examples(root: Path, platform: Platform) -> Path:
    """Write conversations made of the demo's sentences, each longer than max_length, so that all batches have one
    shape."""
    path, demo_lines = root / "rows.jsonl", (ASSETS / "trains/train.jsonl").read_text().splitlines()
    turns = [turn["content"] for line in demo_lines for turn in json.loads(line)["messages"]]
    with path.open("w") as file:
        for number in range(160):
            completion = " ".join(turns[(7 * number + k) % len(turns)] for k in range(platform.length // 8))
            messages = [{"role": "user", "content": turns[number]}, {"role": "assistant", "content": completion}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
