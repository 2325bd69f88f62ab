"""Rules about extra sbatch options that break the job, or replace options that the checks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backend.config import RunSpec
from backend.config.options import get
from backend.launch.clusters.slurm_options import SbatchOption, gpu_count, parse, without
from backend.rules.base import Case, Example, Fix, Violation, error, reasons, warning
from backend.runs import LOG
from backend.wording import counted

EXTRA = "slurm.extra"
SLURM_SPEC = {"launch.place": "slurm"}
# sbatch options with a counterpart in Footplate, whose value the checks and the preview use.
OPTIONS = {
    "partition": "slurm.partition", "account": "slurm.account", "qos": "slurm.qos", "constraint": "slurm.constraint",
    "time": "slurm.time_limit", "cpus-per-task": "slurm.cpus", "mem": "slurm.memory_gib", "nodes": "launch.nnodes",
    "requeue": "slurm.requeue", "no-requeue": "slurm.requeue",
}  # fmt: skip
Reason = Callable[[Case, str], str]


def _expected_gpus(case: Case) -> int:
    return case.run.nproc_per_node if case.run.device == "cuda" else 0


def _nodes(case: Case, value: str) -> str:
    planned = case.run.nnodes
    why = f"the job gets {value} nodes, and the run is planned, checked and estimated for {planned}"
    return "" if value in (str(planned), f"{planned}-{planned}") else why


def _tasks(case: Case, value: str) -> str:
    nodes = counted(case.run.nnodes, "node")
    return "" if value == str(case.run.nnodes) else f"srun starts {value} launchers, and the run needs one on {nodes}"


def _tasks_per_node(case: Case, value: str) -> str:
    return "" if value == "1" else f"srun starts {value} launchers on each node, which get the same node rank and GPUs"


def _too_few_gpus(case: Case, value: str, is_gres: bool = False) -> str:
    count, needed = gpu_count(value, is_gres), _expected_gpus(case)
    return "" if count >= needed else f"it replaces the GPUs of the job: {count} instead of {needed} per node"


def _generic_resources(case: Case, value: str) -> str:
    return _too_few_gpus(case, value, is_gres=True)


def _too_few_gpus_in_total(case: Case, value: str) -> str:
    count, needed = gpu_count(value), _expected_gpus(case) * case.run.nnodes
    return "" if count >= needed else f"the job gets {counted(count, 'GPU')}, and the run needs {needed}"


def _log(case: Case, value: str) -> str:
    about = "which the page, footplate logs and the diagnosis of failures read"
    return "" if value == LOG else f"the log is written to {value} instead of {LOG}, {about}"


def _errors(case: Case, value: str) -> str:
    return "" if value == LOG else f"what the run writes to stderr goes to {value} and is missing in its log"


def _open_mode(case: Case, value: str) -> str:
    return "" if value == "append" else "a requeued job deletes its earlier log"


def _export(case: Case, value: str) -> str:
    if value.split(",")[0].upper() == "ALL":
        return "Slurm would store the whole environment of Footplate with the job, secrets included; use launch.env"
    return "the job loses HOME, PATH and the variables that the run sets; use launch.env"


def _signal(case: Case, value: str) -> str:
    why = "the batch script gets no SIGTERM before the time limit, so the run ends without a checkpoint"
    return why if case.spec.slurm.requeue else ""


def _memory_per(case: Case, value: str) -> str:
    return "sbatch refuses it together with --mem, which slurm.memory_gib sets" if case.spec.slurm.memory_gib else ""


def _always(reason: str) -> Reason:
    return lambda case, value: reason


NOTHING = _always("sbatch submits nothing")
BREAKING: Mapping[str, Reason] = {
    "nodes": _nodes, "ntasks": _tasks, "ntasks-per-node": _tasks_per_node, "gres": _generic_resources,
    "gpus-per-node": _too_few_gpus, "gpus-per-task": _too_few_gpus, "gpus": _too_few_gpus_in_total,
    "output": _log, "error": _errors, "open-mode": _open_mode, "export": _export, "signal": _signal,
    "mem-per-cpu": _memory_per, "mem-per-gpu": _memory_per,
    "cpus-per-gpu": _always("sbatch refuses it together with --cpus-per-task, which the job has"),
    "ntasks-per-gpu": _always("sbatch refuses it together with --ntasks-per-node, which the job has"),
    "export-file": _always("the variables that the run sets are replaced by those of a file; use launch.env"),
    "array": _always("Slurm starts the run once for each task of the array, and all write to the same folder"),
    "chdir": _always("the batch script looks for the run's files in the folder that it is submitted from"),
    "clusters": _always("squeue and scancel do not find a job of another cluster, so the run would count as ended"),
    "wait": _always("sbatch returns only at the end of the job, and Footplate gives up after 3 minutes"),
    "test-only": NOTHING, "help": NOTHING, "usage": NOTHING, "version": NOTHING,
}  # fmt: skip

REMARKS = {
    "dependency": "the run waits for these jobs, and stays queued if the dependency can never be satisfied",
    "wrap": "sbatch ignores it in a batch script, so the command would not run; slurm.setup has commands",
}


def _breaking(case: Case) -> list[tuple[SbatchOption, str]]:
    """The extra options that break the job, and why."""
    if case.spec.launch.place != "slurm":
        return []
    found = [
        (option, BREAKING[option.name](case, option.value)) for option in _winning(case) if option.name in BREAKING
    ]
    return [(option, why) for option, why in found if why]


def _winning(case: Case) -> list[SbatchOption]:
    """The extra options; if several have the same name, only the last one, which sbatch uses."""
    return list({option.name: option for option in parse(case.spec.slurm.extra)}.values())


def _written(option: SbatchOption) -> str:
    return " ".join(option.words)


def _removed(case: Case, options: list[SbatchOption]) -> dict[str, object]:
    names = {option.name for option in options}
    every = [option for option in parse(case.spec.slurm.extra) if option.name in names]
    return {EXTRA: without(case.spec.slurm.extra, every)}


def _option_patch(option: SbatchOption) -> dict[str, object]:
    """The option of Footplate with the value of this sbatch option; empty if no option can express the value."""
    key, value = OPTIONS.get(option.name, ""), option.value
    if option.name in ("requeue", "no-requeue"):
        return {key: option.name == "requeue"}
    if option.name == "mem":
        return {key: int(value[:-1])} if value[:-1].isdigit() and value[-1:].upper() == "G" else {}
    if key in ("slurm.cpus", "launch.nnodes"):
        return {key: int(value)} if value.isdigit() else {}
    return {key: value} if key and value else {}


def _fixes(case: Case, options: list[SbatchOption]) -> tuple[Fix, ...]:
    """Move the values to Footplate's options where there is one, and remove sbatch options that have none."""
    removed = _removed(case, options)
    patch = dict(removed)
    for option in options:
        patch |= _option_patch(option)
    moved = (Fix("Move these values to Footplate's own options", patch, safe=False),) if patch != removed else ()
    return (*moved, Fix("Remove these sbatch options", removed, safe=False, cost="their settings are lost"))


@error(
    "CLU006",
    fields=(EXTRA,),
    title="Extra sbatch options would break the job",
    source="sbatch(1): a later #SBATCH line replaces an earlier one; the job's script starts one launcher per node "
    "with srun, in the folder that it is submitted from",
    fails_on=Example({**SLURM_SPEC, EXTRA: ("--ntasks-per-node=8",)}),
    passes_on=Example({**SLURM_SPEC, EXTRA: ("--ntasks-per-node=1", "--exclusive")}),
)
def breaking_sbatch_options(case: Case) -> Violation | None:
    """The lines of slurm.extra come after those that Footplate writes, and sbatch uses the last value of an option. The
    job's
    script starts one launcher per node, reads and writes the run's folder, and asks the run to save before its time
    limit; it relies on its own values for that."""
    found = _breaking(case)
    if not found:
        return None
    listed = reasons((_written(option), why) for option, why in found)
    return Violation(f"In slurm.extra, {listed}", _fixes(case, [option for option, _ in found]))


def _replaced(case: Case) -> list[tuple[SbatchOption, str]]:
    """The extra options that replace an option of Footplate, or that a person should know about."""
    found = []
    broken = {option.name for option, _ in _breaking(case)}
    for option in _winning(case) if case.spec.launch.place == "slurm" else ():
        patch = _option_patch(option)
        key = OPTIONS.get(option.name, "")
        if option.name in broken:
            continue
        is_set = bool(key) and get(case.spec, key) != get(RunSpec(), key)
        if key and option.name != "nodes" and (case.takes(patch) if patch else is_set):
            found.append((option, f"it replaces {key}, which the checks use"))
        elif option.name in REMARKS:
            found.append((option, REMARKS[option.name]))
        elif option.name in ("gres", "gpus-per-node", "gpus-per-task"):
            count, used = gpu_count(option.value, option.name == "gres"), _expected_gpus(case)
            if count > used:
                found.append((option, f"the job gets {count} GPUs per node, of which the run uses {used}"))
    return found


@warning(
    "CLU007",
    fields=(EXTRA,),
    title="slurm.extra replaces other Slurm options",
    source="sbatch(1): a later #SBATCH line replaces an earlier one",
    fails_on=Example({**SLURM_SPEC, EXTRA: ("--time=1:00:00",)}),
    passes_on=Example({**SLURM_SPEC, "slurm.time_limit": "1:00:00", EXTRA: ("--time=1:00:00",)}),
)
def replaced_slurm_options(case: Case) -> Violation | None:
    """Slurm uses the last value of an option, which is that of slurm.extra, while the checks use Footplate's own
    options: for example the GPUs of slurm.partition, and slurm.time_limit for the time at which the run saves."""
    found = _replaced(case)
    if not found:
        return None
    listed = reasons((_written(option), why) for option, why in found)
    return Violation(f"In slurm.extra, {listed}", _fixes(case, [option for option, _ in found]))
