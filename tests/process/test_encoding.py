"""Token ids are those of the tokenizer itself, with the characters of each token and without."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from backend.train.encoding import TextEncoder
from backend.train.token_places import ByteTokens, EncodedTokens

WORDS = ["At nine", "leaves", " from Bern", "assistant", "user", "a", "The train", "0x0A", "12345", "don't", "IC 5"]
ODD = [
    *("\n", "\n\n", "\r\n", " ", "  ", "\t", "\u00a0", "\u2028", "\u200b", "\x1c", "\0", " \n", "\u3000"),
    *("e\u0301", "\u00e9", "\u1100\u1161", "\u0316\u0301", "\u212a", "\ufb01", "\uff1c", "\u0130", "\u0f77"),
    *("\U0001f682", "\U0001f469\u200d\U0001f680", "列车九点开", "يغادر", "▁", "<0x0A>", "<|im_", "|>", "<", ">"),
    *("<|im_end|>", "<|im_start|>", "</s>", "<think>", "<mask>", "<|im_start|>assistant\n", "<|im_end|>\n"),
]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def trained(kind: str) -> Tokenizer:
    """A small tokenizer for the words above."""
    if kind == "unigram":
        found = Tokenizer(models.Unigram())
        found.pre_tokenizer, found.normalizer = pre_tokenizers.Metaspace(), normalizers.NFKC()
        trainer: Any = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"])
    elif kind == "word_pieces":
        found = Tokenizer(models.WordPiece(unk_token="<unk>"))
        found.pre_tokenizer, found.normalizer = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400)
    else:
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix_space")
        if kind == "normalized":  # as that of Qwen
            cut = pre_tokenizers.Split(Regex(r" ?[^\s\d]+|\d|\s+"), "isolated")
            found.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
            found.normalizer = normalizers.NFC()
        trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    trainer.show_progress = False
    found.train_from_iterator([f"{one}{other}{odd} {one}" for one in WORDS for other in WORDS for odd in ODD], trainer)
    return found


def tokenizer_of(kind: str) -> Any:
    found = trained(kind)
    strips = kind == "strips"
    found.add_special_tokens([AddedToken(each, normalized=False, rstrip=strips, lstrip=strips) for each in SPECIAL])
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(each, found.token_to_id(each)) for each in ("<s>", "</s>")]
    )
    if kind == "trims":  # as that of Llama 3
        found.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), found.post_processor])
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def drawn_texts(drawn: random.Random) -> list[str]:
    return [
        "".join(drawn.choice(WORDS if drawn.random() < 0.6 else ODD) for _ in range(drawn.randint(0, 20)))
        for _ in range(200)
    ]


@pytest.mark.parametrize("kind", ["byte_level", "prefix_space", "strips", "split_special", "unigram", "word_pieces"])
def test_ids_are_those_of_the_tokenizer(kind: str) -> None:
    drawn, tokenizer = random.Random(kind), tokenizer_of(kind)
    tokenizer.split_special_tokens = kind == "split_special"
    encoder = TextEncoder(tokenizer)
    assert encoder._is_plain, "the quick way"
    texts = drawn_texts(drawn)
    alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [each.ids for each in encoder.encode_all(texts)] == encoder.ids_of_all(texts) == alone
    for text in texts:
        assert encoder.ids(text, add_special_tokens=True) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "quick"),
    [
        *(("byte_level", 1.0), ("normalized", 0.5), ("trims", 1.0), ("split_special", 1.0), ("strips", 0.05)),
        *(("prefix_space", 0.0), ("unigram", 0.0), ("word_pieces", 0.0)),
    ],
)
def test_places_of_tokens_are_those_of_the_tokenizer(kind: str, quick: float) -> None:
    """`quick`: the share of texts, at least, whose tokens are found by their bytes."""
    drawn, tokenizer = random.Random(kind), tokenizer_of(kind)
    tokenizer.split_special_tokens = kind == "split_special"
    encoder, texts = TextEncoder(tokenizer), [text for text in drawn_texts(drawn) if text]
    tokens = encoder.encode_all(texts)
    by_bytes = sum(isinstance(each, ByteTokens) for each in tokens)
    assert by_bytes >= quick * len(texts) and (quick or not by_bytes)
    for text, each in zip(texts, tokens, strict=True):
        expected = EncodedTokens(tokenizer(text, add_special_tokens=False).encodings[0])
        assert each.ids == expected.ids
        for _ in range(10):
            start, end = sorted(drawn.choices(range(len(text) + 1), k=2))
            selected = [of.ids[of.between(start, end)] for of in (each, expected)]
            assert selected[0] == selected[1], (text, start, end)


def test_truncation_and_padding_of_an_earlier_call_do_not_stay() -> None:
    tokenizer = tokenizer_of("byte_level")
    tokenizer.pad_token = "<unk>"
    tokenizer(["At nine", "a"], padding="max_length", max_length=4, truncation=True)
    text = "The train leaves from Bern"
    assert TextEncoder(tokenizer).ids(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_with_a_call_of_its_own_is_called() -> None:
    class Own(PreTrainedTokenizerFast):
        def __call__(self, *_: Any, **more: Any) -> Any:
            return {"input_ids": [7, int(more["add_special_tokens"])]}

    tokenizer = Own(tokenizer_object=trained("byte_level"))
    assert TextEncoder(tokenizer).ids("At nine", add_special_tokens=True) == [7, 1]
