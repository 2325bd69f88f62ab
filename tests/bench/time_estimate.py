"""The time estimate on this CPU next to measured seconds per step, on an idle machine: the goal is a ratio of 0.7 to
1.4."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from backend import presets
from backend.cli.estimate import CPU_SECONDS
from backend.config.options import edit
from backend.machine import probe
from backend.paths import model_folder
from backend.preflight import preflight
from backend.runs import PROGRESS
from backend.runs.folder import ALIVE, Run
from tests.bench.training import Measurement

LOWEST, HIGHEST = 0.7, 1.4  # of the goal
STEPS = 8
WITHOUT = {
    "train.duration": "steps", "train.max_steps": STEPS, "eval.strategy": "no", "eval.num_generations": 0,
    "save.strategy": "no", "save.final_model": False,
}  # fmt: skip
TINY = {"model.builtin": "tiny-llama", "train.max_steps": 40}
CASES = {
    "First run": {},
    "full": {"method.kind": "full"},
    "bf16": {"precision.compute": "bf16"},
    "full, bf16": {"precision.compute": "bf16", "method.kind": "full"},
    "batches of one example": {"train.per_device_train_batch_size": 1},
    "activation checkpointing": {"train.activation_checkpointing": True},
    "packing": {"data.packing": True},
    "two processes": {"parallel.strategy": "ddp", "launch.nproc_per_node": 2},
    "two processes, full": {"parallel.strategy": "ddp", "launch.nproc_per_node": 2, "method.kind": "full"},
    "tiny": TINY,
    "tiny, full, batches of 16": {**TINY, "method.kind": "full", "train.per_device_train_batch_size": 16},
    "mixture of experts, full": {"method.kind": "full", "model.source": "path"},
}


def measure(folder: Path) -> Iterator[Measurement]:
    """The ratio of measured and predicted seconds per step of each case, and how many reach the goal."""
    ratios = []
    for name, options in CASES.items():
        more = {"model.path": str(mixture(folder / "mixture"))} if options.get("model.source") else {}
        spec = edit(presets.read("first-run"), {**WITHOUT, **options, **more})
        report = preflight(spec, probe(folder), Path.cwd(), 60, cpu_seconds=CPU_SECONDS)
        if report.time.unknown:
            print(f"  {name}: {report.time.unknown}")
            continue
        run = Run.create(folder / "runs", "estimate", report.plan, datetime.now(), report.about, report.expected)
        run.start()
        while run.state in ALIVE:
            time.sleep(0.1)
        assert run.state == "done", run.failure()
        seconds = json.loads((run.path / PROGRESS).read_text())["step_seconds"]
        ratios.append(seconds / report.time.step_seconds)
        yield f"{name}: predicted", [report.time.step_seconds], "s"
        yield f"{name}: measured / predicted", [ratios[-1]], ""
    yield "cases within 0.7 to 1.4", [sum(LOWEST <= ratio <= HIGHEST for ratio in ratios)], f"of {len(ratios)}"


def mixture(folder: Path) -> Path:
    """A small mixture of experts with random weights, and the tokenizer of the default model."""
    source = model_folder("smollm2-135m-instruct")
    if not folder.exists():
        config = Qwen3MoeConfig(
            hidden_size=256, intermediate_size=512, moe_intermediate_size=256, num_hidden_layers=4, num_experts=8,
            num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            vocab_size=json.loads((source / "config.json").read_text())["vocab_size"],
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for file in (*source.glob("*token*"), source / "chat_template.jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
