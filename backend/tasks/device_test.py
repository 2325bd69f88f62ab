"""Device test: seconds of matmul, point-to-point messages and all-reduce on every rank of a spec.

It is a run in a scratch folder whose command starts backend.train.device_test instead of the trainer, on the same nodes
with the same launcher and environment.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.preflight import Report
from backend.runs import KUBERNETES_JOB, NODE_JOB, RAY_JOB, Plan
from backend.runs.folder import ALIVE, Run, RunError, runs

FOLDER = ".device-tests"  # in the runs folder
TRAINER, TEST = "backend.train", "backend.train.device_test"
LEFT_SECONDS = 60.0  # a folder older than this was left behind by a killed test


def create(root: Path, report: Report) -> Run:
    """The run of a device test in the scratch folder of the runs folder `root`. Raises RunError."""
    if report.spec.launch.trainer != "footplate":  # its command is no trainer that the test could replace
        raise RunError(
            "Only Footplate's own trainer can test devices. Add --set launch.trainer=footplate: the devices and links "
            "are the same."
        )
    for earlier in runs(root / FOLDER):
        is_old = time.time() - earlier.path.stat().st_mtime > LEFT_SECONDS
        if is_old and earlier.state not in ALIVE:
            shutil.rmtree(earlier.path, ignore_errors=True)
    return Run.create(root / FOLDER, f"{report.title} devices", planned_test(report.plan), datetime.now())


def planned_test(plan: Plan) -> Plan:
    """`plan` with the test in place of the trainer, on every node."""
    nodes = {name: _tested(argv) for name, argv in plan.other_nodes.items()}
    files = dict(plan.files)
    if NODE_JOB in files:  # the job's script has the command
        files[NODE_JOB] = files[NODE_JOB].replace(f"-m {TRAINER} ", f"-m {TEST} ")
    if RAY_JOB in files:
        files[RAY_JOB] = files[RAY_JOB].replace(f'"{TRAINER}"', f'"{TEST}"')
    if KUBERNETES_JOB in files:
        files[KUBERNETES_JOB] = re.sub(rf"(?m)^(\s*- ){re.escape(TRAINER)}$", rf"\1{TEST}", files[KUBERNETES_JOB])
    return replace(plan, argv=_tested(plan.argv), other_nodes=nodes, files=files, then=())


def _tested(argv: Sequence[str]) -> tuple[str, ...]:
    return tuple(TEST if argument == TRAINER else argument for argument in argv)


def result(run: Run) -> dict[str, Any]:
    """What backend.train.device_test has measured. Raises RunError if the test has no result."""
    found = run.result()
    if not found:
        failure = run.failure()
        raise RunError(f"{failure['sentence']} {failure['help']}".strip() if failure else run.summary()["sentence"])
    return found
