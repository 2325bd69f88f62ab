"""Extra sbatch options: every way to write them, those that break the job, and those that replace options."""

from __future__ import annotations

from typing import Any

import pytest

from backend.config import RunSpec
from backend.config.options import edit
from backend.launch.clusters.slurm_options import parse, without
from backend.rules import Finding, check
from backend.rules.examples import DEMO, TWO_H100

SLURM = {"launch.place": "slurm", "parallel.strategy": "ddp", "launch.nproc_per_node": 2, "launch.nnodes": 1}


def finding(code: str, *lines: str, **more: Any) -> Finding | None:
    options = {key.replace("__", "."): value for key, value in more.items()}
    spec = edit(RunSpec(), {**SLURM, **options, "slurm.extra": lines})
    return next((f for f in check(spec, TWO_H100, DEMO) if f.code == code), None)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--nodes=2", [("nodes", "2")]),
        ("--nodes 2", [("nodes", "2")]),
        ("-N2", [("nodes", "2")]),
        ("-N 2", [("nodes", "2")]),
        ("-HN2", [("hold", ""), ("nodes", "2")]),
        ("-N 2 -n 4 --exclusive", [("nodes", "2"), ("ntasks", "4"), ("exclusive", "")]),
        ("--ntasks-per-n=4", [("ntasks-per-node", "4")]),
        ("--arr 1-4", [("array", "1-4")]),
        ("--n=4", [("n", "4")]),
        ("--comment 'for the team' -v", [("comment", "for the team"), ("verbose", "")]),
        ("--requeue -t 5", [("requeue", ""), ("time", "5")]),
        ("--output=a.txt # log", [("output", "a.txt")]),
        ("--comment 'open", [("comment", "'open")]),
        ("-", []),
        ("--nodes", [("nodes", "")]),
        ("-N", [("nodes", "")]),
    ],
)
def test_every_way_to_write_an_option(line: str, found: list[tuple[str, str]]) -> None:
    assert [(option.name, option.value) for option in parse([line])] == found


def test_removing_options_keeps_the_others() -> None:
    lines = ("--exclusive", "-N 2 --comment 'for the team'", "-n4")
    removed = [option for option in parse(lines) if option.name in ("nodes", "ntasks")]
    assert without(lines, removed) == ("--exclusive", "--comment 'for the team'")
    assert without(lines, []) == lines


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--ntasks-per-node=8", "srun starts 8 launchers on each node"),
        ("--ntasks 2", "srun starts 2 launchers, and the run needs one on 1 node"),
        ("-n 4", "srun starts 4 launchers"),
        ("--ntasks-per-gpu=1", "refuses it together with --ntasks-per-node"),
        ("--array=0-3", "once for each task of the array"),
        ("-a 1", "once for each task of the array"),
        ("--nodes=4", "the job gets 4 nodes, and the run is planned, checked and estimated for 1"),
        ("-N 1-4", "the job gets 1-4 nodes"),
        ("--gres=gpu:1", "1 instead of 2 per node"),
        ("--gres gpu:a100", "1 instead of 2 per node"),
        ("--gres=tmpdisk:100", "0 instead of 2 per node"),
        ("--gpus-per-node=h100:1", "1 instead of 2 per node"),
        ("-G 1", "the job gets 1 GPU, and the run needs 2"),
        ("--output=slurm-%j.out", "slurm-%j.out instead of"),
        ("-o /dev/null", "footplate logs"),
        ("-e err.txt", "stderr goes to err.txt"),
        ("--open-mode=truncate", "deletes its earlier log"),
        ("--chdir=/tmp", "in the folder that it is submitted from"),
        ("-D /tmp", "in the folder that it is submitted from"),
        ("--export=ALL", "secrets included"),
        ("--export=NONE", "loses HOME, PATH"),
        ("--export-file=env", "replaced by those of a file"),
        ("--signal=USR1@60", "no SIGTERM before the time limit"),
        ("--cpus-per-gpu=4", "--cpus-per-task"),
        ("-M other", "another cluster"),
        ("-W", "Footplate gives up"),
        ("--test-only", "submits nothing"),
    ],
)
def test_options_that_break_the_job(line: str, part: str) -> None:
    found = finding("CLU006", "--exclusive", line)
    assert found is not None and part in found.message, found and found.message
    assert found.fixes[-1].patch == {"slurm.extra": ("--exclusive",)}


@pytest.mark.parametrize(
    "line",
    [
        "--ntasks-per-node=1", "-n1", "--nodes=1", "-N 1-1", "--gres=gpu:2", "--gres=gpu:h100:2,tmp:1", "-G h100:2",
        "--gpus-per-node=2", "--open-mode=append", "--mem-per-cpu=4G", "--reservation=team", "--exclusive",
        "--nodelist=node[1-4]", "-x node3", "--mail-type=ALL", "--comment '-N 4'", "--begin=now+1hour", "-v",
    ],
)  # fmt: skip
def test_options_that_change_nothing_the_job_relies_on(line: str) -> None:
    assert finding("CLU006", line) is None
    assert finding("CLU007", line) is None


def test_options_that_depend_on_others() -> None:
    assert finding("CLU006", "--mem-per-gpu=80G", slurm__memory_gib=64) is not None
    assert finding("CLU006", "--signal=USR1@60", slurm__requeue=False) is None
    assert finding("CLU006", "--nodes=8", "--nodes=1") is None, "sbatch uses the last one"
    assert finding("CLU006", "--array=1", launch__place="local") is None
    fixes = finding("CLU006", "--nodes=2").fixes  # type: ignore[union-attr]
    assert fixes[0].patch == {"slurm.extra": (), "launch.nnodes": 2}


@pytest.mark.parametrize(
    ("line", "patch"),
    [
        ("--time=2:00:00", {"slurm.time_limit": "2:00:00"}),
        ("-t 90", {"slurm.time_limit": "90"}),
        ("-p gpu", {"slurm.partition": "gpu"}),
        ("--account team", {"slurm.account": "team"}),
        ("-q high", {"slurm.qos": "high"}),
        ("-C 'a100|h100'", {"slurm.constraint": "a100|h100"}),
        ("-c 16", {"slurm.cpus": 16}),
        ("--mem=64G", {"slurm.memory_gib": 64}),
        ("--no-requeue", {"slurm.requeue": False}),
    ],
)
def test_options_that_replace_options(line: str, patch: dict[str, Any]) -> None:
    found = finding("CLU007", line)
    assert found is not None and next(iter(patch)) in found.message
    assert found.fixes[0].patch == {"slurm.extra": (), **patch}
    same = {key.replace(".", "__"): value for key, value in patch.items()}
    assert finding("CLU007", line, **same) is None, "the option has the same value"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--wrap='python train.py'", "sbatch ignores it in a batch script"),
        ("--dependency=afterok:17", "stays queued if the dependency can never be satisfied"),
        ("--gres=gpu:8", "8 GPUs per node, of which the run uses 2"),
    ],
)
def test_other_options_that_a_person_should_know_about(line: str, part: str) -> None:
    found = finding("CLU007", line)
    assert found is not None and part in found.message


def test_a_value_that_the_option_cannot_express() -> None:
    assert finding("CLU007", "--mem=0") is None, "slurm.memory_gib is not set"
    found = finding("CLU007", "--mem=0", slurm__memory_gib=64)
    assert found is not None and "replaces slurm.memory_gib" in found.message
    assert [fix.label for fix in found.fixes] == ["Remove these sbatch options"]
