"""The life cycle of a run, with real processes. `make_run` asserts after each test that no process is left."""

from __future__ import annotations

import errno
import http.server
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from log_writers import log_writers
from small_disk import movable
from waiting import wait_for

from backend import runs
from backend.runs import (
    EVENTS,
    LOCK,
    LOG,
    PLAN,
    RESULT,
    SCRIPT,
    STATE,
    STOP,
    listing,
    processes,
    replace_text,
    search,
    stop_requests,
    webhook,
)
from backend.runs.folder import Run, RunError, StopTimeouts

MakeRun = Callable[..., Run]
SHORT_TIMEOUTS = StopTimeouts(save=0.4, discard=0.2, sigterm=0.4, before_training=0.3)
WRITE_PROGRESS = (
    "import json, os, time\nopen('progress.json', 'w').write(json.dumps({'phase': 'training', 'step': 3}))\n"
)
STOPS_ON_REQUEST = (
    WRITE_PROGRESS + "while not os.path.exists('stop'): time.sleep(0.02)\nprint('saved', open('stop').read())"
)
WRITES_UNTIL_STOPPED = """
import json, os, time
while not os.path.exists('stop'):
    open('.new', 'w').write(json.dumps({'phase': 'training', 'step': 3}))
    os.replace('.new', 'progress.json')
    time.sleep(0.02)
print('saved', open('stop').read())
"""
SLEEPS = WRITE_PROGRESS + "time.sleep(60)"
IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('ignores SIGTERM', flush=True)
time.sleep(60)
"""
LAUNCHER_IGNORES_SIGTERM = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", {IGNORES_SIGTERM!r}], start_new_session=True)
"""
STARTS_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


def wait_until_ended(run: Run, seconds: float = 20.0) -> Run:
    wait_for(lambda: not processes.is_locked(run.path), seconds)
    return run


def read_state(run: Run) -> dict[str, object]:
    return dict(json.loads((run.path / STATE).read_text()))


def process_id(run: Run, name: str) -> int:
    """The process ID of the supervisor (`pid`) or of the launcher."""
    wait_for(lambda: read_state(run).get(name))
    return int(str(read_state(run)[name]))


def process_ended(number: int) -> bool:
    return processes._status(number) is None


def failure_sentence(run: Run) -> str:
    failure = run.failure()
    assert failure
    return str(failure["sentence"])


def test_exit_code_0_is_done(make_run: MakeRun) -> None:
    run = make_run("import os, sys; print(os.getcwd(), os.environ['RUN_VARIABLE'], sys.argv[1:])", RUN_VARIABLE="red")
    assert run.state == "new" and run.summary()["sentence"] == "Ready to start."
    run.start()
    assert wait_until_ended(run).state == "done"
    assert f"{run.path} red []" in (run.path / LOG).read_text()
    assert run.failure() is None and run.can() == {"stop": False, "resume": False, "delete": True, "clean_up": False}


def test_exit_code_7_is_failed(make_run: MakeRun) -> None:
    run = make_run(
        "import os; assert os.environ['TORCHELASTIC_ERROR_FILE'].endswith('/error.json'); raise SystemExit(7)"
    )
    run.start()
    assert wait_until_ended(run).state == "failed" and "exited with code 7" in failure_sentence(run)


def test_missing_launcher(make_run: MakeRun) -> None:
    run = make_run("", python="/no/such/python")
    run.start()
    assert wait_until_ended(run).state == "failed" and "/no/such/python cannot be started" in failure_sentence(run)


@pytest.mark.parametrize("save", [True, False])
def test_stop_request_is_honored(make_run: MakeRun, save: bool) -> None:
    run = make_run(STOPS_ON_REQUEST)
    run.start()
    wait_for(lambda: run.state == "running")
    run.stop(save)
    assert wait_until_ended(run).state == "stopped"
    assert ("saved save" if save else "saved discard") in (run.path / LOG).read_text()
    assert "forced" not in read_state(run) and run.failure() is None


def test_stop_after_the_result_is_done(make_run: MakeRun) -> None:
    run = make_run(STOPS_ON_REQUEST + "\nopen('result.json', 'w').write('{}')")
    run.start()
    wait_for(lambda: run.state == "running")
    run.stop()
    assert wait_until_ended(run).state == "done"


def test_launcher_and_grandchild_that_ignore_sigterm_are_killed(make_run: MakeRun) -> None:
    run = make_run(LAUNCHER_IGNORES_SIGTERM + SLEEPS)
    run.start(timeouts=SHORT_TIMEOUTS)
    wait_for(lambda: "ignores SIGTERM" in (run.path / LOG).read_text() and run.state == "running")
    assert len(processes.run_processes(run.path)) == 2
    run.stop()
    assert run.state == "stopping" and "Stopping" in run.summary()["sentence"]
    assert wait_until_ended(run).state == "stopped" and read_state(run)["forced"] == "SIGKILL"
    assert not processes.run_processes(run.path)


def test_grandchild_without_the_run_marker_is_killed(make_run: MakeRun, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {program!r}], env={{}}, start_new_session=True)"
    run = make_run(
        f"import os, subprocess, sys, time\n{start}\nwhile not os.path.exists({str(pid_file)!r}): time.sleep(0.1)"
    )
    run.start()
    assert wait_until_ended(run).state == "done"
    assert process_ended(int(pid_file.read_text()))


def test_stop_without_saving_ends_a_long_save_timeout(make_run: MakeRun) -> None:
    run = make_run(SLEEPS)
    run.start(timeouts=StopTimeouts(save=600, discard=0.2, sigterm=5))
    wait_for(lambda: run.state == "running")
    run.stop()
    time.sleep(0.4)
    assert run.state == "stopping"
    run.stop(save=False)
    assert wait_until_ended(run).state == "stopped"


def test_stop_before_training_does_not_wait_for_a_checkpoint(make_run: MakeRun) -> None:
    run = make_run("import time; time.sleep(60)")
    run.start(timeouts=StopTimeouts(save=600, before_training=0.1))
    assert run.state == "starting"
    run.stop()
    assert wait_until_ended(run).state == "stopped"


def test_run_with_a_killed_supervisor_is_lost(make_run: MakeRun) -> None:
    run = make_run(SLEEPS)
    run.start()
    wait_for(lambda: run.state == "running")
    os.kill(process_id(run, "pid"), signal.SIGKILL)
    assert wait_until_ended(run).state == "lost" and "supervisor" in run.summary()["sentence"]
    assert run.can() == {"stop": False, "resume": True, "delete": True, "clean_up": True}
    with pytest.raises(RunError, match="cannot be stopped"):
        run.stop()
    assert run.clean_up() == 1
    assert not processes.run_processes(run.path) and run.state == "lost"


def test_resuming_a_lost_run_ends_its_old_launcher(make_run: MakeRun) -> None:
    run = make_run(STOPS_ON_REQUEST)
    run.start()
    old = process_id(run, "launcher")
    os.kill(process_id(run, "pid"), signal.SIGKILL)
    wait_until_ended(run).resume()
    assert process_ended(old) and process_id(run, "launcher") != old
    wait_for(lambda: run.state == "running")
    run.stop()
    assert wait_until_ended(run).state == "stopped"


def test_a_stop_while_resume_ends_the_old_ranks_is_not_lost(make_run: MakeRun) -> None:
    """They ignore SIGTERM, so that Resume takes seconds. Before, it deleted the request that another page had sent."""
    run = make_run(IGNORES_SIGTERM.replace("import signal", WRITE_PROGRESS + "import signal"))
    run.start()
    wait_for(lambda: "ignores SIGTERM" in (run.path / LOG).read_text())
    (run.path / STOP).write_text("save")  # of the start that is killed now
    old = process_id(run, "launcher")
    os.kill(process_id(run, "pid"), signal.SIGKILL)
    wait_until_ended(run)
    resuming = threading.Thread(target=run.resume)
    resuming.start()
    wait_for(lambda: processes.is_locked(run.path) and not (run.path / STOP).exists())
    assert not process_ended(old)
    run.stop()
    assert run.state == "stopping"
    resuming.join()
    assert wait_until_ended(run).state == "stopped"
    assert process_ended(old)
    assert "launcher" not in read_state(run), "nothing was launched"
    assert run.summary()["sentence"].endswith("There is no checkpoint, so the run would start again at step 0.")


def test_a_newer_stop_request_is_not_withdrawn(tmp_path: Path) -> None:
    (tmp_path / STOP).write_text("save")
    earlier = stop_requests.version(tmp_path)
    replace_text(tmp_path / STOP, "save")
    stop_requests.withdraw(tmp_path, earlier)
    stop_requests.withdraw(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == [STOP]
    stop_requests.withdraw(tmp_path, stop_requests.version(tmp_path))
    assert not list(tmp_path.iterdir())


def test_run_survives_the_process_and_terminal_that_started_it(make_run: MakeRun) -> None:
    run = make_run(STOPS_ON_REQUEST)
    starter = f"from pathlib import Path; from backend.runs.folder import Run; Run(Path({str(run.path)!r})).start()"
    home = Path(__file__).resolve().parent.parent.parent
    subprocess.run([sys.executable, "-c", starter], check=True, timeout=30, start_new_session=True, cwd=home)
    for number in (signal.SIGHUP, signal.SIGINT):
        os.kill(process_id(run, "pid"), number)
    wait_for(lambda: run.state == "running")
    time.sleep(0.3)
    assert run.state == "running"
    run.stop()
    assert wait_until_ended(run).state == "stopped"


def test_sigterm_to_the_supervisor_saves_a_checkpoint(make_run: MakeRun) -> None:
    run = make_run(STOPS_ON_REQUEST)
    run.start()
    wait_for(lambda: run.state == "running")
    os.kill(process_id(run, "pid"), signal.SIGTERM)
    assert wait_until_ended(run).state == "stopped" and "saved save" in (run.path / LOG).read_text()


def test_killed_launcher_leaves_no_child(make_run: MakeRun) -> None:
    run = make_run(STARTS_CHILD + SLEEPS)
    run.start()
    wait_for(lambda: run.state == "running")
    os.kill(process_id(run, "launcher"), signal.SIGKILL)
    assert wait_until_ended(run).state == "failed" and not processes.run_processes(run.path)
    assert "The launcher was killed (SIGKILL)" in failure_sentence(run)


def test_only_one_of_three_concurrent_starts_succeeds(make_run: MakeRun) -> None:
    run, errors = make_run(STOPS_ON_REQUEST), []

    def start() -> None:
        try:
            run.start()
        except RunError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == ["This run is already running."] * 2
    with pytest.raises(RunError, match="Stop it before"):
        run.resume()
    with pytest.raises(RunError, match="Stop it before"):
        run.delete()
    with pytest.raises(RunError, match="Stop it before you clean up"):
        run.clean_up()
    wait_for(lambda: run.state == "running")
    run.stop()
    assert wait_until_ended(run).state == "stopped"


def test_concurrent_lock_probes_do_not_block_a_start(make_run: MakeRun) -> None:
    run, finished = make_run("print('hello')"), threading.Event()
    (run.path / LOCK).touch()

    def probe() -> None:
        while not finished.is_set():
            processes.is_locked(run.path)

    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        run.start()
    finally:
        finished.set()
        for thread in threads:
            thread.join()
    assert wait_until_ended(run).state == "done"


def test_resume_appends_to_the_log_and_removes_the_stop_request(make_run: MakeRun) -> None:
    run = make_run("import os, sys; print('at', sys.argv[1:], os.path.exists('stop'), flush=True)\n" + STOPS_ON_REQUEST)
    before = None
    for from_scratch in (False, False, True):
        run.resume(from_scratch)
        wait_for(lambda: run.state == "running")
        run.stop()
        assert wait_until_ended(run).state == "stopped"
        found = run.summary()
        expected = before["ended"] - before["started"] if before and not from_scratch else None
        assert found["earlier_seconds"] == expected, "the duration is that of all starts since the first step"
        before = found
    log = (run.path / LOG).read_text()
    assert re.findall(r"at .*", log) == ["at [] False"] * 2 + ["at ['--from-scratch'] False"]
    assert log.count("---- started ") == 3


def test_finished_run_restarts_from_scratch_only_and_can_be_deleted(make_run: MakeRun) -> None:
    run = make_run("print('x')")
    run.start()
    wait_until_ended(run)
    with pytest.raises(RunError, match="finished"):
        run.resume()
    run.resume(from_scratch=True)
    wait_until_ended(run).delete()
    assert not list(run.path.parent.iterdir())


def start_run_sh(run: Run, env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [str(run.path / SCRIPT), *arguments]
    return subprocess.Popen(command, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_run_sh_from_a_clean_shell(make_run: MakeRun, clean_env: dict[str, str]) -> None:
    code = "import sys; print('given', sys.argv[1:], flush=True)\n" + STOPS_ON_REQUEST
    run = make_run(code + "\nopen('result.json', 'w').write('{}')", RUN_VARIABLE="dark red")
    (run.path / STOP).write_text("discard")  # from an earlier start
    with start_run_sh(run, clean_env, "--from-scratch") as started:
        wait_for(lambda: run.state == "running")
        with pytest.raises(RunError, match="already running"):
            run.start()
        with start_run_sh(run, clean_env) as second:
            assert "already running" in second.communicate(timeout=20)[0] and second.returncode == 75
        assert run.state == "running"
        assert len(processes.run_processes(run.path)) == 2, "the launcher and tee"
        run.stop()
        output = started.communicate(timeout=20)[0]
    assert started.returncode == 0 and "given ['--from-scratch']" in output
    assert (run.path / LOG).read_text() == output
    assert run.state == "done"
    summary = run.summary()
    assert summary["started"] <= summary["ended"]


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (STOPS_ON_REQUEST, "stopped"),
        pytest.param(WRITE_PROGRESS + "raise SystemExit(3)", "failed", marks=pytest.mark.soak),
    ],
)
def test_run_sh_sets_the_final_state(make_run: MakeRun, clean_env: dict[str, str], code: str, state: str) -> None:
    run = make_run(code)
    (run.path / RESULT).write_text("{}")  # from an earlier start
    with start_run_sh(run, clean_env) as started:
        if state == "stopped":
            wait_for(lambda: run.state == "running")
            run.stop()
        started.communicate(timeout=20)
    assert run.state == state
    run.resume()  # now with the supervisor
    if state == "stopped":
        wait_for(lambda: run.state == "running")
        run.stop()
    assert wait_until_ended(run).state == state


def test_clean_up_after_a_killed_run_sh(make_run: MakeRun, clean_env: dict[str, str]) -> None:
    run = make_run(STARTS_CHILD + SLEEPS)
    with start_run_sh(run, clean_env) as started:
        wait_for(lambda: run.state == "running")
        started.kill()
        wait_for(lambda: run.state == "failed")
        assert run.can()["clean_up"] and run.clean_up() >= 1


SUPERVISOR_WITHOUT_DISK_SPACE = """
import os, resource, sys
from pathlib import Path
from backend.runs.supervisor import StopTimeouts, Supervisor
supervisor = Supervisor(Path(sys.argv[1]), False, StopTimeouts(), lock=-1)
supervisor.announce()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
supervisor.run()
"""


def test_full_disk_does_not_end_the_training(make_run: MakeRun) -> None:
    """A file size limit of 0 for the supervisor; the launcher, which inherits the limit, removes it. The process that
    writes the log has it until the end of the run."""
    remove_limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
    own_pid = "import os; open('launcher.pid', 'w').write(str(os.getpid()))\n"
    run = make_run(remove_limit + own_pid + STOPS_ON_REQUEST)
    home = Path(__file__).resolve().parent.parent.parent
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR_WITHOUT_DISK_SPACE, str(run.path)], cwd=home) as supervisor:
        wait_for(lambda: (run.path / "progress.json").exists())
        time.sleep(0.3)
        assert "launcher" not in read_state(run)
        (run.path / STOP).write_text("save")
        wait_for(lambda: process_ended(int((run.path / "launcher.pid").read_text())))
        assert "saved" not in (run.path / LOG).read_text()
        (writer,) = log_writers(run)
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert supervisor.wait(20) == 0
    assert "saved save" in (run.path / LOG).read_text()
    assert not processes.run_processes(run.path)


TWO_RANKS = """
import json, os, time
rank = os.environ["RANK"]
print("hello from", rank, flush=True)
open(f"rank{rank}.new", "w").write(str(os.getpid()))
os.rename(f"rank{rank}.new", f"rank{rank}.pid")
while not (os.path.exists("rank0.pid") and os.path.exists("rank1.pid")):
    time.sleep(0.02)
if rank == "0":
    open("progress.json", "w").write(json.dumps({"phase": "training", "step": 3}))
time.sleep(600)
"""


@pytest.fixture
def torchrun(make_run: MakeRun) -> Run:
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=ranks", "--tee=3")
    return make_run(TWO_RANKS, *arguments, OMP_NUM_THREADS="1")


def test_killed_torchrun_rank_is_reported(torchrun: Run) -> None:
    torchrun.start()
    wait_for(lambda: torchrun.state == "running", 90)
    assert len(processes.run_processes(torchrun.path)) == 3
    os.kill(int((torchrun.path / "rank1.pid").read_text()), signal.SIGKILL)
    assert wait_until_ended(torchrun, 60).state == "failed"
    failure = torchrun.failure()
    assert failure and "Rank 1 was killed (SIGKILL)" in failure["sentence"] and failure["rank"] == 1
    logs = torchrun.rank_logs()
    assert list(logs) == [0, 1] and "hello from 1" in logs[1][0].read_text()


def test_killed_torchrun_leaves_no_rank(torchrun: Run) -> None:
    torchrun.start()
    wait_for(lambda: torchrun.state == "running", 90)
    os.kill(process_id(torchrun, "launcher"), signal.SIGKILL)
    assert wait_until_ended(torchrun, 60).state == "failed" and not processes.run_processes(torchrun.path)


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted in `server.posted`."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, json.loads(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.posted = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("code", "state"), [("pass", "done"), ("raise SystemExit('CUDA error')", "failed")])
def test_webhook_is_told_how_a_run_ended(
    make_run: MakeRun, receiver: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, code: str, state: str
) -> None:
    secret = f"http://127.0.0.1:{receiver.server_port}/services/T0/B0/secret"
    monkeypatch.setenv(webhook.WEBHOOK, secret)
    run = make_run(f"import os\nassert {webhook.WEBHOOK!r} not in os.environ\n{code}")
    run.start()
    wait_for(lambda: receiver.posted)  # type: ignore[attr-defined]
    assert not processes.is_locked(run.path), "the run has ended before"
    [(path, content)] = receiver.posted  # type: ignore[attr-defined]
    assert path == "/services/T0/B0/secret"
    assert (content["id"], content["state"]) == (run.id, state)
    assert content["text"] == content["content"] == f"Footplate: {run.name}. {run.summary()['sentence']}"
    wait_for(lambda: not processes.run_processes(run.path))
    assert not [p for p in run.path.rglob("*") if p.is_file() and "secret" in p.read_text(errors="replace")]


RISE = {"kind": "loss rise", "step": 9, "text": "The loss rose from 3 to 90. Lower the learning rate.", "time": 0}


def test_a_run_that_ended_with_a_high_loss_is_marked(
    make_run: MakeRun, receiver: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays done; list, search, page and webhook say what happened."""
    monkeypatch.setenv(webhook.WEBHOOK, f"http://127.0.0.1:{receiver.server_port}/")
    run = make_run(f"open('events.jsonl', 'a').write({json.dumps(json.dumps(RISE))} + chr(10))")
    run.start()
    wait_for(lambda: [c for _, c in receiver.posted if c["state"] == "done"])  # type: ignore[attr-defined]
    content = [c for _, c in receiver.posted if c["state"] == "done"][-1]  # type: ignore[attr-defined]
    assert content["mark"] == "Loss rose" and "The loss rose from 3 to 90." in content["text"]
    found = listing.row(run)
    assert (found["state"], found["mark"]) == ("done", "Loss rose")
    assert search.parse("mark:rose").matches(found, 0) and not search.parse("mark:lost").matches(found, 0)
    wait_for(lambda: not processes.run_processes(run.path))


ALERTS = """
def event(kind, step, text):
    with open('events.jsonl', 'a') as file:
        file.write(json.dumps({'kind': kind, 'step': step, 'time': 0, 'text': text}) + chr(10))
event('saved', 10, 'Saved checkpoint-10.')
event('loss spike', 12, 'The loss rose to 9.')
while not os.path.exists('stop'): time.sleep(0.02)
event('disk', 13, 'too late for the webhook')
"""


def test_webhook_is_told_alerts_while_a_run_trains(
    make_run: MakeRun, receiver: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(webhook.WEBHOOK, f"http://127.0.0.1:{receiver.server_port}/")
    run = make_run(WRITE_PROGRESS + ALERTS)
    (run.path / EVENTS).write_text('{"kind": "disk", "step": 3, "text": "of an earlier start"}\n')
    run.start()
    wait_for(lambda: receiver.posted, seconds=30)  # type: ignore[attr-defined]
    run.stop()
    wait_until_ended(run)
    wait_for(lambda: len(receiver.posted) == 2)  # type: ignore[attr-defined]
    texts = [content["text"] for _, content in receiver.posted]  # type: ignore[attr-defined]
    assert texts == [
        f"Footplate: {run.name}. Step 12: The loss rose to 9.",
        f"Footplate: {run.name}. {run.summary()['sentence']}",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/secret",
        "http://[secret",
        *(
            pytest.param(url, marks=pytest.mark.soak)
            for url in (
                "file:///etc/passwd",
                "nonsense",
                "http://127.0.0.1:1/a secret",
                "http://127.0.0.1:port/secret",
            )
        ),
    ],
)
def test_webhook_that_cannot_be_reached_is_in_the_log(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv(webhook.WEBHOOK, url)
    run = make_run("pass")
    run.start()
    wait_for(lambda: "FOOTPLATE_WEBHOOK: the notification was not sent: " in (run.path / LOG).read_text())
    assert run.state == "done"
    log = (run.path / LOG).read_text()
    assert url not in log and "secret" not in log
    is_valid = url.startswith("http://127.0.0.1:1/secret")
    assert ("FOOTPLATE_WEBHOOK is not a URL that notifications can be posted to: " in log) is not is_valid


@pytest.mark.parametrize(("code", "runs"), [("pass", False), ("raise SystemExit(1)", True)])
def test_command_for_runs_that_failed(make_run: MakeRun, code: str, runs: bool) -> None:
    """It runs in the run's folder once lock and devices are free, and the log has its output."""
    run = make_run(code)
    says = "import fcntl; fcntl.flock(open('lock'), fcntl.LOCK_EX | fcntl.LOCK_NB); print('followed', 'up')"
    kept = json.loads((run.path / PLAN).read_text())
    (run.path / PLAN).write_text(json.dumps({**kept, "then": [sys.executable, "-c", says]}))
    run.start()
    wait_until_ended(run)
    if runs:
        wait_for(lambda: "followed up" in (run.path / LOG).read_text())
    wait_for(lambda: not processes.run_processes(run.path))
    assert ("followed up" in (run.path / LOG).read_text()) == runs


SAVES_SLOWLY = (
    WRITE_PROGRESS + "os.utime('progress.json', (1, 1))\n"
    "while not os.path.exists('stop'): time.sleep(0.02)\ntime.sleep(0.6)\nprint('saved')"
)


def test_a_clock_that_was_set_back_does_not_discard_work(make_run: MakeRun) -> None:
    """All files of this start are older than the start itself."""
    run = make_run(SAVES_SLOWLY)
    run.start(timeouts=StopTimeouts(save=20, before_training=0.1))
    wait_for(lambda: run.state == "running")
    run.stop()
    assert wait_until_ended(run).state == "stopped"
    assert "saved" in (run.path / LOG).read_text()
    assert "forced" not in read_state(run)


def test_a_file_of_the_future_belongs_to_an_earlier_start(make_run: MakeRun) -> None:
    run = make_run("raise SystemExit(1)")
    (run.path / RESULT).write_text('{"steps": 3}')
    later = time.time() + 3600
    os.utime(run.path / RESULT, (later, later))
    run.start()
    assert wait_until_ended(run).state == "failed" and not run.result()


@pytest.mark.parametrize("save", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_run_stops_on_a_full_disk(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, save: bool) -> None:
    """The request cannot be written; an empty file still can."""
    run = make_run(STOPS_ON_REQUEST if save else SLEEPS)
    run.start()
    wait_for(lambda: run.state == "running")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "replace_text", full)
    run.stop(save)
    assert wait_until_ended(run, 90).state == "stopped"  # the program has 15 seconds for the request
    assert ("saved" in (run.path / LOG).read_text()) == save


def test_a_run_without_a_lock_file_is_not_ready_to_start(make_run: MakeRun) -> None:
    run = make_run("raise SystemExit(1)")
    run.start()
    wait_until_ended(run)
    (run.path / LOCK).unlink()
    assert run.state == "failed"


def test_a_stop_says_until_when_it_waits(make_run: MakeRun) -> None:
    """A hung rank does not see the request; stopping without a checkpoint is quicker."""
    run = make_run(SLEEPS)
    run.start(timeouts=StopTimeouts(save=600, discard=0.1))
    wait_for(lambda: run.state == "running")
    run.stop()
    wait_for(lambda: "stop_deadline" in read_state(run))
    assert 590 < float(str(read_state(run)["stop_deadline"])) - time.time() <= 600
    assert re.search(r"until \d\d:\d\d:\d\d; .* stop without saving", run.summary()["sentence"])
    run.stop(save=False)
    assert wait_until_ended(run, 5).state == "stopped"


def test_a_stop_waits_as_long_as_the_plan_says(make_run: MakeRun) -> None:
    run = make_run(SLEEPS)
    kept = json.loads((run.path / PLAN).read_text())
    (run.path / PLAN).write_text(json.dumps({**kept, "stop_timeout": 0.3}))
    run.start()
    wait_for(lambda: run.state == "running")
    run.stop()
    assert wait_until_ended(run, 5).state == "stopped" and read_state(run)["forced"] == "SIGTERM"


def test_a_suspended_supervisor_is_named_and_continued(make_run: MakeRun) -> None:
    """It cannot end the run; before, the run was shown as stopping forever."""
    run = make_run(STOPS_ON_REQUEST)
    run.start()
    wait_for(lambda: run.state == "running")
    supervisor = process_id(run, "pid")
    os.kill(supervisor, signal.SIGSTOP)
    wait_for(lambda: processes.condition(supervisor) == "T")
    (run.path / STOP).write_text("save")
    wait_for(lambda: not processes.run_processes(run.path))
    assert run.state == "stopping"
    assert re.search(rf"PID {supervisor}\) is stopped by a signal.*kill -CONT {supervisor}", run.summary()["sentence"])
    run.stop()
    assert wait_until_ended(run).state == "stopped"


def test_a_lock_file_that_is_deleted_while_the_run_is_alive(make_run: MakeRun) -> None:
    """Before, the run was shown as lost and could be started a second time."""
    run = make_run(STOPS_ON_REQUEST)
    run.start()
    wait_for(lambda: run.state == "running")
    started = run.summary()["started"]
    (run.path / LOCK).unlink()
    wait_for(lambda: run.state == "running", 2)
    assert abs(run.summary()["started"] - started) < 1
    with pytest.raises(RunError, match="still running"):
        run.resume()
    run.stop()
    assert wait_until_ended(run).state == "stopped"


def test_a_run_that_is_renamed_while_it_is_alive(make_run: MakeRun) -> None:
    """It continues under its new name. Before, a stop was accepted and never seen, and files went to the old folder."""
    run = make_run(WRITES_UNTIL_STOPPED)
    run.start()
    wait_for(lambda: run.state == "running")
    renamed = Run(run.path.rename(run.path.with_name("other")))
    before = (renamed.path / "progress.json").stat().st_mtime_ns
    wait_for(lambda: (renamed.path / "progress.json").stat().st_mtime_ns > before)
    assert renamed.state == "running"
    assert renamed.summary()["sentence"] == "Running: step 3."
    wait_for(lambda: f"The run's folder is now {renamed.path}." in (renamed.path / LOG).read_text())
    renamed.stop()
    assert wait_until_ended(renamed).state == "stopped"
    assert "saved" in (renamed.path / LOG).read_text()
    assert not run.path.exists(), "the old folder is not created again"
    assert "forced" not in read_state(renamed)
    assert not processes.run_processes(renamed.path)


@pytest.mark.parametrize("how", ["--move", pytest.param("--bind", marks=pytest.mark.soak)])
def test_a_run_on_a_mount_that_is_moved_while_it_is_alive(make_run: MakeRun, tmp_path: Path, how: str) -> None:
    """It continues at the new place, and at a second one too; the processes are in the mount that they started in."""
    place = tmp_path / "mounts"
    place.mkdir()
    with movable(place) as first:
        (tmp_path / "runs").symlink_to(first)
        run = make_run(WRITES_UNTIL_STOPPED)
        run.start()
        wait_for(lambda: run.state == "running")
        (place / "second").mkdir()
        subprocess.run(["mount", how, first, place / "second"], check=True)
        moved = Run(place / "second" / run.path.name)
        before = (moved.path / "progress.json").stat().st_mtime_ns
        wait_for(lambda: (moved.path / "progress.json").stat().st_mtime_ns > before)
        assert moved.state == "running" and moved.can()["stop"] and not moved.can()["clean_up"]
        if how == "--move":
            wait_for(lambda: f"The run's folder is now {moved.path}." in (moved.path / LOG).read_text())
            assert not list(first.iterdir()), "the old folder is not created again"
        moved.stop()
        assert wait_until_ended(moved).state == "stopped"
        assert "saved" in (moved.path / LOG).read_text() and "forced" not in read_state(moved)
        assert not processes.run_processes(moved.path)


def test_a_renamed_run_with_a_killed_supervisor_is_cleaned_up(make_run: MakeRun) -> None:
    """Its processes have the old path in their environment."""
    run = make_run(SLEEPS)
    run.start()
    wait_for(lambda: run.state == "running")
    launcher = process_id(run, "launcher")
    copy = Run(Path(shutil.copytree(run.path, run.path.with_name("copy"))))
    renamed = Run(run.path.rename(run.path.with_name("other")))
    os.kill(process_id(renamed, "pid"), signal.SIGKILL)
    assert wait_until_ended(renamed).state == "lost"
    assert renamed.can()["clean_up"]
    assert not copy.can()["clean_up"], "the processes belong to the folder in which they work"
    copy.delete()
    assert not process_ended(launcher)
    assert renamed.clean_up() == 1
    assert process_ended(launcher)


def test_a_run_whose_folder_is_deleted_ends(make_run: MakeRun) -> None:
    """Nobody could see or stop it any more, and it does not create the folder again."""
    run = make_run(SLEEPS)
    run.start()
    wait_for(lambda: run.state == "running")
    supervisor, launcher = process_id(run, "pid"), process_id(run, "launcher")
    away = run.path.with_name("away")
    run.path.rename(away)  # deleting file by file would race with the files that the run replaces
    shutil.rmtree(away)
    wait_for(lambda: process_ended(launcher) and process_ended(supervisor))
    assert not run.path.exists()
    assert not away.exists()
