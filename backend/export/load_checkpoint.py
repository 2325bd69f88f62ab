"""`python -m backend.export.load_checkpoint FOLDER`: loads the checkpoint of the job in FOLDER as a user would, and
writes what it computes for the texts of the comparison."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.export.comparison import log_probabilities
from backend.export.quantized import describe_tokens
from backend.models.exports import BATCHES, OUTPUTS, TOKENS, UNCHECKED
from backend.train import exit
from backend.train.patches import bitsandbytes_cpu_layout


def main() -> None:
    """Load, compute, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the job's folder")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code of the model")
    arguments = parser.parse_args()
    folder, checkpoint = arguments.folder, arguments.folder / UNCHECKED
    options = {"local_files_only": True, "trust_remote_code": arguments.trust_remote_code}
    quantized: Any = AutoModelForCausalLM.from_pretrained(checkpoint, device_map={"": "cpu"}, **options)
    bitsandbytes_cpu_layout.apply(quantized)  # else rewriting the weights fails if rows are not a multiple of 64
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    batches = load_file(folder / BATCHES)
    outputs = log_probabilities(quantized, [batches[str(n)] for n in range(len(batches))], "quantized checkpoint")
    save_file({str(n): values.contiguous() for n, values in enumerate(outputs)}, folder / OUTPUTS)
    (folder / TOKENS).write_text(json.dumps(describe_tokens(tokenizer, quantized)), encoding="utf-8")


if __name__ == "__main__":
    main()
    exit.exit_now()
