"""The web server as a process: it responds, imports no training libraries, keeps drafts, and ends on signals."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent.parent
HEAVY_MODULES = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets", "matplotlib"}
# With the modules of the command `footplate`.
PRINT_MODULES = """
import sys
import backend.__main__
from webui.__main__ import main
code = main()
print(*sys.modules)
sys.exit(code)
"""


@contextmanager
def printing_server(runs, *command, **environment):
    """Start a server and yield its process and the URL that it prints; it is killed afterwards."""
    argv = [sys.executable, *(command or ("-m", "webui")), "--port", "0", "--runs", str(runs)]
    process = subprocess.Popen(
        argv, cwd=HOME, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}
    )
    try:
        first_line = process.stdout.readline()
        if not re.match(r"Footplate is at https?://127.0.0.1:", first_line):
            process.kill()
            raise AssertionError(first_line + process.stderr.read())
        yield process, first_line.split()[-1]
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_server(runs, *command, **environment):
    """A server without a login: yields its process and port."""
    with printing_server(runs, *(command or ("-m", "webui")), "--no-login", **environment) as (process, url):
        yield process, int(url.rpartition(":")[2])


def request(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {} if body is None else {"content-type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    result = response.status, response.read()
    connection.close()
    return result


def children(pid):
    pids = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            pids.append(int(status.parent.name))
    return pids


def test_it_responds_keeps_drafts_and_ends_on_signals(tmp_path):
    """Two servers, one after the other: the first ends on Ctrl-C, the second on SIGTERM."""
    runs, values = tmp_path / "runs", {"train.learning_rate": "oops"}
    with running_server(runs, "-c", PRINT_MODULES) as (process, port):
        assert b"gradio" in request(port, "GET", "/")[1]
        status, body = request(port, "POST", "/api/check", {"values": values, "draft": "abc", "seq": 1})
        assert status == 200 and json.loads(body)["status"]["level"] == "invalid"
        assert request(port, "POST", "/api/check", {"values": {}})[0] == 200
        assert request(port, "GET", "/api/runs")[0] == 200
        assert request(port, "GET", "/rules")[0] == 200
        assert children(process.pid) == []
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and err == ""
    loaded = {name.partition(".")[0] for name in out.split()}
    assert "gradio" in loaded and not loaded & HEAVY_MODULES
    with running_server(runs) as (process, port):
        assert json.loads(request(port, "GET", "/api/drafts/abc")[1])["values"] == values
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
        assert process.stderr.read() == ""
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", port)) != 0
