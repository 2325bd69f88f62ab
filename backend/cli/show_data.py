"""`footplate data`: examples as the model sees them, with what is trained on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from backend.cli.commands import INSPECTION_SECONDS, print_json, read_spec
from backend.config.options import for_dataset
from backend.inspect import show_examples
from backend.wording import counted

KINDS = {"loss": "loss    | ", "no loss": "no loss | ", "cut": "cut     | "}
INDENT = "        | "


def start(arguments: argparse.Namespace) -> int:
    """Print some examples; exit code 2 if there are none, or if the files cannot be read up to them."""
    first, spec = arguments.first - 1, read_spec(arguments)
    if arguments.dataset > len(spec.data.datasets):
        count = counted(len(spec.data.datasets), "dataset")
        print(f"--dataset is {arguments.dataset}, but the spec has {count}.", file=sys.stderr)
        return 2
    spec = for_dataset(spec, arguments.dataset - 1)
    found = show_examples(spec, Path.cwd(), os.environ, first, arguments.count, INSPECTION_SECONDS)
    if found is None or isinstance(found, str):
        print(found or "The examples are still being rendered. Try again.", file=sys.stderr)
        return 2
    if arguments.json:
        print_json(found["examples"])
    else:
        for example in found["examples"]:
            print(*_lines(example), "", sep="\n")
    if not found["problem"] and found["examples"]:
        return 0
    print(found["problem"] or f"The data files have fewer than {arguments.first:,} examples.", file=sys.stderr)
    return 2


def _lines(example: Mapping[str, Any]) -> Iterator[str]:
    yield example["location"]
    if example["problem"]:
        yield example["problem"]
    yield from example["notes"]
    for sequence in example["sequences"]:
        name = f"{sequence['name']}: " if sequence["name"] else ""
        yield f"{name}{counted(sequence['tokens'], 'token')}, {_summary(sequence)}"
        pieces, shown = [], 0
        for text, ids, is_trained in sequence["pieces"]:
            kind = "cut" if shown >= sequence["kept"] else "loss" if is_trained else "no loss"
            pieces.append((kind, text))
            shown += len(ids)
        for kind, group in groupby(pieces, key=lambda piece: piece[0]):
            first, *rest = "".join(text for _, text in group).removesuffix("\n").split("\n")
            yield KINDS[kind] + first
            yield from (INDENT + line for line in rest)
        if shown < sequence["tokens"]:
            yield f"{INDENT}... {sequence['tokens'] - shown:,} more tokens"


def _summary(sequence: Mapping[str, Any]) -> str:
    cut = sequence["tokens"] - sequence["kept"]
    after = f"; {cut:,} after data.max_length" if cut else ""
    end = f"; ends with {sequence['end']}" if sequence["end"] else ""
    return f"{sequence['trained']:,} {sequence['use']}{after}{end}"
