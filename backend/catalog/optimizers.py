"""The optimizers.

Floor 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.catalog.kinds import Optimizer

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
