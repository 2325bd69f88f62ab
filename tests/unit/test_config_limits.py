"""A config.json with absurd values is refused with the field's name, in little time and memory."""

import json
import subprocess
import sys
import time

import pytest
from small import client

from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import inspect_inputs
from backend.machine import Machine
from backend.modelspec import from_config, lora_modules, trainable_parameters, trainable_tensors
from backend.modelspec.config_limits import LIMITS, config_problem
from backend.registry import BUILTIN_MODELS

LLAMA = dict(BUILTIN_MODELS["tiny-llama"].config)
ATTACK = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
from pathlib import Path
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import Machine
from backend.preflight import preflight
began = time.process_time()
spec = edit(RunSpec(), {"model.source": "path", "model.path": sys.argv[1], **json.loads(sys.argv[2])})
report = preflight(spec, Machine(), Path.cwd())
print(json.dumps([time.process_time() - began, [[f.code, f.message] for f in report.findings]]))
"""


def model(tmp_path, **values):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"\x02\0\0\0\0\0\0\0{}" if name.startswith("model") else b"{}")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **values}))
    return folder


def facts_of(folder):
    spec = edit(RunSpec(), {"model.source": "path", "model.path": str(folder)})
    return inspect_inputs(spec, folder, {"FOOTPLATE_INSPECTION_WORKER": "off"})


@pytest.mark.parametrize("layers", [1_000_000_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_billion_layers_are_an_error_that_names_the_field(tmp_path, layers):
    folder = model(tmp_path, num_hidden_layers=layers)
    command = [sys.executable, "-c", ATTACK, str(folder), "{}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    seconds, findings = json.loads(done.stdout)
    [message] = [message for code, message in findings if code == "MDL014"]
    assert f"num_hidden_layers must be an integer from 1 to 4,096, but is {layers:,}" in message
    assert seconds < 10  # 0.2 s; it took 34 s and 22 GB


WRONG = (10**18, -1, 3.5, "32", True, float("nan"), float("inf"), {}, 10**5000, [10**18])


@pytest.mark.parametrize("name", LIMITS)
def test_every_size_has_limits(name):
    for value in WRONG:
        for config in ({name: value}, {"text_config": {name: value}}):
            assert name in config_problem(config), value
    assert config_problem({name: LIMITS[name]}) == config_problem({name: None}) == config_problem({name: 8.0}) == ""


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"hidden_size": 10**18}, "hidden_size must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"quantization_config": "awq"}, "quantization_config must be an object"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
        ({"layer_types": ["full_attention"] * 10**5}, "layer_types must be a list"),
        ({"architectures": {"a": 1}}, "architectures must be a list"),
        ({"model_type": ["llama"]}, "model_type must be a string"),
        ({"intermediate_size": [1] * 10**5}, "intermediate_size has 100,000 values"),
        ({"other": [[1] * 1000] * 200}, "more than 100,000 values"),
        ({"hidden_size": 2**24, "intermediate_size": 2**24, "num_hidden_layers": 4096}, "parameters; at most"),
        ({"pad_token_id": 10**6}, "pad_token_id is 1,000,000, but the vocabulary has"),
    ],
)
def test_absurd_values_are_findings_and_no_server_error(tmp_path, values, part):
    folder = model(tmp_path, **values)
    facts = facts_of(folder)
    assert part in facts.config_problem and facts.shape is None and facts.shape_unknown_reason
    machine = Machine(python="/bin/true")
    with client(tmp_path / "runs", detect_machine=lambda _: machine) as http:
        form = {"model.source": "path", "model.path": str(folder), "launch.launcher": "python"}
        response = http.post("/api/check", json={"values": form})
        assert response.status_code == 200
        [found] = [finding for finding in response.json()["findings"] if finding["code"] == "MDL014"]
        assert part in found["message"]


@pytest.mark.parametrize("change", [{"pad_token_id": -1}, {"pad_token_id": None}, {"model_type": "gpt2"}])
def test_a_padding_token_that_the_embeddings_accept(change):
    config = {**LLAMA, "pad_token_id": LLAMA["vocab_size"]}
    assert "pad_token_id" in config_problem(config)
    assert not config_problem({**config, **change})


def test_a_deeply_nested_config_is_no_server_error(tmp_path):
    folder = model(tmp_path)
    nested: dict = {}
    for _ in range(40):
        nested = {"a": nested}
    (folder / "config.json").write_text(json.dumps({**LLAMA, "x": nested}))
    assert "nested more than 32 levels" in facts_of(folder).config_problem
    (folder / "config.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    assert "nested too deeply" in facts_of(folder).model_problem
    (folder / "config.json").write_text(json.dumps({"a": "x" * 17 * 2**20}))
    assert "larger than 16 MiB" in facts_of(folder).model_problem


def test_the_largest_allowed_model_is_checked_quickly(tmp_path):
    """Equal layers are counted once. Names with layer numbers have entries of their own."""
    shape = from_config({**LLAMA, "num_hidden_layers": 4096})
    assert len(shape.modules()) < 20 and len(shape.modules(["layers.7.mlp"])) < 40
    assert sum(leaf.count for leaf in shape.modules()) == len(shape.all_modules())
    lora = edit(RunSpec(), {"lora.targets": "custom", "lora.target_modules": ("q_proj", "7.self_attn.v_proj")})
    adapted = {leaf.path: leaf.count for leaf in lora_modules(lora.lora, shape)}
    assert adapted == {
        "model.layers.0.self_attn.q_proj": 4095, "model.layers.7.self_attn.q_proj": 1,
        "model.layers.7.self_attn.v_proj": 1,
    }  # fmt: skip
    began = time.process_time()
    for method in ("full", "lora", "freeze"):
        spec = edit(RunSpec(), {"method.kind": method, "method.freeze_trainable_layers": 1024})
        tensors = trainable_tensors(spec.method, spec.lora, shape)
        assert sum(leaf.parameters * leaf.count for leaf in tensors) == trainable_parameters(spec, shape)
    assert time.process_time() - began < 5  # 0.3 s


def test_numbers_beyond_64_bits_are_no_server_error(tmp_path):
    """Sequences of the largest length and batch need more bytes than 64 bits can count."""
    with client(tmp_path / "runs", detect_machine=lambda _: Machine(python="/bin/true")) as http:
        values = {
            "model.builtin": "tiny-llama", "train.per_device_train_batch_size": 65536, "data.max_length": 4_194_304,
            "model.attn_implementation": "eager", "launch.launcher": "python",
        }  # fmt: skip
        response = http.post("/api/check", json={"values": values})
        assert response.status_code == 200, response.text
