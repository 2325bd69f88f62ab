"""Rules about the compute precision: what the selected devices support, and what loses accuracy or speed."""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.resolve import before_ampere
from backend.rules.base import Case, Example, Fix, advice, error, names, warning
from backend.rules.common_fixes import BF16
from backend.rules.examples import (
    DEMO,
    EQUIPPED,
    EQUIPPED_H100,
    EQUIPPED_TWO,
    H100,
    LAPTOP,
    LOCAL_MODEL,
    SMOL,
    T4,
)
from backend.rules.requirements import fp8_backend, missing_package, unsupported_capability

AUTO_PRECISION = Fix(
    "Set precision to auto",
    {"precision.compute": "auto"},
    safe=False,
    cost="uses bf16 if the device supports it, else fp32",
)
FP16 = Fix("Use fp16", {"precision.compute": "fp16"}, safe=False, cost="narrow value range, needs loss scaling")
FP32 = Fix("Use fp32", {"precision.compute": "fp32"}, safe=False, cost="twice the activation memory")
NO_COMPILE = {"train.torch_compile": False}
TF32_SPEC, FP8_SPEC, PURE_BF16_SPEC = ({"precision.compute": name} for name in ("tf32", "fp8", "pure_bf16"))
COMPILED_FP32 = {"train.torch_compile": True, "precision.compute": "fp32"}
FP8_BLOCK = 16  # torchao and accelerate convert linear layers whose dimensions are multiples of 16


@error(
    "PRC001",
    fields=("precision.compute", "launch.device"),
    title="fp16 training is not supported on a CPU",
    source="accelerate 1.15 accelerator.py: no autocast and no loss scaling for fp16 on a CPU",
    fixes=(AUTO_PRECISION, FP32),
    fails_on=Example({"precision.compute": "fp16"}),
    passes_on=Example({"precision.compute": "fp16"}, T4),
)
def fp16_on_cpu(case: Case) -> str | None:
    """On a CPU, accelerate applies neither autocast nor loss scaling for fp16. The run would combine frozen fp16
    weights with fp32 trainable parameters, which is slow and lacks the loss scaling that fp16 gradients need."""
    if case.run.compute_dtype != "fp16" or case.run.device != "cpu":
        return None
    return "precision.compute is fp16, and this run would use the CPU, which has no fp16 training."


@warning(
    "PRC002",
    fields=("precision.compute",),
    title="bf16 is emulated on GPUs before Ampere",
    source="torch 2.13 cuda/__init__.py: is_bf16_supported is true with emulation, too; bf16 tensor cores came with "
    "compute "
    "capability 8.0",
    fixes=(FP16, FP32),
    fails_on=Example({"precision.compute": "bf16"}, T4),
    passes_on=Example({"precision.compute": "bf16"}, H100),
    proof="gpu",
)
def bf16_before_ampere(case: Case) -> str | None:
    """GPUs before Ampere (compute capability 8.0) have no bf16 tensor cores. PyTorch emulates bf16 there without a
    warning, and training is slower than in fp32."""
    found = [gpu for gpu in case.gpus if before_ampere(gpu.capability)]
    if case.run.device != "cuda" or case.run.compute_dtype != "bf16" or not found:
        return None
    gpus = names([f"GPU {gpu.id} ({gpu.name}) has {gpu.capability[0]}.{gpu.capability[1]}" for gpu in found])
    return f"bf16 in hardware needs compute capability 8.0 or later; {gpus}."


@advice(
    "PRC003",
    fields=("precision.compute",),
    title="bf16 is emulated on this CPU",
    source="Intel's and Arm's instruction sets: AMX, AVX512-BF16, BF16",
    fixes=(Fix("Use fp32", {"precision.compute": "fp32"}, safe=False, cost="more memory"),),
    fails_on=Example({"precision.compute": "bf16"}),
    passes_on=Example({"precision.compute": "bf16"}, replace(LAPTOP, cpu_bf16=True)),
)
def bf16_emulated_on_cpu(case: Case) -> str | None:
    """Without AMX, AVX512-BF16 or Arm's BF16 extension, a CPU converts each bf16 operand to fp32 and back. bf16 then
    saves memory, but is slower than fp32."""
    on_cpu = case.run.device == "cpu" and case.machine.device == "cpu"  # the CPU of a GPU machine is not known
    if not on_cpu or case.run.compute_dtype != "bf16" or case.machine.cpu_bf16:
        return None
    return "This CPU has no bf16 instructions (AMX, AVX512-BF16 or Arm BF16), so bf16 steps are slower than fp32 steps."


@advice(
    "PRC004",
    fields=("precision.compute",),
    title="fp32 training on GPUs with bf16 tensor cores",
    source="NVIDIA's data sheets: bf16 runs at several times the rate of fp32",
    fixes=(Fix("Use bf16", {"precision.compute": "bf16"}, safe=False, cost="activations are rounded to bf16"),),
    fails_on=Example({"precision.compute": "fp32"}, H100),
    passes_on=Example({"precision.compute": "bf16"}, H100),
)
def fp32_on_bf16_gpu(case: Case) -> str | None:
    """Mixed precision with bf16 halves the activation memory and is several times faster on Ampere and later. Trainable
    parameters and optimizer state stay in fp32."""
    if case.spec.precision.compute == "tf32" or case.run.device != "cuda" or case.run.compute_dtype != "fp32":
        return None
    if not case.gpus or not all(gpu.capability >= (8, 0) for gpu in case.gpus):
        return None
    gpus = names(list(dict.fromkeys(gpu.name for gpu in case.gpus)))
    return f"The run computes in fp32 on {gpus}, where bf16 mixed precision is several times faster."


@error(
    "PRC008",
    fields=("precision.compute", "parallel.strategy"),
    title="The strategy does not support the precision",
    source="deepspeed 0.19 runtime/base_optimizer.py: ZeRO keeps fp32 master weights; accelerate 1.15 accelerator.py "
    "passes DeepSpeed only Transformer Engine's deprecated recipe; transformers 5.23 trainer.py: accelerate does not "
    "prepare a model that was sharded while loading, so no layer becomes an fp8 layer",
    fixes=(BF16,),
    fails_on=Example({**PURE_BF16_SPEC, "parallel.strategy": "zero2", "launch.nproc_per_node": 1}, EQUIPPED_TWO),
    passes_on=Example({"precision.compute": "bf16", "parallel.strategy": "zero2"}, EQUIPPED_TWO),
)
def precision_unsupported_by_engine(case: Case) -> str | None:
    """DeepSpeed computes in bf16 or fp16 and keeps sharded fp32 master weights. Pure bf16 would silently get fp32
    master weights, and accelerate passes DeepSpeed only the deprecated fp8 recipe of Transformer Engine. With tensor
    parallelism, accelerate replaces no layers, so that fp8 would silently be bf16."""
    if case.spec.precision.compute not in case.run.engine.unsupported_precisions:
        return None
    label = registry.PRECISIONS[case.spec.precision.compute].label
    return f"The strategy is {case.strategy.label}, which does not support the precision {label}."


@advice(
    "PRC009",
    fields=("precision.compute", "train.optim"),
    title="Pure bf16 rounds small weight updates to zero",
    source="arithmetic: bf16 has 8 significant bits, so 1 + 0.001 is rounded to 1",
    fixes=(
        BF16,
        Fix("Use StableAdamW", {"train.optim": "stable_adamw"}, safe=False, cost="another optimizer"),
    ),
    fails_on=Example(PURE_BF16_SPEC, EQUIPPED_H100),
    passes_on=Example({**PURE_BF16_SPEC, "train.optim": "stable_adamw"}, EQUIPPED_H100),
)
def pure_bf16_loses_updates(case: Case) -> str | None:
    """A bf16 number has 8 significant bits, so an update smaller than about 1/256 of its weight is rounded away.
    Optimizers with Kahan summation, stochastic rounding or their own fp32 copies keep such updates; others train less
    or need a higher learning rate."""
    row = case.optimizer
    if case.spec.precision.compute != "pure_bf16" or row.rounding:
        return None
    return f"{row.label} adds its updates directly to bf16 weights, without Kahan summation or stochastic rounding."


@error(
    "PRC020",
    fields=("precision.compute", "model.path", "model.hub_id"),
    title="The architecture does not support pure bf16",
    source="transformers 5.23 models/inkling2/modeling_inkling2.py, Inkling2TopKRouter.forward; verified by running: "
    "expected m1 and m2 to have the same dtype",
    fixes=(BF16,),
    fails_on=Example({**LOCAL_MODEL, **PURE_BF16_SPEC}, EQUIPPED_H100, replace(DEMO, model_type="inkling2_text")),
    passes_on=Example(
        {**LOCAL_MODEL, "precision.compute": "bf16"}, EQUIPPED_H100, replace(DEMO, model_type="inkling2_text")
    ),
)
def pure_bf16_unsupported_by_architecture(case: Case) -> str | None:
    """The router of Inkling 2 computes in fp32 with weights that transformers keeps in fp32. Pure bf16 stores all
    weights in bf16, so the first step fails; in mixed precision, autocast converts them."""
    kinds = case.model_types & registry.NO_PURE_BF16
    if case.spec.precision.compute != "pure_bf16" or not kinds or case.spec.model.source == "builtin":
        return None
    return f"precision.compute is pure_bf16, and the router of the model type {kinds.pop()} needs fp32 weights."


@warning(
    "PRC010",
    fields=("precision.compute", "launch.device"),
    title="fp8 is emulated on most CPUs",
    source="torch 2.13 _scaled_mm, profiled on a CPU: the operands are copied to fp32 and multiplied by aten::mm; "
    "torchao 0.18 Float8Linear trains, slower than fp32",
    fixes=(AUTO_PRECISION,),
    fails_on=Example(FP8_SPEC, EQUIPPED),
    passes_on=Example(FP8_SPEC, EQUIPPED_H100),
)
def fp8_on_cpu(case: Case) -> str | None:
    """Hardly any CPU has fp8 instructions (AMX-FP8). Without them, PyTorch converts fp8 operands to fp32 before each
    matrix product, which is slower than training in fp32. fp8 on a CPU is useful for trying out a configuration for an
    H100."""
    if case.spec.precision.compute != "fp8" or case.run.device != "cpu":
        return None
    return "precision.compute is fp8, and this run would use the CPU, where fp8 is usually slower than fp32."


@warning(
    "PRC011",
    fields=("precision.compute",),
    title="The hidden size is not a multiple of 16, so fp8 skips most layers",
    source="accelerate 1.15 utils/ao.py: layers whose dimensions are not multiples of 16 stay as they are",
    fixes=(BF16,),
    fails_on=Example(FP8_SPEC, EQUIPPED_H100, replace(DEMO, shape=replace(SMOL, hidden=570))),
    passes_on=Example(FP8_SPEC, EQUIPPED_H100),
)
def fp8_skips_odd_layers(case: Case) -> str | None:
    """Matrix multiplication in fp8 needs dimensions that are multiples of 16. accelerate leaves all other linear layers
    in bf16, where fp8 saves no time."""
    if case.spec.precision.compute != "fp8" or case.shape is None or case.shape.hidden % FP8_BLOCK == 0:
        return None
    return f"The model's hidden size is {case.shape.hidden:,}, which is not a multiple of {FP8_BLOCK}."


@error(
    "PRC012",
    fields=("precision.compute", "method.quantization", "model.path"),
    title="fp8 cannot be combined with a quantized base model",
    source="accelerate 1.15 utils/ao.py: instances of torch.nn.Linear are replaced, except the first and last, and "
    "bitsandbytes' quantized layers are subclasses of it",
    fixes=(
        BF16,
        Fix(
            "Set quantization to none",
            {"method.quantization": "none"},
            safe=False,
            cost="two to four times the weight memory",
        ),
    ),
    fails_on=Example({**FP8_SPEC, "method.quantization": "nf4"}, EQUIPPED_H100),
    passes_on=Example(FP8_SPEC, EQUIPPED_H100),
)
def fp8_with_quantized_base(case: Case) -> str | None:
    """Training in fp8 replaces linear layers, including those of bitsandbytes, and would use their quantized values as
    if they were weights."""
    row = registry.QUANTIZATIONS[case.spec.method.quantization]
    if case.spec.precision.compute != "fp8" or not (row.bits or case.facts.quant_method == "bitsandbytes"):
        return None
    source = f"method.quantization is {row.label}" if row.bits else "the model is stored in bitsandbytes format"
    return f"precision.compute is fp8, and {source}."


@warning(
    "PRC013",
    fields=("precision.compute", "train.torch_compile"),
    title="torch.compile turns fp32 into TF32",
    source="accelerate 1.15 state.py: allow_tf32 is switched on where a model is compiled without mixed precision; "
    "transformers 5.23 training_args.py likewise",
    fixes=(
        Fix("Set precision to tf32", {"precision.compute": "tf32"}),
        Fix("Turn off torch.compile", NO_COMPILE, cost="slower steps"),
    ),
    fails_on=Example(COMPILED_FP32, H100),
    passes_on=Example({**COMPILED_FP32, "precision.compute": "tf32"}, H100),
    proof="gpu",
)
def torch_compile_enables_tf32(case: Case) -> str | None:
    """Without mixed precision, accelerate and transformers allow TF32 for compiled models. On Ampere and later, matrix
    products then keep 10 bits of mantissa instead of 23."""
    compiled = case.spec.train.torch_compile and case.spec.precision.compute == "fp32" and case.run.device == "cuda"
    found = [gpu.name for gpu in case.gpus if gpu.capability >= (8, 0)]
    if not compiled or not found:
        return None
    return f"precision.compute is fp32 and torch_compile is on; on {found[0]}, matrix products would run in TF32."


# --- What the registry row requires ---


@error(
    "PRC005",
    fields=("precision.compute", "launch.device"),
    title="TF32 needs an Ampere or later GPU",
    source="transformers 5.23 training_args.py: --tf32 requires Ampere or newer; utils/import_utils.py "
    "is_torch_tf32_available: false in a torch build without CUDA",
    fixes=(Fix("Use fp32", {"precision.compute": "fp32"}),),
    fails_on=Example(TF32_SPEC),
    passes_on=Example(TF32_SPEC, H100),
    proof="launch",
)
def tf32_needs_ampere(case: Case) -> str | None:
    """TF32 multiplies fp32 matrices with a 10-bit mantissa on the tensor cores of NVIDIA GPUs from Ampere on.
    transformers refuses tf32 on all other devices, including AMD GPUs, some of which have TF32 through
    hipBLASLt."""
    row = registry.PRECISIONS["tf32"] if case.spec.precision.compute == "tf32" else None
    return unsupported_capability(case, row, any_vendor=False)


@error(
    "PRC006",
    fields=("precision.compute", "launch.device"),
    title="fp8 needs an Ada, Hopper or later GPU",
    source="accelerate 1.15 state.py: below capability 8.9 it warns and uses fp16; torchao 0.18 and Transformer "
    "Engine support no other vendor's GPUs here",
    fixes=(AUTO_PRECISION,),
    fails_on=Example(FP8_SPEC, replace(EQUIPPED_H100, gpus=T4.gpus)),
    passes_on=Example(FP8_SPEC, EQUIPPED_H100),
    proof="gpu",
)
def fp8_needs_ada_or_hopper(case: Case) -> str | None:
    """Tensor cores for fp8 came with Ada and Hopper (compute capability 8.9 and 9.0). On older GPUs, accelerate logs a
    warning and uses fp16. On a CPU, only torchao's fp8 training works."""
    return unsupported_capability(case, fp8_backend(case), any_vendor=False)


@error(
    "PRC007",
    fields=("precision.fp8_backend",),
    title="The fp8 library is not installed",
    source="accelerate 1.15 accelerator.py: no FP8-compatible backend was installed",
    fixes=(AUTO_PRECISION,),
    fails_on=Example(FP8_SPEC, H100),
    passes_on=Example(FP8_SPEC, EQUIPPED_H100),
)
def fp8_library_missing(case: Case) -> str | None:
    """PyTorch alone does not train in fp8: accelerate replaces the linear layers with those of a library."""
    return missing_package(case, fp8_backend(case))
