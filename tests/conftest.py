"""Fixtures and settings that all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rewritten_asserts import compile_tests

from backend.runs import Plan, processes
from backend.runs.folder import Run
from webui import gradio_internals

if TYPE_CHECKING:
    from fork_server import ForkServer

NOW = datetime(2026, 11, 21, 9, 5, 12)
MakeRun = Callable[..., Run]

# `make test CPU=avx2 THREADS=2`. For each CPU: the instruction set of ATen's own kernels, of oneDNN's and of MKL's
# (COMPATIBLE is SSE2), and the flag that this machine must have, since torch would use AVX-512 without checking.
# All are set before anything imports torch, and inherited by every process that a test starts.
CPU, THREADS = (os.environ.get(f"FOOTPLATE_TEST_{name}") for name in ("CPU", "THREADS"))
KERNELS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
CPUS = {
    "default": ("default", "SSE41", "COMPATIBLE", "sse4_1"),
    "avx2": ("avx2", "AVX2", "AVX2", "avx2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512", "avx512vl"),
}
if CPU:
    if CPU not in CPUS:
        pytest.exit(f"CPU={CPU} is not known; use one of {', '.join(CPUS)}.", 4)
    *kernels, flag = CPUS[CPU]
    if flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.exit(f"CPU={CPU} needs a CPU with {flag}, which this machine does not have.", 4)
    os.environ.update(zip(KERNELS, kernels, strict=True))
if THREADS and THREADS != "1":
    # With more threads than cores, MKL (and torch) would use fewer threads, and waiting threads would spin.
    os.environ |= {"OMP_NUM_THREADS": THREADS, "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ.setdefault("OMP_NUM_THREADS", "1")  # xdist workers share the cores, and torch's waiting threads would spin
os.environ.setdefault("FOOTPLATE_INSPECTION_WORKER", "off")  # no worker process unless a test is about it
# A queue for each process of the tests, in which runs do not wait for each other.
os.environ["FOOTPLATE_QUEUE"] = os.path.join(tempfile.gettempdir(), f"footplate-tests-{os.getpid()}")
os.environ["FOOTPLATE_CPU_SLOTS"] = "100"
# Files that take long, in the order in which xdist starts them. Those that need DeepSpeed's operators are not first.
SLOWEST = [
    "test_journeys",
    "test_layout_page",
    "test_training",
    "test_accessibility",
    "test_strategies",
    "test_preference_stages",
]
OPERATORS = Path(__file__).with_name("process") / "build_operators.py"
BUILDER = pytest.StashKey["subprocess.Popen[bytes]"]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """With xdist, compile the test modules and build DeepSpeed's operators in the background, once for all workers."""
    config = session.config
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        return
    compile_tests(config)
    folders = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    if any(OPERATORS.is_relative_to(folder) or folder.is_relative_to(OPERATORS.parent) for folder in folders):
        null = subprocess.DEVNULL
        config.stash[BUILDER] = subprocess.Popen(
            [sys.executable, str(OPERATORS)], stdin=null, stdout=null, stderr=null, start_new_session=True
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random models and data are the same in each session, whatever ran before in the same worker."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the build if the tests have ended before it."""
    if builder := session.config.stash.get(BUILDER, None):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(builder.pid, signal.SIGKILL)
        builder.wait()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Each worker imports all test modules. Meanwhile garbage collection is off, as in webui/__main__.py, which saves a
    third of the time; later collections skip what exists now."""
    gc.disable()
    try:
        with gradio_internals.without_stub_files():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With xdist, run the files that take minutes first, then those in a browser, those with processes and the others,
    which take seconds, so that all workers end at about the same time; and in each file, the tests that need
    DeepSpeed's operators last, so that no worker waits for their build."""
    if hasattr(config, "workerinput"):
        rank = {name: position for position, name in enumerate((*SLOWEST, "browser", "process"))}
        files = {path: position for position, path in enumerate(dict.fromkeys(item.path for item in items))}

        def order(item: pytest.Item) -> tuple[int, int, int]:
            of_folder = rank.get(item.path.parent.name, len(rank))
            return rank.get(item.path.stem, of_folder), files[item.path], _operators(item)

        items.sort(key=order)


def _operators(item: pytest.Item) -> int:
    """How many of DeepSpeed's operators a test needs, by its name."""
    trains = OPERATORS.parent in item.path.parents
    return 0 if not trains or "zero" not in item.name else 2 if "offload" in item.name else 1


@pytest.fixture(scope="session")
def session_fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """The fork server of the session. It starts before the fixtures of any file, so it inherits none of their
    environment."""
    from fork_server import start_fork_server  # noqa: PLC0415 - in a folder of which other tests know nothing

    with start_fork_server(tmp_path_factory.mktemp("fork-server")) as server:
        yield server


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    """A function that creates runs whose launcher is a Python program; asserts that none of them leaves a process."""
    created: list[Run] = []

    def make(code: str, *arguments: str, python: str = sys.executable, name: str = "try", **env: str) -> Run:
        plan = Plan((python, *arguments, "child.py"), env, {"child.py": code})
        created.append(Run.create(tmp_path / "runs", name, plan, NOW))
        return created[-1]

    yield make
    leftovers = {run.id: running for run in created if (running := processes.run_processes(run.path))}
    for run in created:
        processes.terminate(run.path, sigterm_seconds=0)
    assert not leftovers, f"processes were left behind: {leftovers}"
    assert not [run.id for run in created if processes.is_locked(run.path)]


@pytest.fixture
def clean_env() -> dict[str, str]:
    """An empty environment except for PATH."""
    return {"PATH": os.defpath}
