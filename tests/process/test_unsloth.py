"""Unsloth, by its own way for CPUs: it computes, equally, where the rules let it; elsewhere a run ends with a sentence.

Not for every change: it is fetched, beside the newest releases of the others, and is nobody's dependency.
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
ASKED = {"train.use_unsloth": True}
DDP, ZERO2, FULL = {"parallel.strategy": "ddp"}, {"parallel.strategy": "zero2"}, {"method.kind": "full"}
KEPT = {"save.strategy": "steps", "save.steps": 2, "save.final_model": True, "save.merge_adapter": True}
ANSWERS = {"eval.num_generations": 2, "eval.max_new_tokens": 4, "train.activation_checkpointing": True}


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Unsloth where the trainings find it, without what it would bring along."""
    folder = tmp_path_factory.mktemp("unsloth")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"unsloth=={VERSION}", f"unsloth_zoo=={VERSION}"], check=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


def trained(root: Path, name: str, changes: Mapping[str, Any], cache: Path, code: int = 0) -> Path:
    folder = make_run_folder(root, name, changes)
    ranks = 2 if "parallel.strategy" in changes else 1
    TorchrunLaunch(folder, cache, ranks).wait_for_exit(code)
    return folder


@cites("UNS002")
@pytest.mark.parametrize(
    "changes", [{}, FULL, {"method.quantization": "nf4"}, DDP, {**ZERO2, **FULL}, {**KEPT, **ANSWERS}],
    ids=["lora", "full", "nf4", "ddp", "zero2", "kept"],
)  # fmt: skip
def test_it_computes_and_learns_the_same(changes: Mapping[str, Any], tmp_path: Path, cache: Path) -> None:
    """The same losses; the log of the one names its loading, and the model is what `from_pretrained` loads."""
    own, plain = (trained(tmp_path, name, {**more, **changes}, cache) for name, more in (("own", ASKED), ("plain", {})))
    assert "Unsloth (CPU): LlamaForCausalLM" in log_text(own)
    assert "Unsloth" not in log_text(plain)
    assert losses(own) == pytest.approx(losses(plain), rel=1e-4)
    if "save.merge_adapter" in changes:
        assert result(own)["model"] == result(plain)["model"]
        assert [json.loads((f / "model/config.json").read_text())["model_type"] for f in (own, plain)] == ["llama"] * 2


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
def test_what_it_would_change_ends_the_run(changes: Mapping[str, Any], part: str, tmp_path: Path, cache: Path) -> None:
    assert part in log_text(trained(tmp_path, "run", {**ASKED, **changes}, cache, 1))
