"""The fingerprint of a base model: equal for equal weights in other files, different for any other weights."""

import json
import struct

import pytest

from backend.models.fingerprint import fingerprint

SHAPES = {"a.weight": (64, 32), "b.weight": (7,), "c.weight": (3, 5)}


def values(seed):
    return {name: bytes((seed + 7 * n) % 251 for n in range(4 * _size(shape))) for name, shape in SHAPES.items()}


def _size(shape):
    size = 1
    for dimension in shape:
        size *= dimension
    return size


def write(path, tensors, order=None, padding=0):
    header, data = {"__metadata__": {"note": "x" * padding}}, b""
    for name in order or tensors:
        end = len(data) + len(tensors[name])
        header[name] = {"dtype": "F32", "shape": list(SHAPES[name]), "data_offsets": [len(data), end]}
        data += tensors[name]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def folder_of(tmp_path, name, tensors, **more):
    folder = tmp_path / name
    folder.mkdir()
    write(folder / "model.safetensors", tensors, **more)
    return folder


def test_the_order_and_the_number_of_files_do_not_matter(tmp_path):
    tensors = values(1)
    one = fingerprint(folder_of(tmp_path, "one", tensors))
    assert one and one == fingerprint(folder_of(tmp_path, "two", tensors, order=list(SHAPES)[::-1], padding=90))
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    names = list(SHAPES)
    for number, part in enumerate((names[:1], names[1:])):
        write(sharded / f"{number}.safetensors", {name: tensors[name] for name in part})
    index = {"weight_map": {name: f"{int(name != names[0])}.safetensors" for name in names}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fingerprint(sharded) == one


@pytest.mark.parametrize("name", SHAPES)
def test_other_values_differ(tmp_path, name):
    tensors = values(1)
    before = fingerprint(folder_of(tmp_path, "before", tensors))
    assert before != fingerprint(folder_of(tmp_path, "after", tensors | {name: values(2)[name]}))


@pytest.mark.parametrize("suffix", ["bin", "gguf"])
def test_other_formats(tmp_path, suffix):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / f"model.{suffix}").write_bytes(bytes(range(256)) * 4096)
    before = fingerprint(folder)
    (folder / f"model.{suffix}").write_bytes(bytes(range(255, -1, -1)) * 4096)
    assert before and fingerprint(folder) and fingerprint(folder) != before


def test_no_weights_or_broken_ones(tmp_path):
    assert fingerprint(tmp_path) == "" == fingerprint(tmp_path / "missing")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert fingerprint(tmp_path) == ""
