"""The keys of stage and template, and dataset_info.json with the data files. A file that LLaMA-Factory would not read
completely is converted."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend import registry
from backend.config import Data
from backend.config.data import SYSTEM_COLUMN
from backend.config.options import Problem, SpecError, for_dataset, shown
from backend.config.sources import SOURCES, key_of
from backend.data import llamafactory as reading
from backend.data.chat import InvalidExample
from backend.data.formats import DEFAULTS, convert, detect_format, example_problem
from backend.data.preferences import MARGIN, PREFERENCES
from backend.data.reading import DataFileError, expand, file_patterns, read_examples
from backend.launch.llamafactory.exported import OPTIONS, Export
from backend.registry.llamafactory_names import STAGES
from backend.runs import DATASET_INFO
from backend.wording import counted

MIXING = {"interleave_first_exhausted": "interleave_under", "interleave_all_exhausted": "interleave_over"}
TAGS = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "system_tag": "system", "observation_tag": "tool", "function_tag": "function_call",
}  # fmt: skip


def write(made: Export) -> None:
    """Add the keys to the table, and describe or convert the data."""
    for part in (_stage, _template, _data):
        part(made)


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
        format = made.format if index == 0 else format_of(dataset, made.spec.train.stage)
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
    _different_examples(made)


def _different_examples(made: Export) -> None:
    """Name what LLaMA-Factory does differently with the same examples."""
    if any("query" in entry.get("columns", {}) for entry in made.datasets.values()):
        made.different.append("data.format: LLaMA-Factory puts one line break between instruction and input, not two")
    if made.spec.data.max_samples:
        text = "LLaMA-Factory takes the first examples of each file, of validation files too, not random ones"
        made.different.append(f"data.max_samples: {text}")
    if made.spec.train.stage == "reward":
        made.different.append("data.max_length: LLaMA-Factory truncates longer pairs, Footplate drops them")
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


def format_of(data: Data, stage: str) -> str:
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
        read = reading.form(first, format, data)
        formatting = "alpaca" if read == "alpaca" else "sharegpt"
        made.datasets[name] = {**place, "formatting": formatting, "columns": columns}
        made.datasets[name] |= {"tags": TAGS} if read == "messages" else {}
        made.datasets[name] |= {"ranking": True} if "chosen" in columns else {}
        if made.converts and is_file and made.spec.train.stage == "reward":
            _name_margins(made, path, _num_with_margin(Path(path)))
    else:
        made.datasets[name] = place
        made.lacks(described.option, f"the examples of {path} must be described in {DATASET_INFO}")
    return name


def _num_with_margin(path: Path) -> int:
    """How many pairs of a file have a margin."""
    try:
        return sum(row.get(MARGIN) not in (None, "") for _, row in read_examples(path))
    except DataFileError:
        return 0


def _name_margins(made: Export, path: str, count: int) -> None:
    """Note that LLaMA-Factory does not use the margins of pairs."""
    if count:
        made.lacks("data.files", f"LLaMA-Factory ignores the margin of {counted(count, 'example')} of {path}")


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
    left_out, with_margin, stage = 0, 0, made.spec.train.stage
    try:
        for _, example in read_examples(path):
            found = _lines(example, described, stage)
            lines += found
            left_out += not found
            with_margin += stage == "reward" and example.get(MARGIN) not in (None, "")
    except DataFileError as error:
        raise SpecError([Problem("data.files", str(error))]) from error
    if left_out:
        why = "invalid, or LLaMA-Factory has no form for all of its parts"
        made.lacks("data.files", f"{counted(left_out, 'example')} of {path}: {why}")
    _name_margins(made, str(path), with_margin)
    file = f"{name}.jsonl"
    columns = reading.columns_of(lines)
    if reading.TOOLS in columns:  # `datasets` reads parts of 10 MB, and stops at a column that the first part lacks
        lines = [{**line, reading.TOOLS: line.get(reading.TOOLS, "")} for line in lines]
    made.converted[file] = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
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
    if format not in (*DEFAULTS, *PREFERENCES) or not (read := reading.form(first, format, data)):
        return {}
    columns = reading.columns(first, format, data, read)
    is_alpaca = reading.is_alpaca(columns.values(), format)
    if is_alpaca and (not first or "input" in first):
        columns["query"] = "input"
    if is_alpaca and isinstance(first.get("history", 0), list | None):
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
