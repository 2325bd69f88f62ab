"""Texts -> token ids, with the characters of each token where they are needed.

Examples are rendered, then their texts are encoded, then labels are made, each for a number of examples at once: taking
turns for each example is half as fast, since code and data of one step replace those of the others in the CPU's caches.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase, TokenizersBackend
from transformers.tokenization_utils_base import PaddingStrategy, TruncationStrategy

from backend.train.run_log import TrainError
from backend.train.token_places import EncodedTokens, TokenBytes, Tokens

# Each process encodes with one thread, as data.dataset_num_proc says; and processes that the library has started
# threads in must not fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
AT_ONCE = 32  # examples that are encoded together; more are hardly faster
MAX_CHARACTERS = 1_000_000  # of these examples: a token with its characters takes about 100 bytes
Columns = dict[str, list[Any]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Rendered(Generic[Result]):
    """Texts to encode, and `finish`, which gets their tokens: with `offsets` as Tokens, else as lists of ids."""

    texts: Sequence[str]
    finish: Callable[[Sequence[Any]], Result]
    offsets: bool = False
    special_tokens: bool = False  # whether the tokenizer adds them


class TextEncoder:
    """Encodes texts with a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def finish(self, rendered: Rendered[Result]) -> Result:
        """What becomes of the texts."""
        return self.finish_all([rendered])[0]

    def finish_all(self, rendered: Sequence[Rendered[Result]]) -> list[Result]:
        """What becomes of several texts, which are encoded together."""
        found: dict[tuple[bool, bool], Iterator[Any]] = {}
        for kind in {(each.offsets, each.special_tokens) for each in rendered}:
            texts = [text for each in rendered if (each.offsets, each.special_tokens) == kind for text in each.texts]
            found[kind] = iter(self.encode_all(texts) if kind[0] else self.ids_of_all(texts, kind[1]))
        return [each.finish([*islice(found[each.offsets, each.special_tokens], len(each.texts))]) for each in rendered]

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a text."""
        return self.ids_of_all([text], add_special_tokens)[0]

    def ids_of_all(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """The token ids of each text."""
        if not self._is_plain:
            # verbose warns about a long text.
            options = {"add_special_tokens": add_special_tokens, "verbose": False}
            return [list(self.tokenizer(text, **options)["input_ids"]) for text in texts]
        found = self._backend().encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [list(each.ids) for each in found]

    def encode_all(self, texts: Sequence[str]) -> Sequence[Tokens]:
        """The tokens of each text, with their places. The tokenizer must be a fast one."""
        if not self._is_plain:
            encoded = (self.tokenizer(text, add_special_tokens=False).encodings[0] for text in texts)
            return [EncodedTokens(each) for each in encoded]
        if self._token_bytes is None:
            return [*map(EncodedTokens, self._backend().encode_batch(texts, add_special_tokens=False))]
        ids = self.ids_of_all(texts)
        return [self._token_bytes.tokens(text, each, self._encoded) for text, each in zip(texts, ids, strict=True)]

    def _encoded(self, text: str) -> EncodedTokens:
        return EncodedTokens(self._backend().encode(text, add_special_tokens=False))

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return TokenBytes.of(self.tokenizer.backend_tokenizer)

    def _backend(self) -> Any:
        """The tokenizer of the tokenizers library, as transformers uses it; transformers itself takes half as long
        again to build its own result object."""
        backend = self.tokenizer.backend_tokenizer
        self.tokenizer.set_truncation_and_padding(
            PaddingStrategy.DO_NOT_PAD, TruncationStrategy.DO_NOT_TRUNCATE, 0, 0, None, None
        )
        if backend.encode_special_tokens != self.tokenizer.split_special_tokens:
            backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return backend

    @cached_property
    def _is_plain(self) -> bool:
        """Whether the tokenizer encodes a text as all fast tokenizers do."""
        own = type(self.tokenizer)
        return bool(
            own.__call__ is PreTrainedTokenizerBase.__call__
            and own._encode_plus is TokenizersBackend._encode_plus
            and self.tokenizer.is_fast
        )


class BatchTokenizer(Generic[Result]):
    """Makes columns of examples, and counts what becomes of them; pickled into the worker processes."""

    @property
    def encoder(self) -> TextEncoder:
        """Encodes the rendered texts."""
        raise NotImplementedError

    def render(self, example: Any) -> Rendered[Result]:
        """The texts of an example. Raises TrainError."""
        raise NotImplementedError

    def columns(self, example: Any, result: Result) -> tuple[Columns, Counter[str]]:
        """The columns of the usable sequences, and how many were truncated, split or dropped."""
        raise NotImplementedError

    def __call__(self, example: Any) -> tuple[Columns, Counter[str]]:
        """Columns and counts of one example. Raises TrainError."""
        return self.columns(example, self.encoder.finish(self.render(example)))

    def each(self, examples: Sequence[Any]) -> Iterator[tuple[Columns, Counter[str]] | TrainError]:
        """Columns and counts of each example, or why it cannot be rendered."""
        for start, rendered in self._groups(examples):
            usable = [each for each in rendered if isinstance(each, Rendered)]
            results = iter(self.encoder.finish_all(usable))
            for example, each in zip(islice(examples, start, None), rendered, strict=False):
                yield each if isinstance(each, TrainError) else self.columns(example, next(results))

    def _groups(self, examples: Sequence[Any]) -> Iterator[tuple[int, list[Rendered[Result] | TrainError]]]:
        """(first example, texts of it and of the next ones, which are encoded together)."""
        start, group, characters = 0, list[Rendered[Result] | TrainError](), 0
        for example in examples:
            try:
                rendered = self.render(example)
                group.append(rendered)
                characters += sum(len(text) for text in rendered.texts)
            except TrainError as error:
                group.append(error)
            if len(group) == AT_ONCE or characters > MAX_CHARACTERS:
                yield start, group
                start, group, characters = start + len(group), [], 0
        yield start, group
