"""Tests on GPUs (`make gpu`): losses equal those of one process, the requested kernels run, memory matches the
estimate, and throughput matches TRL's trainer.

Each test runs on `cuda` (marker gpu), and with a tiny model on a CPU (marker soak).
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from gpu_cases import (
    CASES,
    ONE_DEVICE,
    PLATFORMS,
    SEVERAL_DEVICES,
    TRACED,
    TrainedCases,
    missing_device,
    prepared_cases,
    run_to_completion,
)
from gpu_report import introduction, table, write_reports, write_section
from measured_runs import FOLDER
from training_runs import losses, read_metrics, result

from backend.machine import probe
from backend.paths import HOME
from backend.runs.folder import ALIVE, Run
from backend.tasks import measurement_report

DEVICE_TYPES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.soak)]
WARMUP_STEPS = 3  # steps that are not timed, while kernels are selected


@pytest.fixture(scope="module", params=DEVICE_TYPES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedCases]:
    if reason := missing_device(request.param):
        pytest.skip(reason)
    with prepared_cases(PLATFORMS[request.param], tmp_path_factory.mktemp(request.param)) as cases:
        yield cases


@pytest.fixture
def document(trained: TrainedCases) -> Path:
    """docs/gpu.md; on a CPU, a temporary file."""
    return HOME / "docs/gpu.md" if trained.platform.exact_peaks else trained.root / "gpu.md"


@pytest.mark.parametrize("name", CASES)
def test_losses_match_the_reference(trained: TrainedCases, name: str) -> None:
    actual = losses(trained.run(name)[0])
    assert min(actual.values()) < actual[1], "the loss never decreased"
    if CASES[name].reference == "plain":
        plain_losses = losses(trained.run("plain")[0])
        assert plain_losses[10] < 0.9 * plain_losses[1], "the loss must change for this test to mean anything"
    assert trained.loss_error(name) <= CASES[name].loss_tolerance


@pytest.mark.parametrize("name", CASES)
def test_each_rank_holds_its_shard(trained: TrainedCases, name: str) -> None:
    case, platform, run_result = CASES[name], trained.platform, result(trained.run(name)[0])
    parameters = result(trained.run(case.reference)[0])["parameters"]
    assert len(run_result["ranks"]) == len(run_result["optimizer"]) == len(run_result["peak_bytes"]) == case.ranks
    for rank in run_result["ranks"]:
        assert (rank["engine"], rank["zero_stage"]) == (platform.engine_names.get(case.engine, case.engine), case.stage)
        assert rank["optimizer_class"] == case.optimizer_class
        assert rank["backend"] == ("" if case.engine == "NO" else platform.backend)
        if "method.quantization" in case.changes:
            assert rank["local_parameters"] < 0.9 * parameters, "two 4-bit weights per byte"
            whole = result(trained.run("qlora")[0])["ranks"][0]["local_storage_bytes"]
            assert rank["local_storage_bytes"] == pytest.approx(whole / case.ranks, rel=0.01)
            continue
        assert rank["local_parameters"] == pytest.approx(parameters / case.shards[0], rel=0.01)
        if case.changes.get("method.kind") != "lora":
            assert rank["local_optimizer_elements"] == pytest.approx(2 * parameters / case.shards[1], rel=0.02), (
                "two moments"
            )


def test_8bit_optimizer_state_is_smaller(trained: TrainedCases) -> None:
    small, large = (result(trained.run(name)[0])["optimizer"][0] for name in ("adamw-8bit", "plain"))
    assert small["class"].startswith("bitsandbytes.")
    assert small["bytes"] < 0.5 * large["bytes"], "the state of the embeddings stays in 32 bits"
    paged = result(trained.run("adamw-paged")[0])["optimizer"][0]
    assert paged["class"].startswith("bitsandbytes.")
    assert paged["bytes"] == pytest.approx(large["bytes"], rel=0.01)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saved_bytes is not None])
def test_peak_is_lower_than_the_reference(trained: TrainedCases, name: str) -> None:
    case, parameters = CASES[name], result(trained.run("plain")[0])["parameters"]
    peaks = [max(result(trained.run(case_name)[0])["peak_bytes"]) for case_name in (case.reference, name)]
    saved = (peaks[0] - peaks[1]) / parameters
    print(f"{name}: {saved:.1f} bytes per parameter less than {case.reference}")
    if trained.platform.exact_peaks:
        assert saved >= (case.saved_bytes or 0)


@pytest.mark.parametrize("name", TRACED)
def test_requested_kernels_run(trained: TrainedCases, name: str) -> None:
    """The profiler must show the requested operators and kernels, and no silent replacement."""
    operators = trained.traced_operators(name)
    for pattern in CASES[name].operators:
        assert any(re.search(pattern, operator) for operator in operators), f"no {pattern} among {operators}"
    for pattern in CASES[name].forbidden_operators:
        assert not [operator for operator in operators if re.search(pattern, operator)]


@pytest.mark.parametrize("name", CASES)
def test_estimate_is_within_its_error_bounds(trained: TrainedCases, name: str) -> None:
    low, high = trained.platform.error_bounds
    print(f"{name}: {trained.error(name):+.0%}")
    assert low <= trained.error(name) <= high


@pytest.mark.parametrize(("title", "names"), [("One device", ONE_DEVICE), ("Several devices", SEVERAL_DEVICES)])
def test_measurements_are_written_to_the_document(
    trained: TrainedCases, document: Path, title: str, names: dict[str, object]
) -> None:
    if all(trained.skip_reason(name) for name in names):
        pytest.skip(f"{title}: {trained.skip_reason(next(iter(names)))}")
    write_section(document, introduction(trained), title, table(trained, list(names)))
    reports = FOLDER if trained.platform.exact_peaks else trained.root / "measurements"
    for path in write_reports(trained, list(names), reports):
        assert measurement_report.ratios(measurement_report.read(path)).keys() >= {"memory"}, path
    written = document.read_text()
    assert written.count("\n| plain |") <= 1
    assert all(f"| {name} |" in written for name in names)


def test_throughput_matches_trl_alone(trained: TrainedCases, document: Path) -> None:
    """The same model, dataset and steps, alternating, so that thermal throttling affects both."""
    platform, ours, baseline = trained.platform, [], []
    report = trained.report("plain", **{"train.max_steps": platform.steps})
    for number in range(platform.pairs):
        folder = run_to_completion(trained.root / "throughput", f"footplate-{number}", report)
        run_metrics = [point for point in read_metrics(folder) if "loss" in point]
        ours.append(steps_per_second([point["time"] for point in run_metrics]))
        baseline_result = train_baseline(trained, trained.root / f"baseline-{number}")
        baseline.append(steps_per_second(baseline_result["times"]))
        # The order of the examples differs, so the losses are compared with a wide tolerance.
        assert baseline_result["losses"][0] == pytest.approx(run_metrics[0]["loss"], rel=0.02), (
            "the two trainings differ"
        )
        assert baseline_result["losses"][-1] == pytest.approx(run_metrics[-1]["loss"], rel=0.1), (
            "the two trainings differ"
        )
    ratio = statistics.median(a / b for a, b in zip(ours, baseline, strict=True))
    lines = [
        f"| steps per second | {' | '.join(f'{n + 1}' for n in range(platform.pairs))} |",
        "|---" * (1 + len(ours)) + "|",
    ]
    for label, values in (("Footplate", ours), ("TRL's SFTTrainer alone", baseline)):
        lines.append(f"| {label} | {' | '.join(f'{value:.3f}' for value in values)} |")
    body = "\n".join([*lines, "", f"Ratio of the pairs, median: {ratio:.3f}."])
    print(body)
    write_section(document, introduction(trained), "Throughput", body)
    assert ratio >= platform.min_speed_ratio


def steps_per_second(times: list[float]) -> float:
    """Steps per second after the warm-up steps."""
    return (len(times) - WARMUP_STEPS) / (times[-1] - times[WARMUP_STEPS - 1])


def train_baseline(trained: TrainedCases, folder: Path) -> dict[str, list[float]]:
    platform, report = trained.platform, trained.report("plain")
    folder.mkdir()
    request = {
        "family": platform.device_type,
        "model": str(trained.model),
        "rows": str(trained.data),
        "steps": platform.steps,
    }
    request |= {"batch": 4, "length": platform.length, "rate": platform.rate}
    (folder / "request.json").write_text(json.dumps(request))
    trained.run_script(folder, report, "trl_baseline.py", ".")
    return dict(json.loads((folder / "result.json").read_text()))


@pytest.mark.parametrize("trained", DEVICE_TYPES[:1], indirect=True)
def test_selected_devices_are_used(trained: TrainedCases) -> None:
    """By the driver's memory counters: only the second GPU fills up."""
    if len(trained.machine.gpus) < 2:
        pytest.skip("two GPUs are required")
    if reason := trained.skip_reason("plain"):
        pytest.skip(reason)
    report = trained.report("plain", **{"launch.devices": (1,)})
    assert report.plan.env["CUDA_VISIBLE_DEVICES"] == "1"
    before = [gpu.free_bytes for gpu in probe(HOME).gpus]
    peak_used = [0] * len(before)
    run = Run.create(trained.root / "named", "second", report.plan, datetime.now())
    run.start()
    while run.state in ALIVE:
        now = [gpu.free_bytes for gpu in probe(HOME).gpus]
        peak_used = [max(a, free_before - free) for a, free_before, free in zip(peak_used, before, now, strict=True)]
        time.sleep(0.1)
    assert run.state == "done", run.failure()
    assert peak_used[1] > 0.5 * report.estimate.device_bytes
    assert peak_used[0] < 2**30
