"""Serves the page: `python -m webui [--host 127.0.0.1] [--port 7860] [--runs runs]`, or HOST, PORT, RUNS.

Everyone who opens the page has to log in, even on this machine: with the token in the printed URL, or with
FOOTPLATE_PASSWORD. Exit codes: 0 stopped by the user, 2 not started.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import functools
import gc
import importlib
import ipaddress
import logging
import os
import socket
import ssl
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from backend import paths
from backend.runs import files, ownership, webhook
from webui import gradio_internals
from webui.auth import LOOPBACK, WILDCARD
from webui.connections import Listener, MessageLimit, TimedProtocol, limit_handshakes
from webui.login import TOKEN, Login, new_token

MIN_PASSWORD_LENGTH = 8
OTHER_FOLDER = "Set another folder with --runs or RUNS."


class StartupError(Exception):
    """Why the page cannot be served, and how to fix it."""


@dataclass(frozen=True)
class ServerOptions:
    """Where to serve the page, and the runs folder. Without a password, a token is generated, unless `login` is off."""

    host: str
    port: int
    runs: Path
    password: str
    login: bool
    hosts: tuple[str, ...]
    certfile: str
    keyfile: str


def main(argv: list[str] | None = None, environment: MutableMapping[str, str] = os.environ) -> int:
    try:
        options = _parse_options(argv, environment)
        paths.settle(environment)
        _remove_gradio_settings(environment)
        _check_certificate(options)
        if problem := webhook.problem():
            raise StartupError(f"{problem} Correct it or unset it.")
        runs, listener = _runs_folder(options.runs), _listen(options.host, options.port)
        token = new_token() if options.login and not options.password else ""
        login = Login(options.password or token, runs, is_token=bool(token)) if options.login else None
    except (StartupError, OSError) as error:
        sys.stderr.write(f"Footplate did not start. {error}\n")
        return 2
    server = _import_server()
    app = server.create_app(runs, bound=options.host, hosts=options.hosts, login=login)
    return _serve(app, listener, options, runs, token)


def _parse_options(argv: list[str] | None, environment: MutableMapping[str, str]) -> ServerOptions:
    """The options from the arguments, then the environment, then defaults. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m webui", description="Serve Footplate's web page.")
    parser.add_argument("--host", default=environment.get("HOST") or LOOPBACK[1], help="default: 127.0.0.1")
    parser.add_argument("--port", default=environment.get("PORT") or "7860", help="default: 7860; 0 picks a free port")
    parser.add_argument(
        "--runs", default=environment.get("RUNS") or "runs", help="folder that stores the runs; default: runs"
    )
    parser.add_argument("--no-login", action="store_true", help="no token and no password; on loopback only")
    parser.add_argument("--certfile", default="", help="TLS certificate (PEM): serves https")
    parser.add_argument("--keyfile", default="", help="private key of --certfile, unless that file contains it")
    arguments = parser.parse_args(argv)
    if not arguments.port.isdecimal() or int(arguments.port) > 65535:
        raise StartupError(f"The port is {arguments.port!r}; it must be an integer from 0 to 65535.")
    password = _password(environment)
    if password and arguments.no_login:
        raise StartupError("A password and --no-login contradict each other: remove one of them.")
    if not password and not _is_loopback(arguments.host):
        raise StartupError(
            f"{arguments.host} is reachable from other machines, and everyone who can open the page can start "
            "processes on this machine. Set FOOTPLATE_PASSWORD_FILE or FOOTPLATE_PASSWORD, or serve on "
            f"{LOOPBACK[1]} and connect through `ssh -L {arguments.port}:{LOOPBACK[1]}:{arguments.port}`."
        )
    hosts = tuple(environment.get("FOOTPLATE_HOSTS", "").replace(",", " ").split())
    if arguments.host in WILDCARD:
        hosts += (socket.gethostname(),)
    return ServerOptions(
        arguments.host, int(arguments.port), Path(arguments.runs), password, not arguments.no_login, hosts,
        arguments.certfile, arguments.keyfile,
    )  # fmt: skip


def _password(environment: MutableMapping[str, str]) -> str:
    """The password; '' if none is set. It is removed from the environment, because runs inherit the environment. Raises
    StartupError."""
    name, password = "FOOTPLATE_PASSWORD", environment.pop("FOOTPLATE_PASSWORD", "")
    if file := environment.pop("FOOTPLATE_PASSWORD_FILE", ""):
        if password:
            raise StartupError("FOOTPLATE_PASSWORD and FOOTPLATE_PASSWORD_FILE are both set: unset one of them.")
        try:
            name, password = file, files.read_private_line(Path(file), "FOOTPLATE_PASSWORD_FILE")
        except files.PrivateFileError as error:
            raise StartupError(str(error)) from None
    if (password or file) and len(password) < MIN_PASSWORD_LENGTH:
        raise StartupError(f"The password in {name} is too short: use at least {MIN_PASSWORD_LENGTH} characters.")
    return password


def _check_certificate(options: ServerOptions) -> None:
    """Raises StartupError if the certificate or its key cannot be used."""
    if not options.certfile:
        if options.keyfile:
            raise StartupError("--keyfile needs --certfile.")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.certfile, options.keyfile or None)
    except OSError as error:
        files = f"{options.certfile} with key {options.keyfile}" if options.keyfile else options.certfile
        reason = error.strerror or error
        raise StartupError(
            f"The TLS certificate {files} cannot be used: {reason}. Check --certfile and --keyfile."
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOOPBACK[0]


def _remove_gradio_settings(environment: MutableMapping[str, str]) -> None:
    """Refuse settings that are meant for other Gradio apps and would open Footplate to the network. Raises
    StartupError."""
    if environment.get("GRADIO_VIBE_MODE"):
        raise StartupError("GRADIO_VIBE_MODE lets every visitor change files and run code on this machine: unset it.")
    for name in [name for name in environment if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
        del environment[name]
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"


def _runs_folder(runs: Path) -> Path:
    """The runs folder, created and resolved. Raises StartupError, for example if other users can change it."""
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise StartupError(f"The runs folder {runs} is not a folder. {OTHER_FOLDER}") from None
    except OSError as error:
        raise StartupError(f"The runs folder {runs} cannot be created: {error.strerror}. {OTHER_FOLDER}") from None
    if not os.access(runs, os.W_OK | os.X_OK):
        raise StartupError(f"The runs folder {runs} is not writable. {OTHER_FOLDER}")
    if problem := ownership.folder_problem(runs):
        raise StartupError(problem)
    return runs.resolve()


def _listen(host: str, port: int) -> Listener:
    """A listening socket, opened before the slow imports. Raises StartupError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise StartupError(f"The host {host!r} is not an address of this machine. Use 127.0.0.1.") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    # With IPPROTO_TCP, asyncio sends small responses at once (TCP_NODELAY); without it, some wait 40 ms for an ACK.
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


def _url(options: ServerOptions, listener: socket.socket, token: str) -> str:
    """The URL to open on this machine."""
    shown = {"0.0.0.0": LOOPBACK[1], "::": LOOPBACK[2]}.get(options.host, options.host)
    scheme, query = "https" if options.certfile else "http", f"/?{TOKEN}={token}" if token else ""
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}{query}"


def _import_server() -> Any:
    """Import Gradio and webui.server while garbage collection is off: imports create no garbage, and collecting takes
    time."""
    gc.disable()
    with gradio_internals.without_stub_files():
        importlib.import_module("gradio")
    gradio_internals.check_version()
    module = importlib.import_module("webui.server")
    gc.freeze()
    gc.enable()
    return module


class _Server(uvicorn.Server):
    """A server that prints its URL as soon as it accepts requests."""

    greeting = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl:
            limit_handshakes(asyncio.get_running_loop())
        await super().startup(sockets=sockets)
        sys.stdout.write(self.greeting)
        sys.stdout.flush()


def _serve(app: Any, listener: Listener, options: ServerOptions, runs: Path, token: str) -> int:
    server = _Server(
        uvicorn.Config(
            app,
            http=functools.partial(TimedProtocol, listener),  # type: ignore[arg-type]
            ws="none",  # the page uses no WebSockets
            log_level="warning",
            proxy_headers=False,  # otherwise any local program could forge the address that the login throttles
            server_header=False,
            timeout_graceful_shutdown=2,
            ssl_certfile=options.certfile or None,
            ssl_keyfile=options.keyfile or None,
        )
    )
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(MessageLimit())
    url = _url(options, listener, token)
    server.greeting = f"Footplate is at {url}\nRuns are stored in {runs}. Ctrl+C stops the server; runs continue.\n"
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
