"""The YAML of TRL's command line as a spec: what is taken over, what means something else, and what is refused."""

import pytest
import torch
import yaml
from transformers import get_scheduler

from backend.config import RunSpec
from backend.config.options import changes
from backend.importers import detect_format, import_file

PUSH = "push_to_hub: True (footplate publish uploads a finished run)"
LORA = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "trl-lib/Capybara", "learning_rate": 2e-4,
    "num_train_epochs": 1, "packing": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
    "use_peft": True, "lora_r": 32, "lora_alpha": 16, "output_dir": "Qwen2-0.5B-SFT", "push_to_hub": True,
    "report_to": "none", "lr_scheduler_type": "cosine",
}  # fmt: skip


def read(tmp_path, **more):
    table = {**LORA, **more}
    return import_file(
        yaml.safe_dump({key: value for key, value in table.items() if value != "-"}), RunSpec(), tmp_path
    )


def test_streaming(tmp_path):
    assert read(tmp_path, dataset_streaming=True, max_steps=100).spec.data.streaming


def test_lora(tmp_path):
    assert detect_format(yaml.safe_dump(LORA)) == "trl"
    found = read(tmp_path)
    spec = found.spec
    assert (spec.model.hub_id, spec.data.hub_id, spec.data.hub_split) == (
        LORA["model_name_or_path"],
        LORA["dataset_name"],
        "train",
    )
    assert (spec.train.stage, spec.method.kind, spec.lora.r, spec.lora.alpha) == ("sft", "lora", 32, 16)
    assert (spec.lora.dropout, spec.data.packing, spec.data.max_length) == (0.05, True, 1024)
    assert (spec.train.lr_scheduler_type, spec.train.gradient_accumulation_steps) == ("cosine", 8)
    assert spec.train.activation_checkpointing and spec.precision.compute == "bf16"
    assert (spec.save.strategy, spec.save.steps, spec.data.validation, spec.eval.strategy) == (
        "steps",
        500,
        "none",
        "no",
    )
    assert "trl sft is assumed" in found.different[0] and found.missing == [PUSH]


def test_defaults_are_those_of_trl(tmp_path):
    found = import_file("model_name_or_path: a/b\ndataset_name: c/d\nbeta: 0.2\n", RunSpec(), tmp_path)
    train = found.spec.train
    assert (train.stage, train.learning_rate, train.per_device_train_batch_size) == ("dpo", 1e-6, 8)
    assert (train.num_train_epochs, train.lr_scheduler_type, train.optim) == (3.0, "linear", "adamw_torch_fused")
    assert (found.spec.method.kind, found.spec.preference.beta) == ("full", 0.2)


@pytest.mark.parametrize(
    ("given", "expected", "words"),
    [
        ({"lr_scheduler_type": "cosine_with_restarts"}, "cosine", ""),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 1}}, "cosine", ""),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}, "", "_restarts ("),
        ({"lr_scheduler_type": "polynomial"}, "linear", "falls to 0 in Footplate, and to 1e-07 there"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0, "power": 1.0}}, "linear", ""),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}, "", "polynomial ("),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": "x"}, "linear", "lr_scheduler_kwargs: x"),
    ],
)
def test_names_of_the_same_schedule(tmp_path, given, expected, words):
    found = read(tmp_path, **given)
    assert found.spec.train.lr_scheduler_type == (expected or RunSpec().train.lr_scheduler_type)
    said = [*found.different, *found.missing]
    assert words in " ".join(said) if words else not any("sched" in text for text in said)


@pytest.mark.parametrize(
    ("name", "own", "given"),
    [("cosine_with_restarts", "cosine", {}), ("polynomial", "linear", {"lr_end": 0})],
)
def test_they_have_the_same_learning_rates(name, own, given):
    rates = []
    for schedule, arguments in ((name, given), (own, {})):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        made = get_scheduler(schedule, optimizer, 3, 20, scheduler_specific_kwargs=arguments)
        rates.append([made.lr_lambdas[0](step) for step in range(20)])
    assert rates[0] == pytest.approx(rates[1])


# (given, option, value); test_imported_options.py tests both tables.
OPTIONS = [
    ({"save_total_limit": -1}, "save.total_limit", 0),
    ({"num_train_epochs": 0, "max_steps": 9}, "train.max_steps", 9),
    ({"load_in_4bit": True}, "method.quantization", "nf4"),
    ({"load_in_8bit": True}, "method.quantization", "int8"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "method.quantization", "fp4"),
    ({"lora_target_modules": ["q_proj", "v_proj"]}, "lora.target_modules", ("q_proj", "v_proj")),
    ({"lora_target_modules": "all-linear"}, "lora.targets", "all-linear"),
    ({"lora_target_modules": [".*(q|v)_proj"]}, "lora.targets", "all-linear"),
    ({"loss_type": "ipo"}, "preference.dpo_loss_type", "ipo"),
    ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, "preference.sft_loss_weight", 0.5),
    ({"loss_type": ["sft", "ipo"]}, "preference.dpo_loss_type", "ipo"),
    ({"desirable_weight": 1.5}, "train.stage", "kto"),
    ({"center_rewards_coefficient": 0.01}, "train.stage", "reward"),
    ({"center_rewards_coefficient": 0.01, "learning_rate": "-"}, "train.learning_rate", 1e-4),
    ({"datasets": [{"path": "x/y", "name": "small", "split": "test"}]}, "data.hub_config", "small"),
    ({"datasets": [{"path": "json", "data_files": "a.json"}]}, "data.files", ("a.json",)),
    ({"datasets": [{"path": "/not/here"}]}, "data.files", ("/not/here",)),
    ({"datasets": [{"path": "./data", "data_files": "a.json"}]}, "data.files", ("data/a.json",)),
    ({"datasets": [{"path": "train.jsonl.gz"}]}, "data.files", ("train.jsonl.gz",)),
    ({"run_name": "n" * 90}, "logging.run_name", "n" * 80),
    ({"save_steps": 0}, "save.strategy", "no"),
    ({"eval_steps": 0.1}, "eval.strategy", "no"),
    ({"test_split_size": 0.1, "eval_strategy": "epoch", "eval_steps": 0.1}, "eval.strategy", "epoch"),
    ({"test_split_size": 0.1, "eval_strategy": "steps", "eval_steps": 30}, "eval.steps", 30),
    ({"test_split_size": 0.1, "eval_strategy": "steps", "eval_steps": 30}, "eval.strategy", "steps"),
    ({"test_split_size": 0.1, "eval_strategy": "steps"}, "eval.steps", 10),
    ({"test_split_size": 0.1, "eval_strategy": "steps", "eval_steps": 0.1}, "eval.strategy", "epoch"),
    ({"resume_from_checkpoint": True}, "save.resume_from", "latest"),
    ({"resume_from_checkpoint": "out/checkpoint-5"}, "save.resume_path", "out/checkpoint-5"),
    ({"save_strategy": False}, "save.strategy", "no"),
    ({"save_strategy": "best"}, "save.strategy", "epoch"),
    ({"save_steps": 0.25}, "save.strategy", "epoch"),
    ({"logging_steps": 0.1}, "logging.steps", 1),
    ({"completion_only_loss": False}, "data.loss_on", "all_tokens"),
    ({"dataset_text_field": "body"}, "data.text_column", "body"),
    ({"max_steps": 7}, "train.max_steps", 7),
    ({"warmup_ratio": 0.1}, "train.warmup_steps", 0.1),
    ({"fp16": True}, "precision.compute", "fp16"),
    ({"optim": "adamw_8bit"}, "train.optim", "adamw_bnb_8bit"),
    ({"bf16": False}, "precision.compute", "fp32"),
    ({"use_peft": False, "dtype": "bfloat16"}, "precision.compute", "pure_bf16"),
    ({"accelerate_config": "fsdp2"}, "parallel.strategy", "fsdp2"),
    ({"accelerate_config": "multi_gpu"}, "parallel.strategy", "ddp"),
    ({"deepspeed": "zero2.json"}, "parallel.strategy", "zero2"),
    ({"attn_implementation": "flash_attention_2"}, "model.attn_implementation", "flash_attention_2"),
    ({"use_flash_attention_2": True}, "model.attn_implementation", "flash_attention_2"),
    ({"use_flash_attn": False}, "model.attn_implementation", "auto"),
    ({"report_to": ["wandb"]}, "logging.report_to", "wandb"),
    ({"gradient_checkpointing": False}, "train.activation_checkpointing", False),
    ({"max_seq_length": 4096}, "data.max_length", 4096),
    ({"max_seq_length": 4096, "max_length": 512}, "data.max_length", 512),
    ({"test_split_size": 0.1, "evaluation_strategy": "epoch"}, "eval.strategy", "epoch"),
    (
        {"env": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 2}},
        "launch.env",
        {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"},
    ),
    ({"num_processes": 8, "accelerate_config": "zero3"}, "launch.nproc_per_node", 8),
    ({"num_processes": 8}, "parallel.strategy", "ddp"),
    ({"deepspeed": "ds_zero2_no_offload.json"}, "parallel.offload_optimizer", "none"),
    ({"deepspeed": "configs/cpu/stage3_no_offloading.conf"}, "parallel.strategy", "zero3"),
    ({"deepspeed": "configs/cpu/stage3_no_offloading.conf"}, "parallel.offload_param", "none"),
    ({"deepspeed": "ds-zero-3-no-offload.json"}, "parallel.offload_param", "none"),
    ({"deepspeed": "zero2_offload.json"}, "parallel.offload_optimizer", "cpu"),
    # The Trainer keeps fp32 weights where they are sharded, and DeepSpeed has no other.
    ({"use_peft": False, "dtype": "bfloat16", "accelerate_config": "zero3"}, "precision.compute", "bf16"),
    ({"use_peft": False, "torch_dtype": "bfloat16", "deepspeed": "ds.json"}, "precision.compute", "bf16"),
    ({"use_peft": False, "dtype": "bfloat16", "fsdp": "full_shard"}, "precision.compute", "bf16"),
    ({"use_peft": False, "dtype": "bfloat16", "fsdp": "full_shard", "bf16": False}, "precision.compute", "pure_bf16"),
    ({"use_peft": False, "dtype": "bfloat16", "num_processes": 8}, "precision.compute", "pure_bf16"),
    ({"bf16": False, "tf32": True}, "precision.compute", "tf32"),
    ({"train_sampling_strategy": "group_by_length"}, "train.train_sampling_strategy", "group_by_length"),
    ({"group_by_length": True}, "train.train_sampling_strategy", "group_by_length"),
    ({"activation_checkpointing": False}, "train.activation_checkpointing", False),
    ({"activation_checkpointing": True, "gradient_checkpointing": False}, "train.activation_checkpointing", True),
    ({"use_cpu": True}, "launch.device", "cpu"),
    ({"loss_type": "kto", "beta": 0.1}, "train.stage", "kto"),
    ({"loss_type": "apo_zero_unpaired"}, "preference.kto_loss_type", "apo_zero_unpaired"),
    ({"beta": 0.1, "rpo_alpha": 0.5}, "preference.sft_loss_weight", 0.5),
    ({"loss_type": ["dpo_norm"], "beta": 5}, "preference.dpo_loss_type", "sigmoid_norm"),
    ({"use_peft": "-", "lora_r": "-", "use_lora": True, "lora_rank": 64}, "lora.r", 64),
]


REFUSED = [  # (given, named)
    ({"reward_funcs": ["accuracy"]}, "grpo"),
    ({"beta": 0.1, "loss_type": "discopop_new"}, "loss_type: discopop_new"),
    ({"learning_rate": "high"}, "train.learning_rate"),
    ({"dataset_name": None, "datasets": []}, "datasets"),
    ({"test_split_size": "some"}, "test_split_size"),
    ({"max_length": "4k"}, r"max_length \(data.max_length\): "),
    ({"deepspeed": "zero2.json", "fsdp": "full_shard"}, "deepspeed and fsdp are both set"),
]


def test_intervals_that_differ_are_named(tmp_path):
    given = {"save_strategy": "best", "logging_steps": 0.1, "eval_strategy": "steps", "eval_steps": 0.2}
    found = read(tmp_path, **given, test_split_size=0.1, metric_for_best_model="eval_loss")
    texts = [text.partition(":")[0] for text in found.different]
    full = read(tmp_path, use_peft=False, dtype="auto").different
    assert any(text.startswith("dtype: auto") for text in full)
    assert {"save_strategy", "logging_steps", "eval_steps"} <= {*texts} and found.missing == [PUSH]


def test_an_interval_without_effect_is_not_named(tmp_path):
    found = read(tmp_path, save_strategy="no", save_steps=0.25)
    assert found.spec.save.strategy == "no" and not any("save_steps" in text for text in found.different)


def test_limits_that_only_one_has_are_named(tmp_path):
    found = read(tmp_path, max_length=None, run_name="n" * 90)
    assert found.spec.data.max_length == 1024
    named = {text.partition(":")[0] for text in found.different}
    assert {"run_name", "max_length"} <= named and "max_length" not in str(read(tmp_path).different)


def test_keys_whose_option_is_hidden_are_named(tmp_path):
    found = read(tmp_path, beta=0.1, label_smoothing=0.1, loss_type="sigmoid", packing=True)
    reason = "has no effect with the other options"
    assert sorted(found.missing) == [
        f"label_smoothing: 0.1 (preference.label_smoothing {reason})",
        f"packing: True (data.packing {reason})",
        PUSH,
    ]
    assert changes(found.spec).keys().isdisjoint({"preference.label_smoothing", "data.packing"})


def test_what_is_not_taken_over_is_named(tmp_path):
    given = {"eos_token": "<|im_end|>", "attn_implementation": "kernels-community/flash-attn", "eval_strategy": "steps"}
    given |= {"average_tokens_across_devices": False}
    missing = read(
        tmp_path, **given, accelerate_config="my.yaml", datasets=[{"path": "a/b", "columns": ["x"], "data_dir": "d"}]
    ).missing
    keys = ("eos_token", "attn_implementation", "eval_strategy", "accelerate_config", "average_tokens_across_devices")
    for named in (*keys, "push_to_hub", "datasets[0].columns", "datasets[0].data_dir"):
        assert any(text.startswith(named) for text in missing), (named, missing)


@pytest.mark.parametrize(
    "given", [{"fsdp": "full_shard auto_wrap offload"}, {"fsdp": True, "fsdp_config": {"offload_params": True}}]
)
def test_fsdp_of_the_trainer(tmp_path, given):
    parallel = read(tmp_path, **given).spec.parallel
    assert (parallel.strategy, parallel.reshard_after_forward, parallel.cpu_offload) == ("fsdp2", True, True)


def test_keys_and_values_of_the_wrong_type_are_named(tmp_path):
    files = {"path": "json", "data_files": {"train": "a.json"}, "split": ["test"]}
    found = read(tmp_path, datasets=[{"path": "a/b"}, files], fsdp_config={1: 2})
    assert "fsdp_config.1: 2" in found.missing and found.spec.parallel.strategy == "fsdp2"


def test_generations_need_the_number_of_prompts(tmp_path):
    found = read(tmp_path, generate_during_eval=True)
    assert "generate_during_eval (set eval.num_generations, then eval.generate_during_eval)" in found.missing
    assert not any("generate" in text for text in read(tmp_path, generate_during_eval=False).missing)


def test_the_mixture_of_the_alignment_handbook(tmp_path):
    parts = [
        {"id": "a/chat", "config": "default", "split": "train_sft", "weight": 0.5, "columns": ["messages"]},
        {"id": "b/chat"},
    ]
    table = {"model_name_or_path": "c/d", "dataset_mixture": {"datasets": parts, "test_split_size": 0.1}}
    assert detect_format(yaml.safe_dump(table)) == "trl"
    found = import_file(yaml.safe_dump({**table, "eval_strategy": "epoch"}), RunSpec(), tmp_path)
    first, second = found.spec.data.datasets
    assert (first.hub_id, first.hub_config, first.hub_split) == ("a/chat", "default", "train_sft")
    assert (first.format, first.weight, first.validation_split) == ("messages", 0.5, 0.1)
    assert (second.hub_id, second.format, second.weight, second.validation_split) == ("b/chat", "auto", 1.0, 0.1)
    assert found.missing == []
    assert any(text.startswith("dataset_mixture.datasets[0].weight: 0.5: Footplate draws") for text in found.different)


def test_several_datasets(tmp_path):
    """Of the Hub and of files; columns that are those of a format, or not; and one without a path."""
    given = [
        {"path": "trl-lib/tldr", "split": "train", "columns": ["prompt", "completion"]},
        {"path": "json", "data_files": {"train": "a.jsonl", "test": "b.jsonl"}, "columns": ["messages"]},
        {"path": "trl-lib/Capybara", "columns": ["messages", "source"], "name": "x"},
        {"name": "y"},
    ]
    found = read(tmp_path, datasets=given, test_split_size=0.1)
    first, second, third = found.spec.data.datasets
    assert (first.hub_id, first.format, first.validation) == ("trl-lib/tldr", "prompt_completion", "split")
    assert (second.source, second.files, second.format) == ("files", ("a.jsonl",), "messages")
    assert (third.hub_id, third.hub_config, third.format) == ("trl-lib/Capybara", "x", "auto")
    named = [text for text in found.missing if text.startswith("datasets")]
    assert [text.split(":")[0] for text in named] == ["datasets[3]", "datasets[2].columns"]


def test_the_mixer_of_the_earlier_alignment_handbook(tmp_path):
    table = {
        "model_name_or_path": "c/d", "dataset_mixer": {"a/chat": 1.0, "b/chat": 0.5}, "beta": 0.01,
        "dataset_splits": ["train_prefs", "test_prefs"], "evaluation_strategy": "steps", "torch_dtype": "float16",
    }  # fmt: skip
    assert detect_format(yaml.safe_dump(table)) == "trl"
    found = import_file(yaml.safe_dump(table), RunSpec(), tmp_path)
    first, second = found.spec.data.datasets
    assert (first.hub_id, first.hub_split, first.weight) == ("a/chat", "train_prefs", 1.0)
    assert (second.hub_id, second.hub_split, second.weight) == ("b/chat", "train_prefs", 0.5)
    assert found.spec.train.stage == "dpo"
    assert any(text.startswith("dataset_mixer.b/chat.weight: 0.5: Footplate draws") for text in found.different)


def test_numbers_of_examples_in_the_mixer_of_open_instruct(tmp_path):
    table = {"model_name_or_path": "c/d", "dataset_mixer": {"a/x": 9500, "b/y": 1.0}}
    found = import_file(yaml.safe_dump(table), RunSpec(), tmp_path)
    first, second = found.spec.data.datasets
    assert (first.max_samples, first.weight, second.max_samples, second.weight) == (9500, 1.0, 0, 1.0)
    assert "dataset_mixer.a/x: 9500 examples, which Footplate draws at random" in found.different
    assert found.missing == [] and "assistant_only_loss" in str(found.different)
    named = import_file(yaml.safe_dump({**table, "with_tracking": True}), RunSpec(), tmp_path).different
    assert "assistant_only_loss" not in str(named), "open-instruct trains on the assistant's messages only, too"


def test_values_that_change_nothing_are_not_named(tmp_path):
    given = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    given |= {"activation_checkpointing_kwargs": {"use_reentrant": False}, "loss_type": "chunked_nll"}
    assert read(tmp_path, **given, train_sampling_strategy="random").missing == [PUSH]
    given |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.2}, "train_sampling_strategy": "sequential"}
    named = {text.partition(":")[0] for text in read(tmp_path, **given).missing}
    assert named == {"push_to_hub", "lr_scheduler_kwargs", "train_sampling_strategy"}


def test_shares_and_configurations_of_the_mixer(tmp_path):
    table = {"model_name_or_path": "c/d", "dataset_mixer": {"a/x": 0, "b/y": 0.5}, "dataset_configs": ["one", "two"]}
    found = import_file(yaml.safe_dump(table), RunSpec(), tmp_path)
    assert (found.spec.data.hub_id, found.spec.data.hub_config, found.spec.data.sources) == ("b/y", "two", ())
    assert found.missing == [
        "dataset_mixer.a/x: 0 (none of it is used)",
        "dataset_mixer.b/y.weight: 0.5 (all examples are used; data.max_samples sets their number)",
    ]


def test_a_misspelled_key_has_a_suggestion(tmp_path):
    """A key that the importer does not read is no misspelling of a key with fewer words, nor of one that is there."""
    keys = {"weigth_decay": 0.1, "dataloader_prefetch_factor": 4, "lora_rr": 8, "hub_model_id": "me/qwen"}
    assert {*read(tmp_path, **keys).missing} >= {
        "weigth_decay: 0.1 (did you mean weight_decay?)",
        "dataloader_prefetch_factor: 4",
        "lora_rr: 8",
        "hub_model_id: me/qwen (footplate publish uploads a finished run)",
    }
