"""Errors of the trainer for invalid models, options, checkpoints and downloads; the demo datasets."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fork_server import ForkServer
from training_runs import TorchrunLaunch, ignore_progress, log_text, make_run_folder, make_spec, request_stop, result
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2LMHeadModel, TrainerControl, TrainerState
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from backend import registry
from backend.config import Data
from backend.config.options import effective
from backend.data import example_problem, read_examples
from backend.modelspec import from_config
from backend.paths import ASSETS, HOME
from backend.train import adapters, builtin_models, checkpoints, model, rule_check, training, trl_trainers, verify
from backend.train.callbacks import CheckpointCallback
from backend.train.data import prepare
from backend.train.device import ProcessGroup
from backend.train.generation_eval import EvalPrompt, Generator
from backend.train.monitor import Monitor
from backend.train.run_log import RunLog, TrainError

SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 9}


def test_training_error_has_no_traceback_and_is_in_the_error_file(tmp_path: Path, fork_server: ForkServer) -> None:
    """With two ranks: one sentence without a traceback, also in torchrun's error file."""
    folder = make_run_folder(
        tmp_path, "run", {"model.source": "path", "model.path": str(tmp_path), "parallel.strategy": "ddp"}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        TorchrunLaunch(folder, tmp_path / "cache", 2, python=fork_server.python).wait_for_exit(1)
    log = log_text(folder)
    sentence = f"model.path: The model folder cannot be loaded. {tmp_path} has no config.json"
    before_traceback, _, after_traceback = log.partition("Traceback")
    assert sentence in before_traceback, "the error of the ranks comes before any traceback"
    assert "ChildFailedError" in after_traceback
    assert sentence in json.dumps(json.loads((folder / "error.json").read_text()))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lora.targets": "custom", "lora.target_modules": "query"}, "has no linear layer query. It has .*q_proj"),
        ({"lora.targets": "custom", "lora.target_modules": "lm_head"}, "lm_head cannot have an adapter"),
        ({"lora.modules_to_save": "head"}, "has no module head. It has .*lm_head"),
        ({"method.kind": "freeze", "method.freeze_trainable_layers": 5}, "5 exceeds the model's 4 layers"),
        ({"method.kind": "freeze", "method.freeze_extra_modules": "head"}, "has no module head. It has .*lm_head"),
    ],
)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_unknown_module_error_lists_the_modules_of_the_model(tiny: Path, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(TrainError, match=part):
        adapters.apply_method(make_spec(changes), AutoModelForCausalLM.from_pretrained(tiny), "fp32")


def test_position_tables_are_compared_with_the_examples(tiny: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    """A table shorter than data.max_length trains if no example is longer; else the run says so instead of an
    IndexError of torch."""
    folder, data = tmp_path / "gpt2", tmp_path / "texts.jsonl"
    for file in tiny.glob("*token*"):
        folder.mkdir(exist_ok=True)
        (folder / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=32, vocab_size=vocabulary, bos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    spec = make_spec({
        "model.source": "path", "model.path": str(folder), "data.source": "files", "data.files": str(data),
        "data.validation": "none", "data.max_length": 64, "train.stage": "pretraining", "method.kind": "full",
        "train.max_steps": 1, "eval.strategy": "no", "eval.num_generations": 0,
    })  # fmt: skip
    data.write_text('{"text": "one two"}\n' * 8)
    short = fork_server.train(tmp_path / "short", spec)
    assert result(short)["steps"] == 1 and "The learning rate of the only step is 0" in log_text(short)
    data.write_text('{"text": "one two"}\n' * 8 + json.dumps({"text": "one two " * 40}) + "\n")
    with pytest.raises(AssertionError, match=r"longest sequence has \d+ tokens, and the model has 32 position"):
        fork_server.train(tmp_path / "long", spec)


def test_prompts_with_the_completion_of_a_neighbor_are_truncated(tiny: Path, tmp_path: Path) -> None:
    """KTO makes such sequences for its KL estimate."""
    file = tmp_path / "labels.jsonl"
    parts = ("one " * 40, "two"), ("one", "two " * 40)
    file.write_text("".join(json.dumps({"prompt": a, "completion": b, "label": True}) + "\n" for a, b in parts))
    spec = make_spec({
        "model.source": "path", "model.path": str(tiny), "data.source": "files", "data.files": str(file),
        "data.validation": "none", "data.max_length": 64, "train.stage": "kto", "eval.strategy": "no",
    })  # fmt: skip
    tokenizer = model.load_tokenizer(spec, model.locate(spec, ignore_progress))
    prepared = prepare(spec, tokenizer, lambda *_: True, print)
    longest = prepared.longest
    assert longest > 64
    collate = DataCollatorForUnpairedPreference(0, trl_trainers.stage_arguments(spec)["max_length"])
    assert collate(list(prepared.train))["KL_input_ids"].shape == (2, 64)
    verify.check_positions(spec, GPT2Config(n_positions=64), longest)
    with pytest.raises(TrainError, match="longest sequence has 64 tokens, and the model has 63 position"):
        verify.check_positions(spec, GPT2Config(n_positions=63), longest)


def test_outputs_end_at_the_last_position(tiny: Path) -> None:
    """Of a model with a table of positions. The others in the batch get as many tokens as each alone."""
    tokenizer = model.load_tokenizer(make_spec({}), model.ModelSource(str(tiny), {"local_files_only": True}))
    words = tokenizer.encode("one two", add_special_tokens=False)[-1:]
    prompts = [EvalPrompt(tokenizer.decode(words * count), "", "", "") for count in (8, 27, 32, 40)]
    sizes = [len(tokenizer.encode(prompt.text, add_special_tokens=False)) for prompt in prompts]
    assert sizes[0] <= 16 < sizes[1] < 32 <= sizes[2] < sizes[3]
    config = GPT2Config(n_positions=32, n_layer=1, n_head=2, n_embd=8, vocab_size=len(tokenizer), eos_token_id=None)
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(config)
    generators = [Generator(tokenizer, ProcessGroup(), size, 16, torch.float32, ends=frozenset()) for size in (4, 1)]
    together, alone = ([each.text for each in it.generate(gpt2, prompts, lambda *_: True)] for it in generators)
    assert together == alone and all(together[:2]) and together[2:] == ["", ""]
    assert "3 of 4 prompts would need more" in generators[0].shortened(gpt2, prompts)
    assert not generators[0].shortened(gpt2, prompts[:1])


@pytest.mark.parametrize(
    ("config", "implementation"),
    [(Gemma2Config(**SIZES, head_dim=8), "sdpa"), (GPT2Config(n_layer=1, n_embd=16, n_head=2), "flex_attention")],
)
def test_unsupported_attention_implementation(tiny: Path, tmp_path: Path, config: Any, implementation: str) -> None:
    """A rule knows of these architectures; the library's error becomes a TrainError."""
    assert implementation in from_config(config.to_dict()).unsupported_attentions
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = make_spec({"model.source": "path", "model.path": str(tmp_path), "model.attn_implementation": implementation})
    tokens = model.load_tokenizer(
        make_spec({"model.source": "path", "model.path": str(tiny)}), model.ModelSource(str(tiny), {})
    )
    with pytest.raises(TrainError, match=f"model.attn_implementation: {implementation} cannot be used here"):
        model.load(spec, model.locate(spec, ignore_progress), "fp32", tokens)


def test_best_model_needs_an_evaluation_for_each_checkpoint(tmp_path: Path) -> None:
    options = {"save.load_best_model_at_end": True, "save.strategy": "steps", "eval.strategy": "steps"}
    with pytest.raises(TrainError, match=r"save\.load_best_model_at_end"):
        rule_check.check_rules(make_spec({**options, "save.steps": 10, "eval.steps": 4}), tmp_path)


SEQUENCE_PARALLEL = {"parallel.strategy": "zero3", "parallel.sequence_parallel_size": 2}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"parallel.strategy": "zero3", "save.final_model": True, "save.merge_adapter": True}, "save.merge_adapter"),
        ({"parallel.strategy": "fsdp1", "eval.num_generations": 4}, "eval.num_generations"),
        ({**SEQUENCE_PARALLEL, "eval.num_generations": 4}, "eval.num_generations"),
        ({**SEQUENCE_PARALLEL, "data.packing": True}, "data.packing"),
        ({**SEQUENCE_PARALLEL, "model.attn_implementation": "eager"}, "model.attn_implementation"),
        ({**SEQUENCE_PARALLEL, "train.stage": "dpo", "data.builtin": "train-pairs"}, "parallel.sequence_parallel_size"),
        ({**SEQUENCE_PARALLEL, "parallel.sequence_parallel_size": 3}, "parallel.sequence_parallel_size"),
    ],
)
def test_options_that_do_not_go_with_sharded_weights_or_sequences(
    tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(TrainError, match=part):
        rule_check.check_rules(
            effective(make_spec({"eval.num_generations": 0, "launch.nproc_per_node": 2, **changes})), tmp_path
        )


def test_checkpoints_that_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints/checkpoint-3"
    with pytest.raises(TrainError, match="is not a checkpoint"):
        checkpoints.at_path(str(folder))
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").touch()
    with pytest.raises(TrainError, match="is incomplete"):
        checkpoints.at_path(str(folder))
    checkpoints.mark_complete(folder)
    with pytest.raises(TrainError, match="without an optimizer state"):
        checkpoints.at_path(str(folder))
    group = SimpleNamespace(share=lambda chosen: chosen)
    context: Any = SimpleNamespace(
        folder=tmp_path,
        run_log=RunLog(tmp_path),
        from_scratch=False,
        spec=make_spec(),
        group=group,
        first=lambda f: f(),
    )
    assert training._start(context, {}) is None
    log = capsys.readouterr().out
    assert "without an optimizer state, so training starts at step 0" in log and "save.only_model" not in log
    (folder / checkpoints.OPTIMIZER_STATES[0]).touch()
    checkpoints.mark_complete(folder)
    assert checkpoints.at_path(str(folder)) == folder.resolve()
    assert checkpoints.latest(tmp_path, RunLog(tmp_path)) == folder


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (2, 4, 10, 20):
        (tmp_path / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        checkpoints.mark_complete(tmp_path / f"checkpoints/checkpoint-{step}")
    checkpoints.rotate(tmp_path, 0, None)
    assert len(checkpoints.complete(tmp_path)) == 4
    checkpoints.rotate(tmp_path, 1, str(tmp_path / "checkpoints/checkpoint-4"))
    assert [checkpoints.step_of(p) for p in checkpoints.complete(tmp_path)] == [4, 20]


def test_a_checkpoint_from_before_a_spike_is_kept(tmp_path: Path) -> None:
    """The spike of step 54 is reported with its second unusual loss, and then checkpoint-55 is saved."""
    kept = {}
    for changes in ({}, {"train.half_lr_retries": 1}):
        run = tmp_path / str(len(changes))
        spec = make_spec({"save.total_limit": 1, "logging.steps": 1, **changes})
        monitor: Any = SimpleNamespace(saved=lambda *_: None)
        callback = CheckpointCallback(spec, run, ProcessGroup(), RunLog(run), monitor)
        for step in (40, 45, 50, 55):
            (run / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
            arguments = SimpleNamespace(output_dir=str(run / "checkpoints"), load_best_model_at_end=False)
            callback.on_save(arguments, TrainerState(global_step=step, max_steps=99), None)
        kept[len(changes)] = [checkpoints.step_of(folder) for folder in checkpoints.complete(run)]
    assert kept == {0: [55], 1: [45, 50, 55]}


FSDP2, TENSOR = {"parallel.strategy": "fsdp2"}, {"parallel.strategy": "tensor"}
NVME = {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/nvme"}
SHARDED = {**FSDP2, "parallel.state_dict_type": "sharded"}


@pytest.mark.parametrize(
    ("changes", "saves", "only_model"),
    [
        ({}, True, False),
        (SHARDED, True, False),
        ({**SHARDED, "train.optim": "adamw_torch_8bit"}, True, False),
        ({**FSDP2, "train.optim": "adamw_torch_8bit"}, True, True),
        ({**FSDP2, "train.optim": "adam_mini"}, True, True),
        ({**FSDP2, "train.optim": "galore_adamw"}, True, True),
        ({**SHARDED, "train.optim": "galore_adamw"}, False, True),
        ({**SHARDED, "train.optim": "grokadamw"}, False, True),
        (TENSOR, True, True),
        (NVME, True, True),
    ],
)
def test_a_stop_saves_the_optimizer_state_only_where_it_can_be_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], saves: bool, only_model: bool
) -> None:
    """FSDP2 cannot save the state of GaLore, and DeepSpeed does not load that on NVMe."""
    spec, monitor = make_spec({"save.strategy": "no", **changes}), SimpleNamespace(is_due=lambda: False)
    callback = CheckpointCallback(spec, tmp_path, ProcessGroup(), RunLog(tmp_path), cast(Monitor, monitor))
    arguments, control = SimpleNamespace(save_only_model=False), TrainerControl()
    request_stop(tmp_path, "save")
    callback.on_step_end(arguments, TrainerState(global_step=1, max_steps=9), control)
    assert (control.should_training_stop, control.should_save) == (True, saves)
    assert arguments.save_only_model is only_model
    assert ("cannot restore the optimizer state" in capsys.readouterr().out) is only_model


@pytest.mark.parametrize(
    ("limit", "keep_best", "kept"),
    [(1, 0, [5]), (1, 1, [2, 5]), (1, 2, [2, 4, 5]), (2, 1, [2, 4, 5]), (1, 9, [1, 2, 4, 5])],
)
def test_rotation_keeps_the_best_by_eval_loss(tmp_path: Path, limit: int, keep_best: int, kept: list[int]) -> None:
    losses = {1: 2.5, 2: 1.0, 3: math.nan, 4: 2.0, 6: 0.1}  # 5 has no evaluation, 6 no checkpoint
    history = [{"step": step, "eval_loss": loss} for step, loss in losses.items()] + [{"step": 5, "loss": 0.1}]
    for step in range(1, 6):
        (tmp_path / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
        checkpoints.mark_complete(tmp_path / f"checkpoints/checkpoint-{step}")
    checkpoints.rotate(tmp_path, limit, None, keep_best, history)
    assert [checkpoints.step_of(p) for p in checkpoints.complete(tmp_path)] == kept


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    RunLog(tmp_path).metrics({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    RunLog(tmp_path, rank=1).metrics({"step": 2})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None, "note": "loss is nan, grad_norm is inf"}


@pytest.mark.parametrize("cause", ["offline", "unwritable"])
def test_failed_download_error_says_how_to_fix_it(tmp_path: Path, cause: str) -> None:
    """pip without an index; a cache that is a file."""
    cache = tmp_path / "cache"
    if cause == "unwritable":
        cache.write_text("no folder")
    variables = {"FOOTPLATE_CACHE": str(cache), "PYTHONPATH": str(HOME), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    completed = subprocess.run(
        [sys.executable, "-m", "backend.train.builtin_models", "smollm2-135m-instruct"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert completed.returncode == 1
    last_line = completed.stderr.strip().splitlines()[-1]
    assert ("tiny-llama" if cause == "offline" else "FOOTPLATE_CACHE") in last_line
    assert "Traceback" not in completed.stderr
    assert [p.name for p in tmp_path.glob("cache/models/*")] == (
        [".smollm2-135m-instruct.lock"] if cause == "offline" else []
    )


def test_tiny_llama_is_deterministic(tiny: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOOTPLATE_CACHE", str(tmp_path))
        again = builtin_models.prepare("tiny-llama", ignore_progress)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes()


def test_demo_data_matches_its_script(tmp_path: Path) -> None:
    script = ASSETS / "trains" / "make.py"
    subprocess.run([sys.executable, "-I", str(script), str(tmp_path)], check=True, timeout=60)
    for folder in registry.DATASETS:
        for name in ("train.jsonl", "validation.jsonl"):
            assert (tmp_path / folder / name).read_bytes() == (ASSETS / folder / name).read_bytes()


def test_demo_pairs_are_valid() -> None:
    """The chosen completion is the correct JSON; the rejected one is wrong, or surrounds it with other text."""
    parts = [[row for _, row in read_examples(ASSETS / "train-pairs" / f"{p}.jsonl")] for p in ("train", "validation")]
    assert [len(part) for part in parts] == [300, 32]
    sft_sentences = {row["messages"][1]["content"] for _, row in read_examples(ASSETS / "trains" / "train.jsonl")}
    for row in parts[0] + parts[1]:
        assert example_problem(row, "pairs", Data()) is None
        sentence, chosen, rejected = (
            row["prompt"][1]["content"],
            row["chosen"][0]["content"],
            row["rejected"][0]["content"],
        )
        assert sentence not in sft_sentences
        assert list(json.loads(chosen)) == ["train", "from", "to", "time", "platform"]
        assert chosen != rejected
        try:
            assert json.loads(rejected) != json.loads(chosen)
        except ValueError:
            assert chosen in rejected, "text around the correct JSON"
    assert not {r["prompt"][1]["content"] for r in parts[0]} & {r["prompt"][1]["content"] for r in parts[1]}


def test_demo_data_is_valid() -> None:
    parts = [[row for _, row in read_examples(ASSETS / "trains" / f"{p}.jsonl")] for p in ("train", "validation")]
    assert [len(part) for part in parts] == [400, 32]
    sentences = [{row["messages"][1]["content"] for row in part} for part in parts]
    assert not sentences[0] & sentences[1]
    assert len(sentences[0]) == 400
    for row in parts[0] + parts[1]:
        assert example_problem(row, "messages", Data()) is None
        sentence, answer = row["messages"][1]["content"], json.loads(row["messages"][2]["content"])
        assert list(answer) == ["train", "from", "to", "time", "platform"]
        assert all(answer[key] is None or answer[key] in sentence for key in ("from", "to", "platform"))
        assert answer["train"].split()[1] in sentence
        assert "{" not in sentence
        assert "[" not in sentence
