"""Minimum package versions, the dtype of AWQ models, and parameters without gradients under DDP."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AwqConfig
from transformers.quantizers.quantizer_awq import AwqQuantizer
from transformers.utils.import_utils import (
    BITSANDBYTES_MIN_VERSION,
    SCHEDULEFREE_MIN_VERSION,
    TORCHAO_MIN_VERSION,
    is_bitsandbytes_available,
    is_schedulefree_available,
    is_torchao_available,
)

from backend import registry
from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")


@cites("HW007")
def test_an_older_package_counts_as_missing() -> None:
    optimizers = registry.OPTIMIZERS
    rows = (optimizers["adamw_bnb_8bit"], optimizers["schedule_free_adamw"], optimizers["adamw_torch_8bit"])
    minimums = (BITSANDBYTES_MIN_VERSION, SCHEDULEFREE_MIN_VERSION, TORCHAO_MIN_VERSION)
    assert tuple(row.package_min_version for row in rows) == minimums
    for is_available in (is_bitsandbytes_available, is_schedulefree_available, is_torchao_available):
        assert is_available()
        assert not is_available("99"), "a minimum above the installed version"


@cites("QNT017")
def test_awq_is_loaded_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    quantizer = AwqQuantizer(AwqConfig(bits=4))
    assert quantizer.update_dtype(torch.bfloat16) is torch.float16
    assert quantizer.update_dtype(torch.float16) is torch.float16


class TwoTowers(nn.Module):
    """A vision tower and a text model; text examples use the second only."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.text = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return self.text(row).sum()


@cites("STR045")
@pytest.mark.usefixtures("group")
def test_ddp_waits_for_unused_parameters() -> None:
    for find_unused in (True, False):
        model = DistributedDataParallel(TwoTowers(), find_unused_parameters=find_unused)
        model(torch.ones(1, 2)).backward()
        if find_unused:
            model(torch.ones(1, 2)).backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        model(torch.ones(1, 2))
