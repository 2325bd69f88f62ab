"""Engines: what transformers, accelerate, torch and DeepSpeed reject, and what they silently change."""

from __future__ import annotations

import importlib.metadata
import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
import transformers.integrations.deepspeed as integration
import trl
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig, DummyOptim, DummyScheduler, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_auto_wrap_policy
from deepspeed.checkpoint.ds_to_universal import extract_zero_shards
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from fork_server import ForkServer
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel
from training_runs import log_text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from backend import registry
from backend.rules.distributed.deepspeed_extra_config import REMOVED_KEYS
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")


def llama(**more: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **more))


@cites("DAT037")
def test_losses_that_read_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequence parallelism takes the mean of the ranks' losses over their tokens; context parallelism divides the
    tensors that it knows."""
    monkeypatch.setattr(groups, "_get_sequence_parallel_group", lambda: None)
    monkeypatch.setattr(integration.torch.distributed.nn.functional, "all_gather", lambda value, group: [value])
    labels, weights = torch.tensor([[1, 2, -100]]), torch.tensor([[0.5, 2.0, 0.0]])
    parallel = SimpleNamespace(sp_backend="deepspeed", sp_size=2, cp_enabled=True, cp_backend="torch")
    inputs = {"input_ids": labels, "labels": labels, "shift_labels": labels, "loss_weights": weights}
    model = lambda **_: SimpleNamespace(loss=torch.tensor(3.0))  # noqa: E731
    assert integration.deepspeed_sp_compute_loss(None, model, inputs, False, parallel) == 3
    accelerator = SimpleNamespace(parallelism_config=parallel, maybe_context_parallel=print)
    context, _ = Trainer._prepare_context_parallel_inputs(SimpleNamespace(accelerator=accelerator), None, inputs)
    assert len(context.keywords["buffers"]) == 4 and not any(each is weights for each in context.keywords["buffers"])


@cites("STR001")
def test_missing_deepspeed_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    assert {row.package for row in registry.STRATEGIES.values()} == {"", "deepspeed"}
    integration.HfDeepSpeedConfig({})
    monkeypatch.setattr(importlib.metadata, "version", without)
    with pytest.raises(importlib.metadata.PackageNotFoundError, match=r"'deepspeed>=.*' distribution was not found"):
        integration.HfDeepSpeedConfig({})


@cites("STR002")
def test_no_backend_supports_mps() -> None:
    assert "cpu" in dist.Backend.backend_capability["gloo"]
    assert not [name for name, devices in dist.Backend.backend_capability.items() if "mps" in devices]


@cites("STR007")
@pytest.mark.parametrize("builder", [ShareMemCommBuilder, CPUAdamBuilder])
def test_deepspeed_operators_need_a_compiler(builder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With only ninja on the PATH."""
    ninja = shutil.which("ninja")
    assert ninja
    (tmp_path / "ninja").symlink_to(ninja)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match="Error building extension"):
        builder().jit_load(verbose=False)


@cites("STR010")
def test_fsdp1_is_deprecated(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(transformers.training_args.logger, "warning", messages.append)
    for version in (1, 2):
        arguments = SimpleNamespace(fsdp=True, fsdp_config={"version": version}, activation_checkpointing=False)
        TrainingArguments._process_fsdp_args(arguments)
    assert len(messages) == 1
    assert "is deprecated and will be removed" in messages[0]


@cites("STR049")
def test_peft_finds_no_adapter_in_layers_wrapped_by_fsdp1(group: None) -> None:
    """All weights are in the state dict; peft selects those of the adapter by the names of wrapped modules."""
    model = get_peft_model(llama(), LoraConfig(target_modules="all-linear"))
    assert len(get_peft_model_state_dict(model)) == 2 * 2 * 7
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=fsdp_auto_wrap_policy(model), device_id=CPU)
    assert any("_fsdp_wrapped_module.self_attn" in name for name, _ in wrapped.named_modules())
    state = {key: value for key, value in wrapped.state_dict().items() if "lora_" in key}
    assert len(state) == 2 * 2 * 7
    assert get_peft_model_state_dict(wrapped, state) == {}


TWO_NODES = """
import os, sys, warnings
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
warnings.simplefilter("ignore")
rank, store, strategy = int(os.environ["RANK"]), sys.argv[2], ShardingStrategy[sys.argv[3]]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = None
if strategy is ShardingStrategy.HYBRID_SHARD:  # as torch makes them with one device per node: within, between nodes
    group = ([dist.new_group([n]) for n in range(2)][rank], dist.group.WORLD)
layer = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.ones_(layer.weight)
model = FullyShardedDataParallel(layer, group, strategy, device_id=torch.device("cpu"))
model(torch.full((1, 2), 1.0 + rank)).sum().backward()
grad = next(model.parameters()).grad
line = f"rank {rank}: {model.sharding_strategy.name} {float(grad.abs().max())}"
os.write(1, f"{line}\\n".encode())  # print may write the end of the line after the other rank's line
dist.barrier()  # a rank that leaves first breaks the connections of the other
dist.destroy_process_group()
"""


def gradients_of_two_nodes(fork_server: ForkServer, folder: Path, strategy: str) -> list[str]:
    """The effective sharding strategy and the gradient of each of two nodes with one process. The gradients of their
    examples are 1 and 2."""
    folder.mkdir()
    (folder / "nodes.py").write_text(TWO_NODES)
    arguments = (str(folder / "store"), strategy)
    assert fork_server.run(folder, 2, *arguments, script=str(folder / "nodes.py")) == 0, log_text(folder)
    return sorted(line for line in log_text(folder).splitlines() if line.startswith("rank "))


@cites("STR053")
def test_hybrid_shard_with_one_process_per_node_averages_no_gradients(tmp_path: Path, fork_server: ForkServer) -> None:
    hybrid = gradients_of_two_nodes(fork_server, tmp_path / "hybrid", "HYBRID_SHARD")
    assert hybrid == ["rank 0: NO_SHARD 0.5", "rank 1: NO_SHARD 1.0"], "divided by the number of ranks, and not added"
    full = gradients_of_two_nodes(fork_server, tmp_path / "full", "FULL_SHARD")
    assert full == ["rank 0: FULL_SHARD 1.5", "rank 1: FULL_SHARD 1.5"]


@cites("STR015")
def test_nvme_offload_needs_libaio(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = []
    builder = AsyncIOBuilder()
    monkeypatch.setattr(builder, "has_function", lambda name, libraries: lookups.append((name, libraries)))
    assert not builder.is_compatible(verbose=False)
    assert lookups == [("io_submit", ("aio",))]
    assert "-laio" in builder.extra_ldflags()


@cites("STR017")
def test_unknown_layer_classes_are_rejected() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    with pytest.raises(ValueError, match="Could not find the transformer layer class GPT2Block in the model"):
        fsdp2_prepare_auto_wrap_policy(plugin, llama())
    with pytest.raises(ValueError, match="Could not find the transformer layer class GPT2Block in the model"):
        plugin.set_auto_wrap_policy(llama())


@cites("STR026")
def test_sequence_parallel_size_must_divide_the_world_size(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed checks this, accelerate does not."""
    monkeypatch.setattr(parallel_state_sp, "dist", dist)  # deepspeed.comm is not initialized
    with pytest.raises(RuntimeError, match=r"world_size \(1\) is less than sequence_parallel_size 4"):
        parallel_state_sp.initialize_sequence_parallel(4)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(RuntimeError, match=r"world_size \(3\) is not divisible by sequence_parallel_size 2"):
        parallel_state_sp.initialize_sequence_parallel(2)


@cites("STR029")
@pytest.mark.parametrize("name", registry.ATTENTIONS)
def test_attention_implementations_for_sequence_parallelism(name: str) -> None:
    if name in registry.SEQUENCE_PARALLEL_ATTENTIONS:
        assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=None if name == "auto" else name)
        return
    with pytest.raises(ValueError, match="Invalid sp_attn_implementation"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation=name)


@cites("STR031")
def test_sequence_parallel_loss_is_the_mean_of_its_own_batch(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the mean over the tokens of one micro-batch; num_items_in_batch is not passed."""
    assert "num_items_in_batch" not in inspect.signature(integration.deepspeed_sp_compute_loss).parameters
    monkeypatch.setattr(groups, "_get_sequence_parallel_group", lambda: dist.group.WORLD)
    shared = ParallelismConfig(sp_size=2, sp_backend="deepspeed")

    def loss(trained_tokens: int) -> float:
        labels = torch.tensor([[1] * trained_tokens + [-100] * (9 - trained_tokens)])
        mean_loss = torch.arange(9.0)[:trained_tokens].mean()
        model = lambda **inputs: SimpleNamespace(loss=mean_loss)  # noqa: E731
        return float(integration.deepspeed_sp_compute_loss(None, model, {"shift_labels": labels}, False, shared))

    assert [loss(trained_tokens) for trained_tokens in (1, 9)] == [0.0, 4.0]


@cites("STR033")
def test_optimizer_of_the_deepspeed_config_replaces_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    created = []
    trainer = SimpleNamespace(create_optimizer=lambda: created.append("optimizer"))

    def create(**config: Any) -> tuple[Any, Any]:
        return integration.deepspeed_optim_sched(
            trainer, SimpleNamespace(config=config, is_offload=lambda: False), None, 10, []
        )

    optimizer, scheduler = create(optimizer={"type": "AdamW"}, scheduler={"type": "WarmupLR"})
    assert (type(optimizer), type(scheduler), created) == (DummyOptim, DummyScheduler, [])
    create()
    assert created == ["optimizer"]


def test_removed_deepspeed_keys() -> None:
    """STR034 names all removed keys; its failing example is launched too."""
    names = [*deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    names += [f"zero_optimization.{name}" for name in deepspeed_config._REMOVED_ZERO_CONFIG_KEYS]
    assert sorted(names) == sorted(REMOVED_KEYS)
    for name in names:
        config: dict[str, Any] = {"train_batch_size": 1}
        inner = config.setdefault("zero_optimization", {}) if "." in name else config
        inner[name.rpartition(".")[2]] = {"enabled": False}
        with pytest.raises(deepspeed_config.DeepSpeedConfigError, match="removed"):
            deepspeed_config.DeepSpeedConfig(config)


@cites("STR037")
def test_context_parallelism_needs_sdpa() -> None:
    mesh = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=mesh))
    with pytest.raises(ValueError, match="supported only with SDPA attention, you are using eager"):
        Trainer._prepare_context_parallel_inputs(trainer, llama(attn_implementation="eager"), {})
    # The trainer starts only on devices that support context parallelism, so the test searches the source.
    source = inspect.getsource(trl.SFTTrainer.__init__)
    assert "parallelism_config.cp_enabled and (args.packing or args.eval_packing)" in source
    assert all(
        "cp_enabled" not in inspect.getsource(inspect.getmodule(kind)) for kind in (trl.DPOTrainer, trl.KTOTrainer)
    )


@cites("STR039")
def test_fsdp_activation_checkpointing_draws_different_dropout() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    model = fsdp2_apply_ac(accelerator, llama(attention_dropout=0.5)).train()
    torch.manual_seed(0)
    outputs = []
    layer = model.model.layers[0]
    layer.self_attn.register_forward_hook(lambda module, given, output: outputs.append(output[0].detach()))
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    assert len(outputs) == 2
    assert not torch.equal(*outputs)


@cites("NOD006")
def test_deepspeed_state_for_a_different_number_of_ranks(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only AdamW's moments, nothing with NVMe offload; with sequence parallelism it calls a missing method."""
    # Calling it would need an engine with NVMe offload.
    source = inspect.getsource(DeepSpeedEngine.load_checkpoint)
    assert "if load_zero_checkpoint and not self.zero_nvme_offload_optimizer()" in source
    state = {"optimizer_state_dict": {"param_slice_mappings": [], "base_optimizer_state": {"state": [{"sum": 1}]}}}
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [None]
    checkpoint = SimpleNamespace(get_zero_checkpoint_state=lambda **place: state, get_checkpoint_info=lambda name: {})
    with pytest.raises(KeyError, match="exp_avg"):
        extract_zero_shards("", checkpoint, (0, 0, 0))
    (tmp_path / "zero").mkdir()
    torch.save({"param_groups": []}, tmp_path / "zero/optimizer_state.pt")
    monkeypatch.setattr(parallel_state_sp, "_SEQUENCE_PARALLEL_GROUP", dist.group.WORLD)
    monkeypatch.setattr(parallel_state_sp, "dist", dist)
    engine = SimpleNamespace(_load_global_state=lambda state: None, mpu=parallel_state_sp)
    with pytest.raises(AttributeError, match="get_tensor_model_parallel_world_size"):
        ZeROOptimizer.load_hp_checkpoint_state_from_checkpoint_dir(engine, "", str(tmp_path))
