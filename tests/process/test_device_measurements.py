"""The device test on real processes: what it measures, a rank that hangs, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fork_server import ForkServer, write_run
from training_runs import log_text, make_spec

from backend.__main__ import main
from backend.runs import RESULT

SHORT = """
import os, signal, time
parent = os.getpid()
from backend.train import device_test
device_test.SECONDS, device_test.TIMEOUT = 0.3, 3.0
{more}
device_test.main()
"""
SLOW = """
if os.environ["RANK"] == "1" and not os.fork():  # stops this rank most of the time
    try:
        while True:
            for number, seconds in ((signal.SIGSTOP, 0.06), (signal.SIGCONT, 0.003)):
                os.kill(os.getppid(), number) if os.getppid() == parent else os._exit(0)
                time.sleep(seconds)
    finally:
        os._exit(0)
"""
# A busy machine slows ranks as well: this rank does a hundredth of the work.
IDLE = """
matmul = device_test._matmul_flops
device_test._matmul_flops = lambda *arguments: matmul(*arguments) / (100 if os.environ["RANK"] == "1" else 1)
"""
HANGS = """
measured = device_test._link_bytes
def hang(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return measured(*arguments)
device_test._link_bytes = hang
"""
DDP = {"parallel.strategy": "ddp", "launch.nproc_per_node": 2}


@pytest.mark.parametrize("slow", [IDLE, pytest.param(SLOW, marks=pytest.mark.soak)], ids=["idle", "stopped"])
def test_every_rank_is_measured_and_a_slow_one_is_named(slow: str, fork_server: ForkServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", make_spec(DDP))
    (tmp_path / "slow.py").write_text(SHORT.format(more=slow))
    assert fork_server.run(tmp_path / "run", 2, script=str(tmp_path / "slow.py")) == 0, log_text(tmp_path / "run")
    found = json.loads((tmp_path / "run" / RESULT).read_text())
    assert len(found["ranks"]) == 2 and found["all_reduce"] > 1e5
    for rank in found["ranks"]:
        assert rank["flops"] > 1e7 and rank["to_next"] > 1e5 and rank["device"] == "cpu"
    assert found["problems"][0].startswith("Rank 1 (cpu on ") and found["problems"][0] in found["text"]


def test_a_rank_that_hangs_is_named(fork_server: ForkServer, tmp_path: Path) -> None:
    write_run(tmp_path / "run", make_spec(DDP))
    (tmp_path / "hangs.py").write_text(SHORT.format(more=HANGS))
    assert fork_server.run(tmp_path / "run", 2, script=str(tmp_path / "hangs.py")) != 0
    assert "Rank 1" in log_text(tmp_path / "run") and not (tmp_path / "run" / RESULT).exists()


@pytest.mark.soak
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a table and leaves no folder and no process (as the fixtures check)."""
    words = ["test-devices", "first-run", "--runs", str(tmp_path), "--set", "model.builtin=tiny-llama"]
    assert main([*words, *(f"--set={name}={value}" for name, value in DDP.items())]) in (0, 1)
    text = capsys.readouterr().out
    assert text.startswith("Rank  Host") and "All-reduce of 4 MiB:" in text and text.count("TFLOP/s") == 2
    assert list((tmp_path / ".device-tests").iterdir()) == []
