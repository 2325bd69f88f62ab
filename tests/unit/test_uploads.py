"""Uploaded data files: sent in parts, continued, named, listed with the runs that use them, removed; and the completion
of paths."""

import os
import random
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from small import client

from backend.config.options import options
from backend.machine import Machine
from backend.runs import SPEC, Plan
from backend.runs.folder import Run
from webui import uploads
from webui.api import paths
from webui.uploads import Upload, UploadError, Uploads

TEXT = b'{"text": "one"}\n' * 40
SIZE = len(TEXT)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("app") / "runs"


@pytest.fixture(scope="module")
def app(root):
    with client(root, detect_machine=lambda _: Machine()) as started:
        yield started


@pytest.fixture
def api(app, root):
    yield app
    shutil.rmtree(root / ".uploads", ignore_errors=True)


def put(api, part, offset, name="train.jsonl", size=SIZE, modified=1):
    query = {"name": name, "size": size, "modified": modified, "offset": offset}
    return api.put("/api/uploads", params=query, content=part)


def sent(api, content, name, modified=1):
    """The path of a file that is sent as one part."""
    response = put(api, content, 0, name, len(content), modified)
    assert response.status_code == 200, response.text
    return response.json()["path"]


def test_a_file_arrives_in_parts_and_continues_after_a_restart(api, root):
    assert put(api, b"", 0).json() == {"arrived": 0, "path": ""}
    assert put(api, TEXT[:100], 0).json() == {"arrived": 100, "path": ""}
    # A part that was sent twice, or that leaves a gap, changes nothing: the answer says where to go on.
    assert put(api, TEXT[:100], 0).json()["arrived"] == 100
    assert put(api, TEXT[200:], 200).json()["arrived"] == 100
    assert api.get("/api/uploads").json()["files"] == []
    with client(root, detect_machine=lambda _: Machine()) as restarted:
        assert put(restarted, b"", 0).json()["arrived"] == 100
        answer = put(restarted, TEXT[100:], 100).json()
    path = root / ".uploads" / "train.jsonl"
    assert answer == {"arrived": len(TEXT), "path": str(path)} and path.read_bytes() == TEXT
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [file["name"] for file in api.get("/api/uploads").json()["files"]] == ["train.jsonl"]
    # The last part once more, because its response was lost, and the file once more: nothing is sent again.
    assert put(api, TEXT[100:], 100).json() == put(api, b"", 0).json() == answer
    api.delete("/api/uploads/train.jsonl")
    assert put(api, b"", 0).json() == {"arrived": 0, "path": ""}


def test_another_file_of_the_same_name_gets_a_number(api, root):
    folder = root / ".uploads"
    first = sent(api, b"a,b\n1,2\n", "x.csv")
    assert sent(api, b"a,b\n3,4\n", "x.csv", modified=2) == str(folder / "x-2.csv")
    assert sent(api, b"a,b\n3,4\n", "x.csv", modified=2) == str(folder / "x-2.csv")  # the same file
    (folder / "x-3.csv").symlink_to("nowhere")
    assert sent(api, b"a,b\n5,6\n", "x.csv", modified=4) == str(folder / "x-4.csv")
    # Another file that has taken the name of an upload is not mistaken for it.
    Path(first).write_text("a,b\n7,8\n")
    assert sent(api, b"a,b\n1,2\n", "x.csv") == str(folder / "x-5.csv")
    Path(first).write_text("a,b\n1,2\n")
    assert sent(api, b"\x1f\x8b1", "y.jsonl.gz") and sent(api, b"\x1f\x8b2", "y.jsonl.gz", modified=2).endswith(
        "/y-2.jsonl.gz"
    )
    assert Path(first).read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("../../etc/x.csv", "x.csv"),
        ("C:\\Users\\me\\Über.JSONL", "Über.JSONL"),
        (". .hidden.csv", "hidden.csv"),
        ("two\nlines.csv", "two_lines.csv"),
        ("a[0]*?.csv", "a[0]*?.csv"),
        ("U\u0308.csv", "Ü.csv"),
    ],
)
def test_names(api, root, name, stored):
    path = sent(api, b"x", name)
    assert path == str(root / ".uploads" / stored)


@pytest.mark.parametrize(
    ("about", "part"),
    [
        ({"name": "notes.docx"}, "'notes.docx' is not a data file. Supported are .jsonl"),
        ({"name": "run.yaml"}, "To load a configuration, use Import."),
        ({"name": "jsonl"}, "'jsonl' is not a data file."),
        ({"name": "x" * 250 + ".csv"}, "has more than 200 bytes. Rename the file."),
        ({"size": 0}, "train.jsonl is empty."),
        (
            {"size": 10**12},
            "train.jsonl has 1000.0 GB, and uploads are limited to 20.0 GB. Copy the file to the server",
        ),
        ({"size": 5}, "train.jsonl changed during the upload. Upload it again."),
        ({"size": -1}, "size must be at least 0."),
        ({"size": "many"}, "size must be an integer."),
    ],
)
def test_what_is_refused(api, about, part):
    response = put(api, b"123456", 0, **about)
    assert response.status_code == 400 and part in response.json()["error"]
    assert api.get("/api/uploads").json()["files"] == []


def test_a_full_disk_is_told_before_the_file_is_sent(api, monkeypatch):
    usage = shutil._ntuple_diskusage(10**12, 10**12 - 5 * 10**9, 5 * 10**9)
    monkeypatch.setattr(uploads.shutil, "disk_usage", lambda _: usage)
    response = put(api, b"", 0, size=6 * 10**9)
    assert "it needs 6.0 GB" in response.json()["error"] and "has 4.0 GB for uploads" in response.json()["error"]
    assert put(api, b"", 0, size=3 * 10**9).status_code == 200


def test_two_tabs_that_send_the_same_file_store_it_once(tmp_path):
    folder = Uploads(tmp_path / "data")
    content = os.urandom(300_000)
    upload = Upload("x.jsonl", len(content), 1)

    def send(_):
        arrived = 0
        while True:
            arrived, path = Uploads(folder.folder).receive(upload, arrived, content[arrived : arrived + 10_000])
            if path:
                return path.read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(send, range(4))) == {content}
    assert [path.name for path, _ in folder.files()] == ["x.jsonl"]


def test_parts_of_forgotten_uploads_are_deleted(tmp_path):
    folder = Uploads(tmp_path)
    folder.receive(Upload("x.csv", 10, 1), 0, b"123")
    [part] = (tmp_path / ".parts").glob("[!.]*")
    old = time.time() - uploads.KEPT_SECONDS - 10
    os.utime(part, (old, old))
    assert folder.receive(Upload("x.csv", 10, 1), 3, b"4567890") == (0, None)


def test_any_name_stays_in_the_folder():
    rng = random.Random(7)
    alphabet = "aÜ ./\\\n\t\0*~-\u0308\u202e\ud800😀"
    for _ in range(2000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(12)))
        try:
            name = uploads.file_name(f"{text}.csv")
        except UploadError:
            continue
        assert name == os.path.basename(name) and name[0] != "." and not re.search(r"[\x00-\x1f\ud800]", name)


def test_the_list_names_the_runs_that_use_a_file(api, root, monkeypatch):
    path = sent(api, TEXT, "train.jsonl")
    sent(api, b"a\n1\n", "other.csv", modified=2)
    spec = f"data:\n  sources:\n  - {{}}\n  - source: files\n    files:\n    - {path}\n"
    run = Run.create(root, "My run", Plan(("true",), {}, {SPEC: spec}), datetime.now())
    folder = f"data:\n  source: files\n  files: [{root}/.uploads, '{root}/.uploads/u*.csv', /nowhere]\n"
    by_folder = Run.create(root, "Folder", Plan(("true",), {}, {SPEC: folder}), datetime.now())
    damaged = Run.create(root, "Damaged", Plan(("true",), {}, {SPEC: f"data: [.uploads {path}"}), datetime.now())
    listed = {file["name"]: file for file in api.get("/api/uploads").json()["files"]}
    assert {used["name"] for used in listed["train.jsonl"]["runs"]} == {"Folder", "My run"}
    assert [used["name"] for used in listed["other.csv"]["runs"]] == ["Folder"] and listed["other.csv"]["bytes"] == 4
    by_folder.delete()
    assert {file["name"]: file for file in api.get("/api/uploads").json()["files"]}["other.csv"]["runs"] == []

    with monkeypatch.context() as running:
        running.setattr(Run, "state", "running")
        refused = api.delete("/api/uploads/train.jsonl")
    assert refused.status_code == 409 and "train.jsonl is in use by My run." in refused.json()["error"]
    assert api.delete("/api/uploads/train.jsonl").status_code == 200
    api.delete("/api/uploads/..%2F.index.json")
    assert [file["name"] for file in api.get("/api/uploads").json()["files"]] == ["other.csv"]
    for each in (run, damaged):
        each.delete()


def entries(api, text, kind="data"):
    return api.get("/api/paths", params={"text": text, "kind": kind}).json()


def test_paths_are_completed(api, tmp_path, monkeypatch):
    for name in ("Train.jsonl", "train.csv.gz", "notes.rst", ".hidden.csv", "two\nlines.csv"):
        (tmp_path / name).touch()
    (tmp_path / "trains").mkdir()
    (tmp_path / "trains/x.parquet").touch()
    start = f"{tmp_path}/"
    assert entries(api, start)["entries"] == [f"{start}{name}" for name in ("trains/", "train.csv.gz", "Train.jsonl")]
    assert entries(api, f"{start}TRAINS")["entries"] == [f"{start}trains/"]
    assert entries(api, f"{start}.h")["entries"] == [f"{start}.hidden.csv"]
    assert entries(api, start, "folder")["entries"] == [f"{start}trains/"]
    assert f"{start}notes.rst" in entries(api, start, "file")["entries"]
    assert entries(api, f"{start}trains/")["entries"] == [f"{start}trains/x.parquet"]
    for unknown in (f"{start}nowhere/", "/proc/1/fd/nothing/", "a\0b/", f"{start}notes.rst/"):
        assert entries(api, unknown) == {"entries": [], "more": 0}
    # Relative to the working directory of the server, and to the home.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert entries(api, "tr")["entries"] == ["trains/", "train.csv.gz", "Train.jsonl"]
    assert entries(api, "~/trains/x")["entries"] == ["~/trains/x.parquet"]
    assert entries(api, "")["entries"] == ["trains/", "train.csv.gz", "Train.jsonl"]


def test_a_file_system_that_does_not_respond_keeps_few_threads(api, monkeypatch):
    for _ in range(4):
        assert paths.LOOKING.acquire(blocking=False)
    assert entries(api, "/") == {"entries": [], "more": 0}
    for _ in range(4):
        paths.LOOKING.release()
    assert entries(api, "/", "folder")["entries"]


def test_of_a_large_folder_the_first_names_are_shown(api, tmp_path):
    for number in range(130):
        (tmp_path / f"{number:03}.csv").touch()
    found = entries(api, f"{tmp_path}/")
    assert len(found["entries"]) == 100 and found["more"] == 30
    assert len(entries(api, f"{tmp_path}/12")["entries"]) == 10


def test_every_option_that_is_a_path_says_so():
    """By its label, and only these."""
    named = {
        o.name for o in options() if re.search(r"\b(files?|folder|environment|weights)$", o.label) and o.kind != "bool"
    }
    assert {o.name for o in options() if o.path} == named - {"llamafactory.kt_backend"}
