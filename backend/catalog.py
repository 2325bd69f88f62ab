"""The tables that options choose from: one row a choice, with what the form, the rules and the memory need.

Floor 0. Imports nothing of ours. A new optimizer or model is one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Choice:
    """One row: what a person reads (`label`, `help`) and the package it needs beyond the installed base."""

    label: str
    help: str = ""
    package: str = ""


@dataclass(frozen=True)
class BuiltinModel(Choice):
    """A model that needs no hub. `config` is what its config.json says, known before it was made or fetched."""

    parameters: int = 0
    download_bytes: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer(Choice):
    """`name` is the Trainer's `optim`; `state_bytes` is bytes of state a trained parameter."""

    name: str = ""
    state_bytes: float = 0.0


@dataclass(frozen=True)
class Device(Choice):
    """A family of devices: the variable that selects them, and the collective backends in order of preference."""

    visible: str = ""
    backends: tuple[str, ...] = ("gloo",)
    bf16: bool = True
    fp16: bool = True


@dataclass(frozen=True)
class Strategy(Choice):
    """How processes work together: the engine that does it ('' for one process) and its ZeRO stage."""

    engine: str = ""
    stage: int = 0


MODELS: Mapping[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        "SmolLM2 135M Instruct",
        "A small chat model that learns on a laptop. Fetched once (93 MB) from PyPI.",
        parameters=134_515_008,
        download_bytes=93_000_000,
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
    ),
    "tiny-llama": BuiltinModel(
        "Tiny Llama (random)",
        "Four random layers made on the spot: tries out a launch in seconds, learns nothing of use.",
        parameters=1_262_720,
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 2048,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "dtype": "float32",
        },
    ),
}

STAGES: Mapping[str, Choice] = {
    "sft": Choice("Supervised fine-tuning", "Learn to answer: conversations, or prompts with completions."),
    "pretraining": Choice("Pre-training", "Learn every token of plain text."),
}

METHODS: Mapping[str, Choice] = {
    "lora": Choice("LoRA", "Train small adapters beside frozen weights. Least memory."),
    "freeze": Choice("Freeze", "Train some of the layers and keep the others."),
    "full": Choice("Full", "Train every weight. Most memory."),
}

LORA_TARGETS: Mapping[str, Choice] = {
    "all-linear": Choice("All linear layers", "Learns best for its size."),
    "attention": Choice("Attention projections", "q, k, v and o: smaller and a little weaker."),
    "custom": Choice("By name", "The module names that you give."),
}
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")

STRATEGIES: Mapping[str, Strategy] = {
    "single": Strategy("One process", "One device, no communication."),
    "ddp": Strategy("DDP", "A full copy a device; gradients are averaged.", engine="ddp"),
    "zero1": Strategy(
        "ZeRO-1",
        "DeepSpeed spreads the optimizer's state over the devices.",
        package="deepspeed",
        engine="deepspeed",
        stage=1,
    ),
    "zero2": Strategy(
        "ZeRO-2",
        "DeepSpeed spreads optimizer state and gradients.",
        package="deepspeed",
        engine="deepspeed",
        stage=2,
    ),
    "zero3": Strategy(
        "ZeRO-3",
        "DeepSpeed spreads the weights too, gathered layer by layer: least memory, most messages.",
        package="deepspeed",
        engine="deepspeed",
        stage=3,
    ),
}
MANY = tuple(name for name, row in STRATEGIES.items() if row.engine)  # those of several processes
DEEPSPEED = tuple(name for name, row in STRATEGIES.items() if row.engine == "deepspeed")

PRECISIONS: Mapping[str, Choice] = {
    "auto": Choice("Automatic", "bf16 where the device computes in it, otherwise fp32."),
    "bf16": Choice("bf16", "Mixed precision: half the activations, fast on Ampere and later."),
    "fp16": Choice("fp16", "Mixed precision with loss scaling, for GPUs before Ampere."),
    "fp32": Choice("fp32", "Full precision: the most memory, works everywhere."),
}

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer("AdamW", "The usual choice.", name="adamw_torch", state_bytes=8),
    "adamw_fused": Optimizer(
        "AdamW, fused",
        "The same steps in one kernel; faster on GPUs.",
        name="adamw_torch_fused",
        state_bytes=8,
    ),
    # Rows and columns instead of matrices: sums over a matrix are tiny beside it.
    "adafactor": Optimizer("Adafactor", "Almost no state; slower to settle.", name="adafactor", state_bytes=0.1),
    "sgd": Optimizer("SGD", "No state. Needs a larger learning rate.", name="sgd", state_bytes=0),
    "rmsprop": Optimizer("RMSprop", "One moment instead of two.", name="rmsprop", state_bytes=4),
}

SCHEDULERS: Mapping[str, Choice] = {
    "cosine": Choice("Cosine", "Falls to zero along a half cosine."),
    "linear": Choice("Linear", "Falls to zero in a straight line."),
    "constant": Choice("Constant", "Stays as it is, without warm-up."),
    "constant_with_warmup": Choice("Constant after warm-up", "Rises, then stays."),
    "cosine_with_min_lr": Choice("Cosine to a floor", "Falls to a tenth of the peak."),
    "inverse_sqrt": Choice("Inverse square root", "Falls slowly; for open-ended runs."),
}

DATASETS: Mapping[str, Choice] = {
    "trains": Choice("Trains (demo)", "Free sentences about trains, each with one JSON object to extract."),
}

FORMATS: Mapping[str, Choice] = {
    "auto": Choice("Recognise it", "From the column names of the first row."),
    "messages": Choice("Messages (OpenAI)", "A column with a list of {role, content}."),
    "sharegpt": Choice("ShareGPT", "A column with a list of {from, value}."),
    "alpaca": Choice("Alpaca", "instruction, input, output."),
    "prompt_completion": Choice("Prompt and completion", "Two columns of text."),
    "text": Choice("Plain text", "One column of text, every token is learned."),
}

TEMPLATES: Mapping[str, Choice] = {
    "model": Choice("The model's own", "As stored with its tokenizer."),
    "chatml": Choice("ChatML", "<|im_start|>role ... <|im_end|>; for base models without a template."),
    "file": Choice("From a file", "A Jinja chat template of your own."),
}

DEVICES: Mapping[str, Device] = {
    "cuda": Device("CUDA (or ROCm) GPU", visible="CUDA_VISIBLE_DEVICES", backends=("nccl",)),
    "npu": Device("Ascend NPU", visible="ASCEND_RT_VISIBLE_DEVICES", backends=("hccl",)),
    "xpu": Device("Intel XPU", visible="ZE_AFFINITY_MASK", backends=("xccl", "ccl")),
    "mps": Device("Apple GPU", bf16=True, fp16=False),
    "cpu": Device("CPU", fp16=False),
}

REPORTERS: Mapping[str, Choice] = {
    "none": Choice("Nowhere else", "The run's own page has log and plots."),
    "tensorboard": Choice("TensorBoard", "Event files in the run's folder.", package="tensorboard"),
    "wandb": Choice("Weights & Biases", "Needs WANDB_API_KEY, or WANDB_MODE=offline.", package="wandb"),
    "mlflow": Choice("MLflow", "Needs MLFLOW_TRACKING_URI.", package="mlflow"),
}
