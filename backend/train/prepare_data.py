"""`python -m backend.train.prepare_data FOLDER`: tokenize the data of FOLDER/spec.yaml, for the runs that follow.

Called by `footplate prepare`. It needs no GPU.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import datasets

from backend import presets
from backend.runs import SPEC
from backend.runs.throughput import duration
from backend.train import data, model
from backend.train.run_log import TrainError
from backend.wording import counted

FILES = "prepared"
NO_ROOM = "the cache has no room for it or cannot be written, or a data file changed meanwhile"
SLOW = "this model has a slow (Python) tokenizer, so each run tokenizes again"
OWN_CODE = "model.trust_remote_code is on, and the tokenizer's own code may change, so each run tokenizes again"
SECONDS = 2.0  # between two lines of progress


class Progress:
    """Prints how many examples are done, how many in a second, and how long the rest takes."""

    def __init__(self) -> None:
        self.began = self.printed = time.monotonic()

    def tick(self, done: int, total: int) -> bool:
        """Report progress. Always continues."""
        now = time.monotonic()
        if done == 0:
            self.began = now
        elif now - self.printed >= SECONDS:
            rate = done / (now - self.began)
            left = duration((total - done) / rate)
            print(f"{done:,} of {counted(total, 'example')}, {rate:,.0f} examples/s, about {left} left", flush=True)
            self.printed = now
        return True


def main() -> None:
    """Prepare the dataset and print the progress. On failure, exit with code 1 and a sentence on stderr."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder = Path(sys.argv[1])
    datasets.disable_progress_bars()
    spec = presets.load((folder / SPEC).read_text(encoding="utf-8"))
    try:
        tokenizer = model.load_tokenizer(spec, model.locate(spec, _tell))
        show = Progress().tick
        cached = data.prepare_once(spec, tokenizer, show, lambda line: print(line, flush=True), folder / FILES, 0.0)
    except TrainError as error:
        sys.exit(str(error))
    if not cached:
        reason = OWN_CODE if spec.model.trust_remote_code else NO_ROOM if tokenizer.is_fast else SLOW
        sys.exit(f"The tokenized dataset was not kept: {reason}.")


def _tell(text: str, fraction: Any) -> None:
    """The progress of a model's download or conversion; only its start is printed."""
    if not fraction:
        print(text, flush=True)


if __name__ == "__main__":
    main()
