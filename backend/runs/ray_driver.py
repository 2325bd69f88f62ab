"""The driver of a Ray job: it reserves nodes, starts `ray_node.py` on each, and starts them again after a failure.

A copy of this file is in the run's folder. It runs with the Python of the Ray cluster, which may have nothing but ray,
so it imports only ray and the standard library, and nothing of Footplate. It is the only process that appends the
output of the nodes to the log: on a shared file system, lines that several machines append can overwrite each other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LOG, STOP, STATUS, NODES, JOB = "log.txt", "stop", "ray-status.json", "ray-nodes", "ray.json"
SAYS = "backend.runs.follower: "  # Footplate shows the rest of the line as the cause of the failure
POLL_SECONDS = 0.5
SHARED_SECONDS = 30  # until a file that the driver has written is visible on the other nodes
WAIT_SECONDS = 60  # how long to wait for the other nodes after the first has ended
NODE_SECONDS = 40  # how long the processes of a node may take to end
KEPT_BYTES = 2**26
UNITS = ("CPU", "GPU")
LOST = -1  # exit status of a node that does not respond


class Node:
    """An actor on one of the reserved nodes. Its process is on the node as long as the driver lives."""

    def __init__(self) -> None:
        self.output = bytearray()
        self.lock = threading.Lock()
        self.status = -1
        self.reader: threading.Thread | None = None

    def address(self) -> tuple[str, int]:
        """The IP address of the node, and a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def problem(self, folder: str, python: str, job: str) -> str:
        """Why the run cannot start on this node, as a sentence; '' if it can."""
        until = time.monotonic() + SHARED_SECONDS
        while not self._sees(folder, job):
            if time.monotonic() > until:
                where = f"The Ray node {ray.util.get_node_ip_address()} does not see the run's folder {folder}"
                return f"{where}. All nodes need this folder under the same path, with write access."
            time.sleep(1)
        if not os.access(python, os.X_OK):
            return f"The Ray node {ray.util.get_node_ip_address()} has no Python at {python}."
        return ""

    def _sees(self, folder: str, job: str) -> bool:
        try:
            found = json.loads(Path(folder, STATUS).read_text(encoding="utf-8"))
            return bool(found["job"] == job and os.access(folder, os.W_OK))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def start(self, folder: str, python: str, words: list[str], variables: dict[str, str]) -> None:
        """Start the run's processes. `ray_node.py` ends them when the pipe to this actor closes."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env.pop("PYTHONBREAKPOINT", None)  # Ray's own debugger
        status, write_end = os.pipe()
        started = subprocess.Popen(
            [python, "-m", "backend.runs.ray_node", str(write_end), *words],
            cwd=folder, env={**env, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, pass_fds=(write_end,), start_new_session=True,
        )  # fmt: skip
        os.close(write_end)
        self.status = status
        self.process = started  # keeps its pipes open
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        while part := os.read(self.process.stdout.fileno(), 65536):  # type: ignore[union-attr]
            with self.lock:
                self.output += part

    def read(self) -> tuple[bytes, int | None]:
        """The complete lines since the last call, and the exit status, None while the processes run."""
        assert self.reader
        ended = not self.reader.is_alive()
        with self.lock:
            size = len(self.output) if ended else self.output.rfind(b"\n") + 1
            lines, self.output = bytes(self.output[:size]), self.output[size:]
        return lines, int(os.read(self.status, 16) or LOST) if ended else None


class Driver:
    """The job `job` of the run in the current folder."""

    def __init__(self, job: str, arguments: list[str]) -> None:
        self.job = job
        self.arguments = arguments
        self.unwritten = bytearray()
        self.settings: dict[str, Any] = json.loads(Path(JOB).read_text(encoding="utf-8"))
        self.count: int = self.settings["nodes"]
        self.resources: dict[str, float] = self.settings["resources"]

    def run(self) -> int:
        """Start the nodes, again after a failure, until the run has ended; its exit status."""
        for attempt in range(self.settings["max_restarts"] + 1):
            if attempt:
                print(f"Starting again after a failure ({attempt} of {self.settings['max_restarts']}).", flush=True)
            group = self.reserve()
            if group is None:
                return 0
            try:
                status = self.attempt(group)
            finally:
                remove_placement_group(group)
            self.wait_for_nodes()
            if status == 0 or Path(STOP).exists():
                return max(0, status)
            self.arguments = []  # later attempts resume from the last complete checkpoint
        if status == LOST:
            print(f"{SAYS}A node of the Ray cluster failed.", flush=True)
        return 1

    def reserve(self) -> Any:
        """A placement group with one bundle per node, once Ray has reserved it; None if the run was stopped."""
        bundles = [dict(self.resources) for _ in range(self.count)]
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=self.job)
        while True:
            with contextlib.suppress(OSError):  # a full disk: tried again a second later
                self.report(waits=True, text=self.waiting())
            if group.wait(1):
                return group
            if Path(STOP).exists():
                remove_placement_group(group)
                return None

    def waiting(self) -> str:
        """What the job waits for, as sentences."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(all(node.get(name, 0) >= n for name, n in self.resources.items()) for node in alive)
        each = " and ".join(f"{n:g} {name}{'s' * (n != 1 and name in UNITS)}" for name, n in self.resources.items())
        nodes = f"{self.count} nodes with {each} each" if self.count > 1 else f"a node with {each}"
        if fitting < self.count:
            return f"Waiting for {nodes}; the Ray cluster has {fitting or 'none'} of that size."
        return f"Waiting for {nodes}, which other Ray jobs use."

    def attempt(self, group: Any) -> int:
        """Run the processes once; 0, the exit status of the first node that failed, or LOST."""
        actor = ray.remote(Node)
        cpus, gpus = self.resources.get("CPU", 0), self.resources.get("GPU", 0)
        # Ray refuses these three among the custom resources of an actor.
        others = {name: amount for name, amount in self.resources.items() if name not in (*UNITS, "memory")}
        nodes = [
            actor.options(
                num_cpus=cpus,
                num_gpus=gpus,
                memory=self.resources.get("memory"),
                resources=others,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(self.count)
        ]
        try:
            return self.start(nodes) or self.follow(nodes)
        except ray.exceptions.RayActorError:
            print("A Ray node has failed.", flush=True)
            return LOST
        finally:
            for node in nodes:  # ends the processes that are left
                ray.kill(node)

    def start(self, nodes: list[Any]) -> int:
        """Start the processes on each node; 1 if a node cannot run them."""
        python, folder = self.settings["python"], str(Path.cwd())
        problems = ray.get([node.problem.remote(folder, python, self.job) for node in nodes])
        if found := next(filter(None, problems), ""):
            print(f"{SAYS}{found}", flush=True)
            sys.exit(1)
        address, port = ray.get(nodes[0].address.remote())
        shared = {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port), "PET_NNODES": str(self.count)}
        Path(NODES).mkdir(exist_ok=True)
        ray.get(
            [
                node.start.remote(folder, python, self.arguments, {**shared, "PET_NODE_RANK": str(rank)})
                for rank, node in enumerate(nodes)
            ]
        )
        self.report(waits=False, text="")
        return 0

    def follow(self, nodes: list[Any]) -> int:
        """Append the output of the nodes to the log until they have ended."""
        statuses: dict[int, int] = {}
        until = float("inf")
        while len(statuses) < self.count and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            left = [rank for rank in range(self.count) if rank not in statuses]
            for rank, (lines, status) in zip(left, ray.get([nodes[rank].read.remote() for rank in left]), strict=True):
                self.write(lines)
                if status is not None:
                    statuses[rank] = status
                    until = min(until, time.monotonic() + WAIT_SECONDS)
        failed = [status for status in statuses.values() if status]
        return failed[0] if failed else 0 if len(statuses) == self.count else 1

    def write(self, lines: bytes) -> None:
        """Append to the log. What a full disk has no room for is written with the next lines."""
        self.unwritten += lines
        try:
            while self.unwritten:
                del self.unwritten[: os.write(1, self.unwritten)]
        except OSError:
            del self.unwritten[KEPT_BYTES:]

    def wait_for_nodes(self) -> None:
        """Wait until no node has processes: each has a file while some may be running. A failed machine leaves its
        file."""
        until = time.monotonic() + NODE_SECONDS
        while (left := list(Path(NODES).glob("*"))) and time.monotonic() < until:
            time.sleep(0.2)
        for file in left:
            file.unlink(missing_ok=True)

    def report(self, waits: bool, text: str) -> None:
        """What Footplate shows about the job."""
        new = Path(f".{STATUS}.new")
        new.write_text(json.dumps({"job": self.job, "waits": waits, "text": text}), encoding="utf-8")
        new.replace(STATUS)


def main() -> int:
    """Arguments: the run's folder, the id of the job, further arguments of the trainer."""
    os.chdir(sys.argv[1])
    log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)  # as files.SAFE
    for stream in (1, 2):
        os.dup2(log, stream)
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    return Driver(sys.argv[2], sys.argv[3:]).run()


if __name__ == "__main__":
    sys.exit(main())
