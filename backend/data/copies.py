"""Examples that are equal, and examples that contradict each other.

The run drops copies with data.drop_duplicates, and the inspection counts both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from backend.data.preferences import MARGIN

HASH = 2**64 - 1


class Seen:
    """The converted examples so far, as 8-byte hashes: about 130 bytes of memory for each example. The caller may give
    each its place, as a number; `earlier` is that of the example that the last copy or contradiction repeats."""

    def __init__(self) -> None:
        self.examples: dict[int, int] = {}  # -> their places, in the order in which they were added
        self.answers: dict[int, int] = {}  # prompt -> its first completion, and before these 64 bits its place
        self.earlier = 0

    def is_copy(self, value: Mapping[str, Any], remember: bool = True, place: int = 0) -> bool:
        """Whether an equal example came before; `remember`: a later equal example is a copy of this one."""
        found = _of_example(value)
        if self._has(found):
            return True
        if remember:
            self.examples[found] = place
        return False

    def _has(self, found: int) -> bool:
        self.earlier = self.examples.get(found, 0)
        return found in self.examples

    def forget_unused(self, are_used: Sequence[bool]) -> None:
        """Forget those of the last examples that are not used, so that a later example is not a copy of them."""
        for found, is_used in zip([*islice(reversed(self.examples), len(are_used))], reversed(are_used), strict=True):
            if not is_used:
                del self.examples[found]

    def contradicts(self, value: Mapping[str, Any], place: int = 0) -> bool:
        """Whether an example, which is not a copy, has another answer than an earlier one: another completion of the
        same prompt, the other completion preferred, or the other label."""
        if "label" in value:
            return self._has(_of_example({**value, "label": not value["label"]}))
        if "chosen" in value:
            if value["chosen"] == value["rejected"]:  # it prefers nothing, and is dropped
                return False
            return self._has(_of_example({**value, "chosen": value["rejected"], "rejected": value["chosen"]}))
        if "text" in value:
            return False
        turns = value.get("messages") or [*value["prompt"], *value["completion"]]
        last = max((n for n, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
        answer = digest(turns[last])
        prompt = digest({**value, "messages": turns[:last], "completion": ()})
        known = self.answers.setdefault(prompt, place << 64 | answer)
        self.earlier = known >> 64
        return known & HASH != answer


def _of_example(value: Mapping[str, Any]) -> int:
    """The digest of a converted example. Equal pairs may have different margins."""
    return digest({name: part for name, part in value.items() if name != MARGIN})


def digest(value: Any) -> int:
    """A 64-bit hash of an example or a part of it, the same in every run."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
