"""The look at files: what is there, what is missing, which rows are wrong, and how fast a second look is."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from specs import spec

from backend import registry
from backend.config import RunSpec
from backend.config.options import edit
from backend.config.processes import rendezvous_port
from backend.inspect import InputFacts, fetch, inspect_inputs, resolve_paths
from backend.machine import Machine
from backend.rules import check


def files(*names: str, **more: Any) -> RunSpec:
    return spec(data__source="files", data__files=names, **more)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def test_default_spec_is_known_without_a_file(tmp_path: Path) -> None:
    found = inspect_inputs(RunSpec(), tmp_path, {"FOOTPLATE_CACHE": str(tmp_path)})
    assert found.shape is not None
    assert found.shape.parameters == registry.MODELS["smollm2-135m-instruct"].parameters
    assert (found.has_template, found.is_downloaded, found.format) == (True, False, "messages")
    assert (found.rows, found.held, found.exact, found.issues) == (400, 32, True, ())
    assert found.training_rows(RunSpec().data) == 400
    assert found.validation_rows(RunSpec().data) == 32
    assert 50 < found.longest < 400


# As the models' pages on the hub say.
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_much_used_models_are_known_before_a_download(name: str, tmp_path: Path) -> None:
    found = inspect_inputs(spec(model__source="hub", model__hub_id=name.lower()), tmp_path, {"HF_HOME": str(tmp_path)})
    assert found.shape is not None
    assert found.shape.parameters == PUBLISHED[name]
    assert (found.is_downloaded, found.has_template, found.model) == (False, None, "")


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model."""

    def do_GET(self) -> None:
        body = json.dumps(registry.MODELS["tiny-llama"].config).encode()
        known = self.path.startswith("/own/tiny/resolve/main/config.json")
        self.send_response(200 if known else 404)
        for name, value in {"X-Repo-Commit": "a" * 40, "ETag": '"1"', "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_the_hub_is_asked_for_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked = spec(model__source="hub", model__hub_id="own/tiny")
    assert inspect_inputs(asked, tmp_path).unknown == "the model was not downloaded yet"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert fetch("own/tiny", "main") == ""
        assert fetch("own/other", "main").startswith("the hub has no such model")
        assert fetch("a/b/c", "main") == "an id is organisation/name"
        server.shutdown()
    found = inspect_inputs(asked, tmp_path)
    assert found.shape is not None
    assert (found.shape.model_type, found.model, found.is_downloaded) == ("llama", "", False)


def test_rows_are_read_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "p" * 400, "completion": "c"}, {"prompt": "q", "completion": "d"}])
    write(tmp_path / "b.jsonl", [{"prompt": "\u4f60" * 50, "completion": "c"}])
    asked = files("*.jsonl")
    found = inspect_inputs(asked, tmp_path)
    assert (found.format, found.columns, found.rows) == ("prompt_completion", ("prompt", "completion"), 3)
    assert found.lengths == (10, 60, 90)
    assert found.validation_rows(asked.data) == 1
    assert found.training_rows(asked.data) == 2
    assert (
        inspect_inputs(files("*.jsonl", data__max_samples=1), tmp_path).training_rows(spec(data__max_samples=1).data)
        == 1
    )


def test_bad_rows_are_named_by_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [{"prompt": "p", "completion": "c"}, {"prompt": 3, "completion": "c"}, {"prompt": "p"}, "{broken"],
    )
    issues = inspect_inputs(files("a.jsonl"), tmp_path).issues
    assert [t.where for t in issues] == [f"{path}, line {n}" for n in (2, 3, 4)]
    assert all(t.row and t.field == "data.files" for t in issues)
    assert "a number" in str(issues[0])


def test_missing_and_unknown_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "odd.jsonl", [{"question": "q", "answer": "a"}])
    write(tmp_path / "empty.jsonl", [])
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    asked = files("no.jsonl", "n*.jsonl", "odd.jsonl", "empty.jsonl", "text.txt", "folder")
    issues = inspect_inputs(asked, tmp_path).issues
    assert [Path(t.where).name for t in issues] == list(asked.data.files)
    assert "question, answer" in issues[2].sentence
    assert not any(t.row for t in issues)


def test_long_file_is_estimated_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "word " * 20} for _ in range(20_000)]
    write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr("backend.inspect.data_files.MOST_SECONDS", 0.01)
    found = inspect_inputs(files("a.jsonl"), tmp_path)
    assert (found.rows, found.exact) == (20_000, False)
    (tmp_path / "b.csv").write_text("text\n" + "word word word\n" * 20_000)
    found = inspect_inputs(files("b.csv"), tmp_path)
    assert not found.exact
    assert found.rows is not None and 15_000 < found.rows < 25_000


def test_change_of_a_file_is_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a"}])
    assert inspect_inputs(files("a.jsonl"), tmp_path).rows == 1
    write(path, [{"text": "a"}, {"text": "b"}])
    assert inspect_inputs(files("a.jsonl"), tmp_path).rows == 2


def test_validation_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    asked = files("a.jsonl", data__validation="files", data__validation_files=("v.jsonl",))
    assert [t.field for t in inspect_inputs(asked, tmp_path).issues] == ["data.validation_files"]
    write(tmp_path / "v.jsonl", [{"text": "a"}, {"text": "b"}])
    assert inspect_inputs(asked, tmp_path).validation_rows(asked.data) == 2


def model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    base = {**registry.MODELS["tiny-llama"].config, **config}
    (folder / "config.json").write_text(json.dumps(base))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return folder


def test_model_folder(tmp_path: Path) -> None:
    def seen(path: str) -> InputFacts:
        return inspect_inputs(spec(model__source="path", model__path=path), tmp_path)

    assert "no folder" in seen("nowhere").model
    assert seen("").model
    folder = model(tmp_path / "good")
    found = seen("good")
    assert (found.model, found.has_template) == ("", None)
    assert found.shape is not None and found.shape.layers == 4
    (folder / "tokenizer_config.json").write_text("{}")
    assert inspect_inputs(spec(model__source="path", model__path="good"), tmp_path).has_template is False
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect_inputs(spec(model__source="path", model__path="good"), tmp_path).has_template is True
    (folder / "model.safetensors").unlink()
    assert "weights" in seen("good").model
    odd = seen(str(model(tmp_path / "odd", model_type="bert")))
    assert odd.shape is None and "bert" in odd.unknown and not odd.model
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    assert "adapter" in seen("adapter").model
    (tmp_path / "good" / "config.json").write_text("[")
    assert "cannot be read" in seen("good").model
    assert "file" in seen("good/config.json").model


def test_names_in_a_mixture_are_looked_up_in_its_code(tmp_path: Path) -> None:
    """It has no shape here, so nothing else would say that a name is wrong before the ranks do."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    mixture = {"model.source": "path", "model.path": str(tmp_path)}
    found = inspect_inputs(edit(RunSpec(), mixture), tmp_path)
    assert found.shape is None
    assert {"experts", "q_proj", "embed_tokens", "lm_head", "score"} <= found.attributes

    def codes(**changes: Any) -> set[str]:
        asked = edit(RunSpec(), {**mixture, **{name.replace("__", "."): value for name, value in changes.items()}})
        return {f.code for f in check(asked, Machine(), inspect_inputs(asked, tmp_path)) if f.code.startswith("MTH")}

    assert "Qwen3MoeDecoderLayer" in found.classes
    assert "MTH008" in codes(method__kind="freeze", method__freeze_extra_modules=("nothing",))
    assert not codes(method__kind="freeze", method__freeze_extra_modules=("mlp.gate", "layers.0", "lm_head"))
    assert "MTH004" in codes(lora__modules_to_save=("norms",))
    assert "MTH002" in codes(lora__targets="custom", lora__target_modules=("q_proj", "c_attn"))
    assert not codes(lora__targets="custom", lora__target_modules=("q_proj", "0.self_attn.v_proj"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "auto_map": {}}')
    assert not codes(method__kind="freeze", method__freeze_extra_modules=("nothing",))


def test_hub_model_is_seen_in_the_cache(tmp_path: Path) -> None:
    asked, environment = spec(model__source="hub", model__hub_id="org/name"), {"HF_HUB_CACHE": str(tmp_path)}
    assert inspect_inputs(asked, tmp_path, environment).shape is None
    store = tmp_path / "models--org--name"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text("abc")
    (store / "snapshots").mkdir()
    model(store / "snapshots" / "abc")
    found = inspect_inputs(asked, tmp_path, environment)
    assert found.shape is not None and found.is_downloaded


def test_template_and_checkpoint(tmp_path: Path) -> None:
    def template(name: str) -> str:
        return inspect_inputs(spec(data__chat_template="file", data__chat_template_file=name), tmp_path).template

    assert template("") and template("none.jinja")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert template("t.jinja") == ""

    def checkpoint(name: str, kind: str = "lora") -> str:
        return inspect_inputs(
            spec(save__resume_from="path", save__resume_path=name, method__kind=kind), tmp_path
        ).checkpoint

    assert checkpoint("") and checkpoint("x")
    folder = tmp_path / "checkpoints" / "checkpoint-3"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").touch()
    assert "cut off" in checkpoint(str(folder))
    (folder / "complete").touch()
    assert "weights only" in checkpoint(str(folder))
    (folder / "optimizer.pt").touch()
    assert checkpoint(str(folder), "full") == ""
    assert "LoRA" in checkpoint(str(folder))


def test_checkpoint_of_another_engine(tmp_path: Path) -> None:
    """Each engine reads its own files, each ZeRO stage its own parts; another number of parts is converted, where
    DeepSpeed can."""
    folder = tmp_path / "checkpoint-3"
    (folder / "global_step3").mkdir(parents=True)
    for name in ("trainer_state.json", "adapter_config.json"):
        (folder / name).touch()
    for rank in range(2):
        (folder / f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()

    def said(strategy: str, processes: int = 2, **more: Any) -> str:
        named = {"save__resume_from": "path", "save__resume_path": str(folder), **more}
        return inspect_inputs(
            spec(**named, parallel__strategy=strategy, launch__nproc_per_node=processes), tmp_path
        ).checkpoint

    assert said("zero2") == ""
    assert "written by DeepSpeed, which DDP cannot read" in said("ddp")
    assert said("zero2", 4) == said("zero1", 1) == said("zero2", train__optim="sgd") == ""
    assert "written by 2 processes: with an optimizer other than AdamW" in said("zero2", 4, train__optim="sgd")
    assert "with sequence parallel" in said("zero2", 4, parallel__sequence_parallel_size=2)
    assert "written by ZeRO-1 or ZeRO-2, which ZeRO-3 cannot read" in said("zero3")
    for rank in range(2):
        (folder / f"global_step3/zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
    assert said("zero3") == said("zero3", 4) == ""
    assert "written by ZeRO-3, which ZeRO-2 cannot read" in said("zero2")
    assert "written by 2 processes: with state offloaded to NVMe" in said(
        "zero3", 4, parallel__offload_optimizer="nvme"
    )
    (folder / "global_step3/offloaded_tensors").mkdir()
    assert "written by 2 processes: with state offloaded to NVMe" in said("zero3", 4)
    shutil.rmtree(folder / "global_step3")
    (folder / "optimizer.pt").touch()
    assert said("ddp") == ""
    assert "written by DDP or one process, which ZeRO-2 cannot read" in said("zero2")


def test_paths_are_settled(tmp_path: Path) -> None:
    settled = resolve_paths(files("a/*.jsonl", "/abs/b.jsonl", data__chat_template_file=""), tmp_path)
    assert settled.data.files == (str(tmp_path / "a/*.jsonl"), "/abs/b.jsonl")
    assert resolve_paths(RunSpec(), tmp_path) == RunSpec()


def test_a_port_that_something_holds_is_seen(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        asked = edit(RunSpec(), {"parallel.strategy": "ddp", "launch.master_port": port})
        found = inspect_inputs(asked, tmp_path)
        assert found.taken == port and found.spare > port
        assert not inspect_inputs(edit(asked, {"launch.launcher": "accelerate"}), tmp_path).taken, (
            "it takes another by itself"
        )
        far = {"launch.rendezvous": "static", "launch.node_rank": 1}
        assert not inspect_inputs(edit(asked, far), tmp_path).taken, "it is node 0 that listens"
        assert inspect_inputs(edit(asked, {**far, "launch.node_rank": 0}), tmp_path).taken
    assert not inspect_inputs(asked, tmp_path).taken
    assert not inspect_inputs(edit(RunSpec(), {"parallel.strategy": "ddp"}), tmp_path).taken


def test_deepspeeds_launcher_has_a_port_of_its_own() -> None:
    spec = edit(RunSpec(), {"parallel.strategy": "ddp", "launch.launcher": "deepspeed"})
    assert (rendezvous_port(spec), rendezvous_port(edit(spec, {"launch.master_port": 7}))) == (29500, 7)
