"""`python -m backend.inference .` in the folder of a job: a chat with the models of a run, their evaluation, or a
benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from backend.inference import benchmark
from backend.inference.chat import Chat
from backend.inference.evaluation import evaluate
from backend.runs import files, jobs
from backend.train import exit


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Do what the folder says."""
    sys.excepthook = exit.print_error_of_job
    folder = files.held(Path(sys.argv[1]))
    if (folder / jobs.request_file(jobs.EVALUATION)).exists():
        evaluate(folder)
    elif (folder / jobs.request_file(jobs.BENCHMARK)).exists():
        benchmark.measure(folder)
    else:
        Chat(folder).serve()


if __name__ == "__main__":
    main()
    exit.exit_now()
