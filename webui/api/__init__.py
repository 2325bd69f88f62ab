"""The page's own routes: one table, a handler each.

Floor 6. Imports: its rooms. `asking.py` turns requests into calls and errors into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.routing import Route

from webui.api import catalogue, checking, running
from webui.api.asking import Ask, Handler, Refusal, route
from webui.api.desk import Desk

GET: Mapping[str, Handler] = {
    "/rules": catalogue.rules_page,
    "/api/drafts/{id}": checking.load_draft,
    "/api/presets": checking.list_presets,
    "/api/presets/{name}": checking.load_preset,
    "/api/machines": checking.list_machines,
    "/api/runs": running.list_runs,
    "/api/runs/{id}": running.show,
    "/api/runs/{id}/values": running.values,
    "/api/runs/{id}/log": running.log,
    "/api/runs/{id}/log.txt": running.log_file,
    "/api/runs/{id}/metrics": running.points,
    "/api/runs/{id}/series": running.series,
    "/api/runs/{id}/metrics.csv": running.metrics_csv,
    "/api/runs/{id}/report.png": running.report_png,
    "/api/runs/{id}/spec.yaml": running.spec_yaml,
}
POST: Mapping[str, Handler] = {
    "/api/check": checking.check,
    "/api/import": checking.import_yaml,
    "/api/export": checking.export_yaml,
    "/api/config": checking.read_config,
    "/api/whatif": checking.what_if,
    "/api/fix": checking.fix_all,
    "/api/runs": running.start,
    "/api/runs/{id}/stop": running.stop,
    "/api/runs/{id}/resume": running.resume,
    "/api/runs/{id}/sweep": running.sweep,
}
DELETE: Mapping[str, Handler] = {"/api/runs/{id}": running.delete}


def routes(desk: Desk) -> list[Route]:
    """Every route of our own, and the answer to what none of them serves."""
    tables = (("GET", GET), ("POST", POST), ("DELETE", DELETE))
    found = [route(desk, method, path, handler) for method, table in tables for path, handler in table.items()]
    return [*found, *(route(desk, method, "/api/{rest:path}", _unknown) for method in ("GET", "POST", "PUT", "DELETE"))]


def _unknown(desk: Desk, ask: Ask) -> None:
    raise Refusal(404, f"There is nothing at api/{ask.path['rest'][:200]}.")
