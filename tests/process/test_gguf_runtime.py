"""GGUF files in llama.cpp itself: the environment is created, SmolLM2 is trained, merged and exported, and each fault
that a conversion can have is made and found. test_gguf.py has the same faults without llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from training_runs import ignore_progress, log_text, make_spec
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from backend import environments, paths
from backend.environments import PACKAGES
from backend.export import gguf_certificate, llama_cpp, loading
from backend.export import merge as merging
from backend.export.gguf import GgufExport
from backend.export.gguf_certificate import Trained
from backend.models import gguf, merge, serve, trained
from backend.models.gguf import FORMATS, MODELFILE
from backend.runs import BASE, MODEL, processes
from backend.runs.folder import ALIVE, Run
from backend.train import builtin_models
from backend.train.run_log import RunLog, TrainError

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")]
SMOLLM2 = "smollm2-135m-instruct"
TRAINED = {"model.builtin": SMOLLM2, "train.learning_rate": 2e-3, "train.max_steps": 8, "save.final_model": True}
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
LLAMA_QUANTIZE = """import sys
from cyllama.llama import llama_cpp
parameters = llama_cpp.LlamaModelQuantizeParams()
parameters.ftype = int(sys.argv[3])
llama_cpp.model_quantize(sys.argv[1], sys.argv[2], parameters)
"""
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}{{ '[assistant] ' }}"


@pytest.fixture(scope="module")
def environment(cache: Path) -> Path:
    return environments.create("gguf", ignore_line)


def ignore_line(_: str) -> None: ...


@pytest.fixture(scope="module")
def run(fork_server: ForkServer, cache: Path, root: Path) -> Run:
    """A run that has trained an adapter on SmolLM2, and its merge."""
    if (known := paths.model_folder(SMOLLM2, {})).is_dir():  # so that it is not downloaded again
        (cache / "models" / SMOLLM2).symlink_to(known)
    builtin_models.prepare(SMOLLM2, ignore_progress)
    run = Run(fork_server.train(root / "runs/smollm2", make_spec(TRAINED)))
    wait_for(merge.start(run, None))
    return run


def wait_for(job: Run) -> dict[str, Any]:
    """The result of a job."""
    for _ in range(4800):
        if job.state not in (*ALIVE, "new"):
            break
        time.sleep(0.25)
    assert job.state == "done", log_text(job.path)
    assert not processes.run_processes(job.path)
    return job.result()


def test_q5_k_m_of_smollm2_differs(run: Run, environment: Path) -> None:
    """Rows of 576 elements are not multiples of 256, and the replacement of Q5_K, Q5_1, is worse for this model."""
    job = gguf.start(run, None, "q5_k_m")
    while job.state in ALIVE:
        time.sleep(0.25)
    assert job.state == "failed" and not list(job.path.rglob("*.gguf"))
    certificate = job.result()["certificate"]
    assert Counter({type: len(names) for type, names in certificate["tensor_types"].items()}) == {
        "Q5_1": 166, "Q5_K": 16, "Q6_K": 14, "Q8_0": 15,
    }  # fmt: skip
    difference = certificate["differences"][0]
    assert "Export as q6_k. 181 of 211 quantized weights have rows of 576 elements" in difference


@pytest.fixture(scope="module")
def cyllama(root: Path) -> Path:
    """The folder of a package with llama.cpp's own `llama_model_quantize`."""
    command = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(root / "cyllama"), "cyllama==0.2.18")
    subprocess.run([sys.executable, *command], check=True, stdin=subprocess.DEVNULL)
    return root / "cyllama"


@pytest.mark.parametrize("kind", ["smollm2", "llama", "mixtral"])
def test_k_quants_are_those_of_llama_quantize(
    run: Run, environment: Path, cyllama: Path, tmp_path: Path, kind: str
) -> None:
    """The same types, bytes and keys."""
    weights, whole = Path(json.loads((run.path / BASE).read_text())["name"]), tmp_path / "whole.gguf"
    if kind != "smollm2":
        sizes = {"vocab_size": 49152, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes, **heads))
        AutoTokenizer.from_pretrained(weights).save_pretrained(tmp_path / kind)
        model.save_pretrained(weights := tmp_path / kind)
    variables = llama_cpp.variables(environment)
    convert = llama_cpp.convert_command(environment, weights, whole, "f16", "name")
    subprocess.run(convert, check=True, env=variables, stdin=subprocess.DEVNULL, capture_output=True)
    for format, number in (("q4_k_m", 15), ("q5_k_m", 17), ("q6_k", 18)):
        files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
        quantize = llama_cpp.quantize_command(whole, files[0], format)
        subprocess.run(quantize, check=True, env=variables, stdin=subprocess.DEVNULL, capture_output=True)
        theirs = [sys.executable, "-c", LLAMA_QUANTIZE, str(whole), str(files[1]), str(number)]
        variables_of_cyllama = {**os.environ, "PYTHONPATH": str(cyllama)}
        subprocess.run(theirs, check=True, env=variables_of_cyllama, stdin=subprocess.DEVNULL, capture_output=True)
        ours, others = (GGUFReader(file) for file in files)
        assert {n: f.contents() for n, f in ours.fields.items()} == {n: f.contents() for n, f in others.fields.items()}
        expected = {tensor.name: tensor for tensor in others.tensors}
        for tensor in ours.tensors:
            assert tensor.tensor_type == expected[tensor.name].tensor_type, tensor.name
            assert tensor.data.tobytes() == expected[tensor.name].data.tobytes(), tensor.name


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "q5_k_m"])
def test_a_trained_model_is_verified(run: Run, environment: Path, format: str) -> None:
    job = gguf.start(run, None, format)
    certificate = wait_for(job)["certificate"]
    assert certificate["status"] == "verified with limitations"
    assert [limit.partition(" such as")[0] for limit in certificate["limits"]] == [
        "llama.cpp tokenizes non-ASCII numerals"
    ]
    found, change = certificate["trained_to_file"], certificate["trained_to_base"]
    assert 1e-6 < found["kl_mean"] < min(FORMATS[format].max_kl, change["kl_mean"]) and found["positions"] > 100
    assert certificate["stop_tokens"] == ["<|im_end|>"] and "<|endoftext|>" in certificate["also_stops_at"]
    file = gguf.file_of(job)
    assert file and "PARAMETER stop" in (file.parent / MODELFILE).read_text()


@pytest.mark.parametrize(("format", "until"), [("q8_0", "Comparing"), ("q4_k_m", "Quantizing")])
def test_a_stopped_export_leaves_no_process_and_no_file(
    run: Run, environment: Path, root: Path, format: str, until: str
) -> None:
    other = Run(root / f"runs/{format}")
    shutil.copytree(run.path, other.path)
    for job in (other.path / "jobs").glob("*_gguf"):
        shutil.rmtree(job)
    job = gguf.start(other, None, format)
    while not job.progress().get("text", "").startswith(until):
        assert job.state in ALIVE
        time.sleep(0.1)
    job.stop(save=False)
    while job.state in ALIVE:
        time.sleep(0.1)
    assert job.state == "stopped" and not processes.run_processes(job.path)
    assert not list(job.path.rglob("*.gguf")) and not job.result()


@pytest.fixture(scope="module")
def observed(run: Run, root: Path) -> Trained:
    model = trained.find(run)
    assert model
    return GgufExport(run, root, RunLog(root))._observe(model)[0]


@pytest.fixture
def certify(environment: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The certificate of a model folder that is converted."""

    def make(observed: Trained, weights: Path, format: str = "f16") -> dict[str, Any]:
        file = tmp_path / "file.gguf"
        command = llama_cpp.convert_command(environment, weights, file, format, "name")
        env = {**os.environ, "PYTHONPATH": str(environment / PACKAGES)}
        subprocess.run(command, check=True, env=env, stdin=subprocess.DEVNULL, capture_output=True)
        server = llama_cpp.Server(file, environment, tmp_path / "log")
        try:
            return gguf_certificate.certify(observed, server, format, lambda _: None)
        finally:
            server.close()

    return make


@pytest.fixture
def merged(run: Run, tmp_path: Path) -> Path:
    """A copy of the merged model, to be damaged."""
    model = trained.find(run)
    assert model
    job = merge.find(run, model)
    assert job
    return shutil.copytree(job.path / MODEL, tmp_path / "merged")


def test_a_dropped_adapter(run: Run, observed: Trained, certify: Callable[..., dict[str, Any]]) -> None:
    base = Path(json.loads((run.path / BASE).read_text())["name"])
    first, second = certify(observed, base, "q8_0")["differences"]
    assert "predicts differently" in first and "cannot rule out that the adapter is missing" in second


def test_a_merge_on_another_base(
    run: Run, observed: Trained, certify: Callable[..., dict[str, Any]], merged: Path
) -> None:
    base = Path(json.loads((run.path / BASE).read_text())["name"])
    weights = load_file(base / "model.safetensors")
    changed = {n: v + 0.1 * v.float().std().to(v.dtype) * torch.randn_like(v) for n, v in weights.items()}
    other = shutil.copytree(base, merged.parent / "other")
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    plain: Any = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    merging.merge(loading.load_adapter(plain, run.path / MODEL)).save_pretrained(merged)
    difference = certify(observed, merged)["differences"][0]
    assert "predicts differently" in difference and "It is largest (" in difference


def test_a_lost_stop_token(observed: Trained, certify: Callable[..., dict[str, Any]], merged: Path) -> None:
    """llama.cpp has one EOS token, and others that it knows by name."""
    config = json.loads((merged / "generation_config.json").read_text())
    (merged / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [2, 0, 17]}))
    observed.stops[:] = [0, 2, 17]
    try:
        certificate = certify(observed, merged)
    finally:
        observed.stops[:] = [2]
    (lost,) = certificate["differences"]
    assert "does not stop at" in lost and "(17)" in lost
    assert any("also ends completions with <|endoftext|>" in limit for limit in certificate["limits"])


def test_a_template_that_became_chatml(observed: Trained, certify: Callable[..., dict[str, Any]], merged: Path) -> None:
    (merged / "chat_template.jinja").unlink()
    trained_template = observed.tokenizer.chat_template
    observed.tokenizer.chat_template = OTHER
    try:
        (difference,) = certify(observed, merged)["differences"]
    finally:
        observed.tokenizer.chat_template = trained_template
    assert "After '', training has '[user]" in difference and "llama.cpp uses ChatML" in difference


def test_a_file_that_llama_cpp_cannot_read(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "file.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(TrainError, match=r"llama.cpp cannot load the GGUF file: .*\w"):
        llama_cpp.Server(tmp_path / "file.gguf", environment, tmp_path / "log")


@pytest.mark.parametrize("normalized", [True, False])
def test_a_setting_that_the_file_lacks(
    run: Run, certify: Callable[..., dict[str, Any]], tmp_path: Path, normalized: bool
) -> None:
    """The converter does not write norm_topk_prob of qwen3_moe: llama.cpp always normalizes."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=normalized, eos_token_id=2, bos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(config).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.path / MODEL)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "moe")
    batches = gguf_certificate.probes(run.path, model, tokenizer)
    seen = gguf_certificate.observe(run.path, model, tokenizer, [2], batches, None)
    differences = certify(seen, tmp_path / "moe")["differences"]
    assert differences == [] if normalized else "predicts differently" in differences[0]


class Client:
    """A client of a served model."""

    def __init__(self, job: Run) -> None:
        while not (shown := serve.as_json(job))["address"]:
            assert job.state in ALIVE, log_text(job.path)
            time.sleep(0.1)
        self.job, self.shown, self.token = job, shown, serve.token_of(job)

    def ask(self, path: str, body: dict[str, Any] | None = None, token: str | None = None) -> tuple[int, str]:
        """Status and text of a response."""
        key = self.token if token is None else token
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        data = None if body is None else json.dumps(body).encode()
        url = self.shown["address"].removesuffix("/v1") + path
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=300) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def choice(self, path: str, **body: Any) -> dict[str, Any]:
        """The first greedy output."""
        found: dict[str, Any] = json.loads(self.ask(path, {"temperature": 0, "max_tokens": 64, **body})[1])
        assert found["model"] == self.shown["name"]
        output: dict[str, Any] = found["choices"][0]
        return output

    def end(self) -> None:
        self.job.stop(save=False)
        while self.job.state in ALIVE:
            time.sleep(0.05)
        assert self.job.state == "done" and not processes.run_processes(self.job.path)


@pytest.fixture(scope="module")
def served(run: Run, environment: Path) -> Iterator[Client]:
    """A server of the q8_0 file."""
    wait_for(gguf.start(run, None, "q8_0"))
    client = Client(serve.start(run, serve.Settings(format="q8_0", parallel=2, context=2048)))
    yield client
    client.end()


def test_a_served_model_generates_the_outputs_of_the_certificate(run: Run, served: Client) -> None:
    outputs = gguf.exported(run)[0].result()["certificate"]["outputs"]
    for output in outputs:
        choice = served.choice("/v1/completions", prompt=output["prompt"])
        assert choice["text"] == output["llama_cpp"]["text"]
        assert choice["finish_reason"] == ("stop" if output["llama_cpp"]["stopped"] else "length")
    assert any(output["llama_cpp"]["stopped"] for output in outputs), "at a stop token that was trained"
    user = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    text = served.choice("/v1/chat/completions", **user)["message"]["content"]
    lines = served.ask("/v1/chat/completions", {"temperature": 0, "max_tokens": 64, "stream": True, **user})[1]
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert len(deltas) > 2 and "".join(delta.get("content") or "" for delta in deltas) == text
    assert lines.rstrip().endswith("data: [DONE]")
    word = text.split()[2]
    shorter = served.choice("/v1/chat/completions", stop=[word], **user)
    assert shorter["message"]["content"] == text.partition(word)[0] and shorter["finish_reason"] == "stop"


def test_what_a_server_answers_without_its_token(run: Run, served: Client) -> None:
    expected = {
        "/v1/models": (401, 401, 200), "/v1/chat/completions": (401, 401, 404), "/slots": (401, 401, 501),
        "/metrics": (401, 401, 501), "/props": (401, 401, 200), "/": (404, 404, 404), "/health": (200, 200, 200),
    }  # fmt: skip
    for path, statuses in expected.items():
        assert tuple(served.ask(path, None, token)[0] for token in ("", "wrong", served.token)) == statuses, path
    assert served.ask("/health", None, "")[1] == '{"status":"ok"}'
    for path in ("/v1/models", "/props"):
        assert str(run.path) not in served.ask(path)[1]
    for path in served.job.path.rglob("*"):
        assert path.name == "token" or not path.is_file() or served.token[-4:] not in path.read_text(), path


def test_two_requests_at_the_same_time(served: Client) -> None:
    ended = []

    def generate(count: int) -> None:
        served.ask("/v1/completions", {"prompt": "The", "max_tokens": count, "ignore_eos": True})
        ended.append(count)

    long = threading.Thread(target=generate, args=(200,))
    long.start()
    time.sleep(0.5)
    generate(3)
    long.join()
    assert ended == [3, 200]
    status, text = served.ask("/v1/completions", {"prompt": "word " * 4000})
    assert status == 400 and "exceeds the available context size (2048 tokens)" in text


def test_tools_the_same_port_again_and_a_context_that_the_model_does_not_have(
    run: Run, environment: Path, root: Path
) -> None:
    """A file whose chat template has tools. The stop ends a request that generates."""
    other = Run(root / "runs/tools")
    shutil.copytree(run.path, other.path, ignore=shutil.ignore_patterns("*_serve"))
    export = gguf.start(run, None, "q8_0")
    file = gguf.file_of(export)
    assert file
    target = other.path / file.relative_to(run.path)
    target.unlink(missing_ok=True)
    command = [str(Path(sys.prefix) / "bin/gguf-new-metadata"), "--chat-template", TOOLS, str(file), str(target)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    client = Client(serve.start(other, serve.Settings(file=str(target))))
    user = {"messages": [{"role": "user", "content": "The time in Bern?"}]}
    tool = {"type": "function", "function": {"name": "get_time", "description": "T", "parameters": {"type": "object"}}}
    assert (
        not client.shown["without_tools"] and "get_time" in client.ask("/apply-template", {**user, "tools": [tool]})[1]
    )
    port = int(client.shown["address"].split(":")[2].partition("/")[0])
    request = {"prompt": "The", "max_tokens": 3000, "ignore_eos": True}

    def send() -> None:
        with pytest.raises(OSError):
            client.ask("/v1/completions", request)

    sent = threading.Thread(target=send)
    sent.start()
    time.sleep(1)
    client.end()
    sent.join(10)
    assert not sent.is_alive()
    again = Client(serve.start(other, serve.Settings(port=port)))
    assert again.shown["address"].endswith(f":{port}/v1")
    again.end()
    failed = serve.start(other, serve.Settings(context=9000))
    while failed.state in ALIVE:
        time.sleep(0.1)
    failure = failed.failure()
    assert failure and failure["sentence"].startswith("A context of 9,000 tokens exceeds that of the model, 8,192")
