"""The API as the page uses it, and its responses to invalid requests."""

import csv
import fcntl
import io
import json
import math
import os
import time
from datetime import datetime
from html import escape
from pathlib import Path

import orjson
import pytest
from small import client
from waiting import wait_for

from backend.config.options import by_name, options
from backend.inspect import data_files
from backend.machine import GIB, Gpu, Machine
from backend.rules import OUTDATED, RULES, example_findings
from backend.runs import LOG, METRICS, PLAN, RESULT, SPEC, Plan, generations, processes
from backend.runs.folder import ALIVE, Run
from backend.runs.listing import RunList
from webui.api import requests
from webui.api.app_state import IdempotencyKeys
from webui.api.requests import ApiError
from webui.api.runs import INSPECTION_SECONDS
from webui.drafts import Drafts

VALUES = {"model.builtin": "tiny-llama", "launch.launcher": "python", "logging.run_name": "From a test"}
SLEEPER = "#!/bin/sh\necho sleeping\nexec sleep 600\n"


@pytest.fixture(scope="module")
def app_folder(tmp_path_factory):
    """A folder for runs, and a fake Python that only sleeps, so that no run trains."""
    folder = tmp_path_factory.mktemp("app")
    (folder / "python").write_text(SLEEPER)
    (folder / "python").chmod(0o755)
    (folder / "runs").mkdir()
    return folder


def app(app_folder):
    machine = Machine(python=str(app_folder / "python"))
    return client(app_folder / "runs", detect_machine=lambda _: machine)


@pytest.fixture(scope="module")
def api(app_folder):
    with app(app_folder) as response_body:
        yield response_body
    for run in (app_folder / "runs").glob("2*"):
        processes.terminate(run)
        assert not processes.run_processes(run)


@pytest.fixture
def run(app_folder):
    """A run that was created but never started, with a spec and a log."""
    new_run = Run.create(
        app_folder / "runs", "made", Plan(("true",), {"A": "1"}, {SPEC: "train:\n  max_steps: 7\n"}), datetime.now()
    )
    (new_run.path / LOG).write_text("".join(f"line {i}\n" for i in range(1000)))
    yield new_run
    if new_run.path.exists():
        new_run.delete()


def check(api, values, **options):
    response = api.post("/api/check", json={"values": values, "seq": 1, **options})
    assert response.status_code == 200, response.text
    return response.json()


# -- Build view ----------------------------------------------------------------------------------------------


def test_check_report_is_complete(api, monkeypatch):
    monkeypatch.setattr(data_files, "MAX_SECONDS", 60)  # a loaded machine reads fewer examples in 0.2 s
    monkeypatch.setattr(data_files, "_CACHE", {})
    report = check(api, VALUES)
    assert report["seq"] == 1 and report["title"] == "From a test" and report["invalid"] == []
    assert report["status"]["level"] in ("ok", "warning") and report["status"]["text"].startswith("Can run")
    assert "backend.train" in report["preview"]["command"] and report["preview"]["files"][0]["name"] == SPEC
    assert all(file["about"] for file in report["preview"]["files"])
    assert report["preview"]["script"] and report["preview"]["env"] and report["preview"]["others"] == []
    assert report["memory"]["device_bytes"] > 0 and report["memory"]["rows"][0]["formula"]
    assert report["memory"]["device_label"]
    assert report["time"]["unknown"] and report["time"]["texts"]["summary"].startswith("The time is not predicted")
    read = report["examples"]
    assert read == {**read, "checked": read["total"], "pending": False, "note": ""} and read["total"] > 100
    assert read["text"] == f"all {read['total']} examples read" and report["pending"] is False


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({"launch.devices": "1"}, "Tesla T4"),
        ({"parallel.strategy": "ddp", "launch.nproc_per_node": 2}, "H100, Tesla T4"),
        ({"launch.device": "cpu"}, "CPU"),
    ],
)
def test_memory_names_the_devices_that_the_run_uses(tmp_path, values, label):
    gpus = tuple(Gpu(i, name, 80 * GIB, 80 * GIB, (9, 0)) for i, name in enumerate(("H100", "Tesla T4")))
    machine = Machine(device="cuda", gpus=gpus)
    with client(tmp_path, detect_machine=lambda _: machine) as api:
        assert check(api, {**VALUES, **values})["memory"]["device_label"] == label


def test_check_without_values_uses_the_defaults(api):
    assert check(api, {})["preview"]["command"] == check(api, values_of_defaults())["preview"]["command"]


def values_of_defaults():
    return {option.name: option.default for option in options()}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.learning_rate", "quick"),
        ("train.learning_rate", None),
        ("train.per_device_train_batch_size", 0),
        ("train.per_device_train_batch_size", 2.5),
        ("train.optim", "no such"),
        ("model.trust_remote_code", [1]),
        ("launch.env", "no equals sign"),
        ("launch.devices", "-1"),
        ("train.no_such", 1),
        ("nothing", {"a": 1}),
        ("", 1),
    ],
)
def test_an_invalid_value_is_named_and_the_rest_is_checked(api, name, value):
    shown = {"model.source": "path"} if name == "model.trust_remote_code" else {}
    report = check(api, {**VALUES, **shown, name: value})
    assert [p["field"] for p in report["invalid"]] == [name] and report["invalid"][0]["message"]
    assert report["status"]["level"] == "invalid"
    assert report["preview"]["command"] and report["memory"] and report["title"] == "From a test"


def test_several_invalid_values_are_all_named(api):
    wrong = {"train.learning_rate": "x", "train.per_device_train_batch_size": -1, "train.no_such": 1, "what": 2}
    report = check(api, {**VALUES, **wrong})
    assert {p["field"] for p in report["invalid"]} == set(wrong)
    assert "4 invalid values" in report["status"]["text"]


def test_an_invalid_value_in_a_hidden_field_is_ignored(api):
    assert check(api, {**VALUES, "train.duration": "epochs", "train.max_steps": None})["invalid"] == []
    assert check(api, {**VALUES, "train.duration": "steps", "train.max_steps": None})["invalid"]


def test_findings_come_with_fixes_that_fit_the_form(api):
    report = check(api, {**VALUES, "parallel.strategy": "ddp", "launch.nproc_per_node": 2, "launch.launcher": "python"})
    errors = [f for f in report["findings"] if f["level"] == "error"]
    assert errors and report["status"]["level"] == "error"
    fixes = [fix for finding in errors for fix in finding["fixes"]]
    assert fixes
    for fix in fixes:
        assert fix["label"] and fix["safe"] in (True, False)
        for part in fix["diff"]:
            assert part["name"] in fix["patch"] and part["label"] == by_name()[part["name"]].label
        assert not check(api, {**VALUES, **fix["patch"]})["invalid"]


def test_all_safe_fixes_are_one_patch(api):
    """Applied together they leave the errors without a safe fix; a spec that can run stays unchanged."""
    wrong = {**VALUES, "parallel.strategy": "zero3", "save.merge_adapter": True, "precision.compute": "fp16"}
    response_body = api.post("/api/fix", json={"values": wrong}).json()
    assert (
        response_body["patch"] == {"launch.launcher": "torchrun", "save.merge_adapter": False}
        and response_body["count"] == 2
    )
    assert [part["name"] for part in response_body["diff"]] == ["save.merge_adapter", "launch.launcher"]
    assert response_body["remaining"] == ["fp16 training is not supported on a CPU"]
    remaining = [
        f["title"] for f in check(api, {**wrong, **response_body["patch"]})["findings"] if f["level"] == "error"
    ]
    assert remaining == response_body["remaining"]
    nothing = api.post("/api/fix", json={"values": VALUES, "machine": "8x80gb"}).json()
    assert (nothing["patch"], nothing["diff"], nothing["count"], nothing["remaining"]) == ({}, [], 0, [])
    assert api.post("/api/fix", json={"values": VALUES, "machine": "9x9gb"}).status_code == 404


def test_presets_import_export(api):
    response_body = api.get("/api/presets").json()
    assert response_body and {"name", "title", "about", "machine"} == set(response_body[0])
    values = api.get(f"/api/presets/{response_body[0]['name']}").json()["values"]
    assert set(values) == {option.name for option in options()}
    yaml = api.post("/api/export", json={"values": values}).json()["yaml"]
    imported = api.post("/api/import", json={"yaml": yaml}).json()
    assert (imported["values"], imported["missing"]) == (values, [])
    hidden = api.post("/api/import", json={"yaml": "train: {max_steps: 5}\n"}).json()["missing"]
    assert hidden == ["train.max_steps has no effect: it is used only if train.duration is steps."]
    hub = {"data.source": "hub", "data.hub_id": "a/b"}
    others = [{"source": "hub", "hub_id": "c/d"}, {"source": "files", "files": ["/data/a.jsonl"]}]
    for given, has_paths in (({}, False), (hub, False), ({"lora.adapter_path": "/data/adapter"}, True)):
        assert api.post("/api/export", json={"values": {**values, **given}}).json()["has_paths"] is has_paths
    nvme = {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/nvme"}
    exported = api.post("/api/export", json={"values": {**values, **nvme}}).json()
    assert (exported["has_paths"], exported["folders"]) == (False, ["parallel.nvme_path"])
    two = {"values": {**values, **hub, "data.sources": json.dumps([{}, *others])}}
    assert api.post("/api/export", json=two).json()["has_paths"], "the files of another dataset"
    for name in ("no-such", "..%2f..%2fpyproject", "%00"):
        assert api.get(f"/api/presets/{name}").status_code == 404


@pytest.mark.parametrize(
    "values",
    [
        {"data.source": "files", "data.files": "{file}"},
        {"data.source": "files", "data.validation": "files", "data.validation_files": "{file}"},
        {"data.chat_template": "file", "data.chat_template_file": "{file}"},
        {"model.source": "path", "model.path": "{file}"},
        {"model.source": "path", "model.path": "{folder}"},
        {"save.resume_from": "path", "save.resume_path": "{file}"},
        {"save.resume_from": "path", "save.resume_path": "{folder}"},
    ],
)
def test_no_content_of_an_unrelated_file_is_shown(api, tmp_path, values):
    """A path such as /etc/shadow in the wrong field, or a link to it in a folder."""
    file = tmp_path / "shadow"
    file.write_text("root:$6$the-secret:20000:0:99999:7:::\n")
    for name in ("config.json", "tokenizer_config.json", "adapter_config.json", "trainer_state.json"):
        (tmp_path / name).symlink_to(file)
    values = {name: value.format(file=file, folder=tmp_path) for name, value in values.items()}
    response = api.post("/api/check", json={"values": values, "draft": "", "seq": 1})
    assert response.json()["status"]["level"] == "error" and str(tmp_path) in response.text
    assert "the-secret" not in response.text


@pytest.mark.parametrize(
    ("yaml", "part"),
    [
        ("a: [", "line 1"),
        ("- 1", "sections"),
        ("train: 3", "train"),
        ("train: {speed: 3}", "train.speed"),
        ("train: {per_device_train_batch_size: many}", "train.per_device_train_batch_size: must be an integer"),
        ("\x00", "YAML"),
    ],
)
def test_invalid_yaml_error(api, yaml, part):
    response = api.post("/api/import", json={"yaml": yaml})
    assert response.status_code == 422 and part in response.json()["error"]


def test_export_names_the_invalid_option(api):
    response = api.post("/api/export", json={"values": {"train.per_device_train_batch_size": "x"}})
    assert response.status_code == 422 and response.json()["field"] == "train.per_device_train_batch_size"


def test_machines(api):
    here, *others = api.get("/api/machines").json()
    assert here["name"] == "" and "no GPU" in here["label"]
    assert {"1x24gb", "8x80gb", "2x8x80gb"} <= {machine["name"] for machine in others}
    wanted = {preset["name"]: preset["machine"] for preset in api.get("/api/presets").json()}
    assert wanted["first-run"] == "" and wanted["two-nodes"] == "2x8x80gb"


def test_a_run_can_be_checked_for_another_machine(api):
    eight = {**VALUES, "parallel.strategy": "fsdp2", "launch.nproc_per_node": 8, "launch.launcher": "torchrun"}
    body = {"values": eight, "draft": "", "seq": 1}
    here, there = (api.post("/api/check", json={**body, "machine": name}).json() for name in ("", "8x80gb"))
    assert (here["place"], there["place"]) == ("", "eight 80 GB GPUs")
    nodes = {"launch.rendezvous": "static", "launch.nnodes": 2}
    two = api.post("/api/check", json={**body, "values": {**eight, **nodes}, "machine": "8x80gb"}).json()
    assert two["place"] == "2 nodes like eight 80 GB GPUs"
    assert there["memory"]["capacity_bytes"] == 80 * 2**30 and here["memory"]["capacity_bytes"] != 80 * 2**30
    assert ["CUDA_VISIBLE_DEVICES" in report["preview"]["command"] for report in (here, there)] == [False, True]
    response = api.post("/api/check", json={**body, "machine": "9x9gb"})
    assert response.status_code == 404 and "8x80gb" in response.json()["error"]


def test_rules_page(api):
    page = api.get("/rules")
    assert page.headers["content-type"].startswith("text/html")
    assert page.text.count("<article") == len(RULES) + len(OUTDATED) and "footplate/page.css" in page.text
    for rule in RULES:
        assert f"{rule.code} {rule.slug}</a>" in page.text
        assert escape(example_findings()[rule.code].message) in page.text
    assert "PiSSA with ZeRO-3" in page.text and '<b class="safe">safe</b>' in page.text
    assert not [name for name in ("rules", "count", "families", "levels", "outdated") if f"{{{name}}}" in page.text]


# -- drafts ------------------------------------------------------------------------------------------------------


def test_drafts_survive_a_restart(app_folder, api):
    typed = {**VALUES, "train.learning_rate": "2e-"}
    check(api, typed, draft="d1")
    with app(app_folder) as second_app:
        assert second_app.get("/api/drafts/d1").json()["values"] == typed
    check(api, VALUES, draft="d1")
    assert api.get("/api/drafts/d1").json()["values"] == VALUES
    assert api.get("/api/drafts/d2").status_code == 404


@pytest.mark.parametrize("name", ["..", "../x", "a/b", ".hidden", "a" * 65, "a\x00b", "\u00e9"])
def test_draft_names_stay_in_their_folder(app_folder, api, name):
    response = api.post("/api/check", json={"values": {}, "draft": name})
    assert response.status_code == 400 and "draft" in response.json()["error"]
    assert not list(app_folder.glob("**/x*"))


def test_requests_that_arrive_late_do_not_replace_a_newer_draft(api):
    newer, older = {**VALUES, "train.seed": 2}, {**VALUES, "train.seed": 1}
    api.post("/api/drafts/d1", json={"values": newer, "page": "p", "edit": 2})
    check(api, older, draft="d1", page="p", edit=1)
    assert api.get("/api/drafts/d1").json()["values"] == newer
    check(api, older, draft="d1", page="after a reload", edit=1)
    assert api.get("/api/drafts/d1").json()["values"] == older


def test_a_draft_has_versions_of_the_last_hour(tmp_path, monkeypatch):
    drafts, now = Drafts(tmp_path / "d"), time.time()

    def save(value, seconds_ago):
        monkeypatch.setattr(time, "time", lambda: now - seconds_ago)
        monkeypatch.setattr(time, "time_ns", lambda: int((now - seconds_ago) * 10**9))
        drafts.save("abc", {"x": value})
        os.utime(drafts.folder / "abc.json", (now - seconds_ago,) * 2)

    for value, seconds_ago in ((1, 4000), (2, 3990), (3, 600), (4, 590), (5, 580), (6, 10)):
        save(value, seconds_ago)
    assert [values["x"] for _, values in drafts.versions()] == [6, 5, 3]
    assert [round(now - edited) for edited, _ in drafts.versions()] == [10, 580, 600]
    assert drafts.load("abc") == {"x": 6}
    assert not list(drafts.folder.glob("abc.*.json"))[3:]
    assert {oct(path.stat().st_mode & 0o777) for path in drafts.folder.iterdir()} == {"0o600"}


def test_drafts_are_limited_in_number_and_size(tmp_path):
    drafts = Drafts(tmp_path / "d", max_drafts=3)
    for i in range(5):
        drafts.save(f"n{i}", {"i": i})
        time.sleep(0.01)
    assert sorted(p.name for p in drafts.folder.iterdir()) == ["n2.json", "n3.json", "n4.json"]
    with pytest.raises(ValueError, match="KiB"):
        drafts.save("big", {"x": "y" * 300_000})
    (drafts.folder / "n2.json").write_text("[torn")
    assert drafts.load("n2") is None


# -- invalid requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
        (b"values=1", "application/x-www-form-urlencoded", 415),
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"{}", "application/json", 400),
        (b'{"values": []}', "application/json", 400),
        (b'{"values": {}, "draft": 7}', "application/json", 400),
        (b'{"values": {"train.seed": NaN}}', "application/json", 400),
        (b'{"values": {}}', "application/json; charset=utf-8", 200),
    ],
)
def test_request_bodies(api, body, kind, status):
    response = api.post("/api/check", content=body, headers={"content-type": kind})
    assert response.status_code == status
    assert status == 200 or response.json()["error"]


def test_unknown_routes_and_methods(api):
    for method, path in (("GET", "/api/nothing"), ("GET", "/api/check"), ("PUT", "/api/runs"), ("DELETE", "/api/runs")):
        response = api.request(method, path)
        assert response.status_code == 404 and "api/" in response.json()["error"]


IDS = ["no-such", "..", "%2e%2e", "..%2f..%2fetc", ".drafts", ".keys", "%00", "x" * 300, "%E2%80%AE"]
PARTS = ["", "log", "log.txt", "metrics", "series", "metrics.csv", "report.png", "spec.yaml", "values"]


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("part", PARTS)
def test_unknown_ids_are_404(api, name, part):
    response = api.get(f"/api/runs/{name}/{part}".rstrip("/"))
    assert response.status_code == 404
    assert api.post(f"/api/runs/{name}/stop", json={}).status_code == 404
    assert api.delete(f"/api/runs/{name}").status_code == 404


def test_internal_error_has_an_id_and_no_details(capsys):
    response = requests.error_response(KeyError("secret"))
    sentence = json.loads(response.body)["error"]
    assert response.status_code == 500 and "secret" not in sentence
    err = capsys.readouterr().err
    assert sentence.rpartition(" ")[2].strip(".") in err and "secret" in err


def test_full_disk_error():
    response = requests.error_response(OSError(28, "No space left on device"))
    assert response.status_code == 507 and "full" in json.loads(response.body)["error"]


def test_an_api_error_has_details():
    response = requests.error_response(ApiError(400, "No.", field="a"))
    assert (response.status_code, json.loads(response.body)) == (400, {"error": "No.", "field": "a"})


# -- runs --------------------------------------------------------------------------------------------------------


def ended(path, seconds=20):
    wait_for(lambda: Run(path).state not in ALIVE, seconds)


def test_idempotency_key_creates_one_run(app_folder, api):
    body = {"values": VALUES, "key": "key-0123456789"}
    first = api.post("/api/runs", json=body)
    assert first.status_code == 201, first.text
    name = first.json()["id"]
    assert api.post("/api/runs", json=body).json()["id"] == name
    with app(app_folder) as second_app:  # a retry after a restart
        assert second_app.post("/api/runs", json=body).json()["id"] == name
    assert name.endswith("from-a-test") and len(list((app_folder / "runs").glob("*from-a-test*"))) == 1

    shown = api.get(f"/api/runs/{name}").json()
    assert shown["summary"]["state"] in ("starting", "running") and shown["can"]["stop"] and not shown["can"]["delete"]
    assert shown["spec"]["model.builtin"] == "tiny-llama" and "tiny-llama" in shown["yaml"]
    assert str(app_folder / "python") in shown["command"] and shown["failure"] is None
    memory = check(api, VALUES)["memory"]
    assert shown["estimate"]["device_bytes"] == shown["estimate"]["measured_bytes"] == memory["device_bytes"]
    assert shown["estimate"]["rows"] == memory["rows"]
    assert api.delete(f"/api/runs/{name}").status_code == 409
    assert api.post(f"/api/runs/{name}/resume", json={}).status_code == 409
    assert api.post(f"/api/runs/{name}/stop", json={"save": "yes"}).status_code == 400
    assert api.post(f"/api/runs/{name}/stop", json={"save": False, "queued": True}).status_code == 409
    stopped = api.post(f"/api/runs/{name}/stop", json={"save": True})
    assert stopped.json()["summary"]["state"] == "stopping"
    ended(app_folder / "runs" / name)
    assert not processes.run_processes(app_folder / "runs" / name)
    assert api.get(f"/api/runs/{name}").json()["can"]["resume"]
    assert api.post(f"/api/runs/{name}/stop", json={}).status_code == 409

    copied = api.get(f"/api/runs/{name}/values").json()
    values = copied["values"]
    assert copied["checkpoint"] == ""
    assert values["model.builtin"] == "tiny-llama" and set(values) == set(by_name())
    assert api.delete(f"/api/runs/{name}").status_code == 200
    assert api.get(f"/api/runs/{name}").status_code == 404
    name = api.post("/api/runs", json=body).json()["id"]  # another one, since the run of this key is gone
    assert api.post("/api/runs", json=body).json()["id"] == name
    api.post(f"/api/runs/{name}/stop", json={"save": False})
    ended(app_folder / "runs" / name)
    assert api.delete(f"/api/runs/{name}").status_code == 200


def test_a_start_that_waits_for_the_examples_does_not_block_others(app_folder, api, monkeypatch):
    waits = []

    def wait(spec, base, seconds, show):
        waits.append(seconds)
        (app_folder / "runs" / ".keys").mkdir(exist_ok=True)
        with (app_folder / "runs" / ".keys" / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises an error while another process has it

    monkeypatch.setattr("backend.preflight.wait_for_worker", wait)
    body = {"values": VALUES, "key": "waiting-key"}
    names = {api.post("/api/runs", json=body).json()["id"] for _ in range(2)}
    assert len(names) == 1 and waits == [INSPECTION_SECONDS], "a retry does not wait again"
    path = app_folder / "runs" / names.pop()
    processes.terminate(path, sigterm_seconds=0)


def test_an_interrupted_start_is_continued(app_folder, api, run):
    (app_folder / "runs" / ".keys").mkdir(exist_ok=True)
    (app_folder / "runs" / ".keys" / "interrupted-key").write_text(run.id)
    assert api.post("/api/runs", json={"values": VALUES, "key": "interrupted-key"}).json()["id"] == run.id
    ended(run.path)
    assert run.state == "failed" or run.state == "done"


@pytest.mark.parametrize("key", ["short", "../../etc/passwd", "a b c d e f", "x" * 65])
def test_invalid_keys_are_rejected(api, key):
    assert api.post("/api/runs", json={"values": VALUES, "key": key}).status_code == 400


def test_a_run_with_errors_is_not_started(app_folder, api):
    before = sorted((app_folder / "runs").iterdir())
    wrong = api.post(
        "/api/runs", json={"values": {**VALUES, "train.per_device_train_batch_size": "x"}, "key": "not-valid-1"}
    )
    assert (
        wrong.status_code == 422
        and wrong.json()["field"] == "train.per_device_train_batch_size"
        and wrong.json()["invalid"]
    )
    refused = api.post("/api/runs", json={"values": {**VALUES, "parallel.strategy": "ddp", "launch.nproc_per_node": 2}})
    assert refused.status_code == 422 and any(f["level"] == "error" for f in refused.json()["findings"])
    assert [p for p in (app_folder / "runs").iterdir() if p.name[0] != "."] == [p for p in before if p.name[0] != "."]


def test_the_list_is_204_when_unchanged(api, run):
    first = api.get("/api/runs")
    assert first.json()["runs"][0]["id"] == run.id
    assert api.get(f"/api/runs?have={first.json()['etag']}").status_code == 204
    run.delete()
    assert api.get(f"/api/runs?have={first.json()['etag']}").status_code == 200


def test_log_by_bytes(api, run):
    base = f"/api/runs/{run.id}/log"
    path = run.path / LOG
    complete_log = path.read_text()
    last = api.get(base).json()
    assert last == {"t": complete_log, "s": 0, "o": len(complete_log), "more": False}
    assert api.get(f"{base}?off={len(complete_log)}").status_code == 204
    with path.open("a") as file:
        file.write("gr\u00fc\u00df dich\n")
    more = api.get(f"{base}?off={len(complete_log)}").json()
    assert more["t"] == "gr\u00fc\u00df dich\n" and more["o"] == path.stat().st_size
    assert api.get(f"{base}?before=700").json()["o"] == 700
    assert api.get(f"{base}?before=0").json() == {"t": "", "s": 0, "o": 0, "more": False}
    for bad in ("off=x", "before=1e3", "rank=first", "off=99999999999999999999999"):
        assert api.get(f"{base}?{bad}").status_code in (200, 400)
    path.write_text("replaced\n")
    again = api.get(f"{base}?off={more['o']}").json()
    assert (again["t"], again["s"], again["o"]) == ("replaced\n", 0, 9)
    path.unlink()
    assert api.get(base).status_code == 204
    assert api.get(f"{base}.txt").status_code == 404


def test_a_long_log_is_complete_in_parts(api, run):
    lines = "".join(f"[default{i % 2}]:{i} {'x' * 80}\n" for i in range(12_000))
    (run.path / LOG).write_text(lines)
    base = f"/api/runs/{run.id}/log"
    text, offset, more = "", 0, True
    while more:
        piece = api.get(f"{base}?off={offset}").json()
        assert piece["s"] == offset
        text, offset, more = text + piece["t"], piece["o"], piece["more"]
    assert text == lines
    piece = api.get(base).json()
    assert 60_000 < len(piece["t"]) <= 64 * 1024
    text = piece["t"]
    while piece["s"]:
        piece = api.get(f"{base}?before={piece['s']}").json()
        text = piece["t"] + text
    assert text == lines
    assert api.get(f"{base}.txt").text == lines
    rank_log = api.get(f"{base}.txt?rank=1").text
    assert rank_log.count("\n") == 6000 and rank_log.startswith("1 x")


def test_who_follows_a_log_gets_its_last_lines(api, run):
    path, base = run.path / LOG, f"/api/runs/{run.id}/log"
    first = api.get(f"{base}?off=0&latest=true").json()
    assert first["t"] == path.read_text(), "all lines, if one response can hold them"
    with path.open("a") as file:
        file.writelines(f"{number} {'x' * 80}\n" for number in range(12_000))
    last = api.get(f"{base}?off={first['o']}&latest=true").json()
    assert last["s"] > first["o"] and last["o"] == path.stat().st_size and not last["more"]
    assert last["t"].startswith("1") and last["t"].endswith(f"11999 {'x' * 80}\n")


def write_points(run, points):
    with (run.path / METRICS).open("ab") as file:
        file.writelines(orjson.dumps(point) + b"\n" for point in points)


def test_metrics_series_csv_and_image(api, run):
    base = f"/api/runs/{run.id}"
    assert api.get(f"{base}/metrics").status_code == 204
    assert api.get(f"{base}/series").json()["series"] == {}
    write_points(run, [{"step": i, "time": 1.0 * i, "loss": 5 / i, "learning_rate": 1e-3} for i in range(1, 3001)])
    write_points(run, [{"step": 3000, "time": 1.0, "eval_loss": 0.5}, {"step": 3001, "time": 2.0, "loss": math.nan}])
    first = api.get(f"{base}/metrics?off=0").json()
    assert len(first["points"]) == 3002 and first["o"] == (run.path / METRICS).stat().st_size
    assert api.get(f"{base}/metrics?off={first['o']}").status_code == 204
    with (run.path / METRICS).open("a") as file:
        file.write('{"step": 3002, "ti')  # half a line: it is being written
    assert api.get(f"{base}/metrics?off={first['o']}").status_code == 204
    with (run.path / METRICS).open("a") as file:
        file.write('me": 3.0, "loss": 1.0}\n')
    assert api.get(f"{base}/metrics?off={first['o']}").json()["points"] == [{"step": 3002, "time": 3.0, "loss": 1.0}]

    drawn = api.get(f"{base}/series?n=200").json()
    assert 50 < len(drawn["series"]["loss"]["x"]) <= 260
    assert drawn["series"]["eval_loss"] == {"x": [3000], "y": [0.5]}
    assert drawn["max"]["loss"] == 5 and drawn["newest"]["loss"][1] == 1.0
    assert api.get(f"{base}/series?have={drawn['etag']}").status_code == 204
    part = api.get(f"{base}/series?x0=100&x1=200").json()["series"]["loss"]["x"]
    assert part == list(range(99, 202))
    assert api.get(f"{base}/series?x0=left").status_code == 400

    rows = list(csv.DictReader(io.StringIO(api.get(f"{base}/metrics.csv").text)))
    assert len(rows) == 3003 and rows[0]["loss"] == "5.0"
    (run.path / RESULT).write_text('{"exact_match_before": 0.0, "exact_match_after": 0.9, "eval_loss": 0.5}')
    image = api.get(f"{base}/report.png")
    assert image.headers["content-type"] == "image/png" and image.content.startswith(b"\x89PNG")


def test_generations_of_each_step(api, run):
    route = f"/api/runs/{run.id}/generations"
    assert api.get(route).json() == {"prompts": [], "steps": []}
    assert api.get(f"/api/runs/{run.id}").json()["generations"] == 0
    generations.begin(run.path, [{"prompt": "Q", "reference": "A"}], 0)
    for step, output in ((0, "a"), (5, "b"), (9, "c")):
        line = {"step": step, "outputs": [output], "correct": [False], "rouge_l": [0.5], "scores": {}}
        generations.append(run.path, line)
    found = api.get(f"{route}?step=5").json()
    assert found["outputs"] == ["b"] and [line["step"] for line in found["steps"]] == [0, 5, 9]
    assert "outputs" not in found["steps"][0] and found["prompts"] == [{"prompt": "Q", "reference": "A"}]
    assert "no outputs from step 4" in api.get(f"{route}?step=4").json()["error"]
    assert api.get(f"/api/runs/{run.id}").json()["generations"] == generations.size(run.path) > 0
    assert generations.begin(run.path, [{"prompt": "Q", "reference": "A"}], 5) == [0, 5], "resumed after step 5"
    assert generations.begin(run.path, [{"prompt": "Q", "reference": "other data"}], 9) == []


def test_an_image_without_metrics(api, run):
    assert api.get(f"/api/runs/{run.id}/report.png").content.startswith(b"\x89PNG")


def test_spec_is_the_stored_file(api, run):
    response = api.get(f"/api/runs/{run.id}/spec.yaml")
    assert response.text == "train:\n  max_steps: 7\n" and f'{run.id}.yaml"' in response.headers["content-disposition"]


def test_a_broken_run_is_still_shown(api, run):
    (run.path / SPEC).write_text("train: {gone: 1}\n")
    (run.path / METRICS).write_bytes(b"\xff\xfe no json\n")
    shown = api.get(f"/api/runs/{run.id}").json()
    assert shown["spec"] == {} and shown["yaml"].startswith("train")
    assert api.get(f"/api/runs/{run.id}/values").status_code == 422
    (run.path / SPEC).unlink()
    assert api.get(f"/api/runs/{run.id}/spec.yaml").status_code == 404


@pytest.mark.parametrize(
    "plan",
    ["", "not json", "[]", "null", '{"about": []}', '{"argv": 7, "files": 3, "about": 1}', '{"created": {}}', "\xff"],
)
def test_a_broken_plan_does_not_hide_the_other_runs(tmp_path, plan):
    for name in ("good", "broken"):
        made = Run.create(tmp_path, name, Plan(("true",), {}, {SPEC: "{}\n"}), datetime.now())
    (made.path / PLAN).write_text(plan, encoding="latin-1")
    with client(tmp_path) as http:
        assert http.get("/api/runs").status_code == 200
    found = {summary["id"]: summary for summary in RunList(tmp_path).all()}
    assert set(found) >= {made.id} and len(found) == 2 and all(s["sentence"] for s in found.values())


def test_a_linked_run_is_listed_with_the_reason_but_not_opened(tmp_path):
    """Deleting it would delete what the link names."""
    elsewhere = Run.create(tmp_path / "elsewhere", "x", Plan(("true",), {}, {SPEC: "{}\n"}), datetime.now())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/linked").symlink_to(elsewhere.path)
    [summary] = RunList(tmp_path / "runs").all()
    assert "symbolic link" in summary["sentence"]
    with client(tmp_path / "runs") as http:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/resume"), ("GET", "/log.txt")):
            response = http.request(method, f"/api/runs/linked{path}", json={} if method == "POST" else None)
            assert response.status_code == 404 and "symbolic link" in response.json()["error"]
    assert (elsewhere.path / PLAN).exists()


def test_drafts_and_keys_are_private(tmp_path):
    previous = os.umask(0)
    try:
        drafts = Drafts(tmp_path / "drafts")
        drafts.save("abc", {"a": "b"})
        keys = IdempotencyKeys(tmp_path / "keys")
        with keys.lock():
            keys.save("key-12345", "run")
    finally:
        os.umask(previous)
    modes = {p.relative_to(tmp_path).as_posix(): oct(p.stat().st_mode & 0o777) for p in tmp_path.rglob("*")}
    private = {"drafts/abc.json": "0o600", "keys/.lock": "0o600", "keys/key-12345": "0o600"}
    assert modes == {"drafts": "0o700", "keys": "0o700", **private}


def test_list_reads_an_ended_run_once(app_folder):
    root = app_folder / "many"
    root.mkdir()
    for i in range(3):
        new_run = Run.create(root, f"r{i}", Plan(("true",), {}, {SPEC: "{}\n"}), datetime.now())
        (new_run.path / "lock").write_text("supervisor")
        (new_run.path / "state.json").write_text('{"started": 1.0, "ended": 2.0, "end": "done"}')
    read_ids = []
    summaries = RunList(root, lambda run: read_ids.append(run.id) or run.summary())
    first = summaries.all()
    assert [s["state"] for s in first] == ["done"] * 3 and len(read_ids) == 3
    assert summaries.all() == first and len(read_ids) == 3
    time.sleep(0.01)
    (Path(new_run.path) / "state.json").write_text('{"started": 1.0, "ended": 3.0, "end": "failed"}')
    assert {s["state"] for s in summaries.all()} == {"done", "failed"} and len(read_ids) == 4
