"""Registry: the values of each choice option, with label, help, requirements and properties.

The form, the rules and the memory estimate read it; a new optimizer is one entry.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.adapters import (
    ATTENTION_MODULES,
    CONV1D_MODELS,
    LORA_INITS,
    LORA_TARGETS,
    STACKED_EXPERTS,
    same_base_weights,
)
from backend.registry.architectures import (
    CONVERTED_WEIGHTS,
    LIGER_TYPES,
    LIGER_VERSION,
    NESTED_NORM,
    NO_LAYER_LIST,
    NO_NEW_TOKENS,
    NO_PADDING,
    NO_PURE_BF16,
    NO_TENSOR_FSDP2,
    NO_TENSOR_PARALLELISM,
    NO_ZERO3,
    NOT_CALLED,
    POSITION_TABLES,
    READS_EMBEDDING,
    UNQUANTIZABLE,
    UNTRAINABLE,
)
from backend.registry.attention import ATTENTIONS, FLASH_ATTENTIONS, SEQUENCE_PARALLEL_ATTENTIONS
from backend.registry.builtin_models import BUILTIN_MODELS
from backend.registry.gpus import GpuModel, gpu_model, peak_flops
from backend.registry.hub_models import HUB_CONFIGS, has_chat_template, hub_id_in, is_hub_id
from backend.registry.learning_rates import (
    HIGHEST_OF_LARGE,
    LARGE,
    LOW_RATE_STAGES,
    PREFERENCE_RATES,
    PRETRAINING_RATES,
    SFT_RATES,
    Rates,
    lower_learning_rate,
    scheduler_arguments,
    usual_learning_rate,
    warmup_steps,
)
from backend.registry.optimizers import OPTIMIZERS
from backend.registry.packing import (
    PACKING_ISOLATED,
    PACKING_NEEDS_CONV1D,
    PACKING_PACKAGES,
    PACKING_WITHIN_POSITIONS,
)
from backend.registry.quantization import FOUR_BIT, PREQUANTIZED, QUANTIZATIONS
from backend.registry.sequence_parallel import SEQUENCE_PARALLEL_TYPES
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
    LoraInit,
    Optimizer,
    Precision,
    PrequantizedFormat,
    Quantization,
    Stage,
    Strategy,
    is_residual,
)

METHODS: Mapping[str, Choice] = {
    "lora": Choice("LoRA", "Trains small low-rank adapters next to frozen weights: least memory."),
    "freeze": Choice("Freeze", "Trains some of the layers and freezes the others."),
    "full": Choice("Full", "Trains all parameters: most memory."),
}

PRECISIONS: Mapping[str, Precision] = {
    "auto": Precision("Automatic", "bf16 on NVIDIA GPUs since Ampere, AMD and Intel GPUs and Ascend NPUs, else fp32."),
    "bf16": Precision(
        "bf16", "Mixed precision: half the activation memory; fast on Ampere and newer GPUs.", compute_dtype="bf16"
    ),
    "fp16": Precision("fp16", "Mixed precision with loss scaling, for GPUs older than Ampere.", compute_dtype="fp16"),
    "fp32": Precision("fp32", "Full precision: most memory; works on every device.", compute_dtype="fp32"),
    "tf32": Precision(
        "tf32",
        "fp32 tensors, with matrix multiplications in TF32 on Ampere and newer GPUs.",
        compute_dtype="fp32",
        devices=("cuda",),
        min_capability=(8, 0),
    ),
    "fp8": Precision(
        "fp8", "bf16 mixed precision with linear layers in FP8, for Ada, Hopper and newer GPUs.", compute_dtype="bf16"
    ),
    "pure_bf16": Precision(
        "Pure bf16",
        "Weights, gradients and most optimizer state in bf16: half the memory of bf16, but small updates are lost.",
        compute_dtype="bf16",
        fp32_master_weights=False,
    ),
}

FP8_BACKENDS: Mapping[str, Choice] = {
    "torchao": Choice(
        "torchao",
        "The float8 training of torchao, PyTorch's quantization library.",
        package="torchao",
        devices=("cuda", "cpu"),
        min_capability=(8, 9),
    ),
    "te": Choice(
        "Transformer Engine",
        "NVIDIA's FP8 kernels.",
        package="transformer-engine",
        devices=("cuda",),
        min_capability=(8, 9),
    ),
}

LIGER = Choice("Liger", package="liger-kernel", package_min_version="0.3.0", devices=("cuda", "xpu"))

PROJECTION_TARGETS: Mapping[str, Choice] = {
    "all-linear": Choice("All linear layers", "All linear layers including the LM head: least optimizer state."),
    "attention": Choice("Attention projections", "Only q, k, v and o projections."),
    "custom": Choice("By name", "The modules in train.optim_target_modules."),
}

SCHEDULERS: Mapping[str, Choice] = {
    "cosine": Choice("Cosine", "Decays to zero along a half cosine."),
    "linear": Choice("Linear", "Decays to zero linearly."),
    "constant": Choice("Constant", "The peak learning rate in every step, without warmup."),
    "constant_with_warmup": Choice("Constant with warmup", "The peak learning rate in every step after warmup."),
    "cosine_with_min_lr": Choice("Cosine with minimum", "Decays along a half cosine to a tenth of the peak."),
    "warmup_stable_decay": Choice(
        "Warmup, stable, decay", "The peak learning rate after warmup, which decays to zero linearly in the last tenth."
    ),
    "inverse_sqrt": Choice(
        "Inverse square root", "Decays with the inverse square root of the step; for runs without a fixed length."
    ),
}

FORMATS: Mapping[str, Choice] = {
    "auto": Choice("Automatic", "Detected from the columns of the first example."),
    "messages": Choice("Messages (OpenAI)", "One column with a list of {role, content} turns."),
    "sharegpt": Choice("ShareGPT", "One column with a list of {from, value} turns."),
    "alpaca": Choice("Alpaca", "Columns instruction, input (optional) and output."),
    "prompt_completion": Choice("Prompt and completion", "Two columns, each with a text or a list of turns."),
    "text": Choice("Plain text", "One text column; every token contributes to the loss."),
    "pairs": Choice("Chosen and rejected", "Two completions of one prompt, as text or as turns."),
    "labels": Choice(
        "Labeled completions", "A prompt, a completion, and a label that is true for desirable completions."
    ),
}

TEMPLATES: Mapping[str, Choice] = {
    "model": Choice("From the model", "The template that is saved with the tokenizer."),
    "chatml": Choice("ChatML", "<|im_start|>role ... <|im_end|>, for base models without a template."),
    "file": Choice("From a file", "A custom Jinja chat template."),
}

HIP_VISIBLE_DEVICES = "HIP_VISIBLE_DEVICES"  # of AMD GPUs; HIP reads CUDA_VISIBLE_DEVICES only if it is not set
NO_GPUS: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": "", HIP_VISIBLE_DEVICES: ""}  # for torch: it computes on the CPU

DEVICES: Mapping[str, Device] = {
    "cuda": Device("CUDA (or ROCm) GPU", visible_devices_env="CUDA_VISIBLE_DEVICES", backends=("nccl",)),
    "npu": Device(
        "Ascend NPU",
        package="torch_npu",
        visible_devices_env="ASCEND_RT_VISIBLE_DEVICES",
        backends=("hccl",),
        noun="NPU",
    ),
    "xpu": Device("Intel XPU", visible_devices_env="ZE_AFFINITY_MASK", backends=("xccl", "ccl"), noun="XPU"),
    "mps": Device("Apple GPU", bf16=True, fp16=False),
    "cpu": Device("CPU", noun="process", fp16=False),
}

REPORTERS: Mapping[str, Choice] = {
    "none": Choice("None", "The page of the run has its log and plots."),
    "tensorboard": Choice("TensorBoard", "Writes event files to the run folder.", package="tensorboard"),
    "wandb": Choice(
        "Weights & Biases", "Needs wandb login or WANDB_API_KEY; WANDB_MODE=offline needs neither.", package="wandb"
    ),
    "mlflow": Choice("MLflow", "Logs to the server in MLFLOW_TRACKING_URI, or to local files.", package="mlflow"),
}
