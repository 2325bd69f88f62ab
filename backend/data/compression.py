"""Opening of data files, which may be compressed: train.jsonl.gz is read like train.jsonl."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TextIO

DOCUMENTS = (".txt", ".md")
# Files that may be compressed as a whole; Parquet and Arrow are compressed inside.
TEXT = (".jsonl", ".json", ".csv", ".tsv", *DOCUMENTS)
RATIO = 4  # about how much larger a text is than its compressed file


class DamagedFile(ValueError):
    """A compressed file that cannot be decompressed; the message completes "FILE: "."""


def _open_zstd(path: Path) -> Any:
    try:
        arrow = importlib.import_module("pyarrow")  # imported here: 0.2 s, and most data is not compressed
    except ImportError:
        raise DamagedFile("cannot be read without pyarrow: pip install pyarrow") from None
    return arrow.input_stream(str(path), compression="zstd")


_OPEN: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
COMPRESSED = tuple(_OPEN)


def is_compressed(path: Path) -> bool:
    """Whether the file is a compressed text."""
    inner = Path(path.stem).suffix.lower()
    return path.suffix.lower() in COMPRESSED and inner in TEXT


def data_suffix(path: Path) -> str:
    """The suffix that says how the file is read, in lower case, such as .jsonl for train.jsonl.gz."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def open_bytes(path: Path) -> IO[bytes]:
    """The decompressed content. Raises OSError; reading it may raise any of ERRORS."""
    found: IO[bytes] = _OPEN[path.suffix.lower()](path) if is_compressed(path) else path.open("rb")
    return found


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """The decompressed text of a file in UTF-8, with or without a byte order mark; `newline` as of `open`."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


# What reading a damaged file raises, besides OSError.
ERRORS = (EOFError, zlib.error, lzma.LZMAError, DamagedFile)
