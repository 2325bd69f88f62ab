"""Every strategy learns what one process learns, and really does what it says: each rank's part is looked at."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from training_runs import (
    REORDERING_TOLERANCE,
    TorchrunLaunch,
    log_text,
    losses,
    make_engine,
    make_run_folder,
    make_spec,
    result,
    same_losses,
    soak_except,
    train_in_one_process,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from backend.config.options import edit
from backend.machine import Machine
from backend.paths import HOME
from backend.preflight import preflight
from backend.train.run_log import TrainError

FULL = {"method.kind": "full", "train.per_device_train_batch_size": 2}
KEPT = {"save.strategy": "steps", "save.steps": 2, "save.total_limit": 0, "save.final_model": True}
PLAIN = {"save.strategy": "no", "save.final_model": True}


@dataclass(frozen=True)
class Case:
    """What is set, on how many ranks; the engine that must report itself; over how many ranks it spreads the weights
    and the optimizer's state."""

    changes: Mapping[str, Any]
    engine: str
    weights: int = 1
    state: int = 1
    ranks: int = 2
    stage: int = 0
    steps_by: str = "AdamW"


def zero(stage: int, **more: Any) -> Case:
    changes = {"parallel.strategy": f"zero{stage}", **{f"parallel.{k}": v for k, v in more.items()}}
    by = "DeepSpeedCPUAdam" if "offload_optimizer" in more else "AdamW"
    return Case(changes, "DEEPSPEED", 2 if stage == 3 else 1, 2 if stage else 1, stage=stage, steps_by=by)


def fsdp(ranks: int = 2, **more: Any) -> Case:
    changes = {"parallel.strategy": "fsdp2", **{f"parallel.{k}": v for k, v in more.items()}}
    return Case(changes, "FSDP", 2, 2, ranks)


def sliced(ranks: int = 2) -> Case:
    changes = {"parallel.strategy": "tensor", "train.per_device_train_batch_size": 4 if ranks == 2 else 2, **PLAIN}
    return Case(changes, "MULTI_XPU", ranks, ranks, ranks)


def sequence(stage: int) -> Case:
    """Both ranks share every row's tokens."""
    return replace(
        zero(stage, sequence_parallel_size=2),
        changes={**zero(stage, sequence_parallel_size=2).changes, "train.per_device_train_batch_size": 4},
    )


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
    "zero2-sequence": sequence(2),
    "zero3-sequence": sequence(3),
    "tensor": sliced(),
    "tensor-fsdp2": sliced(4),
}
RESUMED = ["zero2", "zero3", "zero2-sequence", "fsdp2", "fsdp2-sharded"]
# An adapter's losses on the strategies that spread frozen weights too.
ADAPTED = ["ddp", "zero2", "zero3", "zero3-sequence", "fsdp2"]
# What another case shows too is for the long proofs.
EVERY = soak_except(CASES, CASES.keys() - {"zero2-offload"})


@dataclass
class Trained:
    """Runs by name, each trained once, when it is first asked for."""

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
        return self.run(name, {**FULL, **KEPT, **rows, **case.changes}, case.ranks)

    def adapter(self, name: str) -> Path:
        case = CASES[name]
        return self.run(
            f"{name}-lora", {**KEPT, "train.per_device_train_batch_size": 4 // case.ranks, **case.changes}, case.ranks
        )


@pytest.fixture(scope="module")
def trained(root: Path, fork_server: ForkServer) -> Trained:
    for lock in (HOME / ".cache/torch_extensions").rglob("lock"):
        if time.time() - lock.stat().st_mtime > 900:
            lock.unlink()  # of a build that was killed
    return Trained(root, fork_server)


@pytest.fixture(scope="module")
def alone(trained: Trained) -> Path:
    return trained.run("alone", {**FULL, **KEPT, "train.per_device_train_batch_size": 4}, 0)


@pytest.fixture(scope="module")
def alone_adapter(trained: Trained) -> Path:
    return trained.run("alone-lora", {**KEPT, "train.per_device_train_batch_size": 4}, 0)


@pytest.mark.parametrize("name", EVERY)
def test_the_losses_are_those_of_one_process(alone: Path, trained: Trained, name: str) -> None:
    one = losses(alone)
    assert len({round(loss, 6) for loss in one.values()}) == 3, "rows that are all alike would prove nothing"
    assert losses(trained.full(name)) == same_losses(one, REORDERING_TOLERANCE)


@pytest.mark.parametrize("name", EVERY)
def test_each_rank_holds_its_part(alone: Path, trained: Trained, name: str) -> None:
    case, whole = CASES[name], result(alone)["parameters"]
    only = {"engine": "NO", "zero_stage": 0, "backend": "", "optimizer_class": "AdamW"}
    only |= {"local_parameters": whole, "local_optimizer_elements": 2 * whole}
    assert result(alone)["ranks"] == [{**only, "loaded_bytes": 4 * whole}]
    found = result(trained.full(name))
    assert found["trainable_parameters"] == found["parameters"] == whole
    assert len(found["ranks"]) == case.ranks
    for rank in found["ranks"]:
        assert (rank["engine"], rank["zero_stage"], rank["optimizer_class"]) == (case.engine, case.stage, case.steps_by)
        assert rank["backend"] == "gloo"
        assert rank["local_parameters"] == pytest.approx(whole / case.weights, rel=0.01)
        assert rank["local_optimizer_elements"] == pytest.approx(2 * whole / case.state, rel=0.01), "two moments"
    if case.engine == "FSDP":
        assert [rank["loaded_bytes"] for rank in found["ranks"]] == [4 * whole, *[0] * (case.ranks - 1)], (
            "one read the file"
        )


@pytest.mark.parametrize("name", soak_except(ADAPTED, {*ADAPTED} - {"zero3-sequence"}))
def test_an_adapter_learns_the_same(alone_adapter: Path, trained: Trained, name: str) -> None:
    folder, case = trained.adapter(name), CASES[name]
    assert losses(folder) == same_losses(losses(alone_adapter), REORDERING_TOLERANCE)
    whole = result(alone_adapter)["parameters"]
    assert result(folder)["trainable_parameters"] == result(alone_adapter)["trainable_parameters"]
    for rank in result(folder)["ranks"]:
        assert rank["local_parameters"] == pytest.approx(whole / case.weights, rel=0.01), (
            "frozen weights are spread too"
        )


def logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 20)[None]).logits
    return found


def test_modules_are_trained_in_full_beside_an_adapter(trained: Trained) -> None:
    """In 16 bits under ZeRO-3, which casts no model that it spread as it was read: ZeRO-2 does."""
    asked = {"lora.modules_to_save": ("embed_tokens", "lm_head"), "precision.compute": "bf16", **PLAIN}
    two, three = (
        trained.run(f"{name}-ends", {**asked, **CASES[name].changes, "train.per_device_train_batch_size": 2}, 2)
        for name in ("zero2", "zero3")
    )
    assert losses(three) == same_losses(losses(two), REORDERING_TOLERANCE)


def test_an_adapter_adds_up_batches(trained: Trained) -> None:
    """In 16 bits, and with an output layer that is not tied, torch would fail on gradients that wait for the others."""
    rows = {"train.gradient_accumulation_steps": 2, "precision.compute": "bf16", **PLAIN}
    alone = trained.run("alone-adds-up", {**rows, "train.per_device_train_batch_size": 2}, 0)
    spread = trained.run("fsdp2-adds-up", {**rows, **CASES["fsdp2"].changes, "train.per_device_train_batch_size": 1}, 2)
    assert losses(spread) == pytest.approx(losses(alone), abs=5e-3)


@pytest.mark.parametrize("name", EVERY)
def test_the_trained_model_loads_as_a_whole(alone: Path, trained: Trained, name: str) -> None:
    learned = logits(alone / "model")
    untaught = logits(trained.root / "cache/models/tiny-llama")
    assert not torch.allclose(learned, untaught, atol=1e-2), "nothing was learned"
    assert torch.allclose(logits(trained.full(name) / "model"), learned, atol=5e-3)


@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_the_trained_adapter_loads(alone_adapter: Path, trained: Trained, name: str) -> None:
    assert torch.allclose(logits(trained.adapter(name) / "model"), logits(alone_adapter / "model"), atol=5e-3)


def go_on(trained: Trained, folder: Path, ranks: int) -> list[int]:
    """Train step 3 once more from the checkpoint of step 2; the steps of all points."""
    trained.fork_server.resume(folder, 2, ranks)
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [point["step"] for point in points if "loss" in point]


@pytest.mark.parametrize("name", RESUMED)
def test_it_goes_on_from_its_checkpoint(trained: Trained, name: str) -> None:
    folder = trained.full(name)
    before = losses(folder)
    assert go_on(trained, folder, CASES[name].ranks) == [1, 2, 3, 3]
    assert losses(folder) == same_losses(before)


def test_an_adapter_goes_on_from_its_checkpoint(trained: Trained) -> None:
    folder = trained.adapter("fsdp2")
    before = losses(folder)
    assert go_on(trained, folder, 2) == [1, 2, 3, 3]
    assert losses(folder) == same_losses(before)


def test_fsdp_goes_on_with_another_number_of_processes(trained: Trained, tmp_path: Path) -> None:
    """Its checkpoints are written by DCP, which deals the parts out anew."""
    source = trained.full("fsdp2-sharded")
    spec = {
        **FULL,
        **KEPT,
        **CASES["fsdp2-sharded"].changes,
        "train.per_device_train_batch_size": 1,
        "launch.nproc_per_node": 4,
    }
    write_run(tmp_path / "four", make_spec(spec))
    shutil.copytree(source / "checkpoints/checkpoint-2", tmp_path / "four/checkpoints/checkpoint-2")
    assert trained.fork_server.run(tmp_path / "four", 4) == 0, log_text(tmp_path / "four")
    assert "Resuming from checkpoint-2." in log_text(tmp_path / "four")
    assert losses(tmp_path / "four")[3] == same_losses(losses(source)[3], REORDERING_TOLERANCE)


def state(checkpoint: Path) -> tuple[set[float], list[float], dict[str, float]]:
    """Of a DeepSpeed checkpoint: counts of steps, the groups' weight decays, the norm of each moment over all ranks."""
    parts, norms, steps = sorted(checkpoint.glob("global_step*/*_optim_states.pt")), {"exp_avg": 0.0}, set()
    norms["exp_avg_sq"] = 0.0
    for part in parts:
        saved = torch.load(part, weights_only=False)["optimizer_state_dict"]
        inner = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
        steps |= {float(own["step"]) for own in inner["state"].values()}
        for key in norms:
            norms[key] += sum(float(own[key].square().sum()) for own in inner["state"].values())
    return steps, [group["weight_decay"] for group in inner["param_groups"]], norms


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def elsewhere(trained: Trained, source: Path, changes: Mapping[str, Any], ranks: int) -> tuple[Path, int]:
    """A run of `ranks` processes that begins with checkpoint 2 of `source`, and its exit code."""
    begins = {"save.resume_from": "path", "save.resume_path": str(source / "checkpoints/checkpoint-2")}
    folder = trained.root / f"{source.name}+{ranks}-{len(list(trained.root.iterdir()))}"  # a plus is part of a name
    write_run(
        folder,
        make_spec(
            {
                **KEPT,
                "train.per_device_train_batch_size": 4 // ranks,
                **changes,
                **begins,
                "launch.nproc_per_node": ranks,
            }
        ),
    )
    return folder, trained.fork_server.run(folder, ranks)


MOVED = {
    "zero2": {**FULL, "train.weight_decay": 0.1, "parallel.strategy": "zero2"},
    "zero3": {**FULL, "train.weight_decay": 0.1, "parallel.strategy": "zero3"},
    "zero3-lora": {"method.kind": "lora", "parallel.strategy": "zero3"},
}


def moved(trained: Trained, name: str) -> Path:
    return trained.run(f"{name}-moved", {**KEPT, **MOVED[name], "train.per_device_train_batch_size": 2}, 2)


DEALT = [("zero3", 1)]
DEALT_IN_SOAK = [("zero2", 1), ("zero2", 4), ("zero3", 4), ("zero3-lora", 1)]


@pytest.mark.parametrize(
    ("name", "ranks"), [*DEALT, *(pytest.param(*case, marks=pytest.mark.soak) for case in DEALT_IN_SOAK)]
)
def test_deepspeed_goes_on_with_another_number_of_processes(trained: Trained, name: str, ranks: int) -> None:
    """Its parts are dealt out anew: the same rows, the same moments, the same loss; what was there is left alone."""
    source = moved(trained, name)
    before = files(source)
    folder, code = elsewhere(trained, source, {**MOVED[name], "train.per_device_train_batch_size": 4 // ranks}, ranks)
    assert code == 0, log_text(folder)
    assert f"Converting checkpoint-2 from 2 to {ranks} processes" in log_text(folder)
    assert losses(folder)[3] == same_losses(losses(source)[3], REORDERING_TOLERANCE)
    (steps, decays, moments), wanted = (state(f / "checkpoints/checkpoint-3") for f in (folder, source))
    assert steps == wanted[0] == {3.0}
    assert decays == wanted[1] and decays == ([0.0] if "lora" in name else [0.1, 0.0]), "norms do not decay"
    assert moments == pytest.approx(wanted[2], rel=1e-3)
    assert len(list((folder / "checkpoints/checkpoint-3").glob("global_step*/*_optim_states.pt"))) == ranks
    assert files(source) == before and not (folder / ".universal").exists()


def test_what_cannot_be_converted_is_refused(trained: Trained) -> None:
    source = moved(trained, "zero2")
    folder, code = elsewhere(trained, source, MOVED["zero3"], 1)
    assert code != 0 and "save.resume_path: " in log_text(folder).splitlines()[-1]
    assert "ZeRO-1 or ZeRO-2, and ZeRO-3 cannot resume from that format" in log_text(folder)
    changes = {**MOVED["zero2"], "train.optim": "sgd"}
    source = trained.run(
        "zero2-sgd", {**KEPT, **changes, "train.per_device_train_batch_size": 2, "train.max_steps": 2}, 2
    )
    folder, code = elsewhere(trained, source, changes, 1)
    assert code != 0 and "an optimizer other than AdamW" in log_text(folder).splitlines()[-1]


def test_a_step_of_other_rows_is_told_and_an_older_best_checkpoint_loads(trained: Trained) -> None:
    """The best checkpoint is loaded at the end, though more ranks wrote it than there are."""
    judged = {"save.load_best_model_at_end": True, "eval.strategy": "steps", "eval.steps": 2}
    changes = {**KEPT, **MOVED["zero3"], **judged, "train.per_device_train_batch_size": 2}
    source = trained.run("zero3-best", {**changes, "train.max_steps": 2}, 2)
    kept = source / "checkpoints/checkpoint-2/trainer_state.json"
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "best_metric": 0.0}))  # none will be better
    folder, code = elsewhere(trained, source, {**changes, "train.max_steps": 4}, 1)
    assert code == 0, log_text(folder)
    assert "The global batch size is 2 instead of 4." in log_text(folder)
    assert log_text(folder).count("Converting checkpoint-2 from 2 to 1 processes") == 2, "at the start, and at the end"
    assert torch.allclose(logits(folder / "model"), logits(source / "model"), atol=1e-4)
    assert not (folder / ".universal").exists()


@pytest.mark.parametrize("name", soak_except(["fsdp2", "tensor", "zero3"], ("fsdp2",)))
def test_tied_weights_are_saved_once(trained: Trained, name: str) -> None:
    """Input and output layer that share their weights still do, and the saved model says what the trained one said."""
    tied = trained.root / "tied"
    if not tied.exists():
        shutil.copytree(trained.root / "cache/models/tiny-llama", tied)
        config = LlamaConfig.from_pretrained(tied, tie_word_embeddings=True)
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(tied)
    of = {**FULL, **PLAIN, "model.source": "path", "model.path": str(tied)}
    one = trained.run("alone-tied", {**of, "train.per_device_train_batch_size": 4}, 0)
    size = {"train.per_device_train_batch_size": 4 if name == "tensor" else 2}
    folder = trained.run(f"{name}-tied", {**of, "parallel.strategy": name, **size}, 2)
    assert losses(folder) == same_losses(losses(one), REORDERING_TOLERANCE)
    assert torch.allclose(logits(folder / "model"), logits(one / "model"), atol=5e-3)


@pytest.mark.soak
def test_older_architectures_share_rows(trained: Trained) -> None:
    """GPT-NeoX does not say how many heads keys have, and DeepSpeed asks."""
    folder = trained.root / "neox"
    shutil.copytree(trained.root / "cache/models/tiny-llama", folder)
    words = LlamaConfig.from_pretrained(folder).vocab_size
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=words, **sizes)).save_pretrained(folder)
    of = {**FULL, **PLAIN, "model.source": "path", "model.path": str(folder)}
    one = trained.run("alone-neox", {**of, "train.per_device_train_batch_size": 4}, 0)
    two = trained.run("neox-sequence", {**of, **CASES["zero2-sequence"].changes}, 2)
    assert losses(two) == same_losses(losses(one), REORDERING_TOLERANCE)


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.soak), "python"])
def test_an_engine_with_one_process(trained: Trained, alone: Path, launcher: str) -> None:
    more = {
        "parallel.strategy": "zero2",
        "launch.nproc_per_node": 1,
        "launch.launcher": launcher,
        "train.per_device_train_batch_size": 4,
    }
    folder, cache = make_run_folder(trained.root, f"lone-{launcher}", {**FULL, **more}), trained.root / "cache"
    if launcher == "torchrun":
        TorchrunLaunch(folder, cache, 1).wait_for_exit()
    else:
        train_in_one_process(cache, folder)
    assert losses(folder) == same_losses(losses(alone), REORDERING_TOLERANCE)


ANSWERED = ["zero2", "zero3", "fsdp2", "hsdp", "tensor", "tensor-fsdp2"]
ASKED = {"eval.num_generations": 5, "eval.per_device_eval_batch_size": 2, "eval.max_new_tokens": 12}


@pytest.mark.parametrize("name", soak_except(ANSWERED, ("zero3", "fsdp2")))
def test_answers_are_those_of_one_process(trained: Trained, name: str) -> None:
    """Ranks have different numbers of rows to answer, and answers differ in length: none waits for another without
    end. Training afterwards learns what it learns without answers."""
    case = CASES[name]
    one = trained.run("alone-answers", {**FULL, **PLAIN, **ASKED, "train.per_device_train_batch_size": 4}, 0)
    wanted = result(one)["samples"]
    assert len({sample["before"] for sample in wanted}) > 1, "answers that are all alike would prove nothing"
    rows = {"train.per_device_train_batch_size": 4 // case.ranks}
    folder = trained.run(f"{name}-answers", {**FULL, **PLAIN, **ASKED, **rows, **case.changes}, case.ranks)
    # Texts are exact: in these samples the logits of the two likeliest tokens are 2e-4 apart or more before training,
    # 0.2 after it, and other kernels, batches or ranks move a logit by less than 3e-5.
    assert result(folder)["samples"] == wanted
    assert losses(folder) == same_losses(losses(one), REORDERING_TOLERANCE)
    held = [rank["local_parameters"] for rank in result(folder)["ranks"]]
    assert held == [pytest.approx(result(one)["parameters"] / case.weights, rel=0.01)] * case.ranks, "spread again"


@pytest.mark.parametrize("name", soak_except(("fsdp2", "tensor-fsdp2", "zero3"), ("fsdp2", "zero3")))
def test_a_rank_with_nothing_to_answer_trains_on(trained: Trained, name: str) -> None:
    """One row is answered by one rank alone; FSDP must not fetch by that afterwards, nor DeepSpeed wait meanwhile."""
    case = CASES[name]
    few = {
        **FULL,
        **PLAIN,
        **ASKED,
        "eval.num_generations": 1,
        "train.per_device_train_batch_size": 4 // case.ranks,
        **case.changes,
    }
    assert len(losses(trained.run(f"{name}-one-answer", few, case.ranks))) == 3


@pytest.mark.soak
def test_frozen_slices_are_held_in_half(trained: Trained) -> None:
    """In bf16 the frozen layers' slices take two bytes a weight, and the losses are those of one process."""
    changes = {"method.kind": "freeze", "precision.compute": "bf16"}
    alone = trained.run("freeze-one", {**changes, "train.per_device_train_batch_size": 4}, 0)
    sliced = trained.run("freeze-tensor", {**changes, **CASES["tensor"].changes}, 2)
    assert losses(sliced) == pytest.approx(losses(alone), rel=1e-3)
    held = result(sliced)["ranks"]
    assert held[0]["local_parameters"] <= result(alone)["ranks"][0]["local_parameters"] * 0.51


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_first_fsdp_wraps_the_layers_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with adapters peft chooses them: it runs on GPUs alone, but what would be wrapped can be asked."""
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear"))
    spec = make_spec({"parallel.strategy": "fsdp1", "parallel.transformer_layer_cls_to_wrap": ("LlamaMLP",)})
    config = SimpleNamespace(fsdp=True, fsdp_plugin_args={"reshard_after_forward": "full_shard"})
    make_engine(spec, 2, "cuda").start(config)
    wraps = fsdp_auto_wrap_policy(adapted)
    found = {type(m).__name__ for m in adapted.modules() if wraps(module=m, recurse=False, nonwrapped_numel=0)}
    assert "LlamaMLP" in found and "LlamaDecoderLayer" not in found


@pytest.fixture(scope="module")
def seeing(root: Path, tiny: Path) -> Path:
    """A tiny Gemma 3, with a tower for pictures."""
    talk = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    talk |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 2048, "sliding_window": 64}
    eyes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    eyes |= {"image_size": 28, "patch_size": 14}
    words = {"mm_tokens_per_image": 4, "image_token_index": 9, "boi_token_index": 8, "eoi_token_index": 7}
    config = Gemma3Config(text_config=talk, vision_config=eyes, **words)
    shutil.copytree(tiny, root / "seeing", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    Gemma3ForConditionalGeneration(config).save_pretrained(root / "seeing")
    return root / "seeing"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_ddp_does_not_reach_a_tower_by_text(root: Path, fork_server: ForkServer, seeing: Path, kind: str) -> None:
    """As the rule says; its first fix helps."""
    spec = make_spec(
        {"parallel.strategy": "ddp", "model.source": "path", "model.path": str(seeing), "method.kind": kind}
    )
    found = next(f for f in preflight(spec, Machine(), root).findings if f.code == "STR045")
    for name, asked, code in (("as-it-is", spec, 1), ("mended", edit(spec, found.fixes[0].patch), 0)):
        write_run(root / f"{name}-{kind}", asked)
        assert fork_server.run(root / f"{name}-{kind}", 2) == code, log_text(root / f"{name}-{kind}")


def test_intel_gpus_without_their_collectives_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would train alone."""
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: False, raising=False)
    with pytest.raises(TrainError, match=r"launch\.device: .* XCCL"):
        make_engine(make_spec({"parallel.strategy": "ddp"}), 2, "xpu").trainer_arguments(tmp_path)
