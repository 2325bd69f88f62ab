"""Custom machines: the form's fields, what it is filled with, how they are kept, and what they are used for."""

import pytest
from small import client

from backend.machine import Machine, read

VALUES = {"model.builtin": "tiny-llama", "launch.launcher": "python"}

LAB = {"name": "Lab H200", "gpus": [{"name": "X9", "count": "2", "memory_gib": "141", "capability": "9.0"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("app") / "runs"


@pytest.fixture(scope="module")
def app(folder):
    with client(folder, detect_machine=lambda _: Machine()) as started:
        yield started


@pytest.fixture
def api(app, folder):
    yield app
    for path in (folder / ".machines").glob("*"):
        path.unlink()


def names(api):
    return [machine["name"] for machine in api.get("/api/machines").json()]


def test_the_form_has_every_key_of_a_description(api):
    form = api.get("/api/machines/form").json()
    by_name = {field["name"]: field for field in form["fields"]}
    assert form["command"] == "footplate machine"
    assert by_name["ram_gib"]["label"] == "Host RAM per node (GiB)" and by_name["ram_gib"]["absent"] == "Default: 64"
    assert [field["name"] for field in by_name["gpus"]["fields"]][:3] == ["name", "count", "memory_gib"]
    assert all(field["label"] and field["absent"] for field in form["fields"])


def test_a_custom_machine_survives_a_restart_and_every_check_uses_it(folder, api):
    assert api.post("/api/machines", json={"values": LAB}).json() == {"name": "lab-h200"}
    with client(folder, detect_machine=lambda _: Machine()) as second:
        assert names(second)[:2] == ["", "lab-h200"]
        entry = second.get("/api/machines").json()[1]
        assert entry["label"] == "Lab H200: 2 x X9 141GB"
        assert entry["values"]["gpus"][0]["memory_gib"] == "141" and entry["values"]["ram_gib"] == ""
        report = second.post("/api/check", json={"values": VALUES, "machine": "lab-h200"}).json()
        assert report["place"] == "Lab H200" and report["memory"]["capacity_bytes"] == 141 * 2**30
        assert second.post("/api/fix", json={"values": VALUES, "machine": "lab-h200"}).status_code == 200
        assert second.delete("/api/machines/lab-h200").status_code == 200
        assert names(second)[1] != "lab-h200"
        gone = second.post("/api/check", json={"values": VALUES, "machine": "lab-h200"})
        assert gone.status_code == 404 and "8x80gb" in gone.json()["error"]


def test_the_file_of_a_custom_machine_is_one_for_the_command_line(folder, api):
    api.post("/api/machines", json={"values": LAB})
    [path] = (folder / ".machines").iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == ("lab-h200.yaml", 0o600)
    assert len(read(path).gpus) == 2


def test_an_edit_can_rename_a_machine(api):
    api.post("/api/machines", json={"values": LAB})
    edited = {"values": {**LAB, "name": "Other", "cores": "48"}, "replaced": "lab-h200"}
    assert api.post("/api/machines", json=edited).json() == {"name": "other"}
    assert "lab-h200" not in names(api)
    assert api.get("/api/machines").json()[1]["values"]["cores"] == "48"


@pytest.mark.parametrize(
    ("changes", "part", "field"),
    [
        ({"name": ""}, "Name: is missing", "name"),
        ({"name": "../.."}, "Name: must have a letter or digit", "name"),
        ({"name": "8x80GB"}, "'8x80GB' is the name of another machine", "name"),
        ({"name": "x" * 61}, "at most 60 characters", "name"),
        ({"cores": "none"}, "CPU cores per node: must be an integer from 1 to 10,000, but is 'none'.", "cores"),
        ({"gpus": [{"name": "X9"}]}, "Memory per GPU: is missing: set it for 'X9'", "gpus.0.memory_gib"),
        ({"gpus": [{"name": "H200"}, {"name": "X9"}]}, "Memory per GPU of GPU model 2: is", "gpus.1.memory_gib"),
        ({"gpus": [{"name": "H200", "count": "1000000000"}]}, "GPUs per node: must be", "gpus.0.count"),
        ({"gpus": "many"}, "GPUs of each node: must be a list", "gpus"),
        ({"gpus": ["many"]}, "GPU model 1: expected a mapping", "gpus.0"),
        ({"a.b": "1"}, "a.b: unknown key", "a.b"),
    ],
)
def test_an_invalid_machine_is_not_stored(api, changes, part, field):
    before = names(api)
    response = api.post("/api/machines", json={"values": {**LAB, **changes}})
    assert response.status_code == 422
    assert part in response.json()["error"] and response.json()["fields"] == [field]
    assert names(api) == before


def test_two_machines_cannot_have_one_name(api):
    api.post("/api/machines", json={"values": LAB})
    again = api.post("/api/machines", json={"values": {**LAB, "name": "LAB h200"}})
    assert again.status_code == 422 and "the name of another machine" in again.json()["error"]
    assert api.post("/api/machines", json={"values": LAB, "replaced": "lab-h200"}).status_code == 200


def test_a_pasted_description_fills_the_form(api):
    text = "name: node7\ngpus:\n- {name: H200, count: 8}\nhas_libaio: false\nversions: {torch: 2.13.0, peft: 0.21.0}\n"
    values = api.post("/api/machines/read", json={"text": text}).json()["values"]
    assert values["gpus"] == [{"name": "H200", "count": "8", "memory_gib": "", "free_gib": "", "capability": ""}]
    assert (values["name"], values["has_libaio"], values["cores"]) == ("node7", "false", "")
    assert values["versions"] == "torch==2.13.0\npeft==0.21.0"
    assert api.post("/api/machines", json={"values": values}).json() == {"name": "node7"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (" ", "The text is not a machine description: it is empty. Run footplate machine on that machine"),
        ("name: x\ngpus: [{name: H100, memory_gib: -80}]", "Memory per GPU: must be a number of GiB greater than 0"),
        ("name: x\nsockets: 2", "sockets: unknown key; known keys are name,"),
    ],
)
def test_a_paste_that_cannot_be_used_is_explained(api, text, part):
    response = api.post("/api/machines/read", json={"text": text})
    assert response.status_code == 422 and part in response.json()["error"]


def test_a_damaged_file_is_named_and_can_be_removed(folder, api):
    (folder / ".machines").mkdir(parents=True, exist_ok=True)
    (folder / ".machines" / "odd.yaml").write_text("cores: none")
    assert {"name": "odd", "label": "odd (its file is damaged)", "values": {"name": "odd"}} in api.get(
        "/api/machines"
    ).json()
    response = api.post("/api/check", json={"values": VALUES, "machine": "odd"})
    assert response.status_code == 422 and "odd.yaml" in response.json()["error"]
    api.delete("/api/machines/odd")
    assert "odd" not in names(api)


def test_removing_stays_in_the_folder(folder, api):
    (folder / ".machines").mkdir(parents=True, exist_ok=True)
    (folder / "other.yaml").write_text("")
    for name in ("..%2Fother", "nothing"):
        api.delete(f"/api/machines/{name}")
    assert (folder / "other.yaml").exists()
