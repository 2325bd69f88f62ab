"""A deletion that fails or is killed: the run stays in the list, and the deletion is continued."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from planted_runs import plant_run
from privileges import needs_root
from small import client
from waiting import wait_for

from backend.machine import Machine
from backend.runs import DELETING, JOB, LOCK, STATE, ownership
from backend.runs.folder import Run, RunError, finish_deletions, runs
from backend.runs.listing import RunList


@pytest.fixture
def run(tmp_path: Path) -> Run:
    state = {"end": "stopped", "started": 1.0, "ended": 2.0, "exit_code": 0}
    contents = {LOCK: "supervisor\n", STATE: state, "checkpoints/checkpoint-3/weights": "w", "model/weights": "w"}
    return plant_run(tmp_path / "runs", "x", contents)


def delete_and_die(run: Run) -> None:
    """The page is killed while it deletes."""
    pid = os.fork()
    if not pid:
        try:
            remove = os.rmdir

            def rmdir(path: str, **more: int) -> None:
                remove(path, **more)
                os.kill(os.getpid(), signal.SIGKILL)

            os.rmdir = rmdir  # type: ignore[assignment]
            run.delete()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_killed_deletion_is_listed_and_continued(run: Run) -> None:
    """Before, the run was in no list, and its gigabytes stayed on the disk."""
    delete_and_die(run)
    [row] = RunList(run.path.parent).all()
    assert (row["id"], row["state"]) == (run.id, "deleting")
    assert "Deleting was interrupted. Delete the run again" in row["sentence"]
    assert [found.id for found in runs(run.path.parent)] == [run.id]
    assert run.can()["delete"]
    assert not run.can()["resume"]
    with pytest.raises(RunError, match="being deleted"):
        run.resume()
    with pytest.raises(RunError, match="being deleted"):
        run.start()
    run.delete()
    assert not list(run.path.parent.glob("[!.]*"))


def test_the_page_continues_deletions_when_its_server_starts(run: Run) -> None:
    delete_and_die(run)
    with client(run.path.parent, detect_machine=lambda _: Machine()):
        wait_for(lambda: not run.path.exists())


@needs_root
def test_what_cannot_be_deleted_is_named_and_tried_again(run: Run, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    for path in (run.path.parent, run.path, *run.path.rglob("*")):
        os.chown(path, 65534, 65534)
    frozen = run.path / "checkpoints/checkpoint-3"
    os.chown(frozen, 0, 0)
    os.seteuid(65534)
    ownership.own_uid.cache_clear()
    try:
        with pytest.raises(RunError, match=r"could not be deleted: .*checkpoint-3.*: Permission denied"):
            run.delete()
        assert not (run.path / "model").exists(), "everything else is deleted"
        assert run.state == "deleting"
        sentence = run.summary()["sentence"]
        assert "only partly deleted: checkpoints/checkpoint-3/weights cannot be deleted (Permission den" in sentence
        finish_deletions(run.path.parent)
        assert [found.id for found in runs(run.path.parent)] == [run.id]
    finally:
        os.seteuid(0)
        ownership.own_uid.cache_clear()
    run.delete()
    assert not run.path.exists()


@pytest.mark.parametrize("cluster", [{}, {"cluster": "Moon"}])
def test_the_job_of_an_unknown_cluster_is_not_taken_for_one_of_slurm(run: Run, cluster: dict[str, str]) -> None:
    (run.path / JOB).write_text(json.dumps({"id": "7", **cluster}))
    with pytest.raises(RunError, match=r"job\.json names the unknown cluster '(Moon)?'\. If the"):
        run.delete()
    assert run.path.is_dir()


def test_a_read_only_folder_is_not_marked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("backend.runs.deletion.replace_text", read_only)
    with pytest.raises(RunError, match="could not be deleted: Read-only file system"):
        run.delete()
    assert run.state == "stopped"
    assert not (run.path / DELETING).exists()
