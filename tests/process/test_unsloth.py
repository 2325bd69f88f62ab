"""Unsloth on a CPU: the same losses where the rules allow it; otherwise the run ends with an error.

Runs in `make soak` only: Unsloth is downloaded for this test and is not a dependency.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cited import cites
from training_runs import TorchrunLaunch, log_text, losses, make_run_folder, result

pytestmark = pytest.mark.soak
VERSION = "2026.10.9"
UNSLOTH = {"train.use_unsloth": True}
DDP, ZERO2, FULL = {"parallel.strategy": "ddp"}, {"parallel.strategy": "zero2"}, {"method.kind": "full"}
SAVING = {"save.strategy": "steps", "save.steps": 2, "save.final_model": True, "save.merge_adapter": True}
GENERATION = {"eval.num_generations": 2, "eval.max_new_tokens": 4, "train.activation_checkpointing": True}


@pytest.fixture(scope="module", autouse=True)
def install_unsloth(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Install Unsloth without its dependencies into a folder on PYTHONPATH."""
    folder = tmp_path_factory.mktemp("unsloth")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"unsloth=={VERSION}", f"unsloth_zoo=={VERSION}"], check=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def train(root: Path, name: str, changes: Mapping[str, Any], cache: Path, code: int = 0) -> Path:
    folder = make_run_folder(root, name, changes)
    ranks = 2 if "parallel.strategy" in changes else 1
    TorchrunLaunch(folder, cache, ranks).wait_for_exit(code)
    return folder


@cites("UNS002")
@pytest.mark.parametrize(
    "changes", [{}, FULL, {"method.quantization": "nf4"}, DDP, {**ZERO2, **FULL}, {**SAVING, **GENERATION}],
    ids=["lora", "full", "nf4", "ddp", "zero2", "saving"],
)  # fmt: skip
def test_losses_match_training_without_unsloth(changes: Mapping[str, Any], tmp_path: Path, cache: Path) -> None:
    """The log names Unsloth, and the saved model is the one that `from_pretrained` loads."""
    with_unsloth, without_unsloth = (
        train(tmp_path, name, {**more, **changes}, cache) for name, more in (("own", UNSLOTH), ("plain", {}))
    )
    assert "Unsloth (CPU): LlamaForCausalLM" in log_text(with_unsloth)
    assert "Unsloth" not in log_text(without_unsloth)
    assert losses(with_unsloth) == pytest.approx(losses(without_unsloth), rel=1e-4)
    if "save.merge_adapter" in changes:
        assert result(with_unsloth)["model"] == result(without_unsloth)["model"]
        assert [
            json.loads((f / "model/config.json").read_text())["model_type"] for f in (with_unsloth, without_unsloth)
        ] == ["llama"] * 2


@cites("UNS003", "UNS005", "UNS006")
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"parallel.strategy": "zero3"}, "DeepSpeed Zero-3 is not compatible with passing a `device_map`"),
        ({"data.packing": True}, "data.packing: Unsloth took off instead of on"),
        ({"method.quantization": "int8"}, "method.quantization: Unsloth took load_in_8bit None instead of True"),
        (
            {"train.optim": "adamw_bnb_8bit"},
            "Unsloth took adamw_torch_fused instead of adamw_bnb_8bit",
        ),
    ],
)
def test_silently_changed_options_end_the_run(
    changes: Mapping[str, Any], part: str, tmp_path: Path, cache: Path
) -> None:
    assert part in log_text(train(tmp_path, "run", {**UNSLOTH, **changes}, cache, 1))
