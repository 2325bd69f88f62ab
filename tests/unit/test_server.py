"""The app as a whole: the page, its static files, and the errors that prevent a start."""

import re
import socket
from pathlib import Path

from small import client

from webui import __main__ as entry
from webui import pages
from webui.auth import Login


def test_page_static_and_rules(tmp_path):
    with client(tmp_path) as http:
        assert "gradio" in http.get("/").text
        icon = http.get("/footplate/icon.svg")
        assert icon.status_code == 200 and icon.headers["cache-control"] == "no-cache"
        again = http.get("/footplate/icon.svg", headers={"if-none-match": icon.headers["etag"]})
        assert again.status_code == 304
        script = http.get(f"/footplate/{pages.SCRIPT}")
        assert "javascript" in script.headers["content-type"]
        for name in re.findall(r'from "\./(\w+\.js)"', script.text):
            assert http.get(f"/footplate/{name}").status_code == 200, name
        for path in ("/footplate/../server.py", "/footplate/%2e%2e/server.py", "/footplate/..%2fserver.py"):
            assert http.get(path).status_code == 404
        assert http.get("/gradio_api/file=/etc/passwd").status_code in (403, 404)
        for path in ("/docs", "/openapi.json", "/redoc"):
            assert http.get(path).status_code == 404


def test_gradio_sends_no_cors_headers(tmp_path):
    with client(tmp_path, hosts=["box.lan"]) as http:
        response = http.get("/config", headers={"host": "box.lan", "origin": "http://evil.example"})
        assert response.status_code == 403 and "access-control-allow-origin" not in response.headers


def test_every_route_requires_the_login(tmp_path):
    login = Login("correct horse", b"k" * 32)
    with client(tmp_path, login=login) as http:
        for path in ("/", "/config", "/theme.css", "/footplate/icon.svg", "/rules", "/api/runs", "/gradio_api/info"):
            assert http.get(path, follow_redirects=False).status_code == 401, path
        http.cookies.set(login.cookie, login.create_session())
        assert http.get("/api/runs").json()["runs"] == []


def startup_error(capsys, *argv, **environment):
    assert entry.main(list(argv), environment) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("Footplate did not start. ")
    return printed.err


def test_a_used_port_is_reported_with_an_alternative(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as used:
        error = startup_error(capsys, PORT=str(used.getsockname()[1]), RUNS=str(tmp_path))
    assert "such as 7860, with --port or PORT" in error and "another program" in error


def test_startup_errors(capsys, tmp_path):
    runs = str(tmp_path / "runs")
    assert "GRADIO_VIBE_MODE" in startup_error(capsys, GRADIO_VIBE_MODE="1", RUNS=runs)
    assert "FOOTPLATE_PASSWORD" in startup_error(capsys, HOST="0.0.0.0", RUNS=runs)
    assert "FOOTPLATE_PASSWORD" in startup_error(capsys, "--host", "192.0.2.1", RUNS=runs)
    assert "too short" in startup_error(capsys, HOST="0.0.0.0", FOOTPLATE_PASSWORD="short", RUNS=runs)
    assert "The port is 'http'" in startup_error(capsys, PORT="http", RUNS=runs)
    assert "The port is '70000'" in startup_error(capsys, "--port", "70000", RUNS=runs)
    assert not Path(runs).exists()
    assert "cannot be used" in startup_error(
        capsys, "--host", "192.0.2.1", FOOTPLATE_PASSWORD="correct horse", RUNS=runs
    )
    (tmp_path / "file").write_text("")
    assert "RUNS" in startup_error(capsys, RUNS=str(tmp_path / "file"))
    assert "RUNS" in startup_error(capsys, RUNS=str(tmp_path / "file" / "below"))


def test_gradio_settings_of_the_environment_are_ignored():
    environment = {"GRADIO_SHARE": "1", "GRADIO_ALLOWED_PATHS": "/", "GRADIO_ROOT_PATH": "/x", "HOME": "/root"}
    entry._remove_gradio_settings(environment)
    assert environment == {"HOME": "/root", "GRADIO_ANALYTICS_ENABLED": "False"}
