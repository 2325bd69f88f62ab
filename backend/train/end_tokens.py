"""The tokens that end completions: found where the loss ends, and saved with the model, so that generation stops there.

A base model knows only the end of a text. Trained on conversations, it ends its completions with the token of the chat
template, such as <|im_end|>.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

END = "end "  # with a token id: a count of examples
INNER = "inner "  # with a token id: a count of examples in which trained text follows the token
UNKNOWN = "unknown end "  # with a text such as <|im_end|> that is no token: a count of examples that it ends
RARE = 0.01  # of the examples: the end of a broken example would end generation too early


def keys(ends: Sequence[int | None], inner: Collection[int]) -> set[str]:
    """What to count for an example: the tokens that end its parts with a loss, and those within them."""
    return {f"{END}{token}" for token in ends if token is not None} | {
        f"{INNER}{n}" for n in inner if n not in ends[-1:]
    }


def counted(counts: Counter[str]) -> tuple[int, ...]:
    """The tokens that were counted in enough examples, the most frequent first; except tokens that are followed by
    trained text in as many examples: that text would never be generated."""
    found = Counter({int(key.removeprefix(END)): count for key, count in counts.items() if key.startswith(END)})
    enough = [token for token, count in found.most_common() if count >= RARE * max(found.values())]
    return tuple(token for token in enough if counts[f"{INNER}{token}"] < found[token]) or tuple(enough)


def stop_tokens(generation_config: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an output: those of the generation config, which may be None, and the tokenizer's EOS."""
    own, eos = getattr(generation_config, "eos_token_id", None), tokenizer.eos_token_id
    return {*([own] if isinstance(own, int) else own or ()), *(() if eos is None else (eos,))}


def apply(model: Any, tokenizer: Any, ends: Sequence[int]) -> None:
    """Let generation with the model end at these tokens too; its generation config is saved with it. If it ends at none
    of them yet, the first one becomes the tokenizer's EOS token, unless the chat template writes that token."""
    if not ends or getattr(model, "generation_config", None) is None:  # a reward model generates nothing
        return
    known = model.generation_config.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    if new := [token for token in ends if token not in known]:
        model.generation_config.eos_token_id = [*known, *new]
    if len(new) == len(ends) and "eos_token" not in str(tokenizer.chat_template):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])


def save(model: Any, folder: Path) -> None:
    """Write the generation config next to an adapter; peft saves none."""
    config = getattr(model, "generation_config", None)
    if config is not None:
        config.save_pretrained(folder)
