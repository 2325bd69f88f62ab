"""Requests to a Ray cluster: address, token, answers of its REST API, and what follows from its nodes."""

import ast
import errno
import json
import os
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from backend import runs
from backend.config import RunSpec
from backend.config.options import SpecError, edit, parse
from backend.launch.clusters import answers, ray_nodes
from backend.launch.clusters.ray import DRIVER
from backend.launch.plan import plan
from backend.machine import GIB, Machine
from backend.preflight import preflight
from backend.runs import RAY_JOB, RAY_STATUS, follower, ray
from backend.runs.follower import ClusterError

ON_RAY = {"launch.place": "ray", "parallel.strategy": "ddp", "launch.nproc_per_node": 8}
H100 = {"CPU": 96.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 700 * GIB, "object_store_memory": 300 * GIB}
HEAD = {"CPU": 8.0, "memory": 32 * GIB, "node:__internal_head__": 1.0}


class Dashboard:
    """A server that gives the same answer to every request and records it."""

    def __init__(self):
        self.code, self.body, self.requests, self.headers = 200, b"{}", [], {}
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                size = int(self.headers.get("Content-Length") or 0)
                dashboard.requests.append((self.command, self.path, self.headers, self.rfile.read(size)))
                self.send_response(dashboard.code)
                for name, value in {**dashboard.headers, "Content-Length": str(len(dashboard.body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(dashboard.body)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answers(self, body, code=200, **headers):
        self.code, self.body, self.headers = (
            code,
            body if isinstance(body, bytes) else json.dumps(body).encode(),
            headers,
        )


@pytest.fixture
def dashboard(monkeypatch, tmp_path):
    found = Dashboard()
    monkeypatch.setenv(ray.ADDRESS, found.address)
    monkeypatch.setenv(ray.TOKEN_PATH, str(tmp_path / "none"))
    monkeypatch.delenv(ray.TOKEN, raising=False)
    answers.forget()
    yield found
    answers.forget()
    found.server.shutdown()
    found.server.server_close()


def listed(*resources, state="ALIVE"):
    rows = [{"state": state, "resources_total": dict(row)} for row in resources]
    return {"result": True, "data": {"result": {"total": len(rows), "result": rows}}}


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({}, "http://127.0.0.1:8265"),
        ({"RAY_API_SERVER_ADDRESS": "https://ray.example/"}, "https://ray.example"),
        ({"RAY_ADDRESS": "http://head:8265"}, "http://head:8265"),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "http://127.0.0.1:8265"),
        ({"RAY_API_SERVER_ADDRESS": "http://a:1", "RAY_ADDRESS": "http://b:1"}, "http://a:1"),
    ],
)
def test_the_address_is_that_of_rays_own_commands(environment, address):
    assert ray.address(environment) == address


def test_the_token_comes_from_where_ray_looks_for_it(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("from-file\n")
    assert ray.token({"RAY_AUTH_TOKEN": "own", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}) == "own"
    assert ray.token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}) == "from-file"
    assert ray.token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}) == ""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("default")
    assert ray.token({}) == "default"


def test_the_token_is_sent_to_the_head_only(dashboard, monkeypatch):
    ray.request("/api/version")
    assert "Authorization" not in dashboard.requests[0][2]
    monkeypatch.setenv(ray.TOKEN, "secret")
    ray.request("/api/version")
    assert dashboard.requests[1][2]["Authorization"] == "Bearer secret"
    dashboard.answers(b"", 302, Location=f"{dashboard.address}/elsewhere")
    with pytest.raises(ClusterError, match="302"):
        ray.request("/api/version")
    assert [path for _, path, *_ in dashboard.requests] == ["/api/version"] * 3


@pytest.mark.parametrize(
    ("code", "body", "token", "message"),
    [
        (401, b"Unauthorized", "", r"requires a token: set RAY_AUTH_TOKEN"),
        (403, b"Forbidden", "wrong", r"does not accept the token"),
        (500, b"Traceback\nValueError: broken", "", r"responds with 500: ValueError: broken"),
        (200, b"<html>", "", r"does not respond"),
    ],
)
def test_problems_are_sentences(dashboard, monkeypatch, code, body, token, message):
    monkeypatch.setenv(ray.TOKEN, token)
    dashboard.answers(body, code)
    with pytest.raises(ClusterError, match=message):
        ray.request("/api/version")


def test_no_server(dashboard, monkeypatch):
    dashboard.server.shutdown()
    dashboard.server.server_close()
    with pytest.raises(ClusterError, match=r"Ray does not respond at http://127.0.0.1:\d+ \(.*Connection refused"):
        ray.request("/api/version")
    monkeypatch.setenv(ray.ADDRESS, "http://no such host")
    with pytest.raises(ClusterError, match="does not respond"):
        ray.request("/api/version")


def test_the_machine_is_the_node_with_most_gpus(dashboard):
    dashboard.answers(listed(HEAD, H100, H100, {"CPU": 32.0, "GPU": 4.0, "accelerator_type:A100": 1.0}))
    machine, problem = ray_nodes.machine(edit(RunSpec(), ON_RAY), Machine(python="/opt/python"))
    assert not problem
    assert "limit=10000" in dashboard.requests[-1][1], "the default is 100, with nodes that have ended"
    assert (machine.device, machine.nodes, machine.cores, len(machine.gpus)) == ("cuda", 2, 96, 8)
    assert machine.gpus[0].name == "H100" and machine.ram_bytes == 1000 * GIB
    assert (machine.python, machine.name) == ("/opt/python", "Ray cluster")
    chosen = edit(RunSpec(), {**ON_RAY, "ray.resources": ("accelerator_type:A100=0.001",)})
    assert ray_nodes.machine(chosen, Machine())[0].gpus[0].name == "A100"
    assert len(dashboard.requests) == 1, "the answer is kept"


def test_the_machine_is_a_node_that_ray_may_choose(dashboard):
    """With enough GPUs for the processes, Ray may choose the node with the smallest ones."""
    small = {"CPU": 48.0, "GPU": 8.0, "accelerator_type:A100-40G": 1.0}
    dashboard.answers(listed(HEAD, H100, H100, small, {"CPU": 16.0, "GPU": 4.0, "accelerator_type:T4": 1.0}))
    found = {}
    for processes in (4, 8, 16):
        machine, _ = ray_nodes.machine(edit(RunSpec(), {**ON_RAY, "launch.nproc_per_node": processes}), Machine())
        found[processes] = machine.gpus[0].total_bytes // GIB, len(machine.gpus), machine.nodes
    assert found == {4: (16, 4, 4), 8: (40, 8, 3), 16: (80, 8, 2)}
    named = edit(RunSpec(), {**ON_RAY, "launch.nproc_per_node": 4, "launch.gpu_model": "H100"})
    assert ray_nodes.machine(named, Machine())[0].cores == 96


def test_a_node_has_as_much_of_each_resource_as_the_job_reserves(dashboard):
    dashboard.answers(listed(HEAD, H100))
    for lines, cores in ((("memory=1000000000",), 96), ((f"memory={500 * GIB}",), 96), (("memory=1", "fast=0"), 0)):
        machine, problem = ray_nodes.machine(edit(RunSpec(), {**ON_RAY, "ray.resources": lines}), Machine())
        assert (machine.cores if not problem else 0) == cores
    too_much = edit(RunSpec(), {**ON_RAY, "ray.resources": (f"memory={800 * GIB}",)})
    assert f"has no node with the resources memory={800 * GIB}" in ray_nodes.machine(too_much, Machine())[1]


def test_memory_is_no_custom_resource_of_an_actor(tmp_path, monkeypatch):
    """Ray refuses it there: The resources dictionary must not contain the key 'memory' or 'object_store_memory'."""
    asked = {}

    class Actor:
        def options(self, **options):
            asked.update(options)
            return self

        def remote(self):
            raise LookupError

    library = ModuleType("ray")
    library.remote = lambda kind: Actor()
    group, strategies = ModuleType("ray.util.placement_group"), ModuleType("ray.util.scheduling_strategies")
    group.placement_group = group.remove_placement_group = None
    strategies.PlacementGroupSchedulingStrategy = lambda *_, **__: None
    for module in (library, ModuleType("ray.util"), group, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    resources = {"CPU": 2, "GPU": 1, "memory": 1e9, "fast": 0.5}
    (tmp_path / RAY_JOB).write_text(json.dumps({"nodes": 1, "resources": resources}))
    driver = runpy.run_path(str(DRIVER))["Driver"]("job", [])
    with pytest.raises(LookupError):
        driver.attempt(None)
    del asked["scheduling_strategy"]
    assert asked == {"num_cpus": 2, "num_gpus": 1, "memory": 1e9, "resources": {"fast": 0.5}}


def test_a_full_disk_does_not_end_a_job_that_waits(tmp_path, monkeypatch):
    """The driver says once a second what the job waits for."""
    waits = iter([False, False, True])
    reserved = SimpleNamespace(wait=lambda seconds: next(waits))
    library, util = ModuleType("ray"), ModuleType("ray.util")
    group, strategies = ModuleType("ray.util.placement_group"), ModuleType("ray.util.scheduling_strategies")
    group.placement_group, group.remove_placement_group = lambda *_, **__: reserved, None
    library.nodes, strategies.PlacementGroupSchedulingStrategy = list, None
    for module in (library, util, group, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / RAY_JOB).write_text(json.dumps({"nodes": 1, "resources": {"CPU": 2}}))
    driver, replace = runpy.run_path(str(DRIVER))["Driver"]("job", []), Path.replace
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    results = iter([full, full, replace])

    def sometimes_full(path, target):
        if isinstance(result := next(results), OSError):
            raise result
        return result(path, target)

    monkeypatch.setattr(Path, "replace", sometimes_full)
    assert driver.reserve() is reserved
    assert next(results, None) is None and "Waiting for a node" in (tmp_path / RAY_STATUS).read_text()


def test_nodes_that_cannot_be_used(dashboard):
    dashboard.answers(listed(H100, state="DEAD"))
    assert "has no node" in ray_nodes.machine(edit(RunSpec(), ON_RAY), Machine())[1]
    answers.forget()
    dashboard.answers({"result": False})
    with pytest.raises(ClusterError, match=r"Ray 2\.9 or later"):
        ray_nodes.machine(edit(RunSpec(), ON_RAY), Machine())
    answers.forget()
    dashboard.answers(listed({"CPU": 8.0, "GPU": 2.0}))
    spec = edit(RunSpec(), {**ON_RAY, "launch.nproc_per_node": 2})
    assert ray_nodes.machine(spec, Machine())[0].gpus[0].name == answers.UNKNOWN_GPU
    named = edit(spec, {"launch.gpu_model": "T4"})
    assert ray_nodes.machine(named, Machine())[0].gpus[0].name == "T4"


def test_findings(dashboard, tmp_path):
    dashboard.answers(listed(H100))
    report = preflight(edit(RunSpec(), {**ON_RAY, "launch.nnodes": 2}), Machine(), tmp_path)
    found = {finding.code: finding for finding in report.findings}
    assert "the Ray cluster has only 1 usable node" in found["CLU003"].message
    assert found["CLU003"].fixes[0].patch == {"launch.nnodes": 1} and found["CLU003"].fixes[0].label == "Use 1 node"
    assert report.machine.name == "Ray cluster" and report.run.device == "cuda"
    dashboard.server.shutdown()
    dashboard.server.server_close()
    answers.forget()
    report = preflight(edit(RunSpec(), ON_RAY), Machine(), tmp_path)
    assert "Ray does not respond" in {finding.code: finding for finding in report.findings}["CLU001"].message


def test_what_the_job_reserves():
    machine = Machine(device="cuda", gpus=answers.gpus(8, "H100"), cores=96)
    spec = edit(RunSpec(), {**ON_RAY, "launch.nnodes": 3, "launch.nproc_per_node": 4, "ray.resources": ("fast=0.5",)})
    job = json.loads(plan(spec, machine).files[RAY_JOB])
    assert job["resources"] == {"GPU": 4, "CPU": 48, "fast": 0.5}
    assert job["nodes"] == 3 and job["max_restarts"] == 3
    assert "--nproc-per-node=4" in job["command"] and not [word for word in job["command"] if "nnodes" in word]
    assert "CUDA_VISIBLE_DEVICES" not in plan(spec, machine).env, "Ray sets it"


REFUSED = ["CPU=2", "GPU=1", "object_store_memory=1", "fast", "fast=", "fast=-1", "fast=many", "a b=1", "fast=0.00001"]


@pytest.mark.parametrize("line", REFUSED)
def test_resources_are_names_with_amounts(line):
    with pytest.raises(SpecError, match=r"ray\.resources"):
        parse({**ON_RAY, "ray.resources": (line,)})


@pytest.mark.parametrize(
    ("status", "driver", "expected"),
    [
        ("PENDING", None, ("", True, "Waiting for Ray to start the job.")),
        ("RUNNING", None, ("", True, "Waiting for Ray to start the job.")),
        ("RUNNING", {"job": "j", "waits": True, "text": "Waiting for 2 nodes."}, ("", True, "Waiting for 2 nodes.")),
        ("RUNNING", {"job": "earlier", "waits": False}, ("", True, "Waiting for Ray to start the job.")),
        ("RUNNING", {"job": "j", "waits": False, "text": ""}, ("", False, "")),
        ("SUCCEEDED", None, ("done", False, "")),
        ("STOPPED", None, ("stopped", False, "")),
        ("FAILED", {"job": "j"}, ("failed", False, "")),
    ],
)
def test_states_of_a_job(dashboard, tmp_path, status, driver, expected):
    if driver:
        (tmp_path / runs.RAY_STATUS).write_text(json.dumps(driver))
    dashboard.answers({"status": status, "message": "x"})
    job = ray.Ray(tmp_path).find("j", 0)
    assert (job.end, job.waits, job.text) == expected


def test_a_job_whose_driver_did_not_start_says_why(dashboard, tmp_path):
    dashboard.answers({"status": "FAILED", "message": "Job failed, last available logs:\npython: not found\n"})
    assert "python: not found" in ray.Ray(tmp_path).find("j", 0).cause
    dashboard.answers(b"Job j does not exist", 404)
    assert ray.Ray(tmp_path).find("j", 0) is None


def test_a_job_is_found_although_the_response_was_lost(dashboard, tmp_path):
    (tmp_path / RAY_JOB).write_text('{"ray_python": "python"}')
    dashboard.answers(b"Bad gateway", 502)
    with pytest.raises(ClusterError, match="502"):
        ray.Ray(tmp_path).submit(())
    sent = json.loads(dashboard.requests[0][3])
    assert dashboard.requests[1][1] == f"/api/jobs/{sent['submission_id']}"
    assert sent["entrypoint"].split()[:2] == ["python", str(tmp_path / runs.RAY_DRIVER)]


def test_only_names_of_folders_are_given_to_the_cluster(dashboard, tmp_path, monkeypatch):
    """Ray shows the job's variables to everybody who can see its dashboard."""
    (tmp_path / RAY_JOB).write_text('{"ray_python": "python"}')
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HF_HOME", "/shared/hf")
    ray.Ray(tmp_path).submit(("--from-scratch",))
    sent = json.loads(dashboard.requests[0][3])
    assert sent["runtime_env"]["env_vars"].items() >= {"HF_HOME": "/shared/hf"}.items()
    assert "secret" not in json.dumps(sent) and sent["entrypoint"].endswith("--from-scratch")


def test_the_driver_names_the_files_of_a_run():
    """It cannot import them: it runs with the cluster's Python."""
    names = {"LOG", "STOP", "STATUS", "NODES", "JOB"}
    for node in ast.parse(DRIVER.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            found = dict(zip((name.id for name in node.targets[0].elts), ast.literal_eval(node.value), strict=True))
        elif isinstance(node, ast.Assign) and node.targets[0].id == "SAYS":
            assert ast.literal_eval(node.value) == follower.SAYS
    assert found.keys() == names
    assert found == {
        "LOG": runs.LOG, "STOP": runs.STOP, "STATUS": runs.RAY_STATUS, "NODES": runs.RAY_NODES, "JOB": RAY_JOB,
    }  # fmt: skip
