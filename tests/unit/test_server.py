"""The app as a whole: the page, its static files, and the errors that prevent a start."""

import asyncio
import json
import posixpath
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

import gradio.routes
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError, create_model
from small import client

from webui import __main__ as entry
from webui import pages
from webui.api import requests
from webui.login import Login


def test_page_static_and_rules(tmp_path):
    with client(tmp_path) as http:
        assert "gradio" in http.get("/").text
        icon = http.get("/footplate/icon.svg")
        assert icon.status_code == 200 and icon.headers["cache-control"] == "no-cache"
        again = http.get("/footplate/icon.svg", headers={"if-none-match": icon.headers["etag"]})
        assert again.status_code == 304
        waiting, served = [pages.SCRIPT], set()
        while waiting:  # main.js, and what it imports
            name = waiting.pop()
            script = http.get(f"/footplate/{name}")
            assert script.status_code == 200 and "javascript" in script.headers["content-type"], name
            served.add(name)
            imported = re.findall(r'^(?:import|.*from) "(\..+\.js)";$', script.text, re.MULTILINE)
            paths = {posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) for path in imported}
            waiting = [*{*waiting, *paths} - served]
        assert "run/log_lines.js" in served
        for style in pages.STYLES:
            assert http.get(f"/footplate/{style}").status_code == 200, style
        for path in ("/footplate/../server.py", "/footplate/%2e%2e/server.py", "/footplate/..%2fserver.py"):
            assert http.get(path).status_code == 404
        assert http.get("/gradio_api/file=/etc/passwd").status_code == 404
        for path in ("/docs", "/openapi.json", "/redoc"):
            assert http.get(path).status_code == 404


def test_small_responses_are_sent_at_once():
    """Without TCP_NODELAY, the body of a response may wait 40 ms until the browser acknowledges the headers."""

    async def options_of_a_connection() -> list[int]:
        found: list[int] = []

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = entry._listen("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()
        return found

    assert asyncio.run(options_of_a_connection()) == [1]


def test_gradio_sends_no_cors_headers(tmp_path):
    with client(tmp_path, hosts=["box.lan"]) as http:
        response = http.get("/config", headers={"host": "box.lan", "origin": "http://evil.example"})
        assert response.status_code == 403 and "access-control-allow-origin" not in response.headers


def test_every_route_requires_the_login(tmp_path):
    login = Login("correct horse", tmp_path)
    with client(tmp_path, login=login) as http:
        pages = ("/", "/rules", "/help", "/help/guide", "/help/search?q=x", "/help/pictures/build.png")
        for path in (*pages, "/config", "/theme.css", "/footplate/icon.svg", "/api/runs", "/gradio_api/info"):
            assert http.get(path, follow_redirects=False).status_code == 401, path
        http.cookies.set(login.cookie, login.sessions.create())
        assert http.get("/api/runs").status_code == 200


def test_gradio_routes_that_the_page_does_not_load_are_closed(tmp_path):
    """Uploads without a quota, files, a proxy to other hosts, event queues and others. New routes of a later Gradio are
    closed too: only what is listed is served."""
    source = Path(gradio.routes.__file__).read_text()
    declared = re.findall(r'@(app|router)\.\w+\(\s*f?"([^"]+)"', source)
    paths = {("/gradio_api" if owner == "router" else "") + re.sub(r"\{.*?\}", "x", path) for owner, path in declared}
    closed = [path for path in paths if not path.startswith(("/assets/", "/static/"))]
    assert len(closed) > 50 and {"/gradio_api/upload", "/gradio_api/queue/join", "/monitoring"} <= set(closed)
    with client(tmp_path) as http:
        for path in closed:
            for method in ("GET", "POST"):
                if (method, path) not in {("GET", "/"), ("GET", "/config"), ("GET", "/theme.css")}:
                    assert http.request(method, path).status_code == 404, (method, path)
        upload = http.post("/gradio_api/upload", files={"files": ("x.txt", b"x" * 1000)})
        assert upload.status_code == 404
        for path in (
            "/gradio_api/queue/join",
            "/gradio_api/run/predict",
            "/gradio_api/call/x",
            "/monitoring",
            "/gradio_api/proxy=http://127.0.0.1:22",
            "/gradio_api/component_server",
            "/gradio_api/deep_link",
            "/gradio_api/custom_component/x/client/x/x",
            "/static/..%2fconfig",
        ):
            assert {http.request(method, path).status_code for method in ("GET", "POST")} == {404}, path
        for path in ("/", "/config", "/theme.css", "/static/js/iframeResizer.contentWindow.min.js"):
            assert http.get(path).status_code == 200, path


def startup_error(capsys, *argv, **environment):
    assert entry.main(list(argv), environment) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("Footplate did not start. ")
    return printed.err


def test_a_used_port_is_reported_with_an_alternative(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        error = startup_error(capsys, PORT=str(port), RUNS=str(tmp_path))
    assert f"Port {port}" in error and "such as 7860, with --port or PORT" in error and "another program" in error


def test_startup_errors(capsys, tmp_path):
    runs = str(tmp_path / "runs")
    assert "GRADIO_VIBE_MODE" in startup_error(capsys, GRADIO_VIBE_MODE="1", RUNS=runs)
    assert "FOOTPLATE_PASSWORD" in startup_error(capsys, HOST="0.0.0.0", RUNS=runs)
    assert "FOOTPLATE_PASSWORD" in startup_error(capsys, "--host", "192.0.2.1", RUNS=runs)
    assert "too short" in startup_error(capsys, HOST="0.0.0.0", FOOTPLATE_PASSWORD="short", RUNS=runs)
    assert "The port is 'http'" in startup_error(capsys, PORT="http", RUNS=runs)
    assert "The port is '70000'" in startup_error(capsys, "--port", "70000", RUNS=runs)
    password = tmp_path / "password"
    assert "cannot be read" in startup_error(capsys, FOOTPLATE_PASSWORD_FILE=str(password), RUNS=runs)
    password.write_text("correct horse\n")
    password.chmod(0o640)
    assert "chmod 600" in startup_error(capsys, FOOTPLATE_PASSWORD_FILE=str(password), RUNS=runs)
    password.chmod(0o600)
    both = {"FOOTPLATE_PASSWORD": "correct horse", "FOOTPLATE_PASSWORD_FILE": str(password)}
    assert "both set" in startup_error(capsys, RUNS=runs, **both)
    assert "contradict" in startup_error(capsys, "--no-login", FOOTPLATE_PASSWORD_FILE=str(password), RUNS=runs)
    assert "FOOTPLATE_PASSWORD" in startup_error(capsys, "--no-login", "--host", "0.0.0.0", RUNS=runs)
    password.write_text("")
    assert "too short" in startup_error(capsys, FOOTPLATE_PASSWORD_FILE=str(password), RUNS=runs)
    assert "regular file" in startup_error(capsys, FOOTPLATE_PASSWORD_FILE="/dev/zero", RUNS=runs)
    assert "needs --certfile" in startup_error(capsys, "--keyfile", "key.pem", RUNS=runs)
    assert "cannot be used" in startup_error(capsys, "--certfile", str(password), RUNS=runs)
    assert not Path(runs).exists()
    assert "cannot be used" in startup_error(
        capsys, "--host", "192.0.2.1", FOOTPLATE_PASSWORD="correct horse", RUNS=runs
    )
    (tmp_path / "file").write_text("")
    assert "RUNS" in startup_error(capsys, RUNS=str(tmp_path / "file"))
    assert "RUNS" in startup_error(capsys, RUNS=str(tmp_path / "file" / "below"))


def test_a_malformed_webhook_is_named_without_its_path(capsys, tmp_path, monkeypatch):
    for url in (
        "http://hooks.example.org/a secret",
        "secret",
        "http://hooks.example.org:secret/",
        "http://\u00e9/secret",
    ):
        monkeypatch.setenv("FOOTPLATE_WEBHOOK", url)
        error = startup_error(capsys, RUNS=str(tmp_path))
        assert "FOOTPLATE_WEBHOOK" in error and "secret" not in error


def test_password_leaves_the_environment_of_the_server(tmp_path):
    """Runs inherit the environment of the server."""
    file = tmp_path / "password"
    file.write_text("correct horse\n")
    file.chmod(0o600)
    for name, value in (("FOOTPLATE_PASSWORD", "correct horse"), ("FOOTPLATE_PASSWORD_FILE", str(file))):
        environment = {name: value}
        assert entry._parse_options([], environment).password == "correct horse"
        assert environment == {}


def test_gradio_settings_of_the_environment_are_ignored():
    environment = {"GRADIO_SHARE": "1", "GRADIO_ALLOWED_PATHS": "/", "GRADIO_ROOT_PATH": "/x", "HOME": "/root"}
    entry._remove_gradio_settings(environment)
    assert environment == {"HOME": "/root", "GRADIO_ANALYTICS_ENABLED": "False"}


@pytest.mark.parametrize(
    ("kind", "limits", "value", "problem"),
    [
        (int, {}, None, "must be an integer"),
        (int, {}, 1.5, "must be an integer"),
        (float, {}, "a", "must be a number"),
        (float, {"gt": 0, "le": 60}, 0, "must be greater than 0"),
        (list[str], {"min_length": 1}, [], "must not be empty"),
        (list[str], {}, 1, "must be a list"),
        (Literal["a", "b"], {}, "c", "must be 'a' or 'b'"),
        (str, {"pattern": "^x$"}, "y", "has characters that are not allowed"),
    ],
)
def test_invalid_values_are_told_in_one_sentence(kind, limits, value, problem):
    model = create_model("Body", __base__=requests.RequestBody, field=Annotated[kind, Field(**limits)])
    with pytest.raises(ValidationError) as caught:
        model(field=value)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    response = requests.error_response(RequestValidationError(errors))
    assert json.loads(response.body) == {"error": f"field {problem}.", "field": "field"}
