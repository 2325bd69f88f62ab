"""Tokens that a spec adds to the vocabulary: what other trainers call them, what they add to a model, and the fix that
adds the end of a chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from specs import spec

from backend.config import RunSpec
from backend.config.options import edit
from backend.importers import import_file
from backend.inspect import _added_rows, inspect_inputs
from backend.launch.llamafactory import export
from backend.memory import estimate
from backend.modelspec import ModelShape, token_rows, trainable_parameters
from backend.resolve import resolve
from backend.rules import check
from backend.rules.conversations import OWN_TEMPLATE
from backend.rules.examples import DEMO, H100, LLAMA_8B, SMOL, TWO_H100, USER_DATA_FACTS

END, TOOL = "<|im_end|>", "<tool>"
TOKENS: dict[str, Any] = {"data__add_special_tokens": (END,), "data__add_tokens": (TOOL,)}
LLAMAFACTORY = {"model_name_or_path": "a/b", "stage": "sft", "dataset": "identity", "template": "default"}
AXOLOTL = {"base_model": "a/b", "datasets": [{"path": "c/d", "type": "alpaca"}], "adapter": "lora"}


@pytest.mark.parametrize(
    ("given", "special", "plain", "named"),
    [
        ({**LLAMAFACTORY, "add_special_tokens": "<a>,<b>", "add_tokens": "<c>"}, ("<a>", "<b>"), ("<c>",), ""),
        ({**LLAMAFACTORY, "add_tokens": "<c>", "resize_vocab": True}, (), ("<c>",), ""),
        ({**LLAMAFACTORY, "resize_vocab": True}, (), (), "resize_vocab"),
        ({**AXOLOTL, "tokens": ["<c>", "<d>"]}, (), ("<c>", "<d>"), ""),
        ({**AXOLOTL, "special_tokens": {"additional_special_tokens": ["<a>"]}}, ("<a>",), (), ""),
        ({**AXOLOTL, "special_tokens": {"eos_token": "<e>"}}, (), (), "special_tokens.eos_token: <e>"),
    ],
)
def test_other_trainers(tmp_path: Path, given: Any, special: Any, plain: Any, named: str) -> None:
    found = import_file(yaml.safe_dump(given), RunSpec(), tmp_path)
    assert (found.spec.data.add_special_tokens, found.spec.data.add_tokens) == (special, plain)
    names = [line for line in found.missing if "token" in line or "vocab" in line]
    assert [named] == [line[: len(named)] for line in names] if named else not names


def test_llamafactory_gets_them() -> None:
    files = {"data__source": "files", "data__files": ("/a.jsonl",), "data__validation": "none"}
    own = spec(**files, **TOKENS)
    made = export(own, resolve(own, H100), "messages", converts=False)
    table = {name: made.table.get(name) for name in ("add_special_tokens", "add_tokens", "resize_vocab")}
    assert table == {"add_special_tokens": END, "add_tokens": TOOL, "resize_vocab": True} and not made.refused
    assert any("trains the whole embeddings" in line for line in made.different)
    quantized = edit(own, {"method.quantization": "nf4"})
    assert "cannot be resized" in export(quantized, resolve(quantized, H100), "messages", False).refused[0]
    without = export(spec(**files), resolve(spec(**files), H100), "messages", converts=False)
    assert not {"add_tokens", "add_special_tokens", "resize_vocab"} & without.table.keys()


@pytest.mark.parametrize(("shape", "layers"), [(SMOL, 1), (LLAMA_8B, 2), (LLAMA_8B.with_score_head, 1)])
def test_rows_that_an_adapter_trains(shape: ModelShape, layers: int) -> None:
    """Of the embeddings, and of the output layer unless it is tied or a scalar head."""
    with_tokens, without = spec(**TOKENS), spec()
    more = trainable_parameters(with_tokens, shape) - trainable_parameters(without, shape)
    assert more == 2 * layers * shape.hidden
    assert not token_rows(edit(with_tokens, {"method.kind": "full"}), shape)
    saved = edit(with_tokens, {"lora.modules_to_save": ("embed_tokens",)})
    assert len(token_rows(saved, shape)) == layers - 1


@pytest.mark.parametrize("shape", [SMOL, LLAMA_8B])
def test_embeddings_that_grow(shape: ModelShape) -> None:
    """Only if the model has no spare rows, and the tokenizer is that of the model."""
    size, layers = shape.vocabulary, 1 if shape.tied else 2
    grown = shape.with_vocabulary(size + 2)
    assert grown.parameters == shape.parameters + 2 * layers * shape.hidden and grown.vocabulary == size + 2
    sizes = {"shape": shape, "known_size": size}
    found = {n: _added_rows(spec(**TOKENS), {**sizes, "tokenizer_size": size + n}) for n in (0, 1, 2)}
    assert not found[0] and found[1]["added_rows"] == 1 and found[2]["shape"] == grown
    assert not _added_rows(spec(), {**sizes, "tokenizer_size": size + 1})
    foreign = {"known_size": size + 1, "tokenizer_size": size + 1}  # the tokenizer had the listed tokens before
    assert not _added_rows(spec(**TOKENS), {"shape": shape, **foreign})
    local = spec(model__source="path", model__path="model", **TOKENS)
    assert "MDL006" in {finding.code for finding in check(local, H100, replace(DEMO, shape=shape, **foreign))}
    ok = replace(DEMO, shape=grown, known_size=size, tokenizer_size=size + 2)
    assert "MDL006" not in {finding.code for finding in check(local, H100, ok)}


def test_memory_of_the_copies_of_the_embeddings() -> None:
    """peft puts the trained rows into a copy of all rows, which is in memory with its gradient."""
    facts, both = replace(DEMO, shape=LLAMA_8B), (spec(), spec(**TOKENS))
    peaks = [estimate(each, resolve(each, H100, facts), H100, facts).device_bytes for each in both]
    assert peaks[1] - peaks[0] > LLAMA_8B.vocabulary * LLAMA_8B.hidden * 2


def test_the_end_of_a_template_is_added_with_a_click() -> None:
    """Only a text that ends every such example."""
    own = edit(RunSpec(), OWN_TEMPLATE)
    facts = replace(USER_DATA_FACTS, num_checked=20, num_endless=20, unknown_ends=((END, 20),))
    (finding,) = (found for found in check(own, H100, facts) if found.code == "DAT025")
    assert finding.fixes[0].label == f"Add {END} to the vocabulary" and END in finding.message
    assert edit(own, finding.fixes[0].patch).data.add_special_tokens == (END,)
    rare = replace(facts, unknown_ends=(("", 1), (END, 19)))
    (finding,) = (found for found in check(own, H100, rare) if found.code == "DAT025")
    assert not any("add_special_tokens" in str(fix.patch) for fix in finding.fixes)


def test_turns_without_a_loss_are_a_cause_of_their_own() -> None:
    """The chat template has other examples, and another finding."""
    own = edit(RunSpec(), OWN_TEMPLATE | {"data.loss_on": "all_tokens"})
    facts = replace(USER_DATA_FACTS, num_checked=20, num_weightless=3, num_endless=2)
    found = {finding.code: finding.message for finding in check(own, H100, facts)}
    assert "In 3 of 20 checked examples, each assistant turn has the weight 0" in found["DAT043"]
    assert "In 2 of 20" in found["DAT025"] and "weight" not in found["DAT025"]
    assert "DAT025" not in {finding.code for finding in check(own, H100, replace(facts, num_endless=0))}


def test_a_generation_prompt_that_ends_with_a_space() -> None:
    """A reader sees the space, and that the texts differ by their tokens only."""
    start = {"num_starts": 9, "num_different_starts": 9, "start_difference": ("[a] ", "[a] At nine.", "tokens")}
    (finding,) = (
        found for found in check(RunSpec(), H100, replace(USER_DATA_FACTS, **start)) if found.code == "DAT026"
    )
    assert '"[a] At nine." in training, "[a]␣" in generation. Use a chat template whose' in finding.message


def test_an_adapter_with_other_tokens(tmp_path: Path) -> None:
    """A run that continues it needs the same tokens; the fix sets them."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "adapter_model.safetensors").touch()
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "trainable_token_indices": {"embed_tokens": [7, 8]}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    saved = {"model": {"builtin": "tiny-llama"}, "data": {"add_tokens": [TOOL], "add_special_tokens": [END]}}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(saved))
    given = {"model__builtin": "tiny-llama", "lora__adapter_path": str(folder)}
    facts = inspect_inputs(spec(**given), tmp_path)
    assert END in facts.adapter_problem and TOOL in facts.adapter_problem
    fixed = edit(spec(**given), dict(facts.adapter_options))
    assert fixed.data.added_tokens == (END, TOOL) and inspect_inputs(fixed, tmp_path).adapter_problem == ""
    swapped = edit(fixed, {"data.add_special_tokens": (TOOL,), "data.add_tokens": (END,)})
    assert TOOL in inspect_inputs(swapped, tmp_path).adapter_problem  # the rows would belong to the other token
    (tmp_path / "spec.yaml").unlink()
    assert "set data.add_special_tokens and data.add_tokens" in inspect_inputs(spec(**given), tmp_path).adapter_problem
    assert inspect_inputs(fixed, tmp_path).adapter_problem == ""


def test_a_tied_output_layer_in_full() -> None:
    """Only the embedding may be trained in full: peft cannot put the trained rows into the copy of the other one."""
    tied = spec(**TOKENS, lora__modules_to_save=("lm_head", "norm"))
    (finding,) = (found for found in check(tied, H100, DEMO) if found.code == "MTH013")
    fixed = edit(tied, finding.fixes[0].patch)
    assert fixed.lora.modules_to_save == ("norm",)
    for other in (fixed, edit(tied, {"lora.modules_to_save": ("embed_tokens",)})):
        assert "MTH013" not in {found.code for found in check(other, H100, DEMO)}


@pytest.mark.parametrize("token", ["", " "])
def test_a_token_without_a_character_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match=r"data\.add_tokens: must be tokens that do not consist of spaces only"):
        edit(RunSpec(), {"data.add_tokens": (TOOL, token)})


def test_strategies_that_shard_the_embeddings() -> None:
    """Training untied embeddings in full is the other way."""
    facts = replace(DEMO, shape=LLAMA_8B)
    sharded = spec(parallel__strategy="zero3", **TOKENS)
    (finding,) = (found for found in check(sharded, TWO_H100, facts) if found.code == "MTH012")
    (whole,) = (fix for fix in finding.fixes if "in full" in fix.label)
    assert whole.patch["lora.modules_to_save"] == ("embed_tokens", "lm_head")
    assert "MTH012" not in {found.code for found in check(edit(sharded, whole.patch), TWO_H100, facts)}
    unknown = replace(facts, shape=None)  # as in the trainer, for an architecture without a closed formula
    assert "MTH012" in {found.code for found in check(sharded, TWO_H100, unknown)}
    assert "MTH012" not in {found.code for found in check(edit(sharded, whole.patch), TWO_H100, unknown)}
    for other in ({"method.kind": "full"}, {"parallel.strategy": "fsdp2"}):
        assert "MTH012" not in {found.code for found in check(edit(sharded, other), TWO_H100, facts)}
    early = replace(DEMO, shape=replace(LLAMA_8B, model_type="llama4_text"))
    (finding,) = (each for each in check(edit(sharded, other), TWO_H100, early) if each.code == "MTH012")
    assert not any("FSDP2" in fix.label for fix in finding.fixes)
