"""The house holds: who may import whom, where heavy libraries live, and how long a file or function may be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent
FILES = sorted([*HOME.glob("backend/**/*.py"), *HOME.glob("webui/**/*.py")])

# A module may import what stands lower; tenths are steps within a floor. A name covers what is below it, the
# longest name decides.
FLOORS = {
    "webui": 9,
    "backend.__main__": 8.1,
    "backend.cli": 8,
    "backend.preflight": 7.1,
    "backend.compare": 7,
    "backend.rules": 6,
    "backend.launch.plan": 6,
    "backend.config.importers": 5.3,
    "backend.launch.launchers": 5.1,
    "backend.launch.accelerate_config": 5,
    "backend.launch": 5,
    "backend.memory": 5,
    "backend.resolve": 4,
    "backend.inspect": 3,
    "backend.engines": 2,
    "backend.config.presets": 2,
    "backend.data": 1.2,
    "backend.machine": 1.2,
    "backend.modelspec": 1.2,
    "backend.config.merge": 0.1,
    "backend.config.processes": 1.1,
    "backend.config.options": 1.1,
    "backend.config": 1,
    "backend.registry": 0,
    "backend.paths": 0,
    "backend.runs": 0,
}
# Imported by nobody. It may import what it reads, and the rules, which it runs on its own machine.
TRAIN_MAY = {"backend.train", "backend.config", "backend.registry", "backend.paths", "backend.data", "backend.runs"}
TRAIN_MAY |= {"backend.resolve", "backend.engines", "backend.inspect", "backend.machine", "backend.rules"}
# Modules that compare names of engines, ZeRO stages or FSDP versions instead of asking an engine, outside of the
# modules of an engine itself. Adding an engine means looking at each of them; there were 31 before engines were
# classes.
COMPARES_ENGINES = re.compile(
    r"\.engine (?:==|!=|in|not in) |registry\.(?:DEEPSPEED|FSDP)\b"
    r"|\.(?:zero_stage|fsdp_version) (?:==|!=|>=|<|in|not in) |parallel\.strategy (?:==|!=|in) "
)
OF_ONE_ENGINE = ("backend/engines/", "backend/train/engines/", "backend/rules/distributed/", "backend/registry/")
MODULES_COMPARING = 13
HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets"}
PAGE = {"gradio", "fastapi", "starlette", "uvicorn", "matplotlib"}


def module(path):
    name = ".".join(path.relative_to(HOME).with_suffix("").parts)
    return name.removesuffix(".__init__")


def room(name):
    """The longest entry of FLOORS that covers `name`."""
    return max((f for f in FLOORS if name == f or name.startswith(f + ".")), key=len, default=None)


def imports(path):
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_files_found():
    assert len(FILES) >= 30


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_go_down(path):
    name = module(path)
    if name in ("backend",) or name.startswith("backend.train"):
        return
    own = room(name)
    assert own is not None, f"{name} has no floor: add it to FLOORS and to docs/design.md"
    for target in imports(path):
        if not target.startswith(("backend", "webui")) or target == "backend":
            continue
        assert not target.startswith("backend.train"), f"{name} imports {target}: train is imported by nobody"
        other = room(target)
        inside = other == own
        assert other is not None and (inside or FLOORS[other] < FLOORS[own]), f"{name} imports {target}"


@pytest.mark.parametrize("path", [p for p in FILES if "train" in p.parts], ids=module)
def test_train_imports_only_what_it_reads(path):
    for target in imports(path):
        if target.startswith(("backend", "webui")) and target != "backend":
            assert any(target == may or target.startswith(may + ".") for may in TRAIN_MAY), target


@pytest.mark.parametrize("path", FILES, ids=module)
def test_heavy_libraries_live_in_train(path):
    found = {target.partition(".")[0] for target in imports(path)}
    if "train" not in path.parts:
        assert not found & HEAVY
    if path.parts[len(HOME.parts)] == "backend":
        assert not found & PAGE
    if "runs" in path.parts and "backend" in path.parts:
        assert found <= set(sys.stdlib_module_names) | {"backend"}


@pytest.mark.parametrize("path", FILES, ids=module)
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= 700, "more than 700 lines: split the file by concept"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is above 60 lines"


@pytest.mark.parametrize("path", sorted(HOME.glob("webui/static/*.*s")), ids=lambda p: p.name)
def test_scripts_and_styles(path):
    """As Python: at most 700 lines of at most 120 characters. Scripts are type-checked by `make check`."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 700, "more than 700 lines: split the file by concept"
    assert max(map(len, lines)) <= 120, "format it: tests/js/check.sh --write"
    assert path.suffix != ".js" or lines[0] == "// @ts-check"


def test_page_loads_nothing_heavy():
    code = "import sys, webui.server, backend.__main__; print(*{n.partition('.')[0] for n in sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOME, check=True).stdout
    assert "webui" in out.split()
    assert not set(out.split()) & (HEAVY | {"matplotlib"})


def test_engines_are_asked_and_not_compared():
    found = []
    for path in FILES:
        name = path.relative_to(HOME).as_posix()
        if not name.startswith(OF_ONE_ENGINE) and COMPARES_ENGINES.search(path.read_text()):
            found.append(name)
    assert len(found) <= MODULES_COMPARING, found
