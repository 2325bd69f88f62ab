"""Method: which parameters are trained, and the adapters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from backend import registry
from backend.config.fields import (
    FREEZE,
    LORA,
    NEXT_TOKEN,
    Names,
    Section,
    Ui,
    one_of,
)


class Method(Section):
    """Which parameters are trained, and how the frozen ones are stored."""

    kind: Annotated[str, *one_of(registry.METHODS), Ui("Fine-tuning method")] = "lora"
    """Which parameters are trained: LoRA adapters, some of the layers, or all. Most of the memory that training needs
    depends on this."""
    quantization: Annotated[str, *one_of(registry.QUANTIZATIONS), Ui("Quantization", when=LORA)] = "none"
    """Loads the frozen base weights in 4 or 8 bits (QLoRA): much less memory, somewhat slower. Adapters are not
    quantized."""
    bnb_4bit_use_double_quant: Annotated[
        bool, Ui("Double quantization", when={**LORA, "method.quantization": registry.FOUR_BIT})
    ] = True
    """Also quantizes the scales of the 4-bit weights, which saves about 0.4 bits per weight; usually on."""
    freeze_trainable_layers: Annotated[int, Field(ge=-1024, le=1024), Ui("Trainable layers", when=FREEZE)] = 2
    """Trains the last N transformer layers, or the first N if negative; 2 to 8 is usual."""
    freeze_extra_modules: Annotated[Names, Ui("Extra trainable modules", when=FREEZE, widget="list")] = ()
    """Names of modules to train in addition to the layers, such as embed_tokens, norm, lm_head."""


class Lora(Section):
    """LoRA adapters. Most options are arguments of peft's LoraConfig."""

    r: Annotated[int, Field(ge=1, le=4096), Ui("LoRA rank (r)", when=LORA)] = 16
    """Rank of the adapter matrices; a higher rank learns more but needs more memory. 8 to 64 is usual."""
    alpha: Annotated[float, Field(gt=0, le=65536), Ui("LoRA alpha", when=LORA)] = 32.0
    """Adapter outputs are scaled by alpha / r, or alpha / sqrt(r) with rsLoRA; an alpha of twice the rank is usual."""
    dropout: Annotated[float, Field(ge=0, lt=1), Ui("LoRA dropout", when={**LORA, **NEXT_TOKEN})] = 0.0
    """Dropout on the adapter inputs; 0 is usual and faster, 0.05 to 0.1 reduces overfitting on small datasets."""
    targets: Annotated[str, *one_of(registry.LORA_TARGETS), Ui("Target modules", when=LORA)] = "all-linear"
    """Modules that get adapters; all linear layers is usual."""
    target_modules: Annotated[
        Names, Ui("Target module names", when={**LORA, "lora.targets": ("custom",)}, widget="list")
    ] = ()
    """Modules that get adapters, by name or name suffix, such as q_proj, v_proj."""
    modules_to_save: Annotated[Names, Ui("Modules to save", when=LORA, widget="list")] = ()
    """Modules trained in full and saved with the adapter, such as embed_tokens and lm_head for new tokens; usually
    empty."""
    use_dora: Annotated[bool, Ui("DoRA", when=LORA)] = False
    """Also trains a magnitude per output feature (weight-decomposed LoRA): slightly better at low ranks, but slower."""
    use_rslora: Annotated[bool, Ui("rsLoRA", when=LORA)] = False
    """Scales adapters by alpha / sqrt(r) instead of alpha / r, which stabilizes training at ranks above 64."""
    adapter_path: Annotated[str, Ui("Adapter folder", when=LORA, path="folder")] = ""
    """Folder of a trained LoRA adapter, such as runs/ID/model: training starts with its weights instead of a new
    adapter, and with a new optimizer. Base model and adapter options must match those of the adapter's training."""
    init: Annotated[
        str,
        *one_of(registry.LORA_INITS),
        Ui("Adapter initialization", when={**LORA, "lora.adapter_path": ("",)}),
    ] = "default"
    """Initial adapter matrices A and B (init_lora_weights); Default is usual, PiSSA and OLoRA compute them from the
    base weights."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1, le=1024), Ui("LoRA+ learning rate ratio", when=LORA)] = 1.0
    """Learning rate of the B matrices relative to A (LoRA+); 16 is usual, 1 disables it."""

    @property
    def is_plain(self) -> bool:
        """Whether the adapter only adds B(A(x)): no dropout, no DoRA, no initialization that differs from zero B."""
        return not (self.dropout or self.use_dora or self.init not in ("default", "gaussian"))
