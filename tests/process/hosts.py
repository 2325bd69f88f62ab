"""Two hosts on one machine: namespaces of their own for network, processes and name, and a cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("ip", "unshare", "nsenter")
# The first process of a host: all others of it end with it.
LIVE = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", 'hostname "$0" && exec sleep infinity']


class Host:
    """A host, as soon as its first process is there."""

    def __init__(self, number: int) -> None:
        self.number, self.space = number, f"fp{os.getpid()}-{number}"
        self.etc = Path("/etc/netns") / self.space  # what `ip netns exec` lays over /etc
        self.process: subprocess.Popen[bytes] | None = None
        self.started: list[subprocess.Popen[bytes]] = []
        self.first = 0

    def build(self) -> None:
        """Skips the test, with the reason, where this machine does not allow it."""
        made = subprocess.run(["ip", "netns", "add", self.space], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"ip netns is not permitted here: {made.stderr.strip()}")
        self.etc.mkdir(parents=True)
        names = "".join(f"{address} host-{n}\n" for n, address in enumerate(ADDRESSES))
        (self.etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def wake(self) -> None:
        """Its first process."""
        ip("-n", self.space, "link", "set", "lo", "up")
        self.process = subprocess.Popen(["ip", "netns", "exec", self.space, *LIVE, f"host-{self.number}"])
        until = time.monotonic() + 20
        while not self.first:
            assert self.process.poll() is None and time.monotonic() < until
            found = [pid for pid in self.processes() if _words(pid)[:1] == [b"sleep"]]
            self.first = found[0] if found else 0
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """What runs there, beside what the host itself is made of."""
        own = {self.first, self.process.pid if self.process else 0}
        return [pid for pid in map(int, ip("netns", "pids", self.space).split()) if pid not in own]

    def start(self, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Run `command` there."""
        enter = ["nsenter", "--target", str(self.first), "--all", "--", *command]
        self.started.append(subprocess.Popen(enter, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT))
        return self.started[-1]

    def die(self) -> None:
        """At once, with all that runs there; the cable stays, for without it the other one loses its address too."""
        with contextlib.suppress(ProcessLookupError):
            if self.first:
                os.kill(self.first, signal.SIGKILL)
        self.first = 0

    def clear(self) -> None:
        """End whatever runs there, and take the host away."""
        self.die()
        for process in (*self.started, *([self.process] if self.process else [])):
            process.kill()
            process.wait(20)
        subprocess.run(["ip", "netns", "del", self.space], capture_output=True, check=False)
        shutil.rmtree(self.etc, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.etc.parent.rmdir()  # if it was ours alone


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout


def _words(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; at the end no process had to be ended and nothing is left."""
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        pytest.skip(f"two hosts need {', '.join(missing)}")
    one, two = Host(0), Host(1)
    try:
        for host in (one, two):
            host.build()
        ends = [f"fp{os.getpid()}v{n}" for n in (0, 1)]
        ip("link", "add", ends[0], "netns", one.space, "type", "veth", "peer", ends[1], "netns", two.space)
        for host, end, address in zip((one, two), ends, ADDRESSES, strict=True):
            ip("-n", host.space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", host.space, "link", "set", end, "up")
            host.wake()
        yield one, two
        left = {host.number: host.processes() for host in (one, two) if host.first}
    finally:
        for host in (one, two):
            host.clear()
    assert not any(left.values()), f"processes were left behind: {left}"
    assert one.space not in ip("netns", "list")
