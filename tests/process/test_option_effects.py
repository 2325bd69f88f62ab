"""Each option has an effect: a changed value changes what the libraries receive, or what the run does."""

from __future__ import annotations

import itertools
import json
import logging
import math
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from training_runs import ignore_progress, make_engine, make_spec
from transformers import TrainerControl, TrainerState

from backend.config import RunSpec
from backend.config.options import by_name, edit, effective, options, word
from backend.launch.clusters import answers
from backend.launch.plan import plan
from backend.machine import Gpu, Machine
from backend.resolve import resolve
from backend.runs import SPEC, STOP
from backend.train import (
    adapters,
    added_tokens,
    checkpoints,
    continued_adapter,
    data,
    device,
    generation_eval,
    logging_setup,
    model,
    rule_check,
    time_limit,
    trainers,
    unsloth,
)
from backend.train.callbacks import CheckpointCallback, EarlyStopping
from backend.train.divergence import DivergenceCallback
from backend.train.examples import select
from backend.train.generation_eval import EvalPrompt, GenerationEvalCallback
from backend.train.monitor import Monitor
from backend.train.run_log import RunLog, TrainError
from backend.train.training import TrainContext, _start

# peft uses a deprecated transformers attribute; the trainer filters this warning too.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
Observer = Callable[[RunSpec], Any]
MACHINE = Machine(device="cuda", gpus=tuple(Gpu(n, "H100", 80 << 30, 80 << 30, (9, 0)) for n in range(4)), cores=8)


@dataclass(frozen=True)
class Case:
    """Options under which this option is visible (`base`), a value other than its default, and a function that observes
    its effect."""

    changed: Any
    observe: Observer
    base: Mapping[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module", autouse=True)
def inputs(root: Path, tiny: Path, fork_server: ForkServer) -> Iterator[Path]:
    """A folder with a model cache, data files and templates; INPUTS in the cases stands for its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)  # Path(".") below
        patch.setenv("HF_DATASETS_CACHE", str(root / "datasets"))
        shutil.copytree(tiny, root / "one")
        shutil.copytree(tiny, root / "two")
        shutil.copytree(tiny, root / "cache/models/smollm2-135m-instruct")  # so that nothing is downloaded
        _files(root)
        _saved_models(root, fork_server)
        yield root


def _files(root: Path) -> None:
    row = {"instruction": "a", "output": "b", "prompt": "c", "completion": "d", "text": "e", "q": "f", "r": "g"}
    row["talk"] = [{"role": "user", "content": "h"}, {"role": "assistant", "content": "i"}]
    row |= {"chosen": "l", "rejected": "m", "better": "n", "worse": "o", "label": True, "good": False}
    row["messages"] = [{"role": "user", "content": "j"}, {"role": "assistant", "content": "k"}]
    examples = [{**row, "output": f"b{n}"} for n in range(20)]
    for name, part in (("a", examples), ("b", examples[:7])):
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
        hub = root / f"hub-{name}"
        hub.mkdir()
        (hub / "one.jsonl").write_text("\n".join(map(json.dumps, part)))
        (hub / "two.jsonl").write_text("\n".join(map(json.dumps, part[:3])))
        configs = "".join(f"- config_name: {c}\n  data_files: {c}.jsonl\n" for c in ("one", "two"))
        (hub / "README.md").write_text(f"---\nconfigs:\n{configs}---\n".replace("one\n", "one\n  default: true\n", 1))
    (root / "bad.jsonl").write_text("\n".join((*map(json.dumps, examples), "not JSON")))
    template = "{% for m in messages %}{{ m['role'] + m['content'] + eos_token }}{% endfor %}"
    (root / "a.jinja").write_text(template)
    (root / "b.jinja").write_text(template.replace("'content'] +", "'content'] + '!' +"))
    (root / "c.jinja").write_text("{{ greeting }}" + template)


def argument(name: str) -> Observer:
    """A field of the TrainingArguments."""
    return lambda spec: getattr(trainers.training_arguments(make_engine(spec), Path(".")), name)


def model_source(spec: RunSpec) -> Any:
    return model.locate(spec, ignore_progress)


@cache
def tokenizer_and_source(spec_text: str) -> tuple[Any, Any]:
    spec = RunSpec.model_validate_json(spec_text)
    source = model_source(spec)
    return model.load_tokenizer(spec, source), source


def load_tokenizer(spec: RunSpec) -> Any:
    return tokenizer_and_source(spec.model_dump_json())[0]


def adapted_model(spec: RunSpec) -> Any:
    tokenizer, source = tokenizer_and_source(spec.model_dump_json())
    whole = model.load(spec, source, "fp32", tokenizer)
    return adapters.apply_method(spec, whole, "fp32", token_ids=added_tokens.ids(spec, tokenizer))


def trainable_shapes(spec: RunSpec) -> Any:
    return {name: tuple(p.shape) for name, p in adapted_model(spec).named_parameters() if p.requires_grad}


def lora_scaling_and_dropout(spec: RunSpec) -> Any:
    """Scaling and dropout of a LoRA layer."""
    layer = adapted_model(spec).base_model.model.model.layers[0].self_attn.q_proj
    return layer.scaling["default"], str(layer.lora_dropout)


def initial_lora_b_sum(spec: RunSpec) -> Any:
    """The sum of a LoRA B matrix before the first step."""
    model, (_, source) = adapted_model(spec), tokenizer_and_source(spec.model_dump_json())
    context: Any = SimpleNamespace(spec=spec, first=lambda work: work(), run_log=SimpleNamespace(info=print))
    continued_adapter.load(context, source, model)
    return float(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.detach().sum())


def base_layer_type(spec: RunSpec) -> Any:
    """The class and double quantization of a base layer."""
    layer = adapted_model(spec).base_model.model.model.layers[0].self_attn.q_proj.base_layer
    return type(layer).__name__, getattr(getattr(layer.weight, "quant_state", None), "nested", None)


def steps_until_divergence(spec: RunSpec) -> int:
    """Steps with a loss that is NaN until the run ends."""
    callback = DivergenceCallback(spec, Path("."), device.ProcessGroup(), RunLog(Path(".")))
    state, control = TrainerState(max_steps=100), TrainerControl(should_log=True)
    with pytest.raises(TrainError, match="from step 1 on"):
        for state.global_step in range(1, 100):
            callback.add(torch.tensor(math.nan))
            callback.on_step_end(None, state, control)
    return state.global_step


def stops_on_spike(spec: RunSpec) -> bool:
    """Whether a loss that jumps and stays there requests a stop."""
    with tempfile.TemporaryDirectory() as folder:
        run = SimpleNamespace(device="cpu", compute_dtype="fp32")
        context = SimpleNamespace(
            spec=spec, run=run, folder=Path(folder), group=device.ProcessGroup(), run_log=RunLog(Path(folder))
        )
        watched = Monitor(context)  # type: ignore[arg-type]
        for step, loss in enumerate([2.0] * 30 + [9.0] * 2):
            watched.add({"loss": loss}, step)
        return (Path(folder) / STOP).exists()


def stops_after_its_time(spec: RunSpec) -> bool:
    """Whether a training that has taken longer than this requests a stop."""
    with tempfile.TemporaryDirectory() as folder:
        if thread := time_limit.watch(spec.train.max_hours, True, RunLog(Path(folder))):
            thread.join(10)
        return (Path(folder) / STOP).exists()


def evaluations_until_stop(spec: RunSpec) -> int:
    """Evaluations until training stops early, of which the first four improve by 0.1 each; 0: it does not."""
    config = SimpleNamespace(metric_for_best_model="eval_loss", greater_is_better=False)
    if not trainers.stops_early(spec):
        return 0
    callback = EarlyStopping(spec.eval.early_stopping_patience, spec.eval.early_stopping_threshold, RunLog(Path(".")))
    state, control = TrainerState(), TrainerControl()
    while not control.should_training_stop:
        state.global_step += 1
        metrics = {"eval_loss": 3.0 - 0.1 * min(state.global_step, 4)}
        callback.on_evaluate(config, state, control, metrics)
        state.best_metric = min(metrics["eval_loss"], state.best_metric or math.inf)
    return state.global_step


def kept_checkpoints(spec: RunSpec) -> list[int]:
    """Steps of the checkpoints that are left after five saves, where step 2 has the lowest eval loss and then step 4;
    the last checkpoint has no evaluation."""
    with tempfile.TemporaryDirectory() as name:
        run, state = Path(name), TrainerState()
        monitor: Any = SimpleNamespace(saved=lambda *_: None)
        callback = CheckpointCallback(spec, run, device.ProcessGroup(), RunLog(run), monitor)
        best = {"load_best_model_at_end": spec.save.load_best_model_at_end}
        arguments = SimpleNamespace(output_dir=str(run / "checkpoints"), **best)
        for step, loss in ((1, 3.0), (2, 1.0), (3, math.nan), (4, 2.0), (5, None)):
            state.global_step = step
            state.log_history += [
                {"step": step, "loss": 0.5},
                *([] if loss is None else [{"step": step, "eval_loss": loss}]),
            ]
            (saved := run / f"checkpoints/checkpoint-{step}").mkdir(parents=True)
            if step == 2:  # transformers keeps account of the best one with every evaluation
                state.best_model_checkpoint = str(saved)
            callback.on_save(arguments, state, TrainerControl())
        return [checkpoints.step_of(folder) for folder in checkpoints.complete(run)]


def rule_errors(spec: RunSpec) -> str:
    """The errors of the rules on this machine."""
    try:
        rule_check.check_rules(spec, Path("."))
    except TrainError as error:
        return str(error)
    return ""


def missing_unsloth_error(spec: RunSpec) -> str:
    """The error if Unsloth is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "unsloth", None)
        try:
            unsloth.import_unsloth(spec)
        except TrainError as error:
            return str(error)
    return ""


def highest_learning_rate(spec: RunSpec) -> Any:
    return max(group["lr"] for group in trainer(spec).create_optimizer().param_groups)


def examples(spec: RunSpec) -> Any:
    return [
        [example.value for _, example in sorted(part, key=itemgetter(0))] for parts in select(spec) for part in parts
    ]


def prepared_data(spec: RunSpec) -> data.PreparedData:
    return data.prepare(spec, load_tokenizer(spec), lambda done, of: True, lambda line: None)


def first_rows(spec: RunSpec) -> Any:
    return prepared_data(spec).train[:5]


def all_rows(spec: RunSpec) -> Any:
    return prepared_data(spec).train[:]


def eval_example_count(spec: RunSpec) -> Any:
    return len(prepared_data(spec).eval_examples)


def steps_with_outputs(spec: RunSpec) -> list[int]:
    """The steps at which a training of four steps that is evaluated at each second one generates, besides 0 and 4."""
    log = SimpleNamespace(stop_requested=lambda: 0, info=print, metrics=print)
    context: Any = SimpleNamespace(spec=spec, run_log=log, group=device.ProcessGroup())
    callback = GenerationEvalCallback(context, None, [EvalPrompt("", "", "", "")])  # type: ignore[arg-type]
    callback.is_training, saved = True, []
    callback._generate = lambda *_: [""]  # type: ignore[method-assign]
    callback._save = lambda step, _: saved.append(step)  # type: ignore[method-assign]
    for step in (2, 4):
        callback.on_evaluate(None, SimpleNamespace(global_step=step, max_steps=4), None)
    return saved


def examples_or_error(spec: RunSpec) -> Any:
    try:
        return examples(spec)
    except TrainError as error:
        return str(error)  # no examples for this stage


def trainer_argument(name: str) -> Observer:
    """A field of the arguments of the stage's trainer."""
    return lambda spec: getattr(trainer(spec).args, name)


def preparation_process_count(spec: RunSpec) -> int:
    """The largest number of concurrent preparation processes."""
    counts = [0]

    def tick(done: int, of: int) -> bool:
        counts.append(len(multiprocessing.active_children()))
        return True

    data.prepare(spec, load_tokenizer(spec), tick, lambda line: None)
    return max(counts)


def trainer(spec: RunSpec) -> Any:
    config = trainers.training_arguments(make_engine(spec), Path("."))
    return trainers.build_trainer(spec, config, adapted_model(spec), load_tokenizer(spec), prepared_data(spec), [])


def sequence_count(spec: RunSpec) -> Any:
    return len(trainer(spec).train_dataset)


def optimizer(spec: RunSpec) -> Any:
    made = trainer(spec).create_optimizer()
    return type(made).__name__, {k: v for k, v in made.defaults.items() if k != "params"}, made.param_groups[0]["lr"]


def optimizer_groups(spec: RunSpec) -> Any:
    """The settings of the optimizer's parameter groups, and the elements of each."""
    groups = trainer(spec).create_optimizer().param_groups
    settings = [
        {k: v for k, v in group.items() if k != "params" and isinstance(v, int | float | str)} for group in groups
    ]
    return settings, [sum(p.numel() for p in group["params"]) for group in groups]


def badam_switching(spec: RunSpec) -> Any:
    made = trainer(spec).create_optimizer()
    return made.switch_mode, made.switch_block_every


def fp8_backend(spec: RunSpec) -> Any:
    """The fp8 backend, or accelerate's error if its package is not installed."""
    try:
        return str(trainer(spec).accelerator.fp8_backend)
    except ImportError as error:
        return str(error)


def weight_decays(spec: RunSpec) -> Any:
    return [group["weight_decay"] for group in trainer(spec).create_optimizer().param_groups]


def learning_rates(spec: RunSpec) -> Any:
    """The learning rates of 40 steps."""
    made = trainer(spec)
    made.create_optimizer_and_scheduler(40)
    rates = []
    for _ in range(40):
        made.optimizer.step()
        made.lr_scheduler.step()
        rates.append(made.lr_scheduler.get_last_lr()[0])
    return rates


def sampling_order(spec: RunSpec) -> Any:
    return list(trainer(spec)._get_train_sampler())[:20]


def two_rank_arguments(spec: RunSpec) -> Any:
    return make_engine(spec, 2).trainer_arguments(Path("."))


def engine_config(name: str) -> Observer:
    """A generated JSON config of the engine."""
    return lambda spec: json.loads(plan(spec, MACHINE).files[name])


def generated_file(name: str) -> Observer:
    """The text of a generated file."""
    return lambda spec: plan(spec, MACHINE).files[name]


def fsdp_mixed_precision(spec: RunSpec) -> Any:
    """The mixed precision policy of FSDP."""
    config = SimpleNamespace(fsdp_plugin_args={})
    make_engine(spec)._complete_plugin(config)
    return config.fsdp_plugin_args["mixed_precision_policy"]


def device_mesh_sizes(spec: RunSpec) -> Any:
    return make_engine(spec, 4).mesh()._sizes


def sequence_parallel_arguments(spec: RunSpec) -> Any:
    arguments = make_engine(spec, 4, "cuda").trainer_arguments(Path("."))
    return arguments.get("pad_to_multiple_of"), arguments[
        "parallelism_config"
    ]._sizes if "parallelism_config" in arguments else None


def tensor_parallel_arguments(spec: RunSpec) -> Any:
    return make_engine(spec, 4).load_arguments()["distributed_config"]


def launch_plan(spec: RunSpec) -> Any:
    made = plan(spec, MACHINE)
    return made.argv, made.env, made.defaults, made.other_nodes, {k: v for k, v in made.files.items() if k != SPEC}


def cluster_gpus(spec: RunSpec) -> Any:
    return answers.gpus(8, spec.launch.gpu_model)


def compute_dtype(spec: RunSpec) -> Any:
    config = trainers.training_arguments(make_engine(spec), Path("."))
    return resolve(spec, Machine()).compute_dtype, config.bf16


def max_new_tokens_(spec: RunSpec) -> Any:
    return generation_eval.Generator.create(spec, None, device.ProcessGroup(), torch.float32).max_new_tokens


def resumed_checkpoint(spec: RunSpec) -> Any:
    """The checkpoint from which a run with a complete checkpoint of step 4 resumes."""
    folder = Path(model_source(spec).name).parents[2] / f"resume-{spec.save.resume_from}"
    shutil.rmtree(folder, ignore_errors=True)
    write_checkpoint(folder, 4)
    group = device.ProcessGroup()
    context = TrainContext(
        spec,
        folder,
        spec.save.resume_from == "scratch",
        group,
        RunLog(folder),
        resolve(spec, Machine()),
        make_engine(spec),
    )
    start = _start(context, {})
    return start.name if start else None


def resumed_checkpoint_in_empty_folder(spec: RunSpec) -> Any:
    folder = Path(model_source(spec).name).parents[2] / "empty"
    context = TrainContext(
        spec, folder, False, device.ProcessGroup(), RunLog(folder), resolve(spec, Machine()), make_engine(spec)
    )
    return _start(context, {})


def write_checkpoint(folder: Path, step: int) -> Path:
    made = folder / "checkpoints" / f"checkpoint-{step}"
    made.mkdir(parents=True)
    for name in (checkpoints.OPTIMIZER_STATES[0], "trainer_state.json", checkpoints.COMPLETE):
        (made / name).touch()
    return made


def trackers(spec: RunSpec) -> Any:
    try:
        return trainers.training_arguments(make_engine(spec), Path(".")).report_to
    except TrainError as error:
        return str(error)  # the tracker is not installed


def log_levels(spec: RunSpec) -> Any:
    root = logging.getLogger()
    handlers = list(root.handlers)
    logging_setup.configure_logging(spec.logging.level, 0, False)
    root.handlers = handlers
    return logging_setup.transformers_logging.get_verbosity(), argument("log_level")(spec)


def _saved_models(root: Path, fork_server: ForkServer) -> None:
    """Runs that save no model, an adapter and a merged model."""
    for save, merge in ((False, False), (True, False), (True, True)):
        changes = {"save.final_model": save, "save.merge_adapter": merge, "train.max_steps": 2}
        fork_server.train(root / f"saved-{save}-{merge}", make_spec(changes))


def saved_model_files(spec: RunSpec) -> Any:
    """The model files that a run saves."""
    folder = Path(f"saved-{spec.save.final_model}-{spec.save.merge_adapter}")
    assert (folder / "result.json").exists()
    return sorted(path.name for path in folder.glob("model/*.safetensors"))


FILES = {"data.source": "files", "data.files": ("INPUTS/a.jsonl",)}
HUB = {"data.source": "hub", "data.hub_id": "INPUTS/hub-a", "data.hub_config": "one"}
PAIR = {**FILES, "data.format": "prompt_completion"}
TWO = {**FILES, "data.sources": '[{}, {"source": "files", "files": ["INPUTS/b.jsonl"]}]'}
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
SLURM = {"launch.place": "slurm"}
RAY = {"launch.place": "ray"}
KUBERNETES = {"launch.place": "kubernetes"}
LLAMAFACTORY = {"launch.trainer": "llamafactory"}
MEGATRON = {**LLAMAFACTORY, "llamafactory.backend": "megatron"}
KTRANSFORMERS = {
    **LLAMAFACTORY,
    "llamafactory.backend": "ktransformers",
    "launch.launcher": "accelerate",
    "parallel.strategy": "fsdp2",
}
HOSTS = {**STATIC, "launch.launcher": "deepspeed", "launch.hostfile": ("a slots=2", "b slots=2")}
CASES: dict[str, Case] = {
    "model.source": Case("path", model_source, {"model.path": "INPUTS/one"}),
    "model.builtin": Case("smollm2-135m-instruct", model_source),
    "model.path": Case("INPUTS/two", model_source, {"model.source": "path", "model.path": "INPUTS/one"}),
    "model.hub_id": Case("some/other", model_source, {"model.source": "hub", "model.hub_id": "some/model"}),
    "model.revision": Case("v2", model_source, {"model.source": "hub", "model.hub_id": "some/model"}),
    "model.trust_remote_code": Case(True, model_source, {"model.source": "hub", "model.hub_id": "some/model"}),
    "model.attn_implementation": Case("eager", lambda spec: adapted_model(spec).config._attn_implementation),
    "data.source": Case("files", examples, {"data.files": ("INPUTS/a.jsonl",)}),
    "data.builtin": Case("train-pairs", examples_or_error, {"train.stage": "kto"}),
    "data.files": Case(("INPUTS/b.jsonl",), examples, FILES),
    "data.hub_id": Case("INPUTS/hub-b", examples, HUB),
    "data.hub_config": Case("two", examples, HUB),
    "data.hub_split": Case("train[:10]", examples, HUB),
    "data.format": Case("text", examples, FILES),
    "data.messages_column": Case("talk", examples, {**FILES, "data.format": "messages"}),
    "data.prompt_column": Case("q", examples, PAIR),
    "data.completion_column": Case("r", examples, PAIR),
    "data.chosen_column": Case("better", examples, PAIRS),
    "data.rejected_column": Case("worse", examples, PAIRS),
    "data.label_column": Case("good", examples, LABELS),
    "data.text_column": Case("q", examples, {**FILES, "data.format": "text"}),
    "data.system_column": Case("q", examples, PAIR),
    "data.system_prompt": Case("Be brief.", examples, PAIR),
    "data.chat_template": Case("file", first_rows, {"data.chat_template_file": "INPUTS/a.jinja"}),
    "data.chat_template_file": Case(
        "INPUTS/b.jinja", first_rows, {"data.chat_template": "file", "data.chat_template_file": "INPUTS/a.jinja"}
    ),
    "data.chat_template_kwargs": Case(
        '{"greeting": "Hello."}',
        first_rows,
        {"data.chat_template": "file", "data.chat_template_file": "INPUTS/c.jinja"},
    ),
    "data.add_tokens": Case(("<tool>",), trainable_shapes),
    "data.add_special_tokens": Case(("<|end|>",), trainable_shapes),
    "data.loss_on": Case("all_tokens", first_rows),
    "data.max_length": Case(100, first_rows),
    "data.packing": Case(True, sequence_count),
    "data.streaming": Case(True, argument("ignore_data_skip")),
    "data.max_samples": Case(7, examples),
    "data.on_bad_example": Case("skip", examples_or_error, {**FILES, "data.files": ("INPUTS/bad.jsonl",)}),
    "data.drop_duplicates": Case(True, examples, {**PAIR, "data.validation": "none"}),
    "data.validation": Case("none", examples, FILES),
    "data.validation_split": Case(0.5, examples, FILES),
    "data.validation_files": Case(
        ("INPUTS/a.jsonl",),
        examples,
        {**FILES, "data.validation": "files", "data.validation_files": ("INPUTS/b.jsonl",)},
    ),
    "data.sources": Case('[{}, {"source": "files", "files": ["INPUTS/b.jsonl"]}]', examples, FILES),
    "data.weight": Case(2.0, all_rows, TWO),
    "data.mixing": Case("interleave_first_exhausted", all_rows, TWO),
    "data.dataset_num_proc": Case(2, preparation_process_count, {"data.max_samples": 0}),
    "method.kind": Case("full", trainable_shapes),
    "lora.r": Case(3, trainable_shapes),
    "lora.alpha": Case(5.0, lora_scaling_and_dropout),
    "lora.dropout": Case(0.25, lora_scaling_and_dropout),
    "lora.targets": Case("attention", trainable_shapes),
    "lora.target_modules": Case(("v_proj",), trainable_shapes, CUSTOM),
    "lora.modules_to_save": Case(("lm_head",), trainable_shapes),
    "method.quantization": Case("nf4", base_layer_type),
    "method.bnb_4bit_use_double_quant": Case(False, base_layer_type, {"method.quantization": "nf4"}),
    "lora.use_dora": Case(True, trainable_shapes),
    "lora.use_rslora": Case(True, lora_scaling_and_dropout),
    "lora.init": Case("pissa", initial_lora_b_sum),
    "lora.adapter_path": Case("INPUTS/saved-True-False/model", initial_lora_b_sum),
    "lora.loraplus_lr_ratio": Case(16.0, highest_learning_rate),
    "method.freeze_trainable_layers": Case(-1, trainable_shapes, FREEZE),
    "method.freeze_extra_modules": Case(("embed_tokens",), trainable_shapes, FREEZE),
    "train.stage": Case("pretraining", first_rows),
    "train.duration": Case("epochs", argument("max_steps")),
    "train.num_train_epochs": Case(1.5, argument("num_train_epochs"), {"train.duration": "epochs"}),
    "train.max_steps": Case(5, argument("max_steps")),
    "train.per_device_train_batch_size": Case(3, argument("train_batch_size")),
    "train.gradient_accumulation_steps": Case(2, argument("gradient_accumulation_steps")),
    "train.learning_rate": Case(0.5, optimizer),
    "train.lr_scheduler_type": Case("cosine_with_min_lr", learning_rates),
    "train.warmup_steps": Case(10, learning_rates),
    "train.optim": Case("sgd", optimizer),
    "train.weight_decay": Case(0.1, weight_decays),
    "train.adam_beta1": Case(0.8, optimizer),
    "train.adam_beta2": Case(0.9, optimizer),
    "train.adam_epsilon": Case(1e-6, optimizer),
    "train.momentum": Case(0.5, optimizer_groups, {**FULL, "train.optim": "muon"}),
    "train.projection_rank": Case(8, optimizer_groups, GALORE),
    "train.update_proj_gap": Case(7, optimizer_groups, GALORE),
    "train.optim_targets": Case("attention", optimizer_groups, GALORE),
    "train.optim_target_modules": Case(
        ("down_proj",),
        optimizer_groups,
        {**GALORE, "train.optim_targets": "custom", "train.optim_target_modules": "mlp"},
    ),
    "train.galore_scale": Case(2.0, optimizer_groups, GALORE),
    "train.galore_proj_type": Case("left", optimizer_groups, GALORE),
    "train.apollo_scale": Case(2.0, optimizer_groups, APOLLO),
    "train.apollo_proj": Case("svd", optimizer_groups, APOLLO),
    "train.apollo_scale_type": Case("tensor", optimizer_groups, APOLLO),
    "train.badam_switch_mode": Case("ascending", badam_switching, BADAM),
    "train.badam_switch_block_every": Case(7, badam_switching, BADAM),
    "train.max_grad_norm": Case(0.0, argument("max_grad_norm")),
    "train.max_nonfinite_steps": Case(2, steps_until_divergence),
    "train.half_lr_retries": Case(1, lambda spec: plan(spec, MACHINE).then),
    "train.stop_on_spike": Case(True, stops_on_spike),
    "train.max_hours": Case(1e-5, stops_after_its_time),
    "train.neftune_noise_alpha": Case(5.0, lambda spec: trainer(spec).neftune_noise_alpha),
    "train.train_sampling_strategy": Case("group_by_length", sampling_order),
    "train.activation_checkpointing": Case(True, argument("activation_checkpointing")),
    "train.use_liger_kernel": Case(True, rule_errors),
    "train.use_unsloth": Case(True, missing_unsloth_error),
    "train.torch_compile": Case(True, argument("torch_compile")),
    "train.dataloader_num_workers": Case(2, lambda spec: trainer(spec).get_train_dataloader().num_workers),
    "train.seed": Case(7, examples),
    "preference.beta": Case(0.5, trainer_argument("beta"), DPO),
    "preference.dpo_loss_type": Case("ipo", trainer_argument("loss_type"), DPO),
    "preference.label_smoothing": Case(
        0.1, trainer_argument("label_smoothing"), {**DPO, "preference.dpo_loss_type": "robust"}
    ),
    "preference.sft_loss_weight": Case(0.5, trainer_argument("loss_weights"), DPO),
    "preference.kto_loss_type": Case("apo_zero_unpaired", trainer_argument("loss_type"), KTO),
    "preference.desirable_weight": Case(2.0, trainer_argument("desirable_weight"), KTO),
    "preference.undesirable_weight": Case(2.0, trainer_argument("undesirable_weight"), KTO),
    "preference.precompute_ref_log_probs": Case(True, lambda spec: trainer(spec).train_dataset.column_names, DPO),
    "preference.center_rewards_coefficient": Case(
        0.01, trainer_argument("center_rewards_coefficient"), {"train.stage": "reward", "data.builtin": "train-pairs"}
    ),
    "precision.compute": Case("bf16", compute_dtype),
    "precision.fp8_backend": Case("te", fp8_backend, {"precision.compute": "fp8"}),
    "parallel.strategy": Case("ddp", launch_plan),
    "parallel.ddp_find_unused_parameters": Case(True, two_rank_arguments, DDP),
    "parallel.bucket_cap_mb": Case(50, two_rank_arguments, DDP),
    "parallel.ddp_timeout": Case(60, two_rank_arguments, DDP),
    "parallel.offload_optimizer": Case("cpu", engine_config("deepspeed.json"), ZERO3),
    "parallel.offload_param": Case("cpu", engine_config("deepspeed.json"), ZERO3),
    "parallel.pin_memory": Case(False, engine_config("deepspeed.json"), {**ZERO3, "parallel.offload_optimizer": "cpu"}),
    "parallel.nvme_path": Case("/disk", engine_config("deepspeed.json"), NVME),
    "parallel.nvme_buffer_count": Case(9, engine_config("deepspeed.json"), NVME),
    "parallel.nvme_buffer_size_mb": Case(
        64, engine_config("deepspeed.json"), {**NVME, "parallel.offload_param": "nvme"}
    ),
    "parallel.aio_block_size_kb": Case(512, engine_config("deepspeed.json"), NVME),
    "parallel.aio_queue_depth": Case(32, engine_config("deepspeed.json"), NVME),
    "parallel.aio_intra_op_parallelism": Case(2, engine_config("deepspeed.json"), NVME),
    "parallel.sharding_strategy": Case("hybrid_shard", engine_config("fsdp.json"), {"parallel.strategy": "fsdp1"}),
    "parallel.reshard_after_forward": Case(False, engine_config("fsdp.json"), FSDP2),
    "parallel.cpu_offload": Case(True, engine_config("fsdp.json"), FSDP2),
    "parallel.transformer_layer_cls_to_wrap": Case(("LlamaMLP",), engine_config("fsdp.json"), FSDP2),
    "parallel.reduce_dtype": Case("compute", fsdp_mixed_precision, {**FSDP2, "precision.compute": "bf16"}),
    "parallel.state_dict_type": Case("sharded", engine_config("fsdp.json"), FSDP2),
    "parallel.replicate_size": Case(2, device_mesh_sizes, FSDP2),
    "parallel.context_parallel_size": Case(2, device_mesh_sizes, FSDP2),
    "parallel.sequence_parallel_size": Case(2, sequence_parallel_arguments, ZERO3),
    "parallel.extra_config": Case('{"wall_clock_breakdown": true}', engine_config("deepspeed.json"), ZERO3),
    "launch.extra_accelerate_config": Case(
        '{"debug": true}', generated_file("accelerate.yaml"), {"launch.launcher": "accelerate"}
    ),
    "parallel.tensor_parallel_size": Case(4, tensor_parallel_arguments, {"parallel.strategy": "tensor"}),
    "eval.strategy": Case("epoch", argument("eval_strategy")),
    "eval.steps": Case(3, argument("eval_steps"), EVALUATED),
    "eval.per_device_eval_batch_size": Case(3, argument("eval_batch_size"), EVALUATED),
    "eval.early_stopping_patience": Case(2, evaluations_until_stop, EVALUATED),
    "eval.early_stopping_threshold": Case(
        0.15, evaluations_until_stop, {**EVALUATED, "eval.early_stopping_patience": 2}
    ),
    "eval.num_generations": Case(3, eval_example_count),
    "eval.max_new_tokens": Case(9, max_new_tokens_),
    "eval.generate_during_eval": Case(True, steps_with_outputs, {**EVALUATED, "eval.num_generations": 1}),
    "save.strategy": Case("epoch", argument("save_strategy")),
    "save.steps": Case(3, argument("save_steps"), SAVED),
    "save.total_limit": Case(
        1, lambda spec: CheckpointCallback(spec, Path("."), device.ProcessGroup(), RunLog(Path(".")), None).keep, SAVED
    ),
    "save.keep_best": Case(1, kept_checkpoints, {**SAVED, **EVALUATED, "save.total_limit": 1}),
    "save.only_model": Case(True, argument("save_only_model"), SAVED),
    "save.load_best_model_at_end": Case(
        True,
        argument("load_best_model_at_end"),
        {**SAVED, **EVALUATED, "save.steps": 10, "eval.steps": 5},
    ),
    "save.resume_from": Case("scratch", resumed_checkpoint),
    "save.resume_path": Case(
        "INPUTS/other/checkpoints/checkpoint-8",
        resumed_checkpoint_in_empty_folder,
        {"save.resume_from": "path", "save.resume_path": "INPUTS/other/checkpoints/checkpoint-4"},
    ),
    "save.stop_timeout": Case(60, lambda spec: plan(spec, MACHINE).stop_timeout),
    "save.final_model": Case(True, saved_model_files),
    "save.merge_adapter": Case(True, saved_model_files, {"save.final_model": True}),
    "logging.run_name": Case("mine", argument("run_name")),
    "logging.steps": Case(5, argument("logging_steps")),
    "logging.level": Case("info", log_levels),
    "logging.report_to": Case("mlflow", trackers),
    "launch.place": Case("slurm", launch_plan),
    "slurm.partition": Case("gpu", launch_plan, SLURM),
    "slurm.time_limit": Case("12:00:00", launch_plan, SLURM),
    "slurm.requeue": Case(False, launch_plan, SLURM),
    "slurm.account": Case("team", launch_plan, SLURM),
    "slurm.qos": Case("high", launch_plan, SLURM),
    "slurm.constraint": Case("a100|h100", launch_plan, SLURM),
    "slurm.cpus": Case(3, launch_plan, SLURM),
    "slurm.memory_gib": Case(64, launch_plan, SLURM),
    "launch.gpu_model": Case("H100", cluster_gpus, SLURM),
    "launch.trainer": Case("llamafactory", launch_plan),
    "llamafactory.backend": Case("megatron", launch_plan, LLAMAFACTORY),
    **{
        f"llamafactory.{name}": Case(value, launch_plan, MEGATRON)
        for name, value in {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "virtual_pipeline_size": 2,
            "context_parallel_size": 2,
            "expert_parallel_size": 2,
            "sequence_parallel": True,
        }.items()
    },
    "llamafactory.kt_backend": Case("AMXINT8", launch_plan, KTRANSFORMERS),
    "llamafactory.kt_weight_path": Case("/weights", launch_plan, KTRANSFORMERS),
    "llamafactory.kt_num_threads": Case(64, launch_plan, KTRANSFORMERS),
    "llamafactory.environment": Case("/opt/env", launch_plan, LLAMAFACTORY),
    "llamafactory.template": Case("qwen3", launch_plan, LLAMAFACTORY),
    "llamafactory.extra_args": Case('{"lora_rank": 4}', launch_plan, LLAMAFACTORY),
    **{
        f"kubernetes.{name}": Case(value, launch_plan, KUBERNETES)
        for name, value in {
            "image": "registry/footplate:1",
            "volumes": ("runs=/runs", "/data=/data"),
            "queue": "research",
            "namespace": "team",
            "node_labels": ("nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3",),
            "cpus": 3,
            "memory_gib": 64,
            "resources": ("rdma/hca=1",),
            "tolerations": ("dedicated=training:NoSchedule",),
            "priority_class": "high",
            "service_account": "trainer",
            "secret": "tokens",
            "python": "/opt/python",
            "kubeflow_runtime": "torch-distributed",
            "extra_pod_spec": '{"hostNetwork": true}',
        }.items()
    },
    "kubernetes.gpu_resource": Case("amd.com/gpu", launch_plan, {**KUBERNETES, "launch.device": "cuda"}),
    "ray.cpus": Case(3, launch_plan, RAY),
    "ray.resources": Case(("accelerator_type:H100=0.001",), launch_plan, RAY),
    "ray.python": Case("/opt/python", launch_plan, RAY),
    "slurm.container": Case("image.sif", launch_plan, SLURM),
    "slurm.container_mounts": Case(("/data", "/scratch:/tmp"), launch_plan, {**SLURM, "slurm.container": "image.sif"}),
    "slurm.container_python": Case("/opt/python", launch_plan, {**SLURM, "slurm.container": "registry#image"}),
    "slurm.extra": Case(("--reservation=team",), launch_plan, SLURM),
    "slurm.setup": Case(("module load cuda",), launch_plan, SLURM),
    "launch.launcher": Case("accelerate", launch_plan),
    "launch.device": Case("cuda", launch_plan),
    "launch.devices": Case((2, 3), launch_plan, {"launch.device": "cuda"}),
    "launch.nproc_per_node": Case(4, launch_plan, DDP),
    "launch.rendezvous": Case("elastic", launch_plan, DDP),
    "launch.nnodes": Case(3, launch_plan, STATIC),
    "launch.min_nnodes": Case(2, launch_plan, ELASTIC),
    "launch.node_rank": Case(1, launch_plan, STATIC),
    "launch.master_addr": Case("10.0.0.2", launch_plan, STATIC),
    "launch.master_port": Case(29511, launch_plan, STATIC),
    "launch.max_restarts": Case(5, launch_plan, ELASTIC),
    "launch.rdzv_id": Case("mine", launch_plan, ELASTIC),
    "launch.hostfile": Case(("a slots=2", "c slots=2"), launch_plan, HOSTS),
    "launch.include": Case("a@b:0,1", launch_plan, HOSTS),
    "launch.cuda_env_defaults": Case(False, launch_plan, {"launch.device": "cuda"}),
    "launch.omp_num_threads": Case(3, launch_plan),
    "launch.env": Case({"A": "b"}, launch_plan),
}


def resolve_inputs(value: Any, root: Path) -> Any:
    if isinstance(value, str):
        return value.replace("INPUTS", str(root))
    return tuple(resolve_inputs(v, root) for v in value) if isinstance(value, tuple) else value


def test_every_option_has_a_case() -> None:
    assert CASES.keys() == {option.name for option in options()}


@pytest.mark.parametrize("name", CASES)
def test_option_has_an_effect(name: str, inputs: Path) -> None:
    for step in (4, 8):
        if not (inputs / f"other/checkpoints/checkpoint-{step}").exists():
            write_checkpoint(inputs / "other", step)
    case = CASES[name]
    before = make_spec({key: resolve_inputs(value, inputs) for key, value in case.base.items()})
    after = edit(before, {name: resolve_inputs(case.changed, inputs)})
    assert effective(before) != effective(after), "the option is hidden in this case"
    observed = case.observe(effective(before))
    assert observed == case.observe(effective(before)), "the observation must be deterministic"
    assert observed != case.observe(effective(after))


def test_the_best_checkpoint_is_kept_only_for_the_end() -> None:
    limited = {**SAVED, **EVALUATED, "save.total_limit": 1}
    assert kept_checkpoints(make_spec(limited)) == [5]
    assert kept_checkpoints(make_spec({**limited, "save.load_best_model_at_end": True})) == [2, 5]


@pytest.mark.parametrize("name", [o.name for o in options() if o.when != ({},)])
def test_hidden_options_have_no_effect(name: str, inputs: Path) -> None:
    """If one part of each visibility condition is false, a changed value does not change the plan."""
    case, option, hidden = CASES[name], by_name()[name], 0
    for failing in itertools.product(*(condition.items() for condition in option.when)):
        hiding = {}
        for other, _ in failing:
            kind = by_name()[other].kind
            values = [value for value, _ in by_name()[other].choices] or (
                [""] if kind == "datasets" else ["true", "false"]
            )
            excluded = {value for key, allowed in failing if key == other for value in allowed}
            hiding[other] = next((value for value in values if word(value) not in excluded), None)
        if None in hiding.values():
            continue  # the conditions together allow every value of this option
        hidden += 1
        base = make_spec({**{k: resolve_inputs(v, inputs) for k, v in case.base.items()}, **hiding})
        changed = edit(base, {name: resolve_inputs(case.changed, inputs)})
        assert plan(changed, MACHINE) == plan(base, MACHINE)
    assert hidden, f"{name} is always shown"


@pytest.mark.parametrize("warmup", [0.1, 4.0, 0.0])
def test_warmup_stable_decay(warmup: float) -> None:
    """The peak from the end of warmup to the last tenth, then linearly to zero."""
    spec = make_spec({"train.lr_scheduler_type": "warmup_stable_decay", "train.warmup_steps": warmup})
    rates, peak = learning_rates(spec), spec.train.learning_rate
    assert rates[3:36] == [peak] * 33
    assert rates[36:] == pytest.approx([peak * share for share in (0.75, 0.5, 0.25, 0)])
