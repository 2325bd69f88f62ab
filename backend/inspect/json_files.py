"""JSON files of a model folder, read with a bound on their size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 2**20
MAX_CONFIG_BYTES = 16 * MIB  # config.json with label names has 100 KB, tokenizer_config.json up to a few MB
MAX_INDEX_BYTES = 64 * MIB  # an index names all tensors


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises OSError, and ValueError with the reason."""
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes // MIB} MiB")
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found
