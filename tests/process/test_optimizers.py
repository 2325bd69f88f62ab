"""Every optimizer that runs on a CPU: losses, bytes of its state compared with the estimate, and resuming."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build, model_types
from fork_server import ForkServer
from parameters import soak_except
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from training_runs import REORDERING_TOLERANCE, losses, make_spec, read_metrics, result, same_losses
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from untrained_models import memory_context

from backend import registry
from backend.machine import probe
from backend.memory import MemoryContext
from backend.modelspec import ModuleSpec, from_config
from backend.paths import HOME
from backend.preflight import preflight
from backend.registry import adam_mini
from backend.train import optimizers
from backend.train.patches import adam_mini_head_size, trl_frozen_blocks

FULL = {
    "method.kind": "full",
    "train.max_steps": 4,
    "train.lr_scheduler_type": "linear",
    "train.warmup_steps": 0.0,
    "save.strategy": "steps",
    "save.steps": 2,
    "save.total_limit": 0,
    "train.projection_rank": 16,
    "train.update_proj_gap": 2,
    "train.badam_switch_block_every": 2,
    "train.weight_decay": 0.1,
}
CPU_OPTIMIZERS = [name for name, row in registry.OPTIMIZERS.items() if not row.devices]
SAME_AS_ADAMW = {"adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"}  # different kernels for the same arithmetic
# Variants of optimizers in RESUMED, or of each other, with a different precision of the state; not resumed.
NOT_RESUMED = {
    "adamw_torch_fused", "paged_adamw_32bit", "paged_adamw_8bit", "adamw_torch_4bit", "ademamix", "lion_32bit",
    "paged_lion_32bit", "paged_lion_8bit", "schedule_free_sgd", "sgd", "rmsprop", "adagrad",
    "galore_adafactor_layerwise",
}  # fmt: skip
RESUMED = ("adamw_torch", "adamw_bnb_8bit", "muon", "galore_adamw", "badam", "schedule_free_adamw", "adalomo")
# One optimizer for each layout of the state, and each way in which the step is made.
IN_MAKE_TEST = (
    *RESUMED, "adamw_torch_fused", "adamw_torch_4bit", "adafactor", "galore_adamw_layerwise", "apollo_adamw",
    "sgd", "adam_mini",
)  # fmt: skip
# Compilation takes a minute per optimizer; eager execution computes the same.
NO_COMPILE = {"TORCHDYNAMO_DISABLE": "1"}
NO_CONFIG = {"gemma4_assistant", "gemma4_unified_assistant", "musicgen", "musicgen_melody"}  # not causal models
OPTIMIZERS_MODULE = "backend.train.optimizers"
CLASSES = {
    "": ("torch.optim", "transformers.optimization", OPTIMIZERS_MODULE),
    "adam-mini": ("adam_mini",),
    "badam": ("backend.train.patches.badam_checkpoint",),
    "bitsandbytes": ("bitsandbytes.optim",),
    "torch-optimi": ("optimi",),
    "torchao": ("torchao.optim",),
}


@pytest.fixture(scope="module")
def adamw_losses(fork_server: ForkServer, root: Path) -> dict[int, float]:
    """The losses with AdamW."""
    return losses(fork_server.train(root / "usual", make_spec(FULL)))


@pytest.fixture(scope="module")
def train_optimizer(fork_server: ForkServer, root: Path) -> Callable[[str], Path]:
    """A function that returns the run of an optimizer, trained on first use."""

    def run(name: str) -> Path:
        folder = root / name
        return (
            folder
            if folder.exists()
            else fork_server.train(folder, make_spec({**FULL, "train.optim": name}), env=NO_COMPILE)
        )

    return run


@pytest.mark.parametrize("name", soak_except(CPU_OPTIMIZERS, IN_MAKE_TEST))
def test_losses_and_state_bytes(
    name: str, train_optimizer: Callable[[str], Path], adamw_losses: dict[int, float]
) -> None:
    row, folder = registry.OPTIMIZERS[name], train_optimizer(name)
    losses_ = losses(folder)
    assert losses_[1] == same_losses(adamw_losses[1])
    assert all(loss == loss and loss < 12 for loss in losses_.values())
    assert any("grad_norm" in point for point in read_metrics(folder)) is not row.steps_in_backward
    assert (losses_ == same_losses(adamw_losses)) is (name in SAME_AS_ADAMW)
    if name != "schedule_free_radam":  # it skips its first five steps
        assert_weights_changed(folder)
    state: dict[str, Any] = result(folder)["optimizer"][0]
    assert state["class"].startswith(CLASSES.get(row.package, (row.package.replace("-", "_"),)))
    assert estimate({"train.optim": name}).optimizer.bytes == pytest.approx(state["bytes"], rel=0.03, abs=100)


@pytest.mark.parametrize("name", soak_except([name for name in CPU_OPTIMIZERS if name not in NOT_RESUMED], RESUMED))
def test_resumes_with_the_same_losses(
    name: str, train_optimizer: Callable[[str], Path], fork_server: ForkServer
) -> None:
    row, folder = registry.OPTIMIZERS[name], train_optimizer(name)
    before = losses(folder)
    fork_server.resume(folder, 2, env=NO_COMPILE)
    again = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [point["step"] for point in again if "loss" in point] == [1, 2, 3, 4, 3, 4]
    # Exact: the same kernels on the same machine, and the state is saved without rounding.
    assert (losses(folder) == before) is not row.loses_state_on_save


def assert_weights_changed(folder: Path) -> None:
    """Assert that the layers' weights of the two checkpoints differ."""
    first, second = (load_file(folder / f"checkpoints/checkpoint-{step}/model.safetensors") for step in (2, 4))
    assert any(not first[name].equal(second[name]) for name in first if ".layers." in name)


def estimate(changes: Mapping[str, Any]) -> MemoryContext:
    shape = from_config(registry.BUILTIN_MODELS["tiny-llama"].config)
    return memory_context(make_spec({**FULL, **changes}), shape)


# Measured bytes of optimizer state per parameter with bf16 weights: three steps of the tiny model, torch 2.13.
PURE_BF16_BYTES = {
    "adamw_torch": 4.0,
    "adamw_bnb_8bit": 3.277,
    "adamw_torch_8bit": 2.082,
    "adamw_torch_4bit": 1.037,
    "paged_adamw_32bit": 8.0,
    "adam_mini": 2.013,
    "stable_adamw": 6.0,
    "ademamix": 12.0,
    "adafactor": 0.047,
    "lion_32bit": 4.0,
    "muon": 2.832,
    "galore_adamw": 1.337,
    "galore_adafactor": 0.201,
    "apollo_adamw": 1.337,
    "badam": 1.754,
    "schedule_free_sgd": 2.0,
    "grokadamw": 6.0,
}


@pytest.mark.parametrize("name", PURE_BF16_BYTES)
def test_state_bytes_with_bf16_weights(name: str) -> None:
    context = estimate({"train.optim": name, "precision.compute": "pure_bf16"})
    assert context.optimizer.bytes / context.trainable_count == pytest.approx(PURE_BF16_BYTES[name], rel=0.03)


# Bytes of state per parameter with FSDP2 on two ranks, which keeps the shapes of matrices.
@pytest.mark.parametrize(("name", "bytes_per_parameter"), [("adamw_torch", 4.0), ("muon", 2.832), ("adam_mini", 2.013)])
def test_state_is_sharded(name: str, bytes_per_parameter: float) -> None:
    context = estimate({"train.optim": name, "parallel.strategy": "fsdp2", "launch.nproc_per_node": 2})
    assert context.optimizer.bytes / context.run.optimizer_shards / context.trainable_count == pytest.approx(
        bytes_per_parameter, rel=0.03
    )


@pytest.mark.parametrize("how", ["std", "reverse_std", "left", "right", "full"])
def test_galore_projection_types(how: str) -> None:
    """The estimated state of one matrix, compared with GaLore's own."""
    galore = pytest.importorskip("galore_torch")
    state = estimate({"train.optim": "galore_adamw", "train.galore_proj_type": how}).optimizer
    for rows, columns in ((352, 128), (128, 352)):
        weight = torch.nn.Parameter(torch.randn(rows, columns))
        settings = {"rank": 16, "update_proj_gap": 2, "scale": 1.0, "proj_type": how}
        optimizer = galore.GaLoreAdamW([{"params": [weight], **settings}], no_deprecation_warning=True)
        weight.grad = torch.randn(rows, columns)
        optimizer.step()
        leaf = ModuleSpec("model.layers.0.mlp.up_proj", rows * columns, columns, rows)
        assert state._tensor_bytes(leaf) == optimizers.state_summary(optimizer)["bytes"]


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["fsdp2", "zero0"])
def test_state_created_in_the_constructor_follows_the_weights(
    strategy: str, root: Path, fork_server: ForkServer
) -> None:
    """Adagrad creates its state in the constructor; an engine replaces the parameters afterwards."""
    adagrad = {**FULL, "train.optim": "adagrad"}
    expected = losses(fork_server.train(root / f"early-1-{strategy}", make_spec(adagrad)))
    more = {**adagrad, "parallel.strategy": strategy, "train.per_device_train_batch_size": 1}
    folder = fork_server.train(root / f"early-2-{strategy}", make_spec(more), 2)
    assert losses(folder) == same_losses(expected, REORDERING_TOLERANCE)
    fork_server.resume(folder, 2, 2)
    assert losses(folder) == same_losses(expected, REORDERING_TOLERANCE)


def test_weight_decay_of_an_optimizer_that_an_engine_creates_again() -> None:
    """DeepSpeed passes the defaults of Adagrad, and no parameter group."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adagrad([{"params": [weight], "weight_decay": 0.1}], lr=0.5)
    optimizers.recreatable(optimizer)
    (group,) = torch.optim.Adagrad([weight], **optimizer.defaults).param_groups
    assert (group["weight_decay"], group["lr"], optimizer.state) == (0.1, 0.5, {})


def test_muon_orthogonalizes_only_layers() -> None:
    spec = make_spec({**FULL, "train.optim": "muon", "train.learning_rate": 0.01, "train.weight_decay": 0.0})
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **sizes))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizers.MAKERS["muon"](spec, model, set(before))
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    steps = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    hidden = torch.linalg.svdvals(
        steps["model.layers.0.mlp.up_proj.weight"]
    )  # not square, so no singular value is near zero
    assert hidden.min() > 0.3 * hidden.max(), "all singular values are similar"
    assert steps["lm_head.weight"].abs().allclose(torch.tensor(0.01), rtol=1e-3), (
        "Adam's first step has the size of the learning rate"
    )


def test_schedule_free_saves_the_averaged_weights(fork_server: ForkServer, tmp_path: Path) -> None:
    """The warm-up ratio is applied to all steps; the saved model has the averaged weights."""
    more = {"train.optim": "schedule_free_adamw", "save.final_model": True, "train.warmup_steps": 0.5}
    folder = fork_server.train(tmp_path / "run", make_spec({**FULL, **more}))
    state = torch.load(folder / "checkpoints/checkpoint-4/optimizer.pt", weights_only=True)
    group = state["param_groups"][0]
    assert (group["warmup_steps"], group["train_mode"], group["k"]) == (2, False, 4)
    final, checkpoint = (
        load_file(folder / where / "model.safetensors") for where in ("model", "checkpoints/checkpoint-4")
    )
    assert all(final[name].equal(checkpoint[name]) for name in final), (
        "the model and the last checkpoint are saved in the same state"
    )


@pytest.mark.soak
def test_schedule_free_with_fsdp2_trains_after_an_evaluation_as_without_it(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The evaluation gathers the averaged weights, the next step needs the trained ones. A checkpoint, as after steps 2
    and 4, frees the gathered weights too, so that an evaluation must follow another step."""
    more = {**FULL, "train.optim": "schedule_free_adamw", "parallel.strategy": "fsdp2"}
    found = [
        losses(fork_server.train(tmp_path / when, make_spec({**more, "eval.strategy": when, "eval.steps": 1}), 2))
        for when in ("no", "steps")
    ]
    assert found[0] == found[1]


SHARDED: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {"parallel.strategy": "fsdp2"},
    "fsdp2-sharded": {"parallel.strategy": "fsdp2", "parallel.state_dict_type": "sharded"},
    "zero2": {"parallel.strategy": "zero2"},
    "zero3": {"parallel.strategy": "zero3"},
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CPU_OPTIMIZERS)
@pytest.mark.parametrize("strategy", SHARDED)
def test_resumes_with_the_same_losses_where_the_state_is_sharded(
    strategy: str, name: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """For FSDP2 torch takes a step with a learning rate of 0 before it loads the state: it must change nothing."""
    spec = make_spec({**FULL, **SHARDED[strategy], "launch.nproc_per_node": 2, "train.optim": name})
    if not preflight(spec, probe(HOME), HOME).can_run:
        pytest.skip("refused by the checks")
    folder = fork_server.train(tmp_path / "run", spec, 2, env=NO_COMPILE)
    before = losses(folder)
    fork_server.resume(folder, 2, ranks=2, env=NO_COMPILE)
    assert (losses(folder) == before) is not registry.OPTIMIZERS[name].loses_state_on_save


def test_badam_trains_the_layers_of_a_model_with_several_stacks() -> None:
    """HRM-Text has no list of num_hidden_layers layers: it runs two shorter ones in turn."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("hrm_text", vocab_size=32, **sizes))
    optimizer = optimizers.MAKERS["badam"](make_spec({**FULL, "train.optim": "badam"}), model, set())
    stacks = {block.rpartition(".layers.")[0] for (block,) in optimizer.block_prefix_list}
    assert stacks == {"model.L_module", "model.H_module"}
    assert len(optimizer.block_prefix_list) == len(model.model.L_module.layers) + len(model.model.H_module.layers)


def test_muon_steps_a_group_that_loraplus_adds() -> None:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    optimizer = optimizers.MAKERS["muon"](make_spec({**FULL, "train.optim": "muon"}), model, set())
    group = next(group for group in optimizer.param_groups if group["orthogonal"])
    moved = group["params"].pop()
    optimizer.add_param_group({**group, "params": [moved]})
    before = moved.detach().clone()
    moved.grad = torch.randn_like(moved)
    optimizer.step()
    assert not torch.equal(moved, before)


def test_muon_does_not_orthogonalize_single_row_matrices() -> None:
    """The head of a reward model has one output: FSDP2 cannot give each rank a row of it."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=32, num_labels=1, pad_token_id=0, **sizes))
    optimizer = optimizers.MAKERS["muon"](make_spec({**FULL, "train.optim": "muon"}), model, set())
    first_dimensions = {
        is_orthogonal: [
            p.shape[0] for g in optimizer.param_groups if g["orthogonal"] is is_orthogonal for p in g["params"]
        ]
        for is_orthogonal in (True, False)
    }
    assert 1 in first_dimensions[False]
    assert first_dimensions[True]
    assert 1 not in first_dimensions[True]


def test_adam_mini_decays_the_same_weights_as_adamw() -> None:
    """By their names, it would also decay the attention sinks, and the norms of classes with other names."""
    pytest.importorskip("adam_mini")
    model = build("gpt_oss")
    for name, weight in model.named_parameters():
        weight.requires_grad_(".self_attn." in name or "norm" in name)
    decaying = {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
    spec = make_spec({**FULL, "train.optim": "adam_mini", "train.weight_decay": 0.5})
    groups = optimizers.MAKERS["adam_mini"](spec, model, decaying).param_groups
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert any(name.endswith("sinks") for name in names)
    assert {name for name, group in zip(names, groups, strict=True) if group["weight_decay"]} == decaying


@pytest.mark.parametrize("kind", ["mamba", "rwkv"])
def test_adam_mini_trains_models_without_attention(kind: str) -> None:
    pytest.importorskip("adam_mini")
    model = build(kind)
    optimizer = optimizers.MAKERS["adam_mini"](make_spec({**FULL, "train.optim": "adam_mini"}), model, set())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_in_which_types_the_sizes_of_heads_differ() -> None:
    """Adam-mini divides all query and key weights into heads of the same size."""

    def has_one_size(kind: str) -> bool:
        config = CONFIG_MAPPING[kind]().get_text_config()
        optimizer = SimpleNamespace(**adam_mini_head_size.sizes(config))
        adam_mini_head_size.apply(optimizer, config)
        return bool(optimizer.head_numel)

    differ = set()
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NO_CONFIG:
        try:
            assert has_one_size(kind)
        except (AttributeError, RuntimeError):
            differ.add(kind)
    assert differ == adam_mini.HEADS_DIFFER


def test_badam_decays_the_weights_of_the_active_block_only() -> None:
    """Not its norms. With gradients of 0, only the decay changes a weight."""
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    decaying = {name for name in before if "norm" not in name}
    badam = {**FULL, "train.optim": "badam", "train.badam_switch_mode": "descending"}
    spec = make_spec({**badam, "train.weight_decay": 5.0, "train.learning_rate": 1e-2})
    optimizer = optimizers.MAKERS["badam"](spec, model, decaying)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    factors = {name: float((weight.detach() / before[name]).mean()) for name, weight in model.named_parameters()}
    assert {name for name, factor in factors.items() if factor != 1} == {n for n in decaying if ".layers.1." in n}
    assert {round(factor, 6) for factor in factors.values()} == {1.0, 0.95}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # as in logging_setup.py
@pytest.mark.parametrize("reference", [None, "ref"])
def test_the_reference_of_dpo_leaves_the_blocks_of_badam_frozen(reference: str | None) -> None:
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    model.add_adapter("ref", lora)
    for name, weight in model.named_parameters():
        weight.requires_grad_("default" in name and "layers.1" in name)
    before = [weight.requires_grad for weight in model.parameters()]
    with trl_frozen_blocks.use_adapter(model, reference):
        assert not any(weight.requires_grad for name, weight in model.named_parameters() if "default" in name)
    assert [weight.requires_grad for weight in model.parameters()] == before


@pytest.mark.parametrize("kind", soak_except(model_types(), ("mamba", "gpt_oss", "qwen3_next")))
def test_no_norm_decays(kind: str) -> None:
    try:
        model = build(kind)
    except Exception as error:
        pytest.skip(f"cannot be built: {error}")

    class Names(optimizers.OptimizerMixin, Trainer):
        spec = make_spec({})

    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # others are named, but None
    decaying = names.intersection(Names.get_decay_parameter_names(Names.__new__(Names), model))
    assert decaying
    modules = dict(model.named_modules())
    owners = [type(modules[name.rpartition(".")[0]]).__name__ for name in decaying]
    assert not [owner for owner in owners if "norm" in owner.lower()]
    assert not [name for name in decaying if name.rpartition(".")[2] in ("A_log", "D", "sinks", "bias")]
