"""Option -> widget: makes each field once, and the CSS that shows it when it has an effect.

Floor 6. Imports: options, gradio. `layout.py` places names; `place` refuses an unknown name and a name placed
twice, and `missing()` must be empty at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import gradio as gr

from backend.options import Option, by_name, options, text

MOST_SEGMENTS = 3


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
            return gr.Dropdown(choices=[(label, value) for value, label in option.choices], filterable=False, **common)
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
    return sorted({name for option in options() for name in option.when})


def visibility_css(found: Iterable[Option] = ()) -> str:
    """CSS that hides each option whose `when` does not hold, keyed on `body[data-*]`: the same data as Python's."""
    rules = []
    for option in found or options():
        for name, allowed in option.when.items():
            key = "data-" + name.replace(".", "-").replace("_", "-")
            nots = "".join(f':not([{key}="{value}"])' for value in allowed)
            rules.append(f"body[{key}]{nots} #{option.element_id}{{display:none!important}}")
    return "\n".join(rules)
