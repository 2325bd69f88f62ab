"""`footplate export-model`: a GGUF file is kept only if llama.cpp runs the trained model.

Here transformers answers in the place of llama.cpp, so that every fault can be made; test_gguf_runtime.py asks
llama.cpp itself.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from parameters import soak_except
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from training_runs import make_spec
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from backend import presets
from backend.environments import ADAPTER_SCRIPT, CONVERTER
from backend.export import gguf_certificate, llama_cpp, loading, modelfile
from backend.export import merge as merging
from backend.export.comparison import log_probabilities
from backend.export.gguf import GgufExport
from backend.export.gguf_adapter import GgufAdapterExport, write_plain_adapter
from backend.export.gguf_certificate import Trained, divergence
from backend.export.llama_cpp import Generated
from backend.export.quantized import QuantizedExport
from backend.models import trained
from backend.models.gguf import FOLDER, FORMATS, MODELFILE, PRESET, SYSTEM_PROMPT
from backend.runs import BASE, CERTIFICATE, CHECKPOINTS, JOBS, MODEL, RESULT, SPEC, STOP
from backend.runs.folder import Run
from backend.train.generation_eval import BEFORE
from backend.train.model import ModelSource
from backend.train.run_log import RunLog, Stopped, TrainError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
TRAINED = {"train.learning_rate": 2e-2, "train.max_steps": 4, "save.final_model": True}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
OTHER = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}[assistant] "
# Writes which folder it was to convert, which is all that the runtime below needs.
CONVERT = """import json, pathlib, sys
print("Writing:  50%|", file=sys.stderr)
folder = pathlib.Path(sys.argv[1])
assert json.loads((folder / "tokenizer_config.json").read_text())["add_bos_token"] is False
pathlib.Path(sys.argv[3]).write_text(str((folder / "model.safetensors").resolve().parent))
"""
CONVERT_ADAPTER = """import pathlib, sys
assert (pathlib.Path(sys.argv[3]) / "config.json").is_file()
pathlib.Path(sys.argv[5]).write_text(sys.argv[1])
"""
# Copies the converted file, and says which types its weights have.
QUANTIZE = """import pathlib, sys
source, target, format = sys.argv[1:]
if format == "q6_k":
    sys.exit("[Errno 28] No space left on device")
print("Writing: 50%")
pathlib.Path(target).write_text(pathlib.Path(source).read_text())
print('[["a", 576, "Q5_0"], ["b", 1536, "Q4_K"]]')
"""


class Transformers:
    """A llama_cpp.Runtime: the model in the folder that was converted. `fault` changes an answer."""

    fault = ""

    def __init__(self, file: Path, *others: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(file.read_text(), dtype=torch.float32).eval()
        if adapter := others[2:]:
            self.model = PeftModel.from_pretrained(self.model, adapter[0].read_text()).eval()
            if self.fault == "adapter":
                self.model.base_model.disable_adapter_layers()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(file.read_text())
        eos = self.model.generation_config.eos_token_id
        self.stops = {eos} if isinstance(eos, int) else set(eos)

    def tokenize(self, text: str, add_special: bool) -> list[int]:
        text = text.lstrip() if self.fault == "spaces" else text
        text = text.replace("capital", "Capital") if self.fault == "word" else text
        text = text.replace("①", "1") if self.fault == "numeral" else text
        text = text.replace("<|im_start|> b", "< b") if self.fault == "special" else text
        return list(self.tokenizer(text, add_special_tokens=add_special)["input_ids"])

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        if self.fault == "template":
            raise llama_cpp.LlamaCppError("unknown filter")
        template = CHATML if self.fault == "chatml" else None
        options = {"tokenize": False, "add_generation_prompt": True, "chat_template": template}
        return str(self.tokenizer.apply_chat_template(list(messages), **options))

    def eos_token(self) -> str:
        return "<|endoftext|>" if self.fault == "eos" else str(self.tokenizer.eos_token)

    def stops_at(self, token: int) -> bool:
        return token in self.stops and self.fault != "stop"

    @torch.no_grad()
    def most_likely(self, ids: Sequence[int]) -> dict[int, float]:
        self._require_room(ids)
        found = self.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        return {} if self.fault == "nan" else dict(enumerate(found.tolist()))

    def generate(self, ids: Sequence[int], limit: int) -> Generated:
        self._require_room(ids)
        return Generated("some text", self.fault != "endless")

    def _require_room(self, ids: Sequence[int]) -> None:
        """Refuse what llama.cpp's server refuses."""
        context = min(llama_cpp.CONTEXT, self.model.config.max_position_embeddings)
        if len(ids) >= context:
            raise llama_cpp.LlamaCppError(
                f"request ({len(ids)} tokens) exceeds the available context size ({context} tokens)"
            )

    def close(self) -> None: ...


def merged(run: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    merging.Merge(Run(run), None, target, RunLog(target)).run_all()
    return target / MODEL


@pytest.fixture(autouse=True, scope="module")
def few_positions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_certificate, "STRIDE", 32)
        yield


@pytest.fixture(scope="module")
def adapter(fork_server: ForkServer, root: Path) -> Path:
    """A run that has trained an adapter, with its merge `m`."""
    run = fork_server.train(root / "gguf-adapter", make_spec(TRAINED))
    merged(run, run / JOBS / "m")
    return run


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Exports a run in the folder `job`, with the stand-ins of converter and runtime."""
    (tmp_path / "env" / CONVERTER).mkdir(parents=True)
    (tmp_path / "env" / CONVERTER / "convert_hf_to_gguf.py").write_text(CONVERT)
    (tmp_path / "env" / CONVERTER / ADAPTER_SCRIPT).write_text(CONVERT_ADAPTER)
    monkeypatch.setattr(llama_cpp, "Server", Transformers)

    (tmp_path / "quantize.py").write_text(QUANTIZE)
    monkeypatch.setattr(llama_cpp, "QUANTIZER", tmp_path / "quantize.py")

    def make(
        run: Path, merge: str = "m", fault: str = "", step: int | None = None, format: str = "q8_0"
    ) -> dict[str, Any]:
        monkeypatch.setattr(Transformers, "fault", fault)
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        request = {"step": step, "format": format, "merge": merge, "environment": str(tmp_path / "env")}
        (folder / "gguf.json").write_text(json.dumps(request))
        kind = GgufAdapterExport if FORMATS[format].base else GgufExport
        return kind(Run(run), folder, RunLog(folder)).run_all()

    return make


def test_a_verified_file(adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found = export(adapter)
    folder, certificate = tmp_path / "job" / FOLDER, found["certificate"]
    assert found["model"] == f"{FOLDER}/{adapter.name}-q8_0.gguf" and (tmp_path / "job" / found["model"]).is_file()
    assert json.loads((folder / CERTIFICATE).read_text()) == certificate
    assert (certificate["status"], certificate["differences"], certificate["limits"]) == ("verified", [], [])
    assert certificate["trained_to_file"]["kl_mean"] < 1e-6 < 1e-3 < certificate["trained_to_base"]["kl_mean"]
    assert certificate["base_weights"] == "the same weights as in training"
    assert certificate["versions"]["llama-cpp-python"] == "0.3.36" and certificate["merge"] == "m"
    assert {"footplate", "torch", "transformers", "peft"} < set(certificate["versions"])
    assert certificate["stop_tokens"] == ["<|im_end|>"] and certificate["tokenized_texts"] >= 8
    assert [output["llama_cpp"]["text"] for output in certificate["outputs"]] == ["some text"]
    assert (folder / MODELFILE).read_text().startswith(f"FROM ./{adapter.name}-q8_0.gguf\nTEMPLATE")
    settings = (folder / MODELFILE).read_text() + (folder / PRESET).read_text()
    assert certificate[SYSTEM_PROMPT] == ('SYSTEM """' in settings) == ("systemPrompt" in settings)
    assert json.loads((folder / PRESET).read_text())["name"] == f"{adapter.name}-q8_0"
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [FOLDER, "gguf.json", "progress.json"]


def test_an_adapter_next_to_its_base_model(
    adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It needs no merge. One that does nothing in llama.cpp is found."""
    found = export(adapter, merge="", format="lora-f16")
    folder, certificate, name = tmp_path / "job" / FOLDER, found["certificate"], adapter.name
    assert found["model"] == f"{FOLDER}/{name}-base-f16.gguf" and certificate["status"] == "verified"
    assert certificate["trained_to_file"]["kl_mean"] < 1e-6 < 1e-3 < certificate["trained_to_base"]["kl_mean"]
    files = [MODELFILE, CERTIFICATE, f"{name}-base-f16.gguf", f"{name}-adapter.gguf"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    lines = (folder / MODELFILE).read_text().splitlines()
    assert lines[:2] == [f"FROM ./{name}-base-f16.gguf", f"ADAPTER ./{name}-adapter.gguf"]
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [FOLDER, "gguf.json", "progress.json"]
    shutil.rmtree(tmp_path / "job")
    with pytest.raises(TrainError, match=r"was deleted\. llama\.cpp predicts differently"):
        export(adapter, merge="", format="lora-f16", fault="adapter")
    differences = json.loads((tmp_path / "job" / RESULT).read_text())["certificate"]["differences"]
    assert any("cannot rule out that the adapter is missing" in each for each in differences)
    assert not list((tmp_path / "job").rglob("*.gguf"))


def test_a_quantized_checkpoint(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    """A new process loads it; test_quantized_checkpoint.py has the other formats, and what goes wrong."""
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    (tmp_path / "quantize.json").write_text(json.dumps({"step": None, "format": "bnb-nf4", "merge": "m"}))
    certificate = QuantizedExport(Run(adapter), tmp_path, RunLog(tmp_path)).run_all()["certificate"]
    assert 0 < certificate["trained_to_checkpoint"]["kl_mean"] < certificate["trained_to_base"]["kl_mean"]
    assert certificate["stop_tokens"] == ["<|im_end|>"] and certificate["differences"] == []
    assert json.loads((tmp_path / MODEL / CERTIFICATE).read_text()) == certificate
    assert certificate["versions"]["bitsandbytes"] == version("bitsandbytes") and certificate["versions"]["torch"]
    assert certificate["compared"]["texts"] >= 6 and len(certificate["compared"]["token_ids_sha256"]) == 64
    merged = json.loads((adapter / JOBS / "m" / MODEL / CERTIFICATE).read_text())  # of the same texts
    assert merged["compared"] == certificate["compared"] and "bitsandbytes" not in merged["versions"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / MODEL)
    assert loaded.is_quantized and loaded.config.quantization_config.bnb_4bit_quant_type == "nf4"


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"rank_pattern": {"q": 2}, "alpha_pattern": {"v": 3}, "use_rslora": True}]
)
def test_an_adapter_has_its_trained_scale_as_alpha_by_rank(tmp_path: Path, options: dict[str, Any]) -> None:
    """llama.cpp multiplies each pair of matrices with lora_alpha divided by their rank."""
    base = torch.nn.ModuleDict({name: torch.nn.Linear(8, 6) for name in ("q", "v")})
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q", "v"], init_lora_weights=False, **options)
    adapted: Any = get_peft_model(base, config)  # type: ignore[arg-type]
    adapted.save_pretrained(tmp_path / "adapter")
    write_plain_adapter(tmp_path / "adapter", tmp_path / "plain")
    alpha = json.loads((tmp_path / "plain/adapter_config.json").read_text())["lora_alpha"]
    tensors = load_file(tmp_path / "plain/adapter_model.safetensors")
    for name in ("q", "v"):
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        expected = adapted.base_model.model[name].get_delta_weight("default")
        torch.testing.assert_close(b @ a * (alpha / a.shape[0]), expected)


def test_a_k_quant(
    adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made from a file with 16 bits, which is deleted, also if that fails; room for both is required."""
    found = export(adapter, format="q4_k_m")["certificate"]
    assert found["tensor_types"] == {"Q4_K": ["b"], "Q5_0": ["a"]} and found["max_kl_mean"] == 0.15
    assert found["replaced"].startswith("1 of 2 quantized weights have rows of 576 elements")
    files = sorted(path.name for path in (tmp_path / "job" / FOLDER).iterdir())
    assert files == sorted([MODELFILE, PRESET, CERTIFICATE, f"{adapter.name}-q4_k_m.gguf"])
    shutil.rmtree(tmp_path / "job")
    with pytest.raises(TrainError, match=r"The weights cannot be quantized: \[Errno 28\] No space left on device"):
        export(adapter, format="q6_k")
    assert not list((tmp_path / "job").rglob("*.gguf"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(TrainError, match=r"and the temporary file with 16 bits per element need 0\.0 GiB"):
        export(adapter, format="q4_k_m")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "NotImplementedError: BPE pre-tokenizer was not recognized - update x()",
            "the BPE tokenizers of published models",
        ),
        ("FileNotFoundError: File not found: /a/source/tokenizer.model", "the SentencePiece file of its tokenizer"),
        ("ValueError: Error: Missing /a/source/tokenizer.model", "the SentencePiece file of its tokenizer"),
        ("ValueError: Can not map tensor 'x'", "ValueError: Can not map tensor 'x' (see the log"),
    ],
)
def test_a_model_that_the_converter_refuses(
    adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path, error: str, reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    script = tmp_path / "env" / CONVERTER / "convert_hf_to_gguf.py"
    script.write_text(f"print({error!r})\nraise SystemExit(1)\n")
    with pytest.raises(TrainError) as raised:
        export(adapter)
    assert reason in str(raised.value) and error in capsys.readouterr().out
    assert not list((tmp_path / "job").rglob("*.gguf"))


def test_an_adapter_on_other_base_weights(adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapter, run)
    recorded = json.loads((run / BASE).read_text())
    (run / BASE).write_text(json.dumps({**recorded, "fingerprint": "0" * 64}))
    with pytest.raises(TrainError, match="base model"):
        export(run)
    assert not list((tmp_path / "job").rglob("*.gguf"))


def test_a_checkpoint_with_full_weights(
    adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base model has a tokenizer.model, which the checkpoint lacks and the converter gets. The tokens that were
    added to it are in tokenizer.json, which the converter does not read."""
    run, converted = tmp_path / "run", []
    shutil.copytree(adapter, run, ignore=shutil.ignore_patterns(MODEL, JOBS))
    shutil.copytree(adapter / JOBS / "m" / MODEL, run / CHECKPOINTS / "checkpoint-4")
    (run / CHECKPOINTS / "checkpoint-4/optimizer.pt").touch()
    base = tmp_path / "base"
    base.mkdir()
    (base / "tokenizer.model").touch()
    (base / "config.json").write_text('{"n_ctx": 7, "vocab_size": 1, "quantization_config": {}}')
    (run / BASE).write_text(json.dumps({"name": str(base), "commit": "", "fingerprint": ""}))
    convert = GgufExport._convert
    config = tmp_path / "job/source/config.json"

    def convert_and_look(job: GgufExport, *rest: Any) -> None:
        convert(job, *rest)
        converted.extend(linked(tmp_path / "job"))
        keys = json.loads(config.read_text())
        assert keys["n_ctx"] == 7 and keys["vocab_size"] > 1 and "quantization_config" not in keys
        added = json.loads((config.parent / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        assert "<|im_end|>" in {token["content"] for token in added.values() if token["special"]}

    monkeypatch.setattr(GgufExport, "_convert", convert_and_look)
    certificate = export(run, merge="", step=4)["certificate"]
    assert (certificate["status"], certificate["step"]) == ("verified", 4) and certificate["trained_to_base"] is None
    assert {"tokenizer.model", "model.safetensors", "config.json"} < set(converted) and "optimizer.pt" not in converted


@pytest.mark.parametrize("trusted", [False, True])
def test_the_converter_runs_no_code_that_training_did_not_run(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """llama.cpp's converter always passes trust_remote_code=True; AutoTokenizer does so here."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    run, source, job = Run(tmp_path / "run"), tmp_path / "model", tmp_path / "job"
    shutil.copytree(adapter / JOBS / "m" / MODEL, source)
    run.path.mkdir()
    options = {"model.source": "path", "model.path": str(source), "model.trust_remote_code": trusted}
    (run.path / SPEC).write_text(presets.dump(make_spec(options)))
    job.mkdir()
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: ...\n")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((source / name).read_text()) | {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
        (source / name).write_text(json.dumps(values))
    folder = GgufExport(run, job, RunLog(job))._linked(source)
    texts = [(folder / name).read_text() for name in ("config.json", "tokenizer_config.json")]
    assert ["auto_map" in text for text in texts] == [trusted] * 2 and (folder / "own.py").exists() == trusted
    assert (folder / "model.safetensors").is_symlink() and (folder / "tokenizer.json").is_symlink()
    with suppress(AttributeError):  # of the class, which is no tokenizer
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists() == trusted
    assert "auto_map" in (source / "config.json").read_text(), "the model itself is not changed"


def test_a_stop_while_the_converter_is_silent(
    adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The supervisor would kill the job, and its incomplete files would stay."""
    script = tmp_path / "env" / CONVERTER / "convert_hf_to_gguf.py"
    script.write_text(f"import time\nopen({str(tmp_path / 'job' / STOP)!r}, 'w').write('discard')\ntime.sleep(600)")
    with pytest.raises(Stopped):
        export(adapter)
    assert not {"source", "unchecked"} & {path.name for path in (tmp_path / "job").iterdir()}


def linked(job: Path) -> list[str]:
    return [path.name for path in (job / "source").iterdir()]


def test_tokens_that_differ_in_a_space() -> None:
    """Decoding one token of SentencePiece strips its space, so both tokens would look the same."""
    tokenizer = SimpleNamespace(decode=lambda ids: "u", convert_ids_to_tokens={1: "u", 2: "\u2581u"}.get)
    assert [gguf_certificate._token(tokenizer, [1, 2], at) for at in (0, 1)] == ["'u' (1)", "' u' (2)"]


@pytest.mark.parametrize(("here", "there"), [([1], [2]), ([2], [1])])
def test_the_space_that_llama_cpp_adds_is_named(here: list[int], there: list[int]) -> None:
    class Tokenizer(SimpleNamespace):
        def __call__(self, *_: Any, **__: Any) -> dict[str, list[int]]:
            return {"input_ids": here}

    tokenizer = Tokenizer(decode=lambda ids: "u", convert_ids_to_tokens={1: "u", 2: "\u2581u"}.get, eos_token_id=0)
    runtime: Any = SimpleNamespace(tokenize=lambda *_: there)
    found = gguf_certificate._token_difference(tokenizer, runtime, "<s>u")
    assert ("add_prefix_space false in the tokenizer before training" in found) is (there == [2])


@pytest.mark.soak
def test_a_file_that_differs_is_deleted(adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"and was deleted. llama.cpp does not stop at <\|im_end\|>"):
        export(adapter, fault="stop")
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["gguf.json", "progress.json", RESULT]
    result = json.loads((tmp_path / "job" / RESULT).read_text())
    assert result["model"] == "" and result["certificate"]["status"] == "differs"


@pytest.fixture(scope="module")
def observed(adapter: Path, root: Path) -> Trained:
    """What the trained model does, as an export sees it."""
    return observe(adapter, root)


def observe(run: Path, folder: Path) -> Trained:
    model = trained.at_step(Run(run), None)
    assert model
    return GgufExport(Run(run), folder, RunLog(folder))._observe(model)[0]


@pytest.fixture
def certify(adapter: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The certificate of a file that was converted from `weights`."""

    def make(trained: Trained, weights: Path = adapter / JOBS / "m" / MODEL, fault: str = "") -> dict[str, Any]:
        (tmp_path / "file.gguf").write_text(str(weights))
        runtime = Transformers(tmp_path / "file.gguf")
        runtime.fault = fault
        return gguf_certificate.certify(trained, runtime, "q8_0", lambda _: None)

    return make


FAULTS = {
    "stop": "does not stop at <|im_end|>",
    "word": "tokenizes the text 'What is the capital of France?' differently: token",
    "template": "cannot render the chat template: unknown filter",
}
LIMITS = {
    "spaces": "Text with leading spaces: llama.cpp tokenizes the text '  Leading spaces",
    "numeral": "tokenizes non-ASCII numerals such as ① differently than in training.",
    "eos": "EOS token of the",
    "special": "Special tokens within a text: llama.cpp tokenizes the text 'a",
}


IN_MAKE_TEST = ("stop", "template", "spaces")


@pytest.mark.parametrize("fault", soak_except((*FAULTS, *LIMITS), IN_MAKE_TEST))
def test_what_differs_is_named(observed: Trained, certify: Callable[..., dict[str, Any]], fault: str) -> None:
    certificate = certify(observed, fault=fault)
    if fault in FAULTS:
        assert certificate["status"] == "differs" and FAULTS[fault] in certificate["differences"][0]
    else:
        assert certificate["status"] == "verified with limitations" and certificate["differences"] == []
        assert len(certificate["limits"]) == 1 and LIMITS[fault] in certificate["limits"][0]


def test_an_output_that_llama_cpp_does_not_end(observed: Trained, certify: Callable[..., dict[str, Any]]) -> None:
    ended = replace(observed, outputs=[Generated("", True) for _ in observed.prompts])
    (limit,) = certify(ended, fault="endless")["limits"]
    assert "the trained model ends its output, and llama.cpp does not within 64 tokens" in limit


def test_values_that_are_not_finite(observed: Trained, certify: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(TrainError, match="NaN or infinite"):
        certify(observed, fault="nan")


def test_a_dropped_adapter_and_a_merge_on_another_base(
    adapter: Path, observed: Trained, certify: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    base, other = Path(json.loads((adapter / BASE).read_text())["name"]), tmp_path / "other"
    shutil.copytree(base, other)
    path = other / "model.safetensors"
    save_file({n: v + 0.05 * torch.randn_like(v) for n, v in load_file(path).items()}, path, metadata={"format": "pt"})
    plain: Any = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    merging.merge(loading.load_adapter(plain, adapter / MODEL)).save_pretrained(other)
    dropped, elsewhere = certify(observed, base)["differences"], certify(observed, other)["differences"]
    assert "predicts differently" in dropped[0] and "cannot rule out that the adapter is missing" in dropped[1]
    assert "predicts differently" in elsewhere[0] and "It is largest (" in elsewhere[0]


class Predictions:
    """A runtime that only predicts: from logits of shape (texts, tokens, vocabulary). Text n has the tokens n."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.values = logits.log_softmax(-1)

    def most_likely(self, ids: Sequence[int]) -> dict[int, float]:
        return dict(enumerate(self.values[ids[0], len(ids) - 1].tolist()))


def test_a_small_adapter_in_a_coarse_format() -> None:
    """A file that is further from the trained model than a quarter of what the adapter changed has the adapter if it is
    nearer to the trained model than to the base model."""
    torch.manual_seed(0)
    texts, tokens = 50, gguf_certificate.LAST_TOKENS
    logits = 5 * torch.randn(texts, tokens, 50)
    adapter, rounding = (0.3 * torch.randn_like(logits) for _ in range(2))
    expected, base = (list(values.log_softmax(-1)) for values in (logits + adapter, logits))
    batches = [torch.full((1, tokens), n) for n in range(texts)]
    tokenizer: Any = SimpleNamespace(decode=lambda ids: f"text {len(ids)}")
    seen = Trained(tokenizer, [], batches, expected, base, [], [], [], [])

    def found(values: torch.Tensor) -> tuple[dict[str, Any], list[str]]:
        findings, runtime = gguf_certificate.Findings(), Predictions(values)
        check: Any = gguf_certificate._check_predictions
        return check(seen, runtime, "q4_k_m", findings, lambda _: None, "Weights differ."), findings.differences

    kept, differences = found(logits + adapter + rounding)
    assert differences == [] and kept["base_to_file_kl_mean"] > kept["trained_to_file"]["kl_mean"]
    assert kept["trained_to_file"]["kl_mean"] > kept["trained_to_base"]["kl_mean"] / gguf_certificate.APART
    (lost,) = found(logits + rounding)[1]
    assert "cannot rule out that the adapter is missing" in lost and "below the file's divergence" in lost
    broken = found(logits + adapter + 6 * rounding)[1][0]
    assert "at most 0.15 is accepted. Export as q6_k. Weights differ. It is largest" in broken


def test_a_template_that_became_chatml_or_is_missing(
    adapter: Path, certify: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapter, run)
    template, weights = run / MODEL / "chat_template.jinja", run / JOBS / "m" / MODEL
    for path in (template, weights / "chat_template.jinja"):
        path.write_text(OTHER)
    changed = observe(run, tmp_path)
    assert certify(changed, weights)["status"] == "verified"
    (difference,) = certify(changed, weights, "chatml")["differences"]
    assert "After '', training has '[user]" in difference and "llama.cpp uses ChatML" in difference
    changed.tokenizer.chat_template = None
    assert certify(changed, weights)["limits"][0].startswith("The model has no chat template, so llama.cpp uses ChatML")


@pytest.mark.soak
def test_base_and_trained_model_get_the_same_texts(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter(range(5, 9))  # others each time
    monkeypatch.setattr(gguf_certificate, "probe_batches", lambda *_: [torch.ones(1, next(lengths), dtype=torch.long)])
    found = observe(adapter, tmp_path)
    assert found.base and [len(values) for values in found.base] == [len(values) for values in found.expected]
    assert found.batches[0].shape == (1, 5) and len(found.expected[0]) == 5


@pytest.mark.soak
@pytest.mark.parametrize("context", [llama_cpp.CONTEXT, 200])
def test_requests_fit_into_the_context(
    adapter: Path,
    certify: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: int,
) -> None:
    """The longest texts that are compared have 400 tokens, which exceeds a context of 200."""
    run, prompt = tmp_path / "run", "Is this a short prompt?"
    shutil.copytree(adapter, run)
    monkeypatch.setattr(llama_cpp, "CONTEXT", context)
    long = ["word " * context, "output"]
    for examples, expected in (([long], "What is the capital of France?"), ([long, long, [prompt, "Yes"]], prompt)):
        (run / BEFORE).write_text(json.dumps(examples))
        certificate = certify(observe(run, tmp_path))
        assert certificate["status"] == "verified"
        assert [expected in output["prompt"] for output in certificate["outputs"]] == [True]


def test_the_context_of_a_model_that_has_fewer_positions() -> None:
    models = (SimpleNamespace(config=GPT2Config(n_positions=positions)) for positions in (1024, 4096))
    assert [llama_cpp.context_of(model) for model in models] == [1024, llama_cpp.CONTEXT]


def test_the_divergence_of_the_most_likely_tokens() -> None:
    """The others count together: a lower bound, and the divergence itself if all are known."""
    torch.manual_seed(0)
    ours, theirs = (torch.randn(500, dtype=torch.float64).mul(3).log_softmax(0) for _ in range(2))
    exact = float((ours.exp() * (ours - theirs)).sum())
    top = theirs.topk(400).indices.tolist()
    assert divergence(ours, dict(enumerate(theirs.tolist()))) == pytest.approx(exact, rel=1e-4)
    assert 0.8 * exact < divergence(ours, {n: float(theirs[n]) for n in top}) < exact


def test_what_prevents_an_export(
    adapter: Path, export: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrainError, match=r"was deleted\. Merge the adapter again"):
        export(adapter, merge="gone")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(TrainError, match=r"needs 0.0 GiB, and 0.0 GiB are free .* Free some disk space\.$"):
            export(adapter)
        with pytest.raises(TrainError, match=r"Free some disk space, or export as q8_0, which needs less\.$"):
            export(adapter, format="q4_k_m")
        with pytest.raises(TrainError, match=r"or export as lora-q8_0, which needs less\.$"):
            export(adapter, format="lora-f16")
    with monkeypatch.context() as patch:
        (tmp_path / "env" / CONVERTER / "convert_hf_to_gguf.py").write_text(
            "raise SystemExit('Model X is unsupported')"
        )
        with pytest.raises(TrainError, match=r"cannot convert this model: Model X is unsupported"):
            export(adapter)
    kill = "import os, signal\nprint('Writing: 3%', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "env" / CONVERTER / "convert_hf_to_gguf.py").write_text(kill)
    with pytest.raises(TrainError, match=r"this model: its process was killed by SIGKILL, perhaps because"):
        export(adapter)
    (tmp_path / "job" / STOP).write_text("discard")
    with pytest.raises(Stopped):
        export(adapter)
    assert not {FOLDER, "source", "unchecked"} & {path.name for path in (tmp_path / "job").iterdir()}


def test_errors_that_merges_and_exports_share(adapter: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(tiny)
    base.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(TrainError, match="of the base model contain NaN or infinity, so nothing was saved"):
        log_probabilities(base, [torch.tensor([[1, 2]])], "base model")
    base.is_quantized = True  # transformers has no quantizer that could dequantize it
    monkeypatch.setattr(loading.model, "load", lambda *_, **__: base)
    with pytest.raises(TrainError, match="so the adapter can be neither merged nor exported as GGUF"):
        loading.load_base(Run(adapter), make_spec(TRAINED), ModelSource(str(tiny), {}), None)


TEMPLATES = {
    "chatml": (CHATML, """FROM ./a.gguf
TEMPLATE \"""{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}<|im_start|>user
{{ .Prompt }}<|im_end|>
<|im_start|>assistant
{{ .Response }}<|im_end|>
\"""
PARAMETER stop "<|im_end|>"
"""),
    "default system prompt": ("{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    + CHATML, """FROM ./a.gguf
TEMPLATE \"""{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}<|im_start|>user
{{ .Prompt }}<|im_end|>
<|im_start|>assistant
{{ .Response }}<|im_end|>
\"""
SYSTEM \"""Be kind.\"""
PARAMETER stop "<|im_end|>"
"""),
    "no system prompt": ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML, ""),
    "number of the message": ("{% for m in messages %}{{ loop.index }}. {{ m.content }}<|im_end|>{% endfor %}: ", ""),
    "no stop token": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ", ""),
    "none": (None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_modelfile(tiny: Path, name: str) -> None:
    template, expected = TEMPLATES[name]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = template
    assert modelfile.write("a.gguf", tokenizer, ["<|im_end|>"]) == expected
