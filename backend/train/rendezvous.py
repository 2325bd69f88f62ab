"""How the ranks of a run meet, and how they trust each other's objects.

Imports torch and psutil only: a copy of this file is in the run folder of a training with LLaMA-Factory.

Two parts of torch 2.13 accept anyone who can connect, and run the code of whoever does. The TCPStore of `env://`
listens on all interfaces without authentication. gloo takes the first connection with the right sequence number, which
counts from 0, for the rank that it expects, and object collectives unpickle what that rank sends. So the ranks of one
node meet in a file in a folder that only their user can enter, and all ranks sign the objects that they send with a
key that only this user can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import _env_rendezvous_handler, _rendezvous_handlers

FOLDER = "FOOTPLATE_RUN"  # environment variable: the run's folder, which all nodes share
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable, by torchrun: attempt_N/LOCAL_RANK/error.json
RANK_LOGS, STORE, KEY_FILE = "ranks", "store", ".key-"
DIGEST = "sha256"
KEY_BYTES = 32


class RunFolderMissing(RuntimeError):
    """A node does not see the run's folder; the message is for users."""


class ForeignObject(RuntimeError):
    """An object that no rank of this run has sent."""


def apply() -> None:
    """Use this module for every process group that is created with `env://`, torch's default."""
    _rendezvous_handlers["env"] = _meet


def _meet(
    url: str, timeout: timedelta = distributed_c10d.default_pg_timeout, **options: Any
) -> Iterator[tuple[Any, int, int]]:
    """torch's handler of env://, for ranks that may be on one node."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world == 1:
        store: Any = dist.HashStore()
    elif world == int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 0):
        store = dist.FileStore(str(store_file()), world)
    else:
        name_interface()
        store = next(_env_rendezvous_handler(url, timeout=timeout, **options))[0]
    store.set_timeout(timeout)
    _sign_objects(_shared_key(store, rank, world))
    yield store, rank, world
    raise RuntimeError("env:// was used for a second process group; the ranks of one start can rendezvous only once.")


def name_interface() -> None:
    """Set GLOO_SOCKET_IFNAME where gloo would listen on the loopback interface only: it listens at the address of the
    machine's host name, and in Debian's /etc/hosts that is 127.0.1.1."""
    with suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    interfaces = {
        each.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    }
    towards_master, outwards = _own_address(os.environ["MASTER_ADDR"]), _own_address("192.0.2.1")  # a reserved address
    names = [interfaces[address] for address in (towards_master, outwards) if address in interfaces]
    names += interfaces.values() if len(interfaces) == 1 else []
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def _own_address(host: str) -> str:
    """The address from which this machine would send to `host`, '' if it has no route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return ""


def store_file() -> Path:
    """The file in which the ranks of one node meet: a new one for each start, in a folder with mode 0700."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return Path(os.environ[ERROR_FILE]).parent.parent / STORE  # torchrun has just created this folder
    launcher = psutil.Process(os.getppid())
    folder = _run_folder() / RANK_LOGS / f"{launcher.pid}-{launcher.create_time():.0f}"
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / STORE


def _run_folder() -> Path:
    folder = Path(os.environ.get(FOLDER) or os.getcwd())
    return folder if folder.is_dir() else Path.cwd()  # a node of a Ray job is marked by a file of the run's folder


def _shared_key(store: Any, rank: int, world: int) -> bytes:
    """A key that rank 0 generates. The others read it from a file in the run's folder, because `store` may be open to
    everyone. Raises RunFolderMissing on all ranks if a node does not see the folder."""
    if world == 1:
        return secrets.token_bytes(KEY_BYTES)
    if rank == 0:
        descriptor, name = tempfile.mkstemp(prefix=KEY_FILE, dir=_run_folder())  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        store.set("footplate/key", Path(name).name.removeprefix(KEY_FILE))
    path = _run_folder() / f"{KEY_FILE}{Path(store.get('footplate/key').decode()).name}"
    key = b""
    with suppress(OSError):
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        store.set("footplate/missing", socket.gethostname())
    if store.add("footplate/met", 1) == world:
        store.set("footplate/all-met", "")
    store.wait(["footplate/all-met"])
    if rank == 0:
        path.unlink(missing_ok=True)
    if store.check(["footplate/missing"]):
        raise RunFolderMissing(
            f"launch.nnodes: {store.get('footplate/missing').decode()} does not see the run folder {_run_folder()} of "
            "rank 0: keep the runs on a file system that all nodes share, under the same path."
        )
    return key


def _sign_objects(key: bytes) -> None:
    """Replace the classes with which torch's object collectives pickle and unpickle."""

    class Pickler:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def dump(self, value: Any) -> None:
            data = pickle.dumps(value)
            self.file.write(hmac.digest(key, data, DIGEST) + data)

    class Unpickler:
        def __init__(self, file: BinaryIO) -> None:
            self.file = file

        def load(self) -> Any:
            signature, data = self.file.read(hashlib.new(DIGEST).digest_size), self.file.read()
            if not hmac.compare_digest(signature, hmac.digest(key, data, DIGEST)):
                raise ForeignObject(
                    "A process that does not belong to this run has taken the place of a rank. Nothing that it sent "
                    "was used. Another user of this machine or network interferes with the run."
                )
            return pickle.loads(data)

    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler
