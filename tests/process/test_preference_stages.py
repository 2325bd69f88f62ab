"""Preference and reward stages: the reward margin rises during training, and the saved model prefers the chosen
completions. Several ranks, engines, precomputed reference log-probabilities and resuming do not change the losses."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from datasets import Dataset
from fork_server import ForkServer, write_run
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer
from untrained_models import tokenizer

from backend.config import RunSpec
from backend.data import read_examples
from backend.paths import ASSETS
from backend.train import data, training, trl_trainers
from backend.train.examples import select
from backend.train.preference_data import PreferenceTokenizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TrainedRun = Callable[[str, str], Path]
LEARNING_RATES = {"lora": 5e-3, "full": 1e-3}
EXAMPLE_COUNT = 8  # few, so that the model overfits within the steps of the test
OVERFIT = {
    "data.builtin": "train-pairs",
    "data.max_samples": EXAMPLE_COUNT,
    "train.max_steps": 8,
    "train.per_device_train_batch_size": 4,
    "eval.strategy": "steps",
    "eval.steps": 8,
    "eval.per_device_eval_batch_size": 32,
    "save.final_model": True,
}
# Of a run whose steps are compared: evaluation takes a quarter of a run's time. The other runs do evaluate.
LOSSES_ONLY = {"eval__strategy": "no", "save__final_model": False}


def spec(stage: str, kind: str = "lora", **more: Any) -> RunSpec:
    options = {name.replace("__", "."): value for name, value in more.items()}
    return make_spec(
        {**OVERFIT, "train.stage": stage, "method.kind": kind, "train.learning_rate": LEARNING_RATES[kind], **options}
    )


@pytest.fixture(scope="module")
def trained_run(root: Path, fork_server: ForkServer) -> TrainedRun:
    """A function that returns the run of a stage, with LoRA or with full fine-tuning, trained on first use. It is
    evaluated on a few pairs only, which takes less time than its steps."""

    few = root / "few.jsonl"
    lines = (ASSETS / "train-pairs/validation.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    few.write_text("".join(lines[:10]), encoding="utf-8")
    files = {"source": "files", "files": (str(ASSETS / "train-pairs/train.jsonl"),), "validation": "files"}
    data = {f"data__{name}": value for name, value in {**files, "validation_files": (str(few),)}.items()}

    @cache
    def run(stage: str, kind: str) -> Path:
        return fork_server.train(root / f"{stage}-{kind}", spec(stage, kind, **data, **STAGE_OPTIONS.get(stage, {})))

    return run


STAGE_OPTIONS = {"orpo": {"eval__num_generations": 2, "eval__max_new_tokens": 4}}
IN_MAKE_TEST = (("dpo", "lora"), ("orpo", "lora"), ("reward", "full"))
STAGE_AND_METHOD = soak_except(product(("dpo", "kto", "orpo", "reward"), LEARNING_RATES), IN_MAKE_TEST)


@pytest.mark.parametrize(("stage", "kind"), STAGE_AND_METHOD)
def test_reward_margin_rises(trained_run: TrainedRun, stage: str, kind: str) -> None:
    train_points = [point for point in read_metrics(trained_run(stage, kind)) if "loss" in point]
    assert [point["step"] for point in train_points] == list(range(1, 9))
    margins = [point["reward_margin"] for point in train_points if point.get("reward_margin") is not None]
    assert sum(margins[-3:]) / 3 > sum(margins[:3]) / 3
    assert train_points[-1]["loss"] < train_points[0]["loss"]
    assert all(point["tokens_per_second"] for point in train_points)
    last = read_metrics(trained_run(stage, kind))[-1]
    assert last["eval_reward_margin"] == result(trained_run(stage, kind))["eval_reward_margin"]
    if stage in ("dpo", "kto"):
        assert train_points[0]["reward_chosen"] == pytest.approx(0, abs=1e-4), "the policy starts as the reference"
    if stage == "kto":  # unpaired completions have no reward accuracy
        assert "kl" in last or "eval_kl" in last
        assert "reward_accuracy" not in train_points[-1]
    else:
        assert train_points[-1]["reward_accuracy"] >= (
            0.5 if stage == "orpo" else 0.75
        )  # ORPO first learns the format of the completions
        assert 0 <= last["eval_reward_accuracy"] <= 1
        assert "reward accuracy " in log_text(trained_run(stage, kind))


@pytest.mark.parametrize("stage", soak_except(("dpo", "kto", "orpo", "reward"), ("kto",)))
def test_metrics_of_an_evaluation_are_means_over_its_pairs(fork_server: ForkServer, tmp_path: Path, stage: str) -> None:
    """Not over its batches: the last one may have a single pair, and one of KTO only one kind of completion."""
    validation = tmp_path / "validation.jsonl"
    lines = (ASSETS / "train-pairs/validation.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    validation.write_text("".join(lines[:5]), encoding="utf-8")
    data = {"source": "files", "files": (str(ASSETS / "train-pairs/train.jsonl"),), "validation": "files"}
    changes = {f"data__{name}": value for name, value in data.items()} | {"data__validation_files": (str(validation),)}
    changes |= {"train__max_steps": 2, "eval__steps": 2, "save__final_model": False}
    changes |= {"preference__kto_loss_type": "apo_zero_unpaired"} if stage == "kto" else {}  # allows batches of 1
    names = ("reward_margin", "reward_chosen" if stage == "kto" else "reward_accuracy")
    found = []
    for size in (3, 1):
        made = spec(stage, **changes, eval__per_device_eval_batch_size=size)
        metrics = result(fork_server.train(tmp_path / f"{size}", made))
        found.append([metrics[f"eval_{name}"] for name in names])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def training_examples(stage: str) -> list[dict[str, Any]]:
    """The rows of train.jsonl that the runs above were trained on."""
    ((train, _),) = select(spec(stage))
    prompts = [example.value["prompt"] for _, example in train]
    rows = [row for _, row in read_examples(ASSETS / "train-pairs/train.jsonl") if row["prompt"] in prompts]
    return [dict(row) for row in rows]


def scores(folder: Path, stage: str, rows: list[dict[str, Any]]) -> list[float]:
    """Score of the chosen minus score of the rejected completion, for a saved model loaded with transformers."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    auto_class: Any = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder, dtype=torch.float32, **({"num_labels": 1} if stage == "reward" else {}))
    model.eval()

    @torch.no_grad()
    def score(prompt: Any, completion: Any) -> float:
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = torch.tensor([tokenizer.apply_chat_template(prompt + completion, return_dict=True)["input_ids"]])
        logits = model(ids).logits
        if stage == "reward":
            return float(logits)
        log_probs = torch.log_softmax(logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[len(prompt_ids) - 1 :]
        return float(log_probs.mean() if stage == "orpo" else log_probs.sum())

    return [score(row["prompt"], row["chosen"]) - score(row["prompt"], row["rejected"]) for row in rows]


@pytest.mark.parametrize(("stage", "kind"), STAGE_AND_METHOD)
def test_saved_model_prefers_chosen_completions(trained_run: TrainedRun, root: Path, stage: str, kind: str) -> None:
    rows = training_examples(stage)
    after = scores(trained_run(stage, kind) / "model", stage, rows)
    if stage == "reward":
        assert sum(score > 0 for score in after) >= 0.7 * len(rows)
        return
    before = scores(root / "cache/models/tiny-llama", stage, rows)
    assert sum(after) > sum(before)
    assert not (trained_run(stage, kind) / "model/ref").exists()


def test_orpo_run_has_generations_before_and_after(trained_run: TrainedRun) -> None:
    samples = result(trained_run("orpo", "lora"))["samples"]
    assert len(samples) == 2
    assert all(json.loads(sample["reference"])["train"] and sample["prompt"] for sample in samples)


EQUIVALENT = {
    "LoRA on two ranks": ("lora", 2, {"parallel__strategy": "ddp"}),
    "full fine-tuning with ZeRO-2": ("full", 2, {"parallel__strategy": "zero2"}),
    "precomputed reference": (
        "full",
        0,
        {"preference__precompute_ref_log_probs": True, "train__per_device_train_batch_size": 4},
    ),
    "precomputed reference on two ranks": (
        "lora",
        2,
        {"preference__precompute_ref_log_probs": True, "parallel__strategy": "ddp"},
    ),
    "precomputed reference with FSDP2": (
        "lora",
        2,
        {"preference__precompute_ref_log_probs": True, "parallel__strategy": "fsdp2", "eval__strategy": "steps"},
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_generation_ends_after_a_precomputed_reference_with_zero3(
    root: Path, fork_server: ForkServer, stage: str
) -> None:
    """The engine of the reference pass must not stay on the model: the ranks generate different numbers of tokens."""
    options = {
        "train__stage": stage,
        "data__builtin": "train-pairs",
        "method__kind": "full",
        "parallel__strategy": "zero3",
        "preference__precompute_ref_log_probs": True,
        "eval__num_generations": 3,
        "eval__per_device_eval_batch_size": 1,
    }
    folder = root / f"generations-{stage}"
    write_run(folder, make_spec({name.replace("__", "."): value for name, value in options.items()}))
    assert fork_server.run(folder, 2) == 0, log_text(folder)
    assert len(result(folder)["samples"]) == 3


@pytest.mark.soak
@pytest.mark.parametrize("precomputed", [True, False])
@pytest.mark.parametrize(
    ("stage", "kind", "more"),
    [
        ("dpo", "full", {"data__max_samples": 4}),  # the reference takes one batch
        ("dpo", "lora", {"lora__modules_to_save": ("lm_head",)}),
        ("kto", "lora", {"lora__modules_to_save": ("lm_head",)}),
    ],
)
def test_reference_with_zero3(
    root: Path, fork_server: ForkServer, stage: str, kind: str, more: dict[str, Any], precomputed: bool
) -> None:
    """The losses of ZeRO-2, and its checkpoints can be resumed from."""
    more = {"train__per_device_train_batch_size": 2, "train__max_steps": 3, "save__final_model": False, **more}
    more |= {"save__strategy": "steps", "save__steps": 2, "save__total_limit": 0}
    more |= {"preference__precompute_ref_log_probs": precomputed}
    zero2, zero3 = (
        fork_server.train(
            root / f"{stage}-{kind}-{name}-{precomputed}", spec(stage, kind, parallel__strategy=name, **more), 2
        )
        for name in ("zero2", "zero3")
    )
    before = losses(zero3)
    assert len({round(loss, 6) for loss in before.values()}) > 1
    assert before == same_losses(losses(zero2), REORDERING_TOLERANCE)
    fork_server.resume(zero3, 2, 2)
    assert losses(zero3) == same_losses(before)


@pytest.mark.parametrize(
    "name",
    soak_except(EQUIVALENT, ("LoRA on two ranks",)),
)
def test_losses_match_one_process(trained_run: TrainedRun, root: Path, fork_server: ForkServer, name: str) -> None:
    kind, ranks, more = EQUIVALENT[name]
    more = {"train__per_device_train_batch_size": 2, **LOSSES_ONLY, **more}
    expected = losses(trained_run("dpo", kind))
    assert len({round(loss, 6) for loss in expected.values()}) > 4
    assert losses(fork_server.train(root / name, spec("dpo", kind, **more), ranks)) == same_losses(
        expected, REORDERING_TOLERANCE
    )


@pytest.mark.soak
def test_reward_model_on_two_ranks_matches_one_process(
    trained_run: TrainedRun, root: Path, fork_server: ForkServer
) -> None:
    more = spec("reward", "full", train__per_device_train_batch_size=2, parallel__strategy="ddp")
    folder = fork_server.train(root / "reward-two", more, 2)
    assert losses(folder) == same_losses(losses(trained_run("reward", "full")), REORDERING_TOLERANCE)


@pytest.mark.soak
def test_resumed_run_has_the_same_metrics(root: Path, fork_server: ForkServer) -> None:
    saving = {"save__strategy": "steps", "save__steps": 3, "save__total_limit": 0, "train__max_steps": 6, **LOSSES_ONLY}
    folder = fork_server.train(root / "resumed", spec("dpo", **saving))
    before = [point for point in read_metrics(folder) if "loss" in point]
    fork_server.resume(folder, 3)
    again = [point for point in read_metrics(folder) if "loss" in point][len(before) :]
    assert [point["step"] for point in again] == [4, 5, 6]
    for name in ("loss", "reward_margin", "reward_chosen"):
        assert [p[name] for p in again] == same_losses([p[name] for p in before[3:]])


INVALID = {
    "dpo": ({"prompt": "When?", "chosen": "Now.", "rejected": 7}, "column rejected contains a number"),
    "kto": (
        {"prompt": "When?", "completion": "Now.", "label": "perhaps"},
        "column label contains 'perhaps'; expected true or false",
    ),
}
VALID = {
    "dpo": {"prompt": "When?", "chosen": "Now.", "rejected": "Never."},
    "kto": {"prompt": "When?", "completion": "Now.", "label": True},
}


@pytest.mark.parametrize("stage", INVALID)
def test_invalid_example_error_names_file_and_line(root: Path, fork_server: ForkServer, stage: str) -> None:
    row, message = INVALID[stage]
    path = root / f"{stage}.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (VALID[stage], VALID[stage], row)), encoding="utf-8")
    folder = root / f"bad-{stage}"
    write_run(folder, spec(stage, data__source="files", data__files=(str(path),)))
    assert fork_server.run(folder) == 1
    last_line = log_text(folder).strip().splitlines()[-1]
    assert f"{path}, line 3" in last_line
    assert message in last_line


def prepared_split(stage: str, fork_server: ForkServer, split: str = "train", **more: Any) -> tuple[Any, Any]:
    run_spec = spec(stage, **more)
    tokenizer_ = tokenizer(run_spec)
    return getattr(data.prepare(run_spec, tokenizer_, lambda done, of: True, lambda line: None), split), tokenizer_


def test_token_ids_match_trl(fork_server: ForkServer) -> None:
    """Compared with TRL's preparation of the same rows."""
    ours, tokenizer_ = prepared_split("dpo", fork_server, data__max_samples=0, data__max_length=2048)
    rows = Dataset.from_list([dict(row) for _, row in read_examples(ASSETS / "train-pairs/train.jsonl")])
    arguments: Any = SimpleNamespace(dataset_num_proc=None, max_length=2048, truncation_mode="keep_start")
    expected = DPOTrainer._prepare_dataset(SimpleNamespace(_tokenizer=tokenizer_), rows, tokenizer_, arguments, "train")
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert ours[name][:] == expected[name][:]


@pytest.mark.parametrize(("split", "count"), [("train", 600), ("validation", 64)])
def test_kto_pairs_each_prompt_with_the_completion_of_its_neighbor(
    fork_server: ForkServer, split: str, count: int
) -> None:
    """Also in the validation set with a batch size of 1."""
    more = {"data__max_samples": 0, "eval__strategy": "epoch", "eval__per_device_eval_batch_size": 1}
    rows = list(prepared_split("kto", fork_server, split, **more)[0])
    assert len(rows) == count
    assert sum(row["label"] for row in rows) == count / 2
    for start in range(0, 12, 4):
        batch = rows[start : start + 4]
        rotated = [batch[-1], *batch[:-1]]
        assert [row["KL_completion_ids"] for row in batch] == [row["completion_ids"] for row in rotated]


@pytest.mark.parametrize(("stage", "name"), [("orpo", "concatenated_forward"), ("reward", "compute_loss")])
def test_losses_of_logits_are_computed_in_fp32(stage: str, name: str) -> None:
    """Also with DeepSpeed and pure bf16, which have no autocast."""
    trains = type("Trains", (), {name: lambda self, model, inputs: model(**inputs).logits})
    trainer = type("Trainer", (trl_trainers.MIXINS[stage], trains), {})()
    found = getattr(trainer, name)(lambda x: SimpleNamespace(logits=x), {"x": torch.ones(1, dtype=torch.bfloat16)})
    assert found.dtype == torch.float32


def test_the_loss_of_reward_models_subtracts_the_margin() -> None:
    """TRL passes the margin to the model, too; many architectures would not accept it."""
    columns = PreferenceTokenizer(Mock(), "reward", 9)._columns([1], [[2], [3]], {"margin": 2.0})
    assert columns == {"chosen_ids": [1, 2], "rejected_ids": [1, 3], "margin": 2.0}
    assert PreferenceTokenizer(Mock(), "reward", 9)._columns([1], [[2], [3]], {})["margin"] == 0
    inputs = DataCollatorForPreference(pad_token_id=0)([columns])
    trainer = type("Trainer", (trl_trainers.MIXINS["reward"], RewardTrainer), {"__init__": lambda self: None})()
    trainer.args, trainer.model = SimpleNamespace(center_rewards_coefficient=None), SimpleNamespace(training=False)
    trainer.accelerator, trainer._metrics, trainer._total_train_tokens = MagicMock(), defaultdict(MagicMock), 0
    rewards = torch.tensor([[3.0], [0.5]])
    loss = trainer.compute_loss(lambda input_ids, attention_mask, use_cache: SimpleNamespace(logits=rewards), inputs)
    assert float(loss) == pytest.approx(-math.log(1 / (1 + math.exp(-(3.0 - 0.5 - 2.0)))))


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama"])
def test_a_new_head_is_not_reported(tmp_path: Path, kind: str) -> None:
    """Neither its random weights, nor the head of the language model, which is not tied here, so that it is a weight of
    the checkpoint. GPT-2's and GPT-NeoX's classes do not inherit from GenericForSequenceClassification."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=False, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load = partial(AutoModelForSequenceClassification.from_pretrained, tmp_path, num_labels=1, output_loading_info=True)
    with trl_trainers.without_new_head_warning():
        _, loaded = load()
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    assert "score.weight" in load()[1]["missing_keys"]


def test_long_examples_are_truncated_or_dropped(fork_server: ForkServer) -> None:
    complete, _ = prepared_split("dpo", fork_server, data__max_samples=0)
    short, _ = prepared_split("dpo", fork_server, data__max_samples=0, data__max_length=80)
    assert 0 < len(short) < len(complete)
    assert max(len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in short) == 80
    scored, _ = prepared_split("reward", fork_server, data__max_samples=0, data__max_length=90)
    assert 0 < len(scored) < len(complete)
    assert max(max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in scored) <= 90


def test_a_validation_set_without_desirable_completions_is_named() -> None:
    lines: list[str] = []
    plan = SimpleNamespace(compute_dtype="fp32", tensor_parallel_size=1)
    log = SimpleNamespace(info=lines.append)
    context: Any = SimpleNamespace(spec=spec("kto", **{"eval.num_generations": 2}), run=plan, group=None, run_log=log)
    training._generation(context, None, data.PreparedData(Dataset.from_dict({}), None))
    assert lines == ["No outputs are generated, because the validation set has no desirable completion."]
