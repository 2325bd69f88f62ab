"""Launches without the checks that backend.train makes itself, so that it is the library that fails, or goes on."""

from __future__ import annotations

from pathlib import Path

from host import Host, ranks, write

from backend.config import RunSpec
from backend.paths import HOME

EXTENSIONS = HOME / ".cache/torch_extensions"

SCRIPT = """
import contextlib
from backend.train import device, engine, kernels, optimizers, quantized, trainers
from backend.train.__main__ import main

for room, name in [
    (trainers, "_check"), (quantized, "check"), (optimizers, "check"), (device, "check_precision"),
    (kernels, "check"), (engine, "check_layers"),
]:
    assert callable(getattr(room, name))
    setattr(room, name, lambda *given: None)
assert callable(optimizers._projecting)
optimizers._projecting = lambda model: contextlib.nullcontext()  # it turns the library's words into ours
main()
"""


def run(folder: Path, spec: RunSpec, host: Host) -> tuple[int, str]:
    """(exit code, log) of `spec`, planned into the new `folder`."""
    write(folder, spec)
    return go(folder, spec, host)


def go(folder: Path, spec: RunSpec, host: Host) -> tuple[int, str]:
    """(exit code, log) of the plan that lies in `folder`."""
    script = folder / "unguarded.py"
    script.write_text(SCRIPT)
    code = host.run(folder, ranks(spec), script=str(script), seconds=300)
    # A rank that is ended while it builds, or loads, what DeepSpeed compiles leaves a lock for which others would wait.
    for lock in EXTENSIONS.rglob("lock"):
        lock.unlink()
    return code, (folder / "log.txt").read_text()
