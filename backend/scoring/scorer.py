"""Computes a custom score in a process of its own (worker.py), so that a call that hangs, prints or crashes does no
harm."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.scoring import worker

LOAD_SECONDS = 120.0  # a file may import large libraries
SCORE_SECONDS = 10.0  # for one output
POLL_SECONDS = 0.1
MAX_PATTERN, MAX_FILE_BYTES = 1_000, 2**20


class ScoreError(Exception):
    """Why there is no score: what the regular expression or the file did, as the end of a sentence that begins with
    its name."""


@dataclass(frozen=True)
class Regex:
    """A regular expression that an output must match anywhere; with `compares_group`, the first group must be that of
    the reference."""

    pattern: str
    compares_group: bool = False

    @property
    def name(self) -> str:
        """For sentences."""
        return f"The regular expression {self.pattern}"

    def problem(self) -> str:
        """Why it cannot be used, as a sentence; '' if it can."""
        if len(self.pattern) > MAX_PATTERN:
            return f"The regular expression has {len(self.pattern):,} characters; at most {MAX_PATTERN:,} are allowed."
        try:
            compiled = re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            return f"The regular expression {self.pattern} is invalid: {error}."
        if self.compares_group and not compiled.groups:
            return f"The regular expression {self.pattern} has no group. Put the part to compare in parentheses."
        return ""


@dataclass(frozen=True)
class ScoreFile:
    """A Python file with a function `score(prompt, reference, output)`; only the content with this hash is run."""

    path: str
    sha256: str

    @property
    def name(self) -> str:
        """For sentences."""
        return f"The score file {self.path}"


def sha256_of(path: str) -> str:
    """The SHA-256 of a score file. Raises ScoreError."""
    try:
        if not Path(path).is_file():
            raise ScoreError("is not a file" if Path(path).exists() else "does not exist on the server")
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ScoreError(f"is larger than {MAX_FILE_BYTES // 1024:,} KiB")
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ScoreError(f"cannot be read ({error.strerror})") from None


class Scorer:
    """A score from the start of its process to `close`. While it waits, it calls `check`, which may raise. What a file
    prints goes to stderr. Raises ScoreError if the file cannot be loaded."""

    def __init__(
        self, definition: Regex | ScoreFile, check: Callable[[], None], seconds: float = SCORE_SECONDS
    ) -> None:
        self._check, self._seconds, self._unread = check, seconds, b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", worker.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        try:
            self._ask(asdict(definition), LOAD_SECONDS)
        except BaseException:
            self.close()
            raise

    def score(self, prompt: str, reference: str, output: str) -> float | None:
        """The score of an output; None if the score does not apply. Raises ScoreError, and what `check` raises. After a
        call that took too long, the process has ended."""
        value = self._ask([prompt, reference, output], self._seconds)["value"]
        return None if value is None else float(value)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, value: Any, seconds: float) -> dict[str, Any]:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the process has ended: reading its answer reports how
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
        found: dict[str, Any] = json.loads(self._line(seconds))
        if found["problem"]:
            raise ScoreError(found["problem"])
        return found

    def _line(self, seconds: float) -> bytes:
        """The next line of its stdout."""
        assert self._process.stdout
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                self._check()
                if selector.select(POLL_SECONDS):
                    read = os.read(self._process.stdout.fileno(), 1 << 16)
                    if not read:
                        raise ScoreError(f"ended its process ({_ending(self._process.wait())})")
                    self._unread += read
                elif time.monotonic() > until:
                    self._process.kill()
                    raise ScoreError(f"took longer than {seconds:g} seconds")
        line, _, self._unread = self._unread.partition(b"\n")
        return line


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
