"""`footplate env`: environments for other trainers, for GGUF files and for benchmarks."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from backend import environments
from backend.cli.commands import print_json
from backend.paths import environment_folder


def start(arguments: argparse.Namespace) -> int:
    """Create or remove an environment, and print those that exist with their folders, sizes and versions."""
    try:
        if arguments.action == "create":
            environments.create(arguments.name or "llamafactory", lambda line: print(line, file=sys.stderr, flush=True))
        elif arguments.action == "remove":
            if arguments.name is None:
                print("Name the environment to remove: footplate env remove NAME.", file=sys.stderr)
                return 2
            environments.remove(arguments.name)
    except environments.CreationError as error:
        print(error, file=sys.stderr)
        return 1
    found = list(environments.created())
    if arguments.json:
        print_json([{**_about(name), "versions": environments.versions(name)} for name in found])
        return 0
    for name in found:
        packages = ", ".join(f"{package} {version}" for package, version in environments.versions(name).items())
        print(f"{name}: {environment_folder(name)} ({environments.size(name) / 2**30:.1f} GiB; {packages})")
    if not found:
        names = " or ".join(f"`footplate env create {name}`" for name in environments.ENVIRONMENTS)
        print(f"No environment exists. {names} creates one.")
    return 0


def _about(name: str) -> dict[str, Any]:
    return {"name": name, "folder": str(environment_folder(name)), "bytes": environments.size(name)}
