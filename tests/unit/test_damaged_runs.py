"""A run with unreadable or broken files is listed as damaged, and hides no other run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from planted_runs import plant_run
from privileges import needs_root
from small import client

from backend.__main__ import main
from backend.machine import Machine
from backend.models import trained
from backend.runs import (
    DELETING,
    KUBERNETES_JOB,
    LOCK,
    LOG,
    METRICS,
    PLAN,
    PROGRESS,
    RAY_JOB,
    RAY_NODES,
    RAY_STATUS,
    RESULT,
    SPEC,
    STATE,
    STOP,
    SUPERVISOR,
    Plan,
    follower,
    queue,
    ray,
    rehearsals,
    resume_point,
    slurm,
    stacks,
)
from backend.runs import folder as folder_module
from backend.runs.folder import Run, RunError, runs
from backend.runs.kubernetes import Kubernetes
from backend.runs.listing import INDEX, RunList


def content(name: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def folder_named(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


BREAKAGES: dict[str, Callable[[Path], object]] = {
    "metrics is a folder": folder_named(METRICS),
    "plan of wrong types": content(PLAN, json.dumps({"argv": 5, "about": [1], "files": 7, "devices": "x"})),
    "plan is a list": content(PLAN, "[1, 2]"),
    "plan is not text": content(PLAN, b"\xff\xfe\x00"),
    "progress of wrong types": content(PROGRESS, json.dumps({"step": "seven", "max_steps": "many", "time": "now"})),
    "state is garbage": content(STATE, "garbage"),
    "state of wrong types": content(STATE, json.dumps({"end": 3, "started": "x", "ended": [], "queued": {}})),
    "result is a list": content(RESULT, "[]"),
    "spec is not text": content(SPEC, b"\xff\xfe\x00bad"),
    "spec is missing": lambda folder: (folder / SPEC).unlink(),
    "metrics of wrong types": content(METRICS, '{"step": {}, "loss": []}\n7\n"x"\n'),
    "deeply nested progress": content(PROGRESS, "[" * 5000),
}


def make(root: Path, name: str) -> Run:
    contents = {
        LOCK: SUPERVISOR,
        PROGRESS: {"phase": "training", "step": 3, "max_steps": 7, "time": 1.0},
        STATE: {"end": "failed", "started": 1.0, "ended": 2.0, "exit_code": 1},
        METRICS: [{"step": 3, "loss": 2.5}],
        RESULT: {},
    }
    return plant_run(root, name, contents, "train:\n  max_steps: 7\n")


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_damaged_run_is_shown_and_can_be_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    healthy, broken = make(tmp_path / "runs", "healthy"), make(tmp_path / "runs", "broken")
    BREAKAGES[name](broken.path)
    rows = {run.id: run.summary() for run in runs(tmp_path / "runs")}
    assert rows.keys() == {healthy.id, broken.id}
    assert rows[healthy.id]["loss"] == 2.5
    assert rows[broken.id].keys() == rows[healthy.id].keys()
    for command in ("show", "metrics", "logs", "stacks", "stop"):
        assert main([command, broken.id, "--runs", str(tmp_path / "runs")]) in (0, 2), command
    assert main(["list", "--runs", str(tmp_path / "runs")]) == 0
    assert "Traceback" not in "".join(capsys.readouterr())
    with client(tmp_path / "runs", detect_machine=lambda _: Machine()) as api:
        assert {row["id"] for row in api.get("/api/runs").json()["runs"]} == rows.keys()
        found = api.get(f"/api/runs/{broken.id}")
        assert found.status_code in (200, 404, 409), found.text
        assert found.status_code == 200 or "Damaged: " in found.json()["error"] or "missing" in found.json()["error"]
        assert api.get(f"/api/runs/{healthy.id}").json()["summary"]["loss"] == 2.5
        assert api.delete(f"/api/runs/{broken.id}").status_code == 200
    assert [run.id for run in runs(tmp_path / "runs")] == [healthy.id]


def test_damage_is_named(tmp_path: Path) -> None:
    broken = make(tmp_path, "broken")
    BREAKAGES["metrics is a folder"](broken.path)
    row = broken.summary()
    assert row["state"] == "damaged"
    assert row["sentence"] == "Damaged: metrics.jsonl in the run's folder cannot be read (Is a directory)."


def test_a_run_without_its_spec_is_shown(tmp_path: Path) -> None:
    broken = make(tmp_path / "runs", "broken")
    (broken.path / SPEC).unlink()
    with client(tmp_path / "runs", detect_machine=lambda _: Machine()) as api:
        found = api.get(f"/api/runs/{broken.id}")
    assert found.status_code == 200, found.text
    assert found.json()["summary"]["loss"] == 2.5


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read. Those above tmp_path are closed again by each pytest that starts."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@needs_root
def test_a_folder_without_permissions_is_listed(open_folder: Path) -> None:
    closed = make(open_folder / "runs", "closed")
    (open_folder / "runs").chmod(0o755)
    os.chown(closed.path, 65534, 65534)
    closed.path.chmod(0)
    os.seteuid(65534)
    try:
        assert [run.summary()["state"] for run in runs(open_folder / "runs")] == ["damaged"]
    finally:
        os.seteuid(0)


@needs_root
def test_a_folder_without_permissions_is_named_by_every_request(
    open_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each request for such a run was an internal error."""
    root = open_folder / "runs"
    closed, healthy = make(root, "closed"), make(root, "healthy")
    monkeypatch.setenv(queue.FOLDER, str(open_folder / "queue"))
    (open_folder / "queue").mkdir(mode=0o700)
    for path in (root, open_folder / "queue", closed.path, *closed.path.iterdir()):
        os.chown(path, 65534, 65534)
    for path in (healthy.path, *healthy.path.iterdir()):  # still belongs to root, but others may read it
        path.chmod(0o755)
    closed.path.chmod(0)
    os.seteuid(65534)
    try:
        with client(root, detect_machine=lambda _: Machine()) as api:
            assert {row["state"] for row in api.get("/api/runs").json()["runs"]} == {"damaged", "failed"}
            answers = [api.get(f"/api/runs/{closed.id}{path}") for path in ENDPOINTS]
            answers += [api.post(f"/api/runs/{closed.id}/{act}", json={}) for act in ("stop", "resume", "cleanup")]
            answers.append(api.delete(f"/api/runs/{closed.id}"))
        rows = {row["id"]: row for row in RunList(root).all()}
        assert rows[closed.id].keys() == rows[healthy.id].keys()
        assert main(["list", "--runs", str(root)]) == 0
        for command in ("show", "logs", "metrics", "stop", "resume"):
            assert main([command, closed.id, "--runs", str(root)]) == 2
    finally:
        os.seteuid(0)
    sentence = f"The run {closed.id} cannot be read: Permission denied. Run `chmod u+rwx {closed.path}` to get access."
    assert {(found.status_code, found.json()["error"]) for found in answers} == {(404, sentence)}
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("end", ["paused", 5, ["done"], None])
def test_an_end_that_the_supervisor_never_writes_is_none(tmp_path: Path, end: object) -> None:
    run = make(tmp_path, "one")
    (run.path / RESULT).unlink()
    (run.path / STATE).write_text(json.dumps({"end": end, "started": 1.0, "ended": 2.0, "exit_code": 1}))
    assert run.state == "lost"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)


ENDPOINTS = (
    "",
    "/log",
    "/metrics",
    "/series",
    "/values",
    "/metrics.csv",
    "/log.txt",
    "/report.png",
    "/bundle.zip",
    "/measurement.json",
)


@pytest.mark.parametrize(
    ("make_irregular", "names"),
    [
        (pipe, (LOCK, LOG, METRICS, PROGRESS, RESULT, SPEC, STATE, STOP)),
        pytest.param(pipe, folder_module.READ, marks=pytest.mark.soak),
        (socket_file, (LOCK, METRICS)),
        (Path.mkdir, (LOCK, STATE)),
    ],
)
def test_files_that_are_not_regular_hang_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make_irregular: Callable[[Path], object], names: Sequence[str]
) -> None:
    """Before, list and page waited for someone to write into a named pipe."""
    root = tmp_path / "runs"
    healthy, broken = make(root, "healthy"), {}
    for name in names:
        if name not in (PLAN, DELETING):  # without a plan, a folder is not a run; the page deletes it at its start
            run = make(root, name)
            (run.path / name).unlink(missing_ok=True)
            make_irregular(run.path / name)
            broken[run.id] = name
    rows = {row["id"]: row for row in RunList(root).all()}
    assert rows[healthy.id]["state"] == "failed"
    assert rows.keys() == {healthy.id, *broken}
    with client(root, detect_machine=lambda _: Machine()) as api:
        for id, name in broken.items():
            assert rows[id]["state"] == "damaged", name
            assert f"Damaged: {name} in the run's folder cannot be read (" in rows[id]["sentence"]
            for command in ("show", "logs", "resume"):
                assert main([command, id, "--runs", str(root)]) in (0, 1, 2), (command, name)
            for path in ENDPOINTS:
                assert api.get(f"/api/runs/{id}{path}").status_code in (200, 204, 404, 409), (path, name)
            assert api.delete(f"/api/runs/{id}").status_code == 200, name
    assert "Traceback" not in "".join(capsys.readouterr())
    assert [run.id for run in runs(root)] == [healthy.id]


@pytest.mark.parametrize(
    "name", ["checkpoints/checkpoint-3/complete", "ranks/a/attempt_0/0/error.json", "stacks/0.txt"]
)
def test_pipes_in_folders_of_a_run_hang_nothing(tmp_path: Path, name: str) -> None:
    broken = make(tmp_path / "runs", "broken")
    (broken.path / name).parent.mkdir(parents=True)
    os.mkfifo(broken.path / name)
    assert broken.summary()["state"] == "failed"
    broken.failure()
    stacks.collect(broken.path, seconds=0)
    assert resume_point.find(broken.path, check_content=True).checkpoint is None


def test_a_pipe_as_log_does_not_block_a_start(tmp_path: Path) -> None:
    broken = make(tmp_path / "runs", "broken")
    os.mkfifo(broken.path / LOG)
    with pytest.raises(RunError, match=r"The run folder cannot be used: .*Not a regular file"):
        broken.start()


def test_a_metrics_file_that_is_a_folder_fails_no_request(tmp_path: Path) -> None:
    broken = make(tmp_path / "runs", "broken")
    BREAKAGES["metrics is a folder"](broken.path)
    with client(tmp_path / "runs", detect_machine=lambda _: Machine()) as api:
        for path in (*ENDPOINTS, "/charts/loss.png"):
            assert api.get(f"/api/runs/{broken.id}{path}").status_code in (200, 204, 404, 409), path


def test_pipes_among_the_files_of_clusters_hang_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes into: reading one would wait forever."""
    for name in (RAY_JOB, RAY_STATUS, KUBERNETES_JOB, STOP, "token", "cache/" + slurm.SNAPSHOT):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / RAY_NODES).mkdir()
    os.mkfifo(tmp_path / RAY_NODES / "0")
    monkeypatch.setattr(ray, "NODE_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "cache_folder", lambda _: tmp_path / "cache")
    assert ray.token({ray.TOKEN_PATH: str(tmp_path / "token")}) == ""
    cluster = ray.Ray(tmp_path)
    assert cluster._driver("footplate-1") == {}
    assert "Ray's nodes 0 have not reported" in cluster.wait_for_processes()
    for work in (lambda: cluster.submit(()), lambda: Kubernetes(tmp_path).submit(()), slurm.jobs):
        with pytest.raises(OSError, match="Not a regular file"):
            work()
    follower.withdraw_interruption(tmp_path, "interrupted")
    assert (tmp_path / STOP).is_fifo()  # not a cluster's request


def test_a_token_that_is_a_link_is_read(tmp_path: Path) -> None:
    """As in a pod, where the files of a secret are links."""
    (tmp_path / "..data").write_text("secret\n")
    (tmp_path / "token").symlink_to("..data")
    assert ray.token({ray.TOKEN_PATH: str(tmp_path / "token")}) == "secret"


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "tokenizer_config.json"])
def test_a_pipe_in_a_trained_model_hangs_nothing(tmp_path: Path, name: str) -> None:
    run = make(tmp_path, "one")
    (run.path / RESULT).write_text(json.dumps({"model": "model"}))
    (run.path / "model").mkdir()
    for file in ("model.safetensors", "config.json", "tokenizer_config.json"):
        (run.path / "model" / file).write_text("{}")
    assert trained.find(run)
    (run.path / "model" / name).unlink(missing_ok=True)
    os.mkfifo(run.path / "model" / name)
    assert trained.find(run) is None


def test_a_pipe_as_log_of_a_rehearsal_hangs_nothing(tmp_path: Path) -> None:
    """Neither as the rehearsal's own log nor as that of one of its runs, whose other logs are kept."""
    plans = {name: Plan(("true",), files={SPEC: ""}) for name in ("shrink", "train", "load")}
    made = rehearsals.Rehearsal.create(tmp_path / "rehearsals" / "1", "one", plans, {})
    driver, logs = rehearsals.Driver(made), [run.path / LOG for run in made.runs().values()]
    os.mkfifo(logs[0])
    logs[1].write_text("training\n")
    os.mkfifo(made.path / LOG)
    driver._keep_log()
    (made.path / LOG).unlink()
    driver._keep_log()
    assert (made.path / LOG).read_text() == "training\n"


def test_a_pipe_as_index_or_queue_hangs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path / "runs", "one")
    os.mkfifo(tmp_path / "runs" / INDEX)
    assert [row["id"] for row in RunList(tmp_path / "runs").all()] == [run.id]
    monkeypatch.setenv(queue.FOLDER, str(tmp_path / "queue"))
    os.mkfifo(queue.folder() / queue.ORDER)
    assert queue.entries() == []
