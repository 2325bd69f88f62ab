"""The page's own routes: one table, a handler each.

Floor 6. Imports: its rooms. `asking.py` turns requests into calls and errors into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Route

from webui.api import checking, rules_page, runs
from webui.api.app_state import Desk
from webui.api.requests import Ask, Handler, Refusal, route

GET: Mapping[str, Handler] = {
    "/rules": rules_page.rules_page,
    "/api/drafts/{id}": checking.load_draft,
    "/api/presets": checking.list_presets,
    "/api/presets/{name}": checking.load_preset,
    "/api/machines": checking.list_machines,
    "/api/runs": runs.list_runs,
    "/api/runs/{id}": runs.show,
    "/api/runs/{id}/values": runs.values,
    "/api/runs/{id}/log": runs.log,
    "/api/runs/{id}/log.txt": runs.log_file,
    "/api/runs/{id}/metrics": runs.points,
    "/api/runs/{id}/series": runs.series,
    "/api/runs/{id}/metrics.csv": runs.metrics_csv,
    "/api/runs/{id}/report.png": runs.report_png,
    "/api/runs/{id}/spec.yaml": runs.spec_yaml,
}
POST: Mapping[str, Handler] = {
    "/api/check": checking.check,
    "/api/import": checking.import_yaml,
    "/api/export": checking.export_yaml,
    "/api/config": checking.read_config,
    "/api/whatif": checking.what_if,
    "/api/fix": checking.fix_all,
    "/api/runs": runs.start,
    "/api/runs/{id}/stop": runs.stop,
    "/api/runs/{id}/resume": runs.resume,
    "/api/runs/{id}/sweep": runs.sweep,
}
DELETE: Mapping[str, Handler] = {"/api/runs/{id}": runs.delete}


def routes(desk: Desk) -> list[Route]:
    """Every route of our own, and the answer to what none of them serves."""
    tables = (("GET", GET), ("POST", POST), ("DELETE", DELETE))
    found = [route(desk, method, path, handler) for method, table in tables for path, handler in table.items()]
    return [*found, *(route(desk, method, "/api/{rest:path}", _unknown) for method in ("GET", "POST", "PUT", "DELETE"))]


def _unknown(desk: Desk, ask: Ask) -> None:
    raise Refusal(404, f"There is nothing at api/{ask.path['rest'][:200]}.")
