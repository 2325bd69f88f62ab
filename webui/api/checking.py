"""The routes of the build page: check, drafts, presets, import, export, the machine.

Floor 6. Imports: judge, machine, options, presets, rules, memory. What the form sends is judged by the same code
that starts a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.compare import Variant, suggestion, variants
from backend.config import RunSpec, importers, presets
from backend.config.options import Problem, SpecError, by_name, get, options, parse, shown, text
from backend.inspect import fetch
from backend.launch.plan import ABOUT
from backend.machine import Machine, describe
from backend.preflight import Judgement, described, judge, looked
from backend.registry import DEVICES
from backend.resolve import device
from backend.rules import Case, Finding, Fix
from backend.rules.autofix import mend
from webui.api.app_state import Desk
from webui.api.requests import Ask, Refusal


def check(desk: Desk, ask: Ask) -> dict[str, Any]:
    """What the values come to; and they are kept as a draft."""
    values = ask.table("values")
    if draft := ask.text("draft", ""):
        desk.drafts.save(draft, values)
    spec, problems = understood(values)
    elsewhere = ask.text("machine", "")
    found = judged(desk, spec, elsewhere)
    return {
        "place": found.machine.name if elsewhere else "",
        "seq": ask.body.get("seq"),
        "verdict": _verdict(found, problems),
        "findings": findings_of(found, spec),
        "invalid": [{"field": p.field, "message": p.message} for p in problems],
        "memory": {**described(found.estimate), "device_label": _device_label(found), "fetch": _fetchable(found)},
        "preview": _preview(found, desk.runs),
        "title": found.title,
        "summary": found.summary,
        "names": _names(found),
    }


def _names(found: Judgement) -> dict[str, list[str]]:
    """Module names that the model has, for the fields that want some: one click adds one."""
    shape = found.glance.shape
    if shape is None:
        return {}
    rest = [name for name in shape.modules if name not in shape.linear]  # what carries no adapter, and is small
    linear = {"lora.target_modules": list(shape.linear)}
    return {**linear, "lora.modules_to_save": rest, "method.freeze_extra_modules": rest}


def what_if(desk: Desk, ask: Ask) -> dict[str, Any]:
    """Every strategy for these values: what it takes, and a patch that leads there; and the one to suggest."""
    spec, _ = understood(ask.table("values"))
    found = judged(desk, spec, ask.text("machine", ""))
    case = Case(found.spec, found.machine, found.glance)
    ways = variants(case)
    best = suggestion(case, ways)
    return {
        "rows": [_way(v, found.spec) for v in ways],
        "best": {**_way(best[0], found.spec), "why": best[1]} if best else None,
    }


def fix_all(desk: Desk, ask: Ask) -> dict[str, Any]:
    """Safe fixes, until no error has one that leads on: the change in one, and the titles of the errors that are
    left."""
    spec, _ = understood(ask.table("values"))
    machine = place(desk, ask.text("machine", ""))
    found = mend(spec, lambda changed: looked(changed, machine, Path.cwd()))
    patch = {option.name: get(found.spec, option.name) for option in options()}
    return {
        **_fix(Fix(", ".join(found.applied), patch), spec),
        "count": len(found.applied),
        "left": [f.title for f in found.left],
    }


def _way(way: Variant, spec: RunSpec) -> dict[str, Any]:
    facts = {"fits": way.fits, "runs": way.runs, **_fix(Fix(way.name, way.patch), spec)}
    return {**asdict(way), **facts}


def _fetchable(found: Judgement) -> dict[str, str] | None:
    """The model of the hub whose config.json would tell the memory."""
    model = found.spec.model
    unknown = model.source == "hub" and model.hub_id and found.glance.shape is None and not found.glance.fetched
    return {"id": model.hub_id, "revision": model.revision} if unknown else None


def understood(values: Mapping[str, Any]) -> tuple[RunSpec, list[Problem]]:
    """The spec that `values` mean, and what is wrong in them. A wrong value counts as its default, so that the rest
    can be judged; in a hidden field it has no effect, nobody could see it, and it is no problem."""
    problems: list[Problem] = []
    rest = dict(values)
    while True:
        try:
            spec = parse(rest)
            break
        except SpecError as error:
            problems += error.problems
            wrong = {p.field for p in error.problems} & set(rest)
            if not wrong:
                raise
            rest = {name: value for name, value in rest.items() if name not in wrong}
    known = by_name()
    return spec, [p for p in problems if p.field not in known or shown(spec, known[p.field])]


def valid(values: Mapping[str, Any]) -> RunSpec:
    """The spec that `values` mean. Raises SpecError naming every shown field that is wrong."""
    spec, problems = understood(values)
    if problems:
        raise SpecError(problems)
    return spec


def judged(desk: Desk, spec: RunSpec, machine: str = "") -> Judgement:
    """What `spec` comes to on the machine of that name, or here. Raises Refusal."""
    return judge(spec, place(desk, machine), Path.cwd())


def place(desk: Desk, name: str) -> Machine:
    """The machine of that name; without one this machine. Raises Refusal."""
    if name and name not in desk.machines:
        raise Refusal(404, f"There is no machine {name!r}; there are {', '.join(desk.machines)}.", field="machine")
    return desk.machines[name] if name else desk.machine.get()


def values_of(spec: RunSpec) -> dict[str, Any]:
    """Every option as its field shows it."""
    return {option.name: text(option, get(spec, option.name)) for option in options()}


def findings_of(found: Judgement, spec: RunSpec) -> list[dict[str, Any]]:
    """The findings as the page draws them."""
    return [_finding(finding, spec) for finding in found.findings]


def load_draft(desk: Desk, ask: Ask) -> dict[str, Any]:
    """A draft's values, as they were typed. Options that are new since then are missing: they keep their default."""
    values = desk.drafts.load(ask.path["id"])
    if values is None:
        raise Refusal(404, "This draft is not there any more.")
    return {"values": {name: value for name, value in values.items() if name in by_name()}}


def list_presets(desk: Desk, ask: Ask) -> list[dict[str, str]]:
    """The presets, without their values; `machine` is the one that a preset wants and this one is not."""
    here = desk.machine.get()
    found = presets.presets()
    wants = {p.name: "" if _as_good(here, p.machine) else p.place for p in found}
    return [{"name": p.name, "title": p.title, "about": p.about, "machine": wants[p.name]} for p in found]


def _as_good(here: Machine, wanted: Machine) -> bool:
    """Whether `here` are as many devices, each with the memory; some of it is the driver's."""
    least = max((gpu.total_bytes for gpu in wanted.gpus), default=0) * 0.9
    return sum(gpu.total_bytes >= least for gpu in here.gpus) >= len(wanted.gpus) * wanted.nodes


def load_preset(desk: Desk, ask: Ask) -> dict[str, Any]:
    """A preset's values."""
    for preset in presets.presets():
        if preset.name == ask.path["name"]:
            return {"values": values_of(preset.spec)}
    raise Refusal(404, f"There is no preset {ask.path['name']!r}.")


def import_yaml(desk: Desk, ask: Ask) -> dict[str, Any]:
    """A YAML file's values; a configuration of DeepSpeed or accelerate is laid over the form's, and `kept` names what
    became further keys. SpecError names the line, or each field, that is wrong."""
    text = ask.text("yaml")
    if not importers.recognise(text):
        return {"values": values_of(presets.load(text)), "kept": []}
    spec, kept = importers.read(text, valid(ask.table("values")) if "values" in ask.body else RunSpec())
    return {"values": values_of(spec), "kept": kept}


def export_yaml(desk: Desk, ask: Ask) -> dict[str, Any]:
    """The values as YAML: what differs from the defaults."""
    return {"yaml": presets.dump(valid(ask.table("values")))}


def read_config(desk: Desk, ask: Ask) -> dict[str, str]:
    """Fetch the config.json of a model on the hub, so that its memory is known. Raises Refusal."""
    name = ask.text("id")
    if error := fetch(name, ask.text("revision", "main")):
        raise Refusal(502, f"{name}: {error}.", field="model.hub_id")
    return {"id": name}


def list_machines(desk: Desk, ask: Ask) -> list[dict[str, str]]:
    """This machine, under an empty name, and those that a run can be planned for."""
    here = {"name": "", "label": describe(desk.machine.get())}
    return [here, *({"name": name, "label": describe(machine)} for name, machine in desk.machines.items())]


def _verdict(found: Judgement, problems: list[Problem]) -> dict[str, str]:
    if problems:
        count = len(problems)
        return {"level": "invalid", "text": f"Cannot run: {count} value{'s are' if count > 1 else ' is'} not valid"}
    levels = {finding.level for finding in found.findings}
    level = next((level for level in ("error", "warning") if level in levels), "ok")
    return {"level": level, "text": found.verdict}


def _finding(finding: Finding, spec: RunSpec) -> dict[str, Any]:
    return {
        "code": finding.code,
        "level": finding.level,
        "title": finding.title,
        "message": finding.message,
        "fields": list(finding.fields),
        "source": finding.source,
        "fixes": [_fix(fix, spec) for fix in finding.fixes],
    }


def _fix(fix: Fix, spec: RunSpec) -> dict[str, Any]:
    known = by_name()
    changed = {name: value for name, value in fix.patch.items() if get(spec, name) != value}
    diff = [
        {"name": n, "label": known[n].label, "from": _said(n, get(spec, n)), "to": _said(n, value)}
        for n, value in changed.items()
    ]
    patch = {n: text(known[n], v) for n, v in changed.items()}
    return {"label": fix.label, "safe": fix.safe, "cost": fix.cost, "peak": fix.peak, "patch": patch, "diff": diff}


def _said(name: str, value: Any) -> Any:
    """A value in a person's words: a choice by its label, a list as its text."""
    option = by_name()[name]
    return dict(option.choices).get(value, value) if option.choices else text(option, value)


def _preview(found: Judgement, runs: Path) -> dict[str, Any]:
    plan = found.plan
    return {
        "command": plan.command(),
        "others": [{"name": node, "text": plan.command(node)} for node in plan.others],
        "files": [{"name": name, "text": body, "about": ABOUT[name]} for name, body in plan.files.items()],
        "env": dict(plan.env),
        "notes": list(plan.notes),
        "script": plan.script(str(runs / "by-hand")),
    }


def _device_label(found: Judgement) -> str:
    """What the memory bar is about."""
    family = device(found.spec, found.machine)
    return found.machine.gpus[0].name if found.machine.gpus and family != "cpu" else DEVICES[family].label
