"""Several datasets: how they are written, mixed and checked."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from backend import presets
from backend.config import RunSpec, Source
from backend.config.options import (
    SpecError,
    by_name,
    edit,
    effective,
    for_dataset,
    masked_value,
    options_with_secrets,
    text,
)
from backend.data import mixed, mixed_counts
from backend.inspect import InputFacts, datasets, inspect_inputs, shares
from backend.inspect.datasets import combined
from backend.rules import check
from backend.rules.examples import LAPTOP
from webui.api.checking import findings_json, parse_form

YAML = """
data:
  max_length: 256
  sources:
  - source: files
    files:
    - a.jsonl
    weight: 2.0
  - source: files
    files:
    - b.jsonl
    format: prompt_completion
    prompt_column: q
  - source: builtin
"""


def test_the_first_dataset_is_that_of_the_section():
    spec = presets.load(YAML)
    assert (spec.data.files, spec.data.weight, spec.data.max_length) == (("a.jsonl",), 2.0, 256)
    assert spec.data.sources[0] == Source()
    assert [source.files for source in spec.data.datasets] == [("a.jsonl",), ("b.jsonl",), ()]
    outside = "data: {source: files, files: [a.jsonl], weight: 2, max_length: 256, sources: [{}, "
    assert presets.load(YAML) == presets.load(
        outside + "{source: files, files: [b.jsonl], format: prompt_completion, prompt_column: q}, {}]}"
    )


def test_the_name_of_several_datasets_is_short():
    names = [
        edit(presets.load(YAML), {"data.sources[1].files": files}).data.name for files in ("b.jsonl", "b.jsonl\nc")
    ]
    assert names == ["a.jsonl + b.jsonl + 1 more", "a.jsonl + b.jsonl and 1 more + 1 more"]
    assert presets.load("data: {sources: [{files: [a.jsonl]}, {hub_id: x/y}]}").data.name == "a.jsonl + x/y"


def test_what_is_written_has_all_datasets_and_is_read_as_the_same():
    spec = effective(presets.load(YAML))
    assert presets.dump(spec).strip() == YAML.strip()
    assert presets.load(presets.dump(spec)) == spec
    assert edit(RunSpec(), {"data.sources": text(by_name()["data.sources"], spec.data.sources)}).data.sources == (
        spec.data.sources
    )


def test_one_dataset_is_written_as_before():
    spec = presets.load("data: {sources: [{source: files, files: [a.jsonl], weight: 3}]}")
    assert spec.data.sources == () and presets.dump(effective(spec)) == (
        "data:\n  source: files\n  files:\n  - a.jsonl\n"
    )


def test_hidden_options_of_a_dataset_have_no_effect():
    spec = edit(presets.load(YAML), {"data.sources[2].prompt_column": "q", "data.sources[1].label_column": "l"})
    assert effective(spec) == effective(presets.load(YAML))


@pytest.mark.parametrize(
    ("patch", "value"),
    [
        ({"data.sources[1].weight": "3"}, 3.0),
        ({"data.sources[1].weight": 3, "data.sources[0].weight": 1}, 3.0),
        ({"data.sources": '[{"files": ["x"]}, {"weight": 3}]'}, 3.0),
        ({"data.sources": "- {}\n- weight: 3"}, 3.0),
        ({"data.sources": '[{}, {"weight": 2}]', "data.sources[1].weight": 3}, 3.0),
    ],
)
def test_an_option_of_a_dataset_is_set(patch, value):
    assert edit(presets.load(YAML), patch).data.sources[1].weight == value


def test_the_next_dataset_is_added():
    spec = edit(RunSpec(), {"data.sources[1].source": "files", "data.sources[1].files": "b.jsonl\nc.jsonl"})
    assert spec.data.source == "builtin" and spec.data.sources[1].files == ("b.jsonl", "c.jsonl")
    assert edit(spec, {"data.sources": ""}) == RunSpec()


@pytest.mark.parametrize(
    ("patch", "field", "words"),
    [
        ({"data.sources[4].weight": 1}, "data.sources[4].weight", "there are 3 datasets, so the next index is"),
        ({"data.sources[1].fils": 1}, "data.sources[1].fils", "did you mean data.sources[1].files?"),
        ({"data.sources[1].max_length": 1}, "data.sources[1].max_length", "set data.max_length"),
        ({"data.sources[1].xyz": 1}, "data.sources[1].xyz", "docs/options.md lists all options"),
        ({"data.sources[1].weight": 0}, "data.sources[1].weight", "must be greater than 0"),
        ({"data.sources[1].format": "alpacca"}, "data.sources[1].format", "did you mean alpaca?"),
        ({"data.sources": "[{}, 7]"}, "data.sources[1]", "must be a mapping of options"),
        ({"data.sources": "[{}, {files: 3}]"}, "data.sources[1].files", "must be a list"),
        ({"data.sources": "[{}, {max_length: 3}]"}, "data.sources[1].max_length", "set data.max_length"),
        ({"data.sources": "{a"}, "data.sources", "is not a list of datasets: invalid JSON"),
        ({"data.sources": "files: a"}, "data.sources", "must be a list of datasets"),
        ({"data.sources": json.dumps([{}] * 40)}, "data.sources", "must have at most 32 entries, but has 40"),
        ({"data.sources[0].weight": 1, "data.weight": 2}, "data.sources[0].weight", "is also set as data.weight"),
        (
            {"data.sources": '[{"files": ["x"]}, {}]', "data.files": "y"},
            "data.sources[0].files",
            "is also set as data.files",
        ),
        ({"data.sources[3].weight": 1}, "data.sources[3].weight", "to add one, also set data.sources[3].source"),
        ({"data.sources[x].weight": 1}, "data.sources[x].weight", "unknown option"),
    ],
)
def test_a_wrong_option_is_named_with_its_dataset(patch, field, words):
    with pytest.raises(SpecError) as error:
        edit(presets.load(YAML), patch)
    problem = error.value.problems[0]
    assert problem.field == field and words in problem.message


def test_a_secret_in_a_dataset_is_found():
    spec = edit(RunSpec(), {"data.sources[1].source": "hub", "data.sources[1].hub_id": "hf_" + "a" * 34})
    assert options_with_secrets(spec) == ["data.sources"]


# -- mixtures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixing", "weights", "counts"),
    [
        ("concatenate", (1, 1), [100, 10]),
        ("concatenate", (0.5, 3), [50, 30]),
        ("concatenate", (0.001, 1), [1, 10]),
        ("interleave_first_exhausted", (1, 1), [10, 10]),
        ("interleave_first_exhausted", (3, 1), [30, 10]),
        ("interleave_first_exhausted", (20, 1), [100, 5]),
        ("interleave_all_exhausted", (1, 1), [100, 100]),
        ("interleave_all_exhausted", (3, 1), [100, 33]),
    ],
)
def test_how_many_examples_of_each_dataset_an_epoch_has(mixing, weights, counts):
    assert mixed_counts((100, 10), weights, mixing) == counts
    order = mixed((100, 10), weights, mixing, seed=1)
    assert [sum(n < 100 for n in order), sum(n >= 100 for n in order)] == counts
    for part in (range(100), range(100, 110)):  # no example is used twice more often than another one of its dataset
        used = Counter(n for n in order if n in part)
        assert max(used.values()) - min(used.get(n, 0) for n in part) <= 1


def test_the_order_of_a_mixture():
    assert list(mixed((3, 2), (1, 1), "concatenate", seed=7)) == [0, 1, 2, 3, 4]
    order = list(mixed((300, 200), (3, 2), "interleave_first_exhausted", seed=7))
    assert sorted(order) == list(range(500)) and [n for n in order if n < 300] == list(range(300))
    assert 40 < sum(n < 300 for n in order[:100]) < 80
    assert order == list(mixed((300, 200), (3, 2), "interleave_first_exhausted", seed=7))
    assert order != list(mixed((300, 200), (3, 2), "interleave_first_exhausted", seed=8))
    assert sorted(mixed((3, 2), (1, 1), "concatenate", seed=7, shuffles=True)) == [0, 1, 2, 3, 4]


# -- checks -------------------------------------------------------------------------------------------------------


def chat(count: int) -> str:
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
    return "\n".join([json.dumps({"messages": turns})] * count)


def checked(tmp_path: Path, **more: object):
    spec = edit(
        RunSpec(),
        {"data.sources[0].source": "files", "data.sources[0].files": "a.jsonl", "data.sources[1].source": "files"}
        | {"data.sources[1].files": "b.jsonl", **more},
    )
    facts = inspect_inputs(spec, tmp_path, {"FOOTPLATE_INSPECTION_WORKER": "off"})
    return effective(spec), facts, check(spec, LAPTOP, facts)


def test_the_numbers_of_all_datasets(tmp_path):
    (tmp_path / "a.jsonl").write_text(chat(100))
    (tmp_path / "b.jsonl").write_text(chat(40))
    spec, facts, _ = checked(tmp_path, **{"data.sources[1].weight": 3, "data.sources[1].validation": "none"})
    assert facts.num_examples == 140 and len(facts.token_lengths) == 140
    assert facts.num_in_epoch(spec) == 95 + 120
    assert facts.num_eval_examples(spec.data) == 5
    spec, facts, _ = checked(
        tmp_path, **{"data.mixing": "interleave_first_exhausted", "data.sources[1].max_samples": 7}
    )
    assert facts.num_in_epoch(spec) == 14 and facts.num_eval_examples(spec.data) == 7


def test_a_finding_names_the_dataset_and_its_fix_changes_only_that(tmp_path):
    (tmp_path / "a.jsonl").write_text(chat(10))
    spec, facts, found = checked(tmp_path)
    (missing,) = (finding for finding in found if finding.code == "DAT002")
    assert missing.fields == ("data.sources[1].files",)
    assert missing.message.startswith("Dataset 2 (b.jsonl): b.jsonl: does not exist. Restore or correct the file")
    assert facts.num_in_epoch(spec) is None and not missing.fixes


def test_a_finding_about_both_datasets_is_one(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"frage": "2 + 2?", "antwort": "4."}\n' * 3)
    _, _, found = checked(tmp_path, **{"data.sources[2].source": "files"})
    codes = [finding.code for finding in found]
    assert len(codes) == len(set(codes))
    by_code = {finding.code: finding for finding in found}
    assert by_code["DAT001"].fields == ("data.sources[2].files",)
    both = by_code["DAT002"]
    assert {"data.files", "data.sources[1].files"} <= set(both.fields)
    assert "Dataset 1 (a.jsonl): a.jsonl: does not exist." in both.message
    assert "Dataset 2 (b.jsonl)" in both.message and "Restore or correct" in both.message


def test_training_files_of_one_dataset_are_no_validation_files_of_another(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(chat(10))
    more = {"data.sources[1].validation": "files", "data.sources[1].validation_files": "a.jsonl"}
    _, _, found = checked(tmp_path, **more)
    (shared,) = (finding for finding in found if "data.sources[1].validation_files" in finding.fields)
    assert "a.jsonl" in shared.message


def test_no_evaluation_only_if_no_dataset_has_a_validation_set(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(chat(10))
    none = {"data.validation": "none"}
    assert "DAT007" not in {finding.code for finding in checked(tmp_path, **none)[2]}
    assert "DAT007" in {
        finding.code for finding in checked(tmp_path, **none, **{"data.sources[1].validation": "none"})[2]
    }


def test_every_fact_about_data_is_combined():
    """Each fact that differs between datasets has a rule for all of them; a new fact needs one."""
    one = InputFacts(num_copies=2, num_usable=3, special_tokens=(("<s>", 1),), counts_are_exact=True)
    other = replace(one, num_usable=4, counts_are_exact=False, special_tokens=(("<s>", 2), ("</s>", 1)))
    known = ("num_copies", "num_usable", "special_tokens", "counts_are_exact")
    together = combined([one, other], known)
    assert {name: together[name] for name in known} == {
        "num_copies": 4, "num_usable": 7, "special_tokens": (("</s>", 1), ("<s>", 3)), "counts_are_exact": False,
    }  # fmt: skip
    assert combined([one, replace(other, num_usable=None)], known)["num_usable"] is None


def test_a_dataset_alone():
    spec = presets.load(YAML)
    alone = for_dataset(spec, 1)
    assert alone.data.files == ("b.jsonl",) and alone.data.sources == () and alone.data.max_length == 256
    assert for_dataset(alone, 0) is alone


def test_what_is_wrong_in_a_hidden_field_of_a_dataset_has_no_effect():
    hidden = '[{}, {"source": "files", "files": ["b.jsonl"], "validation": "none", "validation_split": 7, "weight": 0}]'
    spec, problems = parse_form({"data.sources": hidden})
    assert [problem.field for problem in problems] == ["data.sources[1].weight"]
    assert spec.data.sources[1].files == ("b.jsonl",)
    spec, problems = parse_form({"data.sources": "[{}, 7]", "data.files": "a"})
    assert [problem.field for problem in problems] == ["data.sources[1]"] and spec.data.sources == ()


def test_datasets_are_shown_as_json_without_secrets():
    spec = edit(presets.load(YAML), {"data.sources[1].hub_id": "hf_" + "a" * 34, "data.sources[1].source": "hub"})
    shown = masked_value(spec.data.sources)
    assert "a" * 34 not in shown and json.loads(shown)[2] == {"source": "builtin"}
    assert json.loads(json.dumps(masked_value(RunSpec().data.sources))) == []


def test_files_and_hub_ids_say_what_the_source_is():
    spec = presets.load("data: {sources: [{files: [a.jsonl]}, {hub_id: a/b}, {weight: 2}]}")
    assert [source.source for source in spec.data.datasets] == ["files", "hub", "builtin"]
    assert effective(spec).data.files == ("a.jsonl",)


def test_a_file_that_two_datasets_train_on_and_one_validates_on(tmp_path):
    (tmp_path / "a.jsonl").write_text(chat(10))
    same = {"data.sources[1].files": "a.jsonl"}
    assert "DAT033" not in {finding.code for finding in checked(tmp_path, **same)[2]}, "both split the same examples"
    for more in ({"data.sources[1].validation": "none"}, {"data.sources[1].validation_split": 0.2}):
        (found,) = (finding for finding in checked(tmp_path, **same, **more)[2] if finding.code == "DAT033")
        assert found.fields[0] == "data.validation" and "Dataset 1 (a.jsonl)" in found.message


def test_a_file_of_two_datasets_without_duplicates(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(chat(10))
    same = {
        "data.drop_duplicates": True,
        "data.sources[0].files": ("a.jsonl", "b.jsonl"),
        "data.sources[1].files": "b.jsonl",
    }
    (found,) = (finding for finding in checked(tmp_path, **same)[2] if finding.code == "DAT039")
    assert "Dataset 2 (b.jsonl)" in found.message and "files of dataset 1" in found.message
    for more in (
        {"data.drop_duplicates": False},
        {"data.sources[1].system_prompt": "Be brief."},
        {"data.sources[0].max_samples": 3},
    ):
        assert "DAT039" not in {finding.code for finding in checked(tmp_path, **{**same, **more})[2]}


def test_a_dataset_whose_examples_earlier_datasets_have(tmp_path, monkeypatch):
    """The examples are compared, not the files; only with all examples of both datasets that a run uses."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(chat(10))
    found = {"a.jsonl": (1, 2, 3), "b.jsonl": (3, 2)}
    monkeypatch.setattr(datasets, "inspect_examples", lambda spec, *_: {"digests": found[spec.data.files[0]]})
    drop = {"data.drop_duplicates": True}
    (one,) = (each for each in checked(tmp_path, **drop)[2] if each.code == "DAT039")
    assert "Dataset 2 (b.jsonl)" in one.message and "Every example of this dataset" in one.message
    assert one.fixes[0].patch == {"data.drop_duplicates": False}
    assert "DAT039" not in {each.code for each in checked(tmp_path, **drop, **{"data.max_samples": 3})[2]}
    for others, cannot_be_split in (((3, 4), True), ((3, 4, 5), False), ((), False)):
        found["b.jsonl"] = others
        codes = {each.code for each in checked(tmp_path, **drop)[2]}
        assert "DAT039" not in codes and ("DAT006" in codes) == cannot_be_split


def test_a_fix_of_one_dataset_does_not_turn_off_the_evaluation_of_others(tmp_path):
    (tmp_path / "a.jsonl").write_text(chat(10))
    (tmp_path / "b.jsonl").write_text(chat(1))
    _, _, found = checked(tmp_path)
    (one,) = (finding for finding in found if finding.code == "DAT006")
    assert one.fixes[0].patch == {"data.sources[1].validation": "none"}
    assert "DAT006" not in {finding.code for finding in checked(tmp_path, **one.fixes[0].patch)[2]}


def test_plain_text_and_conversations_have_no_common_format(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "Trains are late."}\n' * 9)
    (tmp_path / "b.jsonl").write_text(chat(9))
    _, facts, found = checked(tmp_path)
    assert facts.format == "" and "DAT014" not in {finding.code for finding in found}
    (tmp_path / "b.jsonl").write_text('{"text": "Trains are late."}\n' * 9)
    assert "DAT014" in {finding.code for finding in checked(tmp_path)[2]}


def test_labels_count_as_often_as_they_are_used(tmp_path):
    row = {"prompt": "2 + 2?", "completion": "4."}
    for name, good in (("a", 3), ("b", 8)):
        rows = [{**row, "label": n < good} for n in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    none = {"train.stage": "kto", "data.validation": "none", "data.sources[1].validation": "none"}
    assert checked(tmp_path, **none, **{"data.weight": 3})[1].label_counts == (3 * 3 + 8, 3 * 7 + 2)
    limit = {"data.sources[1].max_samples": 5}
    assert checked(tmp_path, **none, **limit)[1].label_counts == (3 + 4, 7 + 1)


def test_dropped_examples_do_not_count():
    spec = edit(RunSpec(), {"data.sources": "[{}, {}]", "data.mixing": "interleave_first_exhausted"})
    facts = InputFacts(num_examples=40, num_validation_examples=4, num_usable=40, unusable_positions=())
    few = replace(facts, num_usable=5, unusable_positions=tuple(range(35)))
    assert replace(facts, datasets=(facts, few)).num_in_epoch(spec) == 10
    assert shares(spec, replace(facts, datasets=(facts, few)))[0] == "5 examples per epoch from 40 (0.125x)."
    long = replace(facts, token_lengths=(1200,) * 40)
    texts = edit(spec, {"train.stage": "pretraining", "data.mixing": "concatenate"})
    assert shares(texts, replace(facts, datasets=(long, long)))[1] == "120 sequences per epoch; about 48,000 tokens."


def test_a_dataset_without_a_trained_token_is_named():
    spec = edit(RunSpec(), {"data.sources": "[{}, {}]"})
    facts = InputFacts(
        num_examples=40, num_checked=40, num_usable=40, unusable_positions=(), token_lengths=(2000,) * 40
    )
    none = replace(facts, num_usable=0, unusable_positions=tuple(range(40)))
    together = replace(facts, num_examples=80, num_checked=80, datasets=(facts, none))
    found = [finding for finding in check(spec, LAPTOP, together) if finding.code == "DAT017"]
    assert [finding.fields for finding in found] == [("data.max_length",)]
    assert found[0].message.startswith("Dataset 2 (trains): None of the 40 examples has a trained token")
    (found_of_pairs,) = (
        finding
        for finding in check(edit(RunSpec(), {"train.stage": "reward"}), LAPTOP, none)
        if finding.code == "DAT017"
    )
    assert found_of_pairs.message.startswith("All 40 pairs are longer than data.max_length (512 tokens); the longest")
    assert not [
        each for each in check(spec, LAPTOP, replace(together, datasets=(facts, facts))) if each.code == "DAT017"
    ]


@pytest.mark.parametrize(
    ("fields", "offered"),
    [
        (("data.files", "data.hub_id"), ["data.files"]),
        (("data.sources[2].files", "data.sources[2].hub_id"), ["data.sources[2].hub_id"]),
        (("data.sources[1].hub_id",), ["data.sources[1].hub_id"]),
    ],
    ids=["a field of another source", "of another dataset", "nothing else to go to"],
)
def test_a_finding_offers_the_fields_that_have_an_effect(fields, offered):
    sources = ("files", "files", "hub")
    spec = edit(RunSpec(), {"data.sources": tuple(Source(source=source) for source in sources)})
    texts = ("code", "slug", "level", "title", "message", "reason", "source")
    finding = SimpleNamespace(fields=fields, fixes=(), **dict.fromkeys(texts, ""))
    assert [found["fields"] for found in findings_json(SimpleNamespace(findings=[finding]), spec)] == [offered]
