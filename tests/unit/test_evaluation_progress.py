"""What an evaluation says while it works, and about a data file that it cannot read. No models are loaded."""

import time
from pathlib import Path

import pytest

from backend.config import RunSpec
from backend.inference import examples
from backend.inference.evaluation import Evaluation
from backend.models.evaluation import Settings
from backend.train.run_log import TrainError


def test_the_time_of_a_judge_does_not_follow_from_that_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    job, now = Evaluation.__new__(Evaluation), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    job.began, job.models_work, job.total = None, 100, 1000
    said = []
    for seconds, done in ((0, 0), (5, 10), (20, 50), (40, 100), (41, 190), (61, 370), (101, 1000)):
        now[0] = seconds
        said.append(job._left(done))
    assert said == ["", "", ", about 20 s left before the judge starts", "", "", ", about 1 min 10 s left", ""]


def test_without_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    job, now = Evaluation.__new__(Evaluation), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    job.began, job.models_work, job.total = None, 100, 100
    assert job._left(0) == ""
    now[0] = 20
    assert job._left(50) == ", about 20 s left"
    assert job._left(100) == ""


def test_other_columns_of_a_data_file(tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text('{"ticket": "IC 512", "json": "{}"}\n')
    with pytest.raises(TrainError) as error:
        examples.read(RunSpec(), Settings(data=str(file)), None, print)
    assert str(error.value) == (
        f"{file}, line 1: has columns that match no data format (ticket: text, json: text). "
        "Rename the columns to those of the run's data."
    )
