"""Steps, checkpoints and schedules of the Trainer; training stages; packing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DefaultFlowCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_constant_schedule,
    get_scheduler,
)
from transformers.masking_utils import create_causal_mask

from cited import cites

pytestmark = pytest.mark.filterwarnings("ignore")


class Scalar(nn.Module):
    """A model with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).square().mean()}


EXAMPLES = [{"x": torch.tensor([1.0])} for _ in range(10)]


def make_trainer(folder: Path, **more: Any) -> Trainer:
    given = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", **more}
    return Trainer(Scalar(), TrainingArguments(output_dir=str(folder), **given), train_dataset=EXAMPLES)


@cites("TRN001")
def test_an_epoch_has_at_least_one_step(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, num_train_epochs=2, per_device_train_batch_size=16, gradient_accumulation_steps=64, logging_steps=1
    )
    trainer.train()
    assert trainer.state.global_step == 2


def rates(name: str, warmup: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
    values = []
    for _ in range(steps):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return values


@cites("TRN002")
@pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup"])
def test_a_long_warmup_never_reaches_the_peak(name: str) -> None:
    assert max(rates(name, 100, 50)) < 0.5
    assert max(rates(name, 10, 50)) == 1
    assert max(rates(name, 50, 50)) < 1
    assert rates(name, TrainingArguments(warmup_steps=0.03).get_warmup_steps(1), 1) == [0]


@cites("TRN003")
def test_the_constant_schedule_starts_at_the_full_rate() -> None:
    assert "num_warmup_steps" not in inspect.signature(get_constant_schedule).parameters
    assert rates("constant", 10, 20) == [1.0] * 20


@cites("TRN005")
def test_a_checkpoint_is_written_at_the_end(tmp_path: Path) -> None:
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="steps")
    saved = []
    for step in range(1, 21):
        state = TrainerState(global_step=step, max_steps=20, save_steps=500, logging_steps=500, eval_steps=500)
        if DefaultFlowCallback().on_step_end(given, state, TrainerControl()).should_save:
            saved.append(step)
    assert saved == [20]


@cites("TRN007")
def test_without_its_state_the_optimizer_starts_from_scratch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=5)
    trainer.create_optimizer_and_scheduler(5)
    trainer._load_optimizer_and_scheduler(str(tmp_path))
    assert not trainer.optimizer.state


@cites("DAT007")
def test_evaluation_needs_an_eval_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="but you didn't pass an `eval_dataset`"):
        make_trainer(tmp_path, eval_strategy="steps")


def llama(**more: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, **more))


@cites("DAT013")
def test_packing_builds_a_mask_of_all_pairs_of_tokens() -> None:
    model = llama(attn_implementation="sdpa")
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    mask = create_causal_mask(model.config, torch.zeros(1, 12, 32), None, None, position_ids=position_ids)
    assert mask.shape == (1, 1, 12, 12)
    assert not mask[0, 0, 11, 0]


PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}
LABELED = {"prompt": "a", "completion": " b", "label": True}


@cites("STG006")
@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize(
    ("kind", "config", "example"), [(trl.DPOTrainer, trl.DPOConfig, PAIR), (trl.KTOTrainer, trl.KTOConfig, LABELED)]
)
def test_the_reference_is_a_second_model(
    kind: Any, config: Any, example: dict[str, Any], precompute: bool, tiny: Path, tmp_path: Path
) -> None:
    """Unless its log-probabilities are precomputed."""
    given = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "bf16": False, "per_device_train_batch_size": 2}
    args = config(output_dir=str(tmp_path), precompute_ref_log_probs=precompute, **given)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    trainer = kind(model, args=args, train_dataset=Dataset.from_list([example, example]), processing_class=tokenizer)
    assert (trainer.ref_model is None) is precompute


@cites("STG011")
@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_aot_sorts_the_pairs_of_a_batch(loss: str) -> None:
    source = inspect.getsource(trl.DPOTrainer._compute_loss).partition(f'loss_type == "{loss}":')[2]
    branch = source.partition("elif loss_type")[0]
    assert branch.count("torch.sort(") == 2 and branch.count("dim=0") == 2
    assert "per_sequence_loss = (\n                    -F.logsigmoid(self.beta * delta)" in branch


@cites("STG010")
def test_the_only_example_of_kto_is_compared_with_itself() -> None:
    """The completions that the KL divergence is estimated with are those of the batch, shifted by one."""
    source = inspect.getsource(trl.KTOTrainer)
    assert '[examples["completion_ids"][-1]] + examples["completion_ids"][:-1]' in source
    assert "kl = (KL_logps - ref_KL_logps).mean().detach()" in source
    assert "kl = self.accelerator.gather_for_metrics(kl).mean().clamp(min=0)" in source
    assert "chosen_losses = 1 - F.sigmoid(self.beta * (chosen_logratios - kl))" in source
