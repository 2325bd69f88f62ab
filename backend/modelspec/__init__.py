"""ModelShape: layers, widths and parameters of a model, counted in closed form from its config.json.

Floor 1. Imports: catalog, spec. A model is a table of leaf modules (`table`), read from its configuration
(`families`), and a method trains a part of it (`taught`). Checked against the libraries' own counts.
"""

from __future__ import annotations

from backend.modelspec.architectures import FAMILIES, Unknown, from_config
from backend.modelspec.modules import SCORE, Leaf, ModelShape, matches
from backend.modelspec.trainable import adapted, alike, tensors, trainable, unfrozen

__all__ = [
    "FAMILIES", "SCORE", "Leaf", "ModelShape", "Unknown", "adapted", "alike", "from_config", "matches", "tensors",
    "trainable", "unfrozen",
]  # fmt: skip
