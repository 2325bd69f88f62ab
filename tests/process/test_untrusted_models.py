"""Model folders, chat templates and checkpoints from others run no code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from training_runs import log_text, make_spec
from transformers import AutoTokenizer

from backend.data import prepared
from backend.train import checkpoints, model, tokenize_examples
from backend.train.run_log import TrainError
from backend.train.template_input import TemplateInput
from backend.train.templates import ChatTokenizer, UnsupportedConversation

TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
LEAVES = (  # ways out of Jinja's sandbox, each of which would create the file PLACE
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ (''|attr('__class__'))|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%s'|format(messages.__class__.__mro__) }}",
    "{{ cycler.__init__.__globals__.os.system('touch PLACE') }}",
    "{{ lipsum.__globals__['os'].system('touch PLACE') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('PLACE', 'w') }}",
    "{{ strftime_now.__globals__['__builtins__']['open']('PLACE', 'w') }}",
    "{{ self._TemplateReference__context.environment.globals }}",
    "{% set f = messages.append.__self__.__class__ %}{{ f.__base__.__subclasses__() }}",
    "{% import 'os' as os %}{{ os.system('touch PLACE') }}",
    "{% include '/etc/passwd' %}",
)
FAILS = ("{{ 1 / 0 }}", "{% for n in range(10 ** 9) %}x{% endfor %}", "{{ [][3].x }}")  # errors that Python raises
SAYS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("source", ["model", "file"])
def test_a_template_does_not_leave_its_sandbox(tiny: Path, tmp_path: Path, source: str) -> None:
    """The check reports that the template fails, or the text has nothing of Python's."""
    folder, place, rows = tmp_path / "model", tmp_path / "ran", tmp_path / "rows.jsonl"
    shutil.copytree(tiny, folder)
    rows.write_text(json.dumps({"messages": TURNS}))
    options: dict[str, Any] = {"data.source": "files", "data.files": (str(rows),), "data.validation": "none"}
    file = folder / "chat_template.jinja" if source == "model" else tmp_path / "t.jinja"
    if source == "file":
        options |= {"data.chat_template": "file", "data.chat_template_file": str(file)}
    spec = make_spec(options)
    sections = {name: getattr(spec, name).model_dump() for name in ("model", "data", "train")}
    for template in LEAVES:
        file.write_text(SAYS + template.replace("PLACE", str(place)))
        found = json.dumps(tokenize_examples.inspect(sections, str(tmp_path), str(folder)))
        assert not place.exists() and "<class" not in found and "root:" not in found, template


@pytest.mark.parametrize("template", [*LEAVES, *FAILS])
def test_what_a_template_raises_is_an_error_of_the_example(tiny: Path, tmp_path: Path, template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = SAYS + template.replace("PLACE", str(tmp_path / "ran"))
    text = ""
    try:
        text = ChatTokenizer.create(tokenizer, False).render(TURNS, {})
    except UnsupportedConversation as error:
        assert str(error).startswith("the chat template cannot render it: ")
    assert "<class" not in text and "root:" not in text and not list(tmp_path.iterdir())
    assert TemplateInput.create(tokenizer, tokenizer.chat_template)


class Touch:
    """A pickle of it creates a file when it is loaded."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.place),)


def write_pickle(path: Path, place: Path, zipped: bool) -> None:
    """Write a file that creates `place`, in torch's own format or as a bare pickle."""
    if zipped:
        torch.save({"lm_head.weight": Touch(place)}, path)
    else:
        path.write_bytes(pickle.dumps({"lm_head.weight": Touch(place)}, protocol=2))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_a_model_folder_is_not_run(tiny: Path, tmp_path: Path, zipped: bool) -> None:
    folder, place = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny, folder)
    (folder / "model.safetensors").unlink()
    write_pickle(folder / "pytorch_model.bin", place, zipped)
    spec = make_spec({"model.source": "path", "model.path": str(folder)})
    source = model.ModelSource(str(folder), {"local_files_only": True})
    with pytest.raises(TrainError, match="a pickle that contains more than"):
        model.load(spec, source, "fp32", model.load_tokenizer(spec, source))
    assert not place.exists()
    with suppress(RuntimeError):  # of a bare pickle, which has run by then
        torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert place.exists(), "the file is one that would run"


def test_pickles_of_a_checkpoint_are_not_run(fork_server: ForkServer, root: Path) -> None:
    """Its owner is the user, as of an archive that was unpacked, and it is marked as complete."""
    options = {"train.max_steps": 3, "save.strategy": "steps", "save.steps": 2, "save.total_limit": 0}
    folder = fork_server.train(root / "pickles", make_spec(options))
    saved, place = folder / "checkpoints/checkpoint-2", root / "ran"
    shutil.rmtree(folder / "checkpoints/checkpoint-3")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin"):
        write_pickle(saved / name, place, zipped=True)
    checkpoints.mark_complete(saved)
    assert fork_server.run(folder) == 1
    assert "Resuming from checkpoint-2." in log_text(folder) and "weights_only" in log_text(folder).lower()
    assert not place.exists()


def test_tokenized_data_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOOTPLATE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry/data").write_text("tokens")
    before = os.umask(0o022)
    try:
        assert prepared.keep("key", tmp_path / "entry", "data", ["line"])
    finally:
        os.umask(before)
    assert (tmp_path / "cache/prepared").stat().st_mode & 0o777 == 0o700
