"""`footplate export`: a spec as configuration files of LLaMA-Factory.

Imports launch.llamafactory, cli.commands.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from backend.cli.commands import print_json, run_preflight
from backend.launch.llamafactory import export


def start(arguments: argparse.Namespace) -> int:
    """Write the files, print the command that uses them, and on stderr what they do not express."""
    report = run_preflight(arguments)
    made = export(report.spec, report.run, report.facts.format)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in made.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if arguments.json:
        found = {"files": list(made.files), "command": made.command}
        print_json({**found, "different": made.different, "missing": made.missing, "refused": made.refused})
        return 0
    print(f"cd {folder} && {made.command}")
    for title, lines in (
        ("Different there", made.different),
        ("Not exported", made.missing),
        ("Refused there", made.refused),
    ):
        for line in lines:
            print(f"{title}: {line}", file=sys.stderr)
    return 0
