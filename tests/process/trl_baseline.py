"""The training of `gpu_cases.BASE` with TRL's SFTTrainer alone, without Footplate: python trl_baseline.py FOLDER.

Reads FOLDER/request.json and writes FOLDER/result.json (the time and loss of each step, and the peak memory)."""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

folder = Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
gpu = request["family"] != "cpu"


class StepTimer(TrainerCallback):
    """Records when each step ended on the device: CUDA kernels run asynchronously to Python."""

    def __init__(self) -> None:
        self.times, self.losses = [], []

    def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
        """Record the time and the loss of a step."""
        if "loss" in logs:
            if gpu:
                torch.cuda.synchronize()
            self.times.append(time.time())
            self.losses.append(logs["loss"])


tokenizer = AutoTokenizer.from_pretrained(request["model"])
model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
arguments = SFTConfig(
    str(folder / "out"), max_steps=request["steps"], per_device_train_batch_size=request["batch"],
    max_length=request["length"],
    learning_rate=request["rate"], lr_scheduler_type="cosine", warmup_steps=0, optim="adamw_torch", weight_decay=0.0,
    bf16=True, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", use_cpu=not gpu,
    dataloader_pin_memory=gpu, seed=42, data_seed=42, disable_tqdm=True,
)  # fmt: skip
dataset = load_dataset("json", data_files=request["rows"], split="train", cache_dir=str(folder / "cache"))
timer = StepTimer()
SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer, callbacks=[timer]).train()
peak = torch.cuda.max_memory_allocated() if gpu else 0
(folder / "result.json").write_text(json.dumps({"times": timer.times, "losses": timer.losses, "peak_bytes": peak}))
