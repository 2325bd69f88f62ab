"""Quantized base models: stored bytes, losses compared with unquantized training, and saved adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from parameters import soak_except
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from training_runs import REORDERING_TOLERANCE, log_text, losses, make_spec, result, same_losses
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MiniCPM3Config, MixtralConfig, MixtralForCausalLM
from untrained_models import memory_context, untrained_model

from backend import registry
from backend.machine import Machine
from backend.memory.estimate import device_peak
from backend.modelspec import from_config
from backend.preflight import preflight
from backend.train.patches import bitsandbytes_cpu_layout, bitsandbytes_int8_inputs, bitsandbytes_int8_reload

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TINY = from_config(registry.BUILTIN_MODELS["tiny-llama"].config)
FAST_LR = {"train.lr_scheduler_type": "constant", "train.per_device_train_batch_size": 2, "train.learning_rate": 3e-3}
PER_RANK = {**FAST_LR, "train.per_device_train_batch_size": 1}
SAVING = {"save.strategy": "steps", "save.steps": 2, "save.total_limit": 0, "save.final_model": True}
NF4, INT8 = {"method.quantization": "nf4"}, {"method.quantization": "int8"}
DORA = {"lora.use_dora": True}


@pytest.fixture(scope="module")
def unquantized_losses(root: Path, fork_server: ForkServer) -> dict[int, float]:
    """The losses with unquantized weights."""
    return losses(fork_server.train(root / "plain", make_spec(FAST_LR)))


@pytest.fixture(scope="module")
def nf4_run(root: Path, fork_server: ForkServer) -> Path:
    return fork_server.train(root / "four", make_spec({**FAST_LR, **NF4, **SAVING, "train.max_steps": 4}))


def scale_bytes(module: Any) -> int:
    """Bytes of the scales that a quantized layer stores in addition to its weights."""
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return int(module.weight.SCB.nbytes)
    second = state.state2
    tensors = [state.absmax, state.code, *((second.absmax, second.code, state.offset) if state.nested else ())]
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("kind", "name"), [("nf4", "Linear4bit"), ("fp4", "Linear4bit"), ("int8", "Linear8bitLt")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_estimate_matches_the_stored_bytes(cache: Path, kind: str, name: str, double: bool, precision: str) -> None:
    changes = {
        "method.quantization": kind,
        "method.bnb_4bit_use_double_quant": double,
        "precision.compute": precision,
    }
    model = untrained_model(changes, precision)
    bases = [m.base_layer for _, m in model.named_modules() if hasattr(m, "base_layer")]
    assert len(bases) == 4 * 7
    assert {type(base).__name__ for base in bases} == {name}
    assert {base.weight.dtype for base in bases} == {torch.uint8 if name == "Linear4bit" else torch.int8}
    rows = {row.name: row.bytes for row in device_peak(memory_context(make_spec(changes), TINY))[0]}
    assert rows["Quantized parameters"] == sum(base.weight.nbytes for base in bases)
    assert rows["Quantization scales"] == sum(map(scale_bytes, bases))
    weights = sum(base.in_features * base.out_features for base in bases)
    assert rows["Quantized parameters"] == weights // (2 if name == "Linear4bit" else 1)
    if kind != "int8" and double:
        assert rows["Quantization scales"] < weights * 0.127 / 8 + 28 * 2048, "0.127 bits per weight, and lookup tables"
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert rows["Quantized parameters"] + rows["Frozen parameters"] == frozen


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp32", NF4),
        ("bf16", INT8),
        pytest.param("fp32", INT8, marks=pytest.mark.soak),
        pytest.param("bf16", NF4, marks=pytest.mark.soak),
    ],
    ids=["fp32-nf4", "bf16-int8", "fp32-int8", "bf16-nf4"],
)
def test_losses_are_close_to_unquantized_training(
    root: Path, fork_server: ForkServer, unquantized_losses: dict[int, float], changes: dict[str, Any], precision: str
) -> None:
    more = {**changes, "precision.compute": precision}
    actual = losses(
        fork_server.train(root / f"one-{changes['method.quantization']}-{precision}", make_spec({**FAST_LR, **more}))
    )
    assert actual == pytest.approx(unquantized_losses, abs=0.05)
    assert actual != same_losses(unquantized_losses), "nothing was quantized"


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        pytest.param(NF4, "ddp", marks=pytest.mark.soak),
        pytest.param(INT8, "ddp", marks=pytest.mark.soak),
        pytest.param(NF4, "zero2", marks=pytest.mark.soak),
        (NF4, "zero3"),
        pytest.param(NF4, "fsdp2", marks=pytest.mark.soak),
        pytest.param({**INT8, **DORA}, "ddp", marks=pytest.mark.soak),
        pytest.param({**NF4, **DORA}, "zero3", marks=pytest.mark.soak),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_strategies_match_one_process(
    root: Path, fork_server: ForkServer, changes: dict[str, Any], strategy: str
) -> None:
    kind = "-".join(map(str, changes.values()))
    single = fork_server.train(root / f"alone-{kind}-{strategy}", make_spec({**FAST_LR, **changes}))
    more = {**PER_RANK, **changes, "parallel.strategy": strategy}
    two_ranks = fork_server.train(root / f"two-{kind}-{strategy}", make_spec(more), 2)
    assert losses(two_ranks) == same_losses(losses(single), REORDERING_TOLERANCE)
    local_parameters = [rank["local_parameters"] for rank in result(two_ranks)["ranks"]]
    if registry.STRATEGIES[strategy].shards_weights:
        # In fp32 elements, a 4-bit weight counts an eighth; each rank has half of all.
        quantized = sum(
            leaf.in_features * leaf.out_features
            for leaf in TINY.all_modules()
            if leaf.in_features and leaf.path != TINY.head
        )
        rest = TINY.parameters - quantized + result(two_ranks)["trainable_parameters"]
        assert local_parameters == pytest.approx([(quantized / 8 + rest) / 2] * 2, rel=0.01)


FP4 = {"method.quantization": "fp4", "method.bnb_4bit_use_double_quant": False, "precision.compute": "bf16"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("changes", "ranks"),
    [(NF4, 2), (FP4, 3)],
    ids=["nf4-2", "fp4-bf16-3"],
)
def test_fsdp2_sends_quantized_weights_from_rank_0(
    root: Path, fork_server: ForkServer, changes: dict[str, Any], ranks: int
) -> None:
    """No other rank reads the weights, and each keeps its share of the base model, not a view of all of it."""
    kind, batch = changes["method.quantization"], {"train.per_device_train_batch_size": ranks}
    single = fork_server.train(root / f"sent-{kind}", make_spec({**FAST_LR, **changes, **batch}))
    more = {**PER_RANK, **changes, "parallel.strategy": "fsdp2", "launch.nproc_per_node": ranks}
    sharded = fork_server.train(root / f"sent-{kind}-{ranks}", make_spec(more), ranks)
    close = 1e-3 if changes is FP4 else REORDERING_TOLERANCE  # bf16 rounds the output of each layer
    assert losses(sharded) == same_losses(losses(single), close)
    whole = result(single)["ranks"][0]
    found = result(sharded)["ranks"]
    assert [rank["loaded_bytes"] for rank in found] == [whole["loaded_bytes"], *[0] * (ranks - 1)]
    share = whole["local_storage_bytes"] / ranks
    assert [rank["local_storage_bytes"] for rank in found] == pytest.approx([share] * ranks, rel=0.02)
    assert "Every rank reads the weights" not in log_text(sharded)


@pytest.mark.soak
@pytest.mark.parametrize("more", [DORA, {"parallel.extra_config": '{"cpu_ram_efficient_loading": false}'}])
def test_every_rank_reads_quantized_weights(root: Path, fork_server: ForkServer, more: dict[str, Any]) -> None:
    """DoRA needs the norms of the weights before they are sharded."""
    spec = make_spec({**PER_RANK, **NF4, **more, "parallel.strategy": "fsdp2", "launch.nproc_per_node": 2})
    found = result(fork_server.train(root / f"read-{next(iter(more))}", spec, 2))["ranks"]
    assert found[0]["loaded_bytes"] == found[1]["loaded_bytes"] > 0
    assert found[0]["local_storage_bytes"] == pytest.approx(found[0]["loaded_bytes"] / 2, rel=0.01)


@pytest.mark.soak
@pytest.mark.parametrize("state_dict", ["full", "sharded"])
def test_sharded_quantized_run_resumes_and_saves_its_adapter(
    root: Path, fork_server: ForkServer, nf4_run: Path, state_dict: str
) -> None:
    more = {**PER_RANK, **NF4, **SAVING, "train.max_steps": 4, "parallel.state_dict_type": state_dict}
    spec = make_spec({**more, "parallel.strategy": "fsdp2", "launch.nproc_per_node": 2})
    folder = fork_server.train(root / f"resumed-{state_dict}", spec, 2)
    before = losses(folder)
    assert before == same_losses(losses(nf4_run), REORDERING_TOLERANCE)
    fork_server.resume(folder, 2, 2)
    assert losses(folder) == same_losses(before)
    saved, expected = (load_file(run / "model/adapter_model.safetensors") for run in (folder, nf4_run))
    assert saved.keys() == expected.keys()
    differences = [(saved[name] - expected[name]).abs().max() for name in saved]
    assert max(differences) < 2e-3 < max(tensor.abs().max() for tensor in saved.values())


def test_experts_are_not_quantized(tmp_path: Path) -> None:
    """transformers stores them as stacked parameters, bitsandbytes quantizes nn.Linear only. The estimate agrees."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 4}
    config = MixtralConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, dtype=torch.bfloat16)
    quantized = {name for name, p in model.named_parameters() if type(p).__name__ == "Params4bit"}
    assert {name.split(".")[-3] for name in quantized} == {"self_attn"}
    experts = sum(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    assert experts == 2 * 4 * (3 * 64 * 128) * 2, "layers, experts, weights, bytes"
    changes = {**NF4, "precision.compute": "bf16", "lora.targets": "attention"}
    shape = from_config(config.to_dict())
    assert shape is not None
    rows = {row.name: row.bytes for row in device_peak(memory_context(make_spec(changes), shape))[0]}
    assert rows["Quantized parameters"] == sum(p.nbytes for n, p in model.named_parameters() if n in quantized)
    assert rows["Frozen parameters"] == sum(p.nbytes for n, p in model.named_parameters() if n not in quantized)


@pytest.mark.soak
@pytest.mark.parametrize("changes", [NF4, INT8], ids=["nf4", "int8"])
def test_dora_losses_are_close_to_unquantized_training(
    root: Path, fork_server: ForkServer, changes: dict[str, Any]
) -> None:
    more = {**FAST_LR, **DORA}
    expected = losses(fork_server.train(root / f"plain-{changes['method.quantization']}", make_spec(more)))
    actual = losses(fork_server.train(root / f"dora-{changes['method.quantization']}", make_spec({**more, **changes})))
    assert actual == pytest.approx(expected, abs=0.05)


def test_adapters_are_saved_in_fp32(nf4_run: Path) -> None:
    state = load_file(nf4_run / "model/adapter_model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in state.values())


def test_saved_adapter_loads(nf4_run: Path, cache: Path) -> None:
    """On the quantized base model it was trained with, and on the unquantized one."""
    rows = torch.arange(3, 60)[None]

    def logits(**more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        base = AutoModelForCausalLM.from_pretrained(cache / "models/tiny-llama", dtype=torch.float32, **more)
        model_ = base.train()  # bitsandbytes rewrites 4-bit weights for evaluation on some CPUs
        with torch.no_grad():
            before = model_(rows).logits
            return before, PeftModel.from_pretrained(base, nf4_run / "model").train()(rows).logits

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    before, after = logits(quantization_config=config)
    assert not torch.allclose(before, after, atol=0.1)
    _, unquantized = logits()
    learned, difference = (after - before).norm(), (unquantized - after).norm()
    assert difference < learned


def test_resumes_from_its_checkpoint(nf4_run: Path, fork_server: ForkServer) -> None:
    before = losses(nf4_run)
    fork_server.resume(nf4_run, 2)
    assert losses(nf4_run) == same_losses(before)


def test_evaluation_and_generation_do_not_change_the_losses(root: Path, fork_server: ForkServer, nf4_run: Path) -> None:
    """Evaluation and generation before training leave the quantized weights unchanged."""
    more = {"eval.strategy": "steps", "eval.steps": 1, "eval.num_generations": 2, "eval.max_new_tokens": 4}
    folder = fork_server.train(root / "evaluated", make_spec({**FAST_LR, **NF4, **more, "train.max_steps": 4}))
    assert losses(folder) == same_losses(losses(nf4_run))
    assert len(result(folder)["samples"]) == 2


@pytest.fixture(scope="module")
def fp8_model(cache: Path, root: Path) -> Path:
    """The tiny model as an FP8 checkpoint: 8-bit weights with a scale per block of 32 x 32."""
    folder = root / "fp8"
    shutil.copytree(cache / "models/tiny-llama", folder)
    state = load_file(folder / "model.safetensors")
    for name in [n for n in state if n.endswith("_proj.weight")]:
        weight = state[name]
        rows, columns = weight.shape[0] // 32, weight.shape[1] // 32
        blocks = weight.reshape(rows, 32, columns, 32)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        state[name] = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scale.float()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", soak_except(["lora", "full"], ("lora",)))
def test_fp8_checkpoint_is_dequantized_and_trained(
    root: Path, fork_server: ForkServer, cache: Path, fp8_model: Path, kind: str
) -> None:
    more = {**FAST_LR, "method.kind": kind, "train.learning_rate": 1e-3}
    fp8_run = fork_server.train(
        root / f"fp8-{kind}", make_spec({**more, "model.source": "path", "model.path": str(fp8_model)})
    )
    reference = fork_server.train(root / f"fp8-{kind}-plain", make_spec(more))
    assert losses(fp8_run) == pytest.approx(losses(reference), abs=0.02)
    assert losses(fp8_run) != same_losses(losses(reference)), "nothing was quantized"


def test_unsupported_quantization_formats_are_refused(root: Path, fork_server: ForkServer, cache: Path) -> None:
    for kind, option in (("quark", "model.path"), ("gptq", "model.path")):
        folder = root / kind
        shutil.copytree(cache / "models/tiny-llama", folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": 128}
        (folder / "config.json").write_text(json.dumps(config))
        write_run(root / f"refused-{kind}", make_spec({"model.source": "path", "model.path": str(folder)}))
        assert fork_server.run(root / f"refused-{kind}") == 1
        last_line = log_text(root / f"refused-{kind}").strip().splitlines()[-1]
        assert option in last_line and last_line.endswith("]"), last_line


@pytest.fixture(scope="module")
def prequantized_model(cache: Path, root: Path) -> Path:
    """The tiny model as a published 4-bit bitsandbytes checkpoint."""
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    source, folder = cache / "models/tiny-llama", root / "prequantized"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, device_map={"": "cpu"})
    model.save_pretrained(folder)
    return folder


def test_prequantized_model_trains_with_dora(root: Path, fork_server: ForkServer, prequantized_model: Path) -> None:
    more = {**FAST_LR, "model.source": "path", "model.path": str(prequantized_model), "lora.use_dora": True}
    losses_ = list(losses(fork_server.train(root / "prequantized-dora", make_spec(more))).values())
    assert losses_[-1] < losses_[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora.init", "orthogonal"),
        ("precision.compute", "fp8"),
        ("lora.modules_to_save", ("up_proj",)),
        ("save.merge_adapter", True),
    ],
)
def test_prequantized_model_rejects_these_options(
    root: Path, fork_server: ForkServer, prequantized_model: Path, field: str, value: Any
) -> None:
    """The preflight rules reject them, and so does the trainer, with its own error."""
    more = {"model.source": "path", "model.path": str(prequantized_model), "save.final_model": True, field: value}
    folder = root / f"prequantized-{field}"
    write_run(folder, make_spec(more))
    assert any(f.level == "error" and field in f.fields for f in preflight(make_spec(more), Machine(), root).findings)
    assert fork_server.run(folder) == 1
    assert log_text(folder).strip().splitlines()[-1].startswith(field)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_olora_changes_a_quantized_model_before_training(tiny: Path, kind: str) -> None:
    """By as much as the quantization itself: rule QNT002 refuses it."""
    as_int8, as_4bit = (
        BitsAndBytesConfig(load_in_8bit=True),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32),
    )

    def load(**options: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, **options)
        bitsandbytes_cpu_layout.apply(model)
        return model

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.eval()(torch.arange(3, 60)[None]).logits.float()
        return found

    quantization = {"quantization_config": as_int8 if kind == "int8" else as_4bit}
    quantized = logits(load(**quantization))
    config = LoraConfig(r=8, init_lora_weights="olora", target_modules="all-linear")
    started = logits(get_peft_model(load(**quantization), config))
    assert (started - quantized).norm() > 0.5 * (quantized - logits(load())).norm()


def test_8_bit_layers_take_four_dimensions(tmp_path: Path) -> None:
    """Latent attention gives them to its projection of keys and values."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MiniCPM3Config(
        vocab_size=40, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    quantization = {"dtype": torch.float32, "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    quantized: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **quantization)
    bitsandbytes_int8_inputs.apply(quantized)
    inputs = torch.arange(3, 33).view(2, 15)
    logits, expected = (each(inputs).logits for each in (quantized, AutoModelForCausalLM.from_pretrained(tmp_path)))
    assert (logits - expected).norm() < 0.1 * expected.norm()
    logits.sum().backward()


def test_8_bit_weights_load_after_a_forward_pass(tiny: Path) -> None:
    """DeepSpeed loads all modules of the best checkpoint."""
    config = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, quantization_config=config).eval()
    bitsandbytes_int8_reload.apply(model)
    with torch.no_grad():
        expected = model(torch.arange(3, 60)[None]).logits
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        next(layer for layer in model.modules() if hasattr(layer, "init_8bit_state")).state.SCB.zero_()
        for _ in range(2):
            model.load_state_dict(saved)
            assert torch.equal(model(torch.arange(3, 60)[None]).logits, expected)
