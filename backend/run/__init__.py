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
PLAN = "plan.json"  # what is started                      written once, by create
DEEPSPEED = "deepspeed.json"  # its configuration, if the strategy is one of its    written once, by create
FSDP = "fsdp.json"  # the same for FSDP                     written once, by create
SCRIPT = "run.sh"  # starts the same run from a shell      written once, by create
LOCK = "lock"  # held (flock) while the run lives          by its keeper, who writes SUPERVISOR or SHELL into it
STATE = "state.json"  # started, ended, exit code, how     replaced atomically, by the supervisor only
LOG = "log.txt"  # stdout and stderr of the launcher       appended
RANK_LOGS = "ranks"  # ranks/ID/attempt_N/RANK/*          by torchrun: what each rank said, its error.json
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
COOKIE = "FOOTPLATE_RUN"  # in the environment of every process of a run: the resolved folder


@dataclass(frozen=True)
class Plan:
    """What will run, to the letter. `env` holds additions only; `files` is name -> text, relative to the run's folder.

    `argv` is started with the run's folder as working directory.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def command(self) -> str:
        """The command as one would type it: environment additions, then one argument group a line."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " \\\n  ".join([*env, *_groups(self.argv)])

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
        command = self.command() if not self.env else "env " + self.command()
        return RUNNER.format(
            LOCK=LOCK, SHELL=SHELL, STOP=STOP, LOG=LOG, COOKIE=COOKIE, SEPARATOR=SEPARATOR, ERROR=ERROR,
            ERROR_FILE=ERROR_FILE, command=command,
        )  # fmt: skip


RUNNER = """\
#!/usr/bin/env bash
# Continues from the last complete checkpoint; `./run.sh --anew` begins at step 0.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
exec 9>>{LOCK}
flock --timeout 1 9 || {{ echo "This run is going already." >&2; exit 75; }}
echo {SHELL} > {LOCK}
rm -f {STOP}
export {COOKIE}="$PWD" {ERROR_FILE}="$PWD/{ERROR}"
exec > >(exec tee -ai {LOG} 9>&-) 2>&1
if [ -s {LOG} ]; then echo; fi
echo "{SEPARATOR}$(date '+%F %T') by run.sh ----"
exec {command} "$@"
"""


def _groups(argv: tuple[str, ...]) -> list[str]:
    """Arguments with each option on a line beside its value: `a -m b --n=1 c` -> ['a -m b', '--n=1', 'c']."""
    lines: list[str] = []
    for argument in argv:
        quoted = shlex.quote(argument)
        if lines and (not argument.startswith("--") or lines[-1].endswith(" -m")) and not lines[-1].startswith("--"):
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
