"""GGUF files of a trained model: their formats, and the names of the files next to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FOLDER, CERTIFICATE, MODELFILE = "gguf", "certificate.json", "Modelfile"  # in the folder of an export, and in FOLDER
ENVIRONMENT = "gguf"  # `footplate env create gguf`


@dataclass(frozen=True)
class Format:
    """`bytes`: of an element; `max_kl`: the largest mean KL divergence from the trained model, in nats per token."""

    bytes: float
    max_kl: float


# Measured with SmolLM2 135M after *First run*, llama.cpp against base model and adapter in fp32: means of 6.8e-3
# (q8_0), 1.0e-4 (f16) and 2.7e-4 (bf16). A merged model may be 1e-3 away before it is converted (export/merge.py).
FORMATS: Mapping[str, Format] = {
    "q8_0": Format(34 / 32, 0.03),  # 32 elements of 8 bits, and a scale of 16 bits
    "f16": Format(2, 2e-3),
    "bf16": Format(2, 5e-3),
}
DEFAULT = "q8_0"
