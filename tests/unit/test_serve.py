"""Serving a GGUF file: what is refused, how the server is started and ends, and who can read the API token.

xllamacpp is replaced by fake_xllamacpp.py; test_gguf_runtime.py serves with llama.cpp itself.
"""

import json
import os
import re
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from failed_runs import ended, planted_run
from small import client
from waiting import wait_for

from backend import environments
from backend.__main__ import main
from backend.cli import serve as commands
from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.models import gguf, serve
from backend.models.serve import Settings
from backend.runs import LOCK, LOG, RESULT, SERVE_TOKEN, STATE, TOKEN, jobs, processes
from backend.runs.folder import ALIVE, Run, RunError
from webui.api.servers import ServeRequest

OWN = "my-own-token-0123456789"
CHANGES = {"data.chat_template_kwargs": '{"enable_thinking": false}'}


@pytest.fixture(scope="module")
def environment(empty_cache):
    """The environment gguf, with the package that stands in for xllamacpp."""
    folder = environments.environment_folder("gguf")
    (folder / "packages").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "fake_xllamacpp.py", folder / "packages/xllamacpp.py")
    (folder / environments.COMPLETE).touch()
    return folder


@pytest.fixture
def run(tmp_path):
    """A run with a model and no GGUF file."""
    made = planted_run(tmp_path / "runs", edit(RunSpec(), CHANGES), probe(Path.cwd()), "Train info")
    for name, text in {"config.json": "{}", "tokenizer_config.json": '{"chat_template": "x"}'}.items():
        (made.path / "model").mkdir(exist_ok=True)
        (made.path / "model" / name).write_text(text)
    (made.path / "model/model.safetensors").touch()
    ended(made, end="done", exit_code=0)
    (made.path / RESULT).write_text(json.dumps({"steps": 3, "model": "model"}))
    yield made
    for job in jobs.find_all(made, jobs.SERVE):
        if job.state in ALIVE:
            end(job)


def export(run, format="q8_0", content="weights"):
    """An export that has finished."""
    request = {"step": None, "format": format}
    job = jobs.create(run, jobs.GGUF, request, {}, {})
    (job.path / "gguf").mkdir()
    file = job.path / f"gguf/{run.id}-{format}.gguf"
    file.write_text(content)
    (job.path / LOCK).touch()
    (job.path / RESULT).write_text(json.dumps({"model": f"gguf/{file.name}"}))
    (job.path / STATE).write_text(json.dumps({"end": "done", "exit_code": 0}))
    return file


def started(run, token="", **settings):
    """The job, and what is shown once it answers or has failed."""
    job = serve.start(run, Settings(**settings), token)
    wait_for(lambda: serve.as_json(job)["address"] or job.state not in ALIVE)
    return job, serve.as_json(job)


def end(job):
    job.stop(save=False)
    wait_for(lambda: job.state not in ALIVE)
    assert not processes.run_processes(job.path)


def status_of(url, token=""):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def test_what_is_refused(run, environment, monkeypatch, tmp_path):
    with pytest.raises(RunError, match=rf"no GGUF file .* `footplate export-model {run.id}`, or Export as GGUF"):
        serve.start(run, Settings())
    file = export(run)
    with pytest.raises(RunError, match=r"in f16\. Export one first: `footplate export-model \S+ --format f16`"):
        serve.start(run, Settings(format="f16"))
    with pytest.raises(RunError, match=rf"other.gguf is not a GGUF file of this run. Its files are: {file}"):
        serve.start(run, Settings(file="other.gguf"))
    for settings, text in {
        "port": ({"port": 80}, "port must be from 1024 to 65535, or 0 for a free one; it is 80"),
        "context": ({"context": -1}, "context must be from 0 to 1,048,576; it is -1"),
        "parallel": ({"parallel": 65}, "parallel must be from 0 to 64; it is 65"),
        "engine": ({"engine": "sglang"}, r"The engine sglang is not supported\. Choose llama\.cpp or vllm"),
        "threads": ({"threads": 5000}, r"threads must be from 1 to \d+; it is 5,000"),
    }.values():
        with pytest.raises(RunError, match=text):
            serve.start(run, Settings(**settings))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"Port {port} of 127.0.0.1 cannot be used: Address already in use"):
            serve.start(run, Settings(port=port))
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path))
    with pytest.raises(RunError, match=r"Run `footplate env create gguf`, .* then serve the model again"):
        serve.start(run, Settings())
    file.unlink()
    export_first = (
        rf"gguf`, .* then export the model with `footplate export-model {run.id}`, and serve it\. Or serve .*vllm"
    )
    with pytest.raises(RunError, match=export_first):
        serve.start(run, Settings())
    assert not jobs.find_all(run, jobs.SERVE)


def test_the_newest_file_unless_another_one_is_named(run):
    first, second, outdated = export(run, "f16"), export(run), export(run, "bf16")
    os.utime(outdated.parent.parent / jobs.request_file(jobs.GGUF), (1, 1))  # before the model was trained
    for settings, expected in {
        "": (Settings(), second), "format": (Settings(format="f16"), first), "name": (Settings(first.name), first),
        "path": (Settings(os.path.relpath(first)), first),
    }.values():  # fmt: skip
        assert serve.find_file(run, settings)[1] == expected
    with pytest.raises(RunError, match="no GGUF file of its model in bf16"):
        serve.find_file(run, Settings(format="bf16"))
    other = export(run)  # of a checkpoint: it has the same name
    (other.parent.parent / jobs.request_file(jobs.GGUF)).write_text(json.dumps({"step": 2, "format": "q8_0"}))
    page = ServeRequest(engine="llama.cpp", file=gguf.as_json(Run(second.parent.parent))["gguf"]["file"])
    assert serve.find_file(run, Settings(**page.model_dump()))[1] == second != other
    assert serve.find_file(run, Settings(format="q8_0"))[1] == other


def test_the_users_own_token(tmp_path, monkeypatch):
    file = tmp_path / "token"
    assert serve.own_token() == ""
    monkeypatch.setenv(SERVE_TOKEN, OWN)
    assert serve.own_token() == OWN
    file.write_text("of-the-file-0123456789\n")
    file.chmod(0o640)
    with pytest.raises(RunError, match=f"Other users can read or change {file}: run `chmod 600 {file}`"):
        serve.own_token(str(file))
    file.chmod(0o600)
    assert serve.own_token(str(file)) == "of-the-file-0123456789"
    for text in ("short", "with spaces in it 0123456789", "ünicode-0123456789"):
        file.write_text(text)
        with pytest.raises(RunError, match=f"The API token in {file} cannot be used: it must have 16 to 512 letters"):
            serve.own_token(str(file))
    with pytest.raises(RunError, match="nothing cannot be read"):
        serve.own_token(str(tmp_path / "nothing"))
    with pytest.raises(RunError, match="is not a regular file"):
        serve.own_token("/dev/null")


def test_arguments_requests_and_the_token(run, environment, monkeypatch):
    monkeypatch.setenv(SERVE_TOKEN, OWN)
    file = export(run)
    job, shown = started(run, serve.own_token(), parallel=2, context=1000)
    arguments = json.loads((file.parent / "arguments.json").read_text())
    assert arguments == {
        "model": {"path": file.name}, "model_alias": ["Train info"], "api_keys": [OWN], "hostnames": ["127.0.0.1"],
        "port": 0, "ui": False, "endpoint_slots": False, "endpoint_metrics": False, "endpoint_props": False,
        "cors_origins": "", "cors_credentials": False, "verbosity": 1, "offline": True, "warmup": False, "n_ctx": 2000,
        "n_parallel": 2, "cache_ram_mib": 0, "default_template_kwargs": {"enable_thinking": "false"},
        "n_gpu_layers": 0, "cpuparams": {"n_threads": 1}, "cpuparams_batch": {"n_threads": 1},
    }  # fmt: skip
    assert job.state == "running" and shown["context"] == 1000 and shown["name"] == "Train info"
    assert shown["without_tools"] == shown["note"] == ""
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1", shown["address"])
    url = f"{shown['address']}/models?secret-question"
    assert [status_of(url, token) for token in ("", OWN + "x", OWN)] == [401, 401, 200]
    assert shown["address"] in (job.path / LOG).read_text() and "secret-question" not in (job.path / LOG).read_text()
    assert shown["token_file"] == str(job.path / TOKEN) and serve.token_of(job) == OWN
    for path, mode in ((job.path, 0o700), (job.path / TOKEN, 0o600)):
        assert path.stat().st_mode & 0o777 == mode
    found = [path for path in job.path.rglob("*") if path.is_file() and OWN in path.read_text()]
    assert [path.name for path in found] == [TOKEN]
    served = processes.run_processes(job.path)
    assert len(served) == 2
    for process in served:
        for name in ("cmdline", "environ"):
            assert OWN.encode() not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    assert "As JSON" in shown["curl"] and "As JSON" in shown["python"], "the system prompt of training"
    compile(shown["python"], "python", "exec")
    with pytest.raises(RunError, match=f"is being served already. Stop it first: `footplate stop {job.path}`"):
        serve.start(run, Settings())
    end(job)
    assert job.state == "done" and job.result()["text"] == "The server was stopped."
    assert not (job.path / TOKEN).exists() and serve.as_json(job)["address"] is None
    with pytest.raises(RunError, match="The server has ended, and its API token was removed"):
        serve.token_of(job)


@pytest.mark.parametrize("how", ["crash", "broken file"])
def test_a_server_that_fails_says_why(run, environment, how):
    export(run, content="broken" if how == "broken file" else "weights")
    job, shown = started(run, OWN)
    if how == "crash":
        with pytest.raises(OSError):
            status_of(f"{shown['address'].removesuffix('/v1')}/crash", OWN)
        wait_for(lambda: job.state not in ALIVE)
    expected = {
        "crash": "llama.cpp's server was killed by SIGABRT. Its last message: GGML_ASSERT(false) failed",
        "broken file": "llama.cpp cannot serve the GGUF file: load: error loading model: tensor x",
    }
    assert job.state == "failed" and job.failure()["sentence"] == expected[how]
    assert not processes.run_processes(job.path) and not (job.path / TOKEN).exists()


def test_no_process_is_left_without_the_supervisor_or_the_run(run, environment):
    export(run)
    job, _ = started(run)
    served = processes.run_processes(job.path)
    os.kill(json.loads((job.path / STATE).read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: not any(processes.started(process.pid) == process.started for process in served))
    job, shown = started(run)
    run.delete()
    assert not run.path.exists() and not processes.run_processes(job.path)
    with pytest.raises(OSError):
        status_of(f"{shown['address']}/models")


@pytest.fixture
def handlers():
    """The command sets handlers of signals, but not of those that are ignored: nohup ignores SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command(run, environment, capsys, handlers, monkeypatch):
    export(run)
    command = ["serve", "--runs", str(run.path.parent), run.id]
    assert main([*command, "--format", "f16"]) == 2
    assert "has no GGUF file of its model in f16" in capsys.readouterr().err
    start, tokens = serve.start, []

    def interrupted(*given):
        start(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(serve, "start", interrupted)
        assert main(command) == 130 and not processes.run_processes(serve.current(run).path)

    def then_interrupted(job, is_enough=lambda: False):
        """Ctrl-C as soon as the server answers, before anything is printed."""
        follow(job, is_enough)
        if job.state in ALIVE:
            patch.setattr(serve, "as_json", interrupt_once)

    def interrupt_once(_):
        patch.setattr(serve, "as_json", as_json)
        raise KeyboardInterrupt

    follow, as_json = commands.follow, serve.as_json
    with monkeypatch.context() as patch:
        patch.setattr(commands, "follow", then_interrupted)
        assert main(command) == 0 and not processes.run_processes(serve.current(run).path)

    def end_terminal():
        """SIGHUP does the same as Ctrl-C."""
        wait_for(lambda: (job := serve.current(run)) and serve.as_json(job)["address"])
        job = serve.current(run)
        tokens.append(serve.token_of(job))
        os.kill(os.getpid(), signal.SIGHUP)

    thread = threading.Timer(0, end_terminal)
    thread.start()
    assert main(command) == 0
    thread.join()
    job, output = serve.current(run), capsys.readouterr()
    assert "The server was stopped." in output.err and len(tokens[0]) >= 40 and tokens[0] not in output.out + output.err
    assert job.state == "done" and not processes.run_processes(job.path)


def test_a_model_for_texts_in_the_background(run, environment, capsys, handlers):
    (run.path / "model/tokenizer_config.json").write_text("{}")
    export(run)
    assert main(["serve", "--runs", str(run.path.parent), run.id, "--background"]) == 0
    output, job = capsys.readouterr().out, serve.current(run)
    shown = serve.as_json(job)
    assert status_of(f"{shown['address']}/models", serve.token_of(job)) == 200
    assert f"at {shown['address']}. Model name in requests: Train info" in output and "Context: 4,096 tokens" in output
    assert f"Requests need the API token in {job.path / TOKEN}, a file that only you can read." in output
    assert "This is not a chat model: use /v1/completions" in output
    assert f"{shown['address']}/completions" in output and "client.completions.create(" in output
    assert output.endswith(f"To stop it: footplate stop {job.path}\n")
    assert main(["show", str(job.path)]) == main(["stop", str(job.path)]) == 0
    assert f"{job.id}\nRunning: serving at {shown['address']}.\n" in capsys.readouterr().out
    assert not processes.run_processes(job.path)


def test_endpoints(run, environment):
    export(run)
    with client(run.path.parent) as web:
        place = f"/api/runs/{run.id}/servers"
        assert web.get(f"/api/runs/{run.id}").json()["server"] is None
        for body, error in (
            ({"parallel": 65}, "from 0 to 64"),
            ({"format": "q9"}, "q9 is not"),
            ({"file": "\0"}, "file"),
        ):
            response = web.post(place, json=body)
            assert response.status_code in (400, 409) and error in response.text
        response = web.post(place, json={"context": 512})
        job = jobs.find(run, response.json()["id"])
        assert response.status_code == 201 and response.json()["address"] is None
        shown = wait_for(lambda: (s := web.get(f"/api/runs/{run.id}").json()["server"])["address"] and s)
        token = web.get(f"{place}/{job.id}/token").json()["token"]
        assert status_of(f"{shown['address']}/models", token) == 200 and token not in json.dumps(shown)
        assert web.delete(f"/api/runs/{run.id}/jobs/{job.id}").status_code == 409
        assert web.post(f"/api/runs/{run.id}/jobs/{job.id}/stop", json={}).status_code == 200
        wait_for(lambda: job.state not in ALIVE)
        assert web.get(f"{place}/{job.id}/token").status_code == 409
        other = jobs.find_all(run, jobs.GGUF)[0].id
        assert web.get(f"{place}/{other}/token").status_code == web.delete(f"{place}/{other}").status_code == 404
        assert web.delete(f"/api/runs/{run.id}/jobs/{job.id}").status_code == 200 and not job.path.exists()
