"""Measurement reports: predicted and measured figures of a run, and nothing that names anybody or anything."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from failed_runs import ended
from measured_runs import FOLDER, predicted_now, ratios_now
from published_peaks import QWEN_7B
from small import client
from specs import spec
from test_measured_time import CPU, made, report

from backend.__main__ import main
from backend.config.options import edit, options, visible
from backend.inspect import InputFacts
from backend.machine import GIB, Gpu, Machine
from backend.modelspec import from_config
from backend.preflight import report_on
from backend.presets import dump, load, presets
from backend.registry.builtin_models import BUILTIN_MODELS
from backend.registry.gpus import GPU_MODELS, gpu_model
from backend.rules import Case
from backend.rules.examples import TWO_H100
from backend.runs import ESTIMATE, MONITOR, PROGRESS, RESULT, SPEC
from backend.runs.folder import Run, RunError
from backend.tasks import measurement_report
from backend.tasks.measured import measure
from backend.tasks.measured_time import measure_time
from backend.tasks.measurement_format import OPTIONS, OTHER, SCHEMA, allowed, device_name, version

SECRET = "s3cret"  # a part of every planted text
TEXT = f"{SECRET}-acme"


CHOICES: tuple[dict[str, Any], ...] = (  # of which different texts have an effect
    {"model.source": "path", "data.source": "files", "data.validation": "files", "save.resume_from": "path"},
    {"model.source": "hub", "data.source": "hub", "data.format": "messages", "launch.place": "slurm"},
    {"launch.place": "kubernetes", "parallel.strategy": "zero3", "parallel.offload_param": "nvme"},
)


def with_secrets(choices: dict[str, Any]) -> Any:
    """A spec with a secret in every text; a few texts have a syntax, and the secret is a part of it."""
    found = edit(spec(), choices)
    for option in options():
        for value in (TEXT, (TEXT,), {"A": TEXT}, json.dumps({"A": TEXT}), f"A={TEXT}", f"{SECRET}.yaml"):
            with suppress(ValueError):
                found = edit(found, {option.name: value} if option.kind in ("str", "list", "table") else {})
                break
    return found


def planted(tmp_path: Path, choices: dict[str, Any]) -> Run:
    """A run with a secret in each option that can have one, and in each text of the machine, the model and the end."""
    found = with_secrets(choices)
    gpu = Gpu(0, f"{TEXT} A100-SXM4-80GB", 80 * GIB, 79 * GIB, (8, 0), None, (TEXT,), TEXT)
    machine = Machine("cuda", (gpu,), versions={"torch": f"2.13.0+{SECRET}", SECRET: "1"}, python=TEXT, name=TEXT)
    config = {**BUILTIN_MODELS["tiny-llama"].config, "architectures": [TEXT], "hidden_act": TEXT, "dtype": TEXT}
    shape = replace(from_config(config), model_type=TEXT, activation=TEXT, dtype=TEXT)
    planned = report_on(Case(found, machine, InputFacts(shape=shape, token_lengths=(3, 5, 8))))
    run = Run.create(tmp_path / SECRET, TEXT, planned.plan, datetime(2026, 1, 1), {"model": TEXT}, planned.expected)
    (run.path / SPEC).write_text(dump(found))
    estimate = run.estimate()
    estimate["rows"].append({"name": TEXT, "bytes": 7, "formula": TEXT, "where": TEXT})
    estimate["conditions"]["machine"] |= {"cpu": f"{TEXT} Xeon(R) 8480+", "driver_version": TEXT, "device": TEXT}
    estimate["conditions"]["machine"]["cores"] = TEXT
    (run.path / ESTIMATE).write_text(json.dumps({**estimate, TEXT: TEXT, "device_bytes": TEXT}))
    ended(run, end="failed", exit_code=1, cause=TEXT, error=TEXT)
    (run.path / "log.txt").write_text(f"Traceback (most recent call last):\n{TEXT}Error: {TEXT}\n")
    ranks = [{"host": TEXT, "device": TEXT, "peak": 3 * GIB, "cores": TEXT, TEXT: 1, "power": math.nan}]
    (run.path / MONITOR).write_text(json.dumps({"ranks": ranks, "step_seconds": {"p50": TEXT, "p95": 2}}))
    (run.path / PROGRESS).write_text(json.dumps({"text": TEXT, "phase": TEXT, "step": 3, "step_seconds": 0.5}))
    (run.path / RESULT).write_text(json.dumps({"samples": [{"prompt": TEXT}], "tokens": TEXT, "model": TEXT}))
    return run


@pytest.mark.parametrize("choices", CHOICES, ids=range(len(CHOICES)))
def test_no_text_of_a_run_is_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    monkeypatch.setenv("MY_SETTING", TEXT)
    run = planted(tmp_path, choices)
    set_texts = [name for name, value in visible(spec_of(run)).items() if SECRET in str(value)]
    assert len(set_texts) > 4 and SECRET in (run.path / ESTIMATE).read_text(), "the secrets are planted"
    found = measurement_report.build(run)
    text = measurement_report.as_text(found)
    assert "s3cr" not in text.lower() and "acme" not in text.lower() and run.id not in text
    assert found["texts_left_out"].keys() >= set(set_texts)
    assert found["hardware"]["gpus"] == [
        {"name": "A100 SXM4 80GB", "total_bytes": 80 * GIB, "free_bytes": 79 * GIB, "capability": [8, 0]}
    ]
    assert found["hardware"]["cpu"] == "Xeon R 8480+" and found["software"]["torch"] == "2.13.0"
    assert found["hardware"]["detected"] is False and found["hardware"]["device"] == OTHER
    assert found["model"]["model_type"] == found["model"]["activation"] == found["model"]["dtype"] == OTHER
    assert found["end"] == {"state": "failed", "failure": OTHER, "exit_code": 1}
    assert found["measured"]["load"] == [None] and found["measured"]["allocated_bytes"] == [3 * GIB]
    assert found["predicted"]["memory"]["items"][-1] == {"item": OTHER, "where": OTHER, "bytes": 7}


def spec_of(run: Run) -> Any:
    return load((run.path / SPEC).read_text())


def test_every_option_is_a_number_a_choice_or_left_out() -> None:
    """A new option cannot leak: texts and lists have no kind, and only choices of the registry have words."""
    for option in options():
        is_free = option.kind in ("str", "list", "table", "datasets") or option.name.endswith(".builtin")
        assert (option.name in OPTIONS) != is_free, option
        if not is_free:
            found = allowed({"options": {option.name: TEXT}}) or {"options": {}}
            assert found["options"].get(option.name) in (None, OTHER)
    everything = allowed(_texts(SCHEMA))
    assert SECRET not in json.dumps(everything) and OTHER in json.dumps(everything)


def _texts(schema: Any) -> Any:
    """A report in which each value is a secret."""
    if isinstance(schema, list):
        return [_texts(schema[0])]
    return {name: _texts(part) for name, part in schema.items()} if isinstance(schema, dict) else TEXT


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", "Intel R Xeon R Platinum 8480+ CPU 2.00GHz"),
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763 64-Core Processor"),
        ("GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 Laptop GPU"),
        ("H100 80GB HBM3", "H100 80GB HBM3"),
        ("A100-SXM4-40GB", "A100 SXM4 40GB"),
        ("Apple M2 Max", "Apple M2 Max"),
        ("L40S", "L40S"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "Intel R Core TM i9 13900K"),
        ("MI300X of Jane Doe, gpu01.acme.org", "MI300X"),
        ("Max's A100 on ip-10-0-0-12 or 10-0-0-12", "A100"),
    ],
)
def test_names_of_devices_keep_the_words_of_products(name: str, kept: str) -> None:
    assert device_name(name) == kept


def test_versions_keep_no_private_part() -> None:
    assert version("2.13.0+cu130") == "2.13.0+cu130" and version("0.2.dev3+gacme") == "0.2.dev3"
    assert version("my fork") is None


def test_every_item_of_the_estimates_has_a_name() -> None:
    """An item whose name the format does not know would be "other"."""
    for preset in presets():
        expected = report_on(Case(preset.spec, preset.machine, InputFacts(shape=shape_of(), cpu=CPU))).expected or {}
        found = allowed({"predicted": {"memory": measurement_report._memory(expected)}})["predicted"]
        found |= allowed({"predicted": {"time": measurement_report._time(expected.get("time") or {})}})["predicted"]
        assert OTHER not in json.dumps(found), preset.name


def shape_of() -> Any:
    return from_config({**BUILTIN_MODELS["smollm2-135m-instruct"].config})


def test_ratios_of_a_file_are_those_of_the_run(tmp_path: Path) -> None:
    """The file alone is enough: for the comparison of the run's page, and for the same with the formulas of today."""
    run = measured(tmp_path, 1.2, 0.9)
    (tmp_path / "m.json").write_text(measurement_report.as_text(measurement_report.build(run)))
    found = measurement_report.read(tmp_path / "m.json")
    time, memory = measure_time(run), measure(run)
    assert time and memory
    ratios = measurement_report.ratios(found)
    assert (ratios["time"], ratios["memory"]) == pytest.approx((time.ratio, memory.ratio))
    assert ratios_now(found) == pytest.approx({"memory": 0.9, "time": 1.2}, rel=1e-3)


def test_a_report_is_enough_to_predict_again(tmp_path: Path) -> None:
    """On GPUs too: machine, model, lengths and options of the file give the same estimates."""
    lengths = tuple(range(20, 820, 8))
    options = {"parallel.strategy": "fsdp2", "launch.nproc_per_node": 2, "train.per_device_train_batch_size": 3}
    facts = InputFacts(shape=QWEN_7B, token_lengths=lengths, num_examples=100)
    planned = report_on(Case(edit(spec(), {**options, "logging.run_name": TEXT}), TWO_H100, facts))
    run = Run.create(tmp_path, "gpus", planned.plan, datetime(2026, 1, 1), planned.about, planned.expected)
    ended(run, end="done", exit_code=0)
    peaks = [planned.estimate.device_bytes] * 2
    (run.path / RESULT).write_text(json.dumps({"peak_bytes": peaks, "reserved_bytes": peaks, "device_bytes": peaks}))
    again = predicted_now(measurement_report.build(run))
    assert again.expected and planned.expected and again.estimate.device_bytes == planned.estimate.device_bytes
    assert again.expected["measured_bytes"] == planned.expected["measured_bytes"]
    assert again.time.step_seconds == pytest.approx(planned.time.step_seconds, rel=0.02) and again.time.step_seconds


@pytest.mark.parametrize("name", GPU_MODELS)
def test_gpus_are_recognized_in_a_report(name: str) -> None:
    assert gpu_model(device_name(name) or "") == gpu_model(name)


def measured(root: Path, time: float, memory: float) -> Run:
    planned = report()
    run = made(root, planned, time)
    peak = round(run.estimate()["measured_bytes"] * memory)
    result = json.loads((run.path / RESULT).read_text())
    (run.path / RESULT).write_text(json.dumps({**result, "peak_bytes": [peak - 1, peak], "host_bytes": [1, 2]}))
    return run


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_reports_of_real_runs(path: Path) -> None:
    """A change of the formulas that moves an estimate far away from a real measurement."""
    found = measurement_report.read(path)
    assert 0.5 < ratios_now(found)["memory"] < 1.3
    assert found == allowed(json.loads(path.read_text())), "the file has only what the format permits"


def test_the_command_prints_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, output = measured(tmp_path / "runs", 1.0, 1.0), tmp_path / "out.json"
    arguments = ["report-measurement", run.id, "--runs", str(tmp_path / "runs"), "--output", str(output)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out == output.read_text() and "memory 1.00" in printed.err
    assert main(arguments) == 2 and "was not overwritten" in capsys.readouterr().err
    response = client(tmp_path / "runs").get(f"/api/runs/{run.id}/measurement.json")
    assert response.text == printed.out and run.id not in response.headers["content-disposition"]


def test_a_run_without_a_measurement_has_no_report(tmp_path: Path) -> None:
    run = made(tmp_path, report(), 1.0)
    for file in (RESULT, PROGRESS, "metrics.jsonl"):
        (run.path / file).unlink()
    (run.path / MONITOR).write_text(json.dumps({"ranks": [{"host": "a"}, {}]}))
    with pytest.raises(RunError, match="has measured neither memory nor the time of a step"):
        measurement_report.build(run)
    assert client(tmp_path).get(f"/api/runs/{run.id}/measurement.json").status_code == 409


def test_other_files_are_no_reports(tmp_path: Path) -> None:
    for text, problem in (
        ("{}", "its format is not"),
        ('{"format": "footplate-measurement", "version": 2}', "unsupported format version; expected 1"),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=problem):
            measurement_report.read(tmp_path / "x.json")
