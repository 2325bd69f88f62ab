"""The Hugging Face token: the answers of the Hub, the files it is stored in, and where it is not."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from failed_runs import failed_run
from fake_hub import BAD, GOOD, fake_hub
from small import client

from backend.config import RunSpec
from backend.inspect import check_token, download_config, is_refused, store_token, token_state
from backend.rules.examples import LAPTOP
from webui.login import Login


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty HF_HOME, without a token in the environment."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf"


@pytest.fixture
def hub(home, monkeypatch):
    with fake_hub() as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield address


@pytest.mark.parametrize(
    ("token", "model", "outcome", "text"),
    [
        pytest.param(GOOD, "", "ok", "This token is valid: it belongs to the account ada.", marks=pytest.mark.soak),
        (GOOD, "ada/open", "ok", "which has access to ada/open"),
        (BAD, "ada/open", "bad_token", "mistyped, has expired or was revoked"),
        (
            GOOD,
            "big/gated",
            "no_access",
            "ada has no access to big/gated. Request access on the model's page, {hub}/big",
        ),
        pytest.param(
            GOOD, "big/fine-grained", "no_access", "allowed to read public gated repositories", marks=pytest.mark.soak
        ),
        (GOOD, "big/missing", "not_found", "the Hub has no model big/missing"),
        pytest.param(GOOD, "big/broken", "status", "answered with status 503", marks=pytest.mark.soak),
        (GOOD, "a/b/c", "invalid_id", "must be organization/name or name"),
        ("", "ada/open", "no_token", "There is no token"),
        ("hf_a b", "", "malformed", "without spaces"),
    ],
)
def test_the_hub_answers(hub, token, model, outcome, text):
    answer = check_token(token, model)
    assert answer.outcome == outcome and text.format(hub=hub) in answer.message, answer
    assert GOOD not in answer.message and BAD not in answer.message


def test_no_network_is_not_a_bad_token(home, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    answer = check_token(GOOD, "")
    assert answer.outcome == "no_network" and "http://127.0.0.1:9 cannot be reached" in answer.message
    assert not store_token(GOOD, "").stored and token_state()["source"] == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check_token(GOOD, "").outcome == "offline"


def test_it_is_stored_as_hf_auth_login_does(hub, home):
    assert not store_token(BAD, "").stored and not store_token("", "").stored and not home.exists()
    answer = store_token(f" {GOOD}\n", "big/gated")  # as it may be pasted; the account can request access later
    assert (answer.stored, answer.outcome, answer.account) == (True, "no_access", "ada")
    assert (home / "token").read_text() == GOOD and f"hf_token = {GOOD}" in (home / "stored_tokens").read_text()
    assert [stat.S_IMODE((home / name).stat().st_mode) for name in ("token", "stored_tokens")] == [0o600] * 2
    assert token_state() == {"source": "file", "variable": "", "path": str(home / "token"), "problem": ""}
    assert check_token("", "").message.startswith("The stored token is valid")


def test_the_environment_wins(hub, home, monkeypatch):
    assert store_token(GOOD, "").stored
    monkeypatch.setenv("HF_TOKEN", BAD)
    assert token_state()["source"] == "environment" and token_state()["variable"] == "HF_TOKEN"
    answer = check_token("", "ada/open")
    assert answer.outcome == "bad_token" and answer.message.startswith("The token in HF_TOKEN is not accepted")


@pytest.mark.parametrize(
    ("token", "model", "reason"),
    [
        ("", "big/gated", "the model is gated"),
        pytest.param("", "big/missing", "the Hub has no model with this ID", marks=pytest.mark.soak),
        (BAD, "ada/open", "the Hub does not accept the Hugging Face token"),
        pytest.param(GOOD, "big/fine-grained", "the Hugging Face token has no permission", marks=pytest.mark.soak),
    ],
)
def test_a_refused_download_says_that_a_token_may_help(hub, monkeypatch, token, model, reason):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    found = download_config(model, "main")
    assert found.startswith(reason) and is_refused(found)
    assert not is_refused("the Hub cannot be reached")


def test_it_is_in_no_run_draft_bundle_log_or_answer(hub, home, tmp_path, capfd):
    runs = tmp_path / "runs"
    run = failed_run(runs, RunSpec(), LAPTOP, "ValueError: refused")
    with client(runs) as http:
        values = {"model.source": "hub", "model.hub_id": "ada/open"}
        answers = [
            http.post("/api/hub-token", json={"token": BAD}),
            http.post("/api/hub-token", json={"token": GOOD * 50}),
            http.post("/api/hub-token", json={"token": [GOOD]}),
            http.post("/api/hub-token/test", json={"token": GOOD, "model": "big/gated"}),
            http.post("/api/hub-token", json={"token": GOOD, "model": "ada/open"}),
            http.get("/api/hub-token"),
            http.post("/api/check", json={"values": values, "draft": "a" * 24, "page": "p", "edit": 1}),
            http.get(f"/api/drafts/{'a' * 24}"),
            http.get(f"/api/runs/{run.id}/bundle.zip"),
        ]
    assert [answer.status_code for answer in answers] == [422, 400, 400, 200, 200, 200, 200, 200, 200]
    assert answers[0].json()["error"].startswith("Not stored: This token is not accepted")
    assert answers[4].json()["stored"] and answers[5].json()["source"] == "file"
    written = [path for path in runs.rglob("*") if path.is_file()]
    assert any(path.parent.name == ".drafts" for path in written)
    output = "".join(capfd.readouterr())
    for token in (GOOD, BAD):
        assert not any(token.encode() in path.read_bytes() for path in written)
        assert not any(token.encode() in answer.content for answer in answers) and token not in output


def test_it_needs_a_login_and_this_site(hub, home, tmp_path):
    with client(tmp_path / "runs", login=Login("secret", tmp_path)) as http:
        for path in ("/api/hub-token", "/api/hub-token/test"):
            assert http.post(path, json={"token": GOOD}).status_code == 401
        assert http.get("/api/hub-token").status_code == 401
        http.post("/login", data={"password": "secret"})
        other = {"origin": "http://evil.example"}
        assert http.post("/api/hub-token", json={"token": GOOD}, headers=other).status_code == 403
        as_form = {"content-type": "text/plain"}
        assert http.post("/api/hub-token", content=json.dumps({"token": GOOD}), headers=as_form).status_code == 415
        assert not Path(home / "token").exists()
        assert http.post("/api/hub-token", json={"token": GOOD}).status_code == 200
    assert Path(home / "token").exists()
