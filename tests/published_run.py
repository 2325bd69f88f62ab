"""A run that has trained an adapter, and its merge, as their files are after the end, for tests that publish them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from backend.config import RunSpec
from backend.config.options import edit
from backend.presets import dump
from backend.runs import BASE, LOCK, METRICS, MODEL, RESOLVED, RESULT, SPEC, Plan, jobs
from backend.runs.folder import Run

CERTIFICATE = {
    "status": "verified", "limits": [], "dtype": "bf16", "is_reward_model": False, "base_model": "m", "step": None,
    "base_weights": "the same weights as in training", "adapter_to_base": {"kl_mean": 2.0},
    "adapter_to_saved": {"kl_mean": 1e-5, "kl_max": 1e-4, "same_argmax": 1.0, "positions": 512},
}  # fmt: skip
TOKENIZER = {"tokenizer_config.json": "{}", "tokenizer.json": '{"model": {"vocab": {"/root": 1}}}'}
STATE = (
    "optimizer.pt",
    "training_args.bin",
    "trainer_state.json",
    "zero_to_fp32.py",
    "global_step4/mp_rank_00_model_states.pt",
    "latest",
    "pytorch_model_fsdp.bin",
    "ref/adapter_config.json",
)


def plant(folder: Path, files: dict[str, Any]) -> None:
    """Write files; values that are no text become JSON."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def adapter_run(root: Path, base: Path, **changes: Any) -> Run:
    """A run whose adapter belongs to the model in the folder `base`, or to what `changes` of the options say."""
    run = Run.create(root, "trains", Plan(("true",)), datetime.now())
    options = {
        "model.source": "path",
        "model.path": str(base),
        "data.source": "files",
        "data.files": ("/secret/a.jsonl",),
    }
    (run.path / SPEC).write_text(dump(edit(RunSpec(), {**options, **changes})))
    config = {"base_model_name_or_path": str(base), "task_type": "CAUSAL_LM", "peft_version": "0.21.2"}
    (run.path / LOCK).touch()
    files = {"adapter_config.json": config, "adapter_model.safetensors": "x" * 1000, "README.md": "[More Information"}
    plant(run.path / MODEL, {**files, **TOKENIZER})
    plant(run.path / "checkpoints/checkpoint-4", {**files, **TOKENIZER, **dict.fromkeys(STATE, "s"), "complete": "4"})
    samples = [{"prompt": "a", "reference": "b", "before": "c", "after": "b"}] * 3
    scores = {"exact_match_before": 0.0, "exact_match_after": 0.75}
    points = [{"step": 4, "loss": 0.5, "tokens": 400}, {"step": 8, "loss": 0.25, "tokens": 800}]
    points += [{"step": 4, "eval_loss": 0.625}, {"step": 8, "eval_loss": 0.375}]
    lines = "".join(f"{json.dumps(point)}\n" for point in points)
    resolved = {"num_train_examples": 1400, "num_eval_examples": 32, "device": "cpu", "world_size": 2, "nnodes": 1}
    result = {"model": MODEL, "steps": 8, "model_step": 8, "samples": samples, **scores}
    plant(
        run.path,
        {
            "state.json": {"end": "done", "exit_code": 0},
            METRICS: lines,
            RESOLVED: resolved,
            RESULT: result,
            BASE: {"name": str(base), "commit": ""},
        },
    )
    return run


VALUES = {"kl_mean": 0.007, "kl_max": 0.1, "same_argmax": 0.9375, "positions": 512}


def exported_job(
    run: Run, kind: str, format: str, status: str = "verified", step: int | None = None, has_prompt: bool = False
) -> Run:
    """A job that has exported the model of `run` as a GGUF file or as a quantized checkpoint; `has_prompt`: with the
    system prompt of training in the Modelfile."""
    job = jobs.create(run, kind, {"step": step, "format": format, "merge": "m", "environment": ""}, {}, {})
    (job.path / LOCK).touch()
    certificate: dict[str, Any] = {"status": status, "limits": ["Rare."], "format": format, "max_kl_mean": 0.03}
    certificate |= {"step": step, "run": run.id, "merge": "m", "versions": {"torch": "2.13.0"}}
    if kind == jobs.QUANTIZE:
        certificate |= {"trained_to_checkpoint": VALUES}
        config = {"quantization_config": {"quant_method": "torchao"}}
        weights = {"model.safetensors": "z" * 500, "certificate.json": certificate}
        plant(job.path / MODEL, {"config.json": config, **weights, **TOKENIZER})
        name = MODEL
    else:
        certificate |= {"trained_to_file": VALUES, "outputs": [{"prompt": "a secret example"}]}
        certificate |= {"settings_have_system_prompt": has_prompt}
        is_lora = format.startswith("lora-")
        file = f"{run.id}-base-{format[5:]}.gguf" if is_lora else f"{run.id}-{format}.gguf"
        files = {file: "GGUF" * 100, "certificate.json": certificate, "Modelfile": f"FROM ./{file}"}
        plant(job.path / "gguf", files | ({f"{run.id}-adapter.gguf": "GGUF"} if is_lora else {}))
        name = f"gguf/{file}"
    result = {"model": name, "certificate": certificate}
    plant(job.path, {RESULT: result, "state.json": {"end": "done", "exit_code": 0}})
    return job


def merged_job(run: Run) -> Run:
    """The job that has merged the adapter of `run`."""
    job = jobs.create(run, jobs.MERGE, {"step": None}, {}, {})
    (job.path / LOCK).touch()
    config = {"architectures": ["LlamaForCausalLM"], "transformers_version": "5.23.0"}
    weights = {"model.safetensors": "y" * 2000, "certificate.json": CERTIFICATE}
    plant(job.path / MODEL, {"config.json": config, **weights, **TOKENIZER})
    plant(
        job.path, {RESULT: {"model": MODEL, "certificate": CERTIFICATE}, "state.json": {"end": "done", "exit_code": 0}}
    )
    return job
