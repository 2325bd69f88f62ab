"""Endpoints for the Build view: check, fix, presets, import, export.

The form's values go through the same preflight check that starts a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend import importers, presets
from backend.config import RunSpec, consent, variables
from backend.config.conditions import without_effect
from backend.config.options import (
    MACHINE_FOLDERS,
    Problem,
    SpecError,
    by_name,
    effective,
    find,
    for_dataset,
    get,
    options,
    parse,
    shown,
    text,
)
from backend.config.sources import KEY, SOURCES, without_option
from backend.importers.foreign import Imported
from backend.inspect import download_config, is_refused, shares
from backend.launch.plan import ABOUT
from backend.machine import Machine
from backend.preflight import Report, build_case, estimate_json, preflight
from backend.recommended import recommended_values
from backend.registry import DEVICES
from backend.resolve import estimated_gpus, resolve
from backend.rules import Finding, Fix
from backend.tasks.autofix import autofix
from backend.tasks.compare_machines import lines as machine_lines
from backend.timing import time_json
from webui.api.app_state import AppState
from webui.api.drafts import LEFT_OUT, secret_names, stored, without_secrets
from webui.api.fixes import fix_json
from webui.api.machines import find_machine
from webui.api.requests import ApiError, FormRequest, RequestBody, State
from webui.api.strategies import devices_json, strategies_json


class CheckRequest(FormRequest):
    """The values are saved under the id `draft`, as edit number `edit` of `page`. `seq` is a number that the response
    repeats; `preset` is the name of the preset that the form was filled from."""

    draft: str = ""
    page: str = ""
    edit: int = 0
    preset: str = ""
    seq: int | None = None


class ValuesRequest(RequestBody):
    """The form's values."""

    values: dict[str, Any]


class ImportRequest(RequestBody):
    """A file's text, and the form's values that a DeepSpeed or accelerate config is merged into."""

    yaml: str
    values: dict[str, Any] | None = None


class ModelRequest(RequestBody):
    """A model on the Hugging Face Hub."""

    id: str
    revision: str = "main"


def compare_machines(state: State, body: FormRequest) -> list[dict[str, Any]]:
    """The time and price of the form's run on this machine, on custom machines and on the presets' machines."""
    spec, _ = parse_form(body.values)
    names = ["", *state.custom_machines.ids(), *state.machines]
    return machine_lines(spec, names, lambda variant, name: run_preflight(state, variant, name))


def check(state: State, body: CheckRequest) -> dict[str, Any]:
    """The preflight report of the form's values, which are saved as a draft."""
    if body.draft:
        state.drafts.save(body.draft, stored(body.values), body.page, body.edit)
    spec, problems = parse_form(body.values)
    report = run_preflight(state, spec, body.machine)
    measured, timed = state.peaks.latest(report), state.times.latest(report)
    return {
        "place": _place(report),
        "seq": body.seq,
        "status": _status(report, problems),
        "findings": findings_json(report, spec),
        "invalid": [{"field": p.field, "message": p.message} for p in problems],
        "memory": {
            **estimate_json(report.estimate),
            "device_label": _device_label(report),
            "assumed": report.assumed,
            "download": _downloadable_config(report),
            "measured": measured.as_json(report) if measured else None,
            "placement": report.placement,
        },
        "time": {
            **time_json(report.time),
            "assumed": report.assumed,
            "is_measurable": bool(report.facts.cpu_unknown),
            "measured": timed.for_next(report) if timed else None,
        },
        "datasets": [
            [report.spec.data.title_of(index), share] for index, share in enumerate(shares(report.spec, report.facts))
        ],
        "devices": devices_json(report),
        "strategies": strategies_json(report, spec),
        "examples": {
            "checked": report.facts.num_checked,
            "total": report.facts.num_in_files,
            "pending": report.facts.examples_pending,
            "text": report.checked,
            "note": report.unchecked_note,
        },
        "pending": report.facts.architecture_pending or report.facts.examples_pending or report.facts.cpu_pending,
        "preview": _preview(report, state.runs),
        "recommended": _recommended(state, report, spec, body.preset),
        "title": report.title,
        "summary": report.summary,
        "modules": _module_names(report),
    }


def apply_safe_fixes(state: State, body: FormRequest) -> dict[str, Any]:
    """All safe fixes as one patch, and the titles of the errors that remain."""
    spec, _ = parse_form(body.values)
    machine = find_machine(state, body.machine)
    result = autofix(spec, lambda changed: build_case(changed, machine, Path.cwd()))
    patch = {option.name: get(result.spec, option.name) for option in options()}
    return {
        **fix_json(Fix(", ".join(result.applied), patch), spec),
        "count": len(result.applied),
        "remaining": [finding.title for finding in result.remaining],
    }


def list_presets(state: State) -> list[dict[str, str]]:
    """The presets, without their values; `machine` is the one that a preset needs if this machine is too small for
    it."""
    here = state.machine.get()
    found = state.presets()
    needed = {p.name: "" if _is_sufficient(here, p.machine) else p.machine_name for p in found}
    return [{"name": p.name, "title": p.title, "about": p.about, "machine": needed[p.name]} for p in found]


def load_preset(state: State, name: str) -> dict[str, Any]:
    """A preset's values, for the form. The run's name stays empty, so that it follows the model."""
    for preset in state.presets():
        if preset.name == name:
            return {"values": {**form_values(preset.spec), "logging.run_name": ""}}
    raise ApiError(404, f"There is no preset {name!r}.")


def import_yaml(body: ImportRequest) -> dict[str, Any]:
    """The values of a YAML file. A DeepSpeed or accelerate config is merged into the form's values; `kept` names the
    keys that went into the extra config, `different` the keys of another tool that mean something else here, `missing`
    those that mean nothing here, `runs_code` the settings that can run code or decide where data is sent. These
    settings are not in the values, but in `consent`, the values to set once the user agrees. SpecError names the line,
    or each field, that is wrong."""
    kind, now = importers.detect_format(body.yaml), RunSpec()
    if kind:
        now = parse_valid_form(body.values) if body.values is not None else now
        found = importers.import_file(body.yaml, now, Path.cwd())
    else:
        spec = presets.load(body.yaml)
        found = Imported(spec, missing=without_effect(spec))
    is_merged = kind in ("deepspeed", "accelerate")  # merged into a form whose values the user knows
    safe = consent.without_consent(found.spec, now if is_merged else RunSpec())
    known = by_name()
    return {
        "values": form_values(safe.spec),
        "kept": found.kept,
        "different": found.different,
        "missing": found.missing,
        "runs_code": safe.listed,
        "consent": {name: text(known[name], value) for name, value in safe.patch.items()},
    }


def export_yaml(body: ValuesRequest) -> dict[str, Any]:
    """The values that differ from the defaults, as YAML, whether they name files or folders that the training reads,
    the options that name folders of the machine (`folders`), and the variables that are left out because they seem to
    hold secrets."""
    spec = parse_valid_form(without_secrets(body.values))
    used = effective(spec)
    folders = [name for name in MACHINE_FOLDERS if get(used, name)]
    about = {"has_paths": _has_paths(used), "folders": folders, LEFT_OUT: secret_names(body.values)}
    return {"yaml": presets.dump(spec), **about}


def _has_paths(spec: RunSpec) -> bool:
    of_datasets = ((each.source, each.validation) for each in spec.data.datasets)
    has_files = any(source == "files" or (source, kind) == ("hub", "files") for source, kind in of_datasets)
    read = (option.name for option in options() if option.path and option.name not in MACHINE_FOLDERS)
    return has_files or any(get(spec, name) for name in read)


def download_model_config(body: ModelRequest) -> dict[str, str]:
    """Download the config.json of a model on the Hub, which the memory estimate needs."""
    if error := download_config(body.id, body.revision):
        raise ApiError(502, f"{body.id}: {error}.", field="model.hub_id", refused=is_refused(error))
    return {"id": body.id}


# -- shared with runs.py -----------------------------------------------------------------------------------------


def parse_form(values: Mapping[str, Any]) -> tuple[RunSpec, list[Problem]]:
    """The spec of the form's values, and their problems. An invalid value counts as its default, so that the rest can
    be checked; in a hidden field it has no effect and is not reported."""
    problems: list[Problem] = []
    rest = dict(values)
    while True:
        try:
            spec = parse(rest)
            break
        except SpecError as error:
            problems += error.problems
            if not (invalid := {p.field for p in error.problems if valid_without(rest, p.field) != rest}):
                raise
            for name in invalid:
                rest = valid_without(rest, name)
    return spec, [p for p in problems if is_shown(spec, p.field)]


def is_shown(spec: RunSpec, name: str) -> bool:
    """Whether an option is visible; for an option of one of several datasets, in that dataset's card. True for any
    other name."""
    if (match := KEY.fullmatch(name)) and match[2] != "weight" and int(match[1]) < len(spec.data.datasets):
        spec, name = for_dataset(spec, int(match[1])), f"data.{match[2]}"
    option = by_name().get(name)
    return option is None or shown(spec, option)


def valid_without(values: Mapping[str, Any], field: str) -> dict[str, Any]:
    """`values` without an invalid field, which may be an option of one of several datasets."""
    if field.startswith(f"{SOURCES}["):
        return {**values, SOURCES: without_option(values.get(SOURCES, ""), field)}
    return {name: value for name, value in values.items() if name != field}


def parse_valid_form(values: Mapping[str, Any]) -> RunSpec:
    """The spec of the form's values. Raises SpecError that names every visible field with an invalid value."""
    spec, problems = parse_form(values)
    if problems:
        raise SpecError(problems)
    return spec


def run_preflight(state: AppState, spec: RunSpec, machine: str = "", wait_seconds: float = 0) -> Report:
    """The preflight report of `spec` on the named machine; '' is this one. Raises ApiError."""
    return state.starts.applied(preflight(spec, find_machine(state, machine), Path.cwd(), wait_seconds))


def not_started(findings: list[dict[str, Any]]) -> ApiError:
    """The error response for a spec with these findings, some of which are errors."""
    titles = "; ".join(f["title"].rstrip(".") for f in findings if f["level"] == "error")
    return ApiError(422, f"Not started: {titles}.", findings=findings)


def report_of_form(state: AppState, body: FormRequest, wait_seconds: float) -> Report:
    """The preflight report of a form whose values are used right away. Raises ApiError for an invalid value."""
    spec, problems = parse_form(body.values)
    if problems:
        named = "; ".join(f"{p.field} {p.message}" for p in problems)
        raise ApiError(422, f"Not started: {named}.", field=problems[0].field)
    return run_preflight(state, spec, body.machine, wait_seconds)


def form_values(spec: RunSpec) -> dict[str, Any]:
    """Every option as its field shows it."""
    return {option.name: text(option, get(spec, option.name)) for option in options()}


def findings_json(report: Report, spec: RunSpec) -> list[dict[str, Any]]:
    """The report's findings for the page."""
    return [_finding(finding, spec) for finding in report.findings]


# -- parts of the report -----------------------------------------------------------------------------------------


def _place(report: Report) -> str:
    """A description of the machine, or of several such machines for a run with more nodes; '' for this machine."""
    return report.on_nodes(report.machine.name) if report.machine.name else ""


def _status(report: Report, problems: list[Problem]) -> dict[str, str]:
    if problems:
        count = len(problems)
        return {"level": "invalid", "text": f"Cannot run: {count} invalid value{'s' if count > 1 else ''}"}
    return {"level": report.level, "text": report.verdict}


def _finding(finding: Finding, spec: RunSpec) -> dict[str, Any]:
    return {
        "code": finding.code,
        "slug": finding.slug,
        "level": finding.level,
        "title": finding.title,
        "message": finding.message,
        "reason": finding.reason,
        "fields": _offered(finding.fields, spec),
        "source": finding.source,
        "fixes": [fix_json(fix, spec) for fix in finding.fixes],
    }


def _offered(fields: Sequence[str], spec: RunSpec) -> list[str]:
    """The options of a finding that have an effect, for example data.files and not data.hub_id; all if none has."""
    return [name for name in fields if _has_effect(name, spec)] or list(fields)


def _has_effect(name: str, spec: RunSpec) -> bool:
    option, of_dataset = find(name), KEY.fullmatch(name)
    return option is None or shown(for_dataset(spec, int(of_dataset[1])) if of_dataset else spec, option)


def _recommended(state: AppState, report: Report, spec: RunSpec, name: str) -> dict[str, Any] | None:
    """A fix that sets the usual values in place of those that a demo preset chose for its own model and data."""
    preset = next((preset for preset in state.presets() if preset.name == name), None)
    count = report.run.num_eval_examples if report.facts.counts_are_exact else None

    def total_steps(changed: RunSpec) -> int | None:
        return resolve(changed, report.machine, report.facts).total_steps

    patch = recommended_values(spec, preset.spec, count, total_steps) if preset else {}
    return fix_json(Fix(preset.title, patch, False), spec) if preset and patch else None


def _preview(report: Report, runs: Path) -> dict[str, Any]:
    plan, hide = report.preview, variables.hide_values
    return {
        "command": hide(plan.command()),
        "others": [{"name": node, "text": hide(plan.command(node))} for node in plan.other_nodes],
        "files": [{"name": name, "text": hide(body), "about": ABOUT[name]} for name, body in plan.files.items()],
        "env": dict(plan.env),
        "notes": list(plan.notes),
        "script": hide(plan.script(str(runs / "by-hand"))),
    }


def _module_names(report: Report) -> dict[str, list[str]]:
    """The model's module names, for the fields that take module names."""
    shape = report.facts.shape
    if shape is None:
        return {}
    rest = [name for name in shape.module_names if name not in shape.lora_target_names]  # embeddings, norms and heads
    return {
        "lora.target_modules": list(shape.lora_target_names),
        "lora.modules_to_save": rest,
        "method.freeze_extra_modules": rest,
    }


def _downloadable_config(report: Report) -> dict[str, str] | None:
    """The Hub model whose config.json is needed for the memory estimate and is not in the cache."""
    model = report.spec.model
    unknown = model.source == "hub" and model.hub_id and report.facts.shape is None and not report.facts.is_downloaded
    return {"id": model.hub_id, "revision": model.revision} if unknown else None


def _device_label(report: Report) -> str:
    """The devices that the estimate is about: the names of those that the run uses, else their type."""
    run, machine = report.run, report.machine
    names = dict.fromkeys(gpu.name for gpu in estimated_gpus(run, machine)) if run.device == machine.device else ()
    return ", ".join(names) or DEVICES[run.device].label


def _is_sufficient(here: Machine, needed: Machine) -> bool:
    """Whether `here` has as many devices as `needed`, each with about as much memory (the driver reserves some)."""
    device_bytes = max((gpu.total_bytes for gpu in needed.gpus), default=0) * 0.9
    return sum(gpu.total_bytes >= device_bytes for gpu in here.gpus) >= len(needed.gpus) * needed.nodes
