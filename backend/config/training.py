"""Training loop, optimizer and precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend import registry
from backend.config.fields import (
    FP8,
    NEXT_TOKEN,
    SHUFFLING,
    Names,
    Section,
    Ui,
    one_of,
    read_by,
)


class Train(Section):
    """Training stage, duration, batch size, optimizer and kernels."""

    stage: Annotated[str, *one_of(registry.STAGES), Ui("Training stage")] = "sft"
    """Training objective: SFT on conversations, pretraining on text, preference tuning (DPO, KTO, ORPO), or a reward
    model."""
    duration: Annotated[Literal["epochs", "steps"], Ui("Duration unit", choices={"steps": "Optimizer steps"})] = (
        "epochs"
    )
    """Whether the length of the training is set in epochs or in optimizer steps."""
    num_train_epochs: Annotated[float, Field(gt=0, le=10_000), Ui("Epochs", when={"train.duration": ("epochs",)})] = 3.0
    """Passes over the training set; 1 to 3 is usual, and fractions are allowed."""
    max_steps: Annotated[int, Field(ge=1), Ui("Max steps", when={"train.duration": ("steps",)})] = 100
    """Number of optimizer steps; the training set is repeated if it is too small for them. About 20 suffice for a
    test."""
    max_hours: Annotated[float, Field(ge=0, le=10_000), Ui("Max run time", unit="hours")] = 0.0
    """Saves a checkpoint and stops the run after this many hours, including loading and evaluations but not queue time;
    Resume allows the same number of hours again. 0, which is usual, sets no limit."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=65536), Ui("Batch size per device")] = 4
    """Examples per forward pass on each device; activation memory grows with it. Use the largest that fits."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=65536), Ui("Gradient accumulation steps")] = 1
    """Batches per optimizer step; global batch size = batch size per device x accumulation steps x data-parallel
    size."""
    learning_rate: Annotated[float, Field(gt=0, le=10), Ui("Learning rate")] = 2e-4
    """Peak learning rate; 1e-4 to 5e-4 is usual for LoRA, 1e-5 to 5e-5 for full fine-tuning, 5e-7 to 5e-6 for full
    DPO."""
    lr_scheduler_type: Annotated[
        str, *one_of(registry.SCHEDULERS), Ui("Learning rate schedule", when=read_by("lr_scheduler_type"))
    ] = "cosine"
    """How the learning rate changes after warmup; cosine or linear is usual."""
    warmup_steps: Annotated[float, Field(ge=0), Ui("Warmup steps", when=read_by("warmup_steps"))] = 0.03
    """Steps in which the learning rate rises to its peak; a value below 1 is a fraction of all steps. 0.03, which is
    usual, stands for 3% of all steps."""
    optim: Annotated[str, *one_of(registry.OPTIMIZERS), Ui("Optimizer")] = "adamw_torch"
    """Optimizer; its state takes much of the memory in full fine-tuning, and 8-bit or low-rank state is smaller. AdamW
    is usual."""
    weight_decay: Annotated[float, Field(ge=0, le=10), Ui("Weight decay", when=read_by("weight_decay"))] = 0.0
    """Weight decay (decoupled in AdamW), not applied to biases, norms, attention sinks, and A_log and D of state-space
    layers; 0.01 to 0.1 is usual for full fine-tuning, 0 for LoRA."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1), Ui("Adam beta1", when=read_by("adam_beta1"))] = 0.9
    """Decay rate of the running mean of gradients (first moment); 0.9 is usual."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1), Ui("Adam beta2", when=read_by("adam_beta2"))] = 0.999
    """Decay rate of the running mean of squared gradients (second moment); 0.999 is usual, 0.95 for pretraining, 0.99
    for Lion."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1), Ui("Adam epsilon", when=read_by("adam_epsilon"))] = 1e-8
    """Added to the denominator of the update for numerical stability; 1e-8 is usual."""
    max_grad_norm: Annotated[float, Field(ge=0), Ui("Max gradient norm", when=read_by("max_grad_norm"))] = 1.0
    """Gradients are clipped to this global norm; 1.0 is usual, and 0 disables clipping."""
    stop_on_spike: Annotated[bool, Ui("Stop on a spike")] = False
    """Saves a checkpoint and stops when the loss or the gradient norm jumps far above its usual values and stays there;
    usually off, because many runs recover from a spike. Up to two more checkpoints are kept, so that a retry can start
    before the spike."""
    half_lr_retries: Annotated[int, Field(ge=0, le=10), Ui("Retries with half the learning rate")] = 0
    """How often a run that diverged or stopped on a spike is retried automatically. Each retry is a new run that
    continues from the last checkpoint before the problem with half the learning rate, or the method's usual one if half
    is still far too high. Without such a checkpoint there is no retry. Up to two more checkpoints are kept for this. 0
    turns it off; 1 or 2 is usual."""
    max_nonfinite_steps: Annotated[int, Field(ge=1, le=100_000), Ui("Max non-finite steps", unit="steps")] = 3
    """Ends the run as diverged after this many steps in a row with a loss that is NaN or infinite; 1 to 10 is usual."""
    momentum: Annotated[float, Field(ge=0, lt=1), Ui("Momentum", when=read_by("momentum"))] = 0.95
    """Decay rate of the momentum buffer; 0.95 is usual for Muon, 0.9 for SGD."""
    projection_rank: Annotated[int, Field(ge=1, le=65536), Ui("Projection rank", when=read_by("projection_rank"))] = 128
    """Rank to which GaLore and APOLLO project gradients; optimizer state grows with it. A quarter of the hidden size is
    usual."""
    update_proj_gap: Annotated[int, Field(ge=1), Ui("Projection update interval", when=read_by("update_proj_gap"))] = (
        200
    )
    """Optimizer steps between updates of the projection, which in GaLore need a slow SVD of every matrix. 200 is
    usual."""
    optim_targets: Annotated[
        str, *one_of(registry.PROJECTION_TARGETS), Ui("Projected modules", when=read_by("optim_targets"))
    ] = "all-linear"
    """Modules whose gradients are projected; all others keep full optimizer state. All linear layers is usual."""
    optim_target_modules: Annotated[
        Names,
        Ui(
            "Projected module names",
            when={**read_by("optim_targets"), "train.optim_targets": ("custom",)},
            widget="list",
        ),
    ] = ()
    """Projects the gradients of modules whose names contain one of these strings, such as attn, mlp."""
    galore_scale: Annotated[float, Field(gt=0, le=1000), Ui("GaLore scale", when=read_by("galore_scale"))] = 0.25
    """Multiplies the updates of projected matrices; 0.25 is usual."""
    galore_proj_type: Annotated[
        Literal["std", "reverse_std", "left", "right", "full"],
        Ui(
            "GaLore projection side",
            when=read_by("galore_proj_type"),
            choices={"std": "Shorter side", "reverse_std": "Longer side", "full": "Both sides"},
        ),
    ] = "std"
    """Side of each gradient matrix that is projected. The shorter side is usual; the longer side or both sides need
    less optimizer state."""
    apollo_scale: Annotated[float, Field(gt=0, le=1000), Ui("APOLLO scale", when=read_by("apollo_scale"))] = 1.0
    """Updates of projected matrices are multiplied by the square root of this value; 1 is usual, 128 for APOLLO-Mini
    (rank 1)."""
    apollo_proj: Annotated[
        Literal["random", "svd"], Ui("APOLLO projection", when=read_by("apollo_proj"), choices={"svd": "SVD"})
    ] = "random"
    """How the projection of the gradients is chosen: at random or by SVD. Random is usual: it works as well and needs
    no SVD."""
    apollo_scale_type: Annotated[
        Literal["channel", "tensor"], Ui("APOLLO scaling", when=read_by("apollo_scale_type"))
    ] = "channel"
    """Granularity of the scaling factors: one per channel (usual), or one per tensor as in APOLLO-Mini."""
    badam_switch_mode: Annotated[
        Literal["random", "ascending", "descending"], Ui("BAdam block order", when=read_by("badam_switch_mode"))
    ] = "random"
    """Order in which the transformer layers are trained; random is usual."""
    badam_switch_block_every: Annotated[
        int, Field(ge=1), Ui("BAdam steps per block", when=read_by("badam_switch_block_every"))
    ] = 50
    """Optimizer steps on one transformer layer before switching to the next; 50 to 100 is usual."""
    neftune_noise_alpha: Annotated[float, Field(ge=0, le=100), Ui("NEFTune noise alpha", when=NEXT_TOKEN)] = 0.0
    """Adds noise to the embeddings during training, which can help on small instruction datasets; 5 is usual, 0
    disables it."""
    train_sampling_strategy: Annotated[
        Literal["random", "group_by_length"],
        Ui("Sampling strategy", when=SHUFFLING, choices={"group_by_length": "Group by length"}),
    ] = "random"
    """Order of the training examples; grouping by length reduces padding but makes the order less random."""
    activation_checkpointing: Annotated[bool, Ui("Activation checkpointing")] = False
    """Recomputes activations in the backward pass instead of storing them: much less memory, about a third slower."""
    use_liger_kernel: Annotated[bool, Ui("Liger kernels")] = False
    """Fused Triton kernels for norms, rotary embeddings and MLPs: less memory and faster on GPUs."""
    use_unsloth: Annotated[bool, Ui("Unsloth", when={**NEXT_TOKEN, "method.kind": ("lora", "full")})] = False
    """Loads and patches the model with Unsloth, which is faster and uses less memory; it works with a single process,
    DDP or ZeRO-0 to 2."""
    torch_compile: Annotated[bool, Ui("torch.compile", when={"parallel.strategy": ("single", "ddp")})] = False
    """Compiles the model: faster steps on GPUs after a first step that takes minutes."""
    dataloader_num_workers: Annotated[int, Field(ge=0, le=256), Ui("DataLoader workers")] = 0
    """Worker processes per device that collate batches. 0 collates in the training process; 2 to 8 workers help on fast
    GPUs."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), Ui("Seed")] = 42
    """Random seed of data order, validation split, adapter initialization and dropout."""


class Precision(Section):
    """Compute dtype and FP8."""

    compute: Annotated[str, *one_of(registry.PRECISIONS), Ui("Precision")] = "auto"
    """Compute dtype; trained weights stay in fp32 except with pure bf16, frozen weights use the compute dtype. bf16 is
    usual."""
    fp8_backend: Annotated[str, *one_of(registry.FP8_BACKENDS), Ui("FP8 backend", when=FP8)] = "torchao"
    """Library that runs the linear layers in FP8, configured by accelerate; torchao is usual."""
