"""`python -m backend.inference .` in the folder of a job: the process of a chat with the models of a run."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from backend.inference.chat import Chat
from backend.runs import files
from backend.train import exit


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Serve the chat until it ends."""
    sys.excepthook = exit.print_error
    Chat(files.held(Path(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
    exit.exit_now()
