"""The inspection of all examples by the real worker: broken examples deep in a file, progress, another request while
one is in progress, and that Ctrl-C leaves no process."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fork_server import ForkServer, forked_inspection

from backend.__main__ import main
from backend.config import RunSpec
from backend.config.options import edit
from backend.inspect import examples, inspect_inputs, worker
from backend.paths import HOME

TALK = {"messages": [{"role": "user", "content": "When?"}, {"role": "assistant", "content": "At noon."}]}
NUMBER = {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "At noon."}]}
SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, *TALK["messages"]]}
NO_SYSTEM = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
[{{ message['role'] }}]{{ message['content'] }}[/]
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
TIMEOUT = 240  # s; other tests use the same cores


@pytest.fixture
def environment(cache: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a command that starts a worker; asserts that no process of it is left."""
    mark = ("FOOTPLATE_TEST_INSPECTION", str(tmp_path))
    yield {**os.environ, "FOOTPLATE_CACHE": str(cache), worker.SETTING: "on", mark[0]: mark[1]}
    until = time.monotonic() + 60
    while (left := marked_processes("=".join(mark))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def marked_processes(mark: str) -> list[str]:
    """The commands of processes whose environment holds `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.append(" ".join(process.cmdline()))
        except (OSError, psutil.Error):
            continue
    return found


def command(folder: Path, lines: list[dict[str, Any]], *words: str) -> list[str]:
    """`check` of a spec with these examples, the tiny model, and a template that raises an error for a system turn."""
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "template.jinja").write_text(NO_SYSTEM)
    options = {
        "model.builtin": "tiny-llama",
        "data.source": "files",
        "data.files": folder / "data.jsonl",
        "data.validation": "none",
        "eval.strategy": "no",
        "data.chat_template": "file",
        "data.chat_template_file": folder / "template.jinja",
    }
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "backend", "check", "first-run", *settings, *words]


def test_broken_examples_deep_in_a_file_are_named(
    tmp_path: Path, fork_server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [TALK] * 6_000
    lines[4_999], lines[5_499] = NUMBER, SYSTEM
    with forked_inspection(fork_server, fork_server.cache):
        assert main(command(tmp_path, lines, "--json")[3:]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["examples"] == {"checked": 6_000, "all_checked": True, "note": ""}
    messages = {finding["code"]: finding["message"] for finding in report["findings"]}
    path = tmp_path / "data.jsonl"
    assert messages["DAT003"].startswith(f"{path}, line 5000: ") and messages["DAT003"].count(str(path)) == 1
    assert messages["DAT018"].startswith(f"{path}, line 5500: ") and messages["DAT018"].count(str(path)) == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}{{ messages }}",  # one call of C code, in which no thread of the worker runs
        "{%- set n = namespace(x='a' * 1000) -%}{%- for i in range(99) -%}{%- set n.x = n.x + n.x -%}{%- endfor -%}"
        "{{ messages }}",
    ],
)
def test_a_template_cannot_take_all_memory(tmp_path: Path, environment: dict[str, str], template: str) -> None:
    words = command(tmp_path, [TALK] * 100, "--json")
    (tmp_path / "template.jinja").write_text(template)
    made = subprocess.run(
        words, capture_output=True, text=True, cwd=HOME, env=environment, timeout=TIMEOUT, check=False
    )
    note = json.loads(made.stdout)["examples"]["note"]
    assert f"rendering {tmp_path}/data.jsonl, line 1 with {tmp_path}/template.jinja takes too much CPU memory" in note
    assert "more than 4 GiB" in note


# The command, whose worker is started by another program.
WITH_PYTHON = "import sys; sys.executable = sys.argv.pop(1); from backend.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_ctrl_c_ends_the_worker(
    tmp_path: Path, environment: dict[str, str], fork_server: ForkServer, is_forked: bool
) -> None:
    """Also a worker of Python itself, which imports the libraries."""
    terminal, end = pty.openpty()
    words = command(tmp_path, [TALK] * 100_000)
    if is_forked:
        words = [sys.executable, "-c", WITH_PYTHON, str(fork_server.python), *words[3:]]
    words = ["env", "--default-signal=INT", *words]  # a shell's background processes ignore SIGINT, and so do theirs
    environment = {**environment, "PYTHONFAULTHANDLER": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=end, cwd=HOME, env=environment) as checking:
        os.close(end)
        shown, until = "", time.monotonic() + TIMEOUT
        while "Checked " not in shown and time.monotonic() < until:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 4096).decode()
        assert "of 100,000 examples..." in shown
        assert is_forked or "Loading the tokenizer..." in shown, "a forked worker loads it too quickly to be seen"
        started = psutil.Process(checking.pid).children(recursive=True)
        assert [process.cmdline()[-2:] for process in started] == [["-m", "backend.train.worker"]]
        if is_forked:
            started += [psutil.Process(process.pid) for process in fork_server.leftover_processes(0)]
        assert len(started) == 1 + is_forked and started[-1].nice() >= 10
        checking.send_signal(signal.SIGINT)
        try:
            out, _ = checking.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            checking.send_signal(signal.SIGABRT)  # writes its stacks to the terminal
            pytest.fail(os.read(terminal, 1 << 16).decode())
    assert checking.returncode == 130 and not out
    assert not psutil.wait_procs(started, timeout=60)[1]
    while select.select([terminal], [], [], 0)[0]:
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # nobody has the other end open any more
            break
    os.close(terminal)
    assert shown.endswith("\r") and shown.rpartition("\r")[0].rpartition("\r")[2].strip() == "", "the line was erased"


def test_another_request_ends_the_one_in_progress(
    tmp_path: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the form is edited: a request that no client waits for does not delay the next report."""
    monkeypatch.setattr(worker, "ABANDONED_SECONDS", 1.0)
    (tmp_path / "long.jsonl").write_text((json.dumps(TALK) + "\n") * 100_000)
    (tmp_path / "short.jsonl").write_text((json.dumps(TALK) + "\n") * 40)
    spec = edit(RunSpec(), {"model.builtin": "tiny-llama", "data.source": "files", "data.validation": "none"})
    long, short = (edit(spec, {"data.files": (name,)}) for name in ("long.jsonl", "short.jsonl"))
    with forked_inspection(fork_server, fork_server.cache):
        reports = examples._reports(fork_server.cache)
        until = time.monotonic() + TIMEOUT
        while not (facts := inspect_inputs(long, tmp_path)).tokenizer_size and time.monotonic() < until:
            time.sleep(0.2)
        assert facts.examples_pending and 0 < facts.num_checked < 100_000 == facts.num_examples
        assert facts.num_usable is None and facts.token_lengths
        pid = reports.pid
        assert pid
        while (facts := inspect_inputs(short, tmp_path)).examples_pending and time.monotonic() < until:
            time.sleep(0.2)
        assert (facts.num_checked, facts.all_checked, facts.num_usable) == (40, True, 40)
        assert reports.pid == pid, "the same process, whose libraries are loaded"
        assert not reports._pending
    assert reports.pid is None
