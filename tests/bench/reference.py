"""The same training as `training.case(1)` with the Trainer of Transformers alone; model and dataset are the same."""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from backend.paths import ASSETS, model_folder

steps = int(sys.argv[1])
folder = model_folder("smollm2-135m-instruct")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [json.loads(line)["messages"] for line in (ASSETS / "trains" / "train.jsonl").read_text().splitlines()]


def encode(messages: list[dict]) -> dict:
    """Tokens of a conversation; the loss covers the assistant's turn."""
    input_ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"][:256]
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
    return {"input_ids": input_ids, "labels": [-100] * len(prompt) + input_ids[len(prompt) :]}


def collate(items: list[dict]) -> dict:
    """Right padding to the longest sequence of the batch, as TRL pads."""
    width = max(len(i["input_ids"]) for i in items)
    pad = {"input_ids": tokenizer.pad_token_id, "labels": -100}
    batch = {k: torch.tensor([i[k] + [v] * (width - len(i[k])) for i in items]) for k, v in pad.items()}
    batch["attention_mask"] = torch.tensor(
        [[1] * len(i["input_ids"]) + [0] * (width - len(i["input_ids"])) for i in items]
    )
    return batch


class StepTimer(TrainerCallback):
    """Records when each step ended."""

    times: list[float] = []  # noqa: RUF012 - one instance per process

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Record the time."""
        self.times.append(time.time())


with tempfile.TemporaryDirectory() as out:
    arguments = TrainingArguments(
        out, max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="cosine",
        warmup_steps=0.03, logging_steps=1, save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(),
        seed=42, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data = Dataset.from_list([encode(row) for row in rows])
    Trainer(model, arguments, train_dataset=data, data_collator=collate, callbacks=[StepTimer()]).train()
    print(f"steps_per_second={(steps - 2) / (StepTimer.times[-1] - StepTimer.times[1])}")
