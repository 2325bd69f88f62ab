"""Serves the page: `python -m webui [--host 127.0.0.1] [--port 7860] [--runs runs]`, or HOST, PORT, RUNS.

Imports: auth at once; server and gradio only after address and folder are validated, so that an error shows at once.
Exit codes: 0 stopped by the user, 2 not started.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import ipaddress
import os
import socket
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from webui import gradio_internals
from webui.auth import LOOPBACK, WILDCARD, Login, load_or_create_key

MIN_PASSWORD_LENGTH = 8
OTHER_FOLDER = "Set another folder with --runs or RUNS."


class StartupError(Exception):
    """Why the page cannot be served, and how to fix it."""


@dataclass(frozen=True)
class ServerOptions:
    """Where to serve, and the folder of the runs. An empty password disables the login."""

    host: str
    port: int
    runs: Path
    password: str
    hosts: tuple[str, ...]


def main(argv: list[str] | None = None, environment: MutableMapping[str, str] = os.environ) -> int:
    try:
        options = _parse_options(argv, environment)
        _remove_gradio_settings(environment)
        runs, listener = _runs_folder(options.runs), _listen(options.host, options.port)
        login = Login(options.password, load_or_create_key(runs)) if options.password else None
    except (StartupError, OSError) as error:
        sys.stderr.write(f"Footplate did not start. {error}\n")
        return 2
    server = _import_server()
    app = server.create_app(runs, bound=options.host, hosts=options.hosts, login=login)
    return _serve(app, listener, _url(options.host, listener), runs)


def _parse_options(argv: list[str] | None, environment: MutableMapping[str, str]) -> ServerOptions:
    """From the arguments, then the environment, then defaults. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m webui", description="Serve Footplate's web page.")
    parser.add_argument("--host", default=environment.get("HOST") or LOOPBACK[1], help="default: 127.0.0.1")
    parser.add_argument("--port", default=environment.get("PORT") or "7860", help="default: 7860; 0 picks a free port")
    parser.add_argument(
        "--runs", default=environment.get("RUNS") or "runs", help="folder that stores the runs; default: runs"
    )
    arguments = parser.parse_args(argv)
    if not arguments.port.isdecimal() or int(arguments.port) > 65535:
        raise StartupError(f"The port is {arguments.port!r}; it must be an integer from 0 to 65535.")
    password = environment.pop("FOOTPLATE_PASSWORD", "")  # runs must not inherit it
    if password and len(password) < MIN_PASSWORD_LENGTH:
        raise StartupError(f"FOOTPLATE_PASSWORD is too short: use at least {MIN_PASSWORD_LENGTH} characters.")
    if not password and not _is_loopback(arguments.host):
        raise StartupError(
            f"{arguments.host} is reachable from other machines, and everyone who can open the page can start "
            f"processes on this machine. Set FOOTPLATE_PASSWORD, or serve on {LOOPBACK[1]} and connect through "
            f"`ssh -L {arguments.port}:{LOOPBACK[1]}:{arguments.port}`."
        )
    hosts = tuple(environment.get("FOOTPLATE_HOSTS", "").replace(",", " ").split())
    if arguments.host in WILDCARD:
        hosts += (socket.gethostname(),)
    return ServerOptions(arguments.host, int(arguments.port), Path(arguments.runs), password, hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOOPBACK[0]


def _remove_gradio_settings(environment: MutableMapping[str, str]) -> None:
    """Settings meant for other Gradio apps must not open this one to the network. Raises StartupError."""
    if environment.get("GRADIO_VIBE_MODE"):
        raise StartupError("GRADIO_VIBE_MODE lets every visitor change files and run code on this machine: unset it.")
    for name in [name for name in environment if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
        del environment[name]
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"


def _runs_folder(runs: Path) -> Path:
    """The runs folder, created and resolved. Raises StartupError."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"The runs folder {runs} cannot be created: {error.strerror}. {OTHER_FOLDER}") from None
    if not os.access(runs, os.W_OK | os.X_OK):
        raise StartupError(f"The runs folder {runs} is not writable. {OTHER_FOLDER}")
    return runs.resolve()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, opened before the slow imports. Raises StartupError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise StartupError(f"The host {host!r} is not an address of this machine. Use 127.0.0.1.") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise StartupError(f"Port {port} on {host} cannot be used: {_reason(error)}. Set another port, "
                      f"such as {7861 if port == 7860 else 7860}, with --port or PORT.") from None  # fmt: skip
    return listener


def _reason(error: OSError) -> str:
    words = {
        errno.EADDRINUSE: "another program uses it, perhaps another Footplate server",
        errno.EACCES: "ports below 1024 require root",
    }
    return words.get(error.errno or 0, error.strerror or str(error))


def _url(host: str, listener: socket.socket) -> str:
    """The URL to open on this machine."""
    shown = {"0.0.0.0": LOOPBACK[1], "::": LOOPBACK[2]}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


def _import_server() -> Any:
    """webui.server with Gradio. Garbage collection is off meanwhile: imports create no garbage, and it costs time."""
    gc.disable()
    with gradio_internals.without_stub_files():
        importlib.import_module("gradio")
    gradio_internals.check_version()
    module = importlib.import_module("webui.server")
    gc.freeze()
    gc.enable()
    return module


class _Server(uvicorn.Server):
    """Prints its URL as soon as it accepts requests."""

    greeting = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        sys.stdout.write(self.greeting)
        sys.stdout.flush()


def _serve(app: Any, listener: socket.socket, address: str, runs: Path) -> int:
    server = _Server(
        uvicorn.Config(
            app,
            ws="none",  # the page uses no WebSockets
            log_level="warning",
            proxy_headers=False,  # otherwise any local program could forge the address that the login throttles
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    server.greeting = f"Footplate is at {address}\nRuns are stored in {runs}. Ctrl+C stops the server; runs continue.\n"
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
