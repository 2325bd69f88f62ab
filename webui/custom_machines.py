"""Machines that users describe on the page: a YAML file each, which `--machine` reads, too.

A file is named after the machine, so that no two have the same name.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from backend.config.options import Problem, SpecError
from backend.machine import Machine, load, machine_from_mapping, normalize, read
from backend.runs import files, replace_text

MAX_NAME = 60  # characters of up to four bytes; a file name has at most 255 bytes


class CustomMachines:
    """The machines in a folder, which is created with the first one. `reserved` are names that other machines have."""

    def __init__(self, folder: Path, reserved: Collection[str]) -> None:
        self.folder = folder
        self.reserved = reserved
        self._lock = threading.Lock()  # requests run in several threads

    def ids(self) -> list[str]:
        """The machines, in the order of their names."""
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def read(self, id: str) -> Machine:
        """A machine. Raises SpecError with the file and the problem."""
        return read(self._path(id))

    def described(self, id: str) -> tuple[Machine, dict[str, Any]]:
        """A machine and its description. Raises SpecError if the file is damaged, OSError if it cannot be read."""
        values = load(files.read_text(self._path(id), errors="replace"))
        return machine_from_mapping(values), values

    def save(self, values: Any, replaced: str = "") -> str:
        """Store a description in place of the machine `replaced`, '' for a new one, and return its id. Raises SpecError
        with every problem."""
        problems = []
        try:
            machine_from_mapping(values)
        except SpecError as error:
            problems = error.problems
        name = str(values.get("name") or "").strip()
        id = re.sub(r"\W+", "-", name.casefold()).strip("-_")
        with self._lock:
            if not id or len(id) > MAX_NAME:
                message = f"must have a letter or digit, and at most {MAX_NAME} characters, but is {name!r:.80}"
                problems = [
                    Problem("name", message if name else "is missing: the list of machines shows this name"),
                    *problems,
                ]
            elif id != replaced and (id in self.reserved or self._path(id).exists()):
                problems = [Problem("name", f"{name!r} is the name of another machine: choose another one"), *problems]
            if problems:
                raise SpecError(problems)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = yaml.safe_dump(normalize(values), sort_keys=False, allow_unicode=True)
            replace_text(self._path(id), text, mode=0o600)
            if replaced and id != replaced:
                self.remove(replaced)
        return id

    def remove(self, id: str) -> None:
        """Delete a machine. A missing machine counts as deleted."""
        if id in self.ids():
            self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        return self.folder / f"{id}.yaml"
