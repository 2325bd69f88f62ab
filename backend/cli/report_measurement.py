"""`footplate report-measurement`: an anonymous file about predicted and measured memory and time, for an issue."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from backend.cli.runs import find_run
from backend.runs.folder import RunError
from backend.tasks import measurement_report

FILE = "measurement.json"  # without the run's ID, which contains its name


def start(arguments: argparse.Namespace) -> int:
    """Print the report, then write it to a new file."""
    report = measurement_report.build(find_run(Path(arguments.runs), arguments.run))
    text, path = measurement_report.as_text(report), Path(arguments.output or FILE)
    print(text, end="", flush=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RunError(f"{path} exists and was not overwritten. Choose another file with --output.") from None
    if "hardware" not in report:
        print("An earlier version created this run, so machine, model and data are missing.", file=sys.stderr)
    found = ", ".join(f"{name} {ratio:.2f}" for name, ratio in measurement_report.ratios(report).items())
    print(f"Written to {path}. Measured / predicted: {found or 'not known'}.", file=sys.stderr)
    return 0
