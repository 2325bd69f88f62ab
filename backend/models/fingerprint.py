"""The fingerprint of a model's weights: an adapter is only right on the weights that it was trained on.

Other weights of the same shapes, such as a later version of the base model in the same folder, raise no error in peft,
and the model generates gibberish. A hash of all bytes would read terabytes; samples of each tensor tell versions of a
model apart as well, because training changes nearly every value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from backend.inspect.weights import MAX_HEADER_BYTES, WeightsError, weight_files

SAMPLES, SAMPLE_BYTES = 16, 64  # per tensor, evenly spaced
FILE_SAMPLES = 4096  # samples of a file in another format
OTHER_FILES = ("*.bin", "*.gguf", "*.pt")


def fingerprint(folder: Path) -> str:
    """A hash of names, dtypes, shapes and samples of all tensors, whatever file each of them is in; '' for a folder
    without weights that can be read."""
    try:
        safetensors = weight_files(folder)
        parts = sorted(part for path in safetensors for part in _tensors(path)) or list(_other_files(folder))
    except (OSError, WeightsError, ArithmeticError, ValueError, LookupError, TypeError):
        return ""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:32] if parts else ""


def describe_change(name: str, now: str, then: str) -> str:
    """The error that a base model no longer has the weights of a run's training: both fingerprints, and how to fix
    it."""
    return (
        f"The weights of {name} are not those that this run was trained on (fingerprint {now[:8]} now, {then[:8]} in "
        "training). Restore the base model, then try again."
    )


def _tensors(path: Path) -> Iterator[bytes]:
    """One line for each tensor of a .safetensors file, even if the index names another file for it: that file then has
    the same values."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            sampled = hashlib.sha256()
            for offset in _offsets(end - start, SAMPLES):
                file.seek(8 + length + start + offset)
                sampled.update(file.read(min(SAMPLE_BYTES, end - start - offset)))
            yield f"{name} {tensor['dtype']} {tensor['shape']} {sampled.hexdigest()}\n".encode()


def _other_files(folder: Path) -> Iterator[bytes]:
    for path in sorted(path for pattern in OTHER_FILES for path in folder.glob(pattern)):
        size, sampled = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for offset in _offsets(size, FILE_SAMPLES):
                file.seek(offset)
                sampled.update(file.read(SAMPLE_BYTES))
        yield f"{path.name} {size} {sampled.hexdigest()}\n".encode()


def _offsets(size: int, count: int) -> list[int]:
    """Where samples begin in `size` bytes: all of them if they are few."""
    last = max(0, size - SAMPLE_BYTES)
    if size <= count * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [last * number // (count - 1) for number in range(count)]
