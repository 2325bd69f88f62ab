"""axolotl's YAML as a spec: what is taken over, what means something else, and what is refused."""

from copy import deepcopy

import pytest
import yaml

from backend.config import RunSpec, Source
from backend.config.options import effective, plain
from backend.importers import detect_format, import_file

LORA = {
    "base_model": "NousResearch/Llama-3.2-1B", "load_in_8bit": True, "load_in_4bit": False, "adapter": "lora",
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}], "val_set_size": 0.1,
    "output_dir": "./outputs/lora-out", "sequence_len": 2048, "sample_packing": True, "pad_to_sequence_len": True,
    "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["gate_proj", "q_proj"],
    "wandb_project": None, "gradient_accumulation_steps": 2, "micro_batch_size": 2, "num_epochs": 1,
    "optimizer": "adamw_8bit", "lr_scheduler": "cosine", "learning_rate": 0.0002, "bf16": "auto", "tf32": False,
    "gradient_checkpointing": True, "flash_attention": True, "warmup_ratio": 0.1, "evals_per_epoch": 4,
    "saves_per_epoch": 1, "weight_decay": 0.0,
}  # fmt: skip


def read(tmp_path, **more):
    table = {**LORA, **more}
    return import_file(
        yaml.safe_dump({key: value for key, value in table.items() if value != "-"}), RunSpec(), tmp_path
    )


def test_streaming(tmp_path):
    data = read(tmp_path, streaming=True, max_steps=100).spec.data
    assert data.streaming and not read(tmp_path).spec.data.streaming


def test_lora(tmp_path):
    assert detect_format(yaml.safe_dump(LORA)) == "axolotl"
    found = read(tmp_path)
    spec = found.spec
    assert (spec.model.source, spec.model.hub_id) == ("hub", "NousResearch/Llama-3.2-1B")
    assert (spec.data.source, spec.data.hub_id, spec.data.format) == ("hub", "teknium/GPT4-LLM-Cleaned", "alpaca")
    assert (spec.data.max_length, spec.data.packing, spec.data.validation_split) == (2048, True, 0.1)
    assert (spec.method.kind, spec.method.quantization) == ("lora", "int8")
    assert (spec.lora.r, spec.lora.alpha, spec.lora.target_modules) == (16, 32, ("gate_proj", "q_proj"))
    assert (spec.train.optim, spec.train.warmup_steps, spec.train.num_train_epochs) == ("adamw_bnb_8bit", 0.1, 1)
    assert (spec.train.per_device_train_batch_size, spec.eval.per_device_eval_batch_size) == (2, 2)
    assert spec.train.activation_checkpointing and spec.model.attn_implementation == "flash_attention_2"
    assert (spec.save.strategy, spec.eval.strategy, spec.save.total_limit) == ("epoch", "epoch", 4)
    assert [text.split(":")[0] for text in found.different] == [
        "datasets[0].type", "excess_length_strategy", "evals_per_epoch",
    ]  # fmt: skip
    assert found.missing == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rl": "dpo"}, ["excess_length_strategy: axolotl drops longer examples, Footplate truncates them"]),
        ({"reward_model": True, "num_labels": 1}, []),
        (
            {"reward_model": True, "excess_length_strategy": "truncate"},
            ["excess_length_strategy: axolotl truncates longer pairs, Footplate drops them"],
        ),
        ({"datasets": [{"path": "a/b", "type": "completion"}]}, []),
    ],
)
def test_what_becomes_of_long_examples(tmp_path, given, told):
    """Both drop long pairs of reward models, and split the texts of pretraining."""
    found = read(tmp_path, sample_packing=False, **given)
    assert [text for text in found.different if text.startswith("excess_length_strategy")] == told
    assert not any(text.startswith("num_labels") for text in found.missing)


def test_defaults_are_those_of_axolotl(tmp_path):
    text = "base_model: a/b\ndatasets:\n  - path: c/d\n    type: chat_template\nlearning_rate: 0.00001\nbf16: true\n"
    found = import_file(text, RunSpec(), tmp_path)
    train = found.spec.train
    assert (train.per_device_train_batch_size, train.num_train_epochs, train.optim) == (1, 1.0, "adamw_torch_fused")
    assert (train.warmup_steps, train.lr_scheduler_type, train.activation_checkpointing) == (0.03, "cosine", False)
    assert (found.spec.data.max_length, found.spec.data.validation, found.spec.eval.strategy) == (512, "none", "no")
    assert (found.spec.method.kind, found.spec.precision.compute) == ("full", "pure_bf16"), "weights are loaded in bf16"


FULL = {"adapter": None, "load_in_8bit": False}
QLORA = {"adapter": "qlora", "load_in_8bit": False, "load_in_4bit": True}
# (given, option, value); test_imported_options.py tests both tables.
OPTIONS = [
    ({"save_total_limit": 0}, "save.total_limit", 4),
    ({"save_total_limit": -1}, "save.total_limit", 0),
    ({"context_parallel_size": 0}, "parallel.context_parallel_size", 1),
    ({"dp_replicate_size": 0}, "parallel.replicate_size", 1),
    ({"eval_batch_size": 0}, "eval.per_device_eval_batch_size", 2),
    ({"adapter": "qlora", "load_in_8bit": False, "load_in_4bit": True}, "method.quantization", "nf4"),
    ({"lora_target_linear": True}, "lora.targets", "all-linear"),
    ({"lora_target_modules": "all-linear"}, "lora.targets", "all-linear"),
    ({"peft_use_dora": True}, "lora.use_dora", True),
    ({"peft_init_lora_weights": "pissa_niter_16"}, "lora.init", "pissa_fast"),
    ({"loraplus_lr_ratio": 16}, "lora.loraplus_lr_ratio", 16),
    ({"adapter": None, "load_in_8bit": False}, "method.kind", "full"),
    ({"rl": "dpo", "rl_beta": 0.2}, "preference.beta", 0.2),
    ({"rl": "ipo"}, "preference.dpo_loss_type", "ipo"),
    ({"rl": "dpo", "dpo_loss_type": ["hinge", "sft"], "dpo_loss_weights": [1, 2]}, "preference.sft_loss_weight", 2),
    ({"rl": "orpo", "orpo_alpha": 0.3}, "preference.beta", 0.3),
    ({"rl": "kto", "kto_undesirable_weight": 0.5}, "preference.undesirable_weight", 0.5),
    ({"reward_model": True}, "train.stage", "reward"),
    ({"datasets": [{"path": "a/b", "type": "completion", "field": "body"}]}, "train.stage", "pretraining"),
    ({"datasets": [{"path": "a/b", "type": "completion", "field": "body"}]}, "data.text_column", "body"),
    ({"datasets": "-", "pretraining_dataset": "c/d"}, "train.stage", "pretraining"),
    ({"datasets": [{"path": "a/b", "name": "x", "split": "train[:5%]"}]}, "data.hub_split", "train[:5%]"),
    ({"datasets": [{"path": "json", "data_files": ["a.json", "b.json"]}]}, "data.files", ("a.json", "b.json")),
    ({"datasets": [{"path": "a.jsonl", "field_messages": "talk"}]}, "data.messages_column", "talk"),
    ({"test_datasets": [{"path": "test.jsonl"}]}, "data.validation_files", ("test.jsonl",)),
    ({"train_on_inputs": True}, "data.loss_on", "all_tokens"),
    ({"chat_template": "chatml"}, "data.chat_template", "chatml"),
    ({"max_steps": 70}, "train.max_steps", 70),
    (
        {
            "early_stopping_patience": 3,
            "val_set_size": 0.1,
            "save_steps": 20,
            "eval_steps": 10,
            "evals_per_epoch": "-",
            "saves_per_epoch": "-",
        },
        "save.load_best_model_at_end",
        True,
    ),
    (
        {
            "load_best_model_at_end": True,
            "val_set_size": 0.1,
            "saves_per_epoch": 1,
            "evals_per_epoch": 4,
            "num_epochs": 2,
        },
        "save.load_best_model_at_end",
        True,
    ),
    (
        {
            "load_best_model_at_end": True,
            "val_set_size": 0.1,
            "save_steps": 20,
            "eval_steps": 15,
            "evals_per_epoch": "-",
            "saves_per_epoch": "-",
        },
        "save.load_best_model_at_end",
        False,
    ),
    ({"load_best_model_at_end": True, "val_set_size": 0}, "save.load_best_model_at_end", False),
    ({"warmup_steps": 0}, "train.warmup_steps", 0),
    ({"warmup_steps": 20, "warmup_ratio": "-"}, "train.warmup_steps", 20),
    ({"cosine_min_lr_ratio": 0.1}, "train.lr_scheduler_type", "cosine_with_min_lr"),
    ({"cosine_min_lr_ratio": 0.1, "lr_scheduler": "linear"}, "train.lr_scheduler_type", "linear"),
    ({"optimizer": "ao_adamw_8bit"}, "train.optim", "adamw_torch_8bit"),
    ({"bf16": True}, "precision.compute", "bf16"),
    ({"bf16": False, "fp16": True}, "precision.compute", "fp16"),
    ({"bf16": False, "tf32": True}, "precision.compute", "tf32"),
    ({"bf16": None}, "precision.compute", "fp32"),
    ({"bf16": "-"}, "precision.compute", "auto"),
    ({"bf16": "-", "adapter": None, "load_in_8bit": False}, "precision.compute", "pure_bf16"),
    ({"bf16": "-", "fp16": True}, "precision.compute", "fp16"),
    ({"torch_compile": "auto"}, "train.torch_compile", True),
    ({"evaluation_strategy": "no", "evals_per_epoch": "-"}, "eval.strategy", "no"),
    ({"save_strategy": False, "saves_per_epoch": "-"}, "save.strategy", "no"),
    ({"save_strategy": "steps", "saves_per_epoch": "-"}, "save.steps", 500),
    ({"eval_strategy": "steps", "evals_per_epoch": "-", "logging_steps": 7}, "eval.steps", 7),
    ({"datasets": [{"path": "~/data", "type": "alpaca"}]}, "data.files", ("~/data",)),
    (
        {"wandb_project": "mine", "wandb_mode": "offline"},
        "launch.env",
        {"WANDB_PROJECT": "mine", "WANDB_MODE": "offline"},
    ),
    ({"rl": "dpo", "datasets": [{"path": "a/b", "type": {"field_prompt": "q"}}]}, "data.prompt_column", "q"),
    ({"rl": "dpo", "datasets": [{"path": "a/b", "type": {"field_chosen": "y"}}]}, "data.chosen_column", "y"),
    ({"rl": "kto", "datasets": [{"path": "a/b", "type": {"field_label": "ok"}}]}, "data.format", "labels"),
    ({"datasets": [{"path": "a/b", "type": {"field_instruction": "q"}}]}, "data.format", "prompt_completion"),
    ({"datasets": [{"path": "a/b", "type": {"field_output": "y"}}]}, "data.completion_column", "y"),
    ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, "train.use_liger_kernel", True),
    ({"flash_attention": False, "attn_implementation": "sdpa"}, "model.attn_implementation", "sdpa"),
    ({"saves_per_epoch": "-", "save_steps": 50}, "save.steps", 50),
    ({"evals_per_epoch": "-", "eval_steps": 20}, "eval.steps", 20),
    ({"wandb_project": "mine"}, "logging.report_to", "wandb"),
    ({"resume_from_checkpoint": "out/checkpoint-9"}, "save.resume_path", "out/checkpoint-9"),
    ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"}, "parallel.offload_param", "cpu"),
    ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}}, "parallel.strategy", "fsdp2"),
    ({"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}}, "parallel.reshard_after_forward", False),
    ({"fsdp": ["full_shard"], "fsdp_config": {"fsdp_offload_params": True}}, "parallel.cpu_offload", True),
    ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_params.json"}, "parallel.offload_param", "cpu"),
    ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_params.json"}, "parallel.offload_optimizer", "none"),
    ({"tensor_parallel_size": 4}, "parallel.tensor_parallel_size", 4),
    ({"rl": "dpo", "rpo_alpha": 0.5}, "preference.sft_loss_weight", 0.5),
    ({"noisy_embedding_alpha": 5}, "train.neftune_noise_alpha", 5),
    ({"sequence_parallel_degree": 2}, "parallel.context_parallel_size", 2),
    ({"gradient_accumulation_steps": None, "batch_size": 12}, "train.gradient_accumulation_steps", 6),
    ({"gradient_accumulation_steps": 0, "batch_size": 12}, "train.gradient_accumulation_steps", 6),
    ({"gradient_accumulation_steps": "-", "batch_size": 12}, "train.gradient_accumulation_steps", 1),
    ({**FULL, "bf16": True, "fsdp": ["full_shard"]}, "precision.compute", "bf16"),
    ({**FULL, "bf16": "auto", "fsdp": ["full_shard"]}, "precision.compute", "auto"),
    ({**FULL, "bf16": True, "fsdp_version": 2, "fsdp": ["full_shard"]}, "precision.compute", "pure_bf16"),
    ({**FULL, "bf16": "full", "fsdp": ["full_shard"]}, "precision.compute", "pure_bf16"),
    ({**FULL, "bfloat16": True, "deepspeed": "zero2.json"}, "precision.compute", "bf16"),
    ({**FULL, "bf16": False, "bfloat16": True}, "precision.compute", "pure_bf16"),
    ({"bf16": True, "bfloat16": True}, "precision.compute", "bf16"),
    (
        {**QLORA, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
        "method.bnb_4bit_use_double_quant",
        False,
    ),
    ({**QLORA, "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}}, "method.quantization", "fp4"),
]


REFUSED = [  # (given, named)
    ({"rl": "grpo"}, "rl: grpo"),
    ({"rl": {"name": "dpo"}}, "rl: {'name': 'dpo'}"),
    ({"adapter": "llama-adapter"}, "adapter: llama-adapter"),
    ({"process_reward_model": True}, "process_reward_model"),
    ({"datasets": [{"type": "alpaca"}]}, "datasets"),
    ({"datasets": [3, None, {"path": ["a"]}]}, "datasets"),
    ({"datasets": [{"path": f"a/{n}"} for n in range(33)]}, "must have at most 32 entries, but has 33"),
    ({"datasets": [{"path": "a/b", "shards": "some"}]}, r"datasets\[0\].shards: some"),
    ({"learning_rate": "high"}, "train.learning_rate"),
    ({"max_steps": "many"}, "max_steps"),
    ({"sequence_len": [1]}, r"sequence_len \(data.max_length\): "),
    ({"deepspeed": "zero2.json", "fsdp": ["full_shard"]}, "deepspeed and fsdp are both set"),
]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (
            {"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
            "plugins: axolotl.integrations.cut",
        ),
        ({"special_tokens": {"pad_token": "<pad>"}}, "special_tokens.pad_token: <pad>"),
        ({"optimizer": "came_pytorch"}, "optimizer: came_pytorch"),
        ({"datasets": [{"path": "a/b", "roles_to_train": ["x"]}]}, "datasets[0].roles_to_train: ['x']"),
        ({"datasets": [{"path": "a/b"}, {"path": "c/d", "train_on_eos": "all"}]}, "datasets[1].train_on_eos: all"),
        ({"datasets": [{"path": "a/b", "roles": {"assistant": ["gpt", "bot"]}}]}, "datasets[0].roles.assistant: "),
        ({"datasets": [{"path": "a/b", "shards": 4}]}, "datasets[0].shards: 4 (all examples are used"),
        ({"datasets": [{"path": "a/b", "data_files": ["x.json"]}]}, "datasets[0].data_files: ['x.json']"),
        ({"datasets": [{"path": "a/b", "revision": "v2"}]}, "datasets[0].revision: v2"),
        (
            {"datasets": [{"path": "a.jsonl", "split": "train[:5%]"}]},
            "datasets[0].split: train[:5%] (no effect on local files)",
        ),
        ({"datasets": [{"path": "a/b", "type": "alpaca", "field_messages": "x"}]}, "datasets[0].field_messages: x"),
        ({"datasets": [{"path": "a/b", "type": "sharegpt", "field_messages": "x"}]}, "datasets[0].field_messages: x"),
        (
            {"datasets": [{"path": "a/b", "type": "chat_template", "message_property_mappings": {"role": "who"}}]},
            "datasets[0].message_property_mappings: {'role': 'who'}",
        ),
        (
            {"chat_template": "chatml", "datasets": [{"path": "a/b"}, {"path": "c/d", "chat_template": "llama3"}]},
            "datasets[1].chat_template: llama3",
        ),
        (
            {"test_datasets": [{"path": "a/b", "split": "test"}]},
            "test_datasets[0]: a/b (validation files must be local",
        ),
        ({"test_datasets": [{"path": "t.jsonl", "type": "completion"}]}, "test_datasets[0]: t.jsonl (no training"),
        ({"val_set_size": 20}, "val_set_size: 20"),
        ({"torch_compile": True, "deepspeed": "zero2.json"}, "torch_compile: True (train.torch_compile has no effect"),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing: offload"),
        ({"unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters"),
        (
            {"datasets": [{"path": "a/b", "type": {"field_output": "y", "format": "{instruction}"}}]},
            "datasets[0].type.format: {instruction}",
        ),
        ({"shuffle_merged_datasets": False}, "shuffle_merged_datasets: False"),
        ({"wandb_project": "x", "use_mlflow": True}, "use_mlflow"),
        ({"something_new": 5}, "something_new: 5"),
        ({"batch_size": 12, "gradient_accumulation_steps": "-"}, "batch_size: 12 (axolotl uses gradient_accumulation"),
        ({**QLORA, "bnb_config_kwargs": {"llm_int8_threshold": 5}}, "bnb_config_kwargs.llm_int8_threshold: 5"),
        ({"lora_target_modules": "layers.[\\d]+.mlp.(up|down)_proj"}, "lora_target_modules: layers.[\\d]+.mlp.(up|"),
    ],
)
def test_what_is_not_taken_over_is_named(tmp_path, given, named):
    found = read(tmp_path, **given)
    assert any(text.startswith(named) for text in (*found.missing, *found.different)), found.missing


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rl": "kto", "datasets": [{"path": "a/b", "type": "llama3.ultra"}]}, "datasets[0].type: llama3.ultra"),
        ({"datasets": [{"path": "a/b"}, {"path": "c/d", "shards": 4}]}, "datasets[1].shards: 4: Footplate draws"),
        ({"dp_shard_size": 4}, "dp_shard_size: 4"),
        ({"save_total_limit": 0}, "save_total_limit: 0: axolotl keeps 4 checkpoints"),
        ({"eval_strategy": "steps", "evals_per_epoch": "-"}, "eval_strategy: steps: Footplate evaluates once"),
        ({"fsdp": ["hybrid_shard"], "fsdp_config": {"sharding_strategy": "FULL_SHARD"}}, "fsdp: hybrid_shard"),
    ],
)  # fmt: skip
def test_what_differs_is_named(tmp_path, given, named):
    assert any(text.startswith(named) for text in read(tmp_path, **given).different), read(tmp_path, **given).different


def test_a_folder_of_files(tmp_path):
    (tmp_path / "mine").mkdir()
    found = read(tmp_path, base_model="mine", datasets=[{"path": "mine", "data_files": "a.jsonl"}])
    assert (found.spec.model.source, found.spec.model.path) == ("path", "mine")
    assert found.spec.data.files == ("mine/a.jsonl",)


# Of examples/llama-3/lora-1b-deduplicate-dpo.yml; conversations of several datasets; instructions and plain text.
PREFERENCES = {
    "path": "fozziethebeat/alpaca_messages_2k_dpo_test", "type": "chat_template.default",
    "field_messages": "conversation", "field_chosen": "chosen", "field_rejected": "rejected",
    "message_property_mappings": {"role": "role", "content": "content"},
    "roles": {"system": ["system"], "user": ["user"], "assistant": ["assistant"]},
}  # fmt: skip
CONVERSATIONS = [
    {"path": "mlabonne/FineTome-100k", "type": "chat_template", "split": "train[:20%]",
     "field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"},
     "roles_to_train": ["assistant"], "train_on_eos": "turn"},
    {"path": "HuggingFaceTB/smoltalk", "type": "chat_template", "name": ["everyday-conversations", "smol-magpie"]},
    {"path": "data/sft_train.jsonl", "ds_type": "json", "type": "chat_template", "shards": 4, "shards_idx": 1},
]  # fmt: skip
INSTRUCTIONS = [
    {"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"},
    {"path": "json", "data_files": ["notes.jsonl", "more.jsonl"], "type": "completion", "field": "body"},
    {"path": "own.jsonl", "type": {"field_instruction": "q", "field_output": "a"}},
]  # fmt: skip


def options_of(spec):
    """The options of each dataset that are not its defaults."""
    return [
        plain(each)
        for each in (Source(**{name: getattr(spec.data, name) for name in Source.model_fields}), *spec.data.sources[1:])
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            CONVERSATIONS,
            [
                {"source": "hub", "hub_id": "mlabonne/FineTome-100k", "hub_split": "train[:20%]",
                 "format": "sharegpt", "messages_column": "conversations"},
                {"source": "hub", "hub_id": "HuggingFaceTB/smoltalk", "hub_config": "everyday-conversations"},
                {"source": "hub", "hub_id": "HuggingFaceTB/smoltalk", "hub_config": "smol-magpie"},
                {"source": "files", "files": ["data/sft_train.jsonl"], "weight": 0.25},
            ],
        ),
        (
            INSTRUCTIONS,
            [
                {"source": "hub", "hub_id": "mhenrichsen/alpaca_2k_test", "format": "alpaca"},
                {"source": "files", "files": ["notes.jsonl", "more.jsonl"], "format": "text", "text_column": "body"},
                {"source": "files", "files": ["own.jsonl"], "format": "prompt_completion", "prompt_column": "q",
                 "completion_column": "a"},
            ],
        ),
    ],
)  # fmt: skip
def test_every_dataset_of_a_list(tmp_path, given, expected):
    found = read(tmp_path, datasets=given)
    expected = [{**each, "validation_split": 0.1} for each in expected]
    assert options_of(found.spec) == expected
    assert (found.spec.data.mixing, found.spec.train.stage, found.missing) == ("concatenate", "sft", [])
    own = [text.split(".")[0] for text in found.different if "puts its own text around prompts" in text]
    assert own == (["datasets[0]", "datasets[2]"] if given is INSTRUCTIONS else [])
    assert effective(found.spec).data.datasets[1:] == found.spec.data.datasets[1:], "each option has an effect"


def test_the_same_dataset_twice(tmp_path):
    """dataset_exact_deduplication makes one copy of it."""
    found = read(
        tmp_path,
        rl="dpo",
        datasets=[PREFERENCES, deepcopy(PREFERENCES)],
        dataset_exact_deduplication=True,
        val_set_size=0,
    )
    one = {"source": "hub", "hub_id": PREFERENCES["path"], "format": "pairs", "prompt_column": "conversation",
           "chosen_column": "chosen", "rejected_column": "rejected", "validation": "none"}  # fmt: skip
    assert options_of(found.spec) == [one, one] and found.spec.data.drop_duplicates
    assert [text for text in found.missing if text.startswith("datasets")] == []


def test_test_datasets_belong_to_the_dataset_with_their_format(tmp_path):
    tests = [
        {"path": "talks.jsonl", "type": "chat_template"},
        {"path": "facts.jsonl", "type": "alpaca"},
        {"path": "more.jsonl", "type": "alpaca", "shards": 2},
    ]
    given = [{"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}]
    found = read(tmp_path, datasets=given, test_datasets=tests, val_set_size=0)
    first, second = found.spec.data.datasets
    assert (first.validation, first.validation_files) == ("files", ("facts.jsonl", "more.jsonl"))
    assert (second.validation, second.validation_files) == ("files", ("talks.jsonl",))
    assert found.missing == ["test_datasets[2].shards: 2 (all of its examples are used)"]
    assert found.spec.eval.strategy == "epoch"


def test_what_holds_for_all_datasets(tmp_path):
    given = [{"path": "a/b", "type": "alpaca"}, {"path": "c/d", "chat_template": "chatml", "type": "chat_template"}]
    found = read(tmp_path, datasets=given, default_system_message="Be brief.", chat_template="chatml")
    assert [each.system_prompt for each in found.spec.data.datasets] == ["Be brief.", "Be brief."]
    assert found.spec.data.chat_template == "chatml" and found.missing == []


def test_a_dataset_without_a_path_is_named(tmp_path):
    found = read(tmp_path, datasets=[{"type": "alpaca"}, "a/b", 3])
    assert (found.spec.data.hub_id, found.spec.data.sources) == ("a/b", ())
    assert [text.split(" (")[1] for text in found.missing] == ["a dataset needs a path)"] * 2
    assert found.missing[1].startswith("datasets[2]: 3 ")


@pytest.mark.parametrize(
    ("given", "expected", "missing"),
    [
        ({"fsdp": ["full_shard", "auto_wrap"]}, ("fsdp1", "full_shard", False), []),
        ({"fsdp": ["shard_grad_op", "auto_wrap", "offload"]}, ("fsdp1", "shard_grad_op", True), []),
        ({"fsdp": "full_shard auto_wrap offload"}, ("fsdp1", "full_shard", True), []),
        ({"fsdp": "hybrid_shard"}, ("fsdp1", "hybrid_shard", False), []),
        ({"fsdp": ["full_shard"], "fsdp_config": {"fsdp_sharding_strategy": 2}}, ("fsdp1", "shard_grad_op", False), []),
        ({"fsdp_config": {"fsdp_version": 2, "offload_params": "true"}}, ("fsdp2", "full_shard", True), []),
        ({"fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
         ("fsdp2", "full_shard", False), []),
        ({"fsdp_version": "2", "fsdp_config": {"cpu_offload_pin_memory": True}}, ("fsdp2", "full_shard", False),
         ["fsdp_config.cpu_offload_pin_memory: True"]),
        ({"fsdp": ["full_shard", "fully_wrap"]}, ("fsdp1", "full_shard", False), ["fsdp: fully_wrap"]),
        ({"fsdp": None, "fsdp_config": None}, ("single", "full_shard", False), []),
        ({"fsdp": [], "fsdp_config": {}}, ("single", "full_shard", False), []),
        ({"fsdp_version": 2}, ("single", "full_shard", False), []),
    ],
)  # fmt: skip
def test_every_form_of_fsdp(tmp_path, given, expected, missing):
    found = read(tmp_path, **given)
    parallel = found.spec.parallel
    assert (parallel.strategy, parallel.sharding_strategy, parallel.cpu_offload) == expected
    assert found.missing == missing


def test_fsdp_settings_keep_gradient_checkpointing(tmp_path):
    config = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    spec = read(tmp_path, fsdp=["full_shard"], fsdp_config=config).spec
    assert spec.train.activation_checkpointing
    assert (spec.parallel.transformer_layer_cls_to_wrap, spec.parallel.state_dict_type) == (
        ("LlamaDecoderLayer",),
        "sharded",
    )


def test_tensor_parallelism_with_fsdp(tmp_path):
    found = read(tmp_path, tensor_parallel_size=4, fsdp_version=2, fsdp_config={"offload_params": False})
    assert (found.spec.parallel.strategy, found.spec.parallel.tensor_parallel_size) == ("tensor", 4)
    assert any(text.startswith("fsdp_config: with tensor parallelism") for text in found.different)
