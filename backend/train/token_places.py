"""Which tokens have the characters of a part of a text.

The tokenizers library can return the characters of each token, but this takes up to 1.5 times as long as returning the
ids alone. For a byte-level tokenizer, it is not necessary: each byte of a text is in one token, so the places of the
tokens follow from their numbers of bytes.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

NO_TOKENS = slice(0)
CUTTING = {"Split", "Digits", "Punctuation"}  # pre-tokenizers that only cut a text into parts


class Tokens(Protocol):
    """The tokens of a text."""

    @property
    def ids(self) -> list[int]:
        """Their ids."""

    def between(self, start: int, end: int) -> slice:
        """Those that have some of the characters from `start` to `end`: a token may be a part of a character."""


@dataclass(frozen=True)
class EncodedTokens:
    """With the characters of each token, as the library says."""

    encoding: Encoding

    @property
    def ids(self) -> list[int]:
        """The ids of the tokens."""
        found: list[int] = self.encoding.ids
        return found

    def between(self, start: int, end: int) -> slice:
        """The tokens that have some of the characters from `start` to `end`."""
        if start >= end:
            return NO_TOKENS
        known = self.encoding
        first, last = known.char_to_token(start), known.char_to_token(end - 1)
        if first is None or last is None:  # a character at one end has no token
            offsets = numpy.array(known.offsets, int).reshape(-1, 2)
            found = numpy.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            return slice(found[0], found[-1] + 1) if len(found) else NO_TOKENS
        while last + 1 < len(known) and (known.token_to_chars(last + 1) or (end,))[0] < end:
            last += 1
        return slice(first, last + 1)


@dataclass
class ByteTokens:
    """With the byte after each token. `encode` gives the same tokens with their characters."""

    text: str
    ids: list[int]
    ends: Any  # int array [tokens]
    trims: bool  # whether the library leaves spaces at both ends of a token out of its characters
    encode: Callable[[str], EncodedTokens]

    def between(self, start: int, end: int) -> slice:
        """The tokens that have some of the characters from `start` to `end`."""
        if start >= end:
            return NO_TOKENS
        first_byte, last_byte = self._byte(start), self._byte(end)
        first = int(numpy.searchsorted(self.ends, first_byte, side="right"))
        last = int(numpy.searchsorted(self.ends, last_byte, side="left"))
        if self.trims:
            is_cut = self.ends[last] != last_byte or (first and self.ends[first - 1] != first_byte)
            if is_cut or self.text[start].isspace() or self.text[end - 1].isspace():
                return self._encoded.between(start, end)
        return slice(first, last + 1)

    def _byte(self, place: int) -> int:
        return place if self.text.isascii() else len(self.text[:place].encode())

    @cached_property
    def _encoded(self) -> EncodedTokens:
        return self.encode(self.text)


@dataclass(frozen=True)
class TokenBytes:
    """The number of bytes of each token of a byte-level tokenizer."""

    lengths: Any  # int array [vocabulary]
    normalizes: bool  # to Unicode's normal form C
    trims: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBytes | None:
        """Those of this tokenizer; None if the bytes of its tokens may be others than those of the text."""
        model, normalizer = tokenizer.model, _state(tokenizer.normalizer)
        affixes = isinstance(model, BPE) and (model.continuing_subword_prefix or model.end_of_word_suffix)
        steps = _steps(_state(tokenizer.pre_tokenizer))
        byte_level = [step for step in steps if step["type"] == "ByteLevel" and not step["add_prefix_space"]]
        if not isinstance(model, BPE) or affixes or normalizer.get("type", "NFC") != "NFC" or not byte_level:
            return None
        if any(step not in byte_level and step["type"] not in CUTTING for step in steps):
            return None
        sizes = {number: len(token) for token, number in tokenizer.get_vocab(with_added_tokens=False).items()}
        added = tokenizer.get_added_tokens_decoder()
        sizes |= {number: len(token.content.encode()) for number, token in added.items()}
        if (unknown := tokenizer.token_to_id(model.unk_token or "")) is not None:
            sizes[unknown] = 0  # whatever it replaces: the sum is not that of the text
        lengths = numpy.zeros(max(sizes) + 1, int)
        lengths[list(sizes)] = list(sizes.values())
        after = _steps(_state(tokenizer.post_processor), "processors")
        trims = any(
            step["type"] not in ("TemplateProcessing", "ByteLevel") or step.get("trim_offsets") for step in after
        )
        return cls(lengths, bool(normalizer), trims)

    def tokens(self, text: str, ids: list[int], encode: Callable[[str], EncodedTokens]) -> Tokens:
        """The tokens `ids` of a text with their places; by `encode` if their bytes are not those of the text, as beside
        a token that takes the spaces around it."""
        is_ascii = text.isascii()
        is_normal = is_ascii or not self.normalizes or unicodedata.is_normalized("NFC", text)
        if not ids or max(ids) >= len(self.lengths) or not is_normal:
            return encode(text)
        ends = self.lengths[ids].cumsum()
        if ends[-1] != (len(text) if is_ascii else len(text.encode())):
            return encode(text)
        return ByteTokens(text, ids, ends, self.trims, encode)


def _state(part: Any) -> dict[str, Any]:
    """How a part of a tokenizer is configured; empty if there is none."""
    found: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return found


def _steps(state: dict[str, Any], name: str = "pretokenizers") -> list[dict[str, Any]]:
    """The steps of a sequence, or the only one."""
    if state.get("type") == "Sequence":
        return [step for part in state[name] for step in _steps(part, name)]
    return [state] if state else []
