"""A checkpoint restores the model that was saved: every tensor, or the run ends with an error that names what is
missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build, model_types
from parameters import soak_except
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from backend.registry import CONVERTED_WEIGHTS
from backend.train import adapter_names, checkpoint_weights, continued_adapter
from backend.train.describe_model import describe
from backend.train.model import save
from backend.train.run_log import TrainError
from backend.train.trl_trainers import TrainerMixin

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries

# transformers holds their weights in another layout, or by other names, than their checkpoints.
CONVERTED = (
    "mixtral", "qwen3_moe", "deepseek_v3", "ernie4_5_moe", "gemma3", "jamba", "granitemoe", "phimoe", "qwen3_next",
    "nemotron_h", "laguna", "olmoe",
)  # fmt: skip
PLAIN = ("llama", "gpt2")
# What from_pretrained of transformers 5.23 changes whatever the file holds (`_init_weights` of the class): a row of the
# embedding that belongs to the padding token, and a buffer that no training changes. Resuming restores both.
INITIALIZED_AT_LOAD = {"youtu": r"embed_tokens\.weight|lm_head\.weight", "zaya": r"\.balancing_biases"}


class BareTrainer(TrainerMixin, Trainer):
    """The Trainer with what all trainers of a run have in common, without data."""


def make_trainer(model: Any, folder: Path) -> BareTrainer:
    trainer = BareTrainer(model, TrainingArguments(str(folder), use_cpu=True, report_to=[]))
    trainer.context = SimpleNamespace(run=SimpleNamespace(zero_stage=0), use_cache=None)  # type: ignore[assignment]
    return trainer


def perturb(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> None:
    """Change every element of every tensor, so that none is equal to that of the base model."""
    generator, seen = torch.Generator().manual_seed(5), set()
    with torch.no_grad():
        for tensor in tensors:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator).to(tensor.dtype) / 10 + 0.01)
            elif tensor.dtype != torch.bool:
                tensor.add_(1)


def restored(trained: Any, fresh: Callable[[], Any], folder: Path) -> Iterator[Any]:
    """Save `trained` as a checkpoint, and load it into fresh models: at a resume, and as the best model."""
    make_trainer(trained, folder).save_model(str(folder / "checkpoint-1"))
    resumed = make_trainer(fresh(), folder)
    resumed._load_from_checkpoint(str(folder / "checkpoint-1"))
    yield resumed.model
    best = make_trainer(fresh(), folder)
    best.state.best_model_checkpoint = str(folder / "checkpoint-1")
    best._load_best_model()
    yield best.model


def differing(expected: Any, found: Any) -> list[str]:
    """Names of tensors that are not equal in both models."""
    own = found.state_dict()
    return [name for name, value in expected.state_dict().items() if not torch.equal(value, own[name])]


def lacks_names(model: Any, folder: Path) -> bool:
    """Whether the file has an entry neither for a tensor of the model nor for one that it is tied to."""
    own = model.state_dict(keep_vars=True)
    saved = {id(own[name]) for name in load_file(folder / "model.safetensors") if name in own}
    return any(id(tensor) not in saved for tensor in own.values())


def base_model(kind: str, folder: Path) -> Any:
    """A class that loads the tiny model of a type from `folder`, where it is written, and its arguments."""
    try:
        build(kind).save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        pytest.skip(f"cannot be built or loaded: {error}")
    return lambda: AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("kind", soak_except(model_types(), (*CONVERTED, *PLAIN)))
def test_all_weights_are_restored(kind: str, tmp_path: Path) -> None:
    fresh = base_model(kind, tmp_path / "base")
    trained = fresh()
    perturb(list(trained.state_dict(keep_vars=True).values()))
    for model in restored(trained, fresh, tmp_path):
        assert not differing(trained, model)
    assert (trained.config.model_type in CONVERTED_WEIGHTS) is lacks_names(trained, tmp_path / "checkpoint-1")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    known = INITIALIZED_AT_LOAD.get(kind, "$^")
    assert not [name for name in differing(trained, loaded) if not re.search(known, name)]


# --- Adapters, reward models ---

ADAPTED = ("mixtral", "laguna", "llama")
LAYERS = {"mixtral": {"target_modules": ["q_proj", "gate_up_proj", "down_proj"]}}  # also stacked experts


def adapted(model: Any, kind: str, reward: bool = False) -> Any:
    """`model` with an adapter, and one module that is trained in full."""
    options = {"target_modules": "all-linear", **LAYERS.get(kind, {})}
    if not reward:
        options["modules_to_save"] = ["embed_tokens"]
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS" if reward else "CAUSAL_LM", **options))


@pytest.mark.parametrize("kind", soak_except(model_types(), ADAPTED))
def test_adapters_are_restored(kind: str, tmp_path: Path) -> None:
    """Also a second adapter, which TRL adds as the reference model of DPO."""
    load_base = base_model(kind, tmp_path / "base")
    if not any(name.endswith("embed_tokens") for name, _ in load_base().named_modules()):
        pytest.skip("it has no embed_tokens")

    def fresh() -> Any:
        model = adapted(load_base(), kind)
        model.add_adapter("ref", model.peft_config["default"])
        return model

    try:
        trained = fresh()
    except (ValueError, TypeError) as error:
        pytest.skip(f"peft refuses it: {error}")
    parts = [(name, p) for name, p in trained.named_parameters() if "lora_" in name or "modules_to_save" in name]
    assert any(".ref." in name for name, _ in parts) and any("modules_to_save.default" in name for name, _ in parts)
    perturb([parameter for _, parameter in parts])
    for model in restored(trained, fresh, tmp_path):
        assert not differing(trained, model)
        assert [n for n, p in model.named_parameters() if p.requires_grad] == [
            n for n, p in trained.named_parameters() if p.requires_grad
        ]


@pytest.mark.parametrize("kind", soak_except(model_types(), ("laguna", "llama", "mixtral")))
def test_peft_and_transformers_load_every_tensor_of_a_saved_adapter(kind: str, tmp_path: Path) -> None:
    """Layers whose adapter they would ignore have none (rule ADP010)."""
    load_base = base_model(kind, tmp_path / "base")
    base = load_base()
    refused = describe(base.config.to_dict())["lora_refused"]
    options = {"target_modules": "all-linear", "exclude_modules": refused or None, **LAYERS.get(kind, {})}
    try:
        trained = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options))
    except (ValueError, TypeError) as error:
        pytest.skip(f"peft refuses it: {error}")
    adapter_names.check(trained)
    perturb([parameter for name, parameter in trained.named_parameters() if ".lora_" in name])
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    save(trained, tokenizer, tmp_path / "model", torch.float32)
    for loaded in (
        PeftModel.from_pretrained(load_base(), tmp_path / "model"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
    ):
        found = {name.removeprefix("base_model.model."): value for name, value in loaded.named_parameters()}
        expected = {n.removeprefix("base_model.model."): p for n, p in trained.named_parameters() if ".lora_" in n}
        assert not [name for name, value in expected.items() if not torch.equal(value, found[name])]


@pytest.mark.parametrize("kind", ["laguna", "llama"])
def test_a_chat_switches_between_saved_adapters(kind: str, tmp_path: Path) -> None:
    """The file of an adapter of laguna has published names, which only peft loads."""
    load_base = base_model(kind, tmp_path / "base")
    tokenizer, adapters = SimpleNamespace(save_pretrained=lambda folder: None), {}
    for name in ("first", "second"):
        options = {"target_modules": "all-linear", **LAYERS.get(kind, {})}
        adapters[name] = trained = get_peft_model(load_base(), LoraConfig(task_type="CAUSAL_LM", **options))
        perturb([parameter for name_, parameter in trained.named_parameters() if ".lora_" in name_])
        save(trained, tokenizer, tmp_path / name, torch.float32)
    loaded = PeftModel.from_pretrained(load_base(), tmp_path / "first")
    for name in ("second", "first"):
        continued_adapter.load_weights(loaded, tmp_path / name)
        assert not differing(adapters[name], loaded)
    weights = tmp_path / "second" / "adapter_model.safetensors"
    save_file(dict(list(load_file(weights).items())[1:]), weights, metadata={"format": "pt"})
    with pytest.raises(TrainError, match="does not fit"):
        continued_adapter.load_weights(loaded, tmp_path / "second")


def test_adapters_that_peft_would_ignore_are_refused() -> None:
    base = build("inkling2_text")
    assert "weight_proj" in describe(base.config.to_dict())["lora_refused"]
    trained = get_peft_model(base, LoraConfig(target_modules="all-linear"))
    with pytest.raises(TrainError, match="would ignore the adapters of weight_proj when it loads"):
        adapter_names.check(trained)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_reward_models_are_restored_with_their_head(method: str, tmp_path: Path) -> None:
    base_model("mixtral", tmp_path / "base")

    def fresh() -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        return adapted(model, "mixtral", reward=True) if method == "lora" else model

    trained = fresh()
    perturb([parameter for parameter in trained.parameters() if parameter.requires_grad])
    for model in restored(trained, fresh, tmp_path):
        assert not [name for name in differing(trained, model) if "original_module" not in name]


def test_dtypes_are_kept(tmp_path: Path) -> None:
    """Also those of adapters in pure bf16, which peft would cast to fp32."""
    load_base = base_model("llama", tmp_path / "base")

    def mixed() -> Any:
        model = load_base().bfloat16()
        model.lm_head.float()
        return model

    for fresh in (mixed, lambda: adapted(load_base(), "llama").bfloat16()):
        trained = fresh()
        perturb([parameter for parameter in trained.parameters() if parameter.requires_grad])
        for model in restored(trained, fresh, tmp_path / fresh.__name__):
            own = dict(model.named_parameters())
            assert {name: p.dtype for name, p in trained.named_parameters()} == {n: p.dtype for n, p in own.items()}
            assert not [name for name in differing(trained, model) if "base_layer" not in name]


# --- What is not complete is refused ---


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny mixtral; its file is split as if it were large."""
    folder = tmp_path_factory.mktemp("mixture")
    build("mixtral").save_pretrained(folder / "one")
    build("mixtral").save_pretrained(folder / "many", max_shard_size="1MB")
    return folder


def test_several_files_are_loaded(mixture: Path) -> None:
    trained, fresh = build("mixtral"), build("mixtral")
    perturb(list(fresh.parameters()))
    assert differing(trained, fresh)
    assert len(list((mixture / "many").glob("*.safetensors"))) > 1
    checkpoint_weights.load(fresh, mixture / "many")
    assert not differing(trained, fresh)
    (mixture / "old").mkdir()
    torch.save(trained.state_dict(), mixture / "old" / "pytorch_model.bin")  # by the names of the model
    perturb(list(fresh.parameters()))
    checkpoint_weights.load(fresh, mixture / "old")
    assert not differing(trained, fresh)


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w{}.weight"
NORM = "model.layers.1.input_layernorm.weight"
LAYER = "model.layers.0."


def without(state: dict[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if not name.startswith(start)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: without(state, NORM), rf"1 tensor of the model is missing there \({NORM}\)"),
        (
            lambda state: without(state, EXPERT.format(1)),
            r"layers\.1\.mlp\.experts\.gate_up_proj cannot be built from .*0\.w1",
        ),
        (
            lambda state: without(state, EXPERT.format(2)),
            r"layers\.1\.mlp\.experts\.down_proj, built from .*0\.w2.* \(3, ",
        ),
        (lambda state: state | {f"{NORM}s": state[NORM].clone()}, rf"1 tensor there is not part .* \({NORM}s\)"),
        (lambda state: state | {NORM: state[NORM][:3].clone()}, rf"{NORM} has the shape \(3,\)"),
        (lambda state: without(state, LAYER), r"of the model are missing there \(.*, .*, .*, .* and \d+ more\)"),
    ],
    ids=["missing", "missing-expert", "missing-half", "unknown", "shape", "many"],
)
def test_incomplete_checkpoints_are_refused(mixture: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copytree(mixture / "one", tmp_path / "checkpoint-1")
    file = tmp_path / "checkpoint-1/model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(TrainError, match=message):
        checkpoint_weights.load(build("mixtral"), tmp_path / "checkpoint-1")


def test_incomplete_adapters_are_refused(tmp_path: Path) -> None:
    trained, fresh = (adapted(build("llama"), "llama") for _ in range(2))
    trained.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    state = load_file(file)
    name = next(name for name in state if "lora_B" in name)
    save_file({key: value for key, value in state.items() if key != name}, file)
    with pytest.raises(TrainError, match=rf"missing there \({re.escape(name)}\)"):
        checkpoint_weights.load(fresh, tmp_path)
    save_file({**state, f"{name}s": state[name].clone()}, file)
    with pytest.raises(TrainError, match=rf"not part of the model \({re.escape(name)}s\)"):
        checkpoint_weights.load(fresh, tmp_path)
    file.unlink()
    with pytest.raises(TrainError, match="has no adapter to load"):
        checkpoint_weights.load(fresh, tmp_path)
    with pytest.raises(TrainError, match="has no weights to load"):
        checkpoint_weights.load(build("llama"), tmp_path)
