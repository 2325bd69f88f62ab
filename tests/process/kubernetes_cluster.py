"""A stand-in for a Kubernetes cluster of two nodes: its API, and a controller whose pods are processes of this machine.

Objects are validated against the models of the official client, which know no other keys. A pod behaves like a real one
in what the tests are about: its first process gets SIGTERM, all others end with it, and whether a pod that has ended is
replaced follows from the job's podFailurePolicy and backoffLimit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError

Tree = dict[str, Any]

NAMESPACE, TOKEN = "team", "a-token"
POD_MARK = "FAKE_POD"  # environment variable of the processes of a pod
TAINT = {"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}


def unknown_keys(body: Tree) -> list[str]:
    """Keys of an object that the official models do not have, and values that they do not accept."""
    if body["kind"] == "TrainJob":  # these models drop what they do not know
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob  # noqa: PLC0415 - takes more than a second

        return _lost(body, TrainerV1alpha1TrainJob.from_dict(body).to_dict(), "")
    import kubernetes.client  # noqa: PLC0415 - takes a second

    models: dict[str, Any] = {"Job": kubernetes.client.V1Job, "Service": kubernetes.client.V1Service}
    try:
        models[body["kind"]].model_validate(body)
    except ValidationError as error:
        return [".".join(map(str, problem["loc"])) for problem in error.errors()]
    return []


def _lost(given: Any, kept: Any, path: str) -> list[str]:
    if isinstance(given, dict):
        return [each for key in given for each in _lost(given[key], (kept or {}).get(key), f"{path}.{key}")]
    if isinstance(given, list):
        return [each for pair in zip(given, kept or [None] * len(given), strict=True) for each in _lost(*pair, path)]
    return [] if str(given) == str(kept) else [path]


def node(name: str, cpu: str = "2", **more: Any) -> Tree:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **more.pop("labels", {})}},
        "spec": more.pop("spec", {}),
        "status": {"allocatable": {"cpu": cpu, "memory": "8388608Ki", **more}},
    }


@dataclass
class Pod:
    """A pod: `process` is its first one, None while it is pending."""

    name: str
    index: int
    number: int
    process: subprocess.Popen[bytes] | None = None
    evicted: bool = False
    killed_at: float = float("inf")
    ended: float = 0.0
    statuses: list[Tree] = field(default_factory=list)  # given by a test

    @property
    def phase(self) -> str:
        if self.process is None:
            return "Pending"
        if not self.ended:
            return "Running"
        return "Failed" if self.process.returncode or self.evicted else "Succeeded"


class FakeKubernetes:
    """The cluster; `free` is the number of its nodes that can run a pod."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.free = 2
        self.nodes = [node("one"), node("two"), node("control", "4", spec={"taints": [TAINT]})]
        self.jobs: dict[str, Tree] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.services: dict[str, Tree] = {}
        self.events: dict[str, list[Tree]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}  # the last part of a path -> answer
        self.lock = threading.RLock()
        self.closed = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.environment = {"KUBECONFIG": str(folder / "config")}
        (folder / "config").write_text(json.dumps(self._kubeconfig()))
        self.threads = [
            threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True),
            threading.Thread(target=self._control, daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _kubeconfig(self) -> Tree:
        here = f"http://127.0.0.1:{self.server.server_port}"
        context = {"cluster": "fake", "user": "me", "namespace": NAMESPACE}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": context}],
            "clusters": [{"name": "fake", "cluster": {"server": here}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
        }

    # -- what tests do -------------------------------------------------------------------------------------------------

    def unended(self) -> list[str]:
        """The ids of the jobs that have not ended."""
        with self.lock:
            return [
                f"{NAMESPACE}/{name}"
                for name, job in self.jobs.items()
                if not _conditions(job) & {"Complete", "Failed"}
            ]

    def evict(self, index: int) -> None:
        """Drain the node of a pod: its first process gets SIGTERM."""
        with self.lock:
            pod = self._running(index)
            pod.evicted = True
            assert pod.process
            pod.process.terminate()

    def lose_node(self, index: int = 1) -> None:
        """A node is gone at once, and with it a pod."""
        with self.lock:
            self.free -= 1
            pod = self._running(index)
            pod.evicted = True
            self._kill(pod)

    def restore_node(self) -> None:
        self.free += 1

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Another job uses a node."""
        self.free -= 1
        try:
            yield
        finally:
            self.free += 1

    def suspend(self, name: str, suspended: bool) -> None:
        with self.lock:
            self.jobs[name]["spec"]["suspend"] = suspended

    def delete_job(self, name: str) -> None:
        """Same as `kubectl delete job`."""
        with self.lock:
            self.jobs[name]["metadata"]["deletionTimestamp"] = "now"

    def _running(self, index: int) -> Pod:
        return next(pod for pods in self.pods.values() for pod in pods if pod.index == index and pod.phase == "Running")

    # -- the controller ------------------------------------------------------------------------------------------------

    def _control(self) -> None:
        while not self.closed:
            with self.lock:
                for name in list(self.jobs):
                    self._step(name)
            time.sleep(0.1)

    def _step(self, name: str) -> None:
        """Bring the pods of a job closer to what it requests."""
        job, pods = self.jobs[name], self.pods.setdefault(name, [])
        for pod in pods:
            if time.monotonic() > pod.killed_at:
                self._kill(pod)
            if pod.process and not pod.ended and pod.process.poll() is not None:
                self._kill(pod)  # the other processes of the container
                pod.ended = time.monotonic()
        if _conditions(job) & {"Complete", "Failed"}:
            return
        if "deletionTimestamp" in job["metadata"] or job["spec"].get("suspend"):
            self._end_pods(name, job, pods)
            return
        failed = [pod for pod in pods if pod.phase == "Failed" and not self._is_ignored(job, pod)]
        if len(failed) > _pod_job(job)["backoffLimit"]:
            for pod in pods:
                self._kill(pod)
            job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
            return
        self._fill(name, job, pods)

    def _end_pods(self, name: str, job: Tree, pods: list[Pod]) -> None:
        for pod in pods:
            if pod.phase == "Running" and not pod.evicted:
                pod.evicted = True
                assert pod.process
                pod.process.terminate()
        if "deletionTimestamp" in job["metadata"] and not any(pod.phase == "Running" for pod in pods):
            self._remove(name)

    def _fill(self, name: str, job: Tree, pods: list[Pod]) -> None:
        count = _pod_job(job)["completions"]
        succeeded = {pod.index for pod in pods if pod.phase == "Succeeded"}
        if len(succeeded) == count:
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            return
        for index in set(range(count)) - succeeded:
            live = [pod for pod in pods if pod.index == index and pod.phase in ("Pending", "Running")]
            if not live:
                live = [Pod(f"{name}-{index}-{len(pods):05}", index, len(pods))]
                pods += live
            used = sum(pod.phase == "Running" for each in self.pods.values() for pod in each)
            if live[0].phase == "Pending" and used < self.free and not live[0].statuses:
                self._start(job, live[0])

    def _start(self, job: Tree, pod: Pod) -> None:
        container = _pod_job(job)["template"]["spec"]["containers"][0]
        given = {}
        for variable in container["env"]:
            value = variable.get("value", str(pod.index))  # otherwise the completion index
            given[variable["name"]] = value.replace("$$", "$")
        # Every pod has the addresses of this machine, in place of the cluster's DNS.
        given["PET_MASTER_ADDR"] = re.sub(r"^[\w-]+-0\.[\w-]+$", "127.0.0.1", given["PET_MASTER_ADDR"])
        kept = {
            name: os.environ[name]
            for name in ("PATH", "HOME", "XDG_CACHE_HOME", "HF_HUB_OFFLINE")
            if name in os.environ
        }
        place = Path(container.get("workingDir", "/"))
        output = (self.folder / f"{pod.name}.txt").open("wb")
        with output:
            arguments = [text.replace("$$", "$") for text in container["args"]]
            pod.process = subprocess.Popen(
                [*container["command"], *arguments], cwd=place if place.is_dir() else "/tmp",
                env={**kept, **given, POD_MARK: pod.name}, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def _is_ignored(self, job: Tree, pod: Pod) -> bool:
        """Whether the job's policy replaces this pod without counting the failure."""
        rules = _pod_job(job).get("podFailurePolicy", {}).get("rules", ())
        assert pod.process
        for rule in rules:
            if pod.process.returncode in rule.get("onExitCodes", {}).get("values", ()):
                return True
            if pod.evicted and rule.get("onPodConditions", [{}])[0].get("type") == "DisruptionTarget":
                return True
        return False

    def _kill(self, pod: Pod) -> None:
        mark = f"{POD_MARK}={pod.name}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
        if pod.process:
            pod.process.wait()
            pod.ended = pod.ended or time.monotonic()

    def _remove(self, name: str) -> None:
        uid = self.jobs.pop(name)["metadata"]["uid"]
        self.pods.pop(name, None)
        for service, made in list(self.services.items()):
            if any(owner["uid"] == uid for owner in made["metadata"].get("ownerReferences", ())):
                del self.services[service]

    # -- the API -------------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, str], body: Tree | None) -> tuple[int, Any]:
        """Status code and JSON of the response."""
        parts = path.strip("/").split("/")
        if parts[-1] in self.refusals:
            code, message = self.refusals[parts[-1]]
            return code, {"kind": "Status", "message": message}
        if parts[-1] == "nodes":
            return 200, {"items": self.nodes}
        with self.lock:
            if method == "POST":
                return self._create(parts[-1], query, body or {})
            if parts[-1] == "log":
                file = self.folder / f"{parts[-2]}.txt"
                lines = file.read_text().splitlines() if file.exists() else []
                return 200, "\n".join(lines[-int(query.get("tailLines", 9999)) :])
            if parts[-1] == "pods":
                name = query["labelSelector"].partition("=")[2]
                return 200, {"items": [self._described(pod) for pod in self.pods.get(name, ())]}
            if parts[-1] == "events":
                return 200, {"items": self.events.get(query["fieldSelector"].partition("=")[2], [])}
            if method == "DELETE" and parts[-2] == "pods":
                return self._delete_pod(parts[-1], float(query["gracePeriodSeconds"]))
            job = self.jobs.get(parts[-1])
            if not job or parts[-3:-1] != [NAMESPACE, f"{job['kind'].lower()}s"]:
                return 404, {"kind": "Status", "message": f'jobs "{parts[-1]}" not found'}
            if method == "DELETE":
                assert query["propagationPolicy"] == "Foreground"
                self.delete_job(parts[-1])
            return 200, job

    def _delete_pod(self, name: str, grace: float) -> tuple[int, Any]:
        for pod in [pod for pods in self.pods.values() for pod in pods if pod.name == name]:
            if pod.phase == "Running":
                pod.evicted, pod.killed_at = True, time.monotonic() + grace
                assert pod.process
                pod.process.terminate()
            return 200, {}
        return 404, {"kind": "Status", "message": "not found"}

    def _create(self, plural: str, query: dict[str, str], body: Tree) -> tuple[int, Any]:
        assert query["fieldValidation"] == "Strict"
        assert plural == f"{body['kind'].lower()}s"
        if unknown := unknown_keys(body):
            return 400, {"kind": "Status", "message": f"strict decoding error: unknown field {unknown[0]}"}
        name = body["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name), name
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{name}"}, "status": {}}
        if query.get("dryRun") != "All":
            (self.services if body["kind"] == "Service" else self.jobs)[name] = made
        return 201, made

    def _described(self, pod: Pod) -> Tree:
        code = pod.process.returncode if pod.process else None
        statuses: list[Tree] = pod.statuses
        if pod.ended and not statuses:
            statuses = [{"state": {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}}]
        conditions = []
        if pod.phase == "Pending":
            message = "0/2 nodes are available: 1 Insufficient cpu."
            conditions = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
        return {
            "metadata": {"name": pod.name, "namespace": NAMESPACE},
            "status": {"phase": pod.phase, "conditions": conditions, "containerStatuses": statuses},
        }

    def close(self) -> None:
        self.closed = True
        self.threads[1].join(10)
        for pods in self.pods.values():
            for pod in pods:
                self._kill(pod)
        self.server.shutdown()
        self.server.server_close()


def _conditions(job: Tree) -> set[str]:
    return {each["type"] for each in job.get("status", {}).get("conditions", ()) if each["status"] == "True"}


def _pod_job(job: Tree) -> Tree:
    """The spec of a Job; for a TrainJob, of the one that Kubeflow's torch-distributed runtime makes of it."""
    spec: Tree = job["spec"]
    if job["kind"] == "Job":
        return spec
    trainer = spec["trainer"]
    nodes = {"PET_NNODES": str(trainer["numNodes"]), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29400"}
    env = [*({"name": name, "value": value} for name, value in nodes.items()), {"name": "PET_NODE_RANK"}]
    container = {**trainer, "env": [*trainer["env"], *env]}
    return {"completions": trainer["numNodes"], "backoffLimit": 6, "template": {"spec": {"containers": [container]}}}


def _handler(cluster: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            code, answer = 401, {"kind": "Status", "message": "Unauthorized"}
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                code, answer = cluster.answer(self.command, url.path, query, json.loads(body) if body else None)
            text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def fake_kubernetes(folder: Path) -> Iterator[FakeKubernetes]:
    cluster = FakeKubernetes(folder)
    try:
        yield cluster
        assert not cluster.unended()
    finally:
        cluster.close()


PYTHON = sys.executable
