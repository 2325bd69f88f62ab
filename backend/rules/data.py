"""Rules of the rows: files, formats, lengths, counts.

Floor 3. Imports: below.
"""

from __future__ import annotations

from dataclasses import replace

from backend import registry
from backend.inspect import DataIssue
from backend.rules.base import Case, Example, Fix, Violation, counted, rule
from backend.rules.examples import DEMO, FILES, GPT2, H100, OWN, trouble

DEMO_DATA = Fix("The demo's rows", {"data.source": "builtin"}, safe=False, cost="not your data")
NO_VALIDATION = Fix("Without validation", {"eval.strategy": "no"})


@rule(
    "DAT001",
    "error",
    fields=("data.files",),
    title="No data file is named",
    source="arithmetic: nothing to read",
    fixes=(DEMO_DATA,),
    fails_on=Example({"data.source": "files"}, facts=replace(FILES, rows=None)),
    passes_on=Example(OWN, facts=FILES),
    proof="launch",
)
def no_files(case: Case) -> str | None:
    """Name at least one .json, .jsonl, .csv or .parquet file."""
    data = case.spec.data
    return "Name a file, one path a line." if data.source == "files" and not data.files else None


@rule(
    "DAT002",
    "error",
    fields=("data.files",),
    title="A data file cannot be used",
    source="the file itself",
    fails_on=Example(OWN, facts=trouble("data.files", "no such file")),
    passes_on=Example(OWN, facts=FILES),
    proof="launch",
)
def bad_files(case: Case) -> Violation | None:
    """Every file that is named must be there, readable, and hold rows of a known format."""
    found = [t for t in _troubles(case, "data.files") if not t.row]
    if not found:
        return None
    data = case.spec.data
    kept = tuple(name for name in data.files if not any(t.where == name for t in found))
    fixes = [_format(case)] if case.facts.columns and not case.facts.format else []
    if kept and len(kept) < len(data.files):
        fixes.append(Fix("Leave these files out", {"data.files": kept}, False))
    fields = ("data.files", "data.format") if fixes and "data.format" in fixes[0].patch else ("data.files",)
    return Violation(_said(found), (*fixes, DEMO_DATA), fields)


def _troubles(case: Case, field: str) -> list[DataIssue]:
    return [t for t in case.facts.issues if t.field == field]


def _said(found: list[DataIssue]) -> str:
    more = f" And {len(found) - 3} more." if len(found) > 3 else ""
    return " ".join(f"{t}." for t in found[:3]) + more


QUESTIONS = ("question", "query", "input", "prompt", "instruction", "source", "problem", "text")
ANSWERS = ("answer", "response", "output", "completion", "target", "solution", "summary", "label")


def _format(case: Case) -> Fix:
    """A guess at columns that no format has: a question with an answer, else the first one as text."""
    there = {name.lower(): name for name in case.facts.columns}
    asked = next((there[word] for word in QUESTIONS if word in there), "")
    answer = next((there[word] for word in ANSWERS if word in there and there[word] != asked), "")
    if asked and answer:
        patch = {"data.format": "prompt_completion", "data.prompt_column": asked, "data.completion_column": answer}
        return Fix(f"{asked} as prompt, {answer} as completion", patch, False)
    first = asked or case.facts.columns[0]
    return Fix(f"{first} as plain text", {"data.format": "text", "data.text_column": first}, False)


@rule(
    "DAT003",
    "error",
    fields=("data.files", "data.format"),
    title="Rows that cannot be learned",
    source="the file itself",
    manual_fix="Mend or delete these rows.",
    fails_on=Example(OWN, facts=trouble("data.files", "column messages holds a number", 3)),
    passes_on=Example(OWN, facts=FILES),
    proof="launch",
)
def bad_rows(case: Case) -> Violation | None:
    """A row that is not of its format stops the run while it prepares the data."""
    found = [t for t in _troubles(case, "data.files") if t.row]
    if not found:
        return None
    fixes = []
    if case.spec.data.format != "auto":
        fixes.append(Fix("Recognise the format", {"data.format": "auto"}, False))
    return Violation(_said(found), tuple(fixes))


@rule(
    "DAT004",
    "error",
    fields=("data.hub_id",),
    title="No dataset id is named",
    source="arithmetic: nothing to download",
    fixes=(DEMO_DATA,),
    fails_on=Example({"data.source": "hub"}, facts=replace(FILES, rows=None)),
    passes_on=Example({"data.source": "hub", "data.hub_id": "trl-lib/Capybara"}, facts=replace(FILES, rows=None)),
    proof="launch",
)
def no_dataset(case: Case) -> str | None:
    """A dataset of the hub is named as organisation/name."""
    data = case.spec.data
    return "Write organisation/name." if data.source == "hub" and not data.hub_id.strip() else None


FROM_FILES = {**OWN, "data.validation": "files"}
SPLIT = Fix("Keep a part of the data back", {"data.validation": "split"}, safe=False, cost="fewer rows to learn from")


@rule(
    "DAT005",
    "error",
    fields=("data.validation_files",),
    title="Validation files that cannot be used",
    source="the file itself",
    fixes=(
        Fix("No validation", {"data.validation": "none", "eval.strategy": "no"}, cost="nothing is measured"),
        SPLIT,
    ),
    fails_on=Example(FROM_FILES, facts=FILES),
    passes_on=Example({**FROM_FILES, "data.validation_files": ("v.jsonl",)}, facts=replace(FILES, held=20)),
    proof="launch",
)
def bad_validation(case: Case) -> str | None:
    """Validation rows must be there and of the same format as the others."""
    data = case.spec.data
    if data.source == "builtin" or data.validation != "files":
        return None
    found = _troubles(case, "data.validation_files")
    return _said(found) if found else None if data.validation_files else "No file is named."


@rule(
    "DAT006",
    "error",
    fields=("data.validation", "data.validation_split"),
    title="One row cannot be split",
    source="arithmetic: a part kept back leaves nothing to learn",
    fixes=(Fix("No validation", {"data.validation": "none", "eval.strategy": "no", "eval.num_generations": 0}),),
    fails_on=Example(OWN, facts=replace(FILES, rows=1)),
    passes_on=Example(OWN, facts=replace(FILES, rows=2)),
    proof="launch",
)
def one_row(case: Case) -> str | None:
    """Keeping validation rows back needs at least two rows."""
    data = case.spec.data
    splits = data.source == "files" and data.validation == "split"
    return "There is 1 row." if splits and case.facts.rows == 1 else None


UNVALIDATED = {**OWN, "data.validation": "none"}


@rule(
    "DAT007",
    "warning",
    fields=("eval.strategy", "data.validation", "save.load_best_model_at_end"),
    title="Nothing to evaluate on",
    source="transformers 5.23: evaluation needs rows that are not trained on",
    fixes=(
        Fix("No evaluation", {"eval.strategy": "no", "save.load_best_model_at_end": False}, cost="nothing is measured"),
        SPLIT,
    ),
    fails_on=Example(UNVALIDATED, facts=FILES),
    passes_on=Example({**UNVALIDATED, "eval.strategy": "no"}, facts=FILES),
)
def nothing_to_evaluate(case: Case) -> str | None:
    """Without validation rows there is no evaluation curve, and no best checkpoint to end with."""
    data = case.spec.data
    if case.spec.eval.strategy == "no" or data.source == "builtin" or data.validation != "none":
        return None
    return "Evaluation is on, and no rows are kept back for it."


@rule(
    "DAT008",
    "warning",
    fields=("eval.num_generations", "data.validation"),
    title="Fewer validation rows than answers asked for",
    source="arithmetic",
    fails_on=Example({"eval.num_generations": 100}),
    passes_on=Example({"eval.num_generations": 24}),
)
def too_many_samples(case: Case) -> Violation | None:
    """The answers before and after are given to validation rows."""
    wanted, held = case.spec.eval.num_generations, case.run.num_eval_examples
    if not registry.STAGES[case.spec.train.stage].answers or held is None or wanted <= held or not case.facts.exact:
        return None
    fix = Fix(counted(held, "answer") if held else "No answers", {"eval.num_generations": held})
    return Violation(f"{counted(wanted, 'answer')}, and {counted(held, 'validation row')}.", (fix,))


@rule(
    "DAT009",
    "warning",
    fields=("data.max_length",),
    title="Many rows are cut off",
    source="the rows: tokens are estimated from their characters",
    fails_on=Example({"data.max_length": 64}),
    passes_on=Example({"data.max_length": 512}),
)
def cut_off(case: Case) -> Violation | None:
    """What lies behind the cut is not learned, and an answer is mostly what lies behind. Rows whose answer is cut
    away whole are dropped."""
    lengths, cut = case.facts.lengths, case.spec.data.max_length
    over = sum(length > cut for length in lengths)
    if not lengths or over < 0.1 * len(lengths) or case.spec.train.stage == "pretraining":
        return None
    target = _room(case)
    fixes = (Fix(counted(target, "token"), {"data.max_length": target}, False),) if target > cut else ()
    share = f"About {over / len(lengths):.0%} of the rows are longer than {cut:,} tokens"
    return Violation(f"{share}; the longest seen has about {case.facts.longest:,}.", fixes)


@rule(
    "DAT017",
    "error",
    fields=("data.max_length",),
    title="Every answer is cut away",
    source="the rows: tokens are estimated from their characters; rows with nothing left to learn are dropped",
    fails_on=Example({"data.max_length": 16}, facts=replace(DEMO, min_prompt_tokens=40)),
    passes_on=Example({"data.max_length": 64}, facts=replace(DEMO, min_prompt_tokens=40)),
    proof="launch",
)
def no_answer_left(case: Case) -> Violation | None:
    """A row is learned from its first answer on. Where the cut comes before that in every row, none is left. Pairs for
    a reward model are not cut: those that are longer are dropped."""
    facts, stage, cut = case.facts, case.spec.train.stage, case.spec.data.max_length
    learned = stage in registry.COMPARING or (stage == "sft" and case.spec.data.loss_on == "completions")
    least = min(facts.lengths, default=0) if stage == "reward" else facts.min_prompt_tokens * learned
    if not facts.exact or cut >= 0.8 * least:  # as far as estimates are trusted
        return None
    said = "The shortest row has" if stage == "reward" else "The shortest question takes"
    fix = Fix("Room for every row", {"data.max_length": _room(case)}, False)
    return Violation(f"{said} about {least:,} tokens; the cut is at {cut:,}.", (fix,))


def _room(case: Case) -> int:
    """Tokens that the longest row seen fits in, with a quarter to spare, or as many as the model counts."""
    enough = 64 * -(-case.facts.longest * 5 // (4 * 64))
    most = case.shape.max_positions if case.shape else 0
    return min(enough, most) if most else enough


@rule(
    "DAT010",
    "error",
    fields=("data.max_length",),
    title="Longer than the model can count",
    source="transformers 5.23 modeling_gpt2.py: positions are rows of a table, and there are no more",
    fails_on=Example({"data.max_length": 2048}, facts=replace(DEMO, shape=GPT2)),
    passes_on=Example({"data.max_length": 1024}, facts=replace(DEMO, shape=GPT2)),
)
def beyond_table(case: Case) -> Violation | None:
    """This model looks positions up in a table; a token beyond its end stops the run."""
    shape, cut = case.shape, case.spec.data.max_length
    if shape is None or shape.model_type != "gpt2" or not shape.max_positions or cut <= shape.max_positions:
        return None
    fix = Fix(counted(shape.max_positions, "token"), {"data.max_length": shape.max_positions}, False)
    return Violation(f"{cut:,} tokens; the table ends at {shape.max_positions:,}.", (fix,))


@rule(
    "DAT011",
    "warning",
    fields=("data.max_length",),
    title="Longer than the model was trained for",
    source="config.json: max_position_embeddings",
    fails_on=Example({"data.max_length": 16_384}),
    passes_on=Example({"data.max_length": 8192}),
)
def beyond_training(case: Case) -> Violation | None:
    """Beyond the length it was trained for a model's attention loses its way; it runs, and learns badly."""
    shape, cut = case.shape, case.spec.data.max_length
    if shape is None or shape.model_type == "gpt2" or not shape.max_positions or cut <= shape.max_positions:
        return None
    fix = Fix(counted(shape.max_positions, "token"), {"data.max_length": shape.max_positions}, False)
    return Violation(f"{cut:,} tokens; the model was trained for {shape.max_positions:,}.", (fix,))


@rule(
    "DAT012",
    "warning",
    fields=("data.packing", "train.train_sampling_strategy"),
    title="Grouping rows that are all full",
    source="arithmetic: packed rows have one length",
    fixes=(Fix("Without grouping", {"train.train_sampling_strategy": "random"}),),
    fails_on=Example({"data.packing": True, "train.train_sampling_strategy": "group_by_length"}, H100),
    passes_on=Example({"data.packing": True}, H100),
)
def grouped_packs(case: Case) -> str | None:
    """Packing fills every row to the cut-off length, so there is nothing left to group; the order only gets worse."""
    both = case.spec.data.packing and case.spec.train.train_sampling_strategy == "group_by_length"
    return "Packed rows are of one length already." if both else None


@rule(
    "DAT013",
    "warning",
    fields=("data.packing", "train.per_device_train_batch_size", "data.max_length"),
    title="Packing makes one very long row of a batch",
    source="transformers 5.23 masking_utils.py: without flash attention a mask of tokens x tokens is built",
    fails_on=Example({"data.packing": True, "train.per_device_train_batch_size": 8, "data.max_length": 2048}, H100),
    passes_on=Example({"data.packing": True, "train.per_device_train_batch_size": 1, "data.max_length": 2048}, H100),
)
def long_packs(case: Case) -> Violation | None:
    """The packed rows of a batch lie one behind the other, and attention computes every pair of their tokens,
    masked or not. Twice the batch takes four times the time and memory; accumulation does not."""
    train, data = case.spec.train, case.spec.data
    if (
        not data.packing
        or train.per_device_train_batch_size == 1
        or train.per_device_train_batch_size * data.max_length <= 8192
    ):
        return None
    patch = {
        "train.per_device_train_batch_size": 1,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps * train.per_device_train_batch_size,
    }
    tokens = train.per_device_train_batch_size * data.max_length
    return Violation(f"Attention over {tokens:,} tokens at once.", (Fix("Accumulate instead", patch),))


@rule(
    "DAT014",
    "advice",
    fields=("data.loss_on",),
    title="Plain text has no answers",
    source="the rows: no turn is marked as an answer",
    fixes=(
        Fix("Every token", {"data.loss_on": "all_tokens"}),
        Fix("Pre-training", {"train.stage": "pretraining"}, False, "no chat"),
    ),
    fails_on=Example({**OWN, "data.format": "text"}, facts=replace(FILES, format="text", columns=("text",))),
    passes_on=Example(
        {**OWN, "data.format": "text", "data.loss_on": "all_tokens"},
        facts=replace(FILES, format="text", columns=("text",)),
    ),
)
def text_without_answers(case: Case) -> str | None:
    """Every token of plain text is learned, whatever is chosen here."""
    sft = case.spec.train.stage == "sft" and case.spec.data.loss_on == "completions"
    return "The rows are plain text: every token is learned." if sft and case.facts.format == "text" else None


@rule(
    "DAT015",
    "advice",
    fields=("data.dataset_num_proc", "train.dataloader_num_workers"),
    title="More helpers than cores",
    source="arithmetic",
    fails_on=Example({"data.dataset_num_proc": 64}),
    passes_on=Example({"data.dataset_num_proc": 4}),
)
def many_workers(case: Case) -> Violation | None:
    """Processes that prepare or load rows want cores of their own; beyond that they take turns."""
    cores, prepare = case.machine.cores, case.spec.data.dataset_num_proc
    load = case.spec.train.dataloader_num_workers * case.run.nproc_per_node
    patch: dict[str, int] = {}
    if prepare > 2 * cores:
        patch["data.dataset_num_proc"] = cores
    if load > 2 * cores:
        patch["train.dataloader_num_workers"] = max(1, cores // case.run.nproc_per_node)
        if patch["train.dataloader_num_workers"] * case.run.nproc_per_node > 2 * cores:
            patch["train.dataloader_num_workers"] = 0
    if not patch:
        return None
    return Violation(
        f"{counted(max(prepare, load), 'process')} beside the training, on {counted(cores, 'core')}.",
        (Fix("Fewer", patch),),
        tuple(patch),
    )


@rule(
    "DAT016",
    "error",
    fields=("data.builtin",),
    title="The demo's rows are missing",
    source="the assets folder of this installation",
    manual_fix="Install Footplate again: its own files are not complete.",
    fails_on=Example(facts=replace(DEMO, issues=(DataIssue("data.builtin", "train.jsonl", "no such file"),))),
    passes_on=Example(),
)
def no_demo(case: Case) -> str | None:
    """The demo's rows come with Footplate."""
    found = _troubles(case, "data.builtin")
    return _said(found) if found and case.spec.data.source == "builtin" else None
