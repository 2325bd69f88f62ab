"""`torchrun -m backend.train.device_test .` in a run's folder: what each device and link reaches, without training.

A rank that is slow slows all others down, and the curves of a run do not show which one it is.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from backend import registry
from backend.runs import RESULT, device_speeds
from backend.runs.files import write_json
from backend.train import device, exit, stacks, verify
from backend.train.run_log import RunLog

TIMEOUT = 60.0  # seconds; a collective that takes longer is an error that names the rank
SECONDS = 3.0  # of each measurement
MIN_REPEATS = 3
MESSAGES = 8  # timed on each link
# Large enough that the device's speed decides the time, not the latency of a kernel or message.
MATRIX = {"cpu": 768}, 8192
MESSAGE_BYTES = {"cpu": 4 * 2**20}, 64 * 2**20


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Measure, and write the result of all ranks."""
    sys.excepthook, began = exit.print_error, time.time()
    group, folder = device.ProcessGroup(), Path(sys.argv[1]).resolve()
    group.sign()
    stacks.Stacks(folder, group.rank).write_on_request()
    log = RunLog(folder, group.rank)
    spec, run = verify.read_plan(folder)
    device.settle(needs_collectives=False)
    verify.check_device(spec, run)
    verify.check_ranks(spec, run, group.world)
    here = _device(run.device)
    if group.world > 1:
        log.start_phase("connecting", "Connecting the ranks.")
        dist.init_process_group(device.collective_backend(run.device), timeout=timedelta(seconds=TIMEOUT))
        group.meet(folder, TIMEOUT)
    try:
        measured = _measure(run.device, here, device.DTYPES[run.compute_dtype], group, log)
    except RuntimeError as error:
        group.check_timeout(error)
        raise
    if group.rank == 0:
        write_json(folder / RESULT, {**measured, **_told(measured), "seconds": round(time.time() - began, 3)})
    group.leave()


def _device(family: str) -> torch.device:
    """The device of this rank, as the Trainer selects it."""
    if not registry.DEVICES[family].visible_devices_env:
        return torch.device(family)
    here = torch.device(family, int(os.environ.get("LOCAL_RANK", "0")))
    getattr(torch, family).set_device(here)
    return here


def _measure(
    family: str, here: torch.device, dtype: torch.dtype, group: device.ProcessGroup, log: RunLog
) -> dict[str, Any]:
    """`ranks`, each with its FLOP/s and its bytes/s to the next one, and bytes/s of an all-reduce of all of them."""
    log.start_phase("matmul", "Multiplying matrices on each rank.")
    flops = _matmul_flops(family, here, dtype)
    message = torch.ones(_for(MESSAGE_BYTES, family) // 4, device=here)
    to_next, all_reduce = 0.0, 0.0
    if group.world > 1:
        log.start_phase("links", "Sending from each rank to the next one.")
        to_next = _link_bytes(family, message, group)
        log.start_phase("all-reduce", "Reducing over all ranks.")
        all_reduce = _all_reduce_bytes(family, message, group)
    peak = device.peak_bytes(family)
    found = {"peak_bytes": peak, "host": socket.gethostname(), "device": str(here), "flops": flops, "to_next": to_next}
    return {"ranks": group.gather(found), "all_reduce": all_reduce, "message_bytes": message.nbytes}


def _told(measured: dict[str, Any]) -> dict[str, Any]:
    """The result in words, and what a rehearsal shows of each phase."""
    ranks = measured["ranks"]
    problems = list(device_speeds.problems(ranks))
    text = " ".join([device_speeds.summary(ranks, measured["all_reduce"]), *problems])
    return {"problems": problems, "text": text, "peak_bytes": max(rank["peak_bytes"] for rank in ranks)}


def _for(sizes: tuple[dict[str, int], int], family: str) -> int:
    return sizes[0].get(family, sizes[1])


def _seconds(family: str, work: Callable[[], object], repeats: int) -> float:
    """Mean seconds of `work`."""
    device.synchronize(family)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    device.synchronize(family)
    return (time.perf_counter() - start) / repeats


def _matmul_flops(family: str, here: torch.device, dtype: torch.dtype) -> float:
    """Sustained FLOP/s of a square matmul: a device that is throttled or shared is slow for seconds, not at once."""
    size = _for(MATRIX, family)
    left, right = (torch.randn(size, size, device=here).to(dtype) for _ in range(2))
    once = _seconds(family, lambda: left @ right, MIN_REPEATS)
    return 2 * size**3 / _seconds(family, lambda: left @ right, max(MIN_REPEATS, round(SECONDS / once)))


def _link_bytes(family: str, message: torch.Tensor, group: device.ProcessGroup) -> float:
    """Bytes per second from this rank to the next one, while no other pair sends."""
    mine = 0.0
    for sender in range(group.world):
        receiver = (sender + 1) % group.world
        group.agree()  # the other ranks wait before the measurement begins
        if group.rank == sender:
            dist.send(message, receiver)  # connects the two
            seconds = _seconds(family, partial(dist.send, message, receiver), MESSAGES)
            mine = message.nbytes / seconds
        elif group.rank == receiver:
            received = torch.empty_like(message)
            for _ in range(1 + MESSAGES):
                dist.recv(received, sender)
            device.synchronize(family)
    return mine


def _all_reduce_bytes(family: str, message: torch.Tensor, group: device.ProcessGroup) -> float:
    """Bus bandwidth in bytes per second: 2 (n - 1) / n times the size over the time, comparable between any number of
    ranks (nccl-tests, PERFORMANCE.md)."""
    work = partial(dist.all_reduce, message, op=dist.ReduceOp.MAX)  # MAX leaves a tensor of ones as it is
    repeats = round(SECONDS / _seconds(family, work, MIN_REPEATS))
    seconds = _seconds(family, work, int(group.share(max(MIN_REPEATS, repeats))))
    return float(2 * (group.world - 1) / group.world * message.nbytes / seconds)


if __name__ == "__main__":
    main()
    exit.exit_now()
