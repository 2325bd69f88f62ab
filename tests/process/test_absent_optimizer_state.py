"""FSDP2: a parameter that never has a gradient has no optimizer state, and the run can be resumed anyway."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard

from backend.train.patches import accelerate_fsdp2_absent_state

ACCELERATOR: Any = SimpleNamespace(process_index=0, num_processes=1, wait_for_everyone=lambda: None)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fsdp_utils, "logger", logging.getLogger())  # accelerate's needs its state
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.used(hidden)


def train_a_step(model: Model, optimizer: torch.optim.Optimizer, value: float) -> None:
    model(torch.full((1, 4), value)).sum().backward()
    optimizer.step()


def sharded() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def moments(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Index of a parameter -> its first moment."""
    states = optimizer.state_dict()["state"]
    return {index: state["exp_avg"].full_tensor() for index, state in states.items()}


@pytest.mark.filterwarnings("ignore")  # torch and accelerate, about CPU and a single process
@pytest.mark.parametrize("state_dict_type", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_states_that_a_checkpoint_has_are_loaded(state_dict_type: str, group: None, tmp_path: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=state_dict_type)
    plugin.set_state_dict_type()
    model, optimizer = sharded()
    train_a_step(model, optimizer, 1.0)
    assert len(optimizer.state) == 2, "weight and bias of the layer that is used"
    fsdp_utils.save_fsdp_optimizer(plugin, ACCELERATOR, optimizer, model, tmp_path)
    saved = moments(optimizer)
    model, optimizer = sharded()
    with pytest.raises((RuntimeError, CheckpointException), match="Missing"):
        accelerate_fsdp2_absent_state.original(plugin, ACCELERATOR, optimizer, model, tmp_path)
    model, optimizer = sharded()
    accelerate_fsdp2_absent_state.load_optimizer(plugin, ACCELERATOR, optimizer, model, tmp_path)
    assert all(torch.equal(moment, moments(optimizer)[name]) for name, moment in saved.items())
    train_a_step(model, optimizer, 1.0)
