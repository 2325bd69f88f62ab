"""`footplate export`: a spec as files that LLaMA-Factory, Kubernetes or SkyPilot reads."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from backend.cli.commands import edited_spec, print_json, print_without_effect, target_machine, wait_for_preflight
from backend.launch import llamafactory
from backend.launch.clusters import skypilot
from backend.launch.clusters.share import as_job_spec
from backend.preflight import Report
from backend.resolve import device_names
from backend.runs import KUBERNETES_JOB
from backend.runs.kubernetes import filled, folder_problem, job_name
from backend.wording import counted


@dataclass(frozen=True)
class Exported:
    """Files by name, the command that uses them in their folder, and what they do not express."""

    files: Mapping[str, str]
    command: str
    different: Sequence[str] = ()
    missing: Sequence[str] = ()
    refused: Sequence[str] = ()


def _llamafactory(report: Report, folder: Path) -> Exported:
    made = llamafactory.export(report.spec, report.run, report.facts.format, shape=report.facts.shape)
    made.devices = device_names(report.run, report.machine)
    return Exported(made.files, made.command, made.different, [*made.missing, *_weights(report)], made.refused)


def _weights(report: Report) -> Iterator[str]:
    """What LLaMA-Factory does not read in the data, as a sentence."""
    if count := report.facts.num_with_weights:
        examples = counted(report.facts.num_checked, "checked example")
        yield (
            f"data.source: in {count:,} of {examples}, a turn has a weight other than 1. LLaMA-Factory ignores "
            "weights and trains on all turns alike"
        )


def _kubernetes(report: Report, folder: Path) -> Exported:
    """The run's folder is `folder`, which must be in a volume of the pods, under the same path."""
    place = folder.resolve()
    objects = filled(report.plan.files[KUBERNETES_JOB], job_name(report.spec.logging.run_name), str(place))
    text = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    files = {**report.plan.files, KUBERNETES_JOB: text}
    outside = [f"--out: {why}"] if (why := folder_problem(objects[0], place)) else []
    return Exported(files, f"kubectl create -f {KUBERNETES_JOB}", refused=[*outside, *_errors(report)])


def _skypilot(report: Report, folder: Path) -> Exported:
    files = skypilot.files(report.spec, report.machine, report.facts)
    errors = [each for each in _errors(report) if not each.startswith("CLU")]
    refused = [*skypilot.refusals(report.spec, report.run), *errors]
    return Exported(files, skypilot.COMMAND, missing=skypilot.unused(report.spec), refused=refused)


def _errors(report: Report) -> list[str]:
    return [f"{finding.code} {finding.message}" for finding in report.findings if finding.level == "error"]


TARGETS: Mapping[str, Callable[[Report, Path], Exported]] = {
    "llamafactory": _llamafactory,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
}


def _has_other_text(file: Path, text: str) -> bool:
    return file.exists() and file.read_bytes() != text.encode()


def start(arguments: argparse.Namespace) -> int:
    """Write the files, print on stderr what they do not express, and the command that uses them; exit code 1 instead
    of a command if they would be refused."""
    spec, machine = edited_spec(arguments), target_machine(arguments)
    if arguments.to in ("kubernetes", "skypilot"):
        spec = as_job_spec(spec, machine)
    print_without_effect(spec)
    if arguments.to == "skypilot":
        machine = replace(machine, name=machine.name or "this machine")  # with a name, no cluster is queried
    folder = Path(arguments.out or arguments.to)
    made = TARGETS[arguments.to](wait_for_preflight(spec, machine), folder)
    folder.mkdir(parents=True, exist_ok=True)
    replaced = [name for name, text in made.files.items() if _has_other_text(folder / name, text)]
    for name, text in made.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if arguments.json:
        found = {"files": list(made.files), "replaced": replaced, "command": made.command}
        print_json({**found, "different": made.different, "missing": made.missing, "refused": made.refused})
        return 1 if made.refused else 0
    for title, lines in (
        ("Replaced a file with other contents", replaced),
        ("Different there", made.different),
        ("Not exported", made.missing),
        ("Refused there", made.refused),
    ):
        for line in lines:
            print(f"{title}: {line}", file=sys.stderr)
    if made.refused:
        print(f"The files are in {folder}. Change what is refused before you use them.", file=sys.stderr)
        return 1
    print(f"cd {shlex.quote(str(folder))} && {made.command}")
    return 0
