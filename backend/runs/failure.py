"""Why a run failed: the traceback of the rank that failed first, and for known failures a message with a fix.

Reads what torchrun leaves behind: `error.json` of ranks whose main function has `@record`, and the log, in which
`--tee=3` puts `[defaultN]:` before the lines of a rank.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.runs import ERROR, LOG, PLAN, RANK, RANK_LOGS, SEPARATOR, device_memory, files, json_values
from backend.runs.freshness import BEFORE, is_fresh

LOG_BYTES = 512 * 1024  # the end of the log that is searched
MAX_MESSAGE = 400  # characters
MAX_LINE = 1000  # characters of a line of the log or a traceback
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
PEER_GONE = re.compile(r"(?i)connection (closed|reset)|broken pipe|remote process exited|socket closed|recvBytes")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
TRACEBACK = "Traceback (most recent call last):"
CAUSED = "The above exception was the direct cause of the following exception:"
PREFIX = re.compile(r"^\[default(\d+)\]:")
OWN = re.compile(r"backend\.[\w.]+: .")
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"


@dataclass(frozen=True)
class Failure:
    """`sentence` says what happened and `help` how to fix it; `fields` are option keys; `rank` None: the launcher;
    `kind` one of the kinds below that have remedies (backend/tasks/remedies.py), or ''."""

    sentence: str
    help: str = ""
    traceback: str = ""
    rank: int | None = None
    fields: tuple[str, ...] = ()
    kind: str = ""


DEVICE_MEMORY, HOST_MEMORY, SHARED_MEMORY, DISK = "device memory", "host memory", "shared memory", "disk"
PORT, TIMEOUT, DEVICE, COLUMNS = "port", "timeout", "device", "columns"
DIVERGED, LAUNCHER, CHECKS = "diverged", "launcher", "checks"
ACCESS, MISSING, MODULE = "access", "missing", "module"
PRIVATE = (
    "Check the ID. If it is private, store a Hugging Face token of an account that can see it: below model.hub_id on "
    "the page, or with hf auth login. HF_TOKEN in the environment of Footplate takes precedence."
)


@dataclass(frozen=True)
class KnownFailure:
    """A failure by the text that it leaves. The groups of `pattern` fill the sentence. `anywhere`: the pattern may also
    match an earlier exception in the traceback, or the log of another rank."""

    pattern: str
    sentence: str
    help: str
    fields: tuple[str, ...] = ()
    anywhere: bool = False
    kind: str = ""


# The first match counts, so specific patterns come before general ones.
KNOWN_FAILURES = (
    KnownFailure(r"(?m)^backend\.publish\.\w+: (?P<name>.+)$", "{name}", "", anywhere=True),
    KnownFailure(
        r"(?m)^backend\.runs\.follower: (?P<name>.+)$",
        "{name}",
        "Resume submits a new job, which continues from the last complete checkpoint.",
        anywhere=True,
    ),
    KnownFailure(
        r"(?i)(CUDA|HIP|NPU|XPU|MPS)[^\n]{0,40}out of memory|torch\.(cuda\.)?OutOfMemoryError",
        "The device ran out of memory.",
        "Halve train.per_device_train_batch_size and double train.gradient_accumulation_steps, reduce data.max_length, "
        "or enable train.activation_checkpointing.",
        (
            "train.per_device_train_batch_size",
            "train.gradient_accumulation_steps",
            "data.max_length",
            "train.activation_checkpointing",
        ),
        anywhere=True,
        kind=DEVICE_MEMORY,
    ),
    KnownFailure(
        r"(?i)insufficient shared memory|unable to (open|allocate|mmap)[^\n]*shared memory|bus error",
        "The DataLoader workers ran out of shared memory (/dev/shm).",
        "Set train.dataloader_num_workers to 0, or give the container more shared memory (docker run --shm-size).",
        ("train.dataloader_num_workers",),
        anywhere=True,
        kind=SHARED_MEMORY,
    ),
    KnownFailure(
        r"(?i)DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|^[ \t]*MemoryError",
        "The machine ran out of CPU memory (RAM).",
        "Reduce launch.nproc_per_node or train.per_device_train_batch_size, or stop other programs.",
        ("launch.nproc_per_node", "train.per_device_train_batch_size", "train.dataloader_num_workers"),
        anywhere=True,
        kind=HOST_MEMORY,
    ),
    KnownFailure(
        r"(?i)No space left on device|Disk quota exceeded",
        "The disk is full, or its quota is exceeded.",
        "Free disk space, or keep fewer checkpoints with save.total_limit, then resume.",
        ("save.total_limit", "save.only_model"),
        anywhere=True,
        kind=DISK,
    ),
    KnownFailure(
        r"(?i)EADDRINUSE|address already in use|on port .\d+., but another process is utilizing it",
        "The master port is in use by another process.",
        "Choose another launch.master_port.",
        ("launch.master_port",),
        anywhere=True,
        kind=PORT,
    ),
    KnownFailure(
        r"in _assign_worker_ranks|Rendezvous(Timeout|Connection)Error",
        "The rendezvous failed: not all nodes joined in time.",
        "Start the node with launch.master_addr first and the others within ten minutes, and open launch.master_port "
        "on it.",
        ("launch.master_addr", "launch.master_port", "launch.nnodes"),
        anywhere=True,
    ),
    KnownFailure(
        r"(?m)^backend\.[\w.]+: (?P<name>Rank \d.+ \(parallel\.ddp_timeout\)[^.]*\.)",
        "{name}",
        "Check the log of this rank and its host for the cause of the delay; if a step takes that long, raise "
        "parallel.ddp_timeout. Resume continues from the last complete checkpoint.",
        ("parallel.ddp_timeout",),
        kind=TIMEOUT,
    ),
    KnownFailure(
        r"(?i)Watchdog caught collective operation timeout|collective[^\n]*tim(ed )?out|gloo[^\n]*timed out"
        r"|Timed out (after \d+ seconds )?waiting|DistStoreError[^\n]*time",
        "A rank waited longer than parallel.ddp_timeout for the other ranks.",
        "Check the logs of the other ranks for the cause of the delay. If a step or the data preparation takes that "
        "long, raise parallel.ddp_timeout.",
        ("parallel.ddp_timeout",),
        anywhere=True,
        kind=TIMEOUT,
    ),
    KnownFailure(
        r"ModuleNotFoundError: No module named '(?P<name>[\w.]+)'",
        "The Python module {name} is not installed.",
        "Install its package in the environment that starts the run, then resume.",
        kind=MODULE,
    ),
    KnownFailure(
        r"as PyTorch extensions root\.\.\.\s*\Z",
        "The run ended while it built a DeepSpeed operator, or waited for another process to build it.",
        "Resume continues the build.",
        anywhere=True,
    ),
    # The Hub answers 401 also if no repository has the ID, so these come before the next one.
    KnownFailure(
        r"Dataset '(?P<name>[^'\n]+)' doesn't exist on the Hub",
        "The Hugging Face Hub has no dataset {name}, or it is private.",
        PRIVATE,
        ("data.hub_id",),
        kind=MISSING,
    ),
    KnownFailure(
        r"(?P<name>[^\s/]+/[^\s/]+) is not a local folder and is not a valid model identifier",
        "The Hugging Face Hub has no model {name}, or it is private.",
        PRIVATE,
        ("model.hub_id",),
        kind=MISSING,
    ),
    KnownFailure(
        "RepositoryNotFoundError",
        "The Hugging Face Hub has no such model or dataset, or it is private.",
        PRIVATE,
        ("model.hub_id", "data.hub_id"),
        kind=MISSING,
    ),
    KnownFailure(
        r"(?i)GatedRepoError|is a gated dataset on the Hub|40[13] Client Error|Client error '40[13] ",
        "The Hugging Face Hub denied access to this model or dataset.",
        "Accept its terms on the Hub, and store a Hugging Face token of the same account: below model.hub_id on the "
        "page, or with hf auth login. HF_TOKEN in the environment of Footplate takes precedence. Or choose another "
        "model or dataset.",
        ("model.hub_id", "data.hub_id"),
        kind=ACCESS,
    ),
    KnownFailure(
        r"(?i)couldn't connect to|LocalEntryNotFoundError|OfflineModeIsEnabled|Name or service not known"
        r"|Temporary failure in name resolution",
        "The Hugging Face Hub, or the network, could not be reached.",
        "Try again, or use local files with model.source and data.source.",
        ("model.source", "data.source"),
    ),
    KnownFailure(
        r"(?i)No CUDA GPUs are available|Torch not compiled with CUDA|CUDA driver version is insufficient"
        r"|invalid device ordinal",
        "The requested GPU is not available.",
        "Set launch.device to auto, and launch.devices to device IDs of this machine.",
        ("launch.device", "launch.devices"),
        kind=DEVICE,
    ),
    KnownFailure(  # but not a KeyError in an optimizer, which looks for its own state
        r"(?ms)\A(?!.*/torch/optim/).*^KeyError: (?P<quote>['\"])(?!attribute )(?P<name>[^\n]+)(?P=quote)$",
        "The key '{name}' was not found. The most frequent cause is a missing column in the data.",
        "Compare the columns of the data files with data.format and the column options.",
        ("data.format", "data.messages_column", "data.prompt_column", "data.completion_column", "data.text_column"),
        kind=COLUMNS,
    ),
    KnownFailure(
        r"(?m)^PermissionError: .*?(?P<quote>['\"])(?P<name>.+)(?P=quote)$",
        "The run has no permission to access {name}.",
        "Change the owner or mode of that path, or use another path.",
    ),
    KnownFailure(
        r"(?m)^backend\.[\w.]+: (?P<name>Training diverged: .+\.) Start a new run",
        "{name}",
        "Start a new run with a lower train.learning_rate or more train.warmup_steps, and with bf16 or fp32 if it uses "
        "fp16.",
        ("train.learning_rate", "train.warmup_steps", "precision.compute", "train.max_nonfinite_steps"),
        kind=DIVERGED,
    ),
    KnownFailure(
        r"(?m)^backend\.[\w.]+: (?P<name>.+)$",  # errors of Footplate are messages for users already
        "{name}",
        "",
        kind=CHECKS,
    ),
    KnownFailure(
        r"SignalException: [^\n]*Signals\.SIGINT|^KeyboardInterrupt",
        "The run was interrupted from the keyboard.",
        "Resume continues from the last complete checkpoint.",
    ),
    KnownFailure(
        r"SignalException: [^\n]*Signals\.(?P<name>SIGTERM|SIGHUP)",
        "The launcher received {name}: it was terminated, or the machine shut down.",
        "Resume continues from the last complete checkpoint.",
    ),
)


# What helps if a job fails, by the kind of the failure.
HELP_OF_JOBS: Mapping[str, str] = {
    DEVICE_MEMORY: "Stop other programs that use the device, then try again.",
    HOST_MEMORY: "Stop other programs, or use a machine with more CPU memory, then try again.",
    SHARED_MEMORY: "Give the container more shared memory (docker run --shm-size), then try again.",
    DISK: "Free disk space, then try again.",
    DEVICE: "Check that the device of the run is available, then try again.",
    ACCESS: "Accept its terms on the Hub, and store a Hugging Face token of the same account (hf auth login), then try "
    "again.",
    MISSING: "Check its ID. If it is private, store a Hugging Face token of an account that can see it (hf auth "
    "login), then try again.",
    MODULE: "Install its package in the environment of Footplate, then try again.",
}


def diagnose(folder: Path, since_ns: int, state: dict[str, Any]) -> Failure:
    """Why the last start failed. `state`: as of `start_state`; `since_ns`: when it began, if that has no versions."""
    found = _diagnose(folder, since_ns, state)
    about = json_values.read_object(folder / PLAN).get("about")
    return _of_job(found, state) if isinstance(about, dict) and about.get("kind") else found


def _of_job(found: Failure, state: Mapping[str, Any]) -> Failure:
    """What a failure means for a job (jobs.py), which has no launcher, options or checkpoints."""
    if found.kind == COLUMNS:  # a training's most frequent KeyError
        found = _unknown_failure(found.traceback, None, int(state.get("exit_code") or 0))
    help = found.help
    if "SIGKILL" in found.sentence and not found.kind:
        help = f"If CPU memory (RAM) was short: {HELP_OF_JOBS[HOST_MEMORY]}"
    elif found.fields or "esume" in help:
        help = HELP_OF_JOBS.get(found.kind, "Try again.")
    sentence = re.sub(r"^The (launcher|run)\b", "The process", found.sentence)
    return replace(found, sentence=sentence, help=help, fields=())


def _diagnose(folder: Path, since_ns: int, state: dict[str, Any]) -> Failure:
    if "cause" in state and state.get("exit_code") is None:  # of a launcher that ran: why the run stopped itself
        return Failure(
            str(state["cause"]),
            "Install it, or choose another launcher with launch.launcher.",
            fields=("launch.launcher",),
            kind=LAUNCHER,
        )
    log = _log(folder / LOG)
    run_log = log.partition(ELASTIC)[0]
    code = int(state.get("exit_code") or 0)
    rank, traceback = _recorded(folder, since_ns, state)
    killed = _crash(log)
    if killed and (not traceback or PEER_GONE.search(traceback)):
        return _ended_by(killed[1], killed[0], run_log, state)
    if not traceback:
        rank = _root(log)
        traceback = _traceback(run_log, rank)
        end = run_log.rstrip().rpartition("\n")[2]
        if OWN.match(end) and end not in traceback:  # a job's error; the traceback is that of a program it ran
            traceback = end
    if not traceback and code < 0:
        return _ended_by(-code, None, run_log, state)
    last = _last(traceback) if traceback else run_log[-4000:]
    if known := _known(last) or _known(traceback, anywhere=True) or _known(run_log[-4000:], anywhere=True):
        return replace(_with_amounts(known, traceback or run_log), traceback=traceback, rank=rank)
    return _unknown_failure(traceback, rank, code)


def _last(tracebacks: str) -> str:
    """The last traceback, with those of the exceptions that it names as its causes."""
    start = tracebacks.rfind(TRACEBACK)
    while start > 0 and tracebacks[:start].rstrip().endswith(CAUSED):
        start = tracebacks.rfind(TRACEBACK, 0, start)
    return tracebacks[max(start, 0) :]


def _unknown_failure(traceback: str, rank: int | None, code: int) -> Failure:
    lines = traceback.strip().splitlines()
    if not lines:
        message = f"The launcher exited with code {code}." if code else "The run ended before it wrote its result."
        return Failure(message, "See the end of the log.", rank=rank)
    subject = "The run" if rank is None else f"Rank {rank}"
    return Failure(f"{subject} failed with {_short(lines[-1])}", "See the traceback.", traceback, rank)


def _ended_by(number: int, rank: int | None, log: str, state: dict[str, Any]) -> Failure:
    """A process that was killed by a signal has no traceback; its log may contain the cause."""
    if number == signal.SIGABRT and (known := _known(log[-4000:])):
        return replace(known, rank=rank)
    who = "The launcher" if rank is None else f"Rank {rank}"
    name = signal.Signals(number).name
    if number != signal.SIGKILL:
        return Failure(
            f"{who} was terminated by {name}.",
            "Resume continues from the last complete checkpoint."
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            else "This is a crash in native code; the end of the log may show where.",
            rank=rank,
        )
    fields = ("train.per_device_train_batch_size", "launch.nproc_per_node", "train.dataloader_num_workers")
    reduce = "reduce launch.nproc_per_node, train.per_device_train_batch_size or train.dataloader_num_workers"
    if state.get("oom_kills"):
        sentence = f"{who} was killed ({name}) because the machine ran out of CPU memory (RAM)."
        return Failure(sentence, reduce[0].upper() + reduce[1:] + ".", rank=rank, fields=fields, kind=HOST_MEMORY)
    sentence = f"{who} was killed ({name}) by a user or by a memory limit."
    return Failure(sentence, f"If CPU memory (RAM) was short, {reduce}.", rank=rank, fields=fields)


def _with_amounts(known: Failure, text: str) -> Failure:
    """The failure with the amounts of memory that torch's error names."""
    found = device_memory.parse(text) if known.kind == DEVICE_MEMORY else None
    return replace(known, sentence=device_memory.sentence(found)) if found else known


def _known(text: str, anywhere: bool = False) -> Failure | None:
    for known in KNOWN_FAILURES:
        if anywhere and not known.anywhere:
            continue
        if match := re.search(known.pattern, text, re.MULTILINE):
            named = {name: _short(value) for name, value in match.groupdict().items()}
            return Failure(known.sentence.format(**named), known.help, fields=known.fields, kind=known.kind)
    return None


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def _log(path: Path) -> str:
    """The last LOG_BYTES of the log since the last start."""
    try:
        with files.open_to_read(path) as file:
            file.seek(max(0, file.seek(0, 2) - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    text = text.replace("\r\n", "\n").rpartition("\n" + SEPARATOR)[2]
    return _clip_lines(text)


def _clip_lines(text: str) -> str:
    """Lines are clipped, because the patterns take quadratic time in the length of a line."""
    return re.sub(rf"([^\n]{{{MAX_LINE}}})[^\n]+", r"\1", text)


def _recorded(folder: Path, since_ns: int, state: Mapping[str, Any]) -> tuple[int | None, str]:
    """Rank and traceback of the first error file of this start; rank None for a single process."""

    def is_of_start(name: str, when: int) -> bool:
        return is_fresh(folder, name, state) if BEFORE in state else when >= since_ns

    found = []
    for path in (folder / RANK_LOGS).glob(f"*/attempt_*/*/{ERROR}"):
        when, traceback = _error(path)
        if traceback and path.parent.name.isdigit() and is_of_start(f"{RANK_LOGS}/{path.parts[-4]}", when):
            attempt = int(path.parent.parent.name.rpartition("_")[2])
            found.append((-attempt, when, _rank(path.parent), traceback))  # after restarts, the last attempt counts
    if found:
        return min(found)[2:]
    when, traceback = _error(folder / ERROR)
    return None, traceback if is_of_start(ERROR, when) else ""


def _rank(folder: Path) -> int:
    """The global rank of a log folder; torchrun names the folder by the local rank."""
    try:
        return int(files.read_text(folder / RANK))
    except (OSError, ValueError):
        return int(folder.name)


def _error(path: Path) -> tuple[int, str]:
    """The modification time and the traceback of an error file; (0, '') if it cannot be read."""
    try:
        when = path.stat().st_mtime_ns
        message = json_values.read(path, errors="replace")["message"]
        text = str(message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message)
        return when, _clip_lines(text[-LOG_BYTES:])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def _entries(log: str) -> list[tuple[int, int]]:
    """(rank, exit code) of torchrun's failure report, in its order; the last entry is the root cause."""
    report = log.partition(ELASTIC)[2]
    return [(int(r), int(c)) for r, c in re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", report)]


def _crash(log: str) -> tuple[int, int] | None:
    """(rank, signal number) of the rank that was killed by a signal that torchrun did not send."""
    crashes = [(rank, -code) for rank, code in _entries(log) if -code in CRASHES]
    return crashes[-1] if crashes else None


def _root(log: str) -> int | None:
    entries = _entries(log)
    return entries[-1][0] if entries else None


def _traceback(log: str, rank: int | None) -> str:
    """The last traceback that `rank` logged (None: a single process), with the exceptions that it chains to."""
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
