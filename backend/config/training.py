"""Method, training and precision: which weights learn, how long, in what numbers.

Floor 1. Imports: catalog, kinds.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from backend import registry
from backend.config.fields import FP8, FREEZE, LORA, PLAIN, SHUFFLED, Names, Section, Ui, one_of, read_by


class Method(Section):
    """Which weights are trained."""

    kind: Annotated[str, *one_of(registry.METHODS), Ui("Method")] = "lora"
    """What is trained decides most of the memory."""
    quantization: Annotated[str, *one_of(registry.QUANTIZATIONS), Ui("Quantized base", when=LORA)] = "none"
    """Pack the frozen weights while loading (QLoRA): far less memory, somewhat slower. Adapters stay in fp32."""
    double_quantization: Annotated[
        bool, Ui("Double quantization", when={**LORA, "method.quantization": registry.FOUR_BIT})
    ] = True
    """Pack the scales too: about 0.05 bytes a weight less."""
    lora_rank: Annotated[int, Field(ge=1, le=4096), Ui("Rank", when=LORA)] = 16
    """Width of the adapter. 8 to 64 is usual; more learns more and costs more."""
    lora_alpha: Annotated[float, Field(gt=0, le=65536), Ui("Alpha", when=LORA)] = 32.0
    """The adapter is scaled by alpha / rank, with rsLoRA by alpha / root of rank. Twice the rank is usual."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1), Ui("Dropout", when={**LORA, **PLAIN})] = 0.0
    """Against learning by heart on small data; 0.05 is usual, 0 is quicker."""
    lora_targets: Annotated[str, *one_of(registry.LORA_TARGETS), Ui("Adapted layers", when=LORA)] = "all-linear"
    """Where adapters are put."""
    lora_target_modules: Annotated[
        Names, Ui("Module names", when={**LORA, "method.lora_targets": ("custom",)}, widget="list")
    ] = ()
    """The ends of module names, such as q_proj, v_proj."""
    lora_modules_to_save: Annotated[Names, Ui("Also train in full", when=LORA, widget="list")] = ()
    """Modules trained and saved whole beside the adapters, such as embed_tokens, lm_head."""
    lora_dora: Annotated[bool, Ui("DoRA", when=LORA)] = False
    """A length of its own for every row of a weight: learns a little better, about a third slower."""
    lora_rslora: Annotated[bool, Ui("rsLoRA", when=LORA)] = False
    """Scale by alpha / root of rank: large ranks then learn as they should."""
    lora_init: Annotated[str, *one_of(registry.LORA_INITS), Ui("Start of the adapter", when=LORA)] = "zero"
    """What A and B hold before the first step."""
    lora_plus: Annotated[float, Field(ge=1, le=1024), Ui("LoRA+ ratio", when=LORA)] = 1.0
    """B learns so many times faster than A; 16 is usual, 1 is off."""
    freeze_layers: Annotated[int, Field(ge=-1024, le=1024), Ui("Trained layers", when=FREEZE)] = 2
    """The last so many layers are trained; a negative number takes the first."""
    freeze_also: Annotated[Names, Ui("Also train", when=FREEZE, widget="list")] = ()
    """Names of further modules to train, such as embed_tokens, norm, lm_head."""

    @property
    def plain_lora(self) -> bool:
        """Whether adapters are A and B alone: nothing is dropped, measured, or taken out of the base weights."""
        return not (self.lora_dropout or self.lora_dora or self.lora_init not in ("zero", "gaussian"))

    def on_experts(self, stacked: Collection[str]) -> bool:
        """Whether adapters would lie on a mixture's experts, which are reached by the names `stacked`."""
        named = self.lora_targets == "custom" and any(name in stacked for name in self.lora_target_modules)
        return self.kind == "lora" and bool(stacked) and (self.lora_targets == "all-linear" or named)


class Train(Section):
    """How long, how fast, with what."""

    stage: Annotated[str, *one_of(registry.STAGES), Ui("Stage")] = "sft"
    """What is learned from the rows."""
    length: Annotated[Literal["epochs", "steps"], Ui("Length in", choices={"steps": "Steps"})] = "epochs"
    """Count passes over the data, or optimizer steps."""
    epochs: Annotated[float, Field(gt=0, le=10_000), Ui("Epochs", when={"train.length": ("epochs",)})] = 3.0
    """Passes over the data."""
    max_steps: Annotated[int, Field(ge=1), Ui("Steps", when={"train.length": ("steps",)})] = 100
    """Optimizer steps."""
    batch_size: Annotated[int, Field(ge=1, le=65536), Ui("Batch size per device")] = 4
    """Rows a device works on at once. Memory grows with it."""
    accumulation: Annotated[int, Field(ge=1, le=65536), Ui("Accumulation")] = 1
    """Batches added up before a step. The batch that counts: size x accumulation x processes."""
    learning_rate: Annotated[float, Field(gt=0, le=10), Ui("Learning rate")] = 2e-4
    """The peak. 1e-4 to 1e-3 for LoRA, 1e-5 to 5e-5 for full training."""
    scheduler: Annotated[str, *one_of(registry.SCHEDULERS), Ui("Schedule", when=read_by("scheduler"))] = "cosine"
    """How the learning rate moves after warm-up."""
    warmup: Annotated[float, Field(ge=0), Ui("Warm-up", when=read_by("warmup"))] = 0.03
    """Steps of rising rate; below 1 it is a share of all steps."""
    optimizer: Annotated[str, *one_of(registry.OPTIMIZERS), Ui("Optimizer")] = "adamw"
    """Turns gradients into steps; its state takes memory."""
    weight_decay: Annotated[float, Field(ge=0, le=10), Ui("Weight decay", when=read_by("weight_decay"))] = 0.0
    """Pulls weights towards zero; 0.01 to 0.1 is usual for full training."""
    beta1: Annotated[float, Field(ge=0, lt=1), Ui("Beta 1", when=read_by("beta1"))] = 0.9
    """Memory of the gradient's mean."""
    beta2: Annotated[float, Field(ge=0, lt=1), Ui("Beta 2", when=read_by("beta2"))] = 0.999
    """Memory of its square; 0.95 is usual for pre-training, 0.99 for Lion."""
    epsilon: Annotated[float, Field(gt=0, le=1), Ui("Epsilon", when=read_by("epsilon"))] = 1e-8
    """Keeps the division finite."""
    max_grad_norm: Annotated[float, Field(ge=0), Ui("Gradient clipping", when=read_by("max_grad_norm"))] = 1.0
    """Longest gradient that is let through; 0 switches clipping off."""
    momentum: Annotated[float, Field(ge=0, lt=1), Ui("Momentum", when=read_by("momentum"))] = 0.95
    """Memory of the step's direction; 0.95 is usual for Muon, 0.9 for SGD."""
    projection_rank: Annotated[int, Field(ge=1, le=65536), Ui("Projection rank", when=read_by("projection_rank"))] = 128
    """Width that gradients are projected to: state grows with it. A quarter of the model's width is usual."""
    projection_gap: Annotated[int, Field(ge=1), Ui("Steps a projection", when=read_by("projection_gap"))] = 200
    """After so many steps a new projection is made; GaLore's decomposes every matrix, which takes its time."""
    projection_targets: Annotated[
        str, *one_of(registry.PROJECTED), Ui("Projected layers", when=read_by("projection_targets"))
    ] = "all-linear"
    """Other weights keep a full state."""
    projection_modules: Annotated[
        Names,
        Ui(
            "Projected modules",
            when={**read_by("projection_targets"), "train.projection_targets": ("custom",)},
            widget="list",
        ),
    ] = ()
    """Parts of module names, such as attn, mlp."""
    galore_scale: Annotated[float, Field(gt=0, le=1000), Ui("Projection scale", when=read_by("galore_scale"))] = 0.25
    """Steps of projected layers are multiplied by it."""
    galore_projection: Annotated[
        Literal["std", "reverse_std", "left", "right", "full"],
        Ui(
            "Projection from",
            when=read_by("galore_projection"),
            choices={"std": "The shorter side", "reverse_std": "The longer side", "full": "Both sides"},
        ),
    ] = "std"
    """Which side of a matrix is projected."""
    apollo_scale: Annotated[float, Field(gt=0, le=1000), Ui("Projection scale", when=read_by("apollo_scale"))] = 1.0
    """Steps of projected layers are multiplied by its root; APOLLO-Mini, with rank 1, takes 128."""
    apollo_projection: Annotated[
        Literal["random", "svd"], Ui("Projection by", when=read_by("apollo_projection"), choices={"svd": "SVD"})
    ] = "random"
    """Random needs no decomposition and is as good."""
    apollo_scaling: Annotated[Literal["channel", "tensor"], Ui("Scaling by", when=read_by("apollo_scaling"))] = (
        "channel"
    )
    """One factor a row, or one a matrix, as APOLLO-Mini does."""
    block_order: Annotated[
        Literal["random", "ascending", "descending"], Ui("Layers in turn", when=read_by("block_order"))
    ] = "random"
    """Which layer comes next."""
    block_steps: Annotated[int, Field(ge=1), Ui("Steps a layer", when=read_by("block_steps"))] = 50
    """After so many steps the next layer's turn comes; 50 to 100 is usual."""
    neftune: Annotated[float, Field(ge=0, le=100), Ui("NEFTune noise", when=PLAIN)] = 0.0
    """Noise on the embeddings, often better answers on small data; 5 is usual, 0 is off."""
    group_by_length: Annotated[bool, Ui("Group by length", when=SHUFFLED)] = False
    """Rows of like length together: less padding, a less random order."""
    activation_checkpointing: Annotated[bool, Ui("Activation checkpointing")] = False
    """Compute activations twice instead of keeping them: far less memory, about a third slower."""
    liger: Annotated[bool, Ui("Liger kernels")] = False
    """Norms, rotary embeddings and MLPs in kernels of their own: less memory, quicker; GPUs."""
    unsloth: Annotated[bool, Ui("Unsloth", when={**PLAIN, "method.kind": ("lora", "full")})] = False
    """Loaded and computed by Unsloth: less memory and quicker on one GPU."""
    compile: Annotated[bool, Ui("torch.compile", when={"parallel.strategy": ("single", "ddp")})] = False
    """Compile the model: quicker steps on GPUs, after a first one that takes minutes."""
    dataloader_workers: Annotated[int, Field(ge=0, le=256), Ui("Loader processes")] = 0
    """Processes a device that put batches together; 0 does it in the training process."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), Ui("Seed")] = 42
    """Order of the rows, split, adapters and dropout."""


class Precision(Section):
    """In what numbers to compute."""

    compute: Annotated[str, *one_of(registry.PRECISIONS), Ui("Precision")] = "auto"
    """Trained weights stay in fp32, but for pure bf16; frozen ones are held in this precision."""
    fp8_backend: Annotated[str, *one_of(registry.FP8_BACKENDS), Ui("fp8 by", when=FP8)] = "torchao"
    """The package that multiplies in 8 bits, by accelerate's recipes."""
