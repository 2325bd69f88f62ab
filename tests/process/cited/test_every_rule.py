"""Each rule has one proof, and its source names what is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from backend.rules import RULES, Rule
from cited import ABSENT, CITED, EXEMPT

HERE = Path(__file__).parent
CODES = {rule.code: rule for rule in RULES}
EXEMPTED = {kind: set(codes.split()) for kind, codes in EXEMPT.items()}
# Those that sources name with a version, by the names that people give them.
PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "torchao", "galore-torch",
    "apollo-torch", "badam", "lomo-optim", "adam-mini", "grokadamw", "schedulefree", "liger-kernel", "unsloth",
    "unsloth_zoo",
)  # fmt: skip
NAMED = re.compile(rf"(?i)(?<![\w-])({'|'.join(PACKAGES)}) (\d+(?:\.\d+)+)")


@pytest.fixture(scope="module", autouse=True)
def every_file() -> None:
    """All tests that cite, whichever of them are to be run now."""
    for path in HERE.glob("test_*.py"):
        import_module(f"cited.{path.stem}")
    import_module("test_unsloth")


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def named(rule: Rule) -> Iterator[tuple[str, str, str]]:
    """(package, version in the source, installed version) of what is installed."""
    for name, version in NAMED.findall(rule.source):
        if there := installed(name):
            yield name, version, there


def test_each_rule_has_one_proof() -> None:
    proofs = [(code, "cited") for code in CITED]
    proofs += [(rule.code, rule.proof) for rule in RULES if rule.proof]
    proofs += [(code, kind) for kind, codes in EXEMPTED.items() for code in codes]
    found = {code: sorted(way for other, way in proofs if other == code) for code in {*CODES, *dict(proofs)}}
    assert not found.keys() - CODES.keys(), "no such rules"
    unproven = sorted(code for code, ways in found.items() if not ways)
    assert not unproven, "mark a test of theirs with @cites, set proof='launch', or say in EXEMPT why not"
    assert not {code: ways for code, ways in found.items() if len(ways) > 1}, "one proof is enough"


def test_exempt_rules_name_no_installed_package() -> None:
    for kind, codes in EXEMPTED.items():
        found = {code: list(named(CODES[code])) for code in codes}
        assert not {code: names for code, names in found.items() if names}, f"{kind}: what they cite can be asked"
    there = [name for name in ABSENT if importlib.util.find_spec(name)]
    assert not there, f"{EXEMPT['absent-package']}: what they say of these can be asked now"


def test_cited_rules_name_their_package() -> None:
    assert not [code for code in CITED if not NAMED.search(CODES[code].source)]


def test_sources_name_the_installed_versions() -> None:
    """A package that was bumped makes people look: the other tests have asked it, and nobody has read the words."""
    stale: dict[str, list[str]] = {}
    for rule in RULES:
        for name, version, there in named(rule):
            if version.split(".") != there.split("+")[0].split(".")[: version.count(".") + 1]:
                stale.setdefault(f"{name} {there} is installed", []).append(f"{rule.code} ({name} {version})")
    assert not stale, "look at these rules again, and name the version"
