"""The page's own routes: one table per method, one endpoint per route.

`requests.py` parses requests and turns errors into JSON responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter

from webui.api import (
    benchmarks,
    chat,
    checking,
    columns,
    compare_runs,
    drafts,
    evaluations,
    examples,
    gguf,
    help_pages,
    hub_token,
    jobs,
    machines,
    merges,
    model_zip,
    paths,
    publish,
    quantized,
    rehearsals,
    rules_page,
    runs,
    runs_list,
    servers,
    sweeps,
    tunings,
    uploads,
)
from webui.api.requests import ApiError, ApiRoute, json_endpoint

Endpoint = Callable[..., Any]

GET: Mapping[str, Endpoint] = {
    "/rules": rules_page.rules_page,
    "/help": help_pages.first,
    "/help/search": help_pages.search,
    "/help/{name}": help_pages.show,
    "/help/pictures/{name}": help_pages.picture,
    "/api/drafts": drafts.list_versions,
    "/api/drafts/{id}": drafts.load_draft,
    "/api/presets": checking.list_presets,
    "/api/presets/{name}": checking.load_preset,
    "/api/hub-token": hub_token.state,
    "/api/machines": machines.list_machines,
    "/api/machines/form": machines.show_form,
    "/api/paths": paths.complete,
    "/api/runs": runs_list.list_runs,
    "/api/runs/{id}": runs.show,
    "/api/sweeps/{id}": sweeps.show,
    "/api/rehearsals/{id}": rehearsals.status,
    "/api/tunings/{id}": tunings.status,
    "/api/uploads": uploads.list_uploads,
    "/api/comparison": compare_runs.compare,
    "/api/comparison/evaluations": compare_runs.evaluations,
    "/api/comparison/curves.csv": compare_runs.curves_csv,
    "/api/comparison/curves.png": compare_runs.image,
    "/api/runs/{id}/chat": chat.show,
    "/api/runs/{id}/chat/tokens": chat.tokens,
    "/api/runs/{id}/chat/code": chat.code,
    "/api/runs/{id}/evaluations": evaluations.show,
    "/api/runs/{id}/evaluations/{job}/examples": evaluations.examples,
    "/api/runs/{id}/evaluations/{job}/examples.json": evaluations.download,
    "/api/runs/{id}/benchmarks": benchmarks.show,
    "/api/runs/{id}/benchmarks/{job}/samples.jsonl": benchmarks.download,
    "/api/runs/{id}/generations": runs.generations,
    "/api/runs/{id}/remedies": runs.list_remedies,
    "/api/runs/{id}/bundle.zip": runs.bundle_zip,
    "/api/runs/{id}/measurement.json": runs.measurement_json,
    "/api/runs/{id}/model.zip": model_zip.model_zip,
    "/api/runs/{id}/merges/{job}/model.zip": merges.download,
    "/api/runs/{id}/gguf/{job}/files/{name}": gguf.download,
    "/api/runs/{id}/servers/{job}/token": servers.token,
    "/api/runs/{id}/values": runs.values,
    "/api/runs/{id}/log": runs.log,
    "/api/runs/{id}/log.txt": runs.log_file,
    "/api/runs/{id}/metrics": runs.points,
    "/api/runs/{id}/series": runs.series,
    "/api/runs/{id}/metrics.csv": runs.metrics_csv,
    "/api/runs/{id}/report.{kind}": runs.report_image,
    "/api/runs/{id}/charts/{chart}.{kind}": runs.chart_image,
    "/api/runs/{id}/spec.yaml": runs.spec_yaml,
}
POST: Mapping[str, Endpoint] = {
    "/api/check": checking.check,
    "/api/drafts/{id}": drafts.save_draft,
    "/api/import": checking.import_yaml,
    "/api/examples": examples.show,
    "/api/columns": columns.show,
    "/api/columns/use": columns.use,
    "/api/export": checking.export_yaml,
    "/api/config": checking.download_model_config,
    "/api/fix": checking.apply_safe_fixes,
    "/api/machines/comparison": checking.compare_machines,
    "/api/hub-token": hub_token.store,
    "/api/hub-token/test": hub_token.test,
    "/api/machines": machines.save,
    "/api/machines/read": machines.read_text,
    "/api/runs": runs.start,
    "/api/runs/annotations": runs_list.annotate,
    "/api/runs/delete": runs_list.delete_runs,
    "/api/runs/dependents": runs_list.name_dependents,
    "/api/rehearsals": rehearsals.start,
    "/api/sweeps": sweeps.start,
    "/api/sweeps/check": sweeps.check,
    "/api/rehearsals/{id}/stop": rehearsals.stop,
    "/api/tunings": tunings.start,
    "/api/tunings/earlier": tunings.show_earlier,
    "/api/tunings/{id}/stop": tunings.stop,
    "/api/runs/{id}/chat": chat.start,
    "/api/runs/{id}/chat/requests": chat.send,
    "/api/runs/{id}/chat/end": chat.end,
    "/api/runs/{id}/chat/kept": chat.keep,
    "/api/runs/{id}/evaluations": evaluations.start,
    "/api/runs/{id}/benchmarks": benchmarks.start,
    "/api/runs/{id}/stop": runs.stop,
    "/api/runs/{id}/resume": runs.resume,
    "/api/runs/{id}/queue": runs.change_queue,
    "/api/runs/{id}/cleanup": runs.clean_up,
    "/api/runs/{id}/stacks": runs.explain_stacks,
    "/api/runs/{id}/merges": merges.start,
    "/api/runs/{id}/publications": publish.start,
    "/api/runs/{id}/publications/summary": publish.summarize,
    "/api/runs/{id}/gguf": gguf.start,
    "/api/runs/{id}/quantized": quantized.start,
    "/api/runs/{id}/servers": servers.start,
    "/api/runs/{id}/jobs/{job}/stop": jobs.stop,
}
PUT: Mapping[str, Endpoint] = {"/api/uploads": uploads.receive}
DELETE: Mapping[str, Endpoint] = {
    "/api/runs/{id}": runs.delete,
    "/api/runs/{id}/jobs/{job}": jobs.remove,
    "/api/machines/{name}": machines.remove,
    "/api/uploads/{name}": uploads.remove,
}


@cache
def router() -> APIRouter:
    """All routes, and a 404 response for every other path below /api. They do not depend on the app."""
    found = APIRouter(route_class=ApiRoute)
    for method, table in (("GET", GET), ("POST", POST), ("PUT", PUT), ("DELETE", DELETE)):
        for path, endpoint in table.items():
            found.add_api_route(path, json_endpoint(endpoint), methods=[method], response_model=None)
    found.add_api_route("/api/{rest:path}", json_endpoint(_unknown), methods=["GET", "POST", "PUT", "DELETE"])
    return found


def _unknown(rest: str) -> None:
    raise ApiError(404, f"There is no route api/{rest[:200]} for this method.")
