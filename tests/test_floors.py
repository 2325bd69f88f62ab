"""The house holds: who may import whom, where heavy libraries live, and how long a file or function may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent
FILES = sorted([*HOME.glob("backend/**/*.py"), *HOME.glob("webui/**/*.py")])

# A module may import what stands lower; tenths are steps within a floor. A name covers what is below it, the
# longest name decides.
FLOORS = {
    "webui": 6,
    "backend.__main__": 5.3,
    "backend.docs": 5,
    "backend.shell": 5.1,
    "backend.watching": 5.2,
    "backend.plan": 4,
    "backend.whatif": 4,
    "backend.mend": 4,
    "backend.judge": 4.1,
    "backend.rules": 3,
    "backend.memory": 2,
    "backend.presets": 2,
    "backend.deepspeed": 2,
    "backend.fsdp": 2,
    "backend.foreign": 2.2,
    "backend.accelerate": 2.1,
    "backend.glance": 2,
    "backend.derived": 1,
    "backend.hostfile": 1,
    "backend.machine": 1,
    "backend.shape": 1,
    "backend.rows": 1,
    "backend.options": 1,
    "backend.spec": 1,
    "backend.catalog": 0,
    "backend.keys": 0,
    "backend.paths": 0,
    "backend.run": 0,
}
# Beside the floors: imported by nobody.
TRAIN_MAY = {"backend.train", "backend.spec", "backend.options", "backend.catalog", "backend.paths"}
TRAIN_MAY |= {"backend.presets", "backend.rows", "backend.run"}
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
        sideways = FLOORS[own] == 1 and other is not None and FLOORS[other] == 1
        assert other is not None and (inside or sideways or FLOORS[other] < FLOORS[own]), f"{name} imports {target}"


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
    if "run" in path.parts:
        assert found <= set(sys.stdlib_module_names) | {"backend"}


@pytest.mark.parametrize("path", FILES, ids=module)
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= 400, "above 400 lines: the house wants a room"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is above 60 lines"


@pytest.mark.parametrize("path", sorted(HOME.glob("webui/static/*.*")), ids=lambda p: p.name)
def test_static_sizes(path):
    assert path.read_text().count("\n") <= 400


def test_page_loads_nothing_heavy():
    code = "import sys, webui.server, backend.__main__; print(*{n.partition('.')[0] for n in sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOME, check=True).stdout
    assert "webui" in out.split()
    assert not set(out.split()) & (HEAVY | {"matplotlib"})
