"""One line on stderr that shows what a command waits for. Standard library only."""

from __future__ import annotations

import shutil
import sys
from types import TracebackType


class StatusLine:
    """Shows a text on stderr in one line that is rewritten, and erased at the end; only on a terminal, since a log has
    no use for it."""

    def __init__(self) -> None:
        self._width = 0  # of the text on the terminal

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

    def _write(self, text: str) -> None:
        """Spaces cover the rest of a longer text; every terminal knows a carriage return."""
        sys.stderr.write(f"\r{text:<{self._width}}" if text else f"\r{'':{self._width}}\r")
        sys.stderr.flush()
        self._width = len(text)
