"""data.streaming: the tokens are those of prepared data, ranks share them, and a resumed run goes on exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, rank_count, write_run
from parameters import soak_except
from training_runs import (
    REORDERING_TOLERANCE,
    log_text,
    losses,
    make_spec,
    read_metrics,
    result,
    same_losses,
)

from backend import data as data_files
from backend.config import RunSpec
from backend.config.options import edit
from backend.runs import SKIP_CHECKS
from backend.train import data, examples, model, streaming
from backend.train.run_log import TrainError

TEXT = "The train leaves late. "


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    """Two files with 25 examples each; 5 of these 50 have no trained token within max_length."""
    for name, numbers in (("a", range(25)), ("b", range(25, 50))):
        rows = [{"prompt": f"{n}? " + TEXT * 40 * (n % 10 == 9), "completion": TEXT + str(n)} for n in numbers]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (root / "hub").mkdir()
    (root / "hub/train.jsonl").write_text((root / "a.jsonl").read_text())
    return root


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SHARE", 8)


def spec_of(folder: Path, **changes: Any) -> RunSpec:
    files = (str(folder / "a.jsonl"), str(folder / "b.jsonl"))
    streams = {"data.source": "files", "data.files": files, "data.streaming": True, "data.validation": "none"}
    return make_spec({"data.max_samples": 0, "data.max_length": 64, **streams, **changes})


def load_tokenizer(spec: RunSpec, tiny: Path) -> Any:
    return model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True}))


def prepare(spec: RunSpec, tokenizer: Any) -> tuple[data.PreparedData, list[str]]:
    lines: list[str] = []
    return data.prepare(spec, tokenizer, lambda done, of: True, lines.append), lines


def sequences(stream: streaming.Stream) -> Iterator[tuple[str, Any]]:
    """The sequences as JSON, and the place after each."""
    for sequence in stream:
        place = sequence.pop(streaming.NEXT)
        yield json.dumps(sequence), place


def one_pass(stream: streaming.Stream, number: int = 0) -> list[str]:
    found = []
    for text, place in sequences(stream):
        if place.number > number:
            return found
        found += [text] if place.number == number else []
    return found


HUB = {"data.source": "hub", "data.format": "prompt_completion"}


@pytest.mark.parametrize("changes", [{}, {"train.stage": "pretraining"}, {"data.max_samples": 17}, HUB])
def test_a_pass_has_the_prepared_sequences(
    folder: Path, tiny: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
    spec = spec_of(folder, **{"data.hub_id": str(folder / "hub"), **changes})
    tokenizer = load_tokenizer(spec, tiny)
    # The first 17 examples; without data.streaming it would be others.
    prepared, _ = prepare(edit(spec, {"data.streaming": bool(spec.data.max_samples)}), tokenizer)
    expected = sorted(map(json.dumps, prepared.train))
    first, second = (one_pass(streaming.Stream(spec, tokenizer), number) for number in (0, 1))
    assert sorted(first) == sorted(second) == expected
    assert first != second and expected not in (first, second)
    ranks = [one_pass(streaming.Stream(spec, tokenizer, rank, 3)) for rank in range(3)]
    assert sorted(text for each in ranks for text in each) == expected
    assert min(map(len, ranks)) >= len(expected) // 4


@pytest.mark.parametrize("changes", [{}, {"data.packing": True}, {"train.stage": "pretraining"}])
def test_a_stream_goes_on_at_each_place(folder: Path, tiny: Path, changes: dict[str, Any]) -> None:
    spec = spec_of(folder, **changes)
    tokenizer = load_tokenizer(spec, tiny)
    whole = list(islice(sequences(streaming.Stream(spec, tokenizer, 1, 2)), 40))
    assert len({(place.number, place.start) for _, place in whole}) > 3
    for taken in range(1, 40, 4):
        resumed = streaming.Stream(spec, tokenizer, 1, 2)
        resumed.place = streaming.Place(**json.loads(json.dumps(asdict(whole[taken - 1][1]))))
        assert list(islice(sequences(resumed), 40 - taken)) == whole[taken:]


def test_packed_sequences_hold_whole_examples(folder: Path, tiny: Path) -> None:
    spec = spec_of(folder)
    tokenizer = load_tokenizer(spec, tiny)
    packed = [json.loads(text) for text in one_pass(streaming.Stream(edit(spec, {"data.packing": True}), tokenizer))]
    parts = []
    for row in packed:
        ids = iter(row["input_ids"])
        parts += [list(islice(ids, length)) for length in row["seq_lengths"]]
    assert sorted(parts) == sorted(
        json.loads(text)["input_ids"] for text in one_pass(streaming.Stream(spec, tokenizer))
    )
    assert len(packed) < len(parts) / 1.5 and max(len(row["input_ids"]) for row in packed) <= 64


def test_each_of_many_ranks_gets_examples(folder: Path, tiny: Path) -> None:
    spec = spec_of(folder, **{"data.max_samples": 2})
    streams = [streaming.Stream(spec, load_tokenizer(spec, tiny), rank, 3) for rank in range(3)]
    assert all(len(list(islice(stream, 5))) == 5 for stream in streams)


def test_validation_examples_are_never_trained(folder: Path, tiny: Path) -> None:
    split = {"data.validation": "split", "data.validation_split": 0.3, "eval.strategy": "steps", "train.seed": 7}
    spec = spec_of(folder, **split)
    tokenizer = load_tokenizer(spec, tiny)
    prepared, lines = prepare(spec, tokenizer)
    trained, evaluated = one_pass(streaming.Stream(spec, tokenizer)), set(map(json.dumps, prepared.validation or ()))
    whole, _ = prepare(spec_of(folder), tokenizer)
    assert set(trained) | evaluated == set(map(json.dumps, whole.train)) and not set(trained) & evaluated
    assert 5 < len(evaluated) < 25 and sorted(trained) == sorted(map(json.dumps, prepared.train))
    assert any("in the first 50 examples; later ones are not used" in line for line in lines)
    with pytest.raises(TrainError, match="none of the first 50 examples is a validation example"):
        prepare(edit(spec, {"data.validation_split": 1e-9}), tokenizer)


def test_only_the_beginning_is_read(folder: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts after its first examples, and reads on as it trains."""
    read = [0]

    def count_rows(*args: Any, **named: Any) -> Iterator[Any]:
        for row in data_files.read_examples(*args, **named):
            read[0] += 1
            yield row

    monkeypatch.setattr(examples, "read_examples", count_rows)
    monkeypatch.setattr(examples, "FIRST", 5)
    spec = spec_of(folder)
    tokenizer = load_tokenizer(spec, tiny)
    assert len(prepare(spec, tokenizer)[0].train) == 5 and read[0] < 20
    stream = iter(streaming.Stream(spec, tokenizer))
    for expected in (8, 16):
        read[0] = 0 if expected == 8 else read[0]
        list(islice(stream, 7))
        assert read[0] == expected


def test_bad_examples_are_named_or_counted(folder: Path, tiny: Path) -> None:
    (folder / "bad.jsonl").write_text((folder / "a.jsonl").read_text() + '{"prompt": "no completion"}\nnot JSON\n')
    spec = spec_of(folder, **{"data.files": (str(folder / "bad.jsonl"),)})
    tokenizer = load_tokenizer(spec, tiny)
    batches = streaming.Batches(streaming.Stream(spec, tokenizer), 4, list, 0)
    with pytest.raises(TrainError, match=r"bad\.jsonl, line 26"):
        list(batches)
    stream = streaming.Stream(edit(spec, {"data.on_bad_example": "skip"}), tokenizer)
    places = [place for _, place in islice(sequences(stream), 60)]
    counts = next(place.counts for place in places if place.number == 1)
    assert counts["examples"] >= 25 and counts["dropped"] >= 2 and counts["skipped"] == 2
    assert sum(key.startswith("skipped ") for key in places[-1].counts) == 2


def test_another_number_of_ranks_goes_on_with_the_next_block(tiny: Path, folder: Path) -> None:
    spec, lines = spec_of(folder), list[str]()
    places = [streaming.Place(1, 16, 3, {"examples": 30}), streaming.Place(1, 32, 1, {"examples": 40})]
    streams = [streaming.Stream(spec, load_tokenizer(spec, tiny), rank, 3) for rank in range(3)]
    found = [streaming._own_place(places, stream, lines.append) for stream in streams]
    assert found == [streaming.Place(1, 48, 0, {"examples": 70}), *[streaming.Place(1, 48)] * 2]
    assert "saved with 2 data-parallel processes, and now there are 3" in lines[0]


RESUMED = {
    "launch.nproc_per_node": 2,
    "train.max_steps": 6,
    "lora.dropout": 0.1,
    "save.strategy": "steps",
    "save.steps": 2,
    "save.total_limit": 0,
}
RUNS = {
    "accumulation": {
        "parallel.strategy": "ddp", "train.gradient_accumulation_steps": 3, "train.dataloader_num_workers": 1,
        "data.validation": "split", "data.validation_split": 0.2, "eval.strategy": "steps", "eval.steps": 3,
    },
    "packed": {"data.packing": True, "parallel.strategy": "fsdp2"},
    "zero2": {"parallel.strategy": "zero2", "method.kind": "full"},
    "zero3": {"parallel.strategy": "zero3", "train.dataloader_num_workers": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", soak_except(RUNS, ("packed",)))
def test_a_resumed_run_has_the_same_losses(folder: Path, fork_server: ForkServer, tmp_path: Path, name: str) -> None:
    spec = spec_of(folder, **(RESUMED | RUNS[name]))
    run = fork_server.train(tmp_path / "run", spec, rank_count(spec))
    expected, streamed = losses(run), [line for line in log_text(run).splitlines() if "Streamed" in line]
    assert sorted(expected) == [*range(1, 7)] and len(streamed) == 1
    assert not any("epoch" in point for point in read_metrics(run)) and "Map:" not in log_text(run)
    fork_server.resume(run, 4, rank_count(spec))
    assert losses(run) == same_losses(expected)
    assert [line for line in log_text(run).splitlines() if "Streamed" in line][1][9:] == streamed[0][9:]
    if "eval.strategy" in RUNS[name]:
        assert result(run)["eval_loss"] > 0


def test_a_bad_example_ends_the_run(folder: Path, fork_server: ForkServer, root: Path) -> None:
    """The worker process finds it after some steps; the log names it, without a traceback."""
    rows = [json.dumps({"prompt": f"{n}?", "completion": "Late."}) for n in range(1500)]
    (root / "late.jsonl").write_text("\n".join([*rows, "not JSON"]))
    late = {"data.files": (str(root / "late.jsonl"),), "train.max_steps": 90, "train.dataloader_num_workers": 1}
    write_run(root / "late", spec_of(folder, **late, **{"logging.steps": 1, "train.per_device_train_batch_size": 50}))
    assert fork_server.run(root / "late", env={SKIP_CHECKS: "1"}) == 1
    *_, before, last = log_text(root / "late").splitlines()
    assert "step 20/90" in before and "late.jsonl, line 1501: is not valid JSON" in last


@pytest.mark.soak
def test_a_tensor_parallel_group_trains_on_the_same_examples(folder: Path, fork_server: ForkServer, root: Path) -> None:
    found = {}
    for strategy, ranks in (("tensor", 4), ("ddp", 2)):  # the model is sharded over two processes each
        changes = {"parallel.strategy": strategy, "launch.nproc_per_node": ranks, "method.kind": "full"}
        found[strategy] = losses(fork_server.train(root / strategy, spec_of(folder, **changes), ranks))
    assert found["tensor"] == same_losses(found["ddp"], REORDERING_TOLERANCE)


def test_losses_are_those_of_prepared_data(folder: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    """A batch has all examples, so that the order makes no difference."""
    (tmp_path / "few.jsonl").write_text("\n".join((folder / "b.jsonl").read_text().splitlines()[:4]))
    few = {"data.files": (str(tmp_path / "few.jsonl"),), "train.per_device_train_batch_size": 4}
    streamed, prepared = (
        fork_server.train(tmp_path / str(on), spec_of(folder, **few, **{"data.streaming": on})) for on in (True, False)
    )
    assert losses(streamed) == same_losses(losses(prepared), REORDERING_TOLERANCE)
