"""Tokenization in several processes: the order of the examples, and how it ends early. No process is left."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from backend.train.data import tokenize
from backend.train.examples import ConvertedExample, Part
from backend.train.run_log import TrainError

ROWS = [ConvertedExample(f"a.jsonl:{number}", {"number": number}) for number in range(2500)]
EXAMPLES = Part(ROWS, range(2500))


class Numbers:
    """Tokens of an example: its number. `kill`: the number at which the process is killed; `fail`: those at which it
    fails; `seconds`: how long the first batch takes."""

    def __init__(self, kill: int = -1, fail: Sequence[int] = (), seconds: float = 0.0) -> None:
        self.kill, self.fail, self.seconds = kill, {*fail}, seconds

    def each(self, examples: Sequence[ConvertedExample]) -> Iterator[tuple[dict[str, Any], Counter[str]] | TrainError]:
        for number in (example.value["number"] for example in examples):
            if number == self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(self.seconds * (number == 0))
            failed = TrainError(f"a.jsonl:{number}: no completion.")
            yield failed if number in self.fail else ({"input_ids": [[number]]}, Counter(examples=1))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("slow_start", [0.0, 0.3])
def test_the_order_is_that_of_the_examples(slow_start: float) -> None:
    ticks: list[tuple[int, int]] = []
    found, counts = tokenize(EXAMPLES, Numbers(seconds=slow_start), 3, lambda *now: not ticks.append(now))
    assert [ids[0] for ids in found["input_ids"]] == list(range(2500)) and counts == {"examples": 2500}
    assert ticks == [(min(done, 2500), 2500) for done in range(200, 2601, 200)]


@pytest.mark.parametrize("number", [0, 1100, 2499])
def test_a_killed_process_is_an_error(number: int) -> None:
    with pytest.raises(TrainError, match=r"SIGKILL.*CPU memory \(RAM\).*dataset_num_proc"):
        tokenize(EXAMPLES, Numbers(kill=number), 3, lambda *_: True)


def test_the_first_error_of_an_example_is_that_of_the_run() -> None:
    with pytest.raises(TrainError, match="jsonl:3: no completion"):
        tokenize(EXAMPLES, Numbers(fail=(3, 300), seconds=0.3), 3, lambda *_: True)


def test_a_stop_ends_it_at_once() -> None:
    began = time.monotonic()
    found, _ = tokenize(EXAMPLES, Numbers(), 3, lambda done, _: done < 600)
    assert [ids[0] for ids in found["input_ids"]] == list(range(600)) and time.monotonic() - began < 20


def test_the_processes_end_with_a_training_process_that_is_killed() -> None:
    """They hold its end of a pipe open as long as they run."""
    read_end, write_end = os.pipe()
    arguments = (EXAMPLES, Numbers(), 3, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    training = multiprocessing.get_context("fork").Process(target=tokenize, args=arguments)
    training.start()
    os.close(write_end)
    try:
        assert select.select([read_end], [], [], 120)[0] and os.read(read_end, 1) == b""
    finally:
        os.close(read_end)
    training.join()
    assert training.exitcode == -signal.SIGKILL
