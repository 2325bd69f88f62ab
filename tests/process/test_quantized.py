"""Packed bases: what is really stored, that training on them learns, and what is kept of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from peft import PeftModel
from safetensors.torch import load_file, save_file
from training_runs import REORDERING_TOLERANCE, log_text, losses, make_spec, result, same_losses
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from untrained_models import memory_context, untrained_model

from backend import registry
from backend.machine import Machine
from backend.memory import device_rows
from backend.modelspec import from_config
from backend.preflight import preflight

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
TINY = from_config(registry.BUILTIN_MODELS["tiny-llama"].config)
QUICK = {"train.lr_scheduler_type": "constant", "train.per_device_train_batch_size": 2, "train.learning_rate": 3e-3}
HALF = {**QUICK, "train.per_device_train_batch_size": 1}
KEPT = {"save.strategy": "steps", "save.steps": 2, "save.total_limit": 0, "save.final_model": True}
NF4, INT8 = {"method.quantization": "nf4"}, {"method.quantization": "int8"}
DORA = {"lora.use_dora": True}


@pytest.fixture(scope="module")
def plain(root: Path, fork_server: ForkServer) -> dict[int, float]:
    """The losses on weights that are not packed."""
    return losses(fork_server.train(root / "plain", make_spec(QUICK)))


@pytest.fixture(scope="module")
def four(root: Path, fork_server: ForkServer) -> Path:
    return fork_server.train(root / "four", make_spec({**QUICK, **NF4, **KEPT, "train.max_steps": 4}))


def beside(module: Any) -> int:
    """Bytes of what a packed layer stores beside its weights."""
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return int(module.weight.SCB.nbytes)
    second = state.state2
    tensors = [state.absmax, state.code, *((second.absmax, second.code, state.offset) if state.nested else ())]
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("kind", "name"), [("nf4", "Linear4bit"), ("fp4", "Linear4bit"), ("int8", "Linear8bitLt")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_account_is_what_is_stored(cache: Path, kind: str, name: str, double: bool, precision: str) -> None:
    changes = {
        "method.quantization": kind,
        "method.bnb_4bit_use_double_quant": double,
        "precision.compute": precision,
    }
    found = untrained_model(changes, precision)
    bases = [m.base_layer for _, m in found.named_modules() if hasattr(m, "base_layer")]
    assert len(bases) == 4 * 7
    assert {type(base).__name__ for base in bases} == {name}
    assert {base.weight.dtype for base in bases} == {torch.uint8 if name == "Linear4bit" else torch.int8}
    rows = {row.name: row.bytes for row in device_rows(memory_context(make_spec(changes), TINY))}
    assert rows["Quantized parameters"] == sum(base.weight.nbytes for base in bases)
    assert rows["Quantization scales"] == sum(map(beside, bases))
    weights = sum(base.in_features * base.out_features for base in bases)
    assert rows["Quantized parameters"] == weights // (2 if name == "Linear4bit" else 1)
    if kind != "int8" and double:
        assert rows["Quantization scales"] < weights * 0.127 / 8 + 28 * 2048, "0.127 bits a weight, and tables"
    still = sum(p.nbytes for p in found.parameters() if not p.requires_grad)
    assert rows["Quantized parameters"] + rows["Frozen parameters"] == still


@pytest.mark.parametrize("changes", [NF4, INT8], ids=["nf4", "int8"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns_as_on_plain_weights(
    root: Path, fork_server: ForkServer, plain: dict[int, float], changes: dict[str, Any], precision: str
) -> None:
    more = {**changes, "precision.compute": precision}
    found = losses(
        fork_server.train(root / f"one-{changes['method.quantization']}-{precision}", make_spec({**QUICK, **more}))
    )
    assert found == pytest.approx(plain, abs=0.05)
    assert found != same_losses(plain), "nothing was packed"


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        (NF4, "ddp"),
        pytest.param(INT8, "ddp", marks=pytest.mark.soak),
        pytest.param(NF4, "zero2", marks=pytest.mark.soak),
        (NF4, "zero3"),
        (NF4, "fsdp2"),
        pytest.param({**INT8, **DORA}, "ddp", marks=pytest.mark.soak),
        ({**NF4, **DORA}, "zero3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_strategies_learn_the_same(root: Path, fork_server: ForkServer, changes: dict[str, Any], strategy: str) -> None:
    kind = "-".join(map(str, changes.values()))
    one = fork_server.train(root / f"alone-{kind}-{strategy}", make_spec({**QUICK, **changes}))
    more = {**HALF, **changes, "parallel.strategy": strategy}
    two = fork_server.train(root / f"two-{kind}-{strategy}", make_spec(more), 2)
    assert losses(two) == same_losses(losses(one), REORDERING_TOLERANCE)
    held = [rank["local_parameters"] for rank in result(two)["ranks"]]
    if registry.STRATEGIES[strategy].shards_weights:
        # As fp32 numbers: an eighth of the packed weights; and half of everything.
        packed = sum(
            leaf.in_features * leaf.out_features
            for leaf in TINY.all_modules()
            if leaf.in_features and leaf.path != TINY.head
        )
        rest = TINY.parameters - packed + result(two)["trainable_parameters"]
        assert held == pytest.approx([(packed / 8 + rest) / 2] * 2, rel=0.01)


@pytest.mark.parametrize("changes", [NF4, INT8], ids=["nf4", "int8"])
def test_dora_learns_as_on_plain_weights(root: Path, fork_server: ForkServer, changes: dict[str, Any]) -> None:
    more = {**QUICK, **DORA}
    plain = losses(fork_server.train(root / f"plain-{changes['method.quantization']}", make_spec(more)))
    found = losses(fork_server.train(root / f"dora-{changes['method.quantization']}", make_spec({**more, **changes})))
    assert found == pytest.approx(plain, abs=0.05)


def test_adapters_are_not_rounded(four: Path) -> None:
    state = load_file(four / "model/adapter_model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in state.values())


def test_what_is_saved_can_be_loaded(four: Path, cache: Path) -> None:
    """Onto a packed base as it was trained, and onto a plain one."""
    rows = torch.arange(3, 60)[None]

    def answer(**more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        base = AutoModelForCausalLM.from_pretrained(cache / "models/tiny-llama", dtype=torch.float32, **more)
        model_ = base.train()  # bitsandbytes rewrites 4-bit weights for evaluation on some CPUs
        with torch.no_grad():
            before = model_(rows).logits
            return before, PeftModel.from_pretrained(base, four / "model").train()(rows).logits

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    before, after = answer(quantization_config=config)
    assert not torch.allclose(before, after, atol=0.1)
    _, plain = answer()
    learned, difference = (after - before).norm(), (plain - after).norm()
    assert difference < learned


def test_it_goes_on_from_its_checkpoint(four: Path, fork_server: ForkServer) -> None:
    before = losses(four)
    fork_server.resume(four, 2)
    assert losses(four) == same_losses(before)


def test_looking_on_changes_nothing(root: Path, fork_server: ForkServer, four: Path) -> None:
    """An evaluation, and answers before training, leave the packed weights as they are."""
    more = {"eval.strategy": "steps", "eval.steps": 1, "eval.num_generations": 2, "eval.max_new_tokens": 4}
    found = fork_server.train(root / "watched", make_spec({**QUICK, **NF4, **more, "train.max_steps": 4}))
    assert losses(found) == same_losses(losses(four))
    assert len(result(found)["samples"]) == 2


@pytest.fixture(scope="module")
def eighth(cache: Path, root: Path) -> Path:
    """The tiny model as FP8 checkpoints are: weights of 8 bits, and a scale for each block of 32 x 32."""
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


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_fp8_is_unpacked_and_learns(root: Path, fork_server: ForkServer, cache: Path, eighth: Path, kind: str) -> None:
    more = {**QUICK, "method.kind": kind, "train.learning_rate": 1e-3}
    found = fork_server.train(
        root / f"fp8-{kind}", make_spec({**more, "model.source": "path", "model.path": str(eighth)})
    )
    wanted = fork_server.train(root / f"fp8-{kind}-plain", make_spec(more))
    assert losses(found) == pytest.approx(losses(wanted), abs=0.02)
    assert losses(found) != same_losses(losses(wanted)), "nothing was packed"


def test_packed_formats_that_are_refused(root: Path, fork_server: ForkServer, cache: Path) -> None:
    for kind, said in (("quark", "model.path"), ("gptq", "model.path")):
        folder = root / kind
        shutil.copytree(cache / "models/tiny-llama", folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": 128}
        (folder / "config.json").write_text(json.dumps(config))
        write_run(root / f"refused-{kind}", make_spec({"model.source": "path", "model.path": str(folder)}))
        assert fork_server.run(root / f"refused-{kind}") == 1
        last = log_text(root / f"refused-{kind}").strip().splitlines()[-1]
        assert said in last and last.endswith("]"), last


@pytest.fixture(scope="module")
def came(cache: Path, root: Path) -> Path:
    """The tiny model as others publish it, in 4 bits."""
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    source, folder = cache / "models/tiny-llama", root / "came"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=how, device_map={"": "cpu"})
    model.save_pretrained(folder)
    return folder


def test_a_model_that_came_packed_takes_dora(root: Path, fork_server: ForkServer, came: Path) -> None:
    more = {**QUICK, "model.source": "path", "model.path": str(came), "lora.use_dora": True}
    found = list(losses(fork_server.train(root / "came-dora", make_spec(more))).values())
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora.init", "orthogonal"),
        ("precision.compute", "fp8"),
        ("lora.modules_to_save", ("up_proj",)),
        ("save.merge_adapter", True),
    ],
)
def test_what_a_model_that_came_packed_cannot_have(
    root: Path, fork_server: ForkServer, came: Path, field: str, value: Any
) -> None:
    """The rules say so before, and the run by a sentence of its own."""
    more = {"model.source": "path", "model.path": str(came), "save.final_model": True, field: value}
    folder = root / f"came-{field}"
    write_run(folder, make_spec(more))
    assert any(f.level == "error" and field in f.fields for f in preflight(make_spec(more), Machine(), root).findings)
    assert fork_server.run(folder) == 1
    assert log_text(folder).strip().splitlines()[-1].startswith(field)
