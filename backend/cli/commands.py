"""Commands that need no run: check, plan, machine, presets, rules, docs, ui.

`backend/__main__.py` declares the arguments, `runs.py` has the commands on runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from backend import importers
from backend import presets as files
from backend.cli import docs as documents
from backend.cli.status_line import StatusLine
from backend.config import Launch, RunSpec, consent
from backend.config.conditions import without_effect
from backend.config.options import Problem, SpecError, edit, find, list_or_text, word
from backend.config.processes import nnodes
from backend.inspect import shares
from backend.machine import Machine, describe, description, probe, read
from backend.preflight import Report, preflight
from backend.rules import Finding, Fix

WIDTH, INDENT = 110, " " * 9

INSPECTION_SECONDS = 600  # for a model and examples that no check has inspected yet


def print_json(value: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=list))


def print_json_list(values: Iterable[Any]) -> None:
    """Print a list as `print_json` does, one value at a time."""
    end = "[]"
    for number, value in enumerate(values):
        text = json.dumps(value, indent=2, ensure_ascii=False, default=list)
        print(",\n" if number else "[\n", textwrap.indent(text, "  "), sep="", end="")
        end = "\n]"
    print(end)


def launchers() -> tuple[str, ...]:
    """The launchers that a spec may name."""
    return typing.get_args(Launch.model_fields["launcher"].annotation)


def read_spec(arguments: argparse.Namespace) -> RunSpec:
    """The spec named on the command line, with every --set applied. Options that have no effect are named on stderr.
    Raises SpecError."""
    spec = edited_spec(arguments)
    print_without_effect(spec)
    return spec


def print_without_effect(spec: RunSpec) -> None:
    """Name on stderr the options that are set and have no effect."""
    for note in without_effect(spec):
        print(f"Note: {note}", file=sys.stderr)


def edited_spec(arguments: argparse.Namespace) -> RunSpec:
    """The spec named on the command line, with every --set applied. Raises SpecError."""
    changes = {}
    for change in arguments.set:
        name, equals, value = change.partition("=")
        if not equals:
            raise SpecError([Problem("", f"--set {change}: expected section.key=value")])
        changes[name.strip()] = list_or_text(name.strip(), value)
    try:
        before = files.read(arguments.spec)
    except SpecError as error:
        if not all(problem.field in changes for problem in error.problems):
            raise
        before = files.read(arguments.spec, without=changes)  # --set replaces every invalid value
    spec = edit(before, changes)
    if _moves_to_cluster(before, spec) and "launch.nnodes" not in changes:
        return edit(spec, {"launch.nnodes": 1})
    return spec


def _moves_to_cluster(before: RunSpec, after: RunSpec) -> bool:
    """Whether a run on one node, which has the default of `launch.nnodes`, becomes a job. It stays on one node, as on
    the page: a cluster does not change what is trained."""
    moves = before.launch.place == "local" and after.launch.place != "local"
    return moves and nnodes(before) == 1 and before.launch.nnodes == Launch().nnodes


def target_machine(arguments: argparse.Namespace) -> Machine:
    """The machine described in --machine, or this one."""
    return read(arguments.machine) if arguments.machine else probe(Path.cwd())


def run_preflight(arguments: argparse.Namespace) -> Report:
    """The preflight report of SPEC on the machine."""
    return wait_for_preflight(read_spec(arguments), target_machine(arguments))


def wait_for_preflight(spec: RunSpec, machine: Machine, cpu_seconds: float = 0) -> Report:
    """The preflight report of `spec`, with all examples checked; shows the progress on stderr."""
    with StatusLine() as line:
        return preflight(spec, machine, Path.cwd(), INSPECTION_SECONDS, line.show, cpu_seconds)


def check(arguments: argparse.Namespace) -> int:
    """Print the findings; exit code 1 if one of them is an error."""
    report = run_preflight(arguments)
    if arguments.json:
        print_json(report_json(report))
    else:
        print_findings(report)
    return 0 if report.can_run else 1


def refuse(report: Report, as_json: bool, label: str = "") -> int:
    """Print why nothing is started, and return the exit code. `label`: which of several runs the report is about."""
    if as_json:
        print_json({"error": f"{label}: {report.verdict}" if label else report.verdict, **report_json(report)})
    else:
        print_findings(report)
    return 1


def print_warnings(*reports: Report) -> None:
    """Print on stderr what was not checked and each warning, for runs that start anyway. What several of them have in
    common is printed once."""
    notes = [report.unchecked_note for report in reports if report.unchecked_note]
    warnings = [
        f"Warning {finding.code}: {finding.message}"
        for report in reports
        for finding in report.findings
        if finding.level == "warning"
    ]
    for line in dict.fromkeys([*notes, *warnings]):
        print(line, file=sys.stderr)


def report_json(report: Report) -> dict[str, Any]:
    """The verdict, the machine, how many examples were checked, and every finding with its reason and fixes."""
    facts = report.facts
    return {
        "can_run": report.can_run,
        "verdict": report.verdict,
        "machine": describe(report.machine),
        "examples": {"checked": facts.num_checked, "all_checked": facts.all_checked, "note": report.unchecked_note},
        "findings": [asdict(finding) for finding in report.findings],
    }


def print_findings(report: Report) -> None:
    """Print the verdict, then each finding with its reason and fixes."""
    print(f"{report.verdict} ({report.on_nodes(describe(report.machine))})")
    if report.unchecked_note:
        print(report.unchecked_note)
    for index, share in enumerate(shares(report.spec, report.facts)):
        print(f"{report.spec.data.title_of(index)}: {share or 'size not known before the run.'}")
    for finding in report.findings:
        print("", *_finding_lines(finding), sep="\n")


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.level:8} {finding.code}  {finding.title}"
    yield from _wrapped(finding.message)
    if finding.reason:
        yield from _wrapped(f"Why: {finding.reason}")
    for fix in finding.fixes:
        yield from _wrapped(f"Fix: {fix.label}{notes(fix)}")
        yield f"{INDENT}     {set_arguments(fix)}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )


def notes(fix: Fix) -> str:
    """What a fix costs, and whether the training result stays the same."""
    found = [fix.cost, fix.effect or "safe"]
    return f" ({'; '.join(note for note in found if note)})"


def set_arguments(fix: Fix) -> str:
    """A fix as arguments of the command line."""
    return " ".join(f"--set {name}={shlex.quote(_text(name, value))}" for name, value in fix.patch.items())


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{name}={item}" for name, item in value.items())
    option = find(name)
    if option and option.path == "data":
        return json.dumps(value, ensure_ascii=False)
    between = "\n" if option and option.widget == "lines" else ","
    return between.join(map(str, value)) if isinstance(value, (tuple, list)) else word(value)


def plan(arguments: argparse.Namespace) -> int:
    """Print the exact command and files that would run."""
    spec = read_spec(arguments)
    if arguments.launcher:
        spec = edit(spec, {"launch.launcher": arguments.launcher})
    made = preflight(spec, target_machine(arguments), Path.cwd()).preview
    if arguments.json:
        commands = {node: made.command(node) for node in made.other_nodes}
        print_json({**asdict(made), "command": made.command(), "others": commands})
        return 0
    print(made.command())
    for node in made.other_nodes:
        print(f"\n# {node}: run on another node\n{made.command(node)}")
    for name, text in made.files.items():
        print(f"\n# {name}\n{text.rstrip()}")
    for note in made.notes:
        print(f"\n# {note}")
    return 0


def describe_machine(arguments: argparse.Namespace) -> int:
    """Print a description of this machine: a file for --machine, and the text that the page's form takes."""
    found = description(replace(probe(Path.cwd()), name=socket.gethostname()))
    if arguments.json:
        print_json(found)
    else:
        print(yaml.safe_dump(found, sort_keys=False, allow_unicode=True), end="")
    return 0


def presets(arguments: argparse.Namespace) -> int:
    """Print the presets."""
    found = files.presets()
    if arguments.json:
        keys = ("name", "title", "about")
        print_json([{**{key: getattr(p, key) for key in keys}, "machine": p.machine.name} for p in found])
        return 0
    for preset in found:
        print(f"{preset.name:24}  {preset.title}: {preset.about} (for {preset.machine.name})")
    return 0


def import_file(arguments: argparse.Namespace) -> int:
    """Print a configuration file of another tool as a spec, and on stderr what it means differently or not at all."""
    path = Path(arguments.file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", f"{path} cannot be read: {error}")]) from None
    if problem := importers.invalid_text(text):
        raise SpecError([Problem("", f"{path}: {problem}")])
    if not importers.detect_format(text):
        raise SpecError(
            [Problem("", f"{path} is not a configuration file of DeepSpeed, accelerate, LLaMA-Factory, axolotl or TRL")]
        )
    found = importers.import_file(text, RunSpec(), Path.cwd())
    safe = consent.without_consent(found.spec, RunSpec())
    spec = files.dump(found.spec if arguments.with_code else safe.spec)
    if arguments.json:
        about = {"different": found.different, "missing": found.missing, "runs_code": safe.listed}
        print_json({"spec": spec, **about})
        return 0
    print(spec, end="")
    risk = "it can run code or decide where data is sent"
    left_out = f"Included, but {risk}" if arguments.with_code else f"Left out, because {risk} (--with-code includes it)"
    for title, texts in (
        ("Different here", found.different),
        ("Not imported", found.missing),
        (left_out, safe.listed),
    ):
        for line in texts:
            print(f"{title}: {line}", file=sys.stderr)
    return 0


def rules(arguments: argparse.Namespace) -> int:
    """Print every preflight rule."""
    entries = documents.rule_entries()
    if arguments.json:
        print_json(entries)
        return 0
    for entry in entries:
        print(f"{entry['code']}  {entry['level']:8}  {entry['title']}")
    return 0


def docs(arguments: argparse.Namespace) -> int:
    """Write the generated documents."""
    written = documents.write()
    if arguments.json:
        print_json(written)
    else:
        print("\n".join(written))
    return 0


def ui(arguments: argparse.Namespace) -> int:
    """Replace this process with the page's server. The page imports the backend, never the other way round, so it is
    started by its name instead of being imported."""
    words = ["--host", arguments.host, "--port", str(arguments.port), "--runs", arguments.runs]
    words += ["--no-login"] if arguments.no_login else []
    for name in ("certfile", "keyfile"):
        words += [f"--{name}", getattr(arguments, name)] if getattr(arguments, name) else []
    os.execv(sys.executable, [sys.executable, "-m", "webui", *words])
