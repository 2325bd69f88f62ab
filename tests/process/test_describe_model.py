"""The worker that builds models on the meta device: its module tables compared with transformers and peft, and that no
process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fork_server import ForkServer, forked_inspection
from parameters import soak_except
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import InputFacts, architecture
from backend.inspect.architecture import ModuleTables
from backend.inspect.worker import ARGUMENTS
from backend.modelspec import NotCausalLM, UnknownArchitecture, all_parameters, trainable_parameters
from backend.modelspec.from_table import KINDS, shape_from_table
from backend.paths import HOME
from backend.rules import Case
from backend.rules.examples import LAPTOP
from backend.train import adapters
from backend.train import model as trained_model

pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA_405B = {
    "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip

# --- Architectures ---

DECODERS = (
    "llama", "afmoe", "apertus", "aria_text", "bamba", "bitnet", "bloom", "codegen", "cohere2", "ctrl", "cwm",
    "deepseek_v2", "deepseek_v3", "diffllama", "doge", "dots1", "ernie4_5_moe", "exaone4", "falcon",
    "flex_olmo", "gemma3", "gemma3n_text", "gemma4_text", "glm4_moe", "gpt_bigcode", "gpt_neo", "gpt_oss",
    "gptj", "granitemoehybrid", "hunyuan_v1_moe", "jamba", "jetmoe", "lfm2", "llama4_text", "longcat_flash",
    "minimax", "mpt", "nemotron", "olmo3", "opt", "phimoe", "qwen2_moe", "qwen3_next", "recurrent_gemma",
    "rwkv", "starcoder2", "xglm", "zamba2",
)  # fmt: skip
NO_LORA = ("mamba", "falcon_h1", "nemotron_h")  # peft refuses their out_proj
# Those that differ most: experts, state spaces, recurrence, latent attention, biases, and old names of modules.
IN_MAKE_TEST = (
    "llama", "bloom", "deepseek_v3", "gpt_bigcode", "gpt_oss", "granitemoehybrid", "recurrent_gemma", "rwkv", "mamba",
)  # fmt: skip
# Fields that a default config lacks.
CONFIG_OVERRIDES: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 16},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "reformer": {"is_decoder": True},
}
# Default configs that transformers 5.23 cannot build, or only with a package that is not installed.
UNBUILDABLE = {
    "cohere_compass_text", "dbrx", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen",
    "musicgen_melody", "qwen4_exp", "qwen4_exp_text",
}  # fmt: skip


def small_config(kind: str, layers: int = 4) -> dict[str, Any]:
    """The default config as it is saved, with fewer layers where the architecture allows it."""
    found = CONFIG_MAPPING[kind](**CONFIG_OVERRIDES.get(kind, {})).to_dict()
    text = found.get("text_config") or found
    depth = text.get("num_hidden_layers")
    cut = {name: value[:layers] for name, value in text.items() if isinstance(value, list) and len(value) == depth}
    return found if found is not text else {**found, **cut, "num_hidden_layers": layers} if depth else found


def workers() -> set[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return {child for child in children if "backend.train.worker" in " ".join(child.cmdline())}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleTables]:
    before = workers()
    made = ModuleTables(tmp_path_factory.mktemp("cache"))
    yield made
    pid = made.pid
    made.close()
    assert process_ended(pid)
    assert workers() <= before


def process_ended(pid: int | None, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while pid and psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def build_model(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        return AutoModelForCausalLM.from_config(made)


def count_parameters(model: Any, trained: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def read_table(tables: ModuleTables, config: dict[str, Any]) -> dict[str, Any]:
    found = tables.wait(config, 120)
    assert isinstance(found, dict), found
    return found


def config_and_table(tables: ModuleTables, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config and its table: with few layers, or with those of the default config where few cannot be built."""
    short = small_config(kind)
    found = tables.wait(short, 120)
    if isinstance(found, dict):
        return short, found
    whole = CONFIG_MAPPING[kind](**CONFIG_OVERRIDES.get(kind, {})).to_dict()
    return whole, read_table(tables, whole)


@pytest.mark.parametrize("kind", soak_except([*DECODERS, *NO_LORA], IN_MAKE_TEST))
def test_counts_match_transformers_and_peft(tables: ModuleTables, kind: str) -> None:
    config, table = config_and_table(tables, kind)
    shape, model = shape_from_table(table, config), build_model(config)
    assert (table["class"], table["causal_lm"], table["kind"]) == (type(model).__name__, True, "decoder")
    assert shape.parameters == table["parameters"] == count_parameters(model)
    own = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert own == {leaf.path for leaf in shape.all_modules()}
    assert {type(module).__name__ for module in model.modules()} == set(table["class_names"])
    assert_freeze_counts(shape, model)
    assert_lora_counts(shape, model, kind, refused=table["lora_refused"])


def assert_freeze_counts(shape: Any, model: Any) -> None:
    depth = model.config.get_text_config().num_hidden_layers if hasattr(model.config, "num_hidden_layers") else 0
    if depth != shape.layers:
        return  # the trainer does not support freezing its layers
    for layers in (1, -2):
        spec = edit(RunSpec(), {"method.kind": "freeze", "method.freeze_trainable_layers": layers})
        chosen = tuple(f"{name}." for name in adapters._unfrozen_modules(spec, model))
        assert trainable_parameters(spec, shape) == sum(
            p.numel() for n, p in model.named_parameters() if n.startswith(chosen)
        )


def assert_lora_counts(shape: Any, model: Any, kind: str, refused: list[str]) -> None:
    """Where adapters on some linear layers are refused, those on all other linear layers are counted."""
    targets = [name for name in shape.lora_target_names if name not in refused]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    if kind in NO_LORA:
        with pytest.raises(ValueError, match="out_proj"):
            get_peft_model(model, config, low_cpu_mem_usage=True)
        return
    changes: dict[str, Any] = {"lora.r": 4}
    if refused:
        config.target_modules = targets
        changes |= {"lora.targets": "custom", "lora.target_modules": tuple(targets)}
    made = get_peft_model(model, config, low_cpu_mem_usage=True)
    spec = edit(RunSpec(), changes)
    counts = trainable_parameters(spec, shape), all_parameters(spec, shape)
    assert counts == trained_model.count_parameters(made) == made.get_nb_trainable_parameters()


def test_the_reference_adapter_is_not_counted() -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, modules_to_save=["lm_head"])
    made = get_peft_model(build_model(small_config("llama")), config, low_cpu_mem_usage=True)
    before = trained_model.count_parameters(made)
    made.add_adapter("ref", config)  # as TRL does for DPO
    assert trained_model.count_parameters(made) == before < made.get_nb_trainable_parameters()


def test_quantized_weights_count_as_elements() -> None:
    four_bit = type("Params4bit", (torch.nn.Parameter,), {})(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    layer = torch.nn.Module()
    layer.register_parameter("weight", four_bit)
    assert trained_model.count_parameters(layer) == (0, 64)


@pytest.mark.parametrize(
    "kind", ["starcoder2", "deepseek_v3", "gpt_oss", "falcon", "opt", "gptj", "glm4_moe", "qwen3_next"]
)
def test_attention_and_custom_targets_match_peft(tables: ModuleTables, kind: str) -> None:
    config, table = config_and_table(tables, kind)
    shape = shape_from_table(table, config)
    plain = [name for name in shape.lora_target_names if name not in table["expert_targets"]]
    for changes in (
        {"lora.targets": "attention"},
        {"lora.targets": "custom", "lora.target_modules": tuple(plain[:2])},
    ):
        spec, model = edit(RunSpec(), {**changes, "lora.r": 4}), build_model(config)
        names = adapters._target_modules(spec, model)
        made = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=names), low_cpu_mem_usage=True
        )
        assert trainable_parameters(spec, shape) == count_parameters(made, trained=True)


@pytest.mark.parametrize("kind", ["llama", "opt", "falcon", "bloom", "stablelm", "gpt_oss", "hunyuan_v1_dense"])
@pytest.mark.parametrize("is_reward_model", [False, True])
def test_tensor_parallel_plan_matches_transformers(tables: ModuleTables, kind: str, is_reward_model: bool) -> None:
    config, table = config_and_table(tables, kind)
    shape = shape_from_table(table, config)
    auto = AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(CONFIG_MAPPING[kind].from_dict(dict(config)))
    shape = shape.with_score_head if is_reward_model else shape
    assert bool(shape.tensor_parallel_plan) == (kind == "llama" or (kind[0] in "gh" and not is_reward_model))
    if shape.tensor_parallel_plan:
        model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    else:
        with pytest.raises(ValueError, match="has no `tp_plan`"):
            model._resolve_parallel_plans(DistributedConfig(tp_size=2))


@pytest.mark.soak
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_causal_language_model_has_a_table_or_a_reason(tables: ModuleTables, kind: str) -> None:
    try:
        config = CONFIG_MAPPING[kind](**CONFIG_OVERRIDES.get(kind, {})).to_dict()
    except Exception:
        assert kind in UNBUILDABLE
        return
    table = tables.wait(config, 120)
    assert isinstance(table, str) == (kind in UNBUILDABLE), table
    if isinstance(table, str):
        return
    try:
        shape = shape_from_table(table, config)
    except UnknownArchitecture:
        assert table["kind"] in ("encoder", "encoder-decoder")
        return
    assert shape.parameters == table["parameters"] == count_parameters(build_model(config))


@pytest.mark.parametrize(
    ("kind", "what", "built"),
    [("bert", "encoder", True), ("bart", "encoder-decoder", True), ("t5", "encoder-decoder", False),
     ("vit", "other", False), ("modernbert", "encoder", False), ("llava", "image-text", False)],
)  # fmt: skip
def test_not_a_causal_language_model(tables: ModuleTables, kind: str, what: str, built: bool) -> None:
    table = read_table(tables, {"model_type": kind})
    assert (table["kind"], table["causal_lm"], "parameters" in table) == (what, built, built)
    with pytest.raises(UnknownArchitecture, match=f"{kind} is {KINDS[what]}, not a causal language model"):
        shape_from_table(table, {"model_type": kind})


def test_large_model_is_described_quickly(tables: ModuleTables) -> None:
    read_table(tables, {"model_type": "llama"})  # the worker has started
    began = time.monotonic()
    table = read_table(tables, LLAMA_405B)
    assert time.monotonic() - began < 5
    assert table["parameters"] == 405_853_388_800 and len(table["layers"]["kinds"]) == 1
    assert len(json.dumps(table)) < 20_000
    assert tables.pid and psutil.Process(tables.pid).memory_info().rss < 2**30
    assert torch.tensor([]).device.type == "cpu"


@pytest.mark.parametrize("kind", [5, "../../etc/passwd", "nonsense"])
def test_an_unknown_model_type_is_refused(tables: ModuleTables, kind: object) -> None:
    config = {"model_type": kind}
    with pytest.raises(NotCausalLM, match=f"transformers .* has no architecture {kind}"):
        shape_from_table(read_table(tables, config), config)


def test_worker_survives_invalid_configs(tables: ModuleTables, tmp_path: Path) -> None:
    read_table(tables, {"model_type": "llama"})
    pid = tables.pid
    own = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for config, word in (
        ({}, "no model_type"),
        ({"model_type": "evil", "auto_map": own, "_name_or_path": str(tmp_path)}, "auto_map"),
        ({"model_type": "llama", "hidden_size": None}, "invalid"),
        ({"model_type": "llama", "num_hidden_layers": 10**7}, "num_hidden_layers"),
        ({"model_type": "llama", "vocab_size": 2**62}, "cannot build the model"),
        ({"model_type": "llama", "rope_scaling": "x"}, ""),
        ({"model_type": "llama", "layer_types": 3}, ""),
    ):
        found = tables.wait(config, 60)
        assert isinstance(found, str) and word in found, config
    read_table(tables, {"model_type": "llama", "auto_map": own, "_name_or_path": str(tmp_path), "num_hidden_layers": 3})
    assert tables.pid == pid
    assert not (tmp_path / "ran").exists()


# --- Processes ---


def warm_worker(fork_server: ForkServer) -> tuple[str, ...]:
    """The command of a worker that has the libraries already."""
    return str(fork_server.python), *ARGUMENTS


def test_killed_worker_is_replaced(tmp_path: Path, fork_server: ForkServer) -> None:
    tables = ModuleTables(tmp_path, command=warm_worker(fork_server))
    try:
        assert tables.get(LLAMA_405B) is None
        until = time.monotonic() + 60
        while not tables.pid and time.monotonic() < until:
            time.sleep(0.02)
        first = tables.pid
        assert first
        os.kill(first, signal.SIGKILL)
        assert "signal 9" in str(tables.wait(LLAMA_405B, 60))
        assert isinstance(tables.wait({"model_type": "llama"}, 120), dict)
        assert tables.pid != first and process_ended(first)
    finally:
        pid = tables.pid
        tables.close()
        assert process_ended(pid)


PARENT = """
import sys, time
from pathlib import Path
from backend.inspect import InputFacts, architecture
from backend.inspect.architecture import ModuleTables
tables = ModuleTables(Path(sys.argv[1]))
tables.get({"model_type": "llama"})
if sys.argv[2] == "ready":
    tables.wait({"model_type": "llama"}, 120)
while not tables.pid:
    time.sleep(0.01)
print(tables.pid, flush=True)
if sys.argv[3] == "killed":
    time.sleep(600)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("killed", "starting"),
        ("leaves", "starting"),
        pytest.param("killed", "ready", marks=pytest.mark.soak),
        pytest.param("leaves", "ready", marks=pytest.mark.soak),
    ],
)
def test_worker_ends_with_its_parent(state: str, ending: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PARENT, str(tmp_path), state, ending]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HOME) as parent:
        assert parent.stdin and parent.stdout
        worker = int(parent.stdout.readline())
        assert psutil.pid_exists(worker)
        if ending == "killed":
            parent.kill()
        parent.stdin.close()
        parent.wait(60)
    assert process_ended(worker, 60)


def test_idle_worker_ends_and_prints_only_json(fork_server: ForkServer) -> None:
    words = [*warm_worker(fork_server), "--idle", "0.5"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=HOME
    ) as p:
        assert p.stdin and p.stdout
        p.stdin.write(b'not json\n{"id": 1}\n{"id": 2, "architecture": {"model_type": "bloom"}}\n')
        p.stdin.flush()
        lines = [json.loads(line) for line in p.stdout]  # until it ends by itself
        assert p.wait(30) == 0
    assert [line.get("id") for line in lines] == [None, None, 2] or [line.get("id") for line in lines[1:]] == [
        None,
        1,
        2,
    ]
    assert lines[-1]["result"]["class"] == "BloomForCausalLM"


def run_command(fork_server: ForkServer, *words: str, given: str = "") -> tuple[int, dict[str, Any]]:
    made = subprocess.run(
        [str(fork_server.python), "-m", "backend.train.describe_model", *words],
        input=given, capture_output=True, text=True, cwd=HOME, timeout=120, check=False,
    )  # fmt: skip
    return made.returncode, json.loads(made.stdout)


def test_table_on_the_command_line(tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    status, found = run_command(fork_server, str(tmp_path))
    assert (status, found["class"]) == (0, "BloomForCausalLM")
    assert run_command(fork_server, "-", given='{"model_type": "bloom"}') == (0, found)
    status, found = run_command(fork_server, str(tmp_path / "missing.json"))
    assert status == 1 and "cannot be read" in found["error"]


REMOTE_CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_remote_code_runs_only_when_trusted(tmp_path: Path, fork_server: ForkServer) -> None:
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "own.py").write_text(REMOTE_CODE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own, "num_hidden_layers": 2}))
    status, found = run_command(fork_server, str(tmp_path))
    assert status == 1 and re.search("no architecture own.*is not run", found["error"])
    status, found = run_command(fork_server, str(tmp_path), "--trust-remote-code")
    assert (status, found.get("class")) == (0, "OwnModel"), found


def test_estimate_command_waits_for_the_worker(
    tmp_path: Path, fork_server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first call gives an estimate, also for an architecture without a closed formula."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(small_config("starcoder2")))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (model / "tokenizer.json").touch()
    (tmp_path / "spec.yaml").write_text(f"model: {{source: path, path: {model}}}\n")
    with forked_inspection(fork_server, tmp_path / "cache"):
        main(["estimate", str(tmp_path / "spec.yaml"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert not found["unknown"] and found["device_bytes"] > 0
    assert len(list((tmp_path / "cache/modeltables").glob("*.json"))) == 1


def test_code_of_the_model_needs_consent(tables: ModuleTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "_tables", lambda folder: tables)
    code = {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    for config, needed in (({"model_type": "own", **code}, True), ({"model_type": "own"}, False)):
        tables.wait(config, 60)
        facts = InputFacts(**architecture.read_architecture(config, {}))
        case = Case(edit(RunSpec(), {"model.source": "path", "model.path": "/m"}), LAPTOP, facts)
        assert ("MDL015" in {rule.code for rule in case.other_errors}) == needed
