"""Endpoints for the machines that a run can be planned for: the list, and the form for a custom one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from backend.config.options import SpecError
from backend.machine import Machine, describe, load, machine_from_mapping, normalize
from backend.machine.descriptions import GPUS
from backend.machine.keys import GPU_KEYS, KEYS, Key, as_text
from webui.api.app_state import AppState
from webui.api.requests import ApiError, RequestBody, State

COMMAND = "footplate machine"


class TextRequest(RequestBody):
    """The text of a machine description."""

    text: str


class MachineRequest(RequestBody):
    """The form's values, and the custom machine that they replace ('' adds one)."""

    values: dict[str, Any]
    replaced: str = ""


def list_machines(state: State) -> list[dict[str, Any]]:
    """This machine (with an empty name), the custom machines with the values of their forms, and those of presets."""
    here = {"name": "", "label": describe(state.machine.get())}
    known = [{"name": name, "label": describe(machine)} for name, machine in state.machines.items()]
    return [here, *(_custom(state, id) for id in state.custom_machines.ids()), *known]


def show_form() -> dict[str, Any]:
    """The fields of the form, and the command whose output fills them."""
    return {"command": COMMAND, "fields": _fields(KEYS)}


def read_text(body: TextRequest) -> dict[str, Any]:
    """The form's values for the text of a description. Raises ApiError with every problem."""
    try:
        values = load(body.text)
        machine_from_mapping(values)
    except SpecError as error:
        raise _api_error(error) from None
    return {"values": _texts(values)}


def save(state: State, body: MachineRequest) -> dict[str, str]:
    """Add or replace a custom machine. Raises ApiError with every problem."""
    try:
        return {"name": state.custom_machines.save(body.values, body.replaced)}
    except SpecError as error:
        raise _api_error(error) from None


def remove(state: State, name: str) -> None:
    """Remove a custom machine."""
    state.custom_machines.remove(name)


def find_machine(state: AppState, name: str) -> Machine:
    """The machine with that name; '' is this one. Raises ApiError, or SpecError for a custom one whose file is
    damaged."""
    if name in state.machines:
        return state.machines[name]
    custom = state.custom_machines
    if name and name not in custom.ids():
        known = ", ".join([*custom.ids(), *state.machines])
        raise ApiError(404, f"There is no machine {name!r}; the known machines are {known}.", field="machine")
    return custom.read(name) if name else state.machine.get()


def _custom(state: AppState, id: str) -> dict[str, Any]:
    """A custom machine. If its file is damaged, the form is empty, so that the user can fill it in again or remove the
    machine."""
    try:
        machine, values = state.custom_machines.described(id)
    except (SpecError, OSError):
        return {"name": id, "label": f"{id} (its file is damaged)", "values": {"name": id}}
    return {"name": id, "label": describe(machine), "values": _texts(values)}


def _fields(keys: Sequence[Key]) -> list[dict[str, Any]]:
    return [
        {
            "name": key.name,
            "label": f"{key.label} ({key.unit})" if key.unit else key.label,
            "help": key.help,
            "absent": key.absent,
            "choices": key.choices,
            "lines": key.kind == "versions",
            "hardware": key.hardware,
            "fields": _fields(GPU_KEYS) if key.kind == "gpus" else None,
            "suggestions": tuple(GPUS) if keys is GPU_KEYS and key.name == "name" else (),
        }
        for key in keys
    ]


def _texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """A description as the form shows it."""
    found = normalize(values)
    gpus = [{key.name: as_text(key, gpu.get(key.name)) for key in GPU_KEYS} for gpu in found.get("gpus", ())]
    return {**{key.name: as_text(key, found.get(key.name)) for key in KEYS}, "gpus": gpus}


def _api_error(error: SpecError) -> ApiError:
    """Every problem as a sentence that begins with the field's label, and the names of the fields."""
    sentences = [f"{_label(p.field)}: {p.message}." if p.field else f"{p.message}." for p in error.problems]
    return ApiError(422, " ".join(sentences), fields=[p.field for p in error.problems])


def _label(field: str) -> str:
    """The label of a field such as gpus.0.memory_gib; its name if there is no such field."""
    entry = re.fullmatch(r"gpus\.(\d+)\.?(.*)", field)
    name = entry[2] if entry else field
    label = next((key.label for key in (GPU_KEYS if entry else KEYS) if key.name == name), name)
    if not entry or (name and entry[1] == "0"):
        return label
    model = f"GPU model {int(entry[1]) + 1}"
    return f"{label} of {model}" if name else model
