"""Slurm: the batch script of a run's job, and the script that Slurm starts on each of its nodes.

torchrun reads nodes, node rank and master address from PET_* variables, so that one command serves all nodes. A job is
asked to end by SIGTERM: before the time limit, Slurm sends it to the batch script, and at a preemption to all processes
of the nodes. Both become a stop request, after which the ranks save a checkpoint and end, and the batch script puts the
job back into the queue.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from backend.config import RunSpec
from backend.launch.clusters.share import cpus_of_gpus, with_python
from backend.machine import Machine
from backend.resolve import ResolvedRun
from backend.runs import ERROR, ERROR_FILE, JOB_SCRIPT, LOG, NODE_JOB, SPEC, STOP, Plan
from backend.runs.follower import SAYS
from backend.runs.slurm import INTERRUPTED

SIGTERM_SECONDS = 300  # before the time limit; Slurm sends it up to a minute early
# Variables that a job gets from the environment of its submission. Slurm would store all others, including secrets, in
# its own files.
INHERITED = ("HOME", "PATH", "USER", "LANG", "XDG_CACHE_HOME", "FOOTPLATE_CACHE", "HF_HOME", "HF_HUB_CACHE")
APPTAINER = ".sif"
WAIT_SECONDS = 60  # for the other nodes after the first one has ended


def as_job(made: Plan, spec: RunSpec, run: ResolvedRun, machine: Machine) -> Plan:
    """The plan of one node as that of a job on all nodes: its command submits the job and waits for its end."""
    trainer = _in_container(made.argv, spec, run, machine)
    scripts = _scripts(spec, run, machine, trainer, (*made.env, *made.defaults))
    command = (machine.python, "-m", "backend.runs.slurm", JOB_SCRIPT)
    return replace(made, argv=command, files={**made.files, **scripts}, other_nodes={}, devices={})


def _in_container(argv: Sequence[str], spec: RunSpec, run: ResolvedRun, machine: Machine) -> str:
    """The command of one node, in shell syntax. pyxis starts the whole node script in its container."""
    image = spec.slurm.container
    python = spec.slurm.container_python if image else machine.python
    command = Plan(with_python(argv, machine, python)).command()
    if not image.endswith(APPTAINER):
        return command
    binds = "".join(f" --bind {path}" for path in spec.slurm.container_mounts)
    gpus = " --nv" if run.device == "cuda" else ""
    return f'apptainer exec{gpus} --bind "$PWD"{binds} --pwd "$PWD" {image} \\\n  {command}'


def _step_options(spec: RunSpec) -> str:
    """srun's options of pyxis."""
    image = spec.slurm.container
    if not image or image.endswith(APPTAINER):
        return ""
    mounts = ["$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"]
    mounts += [path if ":" in path else f"{path}:{path}" for path in spec.slurm.container_mounts]
    where = '--container-workdir="$SLURM_SUBMIT_DIR"'
    return f' \\\n    --container-image={image} --container-mounts="{",".join(mounts)}" {where} \\\n   '


def header(spec: RunSpec, run: ResolvedRun, machine: Machine, variables: Iterable[str] = ()) -> str:
    """The lines with sbatch's options. `variables`: names that the job gets from the environment of its submission."""
    slurm = spec.slurm
    gpus = run.nproc_per_node if run.device == "cuda" else 0
    chosen = {
        "job-name": re.sub(r"[^\w.-]+", "-", spec.logging.run_name).strip("-") or "footplate",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "nodes": run.nnodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus(spec, run, machine),
        "gres": f"gpu:{gpus}" if gpus else "",
        "mem": f"{slurm.memory_gib}G" if slurm.memory_gib else "",
        "time": slurm.time_limit,
        "output": LOG,
        "open-mode": "append",
        "signal": f"B:TERM@{sigterm_seconds(spec)}" if slurm.requeue else "",
        "export": ",".join((*INHERITED, *variables)),
    }
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in chosen.items() if value]
    options += ["--requeue" if slurm.requeue else "--no-requeue", *slurm.extra]
    return "\n".join(f"#SBATCH {option}" for option in options)


def cpus(spec: RunSpec, run: ResolvedRun, machine: Machine) -> int:
    """CPUs of the job on each node: those that are set, else in proportion to its GPUs, or all without GPUs."""
    return spec.slurm.cpus or cpus_of_gpus(run, machine)


def minutes(text: str) -> float:
    """A time of Slurm: minutes, minutes:seconds, hours:minutes:seconds, days-hours:minutes:seconds, or infinite, as a
    time of zero is, too (sbatch(1), --time)."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts):
        return math.inf
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return (int(days or 0) * 24 + hours) * 60 + minutes + seconds / 60 or math.inf
    return numbers[0] + (numbers[1] / 60 if len(numbers) == 2 else 0) or math.inf


def time_text(seconds: int) -> str:
    """A time as Slurm writes it: 5:30:00, or 2-06:00:00 from a day on."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock.zfill(8)}" if days else clock


def sigterm_seconds(spec: RunSpec) -> int:
    """How long before the time limit the job is asked to end; a third of a short limit, since a job that has no more
    time than this would be asked immediately."""
    limit = 60 * minutes(spec.slurm.time_limit) if spec.slurm.time_limit else math.inf
    return int(min(SIGTERM_SECONDS, limit / 3))


def _scripts(
    spec: RunSpec, run: ResolvedRun, machine: Machine, trainer: str, variables: Iterable[str]
) -> dict[str, str]:
    """The two scripts. `trainer`: the command of one node, in shell syntax."""
    options = header(spec, run, machine, variables)
    names = {
        "stop": STOP,
        "spec": SPEC,
        "says": SAYS,
        "node_job": NODE_JOB,
        "wait": WAIT_SECONDS,
        "step": _step_options(spec),
        "python": shlex.quote(machine.python),
        "request": REQUEST_STOP.format(stop=STOP, interrupted=INTERRUPTED),
        "withdraw": WITHDRAW_STOP.format(stop=STOP),
        "follow": FOLLOW,
        "error": ERROR,
        "error_file": ERROR_FILE,
    }
    setup = "\n".join(spec.slurm.setup)
    return {
        JOB_SCRIPT: JOB.format(**names, options=options, again=AGAIN.format(stop=STOP) if spec.slurm.requeue else ""),
        NODE_JOB: NODE.format(**names, setup=f"{setup}\n" if setup else "", trainer=trainer),
    }


REQUEST_STOP = """\
interrupted="{interrupted}"
interrupt() {{ [ -e {stop} ] || printf 'save\\n%s\\n' "$interrupted" > {stop}; }}
trap interrupt TERM"""
# Deletes the request that `interrupt` has written, but not that of a user who has replaced it meanwhile.
WITHDRAW_STOP = """\
withdraw() {{
    mv -f {stop} .{stop}.job 2> /dev/null || return 1
    if grep -qsxF "$interrupted" .{stop}.job; then rm -f .{stop}.job; return 0; fi
    ln .{stop}.job {stop} 2> /dev/null; rm -f .{stop}.job; return 1
}}"""
# A signal ends `wait` early, with a status above 128; a second `wait` for a process that has ended has its status.
FOLLOW = """\
while kill -0 $! 2> /dev/null; do wait $!; done
wait $!; code=$?"""
# A job that is being canceled must not come back, and neither must one that the user has stopped meanwhile. If Slurm
# refuses to put it back, the run is stopped, not done.
AGAIN = """\
if [ $code = 0 ] && grep -qsxF "$interrupted" {stop}; then
    case $(squeue --noheader --jobs=$SLURM_JOB_ID --format=%T) in
        RUNNING | SIGNALING)
            trap '' TERM
            if withdraw; then scontrol requeue $SLURM_JOB_ID && sleep 60 || interrupt; fi ;;
    esac
fi
"""
JOB = """\
#!/usr/bin/env bash
{options}
# Slurm runs this script on the first node of the job. A requeued job resumes from the last complete checkpoint.
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || set --
unset SLURM_EXPORT_ENV
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PET_MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
PET_MASTER_PORT=$({python} -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES=$SLURM_JOB_NUM_NODES
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
{request}
{withdraw}
withdraw
srun --kill-on-bad-exit=1 --wait={wait}{step} bash {node_job} "$@" &
{follow}
# After a failure, srun ends the other nodes with SIGTERM too.
[ $code = 0 ] || withdraw
{again}exit $code
"""
NODE = """\
#!/usr/bin/env bash
# Slurm runs this script on each node of the job. Only this shell reacts to SIGTERM: torchrun would kill its ranks
# before they have saved a checkpoint, and the run would fail if its setup commands were ended.
if ! cd "$SLURM_SUBMIT_DIR" || [ ! -e {spec} ]; then
    where="The node $(hostname) does not see the run's folder $SLURM_SUBMIT_DIR"
    echo "{says}$where. All nodes need it under the same path."
    exit 1
fi
export PET_NODE_RANK=$SLURM_NODEID PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT {error_file}="$PWD/{error}"
{request}
(trap '' TERM
{setup}exec {trainer} "$@") &
{follow}
exit $code
"""
