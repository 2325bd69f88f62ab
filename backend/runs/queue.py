"""The queue: runs wait until their devices are free.

Imports backend.runs. There is no scheduler process: the supervisor of a waiting run holds the run's lock as always, and
decides from `queue.json`, which all of them read, whether its run is next. A lease is a kernel lock (flock) on a file
per device. The supervisor and the launcher hold it, so the devices of a process that died are free at once.

The order belongs to one user on one machine, the leases to all users: FOOTPLATE_QUEUE names another folder for both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from backend.runs import processes, replace_text
from backend.runs.folder import ALIVE, Run, RunError

FOLDER = "FOOTPLATE_QUEUE"  # environment variable
CPU_SLOTS = "FOOTPLATE_CPU_SLOTS"  # environment variable: runs that may use the CPU at the same time; 1 without it
ORDER, MUTEX, DEVICES = "queue.json", "lock", "devices"
NVIDIA_SMI_SECONDS = 20


@dataclass(frozen=True)
class Entry:
    """A waiting run. `devices`: lease -> label, such as {"GPU-4fe1": "GPU 0"}; `after`: the folder of a run that must
    end first and, with `after_ok`, succeed; `shares`: other programs may use the devices."""

    run: str
    devices: Mapping[str, str] = field(default_factory=dict)
    held: bool = False
    after: str = ""
    after_ok: bool = True
    shares: bool = False

    @property
    def id(self) -> str:
        """The run's id."""
        return Path(self.run).name

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor is still waiting."""
        return processes.is_locked(Path(self.run))


@dataclass(frozen=True)
class Turn:
    """Whether a run may start: the file descriptors of its `leases`, else the `reason` to wait, or why it never can."""

    leases: tuple[int, ...] | None = None
    reason: str = ""
    is_final: bool = False
    in_use: bool = False  # by a program outside of the queue, which takes a while to ask for


def folder() -> Path:
    """The folder of the order. Raises OSError if it belongs to another user."""
    chosen = os.environ.get(FOLDER)
    found = Path(chosen) if chosen else Path("/tmp") / f"footplate-{os.getuid()}"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = found.lstat()
    if about.st_uid != os.getuid() or found.is_symlink():
        message = f"The queue folder belongs to another user; set {FOLDER} to a folder that you own"
        raise PermissionError(1, message, str(found))
    return found


def entries() -> list[Entry]:
    """The waiting runs in order."""
    return [entry for entry in _read() if entry.is_alive]


def join(entry: Entry) -> Turn:
    """Put the run at the end of the queue, unless it can start at once."""
    with _leases() as taken, _edit() as order:
        order[:] = [other for other in order if other.run != entry.run] + [entry]
        return _take_turn(order, entry, taken)


def turn(entry: Entry) -> Turn:
    """Whether the waiting run may start now; if so, it leaves the queue. Its own entry may be changed by others; if it
    is missing, because the file was damaged, it is put at the end."""
    order = _read()  # most runs wait for another one, which is seen without the mutex
    if (own := _entry_of(order, entry.run)) and (found := _obstacle(order, own)):
        return found
    with _leases() as taken, _edit() as order:
        if not (own := _entry_of(order, entry.run)):
            order.append(own := entry)
        return _take_turn(order, own, taken)


def leave(run: Path) -> None:
    """Remove the run from the queue."""
    with _edit() as order:
        order[:] = [entry for entry in order if entry.run != str(run)]


def change(run: Path, **changes: Any) -> None:
    """Hold or release a waiting run (`held`), or let it share its devices (`shares`). Raises RunError."""
    with _edit() as order:
        number = _position(order, run)
        order[number] = replace(order[number], **changes)


def move(run: Path, before: Path | None = None) -> None:
    """Move a waiting run before another one, or to the end. Raises RunError."""
    with _edit() as order:
        entry = order.pop(_position(order, run))
        order.insert(_position(order, before) if before else len(order), entry)


def _entry_of(order: Sequence[Entry], run: str) -> Entry | None:
    return next((entry for entry in order if entry.run == run), None)


def _position(order: Sequence[Entry], run: Path) -> int:
    for number, entry in enumerate(order):
        if entry.run == str(run):
            return number
    raise RunError(f"{run.name} is not waiting in the queue.")


# -- the decision --------------------------------------------------------------------------------------------------


def _take_turn(order: list[Entry], entry: Entry, taken: list[int]) -> Turn:
    """Take the run's leases and remove it from the queue if nothing is in its way. The caller holds the mutex."""
    found = _obstacle(order, entry) or _lease(entry, taken)
    if found.leases is not None or found.is_final:
        order.remove(entry)
    return found


def _obstacle(order: Sequence[Entry], entry: Entry) -> Turn | None:
    """Why the run is not next, except for its devices; None if it is."""
    if entry.held:
        return Turn(reason="This run is on hold.")
    if waits := _predecessor(entry):
        return waits
    before = 0
    for other in order[: order.index(entry)]:
        if set(entry.devices) & set(other.devices) and not other.held and other.is_alive and not _predecessor(other):
            before += 1
            first = other.id
    if before:
        return Turn(reason=f"{first} is ahead of this run." if before == 1 else f"{before} runs are ahead of this run.")
    return None


def _predecessor(entry: Entry) -> Turn | None:
    """Why the run cannot start yet, or never, because of the run that it comes after."""
    if not entry.after:
        return None
    other = Run(Path(entry.after))
    state = other.state if other.path.is_dir() else "deleted"
    if state in (*ALIVE, "new"):
        return Turn(reason=f"{other.id} must {'succeed' if entry.after_ok else 'end'} first.")
    if entry.after_ok and state != "done":
        ended = {"failed": "failed", "stopped": "was stopped", "deleted": "was deleted"}.get(state, "was lost")
        reason = f"This run was to start only after {other.id} succeeded, but that run {ended}."
        return Turn(reason=reason, is_final=True)
    return None


# -- leases --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _leases() -> Iterator[list[int]]:
    """The descriptors of the leases that are taken; released after an error such as a full disk. While this process
    kept them open, it would wait for itself."""
    taken: list[int] = []
    try:
        yield taken
    except BaseException:
        _release(taken)
        raise


def _lease(entry: Entry, taken: list[int]) -> Turn:
    """Lease all devices of the run, or none."""
    for name, label in entry.devices.items():
        is_free, holder = _lock_one(_slots(name), entry.id, taken)
        if not is_free:
            _release(taken)
            return Turn(reason=f"{holder or 'A run of another user'} uses {label}.")
    if not entry.shares and (reason := _other_program(entry.devices)):
        _release(taken)
        return Turn(reason=reason, in_use=True)
    return Turn(tuple(taken))


def _slots(name: str) -> list[str]:
    """The lease files of a device: one, but a CPU may have several slots."""
    count = os.environ.get(CPU_SLOTS, "1") if name == "cpu" else "1"
    return [name] + [f"{name}-{number}" for number in range(2, 1 + (int(count) if count.isdigit() else 1))]


def _lock_one(names: Sequence[str], holder: str, taken: list[int]) -> tuple[bool, str]:
    """Take the first lease that is free: whether there is one, and who holds the last one."""
    place, found = _lease_folder(), ""
    for name in names:
        lease, is_ours = _open(place / name)
        taken.append(lease)
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found = os.pread(lease, 400, 0).decode(errors="replace").strip()
            os.close(taken.pop())
            continue
        if is_ours:
            os.ftruncate(lease, 0)
            os.pwrite(lease, f"{holder}\n".encode(), 0)
        return True, holder
    return False, found


def _open(path: Path) -> tuple[int, bool]:
    """A lease file, and whether this user may write to it. A lock needs no permission to write, and Linux forbids
    O_CREAT for the files of other users in a folder such as /tmp (fs.protected_regular)."""
    safe = os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | safe, 0o644), True
    if path.lstat().st_uid == os.getuid():
        return os.open(path, os.O_RDWR | safe), True
    return os.open(path, os.O_RDONLY | safe), False


def _lease_folder() -> Path:
    """The folder of the leases, where every user may create one."""
    if FOLDER in os.environ:
        place = folder() / DEVICES
        place.mkdir(exist_ok=True)
        return place
    place = Path("/tmp/footplate-devices")
    with contextlib.suppress(FileExistsError):
        place.mkdir()
        place.chmod(0o1777)
    return place


def touch(leases: Sequence[int]) -> None:
    """Mark the lease files as in use."""
    for lease in leases:
        with contextlib.suppress(OSError):  # of another user
            os.utime(lease)


def _release(leases: list[int]) -> None:
    while leases:
        os.close(leases.pop())


def _other_program(devices: Mapping[str, str]) -> str:
    """Which process uses one of the devices; '' for none. NVIDIA GPUs only, which have a UUID."""
    if not any(name.startswith("GPU-") for name in devices):
        return ""
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    for line in found.splitlines():
        uuid, pid, program = (part.strip() for part in (*line.split(",", 2), "", "")[:3])
        if uuid in devices:
            return f"{Path(program).name or 'A process'} (PID {pid}) uses {devices[uuid]}."
    return ""


# -- the file ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _edit() -> Iterator[list[Entry]]:
    """The order, to be changed in place; it is written back. One process at a time. Entries of dead supervisors are
    dropped."""
    place = folder()
    mutex = os.open(place / MUTEX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        order = [entry for entry in _read() if entry.is_alive]
        yield order
        replace_text(place / ORDER, json.dumps([asdict(entry) for entry in order], indent=1))
    finally:
        os.close(mutex)


def _read() -> list[Entry]:
    """The order as written; empty if there is none or it is damaged."""
    try:
        return [Entry(**entry) for entry in json.loads((folder() / ORDER).read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError, TypeError):
        return []
