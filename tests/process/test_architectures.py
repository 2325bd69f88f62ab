"""Every causal language model type of the installed transformers (architectures.py) x method x strategy x stage: what
passes the checks is launched for two steps and must succeed. docs/architectures.md has one row per type."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import (
    EVEN,
    LEAK,
    ODD,
    Sizes,
    build,
    is_causal,
    model_types,
    packing_differs,
    packing_leaks,
    save,
    tokens,
)
from deepspeed.runtime.keep_in_fp32 import keep_in_fp32_pattern
from fork_server import ForkServer, forked_inspection, rank_count
from parameters import soak_except
from peft import LoraConfig, get_peft_model
from report_files import table
from training_runs import environment, log_text, losses, make_spec, write_plan
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D
from trl.trainer.utils import add_fused_lm_head

from backend.config import RunSpec
from backend.config.options import changes, edit
from backend.inspect import InputFacts
from backend.inspect.checkpoint_adapter import adapter_facts
from backend.inspect.weights import weights_mismatch
from backend.machine import Machine, probe
from backend.modelspec import ModelShape, UnknownArchitecture, from_config
from backend.modelspec.from_table import shape_from_table
from backend.modelspec.modules import target_name
from backend.paths import HOME
from backend.preflight import preflight
from backend.registry import (
    NO_PURE_BF16,
    NO_ZERO3,
    PACKING_ISOLATED,
    PACKING_NEEDS_CONV1D,
    PACKING_PACKAGES,
    UNTRAINABLE,
)
from backend.rules.base import Case
from backend.rules.distributed.ddp import WITHOUT_GRADIENT
from backend.rules.distributed.deepspeed_extra_config import POSITIONAL_ATTENTION
from backend.rules.distributed.fsdp import fsdp2_output_layer_without_norm
from backend.rules.examples import TWO_H100
from backend.runs import RESULT
from backend.train import adapters
from backend.train.describe_model import Refused, describe
from backend.train.patches import (
    accelerate_fsdp2_adapter_head,
    deepspeed_fp32_buffers,
    llama4_base_model,
    transformers_frozen_parameters,
    transformers_inplace_outputs,
    trl_logit_scaling,
    trl_loss_positions,
)
from backend.train.run_log import TrainError

pytestmark = pytest.mark.filterwarnings("ignore")

Changes = Mapping[str, Any]
SEED = os.environ.get("FOOTPLATE_ARCH_SEED", "1")
CELLS = 8  # of each type
STEPS = 2
SHORT: Changes = {
    "train.max_steps": STEPS,
    "data.max_samples": 16,
    "data.max_length": 256,
    "launch.nproc_per_node": 2,
}
METHODS: Mapping[str, Changes] = {
    "full": {"method.kind": "full"},
    "LoRA": {"method.kind": "lora"},
    "QLoRA": {"method.kind": "lora", "method.quantization": "nf4"},
    "freeze": {"method.kind": "freeze", "method.freeze_trainable_layers": 1},
}
STRATEGIES = ("single", "ddp", "zero2", "zero3", "fsdp2")
STAGES: Mapping[str, Changes] = {
    "SFT": {"train.stage": "sft"},
    "packed SFT": {"train.stage": "sft", "data.packing": True},
    "DPO": {"train.stage": "dpo", "data.builtin": "train-pairs"},
    "reward": {"train.stage": "reward", "data.builtin": "train-pairs"},
}
WORKS, REFUSED, FAILS = "works", "refused", "fails"
ENCODER = "it trains, but its attention is bidirectional: every position sees the token that it predicts"


@dataclass(frozen=True)
class Cell:
    """One combination; `odd`: sizes that two ranks cannot divide."""

    method: str
    strategy: str
    stage: str
    odd: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}, {self.strategy}, {self.stage}{', odd sizes' if self.odd else ''}"

    def changes(self, folder: Path) -> Changes:
        model = {"model.source": "path", "model.path": str(folder)}
        strategy = {"parallel.strategy": self.strategy}
        return {**SHORT, **model, **METHODS[self.method], **strategy, **STAGES[self.stage]}


@dataclass(frozen=True)
class Outcome:
    """`WORKS`, `REFUSED` with the codes of the rules, or `FAILS` with the first line of the error."""

    cell: Cell
    kind: str
    detail: str = ""
    spec: str = ""


def sample(kind: str, seed: str = SEED, count: int = CELLS) -> list[Cell]:
    """Combinations in which every method, strategy and stage is about equally frequent."""
    rng = random.Random(f"{seed} {kind}")
    columns = [_shuffled(rng, values, count) for values in (METHODS, STRATEGIES, STAGES, (False, True))]
    return [Cell(*row) for row in zip(*columns, strict=True)]


def _shuffled(rng: random.Random, values: Sequence[Any] | Mapping[str, Any], count: int) -> list[Any]:
    found = [value for _ in range(count) for value in rng.sample(list(values), len(values))][:count]
    rng.shuffle(found)
    return found


# --- Launches ---


@pytest.fixture(scope="module", autouse=True)
def inspection_worker(cache: Path, fork_server: ForkServer) -> Any:
    """The checks may start their worker process, which reads architectures and tokenizes examples."""
    with forked_inspection(fork_server, cache):
        yield


@dataclass
class Models:
    """The folders of one model type, written when they are needed."""

    kind: str
    tiny: Path
    root: Path

    def folder(self, odd: bool) -> Path:
        """Raises what building the model raises."""
        folder = self.root / f"{self.kind}-{'odd' if odd else 'even'}"
        return folder if folder.exists() else save(_built(self.kind, ODD if odd else EVEN), self.tiny, folder)


def _built(kind: str, sizes: Sizes) -> Any:
    model = build(kind, sizes)
    with torch.no_grad():  # some types can be built with sizes that they cannot run with
        model.eval()(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    return model


def outcome(cell: Cell, models: Models, machine: Machine, fork_server: ForkServer) -> Outcome:
    """Check the combination, and launch it if the checks allow it."""
    try:
        folder = models.folder(cell.odd)
    except Exception:
        if not cell.odd:
            raise
        return outcome(replace(cell, odd=False), models, machine, fork_server)
    found = preflight(make_spec(cell.changes(folder)), machine, models.root, wait_seconds=60)
    errors = [f for f in found.findings if f.level == "error"]
    if errors:
        texts = " ".join(f"{f.message} {f.reason}" for f in errors)
        return Outcome(cell, REFUSED, ", ".join(sorted({f.code for f in errors})), texts)
    run = models.root / f"run-{models.kind}"
    write_plan(found.plan, run)
    code = fork_server.run(run, rank_count(found.spec), env=found.plan.env, seconds=120)
    problem = error_line(run, code).replace(str(folder), f"the {models.kind} model") or silent_problem(cell, models)
    shutil.rmtree(run)
    return Outcome(cell, FAILS if problem else WORKS, problem, json.dumps(changes(found.spec)))


def silent_problem(cell: Cell, models: Models) -> str:
    """Why a run that succeeded did not train what was requested; '' if it did."""
    model = _built(models.kind, ODD if cell.odd else EVEN)
    if not is_causal(model):
        return ENCODER
    leak = packing_leaks(model) if STAGES[cell.stage].get("data.packing") else 0.0
    return f"packed sequences are not isolated: a logit changes by {leak:.1g}" if leak > LEAK else ""


def error_line(run: Path, code: int) -> str:
    """How the run failed, in one line; '' if it succeeded with a finite loss at every step."""
    text = log_text(run)
    if code == 0 and (run / RESULT).exists():
        values = losses(run)
        return "" if len(values) == STEPS and None not in values.values() else f"losses {values}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d\]: )?[\w.]*(Error|Exception)\b", line)]
    return re.sub(r"^\[rank\d\]: ", "", (errors or lines or [f"exit status {code}"])[-1])[:300]


@pytest.fixture(scope="module")
def machine(root: Path) -> Machine:
    return probe(root)


def outcomes(cells: Sequence[Cell], models: Models, machine: Machine, fork_server: ForkServer) -> list[Outcome]:
    found = [outcome(cell, models, machine, fork_server) for cell in cells]
    for odd in (False, True):
        shutil.rmtree(models.root / f"{models.kind}-{'odd' if odd else 'even'}", ignore_errors=True)
    gc.collect()
    return found


def fail_for(kind: str, found: Sequence[Outcome]) -> None:
    """Fail the test with the specs that passed the checks and failed, if there are any."""
    bad = [each for each in found if each.kind == FAILS]
    if bad:
        pytest.fail("\n".join(f"{kind}, {o.cell.name}: {o.detail}\n    {o.spec}" for o in bad), pytrace=False)


# One cell each, in make test: what differs most between architectures.
FIXED: Sequence[tuple[str, Cell]] = (
    ("llama", Cell("QLoRA", "fsdp2", "packed SFT", odd=True)),
    ("qwen3_moe", Cell("LoRA", "zero3", "SFT")),
    ("gpt2", Cell("full", "ddp", "DPO", odd=True)),
    ("mamba", Cell("LoRA", "single", "SFT")),
    ("deepseek_v3", Cell("full", "single", "SFT")),
    ("gemma3_text", Cell("freeze", "zero2", "DPO", odd=True)),
    ("granitemoe", Cell("full", "single", "SFT")),
    ("phimoe", Cell("full", "zero2", "SFT", odd=True)),
    ("bert", Cell("full", "single", "SFT")),
    ("bart", Cell("full", "single", "SFT")),
    ("rwkv", Cell("full", "single", "reward")),
    ("doge", Cell("full", "single", "SFT")),
    ("llama4_text", Cell("freeze", "single", "DPO")),
    ("phimoe", Cell("LoRA", "single", "SFT")),
    ("granite", Cell("LoRA", "single", "DPO")),
    ("opt", Cell("full", "single", "packed SFT")),
    ("gpt_oss", Cell("full", "single", "packed SFT")),
)


QUICK_KINDS = ("llama", "qwen3_moe", "mamba", "bert", "rwkv")


@pytest.mark.parametrize(
    ("kind", "cell"),
    [pytest.param(kind, cell, id=kind, marks=() if kind in QUICK_KINDS else pytest.mark.soak) for kind, cell in FIXED],
)
def test_fixed_combinations(
    kind: str, cell: Cell, tiny: Path, root: Path, machine: Machine, fork_server: ForkServer
) -> None:
    found = outcomes([cell], Models(kind, tiny, root), machine, fork_server)
    fail_for(kind, found)


@pytest.mark.soak
@pytest.mark.parametrize("kind", model_types())
def test_what_passes_the_checks_runs(
    kind: str, tiny: Path, root: Path, machine: Machine, fork_server: ForkServer
) -> None:
    try:
        _built(kind, EVEN)
    except Exception as error:
        write_row(kind, cannot_build(error))
        return
    found = outcomes(sample(kind), Models(kind, tiny, root), machine, fork_server)
    write_row(kind, row(found))
    fail_for(kind, found)


# --- Packing ---


SAMPLE = ("llama", "qwen3_moe", "gemma3_text", "mamba", "opt", "gpt_oss", "falcon", "qwen3_next")


@pytest.mark.parametrize("kind", soak_except(model_types(), SAMPLE))
def test_packing_is_allowed_where_sequences_are_isolated(kind: str) -> None:
    """registry/packing.py agrees with a measurement of each type, with every attention that runs on a CPU."""
    try:
        models = [build(kind, attn_implementation=implementation) for implementation in ("eager", "sdpa")]
    except Exception as error:
        if "attention implementation" not in str(error):
            pytest.skip(f"cannot be built: {error}")
        models = [build(kind, attn_implementation="eager")]  # it has no SDPA
    if not is_causal(models[0]):
        pytest.skip("an encoder")
    if kind in PACKING_NEEDS_CONV1D:
        with pytest.raises(ValueError, match="causal_conv1d"):
            packing_leaks(models[0])
        return
    try:
        isolated = all(packing_leaks(model) < LEAK and packing_differs(model) < 1e-4 for model in models)
    except Exception:
        isolated = False
    assert isolated is (kind in PACKING_ISOLATED)


# What transformers needs in addition to causal_conv1d. In a separate process: it checks when a model is imported.
MORE_PACKAGES = """
import json, re, sys, types
from torch.nn.functional import conv1d
def convolve(x, weight, bias=None, **more):
    return conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]]
fake = types.ModuleType("causal_conv1d")
fake.causal_conv1d_fn = fake.causal_conv1d_update = convolve
sys.modules["causal_conv1d"] = fake
from architectures import build, packing_leaks
found = {}
for kind in sys.argv[2:]:
    try:
        packing_leaks(build(kind))
    except ValueError as error:
        found[kind] = re.findall("Install `(.+?)` to train on packed sequences", str(error))
open(sys.argv[1], "w").write(json.dumps(found))
"""


@pytest.mark.soak
def test_packages_that_packing_needs(tmp_path: Path) -> None:
    env = environment(tmp_path, tmp_path)
    env["PYTHONPATH"] += f"{os.pathsep}{HOME / 'tests/process'}"
    command = [sys.executable, "-c", MORE_PACKAGES, str(tmp_path / "found"), *PACKING_PACKAGES]
    subprocess.run(command, env=env, check=True, timeout=300)
    found = json.loads((tmp_path / "found").read_text())
    needed = {kind: list(packages[1:]) for kind, packages in PACKING_PACKAGES.items() if packages[1:]}
    assert found == needed


@pytest.mark.parametrize("kind", soak_except(model_types(), (*SAMPLE, "bert", "cpmant", "xlnet")))
def test_bidirectional_types_are_described_as_encoders(kind: str) -> None:
    try:
        model = build(kind)
    except Exception as error:
        pytest.skip(f"cannot be built: {error}")
    described = describe(model.config.to_dict())["kind"]
    assert (described == "encoder") is not is_causal(model)


# --- DeepSpeed in 16 bits ---


@pytest.mark.parametrize("kind", soak_except(model_types(), ("minimax", "openai-gpt", "xglm")))
def test_layers_accept_their_input_where_deepspeed_casts_the_parameters(kind: str) -> None:
    try:
        model = build(kind)
        model(input_ids=torch.tensor([tokens(12)]), use_cache=False)
    except Exception as error:
        pytest.skip(f"cannot be built or called: {error}")
    kept = keep_in_fp32_pattern(model, None, torch.bfloat16)
    deepspeed_fp32_buffers.apply(model, torch.bfloat16)
    for is_kept in (True, False):  # DeepSpeed keeps some weights in fp32; pure bf16 none
        for name, parameter in model.named_parameters():
            if not is_kept or kept is None or not kept.search(name):
                parameter.data = parameter.data.bfloat16()
        if is_kept or kind not in NO_PURE_BF16:
            loss = model(input_ids=torch.tensor([tokens(12)]), use_cache=False).logits.float().sum()
            assert torch.isfinite(loss)


# --- FSDP2 ---


@pytest.mark.soak
@pytest.mark.parametrize("kind", model_types())
def test_the_norm_before_a_trained_output_layer_is_found_or_refused(kind: str) -> None:
    """Rule STR071 knows the types whose training FSDP2 would end with an error."""
    try:
        model = build(kind)
        shape = shape_of(model.config.to_dict())
    except Exception as error:
        pytest.skip(f"cannot be built, or is refused: {error}")
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not tied
    try:
        accelerate_fsdp2_adapter_head.norm_before_head(model)
        found = True
    except TrainError:
        found = False
    spec = edit(RunSpec(), {"parallel.strategy": "fsdp2", "method.kind": "full", "train.learning_rate": 1e-5})
    facts = InputFacts(model_type=kind, shape=replace(shape, tied=False))
    refused = fsdp2_output_layer_without_norm(Case(spec, TWO_H100, facts))
    assert bool(refused) is not found or kind in UNTRAINABLE


# --- Leaf modules of ZeRO-3 ---


@pytest.mark.parametrize("kind", [*POSITIONAL_ATTENTION, "llama", "opt", "gptj", "codegen"])
def test_attention_that_zero3_can_gather_as_a_leaf_module_gets_its_input_by_position(kind: str) -> None:
    """DeepSpeed 0.19's hooks see positional inputs only. Rule STR040 refuses the others, which failed with two
    processes."""
    model, by_position = build(kind), set[bool]()
    known, name = POSITIONAL_ATTENTION.get(kind, ("", ""))
    for path, module in model.named_modules():
        is_attention = type(module).__name__ == known if known else type(module).__name__.endswith("Attention")
        if is_attention:
            assert not known or path.endswith(f".{name}")
            module.register_forward_pre_hook(lambda module, inputs: by_position.add(bool(inputs)))
    model(input_ids=torch.tensor([tokens(12)]), use_cache=False)
    assert by_position == {bool(known)}


# --- Gradients ---


# Of longcat_flash the experts, if no token of the batch is routed to them; of reformer the output layer; of mllama also
# the MLPs after the cross-attention; of blt and zamba2 only adapters get no gradient.
OTHERWISE = {"longcat_flash", "reformer", "mllama", "blt", "zamba2"}
TRIED = (*SAMPLE, "fuyu", "bart", "deepseek_v32", "git", "mllama")


@pytest.mark.parametrize("kind", soak_except(model_types(), TRIED))
def test_modules_without_gradient_are_known(kind: str) -> None:
    """Rule STR045 knows by their names the modules that a text example gives no gradient."""
    try:
        model = build(kind)
        if not is_causal(model):
            pytest.skip("an encoder")
        model.train()(input_ids=torch.tensor([tokens(40)]), use_cache=False).logits.float().sum().backward()
    except Exception as error:
        pytest.skip(f"cannot be built or run: {error}")
    without = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.requires_grad and p.grad is None}
    known = {name for name, module in model.named_modules() if WITHOUT_GRADIENT.search(name) and module._parameters}
    if kind not in OTHERWISE:
        assert bool(without) is bool(known), sorted(without ^ known)[:5]
        linear = {name for name in without if isinstance(model.get_submodule(name), torch.nn.Linear)}
        assert linear <= known


@pytest.mark.parametrize("kind", soak_except(model_types(), (*TRIED, "jamba")))
def test_adapters_get_a_gradient(kind: str) -> None:
    """All layers that all-linear adapts, except those of rule ADP010."""
    try:
        model = build(kind)
        refused = describe(model.config.to_dict())
        if refused["kind"] != "decoder" or kind in UNTRAINABLE:
            pytest.skip("it cannot be trained")
        layers = {name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))}
    except Exception as error:
        pytest.skip(f"cannot be built: {error}")
    targets: Any = "all-linear"
    if refused["lora_refused"]:
        targets = sorted({target_name(name) for name in layers} - {*refused["lora_refused"], "lm_head"})
    adapted = get_peft_model(model.train(), LoraConfig(target_modules=targets))
    adapted(input_ids=torch.tensor([tokens(40)]), use_cache=False).logits.float().sum().backward()
    without = {name for name, value in adapted.named_parameters() if value.requires_grad and value.grad is None}
    assert not {name for name in without if not WITHOUT_GRADIENT.search(name.removeprefix("base_model.model."))}


@pytest.mark.parametrize("kind", ["llama4_text", "falcon", "gemma3n_text"])
def test_linear_layers_may_return_a_view(kind: str) -> None:
    """As FP8 layers do. These models change an output in place."""

    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    model = build(kind).train()
    changed = ("shared_expert.down_proj", "mlp.dense_4h_to_h", "per_layer_model_projection")
    for name, module in model.named_modules():
        if name.endswith(changed):
            module.register_forward_hook(lambda _, inputs, output: View.apply(output))
    ids = torch.tensor([tokens(8)])
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        model(input_ids=ids, use_cache=False)
    transformers_inplace_outputs.apply(model)
    model(input_ids=ids, use_cache=False).logits.sum().backward()


# --- The loss of the trainer ---


@pytest.mark.parametrize(
    "kind", soak_except(model_types(), (*SAMPLE, "modernbert-decoder", "xlstm", "llama4_text", "recurrent_gemma"))
)
def test_loss_of_the_trainer_is_that_of_the_model(kind: str) -> None:
    """TRL computes the loss from the decoder's output and the weight of the output layer. registry.UNTRAINABLE has the
    types with further layers between them."""
    try:
        model = build(kind).eval()
        if not is_causal(model) or getattr(type(model.config), "is_encoder_decoder", False):
            pytest.skip("not a causal language model")
    except Exception as error:
        pytest.skip(f"cannot be built: {error}")
    llama4_base_model.apply(model)
    trl_loss_positions.apply()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:  # norms and biases have ones and zeros, which would hide them
                value.add_(torch.randn_like(value) / 10)
        model.get_output_embeddings().weight.mul_(30)  # a cap changes large logits only
        ids = torch.tensor([tokens(40), tokens(40, 1)])
        logits = model(input_ids=ids, use_cache=False).logits.float()
        own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        with trl_logit_scaling.named(model):
            add_fused_lm_head(model)
        mask = torch.ones_like(ids)
        fused = model(input_ids=ids, labels=ids, attention_mask=mask, fused_lm_head=True).loss
    # The losses are 8 to 200, and rounding changes their seventh digit.
    is_same = bool(abs(own - fused) < 1e-5 * own)
    assert is_same is not UNTRAINABLE.get(kind, "").startswith("TRL")


# --- Loading under ZeRO-3 ---


@pytest.mark.soak
def test_types_that_zero3_cannot_load(tmp_path: Path) -> None:
    built = []
    for kind in model_types():
        try:
            model = build(kind)
        except Exception:
            continue
        is_decoder = is_causal(model) and not getattr(type(model.config), "is_encoder_decoder", False)
        # emu3 and mllama save the config of their text model, which cannot be loaded again.
        if is_decoder and kind not in {"emu3", "mllama", *UNTRAINABLE}:
            built.append(kind)
    script = HOME / "tests/process/zero3_loading.py"
    result = tmp_path / "errors.json"
    env = environment(tmp_path, tmp_path)
    subprocess.run([sys.executable, script, result, *built], capture_output=True, check=True, timeout=900, env=env)
    assert json.loads(result.read_text()).keys() == NO_ZERO3 & set(built)


def test_frozen_parameters_under_zero3_need_no_second_model_with_weights() -> None:
    """Gemma 3 calls from_config for its vision tower, which would shard weights that the meta device does not have."""
    model = build("gemma3")
    active = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    transformers_frozen_parameters.apply(model)
    assert is_deepspeed_zero3_enabled(), "the rest of the run needs it"
    del active
    assert not is_deepspeed_zero3_enabled()


# --- Weight files ---


@pytest.mark.parametrize("kind", soak_except(model_types(), (*SAMPLE, "apertus", "deepseek_v3", "dots3_note_text")))
def test_saved_weights_match_their_config(kind: str, tmp_path: Path) -> None:
    """inspect/weights.py finds no difference in what save_pretrained wrote."""
    try:
        model = build(kind)
    except Exception as error:
        pytest.skip(f"cannot be built: {error}")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    try:
        shape = shape_of(config)
    except (UnknownArchitecture, Refused) as error:
        pytest.skip(f"refused: {error}")
    assert not weights_mismatch(tmp_path, shape)


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape of a model. Raises UnknownArchitecture, Refused."""
    with suppress(UnknownArchitecture):
        return from_config(config)
    return shape_from_table(describe(config), config)


@pytest.mark.parametrize("kind", soak_except(model_types(), ("llama", "gpt2", "mixtral")))
@pytest.mark.parametrize("targets", ["all-linear", "attention"])
def test_an_adapter_with_the_same_targets_can_be_resumed(kind: str, targets: str, tmp_path: Path) -> None:
    """inspect/checkpoint_adapter.py compares what peft wrote with the modules that the checks expect to be adapted."""
    spec = make_spec({"lora.targets": targets})
    try:
        model = build(kind)
        config = json.loads(model.config.to_json_string())
        shape = shape_of(config)
        adapted = get_peft_model(model, adapters.lora_config(spec, model))
    except Exception as error:
        pytest.skip(f"cannot be built or adapted: {error}")
    adapted.peft_config["default"].save_pretrained(str(tmp_path))
    assert not adapter_facts(spec, None, tmp_path, shape)


# --- The document ---

DOCUMENT = HOME / "docs/architectures.md"
COLUMNS = ("type", "works", "refused by", "fails", "needs", "cannot be built")
HEAD = f"""# Architectures

Every model type for which the installed transformers has a causal language model class, built with small sizes and the
tokenizer of the built-in tiny-llama. Written by `make soak`: for each type, {CELLS} combinations of method (full, LoRA,
QLoRA with NF4, freeze), strategy (single process, DDP, ZeRO-2, ZeRO-3, FSDP2), stage (SFT, packed SFT, DPO, reward
model) and sizes (even, or sizes that two ranks cannot divide) are checked, and launched for {STEPS} steps if the checks
allow it. `FOOTPLATE_ARCH_SEED` selects the combinations.

- **works**: the combinations that were launched and succeeded.
- **refused by**: the rules ([rules.md](rules.md)) that refused a combination.
- **fails**: combinations that passed the checks and failed. There should be none.
- **needs**: packages that are not installed and that the type, or packing with it, needs.
- **cannot be built**: why transformers cannot build the type from its config.

"""


def row(found: Sequence[Outcome]) -> list[str]:
    """The cells of one type, after its name."""
    works = [each.cell.name for each in found if each.kind == WORKS]
    rules: dict[str, list[str]] = {}
    for each in found:
        if each.kind == REFUSED:
            rules.setdefault(each.detail, []).append(each.cell.name)
    refused = [f"{_links(codes)}: {'; '.join(names)}" for codes, names in sorted(rules.items())]
    failed = [f"{each.cell.name}: {each.detail}" for each in found if each.kind == FAILS]
    texts = " ".join(f"{each.detail} {each.spec if each.kind == REFUSED else ''}" for each in found)
    return [_listed(works), _listed(refused), _listed(failed), packages(texts), ""]


def cannot_build(error: Exception) -> list[str]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ["", "", "", packages(str(error)), f"{type(error).__name__}: {' '.join(lines[:2])}"[:200]]


def packages(text: str) -> str:
    """Packages that an error says are missing."""
    found = re.findall(r"requires the (\w+) library|without `(\w+)`|pip install (\w+)|[Ii]nstall `(\w+)`", text)
    return ", ".join(sorted({name for names in found for name in names if name}))


def _listed(values: Sequence[str]) -> str:
    return "<br>".join(value.replace("|", "\\|").replace("<", "&lt;") for value in values)


def _links(codes: str) -> str:
    return ", ".join(f"[{code}]({link})" for code in codes.split(", ") if (link := _anchors().get(code, "rules.md")))


def _anchors() -> dict[str, str]:
    """Rule code -> its heading in rules.md, as Markdown renderers name it."""
    titles = re.findall(r"(?m)^### (([A-Z]{3}\d{3}) .*)$", (HOME / "docs/rules.md").read_text(encoding="utf-8"))
    slug = {code: re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title, code in titles}
    return {code: f"rules.md#{name}" for code, name in slug.items()}


def write_row(kind: str, cells: Sequence[str]) -> None:
    """Write or replace the row of one type."""
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
    rows = {name: line for line in text.splitlines() if (name := line[2:].partition(" | ")[0]) in model_types()}
    rows[kind] = table([kind, *cells], []).splitlines()[0]
    listed = [line for name, line in sorted(rows.items())]
    DOCUMENT.write_text(HEAD + "\n".join([table(COLUMNS, []), *listed]) + "\n", encoding="utf-8")


def test_the_document_has_only_types_of_the_installed_transformers() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines() if DOCUMENT.exists() else []
    rows = [line[2:].partition(" | ")[0] for line in lines if line.startswith("| ")][2:]
    assert set(rows) <= set(model_types())
