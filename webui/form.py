"""Option -> widget: makes each field once, and the CSS that shows it when it has an effect.

Floor 6. Imports: options, gradio. `layout.py` places names; `place` refuses an unknown name and a name placed
twice, and `missing()` must be empty at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import gradio as gr

from backend.config.options import Option, by_name, options, text

MOST_SEGMENTS = 3
LONG = 12  # choices from which on a menu can be typed into


class Form:
    """The widgets of one page, in the order in which they were placed."""

    def __init__(self) -> None:
        self.widgets: dict[str, Any] = {}

    def place(self, *names: str) -> None:
        """Put the named options here. Raises ValueError for an unknown name or one placed already."""
        for name in names:
            if name not in by_name():
                raise ValueError(f"{name} is no option")
            if name in self.widgets:
                raise ValueError(f"{name} is placed already")
            self.widgets[name] = widget(by_name()[name])

    def missing(self) -> list[str]:
        """Options that nobody placed."""
        return [o.name for o in options() if o.name not in self.widgets]


def widget(option: Option) -> Any:
    """The Gradio component of `option`, with its help, its default and its id."""
    common: dict[str, Any] = {
        "label": f"{option.label} ({option.unit})" if option.unit else option.label,
        "value": text(option, option.default),
        "info": option.help,
        "elem_id": option.element_id,
        "elem_classes": ["fp-field", f"fp-{shape(option)}", *(["fp-wide"] if wide(option) else [])],
        "min_width": 0,
    }
    match shape(option):
        case "segments":
            return gr.Radio(choices=[(label, value) for value, label in option.choices], **common)
        case "menu":
            return gr.Dropdown(
                choices=[(label, value) for value, label in option.choices],
                filterable=len(option.choices) > LONG,
                **common,
            )
        case "switch":
            return gr.Checkbox(**common)
        case "number":
            # No precision: it would round 3.7 to 4 without a word. What is wrong is said by the check.
            return gr.Number(step=step(option), **common)
        case "lines":
            return gr.Textbox(lines=2, max_lines=8, **common)
        case _:
            return gr.Textbox(lines=1, max_lines=1, **common)


def shape(option: Option) -> str:
    """Which kind of field shows `option`."""
    if option.kind == "choice":
        short = all(len(label) <= 18 for _, label in option.choices)
        return "segments" if 1 < len(option.choices) <= MOST_SEGMENTS and short else "menu"
    if option.kind in ("int", "float"):
        return "number"
    if option.kind == "bool":
        return "switch"
    return "lines" if option.widget in ("lines", "text") else "line"


def wide(option: Option) -> bool:
    """Whether a menu needs two columns for its longest label."""
    return shape(option) == "menu" and max(len(label) for _, label in option.choices) > 20


def step(option: Option) -> float:
    """What the arrow keys add: 1, or the leading digit of a default below 1 (0.0002 -> 0.0001)."""
    if option.kind == "int" or option.default >= 1:
        return 1
    return 10.0 ** math.floor(math.log10(option.default)) if option.default else 0.01


def deciding() -> list[str]:
    """Options that decide whether others are shown."""
    return sorted({name for option in options() for condition in option.when for name in condition})


def visibility_css(found: Iterable[Option] = ()) -> str:
    """CSS that hides each option whose `when` does not hold, keyed on `body[data-*]`: the same data as Python's."""
    rules = []
    for option in found or options():
        # Hidden if of every condition one part fails: a rule for each way to choose those parts.
        for failing in itertools.product(*(condition.items() for condition in option.when)):
            nots = "".join(_other(name, allowed) for name, allowed in dict.fromkeys(failing))
            rules.append(f"body{nots} #{option.element_id}{{display:none!important}}")
    return "\n".join(rules)


def _other(name: str, allowed: Iterable[str]) -> str:
    """A selector of a page on which `name` has another value than these."""
    key = "data-" + name.replace(".", "-").replace("_", "-")
    return f"[{key}]" + "".join(f':not([{key}="{value}"])' for value in allowed)
