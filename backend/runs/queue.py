"""The queue: runs wait until their devices are free.

There is no scheduler process: the supervisor of a waiting run holds the run's lock as always, and decides from
`queue.json`, which all of them read, whether its run is next. A lease is a kernel lock (flock) on a file per device.
The supervisor and the launcher hold it, so the devices of a process that died are free at once.

The order belongs to one user on one machine, and each device has a lease in the user's own folder. A second lease, in a
folder of all users of the machine, makes runs wait for those of other users. What others put there is not trusted: only
the lock of a regular file counts, its text is not shown, and without a usable file the run does not wait for others.
With FOOTPLATE_QUEUE, a folder for order and leases, there is no second lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from backend.runs import files, json_values, ownership, processes, replace_text
from backend.runs.folder import ALIVE, Run, RunError

FOLDER = "FOOTPLATE_QUEUE"  # environment variable
CPU_SLOTS = "FOOTPLATE_CPU_SLOTS"  # environment variable: runs that may use the CPU at the same time; 1 without it
ORDER, MUTEX, DEVICES = "queue.json", "lock", "devices"
SHARED_LEASES = Path("/tmp/footplate-devices")  # of all users
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link is not followed, and a pipe not waited for
NVIDIA_SMI_SECONDS = 20
MUTEX_SECONDS = 20.0  # much longer than a process needs it, and shorter than a start waits for its supervisor


class LockedError(RunError, OSError):
    """Another process holds the queue's mutex and does not continue; the message is for users."""


@dataclass(frozen=True)
class Entry:
    """A waiting run. `devices`: lease -> label, such as {"GPU-4fe1": "GPU 0"}; `after`: the folder of a run that must
    end first and, with `after_ok`, succeed; `shares`: other programs may use the devices. `pid`, `started`: the
    supervisor, which keeps its place when the folder is renamed."""

    run: str
    devices: Mapping[str, str] = field(default_factory=dict)
    held: bool = False
    after: str = ""
    after_ok: bool = True
    shares: bool = False
    pid: int = 0
    started: int = 0

    @property
    def id(self) -> str:
        """The run's id."""
        return Path(self.run).name

    @property
    def is_alive(self) -> bool:
        """Whether the run's supervisor is still waiting."""
        return processes.is_locked(Path(self.run)) or bool(self.pid and processes.started(self.pid) == self.started)


@dataclass(frozen=True)
class Turn:
    """Whether a run may start: the file descriptors of its `leases`, else the `reason` to wait, or why it never can.
    With leases, `reason` says which runs of others it does not wait for."""

    leases: tuple[int, ...] | None = None
    reason: str = ""
    is_final: bool = False
    in_use: bool = False  # by a program outside of the queue; checking this takes a while


def folder() -> Path:
    """The folder of the order. Raises OSError if another user owns it or can change it."""
    chosen = os.environ.get(FOLDER)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = Path(chosen) if chosen else cache / "footplate/queue" / os.uname().nodename
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    if found.is_symlink() or found.lstat().st_uid not in (os.getuid(), ownership.own_uid(found)):
        message = f"The queue folder belongs to another user; set {FOLDER} to a folder that you own"
        raise PermissionError(1, message, str(found))
    if why := ownership.exposure(found, (os.getuid(), ownership.own_uid(found))):
        message = f"The queue folder {why}; run chmod go-w on it, or set {FOLDER} to a folder that you own"
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


def holders(device: str) -> list[Path | None]:
    """For each slot of a device the folder of this user's run that uses it, or None."""
    queued, found = {entry.run for entry in entries()}, []
    for name in slots(device):
        try:
            text = files.read_text(folder() / DEVICES / name).strip()
        except OSError:
            text = ""
        is_used = bool(text) and text not in queued and processes.is_locked(Path(text))
        found.append(Path(text) if is_used else None)
    return found


def leave(run: Path) -> None:
    """Remove the run from the queue."""
    with _edit() as order:
        order[:] = [entry for entry in order if entry.run != str(run)]


def rename(before: str, after: str) -> None:
    """Keep the place of a waiting run whose folder was renamed, and of the runs that wait for it."""
    with _edit(moved=(before, after)) as order:
        order[:] = [replace(entry, after=after) if entry.after == before else entry for entry in order]


def change(run: Path, **changes: Any) -> None:
    """Hold or release a waiting run (`held`), or let it share its devices (`shares`). Raises RunError."""
    with _edit() as order:
        number = _position(order, run)
        order[number] = replace(order[number], **changes)


def move(run: Path, before: Path | None = None) -> None:
    """Move a waiting run before another one, or to the end. Raises RunError."""
    if run == before:
        raise RunError(f"{run.name} cannot be moved before itself.")
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
    """A list for the descriptors of the leases that are taken. After an error, such as a full disk, they are released:
    if this process kept them open, it would wait for itself."""
    taken: list[int] = []
    try:
        yield taken
    except BaseException:
        _release(taken)
        raise


def _lease(entry: Entry, taken: list[int]) -> Turn:
    """Lease all devices of the run, or none."""
    for name, label in entry.devices.items():
        is_free, holder = _lock_one(slots(name), entry.run, taken)
        if not is_free:
            _release(taken)
            return Turn(reason=f"{holder} uses {label}.")
    if not entry.shares and (reason := _other_program(entry.devices)):
        _release(taken)
        return Turn(reason=reason, in_use=True)
    return Turn(tuple(taken), reason=_unusable(entry.devices))


def slots(name: str) -> list[str]:
    """The lease files of a device: one, but a CPU may have several slots."""
    count = os.environ.get(CPU_SLOTS, "1") if name == "cpu" else "1"
    return [name] + [
        f"{name}-{number}" for number in range(2, 1 + (int(count) if count.isascii() and count.isdecimal() else 1))
    ]


def _lock_one(names: Sequence[str], holder: str, taken: list[int]) -> tuple[bool, str]:
    """Take the first lease that is free. Returns whether there was one, and who holds the last one."""
    found = ""
    for name in names:
        before = len(taken)
        found = _lock(_own_leases() / name, holder, taken) or _lock_shared(name, holder, taken)
        if not found:
            return True, holder
        while len(taken) > before:
            processes.release(taken.pop())
    return False, found


def _lock(path: Path, holder: str, taken: list[int]) -> str:
    """Take a lease. Returns who holds it, or '' if it was free."""
    lease, is_ours = _open(path)
    taken.append(lease)
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(lease, Path(holder).parent)
    if is_ours:
        os.ftruncate(lease, 0)
        os.pwrite(lease, os.fsencode(f"{holder}\n"), 0)
    return ""


def _lock_shared(name: str, holder: str, taken: list[int]) -> str:
    """Same as `_lock`, for the lease of all users. A lease that others have made unusable counts as free; `_unusable`
    reports it in the log of the run."""
    if FOLDER in os.environ or _problem(SHARED_LEASES / name):
        return ""
    return _lock(SHARED_LEASES / name, holder, taken)


def _holder(lease: int, runs: Path) -> str:
    """Who holds a lease: the run that this user's file names, with its runs folder unless that is `runs`, or the
    process of another user. What others have written is not shown."""
    status = os.fstat(lease)
    pid, uid = _locked_by(status)
    if uid is not None and uid != os.getuid():
        return (
            f"The process {pid} of {ownership.user_name(uid)} (to start without waiting for runs of other users, set "
            f"{FOLDER} to a folder that you own)"
        )
    text = os.pread(lease, 5000, 0).decode(errors="replace").strip() if status.st_uid == os.getuid() else ""
    run = Path(printable(text))
    elsewhere = f" in the runs folder {run.parent}" if run.is_absolute() and run.parent != runs else ""
    return f"{run.name}{elsewhere}" if text else "A run of another user"


def _locked_by(status: os.stat_result) -> tuple[int, int | None]:
    """The process that took the lock of a file, and its user; None if that is not known, as when it has ended and a
    child holds the lock."""
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if "FLOCK" in words and name in words and "->" not in words:
                pid = int(words[words.index(name) - 1])
                return pid, Path(f"/proc/{pid}").stat().st_uid
    return 0, None


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _open(path: Path) -> tuple[int, bool]:
    """A lease file, and whether this user may write to it. A lock needs no permission to write, and Linux forbids
    O_CREAT for the files of other users in a folder such as /tmp (fs.protected_regular). Raises OSError, also for what
    is not a regular file."""
    with contextlib.suppress(FileExistsError):
        lease = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFE, 0o644)
        os.fchmod(lease, 0o644)  # whatever the umask is: other users lock it too
        return lease, True
    is_ours = path.lstat().st_uid == os.getuid()
    lease = os.open(path, (os.O_RDWR if is_ours else os.O_RDONLY) | SAFE)
    if not stat.S_ISREG(os.fstat(lease).st_mode):
        os.close(lease)
        raise OSError(22, "is not a regular file", str(path))
    return lease, is_ours


def _own_leases() -> Path:
    place = folder() / DEVICES
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def _problem(lease: Path) -> str:
    """Why a lease of all users cannot be used, as words; '' if it can."""
    try:
        with contextlib.suppress(FileExistsError):
            lease.parent.mkdir()
            lease.parent.chmod(0o1777)
        if not stat.S_ISDIR(lease.parent.lstat().st_mode):
            return f"{lease.parent} is not a folder"
        os.close(_open(lease)[0])
    except OSError as error:
        return f"{lease} cannot be used: {error.strerror}"
    return ""


def _unusable(devices: Mapping[str, str]) -> str:
    """Which runs of other users are not waited for, and why, as a sentence; '' if all are."""
    for name, label in devices.items():
        if FOLDER not in os.environ and (why := _problem(SHARED_LEASES / name)):
            return f"This run does not wait for runs of other users on {label}: {why}."
    return ""


def touch(leases: Sequence[int]) -> None:
    """Mark the lease files as in use."""
    for lease in leases:
        with contextlib.suppress(OSError):  # the file of another user
            os.utime(lease)


def _release(leases: list[int]) -> None:
    while leases:
        processes.release(leases.pop())


def _other_program(devices: Mapping[str, str]) -> str:
    """Which process uses one of the devices; '' for none. NVIDIA GPUs only, which have a UUID."""
    if not (gpus := [name for name in devices if name.startswith("GPU-")]):
        return ""
    # Only about these GPUs: without --id, nvidia-smi fails if any GPU of the machine is lost.
    query = ["nvidia-smi", f"--id={','.join(gpus)}", "--query-compute-apps=gpu_uuid,pid,process_name"]
    query.append("--format=csv,noheader")
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    for line in found.splitlines():
        uuid, pid, program = (part.strip() for part in (*line.split(",", 2), "", "")[:3])
        if uuid in devices:
            return f"{printable(Path(program).name) or 'A process'} (PID {pid}) uses {devices[uuid]}."
    return ""


# -- the file ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _edit(moved: tuple[str, str] = ("", "")) -> Iterator[list[Entry]]:
    """The order, to be changed in place; it is written back. One process at a time. Entries of dead supervisors are
    dropped. `moved`: the folder of a run before and after it was renamed."""
    place = folder()
    mutex = os.open(place / MUTEX, os.O_RDWR | os.O_CREAT | SAFE, 0o600)
    try:
        _lock_mutex(mutex)
        known = [replace(entry, run=moved[1]) if entry.run == moved[0] else entry for entry in _read()]
        order = [entry for entry in known if entry.is_alive]
        yield order
        replace_text(place / ORDER, json.dumps([asdict(entry) for entry in order], indent=1))
    finally:
        os.close(mutex)


def _lock_mutex(mutex: int) -> None:
    """Lock the mutex, which is held for milliseconds. Raises LockedError if a process holds it for longer."""
    deadline = time.monotonic() + MUTEX_SECONDS
    while True:
        try:
            fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockedError(_holder_sentence(mutex)) from None
        time.sleep(0.01)


def _holder_sentence(mutex: int) -> str:
    """Which process holds the mutex, and how to make it continue."""
    waited = f"The queue's file {folder() / MUTEX} has been locked for {MUTEX_SECONDS:g} seconds"
    pid, _ = _locked_by(os.fstat(mutex))
    if not pid:
        return f"{waited} by another process. End it if it hangs."
    stopped = processes.condition(pid) == "T"
    fix = f"It is stopped by a signal; kill -CONT {pid} continues it." if stopped else "End it if it hangs."
    return f"{waited} by the process with PID {pid}. {fix}"


def _read() -> list[Entry]:
    """The order as written; empty if there is none or it is damaged. Entries that are not runs are left out."""
    try:
        found = json_values.read(folder() / ORDER)
    except (FileNotFoundError, files.IrregularFile, ValueError, RecursionError):
        return []
    return [entry for each in (found if isinstance(found, list) else ()) if (entry := _entry(each))]


def _entry(value: Any) -> Entry | None:
    """The entry that was written; None if another program has changed it into something else."""
    try:
        entry = Entry(**value)
    except TypeError:
        return None
    if not isinstance(entry.devices, dict) or not entry.run:
        return None
    texts = (entry.run, entry.after, *entry.devices, *entry.devices.values())
    flags, numbers = (entry.held, entry.after_ok, entry.shares), (entry.pid, entry.started)
    is_valid = all(isinstance(text, str) and "\0" not in text for text in texts)
    is_valid = is_valid and all(isinstance(number, int) for number in numbers)
    return entry if is_valid and all(isinstance(flag, bool) for flag in flags) else None
