"""The options of each run of a sweep: a grid or random samples of values, times seeds.

Values are written as on the command line: `1e-5,1e-4` is a list, `0.1..0.3` a range, `log:1e-5..1e-3` a range on a
logarithmic scale. A grid needs the number of points of a range: `log:1e-5..1e-3/3`. Values with commas are lists in
brackets, texts in double quotes, or separated by `|`: `[q_proj,v_proj],[q_proj]`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.config import RunSpec
from backend.config.options import Problem, SpecError, edit, find, get, list_or_text

RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^,]+?)\.\.(?P<high>[^,/]+)(?:/(?P<points>\d+))?")
SEED = "train.seed"
MAX_POINTS = 1000  # of a range
SAMPLER_SEED = 0  # the same command gives the same samples


@dataclass(frozen=True)
class Values:
    """The values of one option: a list of `choices`, or the range from `low` to `high` with `points` points."""

    name: str
    choices: tuple[str | list[str], ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    points: int = 0

    def grid(self) -> list[Any]:
        """All values. Raises SpecError for a range without a number of points."""
        if self.choices:
            return list(self.choices)
        if not self.points:
            example = f"{self._text()}/3"
            message = f"add the number of grid points to the range, such as {example}, or take random samples"
            raise _problem(self.name, message)
        shares = [number / max(1, self.points - 1) for number in range(self.points)]
        return list(dict.fromkeys(map(self._at, shares)))

    def sample(self, rng: random.Random) -> Any:
        """One random value."""
        return rng.choice(self.choices) if self.choices else self._at(rng.random())

    def _at(self, share: float) -> float | int:
        if self.is_log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if _kind(self.name) == "int" else float(f"{value:.4g}")

    def _text(self) -> str:
        return f"{'log:' * self.is_log}{self.low:g}..{self.high:g}"


def parse(text: str) -> Values:
    """`train.learning_rate=1e-5,1e-4` as Values. Raises SpecError."""
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        raise _problem("", f"{text}: expected section.key=values, such as train.learning_rate=1e-5,1e-4")
    if find(name) is None:
        edit(RunSpec(), {name: values})  # raises SpecError, which names the closest option
    found = RANGE.fullmatch(values)
    if not found:
        return Values(name, tuple(list_or_text(name, _unquoted(part.strip())) for part in _parts(values)))
    try:
        low, high = float(found["low"]), float(found["high"])
    except ValueError:
        raise _problem(name, f"{values} is not a range of numbers") from None
    if _kind(name) not in ("int", "float"):
        raise _problem(name, "only numeric options can have a range; list the values, separated by commas")
    if int(found["points"] or 0) > MAX_POINTS:
        raise _problem(name, f"a range has at most {MAX_POINTS} grid points")
    if not low < high or (found["log"] and low <= 0):
        raise _problem(name, f"{values} must start with the smaller number{', above 0' if found['log'] else ''}")
    return Values(name, low=low, high=high, is_log=bool(found["log"]), points=int(found["points"] or 0))


def _parts(text: str) -> list[str]:
    """The values in a text, which | separates, or else commas, outside of brackets and double quotes. Brackets and
    quotes without an end mean nothing."""
    places: dict[str, list[int]] = {"|": [], ",": []}
    depth, quoted = 0, False
    for at, character in enumerate(text):
        if character == '"' and text[at - 1 : at] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (character in "[{") - (character in "]}")
            if not depth and character in places:
                places[character].append(at)
    if depth or quoted:
        return text.split("|" if "|" in text else ",")
    ends = places["|"] or places[","]
    return [text[start:end] for start, end in zip([0, *(at + 1 for at in ends)], [*ends, len(text)], strict=True)]


def _unquoted(part: str) -> str:
    """The text of a JSON string, or `part` itself."""
    try:
        found = json.loads(part) if part.startswith('"') else part
    except ValueError:
        return part
    return found if isinstance(found, str) else part


def patches(
    spec: RunSpec, varied: Sequence[Values], samples: int = 0, seeds: int = 1, limit: int = 50
) -> list[dict[str, Any]]:
    """The changes of `spec` for each run: the grid of all values, or that many random `samples`; each with `seeds`
    different seeds. Raises SpecError for an invalid value, or more than `limit` runs."""
    grids = [] if samples else [values.grid() for values in varied]
    count = (samples or math.prod(map(len, grids))) * max(1, seeds)
    if count > limit:  # checked before the runs are made: a short text can describe millions
        raise _problem("", f"the sweep has {count:,} runs, more than the limit of {limit}")
    if samples:
        rng = random.Random(SAMPLER_SEED)
        points = [{values.name: values.sample(rng) for values in varied} for _ in range(samples)]
    else:
        names = [values.name for values in varied]
        points = [dict(zip(names, point, strict=True)) for point in itertools.product(*grids)]
    first = spec.train.seed
    if seeds > 1:
        if any(values.name == SEED for values in varied):
            raise _problem(SEED, "is varied already; list its values, or choose a number of seeds")
        points = [{**point, SEED: first + number} for point in points for number in range(seeds)]
    found = []
    for point in points:
        made = edit(spec, point)  # as typed -> as validated
        found.append({name: get(made, name) for name in point})
    return [patch for number, patch in enumerate(found) if patch not in found[:number]]


def _kind(name: str) -> str:
    """The kind of an option, which may be that of a dataset: data.sources[1].weight."""
    option = find(name)
    return option.kind if option else ""


def _problem(name: str, message: str) -> SpecError:
    return SpecError([Problem(name, message)])
