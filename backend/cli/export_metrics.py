"""`footplate export-metrics`: the metrics of runs for TensorBoard or trackio, after or during a run.

tensorboard and trackio are optional packages. Exporting a run again replaces its earlier export.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backend.cli.commands import print_json
from backend.cli.runs import find_run
from backend.config import variables
from backend.config.yaml_text import load_yaml
from backend.runs import METRICS, SPEC, files
from backend.runs.folder import UNREADABLE, Run, RunError
from backend.runs.metrics import Point, read_points
from backend.wording import counted

SUFFIX = ".footplate"  # of the event files, so that a new export replaces only its own
FOLDERS = {"tensorboard": "tensorboard-logs", "trackio": "trackio-logs"}


def start(arguments: argparse.Namespace) -> int:
    """Export the runs, and print how to see them."""
    folder = Path(arguments.out or FOLDERS[arguments.to]).absolute()
    found = [find_run(Path(arguments.runs), name) for name in dict.fromkeys(arguments.run)]
    points = [points_of(run) for run in found]
    export = to_tensorboard if arguments.to == "tensorboard" else to_trackio
    export(folder, [(run.id, logged, configuration(run)) for run, logged in zip(found, points, strict=True)])
    counts = {run.id: len(logged) for run, logged in zip(found, points, strict=True)}
    if arguments.json:
        print_json({"to": arguments.to, "folder": str(folder), "points": counts})
        return 0
    for name, count in counts.items():
        print(f"{name}: {counted(count, 'point')}")
    print(f"Written to {folder}. Show with: {show_command(arguments.to, folder)}")
    return 0


def points_of(run: Run) -> list[Point]:
    """The logged points, each step once. Raises RunError if there are none."""
    if not (points := read_points(run.path / METRICS)):
        raise RunError(f"{run.id} has no metrics yet.")
    return points


def configuration(run: Run) -> dict[str, bool | int | float | str]:
    """The options of spec.yaml by key, such as train.learning_rate; values that look like secrets are masked."""
    found: dict[str, bool | int | float | str] = {}
    with suppress(*UNREADABLE):
        spec = load_yaml(files.read_text(run.path / SPEC))
        for section, options in spec.items():
            for name, value in options.items():
                if isinstance(value, Mapping):
                    value = variables.masked({str(key): str(item) for key, item in value.items()})
                plain = isinstance(value, bool | int | float)
                found[f"{section}.{name}"] = value if plain else variables.hide_tokens(_text(value))
    return found


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def scalars(point: Point) -> dict[str, float]:
    """The metrics of a point under the names that the Trainer reports: train/loss, eval/loss."""
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": float(value)
        for key, value in point.items()
        if type(value) in (int, float) and key not in ("step", "time", "tokens")  # tokens started at 0 after a resume
    }


Exported = tuple[str, Sequence[Point], Mapping[str, bool | int | float | str]]  # id, points, configuration


def to_tensorboard(folder: Path, runs: Sequence[Exported]) -> None:
    """An event file for each run in a folder of its own, with the configuration as hyperparameters."""
    writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
    events = _import("tensorboard.compat.proto.event_pb2", "tensorboard")
    summaries = _import("tensorboard.compat.proto.summary_pb2", "tensorboard")
    hparams = _import("tensorboard.plugins.hparams.summary_v2", "tensorboard")  # summary imports tensorflow
    for name, points, config in runs:
        for earlier in (folder / name).glob(f"events.out.tfevents.*{SUFFIX}"):
            earlier.unlink()
        file = writer.EventFileWriter(str(folder / name), filename_suffix=SUFFIX)
        begin = points[0].get("time", 0.0)
        session = hparams.hparams_pb(dict(config), trial_id=name, start_time_secs=begin)
        file.add_event(events.Event(wall_time=begin, summary=session))
        for point in points:
            values = [summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(point).items()]
            file.add_event(
                events.Event(
                    wall_time=point.get("time", begin),
                    step=int(point["step"]),
                    summary=summaries.Summary(value=values),
                )
            )
        file.close()


def to_trackio(folder: Path, runs: Sequence[Exported], project: str = "footplate") -> None:
    """The runs in a local trackio project. `trackio.log` cannot set the time of a point, so they are stored as
    `trackio.import_csv` stores them."""
    os.environ["TRACKIO_DIR"] = str(folder)  # read when trackio is imported
    storage = _import("trackio.sqlite_storage", "trackio").SQLiteStorage
    for name, points, config in runs:
        storage.delete_run(project, name, run_id=name)
        times = [datetime.fromtimestamp(point.get("time", 0.0), UTC).isoformat() for point in points]
        storage.bulk_log(
            project=project,
            run=name,
            run_id=name,
            metrics_list=[scalars(point) for point in points],
            steps=[int(point["step"]) for point in points],
            timestamps=times,
            config=dict(config),
        )


def show_command(to: str, folder: Path) -> str:
    """The command that shows what was exported."""
    where = shlex.quote(str(folder))
    return f"tensorboard --logdir {where}" if to == "tensorboard" else f"TRACKIO_DIR={where} trackio show"


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RunError(f"{package} cannot be imported ({error}). Install it: pip install {package}") from error
