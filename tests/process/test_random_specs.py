"""Random specs (random_specs.py). Those that pass the checks, as generated or after applying fixes, are launched and
must succeed. A sample of the refused ones is launched without the checks and must fail. docs/checks.md has the counts
of each seed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fork_server import ForkServer, rank_count
from random_specs import EXCLUDED, VALUES, random_spec, write_inputs
from report_files import Sections, read_sections, table, write_section
from training_runs import environment, log_text, losses, result, without_checks, write_plan

from backend.config.options import by_name, changes, edit, plain
from backend.inspect import inspect_inputs
from backend.machine import Machine, probe
from backend.paths import HOME
from backend.preflight import Report, preflight
from backend.rules import RULES, Case, Finding
from backend.runs import RESULT, processes
from backend.tasks.autofix import autofix

LAUNCHED_PER_SEED = int(os.environ.get("FOOTPLATE_FUZZ_LAUNCHES", 100))
REFUSED_PER_SEED = LAUNCHED_PER_SEED * 3 // 10
SEEDS = [1, 2, int(os.environ.get("FOOTPLATE_FUZZ_SEED", 3))]
# Rules that refuse a run which would succeed, but would silently ignore what its options say.
SILENT_CHANGES = {
    "PRC001": "the libraries ignore fp16 on a CPU",
    "OPT002": "bitsandbytes pages only the state of tensors with 100,000 elements or more; smaller ones need no GPU",
    "OPT020": "torchao keeps the state of tensors with fewer than 4,096 elements in 32 bits",
    "OPT022": "the average of the weights is neither evaluated nor saved",
    "OPT005": "every micro-batch is an optimizer step",
    "OPT033": "modules outside of the layers are not trained",
    "QNT002": "with OLoRA, the rest of the base weights is rounded to 4 bits again, which changes the model",
    "QNT003": "under ZeRO-3 each rank keeps the whole weight next to its shard",
    "QNT005": "the merged weights are rounded to 4 bits again",
    "LCH010": "the launcher overrides the variable on each rank",
    "PRC008": "DeepSpeed keeps fp32 state anyway, and tensor parallelism computes in bf16",
    "STR004": "the merged model is saved with the untrained weights",
    "STR005": "generations differ from those of one process",
    "STR012": "DeepSpeed steps with its CPU Adam instead",
    "STR013": "the state stays in memory",
    "STR052": "the state is not quantized",
}
SECONDS_TO_SUCCEED, SECONDS_TO_FAIL = 400, 60
DOCUMENT = HOME / "docs/checks.md"


@dataclass
class Tally:
    """The outcomes of one seed. `passed_codes`: rules that refused a spec which then succeeded."""

    drawn: int = 0
    launched: int = 0
    fixed: int = 0
    failed: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    refused: int = 0
    succeeded: int = 0
    passed_codes: Counter[str] = field(default_factory=Counter)
    refused_codes: Counter[str] = field(default_factory=Counter)


def test_every_option_is_generated_or_has_a_reason() -> None:
    assert not set(EXCLUDED) & set(VALUES)
    assert set(EXCLUDED) | set(VALUES) <= set(by_name())
    enumerable = {name for name, o in by_name().items() if o.kind in ("bool", "choice")}
    assert set(by_name()) == set(EXCLUDED) | set(VALUES) | enumerable


@pytest.fixture(scope="module")
def inputs(root: Path, tiny: Path) -> Path:
    """The folder with the models and datasets; paths of the specs are relative to it."""
    folder = root / "inputs"
    folder.mkdir()
    write_inputs(folder, tiny)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_accepted_specs_succeed_and_refused_specs_fail(seed: int, inputs: Path, fork_server: ForkServer) -> None:
    machine, tally = probe(inputs), Tally()
    for number, report, fixed in generated(seed, inputs, machine, tally):
        folder = inputs / f"{seed}-{number}"
        failure = launch(report, folder, fork_server)
        options = json.dumps(changes(report.spec), default=plain)
        label = f"seed {seed}, spec {number}{', fixed' if fixed else ''}: {options}\n"
        if report.can_run:
            tally.launched += 1
            tally.fixed += fixed
            tally.failed += [f"{label}{failure}"] if failure else []
        else:
            tally.refused += 1
            codes = {f.code for f in errors(report)}
            tally.refused_codes.update(codes)
            tally.passed_codes.update(codes if not failure else ())
            tally.false_alarms += [label] if not failure and not codes & SILENT_CHANGES.keys() else []
            tally.succeeded += not failure
        shutil.rmtree(folder)
    title = f"Seed {seed}"
    order = sorted({*read_sections(DOCUMENT), title}, key=lambda name: int(name.split()[1]))
    write_section(DOCUMENT, introduction, order, title, section(tally))
    assert not tally.failed, "\n\n".join(tally.failed)
    assert not tally.false_alarms, "refused, but the run succeeded:\n" + "\n\n".join(tally.false_alarms)


def generated(seed: int, inputs: Path, machine: Machine, tally: Tally) -> Iterator[tuple[int, Report, bool]]:
    """(number, report, whether fixes were applied), until there are enough accepted and refused specs."""
    rng = random.Random(seed)
    accepted = refused = 0
    while accepted < LAUNCHED_PER_SEED or refused < REFUSED_PER_SEED:
        tally.drawn += 1
        report = preflight(random_spec(rng), machine, inputs)
        if report.can_run and accepted < LAUNCHED_PER_SEED:
            accepted += 1
            yield tally.drawn, report, False
        elif not report.can_run:
            if refused < REFUSED_PER_SEED:
                refused += 1
                yield tally.drawn, report, False
            fixed = with_fixes(report, inputs)
            if fixed.can_run and accepted < LAUNCHED_PER_SEED:
                accepted += 1
                yield tally.drawn, fixed, True


def errors(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.level == "error"]


def with_fixes(report: Report, inputs: Path) -> Report:
    """The report after all safe fixes, and then the first fix of the first error until no error is left."""
    machine = report.machine
    safe = autofix(report.spec, lambda spec: Case(spec, machine, inspect_inputs(spec, inputs)))
    report, seen = preflight(safe.spec, machine, inputs), set[str]()
    while not report.can_run and (text := report.spec.model_dump_json()) not in seen:
        seen.add(text)
        patch = next((f.fixes[0].patch for f in errors(report) if f.fixes), None)
        if patch is None:
            break
        report = preflight(edit(report.spec, patch), machine, inputs)
    return report


def launch(report: Report, folder: Path, fork_server: ForkServer) -> str:
    """How the run failed; '' if it succeeded with a finite loss at every step."""
    if not report.can_run:
        report = replace(report, plan=without_checks(report.plan))
    write_plan(report.plan, folder)
    if report.spec.launch.launcher in ("torchrun", "python"):
        seconds = SECONDS_TO_SUCCEED if report.can_run else SECONDS_TO_FAIL
        code = fork_server.run(folder, rank_count(report.spec), env=report.plan.env, seconds=seconds)
    else:
        code = run_command(report, folder, fork_server)
    if code or not (folder / RESULT).exists():
        return f"exit {code}: {log_text(folder)[-1500:]}"
    if None in losses(folder).values():  # NaN and infinity are written as null
        return f"a loss is not finite: {log_text(folder)[-500:]}"
    return "" if result(folder)["steps"] else "no optimizer step was made"


def run_command(report: Report, folder: Path, fork_server: ForkServer) -> int:
    """The exit code of the plan's command."""
    env = {**environment(folder, fork_server.cache), **report.plan.env}
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(report.plan.argv, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            return process.wait(SECONDS_TO_SUCCEED if report.can_run else SECONDS_TO_FAIL)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            processes.terminate(folder, sigterm_seconds=0)
            process.wait(30)
            assert not processes.run_processes(folder)


HEAD = """# Checks

How often the result of the checks agrees with a launch. Written by `make soak`: random specs over all options, ten
architectures, seven dataset formats and every strategy that runs on a CPU are checked, and launched for a few steps.

- Specs that pass the checks are launched and should succeed. A spec with errors is launched after fixes: all safe
  fixes, then the first fix of each remaining error.
- A sample of the refused specs is launched without fixes and without the checks, and should fail. Some rules refuse
  runs that succeed but silently ignore an option; the column *succeeded* of a seed's table names the reason.
- Values of max_length close to the lengths of the examples are not generated. These tests start no worker process that
  tokenizes the examples, so the checks estimate their tokens from their characters and can only warn there (DAT009).
  The command line and Start wait for that process, where the model's tokenizer is on the machine.

The row of a seed describes the code at the time of its launch. Each failure was fixed afterwards or became a rule,
except a segmentation fault of seed 20261206, which did not occur in three more launches of that spec.

"""
COLUMNS = (
    "seed",
    "generated",
    "launched",
    "of these after fixes",
    "failed",
    "refused and launched",
    "of these succeeded",
)


def introduction(sections: Sections) -> str:
    """The introduction of the document, and the counts of all seeds."""
    counts = [re.findall(r"\d+", body.partition("\n")[0]) for body in sections.values()]
    rows = [[title.removeprefix("Seed "), *count] for title, count in zip(sections, counts, strict=True)]
    total = ["all", *(sum(map(int, column)) for column in zip(*counts, strict=True))]
    return HEAD + table(COLUMNS, [*rows, total])


def section(tally: Tally) -> str:
    """The counts of one seed, and the rules that refused the specs that were launched anyway."""
    counts = (
        f"{tally.drawn} specs were generated. {tally.launched} that passed the checks were launched, {tally.fixed} of "
    )
    counts += (
        f"these after fixes; {len(tally.failed)} failed. {tally.refused} that were refused were launched without the "
    )
    counts += f"checks; {tally.succeeded} succeeded."
    titles = {rule.code: rule.title for rule in RULES}
    rows = [
        (
            code,
            titles[code],
            count,
            f"{tally.passed_codes[code]}: {SILENT_CHANGES.get(code, 'together with other rules')}"
            if tally.passed_codes[code]
            else "",
        )
        for code, count in sorted(tally.refused_codes.items())
    ]
    return f"{counts}\n\n{table(('rule', 'title', 'launched', 'succeeded'), rows)}"
