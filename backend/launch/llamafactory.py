"""A spec as files of LLaMA-Factory 0.9: train.yaml, dataset_info.json, and the DeepSpeed configuration.

The counterpart of importers/llamafactory.py. Every option that is visible is written, or is in the list of what
LLaMA-Factory does not have, so nothing is lost silently.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from backend import registry
from backend.config import Data, RunSpec, merge
from backend.config.data import SYSTEM_COLUMN
from backend.config.options import Problem, SpecError, for_dataset, get, options, shown
from backend.config.sources import SOURCES, key_of
from backend.data import llamafactory as reading
from backend.data.chat import InvalidExample
from backend.data.formats import DEFAULTS, convert, detect_format, example_problem, required_columns
from backend.data.reading import DataFileError, expand, file_patterns, read_examples
from backend.launch import accelerate_config
from backend.modelspec import ModelShape, is_attention
from backend.paths import model_folder
from backend.registry.llamafactory_names import ATTENTIONS, MEGATRON, OPTION_NAMES, STAGES
from backend.resolve import ResolvedRun
from backend.runs import (
    ACCELERATE,
    CHECKPOINTS,
    DATASET_INFO,
    DEEPSPEED,
    FSDP,
    LLAMAFACTORY,
    LLAMAFACTORY_RUN,
    RENDEZVOUS,
)
from backend.wording import counted

OUTPUT = "output"
OF_RUNS = {"do_train": True, "output_dir": CHECKPOINTS}  # keys that llamafactory.extra_args cannot override
MODULE = "llamafactory.launcher"  # what llamafactory-cli starts in each process
TRAINER = Path(__file__).parent.parent / "train" / "llamafactory_run.py"
KEYS = {option: key for key, option in OPTION_NAMES.items()}
# Options that LLaMA-Factory takes from elsewhere, and those that do not change the training.
ELSEWHERE = {
    "model.source", "model.builtin", "model.path", "model.hub_id", "data.source", "data.builtin", "data.files",
    "data.hub_id", "data.hub_config", "data.hub_split", "data.format", "data.messages_column", "data.prompt_column",
    "data.completion_column", "data.chosen_column", "data.rejected_column", "data.label_column", "data.text_column",
    "data.system_column",
    "data.validation", "data.validation_files", "train.duration", "save.stop_timeout", "logging.level",
    "launch.place", "launch.launcher", "launch.device", "launch.devices", "launch.nproc_per_node", "launch.rendezvous",
    "launch.nnodes", "launch.min_nnodes", "launch.node_rank", "launch.master_addr", "launch.master_port",
    "launch.max_restarts", "launch.rdzv_id", "launch.gpu_model", "launch.omp_num_threads", "launch.cuda_env_defaults",
    "launch.env", "launch.trainer", "launch.extra_accelerate_config",
}  # fmt: skip
SECTIONS_ELSEWHERE = ("slurm", "ray", "kubernetes", "llamafactory")
# Options whose value 0 means that there is none; LLaMA-Factory leaves the key out.
ZERO_IS_NONE = {
    "data.max_samples", "data.streaming", "save.total_limit", "eval.early_stopping_patience",
    "train.neftune_noise_alpha", "preference.sft_loss_weight",
}  # fmt: skip
MIXING = {"interleave_first_exhausted": "interleave_under", "interleave_all_exhausted": "interleave_over"}
COLUMN_NAMES = {
    "messages_column": "messages", "prompt_column": "prompt", "completion_column": "response", "text_column": "prompt",
}  # fmt: skip
TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system", "observation_tag": "tool", "function_tag": "function_call",
}  # fmt: skip


@dataclass
class Export:
    """The files by name, and what they leave out. `different`: same option, different behavior; `missing`: no
    counterpart. Both are sentences that begin with the option."""

    spec: RunSpec
    run: ResolvedRun
    format: str  # of the first dataset
    converts: bool = True  # whether to convert data files that LLaMA-Factory cannot read as they are
    shape: ModelShape | None = None  # of the model, if it is known
    table: dict[str, Any] = field(default_factory=dict)
    datasets: dict[str, Any] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)  # the converted data files: name -> text
    different: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # combinations that LLaMA-Factory's own parser rejects
    written: set[str] = field(default_factory=set)  # options that the files contain already

    @property
    def deepspeed(self) -> str:
        """The DeepSpeed configuration; '' without DeepSpeed."""
        return self.run.engine.config_text(self.spec) if self.run.engine.config_file == DEEPSPEED else ""

    @property
    def files(self) -> dict[str, str]:
        """Name -> text."""
        found = {LLAMAFACTORY: yaml.safe_dump(self.table, sort_keys=False, allow_unicode=True)}
        found[DATASET_INFO] = json.dumps(self.datasets, indent=2) + "\n"
        found |= {ACCELERATE: accelerate_config.text(self.spec, self.run)} if self.is_accelerated else {}
        return {**found, **self.converted, **({DEEPSPEED: self.deepspeed} if self.deepspeed else {})}

    @property
    def is_accelerated(self) -> bool:
        """Whether accelerate's configuration has the strategy, which LLaMA-Factory's own has no key for. On CPUs,
        accelerate 1.11 ignores it: its state.py turns MULTI_CPU into no other type, and the model would use DDP."""
        is_fsdp = self.run.engine.config_file == FSDP
        return self.spec.launch.launcher == "accelerate" and is_fsdp and self.run.device != "cpu"

    @property
    def command(self) -> str:
        """What starts the training in the folder of the files."""
        run, spec = self.run, self.spec
        variables = {**run.engine.environment(run.device), **environment(spec)}
        device = registry.DEVICES[run.device].visible_devices_env
        if device and run.device_ids and (spec.launch.devices or run.world_size == 1):
            # llamafactory-cli starts a process on each device that is visible.
            variables[device] = ",".join(map(str, run.device_ids))
        variables |= spec.launch.env
        if (run.world_size > 1 or self.deepspeed) and not self.is_accelerated:
            variables |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(run.nproc_per_node)}
        if run.nnodes > 1:
            variables |= {"NNODES": str(run.nnodes), "NODE_RANK": "0", "MASTER_PORT": str(run.master_port or 29500)}
            variables |= {"MASTER_ADDR": spec.launch.master_addr or "ADDRESS-OF-NODE-0"}
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        if self.is_accelerated:
            return " ".join([*words, "accelerate", "launch", "--config_file", ACCELERATE, "-m", MODULE, LLAMAFACTORY])
        return " ".join([*words, "llamafactory-cli", "train", LLAMAFACTORY])

    def value(self, option: str) -> Any:
        """The value of an option that is visible; None for one that has no effect."""
        self.written.add(option)
        spec = self.spec
        return get(spec, option) if shown(spec, OPTIONS[option]) else None

    def lacks(self, option: str, why: str) -> None:
        """Note an option without a counterpart."""
        self.missing.append(f"{option}: {why}")


OPTIONS = {option.name: option for option in options()}


def export(
    spec: RunSpec, run: ResolvedRun, format: str, converts: bool = True, shape: ModelShape | None = None
) -> Export:
    """The files of a spec, in which paths are absolute; `format`: that of all training data; `shape`: that of the
    model. Without `converts`, no data file is converted, and one that LLaMA-Factory cannot read is in the list of what
    is missing. Raises SpecError."""
    # Datasets of different formats have none in common, and that of a dataset on the Hub is only known if it is set.
    made = Export(spec, run, format or _format_of(for_dataset(spec, 0).data, spec.train.stage), converts, shape)
    for part in PARTS:
        part(made)
    for option, key in KEYS.items():
        if option not in made.written and (value := made.value(option)) not in (None, ""):
            made.table |= {} if value == 0 and option in ZERO_IS_NONE else {key: value}
    _name_missing(made)
    if template := made.value("llamafactory.template"):  # of a spec that LLaMA-Factory trains
        made.table["template"] = template
    made.table |= merge.parse(made.value("llamafactory.extra_args") or "")
    made.refused = _refusals(made.table, made.run.world_size > 1, made.spec.parallel.strategy == "zero3")
    return made


def environment(spec: RunSpec) -> dict[str, str]:
    """The switches of LLaMA-Factory's launcher and parser that are environment variables."""
    switches = {"megatron": {"USE_MCA": "1"}, "ktransformers": {"USE_KT": "1"}}
    return switches.get(spec.other_backend, {})


def run_files(spec: RunSpec, run: ResolvedRun, format: str, shape: ModelShape | None = None) -> dict[str, str]:
    """The files of a run that LLaMA-Factory trains."""
    made = export(spec, run, format, converts=False, shape=shape)
    made.table |= OF_RUNS
    copies = {LLAMAFACTORY_RUN: TRAINER, RENDEZVOUS: TRAINER.with_name(RENDEZVOUS)}
    return {**made.files, **{name: path.read_text(encoding="utf-8") for name, path in copies.items()}}


def _name_missing(made: Export) -> None:
    spec = made.spec
    for name, option in OPTIONS.items():
        if name in made.written or name in ELSEWHERE or name.split(".")[0] in SECTIONS_ELSEWHERE:
            continue
        value = get(spec, name)
        if shown(spec, option) and value != option.default:
            made.lacks(name, f"{value} has no counterpart in LLaMA-Factory")


# -- model and method -------------------------------------------------------------------------------------------------


def _model(made: Export) -> None:
    model = made.spec.model
    where = {"path": model.path, "hub": model.hub_id, "builtin": str(model_folder(model.builtin))}
    made.table["model_name_or_path"] = where[model.source]
    if model.source == "builtin" and not model_folder(model.builtin).is_dir():
        made.different.append("model.builtin: the folder of the model is made when a run of Footplate first uses it")
    if model.source == "hub" and model.revision != "main":
        made.table["model_revision"] = model.revision
    made.written |= {"model.revision", "model.attn_implementation"}
    kernels = {name: key for key, name in ATTENTIONS.items()}
    kernel = model.attn_implementation
    made.table["flash_attn"] = kernels.get(kernel, "auto")
    if kernel not in kernels:
        made.lacks("model.attn_implementation", f"LLaMA-Factory has no {kernel}; auto is written")


def _added_tokens(made: Export) -> None:
    data = made.spec.data
    made.written |= {"data.add_tokens", "data.add_special_tokens"}
    if not data.added_tokens:
        return
    given = {"add_tokens": data.add_tokens, "add_special_tokens": data.add_special_tokens}
    made.table |= {key: ",".join(tokens) for key, tokens in given.items() if tokens}
    made.table["resize_vocab"] = True
    if made.spec.method.kind == "lora":
        what = "the modules in lora.modules_to_save" if made.spec.lora.modules_to_save else "the whole embeddings"
        made.different.append(f"data.add_tokens: LLaMA-Factory trains {what}, not only the rows of these tokens")


def _method(made: Export) -> None:
    spec = made.spec
    made.table["finetuning_type"] = made.value("method.kind")
    if quantization := made.value("method.quantization"):
        bits = registry.QUANTIZATIONS[quantization].bits
        made.table |= {"quantization_bit": bits, "quantization_method": "bnb"} if bits else {}
        made.table |= {"quantization_type": quantization} if bits == 4 else {}
    if spec.method.kind == "freeze" and (extra := made.value("method.freeze_extra_modules")):
        made.table["freeze_extra_modules"] = ",".join(extra)
        text = "LLaMA-Factory trains everything whose name contains one of them, such as input_layernorm for norm"
        made.different.append(f"method.freeze_extra_modules: {text}")
    if spec.method.kind == "lora":
        _lora(made)


def _attention(made: Export, option: str) -> tuple[str, ...]:
    """The names of the model's attention layers with that of the module before them: other layers may have the same
    names. If the model is not known, names that most models have."""
    leaves = [leaf for leaf in made.shape.modules() if leaf.is_linear] if made.shape else []
    found = dict.fromkeys(".".join(leaf.path.split(".")[-2:]) for leaf in leaves if is_attention(leaf.path))
    if not found:
        made.different.append(f"{option}: {OF_ATTENTION}")
    return tuple(found) or registry.ATTENTION_MODULES


OF_ATTENTION = "the names q_proj, k_proj, v_proj and o_proj, which some models do not have"


def _lora(made: Export) -> None:
    lora = made.spec.lora
    made.written |= {"lora.targets", "lora.target_modules", "lora.modules_to_save", "lora.init", "lora.alpha"}
    made.written.add("lora.adapter_path")
    attention = _attention(made, "lora.targets") if lora.targets == "attention" else ("all",)
    made.table["lora_target"] = ",".join(lora.target_modules if lora.targets == "custom" else attention)
    made.table["lora_alpha"] = int(lora.alpha)
    if lora.alpha % 1:
        made.different.append(f"lora.alpha: {lora.alpha:g} is rounded, since LLaMA-Factory takes whole numbers only")
    if lora.adapter_path:
        made.table["adapter_name_or_path"] = made.value("lora.adapter_path")
    if lora.modules_to_save:
        made.table["additional_target"] = ",".join(lora.modules_to_save)
    if lora.init in ("pissa", "pissa_fast"):
        made.table |= {"pissa_init": True, "pissa_iter": -1 if lora.init == "pissa" else 16}
    elif lora.init != "default":
        made.lacks("lora.init", f"LLaMA-Factory has no initialization {lora.init}")
    if lora.loraplus_lr_ratio == 1:  # off; LLaMA-Factory would create its own optimizer for any number
        made.written.add("lora.loraplus_lr_ratio")


# -- stage and data ---------------------------------------------------------------------------------------------------


def _stage(made: Export) -> None:
    spec = made.spec
    stage = spec.train.stage
    keys = {name: key for key, name in STAGES.items()} | {"orpo": "dpo"}
    made.written |= {"train.stage", "data.loss_on", "data.packing"}
    is_text = stage == "sft" and made.format == "text"  # which only its pretraining reads
    made.table |= {"stage": "pt" if is_text else keys[stage], "do_train": True}
    if stage == "orpo":
        made.table["pref_loss"] = "orpo"
    elif stage == "dpo":
        loss = made.value("preference.dpo_loss_type")
        made.table["pref_loss"] = loss if loss in ("sigmoid", "hinge", "ipo") else "sigmoid"
        if loss not in ("sigmoid", "hinge", "ipo"):
            made.lacks("preference.dpo_loss_type", f"LLaMA-Factory has no {loss}; sigmoid is written")
    if (beta := made.value("preference.beta")) is not None:
        made.table["pref_beta"] = beta
    if made.table["stage"] == "sft" and spec.data.loss_on == "all_tokens":
        made.table["train_on_prompt"] = True
    if shown(spec, OPTIONS["data.packing"]):
        made.table["packing"] = spec.data.packing
        if spec.data.packing and made.table["stage"] == "sft":
            made.table["neat_packing"] = True
        elif spec.data.packing:
            made.different.append("data.packing: packed documents attend to each other in LLaMA-Factory's pretraining")


def _template(made: Export) -> None:
    template = made.value("data.chat_template")
    if template is None:
        return
    if template == "chatml":
        made.table["template"] = "chatml"
    elif template == "file":
        made.lacks(
            "data.chat_template_file", "LLaMA-Factory has named templates only; the tokenizer's template is used"
        )
    if template != "chatml":
        made.different.append(
            "data.chat_template: LLaMA-Factory derives a template from the tokenizer's; check the first example that "
            "it prints, and set template if LLaMA-Factory has one for the model"
        )
    kwargs = made.spec.data.template_kwargs
    if kwargs.keys() <= {"enable_thinking"}:
        made.table |= kwargs
        made.written.add("data.chat_template_kwargs")
    if prompt := made.value("data.system_prompt"):
        made.table["default_system"] = prompt
    made.written.add("data.chat_template_file")


def _data(made: Export) -> None:
    data = made.spec.data
    made.table["dataset_dir"] = "."
    made.written |= {"data.validation_split", SOURCES, "data.mixing", "data.weight"}
    train: list[str] = []
    validation: list[str] = []
    is_one_file: list[bool] = []  # one value for each dataset, as in formats
    formats: list[str] = []
    for index in range(len(data.datasets)):
        dataset, before = for_dataset(made.spec, index).data, len(train)
        format = made.format if index == 0 else _format_of(dataset, made.spec.train.stage)
        described = _Described(dataset, format, key_of(index, "format"), dataset.source != "hub")
        patterns = file_patterns(dataset)
        for path in _paths(patterns[0]) if described.is_file else [dataset.hub_id]:
            train.append(_add(made, f"data_{len(train) + 1}", path, described))
        for path in _paths(patterns[1]):
            validation.append(_add(made, f"eval_{len(validation) + 1}", path, replace(described, is_file=True)))
        is_one_file.append(len(train) == before + 1)
        formats.append(format)
    made.table["dataset"] = ",".join(train)
    if validation:
        made.table["eval_dataset"] = ",".join(validation)
    elif data.splits:
        made.table["val_size"] = data.validation_split
    if data.sources:
        _mixture(made, all(is_one_file))
    if made.spec.train.stage == "sft" and len({format == "text" for format in formats}) > 1:
        made.lacks(SOURCES, "LLaMA-Factory cannot mix plain text with conversations in SFT")
    if "alpaca" in formats:
        made.different.append("data.format: LLaMA-Factory puts one line break between instruction and input, not two")
    if data.max_samples:
        text = "LLaMA-Factory takes the first examples of each file, of validation files too, not random ones"
        made.different.append(f"data.max_samples: {text}")
    made.different.append("train.seed: LLaMA-Factory shuffles the examples differently with the same seed")


def _mixture(made: Export, are_single_files: bool) -> None:
    """How several datasets are put together. Source: llamafactory 0.9.5 data/data_utils.py, merge_dataset and
    split_dataset; hparams/data_args.py."""
    data = made.spec.data
    datasets, is_interleaved = data.datasets, data.mixing != "concatenate"
    weights = [dataset.weight for dataset in datasets]
    splits = {dataset.validation_split if dataset.splits else 0 for dataset in datasets}
    if is_interleaved:
        made.table["mix_strategy"] = MIXING[data.mixing]
        made.table["interleave_probs"] = ",".join(f"{weight / sum(weights):.10g}" for weight in weights)
    found = {
        "has no weights for concatenated datasets": not is_interleaved and {*weights} != {1},
        "interleaves files, so each dataset must be one file": is_interleaved and not are_single_files,
        "has one system prompt for all datasets": len({dataset.system_prompt for dataset in datasets}) > 1,
        "has one max_samples for all datasets": len({dataset.max_samples for dataset in datasets}) > 1,
        "uses one val_size for all datasets": len(splits) > 1,
        "also interleaves eval_dataset": is_interleaved and "eval_dataset" in made.table,
        "would put repeated training examples in the validation set": splits != {0}
        and data.mixing == "interleave_all_exhausted",
    }
    for text in (text for text, holds in found.items() if holds):
        made.lacks(SOURCES, f"LLaMA-Factory {text}")


def _format_of(data: Data, stage: str) -> str:
    """The format of a dataset: the one that is set, or that of its first example; '' if not known."""
    if data.source == "builtin":
        return registry.DATASETS[data.builtin].format
    if data.format != "auto":
        return data.format
    paths = _paths(file_patterns(data)[0])
    return detect_format(_first_example(Path(paths[0])), registry.STAGES[stage].formats) or "" if paths else ""


def _paths(patterns: Iterable[str]) -> list[str]:
    """The files that patterns match. A pattern without a file is kept: the checks report it."""
    try:
        return [str(path) for path in expand(patterns)]
    except DataFileError:
        return list(patterns)


@dataclass(frozen=True)
class _Described:
    """What the entries of a dataset have in common."""

    data: Data  # the options of this dataset
    format: str
    option: str  # the option that sets the format
    is_file: bool


def _add(made: Export, name: str, path: str, described: _Described) -> str:
    """Describe a file in dataset_info.json; returns the name of its entry."""
    data, format, is_file = described.data, described.format, described.is_file
    place = {"file_name": str(Path(path).absolute())} if is_file else {"hf_hub_url": path, "split": data.hub_split}
    if not is_file and data.hub_config:
        place["subset"] = data.hub_config
    first = _first_example(Path(path)) if is_file else {}
    columns = _columns(data, format, first) if reading.is_read(made.spec.train.stage, format) else {}
    if made.converts and is_file and format and (not columns or _differs(Path(path), described, first)):
        _convert(made, name, Path(path), described)
    elif columns:
        # Not "openai" for messages: llamafactory 0.9.5 then adds "detailed thinking off" to each system prompt
        # (data/converter.py, OpenAIDatasetConverter).
        formatting = "sharegpt" if format in ("messages", "sharegpt") else "alpaca"
        made.datasets[name] = {**place, "formatting": formatting, "columns": columns}
        made.datasets[name] |= {"tags": TAGS} if format == "messages" else {}
    else:
        made.datasets[name] = place
        made.lacks(described.option, f"the examples of {path} must be described in {DATASET_INFO}")
    return name


def _differs(path: Path, described: _Described, first: Mapping[str, Any]) -> bool:
    """Whether LLaMA-Factory would not read a file, or a part of one of its examples."""
    format, data = described.format, described.data
    try:
        return bool(reading.unread_file(path)) or any(
            not example_problem(row, format, data) and reading.difference(row, format, data, first, path)
            for _, row in read_examples(path)
        )
    except DataFileError:  # the file does not exist here, or the checks report what is wrong with it
        return False


def _convert(made: Export, name: str, path: Path, described: _Described) -> None:
    """Write a data file in a form that LLaMA-Factory reads completely, and describe it. Raises SpecError."""
    lines: list[dict[str, Any]] = []
    left_out, stage = 0, made.spec.train.stage
    try:
        for _, example in read_examples(path):
            found = _lines(example, described, stage)
            lines += found
            left_out += not found
    except DataFileError as error:
        raise SpecError([Problem("data.files", str(error))]) from error
    if left_out:
        why = "invalid, or LLaMA-Factory has no form for all of its parts"
        made.lacks("data.files", f"{counted(left_out, 'example')} of {path}: {why}")
    file = f"{name}.jsonl"
    made.converted[file] = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    columns = reading.columns_of(lines)
    about = {"formatting": "alpaca"} if "prompt" in columns else {"formatting": "sharegpt", "tags": TAGS}
    made.datasets[name] = {"file_name": file, **about, "columns": columns}
    made.datasets[name] |= {"ranking": True} if "chosen" in columns else {}


def _lines(example: Mapping[str, Any], described: _Described, stage: str) -> list[dict[str, Any]]:
    """An example as LLaMA-Factory reads it; none if it cannot."""
    try:
        return reading.as_read(convert(example, described.format, described.data), stage)
    except InvalidExample:
        return []


def _columns(data: Data, format: str, first: Mapping[str, Any]) -> dict[str, str]:
    """LLaMA-Factory's names of the columns, for formats that it reads as they are; {} for others. LLaMA-Factory stops
    if a column is not in the data. `first` is an example of the data, {} if it is not known."""
    if format not in DEFAULTS:
        return {}
    columns = {COLUMN_NAMES[option]: column for option, column in required_columns(data, format).items()}
    if format == "alpaca" and (not first or "input" in first):
        columns["query"] = "input"
    if format == "alpaca" and isinstance(first.get("history", 0), list | None):
        columns["history"] = "history"
    if format != "text" and isinstance(first.get("tools", 0), str | None):
        columns["tools"] = "tools"
    if format != "text" and (
        data.system_column in first or (not first and data.system_column not in ("", SYSTEM_COLUMN))
    ):
        columns["system"] = data.system_column
    return columns


def _first_example(path: Path) -> Mapping[str, Any]:
    """{} if there is none, or it cannot be read."""
    try:
        return next((row for _, row in read_examples(path, 1)), {})
    except DataFileError:
        return {}


# -- training ---------------------------------------------------------------------------------------------------------


def _schedule(made: Export) -> None:
    train = made.spec.train
    made.written |= {"train.max_steps", "train.num_train_epochs", "train.lr_scheduler_type", "train.warmup_steps"}
    if train.duration == "steps":
        made.table["max_steps"] = train.max_steps
    else:
        made.table["num_train_epochs"] = train.num_train_epochs
    made.table["lr_scheduler_type"] = made.value("train.lr_scheduler_type") or "constant"
    if made.table["lr_scheduler_type"] == "cosine_with_min_lr":
        made.table["lr_scheduler_kwargs"] = {"min_lr_rate": 0.1}
    warmup = made.value("train.warmup_steps") or 0
    made.table |= {"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}
    made.table["disable_gradient_checkpointing"] = not made.value("train.activation_checkpointing")
    if made.value("train.train_sampling_strategy") == "group_by_length":
        made.table["train_sampling_strategy"] = "group_by_length"
    if made.value("data.streaming"):
        _streaming(made)


def _streaming(made: Export) -> None:
    """LLaMA-Factory divides local files among the DataLoader workers, and reads nothing without any."""
    made.table["streaming"] = True
    if not made.spec.train.dataloader_num_workers:
        made.written.add("train.dataloader_num_workers")
        made.table["dataloader_num_workers"] = 1
        made.different.append("train.dataloader_num_workers: 1 is written; without it, LLaMA-Factory streams no files")


def _precision(made: Export) -> None:
    compute, run = made.value("precision.compute"), made.run
    chosen = run.compute_dtype if compute == "auto" else compute
    if chosen in ("bf16", "fp16", "pure_bf16", "fp8", "tf32"):
        made.table[chosen] = True
    if chosen == "fp8" and (backend := made.value("precision.fp8_backend")):
        made.table["fp8_backend"] = backend


def _optimizer(made: Export) -> None:
    name = made.value("train.optim")
    family, _, inner = name.partition("_")
    if family in ("galore", "apollo"):
        _projected(made, family, inner)
    elif name == "badam":
        made.table["use_badam"] = True
        made.table["badam_switch_mode"] = made.value("train.badam_switch_mode")
        made.table["badam_switch_interval"] = made.value("train.badam_switch_block_every")
    elif name in ("adam_mini", "muon"):
        made.table[f"use_{name}"] = True
    else:
        row = registry.OPTIMIZERS[name]
        values: dict[str, Any] = dict(row.arguments) | (
            {"momentum": made.value("train.momentum")} if "momentum" in row.reads else {}
        )
        made.table["optim"] = row.trainer_optim or "adamw_torch"
        made.table |= {"optim_args": ",".join(f"{key}={value}" for key, value in values.items())} if values else {}
        if not row.trainer_optim:
            made.lacks("train.optim", f"LLaMA-Factory has no {row.label}; adamw_torch is written")


def _projected(made: Export, family: str, inner: str) -> None:
    """GaLore or APOLLO around another optimizer."""
    base = inner.removesuffix("_layerwise")
    made.table[f"use_{family}"] = True
    made.table["optim"] = {"adamw_8bit": "adamw_8bit", "adafactor": "adafactor"}.get(base, "adamw_torch")
    made.table[f"{family}_layerwise"] = inner.endswith("_layerwise")
    made.table[f"{family}_rank"] = made.value("train.projection_rank")
    made.table[f"{family}_update_interval"] = made.value("train.update_proj_gap")
    made.table[f"{family}_scale"] = made.value(f"train.{family}_scale")
    targets, custom = made.value("train.optim_targets"), made.value("train.optim_target_modules")
    attention = _attention(made, "train.optim_targets") if targets == "attention" else ("all",)
    made.table[f"{family}_target"] = ",".join(custom if targets == "custom" else attention)
    if family == "galore":
        made.table["galore_proj_type"] = made.value("train.galore_proj_type")
    else:
        made.table["apollo_proj"] = made.value("train.apollo_proj")
        made.table["apollo_scale_type"] = made.value("train.apollo_scale_type")


def _saving(made: Export) -> None:
    spec = made.spec
    made.written |= {
        "save.strategy",
        "save.steps",
        "eval.strategy",
        "eval.steps",
        "logging.report_to",
        "logging.run_name",
    }
    made.table["logging_nan_inf_filter"] = False  # else a loss that is NaN is logged as the mean of earlier ones
    made.table |= {"output_dir": OUTPUT, "save_strategy": spec.save.strategy, "report_to": spec.logging.report_to}
    if spec.save.strategy == "steps":
        made.table["save_steps"] = int(spec.save.steps)
    if spec.logging.run_name:
        made.table["run_name"] = spec.logging.run_name
    if made.table.get("eval_dataset") or made.table.get("val_size"):
        made.table["eval_strategy"] = spec.eval.strategy
        if spec.eval.strategy == "steps":
            made.table["eval_steps"] = int(spec.eval.steps)
        if spec.eval.strategy != "no" and spec.eval.early_stopping_patience:  # which requires it
            made.table["metric_for_best_model"] = "eval_loss"
    if spec.save.resume_from == "path":
        made.table["resume_from_checkpoint"] = made.value("save.resume_path")
    elif spec.save.resume_from == "scratch":
        made.table["overwrite_output_dir"] = True
    made.written |= {"save.resume_from", "save.final_model"}
    if not spec.save.final_model:
        made.lacks("save.final_model", "LLaMA-Factory always saves the model")


def _devices(made: Export) -> None:
    spec, run = made.spec, made.run
    made.written |= {"parallel.strategy", "parallel.ddp_timeout", "parallel.extra_config"}
    made.table |= {"use_cpu": True} if run.device == "cpu" else {}
    made.table["ddp_timeout"] = spec.parallel.ddp_timeout
    made.table |= {"deepspeed": DEEPSPEED} if made.deepspeed else {}
    if made.deepspeed or made.is_accelerated:  # they are in a separate file
        made.written |= {name for name in OPTIONS if name.startswith("parallel.")}
    elif run.world_size > 1 and spec.parallel.strategy != "ddp":
        label = registry.STRATEGIES[spec.parallel.strategy].label
        made.lacks("parallel.strategy", f"{label} cannot be set in LLaMA-Factory's YAML; the training would use DDP")


def _backend(made: Export) -> None:
    """The keys of a backend other than transformers. Source: mcore_adapter 0.10 training_args.py; llamafactory 0.9.5
    hparams/model_args.py, KTransformersArguments."""
    chosen = made.spec.llamafactory
    if chosen.backend == "megatron":
        degrees = {key: get(made.spec, option) for key, option in MEGATRON.items()}
        made.table |= {key: value for key, value in degrees.items() if isinstance(value, bool) or value > 1}
        made.table["use_distributed_optimizer"] = True
        if chosen.expert_parallel_size > 1:
            made.table["moe_token_dispatcher_type"] = "alltoall"  # allgather does not support lengths that differ
        if made.table.pop("disable_gradient_checkpointing", True) is False:
            made.table["recompute_granularity"] = "full"
    elif chosen.backend == "ktransformers":
        made.table["use_kt"] = True
        made.table |= {"kt_weight_path": chosen.kt_weight_path} if chosen.kt_weight_path else {}


PARTS: tuple[Callable[[Export], None], ...] = (
    _model, _added_tokens, _method, _stage, _template, _data, _schedule, _precision, _optimizer, _saving, _devices,
    _backend,
)  # fmt: skip


def _refusals(table: Mapping[str, Any], several: bool, zero3: bool) -> list[str]:
    """What LLaMA-Factory's parser rejects in a table, on `several` processes. Source: llamafactory 0.9.5,
    hparams/parser.py, get_train_args, and hparams/finetuning_args.py and data_args.py, __post_init__."""
    lora, pissa = table["finetuning_type"] == "lora", bool(table.get("pissa_init"))
    low_rank = bool(table.get("use_galore") or table.get("use_apollo"))
    layerwise = bool(table.get("galore_layerwise") or table.get("apollo_layerwise"))
    streams = bool(table.get("streaming"))
    badam, quantized = bool(table.get("use_badam")), bool(table.get("quantization_bit"))
    with_reference = table["stage"] == "kto" or (table["stage"] == "dpo" and table.get("pref_loss") != "orpo")
    found = {
        "GaLore, APOLLO and BAdam cannot be combined with LoRA.": lora and (low_rank or badam),
        "GaLore and APOLLO cannot be combined with DeepSpeed.": low_rank and bool(table.get("deepspeed")),
        "Layer-wise GaLore and APOLLO need a single process.": layerwise and several,
        "BAdam on several processes needs ZeRO-3.": badam and several and not zero3,
        "Pure bf16 cannot be combined with ZeRO-3.": zero3 and bool(table.get("pure_bf16")),
        "Pure bf16 needs a GPU.": bool(table.get("use_cpu") and table.get("pure_bf16")),
        "Streaming needs a number of steps (train.duration).": streams and "max_steps" not in table,
        "Streaming cannot split a validation set off the data.": streams and bool(table.get("val_size")),
        "Streaming cannot be combined with max_samples.": streams and bool(table.get("max_samples")),
        "PiSSA cannot be combined with ZeRO-3.": zero3 and pissa,
        "PiSSA cannot be combined with a quantized model.": quantized and pissa,
        "PiSSA cannot be combined with DPO and KTO.": with_reference and pissa,
        "Unsloth cannot be combined with ZeRO-3.": zero3 and bool(table.get("use_unsloth")),
        "The embeddings of a quantized model cannot be resized for added tokens.": quantized
        and bool(table.get("resize_vocab")),
        "fp8 cannot be combined with a quantized model.": quantized and bool(table.get("fp8")),
        "The stage rm does not support load_best_model_at_end.": table["stage"] == "rm"
        and bool(table.get("load_best_model_at_end")),
    }
    return [text for text, holds in found.items() if holds]
