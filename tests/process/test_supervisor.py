"""A run from start to end, with real processes. `make_run` proves after each test that none is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.runs import LOCK, LOG, RESULT, SCRIPT, STATE, STOP, processes
from backend.runs.folder import Run, RunError
from backend.runs.supervisor import StopTimeouts

pytestmark = pytest.mark.alone

MakeRun = Callable[..., Run]
QUICK = StopTimeouts(save=0.4, discard=0.2, sigterm=0.4, before_training=0.3)
SAY = "import json, os, time\nopen('progress.json', 'w').write(json.dumps({'phase': 'training', 'step': 3}))\n"
GENTLE = SAY + "while not os.path.exists('stop'): time.sleep(0.02)\nprint('saved', open('stop').read())"
SLEEP = SAY + "time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
STUBBORN = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True)
"""
WORKER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


def wait_for(what: Callable[[], object], seconds: float = 20.0) -> None:
    """Until `what()` is true; fails the test after `seconds`."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def ended(run: Run, seconds: float = 20.0) -> Run:
    wait_for(lambda: not processes.is_locked(run.path), seconds)
    return run


def kept(run: Run) -> dict[str, object]:
    return dict(json.loads((run.path / STATE).read_text()))


def pid(run: Run, whose: str) -> int:
    """`whose`: pid (the supervisor's), or launcher."""
    wait_for(lambda: kept(run).get(whose))
    return int(str(kept(run)[whose]))


def gone(number: int) -> bool:
    return processes._status(number) is None


def sentence(run: Run) -> str:
    failure = run.failure()
    assert failure
    return str(failure["sentence"])


def test_ends_with_0(make_run: MakeRun) -> None:
    run = make_run("import os, sys; print(os.getcwd(), os.environ['COLOUR'], sys.argv[1:])", COLOUR="red")
    assert run.state == "new" and run.summary()["sentence"] == "Ready to start."
    run.start()
    assert ended(run).state == "done"
    assert f"{run.path} red []" in (run.path / LOG).read_text()
    assert run.failure() is None and run.can() == {"stop": False, "resume": False, "delete": True, "clean_up": False}


def test_fails_with_7(make_run: MakeRun) -> None:
    run = make_run(
        "import os; assert os.environ['TORCHELASTIC_ERROR_FILE'].endswith('/error.json'); raise SystemExit(7)"
    )
    run.start()
    assert ended(run).state == "failed" and "exited with code 7" in sentence(run)


def test_a_launcher_that_is_not_there(make_run: MakeRun) -> None:
    run = make_run("", python="/no/such/python")
    run.start()
    assert ended(run).state == "failed" and "/no/such/python cannot be started" in sentence(run)


@pytest.mark.parametrize("save", [True, False])
def test_stops_gently(make_run: MakeRun, save: bool) -> None:
    run = make_run(GENTLE)
    run.start()
    wait_for(lambda: run.state == "running")
    run.stop(save)
    assert ended(run).state == "stopped"
    assert ("saved save" if save else "saved discard") in (run.path / LOG).read_text()
    assert "forced" not in kept(run) and run.failure() is None


def test_a_stop_that_came_too_late_does_not_undo_the_end(make_run: MakeRun) -> None:
    run = make_run(GENTLE + "\nopen('result.json', 'w').write('{}')")
    run.start()
    wait_for(lambda: run.state == "running")
    run.stop()
    assert ended(run).state == "done"


def test_a_deaf_launcher_and_a_grandchild_in_its_own_session(make_run: MakeRun) -> None:
    run = make_run(STUBBORN + SLEEP)
    run.start(timeouts=QUICK)
    wait_for(lambda: "deaf" in (run.path / LOG).read_text() and run.state == "running")
    assert len(processes.run_processes(run.path)) == 2
    run.stop()
    assert run.state == "stopping" and "Stopping" in run.summary()["sentence"]
    assert ended(run).state == "stopped" and kept(run)["forced"] == "SIGKILL"
    assert not processes.run_processes(run.path)


def test_a_grandchild_that_lost_the_cookie_is_swept_too(make_run: MakeRun, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {program!r}], env={{}}, start_new_session=True)"
    run = make_run(
        f"import os, subprocess, sys, time\n{start}\nwhile not os.path.exists({str(note)!r}): time.sleep(0.1)"
    )
    run.start()
    assert ended(run).state == "done"
    assert gone(int(note.read_text()))


def test_stop_without_saving_cuts_a_long_grace_short(make_run: MakeRun) -> None:
    run = make_run(SLEEP)
    run.start(timeouts=StopTimeouts(save=600, discard=0.2, sigterm=5))
    wait_for(lambda: run.state == "running")
    run.stop()
    time.sleep(0.4)
    assert run.state == "stopping"
    run.stop(save=False)
    assert ended(run).state == "stopped"


def test_stop_before_there_is_anything_to_save_does_not_wait(make_run: MakeRun) -> None:
    run = make_run("import time; time.sleep(60)")
    run.start(timeouts=StopTimeouts(save=600, before_training=0.1))
    assert run.state == "starting"
    run.stop()
    assert ended(run).state == "stopped"


def test_a_killed_supervisor_is_lost_until_cleaned_up(make_run: MakeRun) -> None:
    run = make_run(SLEEP)
    run.start()
    wait_for(lambda: run.state == "running")
    os.kill(pid(run, "pid"), signal.SIGKILL)
    assert ended(run).state == "lost" and "supervisor" in run.summary()["sentence"]
    assert run.can() == {"stop": False, "resume": True, "delete": True, "clean_up": True}
    with pytest.raises(RunError, match="cannot be stopped"):
        run.stop()
    assert run.clean_up() == 1
    assert not processes.run_processes(run.path) and run.state == "lost"


def test_a_lost_run_resumes_and_the_old_launcher_is_gone(make_run: MakeRun) -> None:
    run = make_run(GENTLE)
    run.start()
    old = pid(run, "launcher")
    os.kill(pid(run, "pid"), signal.SIGKILL)
    ended(run).resume()
    assert gone(old) and pid(run, "launcher") != old
    wait_for(lambda: run.state == "running")
    run.stop()
    assert ended(run).state == "stopped"


def test_the_starter_may_go_and_its_terminal_with_it(make_run: MakeRun) -> None:
    run = make_run(GENTLE)
    starter = f"from pathlib import Path; from backend.runs.folder import Run; Run(Path({str(run.path)!r})).start()"
    home = Path(__file__).resolve().parent.parent.parent
    subprocess.run([sys.executable, "-c", starter], check=True, timeout=30, start_new_session=True, cwd=home)
    for number in (signal.SIGHUP, signal.SIGINT):
        os.kill(pid(run, "pid"), number)
    wait_for(lambda: run.state == "running")
    time.sleep(0.3)
    assert run.state == "running"
    run.stop()
    assert ended(run).state == "stopped"


def test_sigterm_to_the_supervisor_saves(make_run: MakeRun) -> None:
    run = make_run(GENTLE)
    run.start()
    wait_for(lambda: run.state == "running")
    os.kill(pid(run, "pid"), signal.SIGTERM)
    assert ended(run).state == "stopped" and "saved save" in (run.path / LOG).read_text()


def test_launcher_killed_leaves_no_worker(make_run: MakeRun) -> None:
    run = make_run(WORKER + SLEEP)
    run.start()
    wait_for(lambda: run.state == "running")
    os.kill(pid(run, "launcher"), signal.SIGKILL)
    assert ended(run).state == "failed" and not processes.run_processes(run.path)
    assert "The launcher was killed (SIGKILL)" in sentence(run)


def test_three_starts_at_once_one_wins(make_run: MakeRun) -> None:
    run, refused = make_run(GENTLE), []

    def start() -> None:
        try:
            run.start()
        except RunError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["This run is already running."] * 2
    with pytest.raises(RunError, match="Stop it before"):
        run.resume()
    with pytest.raises(RunError, match="Stop it before"):
        run.delete()
    with pytest.raises(RunError, match="Stop it before you clean up"):
        run.clean_up()
    wait_for(lambda: run.state == "running")
    run.stop()
    assert ended(run).state == "stopped"


def test_readers_that_probe_all_the_time_do_not_keep_a_run_from_starting(make_run: MakeRun) -> None:
    run, over = make_run("print('hello')"), threading.Event()
    (run.path / LOCK).touch()

    def probe() -> None:
        while not over.is_set():
            processes.is_locked(run.path)

    threads = [threading.Thread(target=probe) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        run.start()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert ended(run).state == "done"


def test_resume_appends_and_forgets_the_stop(make_run: MakeRun) -> None:
    run = make_run("import os, sys; print('at', sys.argv[1:], os.path.exists('stop'), flush=True)\n" + GENTLE)
    for from_scratch in (False, False, True):
        run.resume(from_scratch)
        wait_for(lambda: run.state == "running")
        run.stop()
        assert ended(run).state == "stopped"
    log = (run.path / LOG).read_text()
    assert re.findall(r"at .*", log) == ["at [] False"] * 2 + ["at ['--from-scratch'] False"]
    assert log.count("---- started ") == 3


def test_a_finished_run_does_not_resume_but_begins_from_scratch_and_is_deleted(make_run: MakeRun) -> None:
    run = make_run("print('x')")
    run.start()
    ended(run)
    with pytest.raises(RunError, match="finished"):
        run.resume()
    run.resume(from_scratch=True)
    ended(run).delete()
    assert not list(run.path.parent.iterdir())


def shell(run: Run, env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [str(run.path / SCRIPT), *arguments]
    return subprocess.Popen(command, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_run_sh_from_a_clean_shell(make_run: MakeRun, clean_env: dict[str, str]) -> None:
    code = "import sys; print('given', sys.argv[1:], flush=True)\n" + GENTLE
    run = make_run(code + "\nopen('result.json', 'w').write('{}')", COLOUR="dark red")
    (run.path / STOP).write_text("discard")  # of an earlier start
    with shell(run, clean_env, "--from-scratch") as started:
        wait_for(lambda: run.state == "running")
        with pytest.raises(RunError, match="already running"):
            run.start()
        with shell(run, clean_env) as second:
            assert "already running" in second.communicate(timeout=20)[0] and second.returncode == 75
        assert run.state == "running"
        assert len(processes.run_processes(run.path)) == 2, "the program, and tee"
        run.stop()
        output = started.communicate(timeout=20)[0]
    assert started.returncode == 0 and "given ['--from-scratch']" in output
    assert (run.path / LOG).read_text() == output
    assert run.state == "done"
    summary = run.summary()
    assert summary["started"] <= summary["ended"]


@pytest.mark.parametrize(("code", "state"), [(GENTLE, "stopped"), (SAY + "raise SystemExit(3)", "failed")])
def test_run_sh_that_ends_otherwise_is_not_lost(
    make_run: MakeRun, clean_env: dict[str, str], code: str, state: str
) -> None:
    run = make_run(code)
    (run.path / RESULT).write_text("{}")  # of an earlier start
    with shell(run, clean_env) as started:
        if state == "stopped":
            wait_for(lambda: run.state == "running")
            run.stop()
        started.communicate(timeout=20)
    assert run.state == state
    run.resume()  # and the supervisor takes it over
    if state == "stopped":
        wait_for(lambda: run.state == "running")
        run.stop()
    assert ended(run).state == state


def test_run_sh_killed_is_swept(make_run: MakeRun, clean_env: dict[str, str]) -> None:
    run = make_run(WORKER + SLEEP)
    with shell(run, clean_env) as started:
        wait_for(lambda: run.state == "running")
        started.kill()
        wait_for(lambda: run.state == "failed")
        assert run.can()["clean_up"] and run.clean_up() >= 1


FULL_DISK = """
import os, resource, sys
from pathlib import Path
from backend.runs.supervisor import StopTimeouts, Supervisor
supervisor = Supervisor(Path(sys.argv[1]), False, StopTimeouts())
supervisor.announce()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
supervisor.run()
"""


def test_a_full_disk_does_not_end_the_training(make_run: MakeRun) -> None:
    """The supervisor itself may write no byte to any file; its child, which inherits that, lifts it."""
    lift = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
    run = make_run(lift + GENTLE)
    home = Path(__file__).resolve().parent.parent.parent
    with subprocess.Popen([sys.executable, "-c", FULL_DISK, str(run.path)], cwd=home) as supervisor:
        wait_for(lambda: (run.path / "progress.json").exists())
        time.sleep(0.3)
        assert "launcher" not in kept(run)
        (run.path / STOP).write_text("save")
        assert supervisor.wait(20) == 0
    assert "saved save" in (run.path / LOG).read_text()
    assert not processes.run_processes(run.path)


TORCH = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    open("rank1.pid", "w").write(str(os.getpid()))
print("hello from", os.environ["RANK"], flush=True)
dist.barrier()
open("progress.json", "w").write(json.dumps({"phase": "training", "step": 3}))
dist.recv(torch.zeros(1))
"""


@pytest.fixture
def torchrun(make_run: MakeRun) -> Run:
    arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=ranks", "--tee=3")
    return make_run(TORCH, *arguments, OMP_NUM_THREADS="1")


def test_a_rank_of_torchrun_killed_is_named(torchrun: Run) -> None:
    torchrun.start()
    wait_for(lambda: torchrun.state == "running", 90)
    assert len(processes.run_processes(torchrun.path)) == 3
    os.kill(int((torchrun.path / "rank1.pid").read_text()), signal.SIGKILL)
    assert ended(torchrun, 60).state == "failed"
    failure = torchrun.failure()
    assert failure and "Rank 1 was killed (SIGKILL)" in failure["sentence"] and failure["rank"] == 1
    logs = torchrun.rank_logs()
    assert list(logs) == [0, 1] and "hello from 1" in logs[1][0].read_text()


def test_torchrun_killed_leaves_no_rank(torchrun: Run) -> None:
    torchrun.start()
    wait_for(lambda: torchrun.state == "running", 90)
    os.kill(pid(torchrun, "launcher"), signal.SIGKILL)
    assert ended(torchrun, 60).state == "failed" and not processes.run_processes(torchrun.path)
