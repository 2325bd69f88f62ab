"""Labels: the loss is on every completion of a conversation and nothing else; packed examples do not attend to each
other."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from training_runs import make_spec
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import chat_template_utils
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

from backend.train import data, generation_eval, templates, text_metrics
from backend.train.run_log import TrainError
from backend.train.templates import ChatTokenizer, chatml

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "When does IC 5 leave?"},
    {"role": "assistant", "content": "At nine."},
    {"role": "user", "content": "From where?"},
    {"role": "assistant", "content": "Platform 7, Bern."},
]
# Like SmolLM2's: no generation markers, and a default system prompt.
TEMPLATE_WITHOUT_MARKERS = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nI am Tiny<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING_TEMPLATE = "{% for m in messages %}{{ m['content'] if loop.last else '...' }}<|im_end|>{% endfor %}"


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def trained_spans(tokenizer: Any, chat: ChatTokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """The spans with a loss, as text."""
    ids, labels = chat.tokenize(messages)
    assert len(ids) == len(labels)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    text = "".join("\0" if label == -100 else tokenizer.decode([label]) for label in labels)
    return [part for part in text.split("\0") if part]


@pytest.mark.parametrize("template", ["marked", "plain"])
def test_loss_is_on_every_completion_and_nothing_else(tokenizer: Any, template: str) -> None:
    if template == "plain":
        tokenizer.chat_template = TEMPLATE_WITHOUT_MARKERS
    chat = ChatTokenizer.create(tokenizer, all_tokens=False)
    assert (chat.marked_template is None) == (template == "plain")
    assert trained_spans(tokenizer, chat, CONVERSATION) == ["At nine.<|im_end|>\n", "Platform 7, Bern.<|im_end|>\n"]
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(chat.tokenize(CONVERSATION)[0]) == whole


@pytest.mark.parametrize("name", ["qwen3", "llama3", "qwen2_5"])
def test_known_templates_have_loss_on_each_completion(tokenizer: Any, name: str) -> None:
    """Templates with a training version in TRL; qwen3's own drops the thinking of earlier messages."""
    import trl.chat_template_utils as known  # noqa: PLC0415

    tokenizer.chat_template = getattr(known, f"{name}_chat_template")
    tokenizer.bos_token = tokenizer.bos_token or "<|endoftext|>"
    parts = trained_spans(tokenizer, ChatTokenizer.create(tokenizer, all_tokens=False), CONVERSATION)
    assert len(parts) == 2
    assert "At nine." in parts[0]
    assert "Platform 7, Bern." in parts[1]
    assert not any("When" in part or "brief" in part or "From" in part for part in parts)


def test_loss_on_all_tokens(tokenizer: Any) -> None:
    ids, labels = ChatTokenizer.create(tokenizer, all_tokens=True).tokenize(CONVERSATION)
    assert ids == labels


CALL = {"type": "function", "function": {"name": "timetable", "arguments": {"train": "IC 5"}}}
CONVERSATIONAL = [
    {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:3]},
    {"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]},  # no loss on the assistant turn of the prompt
    {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:]},
    {
        "prompt": CONVERSATION[1:2],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "9:00"},
            {"role": "assistant", "content": "At nine."},
        ],
    },
]


@pytest.mark.parametrize("max_length", [256, 20])
@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize("template", ["marked", "plain", "qwen3", "llama3"])
def test_conversational_prompts_and_completions_have_the_labels_of_trl(
    tiny: Path, tmp_path: Path, template: str, all_tokens: bool, max_length: int
) -> None:
    tokens = AutoTokenizer.from_pretrained(tiny)
    if template == "plain":
        tokens.chat_template = TEMPLATE_WITHOUT_MARKERS
    elif template != "marked":
        tokens.chat_template = getattr(chat_template_utils, f"{template}_chat_template")
        tokens.bos_token = "<|endoftext|>"
    rows = CONVERSATIONAL[: 4 if template == "qwen3" else 3]  # the others ignore tool calls
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    loss_on = "all_tokens" if all_tokens else "completions"
    options = {"data.source": "files", "data.files": (str(path),), "data.validation": "none", "data.max_samples": 0}
    spec = make_spec({**options, "data.loss_on": loss_on, "data.max_length": max_length})
    arguments: Any = SimpleNamespace(
        dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start", shuffle_dataset=False,
        dataset_text_field="text", assistant_only_loss=False,
    )  # fmt: skip
    trainer: Any = SimpleNamespace(_tokenizer=tokens, chat_template=None, completion_only_loss=not all_tokens)
    with_dicts = Dataset.from_list(rows, on_mixed_types="use_json")
    expected = SFTTrainer._prepare_dataset(trainer, with_dicts, tokens, arguments, False, None, "train")
    if not len(expected):
        with pytest.raises(TrainError, match="trained token"):
            data.prepare(spec, tokens, lambda done, of: True, print)
        return
    made = data.prepare(spec, tokens, lambda done, of: True, print).train
    assert made["input_ids"][:] == expected["input_ids"][:]
    assert made["labels"][:] == expected["labels"][:]
    assert max_length < 256 or len(made) == len(rows)


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("template", ["marked", "plain", "qwen3", "llama3"])
def test_conversational_pairs_have_the_token_ids_of_trl(
    tiny: Path, tmp_path: Path, template: str, implicit: bool
) -> None:
    """With a prompt column, and with the prompt as the turns that both conversations begin with."""
    tokens = AutoTokenizer.from_pretrained(tiny)
    if template == "plain":
        tokens.chat_template = TEMPLATE_WITHOUT_MARKERS
    elif template != "marked":
        tokens.chat_template = getattr(chat_template_utils, f"{template}_chat_template")
        tokens.bos_token = "<|endoftext|>"
    rejected = [{"role": "assistant", "content": "Never."}]
    rows: list[dict[str, Any]] = [{**row, "rejected": rejected} for row in CONVERSATIONAL[:2]]
    for row in rows:
        row["chosen"] = row.pop("completion")
        if implicit:
            prompt = row.pop("prompt")
            row |= {name: [*prompt, *row[name]] for name in ("chosen", "rejected")}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"data.source": "files", "data.files": (str(path),), "data.validation": "none", "data.max_samples": 0}
    made = data.prepare(make_spec({**options, "train.stage": "dpo"}), tokens, lambda done, of: True, print).train
    arguments: Any = SimpleNamespace(dataset_num_proc=None, max_length=256, truncation_mode="keep_start")
    trainer: Any = SimpleNamespace(_tokenizer=tokens)
    expected = DPOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokens, arguments, "train")
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert made[name][:] == expected[name][:]


def test_template_that_rewrites_messages_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = REWRITING_TEMPLATE
    with pytest.raises(templates.UnsupportedConversation, match=r"data\.loss_on"):
        ChatTokenizer.create(tokenizer, all_tokens=False).tokenize(CONVERSATION)
    assert ChatTokenizer.create(tokenizer, all_tokens=True).tokenize(CONVERSATION)[0]


def test_missing_template_error_names_the_option(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(TrainError, match=r"data\.chat_template"):
        ChatTokenizer.create(tokenizer, all_tokens=False)


def test_chatml_ends_with_a_token_of_the_vocabulary(tokenizer: Any) -> None:
    assert "eos_token" not in chatml(tokenizer)
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.get_vocab = lambda: {"a": 0}
    assert "'<|im_end|>' + eos_token" in chatml(other)
    assert not templates.split_markers(tokenizer) and templates.split_markers(other) == ["<|im_start|>", "<|im_end|>"]


def test_eval_prompt_is_everything_before_the_last_completion(tokenizer: Any) -> None:
    items = [data.ConvertedExample("here", {"messages": CONVERSATION})]
    (prompt,) = generation_eval.eval_prompts(ChatTokenizer.create(tokenizer, True), items)
    assert prompt.text.endswith("<|im_start|>user\nFrom where?<|im_end|>\n<|im_start|>assistant\n")
    assert (prompt.prompt, prompt.reference) == ("From where?", "Platform 7, Bern.")


def test_exact_match_compares_json_by_value() -> None:
    assert text_metrics.is_exact_match('{"a": 1, "b": null}', '{"b":null,"a":1}\n')
    assert text_metrics.is_exact_match("Yes.", " Yes. ")
    assert not text_metrics.is_exact_match('{"a": 1}', '{"a": 2}')
    assert not text_metrics.is_exact_match("1", "1.0"), "a bare number is text"
    assert not text_metrics.is_exact_match('{"a": 1}', '{"a": 1')


def prepare_rows(tiny: Path, tmp_path: Path, rows: list[Any], **more: Any) -> tuple[data.PreparedData, list[str]]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    own = {"data.source": "files", "data.files": (str(path),), "data.validation": "none", "data.max_samples": 0}
    logged: list[str] = []
    spec = make_spec({**own, **more})
    return data.prepare(spec, AutoTokenizer.from_pretrained(tiny), lambda done, of: True, logged.append), logged


def test_long_examples_are_truncated_and_empty_ones_dropped_and_counted(tiny: Path, tmp_path: Path) -> None:
    long = {"prompt": "word " * 400, "completion": "dropped"}
    half = {"prompt": "Hi", "completion": "word " * 400}
    made, logged = prepare_rows(tiny, tmp_path, [long, half, {"prompt": "Hi", "completion": "Ho"}])
    assert [len(row) <= 256 for row in made.train["input_ids"]] == [True, True]
    assert "2 truncated to 256 tokens" in logged[0]
    assert "1 dropped, without trained tokens" in logged[0]
    with pytest.raises(TrainError, match=r"data\.max_length"):
        prepare_rows(tiny, tmp_path, [long])


TEMPLATE_WITH_MARKERS = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}INSIDE{% endgeneration %}OUTSIDE
{% else %}{{ m['content'] }}<|im_end|>
{% endif %}{% endfor %}"""


@pytest.mark.parametrize(("place", "warned"), [("INSIDE", False), ("OUTSIDE", True)])
def test_markers_that_leave_out_the_stop_token_are_reported(
    tiny: Path, tmp_path: Path, place: str, warned: bool
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE_WITH_MARKERS.replace(place, "<|im_end|>").replace("INSIDE", "").replace("OUTSIDE", ""))
    asked = {"data.chat_template": "file", "data.chat_template_file": str(template)}
    spec = make_spec({**asked, "data.source": "files", "data.files": (str(tmp_path / "rows.jsonl"),)})
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": CONVERSATION}) + "\n" + json.dumps({"messages": CONVERSATION})
    )
    tokens, logged = AutoTokenizer.from_pretrained(tiny), []
    templates.set_chat_template(spec, tokens)
    data.prepare(spec, tokens, lambda done, of: True, logged.append)
    assert any("generation may not stop" in line for line in logged) == warned


def test_a_last_character_of_several_tokens_is_trained_whole(tokenizer: Any) -> None:
    """Where the markers end with the content, transformers' own mask leaves out all but the character's first token."""
    content = "At noon \U0001f682"
    tokenizer.chat_template = TEMPLATE_WITH_MARKERS.replace("INSIDE", "").replace("OUTSIDE", "<|im_end|>")
    chat = ChatTokenizer.create(tokenizer, all_tokens=False)
    _, labels = chat.tokenize([CONVERSATION[1], {"role": "assistant", "content": content}])
    trained = [label for label in labels if label != -100]
    assert trained == tokenizer(content, add_special_tokens=False)["input_ids"]
    assert len(tokenizer("\U0001f682", add_special_tokens=False)["input_ids"]) > 1


def test_builtin_templates_train_the_stop_token(tokenizer: Any) -> None:
    for template in (tokenizer.chat_template, chatml(tokenizer)):
        tokenizer.chat_template = template
        chat = ChatTokenizer.create(tokenizer, all_tokens=False)
        assert None not in chat.ends(chat.tokenize(CONVERSATION)[1])


def test_pretraining_splits_long_texts_without_losing_tokens(tiny: Path, tmp_path: Path) -> None:
    text = "".join(f"Train {n} leaves. " for n in range(200))
    made, logged = prepare_rows(tiny, tmp_path, [{"text": text}], **{"train.stage": "pretraining"})
    tokens = [token for row in made.train["input_ids"] for token in row]
    assert AutoTokenizer.from_pretrained(tiny).decode(tokens, skip_special_tokens=True) == text
    assert "1 split into sequences" in logged[0]
    assert made.train["labels"][0] == made.train["input_ids"][0]


def test_invalid_example_error_names_file_and_line(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"rows\.jsonl, line 2: has no column completion"):
        prepare_rows(tiny, tmp_path, [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])


def test_packed_examples_do_not_attend_to_each_other(tiny: Path) -> None:
    """The logits of an example are the same alone and packed behind another, with the trainer's own batches."""
    model = AutoModelForCausalLM.from_pretrained(tiny).eval()
    first, second = list(range(10, 40)), list(range(100, 130))
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    row = {"input_ids": first + second, "labels": first + second, "seq_lengths": [30, 30]}
    batch = collate([row])
    assert "attention_mask" not in batch
    batch.pop("labels")
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits[0]
        alone = model(torch.tensor([second])).logits[0]
        leaky = model(torch.tensor([first + second])).logits[0]
    assert torch.allclose(packed[30:], alone, atol=1e-5)
    assert not torch.allclose(leaky[30:], alone, atol=1e-3), (
        "without separate positions the logits must differ, or the test proves nothing"
    )
