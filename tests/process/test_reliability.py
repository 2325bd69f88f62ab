"""Runs that are interrupted, damaged, hung or diverged: what they train, what they keep, and how they end."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fork_server import ForkServer, write_run
from torch.utils.file_baton import FileBaton
from training_runs import EXTENSIONS, log_text, losses, make_spec, result, same_losses
from transformers import TrainerControl, TrainerState

from backend.runs import SPEC, events, health, processes, resume_point, stacks
from backend.runs.folder import Run
from backend.runs.metrics import read_points
from backend.train import checkpoints, deepspeed_ops, device
from backend.train.divergence import DivergenceCallback, weights_are_finite
from backend.train.patches.torch_build_lock import BuildLock
from backend.train.run_log import RunLog, TrainError

TIMEOUT = 3  # seconds
SHORT = {"train.max_steps": 3, "save.strategy": "steps", "save.steps": 2, "save.total_limit": 0}


def test_resuming_at_the_last_step_trains_no_step(fork_server: ForkServer, root: Path) -> None:
    """Only the result is missing, as if the run had been killed while it generated after training."""
    changes = {**SHORT, "method.kind": "full", "train.lr_scheduler_type": "constant", "save.final_model": True}
    changes |= {"eval.strategy": "steps", "eval.steps": 2, "eval.num_generations": 1, "eval.max_new_tokens": 2}
    folder = fork_server.train(root / "last", make_spec(changes))
    weights, before = folder / "model/model.safetensors", result(folder)
    saved = weights.read_bytes()
    (folder / "result.json").unlink()
    weights.unlink()
    fork_server.resume(folder, 3)
    assert weights.read_bytes() == saved
    assert sorted(losses(folder)) == [1, 2, 3]
    after = result(folder)
    assert after["steps"] == 3
    assert after["eval_loss"] == before["eval_loss"]
    assert after["samples"] == before["samples"]


def test_options_and_data_that_were_edited_before_a_resume_are_named(fork_server: ForkServer, root: Path) -> None:
    changes = {"train.max_steps": 4, "save.strategy": "steps", "save.steps": 2, "train.per_device_train_batch_size": 2}
    rows = [json.dumps({"prompt": f"Count to {n}.", "completion": " ".join("12345678"[:n])}) for n in range(1, 9)]
    data = root / "edited.jsonl"
    data.write_text("\n".join(rows))
    changes |= {"data.source": "files", "data.files": [str(data)], "data.validation": "none"}
    folder = fork_server.train(root / "edited", make_spec(changes))
    spec = (folder / SPEC).read_text()
    assert "per_device_train_batch_size: 2" in spec
    (folder / SPEC).write_text(spec.replace("per_device_train_batch_size: 2", "per_device_train_batch_size: 1"))
    fork_server.resume(folder, 2)
    named = "checkpoint-2 was trained with: train.per_device_train_batch_size was 2 and is now 1."
    assert log_text(folder).count(named) == 1
    other_examples = "The tokenized training examples have changed since checkpoint-4"
    assert "The tokenized training examples" not in log_text(folder)
    data.write_text("\n".join(rows[1:]))
    fork_server.resume(folder, 4)
    assert log_text(folder).count("The options differ from") == log_text(folder).count(other_examples) == 1
    (alert,) = events.alerts(folder)
    assert alert["kind"] == health.EXAMPLES and alert["text"].startswith(other_examples)


def test_training_stops_early_and_a_resumed_run_goes_on_counting(fork_server: ForkServer, root: Path) -> None:
    """No evaluation is better by 100: the second, third and fourth do not count as improvements."""
    changes = {"train.max_steps": 9, "eval.strategy": "steps", "eval.steps": 1, "save.strategy": "steps"}
    changes |= {"save.steps": 2, "save.total_limit": 0, "save.final_model": True}
    changes |= {"eval.early_stopping_patience": 3, "eval.early_stopping_threshold": 100.0}
    folder = fork_server.train(root / "early", make_spec(changes))
    assert "Stopping early after step 4: 3 evaluations in a row without an eval loss below -9" in log_text(folder)
    assert result(folder)["steps"] == 4
    assert (folder / "model").is_dir()
    fork_server.resume(folder, 2)
    assert sorted(losses(folder)) == [1, 2, 3, 4]
    assert log_text(folder).count("Stopping early after step 4") == 2


@pytest.fixture(scope="module")
def trained(fork_server: ForkServer, root: Path) -> Path:
    """A run of three steps with checkpoints of the last two."""
    return fork_server.train(root / "short", make_spec(SHORT))


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def overwrite(offset: int) -> Callable[[Path], object]:
    """Set a byte of a file to zero; a negative offset counts from its end."""

    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            file.write(b"\0")

    return change


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("weights", lambda path: os.truncate(path, 2**21 - 1), "has 2,097,151 bytes, but 2,097,152 were saved"),
        ("weights", overwrite(0), "content of its file weights is not"),
        ("weights", overwrite(-1), "content of its file weights is not"),
        ("state/rank_0", overwrite(500), "content of its file state/rank_0 is not"),
        ("state/rank_0", Path.unlink, "file state/rank_0 is missing"),
        ("complete", overwrite(0), "file complete cannot be read"),
    ],
)
def test_damaged_files_of_a_checkpoint_are_found(
    tmp_path: Path, name: str, change: Callable[[Path], object], problem: str
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "weights").write_bytes(b"w" * 2**21)
    (tmp_path / "state/rank_0").write_bytes(b"s" * 1000)
    checkpoints.mark_complete(tmp_path)
    assert not checkpoints.damage(tmp_path)
    change(tmp_path / name)
    assert problem in checkpoints.damage(tmp_path)


def test_a_damaged_checkpoint_is_not_resumed(fork_server: ForkServer, folder: Path) -> None:
    """An earlier one is used, and the steps after it are trained again; if there is none, the error says what to do."""
    saved, before = folder / "checkpoints", losses(folder)
    os.truncate(saved / "checkpoint-3/optimizer.pt", 100)
    assert fork_server.run(folder) == 0, log_text(folder)
    log = log_text(folder)
    assert "checkpoint-3 is damaged: its file optimizer.pt has 100 bytes" in log
    assert "Resuming from checkpoint-2." in log
    assert losses(folder) == same_losses(before)
    assert sorted(p.name for p in saved.iterdir()) == ["checkpoint-2", "checkpoint-3", "damaged-checkpoint-3"]
    assert not checkpoints.damage(saved / "checkpoint-3")
    for step in (2, 3):
        (saved / f"checkpoint-{step}/optimizer.pt").unlink()
    assert fork_server.run(folder) == 1
    sentence = log_text(folder).splitlines()[-1]
    assert "checkpoint-3 is damaged: its file optimizer.pt is missing" in sentence
    assert "--from-scratch" in sentence
    assert fork_server.run(folder, 0, "--from-scratch") == 0, log_text(folder)


def test_a_run_whose_checkpoints_are_away_hides_no_point(fork_server: ForkServer, folder: Path) -> None:
    """Before, it silently started at step 0, and after the next resume 9 of 12 points were gone."""
    before, saved, away = losses(folder), folder / "checkpoints", folder.with_name("away-checkpoints")
    (folder / "result.json").unlink()
    saved.rename(away)
    assert fork_server.run(folder) == 1
    sentence = log_text(folder).splitlines()[-1]
    assert "checkpoint-3 is missing, although the run has saved it" in sentence
    assert "--from-scratch" in sentence
    assert losses(folder) == before
    assert not saved.exists()
    saved.write_text("")  # cannot be read, also by root
    assert fork_server.run(folder) == 1
    assert "checkpoints cannot be read (Not a directory)" in log_text(folder).splitlines()[-1]
    assert losses(folder) == before
    saved.unlink()
    away.rename(saved)
    assert fork_server.run(folder) == 0, log_text(folder)
    assert losses(folder) == before


@pytest.mark.soak
def test_points_that_an_earlier_version_has_hidden_are_restored(fork_server: ForkServer, root: Path) -> None:
    """It had resumed at step 0 for two steps, while the checkpoints were away."""
    folder = fork_server.train(root / "hidden", make_spec({**SHORT, "train.max_steps": 6, "save.steps": 5}))
    before, metrics = losses(folder), folder / "metrics.jsonl"
    shutil.rmtree(folder / "checkpoints/checkpoint-6")
    points = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*points[:5], '{"event": "resumed", "step": 0}', *points[:2]]) + "\n")
    assert fork_server.run(folder) == 0, log_text(folder)
    assert "metrics.jsonl has no points for steps 3 to 5" in log_text(folder)
    assert losses(folder) == before
    found = [point for point in read_points(metrics) if "loss" in point]
    assert [point["step"] for point in found] == [1, 2, 3, 4, 5, 6]
    assert found[3]["learning_rate"] == json.loads(points[3])["learning_rate"]


def test_a_newest_checkpoint_that_cannot_be_read_is_skipped(fork_server: ForkServer, folder: Path) -> None:
    """Before, the run ended with an error of the operating system; the page had promised an earlier checkpoint."""
    before, newest = losses(folder), folder / "checkpoints/checkpoint-3"
    shutil.rmtree(newest)
    newest.write_text("")
    promised = Run(folder).resume_point()
    assert promised.checkpoint == folder / "checkpoints/checkpoint-2"
    assert fork_server.run(folder) == 0, log_text(folder)
    assert "checkpoint-3 cannot be read (Not a directory). Using an earlier checkpoint." in log_text(folder)
    assert "Resuming from checkpoint-2." in log_text(folder)
    assert losses(folder) == same_losses(before)
    assert newest.is_dir()


def test_from_scratch_does_not_resume_a_checkpoint_of_the_future(fork_server: ForkServer, folder: Path) -> None:
    """The clock was set back after they were saved. Before, the run continued at the last step."""
    later = time.time() + 10**6
    for path in (folder / "checkpoints").rglob("*"):
        os.utime(path, (later, later))
    (folder / "lock").write_text("supervisor\nb2\n")
    assert fork_server.run(folder, 0, "--from-scratch") == 0, log_text(folder)
    assert "Resuming from" not in log_text(folder)
    assert "Restarted from scratch, at step 0." in log_text(folder) and "optimizer state" not in log_text(folder)
    assert [json.loads(line).get("step") for line in (folder / "metrics.jsonl").read_text().splitlines()][3] == 0
    assert all(resume_point.is_of_start(path, "b2") for path in (folder / "checkpoints").iterdir())


RENAME_AFTER_STEP_2 = """
import os
from transformers import TrainerCallback
from backend.train import __main__ as training
from backend.train.callbacks import ProgressCallback
end_step = ProgressCallback.on_step_end

def on_step_end(self, args, state, control, **more):
    end_step(self, args, state, control, **more)
    if state.global_step == 2 and os.environ.get("RANK", "0") == "0":
        os.rename({before!r}, {after!r})

ProgressCallback.on_step_end = on_step_end
training.main()
"""


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 0), pytest.param("fsdp2", 2, marks=pytest.mark.soak)])
def test_a_run_that_is_renamed_trains_on(fork_server: ForkServer, root: Path, strategy: str, ranks: int) -> None:
    """Checkpoints, metrics, model and result are in the folder under its new name. Before, the run waited, and after
    five minutes it created the old folder again and finished there."""
    changes = {**SHORT, "train.max_steps": 4, "save.steps": 1, "save.final_model": True, "parallel.strategy": strategy}
    changes |= {"eval.strategy": "steps", "eval.steps": 1, "save.load_best_model_at_end": True, "method.kind": "full"}
    before, after, script = root / f"old-{strategy}", root / f"new-{strategy}", root / f"rename-{strategy}.py"
    script.write_text(RENAME_AFTER_STEP_2.format(before=str(before), after=str(after)))
    write_run(before, make_spec(changes))
    fork_server.run(before, ranks, script=str(script), seconds=200)
    assert not before.exists()
    assert sorted(losses(after)) == [1, 2, 3, 4], log_text(after)
    assert result(after)["steps"] == 4
    assert (after / "model/model.safetensors").is_file()
    assert sorted(path.name for path in (after / "checkpoints").iterdir()) == [f"checkpoint-{k}" for k in (1, 2, 3, 4)]
    assert not any(map(checkpoints.damage, (after / "checkpoints").iterdir()))
    assert "/proc/self" not in log_text(after)


HOLD_LOCK = """
import sys, time
from torch.utils.file_baton import FileBaton
from backend.train.patches.torch_build_lock import BuildLock
lock = (BuildLock if sys.argv[2] == "BuildLock" else FileBaton)(sys.argv[1])
assert lock.try_acquire()
print("acquired", flush=True)
sys.stdin.readline()
lock.release()
"""


@pytest.mark.parametrize("kind", [pytest.param("BuildLock", marks=pytest.mark.soak), "FileBaton"])
@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_build_continues_after_its_process_was_killed(tmp_path: Path, kind: str, killed: bool) -> None:
    """Also a build by a program without Footplate's lock. While the process lives, others wait."""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD_LOCK, str(path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout and owner.stdin
        assert owner.stdout.readline() == "acquired\n"
        locks = [BuildLock(str(path), 0.01) for _ in range(2)]
        acquired: list[bool] = []
        threads = [threading.Thread(target=lambda lock=lock: acquired.append(lock.try_acquire())) for lock in locks]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert not acquired
        if killed:
            owner.send_signal(signal.SIGKILL)
        else:
            owner.stdin.write("\n")
            owner.stdin.flush()
        owner.wait(60)
        if killed:
            deadline = time.monotonic() + 60
            while not acquired and time.monotonic() < deadline:
                time.sleep(0.01)
            assert acquired == [True], "one of the two takes over"
            next(lock for lock in locks if lock.fd >= 0).release()
        for thread in threads:
            thread.join(60)
    assert sorted(acquired) == [False, killed]
    assert not path.exists()


def test_a_lock_that_was_left_behind_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert FileBaton(str(path)).try_acquire()
    os.closerange(*(lambda fd: (fd, fd + 1))(int(_open_descriptor(path))))
    lock = BuildLock(str(path))
    assert lock.try_acquire()
    lock.release()
    assert not path.exists()


def _open_descriptor(path: Path) -> str:
    return next(link.name for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(path))


def test_progress_shows_how_long_kernels_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_ops, "SHOWN_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(BuildLock, "waiting", "")
    with deepspeed_ops._progress("cpu_adam", RunLog(tmp_path)):
        time.sleep(0.1)
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["phase"] == "building kernels"
    assert progress["text"] == "Building DeepSpeed kernels: cpu_adam, 0 s."


@pytest.mark.parametrize(
    ("optimizer", "params", "expected"),
    [("none", "none", set()), ("cpu", "none", {"CPUAdam"}), ("none", "nvme", {"AsyncIO"}),
     ("nvme", "cpu", {"CPUAdam", "AsyncIO"})],
)  # fmt: skip
def test_operators_of_an_offload_are_built_where_it_is_shown(optimizer: str, params: str, expected: set[str]) -> None:
    """async_io takes minutes: built while the model is loaded, it would look as if loading hung."""
    run: Any = SimpleNamespace(device="cuda", optimizer_offload=optimizer, param_offload=params)
    assert {*deepspeed_ops.needed(run)} == {f"{name}Builder" for name in expected}


def test_zero_starts_with_a_stale_build_lock(fork_server: ForkServer, root: Path) -> None:
    """The lock file of a build that was killed, as an earlier version or another program leaves it."""
    name = "deepspeed_shm_comm"
    if not (EXTENSIONS / name / f"{name}.so").exists():
        pytest.skip("DeepSpeed's operators were not built yet")
    shutil.copytree(EXTENSIONS / name, root / "extensions" / name)
    lock = root / "extensions" / name / "lock"
    lock.touch()
    spec = make_spec({"parallel.strategy": "zero2", "launch.nproc_per_node": 2, "train.max_steps": 1})
    env = {"TORCH_EXTENSIONS_DIR": str(root / "extensions")}
    fork_server.train(root / "zero2", spec, 2, env)
    assert not lock.exists()
    assert result(root / "zero2")["steps"] == 1


NAN_FROM_STEP_4 = """
import math, os
from trl.trainer.sft_trainer import SFTTrainer
from backend.train import __main__ as training
compute = SFTTrainer.compute_loss

def compute_loss(self, *args, **more):
    loss = compute(self, *args, **more)
    nan = self.state.global_step >= 3 and os.environ.get("RANK", "1") == "1"
    return loss * math.nan if nan else loss

SFTTrainer.compute_loss = compute_loss
training.main()
"""


@pytest.mark.parametrize(("ranks", "steps", "last"), [(2, 9, 6), pytest.param(0, 4, 4, marks=pytest.mark.soak)])
def test_a_diverged_run_fails_and_keeps_finite_weights(
    fork_server: ForkServer, root: Path, ranks: int, steps: int, last: int
) -> None:
    """One rank has a loss of NaN: the run ends after three steps, or at its last step if that comes earlier."""
    changes = {**SHORT, "train.max_steps": steps, "save.final_model": True, "method.kind": "full"}
    changes |= {"parallel.strategy": "ddp" if ranks else "single", "save.total_limit": 1}
    folder, script = root / f"diverged-{steps}", root / "nan.py"
    script.write_text(NAN_FROM_STEP_4)
    write_run(folder, make_spec(changes))
    assert fork_server.run(folder, ranks, script=str(script)) == 1
    sentence = [line for line in log_text(folder).splitlines() if "diverged" in line][-1]
    assert ("steps 4 to 6" if last == 6 else "step 4 ") in sentence
    assert "The last finite weights are in checkpoint-2." in sentence
    assert json.loads((folder / "progress.json").read_text())["step"] == last, "the page names the step of the error"
    assert "Traceback" not in log_text(folder)
    assert max(losses(folder)) == last - 1, "the last step ended the run before its loss was logged"
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert not (folder / "model").exists()
    assert not (folder / "result.json").exists()


def test_only_steps_in_a_row_count(tmp_path: Path) -> None:
    """fp16 skips steps with a loss that is not finite, and continues."""
    callback = DivergenceCallback(make_spec(), tmp_path, device.ProcessGroup(), RunLog(tmp_path))
    state, control = TrainerState(max_steps=100), TrainerControl()
    model = torch.nn.Linear(2, 2)
    for step, batches in enumerate(((1.0, math.nan), (math.inf, 2.0), (1.0, 1.0), (math.nan,), (1.0,)), 1):
        state.global_step, control.should_log, control.should_save = step, step != 2, step == 2
        for loss in batches:
            callback.add(torch.tensor(loss))
        callback.on_step_end(None, state, control, model)
        assert not control.should_save, "weights may be NaN after a step with such a loss"
    control.should_save = True
    callback.on_step_end(None, state, control, model)
    assert control.should_save
    for state.global_step in (7, 8):
        callback.add(torch.tensor(math.nan))
        callback.on_step_end(None, state, control, model)
    callback.add(torch.tensor(math.nan))
    state.global_step = 9
    with pytest.raises(TrainError, match="the loss of steps 7 to 9"):
        callback.on_step_end(None, state, TrainerControl(should_log=True), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(3, 3).to(dtype)
    model.bias.requires_grad = False
    assert weights_are_finite(model)
    model.bias.data[0] = math.nan
    assert weights_are_finite(model), "frozen weights are not trained"
    for value in (math.nan, -math.inf):
        model.weight.data[1, 1] = value
        assert not weights_are_finite(model)


NAN_IN_NEW_MEMORY = """
import torch
from backend.train import __main__ as training
torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
training.main()
"""


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
@pytest.mark.soak
def test_padding_of_shards_is_not_checked(fork_server: ForkServer, root: Path, strategy: str) -> None:
    """Three ranks cannot share the weights evenly; ZeRO-3 never writes the rest of its last shards."""
    folder, script = root / f"padded-{strategy}", root / "nan.py"
    script.write_text(NAN_IN_NEW_MEMORY)
    changes = {**SHORT, "method.kind": "full", "parallel.strategy": strategy, "train.per_device_train_batch_size": 1}
    write_run(folder, make_spec({**changes, "launch.nproc_per_node": 3}))
    assert fork_server.run(folder, 3, script=str(script)) == 0, log_text(folder)
    assert sorted(losses(folder)) == [1, 2, 3]


def hang_rank_1(how: str) -> str:
    """A training in which rank 1 hangs at `how`: 'step' or 'preparation' (the process is stopped), or 'alive'."""
    call = "time.sleep(1000)" if how == "alive" else "os.kill(os.getpid(), signal.SIGSTOP)"
    return f"""
import os, signal, time
from backend.train import __main__ as training, training as phases
from trl.trainer.sft_trainer import SFTTrainer
owner, name = {'(phases, "_trainer")' if how == "preparation" else '(SFTTrainer, "compute_loss")'}
call, calls = getattr(owner, name), []

def hang(*args, **more):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == {1 if how == "preparation" else 3}:
        {call}
    return call(*args, **more)

setattr(owner, name, hang)
training.main()
"""


HUNG = {
    "preparation": r"Rank 1: stopped by a signal; kill -CONT \d+ continues it\.",
    "step": r"Rank 1: stopped by a signal; kill -CONT \d+ continues it\.",
    "alive": r"Rank 0 entered \w+ \(collective \d+ of the process group\) \d+ s ago; rank 1 did not\. Rank 0: .+ "
    r"Rank 1: in hang \(\S+/hang-alive\.py, line \d+\)\.",
}


@contextmanager
def explanations(folder: Path) -> Iterator[list[str]]:
    """What `footplate stacks` says again and again, until the context ends."""
    found: list[str] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.2):
            found.append(stacks.explain(stacks.collect(folder, seconds=2)))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ("step", "ddp"),
        pytest.param("preparation", "ddp", marks=pytest.mark.soak),
        pytest.param("alive", "ddp", marks=pytest.mark.soak),
        pytest.param("step", "fsdp2", marks=pytest.mark.soak),
        pytest.param("step", "zero2", marks=pytest.mark.soak),
        pytest.param("alive", "zero3", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_hangs_ends_the_run_and_is_named(
    fork_server: ForkServer, root: Path, monkeypatch: pytest.MonkeyPatch, how: str, strategy: str
) -> None:
    folder, script = root / f"hung-{how}-{strategy}", root / f"hang-{how}.py"
    script.write_text(hang_rank_1(how))
    write_run(folder, make_spec({"parallel.strategy": strategy, "parallel.ddp_timeout": TIMEOUT}))
    began = time.monotonic()
    find = processes.run_processes  # forked processes show the environment of the fork server
    monkeypatch.setattr(processes, "run_processes", lambda _: find(fork_server.marker))
    with explanations(folder) as found:
        assert fork_server.run(folder, 2, script=str(script), seconds=100) == 1, log_text(folder)
    assert time.monotonic() - began < 60
    assert any(re.search(HUNG[how], text) for text in found), found
    sentence = next(line for line in log_text(folder).splitlines() if "Rank 1 (PID " in line)
    assert ("did not take part" if how == "alive" else f"has not responded for {TIMEOUT} s") in sentence
    assert "Traceback" not in log_text(folder)
