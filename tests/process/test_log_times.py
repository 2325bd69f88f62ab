"""Lines of the trainer have the local time, and the date when it changes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from backend.train import run_log


def test_lines_have_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log.RunLog(tmp_path).info("Preparing data.")
    run_log.RunLog(tmp_path, rank=1).info("Not shown.")
    assert re.fullmatch(r"\d\d:\d\d:\d\d Preparing data\.\n", capsys.readouterr().out)


def test_a_new_day_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evening = time.strptime("2026-11-24 23:59:58", "%Y-%m-%d %H:%M:%S")
    night = time.strptime("2026-11-25 00:00:03", "%Y-%m-%d %H:%M:%S")
    moments = iter([evening, evening, night])
    monkeypatch.setattr(run_log.time, "localtime", lambda: next(moments))
    log = run_log.RunLog(tmp_path)
    for step in (1, 2, 3):
        log.info(f"step {step}")
    assert capsys.readouterr().out.splitlines() == [
        "23:59:58 step 1", "23:59:58 step 2", "---- 2026-11-25 ----", "00:00:03 step 3",
    ]  # fmt: skip
