"""Inspection of a model's weight files without reading a tensor: Git LFS pointers, truncated files, missing shards.

A .safetensors file begins with the length of its header (8 bytes, little-endian), then the header, a JSON object that
gives dtype, shape and position of each tensor (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from backend.inspect.json_files import MAX_INDEX_BYTES, read_json_object
from backend.modelspec import SCORE, ModelShape

INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

Shapes = Mapping[str, tuple[int, ...]]
FileState = tuple[tuple[str, int, int], ...]  # name, modification time in ns, size; a key of the caches


class WeightsError(Exception):
    """What is wrong with a weight file; the message is a sentence that names the file."""


def weight_shapes(folder: Path) -> Shapes | None:
    """The shape of each tensor of a model folder, as from_pretrained finds them: model.safetensors, else the shards of
    its index. None if the weights are not in safetensors files. Cached until a file of the folder changes. Raises
    WeightsError, OSError."""
    return _weight_shapes(folder, _file_state(folder))


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files of a model folder, as `weight_shapes` finds them; empty without any. Raises
    WeightsError."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    return [folder / shard for shard in sorted(_shards(folder / INDEX))] if (folder / INDEX).is_file() else []


def weights_mismatch(folder: Path, shape: ModelShape) -> str:
    """How the weights of `folder` differ from the model that config.json describes, a sentence; '' if they do not, or
    if they are not in safetensors files. Cached like `weight_shapes`. Raises WeightsError, OSError."""
    return _weights_mismatch(folder, _file_state(folder), shape)


def _file_state(folder: Path) -> FileState:
    with os.scandir(folder) as entries:
        stats = ((entry.name, entry.stat()) for entry in entries)
        return tuple(sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats))


@lru_cache(maxsize=16)
def _weights_mismatch(folder: Path, files: FileState, shape: ModelShape) -> str:
    found = _weight_shapes(folder, files)
    if found is None:
        return ""
    return _mismatch(found, shape) if found else "The weight files contain no tensors."


@lru_cache(maxsize=16)
def _weight_shapes(folder: Path, files: FileState) -> Shapes | None:
    if (folder / "model.safetensors").is_file():
        return tensor_shapes(folder / "model.safetensors")
    if not (folder / INDEX).is_file():
        _check_other_files(folder)
        return None
    found: dict[str, tuple[int, ...]] = {}
    for shard, names in _shards(folder / INDEX).items():
        if not (folder / shard).is_file():
            raise WeightsError(f"{folder / shard} is missing; {INDEX} lists {len(names):,} tensors in it.")
        shapes = tensor_shapes(folder / shard)
        if absent := sorted(names - shapes.keys()):
            raise WeightsError(f"{folder / shard} does not contain {_listed(absent)}, which {INDEX} lists in it.")
        found |= {name: shapes[name] for name in names}
    return found


def _shards(index: Path) -> dict[str, set[str]]:
    """Shard -> names of its tensors."""
    shards: dict[str, set[str]] = {}
    try:
        for name, shard in read_json_object(index, MAX_INDEX_BYTES)["weight_map"].items():
            shards.setdefault(str(shard), set()).add(name)
    except OSError as error:
        raise WeightsError(f"{index} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(pointer_problem(index) or f"{index} has no weight_map of tensors.") from error
    return shards


def tensor_shapes(path: Path) -> Shapes:
    """The tensors in one .safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= min(size, MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from error
    try:
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        shapes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(pointer_problem(path) or f"{path} is not a valid safetensors file.") from error
    complete = 8 + length + end
    if size < complete:
        raise WeightsError(f"{path} is truncated: it has {size:,} of {complete:,} bytes. Download it again.")
    if size > complete:
        raise WeightsError(f"{path} has {size - complete:,} bytes after its last tensor. Download it again.")
    return shapes


def _check_other_files(folder: Path) -> None:
    """Raise WeightsError if a weight file of another kind is a Git LFS pointer."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        if problem := pointer_problem(path):
            raise WeightsError(problem)


def pointer_problem(path: Path) -> str:
    """The sentence about a file that is a Git LFS pointer; '' if it is not one. Raises OSError."""
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    sentence = f"{path} is a Git LFS pointer, not the file itself. Run git lfs pull in its folder."
    return sentence if is_pointer else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3:,} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _mismatch(found: Shapes, shape: ModelShape) -> str:
    """A layer without weights, a linear layer of another size, or a missing output layer. Layers that from_pretrained
    renames are not compared."""
    prefix = _prefix(found, shape)
    if prefix is None:
        return ""
    layers = {match.group(1) for name in found if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", name))}
    if absent := [number for number in range(shape.layers) if str(number) not in layers]:
        return (
            f"config.json describes {shape.layers} decoder layers, and the weight files have no weights for layer "
            f"{absent[0]}: they do not belong to the same model."
        )
    for module in shape.all_modules():
        name = f"{module.path.replace(shape.layers_path, prefix, 1)}.weight"
        elements, expected = math.prod(found.get(name, ())), module.in_features * module.out_features
        if name in found and module.is_linear and elements != expected:
            return (
                f"{name} has {elements:,} elements in the weight files, and {expected:,} according to config.json: "
                "they do not belong to the same model."
            )
    return _missing_head(found, shape) if prefix in _prefixes(shape) else ""


def _missing_head(found: Shapes, shape: ModelShape) -> str:
    """That there is no output layer, neither under its name nor as another tensor as large as the embeddings."""
    size, head = shape.vocabulary * shape.hidden, shape.head.rpartition(".")[2]
    if shape.tied or head == SCORE or any(f".{name}".endswith(f".{head}.weight") for name in found):
        return ""
    if [math.prod(dimensions) for dimensions in found.values()].count(size) != 1:
        return ""
    return (
        f"The weight files have no {shape.head}.weight: they belong to a model without an output layer, or with an "
        "output layer that is tied to its embeddings."
    )


def _prefixes(shape: ModelShape) -> tuple[str, str]:
    """The path of the decoder layers in the files of the model, and of its base model."""
    return shape.layers_path, shape.layers_path.partition(".")[2]


def _prefix(found: Shapes, shape: ModelShape) -> str | None:
    """The path of the decoder layers in the weight files: a base model is saved without the prefix of its language
    model, and a multimodal model with a longer one. None if no name, or more than one, could be it."""
    first = next((f"{module.path}.weight" for module in shape.layer if module.is_linear), "")
    ends = [f"{path}.0.{first}" for path in _prefixes(shape)]
    names = [end for end in ends if end in found][:1]
    names = names or [name for name in found if name.endswith(tuple(f".{end}" for end in ends))]
    if len(names) > 1:  # a vision or audio tower has layers too
        names = [name for name in names if "language_model" in name]
    return names[0].removesuffix(f".0.{first}") if first and len(names) == 1 else None
