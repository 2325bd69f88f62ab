"""Serves the page: `python -m webui [--host 127.0.0.1] [--port 7860] [--runs runs]`, or HOST, PORT, RUNS.

Floor 6. Imports: guard at once; server and gradio when address and folder are known to be good, so that what is
wrong is said in a moment. Exit codes: 0 ended by the user, 2 refused with a sentence.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import inspect
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from webui.auth import LOOPBACK, WILDCARD, Login, key_in

SHORTEST_PASSWORD = 8


class Refused(Exception):
    """Why the page is not served, with the way out."""


@dataclass(frozen=True)
class Wanted:
    """Where to serve, and from which folder. An empty password asks for none."""

    host: str
    port: int
    runs: Path
    password: str
    hosts: tuple[str, ...]


def main(argv: list[str] | None = None, environment: MutableMapping[str, str] = os.environ) -> int:
    try:
        wanted = _wanted(argv, environment)
        _calm(environment)
        runs, listener = _folder(wanted.runs), _listen(wanted.host, wanted.port)
        login = Login(wanted.password, key_in(runs)) if wanted.password else None
    except (Refused, OSError) as error:
        sys.stderr.write(f"Footplate is not started. {error}\n")
        return 2
    server = _server_module()
    app = server.make(runs, bound=wanted.host, hosts=wanted.hosts, login=login)
    return _serve(app, listener, _address(wanted.host, listener), runs)


def _wanted(argv: list[str] | None, environment: MutableMapping[str, str]) -> Wanted:
    """Arguments, else environment, else defaults. Raises Refused."""
    parser = argparse.ArgumentParser(prog="python -m webui", description="The page of Footplate.")
    parser.add_argument("--host", default=environment.get("HOST") or LOOPBACK[1], help="default: 127.0.0.1")
    parser.add_argument("--port", default=environment.get("PORT") or "7860", help="default: 7860; 0 takes a free one")
    parser.add_argument("--runs", default=environment.get("RUNS") or "runs", help="where runs are kept; default: runs")
    arguments = parser.parse_args(argv)
    if not arguments.port.isdecimal() or int(arguments.port) > 65535:
        raise Refused(f"PORT is {arguments.port!r}: it must be a number from 0 to 65535.")
    password = environment.pop("FOOTPLATE_PASSWORD", "")  # no run needs to know it
    if password and len(password) < SHORTEST_PASSWORD:
        raise Refused(f"FOOTPLATE_PASSWORD is too short: take at least {SHORTEST_PASSWORD} characters.")
    if not password and not _is_loopback(arguments.host):
        raise Refused(
            f"{arguments.host} can be reached from other machines, and whoever reaches the page can start processes "
            f"here. Set FOOTPLATE_PASSWORD; or keep HOST at {LOOPBACK[1]} and reach it by "
            f"`ssh -L {arguments.port}:{LOOPBACK[1]}:{arguments.port}`."
        )
    hosts = tuple(environment.get("FOOTPLATE_HOSTS", "").replace(",", " ").split())
    if arguments.host in WILDCARD:
        hosts += (socket.gethostname(),)
    return Wanted(arguments.host, int(arguments.port), Path(arguments.runs), password, hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOOPBACK[0]


def _calm(environment: MutableMapping[str, str]) -> None:
    """What stands in the environment for other Gradio apps must not open this one. Raises Refused."""
    if environment.get("GRADIO_VIBE_MODE"):
        raise Refused("GRADIO_VIBE_MODE lets a visitor change files and run code here: unset it.")
    for name in [name for name in environment if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
        del environment[name]
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"


def _folder(runs: Path) -> Path:
    """The runs folder, made and resolved. Raises Refused."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"The folder for runs, {runs}, cannot be made: {error.strerror}. Set RUNS to another.") from None
    if not os.access(runs, os.W_OK | os.X_OK):
        raise Refused(f"The folder for runs, {runs}, cannot be written to. Set RUNS to another.")
    return runs.resolve()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow begins. Raises Refused."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise Refused(f"HOST is {host!r}: this machine has no such address. Take 127.0.0.1.") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Refused(f"Port {port} of {host} cannot be used: {_reason(error)}. Take another: "
                      f"`PORT={7861 if port == 7860 else 7860} make run`.") from None  # fmt: skip
    return listener


def _reason(error: OSError) -> str:
    words = {
        errno.EADDRINUSE: "another program, perhaps another Footplate, serves it",
        errno.EACCES: "ports below 1024 need root's rights",
    }
    return words.get(error.errno or 0, error.strerror or str(error))


def _address(host: str, listener: socket.socket) -> str:
    """The URL to open on this machine."""
    shown = {"0.0.0.0": LOOPBACK[1], "::": LOOPBACK[2]}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


def _server_module() -> Any:
    """webui.server with Gradio, imported quickly: nothing that is imported is garbage, so nobody looks for any."""
    gc.disable()
    with without_stubs():
        importlib.import_module("gradio")
    module = importlib.import_module("webui.server")
    gc.freeze()
    gc.enable()
    return module


@contextmanager
def without_stubs() -> Iterator[None]:
    """Half the time of `import gradio`, and no writing into its package.

    At import each component reads and parses its own source to write a .pyi file beside it
    (gradio.component_meta.create_or_modify_pyi), and lets be where there is no source. Inside this block
    there is none. In a Gradio that works otherwise this changes nothing.
    """
    real = inspect.getfile

    def getfile(thing: Any) -> str:
        if type(thing).__name__ == "ComponentMeta" or getattr(thing, "__name__", "") == "BlocksEvents":
            raise OSError("no stub is wanted")
        return real(thing)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = real


class _Server(uvicorn.Server):
    """Says where it is as soon as it answers."""

    hello = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        sys.stdout.write(self.hello)
        sys.stdout.flush()


def _serve(app: Any, listener: socket.socket, address: str, runs: Path) -> int:
    server = _Server(
        uvicorn.Config(
            app,
            ws="none",  # nothing here speaks it
            log_level="warning",
            proxy_headers=False,  # else any local program chooses the address that the login throttles
            server_header=False,
            timeout_graceful_shutdown=2,
        )
    )
    server.hello = f"Footplate is at {address}\nRuns are kept in {runs}. Ctrl+C ends the page; runs go on without it.\n"
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
