"""Inspection of weight files: what a broken or mismatched model folder says, without reading a tensor."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specs import spec

from backend import registry
from backend.inspect import InputFacts, datasets, inspect_inputs
from backend.modelspec import ModelShape, from_config

CONFIG = registry.BUILTIN_MODELS["tiny-llama"].config
SHAPE = from_config(CONFIG)


def tensors(shape: ModelShape = SHAPE, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight of the model, as save_pretrained names them."""
    found = {}
    for module in shape.all_modules():
        matrix = (module.out_features, module.in_features)
        path = f"{prefix}{module.path}" if prefix else module.path
        is_matrix = module.in_features * module.out_features == module.parameters
        found[f"{path}.weight"] = matrix if is_matrix and module.parameters else (module.parameters,)
    return found


def safetensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """A safetensors file in bf16; the data is zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + 2 * count]}
        end += 2 * count
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def model_folder(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None, tied: bool = False) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(tensors() if shapes is None else shapes))
    return folder


def sharded(folder: Path) -> Path:
    """The same model in two shards with an index."""
    model_folder(folder)
    (folder / "model.safetensors").unlink()
    names = list(tensors().items())
    halves = {"a.safetensors": dict(names[::2]), "b.safetensors": dict(names[1::2])}
    for file, part in halves.items():
        (folder / file).write_bytes(safetensors(part))
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def inspected(folder: Path) -> InputFacts:
    return inspect_inputs(spec(model__source="path", model__path=str(folder)), folder.parent)


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("make", [model_folder, sharded])
def test_a_complete_folder_has_no_problem(make: Callable[[Path], Path], tmp_path: Path) -> None:
    found = inspected(make(tmp_path / "model"))
    assert (found.model_problem, found.weights_problem) == ("", "")


BROKEN: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], str]] = {
    "weights are a pointer": (model_folder, lambda f: pointer(f / "model.safetensors"), "Git LFS pointer"),
    "tokenizer is a pointer": (model_folder, lambda f: pointer(f / "tokenizer.json"), "Git LFS pointer"),
    "config is a pointer": (model_folder, lambda f: pointer(f / "config.json"), "Git LFS pointer"),
    "index is a pointer": (sharded, lambda f: pointer(f / "model.safetensors.index.json"), "Git LFS pointer"),
    "a shard is a pointer": (sharded, lambda f: pointer(f / "b.safetensors"), "b.safetensors is a Git LFS pointer"),
    "truncated": (model_folder, lambda f: truncate(f / "model.safetensors"), "is truncated"),
    "a shard is truncated": (sharded, lambda f: truncate(f / "b.safetensors"), "b.safetensors is truncated"),
    "too long": (
        model_folder,
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes() + b"ab"),
        "2 bytes after its last tensor",
    ),
    "a shard is missing": (sharded, lambda f: (f / "b.safetensors").unlink(), "b.safetensors is missing"),
    "a shard lacks tensors": (
        sharded,
        lambda f: (f / "b.safetensors").write_bytes(safetensors({})),
        "does not contain model",
    ),
    "index without a weight_map": (
        sharded,
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "has no weight_map",
    ),
    "another name": (
        model_folder,
        lambda f: (f / "model.safetensors").rename(f / "weights.safetensors"),
        "contains no weights",
    ),
    "random bytes": (
        model_folder,
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 100),
        "not a valid safetensors file",
    ),
    "empty file": (model_folder, lambda f: (f / "model.safetensors").write_bytes(b""), "not a valid safetensors file"),
    "old format, a pointer": (
        model_folder,
        lambda f: pointer((f / "model.safetensors").rename(f / "pytorch_model.bin")),
        "Git LFS pointer",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_named(name: str, tmp_path: Path) -> None:
    make, break_it, words = BROKEN[name]
    folder = make(tmp_path / "model")
    assert not inspected(folder).model_problem
    break_it(folder)
    assert words in inspected(folder).model_problem


def without_layer(number: int) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in tensors().items() if f".layers.{number}." not in name}


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    assert "no weights for layer 3" in inspected(model_folder(tmp_path / "fewer", without_layer(3))).weights_problem
    wider = {name: (2 * shape[0], *shape[1:]) for name, shape in tensors().items()}
    assert "elements in the weight files" in inspected(model_folder(tmp_path / "wider", wider)).weights_problem
    headless = {name: shape for name, shape in tensors().items() if name != "lm_head.weight"}
    folder = model_folder(tmp_path / "headless", headless)
    assert "have no lm_head.weight" in inspected(folder).weights_problem
    reward = spec(model__source="path", model__path=str(folder), train__stage="reward")
    assert not inspect_inputs(reward, tmp_path).weights_problem, "it has a head of its own"
    assert "contain no tensors" in inspected(model_folder(tmp_path / "empty", {})).weights_problem


@pytest.mark.parametrize("form", ["base model", "multimodal", "further layers", "buffers", "tied head"])
def test_other_names_of_the_same_weights_are_accepted(form: str, tmp_path: Path) -> None:
    found = tensors()
    if form == "base model":
        found = {name.removeprefix("model."): shape for name, shape in found.items() if "lm_head" not in name}
    if form == "multimodal":
        found = {f"language_model.{name}": shape for name, shape in found.items()} | {"vision.patch.weight": (3, 3)}
    if form == "further layers":
        found |= {"model.layers.4.eh_proj.weight": (8, 8)}
    if form == "buffers":
        found |= {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    if form == "tied head":
        found.pop("lm_head.weight")
    facts = inspected(model_folder(tmp_path / "model", found, tied="lm_head.weight" not in found))
    assert (facts.model_problem, facts.weights_problem) == ("", "")


def test_a_checkpoint_of_a_model_without_output_layer(tmp_path: Path) -> None:
    """Its weights were tied to the embeddings; those of this run's model are not."""
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    for name in ("trainer_state.json", "optimizer.pt"):
        (folder / name).touch()
    names = tensors()
    resumed = spec(
        model__builtin="tiny-llama", method__kind="full", save__resume_from="path", save__resume_path=str(folder)
    )
    (folder / "model.safetensors").write_bytes(safetensors(names))
    assert inspect_inputs(resumed, tmp_path).checkpoint_problem == ""
    del names["lm_head.weight"]
    (folder / "model.safetensors").write_bytes(safetensors(names))
    assert "have no lm_head.weight" in inspect_inputs(resumed, tmp_path).checkpoint_problem


def test_a_checkpoint_of_a_model_with_added_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its embeddings have more rows than those of the model that the run starts from, if the vocabulary is full."""
    base, folder = model_folder(tmp_path / "base"), tmp_path / "checkpoint-3"
    model_folder(folder, tensors(SHAPE.with_vocabulary(SHAPE.vocabulary + 2)))
    (folder / "trainer_state.json").write_text("{}")
    (folder / "optimizer.pt").touch()
    more = {"data__add_tokens": ("<a>", "<b>"), "method__kind": "full", "save__resume_from": "path"}
    resumed = spec(model__source="path", model__path=str(base), save__resume_path=str(folder), **more)

    def problem(added: int, known: bool = True) -> str:
        sizes = {"tokenizer_size": SHAPE.vocabulary + added, "known_size": SHAPE.vocabulary} if known else {}
        monkeypatch.setattr(datasets, "inspect_examples", lambda *_: sizes)
        return inspect_inputs(resumed, tmp_path).checkpoint_problem

    assert problem(2) == problem(2, known=False) == ""
    assert "do not belong to the same model" in problem(1)
