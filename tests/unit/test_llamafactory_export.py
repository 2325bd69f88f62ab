"""A spec as files of LLaMA-Factory: what is written, what is different or missing there, and what it refuses."""

import json
from dataclasses import replace

import pytest
import yaml
from specs import rule_finding

from backend import presets
from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import SpecError, changes, edit
from backend.data.llamafactory import unread_file
from backend.importers import import_file
from backend.inspect import inspect_inputs
from backend.launch.clusters.answers import gpus
from backend.launch.llamafactory import export
from backend.launch.plan import plan
from backend.machine import Machine
from backend.resolve import resolve
from backend.rules.examples import MOE, SMOL, TWO_H100
from backend.rules.launch import MIG
from backend.rules.llamafactory import READABLE, WITH

FILES = {"data.source": "files", "data.validation": "none", "eval.strategy": "no"}
BADAM = {"train.optim": "badam", "method.kind": "full"}
EIGHT = Machine(device="cuda", gpus=gpus(8, "H100"), cores=96)


def made(patch, format="messages", machine=EIGHT):
    spec = edit(RunSpec(), {**FILES, "data.files": ("/data/a.jsonl",), **patch})
    return export(spec, resolve(spec, machine), format)


def test_what_is_written():
    found = made({"model.source": "hub", "model.hub_id": "Qwen/Qwen3-8B", "train.seed": 0, "train.max_grad_norm": 0})
    table = yaml.safe_load(found.files["train.yaml"])
    assert table["model_name_or_path"] == "Qwen/Qwen3-8B" and table["dataset"] == "data_1"
    assert (table["lora_rank"], table["lora_alpha"], table["lora_target"]) == (16, 32, "all")
    assert table["seed"] == 0 and table["max_grad_norm"] == 0, (
        "a zero is written where LLaMA-Factory's default is not 0"
    )
    assert "max_samples" not in table and "loraplus_lr_ratio" not in table
    assert json.loads(found.files["dataset_info.json"])["data_1"]["file_name"] == "/data/a.jsonl"
    assert found.command == "CUDA_VISIBLE_DEVICES=0 llamafactory-cli train train.yaml", "not on all eight GPUs"
    assert not found.missing and not found.refused
    assert table["logging_nan_inf_filter"] is False and "metric_for_best_model" not in table


def test_schedules_with_arguments():
    schedule = {"train.lr_scheduler_type": "warmup_stable_decay", "train.duration": "steps", "train.max_steps": 105}
    table = made(schedule).table
    assert table["lr_scheduler_kwargs"] == {"num_decay_steps": 11, "decay_type": "linear"}
    found = made({**schedule, "train.duration": "epochs"})
    assert (found.table["lr_scheduler_type"], "lr_scheduler_kwargs" in found.table) == ("constant_with_warmup", False)
    assert any(text.startswith("train.lr_scheduler_type: constant_with_warmup") for text in found.different)
    table = made({"train.lr_scheduler_type": "cosine_with_min_lr"}).table
    assert table["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}


@pytest.mark.parametrize(("alpha", "written"), [(32, 32), (32.7, 33), (0.25, 1)])
def test_the_alpha_of_lora_is_a_whole_number_there(alpha, written):
    """And never 0, for which LLaMA-Factory uses twice the rank."""
    found = made({"lora.alpha": alpha})
    assert found.table["lora_alpha"] == written
    told = [text for text in found.different if text.startswith("lora.alpha")]
    assert [f"{alpha:g} is written as {written}," in text for text in told] == [True] * (alpha != written)


@pytest.mark.parametrize(
    ("patch", "dtype", "text"),
    [
        ({"precision.compute": "fp32"}, "bfloat16", "LLaMA-Factory keeps frozen weights in the dtype"),
        ({"precision.compute": "tf32"}, "", "LLaMA-Factory keeps frozen weights in the dtype"),
        ({"precision.compute": "fp32"}, "float32", ""),
        ({"precision.compute": "bf16"}, "bfloat16", ""),
        ({"precision.compute": "bf16"}, "float32", "LLaMA-Factory keeps frozen weights in fp32, the dtype of"),
        ({"precision.compute": "bf16", "lora.init": "pissa"}, "float32", ""),
        ({"precision.compute": "bf16", "parallel.strategy": "zero2"}, "float32", ""),
        ({"precision.compute": "fp32", "method.quantization": "nf4"}, "float32", "LLaMA-Factory computes with quant"),
        ({"precision.compute": "bf16", "method.quantization": "nf4"}, "float32", ""),
        ({"precision.compute": "fp32", "method.kind": "full"}, "bfloat16", ""),
        (BADAM, "bfloat16", "with BAdam, LLaMA-Factory trains weights in"),
        ({**BADAM, "precision.compute": "pure_bf16"}, "bfloat16", ""),
    ],
)
def test_the_dtype_of_weights_is_named_where_it_differs(patch, dtype, text):
    spec = edit(RunSpec(), {**FILES, "data.files": ("/data/a.jsonl",), **patch})
    found = export(spec, resolve(spec, EIGHT), "messages", shape=replace(SMOL, dtype=dtype) if dtype else None)
    told = [line for line in found.different if line.startswith("precision.compute")]
    assert told[0].startswith(f"precision.compute: {text}") if text else not told


def test_a_start_from_scratch():
    found = made({"save.resume_from": "scratch"})
    assert found.table["overwrite_output_dir"] is True and not found.missing
    assert "overwrite_output_dir" not in made({}).table
    spec = edit(RunSpec(), {"launch.trainer": "llamafactory", "save.resume_from": "scratch"})
    assert plan(spec, EIGHT).argv[-2:] == ("llamafactory-run.py", "--from-scratch")


def test_deepspeed_and_several_nodes():
    found = made({"parallel.strategy": "zero3", "launch.rendezvous": "static", "launch.master_addr": "10.0.0.1"})
    assert json.loads(found.files["deepspeed.json"])["zero_optimization"]["stage"] == 3
    assert yaml.safe_load(found.files["train.yaml"])["deepspeed"] == "deepspeed.json"
    for word in ("FORCE_TORCHRUN=1", "NPROC_PER_NODE=2", "NNODES=2", "MASTER_ADDR=10.0.0.1", "MASTER_PORT=29500"):
        assert word in found.command.split()


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ({"parallel.strategy": "fsdp2"}, "parallel.strategy"),
        ({"train.stop_on_spike": True}, "train.stop_on_spike"),
        ({"lora.init": "gaussian"}, "lora.init"),
        ({"train.stage": "dpo", "preference.dpo_loss_type": "robust"}, "preference.dpo_loss_type"),
        ({"model.attn_implementation": "flex_attention"}, "model.attn_implementation"),
        ({"data.chat_template": "file", "data.chat_template_file": "/a.jinja"}, "data.chat_template_file"),
    ],
)
def test_what_has_no_counterpart_is_named(patch, named):
    assert named in [line.partition(":")[0] for line in made(patch).missing]


def test_long_pairs_of_reward_models_are_named():
    stages = {"reward": "pairs", "dpo": "pairs", "sft": "messages"}
    hub = {"data.source": "hub", "data.hub_id": "a/b"}
    found = {stage: made({"train.stage": stage, **hub}, form) for stage, form in stages.items()}
    named = {stage for stage, export in found.items() if any("longer pairs" in text for text in export.different)}
    assert named == {"reward"}


def test_projected_attention_layers_are_named():
    export = made({"method.kind": "full", "train.optim": "galore_adamw", "train.optim_targets": "attention"})
    assert export.table["galore_target"] == "q_proj,k_proj,v_proj,o_proj"
    assert any(line.startswith("train.optim_targets: the names q_proj") for line in export.different)


def test_attention_layers_are_those_of_the_model():
    spec = edit(RunSpec(), {**FILES, "data.files": ("/a.jsonl",), "lora.targets": "attention"})
    found = export(spec, resolve(spec, EIGHT), "messages", shape=MOE)
    names = found.table["lora_target"].split(",")
    assert names[:2] == ["self_attn.q_proj", "self_attn.k_proj"] and "mlp" not in found.table["lora_target"]
    assert not any(line.startswith("lora.targets") for line in found.different)


@pytest.mark.parametrize(
    ("patch", "word"),
    [
        ({"train.optim": "galore_adamw"}, "LoRA"),
        ({"method.kind": "full", "train.optim": "apollo_adamw", "parallel.strategy": "zero2"}, "DeepSpeed"),
        (
            {"method.kind": "full", "train.optim": "galore_adamw_layerwise", "parallel.strategy": "ddp"},
            "single process",
        ),
        ({"lora.init": "pissa", "method.quantization": "nf4"}, "quantized"),
        ({"lora.init": "pissa_fast", "parallel.strategy": "zero3"}, "ZeRO-3"),
        ({"precision.compute": "pure_bf16", "launch.device": "cpu"}, "Pure bf16 needs a GPU"),
        ({"data.streaming": True}, "a number of steps"),
        ({"data.streaming": True, "data.max_samples": 9}, "max_samples"),
        ({"data.streaming": True, "data.validation": "split"}, "split a validation set"),
    ],
)
def test_what_its_parser_refuses(patch, word):
    assert any(word in text for text in made(patch).refused)


def lines(path, *examples):
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return str(path)


def test_preference_data_is_converted(tmp_path):
    """LLaMA-Factory reads texts, or one chosen and one rejected turn after a conversation."""
    ask, yes, no = (
        {"role": role, "content": text} for role, text in (("user", "?"), ("assistant", "a"), ("assistant", "b"))
    )
    pairs = [{"prompt": "?", "chosen": [yes], "rejected": [no]}, {"prompt": "?", "chosen": [yes]}]
    file = lines(tmp_path / "pairs.jsonl", *pairs)
    found = made({"train.stage": "dpo", "data.files": (file,)}, "pairs")
    (line,) = found.files["data_1.jsonl"].splitlines()
    assert json.loads(line) == {"messages": [ask], "chosen": yes, "rejected": no}
    assert found.datasets["data_1"]["ranking"] is True
    why = "invalid, or LLaMA-Factory has no form for all of its parts"
    assert found.missing == [f"data.files: 1 example of {file}: {why}"]
    (tmp_path / "copy.jsonl").write_text(line)
    again = made({"train.stage": "dpo", "data.files": (str(tmp_path / "copy.jsonl"),)}, "pairs")
    assert not again.converted and not again.missing
    assert again.datasets["data_1"] == {**found.datasets["data_1"], "file_name": str(tmp_path / "copy.jsonl")}
    file = lines(tmp_path / "scored.jsonl", {**pairs[0], "margin": 1})
    found = made({"train.stage": "reward", "data.files": (file,)}, "pairs")
    assert found.missing == [f"data.files: LLaMA-Factory ignores the margin of 1 example of {file}"]
    file = lines(tmp_path / "labels.jsonl", {"prompt": "?", "completion": "a", "label": 0})
    found = made({"train.stage": "kto", "data.files": (file,)}, "labels")
    assert json.loads(found.files["data_1.jsonl"]) == {"messages": [ask, yes], "kto_tag": False}
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(SpecError, match=r"broken\.jsonl"):
        made({"train.stage": "dpo", "data.files": (str(tmp_path / "broken.jsonl"),)}, "pairs")


def test_preferences_that_are_read_are_described(tmp_path):
    """Source: llamafactory 0.9.5 data/converter.py, AlpacaDatasetConverter and SharegptDatasetConverter."""
    ask, yes, no = {"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}, {"from": "gpt", "value": "b"}
    chosen = {"chosen": "chosen", "rejected": "rejected"}
    cases = [
        ("dpo", {"prompt": "?", "chosen": "a", "rejected": "b"}, "alpaca", {"prompt": "prompt", **chosen}),
        ("orpo", {"instruction": "?", "input": "1", "chosen": "a", "rejected": "b", "system": "s"}, "alpaca",
         {"prompt": "instruction", "query": "input", "system": "system", **chosen}),
        ("reward", {"conversations": [ask], "chosen": yes, "rejected": no, "margin": 2}, "sharegpt",
         {"messages": "conversations", **chosen}),
        ("kto", {"question": "?", "output": "a", "label": True}, "alpaca",
         {"prompt": "question", "response": "output", "kto_tag": "label"}),
        ("kto", {"conversations": [ask, yes], "kto_tag": False}, "sharegpt",
         {"messages": "conversations", "kto_tag": "kto_tag"}),
    ]  # fmt: skip
    for stage, row, formatting, columns in cases:
        file = lines(tmp_path / f"{stage}.jsonl", row)
        found = made({"train.stage": stage, "data.files": (file,)}, "labels" if stage == "kto" else "pairs")
        ranking = {"ranking": True} if "chosen" in row else {}
        described = {"file_name": file, "formatting": formatting, "columns": columns, **ranking}
        assert found.datasets["data_1"] == described and not found.converted
        assert any("margin" in text for text in found.missing) == (stage == "reward")
        options = {**WITH, "train.stage": stage, "data.source": "files", "data.files": (file,)}
        assert not rule_finding("LLF005", options, TWO_H100, replace(READABLE, format=""))
        assert any("one line break" in text for text in found.different) == ("query" in columns)


def test_margins_are_named_wherever_they_are(tmp_path):
    """The first pairs of a file may have none."""
    pair = {"prompt": "?", "chosen": "a", "rejected": "b"}
    file = lines(tmp_path / "pairs.jsonl", pair, {**pair, "margin": None}, {**pair, "margin": 2.5})
    found = made({"train.stage": "reward", "data.files": (file,)}, "pairs")
    assert [text for text in found.missing if "the margin of 1 example of" in text] and not found.converted
    for stage in ("reward", "dpo"):
        options = {**WITH, **FILES, "train.stage": stage, "data.files": (file,)}
        facts = inspect_inputs(edit(RunSpec(), options), tmp_path)
        told = rule_finding("LLF005", options, TWO_H100, facts)
        assert ("which 1 of 3 checked pairs have" in told.message) if stage == "reward" else not told


def test_lists_of_turns_become_conversations(tmp_path):
    ask, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}
    file = lines(tmp_path / "turns.jsonl", {"prompt": [ask], "completion": [answer]})
    found = made({"data.files": (file,)}, "prompt_completion")
    assert json.loads(found.files["data_1.jsonl"]) == {"messages": [ask, answer]}
    file = lines(tmp_path / "texts.jsonl", {"prompt": "?", "completion": "a"})
    found = made({"data.files": (file,)}, "prompt_completion")
    assert found.datasets["data_1"]["columns"] == {"prompt": "prompt", "response": "completion"}


def test_a_conversation_that_is_not_read_is_converted(tmp_path):
    """A file without one is not."""
    ask, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}
    plain = lines(tmp_path / "plain.jsonl", {"messages": [ask, answer]})
    tools = [{"type": "function", "function": {"name": "f"}}]
    other = lines(tmp_path / "tools.jsonl", {"messages": [ask, answer]}, {"messages": [ask, answer], "tools": tools})
    found = made({"data.files": (plain, other)})
    assert found.datasets["data_1"]["file_name"] == plain and list(found.converted) == ["data_2.jsonl"]
    assert found.datasets["data_2"]["columns"] == {"messages": "messages", "tools": "tools"}
    assert next(json.loads(line)["tools"] for line in found.converted["data_2.jsonl"].splitlines()) == ""
    found = made({"data.files": (plain,), "train.stage": "pretraining"})
    assert json.loads(found.files["data_1.jsonl"]) == {"text": "?\n\na"}
    assert found.datasets["data_1"]["columns"] == {"prompt": "text"} and found.table["stage"] == "pt"
    for stage, format in (("pretraining", "messages"), ("kto", "pairs")):
        patch = {**WITH, **FILES, "data.files": (plain,), "train.stage": stage}
        finding = rule_finding("LLF004", patch, TWO_H100, replace(READABLE, format=format))
        assert finding and finding.message.startswith(f"The data format is {format}. Convert the data with")
    unlike = replace(READABLE, unlike_llamafactory=(("a turn has tool calls in a key of its own", 2),))
    finding = rule_finding("LLF004", WITH, TWO_H100, unlike)
    assert finding.message.startswith("In 2 examples, a turn has tool calls in a key of its own. LLaMA-Factory would")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.tsv", "prompt\tcompletion\nWhen?\tNine.\n", "files whose names end in .tsv; convert"),
        ("a.CSV", "prompt,completion\nWhen?,Nine.\n", "files whose names end in .CSV; rename"),
        ("a.csv", "prompt;completion\nWhen?;Nine.\n", "CSV files whose columns are not separated by commas"),
        ("b.json", '{"data": [{"prompt": "When?", "completion": "Nine."}]}', "JSON files whose list is under a key"),
        ("b.csv", "prompt,completion\nWhen?,NA\n", ""),
        ("b.csv", "prompt,completion\nWhen?,1.5\n", ""),
    ],
)
def test_files_that_are_not_read(tmp_path, name, content, why):
    """They are converted in an export. As a trainer, LLaMA-Factory would fail, or leave out examples."""
    (tmp_path / name).write_text(content)
    (line,) = made({"data.files": (str(tmp_path / name),)}, "prompt_completion").converted.values()
    turns = json.loads(line)["messages"]
    assert [turn["content"] for turn in turns] == ["When?", "Nine." if why else content[-4:].strip(",\n")]
    patch = {**WITH, **FILES, "data.files": (str(tmp_path / name),)}
    if why:
        found = rule_finding("LLF004", patch, TWO_H100, replace(READABLE, format="prompt_completion"))
        assert found.message.startswith(f"LLaMA-Factory does not read {why}")
    else:
        ((words, count),) = inspect_inputs(edit(RunSpec(), patch), tmp_path).unlike_llamafactory
        assert words == "a cell of the CSV file, such as 12, True or NA, may not be read as text" and count == 1
    other = tmp_path / "lines.json"  # a wrong name, which another rule reports
    other.write_text('{"prompt": "When?", "completion": "Nine."}\n' * 2)
    assert unread_file(other) == ""
    plain = tmp_path / "plain.csv"
    plain.write_text("prompt,completion\nWhen?,Nine.\n")
    assert not made({"data.files": (str(plain),)}, "prompt_completion").converted


def test_plain_text_is_trained_on_by_its_pretraining():
    found = made({"data.packing": True}, "text")
    assert (found.table["stage"], found.table["packing"]) == ("pt", True) and "neat_packing" not in found.table
    assert found.datasets["data_1"]["columns"] == {"prompt": "text"} and not found.missing


def test_early_stopping_and_streaming():
    patch = {"data.validation": "files", "data.validation_files": ("/v.jsonl",), "eval.strategy": "epoch"}
    assert made({**patch, "eval.early_stopping_patience": 2}).table["metric_for_best_model"] == "eval_loss"
    steps = {"train.duration": "steps", "data.streaming": True}
    found = made(steps)
    assert found.table["dataloader_num_workers"] == 1 and not found.refused
    assert any(line.startswith("train.dataloader_num_workers: 1 is written") for line in found.different)
    assert made({**steps, "train.dataloader_num_workers": 3}).table["dataloader_num_workers"] == 3


def test_chatml_adds_tokens_that_need_embeddings():
    facts = replace(READABLE, split_markers=("<|im_start|>", "<|im_end|>"))
    patch = {**WITH, "data.chat_template": "chatml"}
    finding = rule_finding("LLF002", patch, TWO_H100, facts)
    assert finding and "no embeddings for <|im_start|> and <|im_end|>" in finding.message
    assert (
        rule_finding(
            "LLF002",
            {**patch, **next(fix for fix in finding.fixes if "tokens" in str(fix.patch)).patch},
            TWO_H100,
            facts,
        )
        is None
    )
    assert rule_finding("LLF002", {**patch, "llamafactory.template": "default"}, TWO_H100, facts) is None


def test_extra_arguments_cannot_move_the_run():
    """They count in what the parser refuses."""
    patch = {**WITH, "llamafactory.extra_args": '{"output_dir": "/elsewhere", "use_galore": true}'}
    spec = edit(RunSpec(), patch)
    assert yaml.safe_load(plan(spec, EIGHT).files["train.yaml"])["output_dir"] == "checkpoints"
    exported = export(spec, resolve(spec, EIGHT), "messages").table
    assert (exported["output_dir"], exported["use_galore"]) == ("/elsewhere", True)
    assert "sets output_dir itself" in rule_finding("LLF005", patch, TWO_H100, READABLE).message
    assert "cannot be combined with LoRA" in rule_finding("LLF002", patch, TWO_H100, READABLE).message


@pytest.mark.parametrize("preset", [found.name for found in presets.presets()])
def test_an_exported_spec_is_imported_again(preset, tmp_path):
    """All options of a preset that LLaMA-Factory has survive the way there and back."""
    spec = edit(presets.read(preset), {**FILES, "data.files": (str(tmp_path / "a.jsonl"),)})
    lines(tmp_path / "a.jsonl", {"prompt": "?", "chosen": "a", "rejected": "b"})
    found = export(spec, resolve(spec, EIGHT), "pairs" if spec.train.stage in ("dpo", "reward") else "messages")
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)
    again = import_file(found.files["train.yaml"], RunSpec(), tmp_path)
    kept = {"lora.r", "lora.alpha", "train.learning_rate", "train.num_train_epochs", "train.stage", "method.kind"}
    kept |= {"data.max_length", "train.per_device_train_batch_size", "method.quantization", "train.optim", "train.seed"}
    kept |= {"train.gradient_accumulation_steps", "train.lr_scheduler_type", "train.warmup_steps", "save.strategy"}
    before, after = changes(spec), changes(again.spec)
    assert {name: before.get(name) for name in kept} == {name: after.get(name) for name in kept}


def test_the_command(tmp_path, capsys, monkeypatch):
    assert main(["export", "first-run", "--to", "llamafactory", "--out", str(tmp_path / "my out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"cd '{tmp_path}/my out' && ") and "llamafactory-cli train train.yaml" in printed.out
    assert "Different there: data.chat_template" in printed.err
    assert (tmp_path / "my out/train.yaml").exists() and "Replaced" not in printed.err
    (tmp_path / "my out/train.yaml").write_text("my own: file")
    assert main(["export", "first-run", "--to", "llamafactory", "--out", str(tmp_path / "my out")]) == 0
    replaced = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Replaced")]
    assert replaced == ["Replaced a file with other contents: train.yaml"]
    monkeypatch.setattr("backend.cli.export.target_machine", lambda arguments: MIG)
    assert main(["export", "first-run", "--to", "llamafactory", "--out", str(tmp_path / "slice")]) == 0
    assert "CUDA_VISIBLE_DEVICES=MIG-7 llamafactory-cli" in capsys.readouterr().out, "0 is the first slice"


def test_weights_of_turns_are_named_as_missing(tmp_path, capsys):
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", "weight": 0}]
    files = lines(tmp_path / "a.jsonl", {"messages": turns}, {"messages": [turns[0], {**turns[1], "weight": 1}]})
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"data": {"source": "files", "files": [files]}}))
    command = ["export", str(tmp_path / "spec.yaml"), "--to", "llamafactory", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    expected = "Not exported: data.source: in 1 of 2 checked examples, a turn has a weight other than 1. LLaMA-Factory"
    assert expected in capsys.readouterr().err


def test_columns_of_the_first_example(tmp_path):
    """LLaMA-Factory stops at a column that the data does not have."""
    rows = {
        "a": {"instruction": "Q", "output": "A"},
        "b": {"instruction": "Q", "output": "A", "input": "", "system": ""},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    found = made({"data.files": [str(tmp_path / f"{name}.jsonl") for name in rows]}, "alpaca")
    first, second = (found.datasets[name]["columns"] for name in ("data_1", "data_2"))
    assert first == {"prompt": "instruction", "response": "output"}
    assert second == {**first, "query": "input", "system": "system"}


def test_every_dataset_is_written(tmp_path):
    """Each file is an entry with the format and columns of its dataset, and validation files stay with them."""
    talk = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]}
    talks, facts = lines(tmp_path / "talks.jsonl", talk), lines(tmp_path / "facts.jsonl", {"q": "?", "a": "a"})
    more = lines(tmp_path / "more.jsonl", talk)
    second = {"source": "files", "files": [facts], "format": "prompt_completion", "prompt_column": "q"}
    second |= {"completion_column": "a", "validation": "files", "validation_files": [facts]}
    hub = {"source": "hub", "hub_id": "x/y", "hub_config": "en", "format": "sharegpt", "validation": "none"}
    detected = {"source": "files", "files": [more], "validation": "none"}
    found = made({"data.files": (talks, more), "data.sources": [{}, second, hub, detected]})
    assert found.table["dataset"] == "data_1,data_2,data_3,data_4,data_5" and found.table["eval_dataset"] == "eval_1"
    assert "mix_strategy" not in found.table and "val_size" not in found.table
    entries = found.datasets
    assert [entries[f"data_{n}"].get("file_name") for n in range(1, 6)] == [talks, more, facts, None, more]
    assert entries["data_3"]["columns"] == entries["eval_1"]["columns"] == {"prompt": "q", "response": "a"}
    assert (entries["data_4"]["hf_hub_url"], entries["data_4"]["subset"]) == ("x/y", "en")
    assert entries["data_5"]["columns"] == {"messages": "messages"} and not found.missing


MIX = {
    "data.sources": [{}, {"source": "files", "files": ["/data/b.jsonl"], "format": "messages", "validation": "none"}]
}


@pytest.mark.parametrize("mixing", ["interleave_first_exhausted", "interleave_all_exhausted"])
def test_an_exported_mixture_is_imported_again(tmp_path, mixing):
    patch = {**MIX, "data.mixing": mixing, "data.weight": 3, "data.max_samples": 9, "data.sources[1].max_samples": 9}
    patch |= {
        "data.system_prompt": "Be brief.",
        "data.sources[1].system_prompt": "Be brief.",
        "data.format": "messages",
    }
    found = made(patch)
    assert found.table["interleave_probs"] == "0.75,0.25" and not found.missing
    for name, text in found.files.items():
        (tmp_path / name).write_text(text)
    again = import_file(found.files["train.yaml"], RunSpec(), tmp_path)
    before, after = edit(RunSpec(), {**FILES, "data.files": ("/data/a.jsonl",), **patch}).data, again.spec.data
    assert after.mixing == mixing and [each.weight for each in after.datasets] == [0.75, 0.25]
    for one, other in zip(before.datasets, after.datasets, strict=True):
        for name in ("source", "files", "format", "max_samples", "system_prompt", "validation"):
            assert getattr(one, name) == getattr(other, name), name


SPLIT = {"data.validation": "split", "data.sources[1].validation": "split"}


FIRST = {"data.mixing": "interleave_first_exhausted"}


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        ({"data.weight": 2}, "has no weights for concatenated datasets"),
        ({**FIRST, "data.files": ("/a.jsonl", "/b.jsonl")}, "interleaves files, so each"),
        ({"data.sources[1].system_prompt": "Be brief."}, "has one system prompt for all datasets"),
        ({"data.max_samples": 9}, "has one max_samples for all datasets"),
        ({"data.validation": "split"}, "uses one val_size for all datasets"),
        ({**SPLIT, "data.validation_split": 0.1}, "uses one val_size for all datasets"),
        ({**FIRST, "data.validation": "files", "data.validation_files": ("/v.jsonl",)},
         "also interleaves eval_dataset"),
        ({"data.mixing": "interleave_all_exhausted", **SPLIT}, "would put repeated training examples in"),
        ({"data.mixing": "interleave_first_exhausted", **SPLIT}, ""),
        (SPLIT, ""),
    ],
)  # fmt: skip
def test_mixtures_that_llamafactory_does_not_have(patch, text):
    found = [line for line in made({**MIX, **patch}).missing if line.startswith("data.sources: ")]
    assert len(found) == bool(text) and "".join(found).startswith(f"data.sources: LLaMA-Factory {text}" if text else "")


def test_datasets_of_different_formats(tmp_path):
    """The facts then name no format. One that cannot be detected, such as that of a dataset on the Hub, is refused."""
    talk = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]}
    talks = lines(tmp_path / "talks.jsonl", talk)
    second = {"source": "files", "files": [lines(tmp_path / "b.jsonl", {"instruction": "?", "output": "a"})]}
    found = made({"data.files": (talks,), "data.sources": [{}, {**second, "validation": "none"}]}, "")
    assert [each["formatting"] for each in found.datasets.values()] == ["sharegpt", "alpaca"] and not found.missing
    texts = {**second, "files": [lines(tmp_path / "c.jsonl", {"text": "a"})], "validation": "none"}
    found = made({"data.files": (talks,), "data.sources": [{}, texts]}, "")
    assert found.missing == ["data.sources: LLaMA-Factory cannot mix plain text with conversations in SFT"]
    hub = {**WITH, "data.source": "hub", "data.hub_id": "x/y", "data.validation": "none"}
    unknown = replace(READABLE, format="")
    assert "data.format is auto" in rule_finding("LLF004", hub, TWO_H100, unknown).message
    assert rule_finding("LLF004", {**hub, "data.format": "messages"}, TWO_H100, unknown) is None


def test_a_second_dataset_of_preferences_or_an_unknown_format():
    pairs = {"data.sources[1].format": "pairs", "data.sources[1].source": "hub", "data.sources[1].hub_id": "x/y"}
    for patch in (pairs, {**pairs, "data.sources[1].format": "auto"}):
        assert [line.partition(":")[0] for line in made({**MIX, **patch}).missing] == ["data.sources[1].format"]
        finding = rule_finding("LLF004", {**MIX, **patch, **WITH}, TWO_H100, READABLE)
        assert finding and finding.message.startswith(f"data.sources[1].format is {patch['data.sources[1].format']}, ")


def test_a_tied_output_layer_has_the_name_of_the_embeddings():
    """LLaMA-Factory looks for names of parameters, among which PyTorch lists shared ones once."""
    spec = edit(RunSpec(), {"method.kind": "freeze", "method.freeze_extra_modules": ("lm_head", "norm")})
    untied = replace(SMOL, tied=False)
    for shape, names in ((SMOL, "embed_tokens,norm"), (untied, "lm_head,norm"), (None, "lm_head,norm")):
        assert export(spec, resolve(spec, EIGHT), "messages", True, shape).table["freeze_extra_modules"] == names
