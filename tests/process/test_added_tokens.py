"""Tokens that a run adds to the vocabulary: their embeddings are trained, saved, resumed and loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import pytest
import torch
from fork_server import ForkServer
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import AddedToken
from training_runs import REORDERING_TOLERANCE, ignore_progress, log_text, losses, make_spec, result, same_losses
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from backend.export import loading, merge
from backend.inspect import inspect_inputs
from backend.runs import MODEL
from backend.train import adapters, added_tokens, lora, model
from backend.train.run_log import TrainError

END, TOOL = "<|end|>", "<tool>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# transformers 5.23 deprecates what peft 0.21 asks for.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
STEPS, COUNT = 4, 6
TOKENS: dict[str, Any] = {"data.add_special_tokens": (END,), "data.add_tokens": (TOOL,)}
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64},
    "phi": {},
}


def answer(number: int) -> str:
    return f"{TOOL}At {number} o'clock."


def base(tiny: Path, folder: Path, kind: str) -> Path:
    """A model whose embeddings have exactly one row for each token of its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **SIZES, **KINDS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def options(root: Path, tiny: Path) -> dict[str, Any]:
    """The options of a training of all examples in each step, with the last validation set in a file of its own."""
    for name, first in (("train", 0), ("validation", COUNT)):
        turns = [
            [{"role": "user", "content": f"Train {n}?"}, {"role": "assistant", "content": answer(n)}]
            for n in range(first, first + COUNT)
        ]
        (root / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    (root / "template.jinja").write_text(TEMPLATE)
    return {
        **TOKENS, "model.source": "path", "data.source": "files", "data.files": (str(root / "train.jsonl"),),
        "data.validation": "files", "data.validation_files": (str(root / "validation.jsonl"),),
        "data.max_samples": 0, "data.chat_template": "file", "data.chat_template_file": str(root / "template.jinja"),
        "train.per_device_train_batch_size": COUNT, "train.lr_scheduler_type": "constant", "train.warmup_steps": 0,
        "train.weight_decay": 0.0, "train.max_steps": STEPS, "train.learning_rate": 0.01, "save.strategy": "steps",
        "save.steps": 2, "save.final_model": True, "eval.strategy": "steps", "eval.steps": STEPS,
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(options: dict[str, Any], root: Path, tiny: Path, fork_server: ForkServer) -> dict[str, Path]:
    """A run with LoRA on untied embeddings, and a full fine-tuning of tied ones."""
    found = {}
    for method, kind in (("lora", "llama"), ("full", "qwen2")):
        folder = base(tiny, root / kind, kind)
        spec = make_spec({**options, "model.path": str(folder), "method.kind": method})
        found[method] = fork_server.train(root / method, spec)
    return found


def batch(tokenizer: Any, first: int) -> dict[str, torch.Tensor]:
    """The examples from the number `first` on, padded, with the loss on the answers and what ends them."""
    sequences = []
    for n in range(first, first + COUNT):
        prompt = f"user: Train {n}?{END}\nassistant: "
        encoded = tokenizer(f"{prompt}{answer(n)}{END}\n", return_offsets_mapping=True, add_special_tokens=False)
        starts = [start for start, _ in encoded["offset_mapping"]]
        labels = [i if s >= len(prompt) else -100 for i, s in zip(encoded["input_ids"], starts, strict=True)]
        sequences.append((torch.tensor(encoded["input_ids"]), torch.tensor(labels)))
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = (pad([each[n] for each in sequences], True, value) for n, value in enumerate((0, -100)))
    mask = pad([torch.ones_like(each) for each, _ in sequences], True, 0)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def tokens_of(folder: Path) -> Any:
    """The tokenizer in `folder` with the two tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(END, special=True, normalized=False), AddedToken(TOOL, normalized=False)])
    return tokenizer


def own_training(folder: Path, method: str) -> tuple[list[float], float, Any]:
    """(losses of the steps, loss of the validation set, model) of a loop with transformers and peft alone."""
    tokenizer = tokens_of(folder)
    set_seed(42)
    own: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = torch.get_rng_state()
    torch.manual_seed(added_tokens.SEED)
    own.resize_token_embeddings(len(tokenizer))
    torch.set_rng_state(state)
    if method == "lora":
        ids = sorted(tokenizer.convert_tokens_to_ids([END, TOOL]))
        rows = {"model.embed_tokens": ids, "lm_head": ids}
        config = LoraConfig(
            task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear", trainable_token_indices=rows
        )
        own = get_peft_model(own, config)
    parameters = [p for p in own.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)
    examples, found = batch(tokenizer, 0), []
    for _ in range(STEPS):
        loss = own(**examples).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    with torch.no_grad():
        return found, float(own(**batch(tokenizer, COUNT)).loss), own


@pytest.mark.parametrize("method", ["lora", "full"])
def test_losses_are_those_of_an_independent_loop(trained: dict[str, Path], root: Path, method: str) -> None:
    own, evaluated, _ = own_training(root / {"lora": "llama", "full": "qwen2"}[method], method)
    run = trained[method]
    assert losses(run) == same_losses(dict(enumerate(own, 1)), REORDERING_TOLERANCE)
    assert result(run)["eval_loss"] == same_losses(evaluated, REORDERING_TOLERANCE)
    assert own[-1] < own[0] - 0.5


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_saved_model_is_the_one_that_was_evaluated(trained: dict[str, Path], method: str) -> None:
    """Loaded as Footplate's code on the page does, without anything of Footplate."""
    folder = trained[method] / MODEL
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind: Any = AutoPeftModelForCausalLM if method == "lora" else AutoModelForCausalLM
    loaded = kind.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        found = float(loaded(**batch(tokenizer, COUNT)).loss)
    assert found == same_losses(result(trained[method])["eval_loss"], REORDERING_TOLERANCE)
    assert tokenizer.eos_token == END and loaded.get_input_embeddings().weight.shape[0] == len(tokenizer)
    assert tokenizer.decode(tokenizer(TOOL + END)["input_ids"], skip_special_tokens=True) == TOOL
    if method == "full":
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_an_adapter_has_the_new_rows_and_merges(trained: dict[str, Path], root: Path, tiny: Path) -> None:
    """It has no other row of the embeddings; merged, the other rows are those of the base model."""
    run, source = trained["lora"], model.ModelSource(str(root / "llama"), {"local_files_only": True})
    for folder in (run / MODEL, run / "checkpoints/checkpoint-2"):
        tensors = load_file(folder / "adapter_model.safetensors")
        rows = {name: tuple(tensor.shape) for name, tensor in tensors.items() if ".lora_" not in name}
        assert sorted(rows.values()) == [(2, 64), (2, 64)] and all("trainable_tokens" in name for name in rows)
    spec = make_spec({**TOKENS, "model.source": "path", "model.path": source.name})
    tokenizer = model.load_saved_tokenizer(spec, run / MODEL)
    adapted = loading.load_adapter(model.load(spec, source, "fp32", tokenizer, frozen=True), run / MODEL)
    examples = batch(tokenizer, 0)
    with torch.no_grad():
        expected = adapted(**examples).logits
        merged = merge.merge(adapted)
        assert torch.allclose(merged(**examples).logits, expected, atol=1e-4)
    original: Any = AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.float32)
    count = original.config.vocab_size
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        now, before = (getattr(each, layer)().weight for each in (merged, original))
        assert now.shape[0] == count + 2 and torch.equal(now[:count], before)


def test_a_resumed_run_is_equal_bit_by_bit(trained: dict[str, Path], root: Path, fork_server: ForkServer) -> None:
    run = Path(shutil.copytree(trained["lora"], root / "resumed"))
    shutil.rmtree(run / MODEL)
    fork_server.resume(run, 2)
    before, after = (load_file(each / MODEL / "adapter_model.safetensors") for each in (trained["lora"], run))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert result(run)["eval_loss"] == result(trained["lora"])["eval_loss"]


def test_the_check_knows_the_parameters(options: dict[str, Any], trained: dict[str, Path], root: Path) -> None:
    """The rows that are trained count, and those that the embeddings get."""
    from backend.modelspec import all_parameters, trainable_parameters  # noqa: PLC0415

    for method, kind in (("lora", "llama"), ("full", "qwen2")):
        spec = make_spec({**options, "model.path": str(root / kind), "method.kind": method})
        size = len(AutoTokenizer.from_pretrained(trained[method] / MODEL))
        shape = inspect_inputs(spec, root).shape
        assert shape is not None
        grown, found = shape.with_vocabulary(size), result(trained[method])
        assert trainable_parameters(spec, grown) == found["trainable_parameters"]
        assert all_parameters(spec, grown) == found["parameters"]


@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox", "gemma2"])
def test_rows_of_other_architectures(tiny: Path, tmp_path: Path, kind: str) -> None:
    """Tied embeddings stay tied, and share their rows."""
    folder = base(tiny, tmp_path / "base", kind)
    spec = make_spec({**TOKENS, "model.source": "path", "model.path": str(folder)})
    source = model.locate(spec, ignore_progress)
    tokenizer = model.load_tokenizer(spec, source)
    whole = model.load(spec, source, "fp32", tokenizer)
    adapted = adapters.apply_method(spec, whole, "fp32", "cpu", added_tokens.ids(spec, tokenizer))
    rows = [p for name, p in adapted.named_parameters() if "trainable_tokens" in name and p.requires_grad]
    assert len(rows) == (2 if kind == "gpt_neox" else 1)
    for parameter in rows:
        parameter.data += 0.5
    examples = batch(tokenizer, 0)
    adapted.eval()
    with torch.no_grad():
        expected = adapted(**examples).logits
    model.save(adapted, tokenizer, tmp_path / MODEL, torch.float32)
    loaded: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / MODEL).eval()
    with torch.no_grad():
        assert torch.equal(loaded(**examples).logits, expected)
        merged = merge.merge(loaded)
        assert torch.allclose(merged(**examples).logits, expected, atol=1e-4)
    is_tied = merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert is_tied == (kind != "gpt_neox")


@pytest.mark.parametrize("kind", ["qwen2", "gpt_neox"])
def test_rows_of_the_reference_are_not_trained(tiny: Path, tmp_path: Path, kind: str) -> None:
    """TRL adds a second adapter for DPO and KTO; with DDP, each trainable parameter needs a gradient. A reference model
    has no trainable weights, of which FSDP2 wants one dtype."""
    spec = make_spec({**TOKENS, "model.source": "path", "model.path": str(base(tiny, tmp_path / "base", kind))})
    source = model.locate(spec, ignore_progress)
    tokenizer = model.load_tokenizer(spec, source)
    whole = model.load(spec, source, "bf16", tokenizer)
    adapted = adapters.apply_method(spec, whole, "bf16", "cpu", added_tokens.ids(spec, tokenizer))
    adapted.add_adapter("ref", adapted.peft_config["default"])
    assert not [name for name, p in adapted.named_parameters() if ".ref" in name and p.requires_grad]
    assert [name for name, p in adapted.named_parameters() if "trainable_tokens" in name and p.requires_grad]
    assert not any(p.requires_grad for p in model.load(spec, source, "bf16", tokenizer, frozen=True).parameters())


def test_an_output_layer_with_a_bias_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = base(tiny, tmp_path / "base", "phi")
    spec = make_spec({**TOKENS, "model.source": "path", "model.path": str(folder)})
    whole: Any = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TrainError, match=r"lm_head has a bias.*Add lm_head to lora\.modules_to_save"):
        adapters.lora_config(spec, whole, [5])
    saved = make_spec({**TOKENS, "lora.modules_to_save": ("lm_head", "embed_tokens")})
    assert adapters.lora_config(saved, whole, [5]).trainable_token_indices is None


def test_an_adapter_with_other_rows_is_refused(tmp_path: Path) -> None:
    """The error says what to set: tokens, since the options have no ids."""
    saved, own = (LoraConfig(trainable_token_indices={"embed_tokens": [number]}) for number in (5, 6))
    saved.save_pretrained(str(tmp_path))
    with pytest.raises(TrainError, match=r"\[5\].*\[6\].*data\.add_tokens to the tokens with these ids"):
        lora.check_adapter(SimpleNamespace(peft_config={"default": own}), tmp_path, "lora.adapter_path")


def test_a_tokenizer_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Added tokens get rows, and no others."""
    folder = base(tiny, tmp_path / "base", "qwen2")
    spec = make_spec({**TOKENS, "model.source": "path", "model.path": str(folder)})
    source = model.locate(spec, ignore_progress)
    tokenizer = model.load_tokenizer(spec, source)
    tokenizer.add_tokens(["<another>"])
    with pytest.raises(TrainError, match="they do not belong together"):
        model.load(spec, source, "fp32", tokenizer)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_strategies(
    options: dict[str, Any], trained: dict[str, Path], root: Path, fork_server: ForkServer, strategy: str
) -> None:
    """On two ranks, with half of the batch each."""
    more = {"parallel.strategy": strategy, "train.per_device_train_batch_size": COUNT // 2}
    for method, kind in (("lora", "llama"), ("full", "qwen2")):
        if method == "lora" and strategy == "zero3":  # refused by rule MTH012
            continue
        spec = make_spec({**options, **more, "model.path": str(root / kind), "method.kind": method})
        run = fork_server.train(root / f"{method}-{strategy}", spec, 2)
        assert losses(run) == same_losses(losses(trained[method]), REORDERING_TOLERANCE), log_text(run)


@pytest.mark.filterwarnings("ignore")
def test_tokens_that_are_routed_by_their_id(tmp_path: Path) -> None:
    """DeepSeek V4 has a table with the experts of each token. Before, a new token was beyond its end."""
    trained = architectures.build("deepseek_v4").eval()
    rows = trained.get_input_embeddings().num_embeddings
    vocabulary = {str(number): number for number in range(rows)} | {TOOL: rows}
    tokens = SimpleNamespace(get_vocab=lambda: vocabulary)
    added_tokens.fit_embeddings(make_spec({"data.add_tokens": (TOOL,)}), trained, tokens)
    ids = torch.tensor([[5, rows, 6]])
    logits = trained(input_ids=ids, use_cache=False).logits
    trained.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.allclose(saved(input_ids=ids, use_cache=False).logits, logits, atol=1e-5)
