"""The processes of a run on one node of a Ray cluster: started with the plan's environment, ended with their job.

An actor of `ray_driver.py` starts this program in the run's folder. Ray kills the actor with the job, and with it its
child processes, but not what these have started. So this process leaves its parent, and ends all processes of the node
when the pipe to the actor closes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from backend.runs import ERROR, ERROR_FILE, RAY_JOB, RAY_NODES, RUN_MARKER, files, processes, start_env
from backend.runs.folder import Run

POLL_SECONDS = 0.2


def main(arguments: Sequence[str]) -> None:
    """Arguments: the file descriptor for the exit status, further arguments of the trainer."""
    if os.fork():
        os._exit(0)  # Ray would end the child of its actor
    os.setsid()
    signal.signal(signal.SIGTERM, lambda *_: None)  # the pipe decides
    folder, rank = Path.cwd(), os.environ["PET_NODE_RANK"]
    # Marks the processes of this node, as RUN_MARKER marks those of a run that has no cluster.
    marker = folder / RAY_NODES / rank
    marker.write_text(f"{socket.gethostname()}\n", encoding="utf-8")
    plan = Run(folder).plan()
    env = start_env(os.environ, plan.defaults, plan.env)
    env |= {RUN_MARKER: str(marker), ERROR_FILE: str(folder / ERROR)}
    command = [*json.loads(files.read_text(folder / RAY_JOB))["command"], *arguments[1:]]
    launcher = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    while (status := launcher.poll()) is None:
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:  # readable means closed: nothing is written to stdin
            break
    if status is None:
        launcher.kill()
    processes.terminate(marker, sigterm_seconds=0)
    launcher.wait()
    marker.unlink(missing_ok=True)
    os.write(int(arguments[0]), str(status if status is not None else 1).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
