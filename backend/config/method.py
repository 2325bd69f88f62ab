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
    """Which weights are trained."""

    kind: Annotated[str, *one_of(registry.METHODS), Ui("Method")] = "lora"
    """What is trained decides most of the memory."""
    quantization: Annotated[str, *one_of(registry.QUANTIZATIONS), Ui("Quantized base", when=LORA)] = "none"
    """Pack the frozen weights while loading (QLoRA): far less memory, somewhat slower. Adapters stay in fp32."""
    bnb_4bit_use_double_quant: Annotated[
        bool, Ui("Double quantization", when={**LORA, "method.quantization": registry.FOUR_BIT})
    ] = True
    """Pack the scales too: about 0.05 bytes a weight less."""
    freeze_trainable_layers: Annotated[int, Field(ge=-1024, le=1024), Ui("Trained layers", when=FREEZE)] = 2
    """The last so many layers are trained; a negative number takes the first."""
    freeze_extra_modules: Annotated[Names, Ui("Also train", when=FREEZE, widget="list")] = ()
    """Names of further modules to train, such as embed_tokens, norm, lm_head."""


class Lora(Section):
    """Adapters of the LoRA family, with the names of peft's LoraConfig."""

    r: Annotated[int, Field(ge=1, le=4096), Ui("Rank", when=LORA)] = 16
    """Width of the adapter. 8 to 64 is usual; more learns more and costs more."""
    alpha: Annotated[float, Field(gt=0, le=65536), Ui("Alpha", when=LORA)] = 32.0
    """The adapter is scaled by alpha / rank, with rsLoRA by alpha / root of rank. Twice the rank is usual."""
    dropout: Annotated[float, Field(ge=0, lt=1), Ui("Dropout", when={**LORA, **NEXT_TOKEN})] = 0.0
    """Against learning by heart on small data; 0.05 is usual, 0 is quicker."""
    targets: Annotated[str, *one_of(registry.LORA_TARGETS), Ui("Adapted layers", when=LORA)] = "all-linear"
    """Where adapters are put."""
    target_modules: Annotated[Names, Ui("Module names", when={**LORA, "lora.targets": ("custom",)}, widget="list")] = ()
    """The ends of module names, such as q_proj, v_proj."""
    modules_to_save: Annotated[Names, Ui("Also train in full", when=LORA, widget="list")] = ()
    """Modules trained and saved whole beside the adapters, such as embed_tokens, lm_head."""
    use_dora: Annotated[bool, Ui("DoRA", when=LORA)] = False
    """A length of its own for every row of a weight: learns a little better, about a third slower."""
    use_rslora: Annotated[bool, Ui("rsLoRA", when=LORA)] = False
    """Scale by alpha / root of rank: large ranks then learn as they should."""
    init: Annotated[str, *one_of(registry.LORA_INITS), Ui("Start of the adapter", when=LORA)] = "default"
    """What A and B hold before the first step."""
    loraplus_lr_ratio: Annotated[float, Field(ge=1, le=1024), Ui("LoRA+ ratio", when=LORA)] = 1.0
    """B learns so many times faster than A; 16 is usual, 1 is off."""

    @property
    def is_plain(self) -> bool:
        """Whether the forward pass adds B(A(x)) alone: no dropout, no DoRA, and no initialization from base weights."""
        return not (self.dropout or self.use_dora or self.init not in ("default", "gaussian"))
