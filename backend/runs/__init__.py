"""What a run is made of: the plan, and the names of the files in a run's folder.

Floor 0. Standard library only; imports nothing of ours. A run belongs to the disk: each file has ONE writer, and a
run's state is computed from files (`folder.py`). `supervisor.py` is the detached process that starts the launcher,
waits for it and stops it; `processes.py` holds the lock and the sweep; `failure.py` says in plain words why a run
failed, `pace.py` how long it still takes; `reading.py` reads log and metrics incrementally.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SPEC = "spec.yaml"  # what was asked                       written once, by create
RESOLVED = "resolved.json"  # what follows from spec and machine    written once, by create
PLAN = "plan.json"  # what is started                      written once, by create
DEEPSPEED = "deepspeed.json"  # its configuration, if the strategy is one of its    written once, by create
FSDP = "fsdp.json"  # the same for FSDP                     written once, by create
ACCELERATE = "accelerate.yaml"  # its launcher's configuration      written once, by create
HOSTFILE = "hostfile"  # the nodes, for deepspeed's launcher       written once, by create
ESTIMATE = "estimate.json"  # the memory that it was judged to take    written once, by create
SCRIPT = "run.sh"  # starts the same run from a shell      written once, by create
JOIN = "node"  # node-1.sh, or node.sh if elastic: joins the run from another node      written once, by create
LOCK = "lock"  # held (flock) while the run lives          by its keeper, who writes SUPERVISOR or SHELL into it
STATE = "state.json"  # started, ended, exit code, how     replaced atomically, by the supervisor only
LOG = "log.txt"  # stdout and stderr of the launcher       appended
RANK_LOGS = "ranks"  # ranks/ID/attempt_N/RANK/*          by torchrun: what each rank said, its error.json
RANK = "rank"  # beside a rank's error.json: its number among all nodes' ranks    by that rank
METRICS = "metrics.jsonl"  # one point a line              appended, by rank 0 only
PROGRESS = "progress.json"  # what it is doing now         replaced atomically, by rank 0 only
RESULT = "result.json"  # what came out                    replaced atomically, by rank 0 only
ERROR = "error.json"  # a traceback; each rank's in ranks/ by torch's elastic error handler
STOP = "stop"  # a request: "save" or "discard"            created by anyone
CHECKPOINTS = "checkpoints"
COMPLETE = "complete"  # in a checkpoint: written last     by rank 0
MODEL = "model"

SUPERVISOR, SHELL = "supervisor", "shell"  # who keeps a run; the lock's change time is when it was last started
SEPARATOR = "---- started "  # begins the line in the log that parts one start from the next
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # environment: where torch puts the root cause's traceback
RUN_MARKER = "FOOTPLATE_RUN"  # in the environment of every process of a run: the resolved folder
SKIP_CHECKS = "FOOTPLATE_SKIP_CHECKS"  # set for a run that was started in spite of errors: the trainer checks no rules


# The same setting under other names: who has set one of them has set it (c10/cuda/CUDAAllocatorConfig.h of torch 2.13).
ALIASES: Mapping[str, tuple[str, ...]] = {
    "PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
}


@dataclass(frozen=True)
class Plan:
    """What will run, to the letter. `env` holds additions only; `files` is name -> text, relative to the run's folder.

    `argv` is started with the run's folder as working directory. `defaults` are additions too, but what the
    environment has already stays. `others` is what the other nodes start there: name of its script -> argv.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def command(self, node: str = "") -> str:
        """The command as one would type it, here or on another node: environment, then one argument group a line."""
        argv = self.others[node] if node else self.argv
        return " \\\n  ".join([*self._additions(), *_groups(argv)])

    def _additions(self) -> list[str]:
        """Additions to the environment, in a shell's words."""
        defaults = [f'{name}="{_default(name, value)}"' for name, value in self.defaults.items()]
        return [*defaults, *(f"{name}={shlex.quote(value)}" for name, value in self.env.items())]

    def script(self, folder: str) -> str:
        """A self-contained bash script: makes `folder`, writes the files, runs the command."""
        parts = ["set -euo pipefail", f"mkdir -p {shlex.quote(folder)}", f"cd {shlex.quote(folder)}"]
        for name, text in self.files.items():
            parts.append(f"cat > {shlex.quote(name)} <<'FOOTPLATE_END'\n{text.rstrip()}\nFOOTPLATE_END")
        return "\n".join([*parts, self.command()]) + "\n"

    def runner(self) -> str:
        """The text of run.sh: holds the lock while the command runs, so that nobody starts the run twice.

        The command replaces the shell and inherits the lock's file (descriptor 9), so the lock is free when, and
        only when, the command has ended. Its output is seen in the terminal and on the run's page.
        """
        return RUNNER.format(
            LOCK=LOCK, SHELL=SHELL, STOP=STOP, LOG=LOG, RUN_MARKER=RUN_MARKER, SEPARATOR=SEPARATOR, ERROR=ERROR,
            ERROR_FILE=ERROR_FILE, command=self._executed(),
        )  # fmt: skip

    def joiner(self, node: str) -> str:
        """The text of a script that joins the run from another node, in the same folder. It takes no lock: the node
        that the run was started on holds it."""
        return JOINER.format(RUN_MARKER=RUN_MARKER, node=node, command=self._executed(node))

    def _executed(self, node: str = "") -> str:
        return ("env " if self._additions() else "") + self.command(node)


def start_env(environment: Mapping[str, str], defaults: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """`environment` with a plan's additions, as its command makes it."""
    found = {**environment, **env}
    for name, value in defaults.items():
        there = (found[known] for known in (name, *ALIASES.get(name, ())) if known in found)
        found[name] = next(there, value)
    return found


def _default(name: str, value: str) -> str:
    """A shell's words for `name`'s own value, one of its aliases', or `value`."""
    for known in reversed((name, *ALIASES.get(name, ()))):
        value = f"${{{known}-{value}}}"
    return value


RUNNER = """\
#!/usr/bin/env bash
# Continues from the last complete checkpoint; `./run.sh --from-scratch` starts at step 0.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
exec 9>>{LOCK}
flock --timeout 1 9 || {{ echo "This run is going already." >&2; exit 75; }}
echo {SHELL} > {LOCK}
rm -f {STOP}
export {RUN_MARKER}="$PWD" {ERROR_FILE}="$PWD/{ERROR}"
exec > >(exec tee -ai {LOG} 9>&-) 2>&1
if [ -s {LOG} ]; then echo; fi
echo "{SEPARATOR}$(date '+%F %T') by run.sh ----"
exec {command} "$@"
"""


JOINER = """\
#!/usr/bin/env bash
# Joins the run from another node, which must see this folder under the same path.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
export {RUN_MARKER}="$PWD"
exec > >(exec tee -ai "{node}.$(uname -n).txt") 2>&1
exec {command} "$@"
"""


def _groups(argv: tuple[str, ...]) -> list[str]:
    """Arguments with each option on a line beside its value: `a -m b --n=1 c` -> ['a -m b', '--n=1', 'c']."""
    lines: list[str] = []
    for argument in argv:
        quoted = shlex.quote(argument)
        own = lines and lines[-1].startswith("--") and not lines[-1].startswith("--module")
        if lines and (not argument.startswith("--") or lines[-1].endswith(" -m")) and not own:
            lines[-1] += " " + quoted
        else:
            lines.append(quoted)
    return lines


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step: a reader sees the old text or the new one. Raises OSError, leaves nothing."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
