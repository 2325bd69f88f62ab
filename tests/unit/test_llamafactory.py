"""LLaMA-Factory's training YAML as a spec: what is taken over, what means something else, and what is refused."""

import json

import pytest
import yaml
from small import client

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import SpecError, by_name, changes
from backend.importers import detect_format, import_file
from backend.registry.llamafactory_names import OPTION_NAMES

LORA = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "trust_remote_code": True, "stage": "sft",
    "do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "dataset": "identity",
    "template": "llama3", "cutoff_len": 4096, "max_samples": 1000, "preprocessing_num_workers": 16,
    "output_dir": "saves/x", "logging_steps": 10, "save_steps": 500, "plot_loss": True, "overwrite_output_dir": True,
    "report_to": "none", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
    "ddp_timeout": 180000000, "resume_from_checkpoint": None,
}  # fmt: skip


def read(tmp_path, **more):
    table = {**LORA, **more}
    return import_file(
        yaml.safe_dump({key: value for key, value in table.items() if value != "-"}), RunSpec(), tmp_path
    )


def test_lora(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"identity": {"file_name": "identity.json"}}))
    found = read(tmp_path)
    assert detect_format(yaml.safe_dump(LORA)) == "llamafactory"
    spec = found.spec
    assert (spec.model.source, spec.model.hub_id) == ("hub", "meta-llama/Meta-Llama-3-8B-Instruct")
    assert (spec.data.source, spec.data.files) == ("files", ("data/identity.json",))
    assert (spec.data.max_length, spec.data.max_samples, spec.data.validation) == (4096, 1000, "none")
    assert (spec.lora.r, spec.lora.alpha, spec.lora.targets) == (8, 16, "all-linear")
    assert (spec.train.learning_rate, spec.train.warmup_steps, spec.train.lr_scheduler_type) == (1e-4, 0.1, "cosine")
    assert spec.train.activation_checkpointing and spec.precision.compute == "bf16"
    assert (spec.save.strategy, spec.save.steps, spec.save.total_limit) == ("steps", 500, 0)
    assert [text.split(":")[0] for text in found.different] == ["template", "ddp_timeout"]
    assert found.missing == []


@pytest.mark.parametrize(("stage", "is_told"), [("rm", True), ("dpo", False)])
def test_long_pairs_of_reward_models(tmp_path, stage, is_told):
    text = "cutoff_len: LLaMA-Factory truncates longer pairs, Footplate drops them"
    assert (text in read(tmp_path, stage=stage).different) == is_told


@pytest.mark.parametrize(
    ("template", "stage", "is_told"),
    [("default", "sft", True), ("empty", "dpo", True), ("llama3", "pt", False), ("-", "sft", False)],
)
def test_a_template_of_llamafactory_is_told(tmp_path, template, stage, is_told):
    """Its `default` and `empty` are templates of their own, too; pretraining uses none."""
    found = read(tmp_path, template=template, stage=stage)
    assert any(text.startswith("template: ") for text in found.different) == is_told


def test_defaults_are_those_of_llamafactory(tmp_path):
    spec = import_file("model_name_or_path: a/b\nstage: sft\n", RunSpec(), tmp_path).spec
    train = spec.train
    assert (train.learning_rate, train.per_device_train_batch_size, train.num_train_epochs) == (5e-5, 8, 3.0)
    assert (spec.data.max_length, train.lr_scheduler_type, spec.precision.compute) == (2048, "linear", "auto")
    assert spec.data.files == () and spec.data.source == "files", "not the demo dataset"


EXTRA, WSD = "llamafactory.extra_args", {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 100}
# (given, option, value); test_imported_options.py tests both tables.
OPTIONS = [
    ({"save_total_limit": -1}, "save.total_limit", 0),
    ({"preprocessing_num_workers": 0}, "data.dataset_num_proc", 1),
    ({"max_grad_norm": -1}, "train.max_grad_norm", 0.0),
    ({"stage": "pt"}, "data.packing", True),
    ({"streaming": True, "max_steps": 9}, "data.streaming", True),
    ({"stage": "rm"}, "train.stage", "reward"),
    ({"stage": "dpo", "pref_loss": "orpo"}, "train.stage", "orpo"),
    ({"stage": "dpo", "pref_loss": "hinge"}, "preference.dpo_loss_type", "hinge"),
    ({"stage": "kto", "kto_rejected_weight": 0.5}, "preference.undesirable_weight", 0.5),
    ({"finetuning_type": "full"}, "method.kind", "full"),
    ({"lora_target": "q_proj, v_proj"}, "lora.target_modules", ("q_proj", "v_proj")),
    ({"additional_target": "embed_tokens,lm_head"}, "lora.modules_to_save", ("embed_tokens", "lm_head")),
    ({"lora_alpha": 64}, "lora.alpha", 64),
    ({"pissa_init": True}, "lora.init", "pissa_fast"),
    ({"pissa_init": True, "pissa_iter": -1}, "lora.init", "pissa"),
    ({"quantization_bit": 4}, "method.quantization", "nf4"),
    ({"quantization_bit": 4, "quantization_type": "fp4"}, "method.quantization", "fp4"),
    ({"quantization_bit": 8, "quantization_method": "bnb"}, "method.quantization", "int8"),
    ({"bf16": False, "pure_bf16": True}, "precision.compute", "pure_bf16"),
    ({"bf16": "-"}, "precision.compute", "auto"),
    ({"bf16": "-", "finetuning_type": "full"}, "precision.compute", "fp32"),
    ({"bf16": "-", "finetuning_type": "full", "use_badam": True}, "precision.compute", "pure_bf16"),
    ({"finetuning_type": "full", "use_badam": True}, "precision.compute", "pure_bf16"),
    ({"flash_attn": "fa2"}, "model.attn_implementation", "flash_attention_2"),
    ({"disable_gradient_checkpointing": True}, "train.activation_checkpointing", False),
    ({"max_steps": 70}, "train.max_steps", 70),
    ({"warmup_ratio": "-", "warmup_steps": 20}, "train.warmup_steps", 20),
    ({"use_galore": True, "galore_layerwise": True}, "train.optim", "galore_adamw_layerwise"),
    ({"use_galore": True, "galore_target": "mlp,self_attn"}, "train.optim_target_modules", ("mlp", "self_attn")),
    ({"use_apollo": True, "apollo_rank": 256}, "train.projection_rank", 256),
    ({"use_badam": True, "badam_switch_interval": 7}, "train.badam_switch_block_every", 7),
    ({"optim": "adamw_8bit"}, "train.optim", "adamw_bnb_8bit"),
    ({"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50}, "eval.strategy", "steps"),
    ({"val_size": 0.1, "eval_strategy": "steps", "logging_steps": 7}, "eval.steps", 7),
    ({"save_steps": 0.5}, "save.strategy", "epoch"),
    ({"save_strategy": "epoch", "save_steps": 0.5}, "save.strategy", "epoch"),
    ({"eval_steps": 0.1}, "eval.strategy", "no"),
    ({"val_size": 0.1}, "data.validation_split", 0.1),
    ({"train_on_prompt": True}, "data.loss_on", "all_tokens"),
    ({"deepspeed": "examples/deepspeed/ds_z3_offload_config.json"}, "parallel.offload_param", "cpu"),
    ({"deepspeed": "ds_z2_config.json"}, "parallel.strategy", "zero2"),
    ({"resume_from_checkpoint": "saves/checkpoint-9"}, "save.resume_path", "saves/checkpoint-9"),
    ({"report_to": ["wandb"]}, "logging.report_to", "wandb"),
    ({"ddp_timeout": 600}, "parallel.ddp_timeout", 600),
    ({"ddp_find_unused_parameters": True}, "parallel.ddp_find_unused_parameters", True),
    ({"val_size": 0.1, "evaluation_strategy": "epoch"}, "eval.strategy", "epoch"),
    ({"stage": "dpo", "dpo_beta": 0.3}, "preference.beta", 0.3),
    ({"enable_thinking": False}, "data.chat_template_kwargs", '{"enable_thinking": false}'),
    ({"enable_thinking": True}, "data.chat_template_kwargs", ""),
    ({"context_parallel_size": 4, "deepspeed": "ds_z3_config.json"}, "parallel.strategy", "zero3"),
    ({"context_parallel_size": 4, "deepspeed": "ds_z3_config.json"}, "llamafactory.backend", "transformers"),
    ({"context_parallel_size": 4, "fsdp": "full_shard"}, "llamafactory.extra_args", '{"context_parallel_size": 4}'),
    ({"model_name_or_path": "./model"}, "model.path", "./model"),
    ({"bf16": "-", "tf32": True}, "precision.compute", "tf32"),
    ({"train_sampling_strategy": "group_by_length"}, "train.train_sampling_strategy", "group_by_length"),
    ({"use_cpu": True}, "launch.device", "cpu"),
    ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, EXTRA, ""),
    ({**WSD, "lr_scheduler_kwargs": {"num_decay_steps": 10, "decay_type": "linear"}}, EXTRA, ""),
    (
        {**WSD, "lr_scheduler_kwargs": {"num_decay_steps": 9}},
        EXTRA,
        '{"lr_scheduler_kwargs": {"num_decay_steps": 9}}',
    ),
]


REFUSED = [  # (given, named)
    ({"stage": "ppo"}, "stage: ppo"),
    ({"finetuning_type": "oft"}, "finetuning_type: oft"),
    ({"stage": "dpo", "pref_loss": "simpo"}, "pref_loss: simpo"),
    ({"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_bit: 4 with hqq"),
    ({"quantization_bit": 3}, "quantization_bit: 3"),
    ({"quantization_bit": [4]}, r"quantization_bit: \[4\]"),
    ({"use_badam": True, "badam_mode": "ratio"}, "badam_mode: ratio"),
    ({"optim": "nothing_known"}, "optim: nothing_known"),
    ({"learning_rate": "high"}, "train.learning_rate"),
    ({"max_steps": "many"}, "max_steps"),
    ({"val_size": "some"}, "val_size"),
    ({"cutoff_len": "2k"}, r"cutoff_len \(data.max_length\): must be an integer"),
]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"use_hyper_parallel": True}, ["use_hyper_parallel: True"]),
        ({"context_parallel_size": 4, "fsdp": "full_shard"}, ["context_parallel_size: 4"]),
        ({"packing": True}, ["packing: packed examples do not attend"]),
        ({"val_size": 200}, ["val_size: 200"]),
        ({"lr_scheduler_type": "polynomial"}, ["lr_scheduler_type: polynomial"]),
        ({"eval_dataset": "other", "val_size": 0}, ["eval_dataset: other"]),
        ({"report_to": ["wandb", "swanlab"]}, ["report_to: swanlab (one tracker at a time)"]),
        ({"report_to": "all"}, ["report_to: all (supported are tensorboard"]),
        ({"bf16": "-"}, ["bf16 and fp16: LLaMA-Factory computes in the dtype of the model's files"]),
        ({"deepspeed": {"stage": 3}}, ["deepspeed: a configuration"]),
        (
            {"adapter_name_or_path": "x", "use_ray": False, "create_new_adapter": True},
            ["adapter_name_or_path: x (is merged, and a new adapter is trained"],
        ),
        ({"adapter_name_or_path": "x,y"}, ["adapter_name_or_path: x, y (several adapters are merged"]),
        (
            {"adapter_name_or_path": "x", "finetuning_type": "full"},
            ["adapter_name_or_path: x (lora.adapter_path has no effect"],
        ),
        (
            {"stage": "dpo", "pref_loss": "sigmoid", "dpo_label_smoothing": 0.1},
            ["dpo_label_smoothing: 0.1 (preference.label_smoothing has no effect"],
        ),
        ({"torch_compile": True, "deepspeed": "ds_z2_config.json"}, ["torch_compile: True (train.torch_compile"]),
        ({"stage": "kto", "group_by_length": True}, ["group_by_length: True (train.train_sampling_strategy"]),
    ],
)
def test_what_is_listed(tmp_path, given, texts):
    found = read(tmp_path, **given)
    told = [*found.different, *found.missing]
    for text in texts:
        assert any(line.startswith(text) for line in told), told
    assert not any(line.startswith(("use_ray", "do_train", "output_dir")) for line in told)


def test_every_named_option_exists():
    assert {*OPTION_NAMES.values()} <= by_name().keys()


@pytest.mark.parametrize("info", ["[]", "{", '{"identity": 3}', '{"identity": {"script_url": "a"}}'])
def test_a_damaged_dataset_info(tmp_path, info):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(info)
    assert read(tmp_path).missing[0].startswith("dataset: identity")


def test_the_page_and_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(LORA))
    response = client(tmp_path / "runs").post("/api/import", json={"yaml": yaml.safe_dump(LORA)}).json()
    assert response["values"]["lora.r"] in (8, "8")
    assert response["runs_code"] == ["model.trust_remote_code (the file turns it on; it stays off here)"]
    assert response["missing"][0].startswith("dataset: identity") and response["different"]
    assert main(["import", "theirs.yaml"]) == 0
    out, err = capsys.readouterr()
    assert changes(RunSpec.model_validate(yaml.safe_load(out)))["lora.r"] == 8
    assert "Not imported: dataset: identity" in err and "Different here: template: llama3" in err
    (tmp_path / "none.yaml").write_text("model: {}\n")
    assert main(["import", "none.yaml"]) == 2


def test_what_is_left_is_kept_for_llamafactory_as_trainer(tmp_path):
    found = read(tmp_path, mask_history=True, template="qwen3", rope_scaling="yarn")
    spec = found.spec
    assert found.different[-1] == (
        "llamafactory.extra_args keeps mask_history and rope_scaling, used only if LLaMA-Factory trains "
        "(launch.trainer: llamafactory)"
    )
    assert spec.llamafactory.template == "qwen3" and spec.launch.trainer == "footplate"
    kept = json.loads(spec.llamafactory.extra_args)
    assert kept == {"mask_history": True, "rope_scaling": "yarn"}
    assert read(tmp_path, template="a b").spec.llamafactory.template == ""
    experts = read(tmp_path, use_kt=True, kt_config={"kt_num_threads": 96}, freeze_language_model=True)
    assert json.loads(experts.spec.llamafactory.extra_args).keys() == {"kt_config", "freeze_language_model"}
    assert [line.partition(":")[0] for line in experts.missing] == ["dataset"], "LLaMA-Factory gets the others"


PARTS = {"prompt": "q", "response": "r", "system": "s"}
TURNS = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "talk"}}


@pytest.mark.parametrize(
    ("stage", "entry", "expected"),
    [
        ("sft", {"columns": PARTS}, {"format": "alpaca", "prompt_column": "q", "completion_column": "r"}),
        ("sft", {"columns": PARTS}, {"system_column": "s"}),
        ("sft", {"columns": {"prompt": "q"}}, {"completion_column": "output", "system_column": ""}),
        ("sft", {}, {"format": "auto", "system_column": "system"}),
        ("pt", {"columns": {"prompt": "body"}}, {"format": "text", "text_column": "body"}),
        ("sft", TURNS, {"format": "sharegpt", "messages_column": "talk"}),
        ("sft", {**TURNS, "tags": {"role_tag": "role"}}, {"format": "messages", "messages_column": "talk"}),
        (
            "dpo",
            {**TURNS, "ranking": True, "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}},
            {"format": "pairs", "prompt_column": "talk", "chosen_column": "good", "rejected_column": "bad"},
        ),
        ("kto", {"columns": {**PARTS, "kto_tag": "ok"}}, {"format": "labels", "label_column": "ok"}),
    ],
)
def test_the_columns_of_dataset_info(tmp_path, stage, entry, expected):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"identity": {"file_name": "i.json", **entry}}))
    data = read(tmp_path, stage=stage).spec.data
    assert {name: getattr(data, name) for name in expected} == expected


def test_other_datasets_of_dataset_info(tmp_path):
    """A dataset on the Hub; two that are read alike or not; what has no counterpart."""
    (tmp_path / "data").mkdir()
    columns = {"prompt": "q", "query": "more", "images": "pictures"}
    info = {
        "hub": {"hf_hub_url": "a/b", "split": "test"},
        "one": {"file_name": "1.json", "columns": columns, "num_samples": 5, "tags": {"user_tag": "client"}},
        "two": {"file_name": "2.json"},
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    data = read(tmp_path, dataset="hub").spec.data
    assert (data.source, data.hub_id, data.hub_split) == ("hub", "a/b", "test")
    found = read(tmp_path, dataset="one,two", max_samples="-")
    one, two = found.spec.data.datasets
    assert (one.files, one.format, one.prompt_column, one.max_samples) == (("data/1.json",), "alpaca", "q", 5)
    assert (two.files, two.format, two.prompt_column, two.max_samples) == (("data/2.json",), "auto", "", 0)
    told = [*found.different, *found.missing]
    for text in (
        "dataset: one: columns.query: rename the column more to input; Footplate reads it only under that name",
        "dataset: one: columns.images: pictures",
        "dataset: one: tags.user_tag: client: Footplate does not recognize this role name",
        "dataset: one: num_samples: 5: if the dataset has fewer examples, LLaMA-Factory repeats some; Footplate does "
        "not",
    ):
        assert text in told


# Entries of LLaMA-Factory's own data/dataset_info.json.
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "glaive_toolcall_en_demo": {
        "file_name": "glaive_toolcall_en_demo.json", "formatting": "sharegpt",
        "columns": {"messages": "conversations", "tools": "tools"},
    },
    "slimorca": {"hf_hub_url": "Open-Orca/SlimOrca", "formatting": "sharegpt"},
    "openassistant": {"hf_hub_url": "OpenAssistant/oasst1", "ms_hub_url": "x/y", "subset": "en", "split": "train[:9%]"},
    "ultrachat_200k": {
        "hf_hub_url": "HuggingFaceH4/ultrachat_200k", "formatting": "sharegpt", "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "belle_2m": {"ms_hub_url": "AI-ModelScope/train_2M_CN"},
}  # fmt: skip


def with_info(tmp_path, **more):
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    return read(tmp_path, **more)


def test_every_dataset_of_a_list(tmp_path):
    """examples/train_lora/qwen3_lora_sft.yaml and more datasets; max_samples limits each of them."""
    found = with_info(tmp_path, dataset="identity,alpaca_en_demo, glaive_toolcall_en_demo,ultrachat_200k,openassistant")
    data = found.spec.data
    files = [each.files for each in data.datasets[:3]]
    assert files == [("data/identity.json",), ("data/alpaca_en_demo.json",), ("data/glaive_toolcall_en_demo.json",)]
    assert [each.format for each in data.datasets] == ["auto", "auto", "sharegpt", "messages", "auto"]
    assert [each.source for each in data.datasets[3:]] == ["hub", "hub"]
    last = data.datasets[4]
    assert (last.hub_id, last.hub_config, last.hub_split) == ("OpenAssistant/oasst1", "en", "train[:9%]")
    assert {each.max_samples for each in data.datasets} == {1000}
    assert {each.validation for each in data.datasets} == {"none"}
    assert data.mixing == "concatenate" and found.missing == []


@pytest.mark.parametrize(
    ("strategy", "shares", "mixing", "weights"),
    [
        ("interleave_under", "0.65,0.35", "interleave_first_exhausted", [0.65, 0.35]),
        ("interleave_over", "0.7, 0.3", "interleave_all_exhausted", [0.7, 0.3]),
        ("interleave_over", [7, 3], "interleave_all_exhausted", [7, 3]),
        ("interleave_under", None, "interleave_first_exhausted", [1, 1]),
        ("interleave_once", None, "concatenate", [1, 1]),
        ("concat", None, "concatenate", [1, 1]),
    ],
)
def test_the_mixture(tmp_path, strategy, shares, mixing, weights):
    found = with_info(tmp_path, dataset="identity,slimorca", mix_strategy=strategy, interleave_probs=shares)
    assert found.spec.data.mixing == mixing
    assert [each.weight for each in found.spec.data.datasets] == weights
    assert found.missing == [] and found.spec.llamafactory.extra_args == ""


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"mix_strategy": "shuffle"}, "mix_strategy: shuffle"),
        ({"interleave_probs": "0.7"}, "a number for each of the 2 datasets, but has 1"),
        ({"interleave_probs": "1,0"}, r"interleave_probs \(data.sources\[1\].weight\): must be greater than 0"),
        ({"interleave_probs": "1,x"}, r"interleave_probs \(data.sources\[1\].weight\): must be a number"),
    ],
)  # fmt: skip
def test_a_mixture_without_a_counterpart(tmp_path, given, named):
    with pytest.raises(SpecError, match=named):
        with_info(tmp_path, dataset="identity,slimorca", **{"mix_strategy": "interleave_over", **given})


def test_probabilities_without_interleaving_are_named(tmp_path):
    found = with_info(tmp_path, dataset="identity,slimorca", interleave_probs="0.5,0.5")
    assert found.missing == ["interleave_probs: 0.5,0.5 (the mixture has each example once)"]


def test_datasets_without_a_description_keep_their_place(tmp_path):
    found = with_info(tmp_path, dataset="identity,belle_2m,unknown,alpaca_en_demo")
    assert [each.files for each in found.spec.data.datasets[1:3]] == [(), ()]
    assert found.missing == [
        f"dataset: {name} (data/dataset_info.json gives no file_name for it; add its file to data.sources[{n}].files)"
        for n, name in ((1, "belle_2m"), (2, "unknown"))
    ]


def test_a_missing_description_of_the_datasets_is_named(tmp_path):
    found = with_info(tmp_path, dataset="mine", dataset_dir="elsewhere", eval_dataset="other")
    place = f"there is no file {tmp_path / 'elsewhere' / 'dataset_info.json'}"
    assert found.missing == [
        f"dataset: mine ({place}; add its file to data.files)",
        f"eval_dataset: other ({place}; add its file to data.validation_files)",
    ]


def test_validation_files_belong_to_the_dataset_with_their_format(tmp_path):
    given = "identity,glaive_toolcall_en_demo"
    found = with_info(tmp_path, dataset=given, eval_dataset="glaive_toolcall_en_demo,alpaca_en_demo,slimorca")
    first, second = found.spec.data.datasets
    assert (first.validation, first.validation_files) == ("files", ("data/alpaca_en_demo.json",))
    assert (second.validation, second.validation_files) == ("files", ("data/glaive_toolcall_en_demo.json",))
    assert found.missing == ["eval_dataset: slimorca: Open-Orca/SlimOrca (validation files must be local)"]
    found = with_info(tmp_path, dataset="slimorca", eval_dataset="alpaca_en_demo")
    assert found.missing[0].startswith("eval_dataset: alpaca_en_demo: data/alpaca_en_demo.json (no training dataset")


def test_names_on_the_hub(tmp_path):
    spec = read(tmp_path, dataset_dir="ONLINE", dataset="llamafactory/demo_data,a/b").spec
    assert [(each.source, each.hub_id) for each in spec.data.datasets] == [
        ("hub", "llamafactory/demo_data"),
        ("hub", "a/b"),
    ]


def test_one_system_prompt_for_all(tmp_path):
    found = with_info(tmp_path, dataset="identity,slimorca", default_system="Be brief.", val_size=0.1)
    assert [each.system_prompt for each in found.spec.data.datasets] == ["Be brief.", "Be brief."]
    assert [each.validation_split for each in found.spec.data.datasets] == [0.1, 0.1]


def test_a_mistake_in_what_all_datasets_share_is_reported_once(tmp_path):
    with pytest.raises(SpecError) as caught:
        with_info(tmp_path, dataset="identity,slimorca", max_samples="many", learning_rate="high")
    assert [problem.message.split(":")[0] for problem in caught.value.problems] == [
        "max_samples (data.max_samples)",
        "learning_rate (train.learning_rate)",
    ]
