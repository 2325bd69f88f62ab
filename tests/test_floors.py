"""Import layers of the packages, where training libraries may be imported, and the sizes of files and functions."""

import ast
import gc
import re
import sys
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parent.parent
FILES = sorted([*HOME.glob("backend/**/*.py"), *HOME.glob("webui/**/*.py")])
STATIC = HOME / "webui" / "static"
SCRIPTS_AND_STYLES = [path for path in sorted(STATIC.rglob("*.*s")) if path.parent != STATIC / "vendor"]

# A module may import modules of its own package and of lower layers.
LAYERS = {
    "webui": 13,
    "backend.__main__": 12,
    "backend.cli": 11,
    "backend.tasks": 10,
    "backend.preflight": 9,
    "backend.rules": 8,
    "backend.importers": 8,
    "backend.launch": 7,
    "backend.timing": 7,
    "backend.memory": 6,
    "backend.publish": 6,
    "backend.serve": 4,
    "backend.resolve": 5,
    "backend.models": 5,
    "backend.inspect": 4,
    "backend.engines": 3,
    "backend.presets": 3,
    "backend.recommended": 3,
    "backend.environments": 3,
    "backend.data": 2,
    "backend.machine": 2,
    "backend.modelspec": 2,
    "backend.config": 1,
    "backend.runs": 1,
    "backend.scoring": 1,
    "backend.registry": 0,
    "backend.paths": 0,
    "backend.wording": 0,
}
# Processes that import torch. No other package imports them; those that use a trained model may import the trainer.
PROCESSES = ("backend.train", "backend.export", "backend.inference")
# Processes may import the spec, the data, and the rules that the trainer runs.
TRAIN_MAY_IMPORT = {
    *PROCESSES,
    "backend.config",
    "backend.registry",
    "backend.paths",
    "backend.presets",
    "backend.wording",
    "backend.data",
    "backend.runs",
    "backend.scoring",
    "backend.models",
}
TRAIN_MAY_IMPORT |= {"backend.resolve", "backend.engines", "backend.inspect", "backend.machine", "backend.rules"}
TRAIN_MAY_IMPORT |= {"backend.environments"}
# Modules that compare names of engines, ZeRO stages or FSDP versions instead of asking an engine, outside of the
# modules of an engine itself. Each of them must be reviewed when an engine is added.
COMPARES_ENGINES = re.compile(
    r"\.engine (?:==|!=|in|not in) |registry\.(?:DEEPSPEED|FSDP)\b"
    r"|\.(?:zero_stage|fsdp_version) (?:==|!=|>=|<|in|not in) |parallel\.strategy (?:==|!=|in) "
)
ENGINE_FOLDERS = ("backend/engines/", "backend/train/engines/", "backend/rules/distributed/", "backend/registry/")
MAX_MODULES_COMPARING = 14
# A line with the head of a JavaScript function, or with its last line: `export function f(x) {`, `const f = (x) =>`,
# `#method(x) {`.
SCRIPT_FUNCTION = re.compile(
    r"\bfunction\b|=>|^ *(?:(?:async|static|get|set) )*#?(?!(?:if|for|while|switch|catch)\b)\w+\(.*\) \{$"
)
TRAINING_LIBRARIES = {"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets"}
PAGE_LIBRARIES = {"gradio", "fastapi", "starlette", "uvicorn", "matplotlib"}


def module(path):
    name = ".".join(path.relative_to(HOME).with_suffix("").parts)
    return name.removesuffix(".__init__")


def layer_entry(name):
    """The name in LAYERS that covers `name`."""
    return next((f for f in LAYERS if name == f or name.startswith(f + ".")), None)


@pytest.fixture(scope="module", autouse=True)
def syntax_trees():
    """Garbage collection would go through the millions of nodes of all files again and again."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


@cache
def nodes(path):
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports(path):
    """Every module that a file imports, also inside functions."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_files_found():
    assert len(FILES) >= 30 and len(SCRIPTS_AND_STYLES) >= 30


def test_imports_only_lower_layers():
    for name, targets in ((module(path), imports(path)) for path in FILES):
        if name == "backend" or name.startswith(PROCESSES):
            continue
        entry = layer_entry(name)
        assert entry is not None, f"{name} has no layer: add it to LAYERS and to docs/design.md"
        for target in targets:
            if not target.startswith(("backend", "webui")) or target == "backend":
                continue
            assert not target.startswith(PROCESSES), f"{name} imports {target}, which runs in a process of its own"
            target_entry = layer_entry(target)
            same_entry = target_entry == entry
            assert target_entry is not None and (same_entry or LAYERS[target_entry] < LAYERS[entry]), (
                f"{name} imports {target}"
            )


def test_processes_import_only_allowed_packages():
    for name, targets in ((module(path), imports(path)) for path in FILES):
        if not name.startswith(PROCESSES):
            continue
        for target in targets:
            later = name.startswith("backend.train") and target.startswith(PROCESSES[1:])
            assert not later, f"{name} imports {target}, but training needs no later process"
            if target.startswith(("backend", "webui")) and target != "backend":
                may = any(target == may or target.startswith(may + ".") for may in TRAIN_MAY_IMPORT)
                assert may, f"{name} imports {target}"


def test_training_libraries_are_imported_in_processes_only():
    for path in FILES:
        packages = {target.partition(".")[0] for target in imports(path)}
        if not module(path).startswith(PROCESSES):
            assert not packages & TRAINING_LIBRARIES, path
        if path.parts[len(HOME.parts)] == "backend":
            assert not packages & PAGE_LIBRARIES, path
        if "runs" in path.parts and "backend" in path.parts:
            # The driver of a Ray job is started by the Python of the cluster, which has ray but not Footplate.
            own = {"ray_driver.py": {"ray"}, "kubernetes.py": {"backend", "yaml"}}.get(path.name, {"backend"})
            assert packages <= set(sys.stdlib_module_names) | own, path


def test_sizes():
    for path in FILES:
        assert path.read_text().count("\n") <= 700, f"{path} has more than 700 lines: split it by concept"
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name} is above 60 lines"


def test_scripts_and_styles():
    """The limits of Python files: 700 lines of 120 characters. `make check` type-checks the scripts."""
    for path in SCRIPTS_AND_STYLES:
        lines = path.read_text().splitlines()
        assert len(lines) <= 700, f"{path} has more than 700 lines: split it by concept"
        assert max(map(len, lines)) <= 120, f"{path}: format it: tests/js/check.sh --write"
        if path.suffix == ".js":
            assert lines[0] == "// @ts-check", path
            for first, last in script_functions(lines):
                assert last - first < 60, f"{path}: {lines[first].strip()} is above 60 lines"


def script_functions(lines):
    """The positions of the first and the last line of each JavaScript function. Prettier indents its body, so that it
    ends before or with the next line that is not indented further, except for `}) {` and `) => {` after parameters."""
    indent = [len(line) - len(line.lstrip()) for line in lines]
    for first, line in enumerate(lines):
        if SCRIPT_FUNCTION.search(line):
            after = (n for n in range(first + 1, len(lines)) if lines[n] and indent[n] <= indent[first])
            end = next((n for n in after if not re.match(r" *[)}].*\{$", lines[n])), len(lines))
            closes = end < len(lines) and indent[end] == indent[first] and lines[end].lstrip()[0] in "})]"
            yield first, end if closes else end - 1


def test_length_of_script_functions():
    script = """\
async function one({
  a,
  b,
}) {
  const two = (x) => {
    x();
  };

  return a
    .map((x) => x)
}
class Three {
  #four(x) {
    if (x) {
      x();
    } else {
      x();
    }
  }
}
const five = (x) =>
  six(
    x,
  );
five();
"""
    found = {script.splitlines()[first].strip(): last - first for first, last in script_functions(script.splitlines())}
    assert found == {
        "async function one({": 10,
        "const two = (x) => {": 2,
        ".map((x) => x)": 0,
        "#four(x) {": 6,
        "const five = (x) =>": 3,
    }


def test_few_modules_compare_engines():
    modules = []
    for path in FILES:
        name = path.relative_to(HOME).as_posix()
        if not name.startswith(ENGINE_FOLDERS) and COMPARES_ENGINES.search(path.read_text()):
            modules.append(name)
    assert len(modules) <= MAX_MODULES_COMPARING, modules
