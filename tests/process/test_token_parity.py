"""Token ids and labels are those of TRL's own preparation, for published chat templates and each format of the data,
and those that foreign_labels.py has recorded of LLaMA-Factory and axolotl. Differences on purpose are listed with their
reason, and are exactly as listed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foreign_labels
import pytest
from datasets import Dataset, IterableDataset
from foreign_labels import GOLDEN, TOOL
from jinja2 import TemplateError
from parameters import soak_except
from test_every_template import ANSWER, CONVERSATIONS, own_tokenizer
from tokenizers.processors import TemplateProcessing
from training_runs import make_spec
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.dpo_trainer import DataCollatorForPreference

from backend.train import data
from backend.train.run_log import TrainError
from backend.train.template_input import THOUGHT

Row = dict[str, Any]
Turns = list[dict[str, Any]]
LONG = 4096  # tokens: longer than all examples
TURNS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns
PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
CALLS = ("call", "call_and_text")
# The tiny model's own template, and published ones of many kinds: with and without tool calls and reasoning, with a
# beginning-of-sequence token, with lists of parts as contents, and without a newline after the end of a turn.
TEMPLATES = (
    "own", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma3", "glm4moe", "gptoss", "lfm2", "llama3", "llama3_1",
    "nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "qwen3_8", "smolvlm",
)  # fmt: skip
IN_MAKE_TEST = ("own", "cohere2", "deepseekv3", "glm4moe", "gptoss", "llama3", "llama3_1", "qwen3")
REFUSED = {"cohere2": CALLS, "gemma3": CALLS}  # by the template itself: roles must alternate
# TRL has no version for training of this template and refuses assistant_only_loss. Footplate finds the completions by
# what each of them adds to the text, as TRL does for prompts and completions.
NOT_FOR_TRL = ("llama3_1",)


@dataclass(frozen=True)
class Difference:
    """TRL makes other tokens of some turns than Footplate, for a reason. It makes the same of what `change` gives."""

    reason: str
    change: Callable[[Turns], Turns]
    only_own_template: bool = False  # there is none with TRL's version of the template for training


def calls_as_text(turns: Turns) -> Turns:
    return [without_calls(turn) if "tool_calls" in turn else turn for turn in turns]


def without_calls(turn: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps([call["function"] for call in turn["tool_calls"]])
    kept = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (turn["content"], text)))}


def arguments_as_text(turns: Turns) -> Turns:
    changed = json.loads(json.dumps(turns))
    for function in (call["function"] for turn in changed for call in turn.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"])
    return list(changed)


def reasoning_as_key(turns: Turns) -> Turns:
    found = [(turn, THOUGHT.fullmatch(turn["content"])) for turn in turns]
    return [
        {**turn, "reasoning_content": thought[1].strip(), "content": thought[2]} if thought else turn
        for turn, thought in found
    ]


def contents_as_parts(turns: Turns) -> Turns:
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in calls_as_text(turns)]


NO_CALLS = Difference("the template has no tool calls: TRL leaves them out, here they become text", calls_as_text)
TEXT = Difference("the template concatenates arguments: TRL fails with an object", arguments_as_text, True)
TWICE = Difference("the template writes an empty reasoning before one in the content", reasoning_as_key)
PARTS = Difference("the template reads lists of parts: TRL trains on empty contents", contents_as_parts)
DIFFERENCES: Mapping[str, Mapping[str, Difference]] = {
    **dict.fromkeys(("lfm2", "llama3", "own", "phi3"), dict.fromkeys(CALLS, NO_CALLS)),
    "deepseekv3": dict.fromkeys(CALLS, TEXT),
    "qwen3_8": {"inline": TWICE},
    "smolvlm": dict.fromkeys(CONVERSATIONS, PARTS),
}

TRL_FAILS = {"deepseekv3": CALLS, "smolvlm": ("call",)}  # with these, unless they are changed


def tokenizer_of(tiny: Path, name: str) -> Any:
    return AutoTokenizer.from_pretrained(tiny) if name == "own" else own_tokenizer(tiny, name)


def prepared(folder: Path, tokenizer: Any, rows: Sequence[Row], **options: Any) -> Dataset:
    """The training examples of a run with these rows. Raises TrainError."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    given = {"data.source": "files", "data.files": (str(path),), "data.validation": "none", "data.max_samples": 0}
    named = {name.replace("__", "."): value for name, value in options.items()}
    spec = make_spec({"data.max_length": LONG, **given, **named})
    return data.prepare(spec, tokenizer, lambda done, of: True, lambda line: None).train


def labeled(rows: Dataset) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each row."""
    return [(row["input_ids"], row["labels"]) for row in rows]


def sft_of_trl(
    tokenizer: Any, rows: Sequence[Row], assistant: bool = False, completion: bool = True, max_length: int = LONG
) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of SFTTrainer's own preparation, with assistant_only_loss or completion_only_loss."""
    arguments: Any = SimpleNamespace(
        dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start", shuffle_dataset=False,
        dataset_text_field="text", assistant_only_loss=assistant,
    )  # fmt: skip
    swaps = assistant and not has_generation_markers(tokenizer.chat_template)  # as in SFTTrainer.__init__
    template = get_training_chat_template(tokenizer) if swaps else None
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=completion)
    as_they_are = IterableDataset.from_generator(lambda: iter(json.loads(json.dumps(rows))))
    return labeled(SFTTrainer._prepare_dataset(trainer, as_they_are, tokenizer, arguments, False, None, "train"))


def dpo_of_trl(tokenizer: Any, rows: Sequence[Row], max_length: int = LONG) -> list[list[list[int]]]:
    """The ids of prompt, chosen and rejected completion of DPOTrainer's own preparation."""
    arguments: Any = SimpleNamespace(dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start")
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    as_they_are = IterableDataset.from_generator(lambda: iter(json.loads(json.dumps(rows))))
    found = DPOTrainer._prepare_dataset(trainer, as_they_are, tokenizer, arguments, "train")
    return [[row[name] for name in PAIR] for row in found]


def pairs(rows: Dataset) -> list[list[list[int]]]:
    return [[row[name] for name in PAIR] for row in rows]


def by_turns_of_trl(tokenizer: Any, rows: Sequence[Row]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of conversations, of which TRL prepares each assistant turn as the completion of those before."""
    found = []
    for row in rows:
        turns = row["messages"]
        numbers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        more = {key: value for key, value in row.items() if key != "messages"}
        split = [{"prompt": turns[:number], "completion": turns[number : number + 1], **more} for number in numbers]
        parts = sft_of_trl(tokenizer, split)
        ids = parts[-1][0]
        trained = {n for _, labels in parts for n, label in enumerate(labels) if label != -100}
        found.append((ids, [token if n in trained else -100 for n, token in enumerate(ids)]))
    return found


def changed(row: Row, difference: Difference | None) -> Row:
    return {key: difference.change(value) if difference and key in TURNS else value for key, value in row.items()}


def check(
    name: str,
    rows: Mapping[str, Row],
    ours: Callable[[list[Row]], list[Any]],
    of_trl: Callable[[list[Row]], list[Any]],
    own_template: bool = True,
) -> None:
    """The rows have the tokens of TRL, except for the listed differences; those refused by the template have none."""
    differences = {
        case: difference
        for case, difference in DIFFERENCES.get(name, {}).items()
        if own_template or not difference.only_own_template
    }
    usable = {case: row for case, row in rows.items() if case.split()[0] not in REFUSED.get(name, ())}
    for row in (row for case, row in rows.items() if case not in usable):
        with pytest.raises(TrainError, match="alternate"):
            ours([row])
        with pytest.raises(TemplateError, match="alternate"):
            of_trl([row])
    known = {case: differences.get(case.split()[0]) for case in usable}
    expected = of_trl([changed(row, known[case]) for case, row in usable.items()])
    found = dict(zip(usable, ours(list(usable.values())), strict=True))
    assert found == dict(zip(usable, expected, strict=True))
    for case in (case for case, difference in known.items() if difference):
        if case.split()[0] in TRL_FAILS.get(name, ()):
            with pytest.raises((TypeError, TemplateError)):
                of_trl([usable[case]])
        else:
            assert of_trl([usable[case]]) != [found[case]], f"no difference any more: {case}"


def tools_of(case: str) -> Row:
    return {"tools": [TOOL]} if case in CALLS else {}


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize("name", soak_except(TEMPLATES, IN_MAKE_TEST))
def test_conversations(tiny: Path, tmp_path: Path, name: str, all_tokens: bool) -> None:
    tokenizer, loss_on = tokenizer_of(tiny, name), "all_tokens" if all_tokens else "completions"
    rows = {case: {"messages": turns, **tools_of(case)} for case, turns in CONVERSATIONS.items()}

    def of_trl(given: list[Row]) -> list[Any]:
        if name in NOT_FOR_TRL and not all_tokens:
            with pytest.raises(ValueError, match="not training-compatible"):
                sft_of_trl(tokenizer, given, assistant=True)
            return by_turns_of_trl(tokenizer, given)
        return sft_of_trl(tokenizer, given, assistant=not all_tokens)

    check(
        name,
        rows,
        lambda given: labeled(prepared(tmp_path, tokenizer, given, data__loss_on=loss_on)),
        of_trl,
        own_template=all_tokens,
    )


@pytest.mark.parametrize("name", soak_except(TEMPLATES, IN_MAKE_TEST))
def test_prompts_and_completions_as_turns(tiny: Path, tmp_path: Path, name: str) -> None:
    """The completion is the last turn, or all turns after the first; the loss is on it, or on all tokens."""
    tokenizer = tokenizer_of(tiny, name)
    rows = {c: {"prompt": turns[:-1], "completion": turns[-1:], **tools_of(c)} for c, turns in CONVERSATIONS.items()}
    for case in CALLS:
        turns = CONVERSATIONS[case]
        rows[f"{case} whole"] = {"prompt": turns[:1], "completion": turns[1:], **tools_of(case)}
    for loss_on, completion in (("completions", True), ("all_tokens", False)):
        check(
            name,
            rows,
            lambda given, on=loss_on: labeled(prepared(tmp_path, tokenizer, given, data__loss_on=on)),
            lambda given, only=completion: sft_of_trl(tokenizer, given, completion=only),
        )


@pytest.mark.parametrize("name", soak_except(TEMPLATES, IN_MAKE_TEST))
def test_preference_pairs_as_turns(tiny: Path, tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(tiny, name)
    rejected = [{"role": "assistant", "content": "No."}]
    rows = {
        case: {"prompt": turns[:-1], "chosen": turns[-1:], "rejected": rejected, **tools_of(case)}
        for case, turns in CONVERSATIONS.items()
    }
    check(
        name,
        rows,
        lambda given: pairs(prepared(tmp_path, tokenizer, given, train__stage="dpo")),
        lambda given: dpo_of_trl(tokenizer, given),
    )


@pytest.mark.parametrize("name", soak_except(TEMPLATES, IN_MAKE_TEST))
def test_prompts_and_completions_as_text(tiny: Path, tmp_path: Path, name: str) -> None:
    """On purpose, they are the turns of a conversation: the model is used with its chat template. TRL concatenates them
    as plain text."""
    tokenizer = tokenizer_of(tiny, name)
    question, answer, other = "Next IC to Bern?", "At nine.", "No."
    as_turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    parts = DIFFERENCES.get(name, {}).get("one")
    row = changed({"messages": as_turns}, parts)
    ours = labeled(prepared(tmp_path, tokenizer, [{"prompt": question, "completion": answer}]))
    if name in NOT_FOR_TRL:
        assert ours == by_turns_of_trl(tokenizer, [row])
    else:
        assert ours == sft_of_trl(tokenizer, [row], assistant=True)
    text = tokenizer(question + answer + tokenizer.eos_token)["input_ids"]
    ((ids, _),) = sft_of_trl(tokenizer, [{"prompt": question, "completion": answer}])
    assert ids == text != ours[0][0]

    pair = {"prompt": question, "chosen": answer, "rejected": other}
    as_turns.append({"role": "assistant", "content": other})
    row = dict(zip(("prompt", "chosen", "rejected"), ([turn] for turn in as_turns), strict=True))
    found = pairs(prepared(tmp_path, tokenizer, [pair], train__stage="dpo"))
    assert found == dpo_of_trl(tokenizer, [changed(row, parts)])
    ((prompt, chosen, _),) = dpo_of_trl(tokenizer, [pair])
    assert prompt + chosen == text != found[0][0] + found[0][1]


@pytest.mark.parametrize("name", ["gptoss", "llama3_1", "nemotron_3_nano", "qwen3"])
def test_functions_alone_are_tools(tiny: Path, tmp_path: Path, name: str) -> None:
    """As in LLaMA-Factory's datasets and OpenAI's Responses API. On purpose, they are the tools that a model gets from
    an OpenAI-compatible server; TRL passes them to the template as they are, which gpt-oss's cannot render."""
    tokenizer, row = tokenizer_of(tiny, name), {"prompt": CONVERSATIONS["one"][:1], "completion": [ANSWER]}
    (expected,) = sft_of_trl(tokenizer, [{**row, "tools": [TOOL]}])
    alone: dict[str, Any] = TOOL["function"]
    for tool in (TOOL, alone, {"type": "function", **alone}):
        for tools in ([tool], json.dumps([tool])):
            assert labeled(prepared(tmp_path, tokenizer, [{**row, "tools": tools}])) == [expected]
    if name == "gptoss":
        with pytest.raises(TemplateError, match="no attribute 'function'"):
            sft_of_trl(tokenizer, [{**row, "tools": [alone]}])
    elif name != "nemotron_3_nano":  # whose template reads both
        assert sft_of_trl(tokenizer, [{**row, "tools": [alone]}]) != [expected]


# What the tokenizer adds to a text -> how many tokens TRL has more: a second BOS token if the text begins with one, and
# a second EOS token if the text does not end with one, since TRL adds it to the text.
ADDED = {"$A": (0, 0), "<|endoftext|> $A": (1, 0), "<|endoftext|> $A <|im_end|>": (1, 1)}


@pytest.mark.parametrize("added", ADDED)
def test_texts(tiny: Path, tmp_path: Path, added: str) -> None:
    """Plain text with the token that ends it, in SFT and in pretraining."""
    tokenizer, (first, last) = AutoTokenizer.from_pretrained(tiny), ADDED[added]
    tokenizer.bos_token = "<|endoftext|>"
    known = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|endoftext|>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=known)
    texts = ["The IC leaves.", "The IC leaves.<|im_end|>", "A\n", "<|endoftext|>At nine."]
    rows = [{"text": text} for text in texts]
    of_trl = [ids for ids, _ in sft_of_trl(tokenizer, rows)]
    of_trl[3] = of_trl[3][first:]
    for n in (0, 2, 3):
        assert of_trl[n][-2:] == [2, 2] or not last
        of_trl[n] = of_trl[n][: len(of_trl[n]) - last]
    for stage in ("sft", "pretraining"):
        assert labeled(prepared(tmp_path, tokenizer, rows, train__stage=stage)) == [(ids, ids) for ids in of_trl]
    only_end = [rows[0], {"text": "<|im_end|>"}]
    kept = labeled(prepared(tmp_path, tokenizer, only_end))
    assert len(sft_of_trl(tokenizer, only_end)) == 2
    assert len(kept) == (1 if not first else 2), "on purpose, a text of one token is left out: nothing predicts it"


@pytest.mark.parametrize("name", soak_except(("llama3", "qwen3"), ("llama3",)))
def test_examples_that_are_cut(tiny: Path, tmp_path: Path, name: str) -> None:
    """Conversations and pairs after various numbers of tokens. On purpose, a pair is left out if both completions are
    the same within max_length: no preference is left in it."""
    tokenizer = tokenizer_of(tiny, name)
    turns = CONVERSATIONS["two"]
    rows = [{"messages": turns}, {"messages": [*turns[:3], {"role": "assistant", "content": "word " * 50}]}]
    answers = [[{"role": "assistant", "content": f"At nine, at ten and at noon, {word}."}] for word in ("Anna", "Otto")]
    pair = {"prompt": turns[:1], "chosen": answers[0], "rejected": answers[1]}
    short = {"prompt": turns[:1], "chosen": turns[1:2], "rejected": answers[1]}
    outcomes = set()
    for length in range(8, 70, 7):
        expected = sft_of_trl(tokenizer, rows, assistant=True, max_length=length)
        assert outcome(tmp_path, tokenizer, rows, length, labeled) == expected
        expected = sft_of_trl(tokenizer, rows, max_length=length)
        assert outcome(tmp_path, tokenizer, rows, length, labeled, data__loss_on="all_tokens") == expected
        in_batch = [sequences(row, length) for row in dpo_of_trl(tokenizer, [pair, short], length)]
        different = [both for both in in_batch if both[0] != both[1]]
        found = outcome(tmp_path, tokenizer, [pair, short], length, pairs, train__stage="dpo")
        assert [sequences(row, length) for row in found] == different
        outcomes.add((len(in_batch), len(different)))
    assert {(0, 0), (2, 2)} < outcomes and any(all_pairs > kept for all_pairs, kept in outcomes)


def outcome(
    folder: Path, tokenizer: Any, rows: list[Row], length: int, read: Callable[[Dataset], list[Any]], **more: Any
) -> list[Any]:
    """The prepared examples; [] if the run is refused because none has a trained token."""
    try:
        return read(prepared(folder, tokenizer, rows, data__max_length=length, **more))
    except TrainError as error:
        assert "trained token" in str(error) or "are the same" in str(error)
        return []


def sequences(row: list[list[int]], length: int) -> list[tuple[list[int], list[int]]]:
    """(ids, completion mask) of both sequences in TRL's batch."""
    batch = DataCollatorForPreference(pad_token_id=0, max_length=length)([dict(zip(PAIR, row, strict=True))])
    sizes = batch["attention_mask"].sum(1).tolist()
    both = zip(batch["input_ids"].tolist(), batch["completion_mask"].tolist(), sizes, strict=True)
    return [(ids[:size], mask[:size]) for ids, mask, size in both]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # a default of TRL
def test_the_trainers_themselves_prepare_these_tokens(tiny: Path, tmp_path: Path) -> None:
    """`sft_of_trl` and `dpo_of_trl` are what SFTTrainer and DPOTrainer train on."""
    tokenizer, model = tokenizer_of(tiny, "qwen3"), AutoModelForCausalLM.from_pretrained(tiny)
    model.resize_token_embeddings(len(tokenizer))
    rows = [{"messages": CONVERSATIONS[case]} for case in ("one", "two")]
    shared: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": 256}
    arguments = SFTConfig(str(tmp_path), assistant_only_loss=True, **shared)
    sft = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    assert labeled(sft.train_dataset) == sft_of_trl(tokenizer, rows, assistant=True)
    turns = CONVERSATIONS["one"]
    pair = {"prompt": turns[:1], "chosen": turns[1:], "rejected": CONVERSATIONS["inline"][1:]}
    dpo = DPOTrainer(
        model, args=DPOConfig(str(tmp_path), **shared), train_dataset=Dataset.from_list([pair]),
        processing_class=tokenizer,
    )  # fmt: skip
    assert pairs(dpo.train_dataset) == dpo_of_trl(tokenizer, [pair])


Replacement = tuple[str, str]
# Footplate's version of a marked text is the other program's with these replacements. The parts with a loss are in ⟦⟧.
NEWLINE: Replacement = ("<|im_end|>⟧\n", "<|im_end|>\n⟧")  # axolotl has the end of a turn in the loss, but not this
# TRL's version of Qwen2.5's template for training has this newline of the generation prompt in the loss, too.
FIRST_NEWLINE: Replacement = ("assistant\n⟦", "assistant⟦\n")
EMPTY = "<think>\n\n</think>\n\n"
# The template writes an empty reasoning before the content: it is a part of the completion, as in TRL's version of the
# template for training and in LLaMA-Factory. axolotl trains on the content only.
EMPTY_REASONING: Replacement = (f"{EMPTY}⟦", f"⟦{EMPTY}")
# Qwen3's own template leaves out the reasoning of earlier turns, TRL's version of it for training does not, so that
# they are what the model generates. axolotl uses the model's own.
EARLIER: Mapping[str, tuple[Replacement, ...]] = {
    "one": (),
    "two": (("assistant\n⟦At nine", f"assistant\n⟦{EMPTY}At nine"),),
    "call": (("assistant\n⟦<tool_call>", f"assistant\n⟦{EMPTY}<tool_call>"),),
    "earlier_reasoning": (("assistant\n⟦At nine", "assistant\n⟦<think>\nThe IC leaves at nine.\n</think>\n\nAt nine"),),
}
KNOWN: Mapping[tuple[str, str], Mapping[str, tuple[Replacement, ...]]] = {
    ("axolotl", "chatml"): dict.fromkeys(("one", "two"), (NEWLINE,)),
    ("axolotl", "qwen2_5"): dict.fromkeys(("one", "two", "call"), (NEWLINE, FIRST_NEWLINE)),
    ("axolotl", "qwen3"): {
        **{case: (NEWLINE, EMPTY_REASONING, *earlier) for case, earlier in EARLIER.items()},
        # axolotl finds the reasoning by rendering another one, so the tokens before it are not a part of the turn.
        "reasoning": (NEWLINE, ("<think>\n⟦", "⟦<think>\n")),
    },
    # LLaMA-Factory shortens the prompt and the completion in proportion. Here, as in TRL, the first tokens are kept.
    ("llamafactory", "chatml"): {"cut": (("assist⟦", "assistant\n⟦"), (" noon⟧", "⟧"))},
    ("llamafactory", "qwen2_5"): dict.fromkeys(("one", "two", "call"), (FIRST_NEWLINE,)),
    # LLaMA-Factory writes two newlines before the tools, also without a system prompt, unlike Qwen3's template.
    ("llamafactory", "qwen3"): {"call": (("system\n\n\n# Tools", "system\n# Tools"),)},
}


def marked(tokenizer: Any, ids: Sequence[int], labels: Sequence[int]) -> str:
    """The tokens as text, with the parts that have a loss in ⟦⟧."""
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    text, inside = "", False
    for token, label in zip(ids, labels, strict=True):
        if inside != (label != -100):
            text, inside = text + "⟦⟧"[inside], not inside
        text += tokenizer.decode([token])
    return text + "⟧" * inside


RECORDED = [
    pytest.param(program, template, cases, id=f"{program}-{template}")
    for program, about in json.loads(GOLDEN.read_text()).items()
    for template, cases in about["labels"].items()
]


@pytest.mark.parametrize(("program", "template", "cases"), RECORDED)
def test_labels_of_other_programs(
    tiny: Path, tmp_path: Path, program: str, template: str, cases: Mapping[str, Any]
) -> None:
    """If these differ after a change of the tiny model's tokenizer, renew them with foreign_labels.py."""
    tokenizer, known = foreign_labels.tokenizer_of(tiny, template), KNOWN.get((program, template), {})
    rows = foreign_labels.rows_for(program)
    assert set(cases) == {case for case in rows if foreign_labels.is_recorded(template, case)} >= known.keys()
    for case, recorded_sequences in cases.items():
        length, is_pair = foreign_labels.length_of(case), case == "pair"
        stage = "dpo" if is_pair else "sft"
        made = prepared(tmp_path, tokenizer, [rows[case]], data__max_length=length, train__stage=stage)
        ours = [(p + c, [-100] * len(p) + c) for p, *both in pairs(made) for c in both] if is_pair else labeled(made)
        for (ids, labels), other in zip(ours, recorded_sequences, strict=True):
            theirs = [-100] * len(other["ids"])
            for first, last in other["trained"]:
                theirs[first : last + 1] = other["ids"][first : last + 1]
            if case not in known:
                assert (ids, labels) == (other["ids"], theirs), case
                continue
            text = marked(tokenizer, other["ids"], theirs)
            for old, new in known[case]:
                assert old in text, f"no difference any more: {case}, {old!r}"
                text = text.replace(old, new)
            assert marked(tokenizer, ids, labels) == text, case
