"""The proofs on GPUs: `make gpu`. Losses of one process, what really computes, memory as estimated, no time lost.

Each runs on `cuda` (marker gpu) and is rehearsed on the CPU by a tiny model (marker soak).
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
from devices import CASES, ONE, PLACES, SEVERAL, WATCHED, Trained, absent, launched, prepared
from measured import introduction, table, write_section
from trainings import losses, points, result

from backend.machine import probe
from backend.paths import HOME
from backend.runs.folder import ALIVE, Run

EACH = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.soak)]
WARM = 3  # steps in which kernels are chosen


@pytest.fixture(scope="module", params=EACH)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    if why := absent(request.param):
        pytest.skip(why)
    with prepared(PLACES[request.param], tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def document(trained: Trained) -> Path:
    """The rehearsal writes one too, but not where people read."""
    return HOME / "docs/gpu.md" if trained.place.exact else trained.root / "gpu.md"


@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_one_process(trained: Trained, name: str) -> None:
    told = losses(trained.run(name)[0])
    assert min(told.values()) < told[1], "it learned nothing"
    if CASES[name].like == "plain":
        one = losses(trained.run("plain")[0])
        assert one[10] < 0.9 * one[1], "losses that hardly move would prove nothing"
    assert trained.off(name) <= CASES[name].near


@pytest.mark.parametrize("name", CASES)
def test_each_device_holds_its_part(trained: Trained, name: str) -> None:
    case, place, told = CASES[name], trained.place, result(trained.run(name)[0])
    whole = result(trained.run(case.like)[0])["parameters"]
    assert len(told["ranks"]) == len(told["optimizer"]) == len(told["peak_bytes"]) == case.ranks
    for held in told["ranks"]:
        assert (held["engine"], held["zero_stage"]) == (place.names.get(case.engine, case.engine), case.stage)
        assert held["optimizer_class"] == case.steps_by
        assert held["backend"] == ("" if case.engine == "NO" else place.backend)
        if name == "qlora":
            assert held["local_parameters"] < 0.9 * whole, "two weights in a byte"
            continue
        assert held["local_parameters"] == pytest.approx(whole / case.parts[0], rel=0.01)
        if case.changes.get("method.kind") != "lora":
            assert held["local_optimizer_elements"] == pytest.approx(2 * whole / case.parts[1], rel=0.02), "two moments"


def test_state_of_8_bits_is_less(trained: Trained) -> None:
    small, large = (result(trained.run(name)[0])["optimizer"][0] for name in ("adamw-8bit", "plain"))
    assert small["class"].startswith("bitsandbytes.")
    assert small["bytes"] < 0.5 * large["bytes"], "embeddings keep theirs whole"
    paged = result(trained.run("adamw-paged")[0])["optimizer"][0]
    assert paged["class"].startswith("bitsandbytes.")
    assert paged["bytes"] == pytest.approx(large["bytes"], rel=0.01)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.saves is not None])
def test_it_takes_the_memory_that_it_promises(trained: Trained, name: str) -> None:
    case, whole = CASES[name], result(trained.run("plain")[0])["parameters"]
    peaks = [max(result(trained.run(each)[0])["peak_bytes"]) for each in (case.like, name)]
    saved = (peaks[0] - peaks[1]) / whole
    print(f"{name}: {saved:.1f} bytes a weight less than {case.like}")
    if trained.place.exact:
        assert saved >= (case.saves or 0)


@pytest.mark.parametrize("name", WATCHED)
def test_what_was_asked_for_computes(trained: Trained, name: str) -> None:
    """Nothing else in its place, without a word: the names are those of operators and kernels that really ran."""
    seen = trained.witnessed(name)
    for pattern in CASES[name].does:
        assert any(re.search(pattern, one) for one in seen), f"no {pattern} among {seen}"
    for pattern in CASES[name].never:
        assert not [one for one in seen if re.search(pattern, one)]


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_holds(trained: Trained, name: str) -> None:
    low, high = trained.place.error
    print(f"{name}: {trained.error(name):+.0%}")
    assert low <= trained.error(name) <= high


@pytest.mark.parametrize(("title", "names"), [("One device", ONE), ("Several devices", SEVERAL)])
def test_the_table_is_written(trained: Trained, document: Path, title: str, names: dict[str, object]) -> None:
    if all(trained.missing(name) for name in names):
        pytest.skip(f"{title}: {trained.missing(next(iter(names)))}")
    write_section(document, introduction(trained), title, table(trained, list(names)))
    written = document.read_text()
    assert written.count("\n| plain |") <= 1
    assert all(f"| {name} |" in written for name in names)


def test_no_time_is_lost_against_the_bare_trainer(trained: Trained, document: Path) -> None:
    """The same model, rows and steps, in turns, so that a machine that warms up slows both."""
    place, mine, bare = trained.place, [], []
    found = trained.judged("plain", **{"train.max_steps": place.steps})
    for number in range(place.pairs):
        folder = launched(trained.root / "pace", f"ours-{number}", found)
        told = [point for point in points(folder) if "loss" in point]
        mine.append(pace([point["time"] for point in told]))
        theirs = bare_trainer(trained, trained.root / f"bare-{number}")
        bare.append(pace(theirs["times"]))
        # The rows come in an order of their own, so only what both learn is compared.
        assert theirs["losses"][0] == pytest.approx(told[0]["loss"], rel=0.02), "another training"
        assert theirs["losses"][-1] == pytest.approx(told[-1]["loss"], rel=0.1), "another training"
    ratio = statistics.median(a / b for a, b in zip(mine, bare, strict=True))
    lines = [
        f"| steps a second | {' | '.join(f'{n + 1}' for n in range(place.pairs))} |",
        "|---" * (1 + len(mine)) + "|",
    ]
    for what, values in (("here", mine), ("TRL's SFTTrainer alone", bare)):
        lines.append(f"| {what} | {' | '.join(f'{value:.3f}' for value in values)} |")
    body = "\n".join([*lines, "", f"{ratio:.3f} times, the median of the pairs."])
    print(body)
    write_section(document, introduction(trained), "Throughput", body)
    assert ratio >= place.pace


def pace(times: list[float]) -> float:
    """Steps a second after the first ones."""
    return (len(times) - WARM) / (times[-1] - times[WARM - 1])


def bare_trainer(trained: Trained, folder: Path) -> dict[str, list[float]]:
    place, found = trained.place, trained.judged("plain")
    folder.mkdir()
    ask = {"family": place.family, "model": str(trained.model), "rows": str(trained.rows), "steps": place.steps}
    ask |= {"batch": 4, "length": place.length, "rate": place.rate}
    (folder / "ask.json").write_text(json.dumps(ask))
    trained.alone(folder, found, "bare.py", ".")
    return dict(json.loads((folder / "told.json").read_text()))


@pytest.mark.parametrize("trained", EACH[:1], indirect=True)
def test_the_devices_named_are_those_used(trained: Trained) -> None:
    """By the driver's word: the second GPU fills, the first does not."""
    if len(trained.machine.gpus) < 2:
        pytest.skip("two GPUs are needed")
    if why := trained.missing("plain"):
        pytest.skip(why)
    found = trained.judged("plain", **{"launch.devices": (1,)})
    assert found.plan.env["CUDA_VISIBLE_DEVICES"] == "1"
    before = [gpu.free_bytes for gpu in probe(HOME).gpus]
    most = [0] * len(before)
    run = Run.create(trained.root / "named", "second", found.plan, datetime.now())
    run.start()
    while run.state in ALIVE:
        now = [gpu.free_bytes for gpu in probe(HOME).gpus]
        most = [max(a, was - free) for a, was, free in zip(most, before, now, strict=True)]
        time.sleep(0.1)
    assert run.state == "done", run.failure()
    assert most[1] > 0.5 * found.estimate.device_bytes
    assert most[0] < 2**30
