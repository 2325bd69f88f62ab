"""`footplate merge`: the merged model is the base model with the adapter, for every kind of adapter; anything else is
an error, and leaves no model."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from parameters import soak_except
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training_runs import log_text, make_spec
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from backend.config.options import edit
from backend.export import merge as merging
from backend.export.merge import MAX_KL, MAX_KL_16_BIT, UNCHECKED, Merge
from backend.models import merge as merge_task
from backend.models import trained
from backend.runs import BASE, CERTIFICATE, LOCK, MODEL, RESOLVED, STOP, Plan, jobs
from backend.runs.folder import Run, RunError
from backend.train import model as train_model
from backend.train.patches import bitsandbytes_cpu_layout
from backend.train.run_log import RunLog, Stopped, TrainError

STRONG = {"train.learning_rate": 2e-2, "train.max_steps": 4, "save.final_model": True}
NF4 = {"method.quantization": "nf4"}
TWO = {"launch.nproc_per_node": 2, "train.per_device_train_batch_size": 1}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"lora.use_rslora": True},
    "dora": {"lora.use_dora": True},
    "pissa": {"lora.init": "pissa"},
    "olora": {"lora.init": "olora"},
    "saved modules": {"lora.modules_to_save": ("embed_tokens", "lm_head")},
    "nf4": NF4,
    "nf4 bf16": {**NF4, "precision.compute": "bf16"},
    "int8": {"method.quantization": "int8"},
    "reward": {"train.stage": "reward", "data.builtin": "train-pairs"},
    "dpo": {"train.stage": "dpo", "data.builtin": "train-pairs"},
    "ddp": {"parallel.strategy": "ddp", **TWO},
    "zero3": {"parallel.strategy": "zero3", **TWO},
    "fsdp2": {"parallel.strategy": "fsdp2", **TWO},
    "fsdp2 nf4": {"parallel.strategy": "fsdp2", **TWO, **NF4},
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
INPUT = torch.tensor([[5, 17, 250, 33, 8, 61, 99, 140]])


def merge(folder: Path, target: Path, step: int | None = None) -> dict[str, Any]:
    target.mkdir()
    return Merge(Run(folder), step, target, RunLog(target)).run_all()


@pytest.fixture(scope="module")
def adapter(fork_server: ForkServer, root: Path) -> Path:
    """A run that trained a plain adapter."""
    return fork_server.train(root / "merge-source", make_spec({**STRONG, **KINDS["lora"]}))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=INPUT).logits.float()
    return found


@pytest.mark.parametrize("kind", soak_except(KINDS, {"lora", "dora", "nf4", "reward"}))
def test_the_merged_model_is_the_trained_one(
    fork_server: ForkServer, adapter: Path, root: Path, tmp_path: Path, kind: str
) -> None:
    """Compared with peft's own loading of the adapter on the base model, on tokens that the product does not try."""
    changes = KINDS[kind]
    spec, ranks = make_spec({**STRONG, **changes}), int(changes.get("launch.nproc_per_node", 0))
    folder = adapter if kind == "lora" else fork_server.train(root / f"merge-{kind}", spec, ranks)
    found = merge(folder, tmp_path / "job")
    certificate = json.loads((tmp_path / "job" / MODEL / CERTIFICATE).read_text())
    assert certificate == found["certificate"] and certificate["base_weights"] == "the same weights as in training"
    is_reward = kind == "reward"
    auto: Any = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    config = json.loads((folder / MODEL / "adapter_config.json").read_text())
    labels: dict[str, Any] = {"num_labels": 1} if is_reward else {}
    base = auto.from_pretrained(config["base_model_name_or_path"], **labels, **quantization(changes))
    bitsandbytes_cpu_layout.apply(base)
    alone = logits(base)
    expected = logits(PeftModel.from_pretrained(base, str(folder / MODEL)))
    merged = logits(auto.from_pretrained(tmp_path / "job" / MODEL, dtype=torch.float32))
    # Quantized layers compute in their own precision; here the merged weights compute in fp32. The same merged model in
    # bf16 differs from itself in fp32 by 8% of the change.
    tolerance = 0.15 if "bf16" in kind else 0.02 if "nf4" in kind or kind == "int8" else 2e-3
    changed = float((expected - alone).abs().max())
    difference = float((merged - expected).abs().max())
    assert difference < tolerance * changed
    assert not list((tmp_path / "job").glob(f"*{UNCHECKED}*"))
    if kind == "nf4":
        assert "quantization_config" not in json.loads((tmp_path / "job" / MODEL / "config.json").read_text())
        original = auto.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32)
        wrong = logits(PeftModel.from_pretrained(original, str(folder / MODEL)).merge_and_unload())
        assert float((wrong - expected).abs().max()) > 2 * difference, "a merge on the original weights"


def test_a_merge_in_16_bits_and_its_files(fork_server: ForkServer, tiny: Path, root: Path, tmp_path: Path) -> None:
    """The merged model has the dtype of the base model's files, and the files that transformers does not save."""
    base = Path(shutil.copytree(tiny, tmp_path / "base"))
    path = base / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (base / "tokenizer.model").write_bytes(b"sentencepiece")
    spec = make_spec({**STRONG, "model.source": "path", "model.path": str(base)})
    folder = fork_server.train(root / "merge-16-bits", spec)
    certificate = merge(folder, tmp_path / "job")["certificate"]
    assert certificate["dtype"] == "bf16"
    assert certificate["adapter_to_merged_fp32"]["kl_mean"] <= MAX_KL < certificate["adapter_to_saved"]["kl_mean"] * 1e3
    assert 0 < certificate["adapter_to_saved"]["kl_mean"] <= MAX_KL_16_BIT
    saved = tmp_path / "job" / MODEL
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(saved / "model.safetensors").values())
    assert (saved / "tokenizer.model").read_bytes() == b"sentencepiece"
    for name in ("generation_config.json", "chat_template.jinja"):
        kept = (saved / name).read_text(), (folder / MODEL / name).read_text()
        assert kept[0] == kept[1] if name.endswith("jinja") else json.loads(kept[0]) == json.loads(kept[1])


def quantization(changes: dict[str, Any]) -> dict[str, Any]:
    kind = changes.get("method.quantization")
    if kind == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    if kind != "nf4":
        return {"dtype": torch.float32}
    dtype = torch.bfloat16 if changes.get("precision.compute") == "bf16" else torch.float32
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": four_bit, "dtype": dtype}


def test_shared_weights_with_an_adapter_on_one_of_their_layers(tmp_path: Path) -> None:
    """Merged in place, the change of the embedding would reach the head too."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=260, tie_word_embeddings=True, **sizes)
    for target in ("embed_tokens", "lm_head"):
        lora = LoraConfig(r=4, target_modules=[target, "q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        adapted = get_peft_model(LlamaForCausalLM(config), lora)
        expected = logits(adapted)
        merged = merging.merge(adapted)
        merged.save_pretrained(tmp_path / target)
        reloaded = LlamaForCausalLM.from_pretrained(tmp_path / target)
        assert torch.allclose(logits(reloaded), expected, atol=1e-4), target


def with_adapter(source: Path, folder: Path, change: Any) -> Path:
    """A copy of a run whose adapter's tensors are those of `change(tensors)`."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoints"))
    path = folder / MODEL / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


DAMAGE = {
    "renamed": (lambda t: {name.replace("q_proj", "w_proj"): v for name, v in t.items()}, "does not fit"),
    "one missing": (lambda t: dict(list(t.items())[:-1]), "does not fit"),
    "one too many": (lambda t: {**t, "base_model.model.extra.lora_A.weight": torch.ones(2, 2)}, "does not fit"),
    "nothing": (lambda t: {n: v * 0 for n, v in t.items()}, "too small to verify"),
    "not finite": (lambda t: {n: v * float("nan") for n, v in t.items()}, "NaN or infinity"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_adapter_is_refused(adapter: Path, tmp_path: Path, damage: str) -> None:
    change, message = DAMAGE[damage]
    folder = with_adapter(adapter, tmp_path / "run", change)
    with pytest.raises(TrainError, match=message):
        merge(folder, tmp_path / "job")
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["progress.json"]


def test_other_base_weights_are_refused(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of the base model in the same folder has the same shapes. Without a record nobody can tell."""
    base = tmp_path / "base"
    shutil.copytree(json.loads((adapter / BASE).read_text())["name"], base)
    path = base / "model.safetensors"
    save_file({n: v + 0.01 * torch.randn_like(v) for n, v in load_file(path).items()}, path, metadata={"format": "pt"})
    other = train_model.ModelSource(str(base), {"local_files_only": True})
    monkeypatch.setattr(train_model, "locate", lambda *_: other)
    with pytest.raises(TrainError, match="are not those that this run was trained on"):
        merge(adapter, tmp_path / "job")
    assert not (tmp_path / "job" / MODEL).exists()
    older = tmp_path / "older"
    shutil.copytree(adapter, older)
    (older / BASE).unlink()
    assert merge(older, tmp_path / "unknown")["certificate"]["base_weights"].startswith("not checked")


def test_a_resume_on_other_base_weights_is_refused(
    fork_server: ForkServer, adapter: Path, root: Path, tmp_path: Path
) -> None:
    """Frozen weights are not in the checkpoint of an adapter."""
    base = tmp_path / "base"
    shutil.copytree(json.loads((adapter / BASE).read_text())["name"], base)
    changes = {"model.source": "path", "model.path": str(base), "save.strategy": "steps", "save.steps": 2}
    folder = fork_server.train(root / "merge-resumed", make_spec({**STRONG, **changes, "save.total_limit": 5}))
    fork_server.resume(folder, 2)
    path = base / "model.safetensors"
    save_file({name: 1.01 * value for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
    shutil.rmtree(folder / "checkpoints/checkpoint-4")
    assert fork_server.run(folder) != 0
    assert "has other weights than those that checkpoint-2 was trained with" in log_text(folder)


@pytest.mark.parametrize("fault", ["a head of zeros", "another layer", "a tensor less"])
def test_a_wrong_saved_model_is_deleted(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    original = train_model.save

    def save(model: Any, tokenizer: Any, folder: Path, *arguments: Any) -> None:
        original(model, tokenizer, folder, *arguments)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = next(n for n in tensors if ("lm_head" if "head" in fault else "mlp.up_proj") in n)
        if "less" in fault:
            del tensors[name]
        else:
            tensors[name] = tensors[name] * 0
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(train_model, "save", save)
    with pytest.raises(TrainError, match=r"differs from the trained one|not loaded completely|NaN or infinity"):
        merge(adapter, tmp_path / "job")
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["progress.json"]


def test_stop_and_errors_before_the_start(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / STOP).write_text("discard")
    with pytest.raises(Stopped):
        Merge(Run(adapter), None, tmp_path / "job", RunLog(tmp_path / "job")).run_all()
    with pytest.raises(RunError, match="no weights of checkpoint 7"):
        merge_task.start(Run(adapter), 7)
    full = Run.create(tmp_path, "full", Plan(("true",)), datetime.now())
    (full.path / MODEL).mkdir()
    for name, text in (("config.json", "{}"), ("tokenizer_config.json", "{}"), ("model.safetensors", "")):
        (full.path / MODEL / name).write_text(text)
    with pytest.raises(RunError, match="there is no adapter to merge"):
        merge_task.start(full, None)


def test_the_process_of_a_job(fork_server: ForkServer, adapter: Path) -> None:
    """As a supervisor starts it, without its own import of the libraries."""
    job = jobs.create(Run(adapter), jobs.MERGE, {"step": None}, {}, {})
    (job.path / LOCK).touch()
    (job.path / "run_it.py").write_text("from backend.export.__main__ import main\nmain()\n")
    assert fork_server.run(job.path, script=str(job.path / "run_it.py")) == 0, log_text(job.path)
    assert job.result()["model"] == MODEL and job.result()["seconds"] > 0 and "Merging." in log_text(job.path)
    found = trained.find(job)
    assert found and not found.base and merge_task.start(Run(adapter), None).id == job.id


@pytest.mark.parametrize("init", soak_except(("pissa", "pissa_fast"), ("pissa_fast",)))
def test_a_checkpoint_of_a_decomposed_initialization(
    fork_server: ForkServer, root: Path, tmp_path: Path, init: str
) -> None:
    """It belongs to the residual of the base weights, which peft computes again; pissa_fast by a random search."""
    spec = edit(make_spec({**STRONG, "lora.init": init}), {"save.strategy": "steps", "save.steps": 4})
    folder = fork_server.train(root / f"merge-checkpoint-{init}", spec)
    assert [model.step for model in trained.models(Run(folder))] == [None, 4]
    final, checkpoint = merge(folder, tmp_path / "final"), merge(folder, tmp_path / "checkpoint", 4)
    assert checkpoint["certificate"]["step"] == 4 and final["certificate"]["step"] is None
    pair = [logits(AutoModelForCausalLM.from_pretrained(tmp_path / n / MODEL)) for n in ("final", "checkpoint")]
    assert torch.allclose(*pair, atol=1e-3)
    if init == "pissa_fast":
        resolved = json.loads((folder / RESOLVED).read_text())
        (folder / RESOLVED).write_text(json.dumps({**resolved, "device": "cuda"}))
        with pytest.raises(TrainError, match="only cuda, on which it was trained, gives the same result again"):
            merge(folder, tmp_path / "elsewhere", 4)
