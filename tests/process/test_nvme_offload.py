"""ZeRO-3 with weights and state on a disk: the losses of one process, the bytes really there, and gone after."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest
from fork_server import ForkServer, write_run
from training_runs import REORDERING_TOLERANCE, log_text, losses, make_spec, result, same_losses

pytestmark = pytest.mark.soak  # its first use builds a part of DeepSpeed, minutes
FULL = {"method.kind": "full", "train.per_device_train_batch_size": 2}


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*.swp") if p.exists())


def test_state_and_weights_live_on_the_disk(fork_server: ForkServer, tmp_path: Path) -> None:
    disk, largest, over = tmp_path / "nvme", [0], threading.Event()
    disk.mkdir()

    def watch() -> None:
        while not over.wait(0.05):
            largest[0] = max(largest[0], size(disk))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        both = {"parallel.offload_optimizer": "nvme", "parallel.offload_param": "nvme"}
        spec = make_spec({**FULL, **both, "parallel.strategy": "zero3", "parallel.nvme_path": str(disk)})
        write_run(tmp_path / "spread", spec)
        assert fork_server.run(tmp_path / "spread", 2, seconds=500) == 0, log_text(tmp_path / "spread")
    finally:
        over.set()
        watcher.join()
    alone = fork_server.train(tmp_path / "alone", make_spec({**FULL, "train.per_device_train_batch_size": 4}))
    assert losses(tmp_path / "spread") == same_losses(losses(alone), REORDERING_TOLERANCE)
    whole = result(alone)["parameters"]
    assert largest[0] > 0.99 * 12 * whole, "weights in fp32 and two moments; norms stay"
    assert all(rank["local_optimizer_elements"] < 0.01 * whole for rank in result(tmp_path / "spread")["ranks"]), (
        "not in RAM"
    )
    assert size(disk) == 0, "gigabytes would be left behind"


def test_a_folder_in_use_is_refused(fork_server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "footplate.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        more = {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme"}
        write_run(tmp_path / "run", make_spec({**FULL, **more, "parallel.nvme_path": str(tmp_path)}))
        assert fork_server.run(tmp_path / "run", 2) == 1
    assert f"parallel.nvme_path: another run works in {tmp_path}" in log_text(tmp_path / "run")
