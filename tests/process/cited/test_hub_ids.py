"""The ids that huggingface_hub accepts, and addresses from which one is taken."""

from itertools import product

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from backend.registry import hub_id_in, is_hub_id

PARTS = (
    "a",
    "A_1",
    "a.b",
    "-a",
    "a-",
    ".a",
    "a.",
    "a--b",
    "a..b",
    "a b",
    "é",
    "",
    "a.git",
    "x" * 96,
    "x" * 97,
    "_a",
    "a\n",
)


def accepts(text: str) -> bool:
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def test_the_same_ids_are_accepted():
    texts = [*PARTS, *map("/".join, product(PARTS, repeat=2)), "a/b/c", "/a", "a/", "//", "https://huggingface.co/a/b"]
    assert {text for text in texts if is_hub_id(text)} == {text for text in texts if accepts(text)}


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("http://hf.co/Qwen/Qwen3-8B/tree/main?x=1#y", "Qwen/Qwen3-8B"),
        ("huggingface.co/datasets/trl-lib/Capybara", "trl-lib/Capybara"),
        (" https://huggingface.co/gpt2 ", "gpt2"),
        ("https://example.com/a/b", ""),
        ("a/b/c", ""),
    ],
)
def test_the_id_of_an_address(address, found):
    assert hub_id_in(address) == found
