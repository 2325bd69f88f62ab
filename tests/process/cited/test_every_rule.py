"""Each rule has exactly one proof, and its source names the installed versions."""

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
# Packages that sources name with a version.
PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "torchao", "galore-torch",
    "apollo-torch", "badam", "lomo-optim", "adam-mini", "grokadamw", "schedulefree", "liger-kernel", "unsloth",
    "unsloth_zoo",
)  # fmt: skip
NAMED = re.compile(rf"(?i)(?<![\w-])({'|'.join(PACKAGES)}) (\d+(?:\.\d+)+)")


@pytest.fixture(scope="module", autouse=True)
def every_file() -> None:
    """Import every test module with citations, whichever tests are selected."""
    for path in HERE.glob("test_*.py"):
        import_module(f"cited.{path.stem}")
    import_module("test_unsloth")
    import_module("test_sequence_parallel")


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def named(rule: Rule) -> Iterator[tuple[str, str, str]]:
    """(package, version in the source, installed version) of each installed package in the source."""
    for name, version in NAMED.findall(rule.source):
        if there := installed(name):
            yield name, version, there


def test_each_rule_has_one_proof() -> None:
    proofs = [(code, "cited") for code in CITED]
    proofs += [(rule.code, rule.proof) for rule in RULES if rule.proof]
    proofs += [(code, kind) for kind, codes in EXEMPTED.items() for code in codes]
    found = {code: sorted(kind for other, kind in proofs if other == code) for code in {*CODES, *dict(proofs)}}
    assert not found.keys() - CODES.keys(), "these rules do not exist"
    unproven = sorted(code for code, ways in found.items() if not ways)
    assert not unproven, "mark a test with @cites, set proof='launch', or add the rule to EXEMPT"
    assert not {code: ways for code, ways in found.items() if len(ways) > 1}, "one proof is enough"


def test_exempt_rules_name_no_installed_package() -> None:
    for kind, codes in EXEMPTED.items():
        found = {code: list(named(CODES[code])) for code in codes}
        assert not {code: names for code, names in found.items() if names}, (
            f"{kind}: their sources name installed packages, so they can be tested"
        )
    there = [name for name in ABSENT if importlib.util.find_spec(name)]
    assert not there, f"{EXEMPT['absent-package']}: these packages are installed now, so the rules can be tested"


def test_cited_rules_name_their_package() -> None:
    assert not [code for code in CITED if not NAMED.search(CODES[code].source)]


def test_sources_name_the_installed_versions() -> None:
    """After an upgrade a person reads the cited code again; the tests cover only what they assert."""
    stale: dict[str, list[str]] = {}
    for rule in RULES:
        for name, version, there in named(rule):
            if version.split(".") != there.split("+")[0].split(".")[: version.count(".") + 1]:
                stale.setdefault(f"{name} {there} is installed", []).append(f"{rule.code} ({name} {version})")
    assert not stale, "read the cited code again and update the version"
