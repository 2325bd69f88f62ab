"""Serving a GGUF file with llama.cpp's server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from backend.environments.llama_cpp import LlamaCppServer, Settings
from backend.environments.server_process import ServerError, ServerProcess
from backend.serve.client import ServeError, ask, port_in_use

NAME = "llama.cpp"
LOG_FILE = "llama.cpp.txt"
DEFAULT_CONTEXT = 4096  # tokens of a request; the KV cache of a model's whole context can take gigabytes


def what(jobs: Path, request: dict[str, Any]) -> str:
    """What is loaded. Raises ServeError."""
    file: Path = jobs / request["file"]
    if not file.is_file() or (request["adapter"] and not (jobs / request["adapter"]).is_file()):
        raise ServeError("The GGUF file was deleted. Export it again, then serve it.")
    return file.name


def start(folder: Path, jobs: Path, request: dict[str, Any], token: str, _wanted: Callable[[], bool]) -> ServerProcess:
    """The server, once it answers. Raises ServeError."""
    context = request["context"] or DEFAULT_CONTEXT
    others = {name: request[name] for name in ("name", "port", "threads", "template_kwargs")}
    others |= {"parallel": request["parallel"] or 1}
    others |= {"adapter": jobs / request["adapter"] if request["adapter"] else None}
    settings = Settings(jobs / request["file"], token, context, **others)
    try:
        return LlamaCppServer(Path(request["environment"]), settings, folder / LOG_FILE)
    except ServerError as error:
        if "couldn't bind" in str(error):
            raise port_in_use(request["port"]) from error
        raise ServeError(f"llama.cpp cannot serve the GGUF file: {error}") from error


def about(server: ServerProcess, request: dict[str, Any], token: str) -> dict[str, Any]:
    """The context, and whether the chat template takes tools. Raises ServeError."""
    model = ask(server, token, "/v1/models")["data"][0]["meta"]
    if request["context"] > model["n_ctx_train"]:
        raise ServeError(
            f"A context of {request['context']:,} tokens exceeds that of the model, {model['n_ctx_train']:,} tokens. "
            "Set the context to that or less."
        )
    template = ask(server, token, "/props")["chat_template_caps"]
    return {"context": model["n_ctx"], "has_tools": template["supports_tools"]}
