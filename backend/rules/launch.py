"""Rules about the launch: launcher, process count, device ids, CPU threads and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from backend import registry
from backend.config import consent, variables
from backend.config.options import options_with_secrets
from backend.rules.base import Case, Example, Fix, Violation, advice, error, names, warning
from backend.rules.common_fixes import SINGLE_PROCESS
from backend.rules.examples import H100, LAPTOP, TWO_H100
from backend.wording import counted

LARGE_LAPTOP = replace(LAPTOP, ram_free_bytes=LAPTOP.ram_free_bytes * 16)
MIG = replace(H100, gpus=(replace(H100.gpus[0], name="H100 MIG 1g.10gb", uuid="MIG-7", only_by_uuid=True),))
DDP_SPEC = {"parallel.strategy": "ddp"}
ANY_DEVICES = {"launch.devices": ()}
# torchrun sets these for every process; the supervisor finds the run's processes by FOOTPLATE_RUN.
RESERVED_VARIABLES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "FOOTPLATE_RUN",
}  # fmt: skip
VISIBLE_DEVICES_VARIABLES = tuple(
    row.visible_devices_env for row in registry.DEVICES.values() if row.visible_devices_env
)
# accelerate 1.15 reads these when it starts: state.py, accelerator.py, utils/dataclasses.py. PET_ is torchrun's.
ENGINE_VARIABLE_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "PET_")
ALLOWED_ENGINE_VARIABLES = ("ACCELERATE_LOG_LEVEL", "ACCELERATE_DEBUG_MODE")


# --- Processes ---


@error(
    "LCH001",
    fields=("launch.launcher", "parallel.strategy"),
    title="The python launcher starts a single process",
    source="arithmetic: python -m starts no other process",
    fixes=(Fix("Use torchrun", {"launch.launcher": "torchrun"}), SINGLE_PROCESS),
    fails_on=Example({**DDP_SPEC, "launch.launcher": "python"}),
    passes_on=Example({**DDP_SPEC, "launch.launcher": "torchrun"}),
    proof="launch",
)
def python_launcher_with_many_processes(case: Case) -> str | None:
    """Distributed training needs one process per device. The python launcher starts one process, which would silently
    train alone on one device, with a smaller global batch size than configured."""
    if case.spec.launch.launcher != "python" or case.run.nproc_per_node == 1:
        return None
    return f"{case.run.nproc_per_node} processes per node are set, and the python launcher starts 1 process."


@error(
    "LCH002",
    fields=("launch.nproc_per_node",),
    title="More processes than devices",
    source="accelerate 1.15 state.py: local rank modulo device count; NCCL refuses two ranks on one GPU",
    fails_on=Example({**DDP_SPEC, "launch.nproc_per_node": 4}, TWO_H100),
    passes_on=Example({**DDP_SPEC, "launch.nproc_per_node": 2}, TWO_H100),
)
def more_processes_than_devices(case: Case) -> Violation | None:
    """Each process needs its own device. Two processes on one GPU abort in NCCL or run out of memory."""
    processes, devices = case.run.nproc_per_node, len(case.machine.gpus)
    if case.run.device == "cpu" or case.run.device != case.machine.device or processes <= max(devices, 1):
        return None
    fix = _fewer_processes(case, devices) if devices > 1 else _single_process(case)
    found = counted(devices, "device") if devices else "1 device"
    return Violation(f"{processes} processes per node are set, and this machine has {found}.", (fix,))


def _single_process(case: Case, more: Mapping[str, object] = {}) -> Fix:
    """A fix that runs one process and, where possible, keeps the global batch size by gradient accumulation."""
    patch = {"parallel.strategy": "single", **more}
    accumulation = case.spec.train.gradient_accumulation_steps * case.run.data_parallel_size
    same_batch = {**patch, "train.gradient_accumulation_steps": accumulation}
    safe = case.takes(same_batch) and not case.optimizer.steps_in_backward
    return Fix("Run a single process", same_batch if safe else patch, safe, "one device does all the work")


def _fewer_processes(case: Case, count: int) -> Fix:
    """A fix that runs `count` processes and, where possible, keeps the global batch size by gradient accumulation."""
    patch: dict[str, object] = {"launch.nproc_per_node": count}
    accumulation = case.spec.train.gradient_accumulation_steps * case.run.nproc_per_node
    if accumulation % count == 0:
        patch["train.gradient_accumulation_steps"] = accumulation // count
    if len(case.spec.launch.devices) > count:
        patch["launch.devices"] = case.spec.launch.devices[:count]
    return Fix(f"Use {count} processes per node", patch, safe=accumulation % count == 0)


@advice(
    "LCH007",
    fields=("parallel.strategy", "launch.nproc_per_node"),
    title="A distributed strategy with a single process",
    source="arithmetic: one process has no other process to shard or average with",
    fixes=(Fix("Run a single process without a strategy", {"parallel.strategy": "single"}),),
    fails_on=Example({**DDP_SPEC, "launch.nproc_per_node": 1}),
    passes_on=Example({**DDP_SPEC, "launch.nproc_per_node": 2}),
)
def strategy_with_one_process(case: Case) -> str | None:
    """Distributed strategies average gradients over processes or shard tensors over them. With one process and without
    offloading, they only take memory for communication buckets."""
    run = case.run
    offloads = {run.optimizer_offload, run.param_offload} != {"none"} or case.spec.parallel.cpu_offload
    if case.spec.parallel.strategy not in registry.MULTI_PROCESS or run.world_size != 1 or offloads:
        return None
    return f"{case.strategy.label} is set, and the run has 1 process, so there is nothing to average or shard."


@warning(
    "LCH008",
    fields=("launch.omp_num_threads", "launch.nproc_per_node"),
    title="More OpenMP threads than CPU cores",
    source="arithmetic; PyTorch's notes on CPU threading",
    fixes=(Fix("Use as many threads as cores per process", {"launch.omp_num_threads": 0}),),
    fails_on=Example({**DDP_SPEC, "launch.omp_num_threads": 8}),
    passes_on=Example({**DDP_SPEC, "launch.omp_num_threads": 4}),
)
def more_threads_than_cores(case: Case) -> Violation | None:
    """Threads that compete for the same core slow each other down, often to less than half of the speed."""
    processes, threads = case.run.nproc_per_node, case.spec.launch.omp_num_threads
    if threads * processes <= case.cores:
        return None
    many = f"{counted(processes, 'process')} with {counted(threads, 'OpenMP thread')} each"
    message = f"{many} need {threads * processes} CPU cores; {_has_cores(case)}."
    return Violation(message, _more_cpus(case, threads * processes))


def _has_cores(case: Case) -> str:
    """The CPU cores of the run, in words."""
    if case.spec.launch.place == "local":
        return f"this machine has {counted(case.cores, 'CPU core')}"
    return f"the job has {counted(case.cores, 'CPU')} on each node"


def _more_cpus(case: Case, count: int) -> tuple[Fix, ...]:
    """The fix that requests `count` CPUs for the job, if its nodes have them."""
    place = case.spec.launch.place
    if place == "local" or count > case.machine.cores:
        return ()
    return (Fix(f"Request {counted(count, 'CPU')} per node", {f"{place}.cpus": count}, cost="more of the cluster"),)


@warning(
    "LCH009",
    fields=("launch.nproc_per_node",),
    title="More processes than CPU cores",
    source="arithmetic",
    fails_on=Example({**DDP_SPEC, "launch.nproc_per_node": 16}, LARGE_LAPTOP),
    passes_on=Example({**DDP_SPEC, "launch.nproc_per_node": 4}),
)
def more_processes_than_cores(case: Case) -> Violation | None:
    """On a CPU every process computes on its own cores and holds its own replica of the model. If there are more
    processes than cores, the processes take turns."""
    processes, cores = case.run.nproc_per_node, case.cores
    if case.run.device != "cpu" or processes <= cores:
        return None
    fix = _fewer_processes(case, cores) if cores > 1 else _single_process(case)
    message = f"{processes} processes per node are set, and {_has_cores(case)}."
    return Violation(message, (*_more_cpus(case, processes), fix))


# --- Device ids ---


@error(
    "LCH003",
    fields=("launch.devices",),
    title="A device id does not exist",
    source="torch 2.13 cuda/__init__.py: the list of visible devices ends at the first id that does not exist",
    fails_on=Example({"launch.devices": (0, 9)}, TWO_H100),
    passes_on=Example({"launch.devices": (1,)}, TWO_H100),
)
def unknown_device_id(case: Case) -> Violation | None:
    """CUDA ignores the first unknown id in CUDA_VISIBLE_DEVICES and all ids after it, so the run would silently see
    fewer GPUs, or none."""
    known, listed = [gpu.id for gpu in case.machine.gpus], case.spec.launch.devices
    wrong = [i for i in listed if i not in known]
    if not case.run.on_gpu or not known or not wrong:
        return None
    message = f"launch.devices lists {names(wrong)}; the device ids of this machine are {names(known)}."
    return Violation(message, _known_device_fixes(case, known))


def _known_device_fixes(case: Case, known: list[int]) -> tuple[Fix, ...]:
    """Fixes that leave only ids that exist."""
    processes = case.run.nproc_per_node
    if len(known) < processes:  # fewer processes are needed as well
        if len(known) == 1:
            return (_single_process(case, ANY_DEVICES),)
        patch = {**ANY_DEVICES, "launch.nproc_per_node": len(known)}
        return (Fix(f"Run {len(known)} processes, one on each device", patch, safe=False),)
    valid = tuple(dict.fromkeys(i for i in case.spec.launch.devices if i in known))
    first = Fix("Use the first devices", ANY_DEVICES, cost="clears the list of device ids")
    return (Fix(f"Use only {names(valid)}", {"launch.devices": valid}), first) if len(valid) == processes else (first,)


@error(
    "LCH004",
    fields=("launch.devices",),
    title="A device id is repeated",
    source="torch 2.13 cuda/__init__.py: a repeated id makes the whole list empty",
    fails_on=Example({**DDP_SPEC, "launch.devices": (0, 0)}, TWO_H100),
    passes_on=Example({**DDP_SPEC, "launch.devices": (0, 1)}, TWO_H100),
)
def repeated_device_id(case: Case) -> Violation | None:
    """With a repeated id in CUDA_VISIBLE_DEVICES, CUDA finds no device at all."""
    ids = case.spec.launch.devices
    once = tuple(dict.fromkeys(ids))
    if not case.run.on_gpu or len(once) == len(ids):
        return None
    fix = Fix("Remove repeated ids", {"launch.devices": once})
    if len(once) < case.run.nproc_per_node:
        fix = Fix("Use the first devices", ANY_DEVICES, cost="clears the list of device ids")
    return Violation(f"launch.devices lists {names(ids)}; each id may be listed once.", (fix,))


@error(
    "LCH005",
    fields=("launch.devices", "launch.nproc_per_node"),
    title="Fewer device ids than processes",
    source="accelerate 1.15 state.py: local rank modulo device count; NCCL refuses two ranks on one GPU",
    fails_on=Example({**DDP_SPEC, "launch.devices": (1,), "launch.nproc_per_node": 2}, TWO_H100),
    passes_on=Example({**DDP_SPEC, "launch.devices": (0, 1), "launch.nproc_per_node": 2}, TWO_H100),
)
def fewer_device_ids_than_processes(case: Case) -> Violation | None:
    """The run sees only the listed devices, and each process needs a separate device."""
    listed, processes = case.spec.launch.devices, case.run.nproc_per_node
    ids = tuple(dict.fromkeys(listed))
    if not case.run.on_gpu or not ids or len(ids) >= processes or len(ids) < len(listed):  # repeated ids: LCH004
        return None
    fixes = [_fewer_processes(case, len(ids)) if len(ids) > 1 else _single_process(case)]
    if len(case.machine.gpus) >= processes:
        label = f"Use the first {counted(processes, 'device')}"
        fixes.insert(0, Fix(label, ANY_DEVICES, cost="clears the list of device ids"))
    selected = "1 device is selected" if len(ids) == 1 else f"{len(ids)} devices are selected"
    message = f"{selected} ({names(ids)}), and {processes} processes per node are set."
    return Violation(message, tuple(fixes))


@warning(
    "LCH006",
    fields=("launch.devices", "parallel.strategy"),
    title="More device ids than processes",
    source="arithmetic: a process uses one device",
    fails_on=Example({"launch.devices": (0, 1)}, TWO_H100),
    passes_on=Example({"launch.devices": (1,)}, TWO_H100),
)
def idle_device_ids(case: Case) -> Violation | None:
    """A process uses one device, however many it sees. The other listed devices stay idle."""
    ids, processes = tuple(dict.fromkeys(case.spec.launch.devices)), case.run.nproc_per_node
    if not case.run.on_gpu or len(ids) <= processes:
        return None
    used = ids[:processes]
    all_devices = {"parallel.strategy": "ddp", "launch.nproc_per_node": len(ids), "launch.launcher": "torchrun"}
    fixes = (
        Fix(f"Use only {names(used)}", {"launch.devices": used}),
        Fix("Use DDP on all listed devices", all_devices, safe=False, cost="larger global batch size"),
    )
    many = counted(processes, "process")
    return Violation(f"launch.devices lists {len(ids)} devices, and the run has {many}, so it uses {len(used)}.", fixes)


@error(
    "LCH018",
    fields=("launch.launcher", "launch.devices"),
    title="The deepspeed launcher cannot select this GPU",
    source="deepspeed 0.19 launcher/runner.py parse_node_config: device ids are integers, which replace "
    "CUDA_VISIBLE_DEVICES",
    fixes=(Fix("Use torchrun", {"launch.launcher": "torchrun"}),),
    fails_on=Example({"launch.launcher": "deepspeed"}, MIG),
    passes_on=Example({"launch.launcher": "deepspeed"}, H100),
)
def deepspeed_launcher_needs_numbers(case: Case) -> str | None:
    """The deepspeed launcher selects devices by number. The number of a divided GPU (MIG) is that of its first part,
    which another run may use, and CUDA's numbers may differ from NVML's if a GPU of the machine is lost."""
    found = [gpu for gpu in case.gpus if gpu.only_by_uuid] if case.run.device == case.machine.device else []
    if case.spec.launch.launcher != "deepspeed" or not found:
        return None
    listed = names([f"GPU {gpu.id} ({gpu.name}, {gpu.uuid})" for gpu in found])
    return f"Only a UUID selects {listed}, and the deepspeed launcher takes numbers."


# --- Environment variables ---


@error(
    "LCH010",
    fields=("launch.env",),
    title="launch.env sets a variable of the launcher",
    source="torch 2.13 distributed/elastic: torchrun sets these for each worker",
    fails_on=Example({"launch.launcher": "python", "launch.env": {"WORLD_SIZE": "2"}}),
    passes_on=Example({"launch.env": {"NCCL_DEBUG": "INFO"}}),
    proof="launch",
)
def reserved_environment_variables(case: Case) -> Violation | None:
    """The launcher tells each process its rank through these variables, and Footplate finds the processes of a run by
    FOOTPLATE_RUN. Other values make processes wait for ranks that never start, or leave processes running after the run
    is stopped."""
    found = [n for n in case.spec.launch.env if n in RESERVED_VARIABLES or n.startswith("TORCHELASTIC_")]
    if not found:
        return None
    return Violation(
        f"launch.env sets {names(found)}, which only the launcher may set.", (without_variables(case, found),)
    )


def without_variables(case: Case, drop: list[str]) -> Fix:
    """A fix that removes variables from launch.env."""
    kept = {name: value for name, value in case.spec.launch.env.items() if name not in drop}
    return Fix(f"Remove {names(drop)} from launch.env", {"launch.env": kept})


@warning(
    "LCH011",
    fields=("launch.env",),
    title="launch.env overrides an option",
    source="Footplate's launch plan: launch.env overrides the variables that follow from the options",
    fails_on=Example({"launch.env": {"CUDA_VISIBLE_DEVICES": "3"}}, H100),
    passes_on=Example({"launch.env": {"HF_HOME": "/data/hub"}}, H100),
)
def environment_overrides_option(case: Case) -> Violation | None:
    """The run uses the variable, but the preflight check and the memory estimate use the option."""
    options = {"OMP_NUM_THREADS": "launch.omp_num_threads"}
    options |= dict.fromkeys(("ROCR_VISIBLE_DEVICES", registry.HIP_VISIBLE_DEVICES), "launch.devices")
    if case.spec.launch.launcher != "deepspeed":  # see visible_devices_ignored_by_deepspeed
        options |= dict.fromkeys(VISIBLE_DEVICES_VARIABLES, "launch.devices")
    found = [name for name in case.spec.launch.env if name in options]
    if not found:
        return None
    overridden = tuple(dict.fromkeys(options[name] for name in found))
    message = f"launch.env sets {names(found)}, which overrides {names(overridden)}."
    return Violation(message, (without_variables(case, found),), ("launch.env", *overridden))


@error(
    "LCH012",
    fields=("launch.env",),
    title="launch.env configures the training engine",
    source="accelerate 1.15 accelerator.py, state.py and torch 2.13 distributed/argparse_util.py read these variables",
    fails_on=Example({"launch.env": {"ACCELERATE_USE_FSDP": "true"}}),
    passes_on=Example({"launch.env": {"ACCELERATE_LOG_LEVEL": "info"}}),
)
def engine_environment_variables(case: Case) -> Violation | None:
    """accelerate and torchrun also read settings from the environment. These variables would silently change strategy,
    precision, device or process count without changing the options that the preflight check reads."""
    found = [
        name
        for name in case.spec.launch.env
        if name.startswith(ENGINE_VARIABLE_PREFIXES) and name not in ALLOWED_ENGINE_VARIABLES
    ]
    if not found:
        return None
    return Violation(
        f"launch.env sets {names(found)}, which overrides options silently.", (without_variables(case, found),)
    )


@error(
    "LCH016",
    fields=("launch.env",),
    title="An option contains a secret",
    source="Footplate's run folder: spec.yaml, plan.json and run.sh contain all options as text",
    manual_fix="Set the secret as an environment variable in the shell that starts Footplate: runs inherit it. For the "
    "Hugging Face Hub, run hf auth login instead.",
    fails_on=Example({"launch.env": {"HF_TOKEN": "hf_example"}}),
    passes_on=Example({"launch.env": {"HF_TOKEN_PATH": "/root/token", "TOKENIZERS_PARALLELISM": "false"}}),
)
def secret_in_options(case: Case) -> Violation | None:
    """Options are stored as plain text in the run folder, in exported files and in scripts. Anyone who receives one of
    these files, for example to reproduce the run, would also receive the secret."""
    found, options = variables.secrets(case.spec.launch.env), options_with_secrets(case.spec)
    if not found and not options:
        return None
    sets = [f"launch.env sets {names(found)}"] if found else []
    contains = [f"{name} contains an access token or a password" for name in options]
    fix = replace(without_variables(case, found), cost="set it in the environment of Footplate instead")
    return Violation(
        f"{' and '.join([*sets, *contains])}, which would be stored unencrypted.",
        (fix,) if found else (),
        (*(["launch.env"] if found else []), *options),
    )


@warning(
    "LCH017",
    fields=("launch.env",),
    title="launch.env sets a variable that can decide which code runs",
    source="ld.so(8); Python, Using Python, Environment variables; Hugging Face Hub, Environment variables",
    fails_on=Example({"launch.env": {"LD_PRELOAD": "/tmp/library.so"}}),
    passes_on=Example({"launch.env": {"NCCL_DEBUG": "INFO"}}),
)
def code_in_environment(case: Case) -> Violation | None:
    """Variables can decide which libraries, Python modules or programs the run executes with your permissions, and to
    which hosts it sends data. All variables are listed except those that are known to do neither, such as NCCL_DEBUG.
    Keep a variable only if you trust its source, especially after you imported a file."""
    found = consent.unlisted_variables(case.spec.launch.env)
    if not found:
        return None
    masked = variables.masked(case.spec.launch.env)
    shown = [f"{name}={masked[name]}" for name in found]
    return Violation(f"launch.env sets {names(shown)}.", (replace(without_variables(case, found), safe=False),))
