"""`python -P parquet_rows.py PATH`: writes the rows of a Parquet or Arrow file to stdout, limited in memory and time.

Imports only the standard library and pyarrow, and nothing of Footplate. A few hundred bytes of Parquet can become
gigabytes, inside of calls that no thread can interrupt, so the server does not read such files itself. Each message is
its length (8 bytes) and a pickle: the names of the columns, then each row, then the reason why there are no more.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, BinaryIO

MIB, GIB = 2**20, 2**30
MAX_BYTES = GIB  # of this process; a batch of ordinary rows takes about 100 MB
MAX_CPU_SECONDS = 20
MAX_ROW_BYTES = 32 * MIB  # pickled
BATCH_ROWS = 32
LENGTH_BYTES = 8
ARROW_FILE = b"ARROW1"
TOO_LARGE = f"takes more than {MAX_BYTES // GIB} GiB of memory to read"


def main() -> None:
    """Write the rows of the file that is the only argument."""
    limit()
    output = sys.stdout.buffer
    try:
        for message in messages(sys.argv[1]):
            send(output, message)
    except BrokenPipeError:  # the reader wants no more rows
        sys.stderr.close()
    except MemoryError:
        send(output, TOO_LARGE)


def limit() -> None:
    """Limit memory and CPU time of this process, where the system can."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def open_batches(path: str, rows: int) -> tuple[list[str], Iterator[Any]]:
    """The names of the columns of a Parquet or Arrow file, and record batches of at most `rows` rows. Raises
    pyarrow.ArrowException and OSError."""
    if not path.lower().endswith(".arrow"):
        file = import_module("pyarrow.parquet").ParquetFile(path, buffer_size=2**20)
        return list(file.schema_arrow.names), file.iter_batches(batch_size=rows, use_threads=False)
    arrow, ipc = import_module("pyarrow"), import_module("pyarrow.ipc")
    source = arrow.memory_map(path)
    is_stream = source.read(len(ARROW_FILE)) != ARROW_FILE  # the datasets library writes streams
    source.seek(0)
    reader = ipc.open_stream(source) if is_stream else ipc.open_file(source)
    whole = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    return list(reader.schema.names), _slices(whole, rows)


def _slices(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    for batch in batches:
        batch.validate(full=True)  # Arrow reads past the end of a damaged batch
        yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def invalid(path: str, error: Exception) -> str:
    """Why a file cannot be read, as the end of a sentence."""
    kind = "Arrow" if path.lower().endswith(".arrow") else "Parquet"
    return f"is not a valid {kind} file: {str(error).rstrip('.')}"


def messages(path: str) -> Iterator[Any]:
    """The names of the columns, the rows, and the reason for the end: '' at the end of the file."""
    pyarrow = import_module("pyarrow")  # imported after the limits are set
    try:
        names, batches = open_batches(path, BATCH_ROWS)
        yield names
        for batch in batches:
            yield from batch.to_pylist()
        yield ""
    except UnicodeDecodeError:
        yield "contains text that is not UTF-8"
    except pyarrow.ArrowMemoryError:
        yield TOO_LARGE
    except (pyarrow.ArrowException, SystemError) as error:
        yield invalid(path, error)
    except OSError as error:
        yield f"cannot be read: {error.strerror or error}"
    except (ValueError, OverflowError) as error:  # such as a time after the year 9999
        yield f"contains a value that Python cannot represent: {error}"


def send(output: BinaryIO, message: Any) -> None:
    """Write one message; a row that is too large ends the file."""
    data = pickle.dumps(message)
    if len(data) > MAX_ROW_BYTES:
        data = pickle.dumps(f"has a row of more than {MAX_ROW_BYTES // MIB} MiB")
    output.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    output.flush()


if __name__ == "__main__":
    main()
