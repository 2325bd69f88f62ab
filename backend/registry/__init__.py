"""The tables that options choose from: one row a choice, with what the form, the rules and the memory need.

Floor 0. Imports nothing of ours. A new optimizer or model is one row here.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.adapters import ATTENTION_MODULES, LORA_INITS, LORA_TARGETS, STACKED_EXPERTS
from backend.registry.attention import ATTENTIONS, FLASH_ATTENTIONS, SEQUENCE_PARALLEL_ATTENTIONS
from backend.registry.builtin_models import BUILTIN_MODELS
from backend.registry.hub_models import HUB_CONFIGS
from backend.registry.optimizers import OPTIMIZERS
from backend.registry.quantization import FOUR_BIT, PREQUANTIZED, QUANTIZATIONS
from backend.registry.stages import (
    DATASETS,
    DPO_LOSSES,
    KTO_LOSSES,
    NEXT_TOKEN_FORMATS,
    NEXT_TOKEN_STAGES,
    PREFERENCE_STAGES,
    STAGES,
)
from backend.registry.strategies import DEEPSPEED, FSDP, MULTI_PROCESS, OFFLOADS, SHARDINGS, STATE_DICTS, STRATEGIES
from backend.registry.types import (
    Attention,
    BuiltinModel,
    Choice,
    Dataset,
    Device,
    Init,
    Optimizer,
    Precision,
    PrequantizedFormat,
    Quantization,
    Stage,
    Strategy,
)

__all__ = [
    "ATTENTIONS",
    "ATTENTION_MODULES",
    "BUILTIN_MODELS",
    "DATASETS",
    "DEEPSPEED",
    "DPO_LOSSES",
    "FLASH_ATTENTIONS",
    "FOUR_BIT",
    "FSDP",
    "HUB_CONFIGS",
    "KTO_LOSSES",
    "LORA_INITS",
    "LORA_TARGETS",
    "MULTI_PROCESS",
    "NEXT_TOKEN_FORMATS",
    "NEXT_TOKEN_STAGES",
    "OFFLOADS",
    "OPTIMIZERS",
    "PREFERENCE_STAGES",
    "PREQUANTIZED",
    "QUANTIZATIONS",
    "SEQUENCE_PARALLEL_ATTENTIONS",
    "SHARDINGS",
    "STACKED_EXPERTS",
    "STAGES",
    "STATE_DICTS",
    "STRATEGIES",
    "Attention",
    "BuiltinModel",
    "Choice",
    "Dataset",
    "Device",
    "Init",
    "Optimizer",
    "Precision",
    "PrequantizedFormat",
    "Quantization",
    "Stage",
    "Strategy",
]  # fmt: skip

METHODS: Mapping[str, Choice] = {
    "lora": Choice("LoRA", "Train small adapters beside frozen weights. Least memory."),
    "freeze": Choice("Freeze", "Train some of the layers and keep the others."),
    "full": Choice("Full", "Train every weight. Most memory."),
}

PRECISIONS: Mapping[str, Precision] = {
    "auto": Precision("Automatic", "bf16 where the device computes in it, otherwise fp32."),
    "bf16": Precision("bf16", "Mixed precision: half the activations, fast on Ampere and later.", compute_dtype="bf16"),
    "fp16": Precision("fp16", "Mixed precision with loss scaling, for GPUs before Ampere.", compute_dtype="fp16"),
    "fp32": Precision("fp32", "Full precision: the most memory, works everywhere.", compute_dtype="fp32"),
    "tf32": Precision(
        "tf32",
        "fp32 numbers, multiplied in the TF32 units of Ampere and later.",
        compute_dtype="fp32",
        devices=("cuda",),
        min_capability=(8, 0),
    ),
    "fp8": Precision(
        "fp8", "Mixed precision with linear layers in 8 bits, for Ada, Hopper and later.", compute_dtype="bf16"
    ),
    "pure_bf16": Precision(
        "Pure bf16",
        "Weights, gradients and most optimizers' state in bf16: half the memory of bf16, small updates are lost.",
        compute_dtype="bf16",
        fp32_master_weights=False,
    ),
}

FP8_BACKENDS: Mapping[str, Choice] = {
    "torchao": Choice(
        "torchao",
        "Float8 training of PyTorch's own.",
        package="torchao",
        devices=("cuda", "cpu"),
        min_capability=(8, 9),
    ),
    "te": Choice(
        "Transformer Engine",
        "NVIDIA's kernels.",
        package="transformer-engine",
        devices=("cuda",),
        min_capability=(8, 9),
    ),
}

LIGER = Choice("Liger kernels", package="liger-kernel", package_min_version="0.3.0", devices=("cuda", "xpu"))

PROJECTION_TARGETS: Mapping[str, Choice] = {
    "all-linear": Choice("All linear layers", "The output layer too: least state."),
    "attention": Choice("Attention", "q, k, v and o."),
    "custom": Choice("By name", "The module names that you give."),
}

SCHEDULERS: Mapping[str, Choice] = {
    "cosine": Choice("Cosine", "Falls to zero along a half cosine."),
    "linear": Choice("Linear", "Falls to zero in a straight line."),
    "constant": Choice("Constant", "Stays as it is, without warm-up."),
    "constant_with_warmup": Choice("Constant after warm-up", "Rises, then stays."),
    "cosine_with_min_lr": Choice("Cosine to a floor", "Falls to a tenth of the peak."),
    "inverse_sqrt": Choice("Inverse square root", "Falls slowly; for open-ended runs."),
}

FORMATS: Mapping[str, Choice] = {
    "auto": Choice("Recognise it", "From the column names of the first row."),
    "messages": Choice("Messages (OpenAI)", "A column with a list of {role, content}."),
    "sharegpt": Choice("ShareGPT", "A column with a list of {from, value}."),
    "alpaca": Choice("Alpaca", "instruction, input, output."),
    "prompt_completion": Choice("Prompt and completion", "Two columns of text."),
    "text": Choice("Plain text", "One column of text, every token is learned."),
    "pairs": Choice("Chosen and rejected", "Two answers to one question: texts, or lists of turns."),
    "labels": Choice("Answers with a label", "A question, an answer, and whether it is a good one."),
}

TEMPLATES: Mapping[str, Choice] = {
    "model": Choice("The model's own", "As stored with its tokenizer."),
    "chatml": Choice("ChatML", "<|im_start|>role ... <|im_end|>; for base models without a template."),
    "file": Choice("From a file", "A Jinja chat template of your own."),
}

DEVICES: Mapping[str, Device] = {
    "cuda": Device("CUDA (or ROCm) GPU", visible_devices_env="CUDA_VISIBLE_DEVICES", backends=("nccl",)),
    "npu": Device(
        "Ascend NPU", package="torch_npu", visible_devices_env="ASCEND_RT_VISIBLE_DEVICES", backends=("hccl",)
    ),
    "xpu": Device("Intel XPU", visible_devices_env="ZE_AFFINITY_MASK", backends=("xccl", "ccl")),
    "mps": Device("Apple GPU", bf16=True, fp16=False),
    "cpu": Device("CPU", fp16=False),
}

REPORTERS: Mapping[str, Choice] = {
    "none": Choice("Nowhere else", "The run's own page has log and plots."),
    "tensorboard": Choice("TensorBoard", "Event files in the run's folder.", package="tensorboard"),
    "wandb": Choice("Weights & Biases", "Needs WANDB_API_KEY, or WANDB_MODE=offline.", package="wandb"),
    "mlflow": Choice("MLflow", "Needs MLFLOW_TRACKING_URI.", package="mlflow"),
}
