"""The job that a run becomes on a Slurm cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from backend.config.fields import SLURM, Lines, Section, Ui, each_matches, matches

TIME = r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}"


NAME = matches(r"[\w.,+@-]+", "must contain only letters, digits and the characters _ . , + @ -")


class Slurm(Section):
    """The Slurm job: where it runs, what it requests, and what happens before training."""

    partition: Annotated[str, NAME, Ui("Partition", when=SLURM)] = ""
    """Partition of the job, or several of which it may use any, such as gpu,gpu-long; empty uses the cluster's
    default."""
    time_limit: Annotated[
        str, matches(TIME, "must be a time such as 30 (minutes), 12:00:00 or 2-00:00:00"), Ui("Time limit", when=SLURM)
    ] = ""
    """Maximum duration of the job in Slurm's form: 30 or 30:00 is 30 minutes, 12:00:00 is 12 hours, 2-00:00:00 is 2
    days; empty uses the partition's limit."""
    requeue: Annotated[bool, Ui("Continue automatically", when=SLURM)] = True
    """When the time limit is near or the job is preempted, the run saves a checkpoint, goes back to the queue and
    continues from there."""
    account: Annotated[str, NAME, Ui("Account", when=SLURM)] = ""
    """Account that the job is charged to; empty uses yours."""
    qos: Annotated[str, NAME, Ui("QOS", when=SLURM)] = ""
    """Quality of service of the job; empty uses your default."""
    constraint: Annotated[
        str, matches(r"[\w.,+@&|*()\[\]-]+", "must be features such as a100|h100"), Ui("Constraint", when=SLURM)
    ] = ""
    """Features that the nodes must have, such as a100|h100."""
    cpus: Annotated[int, Field(ge=0, le=4096), Ui("CPUs per node", when=SLURM)] = 0
    """CPUs on each node; 0 requests CPUs in proportion to the GPUs used, or all CPUs without GPUs."""
    memory_gib: Annotated[int, Field(ge=0, le=2**16), Ui("Memory per node", when=SLURM, unit="GiB")] = 0
    """RAM on each node; 0 uses the cluster's default."""
    container: Annotated[
        str, matches(r"[\w./:@#+-]+", "must be a file or the name of an image"), Ui("Container", when=SLURM)
    ] = ""
    """Container image with Footplate: a .sif file is started with Apptainer; anything else, such as
    registry#footplate:1 or a .sqsh file, with enroot and pyxis. Empty uses no container."""
    container_mounts: Annotated[
        Lines,
        each_matches(r"/[\w./@+-]*(:/[\w./@+-]*)?", "must have one path per line"),
        Ui("Container mounts", when=SLURM, widget="lines"),
    ] = ()
    """Folders mounted into the container, one path or path:path in the container per line; the run's folder is always
    mounted."""
    container_python: Annotated[str, Ui("Python in the container", when=SLURM)] = "python"
    """Python interpreter in the container; Footplate must be installed in it."""
    extra: Annotated[
        Lines,
        each_matches(r"-[^\r\n]+", "must have one sbatch option per line"),
        Ui("Extra sbatch options", when=SLURM, widget="lines"),
    ] = ()
    """Further options of sbatch, one per line, such as --reservation=team; they override those that Footplate sets."""
    setup: Annotated[Lines, Ui("Shell commands before training", when=SLURM, widget="lines")] = ()
    """Commands that the job runs first on each node, such as module load cuda; one per line."""
