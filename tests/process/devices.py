"""What is proven on GPUs (test_gpu.py): the places, the cases, and how they are started.

A place is a family of devices with a model of fitting size. The proofs are for `cuda`; `cpu` is the rehearsal, the same
code with a tiny model, so that they do not rot where there is no GPU.

On GPUs each training is a run as a person starts it: plan, supervisor, torchrun, in processes of its own. The host of
the other tests (host.py) would not do: it forks its ranks from a process that has imported everything, and CUDA, once
any of those imports has so much as counted the devices, fails in a forked child.
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
from host import Host, a_host, write
from trainings import a_spec, losses, result, text
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from backend.machine import Machine, probe
from backend.memory import OVERHEAD
from backend.paths import ASSETS, HOME
from backend.preflight import Report, preflight
from backend.runs import processes, start_env
from backend.runs.folder import ALIVE, Run
from backend.train import builtin_models

GIB = 1024**3
# bf16 keeps 8 bits: each rounding is wrong by up to 0.4 %. A loss is a mean over thousands of tokens, where most of
# that cancels, but engines round in other places and add up in another order, and ten steps amplify it.
BF16 = 0.02
# Other numbers: 8 bits of fp8 or of the optimizer's state, weights of 4 bits, or weights without fp32 masters.
COARSE = 0.05
WHOLE = {
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
ADAPTER = {"method.kind": "lora", "train.learning_rate": 1e-3}
TINY = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 352}
# TinyLlama's shape, 1.1 billion weights; on GPUs with less than `ROOMY` free 8 of its layers, half a billion.
LARGE = {"num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000} | {
    "num_attention_heads": 32, "num_key_value_heads": 4,
}  # fmt: skip
ROOMY = 40 * GIB


@dataclass(frozen=True)
class Place:
    """A family of devices, and how much is asked of it.

    `unseen` are rows of the estimate that the measured peak leaves out; `error` is how far off it may be. RAM of a
    forked rank holds its host's libraries too, so on a CPU a peak is written down but proves nothing (`exact`).
    """

    family: str
    shape: Mapping[str, int]
    length: int
    rate: float
    names: Mapping[str, str]  # what accelerate calls the engines of this family
    backend: str
    exact: bool
    unseen: tuple[str, ...]
    error: tuple[float, float]
    steps: int
    pairs: int
    pace: float  # least share of the bare trainer's steps a second

    @property
    def base(self) -> dict[str, Any]:
        return {**WHOLE, "data.max_length": self.length, "train.max_steps": 10, "train.learning_rate": self.rate} | {
            "launch.device": self.family
        }


PLACES = {
    "cuda": Place(
        "cuda", LARGE, 512, 3e-4, {"ddp": "MULTI_GPU", "tensor": "MULTI_GPU"}, "nccl", True,
        # The context and NCCL's buffers are taken from the driver, past torch's allocator, whose peak is measured.
        (OVERHEAD,), (-0.20, 0.50), 30, 3, 0.97,
    ),
    "cpu": Place(
        "cpu", TINY, 64, 1e-3, {"ddp": "MULTI_CPU", "tensor": "MULTI_XPU"}, "gloo", False, (), (-0.95, 9.0), 8, 1, 0.1
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is set, on how many devices, and what must come of it.

    Its losses are within `near` of those of the case `like`; `saves` is how many bytes of each weight its peak must lie
    below that case's; `does` are patterns of operators or kernels that must have computed, `never` must not.
    `parts`: over how many devices weights and optimizer state are spread. `needs`: a package; `oldest`: the least
    compute capability; `only`: the places that can.
    """

    changes: Mapping[str, Any]
    ranks: int = 1
    like: str = "plain"
    near: float = BF16
    engine: str = "NO"
    stage: int = 0
    steps_by: str = "AdamW"
    parts: tuple[int, int] = (1, 1)
    saves: float | None = None
    does: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    needs: str = ""
    oldest: tuple[int, int] = (0, 0)
    only: tuple[str, ...] = ("cuda", "cpu")


def zero(stage: int, ranks: int = 1, **more: Any) -> Case:
    changes = {"parallel.strategy": f"zero{stage}", **{f"parallel.{k}": v for k, v in more.items()}}
    by = "DeepSpeedCPUAdam" if "offload_optimizer" in more else "AdamW"
    parts = (ranks if stage == 3 else 1, ranks)
    saves = 4 if ranks > 1 else 6 if "offload_param" in more else None
    like = "ddp" if ranks > 1 else "plain"
    return Case(changes, ranks, like, BF16, "DEEPSPEED", stage, by, parts, saves)


def spread(strategy: str, ranks: int = 2, parts: int = 2, **more: Any) -> Case:
    changes = {"parallel.strategy": strategy, **{f"parallel.{k}": v for k, v in more.items()}}
    engine = "FSDP" if strategy == "fsdp2" else strategy
    return Case(changes, ranks, "ddp", engine=engine, parts=(parts, parts), saves=4)


FUSED, WRITTEN_OUT = r"_scaled_dot_product_(flash|efficient|cudnn|fused)", r"_scaled_dot_product_attention_math"
LIGER = r"Liger\w+Function|_swiglu_forward_kernel|_rms_norm_forward_kernel"
ONE = {
    "plain": Case({}, does=(FUSED,), never=(WRITTEN_OUT,)),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3-offload": zero(3, offload_optimizer="cpu", offload_param="cpu"),
    "lora": Case(ADAPTER, like="lora"),
    "qlora": Case(
        {**ADAPTER, "method.quantization": "nf4"}, like="lora", near=COARSE, saves=1, needs="bitsandbytes",
        does=("bitsandbytes::dequantize_4bit",),
    ),
    "fp8": Case(
        {"precision.compute": "fp8"}, near=COARSE, needs="torchao", oldest=(8, 9), does=("aten::_scaled_mm",)
    ),
    "pure-bf16": Case({"precision.compute": "pure_bf16"}, near=COARSE, saves=6),
    "flash-2": Case(
        {"model.attn_implementation": "flash_attention_2"}, needs="flash_attn", oldest=(8, 0), only=("cuda",),
        # torch has kernels of that library inside, under a name of its own: those would be SDPA.
        does=(r"^flash_attn|FlashAttn\w*Func|(?<!pytorch_)flash::\w*flash_fwd",), never=("scaled_dot_product",),
    ),
    "eager": Case({"model.attn_implementation": "eager"}, does=("aten::_?softmax",), never=("scaled_dot_product",)),
    "liger": Case({"train.use_liger_kernel": True}, needs="liger_kernel", only=("cuda",), saves=0, does=(LIGER,)),
    "compiled": Case({"train.torch_compile": True}, does=(r"Torch-Compiled Region|^triton_|CompiledFunction",)),
    "adamw-8bit": Case(
        {"train.optim": "adamw_bnb_8bit"}, near=COARSE, saves=4, needs="bitsandbytes",
        does=("bitsandbytes::optimizer_update_8bit_blockwise",),
    ),
    "adamw-paged": Case({"train.optim": "paged_adamw_32bit"}, saves=6, needs="bitsandbytes"),
}  # fmt: skip
SEVERAL = {
    "ddp": Case({"parallel.strategy": "ddp"}, 2, engine="ddp"),
    "zero2-2": zero(2, 2),
    "zero3-2": zero(3, 2),
    "fsdp2": spread("fsdp2"),
    "hsdp": spread("fsdp2", 4, replicate_size=2),
    "tensor": spread("tensor"),
}
CASES = {**ONE, **SEVERAL}
WATCHED = [name for name, case in CASES.items() if case.does]


@dataclass
class Trained:
    """Trainings by name, each made once, when it is first asked for; a failed one fails again, without a new try."""

    place: Place
    machine: Machine
    root: Path
    host: Host | None
    model: Path
    rows: Path
    made: dict[str, tuple[Path, Report] | str] = field(default_factory=dict)

    def missing(self, name: str) -> str:
        """Why a case cannot be tried here; '' if it can."""
        case, gpus = CASES[name], self.machine.gpus
        if self.place.family not in case.only:
            return f"a {self.place.family} cannot"
        if case.needs and importlib.util.find_spec(case.needs) is None:
            return f"the package {case.needs} is not installed"
        if self.place.family == "cpu":
            return ""
        if len(gpus) < case.ranks:
            return f"{case.ranks} GPUs are needed, and there are {len(gpus)}"
        if (0, 0) < gpus[0].capability < case.oldest:
            return f"{gpus[0].name} has capability {gpus[0].capability}, and it takes {case.oldest}"
        if case.steps_by == "DeepSpeedCPUAdam" and not toolkit():
            return "DeepSpeed builds the CPU's step with nvcc, which is not here: set CUDA_HOME"
        found = self.judged(name)
        if found.estimate.fits is False or found.estimate.host_bytes > self.machine.ram_free_bytes:
            return f"{found.estimate.device_bytes / GIB:.1f} GiB do not fit what is free"
        return ""

    def judged(self, name: str, **more: Any) -> Report:
        case = CASES[name]
        data = {"model.source": "path", "model.path": str(self.model), "data.files": str(self.rows)}
        size = {"train.per_device_train_batch_size": 4 if case.engine == "tensor" else 4 // case.ranks}
        count = {"launch.nproc_per_node": case.ranks}
        spec = a_spec({**self.place.base, **data, **size, **count, **case.changes, **more})
        return preflight(spec, self.machine, self.root)

    def run(self, name: str) -> tuple[Path, Report]:
        """The case's folder, and what was said of it before; skips what cannot be tried here."""
        if why := self.missing(name):
            pytest.skip(f"{name}: {why}")
        if name not in self.made:
            found = self.judged(name)
            refused = [f"{f.code}: {f.message}" for f in found.findings if f.level == "error"]
            self.made[name] = "\n".join(refused) or "it failed before"
            assert not refused, "the rules refuse what must run here"
            self.made[name] = (self.start(name, found), found)
        made = self.made[name]
        assert not isinstance(made, str), made
        return made

    def start(self, name: str, found: Report) -> Path:
        # The rehearsal starts one for real as well.
        if self.host is None or name == "plain":
            return launched(self.root / "runs", name, found)
        write(self.root / name, found.spec)
        ranks = CASES[name].ranks if found.spec.parallel.strategy != "single" else 0
        assert self.host.run(self.root / name, ranks, env=found.plan.env) == 0, text(self.root / name)
        return self.root / name

    def peak(self, name: str) -> int:
        """Bytes on the fullest device. Paged state is managed memory, which torch's allocator does not see."""
        told = result(self.run(name)[0])
        paged = name == "adamw-paged" and self.place.exact
        return int(max(told["peak_bytes"])) + paged * int(told["optimizer"][0]["bytes"])

    def estimated(self, name: str) -> int:
        """What was said beforehand of the same bytes."""
        rows = self.run(name)[1].estimate.rows
        return sum(row.bytes for row in rows if row.where == "device" and row.name not in self.place.unseen)

    def error(self, name: str) -> float:
        return self.estimated(name) / self.peak(name) - 1

    def off(self, name: str) -> float:
        """How far the losses are from those that they should be, at the worst step."""
        one, other = losses(self.run(CASES[name].like)[0]), losses(self.run(name)[0])
        assert one.keys() == other.keys() == set(range(1, 11))
        return max(abs(other[step] / one[step] - 1) for step in one)

    def witnessed(self, name: str) -> list[str]:
        """Names of the operators and kernels of two steps, in a process of its own: a profiler costs time and room."""
        if why := self.missing(name):
            pytest.skip(f"{name}: {why}")
        folder, found = self.root / f"{name}-witnessed", self.judged(name, **{"train.max_steps": 2})
        write(folder, found.spec)
        if self.host is None:
            self.alone(folder, found, "witness.py")
        else:
            script = str(Path(__file__).with_name("witness.py"))
            assert self.host.run(folder, env=found.plan.env, script=script) == 0, text(folder)
        return list(json.loads((folder / "seen.json").read_text()))

    def alone(self, folder: Path, found: Report, script: str, *arguments: str) -> None:
        """Run a script of this folder in `folder`, with what the plan sets."""
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        with (folder / "log.txt").open("wb") as log:
            env = start_env(os.environ, found.plan.defaults, found.plan.env)
            code = subprocess.run(command, cwd=folder, env=env, stdout=log, stderr=log, timeout=900, check=False)
        assert code.returncode == 0, text(folder)


def launched(root: Path, name: str, found: Report, seconds: float = 1800) -> Path:
    """The folder of a run that was started as the page starts it, and ended well."""
    run = Run.create(root, name, found.plan, datetime.now())
    run.start()
    until = time.monotonic() + seconds
    try:
        while run.state in ALIVE:
            assert time.monotonic() < until, f"waited in vain:\n{text(run.path)}"
            time.sleep(0.1)
    finally:
        if run.state in ALIVE:
            processes.terminate(run.path, sigterm_seconds=0)
    assert run.state == "done", f"{run.failure()}\n{text(run.path)}"
    assert not processes.run_processes(run.path)
    return run.path


def toolkit() -> bool:
    """Whether CUDA's compiler is where torch looks for it."""
    return bool(os.environ.get("CUDA_HOME") or shutil.which("nvcc") or Path("/usr/local/cuda").exists())


def absent(family: str) -> str:
    """Why this place is not here; '' if it is. Asks the driver, not torch: the tests hold no device themselves."""
    if family == "cpu":
        return ""
    if probe(HOME).device != family:
        return "there is no GPU that torch calls cuda"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return ""


@contextlib.contextmanager
def prepared(place: Place, root: Path) -> Iterator[Trained]:
    """The model, its rows and a host for the rehearsal, in the new folder `root`."""
    machine = probe(root) if place.exact else replace(probe(root), device="cpu", gpus=())
    if place.exact and min(gpu.free_bytes for gpu in machine.gpus) < ROOMY:
        place = replace(place, shape={**place.shape, "num_hidden_layers": 8})
    cache = root / "cache"
    cache.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for key, value in {"FOOTPLATE_CACHE": str(cache), "PYTHONPATH": str(HOME), "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(key, value)
        tiny = builtin_models.prepare("tiny-llama", lambda text, share: None)
        host = None if place.exact else stack.enter_context(a_host(cache))
        yield Trained(place, machine, root, host, a_model(tiny, root, place), some_rows(root, place))


def a_model(tiny: Path, root: Path, place: Place) -> Path:
    """A random Llama of the place's size in bf16, with the tiny one's tokenizer."""
    folder = root / "model"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tiny, **place.shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast.from_pretrained(tiny).save_pretrained(folder)
    return folder


def some_rows(root: Path, place: Place) -> Path:
    """Conversations made of the demo's sentences, each longer than the cut-off: all batches are of one size."""
    path, written = root / "rows.jsonl", (ASSETS / "trains/train.jsonl").read_text().splitlines()
    turns = [turn["content"] for line in written for turn in json.loads(line)["messages"]]
    with path.open("w") as file:
        for number in range(160):
            said = " ".join(turns[(7 * number + k) % len(turns)] for k in range(place.length // 8))
            row = [{"role": "user", "content": turns[number]}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": row}) + "\n")
    return path
