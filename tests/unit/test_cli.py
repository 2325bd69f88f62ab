"""The command line: what it prints, its JSON and its exit codes. Runs are in tests/process."""

import argparse
import io
import json
import os
import shlex
import signal
import socket
import time
from datetime import datetime
from pathlib import Path

import pytest

from backend.__main__ import COMMANDS, main
from backend.cli import commands, evaluate
from backend.cli.runs import find_run
from backend.config.conditions import without_effect
from backend.config.options import get
from backend.machine import parse
from backend.models.evaluation import Settings
from backend.paths import cache_folder
from backend.presets import presets
from backend.rules import RULES, Fix
from backend.runs import Plan, kubernetes, queue
from backend.runs.folder import Run, RunError

TOO_LARGE = ["full-8b-fsdp2", "--machine", "1x24gb"]


def printed(capsys, *words, code=0):
    assert main(list(words)) == code
    return capsys.readouterr().out


def test_check_prints_reason_and_fixes_with_cost_and_safety(capsys):
    out = printed(capsys, "check", "first-run", "--machine", "laptop", "--set", "parallel.strategy=fsdp1", code=1)
    assert out.startswith("Cannot run: ")
    assert "\n         Why: " in out and "\n         Fix: " in out and "safe)" in out
    assert "--set parallel.strategy=" in out


def test_check_json_has_everything(capsys):
    report = json.loads(printed(capsys, "check", *TOO_LARGE, "--json", code=1))
    assert report["can_run"] is False and report["machine"] and report["verdict"]
    finding = next(f for f in report["findings"] if f["level"] == "error")
    assert all(finding[key] for key in ("code", "slug", "title", "message", "reason", "fields", "source"))
    assert all({"label", "patch", "safe", "cost"} <= fix.keys() for f in report["findings"] for fix in f["fixes"])


def test_a_closed_pipe_does_not_say_that_there_is_no_error(monkeypatch):
    def check(arguments):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setitem(COMMANDS, "check", check)
    assert main(["check", "first-run"]) == 141


def test_an_evaluation_without_intervals_names_none(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate.evaluation, "read_settings", lambda path: Settings())
    few = {"sentence": "Exact match: 1.", "count": 3, "verdict": "few"}
    for comparisons, shown in (([few], False), ([few, {**few, "count": 90, "verdict": "better"}], True)):
        evaluate.print_result(Run(tmp_path), {"comparisons": comparisons, "limits": []})
        assert ("Intervals: paired bootstrap over 90 texts." in capsys.readouterr().out) == shown


def test_printed_fixes_are_arguments(capsys):
    out = printed(capsys, "check", *TOO_LARGE, code=1)
    fixes = [line.strip() for line in out.splitlines() if line.strip().startswith("--set ")]
    assert len(fixes) == out.count("Fix: ") > 0
    for fix in fixes:
        assert main(["check", *TOO_LARGE, *shlex.split(fix)]) in (0, 1)
        assert capsys.readouterr().out != out


def test_printed_fixes_bring_no_hidden_value_back(capsys):
    hidden = ("--set", "parallel.strategy=fsdp1", "--set", "parallel.context_parallel_size=2")
    out = printed(capsys, "check", "first-run", "--machine", "laptop", *hidden, code=1)
    fixes = [line for line in out.splitlines() if "--set parallel.strategy=fsdp2" in line]
    assert fixes and all("--set parallel.context_parallel_size=1" in fix for fix in fixes)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("data.files", "[a.jsonl, 'b, c.jsonl']", ("a.jsonl", "b, c.jsonl")),
        ("data.files", "[ab]*.jsonl", ("[ab]*.jsonl",)),
        ("data.files", "[007, no, '*.jsonl']", ("007", "no", "*.jsonl")),
        ("lora.target_modules", "[q_proj, v_proj]", ("q_proj", "v_proj")),
        ("launch.devices", "[0, 1]", (0, 1)),
        ("data.files", "a.jsonl\nb.jsonl", ("a.jsonl", "b.jsonl")),
        ("data.sources[1].validation_files", "[x]", ("x",)),
        ("data.add_special_tokens", "[/INST]", ("[/INST]",)),
        ("slurm.setup", "[ -f x ]\nls", ("[ -f x ]", "ls")),
        ("slurm.setup", "[ -f x ]", ("[ -f x ]",)),
        ("slurm.setup", "[[ -f x ]]", ("[[ -f x ]]",)),
        ("slurm.setup", "[module load cuda, module load gcc]", ("module load cuda", "module load gcc")),
        ("kubernetes.volumes", "[runs=/runs]", ("runs=/runs",)),
    ],
)
def test_lists_on_the_command_line(option, text, value):
    """As YAML has them for data files, and what a fix prints gives the same value."""
    two = ["data.sources[1].source=files"]
    given = argparse.Namespace(spec="first-run", set=[*two, f"{option}={text}"])
    spec = commands.read_spec(given)
    assert get(spec, option) == value
    words = shlex.split(commands.set_arguments(Fix("", {option: value})))
    assert get(commands.read_spec(argparse.Namespace(spec="first-run", set=[*two, words[1]])), option) == value


def test_rules_json_describes_every_rule(capsys):
    entries = json.loads(printed(capsys, "rules", "--json"))
    assert [entry["code"] for entry in entries] == [rule.code for rule in RULES]
    keys = {"code", "slug", "level", "family", "title", "reason", "example", "fixes", "manual_fix", "options", "source"}
    for entry in entries:
        assert entry.keys() == keys | {"proof"}
        assert entry["reason"] and entry["example"] and entry["slug"]
        assert entry["fixes"] or entry["manual_fix"] or entry["level"] != "error", entry["code"]


def test_options_that_have_no_effect_are_named(capsys, tmp_path):
    """A file can set what a form hides. The values of a list of datasets are named, too."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "train: {max_steps: 5}\ndata: {sources: [{source: files, files: [a.jsonl]}, {hub_split: dev, weight: 2}]}\n"
    )
    command = ["check", str(path), "--set", "method.kind=full", "--set", "lora.r=4", "--set", "eval.steps=50"]
    main(command)
    noted = capsys.readouterr().err.splitlines()
    assert [line.partition(" has no effect: ")[0] for line in noted if line.startswith("Note: ")] == [
        "Note: lora.r",
        "Note: train.max_steps",
        "Note: data.sources[1].hub_split",
    ]
    assert "it is used only if train.duration is steps." in noted[1]
    assert "it is used only if data.sources[1].source is hub." in noted[2]
    assert not [preset.name for preset in presets() if without_effect(preset.spec)]


def test_plan_shows_another_launcher(capsys):
    assert "accelerate.commands.launch" in printed(capsys, "plan", "first-run", "--launcher", "accelerate")


def test_the_printed_machine_can_be_checked_for(capsys, tmp_path):
    out, as_json = printed(capsys, "machine"), json.loads(printed(capsys, "machine", "--json"))
    assert parse(out).name == as_json["name"] == socket.gethostname()
    (tmp_path / "here.yaml").write_text(out)
    report = json.loads(printed(capsys, "check", "first-run", "--machine", str(tmp_path / "here.yaml"), "--json"))
    assert report["machine"].startswith(socket.gethostname())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "no-such-preset"], "no such file or preset"),
        (["check", "first-run", "--set", "train.seed"], "expected section.key=value"),
        (["check", "first-run", "--set", "train.seed=x"], "train.seed"),
        (["show", "2026", "--runs", "no-such-folder"], "2026"),
        (["show", "/", "--runs", "file"], "/ is not the folder of a run."),  # a run may be named by its folder
        (["list", "--runs", "file"], "--runs file: file is not a folder."),
        (["run", "first-run", "--runs", "file/runs"], "--runs file/runs: file is not a folder."),
    ],
)
def test_invalid_input_is_one_sentence(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("command", "start"),
    [
        (["run"], "backend.cli.runs.Run.create"),
        (["sweep", "--vary", "train.seed=1,2"], "backend.cli.sweep.start_sweep.start"),
        (["rehearse"], "backend.cli.rehearse.rehearse"),
        (["tune"], "backend.cli.tune.tune"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_warnings_are_printed_once_before_runs_start(capsys, tmp_path, monkeypatch, command, start):
    def refuse(*_):
        raise RunError("Not in this test.")

    monkeypatch.setattr(start, refuse)
    words = ["--set", "model.builtin=tiny-llama", "--set", "method.kind=full", "--set", "train.learning_rate=5"]
    assert main([command[0], "first-run", "--runs", str(tmp_path), *command[1:], *words]) == 2
    printed = capsys.readouterr().err.splitlines()
    warning = "Warning MTH010: A learning rate of 5 is high for full fine-tuning; 1e-5 to 5e-5 is usual."
    assert printed.count(warning) == 1 and printed[-1] == "Not in this test."


def test_figures_for_gpus_that_the_machine_does_not_have_say_so(capsys):
    sentence = "The figures are for 8 GPUs, and the machine has 4 GPUs."
    assert sentence in printed(capsys, "estimate", "full-8b-fsdp2", "--machine", "4x80gb").splitlines()
    assert json.loads(printed(capsys, "estimate", "full-8b-fsdp2", "--machine", "8x80gb", "--json"))["assumed"] == ""


def test_a_change_replaces_an_invalid_value_of_the_file(capsys, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("train:\n  learning_rate: fast\n  max_steps: 0\n  duration: steps\n")
    rate = ("--set", "train.learning_rate=1e-4")
    assert main(["plan", str(path), *rate]) == 2
    assert "train.max_steps: must be at least 1" in capsys.readouterr().err, "the other value is still invalid"
    assert "max_steps: 7" in printed(capsys, "plan", str(path), *rate, "--set", "train.max_steps=7")


def test_a_change_to_a_cluster_keeps_one_node(capsys, tmp_path):
    """As on the page: the option has another default, for runs on several nodes."""
    words = ("full-8b-fsdp2", "--machine", "8x80gb", "--set", "launch.place=slurm")
    assert "#SBATCH --nodes=1\n" in printed(capsys, "plan", *words)
    assert "nodes like" not in printed(capsys, "check", *words).splitlines()[0]
    (tmp_path / "four.yaml").write_text("launch: {nnodes: 4}\nparallel: {strategy: ddp}\n")
    of_file = printed(capsys, "plan", str(tmp_path / "four.yaml"), *words[1:])
    assert "#SBATCH --nodes=4\n" in of_file
    two = printed(capsys, "check", *words, "--set", "launch.nnodes=2")
    assert two.splitlines()[0].endswith("(2 nodes like eight 80 GB GPUs: 8 x H100 80GB)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chek", "first-run"], "invalid choice: 'chek'. Did you mean check?"),
        (["export", "first-run", "--to", "skypilott"], "invalid choice: 'skypilott'. Did you mean skypilot?"),
        (["run", "first-run", "--folow"], "unrecognized arguments: --folow. Did you mean --follow?"),
        (
            ["check", "first-run", "--mashine=1x24gb"],
            "unrecognized arguments: --mashine=1x24gb. Did you mean --machine?",
        ),
        (["presets", "--folow"], "unrecognized arguments: --folow\n"),
        (["export", "first-run", "--to", "nothing"], "(choose from 'llamafactory', 'kubernetes', 'skypilot')"),
        (["export", "first-run", "--to", "slurm"], "`footplate plan SPEC --set launch.place=slurm` prints the job"),
    ],
)
def test_a_word_that_does_not_exist_has_a_suggestion(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert message in capsys.readouterr().err


def test_sigterm_stops_what_a_command_has_started(monkeypatch):
    """`timeout 600 footplate rehearse SPEC` left its processes."""

    def end_by_signal(arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return 0

    monkeypatch.setattr("backend.__main__.COMMANDS", {"rehearse": end_by_signal})
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["rehearse", "first-run"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ambiguous_prefix_names_a_few_runs(tmp_path):
    made = [Run.create(tmp_path, f"run {number}", Plan(("true",)), datetime(2026, 1, 1)).id for number in range(30)]
    with pytest.raises(RunError, match=r"is the prefix of several runs: .* and 25 more") as caught:
        find_run(tmp_path, "2026")
    assert sum(run in str(caught.value).replace(",", " ").split() for run in made) == 5
    assert find_run(tmp_path, made[3]).id == made[3]


def test_a_run_is_found_by_its_name(tmp_path):
    first, twin, _ = (
        Run.create(tmp_path, name, Plan(("true",)), datetime(2026, 1, day))
        for name, day in (("Café run 1/2", 1), ("twin", 2), ("twin", 3))
    )
    damaged = Run.create(tmp_path, "damaged", Plan(("true",)), datetime(2026, 1, 4))
    (damaged.path / "plan.json").write_text("[" * 500_000)
    assert find_run(tmp_path, "Café run 1/2").id == first.id
    with pytest.raises(RunError, match=f"'twin' is the name of several runs: .*{twin.id}"):
        find_run(tmp_path, "twin")
    named_like_an_id = Run.create(tmp_path, "2026-01", Plan(("true",)), datetime(2026, 2, 1))
    assert find_run(tmp_path, "2026-01").id == named_like_an_id.id  # every other ID begins with it
    with pytest.raises(RunError, match=r"There is no run named 'Cafe run' .* Similar: Café run 1/2"):
        find_run(tmp_path, "Cafe run")
    for wrong in (
        "caf\u00c9 RUN",
        "un 1/",
        "there/Cafe run 1",
        named_like_an_id.id[:9] + "x" + named_like_an_id.id[10:],
    ):
        expected = named_like_an_id.id if wrong.startswith("2026") else "Caf\u00e9 run 1/2"
        with pytest.raises(RunError, match=r"There is no run named ") as caught:
            find_run(tmp_path, wrong)
        assert expected in str(caught.value).partition("Similar: ")[2], wrong
    with pytest.raises(RunError, match="is not the folder of a run"):
        find_run(tmp_path, f"{tmp_path}/")


def test_estimate_prints_time_and_price(capsys, tmp_path):
    described = tmp_path / "machines" / "priced.yaml"
    described.parent.mkdir()
    described.write_text("gpus: [{name: H100, count: 1}]\nprice_per_gpu_hour: 3\n")
    words = ["estimate", "first-run", "--set", "train.per_device_train_batch_size=2"]
    out = printed(capsys, *words, "--machine", str(described))
    assert " tokens/s." in out and "Largest part of a step: " in out and "at 3 per GPU hour." in out
    found = json.loads(printed(capsys, *words, "--machine", str(described), "--json"))["time"]
    assert found["run"]["steps"] > 0 and found["price"]["per_gpu_hour"] == 3 and found["texts"]["run"] in out
    (tmp_path / "machines" / "cpu.yaml").write_text("cores: 8\n")
    header, first, last = printed(capsys, *words, "--machines", str(described.parent)).splitlines()
    assert header.split() == ["MACHINE", "GPUS", "TIME", "TOKENS/S", "PRICE", "RESULT"]
    assert first.startswith("priced   1 ") and last.startswith("cpu ") and "cannot be measured" in last
    assert main([*words, "--machines", str(tmp_path)]) == 2 and "no YAML files" in capsys.readouterr().err
    assert main([*words, "--machines", "--machine", "laptop"]) == 2 and "exclude" in capsys.readouterr().err


def test_folders_in_variables_are_the_same_for_a_run_and_its_supervisor(tmp_path, monkeypatch):
    """They have other working directories: each run had a queue of its own, so that none waited for another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(queue.FOLDER, "a:queue")
    monkeypatch.setenv("FOOTPLATE_CACHE", "~/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "xdg")
    monkeypatch.setenv("KUBECONFIG", "config:/etc/config:")
    assert main(["queue"]) == 0
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")  # as a supervisor does
    assert queue.folder() == tmp_path / "a:queue"
    assert cache_folder() == Path.home() / "cache"
    assert cache_folder({**os.environ, "FOOTPLATE_CACHE": ""}) == tmp_path / "xdg/footplate"
    assert kubernetes.kubeconfig() == f"{tmp_path}/config:/etc/config"


def test_a_run_that_did_not_start_is_named(tmp_path, monkeypatch, capsys):
    """The advice to try again made a second run, and nothing said that the first is there."""

    def start(*_, **__):
        raise RunError("The run's supervisor process did not respond within 60 seconds.")

    monkeypatch.setattr(Run, "start", start)
    root = tmp_path / "my runs"
    assert main(["run", "first-run", "--runs", str(root), "--skip-checks"]) == 2
    (folder,) = root.iterdir()
    assert f"`footplate resume {shlex.quote(str(folder))}` starts this run." in capsys.readouterr().err
