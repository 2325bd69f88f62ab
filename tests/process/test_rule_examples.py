"""The failing examples of the rules fail when they are launched, and the fixed specs run.

The trainer runs the rules too and fails with the finding. Without the rules the library fails with its own error
(LIBRARY_ERRORS), or the trainer at the loaded model and data. Plans and files are real; the libraries are imported
once, in a fork server. `make soak` runs all of it.
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
from fork_server import ForkServer, rank_count
from safetensors.torch import load_file, save_file
from training_runs import TINY_RUN, environment, without_checks, write_plan
from transformers import GPT2Config, GPT2LMHeadModel

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import probe
from backend.preflight import Report, preflight
from backend.rules import FAMILIES, RULES, Finding, Rule
from backend.runs import processes

SAVED = {"save.final_model": True}
EPOCHS = {"save.strategy": "epoch", "eval.strategy": "epoch"}
STEP_1 = {"save.strategy": "steps", "save.steps": 1}
LOCAL_MODEL = {"model.source": "path", "model.path": "model"}


@dataclass(frozen=True)
class LibraryError:
    """Part of the library's error message, and the options that the failing example needs to reach it with the tiny
    model."""

    message: str
    more: Mapping[str, Any] = field(default_factory=dict)


LIBRARY_ERRORS = {
    "HW004": LibraryError("WandbCallback requires wandb to be installed"),
    "KRN001": LibraryError("FlexAttention does not support backward on CPU"),
    "KRN006": LibraryError("No module named 'liger_kernel'"),
    "MTH011": LibraryError("is shared with a parameter already managed by another FSDP group", LOCAL_MODEL),
    "OPT002": LibraryError("Torch not compiled with CUDA enabled"),
    "OPT003": LibraryError("IndexError: tuple index out of range"),
    "OPT004": LibraryError("DeepSpeedEngine.backward() got an unexpected keyword argument 'learning_rate'"),
    "OPT007": LibraryError("train.optim: Adam-mini cannot train"),  # before the library reshapes a gradient
    "OPT009": LibraryError("No target modules found for OptimizerNames.GALORE_ADAMW"),
    "OPT020": LibraryError("optimizer_update_32bit.default does not have a sharding strategy registered"),
    "OPT021": LibraryError("IndexError: list index out of range"),
    "OPT024": LibraryError("mat1 and mat2 shapes cannot be multiplied"),
    "OPT025": LibraryError("in-place operations that require placement changes are not supported"),
    "OPT026": LibraryError("Cannot unflatten unevenly sharded tensor"),
    "OPT028": LibraryError("Unexpected value type <class 'galore_torch.galore_projector.GaLoreProjector'>", STEP_1),
    "PRC005": LibraryError("--tf32 requires Ampere or a newer GPU arch"),
    "QNT002": LibraryError("Please initialize PiSSA under float32, float16, or bfloat16"),
    "QNT003": LibraryError("'Parameter' object has no attribute 'CB'"),
    "STG003": LibraryError("Actual (not effective) batch size must be > 1"),
    "STG004": LibraryError("Label smoothing must be greater than 0.0 when using 'exo_pair' loss"),
    "STG005": LibraryError(".numpy() is not supported for tensor subclasses"),
    "STR003": LibraryError(
        "DeepSpeed can't be used with `save_only_model` along with `load_best_model_at_end`", EPOCHS
    ),
    "STR018": LibraryError("ParallelismConfig total_size (3) does not match num_processes (4)"),
    "STR019": LibraryError("RuntimeError: shape '[206, 32]' is invalid for input of size 13184"),
    "STR020": LibraryError("Resuming is not supported for models sharded at load time"),
    "STR021": LibraryError("is invalid for input of size"),
    "STR024": LibraryError("save_only_model option is not compatible with FSDP state dict type 'SHARDED_STATE_DICT'"),
    "STR027": LibraryError("Ulysses SP requires `position_ids` in every dataloader batch"),
    "STR028": LibraryError("IndexError: tuple index out of range"),
    "STR030": LibraryError(
        "head count 4 is not divisible by SP size 3",
        {"parallel.sequence_parallel_size": 3, "launch.nproc_per_node": 3},
    ),
    "STR032": LibraryError("- ds gradient_clipping=0.5 vs hf max_grad_norm=1.0"),
    "STR034": LibraryError("the 'elasticity' configuration block is no longer supported"),
    "STR035": LibraryError("Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save`", SAVED),
    "STR038": LibraryError("`GPT2LMHeadModel` has no `tp_plan`", LOCAL_MODEL),
    "STR040": LibraryError("pre-scale gradients is not yet supported with ZeRO-2"),
    "STR042": LibraryError("FSDP2 does not support LOCAL_STATE_DICT"),
    "TRN006": LibraryError("requires the saving steps to be a round multiple of the evaluation steps"),
}

LAUNCHED_RULES = [rule for rule in RULES if rule.proof == "launch"]
# `make test` launches the first two rules of each family and those with their own inputs; `make soak` launches all.
# Those that need DeepSpeed or many ranks take longer.
QUICK_RULES = sorted(
    rule.code for rule in LAUNCHED_RULES if rule.code not in LIBRARY_ERRORS or not LIBRARY_ERRORS[rule.code].more
)
QUICK_SUBSET = {code for family in FAMILIES for code in [code for code in QUICK_RULES if code.startswith(family)][:2]}

EXAMPLES = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(20)
]


def write_examples(root: Path, examples: list[Any]) -> None:
    (root / "data.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))


def without_chat_template(root: Path) -> None:
    (root / "model/chat_template.jinja").unlink()
    assert "chat_template" not in (root / "model/tokenizer_config.json").read_text()


def tie_embeddings(root: Path) -> None:
    """Tie the input embeddings and the output layer."""
    config = json.loads((root / "model/config.json").read_text())
    (root / "model/config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(root / "model/model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, root / "model/model.safetensors", {"format": "pt"})


def replace_by_gpt2(root: Path) -> None:
    config = json.loads((root / "model/config.json").read_text())
    sizes = {"vocab_size": config["vocab_size"], "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 2048}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(root / "model")


# Changes of the input files that a failing example needs; the others use 20 valid examples and a valid model.
INVALID_INPUTS: dict[str, Callable[[Path], None]] = {
    "DAT002": lambda root: (root / "data.jsonl").unlink(),
    "DAT003": lambda root: write_examples(root, [*EXAMPLES[:2], {"messages": 7}, *EXAMPLES[2:]]),
    "DAT006": lambda root: write_examples(root, EXAMPLES[:1]),
    "MDL001": lambda root: (root / "model/config.json").unlink(),
    "MDL003": without_chat_template,
    "MTH011": tie_embeddings,
    "STR038": replace_by_gpt2,
}


RULE_PARAMETERS = [
    rule
    if rule.code in {*QUICK_SUBSET, *INVALID_INPUTS} & {*QUICK_RULES}
    else pytest.param(rule, marks=pytest.mark.soak, id=rule.code)
    for rule in LAUNCHED_RULES
]


@pytest.fixture(scope="module")
def cache(cache: Path) -> Path:
    """The built-in models without a network: the tiny model under both names."""
    shutil.copytree(cache / "models/tiny-llama", cache / "models/smollm2-135m-instruct")
    return cache


def valid_inputs(root: Path, cache: Path) -> None:
    write_examples(root, EXAMPLES)
    shutil.copytree(cache / "models/tiny-llama", root / "model", dirs_exist_ok=True)


def launch(report: Report, folder: Path, cache: Path, fork_server: ForkServer, checks: bool = True) -> tuple[int, str]:
    """(exit code, log) of the plan, whatever the findings say; without `checks` the trainer runs no rules either."""
    plan = report.plan if checks else without_checks(report.plan)
    write_plan(plan, folder)
    if report.spec.parallel.strategy == "ddp" and report.spec.launch.launcher == "torchrun":
        with (folder / "log.txt").open("w") as log:
            env = {**environment(folder, cache), **plan.env}
            code = subprocess.run(
                plan.argv, cwd=folder, env=env, stdout=log, stderr=log, timeout=100, check=False
            ).returncode
        assert not processes.run_processes(folder)
    else:
        code = fork_server.run(folder, rank_count(report.spec), env=plan.env)
    return code, (folder / "log.txt").read_text()


def test_launched_rules_are_errors() -> None:
    assert {rule.code for rule in LAUNCHED_RULES} >= {*INVALID_INPUTS, *LIBRARY_ERRORS, "LCH001", "MTH002", "TRN006"}
    assert all(rule.level == "error" for rule in LAUNCHED_RULES)


@pytest.mark.parametrize("rule", RULE_PARAMETERS, ids=lambda rule: rule.code)
def test_rejected_spec_fails(rule: Rule, tmp_path: Path, cache: Path, fork_server: ForkServer) -> None:
    assert_rejected(rule, tmp_path, cache, fork_server)


@pytest.mark.soak
@pytest.mark.parametrize("rule", LAUNCHED_RULES, ids=lambda rule: rule.code)
def test_rejected_spec_fails_without_the_rules(
    rule: Rule, tmp_path: Path, cache: Path, fork_server: ForkServer
) -> None:
    """The library fails, or the trainer does once the model and the data are loaded."""
    report, _ = failing_report(rule, tmp_path, cache)
    code, log = launch(report, tmp_path / "rejected", cache, fork_server, checks=False)
    assert code == 1, log
    if rule.code in LIBRARY_ERRORS:
        assert LIBRARY_ERRORS[rule.code].message in log, log


@pytest.mark.soak
@pytest.mark.parametrize("rule", LAUNCHED_RULES, ids=lambda rule: rule.code)
def test_fixed_spec_runs(rule: Rule, tmp_path: Path, cache: Path, fork_server: ForkServer) -> None:
    report, finding = assert_rejected(rule, tmp_path, cache, fork_server)
    spec = report.spec
    if finding.fixes:
        spec = edit(spec, finding.fixes[0].patch)
    else:
        valid_inputs(tmp_path, cache)
    fixed = preflight(spec, report.machine, tmp_path)
    assert fixed.can_run, fixed.findings
    code, log = launch(fixed, tmp_path / "fixed", cache, fork_server)
    assert code == 0, log


def failing_report(rule: Rule, tmp_path: Path, cache: Path) -> tuple[Report, Finding]:
    """The report of the failing example on this machine, and the rule's finding."""
    machine = probe(tmp_path)
    valid_inputs(tmp_path, cache)
    INVALID_INPUTS.get(rule.code, lambda root: None)(tmp_path)
    more = LIBRARY_ERRORS[rule.code].more if rule.code in LIBRARY_ERRORS else {}
    spec = edit(RunSpec(), {**TINY_RUN, "data.max_length": 2048, **rule.fails_on.patch, **more})
    report = preflight(spec, machine, tmp_path)
    if rule.code == "HW001" and machine.device == "cuda":
        pytest.skip("this machine has the device that the example needs to be missing")
    return report, next(f for f in report.findings if f.code == rule.code)


def assert_rejected(rule: Rule, tmp_path: Path, cache: Path, fork_server: ForkServer) -> tuple[Report, Finding]:
    """The failing example, launched in spite of its errors: the trainer runs the same rule and ends with its text."""
    found, finding = failing_report(rule, tmp_path, cache)
    code, log = launch(found, tmp_path / "rejected", cache, fork_server)
    assert code == 1, log
    last_line = log.strip().splitlines()[-1]
    assert any(name in last_line for name in finding.fields) or last_line in finding.message, log
    assert "Traceback" not in log
    return found, finding
