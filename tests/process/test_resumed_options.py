"""A run that resumes from the checkpoint of another run trains with its own learning rate, weight decay and
intervals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from safetensors.torch import load_file
from training_runs import losses, make_spec, read_metrics, result
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from backend import registry
from backend.config import RunSpec
from backend.train import disk_space, resumed_options, resumed_position
from backend.train.device import ProcessGroup
from backend.train.run_log import RunLog
from backend.train.trl_trainers import SeededSampler, TrainerMixin

HALF, ALL, NEARLY_ZERO = 4, 8, 1e-12
COMMON = {
    "train.duration": "steps", "train.lr_scheduler_type": "cosine", "train.learning_rate": 1e-3, "logging.steps": 1,
    "eval.strategy": "no", "save.strategy": "steps", "save.steps": HALF, "train.warmup_steps": 2,
    "save.final_model": True,
}  # fmt: skip
STRATEGIES = {"single": 0, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp2": 2}
QUICK = {("zero2", "adamw_torch")}
# Schedule-free optimizers save an average of the weights, which moves on.
OPTIMIZERS = [name for name, row in registry.OPTIMIZERS.items() if not row.package and "schedule_free" not in name]


def cases() -> list[Any]:
    found = [(strategy, "adamw_torch") for strategy in STRATEGIES] + [("single", name) for name in OPTIMIZERS]
    return [
        pytest.param(*case, id="-".join(case), marks=() if case in QUICK else pytest.mark.soak)
        for case in dict.fromkeys(found)
    ]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "adapter_model.safetensors")


@pytest.mark.parametrize(("strategy", "optimizer"), cases())
def test_own_learning_rate(fork_server: ForkServer, tmp_path: Path, strategy: str, optimizer: str) -> None:
    ranks = STRATEGIES[strategy]
    spec = {**COMMON, "parallel.strategy": strategy, "train.optim": optimizer, "launch.nproc_per_node": ranks or 1}
    first = fork_server.train(tmp_path / "first", make_spec({**spec, "train.max_steps": HALF}), ranks)
    resumed = {
        "train.max_steps": ALL, "train.learning_rate": NEARLY_ZERO, "save.resume_from": "path",
        "save.resume_path": str(first / f"checkpoints/checkpoint-{HALF}"),
    }  # fmt: skip
    second = fork_server.train(tmp_path / "second", make_spec({**spec, **resumed}), ranks)
    rates = {point["step"]: point["learning_rate"] for point in read_metrics(second) if "learning_rate" in point}
    assert set(rates) == set(range(HALF + 1, ALL + 1)) and 0 < rates[HALF + 1] < NEARLY_ZERO, rates
    before, after = weights(first), weights(second)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-7
    assert result(second)["steps"] == ALL


def test_own_intervals(fork_server: ForkServer, tmp_path: Path) -> None:
    """transformers reads the intervals from the trainer_state.json of the checkpoint. An evaluation that the checkpoint
    lacks comes first. The generations before training are those of the run that is continued."""
    evaluated = {"eval.strategy": "steps", "data.validation_split": 0.2}
    evaluated |= {"eval.num_generations": 2, "eval.max_new_tokens": 8}
    long = {**COMMON, **evaluated, "logging.steps": HALF, "eval.steps": 3, "save.total_limit": 0}
    first = fork_server.train(tmp_path / "first", make_spec({**long, "train.max_steps": ALL}))
    short = {
        **long, "logging.steps": 1, "eval.steps": 2, "save.steps": 2, "train.max_steps": ALL,
        "save.resume_from": "path", "save.resume_path": str(first / f"checkpoints/checkpoint-{HALF}"),
    }  # fmt: skip
    second = fork_server.train(tmp_path / "second", make_spec(short))
    points = read_metrics(second)
    assert [point["step"] for point in points if "loss" in point] == [5, 6, 7, 8]
    assert [point["step"] for point in points if "eval_loss" in point] == [4, 6, 8]  # the first is owed
    assert {path.name for path in (second / "checkpoints").iterdir()} == {"checkpoint-6", "checkpoint-8"}
    before, other = ([sample["before"] for sample in result(run)["samples"]] for run in (first, second))
    assert before == other != [sample["after"] for sample in result(first)["samples"]]


def test_grouped_by_length_in_a_later_epoch(fork_server: ForkServer, tmp_path: Path) -> None:
    """Each epoch has every example once, also one that is resumed, and whatever else has drawn random numbers."""
    changes = {
        "train.train_sampling_strategy": "group_by_length", "data.max_samples": 8, "train.max_steps": ALL,
        "save.steps": 2, "save.total_limit": 0, "lora.dropout": 0.1, "lora.init": "gaussian",
    }  # fmt: skip
    run = fork_server.train(tmp_path / "run", make_spec({**COMMON, **changes}))
    before = losses(run)
    fork_server.resume(run, HALF + 2)
    assert losses(run) == before and len(set(before.values())) == ALL


class Seeing(TrainerMixin, Trainer):
    """A trainer that takes note of the examples of each step; the first token of an example is its number."""

    spec = RunSpec()

    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        self.seen.append(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *more)


def trained_on(folder: Path, start: Path | None, batch_size: int, **length: float) -> tuple[list[list[int]], int]:
    """The examples of each step of a training on eight examples, and its last step."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    arguments = TrainingArguments(
        str(folder / "checkpoints"), use_cpu=True, report_to=[], per_device_train_batch_size=batch_size,
        save_strategy="no" if start else "steps", save_steps=1, disable_tqdm=True, logging_strategy="no", **length,
    )  # fmt: skip
    rows = [{"input_ids": torch.tensor([n, 1]), "labels": torch.tensor([n, 1])} for n in range(8)]
    trainer = Seeing(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)), arguments, train_dataset=rows)  # type: ignore[arg-type]
    run = SimpleNamespace(zero_stage=0)
    trainer.context = SimpleNamespace(
        folder=folder, group=ProcessGroup(), run_log=RunLog(folder), run=run, use_cache=None, spec=Seeing.spec
    )  # type: ignore[assignment]
    trainer.seen, trainer.start = [], start
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    return trainer.seen, trainer.state.global_step


@pytest.mark.parametrize(
    ("before", "after", "length", "last"),
    [
        ((1, 6), 2, {"num_train_epochs": 2.0}, 6 + 1 + 4),  # a node has joined: the epochs have eight steps
        ((2, 3), 1, {"num_train_epochs": 2.0}, 3 + 2 + 8),  # a node has left
        ((1, 8), 4, {"num_train_epochs": 1.0}, 8),
        ((1, 16), 4, {"num_train_epochs": 3.0}, 16 + 2),
        ((2, 3), 2, {"num_train_epochs": 2.0}, 8),
        ((2, 15), 1, {"max_steps": 20}, 20),  # after more epochs than 20 steps of one example have
    ],
)
def test_another_batch_size_changes_no_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: int, length: dict[str, float],
    last: int,
) -> None:  # fmt: skip
    """Each epoch has every example once, since the batch sizes divide them, and training ends after its epochs, or its
    steps."""
    monkeypatch.setattr(disk_space, "save_checkpoint", lambda context, folder, write: write())
    first, step = trained_on(tmp_path, None, before[0], max_steps=before[1])
    second, ended = trained_on(tmp_path, tmp_path / f"checkpoints/checkpoint-{step}", after, **length)
    assert step == before[1] and ended == last and len(second) == last - step
    numbers = [number for examples in (*first, *second) for number in examples]
    assert all(sorted(numbers[n : n + 8]) == list(range(8)) for n in range(0, len(numbers) - 7, 8))
    if "num_train_epochs" in length:
        assert len(numbers) == 8 * length["num_train_epochs"]


def test_the_rest_of_an_epoch_that_is_less_than_a_step_is_left_out() -> None:
    """Seven of eight examples, then steps of four: an empty rest of the epoch would be evaluated and saved again."""
    found = resumed_position.find(7, 0.875, 2, 2, 1, 4, by_epochs=True)
    assert found == resumed_position.Position(epochs=1, batches=0, num_epochs=2, max_steps=7 + 2)


def test_an_evaluation_that_a_checkpoint_lacks() -> None:
    args = SimpleNamespace(eval_strategy="epoch", eval_delay=0)
    state = SimpleNamespace(global_step=4, eval_steps=2, epoch=1.0, log_history=[{"step": 4, "loss": 1.0}])
    owes = resumed_position.owes_evaluation
    assert owes(args, state, ended_epoch=True) and not owes(args, state, ended_epoch=False)
    args.eval_strategy = "steps"
    assert owes(args, state, ended_epoch=False)
    args.eval_delay = 5
    assert not owes(args, state, ended_epoch=False)
    args.eval_delay = 0
    state.log_history.append({"step": 4, "eval_loss": 1.0})
    assert not owes(args, state, ended_epoch=False)


def test_the_schedule_and_the_options_of_the_run_hold_from_its_first_step() -> None:
    """Loading restores those of the checkpoint: its schedule of 10 steps is at its end."""
    weight = torch.nn.Parameter(torch.ones(1))

    def made(steps: int, beta: float) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([{"params": [weight], "beta1": beta, "scale": beta}], lr=1e-3)
        return optimizer, get_linear_schedule_with_warmup(optimizer, 0, steps)

    before, schedule = made(10, 0.5)
    before.state[weight]["projector"] = SimpleNamespace(scale=0.5)
    for _ in range(10):
        before.step()
        schedule.step()
    optimizer, longer = made(20, 0.9)
    own = resumed_options.read(optimizer)
    optimizer.load_state_dict(before.state_dict())
    longer.load_state_dict(schedule.state_dict())
    resumed_options.apply(optimizer, longer, own)
    (group,) = optimizer.param_groups
    assert group["lr"] == longer.get_last_lr()[0] == pytest.approx(5e-4)
    assert group["beta1"] == group["scale"] == optimizer.state[weight]["projector"].scale == 0.9


def test_the_order_by_length_is_that_of_all_ranks() -> None:
    lengths, epoch = list(range(100)), [0]
    orders = []
    for epoch[0] in (0, 1, 1):
        torch.rand(epoch[0] + len(orders))
        sampler = LengthGroupedSampler(4, lengths=lengths)
        orders.append(list(SeededSampler(sampler, 7, lambda: epoch[0])))
    assert orders[1] == orders[2] != orders[0] and sorted(orders[0]) == sorted(orders[1]) == lengths
