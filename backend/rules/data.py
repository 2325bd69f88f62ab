"""Rules about the dataset: files, formats, validation set, generations, workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from backend import registry
from backend.config.data import SYSTEM_COLUMN
from backend.config.options import by_name
from backend.data import file_of
from backend.data.chat import column_names
from backend.data.columns import column_options
from backend.data.formats import UNKNOWN_COLUMNS
from backend.inspect import DataIssue
from backend.rules.base import Case, Example, Fix, Violation, advice, error, label_of, names, warning
from backend.rules.columns import guessed_columns
from backend.rules.common_fixes import NO_EVALUATION, OTHER_TEMPLATE, hub_id_violation
from backend.rules.data_issues import (
    fields_of,
    rendered_issues,
    summary,
    unrenderable_summary,
    without_system_prompt,
)
from backend.rules.examples import DEMO, PLAIN_TEXT, USER_DATA, USER_DATA_FACTS, with_data_issue
from backend.rules.max_length import longer_fixes, mostly_identical
from backend.wording import counted

BUILTIN_DATA = Fix("Use the demo dataset", {"data.source": "builtin"}, safe=False, cost="trains on other data")
CHOOSE_FORMAT = f"Choose a {by_name()['data.format'].label.lower()}, and name the columns to use."
SKIP = Fix("Skip such examples", {"data.on_bad_example": "skip"}, safe=False, cost="fewer examples")


@error(
    "DAT001",
    fields=("data.files",),
    title="No data file is set",
    source="arithmetic: nothing to read",
    fixes=(BUILTIN_DATA,),
    manual_fix="Add one path per line to data.files.",
    fails_on=Example({"data.source": "files"}, facts=replace(USER_DATA_FACTS, num_examples=None)),
    passes_on=Example(USER_DATA, facts=USER_DATA_FACTS),
    proof="launch",
)
def missing_data_files(case: Case) -> str | None:
    """Training needs at least one data file, such as a .jsonl, .json, .csv or .parquet file, or another data source."""
    data = case.spec.data
    return "data.source is files and data.files is empty." if data.source == "files" and not data.files else None


@error(
    "DAT002",
    fields=("data.files",),
    title="A data file cannot be read",
    source="the file itself",
    manual_fix="Restore or correct the file, or choose another one.",
    fails_on=Example(USER_DATA, facts=with_data_issue("data.files", "no such file")),
    passes_on=Example(USER_DATA, facts=USER_DATA_FACTS),
    proof="launch",
)
def unreadable_data_file(case: Case) -> Violation | None:
    """Every data file must exist, be readable, and contain examples in one of the supported formats."""
    issues = [issue for issue in _issues(case, "data.files") if not issue.is_example]
    if not issues:
        return None
    data = case.spec.data
    broken = {file_of(issue.location) for issue in issues}
    kept = tuple(name for name in data.files if name not in broken)
    fixes = guessed_columns(case) if not case.facts.format or _lacks_columns(case, case.facts.skipped) else []
    if kept and len(kept) < len(data.files):
        fixes.append(Fix("Skip the files with errors", {"data.files": kept}, False, "fewer examples"))
    fields = ("data.files", "data.format") if fixes and "data.format" in fixes[0].patch else ("data.files",)
    if not all(issue.message.startswith(UNKNOWN_COLUMNS) for issue in issues):
        return Violation(summary(issues), tuple(fixes), fields)
    title = "The columns of a data file are not recognized"
    return Violation(summary(issues), tuple(fixes), ("data.files", "data.format"), title, CHOOSE_FORMAT)


def _issues(case: Case, option: str) -> list[DataIssue]:
    return [issue for issue in case.facts.data_issues if issue.field == option]


@error(
    "DAT003",
    fields=("data.files", "data.format"),
    title="Some examples do not match the data format",
    source="the file itself",
    manual_fix="Correct or delete these examples, or set the data format and the columns to match them. Examples of "
    "another format can be a further dataset, in a file of their own.",
    fails_on=Example(USER_DATA, facts=with_data_issue("data.files", "column messages holds a number", 3)),
    passes_on=Example(USER_DATA, facts=USER_DATA_FACTS),
    proof="launch",
)
def malformed_examples(case: Case) -> Violation | None:
    """An example that does not match its format stops the run while the dataset is prepared."""
    issues = [issue for issue in _issues(case, "data.files") if issue.is_example]
    if not issues:
        return None
    format, detected = case.spec.data.format, case.facts.detected_format
    fixes = []
    if format != "auto" and detected and detected != format:
        fixes.append(Fix("Detect the format automatically", {"data.format": "auto"}, False))
    problems = summary(issues, case.facts.num_invalid, case.facts.all_checked)
    lacks_columns = _lacks_columns(case, map(str, issues))
    if format == "auto" or not lacks_columns:
        columns = guessed_columns(case) if lacks_columns else []
        return Violation(problems, (*fixes, *(columns or (SKIP,))))
    options = tuple(name for name in column_options(format) if name != "data.system_column")
    if not fixes:
        fixes = guessed_columns(case)
    advice = f"Set {names(options)} to the names of columns in the file."
    title = "The data files do not have the columns of the data format"
    return Violation(f"{problems} {advice}", tuple(fixes), ("data.files", "data.format", *options), title)


def _lacks_columns(case: Case, problems: Iterable[str]) -> bool:
    """Whether the first example lacks a column of the format, as then do all examples with the same columns. `problems`
    are those of examples."""
    columns = f"; its columns are: {column_names(dict.fromkeys(case.facts.columns))}"
    return any(": has no column " in problem and problem.endswith(columns) for problem in problems)


@warning(
    "DAT030",
    fields=("data.system_column", "data.files"),
    title="The system prompt column is missing",
    source="the file itself",
    fixes=(Fix("Do not read system prompts from a column", {"data.system_column": ""}, False),),
    fails_on=Example({**USER_DATA, "data.format": "messages", "data.system_column": "persona"}, facts=USER_DATA_FACTS),
    passes_on=Example({**USER_DATA, "data.format": "messages"}, facts=USER_DATA_FACTS),
)
def missing_system_column(case: Case) -> str | None:
    """Examples without this column get data.system_prompt; if that is empty, they have no system prompt."""
    data, facts = case.spec.data, case.facts
    if data.source != "files" or not facts.columns or data.system_column in ("", SYSTEM_COLUMN, *facts.columns):
        return None
    if facts.format in ("", "text"):
        return None
    columns = ", ".join(facts.columns[:10])
    return f"data.system_column is {data.system_column}; the first example has the columns {columns}."


@warning(
    "DAT031",
    fields=("data.on_bad_example",),
    title="Some examples are skipped",
    source="the file itself",
    manual_fix="Correct these examples. To refuse to start with such examples, set data.on_bad_example to stop.",
    fails_on=Example(
        {**USER_DATA, "data.on_bad_example": "skip"},
        facts=replace(USER_DATA_FACTS, num_skipped=4, skipped=("data.jsonl, line 3: column text is empty",)),
    ),
    passes_on=Example({**USER_DATA, "data.on_bad_example": "skip"}, facts=USER_DATA_FACTS),
)
def skipped_examples(case: Case) -> str | None:
    """Examples that cannot be read, do not match the data format, or cannot be rendered by the chat template are left
    out of the training and of the evaluation."""
    facts = case.facts
    if not facts.num_skipped:
        return None
    more = facts.num_skipped - len(facts.skipped)
    others = f" And {counted(more, 'more example')}." if more > 0 else ""
    return " ".join(f"{text}." for text in facts.skipped) + others


@error(
    "DAT004",
    fields=("data.hub_id",),
    title="The dataset id cannot be used",
    source="huggingface_hub 2.4 utils/_validators.py: validate_repo_id",
    fixes=(BUILTIN_DATA,),
    manual_fix="Set data.hub_id to organization/name, as on the dataset's page on the Hub.",
    fails_on=Example({"data.source": "hub"}, facts=replace(USER_DATA_FACTS, num_examples=None)),
    passes_on=Example(
        {"data.source": "hub", "data.hub_id": "trl-lib/Capybara"}, facts=replace(USER_DATA_FACTS, num_examples=None)
    ),
    proof="launch",
)
def invalid_dataset_hub_id(case: Case) -> Violation | None:
    """A dataset is downloaded from the Hugging Face Hub by its id, organization/name."""
    return hub_id_violation("data.hub_id", case.spec.data.hub_id) if case.spec.data.source == "hub" else None


VALIDATION_FILES = {**USER_DATA, "data.validation": "files"}
VALIDATION_SPLIT = Fix(
    "Split off a validation set", {"data.validation": "split"}, safe=False, cost="fewer training examples"
)


@error(
    "DAT005",
    fields=("data.validation_files",),
    title="The validation files cannot be used",
    source="the file itself",
    fixes=(
        Fix("Train without a validation set", NO_EVALUATION, cost="no eval loss"),
        VALIDATION_SPLIT,
    ),
    fails_on=Example(VALIDATION_FILES, facts=USER_DATA_FACTS),
    passes_on=Example(
        {**VALIDATION_FILES, "data.validation_files": ("v.jsonl",)},
        facts=replace(USER_DATA_FACTS, num_validation_examples=20),
    ),
    proof="launch",
)
def unusable_validation_files(case: Case) -> str | None:
    """Validation files must exist, and their examples must have the same format as the training examples."""
    data, facts = case.spec.data, case.facts
    if data.source == "builtin" or data.validation != "files":
        return None
    if issues := _issues(case, "data.validation_files"):
        return summary(issues, facts.num_invalid_validation, facts.all_checked)
    return None if data.validation_files else "data.validation is files and data.validation_files is empty."


@warning(
    "DAT023",
    fields=("data.validation_files",),
    title="A training file is also a validation file",
    source="arithmetic: the validation set is a part of the training set",
    fixes=(VALIDATION_SPLIT,),
    fails_on=Example(
        {**VALIDATION_FILES, "data.files": ("a.jsonl",), "data.validation_files": ("a.jsonl",)},
        facts=replace(USER_DATA_FACTS, num_validation_examples=20, shared_files=("a.jsonl",)),
    ),
    passes_on=Example(
        {**VALIDATION_FILES, "data.files": ("a.jsonl",), "data.validation_files": ("v.jsonl",)},
        facts=replace(USER_DATA_FACTS, num_validation_examples=20),
    ),
)
def training_file_for_validation(case: Case) -> str | None:
    """The eval loss of examples that were trained on falls even if the model overfits, so it says nothing about other
    examples."""
    shared, data = case.facts.shared_files, case.spec.data
    if not shared or data.source != "files" or data.validation != "files":
        return None
    return f"The model would be trained and validated on the same examples of {names(shared)}."


@error(
    "DAT006",
    fields=("data.validation", "data.validation_split"),
    title="A dataset of one example cannot be split",
    source="arithmetic: a validation set would leave no training example",
    fixes=(Fix("Train without a validation set", {**NO_EVALUATION, "eval.num_generations": 0}),),
    fails_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, num_examples=1)),
    passes_on=Example(USER_DATA, facts=replace(USER_DATA_FACTS, num_examples=2)),
    proof="launch",
)
def validation_split_of_one_example(case: Case) -> str | None:
    """A validation split needs at least two examples: one for the training set and one for the validation set.
    data.drop_duplicates leaves out copies first, also copies of examples of earlier datasets."""
    data, facts = case.spec.data, case.facts
    if data.source != "files" or data.validation != "split" or not facts.num_examples:
        return None
    if facts.num_examples != facts.completions_per_example and facts.num_distinct != 1:
        return None
    what = "has 1 example without duplicates" if data.drop_duplicates else "has 1 example"
    return f"data.validation is split, and the dataset {what}."


NO_VALIDATION = {**USER_DATA, "data.validation": "none"}
NO_EVAL_LOSS = Fix(
    "Turn evaluation off", {"eval.strategy": "no", "save.load_best_model_at_end": False}, cost="no eval loss"
)


@warning(
    "DAT007",
    fields=("eval.strategy", "data.validation", "save.load_best_model_at_end"),
    title="Evaluation is on, but the validation set is empty",
    source="transformers 5.23: evaluation needs an eval_dataset",
    fails_on=Example(NO_VALIDATION, facts=USER_DATA_FACTS),
    passes_on=Example({**NO_VALIDATION, "eval.strategy": "no"}, facts=USER_DATA_FACTS),
)
def evaluation_without_validation_set(case: Case) -> Violation | None:
    """Without validation examples there is no eval loss, and therefore no eval curve and no best checkpoint to load at
    the end. Validation examples in which no token counts toward the loss are dropped."""
    strategy, data = case.spec.eval.strategy, case.spec.data
    if strategy == "no":
        return None
    if all(each.source != "builtin" and each.validation == "none" for each in data.datasets):
        message = f"eval.strategy is {strategy} but data.validation is none, so no evaluation would run."
        return Violation(message, (NO_EVAL_LOSS, VALIDATION_SPLIT))
    usable, count = case.facts.usable_examples(data, case.spec.train.seed), case.run.num_eval_examples
    if not count or usable is None or not usable[0] or usable[1] or case.facts.unrenderable_examples:
        return None
    identical = mostly_identical(case)
    what = "has two different completions" if identical else "has a trained token"
    message = (
        f"The validation set has {counted(count, 'example')}, none of which {what} within data.max_length "
        f"({data.max_length:,} tokens). eval.strategy is {strategy}, but no evaluation would run."
    )
    fixes = (NO_EVAL_LOSS, *(() if identical else longer_fixes(case)))
    return Violation(message, fixes, ("eval.strategy", "data.validation", "data.max_length"))


@warning(
    "DAT008",
    fields=("eval.num_generations", "data.validation"),
    title="num_generations exceeds the validation set",
    source="arithmetic",
    fails_on=Example({"eval.num_generations": 100}),
    passes_on=Example({"eval.num_generations": 24}),
)
def more_generations_than_examples(case: Case) -> Violation | None:
    """Each generation uses the prompt of a different validation example, so there cannot be more generations than
    validation examples. In the KTO stage, only desirable completions count, one of each pair."""
    stage, count = case.spec.train.stage, case.spec.eval.num_generations
    available = case.facts.num_eval_prompts(case.spec.data)
    if not registry.STAGES[stage].generates or available is None or not case.facts.counts_are_exact:
        return None
    if count <= available or any(not issue.is_example for issue in case.facts.data_issues):
        return None  # another rule reports a file without examples
    label = f"Evaluate {counted(available, 'generation')}" if available else "Generate nothing"
    message = (
        f"eval.num_generations is {count}, and the validation set has {counted(available, 'example')}; only "
        f"{available} would be generated."
    )
    if stage == "kto" and available:
        message = (
            f"eval.num_generations is {count}, and outputs are generated only for desirable completions, of which the "
            f"validation set has at most {available}."
        )
    return Violation(message, (Fix(label, {"eval.num_generations": available}),))


@warning(
    "DAT036",
    fields=("eval.generate_during_eval", "eval.num_generations"),
    title="generate_during_eval has no prompts",
    source="Footplate's evaluations generate outputs only for the prompts that eval.num_generations selects",
    fixes=(Fix("Do not generate at evaluations", {"eval.generate_during_eval": False}),),
    fails_on=Example({"eval.generate_during_eval": True, "eval.num_generations": 0}),
    passes_on=Example({"eval.generate_during_eval": True, "eval.num_generations": 24}),
)
def no_prompts_for_generation(case: Case) -> Violation | None:
    """Each evaluation generates outputs for as many validation prompts as eval.num_generations says; with 0, there are
    none."""
    options = case.spec.eval
    if not options.generate_during_eval or options.num_generations or options.strategy == "no":
        return None
    if not registry.STAGES[case.spec.train.stage].generates:
        return None
    available = case.facts.num_eval_prompts(case.spec.data)
    count = 24 if available is None else min(24, available)
    cost = f"the time of {counted(count, 'output')} at each evaluation"
    some = Fix(f"Generate for {counted(count, 'prompt')}", {"eval.num_generations": count}, cost=cost)
    message = (
        "eval.generate_during_eval is on but eval.num_generations is 0, so nothing would be generated at evaluations."
    )
    return Violation(message, (some,) if count else ())


@error(
    "DAT018",
    fields=("data.files", "data.chat_template"),
    title="The chat template cannot render some examples",
    source="transformers 5.23 utils/chat_template_utils.py: the Jinja template of the tokenizer raises the error",
    manual_fix="Change these examples, or set data.chat_template.",
    fails_on=Example(
        USER_DATA,
        facts=replace(
            USER_DATA_FACTS,
            unrenderable_examples=(
                DataIssue(
                    "data.files",
                    "data.jsonl, line 3",
                    "the chat template cannot render it: Conversation roles must alternate user/assistant",
                    True,
                ),
            ),
        ),
    ),
    passes_on=Example(USER_DATA, facts=USER_DATA_FACTS),
)
def unrenderable_examples(case: Case) -> Violation | None:
    """The chat template turns each conversation into text. Many templates raise an error for roles or orders of turns
    that their model was not trained on, such as a system turn, or two consecutive user turns."""
    issues = rendered_issues(case)
    if not issues or case.spec.train.stage == "pretraining":  # see weights_in_pretraining
        return None
    fixes = without_system_prompt(case, [issue.message for issue in issues])
    if case.facts.num_unmarked:
        fixes.append(Fix("Train on all tokens", {"data.loss_on": "all_tokens"}, False, "prompts are trained on too"))
    if case.spec.data.chat_template != "chatml":
        fixes.append(OTHER_TEMPLATE)
    problems = unrenderable_summary(case, issues)
    return Violation(problems, (*fixes, SKIP), (*fields_of(issues), "data.chat_template"))


@advice(
    "DAT014",
    fields=("data.loss_on",),
    title="Plain text has no completions",
    source="the examples: plain text does not mark any part as a completion",
    fixes=(
        Fix("Train on all tokens", {"data.loss_on": "all_tokens"}),
        Fix("Use the pretraining stage", {"train.stage": "pretraining"}, False, "no chat format"),
    ),
    fails_on=Example({**USER_DATA, "data.format": "text"}, facts=PLAIN_TEXT),
    passes_on=Example({**USER_DATA, "data.format": "text", "data.loss_on": "all_tokens"}, facts=PLAIN_TEXT),
)
def completion_loss_on_plain_text(case: Case) -> str | None:
    """Plain text is not divided into prompts and completions, so the loss covers every token, whatever data.loss_on
    says."""
    if case.spec.train.stage != "sft" or case.spec.data.loss_on != "completions" or case.facts.format != "text":
        return None
    return "data.loss_on is completions and the data format is plain text. Every token would be trained on."


@advice(
    "DAT015",
    fields=("data.dataset_num_proc", "train.dataloader_num_workers"),
    title="More worker processes than CPU cores",
    source="arithmetic",
    fails_on=Example({"data.dataset_num_proc": 64}),
    passes_on=Example({"data.dataset_num_proc": 4}),
)
def more_workers_than_cores(case: Case) -> Violation | None:
    """Each process that tokenizes or loads examples needs a CPU core. With more than two processes per core they wait
    for each other and are slower."""
    cores, train, ranks = case.cores, case.spec.train, case.run.nproc_per_node
    tokenizing, loading = case.spec.data.dataset_num_proc, train.dataloader_num_workers * ranks
    patch: dict[str, int] = {}
    used = []
    if tokenizing > 2 * cores:
        patch["data.dataset_num_proc"] = cores
        used.append(f"{tokenizing} tokenization processes")
    if loading > 2 * cores:
        workers = max(1, cores // ranks)
        patch["train.dataloader_num_workers"] = workers if workers * ranks <= 2 * cores else 0
        each = f" ({train.dataloader_num_workers} for each of {ranks} ranks)" if ranks > 1 else ""
        used.append(f"{loading} dataloader workers{each}")
    if not patch:
        return None
    message = f"The run would start {' and '.join(used)} on {counted(cores, 'CPU core')}."
    settings = " and ".join(f"{label_of(name)} to {count}" for name, count in patch.items())
    return Violation(message, (Fix(f"Set {settings}", patch),), tuple(patch))


@error(
    "DAT016",
    fields=("data.builtin",),
    title="The files of the demo dataset are missing",
    source="the assets folder of this installation",
    manual_fix="Install Footplate again: its files are incomplete.",
    fails_on=Example(facts=replace(DEMO, data_issues=(DataIssue("data.builtin", "train.jsonl", "no such file"),))),
    passes_on=Example(),
)
def missing_builtin_dataset(case: Case) -> str | None:
    """The built-in datasets are part of the Footplate package."""
    issues = _issues(case, "data.builtin")
    return summary(issues) if issues and case.spec.data.source == "builtin" else None
