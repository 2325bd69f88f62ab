"""Jobs of a run that has trained: their folder, what is shown, and deleting a run whose model is in use."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from small import client

from backend.__main__ import main
from backend.config import RunSpec
from backend.models import gguf, merge, trained
from backend.presets import dump
from backend.publish import publication
from backend.publish.contents import Request
from backend.runs import LOCK, MODEL, RESULT, SPEC, Plan, jobs, processes
from backend.runs.folder import Run, RunError, StopTimeouts
from backend.runs.supervisor import Supervisor

SLEEP = ["sleep", "60"]
CERTIFICATE = {
    "status": "verified", "limits": [], "dtype": "bf16", "is_reward_model": False, "base_model": "m",
    "base_weights": "the same weights as in training",
    "adapter_to_base": {"kl_mean": 2.0}, "adapter_to_saved": {"kl_mean": 1e-5, "kl_max": 1e-4, "same_argmax": 1.0,
                                                              "positions": 512},
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run that has ended with an adapter."""
    made = Run.create(tmp_path / "runs", "r", Plan(("true",), files={SPEC: dump(RunSpec())}), datetime.now())
    plant_model(made, "adapter_config.json", {"base_model_name_or_path": "some/model", "task_type": "CAUSAL_LM"})
    return made


def plant_model(place, config, content):
    (place.path / MODEL).mkdir()
    weights = config.replace("_config.json", "_model.safetensors").replace("config.json", "model.safetensors")
    for name, text in {config: json.dumps(content), "tokenizer_config.json": "{}", weights: "x" * 1000}.items():
        (place.path / MODEL / name).write_text(text)
    (place.path / RESULT).write_text(json.dumps({"model": MODEL, "certificate": CERTIFICATE}))


def finished_job(run, step=None):
    """A merge as it is after its end."""
    job = jobs.create(run, jobs.MERGE, {"step": step}, {}, {})
    (job.path / LOCK).touch()
    plant_model(job, "config.json", {"architectures": ["LlamaForCausalLM"]})
    (job.path / "state.json").write_text(json.dumps({"end": "done", "exit_code": 0}))
    return job


def test_a_merge_that_has_ended_is_not_repeated(run):
    job = finished_job(run)
    assert merge.start(run, None).id == job.id
    shown = merge.as_json(job)
    assert shown["state"] == "done" and shown["model"]["folder"] == str(job.path / MODEL) and not shown["model"]["base"]


@pytest.mark.parametrize("change", ["another adapter", "merged model deleted", "failed"])
def test_a_merge_that_is_outdated_is_replaced(run, monkeypatch, change):
    job, started = finished_job(run), []
    monkeypatch.setattr(Run, "start", lambda self, timeouts: started.append(self.id))
    if change == "another adapter":
        os.utime(job.path / "merge.json", (1, 1))
    elif change == "failed":
        (job.path / RESULT).unlink()
        (job.path / "state.json").write_text(json.dumps({"end": "failed", "exit_code": 1}))
    else:
        for path in (job.path / MODEL).iterdir():
            path.unlink()
        (job.path / MODEL).rmdir()
    again = merge.start(run, None)
    assert started == [again.id]
    assert [found.id for found in jobs.find_all(run, jobs.MERGE)] == [again.id]
    assert json.loads((again.path / "merge.json").read_text()) == {"step": None}
    assert again.plan().argv[1:] == ("-m", "backend.export", ".")


@pytest.mark.parametrize("end", ["done", "failed", "stopped"])
def test_what_a_killed_export_leaves_is_deleted(run, monkeypatch, end):
    """The process itself cannot do that after SIGKILL."""
    monkeypatch.setattr(Run, "start", lambda self, timeouts: (self.path / LOCK).touch())
    monkeypatch.setattr(Supervisor, "_terminate", lambda self: ())
    job = merge.start(run, None)
    for folder in ("unchecked", "source", MODEL):
        (job.path / folder).mkdir()
    for file in ("batches.safetensors", "log.txt", *(["stop"] if end == "stopped" else [])):
        (job.path / file).write_text("discard")
    supervisor = Supervisor(job.path, False, StopTimeouts(), lock=-1)
    supervisor.state |= {"exit_code": 0 if end == "done" else -9, "started": 1.0, "files_before": {}}
    supervisor._end()
    left = {"unchecked", "source", MODEL, "batches.safetensors"} & {path.name for path in job.path.iterdir()}
    assert bool(left) == (end == "done") and (job.path / "log.txt").exists()
    assert job.state == end and merge.as_json(job)["sentence"].startswith(end.capitalize())
    if end == "done":  # a restart that fails would delete the model
        assert main(["resume", str(job.path), "--from-scratch"]) == 2


@pytest.mark.parametrize("kind", [jobs.MERGE, jobs.GGUF, jobs.PUBLISH])
def test_two_starts_at_once_create_one_job(run, monkeypatch, kind):
    """The second one waits for the first, and finds its job."""
    starts = {
        jobs.MERGE: lambda: merge.start(run, None),
        jobs.GGUF: lambda: gguf.start(run, None, "q8_0"),
        jobs.PUBLISH: lambda: publication.start(run, Request(folder="/out"), {}),
    }
    locks, create = [], jobs.create

    def create_slowly(*given, **options):
        time.sleep(0.2)  # long enough for the second start to look for a job
        return create(*given, **options)

    def start(_):
        try:
            return starts[kind]().id
        except RunError as error:
            return "being published" if "being published" in str(error) else repr(error)

    if kind == jobs.GGUF:
        finished_job(run)
        (run.path / SPEC).write_text(dump(RunSpec()))
    monkeypatch.setattr("backend.environments.is_complete", lambda name: True)
    monkeypatch.setattr(jobs, "create", create_slowly)
    monkeypatch.setattr(Run, "start", lambda self, timeouts=None: locks.append(processes.acquire_lock(self.path)))
    with ThreadPoolExecutor(2) as pool:
        answers = set(pool.map(start, range(2)))
    for lock in locks:
        processes.release(lock)
    (job,) = jobs.find_all(run, kind)
    assert answers == {job.id, *(["being published"] if kind == jobs.PUBLISH else [])}


def test_deleting_a_run_stops_its_jobs(run, monkeypatch):
    job = jobs.create(run, jobs.MERGE, {}, {}, {})
    (job.path / "plan.json").write_text(json.dumps({**json.loads((job.path / "plan.json").read_text()), "argv": SLEEP}))
    job.start()
    deadline = time.monotonic() + 60
    while not (launcher := json.loads((job.path / "state.json").read_text()).get("launcher")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.delete()
    assert not run.path.exists() and not processes.started(launcher)


def test_a_run_whose_job_does_not_stop_is_not_deleted(run, monkeypatch):
    job = finished_job(run)
    monkeypatch.setattr("backend.runs.folder.JOB_SECONDS", 0.1)
    lock = processes.acquire_lock(job.path)
    try:
        with pytest.raises(RunError, match="did not stop"):
            run.delete()
    finally:
        processes.release(lock)
    run.delete()
    assert not run.path.exists()


def test_other_runs_and_names_are_not_found(run):
    job = finished_job(run)
    assert jobs.find(run, job.id).path == job.path
    for name in ("", "..", "2026", f"{job.id}x", "../../r"):
        with pytest.raises(RunError):
            jobs.find(run, name)


def test_endpoints(run):
    job = finished_job(run)
    with client(run.path.parent) as web:
        shown = web.get(f"/api/runs/{run.id}").json()
        assert shown["merge"]["id"] == job.id and shown["merge"]["result"]["certificate"] == CERTIFICATE
        assert web.post(f"/api/runs/{run.id}/merges", json={}).json()["id"] == job.id
        response = web.get(f"/api/runs/{run.id}/merges/{job.id}/model.zip")
        assert response.status_code == 200 and f"{run.id}-merged.zip" in response.headers["content-disposition"]
        assert web.post(f"/api/runs/{run.id}/merges", json={"step": 7}).status_code in (409, 422)
        assert web.post(f"/api/runs/{run.id}/jobs/{job.id}/stop").json()["error"]
        for name in (run.id, "nothing", "..%2F.."):
            assert web.get(f"/api/runs/{run.id}/merges/{name}/model.zip").status_code == 404
        assert web.delete(f"/api/runs/{run.id}/jobs/{job.id}").status_code == 200
        assert not job.path.exists() and web.get(f"/api/runs/{run.id}").json()["merge"] is None


def test_endpoints_accept_only_jobs_of_their_kind(run):
    job = finished_job(run)
    with client(run.path.parent) as web:
        for kind in ("gguf", "publications", "evaluations"):
            place = f"/api/runs/{run.id}/{kind}/{job.id}"
            assert web.delete(place).status_code == web.post(f"{place}/stop", json={}).status_code == 404
        for path in ("gguf", "evaluations"):
            file = "files/certificate.json" if path == "gguf" else "examples.json"
            assert web.get(f"/api/runs/{run.id}/{path}/{job.id}/{file}").status_code == 404
    assert job.path.exists()


def test_no_merge_of_full_weights(tmp_path):
    run = Run.create(tmp_path, "r", Plan(("true",)), datetime.now())
    plant_model(run, "config.json", {"architectures": ["LlamaForCausalLM"]})
    assert trained.find(run)
    for use in (merge.start, merge.find_merged):
        with pytest.raises(RunError, match="has full weights: there is no adapter to merge"):
            use(run, None)


def test_the_merge_of_an_adapter(run, capsys):
    command = ["publish", "--runs", str(run.path.parent), run.id, "--folder", "/nowhere", "--merged"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"The final model of {run.id} is an adapter that is not merged" in error
    assert f"`footplate merge {run.id}`" in error
    assert main([*command, "--step", "7"]) == 2
    assert f"{run.id} has no weights of checkpoint 7 that can be loaded" in capsys.readouterr().err
    job = finished_job(run)
    assert merge.find_merged(run, None).id == job.id
    (job.path / RESULT).unlink()
    lock = processes.acquire_lock(job.path)
    with pytest.raises(RunError, match=r"The final model of .* is being merged"):
        merge.find_merged(run, None)
    processes.release(lock)
