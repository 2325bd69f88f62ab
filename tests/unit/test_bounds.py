"""Small inputs that would keep the server busy for minutes, or end it: YAML, JSON, patterns, special files, logs."""

import glob
import itertools
import json
import os
import time
from pathlib import Path

import pytest
import yaml
from small import client

from backend.config.yaml_text import load_yaml
from backend.data import patterns
from backend.machine import Machine
from backend.runs import LOG
from backend.runs.failure import diagnose

LEVELS = "abcdefghi"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in itertools.pairwise(LEVELS)
)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with client(tmp_path_factory.mktemp("bounds") / "runs", detect_machine=lambda _: Machine()) as http:
        yield http


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "aliases"),
        (BOMB + "zero_optimization: {stage: 2, x: *i}\n", "aliases"),
        ("zero_optimization: &a {stage: 2, b: *a}\n", "aliases"),
        ("train: &a {seed: *a}\n", "aliases"),
        ("a: " + "[" * 20_000, "nested more than 32"),
        ("zero_optimization: " + "[" * 3000 + "]" * 3000, "nested more than 32"),
        ("train: {seed: " + "9" * 200_000 + "}", "digits"),
        ("train: {seed: " + "1:" * 50_000 + "1}", "digits"),
        ("train: {" + ", ".join(f"k{i}: 1" for i in range(15_000)) + "}", "500 keys"),
        ("data: {files: [" + "a," * 30_000 + "]}", "20,000 values"),
        ("x" * 300_000, "256 KiB"),
        ('{"a": ' + "[" * 100_000, "nested"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "nested more than 32"),
        ('{"zero_optimization": {"stage": ' + "9" * 200_000 + "}}", "digits"),
        ("{" + ", ".join(f'"k{i}": 1' for i in range(15_000)) + "}", "500 keys"),
        ('{"a": [' + "1," * 30_000 + "1]}", "20,000 values"),
    ],
)
def test_yaml_is_bounded(api, text, problem):
    start = time.process_time()  # other tests use the same cores
    response = api.post("/api/import", json={"yaml": text})
    assert response.status_code == 422 and problem in response.json()["error"]
    assert time.process_time() - start < 5


def test_usual_yaml_is_read():
    text = "launch: {hostfile: [" + ", ".join(f"worker-{i} slots=8" for i in range(5000)) + "]}\nn: " + "7" * 300
    assert load_yaml(text) == yaml.safe_load(text)


def test_deep_json_is_an_error_of_the_user(api):
    for text in ("[" * 5000, '{"a":' * 3000 + "1" + "}" * 3000):
        values = {"parallel.strategy": "zero2", "parallel.extra_config": text}
        assert api.post("/api/check", json={"values": values}).status_code in (200, 422)


@pytest.fixture
def tree(tmp_path):
    for name in ("a/1.jsonl", "a/b/2.jsonl", "a/b/.hidden/3.jsonl", "c.json", "a/.4.jsonl", "a/[x].jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    ["**", "*", "a/**", "**/*.jsonl", "a/*/*.jsonl", "a/b/../*.jsonl", "*/.*", "**/b/*", "no/*", "a/[[]*", "?.json"],
)
def test_patterns_match_as_glob(tree, pattern, monkeypatch):
    folder = f"{tree}/"
    expected = {Path(path) for path in glob.glob(folder + pattern, recursive=True)} - {
        tree,
        tree / "a" if pattern == "a/**" else tree,
    }
    assert {Path(path) for path in patterns.matches(folder + pattern)} == expected
    monkeypatch.chdir(tree)
    assert {tree / path for path in patterns.matches(pattern)} == expected


def test_patterns_read_a_bounded_number_of_entries(api, tree, monkeypatch):
    monkeypatch.setattr(patterns, "MAX_ENTRIES", 500)
    (tree / "loop").symlink_to(tree)
    assert len(patterns.matches(f"{tree}/**")) < 20
    for pattern in ("/usr/**", "/proc/**/*.x", "/*/*/*/*"):
        values = {"model.builtin": "tiny-llama", "data.source": "files", "data.files": pattern}
        response = api.post("/api/check", json={"values": values})
        assert response.status_code == 200 and "would search more than 500 files" in response.text


def test_special_files_are_not_read(api, tmp_path):
    fifo, large = tmp_path / "fifo.jsonl", tmp_path / "large.jinja"
    os.mkfifo(fifo)
    with large.open("wb") as file:
        file.truncate(2**40)
    data = {"model.builtin": "tiny-llama", "data.source": "files"}
    for path in (fifo, "/dev/zero", "/dev/stdin"):
        for values in (
            {**data, "data.files": str(path)},
            {"data.chat_template": "file", "data.chat_template_file": str(path)},
        ):
            assert "is not a regular file" in api.post("/api/check", json={"values": values}).text, values
    values = {"data.chat_template": "file", "data.chat_template_file": str(large)}
    assert "longer than 1024 KiB" in api.post("/api/check", json={"values": values}).text


def test_model_folder_of_code_without_consent_cannot_start(api, tmp_path):
    config = {"model_type": "weird", "auto_map": {"AutoConfig": "x.Y"}, "hidden_size": 64, "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    values = {"model.source": "path", "model.path": str(tmp_path)}
    assert api.post("/api/check", json={"values": values}).json()["status"]["level"] == "error"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text", ["connection ", "CUDA", "collective ", "gloo", "'a", "DistStoreError", "backend.", " "]
)
def test_long_log_lines_take_linear_time(tmp_path, text):
    (tmp_path / LOG).write_text("Traceback (most recent call last):\nX: " + text * (400_000 // len(text)))
    start = time.monotonic()
    assert len(diagnose(tmp_path, 0, {"exit_code": 1}).sentence) < 1000
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("key", ["model.path", "data.chat_template_file", "data.files", "launch.env"])
def test_a_null_character_is_an_error_of_its_option(tmp_path, key):
    """Before, it was an internal error: Python raises ValueError for such a path."""
    value = "A=a\0b" if key == "launch.env" else "a\0b"
    shown = {"model.source": "path", "data.source": "files", "data.chat_template": "file"}
    body = json.dumps({"values": {key: value, **shown}})
    with client(tmp_path) as http:
        response = http.post("/api/check", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200 and response.json()["status"]["level"] == "invalid"
    assert "must not contain" in response.text
