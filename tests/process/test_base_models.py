"""Base models whose files are unusual."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fork_server import ForkServer
from safetensors.torch import load_file, save_file
from training_runs import log_text, losses, make_run_folder, result
from transformers import AutoTokenizer, GenerationConfig, GPT2Config, GPT2LMHeadModel

from backend.train.patches import transformers_generation_config

QUICK = {"model.source": "path", "train.max_steps": 1, "save.strategy": "no", "data.source": "files"}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": None, "top_p": None}),
        ({"num_beams": 1, "early_stopping": True, "length_penalty": 2.0}, {"early_stopping": None}),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}),
        ({"max_new_tokens": -5, "max_length": 7}, {"max_length": None}),
    ],
)
def test_settings_of_the_generation_config_without_effect(settings: dict[str, object], kept: dict[str, object]) -> None:
    class Model:
        generation_config = GenerationConfig(eos_token_id=[1, 2], bos_token_id=3)

    for name, value in settings.items():
        setattr(Model.generation_config, name, value)
    transformers_generation_config.apply(Model)
    assert {name: getattr(Model.generation_config, name) for name in kept} == kept
    assert (Model.generation_config.eos_token_id, Model.generation_config.bos_token_id) == ([1, 2], 3)
    Model.generation_config.validate(strict=True)


def test_files_that_transformers_would_not_save(
    tiny: Path, root: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """A generation config with a setting without effect, and the file of a SentencePiece tokenizer."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    unusual = {"do_sample": False, "temperature": 0.6, "eos_token_id": 2}
    (model / "generation_config.json").write_text(json.dumps(unusual))
    (model / "tokenizer.model").write_bytes(b"sentencepiece")
    full = {"data.source": "builtin", "save.final_model": True, "method.kind": "full"}
    changes = {**QUICK, "model.path": str(model), **full}
    folder = make_run_folder(root, "unsaved-config", changes)
    assert fork_server.run(folder, 1) == 0
    trained = folder / result(folder)["model"]
    saved = json.loads((trained / "generation_config.json").read_text())
    assert (trained / "tokenizer.model").read_bytes() == b"sentencepiece"
    assert "temperature" not in saved and saved["eos_token_id"] == 2


def test_a_tokenizer_with_more_tokens_than_the_model_has_is_refused(
    tiny: Path, root: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<new {number}>" for number in range(4096)])
    tokenizer.save_pretrained(model)
    folder = make_run_folder(root, "large-tokenizer", {**QUICK, "model.path": str(model), "data.source": "builtin"})
    assert fork_server.run(folder, 1) != 0
    assert "they do not belong together. Use the tokenizer of this model." in log_text(folder).replace("\n", " ")


def test_a_reward_model_has_the_padding_token_that_its_config_lacks(
    tiny: Path, root: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Its score is that of the last token before the padding."""
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    reward = {"train.stage": "reward", "data.source": "builtin", "data.builtin": "train-pairs", "method.kind": "full"}
    more = {"train.per_device_train_batch_size": 2, "save.final_model": True, "model.path": str(model)}
    saved = {"save.strategy": "steps", "save.steps": 2}
    folder = make_run_folder(root, "reward-padding", {**QUICK, **reward, **more, **saved})
    assert fork_server.run(folder, 1) == 0
    assert json.loads((folder / result(folder)["model"] / "config.json").read_text())["pad_token_id"] is not None
    configs = [json.loads(path.read_text()) for path in folder.rglob("config.json")]
    assert len(configs) >= 2 and config["use_cache"], "of the model and of a checkpoint"
    assert all(each["use_cache"] for each in configs), "training without a cache is no property of the model"


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2", "tensor"])
def test_weights_that_the_files_lack_are_named(
    strategy: str, tiny: Path, root: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Inspection compares only the decoder layers."""
    shutil.copytree(tiny, model := tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    changes = {
        **QUICK,
        "model.path": str(model),
        "data.source": "builtin",
        "parallel.strategy": strategy,
        "method.kind": "full",
    }
    folder = make_run_folder(root, f"lacking-{strategy}", changes)
    assert fork_server.run(folder, 2) != 0
    assert "for 1 of the 39 parameters of LlamaForCausalLM: model.norm.weight." in log_text(folder)


def test_the_first_token_of_gpt2_counts_neither_in_training_nor_in_evaluation(
    tiny: Path, root: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    """With a learning rate of almost 0, the loss of all texts in one step is their eval loss."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "Train {n}"}}\n' for n in range(6)))
    changes = {
        **QUICK, "model.path": str(tmp_path / "model"), "data.files": (str(tmp_path / "texts.jsonl"),),
        "data.validation": "files", "data.validation_files": (str(tmp_path / "texts.jsonl"),), "data.max_length": 32,
        "train.stage": "pretraining", "train.per_device_train_batch_size": 6, "train.learning_rate": 1e-12,
        "method.kind": "full", "eval.strategy": "steps", "eval.steps": 1, "save.final_model": False,
    }  # fmt: skip
    folder = make_run_folder(root, "first-token", changes)
    assert fork_server.run(folder, 1) == 0
    assert losses(folder)[1] == pytest.approx(result(folder)["eval_loss"], rel=1e-4)
