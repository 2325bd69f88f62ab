"""`python -m backend.export FOLDER`: merges an adapter, as the job in FOLDER (backend/tasks/merge.py) says."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from backend.export.merge import Merge
from backend.runs import LOCK, MERGE, RESULT, json_values
from backend.runs.files import write_json
from backend.runs.folder import Run
from backend.train import exit, logging_setup
from backend.train.run_log import RunLog, Stopped


def main() -> None:
    """Merge, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m backend.export", description=__doc__)
    parser.add_argument("folder", type=Path, help=f"the job's folder, with {MERGE}")
    folder = parser.parse_args().folder.resolve()
    sys.excepthook = exit.print_error
    os.chdir(folder)
    logging_setup.configure_logging("warning", 0, False)
    run_log, started = RunLog(folder), (folder / LOCK).stat().st_mtime
    try:
        step = json_values.read(folder / MERGE)["step"]
        result = Merge(Run(folder.parent.parent), step, folder, run_log).run_all()
    except Stopped:
        run_log.info("Stopped.")
        return
    write_json(folder / RESULT, {**result, "seconds": round(time.time() - started, 1)})
    run_log.start_phase("done", f"The merged model is in {folder / result['model']}.", fraction=1.0)


if __name__ == "__main__":
    main()
    exit.exit_now()
