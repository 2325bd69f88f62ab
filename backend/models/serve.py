"""Serving a model of a run with an OpenAI-compatible API: a GGUF file with llama.cpp's server, or weights and adapters
with vLLM. A job of the run, whose process is `backend.serve`."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend import environments, registry
from backend.machine import probe
from backend.models import chat, gguf, merge, system_prompt, trained, vllm
from backend.models.gguf import FORMATS
from backend.models.python_text import arguments, literal
from backend.models.spec import read_spec
from backend.paths import environment_folder
from backend.runs import SERVE_TOKEN, SPEC, TOKEN, files, jobs
from backend.runs.folder import ALIVE, Run, RunError, StopTimeouts
from backend.serve.client import free_port

MIN_TOKEN, MAX_TOKEN = 16, 512  # characters
LLAMA_CPP, VLLM = "llama.cpp", "vllm"  # the engines
MAX_CONTEXT, MAX_PARALLEL = 2**20, {LLAMA_CPP: 64, VLLM: 1024}
# The settings that only one engine has, with their default values.
OWN: Mapping[str, Mapping[str, Any]] = {
    LLAMA_CPP: {"file": "", "format": "", "threads": 1},
    VLLM: {"step": None, "merged": False, "dtype": "auto", "tensor_parallel_size": 1, "gpu_memory_utilization": 0.9},
}
DTYPES = ("auto", "bfloat16", "float16", "float32")
OR_VLLM = "Or serve the weights with vLLM on an NVIDIA GPU, after `footplate env create vllm`."
CPU = dict(registry.NO_GPUS)  # the packages of the environment compute on the CPU only
TIMEOUTS = StopTimeouts(save=5.0, discard=5.0, sigterm=5.0)  # there is nothing to save
VLLM_TIMEOUTS = StopTimeouts(save=20.0, discard=20.0, sigterm=10.0)  # vLLM frees GPUs when it ends


@dataclass(frozen=True)
class Settings:
    """`engine`: llama.cpp or vllm, '' to choose it from the other settings and the run; `port`: 0 for a free one;
    `context`: tokens of a request with its output, 0 for the engine's default; `parallel`: requests at the same time, 0
    for the engine's default.

    Of llama.cpp: `file`: the name or path of an exported file, '' for the newest; `format`: only files of this format,
    '' for any. Of vLLM: `step`: of the checkpoint, None for the final model; `merged`: serve the merged model; `dtype`:
    auto for the compute dtype of training; `tensor_parallel_size`: GPUs; `gpu_memory_utilization`: the fraction of
    their memory to use."""

    file: str = ""
    format: str = ""
    port: int = 0
    context: int = 0
    parallel: int = 0
    threads: int = 1
    engine: str = ""
    step: int | None = None
    merged: bool = False
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9

    def changed(self, engine: str) -> list[str]:
        """The settings of this engine that are set."""
        return [name for name, default in OWN[engine].items() if getattr(self, name) != default]

    def check(self) -> None:
        """Raises RunError."""
        parallel = MAX_PARALLEL.get(self.engine)
        if parallel is None:
            raise RunError(f"The engine {self.engine} is not supported. Choose {LLAMA_CPP} or {VLLM}.")
        if self.format not in ("", *FORMATS):
            raise RunError(f"The GGUF format {self.format} is not supported. Choose one of {', '.join(FORMATS)}.")
        if self.dtype not in DTYPES:
            raise RunError(f"The dtype {self.dtype} is not supported. Choose one of {', '.join(DTYPES)}.")
        limits = {"context": (0, MAX_CONTEXT), "parallel": (0, parallel), "threads": (1, os.cpu_count() or 1)}
        limits["tensor_parallel_size"] = (1, 64)
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise RunError(f"{name} must be from {least} to {most:,}; it is {value:,}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RunError(
                f"gpu_memory_utilization must be above 0 and at most 1; it is {self.gpu_memory_utilization:g}."
            )
        if self.port and not 1024 <= self.port < 2**16:
            raise RunError(f"port must be from 1024 to 65535, or 0 for a free one; it is {self.port}.")


def start(run: Run, settings: Settings, token: str = "") -> Run:
    """The job that serves a model of the run; `token`: what clients have to send, '' for a random one. Raises RunError,
    for example if the run already has a server."""
    engine = engine_of(run, settings)
    settings = replace(settings, engine=engine)
    settings.check()
    if others := settings.changed(LLAMA_CPP if engine == VLLM else VLLM):
        raise RunError(f"{engine} has no setting {' or '.join(others)}. Remove it, or choose the other engine.")
    own, env, devices = (_with_vllm if engine == VLLM else _with_llama_cpp)(run, settings)
    request = {
        "engine": engine,
        "name": run.name,
        "port": settings.port,
        "context": settings.context,
        "parallel": settings.parallel,
        "template_kwargs": dict(read_spec(run).data.template_kwargs),
        **own,
    }
    with jobs.alone(run):
        if (job := current(run)) and job.state in ALIVE:
            command = f"footplate stop {shlex.quote(str(job.path))}"
            raise RunError(f"A model of this run is being served already. Stop it first: `{command}`.")
        _check_port(settings.port)
        for earlier in jobs.find_all(run, jobs.SERVE):
            earlier.delete()
        texts = {TOKEN: token or secrets.token_urlsafe(32)}  # mode 0600, like all files of a run
        job = jobs.create(run, jobs.SERVE, request, env, devices, texts)
        try:
            job.start(timeouts=VLLM_TIMEOUTS if engine == VLLM else TIMEOUTS)
        except RunError:
            (job.path / TOKEN).unlink(missing_ok=True)
            raise
        return job


def engine_of(run: Run, settings: Settings) -> str:
    """The requested engine. By default, vLLM if one of its settings is set, or if the run has no GGUF file and the
    environment exists."""
    if settings.engine or settings.changed(LLAMA_CPP):
        return settings.engine or LLAMA_CPP
    has_vllm = environments.is_complete(vllm.ENVIRONMENT) and not gguf.exported(run)
    return VLLM if settings.changed(VLLM) or has_vllm else LLAMA_CPP


def _with_llama_cpp(run: Run, settings: Settings) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """What the process needs to know, its environment and its devices. Raises RunError."""
    exports = f"export the model with `footplate export-model {run.id}`, and serve it. {OR_VLLM}"
    gguf.require_environment("serve the model again" if gguf.exported(run) else exports.rstrip("."))
    export, file = find_file(run, settings)
    request = {
        "file": str(file.relative_to(export.path.parent)),
        "adapter": str(adapter.relative_to(export.path.parent)) if (adapter := gguf.adapter_of(file)) else "",
        "format": gguf.as_json(export)["format"],
        "threads": settings.threads,
        "environment": str(environment_folder(gguf.ENVIRONMENT)),
    }
    return request, CPU, {}


def _with_vllm(run: Run, settings: Settings) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """What the process needs to know, its environment and its devices. Raises RunError."""
    model = vllm.find_model(run, settings.step, settings.merged)
    if reason := vllm.why_not(run, model):
        raise RunError(reason)
    if missing := environments.missing(vllm.ENVIRONMENT, "vLLM is"):
        raise RunError(f"{missing}, then serve the model again.")
    env, devices = vllm.place(run, probe(run.path), settings.tensor_parallel_size)
    request = vllm.request(run, model, settings.dtype, settings.tensor_parallel_size)
    memory = {"gpu_memory_utilization": settings.gpu_memory_utilization}
    return {**request, **memory, "environment": str(environment_folder(vllm.ENVIRONMENT))}, env, devices


def vllm_offer(run: Run) -> dict[str, Any] | None:
    """For the page: the settings with which vLLM serves the run's newest model, merged if it cannot be served as an
    adapter, or the reason why it cannot; None if vLLM is not installed, or the run has no model."""
    model = trained.find(run) if environments.is_complete(vllm.ENVIRONMENT) else None
    if model is None:
        return None
    offer = {"reason": "", "note": vllm.NOT_RUN, "step": model.step, "merged": False}
    try:
        reason = vllm.why_not(run, model)
        if reason and model.base and (job := merge.find(run, model)) and job.result().get("model"):
            merged = vllm.find_model(run, model.step, True)
            return {**offer, "reason": vllm.why_not(run, merged), "merged": True}
    except RunError as error:
        reason = str(error)
    return {**offer, "reason": reason}


def current(run: Run) -> Run | None:
    """The newest job that serves, or has served, a model of the run."""
    return next(iter(jobs.find_all(run, jobs.SERVE)), None)


def find_file(run: Run, settings: Settings) -> tuple[Run, Path]:
    """The export, and its GGUF file, that the settings name. Raises RunError."""
    exports = [(job, file) for job in gguf.exported(run) if (file := gguf.file_of(job))]
    of_format = [found for found in exports if settings.format in ("", gguf.as_json(found[0])["format"])]
    for job, file in of_format:
        if settings.file in ("", file.name) or Path(settings.file).resolve() == file:
            return job, file
    if settings.file and of_format:
        names = ", ".join(str(file) for _, file in of_format)
        raise RunError(f"{settings.file} is not a GGUF file of this run. Its files are: {names}.")
    kind = f" in {settings.format}" if settings.format else ""
    command = f"footplate export-model {run.id}" + (f" --format {settings.format}" if settings.format else "")
    raise RunError(
        f"{run.id} has no GGUF file of its model{kind}. Export one first: `{command}`, or Export as GGUF on the run's "
        f"page. {OR_VLLM}"
    )


def _check_port(port: int) -> None:
    """Raise RunError if another program uses the port."""
    try:
        free_port(port)
    except OSError as error:
        raise RunError(
            f"Port {port} of 127.0.0.1 cannot be used: {error.strerror}. Choose another port, or 0 for a free one."
        ) from error


def own_token(file: str = "") -> str:
    """The user's own token, from a file or else from the environment; '' for a random one. Raises RunError."""
    token, place = os.environ.get(SERVE_TOKEN, ""), SERVE_TOKEN
    if file:
        try:
            token, place = files.read_private_line(Path(file), "--token-file"), file
        except files.PrivateFileError as error:
            raise RunError(str(error)) from None
    elif not token:
        return ""
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise RunError(
            f"The API token in {place} cannot be used: it must have {MIN_TOKEN} to {MAX_TOKEN} letters, digits and "
            "punctuation marks, without spaces."
        )
    return token


def token_of(job: Run) -> str:
    """The API token of a running server. If the server has ended, the token is removed: a killed server could not do
    that. Raises RunError."""
    if job.state not in ALIVE:
        (job.path / TOKEN).unlink(missing_ok=True)
    try:
        return files.read_text(job.path / TOKEN)
    except OSError:
        raise RunError("The server has ended, and its API token was removed.") from None


def as_json(job: Run) -> dict[str, Any]:
    """For page and command line: the job, and, once the server answers requests, its address with example requests."""
    request = jobs.request(job.path, jobs.SERVE)
    progress = job.progress() if job.state == "running" else {}
    shown = {name: request.get(name) for name in ("engine", "name", "format", "parallel", "threads")}
    served = job.path.parent / str(request.get("file")) if request.get("engine") != VLLM else _folder(job, request)
    shown |= {"file": str(served), "adapter": request.get("adapter", ""), "address": progress.get("address")}
    shown |= {"note": vllm.NOT_RUN if request.get("engine") == VLLM else ""}
    if request.get("engine") == LLAMA_CPP:
        shown["parallel"] = request.get("parallel") or 1
    shown |= {"context": progress.get("context"), "without_tools": _without_tools(request, progress)}
    shown |= {"token_file": str(job.path / TOKEN)}
    examples = _examples(job) if shown["address"] else {"is_chat": True}
    return {**jobs.as_json(job), **shown, "curl": "", "python": "", **examples}


def _without_tools(request: Mapping[str, Any], progress: Mapping[str, Any]) -> str:
    """What happens to the tools of a request, as a sentence; '' if the model gets them."""
    if request.get("engine") == VLLM:
        return "Requests with tools are refused: vLLM needs a parser for the model's tool calls, and none is set."
    unsupported = "The chat template does not support tools: llama.cpp ignores the tools of a request."
    return unsupported if progress.get("has_tools") is False else ""


def _folder(job: Run, request: Mapping[str, Any]) -> Path:
    """The folder of the model that vLLM serves."""
    return job.path.parent.parent / str(request.get("folder"))


def _examples(job: Run) -> dict[str, Any]:
    """A request with curl, and with the openai package; a chat if the model was trained for chats."""
    run = Run(job.path.parent.parent)
    model = trained.find(run)
    try:
        is_chat = not model or chat.mode_of(read_spec(run), model.folder) == chat.CHAT
    except RunError:  # the spec can no longer be read, but the server continues
        is_chat = True
    if not is_chat:
        return {**requests(job, {"prompt": "Once upon a time"}), "is_chat": False}
    system = system_prompt.of_run(run.path / SPEC)
    before = [{"role": "system", "content": system}] if system else []
    return {**requests(job, {"messages": [*before, {"role": "user", "content": "Hello!"}]}), "is_chat": True}


def engine_in(job: Run) -> str:
    """The engine of a server."""
    return str(jobs.request(job.path, jobs.SERVE).get("engine"))


def differs(job: Run) -> str:
    """What a server has, and why its outputs can differ from those of the trained model, as a sentence."""
    request = jobs.request(job.path, jobs.SERVE)
    if engine_in(job) == VLLM:
        return f"vLLM serves {request.get('folder')} with its own kernels, so its outputs can differ."
    name = Path(str(request.get("file"))).name
    return f"llama.cpp serves {name}, which is rounded differently from the trained model, so its outputs can differ."


def requests(job: Run, values: Mapping[str, Any]) -> dict[str, str]:
    """A request to a running server with these values, with `curl` and in `python` with the openai package. Both read
    the token from its file, so that no command line contains it. Empty until the server answers."""
    address = job.progress().get("address") if job.state == "running" else None
    if not address:
        return {}
    path, call, text = "completions", "completions", "text"
    if "messages" in values:
        path, call, text = "chat/completions", "chat.completions", "message.content"
    body = {"model": jobs.request(job.path, jobs.SERVE).get("name"), **values}
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    known = {name: value for name, value in body.items() if name not in NOT_OF_OPENAI}
    if others := {name: value for name, value in body.items() if name in NOT_OF_OPENAI}:
        known["extra_body"] = others
    token = str(job.path / TOKEN)
    return {
        "curl": CURL.format(file=shlex.quote(token), url=f"{address}/{path}", data=data),
        "python": PYTHON.format(
            url=literal(address), file=literal(token), call=call, arguments=arguments(known), text=text
        ),
    }


# Fields of both servers that are no arguments of the openai package.
NOT_OF_OPENAI = ("chat_template_kwargs", "top_k", "min_p", "repetition_penalty")
# The header comes from stdin, because other users can read the arguments of programs.
CURL = """\
sed 's/^/Authorization: Bearer /' {file} | curl -sS -H @- -H 'Content-Type: application/json' {url} -d {data}
"""
PYTHON = """\
from openai import OpenAI
client = OpenAI(base_url={url}, api_key=open({file}).read())
print(client.{call}.create({arguments}).choices[0].{text})
"""
