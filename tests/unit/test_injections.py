"""Text of the form is text in everything that is made from it: a shell, sbatch and YAML readers run and add nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_plan import LAUNCHED, NODE

from backend.config import RunSpec
from backend.config.options import Option, SpecError, edit, options
from backend.launch.plan import plan

PLACES = ("torchrun-one-node", "deepspeed-two-nodes", "slurm", "kubernetes", "ray", "llamafactory")
CODE = {"slurm.setup"}  # commands of the user, by its purpose
SHELL = """x$(touch {mark})`touch {mark}`';touch {mark};'";touch {mark};\""""  # without quotes and in either kind
LINES = "x\ntouch {mark}\n#SBATCH --injected\ninjected: yes\n- injected: yes"


def with_texts(base: RunSpec, form: str, folder: Path) -> tuple[RunSpec, int]:
    """`base` with `form` in each option that accepts it, and how many these are."""
    spec, count = base, 0
    for option in options():
        if option.kind not in ("str", "list", "table") or option.name in CODE:
            continue
        try:
            spec = edit(spec, {option.name: value(option, form.format(mark=folder / option.name))})
        except SpecError:
            continue
        count += 1
    return spec, count


def value(option: Option, text: str) -> Any:
    return {"str": text, "list": (text,), "table": {"A": text}}[option.kind]


def keys(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        for key, inner in document.items():
            yield str(key)
            yield from keys(inner)
    elif isinstance(document, list):
        for inner in document:
            yield from keys(inner)


@pytest.mark.parametrize("form", [SHELL, LINES], ids=["shell", "lines"])
@pytest.mark.parametrize("place", PLACES)
def test_text_of_the_form_is_no_code(tmp_path: Path, place: str, form: str) -> None:
    commands, ran = tmp_path / "commands", tmp_path / "ran"
    commands.mkdir()
    ran.mkdir()
    for name in ("python3", "sbatch", "srun", "scontrol", "ray", "kubectl"):
        (commands / name).write_text("#!/bin/sh\n")
        (commands / name).chmod(0o700)
    spec, count = with_texts(edit(RunSpec(), LAUNCHED[place]), form, ran)
    assert count > 20
    made = plan(spec, replace(NODE, python="python3"))
    folder = tmp_path / "run"
    environment = {"PATH": f"{commands}:{os.defpath}", "HOME": str(tmp_path), "SLURM_SUBMIT_DIR": str(folder)}
    for shell in ("-c", made.script(str(folder))), *([str(folder / f)] for f in made.files if f.endswith(".sh")):
        subprocess.run(
            ["bash", *shell], env=environment, stdin=subprocess.DEVNULL, capture_output=True, cwd=tmp_path, check=False
        )
    assert (folder / "spec.yaml").read_text() == made.files["spec.yaml"], "the script did not run"
    assert not list(ran.iterdir())
    for name, body in made.files.items():
        if name.endswith(".sh"):
            assert not [line for line in body.splitlines() if line.startswith("#SBATCH --injected")], name
        if name.endswith(".yaml"):
            assert "injected" not in {key for document in yaml.safe_load_all(body) for key in keys(document)}, name
