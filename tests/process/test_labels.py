"""What is learned: every answer of a conversation and nothing else; packed examples do not see each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import a_spec
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from backend.train import data, generation_eval, templates, text_metrics
from backend.train.run_log import TrainError
from backend.train.templates import ChatTokenizer, chatml

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "When does IC 5 leave?"},
    {"role": "assistant", "content": "At nine."},
    {"role": "user", "content": "From where?"},
    {"role": "assistant", "content": "Platform 7, Bern."},
]
# As SmolLM2's: no marks, and a system prompt of its own where there is none.
PLAIN = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nI am Tiny<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = "{% for m in messages %}{{ m['content'] if loop.last else '...' }}<|im_end|>{% endfor %}"


@pytest.fixture
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def learned(tokenizer: Any, writer: ChatTokenizer, turns: list[dict[str, Any]]) -> list[str]:
    """The learned stretches, as text."""
    ids, labels = writer.tokenize(turns)
    assert len(ids) == len(labels)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    text = "".join("\0" if label == -100 else tokenizer.decode([label]) for label in labels)
    return [part for part in text.split("\0") if part]


@pytest.mark.parametrize("template", ["marked", "plain"])
def test_every_answer_is_learned_and_nothing_else(tokenizer: Any, template: str) -> None:
    if template == "plain":
        tokenizer.chat_template = PLAIN
    writer = ChatTokenizer.create(tokenizer, all_tokens=False)
    assert (writer.marked_template is None) == (template == "plain")
    assert learned(tokenizer, writer, TALK) == ["At nine.<|im_end|>", "Platform 7, Bern.<|im_end|>"]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(writer.tokenize(TALK)[0]) == whole


@pytest.mark.parametrize("name", ["qwen3", "llama3", "qwen2_5"])
def test_known_templates_are_learned_turn_by_turn(tokenizer: Any, name: str) -> None:
    """Templates whose training twin TRL has; qwen3's own drops what earlier answers thought."""
    import trl.chat_template_utils as known  # noqa: PLC0415

    tokenizer.chat_template = getattr(known, f"{name}_chat_template")
    tokenizer.bos_token = tokenizer.bos_token or "<|endoftext|>"
    parts = learned(tokenizer, ChatTokenizer.create(tokenizer, all_tokens=False), TALK)
    assert len(parts) == 2
    assert "At nine." in parts[0]
    assert "Platform 7, Bern." in parts[1]
    assert not any("When" in part or "brief" in part or "From" in part for part in parts)


def test_all_learns_all(tokenizer: Any) -> None:
    ids, labels = ChatTokenizer.create(tokenizer, all_tokens=True).tokenize(TALK)
    assert ids == labels


def test_a_template_that_rewrites_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(templates.UnsupportedConversation, match=r"data\.learn"):
        ChatTokenizer.create(tokenizer, all_tokens=False).tokenize(TALK)
    assert ChatTokenizer.create(tokenizer, all_tokens=True).tokenize(TALK)[0]


def test_a_model_without_template_is_told_what_to_do(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(TrainError, match=r"data\.template"):
        ChatTokenizer.create(tokenizer, all_tokens=False)


def test_chatml_ends_where_the_tokenizer_can_stop(tokenizer: Any) -> None:
    assert "eos_token" not in chatml(tokenizer)
    foreign = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    foreign.get_vocab = lambda: {"a": 0}
    assert "'<|im_end|>' + eos_token" in chatml(foreign)


def test_the_question_is_what_stands_before_the_last_answer(tokenizer: Any) -> None:
    items = [data.ConvertedExample("here", {"messages": TALK})]
    (asked,) = generation_eval.eval_prompts(ChatTokenizer.create(tokenizer, True), items)
    assert asked.text.endswith("<|im_start|>user\nFrom where?<|im_end|>\n<|im_start|>assistant\n")
    assert (asked.prompt, asked.reference) == ("From where?", "Platform 7, Bern.")


def test_exact_is_exact_and_json_counts_by_what_it_says() -> None:
    assert text_metrics.is_exact_match('{"a": 1, "b": null}', '{"b":null,"a":1}\n')
    assert text_metrics.is_exact_match("Yes.", " Yes. ")
    assert not text_metrics.is_exact_match('{"a": 1}', '{"a": 2}')
    assert not text_metrics.is_exact_match("1", "1.0"), "a bare number is text"
    assert not text_metrics.is_exact_match('{"a": 1}', '{"a": 1')


def prepared(tiny: Path, tmp_path: Path, rows: list[Any], **more: Any) -> tuple[data.PreparedData, list[str]]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    own = {"data.source": "files", "data.files": (str(path),), "data.validation": "none", "data.max_samples": 0}
    said: list[str] = []
    spec = a_spec({**own, **more})
    return data.prepare(spec, AutoTokenizer.from_pretrained(tiny), lambda done, of: True, said.append), said


def test_long_rows_are_cut_and_empty_ones_dropped_and_counted(tiny: Path, tmp_path: Path) -> None:
    long = {"prompt": "word " * 400, "completion": "never seen"}
    half = {"prompt": "Hi", "completion": "word " * 400}
    made, said = prepared(tiny, tmp_path, [long, half, {"prompt": "Hi", "completion": "Ho"}])
    assert [len(row) <= 256 for row in made.train["input_ids"]] == [True, True]
    assert "2 cut at 256 tokens" in said[0]
    assert "1 with nothing left to learn dropped" in said[0]
    with pytest.raises(TrainError, match=r"data\.max_length"):
        prepared(tiny, tmp_path, [long])


MARKED = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}INSIDE{% endgeneration %}OUTSIDE
{% else %}{{ m['content'] }}<|im_end|>
{% endif %}{% endfor %}"""


@pytest.mark.parametrize(("place", "told"), [("INSIDE", False), ("OUTSIDE", True)])
def test_marks_that_leave_out_the_end_are_told(tiny: Path, tmp_path: Path, place: str, told: bool) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(MARKED.replace(place, "<|im_end|>").replace("INSIDE", "").replace("OUTSIDE", ""))
    asked = {"data.chat_template": "file", "data.chat_template_file": str(template)}
    spec = a_spec({**asked, "data.source": "files", "data.files": (str(tmp_path / "rows.jsonl"),)})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": TALK}))
    tokens, said = AutoTokenizer.from_pretrained(tiny), []
    templates.set_chat_template(spec, tokens)
    data.prepare(spec, tokens, lambda done, of: True, said.append)
    assert any("learn to stop" in line for line in said) == told


def test_the_templates_here_learn_to_stop(tokenizer: Any) -> None:
    assert ChatTokenizer.create(tokenizer, all_tokens=False).trains_stop_token
    tokenizer.chat_template = chatml(tokenizer)
    assert ChatTokenizer.create(tokenizer, all_tokens=False).trains_stop_token


def test_pretraining_splits_long_texts_and_loses_nothing(tiny: Path, tmp_path: Path) -> None:
    text = "".join(f"Train {n} leaves. " for n in range(200))
    made, said = prepared(tiny, tmp_path, [{"text": text}], **{"train.stage": "pretraining"})
    tokens = [token for row in made.train["input_ids"] for token in row]
    assert AutoTokenizer.from_pretrained(tiny).decode(tokens, skip_special_tokens=True) == text
    assert "1 split into pieces" in said[0]
    assert made.train["labels"][0] == made.train["input_ids"][0]


def test_a_bad_row_is_named_with_file_and_line(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"rows\.jsonl, line 2: has no column completion"):
        prepared(tiny, tmp_path, [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])


def test_packed_examples_do_not_see_each_other(tiny: Path) -> None:
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
    assert not torch.allclose(leaky[30:], alone, atol=1e-3), "the test could not tell"
