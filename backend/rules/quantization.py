"""Rules of packed base weights: by bitsandbytes while loading, or by whoever made the model.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.memory import quantized
from backend.modelspec import matches
from backend.rules.base import Case, Example, Fix, Violation, names, rule
from backend.rules.common_fixes import DDP, FSDP2, ZERO2
from backend.rules.examples import DEMO, H100, INSTALLED, LAPTOP, MOE, LOCAL_MODEL, T4, TWO_H100

PLAIN = Fix(
    "A base that is not packed", {"method.quantization": "none"}, safe=False, cost="two to four times the memory"
)
NF4 = Fix("4 bit (NF4)", {"method.quantization": "nf4"}, safe=False, cost="coarser than 8 bits")
WITHOUT_DORA = Fix("Without DoRA", {"lora.use_dora": False}, safe=False, cost="plain LoRA")
FOUR, EIGHT = {"method.quantization": "nf4"}, {"method.quantization": "int8"}
WITHOUT = {name: version for name, version in LAPTOP.versions.items() if name != "bitsandbytes"}
V100 = replace(T4, gpus=(replace(T4.gpus[0], name="V100", capability=(7, 0)),))


def _row(case: Case) -> registry.Quantization:
    kind = case.spec.method.quantization if case.spec.method.kind == "lora" else "none"
    return registry.QUANTIZATIONS[kind]


def _came(case: Case) -> registry.PrequantizedFormat:
    """The format that a model came in and stays in."""
    row = registry.PREQUANTIZED.get(case.facts.packed)
    return row if row and row.adapters else registry.PrequantizedFormat("")


def packed_base(case: Case) -> str:
    """How the base is packed, by us or by whoever made the model, in a sentence; '' if it is not."""
    bits, came = _row(case).bits, _came(case)
    return f"The base has {bits} bits." if bits else f"The base comes as {came.label}." if came.adapters else ""


@rule(
    "QNT001",
    "error",
    fields=("method.quantization",),
    title="The package that packs weights is missing",
    source="transformers 5.23 quantizer_bnb_4bit.py: validate_environment",
    fixes=(PLAIN,),
    fails_on=Example(FOUR, replace(LAPTOP, versions=WITHOUT)),
    passes_on=Example(FOUR),
)
def missing_package(case: Case) -> str | None:
    """Weights are packed while they are loaded, by bitsandbytes, which unpacks a layer when it is at work."""
    package = _row(case).package
    if not package or not case.machine.versions or package in case.machine.versions:
        return None
    return f"{_row(case).label} needs {package}: pip install {package}."


@rule(
    "QNT002",
    "error",
    fields=("lora.init", "method.quantization"),
    title="This start needs weights that are not packed",
    source="peft 0.21 lora/layer.py: pissa_init and orthogonal_init read floating-point weights; and a base from which "
    "a part was taken is packed to other numbers than the whole one",
    fixes=(Fix("The usual start", {"lora.init": "default"}, safe=False, cost="learns a little slower"), PLAIN),
    fails_on=Example({**FOUR, "lora.init": "pissa"}),
    passes_on=Example({**FOUR, "lora.init": "gaussian"}),
    proof="launch",
)
def start_on_packed(case: Case) -> str | None:
    """PiSSA and OLoRA take a part out of the weights, and the adapter must later fit the whole ones again."""
    method = case.spec.method
    begins = method.kind == "lora" and case.spec.lora.init not in ("default", "gaussian")
    return packed_base(case) or None if begins else None


@rule(
    "QNT003",
    "error",
    fields=("method.quantization", "parallel.strategy"),
    title="8-bit weights cannot be spread",
    source="bitsandbytes 0.50 nn/modules.py, Linear8bitLt: under FSDP2 the layer no longer finds its scales "
    "(weight.CB); under ZeRO-3 it keeps its whole weight beside its part",
    fixes=(DDP, NF4),
    fails_on=Example({**EIGHT, "parallel.strategy": "fsdp2"}, TWO_H100),
    passes_on=Example({**FOUR, "parallel.strategy": "fsdp2"}, TWO_H100),
    proof="launch",
)
def spread_bytes(case: Case) -> str | None:
    """Weights of 4 bits are stored as floating-point numbers where a strategy spreads them. 8-bit ones cannot be."""
    spread = registry.STRATEGIES[case.spec.parallel.strategy].shards_weights
    return "This strategy spreads the weights." if spread and _row(case).bits == 8 else None


@rule(
    "QNT004",
    "error",
    fields=("method.quantization", "parallel.strategy"),
    title="FSDP1 cannot spread packed weights beside adapters",
    source="torch 2.13 fsdp/_flat_param.py: a unit must have one type, and adapters stay in fp32",
    fixes=(FSDP2, PLAIN),
    fails_on=Example({**FOUR, "parallel.strategy": "fsdp1"}, TWO_H100),
    passes_on=Example({**FOUR, "parallel.strategy": "fsdp2"}, TWO_H100),
)
def packed_on_first(case: Case) -> str | None:
    """The first FSDP lays all weights of a layer end to end, whatever they are."""
    first = registry.STRATEGIES[case.spec.parallel.strategy].fsdp_version == 1
    return "The base is packed." if first and _row(case).bits == 4 else None


@rule(
    "QNT005",
    "error",
    fields=("save.merge_adapter", "method.quantization"),
    title="Adapters cannot be merged into packed weights",
    source="peft 0.21 lora/bnb.py: merging packs the sum again, and its rounding undoes a part of what was learned",
    fixes=(Fix("Save the adapter alone", {"save.merge_adapter": False}, cost="to merge afterwards"), PLAIN),
    fails_on=Example({**FOUR, "save.final_model": True, "save.merge_adapter": True}),
    passes_on=Example(FOUR),
    proof="launch",
)
def merge_packed(case: Case) -> str | None:
    """Load the untouched model in bf16 afterwards, the adapter onto it, and merge there with merge_and_unload."""
    merged = case.spec.save.merge_adapter and case.spec.save.final_model and case.spec.method.kind == "lora"
    return packed_base(case) or None if merged else None


@rule(
    "QNT006",
    "error",
    fields=("lora.modules_to_save", "method.quantization"),
    title="Packed weights cannot be trained in full",
    source="transformers 5.23 trainer_utils.py: packed weights take no gradient steps",
    fixes=(PLAIN,),
    fails_on=Example({**FOUR, "lora.modules_to_save": ("up_proj",)}),
    passes_on=Example({**FOUR, "lora.modules_to_save": ("norm",)}),
    proof="launch",
)
def save_packed(case: Case) -> Violation | None:
    """The linear layers are packed. Norms, embeddings and the output layer are not, and can be trained in full."""
    wanted = case.spec.lora.modules_to_save
    if not packed_base(case) or not case.shape or case.spec.method.kind != "lora":
        return None
    found = quantized.leaves(case.spec, case.shape)
    wrong = [name for name in wanted if any(matches(leaf.path, name) for leaf in found)]
    if not wrong:
        return None
    kept = {"lora.modules_to_save": tuple(name for name in wanted if name not in wrong)}
    return Violation(f"{names(wrong)} would be packed.", (Fix(f"Leave out {names(wrong)}", kept, False),))


@rule(
    "QNT008",
    "error",
    fields=("method.quantization",),
    title="This GPU has no units for 8-bit weights",
    source="bitsandbytes' installation guide: LLM.int8() needs compute capability 7.5",
    fixes=(NF4,),
    fails_on=Example(EIGHT, V100),
    passes_on=Example(EIGHT, T4),
)
def old_for_bytes(case: Case) -> str | None:
    """Multiplying bytes needs the tensor cores of Turing and later; 4 bits are unpacked before they are multiplied."""
    found = [gpu for gpu in case.machine.gpus if (0, 0) < gpu.capability < (7, 5)]
    if case.run.device != "cuda" or _row(case).bits != 8 or not found:
        return None
    return f"{found[0].name} has compute capability {found[0].capability[0]}.{found[0].capability[1]}."


GPTQ, FP8 = replace(DEMO, packed="gptq"), replace(DEMO, packed="fp8")
READY = replace(H100, versions={**INSTALLED, "gptqmodel": "5.6.0", "optimum": "2.0.0"})
ADAPTERS = Fix("LoRA", {"method.kind": "lora"}, safe=False)
FULL = {"method.kind": "full", "train.learning_rate": 1e-5}


@rule(
    "QNT009",
    "error",
    fields=("method.kind", "model.path", "model.hub_id"),
    title="A model that came packed carries adapters only",
    source="transformers 5.23 trainer_utils.py: validate_quantization_for_training",
    fixes=(ADAPTERS,),
    fails_on=Example({**LOCAL_MODEL, **FULL}, READY, GPTQ),
    passes_on=Example(LOCAL_MODEL, READY, GPTQ),
)
def train_packed(case: Case) -> str | None:
    """Weights of a few bits take no small steps."""
    row = registry.PREQUANTIZED.get(case.facts.packed)
    if row is None or not row.adapters or case.spec.method.kind == "lora":
        return None
    return f"Its weights are packed as {row.label}."


@rule(
    "QNT010",
    "error",
    fields=("model.path", "model.hub_id"),
    title="Nothing is trained on weights packed like this",
    source="transformers 5.23 quantizers: is_trainable; of AQLM, BitNet, EETQ, FP-Quant, FourOverSix, MXFP8, Quanto, "
    "SINQ and torchao it is true, and none was seen to train here",
    manual_fix="Take the model as it was before it was packed; it can be packed while loading (quantized base).",
    fails_on=Example(LOCAL_MODEL, facts=replace(DEMO, packed="quark")),
    passes_on=Example(LOCAL_MODEL, READY, GPTQ),
)
def untrainable_packing(case: Case) -> str | None:
    """Some formats have kernels for answering only, without a backward pass. Others have one that was never seen to
    work here."""
    kind = case.facts.packed
    return f"Its weights are packed as {kind}." if kind and kind not in registry.PREQUANTIZED else None


@rule(
    "QNT011",
    "error",
    fields=("model.path", "model.hub_id"),
    title="A package for this packed model is missing",
    source="transformers 5.23 quantizers: validate_environment",
    manual_fix="Install it, or take the model as it was before it was packed.",
    fails_on=Example(LOCAL_MODEL, H100, GPTQ),
    passes_on=Example(LOCAL_MODEL, READY, GPTQ),
)
def missing_unpacker(case: Case) -> str | None:
    """Each format is read by a package of its own."""
    row = registry.PREQUANTIZED.get(case.facts.packed)
    missing = [name for name in row.packages if name not in case.machine.versions] if row else []
    if row is None or not case.machine.versions or not missing:
        return None
    return f"{row.label} needs {names(missing)}: pip install {' '.join(missing)}."


@rule(
    "QNT012",
    "error",
    fields=("method.quantization", "model.path", "model.hub_id"),
    title="The model comes packed already",
    source="transformers 5.23 quantizers/auto.py: two different configurations are refused",
    fixes=(PLAIN,),
    fails_on=Example({**LOCAL_MODEL, **FOUR}, READY, GPTQ),
    passes_on=Example(LOCAL_MODEL, READY, GPTQ),
)
def packed_twice(case: Case) -> str | None:
    """Weights are packed once: by whoever made the model, or while loading."""
    return f"Its weights are packed as {case.facts.packed}." if case.facts.packed and _row(case).bits else None


@rule(
    "QNT013",
    "error",
    fields=("launch.device", "model.path", "model.hub_id"),
    title="This packed model needs a GPU",
    source="transformers 5.23 quantizer_hqq.py: a device map with the CPU is refused",
    manual_fix="Run it on a GPU, or take the model as it was before it was packed.",
    fails_on=Example(LOCAL_MODEL, replace(LAPTOP, versions={**INSTALLED, "hqq": "0.2.8"}), replace(DEMO, packed="hqq")),
    passes_on=Example(LOCAL_MODEL, replace(H100, versions={**INSTALLED, "hqq": "0.2.8"}), replace(DEMO, packed="hqq")),
)
def packed_for_gpu(case: Case) -> str | None:
    """HQQ's layers are made where they will work, and that cannot be a CPU."""
    row = registry.PREQUANTIZED.get(case.facts.packed)
    return f"{row.label} was found." if row and row.devices and case.run.device == "cpu" else None


@rule(
    "QNT014",
    "advice",
    fields=("model.path", "model.hub_id"),
    title="This model is unpacked while it is loaded",
    source="transformers 5.23 quantizer_mxfp4.py, quantizer_finegrained_fp8.py: dequantize=True",
    manual_fix="To train on packed weights take one that is not packed, and pack it while loading.",
    fails_on=Example(LOCAL_MODEL, facts=FP8),
    passes_on=Example(LOCAL_MODEL),
)
def unpacked_base(case: Case) -> str | None:
    """Its format has no backward pass everywhere, so its weights become ordinary ones: as large as those, and
    everything can be trained."""
    row = registry.PREQUANTIZED.get(case.facts.packed)
    return f"{row.label} weights become ordinary ones." if row and row.dequantized_on_load else None


@rule(
    "QNT015",
    "error",
    fields=("parallel.strategy", "model.path", "model.hub_id"),
    title="A model that came packed cannot be spread",
    source="accelerate 1.15 utils/fsdp_utils.py leaves integer weights out of FSDP2; torch 2.13 FSDP1 cannot flatten "
    "them; ZeRO-3 does not partition buffers",
    fixes=(ZERO2, DDP),
    manual_fix="Or take the model as it was before, and pack it while loading: NF4 is spread.",
    fails_on=Example({**LOCAL_MODEL, "parallel.strategy": "fsdp2"}, TWO_H100, replace(DEMO, packed="bitsandbytes")),
    passes_on=Example({**LOCAL_MODEL, "parallel.strategy": "zero2"}, TWO_H100, replace(DEMO, packed="bitsandbytes")),
)
def spread_as_it_came(case: Case) -> str | None:
    """Its integers would lie whole on every device, whatever the strategy spreads."""
    spread = case.strategy.shards_weights and case.strategy.engine != "tensor"
    return f"Its weights come as {_came(case).label}." if _came(case).adapters and spread else None


@rule(
    "QNT016",
    "error",
    fields=("lora.use_dora", "model.path", "model.hub_id"),
    title="No DoRA on weights packed like this",
    source="peft 0.21 tuners/lora/gptq.py GPTQLoraLinear, tuners/lora/awq.py AwqLoraLinear: does not support DoRA yet",
    fixes=(WITHOUT_DORA,),
    manual_fix="Or take the model as it was before, and pack it while loading: NF4 takes DoRA.",
    fails_on=Example({**LOCAL_MODEL, "lora.use_dora": True}, READY, GPTQ),
    passes_on=Example(
        {**LOCAL_MODEL, "lora.use_dora": True},
        replace(H100, versions={**INSTALLED, "hqq": "0.2.8"}),
        replace(DEMO, packed="hqq"),
    ),
)
def dora_as_it_came(case: Case) -> str | None:
    """DoRA measures the rows of a weight, which these kernels do not unpack for it."""
    method = case.spec.method
    asked = method.kind == "lora" and case.spec.lora.use_dora and case.facts.packed in ("gptq", "awq")
    return f"Its weights come as {_came(case).label}." if asked else None


@rule(
    "QNT017",
    "advice",
    fields=("precision.compute", "model.path", "model.hub_id"),
    title="AWQ's weights become fp16",
    source="transformers 5.23 quantizers/quantizer_awq.py update_dtype: bfloat16 is cast to float16 on cuda and xpu",
    fixes=(Fix("fp16", {"precision.compute": "fp16"}, safe=False),),
    fails_on=Example({**LOCAL_MODEL, "precision.compute": "bf16"}, READY, replace(DEMO, packed="awq")),
    passes_on=Example({**LOCAL_MODEL, "precision.compute": "fp16"}, READY, replace(DEMO, packed="awq")),
)
def halves_of_awq(case: Case) -> str | None:
    """Its kernels know fp16 alone, so what is not packed is held in it, whatever the run computes in."""
    asked = case.facts.packed == "awq" and case.run.device in ("cuda", "xpu") and case.run.compute_dtype == "bf16"
    return "The run computes in bf16." if asked else None


@rule(
    "QNT018",
    "warning",
    fields=("method.quantization",),
    title="Experts are not packed",
    source="transformers 5.23 integrations/bitsandbytes.py replace_with_bnb_linear: nn.Linear alone, and experts of "
    "a layer are one stacked weight",
    fails_on=Example(FOUR, H100, replace(DEMO, shape=MOE)),
    passes_on=Example({}, H100, replace(DEMO, shape=MOE)),
)
def experts_stay(case: Case) -> str | None:
    """Linear layers are packed, and the experts of a mixture are none: they lie in one weight each layer, and stay as
    they are. Nearly all of a mixture's weights are experts."""
    if case.shape is None or not _row(case).bits or not case.shape.experts:
        return None
    whole = case.shape.parameters
    stay = sum(leaf.parameters for leaf in case.shape.leaves() if leaf.stacked > 1)
    return f"{stay / whole:.0%} of its weights stay in {case.run.compute_dtype}."
