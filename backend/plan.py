"""RunSpec + Machine -> Plan: command, environment and files, to the letter.

Floor 4. Imports: below. Pure: no clock, no free-port search, no environment, so equal input gives equal text;
preview and launch are the same Plan.
"""

from __future__ import annotations

from backend import catalog, deepspeed, fsdp
from backend.derived import backend, device, processes
from backend.machine import Machine
from backend.options import effective
from backend.presets import dump
from backend.run import DEEPSPEED, FSDP, RANK_LOGS, SPEC, Plan
from backend.spec import RunSpec

TRAINER = ("-m", "backend.train")


def plan(spec: RunSpec, machine: Machine) -> Plan:
    """What runs `spec` on `machine`. Never raises: what cannot work is the rules' business."""
    spec = effective(spec)
    return Plan(
        argv=_argv(spec, machine),
        env=_env(spec, machine),
        files=_files(spec),
        notes=_notes(spec, machine),
    )


def _files(spec: RunSpec) -> dict[str, str]:
    files = {SPEC: dump(spec)}
    if spec.parallel.strategy in catalog.DEEPSPEED:
        files[DEEPSPEED] = deepspeed.text(spec)
    if spec.parallel.strategy in catalog.FSDP:
        files[FSDP] = fsdp.text(spec)
    return files


def _argv(spec: RunSpec, machine: Machine) -> tuple[str, ...]:
    if spec.launch.launcher == "python":
        return (machine.python, *TRAINER, ".")
    return (
        machine.python,
        "-m",
        "torch.distributed.run",
        "--standalone",  # one node: the rendezvous finds a free port by itself
        f"--nproc-per-node={processes(spec)}",
        f"--log-dir={RANK_LOGS}",
        "--tee=3",
        *TRAINER,
        ".",
    )


def _env(spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Additions to the environment; what the user gave wins."""
    family = catalog.DEVICES[device(spec, machine)]
    count = processes(spec)
    env = {"OMP_NUM_THREADS": str(spec.launch.threads or max(1, machine.cores // count))}
    env["PYTHONUNBUFFERED"] = "1"  # the log is live
    env["TOKENIZERS_PARALLELISM"] = "false"  # loader processes fork after the tokenizer was used
    if spec.parallel.strategy in catalog.DEEPSPEED and device(spec, machine) == "cpu":
        env["DS_ACCELERATOR"] = "cpu"  # otherwise it takes an accelerator that is there
    if family.visible:
        ids = spec.launch.devices or tuple(gpu.id for gpu in machine.gpus[:count])
        env[family.visible] = ",".join(str(i) for i in ids)
    return {**env, **spec.launch.environment}


def _notes(spec: RunSpec, machine: Machine) -> tuple[str, ...]:
    family = catalog.DEVICES[device(spec, machine)]
    where = f"{processes(spec)} x {family.label}" if processes(spec) > 1 else family.label
    talk = f", {backend(device(spec, machine))} backend" if processes(spec) > 1 else ""
    return (f"Trains on {where}{talk}.",)
