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
from backend.cli.status_line import StatusLine
from backend.config.options import for_dataset
from backend.inspect import show_examples
from backend.wording import counted

LOSS, NO_LOSS, CUT = "loss", "no loss", "cut"


def start(arguments: argparse.Namespace) -> int:
    """Print some examples; exit code 2 if there are none, or if the files cannot be read up to them."""
    first, spec = arguments.first - 1, read_spec(arguments)
    if arguments.dataset > len(spec.data.datasets):
        count = counted(len(spec.data.datasets), "dataset")
        print(f"--dataset is {arguments.dataset}, but the spec has {count}.", file=sys.stderr)
        return 2
    spec = for_dataset(spec, arguments.dataset - 1)
    with StatusLine() as line:
        found = show_examples(spec, Path.cwd(), os.environ, first, arguments.count, INSPECTION_SECONDS, line.show)
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
        for text, ids, weight in sequence["pieces"]:
            pieces.append((CUT if shown >= sequence["kept"] else _kind(weight), text))
            shown += len(ids)
        width = max(len(kind) for kind in (NO_LOSS, *(kind for kind, _ in pieces)))
        for kind, group in groupby(pieces, key=lambda piece: piece[0]):
            first, *rest = "".join(text for _, text in group).removesuffix("\n").split("\n")
            yield f"{kind:<{width}} | {first}"
            yield from (f"{'':<{width}} | {line}" for line in rest)
        if shown < sequence["tokens"]:
            yield f"{'':<{width}} | ... {sequence['tokens'] - shown:,} more tokens"


def _kind(weight: float) -> str:
    """Whether a token has a loss, and its weight if that is not 1."""
    return LOSS if weight == 1 else f"{LOSS} x {weight:g}" if weight else NO_LOSS


def _summary(sequence: Mapping[str, Any]) -> str:
    cut = sequence["tokens"] - sequence["kept"]
    after = f"; {cut:,} after data.max_length" if cut else ""
    end = f"; ends with {sequence['end']}" if sequence["end"] else ""
    return f"{sequence['trained']:,} {sequence['use']}{after}{end}"
