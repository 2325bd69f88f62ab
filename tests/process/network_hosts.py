"""Two simulated hosts on one machine: each has its own network, PID and UTS namespace, and a veth pair connects
them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import privileges

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("ip", "unshare", "nsenter")
# The init process of a host's PID namespace: when it ends, the kernel ends all other processes of the host.
INIT_COMMAND = [
    "unshare",
    "--uts",
    "--pid",
    "--fork",
    "--mount-proc",
    "sh",
    "-c",
    'hostname "$0" && exec sleep infinity',
]


class NetworkHost:
    """A simulated host. It is ready once `start_init` has returned."""

    def __init__(self, number: int) -> None:
        self.number, self.namespace = number, f"fp{os.getpid()}-{number}"
        self.etc = Path("/etc/netns") / self.namespace  # `ip netns exec` mounts its files over /etc
        self.process: subprocess.Popen[bytes] | None = None
        self.started: list[subprocess.Popen[bytes]] = []
        self.init_pid = 0

    def build(self) -> None:
        """Create the network namespace; skips the test if this machine does not permit it."""
        created = subprocess.run(["ip", "netns", "add", self.namespace], capture_output=True, text=True, check=False)
        if created.returncode:
            privileges.refuse(f"ip netns is not permitted here: {created.stderr.strip()}")
        self.etc.mkdir(parents=True)
        others = "".join(f"{address} host-{n}\n" for n, address in enumerate(ADDRESSES) if n != self.number)
        (self.etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 host-{self.number}\n{others}")  # as in Debian

    def start_init(self) -> None:
        """Start the init process of the host."""
        ip("-n", self.namespace, "link", "set", "lo", "up")
        self.process = subprocess.Popen(["ip", "netns", "exec", self.namespace, *INIT_COMMAND, f"host-{self.number}"])
        deadline = time.monotonic() + 60
        while not self.init_pid:
            assert self.process.poll() is None and time.monotonic() < deadline
            pids = [pid for pid in self.processes() if _command_line(pid)[:1] == [b"sleep"]]
            self.init_pid = pids[0] if pids else 0
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """PIDs on this host, without its init process and the process that started it."""
        infrastructure = {self.init_pid, self.process.pid if self.process else 0}
        return [pid for pid in map(int, ip("netns", "pids", self.namespace).split()) if pid not in infrastructure]

    def start(self, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start `command` on this host."""
        enter = ["nsenter", "--target", str(self.init_pid), "--all", "--", *command]
        self.started.append(subprocess.Popen(enter, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT))
        return self.started[-1]

    def kill(self) -> None:
        """Kill all processes of the host. The veth pair stays: without it the other host would lose its address too."""
        with contextlib.suppress(ProcessLookupError):
            if self.init_pid:
                os.kill(self.init_pid, signal.SIGKILL)
        self.init_pid = 0

    def remove(self) -> None:
        """Kill all processes of the host and delete its namespaces."""
        self.kill()
        for process in (*self.started, *([self.process] if self.process else [])):
            process.kill()
            process.wait(60)
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)
        shutil.rmtree(self.etc, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.etc.parent.rmdir()  # only if no other namespace uses it


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def _command_line(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[NetworkHost, NetworkHost]]:
    """Two hosts that reach each other. Asserts at the end that no process was left and that the namespaces are gone."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        privileges.refuse(f"two hosts need {', '.join(missing)}")
    first_host, second_host = NetworkHost(0), NetworkHost(1)
    try:
        for host in (first_host, second_host):
            host.build()
        interfaces = [f"fp{os.getpid()}v{n}" for n in (0, 1)]
        ip(
            "link",
            "add",
            interfaces[0],
            "netns",
            first_host.namespace,
            "type",
            "veth",
            "peer",
            interfaces[1],
            "netns",
            second_host.namespace,
        )
        for host, interface, address in zip((first_host, second_host), interfaces, ADDRESSES, strict=True):
            ip("-n", host.namespace, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", host.namespace, "link", "set", interface, "up")
            host.start_init()
        yield first_host, second_host
        leftovers = {host.number: host.processes() for host in (first_host, second_host) if host.init_pid}
    finally:
        for host in (first_host, second_host):
            host.remove()
    assert not any(leftovers.values()), f"processes were left behind: {leftovers}"
    assert first_host.namespace not in ip("netns", "list")
