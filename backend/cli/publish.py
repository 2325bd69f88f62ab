"""The command publish: a model of a run in a repository of the Hugging Face Hub, or in a folder."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json
from backend.cli.jobs import follow, model_step, report
from backend.cli.runs import find_run
from backend.models import merge
from backend.publish import exports, publication
from backend.publish.contents import Request
from backend.runs import jobs
from backend.runs.folder import RunError
from backend.wording import counted, data_size


def start(arguments: argparse.Namespace) -> int:
    """Show what leaves the machine, ask, publish and wait for the end; Ctrl-C stops it."""
    run = find_run(Path(arguments.runs), arguments.run)
    step = model_step(run, arguments.step)
    request = Request(
        step=step, repository=arguments.to or "", public=arguments.public, license=arguments.license,
        merge=merge.find_merged(run, step).id if arguments.merged else "", base_model=arguments.base_model,
        exports=exports.find_named(run, step, arguments.format),
        folder=os.path.abspath(arguments.folder) if arguments.folder else "",
    )  # fmt: skip
    summary = publication.summary(run, request)
    if arguments.dry_run:
        print_json(summary.as_json()) if arguments.json else _print(summary)
        return 0
    _print(summary, sys.stderr)
    if not arguments.yes and not _confirmed():
        print("Nothing was published.", file=sys.stderr)
        return 1
    job = publication.start(run, summary.request, summary.contents.versions())
    follow(job)
    shown = jobs.as_json(job)
    return report(job, shown, arguments.json, lambda: _print_result(shown["result"]))


def _print(summary: publication.Summary, file: Any = None) -> None:
    """What leaves the machine; the model card only if `file` is the standard output."""
    found = summary.contents
    print(summary.effect, file=file)
    width = max(len(each.name) for each in found.files)
    for each in found.files:
        print(f"  {each.name:{width}}  {data_size(each.bytes)}", file=file)
    print(f"{counted(len(found.files), 'file')}, {data_size(found.bytes)}.", file=file)
    if found.left_out:
        print(f"Not published: {', '.join(found.left_out)}.", file=file)
    if file is None:
        print(f"\nREADME.md, the model card:\n\n{found.card}", end="")


def _confirmed() -> bool:
    """Whether the user agrees. Raises RunError without a terminal."""
    if not sys.stdin.isatty():
        raise RunError("Nothing was published: confirm with --yes, since there is no terminal to ask.")
    print("Publish? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _print_result(result: dict[str, Any]) -> None:
    if "folder" in result:
        print(result["folder"])
        return
    print(result["url"])
    unchanged = "Nothing had changed since the last commit" if result["is_unchanged"] else "Commit"
    print(f"{unchanged}: {result['commit_url']}")
