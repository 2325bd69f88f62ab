"""Compiles the test modules as pytest does, with asserts that show their values: each worker of pytest-xdist would
compile all of them at the same time, which costs a new checkout 16 seconds of CPU in each.

The functions are pytest's own and not public: _pytest/assertion/rewrite.py, AssertionRewritingHook.exec_module.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_tests(config: pytest.Config) -> None:
    """Compile, on all cores, the test modules that are not compiled yet or have changed."""
    if sys.dont_write_bytecode or config.getoption("assertmode") != "rewrite":
        return
    missing = [path for path in Path(__file__).parent.rglob("test_*.py") if not rewrite._read_pyc(path, _place(path))]
    cores, context = os.cpu_count() or 1, multiprocessing.get_context("fork")
    parts = [missing[first::cores] for first in range(min(cores, len(missing)))]
    compilers = [context.Process(target=_compile, args=(config, part)) for part in parts]
    for process in compilers:
        process.start()
    for process in compilers:  # what one of them did not compile, a worker compiles
        process.join()


def _compile(config: pytest.Config, paths: list[Path]) -> None:
    for path in paths:
        source_hash, code = rewrite._rewrite_test(path, config)
        _place(path).parent.mkdir(parents=True, exist_ok=True)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, _place(path))


def _place(path: Path) -> Path:
    return rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
