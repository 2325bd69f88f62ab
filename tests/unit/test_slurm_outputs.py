"""Output of Slurm's commands in the forms of several versions and clusters: jobs, reasons, partitions, GPUs."""

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from specs import rule_finding

from backend.config import RunSpec
from backend.config.options import SpecError, edit, parse
from backend.launch import clusters
from backend.launch.clusters import answers, slurm_nodes
from backend.launch.plan import plan
from backend.machine import GIB, Machine, known_gpu
from backend.resolve import resolve
from backend.rules.examples import DEMO
from backend.runs import JOB, JOB_SCRIPT, STOP, follower, slurm

ON_SLURM = {"launch.place": "slurm"}
SQUEUE = """\
1711|PENDING|Priority|2026-11-24T10:30:00
1712|PENDING|(ReqNodeNotAvail, UnavailableNodes:n[3-4])|N/A
1713|RUNNING|None|2026-11-24T09:00:00
1714_3|COMPLETING|None|2026-11-24T08:00:00
1715|CANCELLED+|None|2026-11-24T08:00:00
1716|PENDING|QOSMaxGRESPerUser|N/A
1717|PENDING|SomethingNew|N/A
slurm_load_jobs error: a line that is no job
"""
SINFO = """\
cpu*|64|257000+|(null)|12|infinite
gpu|128|1031000|gpu:h100:8(S:0-1)|4|1-00:00:00
gpu|64|515000|gpu:a100:4,craynetwork:4|2|1-00:00:00
old|32|1|gpu:2|1|30:00
mig|64|500000|gpu:nvidia_a100_3g.20gb:2,gpu:nvidia_a100_7g.80gb:1|1|1-00:00:00
"""
MIXED = """\
mixed|96|515000|gpu:a100:4|6|1-00:00:00
mixed|40|190000|gpu:v100:4|9|1-00:00:00
mixed|96|515000|gpu:h100:2|2|1-00:00:00
small|16|64000|gpu:t4:1|3|1-00:00:00
"""


def test_jobs_of_squeue():
    jobs = slurm.parse(SQUEUE)
    assert list(jobs) == ["1711", "1712", "1713", "1714_3", "1715", "1716", "1717"]
    assert [name for name, job in jobs.items() if job.waits] == ["1711", "1712", "1716", "1717"]
    assert jobs["1715"].state == "CANCELLED"


@pytest.mark.parametrize(
    ("id", "text"),
    [
        ("1711", "Jobs with a higher priority are ahead. Slurm expects to start it at 2026-11-24 10:30:00."),
        ("1712", "A node that the job needs is not available."),
        ("1713", ""),
        ("1716", "A limit of the QOS is reached."),
        ("1717", "Slurm says: SomethingNew."),
    ],
)
def test_why_a_job_waits(id, text):
    assert slurm.parse(SQUEUE)[id].text == text


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("Dependency", False),
        ("DependencyNeverSatisfied", True),
        ("Reservation", False),
        ("ReservationDeleted", True),
        ("QOSGrpCpuLimit", False),
        ("QOSNotAllowed", True),
        ("QOSMinCpuNotSatisfied", True),
        ("PartitionNodeLimit", False),  # "Can also indicate that required nodes are DOWN or DRAINED" (squeue(1))
        ("PartitionTimeLimit", True),
    ],
)
def test_whether_a_job_will_never_start(reason, never):
    """Reasons begin with the names of others."""
    text = slurm.parse(f"1|PENDING|{reason}|N/A")["1"].text
    assert ("never start" in text) == never and not text.startswith("Slurm says")


def test_every_reason_is_a_sentence():
    assert all(text.endswith(".") and text[0].isupper() for text in slurm.REASONS.values() if text)
    assert slurm.parse("1|PENDING||")["1"].text == ""


def test_partitions_of_sinfo():
    found = slurm_nodes.parse(SINFO)
    assert [(part.name, part.is_default, part.nodes, part.cores, part.gpus, part.gpu_type) for part in found] == [
        ("cpu", True, 12, 64, 0, ""),
        ("gpu", False, 4, 128, 8, "h100"),
        ("gpu", False, 2, 64, 4, "a100"),
        ("old", False, 1, 32, 2, ""),
        ("mig", False, 1, 64, 3, "nvidia_a100_3g.20gb"),
    ]
    assert found[0].ram_bytes == 257000 * 2**20
    assert found[3].ram_bytes == 0, "Slurm's default, which says nothing"


@pytest.mark.parametrize(
    ("resources", "gpus", "kind"),
    [
        ("gpu:3090:8(S:0-1)", 8, "3090"),
        ("gpu:2080ti:4", 4, "2080ti"),
        ("gpu:1g.10gb:7,gpu:h100:3", 10, "1g.10gb"),
        ("gpu:nvidia_a100_1g.5gb+me:1(S:0),gpu:a100:7", 8, "nvidia_a100_1g.5gb+me"),
        ("craynetwork:4,gpu:8(S:0-3)", 8, ""),
        ("gpu:tesla-v100:2,nvme:1", 2, "tesla-v100"),
    ],
)
def test_types_of_gpus_that_begin_with_a_digit(resources, gpus, kind):
    (found,) = slurm_nodes.parse(f"gpu|64|257000|{resources}|1|infinite")
    assert (found.gpus, found.gpu_type) == (gpus, kind)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("h100", ("H100", 80)),
        ("nvidia_h100_80gb_hbm3", ("H100", 80)),
        ("A100 40GB", ("A100", 40)),
        ("a100-sxm4-40gb", ("A100", 40)),
        ("nvidia_a100_3g.20gb", ("A100", 20)),
        ("NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", ("A100", 20)),  # a label of Kubernetes
        ("a10", ("A10", 24)),
        ("l40s", ("L40S", 48)),
        ("rtx_4090", ("RTX 4090", 24)),
        ("3090", ("RTX 3090", 24)),
        ("A100-40G", ("A100", 40)),  # a type of Ray
        ("a10g", ("A10G", 24)),
        ("1g.10gb", ("1G.10GB", 10)),
        ("NVIDIA-GH200-480GB", ("GH200", 96)),
        ("NVIDIA GH200 144G HBM3e", ("GH200", 144)),
        ("NVIDIA H100 NVL", ("H100 NVL", 94)),
        ("nvidia_h100_nvl", ("H100 NVL", 94)),
        ("h100nvl", ("H100 NVL", 94)),
        ("NVIDIA H100 96GB HBM3", ("H100", 96)),
        ("NVIDIA H100 64GB HBM2", ("H100", 64)),
        ("nvidia-h100-mega-80gb", ("H100", 80)),  # a label of GKE
        ("NVIDIA H200 NVL", ("H200", 141)),
        ("NVIDIA A100-SXM-64GB", ("A100", 64)),
        ("NVIDIA A100-PCIE-40GB", ("A100", 40)),
        ("NVIDIA A100 80GB PCIe", ("A100", 80)),
        ("NVIDIA A800 80GB PCIe", ("A800", 80)),
        ("NVIDIA H800", ("H800", 80)),
        ("NVIDIA H20", ("H20", 96)),
        ("NVIDIA H20-3e", ("H20-3e", 141)),
        ("NVIDIA H20 141GB", ("H20", 141)),
        ("NVIDIA B300 SXM6 AC", ("B300", 268)),
        ("nvidia-gb200", ("GB200", 185)),
        ("gb300", ("GB300", 277)),
        ("l40", ("L40", 48)),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", ("RTX PRO 6000", 96)),
        ("RTXPRO6000", ("RTX PRO 6000", 96)),
        ("NVIDIA RTX 6000 Ada Generation", ("RTX 6000 Ada", 48)),
        ("RTX6000-Ada", ("RTX 6000 Ada", 48)),  # a name of SkyPilot
        ("Quadro RTX 6000", None),
        ("a6000", ("RTX A6000", 48)),
        ("NVIDIA A30", ("A30", 24)),
        ("Tesla V100-SXM2-16GB", ("V100", 16)),
        ("Tesla V100S-PCIE-32GB", ("V100S", 32)),
        ("mi250", ("MI250", 64)),
        ("AMD-Instinct-MI250X", ("MI250X", 64)),
        ("AMD-Instinct-MI300X-OAM", ("MI300X", 192)),  # a type of Ray
        ("AMD Instinct MI325X", ("MI325X", 256)),
        ("mi355x", ("MI355X", 288)),
        ("Intel-GAUDI", None),
        ("X9 12GB", ("X9 12GB", 12)),
        ("", None),
        ("gpu", None),
    ],
)
def test_gpu_types(name, known):
    found = known_gpu(name)
    assert (found and found[:2]) == known


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("nvidia_h100_80gb_hbm3", "H100"),
        ("Tesla-T4", "T4"),
        ("3090", "RTX 3090"),
        ("NVIDIA-H100-PCIe", "NVIDIA H100 PCIE"),
        ("a100 40GB", "A100 40GB"),
        ("NVIDIA-H100-NVL", "H100 NVL"),
        ("RTX 4090 Laptop GPU", "RTX 4090 LAPTOP GPU"),
        ("nvidia_a100_3g.20gb", "NVIDIA A100 3G.20GB"),
    ],
)
def test_variants_of_a_gpu_have_data_sheets_of_their_own(name, label):
    (gpu,) = answers.gpus(1, name)
    assert gpu.name == label


class Commands:
    """Slurm's commands, each of which prints a file."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setenv("FOOTPLATE_CACHE", str(folder / "cache"))
        answers.forget()

    def runs(self, name, code):
        file = self.folder / name
        file.write_text(f"#!/bin/sh\necho called >> {file}.calls\n{code}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def prints(self, name, text, status=0):
        file = self.folder / f"{name}.txt"
        file.write_text(text)
        self.runs(name, f"/bin/cat {file}{' >&2' if status else ''}\nexit {status}")

    def calls(self, name):
        file = self.folder / f"{name}.calls"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def commands(tmp_path, monkeypatch):
    return Commands(tmp_path / "bin", monkeypatch)


def test_the_machine_of_a_partition(commands):
    commands.prints("sinfo", SINFO)
    spec = edit(RunSpec(), {**ON_SLURM, "slurm.partition": "gpu"})
    machine, problem = slurm_nodes.machine(spec, Machine(python="/opt/python"))
    assert not problem
    assert (machine.device, machine.nodes, machine.cores, len(machine.gpus)) == ("cuda", 6, 128, 8)
    assert machine.gpus[0].name == "H100" and machine.gpus[0].total_bytes == 80 * GIB
    assert (machine.python, machine.name) == ("/opt/python", "Slurm partition gpu")
    slurm_nodes.machine(spec, Machine())
    assert commands.calls("sinfo") == 1, "the answer is kept"


def test_the_ram_of_a_job_is_what_it_requests(commands):
    commands.prints("sinfo", SINFO)
    for name, gib, expected in (("gpu", 16, 16), ("gpu", 0, 1031000 / 1024), ("old", 8, 8)):
        spec = edit(RunSpec(), {**ON_SLURM, "slurm.partition": name, "slurm.memory_gib": gib})
        machine = slurm_nodes.machine(spec, Machine())[0]
        assert machine.ram_bytes == machine.ram_free_bytes == int(expected * GIB)


def test_a_job_may_use_any_of_several_partitions(commands, monkeypatch):
    commands.prints("sinfo", SINFO)
    both = edit(RunSpec(), {**ON_SLURM, "slurm.partition": "old,gpu"})
    machine, problem = slurm_nodes.machine(both, Machine())
    assert not problem and (machine.nodes, len(machine.gpus)) == (6, 8)
    wrong = edit(RunSpec(), {**ON_SLURM, "slurm.partition": "gpu,none"})
    assert slurm_nodes.machine(wrong, Machine())[1].startswith("Slurm has no partition none. It has cpu, gpu,")
    monkeypatch.setenv("SBATCH_PARTITION", "old")  # which sbatch reads if the script names none
    assert slurm_nodes.machine(edit(RunSpec(), ON_SLURM), Machine())[0].name == "Slurm partition old"


@pytest.mark.parametrize(
    ("options", "gpu", "count", "nodes"),
    [
        ({"slurm.partition": "mixed"}, "V100", 4, 17),
        ({"slurm.partition": "mixed", "slurm.constraint": "a100"}, "A100", 4, 17),
        ({"slurm.partition": "mixed", "slurm.extra": ("--nodelist=a1",)}, "A100", 4, 17),
        ({"slurm.partition": "mixed", "launch.gpu_model": "A100 40GB"}, "A100 40GB", 4, 17),
        ({"slurm.partition": "mixed", "launch.nproc_per_node": 8}, "A100", 4, 17),
        ({"slurm.partition": "mixed", "slurm.cpus": 64}, "A100", 4, 17),
        ({"slurm.partition": "mixed", "slurm.memory_gib": 400}, "A100", 4, 17),
        ({"slurm.partition": "mixed,small", "parallel.strategy": "single"}, "T4", 1, 3),
        ({"slurm.partition": "mixed,small"}, "V100", 4, 17),
    ],
)
def test_a_job_may_get_the_smallest_gpus(commands, options, gpu, count, nodes):
    """Slurm chooses nodes. The processes of a strategy do not count where it is not selected."""
    commands.prints("sinfo", MIXED)
    spec = edit(RunSpec(), {**ON_SLURM, "parallel.strategy": "ddp", "launch.nproc_per_node": 2, **options})
    machine, problem = slurm_nodes.machine(spec, Machine())
    assert not problem and (machine.gpus[0].name, len(machine.gpus), machine.nodes) == (gpu, count, nodes)


def test_variables_do_not_replace_the_options_of_the_job(commands, tmp_path, monkeypatch):
    """sbatch prefers them to the options in its script: the job would not be the one that was checked."""
    commands.runs("sbatch", "/usr/bin/env > sbatch-env; echo 7")
    set_by_user = {
        "PARTITION": "debug",
        "ACCOUNT": "team",
        "TIMELIMIT": "5",
        "EXPORT": "ALL",
        "ARRAY_INX": "0-3",
        "WAIT": "1",
    }
    for name, value in {**set_by_user, "REQ_SWITCH": "1", "QOS": "low"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.chdir(tmp_path)
    spec = edit(
        RunSpec(),
        {**ON_SLURM, "slurm.partition": "gpu", "slurm.time_limit": "1:00:00", "slurm.extra": ("--hold -q high",)},
    )
    (tmp_path / JOB_SCRIPT).write_text(plan(spec, Machine()).files[JOB_SCRIPT])
    assert slurm.Slurm().submit(()) == "7"
    seen = [line for line in (tmp_path / "sbatch-env").read_text().splitlines() if line.startswith("SBATCH_")]
    assert sorted(seen) == ["SBATCH_ACCOUNT=team", "SBATCH_REQ_SWITCH=1"]
    (tmp_path / "sbatch-env").unlink()
    assert not slurm_nodes.refusal(spec, resolve(spec, Machine()), Machine())
    assert "SBATCH_WAIT" not in (tmp_path / "sbatch-env").read_text()


@pytest.mark.parametrize("kept", ["[]", "{", '{"time": 1e99}', '{"time": NOW}', '{"time": NOW, "jobs": [1]}'])
def test_a_damaged_list_of_jobs_is_written_again(commands, kept):
    commands.prints("squeue", SQUEUE)
    place = commands.folder / "cache" / slurm.SNAPSHOT
    place.parent.mkdir()
    place.write_text(kept.replace("NOW", str(time.time())))
    assert list(slurm.jobs(60))[:2] == ["1711", "1712"]


def test_what_users_set_for_their_own_look_at_the_queue_hides_no_job(commands, monkeypatch):
    """Also a question, which nobody would answer (ENVIRONMENT VARIABLES of squeue(1), sinfo(1) and scancel(1))."""
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    for name in ("SQUEUE_PARTITION", "SINFO_PARTITION", "SCANCEL_INTERACTIVE", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "set")
    for name in ("squeue", "sinfo", "scancel", "sbatch"):
        commands.runs(name, "/usr/bin/env")
        script = {"script": ""} if name == "sbatch" else {}
        shown = (slurm.sbatch if script else slurm.call)(*([] if script else [name]), **script)
        assert "SLURM_CONF=" in shown and "=set" not in shown


@pytest.mark.parametrize(
    ("partition", "limit", "allowed"),
    [
        ("gpu", "1440", True),
        ("gpu", "1441", False),
        ("gpu", "24:00:00", True),
        ("gpu", "1-00:01", False),
        ("gpu", "2-0", False),
        ("old", "30", True),
        ("old", "30:01", False),
        ("cpu", "365-0", True),
    ],
)
def test_the_time_limit_of_a_partition(commands, partition, limit, allowed):
    commands.prints("sinfo", SINFO)
    spec = edit(RunSpec(), {**ON_SLURM, "slurm.partition": partition, "slurm.time_limit": limit})
    assert (slurm_nodes.machine(spec, Machine())[1] == "") == allowed


def test_the_default_partition_and_unknown_gpus(commands):
    commands.prints("sinfo", SINFO)
    machine, _ = slurm_nodes.machine(edit(RunSpec(), ON_SLURM), Machine())
    assert machine.device == "cpu" and machine.nodes == 12
    old = edit(RunSpec(), {**ON_SLURM, "slurm.partition": "old"})
    assert slurm_nodes.machine(old, Machine())[0].gpus[0].name == answers.UNKNOWN_GPU
    named = edit(old, {"launch.gpu_model": "T4"})
    assert slurm_nodes.machine(named, Machine())[0].gpus[0].total_bytes == 16 * GIB


def test_problems_are_sentences(commands):
    spec = edit(RunSpec(), {**ON_SLURM, "slurm.partition": "none"})
    answers.forget()
    commands.prints("sinfo", SINFO.replace("*", ""))
    assert slurm_nodes.machine(spec, Machine())[1] == (
        "Slurm has no partition none. It has cpu, gpu, mig, old. "
        "sinfo reports cpu: 12 nodes with 64 CPU cores, 251 GiB of RAM, no GPUs, and no time limit; "
        "gpu: 4 nodes with 128 CPU cores, 1007 GiB of RAM, 8 h100 GPUs, and a time limit of 1 day; "
        "gpu: 2 nodes with 64 CPU cores, 503 GiB of RAM, 4 a100 GPUs, and a time limit of 1 day; "
        "old: 1 node with 32 CPU cores, an unknown amount of RAM, 2 GPUs, and a time limit of 30 minutes; "
        "mig: 1 node with 64 CPU cores, 488 GiB of RAM, 3 nvidia_a100_3g.20gb GPUs, and a time limit of 1 day."
    )
    default = edit(RunSpec(), ON_SLURM)
    assert slurm_nodes.machine(default, Machine())[1].startswith("Slurm has no default partition: set slurm.partition")
    made = plan(default, Machine())
    assert made.files[JOB_SCRIPT]
    commands.prints("sbatch", "sbatch: error: Batch job submission failed: Invalid account or account/partition", 1)
    assert slurm_nodes.refusal(default, resolve(default, Machine()), Machine()) == (
        "Slurm refuses the job: Batch job submission failed: Invalid account or account/partition. "
        f"{slurm_nodes.in_words(slurm_nodes.parse(SINFO))}"
    )


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "The command sinfo is not installed on this machine."),
        (
            "slurm_load_partitions: Unable to contact slurm controller (connect failure)",
            "sinfo: slurm_load_partitions: Unable to contact slurm controller (connect failure)",
        ),
    ],
)
def test_a_cluster_that_does_not_respond_has_not_refused_the_job(commands, said, message):
    if said:
        commands.prints("sinfo", said, 1)
    spec, here = edit(RunSpec(), ON_SLURM), Machine(cores=3)
    machine, facts = clusters.ask(spec, here, DEMO)
    assert (machine, facts.place_problem) == (here, message)
    found = rule_finding("CLU001", ON_SLURM, machine, facts)
    reach = "If this machine cannot reach the cluster, start Footplate on one that can, such as a login node."
    assert found.title == "Footplate cannot ask the cluster for its nodes"
    assert found.message == f"{message.rstrip('.')}. {reach}"
    refused = rule_finding("CLU001", ON_SLURM, machine, replace(DEMO, place_problem="Slurm has no partition gpu."))
    assert refused.title == "The cluster cannot run this job"


def test_a_finding_says_what_the_partition_has_and_allows(commands):
    commands.prints("sinfo", SINFO.replace("old|", "night|"))
    spec = edit(RunSpec(), {**ON_SLURM, "slurm.partition": "night", "slurm.time_limit": "1:00:00"})
    words = (
        "sinfo reports night: 1 node with 32 CPU cores, an unknown amount of RAM, 2 GPUs, and a time limit of "
        "30 minutes."
    )
    assert slurm_nodes.machine(spec, Machine())[1] == (
        f"The partition night allows 30:00, and the job requests 1:00:00. {words}"
    )
    commands.prints("sbatch", "allocation failure: Requested node configuration is not available", 1)
    assert slurm_nodes.refusal(spec, resolve(spec, Machine()), Machine()) == (
        f"Slurm refuses the job: Requested node configuration is not available. {words}"
    )


def test_a_cluster_with_many_partitions_or_none(commands):
    many = slurm_nodes.parse("".join(f"p{i}|1|2000|(null)|1|1-12:30:00\n" for i in range(50)))
    text = slurm_nodes.in_words(many)
    assert "p5: 1 node with 1 CPU core, 1.95 GiB of RAM, no GPUs, and a time limit of 1 day 12 hours 30 minutes" in text
    assert text.endswith("; 44 more are not shown.") and "p6" not in text
    commands.prints("sinfo", "")
    problem = slurm_nodes.machine(edit(RunSpec(), ON_SLURM), Machine())[1]
    assert problem == "The command sinfo lists no partition that this user can use."


def test_all_followers_share_one_call(commands):
    commands.prints("squeue", SQUEUE)
    assert slurm.jobs().keys() == slurm.jobs().keys() == slurm.parse(SQUEUE).keys()
    assert commands.calls("squeue") == 1
    slurm.jobs(max_age=0)
    assert commands.calls("squeue") == 2
    snapshot = commands.folder / "cache" / slurm.SNAPSHOT
    snapshot.write_text("{")  # damaged: asked again
    assert slurm.jobs() and commands.calls("squeue") == 3
    future = json.loads(snapshot.read_text()) | {"time": time.time() + 900}
    snapshot.write_text(json.dumps(future))  # the clock was set back
    assert slurm.jobs() and commands.calls("squeue") == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slurm.partition", "gpu\n#SBATCH --uid=0"),
        ("slurm.partition", "gpu; rm -rf /"),
        ("slurm.time_limit", "tomorrow"),
        ("slurm.account", "a b"),
        ("slurm.constraint", "a$(id)"),
        ("slurm.extra", "reservation=team"),
        ("slurm.extra", ("--reservation=team\ntouch /tmp/file",)),
        ("slurm.cpus", -1),
    ],
)
def test_values_that_do_not_fit_an_sbatch_line(name, value):
    with pytest.raises(SpecError, match=name):
        parse({**ON_SLURM, name: value})


@pytest.mark.parametrize("value", ["30", "12:00:00", "2-00:00:00", "1-12", "90:30"])
def test_time_limits(value):
    assert parse({**ON_SLURM, "slurm.time_limit": value}).slurm.time_limit == value


@pytest.mark.parametrize(("limit", "seconds"), [("", 300), ("1-0", 300), ("15", 300), ("6", 120), ("3:00", 60)])
def test_a_short_job_is_not_asked_to_end_at_once(limit, seconds):
    made = plan(edit(RunSpec(), {**ON_SLURM, "slurm.time_limit": limit}), Machine())
    assert f"#SBATCH --signal=B:TERM@{seconds}\n" in made.files[JOB_SCRIPT]


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_that_slurm_does_not_put_back_into_the_queue_is_stopped(commands, tmp_path, status):
    """Without a stop file, its exit status would say that the run is done."""
    commands.runs("srun", f"printf 'save\\n{slurm.INTERRUPTED}\\n' > stop")
    commands.runs("squeue", "echo RUNNING")
    commands.runs("scontrol", f"[ $1 = requeue ] && exit {status}; echo n0 NodeAddr=127.0.0.1")
    commands.runs("sleep", "true")
    made = plan(edit(RunSpec(), ON_SLURM), Machine(python=sys.executable))
    (tmp_path / JOB_SCRIPT).write_text(made.files[JOB_SCRIPT])
    env = {"PATH": f"{commands.folder}:{os.defpath}", "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", JOB_SCRIPT], cwd=tmp_path, env=env, check=True, timeout=60)
    stop = tmp_path / STOP
    assert (stop.read_text() if stop.exists() else "") == (f"save\n{slurm.INTERRUPTED}\n" if status else "")


def test_a_name_cannot_add_an_option():
    made = plan(edit(RunSpec(), {**ON_SLURM, "logging.run_name": "a\n#SBATCH --uid=0 b"}), Machine())
    lines = [line for line in made.files[JOB_SCRIPT].splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --job-name=a-SBATCH---uid-0-b" in lines
    assert not [line for line in lines if line.startswith("#SBATCH --uid")]


@pytest.mark.parametrize(
    ("text", "job"), [('{"id": "7"}', "7"), ('{"id": "7", "ended": true}', ""), ("{}", ""), ("[7]", ""), ("{", "")]
)
def test_the_job_whose_end_nobody_has_seen(tmp_path, text, job):
    (tmp_path / JOB).write_text(text)
    assert follower.unended(tmp_path) == job and follower.unended(tmp_path / "nowhere") == ""
