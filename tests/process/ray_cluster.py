"""Ray clusters for tests: a stand-in for the dashboard's REST API, and a real cluster of two simulated hosts."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from network_hosts import ADDRESSES, NetworkHost, two_hosts

RAY_VERSION = "2.60.0"
FAKE = Path(__file__).parent / "fake_ray"
GCS_PORT, DASHBOARD_PORT = 26379, 28265
CLONE_NEWNET = 0x40000000  # setns(2)


class RayCluster:
    """What the tests request of either cluster: `address` of the dashboard and `token`, `python` of the jobs."""

    address: str
    python: str
    token = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that Footplate reads."""
        return {"RAY_API_SERVER_ADDRESS": self.address, "RAY_AUTH_TOKEN": self.token}

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(self.address + path, data, headers), timeout=60) as response:
            return json.loads(response.read())

    def stop_job(self, job: str) -> None:
        """Stop a job as a person does who uses Ray's own command."""
        self.request(f"/api/jobs/{job}/stop", {})

    def unended(self) -> list[str]:
        """The ids of the jobs that have not ended."""
        jobs = self.request("/api/jobs/")
        return [
            job["submission_id"] for job in jobs if job["status"] in ("PENDING", "RUNNING") and job["submission_id"]
        ]

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Another job uses a node."""
        raise NotImplementedError

    def lose_node(self) -> None:
        """A node with processes of the run fails."""
        raise NotImplementedError

    def restore_node(self) -> None:
        """It comes back."""
        raise NotImplementedError


class FakeCluster(RayCluster):
    """REST as Ray 2.60 has it; jobs are processes of this machine whose ray is `fake_ray`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.python = sys.executable
        self.token = "a-token"
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: set[str] = set()
        self.state(nodes=2, free=2, dead=[])
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def state(self, **changes: Any) -> None:
        """Change the stand-in's nodes."""
        file = self.folder / "state.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        new = self.folder / "state.new"
        new.write_text(json.dumps({**known, **changes}))
        new.replace(file)

    def submit(self, body: Mapping[str, Any]) -> dict[str, str]:
        env = {**os.environ, "FAKE_RAY": str(self.folder / "state.json"), **body["runtime_env"]["env_vars"]}
        path = f"{FAKE}:{env.get('PYTHONPATH', '')}".rstrip(":")
        with (self.folder / f"{body['submission_id']}.txt").open("wb") as output:
            job = subprocess.Popen(
                ["bash", "-c", body["entrypoint"]], env={**env, "PYTHONPATH": path}, cwd=self.folder,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.jobs[body["submission_id"]] = job
        return {"job_id": body["submission_id"], "submission_id": body["submission_id"]}

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status code and JSON of the response to a request with this path and body."""
        if path.startswith("/api/v0/nodes"):
            nodes = json.loads((self.folder / "state.json").read_text())["nodes"]
            rows = [{"state": "ALIVE", "resources_total": {"CPU": 2.0, "memory": 8e9}} for _ in range(nodes)]
            return 200, {"result": True, "data": {"result": {"result": rows}}}
        if path == "/api/jobs/":
            return 200, self.submit(json.loads(body)) if body else [self.status(job) for job in self.jobs]
        job = path.split("/")[3]
        if job not in self.jobs:
            return 404, f"Job {job} does not exist"
        return 200, self.stop(job) if path.endswith("/stop") else self.status(job)

    def status(self, job: str) -> dict[str, Any]:
        code = self.jobs[job].poll()
        ended = "STOPPED" if job in self.stopped else "FAILED" if code else "SUCCEEDED"
        text = (self.folder / f"{job}.txt").read_text()
        message = f"Job entrypoint command failed with exit code {code}, last available logs:\n{text}" if code else ""
        return {"submission_id": job, "status": "RUNNING" if code is None else ended, "message": message}

    def stop(self, job: str) -> dict[str, bool]:
        if self.jobs[job].poll() is None:
            self.stopped.add(job)
            os.killpg(self.jobs[job].pid, signal.SIGKILL)
            self.jobs[job].wait()
        return {"stopped": True}

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        self.state(free=1)
        try:
            yield
        finally:
            self.state(free=2)

    def lose_node(self) -> None:
        self.state(dead=[1], nodes=1)

    def restore_node(self) -> None:
        self.state(dead=[], nodes=2)

    def close(self) -> None:
        for job in self.jobs:
            self.stop(job)
        self.server.shutdown()
        self.server.server_close()


def _handler(cluster: FakeCluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {cluster.token}"
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, answer = cluster.answer(self.path, body) if known else (401, "Unauthorized")
            text = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class RealCluster(RayCluster):
    """Ray on two simulated hosts; its dashboard is reached through a port of this machine."""

    def __init__(self, ray_bin: Path, hosts: tuple[NetworkHost, NetworkHost], folder: Path) -> None:
        self.bin, self.hosts, self.folder = ray_bin, hosts, folder
        self.python = str(ray_bin / "python")
        self.token = "a-token-of-at-least-some-length"
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=_forward, args=(listener, hosts[0].namespace), daemon=True).start()
        self.listener = listener

    def start(self, number: int) -> None:
        """Start Ray on a host, which has two CPUs."""
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_USAGE_STATS_ENABLED": "0"}
        env |= {"RAY_TMPDIR": str(self.folder), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        head = ["--head", f"--port={GCS_PORT}", "--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD_PORT}"]
        words = [str(self.bin / "ray"), "start", "--block", "--disable-usage-stats", "--num-cpus=2"]
        words += ["--object-store-memory=100000000", f"--node-ip-address={ADDRESSES[number]}"]
        words += [f"--address={ADDRESSES[0]}:{GCS_PORT}"] if number else head
        self.hosts[number].start(words, env)

    def wait_for_nodes(self, count: int) -> None:
        """Until `count` nodes are alive."""
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, KeyError, TypeError):
                rows = self.request("/api/v0/nodes?detail=true")["data"]["result"]["result"]
                if sum(row["state"] == "ALIVE" for row in rows) == count:
                    return
            time.sleep(0.5)
        raise AssertionError(f"{count} nodes are not alive")

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        body = {"entrypoint": "sleep 900", "submission_id": "other", "entrypoint_num_cpus": 1}
        self.request("/api/jobs/", body)
        try:
            yield
        finally:
            self.stop_job("other")

    def lose_node(self) -> None:
        self.hosts[1].kill()

    def restore_node(self) -> None:
        process = self.hosts[1].process
        assert process
        process.wait(30)
        self.hosts[1].start_init()
        self.start(1)
        self.wait_for_nodes(2)

    def close(self) -> None:
        self.listener.close()
        for host in self.hosts:  # Ray's own processes are no leftovers of a run
            if host.init_pid:
                for pid in host.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(host.processes() for host in self.hosts if host.init_pid) and time.monotonic() < deadline:
            time.sleep(0.2)


def _forward(listener: socket.socket, namespace: str) -> None:
    """Connect each client to the dashboard in the network namespace of the first host."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(
        handle, CLONE_NEWNET
    ):  # of this thread; a socket stays where it was made
        raise OSError(ctypes.get_errno(), "setns")
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # closed
            os.close(handle)
            return
        threading.Thread(target=_connect, args=(client,), daemon=True).start()


def _connect(client: socket.socket) -> None:
    """Copy both directions until one of the two closes. The thread has the network namespace of its parent."""
    with client, contextlib.suppress(OSError), socket.create_connection((ADDRESSES[0], DASHBOARD_PORT), 30) as server:
        other = {client: server, server: client}
        while readable := select.select([client, server], [], [], 120)[0]:
            for source in readable:
                if not (part := source.recv(65536)):
                    return
                other[source].sendall(part)


@contextlib.contextmanager
def fake_cluster(folder: Path) -> Iterator[FakeCluster]:
    cluster = FakeCluster(folder)
    try:
        yield cluster
        assert not cluster.unended()
    finally:
        cluster.close()


@contextlib.contextmanager
def real_cluster(folder: Path) -> Iterator[RealCluster]:
    """Two nodes of the version RAY_VERSION, which is installed into a virtual environment on first use."""
    # Not in `folder`: the path of a Unix socket has at most 107 characters, and Ray adds 80 of its own.
    with two_hosts() as hosts, tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        cluster = RealCluster(_installed(), hosts, Path(short))
        try:
            for number in (0, 1):
                cluster.start(number)
                cluster.wait_for_nodes(number + 1)
            yield cluster
            assert not cluster.unended()
        finally:
            cluster.close()


def _installed() -> Path:
    """The folder with the programs of an environment that has ray."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "footplate-tests" / f"ray-{RAY_VERSION}"
    if not (folder / "bin" / "ray").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", f"ray[default]=={RAY_VERSION}"], check=True)
    return folder / "bin"
