"""`footplate publish` with real jobs against a fake Hub: what arrives, and what happens when something goes wrong.
Uploads use LFS: the default transfer (Xet) and the real Hub are not covered."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_hub import BAD, GOOD
from fake_hub_uploads import FINE_GRAINED, READ_ONLY, Hub, Repository, fake_hub_uploads
from huggingface_hub import constants
from published_run import adapter_run, exported_job, merged_job
from waiting import wait_for

from backend.__main__ import main
from backend.publish import publication
from backend.publish.contents import Request, contents
from backend.publish.hub import PublishError
from backend.publish.hub import publish as publish_to_hub
from backend.runs import MODEL, jobs
from backend.runs.folder import ALIVE, Run, RunError

REQUEST = Request(repository="trains", base_model="org/base")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A fake Hub, and its token."""
    with fake_hub_uploads() as hub:
        variables = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address}
        for name, value in {**variables, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": GOOD}.items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = adapter_run(tmp_path / "runs", tmp_path / "secret-base")
    (run.path / MODEL / "adapter_model.safetensors").write_bytes(os.urandom(2**21))
    return run


def start(run: Run, request: Request) -> Run:
    summary = publication.summary(run, request)
    return publication.start(run, summary.request, summary.contents.versions())


def wait(job: Run) -> Run:
    wait_for(lambda: job.state not in (*ALIVE, "new"), 60, job.summary)
    return job


def read_all(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_a_model_is_published_twice(hub: Hub, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line; one upload is answered with 503, and the second publication has nothing to send."""
    hub.busy = 1
    command = ["publish", str(run.path), "--to", "trains", "--base-model", "org/base", "--yes"]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert "Creates the private repository ada/trains." in printed.err
    result = json.loads(printed.out)["result"]
    found = hub.repositories["ada/trains"]
    assert result["url"] == f"{hub.address}/ada/trains" and result["commit"] == found.commits[-1]
    assert found.private and hub.count("PUT") == 3 and result["files"] == len(found.files) == 5
    assert found.files["adapter_model.safetensors"] == (run.path / MODEL / "adapter_model.safetensors").read_bytes()
    assert b'model_id = "ada/trains"' in found.files["README.md"]
    for name, content in found.files.items():
        assert str(run.path).encode() not in content and b"secret" not in content, name
    assert main(command) == 0
    printed = capsys.readouterr()
    assert f"Updates the private repository ada/trains, whose last commit is {result['commit'][:8]}" in printed.err
    assert f"Nothing had changed since the last commit: {hub.address}/ada/trains/commit/" in printed.out
    assert hub.count("PUT") == 3 and len(found.commits) == 2 and len(publication.find_all(run)) == 1
    assert GOOD not in read_all(run.path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the HTTP library
def test_weights_are_not_added_to_an_adapter(hub: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would load the adapter. Neither the list of files nor a job that was started before adds them."""
    for name, value in {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    hub.repositories["ada/trains"] = Repository(True, {"adapter_config.json": b"{}"})
    request = Request(repository="ada/trains", merge=merged_job(run).id)
    with pytest.raises(RunError, match=r"ada/trains has adapter_config\.json"):
        publication.summary(run, request)
    with pytest.raises(RunError, match=r"ada/trains has adapter_config\.json"):
        publish_to_hub(contents(run, request), request.repository, request.public, lambda *_: None)
    assert list(hub.repositories["ada/trains"].files) == ["adapter_config.json"]


@pytest.mark.soak
def test_a_job_that_was_killed_is_finished_by_the_next_one(hub: Hub, run: Run) -> None:
    hub.stalls = True
    job = start(run, REQUEST)
    assert hub.stalled.wait(60) and job.progress()["text"].startswith("Uploading adapter_model.safetensors")
    with pytest.raises(RunError, match="is being published"):
        publication.start(run, REQUEST, {})
    launcher = json.loads((job.path / "state.json").read_text())["launcher"]
    assert GOOD.encode() not in Path(f"/proc/{launcher}/cmdline").read_bytes()
    os.kill(launcher, signal.SIGKILL)
    assert wait(job).state == "failed" and not hub.repositories["ada/trains"].files
    hub.stalls = False
    assert wait(start(run, REQUEST)).state == "done"
    assert len(hub.repositories["ada/trains"].files) == 5 and not job.path.exists()


@pytest.mark.soak
def test_a_changed_file_is_sent(hub: Hub, run: Run) -> None:
    for text in ("{}", '{"added": 1}'):
        (run.path / MODEL / "tokenizer_config.json").write_text(text)
        assert wait(start(run, REQUEST)).state == "done"
    found = hub.repositories["ada/trains"]
    assert found.files["tokenizer_config.json"] == b'{"added": 1}' and len(found.commits) == 3
    assert hub.count("PUT") == 2


@pytest.mark.soak
def test_stop_ends_an_upload(hub: Hub, run: Run) -> None:
    hub.stalls = True
    job = start(run, REQUEST)
    assert hub.stalled.wait(60)
    job.stop(save=False)
    assert wait(job).state == "stopped"


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no token": ({"HF_TOKEN": ""}, {}, "There is no Hugging Face token"),
    "wrong token": ({"HF_TOKEN": BAD}, {}, "does not accept the Hugging Face token"),
    "read only": ({"HF_TOKEN": READ_ONLY}, {}, "of the account ada can only read"),
    "not allowed": ({"HF_TOKEN": FINE_GRAINED}, {}, r"cannot write to ada/trains \(403: You don't have the rights"),
    "taken": (
        {},
        {"repository": "grace/trains"},
        "cannot write to grace/trains. Choose a name that begins with .*ada/",
    ),
    "offline": ({"HF_HUB_OFFLINE": True}, {}, "HF_HUB_OFFLINE is set"),
    "unreachable": ({"ENDPOINT": "http://127.0.0.1:9"}, {}, "The connection to http://127.0.0.1:9 failed"),
    "public": ({}, {"repository": "ada/public"}, "ada/public exists and is public"),
    "private": ({}, {"repository": "ada/private", "public": True}, "ada/private exists and is private"),
    "license": ({}, {"license": "unknown-license"}, "one of the known licenses"),
    "full": ({}, {}, "no storage left for ada/trains"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the HTTP library
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_plain_sentences(hub: Hub, run: Run, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """In this process, whose huggingface_hub gets the settings that it would read from the environment."""
    settings, changes, message = FAULTS[fault]
    hub.repositories |= {"ada/public": Repository(False), "ada/private": Repository(True)}
    hub.full = fault == "full"
    known = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True}
    known |= {"HF_TOKEN_PATH": "/none", "ENDPOINT": hub.address}
    for name, value in (known | settings).items():
        if name == "HF_TOKEN":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(constants, name, value)
    request = replace(REQUEST, **changes)
    with pytest.raises(PublishError, match=message) as error:
        publish_to_hub(contents(run, request), request.repository, request.public, lambda *_: None)
    assert not any(found.files for found in hub.repositories.values()) and "hf_" not in str(error.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the HTTP library
def test_gguf_files_are_added_to_their_repository(hub: Hub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One format after the other; a large file is sent once."""
    off = {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True}
    settings = {"ENDPOINT": hub.address, **off}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    for format in ("q8_0", "q4_k_m"):
        job = exported_job(run, jobs.GGUF, format)
        (job.path / f"gguf/{run.id}-{format}.gguf").write_bytes(os.urandom(2**21))
        request = replace(REQUEST, repository="ada/trains", exports=(job.id,))
        publish_to_hub(contents(run, request), request.repository, request.public, lambda *_: None)
    files = hub.repositories["ada/trains"].files
    assert len(files) == 7 and len(files[f"{run.id}-q8_0.gguf"]) == 2**21
    assert b"base_model_relation: finetune" in files["README.md"] and hub.count("PUT") == 2
    assert b"secret" not in b"".join(files.values())
