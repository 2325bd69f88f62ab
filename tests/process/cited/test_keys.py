"""Extra config: what the accelerate launcher, the Trainer and FSDP do with keys from the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils.launch as launching
import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import fully_shard
from training_runs import make_engine
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from backend import registry
from backend.config import RunSpec, merge
from backend.config.options import edit
from backend.engines import engine_of
from backend.launch import accelerate_config
from backend.resolve import resolve
from backend.rules import accelerate_launcher
from backend.rules.distributed import fsdp_extra_config
from backend.rules.examples import TWO_H100
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")
DDP, FSDP1, FSDP2, ZERO2 = ({"parallel.strategy": name} for name in ("ddp", "fsdp1", "fsdp2", "zero2"))
ACCELERATE_LAUNCH = {"parallel.strategy": "ddp", "launch.launcher": "accelerate"}


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


def launcher_arguments(folder: Path, given: Mapping[str, Any], patch: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """(arguments, environment) that the launcher derives from a plan's accelerate.yaml with this extra config."""
    spec = edit(RunSpec(), {**ACCELERATE_LAUNCH, **patch})
    config = merge.override(accelerate_config.configuration(spec, resolve(spec, TWO_H100)), given)
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
    parsed = launch_command_parser().parse_args(["--config_file", str(folder / "accelerate.yaml"), "x.py"])
    found, defaults, precise = _validate_launch_command(parsed)
    if found.use_deepspeed:
        named = [*defaults.deepspeed_config, *(["mixed_precision"] if precise else [])]
        found.deepspeed_fields_from_accelerate_config = ",".join(named)
        return found, prepare_deepspeed_cmd_env(found)[1]
    if found.multi_gpu or found.use_fsdp:
        return found, prepare_multi_gpu_env(found)
    return found, prepare_simple_launcher_cmd_env(found)[1]


@cites("LCH013")
@pytest.mark.parametrize(
    ("given", "patch", "words"),
    [
        ({"ipex_config": {}}, DDP, r"had unknown keys \(\['ipex_config'\]\)"),
        ({"gpu_ids": "0"}, DDP, "Less than two GPU ids were configured"),
        ({"fsdp_config": {"fsdp_sync_module_states": False}}, FSDP2, "set `--fsdp_sync_module_states` to `True`"),
    ],
)
def test_launcher_refuses_these_keys(given: dict[str, Any], patch: dict[str, Any], words: str, tmp_path: Path) -> None:
    launcher_arguments(tmp_path, {}, patch)
    with pytest.raises(ValueError, match=words):
        launcher_arguments(tmp_path, given, patch)


@cites("LCH013")
@pytest.mark.parametrize(
    "given",
    [
        {"mixed_precision": "no"},
        *({"deepspeed_config": {name: 1}} for name in sorted(accelerate_launcher.DEEPSPEED_FILE_KEYS)),
    ],
)
def test_keys_of_the_deepspeed_file_are_refused(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(given: Mapping[str, Any]) -> None:
        monkeypatch.setenv(
            "ACCELERATE_CONFIG_DS_FIELDS", launcher_arguments(tmp_path, given, ZERO2)[1]["ACCELERATE_CONFIG_DS_FIELDS"]
        )
        file = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
        DeepSpeedPlugin(hf_ds_config=file)._deepspeed_config_checks()

    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed.json")
    start({})
    with pytest.raises(ValueError, match="the following accelerate config variables will be ignored"):
        start(given)


@cites("LCH013")
def test_extra_keys_override_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher_arguments(tmp_path, {"num_processes": 4}, DDP)[0].nproc_per_node == "4"
    one = {"launch.nproc_per_node": 1}
    assert [launcher_arguments(tmp_path, {"use_cpu": on}, one)[1]["ACCELERATE_USE_CPU"] for on in (False, True)] == [
        "False",
        "True",
    ]
    assert "ACCELERATE_USE_CPU" not in launcher_arguments(tmp_path, {"use_cpu": True}, DDP)[1]
    mesh = {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}
    assert launcher_arguments(tmp_path, mesh, FSDP2)[1]["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    given, single = {"mixed_precision": "bf16"}, {"precision.compute": "fp32"}
    for more, precision in ({}, "no"), (given, "bf16"):
        env = launcher_arguments(tmp_path, more, {**DDP, **single})[1]
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", env["ACCELERATE_MIXED_PRECISION"])
        AcceleratorState._reset_state(reset_partial_state=True)
        assert Accelerator(cpu=True).mixed_precision == precision


OTHER_VALUES = {"offload_params": "true", "cpu_ram_efficient_loading": "true", "auto_wrap_policy": "NO_WRAP"}
OTHER_VALUES |= {"backward_prefetch": "BACKWARD_POST", "state_dict_type": "SHARDED_STATE_DICT", "min_num_params": "7"}
OTHER_VALUES |= {"sharding_strategy": "NO_SHARD", "reshard_after_forward": "false", "version": "1"}
OTHER_VALUES |= {"transformer_layer_cls_to_wrap": "LlamaMLP", "ignored_modules": "lm_head"}
ENV = {"transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP"}


def plugin(spec: RunSpec, **more: Any) -> FullyShardedDataParallelPlugin:
    """accelerate's FSDP plugin as the trainer creates it, for FSDP1 without the setting that needs a GPU."""
    once = {"sync_module_states": False} if spec.parallel.strategy == "fsdp1" else {}
    given = SimpleNamespace(
        fsdp=True,
        fsdp_config={**engine_of(spec.parallel.strategy).configuration(spec), **once, **more},
        activation_checkpointing=False,
    )
    given.fsdp_plugin_args = TrainingArguments._process_fsdp_args(given)
    make_engine(spec, 2, "cuda")._complete_plugin(given)
    return FullyShardedDataParallelPlugin(**given.fsdp_plugin_args)


def plugin_fields(found: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    return {row.name: getattr(found, row.name) for row in fields(found)}


def options() -> set[str]:
    """The names of the launcher's FSDP options; ignored_modules can be set in its file only."""
    found = vars(launch_command_parser().parse_args(["x.py"]))
    return {name.removeprefix("fsdp_") for name in found if name.startswith("fsdp_")} | {"ignored_modules"}


@cites("LCH014")
@pytest.mark.parametrize("strategy", [FSDP1, FSDP2])
def test_trainer_ignores_most_fsdp_variables(strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The exceptions are in FSDP_ENVIRONMENT_KEYS; most of them have an option."""
    spec, effective = edit(RunSpec(), strategy), set()
    before = plugin_fields(plugin(spec))
    for name in options():
        with monkeypatch.context() as patch:
            patch.setenv(f"FSDP_{ENV.get(name, name.upper())}", OTHER_VALUES.get(name, "true"))
            try:
                changed = plugin_fields(plugin(spec)) != before
            except ValueError:
                changed = True
        if changed:
            effective.add(name)
    assert effective == set(accelerate_launcher.FSDP_ENVIRONMENT_KEYS)


@pytest.mark.parametrize("name", registry.SHARDINGS)
def test_fsdp1_sharding_strategy_follows_the_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the launcher's environment variable has another value."""
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    found = plugin(edit(RunSpec(), {**FSDP1, "parallel.sharding_strategy": name}))
    assert (found.sharding_strategy or found.reshard_after_forward).name == name.upper()


@cites("LCH014")
def test_sections_of_other_engines_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun_config too, with several processes; a single process would be started with mpirun."""
    inner = {"fp8_config": {"backend": "TE"}, "megatron_lm_config": {"megatron_lm_tp_degree": 2}}
    inner["mpirun_config"] = {"mpirun_hostfile": "hosts"}
    before = launcher_arguments(tmp_path, {}, DDP)[1]
    for name in accelerate_launcher.IGNORED_KEYS:
        assert launcher_arguments(tmp_path, {name: inner.get(name, "x")}, DDP)[1] == before
    monkeypatch.setattr(launching, "_get_mpirun_args", lambda: ("mpirun", "-f", "-n", "--npernode", None))
    alone, _ = launcher_arguments(tmp_path, {"mpirun_config": inner["mpirun_config"]}, {"launch.nproc_per_node": 1})
    assert prepare_simple_launcher_cmd_env(alone)[0][:3] == ["mpirun", "-f", "hosts"]


@cites("LCH015")
def test_dynamo_config_compiles_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, kind in ("NO", nn.Linear), ("EAGER", OptimizedModule):
        env = launcher_arguments(tmp_path, {"dynamo_config": {"backend": backend}}, DDP)[1]
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", env["ACCELERATE_DYNAMO_BACKEND"])
        AcceleratorState._reset_state(reset_partial_state=True)
        assert type(Accelerator(cpu=True).prepare(nn.Linear(2, 2))) is kind


class RecordingDict(dict[str, Any]):
    """A dict that records which keys are read."""

    def __init__(self, given: Mapping[str, Any], requested: set[str]) -> None:
        super().__init__(given)
        self.requested = requested

    def __getitem__(self, name: str) -> Any:
        self.requested.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.requested.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.requested.add(str(name))
        return super().__contains__(name)


@cites("STR043")
@pytest.mark.parametrize(
    ("version", "known"),
    [(1, fsdp_extra_config.KNOWN_KEYS | fsdp_extra_config.FSDP1_KEYS), (2, fsdp_extra_config.KNOWN_KEYS)],
)
def test_keys_that_the_trainer_reads(version: int, known: set[str]) -> None:
    requested: set[str] = set()
    for more in {}, {"xla": True}, {"auto_wrap_policy": "SIZE_BASED_WRAP"}:
        table = RecordingDict({"version": version, **more}, requested)
        given = SimpleNamespace(fsdp=True, fsdp_config=table, activation_checkpointing=False)
        TrainingArguments._process_fsdp_args(given)
    assert requested | {"xla_fsdp_v2"} == known  # read by the Trainer itself


def fsdp_units(version: int, **given: Any) -> list[nn.Module] | None:
    """The modules that FSDP would wrap as units; None without a wrap policy."""
    found, model = plugin(edit(RunSpec(), FSDP1 if version == 1 else FSDP2), **given), llama()
    found.set_auto_wrap_policy(model)
    if found.auto_wrap_policy is None:
        assert version == 1 or fsdp2_prepare_auto_wrap_policy(found, model) is None
        return None
    if version == 1:
        return [m for m in model.modules() if found.auto_wrap_policy(module=m, recurse=False, nonwrapped_numel=10**9)]
    wrapped = fsdp2_prepare_auto_wrap_policy(found, model)
    assert wrapped
    return [module for module in model.modules() if wrapped(module)]


@cites("STR044")
@pytest.mark.parametrize("version", [1, 2])
def test_wrap_policies_without_layer_units(version: int) -> None:
    layers = fsdp_units(version)
    assert layers
    assert {type(layer).__name__ for layer in layers} == {"LlamaDecoderLayer"}
    assert fsdp_units(version, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=100)
    assert fsdp_units(version, auto_wrap_policy="SIZE_BASED_WRAP") is None
    assert fsdp_units(version, auto_wrap_policy="NO_WRAP") is None


@pytest.mark.parametrize(
    ("version", "given", "words"),
    [
        (2, {"state_dict_type": "LOCAL_STATE_DICT"}, "FSDP2 does not support LOCAL_STATE_DICT"),
        (2, {"reshard_after_forward": "FULL_SHARD"}, "invalid truth value full_shard"),
        (1, {"reshard_after_forward": True}, "TRUE"),
        (1, {"auto_wrap_policy": "no_wrap"}, "`auto_wrap_policy` must be one of"),
        (2, {"transformer_layer_cls_to_wrap": ["GPT2Block"]}, "Could not find the transformer layer class GPT2Block"),
        (2, {"transformer_layer_cls_to_wrap": []}, "Could not find the transformer layer class"),
        (2, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1e6}, "must be an integer"),
    ],
)
def test_values_that_fsdp_refuses(version: int, given: dict[str, Any], words: str) -> None:
    """STR042; its failing example is launched too."""
    with pytest.raises((ValueError, KeyError), match=words):
        fsdp_units(version, **given)


def test_fsdp2_cannot_wrap_a_module_list(group: None) -> None:
    """STR042 with a minimum size below that of the list of layers."""
    found = fsdp_units(2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=3000)
    assert found
    lists = [module for module in found if isinstance(module, nn.ModuleList)]
    assert lists
    with pytest.raises(ValueError, match="does not support containers that do not implement forward"):
        fully_shard(lists[0])
