"""Only the processes that the kernel killed in the run's own cgroup count as killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

from backend.runs import oom


def make(system: Path, **files: str) -> Path:
    for name, text in {"proc/vmstat": "pgfault 7\noom_kill 40\n", **files}.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    return system


def test_kills_of_other_cgroups_do_not_count(tmp_path: Path) -> None:
    two = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 1\noom_kill 2\n"}
    assert oom.kills(make(tmp_path / "two", **two)) == 2
    one = {
        "proc/self/cgroup": "4:cpu,memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    }
    assert oom.kills(make(tmp_path / "one", **one)) == 3


def test_kills_of_the_machine_count_where_no_cgroup_has_a_count(tmp_path: Path) -> None:
    assert oom.kills(make(tmp_path / "root", **{"proc/self/cgroup": "0::/\n"})) == 40
    assert oom.kills(make(tmp_path / "none")) == 40
    assert oom.kills(tmp_path / "missing") == 0
