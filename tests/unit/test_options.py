"""Options: complete declarations, hidden options without effect, messages for invalid values and unknown keys."""

import ast
import importlib.util
import random
import re
from pathlib import Path

import pytest

from backend import registry
from backend.config import RunSpec
from backend.config import options as o
from backend.config.aliases import ALIASES, GUESSES, VALUE_ALIASES
from backend.presets import dump, load
from backend.rules import Fix
from webui.api.checking import form_values
from webui.api.fixes import fix_json

OPTIONS = o.options()
NAMES = [option.name for option in OPTIONS]


def other(option):
    """A valid value of `option` that is not its default."""
    match option.kind:
        case "bool":
            return not option.default
        case "choice":
            return next(value for value, _ in option.choices if value != option.default)
        case "int" | "float":
            low = option.minimum if option.minimum is not None else 0
            high = option.maximum if option.maximum is not None else low + 100
            number = (low + high) / 2 if option.kind == "float" else int(low + high) // 2
            return number if number != option.default else number + 1
        case "list":
            other = {"launch.devices": (1,), "slurm.extra": ("--exclusive", "-v"), "ray.resources": ("a=1",)}
            other |= {
                "slurm.container_mounts": ("/a", "/b:/c"),
                "kubernetes.volumes": ("a=/b",),
                "kubernetes.node_labels": ("a=b",),
            }
            return {**other, "kubernetes.resources": ("a=1",)}.get(option.name, ("a", "b"))
        case "table":
            return {"A": "1"}
        case "datasets":
            return SEVERAL
        case _ if "extra_" in option.name or option.name.endswith("_kwargs"):  # JSON
            return '{"a": 1}'
        case _:
            other = {"slurm.time_limit": "12:00:00", "kubernetes.gpu_resource": "amd.com/gpu"}
            return other.get(option.name, "something")


def single(option):
    return len(option.choices) == 1


def test_every_option_is_complete():
    assert len(OPTIONS) >= 80
    assert len(set(NAMES)) == len(NAMES)
    for option in OPTIONS:
        assert option.label and option.help.endswith("."), option.name


SEVERAL = '[{}, {"source": "files", "files": ["b.jsonl"]}]'


def values_of(option):
    """The words of a condition on an option."""
    words = {"datasets": ["", "several"], "str": ["", "runs/a/model"]}.get(option.kind, ["true", "false"])
    return [value for value, _ in option.choices] or words


def implies(condition, other):
    """Whether `other` is true whenever `condition` is."""
    return all(name in condition and set(condition[name]) <= set(allowed) for name, allowed in other.items())


def test_conditions_name_options_and_include_their_conditions():
    """A condition names options and values that exist, and those options are visible whenever the option is."""
    for shown, condition in ((each, condition) for each in OPTIONS for condition in each.when):
        for name, allowed in condition.items():
            decider = o.by_name()[name]
            assert set(allowed) <= set(values_of(decider)), shown.name
            assert any(implies(condition, other) for other in decider.when), (
                f"{shown.name} can be shown while {name}, which decides it, is hidden"
            )


def plain(value):
    return {"true": True, "false": False, "several": SEVERAL}.get(value, value)


@pytest.mark.parametrize("option", [x for x in OPTIONS if not single(x)], ids=lambda x: x.name)
def test_only_visible_options_have_an_effect(option):
    for condition in option.when:
        base = RunSpec()
        for name, allowed in condition.items():
            base = o.edit(base, {name: plain(allowed[0])})
        changed = o.edit(base, {option.name: other(option)})
        assert dump(changed) != dump(base)
        for name in condition:
            decider = o.by_name()[name]
            for value in values_of(decider):
                hide = {name: plain(value)}
                if not o.shown(o.edit(changed, hide), option):
                    assert dump(o.edit(changed, hide)) == dump(o.edit(base, hide))


@pytest.mark.parametrize("count", [40, pytest.param(150, marks=pytest.mark.soak)])
def test_yaml_round_trip_of_random_specs(count):
    """A written spec is read back unchanged, except for hidden values."""
    dice = random.Random(7)
    for _ in range(count):
        patch = {x.name: other(x) for x in OPTIONS if not single(x) and dice.random() < 0.3}
        spec = o.edit(RunSpec(), patch)
        assert load(dump(spec)) == o.effective(spec)
        assert o.effective(o.effective(spec)) == o.effective(spec)


def test_generation_without_evaluation_has_the_batch_size_that_is_set():
    values = {"eval.strategy": "no", "eval.per_device_eval_batch_size": 2, "eval.num_generations": 4}
    kept = {stage: o.effective(o.edit(RunSpec(), {**values, "train.stage": stage})) for stage in ("sft", "pretraining")}
    assert kept["sft"].eval.per_device_eval_batch_size == 2
    assert kept["pretraining"].eval.per_device_eval_batch_size == 8, "it neither evaluates nor generates"


def test_form_text_is_read_back():
    spec = o.edit(RunSpec(), {"data.files": ("a b.jsonl", "c.csv"), "launch.env": {"A": "x=y", "B": ""}})
    shown = {option.name: o.text(option, o.get(spec, option.name)) for option in OPTIONS}
    assert o.parse(shown) == spec


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("train.num_train_epochs", None, "default is 3.0"),
        ("train.num_train_epochs", "", "default is 3.0"),
        ("train.per_device_train_batch_size", 1.5, "must be an integer, but is 1.5"),
        ("train.per_device_train_batch_size", 0, "must be at least 1, but is 0"),
        ("train.learning_rate", -1e-4, "must be greater than 0, but is -0.0001"),
        ("train.learning_rate", "fast", "number"),
        ("train.learning_rate", float("nan"), "finite"),
        ("lora.r", 10**9, "at most"),
        ("train.optim", "adam", "did you mean adamw_torch?"),
        ("train.optim", "adamw_8bit", "did you mean adamw_bnb_8bit?"),
        ("train.optim", "paged_adamw", "did you mean paged_adamw_32bit?"),
        ("precision.compute", "bfloat16", "did you mean bf16?"),
        ("train.lr_scheduler_type", "cosin", "did you mean cosine?"),
        ("parallel.strategy", "zero_3", "did you mean zero3?"),
        ("eval.strategy", True, "must be one of no, steps, epoch, but is True"),
        ("slurm.time_limit", 43200, "must be text, but YAML reads it as the number 43200; put it in quotes"),
        ("logging.run_name", True, "must be text, but YAML reads it as true; put it in quotes"),
        ("launch.env", {"NCCL_DEBUG": 1}, "an entry must be text, but YAML reads it as the number 1; put it in quotes"),
        ("data.files", ["a.jsonl", 1], "an entry must be text, but YAML reads it as the number 1; put it in quotes"),
        ("model.source", "ftp", "must be one of builtin, path, hub, but is 'ftp'"),
        ("launch.env", "A B", "NAME=value"),
        ("launch.devices", "0, x", "must be an integer, but is 'x'"),
        ("data.packing", "maybe", "must be true or false, but is 'maybe'"),
        ("nothing.here", 1, "unknown option"),
    ],
)
def test_invalid_values_are_explained(name, value, says):
    with pytest.raises(o.SpecError) as caught:
        o.edit(RunSpec(), {name: value})
    assert [p.field for p in caught.value.problems] == [name]
    assert says in caught.value.problems[0].message


def test_no_needs_no_quotes():
    spec = load("eval: {strategy: no}\nsave: {strategy: no}\n")
    assert spec.eval.strategy == spec.save.strategy == "no"
    with pytest.raises(o.SpecError, match="the date 2026-11-30; put it in quotes"):
        load("logging: {run_name: 2026-11-30}")


def test_all_invalid_values_are_reported_at_once():
    with pytest.raises(o.SpecError) as caught:
        o.edit(RunSpec(), {"train.num_train_epochs": None, "train.per_device_train_batch_size": 0, "train.optim": "x"})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("train.batch_size", "train.per_device_train_batch_size"),
        ("per_device_train_batch_size", "train.per_device_train_batch_size"),
        ("r", "lora.r"),
        ("lora.rank", "lora.r"),
        ("lora_alpha", "lora.alpha"),
        ("lora.lora_dropout", "lora.dropout"),
        ("gradient_checkpointing", "train.activation_checkpointing"),
        ("train.learning_rte", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("warmup_ratio", "train.warmup_steps"),
        ("bf16", "precision.compute"),
        ("num_processes", "launch.nproc_per_node"),
        ("nproc-per-node", "launch.nproc_per_node"),
        ("--nnodes", "launch.nnodes"),
        ("eval_steps", "eval.steps"),
        ("fsdp_sharding_strategy", "parallel.sharding_strategy"),
        ("zero_optimization.stage", "parallel.strategy"),
        ("load_in_4bit", "method.quantization"),
        ("cutoff_len", "data.max_length"),
        ("method.lora_rank", "lora.r"),
        ("evaluation.when", "eval.strategy"),
        ("checkpoint.keep", "save.total_limit"),
        ("data.learn", "data.loss_on"),
        ("parallel.engine_keys", "parallel.extra_config"),
        ("train.num_train_epoch", "train.num_train_epochs"),
    ],
)
def test_unknown_keys_name_the_option_that_was_meant(key: str, option: str) -> None:
    with pytest.raises(o.SpecError, match=re.escape(f"{key}: unknown option; did you mean {option}?")):
        o.edit(RunSpec(), {key: 1})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("training", "unknown section; did you mean train?"),
        ("evaluation", "unknown section; did you mean eval?"),
        ("checkpoint", "unknown section; did you mean save?"),
        ("zzz", "unknown section; sections are model, data"),
        ("lora", "is a section; set one of its options, such as lora.r"),
    ],
)
def test_unknown_sections_name_the_section_that_was_meant(key: str, message: str) -> None:
    with pytest.raises(o.SpecError, match=re.escape(f"{key}: {message}")):
        o.edit(RunSpec(), {key: 1})


def test_aliases_and_guesses_name_existing_options_and_values() -> None:
    known = o.by_name()
    assert {*ALIASES.values(), *GUESSES.values(), *VALUE_ALIASES} <= known.keys()
    for name, values in VALUE_ALIASES.items():
        choices = {value for value, _ in known[name].choices}
        assert set(values.values()) <= choices and not choices & values.keys(), name


# Fields of transformers 5.23 TrainingArguments that no option sets: Footplate sets them itself, or has no use for them.
WITHOUT_OPTION = {
    "accelerator_config",
    "average_tokens_across_devices",
    "batch_eval_metrics",
    "dataloader_drop_last",
    "dataloader_in_order",
    "dataloader_multiprocessing_context",
    "dataloader_persistent_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "ddp_backend",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "debug",
    "disable_tqdm",
    "do_predict",
    "do_train",
    "enable_jit_checkpoint",
    "eval_accumulation_steps",
    "eval_delay",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "hub_always_push",
    "hub_model_id",
    "hub_private_repo",
    "hub_revision",
    "hub_strategy",
    "ignore_data_skip",
    "include_for_metrics",
    "include_num_input_tokens_seen",
    "label_names",
    "length_column_name",
    "local_rank",
    "log_level_replica",
    "log_on_each_node",
    "logging_first_step",
    "logging_nan_inf_filter",
    "output_dir",
    "prediction_loss_only",
    "project",
    "push_to_hub",
    "remove_unused_columns",
    "restore_callback_states_from_checkpoint",
    "save_on_each_node",
    "skip_memory_metrics",
    "torch_empty_cache_steps",
    "trackio_bucket_id",
    "trackio_space_id",
    "trackio_static_space_id",
    "use_cache",
}


def test_every_training_argument_has_an_option_or_an_alias() -> None:
    """Read from the source, since importing TrainingArguments imports torch."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    source = ast.parse((Path(package.origin).parent / "training_args.py").read_text(encoding="utf-8"))
    arguments = next(n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "TrainingArguments")
    fields = {n.target.id for n in arguments.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    keys = {option.name.partition(".")[2] for option in OPTIONS}
    assert len(fields) > 100
    assert fields - keys - ALIASES.keys() == WITHOUT_OPTION & fields == WITHOUT_OPTION


def test_optimizers_carry_the_names_of_transformers() -> None:
    """Except for those that the Trainer does not have, or that it names with arguments."""
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "training_args.py").read_text(encoding="utf-8")
    names = set(
        re.findall(r'^    [A-Z0-9_]+ = "(\w+)"', source.partition("class OptimizerNames")[2][:3000], re.MULTILINE)
    )
    assert registry.OPTIMIZERS.keys() - names == {"adam_mini", "muon", "badam", "sgd_momentum"}


def test_a_fix_resets_the_options_that_it_makes_visible() -> None:
    """The form keeps the values of hidden options: a fix must not bring back a parallel size of another strategy."""
    tensor = o.edit(RunSpec(), {"parallel.strategy": "tensor", "parallel.context_parallel_size": 2, "lora.r": 32})
    fsdp2 = {"parallel.strategy": "fsdp2"}
    assert o.with_defaults(tensor, fsdp2) == {**fsdp2, "parallel.context_parallel_size": 1}
    assert (
        o.with_defaults(tensor, {**fsdp2, "parallel.context_parallel_size": 4})["parallel.context_parallel_size"] == 4
    )
    assert o.with_defaults(o.edit(tensor, fsdp2), {"train.seed": 1}) == {"train.seed": 1}, "it is visible already"
    assert o.with_defaults(RunSpec(), fsdp2) == fsdp2
    fix = fix_json(Fix("Use FSDP2", fsdp2).for_spec(tensor), tensor)
    assert fix["patch"] == {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 1}
    assert [change["label"] for change in fix["diff"]] == ["Distributed strategy", "Context parallel size"]
    whole = Fix("Use FSDP2", {**fsdp2, "launch.nnodes": 2, "lora.r": 32})
    assert whole.for_spec(tensor).patch == fix["patch"], "it names only what it changes"


def test_a_fix_of_a_dataset_sets_the_list_in_the_form() -> None:
    spec = o.edit(RunSpec(), {"data.sources": [{}, {"source": "files", "files": ["a.jsonl"], "format": "text"}]})
    fix = fix_json(Fix("Detect the format", {"data.sources[1].format": "auto"}), spec)
    assert [(change["label"], change["to"]) for change in fix["diff"]] == [("Data format of dataset 2", "Automatic")]
    form = {**form_values(spec), **fix["patch"]}
    assert o.parse(form) == o.edit(spec, {"data.sources[1].format": "auto"})
