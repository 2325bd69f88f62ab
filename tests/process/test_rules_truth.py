"""The rules tell the truth: what they refuse is launched past the checks and fails as they say, and its mended twin
runs (`make soak`). Plans and files are real; the libraries are imported once, in a host that forks the ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host import Host
from trainings import SMALL, environment

from backend import catalog, derived
from backend.judge import Judgement, judge
from backend.machine import Machine, probe
from backend.options import edit
from backend.rules import FAMILIES, RULES, Finding, Rule
from backend.run import processes
from backend.spec import RunSpec

PROVEN = [rule for rule in RULES if rule.proof == "launch"]
# The first two of each family, and those with a scene, at every change; all in the long proofs, where twins run too.
FIRST = {code for family in FAMILIES for code in sorted(r.code for r in PROVEN if r.code.startswith(family))[:2]}

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(20)
]


def write_rows(root: Path, rows: list[Any]) -> None:
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_template(root: Path) -> None:
    (root / "model/chat_template.jinja").unlink()
    assert "chat_template" not in (root / "model/tokenizer_config.json").read_text()


# What lies in the folder when the rule's bad example is about files; otherwise 20 good rows and a good model.
SCENES: dict[str, Callable[[Path], None]] = {
    "DAT002": lambda root: (root / "rows.jsonl").unlink(),
    "DAT003": lambda root: write_rows(root, [*ROWS[:2], {"messages": 7}, *ROWS[2:]]),
    "DAT006": lambda root: write_rows(root, ROWS[:1]),
    "MDL001": lambda root: (root / "model/config.json").unlink(),
    "MDL003": without_template,
}


SOME = [
    rule if rule.code in {*FIRST, *SCENES} else pytest.param(rule, marks=pytest.mark.soak, id=rule.code)
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


def launch(found: Judgement, folder: Path, cache: Path, host: Host) -> tuple[int, str]:
    """(exit code, log) of the plan, whatever the findings say."""
    folder.mkdir()
    plan = found.plan
    for name, text in plan.files.items():
        (folder / name).write_text(text)
    if found.spec.parallel.strategy == "ddp" and found.spec.launch.launcher == "torchrun":
        with (folder / "log.txt").open("w") as log:
            env = {**environment(folder, cache), **plan.env}
            code = subprocess.run(
                plan.argv, cwd=folder, env=env, stdout=log, stderr=log, timeout=100, check=False
            ).returncode
        assert not processes.carriers(folder)
    else:
        many = found.spec.parallel.strategy in catalog.MANY and found.spec.launch.launcher != "python"
        ranks = derived.processes(found.spec) if many else 0
        code = host.run(folder, ranks, env=plan.env)
    return code, (folder / "log.txt").read_text()


def test_some_are_proven() -> None:
    assert {rule.code for rule in PROVEN} >= {*SCENES, "LCH001", "MTH002", "TRN006"}
    assert all(rule.level == "error" for rule in PROVEN)


@pytest.mark.parametrize("rule", SOME, ids=lambda rule: rule.code)
def test_what_is_refused_fails(rule: Rule, tmp_path: Path, cache: Path, host: Host) -> None:
    refused(rule, tmp_path, cache, host)


@pytest.mark.soak
@pytest.mark.parametrize("rule", PROVEN, ids=lambda rule: rule.code)
def test_its_mended_twin_runs(rule: Rule, tmp_path: Path, cache: Path, host: Host) -> None:
    machine, spec, finding = refused(rule, tmp_path, cache, host)
    if finding.fixes:
        spec = edit(spec, finding.fixes[0].patch)
    else:
        good_scene(tmp_path, cache)
    twin = judge(spec, machine, tmp_path)
    assert twin.can_run, twin.findings
    code, log = launch(twin, tmp_path / "mended", cache, host)
    assert code == 0, log


def refused(rule: Rule, tmp_path: Path, cache: Path, host: Host) -> tuple[Machine, RunSpec, Finding]:
    """The bad example, launched past the checks: it fails with a sentence that names the field."""
    machine = probe(tmp_path)
    good_scene(tmp_path, cache)
    SCENES.get(rule.code, lambda root: None)(tmp_path)
    spec = edit(RunSpec(), {**SMALL, "data.max_length": 2048, **rule.bad.patch})
    found = judge(spec, machine, tmp_path)
    if rule.code == "HW001" and machine.device == "cuda":
        pytest.skip("the device that the example misses is here")
    finding = next(f for f in found.findings if f.code == rule.code)
    code, log = launch(found, tmp_path / "refused", cache, host)
    assert code == 1, log
    said = log.strip().splitlines()[-1]
    assert any(name in said for name in finding.fields) or said in finding.message, log
    assert "Traceback" not in log
    return machine, spec, finding
