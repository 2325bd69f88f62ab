"""The documents say what is there: generated ones are current, the README's tree and commands are true."""

import re
import tomllib
from pathlib import Path

import pytest

from backend.cli.docs import generated
from backend.paths import HOME

README = (HOME / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(generated()))
def test_generated_is_current(name):
    assert (HOME / name).read_text() == generated()[name], "run `make docs`"


def test_readme_tree_is_true():
    block = re.search(r"```text\n(.*?)```", README, re.DOTALL).group(1)
    named, folders = set(), []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0] if line.split() else ""
        if not re.fullmatch(r"[\w.\-]+/?", name) or line.startswith(" " * 12):
            continue
        folders = [*folders[:depth], name.rstrip("/")]
        path = Path(*folders)
        assert (HOME / path).exists(), f"README names {path}"
        named.add(path.as_posix())
    code = [p.relative_to(HOME) for room in ("backend", "webui") for p in (HOME / room).rglob("*.py")]
    rooms = {name for name in named if "/" in name}  # a room speaks for its files; the two houses do not
    code = [p for p in code if p.name != "__init__.py" and p.parent.as_posix() not in rooms]
    missing = [p for p in code if p.as_posix() not in named]
    assert len(named) >= 30
    assert not missing, "not in the README's tree"


def test_readme_commands_exist():
    targets = set(re.findall(r"^(\w+):", (HOME / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"make (\w+)", README))
    assert {"run", "test"} <= used <= targets


def test_changelog_names_the_version():
    version = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (HOME / "CHANGELOG.md").read_text()


def test_nothing_of_the_workplace_is_named():
    words = ["/work" + "/", "../" + "shared", ".lib" + "rary"]
    files = [p for p in HOME.rglob("*") if p.is_file() and p.suffix in (".py", ".md", ".js", ".css", ".toml", ".yaml")]
    files = [p for p in files if not {".venv", ".git", "runs", "node_modules"} & set(p.relative_to(HOME).parts)]
    assert len(files) > 50
    assert not [(p, w) for p in files for w in words if w in p.read_text(errors="replace")]
