"""ZeRO-3 with NVMe offload of weights and optimizer state: losses, bytes on the disk, and cleanup afterwards."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest
from fork_server import ForkServer, write_run
from training_runs import REORDERING_TOLERANCE, log_text, losses, make_spec, result, same_losses

pytestmark = pytest.mark.soak  # DeepSpeed compiles its async I/O operator on first use, which takes minutes
FULL = {"method.kind": "full", "train.per_device_train_batch_size": 2}


def swap_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*.swp") if p.exists())


def test_state_and_weights_are_on_the_disk(fork_server: ForkServer, tmp_path: Path) -> None:
    disk, largest, finished = tmp_path / "nvme", [0], threading.Event()
    disk.mkdir()

    def watch() -> None:
        while not finished.wait(0.05):
            largest[0] = max(largest[0], swap_bytes(disk))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        offload = {"parallel.offload_optimizer": "nvme", "parallel.offload_param": "nvme"}
        spec = make_spec({**FULL, **offload, "parallel.strategy": "zero3", "parallel.nvme_path": str(disk)})
        write_run(tmp_path / "zero3", spec)
        assert fork_server.run(tmp_path / "zero3", 2, seconds=500) == 0, log_text(tmp_path / "zero3")
    finally:
        finished.set()
        watcher.join()
    one_process = fork_server.train(
        tmp_path / "one-process", make_spec({**FULL, "train.per_device_train_batch_size": 4})
    )
    assert losses(tmp_path / "zero3") == same_losses(losses(one_process), REORDERING_TOLERANCE)
    parameters = result(one_process)["parameters"]
    assert largest[0] > 0.99 * 12 * parameters, "fp32 weights and two moments; norms stay in memory"
    assert all(rank["local_optimizer_elements"] < 0.01 * parameters for rank in result(tmp_path / "zero3")["ranks"]), (
        "the state is not in RAM"
    )
    assert swap_bytes(disk) == 0, "the swap files are deleted"


def test_nvme_folder_in_use_is_refused(fork_server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "footplate.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme"}
        write_run(tmp_path / "run", make_spec({**FULL, **options, "parallel.nvme_path": str(tmp_path)}))
        assert fork_server.run(tmp_path / "run", 2) == 1
    assert f"parallel.nvme_path: another run works in {tmp_path}" in log_text(tmp_path / "run")
