"""`footplate prepare` and `footplate cache`: datasets that are tokenized before a run, and the cache of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from backend import presets
from backend.cli.commands import print_json, read_spec
from backend.config.options import effective
from backend.data import prepared
from backend.inspect import resolve_paths
from backend.paths import prepared_folder
from backend.runs import SPEC, processes
from backend.wording import counted


def prepare(arguments: argparse.Namespace) -> int:
    """Tokenize the data of a spec; exit code 1 if that fails."""
    spec = resolve_paths(effective(read_spec(arguments)), Path.cwd())
    if spec.launch.trainer == "llamafactory":
        print("LLaMA-Factory tokenizes the data when the run starts; there is nothing to prepare.", file=sys.stderr)
        return 2
    if spec.data.streaming:
        print(
            "With data.streaming, a run tokenizes its examples while it trains; there is nothing to prepare.",
            file=sys.stderr,
        )
        return 2
    prepared_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prepared.NEW, dir=prepared_folder()) as folder:  # on the disk of the cache
        (Path(folder) / SPEC).write_text(presets.dump(spec), encoding="utf-8")
        lock = processes.acquire_lock(Path(folder))  # so that it is no leftover of a process that was killed
        command = [sys.executable, "-m", "backend.train.prepare_data", folder]
        out, end = sys.stderr if arguments.json else None, processes.end_with_parent
        try:
            code = subprocess.run(command, stdout=out, check=False, preexec_fn=end).returncode
        finally:
            if lock is not None:
                processes.release(lock)
    if arguments.json:
        print_json({"prepared": code == 0})
    return 1 if code else 0


def cache(arguments: argparse.Namespace) -> int:
    """List what is kept, or remove it."""
    if arguments.action == "clear":
        count, size = prepared.clear()
        if arguments.json:
            print_json({"removed": count, "bytes": size})
        else:
            print(f"Removed {counted(count, 'tokenized dataset')}, {_gigabytes(size)}.")
        return 0
    found = prepared.entries()
    if arguments.json:
        print_json(
            [{"folder": str(folder), "data": name, "bytes": size, "used": used} for folder, name, size, used in found]
        )
        return 0
    for folder, name, size, used in found:
        print(f"{_gigabytes(size):>10}  {time.strftime('%F %H:%M', time.localtime(used))}  {name}  {folder.name[:12]}")
    total = _gigabytes(sum(size for _, _, size, _ in found))
    most = f"{total} of at most {prepared.limit() / 1e9:,.6g} GB ({prepared.LIMIT})"
    print(f"{counted(len(found), 'tokenized dataset')}, {most}, in {prepared_folder()}.")
    return 0


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
