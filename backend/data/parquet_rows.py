"""`python -P parquet_rows.py PATH`: writes the rows of a Parquet file to stdout, with a limit of memory and CPU time.

Imports only the standard library and pyarrow, and nothing of Footplate. A few hundred bytes of Parquet can become
gigabytes, inside of calls that no thread can interrupt, so the server does not read such files itself. Each message is
its length (8 bytes) and a pickle: the names of the columns, then each row, then the reason why there are no more.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, BinaryIO

MIB, GIB = 2**20, 2**30
MAX_BYTES = GIB  # of this process; a batch of ordinary rows takes some 100 MB
MAX_CPU_SECONDS = 20
MAX_ROW_BYTES = 32 * MIB  # pickled
BATCH_ROWS = 32
LENGTH_BYTES = 8
TOO_LARGE = f"takes more than {MAX_BYTES // GIB} GiB of memory to read"


def main() -> None:
    """Write the rows of the file that is the only argument."""
    limit()
    output = sys.stdout.buffer
    try:
        for message in messages(sys.argv[1]):
            send(output, message)
    except BrokenPipeError:  # nobody wants more rows
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


def messages(path: str) -> Iterator[Any]:
    """The names of the columns, the rows, and the reason for the end: '' at the end of the file."""
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")  # after the limits are set
    try:
        with parquet.ParquetFile(path, buffer_size=2**20) as file:
            yield list(file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                yield from batch.to_pylist()
        yield ""
    except UnicodeDecodeError:
        yield "contains text that is not UTF-8"
    except pyarrow.ArrowMemoryError:
        yield TOO_LARGE
    except pyarrow.ArrowException as error:
        yield f"is not a valid Parquet file: {str(error).rstrip('.')}"
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
