"""Runs: the plan of a run, and the names of the files in its folder.

Imports only the standard library. All information about a run is on disk: each file has ONE writer, and a run's state
is computed from files (`folder.py`). `supervisor.py` is the detached process that waits in the queue, starts the
launcher, waits for it and stops it; `queue.py` decides when it is a run's turn; `processes.py` has the lock and the
cleanup of leftover processes; `failure.py` explains why a run failed, `throughput.py` estimates the remaining time;
`output.py` and `log_writer.py` append the output of launcher and ranks to the log; `metrics.py` reads log and metrics
incrementally, `events.py` what happened meanwhile; `health.py` finds spikes, drops and slow ranks in them; `listing.py`
is the list of all runs, `search.py` its columns and the search in them, `notebook.py` the tags and notes of a run;
`oom.py` counts processes that the kernel killed; `resume_point.py` finds the checkpoint that a run resumes from;
`stacks.py` asks every rank what it is doing; `follower.py` follows a run's job in a cluster, `clusters.py` names the
kinds of clusters; `rehearsals.py` runs through a spec in a minute. A rehearsal is one of the detached processes that
start runs in a scratch folder (`scratch.py`); if one process can import the libraries for all runs (`warm_process.py`),
`warm_python.py` stands in for Python. `jobs.py` has the jobs that use the trained model, `validation.py` decides which
validation loss is that of a run; `lost_weights.py` finds runs of earlier versions that lost weights, `schedule.py`
predicts when waiting runs start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

# Written once, when the run is created.
SPEC = "spec.yaml"  # the options
RESOLVED = "resolved.json"  # what follows from the options and the machine (ResolvedRun)
PLAN = "plan.json"  # the launch command, its environment, and the names of the generated files
DEEPSPEED = "deepspeed.json"  # DeepSpeed config, if the strategy is ZeRO
FSDP = "fsdp.json"  # FSDP config, if the strategy is FSDP
ACCELERATE = "accelerate.yaml"  # accelerate config, if accelerate is the launcher
HOSTFILE = "hostfile"  # nodes, for the deepspeed launcher
ESTIMATE = "estimate.json"  # memory estimate
SWEEP = "sweep.json"  # the sweep that the run belongs to, and the options that it varies
SCRIPT = "run.sh"  # starts the same run from a shell
JOB_SCRIPT = "job.sh"  # the batch script of a Slurm job
NODE_JOB = "slurm-node.sh"  # what Slurm starts on each node of the job
RAY_JOB = "ray.json"  # what the Ray job reserves and starts
RAY_DRIVER = "ray-driver.py"  # what Ray runs: a copy of ray_driver.py
KUBERNETES_JOB = "kubernetes.yaml"  # the objects of a Kubernetes job
LLAMAFACTORY_RUN = "llamafactory-run.py"  # what the launcher starts with LLaMA-Factory: a copy of llamafactory_run.py
RENDEZVOUS = "rendezvous.py"  # how LLaMA-Factory's ranks meet: a copy of rendezvous.py
LLAMAFACTORY = "train.yaml"  # LLaMA-Factory's configuration
DATASET_INFO = "dataset_info.json"  # LLaMA-Factory's description of the data files
JOIN = "node"  # node-1.sh, or node.sh if elastic: joins the run from another node

# Written at any time.
ANNOTATIONS = "annotations.json"  # tags, notes, star and archive; replaced atomically by page or command line

# Written while the run is alive.
# Locked (flock) while the run is alive. Its lines: SUPERVISOR or SHELL, the id of the start, and where the folder was
# then. Its modification time is that of the start.
LOCK = "lock"
STATE = "state.json"  # start, end, exit code; replaced atomically by the supervisor
JOB = "job.json"  # the run's job in a cluster and why it waits; replaced atomically by the launcher (follower.py)
RAY_STATUS = "ray-status.json"  # why a Ray job waits; replaced atomically by its driver
RAY_NODES = "ray-nodes"  # ray-nodes/RANK, by ray_node.py: exists while processes of the run may be on that node
KUBERNETES_NODES = "kubernetes-nodes"  # kubernetes-nodes/JOB/*, by kubernetes_node.py: attempts and output of the pods
LOG = "log.txt"  # stdout and stderr of the launcher, appended
RANK_LOGS = "ranks"  # ranks/ID/attempt_N/RANK/*, by torchrun: the logs of each rank and its error.json. On one node
# also ranks/rendezvous, by torchrun, and a file named store, in which the ranks meet (backend/train/rendezvous.py)
RANK = "rank"  # next to a rank's error.json, by that rank: its global rank
METRICS = "metrics.jsonl"  # one point per line, appended by rank 0
GENERATIONS = "generations.jsonl"  # see generations.py; appended by rank 0
EVENTS = "events.jsonl"  # checkpoints, resumes and alerts, one per line, appended by rank 0
MONITOR = "monitor.json"  # the last measurement of all ranks; replaced atomically by rank 0
PROGRESS = "progress.json"  # current phase and step; replaced atomically by rank 0
WAITS_FOR_DISK = "waiting for disk space"  # a phase in it, with what cannot be saved as its text
RESULT = "result.json"  # results of the run; replaced atomically by rank 0
ERROR = "error.json"  # traceback, by torch's elastic error handler; with torchrun, one per rank under ranks/
REHEARSED = "rehearsed.jsonl"  # of a rehearsal: one completed phase per line, with its time and peak memory, by rank 0
STACKS = "stacks"  # a file per rank, by that rank: its stack traces, when a user requests them
STOP = "stop"  # stop request, "save" or "discard", then the reason; by page, command line, supervisor or rank 0
STOP_SPARE = ".stop-spare"  # by the supervisor at the start: becomes STOP where no file can be created
DELETING = "deleting"  # exists once someone has begun to delete the run; says what cannot be deleted (deletion.py)
CHECKPOINTS = "checkpoints"
COMPLETE = "complete"  # in a checkpoint: written last, by rank 0
MODEL = "model"
JOBS = "jobs"  # a folder for each job of the run that has trained, such as a merge: a run of its own (jobs.py), and
# KIND.json in it: what was requested
CERTIFICATE = "certificate.json"  # next to a merged model or a GGUF file: how it compares with the trained model
TOKEN = "token"  # in the job of a server, while it runs: what its clients have to send
EVALUATED = "evaluated.json"  # the loss of the final model on general texts, by the process of its newest evaluation
BASE = "base.json"  # the base model as rank 0 loaded it: its location, revision and fingerprint

# In EVALUATED: the loss on general texts, and how much higher it is than the base model's.
GENERAL_LOSS, FORGETTING = "general_loss", "forgetting"

WRITTEN = (PROGRESS, METRICS, MONITOR, RESULT, ERROR)  # by the trainer; a start records which were there before it

SUPERVISOR, SHELL = "supervisor", "shell"  # the first line of LOCK: who started the run
SEPARATOR = "---- started "  # begins the log line that separates one start from the next
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable: where torch writes the root cause's traceback
RUN_MARKER = "FOOTPLATE_RUN"  # environment variable of every process of a run: the resolved folder
REHEARSAL = "FOOTPLATE_REHEARSAL"  # environment variable: the trainer rehearses (backend/train/rehearsal.py)
RANDOM_ID = "{RANDOM_ID}"  # in the environment of a plan: an ID that is generated when the run is created
SERVE_TOKEN = "FOOTPLATE_SERVE_TOKEN"  # environment variable: the user's own token for servers; runs do not get it
SKIP_CHECKS = "FOOTPLATE_SKIP_CHECKS"  # environment variable: the trainer checks no rules, as `--skip-checks` asks


# Other names of the same environment variable (torch 2.13 c10/cuda/CUDAAllocatorConfig.h).
ENV_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
}


@dataclass(frozen=True)
class Plan:
    """The launch command of a run with its environment and files.

    `argv` is started in the run's folder. `env` is added to the environment; `defaults` too, except for variables that
    are set already. `files` is name -> text, relative to the folder. `other_nodes`: script name -> argv for each other
    node. `devices`: name -> label of each device of this machine that the run needs, such as {"GPU-4fe1": "GPU 0"}.
    `stop_timeout`: seconds that a stop waits for the checkpoint. `then`: what the supervisor runs in the run's folder
    after the run has failed or stopped. `partial`: files and folders that the supervisor deletes then.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)
    other_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    stop_timeout: float = 1800.0
    then: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    def with_random_id(self) -> Plan:
        """The plan of one run, with an ID that nobody can guess."""
        drawn = secrets.token_hex(16)
        return replace(self, env={name: value.replace(RANDOM_ID, drawn) for name, value in self.env.items()})

    def command(self, node: str = "") -> str:
        """The command as typed in a shell, for this or another node: environment, then one argument per line."""
        argv = self.other_nodes[node] if node else self.argv
        return " \\\n  ".join([*self._additions(), *_groups(argv)])

    def _additions(self) -> list[str]:
        """Additions to the environment, in shell syntax."""
        defaults = [f'{name}="{_default(name, value)}"' for name, value in self.defaults.items()]
        return [*defaults, *(f"{name}={shlex.quote(value)}" for name, value in self.env.items())]

    def script(self, folder: str) -> str:
        """A self-contained bash script: creates `folder`, writes the files, runs the command."""
        parts = ["set -euo pipefail", "umask 077", f"mkdir -p {shlex.quote(folder)}", f"cd {shlex.quote(folder)}"]
        for name, text in self.files.items():
            end = "FOOTPLATE_END"
            while end in text:  # otherwise the rest of the text would run as commands
                end += "_"
            parts.append(f"cat > {shlex.quote(name)} <<'{end}'\n{text.rstrip()}\n{end}")
        return "\n".join([*parts, self.command()]) + "\n"

    def run_script(self) -> str:
        """The text of run.sh: holds the lock while the command runs, so that the run cannot be started twice.

        The command replaces the shell and inherits the lock file (descriptor 9), so the lock is released exactly when
        the command ends. Its output appears in the terminal and on the page of the run.
        """
        return RUN_SCRIPT.format(
            LOCK=LOCK, SHELL=SHELL, STOP=STOP, LOG=LOG, RUN_MARKER=RUN_MARKER, SEPARATOR=SEPARATOR, ERROR=ERROR,
            ERROR_FILE=ERROR_FILE, RANK_LOGS=RANK_LOGS, FILES=" ".join(WRITTEN), command=self._executed(),
        )  # fmt: skip

    def node_script(self, node: str) -> str:
        """The text of a script that joins the run from another node, in the same folder. It takes no lock, since the
        node that started the run holds it."""
        return NODE_SCRIPT.format(RUN_MARKER=RUN_MARKER, node=node, command=self._executed(node))

    def _executed(self, node: str = "") -> str:
        return ("env " if self._additions() else "") + self.command(node)


def start_env(environment: Mapping[str, str], defaults: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the additions of a plan, as its command sets them."""
    result = {**environment, **env}
    for name, value in defaults.items():
        already_set = (result[known] for known in (name, *ENV_SYNONYMS.get(name, ())) if known in result)
        result[name] = next(already_set, value)
    return result


def _default(name: str, value: str) -> str:
    """Shell syntax for the value of `name` or of a synonym if one is set, else `value`."""
    for known in reversed((name, *ENV_SYNONYMS.get(name, ()))):
        value = f"${{{known}-{value}}}"
    return value


RUN_SCRIPT = """\
#!/usr/bin/env bash
# Resumes from the last complete checkpoint; `./run.sh --from-scratch` starts at step 0.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
earlier=$(stat -c '%i %y' {STOP} 2>/dev/null || true)
exec 9>>{LOCK}
flock --timeout 1 9 || {{ echo "This run is already running." >&2; exit 75; }}
before=$(stat -c '%s %.9Y %n' {FILES} {RANK_LOGS}/* 2>/dev/null || true)
printf '%s\n' {SHELL} "$(date +%s%N)-$$" "$PWD" "Files before this start:" "$before" > {LOCK}
if [ "$(stat -c '%i %y' {STOP} 2>/dev/null)" = "$earlier" ]; then rm -f {STOP}; fi
export {RUN_MARKER}="$PWD" {ERROR_FILE}="$PWD/{ERROR}"
exec > >(exec tee -ai {LOG} 9>&-) 2>&1
if [ -s {LOG} ]; then echo; fi
echo "{SEPARATOR}$(date '+%F %T') by run.sh ----"
exec {command} "$@"
"""


NODE_SCRIPT = """\
#!/usr/bin/env bash
# Joins the run from another node; the run folder must be on a file system that both nodes share.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"
export {RUN_MARKER}="$PWD"
exec > >(exec tee -ai "{node}.$(uname -n).txt") 2>&1
exec {command} "$@"
"""


def _groups(argv: tuple[str, ...]) -> list[str]:
    """Arguments with each option on one line with its value: `a -m b --n=1 c` -> ['a -m b', '--n=1', 'c']."""
    lines: list[str] = []
    for argument in argv:
        quoted = shlex.quote(argument)
        is_flag = lines and lines[-1].startswith("--") and not lines[-1].startswith("--module")
        if lines and (not argument.startswith("--") or lines[-1].endswith(" -m")) and not is_flag:
            lines[-1] += " " + quoted
        else:
            lines.append(quoted)
    return lines


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the text of `path` atomically, with `mode` as far as the umask allows. Raises OSError and then leaves no
    temporary file."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(new, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def request_stop(folder: Path, text: str) -> None:
    """Write the stop request of the run in `folder`. On a disk that is full or has no inodes left, a file that is
    there already becomes the request, perhaps without the text, which requests a checkpoint. Raises OSError."""
    try:
        replace_text(folder / STOP, text)
    except OSError as error:
        spare = folder / STOP_SPARE
        try:
            with contextlib.suppress(OSError):
                spare.write_text(text, encoding="utf-8")
            spare.replace(folder / STOP)
        except OSError:
            raise error from None
