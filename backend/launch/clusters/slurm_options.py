"""sbatch's options as a user writes them: long, abbreviated and short names, with `=`, a space or neither.

Source: sbatch(1) of Slurm 24.11.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "i": "input", "J": "job-name",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
SHORT_FLAGS = {
    "H": "hold", "h": "help", "k": "no-kill", "O": "overcommit", "Q": "quiet", "s": "oversubscribe", "V": "version",
    "v": "verbose", "W": "wait",
}  # fmt: skip
FLAGS = {  # some have a value after `=`
    *SHORT_FLAGS.values(), "contiguous", "exclusive", "ignore-pbs", "no-requeue", "parsable", "reboot", "requeue",
    "spread-job", "test-only", "usage", "use-min-nodes", "get-user-env", "nice",
    "propagate",
}  # fmt: skip
LONG = {
    *SHORT.values(), *FLAGS, "acctg-freq", "batch", "bb", "bbf", "cluster-constraint", "comment", "container",
    "container-id", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot", "exclude", "export",
    "export-file", "extra", "gid", "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres",
    "gres-flags", "hint", "kill-on-invalid-dep", "mail-type", "mail-user", "mcs-label",
    "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu",
    "mincpus", "network", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket",
    "open-mode", "power", "prefer", "priority", "profile", "reservation", "segment", "signal",
    "sockets-per-node", "stepmgr", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind",
    "tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap",
}  # fmt: skip


@dataclass(frozen=True)
class SbatchOption:
    """An option by its long name; `line` is the position of its line, `words` are the words that it was written as."""

    name: str
    value: str
    line: int
    words: tuple[str, ...]


def parse(lines: Sequence[str]) -> list[SbatchOption]:
    """The options of all lines, in the order in which sbatch reads them."""
    return [option for number, line in enumerate(lines) for option in _parse_line(number, line)]


def without(lines: Sequence[str], removed: Sequence[SbatchOption]) -> tuple[str, ...]:
    """`lines` without these options."""
    changed = {option.line for option in removed}
    kept: dict[int, list[str]] = {number: [] for number in range(len(lines))}
    for option in parse(lines):
        if option not in removed:
            kept[option.line] += option.words
    rewritten = {number: shlex.join(words) for number, words in kept.items()}
    found = [rewritten[number] if number in changed else line for number, line in enumerate(lines)]
    return tuple(line for line in found if line)


def _parse_line(number: int, line: str) -> Iterator[SbatchOption]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an open quote, which sbatch refuses
        words = line.split()
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = _full_name(name)
            has_next = bool(words) and (name in LONG or not words[0].startswith("-"))
            written = [word, words.pop(0)] if has_next and not has_value and name not in FLAGS else [word]
            yield SbatchOption(name, value or " ".join(written[1:]), number, tuple(written))
        else:
            yield from _short(number, word, words)


def _short(number: int, word: str, rest: list[str]) -> Iterator[SbatchOption]:
    """The options of a word such as -N2, -HN2, or -N with its value in the next word."""
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in SHORT:
            yield SbatchOption(SHORT_FLAGS.get(letter, letter), "", number, (f"-{letter}",))
            continue
        words = (f"-{letter}{letters}",) if letters or not rest else (f"-{letter}", rest.pop(0))
        yield SbatchOption(SHORT[letter], letters or (words[1] if len(words) > 1 else ""), number, words)
        return


def _full_name(name: str) -> str:
    """The long name that an abbreviation stands for, as getopt_long reads it."""
    matches = [known for known in LONG if known.startswith(name)] if name else []
    return matches[0] if name not in LONG and len(matches) == 1 else name


def gpu_count(value: str, is_gres: bool = False) -> int:
    """The GPUs of a value such as a100:8, 8 or a100:2,h100:2; with `is_gres`, such as gpu:a100:8 or gpu:4,tmp:1."""
    count = 0
    for part in value.split(","):
        name, _, rest = part.removeprefix("gres/").replace("=", ":").partition(":")
        size = (rest if is_gres else part).rpartition(":")[2].partition("(")[0]
        if not is_gres or name == "gpu":
            count += int(size) if size.isdigit() else 1
    return count
