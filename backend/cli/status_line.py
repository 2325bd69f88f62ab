"""One line on stderr that shows what a command waits for. Standard library only."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType

SILENT_SECONDS = 3.0  # without a terminal: until the single line is printed


class StatusLine:
    """Shows a text on stderr: a terminal gets one line that is rewritten, and erased at the end; anything else gets a
    single line if it takes more than a few seconds."""

    def __init__(self) -> None:
        self._width = 0  # of the text on the terminal
        self._silent_until = time.monotonic() + SILENT_SECONDS

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._write("")

    def show(self, text: str) -> None:
        """Replace the text."""
        if sys.stderr.isatty():
            self._write(f"{text}..."[: shutil.get_terminal_size().columns - 1])
        elif time.monotonic() > self._silent_until:
            self._silent_until = float("inf")
            print("Checking the model and the examples...", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        """Spaces cover the rest of a longer text; every terminal knows a carriage return."""
        sys.stderr.write(f"\r{text:<{self._width}}" if text else f"\r{'':{self._width}}\r")
        sys.stderr.flush()
        self._width = len(text)
