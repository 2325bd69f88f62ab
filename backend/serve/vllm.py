"""Serving full weights, or a LoRA adapter on its base model, with vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.environments.server_process import ServerError, ServerProcess
from backend.environments.vllm import Settings, VllmServer
from backend.serve.client import ServeError, ask, free_port, port_in_use

NAME = "vLLM"
LOG_FILE = "vllm.txt"
# Values of the request that become settings as they are; folders in the request are relative to the run's folder.
VALUES = (
    "name", "rank", "revision", "dtype", "context", "parallel", "tensor_parallel_size", "gpu_memory_utilization",
    "trust_remote_code", "template_kwargs",
)  # fmt: skip


def what(jobs: Path, request: dict[str, Any]) -> str:
    """What is loaded. Raises ServeError."""
    if not (jobs.parent / request["folder"]).is_dir():
        raise ServeError("The model was deleted. Train or merge it again, then serve it.")
    return f"{request['name']} with vLLM, which can take minutes"


def start(folder: Path, jobs: Path, request: dict[str, Any], token: str, wanted: Callable[[], bool]) -> ServerProcess:
    """The server, once it answers or is no longer wanted. Raises ServeError."""
    own = str(jobs.parent / request["folder"])
    try:
        port = free_port(request["port"])  # checked again: the job may have waited for its GPUs
    except OSError as error:
        raise port_in_use(request["port"]) from error
    values = {name: request[name] for name in VALUES}
    if request["base"]:
        values |= {
            "adapter": own,
            "tokenizer": own,
            "generation_config": own if request["has_generation_config"] else "",
        }
    settings = Settings(request["base"] or own, token, port=port, **values)
    try:
        return VllmServer(Path(request["environment"]), settings, folder / LOG_FILE, wanted)
    except ServerError as error:
        if "Address already in use" in str(error):
            raise port_in_use(port) from error
        raise ServeError(f"vLLM cannot serve the model: {error}") from error


def about(server: ServerProcess, request: dict[str, Any], token: str) -> dict[str, Any]:
    """The context. Raises ServeError if the trained model is not served."""
    models = ask(server, token, "/v1/models")["data"]
    if request["name"] not in (names := [model["id"] for model in models]):
        raise ServeError(f"vLLM serves {', '.join(names)} instead of {request['name']}. Report this as a bug.")
    return {"context": next(length for model in models if (length := model.get("max_model_len")))}
