"""Several datasets in one run: each is read as it would be alone, mixed by weight, and evaluated on its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from training_runs import REORDERING_TOLERANCE, log_text, make_spec, read_metrics

from backend.config import RunSpec
from backend.config.options import edit, for_dataset
from backend.data import prepared
from backend.train import data, model, tokenize_examples
from backend.train.examples import select
from backend.train.preference_data import add_kl_completions
from backend.train.run_log import TrainError

HALVES = {"validation": "split", "validation_split": 0.5}
OTHER = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In Bern."}]
TWO_RANKS = {"parallel.strategy": "ddp", "launch.nproc_per_node": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.jsonl has messages, b.jsonl Alpaca's columns, c.jsonl texts, and pairs.jsonl pairs."""
    folder = tmp_path_factory.mktemp("datasets")
    question = {"role": "user", "content": "When does it leave?"}
    rows: dict[str, list[Any]] = {
        "a": [{"messages": [question, {"role": "assistant", "content": f"At {n}."}]} for n in range(20)],
        "b": [{"instruction": f"Count to {n}", "input": "", "output": "one two three " * n} for n in range(1, 11)],
        "c": [{"text": f"Train {n} is late. " * 9} for n in range(8)],
        "pairs": [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(9)],
    }
    for name, examples in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, examples)) + "\n")
    return folder


def spec_of(folder: Path, *names: str, **changes: Any) -> RunSpec:
    """A spec with these files as its datasets, without validation sets."""
    entries = [{"source": "files", "files": [str(folder / f"{name}.jsonl")], "validation": "none"} for name in names]
    return edit(make_spec({"data.max_samples": 0, "data.sources": json.dumps(entries)}), changes)


def prepare(spec: RunSpec, tiny: Path, longest: tuple[int, int] | None = None) -> tuple[data.PreparedData, list[str]]:
    tokenizer = model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True}))
    lines: list[str] = []
    return data.prepare(spec, tokenizer, lambda done, of: True, lines.append, longest), lines


def rows(dataset: Any) -> list[str]:
    return [json.dumps(row) for row in dataset]


@pytest.mark.parametrize("stage", ["sft", "pretraining"])
def test_each_dataset_has_the_tokens_that_it_has_alone(folder: Path, tiny: Path, stage: str) -> None:
    spec = spec_of(folder, "a", "b", "c", **{"train.stage": stage})
    alone = [rows(prepare(for_dataset(spec, n), tiny)[0].train) for n in range(3)]
    assert rows(prepare(spec, tiny)[0].train) == [row for each in alone for row in each]
    weighted = edit(spec, {"data.sources[1].weight": 2.5, "data.sources[2].weight": 0.5})
    found, lines = prepare(weighted, tiny)
    a, b, c = alone
    assert rows(found.train)[: len(a) + 2 * len(b)] == [*a, *b, *b]
    rest = rows(found.train)[len(a) + 2 * len(b) :]
    half = rest[len(b) // 2 :]
    assert set(rest[: len(b) // 2]) < set(b) and set(half) < set(c) and len(half) == len(c) // 2
    what = "example" if stage == "sft" else "sequence"
    assert f"Dataset 2 (b.jsonl): {5 * len(b) // 2} {what}s per epoch from {len(b)} (2.5x)." in lines


def test_interleaved_datasets(folder: Path, tiny: Path) -> None:
    spec = spec_of(folder, "a", "b", **{"data.mixing": "interleave_all_exhausted", "data.sources[1].weight": 2})
    alone = [rows(prepare(for_dataset(spec, n), tiny)[0].train) for n in range(2)]
    found = rows(prepare(spec, tiny)[0].train)
    assert [row for row in found if row in alone[0]] == alone[0]
    assert [row for row in found if row in alone[1]] == alone[1] * 4
    assert found[:20] != alone[0]
    until_first = rows(prepare(edit(spec, {"data.mixing": "interleave_first_exhausted"}), tiny)[0].train)
    assert sorted(row for row in until_first if row in alone[1]) == sorted(alone[1]) and len(until_first) == 15


def test_weights_that_make_an_epoch_endless(folder: Path, tiny: Path) -> None:
    spec = spec_of(folder, "a", "b", **{"data.mixing": "interleave_all_exhausted", "data.weight": 1e-4})
    with pytest.raises(TrainError, match=r"an epoch would have 200,020 examples, but the datasets have only 30"):
        prepare(spec, tiny)


def test_kto_shuffles_all_datasets(folder: Path, tiny: Path) -> None:
    kto = {"train.stage": "kto", "train.per_device_train_batch_size": 4}
    found = prepare(spec_of(folder, "pairs", "pairs", **kto), tiny)[0].train
    assert len(found) == 36 and {"KL_completion_ids", "completion_ids"} <= set(found.column_names)
    own, neighbors = found["completion_ids"][:4], found["KL_completion_ids"][:4]
    assert neighbors == [own[-1], *own[:-1]]  # within each batch
    nine = found.select_columns(["completion_ids"]).select(range(9))
    alone = add_kl_completions(nine, spec_of(folder, "pairs", "pairs", **kto))
    own, neighbors = alone["completion_ids"][4:], alone["KL_completion_ids"][4:]
    assert neighbors == [own[-1], *own[:-1]], "the ninth is not its own neighbor"
    halves = {f"data.sources[{n}].{key}": value for n in (0, 1) for key, value in HALVES.items()}
    evaluated = spec_of(folder, "pairs", "pairs", **kto, **halves, **{"eval.strategy": "steps"})
    validation = prepare(evaluated, tiny)[0].validation
    prompts = [tuple(ids) for ids in validation["prompt_ids"]]
    pairs = [one == other for one, other in zip(prompts[::2], prompts[1::2], strict=True)]
    assert not all(pairs), "the completions of a pair are not neighbors, whose KL divergence would be estimated"


def test_a_copy_in_another_dataset_is_dropped(folder: Path, tiny: Path) -> None:
    spec = spec_of(folder, "a", "b", "a", **{"data.drop_duplicates": True, "data.sources[2].max_samples": 0})
    alone = [for_dataset(spec, number).model_dump(mode="json") for number in range(3)]
    a, b, again = (tokenize_examples.inspect(each, "", "")["digests"] for each in alone)
    assert a == again and len({*a, *b}) == 30, "as the checks compare them"
    with pytest.raises(TrainError, match=r"Dataset 3 \(a.jsonl\): data.drop_duplicates: every example"):
        prepare(spec, tiny)
    (folder / "one.jsonl").write_text((folder / "a.jsonl").read_text() + json.dumps({"messages": OTHER}) + "\n")
    with pytest.raises(TrainError, match="only one example is left after"):
        split = {"data.drop_duplicates": True, **{f"data.sources[1].{key}": value for key, value in HALVES.items()}}
        prepare(spec_of(folder, "a", "one", **split), tiny)
    with (folder / "more.jsonl").open("w") as file:
        file.write((folder / "a.jsonl").read_text() + (folder / "a.jsonl").read_text().replace("At 3.", "Never."))
    found, lines = prepare(spec_of(folder, "a", "more", **{"data.drop_duplicates": True}), tiny)
    assert len(found.train) == 21
    assert "Dataset 2 (more.jsonl): 39 training examples dropped: equal to an earlier training example." in lines


@pytest.mark.parametrize(("name", "halves"), [("a", {}), ("a", HALVES), ("pairs", {})])
def test_an_example_is_no_copy_of_one_that_is_not_used(folder: Path, name: str, halves: dict[str, Any]) -> None:
    """The first dataset has most of its examples beyond max_samples: the second one trains on those."""
    changes = {f"data.sources[0].{key}": value for key, value in {**halves, "max_samples": 4}.items()}
    kto = {"train.stage": "kto"} if name == "pairs" else {}
    spec = spec_of(folder, name, name, **changes, **kto, **{"data.drop_duplicates": True})
    parts = [part for pair in select(spec) for part in pair]
    found = [number for part in parts for number in ({n // 2 for n in part.positions} if kto else part.positions)]
    assert len(parts[0]) == 4 and len(found) > 4
    assert sorted(found) == [*range(len((folder / f"{name}.jsonl").read_text().splitlines()))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data.sources[1].files": "nowhere.jsonl"}, "data.sources[1].files: nowhere.jsonl: does not exist."),
        ({"data.sources[1].format": "messages"}, "Dataset 2 (b.jsonl): "),
        ({"data.sources[1].validation": "split", "data.sources[1].files": "ONE"}, "data.sources[1].validation: only"),
        pytest.param(  # the library tries several times
            {"data.sources[1].source": "hub", "data.sources[1].hub_id": "no/such"},
            "data.sources[1].hub_id: no/such",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_an_error_names_the_dataset(folder: Path, tiny: Path, change: dict[str, Any], words: str) -> None:
    (folder / "one.jsonl").write_text((folder / "b.jsonl").read_text().splitlines()[0])
    change = {name: value.replace("ONE", str(folder / "one.jsonl")) for name, value in change.items()}
    with pytest.raises(TrainError) as error:
        prepare(edit(spec_of(folder, "a", "b"), change), tiny)
    assert words in str(error.value) and error.value.__cause__ is None  # the page shows the first of a chain


def test_a_rehearsal_has_the_longest_of_all_datasets(folder: Path, tiny: Path) -> None:
    found, _ = prepare(spec_of(folder, "a", "b"), tiny, longest=(3, 3))
    lengths = [len(row["input_ids"]) for row in found.train]
    every = [len(row["input_ids"]) for row in prepare(spec_of(folder, "a", "b"), tiny)[0].train]
    assert lengths == sorted(every, reverse=True)[:3]


def test_generations_are_of_each_dataset(folder: Path, tiny: Path) -> None:
    split = {"data.validation": "split", "data.sources[1].validation": "split", "eval.num_generations": 2}
    found, _ = prepare(spec_of(folder, "a", "b", **split), tiny)
    assert [Path(example.location.partition(",")[0]).name for example in found.eval_examples] == ["a.jsonl", "b.jsonl"]


def test_the_cache_knows_every_dataset(folder: Path, tiny: Path, tmp_path: Path) -> None:
    spec = spec_of(folder, "a", "b")
    tokenizer = model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True}))
    other = tmp_path / "other.jsonl"
    other.write_text((folder / "b.jsonl").read_text())
    with_other = edit(spec, {"data.sources[1].files": str(other)})
    changed = [
        spec,
        with_other,
        edit(spec, {"data.sources[1].weight": 2}),
        edit(spec, {"data.mixing": "interleave_all_exhausted"}),
    ]
    keys = [prepared.key_of(each, tokenizer) for each in changed]
    assert len(set(keys)) == len(keys)
    other.write_text(other.read_text() + '{"instruction": "x", "input": "", "output": "y"}\n')
    assert prepared.key_of(with_other, tokenizer) != keys[1] and prepared.key_of(spec, tokenizer) == keys[0]


def test_the_eval_loss_of_each_dataset(folder: Path, tiny: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    """It is that of a run with this dataset alone, on one process and on two; and the eval loss is that of all tokens,
    as if the validation sets were one."""
    changes = {
        "eval.strategy": "steps", "eval.steps": 1, "train.max_steps": 1, "train.learning_rate": 1e-12,
        "eval.per_device_eval_batch_size": 2, "data.max_length": 64,
    }  # fmt: skip
    names = ("a", "b", "c")
    files = {
        f"data.sources[{n}].{key}": value
        for n, name in enumerate(names)
        for key, value in (("validation", "files"), ("validation_files", str(folder / f"{name}.jsonl")))
    }
    mixed = spec_of(folder, *names, **files, **changes)
    more = {"data.sources[3].source": "files", "data.sources[3].files": str(folder / "a.jsonl")}
    mixed = edit(mixed, more | {"data.sources[3].validation": "none"})  # the last one has no validation examples

    def evaluated(name: str, spec: RunSpec, ranks: int = 0) -> dict[str, float]:
        run = fork_server.train(tmp_path / name, spec, ranks)
        (point,) = [point for point in read_metrics(run) if "eval_loss" in point]
        return {key: value for key, value in point.items() if key.startswith("eval_loss")}

    alone = [evaluated(name, for_dataset(mixed, n))["eval_loss"] for n, name in enumerate(names)]
    one, two = evaluated("mixed", mixed), evaluated("two", edit(mixed, TWO_RANKS), 2)
    assert len({round(loss, 3) for loss in alone}) == 3
    for found in (one, two):
        each = [found[f"eval_loss_{n}"] for n in (1, 2, 3)]
        assert each == pytest.approx(alone, rel=REORDERING_TOLERANCE)
        assert found["eval_loss"] == pytest.approx(one["eval_loss"], rel=REORDERING_TOLERANCE)
    parts = [prepare(for_dataset(mixed, n), tiny)[0].validation for n in range(3)]
    tokens = [sum(label != -100 for row in part or () for label in row["labels"][1:]) for part in parts]
    mean = sum(loss * count for loss, count in zip(alone, tokens, strict=True)) / sum(tokens)
    assert one["eval_loss"] == pytest.approx(mean, rel=REORDERING_TOLERANCE)
    assert f"(dataset 1: {one['eval_loss_1']:.4g}" in log_text(tmp_path / "mixed")
    assert not fork_server.leftover_processes()


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["dpo", "kto", "reward", "orpo"])
def test_the_eval_loss_of_each_dataset_of_preferences(
    folder: Path, tmp_path: Path, fork_server: ForkServer, stage: str
) -> None:
    """On two processes; each is that of a run with this dataset alone."""
    (folder / "others.jsonl").write_text((folder / "pairs.jsonl").read_text().replace("It is", "Perhaps it is"))
    changes = {
        "eval.strategy": "steps", "eval.steps": 1, "train.max_steps": 1, "train.learning_rate": 1e-12,
        "train.stage": stage, "eval.per_device_eval_batch_size": 2, "data.max_length": 64, **TWO_RANKS,
    }  # fmt: skip
    if stage not in ("dpo", "kto"):  # whose losses with an untrained adapter are constant
        changes["method.kind"] = "full"
    halves = {f"data.sources[{n}].{key}": value for n in (0, 1) for key, value in HALVES.items()}
    mixed = spec_of(folder, "pairs", "others", **halves, **changes)

    def evaluated(name: str, spec: RunSpec) -> dict[str, float]:
        (point,) = [p for p in read_metrics(fork_server.train(tmp_path / name, spec, 2)) if "eval_loss" in p]
        return {key: value for key, value in point.items() if key.startswith("eval_loss")}

    alone = [evaluated(str(n), for_dataset(mixed, n))["eval_loss"] for n in (0, 1)]
    found = evaluated("mixed", mixed)
    assert [found["eval_loss_1"], found["eval_loss_2"]] == pytest.approx(alone, rel=REORDERING_TOLERANCE)
    assert found["eval_loss"] == pytest.approx(sum(alone) / 2, rel=REORDERING_TOLERANCE)
    if stage not in ("dpo", "kto"):
        assert alone[0] != pytest.approx(alone[1], rel=5e-4)
