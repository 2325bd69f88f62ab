"""Each strategy gives the losses of one process, and each rank holds the shard that the strategy promises."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from parameters import soak_except
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from training_runs import (
    REORDERING_TOLERANCE,
    TorchrunLaunch,
    log_text,
    losses,
    make_best,
    make_engine,
    make_run_folder,
    make_spec,
    result,
    same_losses,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)

from backend import presets, registry
from backend.config.options import edit
from backend.inspect import InputFacts
from backend.inspect.worker import SETTING
from backend.machine import Machine
from backend.memory.disk import SMALL_FILES
from backend.modelspec import from_config
from backend.preflight import preflight
from backend.rules import Case as RuleCase
from backend.runs import SPEC, generations
from backend.train.run_log import TrainError

FULL = {"method.kind": "full", "train.per_device_train_batch_size": 2}
SAVING = {"save.strategy": "steps", "save.steps": 2, "save.total_limit": 0, "save.final_model": True}
NO_CHECKPOINTS = {"save.strategy": "no", "save.final_model": True}


@dataclass(frozen=True)
class Case:
    """Options and the number of ranks; the expected engine, ZeRO stage and optimizer class; over how many ranks the
    weights and the optimizer state are sharded."""

    changes: Mapping[str, Any]
    engine: str
    weight_shards: int = 1
    state_shards: int = 1
    ranks: int = 2
    zero_stage: int = 0
    optimizer_class: str = "AdamW"


def zero(stage: int, **more: Any) -> Case:
    changes = {"parallel.strategy": f"zero{stage}", **{f"parallel.{k}": v for k, v in more.items()}}
    optimizer = "DeepSpeedCPUAdam" if "offload_optimizer" in more else "AdamW"
    return Case(
        changes, "DEEPSPEED", 2 if stage == 3 else 1, 2 if stage else 1, zero_stage=stage, optimizer_class=optimizer
    )


def fsdp(ranks: int = 2, **more: Any) -> Case:
    changes = {"parallel.strategy": "fsdp2", **{f"parallel.{k}": v for k, v in more.items()}}
    return Case(changes, "FSDP", 2, 2, ranks)


def tensor_parallel(ranks: int = 2) -> Case:
    changes = {
        "parallel.strategy": "tensor",
        "train.per_device_train_batch_size": 4 if ranks == 2 else 2,
        **NO_CHECKPOINTS,
    }
    return Case(changes, "MULTI_XPU", ranks, ranks, ranks)


def sequence_parallel(stage: int) -> Case:
    """Both ranks share the tokens of every sequence (Ulysses). Two micro-batches have the examples of both ranks."""
    found = zero(stage, sequence_parallel_size=2)
    return replace(found, changes={**found.changes, "train.gradient_accumulation_steps": 2})


CASES = {
    "ddp": Case({"parallel.strategy": "ddp"}, "MULTI_CPU"),
    "zero0": zero(0),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero2-offload": zero(2, offload_optimizer="cpu"),
    "zero3": zero(3),
    "zero3-offload": zero(3, offload_optimizer="cpu", offload_param="cpu"),
    "fsdp2": fsdp(),
    "fsdp2-offload": fsdp(cpu_offload=True),
    "fsdp2-sharded": fsdp(state_dict_type="sharded", reshard_after_forward=False),
    "hsdp": fsdp(4, replicate_size=2),
    "zero2-sequence": sequence_parallel(2),
    "zero3-sequence": sequence_parallel(3),
    "tensor": tensor_parallel(),
    "tensor-fsdp2": tensor_parallel(4),
}
RESUMED_CASES = soak_except(["zero2", "zero3", "zero2-sequence", "fsdp2", "fsdp2-sharded"], ("zero3", "fsdp2"))
# Cases that are also trained with LoRA.
LORA_CASES = ["ddp", "zero2", "zero3", "zero3-sequence", "fsdp2"]
ALL_CASES = soak_except(
    CASES, ("ddp", "zero2", "zero3", "zero3-offload", "fsdp2", "hsdp", "zero3-sequence", "tensor-fsdp2")
)


@dataclass
class TrainedRuns:
    """Runs by name; each is trained once, on first use."""

    root: Path
    fork_server: ForkServer
    made: dict[str, Path] = field(default_factory=dict)

    def run(self, name: str, changes: Mapping[str, Any], ranks: int) -> Path:
        if name not in self.made:
            spec = make_spec({**changes, "launch.nproc_per_node": max(ranks, 1)})
            self.made[name] = self.fork_server.train(self.root / name, spec, ranks)
        return self.made[name]

    def full(self, name: str) -> Path:
        case = CASES[name]
        rows = {"train.per_device_train_batch_size": 4 // case.ranks}
        return self.run(name, {**FULL, **SAVING, **rows, **case.changes}, case.ranks)

    def adapter(self, name: str) -> Path:
        case = CASES[name]
        return self.run(
            f"{name}-lora", {**SAVING, "train.per_device_train_batch_size": 4 // case.ranks, **case.changes}, case.ranks
        )


@pytest.fixture(scope="module")
def trained(root: Path, fork_server: ForkServer) -> TrainedRuns:
    return TrainedRuns(root, fork_server)


@pytest.fixture(scope="module")
def one_process(trained: TrainedRuns) -> Path:
    return trained.run("alone", {**FULL, **SAVING, "train.per_device_train_batch_size": 4}, 0)


@pytest.fixture(scope="module")
def one_process_lora(trained: TrainedRuns) -> Path:
    return trained.run("one-process-lora", {**SAVING, "train.per_device_train_batch_size": 4}, 0)


@pytest.mark.parametrize("name", ALL_CASES)
def test_losses_match_one_process(one_process: Path, trained: TrainedRuns, name: str) -> None:
    expected = losses(one_process)
    assert len({round(loss, 6) for loss in expected.values()}) == 3, (
        "the losses of the steps must differ for this test to mean anything"
    )
    assert losses(trained.full(name)) == same_losses(expected, REORDERING_TOLERANCE)


@pytest.mark.parametrize("name", ALL_CASES)
def test_each_rank_holds_its_shard(one_process: Path, trained: TrainedRuns, name: str) -> None:
    case, parameters = CASES[name], result(one_process)["parameters"]
    one_process_rank = {"engine": "NO", "zero_stage": 0, "backend": "", "optimizer_class": "AdamW"}
    one_process_rank |= {"local_parameters": parameters, "local_optimizer_elements": 2 * parameters}
    one_process_rank |= {"local_storage_bytes": 4 * parameters, "loaded_bytes": 4 * parameters}
    assert result(one_process)["ranks"] == [one_process_rank]
    run_result = result(trained.full(name))
    assert run_result["trainable_parameters"] == run_result["parameters"] == parameters
    assert len(run_result["ranks"]) == case.ranks
    for rank in run_result["ranks"]:
        assert (rank["engine"], rank["zero_stage"], rank["optimizer_class"]) == (
            case.engine,
            case.zero_stage,
            case.optimizer_class,
        )
        assert rank["backend"] == "gloo"
        assert rank["local_parameters"] == pytest.approx(parameters / case.weight_shards, rel=0.01)
        assert rank["local_optimizer_elements"] == pytest.approx(2 * parameters / case.state_shards, rel=0.01), (
            "two moments"
        )
    if case.engine == "FSDP":
        assert [rank["loaded_bytes"] for rank in run_result["ranks"]] == [4 * parameters, *[0] * (case.ranks - 1)], (
            "only rank 0 read the file"
        )


@pytest.mark.parametrize("name", soak_except(LORA_CASES, {*LORA_CASES} - {"zero3-sequence"}))
def test_lora_losses_match_one_process(one_process_lora: Path, trained: TrainedRuns, name: str) -> None:
    folder, case = trained.adapter(name), CASES[name]
    assert losses(folder) == same_losses(losses(one_process_lora), REORDERING_TOLERANCE)
    parameters = result(one_process_lora)["parameters"]
    assert result(folder)["trainable_parameters"] == result(one_process_lora)["trainable_parameters"]
    for rank in result(folder)["ranks"]:
        assert rank["local_parameters"] == pytest.approx(parameters / case.weight_shards, rel=0.01), (
            "frozen weights are sharded too"
        )


def logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        output: torch.Tensor = model(torch.arange(3, 20)[None]).logits
    return output


@pytest.mark.soak
def test_modules_to_save_are_trained_with_zero(trained: TrainedRuns) -> None:
    """In bf16. ZeRO-2 casts the model; ZeRO-3 does not cast a model that was sharded while loading."""
    changes = {"lora.modules_to_save": ("embed_tokens", "lm_head"), "precision.compute": "bf16", **NO_CHECKPOINTS}
    zero2, zero3 = (
        trained.run(
            f"{name}-modules-to-save", {**changes, **CASES[name].changes, "train.per_device_train_batch_size": 2}, 2
        )
        for name in ("zero2", "zero3")
    )
    assert losses(zero3) == same_losses(losses(zero2), REORDERING_TOLERANCE)


@pytest.mark.soak
@pytest.mark.parametrize("saved", [("lm_head",), ("norm", "lm_head")])
def test_a_trained_output_layer_with_fsdp2(trained: TrainedRuns, saved: tuple[str, ...]) -> None:
    """Its gradient is that of the examples of all ranks, also if the norm before it is trained."""
    name, changes = "-".join(saved), {"lora.modules_to_save": saved, **NO_CHECKPOINTS}
    single = trained.run(f"one-process-{name}", {**changes, "train.per_device_train_batch_size": 4}, 0)
    more = {**changes, **CASES["fsdp2"].changes, "train.per_device_train_batch_size": 2}
    fsdp2 = trained.run(f"fsdp2-{name}", more, 2)
    assert losses(fsdp2) == same_losses(losses(single), REORDERING_TOLERANCE)


@pytest.mark.soak
def test_lora_with_gradient_accumulation(trained: TrainedRuns) -> None:
    """In bf16 with untied embeddings, where FSDP2 without gradient reduction in each micro-batch would fail in
    torch."""
    changes = {"train.gradient_accumulation_steps": 2, "precision.compute": "bf16", **NO_CHECKPOINTS}
    single = trained.run("one-process-accumulation", {**changes, "train.per_device_train_batch_size": 2}, 0)
    fsdp2 = trained.run(
        "fsdp2-accumulation", {**changes, **CASES["fsdp2"].changes, "train.per_device_train_batch_size": 1}, 2
    )
    assert losses(fsdp2) == pytest.approx(losses(single), abs=5e-3)


@pytest.mark.parametrize("name", ALL_CASES)
def test_saved_model_loads_unsharded(one_process: Path, trained: TrainedRuns, name: str) -> None:
    expected = logits(one_process / "model")
    untrained = logits(trained.root / "cache/models/tiny-llama")
    assert not torch.allclose(expected, untrained, atol=1e-2), "training had no effect"
    assert torch.allclose(logits(trained.full(name) / "model"), expected, atol=5e-3)


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_saved_adapter_loads(one_process_lora: Path, trained: TrainedRuns, name: str) -> None:
    assert torch.allclose(logits(trained.adapter(name) / "model"), logits(one_process_lora / "model"), atol=5e-3)


@pytest.mark.parametrize(
    "name", soak_except(("ddp", "zero2", "zero3", "fsdp2", "fsdp2-sharded"), ("ddp", "zero3", "fsdp2"))
)
def test_checkpoints_have_the_estimated_size(trained: TrainedRuns, name: str) -> None:
    folder = trained.full(name)
    written = sum(file.stat().st_size for file in (folder / "checkpoints/checkpoint-2").rglob("*") if file.is_file())
    shape = from_config(registry.BUILTIN_MODELS["tiny-llama"].config)
    rows = RuleCase(presets.read(folder / SPEC), Machine(), InputFacts(shape=shape)).estimate.rows
    row = next(row for row in rows if row.name == "Checkpoints")
    estimated = int(row.formula.split(" x ")[1].split()[0].replace(",", "")) - SMALL_FILES
    assert written == pytest.approx(estimated, rel=0.1)


def resume_from_step_2(trained: TrainedRuns, folder: Path, ranks: int) -> list[int]:
    """Resume from the checkpoint of step 2; return the steps of all logged losses."""
    trained.fork_server.resume(folder, 2, ranks)
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [point["step"] for point in points if "loss" in point]


@pytest.mark.parametrize("name", RESUMED_CASES)
def test_resumes_from_its_checkpoint(trained: TrainedRuns, name: str) -> None:
    folder = trained.full(name)
    before = losses(folder)
    assert resume_from_step_2(trained, folder, CASES[name].ranks) == [1, 2, 3, 3]
    assert losses(folder) == same_losses(before)


@pytest.mark.soak
@pytest.mark.parametrize("step", [2, 3])
def test_sequence_parallelism_resumes_in_the_second_epoch(trained: TrainedRuns, step: int) -> None:
    """At its start and within it; every epoch has two steps and its own order of examples."""
    epochs = {**FULL, **SAVING, "save.steps": step, "data.max_samples": 8, "train.max_steps": 5}
    folder = trained.run(f"sequence-epochs-{step}", {**epochs, **CASES["zero2-sequence"].changes}, 2)
    before = losses(folder)
    trained.fork_server.resume(folder, step, 2)
    assert losses(folder) == same_losses(before)


@pytest.mark.soak  # test_streaming.py resumes such a run
def test_lora_resumes_from_its_checkpoint(trained: TrainedRuns) -> None:
    folder = trained.adapter("fsdp2")
    before = losses(folder)
    assert resume_from_step_2(trained, folder, 2) == [1, 2, 3, 3]
    assert losses(folder) == same_losses(before)


@pytest.mark.soak
def test_fsdp_resumes_with_a_different_number_of_processes(trained: TrainedRuns, tmp_path: Path) -> None:
    """Its checkpoints are written by DCP, which reshards them."""
    source = trained.full("fsdp2-sharded")
    spec = {
        **FULL,
        **SAVING,
        **CASES["fsdp2-sharded"].changes,
        "train.per_device_train_batch_size": 1,
        "launch.nproc_per_node": 4,
    }
    write_run(tmp_path / "four", make_spec(spec))
    shutil.copytree(source / "checkpoints/checkpoint-2", tmp_path / "four/checkpoints/checkpoint-2")
    assert trained.fork_server.run(tmp_path / "four", 4) == 0, log_text(tmp_path / "four")
    assert "Resuming from checkpoint-2." in log_text(tmp_path / "four")
    assert losses(tmp_path / "four")[3] == same_losses(losses(source)[3], REORDERING_TOLERANCE)


def optimizer_state_summary(checkpoint: Path) -> tuple[set[float], list[float], dict[str, float]]:
    """A DeepSpeed checkpoint's step counts, weight decays of the parameter groups, and norm of each moment over all
    ranks."""
    parts, norms, steps = sorted(checkpoint.glob("global_step*/*_optim_states.pt")), {"exp_avg": 0.0}, set()
    norms["exp_avg_sq"] = 0.0
    for part in parts:
        saved = torch.load(part, weights_only=False)["optimizer_state_dict"]
        optimizer = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
        steps |= {float(values["step"]) for values in optimizer["state"].values()}
        for key in norms:
            norms[key] += sum(float(values[key].square().sum()) for values in optimizer["state"].values())
    return steps, [group["weight_decay"] for group in optimizer["param_groups"]], norms


def file_stats(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def resume_in_new_run(trained: TrainedRuns, source: Path, changes: Mapping[str, Any], ranks: int) -> tuple[Path, int]:
    """A new run with `ranks` processes that resumes from checkpoint 2 of `source`, and its exit code."""
    resume_options = {"save.resume_from": "path", "save.resume_path": str(source / "checkpoints/checkpoint-2")}
    folder = trained.root / f"{source.name}+{ranks}-{len(list(trained.root.iterdir()))}"
    write_run(
        folder,
        make_spec(
            {
                **SAVING,
                "train.per_device_train_batch_size": 4 // ranks,
                **changes,
                **resume_options,
                "launch.nproc_per_node": ranks,
            }
        ),
    )
    return folder, trained.fork_server.run(folder, ranks)


CONVERTED = {
    "zero2": {**FULL, "train.weight_decay": 0.1, "parallel.strategy": "zero2"},
    "zero3": {**FULL, "train.weight_decay": 0.1, "parallel.strategy": "zero3"},
    "zero3-lora": {"method.kind": "lora", "parallel.strategy": "zero3"},
}


def source_run(trained: TrainedRuns, name: str) -> Path:
    return trained.run(f"{name}-source", {**SAVING, **CONVERTED[name], "train.per_device_train_batch_size": 2}, 2)


# `make test` has another test of ZeRO-3 on one rank, below.
OTHER_WORLD_SIZES = [("zero2", 1), ("zero2", 4), ("zero3", 1), ("zero3", 4), ("zero3-lora", 1)]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "ranks"), OTHER_WORLD_SIZES)
def test_deepspeed_resumes_with_a_different_number_of_processes(trained: TrainedRuns, name: str, ranks: int) -> None:
    """Its shards are converted: the same batches, moments and losses. The source checkpoint is not modified."""
    source = source_run(trained, name)
    before = file_stats(source)
    folder, code = resume_in_new_run(
        trained, source, {**CONVERTED[name], "train.per_device_train_batch_size": 4 // ranks}, ranks
    )
    assert code == 0, log_text(folder)
    assert f"Converting checkpoint-2 from 2 to {ranks} process" in log_text(folder)
    assert losses(folder)[3] == same_losses(losses(source)[3], REORDERING_TOLERANCE)
    (steps, decays, moments), expected = (
        optimizer_state_summary(f / "checkpoints/checkpoint-3") for f in (folder, source)
    )
    assert steps == expected[0] == {3.0}
    assert decays == expected[1] and decays == ([0.0] if "lora" in name else [0.1, 0.0]), "norms do not decay"
    assert moments == pytest.approx(expected[2], rel=1e-3)
    assert len(list((folder / "checkpoints/checkpoint-3").glob("global_step*/*_optim_states.pt"))) == ranks
    assert file_stats(source) == before and not (folder / ".universal").exists()


@pytest.mark.soak
def test_zero0_resumes_its_own_checkpoints_only(trained: TrainedRuns) -> None:
    """Each rank saves and loads the whole state, so the number of processes does not matter. Another stage looks for
    shards, which DeepSpeed would miss only after the model is loaded."""
    source, full = trained.full("zero0"), {"method.kind": "full"}
    folder, code = resume_in_new_run(trained, source, {**full, "parallel.strategy": "zero0"}, 1)
    assert code == 0, log_text(folder)
    assert "Resuming from" in log_text(folder)
    assert losses(folder)[3] == same_losses(losses(source)[3], REORDERING_TOLERANCE)
    folder, code = resume_in_new_run(trained, source, {**full, "parallel.strategy": "zero2"}, 1)
    assert code != 0 and "saved by ZeRO-0, and ZeRO-2 cannot resume" in log_text(folder)


@pytest.mark.soak
def test_unconvertible_checkpoints_of_zero_are_refused(trained: TrainedRuns) -> None:
    source = source_run(trained, "zero2")
    folder, code = resume_in_new_run(trained, source, CONVERTED["zero3"], 1)
    assert code != 0 and "save.resume_path: " in log_text(folder).splitlines()[-1]
    assert "ZeRO-1 or ZeRO-2, and ZeRO-3 cannot resume from that format" in log_text(folder)
    changes = {**CONVERTED["zero2"], "train.optim": "sgd"}
    source = trained.run(
        "zero2-sgd", {**SAVING, **changes, "train.per_device_train_batch_size": 2, "train.max_steps": 2}, 2
    )
    folder, code = resume_in_new_run(trained, source, changes, 1)
    assert code != 0 and "an optimizer other than AdamW" in log_text(folder).splitlines()[-1]


def test_changed_global_batch_size_with_zero3_is_reported_and_best_checkpoint_loads(trained: TrainedRuns) -> None:
    """The best checkpoint is loaded at the end, although it was written by more ranks."""
    best_model = {"save.load_best_model_at_end": True, "eval.strategy": "steps", "eval.steps": 2}
    changes = {**SAVING, **CONVERTED["zero3"], **best_model, "train.per_device_train_batch_size": 2}
    source = trained.run("zero3-best", {**changes, "train.max_steps": 2}, 2)
    make_best(source / "checkpoints/checkpoint-2")
    folder, code = resume_in_new_run(trained, source, {**changes, "train.max_steps": 4}, 1)
    assert code == 0, log_text(folder)
    assert "The global batch size is 2 instead of 4." in log_text(folder)
    assert log_text(folder).count("Converting checkpoint-2 from 2 to 1 process.") == 2, (
        "when resuming, and when the best model is loaded"
    )
    assert torch.allclose(logits(folder / "model"), logits(source / "model"), atol=1e-4)
    assert not (folder / ".universal").exists()


@pytest.mark.parametrize("name", soak_except(["fsdp2", "tensor", "zero3"], ("fsdp2",)))
def test_tied_weights_are_saved_once(trained: TrainedRuns, name: str) -> None:
    """Tied embeddings stay tied, and the saved model has the logits of the trained one."""
    tied = trained.root / "tied"
    if not tied.exists():
        shutil.copytree(trained.root / "cache/models/tiny-llama", tied)
        config = LlamaConfig.from_pretrained(tied, tie_word_embeddings=True)
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(tied)
    base = {**FULL, **NO_CHECKPOINTS, "model.source": "path", "model.path": str(tied)}
    single = trained.run("one-process-tied", {**base, "train.per_device_train_batch_size": 4}, 0)
    size = {"train.per_device_train_batch_size": 4 if name == "tensor" else 2}
    folder = trained.run(f"{name}-tied", {**base, "parallel.strategy": name, **size}, 2)
    assert losses(folder) == same_losses(losses(single), REORDERING_TOLERANCE)
    assert torch.allclose(logits(folder / "model"), logits(single / "model"), atol=5e-3)


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.soak), "python"])
def test_zero2_with_one_process(trained: TrainedRuns, one_process: Path, launcher: str) -> None:
    more = {
        "parallel.strategy": "zero2",
        "launch.nproc_per_node": 1,
        "launch.launcher": launcher,
        "train.per_device_train_batch_size": 4,
    }
    folder, cache = make_run_folder(trained.root, f"one-rank-{launcher}", {**FULL, **more}), trained.root / "cache"
    if launcher == "torchrun":
        TorchrunLaunch(folder, cache, 1).wait_for_exit()
    else:
        assert trained.fork_server.run(folder) == 0, log_text(folder)
    assert losses(folder) == same_losses(losses(one_process), REORDERING_TOLERANCE)


GENERATION_CASES = ["zero2", "zero3", "fsdp2", "hsdp", "tensor", "tensor-fsdp2"]
GENERATION = {"eval.num_generations": 5, "eval.per_device_eval_batch_size": 2, "eval.max_new_tokens": 12}
DURING = {**GENERATION, "eval.strategy": "steps", "eval.steps": 2, "eval.generate_during_eval": True}


@pytest.mark.parametrize("name", soak_except(GENERATION_CASES, ("fsdp2",)))
def test_generations_match_one_process(trained: TrainedRuns, name: str) -> None:
    """Ranks have different numbers of prompts, and generations differ in length: no rank waits forever for another,
    before, during and after training. The losses of the training afterwards are those without generation."""
    case = CASES[name]
    single = trained.run(
        "one-process-generations", {**FULL, **NO_CHECKPOINTS, **DURING, "train.per_device_train_batch_size": 4}, 0
    )
    expected = result(single)["samples"]
    assert len({sample["before"] for sample in expected}) > 1, (
        "the generations must differ for this test to mean anything"
    )
    rows = {"train.per_device_train_batch_size": 4 // case.ranks}
    folder = trained.run(
        f"{name}-generations", {**FULL, **NO_CHECKPOINTS, **DURING, **rows, **case.changes}, case.ranks
    )
    # The texts are compared exactly: in these samples the two largest logits differ by at least 2e-4 before training
    # and by 0.2 after it, while different kernels, batches or ranks change a logit by less than 3e-5.
    assert result(folder)["samples"] == expected
    assert generations.read(folder) == generations.read(single) and generations.size(single)
    assert losses(folder) == same_losses(losses(single), REORDERING_TOLERANCE)
    local_parameters = [rank["local_parameters"] for rank in result(folder)["ranks"]]
    assert (
        local_parameters == [pytest.approx(result(single)["parameters"] / case.weight_shards, rel=0.01)] * case.ranks
    ), "weights are sharded again after generation"


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fsdp2", "tensor-fsdp2", "zero3"])
def test_rank_without_prompts_keeps_training(trained: TrainedRuns, name: str) -> None:
    """Only one rank generates. FSDP's prefetching must not depend on that afterwards, and DeepSpeed must not wait."""
    case = CASES[name]
    changes = {
        **FULL,
        **NO_CHECKPOINTS,
        **GENERATION,
        "eval.num_generations": 1,
        "train.per_device_train_batch_size": 4 // case.ranks,
        **case.changes,
    }
    assert len(losses(trained.run(f"{name}-one-generation", changes, case.ranks))) == 3


@pytest.mark.soak
def test_frozen_tensor_parallel_shards_are_bf16(trained: TrainedRuns) -> None:
    """With bf16 compute, frozen tensor parallel shards take two bytes per parameter; the losses are those of one
    process."""
    changes = {"method.kind": "freeze", "precision.compute": "bf16"}
    single = trained.run("freeze-one", {**changes, "train.per_device_train_batch_size": 4}, 0)
    sharded = trained.run("freeze-tensor", {**changes, **CASES["tensor"].changes}, 2)
    assert losses(sharded) == pytest.approx(losses(single), rel=1e-3)
    ranks = result(sharded)["ranks"]
    assert ranks[0]["local_parameters"] <= result(single)["ranks"][0]["local_parameters"] * 0.51


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdp1_wraps_the_configured_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters peft builds the wrap policy. FSDP1 runs on GPUs only, so the policy itself is tested."""
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear"))
    spec = make_spec({"parallel.strategy": "fsdp1", "parallel.transformer_layer_cls_to_wrap": ("LlamaMLP",)})
    config = SimpleNamespace(fsdp=True, fsdp_plugin_args={"reshard_after_forward": "full_shard"})
    make_engine(spec, 2, "cuda").start(config)
    wraps = fsdp_auto_wrap_policy(adapted)
    wrapped = {type(m).__name__ for m in adapted.modules() if wraps(module=m, recurse=False, nonwrapped_numel=0)}
    assert "LlamaMLP" in wrapped and "LlamaDecoderLayer" not in wrapped


@pytest.fixture(scope="module")
def multimodal_model(root: Path, tiny: Path) -> Path:
    """A tiny Gemma 3 with a vision tower."""
    text_config = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text_config |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 2048, "sliding_window": 64}
    vision_config = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    vision_config |= {"image_size": 28, "patch_size": 14}
    token_config = {"mm_tokens_per_image": 4, "image_token_index": 9, "boi_token_index": 8, "eoi_token_index": 7}
    config = Gemma3Config(text_config=text_config, vision_config=vision_config, **token_config)
    shutil.copytree(tiny, root / "multimodal", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    Gemma3ForConditionalGeneration(config).save_pretrained(root / "multimodal")
    return root / "multimodal"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_ddp_fails_with_an_unused_vision_tower(
    root: Path, fork_server: ForkServer, multimodal_model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP fails as rule STR045 says, and the rule's first fix helps."""
    monkeypatch.setenv(SETTING, "on")  # only the worker knows the modules of the vision tower
    spec = make_spec(
        {"parallel.strategy": "ddp", "model.source": "path", "model.path": str(multimodal_model), "method.kind": kind}
    )
    finding = next(f for f in preflight(spec, Machine(), root, wait_seconds=60).findings if f.code == "STR045")
    for name, variant, code in (("unfixed", spec, 1), ("fixed", edit(spec, finding.fixes[0].patch), 0)):
        write_run(root / f"{name}-{kind}", variant)
        assert fork_server.run(root / f"{name}-{kind}", 2) == code, log_text(root / f"{name}-{kind}")


def test_xpu_without_xccl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backend each process would train separately."""
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: False, raising=False)
    with pytest.raises(TrainError, match=r"launch\.device: .* XCCL"):
        make_engine(make_spec({"parallel.strategy": "ddp"}), 2, "xpu").trainer_arguments(tmp_path)
