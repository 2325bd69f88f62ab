"""A real server as `make run` starts it: it answers, is light, keeps its runs and drafts, and ends when told."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

HOME = Path(__file__).resolve().parent.parent.parent
HEAVY = ("torch", "transformers", "matplotlib", "deepspeed", "datasets")
MODULES = "import sys; from webui.__main__ import main; code = main(); print(*sys.modules); sys.exit(code)"


@contextmanager
def served(runs, *start, **environment):
    """The process and its port, as soon as it says that it answers; afterwards it and its children are gone."""
    argv = [sys.executable, *(start or ("-m", "webui")), "--port", "0", "--runs", str(runs)]
    process = subprocess.Popen(
        argv, cwd=HOME, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
    )
    try:
        said = process.stdout.readline()
        if not said.startswith("Footplate is at http://127.0.0.1:"):
            process.kill()
            raise AssertionError(said + process.stderr.read())
        yield process, int(said.strip().rpartition(":")[2])
    finally:
        process.kill()
        process.communicate()


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {} if body is None else {"content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def children(pid):
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def test_serves_keeps_and_ends(tmp_path):
    runs = tmp_path / "runs"
    values = {"train.learning_rate": "oops"}
    with served(runs) as (process, port):
        assert b"gradio" in ask(port, "GET", "/")[1]
        status, body = ask(port, "POST", "/api/check", {"values": values, "draft": "abc", "seq": 1})
        assert status == 200 and json.loads(body)["status"]["level"] == "invalid"
        assert children(process.pid) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        assert process.stderr.read() == ""
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0
    with served(runs) as (_, port):
        assert json.loads(ask(port, "GET", "/api/drafts/abc")[1])["values"] == values


def test_loads_nothing_heavy_and_ends_by_ctrl_c(tmp_path):
    with served(tmp_path, "-c", MODULES) as (process, port):
        assert ask(port, "GET", "/")[0] == 200
        assert ask(port, "POST", "/api/check", {"values": {}})[0] == 200
        assert ask(port, "GET", "/api/runs")[0] == 200
        assert ask(port, "GET", "/rules")[0] == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0 and err == ""
    loaded = {name.partition(".")[0] for name in out.split()}
    assert "gradio" in loaded and not loaded & set(HEAVY)


def test_a_taken_port_is_refused_with_a_sentence(tmp_path):
    with served(tmp_path) as (_, port):
        second = subprocess.run(
            [sys.executable, "-m", "webui", "--port", str(port), "--runs", str(tmp_path)],
            cwd=HOME,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert second.returncode == 2 and second.stdout == ""
    assert f"Port {port}" in second.stderr and "such as 7860, with --port or PORT" in second.stderr
    assert "Traceback" not in second.stderr
