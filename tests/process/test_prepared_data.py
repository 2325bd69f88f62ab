"""Prepared data is used again by the next run with the same data, and by no other; nothing incomplete is ever used."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from fork_server import ForkServer
from pyarrow import parquet
from training_runs import environment, log_text, losses, make_spec
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from backend import presets
from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.data import prepared
from backend.paths import HOME, prepared_folder
from backend.runs import LOCK, PLAN, SPEC, processes
from backend.train import data, model, template_date
from backend.train.training import PREPARED

ROWS = [{"prompt": f"When does train {n} leave?", "completion": f"At {n}."} for n in range(40)]
KEEPS = """\
import sys
from pathlib import Path
from backend.data import prepared
for number in range(10**6):
    prepared.keep(f"{sys.argv[2]}{number % 5}", Path(sys.argv[1]), "data", ["line"])
    print(number, flush=True)
"""


@pytest.fixture(autouse=True)
def own_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/models").symlink_to(cache / "models")
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))


def spec_of(folder: Path, **changes: Any) -> RunSpec:
    path = folder / "rows.jsonl"
    if not path.exists():
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    return make_spec({"data.source": "files", "data.files": (str(path),), **changes})


def tokenizer_of(tiny: Path, spec: RunSpec) -> Any:
    return model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True}))


def prepare(spec: RunSpec, tokenizer: Any, folder: Path) -> tuple[data.PreparedData, list[str]]:
    lines: list[str] = []
    data.prepare_once(spec, tokenizer, lambda done, of: True, lines.append, folder, 0.0)
    return data.load(folder), lines


def test_it_is_used_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path)
    tokenizer = tokenizer_of(tiny, spec)
    expected = data.prepare(spec, tokenizer, lambda done, of: True, print)
    first, lines = prepare(spec, tokenizer, tmp_path / "one")
    monkeypatch.setattr(data, "prepare", None)
    again, more = prepare(spec, tokenizer, tmp_path / "two")
    assert more == ["Reusing the cached tokenized dataset for the same files, tokenizer and options.", *lines]
    for made in (first, again):
        assert made.train[:] == expected.train[:]
        assert (made.eval_examples, made.end_tokens) == (expected.eval_examples, expected.end_tokens)
    names = {path.name for path in (tmp_path / "two").rglob("*.arrow")}
    assert names == {"data-00000-of-00001.arrow"} and os.stat(next((tmp_path / "two").rglob("*.arrow"))).st_nlink == 3


def test_templates_write_the_date_of_the_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed on another day has the same texts."""
    spec, turns = spec_of(tmp_path), [{"role": "user", "content": "When?"}]
    tokenizer = tokenizer_of(tiny, spec)
    (tmp_path / PLAN).write_text(json.dumps({"created": datetime(2026, 1, 2).timestamp()}))
    monkeypatch.setattr(chat_template_utils, "datetime", datetime)
    template_date.fix(tmp_path / "without a plan")
    assert template_date.today() == f"{datetime.now():%Y-%m-%d}"
    template_date.fix(tmp_path)
    for template, count in (("{{ strftime_now('%F') }}", 2), ("without", 1)):
        tokenizer.chat_template = template
        days = template_date.today(), "2026-01-03"
        assert len({prepared.key_of(spec, tokenizer, "", day) for day in days}) == count
        assert tokenizer.apply_chat_template(turns, tokenize=False) == ("2026-01-02" if count == 2 else template)


def test_turns_have_values_that_json_has_not(tiny: Path, tmp_path: Path) -> None:
    """Such as a date of a Parquet file, which no chat template reads."""
    turns = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At nine."}]
    rows = [{"messages": [{**turn, "sent": datetime(2026, 1, n)} for turn in turns]} for n in range(1, 9)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    spec = spec_of(tmp_path, **{"data.files": (str(tmp_path / "rows.parquet"),), "eval.num_generations": 1})
    (example,) = prepare(spec, tokenizer_of(tiny, spec), tmp_path / "one")[0].eval_examples
    assert example.value["messages"][1]["content"] == "At nine."


@pytest.mark.parametrize(
    "change",
    [
        {"data.max_length": 64}, {"data.loss_on": "all_tokens"}, {"data.validation_split": 0.2}, {"train.seed": 5},
        {"data.max_samples": 3}, {"train.stage": "pretraining"}, {"data.chat_template_kwargs": '{"x": 1}'},
        {"data.system_prompt": "Be brief."}, {"data.drop_duplicates": True}, {"eval.strategy": "epoch"},
    ],
    ids=str,
)  # fmt: skip
def test_another_option_is_another_key(tiny: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    spec, other = spec_of(tmp_path), spec_of(tmp_path, **change)
    assert prepared.key_of(other, tokenizer_of(tiny, other)) != prepared.key_of(spec, tokenizer_of(tiny, spec))


def test_the_code_that_decides_tokens_is_in_the_key() -> None:
    """Whatever the modules in the key import of the trainer is in the key, too, or decides no token."""
    files = {path for pattern in prepared.MODULES for path in (HOME / "backend").glob(pattern)}
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    named = {alias.name for node in imports if node.module == "backend.train" for alias in node.names}
    named |= {
        node.module.removeprefix("backend.train.")
        for node in imports
        if node.module and node.module.startswith("backend.train.")
    }
    others = {name for name in named if HOME / f"backend/train/{name}.py" not in files}
    assert others == {"run_log", "template_date", "worker_processes"}


def test_what_decides_no_token_is_in_no_key(tiny: Path, tmp_path: Path) -> None:
    spec, tokenizer = spec_of(tmp_path), AutoTokenizer.from_pretrained(tiny)
    key = prepared.key_of(spec, tokenizer)
    assert key == prepared.key_of(
        spec_of(tmp_path, **{"train.learning_rate": 1.0, "data.dataset_num_proc": 9}), tokenizer
    )
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    assert key == prepared.key_of(spec, tokenizer), "the content is the same"
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert key != prepared.key_of(spec, tokenizer)


def test_another_content_is_another_key_even_with_the_same_size_and_date(tiny: Path, tmp_path: Path) -> None:
    spec, tokenizer = spec_of(tmp_path), AutoTokenizer.from_pretrained(tiny)
    key, path = prepared.key_of(spec, tokenizer), tmp_path / "rows.jsonl"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("train 7", "train 8"))
    os.utime(path, ns=times)
    assert key != prepared.key_of(spec, tokenizer)


def test_a_damaged_entry_is_not_used(tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    tokenizer = tokenizer_of(tiny, spec)
    first, _ = prepare(spec, tokenizer, tmp_path / "one")
    expected = first.train[:]
    ((entry, name, size, _),) = prepared.entries()
    assert name == "rows.jsonl" and size > 1000
    file = next((entry / "train").glob("*.arrow"))
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-100])
    again, lines = prepare(spec, tokenizer, tmp_path / "two")
    assert again.train[:] == expected and "Reusing" not in lines[0]
    assert prepared.take("nothing", tmp_path / "three") is None and not (tmp_path / "three").exists()


@pytest.mark.parametrize("ticks", range(5))
def test_a_stop_leaves_no_entry(tiny: Path, tmp_path: Path, ticks: int) -> None:
    """Stopped after so many batches. The entry is complete after four: the selection, its end, training, validation."""
    spec = spec_of(tmp_path, **{"eval.strategy": "epoch"})
    calls: list[int] = []

    def tick(done: int, total: int) -> bool:
        calls.append(done)
        return len(calls) <= ticks

    data.prepare_once(spec, tokenizer_of(tiny, spec), tick, print, tmp_path / "made", 0.0)
    assert not prepared.entries()
    assert not (tmp_path / "made").exists() or not list((tmp_path / "made").rglob("*.json"))


def test_the_oldest_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/data").write_bytes(bytes(10**6))
    monkeypatch.setenv(prepared.LIMIT, "0.0035")
    for number in range(5):
        prepared.keep(f"{number}", tmp_path / "files", f"data {number}", [])
        os.utime(prepared_folder() / f"{number}", (number, number))
        if number == 3:
            assert prepared.take("1", tmp_path / "taken") == []  # it is the last used now
    assert {name for _, name, *_ in prepared.entries()} == {"data 1", "data 3", "data 4"}
    monkeypatch.setenv(prepared.LIMIT, "many")
    assert prepared.limit() == prepared.DEFAULT_LIMIT * 1e9
    assert prepared.clear() == (3, 3 * 10**6) and not prepared.entries()
    assert (tmp_path / "taken/data").stat().st_size == 10**6, "a run keeps its files"


def test_clearing_leaves_what_a_living_command_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spec.yaml").write_text(presets.dump(spec_of(tmp_path)))
    folders = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        folders.append(Path(command[-1]))
        prepared.clear()
        assert (folders[0] / SPEC).is_file() and options["preexec_fn"] is processes.end_with_parent
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["prepare", str(tmp_path / "spec.yaml")]) == 0
    folders[0].mkdir()  # as a command that is killed leaves it
    (folders[0] / LOCK).touch()
    prepared.clear()
    assert not folders[0].exists()


def test_processes_that_are_killed_leave_no_incomplete_entry(tmp_path: Path) -> None:
    """Two write the same entries, and are killed at random moments."""
    (tmp_path / "files/train").mkdir(parents=True)
    for number in range(20):
        (tmp_path / f"files/train/{number}").write_bytes(bytes(1000))
    drawn = random.Random(7)
    for turn in range(3):
        command = [sys.executable, "-c", KEEPS, str(tmp_path / "files"), f"{turn}-"]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for writer in writers:
            assert writer.stdout
            writer.stdout.readline()
        time.sleep(drawn.uniform(0, 0.3))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            assert writer.wait() == -signal.SIGKILL
            assert writer.stdout
            writer.stdout.close()
    found = prepared.entries()
    assert found
    for entry, *_ in found:
        assert prepared.take(entry.name, tmp_path / entry.name) == ["line"]
        assert len(list((tmp_path / entry.name / "train").iterdir())) == 20


def test_a_run_uses_what_the_command_has_prepared(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With one process, and with two, which load the same files; the losses are those without it."""
    spec = spec_of(tmp_path)
    (tmp_path / "spec.yaml").write_text(presets.dump(spec))
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    assert main(["prepare", "spec.yaml"]) == 0
    assert "38 training examples" in capfd.readouterr().out
    assert len(prepared.entries()) == 1
    server = replace(fork_server, cache=tmp_path / "cache")
    two = spec_of(tmp_path, **{"parallel.strategy": "ddp", "launch.nproc_per_node": 2})
    found = [server.train(tmp_path / f"{ranks}", each, ranks) for ranks, each in ((0, spec), (2, two))]
    prepared.clear()
    expected = [server.train(tmp_path / f"{ranks} anew", each, ranks) for ranks, each in ((0, spec), (2, two))]
    for folder, anew in zip(found, expected, strict=True):
        assert log_text(folder).count("Reusing the cached") == 1
        assert "Reusing" not in log_text(anew)
        assert losses(folder) == losses(anew) != {}
        assert not (folder / PREPARED).exists()


def test_the_tokenizer_s_settings_are_in_the_key(tiny: Path, tmp_path: Path) -> None:
    """Also those that are not in tokenizer.json; and code of a model could be anything."""
    spec, tokenizer = spec_of(tmp_path), AutoTokenizer.from_pretrained(tiny)
    other = AutoTokenizer.from_pretrained(tiny, split_special_tokens=True)
    assert prepared.key_of(spec, tokenizer) not in ("", prepared.key_of(spec, other))
    remote = edit(spec, {"model.source": "path", "model.path": str(tiny), "model.trust_remote_code": True})
    assert prepared.key_of(remote, tokenizer) == ""


def test_data_that_changes_and_changes_back_is_not_kept(tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    path = tmp_path / "rows.jsonl"
    content = path.read_text()

    calls: list[int] = []

    def change(done: int, total: int) -> bool:
        calls.append(done)
        path.write_text(content.replace("train 7", "train 8") if len(calls) <= 2 else content)
        return True

    tokenizer = tokenizer_of(tiny, spec)
    assert not data.prepare_once(spec, tokenizer, change, print, tmp_path / "one", 0.0)
    assert path.read_text() == content and not prepared.entries()


def test_one_entry_that_is_too_large_removes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prepared.LIMIT, "0.002")
    for name, size in (("small", 10**6), ("large", 3 * 10**6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(bytes(size))
        assert prepared.keep(name, tmp_path / name, name, []) is (name == "small")
    assert [name for _, name, *_ in prepared.entries()] == ["small"]


def test_what_is_left_of_killed_processes_and_damaged_entries_goes(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/data").write_bytes(b"x")
    assert prepared.keep("one", tmp_path / "files", "data", ["line"])
    for about in ("", '{"sizes": {"data": 1}, "lines": null}', "[" * 10**5):
        (prepared_folder() / "one" / prepared.ABOUT).write_text(about)
        assert prepared.take("one", tmp_path / "taken") is None and not (tmp_path / "taken").exists()
        assert prepared.keep("one", tmp_path / "files", "data", ["line"]), "a damaged entry is replaced"
    (prepared_folder() / f"{prepared.NEW}left").mkdir()
    (prepared_folder() / "one" / prepared.ABOUT).write_text("")
    prepared.clear()
    assert [path.name for path in prepared_folder().iterdir()] == []


def test_many_files_are_hashed_in_linear_time(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(1000):
        (tmp_path / f"many/{number}.jsonl").write_text(json.dumps(ROWS[0]))
    spec, tokenizer = (
        spec_of(tmp_path, **{"data.files": (str(tmp_path / "many"),)}),
        AutoTokenizer.from_pretrained(tiny),
    )
    began = time.monotonic()
    assert prepared.key_of(spec, tokenizer) == prepared.key_of(spec, tokenizer)
    assert time.monotonic() - began < 10, "it was 30 seconds when each file wrote the hashes of all"


def test_pairs_and_labels_in_one_kto_run(tiny: Path, tmp_path: Path) -> None:
    """Each part has the layout of its own files."""
    pairs = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(6)]
    labels = [{"prompt": f"{n}?", "completion": "Yes.", "label": n % 2 == 0} for n in range(6)]
    for name, rows in (("pairs", pairs), ("labels", labels)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for train, validation, counts in (("pairs", "labels", (12, 6)), ("labels", "pairs", (6, 12))):
        spec = spec_of(
            tmp_path, **{"data.files": (str(tmp_path / f"{train}.jsonl"),), "data.validation": "files",
            "data.validation_files": (str(tmp_path / f"{validation}.jsonl"),), "train.stage": "kto",
            "eval.strategy": "epoch"},
        )  # fmt: skip
        made = data.prepare(spec, tokenizer_of(tiny, spec), lambda done, of: True, print)
        assert made.validation
        assert (len(made.train), len(made.validation)) == counts
