"""The trainer in a rehearsal: the longest examples first, a crash after the first checkpoint, a resume, and the saved
model loaded."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, rank_count, write_run
from parameters import soak_except
from training_runs import log_text, make_spec, result
from transformers import AutoTokenizer

from backend.__main__ import main
from backend.runs import LOCK, PLAN, REHEARSAL, REHEARSED, processes
from backend.runs.rehearsals import FOLDER, completed
from backend.tasks.rehearsal import rehearsal_spec
from backend.train import data

LONG = 90  # words in the one long example
# Marks completions without the prompt for generation, so examples can be tokenized, but no prompt can be rendered.
TRAINS_ONLY = (
    "{% if add_generation_prompt %}{{ raise_exception('no prompt for generation') }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def write_data(path: Path) -> Path:
    """Twenty short conversations and a long one, the last but one."""
    words = [["try"] * (LONG if number == 18 else 3) for number in range(20)]
    turns = [[{"role": "user", "content": "go"}, {"role": "assistant", "content": " ".join(w)}] for w in words]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


def spec_changes(path: Path, **more: Any) -> dict[str, Any]:
    changes = {"data.source": "files", "data.files": (str(path),), "data.max_samples": 0, "data.validation_split": 0.2}
    changes |= {"eval.strategy": "epoch", "save.strategy": "epoch", "save.final_model": True, "eval.num_generations": 0}
    return changes | {"train.per_device_train_batch_size": 1, **more}


def phases(folder: Path) -> list[str]:
    lines = (folder / REHEARSED).read_text().splitlines()
    return [phase["phase"] for phase in completed(list(map(json.loads, lines)))]


TWO = {"launch.nproc_per_node": 2}
FULL = {"method.kind": "full", "train.learning_rate": 1e-5}
PAIRS = {"data.source": "builtin", "data.builtin": "train-pairs"}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp", **TWO},
    "fsdp2": {"parallel.strategy": "fsdp2", **FULL, **TWO},
    "zero2": {"parallel.strategy": "zero2", **TWO},
    "zero3": {"parallel.strategy": "zero3", **FULL, **TWO},
    "packing": {"data.packing": True, "model.attn_implementation": "eager", "data.max_length": 64},
    "pretraining": {"train.stage": "pretraining"},
    "merged": {"save.merge_adapter": True},
    "generations": {"eval.num_generations": 4, "train.gradient_accumulation_steps": 8},
    "kto": {"train.stage": "kto", **PAIRS, "train.per_device_train_batch_size": 2},
    **{stage: {"train.stage": stage, **PAIRS} for stage in ("dpo", "orpo", "reward")},
}


@pytest.mark.parametrize("name", soak_except(CASES, ()))
def test_crash_resume_and_load(root: Path, fork_server: ForkServer, name: str) -> None:
    folder, loaded = root / name, root / f"{name}-loaded"
    spec = rehearsal_spec(make_spec(spec_changes(write_data(root / "data.jsonl"), **CASES[name])))
    ranks = rank_count(spec)
    write_run(folder, spec)
    (folder / LOCK).touch()
    assert fork_server.run(folder, ranks, env={REHEARSAL: "1"}) == -signal.SIGKILL, log_text(folder)
    assert phases(folder)[-4:] == ["step 1", "evaluating", "checkpoint", "killed"]
    assert fork_server.run(folder, ranks, env={REHEARSAL: "1"}) == 0, log_text(folder)
    assert "Resuming from checkpoint-1." in log_text(folder)
    after = phases(folder)[phases(folder).index("resume") :]
    assert after[:4] == ["resume", "step 2", "evaluating", "checkpoint"] and "saving" in after
    assert result(folder)["steps"] == 2

    loaded.mkdir()
    (loaded / LOCK).touch()
    script = root / "load.py"
    script.write_text("import sys\nfrom backend.train.load_model import main\ndel sys.argv[1]\nmain()\n")
    assert fork_server.run(loaded, 0, str(folder), script=str(script)) == 0, log_text(loaded)
    assert ("Score of a text" if name == "reward" else "Generated") in log_text(loaded)
    assert result(loaded)["peak_bytes"] > 0


@pytest.mark.soak
def test_the_command_passes_and_leaves_nothing(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warm server forks its processes."""
    monkeypatch.chdir(root)
    changes = vars_of(spec_changes(write_data(root / "data.jsonl")))
    arguments = ["rehearse", "first-run", "--runs", str(root / "passes"), "--json"]
    assert main([*arguments, *(f"--set={name}={_text(value)}" for name, value in changes.items())]) == 0
    status = json.loads(capsys.readouterr().out)
    seconds = {phase["phase"]: phase["seconds"] for phase in status["phases"]}
    names = [phase["phase"] for phase in status["phases"]]
    last = ["checkpoint", "killed", "resume", "step 2", "evaluating", "checkpoint", "saving", "load"]
    assert [name for name in names if not name.startswith("generating")][-8:] == last
    least = min(seconds["resume"], seconds["load"])  # the other one may be slow on a busy machine
    assert least < seconds["starting"], "only the first start imports the libraries"
    for path in (root / "passes" / FOLDER).iterdir():
        assert {file.name for file in path.iterdir()} == {"lock", "log.txt", "outcome.json", "rehearsal.json"}
        assert not processes.run_processes(path)
        assert "Resuming from checkpoint-1." in (path / "log.txt").read_text()


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto", "reward"])
def test_the_longest_examples_come_first(root: Path, tiny: Path, stage: str) -> None:
    """Those that cannot be used are left out: the reward model drops the longest, which max_length would cut."""
    source = spec_changes(write_data(root / "data.jsonl")) if stage == "sft" else {"data.builtin": "train-pairs"}
    changes = {"data.max_samples": 0, "train.stage": stage, "data.max_length": 110 if stage == "reward" else 256}
    spec, tokenizer = make_spec({**source, **changes}), AutoTokenizer.from_pretrained(tiny)
    every = lengths(data.prepare(spec, tokenizer, lambda *_: True, print))
    longest = lengths(data.prepare(spec, tokenizer, lambda *_: True, print, (3, 3)))
    assert len(longest) == 3 < len(every)
    assert longest[0] > min(every) and longest == sorted(longest, reverse=True)
    assert longest[0] >= 0.95 * max(every)  # which are the longest is decided by their characters


def lengths(prepared: data.PreparedData) -> list[int]:
    names = [name for name in prepared.train.column_names if name.endswith("ids") and not name.startswith("KL")]
    columns = [prepared.train[name] for name in names]
    return [sum(map(len, ids)) for ids in zip(*columns, strict=True)]


@pytest.mark.soak
def test_the_command_finds_a_template_that_cannot_be_prompted(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks render the examples, which is all that the training does; with chatml the same spec passes."""
    template, path = root / "template.jinja", write_data(root / "data.jsonl")
    template.write_text(TRAINS_ONLY)
    monkeypatch.chdir(root)
    changes = spec_changes(path, **{"data.chat_template": "file", "data.chat_template_file": str(template)})
    options = [f"--set={name}={_text(value)}" for name, value in vars_of(changes).items()]
    arguments = ["rehearse", "first-run", "--runs", str(root / "runs"), "--json", *options]
    assert main(arguments) == 1
    failed = json.loads(capsys.readouterr().out)
    assert failed["failure"]["phase"] == "Load the saved model and use it"
    assert "no prompt for generation" in failed["failure"]["sentence"]
    assert main([*arguments, "--set=data.chat_template=chatml"]) == 0
    passed = json.loads(capsys.readouterr().out)
    assert passed["state"] == "done" and passed["peak_bytes"] > 0
    for path in (root / "runs" / FOLDER).iterdir():
        assert not list(path.glob(f"*/{PLAN}"))
        assert not processes.run_processes(path)


def vars_of(changes: dict[str, Any]) -> dict[str, Any]:
    """The options of the tiny run with `changes`."""
    return {"model.builtin": "tiny-llama", "launch.device": "cpu", "data.max_length": 256, **changes}


def _text(value: Any) -> str:
    return (
        "\n".join(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)
    )
