"""ModelShape: layers, widths and parameters of a model, counted from its config.json without building it.

`architectures` has closed formulas for common model types, `from_table` reads the module table that `worker` gets from
transformers for any other; `modules` has the types, `trainable` counts what a method trains. Tested against the counts
of transformers and peft.
"""

from __future__ import annotations

from backend.modelspec.architectures import (
    ARCHITECTURES,
    NO_SEQUENCE_CLASSIFICATION,
    NotCausalLM,
    UnknownArchitecture,
    check_causal,
    from_config,
)
from backend.modelspec.flops import TokenWeights, flops_per_token, stored_weights, token_weights
from backend.modelspec.modules import SCORE, ModelShape, ModuleSpec, matches, matches_any, names_of
from backend.modelspec.trainable import (
    TOKEN_ROWS,
    adaptable_names,
    all_parameters,
    count_equal_tensors,
    existing_names,
    is_attention,
    lora_modules,
    token_rows,
    trainable_parameters,
    trainable_tensors,
    trained_modules,
    unfrozen_modules,
)
