"""Random specs (fuzzed.py): what the checks let through is launched and must run, drawn so or mended by fixes alone;
of what they refuse a sample is launched past them. The outcome becomes docs/checks.md, a row for each seed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from documents import Sections, keep, known, table
from fuzzed import FIXED, VALUES, draw, scene
from host import Host, ranks
from trainings import environment, lay, losses, result, text

from backend.config.options import by_name, changes, edit
from backend.inspect import inspect_inputs
from backend.machine import Machine, probe
from backend.paths import HOME
from backend.preflight import Report, preflight
from backend.rules import RULES, Case, Finding
from backend.rules.autofix import autofix
from backend.runs import RESULT
from backend.runs import processes as running

LAUNCHED, REFUSED = 100, 30  # of each seed
SEEDS = [1, 2, int(os.environ.get("FOOTPLATE_FUZZ_SEED", 3))]
# What is refused although a run would come to its end: it would not be the run that was asked for.
SILENT = {
    "PRC001": "the libraries pass over fp16 on a CPU",
    "LCH010": "a launcher gives each rank values of its own instead",
}
SECONDS, WAITED = 400, 60  # for what should run, and what should fail
DOCUMENT = HOME / "docs/checks.md"


@dataclass
class Tally:
    """What came of one seed's specs. `ran`: codes of specs that are refused, and yet ended well."""

    drawn: int = 0
    launched: int = 0
    mended: int = 0
    failed: list[str] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    refused: int = 0
    ended: int = 0
    ran: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)


def test_every_option_is_drawn_or_says_why_not() -> None:
    assert not set(FIXED) & set(VALUES)
    assert set(FIXED) | set(VALUES) <= set(by_name())
    plain = {name for name, o in by_name().items() if o.kind in ("bool", "choice")}
    assert set(by_name()) == set(FIXED) | set(VALUES) | plain


@pytest.fixture(scope="module")
def place(root: Path, tiny: Path) -> Path:
    """The folder that paths start at."""
    found = root / "place"
    found.mkdir()
    scene(found, tiny)
    return found


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_what_passes_runs_and_what_is_refused_fails(seed: int, place: Path, host: Host) -> None:
    machine, tally = probe(place), Tally()
    for number, found, mended in drawn(seed, place, machine, tally):
        folder = place / f"{seed}-{number}"
        wrong = launch(found, folder, host)
        told = f"seed {seed}, spec {number}{', mended' if mended else ''}: {json.dumps(changes(found.spec))}\n"
        if found.can_run:
            tally.launched += 1
            tally.mended += mended
            tally.failed += [f"{told}{wrong}"] if wrong else []
        else:
            tally.refused += 1
            codes = {f.code for f in errors(found)}
            tally.seen.update(codes)
            tally.ran.update(codes if not wrong else ())
            tally.alarms += [told] if not wrong and not codes & SILENT.keys() else []
            tally.ended += not wrong
        shutil.rmtree(folder)
    title = f"Seed {seed}"
    keep(
        DOCUMENT, head, sorted({*known(DOCUMENT), title}, key=lambda name: int(name.split()[1])), title, section(tally)
    )
    assert not tally.failed, "\n\n".join(tally.failed)
    assert not tally.alarms, "refused, and nothing was wrong:\n" + "\n\n".join(tally.alarms)


def drawn(seed: int, place: Path, machine: Machine, tally: Tally) -> Iterator[tuple[int, Report, bool]]:
    """(number, judgement, whether fixes made it good), until enough of both kinds are there."""
    dice = random.Random(seed)
    good = bad = 0
    while good < LAUNCHED or bad < REFUSED:
        tally.drawn += 1
        found = preflight(draw(dice), machine, place)
        if found.can_run and good < LAUNCHED:
            good += 1
            yield tally.drawn, found, False
        elif not found.can_run:
            if bad < REFUSED:
                bad += 1
                yield tally.drawn, found, False
            better = mended(found, place)
            if better.can_run and good < LAUNCHED:
                good += 1
                yield tally.drawn, better, True


def errors(found: Report) -> list[Finding]:
    return [f for f in found.findings if f.level == "error"]


def mended(found: Report, place: Path) -> Report:
    """Where the one button leads, and then clicks on the first fix of the first error that is left."""
    machine = found.machine
    safe = autofix(found.spec, lambda spec: Case(spec, machine, inspect_inputs(spec, place)))
    found, seen = preflight(safe.spec, machine, place), set[str]()
    while not found.can_run and (text := found.spec.model_dump_json()) not in seen:
        seen.add(text)
        patch = next((f.fixes[0].patch for f in errors(found) if f.fixes), None)
        if patch is None:
            break
        found = preflight(edit(found.spec, patch), machine, place)
    return found


def launch(found: Report, folder: Path, host: Host) -> str:
    """What went wrong; '' if it ended well, and every loss was a number."""
    lay(found.plan, folder)
    if found.spec.launch.launcher in ("torchrun", "python"):
        seconds = SECONDS if found.can_run else WAITED
        code = host.run(folder, ranks(found.spec), env=found.plan.env, seconds=seconds)
    else:
        code = command(found, folder, host)
    if code or not (folder / RESULT).exists():
        return f"exit {code}: {text(folder)[-1500:]}"
    if None in losses(folder).values():  # how the journal writes what is no number
        return f"a loss is no number: {text(folder)[-500:]}"
    return "" if result(folder)["steps"] else "no step was made"


def command(found: Report, folder: Path, host: Host) -> int:
    """The exit code of the plan's own command."""
    env = {**environment(folder, host.cache), **found.plan.env}
    with (folder / "log.txt").open("w") as log:
        ended = subprocess.Popen(found.plan.argv, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            return ended.wait(SECONDS if found.can_run else WAITED)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            running.sweep(folder, gentle=0)
            ended.wait(30)
            assert not running.carriers(folder)


HEAD = """# Checks, by launch

Written by `make soak`: random specs over all options, on ten architectures, seven formats of rows and every strategy
that a CPU has, a few steps each. What the checks let through is launched and must end well: as it was drawn, or mended
by the one button for safe fixes and clicks on the first fix of what is left. Of what they refuse a sample is launched
past them, and must fail; or a rule says why a run that ends well is not the one that was asked for. Cut-offs near the
rows' own lengths are not drawn: tokens are estimated from characters, so there the checks warn (DAT009) and cannot be
certain that no answer is left.

A seed's row tells of the code as it was when the seed was launched; what failed was mended afterwards, or got a rule.

"""
COLUMNS = ("seed", "drawn", "launched", "of them mended by clicks", "failed", "refused and launched", "ended well")


def head(known: Sections) -> str:
    """What the document is, and the counts of all seeds."""
    counts = [re.findall(r"\d+", body.partition("\n")[0]) for body in known.values()]
    rows = [[title.removeprefix("Seed "), *count] for title, count in zip(known, counts, strict=True)]
    total = ["all", *(sum(map(int, column)) for column in zip(*counts, strict=True))]
    return HEAD + table(COLUMNS, [*rows, total])


def section(tally: Tally) -> str:
    """The counts of one seed, and the rules that refused what was launched past them."""
    said = (
        f"{tally.drawn} specs were drawn. {tally.launched} that pass were launched, {tally.mended} of them mended by "
    )
    said += f"clicks; {len(tally.failed)} failed. {tally.refused} that are refused were launched past the checks, and "
    said += f"{tally.ended} ended well."
    titles = {rule.code: rule.title for rule in RULES}
    rows = [
        (
            code,
            titles[code],
            count,
            f"{tally.ran[code]}: {SILENT.get(code, 'beside others')}" if tally.ran[code] else "",
        )
        for code, count in sorted(tally.seen.items())
    ]
    return f"{said}\n\n{table(('rule', 'says', 'launched', 'ended well'), rows)}"
