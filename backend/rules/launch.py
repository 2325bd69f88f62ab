"""Rules of the launch: processes, devices, threads, environment.

Floor 3. Imports: below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from backend import registry
from backend.rules.base import Case, Example, Fix, Violation, counted, names, rule
from backend.rules.common_fixes import ONE
from backend.rules.examples import H100, LAPTOP, TWO_H100

ROOMY = replace(LAPTOP, ram_free_bytes=LAPTOP.ram_free_bytes * 16)
DDP = {"parallel.strategy": "ddp"}


@rule(
    "LCH001",
    "error",
    fields=("launch.launcher", "parallel.strategy"),
    title="python starts one process only",
    source="arithmetic: python -m starts no other process",
    fixes=(Fix("Start with torchrun", {"launch.launcher": "torchrun"}), ONE),
    fails_on=Example({**DDP, "launch.launcher": "python"}),
    passes_on=Example({**DDP, "launch.launcher": "torchrun"}),
    proof="launch",
)
def python_launcher(case: Case) -> str | None:
    """DDP needs one process for each device. The plain python launcher starts a single one, so the run would train
    alone, on one device, with a smaller batch than asked for, and say nothing."""
    if case.spec.launch.launcher != "python" or case.run.nproc_per_node == 1:
        return None
    return f"{counted(case.run.nproc_per_node, 'process')} were asked for; python starts 1."


@rule(
    "LCH002",
    "error",
    fields=("launch.nproc_per_node",),
    title="More processes than devices",
    source="accelerate 1.15 state.py: local rank modulo device count; NCCL refuses two ranks on one GPU",
    fails_on=Example({**DDP, "launch.nproc_per_node": 4}, TWO_H100),
    passes_on=Example({**DDP, "launch.nproc_per_node": 2}, TWO_H100),
)
def too_many_processes(case: Case) -> Violation | None:
    """Each process needs a device of its own: two on one GPU abort in NCCL, or run out of memory together."""
    there = len(case.machine.gpus)
    if case.run.device == "cpu" or case.run.device != case.machine.device or case.run.nproc_per_node <= max(there, 1):
        return None
    fixes = (_together(case, there) if there > 1 else _one(case),)
    return Violation(f"{counted(case.run.nproc_per_node, 'process')}, and {counted(there, 'device')}.", fixes)


def _one(case: Case, more: Mapping[str, object] = {}) -> Fix:
    """One process; the batch of a step stays if it can."""
    patch = {"parallel.strategy": "single", **more}
    whole = {
        **patch,
        "train.gradient_accumulation_steps": case.spec.train.gradient_accumulation_steps * case.run.data_parallel_size,
    }
    same = case.takes(whole) and not registry.OPTIMIZERS[case.spec.train.optim].inside
    return Fix("One process", whole if same else patch, same, "one device does it all")


def _together(case: Case, count: int) -> Fix:
    """As many processes as devices; the batch of a step stays if it can."""
    patch: dict[str, object] = {"launch.nproc_per_node": count}
    whole = case.spec.train.gradient_accumulation_steps * case.run.nproc_per_node
    if whole % count == 0:
        patch["train.gradient_accumulation_steps"] = whole // count
    if len(case.spec.launch.devices) > count:
        patch["launch.devices"] = case.spec.launch.devices[:count]
    return Fix(counted(count, "process"), patch, safe=whole % count == 0)


@rule(
    "LCH003",
    "error",
    fields=("launch.devices",),
    title="A device id that is not there",
    source="torch 2.13 cuda/__init__.py: the list of visible devices ends at the first id that is not there",
    fails_on=Example({"launch.devices": (0, 9)}, TWO_H100),
    passes_on=Example({"launch.devices": (1,)}, TWO_H100),
)
def unknown_device(case: Case) -> Violation | None:
    """CUDA ignores every id from the first wrong one on, so the run would silently see fewer GPUs, or none."""
    known = [gpu.id for gpu in case.machine.gpus]
    wrong = [i for i in case.spec.launch.devices if i not in known]
    if not case.run.on_gpu or not known or not wrong:
        return None
    fixes = [Fix("The first ones", {"launch.devices": ()}, cost="ids are left to torch")]
    right = tuple(dict.fromkeys(i for i in case.spec.launch.devices if i in known))
    if len(right) == case.run.nproc_per_node:
        fixes.insert(0, Fix(f"Only {names(right)}", {"launch.devices": right}))
    if len(known) < case.run.nproc_per_node:
        fixes = []  # fewer devices than processes: another rule's fix comes first
        if len(known) > 1:
            fixes = [
                Fix(
                    f"{counted(len(known), 'process')} on all",
                    {"launch.devices": (), "launch.nproc_per_node": len(known)},
                    False,
                )
            ]
        else:
            fixes = [_one(case, {"launch.devices": ()})]
    return Violation(f"There is no device {names(wrong)}; there are {names(known)}.", tuple(fixes))


@rule(
    "LCH004",
    "error",
    fields=("launch.devices",),
    title="A device id named twice",
    source="torch 2.13 cuda/__init__.py: a repeated id makes the whole list empty",
    fails_on=Example({**DDP, "launch.devices": (0, 0)}, TWO_H100),
    passes_on=Example({**DDP, "launch.devices": (0, 1)}, TWO_H100),
)
def repeated_device(case: Case) -> Violation | None:
    """A repeated id makes CUDA see no device at all."""
    ids = case.spec.launch.devices
    if not case.run.on_gpu or len(set(ids)) == len(ids):
        return None
    once = tuple(dict.fromkeys(ids))
    fix = Fix("Each once", {"launch.devices": once})
    if len(once) < case.run.nproc_per_node:
        fix = Fix("The first ones", {"launch.devices": ()}, cost="ids are left to torch")
    return Violation(f"Devices {names(ids)}: each id may stand once.", (fix,))


@rule(
    "LCH005",
    "error",
    fields=("launch.devices", "launch.nproc_per_node"),
    title="Fewer device ids than processes",
    source="accelerate 1.15 state.py: local rank modulo device count; NCCL refuses two ranks on one GPU",
    fails_on=Example({**DDP, "launch.devices": (1,), "launch.nproc_per_node": 2}, TWO_H100),
    passes_on=Example({**DDP, "launch.devices": (0, 1), "launch.nproc_per_node": 2}, TWO_H100),
)
def too_few_ids(case: Case) -> Violation | None:
    """Only the named devices are visible to the run, and each process needs one."""
    ids = tuple(dict.fromkeys(case.spec.launch.devices))
    if (
        not case.run.on_gpu
        or not ids
        or len(ids) >= case.run.nproc_per_node
        or len(ids) < len(case.spec.launch.devices)
    ):
        return None
    fixes = [_together(case, len(ids)) if len(ids) > 1 else _one(case)]
    if len(case.machine.gpus) >= case.run.nproc_per_node:
        fixes.insert(
            0,
            Fix(
                f"The first {counted(case.run.nproc_per_node, 'device')}",
                {"launch.devices": ()},
                cost="ids are left to torch",
            ),
        )
    return Violation(f"{counted(case.run.nproc_per_node, 'process')} on device {names(ids)}.", tuple(fixes))


@rule(
    "LCH006",
    "warning",
    fields=("launch.devices", "parallel.strategy"),
    title="Device ids that stay idle",
    source="arithmetic: a process drives one device",
    fails_on=Example({"launch.devices": (0, 1)}, TWO_H100),
    passes_on=Example({"launch.devices": (1,)}, TWO_H100),
)
def idle_devices(case: Case) -> Violation | None:
    """A process uses one device, whatever it sees. The others named are held visible and do nothing."""
    ids = case.spec.launch.devices
    if not case.run.on_gpu or len(set(ids)) <= case.run.nproc_per_node:
        return None
    first = tuple(dict.fromkeys(ids))[: case.run.nproc_per_node]
    every = {"parallel.strategy": "ddp", "launch.nproc_per_node": len(set(ids)), "launch.launcher": "torchrun"}
    fixes = (
        Fix(f"Only {names(first)}", {"launch.devices": first}),
        Fix("DDP on all of them", every, safe=False, cost="more rows a step"),
    )
    return Violation(f"{counted(len(set(ids)), 'device')} named, and {case.run.nproc_per_node} will be used.", fixes)


@rule(
    "LCH007",
    "advice",
    fields=("parallel.strategy", "launch.nproc_per_node"),
    title="A strategy of many with one process",
    source="arithmetic: one process has nobody to share with",
    fixes=(Fix("One process, without a strategy", {"parallel.strategy": "single"}),),
    fails_on=Example({**DDP, "launch.nproc_per_node": 1}),
    passes_on=Example({**DDP, "launch.nproc_per_node": 2}),
)
def lonely(case: Case) -> str | None:
    """These strategies average gradients among processes, and some spread what each would hold. With one process
    they only cost memory for their buckets."""
    return "One process has no others to share with." if _many(case) and case.run.world_size == 1 else None


def _many(case: Case) -> bool:
    return case.spec.parallel.strategy in registry.MANY


@rule(
    "LCH008",
    "warning",
    fields=("launch.omp_num_threads", "launch.nproc_per_node"),
    title="More CPU threads than cores",
    source="arithmetic; PyTorch's notes on CPU threading",
    fixes=(Fix("Share the cores", {"launch.omp_num_threads": 0}),),
    fails_on=Example({**DDP, "launch.omp_num_threads": 8}),
    passes_on=Example({**DDP, "launch.omp_num_threads": 4}),
)
def crowded_threads(case: Case) -> str | None:
    """Threads that wait for the same core slow each other down, often by more than half."""
    wanted = case.spec.launch.omp_num_threads * case.run.nproc_per_node
    if wanted <= case.machine.cores:
        return None
    return f"{case.run.nproc_per_node} x {case.spec.launch.omp_num_threads} threads on {counted(case.machine.cores, 'core')}."


@rule(
    "LCH009",
    "warning",
    fields=("launch.nproc_per_node",),
    title="More processes than CPU cores",
    source="arithmetic",
    fails_on=Example({**DDP, "launch.nproc_per_node": 16}, ROOMY),
    passes_on=Example({**DDP, "launch.nproc_per_node": 4}),
)
def crowded_cores(case: Case) -> Violation | None:
    """On a CPU every process computes on cores of its own. More processes than cores only take turns, and each
    holds a whole model in memory."""
    cores = case.machine.cores
    if case.run.device != "cpu" or case.run.nproc_per_node <= cores:
        return None
    return Violation(
        f"{counted(case.run.nproc_per_node, 'process')} on {counted(cores, 'core')}.",
        (_together(case, cores) if cores > 1 else _one(case),),
    )


# torchrun gives these to every process, or the supervisor finds the run's processes by them.
RESERVED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
RESERVED |= {"FOOTPLATE_RUN"}


@rule(
    "LCH010",
    "error",
    fields=("launch.env",),
    title="A variable that belongs to the launcher",
    source="torch 2.13 distributed/elastic: torchrun sets these for each worker",
    fails_on=Example({"launch.launcher": "python", "launch.env": {"WORLD_SIZE": "2"}}),
    passes_on=Example({"launch.env": {"NCCL_DEBUG": "INFO"}}),
    proof="launch",
)
def reserved_variables(case: Case) -> Violation | None:
    """The launcher tells each process its rank by these variables, and Footplate finds a run's processes by
    FOOTPLATE_RUN. A value of one's own makes processes wait for others that never come, or escape a stop."""
    found = [n for n in case.spec.launch.env if n in RESERVED or n.startswith("TORCHELASTIC_")]
    return Violation(f"{names(found)} cannot be set by hand.", (without(case, found),)) if found else None


VISIBLE = tuple(row.visible for row in registry.DEVICES.values() if row.visible)


def without(case: Case, drop: list[str]) -> Fix:
    """Leave variables of one's own out."""
    kept = {name: value for name, value in case.spec.launch.env.items() if name not in drop}
    return Fix(f"Leave out {names(drop)}", {"launch.env": kept})


@rule(
    "LCH011",
    "warning",
    fields=("launch.env",),
    title="A variable that overrides an option",
    source="the plan: what is given under Environment wins over what follows from the options",
    fails_on=Example({"launch.env": {"CUDA_VISIBLE_DEVICES": "3"}}, H100),
    passes_on=Example({"launch.env": {"HF_HOME": "/data/hub"}}, H100),
)
def overriding_variables(case: Case) -> Violation | None:
    """The option says one thing and the variable another; the variable wins, and checks and estimate do not know."""
    options = {"OMP_NUM_THREADS": "launch.omp_num_threads"}
    if case.spec.launch.launcher != "deepspeed":  # which sets them itself
        options |= dict.fromkeys(VISIBLE, "launch.devices")
    found = [name for name in case.spec.launch.env if name in options]
    if not found:
        return None
    fields = ("launch.env", *dict.fromkeys(options[name] for name in found))
    return Violation(f"{names(found)} overrides {names([options[n] for n in found])}.", (without(case, found),), fields)


# accelerate 1.15 reads these where it starts: state.py, accelerator.py, utils/dataclasses.py.
THEIRS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "PET_")
HARMLESS = ("ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE")


@rule(
    "LCH012",
    "error",
    fields=("launch.env",),
    title="A variable that changes the engine",
    source="accelerate 1.15 accelerator.py, state.py and torch 2.13 distributed/argparse_util.py read them",
    fails_on=Example({"launch.env": {"ACCELERATE_USE_FSDP": "true"}}),
    passes_on=Example({"launch.env": {"ACCELERATE_LOG_LEVEL": "info"}}),
)
def engine_variables(case: Case) -> Violation | None:
    """The launchers take their settings from the environment too: another strategy, precision, device or
    number of processes than the options say, without a word."""
    found = [name for name in case.spec.launch.env if name.startswith(THEIRS) and name not in HARMLESS]
    return Violation(f"{names(found)} would change it behind the options.", (without(case, found),)) if found else None
