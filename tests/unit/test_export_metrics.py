"""The export of metrics to TensorBoard and trackio: with stand-ins for both packages, and with the installed ones."""

import importlib.util
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest
from planted_runs import plant_run

from backend.__main__ import main
from backend.runs import METRICS

SPEC_TEXT = """train: {learning_rate: 0.001, bf16: true, optim: adamw_torch}
launch: {devices: [0, 1], env: {HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz, NCCL_DEBUG: INFO}}
"""
LINES = [
    {"step": 1, "time": 100.5, "loss": 3.0, "epoch": 0.5, "tokens": 64},
    {"step": 2, "time": 101.5, "loss": 2.0, "epoch": 1.0, "tokens": 128},
    {"step": 2, "time": 102.0, "eval_loss": 2.5, "epoch": 1.0},
    {"step": 3, "time": 103.0, "loss": None, "note": "loss is nan"},
    {"event": "resumed", "step": 2, "time": 200.0},
    {"step": 3, "time": 201.0, "loss": 1.5, "tokens": 64},
]
EXPECTED = [
    (1, 100.5, {"train/loss": 3.0, "train/epoch": 0.5}),
    (2, 101.5, {"train/loss": 2.0, "train/epoch": 1.0}),
    (2, 102.0, {"eval/loss": 2.5, "train/epoch": 1.0}),
    (3, 201.0, {"train/loss": 1.5}),
]


@pytest.fixture
def run(tmp_path):
    return plant_run(tmp_path / "runs", "a run", {METRICS: LINES}, SPEC_TEXT, datetime(2026, 1, 1))


@pytest.fixture
def export(tmp_path, run):
    return lambda to, *names: main(
        ["export-metrics", *map(str, names or [run.path]), "--to", to, "--out", str(tmp_path / "out")]
    )


class Summary:
    def __new__(cls, value):
        return dict(value)

    @staticmethod
    def Value(tag, simple_value):
        return tag, simple_value


def replace_module(monkeypatch, name, **content):
    parts = name.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


def test_tensorboard(monkeypatch, export, run, tmp_path, capsys):
    written = []

    class Writer:
        def __init__(self, folder, filename_suffix):
            written.append((folder, filename_suffix))

        def add_event(self, event):
            written.append(event)

        def close(self):
            written.append("closed")

    replace_module(monkeypatch, "tensorboard.compat.proto.event_pb2", Event=lambda step=0, **event: (step, event))
    replace_module(
        monkeypatch,
        "tensorboard.compat.proto.summary_pb2",
        Summary=Summary,
    )
    hparams = {}
    replace_module(
        monkeypatch,
        "tensorboard.plugins.hparams.summary_v2",
        hparams_pb=lambda values, trial_id, start_time_secs: hparams.update(values) or trial_id,
    )
    replace_module(monkeypatch, "tensorboard.summary.writer.event_file_writer", EventFileWriter=Writer)
    folder = tmp_path / "out" / run.id
    folder.mkdir(parents=True)
    for name in ("events.out.tfevents.1.host.footplate", "events.out.tfevents.1.host"):
        (folder / name).touch()
    assert export("tensorboard") == 0
    assert written[0] == (str(folder), ".footplate") and written[-1] == "closed"
    assert written[1] == (0, {"wall_time": 100.5, "summary": run.id})
    assert [(step, event["wall_time"], event["summary"]) for step, event in written[2:-1]] == EXPECTED
    assert hparams == CONFIG
    assert [path.name for path in folder.iterdir()] == ["events.out.tfevents.1.host"]  # of another program
    assert "4 points" in capsys.readouterr().out


CONFIG = {
    "train.learning_rate": 0.001,
    "train.bf16": True,
    "train.optim": "adamw_torch",
    "launch.devices": "[0, 1]",
    "launch.env": "{'HF_TOKEN': '********', 'NCCL_DEBUG': 'INFO'}",
}


def test_trackio(monkeypatch, export, run, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    calls = []

    class SQLiteStorage:
        delete_run = staticmethod(lambda project, name, run_id: calls.append(("delete", project, name)))
        bulk_log = staticmethod(lambda **values: calls.append(values))

    replace_module(monkeypatch, "trackio.sqlite_storage", SQLiteStorage=SQLiteStorage)
    assert export("trackio") == 0
    deleted, logged = calls
    assert deleted == ("delete", "footplate", run.id) and logged["run"] == logged["run_id"] == run.id
    times = [datetime.fromisoformat(time).timestamp() for time in logged["timestamps"]]
    assert list(zip(logged["steps"], times, logged["metrics_list"], strict=True)) == EXPECTED
    assert logged["config"] == CONFIG


@pytest.mark.parametrize("package", ["tensorboard", "trackio"])
def test_a_missing_package_is_named(monkeypatch, export, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert export(package) == 2
    assert f"pip install {package}" in capsys.readouterr().err


def test_a_run_without_metrics_exports_nothing(export, run, tmp_path, capsys):
    (run.path / METRICS).unlink()
    assert export("trackio") == 2 and "has no metrics yet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
def test_tensorboard_reads_it(export, run, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert export("tensorboard") == export("tensorboard") == 0  # the second export replaces the first
    found = reader.EventAccumulator(str(tmp_path / "out" / run.id)).Reload()
    losses = [(event.step, event.wall_time, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(1, 100.5, 3.0), (2, 101.5, 2.0), (3, 201.0, 1.5)]
    assert found.SummaryMetadata("_hparams_/session_start_info").plugin_data.plugin_name == "hparams"


@pytest.mark.soak
def test_trackio_reads_it(monkeypatch, export, run):
    if not importlib.util.find_spec("trackio"):
        pytest.skip("trackio is not installed")  # imported below, once TRACKIO_DIR is set
    monkeypatch.setenv("TRACKIO_DIR", "elsewhere")
    assert export("trackio") == export("trackio") == 0  # the second export replaces the first
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    logged = storage.get_logs("footplate", run.id)
    times = [datetime.fromisoformat(point["timestamp"]).timestamp() for point in logged]
    assert list(zip([point["step"] for point in logged], times, strict=True)) == [found[:2] for found in EXPECTED]
    assert storage.get_run_config("footplate", run.id)["train.learning_rate"] == 0.001
