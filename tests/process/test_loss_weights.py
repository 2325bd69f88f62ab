"""Turn weights: the column and the batches that the trainer gets, equal weights, streaming, resuming, and the eval
loss. tests/process/test_reference_loop.py compares losses and weights with a loop in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from fork_server import ForkServer
from training_runs import log_text, losses, make_spec, read_metrics, result, same_losses
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from backend.config import RunSpec
from backend.config.options import edit
from backend.runs import SKIP_CHECKS
from backend.train import data, eval_loss, loss_weights, model, streaming, trl_trainers, verify
from backend.train.run_log import TrainError

COLLATE = DataCollatorForLanguageModeling(pad_token_id=0)
EXAMPLES = [
    {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4], "loss_weights": [1, 0.5, 9, 3], "seq_lengths": [4]},
    {"input_ids": [5, 6], "labels": [5, 6], "loss_weights": None, "seq_lengths": [2]},
]


def write(path: Path, weights: list[Any], count: int = 12) -> str:
    """Conversations of several lengths; the weight of the n-th answer is `weights[n % len(weights)]`, if it has one."""
    lines = []
    for n in range(count):
        answer: dict[str, Any] = {"role": "assistant", "content": f"At {n}." + " Please be early." * (n * n % 5)}
        if weights[n % len(weights)] is not None:
            answer["weight"] = weights[n % len(weights)]
        lines.append(json.dumps({"messages": [{"role": "user", "content": f"When does train {n} leave?"}, answer]}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def spec_of(file: str, **changes: Any) -> RunSpec:
    files = {"data.source": "files", "data.files": (file,), "data.validation": "none", "data.max_samples": 0}
    return make_spec({**files, "logging.steps": 1, **changes})


def prepare(spec: RunSpec, tiny: Path) -> Dataset:
    tokenizer = model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True}))
    return data.prepare(spec, tokenizer, lambda done, of: True, lambda line: None).train


def test_only_data_with_other_weights_has_the_column(tmp_path: Path, tiny: Path) -> None:
    """A mixture has it if one of its datasets does; examples without a weight have null there."""
    one = prepare(spec_of(write(tmp_path / "a.jsonl", [0, 1, None])), tiny)
    assert one.column_names == ["input_ids", "labels"]
    spec = spec_of(write(tmp_path / "b.jsonl", [0.1, 1]))
    (weighted, other) = prepare(spec, tiny).select([0, 1])
    assert other["loss_weights"] is None and len(weighted["loss_weights"]) == len(weighted["labels"])
    of_answer = [w for w, label in zip(weighted["loss_weights"], weighted["labels"], strict=True) if label != -100]
    assert of_answer == pytest.approx([0.1] * len(of_answer)) and weighted["loss_weights"][0] == 1
    files = {"source": "files", "files": (str(tmp_path / "a.jsonl"),), "validation": "none"}
    mixed = prepare(edit(spec, {"data.sources": ({}, files)}), tiny)
    assert sum(row["loss_weights"] is not None for row in mixed) == 6 and len(mixed) == 20
    assert data.fingerprint(mixed) != data.fingerprint(mixed.remove_columns("loss_weights"))


@pytest.mark.parametrize("packed", [False, True])
def test_weights_of_a_batch_have_the_shape_of_its_labels(packed: bool) -> None:
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=packed)
    batch = loss_weights.Collator(collate)(EXAMPLES)
    rows = [[1, 0.5, 9, 3, 1, 1]] if packed else [[1, 0.5, 9, 3], [1, 1, 0, 0]]
    assert batch["loss_weights"].tolist() == rows
    assert [float(each) for each in loss_weights.sums(batch)] == [3, 4.5]
    assert [float(each) for each in loss_weights.sums(COLLATE(EXAMPLES))] == [3, 3]
    loads = type("Loads", (), {"data_collator": collate, "get_eval_dataloader": lambda self: self.data_collator})
    trainer: Any = type("Trainer", (eval_loss.EvalLossMixin, loads), {})()
    assert trainer.get_eval_dataloader() == COLLATE, "examples of an evaluation are not packed"
    trainer.data_collator = loss_weights.Collator(collate)
    assert trainer.get_eval_dataloader() == loss_weights.Collator(COLLATE)
    assert trainer.data_collator == loss_weights.Collator(collate)
    both = loss_weights.pack(Dataset.from_list(EXAMPLES).remove_columns("seq_lengths"), 8, "bfd")
    assert both["loss_weights"][:] == [[1, 0.5, 9, 3, 1, 1]]


def test_numbers_are_not_rounded_to_the_compute_dtype() -> None:
    """With DeepSpeed, transformers casts every tensor of floats in a batch: weights, and precomputed log-probs."""

    class Rounds:
        args = type("Arguments", (), {"device": "cpu"})

        def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: each.bfloat16() if each.is_floating_point() else each for name, each in inputs.items()}

    batch = loss_weights.Collator(COLLATE)([{**EXAMPLES[0], "loss_weights": [0.3] * 4}])
    batch["ref_chosen_logps"] = torch.tensor([-123.4567])
    for stage in ("sft", "dpo", "kto"):
        made: Any = type("Trainer", (trl_trainers.MIXINS.get(stage, trl_trainers.PretokenizedMixin), Rounds), {})()
        prepared = made._prepare_inputs(batch)
        assert torch.equal(prepared["loss_weights"], torch.full((1, 4), 0.3))
        assert torch.equal(prepared["ref_chosen_logps"], batch["ref_chosen_logps"])


def test_what_completes_the_last_batch_has_no_weight() -> None:
    rows = eval_loss.completed(Dataset.from_list([{**EXAMPLES[0], "labels": [-100, 2, 3, 4]}]), 3)
    batch = loss_weights.Collator(COLLATE)(list(rows))
    assert [float(each) for each in loss_weights.sums(batch)] == [3, 12.5]


def test_losses_without_weights_are_refused_when_the_run_reads_the_data() -> None:
    spec = make_spec({"parallel.strategy": "zero3", "parallel.sequence_parallel_size": 2})
    verify.check_loss_weights(spec, False)
    with pytest.raises(
        TrainError, match=r"^parallel.sequence_parallel_size: turns .* Disable sequence parallelism, or"
    ):
        verify.check_loss_weights(spec, True)


def test_equal_weights_change_nothing(tmp_path: Path, fork_server: ForkServer) -> None:
    """Bit by bit: the mean weight of a step is divided out, so a run whose turns all have a weight of 0.5 computes the
    same numbers as one without weights."""
    evaluates = {"eval.strategy": "steps", "eval.steps": 3, "data.validation": "split", "data.validation_split": 0.3}
    found = {}
    for name, weights in (("half", [0.5]), ("none", [None])):
        spec = spec_of(write(tmp_path / f"{name}.jsonl", weights), **evaluates, **{"eval.num_generations": 0})
        run = fork_server.train(tmp_path / name, edit(spec, {"train.gradient_accumulation_steps": 2}))
        found[name] = losses(run), result(run)["eval_loss"], [point.get("grad_norm") for point in read_metrics(run)]
    assert found["half"] == found["none"] and len(found["half"][0]) == 3


@pytest.mark.parametrize("packing", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_streamed_sequences_have_weights(tmp_path: Path, tiny: Path, packing: bool) -> None:
    spec = spec_of(write(tmp_path / "a.jsonl", [0.5, None]), **{"data.streaming": True, "data.packing": packing})
    tokenizer = model.load_tokenizer(spec, model.ModelSource(str(tiny), {"local_files_only": True}))
    rows = [row for row, _ in zip(streaming.Stream(spec, tokenizer), range(12), strict=False)]
    assert any(0.5 in (row["loss_weights"] or ()) for row in rows)
    assert all(len(row["loss_weights"] or row["labels"]) == len(row["labels"]) for row in rows)


@pytest.mark.soak
@pytest.mark.parametrize("packing", [False, True])
def test_equal_weights_change_nothing_in_a_stream(tmp_path: Path, fork_server: ForkServer, packing: bool) -> None:
    found = []
    for name, weights in (("half", [0.5]), ("none", [None])):
        streams = {"data.streaming": True, "data.packing": packing, "launch.nproc_per_node": 2}
        spec = spec_of(write(tmp_path / f"{name}.jsonl", weights, 80), **streams, **{"parallel.strategy": "ddp"})
        found.append(losses(fork_server.train(tmp_path / name, spec, 2)))
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_resumed_run_has_the_same_losses(tmp_path: Path, fork_server: ForkServer, ranks: int) -> None:
    saves = {"save.strategy": "steps", "save.steps": 2, "train.max_steps": 6, "train.gradient_accumulation_steps": 2}
    ddp = {"parallel.strategy": "ddp", "launch.nproc_per_node": 2} if ranks else {}
    spec = spec_of(write(tmp_path / "a.jsonl", [0.1, 7, None, 0]), **saves, **ddp)
    run = fork_server.train(tmp_path / "run", spec, ranks)
    expected = losses(run)
    fork_server.resume(run, 4, ranks)
    assert losses(run) == same_losses(expected) and len(expected) == 6


@pytest.mark.soak
def test_the_eval_loss_depends_on_nothing_but_the_examples(tmp_path: Path, fork_server: ForkServer) -> None:
    """Batches of 1, 2 and 7 examples on 1, 2 and 3 processes, of 10 examples with weights."""
    train, held_out = write(tmp_path / "a.jsonl", [None]), write(tmp_path / "b.jsonl", [0.01, 5, 1, None], 10)
    files = {"data.validation": "files", "data.validation_files": (held_out,), "train.max_steps": 1}
    found = {}
    for ranks in (1, 2, 3):
        for size in (1, 2, 7):
            each = {"eval.strategy": "steps", "eval.steps": 1, "eval.per_device_eval_batch_size": size}
            ddp = {"parallel.strategy": "ddp", "launch.nproc_per_node": ranks} if ranks > 1 else {}
            spec = spec_of(train, **{**files, **each, **ddp, "eval.num_generations": 0, "train.learning_rate": 1e-12})
            run = fork_server.train(tmp_path / f"{ranks}-{size}", spec, ranks if ranks > 1 else 0)
            found[ranks, size] = result(run)["eval_loss"]
    assert found == same_losses(dict.fromkeys(found, found[1, 1]))


@pytest.mark.soak
def test_unsupported_losses_end_the_run(tmp_path: Path, fork_server: ForkServer) -> None:
    ulysses = {"parallel.strategy": "zero3", "parallel.sequence_parallel_size": 2, "launch.nproc_per_node": 2}
    spec = spec_of(write(tmp_path / "a.jsonl", [0.1]), **ulysses)
    with pytest.raises(AssertionError):
        fork_server.train(tmp_path / "run", spec, 2, {SKIP_CHECKS: "1"})
    assert "turns of the data have weights other than 0 and 1" in log_text(tmp_path / "run")
