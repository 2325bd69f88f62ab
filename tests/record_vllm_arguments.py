"""Writes tests/data/vllm_arguments.json, every argument of `vllm serve`, with a Python that has vLLM: PYTHON
tests/record_vllm_arguments.py. For each argument: nargs, choices, and which of the SAMPLES it accepts as values.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data/vllm_arguments.json"
SAMPLES = {"word": "x", "auto": "auto", "integer": "1", "decimal": "0.5", "object": '{"a": 1}'}


def accepted(action: argparse.Action) -> list[str]:
    found = []
    for kind, sample in SAMPLES.items():
        with contextlib.suppress(Exception):
            convert: Any = action.type or str
            if action.choices is None or convert(sample) in action.choices:
                convert(sample)
                found.append(kind)
    return found


def record(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        for name in action.option_strings:
            about: dict[str, Any] = {"nargs": 0 if isinstance(action, argparse.BooleanOptionalAction) else action.nargs}
            if action.nargs != 0 and about["nargs"] != 0:
                about |= {"accepts": accepted(action)} if action.choices is None else {"choices": list(action.choices)}
            found[name] = about
    return found


def main() -> None:
    import vllm  # noqa: PLC0415 - installed in another environment
    from vllm.entrypoints.common.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    arguments = record(make_arg_parser(FlexibleArgumentParser()))
    lines = [f"{json.dumps(name)}: {json.dumps(about)}" for name, about in sorted(arguments.items())]
    text = ",\n".join([f'"version": {json.dumps(vllm.__version__)}', *lines])
    FILE.write_text("{\n" + text + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
