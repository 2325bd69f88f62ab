"""The stages that compare answers: the better one gets ahead, in the curve and in the saved model; ranks, engines, a
reference computed beforehand and a resumed run change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from fork_server import ForkServer, write_run
from training_runs import REORDERING_TOLERANCE, log_text, losses, make_spec, read_metrics, result, same_losses
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.dpo_trainer import DPOTrainer
from untrained_models import tokenizer

from backend.config import RunSpec
from backend.data import read_examples
from backend.paths import ASSETS
from backend.train import data

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
STAGES = ("dpo", "kto", "orpo", "reward")
RATES = {"lora": 5e-3, "full": 1e-3}
ROWS = 8  # few, so that they are soon known by heart
LEARNED = {
    "data.builtin": "train-pairs",
    "data.max_samples": ROWS,
    "train.max_steps": 8,
    "train.per_device_train_batch_size": 4,
    "eval.strategy": "steps",
    "eval.steps": 8,
    "eval.per_device_eval_batch_size": 32,
    "save.final_model": True,
}


def spec(stage: str, kind: str = "lora", **more: Any) -> RunSpec:
    named = {name.replace("__", "."): value for name, value in more.items()}
    return make_spec(
        {**LEARNED, "train.stage": stage, "method.kind": kind, "train.learning_rate": RATES[kind], **named}
    )


@pytest.fixture(scope="module")
def learned(root: Path, fork_server: ForkServer) -> dict[tuple[str, str], Path]:
    """A run of every stage, with an adapter and with whole weights."""
    return {
        (stage, kind): fork_server.train(root / f"{stage}-{kind}", spec(stage, kind, **ANSWERED.get(stage, {})))
        for stage in STAGES
        for kind in RATES
    }


ANSWERED = {"orpo": {"eval__num_generations": 2, "eval__max_new_tokens": 4}}
EVERY = [(stage, kind) for stage in STAGES for kind in RATES]


@pytest.mark.parametrize(("stage", "kind"), EVERY)
def test_the_better_answer_gets_ahead(learned: dict[tuple[str, str], Path], stage: str, kind: str) -> None:
    found = [point for point in read_metrics(learned[stage, kind]) if "loss" in point]
    assert [point["step"] for point in found] == list(range(1, 9))
    margins = [point["reward_margin"] for point in found if point.get("reward_margin") is not None]
    assert sum(margins[-3:]) / 3 > sum(margins[:3]) / 3
    assert found[-1]["loss"] < found[0]["loss"]
    assert all(point["tokens_per_second"] for point in found)
    last = read_metrics(learned[stage, kind])[-1]
    assert last["eval_reward_margin"] == result(learned[stage, kind])["eval_reward_margin"]
    if stage in ("dpo", "kto"):
        assert found[0]["reward_chosen"] == pytest.approx(0, abs=1e-4), "it begins as what it is held to"
    if stage == "kto":  # answers without a partner: nothing to be ahead of
        assert "kl" in last or "eval_kl" in last
        assert "reward_accuracy" not in found[-1]
    else:
        assert found[-1]["reward_accuracy"] >= (0.5 if stage == "orpo" else 0.75)  # ORPO first learns to speak
        assert 0 <= last["eval_reward_accuracy"] <= 1
        assert "reward accuracy " in log_text(learned[stage, kind])


def trained_on(stage: str) -> list[dict[str, Any]]:
    """The rows of the runs above, as they stand in the file."""
    kept = data.load_examples(spec(stage))[0]
    asked = [item.value["prompt"] for item in kept]
    found = [row for _, row in read_examples(ASSETS / "train-pairs/train.jsonl") if row["prompt"] in asked]
    return [dict(row) for row in found]


def scores(folder: Path, stage: str, rows: list[dict[str, Any]]) -> list[float]:
    """By how much a saved model prefers each chosen answer, asked as anybody would ask it."""
    tokens: Any = AutoTokenizer.from_pretrained(folder)
    kind: Any = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    loaded = kind.from_pretrained(folder, dtype=torch.float32, **({"num_labels": 1} if stage == "reward" else {}))
    loaded.eval()

    @torch.no_grad()
    def score(prompt: Any, answer: Any) -> float:
        begin = tokens.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = torch.tensor([tokens.apply_chat_template(prompt + answer, return_dict=True)["input_ids"]])
        logits = loaded(ids).logits
        if stage == "reward":
            return float(logits)
        said = torch.log_softmax(logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[len(begin) - 1 :]
        return float(said.mean() if stage == "orpo" else said.sum())

    return [score(row["prompt"], row["chosen"]) - score(row["prompt"], row["rejected"]) for row in rows]


@pytest.mark.parametrize(("stage", "kind"), EVERY)
def test_the_saved_model_prefers_it(learned: dict[tuple[str, str], Path], root: Path, stage: str, kind: str) -> None:
    rows = trained_on(stage)
    after = scores(learned[stage, kind] / "model", stage, rows)
    if stage == "reward":
        assert sum(score > 0 for score in after) >= 0.7 * len(rows)
        return
    before = scores(root / "cache/models/tiny-llama", stage, rows)
    assert sum(after) > sum(before)
    assert not (learned[stage, kind] / "model/ref").exists()


def test_answers_are_given_before_and_after(learned: dict[tuple[str, str], Path]) -> None:
    found = result(learned["orpo", "lora"])["samples"]
    assert len(found) == 2
    assert all(json.loads(sample["reference"])["train"] and sample["prompt"] for sample in found)


SAME = {
    "an adapter on two ranks": ("lora", 2, {"parallel__strategy": "ddp"}),
    "whole weights under ZeRO-2": ("full", 2, {"parallel__strategy": "zero2"}),
    "a reference computed beforehand": (
        "full",
        0,
        {"preference__precompute_ref_log_probs": True, "train__per_device_train_batch_size": 4},
    ),
    "and by two ranks": ("lora", 2, {"preference__precompute_ref_log_probs": True, "parallel__strategy": "ddp"}),
    "and by two that hold half each": (
        "lora",
        2,
        {"preference__precompute_ref_log_probs": True, "parallel__strategy": "fsdp2"},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_curve_is_that_of_one_process(
    learned: dict[tuple[str, str], Path], root: Path, fork_server: ForkServer, name: str
) -> None:
    kind, ranks, more = SAME[name]
    more = {"train__per_device_train_batch_size": 2, "save__final_model": False, **more}
    one = losses(learned["dpo", kind])
    assert len({round(loss, 6) for loss in one.values()}) > 4
    assert losses(fork_server.train(root / name, spec("dpo", kind, **more), ranks)) == same_losses(
        one, REORDERING_TOLERANCE
    )


def test_two_ranks_score_as_one(learned: dict[tuple[str, str], Path], root: Path, fork_server: ForkServer) -> None:
    more = spec("reward", "full", train__per_device_train_batch_size=2, parallel__strategy="ddp")
    two = fork_server.train(root / "reward-two", more, 2)
    assert losses(two) == same_losses(losses(learned["reward", "full"]), REORDERING_TOLERANCE)


def test_a_resumed_run_goes_on_with_its_curve(root: Path, fork_server: ForkServer) -> None:
    kept = {"save__strategy": "steps", "save__steps": 3, "save__total_limit": 0, "train__max_steps": 6}
    folder = fork_server.train(root / "resumed", spec("dpo", **kept))
    before = [point for point in read_metrics(folder) if "loss" in point]
    fork_server.resume(folder, 3)
    again = [point for point in read_metrics(folder) if "loss" in point][len(before) :]
    assert [point["step"] for point in again] == [4, 5, 6]
    for name in ("loss", "reward_margin", "reward_chosen"):
        assert [p[name] for p in again] == same_losses([p[name] for p in before[3:]])


BAD = {
    "dpo": ({"prompt": "When?", "chosen": "Now.", "rejected": 7}, "column rejected contains a number"),
    "kto": (
        {"prompt": "When?", "completion": "Now.", "label": "perhaps"},
        "column label contains 'perhaps'; expected true or false",
    ),
}
GOOD = {
    "dpo": {"prompt": "When?", "chosen": "Now.", "rejected": "Never."},
    "kto": {"prompt": "When?", "completion": "Now.", "label": True},
}


@pytest.mark.parametrize("stage", BAD)
def test_a_bad_row_is_named_by_file_and_line(root: Path, fork_server: ForkServer, stage: str) -> None:
    row, says = BAD[stage]
    path = root / f"{stage}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (GOOD[stage], GOOD[stage], row)), encoding="utf-8")
    folder = root / f"bad-{stage}"
    write_run(folder, spec(stage, data__source="files", data__files=(str(path),)))
    assert fork_server.run(folder) == 1
    said = log_text(folder).strip().splitlines()[-1]
    assert f"{path}, line 3" in said
    assert says in said


def prepared(stage: str, fork_server: ForkServer, split: str = "train", **more: Any) -> tuple[Any, Any]:
    asked = spec(stage, **more)
    tokens = tokenizer(asked)
    return getattr(data.prepare(asked, tokens, lambda done, of: True, lambda line: None), split), tokens


def test_tokens_are_those_of_the_library(fork_server: ForkServer) -> None:
    """What TRL's own preparation makes of the same rows."""
    ours, tokens = prepared("dpo", fork_server, data__max_samples=0, data__max_length=2048)
    rows = Dataset.from_list([dict(row) for _, row in read_examples(ASSETS / "train-pairs/train.jsonl")])
    asked: Any = SimpleNamespace(dataset_num_proc=None, max_length=2048, truncation_mode="keep_start")
    theirs = DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=tokens), rows, tokens, asked, "train")
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert ours[name][:] == theirs[name][:]


@pytest.mark.parametrize(("split", "count"), [("train", 600), ("validation", 64)])
def test_kto_pairs_each_question_with_its_neighbours_answer(fork_server: ForkServer, split: str, count: int) -> None:
    """Also where rows are validated one by one."""
    more = {"data__max_samples": 0, "eval__strategy": "epoch", "eval__per_device_eval_batch_size": 1}
    rows = list(prepared("kto", fork_server, split, **more)[0])
    assert len(rows) == count
    assert sum(row["label"] for row in rows) == count / 2
    for at in range(0, 12, 4):
        batch = rows[at : at + 4]
        turned = [batch[-1], *batch[:-1]]
        assert [row["KL_completion_ids"] for row in batch] == [row["completion_ids"] for row in turned]


def test_what_is_too_long_is_cut_or_dropped(fork_server: ForkServer) -> None:
    whole, _ = prepared("dpo", fork_server, data__max_samples=0)
    short, _ = prepared("dpo", fork_server, data__max_samples=0, data__max_length=80)
    assert 0 < len(short) < len(whole)
    assert max(len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in short) == 80
    scored, _ = prepared("reward", fork_server, data__max_samples=0, data__max_length=90)
    assert 0 < len(scored) < len(whole)
    assert max(max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in scored) <= 90
