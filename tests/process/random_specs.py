"""Random specs over all options, for test_random_specs.py.

A spec starts with the main options (model, data, stage, method, strategy, precision, optimizer); then a few other
options get random values. The values let a run finish within seconds, so most invalid specs are invalid combinations of
valid values, as with users.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from backend import registry
from backend.config import RunSpec
from backend.config.options import SpecError, by_name, edit, options

Patch = dict[str, Any]

# Architectures, as small as the tiny Llama and with its tokenizer: model_type -> configuration.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEAD_DIM_16 = {**SIZES, "head_dim": 16}
ODD_SIZES = {**SIZES, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}  # for two devices
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**ODD_SIZES, "tie_word_embeddings": True},
    "qwen2": SIZES,
    "qwen3": HEAD_DIM_16,
    "mistral": {**SIZES, "sliding_window": 64},
    "gemma2": {**HEAD_DIM_16, "sliding_window": 64},
    "gemma3_text": {**HEAD_DIM_16, "sliding_window": 64},
    "phi3": SIZES,
    "gpt_neox": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"},  # it has none
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "qwen3_moe": {**HEAD_DIM_16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
TOKENIZER_CONFIG = {"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}


def _conversation(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Train {number}?"}, {"role": "assistant", "content": f"At {number} o'clock."}]


# Examples of each format: number -> example.
EXAMPLES: Mapping[str, Any] = {
    "messages": lambda n: {"messages": _conversation(n)},
    "sharegpt": lambda n: {
        "conversations": [{"from": "human", "value": f"Train {n}?"}, {"from": "gpt", "value": f"At {n} o'clock."}]
    },
    "alpaca": lambda n: {"instruction": f"Train {n}?", "input": "", "output": f"At {n} o'clock."},
    "prompt_completion": lambda n: {"prompt": f"Train {n}?", "completion": f" At {n} o'clock."},
    "text": lambda n: {"text": f"Train {n} leaves at {n} o'clock. " * (1 + n % 3)},
    "pairs": lambda n: {"prompt": f"Train {n}?", "chosen": f"At {n} o'clock.", "rejected": "Never."},
    "labels": lambda n: {"prompt": f"Train {n}?", "completion": f"At {n} o'clock.", "label": n % 2 == 0},
}
EXAMPLE_COUNT = 24

# Options that are not randomized, and why.
EXCLUDED: Mapping[str, str] = {
    "model.source": "set with the model",
    "model.builtin": "set with the model",
    "model.path": "set with the model",
    "model.hub_id": "the tests have no access to the Hub",
    "lora.adapter_path": "needs an adapter with the options of the run; tests/process/test_continued_adapter.py",
    "model.revision": "the tests have no access to the Hub",
    "data.source": "set with the data",
    "data.builtin": "set with the data",
    "data.files": "set with the data",
    "data.hub_id": "the tests have no access to the Hub",
    "data.hub_config": "the tests have no access to the Hub",
    "data.hub_split": "the tests have no access to the Hub",
    "data.validation_files": "set with the data",
    "data.sources": "set with the data",
    "data.chat_template_file": "set with the data",
    "train.use_unsloth": "tested by test_unsloth.py",
    "parallel.nvme_path": "set with the folder",
    "save.resume_from": "every run starts in a new folder",
    "save.resume_path": "set with the folder",
    "logging.report_to": "the tests have no access to tracking services",
    "launch.place": "Slurm jobs are tested by test_slurm.py",
    "slurm.partition": "as above",
    "slurm.time_limit": "as above",
    "slurm.requeue": "as above",
    "slurm.account": "as above",
    "slurm.qos": "as above",
    "slurm.constraint": "as above",
    "slurm.cpus": "as above",
    "slurm.memory_gib": "as above",
    "launch.gpu_model": "as above",
    "ray.cpus": "Ray jobs are tested by test_ray.py",
    "ray.resources": "as above",
    "ray.python": "as above",
    **dict.fromkeys(
        (option.name for option in options() if option.name.startswith("kubernetes.")),
        "Kubernetes jobs are tested by test_kubernetes.py",
    ),
    "launch.trainer": "LLaMA-Factory is tested by test_llamafactory_trainer.py",
    **dict.fromkeys((option.name for option in options() if option.name.startswith("llamafactory.")), "as above"),
    "slurm.container": "as above",
    "slurm.container_mounts": "as above",
    "slurm.container_python": "as above",
    "slurm.extra": "as above",
    "slurm.setup": "as above",
    "launch.rendezvous": "multi-node runs are tested by test_nodes.py",
    "launch.nnodes": "as above",
    "launch.min_nnodes": "as above",
    "launch.node_rank": "as above",
    "launch.master_addr": "as above",
    "launch.rdzv_id": "as above",
    "launch.hostfile": "as above",
    "launch.include": "as above",
    "launch.max_restarts": "as above",
    "launch.master_port": "a free port is chosen for each run",
    "launch.device": "the tests run on a CPU",
}
# Plausible values with a short run time, for options whose kind does not determine them.
VALUES: Mapping[str, Sequence[Any]] = {
    "data.messages_column": ("", "messages", "talk"),
    "data.prompt_column": ("", "prompt", "instruction"),
    "data.completion_column": ("", "completion"),
    "data.chosen_column": ("", "chosen"),
    "data.rejected_column": ("", "rejected", "chosen"),
    "data.label_column": ("", "label"),
    "data.text_column": ("", "text"),
    "data.system_column": ("system", "", "persona"),
    "data.system_prompt": ("", "Be brief."),
    "data.chat_template_kwargs": ("", '{"enable_thinking": false}'),
    # The examples have 20 to 150 tokens. Without a worker process that tokenizes them (tests/conftest.py), the checks
    # only estimate that, so lengths in between have no certain outcome.
    "data.max_length": (8, 256, 512, 1024),
    "data.max_samples": (0, 1, 2, 5, 8, 16),
    "data.weight": (0.3, 1.0, 2.0),
    "data.validation_split": (0.0, 0.05, 0.2, 0.5, 0.9),
    "data.dataset_num_proc": (1, 2),
    "data.streaming": (False, True),
    "data.add_tokens": ((), ("<tool>",), ("<|im_end|>", "<tool>")),
    "data.add_special_tokens": ((), ("<|end|>",), ("<|im_end|>",)),
    "lora.r": (1, 3, 4, 8, 64, 200),
    "lora.alpha": (0.0, 8.0, 32.0, 128.0),
    "lora.dropout": (0.0, 0.05, 0.5),
    "lora.loraplus_lr_ratio": (1.0, 4.0, 16.0),
    "lora.target_modules": ((), ("q_proj",), ("q_proj", "down_proj"), ("c_attn",), ("lm_head",), ("nothing",)),
    "lora.modules_to_save": ((), ("lm_head",), ("embed_tokens",), ("norm",), ("embed_tokens", "lm_head")),
    "method.freeze_trainable_layers": (-3, -1, 0, 1, 2, 3, 4),
    "method.freeze_extra_modules": ((), ("lm_head",), ("embed_tokens",), ("norm",), ("nothing",)),
    "train.num_train_epochs": (0.1, 0.5, 1.0, 2.0),
    "train.max_steps": (1, 2, 3, 4),
    "train.per_device_train_batch_size": (1, 2, 3, 4),
    "train.gradient_accumulation_steps": (1, 2, 3),
    "train.learning_rate": (0.0, 1e-5, 1e-4, 1e-3),
    "train.warmup_steps": (0.0, 0.1, 1.0, 2.0, 10.0),
    "train.weight_decay": (0.0, 0.1),
    "train.adam_beta1": (0.0, 0.9, 0.95),
    "train.adam_beta2": (0.0, 0.95, 0.999),
    "train.adam_epsilon": (1e-8, 1e-6),
    "train.max_grad_norm": (0.0, 0.5, 1.0),
    "train.half_lr_retries": (0, 1),
    "train.stop_on_spike": (False, True),
    "train.max_hours": (0.0, 100.0),
    "train.max_nonfinite_steps": (1, 3, 100_000),
    "train.momentum": (0.0, 0.9),
    "train.projection_rank": (1, 4, 16, 128),
    "train.update_proj_gap": (1, 2, 200),
    "train.optim_target_modules": ((), ("q_proj",), ("nothing",)),
    "train.galore_scale": (0.25, 1.0),
    "train.apollo_scale": (1.0, 8.0),
    "train.badam_switch_block_every": (1, 2, 50),
    "train.neftune_noise_alpha": (0.0, 5.0),
    "train.dataloader_num_workers": (0, 1),
    "train.seed": (0, 42, 4294967295),
    "preference.beta": (0.0, 0.05, 0.5),
    "preference.label_smoothing": (0.0, 0.1),
    "preference.sft_loss_weight": (0.0, 0.5),
    "preference.desirable_weight": (1.0, 1.3),
    "preference.undesirable_weight": (1.0, 0.7),
    "preference.center_rewards_coefficient": (0.0, 0.01),
    "parallel.bucket_cap_mb": (1, 25, 64),
    "parallel.ddp_timeout": (60, 1800),
    "parallel.nvme_buffer_count": (4, 8),
    "parallel.nvme_buffer_size_mb": (1, 8),
    "parallel.aio_block_size_kb": (64, 1024),
    "parallel.aio_queue_depth": (2, 8),
    "parallel.aio_intra_op_parallelism": (1, 2),
    "parallel.transformer_layer_cls_to_wrap": ((), ("LlamaDecoderLayer",), ("GPT2Block",)),
    "parallel.replicate_size": (1, 2, 4),
    "parallel.tensor_parallel_size": (2, 4),
    "parallel.context_parallel_size": (1, 2),
    "parallel.sequence_parallel_size": (1, 2),
    "parallel.extra_config": (
        "",
        '{"zero_optimization": {"overlap_comm": false}}',
        '{"gradient_clipping": 0.5}',
        '{"zero_optimization": {"stage3_param_persistence_threshold": 100}}',
        '{"train_micro_batch_size_per_gpu": 7}',
        '{"limit_all_gathers": false}',
        '{"activation_checkpointing": true}',
        '{"activation_checkpointing": {"partition_activations": false}}',
        '{"optimizer": {"type": "Adam"}}',
        '{"prescale_gradients": true}',
        '{"state_dict_type": "FULL_STATE_DICT"}',
    ),
    "eval.steps": (1, 2, 50),
    "eval.per_device_eval_batch_size": (1, 2, 8),
    "eval.num_generations": (0, 1, 3),
    "eval.max_new_tokens": (1, 8),
    "eval.early_stopping_patience": (0, 1, 3),
    "eval.early_stopping_threshold": (0.0, 0.5),
    "save.steps": (1, 2, 100),
    "save.total_limit": (0, 1, 2),
    "save.keep_best": (0, 1, 3),
    "save.stop_timeout": (60, 1800),
    "logging.run_name": ("", "a name"),
    "logging.steps": (1, 2, 10),
    "launch.nproc_per_node": (1, 2, 2, 2, 3, 4),
    "launch.devices": ((), (0,), (0, 1)),
    "launch.omp_num_threads": (0, 1),
    "launch.extra_accelerate_config": ("", '{"mixed_precision": "bf16"}', '{"main_training_function": "main"}'),
    "launch.env": ({}, {"OMP_NUM_THREADS": "2"}, {"TOKENIZERS_PARALLELISM": "false"}, {"RANK": "1"}),
}
RARE_OPTIONS = {
    "train.torch_compile": 0.1,
    "train.use_liger_kernel": 0.5,
    "model.attn_implementation": 0.6,
}  # slow, or mostly for GPUs: option -> factor on its probability


def write_inputs(root: Path, tiny: Path) -> None:
    """Write models of every architecture, examples of every format and a chat template to `root`."""
    for name, sizes in MODELS.items():
        shutil.copytree(tiny, root / "models" / name)
        config = AutoConfig.for_model(name, **sizes, **TOKENIZER_CONFIG)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / "models" / name)
    for name, row in EXAMPLES.items():
        for split, count in (("train", EXAMPLE_COUNT), ("validation", 5)):
            lines = [json.dumps(row(n)) for n in range(count)]
            (root / f"{name}-{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    (root / "custom.jinja").write_text(template, encoding="utf-8")
    (root / "disk").mkdir()


def random_spec(rng: random.Random) -> RunSpec:
    """One random spec. Paths are relative to the folder of `write_inputs`."""
    patch = {**_model_options(rng), **_main_options(rng)}
    patch |= _data_options(rng, patch["train.stage"])
    patch |= {"launch.device": "cpu", "parallel.nvme_path": "disk", "data.chat_template_file": "custom.jinja"}
    patch |= {
        "train.duration": rng.choice(("steps", "steps", "epochs")),
        "train.max_steps": 2,
        "train.num_train_epochs": 1.0,
    }
    patch |= {"train.per_device_train_batch_size": 2, "eval.strategy": "no", "save.strategy": "no"}
    free = [o for o in options() if o.name not in EXCLUDED and o.name not in patch] + [
        by_name()[name]
        for name in ("eval.strategy", "save.strategy", "train.per_device_train_batch_size", "train.max_steps")
    ]
    share = rng.choice((0.05, 0.1, 0.2, 0.3))
    for option in free:
        if rng.random() < share * RARE_OPTIONS.get(option.name, 1):
            patch[option.name] = _random_value(option.name, rng)
    while True:
        try:
            return edit(RunSpec(), patch)
        except SpecError as error:  # values that the schema rejects in combination
            for problem in error.problems:
                del patch[problem.field]


def _random_value(name: str, rng: random.Random) -> Any:
    option = by_name()[name]
    if name in VALUES:
        return rng.choice(VALUES[name])
    if option.kind == "bool":
        return not option.default
    return rng.choice([value for value, _ in option.choices])


def _model_options(rng: random.Random) -> Patch:
    if rng.random() < 0.4:
        return {"model.source": "builtin", "model.builtin": "tiny-llama"}
    return {"model.source": "path", "model.path": f"models/{rng.choice(list(MODELS))}"}


def _main_options(rng: random.Random) -> Patch:
    """The main options: often the default, otherwise most specs would be rejected."""
    stage = rng.choice(("sft", "sft", "sft", *registry.STAGES))
    optimizer = rng.choice(("adamw_torch", *registry.OPTIMIZERS)) if rng.random() < 0.5 else "adamw_torch"
    return {
        "train.stage": stage,
        "method.kind": rng.choice(("lora", "lora", *registry.METHODS)),
        "method.quantization": rng.choice(("none", "none", "none", *registry.QUANTIZATIONS)),
        "parallel.strategy": rng.choice(("single", *registry.STRATEGIES)),
        "precision.compute": rng.choice(("auto", "auto", *registry.PRECISIONS)),
        "train.optim": optimizer,
        "launch.launcher": rng.choice(("torchrun",) * 12 + ("accelerate", "deepspeed", "python")),
    }


def _data_options(rng: random.Random, stage: str) -> Patch:
    """Data in a format that the stage accepts, in 95 % of the specs."""
    if rng.random() < 0.3:
        return {"data.source": "builtin", "data.builtin": rng.choice(list(registry.DATASETS)), "data.max_samples": 16}
    formats = registry.STAGES[stage].formats if rng.random() < 0.95 else tuple(EXAMPLES)
    format_ = rng.choice(formats)
    patch: Patch = {"data.source": "files", "data.files": (f"{format_}-train.jsonl",)}
    if rng.random() < 0.2:
        entry = {
            "source": "files",
            "files": [f"{rng.choice(formats)}-train.jsonl"],
            "weight": rng.choice((0.5, 1.0, 2.0)),
        }
        patch["data.sources"] = json.dumps([{}, entry])
        patch["data.mixing"] = rng.choice(("concatenate", "interleave_first_exhausted", "interleave_all_exhausted"))
    return patch | {"data.validation_files": (f"{format_}-validation.jsonl",)}
