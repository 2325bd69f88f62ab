"""The rules tell the truth: what they refuse is launched past the checks and fails as they say, and its mended twin
runs (`make soak`). Plans and files are real; the libraries are imported once, in a host that forks the ranks.

A run fails with a sentence of ours that names the field. Where it is a library that cannot, it is launched without our
checks as well, and fails with the library's own words (RAW).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from host import Host, ranks
from safetensors.torch import load_file, save_file
from trainings import SMALL, environment, lay, without_checks
from transformers import GPT2Config, GPT2LMHeadModel

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.preflight import Report, preflight
from backend.rules import FAMILIES, RULES, Finding, Rule
from backend.runs import processes

SAVED = {"save.final_model": True}
EPOCHS = {"save.strategy": "epoch", "eval.strategy": "epoch"}
FOLDER = {"model.source": "path", "model.path": "model"}


@dataclass(frozen=True)
class Raw:
    """Words of the library's error, and what the failing example needs to get there with the tiny model."""

    words: str
    more: Mapping[str, Any] = field(default_factory=dict)


RAW = {
    "HW004": Raw("WandbCallback requires wandb to be installed"),
    "KRN001": Raw("FlexAttention does not support backward on CPU"),
    "KRN006": Raw("No module named 'liger_kernel'"),
    "MTH011": Raw("is shared with a parameter already managed by another FSDP group", FOLDER),
    "OPT002": Raw("Torch not compiled with CUDA enabled"),
    "OPT003": Raw("IndexError: tuple index out of range"),
    "OPT004": Raw("DeepSpeedEngine.backward() got an unexpected keyword argument 'learning_rate'"),
    "OPT007": Raw("RuntimeError: shape '[-1, 4096]' is invalid for input of size 2048"),
    "OPT009": Raw("No target modules found for OptimizerNames.GALORE_ADAMW"),
    "OPT020": Raw("optimizer_update_32bit.default does not have a sharding strategy registered"),
    "OPT021": Raw("IndexError: list index out of range"),
    "OPT024": Raw("mat1 and mat2 shapes cannot be multiplied"),
    "OPT025": Raw("in-place operations that require placement changes are not supported"),
    "OPT026": Raw("Cannot unflatten unevenly sharded tensor"),
    "PRC005": Raw("--tf32 requires Ampere or a newer GPU arch"),
    "QNT002": Raw("Please initialize PiSSA under float32, float16, or bfloat16"),
    "QNT003": Raw("'Parameter' object has no attribute 'CB'"),
    "STG003": Raw("Actual (not effective) batch size must be > 1"),
    "STG004": Raw("Label smoothing must be greater than 0.0 when using 'exo_pair' loss"),
    "STG005": Raw(".numpy() is not supported for tensor subclasses"),
    "STR003": Raw("DeepSpeed can't be used with `save_only_model` along with `load_best_model_at_end`", EPOCHS),
    "STR018": Raw("ParallelismConfig total_size (3) does not match num_processes (4)"),
    "STR019": Raw("RuntimeError: shape '[206, 32]' is invalid for input of size 13184"),
    "STR020": Raw("Resuming is not supported for models sharded at load time"),
    "STR021": Raw("is invalid for input of size"),
    "STR024": Raw("save_only_model option is not compatible with FSDP state dict type 'SHARDED_STATE_DICT'"),
    "STR027": Raw("Ulysses SP requires `position_ids` in every dataloader batch"),
    "STR028": Raw("IndexError: tuple index out of range"),
    "STR030": Raw(
        "head count 4 is not divisible by SP size 3",
        {"parallel.sequence_parallel_size": 3, "launch.nproc_per_node": 3},
    ),
    "STR032": Raw("- ds gradient_clipping=0.5 vs hf max_grad_norm=1.0"),
    "STR034": Raw("the 'elasticity' configuration block is no longer supported"),
    "STR035": Raw("Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save`", SAVED),
    "STR038": Raw("`GPT2LMHeadModel` has no `tp_plan`", FOLDER),
    "STR040": Raw("pre-scale gradients is not yet supported with ZeRO-2"),
    "STR042": Raw("FSDP2 does not support LOCAL_STATE_DICT"),
    "STR047": Raw("mat1 and mat2 shapes cannot be multiplied", FOLDER),
    "TRN006": Raw("requires the saving steps to be a round multiple of the evaluation steps"),
}

PROVEN = [rule for rule in RULES if rule.proof == "launch"]
# The first two of each family, and those with a scene, at every change; all in the long proofs, where twins run too.
# Both launches of what needs DeepSpeed, or many ranks, take longer.
OURS = sorted(rule.code for rule in PROVEN if rule.code not in RAW or not RAW[rule.code].more)
FIRST = {code for family in FAMILIES for code in [code for code in OURS if code.startswith(family)][:2]}

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(20)
]


def write_rows(root: Path, rows: list[Any]) -> None:
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_template(root: Path) -> None:
    (root / "model/chat_template.jinja").unlink()
    assert "chat_template" not in (root / "model/tokenizer_config.json").read_text()


def tied(root: Path) -> None:
    """One matrix reads words and writes them."""
    config = json.loads((root / "model/config.json").read_text())
    (root / "model/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(root / "model/model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, root / "model/model.safetensors", {"format": "pt"})


def gpt2(root: Path) -> None:
    config = json.loads((root / "model/config.json").read_text())
    sizes = {"vocab_size": config["vocab_size"], "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 2048}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(root / "model")


# What lies in the folder when the rule's bad example is about files; otherwise 20 good rows and a good model.
SCENES: dict[str, Callable[[Path], None]] = {
    "DAT002": lambda root: (root / "data.jsonl").unlink(),
    "DAT003": lambda root: write_rows(root, [*ROWS[:2], {"messages": 7}, *ROWS[2:]]),
    "DAT006": lambda root: write_rows(root, ROWS[:1]),
    "MDL001": lambda root: (root / "model/config.json").unlink(),
    "MDL003": without_template,
    "MTH011": tied,
    "STR038": gpt2,
    "STR047": gpt2,
}


SOME = [
    rule if rule.code in {*FIRST, *SCENES} & {*OURS} else pytest.param(rule, marks=pytest.mark.soak, id=rule.code)
    for rule in PROVEN
]


@pytest.fixture(scope="module")
def cache(cache: Path) -> Path:
    """Models that need no network: the tiny one under both names."""
    shutil.copytree(cache / "models/tiny-llama", cache / "models/smollm2-135m-instruct")
    return cache


def good_scene(root: Path, cache: Path) -> None:
    write_rows(root, ROWS)
    shutil.copytree(cache / "models/tiny-llama", root / "model", dirs_exist_ok=True)


def launch(found: Report, folder: Path, cache: Path, host: Host, checks: bool = True) -> tuple[int, str]:
    """(exit code, log) of the plan, whatever the findings say; without `checks` the trainer runs no rules either."""
    plan = found.plan if checks else without_checks(found.plan)
    lay(plan, folder)
    if found.spec.parallel.strategy == "ddp" and found.spec.launch.launcher == "torchrun":
        with (folder / "log.txt").open("w") as log:
            env = {**environment(folder, cache), **plan.env}
            code = subprocess.run(
                plan.argv, cwd=folder, env=env, stdout=log, stderr=log, timeout=100, check=False
            ).returncode
        assert not processes.carriers(folder)
    else:
        code = host.run(folder, ranks(found.spec), env=plan.env)
    return code, (folder / "log.txt").read_text()


def test_some_are_proven() -> None:
    assert {rule.code for rule in PROVEN} >= {*SCENES, *RAW, "LCH001", "MTH002", "TRN006"}
    assert all(rule.level == "error" for rule in PROVEN)


@pytest.mark.parametrize("rule", SOME, ids=lambda rule: rule.code)
def test_what_is_refused_fails(rule: Rule, tmp_path: Path, cache: Path, host: Host) -> None:
    refused(rule, tmp_path, cache, host)


@pytest.mark.soak
@pytest.mark.parametrize("rule", PROVEN, ids=lambda rule: rule.code)
def test_it_fails_without_the_rules(rule: Rule, tmp_path: Path, cache: Path, host: Host) -> None:
    """The rules are skipped: what fails is the library, or the trainer at the loaded model and the read data."""
    found, _ = bad(rule, tmp_path, cache)
    code, log = launch(found, tmp_path / "refused", cache, host, checks=False)
    assert code == 1, log
    if rule.code in RAW:
        assert RAW[rule.code].words in log, log


@pytest.mark.soak
@pytest.mark.parametrize("rule", PROVEN, ids=lambda rule: rule.code)
def test_its_mended_twin_runs(rule: Rule, tmp_path: Path, cache: Path, host: Host) -> None:
    found, finding = refused(rule, tmp_path, cache, host)
    spec = found.spec
    if finding.fixes:
        spec = edit(spec, finding.fixes[0].patch)
    else:
        good_scene(tmp_path, cache)
    twin = preflight(spec, found.machine, tmp_path)
    assert twin.can_run, twin.findings
    code, log = launch(twin, tmp_path / "mended", cache, host)
    assert code == 0, log


def bad(rule: Rule, tmp_path: Path, cache: Path) -> tuple[Report, Finding]:
    """The bad example on this machine, in its scene, and what the rule says of it."""
    machine = probe(tmp_path)
    good_scene(tmp_path, cache)
    SCENES.get(rule.code, lambda root: None)(tmp_path)
    more = RAW[rule.code].more if rule.code in RAW else {}
    spec = edit(RunSpec(), {**SMALL, "data.max_length": 2048, **rule.fails_on.patch, **more})
    found = preflight(spec, machine, tmp_path)
    if rule.code == "HW001" and machine.device == "cuda":
        pytest.skip("the device that the example misses is here")
    return found, next(f for f in found.findings if f.code == rule.code)


def refused(rule: Rule, tmp_path: Path, cache: Path, host: Host) -> tuple[Report, Finding]:
    """The failing example, started although the page refuses it: the trainer runs the same rule, and ends with its
    sentence."""
    found, finding = bad(rule, tmp_path, cache)
    code, log = launch(found, tmp_path / "refused", cache, host)
    assert code == 1, log
    said = log.strip().splitlines()[-1]
    assert any(name in said for name in finding.fields) or said in finding.message, log
    assert "Traceback" not in log
    return found, finding
