"""Serving with vLLM: its arguments, what is refused before the start, requests, and how it ends.

The program vllm is replaced by fake_vllm.py, which knows the arguments of vLLM 0.33; vLLM itself was not run.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from failed_runs import ended, planted_run
from test_serve import OWN, end, export, status_of
from waiting import wait_for

from backend import environments
from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.environments import vllm as server
from backend.machine import Gpu, Machine, probe
from backend.models import merge, serve, vllm
from backend.models.serve import Settings
from backend.models.spec import read_spec
from backend.presets import dump
from backend.runs import LOCK, LOG, RESULT, SPEC, STATE, TOKEN, jobs, notebook, processes
from backend.runs.folder import ALIVE, RunError
from backend.serve.client import ServeError
from backend.serve.vllm import start

CHANGES = {"data.chat_template_kwargs": '{"enable_thinking": false}'}
ADAPTER = {"peft_type": "LORA", "r": 24, "lora_alpha": 48, "use_rslora": True, "bias": "none"}
GIB = 2**30
GPUS = Machine(
    "cuda",
    tuple(Gpu(number, "H100", 80 * GIB, 79 * GIB, (9, 0), uuid=f"GPU-{number}-{os.getpid()}") for number in range(2)),
    driver_version="580.95",
)


@pytest.fixture(scope="module")
def environment(empty_cache):
    """The environment vllm, with the program that stands in for vLLM's."""
    folder = environments.environment_folder("vllm")
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin/vllm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {Path(__file__).parent / "fake_vllm.py"} "$@"\n')
    program.chmod(0o755)
    (folder / environments.COMPLETE).touch()
    return folder


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, which no other program uses."""
    monkeypatch.setattr(serve, "probe", lambda _: GPUS)


@pytest.fixture
def run(tmp_path):
    """A run that has trained an adapter for the base model in the folder `base`."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"num_attention_heads": 6, "architectures": ["LlamaForCausalLM"]}')
    changes = {**CHANGES, "model.source": "path", "model.path": str(base)}
    made = planted_run(tmp_path / "runs", edit(RunSpec(), changes), probe(Path.cwd()), "Train info")
    plant(made.path / "model", {**ADAPTER, "base_model_name_or_path": str(base)})
    (made.path / "base.json").write_text(json.dumps({"name": str(base), "commit": "", "fingerprint": ""}))
    (made.path / "resolved.json").write_text(json.dumps({"compute_dtype": "bf16", "device": "cuda"}))
    ended(made, end="done", exit_code=0)
    (made.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
    yield made
    for job in jobs.find_all(made, jobs.SERVE):
        if job.state in ALIVE:
            end(job)


def plant(folder, config):
    """The files of a model: an adapter, or full weights."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kind = "adapter" if "peft_type" in config else "model"
    (folder / ("adapter_config.json" if kind == "adapter" else "config.json")).write_text(json.dumps(config))
    (folder / ("adapter_model.safetensors" if kind == "adapter" else "model.safetensors")).touch()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2]}')


def started(run, **settings):
    """The job, and what is shown once it answers or has failed."""
    job = serve.start(run, Settings(**settings), OWN)
    wait_for(lambda: serve.as_json(job)["address"] or job.state not in ALIVE)
    return job, serve.as_json(job)


def asked(shown, path, body):
    headers = {"Authorization": f"Bearer {OWN}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{shown['address']}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def test_every_argument_is_one_of_vllms():
    known = json.loads(Path("tests/data/vllm_arguments.json").read_text())
    assert f"vllm=={known['version']}" in environments.ENVIRONMENTS["vllm"].lock.read_text().splitlines()[0]
    assert set(server.names()) <= known.keys() and len(server.names()) == 19
    assert "--api-key" in known and "--api-key" not in server.names(), "other users can read arguments"
    assert known["--max-lora-rank"]["choices"] == list(server.LORA_RANKS)
    assert set(serve.DTYPES) <= set(known["--dtype"]["choices"])


def test_an_adapter_on_its_base_model(run, environment, gpus):
    notebook.change(run.path, name="-v1.5 info")
    job, shown = started(run, tensor_parallel_size=2, context=1000, parallel=4)
    assert job.state == "running", job.failure()
    model, base = run.path / "model", run.path.parent.parent / "base"
    port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/v1", shown["address"])[1]
    assert json.loads((job.path / "arguments.json").read_text()) == [
        "serve", str(base), "--disable-uvicorn-access-log", "--disable-fastapi-docs", "--enable-lora",
        "--host=127.0.0.1", f"--port={port}", "--served-model-name=-v1.5 info (base model)", "--dtype=bfloat16",
        "--max-model-len=1000", "--tensor-parallel-size=2", "--gpu-memory-utilization=0.9",
        "--middleware=footplate_access.RequireToken", f"--tokenizer={model}", f"--generation-config={model}",
        "--max-num-seqs=4", '--default-chat-template-kwargs={"enable_thinking": false}',
        "--lora-modules=" + json.dumps({"name": "-v1.5 info", "path": str(model)}), "--max-lora-rank=32", "0,1",
    ]  # fmt: skip
    assert shown["engine"] == "vllm" and shown["context"] == 1000 and "untested on a GPU" in shown["note"]
    assert list(job.plan().devices.values()) == ["GPU 0", "GPU 1"], "it waits for them in the queue"
    root = shown["address"].removesuffix("/v1")
    paths = ("/health", "/metrics", "/invocations", "/tokenize", "/v1/models")
    assert [status_of(root + path, OWN + "x") for path in paths] == [200, 401, 401, 401, 401]
    assert status_of(f"{root}/v1/models", OWN) == 200 and status_of(f"{root}/metrics", OWN) == 404
    served = processes.run_processes(job.path)
    assert len(served) == 3, "the job, vLLM and its engine"
    assert not any(OWN.encode() in Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in served)
    kept = [path for path in job.path.rglob("*") if path.is_file() and OWN in path.read_text()]
    assert [path.name for path in kept] == [TOKEN]
    assert asked(shown, "/chat/completions", body_of(shown["curl"]))["choices"][0]["message"]["content"] == "Hello!"
    end(job)
    assert job.state == "done" and not (job.path / TOKEN).exists()


def body_of(curl):
    """The JSON of the request that users are shown."""
    return json.loads(re.search(r"-d '(.*)'$", curl.strip(), re.DOTALL)[1])


def test_full_weights_and_the_command(run, environment, gpus, capsys):
    plant(run.path / "model", {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6})
    assert main(["serve", "--runs", str(run.path.parent), run.id, "--background"]) == 0, "vLLM: there is no GGUF file"
    output, job = capsys.readouterr().out, serve.current(run)
    words = json.loads((job.path / "arguments.json").read_text())
    assert words[1] == str(run.path / "model") and {"--served-model-name=Train info", "--max-model-len=auto"} < {*words}
    assert words[-1] == "0" and not any("lora" in word or "--tokenizer" in word or "--gen" in word for word in words)
    assert f"Serving model with vLLM at {serve.as_json(job)['address']}" in output and vllm.NOT_RUN in output
    assert "Context: 8,192 tokens per request.\n" in output and "Requests with tools are refused" in output
    assert main(["stop", str(job.path)]) == 0 and not processes.run_processes(job.path)
    export(run)
    assert serve.engine_of(run, Settings()) == serve.engine_of(run, Settings(format="f16")) == "llama.cpp"
    assert serve.engine_of(run, Settings(merged=True)) == "vllm"


def refusal(run, **settings):
    with pytest.raises(RunError) as error:
        serve.start(run, Settings(engine="vllm", **settings))
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"peft_type": "OFT"}, "its type is OFT, and vLLM supports LoRA"),
        ({"use_dora": True}, "vLLM does not support DoRA"),
        ({"modules_to_save": ["lm_head"], "use_dora": True}, "DoRA magnitude vectors and modules that were"),
        ({"trainable_token_indices": {"embed_tokens": [9]}}, "trained embeddings of added tokens"),
        ({"bias": "lora_only"}, "vLLM does not support trained biases (bias=lora_only)"),
        ({"init_lora_weights": "pissa_niter_16"}, "its initialization (pissa_niter_16) has modified the base weights"),
        ({"r": 8, "rank_pattern": {"q_proj": 600}}, "its rank is 600, and vLLM supports ranks up to 512"),
        ({"alpha_pattern": {"q_proj": 8}}, "its modules have different scales (rank_pattern, alpha_pattern)"),
        ({"rank_pattern": {"v_proj": 48}, "alpha_pattern": {"v_proj": 96}}, "its modules have different scales"),
    ],
)
def test_adapters_that_vllm_cannot_load(run, environment, change, reason):
    plant(run.path / "model", {**ADAPTER, **change, "base_model_name_or_path": "b"})
    text = refusal(run)
    assert "vLLM cannot serve this adapter: " in text and reason in text
    assert text.endswith(f"serve the merged model: `footplate serve {run.id} --engine vllm --merged`.")
    assert serve.vllm_offer(run) == {"reason": text, "note": vllm.NOT_RUN, "step": None, "merged": False}


def test_what_vllm_loads_of_an_adapter_on_stacked_experts_or_embeddings(run, environment):
    """peft doubles rank and alpha of gate and up projections, so that all scales are the same without rsLoRA."""
    doubled = {"rank_pattern": {"e": 48}, "alpha_pattern": {"e": 96}, "use_rslora": False}
    plant(run.path / "model", {**ADAPTER, **doubled, "base_model_name_or_path": "b"})
    assert vllm.why_not(run, vllm.find_model(run, None, False)) == ""
    names = ("model.lm_head.lora_A.weight", "base_model.model.lm_head.base_layer.weight")
    empty = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    text = json.dumps(empty).encode()
    (run.path / "model/adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert f"weights that are not LoRA matrices, such as {names[1]}" in refusal(run)


def test_the_largest_rank_of_an_adapter_on_stacked_experts(run):
    changes = {"r": 8, "rank_pattern": {r".*\.gate_up_proj": 16}}
    plant(run.path / "model", {**ADAPTER, **changes, "base_model_name_or_path": str(run.path.parent.parent / "base")})
    asked = vllm.request(run, vllm.find_model(run, None, False), "auto", 1)
    assert asked["rank"] == 16, "vLLM compares the largest of all modules with --max-lora-rank"


def test_the_page_offers_a_checkpoint_and_the_merged_model(run, environment):
    """Of a stopped run, which has no final model."""
    folder = run.path / "checkpoints/checkpoint-7"
    folder.parent.mkdir()
    plant(folder, {**ADAPTER, "use_dora": True, "base_model_name_or_path": "b"})
    for name in ("complete", "trainer_state.json"):
        (folder / name).write_text("{}")
    (run.path / RESULT).unlink()
    shutil.rmtree(run.path / "model")
    offer = serve.vllm_offer(run)
    assert "does not support DoRA" in offer["reason"] and f"serve {run.id} --step 7 --engine" in offer["reason"]
    merged(run, 7)
    assert serve.vllm_offer(run) == {"reason": "", "note": vllm.NOT_RUN, "step": 7, "merged": True}


def merged(run, step):
    """The job that has merged the adapter of a step."""
    job = jobs.create(run, jobs.MERGE, {"step": step}, {}, {})
    plant(job.path / "model", {"architectures": ["LlamaForCausalLM"]})
    (job.path / LOCK).touch()
    (job.path / RESULT).write_text(json.dumps({"model": "model"}))
    (job.path / STATE).write_text(json.dumps({"end": "done", "exit_code": 0}))
    return job


def test_a_base_model_of_the_hub_is_that_of_training(run, monkeypatch):
    """And not the newest commit, which may be in the cache too."""
    commit, asked = "c0ffee", []
    (run.path / "base.json").write_text(json.dumps({"name": "ada/tiny", "commit": commit, "fingerprint": ""}))
    spec = edit(RunSpec(), {"model.source": "hub", "model.hub_id": "ada/tiny"})
    monkeypatch.setattr(vllm, "read_spec", lambda _: spec)
    monkeypatch.setattr(vllm, "local_folder", lambda spec, *_: asked.append(spec.model.revision))
    found = vllm.request(run, vllm.find_model(run, None, False), "auto", 1)
    assert (found["base"], found["revision"], asked) == ("ada/tiny", commit, [commit])


def test_a_port_of_another_user(monkeypatch):
    """Its program would get the API token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert server.listens(port)
        monkeypatch.setattr(os, "getuid", lambda: 65534)
        assert not server.listens(port)
    monkeypatch.undo()
    assert not server.listens(port)


def test_a_port_that_was_taken_while_the_job_waited(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ServeError, match="is used by another"):
        start(tmp_path, tmp_path, {"folder": "model", "port": listener.getsockname()[1]}, OWN, lambda: True)


def test_gpus_that_vllm_supports(run):
    old = Gpu(2, "P100", 16 * GIB, 16 * GIB, (6, 0), uuid="GPU-old")
    mixed = replace(GPUS, gpus=(old, *GPUS.gpus))
    assert list(vllm.place(run, mixed, 2)[1].values()) == ["GPU 0", "GPU 1"]
    with pytest.raises(RunError, match="has 2 GPUs that vLLM supports"):
        vllm.place(run, mixed, 3)
    with pytest.raises(RunError, match=r"has 1 GPU that vLLM supports\. Set it to 1\.$"):
        vllm.place(run, replace(GPUS, gpus=(old, GPUS.gpus[0])), 2)


def test_the_variables_of_the_run(run):
    """Footplate's process needs its own PYTHONPATH."""
    own = {"HF_HOME": "/data/hub", "PYTHONPATH": "/mine", "CUDA_VISIBLE_DEVICES": "1"}
    (run.path / SPEC).write_text(dump(edit(read_spec(run), {"launch.env": own})))
    env, _ = vllm.place(run, GPUS, 1)
    assert env["HF_HOME"] == "/data/hub" and env["CUDA_VISIBLE_DEVICES"] == "0" and "PYTHONPATH" not in env


def test_what_else_is_refused(run, environment, gpus, monkeypatch, tmp_path):
    base = tmp_path / "base"
    assert refusal(run, threads=2) == "vllm has no setting threads. Remove it, or choose the other engine."
    with pytest.raises(RunError, match=r"llama\.cpp has no setting merged"):
        serve.start(run, Settings(engine="llama.cpp", merged=True))
    assert "gpu_memory_utilization must be above 0" in refusal(run, gpu_memory_utilization=1.5)
    assert "The dtype int8 is not supported. Choose one of auto, bfloat16" in refusal(run, dtype="int8")
    assert "tensor_parallel_size is 3, and this machine has 2 GPUs that vLLM" in refusal(run, tensor_parallel_size=3)
    assert "LoRA adapters in 16 bits only" in refusal(run, dtype="float32")
    (base / "config.json").write_text('{"num_attention_heads": 9}')
    assert "9 attention heads cannot be split over 2 GPUs" in refusal(run, tensor_parallel_size=2)
    (base / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert "vLLM does not support LoRA for GPT2LMHeadModel. Merge it with" in refusal(run)
    (base / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
    assert "the weights of its base model are quantized with HQQ" in refusal(run)
    assert "is an adapter that is not merged into its base model. Merge it first" in refusal(run, merged=True)
    assert "has no weights of checkpoint 7" in refusal(run, step=7)
    monkeypatch.setattr(serve, "probe", lambda _: Machine(driver_version="570.1"))
    (base / "config.json").write_text("{}")
    assert "vLLM needs NVIDIA driver 580 or later; 570.1 is installed" in refusal(run)
    (run.path / "base.json").write_text(json.dumps({"name": str(tmp_path / "gone"), "fingerprint": "x"}))
    monkeypatch.setattr(serve, "probe", lambda _: GPUS)
    assert "gone, does not exist. Restore it" in refusal(run)
    plant(run.path / "model", {"quantization_config": {"quant_method": "bitsandbytes"}})
    assert "the weights are quantized with bitsandbytes" in refusal(run)
    plant(run.path / "model", {"architectures": ["LlamaForSequenceClassification"]})
    assert "it is a reward model" in refusal(run)
    assert not jobs.find_all(run, jobs.SERVE)


def test_quantized_training_other_base_weights_and_no_environment(run, environment, gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm, "_fingerprint", lambda *_: "a" * 32)
    (run.path / "base.json").write_text(json.dumps({"name": str(tmp_path / "base"), "fingerprint": "b" * 32}))
    assert "are not those that this run was trained on (fingerprint aaaaaaaa now, bbbbbbbb" in refusal(run)
    spec = edit(RunSpec(), {"method.quantization": "nf4"})
    monkeypatch.setattr(vllm, "read_spec", lambda _: spec)
    assert "a base model that bitsandbytes had quantized (nf4)" in refusal(run)
    monkeypatch.undo()
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "empty"))
    assert "vLLM is not installed. Run `footplate env create vllm`, which downloads 4.3 GB" in refusal(run)
    assert serve.vllm_offer(run) is None and serve.engine_of(run, Settings()) == "llama.cpp"


def test_a_merged_model(run, environment, gpus):
    job = merged(run, None)
    (job.path / "model/broken").touch()
    assert vllm.find_model(run, None, True).folder == job.path / "model" and merge.find_merged(run, None)
    failed, _ = started(run, merged=True)
    assert failed.state == "failed" and not processes.run_processes(failed.path)
    expected = "vLLM cannot serve the model: ValueError: LoRA is not supported for this architecture."
    assert failed.failure()["sentence"] == expected and not (failed.path / TOKEN).exists()
    assert (failed.path / "vllm.txt").read_text() not in (failed.path / LOG).read_text()


def test_no_process_is_left_when_the_job_is_killed(run, environment, gpus):
    job, _ = started(run)
    served = processes.run_processes(job.path)
    os.kill(json.loads((job.path / STATE).read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: not any(processes.started(process.pid) == process.started for process in served))
