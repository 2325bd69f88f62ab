"""`python -m backend.export FOLDER`: merges an adapter, or exports a GGUF file or a quantized checkpoint, as the job in
FOLDER says (backend/models/merge.py, gguf.py, quantized.py)."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from backend.export.gguf import GgufExport
from backend.export.gguf_adapter import GgufAdapterExport
from backend.export.merge import Merge
from backend.export.quantized import QuantizedExport
from backend.models.gguf import FORMATS
from backend.runs import LOCK, RESULT, files, jobs
from backend.runs.folder import Run
from backend.train import exit, logging_setup
from backend.train.run_log import RunLog, Stopped


def main() -> None:
    """Merge or export, and write the result."""
    parser = argparse.ArgumentParser(prog="python -m backend.export", description=__doc__)
    parser.add_argument("folder", type=Path, help="the job's folder")
    folder = files.held(parser.parse_args().folder)
    signal.signal(signal.SIGTERM, _stop)
    sys.excepthook = exit.print_error_of_job
    logging_setup.configure_logging("warning", 0, False)
    run_log, started = RunLog(folder), (folder / LOCK).stat().st_mtime
    try:
        run = Run(Run(folder).path.parent.parent)
        if (folder / jobs.request_file(jobs.GGUF)).exists():
            format = str(jobs.required_request(folder, jobs.GGUF)["format"])
            result = (GgufAdapterExport if FORMATS[format].base else GgufExport)(run, folder, run_log).run_all()
        elif (folder / jobs.request_file(jobs.QUANTIZE)).exists():
            result = QuantizedExport(run, folder, run_log).run_all()
        else:
            result = Merge(run, jobs.required_request(folder, jobs.MERGE)["step"], folder, run_log).run_all()
    except Stopped:
        run_log.info("Stopped.")
        return
    files.write_json(folder / RESULT, {**result, "seconds": round(time.time() - started, 1)})
    run_log.start_phase("done", f"Saved {Run(folder).path / result['model']}.", fraction=1.0)


def _stop(*_: object) -> None:
    """End as after a request to stop, so that no incomplete file is left."""
    raise Stopped


if __name__ == "__main__":
    main()
    exit.exit_now()
