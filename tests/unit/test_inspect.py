"""Inspection of input files: models, data files, templates, checkpoints and ports."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from specs import NO_TENSORS, spec

from backend import registry
from backend.config import RunSpec
from backend.config.options import edit, get, options
from backend.config.processes import rendezvous_port
from backend.inspect import (
    InputFacts,
    data_files,
    download_config,
    examples,
    hub_download,
    inspect_inputs,
    model_folder,
    resolve_paths,
)
from backend.inspect.checkpoint import checkpoint_problem
from backend.inspect.model_folder import wait_for_config
from backend.machine import Machine
from backend.rules import check


def files(*names: str, **more: Any) -> RunSpec:
    return spec(data__source="files", data__files=names, **more)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def test_the_default_spec_is_known_before_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a loaded machine, the form's 0.2 s end before the last example, and what was found by then is remembered.
    monkeypatch.setattr(data_files, "MAX_SECONDS", 60)
    monkeypatch.setattr(data_files, "_CACHE", {})
    facts = inspect_inputs(RunSpec(), tmp_path, {"FOOTPLATE_CACHE": str(tmp_path)})
    assert facts.shape is not None
    assert facts.shape.parameters == registry.BUILTIN_MODELS["smollm2-135m-instruct"].parameters
    assert (facts.has_chat_template, facts.is_downloaded, facts.format) == (True, False, "messages")
    assert (facts.num_examples, facts.num_validation_examples, facts.counts_are_exact, facts.data_issues) == (
        400,
        32,
        True,
        (),
    )
    assert facts.num_train_examples(RunSpec().data) == 400
    assert facts.num_eval_examples(RunSpec().data) == 32
    assert 50 < facts.longest_example < 400


# Parameters as the model pages on the Hub state.
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
def test_popular_models_are_known_before_a_download(name: str, tmp_path: Path) -> None:
    facts = inspect_inputs(spec(model__source="hub", model__hub_id=name.lower()), tmp_path, {"HF_HOME": str(tmp_path)})
    assert facts.shape is not None
    assert facts.shape.parameters == PUBLISHED[name]
    assert (facts.is_downloaded, facts.model_problem) == (False, "")
    has_template = name.startswith("Qwen/") or "Instruct" in name
    assert facts.has_chat_template is (None if name.startswith("allenai/") and not has_template else has_template)


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub with one model."""

    def do_GET(self) -> None:
        body = json.dumps(registry.BUILTIN_MODELS["tiny-llama"].config).encode()
        known = self.path.startswith("/own/tiny/resolve/main/config.json")
        self.send_response(200 if known else 404)
        for name, value in {"X-Repo-Commit": "a" * 40, "ETag": '"1"', "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if not known:
            self.send_header("X-Error-Code", "EntryNotFound" if "/own/empty/" in self.path else "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def test_config_is_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    run_spec = spec(model__source="hub", model__hub_id="own/tiny")
    reason = "the config.json of own/tiny is not on this machine (hf download own/tiny config.json downloads it)"
    assert inspect_inputs(run_spec, tmp_path).shape_unknown_reason == reason
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        wait_for_config(run_spec, tmp_path)
        assert download_config("own/empty", "main").startswith("the repository has no config.json")
        assert download_config("a/b/c", "main") == "the ID is not valid: it must be organization/name or name"
        other = spec(model__source="hub", model__hub_id="own/other")
        wait_for_config(other, tmp_path)
        server.shutdown()
    monkeypatch.setattr(model_folder, "download_config", None)
    wait_for_config(other, tmp_path)  # it is not requested again
    monkeypatch.setattr(hub_download, "RETRY_SECONDS", 0)
    with pytest.raises(TypeError):  # but some minutes later
        wait_for_config(other, tmp_path)
    reason = inspect_inputs(other, tmp_path).shape_unknown_reason
    assert reason.startswith("config.json could not be downloaded: the Hub has no model with this ID")
    facts = inspect_inputs(run_spec, tmp_path)
    assert facts.shape is not None
    assert (facts.shape.model_type, facts.model_problem, facts.is_downloaded) == ("llama", "", False)


def test_examples_are_read_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": "p" * 400, "completion": "c"}, {"prompt": "q", "completion": "d"}])
    write(tmp_path / "b.jsonl", [{"prompt": "\u4f60" * 50, "completion": "c"}])
    run_spec = files("*.jsonl")
    facts = inspect_inputs(run_spec, tmp_path)
    assert (facts.format, facts.columns, facts.num_examples) == ("prompt_completion", ("prompt", "completion"), 3)
    assert facts.token_lengths == (10, 60, 90)
    assert facts.num_eval_examples(run_spec.data) == 1
    assert facts.num_train_examples(run_spec.data) == 2
    assert (
        inspect_inputs(files("*.jsonl", data__max_samples=1), tmp_path).num_train_examples(
            spec(data__max_samples=1).data
        )
        == 1
    )


def test_examples_with_weights_are_counted(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    rows = [{"messages": turns, "loss_mask": [0, weight]} for weight in (1, 0.5, 0, 0.5, 1)]
    write(tmp_path / "a.jsonl", [*rows, {"messages": [{**turns[0], "weight": 0.5}, turns[1]]}])
    facts = inspect_inputs(files("*.jsonl"), tmp_path)
    assert (facts.num_with_weights, facts.num_weighted) == (3, 2), "only assistant turns have weights"
    write(tmp_path / "b.jsonl", [{"messages": turns, "loss_mask": [1, 2000]}])
    (issue,) = inspect_inputs(files("b.jsonl"), tmp_path).data_issues
    assert issue.location.endswith("b.jsonl, line 1") and "a weight from 0.001 to 1,000" in issue.message


def test_invalid_examples_are_reported_with_their_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [{"prompt": "p", "completion": "c"}, {"prompt": 3, "completion": "c"}, {"prompt": "p"}, "{broken"],
    )
    issues = inspect_inputs(files("a.jsonl"), tmp_path).data_issues
    assert [t.location for t in issues] == [f"{path}, line {n}" for n in (2, 3, 4)]
    assert all(t.is_example and t.field == "data.files" for t in issues)
    assert "a number" in str(issues[0])


def test_files_that_both_train_and_validate_are_found(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, [{"text": "x"}])
    (tmp_path / "link.jsonl").symlink_to("b.jsonl")

    def shared(*validation: str) -> list[str]:
        run_spec = files("a.jsonl", "b.jsonl", data__validation="files", data__validation_files=validation)
        return [Path(path).name for path in inspect_inputs(run_spec, tmp_path).shared_files]

    assert shared("link.jsonl") == ["b.jsonl"]
    assert shared("*.jsonl") == ["a.jsonl", "b.jsonl"]
    write(tmp_path / "c.jsonl", [{"text": "x"}])
    assert shared("c.jsonl") == []


@pytest.mark.parametrize("name", ["data", "data/", "data/*.jsonl"])
def test_files_of_other_splits_are_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    for file in ("train-0.jsonl", "latest.jsonl", "test_sft-0.jsonl", "Dev.jsonl"):
        write(tmp_path / "data" / file, [{"text": "x"}])
    facts = inspect_inputs(files(name), tmp_path)
    assert facts.other_splits == ("data/Dev.jsonl", "data/test_sft-0.jsonl")
    assert facts.own_split == ("data/latest.jsonl", "data/train-0.jsonl")
    for chosen in (("data/train*",), ("data/test*",), ("data/train*", "data/Dev.jsonl")):
        assert inspect_inputs(files(*chosen), tmp_path).other_splits == ()
    absolute = inspect_inputs(files(str(tmp_path / name)), tmp_path).other_splits
    assert absolute == tuple(str(tmp_path / other) for other in facts.other_splits)


def test_documents_that_a_folder_leaves_out_are_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for file in ("a.md", "b.txt", "README.md"):
        (tmp_path / "data" / file).write_text("A text.")
    assert inspect_inputs(files("data"), tmp_path).left_out_documents == ()
    write(tmp_path / "data" / "train.jsonl", [{"text": "x"}])
    write(tmp_path / "c.jsonl", [{"text": "x"}])
    facts = inspect_inputs(files("data", "c.jsonl"), tmp_path)
    assert facts.left_out_documents == ("data/a.md", "data/b.txt")
    assert facts.other_than_documents == ("data/train.jsonl", "c.jsonl")
    assert inspect_inputs(files("data", "data/b.txt"), tmp_path).left_out_documents == ("data/a.md",)
    assert inspect_inputs(files("data/*"), tmp_path).left_out_documents == ()
    assert inspect_inputs(files("data", "data/train.jsonl"), tmp_path).other_than_documents == ("data/train.jsonl",)
    absolute = inspect_inputs(files(str(tmp_path / "data")), tmp_path)
    assert absolute.left_out_documents == (str(tmp_path / "data/a.md"), str(tmp_path / "data/b.txt"))


@pytest.mark.parametrize("name", ["a.jsonl, b.jsonl", "a.jsonl;b.jsonl", '"a.jsonl"', "'a.jsonl'"])
def test_several_paths_on_one_line_are_recognized(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jsonl", [{"text": "x"}])
    (issue,) = inspect_inputs(files(name), tmp_path).data_issues
    assert issue.message == "does not exist; write each path on a separate line, without quotes or commas"


def test_missing_and_unknown_files_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "odd.jsonl", [{"question": "q", "answer": "a"}])
    write(tmp_path / "empty.jsonl", [])
    (tmp_path / "text.rst").write_text("x")
    (tmp_path / "folder").mkdir()
    run_spec = files("no.jsonl", "n*.jsonl", "odd.jsonl", "empty.jsonl", "text.rst", "folder")
    issues = inspect_inputs(run_spec, tmp_path).data_issues
    assert [Path(t.location.partition(", line ")[0]).name for t in issues] == list(run_spec.data.files)
    assert "question: text, answer: text" in issues[2].message
    assert not any(t.is_example for t in issues)


def test_a_file_that_matches_twice_is_counted_once(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}] * 3)
    assert inspect_inputs(files("a.jsonl", "*.jsonl", "./a.jsonl"), tmp_path).num_examples == 3


def test_the_first_example_decides_the_format_of_all_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    write(tmp_path / "b.jsonl", [{"prompt": "When?", "completion": "At nine."}])
    (issue,) = inspect_inputs(files("a.jsonl", "b.jsonl"), tmp_path).data_issues
    assert str(issue).endswith("b.jsonl, line 1: has no column text; its columns are: prompt, completion")


def test_an_empty_file_next_to_examples_is_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    write(tmp_path / "b.jsonl", [])
    assert not inspect_inputs(files("b.jsonl", "a.jsonl"), tmp_path).data_issues
    (issue,) = inspect_inputs(files("b.jsonl"), tmp_path).data_issues
    assert issue.message == "contains no examples"


def test_a_long_file_is_inspected_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "word " * 20} for _ in range(20_000)]
    write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr("backend.inspect.data_files.MAX_SECONDS", 0.01)
    facts = inspect_inputs(files("a.jsonl"), tmp_path)
    assert (facts.num_examples, facts.counts_are_exact) == (20_000, False)
    (tmp_path / "b.csv").write_text("text\n" + "word word word\n" * 20_000)
    facts = inspect_inputs(files("b.csv"), tmp_path)
    assert not facts.counts_are_exact
    assert facts.num_examples is not None and 15_000 < facts.num_examples < 25_000
    for broken, most in ((20_000, 20_000), (10_000, 30_000)):  # too many cells: these rows cannot be read
        (tmp_path / "c.csv").write_text("text\n" + "word word word\n" * (20_000 - broken) + "a,b\n" * broken)
        facts = inspect_inputs(files("c.csv"), tmp_path)
        assert facts.num_examples is not None and 50 <= facts.num_examples <= most


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a"}])
    assert inspect_inputs(files("a.jsonl"), tmp_path).num_examples == 1
    write(path, [{"text": "a"}, {"text": "b"}])
    assert inspect_inputs(files("a.jsonl"), tmp_path).num_examples == 2


def test_validation_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    run_spec = files("a.jsonl", data__validation="files", data__validation_files=("v.jsonl",))
    assert [t.field for t in inspect_inputs(run_spec, tmp_path).data_issues] == ["data.validation_files"]
    write(tmp_path / "v.jsonl", [{"text": "a"}, {"text": "b"}])
    assert inspect_inputs(run_spec, tmp_path).num_eval_examples(run_spec.data) == 2


def model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    base = {**registry.BUILTIN_MODELS["tiny-llama"].config, **config}
    (folder / "config.json").write_text(json.dumps(base))
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "tokenizer.json").touch()
    return folder


@pytest.mark.parametrize("name", ["", "config.json", "tokenizer_config.json", "custom_generate/generate.py"])
def test_trust_remote_code_matters_only_where_a_model_has_code(tmp_path: Path, name: str) -> None:
    """Otherwise no code of the model can run, and its examples are checked as those of any model."""
    folder = model(tmp_path / "model")
    if name.endswith(".py"):  # transformers makes a model's `generate` of it
        (folder / name).parent.mkdir()
        (folder / name).touch()
    elif name:
        config = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}))
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    local = {"model__source": "path", "model__path": str(folder), "model__trust_remote_code": True}
    trusted = spec(**local, data__source="files", data__files=["data.jsonl"], train__stage="pretraining")
    facts = inspect_inputs(trusted, tmp_path)
    assert facts.has_own_code is bool(name)
    codes = {finding.code for finding in check(trusted, Machine(), facts)}
    assert ("MDL012" in codes) is bool(name)
    assert bool(examples._inputs(trusted, tmp_path, {})["folder"]) is not bool(name)


def test_model_folder(tmp_path: Path) -> None:
    def inspect_model(path: str) -> InputFacts:
        return inspect_inputs(spec(model__source="path", model__path=path), tmp_path)

    assert "does not exist" in inspect_model("nowhere").model_problem
    assert inspect_model("").model_problem
    folder = model(tmp_path / "good")
    facts = inspect_model("good")
    assert (facts.model_problem, facts.has_chat_template) == ("", None)
    assert facts.shape is not None and facts.shape.layers == 4
    (folder / "tokenizer_config.json").write_text("{}")
    assert inspect_inputs(spec(model__source="path", model__path="good"), tmp_path).has_chat_template is False
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect_inputs(spec(model__source="path", model__path="good"), tmp_path).has_chat_template is True
    (folder / "model.safetensors").unlink()
    assert "weights" in inspect_model("good").model_problem
    bert_facts = inspect_model(str(model(tmp_path / "odd", model_type="bert")))
    assert bert_facts.shape is None and "bert" in bert_facts.shape_unknown_reason and not bert_facts.model_problem
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    assert "adapter" in inspect_model("adapter").model_problem
    (tmp_path / "good" / "config.json").write_text("[")
    assert "cannot be read" in inspect_model("good").model_problem
    assert "file" in inspect_model("good/config.json").model_problem


def test_module_names_of_a_moe_are_read_from_its_source(tmp_path: Path) -> None:
    """Without a shape, only the source can tell before the run that a module name is wrong."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "model.safetensors").write_bytes(NO_TENSORS)
    (tmp_path / "tokenizer.json").touch()
    mixture = {"model.source": "path", "model.path": str(tmp_path)}
    facts = inspect_inputs(edit(RunSpec(), mixture), tmp_path)
    assert facts.shape is None
    assert {"experts", "q_proj", "embed_tokens", "lm_head", "score"} <= facts.module_attributes

    def codes(**changes: Any) -> set[str]:
        run_spec = edit(RunSpec(), {**mixture, **{name.replace("__", "."): value for name, value in changes.items()}})
        return {
            f.code for f in check(run_spec, Machine(), inspect_inputs(run_spec, tmp_path)) if f.code.startswith("MTH")
        }

    assert "Qwen3MoeDecoderLayer" in facts.module_classes
    assert "MTH008" in codes(method__kind="freeze", method__freeze_extra_modules=("nothing",))
    assert not codes(method__kind="freeze", method__freeze_extra_modules=("mlp.gate", "layers.0", "lm_head"))
    assert "MTH004" in codes(lora__modules_to_save=("norms",))
    assert "MTH002" in codes(lora__targets="custom", lora__target_modules=("q_proj", "c_attn"))
    assert not codes(lora__targets="custom", lora__target_modules=("q_proj", "0.self_attn.v_proj"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "auto_map": {}}')
    assert not codes(method__kind="freeze", method__freeze_extra_modules=("nothing",))


def test_a_hub_model_is_found_in_the_cache(tmp_path: Path) -> None:
    run_spec, environment = spec(model__source="hub", model__hub_id="org/name"), {"HF_HUB_CACHE": str(tmp_path)}
    assert inspect_inputs(run_spec, tmp_path, environment).shape is None
    store = tmp_path / "models--org--name"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text("abc")
    (store / "snapshots").mkdir()
    model(store / "snapshots" / "abc")
    facts = inspect_inputs(run_spec, tmp_path, environment)
    assert facts.shape is not None and facts.is_downloaded


def test_template_and_checkpoint(tmp_path: Path) -> None:
    def template(name: str) -> str:
        return inspect_inputs(
            spec(data__chat_template="file", data__chat_template_file=name), tmp_path
        ).template_problem

    assert template("") and template("none.jinja")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    assert template("t.jinja") == ""

    def checkpoint(name: str, kind: str = "lora") -> str:
        return inspect_inputs(
            spec(save__resume_from="path", save__resume_path=name, method__kind=kind), tmp_path
        ).checkpoint_problem

    assert checkpoint("") and checkpoint("x")
    for step in (9, 20, 100):
        (tmp_path / f"run/checkpoints/checkpoint-{step}").mkdir(parents=True)
    for step in (9, 20):
        (tmp_path / f"run/checkpoints/checkpoint-{step}/complete").touch()
    last = f"set the path of its last checkpoint, {tmp_path}/run/checkpoints/checkpoint-20."
    assert checkpoint("run").endswith(last) and checkpoint("run/checkpoints").endswith(last)
    assert checkpoint("").endswith("set the path of a checkpoint-N folder.")
    folder = tmp_path / "checkpoints" / "checkpoint-3"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").touch()
    assert "incomplete" in checkpoint(str(folder))
    (folder / "complete").touch()
    assert "no optimizer state" in checkpoint(str(folder))
    (folder / "optimizer.pt").touch()
    assert checkpoint(str(folder), "full") == ""
    assert "method.kind is lora" in checkpoint(str(folder))


@pytest.mark.parametrize(
    ("saved", "now", "fits"),
    [("adamw_torch", "adamw_torch", True), ("adamw_torch", "adamw_torch_fused", True), ("adamw_torch", "sgd", False),
     ("adafactor", "adamw_torch", False), ("adamw_bnb_8bit", "adamw_torch", False), ("unreadable", "sgd", True)],
)  # fmt: skip
def test_a_checkpoint_of_another_optimizer(tmp_path: Path, saved: str, now: str, fits: bool) -> None:
    """It fails in the first step: the key 'square_avg' was not found."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "optimizer.pt"):
        (folder / name).touch()
    (tmp_path / "spec.yaml").write_text("x: [" if saved == "unreadable" else f"train:\n  optim: {saved}\n")
    resumed = {"save__resume_from": "path", "save__resume_path": str(folder), "method__kind": "full"}
    problem = inspect_inputs(spec(**resumed, train__optim=now), tmp_path).checkpoint_problem
    assert (problem == "") == fits
    assert fits or f"({saved}), and train.optim is {now}" in problem


GALORE = "train: {optim: galore_adamw, projection_rank: 4}\nmethod: {kind: freeze}"


@pytest.mark.parametrize(
    ("saved", "now", "words"),
    [
        ("method: {kind: freeze}", {"method__freeze_trainable_layers": 2}, ""),
        ("method: {kind: freeze}", {"method__freeze_trainable_layers": -2}, "is now -2. Use the earlier value."),
        ("method: {kind: freeze}", {"method__freeze_extra_modules": ("norm",)}, "modules was [] and is now ['norm']."),
        ("method: {kind: freeze}", {"method__kind": "full"}, "method.kind was freeze and is now full."),
        ("method: {kind: lora}", {"method__kind": "freeze"}, ""),
        ("precision: {compute: pure_bf16}", {"precision__compute": "bf16"}, "was pure_bf16 and is now bf16. Use the"),
        ("precision: {compute: fp32}", {"precision__compute": "bf16"}, ""),
        ("x: [", {"method__freeze_trainable_layers": 1}, ""),
        (GALORE, {"train__optim": "galore_adamw", "train__projection_rank": 8}, "was 4 and is now 8. Use the earlier"),
        (GALORE, {"train__optim": "galore_adamw", "train__projection_rank": 4, "train__update_proj_gap": 9}, ""),
    ],
)
def test_a_checkpoint_of_other_trained_weights(tmp_path: Path, saved: str, now: dict[str, Any], words: str) -> None:
    """torch would fail, or give the state of one layer to another."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "optimizer.pt"):
        (folder / name).touch()
    (tmp_path / "spec.yaml").write_text(saved)
    resumed = {"save__resume_from": "path", "save__resume_path": str(folder), "method__kind": "freeze", **now}
    problem = inspect_inputs(spec(**resumed), tmp_path).checkpoint_problem
    assert words in problem if words else not problem
    (folder / "optimizer.pt").rename(folder / "optimizer.bin")  # FSDP's, where states have names
    problem = inspect_inputs(spec(**resumed, parallel__strategy="fsdp2"), tmp_path).checkpoint_problem
    assert not problem or "pure" in saved or "galore" in saved


FREEZE_2 = {"method.kind": "freeze", "method.freeze_trainable_layers": 2}


@pytest.mark.parametrize(
    ("saved", "now", "fix"),
    [
        ({"train.optim": "sgd"}, {}, {"train.optim": "sgd"}),
        ({}, {"parallel.strategy": "zero2"}, {"parallel.strategy": "single"}),
        ({"method.kind": "full"}, FREEZE_2, {"method.kind": "full"}),
        (FREEZE_2, {**FREEZE_2, "method.freeze_trainable_layers": -2}, {"method.freeze_trainable_layers": 2}),
        (  # neither option alone is enough
            {"train.optim": "galore_adamw", "train.projection_rank": 4},
            {"train.optim": "galore_adamw", "train.projection_rank": 8, "precision.compute": "pure_bf16"},
            {"train.projection_rank": 4, "precision.compute": "auto"},
        ),
        (  # the number of processes is not needed
            {"parallel.strategy": "ddp", "launch.nproc_per_node": 4, "train.optim": "sgd"},
            {"parallel.strategy": "zero2", "launch.nproc_per_node": 2},
            {"parallel.strategy": "ddp", "train.optim": "sgd"},
        ),
        ({"model.builtin": "tiny-llama", "method.kind": "lora"}, {"method.kind": "lora"}, None),  # not an adapter
        (None, {"parallel.strategy": "zero2"}, None),
    ],
)
def test_the_options_of_a_checkpoint_are_offered(
    tmp_path: Path, saved: dict[str, Any] | None, now: dict[str, Any], fix: dict[str, Any] | None
) -> None:
    """As many as are needed, if the run that saved it is known."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "optimizer.pt"):
        (folder / name).touch()
    if saved is not None:
        (tmp_path / "spec.yaml").write_text(edit(RunSpec(), {"method.kind": "full", **saved}).model_dump_json())
    resumed = {"method.kind": "full", **now, "save.resume_from": "path", "save.resume_path": str(folder)}
    facts = inspect_inputs(edit(RunSpec(), resumed), tmp_path)
    assert facts.checkpoint_problem and dict(facts.checkpoint_options) == (fix or {})


def test_a_sharded_checkpoint_of_another_method(tmp_path: Path) -> None:
    """Its file names are the same with and without an adapter."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    (folder / "optimizer_0").mkdir(parents=True)
    for name in ("trainer_state.json", "complete"):
        (folder / name).touch()
    sharded = {"parallel.strategy": "fsdp2", "parallel.state_dict_type": "sharded"}
    (tmp_path / "spec.yaml").write_text(edit(RunSpec(), {**sharded, "method.kind": "full"}).model_dump_json())
    resumed = edit(RunSpec(), {**sharded, "save.resume_from": "path", "save.resume_path": str(folder)})
    assert "method.kind was full and is now lora" in inspect_inputs(resumed, tmp_path).checkpoint_problem
    assert not inspect_inputs(edit(resumed, {"method.kind": "full"}), tmp_path).checkpoint_problem


def test_no_options_complete_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "optimizer.pt"):
        (folder / name).touch()
    (tmp_path / "spec.yaml").write_text("method: {kind: full}\nprecision: {compute: fp32}\n")
    resumed = {"method.kind": "full", "save.resume_from": "path", "save.resume_path": str(folder)}
    facts = inspect_inputs(edit(RunSpec(), resumed), tmp_path)
    assert "is incomplete" in facts.checkpoint_problem and facts.checkpoint_options == ()


HUB = {"model.source": "hub", "model.hub_id": "gpt2"}


@pytest.mark.parametrize(("hub_id", "fits"), [("openai-community/GPT2", True), ("distilgpt2", False)])
def test_a_base_model_that_moved_on_the_hub(tmp_path: Path, hub_id: str, fits: bool) -> None:
    """Its ID has another account then; the trainer compares the weights."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "optimizer.pt", "adapter_config.json"):
        (folder / name).touch()
    (tmp_path / "spec.yaml").write_text(edit(RunSpec(), HUB).model_dump_json())
    resumed = {**HUB, "model.hub_id": hub_id, "save.resume_from": "path", "save.resume_path": str(folder)}
    problem = checkpoint_problem(edit(RunSpec(), resumed), tmp_path)
    assert problem == "" if fits else "an adapter of the base model gpt2, and model.hub_id is distilgpt2" in problem


@pytest.mark.parametrize(
    ("now", "fits"),
    [({}, True), ({"model.builtin": "tiny-llama"}, False), ({"model.source": "path", "model.path": "x"}, True)],
)
def test_an_adapter_of_another_base_model(tmp_path: Path, now: dict[str, Any], fits: bool) -> None:
    """The trainer compares the weights; models that have names are refused before the start."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "optimizer.pt", "adapter_config.json"):
        (folder / name).touch()
    (tmp_path / "spec.yaml").write_text(RunSpec().model_dump_json())
    resumed = edit(RunSpec(), {**now, "save.resume_from": "path", "save.resume_path": str(folder)})
    facts = inspect_inputs(resumed, tmp_path)
    assert (facts.checkpoint_problem == "") == fits
    assert fits or dict(facts.checkpoint_options) == {"model.builtin": RunSpec().model.builtin}


@pytest.mark.parametrize(("before", "now", "fits"), [("none", "cpu", False), ("cpu", "none", True)])
def test_a_checkpoint_of_another_class_of_adam(tmp_path: Path, before: str, now: str, fits: bool) -> None:
    """It fails in the first step: the key 'bias_correction' was not found."""
    folder = tmp_path / "checkpoints/checkpoint-3"
    (folder / "global_step3").mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (folder / name).touch()
    (tmp_path / "spec.yaml").write_text(
        f"method: {{kind: full}}\nparallel: {{strategy: zero2, offload_optimizer: {before}}}\n"
    )
    resumed = {"save__resume_from": "path", "save__resume_path": str(folder), "method__kind": "full"}
    zero = {"parallel__strategy": "zero2", "parallel__offload_optimizer": now, "launch__nproc_per_node": 1}
    assert (inspect_inputs(spec(**resumed, **zero), tmp_path).checkpoint_problem == "") == fits


@pytest.mark.parametrize(
    ("saved", "now", "fits"),
    [
        ("gaussian", "orthogonal", True),
        (True, "gaussian", True),
        ("pissa", "default", False),
        ("pissa_niter_4", "default", False),
    ],
)
def test_an_initialization_matters_only_if_it_changes_base_weights(
    tmp_path: Path, saved: object, now: str, fits: bool
) -> None:
    folder = tmp_path / "checkpoints/checkpoint-3"
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "complete", "optimizer.pt"):
        (folder / name).touch()
    (folder / "adapter_config.json").write_text(json.dumps({"init_lora_weights": saved}))
    resumed = spec(save__resume_from="path", save__resume_path=str(folder), lora__init=now)
    assert (inspect_inputs(resumed, tmp_path).checkpoint_problem == "") == fits


def test_checkpoint_of_another_engine(tmp_path: Path) -> None:
    """Each engine reads only its own files, and each ZeRO stage its own shards; another number of shards is converted
    where that is possible."""
    folder = tmp_path / "checkpoint-3"
    (folder / "global_step3").mkdir(parents=True)
    for name in ("trainer_state.json", "adapter_config.json"):
        (folder / name).touch()
    for rank in range(2):
        (folder / f"global_step3/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()

    def problem(strategy: str, processes: int = 2, **more: Any) -> str:
        named = {"save__resume_from": "path", "save__resume_path": str(folder), **more}
        return inspect_inputs(
            spec(**named, parallel__strategy=strategy, launch__nproc_per_node=processes), tmp_path
        ).checkpoint_problem

    assert problem("zero2") == ""
    resumed = spec(save__resume_from="path", save__resume_path=str(folder), parallel__strategy="zero2")
    assert inspect_inputs(resumed, tmp_path).checkpoint_dtype == "bf16"
    assert "saved by DeepSpeed, and DDP cannot resume" in problem("ddp")
    assert problem("zero2", 4) == problem("zero1", 1) == problem("zero2", train__optim="sgd") == ""
    assert "saved by 2 processes and this run has 4: with an optimizer other than AdamW" in problem(
        "zero2", 4, train__optim="sgd"
    )
    assert "with sequence parallel" in problem("zero2", 4, parallel__sequence_parallel_size=2)
    assert "saved by ZeRO-1 or ZeRO-2, and ZeRO-3 cannot resume" in problem("zero3")
    assert "saved by ZeRO-1 or ZeRO-2, and ZeRO-0 cannot resume" in problem("zero0")
    for rank in range(2):
        (folder / f"global_step3/zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
    assert problem("zero3") == problem("zero3", 4) == ""
    assert "saved by ZeRO-3, and ZeRO-2 cannot resume" in problem("zero2")
    assert "saved by 2 processes and this run has 4: with state offloaded to NVMe" in problem(
        "zero3", 4, parallel__offload_optimizer="nvme"
    )
    (folder / "global_step3/offloaded_tensors").mkdir()
    assert "saved by 2 processes and this run has 4: with state offloaded to NVMe" in problem("zero3", 4)
    shutil.rmtree(folder / "global_step3")
    (folder / "global_step3").mkdir()
    (folder / "global_step3/mp_rank_00_model_states.pt").touch()
    assert problem("zero0") == problem("zero0", 4) == problem("zero0", 1, train__optim="sgd") == ""
    assert "saved by ZeRO-0, and ZeRO-2 cannot resume" in problem("zero2")
    assert "saved by DeepSpeed, and DDP cannot resume" in problem("ddp")
    shutil.rmtree(folder / "global_step3")
    (folder / "optimizer.pt").touch()
    assert problem("ddp") == ""
    assert "saved by DDP or a single process, and ZeRO-2 cannot resume" in problem("zero2")


def test_relative_paths_are_resolved(tmp_path: Path) -> None:
    resolved = resolve_paths(files("a/*.jsonl", "/abs/b.jsonl", data__chat_template_file=""), tmp_path)
    assert resolved.data.files == (str(tmp_path / "a/*.jsonl"), "/abs/b.jsonl")
    assert resolve_paths(RunSpec(), tmp_path) == RunSpec()
    sources = [{"source": "files", "files": ["a.jsonl"]}, {"source": "files", "files": ["b.jsonl", "/c.jsonl"]}]
    sources[1] |= {"validation": "files", "validation_files": ["d.jsonl"]}
    first, second = resolve_paths(edit(RunSpec(), {"data.sources": sources}), tmp_path).data.datasets
    assert first.files == (f"{tmp_path}/a.jsonl",) and second.files == (f"{tmp_path}/b.jsonl", "/c.jsonl")
    assert second.validation_files == (f"{tmp_path}/d.jsonl",)


def test_every_option_with_a_path_is_resolved(tmp_path: Path) -> None:
    """A run's working directory is its own folder, so the trainer would find nothing there."""
    names = [option.name for option in options() if option.path and option.kind == "str"]
    assert "lora.adapter_path" in names
    resolved = resolve_paths(edit(RunSpec(), dict.fromkeys(names, "a/b")), tmp_path)
    assert {get(resolved, name) for name in names} == {str(tmp_path / "a/b")}


def test_a_port_in_use_is_found(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        nodes = {"launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
        run_spec = edit(RunSpec(), {"parallel.strategy": "ddp", **nodes, "launch.master_port": port})
        facts = inspect_inputs(run_spec, tmp_path)
        assert facts.port_in_use == port and facts.free_port > port
        one_node = {"launch.rendezvous": "standalone"}
        assert not inspect_inputs(edit(run_spec, one_node), tmp_path).port_in_use, "the ranks meet in a file"
        assert not inspect_inputs(edit(run_spec, {"launch.node_rank": 1}), tmp_path).port_in_use, "node 0 listens"
        assert inspect_inputs(edit(run_spec, {"launch.node_rank": 0}), tmp_path).port_in_use
    assert not inspect_inputs(run_spec, tmp_path).port_in_use
    assert not inspect_inputs(edit(RunSpec(), {"parallel.strategy": "ddp"}), tmp_path).port_in_use


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed"])
def test_several_nodes_have_a_default_port(launcher: str) -> None:
    spec = edit(RunSpec(), {"parallel.strategy": "ddp", "launch.launcher": launcher, "launch.rendezvous": "static"})
    assert (rendezvous_port(spec), rendezvous_port(edit(spec, {"launch.master_port": 7}))) == (29500, 7)
