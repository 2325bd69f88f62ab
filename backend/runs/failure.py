"""Why a run failed: the first failing rank's traceback, and for known ends a plain sentence and the option that helps.

Floor 0. Standard library only; imports backend.runs. Read from what torchrun leaves behind: `error.json` of a rank
whose main function carries `@record`, and the log, in which `--tee=3` puts `[defaultN]:` before a rank's lines.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.runs import ERROR, LOG, RANK, RANK_LOGS, SEPARATOR

LOG_BYTES = 512 * 1024  # the end of the log that is searched
LONGEST = 400  # characters of a sentence
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
PEER_GONE = re.compile(r"(?i)connection (closed|reset)|broken pipe|remote process exited|socket closed|recvBytes")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
TRACEBACK = "Traceback (most recent call last):"
PREFIX = re.compile(r"^\[default(\d+)\]:")
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"


@dataclass(frozen=True)
class Failure:
    """`sentence` says what happened, `help` what to do; `fields` are dotted option names; `rank` None: the launcher."""

    sentence: str
    help: str = ""
    traceback: str = ""
    rank: int | None = None
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """`pattern`'s groups fill the sentence. `anywhere`: it counts in an earlier exception, or another rank's, too."""

    pattern: str
    sentence: str
    help: str
    fields: tuple[str, ...] = ()
    anywhere: bool = False


# The first match counts: what is special stands before what is general.
KNOWN = (
    Known(
        r"(?i)(CUDA|HIP|NPU|XPU|MPS)[^\n]{0,40}out of memory|torch\.(cuda\.)?OutOfMemoryError",
        "The device ran out of memory.",
        "Halve train.per_device_train_batch_size and double train.gradient_accumulation_steps, shorten data.max_length, or switch on "
        "train.activation_checkpointing.",
        (
            "train.per_device_train_batch_size",
            "train.gradient_accumulation_steps",
            "data.max_length",
            "train.activation_checkpointing",
        ),
        anywhere=True,
    ),
    Known(
        r"(?i)insufficient shared memory|unable to (open|allocate|mmap)[^\n]*shared memory|bus error",
        "The shared memory (/dev/shm) for the loader processes ran out.",
        "Set train.dataloader_num_workers to 0, or give the container more shared memory.",
        ("train.dataloader_num_workers",),
        anywhere=True,
    ),
    Known(
        r"(?i)DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|^\s*MemoryError",
        "This machine's memory (RAM) ran out.",
        "Use fewer launch.nproc_per_node or a smaller train.per_device_train_batch_size, or end other programs.",
        ("launch.nproc_per_node", "train.per_device_train_batch_size", "train.dataloader_num_workers"),
        anywhere=True,
    ),
    Known(
        r"(?i)No space left on device|Disk quota exceeded",
        "The disk is full.",
        "Make room, or keep fewer checkpoints with save.total_limit, then resume.",
        ("save.total_limit", "save.only_model"),
        anywhere=True,
    ),
    Known(
        r"(?i)EADDRINUSE|address already in use",
        "The network port on which the ranks meet is taken.",
        "Choose another launch.master_port; on one node 0 takes a free one each time, unless deepspeed is the launcher.",
        ("launch.master_port",),
        anywhere=True,
    ),
    Known(
        r"in _assign_worker_ranks|Rendezvous(Timeout|Connection)Error",
        "The nodes did not meet.",
        "Start all of them within ten minutes, the one with launch.master_addr first (of an elastic run, within one); "
        "launch.master_port must be open there.",
        ("launch.master_addr", "launch.master_port", "launch.nnodes"),
        anywhere=True,
    ),
    Known(
        r"(?i)Watchdog caught collective operation timeout|collective[^\n]*tim(ed )?out|gloo[^\n]*timed out"
        r"|Timed out (after \d+ seconds )?waiting|DistStoreError[^\n]*time",
        "A rank waited for the others longer than parallel.ddp_timeout allows.",
        "See in the other ranks' logs what held them. If a step, or the preparation of the data, is really that long, "
        "raise parallel.ddp_timeout.",
        ("parallel.ddp_timeout",),
        anywhere=True,
    ),
    Known(
        r"ModuleNotFoundError: No module named '(?P<name>[\w.]+)'",
        "The Python package that brings {name} is not installed.",
        "Install it in the environment that starts the run, then resume.",
    ),
    Known(
        r"as PyTorch extensions root\.\.\.\s*\Z",
        "It ended while it waited for a DeepSpeed operator that is built on first use.",
        "A build that was killed leaves a file named lock in that folder, on which later runs wait for ever: delete it "
        "if no build is going.",
        anywhere=True,
    ),
    Known(
        r"(?i)GatedRepoError|401 Client Error|403 Client Error",
        "The hub refuses this model or dataset without permission.",
        "Accept its terms on the hub and put HF_TOKEN into launch.env, or choose another with model.source.",
        ("model.hub_id", "data.hub_id", "launch.env"),
    ),
    Known(
        r"(?i)couldn't connect to|LocalEntryNotFoundError|OfflineModeIsEnabled|Name or service not known"
        r"|Temporary failure in name resolution",
        "The network, or the hub, could not be reached.",
        "Try again, or take files of this machine: model.source and data.source.",
        ("model.source", "data.source"),
    ),
    Known(
        r"(?i)No CUDA GPUs are available|Torch not compiled with CUDA|CUDA driver version is insufficient"
        r"|invalid device ordinal",
        "The GPU that was asked for is not to be had.",
        "Set launch.device to auto, and launch.devices to ids that this machine has.",
        ("launch.device", "launch.devices"),
    ),
    Known(
        r"(?m)^KeyError: (?P<quote>['\"])(?P<name>.+)(?P=quote)$",
        "'{name}' was looked for and is not there; most often that is a column of the data.",
        "Compare the file's column names with data.format and the column options.",
        ("data.format", "data.messages_column", "data.prompt_column", "data.completion_column", "data.text_column"),
    ),
    Known(
        r"(?m)^PermissionError: .*?(?P<quote>['\"])(?P<name>.+)(?P=quote)$",
        "No permission for {name}.",
        "Change its owner or mode, or choose another path.",
    ),
    Known(
        r"(?m)^backend\.[\w.]+: (?P<name>.+)$",  # our own errors are sentences for people already
        "{name}",
        "",
    ),
    Known(
        r"SignalException: [^\n]*Signals\.SIGINT|^KeyboardInterrupt",
        "It was interrupted from the keyboard.",
        "Resume continues from the last complete checkpoint.",
    ),
    Known(
        r"SignalException: [^\n]*Signals\.(?P<name>SIGTERM|SIGHUP)",
        "The launcher was told to end ({name}): by hand, or because the machine went down.",
        "Resume continues from the last complete checkpoint.",
    ),
)


def diagnose(folder: Path, since_ns: int, state: dict[str, Any]) -> Failure:
    """Why the last start, at `since_ns` (of the folder's file system), failed. `state` is what the supervisor wrote."""
    if cause := state.get("cause"):
        return Failure(str(cause), "Install it, or choose another with launch.launcher.", fields=("launch.launcher",))
    log = _log(folder / LOG)
    own = log.partition(ELASTIC)[0]
    code = int(state.get("exit_code") or 0)
    rank, traceback = _recorded(folder, since_ns)
    killed = _crash(log)
    if killed and (not traceback or PEER_GONE.search(traceback)):
        return _ended_by(killed[1], killed[0], own, state)
    if not traceback:
        rank = _root(log)
        traceback = _traceback(own, rank)
    if not traceback and code < 0:
        return _ended_by(-code, None, own, state)
    last = traceback[traceback.rfind(TRACEBACK) :] if traceback else own[-4000:]
    if known := _known(last) or _known(traceback, anywhere=True) or _known(own[-4000:], anywhere=True):
        return Failure(known.sentence, known.help, traceback, rank, known.fields)
    return _plain(traceback, rank, code)


def _plain(traceback: str, rank: int | None, code: int) -> Failure:
    lines = traceback.strip().splitlines()
    if not lines:
        ended = f"The launcher ended with exit code {code}." if code else "It ended before its result was written."
        return Failure(ended, "The end of the log shows what it said last.", rank=rank)
    where = "It" if rank is None else f"Rank {rank}"
    return Failure(f"{where} ended with {_short(lines[-1])}", "The traceback shows where.", traceback, rank)


def _ended_by(number: int, rank: int | None, log: str, state: dict[str, Any]) -> Failure:
    """A process that a signal ended leaves no traceback; what it said before may name the cause."""
    if number == signal.SIGABRT and (known := _known(log[-4000:])):
        return Failure(known.sentence, known.help, "", rank, known.fields)
    who = "The launcher" if rank is None else f"Rank {rank}"
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return Failure(
            f"{who} was ended by {name}.",
            "Resume continues from the last complete checkpoint."
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            else "That is a crash in compiled code; the end of the log may say where.",
            rank=rank,
        )
    fields = ("train.per_device_train_batch_size", "launch.nproc_per_node", "train.dataloader_num_workers")
    use_less = "use fewer launch.nproc_per_node, a smaller train.per_device_train_batch_size or fewer train.dataloader_num_workers"
    if state.get("oom_kills"):
        sentence = f"{who} was killed ({name}) while the kernel was short of memory (RAM)."
        return Failure(sentence, use_less[0].upper() + use_less[1:] + ".", rank=rank, fields=fields)
    sentence = f"{who} was killed ({name}), by hand or by a memory limit."
    return Failure(sentence, f"If memory (RAM) was short, {use_less}.", rank=rank, fields=fields)


def _known(text: str, anywhere: bool = False) -> Failure | None:
    for known in KNOWN:
        if anywhere and not known.anywhere:
            continue
        if match := re.search(known.pattern, text, re.MULTILINE):
            named = {name: _short(value) for name, value in match.groupdict().items()}
            return Failure(known.sentence.format(**named), known.help, fields=known.fields)
    return None


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _log(path: Path) -> str:
    """What was logged since the last start, as far as LOG_BYTES reach."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return text.replace("\r\n", "\n").rpartition("\n" + SEPARATOR)[2]


def _recorded(folder: Path, since_ns: int) -> tuple[int | None, str]:
    """Rank and traceback of the error file that a rank wrote first in this start, or of the one without ranks."""
    found = []
    for path in (folder / RANK_LOGS).glob(f"*/attempt_*/*/{ERROR}"):
        when, traceback = _error(path)
        if traceback and when >= since_ns and path.parent.name.isdigit():
            attempt = int(path.parent.parent.name.rpartition("_")[2])
            found.append((-attempt, when, _rank(path.parent), traceback))  # of ranks started again the last ones count
    if found:
        return min(found)[2:]
    when, traceback = _error(folder / ERROR)
    return None, traceback if when >= since_ns else ""


def _rank(folder: Path) -> int:
    """The rank whose folder this is: named by its number on the node, with its rank among all nodes' written in."""
    try:
        return int((folder / RANK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return int(folder.name)


def _error(path: Path) -> tuple[int, str]:
    """When it was written, and the traceback in it (empty without)."""
    try:
        when = path.stat().st_mtime_ns
        message = json.loads(path.read_text(encoding="utf-8", errors="replace"))["message"]
        return when, str(message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def _entries(log: str) -> list[tuple[int, int]]:
    """(rank, exit code) of torchrun's closing report, in its order; the root cause is its last entry."""
    report = log.partition(ELASTIC)[2]
    return [(int(r), int(c)) for r, c in re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", report)]


def _crash(log: str) -> tuple[int, int] | None:
    """(rank, signal number) of the rank that a signal ended and torchrun did not."""
    crashes = [(rank, -code) for rank, code in _entries(log) if -code in CRASHES]
    return crashes[-1] if crashes else None


def _root(log: str) -> int | None:
    entries = _entries(log)
    return entries[-1][0] if entries else None


def _traceback(log: str, rank: int | None) -> str:
    """The last traceback that `rank` logged (None: the one process), with the exceptions it came from."""
    first, lines = log.find(TRACEBACK), []
    for line in log[log.rfind("\n", 0, first) + 1 :].splitlines() if first >= 0 else ():
        prefix = PREFIX.match(line)
        if rank is None or (prefix and int(prefix[1]) == rank):
            lines.append(re.sub(r"^\[rank\d+\]: ?", "", line[prefix.end() :] if prefix else line))
    starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not starts:
        return ""
    begin = len(starts) - 1
    while begin and any(mark in line for line in lines[starts[begin - 1] : starts[begin]] for mark in CHAINED):
        begin -= 1
    end = starts[-1] + 1
    while end < len(lines) and lines[end][:1] in (" ", ""):
        end += 1
    text = "\n".join(lines[starts[begin] : end + 1])
    return "" if "torch/distributed/run.py" in text else text
