"""Texts -> token ids, with the characters of each token where they are needed, which takes up to twice as long."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase, TokenizersBackend
from transformers.tokenization_utils_base import PaddingStrategy, TruncationStrategy

# Texts are encoded one by one, so the threads of the library have nothing to do; and processes that it has started
# threads in must not fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TextEncoder:
    """Encodes texts with a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a text."""
        if not self._is_plain:
            # verbose warns about a long text.
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        found: Encoding = self._backend().encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return list(found.ids)

    def encode(self, text: str) -> Encoding:
        """The tokens of a text, with the characters of each. The tokenizer must be a fast one."""
        if not self._is_plain:
            found: Encoding = self.tokenizer(text, add_special_tokens=False).encodings[0]
            return found
        found = self._backend().encode(text, add_special_tokens=False)
        return found

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
