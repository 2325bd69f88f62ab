"""The commands list (search, columns and order of the runs) and annotate (their tags, notes, star and archive)."""

from __future__ import annotations

import argparse
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.cli import sweep, table
from backend.cli.commands import print_json
from backend.cli.runs import find_run
from backend.runs import notebook, schedule, search, throughput
from backend.runs.folder import RunError
from backend.runs.listing import RunList
from backend.tasks import sweep_scores

MAX_WIDTH = 60  # of a text in a table; --json has all of it


def list_runs(arguments: argparse.Namespace) -> int:
    """Print the runs that match, newest first or sorted; with --sweep those of one sweep, best first."""
    if arguments.sweep or arguments.by:
        return _list_sweep(arguments)
    now = time.time()
    every = RunList(Path(arguments.runs)).all()
    try:
        wanted = search.parse(arguments.search)
        columns = [search.column(name) for name in filter(None, map(str.strip, arguments.columns.split(",")))]
        found: list[search.Row] = [row for row in every if wanted.matches(row, now)]
        if arguments.sort:
            found = search.sort(found, arguments.sort, now, descending=arguments.reverse)
        elif arguments.reverse:
            found.reverse()
    except search.SearchError as error:
        raise RunError(str(error)) from error
    if arguments.json:
        keys = [column.key for column in columns]
        picked = [{"id": row["id"], **{key: search.value(row, key, now) for key in keys}} for row in found]
        print_json(picked if columns else found)
    elif columns:
        _print_table(found, columns, now)
    else:
        for row in found:
            print(f"{row['id']:48}  {row['state']:9}  {row['sentence']}")
            if row["warning"]:
                print(f"{'':48}  {row['warning']}")
    if not found and not arguments.json:
        none = f"No runs in {arguments.runs}. Start one: footplate run first-run"
        print("No run matches. Archived runs match only with archived:yes." if every else none)
    return 0


def annotate(arguments: argparse.Namespace) -> int:
    """Change name, tags, notes, star or archive of runs, and print what they are now."""
    found = [find_run(Path(arguments.runs), name) for name in arguments.run]
    given = {
        "notes": arguments.notes,
        "starred": arguments.starred,
        "archived": arguments.archived,
        "name": arguments.name,
    }
    try:
        changed = {r.id: notebook.change(r.path, arguments.tag, arguments.untag, **given) for r in found}
    except notebook.AnnotationError as error:
        raise RunError(str(error)) from error
    if arguments.json:
        print_json([{"id": id, **now.as_json()} for id, now in changed.items()])
        return 0
    for id, now in changed.items():
        marks = [*(["starred"] if now.starred else []), *(["archived"] if now.archived else [])]
        marks = [*([f"name:{now.name}"] if now.name else []), *marks]
        print("  ".join([id, *(f"tag:{tag}" for tag in now.tags), *marks, *([now.notes] if now.notes else [])]))
    return 0


def _list_sweep(arguments: argparse.Namespace) -> int:
    if not arguments.sweep:
        raise RunError("--by ranks the runs of a sweep. Add --sweep, or use --sort.")
    if arguments.search or arguments.columns or arguments.sort or arguments.reverse:
        raise RunError(
            "--sweep has its own columns and order: use it without --search, --columns, --sort and --reverse."
        )
    found = sweep_scores.rank(Path(arguments.runs), arguments.sweep, arguments.by or sweep_scores.LOSS)
    if arguments.json:
        print_json(found.rows)
    else:
        sweep.print_rows(found)
        if ends := schedule.sweep_text(Path(arguments.runs), arguments.sweep):
            print(ends)
    return 0


def _print_table(rows: list[search.Row], columns: list[search.Column], now: float) -> None:
    """Print a table: the ID of each run, then the columns."""
    head = ["id", *(column.key for column in columns)]
    lines = [[row["id"], *(_text(column, search.value(row, column.key, now)) for column in columns)] for row in rows]
    right = [number for number, column in enumerate(columns, 1) if column.kind == "number"]
    for line in table.lines([head, *lines], right) if lines else ():
        print(line)


def _text(column: search.Column, value: Any) -> str:
    """A value in a table; - if there is none."""
    if value is None or value in ("", []):
        return "-"
    if column.key == "duration":
        return throughput.duration(value)
    match column.kind:
        case "time":
            return f"{datetime.fromtimestamp(value):%Y-%m-%d %H:%M}"
        case "tags":
            return " ".join(value)
        case "yes_no":
            return "yes" if value else "no"
        case "number":
            unit = f"{'' if column.unit == '%' else ' '}{column.unit}" if column.scale != 1 else ""
            return f"{value / column.scale:.4g}{unit}"
    text = " ".join(str(value).split())
    return text if len(text) <= MAX_WIDTH else f"{text[: MAX_WIDTH - 3]}..."
