"""The app as a whole: one page, own static files, and what is refused before anything is served."""

import inspect
import socket
from pathlib import Path

import gradio as gr
import pytest
from small import client

from webui import __main__ as entry
from webui.auth import Login


def test_page_static_and_rules(tmp_path):
    with client(tmp_path) as one:
        assert "gradio" in one.get("/").text
        icon = one.get("/footplate/icon.svg")
        assert icon.status_code == 200 and icon.headers["cache-control"] == "no-cache"
        again = one.get("/footplate/icon.svg", headers={"if-none-match": icon.headers["etag"]})
        assert again.status_code == 304
        script = one.get("/footplate/page.js")
        parts = [
            script.text.find(f"window.{name} = ") for name in ("FP", "FPPoll", "FPCharts", "FPLog", "FPRun", "FPRuns")
        ]
        assert parts == sorted(parts) and parts[0] > 0
        assert one.get("/footplate/page.js", headers={"if-none-match": script.headers["etag"]}).status_code == 304
        for path in ("/footplate/../server.py", "/footplate/%2e%2e/server.py", "/footplate/..%2fserver.py"):
            assert one.get(path).status_code == 404
        assert one.get("/gradio_api/file=/etc/passwd").status_code in (403, 404)
        for path in ("/docs", "/openapi.json", "/redoc"):
            assert one.get(path).status_code == 404


def test_gradio_does_not_open_the_page_to_other_origins(tmp_path):
    with client(tmp_path, hosts=["box.lan"]) as one:
        answer = one.get("/config", headers={"host": "box.lan", "origin": "http://evil.example"})
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_everything_is_behind_the_login(tmp_path):
    login = Login("correct horse", b"k" * 32)
    with client(tmp_path, login=login) as one:
        for path in ("/", "/config", "/theme.css", "/footplate/icon.svg", "/rules", "/api/runs", "/gradio_api/info"):
            assert one.get(path, follow_redirects=False).status_code == 401, path
        one.cookies.set(login.cookie, login.ticket())
        assert one.get("/api/runs").json()["runs"] == []


def refused(capsys, *argv, **environment):
    assert entry.main(list(argv), environment) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and said.err.startswith("Footplate is not started. ")
    return said.err


def test_a_taken_port_is_said_with_the_way_out(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused(capsys, PORT=str(taken.getsockname()[1]), RUNS=str(tmp_path))
    assert "PORT=7860 make run" in said and "another program" in said


def test_what_is_refused(capsys, tmp_path):
    runs = str(tmp_path / "runs")
    assert "GRADIO_VIBE_MODE" in refused(capsys, GRADIO_VIBE_MODE="1", RUNS=runs)
    assert "FOOTPLATE_PASSWORD" in refused(capsys, HOST="0.0.0.0", RUNS=runs)
    assert "FOOTPLATE_PASSWORD" in refused(capsys, "--host", "192.0.2.1", RUNS=runs)
    assert "too short" in refused(capsys, HOST="0.0.0.0", FOOTPLATE_PASSWORD="short", RUNS=runs)
    assert "PORT" in refused(capsys, PORT="http", RUNS=runs)
    assert "PORT" in refused(capsys, "--port", "70000", RUNS=runs)
    assert not Path(runs).exists()
    assert "cannot be used" in refused(capsys, "--host", "192.0.2.1", FOOTPLATE_PASSWORD="correct horse", RUNS=runs)
    (tmp_path / "file").write_text("")
    assert "RUNS" in refused(capsys, RUNS=str(tmp_path / "file"))
    assert "RUNS" in refused(capsys, RUNS=str(tmp_path / "file" / "below"))


def test_gradio_settings_of_the_environment_are_ignored():
    environment = {"GRADIO_SHARE": "1", "GRADIO_ALLOWED_PATHS": "/", "GRADIO_ROOT_PATH": "/x", "HOME": "/root"}
    entry._calm(environment)
    assert environment == {"HOME": "/root", "GRADIO_ANALYTICS_ENABLED": "False"}


def test_stubs_are_left_alone_only_inside():
    real = inspect.getfile
    with pytest.raises(OSError), entry.without_stubs():
        inspect.getfile(gr.Textbox)
    assert inspect.getfile is real
    with entry.without_stubs():
        assert inspect.getfile(Path) == real(Path)
