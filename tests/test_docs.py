"""The documents: generated ones are current, commands parse and print the shown output, options and links exist.

`UPDATE_GOLDEN=1 pytest tests/test_docs.py` writes the output of the commands into the documents.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from backend import presets as yaml_specs
from backend.__main__ import main, parser
from backend.cli.docs import generated
from backend.config import Data, RunSpec
from backend.config.conditions import condition_text
from backend.config.options import by_name, edit, options
from backend.data import convert, detect_format
from backend.paths import HOME
from backend.preflight import preflight
from backend.registry import STAGES
from backend.rules.examples import EQUIPPED_TWO

DOCUMENTS = [
    HOME / name for name in ("README.md", "CONTRIBUTING.md", "docs/getting-started.md", "docs/guide.md", "docs/cli.md")
]
PYPROJECT = tomllib.loads((HOME / "pyproject.toml").read_text())
# Commands whose output depends only on their arguments, if these name a machine.
DETERMINISTIC_COMMANDS = {"check", "plan", "estimate", "presets", "rules"}
OMITTED = "..."  # stands for the rest of an output
SHOWN_LINES = 12  # shown before OMITTED


def in_docs(path: Path) -> str:
    return path.relative_to(HOME).as_posix()


def fenced(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with its output."""
    return [tuple(part.partition("\n")[::2]) for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]


CONSOLE_COMMANDS = [
    (path, line, output) for path in DOCUMENTS for block in fenced(path, "console") for line, output in commands(block)
]
FOOTPLATE_COMMANDS = [(path, line, output) for path, line, output in CONSOLE_COMMANDS if line.startswith("footplate ")]
CHECKED_OUTPUTS = [
    (path, line, output)
    for path, line, output in FOOTPLATE_COMMANDS
    if path.stem == "cli" and line.split()[1] in DETERMINISTIC_COMMANDS
]


def test_generated_documents_are_current():
    for name, text in generated().items():
        assert (HOME / name).read_text() == text, f"{name} is not current: run `make docs`"


@pytest.mark.parametrize(
    ("path", "line", "output"), FOOTPLATE_COMMANDS, ids=[f"{p.stem}: {line}" for p, line, _ in FOOTPLATE_COMMANDS]
)
def test_commands_parse(path, line, output):
    parser().parse_args(shlex.split(line)[1:])


@pytest.mark.parametrize(("path", "line", "output"), CHECKED_OUTPUTS, ids=[line for _, line, _ in CHECKED_OUTPUTS])
def test_shown_outputs_are_current(path, line, output):
    printed = run(line)
    cut = output.endswith(f"{OMITTED}\n")
    shown = "".join(printed.splitlines(keepends=True)[:SHOWN_LINES]) + f"{OMITTED}\n" if cut else printed
    if os.environ.get("UPDATE_GOLDEN"):
        text = path.read_text()
        path.write_text(text.replace(f"$ {line}\n{output}```", f"$ {line}\n{shown}```"))
        return
    assert output == shown, "UPDATE_GOLDEN=1 writes it"


def run(line: str) -> str:
    """What a command prints, errors included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(shlex.split(line)[1:])
    return re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)


def test_conditions_of_options_name_exactly_the_allowed_values():
    """Patterns such as `galore_*`, and 'is not', stand for the values of the condition and no others."""
    texts = set()
    for condition in {tuple(condition.items()) for option in options() for condition in option.when}:
        for name, allowed in condition:
            text = condition_text({name: allowed})
            others = {"data.sources": "has several datasets", "lora.adapter_path": "is empty"}
            if name in others:
                assert text == f"{name} {others[name]}"
                continue
            _, is_not, listed = re.fullmatch(r"([\w.]+) is (not )?(.+)", text).groups()
            patterns = re.split(r", | or ", listed.replace("`", ""))
            values = [value for value, _ in by_name()[name].choices] or ["true", "false"]
            named = {value for value in values if any(fnmatch.fnmatch(value, pattern) for pattern in patterns)}
            assert (set(values) - named if is_not else named) == set(allowed), text
            assert len(text) < 190, text
            texts.add(text)
    assert "train.optim is `galore_*` or `apollo_*`" in texts and "parallel.strategy is not single" in texts


def test_every_command_is_documented():
    subcommands = next(action for action in parser()._actions if action.dest == "command")
    documented = re.findall(r"^## ([\w-]+)$", (HOME / "docs/cli.md").read_text(), re.MULTILINE)
    assert set(documented) == set(subcommands.choices)


@pytest.mark.parametrize("path", DOCUMENTS, ids=in_docs)
def test_options_exist(path):
    sections = "|".join(RunSpec.model_fields)
    files = {"py", "md", "yaml", "json", "jsonl", "txt", "sh", "toml", "png", "gguf"}
    unknown = []
    for name, value in re.findall(rf"(?<!--vary )\b((?:{sections})\.[a-z_0-9]+)\b(?:=([^\s`]+))?", path.read_text()):
        if name.rpartition(".")[2] in files:
            continue
        if name not in by_name():
            unknown.append(name)
        elif value:
            edit(RunSpec(), {name: value})
    allowed = {"train.batch_size"} if path.stem == "cli" else set()  # the example of an unknown key
    assert set(unknown) <= allowed


@pytest.mark.parametrize("path", DOCUMENTS, ids=in_docs)
def test_yaml_examples_are_specs(path):
    for block in fenced(path, "yaml"):
        yaml_specs.load(block)


def test_data_examples_have_their_formats():
    text = (HOME / "docs/guide.md").read_text()
    examples = dict(re.findall(r"^```json (\w+)\n(.*?)\n```", text, re.MULTILINE | re.DOTALL))
    assert len(examples) == 7
    for name, line in examples.items():
        example = json.loads(line)
        assert detect_format(example) == name
        assert convert(example, name, Data())


@pytest.mark.parametrize("path", [*DOCUMENTS, HOME / "docs/design.md", HOME / "docs/internals.md"], ids=in_docs)
def test_links_exist(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )


@pytest.mark.parametrize("path", DOCUMENTS, ids=in_docs)
def test_make_targets_exist(path):
    targets = set(re.findall(r"^(\w+):", (HOME / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ )(?:\w+=\S+ )?make (\w+)", path.read_text())) <= targets


def test_the_tree_names_every_module():
    block = fenced(HOME / "docs/design.md", "text")[0]
    named, folders = set(), []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0] if line.split() else ""
        if not re.fullmatch(r"[\w.\-]+/?", name) or line.startswith(" " * 12):
            continue
        folders = [*folders[:depth], name.rstrip("/")]
        path = Path(*folders)
        assert (HOME / path).exists(), f"the tree names {path}"
        named.add(path.as_posix())
    code = [p.relative_to(HOME) for package in ("backend", "webui") for p in (HOME / package).rglob("*.py")]
    packages = {name for name in named if "/" in name}  # a subpackage stands for its modules; backend and webui do not
    code = [p for p in code if p.name != "__init__.py" and not packages & {parent.as_posix() for parent in p.parents}]
    assert len(named) >= 30
    assert not [p for p in code if p.as_posix() not in named], "missing in the tree"


UNSAVED = {"save.strategy": "no"}
SUPPORT = {
    "Single": [{"parallel.strategy": name} for name in ("single", "ddp")],
    "DeepSpeed": [
        *({"parallel.strategy": f"zero{stage}"} for stage in range(4)),
        {"parallel.strategy": "zero3", "parallel.offload_optimizer": "cpu", "parallel.offload_param": "cpu"},
        {"parallel.strategy": "zero3", "parallel.offload_optimizer": "nvme", "parallel.nvme_path": "/tmp", **UNSAVED},
    ],
    "FSDP2": [{"parallel.strategy": "fsdp2", "parallel.cpu_offload": offload} for offload in (False, True)],
    "FSDP1": [{"parallel.strategy": "fsdp1"}],
    "Tensor": [{"parallel.strategy": "tensor", **UNSAVED}],
    "Sequence": [
        {"parallel.strategy": "zero2", "parallel.sequence_parallel_size": 2},
        {"parallel.strategy": "fsdp2", "parallel.context_parallel_size": 2},
    ],
}
QLORA = {"method.kind": "lora", "method.quantization": "nf4"}
METHODS = {"LoRA": {"method.kind": "lora"}, "QLoRA": QLORA, "freeze": {"method.kind": "freeze"}}
METHODS |= {"full": {"method.kind": "full"}}


@pytest.mark.parametrize("strategy", SUPPORT)
def test_readme_table_matches_the_rules(strategy):
    table = re.search(r"\| strategy \|.*?\n\n", (HOME / "README.md").read_text(), re.DOTALL).group()
    columns, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.strip().splitlines()]
    row = dict(zip(columns, next(row for row in rows if row[0].startswith(strategy)), strict=True))
    for method, changes in METHODS.items():
        stages = [stage for stage in STAGES if all(allowed({**changes, **more}, stage) for more in SUPPORT[strategy])]
        assert row[method] == ("yes" if stages else "no"), (method, stages)
        if stages and row["stages"] == "SFT, pretraining":
            assert stages == ["sft", "pretraining"]
        elif stages:
            excluded = {"reward"} if f"no reward model with {method}" in row["stages"] else set()
            assert set(STAGES) - set(stages) == excluded, method


def allowed(changes, stage):
    """Whether two H100 with all optional packages can run it."""
    data = "trains" if stage in ("sft", "pretraining") else "train-pairs"
    fixed = {"train.stage": stage, "data.builtin": data, "model.builtin": "tiny-llama", "launch.device": "cuda"}
    spec = edit(RunSpec(), {**changes, **fixed})
    return preflight(spec, EQUIPPED_TWO, HOME).can_run


def test_pyproject_names_every_package():
    """tests/process/test_wheel.py builds the wheel and looks at each file."""
    packages = {path.parent for name in ("backend", "webui") for path in (HOME / name).rglob("__init__.py")}
    names = {".".join(path.relative_to(HOME).parts) for path in packages}
    assert {name for name in PYPROJECT["tool"]["setuptools"]["packages"] if "footplate_data" not in name} == names


def test_changelog_names_the_version():
    version = PYPROJECT["project"]["version"]
    assert f"## {version}" in (HOME / "CHANGELOG.md").read_text()


def test_no_file_names_the_machine_it_was_written_on():
    words = ["/work" + "/", "../" + "shared", ".lib" + "rary"]
    texts = {}
    for folder, folders, names in os.walk(HOME):
        folders[:] = {*folders} - {".venv", ".git", "runs", "node_modules"}
        for path in (Path(folder, name) for name in names):
            if path.is_file() and path.suffix in (".py", ".md", ".js", ".css", ".toml", ".yaml"):
                texts[path] = path.read_text(errors="replace")
    assert len(texts) > 50
    assert not [(path, word) for path, text in texts.items() for word in words if word in text]


def test_make_names_existing_test_modules():
    names = re.search(r"^TRAIN := ((?:.*\\\n)*.*)", (HOME / "Makefile").read_text(), re.MULTILINE)
    assert names is not None
    for name in names.group(1).replace("\\", "").split():
        assert (HOME / f"tests/process/test_{name}.py").exists(), name


def test_parts_of_the_long_tests_exist():
    table = (HOME / "CONTRIBUTING.md").read_text().partition("| a change in |")[2].partition("\n\n")[0]
    parts = {part for line in table.splitlines()[2:] for part in line.split("|")[2].strip().split(", ")}
    assert len(parts) > 20
    for part in parts:
        paths = [*HOME.glob(f"tests/*/test_{part}.py"), *HOME.glob(f"tests/*/cited/test_{part}.py")]
        assert any("soak" in path.read_text() for path in paths), part
