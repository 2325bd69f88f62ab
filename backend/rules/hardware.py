"""Rules of the machine: devices, packages, precision.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.machine import Gpu
from backend.resolve import before_ampere
from backend.rules.base import Case, Example, Fix, Violation, names, rule
from backend.rules.common_fixes import BF16
from backend.rules.examples import (
    BARE,
    DEMO,
    EQUIPPED,
    EQUIPPED_H100,
    EQUIPPED_TWO,
    H100,
    INSTALLED,
    LAPTOP,
    NPU,
    SMOL,
    T4,
)

NEEDED = ("torch", "transformers", "accelerate", "peft", "trl", "datasets")
AUTO = Fix("Choose it automatically", {"precision.compute": "auto"}, safe=False, cost="what this device does best")


@rule(
    "HW001",
    "error",
    fields=("launch.device",),
    title="The device is not there",
    source="arithmetic: the machine's list of devices",
    fixes=(Fix("Take what is there", {"launch.device": "auto"}),),
    fails_on=Example({"launch.device": "cuda"}),
    passes_on=Example({"launch.device": "cpu"}),
    proof="launch",
)
def missing_device(case: Case) -> Violation | str | None:
    """The run was asked onto a kind of device that this machine does not have."""
    if case.run.device in ("cpu", case.machine.device):
        return None
    there = registry.DEVICES[case.machine.device].label
    return f"No {registry.DEVICES[case.run.device].label} was found; there is: {there}."


@rule(
    "HW002",
    "error",
    fields=("launch.device",),
    title="A package is missing",
    source="pyproject.toml",
    manual_fix="Install it with pip, or set Footplate up again with `make run`.",
    fails_on=Example(machine=BARE),
    passes_on=Example(),
)
def missing_package(case: Case) -> str | None:
    """Training needs these packages in the Python that starts the run."""
    missing = [name for name in NEEDED if name not in case.machine.versions] if case.machine.versions else []
    return f"Not installed: {names(missing)}." if missing else None


@rule(
    "HW003",
    "error",
    fields=("launch.device",),
    title="Ascend NPU without torch_npu",
    source="torch 2.13: torch.npu exists only with torch_npu",
    manual_fix="Install the torch_npu that belongs to this torch.",
    fixes=(Fix("Train on the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),),
    fails_on=Example(machine=NPU),
    passes_on=Example(machine=replace(NPU, versions={**NPU.versions, "torch_npu": "2.13.0"})),
)
def missing_npu_package(case: Case) -> str | None:
    """Only through the package torch_npu does torch reach an Ascend NPU."""
    if case.run.device != "npu" or not case.machine.versions or "torch_npu" in case.machine.versions:
        return None
    return "torch_npu is not installed."


@rule(
    "HW004",
    "error",
    fields=("logging.report_to",),
    title="The tracker is not installed",
    source="transformers 5.23 integrations: the callback refuses without its package",
    fixes=(Fix("Report nowhere else", {"logging.report_to": "none"}),),
    fails_on=Example({"logging.report_to": "wandb"}),
    passes_on=Example({"logging.report_to": "wandb"}, replace(LAPTOP, versions={**LAPTOP.versions, "wandb": "0.23"})),
    proof="launch",
)
def missing_tracker(case: Case) -> str | None:
    """The trainer stops when a tracker's package is missing, after the model was loaded."""
    row = registry.REPORTERS[case.spec.logging.report_to]
    if not row.package or not case.machine.versions or row.package in case.machine.versions:
        return None
    return f"{row.label} needs the package {row.package}: pip install {row.package}."


@rule(
    "HW005",
    "advice",
    fields=("parallel.strategy",),
    title="Only one of the nodes is used",
    source="the plan: what stands alone stays on its node",
    manual_fix="launch.rendezvous spreads it over several.",
    fails_on=Example(machine=replace(H100, nodes=2)),
    passes_on=Example(machine=H100),
)
def other_nodes(case: Case) -> str | None:
    """A run works on the node that it is started on, unless it is spread over several."""
    if case.machine.nodes == 1 or case.run.nnodes > 1:
        return None
    return f"{case.machine.nodes} nodes are described; the run uses one."


@rule(
    "PRC001",
    "error",
    fields=("precision.compute", "launch.device"),
    title="fp16 on a CPU",
    source="accelerate 1.15 accelerator.py: no autocast and no loss scaling for fp16 on a CPU",
    fixes=(AUTO, Fix("Full precision", {"precision.compute": "fp32"}, safe=False, cost="twice the memory")),
    fails_on=Example({"precision.compute": "fp16"}),
    passes_on=Example({"precision.compute": "fp16"}, T4),
)
def fp16_on_cpu(case: Case) -> str | None:
    """On a CPU the libraries ignore fp16: nothing is cast and no loss is scaled. Frozen weights held in fp16 would
    then meet fp32 ones, slowly and without the protection that fp16 needs."""
    return "The CPU has no fp16 training." if case.run.compute_dtype == "fp16" and case.run.device == "cpu" else None


@rule(
    "PRC002",
    "warning",
    fields=("precision.compute",),
    title="bf16 on a GPU without bf16 units",
    source="torch 2.13 cuda/__init__.py: is_bf16_supported counts emulation; units came with capability 8.0",
    fixes=(
        Fix("fp16", {"precision.compute": "fp16"}, False, "a narrow range"),
        Fix("fp32", {"precision.compute": "fp32"}, False, "twice the memory"),
    ),
    fails_on=Example({"precision.compute": "bf16"}, T4),
    passes_on=Example({"precision.compute": "bf16"}, H100),
    proof="gpu",
)
def bf16_before_ampere(case: Case) -> str | None:
    """GPUs before Ampere emulate bf16: every library accepts it, and it is slower than fp32."""
    found = [gpu for gpu in _used(case) if before_ampere(gpu.capability)]
    if case.run.device != "cuda" or case.run.compute_dtype != "bf16" or not found:
        return None
    major, minor = found[0].capability
    return f"{found[0].name} has compute capability {major}.{minor}; bf16 needs 8.0."


def _used(case: Case) -> tuple[Gpu, ...]:
    return case.gpus or case.machine.gpus[: case.run.nproc_per_node]


@rule(
    "PRC003",
    "advice",
    fields=("precision.compute",),
    title="bf16 on a CPU without bf16 units",
    source="Intel's and Arm's instruction sets: AMX, AVX512-BF16, BF16",
    fixes=(Fix("fp32", {"precision.compute": "fp32"}, safe=False),),
    fails_on=Example({"precision.compute": "bf16"}),
    passes_on=Example({"precision.compute": "bf16"}, replace(LAPTOP, cpu_bf16=True)),
)
def bf16_on_old_cpu(case: Case) -> str | None:
    """Without such units a CPU converts every number to and fro: bf16 saves memory and costs time."""
    if (
        case.run.device != "cpu"
        or case.run.compute_dtype != "bf16"
        or case.machine.cpu_bf16
        or case.machine.device != "cpu"
    ):
        return None
    return "This CPU does not multiply bf16 by itself, so it is slower than fp32."


@rule(
    "PRC004",
    "advice",
    fields=("precision.compute",),
    title="Full precision on a GPU that computes in bf16",
    source="NVIDIA's data sheets: bf16 runs at several times the rate of fp32",
    fixes=(Fix("bf16", {"precision.compute": "bf16"}, safe=False),),
    fails_on=Example({"precision.compute": "fp32"}, H100),
    passes_on=Example({"precision.compute": "bf16"}, H100),
)
def fp32_on_new_gpu(case: Case) -> str | None:
    """Mixed precision halves the activations and is several times faster on these GPUs. Trained weights stay in
    fp32."""
    if case.spec.precision.compute == "tf32":
        return None
    capable = case.run.device == "cuda" and all(gpu.capability >= (8, 0) for gpu in _used(case)) and _used(case)
    return "These GPUs compute faster in bf16." if capable and case.run.compute_dtype == "fp32" else None


TF32, FP8, PURE = ({"precision.compute": name} for name in ("tf32", "fp8", "pure_bf16"))


@rule(
    "PRC005",
    "error",
    fields=("precision.compute", "launch.device"),
    title="No TF32 units",
    source="transformers 5.23 training_args.py: --tf32 requires Ampere or newer",
    fixes=(Fix("Full precision", {"precision.compute": "fp32"}),),
    fails_on=Example(TF32),
    passes_on=Example(TF32, H100),
    proof="launch",
)
def tf32_elsewhere(case: Case) -> str | None:
    """TF32 is how NVIDIA's GPUs since Ampere multiply fp32 numbers in their fast units, with ten bits of mantissa."""
    if case.spec.precision.compute != "tf32" or (case.run.device == "cuda" and _at_least(case, (8, 0))):
        return None
    return f"The run would take: {_taken(case)}."


def _at_least(case: Case, capability: tuple[int, int]) -> bool:
    return all(gpu.capability >= capability for gpu in _used(case))


def _taken(case: Case) -> str:
    used = _used(case)
    return used[0].name if used and case.run.device == case.machine.device else registry.DEVICES[case.run.device].label


@rule(
    "PRC006",
    "error",
    fields=("precision.compute", "launch.device"),
    title="No fp8 units",
    source="accelerate 1.15 state.py: below capability 8.9 it would silently take fp16; torchao 0.18 and Transformer "
    "Engine know no other maker's GPUs by this way",
    fixes=(AUTO,),
    fails_on=Example(FP8, replace(EQUIPPED_H100, gpus=T4.gpus)),
    passes_on=Example(FP8, EQUIPPED_H100),
    proof="gpu",
)
def fp8_elsewhere(case: Case) -> str | None:
    """Units for fp8 came with Ada and Hopper, compute capability 8.9. A CPU can imitate it with torchao, for
    trying out."""
    if case.spec.precision.compute != "fp8" or (case.run.device == "cuda" and _at_least(case, (8, 9))):
        return None
    if case.run.device == "cpu" and case.spec.precision.fp8_backend == "torchao":
        return None
    return f"The run would take: {_taken(case)}."


@rule(
    "PRC007",
    "error",
    fields=("precision.fp8_backend",),
    title="The fp8 package is missing",
    source="accelerate 1.15 accelerator.py: no FP8-compatible backend was installed",
    fixes=(AUTO,),
    fails_on=Example(FP8, H100),
    passes_on=Example(FP8, EQUIPPED_H100),
)
def missing_fp8(case: Case) -> str | None:
    """PyTorch alone does not train in fp8: a package replaces the linear layers."""
    row = registry.FP8_BACKENDS[case.spec.precision.fp8_backend]
    known = not case.machine.versions or row.package in case.machine.versions
    if case.spec.precision.compute != "fp8" or known:
        return None
    return f"{row.label} is not installed: pip install {row.package}."


@rule(
    "PRC008",
    "error",
    fields=("precision.compute", "parallel.strategy"),
    title="DeepSpeed has its own masters",
    source="deepspeed 0.19 runtime/base_optimizer.py: ZeRO keeps fp32 masters; accelerate 1.15 accelerator.py hands it "
    "Transformer Engine's deprecated recipe alone",
    fixes=(BF16,),
    fails_on=Example({**PURE, "parallel.strategy": "zero2", "launch.nproc_per_node": 1}, EQUIPPED_TWO),
    passes_on=Example({"precision.compute": "bf16", "parallel.strategy": "zero2"}, EQUIPPED_TWO),
    proof="launch",
)
def precision_of_zero(case: Case) -> str | None:
    """ZeRO computes in bf16 or fp16 from fp32 masters that it spreads: neither pure bf16 nor fp8 is kept there."""
    special = case.spec.precision.compute in ("fp8", "pure_bf16")
    zero = registry.STRATEGIES[case.spec.parallel.strategy].engine == "deepspeed"
    if not special or not zero:
        return None
    return f"{registry.PRECISIONS[case.spec.precision.compute].label} with DeepSpeed."


@rule(
    "PRC009",
    "advice",
    fields=("precision.compute", "train.optim"),
    title="Pure bf16 loses small updates",
    source="arithmetic: bf16 has 8 bits of mantissa, so 1 + 0.001 is 1",
    fixes=(BF16, Fix("StableAdamW", {"train.optim": "stable_adamw"}, safe=False, cost="sums what rounding loses")),
    fails_on=Example(PURE, EQUIPPED_H100),
    passes_on=Example({**PURE, "train.optim": "stable_adamw"}, EQUIPPED_H100),
)
def lost_updates(case: Case) -> str | None:
    """An update below a 256th of its weight is rounded away. Optimizers that sum by Kahan, round stochastically or keep
    masters of their own lose nothing; others need a larger learning rate, or learn less."""
    row = registry.OPTIMIZERS[case.spec.train.optim]
    lost = case.spec.precision.compute == "pure_bf16" and not row.rounding
    return f"{row.label} adds its updates to bf16 weights directly." if lost else None


@rule(
    "PRC010",
    "warning",
    fields=("precision.compute", "launch.device"),
    title="fp8 on a CPU",
    source="torch 2.13 and torchao 0.18, Float8LinearConfig(emulate=True): it trains, slower than fp32",
    fixes=(AUTO,),
    fails_on=Example(FP8, EQUIPPED),
    passes_on=Example(FP8, EQUIPPED_H100),
)
def fp8_on_cpu(case: Case) -> str | None:
    """No CPU multiplies fp8 faster than bf16: good for trying out what an H100 will do, and slow."""
    return "The CPU only imitates fp8." if case.spec.precision.compute == "fp8" and case.run.device == "cpu" else None


@rule(
    "PRC011",
    "warning",
    fields=("precision.compute",),
    title="Layers that fp8 leaves out",
    source="accelerate 1.15 utils/ao.py: layers whose sides are no multiples of 16 stay as they are",
    fixes=(BF16,),
    fails_on=Example(FP8, EQUIPPED_H100, replace(DEMO, shape=replace(SMOL, hidden=570))),
    passes_on=Example(FP8, EQUIPPED_H100),
)
def odd_layers(case: Case) -> str | None:
    """The units take blocks of 16 numbers; other layers stay in bf16, and fp8 saves no time there."""
    if case.spec.precision.compute != "fp8" or case.shape is None or case.shape.hidden % 16 == 0:
        return None
    return f"The model is {case.shape.hidden:,} wide, which is no multiple of 16."


@rule(
    "PRC012",
    "error",
    fields=("precision.compute", "method.quantization", "model.path"),
    title="fp8 on a quantized base",
    source="accelerate 1.15 utils/ao.py: every torch.nn.Linear is replaced, and bitsandbytes' packed layers are ones",
    fixes=(
        BF16,
        Fix(
            "A base that is not packed",
            {"method.quantization": "none"},
            safe=False,
            cost="two to four times the memory",
        ),
    ),
    fails_on=Example({**FP8, "method.quantization": "nf4"}, EQUIPPED_H100),
    passes_on=Example(FP8, EQUIPPED_H100),
)
def packed_fp8(case: Case) -> str | None:
    """Both want to be the linear layers: fp8 would take the packed numbers for weights."""
    packed = registry.QUANTIZATIONS[case.spec.method.quantization].bits or case.facts.packed == "bitsandbytes"
    return "The base weights are packed." if packed and case.spec.precision.compute == "fp8" else None


OTHER_TORCH = {**INSTALLED, "torch": "2.13.0+cpu"}


@rule(
    "HW006",
    "error",
    fields=("launch.device",),
    title="This torch does not drive the device",
    source="torch 2.13 cuda/__init__.py: is_available is false in a build without it; the run would take the CPU",
    fixes=(Fix("On the CPU", {"launch.device": "cpu"}, safe=False, cost="much slower"),),
    manual_fix="Install torch for the device: pytorch.org names the command.",
    fails_on=Example(machine=replace(H100, versions=OTHER_TORCH)),
    passes_on=Example(machine=H100),
)
def other_build(case: Case) -> str | None:
    """PyTorch is built for one maker's devices, and its version says for which. Another one sees none, and automatic
    takes the CPU without a word."""
    version = case.machine.versions.get("torch", "")
    build = version.partition("+")[2]
    nvidia = any(gpu.capability > (0, 0) for gpu in case.machine.gpus)
    if case.run.device != case.machine.device or not version or case.run.device not in ("cuda", "xpu"):
        return None
    others = {"cuda": ("rocm", "xpu") if nvidia else ("cu", "xpu"), "xpu": ("cu", "rocm")}[case.run.device]
    wrong = build.startswith(("cpu", *others))
    return f"torch {version} is here, and {case.machine.gpus[0].name}." if wrong else None
