"""Option -> Gradio component: creates each field once, and the CSS that hides options without effect.

`layout.py` decides where each option goes; `place` rejects an unknown name and a name placed twice, and `missing()`
must be empty at the end.
"""

from __future__ import annotations

import math
from typing import Any

import gradio as gr

from backend.config.options import Option, by_name, options, text

MAX_SEGMENTS = 3  # a choice with more values becomes a menu
FILTERABLE_ABOVE = 12  # a menu with more choices can be filtered by typing


class Form:
    """The components of one page, in the order in which they were placed."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def place(self, *names: str) -> None:
        """Add the named options here. Raises ValueError for an unknown name or one placed already."""
        for name in names:
            if name not in by_name():
                raise ValueError(f"{name} is not an option")
            if name in self.components:
                raise ValueError(f"{name} is placed already")
            self.components[name] = create_component(by_name()[name])

    def missing(self) -> list[str]:
        """Options that have not been placed."""
        return [o.name for o in options() if o.name not in self.components]


def create_component(option: Option) -> Any:
    """The Gradio component of `option`, with its label, help, default and id."""
    common: dict[str, Any] = {
        "label": f"{option.label} ({option.unit})" if option.unit else option.label,
        "value": text(option, option.default),
        "info": option.help,
        "elem_id": option.element_id,
        "elem_classes": ["fp-field", f"fp-{field_kind(option)}", *(["fp-wide"] if is_wide(option) else [])],
        "min_width": 0,
        "interactive": True,  # otherwise Gradio disables a component that is only an output of events
    }
    match field_kind(option):
        case "segments":
            return gr.Radio(choices=[(label, value) for value, label in option.choices], **common)
        case "menu":
            return gr.Dropdown(
                choices=[(label, value) for value, label in option.choices],
                filterable=len(option.choices) > FILTERABLE_ABOVE,
                **common,
            )
        case "switch":
            return gr.Checkbox(**common)
        case "number":
            # No precision: Gradio would silently round 3.7 to 4. The check reports invalid values.
            return gr.Number(step=step_size(option), **common)
        case "lines":
            return gr.Textbox(lines=2, max_lines=8, **common)
        case _:
            return gr.Textbox(lines=1, max_lines=1, **common)


def field_kind(option: Option) -> str:
    """The kind of field for `option`: segments, menu, number, switch, line or lines."""
    if option.kind == "choice":
        short = all(len(label) <= 18 for _, label in option.choices)
        return "segments" if 1 < len(option.choices) <= MAX_SEGMENTS and short else "menu"
    if option.kind in ("int", "float"):
        return "number"
    if option.kind == "bool":
        return "switch"
    return "lines" if option.widget in ("lines", "text") else "line"


def is_wide(option: Option) -> bool:
    """Whether the field needs more width: a menu two columns, because of a long label; segments a whole row if the form
    is narrow."""
    lengths = [len(label) for _, label in option.choices]
    return {"menu": max(lengths, default=0) > 20, "segments": sum(lengths) > 26}.get(field_kind(option), False)


def step_size(option: Option) -> float:
    """The increment of the arrow keys: 1, or the leading digit of a default below 1 (0.0002 -> 0.0001)."""
    if option.kind == "int" or option.default >= 1:
        return 1
    return 10.0 ** math.floor(math.log10(option.default)) if option.default else 0.01
