"""Login: one password, or the token in the printed URL, exchanged for a session that the server can end.

A session is an empty file in the runs folder, so it survives a restart of the server; its modification time is its last
use. The file's name is a keyed hash of the cookie, so the name does not let anyone log in.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from backend.runs import ownership

SESSION_SECONDS = 30 * 24 * 3600  # after the login
IDLE_SECONDS = 7 * 24 * 3600  # after the last request
TOUCH_SECONDS = 60  # the last request is recorded at most this often
MAX_SESSIONS = 100
SESSIONS = ".sessions"  # folder in the runs folder
SESSION = re.compile(r"[0-9]{1,12}\.[A-Za-z0-9_-]{43}")
TOKEN = "token"  # query parameter of the printed URL

FREE_ATTEMPTS = 5
MAX_WAIT_SECONDS = 300
MAX_ADDRESSES = 1000
FAILURES_OF_ALL = 50  # this many wrong passwords within FAILURES_SECONDS slow down every address
FAILURES_SECONDS = 600
WAIT_OF_ALL_SECONDS = 5


class Throttle:
    """When an address may try a password: after a few wrong ones, it has to wait twice as long each time; after many
    wrong ones from all addresses together, every address that has not logged in before has to wait a few seconds
    between attempts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}
        self._of_all: deque[float] = deque(maxlen=FAILURES_OF_ALL)
        self._known: dict[str, None] = {}  # networks that have logged in

    def wait_seconds(self, address: str) -> int:
        """Seconds until `address` may try again; 0 means now."""
        now, name = self._clock(), network(address)
        until = self._failures.get(name, (0, 0.0))[1]
        many = len(self._of_all) == FAILURES_OF_ALL and self._of_all[0] > now - FAILURES_SECONDS
        if many and name not in self._known:
            until = max(until, self._of_all[-1] + WAIT_OF_ALL_SECONDS)
        return max(0, math.ceil(until - now))

    def record(self, address: str, correct: bool) -> None:
        """Count an attempt. A correct password ends the wait for its address."""
        now, name = self._clock(), network(address)
        failed = self._failures.pop(name, (0, 0.0))[0] + 1
        if correct:
            self._known[name] = None
        else:
            wait = min(MAX_WAIT_SECONDS, 2 ** min(failed - FREE_ATTEMPTS, 16)) if failed >= FREE_ATTEMPTS else 0
            self._failures[name] = (failed, now + wait)
            self._of_all.append(now)
        for table in (self._failures, self._known):
            while len(table) > MAX_ADDRESSES:
                table.pop(next(iter(table)))


class Sessions:
    """The sessions in a folder, which is created with the first one. `secret` signs them."""

    def __init__(self, folder: Path, secret: bytes, clock: Callable[[], float]) -> None:
        self.folder = folder
        self._secret = secret
        self._clock = clock

    def create(self) -> str:
        """A cookie value: when the session expires (Unix seconds), and a random number. Raises OSError."""
        session = f"{int(self._clock()) + SESSION_SECONDS}.{secrets.token_urlsafe(32)}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._delete_oldest(MAX_SESSIONS - 1)
        path = self._path(session)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.utime(path, (self._clock(),) * 2)
        return session

    def is_valid(self, session: str) -> bool:
        """Whether `session` was created here with this secret, is in use, and was not ended."""
        now = self._clock()
        if not SESSION.fullmatch(session) or int(session.partition(".")[0]) <= now:
            return False
        path = self._path(session)
        with suppress(OSError):
            idle = now - path.stat().st_mtime
            if idle > IDLE_SECONDS:
                path.unlink()
                return False
            if idle > TOUCH_SECONDS:
                os.utime(path, (now, now))
            return True
        return False

    def end(self, session: str) -> None:
        """End the session for everyone who has its cookie."""
        if SESSION.fullmatch(session):
            self._path(session).unlink(missing_ok=True)

    def _delete_oldest(self, keep: int) -> None:
        with suppress(FileNotFoundError):  # another server with this folder may delete it too
            found = sorted(self.folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
            for oldest in found[: max(0, len(found) - keep)]:
                oldest.unlink()

    def _path(self, session: str) -> Path:
        return self.folder / hmac.new(self._secret, session.encode(), "sha256").hexdigest()


class Login:
    """The password or token, and the sessions of those who know it. `is_token`: the password is a token, generated for
    this start."""

    def __init__(
        self, password: str, folder: Path, is_token: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises OSError if the key in `folder` cannot be read or created."""
        key = load_or_create_key(folder)
        self.is_token = is_token
        self._password = password
        # The password signs the sessions, so changing it ends all of them. A token does not sign them: each restart of
        # the server makes a new token, and pages stay logged in.
        self.sessions = Sessions(
            folder / SESSIONS, hmac.digest(key, b"" if is_token else password.encode(), "sha256"), clock
        )
        self.throttle = Throttle(clock)
        # Cookies ignore ports: two servers on one machine must not overwrite each other's cookie.
        self.cookie = "footplate_" + hashlib.sha256(key).hexdigest()[:8]

    def check_password(self, address: str, password: str) -> bool:
        """Whether `password` is correct; counts the attempt. The caller has asked the throttle."""
        correct = _equal(password, self._password)
        self.throttle.record(address, correct)
        return correct

    def is_token_valid(self, token: str) -> bool:
        """Whether this is the token in the printed URL. It is too long to guess, so attempts are not counted, and the
        URL always works."""
        return self.is_token and _equal(token, self._password)


def _equal(one: str, other: str) -> bool:
    digests = (hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (one, other))
    return hmac.compare_digest(*digests)


def network(address: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 network of an IPv6 address, which one host may have."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)


def new_token() -> str:
    """A token for one start of the server: 192 random bits."""
    return secrets.token_urlsafe(24)


def load_or_create_key(folder: Path) -> bytes:
    """The secret key of this runs folder, created on first use and readable only by its owner. Raises OSError, for
    example if another user made the key or can read it, and so could forge sessions."""
    path = folder / ".key"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if key := _read_key(path):
            return key
        path.unlink()  # an earlier start was killed before it wrote the key
        return load_or_create_key(folder)
    key = secrets.token_bytes(32)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
    return key


def _read_key(path: Path) -> bytes:
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
        if not private or status.st_uid not in ownership.trusted_owners(path.parent):
            raise OSError(f"The key {path} is not protected from other users, who could log in with it. Delete it.")
        return file.read()
