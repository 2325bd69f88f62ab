"""The outputs for the same validation prompts at each evaluation during training (eval.generate_during_eval).

The first line of generations.jsonl has the `prompts` with their references; each other line has a `step`, the `outputs`
in the order of the prompts, for each whether it is an exact match (`correct`) and its ROUGE-L (`rouge_l`), and `scores`
of all of them. Step 0 is before training. The step null is after training, when the model may be the best one, from an
earlier step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.runs import GENERATIONS, files, replace_text

Line = Mapping[str, Any]


def begin(folder: Path, prompts: Sequence[Mapping[str, str]], step: int) -> list[int]:
    """Keep the lines until `step`, from which a start continues, if they are of these prompts; else begin a new file.
    Returns the steps that are kept. Raises OSError."""
    found = read(folder)
    is_same = found["prompts"] == list(prompts)
    kept = [line for line in found["steps"] if is_same and line["step"] is not None and line["step"] <= step]
    lines: list[Line] = [{"prompts": prompts}, *kept]
    replace_text(folder / GENERATIONS, "".join(f"{json.dumps(line)}\n" for line in lines))
    return [line["step"] for line in kept]


def append(folder: Path, line: Line) -> None:
    """Add the outputs of a step. Raises OSError."""
    with files.open_to_append(folder / GENERATIONS) as file:
        file.write(f"{json.dumps(line)}\n".encode())


def read(folder: Path) -> dict[str, Any]:
    """`prompts` and `steps`; both are empty if the run has none."""
    found: dict[str, Any] = {"prompts": [], "steps": []}
    try:
        text = files.read_text(folder / GENERATIONS)
    except (OSError, ValueError):
        return found
    for part in text.splitlines():
        try:
            line = json.loads(part)
        except (ValueError, RecursionError):  # the line was cut off when the process was killed
            continue
        if not isinstance(line, dict):
            continue
        if isinstance(line.get("prompts"), list):
            found["prompts"] = line["prompts"]
        elif _is_step(line):
            found["steps"].append(line)
    return found


def _is_step(line: Line) -> bool:
    lists = all(isinstance(line.get(name), list) for name in ("outputs", "correct", "rouge_l"))
    return lists and isinstance(line.get("scores"), dict) and isinstance(line.get("step", ""), int | None)


def size(folder: Path) -> int:
    """Bytes of the file, which change with each step; 0 without one."""
    try:
        return (folder / GENERATIONS).stat().st_size
    except OSError:
        return 0
