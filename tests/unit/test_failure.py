"""Why a run failed, from what torchrun and Python leave behind. REPORT and TRACE are output of torch 2.13."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from backend.runs import LOG, PLAN
from backend.runs.failure import DISK, KNOWN_FAILURES, LAUNCHER, Failure, diagnose

REPORT = """\
W1121 11:31:26 6940 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 6945 closing signal SIGTERM
E1121 11:31:26 6940 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1
Traceback (most recent call last):
  File "/lib/python3.11/site-packages/torch/distributed/run.py", line 1032, in <module>
    main()
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
backend.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_11:31:26
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6945)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 6945
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_11:31:25
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 6946)
  error_file: <N/A>
  traceback : {said}
============================================================
"""
TRACE = """\
[default0]:[rank0]: Traceback (most recent call last):
[default1]:[rank1]: Traceback (most recent call last):
[default1]:[rank1]:   File "a.py", line 11, in load
[default0]:[rank0]:   File "b.py", line 1, in wait
[default1]:[rank1]: KeyError: 'text'
[default0]:[rank0]: RuntimeError: Connection closed by peer
[default1]:[rank1]: \x20
[default1]:[rank1]: During handling of the above exception, another exception occurred:
[default1]:[rank1]: \x20
[default1]:[rank1]: Traceback (most recent call last):
[default1]:[rank1]:   File "a.py", line 12, in load
[default1]:[rank1]: ValueError: row 7 cannot be used
[default1]: said later
"""
PEER = "Traceback (most recent call last):\nRuntimeError: Connection closed by peer [127.0.0.1]:3"


def diagnose_log(folder: Path, log: str, **state: Any) -> Failure:
    (folder / LOG).write_text(log)
    return diagnose(folder, 0, {"exit_code": 1, **state})


def write_error_file(folder: Path, rank: int, traceback: str, when: int, attempt: int = 0) -> None:
    path = folder / f"ranks/id_x/attempt_{attempt}/{rank}/error.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"message": {"message": "m", "extraInfo": {"py_callstack": traceback}}}))
    os.utime(path, ns=(when, when))


def test_a_failure_after_a_stop_that_the_run_requested_itself_is_not_the_launchers(tmp_path: Path) -> None:
    """The checkpoint of the stop fails: `cause` is the text of the stop file."""
    log = "Traceback (most recent call last):\nOSError: [Errno 28] No space left on device"
    failure = diagnose_log(tmp_path, log, cause="The loss rose to 9.1.", end="stopped")
    assert failure.kind == DISK and "disk is full" in failure.sentence and failure.traceback == log


def test_the_root_cause_is_found_in_the_interleaved_log_of_ranks(tmp_path: Path) -> None:
    failure = diagnose_log(tmp_path, TRACE + REPORT.format(code=1, said="x"))
    assert failure.rank == 1 and failure.sentence == "Rank 1 failed with ValueError: row 7 cannot be used"
    assert failure.traceback.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "a.py", line 11, in load',
        "KeyError: 'text'",
    ]
    assert failure.traceback.endswith("ValueError: row 7 cannot be used")


def test_the_first_error_file_of_this_start_counts(tmp_path: Path) -> None:
    write_error_file(tmp_path, 0, PEER, when=300)
    write_error_file(tmp_path, 1, "Traceback (most recent call last):\nZeroDivisionError: division by zero", when=200)
    write_error_file(tmp_path, 3, "Traceback (most recent call last):\nKeyError: 'old'", when=100)
    (tmp_path / LOG).write_text(REPORT.format(code=1, said="x"))
    failure = diagnose(tmp_path, 150, {"exit_code": 1})
    assert failure.rank == 1 and "ZeroDivisionError" in failure.sentence


def test_one_process_without_torchrun(tmp_path: Path) -> None:
    write_error_file(
        tmp_path, 0, "Traceback (most recent call last):\nbackend.train.run_log.TrainError: Row 7 is empty.", when=5
    )
    (tmp_path / "ranks/id_x/attempt_0/0/error.json").rename(tmp_path / "error.json")
    failure = diagnose_log(tmp_path, "Row 7 is empty.\n")
    assert failure.rank is None and failure.sentence == "Row 7 is empty." and "TrainError" in failure.traceback


def test_a_job_that_ran_another_program(tmp_path: Path) -> None:
    """The program's traceback is in the log before the sentence of the job."""
    said = "Traceback (most recent call last):\n  File x\nNotImplementedError: not recognized\n\n"
    failure = diagnose_log(tmp_path, f"{said}backend.train.run_log.TrainError: It cannot be converted.\n")
    assert (failure.sentence, failure.rank) == ("It cannot be converted.", None)


def test_a_killed_rank_comes_before_ranks_that_lost_the_connection(tmp_path: Path) -> None:
    write_error_file(tmp_path, 0, PEER, when=300)
    report = REPORT.format(code=-9, said="Signal 9 (SIGKILL) received by PID 6946")
    failure = diagnose_log(tmp_path, report)
    assert failure.rank == 1 and "Rank 1 was killed (SIGKILL) by a user" in failure.sentence
    assert "ran out of CPU memory" in diagnose_log(tmp_path, report, oom_kills=1).sentence
    assert "train.per_device_train_batch_size" in failure.help


def test_jobs_are_given_no_advice_about_trainings(tmp_path: Path) -> None:
    """A job has no launcher, no options and no checkpoints."""
    (tmp_path / PLAN).write_text(json.dumps({"about": {"kind": "merge"}}))
    for log, state, sentence, help in (
        ("", {"exit_code": -9}, "The process was killed (SIGKILL) by a user", "If CPU memory (RAM) was short: Stop "),
        ("", {"exit_code": -9, "oom_kills": 1}, "because the machine ran out of CPU memory", "Stop other programs, or"),
        ("", {"exit_code": -15}, "The process was terminated by SIGTERM.", "Try again."),
        ("OSError: No space left on device", {}, "The disk is full", "Free disk space, then try again."),
        ("torch.OutOfMemoryError: CUDA out of memory", {}, "The device ran out of memory", "Stop other programs that"),
        ("Traceback (most recent call last):\nKeyError: 'a'", {}, "The process failed with KeyError: 'a'", "See the t"),
        ("huggingface_hub.errors.GatedRepoError: 403", {}, "denied access to this model", "Accept its terms"),
        ("ModuleNotFoundError: No module named 'x'", {}, "The Python module x is not installed", "Install its package"),
    ):  # fmt: skip
        failure = diagnose_log(tmp_path, log, **state)
        assert sentence in failure.sentence and failure.help.startswith(help), failure
        assert not failure.fields and not re.search(r"train\.|launch\.|esume", failure.help)


def test_a_crash_in_native_code(tmp_path: Path) -> None:
    assert diagnose_log(tmp_path, REPORT.format(code=-11, said="x")).sentence == "Rank 1 was terminated by SIGSEGV."
    watchdog = "[default1]:[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"
    failure = diagnose_log(tmp_path, watchdog + REPORT.format(code=-6, said="x"))
    assert failure.fields == ("parallel.ddp_timeout",) and failure.rank == 1


def test_the_launcher_itself(tmp_path: Path) -> None:
    assert diagnose_log(tmp_path, "hi\n", exit_code=7).sentence == "The launcher exited with code 7."
    assert "The launcher was killed (SIGKILL)" in diagnose_log(tmp_path, "", exit_code=-signal.SIGKILL).sentence
    assert diagnose_log(tmp_path, "", exit_code=-signal.SIGTERM).sentence == "The launcher was terminated by SIGTERM."
    missing = diagnose_log(tmp_path, "", exit_code=None, cause="x cannot be started: No such file.")
    assert missing.kind == LAUNCHER and missing.sentence.startswith("x cannot")
    assert diagnose(tmp_path / "nowhere", 0, {}).sentence == "The run ended before it wrote its result."


def test_only_the_last_start_counts(tmp_path: Path) -> None:
    failure = diagnose_log(
        tmp_path, "---- started a ----\nModuleNotFoundError: No module named 'x'\n\n---- started b ----\nhi\n"
    )
    assert "exited with code 1" in failure.sentence


@pytest.mark.parametrize(
    ("said", "sentence", "field"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            "The device ran",
            "train.per_device_train_batch_size",
        ),
        ("RuntimeError: MPS backend out of memory (MPS allocated: 1 GB)", "The device ran", "data.max_length"),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
            "out of CPU memory (RAM)",
            "launch",
        ),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. insufficient", "/dev/shm", "workers"),
        ("OSError: [Errno 28] No space left on device: 'x'", "disk is full", "save.total_limit"),
        ("torch.distributed.DistNetworkError: port: 29500 EADDRINUSE", "master port is in use", "launch.master_port"),
        (
            "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is "
            "utilizing it. Please specify a different port",
            "master port is in use",
            "launch.master_port",
        ),
        (
            "torch.distributed.DistNetworkError: port: 29500 EADDRINUSE\n\nThe above exception was the direct cause of "
            "the following exception:\n\nTraceback (most recent call last):\n  File x\n"
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The",
            "master port is in use",
            "launch.master_port",
        ),
        (
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The",
            "not all nodes joined",
            "launch.master_addr",
        ),
        (
            "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv",
            "waited longer",
            "parallel.ddp_timeout",
        ),
        ("ModuleNotFoundError: No module named 'flash_attn'", "module flash_attn is not installed", ""),
        ("KeyError: 'messages'", "key 'messages' was not found", "data.format"),
        ("PermissionError: [Errno 13] Permission denied: '/data/x.jsonl'", "no permission to access /data/x.jsonl", ""),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error", "denied access", "model.hub_id"),
        (
            "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error. (Request ID: x)",
            "has no such model or dataset, or it is private.",
            "model.hub_id",
        ),
        (
            "datasets.exceptions.DatasetNotFoundError: Dataset 'me/x' doesn't exist on the Hub or cannot be accessed.",
            "has no dataset me/x, or it is private.",
            "data.hub_id",
        ),
        (
            "OSError: me/x is not a local folder and is not a valid model identifier listed on 'https://huggingface.co'",
            "has no model me/x, or it is private.",
            "model.hub_id",
        ),
        ("DatasetNotFoundError: Dataset 'me/x' is a gated dataset on the Hub.", "denied access", "data.hub_id"),
        ("HfHubHTTPError: Client error '401 Unauthorized' for url 'https://...'", "denied access", "model.hub_id"),
        ("OSError: We couldn't connect to 'https://huggingface.co' to load", "could not be reached", "model.source"),
        ("RuntimeError: No CUDA GPUs are available", "is not available", "launch.device"),
        ("backend.train.data.DataError: Row 7 has no text.", "Row 7 has no text.", ""),
        (
            "backend.train.run_log.TrainError: Rank 1 (PID 5 on vm) has not responded for 4 s (parallel.ddp_timeout): "
            "its process is stopped or hangs, or its host is not reachable. Resume continues.",
            "Rank 1 (PID 5 on vm) has not responded for 4 s (parallel.ddp_timeout): its process is stopped or hangs, ",
            "ddp_timeout",
        ),
        (
            "backend.train.run_log.TrainError: Rank 3 (PID 5 on vm) did not take part in a collective within 4 s "
            "(parallel.ddp_timeout), while the others waited. Check its log",
            "did not take part in a collective within 4 s (parallel.ddp_timeout), while the others waited.",
            "ddp_timeout",
        ),
        (
            "backend.train.run_log.TrainError: Training diverged: the loss of steps 4 to 6 is NaN or infinite. The "
            "last finite weights are in checkpoint-2. Start a new run with a lower train.learning_rate or more",
            "diverged: the loss of steps 4 to 6 is NaN or infinite. The last finite weights are in checkpoint-2.",
            "learning_rate",
        ),
        ("KeyboardInterrupt", "interrupted from the keyboard", ""),
        ("torch.distributed.elastic.SignalException: Process 5 got signal: Signals.SIGTERM.", "received SIGTERM", ""),
    ],
)
def test_known_failures(tmp_path: Path, said: str, sentence: str, field: str) -> None:
    failure = diagnose_log(tmp_path, f'Traceback (most recent call last):\n  File "x.py", line 1, in y\n{said}\n')
    assert sentence in failure.sentence and said in failure.traceback
    assert not field or any(field in name for name in failure.fields)


def test_a_key_of_an_optimizer_is_no_column(tmp_path: Path) -> None:
    frame = 'File "/x/site-packages/torch/optim/sgd.py", line 90, in step\n    state["momentum"]'
    failure = diagnose_log(tmp_path, f"Traceback (most recent call last):\n  {frame}\nKeyError: 'momentum'\n")
    assert "KeyError" in failure.sentence and "column" not in failure.sentence + failure.help


def test_an_interrupted_build(tmp_path: Path) -> None:
    failure = diagnose_log(tmp_path, "Using /root/.cache/torch_extensions/py311_cpu as PyTorch extensions root...\n")
    assert "DeepSpeed operator" in failure.sentence and "build" in failure.help


def test_a_failed_slurm_job(tmp_path: Path) -> None:
    """Its ranks may have written that they lost each other."""
    log = f"{TRACE}backend.runs.follower: A node of the Slurm job failed.\n"
    failure = diagnose_log(tmp_path, log.replace("ValueError: row 7", "RuntimeError: Connection closed by peer"))
    assert failure.sentence == "A node of the Slurm job failed." and "new job" in failure.help
    refused = "backend.runs.follower: sbatch: Batch job submission failed: Invalid account.\n"
    assert "Invalid account." in diagnose_log(tmp_path, refused).sentence


def test_every_known_failure_is_a_sentence() -> None:
    assert len(KNOWN_FAILURES) == 24
    assert all(known.sentence.endswith((".", "}")) for known in KNOWN_FAILURES)
