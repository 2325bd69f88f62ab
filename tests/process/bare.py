"""The same training as `devices.WHOLE` with TRL's SFTTrainer and nothing of Footplate: python bare.py FOLDER, in which
ask.json says what to train. It writes told.json."""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

folder = Path(sys.argv[1])
ask = json.loads((folder / "ask.json").read_text())
gpu = ask["family"] != "cpu"


class StepTimer(TrainerCallback):
    """When each step had really ended: a GPU works on after Python has gone on."""

    def __init__(self) -> None:
        self.times, self.losses = [], []

    def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
        """After each step."""
        if "loss" in logs:
            if gpu:
                torch.cuda.synchronize()
            self.times.append(time.time())
            self.losses.append(logs["loss"])


tokens = AutoTokenizer.from_pretrained(ask["model"])
model = AutoModelForCausalLM.from_pretrained(ask["model"], dtype=torch.float32)
arguments = SFTConfig(
    str(folder / "out"), max_steps=ask["steps"], per_device_train_batch_size=ask["batch"], max_length=ask["length"],
    learning_rate=ask["rate"], lr_scheduler_type="cosine", warmup_steps=0, optim="adamw_torch", weight_decay=0.0,
    bf16=True, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", use_cpu=not gpu,
    dataloader_pin_memory=gpu, seed=42, data_seed=42, disable_tqdm=True,
)  # fmt: skip
rows = load_dataset("json", data_files=ask["rows"], split="train", cache_dir=str(folder / "cache"))
clock = StepTimer()
SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokens, callbacks=[clock]).train()
peak = torch.cuda.max_memory_allocated() if gpu else 0
(folder / "told.json").write_text(json.dumps({"times": clock.times, "losses": clock.losses, "peak_bytes": peak}))
