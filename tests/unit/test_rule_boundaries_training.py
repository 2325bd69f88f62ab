"""Thresholds of the rules about adapters, method, data, stages, training and saving: the last value that passes and the
first that fails, and what the fixes of the failing case set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from boundaries import NO_FIX, Boundary, Patch, Setup, boundary, facts_boundary, machine_boundary
from specs import rule_finding

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.data import detection_problem
from backend.inspect import DataIssue, InputFacts
from backend.modelspec import from_config
from backend.rules import Case, check
from backend.rules.adapter import UNKNOWN_MOE
from backend.rules.examples import (
    DEMO,
    GPT2,
    H100,
    LAPTOP,
    LLAMA_8B,
    SMOL,
    TWO_H100,
    USER_DATA,
    USER_DATA_FACTS,
)
from backend.rules.stages import DPO, KTO, LABELS_FACTS, TENSOR_PARALLEL, USER_KTO
from backend.rules.streaming import IN_STEPS, STREAMED
from backend.rules.unsloth import UNSLOTH, WITH_UNSLOTH

RATE = "train.learning_rate"


def highest(code: str, base: Patch, limit: float, usual: float, words: str, **where: Any) -> Boundary:
    """The highest learning rate that passes."""
    return boundary(code, base, {RATE: limit}, {RATE: limit * 1.001}, {RATE: usual}, words=words, **where)


def lowest(code: str, base: Patch, limit: float, usual: float, words: str, **where: Any) -> Boundary:
    """The lowest learning rate that passes."""
    return boundary(code, base, {RATE: limit}, {RATE: limit * 0.999}, {RATE: usual}, words=words, **where)


# The smallest adapted layers of SmolLM2 are k_proj and v_proj: 3 KV heads of 64 elements, so 192 output features.
R, ALPHA, RATIO, INIT = "lora.r", "lora.alpha", "lora.loraplus_lr_ratio", "lora.init"
DEFAULT_INIT = {INIT: "default"}
RSLORA = {"lora.use_rslora": True}
ADAPTER = (
    boundary("ADP001", {INIT: "orthogonal"}, {R: 4}, {R: 9}, {R: 10}, DEFAULT_INIT),
    boundary("ADP001", {INIT: "orthogonal"}, {R: 6}, {R: 7}, {R: 8}, DEFAULT_INIT),
    boundary("ADP002", {INIT: "pissa"}, {R: 192}, {R: 193}, {R: 192}, DEFAULT_INIT),
    boundary("ADP004", {}, {RATIO: 100.0}, {RATIO: 100.1}, {RATIO: 16.0}, words="of 2e-4 and"),
    boundary("ADP004", {RATE: 0.05}, {RATIO: 1.0}, {RATIO: 1.01}, {RATE: 0.005}),
    boundary("ADP004", {RATE: 1.25e-3}, {RATIO: 16.0}, {RATIO: 17.0}, {RATIO: 16.0}),
    boundary("ADP004", {RATIO: 16.0}, {RATE: 1.25e-3}, {RATE: 1.26e-3},
             {RATE: 3e-4}),
    boundary("ADP004", {RATE: 2e-3}, {RATIO: 10.0}, {RATIO: 33.0}, {RATE: 2e-4}),  # 1.515e-4
    boundary("ADP004", {RATE: 2e-3}, {RATIO: 10.0}, {RATIO: 33.6}, {RATE: 1e-4}),  # 1.488e-4
    boundary("ADP004", {RATE: 0.05, RATIO: 16.0}, {"train.optim": "sgd"}, {"train.optim": "rmsprop"}),
    boundary("ADP005", {**RSLORA, R: 4}, {ALPHA: 20.0}, {ALPHA: 20.1}, {ALPHA: 4.0}),
    boundary("ADP005", {**RSLORA, R: 1}, {ALPHA: 10.0}, {ALPHA: 10.1}, {ALPHA: 2.0}),
    boundary("ADP005", {R: 4, ALPHA: 20.1}, {}, RSLORA),
    boundary("ADP006", {"lora.use_dora": True}, {"lora.dropout": 0.0}, {"lora.dropout": 0.01}, {"lora.dropout": 0.0}),
)  # fmt: skip

LAYERS, EXTRA = "method.freeze_trainable_layers", "method.freeze_extra_modules"
LAST_TWO = {LAYERS: 2}
FREEZE = {"method.kind": "freeze"}
FULL = {"method.kind": "full"}
LARGE = replace(DEMO, shape=LLAMA_8B)
SAVE, TARGETS = "lora.modules_to_save", "lora.target_modules"
CUSTOM = {"lora.targets": "custom"}
ALL_LINEAR = {"lora.targets": "all-linear"}
SHAPELESS = replace(UNKNOWN_MOE, module_attributes=frozenset({"layers", "norm", "q_proj"}))


def empty_norm() -> InputFacts:
    """The demo model, whose last norm has no parameters."""
    first, norm, last = SMOL.non_layer_modules
    return replace(DEMO, shape=replace(SMOL, non_layer_modules=(first, replace(norm, parameters=0), last)))


def one_kv_head(head_dim: int) -> InputFacts:
    """A model whose k_proj has this many output features."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": head_dim}
    return replace(DEMO, shape=from_config({"model_type": "llama", **sizes, **heads}))


METHOD = (
    boundary(
        "MTH002",
        CUSTOM,
        {TARGETS: ("q_proj", "gate_proj")},
        {TARGETS: ("q_proj", "v_proj")},
        {TARGETS: ("q_proj",)},
        ALL_LINEAR,
        facts=SHAPELESS,
    ),
    boundary("MTH004", {}, {SAVE: ("layers.0.norm",)}, {SAVE: ("layers.0.norms",)}, {SAVE: ()}, facts=SHAPELESS),
    facts_boundary("MTH004", {SAVE: ("x",)}, replace(SHAPELESS, module_attributes=frozenset()), SHAPELESS, {SAVE: ()}),
    facts_boundary("MTH003", {**CUSTOM, TARGETS: ("lm_head",)}, SHAPELESS, DEMO),
    facts_boundary("MTH007", {**FREEZE, LAYERS: 0, EXTRA: ("norm",)}, DEMO, empty_norm(), LAST_TWO),
    boundary("MTH007", {**FREEZE, LAYERS: 0}, {EXTRA: ("lm_head",)}, {EXTRA: ()}, LAST_TWO),  # tied to the embeddings
    boundary("MTH006", FREEZE, {LAYERS: 30}, {LAYERS: 31}, {LAYERS: 30}),
    boundary("MTH006", FREEZE, {LAYERS: -30}, {LAYERS: -31}, {LAYERS: -30}),
    boundary("MTH007", FREEZE, {LAYERS: 1}, {LAYERS: 0}, LAST_TWO),
    boundary("MTH007", FREEZE, {LAYERS: -1}, {LAYERS: 0}, LAST_TWO),
    boundary(
        "MTH014",
        {**FREEZE, "data.add_tokens": ("<a>", "<b>")},
        {EXTRA: ("lm_head",)},
        {EXTRA: ("norm",)},
        {EXTRA: ("norm", "embed_tokens")},
        words="<a> and <b> are added",
    ),  # the two have the same weights
    boundary("MTH009", {}, {R: 192}, {R: 193}, {R: 16, ALPHA: 32.0}),
    boundary("MTH009", {R: 193, **CUSTOM}, {TARGETS: ("nothing",)}, {TARGETS: ("k_proj",)}),
    boundary("MTH009", {R: 193, **CUSTOM}, {TARGETS: ("q_proj",)}, {TARGETS: ("q_proj", "v_proj")}),
    highest("MTH010", {}, 5e-3, 2e-4, "is high for LoRA"),
    lowest("MTH010", {}, 2e-5, 2e-4, "is low for LoRA"),
    highest("MTH010", FREEZE, 1e-3, 5e-5, "is high for"),
    lowest("MTH010", FREEZE, 1e-7, 5e-5, "is low for"),
    highest("MTH010", FULL, 5e-4, 2e-5, "is high for full"),
    highest("MTH010", FULL, 1e-4, 2e-5, "is high for full fine-tuning of a model of this size", facts=LARGE),
    lowest("MTH010", FULL, 1e-7, 2e-5, "is low for full"),
    highest("MTH010", {**FULL, "train.stage": "pretraining"}, 1e-2, 2e-5, "is high for pretraining"),
    facts_boundary(
        "MTH009", {R: 17, **CUSTOM, TARGETS: ("k_proj",)}, one_kv_head(15), one_kv_head(16), {R: 16, ALPHA: 32.0}
    ),
    boundary("MTH001", CUSTOM, {TARGETS: ("q_proj",)}, {TARGETS: ()}),
    boundary("MTH002", CUSTOM, {TARGETS: ("q_proj",)}, {TARGETS: ("q_proj", "x")}, {TARGETS: ("q_proj",)}, ALL_LINEAR),
    boundary("MTH002", CUSTOM, {TARGETS: ("lm_head",)}, {TARGETS: ("x",)}, ALL_LINEAR),
    boundary("MTH003", CUSTOM, {TARGETS: ("q_proj",)}, {TARGETS: ("q_proj", "lm_head")}, {TARGETS: ("q_proj",)}),
    boundary("MTH003", CUSTOM, {TARGETS: ("q_proj",)}, {TARGETS: ("lm_head",)}, ALL_LINEAR),
    boundary("MTH004", {}, {SAVE: ("norm",)}, {SAVE: ("norm", "")}, {SAVE: ("norm",)}),
    boundary("MTH005", {}, {SAVE: ("norm",)}, {SAVE: ("norm", "lm_head")}, {SAVE: ("norm",)}),
    boundary("MTH008", FREEZE, {EXTRA: ("norm",)}, {EXTRA: ("norm", "x")}, {EXTRA: ("norm",)}),
    boundary("MTH008", {**FREEZE, LAYERS: 0}, {EXTRA: ("norm",)}, {EXTRA: ("x",)}, {EXTRA: (), LAYERS: 2}),
)


def lengths(*tokens: int, **more: Any) -> InputFacts:
    """The demo's facts with examples of these lengths."""
    return replace(DEMO, token_lengths=tokens, **more)


def issues(count: int) -> InputFacts:
    """Facts with this many malformed examples."""
    return replace(
        USER_DATA_FACTS, data_issues=tuple(DataIssue("data.files", f"line {n}", "is bad", True) for n in range(count))
    )


DETECTED_ISSUE = replace(issues(1), detected_format="prompt_completion")
LENGTH, PROCESSES, WORKERS = "data.max_length", "data.dataset_num_proc", "train.dataloader_num_workers"
BATCH, ACCUMULATION = "train.per_device_train_batch_size", "train.gradient_accumulation_steps"
PACKING = {"data.packing": True}
SHORT_CONTEXT = replace(DEMO, shape=replace(SMOL, max_positions=100))
UNLIMITED = replace(DEMO, shape=replace(SMOL, max_positions=0))
NO_LOSS_ON_PROMPT = replace(DEMO, min_prompt_tokens=40)
FOUR_RANKS = {"parallel.strategy": "ddp", "launch.nproc_per_node": 4}
TWO_FILES = {**USER_DATA, "data.files": ("a.jsonl", "b.jsonl")}


def unreadable(*names: str) -> InputFacts:
    """Facts with files that cannot be read."""
    found = tuple(DataIssue("data.files", name, "no such file") for name in names)
    return replace(USER_DATA_FACTS, data_issues=found)


def columns(*names: str) -> Setup:
    """A file whose columns are those of no format."""
    texts = tuple((name, "text") for name in names)
    return Setup(USER_DATA, facts=replace(unreadable("data.jsonl"), columns=names, column_kinds=texts, format=""))


def text_column(name: str) -> Patch:
    """The fix that takes a column for plain text."""
    return {"data.format": "text", "data.text_column": name}


def prompt_columns(prompt: str, completion: str) -> Patch:
    """The fix that takes a column for the prompt and another for the completion."""
    return {"data.format": "prompt_completion", "data.prompt_column": prompt, "data.completion_column": completion}


GOOD_FILE = Setup(USER_DATA, facts=USER_DATA_FACTS)
SKIP = {"data.on_bad_example": "skip"}
FILES = (
    facts_boundary("DAT002", TWO_FILES, unreadable(), unreadable("a.jsonl"), {"data.files": ("b.jsonl",)}),
    facts_boundary("DAT002", TWO_FILES, unreadable(), unreadable("b.jsonl"), {"data.files": ("a.jsonl",)}),
    facts_boundary("DAT002", TWO_FILES, unreadable(), unreadable("a.jsonl", "b.jsonl"), NO_FIX),
    facts_boundary("DAT002", TWO_FILES, unreadable(), unreadable("*.jsonl"), NO_FIX),
    Boundary("DAT002", GOOD_FILE, columns("id", "Question", "Answer"), (prompt_columns("Question", "Answer"),)),
    Boundary("DAT002", GOOD_FILE, columns("id", "question"), (text_column("question"),)),
    Boundary("DAT002", GOOD_FILE, columns("id", "answer"), (text_column("answer"),)),
    Boundary("DAT002", GOOD_FILE, replace(columns("prompt", "completion"), patch=USER_KTO), ()),
    facts_boundary(
        "DAT003", {**USER_DATA, "data.format": "messages"}, issues(0), DETECTED_ISSUE, {"data.format": "auto"}, SKIP
    ),
    facts_boundary("DAT003", {**USER_DATA, "data.format": "messages"}, issues(0), issues(1), SKIP),
    facts_boundary("DAT003", USER_DATA, issues(0), issues(1), SKIP),
)
UNBATCHED = {BATCH: 1, ACCUMULATION: 6}
SPLIT = {**USER_DATA, LENGTH: 64, "data.validation": "split", "data.validation_split": 0.3}
USER_PAIRS = {**USER_DATA, "data.format": "pairs", "train.stage": "dpo"}
SAMPLES = "data.max_samples"
WITHOUT_VALIDATION = {"data.validation": "none", "eval.strategy": "no"}
NO_EVAL_LOSS = {"eval.strategy": "no", "save.load_best_model_at_end": False}


def few_usable(*usable: int, **more: Any) -> InputFacts:
    """Facts about ten examples that are longer than max_length; those at the positions `usable` can be used."""
    unusable = tuple(n for n in range(10) if n not in usable)
    facts = replace(USER_DATA_FACTS, num_examples=10, num_checked=10, token_lengths=(200,) * 10)
    return replace(facts, num_usable=len(usable), unusable_positions=unusable, **more)


def dropped(count: int) -> InputFacts:
    """Facts about 20 examples, of which the run drops `count`. One has 999 tokens."""
    return replace(USER_DATA_FACTS, num_checked=20, num_dropped=count, token_lengths=(*[20] * 19, 999))


TOO_LONG = (*[20] * 19, 30_039)  # SmolLM2 has 8,192 positions
FLASH = {**PACKING, BATCH: 8, LENGTH: 2048}
DATA = (
    facts_boundary("DAT008", {"eval.num_generations": 61}, replace(DEMO, counts_are_exact=False), DEMO),
    boundary("DAT008", USER_KTO, {"eval.num_generations": 5}, {"eval.num_generations": 6}, {"eval.num_generations": 5},
             facts=replace(LABELS_FACTS, num_examples=200, completions_per_example=2)),
    facts_boundary("DAT009", {LENGTH: 100}, lengths(*[100] * 901, *[101] * 99), lengths(*[100] * 900, *[101] * 100)),
    facts_boundary("DAT009", {LENGTH: 100}, replace(DEMO, shape=None, token_lengths=()), replace(DEMO, shape=None),
                   {LENGTH: 256}),
    facts_boundary("DAT045", {LENGTH: 512}, dropped(0), dropped(1), {LENGTH: 1280}),
    facts_boundary("DAT045", {LENGTH: 512}, dropped(20), dropped(19), {LENGTH: 1280}),
    facts_boundary("DAT045", {LENGTH: 512}, dropped(0), replace(dropped(0), num_identical_pairs=1), {LENGTH: 1280}),
    facts_boundary("DAT045", {LENGTH: 256}, dropped(0), replace(dropped(1), token_lengths=TOO_LONG), NO_FIX),
    boundary("DAT017", {}, {LENGTH: 800}, {LENGTH: 799}, facts=replace(DEMO, min_prompt_tokens=1000)),
    facts_boundary("DAT010", {LENGTH: 2048}, replace(DEMO, shape=None), replace(DEMO, shape=GPT2), {LENGTH: 1024}),
    facts_boundary("DAT010", {LENGTH: 2048}, replace(lengths(9, 1024), shape=GPT2, num_usable=2),
                   replace(lengths(9, 1025), shape=GPT2, num_usable=2), {LENGTH: 1024}),
    boundary("DAT010", {LENGTH: 2048, "train.stage": "kto"}, {"preference.kto_loss_type": "apo_zero_unpaired"},
             {"preference.kto_loss_type": "kto"}, {LENGTH: 1024},
             facts=replace(lengths(9, 1024), shape=GPT2, num_usable=2)),
    facts_boundary("DAT010", {LENGTH: 2048}, replace(lengths(9), shape=GPT2, num_usable=1),
                   replace(lengths(9), shape=GPT2, num_usable=None), {LENGTH: 1024}),
    facts_boundary("DAT011", {LENGTH: 9000}, replace(DEMO, shape=None), DEMO, {LENGTH: 8192}),
    boundary("DAT013", {**PACKING, BATCH: 3}, {LENGTH: 2730}, {LENGTH: 2731}, machine=H100),
    boundary("DAT013", FLASH, {"model.attn_implementation": "flash_attention_2"}, {}, machine=H100),
    facts_boundary("DAT006", USER_DATA, replace(USER_DATA_FACTS, num_examples=2),
                   replace(USER_DATA_FACTS, num_examples=1)),
    boundary("DAT008", {}, {"eval.num_generations": 60}, {"eval.num_generations": 61}, {"eval.num_generations": 60}),
    boundary("DAT036", {"eval.num_generations": 0}, {}, {"eval.generate_during_eval": True},
             {"eval.num_generations": 24}, {"eval.generate_during_eval": False}),
    *(boundary("DAT036", USER_DATA, {}, {"eval.generate_during_eval": True}, *fixes,
               {"eval.generate_during_eval": False}, facts=replace(USER_DATA_FACTS, num_examples=count))
      for count, fixes in ((101, [{"eval.num_generations": 5}]), (0, []))),
    boundary("DAT009", {}, {LENGTH: 168}, {LENGTH: 167}, {LENGTH: 256}),  # 3 and 4 of 40 examples are longer
    facts_boundary("DAT009", {LENGTH: 255}, lengths(255), lengths(256), {LENGTH: 320}),
    facts_boundary("DAT009", {LENGTH: 256}, lengths(256), lengths(257), {LENGTH: 384}),
    boundary("DAT009", {}, {LENGTH: 177}, {LENGTH: 99}, {LENGTH: 100}, facts=SHORT_CONTEXT),
    boundary("DAT017", {}, {LENGTH: 32}, {LENGTH: 31}, {LENGTH: 256}, facts=NO_LOSS_ON_PROMPT),
    boundary("DAT017", {"data.builtin": "train-pairs", "train.stage": "reward"}, {LENGTH: 48}, {LENGTH: 47},
             {LENGTH: 256}),
    boundary("DAT017", DPO, {LENGTH: 32}, {LENGTH: 31}, {LENGTH: 256}, facts=NO_LOSS_ON_PROMPT),
    boundary("DAT017", {LENGTH: 8}, {"data.loss_on": "all_tokens"}, {"data.loss_on": "completions"},
             facts=NO_LOSS_ON_PROMPT),
    # With train.seed 42, the validation set is examples 2, 3 and 7, and max_samples 3 draws 1, 5 and 6.
    facts_boundary("DAT017", SPLIT, few_usable(4), few_usable(2), {LENGTH: 256}, WITHOUT_VALIDATION,
                   words="The training set has 7 examples (data.validation_split 0.3), none of which has a trained "
                         "token within data.max_length (64 tokens). Of all 10 examples, 1 does."),
    boundary("DAT017", SPLIT, {SAMPLES: 0}, {SAMPLES: 3}, {LENGTH: 256}, {SAMPLES: 0}, facts=few_usable(4)),
    # A stream trains on the first examples that its validation split does not take.
    boundary("DAT017", {**SPLIT, **STREAMED, **IN_STEPS}, {SAMPLES: 4}, {SAMPLES: 3}, {LENGTH: 256}, {SAMPLES: 0},
             facts=few_usable(4, num_held_out=1, held_out_positions=(1,))),
    boundary("DAT007", {**SPLIT, **STREAMED}, {"eval.strategy": "no"}, {"eval.strategy": "steps"}, NO_EVAL_LOSS,
             {LENGTH: 256}, facts=few_usable(4, num_held_out=1, held_out_positions=(1,))),
    boundary("DAT017", SPLIT, {**WITHOUT_VALIDATION, SAMPLES: 0}, {SAMPLES: 1}, {LENGTH: 256},
             {**WITHOUT_VALIDATION, SAMPLES: 0}, facts=few_usable(2)),
    facts_boundary("DAT017", {LENGTH: 64}, few_usable(4), replace(few_usable(), token_lengths=(1,)), NO_FIX,
                   words="the longest example has 1 token. The first token of an example has no loss, and neither"),
    facts_boundary("DAT019", {**SPLIT, "train.stage": "dpo"}, few_usable(4, num_identical_pairs=9),
                   few_usable(2, num_identical_pairs=9), WITHOUT_VALIDATION,
                   words="none of which has two different completions within"),
    facts_boundary("DAT019", {**SPLIT, "train.stage": "dpo"}, few_usable(2, num_identical_pairs=4),
                   few_usable(2, num_identical_pairs=5)),
    boundary("DAT019", {**USER_PAIRS, "data.chosen_column": "better"}, {"data.rejected_column": "worse"},
             {"data.rejected_column": "better"}, words="both name the column 'better'"),
    boundary("DAT019", {**USER_PAIRS, "data.chosen_column": "rejected"}, {"data.rejected_column": "chosen"}, {}),
    facts_boundary("DAT007", SPLIT, few_usable(4, 2), few_usable(4, 5), NO_EVAL_LOSS, {LENGTH: 256},
                   words="The validation set has 3 examples, none of which has a trained token within"),
    facts_boundary("DAT007", SPLIT, few_usable(4, 2, num_identical_pairs=8), few_usable(4, num_identical_pairs=9),
                   NO_EVAL_LOSS, words="none of which has two different completions within"),
    facts_boundary("DAT007", SPLIT, few_usable(2), few_usable(4), words="no evaluation would run"),
    boundary("DAT010", {}, {LENGTH: 1024}, {LENGTH: 1025}, {LENGTH: 1024}, facts=replace(DEMO, shape=GPT2)),
    boundary("DAT011", {}, {LENGTH: 8192}, {LENGTH: 8193}, {LENGTH: 8192}),
    facts_boundary("DAT011", {LENGTH: 8193}, UNLIMITED, DEMO),
    boundary("DAT013", {**PACKING, BATCH: 2, ACCUMULATION: 3}, {LENGTH: 4096}, {LENGTH: 4097}, UNBATCHED,
             machine=H100),
    boundary("DAT013", {**PACKING, LENGTH: 16_384, ACCUMULATION: 3}, {BATCH: 1}, {BATCH: 2}, UNBATCHED, machine=H100),
    boundary("DAT015", {}, {PROCESSES: 16}, {PROCESSES: 17}, {PROCESSES: 8}),
    boundary("DAT015", {"launch.place": "slurm", "slurm.cpus": 2}, {WORKERS: 4}, {WORKERS: 5}, {WORKERS: 2}),
    boundary("DAT015", {}, {WORKERS: 16}, {WORKERS: 17}, {WORKERS: 8}),
    boundary("DAT015", FOUR_RANKS, {WORKERS: 1}, {WORKERS: 2}, {WORKERS: 1}, machine=replace(LAPTOP, cores=2)),
    boundary("DAT015", FOUR_RANKS, {WORKERS: 0}, {WORKERS: 1}, {WORKERS: 0}, machine=replace(LAPTOP, cores=1)),
    boundary("DAT015", {**FOUR_RANKS, "launch.nproc_per_node": 3}, {WORKERS: 0}, {WORKERS: 1}, {WORKERS: 0},
             machine=replace(LAPTOP, cores=1)),
    boundary("DAT015", FOUR_RANKS, {WORKERS: 4}, {WORKERS: 5}, {WORKERS: 2}),
)  # fmt: skip

LOSS = "preference.dpo_loss_type"
EXO = {**DPO, "preference.dpo_loss_type": "exo_pair"}
SMOOTHING = "preference.label_smoothing"
APO = {"preference.kto_loss_type": "apo_zero_unpaired"}
GOOD, BAD = "preference.desirable_weight", "preference.undesirable_weight"


def labels(good: int, bad: int) -> InputFacts:
    """Facts with this many desirable and undesirable completions."""
    return replace(LABELS_FACTS, label_counts=(good, bad))


def llama_of(parameters: int) -> InputFacts:
    """Facts with a model of exactly this many parameters."""
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1, "intermediate_size": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 0,
    }  # fmt: skip
    rest = from_config({**config, "vocab_size": 1}).parameters - 1
    shape = from_config({**config, "vocab_size": parameters - rest})
    assert shape.parameters == parameters
    return replace(DEMO, shape=shape)


EIGHT_B = {"facts": replace(DEMO, shape=LLAMA_8B), "machine": H100}
FULL_DPO = {**DPO, **FULL}
REFERENCE = {"preference.precompute_ref_log_probs": True}
STAGES = (
    boundary("STG002", {**USER_DATA, "train.stage": "sft"}, {"data.format": "messages"}, {"data.format": "pairs"},
             {"data.format": "auto"}, {"train.stage": "dpo"},
             facts=replace(USER_DATA_FACTS, detected_format="messages")),
    boundary("STG005", {**TENSOR_PARALLEL, **REFERENCE}, {"parallel.strategy": "fsdp2"},
             {"parallel.strategy": "tensor"}, {"preference.precompute_ref_log_probs": False}, machine=TWO_H100),
    boundary("STG006", DPO, {"method.kind": "lora"}, FULL, REFERENCE),
    boundary("STG006", FULL_DPO, {"train.stage": "orpo"}, {"train.stage": "dpo"}, REFERENCE),
    boundary("STG006", FULL_DPO, REFERENCE, {}, REFERENCE),
    boundary("STG006", FULL_DPO, {"parallel.strategy": "tensor"}, {"parallel.strategy": "ddp"}, REFERENCE,
             machine=TWO_H100),
    facts_boundary("STG006", FULL_DPO, replace(DEMO, shape=None), DEMO, REFERENCE, words="takes 513 MiB"),
    boundary("STG003", {**KTO, ACCUMULATION: 4}, {BATCH: 2}, {BATCH: 1}, {BATCH: 2, ACCUMULATION: 2}, APO),
    boundary("STG003", {**KTO, ACCUMULATION: 1}, {BATCH: 2}, {BATCH: 1}, {BATCH: 2, ACCUMULATION: 1}, APO),
    *(boundary("STG011", {**DPO, ACCUMULATION: 4, LOSS: loss}, {BATCH: 2}, {BATCH: 1}, {BATCH: 2, ACCUMULATION: 2},
               {LOSS: "sigmoid"}) for loss in ("aot", "aot_unpaired")),
    boundary("STG011", {**DPO, BATCH: 1}, {LOSS: "sigmoid"}, {LOSS: "aot"}),
    boundary("STG004", EXO, {SMOOTHING: 1e-6}, {SMOOTHING: 0.0}, {SMOOTHING: 1e-3},
             {"preference.dpo_loss_type": "sigmoid"}),
    facts_boundary("STG007", USER_KTO, labels(99, 100), labels(98, 100), {GOOD: 1.17, BAD: 1.0}),
    facts_boundary("STG007", USER_KTO, labels(134, 100), labels(135, 100), {GOOD: 1.0, BAD: 1.17},
                   words="The training data before the validation split has 135 desirable"),
    facts_boundary("STG007", {**USER_KTO, GOOD: 1.34}, labels(100, 100), labels(101, 100), {GOOD: 1.0, BAD: 0.88}),
    facts_boundary("STG007", {**USER_KTO, GOOD: 0.99}, labels(100, 100), labels(98, 99), {GOOD: 1.16, BAD: 1.0}),
    boundary("STG007", USER_KTO, {GOOD: 1.34}, {GOOD: 1.35}, {GOOD: 1.15, BAD: 1.0}, facts=labels(100, 100)),
    boundary("STG007", USER_KTO, {BAD: 1.0}, {BAD: 0.0}, {GOOD: 1.15, BAD: 1.0}, facts=labels(100, 100)),
    facts_boundary("STG007", {**USER_KTO, GOOD: 1.5, BAD: 3.0}, labels(200, 100), labels(100, 100),
                   words="100 desirable completions with weight 1.5 and 100 undesirable ones with weight 3."),
    facts_boundary("STG007", USER_KTO, labels(0, 0), labels(1, 0), words="are desirable; add undesirable"),
    facts_boundary("STG007", USER_KTO, labels(1, 1), labels(0, 1), words="are undesirable; add desirable"),
    highest("STG008", DPO, 1e-4, 5e-6, "is high for DPO", **EIGHT_B),
    lowest("STG008", DPO, 1e-7, 5e-6, "is low for DPO", **EIGHT_B),
    highest("STG008", {**DPO, **FREEZE}, 2e-5, 1e-6, "is high for", **EIGHT_B),
    lowest("STG008", {**DPO, **FREEZE}, 1e-8, 1e-6, "is low for", **EIGHT_B),
    highest("STG008", {**DPO, **FULL}, 1e-5, 5e-7, "is high for", **EIGHT_B),
    lowest("STG008", {**DPO, **FULL}, 1e-9, 5e-7, "is low for", **EIGHT_B),
    highest("STG008", DPO, 1e-3, 5e-5, "1e-6 to 2e-4 is usual", facts=llama_of(499_999_999), machine=H100),
    facts_boundary("STG008", {**DPO, RATE: 1e-3}, llama_of(499_999_999), llama_of(500_000_000)),
)  # fmt: skip

RESUMED, RESUME_PATH = {"save.resume_from": "path"}, "save.resume_path"
STEPS, MAX_STEPS, WARMUP = {"train.duration": "steps"}, "train.max_steps", "train.warmup_steps"
PATIENCE = "eval.early_stopping_patience"
BY_EVAL, BY_SAVE = {**STEPS, "eval.strategy": "steps"}, {**STEPS, "save.strategy": "steps"}
BEST = {"eval.strategy": "steps", "save.strategy": "steps", "save.load_best_model_at_end": True}
FOUR_OF_EACH = {**STEPS, BATCH: 4, ACCUMULATION: 1}
TRAINING = (
    boundary("TRN001", {BATCH: 1}, {ACCUMULATION: 400}, {ACCUMULATION: 401}, {BATCH: 1, ACCUMULATION: 400}),
    facts_boundary("TRN001", {BATCH: 2, ACCUMULATION: 1}, lengths(9, num_examples=2), lengths(9, num_examples=1),
                   {BATCH: 1, ACCUMULATION: 1}),
    facts_boundary("TRN001", {BATCH: 2, ACCUMULATION: 1}, lengths(9, num_examples=0), lengths(9, num_examples=1)),
    facts_boundary("TRN001", {**FOUR_RANKS, BATCH: 3, ACCUMULATION: 1}, lengths(9, num_examples=12),
                   lengths(9, num_examples=11), {BATCH: 2, ACCUMULATION: 1}),
    facts_boundary("TRN001", {**FOUR_RANKS, BATCH: 1, ACCUMULATION: 2}, lengths(9, num_examples=8),
                   lengths(9, num_examples=4), {BATCH: 1, ACCUMULATION: 1}),
    boundary("TRN002", {**STEPS, MAX_STEPS: 50}, {WARMUP: 49.0}, {WARMUP: 50.0}, {WARMUP: 0.03}),
    boundary("TRN002", {**STEPS, MAX_STEPS: 1}, {WARMUP: 0.0}, {WARMUP: 0.03}, {WARMUP: 0.0}, words="would not change"),
    boundary("TRN002", {**STEPS, MAX_STEPS: 1}, {WARMUP: 0.0}, {WARMUP: 1.0}, {WARMUP: 0.0}, words="is 0, so"),
    boundary("TRN002", {**STEPS, MAX_STEPS: 4}, {WARMUP: 0.75}, {WARMUP: 0.76}, {WARMUP: 0.03}, words="is 4 steps"),
    boundary("TRN002", {**STEPS, MAX_STEPS: 4, "train.optim": "schedule_free_adamw"}, {WARMUP: 4.0}, {WARMUP: 5.0},
             {WARMUP: 0.03}),
    boundary("TRN003", {"train.lr_scheduler_type": "constant"}, {WARMUP: 0.0}, {WARMUP: 0.01}),
    boundary("TRN003", {"train.lr_scheduler_type": "constant"}, {WARMUP: 0.03}, {WARMUP: 0.04}),
    boundary("TRN004", {**BY_EVAL, "eval.steps": 20}, {MAX_STEPS: 20}, {MAX_STEPS: 19}, {"eval.steps": 4}),
    boundary("TRN004", {**BY_EVAL, "eval.steps": 4}, {MAX_STEPS: 4}, {MAX_STEPS: 3}, {"eval.steps": 1}),
    boundary("TRN005", {**BY_SAVE, "save.steps": 20}, {MAX_STEPS: 20}, {MAX_STEPS: 19}, {"save.steps": 4}),
    boundary("TRN012", {**BY_EVAL, "eval.steps": 5, PATIENCE: 3}, {MAX_STEPS: 21}, {MAX_STEPS: 20},
             {"eval.strategy": "steps", "eval.steps": 4}),
    boundary("TRN012", {**BY_EVAL, "eval.steps": 5, MAX_STEPS: 20}, {PATIENCE: 2}, {PATIENCE: 3},
             {"eval.strategy": "steps", "eval.steps": 4}),
    boundary("TRN012", {**BY_EVAL, "eval.steps": 5, MAX_STEPS: 3}, {PATIENCE: 0}, {PATIENCE: 3}, {PATIENCE: 0}),
    boundary("TRN013", {**STEPS, "logging.steps": 20}, {MAX_STEPS: 21}, {MAX_STEPS: 20}, {"logging.steps": 5}),
    boundary("TRN013", {**STEPS, "logging.steps": 20}, {MAX_STEPS: 2}, {MAX_STEPS: 3}, {"logging.steps": 1}),
    boundary("TRN006", {**BEST, "eval.steps": 40}, {"save.steps": 80}, {"save.steps": 81}, {"save.steps": 80}),
    boundary("TRN006", {**BEST, "eval.steps": 40}, {"save.steps": 40}, {"save.steps": 10}, {"save.steps": 40}),
    boundary("TRN008", {**RESUMED, **STEPS, MAX_STEPS: 20}, {RESUME_PATH: "a/checkpoint-19"},
             {RESUME_PATH: "a/checkpoint-20"}, words="ends at step 20, so no step would be trained"),
    facts_boundary("TRN008", {**RESUMED, "train.num_train_epochs": 1, RESUME_PATH: "a/checkpoint-900"},
                   replace(DEMO, counts_are_exact=False), DEMO, words="so no step would be trained"),
    boundary("TRN008", {**RESUMED, "train.num_train_epochs": 1, RESUME_PATH: "a/checkpoint-900"},
             {"train.stage": "pretraining"}, {"train.stage": "sft"}),
    facts_boundary("TRN008", {**RESUMED, "train.num_train_epochs": 1, RESUME_PATH: "a/checkpoint-900"},
                   replace(DEMO, checkpoint_epoch=0.9), replace(DEMO, checkpoint_epoch=1.0),
                   words="at epoch 1, and the run ends after epoch 1, so no step would be trained"),
    facts_boundary("TRN008", {**RESUMED, RESUME_PATH: "a/checkpoint-1", "precision.compute": "bf16"},
                   replace(DEMO, checkpoint_dtype="bf16"), replace(DEMO, checkpoint_dtype="fp32"),
                   {"precision.compute": "fp32"}, {"save.resume_from": "latest"},
                   words="DeepSpeed resumes only in the same dtype"),
    boundary("TRN009", FOUR_OF_EACH, {MAX_STEPS: 10_000}, {MAX_STEPS: 10_001}, {MAX_STEPS: 1000}),
    facts_boundary("TRN009", {**STEPS, MAX_STEPS: 101, BATCH: 64, ACCUMULATION: 1}, lengths(9, num_examples=65),
                   lengths(9, num_examples=6), {MAX_STEPS: 10}, words="are 101 epochs over 6 training examples"),
)  # fmt: skip
BOTH = {**BY_EVAL, **BY_SAVE}
MANY_EPOCHS = {**FOUR_OF_EACH, MAX_STEPS: 10_001}
BEST_MODEL = {"save.load_best_model_at_end": True}
ON_CPU = replace(WITH_UNSLOTH, device="cpu", gpus=())
OUTPUT = (
    boundary("TRN004", {**BOTH, "eval.steps": 20, MAX_STEPS: 10}, BEST_MODEL, {}),
    boundary("TRN004", {**BOTH, **USER_DATA, "eval.steps": 20, MAX_STEPS: 10}, {"data.validation": "none"}, {},
             facts=USER_DATA_FACTS),
    boundary("TRN005", {**BOTH, "save.steps": 20, MAX_STEPS: 10}, BEST_MODEL, {}),
    boundary("TRN009", MANY_EPOCHS, PACKING, {}),
    boundary("TRN009", {**MANY_EPOCHS, "train.num_train_epochs": 200.0}, {"train.duration": "epochs"}, {}),
    facts_boundary("TRN009", MANY_EPOCHS, replace(DEMO, counts_are_exact=False), DEMO),
    facts_boundary("TRN009", MANY_EPOCHS, replace(DEMO, num_examples=None), DEMO),
    boundary("UNS006", UNSLOTH, {"precision.compute": "pure_bf16"}, {"precision.compute": "bf16"}, words="bf16",
             machine=replace(ON_CPU, cpu_bf16=False)),
    machine_boundary("UNS006", {**UNSLOTH, "precision.compute": "bf16"}, replace(ON_CPU, cpu_bf16=True),
                     replace(ON_CPU, cpu_bf16=False)),
    facts_boundary("TRN001", {**FOUR_RANKS, BATCH: 1, ACCUMULATION: 1}, lengths(9, num_examples=4),
                   lengths(9, num_examples=3), NO_FIX),
)  # fmt: skip
BOUNDARIES = (*ADAPTER, *METHOD, *FILES, *DATA, *STAGES, *TRAINING, *OUTPUT)


@pytest.mark.parametrize("row", BOUNDARIES, ids=str)
def test_boundary(row: Boundary) -> None:
    row.check()


@pytest.mark.parametrize(("count", "named", "more"), [(3, 3, ""), (4, 3, "least 4"), (5, 3, "least 5")])
def test_three_issues_are_named(count: int, named: int, more: str) -> None:
    found = Setup(USER_DATA, facts=issues(count)).finding("DAT003")
    assert found
    assert found.message.count("is bad") == named
    assert more in found.message and ("In total" in found.message) == bool(more)


KEEP_LAST, MODEL_ONLY = {"save.total_limit": 1}, {"save.total_limit": 1, "save.only_model": True}
NO_CHECKPOINTS = {"save.strategy": "no", "save.final_model": True, "save.load_best_model_at_end": False}
NOTHING = {**NO_CHECKPOINTS, "save.final_model": False}


@pytest.mark.parametrize(
    ("room_for", "spare", "offered"),
    [
        ({}, 0, None),
        ({}, -1, [KEEP_LAST, MODEL_ONLY]),
        (KEEP_LAST, 0, [KEEP_LAST, MODEL_ONLY]),
        (KEEP_LAST, -1, [MODEL_ONLY, NO_CHECKPOINTS]),
        (MODEL_ONLY, -1, [NO_CHECKPOINTS, NOTHING]),
        (NO_CHECKPOINTS, -1, [NOTHING]),
    ],
)
def test_disk_space_to_the_last_byte(room_for: Patch, spare: int, offered: list[Patch] | None) -> None:
    """A disk with room for the result of a fix, or with one byte less."""
    spec = effective(edit(RunSpec(), {**FULL, **room_for}))
    need = Case(spec, LAPTOP, DEMO).estimate.disk_bytes
    found = Setup(FULL, replace(LAPTOP, disk_free_bytes=need + spare)).finding("OUT001")
    assert (found and [dict(fix.patch) for fix in found.fixes]) == offered


@pytest.mark.parametrize(("name", "says"), [("", False), ("eight GPUs", True)])
def test_the_free_disk_space_of_another_machine_is_not_stated_as_measured(name: str, says: bool) -> None:
    """A description without disk_gib has the default, 1 TiB, which no disk was asked for."""
    found = Setup(FULL, replace(LAPTOP, disk_free_bytes=1, name=name)).finding("OUT001")
    assert found and ("according to the description of the machine (eight GPUs)" in found.message) == says
    assert ("disk_gib" in found.message) == says


@pytest.mark.parametrize(("accumulation", "safe"), [(4, True), (3, False), (2, True), (1, False)])
def test_fix_is_safe_if_the_global_batch_size_stays_the_same(accumulation: int, safe: bool) -> None:
    found = Setup({**KTO, BATCH: 1, ACCUMULATION: accumulation}).finding("STG003")
    assert found and found.fixes[0].safe == safe


@pytest.mark.parametrize(
    ("patch", "label", "cost"),
    [
        ({"save.merge_adapter": True}, "Do not merge the adapter", "only the adapter is saved"),
        ({INIT: "pissa"}, "Use the default initialization", "slower convergence"),
        (
            {INIT: "pissa", "save.merge_adapter": True},
            "Use the default initialization, without merging",
            "only the adapter is saved",
        ),
    ],
)
def test_the_fix_for_shared_weights_says_what_it_changes(patch: Patch, label: str, cost: str) -> None:
    found = Setup(patch, facts=replace(DEMO, has_shared_layers=True, model_type="zamba2")).finding("ADP014")
    assert found and [(fix.label, fix.cost) for fix in found.fixes] == [(label, cost)]


@pytest.mark.parametrize(
    ("kind", "cost"),
    [
        ("gptq", "the model keeps its own quantization"),
        ("fp8", "the model is converted to bf16 while loading"),
        ("mxfp4", "the model is converted to bf16 while loading"),
    ],
)
def test_what_happens_to_published_weights_without_another_quantization(kind: str, cost: str) -> None:
    patch = {"model.source": "path", "model.path": "model", "method.quantization": "nf4"}
    found = Setup(patch, H100, replace(DEMO, quant_method=kind)).finding("QNT012")
    assert found and [fix.cost for fix in found.fixes] == [cost]


def test_one_validation_example_of_each_dataset_is_not_the_only_one() -> None:
    """KTO pairs it with that of the other dataset."""
    one = replace(LABELS_FACTS, num_examples=20)
    two = replace(one, num_examples=40, datasets=(one, one))
    source = {"source": "files", "files": ("b.jsonl",)}
    for sources, facts, fails in (((), one, True), (({}, source), two, False)):
        spec = edit(RunSpec(), {**USER_KTO, "data.sources": sources, "data.validation_split": 0.05})
        assert ("STG010" in {found.code for found in check(spec, LAPTOP, facts)}) is fails


def test_only_fewer_checkpoints_are_safe() -> None:
    """Fix all errors must not leave a run of many hours without any checkpoint."""
    spec = effective(edit(RunSpec(), {**FULL, **KEEP_LAST}))
    for spare, safe in ((0, {str(KEEP_LAST)}), (-1, set())):
        free = Case(spec, LAPTOP, DEMO).estimate.disk_bytes + spare
        found = Setup(FULL, replace(LAPTOP, disk_free_bytes=free)).finding("OUT001")
        assert found and {str(dict(fix.patch)) for fix in found.fixes if fix.safe} == safe


def test_evaluation_is_set_to_the_interval_of_checkpoints() -> None:
    for strategy, label in (("steps", "Evaluate every 70 steps"), ("epoch", "Evaluate every epoch")):
        other = "epoch" if strategy == "steps" else "steps"
        found = Setup({**BEST, "save.strategy": strategy, "eval.strategy": other, "save.steps": 70}).finding("TRN006")
        assert found and [fix.label for fix in found.fixes] == [label]


def test_finding_with_a_guessed_format_points_to_that_option_too() -> None:
    for setup, fields in (
        (columns("id", "question"), ("data.files", "data.format")),
        (Setup(TWO_FILES, facts=unreadable("a.jsonl")), ("data.files",)),
        (Setup(TWO_FILES, facts=unreadable("*.jsonl")), ("data.files",)),
        (
            Setup(
                TWO_FILES,
                facts=replace(unreadable("a.jsonl"), columns=("x",), column_kinds=(("x", "text"),), format=""),
            ),
            ("data.files", "data.format"),
        ),
    ):
        found = setup.finding("DAT002")
        assert found and found.fields == fields


def test_examples_that_are_all_skipped_are_not_blamed_on_their_length() -> None:
    reason = "a.jsonl, line 1: the chat template cannot render it: System role not supported"
    facts = replace(
        USER_DATA_FACTS, num_examples=2, num_usable=0, num_checked=2, all_checked=True, num_skipped=3,
        num_skipped_texts=2, skipped=(reason,), token_lengths=(22, 22),
    )  # fmt: skip
    spec = {**USER_DATA, "data.on_bad_example": "skip", "data.system_prompt": "Be kind."}
    found = Setup(spec, facts=facts).finding("DAT017")
    assert found and found.title == "All examples are skipped" and reason in found.message
    assert [dict(fix.patch) for fix in found.fixes] == [{"data.system_prompt": ""}]
    partly = Setup(spec, facts=replace(facts, num_skipped_texts=1)).finding("DAT017")
    assert partly and "within data.max_length" in partly.message, "the other one is too long"


def test_unknown_columns_have_a_title_of_their_own() -> None:
    location, problem = "a.jsonl, line 1", detection_problem({"id": "7"}, ("messages",))
    facts = replace(columns("id").facts, data_issues=(DataIssue("data.files", location, problem),))
    found = Setup(USER_DATA, facts=facts).finding("DAT002")
    assert found and found.title == "The columns of a data file are not recognized"
    assert "data." not in found.message + found.reason and "Restore" not in found.message
    mixed = replace(facts, data_issues=(*facts.data_issues, DataIssue("data.files", "b.jsonl", "no such file")))
    found = Setup(USER_DATA, facts=mixed).finding("DAT002")
    assert found and found.title == "A data file cannot be read"


def test_workers_and_tokenization_processes_are_fixed_together() -> None:
    found = Setup({PROCESSES: 17, WORKERS: 17}).finding("DAT015")
    assert found and found.fields == (PROCESSES, WORKERS)
    assert [fix.label for fix in found.fixes] == ["Set tokenization processes to 8 and DataLoader workers to 8"]


def test_the_first_places_and_the_number_of_examples_with_errors_are_said() -> None:
    def message(*issues: tuple[str, int], **facts: Any) -> str:
        found = tuple(DataIssue("data.files", f"{file}, line {line}", "is bad", True) for file, line in issues)
        finding = rule_finding("DAT003", USER_DATA, LAPTOP, replace(USER_DATA_FACTS, data_issues=found, **facts))
        assert finding is not None
        return finding.message

    two = ("a.jsonl", 1), ("a.jsonl", 2)
    assert message(*two, num_invalid=2).startswith("a.jsonl, line 1: is bad. Line 2 has the same error. Correct ")
    assert "In total" not in message(*two, ("b.jsonl", 1), num_invalid=3)
    three = message(*two, ("a.jsonl", 9), num_invalid=1200, all_checked=True)
    assert "Line 2 and line 9 have the same error. In total, 1,200 examples have errors." in three
    assert "In total, at least 4 examples" in message(*two, num_invalid=4)


@pytest.mark.parametrize("code", ["DAT018", "DAT038"])
def test_validation_files_that_are_not_rendered_may_have_any_turns(code: str) -> None:
    bad = {f: DataIssue(f, f"{f}, line 1", "cannot be rendered", True) for f in ("data.files", "data.validation_files")}
    stage = {"train.stage": "pretraining"} if code == "DAT038" else {}
    options = {**USER_DATA, **stage, "data.validation": "files", "data.validation_files": ("v.jsonl",)}

    def finds(field: str, **changes: Any) -> bool:
        given = {**options, **{name.replace("__", "."): value for name, value in changes.items()}}
        facts = replace(USER_DATA_FACTS, unrenderable_examples=(bad[field],))
        return rule_finding(code, given, LAPTOP, facts) is not None

    assert finds("data.validation_files", eval__strategy="epoch")
    assert not finds("data.validation_files", eval__strategy="no")
    assert finds("data.validation_files", eval__strategy="no", eval__num_generations=4) == (code == "DAT018")
    assert finds("data.files", eval__strategy="no")
    facts = replace(USER_DATA_FACTS, unrenderable_examples=(bad["data.validation_files"],), num_usable=0)
    facts = replace(facts, token_lengths=(99,), num_checked=2, all_checked=True)
    for strategy in ("no", "epoch"):  # other errors are reported, where the run would not stop earlier
        found = rule_finding("DAT017", {**options, "eval.strategy": strategy}, LAPTOP, facts)
        assert (found is not None) == (strategy == "no")


@pytest.mark.parametrize(
    ("code", "stage", "second", "option", "fix"),
    [
        ("STG001", "dpo", {}, "data.sources[1].builtin", {"data.sources[1].builtin": "train-pairs"}),
        ("STG002", "sft", {"source": "hub", "hub_id": "a/b", "format": "pairs"}, "data.sources[1].format",
         {"data.sources[1].format": "auto"}),
    ],
)  # fmt: skip
def test_a_second_dataset_fits_the_stage(
    code: str, stage: str, second: dict[str, Any], option: str, fix: dict[str, Any]
) -> None:
    first = {**(DPO if stage == "dpo" else {}), "train.stage": stage}
    spec = edit(RunSpec(), {**first, "data.sources": ({}, second)})
    facts = replace(DEMO, datasets=(DEMO, DEMO))
    (finding,) = (found for found in check(spec, LAPTOP, facts) if found.code == code)
    assert finding.fields == (option, "train.stage") and finding.fixes[0].patch == fix
    assert code not in {found.code for found in check(edit(spec, fix), LAPTOP, facts)}


@pytest.mark.parametrize(
    "patch",
    [
        {"train.duration": "epochs"}, {"eval.strategy": "epoch"}, {"save.strategy": "epoch"},
        {"data.drop_duplicates": True}, {"train.train_sampling_strategy": "group_by_length"},
        {"train.dataloader_num_workers": 2}, {"train.use_unsloth": True},
        {"data.source": "hub", "data.hub_id": "a/b", "data.hub_split": "train[:9%]"},
        {"data.sources": ({}, {"source": "builtin"})}, {"launch.trainer": "llamafactory"},
        {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2, "launch.nproc_per_node": 2},
        {"parallel.strategy": "zero1", "parallel.sequence_parallel_size": 2, "launch.nproc_per_node": 2},
    ],
    ids=lambda patch: next(reversed(patch)),
)  # fmt: skip
def test_what_streaming_does_not_support(patch: Patch) -> None:
    """One fix changes all options that have another value; the other one turns streaming off."""
    streamed = {**STREAMED, **IN_STEPS, **patch}
    found = Setup(streamed, TWO_H100, USER_DATA_FACTS).finding("DAT035")
    assert found is not None and any(f"{name}: " in found.message for name in patch)
    assert found.fixes[-1].patch == {"data.streaming": False}
    for fix in found.fixes:
        assert Setup({**streamed, **fix.patch}, TWO_H100, USER_DATA_FACTS).finding("DAT035") is None


SEQUENCES = {"parallel.strategy": "zero3", "parallel.sequence_parallel_size": 2}


@pytest.mark.parametrize(
    "patch",
    [
        {"train.use_unsloth": True}, {"launch.trainer": "llamafactory"}, SEQUENCES,
        {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2},
    ],
    ids=lambda patch: next(reversed(patch)),
)  # fmt: skip
def test_losses_without_weights(patch: Patch) -> None:
    """LLaMA-Factory trains on turns with a weight of 0, too."""
    weighted = replace(USER_DATA_FACTS, num_checked=9, num_with_weights=3, num_weighted=2)
    spec = {**USER_DATA, **patch}
    option, factory = next(reversed(patch)), "launch.trainer" in patch
    found = Setup(spec, TWO_H100, weighted).finding("DAT037")
    count, weights = (3, "1") if factory else (2, "0 and 1")
    where = f"In {count} of 9 checked examples, a turn has a weight other than {weights}. {option}: "
    assert found and found.message.startswith(where) and found.fields == (option,)
    assert Setup({**spec, **found.fixes[0].patch}, TWO_H100, weighted).finding("DAT037") is None
    masked = replace(weighted, num_weighted=0)
    assert (Setup(spec, TWO_H100, masked).finding("DAT037") is not None) is factory
    if factory:
        both = Setup({**spec, "train.use_unsloth": True}, TWO_H100, masked).finding("DAT037")
        assert both and both.fields == ("launch.trainer",), "Unsloth leaves out turns with a weight of 0"
    none = replace(masked, num_with_weights=0)
    assert Setup(spec, TWO_H100, none).finding("DAT037") is None


def test_only_plain_text_needs_no_chat_template() -> None:
    model = {"model.source": "path", "model.path": "model", **USER_DATA, "data.format": "text"}
    facts = replace(DEMO, has_chat_template=False)
    sources = [({}, {"source": "files", "files": ("b.jsonl",), "format": name}) for name in ("text", "messages")]
    found = [Setup({**model, "data.sources": each}, facts=facts).finding("MDL003") for each in sources]
    assert found[0] is None and found[1] is not None


def test_an_adapter_on_the_embedding_becomes_training_it_in_full() -> None:
    targets = {"lora.targets": "custom", "lora.target_modules": ("embed_tokens", "q_proj"), "lora.modules_to_save": ()}
    found = Setup(targets).finding("MTH002")
    assert found and found.title == "A LoRA target is not a linear layer of the model"
    assert dict(found.fixes[0].patch) == {"lora.target_modules": ("q_proj",), "lora.modules_to_save": ("embed_tokens",)}


def test_packages_for_packing_are_missing_only_where_the_versions_are_known() -> None:
    """Not where a machine description has none, and not in the environment of LLaMA-Factory."""
    facts, packed = replace(DEMO, shape=None, model_type="qwen3_next"), {"data.packing": True}
    found = rule_finding("DAT021", packed, H100, facts)
    assert found and "requires the packages causal_conv1d and flash-linear-attention, which are not" in found.message
    for patch, machine in ((packed, replace(H100, versions={})), ({**packed, "launch.trainer": "llamafactory"}, H100)):
        assert rule_finding("DAT021", patch, machine, facts) is None


def test_more_evaluations_may_end_the_training_earlier() -> None:
    found = Setup({**BY_EVAL, "eval.steps": 5, MAX_STEPS: 20, PATIENCE: 3}).finding("TRN012")
    assert found and [(fix.safe, fix.cost) for fix in found.fixes] == [(False, "the run may end earlier")]


@pytest.mark.parametrize(
    ("trainer", "logged"), [("footplate", "first and last step are"), ("llamafactory", "last step is")]
)
def test_which_steps_are_logged_anyway(trainer: str, logged: str) -> None:
    found = Setup({**STEPS, MAX_STEPS: 20, "logging.steps": 30, "launch.trainer": trainer}).finding("TRN013")
    assert found and found.message.endswith(f"so only its {logged} logged.")
