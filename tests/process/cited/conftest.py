"""Each test starts and ends without a process group and accelerate's global state, and with the same environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def group(tmp_path: Path) -> None:
    """A process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
