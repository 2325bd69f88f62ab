"""The commands that need no run: check, plan, estimate, presets, rules, docs, ui.

Floor 5. Imports: below. `__main__.py` has the arguments, `watching.py` the commands on runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend import docs as documents
from backend import presets as files
from backend.glance import wait_for_architecture
from backend.judge import Judgement, described, judge
from backend.machine import Machine, describe, probe, read
from backend.options import Problem, SpecError, edit
from backend.rules import RULES, Finding
from backend.spec import Launch, RunSpec

MARKS = {"error": "error  ", "warning": "warning", "advice": "advice "}


def show(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=list))


def launchers() -> tuple[str, ...]:
    """The launchers that a spec may name."""
    return typing.get_args(Launch.model_fields["launcher"].annotation)


def asked(arguments: argparse.Namespace) -> RunSpec:
    """The spec that the command line names, with every --set applied. Raises SpecError."""
    changes = {}
    for change in arguments.set:
        name, equals, value = change.partition("=")
        if not equals:
            raise SpecError([Problem("", f"--set {change}: write section.field=value")])
        changes[name.strip()] = value
    return edit(files.read(arguments.spec), changes)


def target(arguments: argparse.Namespace) -> Machine:
    """The machine described in --machine, or this one."""
    return read(arguments.machine) if arguments.machine else probe(Path.cwd())


def judged(arguments: argparse.Namespace) -> Judgement:
    """What SPEC on the machine comes to."""
    spec = asked(arguments)
    wait_for_architecture(spec, Path.cwd())
    return judge(spec, target(arguments), Path.cwd())


def check(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if one is an error."""
    found = judged(arguments)
    if arguments.json:
        show({"can_run": found.can_run, "findings": [asdict(f) for f in found.findings]})
    else:
        print_findings(found)
    return 0 if found.can_run else 1


def print_findings(found: Judgement) -> None:
    """The verdict, then each finding with its fixes."""
    print(f"{found.verdict} ({describe(found.machine)})")
    for finding in found.findings:
        print(_lines(finding))


def _lines(finding: Finding) -> str:
    lines = [f"\n{MARKS[finding.level]} {finding.code}  {finding.title}", f"        {finding.message}"]
    for fix in finding.fixes:
        patch = " ".join(f"--set {name}={_word(value)}" for name, value in fix.patch.items())
        lines.append(f"        fix: {fix.label}: {patch}{'' if fix.safe else '  (changes what is learned)'}")
    return "\n".join(lines)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def plan(arguments: argparse.Namespace) -> int:
    """Print what would run, to the letter."""
    spec = asked(arguments)
    if arguments.launcher:
        spec = edit(spec, {"launch.launcher": arguments.launcher})
    made = judge(spec, target(arguments), Path.cwd()).plan
    if arguments.json:
        commands = {node: made.command(node) for node in made.others}
        show({**asdict(made), "command": made.command(), "others": commands})
        return 0
    print(made.command())
    for node in made.others:
        print(f"\n# {node}, on another node\n{made.command(node)}")
    for name, text in made.files.items():
        print(f"\n# {name}\n{text.rstrip()}")
    for note in made.notes:
        print(f"\n# {note}")
    return 0


def estimate(arguments: argparse.Namespace) -> int:
    """Print memory and disk, row by row."""
    found = judged(arguments).estimate
    if arguments.json:
        show(described(found))
        return 0
    if found.unknown:
        print(f"unknown, because {found.unknown}")
    for row in found.rows:
        print(f"{row.bytes / 2**30:10.2f} GiB  {row.where:6}  {row.name:24}  {row.formula}")
    for where, total in (("device", found.device_bytes), ("host", found.host_bytes), ("disk", found.disk_bytes)):
        print(f"{total / 2**30:10.2f} GiB  {where:6}  total")
    print(f"{found.capacity_bytes / 2**30:10.2f} GiB  device  capacity")
    return 0


def presets(arguments: argparse.Namespace) -> int:
    """Print the presets."""
    found = files.presets()
    if arguments.json:
        show([{"name": p.name, "title": p.title, "about": p.about, "machine": p.machine.name} for p in found])
        return 0
    for preset in found:
        print(f"{preset.name:24}  {preset.title}: {preset.about} ({preset.machine.name})")
    return 0


def rules(arguments: argparse.Namespace) -> int:
    """Print the catalogue of rules."""
    rows = [
        {"code": r.code, "level": r.level, "title": r.title, "fields": list(r.fields), "why": r.why, "source": r.source}
        for r in RULES
    ]
    if arguments.json:
        show(rows)
        return 0
    for row in rows:
        print(f"{row['code']}  {row['level']:8}  {row['title']}")
    return 0


def docs(arguments: argparse.Namespace) -> int:
    """Write the generated documents."""
    written = documents.write()
    if arguments.json:
        show(written)
    else:
        print("\n".join(written))
    return 0


def ui(arguments: argparse.Namespace) -> int:
    """Become the page's server: the page stands above the shell, so it is started, not imported."""
    words = ["--host", arguments.host, "--port", str(arguments.port), "--runs", arguments.runs]
    os.execv(sys.executable, [sys.executable, "-m", "webui", *words])
