"""`python -m backend.publish FOLDER`: publishes a model, as the job in FOLDER (publication.py) says.
`--state REPOSITORY` prints what a publication would find there, as JSON."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from backend.publish import folder as folders
from backend.publish import hub
from backend.publish.contents import Request, contents
from backend.runs import LOCK, PROGRESS, RESULT, files, jobs
from backend.runs.folder import Run, RunError

REPORT_SECONDS = 0.25  # between two writes of the progress of a file


def main() -> int:
    """Publish, and write the result; or print the state of a repository."""
    parser = argparse.ArgumentParser(prog="python -m backend.publish", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="the job's folder")
    parser.add_argument("--state", metavar="REPOSITORY", help="print the state of this repository")
    parser.add_argument("--public", action="store_true", help="with --state: publish it as public")
    arguments = parser.parse_args()
    try:
        if arguments.state:
            print(json.dumps(hub.state(arguments.state, arguments.public)))
            return 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a stop: an incomplete copy is removed
        run_job(files.held(arguments.folder))
    except (hub.PublishError, RunError) as error:
        if arguments.state:
            print(json.dumps({"error": str(error)}))
            return 0
        print(f"backend.publish.PublishError: {error}", file=sys.stderr)  # runs/failure.py shows the sentence
        return 1
    return 0


def run_job(job: Path) -> None:
    """Publish what the job in this folder says. Raises RunError and PublishError."""
    started = (job / LOCK).stat().st_mtime
    planned = jobs.required_request(job, jobs.PUBLISH)
    request = Request(**planned["request"])
    report = _Report(job)
    report("Collecting the files.", 0.0)
    found = contents(Run(Run(job).path.parent.parent), request)
    if found.versions() != planned["files"]:
        raise RunError("The files of the model have changed since they were listed. Publish again.")
    try:
        if request.folder:
            result = folders.publish(found, Path(request.folder), report)
        else:
            result = hub.publish(found, request.repository, request.public, report)
    except OSError as error:
        raise RunError(
            f"{error.filename or 'A file'}: {error.strerror or error}. Fix this, then publish again."
        ) from error
    what = {"files": len(found.files), "bytes": found.bytes, "seconds": round(time.time() - started, 1)}
    files.write_json(job / RESULT, {**result, **what})
    report(f"Published: {result.get('url') or result['folder']}", 1.0, "done")


class _Report:
    """Writes the log, and progress.json of the job."""

    def __init__(self, job: Path) -> None:
        self.job, self.text, self.written = job, "", 0.0

    def __call__(self, text: str, fraction: float, phase: str = "publishing") -> None:
        if text == self.text and time.monotonic() - self.written < REPORT_SECONDS:
            return
        if text != self.text:
            print(f"{time.strftime('%T')} {text}", flush=True)
        self.text, self.written = text, time.monotonic()
        progress = {"phase": phase, "text": text, "fraction": fraction, "time": time.time()}
        files.write_json(self.job / PROGRESS, progress)


if __name__ == "__main__":
    sys.exit(main())
