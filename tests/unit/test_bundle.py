"""The debug bundle: everything that explains a run, and nothing that is secret."""

import io
import json
import os
import stat
import time
import zipfile
from pathlib import Path

import pytest
from failed_runs import NOW, failed_run
from small import client

from backend.__main__ import main
from backend.config import RunSpec, variables
from backend.config.options import edit
from backend.rules.examples import LAPTOP
from backend.runs import LOG, METRICS, PLAN, RANK_LOGS, RESULT, STACKS, failure
from backend.runs.folder import Run
from backend.tasks import bundle

TINY = edit(RunSpec(), {"model.builtin": "tiny-llama"})
HUB, SERVICE, PASSWORD = "hf_" + "Aq9" * 8, "s3rv1ce-value", "pa55-w0rd"
ERROR = (
    f"ValueError: https://user:{PASSWORD}@example.org/?token={SERVICE} refused, A_SERVICE_KEY={SERVICE} Bearer {HUB}"
)


@pytest.fixture
def run(tmp_path):
    """A failed run with secrets in its log, environment, plan, traceback, stacks and rank logs."""
    run = failed_run(tmp_path / "runs", TINY, LAPTOP, ERROR)
    plan = json.loads((run.path / PLAN).read_text())
    (run.path / PLAN).write_text(json.dumps({**plan, "env": {"MY_SERVICE_TOKEN": 'qu"oted-value'}}))
    (run.path / METRICS).write_text('{"step": 1, "loss": 2.5}\n')
    (run.path / STACKS).mkdir()
    (run.path / STACKS / "0").write_text('qu"oted-value in load_dataset')
    ranks = run.path / RANK_LOGS / "x" / "attempt_0" / "0"
    ranks.mkdir(parents=True)
    (ranks / "stderr.log").write_text(f"password='{PASSWORD}', api_key={SERVICE}, eos_token='</s>'")
    (run.path / RESULT).write_text(json.dumps({"samples": ["a private example"], "steps": 3}))
    return run


def unpacked(content):
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        return {name.partition("/")[2]: packed.read(name).decode() for name in packed.namelist()}


def test_it_has_what_explains_the_run_and_no_secrets(run, monkeypatch):
    monkeypatch.setenv("FOOTPLATE_PASSWORD", "from-the-environment")
    (run.path / LOG).write_text((run.path / LOG).read_text() + "logged in with from-the-environment\n")
    files = unpacked(client(run.path.parent).get(f"/api/runs/{run.id}/bundle.zip").content)
    assert {"README.txt", "run.json", "spec.yaml", "resolved.json", "plan.json", "log.txt", "metrics.jsonl"} < set(
        files
    )
    assert "stacks/0" in files and "ranks/x/attempt_0/0/stderr.log" in files
    everything = "\n".join(files.values())
    for secret in (HUB, SERVICE, PASSWORD, "oted-value", "from-the-environment", "a private example"):
        assert secret not in everything, secret
    assert "eos_token='</s>'" in everything and f"//user:{variables.MASK}@example.org" in everything
    about = json.loads(files["run.json"])
    assert about["state"] == "failed" and "refused" in about["failure"]["sentence"]
    assert about["machine"]["versions"]["torch"] in files["README.txt"]


def test_it_follows_no_links_and_stays_small(run, tmp_path):
    (tmp_path / "private").write_text("outside of the run")
    (run.path / STACKS / "1").symlink_to(tmp_path / "private")
    os.mkfifo(run.path / STACKS / "2")
    (run.path / METRICS).write_text('{"step": 1, "loss": 2.5}\n' * 2**17)
    content = client(run.path.parent).get(f"/api/runs/{run.id}/bundle.zip").content
    files = unpacked(content)
    assert len(content) < 2**20 and len(files[METRICS]) < 3 * 2**20 and files[METRICS].startswith("[The beginning")
    assert "stacks/1" not in files and "stacks/2" not in files


def test_a_damaged_run_has_a_bundle(run):
    (run.path / PLAN).write_text("[1]")
    files = unpacked(bundle.build(Run(run.path), LAPTOP, NOW))
    assert json.loads(files["run.json"])["state"] and "log.txt" in files


def test_command_line(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", run.id, "--runs", str(run.path.parent)]) == 0
    path = Path(capsys.readouterr().out.partition(": ")[0])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and "log.txt" in unpacked(path.read_bytes())
    assert main(["bundle", run.id, "--runs", str(run.path.parent)]) == 2, "it overwrites no file"


@pytest.mark.parametrize(
    "text",
    [
        "max_new_tokens: 12 TOKEN_COUNT=1200 tokens: 17",
        "bos_token='<s>', pad_token=None, key='value', KeyError: 'prompt'",
        "NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0,1 http://127.0.0.1:7860/?tab=run",
        "a sk- prefix, hf_hub_download, ghp, AKIA, eyJ",
    ],
)
def test_ordinary_text_is_kept(text):
    assert variables.hide_tokens(text) == text


KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + f"{'kEy9' * 16}\n" * 60 + "-----END RSA PRIVATE KEY-----\n"


def test_long_texts_are_masked_in_parts(run):
    """Python serves no other request while it searches one text. Parts split neither a key nor an assignment, wherever
    they begin."""
    for position in range(bundle.PART - 4300, bundle.PART + 10, 997):
        text = "y\n" * (position // 2) + KEY + f"password=\n{PASSWORD}\n" + "x\n" * bundle.PART
        parts = list(bundle._parts(text))
        assert "".join(parts) == text and len(parts) > 1 and max(map(len, parts)) < 3 * bundle.PART
        masked = "".join(map(variables.hide_tokens, parts))
        assert "kEy9" not in masked and PASSWORD not in masked


def test_a_long_line_is_clipped_before_a_secret(run):
    (run.path / LOG).write_text("a" * 130_000 + "\n" + "b " * (bundle.MAX_LINE // 2 - 5) + HUB + " c" * 99 + "\nlast\n")
    log = unpacked(bundle.build(run, LAPTOP, NOW))["log.txt"].splitlines()
    assert log[0] == " [130000 characters of this line were left out.]"
    assert HUB[:6] not in log[1] and log[1].endswith("characters of this line were left out.]") and log[2] == "last"


# Of what the patterns look for.
FRAGMENTS = (
    "a", "A", "1", "_", "-", ".", ":", "=", "/", "@", " ", '"', "a:", "a://", "x://u:", "A_", "A=", "eyJ", "sk-",
    "-sk-", ".eyJaaaaaaaa", "xoxb-", "Bearer ", "?token=", "password", "-----BEGIN ", "https://", "$(", "\n", "a ",
    "MemoryError\n",
)  # fmt: skip


@pytest.mark.parametrize("search", [variables.hide_tokens, lambda text: failure._known(failure._clip_lines(text))])
def test_no_text_takes_quadratic_time(search):
    """A line of 128 KiB froze the server for 15 seconds, and 512 KiB of empty lines for minutes."""
    for fragment in FRAGMENTS:
        begin = time.process_time()
        search(fragment * (2**15 // len(fragment)) + "\0")
        assert time.process_time() - begin < 2, fragment
