"""Module tables as ModelShapes, compared with the closed formulas; the client of the worker, with workers that fail.

The real worker, and every architecture of transformers, are in tests/process/test_describe_model.py.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from specs import NO_TENSORS, estimate, rule_finding
from test_modelspec import CASES, SMALL, build_model

from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import architecture as reading
from backend.inspect import inspect_inputs
from backend.inspect.architecture import FORMAT, ModuleTables, cache_key, has_shared_head
from backend.inspect.model_folder import wait_for_architecture
from backend.inspect.worker import SETTING
from backend.machine import Machine
from backend.modelspec import (
    ARCHITECTURES,
    ModelShape,
    ModuleSpec,
    UnknownArchitecture,
    from_config,
    trainable_parameters,
    trainable_tensors,
)
from backend.modelspec.from_table import shape_from_table
from backend.rules import check
from backend.rules.examples import DEMO, LOCAL_MODEL, TWO_H100, gpus
from backend.train import describe_model
from backend.train.describe_model import describe

RECORDED_TABLES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "module_tables.json").read_text())

# --- Against the closed formulas ---

MORE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True, "num_key_value_heads": 8}),
    ("llama", {"head_dim": 24, "tie_word_embeddings": True}),
    ("mistral", {"tie_word_embeddings": True, "sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ("smollm3", {"tie_word_embeddings": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    ("gemma", {"tie_word_embeddings": False}),
    ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    ("gemma3_text", {"tie_word_embeddings": False}),
    ("phi3", {"tie_word_embeddings": True}),
    ("phi", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    ("mixtral", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"tie_word_embeddings": True, "num_experts": 8, "attention_bias": True}),
    ("olmoe", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt_neox", {"tie_word_embeddings": True}),
]
# Fields that the closed formulas do not set, or set differently.
DIFFERENT_FIELDS = {"architecture", "activation", "layer", "non_layer_modules"}


def both_shapes(kind: str, more: dict[str, Any]) -> tuple[ModelShape, ModelShape]:
    config, _ = build_model(kind, more)
    return from_config(config), shape_from_table(describe(config), config)


def test_infinite_numbers_of_a_saved_config_are_read() -> None:
    """save_pretrained writes {"__float__": "Infinity"}, in config.json of every Mamba 2 model."""
    tables = [
        describe({"model_type": "mamba2", "num_hidden_layers": 1, "time_step_limit": limit})
        for limit in ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    ]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("kind", ["llama4_text", "phimoe"])
def test_linear_layers_that_return_several_tensors_have_no_adapter(kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    table = describe({"model_type": kind, **sizes, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 99})
    assert table["lora_refused"] == ["router"]


@pytest.mark.parametrize(("kind", "more"), [*CASES, *MORE_CASES])
def test_modules_match_the_closed_formula(kind: str, more: dict[str, Any]) -> None:
    closed, read = both_shapes(kind, more)
    assert Counter(read.all_modules()) == Counter(closed.all_modules())
    assert (read.non_layer_modules[0], read.non_layer_modules[-1]) == (
        closed.non_layer_modules[0],
        closed.non_layer_modules[-1],
    )
    for part in fields(ModelShape):
        if part.name not in DIFFERENT_FIELDS:
            assert getattr(read, part.name) == getattr(closed, part.name), part.name
    assert (read.parameters, read.head) == (closed.parameters, closed.head)
    assert set(read.lora_target_names) == set(closed.lora_target_names)
    assert read.with_score_head.parameters == closed.with_score_head.parameters


@pytest.mark.parametrize(("kind", "more"), [*CASES, *MORE_CASES])
def test_trainable_parameters_match_the_closed_formula(kind: str, more: dict[str, Any]) -> None:
    closed, read = both_shapes(kind, more)
    embedding = closed.non_layer_modules[0].path.rpartition(".")[2]
    methods = [
        {"method.kind": "full"},
        *({"method.kind": "freeze", "method.freeze_trainable_layers": layers} for layers in (-3, -1, 0, 2)),
        {
            "method.kind": "freeze",
            "method.freeze_trainable_layers": 1,
            "method.freeze_extra_modules": (embedding, "lm_head"),
        },
        *(
            {"lora.targets": targets, "lora.use_dora": dora}
            for targets in ("all-linear", "attention")
            for dora in (False, True)
        ),
        *(
            {"lora.targets": "custom", "lora.target_modules": names}
            for names in (closed.lora_target_names[:2], closed.lora_target_names)
        ),
        {"lora.modules_to_save": (embedding, "lm_head")},
    ]
    for changes in methods:
        spec = edit(RunSpec(), changes)
        assert trainable_parameters(spec, read) == trainable_parameters(spec, closed), changes
        assert Counter(trainable_tensors(spec.method, spec.lora, read)) == Counter(
            trainable_tensors(spec.method, spec.lora, closed)
        ), changes


@pytest.mark.parametrize(("kind", "more"), CASES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"method.kind": "full"}, marks=pytest.mark.soak),
        pytest.param({"method.quantization": "nf4"}, marks=pytest.mark.soak),
    ],
)
def test_memory_estimate_matches_the_closed_formula(kind: str, more: dict[str, Any], changes: dict[str, Any]) -> None:
    closed, read = both_shapes(kind, more)
    machine = gpus(1, "H100", 80, (9, 0))
    result, known = (estimate(edit(RunSpec(), changes), machine, shape).rows for shape in (read, closed))
    if kind not in ("gemma2", "gemma3_text"):  # their order of norms differs, which no sum depends on
        assert [row.name for row in result] == [row.name for row in known]
    assert sum(row.bytes for row in result) == sum(row.bytes for row in known)


# --- Other architectures, from recorded tables ---


def recorded(kind: str) -> ModelShape:
    return shape_from_table(RECORDED_TABLES[kind]["table"], RECORDED_TABLES[kind]["config"])


def test_the_recorded_tables_are_current() -> None:
    for kind, row in RECORDED_TABLES.items():
        assert describe(row["config"]) == {**row["table"], "transformers": row["table"]["transformers"]}, kind


@pytest.mark.parametrize("kind", ["starcoder2", "deepseek_v3", "mamba", "gptj", "gpt_oss"])
def test_parameters_match_the_model(kind: str) -> None:
    shape = recorded(kind)
    assert (
        shape.parameters
        == RECORDED_TABLES[kind]["table"]["parameters"]
        == sum(leaf.parameters for leaf in shape.all_modules())
    )
    assert hash(shape) == hash(recorded(kind)) and shape == recorded(kind)


@pytest.mark.parametrize(("kind", "expected"), [("bert", True), ("mamba", False), ("gptj", False)])
def test_the_output_layer_of_bert_has_the_bias_of_another_module(kind: str, expected: bool) -> None:
    """Mamba's shares its weight with the embedding, and GPT-J's has its own bias."""
    assert has_shared_head(RECORDED_TABLES[kind]["table"]) is expected


def test_layers_of_two_kinds() -> None:
    shape = recorded("deepseek_v3")
    assert shape.layers == 5 and shape.layer_kind_indices == (0, 1, 1, 1, 1) and len(shape.layer_kinds) == 2
    assert shape.layer == shape.layer_kinds[1] and not shape.activations_unknown
    assert shape.layer_parameters == max(sum(leaf.parameters for leaf in kind) for kind in shape.layer_kinds)
    paths = {leaf.path for leaf in shape.all_modules()}
    assert "model.layers.0.mlp.down_proj" in paths and "model.layers.1.mlp.experts" in paths
    assert "model.layers.1.mlp.shared_experts.down_proj" in paths
    # Multi-head latent attention; two chosen experts and the shared one, which is as wide as they are.
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.experts, shape.experts_per_token) == (8, 8, 16, 4, 3)
    assert (shape.intermediate, shape.gated_mlp) == (48, True)


def test_latent_attention_needs_as_many_kv_heads_as_query_heads() -> None:
    config = {**RECORDED_TABLES["deepseek_v3"]["config"], "num_attention_heads": 8}
    for kv_heads, attention, is_refused in (
        (8, "auto", 0),
        (4, "auto", 1),
        (4, "flash_attention_2", 0),
        (None, "eager", 0),
    ):
        own = {**config, "num_key_value_heads": kv_heads}
        facts = replace(DEMO, shape=shape_from_table(describe(own), own))
        finding = rule_finding("MDL017", {**LOCAL_MODEL, "model.attn_implementation": attention}, TWO_H100, facts)
        assert bool(finding) is bool(is_refused), (kv_heads, attention)


def test_expert_target_names_do_not_match_linear_layers() -> None:
    leaves = {leaf.path: leaf for leaf in recorded("deepseek_v3").all_modules() if not leaf.stacked}
    assert not leaves["model.layers.0.mlp.gate_proj"].accepts_lora and leaves["model.layers.0.mlp.gate_proj"].is_linear
    assert "up_proj" not in leaves["model.layers.1.mlp.shared_experts.up_proj"].lora_names()
    assert leaves["model.layers.1.self_attn.q_b_proj"].accepts_lora


@pytest.mark.parametrize("kind", ["afmoe", "beam", "deepseek_v4"])
def test_attention_layers_that_peft_cannot_adapt_are_refused(kind: str) -> None:
    """gate_proj of gated attention: peft takes it for the experts' gate_proj and fails without up_proj."""
    config = {"model_type": kind, "num_hidden_layers": 3}
    shape = shape_from_table(describe(config), config)
    (odd,) = {leaf.path.rpartition(".")[2] for leaf in shape.modules() if "attn" in leaf.path and leaf.is_linear} - {
        name for leaf in shape.modules() if leaf.accepts_lora and "attn" in leaf.path for name in leaf.lora_names()
    }
    facts = replace(DEMO, shape=shape)
    finding = rule_finding("ADP010", {"lora.targets": "attention"}, TWO_H100, facts)
    assert odd == {"deepseek_v4": "o_a_proj"}.get(kind, "gate_proj") and finding and odd in finding.message
    assert rule_finding("ADP010", dict(finding.fixes[0].patch), TWO_H100, facts) is None


def test_a_reference_adapter_cannot_be_put_on_a_quantized_router() -> None:
    config = {"model_type": "afmoe", "num_hidden_layers": 3}
    facts = replace(DEMO, model_type="afmoe", shape=shape_from_table(describe(config), config))
    nf4 = {"method.quantization": "nf4"}
    for stage, is_refused in (("dpo", True), ("kto", True), ("sft", False)):
        finding = rule_finding("ADP010", {**nf4, "train.stage": stage}, TWO_H100, facts)
        assert bool(finding and "gate" in finding.message) == is_refused, stage
    assert rule_finding("ADP010", {"train.stage": "dpo"}, TWO_H100, facts) is None


@pytest.mark.parametrize("kind", ["mamba", "recurrent_gemma"])
def test_attention_targets_need_layers_that_are_named_attention(kind: str) -> None:
    config = {"model_type": kind, "num_hidden_layers": 3}
    facts = replace(DEMO, shape=shape_from_table(describe(config), config))
    finding = rule_finding("ADP011", {"lora.targets": "attention"}, TWO_H100, facts)
    assert finding and rule_finding("ADP011", dict(finding.fixes[0].patch), TWO_H100, facts) is None


def test_layers_without_an_adapter_are_named() -> None:
    finding = rule_finding("ADP012", {}, TWO_H100, replace(DEMO, shape=recorded("deepseek_v3")))
    assert finding and "mlp.gate_proj, " in finding.message and "shared_experts.down_proj" in finding.message
    assert rule_finding("ADP012", {}, TWO_H100, replace(DEMO, shape=recorded("starcoder2"))) is None


def test_experts_unknown_to_peft_have_no_adapter() -> None:
    shape = recorded("gpt_oss")
    finding = rule_finding("ADP012", {}, TWO_H100, replace(DEMO, shape=shape))
    assert finding and "mlp.experts of" in finding.message and "router" not in finding.message
    experts = [leaf for leaf in shape.layer if leaf.stacked]
    assert len(experts) == 2 and not any(leaf.accepts_lora or leaf.target_names for leaf in experts)
    assert set(shape.lora_target_names) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert (shape.experts, shape.experts_per_token, shape.intermediate, shape.gated_mlp) == (4, 2, 160, True)
    assert not shape.supports_sdpa and shape.has_sliding_window


def test_what_transformers_lacks_for_an_architecture() -> None:
    """gpt-oss replaces FlashAttention by kernels with attention sinks, and its plan shards only the output layer."""
    shape = recorded("gptj")
    assert (shape.unsupported_attentions, shape.tensor_parallel_plan) == (("flex_attention", "sdpa"), "")
    shape = recorded("gpt_oss")
    assert shape.unsupported_attentions == ("flash_attention_2", "flash_attention_3", "sdpa")
    assert (shape.tensor_parallel_plan, shape.with_score_head.tensor_parallel_plan) == ("head", "")
    for shape in (recorded("starcoder2"), recorded("starcoder2").with_score_head):
        assert (shape.unsupported_attentions, shape.tensor_parallel_plan) == ((), "layers")
        assert shape.supports_activation_checkpointing


@pytest.mark.parametrize(
    ("code", "patch"),
    [
        ("KRN012", {"model.attn_implementation": "sdpa"}),
        ("STR038", {"parallel.strategy": "tensor", "method.kind": "full", "save.strategy": "no"}),
    ],
)
def test_what_transformers_lacks_is_reported_once_it_is_known(code: str, patch: dict[str, Any]) -> None:
    assert rule_finding(code, patch, TWO_H100, replace(DEMO, shape=recorded("gptj")))
    assert not rule_finding(code, patch, TWO_H100, replace(DEMO, shape=None))


def test_a_plan_for_the_output_layer_alone_does_not_divide_the_layers() -> None:
    tensor = {"parallel.strategy": "tensor", "method.kind": "full", "save.strategy": "no"}
    found = rule_finding("STR038", tensor, TWO_H100, replace(DEMO, shape=recorded("gpt_oss")))
    assert found and "covers only the output layer" in found.message


def test_state_space_model_has_parameters_but_unknown_activations() -> None:
    shape = recorded("mamba")
    assert shape.parameters > 0 and (shape.heads, shape.layers_path) == (0, "backbone.layers")
    assert "not modeled" in shape.activations_unknown
    result = estimate(RunSpec(), gpus(1, "H100", 80, (9, 0)), shape)
    assert result.lower_bound and result.fits is None and result.unknown == shape.activations_unknown
    assert not next(leaf for leaf in shape.layer if leaf.path.endswith("out_proj")).accepts_lora  # peft refuses it
    assert trainable_parameters(RunSpec(), shape) > 0
    assert (
        0
        < trainable_parameters(edit(RunSpec(), {"method.kind": "freeze", "method.freeze_trainable_layers": 1}), shape)
        < shape.parameters
    )


def test_attention_without_sdpa_saves_its_scores() -> None:
    machine, spec = gpus(1, "H100", 80, (9, 0)), edit(RunSpec(), {"data.max_length": 2048})
    shape = recorded("gptj")
    threads = edit(spec, {"model.attn_implementation": "eager"})
    assert not shape.supports_sdpa
    assert estimate(spec, machine, shape).device_bytes == estimate(threads, machine, shape).device_bytes


@pytest.mark.parametrize(("kind", "word"), [("bert", "an encoder"), ("t5", "an encoder-decoder model")])
def test_not_a_causal_language_model(kind: str, word: str) -> None:
    with pytest.raises(UnknownArchitecture, match=f"{kind} is {word}, not a causal language model"):
        recorded(kind)


def test_incomplete_table_is_an_unknown_architecture() -> None:
    row = RECORDED_TABLES["starcoder2"]
    for name in ("facts", "layers", "non_layer_modules", "expert_targets"):
        with pytest.raises(UnknownArchitecture, match="could not be read completely"):
            shape_from_table({k: v for k, v in row["table"].items() if k != name}, row["config"])


def test_dtype_and_quantization_come_from_the_config() -> None:
    row = RECORDED_TABLES["starcoder2"]
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    shape = shape_from_table(row["table"], {**row["config"], "dtype": "bfloat16", "quantization_config": packed})
    assert (shape.dtype, shape.weight_bits, shape.group_size) == ("bfloat16", 4, 64)
    assert cache_key({**row["config"], "dtype": "bfloat16"}) == cache_key(row["config"])
    assert cache_key({**row["config"], "vocab_size": 301}) != cache_key(row["config"])


def test_invalid_configs_give_a_reason() -> None:
    for config, word in (
        ({}, "no model_type"),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map"),
        ({"model_type": "llama", "hidden_size": "wide"}, "invalid"),
        ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "llama", "hidden_size": -5}, "invalid"),
        ({"model_type": "nemotron"}, "cannot build the model: TypeError"),  # head_dim has no default
    ):
        with pytest.raises(describe_model.Refused, match=word):
            describe(config)


# --- The client, with a fake worker ---

TABLE = {"format": FORMAT, "kind": "decoder"}
FAKE_WORKER = """
import json, os, sys, time
print(json.dumps({"ready": os.getpid()}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    config = request["architecture"]
    if config.get("do") == "crash":
        print("fake failure", file=sys.stderr)
        os._exit(7)
    if config.get("do") == "signal":
        os.kill(os.getpid(), 9)
    if config.get("do") == "large":
        os._exit(3)
    if config.get("do") == "sleep":
        time.sleep(600)
    if config.get("do") == "no-json":
        print("no json", flush=True)
        continue
    answer = {"error": "it is broken"} if config.get("do") == "error" else {"result": TABLE}
    print(json.dumps({"id": request["id"], **answer}), flush=True)
"""
MakeTables = Callable[..., ModuleTables]


def process_ended(pid: int | None, seconds: float = 60) -> bool:
    """Whether the process ends and is reaped within `seconds`."""
    deadline = time.monotonic() + seconds
    while pid and Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeTables]:
    made: list[ModuleTables] = []

    def tables(code: str = FAKE_WORKER, folder: Path = tmp_path, **more: Any) -> ModuleTables:
        command = (sys.executable, "-c", code.replace("TABLE", repr(TABLE)))
        made.append(ModuleTables(folder, command=command, **more))
        return made[-1]

    yield tables
    pids = [one.pid for one in made]
    for one in made:
        one.close()
    assert all(process_ended(pid) for pid in pids)


def test_table_is_computed_in_the_background_and_cached(make: MakeTables, tmp_path: Path) -> None:
    tables, config = make(), {"model_type": "a"}
    start = time.monotonic()
    assert tables.get(config) is None
    assert time.monotonic() - start < 0.5
    assert tables.wait(config, 20) == TABLE
    assert tables.get(config) == TABLE
    pid = tables.pid
    assert tables.wait({"model_type": "b"}, 60) == TABLE and tables.pid == pid, "one worker for all"
    again = make()
    assert again.get(config) == TABLE and again.pid is None, "from the disk"
    (stored,) = (p for p in (tmp_path / "modeltables").iterdir() if p.stem == cache_key(config))
    for text in ("{", "[]", '{"format": 0}'):
        stored.write_text(text)
        assert make().get(config, start=False) is None, "cut off, or of another format"


@pytest.mark.parametrize(
    ("do", "word"),
    [
        ("crash", "exit status 7: fake failure"),
        ("signal", "signal 9"),
        ("large", "too much CPU memory"),
        ("sleep", "longer than 1 seconds"),
        ("no-json", "no json"),
        ("error", "it is broken"),
    ],
)
def test_failed_worker_gives_a_reason_and_is_replaced(make: MakeTables, do: str, word: str) -> None:
    tables = make(seconds=1)
    result = tables.wait({"do": do}, 60)
    assert isinstance(result, str) and word in result
    assert tables.get({"do": do}) == result, "kept in memory"
    assert tables.wait({"model_type": "a"}, 60) == TABLE
    assert make().get({"do": do}, start=False) is None, "and not on disk"


def test_worker_that_does_not_start_gives_a_reason(make: MakeTables) -> None:
    assert "start within 0.5 seconds" in str(make("import time; time.sleep(600)", start_seconds=0.5).wait({}, 60))
    assert "exit status 1" in str(make("raise SystemExit(1)").wait({}, 60))
    missing = ModuleTables(Path("/nowhere"), command=("/nowhere/python",))
    assert "No such file" in str(missing.wait({}, 60))


def test_wait_times_out(make: MakeTables) -> None:
    tables = make()
    start = time.monotonic()
    assert "longer than 0.2 seconds" in str(tables.wait({"do": "sleep"}, 0.2))
    assert time.monotonic() - start < 5
    tables.close()
    assert tables.pid is None


def test_idle_worker_ends_and_restarts(make: MakeTables) -> None:
    tables = make(idle_seconds=0.2)
    assert tables.wait({"model_type": "a"}, 60) == TABLE
    deadline = time.monotonic() + 60
    while tables.pid and time.monotonic() < deadline:
        time.sleep(0.05)
    assert tables.pid is None
    assert tables.wait({"model_type": "b"}, 60) == TABLE


def test_unwritable_cache_is_skipped(make: MakeTables, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tables = make(folder=tmp_path / "file")
    assert tables.wait({"model_type": "a"}, 60) == TABLE
    assert tables.get({"model_type": "a"}) == TABLE


def test_concurrent_requests(make: MakeTables) -> None:
    tables, result = make(), []
    threads = [
        threading.Thread(target=lambda n=n: result.append(tables.wait({"model_type": str(n % 4)}, 60)))
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert result == [TABLE] * 16 and len(list(tables.folder.glob("*.json"))) == 4


# --- Inspection with module tables ---


def folder(path: Path, config: dict[str, Any]) -> RunSpec:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(NO_TENSORS)
    (path / "tokenizer.json").touch()
    return edit(RunSpec(), {"model.source": "path", "model.path": str(path)})


@pytest.fixture
def recorded_worker(make: MakeTables, monkeypatch: pytest.MonkeyPatch) -> ModuleTables:
    """A worker that returns the recorded tables; inspection may start it."""
    known = {row["config"]["model_type"]: row["table"] for row in RECORDED_TABLES.values()}
    tables = make(FAKE_WORKER.replace('{"result": TABLE}', f'{{"result": {known!r}[config["model_type"]]}}'))
    monkeypatch.setattr(reading, "_tables", lambda folder: tables)
    monkeypatch.setattr("backend.inspect.inspect_examples", lambda *_: {})
    monkeypatch.setenv(SETTING, "on")
    return tables


def test_inspection_reads_an_architecture_in_the_background(recorded_worker: ModuleTables, tmp_path: Path) -> None:
    spec = folder(tmp_path / "model", RECORDED_TABLES["starcoder2"]["config"])
    first = inspect_inputs(spec, tmp_path)
    assert first.shape is None and first.architecture_pending
    assert "starcoder2 is being read" in first.shape_unknown_reason
    wait_for_architecture(spec, tmp_path)
    result = inspect_inputs(spec, tmp_path)
    assert result.shape is not None and result.shape.parameters == RECORDED_TABLES["starcoder2"]["table"]["parameters"]
    assert result.shape is inspect_inputs(spec, tmp_path).shape
    assert result.module_classes[0] == "Starcoder2DecoderLayer"
    assert {"c_fc", "layers", "score"} <= result.module_attributes
    invalid_spec = edit(spec, {"lora.targets": "custom", "lora.target_modules": ("q_proj", "gate_proj")})
    assert "MTH002" in {f.code for f in check(invalid_spec, Machine(), inspect_inputs(invalid_spec, tmp_path))}


def test_expert_target_names_come_from_peft(recorded_worker: ModuleTables, tmp_path: Path) -> None:
    spec = folder(tmp_path / "model", RECORDED_TABLES["deepseek_v3"]["config"])
    wait_for_architecture(spec, tmp_path)
    assert inspect_inputs(spec, tmp_path).stacked_modules == ("gate_proj", "up_proj", "down_proj", "gate")


def test_encoder_is_rejected(recorded_worker: ModuleTables, tmp_path: Path) -> None:
    spec = folder(tmp_path / "model", RECORDED_TABLES["bert"]["config"])
    wait_for_architecture(spec, tmp_path)
    assert inspect_inputs(spec, tmp_path).shape_unknown_reason == "bert is an encoder, not a causal language model"


def test_closed_formula_starts_no_worker(recorded_worker: ModuleTables, tmp_path: Path) -> None:
    small = {name: value for name, value in SMALL.items() if "expert" not in name}
    spec = folder(tmp_path / "model", {"model_type": "llama", **small})
    wait_for_architecture(spec, tmp_path)
    assert inspect_inputs(spec, tmp_path).shape is not None and recorded_worker.pid is None


def test_remote_code_is_not_described(recorded_worker: ModuleTables, tmp_path: Path) -> None:
    config = {**RECORDED_TABLES["starcoder2"]["config"], "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    trusted = edit(folder(tmp_path / "model", config), {"model.trust_remote_code": True})
    assert "no formula for the architecture" in inspect_inputs(trusted, tmp_path).shape_unknown_reason
    assert recorded_worker.pid is None
    wait_for_architecture(folder(tmp_path / "model", config), tmp_path)
    assert inspect_inputs(folder(tmp_path / "model", config), tmp_path).shape is not None, (
        "transformers' own class is used"
    )


def test_vision_tower_is_counted_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: value for name, value in SMALL.items() if "expert" not in name}
    text = {"model_type": "gemma3_text", **small}
    tower = {"model_type": "siglip_vision_model", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    spec = folder(tmp_path / "model", {"model_type": "gemma3", "text_config": text, "vision_config": tower})
    table: dict[str, Any] = {}

    class Tables:
        def get(self, config: dict[str, Any], start: bool = True) -> Any:
            return table or None

    monkeypatch.setattr(reading, "_tables", lambda folder: Tables())
    text_only = inspect_inputs(spec, tmp_path).shape
    table |= describe(json.loads((tmp_path / "model/config.json").read_text()))
    with_tower = inspect_inputs(spec, tmp_path).shape
    assert text_only and with_tower and text_only.parameters == from_config(text).parameters < with_tower.parameters
    assert with_tower.parameters == table["parameters"] and with_tower.layers_path == "model.language_model.layers"


@pytest.mark.parametrize("kind", ["llava", "llava_next_video", "an_unknown_wrapper"])
def test_models_around_a_language_model_that_transformers_does_not_load_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed formulas describe their language model, but AutoModelForCausalLM does not load the whole model."""
    small = {name: value for name, value in SMALL.items() if "expert" not in name}
    config = {"model_type": kind, "text_config": {"model_type": "llama", **small}}
    spec, table = folder(tmp_path / "model", config), describe(config)

    class Tables:
        def get(self, config: dict[str, Any], start: bool = True) -> Any:
            return table

    monkeypatch.setattr(reading, "_tables", lambda folder: Tables())
    facts = inspect_inputs(spec, tmp_path)
    assert facts.shape is None and kind in facts.architecture_problem
    custom = {**config, "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    trusted = edit(folder(tmp_path / "custom", custom), {"model.trust_remote_code": True})
    assert not inspect_inputs(trusted, tmp_path).architecture_problem, "its own code loads it"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "use_bidirectional_attention": True}},
        {"model_type": "qwen2", "is_causal": False},
        {"model_type": "qwen2", "is_causal": None},
        {"model_type": "doge", "is_moe": True},
    ],
)
def test_models_whose_tokens_see_later_ones_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """Embedding models have the type of the causal model that they were made from."""
    assert inspect_inputs(folder(tmp_path / "model", config), tmp_path).architecture_problem
    custom = {**config, "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    trusted = edit(folder(tmp_path / "custom", custom), {"model.trust_remote_code": True})
    assert not inspect_inputs(trusted, tmp_path).architecture_problem, "its own code loads it"
    flags = {"use_bidirectional_attention": "vision", "is_causal": True, "is_moe": False}
    causal = {name: flags.get(name, value) for name, value in config.items() if name != "text_config"}
    assert not inspect_inputs(folder(tmp_path / "causal", causal), tmp_path).architecture_problem


@pytest.mark.parametrize(("is_scaled", "unused"), [(True, ()), (False, ("altup",))])
def test_unused_parameters_of_gemma_3n_are_read(is_scaled: bool, unused: tuple[str, ...], tmp_path: Path) -> None:
    spec = folder(tmp_path / "model", {"text_config": {"model_type": "gemma3n_text", "altup_correct_scale": is_scaled}})
    assert inspect_inputs(spec, tmp_path).unused_modules == unused


def test_layerdrop_is_read(tmp_path: Path) -> None:
    for kind, key in (("opt", "layerdrop"), ("trocr", "decoder_layerdrop")):
        for value, found in ((0.1, 0.1), (None, 0.0), ("x", 0.0)):
            spec = folder(tmp_path / "model", {"model_type": kind, key: value})
            assert inspect_inputs(spec, tmp_path).layerdrop == found


def test_without_worker_or_cache(tmp_path: Path) -> None:
    assert os.environ[SETTING] == "off"  # tests/conftest.py
    result = inspect_inputs(folder(tmp_path / "model", RECORDED_TABLES["starcoder2"]["config"]), tmp_path, os.environ)
    assert result.shape is None
    assert result.shape_unknown_reason == "Footplate has no formula for the architecture starcoder2"
    assert "Starcoder2DecoderLayer" in result.module_classes


def test_module_without_a_name_is_the_layer() -> None:
    shape = ModelShape(**{**vars_of(recorded("gptj")), "layer": (ModuleSpec("", 3),), "layers": 2})
    assert [leaf.path for leaf in shape.all_modules()[:2]] == ["transformer.h.0", "transformer.h.1"]


def vars_of(shape: ModelShape) -> dict[str, Any]:
    return {part.name: getattr(shape, part.name) for part in fields(ModelShape)}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_layer_classes_of_closed_formulas_are_known_without_a_worker(kind: str) -> None:
    """Also those whose source file has another name: gemma3_text is in modeling_gemma3.py."""
    layers = reading._classes(kind)
    assert layers and layers[0].endswith(("DecoderLayer", "Block", "Layer"))
