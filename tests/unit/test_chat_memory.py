"""What loading the models of a chat takes, from the headers of weight files and the options of training."""

import json
import struct

import pytest
from test_chat import LORA, make_run

from backend.machine import Gpu, Machine
from backend.memory import inference
from backend.memory.host import LIBRARY_BYTES
from backend.models.spec import read_spec_outside_training
from backend.runs import JOB
from backend.runs.folder import RunError
from backend.wording import data_size

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
    "input_layernorm": (64,), "post_attention_layernorm": (64,),
}  # fmt: skip
SHAPES = {f"model.layers.{n}.{name}.weight": shape for n in (0, 1) for name, shape in LAYER.items()}
SHAPES |= {"model.embed_tokens.weight": (100, 64), "model.norm.weight": (64,)}
LINEAR = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)  # weights of the linear layers
OTHERS = 100 * 64 + 5 * 64
CACHE = 2 * 2 * 2 * 16  # elements of a token: keys and values of 2 layers with 2 heads of 16


def write_model(folder, shapes=None, **config):
    """A model folder whose weights file has the header of such a file, and no values that anybody reads."""
    folder.mkdir(parents=True, exist_ok=True)
    header, start = {}, 0
    for name, shape in (shapes or SHAPES).items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def run_on(tmp_path, changes=None, base=True, resolved=None):
    """A run whose base model is in a folder."""
    folder = write_model(tmp_path / "base") if base else tmp_path / "gone"
    run = make_run(tmp_path / "runs", {**LORA, "model.source": "path", "model.path": str(folder), **(changes or {})})
    known = json.loads((run.path / "resolved.json").read_text())
    (run.path / "resolved.json").write_text(json.dumps({**known, **(resolved or {})}))
    return run


def sizes(memory):
    return [row.bytes for row in memory.rows]


@pytest.mark.parametrize(("dtype", "each"), [("fp32", 4), ("bf16", 2)])
def test_an_adapter_on_its_base_model(tmp_path, dtype, each):
    memory = inference.of_chat(run_on(tmp_path, resolved={"compute_dtype": dtype}), Machine(ram_free_bytes=2**30))
    assert sizes(memory) == [(LINEAR + OTHERS) * each, 1, LIBRARY_BYTES]
    assert memory.token_bytes == CACHE * each and memory.compared.bytes == 0 and not memory.warning
    assert f"({LINEAR + OTHERS:,} parameters in {dtype})" in memory.text
    assert memory.text.endswith("1 GiB is free.") and "of CPU memory" in memory.text


def test_a_quantized_base_model(tmp_path):
    changes = {"method.quantization": "nf4", "method.bnb_4bit_use_double_quant": False}
    base = sizes(inference.of_chat(run_on(tmp_path, changes), Machine()))[0]
    scales = LINEAR // 64 * 4
    assert LINEAR // 2 + scales + OTHERS * 4 <= base <= LINEAR // 2 + scales + OTHERS * 4 + 14 * 64


def test_full_weights_and_the_base_model_next_to_them(tmp_path):
    run = run_on(tmp_path, {"method.kind": "full"})
    for folder in (run.path / "model", run.path / "checkpoints/checkpoint-2"):
        (folder / "adapter_config.json").unlink()
        (folder / "adapter_model.safetensors").unlink()
        write_model(folder)
    whole = (LINEAR + OTHERS) * 4
    memory = inference.of_chat(run, Machine(ram_free_bytes=LIBRARY_BYTES + whole + 1))
    assert sizes(memory) == [whole, LIBRARY_BYTES] and memory.compared.bytes == whole
    assert memory.warning == (
        f"A comparison with the base model does not fit: both models take {data_size(LIBRARY_BYTES + 2 * whole)}, and "
        f"{data_size(memory.free_bytes)} is free."
    )


def test_a_checkpoint_that_changed_the_base_weights(tmp_path):
    run = run_on(tmp_path, resolved={"compute_dtype": "bf16"})
    for folder in (run.path / "model", run.path / "checkpoints/checkpoint-2"):
        (folder / "adapter_config.json").write_text(
            json.dumps({"init_lora_weights": "olora", "base_model_name_or_path": "b"})
        )
    memory = inference.of_chat(run, Machine())
    assert sizes(memory)[0] == (LINEAR + OTHERS) * 4, "they are changed in fp32"
    assert memory.compared.bytes == (LINEAR + OTHERS) * 2


def test_the_gpu_of_the_run_and_its_free_memory(tmp_path):
    run = run_on(tmp_path, resolved={"device": "cuda", "device_ids": [1], "compute_dtype": "bf16"})
    gpus = tuple(Gpu(id, "H200", 2**34, free) for id, free in ((0, 2**34), (1, 2**20)))
    memory = inference.of_chat(run, Machine(device="cuda", gpus=gpus))
    assert (memory.device, memory.free_bytes) == ("GPU 1", 2**20) and sizes(memory)[-1] == 2**30
    assert memory.warning.startswith("The model does not fit: it takes 1 GiB of the memory of GPU 1, and 1 MiB is free")
    assert "out-of-memory error" in memory.warning
    used = Machine(device="cuda", gpus=(Gpu(1, "H200", 2**34, 2**20, processes=("python (4711)",)),))
    waiting = inference.of_chat(run, used)
    assert not waiting.warning and waiting.text.endswith(
        "16 GiB is free once the other programs on the device have ended (the chat waits for them)."
    )
    (run.path / JOB).write_text(json.dumps({"state": "done", "text": "Done."}))
    assert inference.of_chat(run, used).device == "the CPU", "as for every job of a run that was a cluster's"
    elsewhere = inference.of_chat(run, Machine())
    small = inference.of_chat(run, Machine(ram_free_bytes=1))
    assert elsewhere.device == "the CPU" and "the system may kill the process" in small.warning


def test_what_is_not_known_is_said(tmp_path):
    memory = inference.of_chat(run_on(tmp_path, base=False), Machine())
    assert "at least" in memory.text and "The size of the base model is not known." in memory.text
    empty = make_run(tmp_path / "empty", files=())
    with pytest.raises(RunError, match="has no model to load"):
        inference.of_chat(empty, Machine())


def test_a_base_model_in_the_cache_of_the_run(tmp_path):
    """launch.env can set another one than that of Footplate."""
    snapshot = tmp_path / "hub/models--org--m/snapshots" / ("a" * 40)
    write_model(snapshot)
    (tmp_path / "hub/models--org--m/refs").mkdir()
    (tmp_path / "hub/models--org--m/refs/main").write_text("a" * 40)
    changes = {"model.source": "hub", "model.hub_id": "org/m", "launch.env": {"HF_HUB_CACHE": str(tmp_path / "hub")}}
    assert "is not known" not in inference.of_chat(run_on(tmp_path, changes), Machine()).text


def test_the_commit_of_the_base_model_that_training_has_loaded(tmp_path):
    """The branch may have moved: config.json can be another one although the weights are the same."""
    hub = {"model.source": "hub", "model.hub_id": "org/m"}
    run, moved = run_on(tmp_path, hub), run_on(tmp_path / "moved", {**hub, "model.hub_id": "org/renamed"})
    assert read_spec_outside_training(run).model.revision == "main", "not recorded by an earlier version"
    for each in (run, moved):
        (each.path / "base.json").write_text(json.dumps({"name": "org/m", "commit": "c" * 40}))
    assert read_spec_outside_training(run).model.revision == "c" * 40
    assert read_spec_outside_training(moved).model.revision == "main"
