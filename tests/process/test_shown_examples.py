"""Examples as the model sees them: what is shown is what is trained on, for every stage, and each token's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, forked_inspection
from training_runs import make_spec
from transformers import AutoTokenizer

from backend.__main__ import main
from backend.config import RunSpec
from backend.inspect.examples import FORMAT
from backend.train import data
from backend.train.show_examples import MAX_TOKENS, NOTES, show

FOX = "Ein 🦊 läuft.\n\nUnd 👩‍🔬?"  # characters of several tokens
TURNS = [{"role": "user", "content": FOX}, {"role": "assistant", "content": "Ja 🦊."}]
PAIR = {"prompt": FOX, "chosen": "Ja 🦊.", "rejected": "Nein."}
ROWS: dict[str, dict[str, Any]] = {
    "sft": {"messages": [*TURNS, *TURNS]},
    "pretraining": {"text": FOX},
    "dpo": PAIR,
    "orpo": PAIR,
    "reward": PAIR,
    "kto": PAIR,
}


def spec_of(folder: Path, lines: list[Any], **options: Any) -> RunSpec:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    values = {f"{name.replace('__', '.')}": value for name, value in options.items()}
    return make_spec({"data.source": "files", "data.files": (str(file),), "data.validation": "none", **values})


def shown(spec: RunSpec, tiny: Path, first: int = 0, count: int = 10) -> dict[str, Any]:
    return show(spec.model_dump(), "/", str(tiny), first, count)


def trained_sequences(spec: RunSpec, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(ids, positions with a loss) of the sequences in the columns that the trainer gets."""
    columns = data.prepare(spec, tokenizer, lambda done, total: True, lambda text: None).train
    found = []
    for row in columns:
        if "labels" in row:
            found.append((row["input_ids"], [n for n, label in enumerate(row["labels"]) if label != -100 and n]))
        elif "chosen_labels" in row:
            for side in ("chosen", "rejected"):
                labels = row[f"{side}_labels"]
                found.append((row[f"{side}_input_ids"], [n for n, label in enumerate(labels) if label != -100]))
        elif "prompt_ids" in row:
            for side in [name for name in ("completion_ids", "chosen_ids", "rejected_ids") if name in row]:
                prompt = row["prompt_ids"]
                ids = prompt + row[side]
                found.append((ids, list(range(len(prompt), len(ids)))))
        else:  # a reward model: the score is of the whole sequence
            found += [(row[side], []) for side in ("chosen_ids", "rejected_ids")]
    return found


@pytest.mark.parametrize("loss_on", ["completions", "all_tokens"])
@pytest.mark.parametrize("stage", ROWS)
def test_what_is_shown_is_trained_on(stage: str, loss_on: str, tmp_path: Path, tiny: Path) -> None:
    spec = spec_of(tmp_path, [ROWS[stage]], train__stage=stage, data__loss_on=loss_on)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    (example,) = shown(spec, tiny)["examples"]
    expected = trained_sequences(spec, tokenizer)
    assert len(expected) == len(example["sequences"]) == (1 if stage in ("sft", "pretraining") else 2)
    found = []
    for sequence in example["sequences"]:
        pieces = sequence["pieces"]
        ids = [id for _, piece, _ in pieces for id in piece]
        assert "".join(text for text, _, _ in pieces) == tokenizer.decode(ids)
        assert "🦊" in [text.strip() for text, _, _ in pieces], "a character of several tokens is one piece"
        flags = [is_trained for _, piece, is_trained in pieces for _ in piece]
        trained = [n for n, yes in enumerate(flags) if yes]
        assert len(trained) == sequence["trained"] and len(ids) == sequence["tokens"] == sequence["kept"]
        found.append((ids, [] if stage == "reward" else trained))
        assert sequence["end"] == (None if stage == "pretraining" else "<|im_end|>")
    assert sorted(found) == sorted(expected)


def test_a_long_example_shows_where_it_is_cut(tmp_path: Path, tiny: Path) -> None:
    long = {"messages": [TURNS[0], {"role": "assistant", "content": "no " * 2 * MAX_TOKENS}]}
    spec = spec_of(tmp_path, [long], data__max_length=100)
    (sequence,) = shown(spec, tiny)["examples"][0]["sequences"]
    assert (sequence["kept"], sequence["end"]) == (100, None), "its end is cut off"
    assert sequence["tokens"] > 2 * MAX_TOKENS
    assert sum(len(ids) for _, ids, _ in sequence["pieces"]) == MAX_TOKENS
    assert sequence["trained"] == 100 - sum(not yes for _, ids, yes in sequence["pieces"] for _ in ids)
    split = spec_of(tmp_path, [{"text": "no " * 500}], train__stage="pretraining", data__max_length=100)
    (sequence,) = shown(split, tiny)["examples"][0]["sequences"]
    assert sequence["kept"] == sequence["tokens"] > 400, "a text for pretraining is split, not cut"
    expected = trained_sequences(split, AutoTokenizer.from_pretrained(tiny))
    assert sequence["trained"] == sum(len(trained) for _, trained in expected), "each part begins without a loss"


def test_broken_examples_are_shown_with_their_problem(tmp_path: Path, tiny: Path) -> None:
    lines = [{"messages": TURNS}, {"messages": [TURNS[0]]}, {"messages": TURNS}]
    spec = spec_of(tmp_path, lines)
    first, second, third = shown(spec, tiny)["examples"]
    assert second["problem"] == "This example has no assistant turn, so there is no completion to train on."
    assert '"role": "user"' in second["row"] and not second["sequences"]
    assert first["sequences"] == third["sequences"] and third["location"].endswith("data.jsonl, line 3")
    assert [each["location"] for each in shown(spec, tiny, 2, 5)["examples"]] == [third["location"]]
    assert shown(spec, tiny, 3, 1) == {"format": FORMAT, "examples": [], "problem": ""}
    (tmp_path / "data.jsonl").write_text('{"messages": [\n' * 2 + json.dumps(lines[0]) + "\n]\n")
    broken, _, good, last = shown(spec, tiny)["examples"]
    assert broken["problem"].startswith("This example is not valid JSON: ") and broken["location"].endswith("line 1")
    assert good["sequences"] == first["sequences"] and last["problem"] and last["location"].endswith("line 4")
    (tmp_path / "data.jsonl").write_text('{"messages": [\n')
    problem = shown(spec, tiny)["problem"]
    assert problem.startswith("No example of the data files can be read. ") and "data.jsonl, line 1" in problem
    other = spec_of(tmp_path, [{"frage": 1}])
    assert shown(other, tiny)["problem"].startswith("The first example has no data format that ")
    assert shown(spec_of(tmp_path, []), tiny)["problem"] == "The data files have no examples."


def test_why_an_example_is_dropped_is_said(tmp_path: Path, tiny: Path) -> None:
    """The note has the reason that the run counts; another note has what no loss or template uses."""
    spec = spec_of(tmp_path, [{"messages": TURNS, "weight": 3}], data__max_length=20)
    (example,) = shown(spec, tiny)["examples"]
    assert example["notes"][0] == NOTES["dropped"] and "Not used: the weights in column weight." in example["notes"]
    same = spec_of(tmp_path, [{**PAIR, "rejected": PAIR["chosen"]}], train__stage="dpo")
    assert shown(same, tiny)["examples"][0]["notes"] == [NOTES["identical"]]
    long = spec_of(tmp_path, [PAIR], train__stage="reward", data__max_length=20)
    assert shown(long, tiny)["examples"][0]["notes"] == [NOTES["long"]]
    labeled = shown(spec_of(tmp_path, [PAIR], train__stage="kto"), tiny)["examples"][0]
    assert [each["name"] for each in labeled["sequences"]] == ["desirable completion", "undesirable completion"]


def test_the_command_prints_what_has_a_loss(
    tmp_path: Path, fork_server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n")
    words = ["--set", "model.builtin=tiny-llama", "--set", "data.source=files", "--set", f"data.files={file}"]
    with forked_inspection(fork_server, fork_server.cache):
        assert main(["data", "first-run", *words, "--set", "data.max_length=50"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{file}, line 1"
        assert "loss    | Ja " in "\n".join(lines) and any(line.startswith("cut     | ") for line in lines)
        assert main(["data", "first-run", *words, "--first", "2"]) == 2
        assert "fewer than 2 examples" in capsys.readouterr().err
        file.write_text(file.read_text() + '{"messages"')
        assert main(["data", "first-run", *words]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{file}, line 1\n") and f"{file}, line 2\nThis example is not valid JSON" in printed
        folder = ["--set", "model.source=path", "--set", f"model.path={tmp_path}"]
        assert main(["data", "first-run", *words, *folder]) == 2
        assert "The model folder has no tokenizer files" in capsys.readouterr().err
        (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
        assert main(["data", "first-run", *words, *folder, "--set", "model.trust_remote_code=true"]) == 2
        assert "may run custom code" in capsys.readouterr().err
        assert main(["data", "first-run", *words, "--set", "data.source=hub", "--set", "data.hub_id=a/b"]) == 2
        assert "on the Hub are not shown" in capsys.readouterr().err
