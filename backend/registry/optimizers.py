"""Optimizers, by the names of transformers' OptimizerNames where it has one.

Their options, state and requirements follow transformers 5.23 trainer_optimizer.py and the packages, and are compared
with real steps in `tests/process/test_optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backend.registry.quantization import BNB_MIN_VERSION
from backend.registry.types import Optimizer

COMMON = frozenset({"weight_decay", "max_grad_norm", "lr_scheduler_type", "warmup_steps"})
LION = COMMON | {"adam_beta1", "adam_beta2"}
ADAM = LION | {"adam_epsilon"}
GALORE = frozenset({"projection_rank", "update_proj_gap", "optim_targets", "galore_scale", "galore_proj_type"})
APOLLO = frozenset({"projection_rank", "update_proj_gap", "optim_targets"}) | {
    "apollo_scale", "apollo_proj", "apollo_scale_type",
}  # fmt: skip
CLIP = frozenset({"max_grad_norm"})
BNB = "bitsandbytes"
SCHEDULEFREE_MIN_VERSION = "1.2.6"  # transformers 5.23 utils/import_utils.py; trainer_optimizer.py: RAdam from 1.4.0


def _bitsandbytes(label: str, help: str, **row: Any) -> Optimizer:
    return Optimizer(label, help, package=BNB, package_min_version=BNB_MIN_VERSION, **row)


def _paged(label: str, **row: Any) -> Optimizer:
    suffix, state = (", 8-bit", "8-bit state") if row["bits"] == 8 else ("", "State")
    help = f"{state} in CUDA unified memory, paged to CPU memory when the GPU is full."
    return _bitsandbytes(f"{label}, paged{suffix}", help, paged=True, **row)


def _and_layerwise(name: str, help: str, row: Optimizer) -> dict[str, Optimizer]:
    """An optimizer, and its variant that steps in the backward pass; `help` describes the variant."""
    row = replace(row, trainer_optim=name)
    label, reads = f"{row.label}, layer-wise", row.reads - CLIP
    variant = replace(row, label=label, help=help, reads=reads, steps_in_backward=True)
    return {name: row, f"{name}_layerwise": variant}


OWN = ("adam_mini", "muon", "badam")  # backend.train builds them itself
ROWS: Mapping[str, Optimizer] = {
    "adamw_torch": Optimizer("AdamW", "PyTorch's AdamW; the usual choice.", states=2, reads=ADAM, temporaries=1),
    "adamw_torch_fused": Optimizer("AdamW, fused", "AdamW in one fused kernel; faster on GPUs.", states=2, reads=ADAM),
    "adamw_torch_npu_fused": Optimizer("AdamW, fused for Ascend", "AdamW in torch_npu's fused kernel.",
        package="torch_npu", states=2, reads=ADAM, devices=("npu",)),
    "adamw_bnb_8bit": _bitsandbytes("AdamW, 8-bit (bitsandbytes)",
        "8-bit optimizer state, a quarter of AdamW's in fp32; embeddings keep 32-bit state.", states=2, bits=8,
        reads=ADAM),
    "adamw_torch_8bit": Optimizer("AdamW, 8-bit (torchao)",
        "8-bit optimizer state, a quarter of AdamW's in fp32; compiled at the first step, which takes up to a minute.",
        package="torchao", package_min_version="0.15.0", states=2, bits=8, reads=ADAM, rounding="stochastic rounding",
        compiled=True),
    "adamw_torch_4bit": Optimizer("AdamW, 4-bit (torchao)",
        "4-bit optimizer state, an eighth of AdamW's in fp32; compiled at the first step, which takes about a minute.",
        package="torchao", package_min_version="0.15.0", states=2, bits=4, reads=ADAM, rounding="stochastic rounding",
        compiled=True),
    "paged_adamw_32bit": _paged("AdamW", states=2, bits=32, reads=ADAM),
    "paged_adamw_8bit": _paged("AdamW", states=2, bits=8, reads=ADAM),
    "adam_mini": Optimizer("Adam-mini",
        "AdamW with one second moment per attention head or output row: half the state.", package="adam-mini",
        states=1, state_layout="per_head", reads=ADAM),
    "stable_adamw": Optimizer("StableAdamW",
        "AdamW with Adafactor's update clipping; Kahan summation for bf16 weights.", package="torch-optimi", states=2,
        reads=ADAM, rounding="Kahan summation", kahan=True,
        per_tensor="limits the update of each parameter by its RMS"),
    "ademamix": _bitsandbytes("AdEMAMix",
        "AdamW with a second, slower moving average of gradients: three state elements per parameter.", states=3,
        bits=32, reads=ADAM),
    "ademamix_8bit": _bitsandbytes("AdEMAMix, 8-bit", "AdEMAMix with 8-bit optimizer state.", states=3, bits=8,
        reads=ADAM),
    "paged_ademamix_32bit": _paged("AdEMAMix", states=3, bits=32, reads=ADAM, devices=("cuda",)),
    "paged_ademamix_8bit": _paged("AdEMAMix", states=3, bits=8, reads=ADAM, devices=("cuda",)),
    "adafactor": Optimizer("Adafactor",
        "Row and column statistics instead of a full second moment: almost no state, slower convergence.", states=1,
        bits=32, factored=True, reads=COMMON, per_tensor="limits the update of each parameter by its RMS"),
    "lion_32bit": _bitsandbytes("Lion",
        "Updates by the sign of the momentum: half of AdamW's state; needs a 3 to 10 times smaller learning rate.",
        states=1, bits=32, reads=LION),
    "lion_8bit": _bitsandbytes("Lion, 8-bit", "Lion with 8-bit optimizer state, an eighth of AdamW's.", states=1,
        bits=8, reads=LION),
    "paged_lion_32bit": _paged("Lion", states=1, bits=32, reads=LION),
    "paged_lion_8bit": _paged("Lion", states=1, bits=8, reads=LION),
    "muon": Optimizer("Muon",
        "Orthogonalized momentum for hidden weight matrices, AdamW for the rest, such as experts that are stacked in "
        "one tensor; AdamW's learning rates work.",
        states=2, state_layout="matrix_momentum", reads=ADAM | {"momentum"}),
    **_and_layerwise("galore_adamw",
        "GaLore that steps in the backward pass and frees each gradient immediately; no gradient clipping.",
        Optimizer("GaLore", "AdamW on gradients projected to a low rank: full fine-tuning with little optimizer state.",
                  package="galore-torch", states=2, state_layout="low_rank", reads=ADAM | GALORE)),
    **_and_layerwise("galore_adamw_8bit", "Layer-wise GaLore with 8-bit optimizer state; no gradient clipping.",
        Optimizer("GaLore, 8-bit", "GaLore with 8-bit optimizer state.", package="galore-torch", states=2, bits=8,
                  state_layout="low_rank", reads=ADAM | GALORE, devices=("cuda",))),
    **_and_layerwise("galore_adafactor",
        "GaLore with Adafactor that steps in the backward pass and frees each gradient immediately; no gradient "
        "clipping.",
        Optimizer("GaLore, Adafactor", "Adafactor on projected gradients: less state than GaLore with AdamW.",
                  package="galore-torch", states=1, state_layout="low_rank", factored=True, reads=COMMON | GALORE)),
    **_and_layerwise("apollo_adamw",
        "APOLLO that steps in the backward pass and frees each gradient immediately; no gradient clipping.",
        Optimizer("APOLLO",
                  "Scales gradients as AdamW would, by factors estimated in a random low-rank space: full fine-tuning "
                  "with "
                  "SGD-like memory.",
                  package="apollo-torch", states=2, state_layout="low_rank", reads=ADAM | APOLLO)),
    "badam": Optimizer("BAdam",
        "AdamW on one transformer layer at a time, with the state of that layer only; embeddings are not trained.",
        package="badam", states=2, bits=32, state_layout="one_block",
        reads=ADAM | {"badam_switch_mode", "badam_switch_block_every"}, rounding="fp32 copies of the trained layer"),
    "lomo": Optimizer("LOMO",
        "SGD that steps in the backward pass and frees each gradient immediately: no state, no gradient clipping.",
        package="lomo-optim", reads=COMMON - CLIP - {"weight_decay"}, steps_in_backward=True),
    "adalomo": Optimizer("AdaLOMO", "LOMO with Adafactor's adaptive scaling.", package="lomo-optim", states=1, bits=32,
        factored=True, reads=COMMON - CLIP - {"weight_decay"}, steps_in_backward=True, devices=("cuda",),
        loses_state_on_save=True),
    "schedule_free_adamw": Optimizer("Schedule-free AdamW",
        "Averages the weights of all steps instead of decaying the learning rate: a run can stop at any step.",
        package="schedulefree", package_min_version=SCHEDULEFREE_MIN_VERSION, states=2,
        reads=ADAM - {"lr_scheduler_type"}, temporaries=1),
    "schedule_free_radam": Optimizer("Schedule-free RAdam", "Schedule-free RAdam, which needs no warmup either.",
        package="schedulefree", package_min_version="1.4.0", states=2,
        reads=ADAM - {"lr_scheduler_type", "warmup_steps"}, temporaries=1, waits_for_variance=True),
    "schedule_free_sgd": Optimizer("Schedule-free SGD",
        "Schedule-free SGD: half the state; needs a much larger learning rate.", package="schedulefree",
        package_min_version=SCHEDULEFREE_MIN_VERSION, states=1, reads=COMMON - {"lr_scheduler_type"}),
    "sgd": Optimizer("SGD", "Plain SGD without state; needs a larger learning rate than AdamW.", reads=COMMON,
        copies_decayed=True),
    "sgd_momentum": Optimizer("SGD with momentum",
        "SGD with one state element per parameter; needs a larger learning rate than AdamW.", trainer_optim="sgd",
        states=1, reads=COMMON | {"momentum"}, copies_decayed=True),
    "rmsprop": Optimizer("RMSprop", "Only the second moment: half of AdamW's state.", states=1, reads=COMMON,
        temporaries=1, copies_decayed=True),
    "rmsprop_bnb_8bit": _bitsandbytes("RMSprop, 8-bit", "RMSprop with 8-bit optimizer state.", states=1, bits=8,
        reads=COMMON),
    "adagrad": Optimizer("Adagrad",
        "Divides by the root of the sum of all squared gradients, so the effective learning rate only decreases.",
        states=1, reads=COMMON, allocates_state_at_init=True, temporaries=2),
    "grokadamw": Optimizer("GrokAdamW",
        "AdamW that amplifies slowly varying gradients; its state is in CPU memory and copied at every step.",
        package="grokadamw", states=3, reads=COMMON, state_on_cpu=True, loses_state_on_save=True,
        per_tensor="clips the gradient of each parameter, and uses a smaller beta1 for each next one"),
}  # fmt: skip
OPTIMIZERS: Mapping[str, Optimizer] = {
    name: row if row.trainer_optim or name in OWN else replace(row, trainer_optim=name) for name, row in ROWS.items()
}
