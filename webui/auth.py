"""Who may talk to the page: one ASGI class around every route and websocket, and the login.

Floor 6. Imports nothing of ours. Without it any web page that the user visits could start processes here:
a foreign name that resolves to this machine (Host), a form or script of a foreign page (Origin, fetch metadata),
and, beyond this machine, anybody at all (login).
"""

from __future__ import annotations

import hashlib
import hmac
import html
import ipaddress
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARD = ("0.0.0.0", "::")
MOST_BODY_BYTES = 4 * 1024 * 1024
SESSION_SECONDS = 30 * 24 * 3600
FREE_TRIES = 5
LONGEST_WAIT_SECONDS = 300
MOST_ADDRESSES = 1000

# Gradio compiles its templates with `new Function` and puts scripts and styles inline; nothing comes from elsewhere.
POLICY = "; ".join(
    (
        "default-src 'self' data: blob:",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # Not no-referrer: with it browsers send `Origin: null` when the login form is posted.
    (b"referrer-policy", b"same-origin"),
)


class Login:
    """A password, and the signed cookie that stands for it. Sessions outlive the process: only the key is kept."""

    def __init__(self, password: str, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self._password = password.encode()
        # Another password, another key: changing it ends every session.
        self._key = hmac.digest(key, self._password, "sha256")
        self._clock = clock
        self._failed: dict[str, tuple[int, float]] = {}
        # Cookies do not know ports: two pages on one machine must not overwrite each other's.
        self.cookie = "footplate_" + hashlib.sha256(key).hexdigest()[:8]

    def ticket(self) -> str:
        """A cookie's value: when it ends (unix seconds), and the signature of that."""
        until = str(int(self._clock()) + SESSION_SECONDS)
        return f"{until}.{self._sign(until)}"

    def valid(self, ticket: str) -> bool:
        """Whether `ticket` was signed here and has not ended."""
        until, _, signature = ticket.partition(".")
        good = hmac.compare_digest(self._sign(until).encode(), signature.encode())
        return good and until.isdecimal() and int(until) > self._clock()

    def wait_seconds(self, address: str) -> int:
        """Seconds until `address` may try again; 0 is now."""
        _, until = self._failed.get(address, (0, 0.0))
        return max(0, math.ceil(until - self._clock()))

    def enter(self, address: str, password: str) -> bool:
        """Whether `password` is right. A wrong one makes `address` wait: twice as long each time, after a few."""
        if hmac.compare_digest(hashlib.sha256(password.encode()).digest(), hashlib.sha256(self._password).digest()):
            self._failed.pop(address, None)
            return True
        failed = self._failed.pop(address, (0, 0.0))[0] + 1
        wait = min(LONGEST_WAIT_SECONDS, 2 ** min(failed - FREE_TRIES, 16)) if failed >= FREE_TRIES else 0
        self._failed[address] = (failed, self._clock() + wait)
        while len(self._failed) > MOST_ADDRESSES:
            self._failed.pop(next(iter(self._failed)))
        return False

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()


def key_in(folder: Path) -> bytes:
    """The secret of this runs folder, made at first use, readable by its owner alone. Raises OSError."""
    path = folder / ".key"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if key := path.read_bytes():
            return key
        path.unlink()  # an earlier start was cut off before it wrote
        return key_in(folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))
    return path.read_bytes()


def known_hosts(bound: str, more: Iterable[str] = ()) -> frozenset[str]:
    """The names that the page answers to: this machine's own, the one it is bound to, and what the user allows."""
    names = (h.lower() if _is_address(h) else host_name(h) for h in (*LOOPBACK, bound, *more))
    return frozenset(name for name in names if name)


class Guard:
    """Lets through what a page of this server, or a program of its user, asks; refuses the rest with a sentence.

    Ports are not compared: behind `ssh -L` the browser's is another. What counts is that Origin and Host agree.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], login: Login | None = None) -> None:
        self.app = app
        self.hosts = hosts
        self.login = login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        guarded = _with_headers(send)
        refused = self._foreign(scope, headers) or _oversized(scope, headers)
        if refused is None and self.login is not None:
            refused = await self._stranger(scope, receive, headers, self.login)
        if refused is None:
            await self.app(scope, receive, guarded)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refused(scope, receive, guarded)

    def _foreign(self, scope: Scope, headers: Headers) -> Response | None:
        """The refusal of what another name, or another page, asks."""
        named = headers.getlist("host")
        name = host_name(named[0]) if len(named) == 1 else ""
        if not self._known(name):
            return refusal(
                421,
                f"This page does not answer to the name {name[:80]!r}. Open it as http://127.0.0.1 with its port, or "
                "start it with FOOTPLATE_HOSTS set to that name.",
            )
        origins = headers.getlist("origin")
        if any(not _same(origin, named[0]) for origin in origins):
            return refusal(403, "Another page may not use this one.")
        site = headers.get("sec-fetch-site", "none")
        visit = scope["type"] == "http" and scope["method"] in SAFE and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("same-origin", "none") and not visit:
            return refusal(403, "Another page may not use this one.")
        return None

    def _known(self, name: str) -> bool:
        if name in self.hosts:
            return True
        # Bound to every address: nobody can make a browser call this machine by an address that is not its own.
        return any(h in self.hosts for h in WILDCARD) and _is_address(name)

    async def _stranger(self, scope: Scope, receive: Receive, headers: Headers, login: Login) -> Response | None:
        """The answer to somebody who has not logged in; None for who has."""
        inside = login.valid(_cookies(headers).get(login.cookie, ""))
        if scope["type"] == "http" and scope["path"] == "/login":
            return await _login(Request(scope, receive), login, inside)
        if inside:
            return None
        if scope["type"] == "http" and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            back = scope["path"].lstrip("/") + (
                f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
            )
            up = "../" * (scope["path"].count("/") - 1)
            return RedirectResponse(f"{up or './'}login?next={quote(back, safe='')}", 303)
        return refusal(401, "Log in first: open this page in a browser.")


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as every route answers it."""
    body = orjson.dumps({"error": sentence})
    return Response(body, status, media_type="application/json", headers=headers)


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets; '' if it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises for a port that is no number
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host and "@" not in host else ""


def _same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _oversized(scope: Scope, headers: Headers) -> Response | None:
    if scope["type"] != "http" or scope["method"] in SAFE:
        return None
    length = headers.get("content-length", "0" if "transfer-encoding" not in headers else "")
    if not length.isdecimal():
        return refusal(411, "Send the length of the body.")
    if int(length) > MOST_BODY_BYTES:
        return refusal(413, f"That is more than {MOST_BODY_BYTES // 1024**2} MB.")
    return None


def _with_headers(send: Send) -> Send:
    """`send`, with the page's headers on every answer and without leave for other origins, which Gradio gives."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message.get("headers", ()) if not _replaced(pair[0].lower())]
            message = {**message, "headers": [*kept, *HEADERS]}
        await send(message)

    return sending


def _replaced(name: bytes) -> bool:
    return name.startswith(b"access-control-") or any(name == own for own, _ in HEADERS)


def _cookies(headers: Headers) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}


async def _login(request: Request, login: Login, inside: bool) -> Response:
    """The login page; what it posts; and HEAD, by which it asks whether the cookie arrived after all."""
    back = request.query_params.get("next", "").lstrip("/\\")
    back = "./" + quote(back, safe="/?&=%+,:;@~!$'()*-._")
    if request.method == "HEAD":
        return Response(status_code=204 if inside else 200)  # an error would stand in the browser's console
    if inside:
        return RedirectResponse(back, 303)
    if request.method != "POST":
        return _login_page(back)
    address = request.client.host if request.client else ""
    if wait := login.wait_seconds(address):
        page = _login_page(back, f"Too many wrong passwords. Try again in {wait} s.", 429)
        page.headers["retry-after"] = str(wait)
        return page
    fields: dict[str, list[Any]] = parse_qs((await request.body()).decode("utf-8", "replace"))
    if not login.enter(address, str(fields.get("password", [""])[0])):
        return _login_page(back, "That is not the password.", 401)
    answer = RedirectResponse(back, 303)
    answer.set_cookie(login.cookie, login.ticket(), SESSION_SECONDS, httponly=True, samesite="strict")
    return answer


def _login_page(back: str, wrong: str = "", status: int = 200) -> HTMLResponse:
    alert = f'<p role="alert">{html.escape(wrong)}</p>' if wrong else ""
    page = LOGIN.replace("{wrong}", alert).replace("{back}", html.escape(back))
    return HTMLResponse(page, status, headers={"cache-control": "no-store"})


# A link in a message arrives without the cookie (SameSite=Strict) although one is there: the page asks once more,
# now from here, and goes on by itself.
LOGIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Footplate: log in</title>
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">
<style>
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;display:grid;place-content:center;min-height:90vh;margin:0;
  background:light-dark(#f8fafc,#0b1120);color:light-dark(#0f172a,#e2e8f0)}
form{width:min(20rem,86vw);display:grid;gap:.75rem}
h1{font-size:1.25rem;margin:0}
label{display:grid;gap:.25rem}
input,button{font:inherit;padding:.5rem .75rem;border-radius:6px;border:1px solid light-dark(#94a3b8,#475569)}
button{background:#2563eb;border-color:#2563eb;color:#fff;cursor:pointer}
p{margin:0;color:light-dark(#b91c1c,#fca5a5)}
</style></head><body>
<form method="post" data-back="{back}">
<h1>Footplate</h1>
<input name="username" value="footplate" autocomplete="username" hidden>
<label>Password <input type="password" name="password" autocomplete="current-password" required autofocus></label>
{wrong}
<button>Log in</button>
</form>
<script>
fetch(location.pathname, {method: "HEAD"}).then(answer => {
  if (answer.status === 204) location.replace(document.querySelector("form").dataset.back);
});
</script>
</body></html>
"""
