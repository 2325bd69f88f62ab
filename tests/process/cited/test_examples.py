"""Examples, chat templates and tokenizers that end a run while it prepares its data: each is named before the run, and
without the rules the run fails."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import skip_checks
from fork_server import ForkServer
from training_runs import make_spec

from backend.config import RunSpec
from backend.inspect import InputFacts, inspect_inputs
from backend.inspect.examples import facts_from, merge_facts
from backend.machine import Machine
from backend.rules import Case, examine
from backend.train import tokenize_examples
from cited import cites

ALTERNATING = """\
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
[{{ message['role'] }}]{{ message['content'] }}[/]
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
NO_SYSTEM = """\
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
""" + ALTERNATING.replace("{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}", "{%- if false -%}")
FIRST_MESSAGE = "{{ messages[0]['content'] }}" + NO_SYSTEM.replace("messages[0]['role'] == 'system'", "false")
REWRITING = """\
{%- for message in messages -%}[{{ message['role'] }}]
{%- if message['role'] == 'assistant' and not loop.last -%}{{ message['content'] | upper }}
{%- else -%}{{ message['content'] }}{%- endif -%}[/]{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
SYNTAX_ERROR = "{%- for message in messages -%}{{ message['content'] }"
WITH_EOS = ALTERNATING.replace("[/]", "{{ '[/]' + eos_token }}")
UNKNOWN_FILTER = "{%- for message in messages -%}{{ message['content'] | shout }}{%- endfor -%}"


def user(text: str = "When?") -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str = "At noon.") -> dict[str, str]:
    return {"role": "assistant", "content": text}


TALK = {"messages": [user(), assistant()]}
PAIR = {"prompt": "When?", "chosen": "At noon.", "rejected": "Never."}
IDENTICAL = {"prompt": "When?", "chosen": "At noon.", "rejected": "At noon."}
DPO, ORPO = {"train.stage": "dpo"}, {"train.stage": "orpo"}


@dataclass(frozen=True)
class Invalid:
    """A run that cannot prepare its data: rule, words of its message, examples, template, options, model files."""

    code: str
    words: str
    examples: list[Any] = field(default_factory=lambda: [TALK] * 4)
    template: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    change_model: Callable[[Path], None] = lambda folder: None


def remove_eos_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))


def enlarge_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"extra{number}": len(vocabulary) + number for number in range(3000)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def truncate_tokenizer(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])


def pointer_instead_of_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


INVALID = {
    "template raises for two user turns": Invalid(
        "DAT018", "line 3: .*roles must alternate",
        [TALK, TALK, {"messages": [user(), user(), assistant()]}, TALK], ALTERNATING,
    ),
    "template raises for a system turn": Invalid(
        "DAT018", "line 2: .*System role not supported",
        [TALK, {"messages": [{"role": "system", "content": "Be brief."}, *TALK["messages"]]}], NO_SYSTEM,
    ),
    "template raises for the system prompt of the run": Invalid(
        "DAT018", "line 1: .*System role not supported",
        template=NO_SYSTEM, options={"data.system_prompt": "Be brief."},
    ),
    "template needs a turn before the completion": Invalid(
        "DAT018", "line 2: ", [TALK, {"messages": [assistant(), user(), assistant()]}], FIRST_MESSAGE,
    ),
    "template raises for the prompt of a pair": Invalid(
        "DAT018", "line 2: .*roles must alternate",
        [PAIR, {**PAIR, "prompt": [user(), user()]}], ALTERNATING, DPO,
    ),
    "template with a syntax error": Invalid("DAT018", "line 1: ", template=SYNTAX_ERROR),
    "template with an unknown filter": Invalid("DAT018", "line 1: .*shout", template=UNKNOWN_FILTER),
    "template that rewrites earlier turns": Invalid(
        "DAT018", "line 1: .*cannot be told from prompts",
        [{"messages": [user(), assistant(), user(), assistant()]}] * 2, REWRITING,
    ),
    "template with a token that the tokenizer lacks": Invalid(
        "DAT018", "line 1: .* uses eos_token, and the tokenizer has no EOS token", template=WITH_EOS,
        change_model=remove_eos_token,
    ),
    "pairs with identical completions, DPO": Invalid("DAT019", "4 of 4 pairs", [IDENTICAL] * 4, options=DPO),
    "pairs with identical completions, ORPO": Invalid("DAT019", "4 of 4 pairs", [IDENTICAL] * 4, options=ORPO),
    "max_length shorter than every prompt": Invalid(
        "DAT017", "None of the 4 examples", [{"messages": [user("When? " * 30), assistant()]}] * 4,
        options={"data.max_length": 16},
    ),
    "max_length shorter than the only prompt": Invalid(
        "DAT017", r"The only example has no trained token within data.max_length \(16 tokens\); it has",
        [{"messages": [user("When? " * 30), assistant()]}], options={"data.max_length": 16},
    ),
    "tokenizer larger than the embedding": Invalid("MDL006", "4,7", change_model=enlarge_tokenizer),
    "tokenizer file cut off": Invalid("MDL005", "tokenizer", change_model=truncate_tokenizer),
    "tokenizer file is a Git LFS pointer": Invalid(
        "MDL001", "Git LFS pointer", change_model=pointer_instead_of_tokenizer
    ),
}  # fmt: skip


def prepared_spec(case: Invalid, folder: Path, tiny: Path) -> RunSpec:
    """The spec of a case; its files are written into `folder`."""
    shutil.copytree(tiny, folder / "model")
    case.change_model(folder / "model")
    lines = "".join(json.dumps(example) + "\n" for example in case.examples)
    (folder / "data.jsonl").write_text(lines)
    changes = {
        "model.source": "path",
        "model.path": str(folder / "model"),
        "data.source": "files",
        "data.files": (str(folder / "data.jsonl"),),
        "data.validation": "none",
        "data.max_length": 256,
    }
    if case.template:
        (folder / "template.jinja").write_text(case.template)
        changes |= {"data.chat_template": "file", "data.chat_template_file": str(folder / "template.jinja")}
    return make_spec({**changes, **case.options})


def facts_with_tokenizer(spec: RunSpec, folder: Path) -> InputFacts:
    """The InputFacts with what the worker process finds, without starting one."""
    sections = json.loads(spec.model_dump_json(include={"model", "data", "train"}))
    found = tokenize_examples.inspect(sections, str(folder), str(folder / "model"))
    found = json.loads(json.dumps(found))
    return InputFacts(**merge_facts(vars(inspect_inputs(spec, folder)), facts_from(found, spec)))


@cites("DAT018", "MDL005", "MDL006")
@pytest.mark.parametrize("name", INVALID)
def test_invalid_inputs_are_named_before_the_run_fails(
    name: str, tmp_path: Path, tiny: Path, fork_server: ForkServer
) -> None:
    case = INVALID[name]
    spec = prepared_spec(case, tmp_path, tiny)
    found = examine(Case(spec, Machine(), facts_with_tokenizer(spec, tmp_path)))
    errors = {finding.code: finding.message for finding in found if finding.level == "error"}
    assert [*errors] == [case.code], errors
    assert re.search(case.words, errors[case.code]), errors
    patched = {option for finding in found for fix in finding.fixes for option in fix.patch}
    assert ("data.loss_on" in patched) == (name == "template that rewrites earlier turns")
    code, log = skip_checks.run(tmp_path / "run", spec, fork_server)
    assert code == 1, log


def test_valid_inputs_pass_and_run(tmp_path: Path, tiny: Path, fork_server: ForkServer) -> None:
    spec = prepared_spec(Invalid("", ""), tmp_path, tiny)
    facts = facts_with_tokenizer(spec, tmp_path)
    assert (facts.num_checked, facts.num_usable, facts.all_checked) == (4, 4, True)
    assert not [finding for finding in examine(Case(spec, Machine(), facts)) if finding.level == "error"]
    assert skip_checks.run(tmp_path / "run", spec, fork_server)[0] == 0
