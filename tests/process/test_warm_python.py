"""A process that has imported the libraries forks the processes of a rehearsal. Each behaves like its own Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from backend.runs import warm_python

WITHOUT_LIBRARIES = "from backend.train import warm_server as s; s.LIBRARIES = (); s.main()"
MODULES = {
    "tells": (
        "import os, sys\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['WHO'], 'SERVER' in os.environ, __name__, os.getppid())\n"
        "print('to stderr', file=sys.stderr)\n"
        "print(sys.stdin.read())\n"
    ),
    "fails": "raise ValueError('wrong')\n",
    "says": "import sys\nsys.exit('not today')\n",
    "exits": "import atexit, sys\natexit.register(print, 'at exit')\nsys.exit(7)\n",
    "killed": "import os\nos.kill(os.getpid(), 9)\n",
    "waits": (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print(os.getpid(), flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "sys.exit(5)\n"
    ),
    "launches": (
        "import subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, '-u', '-m', 'parent']) for _ in range(8)]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    ),
    "parent": "import os\nprint(os.getppid())\n",
}


class Warm:
    """A server, and clients in the folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        for name, code in MODULES.items():
            (self.run / f"{name}.py").write_text(code)
        command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(folder), str(os.getpid())]
        self.server = subprocess.Popen(command, env={**os.environ, "SERVER": "1"})

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipe, env = subprocess.PIPE, {**os.environ, "WHO": "me", warm_python.SOCKET: f"../{warm_python.NAME}"}
        command = [sys.executable, "-I", "-S", warm_python.__file__, *arguments]
        return subprocess.Popen(command, cwd=self.run, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def end(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        client = self.start(*arguments)
        out, err = client.communicate("typed", timeout=60)
        return client.returncode, out, err


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Warm]:
    made = Warm(tmp_path)
    yield made
    made.server.kill()
    made.server.wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(pid: int) -> None:
    wait_for(lambda: not is_alive(pid), 60, lambda: "it is still alive")


def test_it_runs_like_python(warm: Warm) -> None:
    code, out, err = warm.end("-m", "tells", "a", "--b=c d")
    assert code == 0, err
    assert out == f"['a', '--b=c d'] {warm.run} me False __main__ {warm.server.pid}\ntyped\n"
    assert err == "to stderr\n"
    code, out, err = warm.end("-u", "-m", "fails")
    assert (code, out) == (1, "") and err.endswith("ValueError: wrong\n")
    assert warm.end("-m", "says") == (1, "", "not today\n")
    assert warm.end("-m", "exits") == (7, "at exit\n", "")
    assert warm.end("-m", "killed")[0] == -signal.SIGKILL
    assert "No module named missing" in warm.end("-m", "missing")[2]


def test_what_it_starts_is_forked_too(warm: Warm) -> None:
    code, out, err = warm.end("-m", "launches")
    assert (code, out.split()) == (0, [str(warm.server.pid)] * 8), err


def test_a_signal_reaches_it_and_none_is_left_behind(warm: Warm) -> None:
    for number, expected in ((signal.SIGTERM, 5), (signal.SIGKILL, -signal.SIGKILL)):
        client = warm.start("-m", "waits")
        pid = int(client.stdout.readline())  # type: ignore[union-attr]
        assert is_alive(pid)
        client.send_signal(number)
        assert client.wait(60) == expected
        wait_for_end(pid)
        client.communicate()
    assert warm.end("-m", "exits")[0] == 7, "the server goes on"


def test_without_the_server(warm: Warm) -> None:
    client = warm.start("-m", "waits")
    pid = int(client.stdout.readline())  # type: ignore[union-attr]
    warm.server.kill()
    assert "was killed" in client.communicate(timeout=60)[1]
    assert client.returncode == 1
    wait_for_end(pid)
    warm.server.wait()
    assert warm.end("-c", "print(5)") == (0, "5\n", ""), "no other use of Python waits for the server"
    code, out, _ = warm.end("-m", "parent")
    assert code == 0 and int(out) == os.getpid(), "Python itself runs it"


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    starter = (
        "import os, subprocess, sys, time\n"
        f"s = subprocess.Popen([sys.executable, '-c', {WITHOUT_LIBRARIES!r}, {str(tmp_path)!r}, str(os.getpid())])\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "print(s.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", starter, str(tmp_path / "warm")], capture_output=True, text=True)
    wait_for_end(int(done.stdout))
