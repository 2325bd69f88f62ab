"""The cached list of all runs: what it notices, what it sends, and its index on disk."""

import itertools
import json
import os
import shutil
import threading
import time
from dataclasses import asdict
from datetime import datetime, timedelta

import pytest
from planted_runs import plant_run
from small import client

from backend.__main__ import main
from backend.machine import Machine
from backend.runs import (
    ANNOTATIONS,
    LOCK,
    METRICS,
    PLAN,
    PROGRESS,
    RESULT,
    STATE,
    SWEEP,
    listing,
    notebook,
    processes,
    queue,
    sweeps,
)  # fmt: skip
from backend.runs.folder import Run
from backend.runs.listing import INDEX, RunList, row

ABOUT = {
    "model": "tiny-llama",
    "method": "LoRA",
    "dataset": "trains",
    "stage": "dpo",
    "strategy": "zero3",
    "learning_rate": 1e-4,
}
RESULTS = {
    "eval_loss": 1.5,
    "seconds": 10,
    "tokens": 2000,
    "tokens_per_second": 200,
    "peak_bytes": [2**30, 3 * 2**30],
    "rouge_l_after": 0.5,
}


SECONDS = itertools.count()


def make(root, name="a", end="done"):
    """A run as it looks after training, one second later than the last one."""
    created = datetime(2026, 11, 22) + timedelta(seconds=next(SECONDS))
    state = {"started": 1.0, "ended": 61.0, "end": end}
    points = [{"step": 5, "loss": 2.5, "tokens_per_second": 7, "eval_loss": 3}]
    contents = {LOCK: "supervisor", STATE: state, METRICS: points}
    return plant_run(root, name, contents, created=created, about=ABOUT)


class Counting:
    """`row`, which counts the runs that were read."""

    def __init__(self):
        self.ids = []

    def __call__(self, run):
        self.ids.append(run.id)
        return row(run)


@pytest.fixture
def counting():
    return Counting()


def test_a_row_has_a_value_for_each_column(tmp_path):
    run = make(tmp_path, "first run")
    notebook.change(run.path, ["paper"], notes="note", starred=True)
    (run.path / RESULT).write_text(json.dumps(RESULTS))
    found = row(run)
    assert found.items() >= ABOUT.items()
    assert (found["eval_loss"], found["loss"], found["rouge_l"], found["bleu"]) == (1.5, 2.5, 0.5, None)
    assert (found["tokens_per_second"], found["peak_memory"]) == (200, 3 * 2**30)
    assert (found["tags"], found["notes"], found["starred"], found["archived"]) == (["paper"], "note", True, False)
    (run.path / RESULT).unlink()
    assert row(run)["eval_loss"] == 3 and row(run)["tokens_per_second"] == 7  # from the metrics
    failed = make(tmp_path, "failed", "failed")
    (failed.path / "error.json").write_text("{}")
    assert row(failed)["failure"] and row(failed)["failure"] in row(failed)["sentence"]


def test_a_resumed_run_has_the_validation_loss_of_its_own_steps(tmp_path):
    run = make(tmp_path)
    lines = [{"step": 5, "eval_loss": 4.0}, {"step": 10, "eval_loss": 3.0}, {"event": "resumed", "step": 7}]
    lines += [{"step": step, "loss": 1.0, "padding": "x" * 99} for step in range(8, 99)]
    (run.path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert row(run)["eval_loss"] == 4.0


CHANGES = {
    "state": lambda run: (run.path / STATE).write_text('{"started": 1.0, "ended": 61.0, "end": "failed"}'),
    "result": lambda run: (run.path / RESULT).write_text(json.dumps(RESULTS)),
    "tags": lambda run: notebook.change(run.path, ["new"]),
    "damaged plan": lambda run: (run.path / PLAN).write_text('{"about": 5}'),
    "damaged metrics": lambda run: ((run.path / METRICS).unlink(), (run.path / METRICS).mkdir()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_changed_is_read_and_sent(tmp_path, counting, change):
    runs = [make(tmp_path, name) for name in "abc"]
    listed = RunList(tmp_path, counting)
    first = listed.since("")
    assert first.complete and [found["id"] for found in first.rows] == [run.id for run in reversed(runs)]
    counting.ids.clear()
    same = listed.since(first.tag)
    assert (same.tag, same.rows, same.removed, same.complete, counting.ids) == (first.tag, [], [], False, [])
    CHANGES[change](runs[1])
    changed = listed.since(first.tag)
    assert changed.tag != first.tag and not changed.complete and counting.ids == [runs[1].id]
    assert changed.rows == [row(runs[1])] and changed.rows[0] != first.rows[1]
    if change.startswith("damaged"):
        assert changed.rows[0]["state"] == "damaged" and changed.rows[0]["failure"].startswith("Damaged: ")
        CHANGES["tags"](runs[1])  # a damaged run is read at each scan, so that a repair is noticed
    assert listed.since(changed.tag).rows == ([row(runs[1])] if change.startswith("damaged") else [])


def test_added_and_deleted_runs_are_noticed(tmp_path):
    kept, deleted = make(tmp_path, "kept"), make(tmp_path, "deleted")
    listed = RunList(tmp_path)
    tags = [listed.since("").tag]
    deleted.delete()
    gone = listed.since(tags[0])
    assert (gone.rows, gone.removed) == ([], [deleted.id])
    added = make(tmp_path, "added")
    changes = listed.since(gone.tag)
    assert [found["id"] for found in changes.rows] == [added.id] and not changes.removed
    both = listed.since(tags[0])
    assert [found["id"] for found in both.rows] == [added.id] and both.removed == [deleted.id]
    assert {found["id"] for found in listed.all()} == {kept.id, added.id}
    assert listed.since("unknown.1").complete and listed.since("junk").complete


def test_a_live_run_is_read_at_each_scan_and_a_waiting_one_is_not(tmp_path, counting):
    runs = [make(tmp_path, "running"), make(tmp_path, "waiting")]
    (runs[0].path / PROGRESS).write_text('{"phase": "training", "step": 1, "max_steps": 9}')
    (runs[1].path / STATE).write_text('{"queued": 1.0, "waiting": "2 runs are ahead of this run."}')
    locks = [listing.processes.acquire_lock(run.path) for run in runs]
    try:
        listed = RunList(tmp_path, counting)
        assert [found["state"] for found in listed.all()] == ["queued", "running"]
        counting.ids.clear()
        assert len(listed.all()) == 2 and counting.ids == [runs[0].id]
        os.close(locks.pop())  # the supervisor of the waiting run is killed
        assert [found["state"] for found in listed.all()] == ["lost", "running"]
    finally:
        for lock in locks:
            os.close(lock)


def test_a_new_process_reads_only_what_changed(tmp_path, counting, monkeypatch):
    monkeypatch.setattr(listing, "INDEX_AFTER", 3)
    runs = [make(tmp_path, name) for name in "abc"]
    rows = RunList(tmp_path).all()
    assert (tmp_path / INDEX).stat().st_mode & 0o777 == 0o600
    assert RunList(tmp_path, counting).all() == rows and counting.ids == []
    CHANGES["state"](runs[1])
    runs[2].delete()
    listed = RunList(tmp_path, counting)
    first = listed.since("")
    assert first.complete and [found["state"] for found in first.rows] == ["failed", "done"]
    assert counting.ids == [runs[1].id]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\xff",
        '{"code": 1, "runs": {}}',
        '{"code": "CODE", "runs": {"a": []}}',
        '{"runs": [[1]]}',
        "[" * 9999,
    ],
)
def test_a_damaged_index_is_ignored(tmp_path, text):
    run = make(tmp_path)
    (tmp_path / INDEX).write_text(text.replace("CODE", listing._code()), encoding="latin-1")
    assert [found["id"] for found in RunList(tmp_path).all()] == [run.id]


def test_an_index_of_other_code_or_another_user_is_ignored(tmp_path, counting, monkeypatch):
    monkeypatch.setattr(listing, "INDEX_AFTER", 1)
    make(tmp_path)
    RunList(tmp_path).all()
    with monkeypatch.context() as patched:
        patched.setattr(listing, "_code", lambda: "another version")
        assert len(RunList(tmp_path, counting).all()) == 1 and len(counting.ids) == 1
    RunList(tmp_path).all()
    with monkeypatch.context() as patched:
        patched.setattr(listing.ownership, "own_uid", lambda _: os.getuid() + 1)
        assert [found["state"] for found in RunList(tmp_path, counting).all()] == ["damaged"]


def test_clients_that_wait_share_one_scan(tmp_path, counting, monkeypatch):
    monkeypatch.setattr(listing, "SHORT_SECONDS", 60)
    make(tmp_path)
    listed, arrived = RunList(tmp_path, counting), threading.Barrier(9)
    scan = listed._scan

    def slow_scan():
        scans.append(1)
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass
        scan()

    def ask():
        arrived.wait()
        assert len(listed.all()) == 1

    scans = []
    listed._scan = slow_scan
    clients = [threading.Thread(target=ask) for _ in range(9)]
    for waiting in clients:
        waiting.start()
    for waiting in clients:
        waiting.join()
    assert 1 <= (shared := len(scans)) <= 2  # those that came during the first scan may share a second one
    monkeypatch.undo()
    assert len(listed.all()) == 1 and len(scans) == shared + 1
    assert len(listed.all()) == 1 and len(scans) == shared + 1  # the pause after a long scan
    listed.expire()
    assert len(listed.all()) == 1 and len(scans) == shared + 2


# -- annotations -------------------------------------------------------------------------------------------------------


def test_annotations_are_kept_in_the_run_folder(tmp_path):
    run = make(tmp_path)
    assert notebook.read(run.path) == notebook.Annotations()
    notebook.change(run.path, ["paper", "a/b-1"], starred=True)
    kept = notebook.change(run.path, ["x"], ["paper", "unknown"], notes="Two\nlines")
    assert kept == notebook.read(run.path) == notebook.Annotations(("a/b-1", "x"), "Two\nlines", True, False)
    assert (run.path / ANNOTATIONS).stat().st_mode & 0o777 == 0o600
    before = (run.path / ANNOTATIONS).stat()
    notebook.change(run.path, ["x"])
    assert (run.path / ANNOTATIONS).stat() == before, "an unchanged file was written"
    for wrong in (["two words"], ["a:b"], ["-x"], ["x" * 41], [""], [str(i) for i in range(30)]):
        with pytest.raises(notebook.AnnotationError):
            notebook.change(run.path, wrong)
    with pytest.raises(notebook.AnnotationError, match=r"4,000 characters"):
        notebook.change(run.path, notes="x" * 4001)
    for wrong in ("x" * 81, "two\nlines", " x"):
        with pytest.raises(notebook.AnnotationError, match="one line"):
            notebook.change(run.path, name=wrong)
    assert notebook.read(run.path) == kept


def test_a_renamed_run_keeps_its_id(tmp_path):
    run = make(tmp_path)
    before, listed = run.name, RunList(tmp_path)
    assert [found["name"] for found in listed.all()] == [before]
    assert "name" not in notebook.change(run.path, ["x"]).as_json()
    notebook.change(run.path, name="The best one")
    assert [(found["name"], found["id"]) for found in listed.all()] == [("The best one", run.id)]
    assert Run(run.path).summary()["name"] == "The best one"
    notebook.change(run.path, name="")
    assert Run(run.path).name == before


@pytest.mark.parametrize("text", ["[]", "{", '{"tags": 5}', '{"tags": [1, "ok", "a b"], "notes": 3, "starred": "yes"}'])
def test_damaged_annotations_hide_no_run(tmp_path, text):
    run = make(tmp_path)
    (run.path / ANNOTATIONS).write_text(text)
    [found] = RunList(tmp_path).all()
    assert found["state"] == "done" and found["notes"] == "" and found["tags"] in ([], ["ok"])
    assert notebook.change(run.path, ["new"]).tags[0] == "new"


def test_changes_at_the_same_time_lose_nothing(tmp_path):
    run = make(tmp_path)
    threads = [threading.Thread(target=notebook.change, args=(run.path, [f"tag{i}"])) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(notebook.read(run.path).tags) == 12


# -- page and command line ---------------------------------------------------------------------------------------------


def test_api_sends_changes_and_changes_several_runs(tmp_path):
    runs = [make(tmp_path / "runs", name) for name in "abc"]
    with client(tmp_path / "runs", detect_machine=lambda _: Machine()) as api:
        first = api.get("/api/runs").json()
        assert first["complete"] and {"key", "label", "kind", "names", "scale", "unit"} == first["columns"][0].keys()
        assert "bleu" not in first["runs"][0] and first["runs"][0]["step"] == 5  # without blanks
        assert api.get("/api/runs", params={"have": first["etag"]}).status_code == 204
        ids = [runs[0].id, runs[2].id, "unknown"]
        found = api.post("/api/runs/annotations", json={"ids": ids, "add_tags": ["paper"], "archived": True}).json()
        assert found["done"] == ids[:2] and found["problems"][0]["id"] == "unknown"
        changed = api.get("/api/runs", params={"have": first["etag"]}).json()
        assert [found["id"] for found in changed["runs"]] == [runs[2].id, runs[0].id]
        assert not changed["complete"] and "columns" not in changed
        assert all(found["tags"] == ["paper"] and found["archived"] for found in changed["runs"])
        wrong = api.post("/api/runs/annotations", json={"ids": ids, "add_tags": ["a b"]})
        assert wrong.status_code == 422 and "is not a tag" in wrong.json()["error"]
        assert api.post("/api/runs/annotations", json={"ids": []}).status_code == 400
        lock = listing.processes.acquire_lock(runs[1].path)
        try:
            deleted = api.post("/api/runs/delete", json={"ids": [run.id for run in runs]}).json()
        finally:
            os.close(lock)
        assert deleted["done"] == [runs[0].id, runs[2].id]
        assert deleted["problems"] == [
            {"id": runs[1].id, "sentence": "The run is still running or waiting. Stop it before you delete it."}
        ]
        after = api.get("/api/runs", params={"have": changed["etag"]}).json()
        assert set(after["removed"]) == set(deleted["done"])
        refused = api.post("/api/runs/delete", json={"ids": ["../x"]})
        assert refused.status_code == 409 and "There is no run" in refused.json()["error"]


def test_runs_that_need_a_deleted_one_are_named(tmp_path):
    """A model, an adapter or a checkpoint of it, also where another run's ID begins with its ID."""
    root = tmp_path / "runs"
    base, other, adapter, resumed, longer = (make(root, name) for name in "abcde")
    for run, key, folder in (
        (adapter, "lora: {adapter_path: ", base.path / "model"),
        (resumed, "save: {resume_path: ", base.path / "checkpoints/checkpoint-3"),
        (longer, "model: {path: ", f"{base.path}0/model"),
    ):
        (run.path / "spec.yaml").write_text(f"{key}{folder}}}\n")
    with client(root, detect_machine=lambda _: Machine()) as api:

        def needed_by(*runs):
            return api.post("/api/runs/dependents", json={"ids": [run.id for run in runs]}).json()["names"]

        assert needed_by(base, other) == [resumed.name, adapter.name]
        assert needed_by(base, adapter) == [resumed.name]
        assert needed_by(other) == []


def test_the_command_line_searches_sorts_and_shows_columns(tmp_path, capsys):
    def printed(*words, code=0):
        assert main(["list", "--runs", str(tmp_path), *words]) == code
        found = capsys.readouterr()
        return found.err if code else found.out

    assert printed().startswith("No runs in ")
    good, bad, old = make(tmp_path, "good"), make(tmp_path, "bad", "failed"), make(tmp_path, "old")
    notebook.change(good.path, ["paper"], notes="a\nb")
    notebook.change(old.path, archived=True)
    (good.path / RESULT).write_text(json.dumps(RESULTS))
    assert [line.split()[0] for line in printed().splitlines()] == [bad.id, good.id]
    assert printed("--search", "tag:paper").split()[0] == good.id
    assert printed("--search", "archived:yes").split()[0] == old.id
    assert printed("--search", "nothing") == "No run matches. Archived runs match only with archived:yes.\n"
    lines = printed("--columns", "eval_loss,memory,lr,duration,notes", "--sort", "eval_loss").splitlines()
    assert lines[0].split() == ["id", "eval_loss", "peak_memory", "learning_rate", "duration", "notes"]
    assert lines[1].split() == [good.id, "1.5", "3", "GiB", "0.0001", "1", "min", "a", "b"]
    assert lines[2].split() == [bad.id, "3", "-", "0.0001", "1", "min", "-"]
    assert printed("--sort", "eval_loss", "--reverse").split()[0] == bad.id
    assert json.loads(printed("--json", "--columns", "tags", "--search", "tag:paper")) == [
        {"id": good.id, "tags": ["paper"]}
    ]
    assert json.loads(printed("--json"))[1]["eval_loss"] == 1.5
    assert "There is no column color." in printed("--search", "color:red", code=2)
    assert "There is no column color. Columns: name," in printed("--sort", "color", code=2)
    assert printed("--columns", "loss, step") == printed("--columns", "loss,step")
    changes = ("--tag", "x", "--untag", "paper", "--star", "--notes", "new", "--archive")
    assert main(["annotate", good.id, "--runs", str(tmp_path), *changes]) == 0
    assert capsys.readouterr().out == f"{good.id}  tag:x  starred  archived  new\n"
    assert main(["annotate", good.id, "--runs", str(tmp_path), "--tag", "a b"]) == 2
    assert "is not a tag" in capsys.readouterr().err
    assert main(["annotate", good.id, bad.id, "--runs", str(tmp_path), "--restore", "--json"]) == 0
    assert [found["archived"] for found in json.loads(capsys.readouterr().out)] == [False, False]
    assert "--sweep has its own columns" in printed("--sweep", "x", "--search", "y", code=2)


def test_a_renamed_run_of_a_sweep_is_listed_by_its_name(tmp_path):
    run = make(tmp_path)
    (run.path / SWEEP).write_text(sweeps.Member("s", {"train.learning_rate": 10.0, "lora.r": 8}, 0).to_json())
    assert row(run)["varied"] == "learning_rate=10 r=8"
    notebook.change(run.path, name="best so far")
    assert (row(run)["varied"], row(run)["name"]) == ("", "best so far")


def test_show_prints_skipped_optimizer_steps_and_scores_in_percent_as_the_list_does(tmp_path, capsys):
    run = make(tmp_path)
    (run.path / RESULT).write_text(json.dumps({"train_loss": 2.5, "skipped_steps": 3, "bleu_after": 0.29}))
    assert main(["show", run.id, "--runs", str(tmp_path)]) == 0
    assert {"skipped steps: 3", "bleu after: 29%"} <= set(capsys.readouterr().out.splitlines())
    assert main(["list", "--runs", str(tmp_path), "--columns", "bleu,loss"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "29%"


def test_a_waiting_run_names_other_runs_as_people_see_them(tmp_path):
    """An id stays where two runs have the same name; the command line shows ids."""
    first, twin, _, waiting = (make(tmp_path, name) for name in ("first", "twin", "twin", "waiting"))
    folder = tmp_path / ".rehearsals/20261128183714"
    cases = {
        f"{first.id} uses the CPU.": "first uses the CPU.",
        f"{first.id} in the runs folder {tmp_path} uses the CPU.": "first uses the CPU.",
        f"{twin.id} is ahead of this run.": f"{twin.id} is ahead of this run.",
        f"{waiting.id}-9 must end first.": f"{waiting.id}-9 must end first.",
        f"2026-11-28_183714_a-lora in the runs folder {folder} uses the CPU.": "A rehearsal uses the CPU.",
        f"2026-11-28_183714_evaluation in the runs folder {first.path}/jobs uses the CPU.": (
            "The job evaluation of first uses the CPU."
        ),
        f"2026-11-28_183714_trial in the runs folder {tmp_path}/.tunings/20261128183714 uses the CPU.": (
            "A measurement of the fastest settings uses the CPU."
        ),
    }
    lock = listing.processes.acquire_lock(waiting.path)
    try:
        with client(tmp_path, detect_machine=lambda _: Machine()) as api:
            for reason, shown in cases.items():
                (waiting.path / STATE).write_text(json.dumps({"queued": 1.0, "waiting": reason}))
                found = api.get(f"/api/runs/{waiting.id}").json()
                assert found["summary"]["sentence"] == f"Waiting in the queue. {shown}"
                assert found["queue"]["reason"] == shown and waiting.waiting()["reason"] == reason
    finally:
        os.close(lock)


def test_a_waiting_run_moves_before_one_that_is_not_in_the_list(tmp_path, monkeypatch):
    """The page shows jobs and the runs of other folders in the queue, too."""
    monkeypatch.setenv(queue.FOLDER, str(tmp_path / "queue"))
    own, last = [make(tmp_path / "runs", name) for name in ("own", "last")]
    others = [make(tmp_path / "elsewhere", name) for name in ("first", "second")]
    runs = [own.path, others[0].path, others[1].path, last.path]
    mine = {"pid": os.getpid(), "started": processes.started(os.getpid())}
    order = [asdict(queue.Entry(str(path), {"cpu": "the CPU"}, **mine)) for path in runs]
    (queue.folder() / queue.ORDER).write_text(json.dumps(order))
    with client(tmp_path / "runs", detect_machine=lambda _: Machine()) as api:
        found = api.post(f"/api/runs/{own.id}/queue", json={"before": others[1].id})
        expected = [others[0].id, own.id, others[1].id, last.id]
        assert [each["id"] for each in found.json()["queue"]] == expected
        gone = api.post(f"/api/runs/{own.id}/queue", json={"before": "gone"})
        twin = tmp_path / "elsewhere" / last.id
        shutil.copytree(last.path, twin)
        (queue.folder() / queue.ORDER).write_text(json.dumps([*order[:3], {**order[3], "run": str(twin)}, order[3]]))
        for before, expected in ((last.id, [twin, own.path, last.path]), (str(twin), [own.path, twin, last.path])):
            found = api.post(f"/api/runs/{own.id}/queue", json={"before": before}).json()["queue"]
            assert [each["place"] for each in found[-3:]] == list(map(str, expected))
    assert gone.status_code == 404 and gone.json()["error"] == "gone no longer waits in the queue."
