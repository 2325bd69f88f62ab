"""What the jobs of a run that use its models have in common: where they run, and that one is started at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from backend import registry
from backend.runs import JOBS, files
from backend.runs.folder import Run

MUTEX = ".start-lock"  # in the folder of the jobs


def place(run: Run, is_light: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The environment and the devices of a job: the first device of the run. On the CPU, a light job has one thread and
    runs beside trainings; others have the threads of the run and wait for the CPU as it did."""
    plan, resolved = run.plan(), run.resolved()
    env = {name: value for name, value in {**plan.defaults, **plan.env}.items() if name != "PYTHONPATH"}
    devices = dict(list(plan.devices.items())[:1])
    family = str(resolved.get("device") or "cpu")
    if family == "cpu" or family not in registry.DEVICES or run.job():
        on_cpu = {**env, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        return (on_cpu, devices) if family == "cpu" and not is_light else ({**on_cpu, "OMP_NUM_THREADS": "1"}, {})
    device, ids = registry.DEVICES[family], resolved.get("device_ids") or ()
    if device.visible_devices_env and ids:
        env[device.visible_devices_env] = str(ids[0])
    return env, devices


@contextlib.contextmanager
def alone(run: Run) -> Iterator[None]:
    """One start at a time, for two pages whose users click at once."""
    place = run.path / JOBS
    place.mkdir(mode=0o700, exist_ok=True)
    with files.open_to_append(place / MUTEX) as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        yield
