"""Processes that would work on for nobody end with the process that started them, however that ends."""

import ctypes
import os
import select
import subprocess
import sys

import pytest
from waiting import wait_for

from backend.runs import processes

CHILD = """
import time
from backend.runs import processes
processes.end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_it_is_killed_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        own_end = os.pidfd_open(child)
        parent.kill()
    try:
        wait_for(lambda: not is_alive(own_end), 20)
    finally:
        os.close(own_end)


def test_a_system_without_the_call(monkeypatch: pytest.MonkeyPatch):
    """macOS, where `footplate prepare` would not start."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    processes.end_with_parent()


def is_alive(pidfd: int) -> bool:
    """A pidfd becomes readable when its process has ended."""
    return not select.select([pidfd], [], [], 0)[0]
