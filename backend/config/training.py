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
    """How long, how fast, with what."""

    stage: Annotated[str, *one_of(registry.STAGES), Ui("Stage")] = "sft"
    """What is learned from the rows."""
    duration: Annotated[Literal["epochs", "steps"], Ui("Length in", choices={"steps": "Steps"})] = "epochs"
    """Count passes over the data, or optimizer steps."""
    num_train_epochs: Annotated[float, Field(gt=0, le=10_000), Ui("Epochs", when={"train.duration": ("epochs",)})] = 3.0
    """Passes over the data."""
    max_steps: Annotated[int, Field(ge=1), Ui("Steps", when={"train.duration": ("steps",)})] = 100
    """Optimizer steps."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=65536), Ui("Batch size per device")] = 4
    """Rows a device works on at once. Memory grows with it."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=65536), Ui("Accumulation")] = 1
    """Batches added up before a step. The batch that counts: size x accumulation x processes."""
    learning_rate: Annotated[float, Field(gt=0, le=10), Ui("Learning rate")] = 2e-4
    """The peak. 1e-4 to 1e-3 for LoRA, 1e-5 to 5e-5 for full training."""
    lr_scheduler_type: Annotated[
        str, *one_of(registry.SCHEDULERS), Ui("Schedule", when=read_by("lr_scheduler_type"))
    ] = "cosine"
    """How the learning rate moves after warm-up."""
    warmup_steps: Annotated[float, Field(ge=0), Ui("Warm-up", when=read_by("warmup_steps"))] = 0.03
    """Steps of rising rate; below 1 it is a share of all steps."""
    optim: Annotated[str, *one_of(registry.OPTIMIZERS), Ui("Optimizer")] = "adamw_torch"
    """Turns gradients into steps; its state takes memory."""
    weight_decay: Annotated[float, Field(ge=0, le=10), Ui("Weight decay", when=read_by("weight_decay"))] = 0.0
    """Pulls weights towards zero; 0.01 to 0.1 is usual for full training."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1), Ui("Beta 1", when=read_by("adam_beta1"))] = 0.9
    """Memory of the gradient's mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1), Ui("Beta 2", when=read_by("adam_beta2"))] = 0.999
    """Memory of its square; 0.95 is usual for pre-training, 0.99 for Lion."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1), Ui("Epsilon", when=read_by("adam_epsilon"))] = 1e-8
    """Keeps the division finite."""
    max_grad_norm: Annotated[float, Field(ge=0), Ui("Gradient clipping", when=read_by("max_grad_norm"))] = 1.0
    """Longest gradient that is let through; 0 switches clipping off."""
    momentum: Annotated[float, Field(ge=0, lt=1), Ui("Momentum", when=read_by("momentum"))] = 0.95
    """Memory of the step's direction; 0.95 is usual for Muon, 0.9 for SGD."""
    projection_rank: Annotated[int, Field(ge=1, le=65536), Ui("Projection rank", when=read_by("projection_rank"))] = 128
    """Width that gradients are projected to: state grows with it. A quarter of the model's width is usual."""
    update_proj_gap: Annotated[int, Field(ge=1), Ui("Steps a projection", when=read_by("update_proj_gap"))] = 200
    """After so many steps a new projection is made; GaLore's decomposes every matrix, which takes its time."""
    optim_targets: Annotated[
        str, *one_of(registry.PROJECTION_TARGETS), Ui("Projected layers", when=read_by("optim_targets"))
    ] = "all-linear"
    """Other weights keep a full state."""
    optim_target_modules: Annotated[
        Names,
        Ui(
            "Projected modules",
            when={**read_by("optim_targets"), "train.optim_targets": ("custom",)},
            widget="list",
        ),
    ] = ()
    """Parts of module names, such as attn, mlp."""
    galore_scale: Annotated[float, Field(gt=0, le=1000), Ui("Projection scale", when=read_by("galore_scale"))] = 0.25
    """Steps of projected layers are multiplied by it."""
    galore_proj_type: Annotated[
        Literal["std", "reverse_std", "left", "right", "full"],
        Ui(
            "Projection from",
            when=read_by("galore_proj_type"),
            choices={"std": "The shorter side", "reverse_std": "The longer side", "full": "Both sides"},
        ),
    ] = "std"
    """Which side of a matrix is projected."""
    apollo_scale: Annotated[float, Field(gt=0, le=1000), Ui("Projection scale", when=read_by("apollo_scale"))] = 1.0
    """Steps of projected layers are multiplied by its root; APOLLO-Mini, with rank 1, takes 128."""
    apollo_proj: Annotated[
        Literal["random", "svd"], Ui("Projection by", when=read_by("apollo_proj"), choices={"svd": "SVD"})
    ] = "random"
    """Random needs no decomposition and is as good."""
    apollo_scale_type: Annotated[Literal["channel", "tensor"], Ui("Scaling by", when=read_by("apollo_scale_type"))] = (
        "channel"
    )
    """One factor a row, or one a matrix, as APOLLO-Mini does."""
    badam_switch_mode: Annotated[
        Literal["random", "ascending", "descending"], Ui("Layers in turn", when=read_by("badam_switch_mode"))
    ] = "random"
    """Which layer comes next."""
    badam_switch_block_every: Annotated[
        int, Field(ge=1), Ui("Steps a layer", when=read_by("badam_switch_block_every"))
    ] = 50
    """After so many steps the next layer's turn comes; 50 to 100 is usual."""
    neftune_noise_alpha: Annotated[float, Field(ge=0, le=100), Ui("NEFTune noise", when=NEXT_TOKEN)] = 0.0
    """Noise on the embeddings, often better answers on small data; 5 is usual, 0 is off."""
    train_sampling_strategy: Annotated[
        Literal["random", "group_by_length"],
        Ui("Sampling", when=SHUFFLING, choices={"group_by_length": "Group by length"}),
    ] = "random"
    """Rows of like length together: less padding, a less random order."""
    activation_checkpointing: Annotated[bool, Ui("Activation checkpointing")] = False
    """Compute activations twice instead of keeping them: far less memory, about a third slower."""
    use_liger_kernel: Annotated[bool, Ui("Liger kernels")] = False
    """Norms, rotary embeddings and MLPs in kernels of their own: less memory, quicker; GPUs."""
    use_unsloth: Annotated[bool, Ui("Unsloth", when={**NEXT_TOKEN, "method.kind": ("lora", "full")})] = False
    """Loaded and computed by Unsloth: less memory and quicker on one GPU."""
    torch_compile: Annotated[bool, Ui("torch.compile", when={"parallel.strategy": ("single", "ddp")})] = False
    """Compile the model: quicker steps on GPUs, after a first one that takes minutes."""
    dataloader_num_workers: Annotated[int, Field(ge=0, le=256), Ui("Loader processes")] = 0
    """Processes a device that put batches together; 0 does it in the training process."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), Ui("Seed")] = 42
    """Order of the rows, split, adapters and dropout."""


class Precision(Section):
    """In what numbers to compute."""

    compute: Annotated[str, *one_of(registry.PRECISIONS), Ui("Precision")] = "auto"
    """Trained weights stay in fp32, but for pure bf16; frozen ones are held in this precision."""
    fp8_backend: Annotated[str, *one_of(registry.FP8_BACKENDS), Ui("fp8 by", when=FP8)] = "torchao"
    """The package that multiplies in 8 bits, by accelerate's recipes."""
