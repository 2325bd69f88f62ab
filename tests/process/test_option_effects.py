"""Every option reaches what it names: a changed value changes what the libraries receive, or what really happens."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_runs import ignore_progress, make_engine, make_run_folder, make_spec, train_in_one_process

from backend.config import RunSpec
from backend.config.options import by_name, edit, effective, options, word
from backend.launch.plan import plan
from backend.machine import Gpu, Machine
from backend.resolve import resolve
from backend.runs import SPEC
from backend.train import (
    adapters,
    checkpoints,
    data,
    device,
    generation_eval,
    logging_setup,
    model,
    trainers,
    unsloth,
    verify,
)
from backend.train.callbacks import CheckpointCallback
from backend.train.run_log import RunLog, TrainError
from backend.train.training import TrainContext, _start

# peft asks transformers under an old name; the run's own log leaves that out too.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
Observer = Callable[[RunSpec], Any]
MACHINE = Machine(device="cuda", gpus=tuple(Gpu(n, "H100", 80 << 30, 80 << 30, (9, 0)) for n in range(4)), cores=8)


@dataclass(frozen=True)
class Case:
    """Where the option counts (`base`), a value that is not the usual one, and what shows the difference."""

    changed: Any
    see: Observer
    base: Mapping[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module", autouse=True)
def place(root: Path, tiny: Path) -> Iterator[Path]:
    """A folder with a cache of models, data files and templates; `HERE` in the table stands for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)  # Path(".") below
        patch.setenv("HF_DATASETS_CACHE", str(root / "datasets"))
        shutil.copytree(tiny, root / "one")
        shutil.copytree(tiny, root / "two")
        shutil.copytree(tiny, root / "cache/models/smollm2-135m-instruct")  # ready, so nothing is fetched
        _files(root)
        yield root


def _files(root: Path) -> None:
    every = {"instruction": "a", "output": "b", "prompt": "c", "completion": "d", "text": "e", "q": "f", "r": "g"}
    every["talk"] = [{"role": "user", "content": "h"}, {"role": "assistant", "content": "i"}]
    every |= {"chosen": "l", "rejected": "m", "better": "n", "worse": "o", "label": True, "good": False}
    every["messages"] = [{"role": "user", "content": "j"}, {"role": "assistant", "content": "k"}]
    rows = [{**every, "output": f"b{n}"} for n in range(20)]
    for name, part in (("a", rows), ("b", rows[:7])):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
        hub = root / f"hub-{name}"
        hub.mkdir()
        (hub / "one.jsonl").write_text("\n".join(map(json.dumps, part)))
        (hub / "two.jsonl").write_text("\n".join(map(json.dumps, part[:3])))
        configs = "".join(f"- config_name: {c}\n  data_files: {c}.jsonl\n" for c in ("one", "two"))
        (hub / "README.md").write_text(f"---\nconfigs:\n{configs}---\n".replace("one\n", "one\n  default: true\n", 1))
    own = "{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    (root / "a.jinja").write_text(own)
    (root / "b.jinja").write_text(own.replace("'content'] +", "'content'] + '!' +"))


def argument(name: str) -> Observer:
    """A field of the Trainer's arguments."""
    return lambda spec: getattr(trainers.training_arguments(make_engine(spec), Path(".")), name)


def found(spec: RunSpec) -> Any:
    return model.locate(spec, ignore_progress)


@cache
def parts(spec_text: str) -> tuple[Any, Any]:
    spec = RunSpec.model_validate_json(spec_text)
    source = found(spec)
    return model.load_tokenizer(spec, source), source


def tokens(spec: RunSpec) -> Any:
    return parts(spec.model_dump_json())[0]


def adapted(spec: RunSpec) -> Any:
    tokenizer, source = parts(spec.model_dump_json())
    return adapters.apply_method(spec, model.load(spec, source, "fp32", tokenizer), "fp32")


def trained(spec: RunSpec) -> Any:
    return {name: tuple(p.shape) for name, p in adapted(spec).named_parameters() if p.requires_grad}


def lora(spec: RunSpec) -> Any:
    """Scaling and dropout of an adapter, as its layer has them."""
    layer = adapted(spec).base_model.model.model.layers[0].self_attn.q_proj
    return layer.scaling["default"], str(layer.lora_dropout)


def first(spec: RunSpec) -> Any:
    """What B holds before the first step."""
    return float(
        adapted(spec).base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.detach().sum()
    )


def layers(spec: RunSpec) -> Any:
    """How a base layer is held."""
    layer = adapted(spec).base_model.model.model.layers[0].self_attn.q_proj.base_layer
    return type(layer).__name__, getattr(getattr(layer.weight, "quant_state", None), "nested", None)


def refusal(spec: RunSpec) -> str:
    """What the rules say on this machine about kernels for GPUs."""
    try:
        verify.check_rules(spec, Path("."))
    except TrainError as error:
        return str(error)
    return ""


def missed(spec: RunSpec) -> str:
    """What is said where Unsloth is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "unsloth", None)
        try:
            unsloth.import_unsloth(spec)
        except TrainError as error:
            return str(error)
    return ""


def fastest(spec: RunSpec) -> Any:
    return max(group["lr"] for group in trainer(spec).create_optimizer().param_groups)


def rows(spec: RunSpec) -> Any:
    return [[item.value for item in part] for part in data.load_examples(spec)]


def prepared(spec: RunSpec) -> data.PreparedData:
    return data.prepare(spec, tokens(spec), lambda done, of: True, lambda line: None)


def table(spec: RunSpec) -> Any:
    return prepared(spec).train[:5]


def held(spec: RunSpec) -> Any:
    return len(prepared(spec).eval_examples)


def offered(spec: RunSpec) -> Any:
    try:
        return rows(spec)
    except TrainError as error:
        return str(error)  # no rows for this stage


def asked(name: str) -> Observer:
    """What a stage's trainer has of an argument."""
    return lambda spec: getattr(trainer(spec).args, name)


def helpers(spec: RunSpec) -> int:
    """Preparation processes that were there at once."""
    seen = [0]

    def tick(done: int, of: int) -> bool:
        seen.append(len(multiprocessing.active_children()))
        return True

    data.prepare(spec, tokens(spec), tick, lambda line: None)
    return max(seen)


def trainer(spec: RunSpec) -> Any:
    config = trainers.training_arguments(make_engine(spec), Path("."))
    return trainers.build_trainer(spec, config, adapted(spec), tokens(spec), prepared(spec), [])


def packed(spec: RunSpec) -> Any:
    return len(trainer(spec).train_dataset)


def optimizer(spec: RunSpec) -> Any:
    made = trainer(spec).create_optimizer()
    return type(made).__name__, {k: v for k, v in made.defaults.items() if k != "params"}, made.param_groups[0]["lr"]


def held_group(spec: RunSpec) -> Any:
    """What the optimizer's groups say, and which weights are in which."""
    groups = trainer(spec).create_optimizer().param_groups
    kept = [{k: v for k, v in group.items() if k != "params" and isinstance(v, int | float | str)} for group in groups]
    return kept, [sum(p.numel() for p in group["params"]) for group in groups]


def turns(spec: RunSpec) -> Any:
    made = trainer(spec).create_optimizer()
    return made.switch_mode, made.switch_block_every


def eighth(spec: RunSpec) -> Any:
    """Which package multiplies in fp8; accelerate names one that is not installed."""
    try:
        return str(trainer(spec).accelerator.fp8_backend)
    except ImportError as error:
        return str(error)


def decay(spec: RunSpec) -> Any:
    return [group["weight_decay"] for group in trainer(spec).create_optimizer().param_groups]


def rates(spec: RunSpec) -> Any:
    """The learning rate of 40 steps."""
    made = trainer(spec)
    made.create_optimizer_and_scheduler(40)
    seen = []
    for _ in range(40):
        made.optimizer.step()
        made.lr_scheduler.step()
        seen.append(made.lr_scheduler.get_last_lr()[0])
    return seen


def order(spec: RunSpec) -> Any:
    return list(trainer(spec)._get_train_sampler())[:20]


def ranks(spec: RunSpec) -> Any:
    return make_engine(spec, 2).trainer_arguments(Path("."))


def told(file: str) -> Observer:
    """What the engine's own file says."""
    return lambda spec: json.loads(plan(spec, MACHINE).files[file])


def file(name: str) -> Observer:
    """The text of a generated file."""
    return lambda spec: plan(spec, MACHINE).files[name]


def plugged(spec: RunSpec) -> Any:
    """The mixed precision that FSDP is started with."""
    config = SimpleNamespace(fsdp_plugin_args={})
    make_engine(spec)._complete_plugin(config)
    return config.fsdp_plugin_args["mixed_precision_policy"]


def meshed(spec: RunSpec) -> Any:
    return make_engine(spec, 4).mesh()._sizes


def shared_rows(spec: RunSpec) -> Any:
    told = make_engine(spec, 4, "cuda").trainer_arguments(Path("."))
    return told.get("pad_to_multiple_of"), told["parallelism_config"]._sizes if "parallelism_config" in told else None


def sliced(spec: RunSpec) -> Any:
    return make_engine(spec, 4).load_arguments()["distributed_config"]


def planned(spec: RunSpec) -> Any:
    made = plan(spec, MACHINE)
    return made.argv, made.env, made.defaults, made.other_nodes, {k: v for k, v in made.files.items() if k != SPEC}


def computed(spec: RunSpec) -> Any:
    config = trainers.training_arguments(make_engine(spec), Path("."))
    return resolve(spec, Machine()).compute_dtype, config.bf16


def longest(spec: RunSpec) -> Any:
    return generation_eval.Generator.create(spec, None, device.ProcessGroup(), torch.float32).max_new_tokens


def begun(spec: RunSpec) -> Any:
    """Where a run with a complete checkpoint of step 4 begins."""
    folder = Path(found(spec).name).parents[2] / f"begun-{spec.save.resume_from}"
    shutil.rmtree(folder, ignore_errors=True)
    a_checkpoint(folder, 4)
    group = device.ProcessGroup()
    work = TrainContext(
        spec,
        folder,
        spec.save.resume_from == "scratch",
        group,
        RunLog(folder),
        resolve(spec, Machine()),
        make_engine(spec),
    )
    start = _start(work)
    return start.name if start else None


def begun_elsewhere(spec: RunSpec) -> Any:
    folder = Path(found(spec).name).parents[2] / "empty"
    work = TrainContext(
        spec, folder, False, device.ProcessGroup(), RunLog(folder), resolve(spec, Machine()), make_engine(spec)
    )
    return _start(work)


def a_checkpoint(folder: Path, step: int) -> Path:
    made = folder / "checkpoints" / f"checkpoint-{step}"
    made.mkdir(parents=True)
    for name in (checkpoints.OPTIMIZER_STATES[0], "trainer_state.json", checkpoints.COMPLETE):
        (made / name).touch()
    return made


def reported(spec: RunSpec) -> Any:
    try:
        return trainers.training_arguments(make_engine(spec), Path(".")).report_to
    except TrainError as error:
        return str(error)  # a tracker that is not installed is named


def heard(spec: RunSpec) -> Any:
    root = logging.getLogger()
    handlers = list(root.handlers)
    logging_setup.configure_logging(spec.logging.level, 0, False)
    root.handlers = handlers
    return logging_setup.transformers_logging.get_verbosity(), argument("log_level")(spec)


@cache
def left(root: str, save: bool, merge: bool) -> Any:
    """The model's files that a run leaves."""
    more = {"save.final_model": save, "save.merge_adapter": merge, "train.max_steps": 1}
    folder = make_run_folder(Path(root), f"left-{save}-{merge}", more)
    train_in_one_process(Path(root) / "cache", folder)
    return sorted(p.name for p in folder.glob("model/*.safetensors"))


def kept(spec: RunSpec) -> Any:
    root = Path(found(spec).name).parents[2]
    return left(str(root), spec.save.final_model, spec.save.merge_adapter)


FILES = {"data.source": "files", "data.files": ("HERE/a.jsonl",)}
HUB = {"data.source": "hub", "data.hub_id": "HERE/hub-a", "data.hub_config": "one"}
PAIR = {**FILES, "data.format": "prompt_completion"}
PAIRS = {**FILES, "data.format": "pairs", "train.stage": "dpo"}
LABELS = {**FILES, "data.format": "labels", "train.stage": "kto"}
DPO = {"train.stage": "dpo", "data.builtin": "train-pairs"}
KTO = {"train.stage": "kto", "data.builtin": "train-pairs"}
CUSTOM = {"lora.targets": "custom", "lora.target_modules": ("q_proj",)}
FREEZE = {"method.kind": "freeze"}
FULL = {"method.kind": "full"}
GALORE, APOLLO, BADAM = ({**FULL, "train.optim": name} for name in ("galore_adamw", "apollo_adamw", "badam"))
SAVED = {"save.strategy": "steps"}
EVALUATED = {"eval.strategy": "steps"}
DDP = {"parallel.strategy": "ddp"}
ZERO3 = {"parallel.strategy": "zero3"}
NVME = {**ZERO3, "parallel.offload_optimizer": "nvme"}
FSDP2 = {"parallel.strategy": "fsdp2"}
STATIC = {**DDP, "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"}
ELASTIC = {**STATIC, "launch.rendezvous": "elastic"}
HOSTS = {**STATIC, "launch.launcher": "deepspeed", "launch.hostfile": ("a slots=2", "b slots=2")}
CASES: dict[str, Case] = {
    "model.source": Case("path", found, {"model.path": "HERE/one"}),
    "model.builtin": Case("smollm2-135m-instruct", found),
    "model.path": Case("HERE/two", found, {"model.source": "path", "model.path": "HERE/one"}),
    "model.hub_id": Case("some/other", found, {"model.source": "hub", "model.hub_id": "some/model"}),
    "model.revision": Case("v2", found, {"model.source": "hub", "model.hub_id": "some/model"}),
    "model.trust_remote_code": Case(True, found, {"model.source": "hub", "model.hub_id": "some/model"}),
    "model.attn_implementation": Case("eager", lambda spec: adapted(spec).config._attn_implementation),
    "data.source": Case("files", rows, {"data.files": ("HERE/a.jsonl",)}),
    "data.builtin": Case("train-pairs", offered, {"train.stage": "kto"}),
    "data.files": Case(("HERE/b.jsonl",), rows, FILES),
    "data.hub_id": Case("HERE/hub-b", rows, HUB),
    "data.hub_config": Case("two", rows, HUB),
    "data.hub_split": Case("train[:10]", rows, HUB),
    "data.format": Case("text", rows, FILES),
    "data.messages_column": Case("talk", rows, {**FILES, "data.format": "messages"}),
    "data.prompt_column": Case("q", rows, PAIR),
    "data.completion_column": Case("r", rows, PAIR),
    "data.chosen_column": Case("better", rows, PAIRS),
    "data.rejected_column": Case("worse", rows, PAIRS),
    "data.label_column": Case("good", rows, LABELS),
    "data.text_column": Case("q", rows, {**FILES, "data.format": "text"}),
    "data.system_prompt": Case("Be brief.", rows, PAIR),
    "data.chat_template": Case("file", table, {"data.chat_template_file": "HERE/a.jinja"}),
    "data.chat_template_file": Case(
        "HERE/b.jinja", table, {"data.chat_template": "file", "data.chat_template_file": "HERE/a.jinja"}
    ),
    "data.loss_on": Case("all_tokens", table),
    "data.max_length": Case(100, table),
    "data.packing": Case(True, packed),
    "data.max_samples": Case(7, rows),
    "data.validation": Case("none", rows, FILES),
    "data.validation_split": Case(0.5, rows, FILES),
    "data.validation_files": Case(
        ("HERE/a.jsonl",), rows, {**FILES, "data.validation": "files", "data.validation_files": ("HERE/b.jsonl",)}
    ),
    "data.dataset_num_proc": Case(2, helpers, {"data.max_samples": 0}),
    "method.kind": Case("full", trained),
    "lora.r": Case(3, trained),
    "lora.alpha": Case(5.0, lora),
    "lora.dropout": Case(0.25, lora),
    "lora.targets": Case("attention", trained),
    "lora.target_modules": Case(("v_proj",), trained, CUSTOM),
    "lora.modules_to_save": Case(("lm_head",), trained),
    "method.quantization": Case("nf4", layers),
    "method.bnb_4bit_use_double_quant": Case(False, layers, {"method.quantization": "nf4"}),
    "lora.use_dora": Case(True, trained),
    "lora.use_rslora": Case(True, lora),
    "lora.init": Case("pissa", first),
    "lora.loraplus_lr_ratio": Case(16.0, fastest),
    "method.freeze_trainable_layers": Case(-1, trained, FREEZE),
    "method.freeze_extra_modules": Case(("embed_tokens",), trained, FREEZE),
    "train.stage": Case("pretraining", table),
    "train.duration": Case("epochs", argument("max_steps")),
    "train.num_train_epochs": Case(1.5, argument("num_train_epochs"), {"train.duration": "epochs"}),
    "train.max_steps": Case(5, argument("max_steps")),
    "train.per_device_train_batch_size": Case(3, argument("train_batch_size")),
    "train.gradient_accumulation_steps": Case(2, argument("gradient_accumulation_steps")),
    "train.learning_rate": Case(0.5, optimizer),
    "train.lr_scheduler_type": Case("cosine_with_min_lr", rates),
    "train.warmup_steps": Case(10, rates),
    "train.optim": Case("sgd", optimizer),
    "train.weight_decay": Case(0.1, decay),
    "train.adam_beta1": Case(0.8, optimizer),
    "train.adam_beta2": Case(0.9, optimizer),
    "train.adam_epsilon": Case(1e-6, optimizer),
    "train.momentum": Case(0.5, held_group, {**FULL, "train.optim": "muon"}),
    "train.projection_rank": Case(8, held_group, GALORE),
    "train.update_proj_gap": Case(7, held_group, GALORE),
    "train.optim_targets": Case("attention", held_group, GALORE),
    "train.optim_target_modules": Case(
        ("down_proj",), held_group, {**GALORE, "train.optim_targets": "custom", "train.optim_target_modules": "mlp"}
    ),
    "train.galore_scale": Case(2.0, held_group, GALORE),
    "train.galore_proj_type": Case("left", held_group, GALORE),
    "train.apollo_scale": Case(2.0, held_group, APOLLO),
    "train.apollo_proj": Case("svd", held_group, APOLLO),
    "train.apollo_scale_type": Case("tensor", held_group, APOLLO),
    "train.badam_switch_mode": Case("ascending", turns, BADAM),
    "train.badam_switch_block_every": Case(7, turns, BADAM),
    "train.max_grad_norm": Case(0.0, argument("max_grad_norm")),
    "train.neftune_noise_alpha": Case(5.0, lambda spec: trainer(spec).neftune_noise_alpha),
    "train.train_sampling_strategy": Case("group_by_length", order),
    "train.activation_checkpointing": Case(True, argument("activation_checkpointing")),
    "train.use_liger_kernel": Case(True, refusal),
    "train.use_unsloth": Case(True, missed),
    "train.torch_compile": Case(True, argument("torch_compile")),
    "train.dataloader_num_workers": Case(2, lambda spec: trainer(spec).get_train_dataloader().num_workers),
    "train.seed": Case(7, rows),
    "preference.beta": Case(0.5, asked("beta"), DPO),
    "preference.dpo_loss_type": Case("ipo", asked("loss_type"), DPO),
    "preference.label_smoothing": Case(0.1, asked("label_smoothing"), {**DPO, "preference.dpo_loss_type": "robust"}),
    "preference.sft_loss_weight": Case(0.5, asked("loss_weights"), DPO),
    "preference.kto_loss_type": Case("apo_zero_unpaired", asked("loss_type"), KTO),
    "preference.desirable_weight": Case(2.0, asked("desirable_weight"), KTO),
    "preference.undesirable_weight": Case(2.0, asked("undesirable_weight"), KTO),
    "preference.precompute_ref_log_probs": Case(True, lambda spec: trainer(spec).train_dataset.column_names, DPO),
    "preference.center_rewards_coefficient": Case(
        0.01, asked("center_rewards_coefficient"), {"train.stage": "reward", "data.builtin": "train-pairs"}
    ),
    "precision.compute": Case("bf16", computed),
    "precision.fp8_backend": Case("te", eighth, {"precision.compute": "fp8"}),
    "parallel.strategy": Case("ddp", planned),
    "parallel.ddp_find_unused_parameters": Case(True, ranks, DDP),
    "parallel.bucket_cap_mb": Case(50, ranks, DDP),
    "parallel.ddp_timeout": Case(60, ranks, DDP),
    "parallel.offload_optimizer": Case("cpu", told("deepspeed.json"), ZERO3),
    "parallel.offload_param": Case("cpu", told("deepspeed.json"), ZERO3),
    "parallel.pin_memory": Case(False, told("deepspeed.json"), {**ZERO3, "parallel.offload_optimizer": "cpu"}),
    "parallel.nvme_path": Case("/disk", told("deepspeed.json"), NVME),
    "parallel.nvme_buffer_count": Case(9, told("deepspeed.json"), NVME),
    "parallel.nvme_buffer_size_mb": Case(64, told("deepspeed.json"), {**NVME, "parallel.offload_param": "nvme"}),
    "parallel.aio_block_size_kb": Case(512, told("deepspeed.json"), NVME),
    "parallel.aio_queue_depth": Case(32, told("deepspeed.json"), NVME),
    "parallel.aio_intra_op_parallelism": Case(2, told("deepspeed.json"), NVME),
    "parallel.sharding_strategy": Case("hybrid_shard", told("fsdp.json"), {"parallel.strategy": "fsdp1"}),
    "parallel.reshard_after_forward": Case(False, told("fsdp.json"), FSDP2),
    "parallel.cpu_offload": Case(True, told("fsdp.json"), FSDP2),
    "parallel.transformer_layer_cls_to_wrap": Case(("LlamaMLP",), told("fsdp.json"), FSDP2),
    "parallel.reduce_dtype": Case("compute", plugged, {**FSDP2, "precision.compute": "bf16"}),
    "parallel.state_dict_type": Case("sharded", told("fsdp.json"), FSDP2),
    "parallel.replicate_size": Case(2, meshed, FSDP2),
    "parallel.context_parallel_size": Case(2, meshed, FSDP2),
    "parallel.sequence_parallel_size": Case(2, shared_rows, ZERO3),
    "parallel.extra_config": Case('{"wall_clock_breakdown": true}', told("deepspeed.json"), ZERO3),
    "launch.extra_accelerate_config": Case(
        '{"debug": true}', file("accelerate.yaml"), {"launch.launcher": "accelerate"}
    ),
    "parallel.tensor_parallel_size": Case(4, sliced, {"parallel.strategy": "tensor"}),
    "eval.strategy": Case("epoch", argument("eval_strategy")),
    "eval.steps": Case(3, argument("eval_steps"), EVALUATED),
    "eval.per_device_eval_batch_size": Case(3, argument("eval_batch_size"), EVALUATED),
    "eval.num_generations": Case(3, held),
    "eval.max_new_tokens": Case(9, longest),
    "save.strategy": Case("epoch", argument("save_strategy")),
    "save.steps": Case(3, argument("save_steps"), SAVED),
    "save.total_limit": Case(
        1, lambda spec: CheckpointCallback(spec, Path("."), device.ProcessGroup(), RunLog(Path("."))).keep, SAVED
    ),
    "save.only_model": Case(True, argument("save_only_model"), SAVED),
    "save.load_best_model_at_end": Case(
        True,
        argument("load_best_model_at_end"),
        {**SAVED, **EVALUATED, "save.steps": 10, "eval.steps": 5},
    ),
    "save.resume_from": Case("scratch", begun),
    "save.resume_path": Case(
        "HERE/other/checkpoints/checkpoint-8",
        begun_elsewhere,
        {"save.resume_from": "path", "save.resume_path": "HERE/other/checkpoints/checkpoint-4"},
    ),
    "save.final_model": Case(True, kept),
    "save.merge_adapter": Case(True, kept, {"save.final_model": True}),
    "logging.run_name": Case("mine", argument("run_name")),
    "logging.steps": Case(5, argument("logging_steps")),
    "logging.level": Case("info", heard),
    "logging.report_to": Case("mlflow", reported),
    "launch.launcher": Case("accelerate", planned),
    "launch.device": Case("cuda", planned),
    "launch.devices": Case((2, 3), planned, {"launch.device": "cuda"}),
    "launch.nproc_per_node": Case(4, planned, DDP),
    "launch.rendezvous": Case("elastic", planned, DDP),
    "launch.nnodes": Case(3, planned, STATIC),
    "launch.min_nnodes": Case(2, planned, ELASTIC),
    "launch.node_rank": Case(1, planned, STATIC),
    "launch.master_addr": Case("10.0.0.2", planned, STATIC),
    "launch.master_port": Case(29511, planned, DDP),
    "launch.max_restarts": Case(5, planned, ELASTIC),
    "launch.rdzv_id": Case("mine", planned, ELASTIC),
    "launch.hostfile": Case(("a slots=2", "c slots=2"), planned, HOSTS),
    "launch.include": Case("a@b:0,1", planned, HOSTS),
    "launch.cuda_env_defaults": Case(False, planned, {"launch.device": "cuda"}),
    "launch.omp_num_threads": Case(3, planned),
    "launch.env": Case({"A": "b"}, planned),
}


def here(value: Any, root: Path) -> Any:
    if isinstance(value, str):
        return value.replace("HERE", str(root))
    return tuple(here(v, root) for v in value) if isinstance(value, tuple) else value


def test_the_table_is_complete() -> None:
    assert CASES.keys() == {option.name for option in options()}


@pytest.mark.parametrize("name", CASES)
def test_an_option_has_its_effect(name: str, place: Path) -> None:
    for step in (4, 8):
        if not (place / f"other/checkpoints/checkpoint-{step}").exists():
            a_checkpoint(place / "other", step)
    case = CASES[name]
    before = make_spec({key: here(value, place) for key, value in case.base.items()})
    after = edit(before, {name: here(case.changed, place)})
    assert effective(before) != effective(after), "the option is hidden in this case"
    first = case.see(effective(before))
    assert first == case.see(effective(before)), "what is seen must not change by itself"
    assert first != case.see(effective(after))


@pytest.mark.parametrize("name", [o.name for o in options() if o.when != ({},)])
def test_hidden_options_have_no_effect(name: str, place: Path) -> None:
    """Where one part of each of its conditions does not hold, a changed value leaves the plan as it was."""
    case, option = CASES[name], by_name()[name]
    for failing in itertools.product(*(condition.items() for condition in option.when)):
        hiding = {}
        for other, _ in failing:
            values = [value for value, _ in by_name()[other].choices] or ["true", "false"]
            wrong = {value for key, allowed in failing if key == other for value in allowed}
            hiding[other] = next((value for value in values if word(value) not in wrong), None)
            assert hiding[other] is not None, f"{other} always shows {name}"
        base = make_spec({**{k: here(v, place) for k, v in case.base.items()}, **hiding})
        changed = edit(base, {name: here(case.changed, place)})
        assert plan(changed, MACHINE) == plan(base, MACHINE)
